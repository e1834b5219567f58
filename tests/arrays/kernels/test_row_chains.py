"""Elementwise chains that end with a reduction of rows: the generated kernels, run on the CPU, against float64."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.chains import rows
from meshtape.arrays.kernels import launch
from meshtape.autodiff.compiler import cuda_fusion
from meshtape.autodiff.compiler.executable import local_executable

pytestmark = pytest.mark.usefixtures("compiled_together")
FLOATS = [np.dtype(t) for t in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)]


def squares(x: Any, center: Any) -> Any:
    return mt.sum(mt.square(x - center), axis=-1)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sum of squares": squares,
    "mean": lambda x, c: mt.mean(mt.abs(x) + c, axis=-1, keepdims=True),
    "max": lambda x, c: mt.max(x * 2.0 - c, axis=-1),
    "min of one call": lambda x, c: mt.min(x * c, axis=-1, keepdims=True),
    "of a sum of exponentials": lambda x, c: mt.log(mt.sum(mt.exp(x - c), axis=-1)),
}


def both(fn: Callable[..., Any], place: Any, emulator: Any, *hosts: np.ndarray) -> tuple[list[Any], list[np.ndarray]]:
    """The results of the compiled function on the emulator, and those of float64."""
    program = mt.compile(fn).program(*map(mt.asarray, hosts))
    placed = [place(h) if h.flags.c_contiguous else h for h in hosts]
    got = local_executable(program, emulator.xp)(placed)
    exact = fn(*(mt.asarray(h).astype(mt.float64) for h in hosts))
    return got, [a.numpy() for a in (exact if isinstance(exact, tuple) else (exact,))]


CALLS = [(n, d) for n in FUNCTIONS for d in FLOATS if n == "sum of squares" or d.name in ("float32", "bfloat16")]


@pytest.mark.parametrize(("name", "dtype"), CALLS, ids=[f"{n}-{d.name}" for n, d in CALLS])
def test_a_chain_and_its_reduction_are_one_launch(name: str, dtype: np.dtype, place: Any, emulator: Any) -> None:
    rng = np.random.default_rng(0)
    every = name in ("sum of squares", "max")  # each of these is a kernel of its own
    for shape, center in (((64, 40), (64, 1)), ((8, 9, 33), (33,)), ((70, 2056), ()))[: 3 if every else 1]:
        emulator.launched.clear()
        x, c = rng.normal(1, 1, shape).astype(dtype), rng.uniform(0.5, 1.5, center).astype(dtype)
        (got,), (want,) = both(FUNCTIONS[name], place, emulator, x, c)
        assert (got.dtype, got.shape) == (dtype, want.shape)
        # Short floats are rounded after each call of the chain.
        rtol = {8: 1e-12, 4: 2e-5, 2: 2e-2}[dtype.itemsize]
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=rtol, atol=rtol)
        texts = [launch.GENERATED[file] for file, *_ in emulator.launched]
        assert len([t for t in texts if "row_reduce" in t]) == 1
        assert len(texts) == 1


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "turned": lambda a: np.ascontiguousarray(a.transpose(1, 0, 2)).transpose(1, 0, 2),
    "columns": lambda a: np.repeat(a, 2, axis=2)[:, :, ::2],
    "cut": lambda a: np.concatenate([a, a[:, :, :3]], 2)[:, :, :-3],
    "backwards": lambda a: np.ascontiguousarray(a[::-1, :, ::-1])[::-1, :, ::-1],
}


@pytest.mark.parametrize("axis", [(2,), (1, 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_may_lie_in_any_way(layout: str, axis: tuple[int, ...], place: Any, emulator: Any) -> None:
    rng = np.random.default_rng(1)
    x = LAYOUTS[layout](rng.normal(size=(66, 5, 16)).astype(np.float32))
    for other in ((66, 5, 16), (5, 16), (66, 1, 16), (66, 5, 1), (66, 1, 1), (5, 1)):
        y = rng.normal(size=other).astype(np.float32)
        (got,), (want,) = both(lambda x, y: mt.sum(x * y + 1.0, axis=axis), place, emulator, x, y)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_numbers_that_are_not_finite_reach_their_rows_alone(place: Any, emulator: Any) -> None:
    x = np.ones((80, 24), np.float32)
    x[3, 5], x[4, 6], x[5, 7] = np.nan, np.inf, -np.inf
    for fn, odd in ((mt.sum, [3, 4, 5]), (mt.max, [3, 4]), (mt.min, [3, 5]), (mt.mean, [3, 4, 5])):
        (got,), (want,) = both(lambda x, fn=fn: fn(x * 2.0, axis=1), place, emulator, x)
        np.testing.assert_array_equal(got, want)
        assert np.flatnonzero(~np.isfinite(got)).tolist() == odd


def test_what_is_read_elsewhere_too_and_few_rows_stay_apart(place: Any, emulator: Any) -> None:
    def read_twice(x: Any) -> Any:
        y = mt.exp(x) * 2.0
        return y, mt.sum(y, axis=1)

    x = np.random.default_rng(2).normal(size=(80, 24)).astype(np.float32)
    for fn, host in ((read_twice, x), (lambda x: mt.sum(x * 2.0 + 1.0, axis=1), x[: rows.LEAST - 1])):
        program = mt.compile(fn).program(mt.asarray(host))
        parts = cuda_fusion.launches(program)
        assert not [p for p in parts if not hasattr(p, "op") and rows.reduces_rows(p.entries[-1], program)]
        for got, want in zip(*both(fn, place, emulator, host), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)


def test_the_variance_of_rows_reads_them_twice(place: Any, emulator: Any) -> None:
    x = np.random.default_rng(3).normal(50, 1, (128, 96)).astype(np.float32)
    (got,), (want,) = both(lambda x: mt.var(x, axis=1), place, emulator, x)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert len([file for file, *_ in emulator.launched if file.startswith("fused")]) == 1


@pytest.mark.parametrize("architecture", [75, 90])
def test_generated_sources_compile(architecture: int, machine_code: Callable[..., Any]) -> None:
    for dtype in FLOATS:
        x = mt.asarray(np.ones((80, 64), dtype))
        for fn in (squares, FUNCTIONS["max"]):
            program = mt.compile(fn).program(x, x[:, :1])
            (group,) = [p for p in cuda_fusion.launches(program) if rows.reduces_rows(p.entries[-1], program)]
            kinds = ["full", *["held" if program.avals[v].shape else "one" for v in group.inputs[1:]]]
            text = rows.source(group, program, kinds, 1)
            file = f"test_{zlib.crc32(text.encode())}.cu"
            launch.GENERATED[file] = text
            names = [launch.named("fused", vectors, threads) for vectors in (False, True) for threads in (32, 256)]
            machine_code(file, names, architecture)
