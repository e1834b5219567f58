"""The data loader: batches on a mesh, read ahead while the step before them runs.

A source that workers can read is read by them: each reads the rows of its own ranks, and those of the next batch ahead.
Any other source is read in this process, by one background thread, and its rows are sent. An error of a source ends the
run on all ranks, with the rows that were being read and the source's own message.
"""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ....arrays.backends.threads import Pool
from ....arrays.core import tree as trees
from ....arrays.core.errors import DataError, MeshtapeError
from ....arrays.ops.creation import asarray
from ...execution.runtime import LocalRuntime
from ...mesh.api import distribute
from ...mesh.mesh import Mesh
from ...sharding.placement import Replicate, Shard, Sharding
from .batching import BatchSizes
from .sampler import Sampler
from .sources import Source, as_source


class Batch(NamedTuple):
    """The batch of one optimizer step: its micro-batches, and the position after it."""

    micro: list[Any]
    samples: int
    consumed: int
    epoch: int


@dataclass
class Loader:
    """Batches of a data set, from any position.

    Parameters
    ----------
    data
        A :class:`Source`, a tree of arrays with a common first dimension, or a Dask collection.
    sizes
        The :class:`BatchSizes`.
    sampler
        The order.
    mesh, sharding
        Where batches go; local arrays without a mesh. The first dimension is the samples; a placement of the second
        splits it too, of arrays that have one.
    ahead
        The number of batches that are read ahead.
    """

    data: Any
    sizes: BatchSizes
    sampler: Sampler
    mesh: Mesh | None = None
    sharding: Sharding | None = None
    ahead: int = 2

    def __post_init__(self) -> None:
        self.source: Source = as_source(self.data)
        if len(self.source) != self.sampler.size:
            raise DataError(f"the sampler is for {self.sampler.size} samples, the source has {len(self.source)}")
        on_workers = self.mesh is not None and not isinstance(self.mesh.runtime, LocalRuntime)
        self.remote = on_workers and self.source.remote
        self._token = uuid.uuid4().hex
        self._packed = _pack(self.source) if self.remote else b""

    def batches(self, consumed: int, *, epochs: int | None = None) -> Iterator[Batch]:
        """Batches from a position on; endless, or up to the end of epoch ``epochs``."""
        plan = self._plan(consumed, epochs)
        return self._remote(plan) if self.remote else self._local(plan)

    def _plan(self, consumed: int, epochs: int | None) -> Iterator[tuple[np.ndarray, int, int]]:
        while True:
            ids, after = self.sampler.take(consumed, self.sizes.batch)
            epoch = self.sampler.epoch(after - len(ids))
            if epochs is not None and epoch >= epochs:
                return
            yield ids, after, epoch
            consumed = after

    def _micro(self, ids: np.ndarray) -> list[np.ndarray]:
        """The batch cut into micro-batches of all ranks; the last batch of an epoch has fewer or shorter ones."""
        n = self.sizes.micro * self.sizes.ranks
        return [ids[i : i + n] for i in range(0, len(ids), n)]

    # ----- read here --------------------------------------------------------------------------------------------------

    def _local(self, plan: Iterator[tuple[np.ndarray, int, int]]) -> Iterator[Batch]:
        waiting: deque[tuple[Future[Any], tuple[np.ndarray, int, int]]] = deque()
        with Pool(1, thread_name_prefix="meshtape-data") as pool:
            try:
                for item in plan:
                    waiting.append((pool.submit(self._read, item[0]), item))
                    if len(waiting) > self.ahead:
                        yield self._placed(*waiting.popleft())
                while waiting:
                    yield self._placed(*waiting.popleft())
            finally:
                for future, _ in waiting:
                    future.cancel()

    def _read(self, ids: np.ndarray) -> list[Any]:
        return [read_rows(self.source, part) for part in self._micro(ids)]

    def _placed(self, future: Future[Any], item: tuple[np.ndarray, int, int]) -> Batch:
        ids, after, epoch = item
        micro = [trees.tree_map(self._put, tree) for tree in future.result()]
        return Batch(micro, len(ids), after, epoch)

    def _put(self, x: np.ndarray) -> Any:
        if self.sharding is None:
            return asarray(x)
        return distribute(x, fitted(self.sharding, x.ndim))

    # ----- read by the workers ----------------------------------------------------------------------------------------

    def _remote(self, plan: Iterator[tuple[np.ndarray, int, int]]) -> Iterator[Batch]:
        sample = read_rows(self.source, np.array([0]))
        leaves, treedef = trees.flatten(sample)
        window: deque[tuple[np.ndarray, int, int]] = deque()
        for item in plan:
            window.append(item)
            if len(window) > 1:
                yield self._created(window.popleft(), window[0][0], leaves, treedef)
        while window:
            nothing = np.empty(0, np.int64)
            yield self._created(window.popleft(), window[0][0] if window else nothing, leaves, treedef)

    def _created(
        self, item: tuple[np.ndarray, int, int], then: np.ndarray, leaves: Sequence[np.ndarray], treedef: Any
    ) -> Batch:
        ids, after, epoch = item
        assert self.mesh is not None
        assert self.sharding is not None
        micro, coming = self._micro(ids), self._micro(then)
        paths = [q for q, _ in trees.flatten_with_path(trees.unflatten(treedef, leaves))]
        out = []
        for k, part in enumerate(micro):
            following = micro[k + 1] if k + 1 < len(micro) else (coming[0] if coming else then)
            shapes = [(len(part), *x.shape[1:]) for x in leaves]
            placed = [fitted(self.sharding, len(s)) for s in shapes]
            payloads = {
                rank: Wanted(
                    self._token,
                    self._packed,
                    self._rows(part, rank),
                    self._rows(following, rank),
                    {q: s.box(shape, rank).slices[1:] for q, s, shape in zip(paths, placed, shapes, strict=True)},
                )
                for rank in range(self.mesh.size)
            }
            specs = [(shape, x.dtype, s) for shape, x, s in zip(shapes, leaves, placed, strict=True)]
            out.append(trees.unflatten(treedef, self.mesh.create(read_on_worker, payloads, specs)))
        return Batch(out, len(ids), after, epoch)

    def _rows(self, ids: np.ndarray, rank: int) -> np.ndarray:
        assert self.sharding is not None
        return ids[fitted(self.sharding, 1).box((len(ids),), rank).slices]


