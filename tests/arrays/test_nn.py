"""The functions of models: values known by hand, derivatives against differences, the same numbers in float16."""

from __future__ import annotations

import itertools
import math
import sys
import tracemalloc

import numpy as np
import pytest
from op_samples import calls

import meshtape
from meshtape import arrays as mt
from meshtape.arrays.core.errors import ArgumentError, DTypeError, ShapeError
from meshtape.arrays.nn import linear_cross_entropy as lce
from meshtape.arrays.nn import losses
from meshtape.errors import ArrayIndexError

rng = np.random.default_rng(12)
attention = sys.modules["meshtape.arrays.nn.attention"]
nan, inf = math.nan, math.inf


def n(x):
    return np.asarray(x)


def soft(x, mask=None):
    e = np.exp(x) * (1 if mask is None else mask)
    s = e.sum(-1, keepdims=True)
    return e / np.where(s == 0, 1, s)


# ----- softmax --------------------------------------------------------------------------------------------------------


def test_softmax_under_a_mask():
    x = rng.normal(size=(4, 5))
    mask = rng.random((4, 5)) < 0.6
    mask[1] = False
    mask[0, 0] = True
    got = n(mt.nn.softmax(mt.asarray(x), where=mt.asarray(mask)))
    np.testing.assert_allclose(got, soft(x, mask), atol=1e-15)
    assert (got[1] == 0).all()
    logs = n(mt.nn.log_softmax(mt.asarray(x), where=mt.asarray(mask)))
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(logs, np.log(soft(x, mask)), atol=1e-12)
    meshtape.check_grads(lambda a: mt.nn.softmax(a, where=mt.asarray(mask)), x)


def test_what_is_masked_is_never_looked_at():
    x = mt.asarray([[nan, 1.0, inf, 2.0], [nan, nan, nan, -inf]])
    mask = mt.asarray([[False, True, False, True], [False] * 4])

    def loss(x):
        return mt.sum(mt.nn.softmax(x, where=mask) * mt.asarray([1.0, 2.0, 3.0, 4.0]))

    with np.errstate(invalid="ignore"):
        g = n(meshtape.grad(loss)(x))
    assert np.isfinite(g).all()
    assert (g[0, [0, 2]] == 0).all()
    assert (g[1] == 0).all()
    with pytest.raises(DTypeError, match="boolean"):
        mt.nn.softmax(x, where=mt.ones((2, 4)))


def test_softmax_without_overflow():
    assert mt.nn.softmax(mt.asarray([1000.0, 1000.0])).tolist() == [0.5, 0.5]
    assert mt.nn.softmax(mt.asarray([-inf, 0.0])).tolist() == [0, 1]
    assert np.isnan(n(mt.nn.softmax(mt.asarray([-inf, -inf])))).all()
    assert float(mt.nn.logsumexp(mt.asarray([-inf, -inf]))) == -inf


# ----- losses ---------------------------------------------------------------------------------------------------------


def test_cross_entropy_is_its_definition():
    x, y = rng.normal(size=(3, 4, 5)), rng.integers(0, 5, (3, 4))
    nll = -np.log(np.take_along_axis(soft(x), y[..., None], -1))[..., 0]
    for reduction, want in (("none", nll), ("mean", nll.mean()), ("sum", nll.sum())):
        got = mt.nn.cross_entropy(mt.asarray(x), mt.asarray(y), reduction=reduction)
        np.testing.assert_allclose(n(got), want)
    even = -np.log(soft(x)).mean(-1)
    got = mt.nn.cross_entropy(mt.asarray(x), mt.asarray(y), label_smoothing=0.1)
    np.testing.assert_allclose(float(got), (0.9 * nll + 0.1 * even).mean())
    meshtape.check_grads(lambda a: mt.nn.cross_entropy(a, mt.asarray(y), label_smoothing=0.3), x)


