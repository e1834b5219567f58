"""Every public name says in one line what it is, functions show how they are called, and the examples print what they say."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meshtape as mt

SPACES = {"mt": mt, "mt.nn": mt.nn, "mt.random": mt.random, "mt.linalg": mt.linalg, "mt.fft": mt.fft}

# Functions whose docstring has no example that could run alone, and why.
NO_EXAMPLE = {
    "mt.check_grads": "its example is every test of a gradient",
    "mt.load_program": "the one of save_program reads back what it wrote",
    "mt.stream": "it reads stored arrays larger than memory on a mesh, which takes a page of its own",
    "mt.no_grad": "what it does shows only beside a tape, in the one of Tape",
}


def public() -> Iterator[tuple[str, Any]]:
    for space, module in SPACES.items():
        for name in module.__all__:
            value = getattr(module, name)
            if not isinstance(value, types.ModuleType) and callable(value):
                yield f"{space}.{name}", value


PUBLIC = dict(public())


@pytest.mark.parametrize("name", PUBLIC)
def test_the_first_line_is_a_sentence(name: str) -> None:
    assert PUBLIC[name].__doc__, f"{name} has no docstring"
    summary = inspect.cleandoc(PUBLIC[name].__doc__).split("\n\n")[0]
    assert "\n" not in summary, f"the summary of {name} takes more than a line: {summary}"
    assert summary.endswith((".", ":")), f"the summary of {name} is no sentence: {summary}"
    assert len(summary) <= 140, f"the summary of {name} is too long for a table: {summary}"


@pytest.mark.parametrize("name", [n for n, v in PUBLIC.items() if not inspect.isclass(v)])
def test_functions_show_an_example(name: str) -> None:
    assert ">>>" in (PUBLIC[name].__doc__ or "") or name in NO_EXAMPLE, (
        f"{name} shows no example, and no reason is listed"
    )


def test_reasons_are_for_names_that_exist() -> None:
    assert set(NO_EXAMPLE) <= set(PUBLIC)


PACKAGES = [f"meshtape.{name}" for name in ("arrays", "autodiff", "storage", "parallel")]
MODULES = [
    "meshtape",
    *(f"meshtape.{f.stem}" for f in sorted(Path(mt.__file__).parent.glob("*.py")) if not f.stem.startswith("__")),
    *PACKAGES,
    *(m.name for p in PACKAGES for m in pkgutil.walk_packages(importlib.import_module(p).__path__, f"{p}.")),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name: str) -> None:
    # By import, not by attribute: `meshtape.autodiff.compiler.compile` is the function, and hides the module of that name.
    out: list[str] = []
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name, extraglobs={"mt": mt}):
        runner.run(test, out=out.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(out)


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for package in PACKAGES:
        modules = [importlib.import_module(m) for m in MODULES if m.startswith(package)]
        assert sum(len(t.examples) for m in modules for t in finder.find(m)) > 60, package
