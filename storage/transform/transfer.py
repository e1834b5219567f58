"""The engine below merge, convert and reshard: windows from lazy tensors to a sink, in bounded memory, resumable.

The result grows in ``NAME.part`` beside the target. Its journal holds the plan's fingerprint (what is read, and where
all of it goes), then a line with the checksums of each window that was written. A run that finds a journal of the same
plan reads the listed windows back, keeps those that are whole and does the rest; the journal therefore need not be
synced before the data. Another plan's part is removed. One process works on a target at a time: it holds a lock on the
journal, which ends with the process.

Every window is read back and compared while others are written, at the end the files are synced, metadata comes last,
and the directory is committed as in ``directory_commit``. An interruption (a kill, a full disk, Ctrl-C) leaves the part
for the next run; damage in the source removes it.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ...arrays.core.blocks import Box
from ...arrays.core.errors import CheckpointError, CheckpointExists, CorruptCheckpoint, StoreError
from ..base import scratch, strict_json
from ..base.threads import starting
from ..base.waiting import pool
from ..commit import directory_commit
from ..commit.contents import CHECKPOINTS, JOURNAL
from ..readers.shared import once
from ..rules.casting import CastLoss, Tally
from ..rules.measured import measure_all
from ..stores import atomic_directory
from ..stores.filesystem import active, try_lock
from .plan import Transfer
from .sinks.raw_writer import check_all, put_all, put_and_check, steps_of
from .sinks.sink import BATCH, WindowWriter
from .unpacked import unpacked

_LEAST = 64 << 10


@contextlib.contextmanager
def _journal(part: str) -> Iterator[int]:
    """The locked journal of a part directory, which is made where it is missing."""
    fs = active()
    path = os.path.join(part, JOURNAL)
    for _ in range(10):
        try:
            if os.path.lexists(part) and not os.path.isdir(part):
                raise CheckpointExists(f"{part} is in the way: it is no directory; move it elsewhere")
            if not os.path.isdir(part):
                fs.mkdir(part)
            # Listed first: another process may make its journal just now.
            elif os.listdir(part) and not os.path.exists(path):
                raise CheckpointExists(f"{part} is in the way: it is no unfinished transfer; move it elsewhere")
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except CheckpointExists:
            raise
        except (FileExistsError, FileNotFoundError):  # another process has just made it, or removed it
            continue
        try:
            if try_lock(fd) is False:  # (without locks, two runs on one target are their user's care)
                raise CheckpointError(f"another process is working on {part}; wait for it to end")
            # Between the open and the lock, another run may have committed this very directory.
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == os.fstat(fd).st_ino:
                    yield fd
                    return
        finally:
            os.close(fd)
    raise CheckpointError(f"{part} keeps changing: other processes are working on it")


def _listed(fd: int, key: str, count: int) -> dict[int, tuple[list[int], CastLoss]] | None:
    """Sums and losses of windows that the journal lists, less a torn last line; None if it is of another plan."""
    size = os.fstat(fd).st_size
    lines = os.pread(fd, size, 0).decode("utf-8", "replace").split("\n")[:-1]
    if not lines or lines[0] != key:
        return None
    out: dict[int, tuple[list[int], CastLoss]] = {}
    for line in lines[1:]:
        with contextlib.suppress(ValueError, TypeError, IndexError):
            number, sums, *losses = strict_json.loads(line)
            if type(number) is int and 0 <= number < count and isinstance(sums, list):
                out[number] = sums, sum(map(CastLoss.decode, losses), CastLoss())
    return out


def _empty(part: str) -> None:
    fs = active()
    for entry in sorted(os.listdir(part)):
        if entry != JOURNAL:
            fs.remove_tree(os.path.join(part, entry))


def _whole(*call: Any) -> bool:
    """Whether a window reads back as it was written, by a call of `check_all`."""
    try:
        return all(check_all(*call))
    except FileNotFoundError:
        return False


def transfer(plan: Transfer) -> tuple[int, int, Tally]:
    """Fill the sink; returns the bytes of the files, those that an earlier run had written, and losses of casts. The
    journal stays in this process."""
    tensors, sink, target, spread = plan.tensors, plan.sink, plan.target, plan.spread
    atomic_directory.make_parents(target)
    atomic_directory.recover(os.path.dirname(target))
    directory_commit.check_target(target, plan.overwrite, CHECKPOINTS)
    part = f"{target}.part"
    if not os.path.isdir(part):
        atomic_directory.check_space(sink.nbytes, target)  # before a plan of perhaps millions of windows is made
    # A thread holds a window, the reader's staging memory and the writer's.
    limit = max(_LEAST, min(plan.memory_limit // (3 * spread.threads), scratch.KEPT))
    units = sink.units(tensors, limit)
    items = [t.dtype.itemsize for t in tensors]
    sizes = [u.box.size * items[u.array] for u in units]
    total = sum(sizes)
    key = plan.fingerprint(len(units))
    writers = [sink.writer(i, limit) for i in range(len(tensors))]
    fs = active()

    def refuse_unless(same: bool, number: int) -> None:
        if not same:
            plan.source.check()  # a layout that is summed before it is written reads twice
            raise CorruptCheckpoint(
                f"{target}: window {number} does not read back as it was written; nothing was committed"
            )

    def calls(windows: Sequence[int]) -> tuple[list[WindowWriter], str, list[Box]]:
        return [writers[units[n].array] for n in windows], part, [units[n].box for n in windows]

    with _journal(part) as fd:
        begun = True
        try:
            done = _listed(fd, key, len(units))
            begun = bool(done)
            if done is None:
                done = {}
                _empty(part)
                os.ftruncate(fd, 0)
                os.write(fd, f"{key}\n".encode())
            kept = {
                n: done[n][0]
                for n, same in spread.over(_whole, list(done), lambda n: (*calls([n]), [done[n][0]]))
                if same
            }
            losses, left = Tally(), Counter(u.array for n, u in enumerate(units) if n not in kept)
            for n in kept:
                losses.add(tensors[units[n].array].name, done[n][1])

            def settle(array: int) -> None:
                # Only what is complete: the counts of others, of which windows are still to come, would be too small.
                if not left[array]:
                    losses.refuse(plan.allow_overflow, tensors[array].name)

            for array in {units[n].array for n in kept}:
                settle(array)
            resumed = sum(sizes[n] for n in kept)
            with atomic_directory.room_for(sink.nbytes - resumed, target), unpacked(tensors, target, limit) as tensors:
                begun = True
                measure_all([tensors[a] for a in sorted(left)], spread.over)
                sink.create(part)
                plan.progress(reached := resumed, total)
                left_units = [n for n in range(len(units)) if n not in kept]
                steps = steps_of(left_units, units, sizes, writers, min(limit, BATCH))
                # What other processes have written is read back when none of them is at work any more: a task may be
                # carried out again while another worker, thought to be lost, still writes the same window.
                here = spread.executor is None
                for windows, result in spread.over(
                    put_and_check if here else put_all,
                    steps,
                    lambda step: (
                        *calls(step),
                        [tensors[a] if here else once("only", tensors[a], box) for a, box in (units[n] for n in step)],
                    ),
                ):
                    rows = []
                    for n, (sums, loss, *same) in zip(windows, result, strict=True):
                        refuse_unless(all(same), n)
                        kept[n] = sums
                        rows.append(strict_json.compact([n, sums, *([loss.encode()] if loss else [])]))
                        array = units[n].array
                        left[array] -= 1
                        if loss or tensors[array].name in losses:
                            losses.add(tensors[array].name, loss)
                            settle(array)
                    os.write(fd, "".join(f"{row}\n" for row in rows).encode())
                    for n in windows:
                        plan.progress(reached := reached + sizes[n], total)
                with starting(), pool(1, "meshtape-sync") as made:
                    synced = made.submit(sink.sync, part, {units[n]: sums for n, sums in kept.items()})
                    for windows, found in spread.over(  # while the disk is busy
                        check_all, [] if here else steps, lambda step: (*calls(step), [kept[n] for n in step])
                    ):
                        for n, same in zip(windows, found, strict=True):
                            refuse_unless(same, n)
                    synced.result()
                plan.source.check()
                nbytes = sink.finish(atomic_directory.Folder(part), target)
                directory_commit.adopt(part, target, without=JOURNAL, overwrite=plan.overwrite, tables=CHECKPOINTS)
        except BaseException as e:
            # Nothing was written yet, the source or the plan is wrong, or another process was first: what is there is
            # of no use.
            if not begun or (isinstance(e, CheckpointError) and not isinstance(e, StoreError)):
                with contextlib.suppress(OSError):
                    _empty(part)  # while it has its journal, others see whose it is
                    fs.remove_tree(part)
            raise
        finally:
            scratch.release()
    return nbytes, resumed, losses
