"""The fused softmax family is right at every order, in every precision, and where classes are split over a mesh."""

from __future__ import annotations

import functools
import math

import ml_dtypes
import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays import OPS
from meshtape.arrays.nn import linear_cross_entropy, losses

inf = math.inf
rng = np.random.default_rng(11)


def plain_softmax(x):
    e = mt.exp(x)
    return e / mt.sum(e, axis=-1, keepdims=True)


def plain_losses(x, labels, smoothing=0.0):
    logs = mt.log(plain_softmax(x))
    target = mt.nn.one_hot(labels, x.shape[-1], dtype=mt.float64) * (1 - smoothing) + smoothing / x.shape[-1]
    return -mt.sum(logs * target, axis=-1)


LABELS = mt.asarray([2, 0, 1])
MASK = mt.asarray([[True, False, True, True], [True] * 4, [False, True, False, True]])
PAIRS = {
    "softmax": (mt.nn.softmax, plain_softmax),
    "softmax, first dimension": (lambda x: mt.nn.softmax(x, axis=0), lambda x: plain_softmax(x.T).T),
    "log_softmax": (mt.nn.log_softmax, lambda x: mt.log(plain_softmax(x))),
    "logsumexp": (lambda x: mt.nn.logsumexp(x, axis=-1), lambda x: mt.log(mt.sum(mt.exp(x), axis=-1))),
    "masked": (
        lambda x: mt.nn.softmax(x, where=MASK),
        lambda x: mt.where(MASK, mt.exp(x), 0.0) / mt.sum(mt.where(MASK, mt.exp(x), 0.0), axis=-1, keepdims=True),
    ),
    "cross_entropy": (
        lambda x: mt.nn.cross_entropy(x, LABELS, reduction="none"),
        lambda x: plain_losses(x, LABELS),
    ),
    "smoothed": (
        lambda x: mt.nn.cross_entropy(x, LABELS, reduction="none", label_smoothing=0.3),
        lambda x: plain_losses(x, LABELS, 0.3),
    ),
    "ignored": (
        lambda x: mt.nn.cross_entropy(x, LABELS, reduction="none", ignore_index=0),
        lambda x: mt.where(LABELS == 0, 0.0, plain_losses(x, LABELS)),
    ),
    "gelu": (mt.nn.gelu, lambda x: 0.5 * x * (1.0 + mt.erf(x * math.sqrt(0.5)))),
}


@pytest.mark.parametrize("name", PAIRS)
def test_to_fourth_order_along_a_line(name, derivatives_along):
    fused, plain = PAIRS[name]
    x, v = (mt.asarray(rng.standard_normal((3, 4))) for _ in range(2))
    w = mt.asarray(rng.standard_normal(plain(x).shape))
    expected = derivatives_along(plain, x, v, w)
    np.testing.assert_allclose(derivatives_along(fused, x, v, w), expected, rtol=1e-8, atol=1e-9)
    assert all(abs(e) > 1e-6 for e in expected)


