"""``layer_norm`` and ``rms_norm`` on CUDA: rows in registers, and gradients of the parameters in two stages; sums of
columns, and extremes of rows of short floats."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..core.dtypes import KERNEL_FLOATS
from ..core.op import for_floats
from .geometry import MAX_GRID, RowPlan, ceil_div, ladder, persistent_grid, row_plan, vector_length
from .launch import NOTHING, Properties, contiguous, i64, in_step, named, runner, wide

FILE = "row_norm.cu"
COLUMNS, REDUCTIONS = "columns.cu", "reductions.cu"


@functools.lru_cache(maxsize=256)
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
            for size in ((*rung, ends) for ends in (False, True) for rung in (*ladder(o.itemsize), (512, 0))):
                for add in (False, True):
                    yield FILE, named("norm_forward", center, add, x, o, *size)
                    for d in dict.fromkeys((x, wide(x))) if add else (x,):
                        yield FILE, named("norm_backward", center, add, x, o, d, *size)
            yield FILE, named("norm_columns", center, x, o)
    for d in KERNEL_FLOATS:
        for o in dict.fromkeys((d, wide(d))):
            yield COLUMNS, named("sum_parts", wide(d), o)
        for vector in (1, 16 // d.itemsize):
            yield REDUCTIONS, named("column_sums", d, vector)
        for which, threads in itertools.product(("Max", "Min"), (32, 256)):
            yield REDUCTIONS, named("row_places", which == "Max", d, threads)
            if d.itemsize == 2:
                yield REDUCTIONS, named("row_extremes", which, d, threads)


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


_LEAST = 1 << 16
"""Elements from which on the kernels of reductions are started: of few CuPy's one launch is enough. (Not measured.)"""
_LONGEST_OF_FEW = 1 << 14
"""Elements of a row, of which few have one block each."""
_COLUMNS = 1024
"""Columns that all of an array is summed in first."""


def column_sums(x: Any, axis: tuple[int, ...], keepdims: bool, dtype: np.dtype) -> Any:
    """The sum over the first dimensions of an array without gaps, or over all of many short floats, in a fixed order,
    rounded once to ``dtype``; other sums are NotImplemented."""
    r, n = runner(), len(axis)
    in_columns = x.flags.c_contiguous and not x.size % _COLUMNS and x.size >= 16 * _LEAST
    if n == x.ndim and x.dtype.itemsize == 2 and in_columns:
        columns = column_sums(x.reshape(-1, _COLUMNS), (0,), False, wide(x.dtype))
        return columns.sum().astype(dtype).reshape((1,) * (n if keepdims else 0))
    width = math.prod(x.shape[n:])
    wanted = sorted(axis) == [*range(n)] and x.flags.c_contiguous and x.size >= _LEAST
    if not wanted or width * x.dtype.itemsize < 256:  # half of a warp's loads
        return NotImplemented
    rows, vector = x.size // width, vector_length(width, [x.dtype.itemsize], [r.address(x)])
    tiles = ceil_div(width, 32 * vector)
    splits = max(1, min(ceil_div(rows, 64), ceil_div(8 * r.properties().multiprocessors, tiles), 65535))
    partial = r.xp.empty((splits, width), wide(x.dtype))
    kernel = named("column_sums", x.dtype, vector)
    r.launch(REDUCTIONS, kernel, (tiles, splits, 1), (32, 8, 1), (x, partial, i64(rows), i64(width)))
    return sum_parts(partial, dtype).reshape((1,) * (n if keepdims else 0) + x.shape[n:])


