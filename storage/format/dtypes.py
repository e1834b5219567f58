"""One table of element types: their NumPy, safetensors and Zarr names, and their sizes.

Every format module looks names up here and nowhere else, so a dtype is added by one row. The order of the rows is the
order of safetensors' own enumeration, which its writers sort by.

>>> safetensors_name(np.dtype(ml_dtypes.float8_e4m3fn))
'F8_E4M3'
>>> by_name("bfloat16").itemsize
2
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from ...arrays.core.errors import CheckpointDTypeError


@dataclass(frozen=True, slots=True)
class StoredDType:
    """One element type. ``dtype`` is None where NumPy cannot hold it as it is stored; ``name`` is ours and Zarr's."""

    safetensors: str | None
    bits: int
    name: str | None
    dtype: np.dtype | None


@lru_cache(maxsize=256)
def little(dtype: np.dtype) -> np.dtype:
    """The little-endian form of ``dtype``: how every element is stored.

    Where that is the machine's own, it is NumPy's one object for the type: of another that is equal, a buffer says
    ``<f`` where readers of buffers expect ``f``, and whoever asks which of two dtypes it has must compare them.
    """
    dtype = np.dtype(dtype)
    return np.dtype(dtype.type) if sys.byteorder == "little" else dtype.newbyteorder("<")


def _row(safetensors: str | None, bits: int, scalar: type | None = None) -> StoredDType:
    dtype = None if scalar is None else little(np.dtype(scalar))
    return StoredDType(safetensors, bits, None if dtype is None else dtype.name, dtype)


# Rank in this table = alignment rank in a safetensors file (low to high). Complex128 exists in Zarr alone.
ROWS: tuple[StoredDType, ...] = (
    _row("BOOL", 8, np.bool_),
    _row("F4", 4),
    _row("F6_E2M3", 6),
    _row("F6_E3M2", 6),
    _row("U8", 8, np.uint8),
    _row("I8", 8, np.int8),
    _row("F8_E5M2", 8, ml_dtypes.float8_e5m2),
    _row("F8_E4M3", 8, ml_dtypes.float8_e4m3fn),
    _row("F8_E8M0", 8, ml_dtypes.float8_e8m0fnu),
    _row("F8_E4M3FNUZ", 8, ml_dtypes.float8_e4m3fnuz),
    _row("F8_E5M2FNUZ", 8, ml_dtypes.float8_e5m2fnuz),
    _row("I16", 16, np.int16),
    _row("U16", 16, np.uint16),
    _row("F16", 16, np.float16),
    _row("BF16", 16, ml_dtypes.bfloat16),
    _row("I32", 32, np.int32),
    _row("U32", 32, np.uint32),
    _row("F32", 32, np.float32),
    _row("C64", 64, np.complex64),
    _row("F64", 64, np.float64),
    _row("I64", 64, np.int64),
    _row("U64", 64, np.uint64),
    _row(None, 128, np.complex128),
)

PACKED: dict[str, np.dtype] = {  # as NumPy holds them unpacked, a byte each
    "F4": np.dtype(ml_dtypes.float4_e2m1fn),
    "F6_E2M3": np.dtype(ml_dtypes.float6_e2m3fn),
    "F6_E3M2": np.dtype(ml_dtypes.float6_e3m2fn),
}
SAFETENSORS: dict[str, StoredDType] = {row.safetensors: row for row in ROWS if row.safetensors}
SAFETENSORS_RANK: dict[str, int] = {name: rank for rank, name in enumerate(SAFETENSORS)}
_BY_NAME: dict[str, StoredDType] = {row.name: row for row in ROWS if row.name}

# Dtypes of a saved checkpoint: those that readers of Zarr know, plus these three, which meshtape registers with it.
EXTENSIONS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
FLOATS = ("float16", "float32", "float64", *EXTENSIONS)
NOT_IN_ZARR = ("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz")


@lru_cache(maxsize=256)
def bits(dtype: np.dtype) -> np.dtype:
    """NumPy's unsigned integer of the same size for an extension dtype, to move its elements; others as they are.

    >>> bits(by_name("bfloat16")), bits(np.dtype("f8"))
    (dtype('uint16'), dtype('float64'))
    """
    return np.dtype(f"u{dtype.itemsize}") if dtype.name in EXTENSIONS else dtype


def name_of(dtype: Any) -> Any:
    """The name for :func:`by_name` of a dtype given as a name, or as anything that NumPy takes for a dtype.

    >>> name_of("bfloat16"), name_of(np.float32)
    ('bfloat16', 'float32')
    """
    if isinstance(dtype, str) or dtype is None:
        return dtype
    try:
        return np.dtype(dtype).name
    except TypeError:
        return dtype


def by_name(name: Any) -> np.dtype:
    """The dtype with a stored name, or that of a NumPy dtype or scalar type; `CheckpointDTypeError` when there is
    none."""
    name = name_of(name)
    row = _BY_NAME.get(name) if isinstance(name, str) else None
    if row is None or row.dtype is None:
        raise CheckpointDTypeError(f"unknown dtype {name!r}; known are {', '.join(_BY_NAME)}")
    return row.dtype


def of_leaf(leaf: Any) -> np.dtype:
    """The dtype of an array, also of PyTorch's, whose dtypes NumPy does not know."""
    text = str(leaf.dtype)
    return by_name(text.removeprefix("torch.")) if text.startswith("torch.") else np.dtype(leaf.dtype)


@lru_cache(maxsize=256)
def short_name(dtype: np.dtype) -> str:
    """``dtype.name``, whose text NumPy makes anew each time."""
    return dtype.name


@lru_cache(maxsize=256)
def _row_of(dtype: Any) -> StoredDType | None:
    return _BY_NAME.get(name_of(dtype))


def of_reader(dtype: Any, where: str) -> np.dtype:
    """The dtype of elements of others, in our order of bytes; `CheckpointDTypeError` naming ``where`` for texts, dates,
    records and objects."""
    row = _BY_NAME.get(getattr(dtype, "name", ""))
    if row is None or row.dtype is None:
        raise CheckpointDTypeError(
            f"{where}: elements of {dtype} have no form here; leave it out, or save it as numbers"
        )
    return row.dtype


def check_storable(dtype: np.dtype, name: str) -> np.dtype:
    """``dtype`` as it will be stored; `CheckpointDTypeError` naming the key when a checkpoint cannot hold it."""
    row = _row_of(dtype)
    if row is None or row.dtype is None or row.name in NOT_IN_ZARR:
        known = ", ".join(n for n in _BY_NAME if n not in NOT_IN_ZARR)
        raise CheckpointDTypeError(f"key {name!r}: dtype {dtype} cannot be saved; a checkpoint holds {known}")
    return row.dtype


def safetensors_name(dtype: np.dtype, where: str = "tensor", cure: str = "leave it out with drop=") -> str:
    """The safetensors name of ``dtype``; `CheckpointDTypeError` naming ``where`` when that format has none. ``cure`` is
    that of dtypes that no checkpoint holds."""
    row = _row_of(dtype)
    if row is None or row.safetensors is None:
        cure = "cast it by a rule, or keep the Zarr form" if row is not None else cure
        raise CheckpointDTypeError(f"{where}: dtype {dtype} has no safetensors form; {cure}")
    return row.safetensors
