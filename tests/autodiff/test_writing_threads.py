"""One thread writes to an array in place while others compute with it, record it and differentiate it.

Every write leaves the array with one number everywhere. So a value with two numbers was read in the middle of a write,
and a gradient that is not that of the value was recorded in the middle of one.
"""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest

import meshtape as mt
from meshtape import errors
from meshtape.arrays.core.array import new_id
from meshtape.arrays.interface import writing

SIZE = 5000
SECONDS = 0.15
ONES = mt.ones(SIZE)
EVERYWHERE = mt.arange(SIZE)


def whole(x, k):
    x[:] = float(k)


def masked(x, k):
    x[x > -1.0] = float(k)


def at_places(x, k):
    x[EVERYWHERE] = mt.full(SIZE, float(k))


def by_indices(x, k):
    x[np.arange(SIZE)] = float(k)


def added(x, k):
    x += 1.0


def multiplied(x, k):
    x *= 1.0 + (k % 2) if float(x[0]) < 1000.0 else 0.5


def replaced(x, k):
    x //= 1.0
    x[:] = float(k)


WRITERS = [whole, masked, at_places, by_indices, added, multiplied, replaced]


def uniform(a):
    a = np.asarray(a)
    assert np.all(a == a.flat[0]), "read in the middle of a write"
    return float(a.flat[0])


def read_eagerly(x):
    v = uniform(x * ONES)
    assert np.isfinite(v)


def read_as_numpy(x):
    uniform(x.numpy())
    uniform(np.asarray(x))
    x.tolist()


def read_a_view(x):
    y = x[1:-1]
    assert uniform(y) == uniform(y + 0.0)


def read_by_vjp(x):
    y, pull = mt.vjp(lambda x: x * x * x, x)
    v = uniform(mt.round(mt.sqrt(mt.sqrt(y) ** 2) ** (2 / 3)))
    np.testing.assert_allclose(uniform(y), v**3)
    np.testing.assert_allclose(uniform(pull(ONES)[0]), 3 * v * v)


def read_by_value_and_grad(x):
    loss, g = mt.value_and_grad(lambda x: (x * x).sum() + (x * 3.0).sum())(x)
    v = (uniform(g) - 3.0) / 2.0
    np.testing.assert_allclose(float(loss), SIZE * (v * v + 3 * v))


def read_around(x):
    """The array is not differentiated, but read inside, twice."""
    w = mt.asarray(2.0)
    loss, g = mt.value_and_grad(lambda w: (w * x).sum())(w)
    np.testing.assert_allclose(float(loss), 2 * float(g))


compiled = mt.compile(mt.value_and_grad(lambda x: (x * x).sum()))


def read_by_a_compiled_function(x):
    loss, g = compiled(x)
    np.testing.assert_allclose(float(loss), SIZE * (uniform(g) / 2) ** 2)


def read_by_checkpoint(x):
    loss, g = mt.value_and_grad(mt.checkpoint(lambda x: (x * x).sum()))(x)
    np.testing.assert_allclose(float(loss), SIZE * (uniform(g) / 2) ** 2)


def read_by_a_tape(x):
    with mt.Tape() as tape:
        tape.watch(x)
        y = x * x
        z = (y + 3.0 * x).sum()
    g = uniform(tape.gradient(z, x))
    v = (g - 3.0) / 2.0
    np.testing.assert_allclose(float(z), SIZE * (v * v + 3 * v))


def read_by_a_later_gradient(x):
    """Between the end of the tape and its backward pass anybody may write."""
    with mt.Tape() as tape:
        tape.watch(x)
        z = (x * x).sum()
    time.sleep(0)
    np.testing.assert_allclose(float(z), SIZE * (uniform(tape.gradient(z, x)) / 2) ** 2)


READERS = [v for k, v in list(globals().items()) if k.startswith("read_")]


