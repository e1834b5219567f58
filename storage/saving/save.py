"""`save`: a tree of arrays, local or split over ranks, as a Zarr v3 group that appears all at once.

Every rank writes its own blocks. A block that several ranks hold is written by one of them, chosen so that the bytes
are balanced; the choice depends on nothing but the tree and the mesh. The calling process then checks that every shard
of every array was written exactly once, adds the metadata and the manifest, and commits (see ``protocol``).
"""

from __future__ import annotations

import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, TypedDict, Unpack

import numpy as np

from ...arrays import asarray
from ...arrays.backends.collector import collect_again, no_collections
from ...arrays.core.blocks import BlockSharding, Box
from ...arrays.core.errors import (
    CheckpointDTypeError,
    CheckpointError,
    CheckpointReplaced,
    CorruptCheckpoint,
    IncompleteCheckpoint,
    ParentChanged,
)
from ...arrays.core.op import not_recording
from ...arrays.core.tree import Path, children_of
from ..base import activity, names
from ..base.arguments import mapping, step_number
from ..base.leaves import taken
from ..checkpoint.checkpoint import Checkpoint
from ..commit import contents
from ..commit.anchor_lock import PATIENCE, locked
from ..commit.protocol import protocol_of
from ..format import dtypes, manifest
from ..format.chunk_grid import choose_grid, whole_grid
from ..format.compression import Codec, chosen
from ..format.documents import encode
from ..format.sharding_spec import by_mesh
from ..format.zarr_format import is_raw
from ..readers.safetensors import save_safetensors
from ..stores import atomic_directory, icechunk_store, store
from . import icechunk_commit, packs, sharing
from .background import SaveHandle, finish_earlier, start
from .dual import choose_dual, is_dual
from .finalize import finish_directory
from .items import DeltaBase, Record, SaveItem, refuse_taken, sizes_of, tasks_of
from .write_shards import write_blocks

_SCALARS = (bool, int, float, str)
_BRIEF = 64 << 20  # bytes that are written before other threads want their garbage collected


@dataclass(frozen=True)
class SaveReport:
    """Report of a save: the directory, the number of arrays, bytes on disk, seconds, files, and the bytes of those that
    it shares."""

    path: str
    arrays: int
    nbytes: int
    seconds: float
    files: int
    shared: int = 0


# ----- in the process that saves --------------------------------------------------------------------------------------


def _classify(tree: Any) -> tuple[Any, list[SaveItem]]:
    """The tree with `manifest.Leaf` in place of its arrays and dicts in place of its classes, and the arrays."""
    items: list[SaveItem] = []
    if isinstance(tree, Checkpoint):
        raise CheckpointError(f"{tree.path} is an open checkpoint: convert and merge write it, load makes a tree of it")

    def walk(node: Any, path: Path) -> Any:
        if len(path) > manifest.MAX_DEPTH:
            raise CheckpointError(f"the tree is nested deeper than {manifest.MAX_DEPTH} levels, at {path[:8]}…")
        if node is None or type(node) in _SCALARS:
            return node
        if isinstance(node, np.str_):  # of an array of texts
            return str(node)
        found = None if hasattr(node, "dtype") else children_of(node)
        if found is not None:
            # Of classes the fields are kept: a dict, list or tuple, or for all others a dict of them.
            kind, keys, children, *_ = found
            inner = [walk(v, (*path, k)) for k, v in zip(keys, children, strict=True)]
            return inner if kind == "list" else tuple(inner) if kind == "tuple" else dict(zip(keys, inner, strict=True))
        if isinstance(node, _SCALARS) and not isinstance(node, np.generic):
            return node
        items.append(_item(node, path))
        return manifest.Leaf(len(items) - 1)

    return walk(tree, ()), items


