"""In-memory replicas: each block is kept on two workers, so that the arrays can be restored when one is lost.

A copy is taken while the mesh computes on. Blocks are immutable, so a worker keeps its own by reference; a block that
no other worker has is sent to one, if possible on another host. A copy is complete when every block is where it should
be. Futures of this process hold the kept blocks, so the memory is freed when they are dropped or the process ends.

>>> import meshtape as mt
>>> mesh = mt.Mesh({"data": 2})
>>> copy = mt.parallel.mesh.replicas.Replica({"w": mt.distribute(mt.arange(4), mesh, data=mt.Shard(0))})
>>> copy.complete
True
>>> copy.restore({"w": mt.Sharding(mt.Mesh({"data": 3}))})["w"]
Array([0, 1, 2, 3], sharding=Sharding(data=Replicate()))
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.blocks import Box
from ...arrays.core.dispatch import wrap
from ...arrays.core.errors import RankLost, ReshardError
from ...arrays.core.op import ShapeDtype
from ...arrays.ops.creation import asarray
from ...storage.base.checksums import crc32c
from ..base.device_memory import on_host
from ..base.interrupts import OnceEvent
from ..dask.workers import known_workers
from ..execution.runtime import HostValue, LocalRuntime
from ..sharding.placement import Sharding, block_box
from .api import distribute, reshard
from .mesh import Mesh
from .mesh_transfer import bytes_of, join_blocks
from .sharded_array import sharded_array

log = logging.getLogger("meshtape")

COPIES = 2
"""The number of workers that keep each block."""


class Key(NamedTuple):
    """A block: number of the array, and its box."""

    array: int
    box: Box


def plan_copies(
    holders: Mapping[Key, tuple[Sequence[str], int]], workers: Sequence[str]
) -> tuple[dict[str, list[Key]], dict[tuple[str, str], list[Key]]]:
    """The blocks that each worker keeps of its own, and the blocks sent from a worker to another.

    ``holders`` has the workers and the bytes of each block, ``workers`` the order of a ring. As many as :data:`COPIES`
    workers keep a block, those with the fewest bytes so far; targets are on other hosts than the source where there are
    others.

    >>> half = [Key(0, Box((i,), (1,))) for i in range(2)]
    >>> keeps, sends = plan_copies({half[0]: (["a"], 8), half[1]: (["b"], 8)}, ["a", "b"])
    >>> {w: [k.box.offset for k in ks] for w, ks in keeps.items()}, sorted(sends)
    ({'a': [(0,)], 'b': [(1,)]}, [('a', 'b'), ('b', 'a')])
    """
    load = dict.fromkeys(workers, 0)
    keeps: dict[str, list[Key]] = {}
    sends: dict[tuple[str, str], list[Key]] = {}
    for key, (found, nbytes) in sorted(holders.items(), key=lambda item: (-item[1][1], item[0])):
        chosen: list[str] = []
        least = sorted(found, key=lambda w: (load[w], workers.index(w)))
        for w in least:
            if len(chosen) < COPIES and not any(_host(w) == _host(c) for c in chosen):
                chosen.append(w)
        chosen += [w for w in least if w not in chosen][: COPIES - len(chosen)]  # two on one host are better than one
        for w in chosen:
            keeps.setdefault(w, []).append(key)
            load[w] += nbytes
        source = chosen[0]
        start = workers.index(source) + 1
        ring = [w for w in (*workers[start:], *workers[:start]) if w not in chosen]
        ring.sort(key=lambda w: (_host(w) in {_host(c) for c in chosen}, load[w]))
        for w in ring[: COPIES - len(chosen)]:
            sends.setdefault((source, w), []).append(key)
            load[w] += nbytes
    return keeps, sends


def _host(address: str) -> str:
    return urlsplit(address).hostname or address


class _LeafAval(ShapeDtype):
    __slots__ = ()
    __is_tree__ = False


class Replica:
    """A copy of the arrays of a tree, as they are now; ``tree`` has their shapes and dtypes.

    The arrays are on any meshes of one Dask client, on meshes of this process, or local. With fewer than two workers
    they are copied to this process. The call returns at once; :attr:`complete` tells when the copy can be used, and
    :meth:`wait` waits for that. Each block has a crc32c from the moment when the copy was taken; one whose bytes have
    changed is never used.
    """

    def __init__(self, tree: Any) -> None:
        leaves, treedef = trees.flatten(tree)
        self._lock = threading.Lock()
        self._ended = OnceEvent()
        self._open = 0
        self._failed = False
        self._kept: dict[str, Any] = {}  # worker → future of its kept blocks
        self._keepers: dict[Key, list[str]] = {}
        arrays = [asarray(x) for x in leaves]
        far = [i for i, x in enumerate(arrays) if _remote(x)]
        workers = list(dict.fromkeys(a for i in far for a in arrays[i].sharding.mesh.runtime.addresses))  # type: ignore[union-attr]
        if len(workers) < COPIES:
            far = []
        self._streams: Any = None
        self._client = arrays[far[0]].sharding.mesh.runtime.client if far else None  # type: ignore[union-attr]
        self._avals = [_LeafAval(x.shape, x.dtype) for x in arrays]
        self._here = {i: _here(x) for i, x in enumerate(arrays) if i not in far}  # values in this process
        self._boxes: dict[int, list[Box]] = {}  # of the others
        self.tree = trees.unflatten(treedef, self._avals)
        self._treedef = treedef
        self._held: list[Any] = []  # the arrays themselves, until their blocks are kept
        if far:
            self._take({i: arrays[i] for i in far}, workers)
        if not self._open:
            self._ended.set()

    # ----- taking it --------------------------------------------------------------------------------------------------

    def _take(self, arrays: Mapping[int, Array], workers: Sequence[str]) -> None:
        sources: dict[Key, dict[str, tuple[Any, int, int]]] = {}  # block → worker → (handle, rank, process)
        holders: dict[Key, tuple[list[str], int]] = {}
        by_mesh: dict[Mesh, list[int]] = {}
        for i, x in arrays.items():
            by_mesh.setdefault(x.sharding.mesh, []).append(i)  # type: ignore[union-attr]
        for mesh, numbers in by_mesh.items():
            runtime = mesh.runtime
            runtime._check_open()
            self._streams = runtime._streams
            for i, x in zip(numbers, mesh.settle([arrays[i] for i in numbers]), strict=True):
                buf = x._buf
                if isinstance(buf.handle, HostValue):
                    self._here[i] = asarray(buf.handle.value, copy=True)
                    continue
                self._held.append(x)
                for rank in range(mesh.size):
                    box = block_box(buf.layout, mesh.sizes, buf.shape, rank)
                    if not box.size:
                        continue
                    key = Key(i, box)
                    where = sources.setdefault(key, {})
                    process = runtime.homes[rank]
                    where.setdefault(runtime.addresses[process], (buf.handle, rank, process))
                    holders[key] = (list(where), box.size * x.dtype.itemsize)
                self._boxes[i] = [k.box for k in sources if k.array == i]
        keeps, sends = plan_copies(holders, workers)
        cuts: dict[str, list[Any]] = {}
        for (source, target), keys in sends.items():
            wanted, futures = _wanted(keys, source, sources)
            cuts.setdefault(target, []).append(self._submit(cut, source, "keep", wanted, *futures))
        targets = sorted({*keeps, *cuts})
        self._open = len(targets)
        for w in targets:
            own = keeps.get(w, [])
            wanted, futures = _wanted(own, w, sources)
            self._kept[w] = self._submit(hold, w, "keep", wanted, len(futures), *futures, *cuts.get(w, ()))
            for key in own:
                self._keepers.setdefault(key, []).append(w)
        for (_, w), keys in sends.items():
            for key in keys:
                self._keepers.setdefault(key, []).append(w)
        for f in list(self._kept.values()):
            f.add_done_callback(self._one_ended)

    def _submit(self, fn: Any, worker: str, name: str, *args: Any) -> Any:
        return self._streams.call(fn, name, {worker: args})[worker]

    def _one_ended(self, future: Any) -> None:
        with self._lock:
            self._failed = self._failed or future.failed
            self._open -= 1
            last = self._open == 0
        if last:
            self._held.clear()
            self._ended.set()

    @property
    def complete(self) -> bool:
        """Whether every block is kept where it should be."""
        return self._ended.is_set() and not self._failed

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the copy is complete or has failed. Returns whether it is complete."""
        self._ended.wait(timeout)
        return self.complete

    # ----- using it ---------------------------------------------------------------------------------------------------

    def available(self, workers: Sequence[str]) -> bool:
        """Whether the copy is complete and each block is on one of these workers, or in this process."""
        there = set(workers)
        return self.complete and all(there & set(ws) for ws in self._keepers.values())

    def restore(self, shardings: Any) -> Any:
        """The arrays of the copy, in the shardings of a tree like ``tree``. Raises :class:`RankLost` where a block is
        on no worker any more, and :class:`ReshardError` where the copy is on workers, and a sharding of this process or
        of another Dask client."""
        wanted, treedef = trees.flatten(shardings)
        if treedef != self._treedef:
            raise ReshardError(f"the copy has the structure {self._treedef}, the shardings {treedef}")
        out: list[Any] = [None] * len(wanted)
        far: dict[int, Sharding] = {}
        for i, s in enumerate(wanted):
            if (here := self._here.get(i)) is None:
                far[i] = s
            else:
                out[i] = distribute(here, s) if here.sharding is None else reshard(here, s)
        for mesh in dict.fromkeys(s.mesh for s in far.values()):
            mine = {i: s.check(*self._avals[i]) for i, s in far.items() if s.mesh is mesh}
            for i, x in self._on(mesh, mine).items():
                out[i] = x
        return trees.unflatten(treedef, out)

    def local(self) -> Any:
        """The arrays of a copy that is in this process, as local ones."""
        if len(self._here) < len(self._avals):
            raise ReshardError("the copy is on the workers of a Dask cluster: restore it onto a mesh of its client")
        return trees.unflatten(self._treedef, [asarray(np.asarray(self._here[i])) for i in range(len(self._avals))])

    def _on(self, mesh: Mesh, wanted: Mapping[int, Sharding]) -> dict[int, Array]:
        from ..dask.runtime import DaskRuntime, RemoteBlocks

        new = mesh.runtime
        if not isinstance(new, DaskRuntime) or new.client is not self._client:
            raise ReshardError(
                f"the copy is on workers of a Dask cluster: it cannot be put on {mesh}, which is not of its client"
            )
        whole = self._whole(wanted, known_workers(new.client))
        parts: dict[tuple[str, int], list[tuple[Any, Key, Box]]] = {}
        blocks: dict[int, dict[tuple[int, int], tuple[tuple[int, ...], np.dtype, list[tuple[Any, Box]]]]] = {}
        slots = {i: slot for slot, i in enumerate(wanted)}
        for i, sharding in wanted.items():
            shape, dtype = self._avals[i]
            for t, q in enumerate(new.homes):
                want = block_box(sharding.layout, mesh.sizes, shape, t)
                targets = []
                for n, box in enumerate(self._boxes[i]):
                    common = box.intersect(want) if want.size else None
                    if common is None:
                        continue
                    keepers = whole[Key(i, box)]
                    near = new.addresses[q]
                    keeper = near if near in keepers else keepers[t % len(keepers)]
                    parts.setdefault((keeper, q), []).append(((i, t, n), Key(i, box), common.within(box)))
                    targets.append(((i, t, n), common.within(want)))
                blocks.setdefault(q, {})[slots[i], t] = (want.shape, dtype, targets)
        cuts: dict[int, list[Any]] = {}
        for (keeper, q), cut_here in parts.items():
            cuts.setdefault(q, []).append(self._submit(cut_kept, keeper, "restore", cut_here, self._kept[keeper]))
        args = {q: [blocks.get(q, {}), len(wanted), *cuts.get(q, ())] for q in range(len(new.addresses))}
        this = new.kept(join_blocks, "restore", args)
        return {
            i: sharded_array(mesh, s.layout, self._avals[i], RemoteBlocks(this, slots[i])) for i, s in wanted.items()
        }

    def _whole(self, arrays: Iterable[int], there: Collection[str]) -> dict[Key, list[str]]:
        """The workers that have each block of these arrays unchanged. Raises :class:`RankLost` where none has."""
        asked: dict[str, list[Key]] = {}
        for key, workers in self._keepers.items():
            for w in workers if key.array in arrays else ():
                if w in there:
                    asked.setdefault(w, []).append(key)
        futures = {w: self._submit(changed, w, "verify", keys, self._kept[w]) for w, keys in asked.items()}
        bad: list[tuple[str, Key]] = []
        for w, found in zip(futures, self._streams.results(futures.values(), errors=True), strict=True):
            # A worker that does not answer has nothing.
            bad += [(w, key) for key in (asked[w] if isinstance(found, BaseException) else found)]
            if isinstance(found, list) and found:
                log.warning("worker %s has other bytes than it kept, of %d block(s): they are not used", w, len(found))
        out = {}
        for key, workers in self._keepers.items():
            if key.array in arrays:
                out[key] = [w for w in workers if w in there and (w, key) not in bad]
                if not out[key]:
                    aval = self._avals[key.array]
                    raise RankLost(f"no worker is left that keeps the block {key.box} of {aval} as it was")
        return out

    def drop(self) -> None:
        """Give the memory back; the copy cannot be used afterwards."""
        self._failed = True
        self._kept.clear()
        self._held.clear()
        self._here.clear()


