"""The benchmark of the kernels: what it times runs, and without a GPU it says so."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from meshtape.arrays.backends.backend import cupy_backend
from meshtape.arrays.core.errors import BackendError

FILE = Path(__file__).parents[3] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FILE.parent)  # it is several files
        yield importlib.import_module("gpu_rows")


def test_without_a_gpu_it_says_what_is_missing() -> None:
    try:
        cupy_backend()
    except BackendError:
        pass
    else:
        pytest.skip("there is a GPU to measure on")
    done = subprocess.run([sys.executable, FILE, "--quick"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "there is none to measure on: CuPy is" in done.stderr


@pytest.mark.usefixtures("compiled_together")
def test_every_row_runs(emulator: Any, benchmark: ModuleType) -> None:
    make = benchmark.Maker()
    d = np.dtype(np.float32)
    rows = [
        *benchmark.row_norm_rows(make, None, None, (5, 40), d),
        *benchmark.softmax_rows(make, None, None, (5, 40), d),
        *benchmark.image_rows(make, None, (2, 4, 3, 3), d, False),
        *benchmark.image_rows(make, None, (2, 4, 3, 3), d, True),
        *benchmark.index_rows(make, None, 70, 80, 8, d),
        *benchmark.random_rows(make, None, 1000, d),
    ]
    for row in rows:
        before = len(emulator.launched)
        row.ours(*row.make())
        assert len(emulator.launched) > before, f"{row.name} starts no kernel"
        assert row.nbytes > 0
    assert len({row.name for row in rows}) == len(rows)
