"""A location as zarr-python's store: reads have our retries and errors, and no link leads out of a directory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeVar

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store

from ..base import names
from ..base.waiting import begin
from ..stores import store as stores
from .local_zarr import Keys

T = TypeVar("T")


async def awaited(work: Callable[[], T]) -> T:
    """``asyncio.to_thread``, for whose threads the end of the process does not wait."""
    return await asyncio.wrap_future(begin(work))


class ReadOnlyStore(Store):
    """Base of stores whose keys are never written."""

    supports_writes = supports_deletes = False

    def refuse(self) -> None:
        """Raise for a call that would write."""
        raise NotImplementedError

    async def get_partial_values(self, prototype: Any, key_ranges: Iterable[tuple[str, ByteRequest | None]]) -> Any:
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def set(self, key: str, value: Any) -> None:
        self.refuse()

    async def delete(self, key: str) -> None:
        self.refuse()

    async def list(self) -> AsyncIterator[str]:
        async for key in self.list_prefix(""):
            yield key


def span(part: ByteRequest | None, nbytes: int) -> tuple[int, int]:
    """(start, stop) of what zarr asks of an object of that length."""
    if isinstance(part, RangeByteRequest):
        return part.start, min(part.end, nbytes)
    if isinstance(part, OffsetByteRequest):
        return part.offset, nbytes
    return 0 if part is None else max(0, nbytes - part.suffix), nbytes


class PlaceStore(ReadOnlyStore):
    """Reads objects below a location. This module imports zarr, so it is loaded where a hierarchy is opened."""

    def __init__(self, root: str) -> None:
        super().__init__(read_only=True)
        self._root = root
        self.keys = Keys()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlaceStore) and other._root == self._root

    def __hash__(self) -> int:
        return hash(self._root)

    def __repr__(self) -> str:
        return f"PlaceStore({self._root!r})"

    @property
    def supports_listing(self) -> bool:
        return stores.at(self._root).lists

    async def get(self, key: str, prototype: Any, byte_range: ByteRequest | None = None) -> Any:
        data = await awaited(lambda: self._read(key, byte_range))
        return self.keys.whole(key, None if data is None else prototype.buffer.from_bytes(data), byte_range)

    def _read(self, key: str, part: ByteRequest | None) -> bytes | None:
        store = stores.at(self._root)
        if key:
            names.inside(self._root, key, self._root)
        try:
            if part is None:
                return store.get(key)
            with contextlib.closing(store.reader(key)) as reader:
                start, stop = span(part, reader.nbytes)
                return reader.part(start, max(0, stop - start))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def refuse(self) -> None:
        stores.at(self._root).refuse_writes()

    async def exists(self, key: str) -> bool:
        return await awaited(lambda: stores.at(self._root).size(key)) is not None

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        folder = prefix.rpartition("/")[0]
        for entry in await awaited(lambda: list(stores.at(self._root).entries(folder))):
            if entry.name.startswith(prefix):
                yield entry.name

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        store = stores.at(stores.join(self._root, prefix.rstrip("/")) if prefix.rstrip("/") else self._root)
        for name in await awaited(lambda: [*store.files(), *store.folders()]):
            yield name
