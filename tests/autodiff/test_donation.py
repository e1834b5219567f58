"""Arguments that a compiled function may write to: the caller's arrays are given up, and nobody else's memory
changes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import meshtape as mt

N = 40_000
"""Numbers of an array that is large enough for its memory to be used again."""


def step(w: mt.Array, g: mt.Array) -> mt.Array:
    return w - 0.5 * g


def test_what_was_given_up_is_gone_and_says_so() -> None:
    run = mt.compile(step, donate=0)
    w, g = mt.ones(N), mt.ones(N)
    out = run(w, g)
    np.testing.assert_array_equal(np.asarray(out), np.full(N, 0.5))
    assert (w.shape, w.dtype, g[0].item()) == ((N,), np.float64, 1.0)  # the other argument is whole
    for use in (
        lambda: w + 1.0,
        lambda: w[0],
        lambda: np.asarray(w),
        lambda: mt.sum(w),
        lambda: run(w, g),
        lambda: float(w[0]),
        lambda: mt.compile(lambda a: a * 2.0)(w),
        lambda: mt.compile(lambda a, b: a + mt.sum(b), donate=1)(w, g),
    ):
        with pytest.raises(mt.errors.DonatedArrayError, match=r"float64\[40000\].*given up to step"):
            use()
    with pytest.raises(RuntimeError, match="given up"):
        mt.grad(lambda w: (w * 2.0).sum())(w)
    w = mt.zeros(3)  # the name is free
    assert repr(run(w, mt.ones(3))) == "Array([-0.5, -0.5, -0.5], dtype=float64)"


def test_a_step_holds_one_generation(peak_of: Any) -> None:
    run = mt.compile(lambda w, g: (w - g.sum(), g), donate=0)
    w, g = mt.ones(400_000), mt.ones(4)

    def step() -> None:
        nonlocal w, g
        w, g = run(w, g)

    assert peak_of(step) < 1_000_000  # of 3.2 MB
    assert (1.0 - float(w[0])) % 4.0 == 0.0 < 1.0 - float(w[0])


SHARED: dict[str, Any] = {
    "a view": lambda w: w[::2],
    "a part of a tree": lambda w: mt.reshape(w, (2, -1)),
    "a copy of the object": lambda w: w.__copy__(),
    "NumPy": lambda w: np.asarray(w),
    "DLPack": lambda w: np.from_dlpack(w),
    "the buffer": lambda w: w._buf,
}


@pytest.mark.parametrize("name", SHARED)
def test_memory_that_others_see_stays_as_it_was(name: str) -> None:
    w = mt.asarray(np.arange(float(N)))
    other = SHARED[name](w)
    before = np.array(other)
    out = mt.compile(lambda w: w * 3.0 + 1.0 - w.sum(), donate=0)(w)
    np.testing.assert_array_equal(np.asarray(other), before)
    np.testing.assert_allclose(np.asarray(out), np.arange(N) * 3.0 + 1.0 - np.arange(N).sum())


@pytest.mark.parametrize("view", [lambda w: w[N:], lambda w: mt.reshape(w, (2, N))], ids=["a part", "another shape"])
def test_a_view_that_is_given_up_leaves_what_it_is_of(view: Any) -> None:
    w = mt.asarray(np.arange(2.0 * N))
    part = view(w)
    expected = np.asarray(part) * 3.0 + 1.0
    out = mt.compile(lambda v: v * 3.0 + 1.0, donate=0)(part)
    np.testing.assert_array_equal(np.asarray(out), expected)
    np.testing.assert_array_equal(np.asarray(w), np.arange(2.0 * N))


def test_of_numpy_memory_a_copy_is_made() -> None:
    host = np.ones(N)
    out = mt.compile(step, donate=(0, 1))(host, host)
    assert (host[0], float(out[0])) == (1.0, 0.5)
    frozen = np.ones(N)
    frozen.flags.writeable = False
    assert float(mt.compile(lambda x: x + x.sum(), donate=0)(mt.asarray(frozen))[0]) == N + 1
    assert frozen[0] == 1.0


def test_one_array_as_two_arguments() -> None:
    x = mt.ones(N)
    out = mt.compile(lambda a, b: (a - b.sum(), a + b), donate=0)(x, x)
    assert (float(out[0][0]), float(out[1][0])) == (1.0 - N, 2.0)
    y = mt.ones(N)
    out = mt.compile(lambda a, b: (a * 2.0 - 1.0 + b.sum(), b), donate=(0, 1))(y, y)
    assert (float(out[0][0]), float(out[1][0])) == (1.0 + N, 1.0)


def test_what_is_read_later_or_returned_is_not_written_to() -> None:
    run = mt.compile(lambda a: (a, a + 1.0, a[2:4], a * 2.0 - a.sum()), donate=0)
    same, more, part, last = run(mt.asarray(np.arange(float(N))))
    assert (float(same[3]), float(more[3]), part.tolist()) == (3.0, 4.0, [2.0, 3.0])
    assert float(last[1]) == 2.0 - np.arange(N).sum()
    # A view of an argument outlives the write.
    run = mt.compile(lambda a: (a[1:], a - a.max()), donate=0)
    view, low = run(mt.asarray(np.arange(float(N))))
    assert (float(view[0]), float(low[0])) == (1.0, 1.0 - N)


def test_trees_of_arguments_and_static_ones() -> None:
    def update(params: Any, state: Any, rate: float, names: tuple[str, ...]) -> Any:
        return mt.tree_map(lambda p, s: p - rate * s, params, state), mt.tree_map(lambda s: s * 0.5, state)

    run = mt.compile(update, donate=(0, 1))
    p, s = {"a": mt.ones(N), "b": [mt.ones((2, N)), None]}, {"a": mt.ones(N), "b": [mt.ones((2, N)), None]}
    for _ in range(3):
        p, s = run(p, s, 0.5, ("x",))
    assert (float(p["b"][0][1, 7]), float(s["a"][3])) == (0.125, 0.125)
    assert run.signatures == 1


def test_nothing_is_given_up_where_a_tape_watches_and_inside_another_program() -> None:
    run = mt.compile(step, donate=0)
    w, g = mt.ones(N), mt.ones(N)
    assert float(mt.grad(lambda w: run(w, g).sum())(w)[0]) == 1.0
    outer = mt.compile(lambda w: (run(w, w), w))
    assert float(outer(w)[0][0]) == 0.5
    assert float(w.sum()) == N
    with mt.detect_anomaly():
        run(w, g)
    assert float(w.sum()) == N


def test_positions_that_are_none() -> None:
    for bad in (-1, (0, -2), "0", True, 1.5):
        with pytest.raises((ValueError, TypeError)):
            mt.compile(step, donate=bad)
    with pytest.raises(ValueError, match="donates its argument 2, and got 2"):
        mt.compile(step, donate=2)(mt.ones(3), mt.ones(3))
    with pytest.raises(ValueError, match="compiled already"):
        mt.compile(mt.compile(step), donate=0)
    w = mt.ones(3)
    with pytest.raises(mt.errors.ShapeError):
        mt.compile(step, donate=0)(w, mt.ones(4))
    assert w.tolist() == [1, 1, 1]  # refused before anything was taken


def test_arrays_on_a_mesh_are_whole_afterwards() -> None:
    mesh = mt.Mesh({"a": 2})
    w = mt.distribute(mt.ones(N), mesh, a=mt.Shard(0))
    out = mt.compile(step, donate=0)(w, w)
    assert (float(out[0]), float(w[0])) == (0.5, 1.0)


def test_threads_with_arrays_of_their_own() -> None:
    run = mt.compile(lambda w, k: w * 2.0 + k - w.max(), donate=0)
    found = {}

    def work(n: int) -> None:
        w = mt.full(N, float(n))
        for _ in range(20):
            w = run(w, mt.asarray(1.0))
        found[n] = float(w[5])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == {n: n + 20.0 for n in range(4)}
