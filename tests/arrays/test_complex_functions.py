"""Functions of complex numbers: every one of `mt.nn` is right or refused, those that NumPy has too are compared with
it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special

import meshtape as mt

RNG = np.random.default_rng(3)
nn = mt.nn


def numbers(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape) + 1j * RNG.normal(size=shape)


Z, PAIRS, IMAGE, SIGNAL = numbers(6), numbers(4, 6), numbers(1, 2, 4, 4), numbers(1, 2, 6)
KERNEL, KERNEL1 = numbers(3, 2, 2, 2), numbers(3, 2, 2)
KEY = mt.random.key(7)
FAR = np.asarray([-800 + 1j, 800 - 2j, -30 + 3j, 0.0, 1j, -1j])  # an exponential of these overflows


def sigmoid(z: np.ndarray) -> np.ndarray:
    return np.where(z.real >= 0, 1 / (1 + np.exp(-z * (z.real >= 0))), 1 - 1 / (1 + np.exp(z * (z.real < 0))))


def correlated(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The convolution of models, written out: no kernel is turned over or conjugated."""
    out = np.zeros(
        (x.shape[0], w.shape[0], *(n - k + 1 for n, k in zip(x.shape[2:], w.shape[2:], strict=True))), complex
    )
    for place in np.ndindex(*w.shape[2:]):
        part = x[(..., *(slice(p, p + n) for p, n in zip(place, out.shape[2:], strict=True)))]
        out += np.einsum("oc,bc...->bo...", w[(..., *place)], part)
    return out


def kept(x: np.ndarray) -> np.ndarray:
    """A dropout mask is that of real numbers of the same shape."""
    return np.asarray(nn.dropout(mt.ones(x.shape), 0.5, key=KEY))