def _item(leaf: Any, path: Path) -> SaveItem:
    name = names.leaf_name(path)
    sharding = None
    if type(leaf) is not np.ndarray:
        leaf = taken(leaf, f"key {name!r}")
        if isinstance(leaf, np.generic):
            leaf = np.asarray(leaf)
        # Sparse matrices have a shape and a dtype, and are no arrays.
        sharding = getattr(leaf, "sharding", None)
        held = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        if not held or (sharding is None and not hasattr(leaf, "__array__")):
            raise CheckpointDTypeError(
                f"key {name!r}: a {type(leaf).__name__} cannot be saved; arrays, numbers, texts, booleans and None can"
            )
    shape = leaf.shape if type(leaf) is np.ndarray else tuple(int(n) for n in leaf.shape)
    dtype = dtypes.check_storable(leaf.dtype, name)
    whole = sharding is None
    grid = whole_grid(shape, dtype.itemsize) if whole else choose_grid(shape, dtype.itemsize, _boxes(sharding, shape))
    return SaveItem(path, leaf, shape, dtype, sharding, grid, name=name)


def _boxes(sharding: BlockSharding, shape: tuple[int, ...]) -> list[Box]:
    """The distinct blocks of an array."""
    return sorted({sharding.box(shape, rank) for rank in range(sharding.mesh.size)})


def _write_local(items: list[SaveItem], root: str, suffix: str) -> list[Record]:
    """Arrays of this process: host and small arrays together, then the others of a device one by one."""

    def write(group: list[SaveItem]) -> list[Record]:
        tasks = [t for i, item in enumerate(group) for t in tasks_of(i, item)]
        arrays = [np.asarray(i.array if here(i) else i.array.to_device("cpu")) for i in group]
        tasks = packs.dealt(tasks, [i.dtype.itemsize for i in group], "local", suffix)
        return write_blocks({0: (root, tasks)}, {0: arrays})

    def here(item: SaveItem) -> bool:
        return type(item.array) is np.ndarray or str(getattr(item.array, "device", "cpu")) == "cpu"

    records = write([i for i in items if i.packed or here(i)])
    for item in items:
        if not (item.packed or here(item)):
            records += write([item])
    return records


def _write_split(items: list[SaveItem], root: str, suffix: str) -> list[Record]:
    """All arrays of one mesh, in one visit to each process."""
    mesh = items[0].sharding.mesh
    arrays = mesh.settle([item.array for item in items])
    sizes, small = [i.dtype.itemsize for i in items], {number for number, item in enumerate(items) if item.packed}
    payloads = {}
    for rank, blocks in packs.assign(packs.held_blocks(mesh, items, arrays), small).items():
        tasks = [task for number, box in blocks for task in tasks_of(number, items[number], box)]
        payloads[rank] = root, packs.dealt(tasks, sizes, f"{items[0].mesh}-{rank:05d}", suffix)
    if not payloads:
        return []
    return [r for found in mesh.run_on_blocks(write_blocks, arrays, payloads) for r in found]


def _by_mesh(items: list[SaveItem]) -> list[tuple[Any, list[SaveItem]]]:
    groups = by_mesh(items)
    for at, (_, group) in enumerate(groups):
        for item in group:
            item.mesh = at
    return groups


def _settle_first(items: list[SaveItem]) -> None:
    """Reduce arrays with partial placements, and take the grid from the resulting sharding."""
    for item in items:
        if item.sharding is not None and item.sharding.partial:
            (item.array,) = item.sharding.mesh.settle([item.array])
            item.sharding = item.array.sharding
            item.grid = choose_grid(item.shape, item.dtype.itemsize, _boxes(item.sharding, item.shape))


class SaveOptions(TypedDict, total=False):
    """The common options of `save` and `save_async`, documented in `save`."""

    step: int | None
    metadata: Mapping[str, Any] | None
    documents: Mapping[str, Any] | None
    overwrite: bool
    compression: str | Codec | None
    pack: bool | int | None
    dtype_fallback: Literal["raw"] | None
    share: str | os.PathLike[str] | None
    layout: Literal["dual"] | None
    base: str | os.PathLike[str] | None


