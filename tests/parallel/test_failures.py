"""What goes wrong on a cluster ends within seconds, in an error that names the rank; nothing hangs, and nothing is left
behind."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import psutil
import pytest
from distributed import Client, LocalCluster

import meshtape as mt
from meshtape.arrays import OPS
from meshtape.parallel.dask import worker as mesh_worker
from meshtape.parallel.dask.cluster import connect, local_cluster
from meshtape.parallel.dask.workers import known_workers
from meshtape.parallel.transports import rendezvous

pytestmark = pytest.mark.timeout(300)


@contextlib.contextmanager
def found_out() -> Iterator[None]:
    """Waits end because what happened was found out: the limits on their time are far away."""
    far = dict.fromkeys(("collective", "abort", "silence"), 3600.0)
    with dask.config.set({f"meshtape.timeouts.{k}": v for k, v in far.items()}):
        yield


@contextlib.contextmanager
def op_on(client: Client, address: str, name: str, fn: Callable[..., Any]) -> Iterator[None]:
    """One worker's implementation of an op replaced."""

    def put(fn: Any) -> int:
        op = OPS[name]
        op.numpy = fn or op.bind(np)
        return os.getpid()

    pid = client.run(put, fn, workers=[address])[address]
    try:
        yield
    finally:
        # The scheduler may count a worker that is dead already, and would try for half a minute to reach it.
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            try:
                client.run(put, None, workers=[address])
            except OSError:  # it died meanwhile, or this raises
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).wait(60)


def failing(end: str, at: float | None = None) -> Callable[..., Any]:
    """An implementation that raises or kills its process, on blocks of more than the one element that dtypes are asked
    with.

    With ``at`` only on blocks that begin with that number.

    A function within a function travels by value: workers cannot import this file.
    """

    def fails(x: Any, **kwargs: Any) -> Any:
        if x.size < 2 or (at is not None and x.flat[0] != at):
            return x
        if end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise FloatingPointError("a broken unit")

    return fails


def works(client: Client) -> None:
    """A new mesh of this client computes."""
    client.wait_for_workers(2, timeout=120)
    with mt.Mesh({"a": 2}, client=client) as mesh:
        x = mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0))
        np.testing.assert_array_equal(mt.reshard(x + 1, a=mt.Replicate()), [1, 2, 3, 4])


def sockets_and_threads(client: Client) -> dict[str, tuple[int, int]]:
    """Sockets of the data plane that are open on each worker, and threads that serve it."""

    def count(dask_worker: Any) -> tuple[int, int]:
        plane = mesh_worker._STATES[dask_worker.address].plane
        groups = sum(len(g.links) for g in plane._groups.values())
        return groups + len(plane._arrived), sum(t.name.startswith("meshtape-greet") for t in threading.enumerate())

    return client.run(count)


# ----- a rank raises --------------------------------------------------------------------------------------------------


def test_a_rank_that_raises_is_named_and_the_mesh_goes_on(processes, eventually):
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0))
        kept = mt.compute(x * 2)
        with op_on(processes, mesh.runtime.addresses[1], "tanh", failing("raise")), found_out():
            y = mt.tanh(x)
            with pytest.raises(
                mt.errors.RankLost, match=r"rank 1 failed in tanh, called at .*test_failures.*FloatingPointError: a br"
            ):
                mt.compute(y + mt.sum(y))
        with pytest.raises(mt.errors.MeshError, match="never computed, as the run that would have made it failed"):
            np.asarray(y)
        np.testing.assert_array_equal(mt.sum(kept), 12)
        np.testing.assert_allclose(mt.tanh(x), np.tanh(np.arange(4.0)))
    works(processes)
    eventually(lambda: set(sockets_and_threads(processes).values()) == {(0, 0)})


def test_the_error_of_one_run_is_not_that_of_the_next_mesh_and_keeps_its_type(processes):
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0))
        with (
            op_on(processes, mesh.runtime.addresses[0], "sinh", failing("raise")),
            pytest.raises(mt.errors.RankLost, match="rank 0 failed in sinh"),
        ):
            mt.compute(mt.sinh(x))
        works(processes)
        singular = mt.distribute(np.stack([np.eye(3), np.zeros((3, 3))]), mesh, a=mt.Shard(0))
        with pytest.raises(np.linalg.LinAlgError, match=r"rank 1 failed in inv, called at .*: Singular matrix"):
            mt.compute(mt.linalg.inv(singular))