LOSSES = ("losses", "x", "labels", "shift", "total")
CALLS = [
    ("softmax", ("x",), {"axis": 1, "masked": False}),
    ("softmax", ("x",), {"axis": 0, "masked": True}),
    ("softmax_backward", ("g", "y"), {"axis": 1}),
    ("log_softmax", ("x",), {"axis": 1, "masked": False}),
    ("log_softmax", ("x",), {"axis": 2, "masked": True}),
    ("log_softmax_backward", ("g", "y"), {"axis": 1}),
    ("cross_entropy", ("x", "labels"), {"ignore_index": 1, "label_smoothing": 0.1}),
    ("cross_entropy", ("x", "labels"), {"ignore_index": None, "label_smoothing": 0.0}),
    ("cross_entropy_backward", LOSSES, {"ignore_index": 1, "label_smoothing": 0.1}),
    ("cross_entropy_backward", LOSSES, {"ignore_index": None, "label_smoothing": 1.0}),
]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("name", "operands", "params"), CALLS)
def test_the_decompositions_are_the_ops(name, operands, params, dtype):
    x = rng.standard_normal((6, 70, 40)) * 3  # several blocks, and blocks that are not full
    made = {"x": x, "g": rng.standard_normal(x.shape), "losses": rng.standard_normal(x.shape[:-1])}
    made["shift"], made["total"] = x.max(axis=-1), np.exp(x - x.max(axis=-1, keepdims=True)).sum(axis=-1)
    made["y"] = np.log(np.abs(x)) if "log" in name else np.abs(x)
    labels = rng.integers(-1, x.shape[-1] + 1, x.shape[:-1])
    op = OPS[name]
    args = [mt.asarray(labels if n == "labels" else made[n].astype(dtype)) for n in operands]
    fused = op.numpy(*[a._buf for a in args], **params)
    with np.errstate(all="ignore"):
        expected = op.decompose(*args, **params)
    if op.nout > 1:
        for got, of_rows in zip(fused[1:], expected[1:], strict=True):
            np.testing.assert_allclose(got, np.asarray(of_rows), rtol=1e-5)
        fused, expected = fused[0], expected[0]
    expected = np.asarray(expected)
    assert fused.dtype == expected.dtype
    tol = {8: 1e-12, 4: 2e-5, 2: 1e-2}[expected.dtype.itemsize]
    if "bfloat" in str(expected.dtype):
        tol = 0.05
    scale = np.nanmax(np.abs(expected.astype(np.float64)))
    np.testing.assert_allclose(
        fused.astype(np.float64), expected.astype(np.float64), rtol=tol, atol=tol * 1e-2 * max(scale, 1)
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_sums_in_float32(dtype):
    """A sum of 20000 equal terms, made in float16, would stop at 2048."""
    x = mt.zeros((2, 20000), dtype=getattr(mt, dtype))
    np.testing.assert_allclose(np.asarray(mt.nn.softmax(x), np.float64), 1 / 20000, rtol=5e-3)
    np.testing.assert_allclose(np.asarray(mt.nn.log_softmax(x), np.float64), -math.log(20000), rtol=5e-3)
    loss = mt.nn.cross_entropy(x, mt.asarray([0, 5]))
    assert loss.dtype == x.dtype
    np.testing.assert_allclose(float(loss), math.log(20000), rtol=5e-3)


def test_rows_of_minus_infinity():
    x = mt.asarray([[-inf, -inf], [-inf, 1.0], [inf, 0.0]])
    got = np.asarray(mt.nn.softmax(x))
    assert np.isnan(got[0]).all()
    assert got[1].tolist() == [0, 1]
    assert np.isnan(got[2, 0])
    mask = mt.asarray([[True, True], [True, False], [False, True]])
    masked = np.asarray(mt.nn.softmax(x, where=mask))
    assert masked.tolist() == [[0, 0], [0, 0], [0, 1]]
    assert np.asarray(mt.nn.log_softmax(x, where=mask)).tolist() == [[-inf, -inf], [-inf, -inf], [-inf, 0]]
    for order in (1, 2, 3):
        f = lambda x: mt.sum(mt.nn.softmax(x, where=mask) * mt.asarray([1.0, 2.0]))  # noqa: E731
        for _ in range(order):
            f = lambda x, f=f: mt.sum(mt.grad(f)(x) * mt.asarray([1.0, 3.0]))  # noqa: E731
        assert np.isfinite(float(f(x))), order


def test_what_is_not_chosen_does_not_leak():
    """Neither NaN in a sample that is ignored, nor NaN where the mask is false, reaches a gradient."""
    x = mt.asarray([[math.nan, 1.0, inf], [0.5, 1.0, 2.0]])
    g = mt.grad(lambda x: mt.nn.cross_entropy(x, mt.asarray([-1, 1]), ignore_index=-1))(x)
    assert g.tolist()[0] == [0, 0, 0]
    assert np.isfinite(np.asarray(g)).all()
    mask = mt.asarray([[False, True, False], [True, True, True]])
    g = mt.grad(lambda x: mt.sum(mt.nn.log_softmax(x, where=mask)[:, 1] * mt.asarray([2.0, 3.0])))(x)
    assert g.tolist()[0] == [0, 0, 0]
    # A row with NaN spoils its own elements, and none that are masked.
    y = mt.nn.softmax(mt.asarray([math.nan, 1.0, 2.0]), where=mt.asarray([True, True, False]))
    assert y.tolist()[2] == 0


def test_label_types_and_shapes():
    x = mt.asarray(rng.standard_normal((2, 3)))
    for dtype in (mt.int8, mt.uint8, mt.int64, mt.uint64):
        assert mt.nn.cross_entropy(x, mt.asarray([2, 0], dtype=dtype), ignore_index=-100).shape == ()
    assert float(mt.nn.cross_entropy(mt.asarray([1, 1]), mt.asarray(0))) == pytest.approx(math.log(2))
    assert mt.nn.cross_entropy(mt.zeros((0, 3)), mt.zeros(0, dtype=mt.int64), reduction="sum").tolist() == 0
    assert mt.nn.softmax(mt.zeros((2, 0))).shape == (2, 0)
    assert mt.nn.logsumexp(mt.zeros((2, 0)), axis=1).tolist() == [-inf, -inf]
    assert mt.nn.softmax(mt.asarray([1, 1])).tolist() == [0.5, 0.5]
    for fn in (mt.nn.softmax, mt.nn.log_softmax):
        with pytest.raises(mt.errors.DTypeError, match="must be real"):
            fn(mt.asarray([1j]))
        with pytest.raises(mt.errors.AxisError, match="axis 1"):
            fn(mt.ones(3), axis=1)
    with pytest.raises(mt.errors.DTypeError, match="logits must be real"):
        mt.nn.cross_entropy(mt.asarray([1j]), mt.asarray(0))


def test_a_read_only_and_a_strided_operand():
    base = rng.standard_normal((8, 6))
    x = mt.asarray(base)[::2, ::-1]
    expected = np.exp(base[::2, ::-1]) / np.exp(base[::2, ::-1]).sum(-1, keepdims=True)
    np.testing.assert_allclose(np.asarray(mt.nn.softmax(x)), expected)
    y = mt.broadcast_to(mt.asarray(base[0]), (3, 6))
    logs = np.log(np.exp(base[0]) / np.exp(base[0]).sum())
    np.testing.assert_allclose(np.asarray(mt.nn.log_softmax(y)), np.stack([logs] * 3))


MESHES = [{"data": 2, "model": 2}, {"data": 2, "model": 3}]


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_classes_split_over_a_mesh(sizes, smoothing):
    """Vocabulary-parallel: each rank holds some of the classes of some of the samples."""
    n, classes = 6, 10
    x = rng.standard_normal((n, classes))
    labels = rng.integers(0, classes, n)
    labels[1] = -100

    def loss(x, labels):
        return mt.nn.cross_entropy(x, labels, ignore_index=-100, label_smoothing=smoothing)

    expected, slope = mt.value_and_grad(loss)(mt.asarray(x), mt.asarray(labels))
    second = mt.hvp(functools.partial(loss, labels=mt.asarray(labels)), mt.asarray(x), mt.asarray(x))
    mesh = mt.Mesh(sizes)
    dx = mt.distribute(mt.asarray(x), mesh, data=mt.Shard(0), model=mt.Shard(1))
    dl = mt.distribute(mt.asarray(labels), mesh, data=mt.Shard(0))
    for fn in (mt.value_and_grad(loss), mt.compile(mt.value_and_grad(loss))):
        value, g = fn(dx, dl)
        np.testing.assert_allclose(float(value), float(expected))
        np.testing.assert_allclose(np.asarray(g), np.asarray(slope), atol=1e-15)
        assert g.sharding == dx.sharding
    got = mt.hvp(lambda x: loss(x, dl), dx, dx)
    np.testing.assert_allclose(np.asarray(got), np.asarray(second), atol=1e-14)
    for fn in (mt.nn.softmax, mt.nn.log_softmax):
        whole, pull = mt.vjp(fn, mt.asarray(x))
        split, pull_split = mt.vjp(fn, dx)
        np.testing.assert_allclose(np.asarray(split), np.asarray(whole), rtol=1e-12)
        assert split.sharding == dx.sharding
        np.testing.assert_allclose(np.asarray(pull_split(dx)[0]), np.asarray(pull(mt.asarray(x))[0]), atol=1e-14)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("far", [1e17, 1e30, -1e30, -3e38])
def test_the_gradient_of_far_logits_that_are_equal(far, dtype, monkeypatch):
    """A log-sum-exp would have no digits for the number of classes."""
    x, labels = mt.full((2, 4), far, dtype=dtype), mt.asarray([0, 3])
    got = mt.grad(lambda x: mt.nn.cross_entropy(x, labels, reduction="sum"))(x)
    np.testing.assert_allclose(got.numpy().astype(float), 0.25 - np.eye(4)[[0, 3]], rtol=1e-6)
    for tile in (1 << 24, 16):  # whole, and in tiles of a class or two
        monkeypatch.setattr(losses, "WHOLE", 0)
        monkeypatch.setitem(linear_cross_entropy.TILE, "numpy", tile)
        value, pull = mt.vjp(
            lambda x: mt.nn.linear_cross_entropy(x, mt.eye(4, dtype=dtype), labels, reduction="sum"), x
        )
        np.testing.assert_allclose(float(value), 2 * math.log(4), rtol=1e-5)
        got = pull(mt.ones((), dtype=value.dtype))[0]
        np.testing.assert_allclose(got.numpy().astype(float), 0.25 - np.eye(4)[[0, 3]], rtol=1e-6)


def test_a_mask_in_a_dtype_without_infinity():
    x, where = mt.asarray([1.0, 2.0, -3.0]), mt.asarray([True, True, False])
    for fn, hidden in ((mt.nn.softmax, 0.0), (mt.nn.log_softmax, math.nan)):
        got = fn(x.astype(mt.float8_e4m3fn), where=where)
        assert got.dtype == mt.float8_e4m3fn
        np.testing.assert_array_equal(got.numpy()[:2], fn(x, where=where).astype(mt.float8_e4m3fn).numpy()[:2])
        np.testing.assert_array_equal(got.numpy()[2].astype(float), hidden)
    slope = mt.grad(lambda x: mt.nn.softmax(x, where=where)[0])(x.astype(mt.float8_e4m3fn))
    np.testing.assert_allclose(slope.numpy().astype(float), [0.2, -0.2, 0.0], atol=0.01)
