"""Writes under a mask that count no places, and the places where a host would wait for a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshtape as mt

X = np.array([[1.0, -2.0, np.nan], [4.0, -5.0, 6.0]])
MASK = np.array([[True, False, True], [False, True, False]])
ROWS = np.array([False, True])


def in_place(x: mt.Array, mask: Any, value: Any) -> mt.Array:
    x = x.copy()
    x[mask] = value
    return x


WAYS = {
    "set": lambda x, mask, v: x.at[mask].set(v),
    "setitem": in_place,
    "add": lambda x, mask, v: x.at[mask].add(v),
    "multiply": lambda x, mask, v: x.at[mask].multiply(v),
    "min": lambda x, mask, v: x.at[mask].min(v),
    "max": lambda x, mask, v: x.at[mask].max(v),
}
NUMPYS: dict[str, Any] = {"add": np.add, "multiply": np.multiply, "min": np.minimum, "max": np.maximum}


def by_numpy(way: str, mask: np.ndarray, v: float, x: np.ndarray = X) -> np.ndarray:
    out = x.copy()
    out[mask] = NUMPYS[way](out[mask], v) if way in NUMPYS else v
    return out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mask", [MASK, ROWS, np.zeros((2, 3), bool)], ids=["all", "rows", "none"])
def test_one_number_under_a_mask(way: str, mask: np.ndarray) -> None:
    want = by_numpy(way, mask, 3.0)
    for m in (mt.asarray(mask), mask, mask.tolist(), (mt.asarray(mask),)):
        for v in (3.0, 3, mt.asarray(3.0), np.float32(3)):
            np.testing.assert_array_equal(WAYS[way](mt.asarray(X), m, v).numpy(), want)
    # The same with the mask traced, which no other index by truth can be.
    np.testing.assert_array_equal(mt.compile(WAYS[way])(mt.asarray(X), mt.asarray(mask), mt.asarray(3.0)).numpy(), want)
    np.testing.assert_array_equal(mt.compile(lambda x, m: WAYS[way](x, m, 3.0))(mt.asarray(X), mask).numpy(), want)


@pytest.mark.parametrize("way", WAYS)
def test_it_has_the_right_derivatives(way: str) -> None:
    x = np.array([[1.0, -2.0, 0.5], [4.0, -5.0, 6.0]])
    for mask in (MASK, ROWS):
        mt.check_grads(lambda a, v, mask=mask: WAYS[way](a, mt.asarray(mask), v), x, np.array(3.25))
        by_code = mt.grad(lambda a, mask=mask: mt.sum(mt.compile(WAYS[way])(a, mt.asarray(mask), 3.25) ** 2))
        by_hand = mt.grad(lambda a, mask=mask: mt.sum(WAYS[way](a, mt.asarray(mask), 3.25) ** 2))
        np.testing.assert_allclose(by_code(mt.asarray(x)).numpy(), by_hand(mt.asarray(x)).numpy())


def test_nan_under_the_mask_reaches_no_gradient() -> None:
    g, gv = mt.grad(lambda x, v: mt.sum(x.at[mt.isnan(x)].set(v)), argnums=(0, 1))(mt.asarray(X), mt.asarray(0.0))
    assert g.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert float(gv) == 1.0


def test_split_arrays_take_it_too() -> None:
    mesh = mt.Mesh({"rows": 2})
    x = np.arange(12.0).reshape(4, 3)
    d, m = (
        mt.distribute(mt.asarray(x), mesh, rows=mt.Shard(0)),
        mt.distribute(mt.asarray(x > 5), mesh, rows=mt.Shard(0)),
    )
    for way, fn in WAYS.items():
        np.testing.assert_array_equal(fn(d, m, 3.0).numpy(), by_numpy(way, x > 5, 3.0, x))
    assert d.at[m].set(0.0).sharding == d.sharding


def test_dtypes_and_errors_are_those_of_other_writes() -> None:
    x = mt.asarray([1, 2, 300], dtype=mt.int16)
    assert x.at[x > 1].set(1.9).tolist() == [1, 1, 1]
    assert x.at[x > 1].add(2).dtype == mt.int16
    assert mt.ones(2, dtype=mt.bfloat16).at[[True, False]].set(0.1).dtype == mt.bfloat16
    for bad, error in ((70000, OverflowError), (float("nan"), ValueError), (1j, TypeError)):
        with pytest.raises(error):
            x.at[x > 1].set(bad)
    with pytest.raises(mt.errors.DTypeError, match="cannot take a result"):
        x.at[x > 1].add(0.5)
    with pytest.raises(IndexError, match="boolean index did not match"):
        x.at[mt.asarray([True, False])].set(1)
    with pytest.raises(mt.errors.ShapeError):
        x.at[x > 1].set(mt.asarray([1, 2, 3]))


# ----- waits ----------------------------------------------------------------------------------------------------------


def waits_of(fn: Any) -> list[str]:
    with mt.host_waits() as waits:
        fn()
    return [w.partition(",")[0] for w in waits]


def test_a_training_step_waits_nowhere() -> None:
    w, x = mt.ones((3, 2)), mt.asarray(np.arange(12.0).reshape(4, 3))
    labels = mt.asarray([0, 1, 1, 0])

    def loss(w: mt.Array) -> mt.Array:
        h = mt.nn.relu(mt.layer_norm(x, 3) @ w)
        h = h.at[h > 2].set(2.0)
        keep = mt.random.bernoulli(mt.random.key(0), 0.9, h.shape)
        return mt.nn.cross_entropy(mt.where(keep, h, 0.0), mt.stop_gradient(labels))

    step = mt.compile(lambda w: w - 0.1 * mt.grad(loss)(w))
    step(w)  # traced
    assert waits_of(lambda: step(step(w))) == []


def test_what_waits_says_so() -> None:
    x, i = mt.asarray([1.0, -2.0, 3.0]), mt.asarray([0, 2])
    value, mask, check, count = (
        "a value is read",
        "the true elements of a mask are counted",
        "index arrays are checked",
        "nonzero elements are counted",
    )

    def write() -> None:
        y = x.copy()
        y[y < 0] = 0.0
        y[1:] = 2.0
        y += 1.0

    assert waits_of(write) == []
    for fn, want in (
        (lambda: float(x[0]), [value]),
        (lambda: x[0].item(), [value]),
        (lambda: bool(mt.any(x > 0)), [value]),
        (lambda: repr(x), [value]),
        (lambda: np.asarray(x), [value]),
        (lambda: mt.nonzero(x), [count]),
        (lambda: x.at[x > 0].set(mt.asarray([1.0, 2.0])), [mask]),
        (lambda: x.at[i].add(1.0), [check]),
        (lambda: x.at[i].set(mt.asarray([5.0, 6.0])), [check]),
        (lambda: mt.sort(x) // 2.0, []),
    ):
        assert waits_of(fn) == want


def test_two_index_arrays_are_checked_in_one_wait() -> None:
    x = mt.ones((3, 4))
    assert waits_of(lambda: x.at[mt.asarray([0, 1]), mt.asarray([2, 3])].add(1.0)) == ["index arrays are checked"]


def test_a_wait_names_the_line_that_caused_it() -> None:
    with mt.host_waits() as outer:
        x = mt.ones(2)
        with mt.host_waits() as inner:
            float(x[0])
        assert len(inner) == 1
        assert __file__ in inner[0]
        x.tolist()
    assert len(outer) == 2
    x.tolist()
    assert len(outer) == 2


def test_checks_of_indices_cannot_be_left_out_on_a_cpu() -> None:
    with mt.index_checks(False):
        with pytest.raises(IndexError, match="index 5 is out of bounds"):
            mt.ones(3)[mt.asarray([5])]
        with pytest.raises(IndexError, match="index 5 is out of bounds"):
            mt.ones(3).at[mt.asarray([5])].set(1.0)
