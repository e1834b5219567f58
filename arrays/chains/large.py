"""Elementwise calls of large arrays on a GPU by kernels of ours: CuPy's own take elements one by one."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..core.op import Op, ShapeDtype, op_named
from ..core.program import Const, Entry, FusedRun, Program
from ..kernels import launch
from . import cuda_codegen as code
from .chains import NUMBERS, executable


@functools.lru_cache(maxsize=2048, typed=True)
def _single(op: Any, numbers: str, params: tuple[tuple[str, Any], ...], *args: Any) -> Callable[..., Any] | None:
    """One call of an elementwise op, as a kernel; None where it is small, or has no form in CUDA."""
    avals = {i: a for i, a in enumerate(args) if type(a) is ShapeDtype}
    shape = np.broadcast_shapes(*(a.shape for a in avals.values()))
    if math.prod(shape) < Op.large:
        return None
    (out,) = op.avals([ShapeDtype((), a.dtype) if isinstance(a, np.generic) else a for a in args], dict(params))
    inputs = tuple(
        [i if i in avals else Const(a.item() if isinstance(a, np.generic) else a) for i, a in enumerate(args)]
    )
    entry = Entry(op, inputs, (len(args),), dict(params))
    program = Program(tuple(avals), (entry,), (len(args),), avals | {len(args): out})
    if (out.dtype == args[0].dtype and op.name == "astype") or not code.expressible(entry, program):
        return None
    return executable(FusedRun((entry,), tuple(avals), (len(args),), shape), program)


def of_large(op: Any, bufs: tuple[Any, ...], params: Mapping[str, Any]) -> Any:
    """The result of a call of an elementwise op on CuPy's arrays, by one kernel that reads vectors.

    NotImplemented where it is small, or no kernel serves it."""
    array = launch.runner().xp.ndarray
    arrays = [b for b in bufs if isinstance(b, array)]
    if all(b.size < Op.large for b in arrays) and all(b.shape == arrays[0].shape for b in arrays):
        return NotImplemented
    args = [ShapeDtype(b.shape, b.dtype) if isinstance(b, array) else b for b in bufs]
    numbers = [b for b in args if type(b) is not ShapeDtype]
    if not all(type(b) in NUMBERS for b in numbers):
        return NotImplemented
    kernel = _single(op, repr(numbers) if numbers else "", tuple(params.items()), *args)
    return NotImplemented if kernel is None else kernel(*arrays)[0]


@functools.lru_cache(maxsize=1024)
def _copy_of(shape: tuple[int, ...], word: int) -> Callable[..., list[Any]]:
    aval = ShapeDtype(shape, np.dtype(f"i{word}"))
    entry = Entry(op_named("positive"), (0,), (1,), {})
    return executable(FusedRun((entry,), (0,), (1,), shape), Program((0,), (entry,), (1,), {0: aval, 1: aval}))


def large_copy(source: Any, target: Any) -> None:
    """``target[...] = source``, of one shape and dtype, whose memory they do not share: of words."""
    word = np.dtype(f"i{source.dtype.itemsize}")
    _copy_of(source.shape, word.itemsize)(source.view(word), into=[target.view(word)])


launch.large_copy = large_copy
