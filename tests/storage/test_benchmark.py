"""``benchmarks/storage.py`` runs whole, wherever it is started, and ends with its table; every benchmark tells its
options at once."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["--megabytes", "4", "--rounds", "1", "--chunks", "2000", "--count", "50", "--blend-megabytes", "1"]
PARTS = {
    "save": "save, synced",
    "async": "save_async: the call",
    "load": "load, verified, cold",
    "small": "open 50 small arrays",
    "models": "bfloat16",
    "convert": "memory grows by",
    "contents": "metadata",
    "blend": "blend 3 × 1 MB",
    "slices": "steps in both",
    "forms": "virtual: EMA of plain",
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


DELTAS = """
import sys
sys.path.insert(0, {folder!r})
import timing
import storage_deltas
from pathlib import Path
from storage_table import Bench
storage_deltas.LEARN, storage_deltas.SETTLE, storage_deltas.SAVES, storage_deltas.ANCHOR = 2, 1, 4, 2
bench = Bench(1, None, 1, 1, 1)
storage_deltas.deltas(bench, Path({home!r}), {{}})
bench.show()
"""


def test_deltas_of_a_run_of_few_steps(tmp_path):
    code = DELTAS.format(folder=str(ROOT / "benchmarks"), home=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("4 steps of ") == 6
    assert done.stdout.count("; a delta 0.") == 2


PROGRAMS = sorted(
    p.name for p in (ROOT / "benchmarks").glob("*.py") if "__main__" in p.read_text() and p.stem != "gloo"
)
OF_THE_PACKAGE = ["arrays.py", "autodiff.py", "storage.py", "train.py"]


def run(name, *options, python=()):
    return subprocess.run(
        [sys.executable, *python, str(ROOT / "benchmarks" / name), *options],
        capture_output=True,
        text=True,
        timeout=240,
    )


HELP = """
import runpy, sys
sys.stdout = sys.stderr = open({printed!r}, "w")
sys.argv = [{program!r}, "--help"]
sys.path.insert(0, {folder!r})
runpy.run_path({program!r}, run_name="__main__")
"""


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_is_printed_and_nothing_is_measured(name, tmp_path, run_forked):
    (start := tmp_path / "start.py").write_text(
        HELP.format(
            printed=str(tmp_path / "printed"),
            program=str(ROOT / "benchmarks" / name),
            folder=str(ROOT / "benchmarks"),
        )
    )
    status = run_forked(start, 240)
    said = (tmp_path / "printed").read_text()
    assert status == 0, said
    assert said.startswith("usage:")


@pytest.mark.parametrize("name", OF_THE_PACKAGE)
def test_help_needs_no_package(name):
    done = run(name, "--help", python=["-S"])  # without whatever is installed
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", OF_THE_PACKAGE)
def test_a_package_that_is_not_installed_is_told_plainly(name):
    done = run(name, python=["-S"])
    assert done.returncode == 1
    assert "meshtape is not installed" in done.stderr
    assert "uv run" in done.stderr
