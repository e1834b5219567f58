"""Our own safetensors: a strict reader of headers and a streaming writer.

The format is one page: an unsigned 64-bit little-endian length, that many bytes of JSON, then the tensors' bytes.
The reader refuses everything that the reference implementation refuses, and names the reference's error in parentheses;
it also refuses a duplicate name, which the specification disallows and the reference lets pass when both agree.
The writer yields the reference's bytes exactly: tensors by descending dtype rank, then name; header padded to 8 bytes.

Why our own: the reference's NumPy binding cannot read the float8 and bfloat16 that it writes, and release 0.8.0 writes
arrays that are not contiguous with other values (https://github.com/safetensors/safetensors/issues/825).
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import math
import os
import re
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring
from operator import itemgetter
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ...arrays.backends.collector import no_collections
from ...arrays.core.blocks import Box
from ...arrays.core.errors import (
    CheckpointDTypeError,
    CheckpointError,
    CheckpointExists,
    CheckpointKeyError,
    CorruptCheckpoint,
    NotACheckpoint,
)
from ...arrays.core.op import not_recording
from ..base import strict_json
from ..base.arguments import mapping
from ..base.checksums import crc32c
from ..base.leaves import taken
from ..base.scratch import room
from ..format import dtypes, tensor_sums
from ..format.chunk_grid import sizes_text
from ..stores import atomic_directory, generations
from ..stores import store as stores
from .raw_tensor import RawTensor
from .reading import run

DCP_INFO = "DCP_SHARDING_INFO"  # metadata in which a file of `torch.distributed` says where its blocks lie
MAX_HEADER = 100_000_000
ATTRIBUTES = "meshtape.attributes"  # metadata with attributes of arrays by other writers, by name; "" is the group
MAX_METADATA = 100_000  # entries of __metadata__, roughly
_LEAST_ENTRY = 48  # bytes of the shortest description of a tensor
_FIRST = 128 << 10  # bytes of the first read: most headers are shorter
_USIZE = 1 << 64
_MAX_DEPTH = 127
_SHORT = 16 << 10  # bytes of a piece that is copied to be written with others
_JOINED = 256 << 10  # bytes of such pieces that are written at a time
_ODD_NUMBER = re.compile(rb"[\s:,\[](?:-|[0-9]{21})")  # perhaps: in a text it means nothing
_FLAT = "tensors is a flat dict of arrays; save nested trees, texts and None with mt.save, and mt.merge exports them"
_ENTRY = frozenset(["dtype", "shape", "data_offsets"])


class TensorInfo(NamedTuple):
    """Where one tensor lies: ``begin`` and ``end`` count from the start of the data, `Header.data_start` bytes in."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def numpy_dtype(self, where: str) -> np.dtype:
        """Little-endian NumPy dtype; `CheckpointDTypeError` for packed 4- and 6-bit types, which NumPy cannot hold."""
        row = dtypes.SAFETENSORS[self.dtype]
        if row.dtype is None:
            raise CheckpointDTypeError(f"{where}: {self.dtype} elements are packed bits, which NumPy cannot hold")
        return row.dtype


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: tensors in the order of their bytes, the free text metadata, and where the data starts.

    ``sums`` are the checksums of the tensors, where the file has any (see ``tensor_sums``).
    """

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int
    file_nbytes: int
    sums: dict[str, int] | None = None
    sum: int = 0  # of the header itself

    def tensor(self, path: str, name: str) -> RawTensor:
        """A tensor of the file at ``path``; `CheckpointDTypeError` for packed bits, which NumPy cannot hold."""
        t = self.tensors[name]
        dtype, start = t.numpy_dtype(f"{path}: {name!r}"), self.data_start + t.begin
        return RawTensor(path, name, t.shape, dtype, start, self.file_nbytes, (self.sums or {}).get(name))


# ----- reading --------------------------------------------------------------------------------------------------------


class _InvalidHeader(ValueError):
    """Why a header is not valid; becomes `CorruptCheckpoint` once the file's name is known."""


def _integer(text: str) -> int | float:
    # "-0" is no unsigned integer either, and int() refuses more than 4300 digits: both become a float, hence not a
    # size.
    return float(text) if text.startswith("-") or len(text) > 20 else int(text)


