"""What the scripts that write pages of tables share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType


def op_samples() -> ModuleType:
    """The table of samples that the tests read. (A folder named ``meshtape`` lies beside it, so that theirs is not on
    the path.)"""
    spec = importlib.util.spec_from_file_location("op_samples", Path(__file__).parents[2] / "tests" / "op_samples.py")
    assert spec is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def write(page: Path, text: str) -> int:
    """Write the page; with ``--check`` on the command line only compare. Returns the exit status: 1 where it is
    another."""
    if "--check" in sys.argv[1:]:
        return 0 if page.exists() and page.read_text() == text else 1
    page.write_text(text)
    return 0
