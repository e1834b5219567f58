"""Checkpoints against raw reads and writes and against other libraries: ``python benchmarks/storage.py [--megabytes 1000]``.

All candidates of a row run in turns, in one process, on the same arrays; the ratio is that of the medians. The processor time of all
threads stands beside it. Every writer ends with the same promise: its files and directories are synced (a library that does not sync gets
that done for it, inside its time). *Warm* reads find the files in the page cache; for *cold* ones the kernel is asked to drop the pages of
each file first. A library that is not installed is named as missing, one that fails with its error. What a user has who installed the
package is measured, see :mod:`installed`; with ``--editable``, the sources of this checkout.
"""

from __future__ import annotations

import installed

if __name__ == "__main__":
    installed.run_on_wheel()

import timing  # before NumPy: it sets the number of threads

# isort: split
import argparse
import contextlib
import ctypes
import dataclasses
import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
TENSORSTORE = timing.peer("tensorstore")

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


class Bench:
    """Rows of a table; each candidate runs once a round, after its preparation."""

    def __init__(self, rounds: int, against: list[str] | None = None, chunks: int = 1_000_000) -> None:
        from rich.table import Table

        self.rounds, self.against, self.chunks = rounds, against, chunks
        self.table = Table(title="Storage", title_justify="left")
        for column in ("work", "ours", "peer", "theirs", "ratio", "CPU ours / theirs", "target"):
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
    ) -> dict[str, float]:
        peers = {n: p for n, p in peers.items() if self.wants(n)}
        runs = {"": ours, **{n: f for n, (f, _) in peers.items() if f is not None}}
        samples: dict[str, list[float]] = {n: [] for n in runs}
        cpu: dict[str, list[float]] = {n: [] for n in runs}
        failed: dict[str, str] = {}
        for _ in range(self.rounds):
            for name, fn in runs.items():
                if name in failed:
                    continue
                prepare()
                give_back()
                start, worked = time.perf_counter(), time.process_time()
                try:
                    result = fn()
                except Exception as e:
                    if not name:
                        raise
                    failed[name] = f"{type(e).__name__}: {e}".split("\n")[0][:40]
                    continue
                samples[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - worked)
                del result
        found = {n: statistics.median(s) for n, s in samples.items() if n not in failed}
        spent = {n: statistics.median(s) for n, s in cpu.items() if n not in failed}
        for i, (name, (fn, target)) in enumerate(peers.items()):
            head = (work, f"{found['']:.3f} s") if i == 0 else ("", "")
            goal = "" if target is None else f"≤ {target:g}"
            if fn is None or name in failed:
                self.table.add_row(*head, name, failed.get(name, "missing"), "", "", goal)
                continue
            ratio = found[""] / found[name]
            mark = "" if target is None else " ✓" if ratio <= target else " ✗"
            busy = f"{spent['']:.2f} / {spent[name]:.2f} s"
            self.table.add_row(*head, name, f"{found[name]:.3f} s", f"{ratio:.2f}{mark}", busy, goal)
        return found

    def note(self, work: str, value: str, target: str = "") -> None:
        self.table.add_row(work, value, "", "", "", "", target)

    def show(self) -> None:
        from rich.console import Console

        Console(width=170).print(self.table)


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


def raw_read(path: Path, tree: dict[str, np.ndarray], threads: int = 1) -> dict[str, np.ndarray]:
    """The same bytes with ``preadv`` into new arrays: memory is given back before each, so both begin with pages that nobody has touched."""
    out = {name: np.empty_like(like) for name, like in tree.items()}

    def fill(name: str) -> None:
        view, at = memoryview(out[name].reshape(-1).view(np.uint8)), 0
        fd = os.open(path / name / "c", os.O_RDONLY)
        while at < len(view):
            at += os.preadv(fd, [view[at : at + (8 << 20)]], at)
        os.close(fd)

    if threads == 1:
        for name in tree:
            fill(name)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, tree))
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


