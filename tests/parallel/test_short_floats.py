"""Sums of short floats that are pending on a mesh are kept, scaled and sent in float32, and give what the unsplit array
gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshtape as mt

DTYPES = {n: np.dtype(getattr(ml_dtypes, n, n)) for n in ("bfloat16", "float16", "float8_e5m2")}
Ulps = Callable[[Any, Any, Any], float]
rng = np.random.default_rng(1)
N = 64
X, W, T = rng.uniform(0.5, 1, (N, 8)), rng.uniform(0.05, 0.1, (8, 8)), rng.uniform(0.5, 1, (32, 8))
IDS = mt.asarray(rng.integers(0, 32, N))

LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "rows": ({"d": 4}, {"d": mt.Shard(0)}),
    "rows over two axes": ({"a": 2, "b": 2}, {"a": mt.Shard(0), "b": mt.Shard(0)}),
    "rows and columns": ({"a": 2, "b": 2}, {"a": mt.Shard(0), "b": mt.Shard(1)}),
    "rows, replicated": ({"a": 2, "b": 2}, {"a": mt.Shard(0)}),
}

CASES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "sum": lambda x, w, t: mt.sum(x, axis=0),
    "scaled sum": lambda x, w, t: mt.sum(x, axis=0) * 3.0 / 2.0,
    "mean": lambda x, w, t: mt.mean(x, axis=0) * 3.0,
    "prod": lambda x, w, t: mt.prod(x[:, :2] * 1.25, axis=0),
    "max": lambda x, w, t: mt.max(x, axis=0),
    "product": lambda x, w, t: (x.mT @ x) * 0.5,
    "product with a vector": lambda x, w, t: mt.sum(x @ w[:, 0]),
    "lookup": lambda x, w, t: t[IDS] * 2.0,
    "a row": lambda x, w, t: t[3] * 4.0,
    "difference": lambda x, w, t: mt.sum(x, axis=0) - mt.sum(x * 0.5, axis=0),
    "product of sums": lambda x, w, t: mt.sum(x) * mt.sum(x * 0.25),
    "reshaped": lambda x, w, t: mt.reshape(mt.sum(x, axis=0), (2, 4)) + 1.0,
    "joined": lambda x, w, t: mt.concat([mt.sum(x, axis=0), mt.mean(x, axis=0)]),
    "sum times matrix": lambda x, w, t: mt.sum(x, axis=0) @ w,
    "chosen": lambda x, w, t: mt.where(w[0] > 0.07, mt.sum(x, axis=0), 0.0),
    "read again": lambda x, w, t: mt.sum(x, axis=0)[mt.asarray([0, 0, 5])],
    "shape alone": lambda x, w, t: mt.ones_like(mt.sum(x, axis=0)),
    "beside integers": lambda x, w, t: mt.sum(x, axis=0) * mt.asarray(np.arange(8, dtype=np.int8)),
    "to float32": lambda x, w, t: mt.sum(x, axis=0).astype(mt.float32) * 2,
    "to itself": lambda x, w, t: mt.sum(x, axis=0).astype(x.dtype) * 2,
    "layer_norm": lambda x, w, t: mt.layer_norm(x, 8, w[0], w[1]),
    "softmax": lambda x, w, t: mt.nn.softmax(x, axis=0),
    "cumulative_sum": lambda x, w, t: mt.cumulative_sum(x, axis=0),
    "var": lambda x, w, t: mt.var(x, axis=0),
    "norm": lambda x, w, t: mt.linalg.vector_norm(x),
    "conv": lambda x, w, t: mt.nn.conv1d(x.reshape((8, 8, 8)), w[:, :, None]),
}


def split(dtype: np.dtype, layout: str) -> tuple[list[mt.Array], list[mt.Array]]:
    """The arrays whole, and with rows over the ranks of a mesh."""
    sizes, placements = LAYOUTS[layout]
    whole = [mt.asarray(a.astype(dtype)) for a in (X, W, T)]
    mesh = mt.Mesh(sizes)
    return whole, [mt.distribute(whole[0], mesh, **placements), whole[1], mt.distribute(whole[2], mesh, **placements)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_split_gives_what_float64_gives_rounded(layout: str, dtype: str, ulps: Ulps) -> None:
    short = DTYPES[dtype]
    whole, parts = split(short, layout)
    for name, f in CASES.items():
        want = f(*[x.astype(mt.float64) for x in whole])
        here = f(*whole)
        bound = max(2.0, ulps(here, want, short))  # where several steps round, they do on one rank too
        for way, got in (("eager", f(*parts)), ("compiled", mt.compile(f)(*parts))):
            assert got.dtype == here.dtype, (name, way)
            assert ulps(got, want, short) <= bound, (name, way)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_what_is_replicated(layout: str, dtype: str, ulps: Ulps) -> None:
    """Data parallelism: each rank has some rows; what all have gets the sum over the ranks."""
    short, (sizes, placements) = DTYPES[dtype], LAYOUTS[layout]
    x = mt.asarray(rng.uniform(0.5, 1, (4096, 4)).astype(short))
    b = mt.asarray(rng.uniform(0.5, 1, 4).astype(short))
    losses: dict[str, Callable[[Any, Any], Any]] = {
        "bias": lambda x, b: mt.sum((x + b).astype(mt.float32)),
        "scale": lambda x, b: mt.sum((x * b).astype(mt.float32)),
        "vector": lambda x, b: mt.sum((x @ b).astype(mt.float32)),
        "matrix": lambda x, b: mt.sum((x @ b[:, None]).astype(mt.float32)),
        "used often": lambda x, b: sum((mt.sum((x[i : i + 8] * b).astype(mt.float32)) for i in range(0, 512, 8)), 0.0),
    }
    parts = mt.distribute(x, mt.Mesh(sizes), **placements)
    for name, f in losses.items():
        want = mt.grad(f, 1)(x.astype(mt.float64), b.astype(mt.float64))
        for way, run in (("eager", mt.grad(f, 1)), ("compiled", mt.compile(mt.grad(f, 1)))):
            got = run(parts, b)
            assert got.dtype == short
            assert ulps(got, want, short) <= 2, (name, way)


def test_a_pending_sum_beyond_float16_is_the_sum_of_the_whole() -> None:
    x = mt.asarray(np.asarray([60000, -1, -59000, 0], np.float16))
    parts = mt.distribute(x, mt.Mesh({"d": 4}), d=mt.Shard(0))
    f = lambda x: mt.sum(x) * 4  # noqa: E731
    assert float(f(x)) == float(f(parts)) == float(mt.compile(f)(parts)) == 3964.0


def test_what_explain_says_of_a_pending_sum_is_what_travels() -> None:
    parts = mt.distribute(mt.ones((8, 16), dtype=mt.bfloat16), mt.Mesh({"d": 4}), d=mt.Shard(0))
    text = mt.explain(lambda x: mt.sum(x, axis=0) * 2.0, parts)
    (line,) = [t for t in text.splitlines() if "all_reduce" in t]
    assert "float32[16]" in line
    assert f"{4 * 3 * 16 * 4} bytes" in line  # each of four ranks gets sixteen numbers of four bytes from three others
    assert "float32[16]{sum:d}" in text


FACTORS: dict[str, Callable[[Any], Any]] = {
    "times infinity": lambda s: s * np.inf,
    "infinity times": lambda s: -np.inf * s,
    "times NaN": lambda s: s * np.nan,
    "times zero": lambda s: s * 0.0,
    "over zero": lambda s: s / 0.0,
    "over infinity": lambda s: s / np.inf,
    "times an infinite array": lambda s: s * mt.asarray(np.inf),
    "times a zero array": lambda s: mt.asarray([0.0]) * s,
    "over an array of zeros": lambda s: s / mt.zeros(3),
    "over a zero array": lambda s: s / mt.asarray(0.0),
}
PENDING: dict[str, Callable[[Any], Any]] = {
    "row": lambda x: x[0],
    "sum": lambda x: mt.sum(x, axis=0),
    "mean": lambda x: mt.mean(x, axis=0),
    "product": lambda x: x.mT @ mt.ones(4),
}


@pytest.mark.parametrize("block", ["finite", "infinite"])
@pytest.mark.parametrize("pending", PENDING)
def test_a_factor_that_is_zero_or_infinite_meets_the_sum_and_not_its_parts(pending: str, block: str) -> None:
    data = np.asarray([[1.0, 0.0, -2.0], [0.0, 0.0, 3.0], [0.5, 0.0, 0.0], [0.0, 1.0, 0.0]])
    if block == "infinite":
        data[1, 0] = np.inf
    x = mt.asarray(data)
    parts = mt.distribute(x, mt.Mesh({"d": 4}), d=mt.Shard(0))
    with np.errstate(all="ignore"):
        for name, scale in FACTORS.items():
            f = lambda x, scale=scale: scale(PENDING[pending](x))  # noqa: E731
            want = np.asarray(f(x))
            np.testing.assert_array_equal(np.asarray(f(parts)), want, err_msg=name)
            np.testing.assert_array_equal(np.asarray(mt.compile(f)(parts)), want, err_msg=f"{name}, compiled")


@pytest.mark.parametrize("dtype", DTYPES)
def test_pending_arrays_between_programs(dtype: str, ulps: Ulps) -> None:
    short = DTYPES[dtype]
    mesh = mt.Mesh({"d": 4})
    x = mt.distribute(mt.asarray(X.astype(short)), mesh, d=mt.Shard(0))
    want = X.astype(short).astype(float).sum(axis=0)
    s = mt.compute(mt.sum(x, axis=0))
    assert s.sharding.partial
    assert s.dtype == short
    assert ulps(s * 2.0, 2 * want, short) <= 1
    assert ulps(mt.reshard(s, d=mt.Shard(0)), want, short) <= 1
    assert ulps(s, want, short) <= 1
    given = mt.asarray(W.astype(short))
    kept = mt.reshard(mt.distribute(given, mesh), d=mt.Partial("sum"))  # one rank has it, the others zeros
    np.testing.assert_array_equal(np.asarray(kept * 2.0), np.asarray(given * 2.0))
    out = mt.shard_map(lambda b: mt.sum(b, axis=0), mesh, {"d": mt.Shard(0)}, {"d": mt.Partial("sum")})(x)
    back = mt.shard_map(lambda b: mt.all_reduce(b, "d"), mesh, {"d": mt.Partial("sum")}, {})
    assert ulps(out, want, short) <= 2
    assert ulps(back(out), want, short) <= 2


def test_the_mean_over_ranks_has_no_sum_to_overflow() -> None:
    mesh, rows = mt.Mesh({"d": 8}), {"d": mt.Shard(0)}
    x = mt.full((64,), 60000.0, dtype=mt.float16)
    for mean in (mt.all_reduce, mt.reduce_scatter):
        found = mt.shard_map(
            lambda b, mean=mean: mean(b, "d", op="mean"), mesh, rows, {} if mean is mt.all_reduce else rows
        )
        assert set(np.asarray(found(x)).tolist()) == {60000.0}


def test_blocks_of_a_store_are_summed_in_float32(tmp_path: Any, ulps: Ulps) -> None:
    import zarr

    values = rng.uniform(0.5, 1, (4000, 3)).astype(np.float16)
    zarr.create_array(tmp_path / "x", shape=values.shape, chunks=(100, 3), dtype="f2")[...] = values
    x = mt.from_zarr(tmp_path / "x", mt.Mesh({"d": 2}), d=mt.Shard(0))
    want = values.astype(float).sum(axis=0)
    total = mt.stream(lambda x: mt.sum(x, axis=0), x, memory=4000)
    assert total.dtype == mt.float16
    assert ulps(total, want, mt.float16) <= 1
    kept = mt.stream(lambda x: mt.sum(x, axis=0) * 2.0, x, memory=4000, to=str(tmp_path / "y"))
    assert kept.dtype == np.float16
    assert ulps(zarr.open_array(tmp_path / "y")[...], 2 * want, mt.float16) <= 1


def test_between_processes(processes: Any, ulps: Ulps) -> None:
    short = DTYPES["bfloat16"]
    with mt.Mesh({"d": 2}, client=processes) as mesh:
        x = mt.asarray(rng.uniform(0.5, 1, (4096, 3)).astype(short))
        b = mt.asarray([0.5, 0.75, 1.0]).astype(short)
        f = lambda x, b: mt.sum((x * b).astype(mt.float32))  # noqa: E731
        got = mt.grad(f, 1)(mt.distribute(x, mesh, d=mt.Shard(0)), b)
        assert ulps(got, mt.grad(f, 1)(x.astype(mt.float64), b.astype(mt.float64)), short) <= 2
