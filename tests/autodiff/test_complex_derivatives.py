"""Derivatives with complex numbers by one convention: `jvp(v) = J @ v`, `vjp(c) = J^H @ c`, real parts where a side is
real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshtape as mt

RNG = np.random.default_rng(5)
VECTOR = RNG.normal(size=4) + 1j * RNG.normal(size=4)
MATRIX = RNG.normal(size=(3, 3)) + 1j * RNG.normal(size=(3, 3)) + np.diag([2.0, -3.0, 4.0])
OTHER = RNG.normal(size=(3, 3)) + 1j * RNG.normal(size=(3, 3))
NO_SHARDS = {"eigvals", "eigvals real"}  # LAPACK chooses the order of what it gives, block or no block


def other(x: Any) -> mt.Array:
    return mt.asarray(OTHER.astype(np.result_type(x.dtype, np.complex64)))


HOLOMORPHIC: dict[str, tuple[Callable[..., Any], np.ndarray]] = {
    "exp": (mt.exp, VECTOR),
    "expm1": (mt.expm1, VECTOR),
    "log": (mt.log, VECTOR),
    "log1p": (mt.log1p, VECTOR),
    "sqrt": (mt.sqrt, VECTOR),
    "sin": (mt.sin, VECTOR),
    "cosh": (mt.cosh, VECTOR),
    "tanh": (mt.tanh, VECTOR),
    "asin": (mt.asin, VECTOR),
    "acosh": (mt.acosh, VECTOR),
    "atanh": (mt.atanh, VECTOR),
    "reciprocal": (mt.reciprocal, VECTOR),
    "square": (mt.square, VECTOR),
    "power": (lambda z: z**3, VECTOR),
    "complex power": (lambda z: z ** (1.5 + 0.5j), VECTOR),
    "product": (lambda z: z * z[::-1] + 1j, VECTOR),
    "quotient": (lambda z: (z + 1) / z, VECTOR),
    "where": (lambda z: mt.where(mt.real(z) > 0, z * z, 2j * z), VECTOR),
    "index": (lambda z: z[mt.asarray([2, 0, 2])] ** 2, VECTOR),
    "prod": (mt.prod, VECTOR),
    "mean": (lambda z: mt.mean(z * z), VECTOR),
    "cumulative_sum": (lambda z: mt.cumulative_sum(z * z), VECTOR),
    "cumulative_prod": (mt.cumulative_prod, VECTOR),
    "fft": (mt.fft.fft, VECTOR),
    "ifft": (lambda z: mt.fft.ifft(z, n=6), VECTOR),
    "fftshift": (lambda z: mt.fft.fftshift(z * z), VECTOR),
    "matmul": (lambda z: z @ other(z) @ z, MATRIX),
    "einsum": (lambda z: mt.einsum("ij,jk,ki->i", z, z, other(z)), MATRIX),
    "trace": (lambda z: mt.linalg.trace(z @ z), MATRIX),
    "det": (mt.linalg.det, MATRIX),
    "inv": (mt.linalg.inv, MATRIX),
    "solve": (lambda z: mt.linalg.solve(z, other(z)), MATRIX),
    "eigvals": (mt.linalg.eigvals, MATRIX),
    "sigmoid": (mt.nn.sigmoid, VECTOR),
    "silu": (mt.nn.silu, VECTOR),
    "conj twice": (lambda z: mt.conj(mt.conj(z) * mt.conj(z)), VECTOR),
}

TO_COMPLEX: dict[str, tuple[Callable[..., Any], np.ndarray]] = {
    "phase": (lambda x: mt.exp(1j * x), VECTOR.real),
    "fft real": (mt.fft.fft, VECTOR.real),
    "rfft": (mt.fft.rfft, VECTOR.real),
    "ifft real": (mt.fft.ifft, VECTOR.real),
    "eigvals real": (mt.linalg.eigvals, MATRIX.real),
    "astype": (lambda x: mt.astype(x * x, np.complex128 if x.dtype == np.float64 else np.complex64), VECTOR.real),
    "conj": (lambda x: mt.conj(mt.exp(1j * x)), VECTOR.real),
}

TO_REAL: dict[str, tuple[Callable[..., Any], np.ndarray]] = {
    "real": (mt.real, VECTOR),
    "imag": (mt.imag, VECTOR),
    "abs": (mt.abs, VECTOR),
    "angle": (mt.angle, VECTOR),
    "irfft": (mt.fft.irfft, VECTOR),
    "hfft": (mt.fft.hfft, VECTOR),
    "vector_norm": (mt.linalg.vector_norm, VECTOR),
    "matrix_norm": (mt.linalg.matrix_norm, MATRIX),
    "squares": (lambda z: mt.real(z * mt.conj(z)), VECTOR),
    "std": (mt.std, VECTOR),
}

REFUSED: dict[str, tuple[Callable[..., Any], np.ndarray]] = {
    "conj": (mt.conj, VECTOR),
    "sign": (mt.sign, VECTOR),
    "z|z|": (lambda z: z * mt.abs(z), VECTOR),
    "real part": (lambda z: mt.real(z) + 0j, VECTOR),
    "vdot": (lambda z: mt.vdot(z, z), VECTOR),
    "of the second alone": (lambda z: z + 1e-6 * mt.conj(z), VECTOR),
    "solve": (lambda z: mt.linalg.solve(z, mt.conj(z)), MATRIX),
}

ROWS = {**HOLOMORPHIC, **{f"{k} ": v for k, v in TO_COMPLEX.items()}, **{f"{k}  ": v for k, v in TO_REAL.items()}}
SINGLE = {"float64": "float32", "complex128": "complex64"}


def differences(fn: Callable[..., Any], x: np.ndarray) -> np.ndarray:
    """The Jacobian in float64: along real steps, and for a real value along imaginary ones too."""

    def along(step: complex) -> np.ndarray:
        columns = []
        for i in range(x.size):
            d = np.zeros(x.size, x.dtype)
            d[i] = step * 1e-6
            d = d.reshape(x.shape)
            columns.append((np.asarray(fn(mt.asarray(x + d))) - np.asarray(fn(mt.asarray(x - d)))).ravel() / 2e-6)
        return np.stack(columns, -1)

    found = along(1.0)
    return found - 1j * along(1j) if x.dtype.kind == "c" and found.dtype.kind != "c" else found


def matrix(jacobian: mt.Array, x: np.ndarray) -> np.ndarray:
    return np.asarray(jacobian).reshape(-1, x.size)


@pytest.mark.parametrize("name", ROWS)
def test_a_jacobian_is_that_of_the_differences(name):
    fn, x = ROWS[name]
    found = mt.jacobian(fn)(mt.asarray(x))
    expected = differences(fn, x)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(matrix(found, x), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_products_with_it_are_jvp_and_vjp(name, single):
    fn, x = ROWS[name]
    x = x.astype(SINGLE[x.dtype.name]) if single else x
    eps = 1e-4 if single else 1e-11

    def direction(like: np.ndarray) -> np.ndarray:
        d = RNG.normal(size=like.shape) + (1j * RNG.normal(size=like.shape) if like.dtype.kind == "c" else 0)
        return np.asarray(d, like.dtype)

    J = matrix(mt.jacobian(fn)(mt.asarray(x)), x)
    v = direction(x)
    y, along = mt.jvp(fn, [mt.asarray(x)], [mt.asarray(v)])
    assert J.dtype == np.result_type(y.dtype, x.dtype)
    product = J @ v.ravel()
    product = product.real if y.dtype.kind != "c" else product
    np.testing.assert_allclose(np.asarray(along).ravel(), product, rtol=eps, atol=eps)
    c = direction(np.asarray(y))
    (pulled,) = mt.vjp(fn, mt.asarray(x))[1](mt.asarray(c))
    product = J.conj().T @ c.ravel()
    product = product.real if x.dtype.kind != "c" else product
    np.testing.assert_allclose(np.asarray(pulled).ravel(), product, rtol=eps, atol=eps)


@pytest.mark.parametrize("name", ROWS)
def test_compiled_and_sharded_alike(name):
    fn, x = ROWS[name]
    expected = matrix(mt.jacobian(fn)(mt.asarray(x)), x)
    compiled = mt.compile(mt.jacobian(fn, holomorphic=True))(mt.asarray(x))
    np.testing.assert_allclose(matrix(compiled, x), expected, rtol=1e-11, atol=1e-11)
    if name.strip() not in NO_SHARDS:
        split = mt.distribute(mt.asarray(x), mt.Mesh({"data": 2}), data=mt.Shard(0))
        np.testing.assert_allclose(matrix(mt.jacobian(fn)(split), x), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_holomorphic_is_refused(name):
    fn, x = REFUSED[name]
    for promised in (False, True):
        with pytest.raises(mt.errors.GradientError, match=r"not holomorphic.* real and the imaginary part"):
            mt.jacobian(fn, holomorphic=promised)(mt.asarray(x))
        with pytest.raises(mt.errors.GradientError, match="not holomorphic"):
            list(mt.jacobian_blocks(fn, mt.asarray(x), holomorphic=promised))
    with pytest.raises(mt.errors.GradientError, match="not holomorphic"):
        mt.jacobian(fn)(mt.distribute(mt.asarray(x), mt.Mesh({"data": 2}), data=mt.Shard(0)))
    # The way that the error names.
    a, b = mt.jacobian(lambda a, b: fn(a + 1j * b), argnums=(0, 1))(mt.asarray(x.real), mt.asarray(x.imag))
    v = RNG.normal(size=x.shape) + 1j * RNG.normal(size=x.shape)
    _, along = mt.jvp(fn, [mt.asarray(x)], [mt.asarray(v)])
    product = matrix(a, x) @ v.real.ravel() + matrix(b, x) @ v.imag.ravel()
    np.testing.assert_allclose(product, np.asarray(along).ravel(), rtol=1e-10, atol=1e-10)


def test_while_traced_it_must_be_promised():
    with pytest.raises(mt.errors.GradientError, match=r"\[jacobian\].*holomorphic=True"):
        mt.compile(mt.jacobian(mt.exp))(mt.asarray(VECTOR))
    with pytest.raises(mt.errors.GradientError, match=r"holomorphic=True"):
        mt.compile(mt.hessian(lambda z: mt.sum(z**3)))(mt.asarray(VECTOR))


def test_trees_of_real_and_complex_arguments_and_values():
    z, x = mt.asarray(VECTOR[:2]), mt.asarray([1.5, -2.0])
    found = mt.jacobian(lambda p: {"product": p["z"] * p["x"], "size": mt.abs(p["z"])})({"z": z, "x": x})
    np.testing.assert_allclose(np.asarray(found["product"]["z"]), np.diag([1.5, -2.0]))
    np.testing.assert_allclose(np.asarray(found["product"]["x"]), np.diag(VECTOR[:2]))
    np.testing.assert_allclose(np.asarray(found["size"]["z"]), np.diag(VECTOR[:2].conj() / np.abs(VECTOR[:2])))
    assert found["size"]["x"].dtype == np.float64
    blocks = list(mt.jacobian_blocks(lambda z: z * z, z, block_size=1))
    assert [b.tolist() for _, b in blocks] == np.diag(2 * VECTOR[:2])[:, None].tolist()


HESSIANS = {
    "cube": (lambda z: mt.sum(z**3), VECTOR, np.diag(6 * VECTOR)),
    "of a real argument": (lambda x: mt.sum(mt.exp(1j * x)), VECTOR.real, np.diag(-np.exp(1j * VECTOR.real))),
    "mixed": (lambda z: z[0] * z[1] * 1j, VECTOR[:2], np.asarray([[0, 1j], [1j, 0]])),
    "squares": (lambda z: mt.sum(mt.real(z * mt.conj(z))), VECTOR, 2 * np.eye(4)),
}


@pytest.mark.parametrize("name", HESSIANS)
def test_hessians(name):
    fn, x, expected = HESSIANS[name]
    np.testing.assert_allclose(np.asarray(mt.hessian(fn)(mt.asarray(x))), expected, rtol=1e-12, atol=1e-12)
    compiled = mt.compile(mt.hessian(fn, holomorphic=True))(mt.asarray(x))
    np.testing.assert_allclose(np.asarray(compiled), expected, rtol=1e-12, atol=1e-12)
    split = mt.distribute(mt.asarray(x), mt.Mesh({"data": 2}), data=mt.Shard(0))
    np.testing.assert_allclose(np.asarray(mt.hessian(fn)(split)), expected, rtol=1e-12, atol=1e-12)


def test_a_hessian_that_is_none_is_refused_and_its_products_are_right():
    def fn(z):
        return mt.sum(mt.real(z**3))

    with pytest.raises(mt.errors.GradientError, match="not holomorphic"):
        mt.hessian(fn)(mt.asarray(VECTOR))
    v = VECTOR[::-1] * (0.5 - 1j)
    found = mt.hvp(fn, mt.asarray(VECTOR), mt.asarray(v))
    np.testing.assert_allclose(np.asarray(found), np.conj(6 * VECTOR * v), rtol=1e-12)
    with pytest.raises(mt.errors.GradientError, match=r"complex128.*real"):
        mt.hvp(lambda z: mt.sum(z**3), mt.asarray(VECTOR), mt.asarray(v))


def test_hessian_takes_one_element():
    with pytest.raises(mt.errors.GradientError, match=r"\[hessian\].*one element, got shape \(4,\)"):
        mt.hessian(mt.exp)(mt.asarray(VECTOR))


@pytest.mark.parametrize("name", ROWS)
def test_check_grads_agrees(name):
    fn, x = ROWS[name]
    mt.check_grads(fn, mt.asarray(x), rtol=1e-3, atol=1e-4)


def test_check_grads_sees_a_conjugate_that_is_missing():
    wrong = mt.custom_vjp(lambda z: z * z)
    wrong.defvjp(lambda z: (z * z, z), lambda z, g: (2 * z * g,))
    with pytest.raises(AssertionError, match="reverse mode against differences"):
        mt.check_grads(wrong, mt.asarray(VECTOR))
