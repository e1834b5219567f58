"""`open_checkpoint`: a checkpoint of any kind, found by its content.

The kinds are a meshtape manifest, a safetensors file, a Hugging Face directory, a Zarr hierarchy by others, and a
checkpoint of ``torch.distributed``; on a disk or in an object store.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from ...arrays.backends.collector import no_collections
from ...arrays.core.errors import (
    CheckpointError,
    CheckpointReplaced,
    CorruptCheckpoint,
    IncompleteCheckpoint,
    NotACheckpoint,
    ParentChanged,
)
from ...arrays.core.formatting import count, some
from ..base import names, strict_json
from ..checkpoint import numbered
from ..checkpoint.checkpoint import Checkpoint, StoredArray, flat
from ..commit.contents import JOURNAL
from ..commit.protocol import protocol_of
from ..foreign import archives, dcp, dcp_safetensors, orbax, refusals
from ..format import documents, dtypes, manifest, tensor_sums
from ..format.chunk_sums import StoredSums
from ..format.hf_index import HF_INDEX, HF_SINGLE, HF_TORCH, read_index
from ..format.zarr_format import DUAL_INDEX, described
from ..readers import safetensors
from ..readers.compressed import CompressedTensor
from ..readers.dual_tensor import DualTensor, is_dual
from ..readers.packed import PackedBlocks
from ..readers.raw_tensor import PackedTensor, RawTensor
from ..readers.tensor import ChunkedTensor, StoredTensor
from ..readers.zarr_tensor import METADATA
from ..stores import atomic_directory, generations, icechunk_store
from ..stores import store as stores
from ..stores.contract import Store, recording
from ..stores.generations import Generation
from . import deltas
from .other_writers import refuse_changed
from .zarr_hierarchy import open_zarr

OPENERS: dict[bytes, Callable[[str], Checkpoint]] = {}
"""Files that rooms above this one open, by the 24 bytes with which they begin."""
_KNOWN = (manifest.FILE, HF_INDEX, HF_SINGLE, dcp.FILE, documents.PROGRAM)  # what says what a directory is
_PART = re.compile(r"-\d+-of-\d+\.safetensors\Z")  # one file of several
_OURS = re.compile(r"pack-.+-\d{5}.*\.safetensors|meshtape\.sums.*")


@no_collections()
def open_checkpoint(path: str | os.PathLike[str] | Checkpoint, *, verify: bool = True) -> Checkpoint:
    """Open a checkpoint without reading its arrays.

    Parameters
    ----------
    path
        A directory written by `save`, a ``.safetensors`` file, one of NumPy (``.npy``, ``.npz``) or of ``torch.save``
        (read without pickle), a Hugging Face directory (``model.safetensors``, ``model.safetensors.index.json``, or one
        file or index of another name, such as ``adapter_model.safetensors``; ``pytorch_model.bin`` too), any Zarr group
        or array, a checkpoint of ``torch.distributed`` in either of its layouts, one of Orbax (in OCDBT with the
        package ``tensorstore`` alone), or the document of a virtual checkpoint (``storage.virtual``): a path, or a URL
        with ``s3://``, ``gs://``, ``az://``, ``memory://``, ``http://`` or ``https://``. A checkpoint that is open
        stays as it is.
    verify
        Compare every chunk that is read with its checksum, where the format has any. Without it damage goes unnoticed.

    Returns
    -------
    Checkpoint
        A mapping from names to arrays that read themselves when indexed.

    Raises
    ------
    NotACheckpoint
        There is nothing of that kind.
    IncompleteCheckpoint
        A save was cut short there, or files are missing.
    CorruptCheckpoint
        The table of contents is damaged or hostile.
    CheckpointReplaced
        Writers replaced it again and again while it was opened.
    ParentChanged
        It is virtual or a delta, and a checkpoint from which it is computed is gone, or another by now.
    UnsupportedVersion
        A later meshtape wrote it.
    StoreError
        An object store did not answer, or refused.

    Examples
    --------
    >>> import numpy as np, tempfile, os
    >>> from meshtape.storage import save
    >>> where = os.path.join(tempfile.mkdtemp(), "ckpt")
    >>> _ = save(where, {"w": np.arange(12.0).reshape(3, 4)}, step=7)
    >>> ckpt = open_checkpoint(where)
    >>> ckpt.step, list(ckpt), ckpt["w"].shape
    (7, ['w'], (3, 4))
    >>> ckpt["w"][1, ::2]
    array([4., 6.])
    """
    if isinstance(path, Checkpoint):
        return path
    given = stores.location(path)
    for attempt in range(generations.ATTEMPTS):
        with recording() as tags:
            try:
                ckpt = _open(given, verify)
                generation = Generation(tags())
                if len(generation.tags) > 1:  # all of them were there when the first of these looks again
                    generation.check()
            except CheckpointReplaced:
                if attempt == generations.ATTEMPTS - 1:
                    raise
            except CheckpointError as e:
                if not generations.were_replaced(tags, e):
                    if isinstance(e, NotACheckpoint) and "%" in given and given.startswith("http"):
                        raise NotACheckpoint(f"{e} (names are taken as they are written: %20 is no space)") from None
                    raise
            except (FileNotFoundError, NotADirectoryError) as e:  # a deleter is at work, or a file was lost
                if attempt == generations.ATTEMPTS - 1:
                    raise IncompleteCheckpoint(f"{e.filename or given} is missing, which was listed before") from None
            else:
                ckpt.belongs_to(generation)
                return ckpt
    raise CheckpointReplaced(f"{given} was replaced {generations.ATTEMPTS} times while it was opened; try again later")


def _open(given: str, verify: bool) -> Checkpoint:
    root = atomic_directory.resolve(given)
    if icechunk_store.is_versioned(root):
        return open_zarr(icechunk_store.pinned(root), verify)
    if stores.is_url(root):
        if root.endswith((".safetensors", ".npy", ".npz", ".pt", ".pth", ".json")):
            try:
                return _open_file(root, verify)
            except NotACheckpoint:
                if manifest.read(root) is None:  # a checkpoint may be called so, too
                    raise
    elif os.path.isfile(root):
        return _open_file(root, verify)
    elif not os.path.isdir(root):
        if left := atomic_directory.siblings(given, "tmp"):
            raise IncompleteCheckpoint(
                f"{given} was never completed: a save was cut short, or still runs, in {left[0]}. "
                "Load another checkpoint; the next save to this place removes the remains"
            )
        nothing = "is neither a file nor a directory" if os.path.lexists(given) else "no such file or directory"
        raise NotACheckpoint(f"{given}: {nothing}")
    store = stores.at(root)
    for name in _KNOWN:
        names.inside(root, name, root)
    found = manifest.read(root)
    if found is not None:
        refuse_changed(root, found)
        return _from_manifest(root, found, verify)
    if not stores.is_url(root) and os.path.exists(os.path.join(root, JOURNAL)):
        raise IncompleteCheckpoint(
            f"{root} is what an interrupted transfer has written so far; the same call goes on with it"
        )
    for file, opens in ((HF_INDEX, _open_hugging_face), (HF_SINGLE, _open_single)):
        if store.size(file) is not None:
            ckpt = opens(root, file, verify)
            if store.size(METADATA[0]) is not None and not any(is_dual(a.tensor) for a in list(ckpt.values())[:1]):
                _warn_of_two(root, file, f"a Zarr hierarchy, which is not, as {manifest.FILE} of meshtape is missing")
            return ckpt
    if any(store.size(n) is not None for n in METADATA):
        return open_zarr(root, verify)
    if dcp.is_dcp(root):
        return dcp.open_dcp(root, verify)
    if store.size(orbax.FILE) is not None:
        return orbax.open_orbax(root)
    if store.lists and (item := orbax.item_of(store)) is not None:
        ckpt = orbax.open_orbax(item)
        number = stores.split(root)[1]
        ckpt.step = int(number) if number.isdecimal() else None
        return ckpt
    if store.size(documents.PROGRAM) is not None:
        raise NotACheckpoint(f"{root} is a program file, not a checkpoint; mt.load_program opens it")
    listed = store.files() if store.lists else []  # once, as a writer may be at work
    if any(map(_OURS.fullmatch, listed)):  # packs are safetensors files, of blocks of arrays
        raise IncompleteCheckpoint(
            f"{root} has files of a checkpoint of meshtape but neither {manifest.FILE} nor zarr.json: its save did not "
            "finish, or they were lost in a copy. Copy the whole directory, or load another checkpoint"
        )
    if (shards := dcp_safetensors.open_shards(root, listed, verify)) is not None:
        return shards
    if (found_so := _open_by_another_name(root, listed, verify)) is not None:
        return found_so
    if not store.lists and store.size(f"safetensors/{HF_INDEX}") is not None:
        raise NotACheckpoint(
            f"{root} is no checkpoint itself, but the start page of one that is served: open {root}/safetensors or "
            f"{root}/zarr"
        )
    above, name = stores.holding(root)
    if stores.is_url(root) and name and above.size(name) is not None:
        return _open_file(root, verify)  # its name has no ending that says so
    if (repository := stores.repository_at(root)) is not None:
        return open_zarr(icechunk_store.pinned(repository), verify)
    raise _refusal(store)


def _shards(store: Store) -> list[str]:
    return [n for n in store.files() if n.endswith(".safetensors")]


def _warn_of_two(root: str, opened: str, other: str) -> None:
    warnings.warn(f"{root} holds two models: {opened}, which is opened, and {other}; remove one of them", stacklevel=7)


def _open_single(root: str, file: str, verify: bool) -> Checkpoint:
    names.inside(root, file, root)
    ckpt = _open_file(stores.join(root, file), verify)
    ckpt.documents = documents.beside(root, [file])
    return ckpt


def _open_by_another_name(root: str, held: Sequence[str], verify: bool) -> Checkpoint | None:
    """A directory whose one model is not called ``model``, such as ``adapter_model.safetensors``."""
    indexes = [n for n in held if n.endswith(".safetensors.index.json")]
    files = [n for n in held if n.endswith(".safetensors")]
    if len(indexes) == 1:
        return _open_hugging_face(root, indexes[0], verify)
    if not indexes and len(files) == 1 and not _PART.search(files[0]):
        return _open_single(root, files[0], verify)
    indexes = [n for n in held if n.endswith(".bin.index.json")]  # files of torch.save, as older models have them
    if len(indexes) == 1 and not files:
        return _open_hugging_face(root, indexes[0], verify)
    if HF_TORCH in held and not indexes and not files:
        return _open_single(root, HF_TORCH, verify)
    return None


def _refusal(store: Store) -> CheckpointError:
    root = store.root
    if not store.lists:
        return NotACheckpoint(f"{root} holds neither {manifest.FILE} nor {HF_INDEX} nor {HF_SINGLE} nor zarr.json")
    folders = store.folders()
    marks = (manifest.FILE, HF_INDEX, HF_SINGLE, dcp.FILE, orbax.STEP)
    if steps := [f for f in folders if any(store.size(f"{f}/{m}") is not None for m in marks)]:
        return NotACheckpoint(f"{root} is not a checkpoint; {numbered.told(root, steps)}")
    begun = protocol_of(root).is_begun(root)
    if begun or any(store.size(f"{f}/zarr.json") is not None for f in folders) or ".tmp-" in stores.split(root)[1]:
        return IncompleteCheckpoint(
            f"{root} has arrays but no {manifest.FILE}: its save did not finish. Load another checkpoint"
        )
    held = store.files()
    if shards := _shards(store):
        return IncompleteCheckpoint(
            f"{root} has {len(shards)} safetensors files but no {HF_INDEX} that says which belong together; restore "
            f"it, or open one file: {', '.join(shards[:8])}"
        )
    if other := refusals.among(held):
        return NotACheckpoint(f"{root} is not a checkpoint: it holds {other}")
    if not held and not folders and stores.is_url(root):
        return NotACheckpoint(f"{root}: nothing is there")
    shown = f"; it holds {', '.join([*(f'{f}/' for f in folders), *held][:8])}" if held or folders else "; it is empty"
    return NotACheckpoint(f"{root} is not a checkpoint{shown}")


# ----- ours -----------------------------------------------------------------------------------------------------------


def _from_manifest(root: str, m: manifest.Manifest, verify: bool) -> Checkpoint:
    for pack in m.packs:
        names.inside(root, pack.file, root)
    base = None if m.base is None else _open_base(root, m.base, verify)
    arrays = {}
    for e in m.arrays:
        text = mesh = placements = None
        if e.sharding is not None and e.mesh is not None:
            mesh, placements = m.meshes[e.mesh], tuple(e.sharding)
            text = ", ".join(f"{axis}={placement}" for axis, placement in zip(mesh, placements, strict=False))
        stored = _tensor(root, e, m.sums, verify)
        found = arrays[e.name] = StoredArray(e.path, stored, text, mesh, placements, e.name)
        if base is not None and m.base is not None and e.delta:
            of = deltas.base_of(base, e.name, e.shape, e.dtype)
            if of is None:
                raise CorruptCheckpoint(
                    f"{root}: its base {base.path} has no array {e.name!r} of the same shape and dtype"
                )
            found.tensor, found.rule = deltas.DeltaTensor(e.name, e.dtype, (of, stored)), f"{m.base.name} + differences"
    return Checkpoint(
        root,
        "meshtape",
        arrays,
        m.structure,
        m.step,
        m.metadata,
        m.meshes,
        documents=documents.Documents(root, m.documents),
        manifest=m,
        base=base,
    )


def _open_base(root: str, base: manifest.Base, verify: bool) -> Checkpoint:
    # Where a link leads to the checkpoint, the base lies beside either.
    linked = [] if stores.is_url(root) else [os.path.realpath(root)]
    for path in (root, *linked):
        where = atomic_directory.resolve(stores.join(stores.split(path)[0], base.name))
        if (found := manifest.read(where)) is not None:
            break
    if why := base.fault(found):
        raise ParentChanged(
            f"{root} holds differences from {where}, and {why}; restore that, or load another checkpoint"
        )
    assert found is not None
    return _from_manifest(where, found, verify)


def _tensor(root: str, e: manifest.ArrayEntry, table: str | None, verify: bool) -> ChunkedTensor:
    """The array of an entry, whose list of objects is checked only when it is read."""
    held = (root, e.name, deltas.unsigned(e.dtype) if e.delta else e.dtype, e.grid, e, verify)
    if e.packs is not None:
        return PackedBlocks(*held)
    sums = None if e.sums is None else StoredSums(root, table or "", e.sums, e.grid, e.name)
    if e.dual:
        return DualTensor(*held, sums)
    if e.compression is not None:
        return CompressedTensor(*held, sums, compression=e.compression)
    return ChunkedTensor(*held, sums)


# ----- others' --------------------------------------------------------------------------------------------------------


def _raw_tensors(
    path: str, verify: bool, listed: str | None = None
) -> tuple[dict[str, StoredTensor], dict[str, str], dict[str, Any]]:
    """The tensors of a file, its metadata, and the attributes of the Zarr group that it was. ``listed``: the checksums
    that an index has for it."""
    header = safetensors.read_header(path, verify=verify)
    sums = header.sums or {}
    if listed is not None and verify:
        try:
            head, *held = tensor_sums.values(listed, 1 + len(header.tensors))
            if head != header.sum or (sums and held != list(sums.values())):
                raise ValueError("its checksums are not those of the index: it is of another save")
        except ValueError as e:
            raise CorruptCheckpoint(f"{path}: {e}") from None
        sums = dict(zip(header.tensors, held, strict=True))
    said = _said(path, header.metadata.pop(safetensors.ATTRIBUTES, None))
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(header.tensors):
        t = header.tensors[name]
        if name == DUAL_INDEX and t.dtype == "U8" and len(header.tensors) == 2:
            continue  # of the layout "dual", for readers of Zarr alone
        row, place = dtypes.SAFETENSORS[t.dtype], header.data_start + t.begin
        if row.dtype is not None:
            given = said.get(name)
            text = (
                "" if given is None else described(given.get("attributes"), given.get("dimension_names"), len(t.shape))
            )
            held = (path, name, t.shape, row.dtype, place, header.file_nbytes, sums.get(name))
            tensors[name] = RawTensor(*held, said=text)
        else:
            held = (path, name, t.shape, dtypes.PACKED[t.dtype], place, header.file_nbytes, sums.get(name))
            tensors[name] = PackedTensor(*held, nbytes=t.nbytes)
    group = said.get("", {}).get("attributes")
    return tensors, header.metadata, group if isinstance(group, dict) else {}


def _said(path: str, text: str | None) -> dict[str, dict[str, Any]]:
    """Attributes by other writers that an export has carried along, by name."""
    try:
        said = {} if text is None else strict_json.loads(text)
        if not isinstance(said, dict) or not all(isinstance(v, dict) for v in said.values()):
            raise ValueError("it is no object of objects")
        return said
    except (ValueError, RecursionError) as e:
        warnings.warn(f"{path}: its entry {safetensors.ATTRIBUTES!r} cannot be read: {e}", stacklevel=6)
        return {}


def _open_file(path: str, verify: bool) -> Checkpoint:
    store, name = stores.holding(path)
    start = b""
    with contextlib.suppress(FileNotFoundError), contextlib.closing(store.reader(name)) as reader:
        start = reader.part(0, 24)
    if (opener := OPENERS.get(start)) is not None:
        return opener(path)
    if start.startswith(b"\x93NUMPY"):
        return archives.open_npy(path)
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return archives.open_archive(path, verify)
    if start.lstrip().startswith(b"{") and 0 not in start:  # a length has zeros
        raise NotACheckpoint(
            f"{path} is not a safetensors file, nor the document of a virtual checkpoint, which nobody may edit; "
            "an index or a manifest is opened by its directory"
        )
    # Eight bytes of length, then JSON: a file of another kind gets a plain answer, not one about headers.
    if start and b"{" not in start[8:]:
        if other := refusals.of_start(path, start):
            raise NotACheckpoint(f"{path} {other}")
        if not path.endswith(".safetensors"):
            raise NotACheckpoint(f"{path} is not a safetensors file, nor one of NumPy or PyTorch")
    tensors, metadata, group = _raw_tensors(path, verify)
    return flat(path, "safetensors", tensors, group or metadata, group=group)


def _open_hugging_face(root: str, index: str, verify: bool) -> Checkpoint:
    weight_map, metadata, sums = read_index(root, index, verify)
    files = sorted(set(weight_map.values()))
    if index == HF_INDEX and HF_SINGLE not in files and stores.at(root).size(HF_SINGLE) is not None:
        if files:  # an export without arrays lists none
            _warn_of_two(root, HF_SINGLE, f"those of {HF_INDEX}, which transformers passes over as well")
        return _open_single(root, HF_SINGLE, verify)
    store = stores.at(root)
    if not files and ((metadata.get("total_size") or 0) != 0 or (store.lists and _shards(store))):
        raise IncompleteCheckpoint(
            f"{root}: {index} lists no tensor, though there are some: {_shards(store)[:8] or metadata}; restore the "
            "index, or open one file"
        )
    if lost := [f for f in files if store.size(f) is None]:
        keys = [k for k, f in weight_map.items() if f in lost]
        raise IncompleteCheckpoint(f"{root}: {count(len(lost), 'file')} missing: {some(lost)}; with them {some(keys)}")
    held: dict[str, StoredTensor] = {}
    group: dict[str, Any] = {}
    absent = []
    unlisted: dict[str, str] = {}
    for file in files:
        if file.endswith(".safetensors"):
            tensors, _, group = _raw_tensors(stores.join(root, file), verify, sums.get(file))
        else:
            tensors = {n: a.tensor for n, a in _open_file(stores.join(root, file), verify).arrays.items()}
        unlisted |= dict.fromkeys(tensors.keys() - weight_map.keys(), f"{file} holds it, and {index} does not list it")
        wanted = [k for k, f in weight_map.items() if f == file]
        absent += [f"{k} in {file}" for k in wanted if k not in tensors]
        held.update((k, tensors[k]) for k in wanted if k in tensors)
    if absent:
        raise IncompleteCheckpoint(f"{root}: {count(len(absent), 'key')} not in the files of the index: {some(absent)}")
    ckpt = flat(root, "Hugging Face", {k: held[k] for k in weight_map}, group or metadata, unlisted, group)
    others = {n: s for n, s in sums.items() if n not in files and n != tensor_sums.INDEX}
    ckpt.documents = documents.beside(root, files, others, index if sums else "")
    return ckpt
