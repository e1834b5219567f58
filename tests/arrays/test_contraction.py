"""Einstein's notation: NumPy is the oracle."""

from __future__ import annotations

import numpy as np
import pytest

import meshtape
from meshtape import arrays as mt
from meshtape.arrays.core.errors import ShapeError

rng = np.random.default_rng(8)
CASES = {
    "ij,jk->ik": [(2, 3), (3, 4)],
    "ij,jk": [(2, 3), (3, 4)],
    "i,i": [(3,), (3,)],
    "i,j->ij": [(2,), (3,)],
    "ij->ji": [(2, 3)],
    "ij->": [(2, 3)],
    "ij->j": [(2, 3)],
    "ii": [(3, 3)],
    "ii->i": [(3, 3)],
    "iij->ij": [(3, 3, 2)],
    "iii->i": [(2, 2, 2)],
    "ij,ij->ij": [(2, 3), (2, 3)],
    "bij,bjk->bik": [(5, 2, 3), (5, 3, 4)],
    "bhqd,bhkd->bhqk": [(2, 3, 4, 5), (2, 3, 6, 5)],
    "...ij,...jk->...ik": [(5, 1, 2, 3), (4, 3, 2)],
    "...i,i->...": [(2, 3, 4), (4,)],
    "i...,i": [(3, 2), (3,)],
    "ij,jk,kl->il": [(2, 3), (3, 4), (4, 5)],
    "a,b,c->abc": [(2,), (3,), (4,)],
    "ij,ji,jk,k->i": [(2, 3), (3, 2), (3, 4), (4,)],
    "ab,bc,cd,de,ea": [(2, 3), (3, 2), (2, 4), (4, 3), (3, 2)],
    "i,->i": [(3,), ()],
    ",": [(), ()],
    "ij,k->": [(2, 3), (4,)],
    "ij , jk -> ki": [(2, 0), (0, 3)],
}


@pytest.mark.parametrize("formula", CASES)
def test_einsum_is_numpys(formula):
    for kind in (float, complex, int):
        xs = [(rng.normal(size=s) * 5 + (1j if kind is complex else 0)).astype(kind) for s in CASES[formula]]
        got, want = mt.einsum(formula, *map(mt.asarray, xs)), np.einsum(formula, *xs)
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        np.testing.assert_allclose(np.asarray(got), want, atol=1e-9)


def test_small_integers_stay_small():
    x = np.full((2, 3), 100, np.int8)
    assert mt.einsum("ij->i", mt.asarray(x)).dtype == np.einsum("ij->i", x).dtype == np.int8


@pytest.mark.parametrize("formula", ["ij,jk,kl->il", "bij,bj->i", "ii->i", "...i,i->..."])
def test_derivatives(formula):
    xs = [rng.normal(size=s) for s in {"bij,bj->i": [(2, 3, 2), (2, 2)]}.get(formula, CASES.get(formula))]
    meshtape.check_grads(lambda *a: mt.einsum(formula, *a), *xs)


def test_compiled():
    xs = [mt.asarray(rng.normal(size=s)) for s in CASES["ij,jk,kl->il"]]
    f = meshtape.compile(lambda *a: mt.einsum("ij,jk,kl->il", *a))
    np.testing.assert_allclose(np.asarray(f(*xs)), np.asarray(mt.einsum("ij,jk,kl->il", *xs)))


@pytest.mark.parametrize(
    ("formula", "shapes", "message"),
    [
        ("ij,jk", [(2, 3)], "2 operands, 1 are given"),
        ("ij", [(2,)], r"does not name the 1 dimensions of \(2,\)"),
        ("i,i", [(2,), (3,)], "'i' has lengths 2 and 3"),
        ("i->j", [(2,)], "names j"),
        ("i->ii", [(2,)], "twice"),
        ("i1->i", [(2, 2)], "letters"),
        ("...i->i", [(2, 3)], "the result needs"),
        ("...i,...i", [(2, 3), (4, 3)], "lengths 2 and 4"),
    ],
)
def test_errors_show_formula_and_shapes(formula, shapes, message):
    with pytest.raises(ShapeError, match=message) as e:
        mt.einsum(formula, *(mt.ones(s) for s in shapes))
    assert formula in str(e.value)
    assert str(shapes[0]) in str(e.value)