@not_recording()  # what is stored needs no derivative
def save(
    path: str | os.PathLike[str] | BinaryIO | socket.socket,
    tree: Any,
    *,
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    documents: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    compression: str | Codec | None = None,
    pack: bool | int | None = None,
    dtype_fallback: Literal["raw"] | None = None,
    share: str | os.PathLike[str] | None = None,
    layout: Literal["dual"] | None = None,
    base: str | os.PathLike[str] | None = None,
    message: str | None = None,
) -> SaveReport:
    """Write a tree of arrays to a new directory, all or nothing.

    Parameters
    ----------
    path
        The directory to make, or a URL (``s3://``, ``gs://``, ``az://``, ``memory://``). Missing directories above it
        are made too. Or a binary stream (a pipe, a socket, a `gzip.GzipFile`): a directory cannot go through one, so it
        gets a safetensors file with the dotted names of the arrays. The other leaves, step, metadata and documents have
        no place there, and are refused.
    tree
        Nested dicts, lists, tuples, named tuples and dataclasses of arrays (local, split over a mesh, NumPy, or with
        ``__dlpack__``, such as PyTorch's and JAX's), numbers, texts, booleans and None. Named tuples and dataclasses
        are kept as dicts of their fields.
    step
        The training step, kept in the manifest.
    metadata
        Anything that JSON holds, and NumPy scalars; NaN and infinities are kept.
    documents
        Files of their own beside the arrays, such as ``{"config": {...}, "generation_config": {...}}``: dicts become
        ``NAME.json``, texts are kept as they are. `merge`, `convert` and `reshard` take them along.
    overwrite
        Replace an existing checkpoint. A kill at any moment leaves the old one or the new one.
    compression
        None; ``"zstd"``, ``"zstd:LEVEL"`` or ``Zstd(level=…)``, for masks, counts and sparse state; ``"weights"`` or
        ``ShuffledZstd(level=…)``, for weights, which shrink by 15 % (float32) to 30 % (bfloat16). Each chunk is
        compressed by itself, so that slices and blocks still read what they need. Packed arrays are not compressed.
    pack
        Whether arrays whose blocks have at most 1 MiB (or this number of bytes) share safetensors files, one a writing
        rank, in place of a Zarr array each. By default in object stores, where every file is a request, and not on
        disks. Arrays without an element, those with a dtype that safetensors lacks, and those whose blocks do not
        follow the ceil rule stay Zarr arrays. Earlier versions of meshtape refuse a checkpoint with packs.
    dtype_fallback
        ``"raw"``: Zarr's metadata calls bfloat16 and float8 ``uint16`` and ``uint8``, so that ``zarr.open_group`` opens
        the whole group where meshtape is not installed; a view gives the numbers there. meshtape itself reads the true
        types either way, and the bytes are the same. By default they have the names that TensorStore gives them.
    share
        An earlier checkpoint on the same disk: a shard whose file there has the very same bytes becomes a second name
        of that file (a hard link, or a reflink where links are refused) and is not written. Either checkpoint can be
        deleted. Nothing is shared where there is none, or in packs.
    layout
        ``"dual"``: the file of each block is at once a shard of the Zarr array and a safetensors file. Blocks must be
        whole rows, and neither ``compression`` nor ``pack`` goes with it. Where each array is one block,
        ``model.safetensors.index.json`` lets Hugging Face loaders open the directory. Earlier versions of meshtape
        refuse such a checkpoint.
    base
        An earlier checkpoint in the same folder, itself no delta: arrays that it has with the same name, shape and
        dtype are stored as differences from those, compressed, which takes a tenth to two thirds of the bytes where
        training has moved them a little. Others are stored plainly. Such a checkpoint cannot be read without its base,
        which it pins: `CheckpointManager` (``anchor_every``) takes care of that. Zarr readers and earlier versions of
        meshtape refuse it by name.
    message
        For ``icechunk://PLACE@BRANCH``, a branch of an icechunk repository, in which the save is one snapshot: what its
        history says of it. The step before stays in the history, so ``overwrite`` is refused there, as are documents
        and the options of files.

    Returns
    -------
    SaveReport

    Raises
    ------
    CheckpointExists
        The path exists and ``overwrite`` is false, or what exists is not a checkpoint.
    CheckpointDTypeError
        A leaf has a type that cannot be stored; names its key.
    CheckpointKeyError
        Two leaves have the same dotted name.
    StorageFull
        There is less room than the arrays need; nothing was written. The size of compressed arrays is not known before:
        they may fill the disk.

    Notes
    -----
    Split arrays are written by the processes that hold them, so all must see the path on a shared file system, or have
    the credentials of the object store in their environment.

    Examples
    --------
    >>> import numpy as np, tempfile, os
    >>> where = os.path.join(tempfile.mkdtemp(), "ckpt")
    >>> report = save(where, {"layers": [{"w": np.ones((4, 2))}], "epoch": 3}, step=10)
    >>> report.arrays
    1
    >>> import zarr
    >>> zarr.open(where)["layers.0.w"].shape
    (4, 2)
    """
    if hasattr(path, "write") or hasattr(path, "sendall"):
        beside = (step, metadata, documents, compression, pack, dtype_fallback, share, layout, base, message)
        return _save_stream(path, tree, beside)
    target = store.location(path)
    finish_earlier(target)
    kept: Any = {"documents": documents, "compression": compression, "pack": pack, "dtype_fallback": dtype_fallback}
    kept |= {"share": share, "layout": layout, "base": base}
    said: Any = {"step": step, "metadata": metadata}
    if icechunk_store.is_versioned(target):
        kept |= {"overwrite": overwrite or None}
        return _commit(target, tree, said, message, [name for name, value in kept.items() if value is not None])
    if message is not None:
        raise CheckpointError("message= is for icechunk://; a directory has no history, metadata= keeps it")
    with no_collections():  # longer than the many small objects of a save, which are never walked
        return _Save(target, tree, {**said, **kept, "overwrite": overwrite}).run()


