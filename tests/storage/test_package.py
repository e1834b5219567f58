"""Promises of the package as a whole."""

import ast
import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import meshtape.storage

MODULES = ["meshtape.storage", *(f"meshtape.storage.{m.name}" for m in pkgutil.iter_modules(meshtape.storage.__path__))]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_import_brings_no_heavy_library():
    code = "import sys, meshtape.storage; assert not {'zarr', 'dask', 'rich', 'cupy', 'google_crc32c', 'obstore', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_zarr_imported_first_knows_our_dtypes():
    code = "import zarr, meshtape.storage; assert 'bfloat16' in zarr.dtype.data_type_registry.contents"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_files_are_short_and_import_downwards_only():
    for file in Path(meshtape.storage.__path__[0]).glob("*.py"):
        text = file.read_text()
        assert text.count("\n") < 500, file
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level == 2:
                assert node.module.split(".")[0] == "arrays", (file, node.module)
            assert not (isinstance(node, ast.Import) and any(a.name == "pickle" for a in node.names)), file
