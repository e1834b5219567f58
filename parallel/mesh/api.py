"""Functions that distribute, reshard, compute and explain arrays on meshes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.dispatch import Deferred, apply, refuse_watched
from ...arrays.core.errors import MeshError, ReshardError, ShardingConflict
from ...arrays.core.op import ShapeDtype
from ...arrays.indexing.sparse_cotangent import densify
from ...arrays.interface.writing import settled
from ...arrays.ops.creation import asarray
from ...autodiff.captures.tracing import Tracer
from ...autodiff.compiler.compile import compile
from ...autodiff.rules import defvjp
from ..execution.explain import program_text
from ..execution.runtime import HostValue
from ..sharding.ops import RESHARD
from ..sharding.placement import Placement, Sharding
from .mesh import Mesh
from .mesh_transfer import TRANSFER, moved_to_mesh
from .sharded_array import ShardedBuffer, sharded_array


def distribute(tree: Any, target: Mesh | Sharding, /, **placements: Placement) -> Any:
    """Arrays put on a mesh.

    Parameters
    ----------
    tree
        An array, or a tree of arrays (NumPy arrays and numbers too).
    target
        The mesh, with ``placements`` by axis name (axes left out replicate), or a :class:`Sharding`.

    Returns
    -------
    tree
        Of Arrays whose blocks live on the ranks. The bytes travel with the first computation that reads them.

    Raises
    ------
    MeshError, ShardingConflict
        For an unknown axis, a dimension that an array lacks, or an array on another mesh.

    Examples
    --------
    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"data": 2})
    >>> x = mt.distribute(mt.arange(5), mesh, data=mt.Shard(0))
    >>> (x * 2).sharding
    Sharding(data=Shard(0))
    >>> x * 2
    Array([0, 2, 4, 6, 8], sharding=Sharding(data=Shard(0)))
    """
    sharding = _sharding(target, placements)

    def put(x: Any) -> Array:
        if isinstance(x, int | float | complex) and sharding.layout.shards:
            raise ShardingConflict(
                f"[distribute] {sharding} splits the number {x!r}: lists are trees of arrays here, so np.asarray(…) "
                "the list first"
            )
        x = asarray(x)
        densify((x,))
        fitted = sharding.check(x.shape, x.dtype)
        if fitted.partial:
            raise ReshardError("distribute makes no pending reductions: use Shard(dim) or Replicate()")
        if isinstance(settled(x), Deferred):
            return reshard(x, fitted)
        refuse_watched("distribute", x, "distribute it before tape.watch(...)")
        host = np.asarray(x._concrete())
        value = HostValue(host, fitted.layout, fitted.mesh.sizes)
        return sharded_array(fitted.mesh, fitted.layout, ShapeDtype(host.shape, host.dtype), value)

    return trees.tree_map(put, tree)


def _sharding(target: Any, placements: dict[str, Placement]) -> Sharding:
    if isinstance(target, Sharding):
        return target.with_placements(**placements) if placements else target
    if not isinstance(target, Mesh):
        raise MeshError(f"arrays are distributed over a Mesh or by a Sharding, got {type(target).__name__}")
    return Sharding(target, **placements)


def reshard(x: Array, target: Sharding | None = None, /, **placements: Placement) -> Array:
    """The same values in another sharding; axes that are left out stay as they are. Differentiable.

    A ``target`` may be of another mesh: a part of this one, a larger one, one beside it. The blocks then go from worker
    to worker, at once, and not through this process.

    Raises
    ------
    ReshardError
        For a pending reduction that would have to become another one, and for meshes of different clusters.

    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"data": 2, "model": 2})
    >>> x = mt.distribute(mt.ones((4, 4)), mesh, data=mt.Shard(0))
    >>> mt.reshard(x, data=mt.Replicate(), model=mt.Shard(1)).sharding
    Sharding(data=Replicate(), model=Shard(1))
    """
    if isinstance(x, str | os.PathLike):
        raise MeshError(f"[reshard] takes an array; mt.storage.reshard(src, dst, …) reshards a checkpoint such as {x}")
    x = asarray(x)
    now = x.sharding
    if now is None:
        raise MeshError(f"[reshard] this array is on {x.device}, not on a mesh: use mt.distribute(x, mesh, …)")
    wanted = now if target is None else target
    wanted = (wanted.with_placements(**placements) if placements else wanted).check(x.shape, x.dtype)
    if wanted.mesh is not now.mesh:
        if isinstance(x._buf, Tracer):
            raise ReshardError(
                f"[reshard] from {now.mesh} to {wanted.mesh}: a compiled function stays on one mesh; move the array "
                "outside"
            )
        there = Sharding.of(wanted.mesh, wanted.layout.reduced())
        moved = moved_to_mesh(x, there)
        return reshard(moved, wanted) if wanted.layout.partials else moved  # pending reductions begin on the new mesh
    if wanted.layout == now.layout:
        return x
    for axis, op in wanted.layout.partials:
        before = dict(now.layout.partials).get(axis, op)
        if before != op:
            raise ReshardError(
                f"[reshard] along axis {now.mesh.names[axis]!r} a pending {before} cannot become a pending {op}: "
                "reduce it first, with Replicate()"
            )
    return apply(RESHARD, (x,), {"layout": wanted.layout})


def _moved_back(xp: Any, g: Any, source: Sharding, target: Sharding) -> Any:
    if g.sharding is None or g.sharding.mesh is source.mesh:
        return g
    return reshard(g, Sharding.of(source.mesh, source.layout.reduced()))


defvjp(TRANSFER, x=_moved_back)


def compute(*trees_in: Any) -> Any:
    """Run pending calls and wait for them. Returns its arguments (a single one as it is), whose arrays now have blocks.

    An error on a worker is raised here at the latest.

    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"data": 2})
    >>> y = mt.distribute(mt.arange(4), mesh, data=mt.Shard(0)) + 1
    >>> mt.compute(y)
    Array([1, 2, 3, 4], sharding=Sharding(data=Shard(0)))
    """
    buffers = [x._buf for x in trees.flatten(trees_in)[0] if isinstance(x, Array) and isinstance(x._buf, ShardedBuffer)]
    for b in buffers:
        b.computed()
    for b in buffers:
        b.mesh.runtime.wait(b.handle)
    return trees_in[0] if len(trees_in) == 1 else trees_in


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The rank program of ``fn(*args)`` as text: calls with their blocks, and collectives with their bytes and reasons.

    Brackets join the collectives of one round. Brackets with round corners join elementwise calls that are computed
    together, piece by piece, as their blocks are large. ``float64[2,4@model]`` is split in the second dimension along
    an axis, and ``{sum:model}`` marks a pending sum along that axis. If blocks are not in the host's memory, a first
    line says where they are and how they travel.

    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"model": 2})
    >>> x = mt.distribute(mt.ones((2, 4)), mesh, model=mt.Shard(1))
    >>> print(mt.explain(lambda x: x.sum(axis=1), x))
    rank program(%0: float64[2,4@model]):
      %1 = sum(%0, axis=(1,), keepdims=False)  : float64[2]{sum:model}
      %2 = all_reduce(model) %1  : float64[2]  # 32 bytes, as results are whole
      return %2
    """
    program = compile(fn).program(*args, **kwargs)
    inputs = [x for x in trees.flatten((args, kwargs))[0] if isinstance(x, Array | np.ndarray)]
    shardings = [x.sharding if isinstance(x, Array) else None for x in inputs]
    mesh = next((s.mesh for s in shardings if s is not None), None)
    if mesh is None:
        return str(program)
    placed = mesh.runtime.placed()
    text = program_text(mesh.rank_program(program, shardings), mesh.names, cuda=placed is not None)
    return text if placed is None else f"# blocks on {placed}\n{text}"
