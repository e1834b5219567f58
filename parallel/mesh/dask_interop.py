"""Between Dask's arrays and ours, without a detour through the client.

An array on a mesh is a Dask collection: its blocks are futures on the workers that hold them. ``x.to_dask()`` gives the
``dask.array`` of these blocks, ``mt.from_dask(d, mesh)`` puts the chunks of one on a mesh, and what takes Dask collections
(``dask.compute``, and for arrays that are computed ``distributed.progress`` and ``distributed.wait``) takes our arrays.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays.backends.dlpack import read_only
from ...arrays.core.array import Array
from ...arrays.core.blocks import ceil_blocks
from ...arrays.core.dispatch import wrap
from ...arrays.core.errors import MeshError, ShapeError
from ...arrays.core.shape_dtype import ShapeDtype
from ..base.device_memory import on_host
from ..execution.runtime import HostValue, LocalRuntime
from ..sharding.placement import Layout, Placement, Sharding, block_box
from .mesh import Mesh
from .sharded_array import ShardedBuffer, sharded_array

if TYPE_CHECKING:
    import dask.array as da


FROM_DASK = "from_dask"


def to_dask(buf: ShardedBuffer) -> da.Array:
    """The blocks of a split array as a ``dask.array``: one chunk a block, where the blocks are."""
    import dask.array as da

    buf.computed()
    if buf.layout.partials:
        buf = buf.mesh.moved(buf, buf.layout.reduced()).computed()
    mesh, layout = buf.mesh, buf.layout
    chunks = _chunks(buf.shape, layout, mesh.sizes)
    if isinstance(buf.handle, HostValue):
        return da.from_array(exported(buf.handle.value), chunks=chunks)
    owners: dict[tuple[int, ...], int] = {}
    for rank in range(mesh.size):
        place = _place(rank, layout, mesh, buf.shape)
        if all(i < len(c) for i, c in zip(place, chunks, strict=True)):
            owners.setdefault(place, rank)
    name = f"meshtape-{uuid.uuid4().hex}"
    if isinstance(mesh.runtime, LocalRuntime):
        blocks = mesh.runtime.fetch(buf.handle, list(owners.values()))
        graph = {(name, *place): exported(blocks[rank]) for place, rank in owners.items()}
    else:
        graph = {(name, *place): _future(buf, rank) for place, rank in owners.items()}
    return da.Array(graph, name, chunks, dtype=buf.dtype)


def _chunks(shape: tuple[int, ...], layout: Layout, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    out = []
    for d, n in enumerate(shape):
        parts = math.prod(sizes[a] for a in layout.axes_of(d))
        # Empty blocks are left out: some of Dask's functions go wrong beside chunks of no length.
        out.append(tuple(length for _, length in ceil_blocks(n, parts) if length) or (0,))
    return tuple(out)


def _place(rank: int, layout: Layout, mesh: Mesh, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Position of a rank's block in the grid of chunks."""
    coords = mesh.coordinates(rank)
    out = []
    for d in range(len(shape)):
        at = 0
        for a in layout.axes_of(d):
            at = at * mesh.sizes[a] + coords[a]
        out.append(at)
    return tuple(out)


def _future(buf: ShardedBuffer, rank: int) -> Any:
    runtime: Any = buf.mesh.runtime
    handle = buf.handle
    here = handle.gang.futures[runtime.homes[rank]].ref
    options = {"pure": False, "priority": 1_000_000, "workers": [here.address], "allow_other_workers": True}
    future = runtime.client.submit(_block_here, tuple(here), handle.slot, rank, **options)
    future.add_done_callback(lambda _, held=handle: None)  # the block stays there until then
    return future


def _block_here(ref: tuple[int, str, str], slot: int, rank: int) -> np.ndarray:
    """A task of Dask's on the worker that has a block."""
    from ..dask.worker import desk_here

    number, address, session = ref
    desk, finish = desk_here(address, session)
    return exported(on_host(finish(desk.value(number)).slots[slot][rank]))


def exported(block: Any) -> Any:
    """A block for Dask's tasks. They share the memory of a worker with the mesh: NumPy's is read-only for them, a device's is copied."""
    return read_only(block) if isinstance(block, np.ndarray) else block.copy()


