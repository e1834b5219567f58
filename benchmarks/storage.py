"""Checkpoints against raw reads and writes and against other libraries: ``python benchmarks/storage.py [--megabytes 1000]``.

All candidates of a row run in turns, in one process, on the same arrays; the ratio is that of the medians. Every writer ends
with the same promise: its files and directories are synced (a library that does not sync gets that done for it, inside its
time). *Warm* reads find the files in the page cache; for *cold* ones the kernel is asked to drop the pages of each file first.
A library that is not installed is named as missing.
"""

from __future__ import annotations

import timing  # first: it sets the number of threads

# isort: split
import argparse
import gc
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from meshtape import storage
from meshtape.storage import LoadReport

ST = timing.peer("safetensors.numpy")
SAFE = timing.peer("safetensors")
ZARR = timing.peer("zarr")
DCP = timing.peer("torch.distributed.checkpoint")
ORBAX = timing.peer("orbax.checkpoint")

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


class Bench:
    """Rows of a table; each candidate runs once a round, after its preparation."""

    def __init__(self, rounds: int) -> None:
        from rich.table import Table

        self.rounds = rounds
        self.table = Table(title="Storage", title_justify="left")
        for column in ("work", "ours", "peer", "theirs", "ratio", "target"):
            self.table.add_column(column, justify="left" if column in ("work", "peer") else "right")

    def row(
        self,
        work: str,
        ours: Callable[[], Any],
        peers: dict[str, tuple[Candidate, float | None]],
        prepare: Callable[[], Any] = lambda: None,
    ) -> dict[str, float]:
        runs = {"": ours, **{n: f for n, (f, _) in peers.items() if f is not None}}
        samples: dict[str, list[float]] = {n: [] for n in runs}
        for _ in range(self.rounds):
            for name, fn in runs.items():
                prepare()
                gc.collect()
                start = time.perf_counter()
                result = fn()
                samples[name].append(time.perf_counter() - start)
                del result
        found = {n: statistics.median(s) for n, s in samples.items()}
        for i, (name, (fn, target)) in enumerate(peers.items()):
            head = (work, f"{found['']:.3f} s") if i == 0 else ("", "")
            goal = "" if target is None else f"≤ {target:g}"
            if fn is None:
                self.table.add_row(*head, name, "missing", "", goal)
                continue
            ratio = found[""] / found[name]
            mark = "" if target is None else " ✓" if ratio <= target else " ✗"
            self.table.add_row(*head, name, f"{found[name]:.3f} s", f"{ratio:.2f}{mark}", goal)
        return found

    def note(self, work: str, value: str, target: str = "") -> None:
        self.table.add_row(work, value, "", "", "", target)

    def show(self) -> None:
        from rich.console import Console

        Console(width=130).print(self.table)


# ----- raw --------------------------------------------------------------------------------------------------------------


def raw_write(path: Path, tree: dict[str, np.ndarray], template: Path) -> None:
    """As many files and directories as ours, of the same lengths, written with plain calls and synced in the same places."""
    path.mkdir()
    for name, a in tree.items():
        (path / name).mkdir()
        for file, data in (("c", a.reshape(-1).view(np.uint8)), ("zarr.json", b" " * 900)):
            fd = os.open(path / name / file, os.O_WRONLY | os.O_CREAT)
            view = memoryview(data)
            while len(view):
                view = view[os.write(fd, view) :]
            os.fsync(fd)
            os.close(fd)
        sync_dir(path / name)
    for file in ("zarr.json", "meshtape.json"):
        (path / file).write_bytes((template / file).read_bytes())
        sync(path / file)
    sync_dir(path)
    sync_dir(path.parent)


