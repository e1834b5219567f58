"""`open_checkpoint`: any checkpoint as a lazy mapping from names to arrays that are read when they are indexed.

What a path holds is told by its content: a meshtape manifest, a safetensors file, a Hugging Face directory, or a Zarr
hierarchy by others.
"""
# Paths are plain texts here: they come from manifests and go to system calls.

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np

from ..arrays.blocks import Box
from ..arrays.errors import (
    ArrayIndexError,
    CheckpointError,
    CheckpointKeyError,
    CorruptCheckpoint,
    IncompleteCheckpoint,
    NotACheckpoint,
)
from ..arrays.tree import Path
from . import commit, manifest, names, safetensors
from .tensors import ChunkedTensor, RawTensor, StoredTensor, ZarrTensor, read_box
from .zarr_format import GROUP_ATTRIBUTE

HF_INDEX = "model.safetensors.index.json"
_MAX_INDEX = 1 << 30


class StoredArray:
    """An array in a checkpoint. Indexing it with integers, slices and ``...`` reads what that index needs."""

    def __init__(self, path: Path, tensor: StoredTensor, sharding_text: str | None = None) -> None:
        self.path = path
        self.tensor = tensor
        self.sharding_text = sharding_text

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def dtype(self) -> np.dtype:
        return self.tensor.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return Box.whole(self.shape).size * self.dtype.itemsize

    def check(self) -> None:
        """Check the list of this array's files, and that they exist, before anything is read."""
        if hasattr(self.tensor, "check"):
            self.tensor.check()

    def read(self, box: Box | None = None) -> np.ndarray:
        """The elements of a box, or all, as a new NumPy array."""
        return read_box(self.tensor, box)[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        box, rest = _plan_index(index, self.shape)
        return self.read(box)[rest]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a stored array must be read, so it cannot become an array without a copy")
        out = self.read()
        return out if dtype is None else out.astype(dtype, copy=False)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d array has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        return f"<StoredArray {self.name!r} {text}{f' {self.sharding_text}' if self.sharding_text else ''}>"


def _plan_index(index: Any, shape: tuple[int, ...]) -> tuple[Box, tuple[Any, ...]]:
    """The smallest box that holds the indexed elements, and the index that selects them from that box."""
    items = list(index) if isinstance(index, tuple) else [index]
    if sum(i is Ellipsis for i in items) > 1:
        raise ArrayIndexError("an index has at most one '...'")
    for i in items:
        if (
            i is not Ellipsis
            and not isinstance(i, slice)
            and (isinstance(i, (bool, np.bool_)) or not hasattr(i, "__index__"))
        ):
            raise ArrayIndexError(
                f"a stored array takes integers, slices and '...', got {type(i).__name__}; read it with np.asarray first"
            )
    given = sum(i is not Ellipsis for i in items)
    if given > len(shape):
        raise ArrayIndexError(f"too many indices: array of shape {shape} was indexed with {given}")
    at = next((k for k, i in enumerate(items) if i is Ellipsis), len(items))
    items[at : at + 1] = [slice(None)] * (len(shape) - given)
    offset, lengths, rest = [], [], []
    for axis, (i, n) in enumerate(zip(items, shape, strict=True)):
        if isinstance(i, slice):
            picked = range(*i.indices(n))
            lo = min(picked[0], picked[-1]) if picked else 0
            hi = max(picked[0], picked[-1]) + 1 if picked else 0
            # A backward slice that ends at the box's start must say None: -1 would mean the last element.
            end = picked.stop - lo if picked.step > 0 or picked.stop >= lo else None
            rest.append(slice(picked.start - lo, end, picked.step) if picked else slice(0, 0))
        else:
            k = i.__index__()
            if not -n <= k < n:
                raise ArrayIndexError(f"index {k} is out of range for dimension {axis} of length {n}")
            lo, hi = k % n, k % n + 1
            rest.append(0)
        offset.append(lo)
        lengths.append(hi - lo)
    return Box(tuple(offset), tuple(lengths)), tuple(rest)


@dataclass(repr=False)
class Checkpoint(Mapping[str, StoredArray]):
    """An opened checkpoint: names to `StoredArray`, in the order of the tree. Nothing but the table of contents was read."""

    path: str
    kind: str
    arrays: dict[str, StoredArray]
    structure: Any
    step: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    meshes: list[dict[str, int]] = field(default_factory=list)

    def __getitem__(self, name: str) -> StoredArray:
        found = self.arrays.get(name)
        if found is None:
            close = get_close_matches(str(name), self.arrays, 3, 0.4)
            hint = f"; close are {', '.join(map(repr, close))}" if close else ""
            raise CheckpointKeyError(f"{self.path} has no array {name!r}{hint}")
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in self.arrays.values())

    def tree(self) -> Any:
        """The tree as it was saved, with a `StoredArray` for each array."""
        stored = list(self.arrays.values())
        return fill(self.structure, lambda leaf: stored[leaf.index])

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (name, str(a.dtype), str(a.shape), _human(a.nbytes), a.sharding_text or "")
            for name, a in self.arrays.items()
        ]

    def _title(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.kind} checkpoint {self.path}{step}: {len(self)} arrays, {_human(self.nbytes)}"

    def __repr__(self) -> str:
        rows = self._rows()
        shown = rows if len(rows) <= 24 else [*rows[:12], ("…", f"({len(rows) - 20} more)", "", "", ""), *rows[-8:]]
        widths = [max((len(r[i]) for r in shown), default=0) for i in range(5)]
        lines = ["  " + "  ".join(t.ljust(w) for t, w in zip(r, widths, strict=True)).rstrip() for r in shown]
        return "\n".join([self._title(), *lines])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{t}</th>" for t in ("name", "dtype", "shape", "size", "sharding"))
        rows = self._rows()
        body = "".join("<tr>" + "".join(f"<td>{html.escape(t)}</td>" for t in r) + "</tr>" for r in rows[:200])
        more = f"<p>… and {len(rows) - 200} more</p>" if len(rows) > 200 else ""
        return f"<p>{html.escape(self._title())}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def fill(node: Any, make: Callable[[manifest.Leaf], Any]) -> Any:
    """A decoded tree with each `Leaf` replaced by what ``make`` returns for it."""
    if isinstance(node, manifest.Leaf):
        return make(node)
    if isinstance(node, dict):
        return {k: fill(v, make) for k, v in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(fill(v, make) for v in node)
    return node


def _human(n: int) -> str:
    size = float(n)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


# ----- opening --------------------------------------------------------------------------------------------------------


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint without reading its arrays.

    Parameters
    ----------
    path
        A directory written by `save`, a ``.safetensors`` file, a Hugging Face directory (``model.safetensors`` or
        ``model.safetensors.index.json``), or any Zarr group or array.

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
    UnsupportedVersion
        A later meshtape wrote it.

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
    given = os.path.abspath(os.fspath(path))
    root = commit.resolve(given)
    if os.path.isfile(root):
        return _open_safetensors(root)
    if not os.path.isdir(root):
        if left := commit.siblings(given, "tmp"):
            raise IncompleteCheckpoint(
                f"{given} was never completed: a save was cut short, or still runs, in {left[0]}. "
                "Load another checkpoint; the next save to this place removes the remains"
            )
        raise NotACheckpoint(f"{given}: no such file or directory")
    found = manifest.read(root)
    if found is not None:
        return _from_manifest(root, found)
    if os.path.exists(os.path.join(root, HF_INDEX)):
        return _open_hugging_face(root)
    single = os.path.join(root, "model.safetensors")
    if os.path.exists(single):
        return _open_safetensors(single)
    if any(os.path.exists(os.path.join(root, n)) for n in ("zarr.json", ".zgroup", ".zarray")):
        return _open_zarr(root)
    raise _refusal(root)


def _refusal(root: str) -> CheckpointError:
    entries = sorted(os.listdir(root))
    shards = [e for e in entries if e.endswith(".safetensors")]
    steps = [e for e in entries if os.path.exists(os.path.join(root, e, manifest.FILE))]
    if steps:
        return NotACheckpoint(
            f"{root} is not a checkpoint; it holds checkpoints, such as {os.path.join(root, steps[-1])}"
        )
    if any(os.path.exists(os.path.join(root, e, "zarr.json")) for e in entries) or ".tmp-" in os.path.basename(root):
        return IncompleteCheckpoint(
            f"{root} has arrays but no {manifest.FILE}: its save did not finish. Load another checkpoint"
        )
    if shards:
        return IncompleteCheckpoint(
            f"{root} has {len(shards)} safetensors files but no {HF_INDEX}; restore it, or open one file"
        )
    return NotACheckpoint(f"{root} is not a checkpoint")


def _from_manifest(root: str, m: manifest.Manifest) -> Checkpoint:
    arrays = {}
    for e in m.arrays:
        text = None
        if e.sharding is not None and e.mesh is not None:
            pairs = zip(m.meshes[e.mesh], e.sharding, strict=False)
            text = ", ".join(f"{axis}={placement}" for axis, placement in pairs)
        arrays[e.name] = StoredArray(e.path, _LazyObjects(root, e), text)
    return Checkpoint(root, "meshtape", arrays, manifest.decode_tree(m.tree), m.step, m.metadata, m.meshes)


class _LazyObjects:
    """A `ChunkedTensor` that checks its list of objects only when it is read."""

    def __init__(self, root: str, entry: manifest.ArrayEntry) -> None:
        self._root, self._entry = root, entry
        self.name, self.shape, self.dtype, self.chunk = entry.name, entry.shape, entry.dtype, entry.grid.chunk

    def whole(self) -> ChunkedTensor:
        e = self._entry
        return ChunkedTensor(self._root, e.name, e.dtype, e.grid, e.objects)

    def __getattr__(self, name: str) -> Any:
        if name in ("check", "only", "planned", "jobs"):
            return getattr(self.whole(), name)
        raise AttributeError(name)


def _flat(path: str, kind: str, tensors: dict[str, StoredTensor], metadata: dict[str, Any]) -> Checkpoint:
    arrays = {name: StoredArray((name,), t) for name, t in tensors.items()}
    structure = {name: manifest.Leaf(i) for i, name in enumerate(arrays)}
    return Checkpoint(path, kind, arrays, structure, None, metadata)


def _raw_tensors(path: str) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    header = safetensors.read_header(path)
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(header.tensors):
        t = header.tensors[name]
        dtype = t.numpy_dtype(f"{path}: {name!r}")
        tensors[name] = RawTensor(path, name, t.shape, dtype, header.data_start + t.begin, header.file_nbytes)
    return tensors, header.metadata


def _open_safetensors(path: str) -> Checkpoint:
    if not path.endswith(".safetensors"):
        with open(path, "rb") as f:
            start = f.read(16)
        # Eight bytes of length, then JSON: a file of another kind gets a plain answer, not one about headers.
        if b"{" not in start[8:]:
            raise NotACheckpoint(f"{path} is not a safetensors file")
    tensors, metadata = _raw_tensors(path)
    return _flat(path, "safetensors", tensors, metadata)


def read_index(root: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The checked ``weight_map`` and ``metadata`` of a Hugging Face directory; every file lies inside it."""
    path = os.path.join(root, HF_INDEX)
    if os.path.getsize(path) > _MAX_INDEX:
        raise CorruptCheckpoint(f"{path}: larger than {_MAX_INDEX} bytes")
    with open(path, "rb") as f:
        data = f.read()
    try:
        top = json.loads(data)
        weight_map = top["weight_map"]
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise ValueError("weight_map is not a map from names to files")
        metadata = top.get("metadata") or {}
        metadata = metadata if isinstance(metadata, dict) else {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CorruptCheckpoint(f"{path}: not an index: {e}") from None
    for file in set(weight_map.values()):
        names.inside(root, file, path)
    return weight_map, metadata


def _open_hugging_face(root: str) -> Checkpoint:
    weight_map, metadata = read_index(root)
    files = sorted(set(weight_map.values()))
    lost = [f for f in files if not os.path.isfile(os.path.join(root, f))]
    if lost:
        keys = [k for k, f in weight_map.items() if f in lost]
        raise IncompleteCheckpoint(f"{root}: {len(lost)} files are missing: {', '.join(lost)}; they hold {keys[:8]}")
    held: dict[str, StoredTensor] = {}
    missing = []
    for file in files:
        tensors, _ = _raw_tensors(os.path.join(root, file))
        wanted = [k for k, f in weight_map.items() if f == file]
        missing += [f"{k} in {file}" for k in wanted if k not in tensors]
        held.update((k, tensors[k]) for k in wanted if k in tensors)
    if missing:
        raise IncompleteCheckpoint(
            f"{root}: {len(missing)} keys are not in the files that the index names: {missing[:8]}"
        )
    return _flat(root, "Hugging Face", {k: held[k] for k in weight_map}, metadata)


def _open_zarr(root: str) -> Checkpoint:
    import zarr

    from .zarr_dtypes import register

    register()
    # zarr raises nearly anything where metadata is not what it expects, from any of these steps.
    try:
        node = zarr.open(root, mode="r")
        attributes = dict(node.attrs)
    except Exception as e:
        raise CorruptCheckpoint(f"{root}: zarr cannot open it: {e}") from e
    if GROUP_ATTRIBUTE in attributes:
        raise IncompleteCheckpoint(
            f"{root} was written by meshtape but {manifest.FILE} is missing: its save did not finish, or the file was lost. "
            "Load another checkpoint; zarr.open still reads the arrays, unverified"
        )
    tensors: dict[str, StoredTensor] = {}
    try:
        found = {"": node} if isinstance(node, zarr.Array) else dict(node.members(max_depth=None))
        for name, a in sorted(found.items()):
            if isinstance(a, zarr.Array):
                shape, chunk = tuple(map(int, a.shape)), tuple(map(int, a.shards or a.chunks))
                tensors[name] = ZarrTensor(root, name, name, shape, np.dtype(a.dtype), chunk)
    except Exception as e:
        raise CorruptCheckpoint(f"{root}: zarr cannot list it: {e}") from e
    return _flat(root, "Zarr", tensors, attributes)
