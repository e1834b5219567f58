"""Fast paths for calls whose work takes less than a microsecond.

The general path through ``apply`` costs a few microseconds on eight elements: it normalizes arguments, packs parameters
and looks up the implementation. A function takes the fast path where its arguments have the common form already and
there is no recorder: NumPy's memory, ints for axes, a tuple for a shape. It then calls the same functions as the op's
implementation, so values, dtypes and sharing of memory are the same. Calls that NumPy refuses there take the general
path too, which raises our errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.dispatch import wrap
from ..core.op import state

if TYPE_CHECKING:
    from ..core.array import Array

_ndarray = np.ndarray
_SEQUENCES = (list, tuple)

REFUSED = (ValueError, TypeError, IndexError, OverflowError, MemoryError)
"""NumPy's errors for arguments that it does not take."""


def _takes_ellipsis() -> bool:
    try:
        np.add.reduce(np.zeros(1), out=...)
    except TypeError:  # NumPy before 2.3
        return False
    return True


TAKES_ELLIPSIS = _takes_ellipsis()
"""Whether ``out=...`` makes a ufunc or its ``reduce`` give an array, also of no dimensions. (To make one of a scalar takes longer.)"""


def buffer(x: Any) -> Any:
    """The memory of an Array for direct computation: NumPy's, and with no recorder; else None."""
    buf = getattr(x, "_buf", None)
    return buf if type(buf) is _ndarray and not state.recorders else None


def buffers(xs: Any) -> Any:
    """The memory of a list or tuple of them, as :func:`buffer` gives it; None where one has none."""
    if state.recorders or type(xs) not in _SEQUENCES:
        return None
    found = []
    for x in xs:
        buf = getattr(x, "_buf", None)
        if type(buf) is not _ndarray:
            return None
        found.append(buf)
    return found


def result(out: Any) -> Array:
    """An Array of a result of NumPy, which gives a scalar in place of a 0-d array."""
    return wrap(out if type(out) is _ndarray else np.asarray(out))
