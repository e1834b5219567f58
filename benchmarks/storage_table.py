"""The table of ``storage.py``: candidates in turns, and how files are made durable or forgotten between them."""

from __future__ import annotations

# isort: split
import contextlib
import ctypes
import gc
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Candidate = Callable[[], Any] | None


def arrays(megabytes: int) -> dict[str, np.ndarray]:
    """About a hundred float32 arrays, most of them matrices of 1024 columns, as a transformer has."""
    rng = np.random.default_rng(0)
    block = rng.standard_normal((1 << 20,), np.float32)
    out: dict[str, np.ndarray] = {}
    matrices = 96
    rows = max(8, megabytes * 1_000_000 // (matrices * 4 * 2560) // 8 * 8)
    for i in range(matrices):
        w = np.resize(np.roll(block, i), (rows, 2560))
        out[f"layers.{i}.weight"] = np.ascontiguousarray(w)
        if i % 24 == 0:
            out[f"layers.{i}.bias"] = block[:2560].copy()
    return out


def files_below(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def sync(path: Path) -> None:
    """Make a file, or a directory with all below it, durable."""
    for p in [path, *path.rglob("*")] if path.is_dir() else [path]:
        fd = os.open(p, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def drop(path: Path) -> None:
    """Ask the kernel to forget the pages of all files below."""
    for p in files_below(path):
        fd = os.open(p, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def give_back() -> None:
    """Free memory goes back to the system: else who comes later gets pages that an earlier candidate has paid for."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Spent(NamedTuple):
    """What a call took: seconds, those of the processors in all threads, and pages that the system had to provide."""

    seconds: float
    work: float
    faults: float


def measured(fn: Callable[[], Any]) -> tuple[Spent, Any]:
    """What a call took, and what it returned."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start, worked = time.perf_counter(), time.process_time()
    result = fn()
    took = time.perf_counter() - start, time.process_time() - worked
    return Spent(*took, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults), result


class Bench:
    """Rows of a table; each candidate runs once a round, after its preparation."""

    def __init__(self, rounds: int, against: list[str] | None, chunks: int, count: int, blend: int) -> None:
        from rich.table import Table

        self.rounds, self.against, self.chunks, self.count, self.blend = rounds, against, chunks, count, blend
        self.large = False  # whether a larger model is fine-tuned
        self.table = Table(title="Storage", title_justify="left")
        for column in (
            "work",
            "ours",
            "peer",
            "theirs",
            "ratio",
            "CPU ours / theirs",
            "faults ours / theirs",
            "target",
        ):
            self.table.add_column(column, justify="left" if column in ("work", "peer") else "right")

    def wants(self, peer: str) -> bool:
        """Whether a peer is to be measured in this run."""
        return self.against is None or any(a.lower() in peer.lower() for a in self.against)

    def row(
        self,
        work: str,
        ours: Callable[[], Any],
        peers: dict[str, tuple[Candidate, float | None]],
        prepare: Callable[[], Any] = lambda: None,
        cpu: bool = False,
    ) -> dict[str, float]:
        """Measure and add a row; returns the seconds. With ``cpu`` the ratio and its target are of the processors'
        time."""
        peers = {n: p for n, p in peers.items() if self.wants(n)}
        runs = {"": ours, **{n: f for n, (f, _) in peers.items() if f is not None}}
        samples: dict[str, list[Spent]] = {n: [] for n in runs}
        failed: dict[str, str] = {}
        order = list(runs)
        for number in range(self.rounds):
            # Each round begins with another, so that nobody always gets the memory that the same one has left.
            turn = number * max(1, len(order) // self.rounds) % len(order)
            for name in [*order[turn:], *order[:turn]]:
                if name in failed:
                    continue
                prepare()
                give_back()
                try:
                    spent, result = measured(runs[name])
                except Exception as e:
                    if not name:
                        raise
                    failed[name] = f"{type(e).__name__}: {e}".split("\n")[0][:40]
                    continue
                samples[name].append(spent)
                del result
        # What other work on the machine adds, it adds to some rounds alone.
        best = {n: Spent(*map(min, zip(*s, strict=True))) for n, s in samples.items() if n not in failed}
        if not peers:
            self.note(work, f"{best[''].seconds:.3f} s, {best[''].work:.2f} s of work")
        for i, (name, (fn, target)) in enumerate(peers.items()):
            head = (work, f"{best[''].seconds:.3f} s") if i == 0 else ("", "")
            goal = "" if target is None else f"≤ {target:g}{' CPU' if cpu else ''}"
            if fn is None or name in failed:
                self.table.add_row(*head, name, failed.get(name, "missing"), "", "", "", goal)
                continue
            mine, theirs = best[""], best[name]
            ratio = mine.work / theirs.work if cpu else mine.seconds / theirs.seconds
            mark = "" if target is None else " ✓" if ratio <= target else " ✗"
            busy, faults = f"{mine.work:.2f} / {theirs.work:.2f} s", f"{mine.faults:.0f} / {theirs.faults:.0f}"
            self.table.add_row(*head, name, f"{theirs.seconds:.3f} s", f"{ratio:.2f}{mark}", busy, faults, goal)
        return {n: s.seconds for n, s in best.items()}

    def note(self, work: str, value: str, target: str = "") -> None:
        self.table.add_row(work, value, "", "", "", "", "", target)

    def show(self) -> None:
        from rich.console import Console

        Console(width=170).print(self.table)
