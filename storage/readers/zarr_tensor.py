"""Arrays of Zarr hierarchies that others wrote, read through zarr-python."""

from __future__ import annotations

import base64
import itertools
import math
import re
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import (
    CheckpointDTypeError,
    CheckpointError,
    CheckpointReplaced,
    CorruptCheckpoint,
    IncompleteCheckpoint,
    StoreError,
)
from ..base import names
from ..base.locations import SCHEMES
from ..base.scratch import out_of_memory
from ..format import dtypes
from ..format.dtypes import EXTENSIONS, by_name
from ..format.manifest import FILE
from ..format.zarr_format import GROUP_ATTRIBUTE
from ..stores import store as stores
from ..stores.generations import ABSENT, NONE, Generation, Listed
from ..stores.icechunk_store import is_versioned
from ..stores.object_store import client
from .dual_tensor import DualTensor, at_folder
from .reading import Job

METADATA = ("zarr.json", ".zgroup", ".zarray")  # of which each node has one
_FILES = (*METADATA, ".zattrs", ".zmetadata")
_SHOWN = 8  # chunks that a message names
_V2_NAMES = "_ARRAY_DIMENSIONS"  # xarray's attribute for the names of dimensions, which Zarr v2 lacks


def zarr_place(root: str, node: str = "", *, write: bool = False) -> tuple[Any, str]:
    """(a store for zarr, the path in it) of a node of a hierarchy."""
    if write:
        stores.at(root).refuse_writes()
    from ..format.zarr_dtypes import zarr

    if not stores.is_url(root) and write:
        return zarr.storage.LocalStore(root), node
    if root.partition("://")[0] not in SCHEMES:
        from .zarr_store import PlaceStore

        return PlaceStore(root), node
    from .local_zarr import LocalZarrStore

    held, prefix = client(root)
    return LocalZarrStore(held, read_only=not write), "/".join(p for p in (prefix, node) if p)


def root_key(root: str) -> str:
    """The key of an array that is the root of its hierarchy: its own name, without ``.zarr``."""
    return stores.split(root)[1].removesuffix(".zarr") or "array"


def of_array(root: str, node: str, array: Any, verify: bool = True) -> ZarrTensor | DualTensor:
    """The tensor of an array that zarr has opened; `CheckpointDTypeError` for a dtype that is not supported.

    ``verify``: of layout "dual", whose chunks have no checksums of their own, compare them with those of the manifest.
    """
    shape, chunk = tuple(map(int, array.shape)), tuple(map(int, array.shards or array.chunks))
    form = getattr(array.metadata, "chunk_key_encoding", None)
    like_ours = form is not None and form.separator == "."
    ours = at_folder(stores.join(root, node) if node else root, verify) if like_ours else None
    if isinstance(ours, DualTensor):
        return ours
    if any(c < 1 <= n for n, c in zip(shape, chunk, strict=True)):
        raise ValueError(f"key {node!r} of shape {shape} has chunks of {chunk}")
    # Whatever the order of bytes there, zarr gives numbers: in memory they lie in ours.
    key = node or root_key(root)
    dtype = dtypes.of_reader(_dtype(array), f"{root}: key {node!r}")
    held, dims = _given(array)
    return ZarrTensor(
        root, key, node, shape, dtype, chunk, _encoding(array), ours is not None, attributes=held, dims=dims
    )


def _encoding(array: Any) -> tuple[str, str]:
    form = getattr(array.metadata, "chunk_key_encoding", None)
    old = getattr(array.metadata, "dimension_separator", ".")
    return ("v2", old) if form is None else (str(form.name), form.separator)


def _dtype(array: Any) -> np.dtype:
    """The dtype of an array, also where zarr-python knows its bits alone."""
    dtype = np.dtype(array.dtype)
    if (keys := getattr(array.store_path.store, "keys", None)) is not None:
        dtype = keys.said.get(f"{array.store_path.path}/.zarray".lstrip("/"), dtype)
    own = array.attrs.get(GROUP_ATTRIBUTE)
    if dtype.kind == "u" and isinstance(own, dict) and own.get("dtype") in EXTENSIONS:
        true = by_name(own["dtype"])  # bits, see ``array_metadata``
        dtype = true if true.itemsize == dtype.itemsize else dtype
    return dtype