def _commit(target: str, tree: Any, kept: SaveOptions, message: str | None, refused: Sequence[str]) -> SaveReport:
    """A save into an icechunk repository. ``refused``: options that were given and have no place there."""
    if refused:
        raise CheckpointError(f"{target}: a snapshot has no place for {', '.join(f'{n}=' for n in refused)}")
    held = _Save(target, tree, kept)
    with activity.under_way("Save", target, sum(i.stored_nbytes for i in held.items)):
        where, nbytes = icechunk_commit.commit(target, held.head, held.items, message)
    return SaveReport(where, len(held.items), nbytes, time.perf_counter() - held.started, len(held.items))


def _save_stream(stream: Any, tree: Any, beside: tuple[Any, ...]) -> SaveReport:
    """The arrays of a tree as one safetensors file, from its first byte to its last."""
    started = time.perf_counter()
    structure, items = _classify(tree)
    values = [names.leaf_name(p) for p, _ in manifest.scalar_leaves(structure)]
    if values or any(x is not None for x in beside):
        held = (
            f"the leaves {', '.join(values[:8])}"
            if values
            else "step=, metadata=, documents=, compression=, pack=, dtype_fallback=, share=, layout= or base="
        )
        raise CheckpointError(f"a stream gets a safetensors file, which has no place for {held}; save to a directory")
    if split := [i.name for i in items if i.sharding is not None]:
        raise CheckpointError(
            f"key {split[0]!r} is split over a mesh, whose ranks cannot write to one stream; save to a directory, then "
            "merge"
        )
    names.check_distinct([i.path for i in items], [i.name for i in items])
    held = {i.name: i.array for i in items}
    arrays = {n: a if str(getattr(a, "device", "cpu")) == "cpu" else a.to_device("cpu") for n, a in held.items()}
    nbytes = save_safetensors(stream, arrays)
    return SaveReport(str(getattr(stream, "name", "") or ""), len(items), nbytes, time.perf_counter() - started, 1)


