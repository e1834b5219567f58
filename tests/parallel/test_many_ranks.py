"""Per-rank code on many ranks: work and plans grow with their number, and the results are those of few."""

from __future__ import annotations

import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.core.blocks import ceil_blocks
from meshtape.parallel.execution import executor
from meshtape.parallel.execution.executor import Prepared
from meshtape.parallel.resharding import collective_plans, schedule
from meshtape.parallel.resharding.split_sizes import SplitSizes

ROWS, COLS = {"a": mt.Shard(0)}, {"a": mt.Shard(1)}


def turn(x: Any) -> Any:
    return mt.all_to_all(x, "a", split_dim=1, concat_dim=0)


def swap(x: Any) -> Any:
    return mt.all_to_all(x, "a")


def swap_columns(x: Any) -> Any:
    return mt.all_to_all(x, "a", split_dim=1, concat_dim=1)


def scatter(x: Any) -> Any:
    return mt.reduce_scatter(x, "a")


CASES = {
    "turn": (turn, COLS),
    "swap": (swap, ROWS),
    "swap columns": (swap_columns, ROWS),
    "scatter": (scatter, ROWS),
}


def rank_program(name: str, ranks: int) -> Any:
    fn, out = CASES[name]
    mesh = mt.Mesh({"a": ranks})
    x = mt.distribute(np.ones((ranks * ranks, ranks), np.int8), mesh, a=mt.Shard(0))
    return mesh.rank_program(mt.compile(mt.shard_map(fn, mesh, (ROWS,), out)).program(x), [x.sharding])


@pytest.mark.parametrize("name", list(CASES))
def test_the_program_grows_with_the_ranks_and_not_with_their_square(name):
    size = [len(pickle.dumps(rank_program(name, n))) for n in (8, 64)]
    assert size[1] < 8 * 1.5 * size[0]


@pytest.mark.parametrize("name", list(CASES))
def test_what_a_process_looks_at_grows_with_the_ranks(monkeypatch, name):
    ranks, calls = 64, 0
    program = rank_program(name, ranks)
    true = collective_plans.CollectivePlan.piece

    def counted(self: Any, source: int, rank: int) -> Any:
        nonlocal calls
        calls += 1
        return true(self, source, rank)

    monkeypatch.setattr(collective_plans.CollectivePlan, "piece", counted)
    schedule._plan_rounds.cache_clear()
    Prepared(program, (3,), tuple(range(ranks)), ("a",))
    assert 0 < calls <= 2 * ranks * ranks.bit_length()  # small parts go by way of others
    calls = 0
    Prepared(program, range(ranks), (0,) * ranks, ("a",))
    assert 0 < calls <= 8 * ranks


@pytest.mark.parametrize("ranks", [9, 12])
@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_blocks_that_are_joined_and_cut_have_the_bits_of_those_made_piece_by_piece(monkeypatch, dtype, ranks):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ranks * ranks, 2 * ranks)).astype(dtype)
    blocks = x.reshape(ranks, ranks, 2 * ranks)
    found = []
    for halves in (collective_plans.in_halves, lambda c: None):
        monkeypatch.setattr(executor, "in_halves", halves)
        mesh = mt.Mesh({"b": 2, "a": ranks})  # two groups
        found.append([np.asarray(mt.shard_map(fn, mesh, (ROWS,), out)(x)) for fn, out in CASES.values()])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
    turned, swapped, columns, scattered = found[0]
    np.testing.assert_array_equal(turned, x)
    np.testing.assert_array_equal(swapped.reshape(blocks.shape), blocks.swapaxes(0, 1))
    parts = x.reshape(ranks, ranks, ranks, 2)
    np.testing.assert_array_equal(columns.reshape(parts.shape), parts.transpose(2, 1, 0, 3))
    tolerance = 1e-12 if dtype is np.float64 else 0.05
    np.testing.assert_allclose(scattered.astype(float), blocks.astype(float).sum(0), tolerance, tolerance)


@pytest.mark.parametrize("lengths", [(3, 3, 3), (5, 5, 4), (0, 2, 0), (1,)])
def test_sizes_are_those_of_the_matrix_that_is_written_out(lengths):
    n = len(lengths)
    sizes = SplitSizes.matrix([tuple(k for _, k in ceil_blocks(m, n)) for m in lengths])
    matrix = np.array([sizes.row(i) for i in range(n)])
    np.testing.assert_array_equal(matrix.sum(1), lengths)
    assert [list(sizes.column(j)) for j in range(n)] == matrix.T.tolist()
    assert sizes.transposed() == SplitSizes.matrix([tuple(r) for r in matrix.T.tolist()])
    assert sizes.transposed().transposed() == sizes
    assert SplitSizes.matrix([tuple(r) for r in matrix.tolist()]) == sizes
