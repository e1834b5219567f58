"""The arrays of a manifest, and the rows that say where their shards lie: in files of their own, or in packs (see
``packs``)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import CorruptCheckpoint, IncompleteCheckpoint
from ...arrays.core.tree import Path
from ..base import names, strict_json
from ..base.malformed import malformed
from . import dtypes
from .chunk_grid import ChunkGrid, ShardPlace, place_of, sizes_text
from .chunk_sums import Section
from .compression import Compression, fits
from .zarr_format import dual_shard

FILE = "meshtape.json"


@dataclass(slots=True)  # not frozen, nor a tuple: there may be a hundred thousand, and those take longer to make
class StoredObject:
    """One file of an array: the part it holds, its length, and the checksum of its chunks' data."""

    file: str
    box: Box
    nbytes: int
    crc32c: int
    start: int = 0  # where it begins in its file
    file_nbytes: int = -1  # of a pack: the length of the whole file


class Pack(NamedTuple):
    """A safetensors file of the small blocks of many arrays: its length, and length and checksum of its header."""

    file: str
    nbytes: int
    header: int
    crc32c: int


@dataclass(slots=True, eq=False)
class ArrayEntry(Mapping[tuple[int, ...], StoredObject]):
    """An array in the manifest. ``sharding`` is one text for each axis of mesh number ``mesh``, or None for a local
    array.

    As a mapping it has its stored objects, by grid coordinate. A row is looked at when it is asked for: who reads a few
    blocks of a million pays for those. Rows lie in the order of coordinates; where one does not, all are looked through
    once.
    """

    path: Path
    directory: str
    grid: ChunkGrid
    dtype: np.dtype
    mesh: int | None = None
    sharding: list[str] | None = None
    raw_objects: list[Any] = field(default_factory=list)
    source: str = FILE
    compression: Compression = None
    sums: Section | None = None  # of its chunks, in the table of checksums
    zarr: int | None = None  # crc32c of its ``zarr.json``
    packs: Sequence[Pack] | None = None  # of a packed array: all packs, which its objects number; it has no directory
    dual: bool = False  # its files are safetensors files, too (see ``zarr_format``)
    delta: bool = False  # its files hold differences from the array of the same name in the manifest's base
    name: str = ""  # that of its path
    _elsewhere: dict[str, int] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.name = self.name or names.leaf_name(self.path)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.grid.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.grid.shape) * self.dtype.itemsize

    @property
    def _where(self) -> str:
        return f"{self.source}: array {self.name!r}"

    def __len__(self) -> int:
        return math.prod(self.grid.counts)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return self.grid.shards()

    def __getitem__(self, coord: tuple[int, ...]) -> StoredObject:
        place = place_of(self.grid, coord, self.dtype.itemsize)
        if self.packs is not None:
            return self._check_packed(place, coord)
        file, offset, shape, nbytes, value = self._row(place.number)
        if file != place.key:
            file, offset, shape, nbytes, value = self._row(self._find(place.key))
        box, start, fit = place.box, 0, nbytes == place.nbytes
        if self.dual:
            shard = dual_shard(self.name, self.dtype, self.grid, coord)
            fit, start = nbytes == shard.nbytes, len(shard.head)
        elif self.compression is not None:
            fit = fits(nbytes, self.grid, coord, self.dtype.itemsize, self.compression)
        if not fit or offset != box.offset or shape != box.shape:
            raise CorruptCheckpoint(f"{self._where}: file {file!r} does not have the place or length of its shard")
        return StoredObject(f"{self.directory}/{file}", box, nbytes, value, start)

    def _check_packed(self, at: ShardPlace, coord: tuple[int, ...]) -> StoredObject:
        row, packs, box = self.raw_objects[at.number], self.packs or (), at.box
        try:
            which, offset, shape, nbytes, crc, start = row
            if not type(which) is type(nbytes) is type(start) is int or which < 0 or nbytes < 0 or start < 0:
                raise ValueError
            pack, value, place = packs[which], int(crc, 16), (tuple(offset), tuple(shape))
        except (TypeError, ValueError, IndexError):
            raise CorruptCheckpoint(f"{self._where}: malformed object {str(row)[:120]}") from None
        fits_in = pack.header <= start and start + nbytes <= pack.nbytes
        if place != (box.offset, box.shape) or nbytes != at.size * self.dtype.itemsize or not fits_in:
            raise CorruptCheckpoint(
                f"{self._where}: its block {coord} does not have the place or length in {pack.file!r}"
            )
        return StoredObject(pack.file, box, nbytes, value, start, pack.nbytes)

    def _row(self, number: int) -> tuple[str, tuple[int, ...], tuple[int, ...], int, int]:
        row = self.raw_objects[number]
        try:
            file, offset, shape, nbytes, crc = row
            return file, tuple(offset), tuple(shape), nbytes, int(crc, 16)
        except (TypeError, ValueError):
            raise CorruptCheckpoint(f"{self._where}: malformed object {str(row)[:120]}") from None

    def _find(self, key: str) -> int:
        """The number of the row of a shard, in a list of another order."""
        if self._elsewhere is None:
            expected = {self.grid.key(c) for c in self}
            found: dict[str, int] = {}
            for number in range(len(self.raw_objects)):
                file = self._row(number)[0]
                if not isinstance(file, str) or file not in expected:
                    raise CorruptCheckpoint(f"{self._where}: file {file!r} is not one of its shards; refused")
                if file in found:
                    raise CorruptCheckpoint(f"{self._where}: file {file!r} is listed twice")
                found[file] = number
            self._elsewhere = found
        if key not in self._elsewhere:
            raise IncompleteCheckpoint(f"{self._where}: its shard {key} is not listed")
        return self._elsewhere[key]

    def text(self, forms: dict[Any, str]) -> str:
        """Its member of the manifest, as JSON. ``forms`` keeps the part that arrays which are alike share."""
        sharding = None if self.sharding is None else tuple(self.sharding)
        key = self.grid, self.dtype, self.dual, self.delta, self.compression, self.mesh, sharding
        if (form := forms.get(key)) is None:
            form = forms[key] = strict_json.compact(
                {
                    "shape": self.grid.shape,
                    "dtype": dtypes.short_name(self.dtype),
                    "shard": self.grid.shard,
                    "chunk": self.grid.chunk,
                    **({"dual": True} if self.dual else {}),
                    **({"delta": True} if self.delta else {}),
                    **({} if self.compression is None else {"compression": self.compression.plain()}),
                    "nbytes": self.nbytes,
                    "mesh": self.mesh,
                    "sharding": sharding,
                }
            )[1:-1]
        path = ",".join([quoted(k) if isinstance(k, str) else str(k) for k in self.path])
        place = '"packed":true' if self.packs is not None else f'"dir":{quoted(self.directory)}'
        sums = "" if self.sums is None else f',"sums":[{self.sums[0]},"{self.sums[1]:08x}"]'
        zarr = "" if self.zarr is None else f',"zarr":"{self.zarr:08x}"'
        rows = ",".join([_row_text(*row) for row in self.raw_objects])
        return f'{{"path":[{path}],{place},{form}{sums}{zarr},"objects":[{rows}]}}'


def _row_text(
    where: str | int, offset: tuple[int, ...], shape: tuple[int, ...], nbytes: int, crc: str, *start: int
) -> str:
    first, last = (quoted(where), "") if isinstance(where, str) else (where, f",{start[0]}")
    return f'[{first},{sizes_text(tuple(offset))},{sizes_text(tuple(shape))},{nbytes},"{crc}"{last}]'


def pack_of(row: Any, source: str) -> Pack:
    """A row of the manifest, checked."""
    with malformed(f"{source}: malformed pack {str(row)[:120]}"):
        file, nbytes, header, crc = row
        if not (type(nbytes) is type(header) is int and 8 <= header <= nbytes < 1 << 62):
            raise ValueError(f"{header} of {nbytes} bytes")
        if "/" in names.inside("/", file, source)[1:]:
            raise ValueError(f"{file!r} is not one name")
        if not file.endswith(".safetensors"):
            raise ValueError(f"{file!r} is not a safetensors file")
        return Pack(file, nbytes, header, int(crc, 16))
