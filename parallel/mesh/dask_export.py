"""An array on a mesh as a Dask collection: its blocks are futures on the workers that hold them.

``x.to_dask()`` gives the ``dask.array`` of these blocks. Functions of Dask collections (``dask.compute``, and for
computed arrays ``distributed.progress`` and ``distributed.wait``) take our arrays.
"""

from __future__ import annotations

import math
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays.backends.dlpack import read_only
from ...arrays.core.array import Array
from ...arrays.core.blocks import ceil_blocks
from ...arrays.core.dispatch import wrap
from ...arrays.core.errors import MeshError
from ..base.device_memory import on_host
from ..execution.runtime import HostValue, LocalRuntime
from ..sharding.mesh_protocol import MeshProtocol
from ..sharding.placement import block_box
from .mesh_transfer import ShardedLike

if TYPE_CHECKING:
    import dask.array as da


def to_dask(buf: ShardedLike) -> da.Array:
    """The blocks of a split array as a ``dask.array``: one chunk a block, on the worker that has it."""
    import dask.array as da

    buf.computed()
    if buf.layout.partials:
        buf = buf.mesh.moved(buf, buf.layout.reduced()).computed()
    mesh, layout = buf.mesh, buf.layout
    parts = [math.prod(mesh.sizes[a] for a in layout.axes_of(d)) for d in range(len(buf.shape))]
    # Empty blocks are left out: some of Dask's functions go wrong beside chunks of no length.
    spans = [dict(b for b in ceil_blocks(n, p) if b[1]) or {0: 0} for n, p in zip(buf.shape, parts, strict=True)]
    chunks = tuple(tuple(s.values()) for s in spans)
    if isinstance(buf.handle, HostValue):
        return da.from_array(exported(buf.handle.value), chunks=chunks)
    owners: dict[tuple[int, ...], int] = {}  # the first rank of each block, by its position in the grid of chunks
    for rank in range(mesh.size):
        offset = block_box(layout, mesh.sizes, buf.shape, rank).offset
        if all(o in s for o, s in zip(offset, spans, strict=True)):
            owners.setdefault(tuple(list(s).index(o) for o, s in zip(offset, spans, strict=True)), rank)
    name = f"meshtape-{uuid.uuid4().hex}"
    if isinstance(mesh.runtime, LocalRuntime):
        blocks = mesh.runtime.fetch(buf.handle, list(owners.values()))
        graph = {(name, *place): exported(blocks[rank]) for place, rank in owners.items()}
    else:
        graph = {(name, *place): _future(buf, rank) for place, rank in owners.items()}
        _watch(mesh.runtime, name, list(graph.values()))
    return da.Array(graph, name, chunks, dtype=buf.dtype)


def _future(buf: ShardedLike, rank: int) -> Any:
    runtime: Any = buf.mesh.runtime
    handle = buf.handle
    here = handle.gang.futures[runtime.homes[rank]].ref
    options = {"pure": False, "priority": 1_000_000, "workers": [here.address], "allow_other_workers": True}
    future = runtime.client.submit(_block_here, tuple(here), handle.slot, rank, **options)
    future.add_done_callback(lambda _, held=handle: None)  # the block stays there until then
    return future


def _watch(runtime: Any, name: str, futures: list[Any]) -> None:
    """Look at the blocks' tasks until they have ended: what Dask holds back of them comes through. Those who wait for
    them are Dask's, which has limits of its own."""
    left = {f.key for f in futures}
    for f in futures:
        f.add_done_callback(lambda ended: left.discard(ended.key))
    runtime._streams.watch(name, list(left), lambda: bool(left), lambda error: None)


def _block_here(ref: tuple[int, str, str], slot: int, rank: int) -> np.ndarray:
    """A task of Dask's on the worker that has a block."""
    from ..dask.worker import client_session_here

    number, address, session = ref
    client_session, finish = client_session_here(address, session)
    return exported(on_host(finish(client_session.value(number)).slots[slot][rank]))


def exported(block: Any) -> Any:
    """A block for Dask's tasks, which share the worker's memory: a read-only NumPy array, or a copy from a device."""
    return read_only(block) if isinstance(block, np.ndarray) else block.copy()


# ----- the collection protocol ----------------------------------------------------------------------------------------


def as_collection(buf: ShardedLike) -> da.Array:
    """The Dask array behind a split array, the same one each time it is asked for."""
    if buf.collection is None:
        if (buf.handle is None or buf.layout.partials) and _on_the_clients_loop(buf.mesh):
            # ``distributed.wait`` looks at collections there, where nothing may wait: not even for them to be computed.
            raise MeshError(
                "this array is still to be computed: call mt.compute(x) before distributed.wait(x) or progress(x)"
            )
        buf.collection = to_dask(buf)
    return buf.collection


def _on_the_clients_loop(mesh: MeshProtocol) -> bool:
    client = getattr(mesh.runtime, "client", None)
    if client is None:
        return False
    from ..dask.workers import is_on_loop

    return is_on_loop(client)


def persisted(buf: ShardedLike) -> tuple[Any, tuple[Any, ...]]:
    """The hook that Dask calls after it has persisted an array. Its blocks are on the workers already."""
    return _the_same, (buf,)


def _the_same(graph: Any, buf: ShardedLike, *, rename: Any = None) -> Array:
    return wrap(buf)
