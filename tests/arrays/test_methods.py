"""What NumPy users expect an array object to have: methods, protocols of the language, NumPy's own functions."""

from __future__ import annotations

import numpy as np
import pytest

import meshtape as mt

X = np.array([[3.0, -1.0, 2.0], [0.5, 7.0, -4.0]])
C = X + 1j * X[::-1]


@pytest.mark.parametrize("name", ["sum", "prod", "mean", "var", "std", "max", "min", "any", "all", "argmax", "argmin"])
@pytest.mark.parametrize("options", [{}, {"axis": 0}, {"axis": -1, "keepdims": True}])
def test_reductions_are_methods(name: str, options: dict) -> None:
    got, want = getattr(mt.asarray(X), name)(**options), getattr(X, name)(**options)
    assert got.shape == np.shape(want)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-12)


def test_corrections() -> None:
    np.testing.assert_allclose(mt.asarray(X).var(axis=0, correction=1).numpy(), X.var(axis=0, ddof=1))
    np.testing.assert_allclose(mt.asarray(X).std(correction=1).numpy(), X.std(ddof=1))


def test_complex_numbers() -> None:
    c = mt.asarray(C)
    np.testing.assert_array_equal(c.real.numpy(), C.real)
    np.testing.assert_array_equal(c.imag.numpy(), C.imag)
    np.testing.assert_array_equal(c.conj().numpy(), C.conj())
    for got, want in ((c.var(axis=0), C.var(axis=0)), (c.std(), C.std())):
        assert got.dtype == mt.float64
        np.testing.assert_allclose(got.numpy(), want)
    # Real numbers are their own conjugates, of whatever dtype.
    for dtype in (mt.bool, mt.int8, mt.bfloat16, mt.float32):
        assert mt.conj(mt.ones(2, dtype=dtype)).dtype == dtype
        assert mt.vecdot(mt.ones(2, dtype=dtype), mt.ones(2, dtype=dtype)).dtype == dtype


def test_the_variance_of_complex_numbers_has_a_derivative() -> None:
    mt.check_grads(lambda c: mt.var(c), C)


def test_rearranging() -> None:
    x = mt.asarray(X)
    assert x.transpose().tolist() == x.transpose(1, 0).tolist() == x.transpose((1, 0)).tolist() == X.T.tolist()
    assert mt.asarray(1.0).transpose().shape == ()
    assert x.flatten().tolist() == x.ravel().tolist() == X.ravel().tolist()
    assert x.reshape(1, 2, 1, 3).squeeze().shape == (2, 3)
    assert x.reshape(1, 2, 1, 3).squeeze(0).shape == (2, 1, 3)
    assert x.clip(0, 2).tolist() == X.clip(0, 2).tolist()
    with pytest.raises(mt.errors.ShapeError, match=r"\[squeeze\]"):
        x.squeeze(0)


def test_methods_alias_nothing() -> None:
    for way in (mt.Array.copy, mt.Array.flatten, mt.Array.transpose, mt.Array.squeeze, mt.Array.conj):
        x = mt.asarray(X)
        y = way(x)
        y[0] = 99.0
        np.testing.assert_array_equal(x.numpy(), X)
        z = way(x)
        x[0] = 99.0
        assert 99.0 not in z


def test_divmod() -> None:
    a = np.array([7, -7, 5])
    for got, want in (
        (divmod(mt.asarray(a), 3), divmod(a, 3)),
        (divmod(9, mt.asarray(a)), divmod(9, a)),
        (divmod(mt.asarray(a), mt.asarray(a[::-1].copy())), divmod(a, a[::-1])),
    ):
        assert [g.tolist() for g in got] == [w.tolist() for w in want]


def test_in() -> None:
    x = mt.asarray(X)
    assert 7.0 in x
    assert 8.0 not in x
    assert float("nan") not in mt.asarray([np.nan])
    assert 1.0 not in mt.zeros((0, 3))


def test_clip_has_no_use_for_bounds_beyond_the_dtype() -> None:
    x = mt.asarray([0, 200], dtype=mt.uint8)
    assert mt.clip(x, -1, None).tolist() == [0, 200]
    assert mt.clip(x, -5, 300).tolist() == [0, 200]
    assert mt.clip(x, -1, 100).dtype == mt.uint8
    assert mt.clip(mt.asarray([True]), None, None).tolist() == [True]
    with pytest.raises(mt.errors.NumberRangeError):
        mt.clip(x, 300, None)


def test_writes_of_fractions_among_integers() -> None:
    x = mt.asarray([1, 2, 3])
    assert x.at[0].set(1.9).tolist() == [1, 2, 3]  # as NumPy's assignment does
    for way in ("add", "multiply", "min", "max"):
        for key in (0, [0, 0], mt.asarray([True, False, False])):
            with pytest.raises(mt.errors.DTypeError, match=r"cannot take a result of float64"):
                getattr(x.at[key], way)(0.5)
    assert mt.ones(2, dtype=mt.float32).at[0].add(mt.asarray(0.5)).dtype == mt.float32


