"""The pages of tables are the ones that the engine's own tables give."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import Forked

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "generate"


@pytest.mark.parametrize("name", ["derivatives", "shardings", "stubs"])
def test_the_page_is_up_to_date(name: str, tmp_path: Path) -> None:
    # In a process of its own: other tests add ops to the table.
    found = Forked(str(FOLDER / f"{name}.py"), "--check", log=tmp_path / "log")
    assert found.wait(250) == 0, f"run docs/generate/{name}.py {(tmp_path / 'log').read_text()}"
