"""``out=``, ``where=`` and writes in NumPy's code on our arrays: where NumPy would write through a view, there is an
error, never a lost write."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshtape as mt

NAMES = sorted(
    {
        u.__name__
        for u in vars(np).values()
        if isinstance(u, np.ufunc) and u.signature is None and u.nout == 1 and u.__name__ not in ("isnat", "ldexp")
    }
)
MASK = np.array([True, False, True, False])
# Numbers that every real function takes, and beside them, under the mask, some that most do not.
GOOD = {"arccosh": 1.5}
BAD = np.array([0.0, -2.0, 0.0, 0.0])


def operands(name: str) -> tuple[np.ndarray, ...]:
    x = np.where(MASK, GOOD.get(name, 0.5), BAD)
    ufunc = getattr(np, name)
    try:
        ufunc.resolve_dtypes((np.dtype(float),) * ufunc.nin + (None,))
    except TypeError:
        x = np.array([3, 1, 2, 1])
    return (x, np.where(MASK, x, 0))[: ufunc.nin]


@pytest.mark.parametrize("name", NAMES)
def test_what_a_mask_leaves_out_is_not_computed(name: str) -> None:
    ufunc, xs = getattr(np, name), operands(name)
    with np.errstate(all="raise"):
        want = ufunc(*xs, where=MASK, out=np.full(4, 7, ufunc(*(x[MASK] for x in xs)).dtype))
        got = ufunc(*map(mt.asarray, xs), where=MASK, out=mt.full(4, 7, dtype=want.dtype))
    assert got.dtype == want.dtype
    np.testing.assert_allclose(np.asarray(got), want)
    if xs[0].dtype.kind == "f" and want.dtype.kind == "f" and ufunc in mt.arrays.interface.numpy_protocol.ufuncs():
        loss = lambda x: mt.sum(ufunc(x, *xs[1:], where=MASK, out=mt.full(4, 7.0)))  # noqa: E731
        slope = np.asarray(mt.grad(loss)(mt.asarray(xs[0])))
        alone = mt.grad(lambda x: mt.sum(ufunc(x, *(y[MASK] for y in xs[1:]))))(mt.asarray(xs[0][MASK]))
        np.testing.assert_allclose(slope[MASK], np.asarray(alone))
        np.testing.assert_array_equal(slope[~MASK], 0)


def test_masked_results_keep_the_dtype_and_what_was_there() -> None:
    out = mt.asarray([0.5, 0.5])
    np.add(mt.asarray([1, 2]), 1, where=[True, False], out=out)
    assert out.tolist() == [2.0, 0.5]  # not 0, the half as an integer
    big = mt.asarray([2**63 + 1, 3], dtype=mt.uint64)
    assert np.add(big, big * 0, where=[True, False], out=mt.zeros(2, dtype=mt.uint64)).tolist() == [2**63 + 1, 0]
    np.testing.assert_array_equal(np.add(big, big * 0, where=[False, True], out=np.ones(2, np.uint64)), [1, 3])
    with pytest.raises(mt.errors.DTypeError, match="where= must be boolean"):
        np.add(out, 1, where=[1, 0], out=out)
    with pytest.raises(mt.errors.DTypeError, match="cast it"):
        np.add(out, 0.5, where=[True, False], out=mt.zeros(2, dtype=int))
    got = np.add.outer(mt.ones(2), mt.ones(2), where=np.eye(2, dtype=bool), out=mt.zeros((2, 2)))
    assert got.tolist() == [[2, 0], [0, 2]]


def rows() -> mt.Array:
    return mt.asarray(np.arange(6.0).reshape(2, 3))


def set_item(x: Any) -> None:
    x[0][1] = 2.0


def set_column(x: Any) -> None:
    x.T[0] = 2.0


def add_in_place(x: Any) -> None:
    x[0][1] += 2.0


def set_flat(x: Any) -> None:
    x.flat[3] = 2.0


def set_masked(x: Any) -> None:
    x.ravel()[np.ones(6, bool)] = 2.0


def set_slice(x: Any) -> None:
    x[0][1:] = 2.0


# (Of the array that is passed; the view is a temporary, as in code that was written for NumPy.)
WRITES: dict[str, Callable[[Any], Any]] = {
    "out=x[0]": lambda x: np.add(x[1], 1, out=x[0]),
    "out=(x[0],)": lambda x: np.add(x[1], 1, out=(x[0],)),
    "out=x[:, 1]": lambda x: np.exp(x[:, 0], out=x[:, 1]),
    "out=x.T": lambda x: np.sin(x.T, out=x.T),
    "out=x.reshape": lambda x: np.negative(x.reshape(-1), out=x.reshape(-1)),
    "where=, out=x[0]": lambda x: np.add(x[1], 1, where=[True, False, True], out=x[0]),
    "two results": lambda x: np.divmod(x[0], 2, out=(x[0], x[1])),
    "sum": lambda x: np.sum(x, axis=0, out=x[0]),
    "mean": lambda x: np.mean(x, 0, None, x[0]),
    "cumsum": lambda x: x[0].cumsum(out=x[0]),
    "reduce": lambda x: np.add.reduce(x, out=x[1]),
    "take": lambda x: np.take(x[0], [0, 1, 2], out=x[1]),
    "at": lambda x: np.add.at(x[0], [0], 1.0),
    "hypot.at": lambda x: np.hypot.at(x[0], [0], 1.0),
    "held": lambda x: (row := x[0], np.add(row, 1, out=row)),
    "x[0][1] =": set_item,
    "x[0][1:] =": set_slice,
    "x.T[0] =": set_column,
    "x[0][1] +=": add_in_place,
    "x.flat[3] =": set_flat,
    "x.ravel()[mask] =": set_masked,
    "copyto": lambda x: np.copyto(x[0], 1),
    "put": lambda x: np.put(x[0], [0], 1),
    "place": lambda x: np.place(x[0], np.ones(3, bool), [1]),
    "putmask": lambda x: np.putmask(x[0], np.ones(3, bool), 1),
    "fill_diagonal": lambda x: np.fill_diagonal(x[:, :2], 1),
    "fill": lambda x: x[0].fill(1),
}


@pytest.mark.parametrize("way", WRITES)
def test_no_write_is_lost(way: str) -> None:
    host = np.arange(6.0).reshape(2, 3)
    before = host.copy()
    WRITES[way](host)
    assert not np.array_equal(host, before)  # NumPy writes through
    x = rows()
    with pytest.raises(mt.errors.NumPyFunctionError):
        WRITES[way](x)
    np.testing.assert_array_equal(np.asarray(x), before)
    with pytest.raises(mt.errors.NumPyFunctionError):  # watched
        mt.grad(lambda v: (WRITES[way](v), mt.sum(v))[1])(rows())
    if not any(part in way for part in ("T", "reshape", "ravel", "flat")):  # of which a traced array does not know
        with pytest.raises(mt.errors.NumPyFunctionError):
            mt.compile(lambda v: (WRITES[way](v), v)[1])(rows())


def test_writes_that_are_held() -> None:
    x, y = rows(), rows()
    x[0] += 1.0
    x[1, 2] = 9.0
    assert x.tolist() == [[1, 2, 3], [3, 4, 9]]
    row = y[0]
    row[1] = 7.0  # a value of its own: the documented difference
    assert (row.tolist(), y[0].tolist()) == ([0, 7, 2], [0, 1, 2])
    for made in (
        y[0].copy(),
        copy.copy(y[0]),
        mt.asarray(y[0], copy=True),
        mt.copy(y[0]),
        y[[0]],
        y[0] + 0,
        mt.zeros(3),
    ):
        assert np.add(made, 1, out=made) is made
    own = mt.arange(6.0).reshape(2, 3)  # nobody else has the memory that it shows
    assert np.add(own, 1, out=own).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert np.multiply(own, 2, out=mt.zeros((2, 3))).tolist() == [[2, 4, 6], [8, 10, 12]]
    held = {"row": y[0], "rows": [y[1]]}
    held["row"][0] = 5.0
    held["rows"][0][2] = 5.0
    held["row"].__setitem__(1, 6.0)
    operator.setitem(held["row"], 2, 7.0)
    assert (held["row"].tolist(), held["rows"][0].tolist()) == ([5, 6, 7], [3, 4, 5])


def test_out_and_results_must_be_as_many() -> None:
    x = mt.ones(3)
    with pytest.raises(mt.errors.NumPyFunctionError, match=r"1 results, and out= has 2"):
        np.cumsum(x, out=(mt.zeros(3), mt.zeros(3)))
    for out in (np.zeros(2), mt.zeros(2)):
        with pytest.raises(mt.errors.ShapeError, match="out="):
            np.add(x, 1, out=out)
    with pytest.raises(mt.errors.NumPyFunctionError, match="out="):
        mt.any(x > 0, out=mt.zeros((), dtype=bool))
    held = mt.zeros(2)
    assert np.trim_zeros(mt.asarray([0.0, 1.0, 2.0])).tolist() == [1, 2]
    assert np.nancumsum(mt.ones(2), out=held) is held  # through whichever way
