"""Which compiled results have the bits of eager ones: what the documentation of ``compile`` promises, on random
programs."""

from __future__ import annotations

import numpy as np
import pytest

import meshtape as mt

UNARY = [
    mt.tanh,
    mt.exp,
    mt.abs,
    mt.nn.relu,
    mt.nn.gelu,
    mt.sign,
    mt.square,
    lambda x: -x,
    lambda x: x * 0.5,
    lambda x: 1.0 - x,
    lambda x: x / 3.0,
    lambda x: x**2,
]
BINARY = [
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: x - y,
    mt.maximum,
    lambda x, y: mt.where(x > 0, x, y),
    lambda x, y: x / (1.0 + y * y),
]
# These sum, in an order that goes by how their operands lie in memory.
SUMS = [
    lambda x: x - mt.sum(x) * 1e-3,
    lambda x: x - mt.mean(x, axis=0),
    lambda x: x * mt.max(x, axis=1, keepdims=True),
    lambda x: mt.nn.softmax(x),
    lambda x: (x @ x) * 0.01,
    lambda x: mt.cumulative_sum(x, axis=0) * 0.01,
    lambda x: x - mt.var(x, axis=1, keepdims=True),
]
MOVES = [lambda x: x.T, lambda x: mt.flip(x, axis=0), lambda x: x[::-1, ::-1]]


def program(seed, sums, moves):
    rng = np.random.default_rng(seed)
    plan = []
    for _ in range(int(rng.integers(3, 9))):
        kinds = [UNARY, UNARY, BINARY, *([SUMS] if sums else []), *([MOVES] if moves else [])]
        table = kinds[int(rng.integers(len(kinds)))]
        plan.append((table is BINARY, table[int(rng.integers(len(table)))], int(rng.integers(100))))

    def fn(x, y, n):
        held = [x, y]
        for two, f, k in plan:
            v = held[k % len(held)]
            held.append(f(v, held[-1]) if two else f(v) * n if k % 3 == 0 else f(v))
        return held[2:]

    return fn


def bits(tree):
    return [(v.shape, v.dtype, v.tobytes()) for v in map(np.asarray, tree)]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("size", [5, 130, 300])  # alone, in C, and in blocks
@pytest.mark.parametrize("sums", [False, True], ids=["elementwise", "with sums"])
def test_random_programs_have_the_bits_of_eager_work(sums, size, dtype):
    rng = np.random.default_rng(size)
    x, y = (mt.asarray(rng.normal(size=(size, size)).astype(dtype)) for _ in range(2))
    for seed in range(6):
        fn = program(seed, sums, moves=False)
        fast = mt.compile(fn)
        with np.errstate(all="ignore"):
            for n in (0.7, 1.3):
                assert bits(fast(x, y, n)) == bits(fn(x, y, n)), seed


@pytest.mark.parametrize("size", [5, 300])
def test_elementwise_programs_on_turned_arrays_too(size):
    rng = np.random.default_rng(size)
    x, y = (mt.asarray(rng.normal(size=(size, size))) for _ in range(2))
    for seed in range(6):
        fn = program(seed, sums=False, moves=True)
        with np.errstate(all="ignore"):
            assert bits(mt.compile(fn)(x, y, 0.7)) == bits(fn(x, y, 0.7)), seed


def test_sums_over_turned_arrays_are_equal_but_for_rounding():
    x = mt.asarray(np.random.default_rng(0).normal(size=(260, 260)))
    for fn in (lambda x: mt.sum(-x.T), lambda x: mt.sum(-x.T, axis=0), lambda x: (-x.T) @ x):
        np.testing.assert_allclose(np.asarray(mt.compile(fn)(x)), np.asarray(fn(x)), rtol=1e-10, atol=1e-11)


CURVES = [
    *(mt.tanh, mt.nn.sigmoid, mt.exp, mt.log1p, mt.sqrt, mt.atan, mt.sin),
    *(mt.nn.celu, mt.nn.elu, mt.nn.gelu, mt.nn.hard_silu, mt.nn.hard_tanh, mt.nn.log_sigmoid, mt.nn.mish, mt.nn.relu6),
    *(mt.nn.selu, mt.nn.silu, mt.nn.softplus, mt.nn.softsign, mt.nn.glu),
    *(lambda x: mt.nn.gelu(x, approximate=True), lambda x: mt.nn.swiglu(x, x + 1.0)),
]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("curve", range(len(CURVES)))
def test_gradients_of_curves_have_the_bits_of_eager_ones(curve, dtype):
    x = mt.asarray(np.random.default_rng(0).normal(size=40_000).astype(dtype)) * 3
    x, weights = (mt.abs(x), x) if CURVES[curve] in (mt.sqrt, mt.log1p) else (x, x[::-1] + 0)
    slope = mt.grad(lambda x: mt.sum((f := CURVES[curve](x)) * weights[: f.size]))
    assert bits([mt.compile(slope)(x)]) == bits([slope(x)])
