"""Files that NumPy and PyTorch write, read-only and without pickle: ``.npy``, ``.npz``, and the archives of
``torch.save``.

An ``.npz`` is a zip archive of ``.npy``; one of ``torch.save`` has the elements of each storage as an entry, and a
description that ``torch_values`` reads as plain data. Entries that are not compressed are byte ranges, so any box is
read from its part; their CRC32 is compared by whole reads and by ``verify``. A compressed entry is unpacked whole.
Arrays and objects that have no form here are named as ``skipped``.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import CheckpointDTypeError, CheckpointError, CorruptCheckpoint, NotACheckpoint
from ..base import names
from ..base.scratch import room
from ..base.threads import UPLOADS
from ..checkpoint.checkpoint import Checkpoint, StoredArray, flat
from ..format import dtypes
from ..format.manifest import Leaf, encode_json
from ..readers.reading import Job, opened
from ..readers.tensor import bytes_of
from ..stores import store
from ..stores.contract import Reader
from ..stores.filesystem import active
from . import dcp
from .torch_pickle import PickledName, PickledObject

SINGLE = "arr_0"  # the name that NumPy gives an array without one
_MAX_PICKLE = 64 << 20
_MAX_NPY_HEADER = 64 << 10
_HEAD = 1 << 10  # bytes that have the header of an array, but for odd ones
_NOWHERE = dcp.ChunkLocation(0, 0, (), (0, 0), 0)


@dataclass(frozen=True, slots=True)
class PlacedTensor(dcp.DcpTensor):
    """A tensor with a known place in its file."""

    how: ClassVar[str] = "one run of bytes in a file of NumPy's or PyTorch's"
    held: dcp.ChunkLocation = _NOWHERE

    def place(self, chunk: dcp.DcpChunk) -> dcp.ChunkLocation:
        return self.held


@dataclass(frozen=True, slots=True)
class DeflatedTensor(PlacedTensor):
    """A tensor of a compressed entry, which is always read whole.

    zipfile compares its CRC32 and unpacks no more than its length.
    """

    how: ClassVar[str] = "a compressed entry of an archive, which is unpacked whole"
    entry: str = ""

    @property
    def chunk(self) -> tuple[int, ...]:
        return tuple(max(n, 1) for n in self.shape)

    def jobs(self, box: Box, out: np.ndarray) -> Iterator[Job]:
        yield lambda: self._unpack(box, out)

    def _pieces(self) -> Iterator[bytes]:
        """The bytes of the elements, which are those of the array when all are gone."""
        (chunk,) = self.chunks
        where = f"{store.join(self.root, chunk.file)}, key {self.name!r}"
        left = self.nbytes
        with (
            opened(store.join(self.root, chunk.file), f"key {self.name!r}", self.generation) as reader,
            dcp.damage(where),
            dcp.archive_of(reader, chunk) as archive,
            archive.open(self.entry) as f,
        ):
            f.read(self.held.start)
            while part := f.read(min(1 << 20, max(1, left))):
                left -= len(part)
                if left < 0:
                    raise CorruptCheckpoint(f"{where}: longer than its array")
                yield part
            if left:
                raise CorruptCheckpoint(f"{where}: ends early")
        self.generation.check()

    def _unpack(self, box: Box | None = None, out: np.ndarray | None = None) -> int:
        order = sorted(range(len(self.shape)), key=lambda d: -self.held.strides[d])
        held = room(self.name, tuple(self.shape[d] for d in order), self.dtype)
        raw, at = memoryview(bytes_of(held)), 0
        for part in self._pieces():
            raw[at : at + len(part)] = part
            at += len(part)
        if out is not None and box is not None:
            out.transpose(order)[...] = held[tuple(box.slices[d] for d in order)] if order else held
        return held.nbytes

    @property
    def key(self) -> tuple[str, str, str]:
        """The entry, among those of all archives."""
        return self.root, self.chunks[0].file, self.entry

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def unpacked(self, fd: int, path: str, start: int, size: int) -> PlacedTensor:
        """The same elements, written to a file of ``size`` bytes from ``start`` on."""
        at, (root, file) = start, store.split(path)
        for part in self._pieces():
            at += active().write(fd, [part], at)
        place = dcp.ChunkLocation(start, size, self.held.strides, (start, at - start), 0)
        chunk = dcp.DcpChunk(Box.whole(self.shape), file, 0, size)
        return PlacedTensor(root, self.name, self.shape, self.dtype, (chunk,), False, held=place)

    def verify(self) -> int:
        return sum(map(len, self._pieces()))


def _npy_header(start: bytes, where: str) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """(shape, whether its first dimension is the fastest, dtype, length of the header); refuses other dtypes."""
    f = io.BytesIO(start)  # no more: NumPy takes memory for any length that a file claims
    try:
        version = np.lib.format.read_magic(f)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(f)
    except Exception as e:  # NumPy reads a literal of Python here, and its tokenizer raises nearly anything
        raise CorruptCheckpoint(f"{where}: not an array of NumPy: {e}") from None
    if dtype.hasobject or dtype.byteorder == ">" or dtype.names is not None or dtype.kind not in "biufc":
        raise CheckpointDTypeError(f"{where}: elements of {dtype.str} have no form here; save them in another dtype")
    if not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
        raise CorruptCheckpoint(f"{where}: shape {str(shape)[:80]}")
    return shape, fortran, dtypes.by_name(dtype.name), f.tell()


def _strides(shape: tuple[int, ...], fortran: bool) -> tuple[int, ...]:
    dims = range(len(shape))
    return tuple(math.prod(max(n, 1) for n in (shape[:d] if fortran else shape[d + 1 :])) for d in dims)


def _prefix(reader: Reader, head: bytes, start: int, most: int) -> bytes:
    """The start of a file of NumPy's in ``most`` bytes from ``start`` on, header and all; ``head`` has some of it."""
    version, length = head[6:7], head[8:12]
    needed = 12 + int.from_bytes(length[:2] if version == b"\1" else length, "little")
    if len(head) < min(needed, most, _MAX_NPY_HEADER):
        head = reader.part(start, min(needed, most, _MAX_NPY_HEADER))
    return head[:most]


