"""Random programs of several inputs: the gradient on one rank, compiled, recomputed, on two ranks and by differences is one gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape.arrays.indexing import sparse_cotangent

MESH = mt.Mesh({"a": 2})
LARGEST = 240


@pytest.fixture(autouse=True, scope="module")
def sparse_cotangents():
    """Cotangents of reads are kept sparse however small the array is."""
    before, sparse_cotangent.SMALLEST = sparse_cotangent.SMALLEST, 1
    yield
    sparse_cotangent.SMALLEST = before


def _axis(x: Any, k: int) -> int:
    return k % x.ndim


def _ids(n: int, k: int) -> mt.Array:
    return mt.asarray((np.arange(1 + k % 4) * (k + 1)) % n - (n if k % 3 == 0 else 0))


def _mask(shape: tuple[int, ...], k: int) -> mt.Array:
    return mt.asarray((np.arange(int(np.prod(shape))).reshape(shape) * (k + 2)) % 5 < 2)


def _along(x: Any, k: int) -> Any:
    """Places for take_along_axis, of half the length or one."""
    axis = _axis(x, k)
    shape = tuple(max(1, n // 2) if d == axis else n for d, n in enumerate(x.shape))
    ids = (np.arange(int(np.prod(shape))).reshape(shape) * (k + 1)) % x.shape[axis]
    return mt.take_along_axis(x, mt.asarray(ids), axis=axis)


def _stored(x: Any, y: Any, k: int, how: str) -> Any:
    """A write of a mean of y at places along an axis of x."""
    axis = _axis(x, k)
    key = (*(slice(None),) * axis, _ids(x.shape[axis], k))
    return getattr(x.at[key], how)(mt.mean(y) * 0.5)


# Of one array with at least one dimension, and an integer. Smooth, and of the size of its operand.
SMOOTH: dict[str, Callable[[Any, int], Any]] = {
    "sin": lambda x, k: mt.sin(x),
    "tanh": lambda x, k: mt.tanh(x),
    "sigmoid": lambda x, k: mt.nn.sigmoid(x),
    "gelu": lambda x, k: mt.nn.gelu(x),
    "exp": lambda x, k: mt.exp(-mt.square(x)),
    "power": lambda x, k: (x * x + 0.5) ** (0.5 + 0.25 * (k % 4)),
    "log": lambda x, k: mt.log1p(x * x),
    "scale": lambda x, k: x * (0.25 * (k + 1)),
    "divide": lambda x, k: 1.0 / (1.0 + x * x),
    "sum": lambda x, k: mt.sum(x, axis=_axis(x, k)) * 0.3,
    "sum, kept": lambda x, k: mt.sum(x, axis=_axis(x, k), keepdims=True) * 0.3,
    "mean": lambda x, k: x - mt.mean(x, axis=_axis(x, k), keepdims=True),
    "mean of all": lambda x, k: x + mt.mean(x),
    "var": lambda x, k: mt.var(x, axis=_axis(x, k), keepdims=True) + x * 0.5,
    "prod": lambda x, k: mt.prod(mt.tanh(x) + 1.2, axis=_axis(x, k), keepdims=True) * 0.1,
    "norm": lambda x, k: x / (1.0 + mt.linalg.vector_norm(x + 0.1)),
    "softmax": lambda x, k: mt.nn.softmax(x, axis=_axis(x, k)) * 2.0,
    "logsumexp": lambda x, k: mt.nn.logsumexp(x, axis=_axis(x, k), keepdims=True) - x,
    "layer_norm": lambda x, k: mt.layer_norm(x, x.shape[-1], eps=0.2),
    "rms_norm": lambda x, k: mt.rms_norm(x, x.shape[-1], eps=0.2),
    "cumulative_sum": lambda x, k: mt.cumulative_sum(x, axis=_axis(x, k)) * 0.3,
    "transposed": lambda x, k: mt.permute_dims(x, tuple(np.roll(range(x.ndim), k).tolist())),
    "flat": lambda x, k: mt.reshape(x, (-1,)),
    "rows": lambda x, k: mt.reshape(x, (x.shape[0], -1)),
    "flipped": lambda x, k: mt.flip(x, axis=_axis(x, k)) * 0.7,
    "rolled": lambda x, k: mt.roll(x, k, axis=_axis(x, k)),
    "slice": lambda x, k: x[(*(slice(None),) * _axis(x, k), slice(k % 2, None, 1 + k % 2))],
    "backwards": lambda x, k: x[(*(slice(None),) * _axis(x, k), slice(None, None, -1 - k % 2))],
    "int": lambda x, k: x + x[(*(slice(None),) * _axis(x, k), slice(-1, None))],
    "ids": lambda x, k: x[(*(slice(None),) * _axis(x, k), _ids(x.shape[_axis(x, k)], k))],
    "new axis": lambda x, k: mt.expand_dims(x, axis=k % (x.ndim + 1)) if x.ndim < 3 else x,
    "along": _along,
    "masked": lambda x, k: mt.where(_mask(x.shape, k), x, mt.cos(x)),
    "mask": lambda x, k: x[_mask(x.shape[:1], k)] if x.ndim > 1 else x,
    "concat": lambda x, k: mt.concat([x, mt.sin(x)], axis=_axis(x, k)),
    "stack": lambda x, k: mt.stack([x, x * 0.5], axis=k % x.ndim) if x.ndim < 3 else x,
    "gram": lambda x, k: 0.2 * (x.mT @ x if x.ndim > 1 else x * (x @ x)),
    "padded": lambda x, k: mt.pad(x, [(int(d == _axis(x, k)), 0) for d in range(x.ndim)]),
}
# Continuous, with kinks: not for differences.
KINKED: dict[str, Callable[[Any, int], Any]] = {
    "relu": lambda x, k: mt.nn.relu(x),
    "abs": lambda x, k: abs(x),
    "max": lambda x, k: mt.max(x, axis=_axis(x, k), keepdims=True) * 0.5 + x,
    "min of all": lambda x, k: x - mt.min(x),
    "clip": lambda x, k: mt.clip(x, -0.5, 0.75),
    "sort": lambda x, k: mt.sort(x, axis=_axis(x, k)),
}
BINARY: dict[str, Callable[[Any, Any, int], Any]] = {
    "add": lambda x, y, k: x + y,
    "subtract": lambda x, y, k: x - y,
    "multiply": lambda x, y, k: x * mt.tanh(y),
    "quotient": lambda x, y, k: x / (y * y + 1.0),
    "hypot": lambda x, y, k: mt.hypot(x, y * y + 0.5),
    "atan2": lambda x, y, k: mt.atan2(x, y * y + 1.0),
    "logaddexp": lambda x, y, k: mt.logaddexp(x, y) * 0.5,
    "where": lambda x, y, k: mt.where(mt.stop_gradient(x) > 7.0, y, x + y * 0.5),
    "set": lambda x, y, k: _stored(x, y, k, "set"),
    "add at": lambda x, y, k: _stored(x, y, k, "add"),
    "custom": lambda x, y, k: _scaled(x) + y,
}


@mt.custom_vjp
def _scaled(x: Any) -> Any:
    return x * 0.5


_scaled.defvjp(lambda x: (x * 0.5, None), lambda _, g: (g * 0.5,))

Step = tuple[str, int, int, int]


def steps(names: list[str]) -> Any:
    small = st.integers(0, 15)
    return st.lists(st.tuples(st.sampled_from(names), small, small, small), min_size=5, max_size=15)


def run(program: list[Step], inputs: list[Any], block: Callable[[Any], Any] = lambda f: f) -> Any:
    """Each step reads one or two of the values so far; all of them end in the result."""
    values = list(inputs)
    for n, (name, a, b, k) in enumerate(program):
        x, y = values[-1 - a % len(values)], values[b % len(values)]
        if x.ndim == 0 or x.size > LARGEST or x.size == 0:
            x = inputs[a % 2]
        if name in BINARY:
            try:
                fits = np.broadcast_shapes(x.shape, y.shape)
            except ValueError:
                fits = ()
            if not fits or np.prod(fits) > LARGEST:
                y = mt.mean(y)
            fn = BINARY[name]
            out = (
                block(lambda x, y, fn=fn, k=k: fn(x, y, k)) if n % 3 == 0 else (lambda x, y, fn=fn, k=k: fn(x, y, k))
            )(x, y)
        else:
            fn = (SMOOTH | KINKED)[name]
            out = (block(lambda x, fn=fn, k=k: fn(x, k)) if n % 3 == 0 else (lambda x, fn=fn, k=k: fn(x, k)))(x)
        values.append(out)
    total = 0.0
    for i, v in enumerate(values[len(inputs) :]):
        w = np.cos(1.0 + i + np.arange(v.size)).reshape(v.shape)
        total = total + (v * mt.asarray(w)).sum()
    return total


def inputs_of(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.uniform(-1.5, 1.5, s) for s in ((4, 5), (2, 4, 5), (5,), ())]


PLACES = [{"a": mt.Shard(0)}, {"a": mt.Shard(1)}, {}]


def near(got: Any, want: Any, what: str, tol: float = 1e-8) -> None:
    got, want = np.asarray(got), np.asarray(want)
    np.testing.assert_allclose(
        got, want, rtol=tol, atol=tol * max(1.0, float(np.abs(want).max(initial=0))), err_msg=what
    )


def check(program: list[Step], seed: int, placements: list[int]) -> None:
    host = inputs_of(seed)
    xs = [mt.asarray(x) for x in host]
    argnums = tuple(range(len(xs)))

    def loss(*xs: Any) -> Any:
        return run(program, list(xs))

    def recomputed(*xs: Any) -> Any:
        return run(program, list(xs), mt.checkpoint)

    value, expected = mt.value_and_grad(loss, argnums)(*xs)
    assert np.isfinite(float(value))
    if not any(name in KINKED for name, *_ in program):
        rng = np.random.default_rng(seed + 1)
        vs = [rng.standard_normal(x.shape) for x in host]
        h = 1e-5
        up, down = (float(loss(*(mt.asarray(x + s * v) for x, v in zip(host, vs, strict=True)))) for s in (h, -h))
        slope = sum(float((np.asarray(g) * v).sum()) for g, v in zip(expected, vs, strict=True))
        size = sum(float((np.abs(np.asarray(g)) * np.abs(v)).sum()) for g, v in zip(expected, vs, strict=True))
        assert abs((up - down) / (2 * h) - slope) <= 1e-5 * (1.0 + size) + 1e-10 * abs(float(value)) / h, "differences"
    split = [
        mt.distribute(x, MESH, **(PLACES[p % 3] if x.ndim > 1 else PLACES[p % 2 * 2] if x.ndim else {}))
        for x, p in zip(xs, placements, strict=True)
    ]
    ways = {
        "compiled": mt.compile(mt.grad(loss, argnums))(*xs),
        "recomputed": mt.grad(recomputed, argnums)(*xs),
        "derivative of the compiled, recomputed": mt.grad(mt.compile(recomputed), argnums)(*xs),
        "two ranks": mt.grad(loss, argnums)(*split),
        "two ranks, compiled": mt.compile(mt.grad(loss, argnums))(*split),
    }
    for way, found in ways.items():
        for i, (g, e) in enumerate(zip(found, expected, strict=True)):
            near(g, e, f"{way}: input {i}, placements {placements}")


ANY = steps([*SMOOTH, *KINKED, *BINARY])
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}
ARGUMENTS = (ANY, st.integers(0, 999), st.lists(st.integers(0, 5), min_size=4, max_size=4))


@settings(max_examples=12, **QUIET)
@given(*ARGUMENTS)
def test_one_gradient(program: list[Step], seed: int, placements: list[int]) -> None:
    check(program, seed, placements)


@pytest.mark.slow
@pytest.mark.timeout(0)
@settings(max_examples=3000, **QUIET)
@given(*ARGUMENTS)
def test_one_gradient_of_many_programs(program: list[Step], seed: int, placements: list[int]) -> None:
    check(program, seed, placements)
