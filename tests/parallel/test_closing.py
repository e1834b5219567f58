"""A mesh that is closed gives back what it holds on its workers."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from distributed import Client

import meshtape as mt
from meshtape.parallel.dask import runtime as dask_runtime
from meshtape.parallel.dask import worker as mesh_worker

pytestmark = pytest.mark.timeout(300)


def kept(client: Client) -> int:
    """Values that a worker keeps for its clients, at most."""

    def count(dask_worker: Any) -> int:  # travels by value: workers cannot import this file
        sessions = mesh_worker._STATES[dask_worker.address].resident.sessions.values()
        return sum(len(d.kept) + len(d.failures) for d in sessions)

    return max(client.run(count).values())


def test_what_noted_calls_would_have_read_is_given_back(processes, eventually):
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        before = kept(processes)
        x = mt.compute(mt.distribute(np.arange(8.0), mesh, a=mt.Shard(0)) + 1)
        later = x * 2
        assert kept(processes) > before
        _ = x * 3  # nobody asks for it
        del x
    eventually(lambda: kept(processes) <= before)
    with pytest.raises(mt.errors.MeshError, match="this mesh was closed"):
        np.asarray(later)
    with pytest.raises(mt.errors.MeshError, match="this mesh was closed"):
        later + 1


def test_a_mesh_in_this_process_has_nothing_to_give_back():
    with mt.Mesh({"a": 2}) as mesh:
        x = mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0)) + 1
    np.testing.assert_array_equal(x, [1, 2, 3, 4])


def test_a_loop_whose_results_nobody_took_leaves_nothing_on_a_closed_mesh(processes, eventually):
    """What is known of its step outlives the mesh."""

    def turn(s: Any, _: Any) -> Any:
        return s + mt.sum(s), mt.sum(s)

    with mt.Mesh({"a": 2}, client=processes) as mesh:
        before = kept(processes)
        ones = mt.distribute(np.ones(4), mesh, a=mt.Shard(0))
        state, sums = mt.scan(turn, ones, length=100)  # two runs, to be joined
        del state, sums, ones
    eventually(lambda: kept(processes) <= before)


def test_a_mesh_that_could_not_be_opened_or_that_nobody_has_any_more_is_forgotten(processes, eventually, monkeypatch):
    def known(dask_worker: Any) -> int:
        state = mesh_worker._STATES[dask_worker.address]
        return len(state.owners) + len(state.contexts) + len(state.plane._secrets)

    def meshes(dask_scheduler: Any) -> int:
        return len(dask_scheduler.plugins["meshtape"].meshes)

    def fails(*args: Any, **options: Any) -> None:
        raise mt.errors.ClusterError("a worker went away")

    mt.Mesh({"a": 2}, client=processes).close()
    eventually(lambda: max(processes.run(known).values()) == 0)
    before = processes.run_on_scheduler(meshes)
    x = mt.compute(mt.distribute(np.arange(4.0), mt.Mesh({"a": 2}, client=processes), a=mt.Shard(0)) + 1)
    np.testing.assert_array_equal(mt.compile(lambda x: mt.sum(x) + x)(x), np.arange(11.0, 15.0))
    del x
    gc.collect()
    eventually(lambda: max(processes.run(known).values()) == 0 and processes.run_on_scheduler(meshes) == before)
    for step in ("choose", "call_scheduler"):  # before the workers have their places, and after it
        monkeypatch.setattr(dask_runtime, step, fails)
        with pytest.raises(mt.errors.ClusterError, match="went away"):
            mt.Mesh({"a": 2}, client=processes)
        monkeypatch.undo()
        eventually(lambda: max(processes.run(known).values()) == 0)
        assert processes.run_on_scheduler(meshes) == before


def test_on_the_event_loop_of_the_client_a_mesh_refuses_to_wait_for_itself(processes):
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.compute(mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0)) + 1)

        async def there(ask: Any) -> None:
            with pytest.raises(mt.errors.ClusterError, match="on the event loop of its Dask client"):
                ask()

        for ask in (
            lambda: np.asarray(x),
            lambda: mt.compute(x * 2),
            mesh.close,
        ):
            asyncio.run_coroutine_threadsafe(there(ask), processes.loop.asyncio_loop).result(60)
        np.testing.assert_array_equal(x, np.arange(4.0) + 1)


def test_a_forked_process_is_told_that_the_client_is_not_its_own(processes):
    """It has none of the threads that would hear an answer: an error at once, in place of a wait without end."""
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.compute(mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0)) + 1)
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            for ask in (lambda: np.asarray(x * 2), lambda: mt.Mesh({"a": 2}, client=processes), mesh.close):
                try:
                    ask()
                    os.write(write, b"closed")
                except mt.errors.ClusterError as e:
                    os.write(write, b"forked " if "was forked from" in str(e) else b"another ")
            os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        with os.fdopen(read, "rb") as pipe:
            assert pipe.read() == b"forked forked closed"
        np.testing.assert_array_equal(x, np.arange(4.0) + 1)


def test_ctrl_c_at_any_moment_leaves_the_mesh_as_it_was(processes, eventually):
    """A run reaches all workers or none, no lock stays behind, and what nobody has any more is dropped."""
    rng, read, write = random.Random(0), *os.pipe()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupts() -> None:
        while os.read(read, 1) == b"x":  # a pipe, as the main thread may be interrupted in anything of Python's
            time.sleep(rng.random() * 0.004)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupts)
    thread.start()
    try:
        with mt.Mesh({"a": 2}, client=processes) as mesh:
            before = kept(processes)
            x, w0 = mt.distribute(np.arange(8.0), mesh, a=mt.Shard(0)), mt.distribute(np.zeros(()), mesh)
            step = mt.compile(lambda x, w: w + mt.sum(x))
            assert float(step(x, w0)) == 28.0
            for i in range(150):
                w = w0
                try:
                    os.write(write, b"x")
                    for _ in range(2000):  # an interrupt in a finalizer of Python's own is lost
                        w = step(x, w)
                        if i % 3 == 0:
                            mt.distribute(np.ones(4), mesh, a=mt.Shard(0))
                except KeyboardInterrupt:
                    pass
                assert float(step(x, w0)) == 28.0
            del x, w, w0
    finally:
        os.write(write, b".")
        thread.join()
        signal.signal(signal.SIGINT, handler)
    eventually(lambda: kept(processes) <= before)
