"""Python numbers on their way into arrays: those that have no place in a dtype are refused."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.array import Array
from ..core.dtypes import check_cast
from ..core.errors import NumberRangeError


def check_numbers(name: str, numbers: Any, dtype: np.dtype) -> None:
    """Raise where Python numbers, one or nested in sequences, do not fit into ``dtype``.

    (A lost fraction in an integer, or lost digits in a float, are accepted, as in NumPy.)

    Raises
    ------
    NumberRangeError
        For what is beyond the range of an integer dtype, NaN too, or of all floats.
    DTypeError
        For complex numbers where real ones are asked for.
    """
    if (type(numbers) is float and dtype.kind not in "iu") or (type(numbers) is int and 0 <= numbers < 128):
        return  # the usual ones
    host = np.asarray(plain(numbers))
    check_cast(name, host.dtype, dtype)
    huge = host.dtype.kind == "O" and all(isinstance(v, int | float) for v in host.flat)
    if not host.size or not (huge or (dtype.kind in "iu" and host.dtype.kind in "iuf")):
        return
    if dtype.kind in "iu":
        below, above = int(np.iinfo(dtype).min) - 1, int(np.iinfo(dtype).max) + 1
    else:
        below, above = -(2**1024), 2**1024
    for v in (host.min(), host.max()):
        number = v.item() if isinstance(v, np.generic) else v
        if not below < number < above:
            raise NumberRangeError(
                f"[{name}] {number} is out of the range of {dtype.name}: choose a wider dtype for the array"
            )


def plain(obj: Any) -> Any:
    """Nested sequences of Arrays as nested sequences of NumPy arrays."""
    if isinstance(obj, Array):
        return np.asarray(obj)
    if isinstance(obj, list | tuple):
        return [plain(o) for o in obj]
    return obj
