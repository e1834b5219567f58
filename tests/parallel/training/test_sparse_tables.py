"""Training a table of which each batch reads a few rows: what stays sparse gives what dense gradients give, to the end
of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.indexing import sparse_cotangent

from .conftest import losses

ROWS, WIDTH = 2048, 8
assert ROWS * WIDTH >= sparse_cotangent.SMALLEST
RNG = np.random.default_rng(0)
DATA = {"ids": RNG.integers(0, ROWS, (44, 3)), "y": RNG.standard_normal(44).astype(np.float32)}


def loss(p: Any, batch: Any, key: Any) -> Any:
    words = p["table"][batch["ids"]].sum(axis=1)
    return mt.mean((words @ p["w"] - batch["y"].astype(words.dtype)) ** 2)


def init(key: Any) -> Any:
    a, b = mt.random.split(key)
    return {
        "table": mt.random.normal(a, (ROWS, WIDTH), dtype=mt.float32) * 0.1,
        "w": mt.random.normal(b, (WIDTH,), dtype=mt.float32),
    }


def trainer(optimizer: Any, axes: Any = None, **options: Any) -> Any:
    return mt.Trainer(
        loss,
        init,
        optimizer,
        mt.training.ArraySource(DATA),
        mesh=None if axes is None else mt.Mesh(axes),
        **{"batch": 8, "accumulation": 2, "steps": 4, "log_every": 1, "clip": 0.5, "ema": mt.optim.ema(0.5)} | options,
    )


@contextmanager
def dense() -> Iterator[None]:
    before, sparse_cotangent.SMALLEST = sparse_cotangent.SMALLEST, 1 << 60
    try:
        yield
    finally:
        sparse_cotangent.SMALLEST = before


@pytest.fixture
def sparse_calls_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    call = sparse_cotangent.sparse_call

    def seeing(op: Any, *args: Any) -> Any:
        found = call(op, *args)
        if found is not None:
            seen.append(op.name)
        return found

    monkeypatch.setattr(sparse_cotangent, "sparse_call", seeing)
    return seen


RUNS = {
    "sgd": (mt.optim.sgd(0.1), None, {}),
    "sgd, two ranks": (mt.optim.sgd(0.1), {"data": 2}, {}),
    "adamw, two ranks": (mt.optim.adamw(0.01), {"data": 2}, {}),
    "lazy_adam": (mt.optim.lazy_adam(0.01), None, {"precision": "bfloat16"}),
    "lazy_adam, two ranks, split state": (mt.optim.lazy_adam(0.01), {"data": 2}, {"zero": 2}),
    "lazy_adam, two ranks, split parameters": (mt.optim.lazy_adam(0.01), {"data": 2}, {"zero": 3, "clip": None}),
    "momentum, scaled losses": (mt.optim.momentum(0.1), None, {"precision": "float16"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_dense_gradients(name: str, sparse_calls_made: list[str]) -> None:
    optimizer, axes, options = RUNS[name]
    ours = trainer(optimizer, axes, **options)
    result = ours.fit()
    assert sparse_calls_made  # else both are the same run
    sparse_calls_made.clear()
    with dense():
        theirs = trainer(optimizer, axes, **options)
        wanted = theirs.fit()
    assert not sparse_calls_made
    rtol = 2e-2 if "precision" in options else 1e-5
    for key in ("loss", "grad_norm"):
        found, expected = ([h[key] for h in r.history if key in h] for r in (result, wanted))
        np.testing.assert_allclose(found, expected, rtol=rtol)
    for a, b in zip(mt.tree.flatten(ours.state)[0], mt.tree.flatten(theirs.state)[0], strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.abs(a - b).max() <= rtol * max(np.abs(b).max(), 1e-3)


@pytest.mark.parametrize("axes", [None, {"data": 2}], ids=["one rank", "two ranks"])
def test_an_interrupted_run_goes_on_bit_for_bit(axes: Any, tmp_path: Any) -> None:
    optimizer = mt.optim.lazy_adam(mt.optim.warmup_linear(0.01, 2, 9))
    whole = trainer(optimizer, axes)
    wanted = whole.fit()
    first = trainer(optimizer, axes, steps=2, directory=tmp_path).fit()
    second = trainer(optimizer, axes, directory=tmp_path)
    result = second.fit()
    curves = [losses(r) for r in (first, result, wanted)]
    assert curves[0] + curves[1] == curves[2]
    for a, b in zip(mt.tree.flatten(second.state)[0], mt.tree.flatten(whole.state)[0], strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("dtype", [mt.bfloat16, mt.float16], ids=lambda d: d.name)
def test_masters_of_a_table_in_two_bytes(dtype: Any, sparse_calls_made: list[str]) -> None:
    opt = mt.optim.lazy_adam(0.01)
    start = init(mt.random.key(0))["table"].astype(dtype)
    ids = mt.asarray([3, 9, 3])

    def run() -> Any:
        step = mt.compile(
            lambda p, s: opt.update(p, mt.grad(lambda t: (t[ids] ** 2).astype(mt.float32).sum())(p), s), donate=(0, 1)
        )
        p = mt.asarray(np.array(start))
        s = opt.init(p)
        for _ in range(3):
            p, s = step(p, s)
        return p, s

    p, s = run()
    assert sparse_calls_made
    with dense():
        _, wanted = run()
    assert p.dtype == dtype
    np.testing.assert_allclose(np.asarray(s["master"]), np.asarray(wanted["master"]), rtol=1e-2, atol=1e-3)
    np.testing.assert_array_equal(np.asarray(p)[[0, 4]], np.asarray(start)[[0, 4]])
