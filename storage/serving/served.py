"""`ServedCheckpoint`: the files of a checkpoint by the path of a request, below ``safetensors/`` and ``zarr/``."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from dataclasses import dataclass
from functools import cached_property

from ...arrays.core.errors import CheckpointDTypeError, CheckpointError, CheckpointReplaced
from ..checkpoint.checkpoint import Checkpoint
from ..format import dtypes
from ..format.documents import Documents
from ..format.hf_index import HF_INDEX, HF_SINGLE
from ..loading.open import open_checkpoint
from ..readers.raw_tensor import PackedTensor, RawTensor
from ..readers.safetensors import build_header
from ..rules.lazy_tensors import InMemoryTensor
from ..stores import store as stores
from ..stores.generations import NONE, Generation
from ..transform.convert import treating_missing
from .virtual_files import JoinedFile, TensorFile, VirtualFile, file_of, text_file
from .zarr_view import ZarrView


def _real(ckpt: Checkpoint) -> dict[str, TensorFile]:
    """The very files of a safetensors file or a Hugging Face directory; none of all others, and of a part of one."""
    if ckpt.kind not in ("safetensors", "Hugging Face") or not ckpt.whole:
        return {}
    held = {t.path: t.file_nbytes for a in ckpt.arrays.values() if isinstance(t := a.tensor, RawTensor)}
    start = len(stores.join(ckpt.path, ""))
    by_name = {HF_SINGLE if ckpt.kind == "safetensors" else path[start:].lstrip("/"): path for path in held}
    return {name: file_of(path, held[path], ckpt.generation.of(path)) for name, path in by_name.items()}


def _rows(ckpt: Checkpoint) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of all arrays, of which one file is made. `CheckpointDTypeError` names an array whose dtype
    safetensors lacks."""
    tensors = {n: a.tensor for n, a in ckpt.arrays.items() if not isinstance(a.tensor, PackedTensor)}
    return [(n, dtypes.safetensors_name(t.dtype, f"key {n!r}"), t.shape) for n, t in tensors.items()]


def _virtual(ckpt: Checkpoint) -> VirtualFile:
    """One file with all arrays."""
    head, place = build_header(_rows(ckpt), {"format": "pt"})
    return JoinedFile([text_file(head), *(TensorFile(ckpt.arrays[n].tensor) for n in place)])


def safetensors_files(ckpt: Checkpoint) -> dict[str, VirtualFile]:
    """The files by name: weights, their index, and the documents beside them."""
    real = _real(ckpt)
    by_path = {file.tensor.name: name for name, file in real.items()}
    files: dict[str, VirtualFile] = {**real} or {HF_SINGLE: _virtual(ckpt)}
    names = {n: by_path.get(getattr(a.tensor, "path", ""), HF_SINGLE) for n, a in ckpt.arrays.items()}
    index = {"metadata": {"total_size": ckpt.nbytes}, "weight_map": names}
    files[HF_INDEX] = text_file((json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
    if isinstance(ckpt.documents, Documents):
        files |= {name: text_file(data) for name, data in ckpt.documents.every().items() if name not in files}
    return files


@dataclass(frozen=True)
class Found:
    """A file and its ETag; or a folder, with the names in it."""

    file: VirtualFile | None = None
    etag: str = ""
    names: tuple[str, ...] = ()


class _Generation:
    """The views of one generation of a checkpoint."""

    def __init__(self, given: str | Checkpoint, missing: str) -> None:
        self.ckpt = ckpt = open_checkpoint(given)
        if ckpt is not given:
            with stores.listed_once():
                for array in treating_missing(ckpt, missing).arrays.values():
                    array.check()
        self.zarr = ZarrView(ckpt)
        told = [self.zarr.lost] if self.zarr.lost else []
        try:
            if not _real(ckpt):
                _rows(ckpt)
        except CheckpointDTypeError as e:
            told.append(f"safetensors/ is not there: {e}")
        self.lost = "\n".join(told)
        # Elements tell of their own files, and none of the documents that say how they are computed.
        self.documents = NONE if ckpt.computed is None else Generation(ckpt.generation.of_files())
        # Of the same files, parts and sums differ that are given open.
        salt = os.urandom(16) if given is ckpt else b""
        self._mark = hashlib.sha256(repr(sorted(ckpt.generation.tags.items())).encode() + salt)

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
        if not below and top == "safetensors":
            return Found(names=tuple(self.safetensors))
        file = self.safetensors.get(below) if top == "safetensors" else self.zarr.find(below)
        if file is None:
            names = self.zarr.names(below.rstrip("/")) if top == "zarr" else ()
            return Found(names=names) if names else None
        return Found(file, self.etag(path))


class ServedCheckpoint:
    """A checkpoint as it was at the start; or, to ``follow``, opened anew where another has taken its place."""

    def __init__(
        self, given: str | os.PathLike[str] | Checkpoint, follow: bool = False, missing: str = "error"
    ) -> None:
        if missing not in ("error", "fill"):
            raise CheckpointError(f"missing is 'error' or 'fill', got {missing!r}")
        self._given = given if isinstance(given, Checkpoint) else stores.location(given)
        self.path = given.path if isinstance(given, Checkpoint) else str(self._given)
        self.follow, self._missing = follow and not isinstance(given, Checkpoint), missing
        self._lock = threading.Lock()
        self._held: _Generation | None = _Generation(self._given, missing)
        self.skipped, self.lost = self._held.zarr.skipped, self._held.lost

    def find(self, path: str) -> Found | None:
        """The file of a path. What describes arrays (a header, an index, metadata) is of the checkpoint that lies there
        now."""
        with self._lock:
            held = self._held = self._held or _Generation(self._given, self._missing)
        found = held.find(path)
        text = isinstance(getattr(found and found.file, "tensor", None), InMemoryTensor)
        if found is not None:
            try:
                (held.ckpt.generation if found.file is None or text else held.documents).check()
            except CheckpointReplaced:
                if not self.follow:
                    raise
                self.forget(held)
                return self.find(path)
        return found

    def forget(self, held: object = None) -> None:
        """Open the checkpoint anew for the next request, where it is followed."""
        with self._lock:
            if self.follow and (held is None or held is self._held):
                self._held = None