def dcp_load(path: Path, tree: dict[str, np.ndarray]) -> Any:
    import torch

    out = {n: torch.empty(a.shape, dtype=torch.float32) for n, a in tree.items()}
    DCP.load(out, checkpoint_id=str(path))
    return out


def orbax_load(path: Path) -> Any:
    with ORBAX.StandardCheckpointer() as loader:
        return loader.restore(path)


def tensorstore_spec(path: Path, name: str) -> dict[str, Any]:
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path / name)}}


def tensorstore_save(path: Path, tree: dict[str, np.ndarray]) -> None:
    """One chunk an array, uncompressed, all at once; it syncs its files itself."""
    jobs = []
    for name, a in tree.items():
        store = TENSORSTORE.open(
            tensorstore_spec(path, name), create=True, dtype=TENSORSTORE.float32, shape=list(a.shape),
            chunk_layout=TENSORSTORE.ChunkLayout(chunk_shape=list(a.shape)),
        ).result()  # fmt: skip
        jobs.append(store.write(a))
    for job in jobs:
        job.result()
    sync(path)


def tensorstore_load(path: Path, tree: dict[str, np.ndarray]) -> Any:
    jobs = {n: TENSORSTORE.open(tensorstore_spec(path, n)).result().read() for n in tree}
    return {n: job.result() for n, job in jobs.items()}


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

    peers: dict[str, tuple[Candidate, float | None]] = {
        "raw writes": (lambda: raw_write(out / "r", tree, home / "template"), 1.15),
        "safetensors save_file": (None if ST is None else lambda: st_save(out / "s", tree), 1.0),
        "zarr-python, defaults": (None if ZARR is None else lambda: zarr_save(out / "z", tree), 1.0),
        "PyTorch DCP": (None if DCP is None else lambda: dcp_save(out / "d", tree), 1.0),
        "orbax": (None if ORBAX is None else lambda: orbax_save(out / "o", tree), 1.0),
        "tensorstore, zarr3": (None if TENSORSTORE is None else lambda: tensorstore_save(out / "t", tree), 1.0),
    }
    bench.row("save, synced", lambda: storage.save(out / "c", tree), peers, clear)

    shutil.rmtree(out)


