"""`merge`: any checkpoint as a Hugging Face directory of safetensors, in bounded memory.

The result is what Hugging Face tools write and read: ``model.safetensors``, or ``model-00001-of-0000N.safetensors``, and
always ``model.safetensors.index.json``. Each file's header says ``{"format": "pt"}``: transformers refuses files whose
format is none of the frameworks that it knows, and it does not know NumPy.

Memory is bounded by `WINDOW`: an array passes through it in boxes of whole chunks, each checked, then written to its place.
"""

# Paths are plain texts here: they come from manifests and go to system calls.

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ..arrays.errors import CheckpointError, CheckpointKeyError, CorruptCheckpoint
from . import commit, dtypes, safetensors
from .files import IOV_MAX, Files, active
from .grid import runs, windows
from .loading import select
from .manifest import FILE, scalar_leaves
from .names import leaf_name
from .opened import HF_INDEX, StoredArray, open_checkpoint
from .tensors import read_box

WINDOW = 64 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class MergeReport:
    """What a merge wrote. ``skipped`` lists leaves that are values, not arrays: safetensors has no place for them."""

    path: str
    arrays: int
    files: list[str]
    total_size: int
    skipped: list[str]
    seconds: float


def split_files(sizes: Iterable[tuple[str, int]], limit: int | None) -> list[list[str]]:
    """Names for each file: in order, a new file where the limit would be passed. A larger array has a file of its own.

    >>> split_files([("a", 6), ("b", 6), ("c", 2), ("d", 6), ("e", 2), ("f", 2)], 10)
    [['a'], ['b', 'c'], ['d', 'e', 'f']]
    """
    out: list[list[str]] = [[]]
    used = 0
    for name, n in sizes:
        if limit is not None and out[-1] and used + n > limit:
            out.append([])
            used = 0
        out[-1].append(name)
        used += n
    return out


def merge(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    max_shard_bytes: int | None = None,
    keys: Iterable[str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> MergeReport:
    """Write a checkpoint as a Hugging Face directory, streaming.

    Parameters
    ----------
    src
        Whatever `open_checkpoint` opens.
    dst
        The directory to make, all or nothing.
    max_shard_bytes
        Largest size of a file's arrays together; None puts all in one file. An array that is larger has its own file.
    keys
        Names or patterns of the arrays to take; all by default.
    overwrite
        Replace an existing checkpoint or Hugging Face directory.
    progress
        Called with (bytes done, bytes in all) after each window.

    Returns
    -------
    MergeReport

    Raises
    ------
    CheckpointDTypeError
        An array's dtype (complex128) has no safetensors form; names its key; nothing was written.
    CheckpointKeyError
        Two arrays have the same dotted name, or ``keys`` matches nothing.

    Examples
    --------
    >>> import tempfile
    >>> from meshtape.storage import save
    >>> home = tempfile.mkdtemp()
    >>> _ = save(os.path.join(home, "ckpt"), {"layers": [{"w": np.ones((2, 2), np.float32)}]})
    >>> merge(os.path.join(home, "ckpt"), os.path.join(home, "hf")).files
    ['model.safetensors']
    """
    started = time.perf_counter()
    ckpt = open_checkpoint(src)
    picked = select(ckpt, keys)
    arrays = {n: a for n, a in ckpt.arrays.items() if picked is None or a.path in picked}
    if "__metadata__" in arrays:
        raise CheckpointKeyError(
            f"{ckpt.path}: safetensors reserves the name '__metadata__'; leave that key out with keys="
        )
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
    kinds = {n: dtypes.safetensors_name(a.dtype, f"key {n!r}") for n, a in arrays.items()}
    for a in arrays.values():
        a.check()
    groups = split_files([(n, a.nbytes) for n, a in arrays.items()], max_shard_bytes)
    total = sum(a.nbytes for a in arrays.values())
    files = _file_names(len(groups))
    heads = [
        safetensors.build_header([(n, kinds[n], arrays[n].shape) for n in group], {"format": "pt"}) for group in groups
    ]

    fs = active()
    target = os.path.abspath(os.fspath(dst))
    commit.make_parents(target)
    done = 0

    def advance(n: int) -> None:
        nonlocal done
        done += n
        if progress is not None:
            progress(done, total)

    with (
        commit.room_for(total + sum(len(h) for h, _ in heads) + 4096 * (len(files) + 1), target),
        commit.replacing(target, overwrite=overwrite, ours=is_mergeable) as (root, finish),
    ):
        for file, (head, place) in zip(files, heads, strict=True):
            _write_file(fs, os.path.join(root, file), head, place, arrays, advance)
        for file, (_, place) in zip(files, heads, strict=True):
            if safetensors.read_header(os.path.join(root, file)).tensors != place:
                raise CorruptCheckpoint(f"{file} does not read back as it was written; nothing was committed")
        weight_map = {n: file for file, group in zip(files, groups, strict=True) for n in group}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        fs.fsync_dir(root)
        fs.write_file(os.path.join(root, HF_INDEX), text.encode())
        fs.fsync_dir(root)
        finish()
    skipped = [leaf_name(p) for p, _ in scalar_leaves(ckpt.structure) if picked is None or p in picked]
    return MergeReport(target, len(arrays), files, total, skipped, time.perf_counter() - started)


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def is_mergeable(path: str) -> bool:
    """Whether a directory may be replaced by a merge: a Hugging Face directory, or a checkpoint of ours."""
    entries = set(os.listdir(path))
    return bool(entries & {HF_INDEX, "model.safetensors", FILE})


def _write_file(
    fs: Files,
    path: str,
    head: bytes,
    place: dict[str, safetensors.TensorInfo],
    arrays: dict[str, StoredArray],
    advance: Callable[[int], None],
) -> None:
    fd = fs.create(path)
    try:
        fs.write(fd, [head], 0)
        for name, where in place.items():
            _copy(fs, fd, arrays[name], len(head) + where.begin, advance)
        fs.fsync(fd)
    finally:
        fs.close(fd)


def _copy(fs: Files, fd: int, array: StoredArray, start: int, advance: Callable[[int], None]) -> None:
    """One array through the window to its place in the file."""
    item = array.dtype.itemsize
    # The window holds a box, and at most as much again in staging memory of the reader.
    for box in windows(array.shape, array.tensor.chunk, item, WINDOW // 2):
        data, _ = read_box(array.tensor, box)
        raw = data.reshape(-1).view(np.uint8)
        waiting: list[np.ndarray] = []
        begin = end = -1
        for inner, outer, length in runs(box, array.shape):
            if outer * item != end or len(waiting) == IOV_MAX:
                if waiting:
                    fs.write(fd, waiting, start + begin)
                waiting, begin = [], outer * item
            waiting.append(raw[inner * item : (inner + length) * item])
            end = (outer + length) * item
        if waiting:
            fs.write(fd, waiting, start + begin)
        advance(math.prod(box.shape) * item)
