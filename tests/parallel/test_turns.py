"""Gangs that share workers come to each of them in one order, and keep the workers until the last of their tasks has
ended."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client
from forked import Forked

import meshtape as mt
from meshtape.arrays import OPS
from meshtape.parallel.dask.in_flight import Gang
from meshtape.parallel.dask.lease import lease_of

pytestmark = pytest.mark.timeout(300)
LIMIT = 200.0


class Held:
    """A mesh of which a run is on its way: done on the first worker, and waiting on the second until :meth:`end`."""

    def __init__(self, mesh: mt.Mesh, gate: Path) -> None:
        self.mesh, self.gate = mesh, gate
        self.x = mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0))
        self.step = mt.compile(mt.tanh)
        gate.touch()
        self.step(self.x)  # the first run of a program is waited for
        gate.unlink()
        self.y = self.step(self.x)
        here, called = self.gang.futures[0], threading.Event()
        here.add_done_callback(lambda _: called.set())  # after what the run itself does then
        assert called.wait(LIMIT)
        assert not self.gang.futures[1].done()

    @property
    def gang(self) -> Gang:
        return self.y._buf.handle.gang

    def end(self) -> None:
        self.gate.touch()
        np.testing.assert_allclose(self.y, np.tanh(np.arange(4.0)))


@pytest.fixture
def held(processes: Client, tmp_path: Path) -> Iterator[Held]:
    gate = tmp_path / "gate"

    def put(gate: str | None) -> None:
        import time
        from pathlib import Path

        op = OPS["tanh"]
        true = op.bind(np)

        def waits(x: Any) -> Any:
            while x.size > 1 and not Path(gate).exists():
                time.sleep(0.01)
            return true(x)

        op.numpy = true if gate is None else waits

    with mt.Mesh({"a": 2}, client=processes) as mesh:
        second = mesh.runtime.addresses[1]
        processes.run(put, str(gate), workers=[second])
        try:
            yield Held(mesh, gate)
        finally:
            gate.touch()
            processes.run(put, None, workers=[second])


def test_workers_are_a_clients_until_the_last_task_of_its_run_has_ended(processes, held, eventually):
    lease = lease_of(processes)
    assert lease._busy
    held.end()
    eventually(lambda: not lease._busy)


def test_a_mesh_on_the_same_workers_runs_when_the_others_run_has_ended(processes, held, eventually):
    with mt.Mesh({"b": 2}, client=processes) as other:
        step = mt.compile(lambda x: x + mt.sum(x))
        x = mt.distribute(np.ones(4), other, b=mt.Shard(0))
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(np.asarray(step(x))), daemon=True)
        thread.start()
        second = held.mesh.runtime.addresses[1]
        waiting = lambda: processes.run(_names, processes.id, workers=[second])[second]  # noqa: E731
        eventually(lambda: len(waiting()) == 2)
        assert not found
        held.end()
        thread.join(LIMIT)
        np.testing.assert_array_equal(found[0], np.full(4, 5.0))


def test_a_run_comes_after_the_one_before_it_on_each_worker(processes, held, eventually):
    after = held.step(held.x)._buf.handle.gang
    _, second = held.mesh.runtime.addresses
    eventually(lambda: after.futures[0].done())
    assert processes.run(_names, processes.id, workers=[second])[second] == ["tanh", "tanh"]
    assert not after.futures[1].done()
    held.end()


def _names_source() -> Callable[..., list[str]]:
    def names(client: str, dask_worker: Any) -> list[str]:
        from meshtape.parallel.dask import worker

        sessions = worker._STATES[dask_worker.address].resident.sessions.values()
        return [n for d in sessions if d.client == client for n in d.names()]

    return names


_names = _names_source()


# ----- clients that stand still ---------------------------------------------------------------------------------------

CLIENT = """
import sys, time
import numpy as np
import meshtape as mt
from distributed import Client

client = Client(sys.argv[1], set_as_default=False)
step = mt.compile(lambda x: x + mt.sum(x))
right = np.arange(8.0) + 28


def run(first):
    if sys.argv[2] == "gang":
        gang = mt.gang(client, time.sleep, 250 if first else 0)
        print("ready", flush=True)
        assert gang.result() == [None] * 2
        return
    for i in range(300):
        y = step(x)
        if i % 20 == 0:
            np.testing.assert_array_equal(y, right)
        if first and i == 40:
            print("ready", flush=True)
        if sys.argv[2] == "idle":
            time.sleep(0.01)


mesh = mt.Mesh({"a": 2}, client=client)
x = mt.distribute(np.arange(8.0), mesh, a=mt.Shard(0))
np.testing.assert_array_equal(step(x), right)
for attempt in range(20):  # a busy machine may make it stand still once more
    try:
        run(attempt == 0)
        print("right", flush=True)
        break
    except mt.errors.RankLost as e:
        assert "stood still" in str(e), e
"""


@pytest.mark.parametrize("what", ["idle", "busy", "gang"])
def test_a_client_that_stands_still_gives_way_and_comes_between_nobody_when_it_goes_on(processes, what):
    """Its gang would run for minutes; programs that it sends when it goes on would wait for ranks that are busy with
    another client's, and those for them."""
    first = Forked("-c", CLIENT, processes.scheduler.address, what)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "ready\n"
        first.send_signal(signal.SIGSTOP)
        with dask.config.set({"meshtape.timeouts.lease": 1.0}):
            with mt.Mesh({"a": 2}, client=processes) as mesh:
                x = mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0))
                found = [float(mt.sum(x))]
                first.send_signal(signal.SIGCONT)
                found += [float(mt.sum(x + i)) for i in range(100)]
            assert first.communicate(timeout=LIMIT)[0].endswith("right\n")
        assert found == [6.0, *(6.0 + 4 * i for i in range(100))]
        assert first.returncode == 0
    finally:
        first.kill()
        first.wait()


def test_of_two_messages_about_a_client_the_later_counts_whichever_comes_first(processes):
    async def fence(client: str, number: int, closed: bool, dask_worker: Any) -> bool:
        from meshtape.parallel.dask import worker

        resident = worker._STATES[dask_worker.address].resident
        await resident.fence(client, number, closed)
        return resident.fences[client][1] if number < latest + 4 else resident.fences.pop(client)[1]

    latest = 1 << 40
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.compute(mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0)) + 1)
        said = lambda n, closed: set(processes.run(fence, processes.id, n, closed).values())  # noqa: E731
        assert said(latest + 2, False) == {False}
        assert said(latest + 1, True) == {False}
        assert float(mt.sum(x)) == 10.0
        assert said(latest + 3, True) == {True}
        with pytest.raises(mt.errors.RankLost, match=r"stood still for longer than meshtape\.timeouts\.lease"):
            mt.compute(x * 2)
        np.testing.assert_array_equal(x, np.arange(4.0) + 1)  # what needs no turn goes on
        assert said(latest + 4, False) == {False}
        assert float(mt.sum(x)) == 10.0


def test_a_client_that_only_waits_for_its_gang_keeps_its_workers(processes):
    run = mt.gang(processes, time.sleep, 4)
    other = Client(processes.scheduler.address, set_as_default=False)
    try:
        with dask.config.set({"meshtape.timeouts.lease": 1.5}), mt.Mesh({"a": 2}, client=other) as mesh:
            assert float(mt.sum(mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0)))) == 6.0
        assert run.done()
        assert run.result() == [None, None]
    finally:
        other.close()
