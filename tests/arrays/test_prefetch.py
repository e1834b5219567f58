"""``mt.prefetch``: order, bounds, errors and endings; and the book of memory that must not be taken back too early."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.prefetch import Lent, pieces

LIMIT = 200.0


def until(condition: Any) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.005)


def test_items_come_in_order_as_trees_of_arrays() -> None:
    items = [{"x": np.full((2, 3), i, np.float32), "y": (mt.asarray(i), "text", None)} for i in range(20)]
    got = list(mt.prefetch(items, depth=3))
    assert [float(g["x"][0, 0]) for g in got] == list(range(20))
    assert all(isinstance(g["x"], mt.Array) and g["x"].dtype == mt.float32 for g in got)
    assert all(g["y"][1:] == ("text", None) and int(g["y"][0]) == i for i, g in enumerate(got))


def test_a_source_may_use_its_memory_again() -> None:
    block = np.zeros(4)

    def source() -> Iterator[np.ndarray]:
        for i in range(10):
            block[:] = i
            yield block

    assert [x.tolist() for x in mt.prefetch(source(), depth=4)] == [[i] * 4 for i in range(10)]


@pytest.mark.parametrize("depth", [1, 3])
def test_it_runs_ahead_but_not_further_than_the_depth(depth: int) -> None:
    made = []

    def source() -> Iterator[int]:
        for i in range(100):
            made.append(i)
            yield i

    with mt.prefetch(source(), depth=depth) as items:
        until(lambda: len(made) == depth + 1)  # those that are ready, and one that waits for room
        time.sleep(0.2)
        assert len(made) == depth + 1
        next(items)
        until(lambda: len(made) == depth + 2)
    assert len(made) <= depth + 3


def test_errors_are_raised_in_their_place() -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise RuntimeError("the disk is gone")

    items = mt.prefetch(source())
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(RuntimeError, match="the disk is gone"):
        next(items)
    with pytest.raises(StopIteration):
        next(items)
    with pytest.raises(TypeError):
        next(mt.prefetch(5))  # type: ignore[arg-type]
    with pytest.raises(mt.errors.DTypeError):
        next(mt.prefetch([np.array(["a"])]))


def threads() -> int:
    return sum(t.name == "meshtape-prefetch" for t in threading.enumerate())


def test_closing_ends_the_thread_and_the_source() -> None:
    ended = []

    def source() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            ended.append(threading.current_thread().name)

    with mt.prefetch(source()) as items:
        assert next(items) == 0
    assert ended == ["meshtape-prefetch"]
    assert list(items) == []
    items.close()
    until(lambda: threads() == 0)


def test_letting_go_of_it_ends_the_thread_too() -> None:
    items = mt.prefetch(iter(range(1000)))
    assert next(items) == 0
    del items
    gc.collect()
    until(lambda: threads() == 0)


def test_the_source_runs_beside_the_consumer() -> None:
    """Each waits for the other to have begun: one after the other would never end."""
    first, second = threading.Event(), threading.Event()

    def source() -> Iterator[int]:
        yield 0
        first.set()
        assert second.wait(LIMIT)
        yield 1

    items = mt.prefetch(source())
    assert next(items) == 0
    assert first.wait(LIMIT)
    second.set()
    assert list(items) == [1]


def test_arguments() -> None:
    before = threads()  # of earlier tests, which are about to end
    with pytest.raises(ValueError, match=r"\[prefetch\] depth"):
        mt.prefetch([], depth=0)
    with pytest.raises(ValueError, match=r"\[prefetch\] staging_bytes"):
        mt.prefetch([], staging_bytes=1)
    with pytest.raises(mt.errors.DeviceError):
        mt.prefetch([], device="tpu")
    if len(mt.devices()) == 1:
        with pytest.raises(mt.errors.BackendError):
            mt.prefetch([], device="cuda:0")
    assert threads() <= before
    assert list(mt.prefetch([])) == []


def test_on_a_cpu_it_imports_no_cupy() -> None:
    code = "import sys, meshtape as mt; assert list(mt.prefetch([1, 2])) == [1, 2]; assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT)


# ----- memory ---------------------------------------------------------------------------------------------------------


def test_memory_comes_back_when_nobody_else_holds_it() -> None:
    lent = Lent(sys.getrefcount)
    a, b = (lent.hand_out(lambda: np.zeros(3)) for _ in range(2))
    assert lent.come_back() == []
    view = a[1:]
    where = a.ctypes.data
    del a
    assert lent.come_back() == []  # the view holds it
    kept = [view]
    del view
    assert lent.come_back() == []
    kept.clear()
    (back,) = lent.come_back()
    assert back.ctypes.data == where
    assert len(lent) == 1
    del b
    assert len(lent.come_back()) == 1
    assert len(lent) == 0


def test_an_array_made_of_lent_memory_holds_it() -> None:
    lent = Lent(sys.getrefcount)
    x = mt.arrays.core.dispatch.wrap(lent.hand_out(lambda: np.zeros(3)))
    y = x[1:]
    assert lent.come_back() == []
    x[0] = 5.0  # on memory of its own from here on
    assert lent.come_back() == []
    del y
    assert len(lent.come_back()) == 1
    assert x.tolist() == [5.0, 0.0, 0.0]


@pytest.mark.parametrize(("nbytes", "size"), [(0, 4), (3, 4), (4, 4), (9, 4), (100, 7)])
def test_pieces_cover_each_byte_once(nbytes: int, size: int) -> None:
    found = list(pieces(nbytes, size))
    assert all(0 < n <= size for _, n in found)
    assert [i for start, n in found for i in range(start, start + n)] == list(range(nbytes))


WAYS = {
    "grad": mt.grad,
    "compiled": lambda f: mt.compile(mt.grad(f)),
    "checkpoint": lambda f: mt.grad(mt.checkpoint(f)),
    "jvp": lambda f: lambda v: mt.jvp(f, [v], [mt.ones_like(v)])[1],
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_differentiated_is_computed_with_in_its_own_thread(way: str) -> None:
    """No tape sees the thread of the items: what is computed there would be a constant to it."""

    def total(make: Any, use: Any) -> Any:
        def loss(v: mt.Array) -> mt.Array:
            with mt.prefetch(make(v, i) for i in range(3)) as items:
                return sum((mt.sum(use(v, item)) for item in items), mt.asarray(0.0))

        return WAYS[way](loss)(mt.asarray([1.0, 2.0]))

    for make in (lambda v, i: v * float(i), lambda v, i: {"x": mt.sin(v)}["x"] + i, lambda v, i: np.asarray(v) + i):
        with pytest.raises((mt.errors.GradientError, mt.errors.TracedValueError)):
            total(make, lambda v, item: item)
    for make in (lambda v, i: np.full(2, i), lambda v, i: mt.full((2,), i) * 1.0):
        assert float(mt.sum(total(make, lambda v, item: v * item))) == 6.0
    assert float(mt.sum(total(lambda v, i: v, lambda v, item: item * v))) == 3 * 2 * 3.0  # handed on, not computed with
