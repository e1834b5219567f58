"""The page on the derivatives of all ops is the one that the tables give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date():
    # In a process of its own: other tests add ops to the table.
    command = [sys.executable, str(ROOT / "docs" / "generate" / "derivatives.py"), "--check"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, f"run docs/generate/derivatives.py {found.stderr}"
