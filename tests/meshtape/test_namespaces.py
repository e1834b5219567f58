"""Every namespace is imported by its public path, and is one module under whatever name."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
import types

import numpy as np
import pytest

import meshtape as mt
from meshtape.namespaces import DOCUMENTED, HOMES

PATHS = [n for n in mt.__all__ if isinstance(getattr(mt, n), types.ModuleType)]
INNER = ["models.encoder", "training.step", "random.keys", "storage.browse", "parallel.training"]


def functions(path):
    module = importlib.import_module(f"meshtape.{path}")
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if callable(value) and hasattr(value, "__qualname__"):
            yield name, value


def test_all_of_them_are_looked_at():
    assert set(HOMES) < set(PATHS)
    assert {"nn", "linalg", "fft", "random", "tree", "optim", "errors", "storage"} < set(PATHS)


@pytest.mark.parametrize("path", PATHS)
def test_one_module_under_two_names(path):
    module = importlib.import_module(f"meshtape.{path}")
    assert module is getattr(mt, path)
    assert module is importlib.import_module(module.__name__)
    assert module.__spec__.name == module.__name__


@pytest.mark.parametrize("path", INNER)
def test_modules_inside_have_no_second_copy(path):
    module = importlib.import_module(f"meshtape.{path}")
    assert module is importlib.import_module(module.__name__)


@pytest.mark.parametrize("path", PATHS)
def test_functions_and_classes_are_pickled_and_found_by_the_public_path(path):
    for name, value in functions(path):
        assert pickle.loads(pickle.dumps(value)) is value, name
        assert pickle.loads(f"cmeshtape.{path}\n{name}\n.".encode()) is value, name
        scope: dict = {}
        exec(f"from meshtape.{path} import {name} as found", scope)
        assert scope["found"] is value


@pytest.mark.parametrize("path", ["nn", "optim", "errors", "models.encoder"])
def test_imported_first_of_all(path):
    """In a process that has imported nothing of ours; neither the path nor its home may come as a second copy."""
    code = (
        f"import meshtape.{path} as a, importlib, meshtape; assert importlib.import_module(a.__name__) is a; "
        "print(a.__name__)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == importlib.import_module(f"meshtape.{path}").__name__


@pytest.mark.parametrize(
    "name", ["meshtape.nothing", "meshtape.nn.nothing", "meshtape.models.nothing", "meshtape.random.nothing"]
)
def test_what_there_is_not(name):
    with pytest.raises(ModuleNotFoundError) as e:
        importlib.import_module(name)
    assert e.value.name == name


def test_public_modules_show_what_is_public():
    """In completion and to ``import *``: no NumPy, no typing, no helpers."""
    for path in (*DOCUMENTED, "arrays", "autodiff", "parallel", "storage"):
        module = importlib.import_module(f"meshtape.{path}")
        names = dir(module)
        assert names == sorted(module.__all__), path
        assert not {"np", "Any", "annotations", "Callable", "Mapping"} & set(names), path
        assert all(getattr(module, n) is not np for n in names), path
        got: dict = {}
        exec(f"from meshtape.{path} import *", got)
        assert set(names) <= set(got), path
    assert dir(mt) == sorted(mt.__all__)
    assert {"register", "tree_map", "TreeDef"} <= set(mt.tree.__all__)