def test_ignored_samples_have_no_loss_and_no_gradient():
    x = mt.asarray(rng.normal(size=(3, 4)))
    y = mt.asarray([1, -100, 2])
    whole = mt.nn.cross_entropy(x, y, ignore_index=-100)
    part = mt.nn.cross_entropy(x[[0, 2]], y[[0, 2]])
    np.testing.assert_allclose(float(whole), float(part))
    g = n(meshtape.grad(lambda x: mt.nn.cross_entropy(x, y, ignore_index=-100))(x))
    assert (g[1] == 0).all()
    none = mt.asarray([-100, -100, -100])
    assert float(mt.nn.cross_entropy(x, none, ignore_index=-100)) == 0
    assert (n(meshtape.grad(lambda x: mt.nn.cross_entropy(x, none, ignore_index=-100))(x)) == 0).all()
    assert mt.nn.cross_entropy(x, y, reduction="none", ignore_index=-100)[1].tolist() == 0
    assert float(mt.nn.cross_entropy(x, mt.asarray([1, 0, 2]), ignore_index=0)) == pytest.approx(float(part))
    bad = mt.asarray([nan, 1.0, 2.0, 3.0])
    assert np.isfinite(
        n(meshtape.grad(lambda x: mt.nn.cross_entropy(mt.where(y[:, None] == -100, bad, x), y, ignore_index=-100))(x))
    ).all()


def test_labels_that_are_no_class():
    x = mt.zeros((2, 3))
    for labels in ([0, 3], [-1, 0]):
        with pytest.raises(ArrayIndexError, match="none of the 3 classes"):
            mt.nn.cross_entropy(x, mt.asarray(labels))
        traced = meshtape.compile(mt.nn.cross_entropy)(x, mt.asarray(labels))
        assert math.isnan(float(traced))
    with pytest.raises(DTypeError, match="integers"):
        mt.nn.cross_entropy(x, mt.zeros(2))
    with pytest.raises(ShapeError, match=r"\(3,\)"):
        mt.nn.cross_entropy(x, mt.asarray([0, 0, 0]))
    assert mt.nn.cross_entropy(x, mt.asarray([0, 1], dtype=mt.uint8)).dtype == mt.float64
    assert mt.nn.cross_entropy(mt.zeros((2, 3), dtype=mt.bfloat16), mt.asarray([0, 1])).dtype == mt.bfloat16


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_linear_cross_entropy_in_tiles(monkeypatch, dtype):
    """Tiles of a few rows and classes give the loss and the gradients of the logits; labels are in all of them, in
    none, and ignored."""
    monkeypatch.setattr(lce, "TILE", {"numpy": 100})
    hidden, weight = (mt.asarray(rng.normal(size=s)).astype(dtype) for s in ((3, 11, 4), (17, 4)))
    y = rng.integers(0, 17, (3, 11))
    y[0, :2] = 3, -100
    hidden[0, 1] = nan  # an ignored sample
    options = {"ignore_index": -100, "label_smoothing": 0.2}

    def whole(h, w):
        return mt.nn.cross_entropy(h.astype(mt.float64) @ w.mT.astype(mt.float64), y, **options)

    def tiled(h, w):
        return mt.nn.linear_cross_entropy(h, w.mT, y, **options)

    def results(fn):
        loss, slopes = meshtape.value_and_grad(lambda p: fn(*p))((hidden, weight))
        return [n(x).astype(np.float64) for x in (loss, *slopes)]

    for kept in (1 << 26, 0):
        monkeypatch.setattr(losses, "WHOLE", kept)
        for got, want in zip(results(tiled), results(whole), strict=True):
            tol = {"float64": 1e-13, "float32": 1e-5, "bfloat16": 2e-2}[dtype]
            np.testing.assert_allclose(got, want, rtol=tol, atol=tol / 20)
    assert meshtape.compile(tiled)(hidden, weight).tolist() == tiled(hidden, weight).tolist()
    if dtype == "float64":
        hidden[0, 1] = 0
        meshtape.check_grads(tiled, hidden, weight, order=2)
        far = mt.nn.linear_cross_entropy(mt.full((1, 1), 1e4), mt.asarray([[1.0, 1.0 + 1e-4]]), mt.asarray([0]))
        assert float(far) == pytest.approx(math.log1p(math.e), rel=1e-9)
        for labels, error in ((y[:1], ShapeError), (y + 0.5, DTypeError), (y + 17, ArrayIndexError)):
            with pytest.raises(error, match=r"\[linear_cross_entropy\]"):
                mt.nn.linear_cross_entropy(hidden, weight.mT, mt.asarray(labels))