# For each function of `mt.nn`: the call on complex arguments, and the formula it must agree with; "refused" where there
# is none.
Row = tuple[Callable[..., Any], tuple[np.ndarray, ...], Callable[..., Any] | str]
TABLE: dict[str, list[Row]] = {
    "add_layer_norm": [(lambda x, r: nn.add_layer_norm(x, r, 6), (PAIRS, PAIRS), "refused")],
    "add_rms_norm": [(lambda x, r: nn.add_rms_norm(x, r, 6), (PAIRS, PAIRS), "refused")],
    "float8_matmul": [(nn.float8_matmul, (PAIRS, PAIRS.T), "refused")],
    "float8_scale": [(nn.float8_scale, (PAIRS,), "refused")],
    "rotary_embedding": [(lambda x: nn.rotary_embedding(x, mt.ones((4, 3)), mt.ones((4, 3))), (PAIRS,), "refused")],
    "batch_norm": [(lambda x: nn.batch_norm(x, mt.zeros(2), mt.ones(2), training=True), (IMAGE,), "refused")],
    "binary_cross_entropy": [
        (lambda x: nn.binary_cross_entropy(x, mt.zeros(6)), (Z,), "refused"),
        (lambda y: nn.binary_cross_entropy(mt.zeros(6), y), (Z,), "refused"),
    ],
    "celu": [(nn.celu, (Z,), "refused")],
    "conv1d": [(nn.conv1d, (SIGNAL, KERNEL1), correlated)],
    "conv2d": [
        (nn.conv2d, (IMAGE, KERNEL), correlated),
        (
            lambda x, w, b: nn.conv2d(x, w, b),
            (IMAGE, KERNEL, Z[:3]),
            lambda x, w, b: correlated(x, w) + b[:, None, None],
        ),
    ],
    "conv_transpose": [
        (
            nn.conv_transpose,
            (SIGNAL, KERNEL1.swapaxes(0, 1)),
            lambda x, w: correlated(np.pad(x, ((0, 0), (0, 0), (1, 1))), w.swapaxes(0, 1)[..., ::-1]),
        )
    ],
    "cosine_similarity": [
        (lambda x: nn.cosine_similarity(x, x), (Z,), "refused"),
        (lambda x: nn.cosine_similarity(mt.ones(6), x), (Z,), "refused"),
    ],
    "cross_entropy": [(lambda x: nn.cross_entropy(x, mt.asarray([0, 1, 2, 3])), (PAIRS,), "refused")],
    "dropout": [(lambda x: nn.dropout(x, 0.5, key=KEY), (Z,), lambda x: x * kept(x))],
    "dropout_add": [
        (lambda x, y: nn.dropout_add(x, y, 0.5, key=KEY), (Z, Z[::-1].copy()), lambda x, y: x * kept(x) + y)
    ],
    "elu": [(nn.elu, (Z,), "refused")],
    "embedding": [(lambda t: nn.embedding(mt.asarray([1, 1, 0]), t), (PAIRS,), lambda t: t[[1, 1, 0]])],
    "experts": [
        (
            lambda x: nn.experts(
                x,
                mt.zeros((4, 1), dtype=mt.int64),
                mt.ones((4, 1)),
                mt.ones((2, 6, 3)),
                mt.ones((2, 6, 3)),
                mt.ones((2, 3, 6)),
            ),
            (PAIRS,),
            "refused",
        )
    ],
    "gelu": [
        (nn.gelu, (Z,), lambda z: z * 0.5 * (1 + scipy.special.erf(z / np.sqrt(2)))),
        (
            lambda x: nn.gelu(x, approximate=True),
            (Z,),
            lambda z: 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
        ),
    ],
    "glu": [(nn.glu, (PAIRS,), lambda x: x[:, :3] * sigmoid(x[:, 3:]))],
    "group_norm": [(lambda x: nn.group_norm(x, 1), (IMAGE,), "refused")],
    "hard_sigmoid": [(nn.hard_sigmoid, (Z,), "refused")],
    "hard_silu": [(nn.hard_silu, (Z,), "refused")],
    "hard_tanh": [(nn.hard_tanh, (Z,), "refused")],
    "huber_loss": [(lambda x: nn.huber_loss(x, x), (Z,), "refused")],
    "info_nce": [(lambda x: nn.info_nce(x, x), (PAIRS,), "refused")],
    "instance_norm": [(nn.instance_norm, (IMAGE,), "refused")],
    "l1_loss": [
        (lambda x: nn.l1_loss(x, x), (Z,), "refused"),
        (lambda x: nn.l1_loss(mt.ones(6), x), (Z,), "refused"),
    ],
    "layer_norm": [
        (lambda x: nn.layer_norm(x, 6), (PAIRS,), "refused"),
        (lambda w: nn.layer_norm(mt.ones((2, 6)), 6, w), (Z,), "refused"),
    ],
    "leaky_relu": [(nn.leaky_relu, (Z,), "refused")],
    "linear_cross_entropy": [
        (lambda x: nn.linear_cross_entropy(x, mt.ones((6, 3)), mt.asarray([0, 1, 2, 2])), (PAIRS,), "refused")
    ],
    "log_sigmoid": [(nn.log_sigmoid, (Z,), "refused")],
    "log_softmax": [(nn.log_softmax, (Z,), "refused")],
    "logsumexp": [
        (nn.logsumexp, (Z * 3,), lambda z: np.log(np.sum(np.exp(z)))),
        (
            lambda x: nn.logsumexp(x, axis=1, keepdims=True),
            (PAIRS * 4,),
            lambda z: np.log(np.exp(z).sum(1, keepdims=True)),
        ),
        (nn.logsumexp, (Z + 1000,), lambda z: np.log(np.sum(np.exp(z - 1000))) + 1000),
    ],
    "mish": [(nn.mish, (Z,), "refused")],
    "mse_loss": [(lambda x: nn.mse_loss(x, x), (Z,), "refused")],
    "one_hot": [(lambda x: nn.one_hot(x, 3), (Z,), "refused")],
    "pool": [
        (lambda x: nn.pool(x, 2), (IMAGE,), "refused"),
        (lambda x: nn.pool(x, 2, kind="mean"), (IMAGE,), "refused"),
    ],
    "relu": [(nn.relu, (Z,), "refused")],
    "relu6": [(nn.relu6, (Z,), "refused")],
    "rms_norm": [(lambda x: nn.rms_norm(x, 6), (PAIRS,), "refused")],
    "scaled_dot_product_attention": [
        (lambda x: nn.scaled_dot_product_attention(x, x, x), (PAIRS,), "refused"),
        (lambda v: nn.scaled_dot_product_attention(mt.ones((4, 6)), mt.ones((4, 6)), v), (PAIRS,), "refused"),
    ],
    "selu": [(nn.selu, (Z,), "refused")],
    "sigmoid": [(nn.sigmoid, (Z,), lambda z: 1 / (1 + np.exp(-z))), (nn.sigmoid, (FAR,), sigmoid)],
    "silu": [(nn.silu, (Z,), lambda z: z / (1 + np.exp(-z))), (nn.silu, (FAR,), lambda z: z * sigmoid(z))],
    "softmax": [(nn.softmax, (Z,), "refused")],
    "softplus": [(nn.softplus, (Z,), "refused"), (lambda x: nn.softplus(x, beta=2.0), (Z,), "refused")],
    "softsign": [(nn.softsign, (Z,), lambda z: z / (1 + np.abs(z)))],
    "squared_relu": [(nn.squared_relu, (Z,), "refused")],
    "swiglu": [(nn.swiglu, (Z, Z[::-1].copy()), lambda x, y: x * sigmoid(x) * y)],
}
ROWS = [pytest.param(*row, id=f"{name}{i or ''}") for name, rows in TABLE.items() for i, row in enumerate(rows)]


