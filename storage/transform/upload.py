"""A transfer into an object store: every file is one upload, from its first byte to its last.

Files are uploaded under the names that a claim gives (see ``object_commit``), read back and compared, and listed in a
journal object with the plan's fingerprint. A run that finds the journal of the same plan, whose writer is gone, takes
its names over, reads the listed files back, keeps those that are whole and uploads the rest. Metadata comes last.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...arrays.core.errors import CheckpointError, CorruptCheckpoint, StoreError
from ..base import strict_json
from ..base.checksums import crc32c
from ..commit import object_commit
from ..commit.contents import CHECKPOINTS, JOURNAL
from ..format.tensor_sums import of_range
from ..rules.casting import CastLoss, Tally, tallied
from ..stores import store as stores
from ..stores.contract import Store
from .plan import Transfer
from .sinks.sink import UploadStream
from .unpacked import unpacked

_BATCH = 8 << 20


def _sum(root: str, name: str, nbytes: int) -> int | None:
    """The crc32c of a file, or None where it is missing or of another length."""
    with contextlib.suppress(FileNotFoundError), contextlib.closing(stores.at(root).reader(name)) as reader:
        value = of_range(reader, 0, nbytes, _BATCH)
        return value if reader.nbytes == nbytes else None
    return None


def _send(stream: UploadStream, root: str, allow_overflow: bool) -> tuple[list[Any], Tally]:
    """Upload one file and read it back; returns its crc32c, its stream's digest and its length; and what casts lost.

    `Lossy` is raised at the end of the file, before it counts as uploaded.
    """
    value, losses = 0, Tally()

    def counted() -> Iterator[Any]:
        nonlocal value
        value = 0
        losses.clear()  # an upload that failed is begun again
        pieces = stream.pieces()
        while True:
            piece = tallied(losses, lambda: next(pieces, None))
            if piece is None:
                losses.refuse(allow_overflow)
                return
            value = crc32c(np.frombuffer(piece, np.uint8), value)
            yield piece

    nbytes = stores.at(root).put(stream.name, counted)
    if nbytes != stream.nbytes or _sum(root, stream.name, nbytes) != value:
        raise CorruptCheckpoint(
            f"{stores.join(root, stream.name)} does not read back as it was written; nothing was committed"
        )
    return [value, stream.digest, nbytes], losses


class _Journal:
    """Which files are there, in an object that is put again after each."""

    def __init__(self, folder: object_commit.ObjectFolder, key: str) -> None:
        self.folder, self.key = folder, key
        self.done: dict[str, list[Any]] = {}
        self.losses: dict[str, Tally] = {}

    def add(self, name: str, row: Sequence[Any], losses: Tally) -> None:
        self.done[name], self.losses[name] = list(row), losses
        lost = {file: {n: loss.encode() for n, loss in held.items()} for file, held in self.losses.items() if held}
        text = json.dumps({"plan": self.key, "mark": self.folder.suffix, "files": self.done, "losses": lost})
        self.folder.store.put(JOURNAL, text.encode())

    @staticmethod
    def read(store: Store, key: str) -> tuple[str, dict[str, list[Any]], dict[str, Tally]] | None:
        """(mark, files, losses by file) of an earlier run of the same plan."""
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            said = strict_json.loads(store.get(JOURNAL))
            if said["plan"] == key and isinstance(said["mark"], str):
                losses = {
                    f: Tally({n: CastLoss.decode(r) for n, r in held.items()}) for f, held in said["losses"].items()
                }
                rows = {str(n): [int(value), digest, int(size)] for n, (value, digest, size) in said["files"].items()}
                return said["mark"], rows, losses
        return None


def upload(plan: Transfer) -> tuple[int, int, Tally]:
    """As `transfer`, for a target in an object store."""
    sink, target, spread = plan.sink, plan.target, plan.spread
    if spread.executor is not None:
        raise CheckpointError(
            f"{target}: uploads are made by this process; leave out client=, or write to a shared directory"
        )
    object_commit.check_target(target, plan.overwrite, CHECKPOINTS)
    limit = max(64 << 10, plan.memory_limit // (3 * spread.threads))
    key = plan.fingerprint(0)
    found = _Journal.read(stores.at(target), key)
    folder = object_commit.ObjectFolder(target)
    held: dict[str, list[Any]] = {}
    lost: dict[str, Tally] = {}
    if found is not None and folder.take_over(found[0]):
        held, lost = found[1:]
    else:
        object_commit.recover(target)
        object_commit.check_target(target, plan.overwrite, CHECKPOINTS)
        folder.begin()
    keep, stack = False, contextlib.ExitStack()
    try:
        beside = os.path.join(tempfile.gettempdir(), "meshtape")
        tensors = stack.enter_context(unpacked(plan.tensors, beside, limit))
        sink.mark(folder.suffix)
        streams = sink.streams(tensors, limit)
        journal = _Journal(folder, key)
        sizes = {s.name: s.nbytes for s in streams}  # those that are compressed come to be shorter
        total, resumed = sum(sizes.values()), 0
        listed = [s for s in streams if s.name in held]
        for s, value in spread.over(_sum, listed, lambda s: (target, s.name, held[s.name][2])):
            if value == held[s.name][0]:
                _, s.digest, s.nbytes = held[s.name]
                journal.done[s.name], journal.losses[s.name] = held[s.name], lost.get(s.name, Tally())
                journal.losses[s.name].refuse(plan.allow_overflow)
                resumed += sizes[s.name]
        plan.progress(reached := resumed, total)
        missing = [s for s in streams if s.name not in journal.done]
        for s, (row, losses) in spread.over(_send, missing, lambda s: (s, target, plan.allow_overflow)):
            journal.add(s.name, row, losses)
            plan.progress(reached := reached + sizes[s.name], total)
        sink.accept(streams)
        plan.source.check()
        nbytes = sink.finish(folder, target)
        folder.commit()
    except BaseException as e:
        # Damage in the source, or another process that was first: what was written is of no use. Anything else may
        # pass.
        keep = isinstance(e, StoreError) or not isinstance(e, CheckpointError)
        raise
    finally:
        stack.close()
        if keep:
            folder.leave()
        else:
            with contextlib.suppress(*(() if folder.committed else (Exception,))):
                folder.end(folder.committed)
    every = Tally()
    for losses in journal.losses.values():
        for name, loss in losses.items():
            every.add(name, loss)
    return nbytes, resumed, every
