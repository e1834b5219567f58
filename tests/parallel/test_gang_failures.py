"""What users give to ``mt.gang``, and how its ranks end: right, or an error of ours, and nothing goes on running."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

import meshtape as mt
from meshtape.parallel.dask.workers import known_workers

pytestmark = pytest.mark.timeout(300)
LIMIT = 200.0


# ----- what is given --------------------------------------------------------------------------------------------------


def test_each_rank_gets_its_block_wherever_split_arrays_lie(processes):
    def work(*args: Any, **kwargs: Any) -> Any:
        import dataclasses

        import numpy as np

        (first, (second, *_)), named = args, kwargs["deep"]["x"][0]
        held = dataclasses.astuple(kwargs["data"])[0]
        return [np.asarray(x).tolist() for x in (first, second["y"], named, held, kwargs["whole"], *kwargs["same"])]

    import dataclasses

    batch = dataclasses.make_dataclass("Batch", ["x"])
    host = np.arange(6.0)
    with mt.Mesh({"a": 3}, client=processes) as mesh:
        x = mt.distribute(host, mesh, a=mt.Shard(0))
        y = x * 2
        held = batch(x + 3)
        given = {"deep": {"x": (x + 1, 7)}, "data": held, "whole": mt.asarray(host), "same": [x, x]}
        found = mt.gang(processes, work, x, [{"y": y}, None], **given).result(LIMIT)
        of_closure = mt.gang(processes, lambda: np.asarray(y).tolist(), ranks=3).result(LIMIT)
    for r, got in enumerate(found):
        mine = host[2 * r : 2 * r + 2]
        assert got == [z.tolist() for z in (mine, mine * 2, mine + 1, mine + 3, host, mine, mine)]
    assert of_closure == [(host[2 * r : 2 * r + 2] * 2).tolist() for r in range(3)]


BAD: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
    (mt.errors.NotAFunction, r"\[gang\] takes a function, got NoneType", (None,), {}),
    (mt.errors.NotAFunction, r"\[gang\] takes a function, got int", (3,), {}),
    (mt.errors.ArgumentError, r"cannot be pickled: .*lock.*Make it in the function", (int, threading.Lock()), {}),
    (mt.errors.ArgumentError, "cannot be pickled", (int,), {"deep": [{"x": threading.Lock()}]}),
    (mt.errors.ArgumentError, r"env= maps names to texts.*'A': 1", (int,), {"env": {"A": 1}}),
    (mt.errors.ArgumentError, "env= maps names to texts", (int,), {"env": {1: "A"}}),
    (mt.errors.ArgumentError, "env= maps names to texts", (int,), {"env": {"A=B": "C"}}),
    (mt.errors.ArgumentError, "env= maps names to texts", (int,), {"env": {"": "C"}}),
    (mt.errors.ArgumentError, "env= maps names to texts", (int,), {"env": {"A": "B\0"}}),
    (mt.errors.ArgumentError, "env= maps names to texts", (int,), {"env": "A=B"}),
    (mt.errors.ArgumentError, "resources= maps names to numbers", (int,), {"resources": {"GPU": "1"}}),
    (mt.errors.ArgumentError, "resources= maps names to numbers", (int,), {"resources": ["GPU"]}),
    (mt.errors.MeshError, r"whole number of at least 1, got ranks=2\.5", (int,), {"ranks": 2.5}),
    (mt.errors.MeshError, "whole number of at least 1, got ranks=-1", (int,), {"ranks": -1}),
    (mt.errors.MeshError, "whole number of at least 1, got ranks='2'", (int,), {"ranks": "2"}),
    (mt.errors.MeshError, r"workers= takes a list of addresses, got 'tcp://a:1'", (int,), {"workers": "tcp://a:1"}),
    (mt.errors.MeshError, "workers= takes a list of addresses, got 7", (int,), {"workers": 7}),
    (mt.errors.ClusterError, r"does not know worker\(s\) 7; it has tcp://", (int,), {"workers": [7]}),
    (mt.errors.ClusterError, "the Dask cluster has no workers|names none", (int,), {"workers": []}),
]


@pytest.mark.parametrize(("error", "message", "args", "options"), BAD, ids=range(len(BAD)))
def test_bad_calls_are_refused_before_anything_starts(processes, monkeypatch, error, message, args, options):
    monkeypatch.setattr("meshtape.parallel.gangs.gang.GangRun", None)
    with pytest.raises(error, match=message):
        mt.gang(processes, *args, **options)


def test_clients_that_cannot_have_a_gang(processes):
    for bad in (None, "tcp://127.0.0.1:1"):
        with pytest.raises(mt.errors.MeshError, match=r"mt\.gang takes a distributed\.Client, got"):
            mt.gang(bad, int)
    other = Client(processes.scheduler.address, set_as_default=False)
    other.close()
    with pytest.raises(mt.errors.ClusterError, match="the Dask client is closed"):
        mt.gang(other, int)

    async def of_a_loop() -> None:
        async with Client(processes.scheduler.address, asynchronous=True, set_as_default=False) as c:
            with pytest.raises(mt.errors.MeshError, match="needs a synchronous client"):
                mt.gang(c, int)

    asyncio.run(of_a_loop())


def test_logs_of_a_rank_that_the_gang_does_not_have(processes):
    run = mt.gang(processes, int)
    assert run.result(LIMIT) == [0, 0]
    for rank in (7, -1, "0"):
        with pytest.raises(mt.errors.MeshError, match=r"the gang has ranks 0 to 1, got"):
            run.logs(rank)


# ----- what ranks give ------------------------------------------------------------------------------------------------


def test_errors_that_cannot_be_read_keep_their_text(processes):
    def needs_two(_: int) -> None:
        class Strange(Exception):
            def __init__(self, first: int, second: int) -> None:
                super().__init__(f"{first} and {second} do not meet")

        raise Strange(1, 2)

    def unpicklable(_: int) -> None:
        import threading

        raise ValueError("it holds", threading.Lock())

    for work, text in ((needs_two, "Strange: 1 and 2 do not meet"), (unpicklable, "ValueError: .*it holds.*lock")):
        with pytest.raises(mt.errors.RankLost, match=rf"rank \d failed: {text}") as e:
            mt.gang(processes, work, 1, ranks=1).result(LIMIT)
        assert e.value.__cause__ is None


def test_values_that_cannot_be_read_or_sent(processes):
    def elsewhere() -> Any:
        import os

        class There:
            def __reduce__(self) -> Any:
                return _only_in_ranks, ()

            pid = os.getpid()

        return There()

    def lock() -> Any:
        import threading

        return threading.Lock()

    with pytest.raises(mt.errors.RankLost, match=r"rank \d failed: .*pickle"):
        mt.gang(processes, lock, ranks=1).result(LIMIT)
    with pytest.raises(mt.errors.RankLost, match=r"what rank 0 gave cannot be read in this process: .*not here"):
        mt.gang(processes, elsewhere, ranks=1).result(LIMIT)


def _fails_here() -> Callable[[], None]:
    pid = os.getpid()

    def only_in_ranks() -> None:
        if os.getpid() == pid:
            raise RuntimeError("not here")

    return only_in_ranks


_only_in_ranks = _fails_here()


# ----- what goes on running -------------------------------------------------------------------------------------------


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def _has_a_child(folder: str, how: str) -> None:
    import os
    import subprocess
    import time
    from pathlib import Path

    child = subprocess.Popen(["sleep", "250"])
    part = Path(folder, f"{os.environ['RANK']}.part")
    part.write_text(str(child.pid))
    part.rename(part.with_suffix(".pid"))
    if how == "raises":
        raise ValueError("a rank fails")
    if how == "stays":
        time.sleep(250)


def _children(folder: Path) -> list[int]:
    return [int(p.read_text()) for p in folder.glob("*.pid")]


@pytest.mark.parametrize("how", ["ends", "raises", "stays"])
def test_processes_that_ranks_start_end_with_them(processes, tmp_path, eventually, how):
    run = mt.gang(processes, _by_value(_has_a_child), str(tmp_path), how)
    if how == "stays":
        eventually(lambda: len(_children(tmp_path)) == 2)
        run.cancel()
    if how == "ends":
        run.result(LIMIT)
    else:
        with pytest.raises(mt.errors.RankLost):
            run.result(LIMIT)
    eventually(lambda: _children(tmp_path) and all(map(_is_gone, _children(tmp_path))))


def test_processes_that_ranks_start_end_with_their_worker(mortal, tmp_path, eventually):
    pids = mortal.run(os.getpid)
    first = sorted(pids)[0]
    run = mt.gang(mortal, _by_value(_has_a_child), str(tmp_path), "stays", workers=[first])
    eventually(lambda: len(_children(tmp_path)) == 1)
    os.kill(pids[first], signal.SIGKILL)
    with pytest.raises(mt.errors.RankLost, match="left the cluster"):
        run.result(LIMIT)
    eventually(lambda: all(map(_is_gone, _children(tmp_path))))


def _by_value(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which travels as its code: ranks cannot import this file."""
    import types

    return types.FunctionType(fn.__code__, {"__builtins__": __builtins__, "__name__": "__main__"}, fn.__name__)


