"""``mt.from_dask``: the chunks of a ``dask.array`` on a mesh, without a detour through the client."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays.core.array import Array
from ...arrays.core.errors import MeshError, ShapeError
from ...arrays.core.op import ShapeDtype
from ...arrays.ops.creation import asarray, masked
from ..execution.runtime import LocalRuntime
from ..sharding.placement import Layout, Placement, Sharding, block_box
from .mesh import Mesh
from .sharded_array import sharded_array

if TYPE_CHECKING:
    import dask.array as da


FROM_DASK = "from_dask"


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
    DTypeError
        For elements that no Array has, and masked ones.
    ClusterError
        Where nobody gets on with the tasks of ``d`` for ``meshtape.timeout`` seconds: two workers do not reach each
        other, say, or one is paused.

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
    dtype = asarray(np.empty(0, d.dtype)).dtype  # in native order; raises for one that no Array has
    shape = tuple(map(int, d.shape))
    sharding = Sharding(mesh, **placements).check(shape, dtype)
    if sharding.partial:
        raise MeshError("[from_dask] makes no pending reductions: use Shard(dim) or Replicate()")
    layout = sharding.layout
    if isinstance(mesh.runtime, LocalRuntime):
        handle: Any = _local(d, shape, dtype, layout, mesh)
    else:
        handle = _remote(d, shape, dtype, layout, mesh)
    return sharded_array(mesh, layout, ShapeDtype(shape, dtype), handle)


def _plain(part: Any, dtype: np.dtype) -> np.ndarray:
    if np.ma.is_masked(part):
        raise masked("from_dask")
    return np.asarray(part, dtype, order="C")


def _local(d: da.Array, shape: tuple[int, ...], dtype: np.dtype, layout: Layout, mesh: Mesh) -> Any:
    import dask

    boxes = [block_box(layout, mesh.sizes, shape, r) for r in range(mesh.size)]
    distinct = list(dict.fromkeys(boxes))
    found = dict(zip(distinct, dask.compute(*(d[b.slices] for b in distinct)), strict=True))
    return mesh.runtime.adopt({r: _plain(found[b], dtype) for r, b in enumerate(boxes)})


def _remote(d: da.Array, shape: tuple[int, ...], dtype: np.dtype, layout: Layout, mesh: Mesh) -> Any:
    from ..dask.in_flight import Gang
    from ..dask.runtime import RemoteBlocks
    from ..dask.streams import WorkerFuture

    runtime: Any = mesh.runtime
    runtime._check_open()
    client, streams = runtime.client, runtime._streams
    # Once, on the workers: parts of chunks are cut where the chunks are.
    held = client.persist(d)
    made: dict[WorkerFuture, Any] = {}
    with streams.order:
        number = streams.number()
    for p, address in enumerate(runtime.addresses):
        mine = runtime.hosted(p)
        boxes = {r: block_box(layout, mesh.sizes, shape, r) for r in mine}
        distinct = list(dict.fromkeys(boxes.values()))
        where = {"workers": [address], "allow_other_workers": True, "priority": 1_000_000}
        parts = [client.compute(held[b.slices], **where) for b in distinct]
        payload = {r: (distinct.index(b), b.shape, dtype) for r, b in boxes.items()}
        mine_there = WorkerFuture(streams[address], number, FROM_DASK)
        ref = tuple(mine_there.ref)
        made[mine_there] = client.submit(_adopt, ref, runtime.mesh_id, payload, *parts, pure=False, **where)
    streams.follow(f"[{FROM_DASK}] {d.name}", made)
    this = Gang(FROM_DASK, list(made))
    try:
        runtime._queue.wait(this)
    except BaseException:
        with contextlib.suppress(Exception):  # the scheduler is gone, and its tasks with it
            client.cancel(list(made.values()))  # a paused worker would do them later, for nobody
        raise
    return RemoteBlocks(this, 0)


def _adopt(ref: tuple[int, str, str], mesh: bytes, payload: Mapping[int, Any], *parts: np.ndarray) -> None:
    """A task of Dask's: blocks that Dask has put together, as blocks of the mesh."""
    from ..dask.worker import client_session_here, kept, process_context_here

    number, address, session = ref
    client_session, finish = client_session_here(address, session)
    blocks = {r: _plain(parts[k], dtype).reshape(shape) for r, (k, shape, dtype) in payload.items()}
    bundle = kept(process_context_here(mesh), {0: blocks})

    async def keep() -> None:
        client_session.keep(number, FROM_DASK, bundle)

    finish(keep())
