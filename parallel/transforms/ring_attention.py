"""Ring attention: the sequence is split over ranks, and keys and values go round a ring (Liu et al., 2023)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...arrays.core.array import Array
from ...arrays.core.errors import MeshError, ShapeError
from ...arrays.ops.creation import asarray
from ...arrays.ops.elementwise import exp, maximum, stop_gradient, where
from ...arrays.ops.manipulation import astype, matrix_transpose
from ...arrays.ops.matmul import matmul
from ...arrays.reductions.reductions import max as max_
from ...arrays.reductions.reductions import sum as sum_
from ..sharding.placement import Placement, Replicate, Shard
from ..spmd.collectives import axis_index, permute
from .shard_map import shard_map


def ring_attention(
    query: Array, key: Array, value: Array, *, axis: str, is_causal: bool = False, scale: float | None = None
) -> Array:
    """:func:`mt.nn.scaled_dot_product_attention` with the sequence split over a mesh axis; no rank ever holds all of
    it.

    Each rank keeps its block of the queries. The blocks of keys and values go round, and their contributions are joined
    by a running maximum and sum, so that the result is that of the whole softmax. Peak memory of the scores falls with
    the square of the number of ranks; per rank and step, ``2 * b * kv_heads * s / ranks * d`` elements are sent.

    Parameters
    ----------
    query, key, value
        Of dimensions ``(b, heads, …, s, d)`` on one mesh; ``s`` of all three is one number, a multiple of the axis.
        Leading dimensions broadcast, as fewer key heads in a dimension of their own do. Splits of the first two
        dimensions stay.
    axis
        Name of the mesh axis that splits the sequence.
    is_causal
        Query ``i`` looks at keys ``0 … i`` only.
    scale
        ``1 / sqrt(d)`` by default.

    Raises
    ------
    MeshError
        For arrays that are on no mesh with this axis.
    ShapeError
        Where the sequence is no multiple of the axis, or shapes do not fit together.

    Examples
    --------
    >>> import meshtape as mt
    >>> from meshtape.parallel.transforms.ring_attention import ring_attention
    >>> mesh = mt.Mesh({"context": 2})
    >>> x = mt.distribute(mt.ones((1, 1, 4, 2)), mesh, context=mt.Shard(2))
    >>> ring_attention(x, x, x, axis="context", is_causal=True).sharding
    Sharding(context=Shard(2))
    """
    q, k, v = asarray(query), asarray(key), asarray(value)
    here = q.sharding
    if here is None or axis not in here.mesh.names:
        raise MeshError(f"[ring_attention] the query must lie on a mesh with the axis {axis!r}, it is on {q.device}")
    if q.ndim < 3 or not q.ndim == k.ndim == v.ndim or q.shape[-1] != k.shape[-1]:
        raise ShapeError(f"[ring_attention] query {q.shape}, key {k.shape} and value {v.shape} do not fit together")
    s, ranks = q.shape[-2], here.mesh.describe()[axis]
    if k.shape[-2] != s or v.shape[-2] != s or s % ranks:
        raise ShapeError(
            f"[ring_attention] sequences of {s}, {k.shape[-2]} and {v.shape[-2]} must be one multiple of the {ranks} "
            f"ranks of {axis!r}"
        )
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    placed: dict[str, Placement] = {}
    for name, p in here.placements.items():
        # A dimension that key and value broadcast along cannot be split for all three.
        splits = (
            isinstance(p, Shard) and p.dim < min(2, q.ndim - 2) and q.shape[p.dim] == k.shape[p.dim] == v.shape[p.dim]
        )
        placed[name] = p if splits else Replicate()
    placed[axis] = Shard(q.ndim - 2)

    def block(q: Array, k: Array, v: Array) -> Array:
        return _ring(q, k, v, axis, ranks, is_causal, scale)

    return shard_map(block, here.mesh, (placed, placed, placed), placed)(q, k, v)


def _ring(q: Array, k: Array, v: Array, axis: str, ranks: int, is_causal: bool, scale: float) -> Array:
    """One rank's part: its queries against every block of keys, which arrive one after the other."""
    dtype = q.dtype
    wide = np.dtype(np.float32) if dtype.itemsize <= 2 else dtype
    n = q.shape[-2]
    place = np.arange(n)
    i = axis_index(axis)
    q = astype(q, wide, copy=False) * scale
    top: Any = None
    total: Any = None
    out: Any = None
    for t in range(ranks):
        scores = matmul(q, matrix_transpose(astype(k, wide, copy=False)))
        if is_causal:
            # After t turns a rank holds the keys of the rank t places before it.
            source = (i - t) % ranks
            seen = (i * n + asarray(place)[:, None]) >= (source * n + asarray(place)[None, :])
            scores = where(seen, scores, -math.inf)
        here = stop_gradient(max_(scores, axis=-1, keepdims=True))
        new = here if top is None else maximum(top, here)
        # A block of which nothing may be seen has the maximum -inf, from which nothing can be subtracted.
        safe = where(new == -math.inf, 0.0, new)
        weights = exp(scores - safe)
        brought = matmul(weights, astype(v, wide, copy=False))
        count = sum_(weights, axis=-1, keepdims=True)
        if top is None:
            total, out = count, brought
        else:
            share = exp(top - safe)
            total, out = total * share + count, out * share + brought
        top = new
        if t + 1 < ranks:
            k, v = permute(k, axis, shift=1), permute(v, axis, shift=1)
    return astype(out / total, dtype, copy=False)
