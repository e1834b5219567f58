"""Every example in the docstrings of ``meshtape.autodiff`` runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import meshtape.autodiff

MODULES = ["meshtape.autodiff"] + [
    m.name for m in pkgutil.walk_packages(meshtape.autodiff.__path__, meshtape.autodiff.__name__ + ".")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    # By import, not by attribute: `meshtape.autodiff.compile` is the function, and hides the module of that name.
    found = doctest.testmod(importlib.import_module(name))
    assert found.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    count = sum(len(t.examples) for m in MODULES for t in finder.find(importlib.import_module(m)))
    assert count > 60
