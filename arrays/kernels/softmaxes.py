"""``softmax``, ``log_softmax`` and ``cross_entropy`` on CUDA: each row is read once, and written at most once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..core.dtypes import KERNEL_FLOATS
from ..core.op import for_floats
from .geometry import MAX_GRID, ladder, row_plan, vector_length
from .launch import contiguous, i64, named, runner, wide

FILE = "softmax.cu"
_LONG_THREADS = 512


def variants() -> Iterator[tuple[str, str]]:
    """File and name of every kernel that these functions may start."""
    for d in KERNEL_FLOATS:
        vectors = (1, 16 // d.itemsize)
        sizes = [(t, i, v) for v in vectors for t, i in ladder(d.itemsize, v)]
        for kind in ("forward", "backward"):
            for log in (False, True):
                yield from ((FILE, named(f"softmax_{kind}_long", log, d, v)) for v in vectors)
                yield from ((FILE, named(f"softmax_{kind}", log, d, *s)) for s in sizes)
            yield from ((FILE, named(f"cross_entropy_{kind}_long", d, v)) for v in vectors)
            yield from ((FILE, named(f"cross_entropy_{kind}", d, *s)) for s in sizes)


def _rows(
    kernel: str, before: tuple[Any, ...], rows: int, width: int, vectors: list[Any], arguments: list[Any]
) -> None:
    """Start a kernel of rows in its form for rows of this width; ``vectors`` are the arrays that it reads in
    vectors."""
    r = runner()
    d = vectors[0].dtype
    among = width, [d.itemsize], [r.address(a) for a in vectors]
    plan = row_plan(*among)
    if plan is None:
        name, grid, block = (
            named(f"{kernel}_long", *before, d, vector_length(*among)),
            (min(rows, MAX_GRID), 1, 1),
            (_LONG_THREADS, 1, 1),
        )
    else:
        name, grid, block = (
            named(kernel, *before, d, plan.threads, plan.items, plan.vector),
            plan.grid(rows),
            plan.block,
        )
    r.launch(FILE, name, grid, block, arguments)


def _along(fn: Any, axis: int, *arrays: Any) -> Any:
    """``fn`` of the arrays with ``axis`` last; its result with ``axis`` back in its place."""
    xp, last = runner().xp, arrays[0].ndim - 1
    if axis == last:
        return fn(*map(contiguous, arrays))
    out = fn(*(contiguous(xp.moveaxis(a, axis, last)) for a in arrays))
    return contiguous(xp.moveaxis(out, last, axis))


def _forward(log: bool, x: Any, axis: int, masked: bool) -> Any:
    def rows(x: Any) -> Any:
        y = runner().xp.empty(x.shape, x.dtype)
        if x.size:
            n, width = x.size // x.shape[-1], x.shape[-1]
            _rows("softmax_forward", (log,), n, width, [x, y], [x, y, i64(n), i64(width), np.bool_(masked)])
        return y

    return _along(rows, axis, x)


def _backward(log: bool, g: Any, y: Any, axis: int) -> Any:
    # A cotangent of another dtype is met halfway: both in the wider one, the result in that of y.
    d = y.dtype if g.dtype == y.dtype else np.result_type(wide(y.dtype), g.dtype)

    def rows(g: Any, y: Any) -> Any:
        dx = runner().xp.empty(y.shape, y.dtype)
        if y.size:
            n, width = y.size // y.shape[-1], y.shape[-1]
            _rows("softmax_backward", (log,), n, width, [g, y, dx], [g, y, dx, i64(n), i64(width)])
        return dx

    return _along(rows, axis, g.astype(d, copy=False), y.astype(d, copy=False)).astype(y.dtype, copy=False)


@for_floats
def softmax(x: Any, *, axis: int, masked: bool) -> Any:
    """See :data:`meshtape.arrays.nn.softmax.SOFTMAX`."""
    return _forward(False, x, axis, masked)


@for_floats
def softmax_backward(g: Any, y: Any, *, axis: int) -> Any:
    """See :data:`meshtape.arrays.nn.softmax.SOFTMAX_BACKWARD`."""
    return _backward(False, g, y, axis)


@for_floats
def log_softmax(x: Any, *, axis: int, masked: bool) -> Any:
    """See :data:`meshtape.arrays.nn.softmax.LOG_SOFTMAX`."""
    return _forward(True, x, axis, masked)


@for_floats
def log_softmax_backward(g: Any, y: Any, *, axis: int) -> Any:
    """See :data:`meshtape.arrays.nn.softmax.LOG_SOFTMAX_BACKWARD`."""
    return _backward(True, g, y, axis)


def _labels(labels: Any, ignore_index: int | None) -> tuple[Any, bool, int]:
    """Labels as signed integers, and the label that marks ignored ones, if there is one."""
    if labels.dtype == np.uint64:  # beyond the largest int64 there is no class: a negative label is none either
        labels = runner().xp.minimum(labels, np.uint64(2**63 - 1))
    has_ignored = ignore_index is not None and -(2**63) <= ignore_index < 2**63
    return contiguous(labels.astype(np.int64, copy=False)), has_ignored, ignore_index if has_ignored else 0


@for_floats
def cross_entropy(logits: Any, labels: Any, *, ignore_index: int | None, label_smoothing: float) -> Any:
    """See :data:`meshtape.arrays.nn.cross_entropy.CROSS_ENTROPY`."""
    xp, x = runner().xp, contiguous(logits)
    flat, has_ignored, ignored = _labels(labels, ignore_index)
    losses = xp.empty(labels.shape, wide(x.dtype))
    n, width = labels.size, x.shape[-1]
    if n and not width:  # no class, no loss
        losses[...] = xp.where(flat == ignored, 0, np.nan) if has_ignored else np.nan
    elif n:
        numbers = [i64(n), i64(width), np.bool_(has_ignored), i64(ignored), np.float64(label_smoothing)]
        _rows("cross_entropy_forward", (), n, width, [x], [x, flat, losses, *numbers])
    return losses


@for_floats
def cross_entropy_backward(
    g: Any, logits: Any, labels: Any, *, ignore_index: int | None, label_smoothing: float
) -> Any:
    """See :data:`meshtape.arrays.nn.cross_entropy.CROSS_ENTROPY_BACKWARD`."""
    xp, x = runner().xp, contiguous(logits)
    flat, has_ignored, ignored = _labels(labels, ignore_index)
    scale = contiguous(g.astype(wide(x.dtype), copy=False))
    dx = xp.empty(x.shape, x.dtype)
    n, width = labels.size, x.shape[-1]
    if x.size:
        numbers = [i64(n), i64(width), np.bool_(has_ignored), i64(ignored), np.float64(label_smoothing)]
        _rows("cross_entropy_backward", (), n, width, [x, dx], [scale, x, flat, dx, *numbers])
    return dx
