"""``mt.gang``: processes that need each other start together, end together, and say how."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client

import meshtape as mt

pytestmark = pytest.mark.timeout(300)
LIMIT = 200.0


def left(dask_worker: Any) -> list[str]:
    """Folders and processes of gangs on this machine."""
    from pathlib import Path

    names = [str(p) for p in Path("/dev/shm").glob("meshtape-gang-*")]
    for p in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"rank_process" in p.read_bytes():
                names.append(p.parent.name)
        except OSError:
            continue
    return names


@pytest.fixture
def nothing_left(eventually):
    before = set(left(None))
    yield
    new = set(left(None)) - before  # other tests of this machine may start gangs from here on
    eventually(lambda: new.isdisjoint(left(None)))


def test_ranks_have_their_places_their_results_and_their_logs(processes, nothing_left):
    def work(factor: int, *, plus: int) -> Any:
        import os

        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MINE")
        print("this is rank", os.environ["RANK"])
        return int(os.environ["RANK"]) * factor + plus, {n: os.environ[n] for n in names}, os.getpid()

    run = mt.gang(processes, work, 10, ranks=3, env={"MINE": "yes"}, plus=1)
    assert "3 rank(s) on 2 worker(s), running" in repr(run)
    values, places, pids = zip(*run.result(LIMIT), strict=True)
    assert values == (1, 11, 21)
    assert [(p["RANK"], p["LOCAL_RANK"], p["LOCAL_WORLD_SIZE"]) for p in places] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
        ("2", "0", "1"),
    ]
    assert {p["WORLD_SIZE"] for p in places} == {"3"}
    assert len({(p["MASTER_ADDR"], p["MASTER_PORT"]) for p in places}) == 1
    assert {p["MINE"] for p in places} == {"yes"}
    assert len(set(pids)) == 3
    assert run.logs(1) == "this is rank 1\n"
    assert sorted(run.logs()) == [0, 1, 2]
    assert repr(run).endswith("done>")


def test_blocks_come_by_dlpack(processes, nothing_left):
    def work(mine: Any, whole: Any, label: str) -> Any:
        import numpy as np

        seen = np.from_dlpack(mine)
        return seen.shape, float(seen.sum()), whole.tolist(), label, str(mine.dtype)

    with mt.Mesh({"a": 3}, client=processes) as mesh:
        x = mt.distribute(np.arange(10.0, dtype="f4").reshape(5, 2), mesh, a=mt.Shard(0)) + 1
        found = mt.gang(processes, work, x, np.arange(3), "l").result(LIMIT)
        assert [f[0] for f in found] == [(2, 2), (2, 2), (1, 2)]
        assert sum(f[1] for f in found) == 55.0
        assert {(tuple(f[2]), *f[3:]) for f in found} == {((0, 1, 2), "l", "float32")}
        empty = mt.distribute(np.ones((1, 2)), mesh, a=mt.Shard(0))
        assert [f[0] for f in mt.gang(processes, work, empty, np.arange(3), "l").result(LIMIT)][1:] == [(0, 2)] * 2
        assert float(mt.sum(x)) == 55.0  # the mesh goes on
        with pytest.raises(mt.errors.MeshError, match="ranks=2, but the mesh of the arrays has 3"):
            mt.gang(processes, work, x, ranks=2)


def test_a_rank_that_raises_ends_the_others(processes, nothing_left):
    def work() -> None:
        import os

        if os.environ["RANK"] == "2":
            print("about to fail")
            raise FloatingPointError("a broken unit")
        time.sleep(LIMIT)

    with pytest.raises(
        mt.errors.RankLost, match=r"(?s)rank 2 failed: FloatingPointError: a broken unit.*about to fail"
    ) as e:
        mt.gang(processes, work, ranks=3).result(LIMIT)
    assert isinstance(e.value.__cause__, FloatingPointError)
    assert mt.gang(processes, int, ranks=3).result(LIMIT) == [0] * 3


@pytest.mark.parametrize("status", [-9, 0])
def test_a_rank_that_ends_without_a_result_ends_the_others(status, processes, nothing_left):
    def work(status: int) -> None:
        import os
        import signal

        if os.environ["RANK"] == "0":
            if status == 0:
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LIMIT)

    with pytest.raises(mt.errors.RankLost, match=f"rank 0 ended with status {status} and no result"):
        mt.gang(processes, work, status, ranks=3).result(LIMIT)


def test_a_worker_that_dies_ends_the_others(mortal, tmp_path, eventually, nothing_left):
    def work(folder: str) -> None:
        import os
        from pathlib import Path

        Path(folder, os.environ["RANK"]).touch()
        time.sleep(LIMIT)

    run = mt.gang(mortal, work, str(tmp_path), ranks=2)
    eventually(lambda: len(list(tmp_path.iterdir())) == 2)
    pids = mortal.run(os.getpid)
    os.kill(pids[sorted(pids)[1]], signal.SIGKILL)
    with pytest.raises(mt.errors.RankLost, match=r"rank 1 .*left the cluster"):
        run.result(LIMIT)


def test_what_a_killed_worker_left_is_gone_with_the_next_gang(processes, nothing_left):
    """A rank takes the folder away when its worker is killed; where there was none yet, or none any more, the next gang
    does."""
    from meshtape.storage.stores.owners import Hold

    left, used = (Path(tempfile.mkdtemp(prefix="meshtape-gang-", dir="/dev/shm")) for _ in range(2))
    (left / "0").mkdir()
    held = Hold(str(used)).lock()
    try:
        assert mt.gang(processes, int).result(LIMIT) == [0, 0]
        assert not left.exists()
        assert used.exists()
    finally:
        held.release()
        used.rmdir()


def test_cancel_and_a_client_that_goes_end_all_ranks(processes, tmp_path, eventually, nothing_left):
    def work(folder: str) -> None:
        import os
        from pathlib import Path

        Path(folder, os.environ["RANK"]).touch()
        time.sleep(LIMIT)

    run = mt.gang(processes, work, str(tmp_path))
    eventually(lambda: len(list(tmp_path.iterdir())) == 2)
    with pytest.raises(TimeoutError, match="has not ended within"):
        run.result(0.01)
    run.cancel()
    with pytest.raises(mt.errors.RankLost, match="cancelled"):
        run.result(LIMIT)
    for p in tmp_path.iterdir():
        p.unlink()
    other = Client(processes.scheduler.address, set_as_default=False)
    mt.gang(other, work, str(tmp_path))
    eventually(lambda: len(list(tmp_path.iterdir())) == 2)
    other.close()


def test_gangs_that_are_started_at_once_do_not_wait_for_each_other(processes, nothing_left):
    """Each rank waits for all others of its gang: two gangs that had one worker each would wait for ever."""

    def meet(n: int) -> int:
        import os
        import socket

        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if os.environ["RANK"] == "0":
            with socket.create_server(address) as s:
                s.settimeout(LIMIT)
                s.accept()[0].close()
        else:
            import time

            end = time.monotonic() + LIMIT
            while time.monotonic() < end:
                try:
                    socket.create_connection(address, 1).close()
                    break
                except OSError:
                    time.sleep(0.01)
        return n

    other = Client(processes.scheduler.address, set_as_default=False)
    try:
        runs = [mt.gang(c, meet, i) for i, c in enumerate([processes, other, processes, other])]
        assert [r.result(LIMIT) for r in runs] == [[i, i] for i in range(4)]
    finally:
        other.close()


@pytest.mark.slow
def test_two_gangs_at_once_200_times(processes, nothing_left):
    other = Client(processes.scheduler.address, set_as_default=False)
    try:
        for _ in range(200):
            runs = [mt.gang(c, os.getpid) for c in (processes, other)]
            for r in runs:
                assert len(set(r.result(LIMIT))) == 2
    finally:
        other.close()


def test_bad_input(processes):
    with pytest.raises(mt.errors.MeshError, match="got ranks=0"):
        mt.gang(processes, int, ranks=0)
    with pytest.raises(mt.errors.ClusterError, match="does not know worker"):
        mt.gang(processes, int, workers=["tcp://nowhere:1"])
    with pytest.raises(mt.errors.ClusterError, match=r"no worker of the Dask cluster has the resources \{'GPU': 1\}"):
        mt.gang(processes, int, resources={"GPU": 1})
    here = mt.distribute(np.ones(4), mt.Mesh({"a": 2}), a=mt.Shard(0))
    with pytest.raises(mt.errors.MeshError, match="of one mesh of its client"):
        mt.gang(processes, int, here)
    with pytest.raises((TypeError, AttributeError), match="pickle"):
        mt.gang(processes, int, threading.Lock())


def test_the_example_of_pytorch(processes, nothing_left):
    pytest.importorskip("torch")
    example: dict[str, Any] = {}
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "gang.md").read_text()
    code = text.split("```py\n")[1].split("```")[0]
    assert len(code.splitlines()) <= 60
    exec(compile(code, "gang.md", "exec"), example)
    with dask.config.set({"meshtape.timeout": 60}):
        losses = example["train"](processes)
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_xgboost_where_a_worker_that_holds_data_is_restarted(mortal, nothing_left):
    """Of https://github.com/dmlc/xgboost/issues/9420, where Dask waits for ever for the worker that left."""
    pytest.importorskip("xgboost")

    def fit(x: Any, y: Any, dies: bool) -> bytes:
        import os
        import signal

        import xgboost as xgb
        from xgboost.tracker import RabitTracker

        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if os.environ["RANK"] == "0":
            tracker = RabitTracker(int(os.environ["WORLD_SIZE"]), host_ip=place[0], port=place[1])
            tracker.start()
        with xgb.collective.CommunicatorContext(
            dmlc_communicator="rabit", dmlc_tracker_uri=place[0], dmlc_tracker_port=place[1], dmlc_retry=50
        ):
            if dies and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            return bytes(
                xgb.train({"tree_method": "hist"}, xgb.DMatrix(np.asarray(x), np.asarray(y)), 5).save_raw("json")
            )

    rng = np.random.default_rng(0)
    x, y = rng.random((300, 10)), rng.random(300)

    def split(mesh: mt.Mesh) -> list[Any]:
        return [mt.compute(mt.distribute(a, mesh, a=mt.Shard(0)) + 0) for a in (x, y)]

    with mt.Mesh({"a": 2}, client=mortal) as mesh:
        blocks = split(mesh)
        first, second = mt.gang(mortal, fit, *blocks, False).result(LIMIT)
        assert first == second
        begun = time.monotonic()
        with pytest.raises(mt.errors.RankLost, match="rank 1 ended with status -9"):
            mt.gang(mortal, fit, *blocks, True).result(LIMIT)
        mortal.restart_workers([mesh.runtime.addresses[1]])
        with pytest.raises(mt.errors.MeshtapeError):
            mt.gang(mortal, fit, *blocks, False).result(LIMIT)
        assert time.monotonic() - begun < 60
    with mt.Mesh({"a": 2}, client=mortal) as mesh:
        assert mt.gang(mortal, fit, *split(mesh), False).result(LIMIT) == [first, second]
