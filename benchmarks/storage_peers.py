"""What ``storage.py`` compares with: plain system calls, and other libraries, each with the promise that its files are
synced."""

from __future__ import annotations

import timing  # before NumPy: it sets the number of threads

# isort: split
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from storage_table import sync

ST = timing.peer("safetensors.numpy")
SAFE = timing.peer("safetensors")
ZARR = timing.peer("zarr")
DCP = timing.peer("torch.distributed.checkpoint")
ORBAX = timing.peer("orbax.checkpoint")
TENSORSTORE = timing.peer("tensorstore")


def raw_write(path: Path, tree: dict[str, np.ndarray], template: Path) -> None:
    """As many files and directories as ours, of the same lengths, written with plain calls and synced in the same
    places."""
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
    """The same bytes with ``preadv`` into new arrays: memory is given back before each, so both begin with pages that
    nobody has touched."""
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