def _remote(x: Array) -> bool:
    return x.sharding is not None and not isinstance(x.sharding.mesh.runtime, LocalRuntime)


def _here(x: Array) -> Any:
    """An array of this process, fetched from a single worker if need be."""
    if _remote(x):
        return asarray(np.asarray(x))
    return asarray(x, copy=True) if x.sharding is None else wrap(x._buf)


def _wanted(
    keys: Sequence[Key], worker: str, sources: Mapping[Key, Mapping[str, tuple[Any, int, int]]]
) -> tuple[list[tuple[Key, int, tuple[int, int]]], list[Any]]:
    """The rank and the place in a worker's bundles of each block, and the futures of those bundles."""
    gangs: list[Any] = []
    futures, out = [], []
    for key in keys:
        handle, rank, process = sources[key][worker]
        if handle.gang not in gangs:
            gangs.append(handle.gang)
            futures.append(handle.gang.futures[process])
        out.append((key, rank, (gangs.index(handle.gang), handle.slot)))
    return out, futures


# ----- on the workers -------------------------------------------------------------------------------------------------


class ReplicaBlocks:
    def __init__(self, blocks: dict[Key, np.ndarray]) -> None:
        self.blocks = blocks
        self.sums = {key: _sum(block) for key, block in blocks.items()}
        """crc32c of each, taken where the block was when the copy was taken."""

    def __sizeof__(self) -> int:
        return 64 + sum(b.nbytes for b in self.blocks.values())

    def __repr__(self) -> str:
        return f"<Kept: {len(self.blocks)} block(s), {self.__sizeof__()} bytes>"