def test_an_error_of_a_run_in_flight_is_raised_by_the_next_call(processes, eventually):
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        step = mt.compile(lambda x: mt.cosh(x) + mt.sum(x))
        fine, bad = (mt.distribute(np.full(4, v), mesh, a=mt.Shard(0)) for v in (1.0, 7.0))
        with op_on(processes, mesh.runtime.addresses[1], "cosh", failing("raise", at=7.0)), found_out():
            step(fine)
            y = step(bad)  # returns at once
            eventually(lambda: y._buf.handle.gang.done)
            with pytest.raises(mt.errors.RankLost, match="rank 1 failed in cosh"):
                step(fine)
            with pytest.raises(mt.errors.RankLost):
                np.asarray(y)
            np.testing.assert_allclose(np.asarray(step(fine))[:2], np.cosh(1) + 4)


def test_programs_that_did_not_begin_name_the_first_cause_once(processes):
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        step = mt.compile(lambda x: mt.cosh(x) + mt.sum(x))
        fine, bad = (mt.distribute(np.full(4, v), mesh, a=mt.Shard(0)) for v in (1.0, 7.0))
        with op_on(processes, mesh.runtime.addresses[1], "cosh", failing("raise", at=7.0)), found_out():
            mt.compute(step(fine))
            made = []
            with contextlib.suppress(mt.errors.RankLost):  # where it is known already
                made.append(step(bad))
                made += [step(fine) for _ in range(3)]
            for y in made:
                with pytest.raises(mt.errors.RankLost) as e:
                    np.asarray(y)
                assert str(e.value).count("did not begin") <= 1


def test_an_error_of_the_virtual_mesh_has_the_same_words(monkeypatch):
    mesh = mt.Mesh({"a": 2})
    x = mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0))
    monkeypatch.setattr(OPS["tanh"], "numpy", failing("raise"))
    y = mt.tanh(x)
    with pytest.raises(mt.errors.RankLost, match=r"rank 0 failed in tanh, called at .*: FloatingPointError: a broken"):
        mt.compute(y)
    with pytest.raises(mt.errors.MeshError, match="never computed"):
        y + 1
    np.testing.assert_array_equal(x + 1, [1, 2, 3, 4])


# ----- a worker dies --------------------------------------------------------------------------------------------------


def test_a_worker_that_stands_still(mortal):
    with mt.Mesh({"a": 2}, client=mortal) as mesh:
        x = mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0))
        y = mt.compute(x + mt.sum(x))
        pid = mortal.run(os.getpid)[mesh.runtime.addresses[1]]
        with (
            dask.config.set({"meshtape.timeouts.collective": 2.0, "meshtape.timeouts.abort": 2.0}),
            stopped(pid),
            pytest.raises(mt.errors.CollectiveTimeout, match=r"all_reduce\(a\).*no answer within 2 s from rank 1"),
        ):
            mt.compute(y + mt.sum(y * 2))
    works(mortal)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_mesh_that_is_closed_while_a_worker_stands_still_is_forgotten_there_later(mortal, eventually):
    def known(mesh: bytes, dask_worker: Any) -> bool:
        return mesh in mesh_worker._STATES[dask_worker.address].plane._secrets

    def opened_late(mesh: bytes, client: str, dask_worker: Any) -> None:
        mesh_worker.open_plane(mesh, b"", "auto", 0, client, dask_worker)

    with dask.config.set({"meshtape.timeouts.silence": 1.0}):
        mesh = mt.Mesh({"a": 2}, client=mortal)
        mt.compute(mt.sum(mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0))) + 1)
        with stopped(mortal.run(os.getpid)[mesh.runtime.addresses[1]]):
            mesh.close()
        closed = mesh.runtime.mesh_id
        eventually(lambda: set(mortal.run(known, closed).values()) == {False})
    # An opening that was on its way meanwhile, and that of a client that is gone, leave nothing.
    for mesh_id, client in ((closed, mortal.id), (b"another", "somebody")):
        said = mortal.run(opened_late, mesh_id, client, on_error="return").values()
        assert all("was left by this client" in str(e) for e in said)
        assert set(mortal.run(known, mesh_id).values()) == {False}
    works(mortal)


