"""Gangs that share workers come to each of them in one order, and keep the workers until the last of their tasks has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

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

        desks = worker._STATES[dask_worker.address].resident.desks.values()
        return [n for d in desks if d.client == client for n in d.names()]

    return names


_names = _names_source()
