"""Calls of kernels in C, which are tried before the NumPy form of an op."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ..backends.memory_pool import LARGE, fresh
from ..backends.threads import SMALLEST_SHARED, share
from . import AVAILABLE, _kernels

CHUNK = 64
"""Rows that are summed before their sum is added to others: fewer roundings, and the same sum on any number of
threads."""

_NUMBERS = {name: i for i, name in enumerate(_kernels.KERNELS)} if _kernels is not None else {}


STEPS = ("add", "subtract", "multiply", "divide", "negative", "square", "sqrt", "reciprocal")
"""The elementwise steps, by their numbers in chain.h."""


def run(
    kernel: str,
    operands: tuple[Any, ...],
    rows: int,
    width: int,
    *,
    value: float = 0.0,
    flag: bool = False,
    ignored: int = 0,
    chunk: int = 1,
) -> bool:
    """Run ``kernel`` over ``rows`` rows of ``width`` elements; False, and nothing is written, where it does not take
    the operands."""
    number = _NUMBERS[kernel]
    if rows * width < SMALLEST_SHARED:
        return _kernels.call(number, operands, rows, width, 0, rows, chunk, value, flag, ignored)
    return _shared(number, operands, rows, width, chunk, (value, flag, ignored))


def _shared(
    number: int, operands: tuple[Any, ...], rows: int, width: int, chunk: int, options: tuple[float, bool, int]
) -> bool:
    taken = True

    def work(start: int, stop: int) -> None:
        nonlocal taken
        # The check of the operands is the same for each share.
        taken &= _kernels.call(number, operands, rows, width, start, stop, chunk, *options)

    share(rows, work, size=rows * width, unit=chunk)
    return taken


def memory(shape: tuple[int, ...], dtype: np.dtype, nbytes: int) -> np.ndarray:
    """Memory for a result of so many bytes; small ones avoid :func:`fresh`, which is not compiled."""
    return np.empty(shape, dtype) if nbytes < LARGE else fresh(shape, dtype)


def result_like(x: np.ndarray) -> np.ndarray:
    """Memory for a result of the shape and dtype of ``x``."""
    return memory(x.shape, x.dtype, x.nbytes)


def first(kernel: Callable[..., Any], impl: Callable[..., Any]) -> Callable[..., Any]:
    """The NumPy implementation of an op: ``kernel(*buffers, **params)``, and where that answers NotImplemented
    ``impl(numpy, …)``."""
    if not AVAILABLE:
        return functools.partial(impl, np)

    @functools.wraps(impl)
    def either(*args: Any, **params: Any) -> Any:
        out = kernel(*args, **params)
        return impl(np, *args, **params) if out is NotImplemented else out

    return either