def test_a_worker_killed_within_a_run(mortal):
    with mt.Mesh({"a": 2}, client=mortal) as mesh:
        x = mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0))
        mt.compute(x + 1)
        with op_on(mortal, mesh.runtime.addresses[1], "tanh", failing("kill")), found_out():
            y = mt.tanh(x)
            with pytest.raises(mt.errors.RankLost, match="rank 1"):
                mt.compute(y + mt.sum(y))
    works(mortal)


def test_a_worker_killed_between_runs(mortal, eventually):
    with mt.Mesh({"a": 2}, client=mortal) as mesh:
        x = mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0))
        y = mt.compute(x + 1)
        pids = mortal.run(os.getpid)
        os.kill(pids[mesh.runtime.addresses[1]], signal.SIGKILL)
        with found_out(), pytest.raises(mt.errors.MeshtapeError, match="rank 1"):
            np.asarray(mt.reshard(y * 2, a=mt.Replicate()))
        # Once the scheduler knows, it cancels the tasks of both workers for what the one had.
        eventually(lambda: mesh.runtime.addresses[1] not in known_workers(mortal))
        with found_out(), pytest.raises(mt.errors.MeshtapeError, match="rank 1"):
            mt.compute(x * 3)
        with found_out(), pytest.raises(mt.errors.MeshtapeError, match="rank 1"):
            np.asarray(y)
    works(mortal)


def test_a_worker_killed_within_a_save_of_deltas(mortal, tmp_path):
    home, large = tmp_path / "run", np.random.default_rng(0).normal(size=(64, 50))

    def manager() -> mt.CheckpointManager:
        return mt.CheckpointManager(home, keep=None, anchor_every=9)

    def dies() -> None:
        from meshtape.storage.saving import write_shards

        write_shards.from_base = lambda *args: os.kill(os.getpid(), signal.SIGKILL)

    def split(step: int, mesh: mt.Mesh) -> dict[str, mt.Array]:
        return {"w": mt.distribute(large + step, mesh, a=mt.Shard(0))}

    with mt.Mesh({"a": 2}, client=mortal) as mesh:
        for step in (1, 2):
            manager().save(step, split(step, mesh))
        mortal.run(dies, workers=[mesh.runtime.addresses[1]])
        with found_out(), pytest.raises((mt.errors.RankLost, mt.errors.CheckpointError), match="rank 1"):
            manager().save(3, split(3, mesh))
    works(mortal)
    with mt.Mesh({"a": 2}, client=mortal) as mesh:  # the lock was given back, and its half a save goes
        manager().save(4, split(4, mesh))
        manager().delete(1)
    assert sorted(e.name for e in home.iterdir()) == ["step-00000002", "step-00000004"]
    for step in (2, 4):
        mt.storage.verify(manager().path(step))
        np.testing.assert_array_equal(np.asarray(mt.load(manager().path(step))["w"]), large + step)
    assert mt.open_checkpoint(manager().path(4)).base.step == 2


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_worker_that_goes_while_a_mesh_is_opened(mortal, sign):
    works(mortal)
    victim = sorted(known_workers(mortal))[1]

    def goes_at_the_next(sign: int) -> None:
        from meshtape.parallel.dask import worker as mesh_worker

        def goes(*args: Any, **kwargs: Any) -> None:
            os.kill(os.getpid(), sign)

        goes.true, mesh_worker.open_plane = mesh_worker.open_plane, goes

    def as_before() -> None:
        from meshtape.parallel.dask import worker as mesh_worker

        mesh_worker.open_plane = getattr(mesh_worker.open_plane, "true", mesh_worker.open_plane)

    pid = mortal.run(os.getpid, workers=[victim])[victim]
    mortal.run(goes_at_the_next, sign, workers=[victim])
    with (
        dask.config.set({"meshtape.timeouts.silence": 1.0}),
        pytest.raises(mt.errors.ClusterError, match=rf"worker\(s\) {victim} went away"),
    ):
        mt.Mesh({"a": 2}, client=mortal)
    if sign == signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
        mortal.run(as_before, workers=[victim])
    works(mortal)


