"""``layer_norm`` and ``rms_norm`` on CUDA: rows in registers, and gradients of the parameters in two stages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..core.dtypes import KERNEL_FLOATS
from ..core.op import for_floats
from .geometry import RowPlan, ceil_div, ladder, persistent_grid, row_plan, vector_length
from .launch import contiguous, i64, named, runner, wide

FILE = "row_norm.cu"
COLUMNS = "columns.cu"


def dtypes_of(x: np.dtype, *others: np.dtype) -> tuple[np.dtype, np.dtype]:
    """Dtypes that the kernels take x and the other arrays in: all alike, or short floats beside float32.

    >>> f16, f32, f64 = (np.dtype(t) for t in ("float16", "float32", "float64"))
    >>> [d.name for d in dtypes_of(f16, f16, f32)], [d.name for d in dtypes_of(f32, f32, f64)]
    (['float16', 'float32'], ['float64', 'float64'])
    """
    if all(d == x for d in others):
        return x, x
    common = np.result_type(x, *others)
    return (x, common) if common == wide(x) else (common, common)


def pairs() -> list[tuple[np.dtype, np.dtype]]:
    """Every pair of dtypes that :func:`dtypes_of` gives."""
    return [(d, o) for d in KERNEL_FLOATS for o in dict.fromkeys((d, wide(d)))]


def variants() -> Iterator[tuple[str, str]]:
    """File and name of every kernel that these functions may start."""
    for center in (True, False):
        for x, o in pairs():
            for vector in (1, 16 // x.itemsize):
                for kernel in ("norm_forward", "norm_backward"):
                    yield FILE, named(f"{kernel}_long", center, x, o, o, vector)
                    for threads, items in ladder(o.itemsize, vector):
                        yield FILE, named(kernel, center, x, o, o, threads, items, vector)
            yield FILE, named("norm_columns", center, x, o)
    for d in KERNEL_FLOATS:
        for o in dict.fromkeys((d, wide(d))):
            yield COLUMNS, named("sum_parts", wide(d), o)


def sum_parts(partial: Any, dtype: np.dtype) -> Any:
    """The sum of ``partial`` (parts, width) over its parts, in a fixed order, rounded once to ``dtype``."""
    r = runner()
    parts, width = partial.shape
    kept = dtype if dtype in (partial.dtype, *(d for d in KERNEL_FLOATS if wide(d) == partial.dtype)) else partial.dtype
    out = r.xp.empty(width, kept)
    if width:
        grid, block = (ceil_div(width, 32), 1, 1), (32, 32, 1)
        r.launch(COLUMNS, named("sum_parts", partial.dtype, kept), grid, block, (partial, out, i64(parts), i64(width)))
    return out.astype(dtype, copy=False)


def _forward(center: bool, x: Any, weight: Any, bias: Any, naxes: int, eps: float) -> Any:
    r = runner()
    parameters = [weight] if bias is None else [weight, bias]
    out_dtype = np.result_type(x.dtype, *(p.dtype for p in parameters))
    d, o = dtypes_of(x.dtype, *(p.dtype for p in parameters))
    x = contiguous(x.astype(d, copy=False))
    w, b = (contiguous(p.astype(o, copy=False)) for p in (weight, parameters[-1]))
    y = r.xp.empty(x.shape, o)
    width = math.prod(x.shape[x.ndim - naxes :])
    if x.size:
        rows = x.size // width
        numbers = (i64(rows), i64(width), np.float64(eps))
        vector = vector_length(width, (d.itemsize, o.itemsize), [r.address(a) for a in (x, w, b, y)])
        plan = row_plan(width, o.itemsize, vector)
        if plan.items:
            kernel = named("norm_forward", center, d, o, o, plan.threads, plan.items, vector)
            r.launch(FILE, kernel, plan.grid(rows), plan.block, (x, w, b, y, *numbers))
        else:
            slots, shared = plan.kept(width, [d.itemsize], r.properties().shared_memory)
            kernel, numbers = named("norm_forward_long", center, d, o, o, vector), (*numbers[:2], slots, numbers[2])
            r.launch(FILE, kernel, plan.grid(rows), plan.block, (x, w, b, y, *numbers), shared)
    return y.astype(out_dtype, copy=False)


def _backward(center: bool, g: Any, x: Any, weight: Any, naxes: int, eps: float) -> list[Any]:
    """Cotangents of x, of the weight, and (where ``center``) of the bias."""
    r = runner()
    d, o = dtypes_of(x.dtype, g.dtype, weight.dtype)
    kinds, a = 1 + center, wide(d)
    gs, xs, w = (contiguous(v.astype(t, copy=False)) for v, t in ((g, o), (x, d), (weight, o)))
    width = math.prod(x.shape[x.ndim - naxes :])
    if not xs.size:
        return [r.xp.zeros(x.shape, x.dtype), *(r.xp.zeros(weight.shape, weight.dtype) for _ in range(kinds))]
    dx = r.xp.empty(x.shape, d)
    rows = xs.size // width
    numbers = (i64(rows), i64(width), np.float64(eps))
    vector = vector_length(width, (d.itemsize, o.itemsize), [r.address(v) for v in (gs, xs, w, dx)])
    plan = row_plan(width, o.itemsize, vector)
    device = r.properties()
    if plan.items and _shared(plan, kinds, a) <= device.shared_memory:
        shared = _shared(plan, kinds, a)
        blocks = persistent_grid(
            ceil_div(rows, plan.rows), device.multiprocessors, plan.threads * plan.rows, shared, device.shared_memory
        )
        partial = r.xp.empty((blocks, kinds, width), a)
        kernel = named("norm_backward", center, d, o, o, plan.threads, plan.items, plan.vector)
        r.launch(FILE, kernel, (blocks, 1, 1), plan.block, (gs, xs, w, dx, partial, *numbers), shared)
    else:
        scales = r.xp.empty((rows, 2), a)
        plan = RowPlan(512, 0, vector, 1)
        slots, shared = plan.kept(width, (d.itemsize, o.itemsize), device.shared_memory)
        kernel, numbers = named("norm_backward_long", center, d, o, o, vector), (*numbers[:2], slots, numbers[2])
        r.launch(FILE, kernel, plan.grid(rows), plan.block, (gs, xs, w, dx, scales, *numbers), shared)
        tiles = ceil_div(width, 32)
        splits = max(1, min(ceil_div(rows, 64), ceil_div(8 * device.multiprocessors, tiles), 65535))
        partial = r.xp.empty((splits, kinds, width), a)
        kernel = named("norm_columns", center, d, o)
        r.launch(FILE, kernel, (tiles, splits, 1), (32, 8, 1), (gs, xs, scales, partial, i64(rows), i64(width)))
    sums = sum_parts(partial.reshape(-1, kinds * width), weight.dtype).reshape(kinds, *weight.shape)
    return [dx.astype(x.dtype, copy=False), *sums]


def _shared(plan: RowPlan, kinds: int, a: np.dtype) -> int:
    return plan.rows * kinds * plan.items * plan.threads * a.itemsize


@for_floats
def layer_norm(x: Any, weight: Any, bias: Any, *, naxes: int, eps: float) -> Any:
    """See :data:`meshtape.arrays.nn.norms.layer_norm.LAYER_NORM`."""
    return _forward(True, x, weight, bias, naxes, eps)


@for_floats
def layer_norm_backward(g: Any, x: Any, weight: Any, *, naxes: int, eps: float) -> tuple[Any, Any, Any]:
    """See :data:`meshtape.arrays.nn.norms.layer_norm.LAYER_NORM_BACKWARD`."""
    dx, dw, db = _backward(True, g, x, weight, naxes, eps)
    return dx, dw, db


@for_floats
def rms_norm(x: Any, weight: Any, *, naxes: int, eps: float) -> Any:
    """See :data:`meshtape.arrays.nn.norms.layer_norm.RMS_NORM`."""
    return _forward(False, x, weight, None, naxes, eps)


@for_floats
def rms_norm_backward(g: Any, x: Any, weight: Any, *, naxes: int, eps: float) -> tuple[Any, Any]:
    """See :data:`meshtape.arrays.nn.norms.layer_norm.RMS_NORM_BACKWARD`."""
    dx, dw = _backward(False, g, x, weight, naxes, eps)
    return dx, dw
