"""The page of the architecture names files and folders that exist, and every room."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import meshtape as mt

ROOT = Path(mt.__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "development" / "architecture.md").read_text()
NAMED = sorted(set(re.findall(r"`((?:arrays|autodiff|storage|parallel|front|tests|docs)/[\w/.]*)`", PAGE)))


@pytest.mark.parametrize("name", NAMED)
def test_what_the_page_names_exists(name: str) -> None:
    path = ROOT / name
    assert path.is_dir() if name.endswith("/") else path.is_file()


@pytest.mark.parametrize("package", ["arrays", "autodiff", "storage", "parallel"])
def test_every_room_has_a_line(package: str) -> None:
    section = PAGE.split(f"### {package}\n")[1].split("\n#")[0]
    rooms = {p.parent.relative_to(ROOT / package).parts[:2] for p in (ROOT / package).rglob("__init__.py")} - {
        (),
        ("browse",),
    }
    missing = ["/".join(r) for r in rooms if f"`{'/'.join(r)}/`" not in section and f"`{r[0]}/`" not in section]
    assert not missing
