"""Mesh transfers: arrays that move to a part of their mesh, a larger one, a separate one, or one that overlaps it.

The plan is a pure value: the boxes of old blocks that make each new block. Every element is taken once, from a rank of
the same worker if there is one. On a Dask cluster the parts are cut on the workers that hold them and joined on the
workers that get them. Dask carries them from worker to worker, not through the client.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.dispatch import apply
from ...arrays.core.errors import ReshardError
from ..execution.runtime import HostValue, LocalRuntime
from ..resharding.plan import overlaps
from ..sharding.mesh_protocol import MeshProtocol
from ..sharding.ops import RankOp
from ..sharding.placement import Layout, Sharding, block_box, strides_of


class ShardedLike(Protocol):
    """The buffer of an array on a mesh: :class:`.sharded_array.ShardedBuffer`."""

    mesh: MeshProtocol
    layout: Layout
    shape: tuple[int, ...]
    dtype: np.dtype
    handle: Any
    collection: Any

    def computed(self) -> ShardedLike:
        """Itself, with a handle."""

    def concrete(self) -> np.ndarray:
        """The whole array in this process."""


class TransferPart(NamedTuple):
    """Part ``source`` of the block of rank ``rank`` becomes part ``target`` of the new block (boxes within the
    blocks)."""

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
    *,
    at: Sequence[int] | None = None,
    new_shape: tuple[int, ...] | None = None,
) -> tuple[tuple[TransferPart, ...], ...]:
    """For each rank of the new mesh, the parts of its block. The old array begins at the offset ``at`` in the new one,
    of ``new_shape``; what lies outside of it is not moved.

    >>> rows = Layout(((0, (0,)),))
    >>> [[p.rank for p in parts] for parts in plan_transfer((6,), (3,), rows, (2,), rows)]
    [[0, 1], [1, 2]]
    """
    at, new_shape = at or (0,) * len(shape), new_shape or shape
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
        block = block_box(new_layout, new_sizes, new_shape, t)
        want = block.intersect(Box(tuple(at), shape))
        for o in overlaps(layout, sizes, shape, want.within(Box(tuple(at), shape))) if want is not None else ():
            # Replicas take turns: no rank gives everything.
            rank = near.get((home, o.rank), o.rank + copies[t % len(copies)])
            to = Box(tuple(map(operator.add, o.target.offset, want.within(block).offset)), o.target.shape)
            parts.append(TransferPart(rank, o.source, to))
        out.append(tuple(parts))
    return tuple(out)


# ----- the op ---------------------------------------------------------------------------------------------------------


TRANSFER = RankOp("transfer", ("x",), lambda xp, x, source, target: x)
"""The same value on another mesh. It is carried out at once."""


def moved_to_mesh(x: Any, target: Sharding) -> Any:
    """``x`` on another mesh, where no reduction is pending."""
    return apply(TRANSFER, (x,), {"source": x.sharding, "target": target})


def assembled(sources: Sequence[tuple[ShardedLike, Sequence[int]]], shape: tuple[int, ...], target: Sharding) -> Any:
    """The handle of an array of this shape in a sharding, put together from arrays on other meshes, each of which
    begins at an offset in it. An offset below zero leaves out the beginning of an array."""
    found = []
    for buf, at in sources:
        buf.computed()
        old = buf.mesh
        found.append((old.moved(buf, buf.layout.reduced()).computed() if buf.layout.partials else buf, at))
    new, dtype = target.mesh, found[0][0].dtype
    if any(isinstance(buf.handle, HostValue) for buf, _ in found):
        value = np.empty(shape, dtype)
        for buf, at in found:
            box = Box.whole(shape).intersect(Box(tuple(at), buf.shape))
            if box is not None:
                value[box.slices] = buf.concrete()[box.within(Box(tuple(at), buf.shape)).slices]
        return HostValue(value, target.layout, new.sizes)
    runtimes = [buf.mesh.runtime for buf, _ in found]
    if isinstance(new.runtime, LocalRuntime) and all(isinstance(r, LocalRuntime) for r in runtimes):
        parts: dict[int, list[tuple[Box, np.ndarray]]] = {t: [] for t in range(new.size)}
        for buf, at in found:
            plan = plan_transfer(
                buf.shape, buf.mesh.sizes, buf.layout, new.sizes, target.layout, at=at, new_shape=shape
            )
            blocks = buf.mesh.runtime.fetch(buf.handle, buf.mesh.runtime.ranks)
            for t, pieces in enumerate(plan):
                parts[t] += [(p.target, blocks[p.rank][p.source.slices]) for p in pieces]
        return new.runtime.adopt(
            {t: joined(block_box(target.layout, new.sizes, shape, t).shape, dtype, mine) for t, mine in parts.items()}
        )
    return _over_dask(found, shape, target)


def joined(shape: tuple[int, ...], dtype: np.dtype, parts: Iterable[tuple[Box, np.ndarray]]) -> np.ndarray:
    """An array of these parts, each at its box."""
    out = np.empty(shape, dtype)
    for box, part in parts:
        out[box.slices] = part
    return out


# ----- between workers ------------------------------------------------------------------------------------------------


def _over_dask(sources: Sequence[tuple[ShardedLike, Sequence[int]]], shape: tuple[int, ...], target: Sharding) -> Any:
    from ..dask.runtime import DaskRuntime, RemoteBlocks
    from ..dask.worker import call_on_blocks

    new = target.mesh.runtime
    boxes: dict[int, list[tuple[Any, Box]]] = {t: [] for t in range(target.mesh.size)}
    futures: dict[int, list[Any]] = {}
    for number, (buf, at) in enumerate(sources):
        old = buf.mesh.runtime
        if not (isinstance(old, DaskRuntime) and isinstance(new, DaskRuntime)) or old.client is not new.client:
            raise ReshardError(
                f"[reshard] from {buf.mesh} to {target.mesh}: blocks go between meshes of one Dask client, or of this "
                "process; use mt.distribute(np.asarray(x), mesh, …)"
            )
        plan = plan_transfer(
            buf.shape,
            buf.mesh.sizes,
            buf.layout,
            target.mesh.sizes,
            target.layout,
            [old.addresses[p] for p in old.homes],
            [new.addresses[p] for p in new.homes],
            at=at,
            new_shape=shape,
        )
        cuts: dict[tuple[int, int], dict[int, list[tuple[Any, Box]]]] = {}
        for t, found in enumerate(plan):
            for k, p in enumerate(found):
                pair = (old.homes[p.rank], new.homes[t])
                cuts.setdefault(pair, {}).setdefault(p.rank, []).append(((number, t, k), p.source))
                boxes[t].append(((number, t, k), p.target))
        old._check_open()
        new._check_open()
        old._queue.wait(buf.handle.gang)
        for (p, q), wanted in cuts.items():
            given = [cut_parts, wanted, [(0, buf.handle.slot)], buf.handle.gang.futures[p]]
            futures.setdefault(q, []).append(old.submit(call_on_blocks, "cut", {p: given})[p])
    args: dict[int, list[Any]] = {}
    for q in range(len(new.addresses)):
        payload = {
            (0, t): (block_box(target.layout, target.mesh.sizes, shape, t).shape, sources[0][0].dtype, boxes[t])
            for t in new.hosted(q)
        }
        args[q] = [payload, 1, *futures.get(q, ())]
    return RemoteBlocks(new.kept(join_blocks, "transfer", args), 0)


def cut_parts(
    payloads: Mapping[int, Sequence[tuple[Any, Box]]], blocks: Mapping[int, Sequence[np.ndarray]]
) -> dict[Any, np.ndarray]:
    """On a worker of the old mesh: the parts that one worker of the new mesh gets, as bytes."""
    return {key: bytes_of(blocks[rank][0][box.slices]) for rank, wanted in payloads.items() for key, box in wanted}


def bytes_of(block: Any) -> np.ndarray:
    """The elements of a block in the memory of the host as bytes, which any connection carries."""
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8)


def join_blocks(
    context: Any, payloads: Mapping[tuple[int, int], Any], count: int, *cuts: Mapping[Any, np.ndarray]
) -> Any:
    """On a worker of the new mesh: a bundle of the blocks of its ranks, for ``count`` arrays. ``payloads`` has shape,
    dtype and parts of each block, by array and rank; ``cuts`` the bytes of the parts."""
    from ..dask.worker import kept

    pieces = {key: part for cut in cuts for key, part in cut.items()}
    slots: dict[int, dict[int, np.ndarray]] = {slot: {} for slot in range(count)}
    for (slot, t), (shape, dtype, wanted) in payloads.items():
        parts = ((box, pieces[key].view(dtype).reshape(box.shape)) for key, box in wanted)
        slots[slot][t] = joined(shape, dtype, parts)
    return kept(context, slots)
