"""Random programs of several inputs: the gradient on one rank, compiled, recomputed, on two ranks and by differences is
one gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_programs import KINKED, Step, loss, programs

import meshtape as mt
from meshtape.arrays.indexing import sparse_cotangent

MESH = mt.Mesh({"a": 2})


@pytest.fixture(autouse=True, scope="module")
def sparse_cotangents():
    """Cotangents of reads are kept sparse however small the array is."""
    before, sparse_cotangent.SMALLEST = sparse_cotangent.SMALLEST, 1
    yield
    sparse_cotangent.SMALLEST = before


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

    plain, recomputed = loss(program), loss(program, mt.checkpoint)
    value, expected = mt.value_and_grad(plain, argnums)(*xs)
    assert np.isfinite(float(value))
    if not any(name in KINKED for name, *_ in program):
        rng = np.random.default_rng(seed + 1)
        vs = [rng.standard_normal(x.shape) for x in host]
        h = 1e-5
        up, down = (float(plain(*(mt.asarray(x + s * v) for x, v in zip(host, vs, strict=True)))) for s in (h, -h))
        slope = sum(float((np.asarray(g) * v).sum()) for g, v in zip(expected, vs, strict=True))
        size = sum(float((np.abs(np.asarray(g)) * np.abs(v)).sum()) for g, v in zip(expected, vs, strict=True))
        assert abs((up - down) / (2 * h) - slope) <= 1e-5 * (1.0 + size) + 1e-10 * abs(float(value)) / h, "differences"
    split = [
        mt.distribute(x, MESH, **(PLACES[p % 3] if x.ndim > 1 else PLACES[p % 2 * 2] if x.ndim else {}))
        for x, p in zip(xs, placements, strict=True)
    ]
    ways = {
        "compiled": mt.compile(mt.grad(plain, argnums))(*xs),
        "recomputed": mt.grad(recomputed, argnums)(*xs),
        "derivative of the compiled, recomputed": mt.grad(mt.compile(recomputed), argnums)(*xs),
        "two ranks": mt.grad(plain, argnums)(*split),
        "two ranks, compiled": mt.compile(mt.grad(plain, argnums))(*split),
    }
    for way, found in ways.items():
        for i, (g, e) in enumerate(zip(found, expected, strict=True)):
            near(g, e, f"{way}: input {i}, placements {placements}")


ANY = programs(15, 5)
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
