"""Rows of ``storage.py``: arrays saved and loaded whole, in the background, and in slices."""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from storage_peers import (
    DCP,
    ORBAX,
    SAFE,
    ST,
    TENSORSTORE,
    ZARR,
    dcp_load,
    dcp_save,
    orbax_load,
    orbax_save,
    raw_read,
    raw_write,
    st_save,
    tensorstore_load,
    tensorstore_save,
    zarr_save,
)
from storage_table import Bench, Candidate, drop, give_back

from meshtape import storage
from meshtape.storage import LoadReport


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
    from meshtape.arrays.core.blocks import Box

    read = sum(t.planned(Box((0, 640), (s[0], 640))) for t, s in box)
    needed = sum(s[0] * 640 * 4 for _, s in box)
    bench.note("a quarter of the columns: bytes read / needed", f"{read / needed:.3f}", "≤ 1.1")
    report = LoadReport()
    storage.load(ours, report=report)
    bench.note("load: bytes read / needed", f"{report.bytes_read / report.bytes_needed:.4f}")


def slices(bench: Bench, home: Path, tree: dict[str, np.ndarray]) -> None:
    """Every tenth row, a column, and both with steps, of one large matrix, from a file of safetensors and from a
    checkpoint."""
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