@not_recording()  # what is stored needs no derivative
def save_async(
    path: str | os.PathLike[str], tree: Any, *, then: Callable[[], None] | None = None, **options: Unpack[SaveOptions]
) -> SaveHandle:
    """Write a checkpoint in the background; training goes on at once.

    The parameters are those of `save`, and so are the errors about the tree, which are raised here. The snapshot is
    taken before the function returns: what is done to the arrays afterwards is not in the file. Arrays are values that
    are copied when one side writes, so this copies nothing; NumPy arrays, which anybody may write to, are copied. Split
    arrays are computed first, and their blocks stay where they are until their ranks have written them.

    Arrays of this process are written by one thread fewer than there are processors, at a lower priority where the
    system has one for each thread (Linux): what the training wants to compute comes first.

    ``then`` is called, in the background too, once the checkpoint is complete; what it raises counts as an error of the
    save.

    At most one save runs for a path: a second one waits for the first. The interpreter waits for all when it ends; a
    save that begins after that, in a hook of ``atexit`` or a thread that outlives the main one, is made before the
    function returns, and its errors are raised here.

    Returns
    -------
    SaveHandle
        ``wait()`` returns the `SaveReport` or raises what went wrong; ``done()`` tells whether it would wait. An error
        that nobody waited for is raised by the next save to the same path.

    Examples
    --------
    >>> import numpy as np, tempfile, os
    >>> from meshtape.storage import load
    >>> where = os.path.join(tempfile.mkdtemp(), "ckpt")
    >>> w = np.zeros(3)
    >>> handle = save_async(where, {"w": w}, step=1)
    >>> w[:] = 7
    >>> handle.wait().arrays
    1
    >>> np.asarray(load(where)["w"])
    array([0., 0., 0.])
    """
    target = store.location(path)
    if icechunk_store.is_versioned(target):
        raise CheckpointError(f"{target}: a save into a repository is not made in the background; call save")
    finish_earlier(target)
    prepared = _Save(target, tree, options)
    prepared.snapshot()

    def work() -> SaveReport:
        with no_collections():
            report = prepared.run("Save in the background")
        if then is not None:
            then()
        return report

    return start(target, work)