@pytest.mark.slow
def test_a_worker_that_dies_again_and_again_comes_back(eventually):
    """For half a minute: Dask's cluster looks 15 s after a loss whether the worker is back, and it may just have died
    once more."""
    with local_cluster(2) as client:
        until = time.monotonic() + 30.0
        while time.monotonic() < until:
            (victim,) = (a for a, w in known_workers(client).items() if w["name"] == 1)
            os.kill(client.run(os.getpid, workers=[victim])[victim], signal.SIGKILL)
            eventually(lambda gone=victim: {w["name"] for a, w in known_workers(client).items() if a != gone} == {0, 1})


# ----- what a mesh refuses --------------------------------------------------------------------------------------------


def test_a_scheduler_with_a_dask_that_is_too_old(processes):
    def identity(take: bool, dask_scheduler: Any) -> None:
        dask_scheduler.handlers["identity"] = (lambda: {}) if take else dask_scheduler.identity

    processes.run_on_scheduler(identity, True)
    try:
        with pytest.raises(
            mt.errors.WorkerMismatch, match=r"the scheduler at .* does not know what .*: use one version"
        ):
            mt.Mesh({"a": 2}, client=processes)
    finally:
        processes.run_on_scheduler(identity, False)
    works(processes)


@pytest.mark.parametrize(
    ("package", "found", "message"),
    [
        ("meshtape", "99.0", "has meshtape 99.0, this process .*: use one version everywhere"),
        ("numpy", "0.1", "has numpy 0.1, this process"),
        ("meshtape", None, r"cannot import meshtape: install meshtape .* in its environment, restart it"),
    ],
)
def test_workers_of_another_version(processes, package, found, message):
    (address, *_) = sorted(known_workers(processes))

    def pretend(package: str | None, found: str | None) -> None:
        true = getattr(importlib.metadata.version, "true", importlib.metadata.version)

        def version(name: str) -> str:
            if name == package and found is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found if name == package else true(name)

        version.true = true
        importlib.metadata.version = true if package is None else version

    processes.run(pretend, package, found, workers=[address])
    try:
        with pytest.raises(mt.errors.WorkerMismatch, match=f"worker {address} {message}"):
            mt.Mesh({"a": 2}, client=processes)
    finally:
        processes.run(pretend, None, None, workers=[address])
    works(processes)


def test_no_scheduler_answers():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"  # bound, so that nobody else gets it, and not listened at
        with (
            pytest.raises(mt.errors.SchedulerUnreachable, match=rf"answers at {address} \(waited 1 s\)"),
            connect(address, timeout=1),
        ):
            pass


def test_a_client_that_could_not_connect_is_closed(monkeypatch, eventually):
    """Not left to the garbage collector, which may come while Dask holds a lock that closing it needs."""
    made, true = [], Client.__init__

    def init(self: Client, *args: Any, **options: Any) -> None:
        made.append(self)
        true(self, *args, **options)

    monkeypatch.setattr(Client, "__init__", init)
    with pytest.raises(mt.errors.SchedulerUnreachable, match="asks for certificates"), connect("tls://127.0.0.1:1"):
        pass
    eventually(lambda: [c.status for c in made] == ["closed"])


def test_a_port_that_listens_and_says_nothing():
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(mt.errors.SchedulerUnreachable, match="waited 1 s"), connect(address, timeout=1):
            pass


