"""Arrays that are filled by writes in a loop: a gradient, or a compiled one, copies the whole array a fixed number of
times."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.indexing import indexing
from meshtape.autodiff.tape import backward

ROWS, WIDTH = 40, 8


def _by_item(a, x):
    for i in range(a.shape[0]):
        x[i] = 2.0 * a[i]
    return x


def _by_item_array(a, x):
    for i in range(a.shape[0]):
        x[[i]] = 2.0 * a[i]
    return x


def _by_mask(a, x):
    for i in range(a.shape[0]):
        x[np.arange(a.shape[0]) == i] = 2.0 * a[i : i + 1]
    return x


def _by_columns(a, x):
    for i in range(a.shape[1]):
        x[:, i] = 2.0 * a[:, i]
    return x


def _by_at(a, x):
    for i in range(a.shape[0]):
        x = x.at[i].set(2.0 * a[i])
    return x


def _by_recurrence(a, x):
    x[0] = a[0]
    for i in range(1, a.shape[0]):
        x[i] = 2.0 * a[i] + 0.5 * x[i - 1]
    return x


def _by_sines(a, x):
    x[0] = a[0]
    for i in range(1, a.shape[0]):
        x[i] = mt.sin(x[i - 1]) + a[i]
    return x


def _by_extrema(a, x):
    for i in range(a.shape[0]):
        x = x.at[i].max(2.0 * a[i]).at[i].min(5.0 * a[i])
    return x


def _overwritten(a, x):
    for _ in range(3):
        for i in range(a.shape[0]):
            x[i] = a[i] * (i + 1.0)
    return x


FILLED = (_by_item, _by_item_array, _by_mask, _by_columns, _by_at, _by_recurrence, _by_sines, _by_extrema, _overwritten)


def _loss(fill, start=None):
    def loss(a):
        x = mt.zeros(a.shape, dtype=a.dtype) if start is None else start * a
        x = fill(a, x)
        return (x * x * x).sum()

    return loss


def _numpy_gradient(loss, a, eps=1e-6):
    out = np.zeros_like(a)
    for i in np.ndindex(a.shape):
        step = np.zeros_like(a)
        step[i] = eps
        out[i] = (float(loss(mt.asarray(a + step))) - float(loss(mt.asarray(a - step)))) / (2 * eps)
    return out


@pytest.mark.parametrize("start", [None, 0.5], ids=["of zeros", "of watched values"])
@pytest.mark.parametrize("fill", FILLED)
def test_gradient_of_a_filled_array_is_right(fill, start):
    a = np.random.default_rng(0).uniform(0.5, 1.5, (5, 3))
    loss = _loss(fill, start)
    expected = _numpy_gradient(loss, a)
    x = mt.asarray(a)
    np.testing.assert_allclose(np.asarray(mt.grad(loss)(x)), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.asarray(mt.compile(mt.grad(loss))(x)), expected, rtol=1e-6, atol=1e-6)
    short = np.asarray(mt.grad(loss)(x.astype(mt.float16)).astype(mt.float64))
    np.testing.assert_allclose(short, expected, rtol=0.02)


@pytest.mark.parametrize("fill", FILLED)
def test_second_derivative_of_a_filled_array(fill):
    a = mt.asarray(np.random.default_rng(1).uniform(0.5, 1.5, (4, 3)))
    v = mt.asarray(np.random.default_rng(2).normal(size=(4, 3)))
    got = mt.hvp(_loss(fill), a, v)
    eps = 1e-6
    g = mt.grad(_loss(fill))
    np.testing.assert_allclose(
        np.asarray(got), np.asarray((g(a + eps * v) - g(a - eps * v)) / (2 * eps)), rtol=1e-5, atol=1e-6
    )


class _Memory:
    """Counts the arrays that writes went to: one that is written to again counts once."""

    def __init__(self, monkeypatch):
        self.alive, self.count = set(), 0
        write = indexing.write
        for module in (indexing, backward):
            monkeypatch.setattr(module, "write", lambda xp, out, *args: self(out) or write(xp, out, *args))

    def __call__(self, out):
        if id(out) not in self.alive:
            self.count += 1
            self.alive.add(id(out))
            weakref.finalize(out, self.alive.discard, id(out))


@pytest.mark.parametrize("fill", [f for f in FILLED if f not in (_by_at, _by_extrema)])
def test_a_gradient_writes_to_as_many_arrays_however_many_writes_there_are(fill, monkeypatch):
    a = mt.asarray(np.random.default_rng(0).normal(size=(ROWS, WIDTH)))
    memory = _Memory(monkeypatch)
    mt.grad(_loss(fill))(a)
    assert memory.count <= 3


@pytest.mark.parametrize("fill", [_by_item, _by_at, _by_recurrence, _by_sines, _by_extrema])
def test_what_a_tape_keeps_grows_with_what_is_read_and_written(fill, peak_of):
    a = mt.asarray(np.random.default_rng(0).normal(size=(100, 250)))
    most = 40 * a.nbytes  # kept whole at each write, it would be 100 times
    assert peak_of(lambda: mt.grad(_loss(fill))(a), most) < most


def test_a_write_to_a_row_of_a_row_is_refused_under_a_tape_too():
    with pytest.raises(mt.errors.MeshtapeError, match="nobody holds"):
        mt.grad(lambda x: _lost(x * 1.0))(mt.ones((40, 8)))


def _lost(x):
    x[1][2] = 3.0
    return mt.sum(x)


def test_a_gradient_of_functional_writes_copies_its_cotangent_once(monkeypatch):
    a = mt.asarray(np.random.default_rng(0).normal(size=(ROWS, WIDTH)))
    memory = _Memory(monkeypatch)
    _loss(_by_at)(a)
    forward = memory.count
    mt.grad(_loss(_by_at))(a)
    assert forward == ROWS  # each is a value of its own
    assert memory.count <= 2 * forward + 2


@pytest.mark.parametrize("fill", [_by_item, _by_columns, _by_at])
def test_a_compiled_gradient_writes_to_as_many_arrays_however_many_writes_there_are(fill, monkeypatch):
    a = mt.asarray(np.random.default_rng(0).normal(size=(ROWS, WIDTH)))
    step = mt.compile(mt.grad(_loss(fill)))
    step(a)
    memory = _Memory(monkeypatch)
    step(a)
    assert memory.count <= 3


def test_values_that_others_hold_are_not_written_to():
    a = mt.asarray(np.arange(1.0, 5.0))
    with mt.Tape(persistent=True) as tape:
        tape.watch(a)
        x = 3.0 * a
        before, square, part = mt.copy(x), x * x, x[1:3]
        x[1] = 2.0 * a[0]
        after = x * x
        x[2] = 0.0
        y = (x * after).sum() + square.sum() + part.sum()
    np.testing.assert_array_equal(np.asarray(mt.stop_gradient(before)), [3, 6, 9, 12])
    np.testing.assert_array_equal(np.asarray(mt.stop_gradient(part)), [6, 9])
    np.testing.assert_array_equal(np.asarray(mt.stop_gradient(after)), [9, 4, 81, 144])

    def value(v):
        x = 3 * v
        square, part = (x * x).sum(), x[1:3].sum()
        x[1] = 2 * v[0]
        after = x * x
        x[2] = 0
        return (x * after).sum() + square + part

    v = np.arange(1.0, 5.0)
    expected = [(value(v + 1e-6 * e) - value(v - 1e-6 * e)) / 2e-6 for e in np.eye(4)]
    for _ in range(2):  # the tape can be asked again
        np.testing.assert_allclose(np.asarray(tape.gradient(y, a)), expected, rtol=1e-6)


def test_cotangents_that_are_asked_for_keep_their_values():
    a = mt.asarray(np.arange(1.0, 5.0))
    seen = []
    with mt.Tape() as tape:
        tape.watch(a)
        x = 3.0 * a
        first = x + 0.0
        y = first.at[1].set(a[0])
        z = y.at[2].set(a[0])
        tape.hook(y, lambda g: seen.append(mt.copy(g)) or g)
        out = (z * z).sum()
    gz, gy, gf = tape.gradient(out, [z, y, first])
    np.testing.assert_array_equal(np.asarray(gz), [6, 2, 2, 24])
    np.testing.assert_array_equal(np.asarray(gy), [6, 2, 0, 24])
    np.testing.assert_array_equal(np.asarray(gf), [6, 0, 0, 24])
    np.testing.assert_array_equal(np.asarray(seen[0]), [6, 2, 0, 24])


def test_of_repeated_places_the_last_write_has_the_cotangent():
    rng = np.random.default_rng(0)
    for key, shape in [
        (([0, 1, 0, 2, 0],), (5, 3)),
        (([0, -3, 0, 2, -1],), (5, 3)),
        ((slice(None), [0, 0, 1]), (3, 3)),
        (([[0, 1], [1, 0]], slice(0, 2)), (2, 2, 2)),
        (([0, 0, 1], slice(None), None), (3, 3, 1)),
        (([0, 0, 1], [1, 1, 1]), (3,)),
        ((1, [0, 0, 2]), (3,)),
    ]:
        v, g = rng.normal(size=shape), rng.normal(size=(3, 3))
        target, places = np.zeros((3, 3)), np.arange(v.size, dtype=float).reshape(shape) + 1
        target[key] = places
        expected = np.zeros(v.size)
        hit = target > 0
        expected[target[hit].astype(int) - 1] = g[hit]
        for f in (lambda f: f, mt.compile):
            got = f(mt.grad(lambda v: (mt.zeros((3, 3)).at[key].set(v) * g).sum()))(mt.asarray(v))  # noqa: B023
            np.testing.assert_array_equal(np.asarray(got), expected.reshape(shape), err_msg=str(key))