def _threads(path: str) -> int:
    return UPLOADS if store.is_url(path) else 1


def open_npy(path: str) -> Checkpoint:
    """A checkpoint of one array, called ``arr_0`` as in an ``.npz`` of NumPy."""
    root, file = store.split(path)
    with opened(path, "an array") as reader:
        size = reader.nbytes
        start = reader.part(0, min(size, _MAX_NPY_HEADER))
    shape, fortran, dtype, at = _npy_header(start, path)
    nbytes = math.prod(shape) * dtype.itemsize
    if at + nbytes != size:
        raise CorruptCheckpoint(f"{path} has {size} bytes, its array needs {at + nbytes}")
    place = dcp.ChunkLocation(at, size, _strides(shape, fortran), (at, nbytes), 0)
    chunk = dcp.DcpChunk(Box.whole(shape), file, 0, size)
    tensor = PlacedTensor(root, SINGLE, shape, dtype, (chunk,), False, held=place)
    return flat(path, "NumPy", {SINGLE: tensor})


def open_archive(path: str, verify: bool) -> Checkpoint:
    """A zip archive of NumPy's or PyTorch's."""
    root, file = store.split(path)
    with opened(path, "the arrays") as reader:
        size = reader.nbytes
    whole = dcp.DcpChunk(Box((), ()), file, 0, size)
    with opened(path, "the arrays") as reader, dcp.damage(path), dcp.archive_of(reader, whole) as archive:
        inside = archive.namelist()
        if any(n == "data.pkl" or n.endswith("/data.pkl") for n in inside):
            return _open_torch(path, whole, root, reader, archive, verify)
        if not inside or not all(n.endswith(".npy") for n in inside):
            raise CheckpointError(f"{path} is a zip archive, but neither of NumPy's arrays nor of torch.save")
        if len(set(inside)) != len(inside):
            raise CorruptCheckpoint(f"{path}: an entry occurs twice")
        tensors: dict[str, PlacedTensor] = {}
        skipped: dict[str, str] = {}
        entries = archive.infolist()
        heads = dcp.entry_heads(reader, entries, more=_HEAD, threads=_threads(path))
        for info, head in zip(entries, heads, strict=True):
            name = info.filename.removesuffix(".npy")
            where = f"{path}, key {name!r}"
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise CorruptCheckpoint(f"{where}: compressed by a method that NumPy does not use")
            stored = info.compress_type == zipfile.ZIP_STORED
            start = dcp.entry_start(head, info, where, size) if stored else 0
            try:
                if stored:
                    prefix = _prefix(reader, head[start - info.header_offset :], start, info.file_size)
                else:
                    with archive.open(info) as f:
                        prefix = f.read(_MAX_NPY_HEADER)
                shape, fortran, dtype, at = _npy_header(prefix, where)
            except CheckpointDTypeError as e:
                skipped[name] = str(e)
                continue
            nbytes = math.prod(shape) * dtype.itemsize
            if at + nbytes != info.file_size:
                raise CorruptCheckpoint(f"{where}: {info.file_size} bytes, its array needs {at + nbytes}")
            chunk, strides = dcp.DcpChunk(Box.whole(shape), file, 0, size), _strides(shape, fortran)
            held = (root, name, shape, dtype, (chunk,), verify)
            if not stored:
                place = dcp.ChunkLocation(at, size, strides, (0, 0), 0)
                tensors[name] = DeflatedTensor(*held[:-1], True, held=place, entry=info.filename)
                continue
            start += at
            place = dcp.ChunkLocation(start, size, strides, (start, nbytes), info.CRC, zlib.crc32(prefix[:at]))
            tensors[name] = PlacedTensor(*held, held=place)
    return flat(path, "NumPy", tensors, skipped=skipped)


