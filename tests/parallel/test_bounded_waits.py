"""Nothing waits for ever: a worker that is stopped, paused or cut off is found out within ``meshtape.timeout``,
whatever waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, Event, wait
from forked import Forked

import meshtape as mt
from meshtape.parallel.dask import streams, worker, workers
from meshtape.parallel.dask.cluster import connect
from meshtape.parallel.dask.lease import lease_of
from meshtape.parallel.dask.set_up import set_up
from meshtape.parallel.dask.workers import LOOK, known_workers
from meshtape.parallel.training.job.rank_logs import collected
from meshtape.parallel.training.job.status import Status, scheduler_jobs

pytestmark = pytest.mark.timeout(300)
BRIEF = {"meshtape.timeout": 1.0, "meshtape.timeouts.abort": 1.0, "meshtape.timeouts.silence": 0.5}
ERRORS = (mt.errors.RankLost, mt.errors.CollectiveTimeout, mt.errors.ClusterError)


@contextlib.contextmanager
def stopped(client: Client, mesh: mt.Mesh, process: int = 1) -> Iterator[None]:
    """The worker of a process stands still."""
    pid = client.run(os.getpid)[mesh.runtime.addresses[process]]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # a nanny has ended it
            os.kill(pid, signal.SIGCONT)


def works(client: Client) -> None:
    """A new mesh of this client computes."""
    with mt.Mesh({"a": 2}, client=client) as mesh:
        x = mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0))
        assert float(mt.sum(x)) == 6.0


def _program(x: Any, tmp_path: Any) -> None:
    mt.compute(x * 2)  # no collective: nobody but the client waits


def _fetch(x: Any, tmp_path: Any) -> None:
    np.asarray(x)


def _save(x: Any, tmp_path: Any) -> None:
    mt.save(tmp_path / "x", {"x": x})


def _distribute(x: Any, tmp_path: Any) -> None:
    mt.compute(mt.distribute(np.ones(1 << 20), x.sharding.mesh, a=mt.Shard(0)) + 1)


def _reshard(x: Any, tmp_path: Any) -> None:
    mt.compute(mt.reshard(x, a=mt.Replicate()))


def _call(x: Any, tmp_path: Any) -> None:
    mt.load(tmp_path / "there", shardings={"x": x.sharding})


def _dask(x: Any, tmp_path: Any) -> None:
    mt.compute(mt.from_dask(da.arange(8, chunks=2), x.sharding.mesh, a=mt.Shard(0)))


def _passed_on(x: Any, tmp_path: Any) -> None:
    runtime = x.sharding.mesh.runtime  # nobody but another worker waits, whose queue stands still meanwhile
    made = runtime._streams.call(
        lambda context, bundle: None, "take", {runtime.addresses[0]: (x._buf.handle.gang.futures[1],)}
    )
    runtime._streams.results(made.values())


WAITS = [_program, _fetch, _save, _distribute, _reshard, _call, _passed_on, _dask]


def test_a_worker_that_stands_still(mortal, tmp_path):
    mt.save(tmp_path / "there", {"x": np.arange(8.0)})
    for what in WAITS:
        with mt.Mesh({"a": 2}, client=mortal) as mesh:
            x = mt.compute(mt.distribute(np.arange(8.0), mesh, a=mt.Shard(0)) + 1)
            with dask.config.set(BRIEF), stopped(mortal, mesh), pytest.raises(ERRORS, match=r"rank 1|worker"):
                what(x, tmp_path / what.__name__ if what is not _call else tmp_path)
        mortal.wait_for_workers(2, timeout=200)
        works(mortal)


def test_the_clients_limit_holds_where_one_worker_waits_for_another(mortal):
    """A worker whose own setting leaves no time at all waits for a value that takes longer than its looks."""
    mortal.run(dask.config.set, {"meshtape.timeout": 0.0})
    try:
        with mt.Mesh({"a": 2}, client=mortal) as mesh:
            stream, (one, other) = mesh.runtime._streams, mesh.runtime.addresses
            late = stream.call(lambda context: time.sleep(2 * LOOK) or 7, "late", {one: ()})
            made = stream.call(lambda context, value: value, "take", {other: (late[one],)})
            assert stream.results(made.values()) == [7]
    finally:
        mortal.run(dask.config.set, {"meshtape.timeout": 20.0})


def test_a_worker_that_stands_still_and_goes_on_is_lost_for_its_mesh_and_not_for_the_next(mortal, eventually):
    with mt.Mesh({"a": 2}, client=mortal) as mesh:
        x = mt.compute(mt.distribute(np.arange(8.0), mesh, a=mt.Shard(0)) + 1)
        with dask.config.set(BRIEF), stopped(mortal, mesh), pytest.raises(ERRORS):
            np.asarray(mt.compute(x * 2))
        with pytest.raises(mt.errors.RankLost, match="rank 1"):
            mt.compute(x * 3)
        with pytest.raises(mt.errors.RankLost, match="rank 1"):
            np.asarray(x)
    eventually(lambda: len(known_workers(mortal)) == 2)
    works(mortal)


def test_what_dask_has_of_a_worker_that_stands_still_ends_with_dasks_limit(mortal):
    def over(worker: str, dask_scheduler: Any) -> None:
        dask_scheduler.workers[worker].last_seen -= 1e4  # longer ago than any worker-ttl
        dask_scheduler.check = asyncio.ensure_future(dask_scheduler.check_worker_ttl())

    with mt.Mesh({"a": 2}, client=mortal) as mesh:
        blocks = mt.compute(mt.distribute(np.arange(8.0), mesh, a=mt.Shard(0)) + 1).to_dask()
        with stopped(mortal, mesh):
            total = mortal.compute(blocks.sum())
            mortal.run_on_scheduler(over, mesh.runtime.addresses[1])
            with pytest.raises(mt.errors.RankLost, match="left the cluster, and its blocks with it"):
                total.result(200)


def test_a_client_that_stood_still_itself_blames_nobody(processes):
    with mt.Mesh({"a": 2}, client=processes) as mesh, dask.config.set({"meshtape.timeout": 0.5}):
        x = mt.distribute(np.arange(8.0), mesh, a=mt.Shard(0))
        step = mt.compile(lambda x: x * 2)
        mt.compute(step(x))
        y = step(x)
        processes.loop.asyncio_loop.call_soon_threadsafe(time.sleep, 1.5)
        np.testing.assert_array_equal(y, np.arange(8.0) * 2)


def test_a_paused_worker_runs_programs_and_says_so_to_what_is_dasks(mortal, monkeypatch):
    def pause(on: bool, dask_worker: Any) -> None:
        from distributed.core import Status

        dask_worker.memory_manager.memory_pause_fraction = 1e-9 if on else False
        dask_worker.status = Status.paused if on else Status.running

    mortal.run(importlib.import_module, "dask.array")  # Dask does that in the event loop, which says nothing meanwhile
    said: list[str] = []
    monkeypatch.setattr(streams.log, "warning", lambda text, *args: said.append(text % args))
    with mt.Mesh({"a": 2}, client=mortal) as mesh:
        x = mt.distribute(np.arange(8.0), mesh, a=mt.Shard(0))
        mortal.run(pause, True, workers=mesh.runtime.addresses)
        try:
            assert float(mt.sum(x * 2)) == 56.0
            said_why = pytest.raises(
                mt.errors.MeshtapeError, match="paused by Dask, as it uses too much of its memory_lim"
            )
            with dask.config.set({"meshtape.timeout": 2.0}), said_why:
                mt.from_dask(da.arange(8, chunks=4), mesh, a=mt.Shard(0))
            assert any("paused by Dask" in s for s in said)
        finally:
            mortal.run(pause, False, workers=mesh.runtime.addresses)
        assert float(mt.sum(mt.from_dask(da.arange(8, chunks=4), mesh, a=mt.Shard(0)))) == 28.0


def _part() -> Any:
    return da.arange(4, chunks=2)


BESIDE: list[Callable[[Client, Path], Any]] = [
    lambda client, folder: Status(None, client, "a run").write(),
    lambda client, folder: scheduler_jobs(client),
    lambda client, folder: set_up(client, []),
    lambda client, folder: mt.gang(client, int).result(),
    lambda client, folder: mt.training.DaskSource(_part(), client=client)._compute(_part().to_delayed()),
    lambda client, folder: contextlib.ExitStack().enter_context(collected(client, folder)),
    lambda client, folder: lease_of(client)._acquire(["tcp://127.0.0.1:1"], 1.0),
]
"""What asks the scheduler for something beside meshes: notes of training, plugins, gangs, data, turns."""


def test_a_scheduler_that_stands_still_and_then_is_killed(tmp_path: Path, eventually: Callable[..., None]):
    """Right, as workers answer without it, or an error of ours: never one of Dask's, and never an endless wait."""
    mt.save(tmp_path / "there", {"x": np.arange(8.0)})
    with contextlib.ExitStack() as stack:
        scheduler, address = from_the_command_line(tmp_path, stack, eventually)
        client = stack.enter_context(connect(address))
        client.wait_for_workers(2, timeout=200)
        for sign in (signal.SIGSTOP, signal.SIGKILL):
            mesh = mt.Mesh({"a": 2}, client=client)
            x = mt.compute(mt.distribute(np.arange(8.0), mesh, a=mt.Shard(0)) + 1)
            np.testing.assert_array_equal(mt.reshard(x * 2, a=mt.Replicate()), np.arange(1.0, 9.0) * 2)
            with dask.config.set(BRIEF):
                scheduler.send_signal(sign)
                _ends(client, mesh, x, address, tmp_path / str(sign))
            scheduler.send_signal(signal.SIGCONT)


