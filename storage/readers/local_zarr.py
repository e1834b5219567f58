"""zarr-python's stores, which here know the dtypes that TensorStore writes to Zarr v2. That of local files is kept inside of the directory: a link that leads out of it is refused, as everywhere else."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from typing import Any

import numpy as np
from zarr import storage

from ...arrays.core.errors import CorruptCheckpoint
from ..base import names
from ..format import dtypes


def extension(metadata: Any) -> np.dtype | None:
    """The dtype of an array of Zarr v2 that zarr-python does not know by its name, as TensorStore writes it."""
    name = metadata.get("dtype") if isinstance(metadata, dict) else None
    return dtypes.by_name(name) if isinstance(name, str) and name in dtypes.EXTENSIONS else None


def known(key: str, held: Any) -> Any:
    """Metadata of Zarr v2 with such a dtype says the integers of the same width instead, as which `ZarrTensor` reads it."""
    if held is None or not key.endswith(".zarray"):
        return held
    with contextlib.suppress(ValueError, TypeError):
        said = json.loads(held.to_bytes())
        dtype = extension(said)
        if dtype is not None:
            bits = dtypes.bits(dtype)
            fill = said.get("fill_value")
            said["fill_value"] = 0 if fill is None else int(np.array(float(fill), dtype).view(bits))
            said["dtype"] = bits.str
            return type(held).from_bytes(json.dumps(said).encode())
    return held


class ObjectStore(storage.ObjectStore):
    async def get(self, key: str, *args: Any, **kwargs: Any) -> Any:
        return known(key, await super().get(key, *args, **kwargs))


class InsideStore(storage.LocalStore):
    """Reads files below ``root``. This module imports zarr, so it is loaded where a hierarchy is opened."""

    def __init__(self, root: str) -> None:
        super().__init__(root, read_only=True)

    def _check(self, key: str) -> None:
        if key:
            path = names.inside(str(self.root), key, str(self.root))
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for
                    raise CorruptCheckpoint(f"{path} is no file")

    async def get(self, key: str, *args: Any, **kwargs: Any) -> Any:
        self._check(key)
        return known(key, await super().get(key, *args, **kwargs))

    def get_sync(self, key: str, *args: Any, **kwargs: Any) -> Any:
        self._check(key)
        return known(key, super().get_sync(key, *args, **kwargs))

    async def get_partial_values(self, prototype: Any, key_ranges: Any) -> Any:
        key_ranges = list(key_ranges)
        for key, _ in key_ranges:
            self._check(key)
        return await super().get_partial_values(prototype, key_ranges)
