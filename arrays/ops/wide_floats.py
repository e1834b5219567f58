"""Functions of several steps, computed in float32 where their operands are shorter, and rounded once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np

from ..core import tree as trees
from ..core.dispatch import as_array
from ..core.dtypes import is_low_precision
from .manipulation import astype

P = ParamSpec("P")
R = TypeVar("R")


def in_float32(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorator: the steps of ``fn`` see float32 in place of floats of one and two bytes, and its results are rounded
    to these.

    A step that rounds would lose digits that the next one sums, and a float8 that overflows between two steps is lost
    for good.
    """

    @functools.wraps(fn)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        dtypes = [a.dtype for a in (*args, *kwargs.values()) if isinstance(getattr(a, "dtype", None), np.dtype)]
        if not any(map(is_low_precision, dtypes)):
            return fn(*args, **kwargs)
        try:
            out = np.result_type(*dtypes)
        except TypeError:  # the function says so itself
            return fn(*args, **kwargs)
        if not is_low_precision(out):
            return fn(*args, **kwargs)

        def wide(a: Any) -> Any:
            dtype = getattr(a, "dtype", None)
            return astype(as_array(a), np.float32) if isinstance(dtype, np.dtype) and is_low_precision(dtype) else a

        def rounded(a: Any) -> Any:
            return astype(a, out) if getattr(a, "dtype", None) == np.float32 else a

        found: Any = fn(*map(wide, args), **{k: wide(v) for k, v in kwargs.items()})  # type: ignore[arg-type]
        return trees.tree_map(rounded, found)

    return inner