def _ends(client: Client, mesh: mt.Mesh, x: Any, address: str, folder: Path) -> None:
    said: list[Exception] = []
    folder.mkdir()
    (folder / "there").symlink_to(folder.parent / "there")
    for what in [*WAITS, _dask]:
        try:
            what(x, folder)
        except mt.errors.CheckpointExists:
            continue
        except mt.errors.MeshtapeError as e:
            said.append(e)
    # At first it may be known only that workers left, which go with it.
    assert isinstance(said[-1], mt.errors.ClusterError)
    for e in said:
        assert not isinstance(e, mt.errors.ClusterError) or f"the scheduler at {address} " in str(e)

    def asked(asks: Callable[[Client, Path], Any]) -> None:
        with contextlib.suppress(mt.errors.MeshtapeError):
            asks(client, folder)

    with ThreadPoolExecutor(len(BESIDE)) as pool:  # each has its own wait
        list(pool.map(asked, BESIDE))
    with contextlib.suppress(mt.errors.MeshtapeError):
        mesh.close()
    with pytest.raises(mt.errors.MeshtapeError):
        mt.Mesh({"a": 2}, client=client)


def from_the_command_line(
    folder: Path, stack: contextlib.ExitStack, eventually: Callable[..., None]
) -> tuple[Forked, str]:
    """A scheduler and its address; it has two workers."""
    file = folder / "scheduler.json"

    def start(*args: str) -> Forked:
        p = Forked("-m", "dask", *args, "--scheduler-file", str(file), "--no-dashboard", log=folder / "log")
        stack.callback(p.wait, 60)
        stack.callback(p.kill)
        return p

    def address() -> str:
        try:
            return json.loads(file.read_text())["address"]
        except (FileNotFoundError, ValueError):  # not there, or not yet written to its end
            return ""

    scheduler = start("scheduler", "--port", "0")
    for _ in range(2):
        start("worker", "--nthreads", "1", "--no-nanny", "--local-directory", str(folder))
    eventually(address)
    return scheduler, address()