def _row_geometry(rows: int, width: int) -> tuple[Any, ...]:
    """Threads of a row, grid and block, and the numbers of a launch."""
    threads = 32 if width < 2048 else 256
    grid, block = (min(ceil_div(rows, 256 // threads), MAX_GRID), 1, 1), (threads, 256 // threads, 1)
    return threads, (grid, block), (i64(rows), i64(width))


def _of_rows(x: Any, axis: tuple[int, ...], keepdims: bool, dtype: np.dtype) -> Any:
    """A result for the last dimensions of an array of many rows without gaps, and its :func:`_row_geometry`. None of
    other arrays."""
    n = x.ndim - len(axis)
    rows, width = math.prod(x.shape[:n]), math.prod(x.shape[n:])
    if sorted(axis) != [*range(n, x.ndim)] or not x.flags.c_contiguous or x.size < _LEAST or rows < 128:
        return None
    out = runner().xp.empty(x.shape[:n] + (1,) * (len(axis) if keepdims else 0), dtype)
    return out, *_row_geometry(rows, width)


def row_extremes(which: str, x: Any, axis: tuple[int, ...], keepdims: bool) -> Any:
    """The largest or smallest (``"Max"``, ``"Min"``) over the last dimensions of many short floats without gaps, NaN
    where there is one; others are NotImplemented."""
    found = _of_rows(x, axis, keepdims, x.dtype) if x.dtype.itemsize == 2 else None
    if found is None:
        return NotImplemented
    out, threads, geometry, sizes = found
    identity = np.float32(-np.inf if which == "Max" else np.inf)
    runner().launch(REDUCTIONS, named("row_extremes", which, x.dtype, threads), *geometry, (x, out, *sizes, identity))
    return out


def row_places(largest: bool, x: Any, axis: int, keepdims: bool) -> Any:
    """The place of the first largest (or smallest) along a dimension, or of the first NaN (CuPy gives any of several).
    Few long rows are NotImplemented, and so is nothing."""
    xp, width = runner().xp, x.shape[axis]
    if not x.size or (width > _LONGEST_OF_FEW and x.size < 128 * width):
        return NotImplemented
    x = contiguous(xp.moveaxis(x, axis, -1))
    out = xp.empty(x.shape[:-1], np.int64)
    threads, geometry, sizes = _row_geometry(out.size, width)
    runner().launch(REDUCTIONS, named("row_places", largest, x.dtype, threads), *geometry, (x, out, *sizes))
    return xp.expand_dims(out, axis) if keepdims else out


def _ends(arrays: Sequence[Any]) -> bool:
    """Whether one of the arrays begins inside of 16 bytes."""
    address = runner().address
    return any(address(a) % 16 for a in arrays)


@functools.lru_cache(maxsize=256)
def _forward_geometry(
    center: bool, add: bool, d: np.dtype, o: np.dtype, rows: int, width: int, ends: bool, device: Properties
) -> tuple[Any, ...]:
    """Kernel, grid, block and numbers of a launch, and its shared memory."""
    plan = row_plan(width, max(d.itemsize, o.itemsize), 16 // d.itemsize)
    slots, shared = plan.kept(width, [d.itemsize], device.shared_memory)
    kernel = named("norm_forward", center, add, d, o, plan.threads, plan.items, ends or width % plan.vector != 0)
    return kernel, plan.grid(rows), plan.block, (i64(rows), i64(width), slots), shared


def _forward(center: bool, x: Any, residual: Any, weight: Any, bias: Any, naxes: int, eps: float) -> tuple[Any, Any]:
    """The norm of x, or of its sum with the residual, and this sum."""
    r = runner()
    parameters = [weight] if bias is None else [weight, bias]
    given = x.dtype if residual is None else np.result_type(x.dtype, residual.dtype)
    out_dtype = np.result_type(given, *(p.dtype for p in parameters))
    d, o = dtypes_of(given, *(p.dtype for p in parameters))
    if residual is not None and d != given:  # the sum is rounded to its own dtype first
        total = (x + residual).astype(given, copy=False)
        return _forward(center, total, None, weight, bias, naxes, eps)[0], total
    w, b = contiguous(weight, o), contiguous(parameters[-1], o)
    y = r.xp.empty(x.shape, o)
    added = [] if residual is None else [contiguous(residual, d), r.xp.empty(x.shape, d)]
    width = math.prod(x.shape[x.ndim - naxes :])
    if x.size:
        rows = x.size // width
        x, *added, y = arrays = in_step(contiguous(x, d), *added, y)
        form = center, bool(added), d, o, rows, width, _ends([*arrays, w, b]), r.properties()
        kernel, grid, block, numbers, shared = _forward_geometry(*form)
        residual, total = added or (NOTHING, NOTHING)
        r.launch(FILE, kernel, grid, block, (x, residual, w, b, y, total, *numbers, np.float64(eps)), shared)
    return y.astype(out_dtype, copy=False), added[-1] if added else None


@functools.lru_cache(maxsize=256)
def _backward_geometry(
    center: bool, joined: bool, dtypes: tuple[np.dtype, ...], rows: int, width: int, ends: bool, device: Properties
) -> tuple[Any, ...]:
    """Kernel, grid, block and numbers of a launch, its shared memory, the shape of its sums, and whether these are
    those of the parameters."""
    (d, o, dx), kinds, a = dtypes, 1 + center, wide(dtypes[0])
    plan = row_plan(width, max(t.itemsize for t in dtypes), 16 // d.itemsize)
    ends = ends or width % plan.vector != 0
    slots, shared = np.int32(0), plan.rows * kinds * (plan.items + ends) * plan.threads * a.itemsize
    in_registers = plan.items and shared <= device.shared_memory
    if in_registers:
        blocks = ceil_div(rows, plan.rows)
        resident = persistent_grid(
            blocks, device.multiprocessors, plan.threads * plan.rows, shared, device.shared_memory
        )
        if ends and resident < blocks:  # all rows of a block begin at the same place of a vector
            period = plan.vector // math.gcd(width * plan.rows, plan.vector)
            resident = max(resident // period, 1) * period
        sums, grid = (resident, kinds, width), (resident, 1, 1)
    else:
        plan = RowPlan(512, 0, plan.vector, 1)
        slots, shared = plan.kept(width, (d.itemsize, o.itemsize), device.shared_memory)
        sums, grid = (rows, 2), plan.grid(rows)
    kernel = named("norm_backward", center, joined, d, o, dx, plan.threads, plan.items, ends)
    return kernel, grid, plan.block, (i64(rows), i64(width), slots), shared, sums, in_registers


def _backward(center: bool, g: Any, x: Any, weight: Any, joined: tuple[Any, ...], naxes: int, eps: float) -> Any:
    """Cotangents of x (with the one that it has besides), of the weight, and (where ``center``) of the bias."""
    r = runner()
    d, o = dtypes_of(x.dtype, g.dtype, weight.dtype)
    dx_dtype = np.result_type(x.dtype, *(j.dtype for j in joined))
    if joined and (d != x.dtype or dx_dtype not in (d, wide(d))):
        dx, *sums = _backward(center, g, x, weight, (), naxes, eps)
        return dx + joined[0], *sums
    kinds, a = 1 + center, wide(d)
    gs, xs, w = contiguous(g, o), contiguous(x, d), contiguous(weight, o)
    width = math.prod(x.shape[x.ndim - naxes :])
    if not xs.size:
        return r.xp.zeros(x.shape, dx_dtype), *(r.xp.zeros(weight.shape, weight.dtype) for _ in range(kinds))
    dx = r.xp.empty(x.shape, dx_dtype if joined else d)
    rows, device = xs.size // width, r.properties()
    xs, gs, *others, dx = arrays = in_step(xs, gs, *[contiguous(j, dx.dtype) for j in joined], dx)
    form = center, bool(joined), (d, o, dx.dtype), rows, width, _ends([*arrays, w]), device
    kernel, grid, block, numbers, shared, sums, in_registers = _backward_geometry(*form)
    out = r.xp.empty(sums, a)
    given = (gs, xs, w, *(others or [NOTHING]), dx, out, *numbers, np.float64(eps))
    r.launch(FILE, kernel, grid, block, given, shared)
    if not in_registers:
        scales, tiles = out, ceil_div(width, 32)
        splits = max(1, min(ceil_div(rows, 64), ceil_div(8 * device.multiprocessors, tiles), 65535))
        out = r.xp.empty((splits, kinds, width), a)
        kernel = named("norm_columns", center, d, o)
        r.launch(FILE, kernel, (tiles, splits, 1), (32, 8, 1), (gs, xs, scales, out, i64(rows), i64(width)))
    sums = sum_parts(out.reshape(-1, kinds * width), weight.dtype).reshape(kinds, *weight.shape)
    return dx.astype(dx_dtype, copy=False), *sums


@for_floats
def layer_norm(x: Any, weight: Any, bias: Any, *, naxes: int, eps: float) -> Any:
    """See :data:`meshtape.arrays.nn.norms.layer_norm.LAYER_NORM`."""
    return _forward(True, x, None, weight, bias, naxes, eps)[0]


@for_floats
def add_layer_norm(x: Any, residual: Any, weight: Any, bias: Any, *, naxes: int, eps: float) -> tuple[Any, Any]:
    """See :data:`meshtape.arrays.nn.norms.layer_norm.ADD_LAYER_NORM`."""
    return _forward(True, x, residual, weight, bias, naxes, eps)


@for_floats
def layer_norm_backward(g: Any, x: Any, weight: Any, *g_sum: Any, naxes: int, eps: float) -> tuple[Any, ...]:
    """See :data:`meshtape.arrays.nn.norms.layer_norm.LAYER_NORM_BACKWARD`."""
    return _backward(True, g, x, weight, g_sum, naxes, eps)


@for_floats
def rms_norm(x: Any, weight: Any, *, naxes: int, eps: float) -> Any:
    """See :data:`meshtape.arrays.nn.norms.layer_norm.RMS_NORM`."""
    return _forward(False, x, None, weight, None, naxes, eps)[0]


@for_floats
def add_rms_norm(x: Any, residual: Any, weight: Any, *, naxes: int, eps: float) -> tuple[Any, Any]:
    """See :data:`meshtape.arrays.nn.norms.layer_norm.ADD_RMS_NORM`."""
    return _forward(False, x, residual, weight, None, naxes, eps)


@for_floats
def rms_norm_backward(g: Any, x: Any, weight: Any, *g_sum: Any, naxes: int, eps: float) -> tuple[Any, ...]:
    """See :data:`meshtape.arrays.nn.norms.layer_norm.RMS_NORM_BACKWARD`."""
    return _backward(False, g, x, weight, g_sum, naxes, eps)
