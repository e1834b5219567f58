"""Indexing along a split dimension: each rank answers for its own part.

A read gives the identity of a sum for elements of other ranks, so that the sum over the ranks is the value (a *masked
partial*: vocabulary-parallel embeddings, Megatron-LM). A write skips elements of other ranks. No rank gets more of the
array than it has. Indices are checked against the whole length first, as on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays.backends import host_sync
from ...arrays.core.blocks import Box
from ...arrays.core.errors import ArrayIndexError
from ...arrays.core.index_template import result_shape
from ...arrays.indexing import indexing as ix
from ...arrays.indexing import keys
from .factors import RankView
from .halos import Halo
from .ops import RankOp
from .placement import identity_of

Part = tuple[int, int, int]
"""A rank's part of a dimension: its start, its length, and the whole length."""


def _answers(
    xp: Any, template: keys.Template, arrays: Sequence[Any], parts: Sequence[Part | None]
) -> tuple[keys.Template, list[Any], Any]:
    """Template and indices within the rank's part (0 where they are elsewhere), and a mask of the rank's places: an
    array that broadcasts like the index arrays, or a bool without these."""
    own: list[Any] = list(arrays)
    out: list[Any] = []
    here: Any = True
    dim = 0
    for p in template:
        part = parts[dim] if dim < len(parts) else None
        consumes = not (p is None or isinstance(p, keys.Truth | keys.Gap))
        if part is not None and isinstance(p, keys.Slot):
            start, length, n = part
            a = xp.asarray(arrays[p.n])
            if xp is not np and not host_sync.checks_indices():
                a = a.astype(np.int64, copy=False) % max(n, 1)
            elif a.size:
                host_sync.note("index arrays are checked")
                outside = (a < -n) | (a >= n)
                if bool(outside.any()):
                    raise ArrayIndexError(
                        f"index {int(a[outside].ravel()[0])} is out of bounds for axis {dim} with size {n}"
                    )
            at = xp.where(a < 0, a.astype(np.int64) + n, a.astype(np.int64)) - start
            inside = (at >= 0) & (at < length)
            own[p.n] = xp.where(inside, at, 0)
            here = here & inside
        elif part is not None and type(p) is int:
            start, length, n = part
            inside = start <= p < start + length
            p = p - start if inside else 0
            here = here & inside
        out.append(p)
        dim += consumes
    return tuple(out), own, here


def _front(template: keys.Template) -> int:
    """Number of dimensions of the indexed part that stand before those of the index arrays."""
    joined = [i for i, p in enumerate(template) if isinstance(p, keys.Slot | keys.Truth | int)]
    if joined != list(range(joined[0], joined[-1] + 1)):
        return 0
    return sum(p is None or isinstance(p, keys.Span) for p in template[: joined[0]])


def _shape(a: Any) -> tuple[int, ...]:
    return getattr(a, "shape", ())


def _spread(xp: Any, here: Any, template: keys.Template, arrays: Sequence[Any], ndim: int) -> Any:
    """The mask of the rank's elements, in a shape that broadcasts with the indexed part."""
    if keys.is_basic(template) or not _shape(here):
        return here
    count = len(np.broadcast_shapes(*map(_shape, arrays)))
    at = _front(template)
    here = xp.broadcast_to(here, np.broadcast_shapes(here.shape, (1,) * count))
    return xp.reshape(here, (1,) * at + here.shape + (1,) * (ndim - at - count))


def _read(xp: Any, x: Any, *arrays: Any, template: keys.Template, parts: Sequence[Part | None]) -> Any:
    inner, own, here = _answers(xp, template, arrays, parts)
    whole = tuple(p[2] if p else n for p, n in zip(parts, x.shape, strict=True))
    shape = result_shape(template, whole, list(map(_shape, arrays)))
    nothing = identity_of("sum", x.dtype)
    if here is False or (x.size == 0 and any(parts)):
        return xp.full(shape, nothing, x.dtype)
    value = ix.GETITEM.bind(xp)(x, *own, template=inner)
    if here is True:
        return value
    return xp.where(_spread(xp, here, template, arrays, value.ndim), value, xp.asarray(nothing, x.dtype))