# ----- tasks of Dask's ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def cut(client: Client, one: str, other: str) -> Iterator[None]:
    """Two workers do not reach each other; everybody else reaches both."""

    def close(to: str | None, dask_worker: Any) -> None:
        pool = dask_worker.rpc
        if to is None:
            del pool.connect
            return
        connect = pool.connect

        async def refused(address: str, timeout: float | None = None) -> Any:
            if address == to:
                raise OSError("no route to host")
            return await connect(address, timeout)

        pool.connect = refused

    client.run(close, other, workers=[one])
    client.run(close, one, workers=[other])
    try:
        yield
    finally:
        client.run(close, None)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str | None]]:
    """What those who wait for tasks of Dask's see, often, and after a short limit."""
    seen: list[str | None] = []
    problem = workers.TaskWatch._problem

    async def noted(self: Any) -> str | None:
        seen.append(await problem(self))
        return seen[-1]

    monkeypatch.setattr(workers.TaskWatch, "_problem", noted)
    monkeypatch.setattr(workers, "LOOK", 0.2)
    monkeypatch.setattr(streams, "LOOK", 0.2)
    with dask.config.set({"meshtape.timeout": 2.0, "meshtape.timeouts.silence": 1.0}):
        yield seen


def _held(client: Client, address: str) -> da.Array:
    """Blocks on one worker, which no other test has."""
    held = client.persist(da.from_array(np.arange(8), chunks=2, name=False), workers=[address])
    with client.as_current():
        wait(held)
    return held