@pytest.mark.parametrize(
    ("read", "write"),
    [*((r, whole) for r in READERS), *((r, w) for r in (read_by_vjp, read_by_a_tape) for w in WRITERS[1:])],
)
def test_values_and_gradients_are_those_before_or_after_a_write(read, write):
    """Or an error of ours in one of the threads."""
    x = mt.ones(SIZE)
    stop, wrong, made = threading.Event(), [], [0, 0]

    def write_on():
        k = 0
        while not stop.is_set():
            k = k % 1000 + 1
            try:
                write(x, k)
                made[0] += 1
            except errors.ConcurrentWriteError:
                pass
            except BaseException as e:
                wrong.append(e)
                raise

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=write_on)
    thread.start()
    try:
        end = time.monotonic() + SECONDS
        while made[1] < 1000 and time.monotonic() < end and not wrong:
            try:
                read(x)
                made[1] += 1
            except errors.ConcurrentWriteError:
                pass
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)
    assert not wrong
    assert made[0], "nothing was written"


# ----- one step after the other ---------------------------------------------------------------------------------------


def in_a_thread(fn):
    """What a function raised in a thread of its own."""
    found = []

    def run():
        try:
            fn()
        except BaseException as e:
            found.append(e)

    t = threading.Thread(target=run)
    t.start()
    t.join()
    return found[0] if found else None


@pytest.mark.parametrize("write", WRITERS)
def test_a_watched_array_is_not_written_by_another_thread(write):
    x = mt.ones(SIZE)
    with mt.Tape() as tape:
        tape.watch(x)
        y = x * x
        error = in_a_thread(lambda: write(x, 5))
        assert isinstance(error, errors.ConcurrentWriteError)
        assert "tape of another thread" in str(error)
        z = (y * x).sum()
    assert uniform(tape.gradient(z, x)) == 3.0
    assert in_a_thread(lambda: write(x, 5)) is None
    assert not writing.WATCHERS


@pytest.mark.parametrize("write", ["a row", "many elements", "in place"])
def test_no_write_of_several_threads_is_lost(write):
    """A pool of threads that fills the rows of one array is an ordinary program."""
    x, n, threads = mt.zeros((400, 50)), 400, 4
    barrier = threading.Barrier(threads)

    def fill(k):
        barrier.wait()
        for i in range(k, n, threads):
            if write == "a row":
                x[i] = float(i + 1)
            elif write == "many elements":
                x[mt.asarray([i, i])] = float(i + 1)
            else:
                x[i, :] = mt.full(50, float(i + 1))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        workers = [threading.Thread(target=fill, args=(k,)) for k in range(threads)]
        [w.start() for w in workers]
        [w.join() for w in workers]
    finally:
        sys.setswitchinterval(before)
    np.testing.assert_array_equal(np.asarray(x), np.broadcast_to(np.arange(1.0, 401.0)[:, None], (400, 50)))


def test_its_own_thread_may_write_to_a_watched_array():
    x = mt.ones(3)
    with mt.Tape() as tape:
        tape.watch(x)
        x[0] = 5.0
        z = (x * x).sum()
    assert tape.gradient(z, x).tolist() == [0.0, 2.0, 2.0]


def paused_write(x):
    """An array in the middle of a write of another thread, and the function that ends it."""
    x._buf = writing.Writing(x, buf := x._buf)

    def end():
        buf[...] = 7.0
        x._id = 0
        x._buf = buf

    return end


def test_who_needs_the_value_waits_for_the_end_of_the_write():
    for read in (
        lambda x: x + 1.0,
        lambda x: 1.0 + x,
        lambda x: x @ x,
        lambda x: mt.sin(x),
        lambda x: x[1:],
        lambda x: x[0],
        lambda x: x.numpy(),
        lambda x: np.asarray(x),
        lambda x: np.from_dlpack(x),
        lambda x: x.tolist(),
        lambda x: mt.grad(lambda x: (x * x).sum())(x),
        lambda x: mt.vjp(lambda x: x * x, x)[1](mt.ones(4))[0],
        lambda x: mt.compile(lambda x: x * 2.0)(x),
        lambda x: mt.compile(lambda x: x * 2.0, donate=0)(x),
        lambda x: mt.asarray(x, copy=True),
        lambda x: x.astype(mt.float32),
        lambda x: mt.concat([x, x]),
        lambda x: mt.where(x > 0, x, 0.0),
        lambda x: x.at[0].set(1.0),
        lambda x: x.sum(),
        lambda x: x.__setitem__(0, 7.0) or x,
        lambda x: x.__setitem__(x > 0, 7.0) or x,
        lambda x: mt.zeros(4).__setitem__(slice(None), x) or x,
        lambda x: x.__iadd__(1.0),
        lambda x: str(x),
        lambda x: mt.distribute(x, mt.Mesh({"a": 2}), a=mt.Shard(0)).numpy(),
        lambda x: x.to_dask().compute(scheduler="sync"),
        lambda x: x.device,
        lambda x: x.to_device("cpu"),
        lambda x: list(x),
        lambda x: x.mT if x.ndim > 1 else x[None].T,
    ):
        x = mt.ones(4)
        assert (x.shape, x.dtype, x.ndim, x.size, x.nbytes) == ((4,), np.float64, 1, 4, 32)
        end = paused_write(x)
        assert (x.shape, x.dtype, x.ndim, x.size, x.nbytes) == ((4,), np.float64, 1, 4, 32)
        timer = threading.Timer(0.002, end)
        timer.start()
        found = read(x)
        timer.join()
        np.testing.assert_array_equal(
            np.asarray(mt.asarray(read(mt.full(4, 7.0)))) if _number(found) else 0,
            np.asarray(mt.asarray(found)) if _number(found) else 0,
        )
        assert not any(type(getattr(a, "_buf", None)) is writing.Writing for a in (x, found))