def test_rows_of_a_stack_times_a_matrix_are_one_call_and_its_gradient_one_product():
    x, w = mt.asarray(np.arange(24.0).reshape(2, 3, 4)), mt.asarray(np.arange(20.0).reshape(4, 5))
    with meshtape.Tape() as tape:
        tape.watch(x, w)
        y = lce.linear(x, w)
    assert [e.op.name for e in tape.entries] == ["matmul"]
    g = np.arange(30.0).reshape(2, 3, 5)
    dx, dw = tape.gradient(y, [x, w], mt.asarray(g))
    np.testing.assert_array_equal(y, np.asarray(x) @ np.asarray(w))
    np.testing.assert_array_equal(dx, g @ np.asarray(w).T)
    np.testing.assert_array_equal(dw, np.asarray(x).reshape(6, 4).T @ g.reshape(6, 5))


def test_linear_cross_entropy_holds_no_logits():
    hidden, weight = mt.zeros((4096, 2), dtype=mt.float32), mt.zeros((2, 6000), dtype=mt.float32)
    step = meshtape.value_and_grad(lambda p: mt.nn.linear_cross_entropy(*p, mt.zeros(4096, dtype=mt.int64)))
    tracemalloc.start()
    try:
        loss, _ = step((hidden, weight))
        assert tracemalloc.get_traced_memory()[1] < 4096 * 6000 * 4 * 0.7
    finally:
        tracemalloc.stop()
    assert float(loss) == pytest.approx(math.log(6000))


def test_info_nce():
    eye = mt.eye(2)
    np.testing.assert_allclose(float(mt.nn.info_nce(eye, eye, temperature=1.0)), 0.3132617, atol=1e-7)
    keys = mt.asarray([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.8, -0.6]])
    np.testing.assert_allclose(float(mt.nn.info_nce(eye, keys, temperature=1.0, group_size=2)), 1.0602080, atol=1e-7)
    assert np.isfinite(float(mt.nn.info_nce(eye, keys, temperature=1e-300, group_size=2)))
    with_zero = mt.asarray([[0.0, 0.0], [3.0, 4.0]])
    g = meshtape.grad(lambda q: mt.nn.info_nce(q, eye, normalize=True))(with_zero)
    assert np.isfinite(n(g)).all()
    meshtape.check_grads(
        lambda q, k: mt.nn.info_nce(q, k, temperature=0.5, normalize=True), *rng.normal(size=(2, 3, 4))
    )
    with pytest.raises(ShapeError, match="groups of 1"):
        mt.nn.info_nce(eye, keys)


# ----- norms ----------------------------------------------------------------------------------------------------------


def normal(x, axes, eps=1e-5):
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


def test_group_norm_of_the_requirements():
    x = mt.asarray([[1.0, 2.0, 4.0, 8.0]])
    np.testing.assert_allclose(n(mt.group_norm(x, 2))[0], [-0.99998, 0.99998, -0.9999988, 0.9999988], atol=1e-6)
    _, pull = meshtape.vjp(lambda x: mt.group_norm(x, 2), x)
    np.testing.assert_allclose(
        n(pull(mt.asarray([[1.0, 2.0, 3.0, 4.0]]))[0])[0], [-4e-5, 4e-5, -6.3e-7, 6.2e-7], atol=2e-6
    )
    assert (n(meshtape.grad(lambda x: mt.sum(mt.group_norm(x, 2) ** 2))(mt.ones((1, 4)))) == 0).all()
    with pytest.raises(ShapeError, match="3 groups"):
        mt.group_norm(x, 3)


