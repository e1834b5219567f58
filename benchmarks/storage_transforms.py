"""Rows of ``storage.py``: checkpoints cut anew and merged, large tables of contents, and object stores."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import timing
from storage_table import Bench, Candidate, sync

from meshtape import storage


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
    from meshtape.arrays.core.blocks import Box
    from meshtape.storage.format import manifest
    from meshtape.storage.format.chunk_grid import ChunkGrid

    grid = ChunkGrid((64 * ranks, 512), (64, 512), (64, 512))
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
