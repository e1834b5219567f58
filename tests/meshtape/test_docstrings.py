"""Every public name says in one line what it is, functions show how they are called, and the examples print what they
say."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
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


def fault(doc: str | None) -> str | None:
    """What is wrong with the first line of a docstring."""
    if not doc:
        return "no docstring"
    summary = inspect.cleandoc(doc).split("\n\n")[0]
    if "\n" in summary:
        return "the summary takes more than a line"
    if not summary.endswith((".", ":")):
        return "the summary is no sentence"
    return "the summary is too long for a table" if len(summary) > 140 else None


def test_the_first_line_is_a_sentence() -> None:
    assert {name: found for name, value in PUBLIC.items() if (found := fault(value.__doc__))} == {}


def test_functions_show_an_example() -> None:
    functions = {n: v.__doc__ or "" for n, v in PUBLIC.items() if not inspect.isclass(v)}
    assert {n for n, doc in functions.items() if ">>>" not in doc} - set(NO_EXAMPLE) == set()


def test_the_reference_reads_no_property_as_a_type() -> None:
    """Sphinx takes what stands before a colon in the first line of a property for its type."""
    spaces = [*SPACES.values(), mt.autodiff, mt.parallel, mt.storage, mt.training, mt.models, mt.optim]
    found = []
    for value in {
        v for m in spaces for v in vars(m).values() if inspect.isclass(v) and v.__module__.startswith("meshtape")
    }:
        for name, member in inspect.getmembers(value, lambda x: isinstance(x, property)):
            first = re.sub(r":\w+:`[^`]*`|``[^`]*``", "", inspect.getdoc(member) or "").split("\n")[0]
            found += [f"{value.__name__}.{name}: {first}"] if ":" in first and not name.startswith("_") else []
    assert not found


def test_reasons_are_for_names_that_exist() -> None:
    assert set(NO_EXAMPLE) <= set(PUBLIC)


PACKAGES = [f"meshtape.{name}" for name in ("arrays", "autodiff", "storage", "parallel")]
MODULES = [
    "meshtape",
    *(f"meshtape.{f.stem}" for f in sorted(Path(mt.__file__).parent.glob("*.py")) if not f.stem.startswith("__")),
    *PACKAGES,
    *(m.name for p in PACKAGES for m in pkgutil.walk_packages(importlib.import_module(p).__path__, f"{p}.")),
]


def shows_examples(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    source = None if spec is None or spec.origin is None else Path(spec.origin)
    return source is not None and source.suffix == ".py" and ">>>" in source.read_text("utf-8")


SHOWN = [m for m in MODULES if shows_examples(m)]


@pytest.mark.parametrize("name", SHOWN)
def test_examples_of(name: str) -> None:
    # By import, not by attribute: `meshtape.autodiff.compiler.compile` is the function, and hides the module of that
    # name.
    out: list[str] = []
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name, extraglobs={"mt": mt}):
        runner.run(test, out=out.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(out)


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for package in PACKAGES:
        modules = [importlib.import_module(m) for m in SHOWN if m.startswith(package)]
        assert sum(len(t.examples) for m in modules for t in finder.find(m)) > 60, package