def _add_to_zeros(
    xp: Any, g: Any, *arrays: Any, template: keys.Template, parts: Sequence[Part | None], shape: tuple[int, ...]
) -> Any:
    inner, own, here = _answers(xp, template, arrays, parts)
    if here is False or not math.prod(shape):
        return xp.zeros(shape, g.dtype)
    if here is not True and xp is np:
        # Places of other ranks are left out, so that a rank keeps no more places than it has.
        common = np.broadcast_shapes(*map(_shape, own))
        here = np.broadcast_to(here, common)
        g = g[(slice(None),) * _front(template) + (here,)]
        own = [np.broadcast_to(a, common)[here] for a in own]
    elif here is not True:  # on a GPU to know how many there are is to wait for it
        g = xp.where(_spread(xp, here, template, arrays, g.ndim), g, xp.zeros((), g.dtype))
    return ix.SCATTER.bind(xp)(g, *own, template=inner, shape=shape)


def _write(
    xp: Any, x: Any, v: Any, *arrays: Any, template: keys.Template, parts: Sequence[Part | None], op: str
) -> Any:
    inner, own, here = _answers(xp, template, arrays, parts)
    if here is False or not x.size:
        return x
    write = _WRITES[op].bind(xp)
    if here is True:
        return write(x, v, *own, template=inner)
    # Only the rank's own writes: lists of places in place of the index arrays, and their values, in the same order.
    common = np.broadcast_shapes(*map(_shape, own))
    here = xp.broadcast_to(xp.asarray(here), common)
    at = _front(template)
    if hasattr(v, "ndim"):
        full = result_shape(inner, x.shape, [common])
        lead = len(full) - v.ndim
        v = xp.reshape(v, (1,) * max(lead, 0) + v.shape[max(-lead, 0) :])
        v = xp.broadcast_to(v, (*v.shape[:at], *common, *v.shape[at + len(common) :]))
        v = v[(slice(None),) * at + (here,)]
    return write(x, v, *(xp.broadcast_to(a, common)[here] for a in own), template=inner)


_WRITES = {op.name: op for op in (ix.INDEX_SET, ix.INDEX_ADD, ix.INDEX_MIN, ix.INDEX_MAX)}
READ_PART = RankOp("read_part", ("x", "*arrays"), _read)
SCATTER_PART = RankOp("scatter_part", ("g", "*arrays"), _add_to_zeros)
WRITE_PART = RankOp("write_part", ("x", "v", "*arrays"), _write)


# ----- parameters of one rank -----------------------------------------------------------------------------------------


def _local(
    template: keys.Template, whole: Sequence[int], box: Box, sliced: Callable[[keys.Span, int, int, int], keys.Span]
) -> dict[str, Any]:
    """The template and the parts for a block of the indexed array: ``sliced(span, length, start, count)`` are slices
    relative to it, and parts those of dimensions that are looked up and split."""
    inner: list[Any] = []
    parts: list[Part | None] = []
    for p in template:
        d = len(parts)
        if isinstance(p, keys.Span) and (box.offset[d], box.shape[d]) != (0, whole[d]):
            p = sliced(p, whole[d], box.offset[d], box.shape[d])
        inner.append(p)
        if not (p is None or isinstance(p, keys.Truth | keys.Gap)):
            looked_up = isinstance(p, keys.Slot) or type(p) is int
            split = looked_up and box.shape[d] != whole[d]
            parts.append((box.offset[d], box.shape[d], whole[d]) if split else None)
    return {"template": tuple(inner), "parts": tuple(parts)}


def _fetched(span: keys.Span, n: int, offset: int, length: int) -> keys.Span:
    """All that the rank has: it fetched just the elements of the slice that its block of the result needs."""
    return keys.Span(None, None, span.places(n).step)


def _within(span: keys.Span, n: int, offset: int, length: int) -> keys.Span:
    """The part of a slice that is in a block."""
    taken = span.places(n)
    lo, count = Halo("slice_grad", (taken.start, taken.step, len(taken))).region(offset, length)
    start = taken.start + lo * taken.step - offset
    stop = start + count * taken.step
    return keys.Span(start, stop if stop >= 0 else None, taken.step) if count else keys.Span(0, 0, None)


def local_read(whole: tuple[int, ...], params: Mapping[str, Any], view: RankView) -> Mapping[str, Any]:
    """Parameters of :data:`READ_PART` for the parts that a rank has."""
    box = view.operands[0]
    assert box is not None
    return _local(params["template"], whole, box, _fetched)


def local_scatter(whole: tuple[int, ...], params: Mapping[str, Any], view: RankView) -> Mapping[str, Any]:
    return {**_local(params["template"], whole, view.results[0], _within), "shape": view.results[0].shape}


def local_write(whole: tuple[int, ...], op: str, params: Mapping[str, Any], view: RankView) -> Mapping[str, Any]:
    return {**_local(params["template"], whole, view.results[0], _within), "op": op}
