"""The examples in the docstrings of the models run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

MODULES = [
    m.name
    for package in ("meshtape.parallel.models", "meshtape.parallel.training")
    for m in pkgutil.walk_packages(importlib.import_module(package).__path__, package + ".")
]


@pytest.mark.parametrize("name", [*MODULES, "meshtape.parallel.models", "meshtape.parallel.training"])
def test_examples_of(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    assert sum(len(t.examples) for m in MODULES for t in finder.find(importlib.import_module(m))) > 30
