"""The dtypes as users name them: ``mt.float32``, ``mt.bfloat16``, …

A dtype of an array (``x.dtype``) is a ``numpy.dtype``, which every library around arrays understands. As a *name* it
has one flaw: NumPy takes ``None`` for its default dtype, so that ``numpy.dtype("float64") == None`` is true, and a
table without an answer seems to answer float64. The names are therefore objects of their own, equal to the dtype that
they name and to nothing else.
"""

from __future__ import annotations

import builtins
from operator import attrgetter
from typing import Any

import ml_dtypes
import numpy as np

from .errors import ArgumentError

_DELEGATED = "alignment byteorder char hasobject isbuiltin isnative itemsize kind name newbyteorder num str type"


class DType:
    """A dtype by its name: ``mt.float32`` and its like.

    It is equal to the ``numpy.dtype`` that it names and hashes as that does, so that both find the same entry of a
    dict; NumPy takes it wherever it takes a dtype. Of a dtype's attributes it has those that say something of a number
    (``itemsize``, ``kind``, …), none of those that would make it look like an array (``shape``, ``ndim``).

    Attributes
    ----------
    dtype : numpy.dtype
        The NumPy dtype of this name. NumPy looks for this attribute.

    Examples
    --------
    >>> mt.float32, str(mt.float32), mt.float32.itemsize
    (meshtape.float32, 'float32', 4)
    >>> mt.zeros(2, dtype=mt.float32).dtype == mt.float32, mt.float64 == None
    (True, False)
    """

    __slots__ = ("dtype",)

    dtype: np.dtype

    def __init__(self) -> None:
        raise ArgumentError("DType() is no constructor: the dtypes are meshtape.float32, meshtape.int8, …")

    # Libraries ask isinstance(dtype, numpy.dtype) before they look at one (numpy.isdtype says False without it).
    @property
    def __class__(self) -> builtins.type:  # type: ignore[override]
        return np.dtype

    def __eq__(self, other: object) -> builtins.bool:
        return self is other or (other is not None and self.dtype == other)

    def __hash__(self) -> int:
        return hash(self.dtype)

    def __repr__(self) -> builtins.str:
        return f"meshtape.{self.dtype.name}"

    def __str__(self) -> builtins.str:
        return self.dtype.name

    def __copy__(self) -> DType:
        return self

    def __deepcopy__(self, memo: Any) -> DType:
        return self

    def __reduce__(self) -> Any:
        return named, (self.dtype.name,)


for _name in _DELEGATED.split():
    setattr(DType, _name, property(attrgetter(f"dtype.{_name}"), doc=f"That of ``numpy.dtype``, ``{_name}``."))

BY_NAME: dict[builtins.str, DType] = {}
"""The dtype objects by name."""


def named(name: builtins.str) -> DType:
    """The object called ``name``; ``KeyError`` where there is none."""
    return BY_NAME[name]


def _of(scalar: Any) -> DType:
    made = object.__new__(DType)
    made.dtype = np.dtype(scalar)
    return BY_NAME.setdefault(made.dtype.name, made)


bool = _of(np.bool_)
int8, int16, int32, int64 = map(_of, (np.int8, np.int16, np.int32, np.int64))
uint8, uint16, uint32, uint64 = map(_of, (np.uint8, np.uint16, np.uint32, np.uint64))
float16, float32, float64 = map(_of, (np.float16, np.float32, np.float64))
complex64, complex128 = map(_of, (np.complex64, np.complex128))
bfloat16, float8_e4m3fn, float8_e5m2 = map(_of, (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))

__all__ = ["DType", *BY_NAME]
