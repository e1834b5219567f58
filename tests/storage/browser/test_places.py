"""Checkpoints in a bucket and behind a web server: browsed in a real browser, reading only what is shown, reaching
nothing else."""

from __future__ import annotations

import http.cookiejar
import json
import re
import shlex
import subprocess
import sys
import urllib.request
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from click.testing import CliRunner

import meshtape as mt
from meshtape.cli.main import main
from meshtape.storage.browse import Server

pytestmark = pytest.mark.timeout(600)
ROWS = 4096  # of 2,048 float32: 32 MiB


def big_run(url: str) -> np.ndarray:
    """A run of two steps with an array of 32 MiB, and beside it what nobody was to see."""
    mesh = mt.Mesh({"model": 8})
    w = np.random.default_rng(0).normal(size=(ROWS, 2048)).astype(np.float32)
    tree = {"w": mt.distribute(w, mesh, model=mt.Shard(0)), "b": np.zeros(3, np.float32)}
    manager = mt.CheckpointManager(f"{url}/run", keep=None)
    manager.save(1, {"b": np.ones(3, np.float32)}, metrics={"loss": 2.0})
    manager.save(2, tree, metrics={"loss": 1.0})
    mt.save(f"{url}/secret", {"key": np.ones(2)})
    return w


def test_a_run_in_a_bucket_is_browsed_by_the_bytes_it_shows(browse: Any, s3: Any) -> None:
    w = big_run(s3.url)
    b = browse(f"{s3.url}/run")
    s3.proxy.reset()
    b.go()
    assert "step 2" in b.text()
    b.picture("bucket-run")
    b.driver.find_element("link text", "2").click()
    b.wait_for("32.0 MiB")
    assert s3.proxy.sent < 200_000, "lists and manifests alone"
    b.driver.find_element("link text", "w").click()
    b.one("#distribution svg.mt-histogram")
    assert "Sampled" in b.text("#distribution")
    assert s3.proxy.sent < 8 << 20 < w.nbytes, "a sample of 4 MiB, and a corner"
    s3.proxy.reset()
    b.go("array?at=0/step-00000002&name=w&every=1,1&index=64,128")
    b.one(".mt-cells").click()
    b.until(lambda: "=" in b.text(".mt-readout"), "a value")
    index, value = re.match(r"\[(.*)\] = (.*)", b.text(".mt-readout")).groups()
    assert float(value) == pytest.approx(float(w[tuple(map(int, index.split(",")))]), rel=1e-6)
    b.picture("bucket-array")


@pytest.mark.parametrize(
    "at",
    ["0/../secret", "0/..%2fsecret", "0/run/../../secret", "1", "0//secret", "0/.meshtape", "0/\\..\\secret", "0/\0"],
)
def test_what_lies_beside_a_bucket_root_is_not_reached(at: str, s3: Any) -> None:
    mt.save(f"{s3.url}/run", {"w": np.ones(2)})
    mt.save(f"{s3.url}/secret", {"key": np.ones(2)})
    with Server([f"{s3.url}/run"]) as server:
        s3.proxy.reset()
        for view in ("open", "checkpoint", "array", "map", "details", "health", "run", "compare"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"{server.url}{view}?at={quote(at)}&a={quote(at)}&b=0&name=key", timeout=120)
            assert refused.value.code == 404
        assert not [path for _, path in s3.proxy.log if "secret" in path]


def test_a_checkpoint_behind_a_web_server_is_browsed(browse: Any, s3: Any) -> None:
    mt.save(f"{s3.url}/open", {"enc": {"w": np.arange(12.0).reshape(3, 4)}}, step=3)
    b = browse(s3.publish(f"{s3.url}/open"))
    b.go("checkpoint?at=0")
    b.wait_for("enc")
    b.go("array?at=0&name=enc.w")
    b.one("#distribution svg.mt-histogram")
    assert "Exact" in b.text("#distribution")
    b.go("health?at=0")
    b.click("button.mt-main")
    b.wait_for("Sound")
    b.picture("web-health")


def test_examples_of_the_help_texts_on_a_bucket(s3: Any) -> None:
    mt.save("s3://bucket/run/step-00001000", {"w": np.ones((2, 3))}, overwrite=True)
    lines = [
        line
        for command in main.commands.values()
        for line in re.findall(r"^ +(meshtape .*s3://.*)$", command.epilog or "", re.MULTILINE)
    ]
    assert sorted(lines) == [
        "meshtape browse s3://bucket/run --host 0.0.0.0 --port 8080",
        "meshtape du s3://bucket/run --json",
        "meshtape gc s3://bucket/run --older-than 2",
        "meshtape tree s3://bucket/run/step-00001000",
    ]
    browse, du, gc, tree = (shlex.split(line) for line in sorted(lines))
    assert CliRunner().invoke(main, du[1:]).exit_code == 0
    assert CliRunner().invoke(main, gc[1:]).exit_code == 0
    shown = CliRunner().invoke(main, tree[1:])
    assert "w  float64[2, 3]" in shown.output, shown.output
    asked = json.loads(CliRunner().invoke(main, [*browse[1:3], "--json"]).output)
    assert asked[0]["kind"] == "run"
    # A free port: the one of the example may be taken here.
    with subprocess.Popen([sys.executable, "-m", *browse[:-1], "0"], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = re.sub(r"//[^:]*:", "//127.0.0.1:", server.stdout.readline().strip())
            assert "token=" in address, "it listens to all"
            jar = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
            with urllib.request.build_opener(jar).open(address, timeout=240) as page:
                assert "step 1,000" in page.read().decode()
        finally:
            server.terminate()