def test_clusters_that_cannot_take_a_mesh(processes, monkeypatch):
    with pytest.raises(mt.errors.ClusterError, match=r"does not know worker\(s\) tcp://127.0.0.1:1; it has tcp://"):
        mt.Mesh({"a": 2}, client=processes, workers=["tcp://127.0.0.1:1"])
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=None) as empty,
        Client(empty, set_as_default=False) as client,
    ):
        with pytest.raises(mt.errors.ClusterError, match="the Dask cluster has no workers: start some"):
            mt.Mesh({"a": 2}, client=client)
        client.close()
        with pytest.raises(mt.errors.ClusterError, match="the Dask client is closed"):
            mt.Mesh({"a": 2}, client=client)
    with pytest.raises(mt.errors.ClusterError, match="a cluster needs at least one worker, got 0"), local_cluster(0):
        pass
    threads: dict[str, Any] = {"n_workers": 1, "processes": False, "dashboard_address": None}
    refusing = {"blocked_handlers": ["register_scheduler_plugin"]}
    with LocalCluster(**threads, scheduler_kwargs=refusing) as c, Client(c, set_as_default=False) as client:
        for make in (lambda: mt.Mesh({"a": 2}, client=client), lambda: mt.gang(client, int)):
            with pytest.raises(
                mt.errors.ClusterError, match="takes no plugin of meshtape: The 'register_scheduler_plugin'"
            ):
                make()
    with LocalCluster(**threads) as c, Client(c, set_as_default=False) as client:
        with monkeypatch.context() as m:
            m.setattr(rendezvous, "Listener", lambda *_: Path("/no port").stat())
            with pytest.raises(mt.errors.ClusterError, match=r"worker inproc://\S+ cannot open a mesh: \[Errno 2\]"):
                mt.Mesh({"a": 5}, client=client)
        with mt.Mesh({"a": 5}, client=client):  # more ranks than workers share them
            (state,) = (mesh_worker._STATES[a] for a in known_workers(client))
            assert len(state.owners) == 1


def test_an_asynchronous_client():
    import asyncio

    async def use() -> None:
        async with (
            LocalCluster(n_workers=1, processes=False, dashboard_address=None, asynchronous=True) as cluster,
            Client(cluster, asynchronous=True, set_as_default=False) as client,
        ):
            with pytest.raises(mt.errors.MeshError, match="needs a synchronous client"):
                mt.Mesh({"a": 2}, client=client)

    asyncio.run(use())


def test_a_closed_mesh(processes):
    mesh = mt.Mesh({"a": 2}, client=processes)
    x = mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0))
    y = mt.compute(x + 1)
    mesh.close()
    mesh.close()
    for use in (lambda: mt.compute(x * 2), lambda: np.asarray(y)):
        with pytest.raises(mt.errors.MeshError, match="this mesh was closed"):
            use()


def test_nothing_is_left_behind(processes, eventually):
    """Meshes that come and go, and runs that fail, leave no thread, socket, shared memory, program or block on the
    workers. What is meshtape's own is counted: Dask and Python open and close things as they please."""

    def left(dask_worker: Any) -> dict[str, int]:
        import gc

        from meshtape.parallel.transports.links import Link
        from meshtape.parallel.transports.streams import SocketStream

        gc.collect()
        state = mesh_worker._STATES[dask_worker.address]
        objects = gc.get_objects()
        names = [t.name for t in threading.enumerate()]
        return {
            "programs": len(state.programs),
            "secrets": len(state.plane._secrets),
            "values": sum(len(d.kept) + len(d.unfinished) for d in state.resident.sessions.values()),
            "Dask's": sum(str(k).startswith("meshtape.") for k in dask_worker.data),
            "connections": sum(isinstance(o, Link) for o in objects),
            "sockets": sum(isinstance(o, SocketStream) and o.fileno() >= 0 for o in objects),
            "shared memory": Path("/proc/self/maps")
            .read_text()
            .count("/dev/shm/meshtape-"),  # those without a name too
            "threads": sum(n.startswith("meshtape-") and not n.startswith("meshtape-gang") for n in names),
            "gangs' threads": sum(n.startswith("meshtape-gang") for n in names),
        }

    def all_left() -> dict[str, int]:
        gc.collect()
        found = processes.run(left)
        return {k: max(f[k] for f in found.values()) for k in next(iter(found.values()))}

    def fails() -> None:
        with mt.Mesh({"a": 2}, client=processes) as mesh:
            x = mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0))
            mt.compute(x + mt.sum(x))
            with (
                op_on(processes, mesh.runtime.addresses[1], "tanh", failing("raise")),
                pytest.raises(mt.errors.RankLost, match="failed in tanh"),
            ):
                mt.compute(mt.sum(mt.tanh(x)) + x)

    works(processes)
    fails()
    eventually(lambda: (found := all_left())["programs"] == found["secrets"] == 0)
    before = all_left()
    for _ in range(4):
        works(processes)
        fails()
    eventually(lambda: all(n <= before[k] for k, n in all_left().items()))
