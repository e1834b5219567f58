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


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_users_see_on_the_way_is_rounded(dtype: str) -> None:
    short, seen = DTYPES[dtype], []

    def look(g: mt.Array) -> None:
        seen.append((g.dtype, g.tolist()))

    @mt.custom_vjp
    def twice(x: Any) -> Any:
        return x * 2

    def backward(_: Any, g: mt.Array) -> tuple[mt.Array]:
        look(g)
        return (g * 2,)

    twice.defvjp(lambda x: (twice(x), None), backward)
    b = mt.ones(1, dtype=short)
    rounded = np.asarray([5000.0]).astype(short).astype(float).tolist()
    g = mt.grad(lambda b: mt.sum(mt.zeros((5000, 1), dtype=short) + mt.gradient_hook(twice(b), look)))(b)
    assert seen == [(short, rounded)] * 2
    assert (g.dtype, g.tolist()) == (short, [2 * rounded[0]])
    with mt.Tape() as tape:
        tape.watch(b)
        y = b * 1
        tape.hook(y, look)
        total = mt.sum(mt.zeros((5000, 1), dtype=short) + y)
    assert tape.gradient(total, [y, b])[0].dtype == short
    assert seen[2:] == [(short, rounded)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_a_table_stays_sparse(dtype: str) -> None:
    short = DTYPES[dtype]
    ids = mt.asarray(np.r_[np.full(5000, 7), 9])
    table = mt.ones((100_000, 2), dtype=short)
    g = mt.grad(lambda t: mt.sum((t * 2)[ids].astype(mt.float32)))(table)
    assert type(g._buf).__name__ == "IndexSum"
    places, rows = mt.gradient_rows(g)
    assert (places.tolist(), rows.dtype) == ([7, 9], short)
    assert rows.tolist() == np.asarray([[10000.0] * 2, [2.0] * 2]).astype(short).astype(float).tolist()
