"""Derivatives of bfloat16 and float16 are those of float64, rounded: sums in rules, and of cotangents, are made in
float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from op_samples import SAMPLES, in_thousands, recast

import meshtape as mt
from meshtape.autodiff.tape import backward

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


SHORT = sorted(
    n for n, op in mt.OPS.items() if op.nondifferentiable is None and any("short" not in s.leave for s in SAMPLES[n])
)


def test_every_differentiable_op_is_here() -> None:
    assert not [n for n in SHORT if next(in_thousands(n), None) is None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHORT)
def test_gradients(name: str, dtype: str, ulps: Callable[[Any, Any, Any], float]) -> None:
    short = DTYPES[dtype]
    for i, (fn, args) in enumerate(in_thousands(name)):
        xs = [mt.asarray(recast(a, short)) for a in args]
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
    assert type(g._buf).__name__ == "SparseCotangent"
    places, rows = mt.gradient_rows(g)
    assert (places.tolist(), rows.dtype) == ([7, 9], short)
    assert rows.tolist() == np.asarray([[10000.0] * 2, [2.0] * 2]).astype(short).astype(float).tolist()


def block(w: dict[str, mt.Array], x: mt.Array) -> mt.Array:
    """Products beside residuals, moves, rotations, vectors that are broadcast, and an array that is used three times."""
    h = mt.nn.rms_norm(x, 8, w["norm"])
    q, k, v = (mt.permute_dims(mt.reshape(h @ w[n], (2, 6, 2, 4)), (0, 2, 1, 3)) for n in ("q", "k", "v"))
    turned = mt.nn.rotary_embedding(q, w["cos"], w["sin"])
    a = mt.nn.scaled_dot_product_attention(turned, k, mt.flip(v, axis=-1), is_causal=True)
    x = x + mt.reshape(mt.permute_dims(a, (0, 2, 1, 3)), (2, 6, 8)) @ w["o"] * w["scale"]
    g = mt.nn.swiglu(x @ w["gate"], x @ w["up"])
    left, right = g[..., :8], mt.nn.gelu(g[..., 8:] + w["bias"])
    return mt.concat([left, right * left], axis=-1) @ w["down"] + x


def block_arguments(dtype: np.dtype) -> tuple[dict[str, mt.Array], mt.Array, mt.Array]:
    rng = np.random.default_rng(4)
    shapes = dict.fromkeys("qkvo", (8, 8)) | {"gate": (8, 16), "up": (8, 16), "down": (16, 8), "norm": (8,)}
    shapes |= {"scale": (8,), "bias": (8,), "cos": (6, 2), "sin": (6, 2)}
    w = {n: mt.asarray((0.3 * rng.standard_normal(s)).astype(dtype)) for n, s in shapes.items()}
    return w, *(mt.asarray(rng.standard_normal((2, 6, 8)).astype(dtype)) for _ in range(2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", [lambda f: f, mt.compile, mt.checkpoint], ids=["eager", "compiled", "recomputed"])
def test_what_is_rounded_early_has_the_same_bits(dtype: str, way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cotangent is rounded with its last term only where it would be rounded next."""
    w, x, g = block_arguments(DTYPES[dtype])

    def slopes() -> list[bytes]:
        pull = mt.vjp(way(lambda w, x: block(w, block(w, x))), w, x)[1]
        return [a.numpy().tobytes() for a in mt.tree.flatten(pull(g))[0]]

    early, counted = slopes(), backward._rounded_next
    told: list[int] = []
    monkeypatch.setattr(backward, "_rounded_next", lambda *a: told.append(len(counted(*a))) or {})
    assert slopes() == early
    assert sum(told) > 10


ROW = np.random.default_rng(5).standard_normal((2, 5000))
LONG: dict[str, Callable[[mt.Array], mt.Array]] = {
    "softmax": lambda x: mt.nn.softmax(x)[:, 7],
    "log_softmax": lambda x: mt.nn.log_softmax(x)[:, 7],
    "log_softmax, axis 0": lambda x: mt.nn.log_softmax(x.T, axis=0)[7],
    "log_softmax, where": lambda x: mt.nn.log_softmax(x, where=mt.asarray(ROW < 2))[:, 7],
    "logsumexp": lambda x: mt.nn.logsumexp(x, axis=1),
    "cross_entropy": lambda x: mt.nn.cross_entropy(x, mt.asarray([7, 9]), reduction="none"),
    "cross_entropy, smooth": lambda x: mt.nn.cross_entropy(x, mt.asarray([7, 9]), label_smoothing=0.1, reduction="none"),
    "layer_norm": lambda x: mt.layer_norm(x, 5000)[:, 7],
    "rms_norm": lambda x: mt.rms_norm(x, 5000)[:, 7],
    "var": lambda x: mt.var(x, axis=1),
    "std": lambda x: mt.std(x, axis=1),
    "mean": lambda x: mt.mean(x, axis=1),
    "norm": lambda x: mt.linalg.vector_norm(x, axis=1),
    "norm 3": lambda x: mt.linalg.vector_norm(x, ord=3, axis=1),
    "mse": lambda x: mt.nn.mse_loss(x, x * 0, reduction="sum"),
    "attention": lambda x: mt.nn.scaled_dot_product_attention(x[:, None, :8], *[mt.reshape(x, (2, 625, 8))] * 2)[:, 0, 7],
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LONG)
def test_long_rows(name: str, dtype: str, ulps: Callable[[Any, Any, Any], float]) -> None:
    """Value and gradient of one element of rows of 5,000 by all others."""
    fn, short = LONG[name], DTYPES[dtype]
    x = mt.asarray(ROW.astype(short))
    exact = x.astype(mt.float64)
    assert ulps(fn(x), fn(exact), short) <= 2
    for way in (lambda f: f, mt.compile, mt.checkpoint):
        got, wanted = (mt.vjp(way(fn), a)[1](mt.ones_like(fn(a)))[0] for a in (x, exact))
        both = (
            np.delete(np.asarray(a, np.float64), 7, axis=1) for a in (got, wanted)
        )  # next to it the others do not count
        assert ulps(*both, short) <= 2