def test_every_function_of_nn_is_in_the_table():
    assert set(TABLE) == {n for n in nn.__all__ if callable(getattr(nn, n))}


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize(("fn", "args", "oracle"), ROWS)
def test_nn_is_right_or_refuses(fn, args, oracle, dtype):
    given = [mt.asarray(a.astype(dtype)) for a in args]
    if oracle == "refused":
        for call in (fn, mt.compile(fn)):
            with pytest.raises(mt.errors.DTypeError, match=r"complex|real floating|floating"):
                call(*given)
        return
    found = fn(*given)
    assert found.dtype == dtype
    with np.errstate(all="ignore"):
        expected = oracle(*args)
    eps = {"rtol": 2e-5, "atol": 2e-5} if dtype == "complex64" else {"rtol": 1e-12, "atol": 1e-12}
    if np.abs(args[0]).max() > 100:
        eps = {"rtol": 1e-4, "atol": 1e-4} if dtype == "complex64" else eps
    np.testing.assert_allclose(np.asarray(found), expected, **eps)
    np.testing.assert_allclose(np.asarray(mt.compile(fn)(*given)), expected, **eps)
    if dtype == "complex128":
        mt.check_grads(fn, *given, rtol=1e-3, atol=1e-4)


# ----- what NumPy has too ---------------------------------------------------------------------------------------------

V, W, M, N = numbers(4), numbers(4), numbers(3, 3), numbers(3, 3)
ARGUMENTS: dict[str, tuple[np.ndarray, ...]] = {
    "vector": (V,),
    "matrix": (M,),
    "vectors": (V, W),
    "matrices": (M, N),
    "complex and real": (V, W.real - 0.5),
    "real and complex": (V.real - 0.5, W),
}
NOT_ELEMENTS = {"empty_like", "unique_values", "result_type"}  # nobody promises those elements, or their order; a dtype
SLOPES_ELSEWHERE = {"eig", "eigh", "eigvalsh", "svd", "stop_gradient"}  # factors have phases: see test_rules
NAMESPACES = {"": (mt, np), "linalg.": (mt.linalg, np.linalg), "fft.": (mt.fft, np.fft)}
SHARED = [
    (prefix + name, getattr(ours, name), getattr(numpys, name))
    for prefix, (ours, numpys) in NAMESPACES.items()
    for name in sorted(set(ours.__all__) & set(dir(numpys)))
    if callable(getattr(ours, name)) and not isinstance(getattr(ours, name), type) and name not in NOT_ELEMENTS
]


def parts(y: Any) -> list[np.ndarray]:
    return [np.asarray(p) for p in y] if isinstance(y, tuple | list) else [np.asarray(y)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_as_numpy_and_with_its_slope(kind):
    args = ARGUMENTS[kind]
    for name, ours, numpys in SHARED:
        try:
            expected = parts(numpys(*(a.copy() for a in args)))
            found = parts(ours(*map(mt.asarray, args)))
        except Exception:
            continue  # one of the two does not take these
        assert len(found) == len(expected), name
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape, name
            assert a.dtype == b.dtype or name in ("intersect1d", "linalg.lstsq"), name
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9, err_msg=name)
        smooth = all(p.dtype.kind in "fc" for p in found) and name.split(".")[-1] not in SLOPES_ELSEWHERE
        if smooth and sum(p.size for p in found) < 50:
            try:
                mt.check_grads(ours, *map(mt.asarray, args), order=1, rtol=1e-3, atol=1e-4)
            except Exception as e:
                e.add_note(name)
                raise
