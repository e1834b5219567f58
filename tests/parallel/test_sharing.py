"""Clusters that are shared, encrypted or closed to new ports; clients and workers that come and go. Real processes
throughout."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster, Security, Worker
from forked import Forked

import meshtape as mt
from meshtape.parallel.dashboard.pages import programs_of
from meshtape.parallel.dask import lease
from meshtape.parallel.dask import worker as mesh_worker
from meshtape.parallel.dask.cluster import local_cluster
from meshtape.parallel.dask.lease import lease_of
from meshtape.parallel.dask.scheduler_plugin import MeshtapeScheduler
from meshtape.parallel.dask.workers import known_workers
from meshtape.parallel.transports import memory

pytestmark = pytest.mark.timeout(300)


def works(client: Client, workers: int = 2) -> None:
    """A new mesh of this client exchanges blocks, small and large."""
    with mt.Mesh({"a": workers}, client=client) as mesh:
        x = mt.distribute(np.arange(400_000.0).reshape(4, -1), mesh, a=mt.Shard(0))
        np.testing.assert_array_equal(mt.reshard(x + 1, a=mt.Shard(1)), np.arange(400_000.0).reshape(4, -1) + 1)
        assert float(mt.sum(x)) == 400_000 * 399_999 / 2


def kinds(client: Client) -> set[tuple[str, str, str]]:
    """What the connections between workers are made of."""

    def look(dask_worker: Any) -> list[tuple[str, str, str]]:
        groups = mesh_worker._STATES[dask_worker.address].plane._groups.values()
        return [
            (type(x).__name__, type(x.stream).__name__, type(getattr(x, "outbox", None)).__name__)
            for g in groups
            for x in g.links.values()
        ]

    return {k for found in client.run(look).values() for k in found}


def left_behind(client: Client) -> dict[str, tuple[int, int, int]]:
    """Secrets, programs and connections that workers still hold."""

    def look(dask_worker: Any) -> tuple[int, int, int]:
        s = mesh_worker._STATES[dask_worker.address]
        return len(s.plane._secrets), len(s.programs), len(s.plane._groups) + len(s.plane._arrived)

    return client.run(look)


# ----- transports on clusters -----------------------------------------------------------------------------------------


def test_processes_of_one_host_share_memory(processes):
    theirs = tuple(f"meshtape-{pid}-" for pid in processes.run(os.getpid).values())
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.distribute(np.ones(400_000), mesh, a=mt.Shard(0))
        mt.compute(mt.reshard(x + 1, a=mt.Replicate()))
        assert kinds(processes) == {("SlotLink", "SocketStream", "SharedSlots")}
        assert not [p for p in memory.ROOT.glob("meshtape-*") if p.name.startswith(theirs)]  # nobody else can open it
    works(processes)


def test_workers_of_one_process_hand_arrays_over(threads):
    with mt.Mesh({"a": 2}, client=threads) as mesh:
        mt.compute(mt.reshard(mt.distribute(np.ones(4), mesh, a=mt.Shard(0)), a=mt.Replicate()))
        assert kinds(threads) == {("SlotLink", "SocketStream", "LocalSlots")}
    works(threads)


@pytest.mark.parametrize(
    ("transport", "stream"), [("sockets", "SocketStream"), ("comms", "CommStream")], ids=["sockets", "comms"]
)
def test_transports_that_are_asked_for(processes, transport, stream):
    with dask.config.set({"meshtape.transport": transport}):
        with mt.Mesh({"a": 2}, client=processes) as mesh:
            mt.compute(mt.reshard(mt.distribute(np.ones(4), mesh, a=mt.Shard(0)), a=mt.Replicate()))
            assert kinds(processes) == {("StreamLink", stream, "NoneType")}
        works(processes)


def test_an_unknown_transport(processes):
    with (
        dask.config.set({"meshtape.transport": "pigeons"}),
        pytest.raises(mt.errors.MeshError, match="must be one of auto, sockets, comms, got 'pigeons'"),
    ):
        mt.Mesh({"a": 2}, client=processes)


@pytest.fixture(scope="module")
def encrypted() -> Iterator[Client]:
    """A client of a cluster of two worker processes that speak TLS."""
    security = Security.temporary()
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, security=security, dashboard_address=None, silence_logs=50
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        assert cluster.scheduler_address.startswith("tls://")
        yield client


@pytest.mark.parametrize(
    ("transport", "kind"),
    [
        ("auto", ("SlotLink", "TlsStream", "SharedSlots")),
        ("sockets", ("StreamLink", "TlsStream", "NoneType")),
        ("comms", ("StreamLink", "CommStream", "NoneType")),
    ],
    ids=["auto", "sockets", "comms"],
)
def test_a_cluster_with_tls(encrypted, transport, kind):
    with dask.config.set({"meshtape.transport": transport}):
        with mt.Mesh({"a": 2}, client=encrypted) as mesh:
            mt.compute(mt.reshard(mt.distribute(np.ones(4), mesh, a=mt.Shard(0)), a=mt.Replicate()))
            assert kinds(encrypted) == {kind}
        works(encrypted)


# ----- several clients ------------------------------------------------------------------------------------------------


def test_two_clients_take_turns(processes):
    """Each would wait for the other for ever, were their gangs to meet on the workers in different orders."""
    found: dict[int, float] = {}

    def work(k: int, client: Client) -> None:
        with mt.Mesh({"a": 2}, client=client) as mesh:
            x = mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0))
            step = mt.compile(lambda x: x + k * mt.sum(x) / 6)
            for _ in range(15):
                x = step(x)
            found[k] = float(mt.sum(x))

    with Client(processes.scheduler.address, set_as_default=False) as other:
        threads = [threading.Thread(target=work, args=(k, c)) for k, c in ((0, processes), (1, other))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    expected = {}
    for k in (0, 1):
        x = np.arange(4.0)
        for _ in range(15):
            x = x + k * x.sum() / 6
        expected[k] = x.sum()
    assert found == pytest.approx(expected)


def test_a_lease_is_kept_until_others_want_it(processes, eventually):
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.compute(mt.distribute(np.ones(4), mesh, a=mt.Shard(0)) + 1)
        held = lease_of(processes)
        assert held._held == frozenset(mesh.runtime.addresses)
        with Client(processes.scheduler.address, set_as_default=False) as other:
            works(other)
            eventually(lambda: held._held == frozenset())  # given up, without a run of this client
        assert float(mt.sum(x)) == 8.0


def test_who_waits_for_long_is_told_for_whom(monkeypatch):
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(lease, "NOTICE", 0.05)
    monkeypatch.setattr(lease.log, "warning", told.put)
    with local_cluster(2, processes=False) as client, dask.config.set({"meshtape.timeouts.lease": 250.0}):
        workers = sorted(known_workers(client))
        client.register_plugin(MeshtapeScheduler())
        client.sync(client.scheduler.meshtape_acquire, name="somebody", workers=workers, patience=250.0)
        waits = threading.Thread(target=works, args=(client,))
        waits.start()
        try:
            said = told.get(timeout=200)
        finally:
            client.sync(client.scheduler.meshtape_release, name="somebody")
        waits.join()
    assert f"for worker(s) {', '.join(workers)}: another client has them (somebody)." in said


CLIENT = """
import sys, time
import numpy as np
from distributed import Client
import meshtape as mt
client = Client(sys.argv[1], set_as_default=False)
mesh = mt.Mesh({"a": 2}, client=client)
x = mt.distribute(np.ones(4), mesh, a=mt.Shard(0))
step = mt.compile(lambda x: x + mt.sum(x) * 0)
x = mt.compute(step(x))
print("ready", flush=True)
while sys.argv[2] == "busy":
    x = step(x)
