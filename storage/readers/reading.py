"""Reads as independent calls, which `run` executes on threads; it joins a `RangeJob` with its neighbours."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from ...arrays.core.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint
from ..base import names
from ..base.checksums import crc32c
from ..base.scratch import scratch
from ..base.threads import in_threads
from ..stores import generations
from ..stores import store as stores
from ..stores.contract import Reader
from ..stores.filesystem import IOV_MAX
from ..stores.generations import Generation
from ..stores.local import Beneath, LocalStore, local_reader

Job = Callable[[], int]
SMALL = 128 << 10  # bytes of an array that is read with its neighbours: a cache still has it for its checksum
_TOGETHER = 64
_OPEN = 16  # files that a thread keeps open from one job to the next
_MISSES = 4  # files in a row that are not in memory, after which all others are left to the threads
_PAGE = 4 << 10  # bytes at whose multiples a read without waiting may end
_BEYOND = bytearray(_PAGE)  # for what stands behind a chunk, and tells where its file ends
_LOCAL = LocalStore(os.sep)  # takes absolute paths
_own = threading.local()


def run(jobs: Iterable[Job], readers: int = 4) -> int:
    """Execute all jobs, on a few threads when that may help; returns the sum of their results.

    ``readers`` is what the stores of the tensors say: to a disk more threads than processors only wait for each other.
    """
    ranges: list[RangeJob] = []
    rest: list[Job] = []
    total = missed = 0
    with _kept_open():
        for job in jobs:
            if type(job) is not RangeJob:
                rest.append(job)
            elif job.root and missed < _MISSES and _read_file(job):
                total, missed = total + job.nbytes, 0
            else:
                missed += bool(job.root)
                ranges.append(job)
        done, later = _at_hand(_neighbours(ranges))
    total += done
    rest += [lambda group=group: _read_ranges(group) for group in later]
    workers = min(readers, len(rest), max(readers if readers > 4 else 2, os.cpu_count() or 1))
    if workers < 2:
        return total + _together(rest)
    # To hand a job to a thread costs as much as a small one: where there are many, several go together.
    size = max(1, min(_TOGETHER, len(rest) // (8 * workers)))
    groups = [rest[i : i + size] for i in range(0, len(rest), size)]
    return total + sum(in_threads(_together, groups, workers))


def _together(jobs: Sequence[Job]) -> int:
    """Execute jobs one after the other."""
    with _kept_open():
        return sum([job() for job in jobs])


@contextlib.contextmanager
def _kept_open() -> Iterator[None]:
    """Local files that this thread opens stay open meanwhile, as many arrays may lie in one, and so do the folders of
    checkpoints."""
    before, _own.kept = getattr(_own, "kept", None), ({}, {})
    try:
        yield
    finally:
        for held in _own.kept:
            for each in held.values():
                each.close()
        _own.kept = before


def _folder(root: str, folders: dict[str, Beneath]) -> Beneath:
    return folders.get(root) or folders.setdefault(root, Beneath(root))


def _beneath(root: str, where: str, what: str, folders: dict[str, Beneath] | None) -> int:
    """The descriptor of a local file, which links must not lead out of ``root``; -1 where it is still to be opened."""
    name = where[len(root) + 1 :]
    fd = -1 if folders is None else _folder(root, folders).open(name)
    if fd < 0:
        names.inside(root, name, f"{root}: {what}")
    return fd


class opened:  # used as a function is
    """A file of a checkpoint for reading; `IncompleteCheckpoint` where it is missing, at the opening or the first read.

    Where the checkpoint was replaced meanwhile, that and damage are `CheckpointReplaced`.
    """

    # A class, as a generator takes longer than to read a small file.
    __slots__ = ("_closes", "_generation", "_root", "_what", "_where")

    def __init__(self, where: str, what: str, generation: Generation = generations.NONE, root: str = "") -> None:
        """``root``: a folder that links must not lead out of."""
        self._where, self._what, self._generation, self._root = where, what, generation, root

    def __enter__(self) -> Reader:
        held, folders = getattr(_own, "kept", None) or (None, None)
        self._closes: Reader | None = None
        reader: Reader | None = held.get(self._where) if held else None
        if reader is None:
            remote = stores.is_url(self._where)
            try:
                if remote:
                    store, name = stores.holding(self._where)
                    reader = store.reader(name)
                else:
                    fd = _beneath(self._root, self._where, self._what, folders) if self._root else -1
                    reader = _LOCAL.reader(self._where) if fd < 0 else local_reader(fd, self._where)
                if self._generation.ahead is not None:
                    reader = self._generation.ahead.reader(self._where, reader)
            except BaseException as e:
                self._refuse(e)
                raise
            # An object's version is asked for anew with each reader; an open file stays the one it was, and tells if it
            # changes.
            if held is not None and len(held) < _OPEN and not remote:
                held[self._where] = reader
            else:
                self._closes = reader
        return reader

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._closes is not None:
            self._closes.close()
        if error is not None:
            self._refuse(error)

    def _refuse(self, error: BaseException) -> None:
        # `NotACheckpoint` is a FileNotFoundError, too.
        if isinstance(error, (FileNotFoundError, NotADirectoryError)) and not isinstance(error, CheckpointError):
            self._generation.check()
            raise IncompleteCheckpoint(
                f"{self._where} is missing, which holds {self._what}; restore the file or another checkpoint"
            ) from None
        if isinstance(error, (CorruptCheckpoint, IncompleteCheckpoint)):
            self._generation.check()


# ----- ranges ---------------------------------------------------------------------------------------------------------


class Ranged(Protocol):
    """A tensor that reads ranges."""

    name: str
    generation: Generation

    def check_length(self, reader: Reader, coord: Any, path: str) -> None:
        """Raise where the file is not as long as it must be."""

    def refused(self, coord: Any, value: int) -> CorruptCheckpoint:
        """The error for bytes with a checksum that is not that of their place."""


@dataclass(slots=True, eq=False)  # not frozen, as in ``tensor``
class RangeJob:
    """A read of one range of a file, which `run` joins with its neighbours.

    The bytes go to ``out``, or without it to ``take``. They are compared with ``value``; where that is None, nothing
    binds them to what was opened, and the generation is looked at instead. ``file_nbytes`` is the length of the file,
    where the tensor looks at nothing else. A file with a ``root``, a folder that links must not lead out of, has no
    other range.
    """

    tensor: Ranged
    coord: Any
    path: str
    start: int
    nbytes: int
    file_nbytes: int
    value: int | None
    out: np.ndarray | None
    take: Callable[[np.ndarray], None] | None = None
    root: str = ""

    def __call__(self) -> int:
        return _read_ranges([self])


def _neighbours(jobs: list[RangeJob]) -> list[list[RangeJob]]:
    """The jobs in groups that one read serves."""
    files: dict[str, list[RangeJob]] = {}
    for job in jobs:
        files.setdefault(job.path, []).append(job)
    groups: list[list[RangeJob]] = []
    for path, held in files.items():
        if len(held) == 1:
            groups.append(held)
            continue
        store = stores.holding(path)[0] if stores.is_url(path) else LocalStore
        first = end = -1
        for job in sorted(held, key=attrgetter("start", "nbytes")):
            stop = job.start + job.nbytes
            again = first >= 0 and job.start == groups[-1][-1].start and stop == end
            near = again or 0 <= end <= job.start <= end + store.gap
            if near and stop - first <= store.job and len(groups[-1]) < IOV_MAX // 2:
                groups[-1].append(job)
            else:
                groups.append([job])
                first = job.start
            end = stop
    return groups


def _read_file(job: RangeJob) -> bool:
    """Read a small file of its own that is in this machine's memory, and all of which is as it must be; False where it
    has to be looked at more closely."""
    root, end = job.root, job.file_nbytes
    if job.value is None or not end % _PAGE or stores.is_url(root):
        return False
    try:
        folder = _folder(root, _own.kept[1])
    except OSError:
        return False
    done = folder.read_now(job.path[len(root) + 1 :], [job.out, _BEYOND], job.start)
    return done == end - job.start and crc32c(job.out) == job.value


def _at_hand(groups: list[list[RangeJob]]) -> tuple[int, list[list[RangeJob]]]:
    """Read ranges that are in this machine's memory, in this thread; returns the bytes, and the remaining groups.

    Threads that read small files for a moment each spend their time handing the interpreter to one another.
    """
    total, missed = 0, 0
    later: list[list[RangeJob]] = []
    for group in groups:
        job = group[0]
        span = group[-1].start + group[-1].nbytes - job.start
        if missed < _MISSES and span <= LocalStore.batch and not stores.is_url(job.path):
            done = _read_ranges(group, wait=False)
            if done >= 0:
                total += done
                missed = 0
                continue
            missed += 1
        later.append(group)
    return total, later


def _read_ranges(group: list[RangeJob], wait: bool = True) -> int:
    """Fill the ``out`` of each; -1 where that would ``wait`` for a disk and must not."""
    job = group[0]
    first, path, tensor = job.start, job.path, job.tensor
    with opened(path, f"part of {tensor.name!r}", tensor.generation, job.root) as reader:
        buffers = [job.out if job.out is not None else np.empty(job.nbytes, np.uint8)]
        parts, end = buffers[:], first + job.nbytes
        for job in group[1:]:
            if job.start < end:  # the same bytes as those before, for another place
                parts.append(parts[-1])
                continue
            if job.start > end:
                buffers.append(scratch("gap", job.start - end))
            part = job.out if job.out is not None else np.empty(job.nbytes, np.uint8)
            buffers.append(part)
            parts.append(part)
            end = job.start + job.nbytes
        if wait:
            done = reader.readv(buffers, first)
        elif (done := reader.read_now(buffers, first)) != end - first:
            return -1
        if reader.nbytes != group[0].file_nbytes:
            tensor.check_length(reader, group[0].coord, path)
        if done != end - first:
            raise CorruptCheckpoint(
                f"{path} ends early (it holds part of {tensor.name!r}); it changed while it was read"
            )
        bound = True
        for job, part in zip(group, parts, strict=True):
            if job.value is None:
                bound = False
            elif (value := crc32c(part)) != job.value:
                raise job.tensor.refused(job.coord, value)
            if job.take is not None:
                job.take(part)
            elif part is not job.out and job.out is not None:
                job.out[...] = part
        if not bound:
            then = tensor.generation.tags.get(path)
            if then:
                generations.refuse(path, then, reader.tag)
            else:
                tensor.generation.check()
    return done
