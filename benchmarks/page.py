"""Where a page of measurements goes: to the terminal, or to the file that ``--out`` names."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def destination(doc: str | None) -> Callable[[str], object]:
    """What takes the page. Reads the command line, and is called before anything is measured; ``doc`` is the text of
    its help."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the page to write")
    out: Path | None = parser.parse_args().out
    return print if out is None else out.write_text