def _check_text(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _InvalidHeader(f"{what} holds half of a surrogate pair (InvalidHeaderDeserialization)") from None


def _check_depth(value: Any) -> None:
    level, depth = [value], 2
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise _InvalidHeader(f"nested deeper than {_MAX_DEPTH} levels (InvalidHeaderDeserialization)")
        inner: list[Any] = []
        for v in level:
            if isinstance(v, dict):
                for k in v:
                    _check_text(k, "a key")
                inner += v.values()
            elif isinstance(v, list):
                inner += v
            elif isinstance(v, str):
                _check_text(v, "a text")
        level = inner


def _is_usize(x: Any) -> bool:
    return type(x) is int and 0 <= x < _USIZE


def _entry(name: str, e: Any) -> TensorInfo:
    bad = "(InvalidHeaderDeserialization)"
    if not isinstance(e, dict):
        raise _InvalidHeader(f"tensor {name!r} is not described by an object {bad}")
    if not e.keys() >= _ENTRY:
        raise _InvalidHeader(f"tensor {name!r} lacks {', '.join(sorted(_ENTRY - e.keys()))} {bad}")
    for key in e.keys() - _ENTRY if len(e) > 3 else ():
        _check_text(key, "a key")
        _check_depth(e[key])
    dtype, shape, offsets = e["dtype"], e["shape"], e["data_offsets"]
    if not isinstance(dtype, str) or dtype not in dtypes.SAFETENSORS:
        raise _InvalidHeader(f"tensor {name!r} has unknown dtype {dtype!r} {bad}")
    if not isinstance(shape, list) or not all(map(_is_usize, shape)):
        raise _InvalidHeader(f"tensor {name!r} has shape {str(shape)[:80]}, not a list of sizes {bad}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_usize, offsets)):
        raise _InvalidHeader(f"tensor {name!r} has data_offsets {str(offsets)[:80]}, not two sizes {bad}")
    return TensorInfo(dtype, tuple(shape), offsets[0], offsets[1])


def _check_tiling(tensors: list[tuple[str, TensorInfo]]) -> int:
    """Tensors in the order of offsets must tile the data, without hole or overlap. Returns where the last one ends."""
    position = 0
    for name, t in tensors:
        if t.begin != position or t.end < t.begin:
            raise _InvalidHeader(
                f"tensor {name!r} lies at [{t.begin}, {t.end}], expected it to start at {position} (InvalidOffset)"
            )
        position = t.end
        bits = 1
        for n in (*t.shape, dtypes.SAFETENSORS[t.dtype].bits):
            bits *= n
            if bits >= _USIZE:
                raise _InvalidHeader(f"tensor {name!r} of shape {t.shape} has too many elements (ValidationOverflow)")
        if bits % 8:
            raise _InvalidHeader(f"tensor {name!r}: {t.dtype} of shape {t.shape} ends inside a byte (MisalignedSlice)")
        if bits // 8 != t.nbytes:
            raise _InvalidHeader(
                f"tensor {name!r}: {t.dtype} of shape {t.shape} needs {bits // 8} bytes, its place has {t.nbytes} "
                "(TensorInvalidInfo)"
            )
        # The reference leaves these to its users; NumPy cannot make such an array.
        if len(t.shape) > 64 or any(n >= 1 << 63 for n in t.shape):
            raise _InvalidHeader(f"tensor {name!r} has shape {str(t.shape)[:80]}, which NumPy cannot hold")
    return position


def _check_count(raw: bytes) -> None:
    """Refuse a header with millions of texts that describe no tensors, before they are made: each takes ten times its
    length."""
    tensors = min(raw.count(b'"data_offsets"'), len(raw) // _LEAST_ENTRY)
    if (raw.count(b'"') - raw.count(b'\\"')) // 2 > 8 * tensors + 2 * MAX_METADATA:
        raise _InvalidHeader(f"more than {MAX_METADATA} entries of metadata")


def _parse(raw: bytes) -> tuple[dict[str, TensorInfo], dict[str, str], int]:
    _check_count(raw)
    try:
        text = raw.decode()
    except UnicodeDecodeError as e:
        raise _InvalidHeader(f"not UTF-8: {e} (InvalidHeader)") from None
    try:
        # Our own function for integers is called only where one may be of those that it tells apart.
        integer = _integer if _ODD_NUMBER.search(raw) else None
        top = strict_json.loads(text, unique=True, integer=integer)
    except RecursionError:
        raise _InvalidHeader(f"nested deeper than {_MAX_DEPTH} levels (InvalidHeaderDeserialization)") from None
    except ValueError as e:
        raise _InvalidHeader(f"not JSON as it should be: {e} (InvalidHeaderDeserialization)") from None
    if not isinstance(top, dict):
        raise _InvalidHeader("not a JSON object (InvalidHeaderDeserialization)")
    metadata = top.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _InvalidHeader("__metadata__ is not a map of texts (InvalidHeaderDeserialization)")
    for key, value in metadata.items():
        _check_text(key, "__metadata__")
        _check_text(value, "__metadata__")
    tensors = []
    for name, e in top.items():
        _check_text(name, "a name")
        tensors.append((name, _entry(name, e)))
    tensors.sort(key=lambda item: (item[1].begin, item[1].end))
    return dict(tensors), metadata, _check_tiling(tensors)


def parse_header(prefix: bytes, file_nbytes: int, where: str = "safetensors", *, verify: bool = True) -> Header:
    """Check the first bytes of a file (the length and the header) against the length of the whole file, and against its
    checksum if it has one.

    Raises `CorruptCheckpoint` naming ``where``.
    """
    try:
        n = _header_nbytes(prefix, file_nbytes)
        with no_collections():
            tensors, metadata, end = _parse(prefix[8 : 8 + n])
        if 8 + n + end != file_nbytes:
            raise _InvalidHeader(
                f"tensors end at byte {8 + n + end}, the file has {file_nbytes} (MetadataIncompleteBuffer)"
            )
        head = prefix[: 8 + n]
        if not verify:
            metadata.pop(tensor_sums.KEY, None)
            return Header(tensors, metadata, 8 + n, file_nbytes)
        sums = tensor_sums.of_header(head, metadata, len(tensors))
    except ValueError as e:
        raise CorruptCheckpoint(f"{where}: {e}") from None
    named = None if sums is None else dict(zip(tensors, sums, strict=True))
    return Header(tensors, metadata, 8 + n, file_nbytes, named, tensor_sums.own_sum(head))


def _header_nbytes(prefix: bytes, file_nbytes: int) -> int:
    if len(prefix) < 8:
        raise _InvalidHeader(f"{len(prefix)} bytes are too few for a safetensors file (HeaderTooSmall)")
    (n,) = struct.unpack("<Q", prefix[:8])
    if n > MAX_HEADER:
        raise _InvalidHeader(f"the header claims {n} bytes, at most {MAX_HEADER} are allowed (HeaderTooLarge)")
    if 8 + n > file_nbytes:
        raise _InvalidHeader(f"the header claims {n} bytes, the file has {file_nbytes} (InvalidHeaderLength)")
    return n


def read_header(path: str | os.PathLike[str], *, verify: bool = True) -> Header:
    """The checked header of a file, compared with its checksum where it has one and ``verify`` is true.

    Raises
    ------
    NotACheckpoint
        There is no file.
    CorruptCheckpoint
        It is not a valid safetensors file; names the file and what is wrong.
    """
    where = stores.location(path)
    store, name = stores.holding(where)
    try:
        with contextlib.closing(store.reader(name)) as reader:
            prefix, size = reader.part(0, _FIRST), reader.nbytes
            try:
                n = _header_nbytes(prefix, size)
            except _InvalidHeader as e:
                raise CorruptCheckpoint(f"{where}: {e}") from None
            rest = reader.part(len(prefix), max(0, 8 + n - len(prefix)))
            return parse_header(prefix + rest, size, where, verify=verify)
    except (FileNotFoundError, NotADirectoryError):
        raise NotACheckpoint(f"{where}: no such file") from None


@generations.once_more
@generations.one()
def load_safetensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read a whole file into NumPy arrays, with any dtype that NumPy and ml_dtypes have. Tensors with a checksum are
    compared with it. Where the file is replaced meanwhile, the read begins anew.

    >>> import tempfile, os
    >>> where = os.path.join(tempfile.mkdtemp(), "a.safetensors")
    >>> _ = save_safetensors(where, {"w": np.arange(3)})
    >>> load_safetensors(where)
    {'w': array([0, 1, 2])}
    """
    header, where = read_header(path), stores.location(path)
    tensors = [header.tensor(where, name) for name in header.tensors]
    out = {t.name: room(t.name, t.shape, t.dtype) for t in tensors}
    run((job for t in tensors for job in t.jobs(Box.whole(t.shape), out[t.name])), stores.holding(where)[0].readers)
    return out


# ----- writing --------------------------------------------------------------------------------------------------------


def build_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
    *,
    sums: bool = False,
) -> tuple[bytes, dict[str, TensorInfo]]:
    """The first bytes of a file that holds ``tensors`` (name, safetensors dtype, shape), and where each goes.

    ``sums``: with zeros in the place of checksums, for `tensor_sums.sealed`.
    """
    rows = [(name, dtype, tuple(shape)) for name, dtype, shape in tensors]
    names = [name for name, _, _ in rows]
    if odd := [n for n in names if not isinstance(n, str)]:
        raise CheckpointKeyError(f"names of tensors are texts, got {odd[0]!r}; str() makes one")
    if "__metadata__" in names:
        raise CheckpointKeyError("a tensor cannot be named '__metadata__': the format reserves that name")
    if len(set(names)) != len(names):
        raise CheckpointKeyError(f"names occur twice: {sorted({n for n in names if names.count(n) > 1})}")
    if metadata is not None:
        for k, v in metadata.items():
            if not isinstance(k, str) or not isinstance(v, str):
                raise CheckpointDTypeError(f"safetensors metadata maps texts to texts, got {k!r}: {v!r}")
    # The checksums of another file are not of this one.
    free = {k: v for k, v in (metadata or {}).items() if k != tensor_sums.KEY}
    if sums:  # readers that find metadata ask it for the format
        free = {"format": "pt", **free, tensor_sums.KEY: tensor_sums.text([0] * (1 + len(rows)))}
    rows_text = [f'"__metadata__":{json.dumps(free, separators=(",", ":"), ensure_ascii=False)}'] if free else []
    place: dict[str, TensorInfo] = {}
    forms: dict[Any, tuple[int, str]] = {}  # bytes and text that those which are alike share
    position = 0
    rows.sort(key=itemgetter(0))
    for name, dtype, shape in sorted(rows, key=lambda r: -dtypes.SAFETENSORS_RANK[r[1]]):
        if (form := forms.get((dtype, shape))) is None:
            bits = math.prod(shape) * dtypes.SAFETENSORS[dtype].bits
            if bits % 8:
                raise CheckpointDTypeError(f"{name!r}: {dtype} of shape {shape} ends inside a byte (MisalignedSlice)")
            text = f'{{"dtype":"{dtype}","shape":{sizes_text(shape)},"data_offsets":['
            form = forms[dtype, shape] = bits // 8, text
        end = position + form[0]
        place[name] = TensorInfo(dtype, shape, position, end)
        rows_text.append(f"{encode_basestring(name)}:{form[1]}{position},{end}]}}")
        position = end
    try:
        head = f"{{{','.join(rows_text)}}}".encode()
    except UnicodeEncodeError as e:
        raise CheckpointKeyError(f"a name holds half of a surrogate pair: {e}") from None
    head += b" " * (-len(head) % 8)
    if len(head) > MAX_HEADER:
        raise CheckpointError(f"the header has {len(head)} bytes, at most {MAX_HEADER} are allowed (HeaderTooLarge)")
    return struct.pack("<Q", len(head)) + head, place


@not_recording()  # what is stored needs no derivative
def save_safetensors(
    path: str | os.PathLike[str] | BinaryIO | socket.socket,
    tensors: Mapping[str, Any],
    *,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    checksums: bool = True,
) -> int:
    """Write arrays to one safetensors file, atomically: a kill leaves the old file or the new one.

    Parameters
    ----------
    path
        The file: a path, a URL, a connected socket, or a binary stream, which need not seek (a pipe or a
        `gzip.GzipFile` will do) and is not closed. At most a few megabytes are copied at a time, whatever the layout of
        the arrays.
    tensors
        Names and arrays (anything that `numpy.asarray` takes, or with ``__dlpack__``); any layout and byte order.
    metadata
        Texts for the header. Hugging Face loaders ask for ``{"format": "pt"}``, which is there with ``checksums``
        unless you give another.
    overwrite
        Replace an existing file; without it an existing file is `CheckpointExists`.
    checksums
        Put a crc32c of each tensor and of the header into the metadata, under ``meshtape.crc32c``: what meshtape loads
        whole is compared with them, and `verify` compares every byte. Without it the file is, byte for byte, what the
        reference implementation writes.

    Returns
    -------
    int
        The bytes of the file.

    Examples
    --------
    >>> import tempfile, os
    >>> where = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> _ = save_safetensors(where, {"w": np.ones((2, 3), np.float32)}, metadata={"format": "pt"})
    >>> read_header(where).tensors["w"]
    TensorInfo(dtype='F32', shape=(2, 3), begin=0, end=24)
    """
    if not (isinstance(path, (str, os.PathLike)) or hasattr(path, "write") or hasattr(path, "sendall")):
        raise CheckpointError(f"path is a path, a URL, a socket or a binary stream, got {path!r:.80}")
    mapping("metadata", metadata)
    if tensors is None:
        raise CheckpointError("tensors must be a mapping, such as a dict, got None")
    arrays = {name: np.asarray(taken(x, repr(name))) for name, x in mapping("tensors", tensors).items()}
    rows = [(name, dtypes.safetensors_name(a.dtype, repr(name), _FLAT), a.shape) for name, a in arrays.items()]
    head, place = build_header(rows, metadata, sums=checksums)
    if checksums:
        head = tensor_sums.sealed(head, [sum_of(pieces_of(arrays[name])) for name in place])
    nbytes = len(head) + sum(t.nbytes for t in place.values())
    body = joined(itertools.chain([head], itertools.chain.from_iterable(pieces_of(arrays[name]) for name in place)))
    if isinstance(path, (str, os.PathLike)):
        store, file = stores.holding(where := stores.location(path))
        store.refuse_writes()
        stores.refuse_folder(where)
        if not overwrite and store.size(file) is not None:
            raise CheckpointExists(f"{where} exists; pass overwrite=True to replace it")
        with atomic_directory.room_for(nbytes, where):
            store.put(file, body)
        return nbytes
    if isinstance(path, io.TextIOBase):
        raise CheckpointError("a stream of text takes no bytes: open it in binary mode ('wb')")
    for piece in body:
        view = memoryview(piece).cast("B")
        if not hasattr(path, "write"):
            path.sendall(view)
            continue
        while len(view):
            n = path.write(view)  # a raw stream may take less
            if not n:
                raise BlockingIOError(errno.EAGAIN, "the stream takes no more bytes")
            view = view[n:]
    return nbytes


def sum_of(pieces: Iterable[Any]) -> int:
    value = 0
    for piece in pieces:
        value = crc32c(piece, value)
    return value


def joined(pieces: Iterable[Any]) -> Iterator[Any]:
    """The same bytes in fewer pieces: short neighbours are copied into one, as separate writes take longer."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        nbytes = piece.nbytes if isinstance(piece, np.ndarray) else len(piece)
        if nbytes < _SHORT:
            held.append(piece.tobytes() if isinstance(piece, np.ndarray) else bytes(piece))
            size += nbytes
        if held and (nbytes >= _SHORT or size >= _JOINED):
            yield b"".join(held)
            held, size = [], 0
        if nbytes >= _SHORT:
            yield piece
    if held:
        yield b"".join(held)


def pieces_of(a: np.ndarray, limit: int = 8 << 20) -> Iterable[Any]:
    """The little-endian row-major bytes of an array: a copy where it is short, else as it is where it lies so, else
    copied a few megabytes at a time."""
    kind = dtypes.little(a.dtype)
    if a.nbytes < _SHORT:
        return ((a if a.dtype == kind else a.astype(kind)).tobytes(),)
    if a.flags.c_contiguous and a.dtype == kind:
        return (a.reshape(-1).view(np.uint8),)
    if a.nbytes <= limit or a.ndim == 0:
        return (np.ascontiguousarray(a, kind).reshape(-1).view(np.uint8),)
    rows = max(1, limit * a.shape[0] // a.nbytes)
    parts = (a[i : i + rows] if a.shape[0] > 1 else a[0] for i in range(0, a.shape[0], rows))
    return itertools.chain.from_iterable(pieces_of(part, limit) for part in parts)
