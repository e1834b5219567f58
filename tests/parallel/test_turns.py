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
from meshtape.parallel.flight import Gang
from meshtape.parallel.lease import lease_of

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


def test_a_mesh_on_the_same_workers_submits_when_the_others_run_has_ended(processes, held, monkeypatch):
    with mt.Mesh({"b": 2}, client=processes) as other:
        runtime, reached = other.runtime, threading.Event()
        ended: list[bool] = []

        def seen(fn: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any) -> Any:
                if fn.__name__ == "_submit_run":
                    ended.append(held.gang.done)
                reached.set()
                return fn(*args)

            return called

        monkeypatch.setattr(runtime, "_submit_run", seen(runtime._submit_run))
        monkeypatch.setattr(runtime._flight, "wait_for", seen(runtime._flight.wait_for))
        found: list[float] = []
        x = mt.distribute(np.ones(4), other, b=mt.Shard(0))
        thread = threading.Thread(target=lambda: found.append(float(mt.sum(x))), daemon=True)
        thread.start()
        assert reached.wait(LIMIT)
        held.end()
        thread.join(LIMIT)
        assert found == [4.0]
        assert ended
        assert all(ended)


def test_a_run_comes_after_the_one_before_it_on_each_worker(processes, held, eventually):
    after = held.step(held.x)._buf.handle.gang
    pairs = [(f.key, before.key) for f, before in zip(after.futures, held.gang.futures, strict=True)]

    def waits(key: str, before: str, dask_scheduler: Any) -> bool | None:
        known = dask_scheduler.tasks.get(key)
        return None if known is None else before in {d.key for d in known.dependencies}

    for key, before in pairs:
        eventually(lambda key=key, before=before: processes.run_on_scheduler(waits, key, before) is not None)
        assert processes.run_on_scheduler(waits, key, before)
    held.end()