def test_tasks_of_two_workers_that_do_not_reach_each_other_are_not_waited_for(processes, looks):
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        one, other = mesh.runtime.addresses
        held, both = _held(processes, one), [_held(processes, one)[:2], _held(processes, other)[2:4]]
        parts = [dask.delayed(np.concatenate)(both)]
        source = mt.training.DaskSource([dask.delayed(np.arange)(4)], client=processes)
        with cut(processes, one, other):
            with pytest.raises(mt.errors.ClusterError, match=rf"array.* worker {other} gets nothing .* from {one}"):
                mt.from_dask(held, mesh, a=mt.Shard(0))
            with pytest.raises(mt.errors.ClusterError, match=r"a DaskSource: .* gets nothing of what .* needs from"):
                source._compute(parts)
        np.testing.assert_array_equal(mt.from_dask(held, mesh, a=mt.Shard(0)), np.arange(8))
        np.testing.assert_array_equal(source._compute(parts)[0], [0, 1, 2, 3])


def test_tasks_that_no_worker_may_run_are_not_waited_for(processes, looks):
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        held = processes.persist(da.ones(8, chunks=2), resources={"quantum": 1})
        with pytest.raises(mt.errors.ClusterError, match=r"may run on no worker that is there, only on quantum=1"):
            mt.from_dask(held, mesh, a=mt.Shard(0))


def test_messages_of_dasks_that_are_held_back_are_sent(processes, looks):
    """As those of a worker, or of the scheduler, whose clock jumped back: until the time that it had noted."""

    async def hold_back(dask_worker: Any) -> None:  # or the scheduler, under the same name
        scheduler = hasattr(dask_worker, "stream_comms")
        for stream in dask_worker.stream_comms.values() if scheduler else [dask_worker.batched_stream]:
            while stream.next_deadline is not None:
                await asyncio.sleep(0.001)
            stream.next_deadline = 1e18

    with mt.Mesh({"a": 2}, client=processes) as mesh:
        for of in (
            lambda: processes.run(hold_back, workers=mesh.runtime.addresses[1:]),
            lambda: processes.run_on_scheduler(hold_back),
        ):
            of()
            found = mt.from_dask(da.arange(8, chunks=2) + 1, mesh, a=mt.Shard(0))
            np.testing.assert_array_equal(found, np.arange(1, 9))
            of()
            assert processes.compute(found.to_dask().sum()).result(200) == 36


def test_tasks_that_somebody_gets_on_with_are_waited_for(processes, looks, eventually):
    """One that computes for longer than the limit, and then a value that takes as long on its way."""

    def slow(on: bool, dask_worker: Any) -> None:
        if not on:
            dask_worker.let_go.set()
            return
        sends, dask_worker.let_go = dask_worker.handlers["get_data"], asyncio.Event()

        async def late(comm: Any, **options: Any) -> Any:
            await dask_worker.let_go.wait()
            dask_worker.handlers["get_data"] = sends
            return await sends(comm, **options)

        dask_worker.handlers["get_data"] = late

    def computes(block: np.ndarray, name: str) -> np.ndarray:  # travels by value
        from distributed import Event

        Event(name).wait()
        return block

    with mt.Mesh({"a": 2}, client=processes) as mesh, ThreadPoolExecutor(1) as pool:
        one, gate = mesh.runtime.addresses[0], Event(f"gate-{time.monotonic_ns()}", client=processes)
        held = _held(processes, one)
        d = da.arange(8, chunks=8).map_blocks(computes, gate.name, dtype=int, meta=np.empty(0, int))
        for what, begin, end in (
            (d, lambda: None, gate.set),
            (held, lambda: processes.run(slow, True, workers=[one]), lambda: processes.run(slow, False, workers=[one])),
        ):
            looks.clear()
            begin()
            coming = pool.submit(mt.from_dask, what, mesh, a=mt.Shard(0))
            try:
                eventually(lambda: len(looks) >= 4)
            finally:
                end()
            np.testing.assert_array_equal(coming.result(), np.arange(8))
            assert looks[:4] == [None] * 4


# ----- what is sent ---------------------------------------------------------------------------------------------------


