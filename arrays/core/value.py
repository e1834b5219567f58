"""The two objects of every call, `Value` and `Now`, and Python numbers as operands.

This module, and the others that ``setup.py`` lists, are the hot path of eager work. A wheel holds them compiled from
these sources; ``_core.pxd`` beside this file lists the fields that compiled code reads at a fixed offset.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np


class Value:
    """The base of ``Array`` for the hot path: its buffer, and its name on tapes (0 until a tape has seen it)."""

    __slots__ = ("_buf", "_id")

    # Asked for several times in every call: compiled, these cost a tenth of what a function in Python does.

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the dimensions."""
        return self._buf.shape

    @property
    def dtype(self) -> np.dtype:
        """Type of the elements."""
        return self._buf.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._buf.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(self._buf.size)


class Now:
    """The context of one thread: recorders, origin of calls, source line and default device."""

    __slots__ = ("device", "origin", "recorders", "site")

    def __init__(self) -> None:
        self.recorders: tuple[Any, ...] = ()
        self.origin: str | None = None
        self.site: Any = None  # of calls that are made in place of others: the line that called those
        self.device: Any = None


FIRST_USER_DTYPE = 256
"""NPY_USERDEF: type numbers from here on are of dtypes that other libraries register, such as bfloat16."""

FLOAT64, FLOAT32 = np.dtype(np.float64), np.dtype(np.float32)

# NumPy spends half of a small call on a Python number beside an array: it makes an array of it each time. Programs use
# the same few numbers again and again, so these arrays are kept. Each is right for one dtype of the other operand only.
NUMBERS64: dict[Any, Any] = {}
NUMBERS32: dict[Any, Any] = {}
_MOST = 512


def number(value: Any, dtype: np.dtype) -> Any:
    """The int or float ``value`` as an operand beside an array of float64 or float32: a cached array of that dtype.

    ``value`` itself where it may not fit the dtype.
    """
    if not -(2**53) <= value <= 2**53:  # NaN, which is not its own key, and what a cast would have to warn of
        return value
    found = np.asarray(value, dtype)
    if value:  # 0.0 and -0.0 are one key
        found.flags.writeable = False
        kept = NUMBERS64 if dtype is FLOAT64 else NUMBERS32
        if len(kept) >= _MOST:
            kept.clear()
        kept[value] = found
    return found


def _pure() -> None: ...


COMPILED = not isinstance(_pure, types.FunctionType)
"""Whether this is the compiled core: its calls leave no Python frames."""