def test_a_write_needs_an_index() -> None:
    for way in ("set", "add", "multiply", "min", "max"):
        with pytest.raises(TypeError, match="needs an index"):
            getattr(mt.ones(3).at, way)(1.0)
    assert mt.ones(3).at[None].set(2.0).tolist() == [2, 2, 2]
    assert repr(mt.ones((2, 3)).at[0, 1:]) == "<x.at[(0, slice(1, None, None))] of an array of shape (2, 3)>"


def test_activations_of_integers_are_floats() -> None:
    np.testing.assert_allclose(mt.nn.sigmoid(mt.asarray([0, 2])).numpy(), [0.5, 1 / (1 + np.exp(-2.0))])
    np.testing.assert_allclose(mt.nn.silu(mt.asarray([1])).numpy(), [1 / (1 + np.exp(-1.0))])


def test_one_hot_counts_beyond_the_dtype_of_the_labels() -> None:
    for dtype, classes in ((mt.int8, 300), (mt.uint8, 256), (mt.uint64, 3)):
        hot = mt.nn.one_hot(mt.asarray([0, 2], dtype=dtype), classes)
        np.testing.assert_array_equal(hot.numpy(), np.eye(classes, dtype=np.float32)[[0, 2]])
    with pytest.raises(ValueError, match=r"\[one_hot\]"):
        mt.nn.one_hot(mt.asarray([0]), -1)


def test_dropout_needs_no_key_where_it_does_nothing() -> None:
    x = mt.asarray(X)
    for y in (mt.nn.dropout(x, 0.5, training=False), mt.nn.dropout(x, 0.0)):
        np.testing.assert_array_equal(y.numpy(), X)
        y[0] = 0.0
        np.testing.assert_array_equal(x.numpy(), X)
    with pytest.raises(ValueError, match="needs a key"):
        mt.nn.dropout(x, 0.5)
    with pytest.raises(ValueError, match="between 0 and 1"):
        mt.nn.dropout(x, 1.5, training=False)


def test_saturating_casts_know_what_short_floats_can_hold() -> None:
    big = mt.asarray([65504.0, 65536.0, 1e30, -1e30, np.inf]).astype(mt.bfloat16)
    assert mt.astype(big, mt.float16, saturate=True).tolist() == [65504.0] * 3 + [-65504.0, 65504.0]


def test_sorted_zeros_keep_their_order() -> None:
    x = np.array([0.0, -0.0, 3.0, -0.0, np.nan, 0.0, -1.0], np.float32)
    for descending in (False, True):
        got = mt.sort(mt.asarray(x), descending=descending).numpy()
        want = np.sort(x, kind="stable") if not descending else np.flip(np.sort(np.flip(x), kind="stable"))
        np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(want[want == 0]))
        np.testing.assert_array_equal(got, want)


def test_einsum_computes_in_the_dtype_of_all_operands() -> None:
    a, b, c = np.ones((2, 2), np.float32), np.full((2, 2), 300, np.uint16), np.full((2, 2), -300, np.int16)
    got, want = mt.einsum("ij,jk,kl->il", *map(mt.asarray, (a, b, c))), np.einsum("ij,jk,kl->il", a, b, c)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.numpy(), want)


def test_norms_of_matrices_without_elements() -> None:
    for order in (1, 2, np.inf, "fro", "nuc"):
        assert mt.linalg.matrix_norm(mt.zeros((2, 0, 3)), ord=order).tolist() == [0.0, 0.0]
    with pytest.raises(mt.errors.ShapeError):
        mt.linalg.matrix_norm(mt.zeros((0, 3)), ord=-2)


METHODS = {
    "sum": [(0, "float32"), (0, None, None, True), {"where": X > 0}, {"initial": 2.0}],
    "prod": [(1, "float32"), {"where": X > 0}],
    "mean": [(0, "float32"), {"where": X > 0}],
    "std": [(0, "float32", None, 1)],
    "var": [{"where": X > 0}],
    "max": [{"initial": 0.0}, {"initial": 0.0, "where": X > 0}],
    "min": [{"initial": 0.0}, (0, None, True)],
    "any": [{"where": X > 0}, {"out": None}],
    "all": [{"where": X > 0}],
    "take": [([1, 5],), (1,), ([1], 1), {"indices": [1], "axis": 0}],
    "sort": [(None,), {"axis": 0, "descending": False}][:1],
    "argsort": [(None,), (0, "stable")],
    "item": [(3,), (1, 2), ((1, 2),), (-1,)],
    "clip": [(0, 2), {"min": 0}, (None, 2, None)],
    "repeat": [{"repeats": 2, "axis": 1}],
    "compress": [([True, False], 0), ([False, True, True],)],
    "argpartition": [(1, 0)],
    "copy": [(), {"order": "F"}],
    "astype": [("int32", "C"), {"dtype": "float32", "casting": "same_kind", "copy": False}],
    "round": [(1,), {"decimals": 1}],
    "cumsum": [(None, "float32"), {"axis": 1}],
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_the_arguments_of_numpy(name: str) -> None:
    for given in METHODS[name]:
        args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
        host = np.sort(X) if name == "argpartition" else X
        want = np.sort(X, *args, **kwargs) if name == "sort" else getattr(host, name)(*args, **kwargs)
        got = getattr(mt.asarray(host), name)(*args, **kwargs)
        assert np.asarray(got).dtype == np.asarray(want).dtype
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-6)


