"""Zarr arrays that ranks read and write block by block: the user's, and intermediate values between passes."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from ...arrays.core.array import Array
from ...arrays.core.blocks import Box
from ...arrays.core.dtypes import as_dtype, is_low_precision
from ...arrays.core.errors import (
    CheckpointError,
    CheckpointExists,
    CheckpointReplaced,
    CorruptCheckpoint,
    IncompleteCheckpoint,
    MeshError,
    NotACheckpoint,
    ShardingConflict,
    StoreError,
)
from ...arrays.core.formatting import human_bytes
from ...arrays.core.op import ShapeDtype
from ...storage.checkpoint.checkpoint import StoredArray, generation_of
from ...storage.commit import directory_commit
from ...storage.loading.open import open_checkpoint
from ...storage.readers import zarr_tensor
from ...storage.readers.zarr_tensor import ZarrTensor
from ...storage.stores import atomic_directory, icechunk_store
from ...storage.stores import store as stores
from ...storage.stores.generations import JointGeneration, once_more
from ..collectives.reduction_tree import joined
from ..execution.runtime import LocalRuntime
from ..mesh.mesh import Mesh
from ..mesh.visualize import blocks_html
from ..partition.rank_program import RankProgram
from ..sharding.placement import REDUCERS, Placement, Sharding, block_box


@dataclass(frozen=True, eq=False)
class Stored:
    """An array in a Zarr store with a sharding over a mesh; made by :func:`from_zarr` and :func:`stream`."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @once_more
    def load(self) -> Array:
        """The array on the mesh: each rank reads its block, where it is.

        Where a writer replaces the array meanwhile, the read begins anew. `CheckpointReplaced` where writers do so
        again and again, or where an array of another shape or dtype is there by now.
        """
        mesh = self.sharding.mesh
        payloads = {r: (self.path, self.sharding.box(self.shape, r)) for r in range(mesh.size)}
        with Stored.in_one_state([self]):
            (x,) = mesh.create(_read_blocks, payloads, [(self.shape, self.dtype, self.sharding)])
        return x

    @staticmethod
    @contextmanager
    def in_one_state(stored: Sequence[Stored]) -> Iterator[None]:
        """Raise `CheckpointReplaced` where an array is replaced within the block, even in part, or was before it."""
        opened = {x.path: open_checkpoint(x.path) for x in stored}
        before = JointGeneration.of_all(map(generation_of, opened.values()))
        for x in stored:
            now = " and ".join(f"{a.dtype} of shape {a.shape}" for a in opened[x.path].values())
            if now != (then := f"{x.dtype} of shape {x.shape}"):
                raise CheckpointReplaced(f"{x.path} was {then}, and was replaced by {now}; call mt.from_zarr again")
        try:
            yield
        finally:
            before.check()

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        # NumPy would make an array of one object of it.
        raise MeshError(f"{self!r} is not loaded: use x.load(), or mt.stream(fn, x) for more than fits in memory")

    def __getattr__(self, name: str) -> Any:
        hint = (
            "" if name.startswith("_") or not hasattr(Array, name) else ": load it with x.load(), or mt.stream(fn, x)"
        )
        raise AttributeError(f"a stored array has no {name!r}{hint}", name=name, obj=self)

    def __repr__(self) -> str:
        return f"Stored({self.path!r}, {self.sharding.text(self.shape, self.dtype)}, {human_bytes(self.nbytes)})"

    def _repr_html_(self) -> str:
        return f"<div><code>{escape(repr(self))}</code>{blocks_html(self.shape, self.sharding)}</div>"


def from_zarr(path: Any, mesh: Mesh, /, **placements: Placement) -> Stored:
    """An array in a Zarr store, for the ranks of a mesh. Nothing but its metadata is read yet.

    Parameters
    ----------
    path
        Of a Zarr array, which every worker can read: a directory, or any URL that checkpoints are read from, with its
        options.
    mesh
        The mesh.
    placements
        By axis name, as in :func:`meshtape.distribute`.

    Returns
    -------
    Stored
        To be loaded (``.load()``), or worked on block by block by :func:`stream`. Each of these reads one state of the
        array, or raises `CheckpointReplaced`.

    Raises
    ------
    NotACheckpoint, StoreError
        Where there is no Zarr array, or one that cannot be read; where a store does not answer.
    MeshError
        Where there is a group of arrays.
    DTypeError
        For texts, dates and other values that no array has.

    Examples
    --------
    >>> import tempfile, zarr, meshtape as mt
    >>> where = tempfile.mkdtemp()
    >>> zarr.create_array(where, shape=(6, 2), chunks=(2, 2), dtype="f8")[...] = 1.0
    >>> x = mt.from_zarr(where, mt.Mesh({"data": 2}), data=mt.Shard(0))
    >>> mt.stream(lambda x: mt.sum(x * 2, axis=0), x, memory=1000)
    Array([12., 12.], dtype=float64)
    """
    sharding, path = Sharding(mesh, **placements), stores.location(path)  # workers may be in other folders
    if path.startswith(f"{icechunk_store.SCHEME}://"):  # all of them read one snapshot
        path = icechunk_store.pinned(path)
    found = _opened(path)
    shape, dtype = tuple(map(int, found.shape)), as_dtype(found.dtype, "from_zarr")
    sharding = sharding.check(shape, dtype)
    if sharding.partial:
        raise MeshError("[from_zarr] what is stored is not pending: use Shard(dim) or Replicate()")
    return Stored(path, shape, dtype, sharding)


