"""Collectives of per-rank code, inside :func:`meshtape.shard_map`.

All of them take a mesh axis by name, or several names as a tuple (the first is the outer one), and trees of arrays. All
are differentiable (the table of forward and backward pairs is in :mod:`meshtape.parallel.spmd.rank_ops`). All ranks of
the axis take part, with blocks of one shape; it may be empty.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from ...arrays.backends.row_blocks import wide
from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.errors import AxisError, DTypeError, MeshError, ShapeError
from ...arrays.ops.creation import asarray
from ..resharding.split_sizes import SplitSizes
from ..sharding.placement import REDUCE_OPS
from . import rank_ops as ops
from .rank_trace import RankTrace, current

Axis = str | tuple[str, ...]


def _trace(name: str, axis: Axis) -> tuple[RankTrace, tuple[int, ...]]:
    trace = current.trace
    if trace is None:
        raise MeshError(
            f"[{name}] is for per-rank code: call it inside a function that mt.shard_map runs (outside, arrays are "
            "whole, and mt.sum, mt.reshard, … do what is needed)"
        )
    names = (axis,) if isinstance(axis, str) else tuple(axis)
    axes = tuple(trace.mesh.axis(n) for n in names)
    if len(set(axes)) != len(axes) or not axes:
        raise MeshError(f"[{name}] needs different axes of {trace.mesh}, got {names}")
    return trace, axes


def _each(name: str, tree: Any, axis: Axis, fn: Callable[[RankTrace, tuple[int, ...], Array], Array]) -> Any:
    trace, axes = _trace(name, axis)

    def one(x: Any) -> Array:
        given = isinstance(x, Array)
        lifted = trace.lift(asarray(x))
        return fn(trace, axes, lifted if given else trace.varied(lifted, axes))

    return trees.tree_map(one, tree)


def _dim(name: str, dim: int, x: Array) -> int:
    dim = operator.index(dim)
    if not -x.ndim <= dim < x.ndim:
        raise AxisError(f"[{name}] dim {dim} is out of bounds for a block of {x.ndim} dimension(s)")
    return dim % x.ndim


def _refuse_reduced(name: str, trace: RankTrace, axes: tuple[int, ...], x: Array) -> None:
    same = [trace.mesh.names[a] for a in axes if trace.mesh.sizes[a] > 1 and a not in trace.axes_of_variation(x)]
    if same and not any(a in trace.axes_of_variation(x) for a in axes):
        part = ""
        if name == "reduce_scatter":
            part = (
                "; where each rank's part is meant, take it: mt.take(x, mt.axis_index(…) * k + mt.arange(k), axis=dim)"
            )
        raise MeshError(
            f"[{name}] the value is the same on all ranks of {', '.join(map(repr, same))} already (replicated, or "
            "reduced before, as the gradient of what is replicated is); where the sum of equal values is meant, "
            f"multiply by mt.axis_size{part}"
        )


def _mean(x: Array, count: int, add: Callable[[Array], Array]) -> Array:
    """The mean by a sum over ranks; that of short floats may be beyond their range."""
    inner = wide(x.dtype)
    out = add(x.astype(inner, copy=False)) / count
    return out if inner == x.dtype else out.astype(x.dtype)


def _equal_parts(name: str, length: int, n: int, sizes: Sequence[int] | None) -> None:
    """Raise where a dimension is not cut in equal parts, one for each of ``n`` ranks."""
    given = [length / n] * n if sizes is None else list(map(operator.index, sizes))
    if len(given) != n or len(set(given)) != 1 or sum(given) != length or (sizes is None and length % n):
        raise ShapeError(
            f"[{name}] a dimension of length {length} is divided between {n} ranks in equal parts"
            + ("" if sizes is None else f", got {list(sizes)}")
        )


def axis_size(axis: Axis) -> int:
    """Number of ranks along a mesh axis (or several), inside :func:`shard_map`.

    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"data": 3})
    >>> mt.shard_map(lambda x: x * mt.axis_size("data"), mesh, {}, {})(mt.asarray(1.0))
    Array(3., dtype=float64, sharding=Sharding(data=Replicate()))
    """
    trace, axes = _trace("axis_size", axis)
    return trace.group_size(axes)


def axis_index(axis: Axis) -> Array:
    """Place of this rank along a mesh axis (or several), as an integer array of no dimensions.

    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"data": 3})
    >>> mt.shard_map(lambda: mt.axis_index("data")[None], mesh, {}, {"data": mt.Shard(0)})()
    Array([0, 1, 2], sharding=Sharding(data=Shard(0)))
    """
    trace, axes = _trace("axis_index", axis)
    return trace.index(axes)


def all_reduce(x: Any, axis: Axis, *, op: str = "sum") -> Any:
    """The reduction of the values of all ranks of an axis; all get it.

    Parameters
    ----------
    x
        An array, or a tree of arrays, of one shape on all ranks.
    axis
        Name of a mesh axis, or a tuple of names.
    op
        ``"sum"``, ``"mean"``, ``"prod"``, ``"max"``, ``"min"``, ``"any"`` or ``"all"``.

    Raises
    ------
    MeshError
        Outside :func:`shard_map`, or for a value that is the same on all ranks of the axis already: reducing it again,
        by oversight, would multiply it.

    Notes
    -----
    The derivative of a sum costs no message; ties of ``max`` and ``min`` share the gradient, however many ranks hold
    them.

    Examples
    --------
    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"data": 2})
    >>> mean = mt.shard_map(lambda x: mt.all_reduce(mt.sum(x), "data") / 4, mesh, {"data": mt.Shard(0)}, {})
    >>> mean(mt.asarray([1.0, 2.0, 3.0, 6.0]))
    Array(3., dtype=float64, sharding=Sharding(data=Replicate()))
    """
    if op not in (*REDUCE_OPS, "mean"):
        raise ValueError(f"[all_reduce] op is one of {', '.join((*REDUCE_OPS, 'mean'))}, got {op!r}")

    def one(trace: RankTrace, axes: tuple[int, ...], x: Array) -> Array:
        logical = op in ("any", "all")
        if logical != (x.dtype.kind == "b") or (x.dtype.kind == "c" and op in ("max", "min")):
            raise DTypeError(f"[all_reduce] op {op!r} does not reduce {x.dtype.name}: booleans take 'any' and 'all'")
        _refuse_reduced("all_reduce", trace, axes, x)
        if op == "mean":
            return _mean(x, trace.group_size(axes), lambda x: ops.all_reduce(x, axes))
        return ops.all_reduce(x, axes, op)

    return _each("all_reduce", x, axis, one)


def all_gather(x: Any, axis: Axis, *, dim: int = 0) -> Any:
    """The blocks of all ranks of an axis, joined along a dimension; all get them.

    A new dimension is made by the caller: ``x[None]``.

    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"model": 2})
    >>> whole = mt.shard_map(lambda w: mt.all_gather(w, "model"), mesh, {"model": mt.Shard(0)}, {})
    >>> whole(mt.arange(4))
    Array([0, 1, 2, 3], sharding=Sharding(model=Replicate()))
    """

    def one(trace: RankTrace, axes: tuple[int, ...], x: Array) -> Array:
        return ops.all_gather(x, axes, _dim("all_gather", dim, x))

    return _each("all_gather", x, axis, one)


def reduce_scatter(x: Any, axis: Axis, *, dim: int = 0, op: str = "sum", sizes: Sequence[int] | None = None) -> Any:
    """The reduction of the values of all ranks, of which each keeps a part.

    Parameters
    ----------
    x
        An array, or a tree of arrays, of one shape on all ranks.
    axis
        Name of a mesh axis, or a tuple of names.
    dim
        Dimension that is divided.
    op
        As in :func:`all_reduce`.
    sizes
        Lengths of the parts, one a rank, which must be equal, as they are by default.

    Examples
    --------
    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"data": 2})
    >>> f = mt.shard_map(lambda x: mt.reduce_scatter(x[0], "data"), mesh, {"data": mt.Shard(0)}, {"data": mt.Shard(0)})
    >>> f(mt.asarray([[1, 2], [10, 20]]))
    Array([11, 22], sharding=Sharding(data=Shard(0)))
    """

    def one(trace: RankTrace, axes: tuple[int, ...], x: Array) -> Array:
        at, n = _dim("reduce_scatter", dim, x), trace.group_size(axes)
        _equal_parts("reduce_scatter", x.shape[at], n, sizes)
        _refuse_reduced("reduce_scatter", trace, axes, x)
        if op == "mean":
            return _mean(x, n, lambda x: ops.reduce_scatter(x, axes, at))
        if op == "sum":
            return ops.reduce_scatter(x, axes, at)
        return ops.slice_local(all_reduce(x, axis, op=op), axes, at)

    return _each("reduce_scatter", x, axis, one)


def all_to_all(
    x: Any, axis: Axis, *, split_dim: int = 0, concat_dim: int = 0, split_sizes: Sequence[Any] | None = None
) -> Any:
    """Each rank sends a part of its block to each other, and joins the parts that it gets.

    Parameters
    ----------
    x
        An array, or a tree of arrays.
    axis
        Name of a mesh axis, or a tuple of names.
    split_dim
        Dimension along which the block is divided.
    concat_dim
        Dimension along which the parts that arrive are joined, in the order of the ranks.
    split_sizes
        Lengths of the parts: one list that all ranks use, or a matrix whose row ``i`` has the lengths that rank ``i``
        sends to each. Equal parts by default. Zeros are allowed. All ranks send, and get, as much as each other.

    Examples
    --------
    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"model": 2})
    >>> rows, columns = {"model": mt.Shard(0)}, {"model": mt.Shard(1)}
    >>> turn = mt.shard_map(lambda x: mt.all_to_all(x, "model", split_dim=1, concat_dim=0), mesh, rows, columns)
    >>> turn(mt.reshape(mt.arange(8), (2, 4)))
    Array([[0, 1, 2, 3],
           [4, 5, 6, 7]], sharding=Sharding(model=Shard(1)))
    """

    def one(trace: RankTrace, axes: tuple[int, ...], x: Array) -> Array:
        at, to, n = _dim("all_to_all", split_dim, x), _dim("all_to_all", concat_dim, x), trace.group_size(axes)
        length = x.shape[at]
        if split_sizes is None:
            _equal_parts("all_to_all", length, n, None)
            sizes = SplitSizes.alike((length // n,) * n, n)
        elif all(isinstance(s, Sequence) for s in split_sizes):
            sizes = SplitSizes.matrix([tuple(map(operator.index, row)) for row in split_sizes])
        else:
            sizes = SplitSizes.alike(tuple(map(operator.index, split_sizes)), n)
        if len(sizes.of) != n or any(len(row) != n or min(row, default=0) < 0 for row in sizes.rows):
            raise ShapeError(f"[all_to_all] split_sizes are {n} lengths, or {n} rows of them, got {split_sizes}")
        for me in range(n):
            if sum(sizes.row(me)) != length:
                raise ShapeError(
                    f"[all_to_all] rank {me} of {axis!r} sends parts {list(sizes.row(me))} of a dimension of length "
                    f"{length}"
                )
            if (sum(sizes.column(me)) != length) if at == to else (len({k for row in sizes.rows for k in row}) > 1):
                raise ShapeError(
                    f"[all_to_all] rank {me} of {axis!r} would get parts {list(sizes.column(me))}, and other ranks "
                    "more or less: blocks of one shape are needed on all ranks"
                )
        return ops.all_to_all(x, axes, at, to, sizes)

    return _each("all_to_all", x, axis, one)


def permute(x: Any, axis: Axis, pairs: Sequence[tuple[int, int]] | None = None, *, shift: int | None = None) -> Any:
    """Blocks sent along pairs of places (from, to); ranks without a source get zeros.

    ``shift=k`` sends to the k-th next rank, round the ring.

    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"ring": 3})
    >>> f = mt.shard_map(lambda x: mt.permute(x, "ring", shift=1), mesh, {"ring": mt.Shard(0)}, {"ring": mt.Shard(0)})
    >>> f(mt.asarray([1, 2, 3]))
    Array([3, 1, 2], sharding=Sharding(ring=Shard(0)))
    """
    if (pairs is None) == (shift is None):
        raise TypeError("[permute] takes pairs of places, or shift=…, and not both")

    def one(trace: RankTrace, axes: tuple[int, ...], x: Array) -> Array:
        n = trace.group_size(axes)
        if pairs is None:
            found = tuple((i, (i + operator.index(shift)) % n) for i in range(n))  # type: ignore[arg-type]
        else:
            found = tuple(sorted((operator.index(s), operator.index(d)) for s, d in pairs))
        for which in zip(*found, strict=True) if found else ():
            if len(set(which)) != len(which) or not all(0 <= i < n for i in which):
                raise MeshError(f"[permute] each place of 0…{n - 1} sends and is sent to at most once, got {found}")
        return ops.send(x, axes, found)

    return _each("permute", x, axis, one)


def broadcast(tree: Any, axis: Axis, *, source: int = 0) -> Any:
    """The arrays of one rank of an axis on all of them, in the same tree.

    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"data": 3})
    >>> rows = {"data": mt.Shard(0)}
    >>> first = mt.shard_map(lambda x: mt.broadcast({"x": x, "note": "hi"}, "data")["x"], mesh, rows, {})
    >>> first(mt.asarray([5, 6, 7]))
    Array([5], sharding=Sharding(data=Replicate()))
    """
    trace, axes = _trace("broadcast", axis)
    n = trace.group_size(axes)
    if not 0 <= operator.index(source) < n:
        raise MeshError(f"[broadcast] source {source} is none of the {n} ranks of {axis!r}")
    return trees.tree_map(lambda x: ops.broadcast(trace.lift(x), axes, source) if isinstance(x, Array) else x, tree)