@pytest.mark.parametrize("affine", [False, True])
def test_norms_are_their_definitions(affine):
    x, w, b = rng.normal(size=(3, 4, 5)), rng.normal(size=4), rng.normal(size=4)
    scale = (w[:, None], b[:, None]) if affine else (1, 0)
    own = tuple(map(mt.asarray, (w, b))) if affine else ()
    a = mt.asarray(x)
    group = normal(x.reshape(3, 2, 2, 5), (2, 3)).reshape(x.shape)
    np.testing.assert_allclose(n(mt.group_norm(a, 2, *own)), group * scale[0] + scale[1], atol=1e-12)
    np.testing.assert_allclose(n(mt.instance_norm(a, *own)), normal(x, 2) * scale[0] + scale[1], atol=1e-12)
    got = mt.batch_norm(a, mt.zeros(4), mt.ones(4), *own, training=True)
    np.testing.assert_allclose(n(got.out), normal(x, (0, 2)) * scale[0] + scale[1], atol=1e-12)
    np.testing.assert_allclose(n(got.running_mean), 0.1 * x.mean((0, 2)), atol=1e-12)
    np.testing.assert_allclose(n(got.running_var), 0.9 + 0.1 * x.var((0, 2), ddof=1), atol=1e-12)
    wide = rng.normal(size=5)
    rms = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (wide if affine else 1)
    np.testing.assert_allclose(n(mt.rms_norm(a, 5, *([mt.asarray(wide)] if affine else []))), rms, atol=1e-12)

    extra = (w, b) if affine else ()
    meshtape.check_grads(lambda x, *p: mt.group_norm(x, 2, *p), x, *extra)
    meshtape.check_grads(lambda x, *p: mt.instance_norm(x, *p), x, *extra)
    meshtape.check_grads(lambda x, *p: mt.batch_norm(x, mt.zeros(4), mt.ones(4), *p, training=True).out, x, *extra)
    meshtape.check_grads(lambda x, *p: mt.rms_norm(x, 5, *p), x, *([wide] if affine else []))


def test_batch_norm_by_running_statistics():
    x, mean, var = rng.normal(size=(3, 2)), np.array([0.5, -1.0]), np.array([2.0, 0.5])
    got = mt.batch_norm(*map(mt.asarray, (x, mean, var)), training=False)
    np.testing.assert_allclose(n(got.out), (x - mean) / np.sqrt(var + 1e-5))
    assert got.running_mean.tolist() == mean.tolist()


def test_norms_of_little():
    for f in (
        lambda x: mt.batch_norm(x, mt.zeros(2), mt.ones(2), training=True).out,
        lambda x: mt.group_norm(x, 2),
        lambda x: mt.instance_norm(x[..., None]),
        lambda x: mt.rms_norm(x, 2),
    ):
        assert f(mt.zeros((0, 2))).shape[:2] == (0, 2)
        one = mt.asarray([[1.0, 2.0]])
        assert np.isfinite(n(f(one))).all()
        assert np.isfinite(n(meshtape.grad(lambda x, f=f: mt.sum(f(x)))(one))).all()
    empty = mt.batch_norm(mt.zeros((0, 2)), mt.zeros(2), mt.ones(2), training=True)
    assert empty.running_var.tolist() == [1, 1]
    single = mt.batch_norm(mt.asarray([[3.0, 4.0]]), mt.zeros(2), mt.ones(2), training=True)
    assert single.out.tolist() == [[0, 0]]  # one value a channel


