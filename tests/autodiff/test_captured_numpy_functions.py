"""NumPy's functions that a compiled function reads from around it are the same at every call."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import meshtape as mt

NAMES = ["sum", "where", "concatenate", "linalg.norm", "linalg.inv", "fft.fft", "add", "vectorize", "einsum", "dot"]


@pytest.mark.parametrize("name", NAMES)
def test_a_function_that_reads_one_is_traced_once(name):
    found = np
    for part in name.split("."):
        found = getattr(found, part)
    f = mt.compile(lambda x: x * (2.0 if callable(found) else 1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            np.testing.assert_array_equal(f(mt.ones(2)), [2.0, 2.0])
    assert f.signatures == 1


@pytest.mark.parametrize("ours", [mt.linalg.vector_norm, mt.sum, mt.fft.fft, mt.concatenate])
def test_and_one_of_ours_that_knows_numpys(ours):
    held = ours
    f = mt.compile(lambda x: x * (2.0 if callable(held) else 1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            f(mt.ones(2))
    assert f.signatures == 1