def _number(found):
    return isinstance(found, mt.Array | np.ndarray | list) and not (
        isinstance(found, list) and isinstance(found[0], mt.Array)
    )


def test_a_write_that_is_broken_off_is_an_error(monkeypatch):
    monkeypatch.setattr(writing, "PATIENCE", 0.01)
    x = mt.ones(4)
    paused_write(x)
    for read in (
        lambda: x + 1.0,
        lambda: x.numpy(),
        lambda: x.__setitem__(0, 1.0),
        lambda: mt.grad(lambda x: x.sum())(x),
    ):
        with pytest.raises(errors.ConcurrentWriteError, match=r"shape \(4,\).*lock"):
            read()


def test_a_write_that_fails_leaves_the_array_as_it_was():
    x = mt.ones(4)
    for write in (
        lambda: x.__setitem__(9, 1.0),
        lambda: x.__setitem__(slice(None), mt.ones(3)),
        lambda: x.__setitem__([7], 1.0),
        lambda: x.__setitem__("a", 1.0),
        lambda: x.__iadd__(mt.ones(3)),
        lambda: x.__setitem__(0, 1j),
    ):
        with pytest.raises((IndexError, ValueError, TypeError)):
            write()
        assert x.tolist() == [1.0] * 4


def test_a_write_between_a_call_and_its_record_is_an_error(monkeypatch):
    """The recorder would keep another value than the one that was computed with."""
    x = mt.ones(4)

    class Writes(mt.Tape):
        def record(self, op, *rest):
            if op.name in ("multiply", "sin"):
                assert in_a_thread(lambda: x.__setitem__(0, 5.0)) is None
            super().record(op, *rest)

    for call in (lambda: x * x, lambda: mt.sin(x), lambda: x * 2.0, lambda: 2.0 * x, lambda: mt.multiply(x, x)):
        with Writes() as tape:
            tape.follow(new_id(x), x._buf)
            with pytest.raises(errors.ConcurrentWriteError, match="while a tape recorded"):
                call()


@pytest.mark.parametrize("size", [4, 1 << 17])
def test_an_array_that_nobody_shares_is_written_where_it_is(size):
    writes = (
        lambda x: x.__setitem__(0, 1.0),
        lambda x: x.__setitem__(slice(None), 2.0),
        lambda x: x.__setitem__(x > 1.0, 3.0),
        lambda x: x.__setitem__(mt.asarray([0, 1]), mt.asarray([4.0, 5.0])),
        lambda x: x.__setitem__([0, 1], 6.0),
        lambda x: x.__iadd__(1.0),
        lambda x: x.__imul__(mt.ones(size)),
    )
    for write in writes:
        x = mt.ones(size) * 1.0
        place = x._buf.ctypes.data
        write(x)
        write(x)
        assert x._buf.ctypes.data == place
        for hold in (
            lambda x: x[1:],
            lambda x: x.T if x.ndim > 1 else x[None],
            lambda x: np.asarray(x),
            lambda x: mt.asarray(x, copy=True),
        ):
            held = hold(x)
            before = np.array(held)
            write(x)
            assert x._buf.ctypes.data != place
            np.testing.assert_array_equal(np.asarray(held), before)
            place = x._buf.ctypes.data
