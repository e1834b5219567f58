"""The help of every command has examples, and every one of them is run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

from meshtape.cli.main import main
from meshtape.parallel.dask.cluster import local_cluster
from meshtape.storage import save_safetensors

JOB = """
import sys
import numpy as np
import meshtape as mt

x = np.random.default_rng(0).normal(size=(32, 6)).astype(np.float32)
epochs = int(sys.argv[sys.argv.index("--epochs") + 1]) if "--epochs" in sys.argv else 2
trainer = mt.Trainer(
    lambda p, b, key: mt.mean((b["x"] @ p - b["y"]) ** 2), mt.zeros(6, dtype=mt.float32), mt.optim.sgd(0.01),
    {"x": x, "y": x @ np.arange(6, dtype=np.float32)}, batch=16, epochs=epochs, mesh=mt.cluster_mesh({"data": -1}),
)
print("arrived at", trainer.fit().step)
"""


def examples(command: click.Command) -> list[str]:
    """The commands below "Examples:" in a help text."""
    text = command.get_help(click.Context(command, info_name="x", terminal_width=200))
    return re.findall(r"^ +((?:ssh .*)?meshtape .*)$", text.partition("Examples:")[2], re.MULTILINE)


EXAMPLES = {name: examples(command) for name, command in main.commands.items()}
# Run where a bucket, or the demo itself, is at hand: tests/storage/browser/test_places.py, test_readme.py
ELSEWHERE = {"meshtape demo --directory first-run", "meshtape demo --scheduler tcp://10.0.0.1:8786 --epochs 8"}


def here(line: str) -> bool:
    return line not in ELSEWHERE and "s3://" not in line


def test_every_command_has_an_example_and_a_short_help() -> None:
    root = click.Context(main, info_name="meshtape", terminal_width=80)
    listing = main.get_help(root)
    for name, command in main.commands.items():
        assert EXAMPLES[name], name
        line = next(x for x in listing.splitlines() if x.split()[:1] == [name])
        assert not line.endswith("..."), f"{line!r} is cut at 80 columns"
        assert all(f"meshtape {name}" in e for e in EXAMPLES[name]), name
        if name not in ("completion",):
            assert any("--json" in o.opts for o in command.params), f"{name} has no --json"


@pytest.fixture(scope="module")
def place(demo_run: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the examples make sense: the run of the demo, its export, a script."""
    (run,) = (demo_run.folder / "first-run").iterdir()
    home = tmp_path_factory.mktemp("examples")
    shutil.copytree(run, home / "run")
    for name in ("model", "before", "after"):
        shutil.copy(run / "model" / "model.safetensors", home / f"{name}.safetensors")
    (home / "names.rules").write_text("params.{rest*} -> model.{rest*}\noptimizer.{rest*} -> _\n")
    (home / "job.py").write_text(JOB)
    for i, name in enumerate(("base", "tuned")):
        save_safetensors(home / f"{name}.safetensors", {"m.weight": np.full((20, 20), i, np.float32)})
    models = [{"model": f"{name}.safetensors", "parameters": {"weight": 0.5}} for name in ("base", "tuned")]
    (home / "config.yml").write_text(json.dumps({"merge_method": "linear", "models": models}))
    return home


def call(line: str, home: Path) -> Any:
    """Run ``meshtape …`` in this process, as a shell in ``home`` would."""
    words = shlex.split(line)
    assert words[0] == "meshtape"
    before = Path.cwd()
    os.chdir(home)
    try:
        return CliRunner().invoke(main, words[1:])
    finally:
        os.chdir(before)


def test_examples_that_read_and_write_checkpoints(place: Path) -> None:
    run = [line for n in ("info", "ls", "show", "tree", "verify", "merge", "convert", "reshard", "estimate", "diff", "derive", "blend", "lora-extract", "lora-merge") for line in EXAMPLES[n]]  # fmt: skip
    for line in filter(here, run):
        done = call(line, place)
        # diff says by its code that two steps of a training differ.
        allowed = (0, 1) if line.startswith("meshtape diff") else (0,)
        assert done.exit_code in allowed, f"{line}\n{done.output}"
        assert done.exception is None or isinstance(done.exception, SystemExit), line
        assert "Error" not in done.output, f"{line}\n{done.output}"
        assert done.output.strip(), line
        if "--json" in line:
            json.loads(done.stdout)
    done = call(next(line for line in EXAMPLES["diff"] if "--rules" in line), place)
    assert done.exit_code == 0, f"the same arrays under other names\n{done.output}"


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    with local_cluster(2) as client:
        yield client.scheduler.address


@pytest.mark.slow
def test_examples_of_jobs(place: Path, scheduler: str) -> None:
    for line in [*EXAMPLES["run"], *EXAMPLES["status"]]:
        line = line.replace("tcp://10.0.0.1:8786", scheduler)
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(line)], cwd=place, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        if "--json" in line:
            json.loads(done.stdout)
    summary = json.loads((place / "runs" / "job" / "summary.json").read_text())
    assert summary["step"] == 6, "the longer of the two runs, which the other one found done"


@pytest.mark.parametrize("line", [x for x in EXAMPLES["browse"] if here(x)])
def test_examples_of_browse(line: str, place: Path) -> None:
    # What ssh and the address do is the shell's and the network's; a fixed port and a window of this machine are not
    # ours to take.
    words = shlex.split(re.sub(r"^ssh .*(?=meshtape )|--port \d+|--open", "", line))
    command = [sys.executable, "-m", *words]
    if "--json" in words:
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=240, check=True)
        assert json.loads(done.stdout)[0]["step"] == 264
        return
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            with urllib.request.urlopen(server.stdout.readline().strip(), timeout=120) as page:
                assert "<main" in page.read().decode()
        finally:
            server.terminate()


def test_the_example_of_completion(place: Path) -> None:
    (line,) = EXAMPLES["completion"]
    command, _, target = line.partition(" > ")
    assert target.startswith("~/")
    assert "_meshtape_completion" in call(command, place).output
