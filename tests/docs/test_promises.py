"""Pages that say which test proves which promise name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import meshtape as mt

ROOT = Path(mt.__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs" / "development").glob("*-promises.md"))
NAMED = re.compile(r"`((?:[\w/]+/)?test_\w+(?:\.py)?(?:::(?:\w+::)?test_\w+)?)`")


def functions(file: Path) -> set[str]:
    return set(re.findall(r"^ *(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    files: dict[str, list[Path]] = {}
    for f in (ROOT / "tests").rglob("test_*.py"):
        files.setdefault(f.stem, []).append(f)
    named = NAMED.findall(page.read_text())
    assert len(named) > 10
    missing = []
    for name in named:
        place, *inside = name.split("::")
        function = inside[-1] if inside else ""
        stem = Path(place).stem
        found = [f for f in files.get(stem, ()) if f.as_posix().endswith(place.removesuffix(".py") + ".py")]
        if not found or (function and not any(function in functions(f) for f in found)):
            missing.append(name)
    assert not missing, f"{page.name} names tests that are not there: {missing}"