def from_dask(d: da.Array, mesh: Mesh, /, **placements: Placement) -> Array:
    """A ``dask.array`` as an array on a mesh. Each block is put together on the worker that will hold it.

    Parameters
    ----------
    d
        Of known chunk sizes.
    mesh
        On a Dask cluster: of the client that will compute ``d``.
    placements
        By axis name, as in :func:`meshtape.distribute`.

    Raises
    ------
    ShapeError
        Where chunk sizes are unknown: call ``d.compute_chunk_sizes()`` first.
    MeshError
        For an unknown axis, or anything but a ``dask.array``.

    Examples
    --------
    >>> import dask.array as da
    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"data": 2})
    >>> mt.from_dask(da.arange(6, chunks=2), mesh, data=mt.Shard(0)) * 2
    Array([ 0,  2,  4,  6,  8, 10], sharding=Sharding(data=Shard(0)))
    """
    import dask.array as da

    if not isinstance(d, da.Array):
        raise MeshError(f"[from_dask] takes a dask.array, got {type(d).__module__}.{type(d).__qualname__}")
    if any(math.isnan(n) for n in d.shape):
        raise ShapeError(f"[from_dask] the chunk sizes of {d} are unknown: call d.compute_chunk_sizes() first")
    shape = tuple(map(int, d.shape))
    sharding = Sharding(mesh, **placements).check(shape, d.dtype)
    if sharding.partial:
        raise MeshError("[from_dask] makes no pending reductions: use Shard(dim) or Replicate()")
    layout = sharding.layout
    if isinstance(mesh.runtime, LocalRuntime):
        handle: Any = _local(d, shape, layout, mesh)
    else:
        handle = _remote(d, shape, layout, mesh)
    return sharded_array(mesh, layout, ShapeDtype(shape, np.dtype(d.dtype)), handle)


def _local(d: da.Array, shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> Any:
    import dask

    boxes = [block_box(layout, mesh.sizes, shape, r) for r in range(mesh.size)]
    distinct = list(dict.fromkeys(boxes))
    found = dict(zip(distinct, dask.compute(*(d[b.slices] for b in distinct)), strict=True))
    return mesh.runtime.adopt({r: np.asarray(found[b], d.dtype) for r, b in enumerate(boxes)})


def _remote(d: da.Array, shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> Any:
    from ..dask.in_flight import Gang
    from ..dask.runtime import RemoteBlocks
    from ..dask.streams import WorkerFuture

    runtime: Any = mesh.runtime
    runtime._check_open()
    client, streams = runtime.client, runtime._streams
    # Once, on the workers: parts of chunks are cut where the chunks are.
    held = client.persist(d)
    made = []
    with streams.order:
        number = streams.number()
    for p, address in enumerate(runtime.addresses):
        mine = runtime.hosted(p)
        boxes = {r: block_box(layout, mesh.sizes, shape, r) for r in mine}
        distinct = list(dict.fromkeys(boxes.values()))
        where = {"workers": [address], "allow_other_workers": True, "priority": 1_000_000}
        parts = [client.compute(held[b.slices], **where) for b in distinct]
        payload = {r: (distinct.index(b), b.shape, np.dtype(d.dtype)) for r, b in boxes.items()}
        mine_there = WorkerFuture(streams[address], number, FROM_DASK)
        task = client.submit(_adopt, tuple(mine_there.ref), runtime.mesh_id, payload, *parts, pure=False, **where)
        mine_there.follow(task)
        made.append(mine_there)
    this = Gang(FROM_DASK, made)
    runtime._flight.settle(this)
    return RemoteBlocks(this, 0)


def _adopt(ref: tuple[int, str, str], mesh: bytes, payload: Mapping[int, Any], *parts: np.ndarray) -> None:
    """A task of Dask's: blocks that Dask has put together, as blocks of the mesh."""
    from ..dask.worker import desk_here, kept, seat_here

    number, address, session = ref
    desk, finish = desk_here(address, session)
    blocks = {r: np.asarray(parts[k], dtype, order="C").reshape(shape) for r, (k, shape, dtype) in payload.items()}
    bundle = kept(seat_here(mesh), {0: blocks})

    async def keep() -> None:
        desk.keep(number, FROM_DASK, bundle)

    finish(keep())


# ----- the collection protocol ------------------------------------------------------------------------------------------


def as_collection(buf: ShardedBuffer) -> da.Array:
    """The Dask array behind a split array, the same one each time it is asked for."""
    if buf.collection is None:
        if (buf.handle is None or buf.layout.partials) and _on_the_clients_loop(buf.mesh):
            # ``distributed.wait`` looks at collections there, where nothing may wait: not even for them to be computed.
            raise MeshError(
                "this array is still to be computed: call mt.compute(x) before distributed.wait(x) or progress(x)"
            )
        buf.collection = to_dask(buf)
    return buf.collection


def _on_the_clients_loop(mesh: Mesh) -> bool:
    client = getattr(mesh.runtime, "client", None)
    try:
        return client is not None and asyncio.get_running_loop() is client.loop.asyncio_loop
    except RuntimeError:  # no loop runs in this thread
        return False


def persisted(buf: ShardedBuffer) -> tuple[Any, tuple[Any, ...]]:
    """What Dask calls after it has persisted an array: its blocks have been on the workers all the time."""
    return _the_same, (buf,)


def _the_same(graph: Any, buf: ShardedBuffer, *, rename: Any = None) -> Array:
    return wrap(buf)
