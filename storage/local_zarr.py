"""zarr-python's store of local files, kept inside of the directory: a link that leads out of it is refused, as everywhere else."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Any

from zarr.storage import LocalStore

from ..arrays.errors import CorruptCheckpoint
from . import names


class InsideStore(LocalStore):
    """Reads what lies below ``root``. This module imports zarr, so it is loaded where a hierarchy is opened."""

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
        return await super().get(key, *args, **kwargs)

    def get_sync(self, key: str, *args: Any, **kwargs: Any) -> Any:
        self._check(key)
        return super().get_sync(key, *args, **kwargs)

    async def get_partial_values(self, prototype: Any, key_ranges: Any) -> Any:
        key_ranges = list(key_ranges)
        for key, _ in key_ranges:
            self._check(key)
        return await super().get_partial_values(prototype, key_ranges)
