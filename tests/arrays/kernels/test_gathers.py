"""Reading at index arrays: the kernel's own source, run on the CPU, against NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from meshtape import arrays as mt
from meshtape.arrays import OPS
from meshtape.arrays.indexing import indexing
from meshtape.arrays.kernels import scatter

DTYPES = [np.int8, np.bool_, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64, np.complex128]
S = slice(None)
REPEATED = np.array([0, 4, -5, 0, 4, -1, 2, 4])
READ = [
    ((5,), (REPEATED,)),
    ((5, 16), (REPEATED,)),
    ((5, 33), (REPEATED, S)),
    ((5, 260), (REPEATED.reshape(2, 2, 2),)),
    ((5, 3, 1500), (REPEATED[:3], ...)),
    ((3, 5), (S, REPEATED)),
    ((2, 3, 5, 8), (S, S, REPEATED.reshape(4, 2))),
    ((2, 5, 4), (slice(None, None, 1), REPEATED, S)),
    ((5, 0), (REPEATED,)),
    ((0, 5), (S, REPEATED)),
    ((0, 4), (np.zeros(0, int),)),
    ((5, 4), (np.zeros((2, 0), int),)),
    ((5, 4), (np.array(-2),)),
]
OTHERS = [
    ((5, 6), (REPEATED, REPEATED % 5)),
    ((5, 6), (REPEATED, slice(1, 4))),
    ((5, 6), (None, REPEATED)),
    ((5, 6), (2, REPEATED)),
    ((5, 6), (slice(1, 3), 2)),
    ((), ()),
    ((5, 6), (np.arange(30).reshape(5, 6) % 3 == 0,)),
]


def read(x: np.ndarray, key: Any, place: Any) -> np.ndarray:
    template, arrays = indexing.parse(mt.zeros(x.shape), key)
    return OPS["getitem"].overrides["cupy"](x, *(place(a.numpy()) for a in arrays), template=template)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "key"), READ)
def test_every_key_of_one_array(emulator: Any, place: Any, shape: Any, key: Any, dtype: Any) -> None:
    x = place(np.random.default_rng(0).integers(-50, 50, shape).astype(dtype))
    got = read(x, key, place)
    np.testing.assert_array_equal(got, x[key])
    assert got.dtype == x.dtype
    assert len(emulator.launched) == bool(got.size)


@pytest.mark.parametrize(("shape", "key"), OTHERS)
def test_other_keys_go_the_other_way(emulator: Any, place: Any, shape: Any, key: Any) -> None:
    x = place(np.arange(np.prod(shape, dtype=int)).reshape(shape))
    np.testing.assert_array_equal(read(x, key, place), x[key])
    assert not emulator.launched


def test_memory_with_gaps_and_parts_of_memory(emulator: Any, place: Any) -> None:
    """A part that begins anywhere is read in shorter vectors, a transposed array the other way."""
    x = place(np.arange(600, dtype=np.int16))  # 16 divides its size, and so its address in any order
    for start, kernel in ((0, "u64, 2"), (4, "u64, 1"), (2, "u32, 1"), (1, "unsigned short, 1")):
        part = x[start : start + 160].reshape(5, 32)
        emulator.launched.clear()
        np.testing.assert_array_equal(read(part, (REPEATED,), place), part[REPEATED])
        assert emulator.launched[0][1].startswith(f"gather_rows<{kernel}")
    turned = x.reshape(20, 30).T
    np.testing.assert_array_equal(read(turned, (REPEATED,), place), turned[REPEATED])


@pytest.mark.parametrize("index", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64])
def test_every_dtype_of_indices(emulator: Any, place: Any, index: Any) -> None:
    x = place(np.arange(300 * 4, dtype=np.float32).reshape(300, 4))
    at = np.random.default_rng(1).integers(0, 100, (7, 50))
    at = at.astype(index) if index(0).dtype.kind == "u" else (at - 50).astype(index)
    np.testing.assert_array_equal(read(x, (at,), place), x[at])
    np.testing.assert_array_equal(read(x, (at[:, ::3],), place), x[at[:, ::3]])


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_rows_of_every_size(emulator: Any, place: Any, size: int, index: Any) -> None:
    x = place(np.random.default_rng(0).integers(0, 256, (7, size)), np.uint8)
    np.testing.assert_array_equal(read(x, (REPEATED.astype(index),), place), x[REPEATED])


def test_indices_out_of_range_wrap_around(emulator: Any, place: Any) -> None:
    """Where nobody has looked at them."""
    x = place(np.arange(20, dtype=np.float32).reshape(5, 4))
    at = np.array([5, -6, 2**40 + 3, -(2**63), 2**63 - 1])
    np.testing.assert_array_equal(scatter.take_rows(x, place(at)), x[at % 5])


@pytest.mark.parametrize("width", [1, 2, 3, 31, 32, 33, 129, 1024, 8192])
def test_a_block_has_whole_rows(width: int) -> None:
    threads = scatter._threads(width)
    assert 256 % threads == 0
    assert threads >= min(width, 32)
