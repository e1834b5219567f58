"""`convert` and `reshard`: a checkpoint in another format or cut for another mesh, streaming, resumable."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict, Unpack

import numpy as np

from ...arrays.core.errors import CheckpointError, CheckpointKeyError
from ...arrays.core.formatting import some
from ..base import activity, names
from ..base.arguments import check_positive
from ..base.names import leaf_name
from ..base.scratch import out_of_memory
from ..checkpoint.checkpoint import Checkpoint, fill, generation_of, unread
from ..foreign import dcp_archive
from ..format import dtypes, manifest, tensor_sums
from ..format.chunk_grid import choose_grid
from ..format.compression import Codec, Compression, chosen
from ..format.documents import Documents, given, with_dtype, without_quantization
from ..format.manifest import Leaf, scalar_leaves
from ..format.sharding_spec import Chooser, ShardingChoice
from ..format.zarr_format import described, is_raw
from ..loading.match_target import prune, select, unread_of
from ..loading.open import open_checkpoint
from ..loading.read_ahead import reading_ahead
from ..readers.safetensors import DCP_INFO
from ..readers.zarr_tensor import GridTensor
from ..rules.casting import CastLoss
from ..rules.dequantized import converted, dequantizes, floating, is_lone_float8, is_quantized, scaled
from ..rules.lazy_tensors import with_leaves
from ..rules.rules import Rules
from ..saving import packs
from ..saving.dual import choose_dual, is_dual
from ..saving.items import SaveItem
from ..saving.quantize import MARK
from ..stores import atomic_directory, store
from .attributes import attributes_left, held_attributes
from .model_config import followed, untrue
from .plan import MEMORY_LIMIT, THREADS, Progress, Transfer
from .sinks.sink import TransferSink
from .sinks.sink_dcp import DcpSink
from .sinks.sink_safetensors import HuggingFaceSink, split_files
from .sinks.sink_zarr import ZarrSink
from .transfer import transfer
from .upload import upload
from .workers import Workers, executor_of

KEEP = "keep"  # the compression of the source


class TransformOptions(TypedDict, total=False):
    """The common options of `convert`, `merge` and `reshard`. `convert` documents them and has the defaults."""

    rules: Any
    keys: Iterable[str] | None
    drop: Iterable[str] | None
    prefix: str | None
    dtype: Any
    compression: str | Codec | None
    missing: Literal["error", "fill"]
    memory_limit: int
    threads: int
    allow_overflow: bool
    overwrite: bool
    progress: Progress | None
    client: Any
    pack: bool | int | None
    dtype_fallback: Literal["raw"] | None
    documents: str | os.PathLike[str] | Mapping[str, Any] | None


@dataclass(frozen=True)
class ConvertReport:
    """Report of a conversion: the written arrays, files and bytes.

    ``resumed`` counts bytes that an interrupted run had written. ``skipped`` lists leaves without a place in the
    format, and arrays of the source that cannot be read. ``losses`` counts, for each array, the values that its casts
    lost: those that ``allow_overflow`` accepted, and those that became zero. ``notes`` names the documents that differ
    from the source, and why. ``left_behind`` lists files and folders beside a model that are not copied.
    """

    path: str
    arrays: int
    files: list[str]
    total_size: int
    nbytes: int
    resumed: int
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0
    losses: dict[str, CastLoss] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)


@dataclass
class Selection:
    """The arrays of a conversion after rules, selection and dtype: lazy, and checked to be there."""

    ckpt: Checkpoint
    arrays: dict[str, Any]  # tensors by name
    paths: dict[str, tuple[str | int, ...]]
    structure: Any
    skipped: list[str]  # values
    unread: dict[str, str]  # and why
    compression: Compression  # of what is read
    dtype: np.dtype | None = None  # that all floating arrays were converted to
    reserved: int = 0  # bytes of what is read ahead
    notes: list[str] = field(default_factory=list)  # of `documents`
    before: Mapping[str, Any] = field(default_factory=dict)  # of which rules and the like made the arrays
    given: Mapping[str, bytes] = field(default_factory=dict)  # documents that come before those of the source

    def documents(self) -> dict[str, bytes]:
        """The files beside the arrays, to copy. ``config.json`` gets the new dtype of the weights where it names one,
        and the new numbers of layers and tokens.

        Its quantization entry is dropped where no weights are quantised any more.
        """
        own = "config.json" not in self.given
        held = followed(self.ckpt.documents, self.before, self.arrays) if own else self.ckpt.documents
        found = {**(held.every() if isinstance(held, Documents) else {}), **self.given}
        self.notes += held.notes if isinstance(held, Documents) else []
        self.notes += [] if own else untrue(self.given["config.json"], self.arrays)
        if (config := found.get("config.json")) is not None:
            if any(map(dequantizes, self.arrays.values())) and (plain := without_quantization(config)) != config:
                left = next(scaled(self.arrays), None)
                self.notes.append(
                    "config.json: without its quantization, as the weights have their full values"
                    if left is None
                    else f"config.json: still says that the weights are quantised, as {left[0]!r} is; name those that "
                    "are not in its list of exceptions"
                )
                config = plain if left is None else config
            elif without_quantization(config) == config:
                lone = [n for n, t in self.arrays.items() if is_lone_float8(n, t.dtype, self.arrays)]
                why = "its dtype stays: transformers casts float8 without scales to it, or to from_pretrained(dtype=)"
                self.notes += [f"config.json: {why}: {some(lone, 3)}"] if lone else []
                held_so = [n for n, t in self.arrays.items() if is_quantized(t.dtype) and n not in lone]
                what = f"quantised, and transformers reads no scales without its entry: {some(held_so, 3)}"
                self.notes += [f"config.json: does not say that arrays are {what}"] if held_so else []
            # A config that is given is of other weights: transformers would cast to its dtype without a word.
            kinds = {t.dtype.name for t in self.arrays.values() if t.dtype.name in dtypes.FLOATS}
            one = kinds.pop() if not own and len(kinds) == 1 else None
            dtype = self.dtype.name if self.dtype is not None else one
            found["config.json"] = config if dtype is None or "float8" in dtype else with_dtype(config, dtype)
        return found

    def texts(self) -> dict[str, str]:
        """The metadata for a safetensors header: its texts, without the keys that have a meaning there."""
        said = self.ckpt.metadata
        return {k: v for k, v in said.items() if isinstance(v, str) and k not in (tensor_sums.KEY, DCP_INFO, "format")}

    def left_behind(self) -> list[str]:
        """Files and folders beside another writer's model that are not copied. Of several, beside the one whose
        documents are."""
        held = self.ckpt.documents
        return held.others() if isinstance(held, Documents) else []

    @classmethod
    def of(
        cls,
        src: str | os.PathLike[str] | Checkpoint,
        rules: Any,
        keys: Iterable[str] | None,
        drop: Iterable[str] | None,
        dtype: Any,
        prefix: str | None = None,
        missing: str = "warn",
        memory_limit: int = MEMORY_LIMIT,
    ) -> Selection:
        keys, drop = names.taken(keys), names.dropped(drop)
        ckpt = treating_missing(open_checkpoint(src), missing)
        ahead = reading_ahead(ckpt, memory_limit // 4)
        compression = ckpt.compression
        if prefix is not None:
            ckpt = ckpt.below(prefix)
        before = {n: a.tensor for n, a in ckpt.arrays.items()}
        if rules is not None:
            ckpt = Rules(rules).on(ckpt)
        picked = select(ckpt, keys)
        if drop:
            every = {a.path for a in ckpt.arrays.values()} | {p for p, _ in scalar_leaves(ckpt.structure, none=True)}
            picked = (every if picked is None else picked) - (select(ckpt, drop, drop=True) or set())
        arrays = {n: a.tensor for n, a in ckpt.arrays.items() if picked is None or a.path in picked}
        with store.listed_once():
            for n in arrays:
                ckpt.arrays[n].check()
        ahead.expect(arrays.values())
        wanted, notes = None if dtype is None else floating(dtype), list[str]()
        if wanted is not None:
            arrays = converted(arrays, wanted)
            kept = [n for n, t in arrays.items() if t.dtype.name in dtypes.FLOATS and t.dtype != wanted]
            notes += [f"dtype: scales of quantised arrays keep theirs: {some(kept, 3)}"] if kept else []
        skipped = [leaf_name(p) for p, _ in scalar_leaves(ckpt.structure, none=True) if picked is None or p in picked]
        paths = {n: ckpt.arrays[n].path for n in arrays}
        structure = ckpt.structure if picked is None else prune(ckpt.structure, picked)[0]
        unread = unread_of(ckpt, keys, drop)
        return cls(
            ckpt, arrays, paths, structure, skipped, unread, compression, wanted, ahead.reserved, notes, before=before
        )


def treating_missing(ckpt: Checkpoint, missing: str) -> Checkpoint:
    """The checkpoint, which from now on treats chunks of Zarr by others so that are not there."""
    for a in ckpt.arrays.values():
        a.tensor = with_leaves(a.tensor, lambda t: replace(t, missing=missing) if isinstance(t, GridTensor) else t)
    return ckpt


def hugging_face_sink(held: Selection, max_shard_bytes: int | None) -> HuggingFaceSink:
    """The sink for safetensors; refuses names and dtypes that the format lacks."""
    if "__metadata__" in held.arrays:
        raise CheckpointKeyError(
            f"{held.ckpt.path}: safetensors reserves the name '__metadata__'; leave that key out with keys= or drop="
        )
    for n, t in held.arrays.items():
        dtypes.safetensors_name(t.dtype, f"key {n!r}")
    if any(path[-1:] == (MARK,) and bits == 4 for path, bits in scalar_leaves(held.structure)):
        held.notes.append("safetensors keeps arrays alone, from which rows of four bits cannot be restored")
    sizes = [(n, math.prod(t.shape) * t.dtype.itemsize) for n, t in held.arrays.items()]
    groups = split_files(sizes, max_shard_bytes)
    said, group = held_attributes(held.ckpt, held.arrays, held.notes)
    said |= {"": described(group)} if group else {}
    documents = held.documents()
    if len(groups) > 1 and "adapter_config.json" in documents:
        held.notes.append("PEFT opens no adapter in several files; leave out max_shard_bytes")
    return HuggingFaceSink(list(held.arrays.items()), groups, documents, held.texts(), said=said)


def dcp_sink(held: Selection, max_shard_bytes: int | None) -> DcpSink:
    """The sink for `torch.distributed.checkpoint`; refuses dtypes that PyTorch lacks."""
    paths, values = dcp_archive.entries(held.structure, list(held.ckpt.arrays), held.ckpt.path)
    for n, t in held.arrays.items():
        dcp_archive.torch_dtype(t.dtype, n)
    lost = [w for w, v in (("step", held.ckpt.step), ("metadata", held.ckpt.metadata)) if v not in (None, {})]
    lost += ["documents"] if held.ckpt.documents else []
    empty = [leaf_name(p) for p, value in scalar_leaves(held.structure, none=True) if value == {}]
    lost += [f"empty dict {some(empty, 3)}"] if empty else []  # nor does PyTorch write it
    held.notes += [f"a PyTorch checkpoint has no place for the {' and the '.join(lost)}"] if lost else []
    return DcpSink(list(held.arrays.items()), paths, values, max_shard_bytes)


def zarr_sink(
    held: Selection,
    choice: ShardingChoice,
    compression: Compression = None,
    pack: int = 0,
    raw: bool = False,
    dual: bool = False,
) -> ZarrSink:
    """The sink for a checkpoint of ours; blocks of at most ``pack`` bytes share files, ``raw`` is as in `SaveItem`."""
    directories = names.zarr_names(list(held.arrays))
    items = []
    said, group = held_attributes(held.ckpt, held.arrays, held.notes)
    named = zip(held.arrays, directories, strict=True)
    escaped = [f"{n} is {d}" for n, d in named if d != n.replace("/", "%2F")]
    if escaped and held.ckpt.kind == "Zarr":
        held.notes.append(f"other readers of Zarr see escaped names: {some(escaped, 8)}")
    for (name, t), directory in zip(held.arrays.items(), directories, strict=True):
        shape, dtype = tuple(t.shape), dtypes.check_storable(t.dtype, name)
        sharding, boxes, mesh = choice.of(name, held.paths[name], shape, dtype)
        grid = choose_grid(shape, dtype.itemsize, boxes)
        items.append(
            SaveItem(held.paths[name], None, shape, dtype, sharding, grid, directory, mesh, compression, raw=raw)
        )
        items[-1].said = said.get(name, "")
        if dual:
            choose_dual(items[-1])
        if not items[-1].said:  # a pack has no place for it
            packs.choose(items[-1], lambda *_, boxes=boxes: boxes, pack)
    order = {n: i for i, n in enumerate(held.arrays)}
    stored = list(held.ckpt.arrays)
    tree = fill(held.structure, lambda leaf: Leaf(order[stored[leaf.index]]))
    metadata = {k: v for k, v in held.ckpt.metadata.items() if k != manifest.FORMER}  # the values may be others
    head = manifest.Manifest([], manifest.encode_tree(tree), held.ckpt.step, metadata, choice.meshes)
    head.attributes = group
    return ZarrSink(items, head, held.documents())


def convert(
    src: str | os.PathLike[str] | Checkpoint,
    dst: str | os.PathLike[str],
    *,
    format: Literal["zarr", "safetensors", "dcp"],
    mesh: Mapping[str, int] | None = None,
    shardings: Mapping[str, Any] | Chooser | None = None,
    max_shard_bytes: int | None = None,
    rules: Any = None,
    keys: Iterable[str] | None = None,
    drop: Iterable[str] | None = None,
    prefix: str | None = None,
    dtype: Any = None,
    compression: str | Codec | None = KEEP,
    missing: Literal["error", "fill"] = "error",
    memory_limit: int = MEMORY_LIMIT,
    threads: int = THREADS,
    allow_overflow: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    client: Any = None,
    pack: bool | int | None = None,
    dtype_fallback: Literal["raw"] | None = None,
    documents: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    layout: Literal["dual"] | None = None,
) -> ConvertReport:
    """Write a checkpoint in another format, streaming; a run that was interrupted goes on where it stopped.

    Parameters
    ----------
    src
        Whatever `open_checkpoint` opens, or a checkpoint that is open.
    dst
        The directory or URL to make, all or nothing. Until it is whole a directory grows as ``DST.part``; the same call
        again after a kill, a full disk or Ctrl-C keeps what is there. The result is the same to the byte for any memory
        limit, threads and workers.
    format
        ``"zarr"``: a checkpoint as `save` writes it, with step, metadata and values. ``"safetensors"``: a Hugging Face
        directory. ``"dcp"``: a directory for ``torch.distributed.checkpoint.load``, whose names are those of the tree's
        leaves, with dots; numbers and texts come along.
    mesh, shardings
        For Zarr: how to cut the arrays, as in `reshard`; by default each is one block.
    max_shard_bytes
        For safetensors and DCP: largest size of a file's arrays together; None puts all in one file.
    rules
        Key rules (`Rules`, or their text), applied before ``keys``, ``drop`` and ``dtype``. They are evaluated block by
        block.
    keys, drop
        Names or patterns of the arrays to take and to leave out.
    prefix
        Take only what lies below this name (``"params"``), and leave the name out. ``rules``, ``keys`` and ``drop``
        speak of names without it.
    dtype
        Convert all floating arrays to this dtype, other than the scales of quantised ones. A ``config.json`` that goes
        along then names it as ``dtype`` or ``torch_dtype``. Float8 weights that have a scale beside them (``w`` and
        ``w_scale`` or ``w_scale_inv``) are refused: without it their numbers mean something else; the step
        ``dequantize`` of key rules applies it.
    compression
        For Zarr, as in `save`; ``"keep"``: as the source is compressed, where it is one of ours. Chunks that stay the
        same are then copied as they are. An interrupted run goes on after the last shard that was complete.
    missing
        Of Zarr by others, what to do about chunks that are not there. Writers leave out chunks that are all fill value,
        so a lost chunk looks like one of these: ``"error"`` refuses, ``"fill"`` takes them for the fill value.
    memory_limit
        Bytes of memory for windows and staging, whatever the size of the arrays.
    threads
        Windows that are on their way at a time.
    allow_overflow
        Accept values that a cast (``dtype``, or one of the rules) turns into infinity, NaN or another integer; the
        report counts them for each array. Otherwise they are an error before anything is replaced. Rounding is no such
        loss; values that become zero are counted.
    overwrite
        Replace an existing checkpoint or Hugging Face directory.
    progress
        Called with (bytes done, bytes in all) at the start and after each window.
    client
        A Dask client, or an executor of ``concurrent.futures``: its processes do the reading and writing, ``threads``
        windows at a time. They must see both places. For local directories only.
    pack
        For Zarr, as in `save`: small arrays share files; by default in object stores, and not on disks.
    dtype_fallback
        For Zarr, as in `save`.
    documents
        Documents beside those of the source, and in place of those of the same name: by name, as in `save`, or the
        directory of a model whose config, tokenizer and the like go along. Its ``config.json`` then names the dtype of
        the weights that are written, where they have one.
    layout
        For Zarr, as in `save`. The source is read twice, as each file begins with the checksum of its rows, and nothing
        is compressed.

    Returns
    -------
    ConvertReport

    Raises
    ------
    CheckpointDTypeError, CheckpointKeyError, CheckpointShapeError
        The checkpoint does not fit the format, the selection or the rules; nothing was written.
    Lossy
        A cast would lose values, and ``allow_overflow`` is false; names the arrays, the counts and the first places.
    CorruptCheckpoint
        The source is damaged, or the written bytes do not read back.
    StorageFull
        There is too little room. The bytes written so far stay for the next run.

    Examples
    --------
    >>> import tempfile
    >>> from meshtape.storage import load, save_safetensors
    >>> home = tempfile.mkdtemp()
    >>> _ = save_safetensors(os.path.join(home, "a.safetensors"), {"q": np.ones((4, 2)), "k": np.zeros((2, 2))})
    >>> report = convert(
    ...     os.path.join(home, "a.safetensors"), os.path.join(home, "c"), format="zarr",
    ...     rules="q, k -> qk, concat(axis=0)", mesh={"model": 2}, shardings={"*": {"model": 0}}, dtype="float32",
    ... )
    >>> open_checkpoint(report.path)["qk"]
    <StoredArray 'qk' float32[6,2] model=Shard(0)>
    """
    started = time.perf_counter()
    target = store.location(dst)
    if compression != KEEP:
        chosen(compression)  # refused before the source is opened
    dual = is_dual({"layout": layout, "pack": pack, "compression": compression != KEEP and compression})
    if dual and format != "zarr":
        raise CheckpointError(f'layout="dual" is of format="zarr", not of {format!r}')
    if missing not in ("error", "fill"):
        raise CheckpointError(f"missing is 'error' or 'fill', got {missing!r}")
    if documents is not None and format == "dcp":
        raise CheckpointKeyError("a PyTorch checkpoint has no place for documents; leave out documents=")
    added = given(documents)
    check_positive(memory_limit=memory_limit, threads=threads)
    if max_shard_bytes is not None:
        check_positive(max_shard_bytes=max_shard_bytes)
    held = replace(Selection.of(src, rules, keys, drop, dtype, prefix, missing, memory_limit), given=added)
    sink: TransferSink
    if format in ("safetensors", "dcp"):
        compresses = compression != KEEP and chosen(compression) is not None
        for given_too, why in (
            (mesh is not None or shardings is not None, "files have no block layout; leave out mesh= and shardings="),
            (pack is not None, "has small arrays share files in any case; leave out pack="),
            (dtype_fallback is not None, "has every dtype under its name; leave out dtype_fallback="),
            (compresses, 'files are never compressed; leave out compression=, or write format="zarr"'),
        ):
            if given_too:
                raise CheckpointError(f"{format} {why}")
        sink = (hugging_face_sink if format == "safetensors" else dcp_sink)(held, max_shard_bytes)
    elif format == "zarr":
        if max_shard_bytes is not None:
            raise CheckpointError("max_shard_bytes is for safetensors and DCP; Zarr files follow the block layout")
        stored = None if dual else held.compression if compression == KEEP else chosen(compression)
        limit = 0 if dual else packs.threshold(pack, target)
        sink = zarr_sink(
            held, ShardingChoice(mesh, shardings, held.arrays), stored, limit, is_raw(dtype_fallback), dual
        )
    else:
        raise CheckpointError(f"format must be 'zarr', 'safetensors' or 'dcp', got {format!r}")
    if any(store.lies_in(place, target) for place in held.ckpt.places):
        raise CheckpointError(f"{target} is the source; write to another place")
    spread = Workers(int(threads), executor_of(client))
    tensors = list(held.arrays.values())
    kind = "Merge" if format == "safetensors" else "Convert" if mesh is None and shardings is None else "Reshard"
    with atomic_directory.writing(target), activity.under_way(kind, target) as work:
        source, memory = generation_of(held.ckpt, target), memory_limit - held.reserved
        how = (memory, spread, overwrite, work.follow(progress), allow_overflow)
        run = upload if store.is_url(target) else transfer
        try:
            nbytes, resumed, losses = run(Transfer(source, tensors, sink, target, *how))
        except MemoryError as e:
            cure = "give a lower memory_limit= or fewer threads=; the call goes on where it stopped"
            raise out_of_memory(f"{held.ckpt.path} on its way to {target}", e, cure) from None
    if held.unread:
        warnings.warn(f"{target} is written without what cannot be read{unread(held.unread)}", stacklevel=3)
    left = attributes_left(held.arrays, getattr(sink, "said", {}))
    return ConvertReport(
        target,
        len(tensors),
        list(sink.files),
        sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors),
        nbytes,
        resumed,
        [*(held.skipped if isinstance(sink, HuggingFaceSink) else []), *held.unread],
        time.perf_counter() - started,
        dict(sorted(losses.items())),
        [*held.notes, *(["attributes are not written: those of " + some(left)] if left else [])],
        held.left_behind(),
    )


def reshard(
    src: str | os.PathLike[str] | Checkpoint,
    dst: str | os.PathLike[str],
    *,
    mesh: Mapping[str, int] | None = None,
    shardings: Mapping[str, Any] | Chooser | None = None,
    **options: Unpack[TransformOptions],
) -> ConvertReport:
    """Write a checkpoint cut for another mesh, without that mesh: so that each rank's blocks are files of their own.

    A checkpoint loads onto any mesh as it is; resharding it first makes many later loads read whole files.

    Parameters
    ----------
    src, dst
        As in `convert`.
    mesh
        Names and lengths of the axes: ``{"data": 2, "model": 4}``.
    shardings
        Names or patterns, each with the dimension that an axis splits: ``{"layers.*.w": {"model": 1}, "*": {}}``. The
        first pattern that matches counts; an array that none matches is one block. Or a function ``(path, shape,
        dtype)`` that returns such a map, a sharding of a mesh at hand, or None.
    options
        ``rules``, ``keys``, ``drop``, ``prefix``, ``dtype``, ``compression``, ``missing``, ``memory_limit``,
        ``threads``, ``allow_overflow``, ``overwrite``, ``progress``, ``client``, ``pack``, ``dtype_fallback`` and
        ``documents`` of `convert`.

    Returns
    -------
    ConvertReport

    Examples
    --------
    >>> import tempfile
    >>> from meshtape.storage import save
    >>> home = tempfile.mkdtemp()
    >>> _ = save(os.path.join(home, "a"), {"w": np.ones((4, 6))})
    >>> _ = reshard(os.path.join(home, "a"), os.path.join(home, "b"), mesh={"model": 2}, shardings={"w": {"model": 1}})
    >>> sorted(os.listdir(os.path.join(home, "b", "w")))
    ['c.0.0', 'c.0.1', 'zarr.json']
    """
    return convert(src, dst, format="zarr", mesh=mesh, shardings=shardings, **options)
