"""The package that a benchmark measures, and whether it is there."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def kernels() -> str:
    """Whether the kernels in C run, for the title of a table."""
    from meshtape.arrays.native import AVAILABLE

    return "with native kernels" if AVAILABLE else "without native kernels"


def options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of a program, whose ``--help`` is answered before anything is imported."""
    found = parser.parse_args()
    try:
        version("meshtape")
    except PackageNotFoundError:
        sys.exit(
            f"meshtape is not installed in {sys.prefix}: run `uv run python benchmarks/{Path(sys.argv[0]).name}`, "
            "or `pip install -e .` in the checkout first"
        )
    return found
