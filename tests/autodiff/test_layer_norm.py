"""layer_norm is right at every order: its backward op is differentiated through its decomposition."""

from __future__ import annotations

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.nn.norms import layer_norm


def plain(x, weight=None, bias=None, eps=1e-5):
    """The formula, in ops that have rules of their own."""
    d = x - mt.mean(x, axis=-1, keepdims=True)
    y = d / mt.sqrt(mt.mean(d * d, axis=-1, keepdims=True) + eps)
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", [(5,), (3, 4)])
def test_to_fourth_order_along_a_line(shape, affine, derivatives_along):
    rng = np.random.default_rng(3)
    x, v, w = (mt.asarray(rng.standard_normal(shape)) for _ in range(3))
    n = shape[-1]
    extra = [mt.asarray(rng.standard_normal(n)) for _ in range(2)] if affine else []
    fused = derivatives_along(lambda x: mt.layer_norm(x, n, *extra), x, v, w, 4)
    expected = derivatives_along(lambda x: plain(x, *extra), x, v, w, 4)
    np.testing.assert_allclose(fused, expected, rtol=1e-9)
    assert all(abs(e) > 1e-6 for e in expected)


def test_to_fourth_order_in_all_operands_at_once(derivatives_along):
    rng = np.random.default_rng(4)
    x, v = (mt.asarray(rng.standard_normal((2, 3))) for _ in range(2))
    w = mt.asarray(rng.standard_normal((2, 3)))

    def both(fn):
        # The same line moves x, weight and bias.
        return derivatives_along(lambda z: fn(z, z[0], z[1] * z[0]), x, v, w, 4)

    np.testing.assert_allclose(both(lambda x, g, b: mt.layer_norm(x, 3, g, b)), both(plain), rtol=1e-9)


def test_the_decompositions_are_the_ops():
    rng = np.random.default_rng(5)
    x, g, w, b = (mt.asarray(rng.standard_normal(s)) for s in ((4, 2, 3), (4, 2, 3), (2, 3), (2, 3)))
    p = {"naxes": 2, "eps": 1e-3}
    whole = layer_norm.LAYER_NORM.numpy(x._buf, w._buf, b._buf, **p)
    np.testing.assert_allclose(whole, np.asarray(layer_norm.LAYER_NORM.decompose(x, w, b, **p)), rtol=1e-12)
    fused = layer_norm.LAYER_NORM_BACKWARD.numpy(g._buf, x._buf, w._buf, **p)
    for a, e in zip(fused, layer_norm.LAYER_NORM_BACKWARD.decompose(g, x, w, **p), strict=True):
        np.testing.assert_allclose(a, np.asarray(e), rtol=1e-12, atol=1e-14)


def test_golden_values():
    np.testing.assert_allclose(
        np.asarray(mt.layer_norm(mt.asarray([1.0, 2.0, 3.0]), 3)), [-1.2247357, 0, 1.2247357], atol=1e-7
    )
    # A group norm of two groups of [1, 2, 4, 8] is a layer norm of the groups.
    x = mt.asarray([[1.0, 2.0], [4.0, 8.0]])
    y, pull = mt.vjp(lambda x: mt.layer_norm(x, 2), x)
    np.testing.assert_allclose(np.asarray(y), [[-0.99998, 0.99998], [-0.9999988, 0.9999988]], atol=1e-7)
    (dx,) = pull(mt.asarray([[1.0, 2.0], [3.0, 4.0]]))
    np.testing.assert_allclose(np.asarray(dx), [[-4.0e-5, 4.0e-5], [-6.3e-7, 6.2e-7]], rtol=0.02)


def test_constant_rows_have_a_gradient_of_zero():
    _, pull = mt.vjp(lambda x: mt.layer_norm(x, 4), mt.full((2, 4), 3.0))
    (dx,) = pull(mt.ones((2, 4)))
    assert dx.tolist() == np.zeros((2, 4)).tolist()
    # Along anything else it is finite: 1 / sqrt(eps) at most.
    (dx,) = pull(mt.asarray([[1.0, 0, 0, 0]] * 2))
    assert np.abs(np.asarray(dx)).max() <= 1 / np.sqrt(1e-5)


def test_no_rows():
    f = lambda x, w, b: mt.layer_norm(x, 3, w, b)  # noqa: E731
    y, pull = mt.vjp(f, mt.zeros((0, 3)), mt.ones(3), mt.ones(3))
    dx, dw, db = pull(y)
    assert (y.shape, dx.shape) == ((0, 3), (0, 3))
    assert (dw.tolist(), db.tolist()) == ([0, 0, 0], [0, 0, 0])


@pytest.mark.parametrize("dtype", [mt.float16, mt.bfloat16], ids=str)
def test_low_precision_keeps_its_statistics_in_float32(dtype):
    x = mt.asarray([6e4, -6e4, 3e4], dtype=dtype)  # squares overflow float16
    y, pull = mt.vjp(lambda x: mt.layer_norm(x, 3), x)
    expected = mt.layer_norm(x.astype(mt.float64), 3)
    assert y.dtype == dtype
    np.testing.assert_allclose(np.asarray(y, np.float64), np.asarray(expected), rtol=1e-2)
    (dx,) = pull(mt.asarray([1.0, 2.0, -1.0], dtype=dtype))
    assert dx.dtype == dtype
    assert np.isfinite(np.asarray(dx, np.float64)).all()


def test_every_entry_of_the_decomposition_carries_the_name():
    x = mt.asarray(np.random.default_rng(0).standard_normal((2, 3)))
    with mt.Tape() as outer:
        outer.watch(x)
        mt.grad(lambda x: mt.sum(mt.layer_norm(x, 3) ** 2))(x)
    inside = [e for e in outer.entries if e.origin == "layer_norm vjp"]
    with mt.Tape() as deeper:
        deeper.watch(x)
        mt.grad(lambda x: mt.sum(mt.grad(lambda x: mt.sum(mt.layer_norm(x, 3) ** 2))(x) ** 2))(x)
    names = {e.op.name for e in inside}
    assert "layer_norm_backward" in names
    decomposed = [e.op.name for e in deeper.entries if (e.origin or "").startswith("layer_norm vjp")]
    assert len(decomposed) >= 3 + len(inside)
    assert "sqrt" in decomposed


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"normalized_shape": 4}, r"\[layer_norm\] the last dimensions of x \(2, 3\) must be normalized_shape \(4,\)"),
        ({"normalized_shape": 3, "weight": [1.0]}, r"\[layer_norm\] weight has shape \(1,\), expected \(3,\)"),
        ({"normalized_shape": 3, "eps": -1}, r"\[layer_norm\] eps must be positive, got -1"),
        ({"normalized_shape": ()}, r"\[layer_norm\]"),
    ],
)
def test_arguments_are_checked(kwargs, match):
    with pytest.raises(ValueError, match=match):
        mt.layer_norm(mt.ones((2, 3)), **kwargs)