def test_a_step_of_many_arrays_is_a_small_message(processes, monkeypatch):
    from distributed.protocol import dumps

    sent: list[int] = []
    goes = streams.WorkerStreams.submit

    def seen(self: Any, number: int, name: str, messages: Any, alike: bool) -> Any:
        sent.extend(sum(map(len, dumps([m]))) for m in messages.values() if m["op"] == "run")
        return goes(self, number, name, messages, alike)

    with mt.Mesh({"a": 2}, client=processes) as mesh:
        step = mt.compile(lambda xs: [x + 1 for x in xs])
        xs = step([mt.distribute(np.ones(4), mesh, a=mt.Shard(0)) for _ in range(300)])
        xs = step(xs)
        monkeypatch.setattr(streams.WorkerStreams, "submit", seen)
        for _ in range(3):
            xs = step(xs)
        np.testing.assert_array_equal(xs[7], np.full(4, 6.0))
    assert len(sent) == 6
    assert max(sent) <= 2048


def test_what_an_earlier_session_left_is_gone_and_not_waited_for(processes):
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.compute(mt.distribute(np.arange(8.0), mesh, a=mt.Shard(0)) + 1)
        stream = mesh.runtime._streams[mesh.runtime.addresses[1]]
        processes.sync(_lose, stream)
        with pytest.raises(mt.errors.RankLost, match="rank 1"):
            np.asarray(x)
        with mt.Mesh({"b": 2}, client=processes) as other:
            assert mesh.runtime._streams[mesh.runtime.addresses[1]] is not stream
            with pytest.raises(mt.errors.MeshtapeError):
                np.asarray(mt.reshard(x, mt.Sharding(other, b=mt.Shard(0))))
            with pytest.raises(mt.errors.MeshtapeError):
                mt.compute(x * 2)
            assert float(mt.sum(mt.distribute(np.arange(8.0), other, b=mt.Shard(0)))) == 28.0


async def _lose(stream: Any) -> None:
    stream.lose("a test cuts it off")


def test_what_workers_cannot_read_is_an_error_of_the_call_and_not_of_the_worker(processes):
    class Unreadable:
        def __reduce__(self) -> Any:
            return _raises_there, (os.getpid(),)

    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.distribute(np.arange(8.0), mesh, a=mt.Shard(0))
        with pytest.raises(mt.errors.MeshtapeError, match="ModuleNotFoundError"):
            mesh.runtime.call(_give, [x._buf.handle], {r: Unreadable() for r in range(2)})
        assert float(mt.sum(x)) == 28.0


def test_a_worker_that_cannot_even_tell_its_error_is_lost(processes):
    def telling(fails: bool) -> None:
        from meshtape.parallel.dask import worker_queue as resident

        def no_memory(error: BaseException) -> None:
            raise MemoryError

        if fails:
            no_memory.true = resident.failure_message
        resident.failure_message = no_memory if fails else resident.failure_message.true

    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.distribute(np.arange(8.0), mesh, a=mt.Shard(0))
        processes.run(telling, True, workers=mesh.runtime.addresses[1:])
        try:
            with pytest.raises(mt.errors.RankLost, match="rank 1"):
                mesh.runtime.call(_failing(), [x._buf.handle], dict.fromkeys(range(2)))
        finally:
            processes.run(telling, False, workers=mesh.runtime.addresses[1:])
    works(processes)


def _failing() -> Any:
    def fails(payloads: Any, blocks: Any) -> Any:  # travels by value
        if 1 in payloads:
            raise FloatingPointError("a broken unit")

    return fails


def _raises_there(pid: int) -> None:
    """Workers have no such module."""


def _give(payloads: Any, blocks: Any) -> Any:
    return payloads


def test_a_mesh_of_a_client_that_is_gone_leaves_nothing(processes, eventually):
    def left(dask_worker: Any) -> int:
        state = worker._STATES[dask_worker.address]
        return sum(d.client.startswith("Client-") and d.client != mine for d in state.resident.sessions.values()) + len(
            state.owners
        )

    mine = processes.id
    for options in ({}, {"loop": processes.loop}):  # an event loop of its own, and one that goes on
        other = Client(processes.scheduler.address, set_as_default=False, **options)
        mesh = mt.Mesh({"a": 2}, client=other)
        x = mt.compute(mt.distribute(np.arange(8.0), mesh, a=mt.Shard(0)) + 1)
        assert max(processes.run(left).values())
        other.close()
        eventually(lambda: not any(processes.run(left).values()))
        with pytest.raises(mt.errors.ClusterError, match="the Dask client is closed"):
            np.asarray(x)
