"""Random small programs: differentiated, compiled, recomputed and nested, they agree with each other and with
differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import bound, loss, programs

import meshtape as mt
from meshtape.autodiff.compiler import executable


@pytest.fixture(autouse=True, scope="module")
def reuse_all_memory():
    """Compiled programs write into the memory of operands however small they are."""
    before = executable.SMALLEST_REUSED
    executable.SMALLEST_REUSED = 0
    yield
    executable.SMALLEST_REUSED = before


def inputs(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.uniform(-1.5, 1.5, (3, 3)) for _ in range(2)]


def near(a: Any, b: Any, tol: float = 1e-9) -> None:
    a, b = np.asarray(a), np.asarray(b)
    np.testing.assert_allclose(a, b, rtol=tol, atol=tol * max(1.0, float(np.abs(b).max(initial=0))))


@settings(deadline=None, max_examples=30)
@given(programs(6, smooth=True), st.integers(0, 99))
def test_against_differences(program, seed):
    mt.check_grads(loss(program), *inputs(seed), order=2, rtol=1e-3, atol=1e-4)


@settings(deadline=None, max_examples=20)
@given(programs(6), st.integers(0, 99))
def test_all_ways_to_the_same_derivative(program, seed):
    x, y = map(mt.asarray, inputs(seed))
    plain, recomputed = loss(program), loss(program, mt.checkpoint)
    value, grads = mt.value_and_grad(plain, (0, 1))(x, y)
    assert value.shape == ()
    ways = {
        "compiled gradient": mt.compile(mt.grad(plain, (0, 1))),
        "gradient of the compiled": mt.grad(mt.compile(plain), (0, 1)),
        "recomputed": mt.grad(recomputed, (0, 1)),
        "compiled, recomputed": mt.compile(mt.grad(recomputed, (0, 1))),
        "gradient of the compiled, recomputed": mt.grad(mt.compile(recomputed), (0, 1)),
        "each block compiled": mt.grad(loss(program, mt.compile), (0, 1)),
        "the vjp": lambda x, y: mt.vjp(plain, x, y)[1](mt.asarray(1.0)),
    }
    for name, way in ways.items():
        for got, want in zip(way(x, y), grads, strict=True):
            try:
                near(got, want)
            except AssertionError as e:
                e.add_note(name)
                raise
    direction = (mt.cos(x), mt.sin(y))
    _, along = mt.jvp(plain, (x, y), direction)
    near(along, sum(float((g * d).sum()) for g, d in zip(grads, direction, strict=True)))


@settings(deadline=None, max_examples=15)
@given(programs(6), st.integers(0, 99))
def test_second_derivatives_are_symmetric_and_all_ways_agree(program, seed):
    x, y = map(mt.asarray, inputs(seed))
    both = loss(program)
    f = lambda x: both(x, y)  # noqa: E731
    h = np.asarray(mt.hessian(f)(x)).reshape(9, 9)
    near(h, h.T, 1e-8)
    v = mt.asarray(np.random.default_rng(seed).standard_normal((3, 3)))
    product = h @ np.asarray(v).reshape(9)
    for found in (
        mt.hvp(f, x, v),
        mt.jvp(mt.grad(f), [x], [v])[1],
        mt.hvp(mt.compile(f), x, v),
        mt.hvp(mt.compile(mt.checkpoint(f)), x, v),
    ):
        near(np.asarray(found).reshape(9), product, 1e-8)


@settings(deadline=None, max_examples=25)
@given(programs(6), st.integers(0, 99), st.sampled_from([np.float32, np.float16]))
def test_a_tape_changes_no_value_dtype_or_shape(program, seed, dtype):
    x, y = (mt.asarray(a.astype(dtype)) for a in inputs(seed))
    plain = bound(program)(x, y)
    with mt.Tape() as tape:
        tape.watch(x, y)
        taped = bound(program)(x, y)
    for t, p in zip(taped, plain, strict=True):
        assert (t.dtype, t.shape) == (p.dtype, p.shape)
        np.testing.assert_array_equal(np.asarray(t), np.asarray(p))
    g = tape.gradient(taped[-1], x, mt.ones_like(taped[-1]), unconnected="zeros")
    assert (g.dtype, g.shape) == (x.dtype, x.shape)
