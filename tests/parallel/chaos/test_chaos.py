"""Faults at random moments end right or in an error that names who was lost, the next program runs, and nothing is left
behind.

``run.py`` beside this file does the rounds, as a program of its own: name spaces are entered before any thread starts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
SAMPLE = [152, 1, 2, 136, 232, 43, 196, 7, 8, 142, 200, 11, 88, 13, 185, 15, 149, 17, 208]
"""Seeds that meet every operation and every fault; those that take long are together with what is over soon."""


def rounds(folder: Path, *args: str, seconds: float) -> list[dict[str, Any]]:
    out = folder / "outcomes"
    command = [sys.executable, str(FOLDER / "run.py"), "--out", str(out), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    found = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    bad = [f for f in found if f["wrong"]]
    assert done.returncode == 0, f"{bad}\n{done.stdout[-3000:]}\n{done.stderr[-8000:]}"
    assert not bad
    return found


@pytest.mark.timeout(600)
def test_a_sample_of_faults(tmp_path):
    """Most of a round is waiting, so that three clusters at once take no longer than one."""

    def some(i: int) -> list[dict[str, Any]]:
        (folder := tmp_path / str(i)).mkdir()
        return rounds(folder, *(f"--seed={s}" for s in SAMPLE[i::3]), seconds=560)

    with ThreadPoolExecutor() as pool:
        found = [f for part in pool.map(some, range(3)) for f in part]
    assert sorted(f["seed"] for f in found) == sorted(SAMPLE)
    assert len({f["fault"] for f in found}) == 19
    assert len({f["operation"] for f in found}) == 13
    assert sum(f["ended"] != "skipped" for f in found) >= 12


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_500_faults(tmp_path):
    assert len(rounds(tmp_path, "--rounds", "500", seconds=7000)) == 500
