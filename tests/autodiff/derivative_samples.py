"""Calls of every differentiable op, at awkward shapes: 0-d, empty, broadcast, not contiguous, with repeated indices, complex."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

import meshtape as mt
from meshtape.arrays import OPS
from meshtape.arrays.core.dispatch import apply
from meshtape.arrays.indexing.keys import parse
from meshtape.arrays.linalg import linalg
from meshtape.arrays.ops import fft
from meshtape.arrays.reductions import cumulative, sorting

rng = np.random.default_rng(7)


def real(*shape: int, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    return np.asarray(rng.uniform(low, high, shape))


def cplx(*shape: int) -> np.ndarray:
    return np.asarray(real(*shape) + 1j * real(*shape))


def call(name: str, **params: Any) -> Callable[..., Any]:
    """The op itself, for those that no public function calls in the wanted way."""
    return lambda *args: apply(OPS[name], args, params)


KEY = mt.random.key(5)

Sample = tuple[Callable[..., Any], tuple[np.ndarray, ...]]


def unary(name: str, low: float, high: float, *, complex_too: bool = True) -> list[Sample]:
    f = getattr(mt, name, None) or getattr(mt.nn, name)
    out: list[Sample] = [
        (f, (real(3, low=low, high=high),)),
        (f, (real(low=low, high=high),)),  # 0-d
        (f, (np.zeros((0, 3)) + (low + high) / 2,)),
        (lambda x: f(x.T[:, ::2]), (real(3, 2, low=low, high=high),)),  # not contiguous
    ]
    if complex_too:
        out.append((f, (real(3, low=low, high=high) + 1j * real(3, low=0.2, high=0.7),)))
        out.append((f, (np.asarray(0.3 - 0.4j),)))
    return out


def binary(name: str, low: float = -2.0, high: float = 2.0, *, complex_too: bool = True) -> list[Sample]:
    f = getattr(mt, name)
    r = lambda *shape: real(*shape, low=low, high=high)  # noqa: E731
    out: list[Sample] = [
        (f, (r(2, 3), r(2, 3))),
        (f, (r(2, 3), r(3))),
        (f, (r(2, 1), r(1, 3))),
        (f, (r(), r(3))),
        (f, (r(0, 3), r(3))),
        (lambda x: f(x, 1.5), (r(3),)),
        (lambda y: f(1.5, y), (r(3),)),
        (lambda x, y: f(x.T, y[::-1]), (r(3, 2), r(2, 3))),
        (lambda x: f(x, x * x + 0.3), (r(3),)),
    ]
    if complex_too:
        out += [(f, (cplx(2, 1), cplx(3))), (f, (cplx(2), r(2))), (f, (r(2), cplx(2)))]
    return out


def matmul() -> list[Sample]:
    shapes = [
        ((2, 3), (3, 4)),
        ((3,), (3,)),
        ((2,), (3, 2, 4)),
        ((5, 1, 2, 3), (4, 3, 2)),
        ((2, 3), (3,)),
        ((2, 2, 3), (3,)),
        ((2, 0), (0, 3)),
        ((0, 3), (3, 2)),
        ((1, 2, 3), (4, 3, 1)),
    ]
    out: list[Sample] = [(mt.matmul, (real(*a), real(*b))) for a, b in shapes]
    out += [(mt.matmul, (cplx(*a), cplx(*b))) for a, b in shapes]
    out.append((lambda a, b: a @ b.mT, (cplx(2, 3), cplx(2, 3))))
    out.append((lambda a: a @ a, (real(3, 3),)))
    return out


I = np.asarray
KEYS: list[tuple[tuple[int, ...], Any]] = [
    ((2, 3), (0,)),
    ((2, 3), (slice(None), slice(None, None, -2))),
    ((2, 3), (None, ..., 1)),
    ((2, 3), (I([0, 0, 1]),)),  # repeated
    ((2, 3), (slice(None), I([0, 0]))),
    ((2, 3), (I([0, -1]), I([1, 2]))),
    ((2, 3, 4), (0, slice(None), I([0, 1]))),  # an int beside an array: the joint dimension goes first
    ((2, 3, 4), (I([0, 1]), slice(None), I([[0], [1]]))),
    ((2, 3), (I([[True, False, True], [False, False, True]]),)),
    ((2, 3), (I([False, False]),)),
    ((2, 3), (I([], dtype=int),)),
    ((2, 3), (True,)),
    ((2, 3), (False,)),
    ((), (True,)),
    ((), (...,)),
    ((0, 3), (slice(None), 1)),
]


def _read(key: Any, x: Any) -> Any:
    return x[key]


def reading() -> list[Sample]:
    out: list[Sample] = [(functools.partial(_read, key), (real(*shape),)) for shape, key in KEYS]
    return [*out, (lambda x: x[[0, 0, 1]], (cplx(2, 3),)), (lambda x: x.T[[0, 2, 2]], (real(2, 3),))]


_EXTREMA = ("min", "max")


def _extremum(name: str, x: Any, v: Any, template: Any, arrays: Any) -> Any:
    return apply(OPS[f"index_{name}"], (x, v, *arrays), {"template": template})


def writing(method: str) -> list[Sample]:
    def write(key: Any) -> Callable[..., Any]:
        if method in _EXTREMA:  # the op itself: ``.at`` writes by slices without it
            return lambda x, v: _extremum(method, x, v, *parse(x, key))
        return lambda x, v: getattr(x.at[key], method)(v)

    out: list[Sample] = [(write(key), (real(*shape), real(*np.empty(shape)[key].shape))) for shape, key in KEYS]
    repeated = (I([0, 0, 1]), I([1, 1, 2]))
    fixed = [
        (lambda x: getattr(x.at[0], method)(2.5), (real(2, 3),)),
        (lambda v: getattr(mt.zeros((2, 3)).at[0], method)(v), (real(3),)),
    ]
    return [
        *out,
        (write(repeated), (real(2, 3), real(3))),
        (write(repeated), (real(2, 3), real())),
        (write(repeated), (real(2, 3), real(1, 1))),  # leading ones of a value are dropped
        (write(repeated), (cplx(2, 3), cplx(1))),
        (write((I([0, 1]),)), (real(2, 3), real(3))),
        *(() if method in _EXTREMA else fixed),
    ]


def _power(n: float, x: Any) -> Any:
    return x**n


def _transform(name: str, norm: str, x: Any) -> Any:
    return getattr(fft, name)(x, norm=norm)


def _irfft(n: int, z: Any) -> Any:
    return fft.irfft(z, n=n)


WELL = np.asarray([[2.0, -0.5, 0.3], [0.4, 1.5, -0.7], [-0.2, 0.6, 3.0]])  # well conditioned
SPREAD = np.asarray([[4.0, 0.3, -0.2], [0.5, 2.0, 0.4], [0.1, -0.6, 1.0]])  # its values are far from each other


def _squares(u: Any, s: Any, vh: Any) -> Any:
    return mt.abs(u) ** 2, s, mt.abs(vh) ** 2, (u * s) @ vh


def in_place(x: Any, v: Any) -> Any:
    y = x * 1.0
    y[1:] = v
    y[[0, 0]] = y[[1, 2]] * v
    return y


# Away from kinks and poles: at ties the derivative is a convention, tested below by value.
SAMPLES: dict[str, list[Sample]] = {
    "add": binary("add"),
    "subtract": binary("subtract"),
    "multiply": binary("multiply"),
    "divide": binary("divide", 0.5, 2.0),
    "remainder": [
        (mt.remainder, (I([5.3, -5.3, 5.3]), I([2.0, 2.0, -2.0]))),
        (mt.remainder, (I([[5.3], [7.1]]), I([1.9, 2.3]))),
        (lambda x: x % 2.0, (I(5.3),)),
        (lambda y: 7.0 % y, (I([1.9, 2.6]),)),
    ],
    "fmod": [
        (mt.fmod, (I([5.3, -5.3, 5.3]), I([2.0, 2.0, -2.0]))),
        (mt.fmod, (I([[5.3], [7.1]]), I([1.9, 2.3]))),
        (lambda y: mt.fmod(-7.0, y), (I([1.9, 2.6]),)),
    ],
    "ldexp": [
        (lambda x: mt.ldexp(x, mt.asarray([3, -2])), (real(2),)),
        (lambda x: mt.ldexp(x, 4), (real(2, 3),)),
    ],
    "heaviside": [
        (mt.heaviside, (I([-1.5, 0.5, 2.5]), I([0.5, 0.25, 2.0]))),
        (lambda h: mt.heaviside(mt.asarray([-1.5, 0.0, 2.5]), h), (I([0.5, 0.25, 2.0]),)),
    ],
    "exp2": unary("exp2", -2.0, 2.0),
    "logaddexp2": binary("logaddexp2", complex_too=False),
    "pow": [
        *binary("pow", 0.5, 2.0),
        *((functools.partial(_power, n), (real(3, low=0.5),)) for n in (0, 1, 2, 3, -1, 0.5, 2.5)),
        (lambda x: x**2, (I([0.0, -1.0]),)),
        (lambda x: x**3, (I(-0.4 + 0.3j),)),
        (lambda x: x ** mt.asarray([2, 3]), (real(2),)),
        (lambda y: 2.0**y, (real(2),)),
    ],
    "negative": unary("negative", -2, 2),
    "positive": unary("positive", -2, 2),
    "abs": [*unary("abs", 0.3, 2), (abs, (I([-1.0, 2.0]),))],
    "sign": [(mt.sign, (cplx(3),)), (mt.sign, (I(0.6 - 0.2j),)), (mt.sign, (real(3),))],
    "reciprocal": unary("reciprocal", 0.5, 2),
    "square": unary("square", -2, 2),
    "sqrt": unary("sqrt", 0.5, 2),
    "hypot": binary("hypot", 0.5, 2.0, complex_too=False),
    "maximum": binary("maximum", complex_too=False),
    "minimum": binary("minimum", complex_too=False),
    "fmax": [*binary("fmax", complex_too=False)],
    "fmin": [*binary("fmin", complex_too=False)],
    "exp": unary("exp", -1, 1),
    "expm1": unary("expm1", -1, 1),
    "log": unary("log", 0.5, 2),
    "log1p": unary("log1p", -0.5, 1),
    "log2": unary("log2", 0.5, 2),
    "log10": unary("log10", 0.5, 2),
    "logaddexp": [
        *binary("logaddexp", complex_too=False),
        (mt.logaddexp, (I([800.0, -800.0]), I([799.0, -799.5]))),  # exp would overflow
    ],
    "sin": unary("sin", -2, 2),
    "cos": unary("cos", -2, 2),
    "tan": unary("tan", -1, 1),
    "asin": unary("asin", -0.7, 0.7),
    "acos": unary("acos", -0.7, 0.7),
    "atan": unary("atan", -0.7, 0.7),
    "atan2": [*binary("atan2", 0.5, 2.0, complex_too=False), (mt.atan2, (I([0.2, -0.3]), I([-1.0, -2.0])))],
    "sinh": unary("sinh", -1, 1),
    "cosh": unary("cosh", -1, 1),
    "tanh": unary("tanh", -1, 1),
    "asinh": unary("asinh", -0.7, 0.7),
    "acosh": unary("acosh", 1.5, 3),
    "atanh": unary("atanh", -0.7, 0.7),
    "conj": unary("conj", -2, 2),
    "real": unary("real", -2, 2),
    "imag": [(mt.imag, (cplx(3),)), (mt.imag, (cplx(),)), (mt.imag, (real(3),)), (mt.imag, (cplx(0, 2),))],
    "copysign": [
        *binary("copysign", 0.5, 2.0, complex_too=False),
        (mt.copysign, (I([-1.0, 1.0, 2.0]), I([1.0, -1.0, -3.0]))),
    ],
    "nextafter": [(lambda x: mt.nextafter(x, 2.0), (real(3),))],
    "where": [
        (lambda x, y: mt.where(mt.asarray([True, False, True]), x, y), (real(3), real(2, 3))),
        (lambda x, y: mt.where(x > y, x * y, y), (real(2, 1), real(3))),
        (lambda x: mt.where(mt.asarray([True, False]), x, 0.0), (real(),)),
        (lambda y: mt.where(mt.asarray(True), 1.0, y), (real(0, 2),)),
        (lambda x, y: mt.where(mt.asarray([True, False]), x, y), (cplx(2), real(2))),
    ],
    "relu": [*unary("relu", 0.2, 2, complex_too=False), (mt.nn.relu, (I([-1.0, 2.0, -0.3]),))],
    "erf": unary("erf", -1, 1, complex_too=False),
    "sigmoid": [*unary("sigmoid", -3, 3, complex_too=False), (mt.nn.sigmoid, (I([-800.0, 800.0]),))],
    "silu": [*unary("silu", -3, 3, complex_too=False), (mt.nn.silu, (I([-800.0, 800.0]),)), (mt.nn.silu, (cplx(3),))],
    "cbrt": [*unary("cbrt", 0.5, 2.0, complex_too=False), (mt.cbrt, (I([-8.0, 2.0]),))],
    "alias": [(call("alias"), (real(2, 3),)), (call("alias"), (cplx(2),)), (call("alias"), (real(),))],
    "gelu": [(mt.nn.gelu, (real(2, 3),)), (mt.nn.gelu, (real(),)), (mt.nn.gelu, (real(0, 2),))],
    "gelu_backward": [
        (call("gelu_backward"), (real(2, 3), real(2, 3))),
        (call("gelu_backward"), (real(3), real(2, 1))),
        (call("gelu_backward"), (real(), real())),
    ],
    "barrier": [(call("barrier"), (real(2, 3),)), (call("barrier"), (cplx(2),)), (call("barrier"), (real(),))],
    "astype": [
        (lambda x: mt.astype(x, mt.complex128), (real(3),)),
        (lambda x: mt.astype(x, mt.float64), (real(0, 2),)),
        (lambda x: x * x.astype(np.int64), (I([1.3, 2.7]),)),
    ],
    "getitem": reading(),
    "index_set": [*writing("set"), (in_place, (real(3), real()))],
    "index_add": writing("add"),
    "index_min": writing("min"),
    "index_max": writing("max"),
    "scatter": [
        (call("scatter", template=(mt.arrays.indexing.keys.Slot(0),), shape=(4,)), (real(3), I([0, 0, 2]))),
        (call("scatter", template=(mt.arrays.indexing.keys.Span(0, 2, None), 1), shape=(3, 2)), (real(2),)),
    ],
    "last_writes": [
        (call("last_writes", template=(mt.arrays.indexing.keys.Slot(0),)), (real(4), I([0, 0, 2]))),
        (call("last_writes", template=(mt.arrays.indexing.keys.Span(0, 2, None), 1)), (real(3, 2),)),
    ],
    "matmul": matmul(),
    "reshape": [
        (lambda x: mt.reshape(x, (3, 2)), (real(2, 3),)),
        (lambda x: mt.reshape(x, ()), (real(1, 1),)),
        (lambda x: mt.reshape(x, (0, 5)), (real(2, 0),)),
        (lambda x: mt.reshape(x.T, (-1,)), (cplx(2, 3),)),
    ],
    "permute_dims": [
        (lambda x: mt.permute_dims(x, (2, 0, 1)), (real(2, 3, 4),)),
        (lambda x: mt.permute_dims(x, ()), (real(),)),
        (lambda x: x.mT, (cplx(0, 3, 2),)),
    ],
    "broadcast_to": [
        (lambda x: mt.broadcast_to(x, (4, 2, 3)), (real(2, 1),)),
        (lambda x: mt.broadcast_to(x, (3,)), (real(),)),
        (lambda x: mt.broadcast_to(x, (0, 2)), (real(1, 2),)),
        (lambda x: mt.broadcast_to(x, (2, 2)), (cplx(2),)),
    ],
    "flip": [(mt.flip, (real(2, 3),)), (lambda x: mt.flip(x, axis=0), (cplx(2, 3),)), (mt.flip, (real(),))],
    "concat": [
        (lambda a, b: mt.concat([a, b], axis=1), (real(2, 3), real(2, 1))),
        (lambda a, b: mt.concat([a, b, a], axis=0), (real(2), real(0))),
        (lambda a: mt.stack([a, a * a], axis=-1), (real(3),)),
        (lambda a, b: mt.concat([a, b], axis=None), (real(2, 2), cplx(1))),
    ],
    "sum": [
        (mt.sum, (real(2, 3),)),
        (lambda x: mt.sum(x, axis=(0, 2), keepdims=True), (real(2, 3, 4),)),
        (lambda x: mt.sum(x, axis=-1), (cplx(2, 3),)),
        (lambda x: mt.sum(x, axis=0), (real(0, 3),)),
        (mt.sum, (real(),)),
        (lambda x: mt.var(x, axis=0, correction=1), (real(4, 2),)),
    ],
    "mean": [
        (mt.mean, (real(2, 3),)),
        (lambda x: mt.mean(x, axis=(0, 2), keepdims=True), (real(2, 3, 4),)),
        (lambda x: mt.mean(x, axis=-1), (cplx(2, 3),)),
        (lambda x: mt.mean(x, axis=1), (real(0, 3),)),
        (mt.mean, (real(),)),
    ],
    "prod": [
        (mt.prod, (real(2, 3),)),
        (mt.prod, (I([2.0, 0.0, 3.0]),)),
        (mt.prod, (I([[0.0, 2.0, 0.0], [1.0, 0.0, 2.0]]),)),
        (lambda x: mt.prod(x, axis=(0, 2)), (real(2, 3, 2),)),
        (lambda x: mt.prod(x, axis=1, keepdims=True), (cplx(2, 3),)),
        (mt.prod, (real(0, 3),)),
        (lambda x: mt.prod(x, axis=1), (real(0, 3),)),
        (mt.prod, (real(),)),
    ],
    "max": [(mt.max, (real(2, 3),)), (lambda x: mt.max(x, axis=1), (real(0, 3),)), (mt.max, (real(),))],
    "min": [(lambda x: mt.min(x, axis=(0, 2)), (real(2, 3, 2),)), (lambda x: mt.min(x, axis=1), (real(0, 3),))],
    "cumulative_sum": [
        (cumulative.cumulative_sum, (real(3),)),
        (lambda x: cumulative.cumulative_sum(x, axis=1), (cplx(2, 3, 2),)),
        (lambda x: cumulative.cumulative_sum(x, axis=0, include_initial=True), (real(0, 3),)),
    ],
    "cumulative_prod": [
        (cumulative.cumulative_prod, (I([2.0, 0.0, 3.0, 0.0, 1.5]),)),
        (lambda x: cumulative.cumulative_prod(x, axis=1), (cplx(2, 3),)),
        (lambda x: cumulative.cumulative_prod(x, axis=1), (real(2, 0),)),
    ],
    "sort": [
        (sorting.sort, (real(5),)),
        (lambda x: sorting.sort(x, axis=0, descending=True), (real(4, 3),)),
        (lambda x: sorting.sort(x, axis=1), (real(2, 0, 3),)),
        (lambda x: sorting.sort(x * x, axis=1, stable=False), (real(2, 4, 3),)),
    ],
    "fft": [
        *((functools.partial(_transform, "fft", norm), (cplx(5),)) for norm in ("backward", "ortho", "forward")),
        *((functools.partial(_transform, "ifft", norm), (cplx(4),)) for norm in ("backward", "ortho", "forward")),
        (fft.fft, (real(3),)),
        (fft.fftn, (cplx(2, 3, 4),)),
    ],
    "rfft": [
        *((functools.partial(_transform, "rfft", norm), (real(5),)) for norm in ("backward", "ortho", "forward")),
        *((fft.rfft, (real(n),)) for n in (1, 2, 6)),
        (lambda x: fft.rfft(x, axis=0), (real(4, 2),)),
        (lambda x: fft.rfft(x, n=3), (real(5),)),
    ],
    "irfft": [
        *((functools.partial(_transform, "irfft", norm), (cplx(4),)) for norm in ("backward", "ortho", "forward")),
        *((functools.partial(_irfft, n), (cplx(n // 2 + 1),)) for n in (1, 2, 5, 6)),
        (lambda z: fft.irfft(z, axis=0), (cplx(3, 2),)),
    ],
    # Functions of factors that do not depend on the choice of signs and phases, which is not differentiable.
    "cholesky": [
        (lambda a: linalg.cholesky(a @ a.mT + 2.0 * mt.eye(3)), (real(3, 3),)),
        (lambda a: linalg.cholesky(a @ mt.conj(a).mT + 2.0 * mt.eye(2)), (cplx(3, 2, 2),)),
    ],
    "inv": [(linalg.inv, (WELL,)), (linalg.inv, (np.stack([WELL, WELL.T + 1j]),)), (linalg.inv, (real(0, 0),))],
    "solve": [
        (linalg.solve, (WELL, real(3))),
        (linalg.solve, (np.stack([WELL, 2 * WELL]), real(3, 2))),
        (linalg.solve, (WELL + 1j, cplx(3, 2))),
    ],
    "det": [
        (lambda z: mt.imag(linalg.det(z)), (WELL + 1j,)),
        (linalg.det, (WELL,)),
        (linalg.det, (np.stack([WELL, WELL.T + 1j]),)),
    ],
    "adjugate": [(call("adjugate"), (WELL,)), (call("adjugate"), (WELL + 1j,))],
    "slogdet": [
        (lambda a: linalg.slogdet(a)[1], (WELL,)),
        (lambda a: tuple(linalg.slogdet(a)), (WELL + 1j,)),
    ],
    "eigh": [
        (lambda a: (lambda w, v: (w, v * v))(*linalg.eigh(a + a.mT)), (WELL,)),
        (lambda a: (lambda w, v: (w, mt.abs(v) ** 2))(*linalg.eigh(a + mt.conj(a).mT)), (WELL + 0.3j * real(3, 3),)),
    ],
    "eigvalsh": [
        (lambda a: linalg.eigvalsh(a + a.mT), (WELL,)),
        (lambda a: linalg.eigvalsh(a + mt.conj(a).mT), (WELL + 0.3j * real(3, 3),)),
    ],
    "eig": [(lambda a: (lambda w, v: (w, mt.abs(v) ** 2))(*linalg.eig(a)), (SPREAD,))],
    "eigvals": [(linalg.eigvals, (SPREAD,)), (linalg.eigvals, (SPREAD + 0.2j * real(3, 3),))],
    "svd": [
        (lambda a: _squares(*linalg.svd(a, full_matrices=False)), (SPREAD,)),
        (lambda a: _squares(*linalg.svd(a, full_matrices=False)), (SPREAD[:, :2],)),
        (lambda a: _squares(*linalg.svd(a, full_matrices=False)), (SPREAD[:2] + 0.3j,)),
    ],
    "svdvals": [(linalg.svdvals, (SPREAD,)), (linalg.svdvals, (SPREAD[:, :2] + 0.3j,))],
    "qr": [
        (lambda a: tuple(linalg.qr(a)), (WELL,)),
        (lambda a: tuple(linalg.qr(a)), (WELL[:, :2],)),
        (lambda a: tuple(linalg.qr(a)), (WELL[:2],)),
        (lambda a: tuple(linalg.qr(a)), (WELL[:, :2] + 0.3j * real(3, 2),)),
    ],
    "pinv": [(linalg.pinv, (WELL[:, :2],)), (linalg.pinv, (WELL[:2],)), (linalg.pinv, (WELL[:, :2] + 0.3j,))],
    "layer_norm": [
        (lambda x, w, b: mt.layer_norm(x, 3, w, b), (real(2, 3), real(3), real(3))),
        (lambda x, w, b: mt.layer_norm(x, (2, 3), w, b), (real(4, 2, 3), real(2, 3), real(2, 3))),
        (lambda x: mt.layer_norm(x, 3), (real(3),)),
        (lambda x: mt.layer_norm(x, 3, x, x), (real(3),)),  # one array in every place
        (lambda x, w, b: mt.layer_norm(x, 3, w, b), (real(0, 3), real(3), real(3))),
        (lambda x: mt.layer_norm(x.mT, 4, None, x[:, 0]), (real(4, 3),)),
    ],
    "lazy_adam": [
        (
            call("lazy_adam", b1=0.9, b2=0.99),
            (real(2, 3), real(2, 3, low=0.5), real(2, 3), real(2, 3, low=0.5), real(low=0.1), real(low=0.3)),
        ),
        (
            lambda g: call("lazy_adam", b1=0.5, b2=0.5)(g, g, g, g, 0.1, 0.5)[0],
            (real(3, low=0.5),),
        ),
    ],
    "layer_norm_backward": [
        (call("layer_norm_backward", naxes=1, eps=1e-5), (real(2, 3), real(2, 3), real(3))),
        (call("layer_norm_backward", naxes=2, eps=1e-2), (real(2, 3), real(2, 3), real(2, 3))),
        (lambda x: call("layer_norm_backward", naxes=1, eps=1e-3)(x, x, x), (real(3),)),
    ],
    "dropout": [(lambda x, r=r: mt.nn.dropout(x, r, key=KEY), (real(3, 4),)) for r in (0.3, 1.0)]
    + [
        (lambda x: mt.nn.dropout(x.T, 0.5, key=KEY), (cplx(2, 3),)),
        (lambda x: mt.nn.dropout(x, 0.5, key=KEY), (real(0, 3),)),
    ],
    "dropout_add": [
        (lambda x, y: mt.nn.dropout_add(x, y, 0.3, key=KEY), (real(3, 4), real(3, 4))),
        (lambda x: mt.nn.dropout_add(x, x, 0.3, key=KEY), (real(3, 4),)),
    ],
    "group_norm": [
        (lambda x, w, b: mt.group_norm(x, 2, w, b), (real(2, 4, 3), real(4), real(4))),
        (lambda x, w, b: mt.group_norm(x, 2, w, b, channel_axis=-1), (real(2, 3, 4), real(4), real(4))),
        (lambda x, w: mt.instance_norm(x, w, w), (real(2, 2, 3), real(2))),
        (lambda x: mt.group_norm(x, 1), (real(2, 3),)),
        (lambda x: mt.group_norm(x, 2, x[0, :, 0]), (real(1, 4, 2),)),
        (lambda x, w, b: mt.group_norm(x, 2, w, b), (real(0, 4, 3), real(4), real(4))),
    ],
    "group_norm_backward": [
        (call("group_norm_backward", num_groups=2, axis=1, eps=1e-2), (real(2, 4, 2), real(2, 4, 2), real(4))),
        (call("group_norm_backward", num_groups=1, axis=2, eps=1e-2), (real(2, 2, 3), real(2, 2, 3), real(3))),
    ],
    "batch_norm": [
        (call("batch_norm", axis=1, eps=1e-2), (real(4, 2, 2), real(2), real(2))),
        (call("batch_norm", axis=2, eps=1e-2), (real(3, 2, 2), real(2), real(2))),
        (call("batch_norm", axis=1, eps=1e-2), (real(5, 2), real(2), real(2))),
    ],
    "batch_norm_backward": [
        (call("batch_norm_backward", axis=1, eps=1e-2), (real(4, 2), real(2), real(2), real(4, 2), real(2))),
        (call("batch_norm_backward", axis=2, eps=1e-2), (real(2, 3, 2), real(2), real(2), real(2, 3, 2), real(2))),
    ],
    "batch_norm_inference": [
        (
            call("batch_norm_inference", axis=1, eps=1e-2),
            (real(3, 2, 2), real(2), real(2, low=0.5), real(2), real(2)),
        ),
        (
            call("batch_norm_inference", axis=2, eps=1e-2),
            (real(3, 2, 2), real(2), real(2, low=0.5), real(2), real(2)),
        ),
    ],
    "rms_norm": [
        (lambda x, w: mt.rms_norm(x, 3, w), (real(2, 3), real(3))),
        (lambda x, w: mt.rms_norm(x, (2, 3), w), (real(4, 2, 3), real(2, 3))),
        (lambda x: mt.rms_norm(x, 3, x), (real(3),)),
        (lambda x, w: mt.rms_norm(x, 3, w), (real(0, 3), real(3))),
        (lambda x: mt.rms_norm(x.mT, 4, x[:, 0]), (real(4, 3),)),
    ],
    "rms_norm_backward": [
        (call("rms_norm_backward", naxes=1, eps=1e-5), (real(2, 3), real(2, 3), real(3))),
        (call("rms_norm_backward", naxes=2, eps=1e-2), (real(2, 3), real(2, 3), real(2, 3))),
        (lambda x: call("rms_norm_backward", naxes=1, eps=1e-3)(x, x, x), (real(3),)),
    ],
}


def hermitian(x: Any) -> Any:
    return x + mt.conj(x.mT)


def definite(x: Any) -> Any:
    return x @ mt.conj(x.mT) + 0.5 * mt.eye(x.shape[-1])


def phaseless(v: Any) -> Any:
    """Of vectors in columns what does not depend on their signs and phases."""
    return v[..., :, None, :] * mt.conj(v[..., None, :, :])


def square(make: Callable[..., np.ndarray], *batch: int, n: int = 3) -> np.ndarray:
    return make(*batch, n, n) + 2 * np.eye(n)


def matrices(name: str, prepare: Callable[..., Any] = lambda x: x) -> list[Sample]:
    f = getattr(mt.linalg, name)
    points = [square(real), square(cplx), square(real, 2, n=2), real(0, 2, 2)]
    return [(lambda x: f(prepare(x)), (p,)) for p in points]


def shapes_of_matrices(f: Callable[..., Any]) -> list[Sample]:
    """Square, tall, wide, batched; real and complex."""
    shapes = [(3, 3), (4, 2), (2, 4), (2, 3, 2), (0, 2, 2)]
    return [(f, (make(*s),)) for s in shapes for make in (real, cplx)]


def svd_parts(x: Any) -> Any:
    u, s, vh = mt.linalg.svd(x, full_matrices=False)
    pairs = u[..., :, None, :] * vh.mT[..., None, :, :]  # the phase of one is that of the other, conjugated
    return pairs, s


LABELS = I([[0, 2], [1, 0]])


def _loss(x: Any, **params: Any) -> Any:
    return call("cross_entropy", **params)(x, mt.asarray(LABELS))


def _loss_backward(g: Any, x: Any, **params: Any) -> Any:
    return call("cross_entropy_backward", **params)(g, x, mt.asarray(LABELS))


PLAIN, SMOOTH = {"ignore_index": None, "label_smoothing": 0.0}, {"ignore_index": 2, "label_smoothing": 0.3}


def more(samples: dict[str, list[Sample]]) -> None:
    """Add to what an op has already."""
    for name, found in samples.items():
        SAMPLES.setdefault(name, []).extend(found)


more(
    {
        name: [
            (mt_fn, (real(2, 3),)),
            (mt_fn, (real(1),)),
            (functools.partial(mt_fn, axis=1), (real(2, 3, 2),)),
            (functools.partial(mt_fn, axis=0), (real(3, 0),)),
            (lambda x, f=mt_fn: f(x.mT, axis=0), (real(2, 3),)),
        ]
        for name, mt_fn in (("softmax", mt.nn.softmax), ("log_softmax", mt.nn.log_softmax))
    }
)
more(
    {
        name: [
            (call(name, axis=1), (real(2, 3), y(real(2, 3)))),
            (call(name, axis=0), (real(2, 3, 2), y(real(2, 3, 2)))),
            (call(name, axis=0), (real(0, 2), real(0, 2))),
        ]
        for name, y in (("softmax_backward", np.abs), ("log_softmax_backward", np.negative))
    }
)
SENT = mt.asarray(I([[0, 2], [1, 0], [2, 7], [2, 1]]))  # expert 7 is nowhere


def _experts(name: str) -> Callable[..., Any]:
    def run(*operands: Any) -> Any:
        *g, x, weights, gate, up, down = operands
        return call(name)(*g, x, SENT, weights, gate, up, down, mt.arange(3))

    return run


STACKS = (real(4, 2), real(4, 2), real(3, 2, 3), real(3, 2, 3), real(3, 3, 2))
more(
    {
        "experts": [(_experts("experts"), STACKS)],
        "experts_backward": [(_experts("experts_backward"), (real(4, 2), *STACKS))],
    }
)
more(
    {
        "cross_entropy": [(functools.partial(_loss, **p), (real(2, 2, 3),)) for p in (PLAIN, SMOOTH)],
        "cross_entropy_backward": [
            (functools.partial(_loss_backward, **p), (real(2, 2), real(2, 2, 3))) for p in (PLAIN, SMOOTH)
        ],
    }
)

L = mt.linalg
STRIDED = {"stride": (1, 2), "dilation": (2, 1), "groups": 2}
more(
    {
        "conv": [
            (lambda x, w: mt.nn.conv1d(x, w, stride=2, padding=1), (real(2, 3, 5), real(4, 3, 2))),
            (lambda x, w, b: mt.nn.conv2d(x, w, b, padding="same"), (cplx(1, 2, 3, 4), real(2, 2, 2, 3), real(2))),
            (lambda x, w: mt.nn.conv2d(x, w, **STRIDED), (real(2, 4, 4, 5), cplx(2, 2, 2, 3))),
            (lambda x, w: mt.nn.conv1d(x, w), (real(0, 2, 3), real(1, 2, 2))),
        ],
        "conv_image": [
            (call("conv_image", image=(4, 6), **STRIDED), (real(2, 4, 2, 2), real(4, 1, 2, 3))),
            (call("conv_image", image=(5,), stride=(1,), dilation=(1,), groups=1), (cplx(1, 2, 4), cplx(2, 3, 2))),
        ],
        "conv_kernel": [
            (call("conv_kernel", kernel=(2, 3), **STRIDED), (real(2, 4, 2, 2), real(2, 2, 4, 6))),
            (call("conv_kernel", kernel=(2,), stride=(1,), dilation=(1,), groups=1), (cplx(1, 2, 4), cplx(1, 3, 5))),
        ],
        "cholesky": [
            (lambda x: L.cholesky(definite(x)), (square(real),)),
            (lambda x: L.cholesky(definite(x), upper=True), (square(cplx),)),
            (lambda x: L.cholesky(definite(x)), (square(cplx, 2, n=2),)),
        ],
        "inv": matrices("inv"),
        "solve": [
            (L.solve, (square(real), real(3, 2))),
            (L.solve, (square(cplx), cplx(3))),
            (L.solve, (square(real, 2), real(3))),
            (L.solve, (square(real), cplx(2, 3, 1))),
            (L.solve, (square(cplx, 2, 1, n=2), real(3, 2, 2))),
        ],
        "det": [*matrices("det"), (L.det, (I([[5.0]]),))],
        "adjugate": [(call("adjugate"), (x,)) for x in (square(real), square(cplx), square(real, 2, n=2))],
        "slogdet": matrices("slogdet"),
        "eigh": [
            (lambda x: phaseless(L.eigh(hermitian(x)).eigenvectors), (square(real),)),
            (lambda x: phaseless(L.eigh(hermitian(x)).eigenvectors), (square(cplx),)),
            (lambda x: L.eigh(hermitian(x)).eigenvalues, (square(cplx, 2),)),
        ],
        "eigvalsh": [(lambda x: L.eigvalsh(hermitian(x)), (square(make),)) for make in (real, cplx)],
        "eig": [
            (lambda x: (L.eig(x).eigenvalues, phaseless(L.eig(x).eigenvectors)), (square(real),)),
            (lambda x: (L.eig(x).eigenvalues, phaseless(L.eig(x).eigenvectors)), (square(cplx, 2),)),
        ],
        "eigvals": [(L.eigvals, (square(make),)) for make in (real, cplx)],
        "svd": [*shapes_of_matrices(svd_parts), (lambda x: L.svd(x).S, (real(3, 3),))],
        "svdvals": [
            *shapes_of_matrices(L.svdvals),
            (lambda x: L.matrix_norm(x, ord="nuc"), (real(3, 2),)),
            (lambda x: L.matrix_norm(x, ord=2, keepdims=True), (cplx(2, 3, 2),)),
        ],
        "qr": shapes_of_matrices(lambda x: tuple(L.qr(x))),
        "pinv": [*shapes_of_matrices(L.pinv), (L.pinv, (np.eye(3),))],
        "sort": [
            (mt.sort, (real(4),)),
            (lambda x: mt.sort(x, axis=0, descending=True), (real(3, 2),)),
            (lambda x: mt.sort(x, axis=1, stable=False), (real(0, 3),)),
        ],
        "cumulative_sum": [
            (mt.cumulative_sum, (real(4),)),
            (lambda x: mt.cumulative_sum(x, axis=0, include_initial=True), (cplx(3, 2),)),
            (lambda x: mt.cumulative_sum(x, axis=1), (real(2, 0),)),
        ],
        "cumulative_prod": [
            (mt.cumulative_prod, (real(5),)),
            (mt.cumulative_prod, (I([2.0, 0.0, 3.0, 0.0]),)),
            (lambda x: mt.cumulative_prod(x, axis=0, include_initial=True), (cplx(3, 2),)),
        ],
        "fft": [
            (mt.fft.fft, (real(5),)),
            (lambda x: mt.fft.ifft(x, n=3, norm="ortho"), (cplx(2, 5),)),
            (lambda x: mt.fft.fftn(x, s=(4, 2), norm="forward"), (cplx(3, 3),)),
            (lambda x: mt.fft.ifftn(x, axes=(0,)), (cplx(3, 2),)),
        ],
        "rfft": [
            (mt.fft.rfft, (real(5),)),
            (lambda x: mt.fft.rfft(x, n=6, axis=0, norm="ortho"), (real(4, 2),)),
            (lambda x: mt.fft.rfftn(x, norm="forward"), (real(2, 3, 4),)),
            (mt.fft.ihfft, (real(4),)),
        ],
        "irfft": [
            (mt.fft.irfft, (cplx(4),)),
            (lambda x: mt.fft.irfft(x, n=5, axis=0, norm="ortho"), (cplx(3, 2),)),
            (lambda x: mt.fft.irfftn(x, norm="forward"), (cplx(2, 3, 3),)),
            (lambda x: mt.fft.hfft(x, n=7), (cplx(3),)),
        ],
    }
)
