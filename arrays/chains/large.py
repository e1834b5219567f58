"""Elementwise calls of large arrays on a GPU by kernels of ours: CuPy's own take elements one by one."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.op import ShapeDtype, op_named
from ..core.program import Const, Entry, FusedRun, Program
from ..kernels import launch
from . import cuda_codegen as code
from .chains import executable


@functools.lru_cache(maxsize=2048)
def _single(op: Any, numbers: str, params: tuple[tuple[str, Any], ...], *args: Any) -> Callable[..., Any] | None:
    """One call of an elementwise op, as a kernel; None where it is small, or has no form in CUDA."""
    avals = {i: a for i, a in enumerate(args) if type(a) is ShapeDtype}
    shape = np.broadcast_shapes(*(a.shape for a in avals.values()))
    if math.prod(shape) < launch.LARGE:
        return None
    (out,) = op.avals(args, dict(params))
    inputs = tuple([i if i in avals else Const(a) for i, a in enumerate(args)])
    entry = Entry(op, inputs, (len(args),), dict(params))
    program = Program(tuple(avals), (entry,), (len(args),), avals | {len(args): out})
    if (out.dtype == args[0].dtype and op.name == "astype") or not code.expressible(entry, program):
        return None
    return executable(FusedRun((entry,), tuple(avals), (len(args),), shape), program)


def of_large(op: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, CuPy's form of an elementwise op, but for large arrays: one kernel that reads vectors."""
    array = launch.runner().xp.ndarray

    def run(*bufs: Any, **params: Any) -> Any:
        most = 1  # elements of a result, at least where the shapes are alike
        for b in bufs:
            if type(b) is array:
                if b.size >= launch.LARGE:
                    break
                most *= b.size
        else:
            if most < launch.LARGE or getattr(bufs[0], "shape", None) == getattr(bufs[-1], "shape", ()):
                return fn(*bufs, **params) if params else fn(*bufs)
        args = [ShapeDtype(b.shape, b.dtype) if type(b) is array else b for b in bufs]
        numbers = [b for b in args if type(b) is not ShapeDtype]
        if not all(type(b) in (bool, int, float) for b in numbers):
            return fn(*bufs, **params)
        kernel = _single(op, repr(numbers) if numbers else "", tuple(params.items()), *args)
        if kernel is None:
            return fn(*bufs, **params)
        return kernel(*[b for b in bufs if type(b) is array])[0]

    return run


@functools.lru_cache(maxsize=1024)
def _copy_of(shape: tuple[int, ...], word: int) -> Callable[..., list[Any]]:
    aval = ShapeDtype(shape, np.dtype(f"i{word}"))
    entry = Entry(op_named("positive"), (0,), (1,), {})
    return executable(FusedRun((entry,), (0,), (1,), shape), Program((0,), (entry,), (1,), {0: aval, 1: aval}))


def large_copy(x: Any) -> Any:
    """A copy in C order, of words."""
    words = x.view(np.dtype(f"i{x.dtype.itemsize}"))
    out = launch.runner().xp.empty(x.shape, words.dtype)
    _copy_of(x.shape, x.dtype.itemsize)(words, into=[out])
    return out.view(x.dtype)


launch.large_copy = large_copy