def cut(_: Any, wanted: Sequence[tuple[Key, int, tuple[int, int]]], *bundles: Any) -> ReplicaBlocks:
    """Run on a worker that has blocks: those that another worker is to keep."""
    return ReplicaBlocks({key: bundles[i].slots[slot][rank] for key, rank, (i, slot) in wanted})


def hold(_: Any, wanted: Sequence[tuple[Key, int, tuple[int, int]]], count: int, *values: Any) -> ReplicaBlocks:
    """Run on a worker that keeps blocks: its own, and those that were sent to it."""
    kept = cut(_, wanted, *values[:count])
    for part in values[count:]:
        kept.blocks.update(part.blocks)
        kept.sums.update(part.sums)
    return kept


def changed(_: Any, keys: Sequence[Key], kept: ReplicaBlocks) -> list[Key]:
    """The kept blocks of a worker whose bytes have changed."""
    return [key for key in keys if _sum(kept.blocks[key]) != kept.sums[key]]


def _sum(block: Any) -> int:
    return crc32c(bytes_of(on_host(block)))


def cut_kept(_: Any, wanted: Sequence[tuple[Any, Key, Box]], kept: ReplicaBlocks) -> dict[Any, np.ndarray]:
    """The parts of kept blocks that one worker needs."""
    return {n: bytes_of(on_host(kept.blocks[key])[box.slices]) for n, key, box in wanted}
