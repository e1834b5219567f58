"""The README is true: its tour runs, its commands exist, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import meshtape as mt
from meshtape.cli.main import main

ROOT = Path(mt.__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks("python")[0], "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "rank 0" in out
    assert "all_reduce" in out
    assert "Sharding(model=Shard(0))" in out
    assert out.strip().endswith("[1. 1.]")


def test_a_newcomer_gets_from_a_clone_to_a_checkpoint_in_the_browser(demo_run: Any) -> None:
    block = next(b for b in blocks("console") if "cd meshtape" in b)
    # What comes before has set up the environment that runs this test.
    commands = [shlex.split(line)[3:] for line in block.splitlines() if line.startswith("uv run meshtape ")]
    demo, *between, browse = commands
    assert demo == demo_run.command, "what was run is what the README says"
    assert browse[0] == "browse"
    meshtape = [sys.executable, "-m", "meshtape"]
    for command in between:
        subprocess.run([*meshtape, *command], cwd=demo_run.folder, check=True, stdout=subprocess.DEVNULL, timeout=250)
    with subprocess.Popen([*meshtape, *browse], cwd=demo_run.folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = next(m[0] for line in server.stdout if (m := re.search(r"http://\S+", line)))
            with urllib.request.urlopen(address) as page:
                start = page.read().decode()
            runs = re.findall(r'href="([^"]*open[^"]*|[^"]*checkpoint[^"]*)"', start)
            assert runs, start
        finally:
            server.terminate()


def test_the_commands_exist() -> None:
    commands = " ".join(blocks("console"))
    for name in re.findall(r"meshtape ([a-z]+)", commands):
        assert name in main.commands, name
    assert (ROOT / ".ci" / "run").exists()


def test_links_and_folders_exist() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target
    for folder in re.findall(r"^\| `([a-z]+)/`", TEXT, re.MULTILINE):
        assert (ROOT / folder / "__init__.py").exists(), folder


def test_nothing_tracked_names_a_registry() -> None:
    # Registry addresses differ from place to place; a lock file would hold them.
    assert not (ROOT / "uv.lock").exists() or "uv.lock" in (ROOT / ".gitignore").read_text()
    for file in ("pyproject.toml", "README.md", ".ci/run"):
        assert "pypi.org" not in (ROOT / file).read_text()
