"""`ServedCheckpoint`: the files of a checkpoint by the path of a request, below ``safetensors/`` and ``zarr/``."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ...arrays.core.errors import CheckpointReplaced
from ..checkpoint.checkpoint import Checkpoint
from ..loading.open import open_checkpoint
from .safetensors_view import safetensors_files
from .virtual_files import TextFile, VirtualFile
from .zarr_view import FILE, ZarrView


@dataclass(frozen=True)
class Found:
    """A file and its ETag; or a folder, with the names in it."""

    file: VirtualFile | None = None
    etag: str = ""
    names: tuple[str, ...] = ()


class _Generation:
    """The views of one generation of a checkpoint."""

    def __init__(self, ckpt: Checkpoint) -> None:
        self.ckpt = ckpt
        self.zarr = ZarrView(ckpt)
        self._mark = hashlib.sha256(repr(sorted(ckpt.generation.tags.items())).encode())

    @cached_property
    def safetensors(self) -> dict[str, VirtualFile]:
        return safetensors_files(self.ckpt)

    def etag(self, path: str) -> str:
        mark = self._mark.copy()
        mark.update(path.encode())
        return f'"{mark.hexdigest()[:24]}"'

    def find(self, path: str) -> Found | None:
        top, _, below = path.partition("/")
        if not path:
            return Found(names=("safetensors/", "zarr/"))
        if top not in ("safetensors", "zarr"):
            return None
        if not below:
            return Found(names=tuple(self._names(top)))
        file = self.safetensors.get(below) if top == "safetensors" else self.zarr.find(below)
        if file is None:
            folder = below.rstrip("/")
            return Found(names=(FILE,)) if top == "zarr" and self.zarr.has_folder(folder) else None
        return Found(file, self.etag(path))

    def _names(self, top: str) -> Iterator[str]:
        if top == "safetensors":
            yield from self.safetensors
        else:
            yield FILE
            yield from (f"{folder}/" for folder in self.zarr.nodes)


class ServedCheckpoint:
    """A checkpoint that is opened anew where another has taken its place."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._held: _Generation | None = _Generation(open_checkpoint(path))

    def find(self, path: str) -> Found | None:
        """The file of a path. What describes arrays (a header, an index, metadata) is of the checkpoint that lies there now."""
        with self._lock:
            held = self._held = self._held or _Generation(open_checkpoint(self.path))
        found = held.find(path)
        if found is not None and (found.file is None or isinstance(found.file, TextFile)):
            try:
                held.ckpt.generation.check()
            except CheckpointReplaced:
                self.forget(held)
                return self.find(path)
        return found

    def forget(self, held: object = None) -> None:
        """Open the checkpoint anew for the next request."""
        with self._lock:
            if held is None or held is self._held:
                self._held = None
