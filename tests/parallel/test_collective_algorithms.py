"""Collectives of any number of processes, simulated: the values to the bit, in the order that is written down, and the
messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from meshtape.parallel.collectives.costs import COSTS, Ways, depth
from meshtape.parallel.resharding import schedule
from meshtape.parallel.resharding.collective_plans import Collective, CollectivePlan
from meshtape.parallel.resharding.plan import ReshardPlan, plan_reshard
from meshtape.parallel.resharding.split_sizes import SplitSizes
from meshtape.parallel.sharding.placement import REDUCERS, Layout, block_box, make_layout

from .simulated import Traffic, simulate

COUNTS = [*range(1, 10), 13, 24, 31, 32, 33, 70]
DTYPES = ["?", "i1", "u2", "i4", "i8", "f2", "bfloat16", "f4", "f8", "c8", "c16", "float8_e4m3fn", "float8_e5m2"]


def in_order(terms: Sequence[np.ndarray], reducer: Callable[[Any, Any], Any]) -> np.ndarray:
    """The order of the documentation: the surplus over a power of two in pairs, then neighbours, and neighbours of
    those."""
    power = 1
    while 2 * power <= len(terms):
        power *= 2
    pairs = len(terms) - power
    values = [reducer(terms[2 * i], terms[2 * i + 1]) for i in range(pairs)] + list(terms[2 * pairs :])
    while len(values) > 1:
        values = [reducer(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return np.asarray(values[0])


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def values(n: int, shape: tuple[int, ...], dtype: Any = "f4") -> dict[int, np.ndarray]:
    """Blocks whose sum depends on the order."""
    rng = np.random.default_rng(n)
    dtype = dtype_of(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    if dtype.kind == "b":
        return {r: rng.random(shape) < 0.5 for r in range(n)}
    if dtype.kind in "iu":
        return {r: rng.integers(0, 100, shape).astype(dtype) for r in range(n)}
    return {r: (rng.normal(size=shape) * 4.0 ** rng.integers(-3, 3, shape)).astype(dtype) for r in range(n)}


def collective(kind: str, n: int, shapes: Any, results: Any, **params: Any) -> ReshardPlan:
    shapes, results = (tuple(x) if isinstance(x, list) else (x,) for x in (shapes, results))
    return CollectivePlan(n, Collective(kind, (0,), (tuple(range(n)),), shapes, results, tuple(params.items())))


def same(got: np.ndarray, want: np.ndarray) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(want).tobytes()


def cut(n: int, length: int) -> tuple[int, ...]:
    """Uneven parts, some empty."""
    return tuple(length * (i + 1) * (i + 2) // (n * (n + 1)) - length * i * (i + 1) // (n * (n + 1)) for i in range(n))


# ----- one case for each collective: a plan, what ranks hold, what they get -------------------------------------------


def all_reduce(n: int, length: int = 5) -> tuple[ReshardPlan, dict[int, np.ndarray], dict[int, np.ndarray]]:
    x = values(n, (length, 3))
    whole = in_order(list(x.values()), np.add)
    return collective("all_reduce", n, (length, 3), (length, 3), op="sum"), x, dict.fromkeys(x, whole)


def reduce_scatter(n: int, length: int = 37) -> tuple[ReshardPlan, dict[int, np.ndarray], dict[int, np.ndarray]]:
    x, lengths = values(n, (2, length)), cut(n, length)
    parts = np.split(in_order(list(x.values()), np.add), np.cumsum(lengths)[:-1], axis=1)
    plan = collective("reduce_scatter", n, (2, length), [p.shape for p in parts], op="sum", dim=1, lengths=lengths)
    return plan, x, dict(enumerate(parts))


def all_gather(n: int, length: int = 37) -> tuple[ReshardPlan, dict[int, np.ndarray], dict[int, np.ndarray]]:
    whole, lengths = values(1, (2, length))[0], cut(n, length)
    x = dict(enumerate(np.split(whole, np.cumsum(lengths)[:-1], axis=1)))
    return collective("all_gather", n, [b.shape for b in x.values()], (2, length), dim=1), x, dict.fromkeys(x, whole)


def broadcast(n: int, length: int = 5) -> tuple[ReshardPlan, dict[int, np.ndarray], dict[int, np.ndarray]]:
    x = values(n, (length,))
    return collective("broadcast", n, (length,), (length,), source=n // 2), x, dict.fromkeys(x, x[n // 2])


def exchanged(n: int, matrix: np.ndarray) -> tuple[ReshardPlan, dict[int, np.ndarray], dict[int, np.ndarray]]:
    x = {r: np.random.default_rng(r).normal(size=(int(matrix[r].sum()), 2)) for r in range(n)}
    parts = [np.split(x[r], np.cumsum(matrix[r])[:-1]) for r in range(n)]
    want = {r: np.concatenate([parts[q][r] for q in range(n)]) for r in range(n)}
    sizes = SplitSizes.matrix([tuple(map(int, row)) for row in matrix])
    shapes, results = [b.shape for b in x.values()], [b.shape for b in want.values()]
    return collective("all_to_all", n, shapes, results, split_dim=0, concat_dim=0, sizes=sizes), x, want


def all_to_all(n: int, length: int = 2) -> tuple[ReshardPlan, dict[int, np.ndarray], dict[int, np.ndarray]]:
    matrix = np.random.default_rng(n).integers(1, 2 * length, (n, n))
    matrix[n // 3] = 0  # nothing from one
    return exchanged(n, matrix)


def gather(n: int, length: int = 2) -> tuple[ReshardPlan, dict[int, np.ndarray], dict[int, np.ndarray]]:
    """To one: an all-to-all where nobody else gets anything."""
    matrix = np.zeros((n, n), int)
    matrix[:, n // 2] = length
    return exchanged(n, matrix)


def scatter(n: int, length: int = 2) -> tuple[ReshardPlan, dict[int, np.ndarray], dict[int, np.ndarray]]:
    matrix = np.zeros((n, n), int)
    matrix[n // 2] = length
    return exchanged(n, matrix)


def permute(n: int, length: int = 5) -> tuple[ReshardPlan, dict[int, np.ndarray], dict[int, np.ndarray]]:
    x = values(n, (length,))
    pairs = tuple((i, (i + 3) % n) for i in range(n))
    return collective("permute", n, (length,), (length,), pairs=pairs), x, {d: x[s] for s, d in pairs}


CASES = [all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, gather, scatter, permute]


@pytest.mark.parametrize("only", [None, *Ways._fields])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_every_number_of_processes_by_every_algorithm(case, only, monkeypatch):
    """The same bits on all ranks, whatever carries it out, in whatever order messages come."""
    monkeypatch.setattr(schedule, "COSTS", COSTS._replace(only=only))
    for n in COUNTS if only is None else (3, 4, 7, 13, 33):
        plan, x, want = case(n)
        got, _ = simulate(plan, range(n), x, seed=n)
        assert got.keys() == want.keys()
        for r in want:
            same(got[r], want[r])


@pytest.mark.parametrize("n", [24, 32, 33, 70])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_few_bytes_take_a_number_of_messages_that_grows_with_the_digits(case, n):
    plan, x, _ = case(n)
    _, traffic = simulate(plan, range(n), x)
    assert max(traffic.messages.values()) <= 2 * depth(n)
    assert traffic.rounds <= depth(n)


def planned(plan: ReshardPlan, n: int, process: int) -> int:
    """Messages that a process sends."""
    found = schedule.plan_rounds(plan, tuple(range(n)), process, np.dtype("f4"), False)
    relayed = sum(bool(r.sent) for r in found.relayed.rounds) if found.relayed else 0
    combined = sum(len(level.sends) for c in found.combined for level in c.share.levels)
    return relayed + combined + len({s.process for s in found.sends})


@pytest.mark.parametrize(
    "plan",
    [
        collective("all_reduce", 1024, (16,), (16,), op="sum"),
        collective("reduce_scatter", 1024, (1024,), (1,), op="sum", dim=0, lengths=(1,) * 1024),
        collective("all_gather", 1024, (1,), (1024,), dim=0),
        collective("broadcast", 1024, (16,), (16,), source=77),
    ],
    ids=lambda p: p._c.kind,
)
def test_sixty_four_bytes_on_a_thousand_ranks(plan):
    for process in (0, 700):
        assert planned(plan, 1024, process) <= 2 * 10


def test_a_thousand_ranks_all_reduce():
    n = 1024
    plan, x, want = all_reduce(n)
    got, traffic = simulate(plan, range(n), x)
    for r in range(0, n, 11):
        same(got[r], want[r])
    assert max(traffic.messages.values()) == 10


@pytest.mark.parametrize("n", [3, 8, 13, 32, 33, 64, 70])
def test_many_bytes_are_sent_twice_at_most(n):
    """An all-reduce sends 2 (n-1)/n of the block, a reduce-scatter half of that: as a ring. By a tree of another number
    of processes than a power of two, some send for two."""
    size, some = 1 << 18, 1.4 if n > 16 and n & (n - 1) else 1.0
    x = values(n, (size,))
    _, traffic = simulate(collective("all_reduce", n, (size,), (size,), op="sum"), range(n), x)
    assert max(traffic.nbytes.values()) <= some * 2 * 4 * size * (n - 1) / n + 4 * 64 * 2 * n
    lengths = tuple(size // n + (i < size % n) for i in range(n))
    plan = collective("reduce_scatter", n, (size,), [(k,) for k in lengths], op="sum", dim=0, lengths=lengths)
    _, traffic = simulate(plan, range(n), x)
    assert max(traffic.nbytes.values()) <= some * 4 * size * (n - 1) / n + 4 * n
    # A broadcast of much: parts to all, which are then gathered.
    _, traffic = simulate(collective("broadcast", n, (size,), (size,), source=1), range(n), x)
    assert max(traffic.nbytes.values()) <= 2 * 4 * size + 4 * 64 * n


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["sum", "prod", "max", "min", "any", "all"])
def test_every_reduction_of_every_dtype(op, dtype, monkeypatch):
    if (dtype == "?") != (op in ("any", "all")) or (dtype[0] == "c" and op in ("max", "min")):
        pytest.skip("not a reduction of these")
    for n in (2, 3, 5, 8, *([21] if dtype in ("?", "i4", "bfloat16", "f4") else [])):
        x = values(n, (4, 5), dtype)
        wide = x[0].dtype.kind in "fV" and x[0].dtype.itemsize < 4
        terms = [b.astype("f4") if wide else b for b in x.values()]
        want = in_order(terms, REDUCERS[op]).astype(x[0].dtype)
        for only in (None, *Ways._fields):
            monkeypatch.setattr(schedule, "COSTS", COSTS._replace(only=only))
            got, _ = simulate(collective("all_reduce", n, (4, 5), (4, 5), op=op), range(n), x)
            for r in range(n):
                same(got[r], want)


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
def test_infinities_nans_and_negative_zeros(op, monkeypatch):
    kinds = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.5, -2.0])
    for n in (3, 7, 20):
        rng = np.random.default_rng(n)
        x = {r: rng.choice(kinds, 300) for r in range(n)}
        for r in x:
            x[r][:3] = -0.0  # all of them
        with np.errstate(all="ignore"):
            want = in_order(list(x.values()), REDUCERS[op])
            for only in (None, *Ways._fields):
                monkeypatch.setattr(schedule, "COSTS", COSTS._replace(only=only))
                got, _ = simulate(collective("all_reduce", n, (300,), (300,), op=op), range(n), x)
                for r in range(n):
                    np.testing.assert_array_equal(got[r], want)
                    np.testing.assert_array_equal(np.signbit(got[r][want == 0]), np.signbit(want[want == 0]))


@pytest.mark.parametrize("only", [None, *Ways._fields])
@pytest.mark.parametrize(
    ("sizes", "homes"),
    [
        ((12,), [r // 2 for r in range(12)]),
        ((12,), [r // 5 for r in range(12)]),
        ((12,), [r % 5 for r in range(12)]),
        ((9,), [0, 1, 1, 2, 0, 3, 3, 1, 0]),
        ((4, 6), [r // 4 for r in range(24)]),
        ((4, 6), list(range(24))),
        ((3, 2, 4), [r // 2 for r in range(24)]),
    ],
    ids=str,
)
def test_reshards_of_any_placement_of_ranks_have_the_bits_of_one_process(sizes, homes, only, monkeypatch):
    """Sums pending on some axes while others are sharded or replicated; processes with several ranks, and ranks out of
    order."""
    n, shape = math.prod(sizes), (13, 8)
    last = len(sizes) - 1
    pairs = [
        (make_layout({}, {0: "sum"}), Layout()),
        (make_layout({}, {last: "sum"}), make_layout({0: [last]})),
        (make_layout({}, dict.fromkeys(range(len(sizes)), "sum")), Layout()),
        (make_layout({0: [0]}), Layout()),
        (make_layout({0: [0]}), make_layout({1: [0]})),
        (make_layout({0: [last]}), make_layout({1: [last]})),
        (make_layout({0: [last], **({} if last == 0 else {1: [0]})}), make_layout({1: [last]})),
    ]
    if last:
        pairs += [
            (make_layout({0: [1]}, {0: "sum"}), make_layout({0: [1]})),
            (make_layout({0: [1]}, {0: "sum"}), make_layout({0: [0, 1]})),
            (make_layout({1: [1]}, {0: "sum"}), make_layout({0: [0]})),
        ]
    for a, b in pairs:
        x = {}
        for r in range(n):
            coords = np.unravel_index(r, sizes)
            term = [int(coords[axis]) for axis, _ in a.partials]
            whole = np.random.default_rng([1, *term]).normal(size=shape)
            x[r] = np.ascontiguousarray(whole[block_box(a, sizes, shape, r).slices])
        plan = plan_reshard(shape, sizes, a, b)
        monkeypatch.setattr(schedule, "COSTS", COSTS)
        want, _ = simulate(plan, [0] * n, x)
        monkeypatch.setattr(schedule, "COSTS", COSTS._replace(only=only))
        got, _ = simulate(plan, homes, x)
        for r in range(n):
            same(got[r], want[r])


def test_what_crosses_hosts_is_a_small_part():
    """Eight processes a host, four hosts: of a halved block an eighth leaves the host for each process."""
    n, size = 32, 1 << 15
    plan, x = collective("all_reduce", n, (size,), (size,), op="sum"), values(32, (1 << 15,))
    found = schedule.plan_rounds(plan, tuple(range(n)), 5, np.dtype("f4"), False, hosts=4)
    (c,) = found.combined
    away = sum(b - a for level in c.share.levels for q, _, runs in level.sends if q // 8 != 5 // 8 for a, b in runs)
    assert c.share.back
    assert away == size // 8 * 3 // 4
    assert len(x) == n


def test_the_constants_choose_direct_ways_for_few_and_trees_for_many():
    best = lambda *args, **kwargs: COSTS.best(COSTS.reduction(*args, **kwargs))  # noqa: E731
    assert [best(n, 64) for n in (2, 4, 8, 64, 1024)] == ["direct", "direct", "doubling", "doubling", "doubling"]
    assert [best(n, 64 << 20) for n in (2, 4, 8)] == ["scattered", "scattered", "halving"]
    assert best(1024, 1 << 20) == best(64, 1 << 20, hosts=8) == "halving"
    assert best(2, 1 << 20) == "direct"


def test_traffic_is_counted():
    plan, x, _ = permute(5)
    assert simulate(plan, range(5), x)[1] == Traffic(
        messages=dict.fromkeys(range(5), 1), nbytes=dict.fromkeys(range(5), 20), rounds=1
    )
