"""What goes wrong, and how it is mended again. The process is worked on from outside, where its own help is not
needed."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import spaces
from world import Scene

from meshtape import errors

GONE = (errors.RankLost, errors.ClusterError, errors.CollectiveTimeout)
"""For a worker that is lost or does not answer."""


class Fault(NamedTuple):
    """``strike`` begins it, for ``seconds`` (or until the operation has ended, where that is None), and what it is a
    context of mends it.

    ``allowed`` are the errors that may come of it, and ``names`` whether they must name a rank, a worker or the
    scheduler.
    """

    strike: Callable[[Scene], contextlib.AbstractContextManager[None]]
    seconds: float | None
    allowed: tuple[type[BaseException], ...]
    names: bool = True
    needs: str | None = None


@contextlib.contextmanager
def kill(scene: Scene) -> Iterator[None]:
    scene.world.kill(scene.victim)
    yield


@contextlib.contextmanager
def stand_still(scene: Scene) -> Iterator[None]:
    """For ever; it is killed in the end."""
    os.kill(scene.pid, signal.SIGSTOP)
    yield


@contextlib.contextmanager
def stand_still_a_moment(scene: Scene) -> Iterator[None]:
    os.kill(scene.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(scene.pid, signal.SIGCONT)


@contextlib.contextmanager
def leave(scene: Scene) -> Iterator[None]:
    """Dask's own way of ending a worker."""
    with contextlib.suppress(OSError, TimeoutError):
        scene.client.retire_workers([scene.victim])
    yield


def _limit(dask_worker: Any, fraction: float | None) -> None:
    manager = dask_worker.memory_manager
    if fraction is None:
        manager.memory_limit = 2 << 30
        dask_worker.chaos = None
    else:
        dask_worker.chaos = bytearray(os.urandom(1 << 20) * 32)  # so much more than before
        manager.memory_limit = int((manager.get_memory() if hasattr(manager, "get_memory") else _rss()) / fraction)


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def memory(scene: Scene) -> Iterator[None]:
    """More memory than Dask lets a worker go on with: it is paused."""
    scene.client.run(_limit, 0.95, workers=[scene.victim], on_error="ignore")
    try:
        yield
    finally:
        scene.client.run(_limit, None, workers=[scene.victim], on_error="ignore")


@contextlib.contextmanager
def _limited(pid: int, what: int, soft: int) -> Iterator[None]:
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (soft, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, what, before)


@contextlib.contextmanager
def small_files(scene: Scene) -> Iterator[None]:
    """No file of the worker grows beyond a few kilobytes, in shared memory either."""
    with _limited(scene.pid, resource.RLIMIT_FSIZE, 4096):
        yield


