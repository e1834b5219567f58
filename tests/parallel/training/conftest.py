import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import meshtape as mt

FOLDER = Path(mt.__file__).parents[1] / "benchmarks"


@functools.cache
def module_of(name: str) -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


@pytest.fixture(scope="session")
def benchmark_module() -> Callable[[str], ModuleType]:
    """A program of ``benchmarks/`` as a module: its table is made by the code of which a test runs a sample."""
    return module_of
