"""Linear algebra: NumPy is the oracle; decompositions are checked by what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from meshtape import arrays as mt
from meshtape.arrays.core.errors import DTypeError, ShapeError

rng = np.random.default_rng(5)
SHAPES = [(3, 3), (2, 4, 4), (0, 2, 2), (2, 0, 3, 3)]
ANY = [(3, 3), (4, 2), (2, 4), (2, 3, 2), (0, 2, 3), (2, 0)]


def matrix(shape, dtype=np.float64):
    x = rng.normal(size=shape)
    return (x + 1j * rng.normal(size=shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)


def n(x):
    return np.asarray(x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
@pytest.mark.parametrize("shape", SHAPES)
def test_solving_is_numpys(shape, dtype):
    a, b = matrix(shape, dtype), matrix((shape[-1], 2), dtype)
    tolerance = 1e-3 if np.dtype(dtype).itemsize in (4, 8) and dtype != np.float64 else 1e-9
    for got, want in [
        (mt.linalg.inv(mt.asarray(a)), np.linalg.inv(a)),
        (mt.linalg.det(mt.asarray(a)), np.linalg.det(a)),
        (mt.linalg.solve(mt.asarray(a), mt.asarray(b)), np.linalg.solve(a, b)),
        (mt.linalg.solve(mt.asarray(a), mt.asarray(b[:, 0])), np.linalg.solve(a, b[:, :1])[..., 0]),
        (mt.linalg.pinv(mt.asarray(a)), np.linalg.pinv(a)),
    ]:
        assert got.dtype == want.dtype
        np.testing.assert_allclose(n(got), want, rtol=tolerance, atol=tolerance)
    sign, logabs = mt.linalg.slogdet(mt.asarray(a))
    np.testing.assert_allclose(n(sign) * np.exp(n(logabs)), np.linalg.det(a), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("shape", ANY)
def test_factors_multiply_to_the_matrix(shape, dtype):
    x = matrix(shape, dtype)
    k = min(shape[-2:])
    for full in (True, False):
        u, s, vh = map(n, mt.linalg.svd(mt.asarray(x), full_matrices=full))
        np.testing.assert_allclose((u[..., :k] * s[..., None, :]) @ vh[..., :k, :], x, atol=1e-12)
        assert u.shape[-1] == (shape[-2] if full else k)
    np.testing.assert_allclose(n(mt.linalg.svdvals(mt.asarray(x))), s, atol=1e-12)
    for mode in ("reduced", "complete"):
        q, r = map(n, mt.linalg.qr(mt.asarray(x), mode=mode))
        np.testing.assert_allclose(q @ r, x, atol=1e-12)
        assert q.shape[-1] == (shape[-2] if mode == "complete" else k)
        np.testing.assert_allclose(r, np.triu(r))
    np.testing.assert_array_equal(n(mt.linalg.matrix_rank(mt.asarray(x))), np.linalg.matrix_rank(x))


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_eigenvalues(dtype):
    x = matrix((2, 3, 3), dtype)
    h = x + np.conj(x.swapaxes(-1, -2))
    w, v = map(n, mt.linalg.eigh(mt.asarray(h)))
    np.testing.assert_allclose(v * w[..., None, :] @ np.conj(v.swapaxes(-1, -2)), h, atol=1e-12)
    np.testing.assert_allclose(n(mt.linalg.eigvalsh(mt.asarray(h))), w, atol=1e-12)
    w, v = map(n, mt.linalg.eig(mt.asarray(x)))
    assert w.dtype == v.dtype == np.complex128
    np.testing.assert_allclose(x @ v, v * w[..., None, :], atol=1e-12)
    assert mt.linalg.eigvals(mt.eye(2)).dtype == mt.complex128  # also where all of them are real
    c = n(mt.linalg.cholesky(mt.asarray(h @ np.conj(h.swapaxes(-1, -2))), upper=True))
    np.testing.assert_allclose(np.conj(c.swapaxes(-1, -2)) @ c, h @ np.conj(h.swapaxes(-1, -2)), atol=1e-10)


def test_integers_and_short_floats():
    x = [[4, 1], [1, 3]]
    assert mt.linalg.inv(mt.asarray(x)).dtype == mt.float64
    for dtype in (mt.float16, mt.bfloat16):
        y = mt.linalg.inv(mt.asarray(x, dtype=dtype))
        assert y.dtype == dtype
        np.testing.assert_allclose(n(y).astype(float), np.linalg.inv(x), atol=0.01)


ORDERS = [0, 0.5, 1, 2, 3, -1, math.inf, -math.inf]


@pytest.mark.parametrize("ord", ORDERS)
def test_vector_norms_are_numpys(ord):
    x = matrix((3, 4))
    got = mt.linalg.vector_norm(mt.asarray(x), axis=1, ord=ord)
    np.testing.assert_allclose(n(got), np.linalg.vector_norm(x, axis=1, ord=ord))
    got = mt.linalg.vector_norm(mt.asarray(x * 1j), ord=ord, keepdims=True)
    np.testing.assert_allclose(n(got), np.linalg.vector_norm(x, ord=ord, keepdims=True))
    assert mt.linalg.vector_norm(mt.asarray([3, 4]), ord=ord).dtype == mt.float64


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
@pytest.mark.parametrize("ord", [0.5, 2, 3, 40, -1, -2])
def test_vector_norms_of_the_largest_and_smallest_numbers(ord, dtype):
    """A power of two times a vector has that times its norm; eager, watched, compiled, and split over ranks."""
    import meshtape

    limits = np.finfo(dtype)
    x = (matrix((3, 8)) + np.sign(matrix((3, 8)))).astype(dtype)
    norm = lambda x: mt.linalg.vector_norm(x, axis=1, ord=ord)  # noqa: E731
    plain = n(norm(mt.asarray(x)))
    mesh = meshtape.Mesh({"a": 2})
    for k in (0, limits.maxexp - 12, limits.minexp + 12):
        scaled = np.ldexp(x.real, k) + (1j * np.ldexp(x.imag, k) if x.dtype.kind == "c" else 0)
        scaled = mt.asarray(scaled.astype(dtype))
        split = meshtape.distribute(scaled, mesh, a=meshtape.Shard(1))
        for got in (norm(scaled), meshtape.compile(norm)(scaled), meshtape.vjp(norm, scaled)[0], norm(split)):
            np.testing.assert_allclose(
                np.ldexp(n(got).astype(np.float64), -k), plain, rtol=2e-6 if limits.eps > 1e-9 else 1e-13
            )
    if np.dtype(dtype).kind == "f" and ord == 2:  # the direction, which has no scale
        for k in (limits.maxexp - 12, limits.minexp + 12):
            g = meshtape.grad(lambda v: mt.linalg.vector_norm(v))(mt.asarray(np.ldexp(x[0], k)))
            np.testing.assert_allclose(n(g), x[0] / plain[0], rtol=1e-5 if limits.eps > 1e-9 else 1e-12)


def test_vector_norms_of_nothing_zeros_infinities_and_nan():
    inf, nan = math.inf, math.nan
    for ord in (0.5, 2, 3):
        for x, want in (
            ([], 0),
            ([0.0, 0.0], 0),
            ([inf, 1.0], inf),
            ([-inf, 0.0], inf),
            ([nan, 1.0], nan),
            ([5e-324], 5e-324),
        ):
            got = mt.linalg.vector_norm(mt.asarray(x, dtype=mt.float64), ord=ord)
            np.testing.assert_array_equal(n(got), want, err_msg=f"{x} {ord}")
    assert mt.linalg.vector_norm(mt.zeros((2, 0)), axis=1).tolist() == [0, 0]
    assert mt.linalg.vector_norm(mt.zeros((0, 2)), axis=1, keepdims=True).shape == (0, 1)


@pytest.mark.parametrize("ord", ["fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf])
def test_matrix_norms_are_numpys(ord):
    x = matrix((2, 3, 4))
    for keepdims in (False, True):
        got = mt.linalg.matrix_norm(mt.asarray(x), ord=ord, keepdims=keepdims)
        np.testing.assert_allclose(n(got), np.linalg.matrix_norm(x, ord=ord, keepdims=keepdims))


def test_norms_of_a_zero_vector_have_a_zero_gradient():
    import meshtape

    for ord in (0.5, 1, 2, 3, math.inf):
        g = meshtape.grad(lambda x, p=ord: mt.linalg.vector_norm(x, ord=p))(mt.zeros(3))
        assert np.isfinite(n(g)).all(), ord
        if ord != math.inf:
            assert g.tolist() == [0, 0, 0], ord


def test_the_determinant_of_a_singular_matrix_has_a_gradient():
    import meshtape

    x = mt.asarray([[1.0, 2.0], [2.0, 4.0]])
    np.testing.assert_allclose(n(meshtape.grad(mt.linalg.det)(x)), [[4, -2], [-2, 1]], atol=1e-12)


def test_a_repeated_eigenvalue_has_the_gradient_of_what_does_not_depend_on_the_basis():
    import meshtape

    g = meshtape.grad(lambda x: mt.linalg.trace(mt.linalg.eigh(x).eigenvectors @ mt.linalg.eigh(x).eigenvectors.mT))
    np.testing.assert_allclose(n(g(mt.eye(3))), np.zeros((3, 3)), atol=1e-12)


def test_what_nothing_determines_has_no_gradient():
    import meshtape
    from meshtape.errors import GradientError

    x = mt.ones((3, 2))
    with pytest.raises(GradientError, match="full_matrices=False"):
        meshtape.grad(lambda x: mt.sum(mt.linalg.svd(x).U))(x)
    with pytest.raises(GradientError, match="reduced"):
        meshtape.grad(lambda x: mt.sum(mt.linalg.qr(x, mode="complete").Q))(x)


def test_products():
    a, b = matrix((2, 3, 4)), matrix((4, 3))
    for axes in (((1, 2), (1, 0)), ((-1,), (0,)), 1, 0):
        got = mt.tensordot(mt.asarray(a), mt.asarray(b), axes=axes)
        np.testing.assert_allclose(n(got), np.tensordot(a, b, axes))
    z, w = matrix((2, 3), complex), matrix((3,), complex)
    np.testing.assert_allclose(n(mt.vecdot(mt.asarray(z), mt.asarray(w))), np.vecdot(z, w))
    np.testing.assert_allclose(n(mt.linalg.cross(mt.asarray(z), mt.asarray(w))), np.cross(z, w))
    np.testing.assert_allclose(n(mt.linalg.outer(mt.asarray(w), mt.asarray(w))), np.outer(w, w))
    m = matrix((2, 3, 3))
    for p in (-2, 0, 1, 5):
        np.testing.assert_allclose(n(mt.linalg.matrix_power(mt.asarray(m), p)), np.linalg.matrix_power(m, p), atol=1e-9)
    for k in (-4, -1, 0, 2, 5):
        np.testing.assert_allclose(n(mt.linalg.diagonal(mt.asarray(a), offset=k)), np.linalg.diagonal(a, offset=k))
        np.testing.assert_allclose(n(mt.linalg.trace(mt.asarray(a), offset=k)), np.linalg.trace(a, offset=k))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mt.linalg.inv(mt.ones((2, 3))), r"\[inv\] needs square matrices, got shape \(2, 3\)"),
        (lambda: mt.linalg.det(mt.ones(3)), r"\[det\] needs matrices"),
        (lambda: mt.linalg.solve(mt.eye(3), mt.ones(2)), r"\[solve\]"),
        (lambda: mt.linalg.cross(mt.ones(2), mt.ones(2)), r"\[cross\]"),
        (lambda: mt.tensordot(mt.ones((2, 3)), mt.ones((2, 3))[:, :2]), r"\[tensordot\]"),
        (lambda: mt.vecdot(mt.ones(2), mt.ones(3)), r"\[vecdot\]"),
    ],
)
def test_shapes_that_do_not_fit(call, message):
    with pytest.raises(ShapeError, match=message):
        call()


def test_other_errors():
    with pytest.raises(DTypeError, match="booleans"):
        mt.linalg.inv(mt.asarray([[True]]))
    with pytest.raises(ValueError, match="ord"):
        mt.linalg.matrix_norm(mt.eye(2), ord=3)
    with pytest.raises(ValueError, match="mode"):
        mt.linalg.qr(mt.eye(2), mode="r")
    with pytest.raises(np.linalg.LinAlgError):
        mt.linalg.inv(mt.zeros((2, 2)))


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (2, 0, 0), (0, 2, 2)])
@pytest.mark.parametrize("ord", ["fro", "nuc", 1, 2, -2, np.inf, -1, -np.inf])
def test_norms_and_conditions_without_elements(ord, shape, dtype):
    x = np.zeros(shape, dtype)
    try:
        want = np.linalg.norm(x, ord, axis=(-2, -1))
    except ValueError:
        with pytest.raises(mt.errors.ShapeError, match="of no elements"):
            mt.linalg.matrix_norm(mt.asarray(x), ord=ord)
    else:
        got = np.asarray(mt.linalg.matrix_norm(mt.asarray(x), ord=ord))
        np.testing.assert_array_equal(got, want)
        assert got.dtype == want.dtype
    if 0 in shape[-2:]:
        with pytest.raises(mt.errors.LinAlgError, match=r"^\[cond\] matrices without elements"):
            mt.linalg.cond(mt.asarray(x), ord)


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
@pytest.mark.parametrize("ord", [None, "fro", "nuc", 1, 2, -2, np.inf, -1, -np.inf])
def test_the_condition_of_zeros_is_infinite(ord, dtype):
    got = mt.linalg.cond(mt.zeros((2, 3, 3), dtype=dtype), ord)
    np.testing.assert_array_equal(np.asarray(got), [np.inf, np.inf])