# ----- clusters that are shared ---------------------------------------------------------------------------------------

WITHOUT = """
import importlib.metadata, sys
sys.modules["meshtape"] = None
true = importlib.metadata.version
def version(name):
    if name == "meshtape":
        raise importlib.metadata.PackageNotFoundError(name)
    return true(name)
importlib.metadata.version = version
from dask.__main__ import main
main()
"""


def test_a_worker_without_meshtape_joins_and_works_for_others(mortal, tmp_path, eventually):
    before = set(known_workers(mortal))
    with mt.Mesh({"a": 2}, client=mortal) as mesh:
        x = mt.compute(mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0)) + 1)
        options = ["--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory", str(tmp_path)]
        other = subprocess.Popen(
            [sys.executable, "-c", WITHOUT, "worker", mortal.scheduler.address, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            eventually(lambda: set(known_workers(mortal)) - before or other.poll() is not None)
            (address,) = set(known_workers(mortal)) - before
            assert mortal.submit(divmod, 7, 2, workers=[address]).result(LIMIT) == (3, 1)
            for make in (lambda: mt.gang(mortal, int, workers=[address]), lambda: mt.gang(mortal, int)):
                with pytest.raises(mt.errors.WorkerMismatch, match=f"worker {address} cannot import meshtape: install"):
                    make()
            with pytest.raises(mt.errors.WorkerMismatch, match=f"worker {address} cannot import meshtape"):
                mt.Mesh({"a": 1}, client=mortal, workers=[address])
            assert float(mt.sum(x)) == 10.0
            assert mt.gang(mortal, int, workers=sorted(before)).result(LIMIT) == [0, 0]
        finally:
            other.kill()
            other.wait(60)
    eventually(lambda: set(known_workers(mortal)) == before)
