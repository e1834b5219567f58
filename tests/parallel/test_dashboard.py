"""The pages in a real scheduler's dashboard, set up by configuration alone."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster

import meshtape as mt
from meshtape.parallel.dashboard import pages
from meshtape.parallel.dask.workers import known_workers

ROUTES = "distributed.scheduler.http.routes"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One cluster for all; the last test takes a worker from it."""
    tmp_path = tmp_path_factory.mktemp("dashboard")
    mt.save(tmp_path / "runs" / "ckpt", {"w": np.arange(12.0).reshape(3, 4)})
    pages.access.cache_clear()
    settings = {
        ROUTES: [*dask.config.get(ROUTES), "meshtape.parallel.dashboard.pages"],
        "meshtape.browse.roots": [str(tmp_path / "runs")],
        "meshtape.browse.hosts": ["127.0.0.1", "localhost"],
        "distributed.worker.memory.terminate": False,
    }
    with (
        dask.config.set(settings),
        LocalCluster(2, threads_per_worker=1, dashboard_address="127.0.0.1:0", silence_logs=40) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        client.wait_for_workers(2)
        yield client
    pages.access().close()
    pages.access.cache_clear()


def ask(client: Client, path: str, host: str | None = None) -> tuple[int, str, dict[str, str]]:
    where = urlsplit(client.dashboard_link)
    connection = http.client.HTTPConnection("127.0.0.1", where.port, timeout=120)
    try:
        connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{where.port}"})
        r = connection.getresponse()
        return r.status, r.read().decode(), {k.lower(): v for k, v in r.getheaders()}
    finally:
        connection.close()


def test_the_live_page_shows_meshes_programs_and_collectives(cluster: Client) -> None:
    status, text, headers = ask(cluster, "/meshtape/")
    assert status == 200
    assert "No mesh is open" in text
    assert "default-src 'none'" in headers["content-security-policy"]
    mesh = mt.Mesh({"data": 2}, client=cluster)
    x = mt.distribute(np.ones((64, 8)), mesh, data=mt.Shard(0))
    w = mt.distribute(np.ones((8, 3)), mesh)

    @mt.compile
    def norm_of_slope(x: Any, w: Any) -> Any:
        return mt.sum(mt.grad(lambda w: mt.sum((x @ w) ** 2))(w) ** 2)

    first = float(norm_of_slope(x, w))
    assert first > 0
    done = threading.Event()
    failed: list[BaseException] = []

    def keep_busy() -> None:
        try:
            while not done.is_set():
                float(norm_of_slope(x, w))
        except BaseException as e:
            failed.append(e)

    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        until = time.monotonic() + 120
        while True:
            state = json.loads(ask(cluster, "/meshtape/?format=json")[1])
            (m,) = state["meshes"]
            collectives = [w["collective"] for w in m["workers"]]
            if all(collectives) and state["programs"].get("norm_of_slope", {"done": 0})["done"] >= 4:
                break
            assert not failed, failed
            assert time.monotonic() < until, state
            time.sleep(0.1)
    finally:
        done.set()
        busy.join()
    assert len(m["workers"]) == 2
    assert all(w["alive"] and w["blocks"] > 0 for w in m["workers"])
    assert any("all_reduce" in c or "reduce_scatter" in c for c in collectives), collectives
    assert any(w["run"] for w in m["workers"])
    fragment = ask(cluster, "/meshtape/?fragment=1")[1]
    assert fragment.startswith("<div")
    assert "norm_of_slope" in fragment
    assert "<html" not in fragment


def test_a_save_is_seen_as_tasks_and_a_failure_is_listed(cluster: Client, tmp_path: Path) -> None:
    assert ask(cluster, "/meshtape/")[0] == 200  # counting begins with the first look
    mesh = mt.Mesh({"data": 2}, client=cluster)
    x = mt.distribute(np.ones((64, 8)), mesh, data=mt.Shard(0))
    mt.save(tmp_path / "saved", {"x": x})
    until = time.monotonic() + 200
    while "save" not in (state := json.loads(ask(cluster, "/meshtape/?format=json")[1]))["programs"]:
        assert time.monotonic() < until, state
    while (state := json.loads(ask(cluster, "/meshtape/?format=json")[1]))["programs"]["save"]["done"] < 2:
        assert time.monotonic() < until, state
    cluster.log_event("meshtape", {"failed": "mesh/<b>step</b>", "error": "RankLost: <script>"})
    while not (state := json.loads(ask(cluster, "/meshtape/?format=json")[1]))["failures"]:
        assert time.monotonic() < until
    text = ask(cluster, "/meshtape/")[1]
    assert "RankLost: &lt;script&gt;" in text
    assert "&lt;b&gt;step&lt;" in text


def writing(cluster: Client, path: Path) -> list[dict[str, Any]]:
    """What the page says of the checkpoints written below ``path``."""
    found = json.loads(ask(cluster, "/meshtape/?format=json")[1])["writing"]
    return [a for a in found if a["path"].startswith(str(path))]


def until(condition: Any) -> Any:
    """What ``condition`` returns as soon as it is true."""
    patience = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < patience
        time.sleep(0.05)
    return found


def test_bytes_of_checkpoints_that_are_written_are_shown(cluster: Client, tmp_path: Path, held_merge: Any) -> None:
    mesh = mt.Mesh({"data": 2}, client=cluster)
    x = mt.distribute(np.ones((512, 512)), mesh, data=mt.Shard(0))
    mt.save(tmp_path / "now", {"x": x})
    mt.save_async(tmp_path / "later", {"x": x}).wait()
    saves = until(
        lambda: [a for a in writing(cluster, tmp_path) if a["state"] == "done"][1:] and writing(cluster, tmp_path)
    )
    assert {a["kind"] for a in saves} == {"Save", "Save in the background"}
    assert all(a["done"] == a["total"] >= 512 * 512 * 8 for a in saves)
    # The workers wrote, and said so.
    plugin = cluster.cluster.scheduler.plugins["meshtape"]
    roots = {a["root"] for r in plugin.reports.values() for a in r["activities"] if a["path"].startswith(str(tmp_path))}
    assert len(roots) == 2
    until(lambda: all(plugin.written(root) == saves[0]["total"] for root in roots))

    with held_merge(tmp_path / "now", tmp_path / "hf"):
        (a,) = until(lambda: [a for a in writing(cluster, tmp_path) if a["state"] == "running" and a["done"]])
        assert (a["kind"], a["total"]) == ("Merge", 512 * 512 * 8)
        assert a["done"] < a["total"]
        fragment = ask(cluster, "/meshtape/?fragment=1")[1]
        assert "mt-fill" in fragment
        assert "of 2.0 MiB" in fragment
    until(lambda: [a["state"] for a in writing(cluster, tmp_path) if a["kind"] == "Merge"] == ["done"])
    with pytest.raises(mt.errors.CheckpointError):  # it exists, which a transfer sees at its start
        mt.storage.reshard(tmp_path / "now", tmp_path / "hf", mesh={"data": 4}, shardings={"*": {"data": 0}})
    (failed,) = until(lambda: [a for a in writing(cluster, tmp_path) if a["state"] == "failed"])
    assert failed["kind"] == "Reshard"
    assert "exists" in failed["error"]
    assert "CheckpointExists" in ask(cluster, "/meshtape/")[1]


def test_a_client_that_left_in_the_middle_is_said_to_have_left(cluster: Client, tmp_path: Path) -> None:
    script = f"""
import os, numpy as np, meshtape as mt
from distributed import Client
client = Client({cluster.scheduler.address!r})
mesh = mt.Mesh({{"data": 1}}, client=client)
mt.save({str(tmp_path / "a")!r}, {{"x": np.ones((512, 512))}})
def die(done, total):
    if 0 < done < total:
        import time
        while not os.path.exists({str(tmp_path / "seen")!r}):
            time.sleep(0.05)
        os.kill(os.getpid(), 9)
mt.merge({str(tmp_path / "a")!r}, {str(tmp_path / "b")!r}, progress=die, memory_limit=1 << 20, threads=1)
"""
    with subprocess.Popen([sys.executable, "-c", script]) as job:
        until(lambda: [a for a in writing(cluster, tmp_path / "b") if a["state"] == "running"])
        (tmp_path / "seen").touch()
        assert job.wait(120) == -9
    until(lambda: [a["state"] for a in writing(cluster, tmp_path / "b")] == ["left"])
    assert "its process has left" in ask(cluster, "/meshtape/")[1]


def test_jobs_are_listed(cluster: Client, tmp_path: Path) -> None:
    x = np.arange(32, dtype=np.float32).reshape(16, 2)
    mesh = mt.Mesh({"data": 2}, client=cluster)
    trainer = mt.Trainer(
        lambda p, b, key: mt.mean((b["x"] @ p) ** 2),
        mt.ones(2, dtype=mt.float32),
        mt.optim.sgd(1e-4),
        {"x": x},
        batch=8,
        epochs=1,
        mesh=mesh,
        directory=tmp_path / "<i>job",
    )
    trainer.fit()
    (job,) = until(
        lambda: [j for j in json.loads(ask(cluster, "/meshtape/?format=json")[1])["jobs"] if j["state"] == "finished"]
    )
    assert (job["step"], job["steps"], job["alive"]) == (2, 2, True)
    text = ask(cluster, "/meshtape/")[1]
    assert "&lt;i&gt;job" in text
    assert "2 of 2" in text


def test_the_browser_is_mounted_below(cluster: Client) -> None:
    assert ask(cluster, "/meshtape")[2]["location"] == "meshtape/"
    assert ask(cluster, "/meshtape/browse")[2]["location"] == "browse/"
    assert ask(cluster, "/meshtape/browse/")[0] == 302
    assert "ckpt" in ask(cluster, "/meshtape/browse/open?at=0")[1]
    status, text, _ = ask(cluster, "/meshtape/browse/array?at=0/ckpt&name=w")
    assert status == 200
    assert "3 × 4" in text
    assert ask(cluster, "/meshtape/browse/static/browse.css")[0] == 200
    assert ask(cluster, "/meshtape/browse/checkpoint?at=0/../..")[0] == 404
    for path in ("/meshtape/", "/meshtape/browse/checkpoint?at=0/ckpt"):
        assert ask(cluster, path, host="evil.example")[0] == 403
    assert ask(cluster, "/health")[0] == 200, "Dask's own pages stay"


def test_a_worker_that_left_is_shown(cluster: Client) -> None:
    mesh = mt.Mesh({"data": 2}, client=cluster)
    x = mt.distribute(np.ones((8, 2)), mesh, data=mt.Shard(0))
    assert x.shape == (8, 2)
    gone = sorted(known_workers(cluster))[1]
    cluster.retire_workers([gone])
    until = time.monotonic() + 120
    while True:
        meshes = json.loads(ask(cluster, "/meshtape/?format=json")[1])["meshes"]
        if meshes and all([w["alive"] for w in m["workers"]] == [True, False] for m in meshes):
            break
        assert time.monotonic() < until
        time.sleep(0.1)
    assert "left the cluster" in ask(cluster, "/meshtape/")[1]
