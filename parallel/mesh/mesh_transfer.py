"""Mesh transfers: arrays that move to a part of their mesh, a larger one, a separate one, or one that overlaps it.

The plan is a pure value: the boxes of old blocks that make each new block. Every element is taken once, from a rank of
the same worker if there is one. On a Dask cluster the parts are cut on the workers that hold them and joined on the
workers that get them. Dask carries them from worker to worker, not through the client.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.dispatch import apply
from ...arrays.core.errors import ReshardError
from ...arrays.core.op import Op
from ...arrays.core.shape_dtype import ShapeDtype
from ..execution.runtime import HostValue, LocalRuntime
from ..resharding.plan import overlaps
from ..sharding.mesh_protocol import Mesh
from ..sharding.ops import RankOp
from ..sharding.placement import Layout, Sharding, block_box, strides_of


class Blocks(Protocol):
    """The buffer of an array on a mesh: :class:`.sharded_array.ShardedBuffer`."""

    mesh: Mesh
    layout: Layout
    shape: tuple[int, ...]
    dtype: np.dtype
    handle: Any
    collection: Any

    def computed(self) -> Blocks:
        """Itself, with a handle."""


class Part(NamedTuple):
    """Part ``source`` of the block of rank ``rank`` becomes part ``target`` of the new block (boxes within the blocks)."""

    rank: int
    source: Box
    target: Box


def plan_transfer(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    layout: Layout,
    new_sizes: tuple[int, ...],
    new_layout: Layout,
    homes: Sequence[Any] | None = None,
    new_homes: Sequence[Any] | None = None,
) -> tuple[tuple[Part, ...], ...]:
    """For each rank of the new mesh, the parts of its block.

    >>> rows = Layout(((0, (0,)),))
    >>> [[p.rank for p in parts] for parts in plan_transfer((6,), (3,), rows, (2,), rows)]
    [[0, 1], [1, 2]]
    """
    n = math.prod(sizes)
    strides = strides_of(sizes)
    split = {a for _, axes in layout.shards for a in axes}
    free = [range(0, sizes[a] * strides[a], strides[a]) for a in range(len(sizes)) if a not in split]
    copies = [sum(p) for p in itertools.product(*free)]  # offsets between the ranks of a block's replicas
    near: dict[tuple[Any, int], int] = {}
    if homes is not None and new_homes is not None:
        for r in reversed(range(n)):
            near[homes[r], sum(r // strides[a] % sizes[a] * strides[a] for a in split)] = r
    out = []
    for t in range(math.prod(new_sizes)):
        home = None if new_homes is None else new_homes[t]
        parts = []
        for o in overlaps(layout, sizes, shape, block_box(new_layout, new_sizes, shape, t)):
            # Replicas take turns: no rank gives everything.
            rank = near.get((home, o.rank), o.rank + copies[t % len(copies)])
            parts.append(Part(rank, o.source, o.target))
        out.append(tuple(parts))
    return tuple(out)


# ----- the op -----------------------------------------------------------------------------------------------------------


def _nowhere(xp: Any, x: Any, source: Sharding, target: Sharding) -> Any:
    return x


def _same(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> ShapeDtype:
    return args[0]


TRANSFER = RankOp("transfer", ("x",), _nowhere, _same)
"""The same value on another mesh. It is carried out at once."""


def moved_to_mesh(x: Any, target: Sharding) -> Any:
    """``x`` on another mesh, where no reduction is pending."""
    return apply(TRANSFER, (x,), {"source": x.sharding, "target": target})


def transferred(buf: Blocks, target: Sharding) -> Any:
    """The handle of the blocks of ``buf`` as blocks of another mesh."""
    old, new = buf.mesh, target.mesh
    buf.computed()
    if buf.layout.partials:
        buf = old.moved(buf, buf.layout.reduced()).computed()
    if isinstance(buf.handle, HostValue):
        handle: Any = HostValue(buf.handle.value, target.layout, new.sizes)
    elif isinstance(old.runtime, LocalRuntime) and isinstance(new.runtime, LocalRuntime):
        parts = plan_transfer(buf.shape, old.sizes, buf.layout, new.sizes, target.layout)
        blocks = old.runtime.fetch(buf.handle, old.runtime.ranks)
        handle = new.runtime.adopt(
            {
                t: _joined(
                    block_box(target.layout, new.sizes, buf.shape, t).shape,
                    buf.dtype,
                    [(p.target, blocks[p.rank][p.source.slices]) for p in found],
                )
                for t, found in enumerate(parts)
            }
        )
    else:
        handle = _over_dask(buf, target)
    return handle


def _joined(shape: tuple[int, ...], dtype: np.dtype, parts: Sequence[tuple[Box, np.ndarray]]) -> np.ndarray:
    out = np.empty(shape, dtype)
    for box, part in parts:
        out[box.slices] = part
    return out


# ----- between workers --------------------------------------------------------------------------------------------------


def _over_dask(buf: Blocks, target: Sharding) -> Any:
    from ..dask.runtime import DaskRuntime, RemoteBlocks
    from ..dask.worker import call_on_blocks

    old, new = buf.mesh.runtime, target.mesh.runtime
    if not (isinstance(old, DaskRuntime) and isinstance(new, DaskRuntime)) or old.client is not new.client:
        raise ReshardError(
            f"[reshard] from {buf.mesh} to {target.mesh}: blocks go between meshes of one Dask client, or of this process; "
            "use mt.distribute(np.asarray(x), mesh, …)"
        )
    parts = plan_transfer(
        buf.shape,
        buf.mesh.sizes,
        buf.layout,
        target.mesh.sizes,
        target.layout,
        [old.addresses[p] for p in old.homes],
        [new.addresses[p] for p in new.homes],
    )
    cuts: dict[tuple[int, int], dict[int, list[tuple[Any, Box]]]] = {}
    for t, found in enumerate(parts):
        for k, p in enumerate(found):
            pair = (old.homes[p.rank], new.homes[t])
            cuts.setdefault(pair, {}).setdefault(p.rank, []).append(((t, k), p.source))
    old._check_open()
    new._check_open()
    source = buf.handle
    old._flight.settle(source.gang)
    futures: dict[int, list[Any]] = {}
    for (p, q), wanted in cuts.items():
        given = [cut_parts, wanted, [(0, source.slot)], source.gang.futures[p]]
        futures.setdefault(q, []).append(old.submit(call_on_blocks, "cut", {p: given})[p])
    args: dict[int, list[Any]] = {}
    for q in range(len(new.addresses)):
        payload = {
            t: (
                block_box(target.layout, target.mesh.sizes, buf.shape, t).shape,
                buf.dtype,
                [(k, p.target) for k, p in enumerate(parts[t])],
            )
            for t in new.hosted(q)
        }
        args[q] = [payload, *futures.get(q, ())]
    return RemoteBlocks(new.kept(join_blocks, "transfer", args), 0)


def cut_parts(
    payloads: Mapping[int, Sequence[tuple[Any, Box]]], blocks: Mapping[int, Sequence[np.ndarray]]
) -> dict[Any, np.ndarray]:
    """On a worker of the old mesh: the parts that one worker of the new mesh gets, as bytes."""
    return {
        key: np.ascontiguousarray(blocks[rank][0][box.slices]).reshape(-1).view(np.uint8)
        for rank, wanted in payloads.items()
        for key, box in wanted
    }


def join_parts(payloads: Mapping[int, Any], pieces: Mapping[Any, np.ndarray]) -> dict[int, np.ndarray]:
    """On a worker of the new mesh: the blocks of its ranks."""
    return {
        t: _joined(shape, dtype, [(box, pieces[t, k].view(dtype).reshape(box.shape)) for k, box in wanted])
        for t, (shape, dtype, wanted) in payloads.items()
    }


def join_blocks(seat: Any, payloads: Mapping[int, Any], *cuts: Mapping[Any, np.ndarray]) -> Any:
    """On a worker of the new mesh: a bundle of the blocks of its ranks."""
    from ..dask.worker import kept

    pieces = {key: part for cut in cuts for key, part in cut.items()}
    return kept(seat, {0: join_parts(payloads, pieces)})
