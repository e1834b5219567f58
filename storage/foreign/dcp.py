"""Checkpoints of ``torch.distributed.checkpoint`` (DCP), read without PyTorch and without running code from files.

``.metadata`` describes each tensor and where its chunks lie; a chunk is a zip archive inside a ``.distcp`` file, in
which the elements are stored as they are. So a chunk is a byte range, and any box of a tensor is read from the parts of
the chunks that it meets. Values that are not tensors (a step, a name) come along where they are plain; others are named
as ``skipped``. An archive has a CRC32 of its elements: reads of a whole chunk, and `verify`, compare it. Of a part of a
chunk only place and length are checked.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import CheckpointDTypeError, CheckpointError, CorruptCheckpoint, IncompleteCheckpoint
from ..base import names
from ..base.checksums import combine, crc32c
from ..base.malformed import malformed
from ..base.scratch import scratch
from ..base.threads import UPLOADS, in_threads
from ..checkpoint.checkpoint import Checkpoint, flat
from ..commit.contents import DCP as FILE
from ..format import dtypes, tensor_sums
from ..format.chunk_grid import tiled
from ..format.manifest import decode_json, encode_json, sizes
from ..readers.raw_tensor import RawTensor
from ..readers.reading import Job, opened
from ..readers.tensor import bytes_of, read_into, rows_of
from ..stores import store
from ..stores.contract import Reader
from ..stores.generations import NONE, Generation
from .torch_pickle import Persistent, PickledName, PickledObject, read_values

LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_AT_ONCE = 256  # heads of entries that are held in memory
_UNREADABLE = 0x61  # flags of encrypted and of patched entries
_END = struct.Struct("<4s6xH10x")  # of an archive: its mark, and how many entries it has
_SUMS = re.compile(rb'\{"meshtape\.crc32c": "(crc32c:[0-9a-f]+)"\}')
_MARKS = (b'{"meshtape.', b'": "crc32c:')  # of which a damaged byte leaves one
_MAX_VALUE = 1 << 20  # bytes of a value that is no tensor
# Functions by which PyTorch makes tensors, and which argument of each says how the elements are turned: by a function,
# for some kinds of dtypes.
_REBUILDS = {"torch._utils._rebuild_tensor_v2": 6, "torch._utils._rebuild_tensor_v3": 7}
_TURNS: dict[str, tuple[str, Any]] = {"conj": ("c", np.conjugate), "neg": ("iufcV", np.negative)}
STORAGES = {
    **{f"torch.{k}Storage": v for k, v in (("Float", "float32"), ("Double", "float64"), ("Half", "float16"))},
    **{f"torch.{k}Storage": v for k, v in (("BFloat16", "bfloat16"), ("Long", "int64"), ("Int", "int32"))},
    **{f"torch.{k}Storage": v for k, v in (("Short", "int16"), ("Char", "int8"), ("Byte", "uint8"), ("Bool", "bool"))},
    "torch.ComplexFloatStorage": "complex64",
    "torch.ComplexDoubleStorage": "complex128",
}


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """A part of a tensor, and the archive in which its elements lie."""

    box: Box
    file: str
    offset: int
    nbytes: int
    crc32c: int | None = None  # of the whole archive, where meshtape wrote it


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor in chunks, each an archive in a file."""

    how: ClassVar[str] = "parts in the archives of PyTorch's files, each with its CRC32"
    root: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[DcpChunk, ...]
    summed: bool = True  # whether the archives' CRC32 are compared
    generation: Generation = NONE

    @property
    def files(self) -> set[str]:
        return {c.file for c in self.chunks} | {FILE for c in self.chunks if c.crc32c is not None}

    @property
    def readers(self) -> int:
        return store.at(self.root).readers

    @property
    def chunk(self) -> tuple[int, ...]:
        return rows_of(self.shape)

    def only(self, box: Box) -> DcpTensor:
        return replace(self, chunks=tuple(c for c, _ in self._meeting(box)))

    def bound(self, generation: Generation) -> DcpTensor:
        return replace(self, generation=generation)

    def check(self) -> None:
        """Raise `IncompleteCheckpoint`, listing all, when files are missing."""
        lost = store.missing(self.root, "", sorted({c.file for c in self.chunks}))
        if lost:
            self.generation.check()
            raise IncompleteCheckpoint(f"{self.root}: files of key {self.name!r} are missing: {', '.join(lost[:8])}")

    def _meeting(self, box: Box) -> Iterator[tuple[DcpChunk, Box]]:
        for c in self.chunks:
            common = box.intersect(c.box)
            if common is not None and common.size:
                yield c, common

    def planned(self, box: Box) -> int:
        return sum(common.size for _, common in self._meeting(box)) * self.dtype.itemsize

    def jobs(self, box: Box, out: np.ndarray) -> Iterator[Job]:
        for c, common in self._meeting(box):
            yield lambda c=c, common=common: self._read(c, common, out[(*common.within(box).slices, ...)])

    def _read(self, chunk: DcpChunk, common: Box, out: np.ndarray) -> int:
        place = self.place(chunk)
        start, file_nbytes, strides = place.start, place.file_nbytes, place.strides
        path = names.inside(self.root, chunk.file, self.root)
        local = common.within(chunk.box)
        order = sorted(range(len(chunk.box.shape)), key=lambda d: -strides[d])
        shape = tuple(chunk.box.shape[d] for d in order)
        dense = _dense(chunk.box.shape, strides)
        # Elements may lie in another order of dimensions, as those of a transposed tensor do: read them in theirs.
        raw = RawTensor(path, self.name, shape, self.dtype, start, file_nbytes, generation=self.generation)
        if not dense:
            raw = replace(raw, strides=tuple(strides[d] for d in order))
        part = Box(tuple(local.offset[d] for d in order), tuple(local.shape[d] for d in order))
        out = out.transpose(order)
        if not dense or not self.summed or common != chunk.box or place.stored != (start, out.nbytes):
            total = read_into(raw, part, out)[1]
            place.turn(out)
            return total
        held = out if out.flags.c_contiguous else np.empty(shape, self.dtype)
        total = read_into(raw, part, held)[1]
        if not self._fits(path, chunk, place, held):
            self.generation.check()
            raise self._damaged(path, chunk)
        if held is not out:
            out[...] = held
        place.turn(out)
        return total

    def _fits(self, path: str, chunk: DcpChunk, place: ChunkLocation, held: np.ndarray) -> bool:
        """Whether elements are those that were saved: the CRC32 of their archive says so, which a file of another save
        brings along, or the checksum of it all in our ``.metadata``."""
        if chunk.crc32c is None:
            return zlib.crc32(bytes_of(held), place.seed) == place.crc32
        end, stop = place.start + held.nbytes, chunk.offset + chunk.nbytes
        with opened(path, f"a part of {self.name!r}", self.generation) as reader:
            head = tensor_sums.of_range(reader, chunk.offset, place.start - chunk.offset)
            tail = tensor_sums.of_range(reader, end, stop - end)
        if head is None or tail is None:
            return False
        found = combine(head, crc32c(bytes_of(held)), held.nbytes)
        return combine(found, tail, stop - end) == chunk.crc32c

    def place(self, chunk: DcpChunk) -> ChunkLocation:
        path = names.inside(self.root, chunk.file, self.root)
        with self.generation.guarded():
            return _place(self.root, chunk, self.name, self.dtype, self.generation.tags.get(path))

    def raw_part(self, at: int) -> tuple[int, RawTensor] | None:
        """(its first byte in the row-major order of the tensor, a run of bytes in a file) where byte ``at`` of that
        order lies in a chunk of whole rows that is stored as it is."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        for c in self.chunks:
            shape, first = c.box.shape, math.prod(c.box.offset[:1]) * row
            if first <= at < first + c.box.size * self.dtype.itemsize and shape[1:] == self.shape[1:]:
                place, path = self.place(c), names.inside(self.root, c.file, self.root)
                steps = enumerate(zip(shape, place.strides, strict=True))
                if not place.turns and all(n == 1 or s == math.prod(shape[i + 1 :]) for i, (n, s) in steps):
                    form = path, self.name, shape, self.dtype, place.start, place.file_nbytes
                    return first, RawTensor(*form, generation=self.generation)
        return None

    def _damaged(self, path: str, chunk: DcpChunk) -> CorruptCheckpoint:
        return CorruptCheckpoint(
            f"{path}: the part of key {self.name!r} at {chunk.box.offset} does not fit its CRC32; restore the file or "
            "another checkpoint"
        )

    def verify(self) -> int:
        """Compare every byte of the elements with its CRC32, in little memory; returns their number."""
        total = 0
        for chunk in self.chunks:
            path, own = names.inside(self.root, chunk.file, self.root), chunk.crc32c
            if own is not None:  # covers what stands around the elements, too
                with opened(path, f"a part of {self.name!r}", self.generation) as reader:
                    if tensor_sums.of_range(reader, chunk.offset, chunk.nbytes) != own:
                        raise self._damaged(path, chunk)
                total += chunk.nbytes
                continue
            place = self.place(chunk)
            at, nbytes = place.stored
            value, end = place.seed, at + nbytes
            with opened(path, f"a part of {self.name!r}", self.generation) as reader:
                while at < end:
                    part = scratch("sum", min(tensor_sums.BATCH, end - at))
                    if reader.readv([part], at) != part.size:
                        raise CorruptCheckpoint(f"{path} ends early (key {self.name!r})")
                    value, at = zlib.crc32(part, value), at + part.size
            if value != place.crc32:
                raise self._damaged(path, chunk)
            total += nbytes
        return total


class _FileSlice(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, reader: Reader, start: int, nbytes: int) -> None:
        self._reader, self._start, self._nbytes, self._at = reader, start, nbytes, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, (0, self._at, self._nbytes)[whence] + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._nbytes - self._at)]
        got = self._reader.readv([view], self._start + self._at) if len(view) else 0
        self._at += got
        return got


def _description(where: str, archive: zipfile.ZipFile, limit: int, most: int) -> tuple[bytes, str]:
    """(the description in an archive of ``most`` bytes, the name of its folder); the description fits its CRC32."""
    found = [n for n in archive.namelist() if n == "data.pkl" or n.endswith("/data.pkl")]
    if len(found) != 1:
        raise CorruptCheckpoint(f"{where}: an archive without one data.pkl")
    info = archive.getinfo(found[0])
    if info.compress_type != zipfile.ZIP_STORED:  # what unpacks it would raise errors of its own
        raise CorruptCheckpoint(f"{where}: a compressed data.pkl")
    folder = found[0].removesuffix("data.pkl")
    order = f"{folder}byteorder"
    if order in archive.namelist() and archive.getinfo(order).file_size < 16 and archive.read(order) != b"little":
        raise CheckpointDTypeError(f"{where}: its elements are big-endian; save it anew on another machine")
    if not info.file_size == info.compress_size < most:
        raise CorruptCheckpoint(f"{where}: data.pkl is longer than its archive")
    if info.file_size > limit:
        raise CheckpointDTypeError(f"{where}: data.pkl has {info.file_size} bytes, more than {limit}")
    return archive.read(found[0]), folder


def described(
    where: str, archive: zipfile.ZipFile, most: int, limit: int = _MAX_VALUE, lenient: bool = False
) -> tuple[Any, str]:
    """(the value that the archive describes, the name of its folder)."""
    text, folder = _description(where, archive, limit, most)
    return read_values(text, where, lenient), folder


def archive_of(reader: Reader, chunk: DcpChunk) -> zipfile.ZipFile:
    """The archive in a part of a file. Its entries are counted: zipfile takes a wrong length for that of several."""
    archive = zipfile.ZipFile(io.BufferedReader(_FileSlice(reader, chunk.offset, chunk.nbytes), 64 << 10))
    end = bytearray(_END.size)
    reader.readv([end], chunk.offset + chunk.nbytes - _END.size - len(archive.comment))
    mark, count = _END.unpack(end)
    if mark != b"PK\x05\x06" or count not in (0xFFFF, len(archive.infolist())):  # the former: too many for its number
        archive.close()
        raise zipfile.BadZipFile(f"its end counts {count} entries, its table has {len(archive.infolist())}")
    return archive


def damage(where: str) -> AbstractContextManager[None]:
    """Raise the many errors that readers have for a damaged archive as one."""
    # RuntimeError: an entry that says it is encrypted, or made by methods that zipfile has not.
    return malformed(f"{where}: a damaged archive", zipfile.BadZipFile, zlib.error, RuntimeError)


class ChunkLocation(NamedTuple):
    """Where a chunk lies: its first element, its strides in elements, and the (start, length) and CRC32 of all that is
    stored with it.

    ``seed`` is the CRC32 of what its entry holds before that. PyTorch stores the conjugate, or the negative, of
    ``turns``.
    """

    start: int
    file_nbytes: int
    strides: tuple[int, ...]
    stored: tuple[int, int]
    crc32: int
    seed: int = 0
    turns: frozenset[str] = frozenset()

    def turn(self, out: np.ndarray) -> None:
        """Make the values of the elements that were read."""
        for name in self.turns:
            _TURNS[name][1](out, out=out)


class Described(NamedTuple):
    """A tensor in its description: the entry of its storage, its first element and strides there, and its turns."""

    entry: str
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    turns: frozenset[str]


def described_tensor(made: Any, where: str) -> Described:
    """The arguments of the function that PyTorch makes a tensor by, checked."""
    place = _REBUILDS.get(made.name) if isinstance(made, PickledObject) else None
    if place is None or not isinstance(made.args[0], Persistent):
        raise CorruptCheckpoint(f"{where}: not a tensor")
    storage, first, shape, strides = made.args[:4]
    kind = made.args[6] if made.name.endswith("_v3") else storage.id[1]
    if not isinstance(kind, PickledName) or len(shape) != len(strides):
        raise CorruptCheckpoint(f"{where}: not a tensor")
    dtype = dtypes.by_name(STORAGES.get(kind.name, kind.name.removeprefix("torch.")))
    turns = (made.args[place] if len(made.args) > place else None) or {}
    if not isinstance(turns, dict) or any(dtype.kind not in _TURNS.get(k, ("", None))[0] for k in turns):
        raise CheckpointDTypeError(
            f"{where}: a {dtype} tensor with {str(turns)[:80]} has no form here; save its clone()"
        )
    return Described(
        str(storage.id[2]), first, tuple(shape), tuple(strides), dtype, frozenset(k for k in turns if turns[k])
    )


def located(
    t: Described, info: zipfile.ZipInfo, head: bytes, where: str, chunk: DcpChunk, file_nbytes: int
) -> ChunkLocation:
    """The place of a tensor whose storage is an entry, with this ``head``, of the archive of a chunk."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise CorruptCheckpoint(f"{where}: compressed elements")
    last = t.first + sum((n - 1) * s for n, s in zip(t.shape, t.strides, strict=True))
    if min((t.first, *t.strides)) < 0 or (last >= info.file_size // t.dtype.itemsize and 0 not in t.shape):
        raise CorruptCheckpoint(f"{where}: elements beyond their storage")
    start = chunk.offset + entry_start(head, info, where, chunk.nbytes)
    at, stored = start + t.first * t.dtype.itemsize, (start, info.file_size)
    return ChunkLocation(at, file_nbytes, t.strides, stored, info.CRC, turns=t.turns)


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements of a tensor are contiguous, each once; not so for a slice of columns, or expanded ones."""
    expected = 1
    for n, s in sorted(zip(shape, strides, strict=True), key=lambda x: x[1]) if 0 not in shape else ():
        if n > 1 and s != expected:
            return False
        expected *= n
    return True


def entry_heads(
    reader: Reader, entries: Sequence[zipfile.ZipInfo], base: int = 0, more: int = 0, threads: int = 1
) -> Iterator[bytes]:
    """The header of each entry of an archive at ``base``, and ``more`` bytes; several requests at a time to a store."""

    def head(info: zipfile.ZipInfo) -> bytes:
        return reader.part(base + info.header_offset, LOCAL_HEADER.size + len(_name(info)) + more)

    for first in range(0, len(entries), _AT_ONCE):
        yield from in_threads(head, entries[first : first + _AT_ONCE], threads)


def entry_start(head: bytes, info: zipfile.ZipInfo, where: str, size: int) -> int:
    """Where the bytes of an entry with this ``head`` begin, counted as in its archive of ``size`` bytes."""
    fields = LOCAL_HEADER.unpack_from(head.ljust(LOCAL_HEADER.size, b"\0"))
    if fields[0] != b"PK\x03\x04" or head[LOCAL_HEADER.size :][: fields[9]] != _name(info):
        raise CorruptCheckpoint(f"{where}: no header of this entry where the archive says")
    if info.flag_bits & _UNREADABLE:
        raise CorruptCheckpoint(f"{where}: an encrypted or patched entry")
    start = info.header_offset + LOCAL_HEADER.size + fields[9] + fields[10]
    if start + info.file_size > size:
        raise CorruptCheckpoint(f"{where}: elements beyond their archive")
    return start


def _name(info: zipfile.ZipInfo) -> bytes:
    return info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")


@lru_cache(maxsize=4096)
def _place(root: str, chunk: DcpChunk, name: str, dtype: np.dtype, tag: str | None) -> ChunkLocation:
    path = names.inside(root, chunk.file, root)
    where = f"{path}, key {name!r}"
    with opened(path, f"a part of {name!r}") as reader, damage(where):
        size = reader.nbytes
        if chunk.offset + chunk.nbytes > size:
            raise CorruptCheckpoint(
                f"{where}: its part ends at byte {chunk.offset + chunk.nbytes}, the file has {size}"
            )
        with archive_of(reader, chunk) as archive:
            made, folder = described(where, archive, chunk.nbytes)
            t, part = described_tensor(made, where), chunk.box.shape
            if (t.shape, t.dtype) != (part, dtype):
                raise CorruptCheckpoint(f"{where}: {t.dtype}{list(t.shape)} is not its part, {dtype}{list(part)}")
            info = archive.getinfo(f"{folder}data/{t.entry}")
        (head,) = entry_heads(reader, [info], chunk.offset)
        return located(t, info, head, where, chunk, size)


def _tensor(
    root: str, name: str, entry: PickledObject, storage: dict[Any, Any], verify: bool, sums: dict[int, int]
) -> DcpTensor:
    properties = entry.field("properties")
    kind = properties.field("dtype", 0) if isinstance(properties, PickledObject) else None
    if kind is None or not isinstance(kind, PickledName):
        raise ValueError(f"{name!r} has no dtype")
    dtype = dtypes.by_name(kind.name.removeprefix("torch."))
    shape = sizes(entry.field("size"), "size")
    chunks = []
    for c in entry.field("chunks"):
        box = Box(sizes(c.field("offsets"), "offset"), sizes(c.field("sizes"), "size"))
        if len(box.shape) != len(shape) or any(a > n for a, n in zip(box.stop, shape, strict=True)):
            raise ValueError(f"{name!r}: a chunk lies outside the tensor")
        info = storage.get((name, box.offset))
        if info is None:
            raise ValueError(f"{name!r}: no file for the chunk at {box.offset}")
        chunks.append(DcpChunk(box, *_stored(root, info), sums.get(id(info))))
    if not tiled(shape, [c.box for c in chunks]):
        raise ValueError(f"{name!r}: its chunks do not cover it once")
    return DcpTensor(root, name, shape, dtype, tuple(chunks), verify)


def _stored(root: str, info: PickledObject) -> tuple[str, int, int]:
    file, offset, nbytes = (info.field(k) for k in ("relative_path", "offset", "length"))
    names.inside(root, file, f"{root}/{FILE}")
    if type(offset) is not int or type(nbytes) is not int or offset < 0 or nbytes < 0:
        raise ValueError(f"{file!r}: not a place in a file")
    if info.field("transform_descriptors") if "transform_descriptors" in (info.state or {}) else None:
        raise ValueError(f"{file!r}: transformed (compressed) files cannot be read")
    return file, offset, nbytes


def _value(root: str, name: str, info: PickledObject, crc: int | None) -> Any:
    """A value that is no tensor; `CheckpointDTypeError` for one that is not plain, `CorruptCheckpoint` for damage."""
    file, offset, nbytes = _stored(root, info)
    where = f"{root}/{file}, key {name!r}"
    chunk = DcpChunk(Box((), ()), file, offset, nbytes)
    with (
        opened(names.inside(root, file, root), f"the value {name!r}") as reader,
        damage(where),
        archive_of(reader, chunk) as archive,
    ):
        if crc is not None and tensor_sums.of_range(reader, offset, nbytes) != crc:
            raise CorruptCheckpoint(f"{where}: does not fit its crc32c")
        text, _ = _description(where, archive, _MAX_VALUE, nbytes)
        try:
            return decode_json(encode_json(read_values(text, where), name))
        except CheckpointError as e:  # its CRC32 fits: PyTorch wrote it so
            raise CheckpointDTypeError(str(e)) from None


def _sums(data: bytes, count: int) -> list[int]:
    """The checksums of the archives, which meshtape writes into the metadata; none in those of others."""
    found = _SUMS.search(data)
    if found is not None:
        return tensor_sums.of_header(data, {tensor_sums.KEY: found[1].decode()}, count) or []
    if any(mark in data for mark in _MARKS):
        raise ValueError("its checksums do not stand where meshtape writes them")
    return []


def is_dcp(root: str) -> bool:
    """Whether a directory is such a checkpoint."""
    return store.at(root).size(FILE) is not None


def open_dcp(root: str, verify: bool = True) -> Checkpoint:
    """Open such a checkpoint: tensors lazily, under the names that were saved."""
    where = store.join(root, FILE)
    data = store.at(root).get(FILE)
    top = read_values(data, where)
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    with malformed(f"{where}: not the metadata of a checkpoint"):
        storage: dict[Any, Any] = {}
        held = top.field("storage_data") or {}
        sums = dict(zip(map(id, held.values()), _sums(data, len(held)) if verify else (), strict=False))
        for index, info in held.items():
            offset = index.field("offset") if "offset" in index.state else None
            storage[index.field("fqn"), None if offset is None else sizes(offset, "offset")] = info
        for name, entry in top.field("state_dict_metadata").items():
            try:
                if entry.name.endswith("TensorStorageMetadata"):
                    tensors[name] = _tensor(root, name, entry, storage, verify, sums)
                else:
                    info = storage[name, None]
                    values[name] = _value(root, name, info, sums.get(id(info)))
            except CheckpointDTypeError as e:
                skipped[name] = str(e)
            except (CorruptCheckpoint, IncompleteCheckpoint) as e:
                if verify or entry.name.endswith("TensorStorageMetadata"):
                    raise
                skipped[name] = str(e)
    # Their tags are those of the generation that is opened.
    in_threads(store.at(root).tag, sorted({c.file for t in tensors.values() for c in t.chunks}), UPLOADS)
    ckpt = flat(root, "PyTorch DCP", tensors, skipped=skipped)
    ckpt.structure |= values
    return ckpt
