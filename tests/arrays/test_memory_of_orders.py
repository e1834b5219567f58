"""Quantiles, histograms, sets, selections and rearrangements of large arrays: the memory that NumPy takes is the
yardstick."""

from __future__ import annotations

import math
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


@pytest.fixture
def compared(peak_of: Callable[..., int]) -> Callable[..., tuple[Any, Any]]:
    """Results of a call with NumPy's functions and with ours, which may hold twice the memory and some MiB more."""

    def compare(call: Callable[..., Any], theirs: tuple[Any, ...], ours: tuple[Any, ...], more: int) -> tuple[Any, Any]:
        found: list[Any] = [None, None]

        def run(i: int, m: Any, given: tuple[Any, ...]) -> None:
            found[i] = call(m, *given)

        # The first figure of NumPy's is enough: what other threads add to it is less than the room that is left.
        allowed = 2 * peak_of(lambda: run(0, np, theirs), below=math.inf) + more * MIB
        peak = peak_of(lambda: run(1, mt, ours), below=allowed)
        size = theirs[0].nbytes / MIB
        assert peak <= allowed, (
            f"{peak / MIB:.0f} MiB, where {allowed / MIB:.0f} are allowed, of an array of {size:.0f}"
        )
        return found[0], found[1]

    return compare


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_more_than_twice_that_of_numpy(name, dtype, compared):
    if name == "nanmedian" and dtype == "float32":
        pytest.skip("the places of what is not NaN take eight bytes an element")
    host = (
        np.random.default_rng(0).integers(0, 5, size=(12 * MIB // np.dtype(dtype).itemsize // 1024, 1024)).astype(dtype)
    )
    want, got = compared(FUNCTIONS[name], (host,), (mt.asarray(host),), more=12)
    for g, w in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, want)), strict=True):
        if "weights" not in name or dtype == "float32":
            np.testing.assert_allclose(np.asarray(g), w, rtol=1e-6)


def _table(m: Any) -> Any:
    return (np if m is np else mt).asarray([0.0, 1.0, 2.5, 4.0])


def _some(m: Any) -> Any:
    return (np if m is np else mt).asarray([3, 1])


# Of an array, a mask and weights. NumPy has `where=` of small integers in float64.
MORE: dict[str, Callable[..., Any]] = {
    "interp": lambda m, x, mask, w: m.interp(x, _table(m), _table(m)),
    "interp, periodic": lambda m, x, mask, w: m.interp(x, _table(m), _table(m), period=3.0),
    "insert one": lambda m, x, mask, w: m.insert(x, 5, 1),
    "insert a row": lambda m, x, mask, w: m.insert(x, 5, 1, axis=0),
    "insert many": lambda m, x, mask, w: m.insert(x, np.arange(0, x.shape[0], 7), 1, axis=0),
    "delete one": lambda m, x, mask, w: m.delete(x, 5),
    "delete a column": lambda m, x, mask, w: m.delete(x, 5, axis=1),
    "delete by a mask": lambda m, x, mask, w: m.delete(x.reshape(-1), mask.reshape(-1)),
    "delete a slice": lambda m, x, mask, w: m.delete(x, slice(3, 500), axis=0),
    "isin": lambda m, x, mask, w: m.isin(x, _some(m)),
    "isin, inverted": lambda m, x, mask, w: m.isin(x, _some(m), invert=True),
    "mean where": lambda m, x, mask, w: m.mean(x, where=mask),
    "mean of columns where": lambda m, x, mask, w: m.mean(x, axis=0, where=mask),
    "mean where, one row for all": lambda m, x, mask, w: m.mean(x, where=mask[0]),
    "var where": lambda m, x, mask, w: m.var(x, where=mask),
    "std of rows where": lambda m, x, mask, w: m.std(x, axis=1, where=mask),
    "sum where": lambda m, x, mask, w: m.sum(x, where=mask),
    "sum of rows where, from an initial value": lambda m, x, mask, w: m.sum(x, axis=1, where=mask, initial=2),
    "prod of columns where": lambda m, x, mask, w: m.prod(x, axis=0, where=mask, initial=1),
    "max where": lambda m, x, mask, w: m.max(x, where=mask, initial=0),
    "min of rows where": lambda m, x, mask, w: m.min(x, axis=1, where=mask, initial=2),
    "any where": lambda m, x, mask, w: m.any(x, axis=1, where=mask),
    "all where": lambda m, x, mask, w: m.all(x, where=mask),
    "average": lambda m, x, mask, w: m.average(x, weights=w),
    "average of rows": lambda m, x, mask, w: m.average(x, axis=1, weights=w),
    "average of columns by a vector": lambda m, x, mask, w: m.average(x, axis=0, weights=w[:, 0]),
    "nanquantile": lambda m, x, mask, w: m.nanquantile(x, 0.3),
    "nanquantile of rows": lambda m, x, mask, w: m.nanquantile(x, 0.3, axis=1),
    "nanpercentile of columns": lambda m, x, mask, w: m.nanpercentile(x, [10, 80], axis=0),
    "convolve": lambda m, x, mask, w: m.convolve(x.reshape(-1), _table(m)),
    "sinc": lambda m, x, mask, w: m.sinc(x),
    "lexsort": lambda m, x, mask, w: m.lexsort((x.reshape(-1), w.reshape(-1))),
    "pad by mirrors": lambda m, x, mask, w: m.pad(x, 3, mode="reflect"),
    "pad by edges": lambda m, x, mask, w: m.pad(x, ((3, 0), (0, 5)), mode="edge"),
    "norm": lambda m, x, mask, w: m.linalg.norm(x.reshape(-1)) if m is np else m.linalg.vector_norm(x),
}


@pytest.mark.parametrize("dtype", ["uint8", "float64"])
@pytest.mark.parametrize("name", MORE)
def test_no_more_than_twice_that_of_numpy_beside_masks_and_weights(name, dtype, compared):
    rng = np.random.default_rng(0)
    shape = (1100, 1024)
    host, weights = rng.integers(0, 5, size=shape).astype(dtype), rng.integers(1, 5, size=shape).astype(dtype)
    if dtype != "uint8" and "nan" in name:
        host[rng.random(shape) < 0.1] = np.nan
    mask = rng.random(shape) < 0.5
    given = host, mask, weights
    want, got = compared(MORE[name], given, tuple(map(mt.asarray, given)), more=6)
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5)
