"""Rows of ``storage.py``: many small arrays, a model in bfloat16, and a save by several worker processes."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import timing
from storage_peers import DCP, SAFE, ST, raw_write, st_save, sync_dir
from storage_table import Bench, Candidate, measured, sync

import meshtape as mt
from meshtape import storage

TORCH = timing.peer("safetensors.torch") if timing.peer("torch") is not None else None


def small(bench: Bench, home: Path, tree: dict[str, np.ndarray]) -> None:
    """Many arrays of a few numbers: what each costs beside its bytes. The files that Zarr needs for them are two and a
    directory each."""
    held = {f"layers.{i}.weight": np.full((8,), i, np.float32) for i in range(bench.count)}
    out, template = home / "out", home / "small-template"
    template.mkdir()
    for file in ("zarr.json", "meshtape.json"):
        (template / file).write_bytes(b" " * 400 * bench.count)

    def clear() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        os.sync()

    packed, st = home / "packed", home / "small.safetensors"
    theirs: dict[str, tuple[Candidate, float | None]] = {
        "safetensors save_file": (None if ST is None else lambda: st_save(out / "s", held), 4.0)
    }
    count = f"{bench.count} small arrays"
    bench.row(f"save {count}, packed", lambda: storage.save(out / "c", held, pack=True), theirs, clear, cpu=True)
    bench.row(f"save {count}, safetensors", lambda: storage.save_safetensors(out / "c", held), theirs, clear, cpu=True)
    storage.save(packed, held, pack=True)
    storage.save_safetensors(st, held)
    # Once: the system spends a minute on so many files, whoever makes them.
    ours = home / "unpacked"
    spent, _ = measured(lambda: storage.save(ours, held))
    raw = ""
    if bench.wants("raw writes"):
        clear()
        plain, _ = measured(lambda: raw_write(out / "r", held, template))
        raw = f"; raw writes of the same files {plain.seconds:.1f} s, {plain.work:.1f} s of work"
    bench.note(f"save {count}, a directory each", f"{spent.seconds:.1f} s, {spent.work:.1f} s of work{raw}")
    read: dict[str, tuple[Candidate, float | None]] = {
        "safetensors load_file": (None if ST is None else lambda: ST.load_file(st), 4.0)
    }
    for kind, where in (("packed", packed), ("a directory each", ours), ("safetensors", st)):
        bench.row(f"load {count}, {kind}", lambda where=where: storage.load(where), read, cpu=True)
    spent, _ = measured(lambda: storage.open_checkpoint(ours))
    bench.note(f"open {count}", f"{spent.seconds:.2f} s, {spent.work:.2f} s of work")
    for path in (ours, packed, out, template):
        shutil.rmtree(path)


def decoder(megabytes: int, layers: int = 33) -> dict[str, np.ndarray]:
    """About three hundred bfloat16 tensors with the names and the proportions of a decoder: four wide matrices, three
    wider ones, two scales a layer."""
    width = max(64, math.isqrt(megabytes * 1_000_000 // (2 * 12 * layers)) // 64 * 64)
    block = np.random.default_rng(0).standard_normal(1 << 20, np.float32).astype(ml_dtypes.bfloat16)
    shapes = {f"self_attn.{n}_proj.weight": (width, width) for n in "qkvo"}
    shapes |= {f"mlp.{n}_proj.weight": (8 * width // 3, width) for n in ("gate", "up")}
    shapes |= {
        "mlp.down_proj.weight": (width, 8 * width // 3),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    return {
        f"model.layers.{i}.{name}": np.resize(np.roll(block, i), shape)
        for i in range(layers)
        for name, shape in shapes.items()
    }


def models(bench: Bench, home: Path, tree: dict[str, np.ndarray]) -> None:
    """A model of three hundred tensors in bfloat16, as most are kept. Values that a peer maps are copied, so that all
    of them are read."""
    held = decoder(sum(a.nbytes for a in tree.values()) // 1_000_000)
    out, ours, st = home / "out", home / "model", home / "bf16.safetensors"
    theirs: dict[str, Any] = {}
    if TORCH is not None:
        import torch

        theirs = {n: torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) for n, a in held.items()}

    def clear() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        os.sync()

    def save() -> None:
        TORCH.save_file(theirs, out / "s")
        sync(out / "s")
        sync_dir(out)

    def dcp() -> None:
        DCP.save(theirs, checkpoint_id=str(out / "d"))
        sync(out / "d")

    size = f"{len(held)} bfloat16 tensors, {sum(a.nbytes for a in held.values()) / 1e6:.0f} MB"
    bench.row(
        f"save {size}",
        lambda: storage.save(out / "c", held),
        {
            "safetensors.torch save_file": (save if theirs else None, 1.0),
            "PyTorch DCP": (dcp if theirs and DCP is not None else None, 1.0),
        },
        clear,
    )
    storage.save(ours, held)
    storage.save_safetensors(st, held)
    read = {
        "safetensors.torch load_file, cloned": (
            (lambda: {n: t.clone() for n, t in TORCH.load_file(st).items()}) if theirs else None,
            1.0,
        )
    }
    bench.row(f"load {size}, verified, warm", lambda: storage.load(ours), read)
    bench.row(f"load {size} of safetensors, verified, warm", lambda: storage.load(st), read)
    shutil.rmtree(out)
    shutil.rmtree(ours)


def workers(bench: Bench, home: Path, tree: dict[str, np.ndarray]) -> None:
    """A save by four worker processes, each of which holds a quarter of every matrix, against one process that holds
    all."""
    from meshtape.parallel.dask.cluster import local_cluster

    out, template = home / "out", home / "template"
    if not template.exists():
        storage.save(template, tree)

    def clear() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        os.sync()

    with local_cluster(4) as client, mt.Mesh({"model": 4}, client=client) as mesh:
        split = {n: mt.distribute(a, mesh, model=mt.Shard(0)) for n, a in tree.items()}
        bench.row(
            "save of 4 workers, synced",
            lambda: storage.save(out / "c", split),
            {
                "the same of one process": (lambda: storage.save(out / "o", tree), 1.0),
                "raw writes of one process": (lambda: raw_write(out / "r", tree, template), None),
                "safetensors save_file of one process": (
                    None if SAFE is None else lambda: st_save(out / "s", tree),
                    None,
                ),
            },
            clear,
        )
    shutil.rmtree(out)
