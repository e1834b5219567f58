"""Derivatives of bfloat16 and float16 are those of float64, rounded: sums in rules, and of cotangents, are made in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from short_samples import NO_SHORT, SHORT, missing

import meshtape as mt

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


def leaves(tree: Any) -> list[mt.Array]:
    return [x for x in mt.tree.flatten(tree)[0] if isinstance(x, mt.Array)]


def seeds(values: list[mt.Array], dtype: np.dtype) -> list[mt.Array]:
    """Positive numbers; in every second column four times as large, so that differences of columns do not cancel."""
    rng = np.random.default_rng(3)
    drawn = [rng.uniform(0.5, 1.5, v.shape) for v in values]
    drawn = [(d * (1 + 3 * (np.arange(d.shape[-1]) % 2)) if d.ndim else d).astype(dtype) for d in drawn]
    return [mt.asarray(s).astype(v.dtype) for s, v in zip(drawn, values, strict=True)]


def pulled(fn: Callable[..., Any], xs: list[mt.Array], dtype: np.dtype) -> list[Any]:
    values, pull = mt.vjp(lambda *a: leaves(fn(*a)), *xs)
    return list(pull(seeds(values, dtype)))


def pushed(fn: Callable[..., Any], xs: list[mt.Array], dtype: np.dtype) -> list[Any]:
    """Tangents of the results, of each operand by itself: those of several may cancel."""
    found = []
    for i, t in enumerate(seeds(xs, dtype)):
        along = [t if k == i else mt.zeros_like(x) for k, x in enumerate(xs)]
        found += leaves(mt.jvp(lambda *a: leaves(fn(*a)), xs, along)[1])
    return found


def on_tape(fn: Callable[..., Any], xs: list[mt.Array], dtype: np.dtype) -> list[Any]:
    with mt.Tape() as tape:
        tape.watch(xs)
        values = leaves(fn(*xs))
        given = seeds(values, dtype)
        total = [mt.sum(v.astype(mt.float32) * s.astype(mt.float32)) for v, s in zip(values, given, strict=True)]
        loss = sum(total[1:], total[0])
    return list(tape.gradient(loss, xs, unconnected="zeros"))


def split(xs: list[mt.Array]) -> list[mt.Array]:
    """The largest array in rows over a mesh of four, the others whole."""
    mesh = mt.Mesh({"data": 4})
    large = max(range(len(xs)), key=lambda i: xs[i].size)
    rows = [{"data": mt.Shard(0)} if i == large and x.ndim else {} for i, x in enumerate(xs)]
    return [mt.distribute(x, mesh, **r) for x, r in zip(xs, rows, strict=True)]


WAYS: dict[str, Callable[..., list[Any]]] = {
    "eager": pulled,
    "on a tape": on_tape,
    "recomputed": lambda fn, xs, dtype: pulled(mt.checkpoint(fn), xs, dtype),
    "compiled": lambda fn, xs, dtype: mt.compile(lambda *a: pulled(fn, list(a), dtype))(*xs),
    "split": lambda fn, xs, dtype: pulled(fn, split(xs), dtype),
}


def test_every_differentiable_op_is_here() -> None:
    assert not missing()
    assert not NO_SHORT & set(SHORT)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(SHORT))
def test_gradients(name: str, dtype: str, ulps: Callable[[Any, Any, Any], float]) -> None:
    short = DTYPES[dtype]
    for i, (fn, args) in enumerate(SHORT[name]):
        xs = [mt.asarray(a.astype(short)) for a in args]
        exact = [x.astype(mt.float64) for x in xs]
        wanted = pulled(fn, exact, short)
        for way, run in WAYS.items():
            for k, (g, w, x) in enumerate(zip(run(fn, xs, short), wanted, xs, strict=True)):
                what = f"operand {k} of sample {i}, {way}"
                assert (g.dtype, g.shape) == (x.dtype, x.shape), what
                assert ulps(g, w, short) <= 2, what
        for k, (t, w) in enumerate(zip(pushed(fn, xs, short), pushed(fn, exact, short), strict=True)):
            assert ulps(t, w, short) <= 2, f"tangent of result {k} of sample {i}"
