"""Random small programs: differentiated, compiled, recomputed and nested, they agree with each other and with differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape.autodiff.compiler import executable


@pytest.fixture(autouse=True, scope="module")
def reuse_all_memory():
    """Compiled programs write into the memory of operands however small they are."""
    before = executable.SMALLEST_REUSED
    executable.SMALLEST_REUSED = 0
    yield
    executable.SMALLEST_REUSED = before


# Smooth functions that keep numbers of a few units in that range, so that differences of differences keep some digits.
UNARY: dict[str, Callable[[Any], Any]] = {
    "sin": mt.sin,
    "tanh": mt.tanh,
    "sigmoid": mt.nn.sigmoid,
    "gelu": mt.nn.gelu,
    "softmax": mt.nn.softmax,
    "log_softmax": lambda x: 0.3 * mt.nn.log_softmax(x, axis=0),
    "layer_norm": lambda x: mt.layer_norm(x, x.shape[-1], eps=0.1),
    "square root": lambda x: mt.sqrt(x * x + 1.0),
    "transposed": lambda x: x.T @ x,
    "first row": lambda x: x[0] + x,
    "repeated": lambda x: x[mt.asarray([0, 2, 2])],
    "written": lambda x: x.at[1].set(mt.sin(x[0])),
    "added at": lambda x: x.at[mt.asarray([0, 0, 1])].add(x[:3] * x[1]),
    "cumulative": lambda x: 0.3 * mt.cumulative_sum(x, axis=1),
    "mean": lambda x: x - mt.mean(x, axis=0),
    "norm": lambda x: x / (1.0 + mt.linalg.vector_norm(x + 0.1)),
    "flipped": lambda x: mt.flip(x, axis=1) * 0.7,
    "concat": lambda x: mt.concat([x[1:], x[:1]], axis=0),
    "where": lambda x: mt.where(mt.asarray([[True], [False], [True]]), x, mt.cos(x)),
    "power": lambda x: (x * x + 0.5) ** 1.5 * 0.1,
    "reciprocal": lambda x: 1.0 / (x * x + 1.0),
    "losses": lambda x: x * mt.nn.cross_entropy(x, mt.asarray([0, 1, 2]), label_smoothing=0.1),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / (y * y + 1.0),
    "matmul": lambda x, y: 0.3 * (x @ y),
    "broadcast": lambda x, y: x * y[:, :1] + y[0],
    "hypot": lambda x, y: mt.hypot(x + 3.0, y),
    "atan2": lambda x, y: mt.atan2(x, y * y + 1.0),
    "logaddexp": mt.logaddexp,
}

Step = tuple[str, int, int]
steps = st.lists(
    st.tuples(st.sampled_from([*UNARY, *BINARY]), st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=6
)


def run(program: list[Step], x: Any, y: Any, block: Callable[[Any], Any] = lambda f: f) -> Any:
    """Each step reads two of the values so far; ``block`` wraps every second one."""
    values = [x, y]
    for i, (name, a, b) in enumerate(program):
        p, q = values[a % len(values)], values[b % len(values)]
        if name in UNARY:
            fn = UNARY[name]
            values.append((block(fn) if i % 2 else fn)(p))
        else:
            fn = BINARY[name]
            values.append((block(fn) if i % 2 else fn)(p, q))
    total = values[-1]
    for v in values[2:-1]:
        total = total + 0.1 * v
    return total


def inputs(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.uniform(-1.5, 1.5, (3, 3)) for _ in range(2)]


def near(a: Any, b: Any, tol: float = 1e-9) -> None:
    a, b = np.asarray(a), np.asarray(b)
    np.testing.assert_allclose(a, b, rtol=tol, atol=tol * max(1.0, float(np.abs(b).max(initial=0))))


@settings(deadline=None, max_examples=30)
@given(steps, st.integers(0, 99))
def test_against_differences(program, seed):
    x, y = inputs(seed)
    mt.check_grads(lambda x, y: run(program, x, y), x, y, order=2, rtol=1e-3, atol=1e-4)


@settings(deadline=None, max_examples=20)
@given(steps, st.integers(0, 99))
def test_all_ways_to_the_same_derivative(program, seed):
    x, y = map(mt.asarray, inputs(seed))
    w = mt.asarray(np.random.default_rng(seed + 1).standard_normal((3, 3)))

    def loss(x, y, block=lambda f: f):
        return (run(program, x, y, block) * w).sum()

    value, grads = mt.value_and_grad(loss, (0, 1))(x, y)
    assert value.shape == ()
    ways = {
        "compiled gradient": mt.compile(mt.grad(loss, (0, 1))),
        "gradient of the compiled": mt.grad(mt.compile(loss), (0, 1)),
        "recomputed": mt.grad(lambda x, y: loss(x, y, mt.checkpoint), (0, 1)),
        "compiled, recomputed": mt.compile(mt.grad(lambda x, y: loss(x, y, mt.checkpoint), (0, 1))),
        "gradient of the compiled, recomputed": mt.grad(mt.compile(lambda x, y: loss(x, y, mt.checkpoint)), (0, 1)),
        "each block compiled": mt.grad(lambda x, y: loss(x, y, mt.compile), (0, 1)),
        "the vjp": lambda x, y: mt.vjp(loss, x, y)[1](mt.asarray(1.0)),
    }
    for name, way in ways.items():
        for got, want in zip(way(x, y), grads, strict=True):
            try:
                near(got, want)
            except AssertionError as e:
                e.add_note(name)
                raise
    direction = (mt.cos(x), mt.sin(y))
    _, along = mt.jvp(loss, (x, y), direction)
    near(along, sum(float((g * d).sum()) for g, d in zip(grads, direction, strict=True)))


@settings(deadline=None, max_examples=15)
@given(steps, st.integers(0, 99))
def test_second_derivatives_are_symmetric_and_all_ways_agree(program, seed):
    x, y = map(mt.asarray, inputs(seed))
    loss = lambda x: run(program, x, y).sum()  # noqa: E731
    h = np.asarray(mt.hessian(loss)(x)).reshape(9, 9)
    near(h, h.T, 1e-8)
    v = mt.asarray(np.random.default_rng(seed).standard_normal((3, 3)))
    product = h @ np.asarray(v).reshape(9)
    near(np.asarray(mt.hvp(loss, x, v)).reshape(9), product, 1e-8)
    near(np.asarray(mt.jvp(mt.grad(loss), [x], [v])[1]).reshape(9), product, 1e-8)
    near(np.asarray(mt.hvp(mt.compile(loss), x, v)).reshape(9), product, 1e-8)
    checkpointed = mt.compile(mt.checkpoint(loss))
    near(np.asarray(mt.hvp(checkpointed, x, v)).reshape(9), product, 1e-8)


@settings(deadline=None, max_examples=25)
@given(steps, st.integers(0, 99), st.sampled_from([np.float32, np.float16]))
def test_a_tape_changes_no_value_dtype_or_shape(program, seed, dtype):
    x, y = (mt.asarray(a.astype(dtype)) for a in inputs(seed))
    plain = run(program, x, y)
    with mt.Tape() as tape:
        tape.watch(x, y)
        taped = run(program, x, y)
    assert (taped.dtype, taped.shape) == (plain.dtype, plain.shape)
    np.testing.assert_array_equal(np.asarray(taped), np.asarray(plain))
    g = tape.gradient(taped, x, mt.ones_like(taped), unconnected="zeros")
    assert (g.dtype, g.shape) == (x.dtype, x.shape)
