"""The archives and the metadata that ``torch.distributed.checkpoint`` reads, laid out before the elements are known;
written without PyTorch.

A chunk of a tensor, or a value, is a zip archive as of ``torch.save``. The CRC32 of the elements stands behind them, so
that archives can be written in one pass and resumed. Lengths are multiples of 64 bytes: elements lie aligned in the
file. ``.metadata`` has, in a field of free text, the crc32c of every archive and its own (see ``tensor_sums``).
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import CheckpointDTypeError, CheckpointKeyError
from ..base.names import leaf_name
from ..format import dtypes, tensor_sums
from ..format.manifest import Leaf
from .dcp import LOCAL_HEADER, STORAGES
from .torch_pickle import KNOWN, Persistent, PickledName, PickledObject, dumps

ALIGNMENT = 64
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_EXTRA = struct.Struct("<2sH")
_DAY = 33  # the first of 1980, from which zip counts
_METADATA = "torch.distributed.checkpoint.metadata"
_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items()}


@dataclass(frozen=True, slots=True)
class Archive:
    """The place of an archive: ``head``, ``nbytes`` of elements (of a tensor's ``box``; a value has none), tail."""

    name: str
    head: bytes
    rows: tuple[tuple[bytes, int, int, int], ...]  # (name, CRC32, size, place) of the entries in the head
    box: Box | None = None
    nbytes: int = 0
    file: str = ""
    offset: int = 0

    @property
    def total(self) -> int:
        return len(self.head) + self.nbytes + len(self.tail(0))

    @property
    def start(self) -> int:
        """The first element's place in the file."""
        return self.offset + len(self.head)

    def at(self, file: str, offset: int) -> Archive:
        return replace(self, file=file, offset=offset)

    def tail(self, crc32: int) -> bytes:
        """The bytes behind the elements, whose CRC32 is given."""
        out = b"" if self.box is None else struct.pack("<4s3I", b"PK\x07\x08", crc32, self.nbytes, self.nbytes)
        start = len(self.head) + self.nbytes + len(out)
        central = b""
        for name, crc, size, place in self.rows:
            streamed = crc < 0
            crc, size = (crc32, self.nbytes) if streamed else (crc, size)
            last = name == self.rows[-1][0]
            used = start + len(central) + _CENTRAL.size + len(name) + _EXTRA.size + _END.size
            extra = _padding(-used % ALIGNMENT) if last else b""
            sizes = (crc, size, size, len(name), len(extra), 0, 0, 0, 0, place)
            central += _CENTRAL.pack(b"PK\x01\x02", 20, 20, 8 * streamed, 0, 0, _DAY, *sizes) + name + extra
        return out + central + _END.pack(b"PK\x05\x06", 0, 0, len(self.rows), len(self.rows), len(central), start, 0)


def _padding(nbytes: int) -> bytes:
    return _EXTRA.pack(b"FB", nbytes) + bytes(nbytes)


def _archive(name: str, text: bytes, box: Box | None, nbytes: int) -> Archive:
    head, rows = b"", []
    entries = {"data.pkl": text, "byteorder": b"little", "version": b"3\n"}
    for entry, data in {**entries, **({} if box is None else {"data/0": None})}.items():
        file = f"archive/{entry}".encode()
        crc, size = (-1, 0) if data is None else (zlib.crc32(data), len(data))
        used = len(head) + LOCAL_HEADER.size + len(file) + _EXTRA.size
        extra = _padding(-used % ALIGNMENT) if data is None else b""
        rows.append((file, crc, size, len(head)))
        fields = (8 * (data is None), 0, 0, _DAY, max(crc, 0), size, size, len(file), len(extra))
        head += LOCAL_HEADER.pack(b"PK\x03\x04", 20, *fields) + file + extra + (data or b"")
    return Archive(name, head, tuple(rows), box, nbytes)


def of_value(name: str, value: Any) -> Archive:
    """The archive of a plain value."""
    return _archive(name, dumps(value), None, 0)


def of_chunk(name: str, dtype: np.dtype, box: Box) -> Archive:
    """The archive of a chunk of a tensor; `CheckpointDTypeError` for a dtype that PyTorch lacks."""
    count, shape = math.prod(box.shape), box.shape
    strides = tuple(math.prod(max(n, 1) for n in shape[d + 1 :]) for d in range(len(shape)))
    legacy = _STORAGE_OF.get(dtype.name)
    kind = PickledName(legacy or "torch.storage.UntypedStorage")
    storage = Persistent(("storage", kind, "0", "cpu", count if legacy else count * dtype.itemsize))
    args: tuple[Any, ...] = (storage, 0, shape, strides, False, PickledObject("collections.OrderedDict", ()))
    args += () if legacy else (torch_dtype(dtype, name),)
    made = PickledObject(f"torch._utils._rebuild_tensor_v{2 if legacy else 3}", args)
    return _archive(name, dumps(made), box, count * dtype.itemsize)


def torch_dtype(dtype: np.dtype, name: str) -> PickledName:
    """The name of a dtype in PyTorch."""
    dtypes.by_name(dtype)
    if f"torch.{dtype.name}" not in KNOWN:
        raise CheckpointDTypeError(f"key {name!r}: PyTorch has no dtype {dtype}; cast it by a rule")
    return PickledName(f"torch.{dtype.name}")


def flattened(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """(path, `Leaf` or value) as ``flatten_state_dict`` of PyTorch has them: a list without arrays and dicts is one
    value.

    >>> list(flattened({"a": [{"b": 1}, None], "betas": [0.9, 0.99]}))
    [(('a', 0, 'b'), 1), (('a', 1), None), (('betas',), [0.9, 0.99])]
    """
    if isinstance(tree, dict):
        for k, v in tree.items():
            yield from flattened(v, (*path, str(k)))
    elif isinstance(tree, (list, tuple)) and _has_more(tree):
        for i, v in enumerate(tree):
            yield from flattened(v, (*path, i if path else str(i)))
    else:
        yield path or ("",), tree


def entries(tree: Any, stored: Sequence[str], where: str) -> tuple[dict[str, tuple[str | int, ...]], dict[str, Any]]:
    """(path by name of all that a tree holds, the values by name); ``stored`` are the names of its arrays."""
    paths: dict[str, tuple[str | int, ...]] = {}
    values: dict[str, Any] = {}
    for path, value in flattened(tree):
        name = stored[value.index] if isinstance(value, Leaf) else leaf_name(path)
        if name in paths:
            raise CheckpointKeyError(f"{where}: two entries are called {name!r}; leave one out with drop=")
        paths[name] = path
        if not isinstance(value, Leaf):
            values[name] = value
    return paths, values


def _has_more(tree: Iterable[Any]) -> bool:
    return any(isinstance(v, (dict, Leaf)) or (isinstance(v, (list, tuple)) and _has_more(v)) for v in tree)


def metadata(
    paths: Mapping[str, tuple[str | int, ...]],
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    archives: Iterable[tuple[Archive, int]],
) -> bytes:
    """The file ``.metadata``: path, and shape and dtype, by name; archives with their crc32c."""
    held = list(archives)
    chunks: dict[str, list[Any]] = {}
    stored: dict[Any, Any] = {}
    for a, _ in held:
        box = a.box
        index: dict[str, Any] = {"fqn": a.name}
        if box is not None:
            found = chunks.setdefault(a.name, [])
            index |= {"index": len(found), "offset": _size(box.offset)}
            found.append(_object("ChunkStorageMetadata", {"offsets": _size(box.offset), "sizes": _size(box.shape)}))
        place = {"relative_path": a.file, "offset": a.offset, "length": a.total}
        stored[_object("MetadataIndex", index)] = PickledObject(
            "torch.distributed.checkpoint.filesystem._StorageInfo", (), place
        )
    layout = PickledObject("torch.serialization._get_layout", ("torch.strided",))
    form = PickledObject(f"{_METADATA}._MEM_FORMAT_ENCODING", (0,))
    described: dict[str, Any] = {}
    for name in paths:
        if name not in tensors:
            described[name] = PickledObject(f"{_METADATA}.BytesStorageMetadata", ())
            continue
        shape, dtype = tensors[name]
        # Without strides, as before PyTorch 2.10: later ones read this too.
        properties = _object("TensorProperties", (torch_dtype(dtype, name), layout, False, form, False))
        entry = {"properties": properties, "size": _size(shape), "chunks": chunks[name]}
        described[name] = _object("TensorStorageMetadata", entry)
    sums = tensor_sums.text([0, *(crc for _, crc in held)])
    text = json.dumps({tensor_sums.KEY: sums})
    about = {"checkpoint_id": None, "save_id": text, "load_id": None, "modules": []}
    top = {"state_dict_metadata": described, "planner_data": dict(paths), "storage_data": stored}
    top |= {"storage_meta": _object("StorageMeta", about), "version": "1.0.0"}
    return tensor_sums.sealed(dumps(_object("Metadata", top)), [crc for _, crc in held])


def _object(name: str, state: Any) -> PickledObject:
    return PickledObject(f"{_METADATA}.{name}", (), state)


def _size(shape: tuple[int, ...]) -> PickledObject:
    return PickledObject("torch.Size", (shape,))
