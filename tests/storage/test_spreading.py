"""merge, convert and reshard spread over other processes: the same bytes for any number of workers, and resumable."""

import multiprocessing
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from distributed import Client, LocalCluster

from meshtape import errors
from meshtape.storage import blend, convert, load, merge, reshard, save, verify
from meshtape.storage.stores.filesystem import Files, using
from meshtape.storage.transform.workers import Workers

LAYOUT = {"mesh": {"m": 3}, "shardings": {"w": {"m": 1}, "*": {}}}


def files(home):
    return {p.relative_to(home).as_posix(): p.read_bytes() for p in sorted(Path(home).rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def source(tmp_path_factory, kit):
    home = tmp_path_factory.mktemp("source")
    rows = kit.Sharding(kit.Host({"x": 2}), (0,))
    w = kit.random(np.dtype("f4"), (700, 900))
    save(
        home / "c",
        {"w": kit.split(w, rows), "b": kit.random(np.dtype("f8"), (5,)), "s": np.float32(2), "e": np.zeros((0, 2))},
    )
    return home / "c"


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(n_workers=2, threads_per_worker=2, processes=True, dashboard_address=None) as c,
        Client(c) as client,
    ):
        yield client


def test_a_dask_cluster_writes_the_same_bytes(source, client, tmp_path):
    reshard(source, tmp_path / "here", **LAYOUT)
    for threads, limit in ((1, 1 << 20), (5, 3 << 20)):
        seen = []
        reshard(
            source,
            tmp_path / f"there{threads}",
            **LAYOUT,
            client=client,
            threads=threads,
            memory_limit=limit,
            progress=lambda done, total, seen=seen: seen.append((done, total)),
        )
        assert files(tmp_path / f"there{threads}") == files(tmp_path / "here")
        assert seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1]
        assert len(seen) > 3
    # Any bits are in the array, so some numbers are beyond bfloat16's range: refused here as there, and counted alike.
    options = {"rules": "w -> w, permute(), cast(dtype=bfloat16)"}
    there = {"client": client, "threads": 8, "memory_limit": 1 << 20}
    for spread in ({}, there):
        with pytest.raises(errors.Lossy, match="'w': 9 became infinite, 14 became zero"):
            merge(source, tmp_path / "m1", **options, **spread)
    a = merge(source, tmp_path / "m1", **options, allow_overflow=True)
    b = merge(source, tmp_path / "m2", **options, **there, allow_overflow=True)
    assert files(tmp_path / "m1") == files(tmp_path / "m2")
    assert a.losses == b.losses
    assert a.losses["w"].overflow == 9


def test_a_dask_cluster_blends_the_same_bytes(source, client, kit, tmp_path):
    """Of sharded Zarr and of safetensors, by a method of single elements, one of whole arrays and one of chance."""
    shape, models = (700, 900), []
    for i in range(3):
        w = np.random.default_rng(i).standard_normal(shape, "f4")
        split = {"w": kit.split(w, kit.Sharding(kit.Host({"x": 2}), (0,)))}
        save(place := tmp_path / f"m{i}", split if i % 2 else {"w": w})
        models.append(str(place) if i % 2 else merge(place, tmp_path / f"hf{i}").path)
    for method, given in (("linear", {}), ("ties", {"density": 0.3}), ("dare_ties", {"density": 0.5})):
        tuned = [{"model": m, "parameters": {"weight": 0.5, **given}} for m in models[1:]]
        said = {"merge_method": method, "models": tuned}
        if method != "linear":
            said["base_model"] = models[0]
        here = blend(said, tmp_path / f"{method}-here", seed=3)
        there = blend(said, tmp_path / f"{method}-there", seed=3, client=client, threads=2, memory_limit=1 << 20)
        assert files(here.path) == files(there.path)
        assert there.made["w"].method == method


def test_one_key_and_more_workers_than_keys(client, kit, tmp_path):
    save(tmp_path / "c", {"only": np.arange(3)})
    merge(tmp_path / "c", tmp_path / "m", client=client, threads=16)
    assert kit.same(load(tmp_path / "m")["only"], np.arange(3))
    save(tmp_path / "none", {})
    assert merge(tmp_path / "none", tmp_path / "m0", client=client).arrays == 0
    assert load(tmp_path / "m0") == {}


def test_any_executor_will_do(source, tmp_path):
    reshard(source, tmp_path / "here", **LAYOUT)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        reshard(source, tmp_path / "there", **LAYOUT, client=pool, threads=4, memory_limit=2 << 20)
    with ThreadPoolExecutor(3) as pool:
        convert(source, tmp_path / "threads", format="zarr", **LAYOUT, client=pool, threads=3)
    assert files(tmp_path / "there") == files(tmp_path / "here") == files(tmp_path / "threads")
    verify(tmp_path / "there")


def test_what_a_worker_raises_is_raised_here_and_the_rest_goes_on_later(source, tmp_path):
    """An interruption in the middle leaves the part; the same call afterwards finishes it."""

    class Breaks(Files):
        done = 0

        def write(self, fd, buffers, offset):
            self.done += 1
            if self.done == 4:
                raise OSError(5, "the disk hiccuped")
            return super().write(fd, buffers, offset)

    with ThreadPoolExecutor(2) as pool:
        with using(Breaks()), pytest.raises(OSError, match="hiccuped"):
            reshard(source, tmp_path / "r", **LAYOUT, client=pool, threads=2, memory_limit=1 << 20)
        assert (tmp_path / "r.part").exists()
        report = reshard(source, tmp_path / "r", **LAYOUT, client=pool, threads=2, memory_limit=1 << 20)
    assert report.resumed > 0
    reshard(source, tmp_path / "here", **LAYOUT)
    assert files(tmp_path / "r") == files(tmp_path / "here")


def test_a_cluster_cannot_upload(source, client):
    pytest.importorskip("obstore")
    with pytest.raises(errors.CheckpointError, match="leave out client="):
        reshard(source, "memory://spread/x", **LAYOUT, client=client)


@pytest.mark.parametrize("executor", [False, True])
def test_nothing_is_begun_after_an_error(executor):
    begun = []

    def work(i):
        begun.append(i)
        if i == 2:
            raise ValueError("two")
        return i

    with ThreadPoolExecutor(1) as pool:
        spread = Workers(1, pool) if executor else Workers(2)
        with pytest.raises(ValueError, match="two"):
            list(spread.over(work, list(range(100)), lambda i: (i,)))
    assert len(begun) < 10


def test_work_that_is_cancelled_as_the_scheduler_is_gone():
    class Gone(ThreadPoolExecutor):
        def submit(self, *args):
            done = Future()
            done.cancel()
            done.set_running_or_notify_cancel()
            return done

    with pytest.raises(errors.ClusterError, match="the scheduler is gone"):
        list(Workers(1, Gone()).over(print, [1, 2], lambda i: (i,)))
