"""Training of embeddings: contrastive losses, and batches that are larger than memory (gradient cache)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ....arrays import random
from ....arrays.core import tree as trees
from ....arrays.core.array import Array
from ....arrays.core.errors import ShapeError
from ....arrays.nn import nn
from ....arrays.ops.creation import arange, asarray
from ....arrays.ops.manipulation import astype, concat, reshape
from ....autodiff import checkpoint
from ...models.encoder import unit


def contrastive_loss(
    queries: Any,
    keys: Any,
    /,
    *,
    temperature: float = 0.02,
    group_size: int = 1,
    dims: Sequence[int] | None = None,
    symmetric: bool = False,
) -> Array:
    """Each query against the keys of the whole batch, its own being the right one; over all ranks.

    Query ``i`` belongs to key ``i * group_size``; the other keys of its group are hard negatives, and so are all keys
    of the other queries, on whatever rank they are: on a mesh the keys are gathered, and their gradients scattered
    back. Computed in float32.

    Parameters
    ----------
    queries, keys
        Shapes ``(n, d)`` and ``(n * group_size, d)``. They are scaled to length one; zero vectors stay zero.
    temperature
        Scores are cosines divided by it.
    group_size
        Keys of a query.
    dims
        Matryoshka (Kusupati et al., 2022): the sum of the losses of the first ``k`` elements, scaled to length one, for
        each ``k``.
    symmetric
        Add the loss of the keys against the queries, and halve the sum; for ``group_size`` 1.

    Examples
    --------
    >>> import meshtape as mt
    >>> mt.training.contrastive_loss(mt.eye(2), mt.eye(2), temperature=1.0)
    Array(0.31326169, dtype=float64)
    """
    q, k = asarray(queries), asarray(keys)
    if q.ndim != 2 or k.ndim != 2 or q.shape[1] != k.shape[1] or k.shape[0] != q.shape[0] * group_size:
        raise ShapeError(f"[contrastive_loss] queries {q.shape} and keys {k.shape} do not fit groups of {group_size}")
    if symmetric and group_size != 1:
        raise ShapeError(f"[contrastive_loss] symmetric is for group_size 1, got {group_size}")
    widths = (q.shape[1],) if dims is None else tuple(dims)
    if not widths or not all(1 <= d <= q.shape[1] for d in widths):
        raise ShapeError(f"[contrastive_loss] dims must be from 1 to {q.shape[1]}, got {widths}")
    q, k = (astype(x, np.float32) if x.dtype.itemsize <= 2 else x for x in (q, k))
    total: Any = 0.0
    for d in widths:
        a, b = unit(q[:, :d]), unit(k[:, :d])
        total = total + nn.info_nce(a, b, temperature=temperature, group_size=group_size)
        if symmetric:
            total = total + nn.info_nce(b, a, temperature=temperature)
    return total * 0.5 if symmetric else total


def grad_cache(
    embed: Callable[[Any, Any, Array | None], Any], loss: Callable[[Any], Any], *, chunk: int
) -> Callable[[Any, Any, Array | None], Any]:
    """A loss over all embeddings of a batch whose encoder holds only one chunk in memory at a time (Gao et al., 2021).

    The forward pass embeds chunk by chunk and keeps nothing but the embeddings; the backward pass computes each chunk
    again, with the same random numbers, when its gradient has come. The gradients are those of the whole batch. So are
    dropout and other random numbers: ``embed`` is given a key for each of its rows, which follows the sample whatever
    the chunk and the mesh.

    Parameters
    ----------
    embed
        ``embed(params, inputs, key)``: inputs are a tree of arrays with a common first dimension, of which a part is
        passed; the result is an array (or a tree) with the same first dimension.
    loss
        A function of the embeddings of the whole batch.
    chunk
        Rows of a chunk on each rank. The last chunk may be shorter.

    Returns
    -------
    callable
        ``fn(params, inputs, key)``, as ``mt.Trainer`` takes a loss.

    Examples
    --------
    >>> import meshtape as mt
    >>> x = mt.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> embed = lambda w, x, key: mt.tanh(x @ w)
    >>> cached = mt.training.grad_cache(embed, lambda e: (e @ e.T).sum(), chunk=2)
    >>> w = mt.eye(2)
    >>> plain = mt.grad(lambda w: (embed(w, x, None) @ embed(w, x, None).T).sum())(w)
    >>> bool(mt.all(mt.abs(mt.grad(lambda w: cached(w, x, None))(w) - plain) < 1e-12))
    True
    """
    if chunk < 1:
        raise ShapeError(f"[grad_cache] chunk must be at least 1, got {chunk}")

    def cached(params: Any, inputs: Any, key: Array | None) -> Any:
        leaves = [asarray(x) for x in trees.flatten(inputs)[0]]
        lengths = {x.shape[0] if x.ndim else None for x in leaves}
        if len(lengths) != 1 or None in lengths:
            raise ShapeError(
                f"[grad_cache] inputs need one common first dimension, got lengths {sorted(map(str, lengths))}"
            )
        n = leaves[0].shape[0]
        parts = _parts(leaves[0])
        if n % parts:
            parts = 1  # blocks of different lengths: rows change ranks, the result is the same
        rows = n // parts
        pieces = []
        if key is not None:
            key = asarray(key)
            key = key if key.shape == (n, 1, 2) else random.fold_in(key, arange(n))
        for start in range(0, rows, chunk):
            stop = min(start + chunk, rows)
            part = trees.tree_map(lambda x, a=start, b=stop: _rows(asarray(x), parts, a, b), inputs)
            chunk_key = None if key is None else _rows(key, parts, start, stop)

            def one(params: Any, part: Any, chunk_key: Array | None = chunk_key) -> Any:
                return embed(params, part, chunk_key)

            found = checkpoint(one)(params, part)
            pieces.append(trees.tree_map(lambda x, m=stop - start: reshape(x, (parts, m, *x.shape[1:])), found))
        whole = trees.tree_map(lambda *xs: concat(list(xs), axis=1), *pieces)
        return loss(trees.tree_map(lambda x: reshape(x, (n, *x.shape[2:])), whole))

    return cached


def _parts(x: Array) -> int:
    """Over how many ranks the rows of an array are split."""
    here = x.sharding
    return 1 if here is None else math.prod(here.mesh.sizes[a] for a in here.layout.axes_of(0))


def _rows(x: Array, parts: int, start: int, stop: int) -> Array:
    """Rows ``start … stop-1`` of each of so many equal parts, without a row changing its rank."""
    n = x.shape[0] // parts
    return reshape(reshape(x, (parts, n, *x.shape[1:]))[:, start:stop], (parts * (stop - start), *x.shape[1:]))