@pytest.mark.parametrize("dtype", [mt.float16, mt.bfloat16])
def test_short_floats_are_normed_in_float32(dtype):
    x = mt.asarray([[60000.0, 30000.0, 1.0, 2.0]], dtype=dtype)
    for y in (
        mt.group_norm(x, 1),
        mt.rms_norm(x, 4),
        mt.instance_norm(x[:, None]),
        mt.batch_norm(x.T, mt.zeros(1), mt.ones(1), training=True).out,
    ):
        assert y.dtype in (dtype, mt.float32)
        assert np.isfinite(n(y).astype(float)).all()
        assert abs(n(y).astype(float)).max() > 1


# ----- dropout, embedding ---------------------------------------------------------------------------------------------


def test_dropout():
    key, x = mt.random.key(3), mt.asarray(rng.normal(size=(50, 40)))
    y = n(mt.nn.dropout(x, 0.25, key=key))
    kept = y != 0
    np.testing.assert_allclose(y[kept], n(x)[kept] / 0.75)
    assert abs(kept.mean() - 0.75) < 0.05
    np.testing.assert_array_equal(n(mt.nn.dropout(x, 0.25, key=key)), y)
    assert mt.nn.dropout(x, 0.25, key=key, training=False).tolist() == x.tolist()
    assert mt.nn.dropout(x, 0.0, key=key).tolist() == x.tolist()
    assert (n(mt.nn.dropout(x, 1.0, key=key)) == 0).all()
    g = n(meshtape.grad(lambda x: mt.sum(mt.nn.dropout(x, 0.25, key=key)))(x))
    np.testing.assert_allclose(g, kept / 0.75)
    for rate in (-0.1, 1.1):
        with pytest.raises(ValueError, match="between 0 and 1"):
            mt.nn.dropout(x, rate, key=key)


def test_dropout_add_rounds_once():
    key = mt.random.key(4)
    x, y = mt.ones((2, 2), dtype=mt.float16), mt.asarray([2048.0, 0.0], dtype=mt.float16)
    got = mt.nn.dropout_add(x * 3, y, 0.5, key=key)
    assert got.dtype == mt.float16
    wide = mt.nn.dropout(x.astype(np.float32) * 3, 0.5, key=key) + y.astype(np.float32)
    np.testing.assert_array_equal(n(got), n(wide).astype(np.float16))
    assert mt.nn.dropout_add(x, y, 1.0, key=key).tolist() == mt.broadcast_to(y, (2, 2)).tolist()


@pytest.mark.parametrize("dtype", [np.int8, np.uint64, np.bool_])
def test_integers_are_widened_or_refused(dtype):
    """Their fractions are never cast back, which is left open for negative ones among unsigned integers."""
    x = mt.asarray(np.array([[1, 0, 0], [3, 5, 7], [1, 1, 2]]).astype(dtype))
    wide = mt.astype(x, mt.float64)
    for fn in (mt.nn.softmax, mt.nn.log_softmax, mt.nn.gelu, *([mt.linalg.det] if dtype is not np.bool_ else [])):
        assert fn(x).dtype == mt.float64
        np.testing.assert_array_equal(n(fn(x)), n(fn(wide)))
    key = mt.random.key(0)
    refused = [lambda: mt.nn.dropout(x, 0.5, key=key), lambda: mt.nn.dropout_add(x, x, 0.5, key=key)]
    for call in (*refused, *([lambda: mt.linalg.det(x)] if dtype is np.bool_ else [])):
        with pytest.raises(DTypeError):
            call()
    trained = meshtape.optim.lazy_adam(0.1)
    assert trained.init({"x": x})["mean"]["x"] is None


def test_embedding():
    table = mt.asarray(rng.normal(size=(4, 3)))
    ids = mt.asarray([[1, 3], [1, 0]])
    np.testing.assert_array_equal(n(mt.nn.embedding(ids, table)), n(table)[n(ids)])
    g = n(meshtape.grad(lambda t: mt.sum(mt.nn.embedding(ids, t, padding_idx=3)))(table))
    assert g.tolist() == [[1] * 3, [2] * 3, [0] * 3, [0] * 3]
    assert (
        n(meshtape.grad(lambda t: mt.sum(mt.nn.embedding(mt.asarray([-1, 0]), t, padding_idx=3)))(table))[3].sum() == 0
    )
    with pytest.raises(DTypeError, match="integers"):
        mt.nn.embedding(mt.ones(2), table)
    with pytest.raises(IndexError):
        mt.nn.embedding(mt.asarray([4]), table)


