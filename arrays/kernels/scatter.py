"""Gather and scatter kernels for CUDA: reads at an index array, their gradients, ``at[...].add`` and ``at[...].set``.

A key is made two numbers: the place of each row that is written, and how many elements a row has. Sums are added by
atomic operations, in whatever order the threads come, or
(:func:`~meshtape.arrays.backends.determinism.use_deterministic`, the default) in the order of the rows: sorted by
place, and added up chunk by chunk. Of several rows written to one place the last one stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..backends.determinism import is_deterministic
from ..core.dtypes import KERNEL_FLOATS
from ..core.index_template import Slot, Span, fitted, is_basic, numpy_key, result_shape
from .geometry import MAX_GRID, ceil_div, vector_length
from .launch import contiguous, i64, named, runner, wide, write

FILE, GATHER = "scatter.cu", "gather.cu"
_THREADS = 256
_FEW_KEYS = 4096
"""So many keys are sorted as they are: the launch that makes them shorter would not pay. (Not measured.)"""
_I64, _BOOL = np.dtype(np.int64), np.dtype(np.bool_)

_RAW = {n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)}
"""The dtype in which elements of so many bytes are copied."""
_VECTORS = {16: (_RAW[8], 2), 8: (_RAW[8], 1), 4: (_RAW[4], 1), 2: (_RAW[2], 1), 1: (_RAW[1], 1)}
"""Dtype and length of what so many bytes are copied as."""
_WHOLE = (Span(None, None, None), Span(None, None, 1))
_INDEX_DTYPES = (_I64, np.dtype(np.int32))
"""Dtypes of indices that the kernel reads; others are cast to the first one."""


def summed_as(dtype: np.dtype) -> np.dtype:
    """The dtype that sums are made in: short numbers have no atomic addition, or one that rounds at every step.

    >>> import numpy as np
    >>> [summed_as(np.dtype(t)).name for t in ("float16", "uint8", "float64")]
    ['float32', 'uint32', 'float64']
    """
    if dtype in KERNEL_FLOATS:
        return wide(dtype)
    return dtype if dtype.itemsize >= 4 else np.dtype(np.uint32)


def variants() -> Iterator[tuple[str, str]]:
    """File and name of every kernel that these functions may start."""
    for d in (*KERNEL_FLOATS, *_RAW.values()):
        yield FILE, named("join_chunks", d, summed_as(d))
        for vector in (1, 16 // d.itemsize) if d in KERNEL_FLOATS else (1,):
            for kernel in ("add_atomically", "add_in_order"):
                yield FILE, named(kernel, d, summed_as(d), vector)
    for d in (np.dtype(np.int32), _I64):
        yield FILE, named("mark_last", d)
        yield FILE, named("kept_by_mark", d)
    yield FILE, named("kept_by_order", _I64)
    for d in _RAW.values():
        yield FILE, named("write_kept", d)
        yield FILE, named("read_kept", d)
    for vector in _VECTORS.values():
        for index in _INDEX_DTYPES:
            yield GATHER, named("gather_rows", *vector, index)


# ----- reads ----------------------------------------------------------------------------------------------------------


def _threads(width: int) -> int:
    """Threads of a row of so many vectors: neighbours have neighbouring vectors, and each of a long row has several."""
    least = width if width <= 32 else max(32, ceil_div(width, 4))
    return min(1 << (least - 1).bit_length(), _THREADS)


def take_rows(x: Any, indices: Any, axis: int = 0) -> Any:
    """``take(x, indices, axis)`` of a contiguous array: its slices at the integers of an array, whatever shape this
    has. Indices out of range wrap around."""
    r = runner()
    length, tail = x.shape[axis], x.shape[axis + 1 :]
    out = r.xp.empty((*x.shape[:axis], *indices.shape, *tail), x.dtype)
    if not out.size:
        return out
    if indices.dtype not in _INDEX_DTYPES:
        indices = indices.astype(_INDEX_DTYPES[0])
    size = math.prod(tail) * x.dtype.itemsize
    each = next(n for n in _VECTORS if not any(k % n for k in (size, r.address(x), r.address(out))))
    outer, count, width = math.prod(x.shape[:axis]), indices.size, size // each
    threads = _threads(width)
    grid = (min(ceil_div(outer * count, _THREADS // threads), MAX_GRID), 1, 1)
    kernel = named("gather_rows", *_VECTORS[each], indices.dtype)
    numbers = map(i64, (outer, length, count, width))
    r.launch(GATHER, kernel, grid, (threads, _THREADS // threads, 1), (x, contiguous(indices), out, *numbers))
    return out


def getitem(x: Any, *arrays: Any, template: Any) -> Any:
    """See :data:`meshtape.arrays.indexing.indexing.GETITEM`. A key of one index array among whole dimensions is read by
    the kernel, from memory without gaps."""
    at = [i for i, p in enumerate(template) if p not in _WHOLE]
    if len(at) == 1 and isinstance(template[at[0]], Slot) and x.flags.c_contiguous and x.shape[at[0]]:
        (indices,) = arrays
        return take_rows(x, indices, at[0])
    return x[numpy_key(template, arrays)]


# ----- keys -----------------------------------------------------------------------------------------------------------


def rows_of(template: Any, arrays: Sequence[Any], shape: tuple[int, ...]) -> tuple[Any, int]:
    """The place of each row that ``x[key]`` reads, in C order as a flat int64 array, and the number of elements of a
    row.

    Dimensions at the end that the key takes whole make up the rows; the places are those among all rows.
    """
    xp = runner().xp
    lead, inner = list(template), 1
    kept = len(shape)
    while lead and isinstance(lead[-1], Span) and lead[-1] in _WHOLE:
        lead.pop()
        kept -= 1
        inner *= shape[kept]
    if all(isinstance(p, Slot) for p in lead):
        places: Any = 0
        for p, n in zip(lead, shape, strict=False):
            a = arrays[p.n].astype(np.int64, copy=False)
            # The remainder counts negative indices from the end. Where nobody has looked at the indices (traced ones,
            # or checks that are switched off) it also keeps a bad one inside the array, as CuPy's own indexing does.
            places = places * n + a % max(n, 1)
    else:
        every = xp.arange(math.prod(shape[:kept]), dtype=np.int64).reshape(shape[:kept])
        places = every[numpy_key(tuple(lead), arrays)]
    return contiguous(places).reshape(-1), inner


def _values(v: Any, places: Any, inner: int, template: Any, arrays: Sequence[Any], x: Any) -> tuple[Any, bool]:
    """The written value in rows, and whether it is one number for all of them."""
    xp = runner().xp
    v = xp.asarray(v).astype(x.dtype, copy=False)
    if v.size == 1:
        return contiguous(v.reshape(1)), True
    v = fitted(v, x, template, arrays)
    target = result_shape(template, x.shape, [a.shape for a in arrays])
    return contiguous(xp.broadcast_to(v, target)).reshape(places.shape[0], inner), False


def _grid(total: int) -> tuple[int, int, int]:
    return (max(1, min(ceil_div(total, _THREADS), 64 * runner().properties().multiprocessors)), 1, 1)


def _launch(kernel: str, total: int, *arguments: Any) -> None:
    runner().launch(FILE, kernel, _grid(total), (_THREADS, 1, 1), arguments)


# ----- sums -----------------------------------------------------------------------------------------------------------


def _parts(out: Any, values: Any, inner: int) -> tuple[Any, Any, int]:
    """Complex numbers as two real ones each; signed integers as unsigned ones, whose sums have the same bits."""
    if out.dtype.kind == "c":
        real = np.dtype(f"f{out.dtype.itemsize // 2}")
        return out.view(real), values.view(real), 2 * inner
    if out.dtype.kind == "i":
        return out.view(_RAW[out.dtype.itemsize]), values.view(_RAW[out.dtype.itemsize]), inner
    return out, values, inner


def add_rows(out: Any, places: Any, values: Any, inner: int, one: bool) -> Any:
    """``out`` (contiguous) with each row of ``values`` added at its place: ``out`` itself, or an array in its stead."""
    count = places.shape[0]
    if not count * inner:
        return out
    if out.dtype == _BOOL:  # the sum of truths is whether there is one
        return add_rows(out.astype(np.int32), places, values.astype(np.int32), inner, one).astype(bool)
    if one and out.dtype.kind == "c":
        values, one = contiguous(runner().xp.broadcast_to(values, (count, inner))), False
    real, values, inner = _parts(out, values, inner)
    if is_deterministic():
        _add_in_order(real, places, values, inner, one)
        return out
    a = summed_as(real.dtype)
    sums = real if a == real.dtype else real.astype(a)
    vector = _vector(values, sums, inner, one)
    kernel = named("add_atomically", real.dtype, a, vector)
    _launch(kernel, count * inner // vector, places, values, sums, i64(count), i64(inner), np.bool_(one))
    return out if sums is real else sums.astype(real.dtype).view(out.dtype)


def _vector(values: Any, out: Any, inner: int, one: bool) -> int:
    """Elements of a row that a thread adds at once."""
    if values.dtype not in KERNEL_FLOATS or one:
        return 1
    return vector_length(inner, [values.dtype.itemsize], [runner().address(x) for x in (values, out)])


def _order(places: Any, rows: int) -> Any:
    """The order that sorts places among ``rows`` rows, of equal ones in turn. The sort goes over each byte of its keys:
    many keys have no more bytes than they need."""
    keys = places
    if places.size > _FEW_KEYS:
        keys = places.astype(np.min_scalar_type(max(rows - 1, 0)), copy=False)
    return contiguous(runner().xp.argsort(keys, kind="stable").astype(np.int64, copy=False))


def _add_in_order(out: Any, places: Any, values: Any, inner: int, one: bool) -> None:
    r = runner()
    count = places.shape[0]
    order = _order(places, out.size // inner)
    ordered = take_rows(places, order)
    a, vector = summed_as(out.dtype), _vector(values, out, inner, one)
    tiles = ceil_div(inner, 32 * vector)
    chunk = max(8, min(256, ceil_div(count * tiles, 32 * r.properties().multiprocessors)))
    chunk = max(chunk, ceil_div(count, 8 * 65535))  # blocks along y are few
    chunks = ceil_div(count, chunk)
    carry = r.xp.empty((chunks, 2, inner), a)
    block, blocks = (32, 8, 1), ceil_div(chunks, 8)
    numbers = (i64(count), i64(inner), i64(chunk))
    kernel = named("add_in_order", out.dtype, a, vector)
    r.launch(FILE, kernel, (tiles, blocks, 1), block, (ordered, order, values, out, carry, *numbers, np.bool_(one)))
    if chunks > 1:
        grid = (ceil_div(inner, 32), blocks, 1)
        r.launch(FILE, named("join_chunks", out.dtype, a), grid, block, (ordered, carry, out, *numbers))


def scatter(g: Any, *arrays: Any, template: Any, shape: tuple[int, ...]) -> Any:
    """See :data:`meshtape.arrays.indexing.indexing.SCATTER`."""
    xp = runner().xp
    out = xp.zeros(shape, g.dtype)
    if is_basic(template):
        write(out, numpy_key(template, arrays), g)
        return out
    places, inner = rows_of(template, arrays, shape)
    return add_rows(out, places, contiguous(g).reshape(places.shape[0], inner), inner, False)


def index_add(x: Any, v: Any, *arrays: Any, template: Any) -> Any:
    """See :data:`meshtape.arrays.indexing.indexing.INDEX_ADD`."""
    out = runner().xp.array(x, order="C")
    if is_basic(template):
        out[numpy_key(template, arrays)] += fitted(v, out, template, arrays)
        return out
    places, inner = rows_of(template, arrays, out.shape)
    values, one = _values(v, places, inner, template, arrays, out)
    return add_rows(out, places, values, inner, one)


# ----- the last write -------------------------------------------------------------------------------------------------


def last_writes_kept(places: Any, rows: int) -> Any:
    """Whether each write is the last one to its place, among ``rows`` places."""
    r = runner()
    count = places.shape[0]
    kept = r.xp.empty(count, _BOOL)
    if not count:
        return kept
    if rows <= 8 * count + (1 << 20):
        n = np.dtype(np.int32) if count < 2**31 else _I64
        last = r.xp.full(rows, -1, n)
        _launch(named("mark_last", n), count, places, last, i64(count))
        _launch(named("kept_by_mark", n), count, places, last, kept, i64(count))
    else:  # a mark for every place would be most of the work, and of the memory
        order = _order(places, rows)
        _launch(named("kept_by_order", _I64), count, take_rows(places, order), order, kept, i64(count))
    return kept


def _raw(a: Any, inner: int) -> tuple[Any, int]:
    """An array of elements of any dtype as unsigned integers to copy, and how many of those a row has."""
    size = a.dtype.itemsize
    return (a.view(_RAW[8]), 2 * inner) if size == 16 else (a.view(_RAW[size]), inner)


def write_rows(out: Any, v: Any, template: Any, arrays: Sequence[Any]) -> None:
    """``out[key] = v`` in place (``out`` contiguous, the key with index arrays): the last write in C order stays."""
    places, inner = rows_of(template, arrays, out.shape)
    if places.shape[0] * inner:
        values, one = _values(v, places, inner, template, arrays, out)
        _put(out, places, values, inner, one)


def _put(out: Any, places: Any, values: Any, inner: int, one: bool) -> None:
    """Each row of ``values`` (or one number) at its place in ``out``: the last write in order stays."""
    count = places.shape[0]
    if one and out.dtype.itemsize == 16:
        values, one = contiguous(runner().xp.broadcast_to(values, (count, inner))), False
    kept = last_writes_kept(places, out.size // inner)
    values, _ = _raw(values, inner)
    target, inner = _raw(out, inner)
    kernel = named("write_kept", target.dtype)
    _launch(kernel, count * inner, places, kept, values, target, i64(count), i64(inner), np.bool_(one))


def index_set(x: Any, v: Any, *arrays: Any, template: Any) -> Any:
    """See :data:`meshtape.arrays.indexing.indexing.INDEX_SET`."""
    out = runner().xp.array(x, order="C")
    if is_basic(template):
        write(out, numpy_key(template, arrays), fitted(v, out, template, arrays))
    else:
        write_rows(out, v, template, arrays)
    return out


def last_writes(g: Any, *arrays: Any, template: Any) -> Any:
    """See :data:`meshtape.arrays.indexing.indexing.LAST_WRITES`."""
    r = runner()
    if is_basic(template):
        return r.xp.array(g[numpy_key(template, arrays)], order="C")
    g = contiguous(g)
    out = r.xp.empty(result_shape(template, g.shape, [a.shape for a in arrays]), g.dtype)
    places, inner = rows_of(template, arrays, g.shape)
    count = places.shape[0]
    if count * inner:
        kept = last_writes_kept(places, g.size // inner)
        source, _ = _raw(g, inner)
        target, inner = _raw(out, inner)
        kernel = named("read_kept", source.dtype)
        _launch(kernel, count * inner, places, kept, source, target, i64(count), i64(inner))
    return out


# ----- extremes -------------------------------------------------------------------------------------------------------


def index_extremum(name: str) -> Callable[..., Any]:
    """See :data:`meshtape.arrays.indexing.indexing.INDEX_MAX`.

    CuPy's atomic forms lack short numbers, truths and complex ones, lose NaN, and compare float64 as float32. Here the
    writes are sorted by place, and each meets its neighbours at growing distances.
    """

    def impl(x: Any, v: Any, *arrays: Any, template: Any) -> Any:
        xp = runner().xp
        meet = getattr(xp, name)
        out = xp.array(x, order="C")
        if is_basic(template):
            key = numpy_key(template, arrays)
            out[key] = meet(out[key], xp.asarray(fitted(v, out, template, arrays)).astype(out.dtype, copy=False))
            return out
        places, inner = rows_of(template, arrays, out.shape)
        count = places.shape[0]
        if not count * inner:
            return out
        values, _ = _values(v, places, inner, template, arrays, out)
        compared = wide(out.dtype) if out.dtype in KERNEL_FLOATS else out.dtype
        values = xp.broadcast_to(values.astype(compared, copy=False), (count, inner))
        order = _order(places, out.size // inner)
        places, values = take_rows(places, order), values[order]
        distance = 1
        while distance < count:
            joined = (places[distance:] == places[:-distance])[:, None]
            later = values[distance:]
            later = xp.where(joined, meet(later, values[:-distance]), later)
            values = xp.concatenate([values[:distance], later])
            distance *= 2
        before = out.reshape(-1, inner)[places].astype(values.dtype, copy=False)
        _put(out, places, contiguous(meet(before, values).astype(out.dtype, copy=False)), inner, False)
        return out

    return impl
