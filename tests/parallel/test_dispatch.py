"""Rows on their way to the ranks of their experts: uneven and empty parts, the way back, what is counted, in one
process and in two."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
from distributed import Client

import meshtape as mt
from meshtape.parallel.base.device_memory import HOST
from meshtape.parallel.resharding.expert_all_to_all import AllToAllV

rng = np.random.default_rng(0)
ROWS = {"expert": mt.Shard(0)}


def test_rows_go_where_the_table_says_and_come_back():
    """The asymmetric case: three ranks send [1,2,0], [0,1,3] and [2,0,0] rows; a row is (rank, number)."""
    table = np.array([[1, 2, 0], [0, 1, 3], [2, 0, 0]])
    forth = AllToAllV((0,), ((0, 1, 2),), False, 0, 0)
    sent = {r: np.array([(r, i) for i in range(n)]).reshape(n, 2) for r, n in enumerate(table.sum(1))}

    def move(what: AllToAllV, blocks: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        running = what.share((0, 0, 0), 0).running(blocks, dict.fromkeys(range(3), table), HOST)
        assert list(running.rounds()) == [({}, {})]  # all is here
        return running.results()

    got = move(forth, sent)
    assert [g.tolist() for g in got.values()] == [
        [[0, 0], [2, 0], [2, 1]],
        [[0, 1], [0, 2], [1, 0]],
        [[1, 1], [1, 2], [1, 3]],
    ]
    back = move(forth._replace(back=True), got)
    for r, block in sent.items():
        np.testing.assert_array_equal(back[r], block)


def test_processes_name_each_other_just_for_parts_that_are_not_empty():
    """Both sides of a message know its length, and that there is one, from the table."""
    table = np.array([[1, 0, 2], [0, 0, 0], [3, 0, 1]])
    what, homes = AllToAllV((0,), ((0, 1, 2),), False, 0, 0), (0, 1, 2)
    seen = {}
    for process in homes:
        blocks = {process: np.zeros((int(table[process].sum()), 2))}
        ((sends, receives),) = what.share(homes, process).running(blocks, {process: table}, HOST).rounds()
        for peer, batches in sends.items():
            seen["sent", process, peer] = [a.shape for (a,) in batches]
        for peer, sinks in receives.items():
            seen["got", peer, process] = [s.shape for s in sinks]
    pairs = {(0, 2): [(2, 2)], (2, 0): [(3, 2)]}
    assert seen == {(w, *pair): shape for w in ("sent", "got") for pair, shape in pairs.items()}


def test_what_is_shown_is_the_mean_over_all_choices_and_never_exceeded():
    """Six experts on four ranks (2, 2, 2, 0) and two choices a row: the rows that cross, counted for every choice there
    is."""
    mesh, experts, rows = mt.Mesh({"expert": 4}), 6, 8
    owner = [e // 2 for e in range(experts)]
    pairs = list(itertools.permutations(range(experts), 2))
    rank_of_row = [r // 2 for r in range(rows)]
    crossing = np.mean([sum(len({owner[a], owner[b]} - {r}) for r in rank_of_row) for a, b in pairs])
    w = mt.distribute(mt.ones((experts, 3, 5)), mesh, **ROWS)
    down = mt.distribute(mt.ones((experts, 5, 3)), mesh, **ROWS)
    x, weights = mt.distribute(mt.ones((rows, 3)), mesh, **ROWS), mt.distribute(mt.ones((rows, 2)), mesh, **ROWS)
    chosen = mt.distribute(np.zeros((rows, 2), np.int64), mesh, **ROWS)
    text = mt.explain(lambda *a: mt.nn.experts(*a[:3], gate=a[3], up=a[3], down=a[4]), x, chosen, weights, w, down)
    line = next(x for x in text.splitlines() if "ragged_all_to_all" in x)
    row, most = 3 * 8, rows * 2
    assert f"# {round(crossing) * row} bytes where all are chosen alike, {most * row} at most" in line


def operands(rows: int, experts: int, kind: str, dtype: type = np.float64) -> tuple[list[np.ndarray], np.ndarray]:
    """Rows, weights and the matrices of networks; and who goes where."""
    shapes = [(rows, 4), (rows, 2), (experts, 4, 3), (experts, 4, 3), (experts, 3, 4)]
    chosen = {
        "random": rng.integers(0, experts, (rows, 2)),
        "one": np.full((rows, 2), experts - 1),
        "none": np.full((rows, 2), experts),
    }[kind]
    return [rng.normal(size=s).astype(dtype) for s in shapes], chosen


def networks(x, weights, gate, up, down, chosen):
    return mt.nn.experts(x, chosen, weights, gate=gate, up=up, down=down)


def loss(x, weights, gate, up, down, chosen):
    return mt.sum(mt.sin(networks(x, weights, gate, up, down, chosen)))


ALL = (0, 1, 2, 3, 4)


@pytest.mark.parametrize("kind", ["random", "one", "none"])
def test_two_processes_equal_one(processes: Client, kind: str):
    """Uneven parts, a rank without rows of its own (1 over 2), all rows to one rank, and none to any."""
    step = mt.compile(lambda *a: mt.value_and_grad(loss, argnums=ALL)(*a))
    with mt.Mesh({"expert": 2}, client=processes) as mesh:
        for rows in (1, 7):
            arrays, chosen = operands(rows, 3, kind)
            value, grads = mt.value_and_grad(loss, argnums=ALL)(*map(mt.asarray, arrays), mt.asarray(chosen))
            found, theirs = step(*(mt.distribute(a, mesh, **ROWS) for a in (*arrays, chosen)))
            np.testing.assert_allclose(float(found), float(value), rtol=1e-12)
            for a, b in zip(grads, theirs, strict=True):
                np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-10, atol=1e-12)


def test_what_was_sent_forward_is_there_for_the_backward_pass():
    """Rows, choices and weights travel once; then sums, their cotangents, and the gradients of rows and weights: 3 + 1
    + 1 + 2."""
    mesh = mt.Mesh({"expert": 2})
    arrays, chosen = operands(8, 4, "random")
    put = [mt.distribute(a, mesh, **ROWS) for a in (*arrays, chosen)]
    text = mt.explain(lambda *a: mt.value_and_grad(loss, argnums=ALL)(*a), *put)
    assert text.count("= ragged_all_to_all") == 7, text
    assert text.count("= route(") == 1
    assert text.count("= all_gather") == 1  # the counts


def test_derivatives_of_higher_order():
    mesh = mt.Mesh({"expert": 2})
    arrays, chosen = operands(5, 3, "random")
    tangents = tuple(mt.asarray(rng.normal(size=a.shape)) for a in arrays)

    def product(*a):
        return mt.jvp(mt.grad(lambda *p: loss(*p, chosen), argnums=ALL), a, tangents)[1]

    want = product(*map(mt.asarray, arrays))
    found = product(*(mt.distribute(a, mesh, **ROWS) for a in arrays))
    for a, b in zip(want, found, strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("axes", [{"data": 2, "expert": 2}, {"expert": 2, "model": 2}])
def test_beside_other_axes(axes: dict[str, int]):
    """Groups of the expert axis exchange rows apart; hidden units that are split leave a pending sum."""
    mesh = mt.Mesh(axes)
    arrays, chosen = operands(9, 4, "random")
    rows = {a: mt.Shard(0) for a in axes if a != "model"}
    hidden = {"model": mt.Shard(2)} if "model" in axes else {}
    back = {"model": mt.Shard(1)} if "model" in axes else {}
    where = [rows, rows, ROWS | hidden, ROWS | hidden, ROWS | back, rows]
    put = [mt.distribute(a, mesh, **s) for a, s in zip((*arrays, chosen), where, strict=True)]
    want = mt.value_and_grad(loss, argnums=ALL)(*map(mt.asarray, arrays), mt.asarray(chosen))
    found = mt.value_and_grad(loss, argnums=ALL)(*put)
    for a, b in zip(mt.tree.flatten(want)[0], mt.tree.flatten(found)[0], strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-10, atol=1e-12)
    assert "ragged_all_to_all(expert)" in mt.explain(networks, *put)


def test_sums_of_few_bits_are_made_in_float32():
    """A row with one expert on each of two ranks: the halves come back in bfloat16, and are added in float32 and
    rounded once."""
    mesh = mt.Mesh({"expert": 2})
    arrays, chosen = operands(6, 4, "random")
    arrays = [np.asarray(mt.astype(mt.asarray(a), mt.bfloat16)) for a in arrays]
    want = networks(*map(mt.asarray, arrays), mt.asarray(chosen))
    found = networks(*(mt.distribute(a, mesh, **ROWS) for a in (*arrays, chosen)))
    assert found.dtype == want.dtype
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(want, np.float32), rtol=2e-2, atol=2e-2)
