"""Elementwise calls of large arrays on a GPU by kernels of ours: CuPy's own take elements one by one."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..core.dispatch import apply
from ..core.op import Op, op_named
from ..kernels import launch
from .chains import as_one_launch


@functools.lru_cache(maxsize=2048, typed=True)
def _single(op: Op, names: tuple[str, ...], text: str, *params: Any) -> Callable[..., Any]:
    """A call of an elementwise op as one kernel. (The text of the parameters tells 0.0 from -0.0.)"""
    return as_one_launch(lambda *args: apply(op, args, dict(zip(names, params, strict=True))))


def of_large(op: Any, bufs: tuple[Any, ...], params: Mapping[str, Any]) -> Any:
    """The result of a call of an elementwise op on CuPy's arrays, by one kernel that reads vectors.

    NotImplemented where it is small, or no kernel serves it."""
    array = launch.runner().xp.ndarray
    shapes = [b.shape for b in bufs if isinstance(b, array)]
    if math.prod(shapes[0] if shapes.count(shapes[0]) == len(shapes) else np.broadcast_shapes(*shapes)) < Op.large:
        return NotImplemented
    if op.name == "astype" and params["dtype"] == bufs[0].dtype:
        return NotImplemented
    return _single(op, tuple(params), repr(params) if params else "", *params.values())(*bufs)


_copied = as_one_launch(lambda x: apply(op_named("positive"), (x,)))


def large_copy(source: Any, target: Any) -> None:
    """``target[...] = source``, of one shape and dtype, whose memory they do not share: of words."""
    word = np.dtype(f"i{source.dtype.itemsize}")
    _copied(source.view(word), into=[target.view(word)])


launch.large_copy = large_copy
