"""The examples in the docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import meshtape.arrays

MODULES = [
    "meshtape.arrays",
    *(m.name for m in pkgutil.walk_packages(meshtape.arrays.__path__, "meshtape.arrays.")),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name):
    module = importlib.import_module(name)
    out: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        # Public functions come from other modules too; each is tested where it is written.
        if test.examples:
            runner.run(test, out=out.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(out)
