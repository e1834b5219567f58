"""``softmax``, ``log_softmax`` and ``cross_entropy`` on CUDA: each row is read once, and written at most once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import KERNEL_FLOATS
from ..core.op import for_floats
from .geometry import MAX_GRID, ceil_div, ladder, row_plan
from .launch import NOTHING, contiguous, i64, in_step, named, runner, wide

FILE = "softmax.cu"


def variants() -> Iterator[tuple[str, str]]:
    """File and name of every kernel that these functions may start."""
    for d in KERNEL_FLOATS:
        rungs = (*ladder(d.itemsize), (512, 0))
        sizes = [(t, i, 16 // d.itemsize) for t, i in rungs]
        for kind in ("forward", "backward"):
            for log in (False, True):
                yield from ((FILE, named(f"softmax_{kind}", log, d, *s)) for s in sizes)
        yield from ((FILE, named("cross_entropy_forward", d, *s)) for s in sizes)
        for o in [d] if d != np.float32 else [o for o in KERNEL_FLOATS if o.itemsize <= 4]:
            held = rungs if o.itemsize == d.itemsize else (*ladder(8), (512, 0))
            yield from ((FILE, named("cross_entropy_backward", o, d, *r, 16 // o.itemsize)) for r in held)
        if d.itemsize >= 4:
            yield from ((FILE, named("cross_entropy_tile", d, *s)) for s in sizes)
            yield FILE, named("cross_entropy_of_tiles", d)


def _rows(
    kernel: str,
    before: tuple[Any, ...],
    rows: int,
    width: int,
    vectors: list[Any],
    arguments: Callable[..., list[Any]],
    kept: int = 1,
) -> None:
    """Start a kernel of rows in its form for rows of this width.

    ``vectors`` are the arrays that it reads in vectors; ``kept`` of them it reads more than once. The last one is
    written: others that begin elsewhere within a vector are copied. ``arguments`` gives the kernel's from them and the
    numbers that all kernels take.
    """
    r = runner()
    size = vectors[0].dtype.itemsize
    vectors = in_step(*vectors)
    least = min(v.dtype.itemsize for v in vectors)
    plan = row_plan(width, size if least == size else 8, 16 // least)  # both are in registers at once
    slots, shared = plan.kept(width, [size] * kept, r.properties().shared_memory)
    name = named(kernel, *before, vectors[0].dtype, plan.threads, plan.items, plan.vector)
    numbers = i64(rows), i64(width), slots
    r.launch(FILE, name, plan.grid(rows), plan.block, arguments(*vectors, *numbers), shared)


def _forward_rows(log: bool, x: Any, masked: bool, of_rows: Sequence[Any] = (NOTHING, NOTHING)) -> Any:
    y = runner().xp.empty(x.shape, x.dtype)
    if x.size:
        n, width = x.size // x.shape[-1], x.shape[-1]
        _rows("softmax_forward", (log,), n, width, [x, y], lambda *a: [*a[:2], *of_rows, *a[2:], np.bool_(masked)])
    return y


def _along(fn: Any, axis: int, *arrays: Any) -> Any:
    """``fn`` of the arrays with ``axis`` last; its result with ``axis`` back in its place."""
    xp, last = runner().xp, arrays[0].ndim - 1
    if axis == last:
        return fn(*map(contiguous, arrays))
    out = fn(*(contiguous(xp.moveaxis(a, axis, last)) for a in arrays))
    return contiguous(xp.moveaxis(out, last, axis))


def _forward(log: bool, x: Any, axis: int, masked: bool) -> Any:
    return _along(lambda x: _forward_rows(log, x, masked), axis, x)


def _backward(log: bool, g: Any, y: Any, axis: int) -> Any:
    # A cotangent of another dtype is met halfway: both in the wider one, the result in that of y.
    d = y.dtype if g.dtype == y.dtype else np.result_type(wide(y.dtype), g.dtype)

    def rows(g: Any, y: Any) -> Any:
        dx = runner().xp.empty(y.shape, y.dtype)
        if y.size:
            n, width = y.size // y.shape[-1], y.shape[-1]
            _rows("softmax_backward", (log,), n, width, [g, y, dx], lambda *a: [*a], kept=2)
        return dx

    return _along(rows, axis, g.astype(d, copy=False), y.astype(d, copy=False)).astype(y.dtype, copy=False)


@for_floats
def softmax(x: Any, *, axis: int, masked: bool) -> Any:
    """See :data:`meshtape.arrays.nn.softmax.SOFTMAX`."""
    return _forward(False, x, axis, masked)


def softmax_of_rows(x: Any, *, masked: bool) -> tuple[Any, Any, Any]:
    """The softmax along the last axis, and of each row the shift and the sum of the exponentials of what is left, in
    float32 at least; ``x`` has no gaps."""
    shift, total = (runner().xp.empty(x.shape[:-1], wide(x.dtype)) for _ in range(2))
    if not x.shape[-1]:
        shift[...], total[...] = 0, masked
    return _forward_rows(False, x, masked, (shift, total)), shift, total


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


class Targets(NamedTuple):
    """Labels of rows, and of how many classes, as the kernels of losses take them."""

    labels: Any
    classes: int
    numbers: tuple[Any, ...]

    @classmethod
    def of(cls, labels: Any, classes: int, ignore_index: int | None, label_smoothing: float) -> Targets:
        if labels.dtype == np.uint64:  # beyond the largest int64 there is no class: a negative label is none either
            labels = runner().xp.minimum(labels, np.uint64(2**63 - 1))
        has_ignored = ignore_index is not None and -(2**63) <= ignore_index < 2**63
        numbers = np.bool_(has_ignored), i64(ignore_index if has_ignored else 0), np.float64(label_smoothing)
        return cls(contiguous(labels, np.int64).reshape(-1), classes, numbers)


@for_floats
def cross_entropy(logits: Any, labels: Any, *, ignore_index: int | None, label_smoothing: float) -> Any:
    """See :data:`meshtape.arrays.nn.cross_entropy.CROSS_ENTROPY`."""
    xp, x = runner().xp, contiguous(logits)
    n, width = labels.size, x.shape[-1]
    targets = Targets.of(labels, width, ignore_index, label_smoothing)
    losses, shift, total = (xp.empty(labels.shape, wide(x.dtype)) for _ in range(3))
    if n and not width:  # no class, no loss
        has_ignored, ignored, _ = targets.numbers
        ignored = (targets.labels == ignored).reshape(labels.shape)
        losses[...] = xp.where(ignored, 0, np.nan) if has_ignored else np.nan
        shift[...], total[...] = 0, 1
    elif n:
        out = targets.labels, losses, shift, total
        kept = bool(label_smoothing)
        _rows("cross_entropy_forward", (), n, width, [x], lambda x, *a: [x, *out, *a, *targets.numbers], kept)
    return losses, shift, total


def slopes(
    x: Any, targets: Targets, of_rows: Sequence[Any], dtype: np.dtype, first: int = 0, in_place: bool = False
) -> Any:
    """The slopes of the logits ``x``, which are those of all classes or of some from ``first`` on, rounded to
    ``dtype``, and in their memory where they may be (``in_place``). ``of_rows`` are the cotangent, the shift and the
    total of each row."""
    dx, width = x if in_place and x.dtype == dtype else runner().xp.empty(x.shape, dtype), x.shape[-1]
    if x.size:
        numbers = i64(first), i64(targets.classes), *targets.numbers
        _rows(
            *("cross_entropy_backward", (dtype,), x.size // width, width, [x, dx]),
            lambda x, *a: [*of_rows, x, targets.labels, *a, *numbers],
            kept=0,
        )
    return dx


@for_floats
def cross_entropy_backward(
    g: Any, logits: Any, labels: Any, shift: Any, total: Any, *, ignore_index: int | None, label_smoothing: float
) -> Any:
    """See :data:`meshtape.arrays.nn.cross_entropy.CROSS_ENTROPY_BACKWARD`."""
    x = contiguous(logits)
    targets = Targets.of(labels, x.shape[-1], ignore_index, label_smoothing)
    of_rows = [contiguous(a.astype(wide(x.dtype), copy=False)) for a in (g, shift, total)]
    return slopes(x, targets, of_rows, x.dtype)


class TiledLosses:
    """The cross-entropy of rows whose logits, in float32 or float64, are shown in tiles: some rows, and ``width``
    classes (the last tile of a row has what is left)."""

    def __init__(self, targets: Targets, width: int, dtype: np.dtype) -> None:
        self.targets, self.width = targets, width
        empty, n, smoothing = runner().xp.empty, targets.labels.size, targets.numbers[-1]
        # Of each tile of a row its shift, the sum of its exponentials and, to smooth labels, of its logits less the
        # shift.
        self.tiles = [empty((ceil_div(targets.classes, width), n), dtype) for _ in range(3 if smoothing else 2)]
        self.picked = empty(n, dtype)

    def show(self, logits: Any, rows: slice, first: int) -> None:
        """The logits of ``rows`` and of the classes from ``first`` on."""
        i, smoothed = first // self.width, len(self.tiles) > 2
        of_rows = [*(t[i, rows] for t in self.tiles), *([] if smoothed else [NOTHING]), self.picked[rows]]
        labels = self.targets.labels[rows]
        _rows(
            *("cross_entropy_tile", (), *logits.shape, [logits]),
            lambda x, *a: [x, labels, *of_rows, *a, i64(first)],
            kept=smoothed,
        )

    def results(self) -> list[Any]:
        """Of each row the loss, the shift and the total, when all tiles were shown."""
        (labels, classes, numbers), r = self.targets, runner()
        n, d = labels.size, self.picked.dtype
        out = [r.xp.empty(n, d) for _ in range(3)]
        if n:
            tiles = (*self.tiles, NOTHING)[:3]
            arguments = *tiles, self.picked, labels, *out, i64(n), i64(self.width), i64(classes), *numbers
            grid = min(ceil_div(n, 128), MAX_GRID), 1, 1
            r.launch(FILE, named("cross_entropy_of_tiles", d), grid, (128, 1, 1), arguments)
        return out