time.sleep(1000)
"""


@contextlib.contextmanager
def another_client(address: str, what: str) -> Iterator[Forked]:
    """A client in a process of its own that holds the lease; killed at the end."""
    p = Forked("-c", CLIENT, address, what)
    try:
        assert p.stdout is not None
        assert p.stdout.readline() == "ready\n"
        yield p
    finally:
        with contextlib.suppress(ProcessLookupError):
            p.kill()
        p.wait()


def test_a_client_that_stands_still_loses_the_lease_and_one_that_is_killed_leaves_nothing(processes, eventually):
    works(processes)
    before = left_behind(processes)
    with another_client(processes.scheduler.address, "idle") as p:
        os.kill(p.pid, signal.SIGSTOP)
        with dask.config.set({"meshtape.timeouts.lease": 1.0}):
            works(processes)
        os.kill(p.pid, signal.SIGCONT)
        p.kill()
        p.wait()
        works(processes)
    # (A mesh that was closed is forgotten a moment later: fewer may be left than at first.)
    eventually(
        lambda: all(a <= b for w, now in left_behind(processes).items() for a, b in zip(now, before[w], strict=True))
    )


def test_a_client_that_is_killed_at_work_leaves_nothing(processes, eventually):
    works(processes)
    before = left_behind(processes)
    with another_client(processes.scheduler.address, "busy") as p:
        p.kill()
        p.wait()
        works(processes)
    # (A mesh that was closed is forgotten a moment later: fewer may be left than at first.)
    eventually(
        lambda: all(a <= b for w, now in left_behind(processes).items() for a, b in zip(now, before[w], strict=True))
    )


def test_an_error_of_one_mesh_does_not_reach_another(processes):
    """Gangs of both are on their way when the first fails; they follow each other on the workers."""
    with mt.Mesh({"a": 2}, client=processes) as one, mt.Mesh({"b": 2}, client=processes) as two:
        bad, good = mt.compile(lambda x: mt.cosh(x) + mt.sum(x)), mt.compile(lambda y: y + mt.sum(y))
        x, y = mt.distribute(np.zeros(4), one, a=mt.Shard(0)), mt.distribute(np.ones(4), two, b=mt.Shard(0))
        y = mt.compute(good(y))
        mt.compute(bad(x))  # the first run of a program is waited for
        processes.run(_break_prepared, workers=one.runtime.addresses[:1])
        z = bad(x)
        for _ in range(3):
            y = good(y)
        np.testing.assert_array_equal(y, np.full(4, 5.0**4))
        with pytest.raises(mt.errors.RankLost, match="rank 0 failed in cosh"):
            mt.compute(z)
        np.testing.assert_array_equal(good(y), np.full(4, 5.0**5))


def _break_prepared_source() -> Callable[[Any], None]:
    def break_prepared(dask_worker: Any) -> None:
        def fails(v: Any, **_: Any) -> Any:
            raise FloatingPointError("a broken unit")

        for prepared in mesh_worker._STATES[dask_worker.address].programs.values():
            prepared._actions = [
                (s._replace(fn=fails, room=None) if getattr(s, "origin", "") == "cosh" else s, frees)
                for s, frees in prepared._actions
            ]

    return break_prepared


_break_prepared = _break_prepared_source()


# ----- workers that come and go ---------------------------------------------------------------------------------------


def test_workers_that_come_later_and_one_that_stands_still(mortal, eventually):
    works(mortal)
    mortal.cluster.scale(3)
    mortal.wait_for_workers(3, timeout=200)
    try:
        with mt.Mesh({"a": 3}, client=mortal) as mesh:
            assert len(mesh.runtime.addresses) == 3
            x = mt.distribute(np.arange(6.0), mesh, a=mt.Shard(0))
            x = mt.compute(x + mt.sum(x))
            first = mesh.runtime.addresses[0]  # those who wait ask in the order of ranks
            pid = mortal.run(os.getpid)[first]
            os.kill(pid, signal.SIGSTOP)
            try:
                # Found out by asking, long before the collective's own time is over.
                brief = {"meshtape.timeouts.silence": 1.0, "meshtape.timeouts.abort": 2.0}
                y = x + mt.sum(x)
                with dask.config.set(brief | {"meshtape.timeouts.collective": 3600.0}):
                    with pytest.raises(
                        mt.errors.CollectiveTimeout, match=r"no answer from rank 0 .*stopped or cut off"
                    ):
                        mt.compute(y)
                    works(mortal)  # the cluster is usable at once, on those that answer
                    with pytest.raises(mt.errors.ClusterError, match="do not answer"):
                        mt.Mesh({"a": 1}, client=mortal, workers=[first])
            finally:
                os.kill(pid, signal.SIGCONT)
    finally:
        mortal.cluster.scale(2)
        eventually(lambda: len(known_workers(mortal)) == 2)


def test_workers_that_are_restarted(mortal):
    with mt.Mesh({"a": 2}, client=mortal) as mesh:
        x = mt.compute(mt.distribute(np.ones(4), mesh, a=mt.Shard(0)) + 1)
        lost = mesh.runtime.addresses[1]
        mortal.restart_workers([lost])  # by its nanny
        with pytest.raises(mt.errors.MeshtapeError, match="rank 1"):
            mt.compute(mt.reshard(x * 2, a=mt.Replicate()))
    mortal.wait_for_workers(2, timeout=200)
    works(mortal)


def test_resources_choose_workers(eventually):
    with (
        LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0", silence_logs=50, processes=False) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        cluster.worker_spec = {
            i: {"cls": Worker, "options": {"nthreads": 1, "resources": {"disk": i}}} for i in range(3)
        }
        cluster.scale(3)
        client.wait_for_workers(3, timeout=200)
        with dask.annotate(resources={"disk": 1}), mt.Mesh({"a": 3}, client=client) as mesh:
            assert len(mesh.runtime.addresses) == 2
            assert float(mt.sum(mt.distribute(np.arange(6.0), mesh, a=mt.Shard(0)))) == 15.0
        with (
            dask.annotate(resources={"GPU": 1}),
            pytest.raises(mt.errors.ClusterError, match="no worker of the Dask cluster has the resources"),
        ):
            mt.Mesh({"a": 1}, client=client)


def test_members_of_a_mesh_are_not_scaled_away(processes):
    def candidates(dask_scheduler: Any) -> list[str]:
        return [
            w.address
            for w in dask_scheduler.plugins["meshtape"].valid_workers_downscaling(
                dask_scheduler, list(dask_scheduler.workers.values())
            )
        ]

    with mt.Mesh({"a": 1}, client=processes) as mesh:
        assert set(mesh.runtime.addresses).isdisjoint(processes.run_on_scheduler(candidates))
    assert len(processes.run_on_scheduler(candidates)) == 2


def test_memory_of_blocks_is_used_again(processes):
    """A loop in its stride takes no fresh pages from the system, in ops of our own (the pool) and in NumPy's
    temporaries (malloc)."""

    def faults() -> int:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    def step(x: Any, _: Any) -> Any:
        return mt.tanh(x * 1.01) + 0.5 * mt.sin(x), None  # tanh makes temporaries

    (address, *_) = sorted(known_workers(processes))
    with mt.Mesh({"a": 1}, client=processes, workers=[address]) as mesh:
        x = mt.compute(mt.distribute(np.ones(1 << 20), mesh) + 0.0)  # 2,048 pages
        mt.compute(mt.scan(step, x, length=10)[0])
        before = processes.run(faults, workers=[address])[address]
        mt.compute(mt.scan(step, x, length=20)[0])
        after = processes.run(faults, workers=[address])[address]
    assert (after - before) / 20 < 1024  # each array anew would be some 8,000


def test_peak_memory_of_a_reshard(processes):
    """The old block, the new one, and some chunks: 64 MB blocks turned from rows to columns, and a sum that all
    need."""

    def reset() -> int:
        """What the process holds, after it gave back all that it only kept; the peak is counted from here."""
        import ctypes
        import gc

        from meshtape.arrays.backends.memory_pool import POOL

        gc.collect()
        POOL.clear()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return status("VmRSS")

    def status(key: str) -> int:
        (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key)]
        return int(line.split()[1]) * 1024

    def highest() -> int:
        return status("VmHWM")

    n = 4096
    block = n * n // 2 * 8
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.compute(mt.distribute(np.ones((n, n)), mesh, a=mt.Shard(0)) + 0.0)
        turn = mt.compile(lambda x: mt.reshard(x, a=mt.Shard(1)))
        mt.compute(turn(x[:64]))  # connected
        before = processes.run(reset)
        y = mt.compute(turn(x))
        after = processes.run(highest)
        for a in before:
            assert 0.9 * block < after[a] - before[a] < 1.25 * block
        del y


# ----- what users of Dask expect --------------------------------------------------------------------------------------


def test_a_run_that_fails_is_counted(processes, eventually):
    def failed(dask_scheduler: Any) -> int:
        found = programs_of(dask_scheduler).get("breaks")
        return found["failed"] if found else 0

    def breaks(x: Any) -> Any:
        return mt.acosh(x)

    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.distribute(np.ones(4), mesh, a=mt.Shard(0))
        processes.run(_fail_in, "acosh", True)
        try:
            with pytest.raises(mt.errors.RankLost, match="failed in acosh"):
                mt.compute(mt.compile(breaks)(x))
        finally:
            processes.run(_fail_in, "acosh", False)
    eventually(lambda: processes.run_on_scheduler(failed) == 2)


def test_failures_are_events(processes, eventually):
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.distribute(np.ones(4), mesh, a=mt.Shard(0))
        processes.run(_fail_in, "atan", True)
        try:
            with pytest.raises(mt.errors.RankLost, match="failed in atan"):
                mt.compute(mt.atan(x))
        finally:
            processes.run(_fail_in, "atan", False)
        eventually(lambda: any("a broken unit" in e["error"] for _, e in processes.get_events(mesh_worker.TOPIC)))


def _fail_in_source() -> Callable[[str, bool], None]:
    def fail_in(name: str, on: bool) -> None:
        from meshtape.arrays import OPS

        def fails(v: Any) -> Any:
            if v.size > 1:
                raise FloatingPointError("a broken unit")
            return v

        op = OPS[name]
        op.numpy = fails if on else op.bind(np)

    return fail_in


_fail_in = _fail_in_source()