def fitted(sharding: Sharding, ndim: int) -> Sharding:
    """The sharding for an array of so many dimensions: placements of dimensions that it lacks replicate."""
    lacking = {n: Replicate() for n, p in sharding.placements.items() if isinstance(p, Shard) and p.dim >= ndim}
    return sharding.with_placements(**lacking) if lacking else sharding


def read_rows(source: Source, ids: np.ndarray) -> Any:
    """``source.read``, with errors that name the rows, and a result that has as many rows as were asked for."""
    try:
        tree = trees.tree_map(np.asarray, source.read(ids))
    except MeshtapeError:
        raise
    except Exception as e:
        raise DataError(f"{type(source).__name__} failed at rows {_some(ids)}: {type(e).__name__}: {e}") from e
    for path, x in trees.flatten_with_path(tree):
        if x.ndim < 1 or len(x) != len(ids):
            raise DataError(
                f"{type(source).__name__} gave shape {x.shape} for {len(ids)} rows at "
                f"{trees.path_name(path) or 'its array'}"
            )
        if x.dtype.kind in "OUS":
            raise DataError(
                f"{type(source).__name__} gave texts or objects at {trees.path_name(path) or 'its array'}: arrays hold "
                "numbers; tokenise texts first"
            )
    return tree


def _some(ids: np.ndarray) -> str:
    shown = ", ".join(map(str, ids[:6].tolist()))
    return f"{shown} and {len(ids) - 6} more" if len(ids) > 6 else shown


def _pack(source: Source) -> bytes:
    """A source for the workers, pickled here: if a worker cannot unpickle it, only its task fails. Dask itself would
    lose the connection."""
    from distributed.protocol.pickle import dumps

    try:
        return dumps(source)
    except Exception as e:
        raise DataError(
            f"{type(source).__name__} cannot be sent to the workers ({type(e).__name__}: {e}): set remote = False to "
            "read here"
        ) from e


def _unpack(packed: bytes) -> Source:
    from distributed.protocol.pickle import loads

    try:
        return loads(packed)
    except Exception as e:
        raise DataError(
            f"a worker cannot rebuild the source of the data ({type(e).__name__}: {e}): install its module there, or "
            "set remote = False to read in the client"
        ) from e


class Wanted(NamedTuple):
    """The rows that a rank reads now, and those of its next read."""

    token: str
    source: bytes
    ids: np.ndarray
    then: np.ndarray
    slices: dict[trees.Path, tuple[slice, ...]]
    """The slices of each array's dimensions after the first, in the order of the blocks."""


class _RowsAhead:
    """The read-ahead of this process: the sources of loaders, and rows that are being read ahead."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pool: Pool | None = None
        self.sources: OrderedDict[str, Source] = OrderedDict()
        self.held: OrderedDict[tuple[str, int], tuple[bytes, Future[Any]]] = OrderedDict()

    def _submit(self, w: Wanted, ids: np.ndarray) -> Future[Any]:
        if self.pool is None:
            self.pool = Pool(1, thread_name_prefix="meshtape-data")
        if w.token not in self.sources:
            self.sources[w.token] = _unpack(w.source)
            while len(self.sources) > 8:  # loaders that ended
                self.sources.popitem(last=False)
        return self.pool.submit(read_rows, self.sources[w.token], ids)

    def take(self, rank: int, w: Wanted) -> Any:
        """The rows that a rank needs now. Starts to read those it needs next."""
        key = (w.token, rank)
        with self.lock:
            known, future = self.held.pop(key, (b"", None))
            if future is None or known != w.ids.tobytes():
                future = self._submit(w, w.ids)
            if len(w.then):
                self.held[key] = (w.then.tobytes(), self._submit(w, w.then))
                while len(self.held) > 64:
                    self.held.popitem(last=False)
        return future.result()


_ahead = _RowsAhead()


def read_on_worker(payloads: Mapping[int, Wanted]) -> dict[int, list[np.ndarray]]:
    """The blocks of this process's ranks. Called through ``BlockHost.create``. Ranks that need the same rows read them
    once."""
    out: dict[int, list[np.ndarray]] = {}
    read: dict[bytes, Any] = {}
    for rank, w in payloads.items():
        same = w.ids.tobytes()
        if same not in read:
            read[same] = _ahead.take(rank, w)
        # By name: a source may list its arrays in another order here than in the client, as directories do.
        found = dict(trees.flatten_with_path(read[same]))
        if found.keys() != w.slices.keys():
            here, there = (", ".join(map(trees.path_name, x)) for x in (found, w.slices))
            raise DataError(f"the source gives {here} on a worker, and {there} in the client")
        out[rank] = [np.asarray(found[q][(slice(None), *s)], order="C") for q, s in w.slices.items()]
    return out
