"""The documentation is true: its examples run, it builds without a warning, and its pages lead somewhere."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import meshtape as mt
from meshtape.cli.main import main

DOCS = Path(mt.__file__).resolve().parents[1] / "docs"
PAGES = sorted(p for p in DOCS.rglob("*.md") if "_build" not in p.parts and "development" not in p.parts)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


BUILDERS = ("sphinx", "myst_parser", "furo")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built pages."""
    return tmp_path_factory.mktemp("docs") / "html"


@pytest.fixture(scope="module", autouse=True)
def build(request: pytest.FixtureRequest, built: Path) -> Iterator[subprocess.Popen[str] | None]:
    """The build, which goes on while the examples run; None where it is not asked for, or cannot be."""
    asked = any("documentation_builds" in item.name for item in request.session.items)
    if not asked or any(find_spec(package) is None for package in BUILDERS):
        yield None
        return
    trees = built.with_name("trees")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-j", "2", "-d", str(trees)]
    with subprocess.Popen([*command, str(DOCS), str(built)], stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.terminate()


_PROGRAM = """
import os, sys
os.chdir({where!r})
sys.stdout = sys.stderr = open("printed.txt", "w")

def run():
{text}

if __name__ == "__main__":
    run()
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: str(p.relative_to(DOCS)))
def test_the_examples_of_a_page_run_one_after_the_other(page: Path, tmp_path: Path, run_forked: Any) -> None:
    # A process of its own: a page may start workers, and what it leaves must not reach another. It is forked from one
    # that has imported what most pages import.
    program = tmp_path / "page.py"
    text = "\n\n".join(blocks(page, "python"))
    program.write_text(_PROGRAM.format(where=str(tmp_path), text=textwrap.indent(text, "    ")))
    status = run_forked(program, 840)  # of a busy machine
    assert status == 0, (tmp_path / "printed.txt").read_text()[-3000:]


def test_commands_that_are_shown_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"^(?:ssh .* )?meshtape ([a-z-]+)", "\n".join(blocks(page, "console")), re.MULTILINE):
            assert name in main.commands, (page, name)


def test_headings_begin_a_line() -> None:
    for page in PAGES:
        assert not re.findall(r"^(?!\||#).*[.a-z] ##+ [A-Z]", page.read_text(), re.MULTILINE), page


def test_every_error_says_when_it_is_raised() -> None:
    for name in mt.errors.__all__:
        assert getattr(mt.errors, name).__doc__, name


def test_every_error_has_a_cure() -> None:
    cures = runpy.run_path(str(DOCS / "_ext" / "cures.py"))["CURES"]
    assert set(cures) == set(mt.errors.__all__)
    # What a cure names in code exists.
    for name, text in cures.items():
        for dotted in re.findall(r"`mt\.([a-z_.]+)", text):
            found = mt
            for part in dotted.split("."):
                found = getattr(found, part)
            assert found is not None, name


@pytest.mark.timeout(900)
def test_the_documentation_builds_without_a_warning(build: subprocess.Popen[str] | None, built: Path) -> None:
    for package in BUILDERS:
        pytest.importorskip(package, reason=f"{package} is not installed (uv sync --group docs)")
    assert build is not None
    _, complaints = build.communicate(timeout=850)
    assert build.returncode == 0, complaints[-4000:]
    api = (built / "reference" / "api" / "nn.html").read_text()
    assert "mt.nn" in api
    assert "layer_norm" in api
    errors = (built / "reference" / "errors.html").read_text()
    for name in mt.errors.__all__:
        assert f'id="meshtape.errors.{name}"' in errors, name
    # A directive that was not understood is printed as it was written.
    for page in built.rglob("*.html"):
        assert not re.search(r"<p>\s*(\.\. [a-z:-]+::|:::|```\{)", page.read_text()), page
