"""The errors of Python and NumPy that stand for a wrong argument, and the types of ours that say the same."""

from __future__ import annotations

import numpy as np

from .errors import ArgumentError, ArrayIndexError, LinAlgError, MeshtapeError, NumberRangeError, OutOfMemory

_UNNAMED = (ArgumentError, ArrayIndexError)
"""Those of Python's protocols, as of an array that is asked for its truth, say nothing of the function that asked."""

_OURS = (__name__.partition(".")[0], "numpy", "scipy", "ml_dtypes", "cupy")

CAUGHT = (ValueError, TypeError, ArithmeticError, LookupError, MemoryError)
"""Among these are all errors that NumPy raises of arguments."""


def type_for(error: Exception) -> type[MeshtapeError] | None:
    """The type of ours for an error; None for one that names its function, or is that of a function that a user passed."""
    if str(error).startswith("[") or (isinstance(error, MeshtapeError) and type(error) not in _UNNAMED):
        return None
    if isinstance(error, FloatingPointError):  # numpy.errstate asked for it
        return None
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in _OURS:
            return None
        step = step.tb_next
    if isinstance(error, MeshtapeError):
        return type(error)
    if isinstance(error, np.linalg.LinAlgError):
        return LinAlgError
    if isinstance(error, MemoryError):
        return OutOfMemory
    if isinstance(error, IndexError):
        return ArrayIndexError
    return NumberRangeError if type(error) is OverflowError else ArgumentError
