"""Elements and values chosen by conditions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core import shape_rules
from ..core.array import Array
from ..core.dtypes import result_type
from ..core.errors import ShapeError
from ..core.op import composite
from ..ops.creation import asarray, elements
from ..ops.elementwise import where
from ..ops.manipulation import broadcast_to, reshape
from ..reductions.searching import nonzero, take


@composite("select")
def select(conditions: Sequence[Any], choices: Sequence[Any], /, default: Any = 0) -> Array:
    """From the first of ``choices`` whose condition is true, ``default`` where none is.

    >>> x = mt.arange(4)
    >>> mt.select([x < 1, x > 2], [10, 20], default=x)
    Array([10,  1,  2, 20])
    """
    if len(conditions) != len(choices) or not conditions:
        raise ShapeError(f"[select] {len(conditions)} conditions for {len(choices)} choices")
    found = [c if hasattr(c, "dtype") or isinstance(c, int | float | complex) else asarray(c) for c in choices]
    # The dtype of all together, before two of them meet.
    dtype = result_type(*(asarray(c) if isinstance(c, np.ndarray | np.generic) else c for c in [*found, default]))
    out = elements("select", default, dtype)
    for condition, choice in zip(reversed(conditions), reversed(found), strict=True):
        out = where(asarray(condition), elements("select", choice, dtype), out)
    return out


@composite("piecewise")
def piecewise(
    x: Any, conditions: Sequence[Any], functions: Sequence[Callable[..., Any] | float], /, *args: Any
) -> Array:
    """Each function (or number) where its condition is true, the last of several; an extra one serves the rest.

    Every function is given all elements: where it must not see some, replace them first.

    >>> x = mt.asarray([-2.0, 3.0])
    >>> mt.piecewise(x, [x < 0], [lambda v: -v, 0.0])
    Array([2., 0.], dtype=float64)
    """
    x = asarray(x)
    found = [asarray(c) for c in conditions]
    if len(functions) not in (len(found), len(found) + 1):
        raise ShapeError(f"[piecewise] {len(functions)} functions for {len(found)} conditions; as many, or one more")

    def values(f: Callable[..., Any] | float) -> Any:
        return elements("piecewise", f(x, *args) if callable(f) else f, x.dtype)

    out = broadcast_to(values(functions[-1] if len(functions) > len(found) else 0), x.shape)
    for condition, function in zip(found, functions, strict=False):
        out = where(condition, values(function), out)
    return out


@composite("compress")
def compress(condition: Any, x: Any, /, axis: int | None = None) -> Array:
    """The elements, rows, … where a vector of booleans is true, along ``axis``; flat without one.

    >>> mt.compress([False, True], mt.asarray([[1, 2], [3, 4]]), axis=0)
    Array([[3, 4]])
    """
    x, condition = asarray(x), asarray(condition)
    if condition.ndim != 1:
        raise ShapeError(f"[compress] the condition is a vector, got shape {condition.shape}")
    if axis is None:
        x, axis = reshape(x, (-1,)), 0
    return take(x, nonzero(condition)[0], axis=shape_rules.one_axis("compress", axis, x.ndim))


@composite("extract")
def extract(condition: Any, x: Any, /) -> Array:
    """The elements where a condition of the same size is true, flat.

    >>> mt.extract([True, False, True], mt.arange(3))
    Array([0, 2])
    """
    return compress(reshape(asarray(condition).astype(np.bool_), (-1,)), x)
