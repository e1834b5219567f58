"""`CheckpointStore`: a checkpoint as a store of zarr-python. This module imports zarr, so it is loaded where such a
store is made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import numpy as np
from zarr.abc.store import ByteRequest

from ...arrays.core.errors import StoreError
from ..readers.zarr_store import ReadOnlyStore, span
from .virtual_files import read
from .zarr_view import ZarrView


class CheckpointStore(ReadOnlyStore):
    """The keys of a `ZarrView`. Nothing is copied, and nothing can be written."""

    supports_listing = True

    def __init__(self, view: ZarrView) -> None:
        super().__init__(read_only=True)
        self._view = view

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckpointStore) and other._view is self._view

    def __hash__(self) -> int:
        return id(self._view)

    def __repr__(self) -> str:
        return f"CheckpointStore({self._view.ckpt.path!r})"

    def with_read_only(self, read_only: bool = False) -> CheckpointStore:
        return self if read_only else self.refuse()

    async def get(self, key: str, prototype: Any, byte_range: ByteRequest | None = None) -> Any:
        data = await asyncio.to_thread(self._read, key, byte_range)
        return None if data is None else prototype.buffer.from_array_like(data)

    def _read(self, key: str, part: ByteRequest | None) -> np.ndarray | None:
        file = self._view.find(key)
        if file is None:
            return None
        start, stop = span(part, file.nbytes)
        return read(file, start, stop) if start < stop else np.empty(0, np.uint8)

    async def exists(self, key: str) -> bool:
        return self._view.find(key) is not None

    async def getsize(self, key: str) -> int:
        file = self._view.find(key)
        if file is None:
            raise FileNotFoundError(key)
        return file.nbytes

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for key in self._view.every_key():
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        start, seen = f"{prefix.rstrip('/')}/" if prefix.rstrip("/") else "", set()
        for key in self._view.every_key():
            name = key.removeprefix(start).partition("/")[0]
            if key.startswith(start) and name not in seen:
                seen.add(name)
                yield name

    def refuse(self) -> NoReturn:
        raise StoreError(
            f"{self._view.ckpt.path} is shown as Zarr, and can only be read; save or convert writes a checkpoint"
        )