def _shown(shape: Any, chunk: Any, dtype: Any, encoding: Any) -> str:
    return f"{dtype}{list(shape)} in chunks of {list(chunk)} named {encoding[0]} {encoding[1]!r}"


def _given(array: Any) -> tuple[dict[str, Any], list[Any] | None]:
    """(attributes, names of dimensions) that the writer of an array has given, as xarray writes them in v3."""
    held = {n: v for n, v in array.attrs.items() if n != GROUP_ATTRIBUTE}
    dims = getattr(array.metadata, "dimension_names", None) or ()
    named = held.get(_V2_NAMES)
    if array.metadata.zarr_format == 2 and isinstance(named, list) and len(named) == len(array.shape):
        # v2 has the value of missing elements as its fill value.
        dims = held.pop(_V2_NAMES)
        if array.fill_value is not None and array.dtype.kind in "biuf":
            packed = struct.pack("<d", array.fill_value) if array.dtype.kind == "f" else None
            held["_FillValue"] = array.fill_value.item() if packed is None else base64.b64encode(packed).decode()
    return held, list(dims) if any(n is not None for n in dims) else None


def open_array(root: str, node: str) -> ZarrTensor | DualTensor:
    """The tensor of a node. `CheckpointError` where zarr cannot open it."""
    from ..format.zarr_dtypes import zarr

    if node:
        names.inside(root, node, root)
    try:
        store, place = zarr_place(root, node)
        return of_array(root, node, zarr.open_array(store, path=place, mode="r"))
    except FileNotFoundError:
        raise IncompleteCheckpoint(f"{root}: the array {node!r} is missing") from None
    except (StoreError, CheckpointDTypeError):
        raise
    except Exception as e:
        raise refused(f"{root}: zarr cannot open key {node!r}: {reason(e)}") from e


def reason(e: Exception) -> str:
    return f"its metadata lack {e}" if isinstance(e, KeyError) else str(e)


def refused(text: str) -> CheckpointError:
    """The error for what zarr has said: of a dtype or codec that it does not know, or of damage."""
    unknown = any(said in text for said in ("No Zarr data type", "Unknown codec", "codec not available"))
    return CheckpointDTypeError(text) if unknown else CorruptCheckpoint(text)


class ByLibrary:
    """Base of the tensors that another library reads, in parts that it chooses; a box counts with its own size."""

    __slots__ = ()

    def only(self, box: Box) -> Self:
        return self

    def bound(self, generation: Generation) -> Self:
        return replace(self, generation=generation)  # type: ignore[type-var]

    def planned(self, box: Box) -> int:
        return box.size * self.dtype.itemsize  # type: ignore[attr-defined]

    def jobs(self, box: Box, out: np.ndarray) -> Iterator[Job]:
        yield lambda: self._read(box.slices, out)  # type: ignore[attr-defined]