# ----- attention ------------------------------------------------------------------------------------------------------


def attend(q, k, v, mask=None, bias=0.0):
    s = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]) + bias
    return soft(s, mask) @ v


def test_attention_is_its_definition():
    q, k, v = rng.normal(size=(2, 3, 4, 5)), rng.normal(size=(2, 3, 6, 5)), rng.normal(size=(2, 3, 6, 7))
    a = tuple(map(mt.asarray, (q, k, v)))
    sdpa = mt.nn.scaled_dot_product_attention
    np.testing.assert_allclose(n(sdpa(*a)), attend(q, k, v), atol=1e-12)
    mask = rng.random((4, 6)) < 0.5
    mask[2] = False
    np.testing.assert_allclose(n(sdpa(*a, mask=mt.asarray(mask))), attend(q, k, v, mask), atol=1e-12)
    assert (n(sdpa(*a, mask=mt.asarray(mask)))[..., 2, :] == 0).all()
    bias = np.where(mask, 0.5, -inf)
    np.testing.assert_allclose(n(sdpa(*a, mask=mt.asarray(bias))), attend(q, k, v, mask), atol=1e-12)
    np.testing.assert_allclose(n(sdpa(*a, is_causal=True)), attend(q, k, v, np.tri(4, 6)), atol=1e-12)
    both = attend(q, k, v, np.tri(4, 6) * mask)
    np.testing.assert_allclose(n(sdpa(*a, is_causal=True, mask=mt.asarray(mask))), both, atol=1e-12)
    meshtape.check_grads(lambda q, k, v: sdpa(q, k, v, is_causal=True, mask=mt.asarray(mask)), q[0], k[0], v[0])
    with np.errstate(invalid="raise"):
        g = meshtape.grad(lambda q: mt.sum(sdpa(q, *a[1:], mask=mt.asarray(bias))))(a[0])
    assert np.isfinite(n(g)).all()


def test_grouped_queries():
    q, k, v = rng.normal(size=(2, 4, 3, 5)), rng.normal(size=(2, 2, 3, 5)), rng.normal(size=(2, 2, 3, 5))
    got = mt.nn.scaled_dot_product_attention(*map(mt.asarray, (q, k, v)))
    np.testing.assert_allclose(n(got), attend(q, k.repeat(2, 1), v.repeat(2, 1)), atol=1e-12)
    with pytest.raises(ShapeError, match="4 heads"):
        mt.nn.scaled_dot_product_attention(mt.asarray(q), mt.ones((2, 3, 3, 5)), mt.ones((2, 3, 3, 5)))


@pytest.mark.parametrize("name", ["attention", "attention_backward", "attention_bias_backward"])
def test_tiles_of_attention_are_parts_of_the_whole(name, monkeypatch):
    op = mt.OPS[name]
    monkeypatch.setattr(attention, "LEAST_ROWS", 2)
    for args, params in calls(name):
        wanted = op.decompose(*map(mt.asarray, args), **params)
        for limit in (1, 12, 1000):
            monkeypatch.setattr(attention, "TILE", limit)
            found = op.numpy(*args, **params)
            for f, w in zip(*(x if op.nout > 1 else (x,) for x in (found, wanted)), strict=True):
                np.testing.assert_allclose(f, n(w), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("where", "bad"), [(0, nan), (0, inf), (1, nan), (2, nan), (3, nan), (3, -inf)])
