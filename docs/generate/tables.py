"""What the scripts that write pages of tables share."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def write(page: Path, text: str) -> int:
    """Write the page; with ``--check`` on the command line only compare. Returns the exit status: 1 where it is another."""
    if "--check" in sys.argv[1:]:
        return 0 if page.exists() and page.read_text() == text else 1
    page.write_text(text)
    return 0