def background(bench: Bench, home: Path, tree: dict[str, np.ndarray]) -> None:
    """How long a loop of training steps stands still for a save in the background, as a share of the synchronous save.

    Beside that the steps get slower while another core writes, whoever does: plain calls of one thread say by how much.
    """
    import meshtape as mt

    out = home / "out"
    held = {n: mt.asarray(a, copy=False) for n, a in tree.items()}
    w = np.random.default_rng(1).standard_normal((512, 512), np.float32)

    count = min(300, 10 + sum(a.nbytes for a in tree.values()) // (1 << 20))

    def step() -> None:
        np.tanh(w @ w)

    def clear() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        os.sync()

    def lost(begin: Callable[[], Any], done: Callable[[Any], bool]) -> tuple[float, float]:
        """Seconds of a call, and what the steps lose until its work is done; alone they are timed before and after."""

        def alone() -> float:
            start = time.perf_counter()
            for _ in range(count):
                step()
            return (time.perf_counter() - start) / count

        clear()
        before, steps = alone(), 0
        start = time.perf_counter()
        work = begin()
        call = time.perf_counter() - start
        while not done(work):
            step()
            steps += 1
        took = time.perf_counter() - start
        return call, took - steps * (before + alone()) / 2

    def save() -> Any:
        return storage.save_async(out / "c", held)

    def write() -> threading.Thread:
        thread = threading.Thread(target=raw_write, args=(out / "r", tree, home / "template"))
        thread.start()
        return thread

    for _ in range(50):
        step()
    calls, losses, plain, whole = [], [], [], []
    for _ in range(bench.rounds):
        clear()
        start = time.perf_counter()
        storage.save(out / "c", held)
        whole.append(time.perf_counter() - start)
        call, loss = lost(save, lambda handle: handle.done())
        calls.append(call)
        losses.append(loss)
        plain.append(lost(write, lambda thread: not thread.is_alive())[1])
    saved = statistics.median(whole)
    for work, values, goal in (
        ("save_async: the call", calls, "≤ 5 %"),
        ("all that the steps beside it lose", losses, ""),
        ("what they lose beside raw writes of one thread", plain, ""),
    ):
        seconds = statistics.median(values)
        bench.note(work, f"{seconds:.3f} s = {100 * seconds / saved:.1f} % of save", goal)
    shutil.rmtree(out)


def loading(bench: Bench, home: Path, tree: dict[str, np.ndarray]) -> None:
    ours, raw, st, z = home / "template", home / "raw", home / "model.safetensors", home / "z"
    if bench.wants("raw preadv, one thread") or bench.wants("raw preadv, two threads"):
        raw_write(raw, tree, ours)
    if ST is not None:
        st_save(st, tree)
    if ZARR is not None and bench.wants("zarr-python"):
        zarr_save(z, tree)
    if DCP is not None and bench.wants("DCP"):
        dcp_save(home / "dcp", tree)
    if ORBAX is not None and bench.wants("orbax"):
        orbax_save(home / "orbax", tree)
    if TENSORSTORE is not None and bench.wants("tensorstore"):
        tensorstore_save(home / "ts", tree)

    def zarr_load() -> Any:
        group = ZARR.open_group(str(z), mode="r")
        return {n: group[n][...] for n in tree}

    peers: dict[str, tuple[Candidate, float | None]] = {
        "raw preadv, one thread": (lambda: raw_read(raw, tree), 1.15),
        "raw preadv, two threads": (lambda: raw_read(raw, tree, 2), None),
        "safetensors load_file": (None if ST is None else lambda: ST.load_file(st), 1.0),
        "zarr-python, defaults": (None if ZARR is None else zarr_load, 1.0),
        "PyTorch DCP": (None if DCP is None else lambda: dcp_load(home / "dcp", tree), 1.0),
        "orbax": (None if ORBAX is None else lambda: orbax_load(home / "orbax"), 1.0),
        "tensorstore, zarr3": (None if TENSORSTORE is None else lambda: tensorstore_load(home / "ts", tree), 1.0),
    }

    def cold() -> None:
        for p in (ours, raw, st, z, home / "dcp", home / "orbax", home / "ts"):
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


def slices(bench: Bench, home: Path, tree: dict[str, np.ndarray]) -> None:
    """Every tenth row, a column, and both with steps, of one large matrix, from a file of safetensors and from a checkpoint."""
    size = sum(a.nbytes for a in tree.values())
    w = np.resize(next(iter(tree.values())), (max(100, size // 40_000), 10_000))
    st, ours = home / "one.safetensors", home / "one"
    storage.save_safetensors(st, {"w": w})
    storage.save(ours, {"w": w})
    del w  # a matrix as large as all arrays together
    give_back()

    def peer(index: Any) -> Any:
        with SAFE.safe_open(st, "np") as f:
            return f.get_slice("w")[index]

    every = {"every tenth row": np.s_[::10], "one column": np.s_[:, 5], "steps in both": np.s_[::3, ::7]}
    for where in (st, ours):
        for name, index in every.items():
            bench.row(
                f"{name} of {size / 1e9:.1f} GB, {'safetensors' if where == st else 'ours'}, warm",
                lambda where=where, index=index: storage.open_checkpoint(where)["w"][index],
                {"safe_open().get_slice": (None if SAFE is None else lambda index=index: peer(index), None)},
            )


def small(bench: Bench, home: Path, tree: dict[str, np.ndarray], count: int = 100_000) -> None:
    """Many arrays of a few numbers: what each costs beside its bytes, in time of the processor too."""
    held = {f"layers.{i}.weight": np.full((8,), i, np.float32) for i in range(count)}
    st, ours = home / "small.safetensors", home / "small"
    save = time.process_time()
    storage.save(ours, held)
    save = time.process_time() - save
    storage.save_safetensors(st, held)
    opened = time.process_time()
    storage.open_checkpoint(ours)
    opened = time.process_time() - opened
    used: dict[str, float] = {}

    def timed(name: str, fn: Callable[[], Any]) -> Candidate:
        def run() -> Any:
            start = time.process_time()
            out = fn()
            used[name] = time.process_time() - start
            return out

        return run

    theirs = None if ST is None else timed("theirs", lambda: ST.load_file(st))
    bench.row(
        f"load {count} small arrays",
        timed("ours", lambda: storage.load(ours)),
        {"safetensors load_file": (theirs, None)},
    )
    bench.row(
        f"load {count} small arrays of a safetensors file",
        timed("raw", lambda: storage.load(st)),
        {"safetensors load_file": (theirs, None)},
    )
    work = {"save": save, "open": opened, "load": used["ours"], "load of safetensors": used["raw"]}
    work |= {"safetensors load_file": used["theirs"]} if "theirs" in used else {}
    bench.note("the same, work of processors", ", ".join(f"{n} {t:.2f} s" for n, t in work.items()))


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
        "cp -r, synced": (lambda: copy(True), 1.5),
        "cp -r, unsynced": (lambda: copy(False), None),
    }
    bench.row(
        "reshard TP 4 → TP 2, synced, verified, warm",
        lambda: storage.reshard(four, out / "c", mesh={"model": 2}, shardings=split),
        peers,
        clear,
    )
    bench.row("merge TP 4 → safetensors, synced, verified, warm", lambda: storage.merge(four, out / "m"), peers, clear)
    limit = 256
    grown = subprocess.run(
        [sys.executable, "-P", "-c", _GROWTH, str(four), str(out / "grown"), str(limit)],
        check=True,
        capture_output=True,
        text=True,
    )
    bench.note(
        f"reshard with memory_limit {limit} MiB: memory grows by", f"{int(grown.stdout)} MiB", f"≤ {limit + 150} MiB"
    )
    shutil.rmtree(out)


_GROWTH = """
import sys, tempfile, numpy as np
from meshtape import storage
def peak():  # in MiB; getrusage would count the process that started this one
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) >> 10
home = tempfile.mkdtemp()
storage.save(home + "/a", {"w": np.ones((4, 4))})
storage.reshard(home + "/a", home + "/b", mesh={"m": 2}, shardings={"w": {"m": 0}})
before = peak()
storage.reshard(sys.argv[1], sys.argv[2], mesh={"model": 2}, shardings={"*.weight": {"model": 1}}, memory_limit=int(sys.argv[3]) << 20)
print(peak() - before)
"""


def contents(bench: Bench, home: Path, tree: dict[str, np.ndarray], ranks: int = 1000) -> None:
    """The table of contents of a checkpoint that a thousand ranks have written: listed, and planned for one of them."""
    chunks = bench.chunks
    from meshtape.arrays.blocks import Box
    from meshtape.storage import manifest
    from meshtape.storage.grid import Grid

    grid = Grid((64 * ranks, 512), (64, 512), (64, 512))
    nbytes = grid.object_nbytes((0, 0), 4)
    rows = [[grid.key(c), [64 * c[0], 0], [64, 512], nbytes, "01234567"] for c in grid.shards()]
    entries = [
        manifest.ArrayEntry((f"layers.{i}.weight",), f"layers.{i}.weight", grid, np.dtype("f4"), 0, ["Shard(0)"], rows)
        for i in range(chunks // ranks)
    ]
    tree = {"dict": [[f"layers.{i}.weight", {"array": i}] for i in range(len(entries))]}
    (home / "many").mkdir()
    data = manifest.Manifest(entries, tree, 1, {}, [{"rank": ranks}]).dumps()
    (home / "many" / manifest.FILE).write_bytes(data)
    start, worked = time.perf_counter(), time.process_time()
    ckpt = storage.open_checkpoint(home / "many")
    opened, worked = time.perf_counter(), time.process_time() - worked
    plan = [a.tensor.only(Box((64 * 17, 0), (64, 512))) for a in ckpt.values()]
    planned = time.perf_counter()
    assert all(len(t.objects) == 1 for t in plan)
    bench.note(f"ls of {chunks} chunks, {ranks} ranks", f"{opened - start:.2f} s ({worked:.2f} s of work)", "≤ 5 s")
    bench.note("plan of one rank of it", f"{planned - opened:.2f} s", "≤ 5 s")
    names = [
        f"layers.{i}.experts.{x}.{n}"
        for i in range(max(1, chunks // 10_000))
        for x in range(334)
        for n in ("gate", "up", "down")
    ]
    first = next(iter(ckpt.values())).tensor
    arrays = {n: storage.StoredArray((n,), first) for n in names}
    many = dataclasses.replace(ckpt, arrays=arrays, structure={})
    rules = storage.Rules("layers.{i}.experts.{x}.{n} -> blocks.{i}.{n}.{x}, permute()")
    start, worked = time.perf_counter(), time.process_time()
    assert len(rules.on(many)) == len(names)
    seconds, worked = time.perf_counter() - start, time.process_time() - worked
    bench.note(f"key rules on {len(names)} keys", f"{seconds:.2f} s ({worked:.2f} s of work)", "≤ 1 s")
    bench.note("metadata", f"{len(data) / chunks:.0f} bytes a chunk", "≤ 200")


def objects(bench: Bench, home: Path, tree: dict[str, np.ndarray]) -> None:
    """The same arrays in an object store on this machine, against the client's own calls with the same bytes."""
    server = timing.peer("moto.server")
    obstore = timing.peer("obstore")
    if server is None or obstore is None:
        bench.note("object store", "moto or obstore is missing")
        return
    import socket
    import urllib.request

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "moto.server", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    os.environ |= {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_REGION": "us-east-1",
    }
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(urllib.request.Request(f"{address}/bench", method="PUT")).read()
                break
            except OSError:
                time.sleep(0.1)
        raw = obstore.store.S3Store("bench", client_options={"allow_http": True})
        few = dict(list(tree.items())[:20])

        def raw_put() -> None:
            with ThreadPoolExecutor(8) as pool:
                list(
                    pool.map(
                        lambda item: obstore.put(raw, f"raw/{item[0]}", memoryview(item[1]).cast("B")), few.items()
                    )
                )

        def raw_get() -> Any:
            with ThreadPoolExecutor(16) as pool:
                found = pool.map(lambda n: obstore.get(raw, f"raw/{n}").bytes(), few)
                return [np.frombuffer(memoryview(b), np.uint8).copy() for b in found]

        size = sum(a.nbytes for a in few.values()) / 1e6
        bench.row(
            f"s3:// save, {size:.0f} MB, local server",
            lambda: storage.save("s3://bench/ours", few, overwrite=True),
            {"obstore put, 8 threads": (raw_put, None)},
        )
        bench.row(
            f"s3:// load, verified, {size:.0f} MB",
            lambda: storage.load("s3://bench/ours"),
            {"obstore get, 16 threads": (raw_get, None)},
        )
    finally:
        process.terminate()
        process.wait()


PARTS = {
    "save": saving,
    "async": background,
    "load": loading,
    "slices": slices,
    "small": small,
    "convert": converting,
    "contents": contents,
    "objects": objects,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=1_000_000, help="in the table of contents that is listed")
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--against", action="append", help="only peers whose name has this in it")
    parser.add_argument("--editable", action="store_true", help="measure the sources of this checkout")
    parser.add_argument("--directory", help="where to write; a temporary directory by default")
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="meshtape-bench-", dir=options.directory))
    only = options.only or list(PARTS)
    try:
        tree = arrays(options.megabytes)
        size = sum(a.nbytes for a in tree.values())
        bench = Bench(options.rounds, options.against, options.chunks)
        bench.table.title = f"Storage: {len(tree)} float32 arrays, {size / 1e6:.0f} MB, {os.cpu_count()} CPUs, {options.rounds} rounds, {installed.core()}"
        if {"save", "async", "load", "convert"} & set(only):
            storage.save(home / "template", tree)
        for name, work in PARTS.items():
            if name in only:
                work(bench, home, tree)
        bench.show()
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