class GridTensor(ByLibrary):
    """Base of those whose chunks have keys of Zarr. See `ZarrTensor` for ``missing`` and ``listed``."""

    __slots__ = ()
    listed = False

    def key(self, coord: tuple[Any, ...]) -> str:
        """The name of the file of a chunk, in the folder of the array."""
        kind, separator = self.encoding
        parts = [str(i) for i in coord]
        return separator.join(["c", *parts] if kind == "default" else parts or ["0"])

    def _form(self) -> re.Pattern[str]:
        """The keys of chunks."""
        return re.compile(re.escape(self.key(("#",) * len(self.shape))).replace("\\#", r"(0|[1-9][0-9]*)"))

    def lost(self, limit: int = _SHOWN) -> tuple[list[str], int]:
        """(names of the first chunks that are not there, the number of all)."""
        held = self._keys() if math.prod(self.shape) else None
        if held is None:
            return [], 0
        counts = [-(-n // c) for n, c in zip(self.shape, self.file_chunk, strict=True)]
        found = [m.groups() for m in map(self._form().fullmatch, held) if m is not None]
        count = math.prod(counts) - sum(all(int(i) < n for i, n in zip(at, counts, strict=True)) for at in found)
        if count <= 0:
            return [], 0
        every = range(math.prod(counts))  # counted without being listed
        keys = (self.key(tuple(map(int, np.unravel_index(i, counts))) if counts else ()) for i in every)
        return list(itertools.islice((k for k in keys if k not in held), min(limit, count))), count

    def check(self) -> None:
        """Raise `IncompleteCheckpoint`, or warn, where chunks are not there; `CheckpointError` for a size that no array
        has."""
        if math.prod(self.shape) * self.dtype.itemsize >= 1 << 62:
            raise CheckpointError(
                f"{self.root}: key {self.name!r} of shape {self.shape} is larger than any memory; read slices of it"
            )
        if self.listed or self.missing != "fill":
            self._tell(*self.lost())
            if self.missing == "warn" and stores.at(self.root).lists:  # of all that is not there, at once
                object.__setattr__(self, "missing", "fill")

    def _tell(self, first: list[str], count: int) -> None:
        """Raise `IncompleteCheckpoint`, or warn, where chunks are not there."""
        if count and (self.listed or self.missing != "fill"):
            what, are = ("chunk", "is") if count == 1 else ("chunks", "are")
            text = (
                f"{self.root}: {count} {what} of key {self.name!r} {are} not there "
                f"({', '.join(first)}{', …' if count > len(first) else ''})"
            )
            if self.listed:
                raise IncompleteCheckpoint(f"{text}, which {FILE} above it lists; restore, or load another checkpoint")
            text += ": lost, or never written because all is the fill value, as which Zarr reads them"
            if self.missing == "error":
                raise IncompleteCheckpoint(f'{text}; missing="fill" takes them for that')
            warnings.warn(text, stacklevel=6)


@dataclass(frozen=True, slots=True)
class ZarrTensor(GridTensor):
    """An array of a Zarr hierarchy by another writer. The reported bytes are the box's size; zarr may read more.

    ``missing`` is how `check` and every read treat absent chunks, which Zarr reads as the fill value: ``"error"``,
    ``"warn"`` or ``"fill"``. Writers leave out chunks of only the fill value, so a lost chunk and an empty one look
    alike. Ours do not: a ``listed`` array is of a checkpoint whose manifest has all of its chunks.
    """

    how: ClassVar[str] = "a Zarr array that another program wrote"
    root: str
    name: str
    node: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    encoding: tuple[str, str] = ("default", "/")  # of the names of chunks, and what separates their coordinates
    listed: bool = False
    missing: str = "warn"
    generation: Generation = NONE
    held: Any = field(default=None, compare=False, repr=False)  # zarr's own array, for many reads in one process
    pins: dict[str, str] = field(default_factory=dict, compare=False, repr=False)  # tags of files that were read
    absent: set[str] = field(default_factory=set, compare=False, repr=False)  # some chunks that reads have missed
    attributes: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # that its writer has given
    dims: list[Any] | None = field(default=None, compare=False, repr=False)  # names of dimensions, likewise

    @property
    def file_chunk(self) -> tuple[int, ...]:
        return self.chunk

    def bound(self, generation: Generation) -> ZarrTensor:
        """With the files by which a hierarchy was opened those that speak of this array: its own metadata, and that of
        the groups around it. (A read of each of n arrays would else look at those of all.)"""
        if type(generation) is Generation and not is_versioned(self.root):
            folders = itertools.accumulate(self.node.split("/") if self.node else (), stores.join, initial=self.root)
            files = [stores.join(folder, name) for folder in folders for name in _FILES]
            mine = {f: generation.tags[f] for f in files if f in generation.tags}
            generation = replace(generation, tags=mine)
        return replace(self, generation=generation)

    def _keys(self) -> set[str] | None:
        """The names of all files of the array, or None where they cannot be listed."""
        store = stores.at(self.root)
        start = f"{self.node}/" if self.node else ""
        return {e.name.removeprefix(start) for e in store.entries(self.node)} if store.lists else None

    @property
    def readers(self) -> int:
        return stores.at(self.root).readers

    def _opened(self) -> Any:
        from ..format.zarr_dtypes import zarr
        from .zarr_bounds import bound

        store, node = zarr_place(self.root, self.node)
        array = zarr.open_array(store, path=node, mode="r")
        dtype = _dtype(array)
        own = (array.shape, array.shards or array.chunks, dtype.newbyteorder("="), _encoding(array))
        if own != (mine := (self.shape, self.chunk, self.dtype, self.encoding)):
            raise CorruptCheckpoint(
                f"{self.root}: key {self.name!r} was opened as {_shown(*mine)}, and its own metadata say "
                f"{_shown(*own)}: consolidated metadata are stale, or a writer is at work; zarr.consolidate_metadata "
                "renews them"
            )
        return bound(array)

    def kept(self) -> ZarrTensor:
        """A copy for many reads, whose metadata is read once."""
        return replace(self, held=self._opened())

    def picks(self, picks: tuple[range, ...], out: np.ndarray) -> Iterator[Job]:
        yield lambda: self._read(tuple(slice(r.start, r.stop, r.step) for r in picks), out)

    def _files(self, index: tuple[slice, ...]) -> list[str]:
        """The files of the chunks that hold some elements, below the root."""
        grid = [range(s.start // c, -(-s.stop // c)) for s, c in zip(index, self.chunk, strict=True)]
        start = f"{self.node}/" if self.node else ""
        return [start + self.key(coord) for coord in itertools.product(*grid)]

    def every_file(self) -> list[str]:
        """All files that it may have, below the root: metadata and chunks."""
        start, old = f"{self.node}/" if self.node else "", self.encoding[0] == "v2"
        named = [".zarray", ".zattrs"] if old else ["zarr.json"]
        return [*(start + n for n in named), *self._files(tuple(slice(0, n) for n in self.shape))]

    def _pinned(self, index: tuple[slice, ...]) -> tuple[Listed, list[str]]:
        """The generation of the files that a read needs, and these: whoever listed all files pinned them when they were
        opened; a file on a disk is pinned by the first read of it."""
        if isinstance(self.generation, Listed):
            return self.generation, self._files(index)
        files = [] if stores.is_url(self.root) else self._files(index)
        for file, tag in zip(files, stores.at(self.root).tags(files), strict=True):
            self.pins.setdefault(file, tag or ABSENT)
        return Listed(self.pins, root=self.root), files

    def _read(self, index: tuple[slice, ...], out: np.ndarray) -> int:
        pinned, files = self._pinned(index)
        try:
            array = self._opened() if self.held is None else self.held
            found = array[index]
            out[...] = found if self.dtype.name not in EXTENSIONS else np.asarray(found).view(self.dtype)
        except (StoreError, CheckpointReplaced):  # nothing is wrong with the file
            raise
        except MemoryError as e:  # nor here
            raise out_of_memory(f"{self.root}: key {self.name!r}", e) from None
        except Exception as e:
            # zarr and its codecs raise nearly anything; the user needs to know which file of which key.
            self._compare(pinned, files)
            if isinstance(e, CheckpointError):
                raise
            raise CheckpointError(f"{self.root}: zarr cannot read key {self.name!r}: {e}") from e
        self._compare(pinned, files)
        self._missed(array.store_path)
        return out.nbytes

    def _compare(self, pinned: Listed, files: list[str]) -> None:
        if pinned is not self.generation:
            self.generation.check()
        pinned.check_files(files)

    def _missed(self, place: Any) -> None:
        """Tell of the chunks that reads of this array have asked for in vain."""
        start, form = f"{place.path}/" if place.path else "", self._form()
        mine = {k: k.removeprefix(start) for k in list(place.store.keys.absent) if k.startswith(start)}
        mine = {k: name for k, name in mine.items() if form.fullmatch(name)}
        # (Other arrays of the group may be being read by other threads, which tell of theirs.)
        place.store.keys.absent.difference_update(mine)
        missed = sorted(mine.values())
        self.absent.update(missed[: _SHOWN - len(self.absent)])
        self._tell(missed[:_SHOWN], len(missed))