class _Save:
    """One save: planned and refused when it is made, written when it is run."""

    @no_collections()
    def __init__(self, target: str, tree: Any, given: SaveOptions) -> None:
        self.started = time.perf_counter()
        if unknown := given.keys() - SaveOptions.__annotations__.keys():
            raise TypeError(f"a save has no option {', '.join(map(str, unknown))}")
        raw, how = is_raw(given.get("dtype_fallback")), chosen(given.get("compression"))
        self.target, self.overwrite, self.committed = target, given.get("overwrite", False), False
        share = given.get("share")
        self.share = None if share is None else store.location(share)
        if self.share is not None and (store.is_url(target) or store.is_url(self.share)):
            raise CheckpointError(f"{target} cannot share files of {self.share}: only two places on a disk can")
        structure, self.items = _classify(tree)
        items = self.items
        scalars = list(manifest.scalar_leaves(structure))
        paths = [i.path for i in items] + [p for p, _ in scalars]
        names.check_distinct(paths, [i.name for i in items] + [names.leaf_name(p) for p, _ in scalars])
        for item, directory in zip(items, names.zarr_names([i.name for i in items]), strict=True):
            item.directory = directory
            item.compression = how if item.shape else None
            item.raw = raw
        step = None if given.get("step") is None else step_number(given["step"])
        # Copied through JSON's types, as the caller may change the dict while the save runs in the background.
        kept = manifest.decode_json(manifest.encode_json(dict(mapping("metadata", given.get("metadata"))), "metadata"))
        kept.pop(manifest.FORMER, None)  # which speaks of the values of another
        self.head = manifest.Manifest([], manifest.encode_tree(structure), step, kept)
        self.documents = encode(given.get("documents"))
        refuse_taken(items, self.documents)
        # Whatever cannot be kept is refused here, before anything is computed or written.
        json.dumps([self.head.step, kept, [v for _, v in scalars]])
        _settle_first(items)
        dual = is_dual(given)
        for item in items if dual else ():
            choose_dual(item)
        limit = 0 if dual else packs.threshold(given.get("pack"), target)
        for item in items if limit else ():
            packs.choose(item, _boxes, limit)
        self.base = None if given.get("base") is None else DeltaBase.at(store.location(given["base"]), target)
        if self.base is not None:
            self.head.base = self.base.given_to(items)

    def snapshot(self) -> None:
        """Hold the values as they are now, so that `run` may come later and in another thread."""
        if not self.overwrite:
            # Refused now rather than in the background; what is there may be replaced, or not, is looked at again then.
            protocol_of(self.target).check_target(self.target, False, contents.SAVED)
        for mesh, group in _by_mesh(self.items):
            for item, settled in zip(group, mesh.settle([i.array for i in group]), strict=True):
                item.array = settled
        for item in self.items:
            if item.sharding is not None:
                continue
            if str(getattr(item.array, "device", "cpu")) != "cpu":
                item.array = asarray(item.array, copy=True)  # shares the buffer until one side writes
            elif isinstance(item.array, np.ndarray):
                item.array = item.array.copy()
            else:
                item.array = np.asarray(item.array)  # an export holds the buffer: whoever writes then copies

    def run(self, kind: str = "Save") -> SaveReport:
        """Write everything and commit."""
        if self.base is None:
            return self._write(kind)
        folders = [item.directory for item in self.items]
        try:
            # One that replaces another has the lock alone at its end, and so from the beginning.
            with locked(home := store.split(self.target)[0], shared=not self.overwrite) as mine:
                if not mine:
                    raise ParentChanged(f"another has been deleting checkpoints in {home} for {PATIENCE:g} s")
                self.base.ckpt.generation.check()
                return self._write(kind)
        except (CorruptCheckpoint, IncompleteCheckpoint, CheckpointReplaced, ParentChanged) as e:
            warnings.warn(f"{self.target} is stored plainly, as its base cannot be read: {e}", stacklevel=3)
        self.base.taken_back()
        self.base = self.head.base = None
        self.overwrite = self.overwrite or self.committed  # of a delta that lost its base at the last moment
        for item, folder in zip(self.items, folders, strict=True):
            item.directory = folder
        return self._write(kind)

    def _write(self, kind: str) -> SaveReport:
        target, items = self.target, self.items
        if self.share is not None:
            sharing.match(items, self.share)
        expected, surely = sizes_of(items)
        if expected >= _BRIEF:
            collect_again()
        slack = 4096 * (2 * len(items) + 2)
        with (
            activity.under_way(kind, target, expected) as work,
            atomic_directory.room_for(surely + slack, target),
            protocol_of(target).replacing(target, overwrite=self.overwrite, tables=contents.SAVED) as folder,
        ):
            work.root = folder.root
            for item in items:
                item.directory += folder.suffix
                if not item.packed:
                    folder.mkdir(item.directory)
            records = _write_local([i for i in items if i.sharding is None], folder.root, folder.suffix)
            groups = _by_mesh(items)
            for _, group in groups:
                records += _write_split(group, folder.root, folder.suffix)
            work.doing = "writing metadata"
            self.head.meshes = [mesh.describe() for mesh, _ in groups]
            if self.base is not None:
                self.base.ckpt.generation.check()
            nbytes = finish_directory(folder, target, self.head, items, records, self.documents)
            folder.commit()
        self.committed = True
        if self.base is not None:
            self.base.ckpt.generation.check()  # its deleter has not seen this checkpoint, if it was complete too late
        files = len({r.pack.file if r.pack else r.file for r in records})
        shared = sum(r.nbytes for r in records if r.shared)
        return SaveReport(target, len(items), nbytes, time.perf_counter() - self.started, files, shared)