def _open_torch(
    path: str, whole: dcp.DcpChunk, root: str, reader: Reader, archive: zipfile.ZipFile, verify: bool
) -> Checkpoint:
    top, folder = dcp.described(path, archive, whole.nbytes, _MAX_PICKLE, lenient=True)
    entries = [i for i in archive.infolist() if i.filename.startswith(f"{folder}data/")]
    starts = dcp.entry_heads(reader, entries, threads=_threads(path))
    heads = {i.filename: head for i, head in zip(entries, starts, strict=True)}
    arrays: dict[str, StoredArray] = {}
    skipped: dict[str, str] = {}

    def tensor(made: PickledObject, keys: tuple[str | int, ...]) -> Leaf:
        name = names.leaf_name(keys)
        where = f"{path}, key {name!r}"
        t = dcp.described_tensor(made, where)
        info = archive.getinfo(f"{folder}data/{t.entry}")
        place = dcp.located(t, info, heads[info.filename], where, whole, whole.nbytes)
        chunk = replace(whole, box=Box.whole(t.shape))
        held = PlacedTensor(root, name, t.shape, t.dtype, (chunk,), verify, held=place)
        arrays[name] = StoredArray(keys, held)
        return Leaf(len(arrays) - 1)

    def walk(node: Any, keys: tuple[str | int, ...]) -> Any:
        """The tree node for an unpickled value; raises `CheckpointDTypeError` where there is none."""
        if len(keys) > 100:
            raise CorruptCheckpoint(f"{path}: nested deeper than 100 levels")
        node = _unwrapped(node)
        if isinstance(node, PickledObject) and node.name.startswith("torch._utils._rebuild_tensor_v"):
            return tensor(node, keys or ("tensor",))
        if isinstance(node, dict):
            held = ((k, part(v, (*keys, k), isinstance(k, (str, int)))) for k, v in node.items())
            return {k: v for k, v in held if v is not None or node[k] is None}
        if isinstance(node, (list, tuple)):
            return type(node)(part(v, (*keys, i)) for i, v in enumerate(node))
        if isinstance(node, (PickledObject, PickledName)):
            made_by = repr(node.name[:100])
            raise CheckpointDTypeError(f"the file makes it by {made_by}, which is refused: nothing of a file is run")
        encode_json(node, "it")
        return node

    def part(node: Any, keys: tuple[Any, ...], named: bool = True) -> Any:
        """A value in a dict or list; None where it cannot be read, which is then told."""
        name = names.leaf_name(keys)
        try:
            if not named:
                kind = type(keys[-1]).__name__
                raise CheckpointDTypeError(f"its key {keys[-1]!r} is a {kind}; keys are texts and ints")
            if not isinstance(node, (dict, list, tuple)) and seen.setdefault(name, keys) != keys:
                name = ".".join(map(repr, keys))
                raise CheckpointDTypeError("another key has the same name")
            return walk(node, keys)
        except CheckpointDTypeError as e:
            skipped[name] = str(e)
            return None

    seen: dict[str, tuple[Any, ...]] = {}
    try:
        tree = walk(top, ())
    except CheckpointDTypeError as e:
        raise NotACheckpoint(
            f"{path} holds no tensors by name: {e}. Of a whole module, save its state_dict()"
        ) from None
    structure = {"tensor": tree} if isinstance(tree, Leaf) else tree
    return Checkpoint(path, "PyTorch", arrays, structure, skipped=skipped)


def _unwrapped(node: Any) -> Any:
    """The tensor of a parameter, a buffer, or of a class of its own."""
    while isinstance(node, PickledObject):
        if node.name in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
            node = node.args[0]
        elif node.name == "torch._tensor._rebuild_from_type_v2" and isinstance(node.args[0], PickledName):
            node = PickledObject(node.args[0].name, node.args[2])
        else:
            break
    return node
