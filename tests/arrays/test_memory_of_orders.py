"""Quantiles, histograms and distinct elements of large arrays: the memory that NumPy takes is the yardstick."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshtape as mt

MIB = 2**20
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "histogram": lambda m, x: m.histogram(x, 20),
    "histogram with weights": lambda m, x: m.histogram(x, 20, weights=x),
    "histogram in edges": lambda m, x: m.histogram(x, [0, 1, 2.5, 4]),
    "unique": lambda m, x: m.unique(x),
    "unique with counts": lambda m, x: m.unique(x, return_counts=True),
    "median": lambda m, x: m.median(x),
    "median of rows": lambda m, x: m.median(x, axis=1),
    "median of columns": lambda m, x: m.median(x, axis=0),
    "percentile": lambda m, x: m.percentile(x, [10, 50, 99]),
    "quantile of rows": lambda m, x: m.quantile(x, 0.3, axis=1),
    "nanmedian": lambda m, x: m.nanmedian(x),
}


def peak(call: Callable[[], Any]) -> tuple[Any, float]:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        out = call()
        return out, (tracemalloc.get_traced_memory()[1] - before) / MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_more_than_twice_that_of_numpy(name, dtype):
    if name == "nanmedian" and dtype == "float32":
        pytest.skip("the places of what is not NaN take eight bytes an element")
    host = (
        np.random.default_rng(0).integers(0, 5, size=(12 * MIB // np.dtype(dtype).itemsize // 1024, 1024)).astype(dtype)
    )
    x = mt.asarray(host)
    want, theirs = peak(lambda: FUNCTIONS[name](np, host))
    got, ours = peak(lambda: FUNCTIONS[name](mt, x))
    assert ours <= 2 * theirs + 12, f"{ours:.0f} MiB, and {theirs:.0f} in NumPy, of an array of 12"
    for g, w in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, want)), strict=True):
        if "weights" not in name or dtype == "float32":
            np.testing.assert_allclose(np.asarray(g), w, rtol=1e-6)
