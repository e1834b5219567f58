"""Kernels in C for arrays in the memory of the CPU: what NumPy needs a dozen passes for, in one pass over the rows.

The functions of :mod:`.ops` stand before the NumPy forms of ops (:func:`first`), which stay the reference, and compute what the
kernels do not take: other dtypes, other layouts, and everything where the kernels are not there. They are there where the package
was installed with a C compiler at hand; ``meshtape info`` says so. In a checkout, ``python setup.py build_ext --inplace`` builds them.

A new kernel is a function in a ``.h`` file, a row in the table of ``module.c``, a function in :mod:`.ops`, and a case of the test
that compares each with its NumPy form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ..threads import SMALLEST_SHARED, share

try:
    from . import _kernels
except ImportError:
    _kernels = None

AVAILABLE = _kernels is not None
"""Whether the kernels are installed."""

CHUNK = 64
"""Rows that are summed before their sum is added to others: fewer roundings, and the same sum on any number of threads."""

_NUMBERS = {name: i for i, name in enumerate(_kernels.KERNELS)} if _kernels is not None else {}


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
    """Run ``kernel`` over ``rows`` rows of ``width`` elements; False, and nothing is written, where it does not take the operands."""
    number = _NUMBERS[kernel]
    if rows * width < SMALLEST_SHARED:
        return _kernels.call(number, operands, rows, width, 0, rows, chunk, value, flag, ignored)
    taken = True

    def work(start: int, stop: int) -> None:
        nonlocal taken
        # What is asked of the operands is the same for each share.
        taken &= _kernels.call(number, operands, rows, width, start, stop, chunk, value, flag, ignored)

    share(rows, work, size=rows * width, unit=chunk)
    return taken


def first(kernel: Callable[..., Any], impl: Callable[..., Any]) -> Callable[..., Any]:
    """The NumPy implementation of an op: ``kernel(*buffers, **params)``, and where that answers NotImplemented ``impl(numpy, …)``."""
    if not AVAILABLE:
        return functools.partial(impl, np)

    @functools.wraps(impl)
    def either(*args: Any, **params: Any) -> Any:
        out = kernel(*args, **params)
        return impl(np, *args, **params) if out is NotImplemented else out

    return either
