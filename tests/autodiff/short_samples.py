"""A call of every differentiable op in which short floats are reduced, or spread, over thousands of elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from derivative_samples import KEY, WELL, call

import meshtape as mt
from meshtape.arrays import OPS
from meshtape.arrays.core.index_template import Slot

N = 5000  # what bfloat16 adds up one by one ends at 256, float16 at 2048
rng = np.random.default_rng(11)

Sample = tuple[Callable[..., Any], tuple[np.ndarray, ...]]


def real(*shape: int, low: float = 0.5, high: float = 1.5) -> np.ndarray:
    return np.asarray(rng.uniform(low, high, shape))


FIRST = np.zeros(N, int)
SOME = rng.integers(0, 4, N)
X, B = real(N, 2), real(2)


def spread(f: Callable[..., Any], low: float, high: float) -> Sample:
    """One small array in the place of many: its cotangent is a sum."""
    return lambda b: f(mt.broadcast_to(b, (N, 2))), (real(2, low=low, high=high),)


UNARY = {
    **dict.fromkeys(
        [
            "negative",
            "positive",
            "abs",
            "reciprocal",
            "square",
            "sqrt",
            "log",
            "log1p",
            "log2",
            "log10",
            "exp",
            "exp2",
            "sinh",
            "cosh",
            "asinh",
            "relu",
            "erf",
            "gelu",
            "alias",
            "barrier",
            "conj",
            "cbrt",
            "silu",
            "real",
        ],
        (0.5, 1.5),
    ),
    **dict.fromkeys(["expm1", "sin", "tan", "asin", "atan", "atanh", "sigmoid"], (0.2, 0.7)),
    "cos": (0.5, 1.2),
    "acos": (0.2, 0.7),
    "tanh": (0.2, 0.9),
    "acosh": (1.5, 3.0),
}


def function(name: str) -> Callable[..., Any]:
    found = getattr(mt, name, None) or getattr(mt.nn, name, None)
    return found if callable(found) else call(name)


SHORT: dict[str, list[Sample]] = {name: [spread(function(name), *ends)] for name, ends in UNARY.items()}
for name in [
    "add",
    "subtract",
    "multiply",
    "divide",
    "pow",
    "hypot",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "logaddexp",
    "logaddexp2",
    "atan2",
    "copysign",
    "nextafter",
]:
    SHORT[name] = [(function(name), (X, B)), (function(name), (B, X))]
SHORT["logaddexp"].append((mt.logaddexp, (np.full((N, 2), 800.0), np.asarray([799.0, 802.0]))))


def fan_out(x: Any) -> Any:
    total = x
    for _ in range(600):
        total = total + x
    return total


def joined(count: int) -> Callable[..., Any]:
    return lambda b: mt.stack([b] * count)


def written(method: str, key: Any) -> Callable[..., Any]:
    return lambda x, v: getattr(x.at[key], method)(v)


def near_one(*shape: int) -> np.ndarray:
    return np.asarray(1 + rng.choice([-1, 1], shape) / 64.0)


SHORT["add"].append((fan_out, (real(3),)))
SHORT |= {
    "sign": [spread(mt.sign, 0.5, 1.5)],
    "imag": [spread(mt.imag, 0.5, 1.5)],
    "fmod": [(mt.fmod, (real(N, 2, low=3.0, high=4.0), real(2, low=1.6, high=2.0)))],
    "heaviside": [(lambda h: mt.heaviside(mt.asarray(np.zeros((N, 2))), h), (real(2),))],
    "ldexp": [(lambda x: mt.ldexp(x, mt.asarray(np.ones((N, 2), np.int64))), (real(2),))],
    "remainder": [(mt.remainder, (real(N, 2, low=3.0, high=4.0), real(2, low=1.6, high=2.0)))],
    "astype": [(lambda b: mt.astype(mt.broadcast_to(b, (N, 2)), mt.float32), (B,))],
    "gelu_backward": [(call("gelu_backward"), (X, X)), (call("gelu_backward"), (X, B))],
    "where": [(lambda x, b: mt.where(mt.asarray(X > 0.9), x, b), (X, B))],
    "getitem": [
        (lambda b: b[mt.asarray(FIRST)], (B,)),
        (lambda b: mt.sum(mt.stack([b[1] for _ in range(600)])), (B,)),
        (lambda t: t[mt.asarray(SOME)], (real(4, 5),)),
    ],
    "index_set": [
        (written("set", slice(None)), (X, B)),
        (written("set", (slice(None), 1)), (X, real())),
    ],
    "index_add": [
        (written("add", FIRST), (B, real(N))),
        (written("add", FIRST), (B, real())),
    ],
    "index_min": [(written("min", FIRST), (B, real(N)))],
    "index_max": [(written("max", FIRST), (B, real(N)))],
    "scatter": [(lambda g: call("scatter", template=(Slot(0),), shape=(4,))(g, mt.asarray(SOME)), (real(N),))],
    "last_writes": [
        (lambda b: call("last_writes", template=(Slot(0),))(mt.broadcast_to(b, (N,)), mt.arange(N)), (real(),))
    ],
    "matmul": [
        (mt.matmul, (real(N, 3), real(3, 2))),
        (mt.matmul, (real(N, 3), real(3))),
        (mt.matmul, (real(N), real(N, 3))),
        (mt.matmul, (real(N), real(N))),
        (mt.matmul, (real(500, 10, 3), real(3, 2))),
        (mt.matmul, (real(2, 3), real(N, 3, 2))),
        (mt.matmul, (real(3), real(N, 3, 2))),
    ],
    "reshape": [(lambda b: mt.reshape(mt.broadcast_to(b, (N, 2)), (2, N)), (B,))],
    "permute_dims": [(lambda b: mt.broadcast_to(b, (N, 2)).mT, (B,))],
    "broadcast_to": [(lambda b: mt.broadcast_to(b, (N, 2)), (B,)), (lambda b: mt.tile(b, (N,)), (B,))],
    "flip": [(lambda b: mt.flip(mt.broadcast_to(b, (N, 2))), (B,))],
    "concat": [(joined(600), (B,)), (lambda b: mt.repeat(b, N), (B,))],
    "sum": [(mt.sum, (X,)), (lambda x: mt.sum(x, axis=0), (X,)), spread(mt.sum, 0.5, 1.5)],
    "mean": [(mt.mean, (X,)), spread(mt.mean, 0.5, 1.5), (lambda x: mt.var(x, axis=0), (X,))],
    "prod": [(lambda x: mt.prod(x, axis=0), (near_one(N, 2),)), spread(lambda x: mt.prod(x[:600] ** 0, axis=0), 1, 1)],
    "max": [(lambda x: mt.max(x, axis=0), (X,)), spread(lambda x: mt.max(x, axis=0), 0.5, 1.5)],
    "min": [(lambda x: mt.min(x, axis=0), (X,)), spread(lambda x: mt.min(x, axis=0), 0.5, 1.5)],
    "cumulative_sum": [(lambda x: mt.cumulative_sum(x, axis=0), (X * 0.01,))],
    "cumulative_prod": [(lambda x: mt.cumulative_prod(x, axis=0), (near_one(600, 2),))],
    "sort": [(lambda x: mt.sort(x * 1.0, axis=0), (X,)), spread(lambda x: mt.sort(x, axis=1), 0.5, 1.5)],
    "fft": [spread(lambda x: mt.real(mt.fft.fft(x, axis=1)), 0.5, 1.5)],
    "rfft": [spread(lambda x: mt.real(mt.fft.rfft(x, axis=1)), 0.5, 1.5)],
    "irfft": [spread(lambda x: mt.fft.irfft(mt.fft.rfft(x, axis=1), n=2, axis=1), 0.5, 1.5)],
    "dropout": [(lambda b: mt.nn.dropout(mt.broadcast_to(b, (N, 2)), 0.3, key=KEY), (B,))],
    "dropout_add": [(lambda b: mt.nn.dropout_add(*[mt.broadcast_to(b, (N, 2))] * 2, 0.3, key=KEY), (B,))],
    "softmax": [spread(lambda x: mt.nn.softmax(x, axis=1), 0.2, 1.5)],
    "log_softmax": [spread(lambda x: mt.nn.log_softmax(x, axis=1), 0.2, 1.5)],
    "softmax_backward": [(lambda b: call("softmax_backward", axis=1)(b * mt.ones((N, 2), dtype=b.dtype), b / 2), (X,))],
    "log_softmax_backward": [(lambda g, y: call("log_softmax_backward", axis=1)(g, -y), (X, X + 1))],
    "layer_norm": [(lambda x, w, b: mt.layer_norm(x, 4, w, b), (real(N, 4), real(4), real(4)))],
    "rms_norm": [(lambda x, w: mt.rms_norm(x, 4, w), (real(N, 4), real(4)))],
    "group_norm": [(lambda x, w, b: mt.group_norm(x, 2, w, b), (real(600, 4, 3), real(4), real(4)))],
    "batch_norm": [(call("batch_norm", axis=1, eps=1e-2), (real(N, 2), B, B))],
    "batch_norm_inference": [(call("batch_norm_inference", axis=1, eps=1e-2), (X, B, B, real(2), real(2)))],
    "layer_norm_backward": [
        (lambda g, x, w: call("layer_norm_backward", naxes=1, eps=1e-2)(g, x, w)[1:], (real(N, 4), real(N, 4), real(4)))
    ],
    "rms_norm_backward": [
        (lambda g, x, w: call("rms_norm_backward", naxes=1, eps=1e-2)(g, x, w)[1:], (real(N, 4), real(N, 4), real(4)))
    ],
    "group_norm_backward": [
        (
            lambda g, x, w: call("group_norm_backward", num_groups=2, axis=1, eps=1e-2)(g, x, w)[2:],
            (real(600, 4, 3), real(600, 4, 3), real(4)),
        )
    ],
    "batch_norm_backward": [
        (
            lambda *xs: call("batch_norm_backward", axis=1, eps=1e-2)(*xs)[2:],
            (real(N, 2), real(2), real(2), real(N, 2), real(2)),
        )
    ],
    "conv": [(mt.nn.conv1d, (real(50, 2, 102), real(3, 2, 3), real(3)))],
    "conv_image": [
        (
            call("conv_image", image=(102,), stride=(1,), dilation=(1,), groups=1),
            (real(50, 3, 100), real(3, 2, 3)),
        )
    ],
    "conv_kernel": [
        (
            call("conv_kernel", kernel=(3,), stride=(1,), dilation=(1,), groups=1),
            (real(50, 3, 100, high=0.6), real(50, 2, 102)),
        )
    ],
    "cross_entropy": [
        (lambda x: mt.nn.cross_entropy(mt.broadcast_to(x, (N, 3)), mt.asarray(FIRST), reduction="sum"), (real(3),)),
    ],
    "cross_entropy_backward": [
        (
            lambda g: call("cross_entropy_backward", ignore_index=None, label_smoothing=0.0)(
                mt.broadcast_to(g, (N,)), mt.ones((N, 3), dtype=g.dtype), mt.asarray(FIRST)
            )[:, 1:],
            (real(),),
        )
    ],
    "experts": [
        (
            lambda x, w, gate, up, down: call("experts")(
                x, mt.asarray(SOME[:600, None] % 2), w, gate, up, down, mt.arange(2)
            ),
            (real(600, 2), real(600, 1), real(2, 2, 3), real(2, 2, 3), real(2, 3, 2)),
        )
    ],
}


def stack_of(f: Callable[..., Any], *rest: np.ndarray) -> Sample:
    return lambda a, *xs: f(mt.broadcast_to(a, (600, 3, 3)), *xs), (WELL, *rest)


L = mt.linalg
SHORT |= {
    "inv": [stack_of(L.inv)],
    "solve": [stack_of(L.solve, real(3, 1))],
    "det": [stack_of(L.det)],
    "slogdet": [stack_of(lambda a: L.slogdet(a)[1])],
    "pinv": [stack_of(L.pinv)],
    "adjugate": [stack_of(call("adjugate"))],
    "cholesky": [stack_of(lambda a: L.cholesky(a * 0.0 + mt.asarray(np.diag([4.0, 2.0, 1.0])).astype(a.dtype)))],
    "eigvalsh": [stack_of(L.eigvalsh)],
    "svdvals": [stack_of(L.svdvals)],
}

# Of complex numbers, which are never short; sums of parts that all but cancel; and what optimizers call with float32 alone.
NO_SHORT = {"eig", "eigh", "eigvals", "qr", "svd", "experts_backward", "lazy_adam", "reshard"}


def missing() -> set[str]:
    return {n for n, op in OPS.items() if op.nondifferentiable is None} - set(SHORT) - NO_SHORT
