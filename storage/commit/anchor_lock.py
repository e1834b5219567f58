"""The lock between saves of deltas and those who delete or replace checkpoints: on the folder of the run.

A save of a delta shares it from its look at the anchor to its commit. Who deletes a checkpoint, or puts another in its
place, has it alone while it looks for deltas, gives them another base or refuses, and deletes or replaces. So a base
goes either before a saver looks at it, or when the delta is there to be seen.

On disks it is a lock on the folder, which ends with its process. In object stores it is an object for each that wants
it, of a name that nobody else ever has. It is put first; then all are listed. Of two, in whatever order their four
requests arrive, the one that lists last sees the other: lists show what was put before (S3, Google and Azure promise
that). Nobody goes on beside another that it sees, unless both share. One that shares, or one of two that want it
alone, takes its object away and tries again later; one that wants it alone leaves its object while it waits for those
that share, so newcomers step back and it gets its turn. The objects of killed processes are passed over and deleted, by
the rules of ``owners``: at once for a process of this machine that has ended, and after ten minutes for another
machine's, which puts its object anew every minute. Both times are the store's: the age of an object is counted up to
our own, so no clock of a machine matters. Who was stopped for longer, and goes on, holds a lock no more: a save looks
at its base once more after its commit for that, and a deletion at its lock just before (:func:`still_held`).
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from ...arrays.core.errors import CheckpointError, StoreError
from ..base.threads import starting
from ..stores import owners, store
from ..stores.contract import Store, failed
from ..stores.filesystem import try_lock

PATIENCE = 60.0  # seconds that a deletion waits for saves, and a save for a deletion
_PAUSE = 0.02
_SILENCE = 600.0  # seconds after which an object that is not put anew is of a killed process
_FOLDER = ".meshtape-turns"  # of the objects, in the folder of the run
_ALONE = "alone"
_NAME = re.compile(r"(?:alone|shared)-(\w+-\w+)-(\d{1,9})-\w+")  # owner, and its process

_mine: set[str] = set()  # objects of this process, in any thread
_held = threading.local()  # .alone: the folders that this thread has alone, and its turn there


@contextmanager
def locked(folder: str, *, shared: bool = False, patience: float | None = None) -> Iterator[bool]:
    """Hold the lock. Where it is another's for ``patience`` seconds, gives False to one that shares it or has no
    patience, and raises for others. A thread that has it alone has it again."""
    alone: dict[str, _Descriptor | _Objects] = _held.__dict__.setdefault("alone", {})
    key = folder if store.is_url(folder) else os.path.realpath(folder)
    if key in alone or not (store.is_url(folder) or os.path.isdir(folder)):
        yield True
        return
    patience = PATIENCE if patience is None else patience
    end = time.monotonic() + patience
    with ExitStack() as stack:
        turn = _Objects(folder, shared) if store.is_url(folder) else _Descriptor(folder, shared)
        stack.callback(turn.end)
        while (mine := turn.taken()) is False and time.monotonic() < end:
            time.sleep(turn.pause * (0.5 + random.random()))
        if not (mine or shared) and patience:
            raise CheckpointError(
                f"{folder}: another saves deltas or deletes a checkpoint for longer than {patience:g} s; call again "
                "when it has ended"
            )
        if mine and not shared:
            alone[key] = turn
            stack.callback(alone.pop, key)
        yield mine


def still_held(folder: str) -> bool:
    """Whether this thread, which has the lock alone, did not lose it in an object store while it stood still."""
    turn = _held.__dict__.get("alone", {}).get(folder)
    return not isinstance(turn, _Objects) or turn.is_there()


class _Descriptor:
    """A turn on a disk."""

    pause = _PAUSE

    def __init__(self, folder: str, shared: bool) -> None:
        self._shared = shared
        try:
            self._fd = os.open(folder, os.O_RDONLY)
        except OSError as e:
            raise failed(e, f"{folder} cannot be locked") from e

    def taken(self) -> bool:
        return try_lock(self._fd, self._shared) is not False  # None: there are no locks here

    def end(self) -> None:
        os.close(self._fd)


class _Objects:
    """A turn in an object store."""

    pause = 10 * _PAUSE

    def __init__(self, folder: str, shared: bool) -> None:
        self._store, self._shared = store.at(store.join(folder, _FOLDER)), shared
        self._name = ""
        self._ended = threading.Event()
        self._renewing: threading.Thread | None = None

    def taken(self) -> bool:
        if not self._name:
            self._name = f"{'shared' if self._shared else _ALONE}-{owners.new_id()}"
            _mine.add(self._name)
            self._store.put(self._name, b"")
        others = _living(self._store, self._name) - {self._name}
        if alone := any(name.startswith(_ALONE) for name in others):
            self._withdraw()
        if alone or (others and not self._shared):
            return False
        self._renewing = threading.Thread(target=self._renew, daemon=True)
        with starting():
            self._renewing.start()
        return True

    def is_there(self) -> bool:
        return any(e.name == self._name for e in self._store.entries())

    def _renew(self) -> None:
        while not self._ended.wait(_SILENCE / 10):
            with suppress(StoreError):
                if self.is_there():  # else others took this process for dead
                    self._store.put(self._name, b"")

    def _withdraw(self) -> None:
        name, self._name = self._name, ""
        self._store.delete([name] if name else [])
        _mine.discard(name)

    def end(self) -> None:
        self._ended.set()
        if self._renewing is not None:
            self._renewing.join()
        self._withdraw()


def sweep(folder: str) -> None:
    """Delete the objects of processes that have ended."""
    _living(store.at(store.join(folder, _FOLDER)))


def _living(there: Store, own: str = "") -> set[str]:
    """The objects whose owners may live. Those of others are deleted. ``own``: an object that we have put."""
    found: set[str] = set()
    dead = []
    entries = list(there.entries())
    ahead = next((time.time() - e.modified for e in entries if e.name == own), None)  # of the store's clock, or more
    silence = owners.SILENT_AGE if ahead is None else _SILENCE
    for e in entries:
        if (m := _NAME.fullmatch(e.name)) is None:
            continue
        gone = e.name not in _mine and owners.why_dead(m[1], int(m[2]), e.modified + (ahead or 0.0), silence)
        dead.append(e.name) if gone else found.add(e.name)
    if dead:
        there.delete(dead)
    return found
