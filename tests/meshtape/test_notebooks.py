"""Every notebook runs from top to bottom, and draws what it says it draws."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import meshtape as mt

ROOT = Path(mt.__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def outputs(nb: nbformat.NotebookNode) -> str:
    """All texts and HTML that the cells showed."""
    parts = []
    for cell in nb.cells:
        for out in cell.get("outputs", []):
            parts.append(out.get("text", ""))
            parts.extend(str(v) for k, v in out.get("data", {}).items() if k.startswith("text/"))
    return "\n".join(parts)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    nb = nbformat.read(path, as_version=4)
    NotebookClient(nb, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = outputs(nb)
    if path.stem == "tour":
        for text in ("<svg", "all_reduce(model)", "model.safetensors", "rank 0", "True"):
            assert text in shown, text
        pictures = sum("image/png" in o.get("data", {}) for c in nb.cells for o in c.get("outputs", []))
        assert pictures == 2


def test_notebooks_are_committed_without_outputs() -> None:
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        nb = nbformat.read(path, as_version=4)
        assert not any(c.get("outputs") for c in nb.cells), f"{path.name}: clear its outputs before committing"
