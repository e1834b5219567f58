"""The examples in the docstrings of ``parallel`` run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import meshtape.parallel
import meshtape.parallel.transports

MODULES = [
    "meshtape.parallel",
    *(f"meshtape.parallel.{m.name}" for m in pkgutil.iter_modules(meshtape.parallel.__path__)),
    *(f"meshtape.parallel.transports.{m.name}" for m in pkgutil.iter_modules(meshtape.parallel.transports.__path__)),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name):
    module = importlib.import_module(name)
    out: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        if test.examples:
            runner.run(test, out=out.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(out)