@contextlib.contextmanager
def full_disk(scene: Scene) -> Iterator[None]:
    filler = scene.world.disk / "filler"
    try:
        with filler.open("wb", buffering=0) as f, contextlib.suppress(OSError):
            for size in (1 << 16, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while True:
                        f.write(bytes(size))
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def no_descriptors(scene: Scene) -> Iterator[None]:
    count = len(list(Path(f"/proc/{scene.pid}/fd").iterdir()))
    with _limited(scene.pid, resource.RLIMIT_NOFILE, count):
        yield


@contextlib.contextmanager
def no_memory(scene: Scene) -> Iterator[None]:
    """The process gets next to no more memory from its system. Not none: Python waits for ever for a thread that it
    started and that had not even the memory to begin."""
    pages = int(Path(f"/proc/{scene.pid}/statm").read_text().split()[0])
    with _limited(scene.pid, resource.RLIMIT_AS, pages * os.sysconf("SC_PAGE_SIZE") + (24 << 20)):
        yield


@contextlib.contextmanager
def scheduler_killed(scene: Scene) -> Iterator[None]:
    os.kill(scene.world.scheduler, signal.SIGKILL)
    yield


@contextlib.contextmanager
def scheduler_stands_still(scene: Scene) -> Iterator[None]:
    os.kill(scene.world.scheduler, signal.SIGSTOP)
    yield


@contextlib.contextmanager
def scheduler_stands_still_a_moment(scene: Scene) -> Iterator[None]:
    os.kill(scene.world.scheduler, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(scene.world.scheduler, signal.SIGCONT)


def _jump(seconds: float | None) -> None:
    import distributed.metrics

    for module in (time, distributed.metrics):
        if seconds is None:
            module.time = module.time.true
        else:
            true = getattr(module.time, "true", module.time)

            def jumped(true: Any = true) -> float:
                return true() + seconds

            jumped.true = true
            module.time = jumped


@contextlib.contextmanager
def clock(scene: Scene) -> Iterator[None]:
    """The clock of the wall jumps, by an hour or a month, and back."""
    by = scene.rng.choice((-1, 1)) * scene.rng.choice((3600.0, 2.6e6))
    scene.client.run(_jump, by, workers=[scene.victim])
    try:
        yield
    finally:
        scene.client.run(_jump, None, workers=[scene.victim])


def listening(pid: int) -> list[tuple[str, int]]:
    """Where a process listens: IPv4 addresses."""
    mine = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            mine.add(str(fd.readlink()))
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
            host, port = words[1].split(":")
            found.append((socket.inet_ntoa(struct.pack("<I", int(host, 16))), int(port, 16)))
    return found


@contextlib.contextmanager
def garbage(scene: Scene) -> Iterator[None]:
    """Strangers at every port of the worker and of the scheduler: noise, endless lengths, silence."""
    rng = random.Random(scene.rng.random())
    kept: list[socket.socket] = []
    doors = [d for pid in (scene.pid, scene.world.scheduler) for d in listening(pid)]
    try:
        for host, port in doors:
            for _ in range(12):
                with contextlib.suppress(OSError):
                    s = socket.create_connection((host, port), 1)
                    kept.append(s)
                    what = rng.random()
                    if what < 0.5:
                        s.sendall(rng.randbytes(rng.randrange(1, 4096)))
                    elif what < 0.7:
                        s.sendall(b"\xff" * 64)
                    elif what < 0.8:
                        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        s.close()
        yield
    finally:
        for s in kept:
            s.close()


@contextlib.contextmanager
def cut_off(scene: Scene) -> Iterator[None]:
    """Nothing comes to the worker, nor from it; nobody is told."""
    name = f"w{scene.world.numbers[scene.victim]}"
    spaces.ip("link", "set", name, "down")
    try:
        yield
    finally:
        spaces.ip("link", "set", name, "up")


@contextlib.contextmanager
def cut_in_two(scene: Scene) -> Iterator[None]:
    """Two workers do not reach each other; everybody else reaches both."""
    other = next(a for a in scene.workers if a != scene.victim)
    host = other.partition("://")[2].rpartition(":")[0]
    spaces.ip("route", "add", "blackhole", f"{host}/32", of=scene.pid)
    try:
        yield
    finally:
        spaces.ip("route", "del", "blackhole", f"{host}/32", of=scene.pid)


def _queue(words: tuple[str, ...]) -> Callable[[Scene], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def queue(scene: Scene) -> Iterator[None]:
        name = f"w{scene.world.numbers[scene.victim]}"
        spaces.ip("qdisc", "replace", "dev", name, "root", *words, tool="tc")
        try:
            yield
        finally:
            spaces.ip("qdisc", "del", "dev", name, "root", tool="tc")

    return queue


FULL = (errors.StorageFull, errors.StoreError, errors.RankLost)
FAULTS: dict[str, Fault] = {
    "worker killed": Fault(kill, 0.2, GONE),
    "worker stopped": Fault(stand_still, None, GONE),
    "worker stopped a moment": Fault(stand_still_a_moment, 0.5, ()),
    "worker retired": Fault(leave, 0.2, GONE),
    "worker paused by memory": Fault(memory, None, (errors.ClusterError,)),
    "disk full": Fault(full_disk, None, FULL, needs="disk", names=False),
    "files may not grow": Fault(small_files, 0.6, (*FULL, errors.ClusterError), names=False),
    "no descriptors": Fault(no_descriptors, 0.5, (*GONE, errors.StoreError), names=False),
    "no memory": Fault(no_memory, 0.4, (*GONE, errors.OutOfMemory, errors.StoreError), names=False),
    "scheduler killed": Fault(scheduler_killed, 0.3, GONE),
    "scheduler stopped": Fault(scheduler_stands_still, None, GONE),
    "scheduler stopped a moment": Fault(scheduler_stands_still_a_moment, 0.5, ()),
    "clock jumps": Fault(clock, 0.5, ()),
    "garbage": Fault(garbage, 0.5, ()),
    "worker cut off": Fault(cut_off, None, GONE, needs="cut"),
    "worker cut off a moment": Fault(cut_off, 0.4, (), needs="cut"),
    "cut in two": Fault(cut_in_two, None, GONE, needs="cut"),
    "slow network": Fault(_queue(spaces.SLOW), 0.5, (), needs="slow"),
    "lossy network": Fault(_queue(spaces.LOSSY), 0.5, (), needs="lossy"),
}
