"""A small call of each family of kernels, for compute-sanitizer (``benchmarks/gpu_day.sh``), under which calls of many
elements do not end. Those of norms, losses, attention and experts are in ``test_kernels.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.core.op import Op

DTYPES = [np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16)]
RNG = np.random.default_rng(0)
NUMBERS = RNG.integers(-8, 9, (6, 37)) / 4
"""Of few digits, so that all sums and most products are exact."""
PLACES = np.array([5, 0, 2, 5, -1])
MASK = NUMBERS > 0.3


def chain(x: mt.Array, y: mt.Array) -> mt.Array:
    return mt.where(x > y, x * 2 - y, mt.maximum(x, 0.5)) + mt.abs(y)


EXACT: dict[str, Callable[[mt.Array], Any]] = {
    "sums": lambda x: (x + x, x + x[0], x + x[:, :1], mt.where(x > 0, x, -x)),
    "casts": lambda x: (x.astype(mt.bfloat16), x.astype(mt.float16), x.astype(mt.float32), x.astype(mt.int8)),
    "float8": lambda x: (x.astype(mt.float8_e4m3fn).astype(x.dtype), x.astype(mt.float8_e5m2).astype(x.dtype)),
    "copies": lambda x: (mt.reshape(x.T, (-1,)), x[::2, ::-1] + 0, mt.concat([x, x[:, 3:]], axis=1), mt.flip(x)),
    "writes": lambda x: (x.at[1:3, 5:].set(0.5), x.at[mt.asarray(PLACES)].set(1.0), x.at[:, 2].add(1.0)),
    "masks": lambda x: (x[mt.asarray(MASK)], *mt.nonzero(x), mt.where(mt.asarray(MASK), x, 0)),
    "rows": lambda x: (x[mt.asarray(PLACES)], mt.take(x, mt.asarray(PLACES), axis=1)),
    "running": lambda x: (mt.cumulative_sum(x, axis=1), mt.cumulative_sum(x, axis=0)),
    "reductions": lambda x: (mt.sum(x), mt.sum(x, axis=0), mt.max(x, axis=1), mt.argmax(x, axis=1), mt.argmin(x)),
    "a chain, compiled": lambda x: mt.compile(chain)(x, x[::-1]),
    "rows of gradients": lambda x: mt.vjp(lambda t: t[mt.asarray(PLACES)], x)[1](x[:5])[0],
    "random bits": lambda x: mt.random.bits(mt.random.key(3), (77,)),
}
NEAR: dict[str, Callable[[mt.Array], Any]] = {
    "functions": lambda x: (mt.tanh(x), mt.exp(x), mt.nn.gelu(x), mt.nn.swiglu(x, x[::-1])),
    "gradients": lambda x: mt.vjp(lambda x: mt.nn.swiglu(mt.nn.mish(x), mt.tanh(x)), x)[1](x),
    "a product with a bias": lambda x: mt.compile(lambda x: mt.nn.gelu(x @ x.mT + x[:, 0]))(x),
    "the loss of a vocabulary": lambda x: mt.value_and_grad(
        lambda h: mt.nn.linear_cross_entropy(h, mt.permute_dims(x, (1, 0)), mt.asarray(np.arange(6)))
    )(x),
    "rotary positions": lambda x: mt.nn.rotary_embedding(x[:, :32], x[:, :16], x[:, 16:32]),
    "dropout": lambda x: mt.nn.dropout_add(x, x, 0.3, key=mt.random.key(2)),
    "float8 products": lambda x: mt.nn.float8_matmul(mt.tile(x[:4, :32], (4, 1)), mt.tile(x[:4, :32], (4, 1)).mT),
    "variances": lambda x: (mt.var(x, axis=1), mt.std(x, axis=0)),
    "AdamW": lambda x: mt.optim.adamw(1e-2).update([x], [x * x], mt.optim.adamw(1e-2).init([x])),
}


def results(call: Callable[[mt.Array], Any], where: str, dtype: np.dtype) -> list[np.ndarray]:
    with mt.use_device(where):
        found = call(mt.asarray(NUMBERS.astype(dtype)))
        return [a.numpy() for a in mt.tree.flatten(found)[0] if isinstance(a, mt.Array)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*EXACT, *NEAR])
def test_a_small_call_agrees_with_the_cpu(name: str, dtype: np.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Op, "large", 1)  # by the kernels for many elements
    call = EXACT.get(name) or NEAR[name]
    wanted = results(call, "cpu", dtype)
    for got, want in zip(results(call, "cuda:0", dtype), wanted, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        if name in EXACT:
            np.testing.assert_array_equal(got, want)
        else:
            rtol = {2: 2e-2, 4: 2e-5}.get(got.dtype.itemsize, 1e-12)
            np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol, rtol)
