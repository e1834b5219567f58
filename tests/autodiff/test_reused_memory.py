"""Large results of compiled programs take memory that was used before; nobody who holds a result ever sees it
change."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.backends.memory_pool import LINE, POOL, fresh

N = 400  # 1.28 MB of float64, 640 kB of float32, 320 kB of 16 bits: all of them are large


def numbers(dtype: Any, shape: tuple[int, ...] = (N, N)) -> mt.Array:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        x = x + 1j * rng.standard_normal(shape)
    return mt.asarray((7 * x).astype(dtype))


CALLS: dict[str, Callable[[mt.Array], Any]] = {
    "product": lambda x: x @ x,
    "product with a transpose": lambda x: x.T @ x,
    "stack of products": lambda x: mt.stack([x, x + x]) @ x,
    "product with another dtype": lambda x: x @ mt.astype(x, mt.complex128),
    "elementwise": lambda x: x * x,
    "broadcast": lambda x: x + x[0],
    "transposed": lambda x: x.T - x,
    "comparison": lambda x: x == x.T,
    "absolute": mt.abs,
    "chain": lambda x: (x * x + x) * x[:1],
    "several": lambda x: (x @ x, x + x, (x + x) * x, x[1:] - x[:-1]),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, ml_dtypes.bfloat16, np.int64])
def test_large_results_are_those_of_eager_calls(name: str, dtype: Any) -> None:
    fn, x = CALLS[name], numbers(dtype)
    compiled = mt.compile(fn)
    for _ in range(2):  # in new memory, and in memory that was used
        found, expected = compiled(x), fn(x)
        for f, e in zip(mt.tree.flatten(found)[0], mt.tree.flatten(expected)[0], strict=True):
            assert (f.dtype, f.shape) == (e.dtype, e.shape)
            np.testing.assert_array_equal(f.numpy(), e.numpy())
        del found, f


@pytest.mark.parametrize("name", ["product", "product with a transpose", "elementwise", "chain", "several"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_blocks_are_those_of_one_device(name: str, dtype: Any) -> None:
    fn, x = CALLS[name], numbers(dtype)
    split = mt.distribute(x, mt.Mesh({"a": 2}), a=mt.Shard(0))
    compiled = mt.compile(fn)
    for _ in range(2):
        for f, e in zip(mt.tree.flatten(compiled(split))[0], mt.tree.flatten(fn(x))[0], strict=True):
            np.testing.assert_allclose(np.asarray(f), e.numpy(), rtol=1e-4 if dtype == np.float32 else 1e-11, atol=1e-3)


def test_what_somebody_holds_is_not_written_again() -> None:
    fn = mt.compile(lambda x, k: ((x @ x) * k, x * k, x + k))
    x = numbers(np.float64)
    held = [fn(x, mt.asarray(float(k))) for k in range(4)]
    views = [a.numpy()[::7, 3] for a in fn(x, mt.asarray(9.0))]  # all that is left of these results
    gc.collect()
    for k in range(20, 24):
        fn(x, mt.asarray(float(k)))
    host = x.numpy()
    for k, results in enumerate(held):
        for got, want in zip(results, ((host @ host) * k, host * k, host + k), strict=True):
            np.testing.assert_array_equal(got.numpy(), want)
    for got, want in zip(views, ((host @ host) * 9.0, host * 9.0, host + 9.0), strict=True):
        np.testing.assert_array_equal(got, want[::7, 3])


def test_memory_that_nobody_holds_is_used_again() -> None:
    fn, x = mt.compile(lambda x: x @ x), numbers(np.float64)
    POOL.clear()
    y = fn(x)
    nbytes = y.nbytes
    del y
    assert POOL.kept >= nbytes
    before = POOL.kept
    y = fn(x)
    assert POOL.kept <= before - nbytes
    del y


def test_memory_starts_at_a_line_of_the_cache_each_time() -> None:
    held = []
    for _ in range(2):
        for n in (10_000, 20_001, 33_333, 50_000, 70_007):
            held.append(POOL.empty((n,), np.dtype(np.float64)))
            assert held[-1].ctypes.data % LINE == 0
        held.clear()


def test_what_is_moderate_is_left_to_the_system() -> None:
    lent = POOL.lent
    small = fresh((100, 100), np.dtype(np.float64))
    assert POOL.lent == lent
    large = fresh((N, N), np.dtype(np.float64))
    assert POOL.lent >= lent + large.nbytes
    assert small.shape == (100, 100)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are read and set as on Linux")
def test_what_is_kept_is_given_back_where_the_system_has_no_more() -> None:
    code = """
import resource
import numpy as np
from meshtape.arrays.backends.memory_pool import POOL

MB = 1 << 20
blocks = [POOL.empty((300 * MB,), np.dtype(np.uint8)) for _ in range(2)]
blocks.clear()
assert POOL.kept >= 600 * MB
pages = int(open("/proc/self/statm").read().split()[0])
now = pages * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 100 * MB, resource.RLIM_INFINITY))
large = POOL.empty((500 * MB,), np.dtype(np.uint8))
assert POOL.kept == 0
del large
try:
    POOL.empty((5000 * MB,), np.dtype(np.uint8))
except MemoryError:
    print("and then it is an error")
"""
    usual = {
        k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")
    }  # a cluster of this process may set them
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=usual)
    assert done.stdout == "and then it is an error\n", done.stderr


def test_who_has_a_result_alone_may_give_it_up_or_write_to_it() -> None:
    """Memory of the pool belongs to the array on it as much as its own would."""
    x = numbers(np.float64)
    (result,) = [mt.compile(lambda x: x @ x)(x)]
    place = result._buf.ctypes.data
    expected = result.numpy().copy()
    result += 1.0
    result[3, 5] = 0.0
    assert result._buf.ctypes.data == place
    expected += 1.0
    expected[3, 5] = 0.0
    np.testing.assert_array_equal(result.numpy(), expected)
    given = mt.compile(lambda x: x * 2.0, donate=0)(result)
    assert given._buf.ctypes.data == place
    np.testing.assert_array_equal(given.numpy(), 2 * expected)
    seen = given.numpy()
    given += 1.0  # somebody else sees it now
    np.testing.assert_array_equal(seen, 2 * expected)


@pytest.mark.parametrize("memory", ["bytearray", "view"])
def test_memory_of_others_is_never_written(memory: str) -> None:
    theirs = bytearray(8 * N * N) if memory == "bytearray" else np.zeros(N * N)
    x = mt.asarray(np.frombuffer(theirs) if memory == "bytearray" else theirs[:], copy=False)
    x += 1.0
    y = mt.asarray(np.frombuffer(theirs) if memory == "bytearray" else theirs[:], copy=False)
    y[0] = 2.0
    z = mt.asarray(np.frombuffer(theirs) if memory == "bytearray" else theirs[:], copy=False)
    mt.compile(lambda x: x * 2.0 + 1.0, donate=0)(z)
    assert not np.frombuffer(theirs).any()