def test_results_of_methods_go_into_out() -> None:
    held, host = mt.zeros(3), np.zeros(3)
    assert mt.asarray(X).sum(axis=0, out=held) is held
    assert mt.asarray(X).sum(0, None, host) is host
    assert held.tolist() == host.tolist() == X.sum(0).tolist()


def test_arguments_and_attributes_that_are_missing_say_what_to_write() -> None:
    x = mt.asarray(X)
    for call in (
        lambda: x.sum(nothing=1),
        lambda: x.take([9], mode="clip"),
        lambda: x.sum(0, 1, 2, 3, 4, 5, 6),
        lambda: x.std(dtype=int),
        lambda: x.astype("int32", casting="safe"),
    ):
        with pytest.raises(mt.errors.MeshtapeError):
            call()
    for name in (
        "fill",
        "view",
        "strides",
        "flags",
        "base",
        "data",
        "put",
        "resize",
        "partition",
        "tofile",
        "byteswap",
    ):
        assert not hasattr(x, name)
        with pytest.raises(mt.errors.NumPyAttributeError, match=r"np\.asarray\(x\)|write x"):
            getattr(x, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        x.nothing  # noqa: B018
    assert (x.itemsize, x.flat.tolist()) == (8, X.ravel().tolist())


def test_hashes_of_numbers() -> None:
    assert {mt.asarray(2.0): "two"}[2] == "two"
    assert hash(mt.asarray(3)) == hash(3)
    with pytest.raises(TypeError, match="unhashable"):
        hash(mt.ones(1))
    with pytest.raises(mt.errors.GradientError):
        mt.grad(lambda v: v * len({v}))(2.0)
    with pytest.raises(mt.errors.TracedValueError):
        mt.compile(lambda v: v * len({v}))(mt.asarray(2.0))


def test_functions_take_what_numpys_take() -> None:
    x = mt.asarray(X)
    for got, want in (
        (mt.where(x > 0), np.where(X > 0)),
        (mt.sort(x, axis=None), np.sort(X, axis=None)),
        (mt.argsort(x, axis=None), np.argsort(X, axis=None)),
        (mt.take(x, [1, 5]), np.take(X, [1, 5])),
        (mt.quantile(x, q=0.3, axis=0), np.quantile(X, q=0.3, axis=0)),
        (mt.nanquantile(x, q=0.3, axis=0, method="linear"), np.nanquantile(X, q=0.3, axis=0)),
        (mt.einsum(x, [0, 1], x, [2, 1], [0, 2]), np.einsum(X, [0, 1], X, [2, 1], [0, 2])),
        (mt.einsum(x, [..., 1], [1, ...]), np.einsum(X, [..., 1], [1, ...])),
        (mt.einsum(x, [0, 1]), np.einsum(X, [0, 1])),
        (np.einsum("ij,kj->ik", x, x, optimize=True), X @ X.T),
        (np.einsum("ij->j", x, optimize="greedy"), X.sum(0)),
        (mt.interp(x, [0, 3, 1], [1.0, 2.0, 4.0], period=4), np.interp(X, [0, 3, 1], [1.0, 2.0, 4.0], period=4)),
        (mt.histogram2d(X[0], X[1], 3, density=True), np.histogram2d(X[0], X[1], 3, density=True)),
        (np.broadcast_to(mt.asarray(1.0), 3), np.ones(3)),
        (np.pad(x[0], (1, 2), constant_values=(5, 6)), np.pad(X[0], (1, 2), constant_values=(5, 6))),
        (mt.unique(mt.asarray([np.nan, 1, np.nan])), np.array([1, np.nan])),
        (mt.union1d(mt.asarray([np.nan]), mt.asarray([np.nan])), np.array([np.nan])),
        (np.where(x > 0, "yes", "no"), np.where(X > 0, "yes", "no")),
        (np.equal(x, None), np.equal(X, None)),
    ):
        for g, w in zip(*(v if isinstance(v, tuple) else (v,) for v in (got, want)), strict=True):
            np.testing.assert_array_equal(np.asarray(g), w) if w.dtype.kind in "UOb" else np.testing.assert_allclose(
                np.asarray(g), w
            )
    y, none = np.broadcast_arrays(x, None)
    assert y.shape == none.shape
    for wrong in (lambda: mt.einsum(x, x), lambda: mt.einsum(x, [0, 99]), lambda: mt.einsum(x)):
        with pytest.raises(mt.errors.ShapeError, match="einsum"):
            wrong()
