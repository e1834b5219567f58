from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class DemoRun:
    """The main job as its command ran it: the words of the command, in which folder, and what it printed."""

    command: list[str]
    folder: Path
    printed: str


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> DemoRun:
    """The run in ``MESHTAPE_DEMO``, where somebody has just made one, with what it printed in ``printed.txt``; else one
    made here."""
    command, given = ["demo", "--directory", "first-run"], os.environ.get("MESHTAPE_DEMO")
    if given:
        return DemoRun(command, Path(given), (Path(given) / "printed.txt").read_text())
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [sys.executable, "-m", "meshtape", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return DemoRun(command, folder, done.stdout)
