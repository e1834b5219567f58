"""The page of the architecture names files and folders that exist, and every room."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import meshtape as mt

ROOT = Path(mt.__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "development" / "architecture.md").read_text()
NAMED = sorted(set(re.findall(r"`((?:arrays|autodiff|storage|parallel|front|tests|docs)/[\w/.]*)`", PAGE)))

SECTIONS = {p: PAGE.split(f"### {p}\n")[1].split("\n#")[0] for p in ("arrays", "autodiff", "storage", "parallel")}


@pytest.mark.parametrize("name", NAMED)
def test_what_the_page_names_exists(name: str) -> None:
    path = ROOT / name
    assert path.is_dir() if name.endswith("/") else path.is_file()


@pytest.mark.parametrize("package", ["arrays", "autodiff", "storage", "parallel"])
def test_every_room_has_a_line(package: str) -> None:
    section = SECTIONS[package]
    rooms = {p.parent.relative_to(ROOT / package).parts[:2] for p in (ROOT / package).rglob("__init__.py")} - {
        (),
        ("browse",),
    }
    missing = ["/".join(r) for r in rooms if f"`{'/'.join(r)}/`" not in section and f"`{r[0]}/`" not in section]
    assert not missing


FILES_OF_ROOMS = [
    (package, re.findall(r"`([\w/]+)/`", line), name)
    for package, section in SECTIONS.items()
    for line in re.split(r"\n(?=- )", section)
    for name in re.findall(r"`(\w+\.py)`", line)
]


@pytest.mark.parametrize(("package", "rooms", "name"), FILES_OF_ROOMS)
def test_files_that_a_line_names_are_in_its_rooms(package: str, rooms: list[str], name: str) -> None:
    assert any((ROOT / package / room / name).is_file() for room in rooms)


ANSWERS = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| `([^`]+)` \|$", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize(("question", "file", "name"), ANSWERS)
def test_answers_hold_what_was_asked_for(question: str, file: str, name: str) -> None:
    assert name in (ROOT / file).read_text(), question


def test_rooms_say_where_to_begin() -> None:
    for init in (f for p in SECTIONS for f in (ROOT / p).rglob("__init__.py")):
        for name in re.findall(r"Begin with (\w+\.py)", init.read_text()):
            assert (init.parent / name).is_file(), init
