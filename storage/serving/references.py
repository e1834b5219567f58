"""A checkpoint whose tensors lie in files as they are, as references into these files: for fsspec and kerchunk, and for
icechunk."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from ...arrays.core.errors import CheckpointError
from ..format.chunk_grid import ChunkGrid, divisors, ravel, slashed_key
from ..readers.dual_tensor import Coord, DualTensor
from ..readers.raw_tensor import RawTensor
from ..readers.tensor import ChunkedTensor
from ..stores import store as stores
from ..stores import url_options
from ..stores.icechunk_store import first_line
from .virtual_files import raw, rows_in
from .zarr_view import FILE, ZarrView, grid_node


def _divided(grid: ChunkGrid, tensor: RawTensor) -> ChunkGrid:
    """The grid of a view. A last chunk may take bytes behind its tensor, which readers ignore; where the file ends
    there, all chunks divide the tensor."""
    if 0 in grid.shape:
        return grid
    first = [(n - 1) * c for n, c in zip(grid.counts, grid.chunk, strict=True)]
    end = ravel(first, grid.shape) + math.prod(grid.chunk)
    if tensor.start + end * tensor.dtype.itemsize <= tensor.file_nbytes:
        return grid
    chunk = tuple(
        min(divisors(n), key=lambda d: abs(math.log(d / c))) for n, c in zip(grid.shape, grid.chunk, strict=True)
    )
    return ChunkGrid(grid.shape, chunk, chunk)


def _place(tensor: RawTensor | ChunkedTensor, grid: ChunkGrid, coord: Coord) -> tuple[str, int]:
    """The file of a chunk, and its first byte there."""
    if isinstance(tensor, RawTensor):
        held = rows_in(tensor, grid.shard_box(coord))
        return held.path, held.start
    shard, local = tensor.grid.place_in_shard(coord)
    number = ravel(local, tensor.grid.present(shard)) if local else 0
    return tensor.path(shard), tensor.objects[shard].start + number * math.prod(grid.chunk) * tensor.dtype.itemsize


class References:
    """The metadata of a hierarchy, and for each chunk the range of a file."""

    def __init__(self, view: ZarrView) -> None:
        self.nodes: dict[str, dict[str, Any]] = dict(view.nodes)
        self._tensors: dict[str, tuple[RawTensor | ChunkedTensor, ChunkGrid]] = {}
        for folder, tensor in view.tensors.items():
            held, grid = raw(tensor), view.grids[folder]
            if held is not None:
                grid = _divided(grid, held)
            elif isinstance(tensor, DualTensor):
                grid = ChunkGrid(tensor.shape, tensor.chunk, tensor.chunk)
            elif type(tensor) is not ChunkedTensor or (tensor.shape and 0 not in tensor.shape):  # else beside such
                raise CheckpointError(
                    f"{view.ckpt.path}: key {tensor.name!r} is not one run of bytes in a file, so nothing can refer to "
                    "it: as_zarr and serve compute such chunks when they are read"
                )
            self.nodes[folder] = {**view.nodes[folder], "chunk_grid": grid_node(grid)}
            self._tensors[folder] = held or tensor, grid
        inside = {**view.group["consolidated_metadata"], "metadata": self.nodes}
        self.group = {**view.group, "consolidated_metadata": inside}

    def texts(self, group: dict[str, Any]) -> dict[str, str]:
        """The metadata by key, with that of the group as given."""
        said = {FILE: group, **{f"{folder}/{FILE}": n for folder, n in self.nodes.items()}}
        return {key: json.dumps(text) for key, text in said.items()}

    def chunks(self) -> Iterator[tuple[str, str, int, int]]:
        """(key, file, start, length) of each chunk; all chunks of an array have one length."""
        for folder, (tensor, grid) in self._tensors.items():
            nbytes = math.prod(grid.chunk) * tensor.dtype.itemsize
            for coord in grid.shards():
                yield f"{folder}/{slashed_key(coord)}", *_place(tensor, grid, coord), nbytes


def kerchunk(view: ZarrView) -> dict[str, Any]:
    """Version 1 of kerchunk's references."""
    held = References(view)
    refs: dict[str, Any] = {**held.texts(held.group)}
    refs.update((key, [_plain(path), start, nbytes]) for key, path, start, nbytes in held.chunks())
    return {"version": 1, "refs": refs}


def _plain(path: str) -> str:
    """A location without the options in it."""
    if not stores.is_url(path):
        return path
    scheme, _, rest = path.partition("://")
    authority, slash, below = rest.partition("/")
    return f"{scheme}://{url_options.divide(authority)[0]}{slash}{below}"


def _version(path: str) -> datetime | str | None:
    """By which icechunk tells that a file is another: the ETag of an object, or the time of the last write, which it
    compares in whole seconds."""
    if stores.is_url(path):
        held, name = stores.holding(path)
        etag = (held.tag(name) or "").partition("version ")[2]
        return etag if etag.startswith('"') else None
    return datetime.fromtimestamp(-(-os.stat(path).st_mtime_ns // 10**9), UTC)


def icechunk(view: ZarrView, repository: Any, branch: str, message: str) -> str:
    """Commit references to an icechunk repository; returns the snapshot."""
    import asyncio

    from zarr.core.buffer import default_buffer_prototype

    if not hasattr(repository, "writable_session"):
        raise CheckpointError(
            f"icechunk_references takes an open icechunk.Repository, got {repository!r:.80}: one with a "
            "VirtualChunkContainer for the place of the files, which its config says"
        )
    held = References(view)
    buffer = default_buffer_prototype().buffer
    session = repository.writable_session(branch)
    store = session.store

    async def write() -> None:
        # icechunk keeps a table of its own
        group = {k: v for k, v in held.group.items() if k != "consolidated_metadata"}
        for key, text in held.texts(group).items():
            await store.set(key, buffer.from_bytes(text.encode()))

    asyncio.run(write())
    version = lru_cache(maxsize=None)(_version)
    for key, path, start, nbytes in held.chunks():
        where = _plain(path)
        url = where if stores.is_url(where) else f"file://{quote(where)}"
        try:
            store.set_virtual_ref(key, url, offset=start, length=nbytes, checksum=version(path))
        except Exception as e:  # IcechunkError, of a package that need not be here
            raise CheckpointError(
                f"icechunk takes no reference to {url}: {first_line(e)}. Give the repository's config a "
                "VirtualChunkContainer for its folder (config.set_virtual_chunk_container), and authorize it when the "
                "repository is opened"
            ) from None
    view.ckpt.generation.check()
    return str(session.commit(message))
