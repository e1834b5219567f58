"""Every op's derivative against differences, to second order, and the values that the requirements fix by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import op_samples
import pytest

import meshtape as mt
from meshtape.arrays import OPS, linalg
from meshtape.arrays.core.dispatch import argument_avals
from meshtape.arrays.core.op import recording
from meshtape.arrays.reductions import sorting
from meshtape.autodiff.rules import RULES


def differentiable() -> list[str]:
    return sorted(n for n, op in OPS.items() if op.nondifferentiable is None)


def test_every_op_has_a_rule_or_says_why_not():
    lost = [n for n in differentiable() if OPS[n] not in RULES and OPS[n].decompose is None]
    assert not lost, f"neither a rule, nor a decomposition, nor a reason: {lost}"
    unsaid = [n for n, op in OPS.items() if op.nondifferentiable is not None and not op.nondifferentiable.strip()]
    assert not unsaid


def test_every_differentiable_op_has_samples():
    assert set(differentiable()) - set(op_samples.differentiable()) == {
        "reshard",  # which is the identity
        "float8_matmul",  # whose derivative goes straight through rounding
    }


@pytest.mark.parametrize("name", op_samples.differentiable())
def test_derivatives_to_second_order(name):
    rng = op_samples.rng_of(name)
    for i, sample in enumerate(op_samples.slopes(name)):
        args = sample.make(rng, exact=False)
        with recording(recorder := op_samples.Calls()):
            sample.fn(*map(mt.asarray, args))
        assert name in {op.name for op, *_ in recorder.seen}, f"sample {i} does not call {name}"
        try:
            fn, floats = op_samples.of_floats(sample.fn, args)
            mt.check_grads(fn, *floats)
        except Exception as e:
            e.add_note(f"sample {i} of {name}: shapes {[a.shape for a in args]}")
            raise


def test_all_samples_agree_with_the_shape_rule():
    """The rule by which traced programs know shapes says what the op gives, for cotangents too."""
    for name in op_samples.differentiable():
        rng = op_samples.rng_of(name)
        for sample in op_samples.slopes(name):
            with recording(recorder := op_samples.Calls()), np.errstate(all="ignore"):
                value, pull = mt.vjp(sample.fn, *map(mt.asarray, sample.make(rng)))
                pull(mt.tree_map(mt.ones_like, value))
            for op, args, outs, params in recorder.seen:
                found = op.avals(argument_avals(args), params)
                assert [(tuple(o.shape), o.dtype) for o in outs] == [tuple(a) for a in found], (name, op.name)


def gradient(fn: Callable[..., Any], *args: Any, seed: Any = None) -> list[Any]:
    """Cotangents of all arguments for a seed of ones, as lists."""
    value, pull = mt.vjp(fn, *map(mt.asarray, args))
    found = pull(mt.ones_like(value) if seed is None else mt.asarray(seed))
    return [None if g is None else g.tolist() for g in found]


nan, inf = float("nan"), float("inf")
X = np.arange(6.0).reshape(2, 3)
OUT = np.arange(1.0, 7.0).reshape(2, 3)
AT = (np.asarray([0, 0, 1]), np.asarray([1, 1, 2]))

GOLDEN = {
    # masks
    "x[x > 2]": (lambda x: x[x > 2], (X,), None, [[[0, 0, 0], [1, 1, 1]]]),
    "x[False]": (lambda x: x[False], (X,), None, [[[0, 0, 0], [0, 0, 0]]]),
    "0-d[True]": (lambda x: x[True], (5.0,), None, [1.0]),
    # index arrays
    "x[[0, 0, 1]]": (lambda x: x[[0, 0, 1]], (X,), None, [[[2, 2, 2], [1, 1, 1]]]),
    "x[:, [0, 0]]": (lambda x: x[:, [0, 0]], (X,), None, [[[2, 0, 0], [2, 0, 0]]]),
    "x[[]]": (lambda x: x[[]], (X,), None, [[[0, 0, 0], [0, 0, 0]]]),
    # writes; of repeated places the last one has the gradient
    "set": (lambda x, v: x.at[AT].set(v), (X, [10.0, 20.0, 30.0]), OUT, [[[1, 0, 3], [4, 5, 0]], [0, 2, 6]]),
    "add": (lambda x, v: x.at[AT].add(v), (X, [10.0, 20.0, 30.0]), OUT, [OUT.tolist(), [2, 2, 6]]),
    "add 0-d": (lambda x, v: x.at[AT].add(v), (X, 10.0), OUT, [OUT.tolist(), 10.0]),
    "add (1,)": (lambda x, v: x.at[AT].add(v), (X, [10.0]), OUT, [OUT.tolist(), [10.0]]),
    "add row": (lambda x, v: x.at[[0, 1]].add(v), (X, [1.0, 2.0, 3.0]), OUT, [OUT.tolist(), [5, 7, 9]]),
    "set (1, 3)": (lambda x, v: x.at[0].set(v), (X, [[1.0, 2, 3]]), OUT, [[[0, 0, 0], [4, 5, 6]], [[1, 2, 3]]]),
    "set (3,)": (lambda x, v: x.at[0].set(v), (X, [1.0, 2, 3]), OUT, [[[0, 0, 0], [4, 5, 6]], [1, 2, 3]]),
    "set, negative": (lambda x, v: x.at[-1, -1].set(v), (X, 1.0), OUT, [[[1, 2, 3], [4, 5, 0]], 6.0]),
    # products and extrema of repeated places: no factor is divided by, ties share evenly
    "multiply": (
        lambda x, v: x.at[[0, 0, 0, 2]].multiply(v),
        ([5.0, 1.0, 3.0], [2.0, 0.0, 4.0, 7.0]),
        None,
        [[0, 1, 7], [0, 40, 0, 3]],
    ),
    "multiply slice": (lambda x, v: x.at[1:].multiply(v), ([5.0, 1.0, 3.0], 2.0), None, [[1, 2, 2], 4]),
    "at max": (
        lambda x, v: x.at[[0, 0, 0, 1]].max(v),
        ([5.0, 9.0], [5.0, 2.0, 5.0, 1.0]),
        [6.0, 1.0],
        [[2, 1], [2, 0, 2, 0]],
    ),
    "at min": (lambda x, v: x.at[1:].min(v), ([5.0, 9.0, 1.0], 4.0), None, [[1, 0, 1], 1]),
    "set, no mask": (lambda x, v: x.at[x > 9].set(v), (X, 1.0), OUT, [OUT.tolist(), 0.0]),
    "set, no index": (lambda x, v: x.at[[]].set(v), (X, np.zeros((0, 3))), OUT, [OUT.tolist(), []]),
    # fills
    "fill 0-d": (
        lambda x, v: mt.where(mt.asarray([[True, False, True], [False, False, True]]), v, x),
        (X, 9.0),
        OUT,
        [[[0, 2, 0], [4, 5, 0]], 10.0],
    ),
    "fill (1,)": (
        lambda x, v: mt.where(mt.asarray([[True, False, True], [False, False, True]]), v, x),
        (X, [9.0]),
        OUT,
        [[[0, 2, 0], [4, 5, 0]], [10.0]],
    ),
    "fill, broadcast mask": (
        lambda x, v: mt.where(mt.asarray([True, False, True]), v, x),
        (X, 9.0),
        OUT,
        [[[0, 2, 0], [0, 5, 0]], 14.0],
    ),
    "fill, x broadcasts": (
        lambda x: mt.where(mt.asarray([[True, False, True], [False, False, True]]), 9.0, x),
        ([1.0, 2.0, 3.0],),
        OUT,
        [[4, 7, 0]],
    ),
    "fill by setitem": (lambda x, v: x.at[x > 2].set(v), (X, 9.0), OUT, [[[1, 2, 3], [0, 0, 0]], 15.0]),
    "NaN under the mask": (lambda x: mt.where(mt.isnan(x), 0.0, x), ([nan, 1.0],), None, [[0, 1]]),
    "NaN, multiplied": (lambda x: mt.where(mt.isnan(x), 0.0, x * x), ([nan, 1.0],), None, [[nan, 2]]),
    "infinity under the mask": (lambda x: mt.sqrt(mt.where(x > 0, x, 0.0)), ([-1.0, 4.0],), None, [[0, 0.25]]),
    "infinity, the other side": (lambda x: mt.sqrt(mt.where(x <= 0, 0.0, x)), ([-1.0, 4.0],), None, [[0, 0.25]]),
    "fill empty": (lambda x, v: mt.where(x > 0, v, x), (np.zeros((0, 3)), 1.0), None, [[], 0.0]),
    "fill 0-d x": (lambda x, v: mt.where(mt.asarray(True), v, x), (2.0, 1.0), None, [0.0, 1.0]),
    # ties
    "min axis": (lambda x: mt.min(x, axis=1), ([[1.0, 1, 2], [3, 2, 2]],), None, [[[0.5, 0.5, 0], [0, 0.5, 0.5]]]),
    "max all": (mt.max, ([1.0, 3.0, 3.0, 3.0, 3.0],), None, [[0, 0.25, 0.25, 0.25, 0.25]]),
    "maximum": (mt.maximum, ([1.0, 2.0], [1.0, 1.0]), None, [[0.5, 1], [0.5, 0]]),
    "minimum": (mt.minimum, ([1.0, 2.0], [1.0, 1.0]), None, [[0.5, 0], [0.5, 1]]),
    "fmax": (mt.fmax, ([nan, 1.0, 3.0], [2.0, nan, 3.0]), None, [[0, 1, 1], [1, 0, 0]]),
    "fmin": (mt.fmin, ([nan, 1.0, 3.0], [2.0, nan, 3.0]), None, [[0, 1, 1], [1, 0, 0]]),
    "min of (0, 3)": (lambda x: mt.min(x, axis=1), (np.zeros((0, 3)),), None, [[]]),
    "relu at 0": (mt.nn.relu, ([0.0, -1.0, 2.0],), None, [[0, 0, 1]]),
    "abs at 0": (mt.abs, ([0.0, -1.0],), None, [[0, -1]]),
    "complex abs at 0": (mt.abs, ([0j, 3 + 4j],), None, [[0j, 0.6 + 0.8j]]),
    "clip": (lambda x: mt.clip(x, -1.0, 1.0), ([-2.0, -1.0, 0.0, 3.0],), None, [[0, 0.5, 1, 0]]),
    # of tied elements each has a place of its own, in their order
    "sort": (sorting.sort, ([2.0, 1.0, 2.0],), [1.0, 2.0, 3.0], [[2, 1, 3]]),
    "sort, a cycle": (sorting.sort, ([3.0, 1.0, 2.0],), [1.0, 2.0, 4.0], [[4, 1, 2]]),
    "sort descending": (
        lambda x: sorting.sort(x, descending=True),
        ([2.0, 1.0, 2.0],),
        [1.0, 2.0, 3.0],
        [[1, 3, 2]],
    ),
    "det of a singular matrix": (linalg.det, ([[1.0, 2.0], [2.0, 4.0]],), None, [[[4, -2], [-2, 1]]]),
    # norms of nothing but zeros, whatever the order
    **{
        f"norm {p} at zero": (lambda x, p=p: linalg.vector_norm(x, ord=p), (np.zeros(3),), None, [[0, 0, 0]])
        for p in (0, 0.5, 1, 2, 3, inf, -inf)
    },
    "norm inf, ties": (lambda x: linalg.vector_norm(x, ord=inf), ([1.0, -2.0, 2.0],), None, [[0, -0.5, 0.5]]),
    "float16 written into float32": (
        lambda x, v: x.at[[0, 0]].add(v),
        (np.zeros(2, np.float32), np.ones(2, np.float16)),
        np.ones(2, np.float32),
        [[1, 1], [1, 1]],
    ),
    # edges
    "reciprocal(0)": (mt.reciprocal, ([0.0],), None, [[-inf]]),
    "atan2(0, 0)": (mt.atan2, (0.0, 0.0), None, [nan, nan]),
    "x**0 at 0": (lambda x: x**0, ([0.0, 2.0],), None, [[0, 0]]),
    "x**y at 0": (mt.pow, ([0.0, 0.0], [1.0, 2.0]), None, [[1, 0], [0, 0]]),
    "prod with zeros": (mt.prod, ([2.0, 0.0, 3.0],), None, [[0, 6, 0]]),
    "sum of nothing": (mt.sum, (np.zeros((0, 3)),), None, [[]]),
    # products
    "K = 0": (mt.matmul, (np.zeros((2, 0)), np.zeros((0, 3))), None, [[[], []], []]),
}


@pytest.mark.parametrize("name", list(GOLDEN))
def test_golden_gradients(name):
    fn, args, seed, expected = GOLDEN[name]
    with np.errstate(all="ignore"):
        found = gradient(fn, *args, seed=seed)
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(f, e, rtol=1e-12, atol=1e-14)


def test_golden_forward_values():
    x = mt.asarray(X)
    v = mt.asarray([10.0, 20.0, 30.0])
    assert x.at[AT].set(v).tolist() == [[0, 20, 2], [3, 4, 30]]
    assert x.at[AT].add(v).tolist() == [[0, 31, 2], [3, 4, 35]]
    assert mt.fmax(mt.asarray([nan, 1.0]), mt.asarray([2.0, nan])).tolist() == [2, 1]
    assert float(mt.fmin(mt.asarray(nan), mt.asarray(1.0))) == 1.0
    assert np.isnan(float(mt.fmin(mt.asarray(nan), mt.asarray(nan))))
    assert np.isnan(float(mt.min(mt.asarray([1.0, nan]))))
    assert mt.where(mt.asarray([True, False]), 0.0, mt.asarray([nan, 1.0])).tolist() == [0, 1]
    with pytest.raises(ValueError, match="min"):
        mt.min(mt.asarray([]))
    with pytest.raises(ValueError, match=r"\(2, 3\) @ \(2, 3\)"):
        mt.matmul(x, x)
    with pytest.raises(ValueError, match="matmul"):
        mt.matmul(mt.asarray(1.0), x)


def test_complex_matmul_second_order_by_hand():
    """With <dA, D> = Re(conj(G B^H) D): d/dB = D^H G and d/dG = D B, for 1x1 matrices."""
    g, b, d = (mt.asarray([[z]]) for z in (1 + 1j, 2 + 3j, 1 - 1j))

    def inner(g, b):
        _, pull = mt.vjp(lambda a: a @ b, mt.asarray([[0j]]))
        return mt.sum(mt.real(mt.conj(pull(g)[0]) * d))

    dg, db = mt.grad(inner, argnums=(0, 1))(g, b)
    assert db.tolist() == [[2j]]
    assert dg.tolist() == [[5 + 1j]]


def test_a_gradient_has_the_shape_and_dtype_of_its_operand():
    for dtype in (mt.float32, mt.float16, mt.bfloat16):
        x = mt.ones((2, 3), dtype=dtype)
        for fn in (lambda x: x * 2.0 + 1, lambda x: mt.mean(x), lambda x: x**2, mt.nn.softmax, lambda x: x @ x.T):
            value, pull = mt.vjp(fn, x)
            (g,) = pull(mt.ones_like(value))
            assert (g.shape, g.dtype) == (x.shape, x.dtype)
            assert value.dtype == dtype
    w64 = mt.ones(3)
    dx, dw = mt.grad(lambda x, w: (x * w).sum(), argnums=(0, 1))(mt.ones((2, 3), dtype=mt.float32), w64)
    assert (dx.dtype, dw.dtype) == (mt.float32, mt.float64)
    # A real operand of a complex product has a real gradient.
    assert mt.grad(lambda x: mt.sum(mt.real(x * (2 + 3j))))(mt.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("dtype", [mt.float64, mt.complex128], ids=str)
def test_gradients_of_functions_of_hermitian_matrices_are_hermitian(dtype):
    """A step along them stays among such matrices, of which half the elements are read at most."""
    rng = np.random.default_rng(3)
    root = rng.standard_normal((3, 3)) + (1j * rng.standard_normal((3, 3)) if dtype == mt.complex128 else 0)
    x, weight = mt.asarray(root @ root.conj().T + np.eye(3)), mt.asarray(rng.standard_normal((3, 3)))
    for fn in (
        lambda x: mt.sum(mt.abs(linalg.eigh(x).eigenvectors) ** 2 * weight) + linalg.eigh(x).eigenvalues[0],
        lambda x: mt.sum(linalg.eigvalsh(x) * weight[0]),
        lambda x: mt.sum(mt.real(linalg.cholesky(x)) * weight),
    ):
        g = np.asarray(mt.grad(fn)(x))
        np.testing.assert_allclose(g, g.conj().T, atol=1e-12)
        assert np.abs(g).max() > 0.01


def test_a_power_with_a_python_exponent_is_not_widened():
    with recording(recorder := op_samples.Calls()):
        mt.grad(lambda x: (x**3).sum())(mt.ones(2, dtype=mt.float32))
    assert {o.dtype for _, _, outs, _ in recorder.seen for o in outs} == {mt.float32}