def test_numbers_that_are_none_reach_as_far_in_tiles_as_in_the_whole(where, bad, monkeypatch):
    shapes = (2, 12, 4), (2, 12, 3), (2, 12, 3), (2, 12, 4)  # of the cotangent, query, key and value
    monkeypatch.setattr(attention, "TILE", 1)
    hidden = rng.random((12, 12)) < 0.3
    for row, diagonal, mask in itertools.product((0, 5, 11), (None, 0, -3), (False, hidden)):
        operands, masks = [rng.normal(size=s) for s in shapes], [~hidden] if mask is hidden else []
        operands[where][0, row, 1] = bad
        found = []
        for least in (1, 12):
            monkeypatch.setattr(attention, "LEAST_ROWS", least)
            with np.errstate(invalid="ignore"):
                saved = ()
                for name, given in (("attention", operands[1:]), ("attention_backward", operands)):
                    saved = mt.OPS[name].numpy(*given, *saved, *masks, scale=0.5, diagonal=diagonal)
                    found += saved
            found[-5][np.isnan(found[-4])] = 0  # the shift of a row whose sum is NaN has no say
        for tiled, whole in zip(found[:6], found[6:], strict=True):
            np.testing.assert_allclose(tiled, whole, rtol=1e-9, atol=1e-9)
        if where == 3:  # zero times NaN, as in softmax(scores, where=mask) @ value
            assert not np.isfinite(found[0][0, :, 1]).any()
            assert np.isfinite(found[0][1]).all()


def test_memory_of_attention_grows_with_the_length_and_not_with_its_square(peak_of, monkeypatch):
    monkeypatch.setattr(attention, "TILE", 1)
    monkeypatch.setattr(attention, "LEAST_ROWS", 64)
    monkeypatch.setattr(attention, "WHOLE", 0)
    step = meshtape.grad(lambda x: mt.sum(mt.nn.scaled_dot_product_attention(x, x, x)))
    inputs = [mt.ones((s, 8), dtype=mt.float32) for s in (1024, 2048)]
    short, long = (peak_of(lambda x=x: step(x)) for x in inputs)
    assert 2.2 * short > long < 4 * 2048**2


def test_attention_in_short_floats_and_with_dropout():
    q = mt.asarray(rng.normal(size=(3, 4)), dtype=mt.bfloat16)
    assert mt.nn.scaled_dot_product_attention(q, q, q).dtype == mt.bfloat16
    key = mt.random.key(0)
    dropped = mt.nn.scaled_dot_product_attention(q, q, q, dropout_rate=1.0, dropout_key=key)
    assert (n(dropped).astype(float) == 0).all()
    with pytest.raises(ValueError, match="key"):
        mt.nn.scaled_dot_product_attention(q, q, q, dropout_rate=0.5)
    with pytest.raises(ShapeError, match="fit together"):
        mt.nn.scaled_dot_product_attention(q, q[:, :3], q)


