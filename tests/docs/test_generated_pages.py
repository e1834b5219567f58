"""The pages of tables are the ones that the engine's own tables give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "generate"


@pytest.mark.parametrize("name", ["derivatives", "shardings", "stubs"])
def test_the_page_is_up_to_date(name: str) -> None:
    # In a process of its own: other tests add ops to the table.
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--check"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert found.returncode == 0, f"run docs/generate/{name}.py {found.stderr}"