@dataclass(frozen=True)
class StoreTarget:
    """A Zarr array that ranks fill, one chunk a block, so that no two ranks write to one chunk. It has no metadata, and
    so is no array, before :func:`committed` ends."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    place: str
    """The path that it is written to before the commit."""

    def open(self) -> Any:
        from zarr import Array, AsyncArray
        from zarr.storage import MemoryStore, StorePath

        described = _created({"store": MemoryStore()}, self.shape, self.dtype, self.chunks)
        place = _place(self.place)
        return Array(AsyncArray(described.metadata, StorePath(place["store"], place["path"])))

    def check(self) -> None:
        """Raise if the write was given up: a rank that went on writing would create the array anew."""
        if not stores.is_url(self.place) and not Path(self.place).is_dir():
            raise StoreError(f"{self.path} was given up: another rank could not write it, or the client is gone")


@contextmanager
def committed(path: str, aval: ShapeDtype, chunks: Sequence[int]) -> Iterator[StoreTarget]:
    """An atomic new array at ``path``: after an error in the context there is nothing, and a killed process leaves no
    array. A directory is filled under a temporary name (:mod:`~meshtape.storage.commit.directory_commit`); in an object
    store the metadata comes last."""
    where = stores.location(path)
    with _directory(where) as folder:
        target = StoreTarget(
            path, aval.shape, np.dtype(aval.dtype), tuple(chunks), where if folder is None else folder.root
        )
        yield target
        new_array(target.place, target.shape, target.dtype, target.chunks)
        if folder is not None:
            folder.settle()
            folder.commit()


@contextmanager
def _directory(where: str) -> Iterator[atomic_directory.Folder | None]:
    """A new directory to fill and commit; None for an object store, whose new objects are deleted after an error."""
    if not stores.is_url(where):
        with (
            atomic_directory.room_for(0, where),
            directory_commit.replacing(where, overwrite=False, tables=frozenset()) as folder,
        ):
            yield folder
        return
    try:
        yield None
    except BaseException:
        with contextlib.suppress(Exception):  # the error that left it matters more
            from zarr.core.sync import sync

            place = _place(where)
            sync(place["store"].delete_dir(place["path"]))
        raise


@dataclass(frozen=True)
class PendingStored:
    """A value in a store, split over blocks, with all contributions of its pending ``axes``: these are the first
    dimensions of the stored array. ``op`` joins the contributions."""

    path: str
    axes: tuple[int, ...]
    op: str | None

    @classmethod
    def create(cls, path: str, p: RankProgram, v: int) -> PendingStored:
        layout, aval = p.layouts[v], p.avals[v]
        parts = cls(path, tuple(a for a, _ in layout.partials), next((op for _, op in layout.partials), None))
        wide = bool(parts.axes) and is_low_precision(aval.dtype)
        lead = tuple(p.sizes[a] for a in parts.axes)
        new_array(
            path,
            (*lead, *aval.shape),
            np.dtype(np.float32) if wide else aval.dtype,
            (*(1 for _ in lead), *block_box(layout, p.sizes, aval.shape, 0).shape),
        )
        return parts

    def open(self) -> Any:
        return open_array(self.path, "r+")

    def write(self, array: Any, box: Box, place: Sequence[int], block: np.ndarray) -> None:
        """Write the block of the rank at ``place`` of the mesh."""
        array[(*(place[a] for a in self.axes), *box.slices)] = block.astype(array.dtype)

    def read(self, array: Any, box: Box, dtype: np.dtype) -> np.ndarray:
        """Read a box of the value, its contributions joined."""
        found = np.asarray(array[(*(slice(None) for _ in self.axes), *box.slices)])
        if self.op is None:
            return found
        terms = found.reshape(-1, *box.shape) if box.size else np.zeros((1, *box.shape), found.dtype)
        return joined(terms, REDUCERS[self.op]).reshape(box.shape).astype(dtype, copy=False)


@contextmanager
def scratch_room(given: Any, paths: Sequence[str | None], mesh: Mesh, needed: bool) -> Iterator[str | None]:
    """A scratch location for intermediate values, which is empty before and after."""
    if not needed:
        yield None
        return
    beside = next((p for p in paths if p is not None), None)
    if given is not None:
        room = f"{given}/stream-{uuid.uuid4().hex}"
    elif beside is not None:
        room = f"{beside}.stream-{uuid.uuid4().hex}"
    elif isinstance(mesh.runtime, LocalRuntime):
        room = f"{tempfile.gettempdir()}/meshtape-stream-{uuid.uuid4().hex}"
    else:
        raise ShardingConflict(
            "[stream] values go from blocks to other blocks by way of a store: say where, with scratch=… that all "
            "workers can use"
        )
    room = stores.location(room)
    if not stores.is_url(room):
        with _directory(room) as folder:  # never committed: it goes at the end, and with `gc` after a kill
            yield folder.root  # type: ignore[union-attr]
        return
    group = open_group(room, "w")
    try:
        yield room
    finally:
        for name in list(group.array_keys()):
            del group[name]


def _opened(path: str) -> Any:
    """Open the Zarr array of a user. Raises errors of ours."""
    try:
        return zarr_tensor.open_array(stores.location(path), "")
    except (IncompleteCheckpoint, CorruptCheckpoint) as e:
        with contextlib.suppress(CheckpointError):
            names = ", ".join(open_checkpoint(path)) or "none"
            raise MeshError(f"[from_zarr] {path} is a group, not an array; its arrays are {names}") from e
        if isinstance(e, IncompleteCheckpoint):
            raise NotACheckpoint(f"[from_zarr] there is no Zarr array at {path}") from e
        # A client's error text on a URL may hold a signature.
        why = type(e.__cause__).__name__ if stores.is_url(path) else e.__cause__ or e
        raise StoreError(f"[from_zarr] {path} cannot be read as a Zarr array: {why}") from e


# ----- Zarr's own calls: of a directory, or of an object store as checkpoints reach it --------------------------------


def _place(path: str, write: bool = True) -> dict[str, Any]:
    store, node = zarr_tensor.zarr_place(stores.location(path), write=write)
    return {"store": store, "path": node}


def open_array(path: str, mode: str = "r") -> Any:
    """An existing Zarr array, to be indexed with slices."""
    if mode == "r":
        found = zarr_tensor.open_array(stores.location(path), "")
        return StoredArray((path,), found.kept() if isinstance(found, ZarrTensor) else found)
    from ...storage.format.zarr_dtypes import zarr  # with our small floats

    return zarr.open_array(**_place(path), mode=mode)


def open_group(path: str, mode: str) -> Any:
    """A group of Zarr arrays; a new one with ``mode="w"``."""
    import zarr

    return zarr.open_group(**_place(path, write=mode != "r"), mode=mode)


def new_array(path: str, shape: tuple[int, ...], dtype: np.dtype, chunks: Sequence[int]) -> Any:
    return _created(_place(path), shape, dtype, chunks)


def _created(place: Mapping[str, Any], shape: tuple[int, ...], dtype: np.dtype, chunks: Sequence[int]) -> Any:
    from ...storage.format.zarr_dtypes import zarr

    return zarr.create_array(
        place["store"],
        name=place.get("path"),
        shape=shape,
        chunks=tuple(max(n, 1) for n in chunks),
        dtype=dtype,
        config={"write_empty_chunks": True},  # so that one which is not there is lost
    )


def refuse_existing(path: str) -> None:
    """Raise where something is at ``path`` that a new array would replace."""
    import zarr

    try:
        found = zarr.open(**_place(path), mode="r")
    except FileNotFoundError:
        where = stores.location(path)
        if not stores.is_url(where) and os.path.lexists(where):
            try:
                Path(where).rmdir()  # an empty directory may be replaced
            except OSError:
                raise CheckpointExists(
                    f"[stream] {path} is there already, and no Zarr array: choose another path"
                ) from None
        return
    raise CheckpointExists(f"[stream] {path} holds a Zarr {type(found).__name__.lower()} already: choose another path")


def _read_blocks(payloads: Mapping[int, Any]) -> dict[int, list[np.ndarray]]:
    return {r: [np.asarray(open_array(path)[box.slices])] for r, (path, box) in payloads.items()}
