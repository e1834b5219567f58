"""``benchmarks/storage.py`` runs whole, wherever it is started, and ends with its table."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["--editable", "--megabytes", "4", "--rounds", "1", "--chunks", "2000"]
PARTS = {
    "save": "save, synced",
    "async": "save_async: the call",
    "load": "load, verified, cold",
    "convert": "memory grows by",
    "contents": "metadata",
}


@pytest.mark.parametrize(("started", "parts"), [("root", list(PARTS)), ("elsewhere", ["save"])])
def test_it_ends_with_its_table(started, parts, quick):
    only = [word for part in parts for word in ("--only", part)]
    against = ["--against", "raw", "--against", "cp", "--against", "DCP"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "storage.py"), *SMALL, *only, *against, "--directory", quick],
        cwd=ROOT if started == "root" else quick,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for part in parts:
        assert PARTS[part] in done.stdout
    assert "missing" in done.stdout  # PyTorch is in no environment of the tests
    assert not list(quick.iterdir())