def test_entries_carry_the_name_that_was_called():
    from meshtape.arrays.core.op import recording, state

    class Origins:
        def __init__(self):
            self.seen = set()

        def record(self, op, args, bufs, outs, params):
            self.seen.add(state.origin)

    recorder = Origins()
    with recording(recorder):
        mt.group_norm(mt.ones((2, 2)), 1)
    assert recorder.seen == {"group_norm"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_of_short_floats_are_never_rounded(dtype):
    rng = np.random.default_rng(0)
    h, w = (mt.astype(mt.asarray(rng.standard_normal(s)), dtype) for s in ((40, 64), (64, 512)))
    labels = rng.integers(0, 512, 40)
    right = mt.nn.linear_cross_entropy(h.astype("float64"), w.astype("float64"), labels, reduction="none")
    got = mt.nn.linear_cross_entropy(h, w, labels, reduction="none")
    np.testing.assert_allclose(np.asarray(got), np.asarray(right), rtol=1e-5)
    large = mt.nn.linear_cross_entropy(
        mt.full((2, 8), 200, dtype=dtype), mt.full((8, 3), 200, dtype=dtype), mt.asarray([0, 1])
    )
    assert float(large) == pytest.approx(math.log(3))


def test_masks_of_attention_are_boolean_or_floating_and_heads_broadcast():
    q = mt.asarray(np.random.default_rng(0).standard_normal((2, 4, 5, 3)))
    for mask in (np.eye(5, dtype=np.int64), np.eye(5, dtype=np.uint8)):
        with pytest.raises(DTypeError, match=r"astype\(bool\)"):
            mt.nn.scaled_dot_product_attention(q, q, q, mask=mask)
    one = mt.nn.scaled_dot_product_attention(q[:, :1], q, q)
    repeated = mt.nn.scaled_dot_product_attention(mt.repeat(q[:, :1], 4, axis=1), q, q)
    np.testing.assert_allclose(np.asarray(one), np.asarray(repeated), rtol=1e-12)
    for k, mask in ((q[:, :0], None), (q[:, :2], np.ones((2, 2, 5, 5), bool))):
        with pytest.raises(ShapeError, match="heads of the query"):
            mt.nn.scaled_dot_product_attention(q, k, k, mask=mask)
    for flag in (1, None, "yes", mt.asarray(True)):
        with pytest.raises(ArgumentError, match="is_causal is True or False"):
            mt.nn.scaled_dot_product_attention(q, q, q, is_causal=flag)


# ----- rotary positions -----------------------------------------------------------------------------------------------


def test_pairs_turn_by_their_angles():
    """As complex numbers: a pair times the number of its angle on the unit circle."""
    rng = np.random.default_rng(0)
    x, angles = rng.standard_normal((2, 3, 5, 8)), rng.uniform(-9, 9, (5, 4))
    got = np.asarray(mt.nn.rotary_embedding(x, np.cos(angles), np.sin(angles)))
    pairs = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)
    np.testing.assert_allclose(got, np.concatenate([pairs.real, pairs.imag], axis=-1), atol=1e-14)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_floats_are_turned_in_float32_and_rounded_once(dtype):
    rng = np.random.default_rng(0)
    angles = rng.uniform(-9, 9, (5, 4)).astype(np.float32)
    x, c, s = mt.asarray(rng.standard_normal((3, 5, 8))).astype(getattr(mt, dtype)), np.cos(angles), np.sin(angles)
    got = mt.nn.rotary_embedding(x, c, s)
    wide = mt.nn.rotary_embedding(x.astype(mt.float32), c, s)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wide.astype(x.dtype)))


def test_tables_that_do_not_fit_are_refused():
    x = np.ones((2, 3, 4))
    for table in (np.ones((3, 4)), np.ones((4, 2)), np.ones((1, 2, 3, 2)), np.ones((3, 1))):
        with pytest.raises(ShapeError, match=r"\[rotary_embedding\] cosines and sines"):
            mt.nn.rotary_embedding(x, table, table)
    with pytest.raises(ShapeError, match=r"\[rotary_embedding\] cosines and sines"):
        mt.nn.rotary_embedding(x, np.ones((3, 2)), np.ones(2))
    with pytest.raises(ShapeError, match="its length is even"):
        mt.nn.rotary_embedding(np.ones((2, 3)), np.ones((2, 1)), np.ones((2, 1)))
    with pytest.raises(DTypeError, match="real numbers"):
        mt.nn.rotary_embedding(x * 1j, np.ones((3, 2)), np.ones((3, 2)))


def test_attention_over_no_keys_with_an_added_mask_has_all_derivatives():
    q, k, v, mask = mt.ones((2, 4)), mt.zeros((0, 4)), mt.zeros((0, 5)), mt.ones((2, 1))
    f = lambda q, mask: mt.sum(mt.sin(mt.nn.scaled_dot_product_attention(q, k, v, mask=mask)))  # noqa: E731
    assert meshtape.jvp(f, (q, mask), (q, mask))[1] == 0
    assert not meshtape.hvp(lambda q: f(q, mask), q, q).numpy().any()