def sync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def raw_read(path: Path, tree: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same bytes with ``preadv`` into fresh arrays, in one thread."""
    out = {}
    for name, like in tree.items():
        a = np.empty_like(like)
        view, at = memoryview(a.reshape(-1).view(np.uint8)), 0
        fd = os.open(path / name / "c", os.O_RDONLY)
        while at < len(view):
            at += os.preadv(fd, [view[at : at + (8 << 20)]], at)
        os.close(fd)
        out[name] = a
    return out


# ----- rows -------------------------------------------------------------------------------------------------------------


def dcp_save(path: Path, tree: dict[str, np.ndarray]) -> None:
    import torch

    DCP.save({n: torch.from_numpy(a) for n, a in tree.items()}, checkpoint_id=str(path))
    sync(path)


def orbax_save(path: Path, tree: dict[str, np.ndarray]) -> None:
    with ORBAX.StandardCheckpointer() as saver:
        saver.save(path, tree)
    sync(path)


def zarr_save(path: Path, tree: dict[str, np.ndarray]) -> None:
    group = ZARR.create_group(str(path))
    for name, a in tree.items():
        group.create_array(name, data=a)
    sync(path)


def st_save(path: Path, tree: dict[str, np.ndarray]) -> None:
    ST.save_file(tree, path)
    sync(path)
    sync_dir(path.parent)


def saving(bench: Bench, home: Path, tree: dict[str, np.ndarray]) -> None:
    out = home / "out"

    def clear() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        os.sync()

    storage.save(home / "template", tree)
    peers: dict[str, tuple[Candidate, float | None]] = {
        "raw writes": (lambda: raw_write(out / "r", tree, home / "template"), 1.15),
        "safetensors save_file": (None if ST is None else lambda: st_save(out / "s", tree), 1.0),
        "zarr-python, defaults": (None if ZARR is None else lambda: zarr_save(out / "z", tree), 1.0),
        "PyTorch DCP": (None if DCP is None else lambda: dcp_save(out / "d", tree), 1.0),
        "orbax": (None if ORBAX is None else lambda: orbax_save(out / "o", tree), 1.0),
    }
    bench.row("save, synced", lambda: storage.save(out / "c", tree), peers, clear)

    import meshtape as mt

    held = {n: mt.asarray(a, copy=False) for n, a in tree.items()}
    stalls, whole = [], []
    for _ in range(bench.rounds):
        clear()
        start = time.perf_counter()
        handle = storage.save_async(out / "c", held)
        stalls.append(time.perf_counter() - start)
        handle.wait()
        whole.append(time.perf_counter() - start)
    stall, total = statistics.median(stalls), statistics.median(whole)
    bench.note("save_async: the caller waits", f"{stall:.3f} s = {100 * stall / total:.1f} %", "≤ 5 %")
    shutil.rmtree(out)


def loading(bench: Bench, home: Path, tree: dict[str, np.ndarray]) -> None:
    ours, raw, st, z = home / "template", home / "raw", home / "model.safetensors", home / "z"
    raw_write(raw, tree, ours)
    if ST is not None:
        st_save(st, tree)
    if ZARR is not None:
        zarr_save(z, tree)

    def zarr_load() -> Any:
        group = ZARR.open_group(str(z), mode="r")
        return {n: group[n][...] for n in tree}

    peers: dict[str, tuple[Candidate, float | None]] = {
        "raw preadv, one thread": (lambda: raw_read(raw, tree), 1.15),
        "safetensors load_file": (None if ST is None else lambda: ST.load_file(st), 1.0),
        "zarr-python, defaults": (None if ZARR is None else zarr_load, 1.0),
    }

    def cold() -> None:
        for p in (ours, raw, st, z):
            if p.exists():
                drop(p)

    bench.row("load, verified, warm", lambda: storage.load(ours), peers)
    bench.row("load, verified, cold", lambda: storage.load(ours), peers, cold)

    # A quarter of the columns of every matrix: what one of four tensor-parallel ranks reads.
    names = [n for n, a in tree.items() if a.ndim == 2]
    columns = slice(640, 1280)

    def quarter() -> Any:
        ckpt = storage.open_checkpoint(ours)
        return [ckpt[n][:, columns] for n in names]

    def sliced() -> Any:
        with SAFE.safe_open(st, "np") as f:
            return [f.get_slice(n)[:, columns] for n in names]

    bench.row(
        "a quarter of the columns, cold",
        quarter,
        {"safe_open().get_slice": (None if SAFE is None else sliced, 1.0)},
        cold,
    )
    ckpt = storage.open_checkpoint(ours)
    box = [(ckpt[n].tensor, ckpt[n].shape) for n in names]
    from meshtape.arrays.blocks import Box

    read = sum(t.planned(Box((0, 640), (s[0], 640))) for t, s in box)
    needed = sum(s[0] * 640 * 4 for _, s in box)
    bench.note("a quarter of the columns: bytes read / needed", f"{read / needed:.3f}", "≤ 1.1")
    report = LoadReport()
    storage.load(ours, report=report)
    bench.note("load: bytes read / needed", f"{report.bytes_read / report.bytes_needed:.4f}")


def converting(bench: Bench, home: Path, tree: dict[str, np.ndarray]) -> None:
    four, out = home / "tp4", home / "out"
    split = {"*.weight": {"model": 1}}
    storage.reshard(home / "template", four, mesh={"model": 4}, shardings=split)

    def clear() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        os.sync()

    def copy(synced: bool) -> None:
        subprocess.run(["cp", "-r", str(four), str(out / "copy")], check=True)
        if synced:
            sync(out / "copy")

    peers: dict[str, tuple[Candidate, float | None]] = {
        "cp -r": (lambda: copy(False), 1.5),
        "cp -r, synced": (lambda: copy(True), None),
    }
    bench.row(
        "reshard TP 4 → TP 2, synced, verified, warm",
        lambda: storage.reshard(four, out / "c", mesh={"model": 2}, shardings=split),
        peers,
        clear,
    )
    bench.row("merge TP 4 → safetensors, synced, verified, warm", lambda: storage.merge(four, out / "m"), peers, clear)
    shutil.rmtree(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["save", "load", "convert"], action="append")
    parser.add_argument("--directory", help="where to write; a temporary directory by default")
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="meshtape-bench-", dir=options.directory))
    only = options.only or ["save", "load", "convert"]
    try:
        tree = arrays(options.megabytes)
        size = sum(a.nbytes for a in tree.values())
        bench = Bench(options.rounds)
        bench.table.title = (
            f"Storage: {len(tree)} float32 arrays, {size / 1e6:.0f} MB, {os.cpu_count()} CPUs, {options.rounds} rounds"
        )
        if "save" not in only:
            storage.save(home / "template", tree)
        for name, work in (("save", saving), ("load", loading), ("convert", converting)):
            if name in only:
                work(bench, home, tree)
        bench.show()
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
