"""Meshes on real Dask workers: the numbers of the virtual mesh, one task a worker a run, and blocks that stay where
they are."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape.parallel.base.settings import number
from meshtape.parallel.dask import runtime
from meshtape.parallel.dask import worker as mesh_worker
from meshtape.parallel.dask.cluster import local_cluster
from meshtape.parallel.dask.workers import known_workers

pytestmark = pytest.mark.timeout(300)
LIMIT = 250.0


def held(client: Client) -> dict[str, int]:
    """Bytes that each run has left on the workers."""

    def count(dask_worker: Any) -> dict[str, int]:
        kept = dict(mesh_worker._STATES[dask_worker.address].resident._in_memory)
        return {k: sum(b.nbytes for s in v.slots.values() for b in s.values()) for k, v in kept.items()}

    found: dict[str, int] = {}
    for runs in client.run(count).values():
        for run, size in runs.items():
            found[run] = found.get(run, 0) + size
    return found


@pytest.fixture(params=["processes", "threads"])
def client(request: pytest.FixtureRequest) -> Client:
    return request.getfixturevalue(request.param)


# ----- the same numbers -----------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "product": lambda x, y: x @ y,
    "loss": lambda x, y: mt.mean(mt.square(mt.tanh(x @ y))),
    "softmax": lambda x, y: mt.nn.softmax(x, axis=1) @ y,
    "layer_norm": lambda x, y: mt.layer_norm(x, 6) @ y,
    "maximum": lambda x, y: mt.max(x, axis=0) - mt.min(y, axis=1),
    "rows": lambda x, y: x[np.array([4, 0, 0])] @ y,
    "turned": lambda x, y: mt.reshape(x, (6, 5)).mT + y.mT[:5],
}


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(data=st.data())
def test_split_equals_unsplit(client, data):
    sizes = data.draw(st.sampled_from([{"a": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2}, {"a": 1, "b": 5}]))
    fn = FUNCTIONS[data.draw(st.sampled_from(sorted(FUNCTIONS)))]
    rng = np.random.default_rng(0)
    values = rng.normal(size=(5, 6)), rng.normal(size=(6, 6))
    choices = [mt.Replicate(), mt.Shard(0), mt.Shard(1)]
    with mt.Mesh(sizes, client=client) as mesh:
        x, y = (mt.distribute(v, mesh, **{n: data.draw(st.sampled_from(choices)) for n in sizes}) for v in values)
        expected, pull = mt.vjp(fn, *map(mt.asarray, values))
        got, pull_there = mt.vjp(fn, x, y)
        np.testing.assert_allclose(got, expected, rtol=1e-12)
        seed = mt.ones(expected.shape)
        for g, e in zip(pull_there(seed), pull(seed), strict=True):
            np.testing.assert_allclose(g, e, rtol=1e-12)


def test_ragged_and_empty_blocks(client):
    value = np.arange(5.0 * 3).reshape(5, 3)
    with mt.Mesh({"a": 4}, client=client) as mesh:
        x = mt.distribute(value, mesh, a=mt.Shard(0))  # 2, 2, 1 and 0 rows
        np.testing.assert_array_equal(mt.reshard(x + 1, a=mt.Shard(1)), value + 1)
        np.testing.assert_array_equal(mt.sum(x, axis=0), value.sum(axis=0))
        assert float(mt.max(x)) == 14.0
        empty = mt.distribute(np.zeros((0, 3)), mesh, a=mt.Shard(0))
        assert mt.reshard(empty * 2, a=mt.Shard(1)).shape == np.asarray(mt.reshard(empty * 2, a=mt.Shard(1))).shape
        assert float(mt.sum(empty)) == 0.0


@pytest.mark.parametrize("dtype", ["?", "i2", "c16", "bfloat16", "float8_e4m3fn"])
def test_dtypes_cross_between_processes(processes, dtype):
    from meshtape.arrays.core import dtypes  # noqa: F401  # registers the names of ml_dtypes

    value = np.arange(14).reshape(7, 2).astype(dtype)
    with mt.Mesh({"a": 4}, client=processes) as mesh:
        x = mt.distribute(value, mesh, a=mt.Shard(0))
        got = np.asarray(mt.compute(mt.reshard(x, a=mt.Shard(1))))
        assert got.dtype == value.dtype
        np.testing.assert_array_equal(got, value)


def test_the_same_run_gives_the_same_bits(processes):
    rng = np.random.default_rng(1)
    value = rng.normal(size=(7, 33)).astype("f4")
    with mt.Mesh({"a": 7}, client=processes) as mesh:
        x = mt.distribute(value, mesh, a=mt.Shard(0))
        first = np.asarray(mt.sum(mt.exp(x), axis=0))
        for _ in range(3):
            np.testing.assert_array_equal(np.asarray(mt.sum(mt.exp(x), axis=0)), first)
    virtual = mt.Mesh({"a": 7})
    local = mt.sum(mt.exp(mt.distribute(value, virtual, a=mt.Shard(0))), axis=0)
    np.testing.assert_array_equal(np.asarray(local), first)  # contributions are joined in one order everywhere


def test_a_large_exchange(processes):
    value = np.arange(8_000_000.0).reshape(2000, 4000)  # 64 MB
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.distribute(value, mesh, a=mt.Shard(0))
        turned = mt.reshard(x + 1.0, a=mt.Shard(1))
        np.testing.assert_array_equal(turned, value + 1)


# ----- what runs where ------------------------------------------------------------------------------------------------


def test_a_run_is_one_message_a_worker_whatever_it_computes(processes, runs):
    with mt.Mesh({"a": 4}, client=processes) as mesh:
        x = mt.distribute(np.arange(8.0), mesh, a=mt.Shard(0))
        with runs(processes) as done:
            y = x
            for _ in range(100):
                y = mt.tanh(y + mt.sum(y))
            mt.compute(y)
        assert done == ["program"] * 2


def test_a_compiled_step_is_one_message_a_worker_each_time(processes, runs):
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        step = mt.compile(lambda w, x: w - 0.1 * mt.grad(lambda w: mt.mean(mt.square(x @ w)))(w))
        w, x = mt.distribute(np.ones((3, 1)), mesh), mt.distribute(np.ones((4, 3)), mesh, a=mt.Shard(0))
        w = step(w, x)
        mt.compute(w)
        with runs(processes) as done:
            for _ in range(10):
                w = step(w, x)
            np.asarray(w)
        assert done == ["compiled"] * 20  # the result is brought without one


def test_blocks_stay_on_their_workers(processes):
    with mt.Mesh({"a": 4}, client=processes) as mesh:
        y = mt.compute(mt.distribute(np.arange(4096.0), mesh, a=mt.Shard(0)) + 1)
        handle = y._buf.handle
        assert isinstance(handle, runtime.RemoteBlocks)
        assert [f.stream.address for f in handle.gang.futures] == mesh.runtime.addresses
        keys = [f"-{f.stream.session}-{f.number}" for f in handle.gang.futures]
        found = processes.run(lambda dask_worker: [k for k in dask_worker.data if k.startswith("meshtape.program-")])
        for address, key in zip(mesh.runtime.addresses, keys, strict=True):
            assert [k.endswith(key) for k in found[address]].count(True) == 1


def test_workers_that_the_client_cannot_reach_are_reached_through_the_scheduler(mortal, monkeypatch):
    from meshtape.parallel.dask import streams

    goes = streams.connect
    with mt.Mesh({"a": 2}, client=mortal) as mesh:
        workers = set(mesh.runtime.addresses)

    async def connect(address: str, **kwargs: Any) -> Any:
        if address in workers:
            raise OSError("no way there")
        return await goes(address, **kwargs)

    monkeypatch.setattr(streams, "connect", connect)
    monkeypatch.setattr(streams, "send_recv_to", None)
    monkeypatch.setitem(streams.streams_of.made, mortal, streams.WorkerStreams(mortal))
    with mt.Mesh({"a": 2}, client=mortal) as mesh:
        x = mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0))
        assert all(mesh.runtime._streams[a].far for a in mesh.runtime.addresses)
        np.testing.assert_array_equal(np.asarray(mt.compute(x + 1)), [1, 2, 3, 4])
        big = np.arange(float(runtime.SHIP_WITH_RUN // 4))
        assert float(mt.sum(mt.distribute(big, mesh, a=mt.Shard(0)))) == big.sum()
        os.kill(mortal.run(os.getpid)[mesh.runtime.addresses[1]], signal.SIGKILL)
        with pytest.raises(mt.errors.MeshtapeError, match="rank 1"):
            np.asarray(mt.compute(x + 2))


def test_inputs_travel_once(processes):
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0))
        mt.compute(x + 1)
        host = x._buf.handle
        shipped = mesh.runtime._shipped[host]
        mt.compute(x + 2)
        assert mesh.runtime._shipped[host] is shipped
        assert mesh.runtime._resolve([host]) == [shipped]


def test_large_inputs_bypass_the_scheduler(processes):
    value = np.arange(float(runtime.SHIP_WITH_RUN // 4))
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.distribute(value, mesh, a=mt.Shard(0))
        np.testing.assert_array_equal(mt.sum(x), value.sum())
        assert mesh.runtime._shipped[x._buf.handle].gang.what == "distribute"


def test_memory_is_freed_when_arrays_are_dropped(processes, eventually):
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        others = held(processes)

        def mine() -> int:
            return sum(size for run, size in held(processes).items() if run not in others)

        x = mt.compute(mt.distribute(np.ones(100_000), mesh, a=mt.Shard(0)) * 2)
        y, z = mt.compute((x + 1, x + 2))  # two slots of one bundle
        whole, small = 800_000, 1000  # of an array, and of what the runs below leave for a moment
        assert abs(mine() - 3 * whole) < small  # what x was made of is gone already
        del y
        gc.collect()
        eventually(lambda: abs(mine() - 2 * whole) < small)
        del x, z
        gc.collect()
        eventually(lambda: mine() < small)


def test_programs_that_nobody_runs_are_forgotten(processes):
    def programs(dask_worker: Any) -> set[Any]:
        return set(mesh_worker._STATES[dask_worker.address].programs)

    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.distribute(np.ones(4), mesh, a=mt.Shard(0))
        tick = mt.compile(lambda x: x + 0)
        mt.compute(tick(x))
        before = processes.run(programs)
        step = mt.compile(lambda x: x * 2)
        mt.compute(step(x))
        new = {a: found - before[a] for a, found in processes.run(programs).items()}  # earlier tests' may go meanwhile
        assert [len(n) for n in new.values()] == [1, 1]
        del step
        gc.collect()
        mt.compute(tick(x))  # said with the next run
        assert not any(new[a] & found for a, found in processes.run(programs).items())


def test_many_runs_are_in_flight_and_errors_do_not_get_lost(processes):
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        double = mt.compile(lambda x: x * 2)
        x = mt.distribute(np.ones(4), mesh, a=mt.Shard(0))
        for _ in range(40):
            x = double(x)
        assert len(mesh.runtime._queue.gangs) <= runtime.IN_FLIGHT
        np.testing.assert_array_equal(x, np.full(4, 2.0**40))


def test_dask_watches_itself_less_often_unless_the_user_says(processes):
    tick, profile = "distributed.admin.tick.interval", "distributed.worker.profile.interval"

    def configured() -> list[Any]:
        return [dask.config.get(key) for key in (tick, profile)]

    assert list(processes.run(configured).values()) == [["500ms", "100ms"]] * 2
    with dask.config.set({tick: "20ms", profile: "1s"}):  # Dask's default, and another
        with local_cluster(1, processes=False):
            assert configured() == ["500ms", "1s"]
        assert configured() == ["20ms", "1s"]


def test_two_meshes_of_one_client_take_turns(processes):
    with mt.Mesh({"a": 2}, client=processes) as one, mt.Mesh({"b": 4}, client=processes) as two:
        x, y = mt.distribute(np.ones(4), one, a=mt.Shard(0)), mt.distribute(np.ones(4), two, b=mt.Shard(0))
        f, g = mt.compile(lambda x: x + mt.sum(x)), mt.compile(lambda y: y - mt.sum(y))
        for _ in range(15):
            x, y = f(x), g(y)
        np.testing.assert_allclose(x, np.full(4, 5.0**15))
        np.testing.assert_allclose(y, np.full(4, (-3.0) ** 15))


def test_two_threads_share_a_mesh(processes):
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0))
        found: dict[int, float] = {}

        def work(k: int) -> None:
            y = x
            for _ in range(5):
                y = y + k
                found[k] = float(mt.sum(y))

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert found == {k: 6.0 + 4 * 5 * k for k in range(4)}


def test_a_chosen_worker(processes):
    (address, *_) = known_workers(processes)
    with mt.Mesh({"a": 3}, client=processes, workers=[address]) as mesh:
        assert mesh.runtime.addresses == [address]
        np.testing.assert_array_equal(mt.sum(mt.distribute(np.ones(6), mesh, a=mt.Shard(0))), 6)
        assert repr(mesh) == f"Mesh(a=3) on 1 Dask worker(s) of {processes.scheduler.address}"


def test_what_the_client_remembers_of_its_cluster_hides_no_worker(threads):
    """It asks the scheduler from time to time, for all but the workers; who they are is not to be read from that."""
    over = threading.Event()

    async def updates() -> None:
        while not over.is_set():
            await threads._update_scheduler_info(n_workers=0)

    updating = asyncio.run_coroutine_threadsafe(updates(), threads.loop.asyncio_loop)
    try:
        assert {len(known_workers(threads)) for _ in range(200)} == {2}
    finally:
        over.set()
        updating.result(60)


def test_users_tasks_keep_no_program_waiting(processes, tmp_path, eventually):
    """Workers of one thread, each in a task that takes longer than the test may."""
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.distribute(np.ones(4), mesh, a=mt.Shard(0))
        mt.compute(x + 1)
        go = tmp_path / "go"

        def until(path: str, seconds: float) -> None:
            end = time.monotonic() + seconds
            while not os.path.exists(path) and time.monotonic() < end:  # noqa: PTH110
                time.sleep(0.01)

        busy = [processes.submit(until, str(go), LIMIT, pure=False) for _ in range(200)]
        try:
            eventually(lambda: all(processes.run(lambda dask_worker: dask_worker.state.executing_count).values()))
            for n in range(5):
                assert float(mt.sum(x * n)) == 4.0 * n
            np.testing.assert_array_equal(mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0)), np.arange(4.0))
            assert not any(b.done() for b in busy)
        finally:
            go.touch()
            processes.cancel(busy)


def test_a_setting_is_there_again_when_that_of_a_context_is_gone() -> None:
    """Where the context was the first to name it, its end takes it away."""
    dask.config.config.pop("meshtape", None)
    with dask.config.set({"meshtape.timeouts.silence": 1.0}):
        with dask.config.set({"meshtape.timeouts.connect": 2.0}):
            assert number("timeouts.connect") == 2.0
        assert [number(f"timeouts.{k}") for k in ("connect", "silence")] == [10.0, 1.0]
    assert [number(f"timeouts.{k}") for k in ("connect", "silence")] == [10.0, 5.0]


def test_an_optimizer_is_sent_to_a_worker(processes: Client) -> None:
    def stepped(opt: Any) -> list[float]:
        p = mt.asarray([1.0, -2.0])
        return opt.update(p, p * p, opt.init(p))[0].tolist()

    opt = mt.optim.adamw(mt.optim.cosine(0.1, 4), b1=0.8)
    assert processes.submit(stepped, opt, pure=False).result(LIMIT) == stepped(opt)
