"""`verify` for checkpoints that are not in our Zarr format: each tensor checks itself, where its file has checksums."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from ...arrays.core.errors import CheckpointError, CorruptCheckpoint
from ...arrays.core.formatting import count, some
from ..checkpoint.checkpoint import Checkpoint
from ..foreign.icechunk import IcechunkTensor
from ..format.documents import Documents
from ..format.zarr_format import DUAL_INDEX
from ..readers.dual_tensor import DualTensor
from ..readers.raw_tensor import RawTensor
from ..readers.reading import run
from ..readers.safetensors import read_header
from ..readers.zarr_tensor import GridTensor
from ..stores import store
from .read_ahead import reading_ahead

MEMORY = 64 << 20  # bytes of small tensors that are fetched together


def noting(faults: list[str], work: Iterable[Callable[[], int]]) -> list[Callable[[], int]]:
    """Calls that add the damage that they find to ``faults``."""

    def noted(call: Callable[[], int]) -> int:
        try:
            return call()
        except CorruptCheckpoint as e:
            faults.append(str(e))
            return 0

    return [partial(noted, call) for call in work]


def refuse(path: str, faults: list[str], what: str) -> None:
    """Raise `CorruptCheckpoint` with all that is damaged."""
    if faults:
        shown = "\n  ".join(sorted(faults)[:20])
        raise CorruptCheckpoint(f"{path}: {len(faults)} damaged {what}:\n  {shown}")


def _of_indexes(tensors: Iterable[Any]) -> list[Callable[[], int]]:
    """Checks of the Zarr index in each file of layout "dual", which is no array of the checkpoint."""
    raw = {t.path: t for t in tensors if isinstance(t, RawTensor)}
    found = [(t, header) for t in raw.values() if DUAL_INDEX in (header := read_header(t.path)).tensors]
    return [header.tensor(t.path, DUAL_INDEX).bound(t.generation).verify for t, header in found if header.sums]


def verify_others(ckpt: Checkpoint, root: str, lenient: bool = False) -> tuple[set[str], int]:
    """(names of files below ``root``, bytes) that were compared with their checksums.

    Raises `CorruptCheckpoint` with all that is damaged, and unless ``lenient`` `CheckpointError` for what has no
    checksums. Of Zarr by others, `IncompleteCheckpoint` where chunks are not there.
    """
    ahead = reading_ahead(ckpt, MEMORY)
    tensors: list[Any] = [a.tensor for a in ckpt.arrays.values()]
    ahead.expect(tensors)
    with store.listed_once():
        for t in tensors:
            if isinstance(t, GridTensor):
                replace(t, missing="error").check()
            elif isinstance(t, (IcechunkTensor, DualTensor)):
                t.check()
    bare = [t for t in tensors if not getattr(t, "summed", False)]
    if bare and len(bare) == len(tensors) and not lenient:
        raise CheckpointError(
            f"{ckpt.path} ({ckpt.kind}) has no checksums to verify; nothing tells whether it is whole"
        )
    files, extra, faults = ckpt.documents.compare() if isinstance(ckpt.documents, Documents) else (set(), 0, [])
    held = [t for t in tensors if t not in bare] if bare else tensors
    work: list[Callable[[], int]] = _of_indexes(held)
    for t in held:
        chunked = isinstance(t, (IcechunkTensor, DualTensor))
        work += [partial(t.verify_chunk, c) for c in t.objects] if chunked else [t.verify]
        work += [lambda t=t: len(t.said)] if isinstance(t, DualTensor) else []  # which is compared
    nbytes = run(noting(faults, work), max((t.readers for t in held), default=1))
    refuse(ckpt.path, faults, "tensors or documents")
    if bare and not lenient:
        raise CheckpointError(
            f"{ckpt.path}: {len(bare):,} of {count(len(tensors), 'tensor')} without checksums; the others are whole: "
            f"{some(t.name for t in bare)}"
        )
    return files | {f.removeprefix(store.join(root, "")) for t in held for f in t.files}, nbytes + extra
