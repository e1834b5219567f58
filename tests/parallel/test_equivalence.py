"""The promise that everything in ``parallel`` serves: a computation gives the same numbers however its operands are split.

Each op of the table is called on random placements over random meshes, ragged and empty blocks among them, and on operands that
are still sums waiting to be made. Value and cotangents equal those of the unsplit op, and every rank holds the block that the
sharding says it holds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import meshtape as mt
import meshtape.parallel
from meshtape.arrays import OPS
from meshtape.arrays.core.dispatch import apply
from meshtape.arrays.core.index_template import Slot, Span
from meshtape.arrays.indexing.keys import parse
from meshtape.autodiff.tape.tape import is_differentiable
from meshtape.parallel.sharding.factors import RULES

MESHES = [(n,) for n in range(1, 9)] + [(2, 2), (2, 3), (3, 2), (1, 4), (4, 2), (2, 1, 2), (2, 2, 2), (1, 3, 2)]
NAMES = ("a", "b", "c")


class In(NamedTuple):
    """An operand: its shape and the numbers it is made of. Sums of parts are exact in every float of four bytes."""

    shape: tuple[int, ...]
    kind: Any = "f8"
    low: float = -2.0
    high: float = 2.0

    def make(self, rng: np.random.Generator) -> np.ndarray:
        dtype = np.dtype(self.kind)
        if dtype.kind == "b":
            return np.asarray(rng.integers(0, 2, self.shape).astype(bool))
        if dtype.kind in "iu":
            return np.asarray(rng.integers(int(self.low), int(self.high) + 1, self.shape, dtype))
        x = rng.integers(math.ceil(self.low * 16), math.floor(self.high * 16) + 1, self.shape) / 16
        if dtype.kind == "c":
            x = x + 1j * rng.integers(-32, 33, self.shape) / 16
        return np.asarray(x, dtype)


Sample = tuple[Callable[..., Any], tuple[In, ...]]

# ----- samples: calls of every op -------------------------------------------------------------------------------------

ONE = [(), (1,), (5,), (0, 3), (3, 4), (2, 3, 5)]
TWO = [
    ((), ()),
    ((5,), ()),
    ((), (3,)),
    ((5,), (5,)),
    ((1,), (5,)),
    ((4, 6), (6,)),
    ((4, 1), (1, 6)),
    ((3, 4), (3, 1)),
    ((2, 3, 4), (3, 1)),
    ((0, 3), (3,)),
]


def function(name: str) -> Callable[..., Any]:
    """The public function of an op."""
    return getattr(mt, name, None) or getattr(mt.nn, name, None) or (lambda *args: apply(OPS[name], args))


def call(name: str, **params: Any) -> Callable[..., Any]:
    """The op itself, for those that no public function calls in the wanted way."""
    return lambda *args: apply(OPS[name], args, params)


def unary(names: str, low: float = -2.0, high: float = 2.0, kinds: str = "f8") -> dict[str, list[Sample]]:
    return {n: [(function(n), (In(s, k, low, high),)) for k in kinds.split() for s in ONE] for n in names.split()}


def binary(names: str, low: float = -2.0, high: float = 2.0, kinds: str = "f8", scalar: Any = 1.5) -> Any:
    out = {}
    for name in names.split():
        f = function(name)
        pairs = [(f, (In(a, k, low, high), In(b, k, low, high))) for k in kinds.split() for a, b in TWO]
        left = [(lambda x, f=f: f(x, scalar), (In((5,), k, low, high),)) for k in kinds.split()]
        right = [(lambda x, f=f: f(scalar, x), (In((3, 2), k, low, high),)) for k in kinds.split()]
        out[name] = [*pairs, *left, *right]
    return out


def reductions(names: str, kinds: str = "f8", empty: bool = True) -> dict[str, list[Sample]]:
    calls = [
        ((5,), None, False),
        ((3, 4), 0, False),
        ((3, 4), 1, True),
        ((3, 4), (0, 1), False),
        ((2, 3, 5), (0, 2), True),
    ]
    calls += [((2, 3, 5), 1, False), ((), None, False), ((1, 4), 0, False), ((0, 3), 1, False)]
    calls += [((0, 3), 0, False)] if empty else []
    return {
        n: [(reduce_by(n, a, k), (In(s, kind),)) for kind in kinds.split() for s, a, k in calls] for n in names.split()
    }


def reduce_by(name: str, axis: Any, keepdims: bool) -> Callable[..., Any]:
    """A reduction over these axes."""
    return lambda x: function(name)(x, axis=axis, keepdims=keepdims)


def arg_reductions(*names: str) -> dict[str, list[Sample]]:
    calls = [((5,), None, False), ((3, 4), 0, False), ((3, 4), 1, True), ((2, 3, 5), 1, False), ((0, 3), 1, False)]
    return {n: [(reduce_by(n, a, k), (In(s, "i8"),)) for s, a, k in calls] for n in names}


def matmul() -> list[Sample]:
    shapes = [
        ((4, 6), (6, 5)),
        ((3,), (3,)),
        ((2,), (3, 2, 4)),
        ((5, 1, 2, 3), (4, 3, 2)),
        ((2, 3), (3,)),
        ((2, 0), (0, 3)),
        ((0, 3), (3, 2)),
        ((1, 2, 3), (4, 3, 1)),
    ]
    out: list[Sample] = [(mt.matmul, (In(a), In(b))) for a, b in shapes]
    out += [(mt.matmul, (In((3, 5), "c16"), In((5, 2), "f8"))), (mt.matmul, (In((3, 5), "i8"), In((5, 2), "i8")))]
    return [*out, (lambda a: a @ a, (In((3, 3)),)), (lambda a: a @ a.mT, (In((3, 4)),))]


def reshapes() -> list[Sample]:
    pairs = [
        ((4, 6), (24,)),
        ((24,), (4, 6)),
        ((12,), (4, 3)),
        ((5, 3), (5, 3, 1)),
        ((5, 1, 3), (5, 3)),
        ((6, 4), (8, 3)),
        ((4, 6), (2, 2, 6)),
        ((2, 3, 4), (6, 4)),
        ((2, 3, 4), (2, 12)),
        ((1, 5), (5, 1)),
        ((0, 3), (3, 0)),
        ((), (1, 1)),
        ((1,), ()),
        ((3, 2, 2), (3, 4)),
        ((2, 3, 12), (2, 3, 4, 3)),  # heads apart
        ((2, 4, 3, 2), (2, 4, 6)),  # and together
        ((5, 12), (5, 2, 3, 2)),
        ((1, 12, 2), (4, 6)),
    ]
    return [(lambda x, t=t: mt.reshape(x, t), (In(s),)) for s, t in pairs]


def _extremum(name: str, x: Any, key: Any, v: Any) -> Any:
    template, arrays = parse(x, key)
    return apply(OPS[name], (x, v, *arrays), {"template": template})


def index_samples() -> dict[str, list[Sample]]:
    i5, i2, i23 = In((5,), "i8", -4, 3), In((2,), "i8", -4, 3), In((2, 3), "i8", -4, 3)
    x, cube = In((4, 6)), In((4, 5, 6))
    read: list[Sample] = [
        (lambda x: x[1:3], (x,)),
        (lambda x: x[:, ::-2], (x,)),
        (lambda x: x[0], (x,)),
        (lambda x: x[:, 3], (x,)),
        (lambda x: x[None, :, None], (x,)),
        (lambda x: x[...], (In(()),)),
        (lambda x: x[()], (In(()),)),
        (lambda x: x[True], (x,)),
        (lambda x: x[False], (x,)),
        (lambda x: x[True, :, 1], (x,)),
        (lambda x: x[:0], (x,)),
        (lambda x, i: x[i], (x, i5)),
        (lambda x, i: x[:, i], (x, i23)),
        (lambda x, i, j: x[i, j], (x, i2, i2)),
        (lambda x, i, j: x[i, :, j], (cube, i23, In((3,), "i8", -4, 3))),
        (lambda x, i: x[0, :, i], (cube, i2)),
        (lambda x, i: x[:, i, 0], (cube, i2)),
        (lambda x, i: x[i, True], (x, In((1,), "i8", 0, 3))),
        (lambda x, i: x[i], (x, In((0,), "i8", 0, 0))),
        (lambda x, i: x[i], (x, In((), "i8", 0, 3))),
    ]
    full = Span(None, None, None)
    write: dict[str, list[Sample]] = {}
    for name, method in (("index_set", "set"), ("index_add", "add"), ("index_min", "min"), ("index_max", "max")):
        at = lambda x, key, v, m=method: getattr(x.at[key], m)(v)  # noqa: E731
        if method in ("min", "max"):  # the op itself: ``.at`` writes by slices without it
            at = functools.partial(_extremum, name)
        write[name] = [
            (lambda x, v, at=at: at(x, slice(1, 3), v), (x, In((2, 6)))),
            (lambda x, v, at=at: at(x, slice(1, 3), v), (x, In((6,)))),
            (lambda x, v, at=at: at(x, slice(1, 3), v), (x, In(()))),
            (lambda x, at=at: at(x, slice(1, 3), 0.0), (x,)),
            (lambda x, at=at: at(x, (slice(None), 2), 1.5), (x,)),
            (lambda x, v, at=at: at(x, (slice(None), 2), v), (x, In((4,)))),
            (lambda x, v, at=at: at(x, 1, v), (x, In((1, 1, 6)))),
            (lambda x, v, at=at: at(x, True, v), (x, In((6,)))),
            (lambda x, i, v, at=at: at(x, i, v), (x, i5, In((5, 6)))),
            (lambda x, i, v, at=at: at(x, i, v), (x, i5, In((5, 1)))),
            (lambda x, i, v, at=at: at(x, (slice(None), i), v), (x, i5, In((4, 5)))),
            (lambda x, i, v, at=at: at(x, (slice(None), i), v), (x, i5, In((4, 1)))),
            (lambda x, i, v, at=at: at(x, (slice(None), i), v), (cube, i5, In((5, 6)))),
            (lambda x, i, j, v, at=at: at(x, (i, slice(None), j), v), (cube, i2, i2, In((2, 5)))),
        ]
    scatter: list[Sample] = [
        (call("scatter", template=(full, Slot(0)), shape=(4, 6)), (In((4, 5)), i5)),
        (call("scatter", template=(Slot(0), full), shape=(4, 6)), (In((2, 3, 6)), i23)),
        (call("scatter", template=(Span(1, 3, None), full), shape=(4, 6)), (In((2, 6)),)),
        (call("scatter", template=(2, full), shape=(4, 6)), (In((6,)),)),
        (call("scatter", template=(Slot(0), full, Slot(1)), shape=(4, 5, 6)), (In((2, 5)), i2, i2)),
    ]
    last: list[Sample] = [
        (call("last_writes", template=(Slot(0), full)), (x, i5)),
        (call("last_writes", template=(full, Slot(0))), (x, i23)),
        (call("last_writes", template=(Span(1, 3, None), full)), (x,)),
        (call("last_writes", template=(Slot(0), full, Slot(1))), (cube, i2, i2)),
    ]
    return {"getitem": read, **write, "scatter": scatter, "last_writes": last}


def adam_samples() -> dict[str, list[Sample]]:
    step = call("lazy_adam", b1=0.9, b2=0.99)

    def some(p: Any, g: Any, m: Any, v: Any) -> Any:
        return step(p, mt.where(g > 0.3, g, 0.0), m, v * v, 0.1, mt.asarray(0.3))

    return {"lazy_adam": [(some, (In(s), In(s), In(s), In(s))) for s in ((6, 3), (5,), (0, 2), ())]}


def norm_samples() -> dict[str, list[Sample]]:
    def forward(n: int) -> Callable[..., Any]:
        return lambda x, w, b: mt.layer_norm(x, w.shape, w, b)

    shapes = [((3, 5), 1), ((2, 3, 4), 1), ((2, 3, 4), 2), ((5,), 1), ((0, 3), 1), ((1, 7), 1)]
    back = call("layer_norm_backward", naxes=1, eps=1e-5)
    return {
        "layer_norm": [(forward(n), (In(s), In(s[len(s) - n :]), In(s[len(s) - n :]))) for s, n in shapes]
        + [(lambda x: mt.layer_norm(x, 5), (In((4, 5)),))],
        "layer_norm_backward": [
            (back, (In((3, 5)), In((3, 5)), In((5,)))),
            (back, (In((2, 3, 4)), In((2, 3, 4)), In((4,)))),
            (back, (In((0, 3)), In((0, 3)), In((3,)))),
        ],
        "group_norm": [
            (lambda x, w, b: mt.group_norm(x, 2, w, b), (In((4, 6, 3)), In((6,)), In((6,)))),
            (lambda x, w, b: mt.group_norm(x, 2, w, b, channel_axis=-1), (In((2, 3, 4)), In((4,)), In((4,)))),
            (lambda x: mt.instance_norm(x), (In((3, 4, 5)),)),
            (lambda x, w, b: mt.group_norm(x, 3, w, b), (In((5, 6, 2, 2)), In((6,)), In((6,)))),
            (lambda x, w, b: mt.group_norm(x, 4, w, b), (In((2, 8, 3)), In((8,)), In((8,)))),
            (lambda x: mt.instance_norm(x, channel_axis=-1), (In((2, 4, 5)),)),
        ],
        "group_norm_backward": [
            (call("group_norm_backward", num_groups=2, axis=1, eps=1e-3), (In((3, 4, 5)), In((3, 4, 5)), In((4,)))),
            (call("group_norm_backward", num_groups=2, axis=2, eps=1e-3), (In((3, 5, 4)), In((3, 5, 4)), In((4,)))),
            (call("group_norm_backward", num_groups=3, axis=1, eps=1e-3), (In((2, 3, 4)), In((2, 3, 4)), In((3,)))),
        ],
        "batch_norm": [
            (call("batch_norm", axis=1, eps=1e-3), (In((5, 4, 3)), In((4,)), In((4,)))),
            (call("batch_norm", axis=1, eps=1e-3), (In((1, 4, 3)), In((4,)), In((4,)))),
            (call("batch_norm", axis=2, eps=1e-3), (In((4, 3, 5)), In((5,)), In((5,)))),
        ],
        "batch_norm_backward": [
            (
                call("batch_norm_backward", axis=1, eps=1e-3),
                (In((5, 4, 3)), In((4,)), In((4,)), In((5, 4, 3)), In((4,))),
            ),
        ],
        "batch_norm_inference": [
            (
                call("batch_norm_inference", axis=1, eps=1e-3),
                (In((3, 4, 5)), In((4,)), In((4,), "f8", 0.5, 2), In((4,)), In((4,))),
            ),
        ],
        "rms_norm": [(lambda x, w: mt.rms_norm(x, w.shape, w), (In(s), In(s[len(s) - n :]))) for s, n in shapes],
        "rms_norm_backward": [
            (call("rms_norm_backward", naxes=1, eps=1e-5), (In((3, 5)), In((3, 5)), In((5,)))),
            (call("rms_norm_backward", naxes=1, eps=1e-5), (In((0, 3)), In((0, 3)), In((3,)))),
        ],
    }


def softmax_samples() -> dict[str, list[Sample]]:
    """Rows that are split as well as rows that are whole: the former go through the decompositions."""
    shapes = [((4, 6), 1), ((4, 6), 0), ((2, 3, 5), 1), ((5,), 0), ((0, 3), 1)]
    out: dict[str, list[Sample]] = {
        name: [(call(name, axis=a, masked=m), (In(s),)) for s, a in shapes for m in (False, True)]
        for name in ("softmax", "log_softmax")
    }
    for name in ("softmax_backward", "log_softmax_backward"):
        out[name] = [(call(name, axis=a), (In(s), In(s))) for s, a in shapes]
    kinds: list[dict[str, Any]] = [
        {"ignore_index": None, "label_smoothing": 0.0},
        {"ignore_index": 2, "label_smoothing": 0.25},
    ]
    labels = [((4, 6), (4,)), ((2, 3, 5), (2, 3)), ((5,), ()), ((0, 3), (0,))]
    out["cross_entropy"] = [
        (call("cross_entropy", **p), (In(s), In(n, "i8", 0, s[-1] - 1))) for s, n in labels for p in kinds
    ]
    sent = [
        (
            In((*n, 4)),
            In((*n, 2), "i8", 0, e),
            In((*n, 2)),
            In((e, 4, 6)),
            In((e, 4, 6)),
            In((e, 6, 4)),
            In((e,), "i8", 0, e),
        )
        for n, e in (((5,), 3), ((2, 3), 2), ((0,), 3))
    ]
    out["experts"] = [(call("experts"), operands) for operands in sent]
    out["experts_backward"] = [(call("experts_backward"), (operands[0], *operands)) for operands in sent]
    out["cross_entropy_backward"] = [
        (call("cross_entropy_backward", **p), (In(n), In(s), In(n, "i8", 0, s[-1] - 1)))
        for s, n in labels
        for p in kinds
    ]
    out["positions"] = [(call("positions", axis=a, start=3), (In(s),)) for s, a in shapes]
    return out


def random_samples() -> dict[str, list[Sample]]:
    key = In((2,), "u8", 0, 9)
    r = mt.random
    shapes = [(), (5,), (4, 6), (0, 3), (2, 3, 5)]

    def draws(fn: Callable[..., Any]) -> list[Sample]:
        return [(lambda k, s=s: fn(k, s), (key,)) for s in shapes]

    drop = [(5,), (4, 6), (0, 3), (2, 3, 5)]
    return {
        "dropout": [(lambda k, x: mt.nn.dropout(x, 0.4, key=k), (key, In(s))) for s in drop],
        "dropout_add": [(lambda k, x, y: mt.nn.dropout_add(x, y, 0.4, key=k), (key, In(s), In(s))) for s in drop],
        "random_bits": draws(r.bits),
        "random_uniform": draws(r.uniform) + draws(lambda k, s: r.uniform(k, s, np.float32, -1.0, 3.0)),
        "random_normal": draws(r.normal) + draws(lambda k, s: r.normal(k, s, np.float32)),
        "random_truncated_normal": draws(lambda k, s: r.truncated_normal(k, -1.0, 2.0, s)),
        "random_integers": draws(lambda k, s: r.integers(k, s, 0, 10)),
        "random_bernoulli": draws(lambda k, s: r.bernoulli(k, 0.3, s)),
        "random_exponential": draws(r.exponential),
        "random_gumbel": draws(r.gumbel),
        "random_split": [(lambda k: r.split(k, 5), (key,))],
        "random_fold_in": [
            (lambda k: r.fold_in(k, 7), (key,)),
            (lambda k: r.fold_in(k, "dropout"), (key,)),
            (r.fold_in, (key, In((), "i8", 0, 9))),
        ],
        "random_permutation": [(lambda k: r.permutation(k, 7), (key,))],
        "random_choice": [
            (lambda k, p: r.choice(k, 5, (3,), p=p), (key, In((5,), "f8", 0.25, 2))),
            (lambda k, p: r.choice(k, 5, (4,), replace=False, p=p), (key, In((5,), "f8", 0.25, 2))),
        ],
    }


DTYPES = [np.dtype(t) for t in ("f4", "c16", "i8", "?", ml_dtypes.bfloat16)]


def definite(x: Any) -> Any:
    """Hermitian matrices with eigenvalues well apart from zero and from one another."""
    n = x.shape[-1]
    return 0.01 * (x + mt.conj(x.mT)) + mt.asarray(np.diag(np.arange(1.0, n + 1)))


def linear_algebra() -> dict[str, list[Sample]]:
    matrices = [In((3, 3)), In((4, 3, 3)), In((5, 2, 2, 2)), In((0, 2, 2))]

    def each(name: str, f: Callable[..., Any], specs: list[In] = matrices) -> list[Sample]:
        return [(lambda x: f(function_or_call(name)(definite(x))), (s,)) for s in specs]

    def function_or_call(name: str) -> Callable[..., Any]:
        return getattr(mt.linalg, name, None) or call(name)

    def values(x: Any) -> Any:
        return x

    shapes = [In((4, 3)), In((3, 4)), In((5, 3, 2)), In((4, 2, 3), "c16")]

    def singular(x: Any) -> Any:
        return mt.linalg.svd(x, full_matrices=False)

    return {
        **{n: each(n, values) for n in ("cholesky", "inv", "det", "adjugate", "eigvalsh", "eigvals")},
        "slogdet": each("slogdet", tuple),
        "eigh": each("eigh", lambda r: (r[0], r[1] ** 2)),
        "eig": each("eig", lambda r: r[0]),
        "solve": [
            (lambda a, b: mt.linalg.solve(definite(a), b), (In(a), In(b)))
            for a, b in [((3, 3), (3, 4)), ((4, 3, 3), (3, 2)), ((2, 2), (5, 2, 3)), ((3, 3), (3,))]
        ],
        "svd": [(lambda x: singular(x)[1], (s,)) for s in shapes],
        "svdvals": [(mt.linalg.svdvals, (s,)) for s in shapes],
        # (Far from triangular ones: there the sign of a column is that of what rounding leaves below the diagonal.)
        "qr": [(lambda x: tuple(mt.linalg.qr(definite(x) + 1.0)), (s,)) for s in matrices],
        "pinv": [(mt.linalg.pinv, (s,)) for s in shapes],
    }


def along_axes() -> dict[str, list[Sample]]:
    shapes = [(5,), (3, 4), (2, 3, 5)]

    def calls(f: Callable[..., Any], *, empty: bool = True, **params: Any) -> list[Sample]:
        specs = [(s, a) for s in shapes + [(0, 3)] * empty for a in range(len(s)) if s[a]]
        return [(lambda x, a=a: f(x, axis=a, **params), (In(s),)) for s, a in specs]

    return {
        "sort": calls(mt.sort) + calls(mt.sort, descending=True),
        "argsort": calls(mt.argsort) + calls(mt.argsort, descending=True),
        "cumulative_sum": calls(mt.cumulative_sum, include_initial=True),
        "cumulative_prod": calls(mt.cumulative_prod),
        "fft": calls(mt.fft.fft) + calls(mt.fft.ifft, n=4) + [(mt.fft.fftn, (In((3, 4), "c16"),))],
        "rfft": calls(mt.fft.rfft) + calls(mt.fft.rfft, n=4),
        "irfft": [(mt.fft.irfft, (In(s, "c16"),)) for s in [(5,), (3, 4)]] + calls(mt.fft.irfft, n=5),
        "searchsorted": [
            (lambda v: mt.searchsorted(mt.asarray([-1.0, 0.0, 1.0]), v), (In((4, 6)),)),
            (lambda x, v: mt.searchsorted(mt.sort(x), v, side="right"), (In((5,)), In((3,)))),
        ],
    }


def convolutions() -> dict[str, list[Sample]]:
    one = {"stride": (2,), "dilation": (1,), "groups": 1}
    two = {"stride": (1, 1), "dilation": (1, 2), "groups": 2}
    each = {"stride": (1,), "dilation": (1,), "groups": 5}  # a kernel of its own for each channel
    return {
        "conv": [
            (call("conv", **one), (In((4, 3, 6)), In((5, 3, 2)))),
            (call("conv", **two), (In((3, 4, 3, 4)), In((2, 2, 2, 2)))),
            (call("conv", **{**two, "groups": 4}), (In((2, 8, 3, 4)), In((4, 2, 2, 2)))),
            (call("conv", **each), (In((2, 5, 4)), In((10, 1, 2)))),
        ],
        "conv_image": [
            (call("conv_image", image=(6,), **one), (In((4, 5, 3)), In((5, 3, 2)))),
            (call("conv_image", image=(3, 4), **two), (In((3, 2, 2, 2)), In((2, 2, 2, 2)))),
            (call("conv_image", image=(4,), **each), (In((2, 10, 3)), In((10, 1, 2)))),
        ],
        "conv_kernel": [
            (call("conv_kernel", kernel=(2,), **one), (In((4, 5, 3)), In((4, 3, 6)))),
            (call("conv_kernel", kernel=(2, 2), **two), (In((3, 2, 2, 2)), In((3, 4, 3, 4)))),
            (call("conv_kernel", kernel=(2,), **each), (In((2, 10, 3)), In((2, 5, 4)))),
        ],
    }


SAMPLES: dict[str, list[Sample]] = {
    **convolutions(),
    **linear_algebra(),
    **along_axes(),
    **unary("negative positive square abs conj real imag", kinds="f8 c16"),
    **unary("sign exp expm1 sin cos sinh cosh tanh asinh atan floor ceil trunc round relu erf sigmoid silu cbrt"),
    **unary("reciprocal sqrt log log2 log10", 0.25, 3.0),
    **unary("log1p tan", -0.75, 0.75),
    **unary("asin acos atanh", -0.75, 0.75),
    **unary("acosh", 1.25, 3.0),
    **unary("isnan isinf isfinite signbit"),
    **unary("logical_not", kinds="?"),
    **unary("bitwise_invert", kinds="? i8"),
    **unary("alias barrier stop_gradient gelu"),
    **binary("add subtract multiply", kinds="f8 c16"),
    **binary("divide", 0.25, 2.0, kinds="f8 c16"),
    **binary("pow", 0.25, 2.0),
    **binary("hypot atan2", 0.25, 2.0),
    **binary("maximum minimum fmax fmin", -0.25, 0.25, scalar=0.125),
    **binary("logaddexp copysign nextafter"),
    "gelu_backward": [(call("gelu_backward"), (In(a), In(b))) for a, b in TWO],
    **binary("floor_divide remainder fmod", 0.25, 3.0),
    **binary("logaddexp2 heaviside"),
    **binary("ldexp", 1, 4, kinds="i8", scalar=2),
    "round_to": [(lambda x: mt.round(x, 1), (In(a),)) for a, _ in TWO],
    **unary("exp2 rint"),
    **binary("equal not_equal less less_equal greater greater_equal", -0.25, 0.25, scalar=0.125),
    **binary("logical_and logical_or logical_xor", kinds="?", scalar=True),
    **binary("bitwise_and bitwise_or bitwise_xor", 0, 7, kinds="i8", scalar=5),
    **binary("bitwise_left_shift bitwise_right_shift", 0, 4, kinds="i8", scalar=2),
    "where": [
        (mt.where, (In((4, 6), "?"), In((4, 6)), In((6,)))),
        (mt.where, (In((5,), "?"), In((1,)), In(()))),
        (mt.where, (In((4, 1), "?"), In((6,)), In((4, 6)))),
        (lambda c, x: mt.where(c, x, 0.0), (In((4, 6), "?"), In((4, 6)))),
        (lambda c, x: mt.where(c, 0.0, x), (In((4, 1), "?"), In((4, 6)))),
        (lambda c, x: mt.where(c, x, 1.0), (In((6,), "?"), In((4, 6)))),
        (lambda c: mt.where(c, 1.0, 2.0), (In((5,), "?"),)),
    ],
    "full_like": [(lambda x: mt.full_like(x, 2.5), (In(s),)) for s in ONE],
    "astype": [(lambda x, t=t: x.astype(t), (In(s, k),)) for t in DTYPES for s in ONE[2:5] for k in ("f8", "f4", "i8")],
    **reductions("sum prod", kinds="f8 i8"),
    **reductions("mean", kinds="f8 f4 c16 i8"),
    **reductions("max min", kinds="f8", empty=False),
    **reductions("any all", kinds="?"),
    **arg_reductions("argmax", "argmin"),
    "matmul": matmul(),
    "reshape": reshapes(),
    "permute_dims": [
        (lambda x: mt.permute_dims(x, (1, 0)), (In((4, 6)),)),
        (lambda x: mt.permute_dims(x, (2, 0, 1)), (In((2, 3, 5)),)),
        (lambda x: mt.permute_dims(x, ()), (In(()),)),
    ],
    "broadcast_to": [
        (lambda x, t=t: mt.broadcast_to(x, t), (In(s),))
        for s, t in [
            ((5,), (3, 5)),
            ((4, 1), (4, 6)),
            ((), (5,)),
            ((1,), (0,)),
            ((3, 1, 2), (2, 3, 4, 2)),
            ((5,), (5,)),
        ]
    ],
    "flip": [
        (lambda x: mt.flip(x, axis=0), (In((4, 6)),)),
        (mt.flip, (In((4, 5)),)),
        (lambda x: mt.flip(x, axis=1), (In((0, 3)),)),
    ],
    "concat": [
        (lambda x, y: mt.concat([x, y]), (In((2, 5)), In((3, 5)))),
        (lambda x, y: mt.concat([x, y], axis=1), (In((4, 2)), In((4, 0)))),
        (lambda x: mt.concat([x, x], axis=0), (In((3, 2)),)),
        (lambda x, y, z: mt.concat([x, y, z], axis=None), (In((2, 2)), In((3,)), In(()))),
        (lambda x, y: mt.stack([x, y], axis=1), (In((4, 6)), In((4, 6)))),
    ],
    **index_samples(),
    **norm_samples(),
    **adam_samples(),
    **softmax_samples(),
    **random_samples(),
}


# ----- random placements ----------------------------------------------------------------------------------------------


def draw_sharding(data: st.DataObject, mesh: mt.Mesh, ndim: int, *, partial: bool = False) -> mt.Sharding:
    """Any placements of an array of ``ndim`` dimensions; where axes share a dimension, in either order."""
    choices: list[Any] = [mt.Replicate(), *(mt.Shard(d) for d in range(ndim))] + [mt.Partial()] * ((ndim + 1) * partial)
    order = data.draw(st.permutations(mesh.names), label="axes")
    return mt.Sharding(mesh, **{n: data.draw(st.sampled_from(choices), label=n) for n in order})


def place(data: st.DataObject, mesh: mt.Mesh, x: np.ndarray, rng: np.random.Generator, label: str) -> mt.Array:
    """``x`` on the mesh; perhaps as a sum, over some of the axes, that nobody has carried out yet."""
    partial = summable(x) and data.draw(st.booleans(), label=f"{label} partial")
    return placed(x, draw_sharding(data, mesh, x.ndim, partial=partial), rng)


def summable(x: np.ndarray) -> bool:
    return x.dtype.kind in "fci" and x.dtype.itemsize > 1


def placed(x: np.ndarray, sharding: mt.Sharding, rng: np.random.Generator) -> mt.Array:
    """``x`` in this sharding, which may have pending sums: of parts that have nothing in common with ``x``."""
    mesh, sizes = sharding.mesh, sharding.mesh.describe()
    pending = [n for n, p in sharding.placements.items() if isinstance(p, mt.Partial)]
    if not pending:
        return mt.distribute(x, sharding)
    count = math.prod(sizes[n] for n in pending)
    parts = np.stack([In(x.shape, x.dtype, -2, 2).make(rng) for _ in range(count - 1)] + [x])
    parts[-1] -= parts[:-1].sum(axis=0, dtype=x.dtype)
    shards = {
        n: p if isinstance(p, mt.Replicate) else mt.Shard(0 if n in pending else p.dim + 1)
        for n, p in _in_nesting_order(sharding).items()
    }
    out = mt.sum(mt.distribute(parts, mesh, **shards), axis=0)
    assert {mesh.names[a] for a, _ in out.sharding.layout.partials} == {n for n in pending if sizes[n] > 1}
    return out


def _in_nesting_order(s: mt.Sharding) -> dict[str, Any]:
    first = [s.mesh.names[a] for _, axes in s.layout.shards for a in axes]
    return {n: s.placements[n] for n in (*first, *(n for n in s.mesh.names if n not in first))}


def check(mesh: mt.Mesh, got: Any, expected: np.ndarray, what: str) -> None:
    """Every rank's block is the part of ``expected`` that the sharding says."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), what
    (whole,) = mesh.settle([got])
    blocks = mesh.runtime.fetch(whole._buf.handle, range(mesh.size))
    tolerance = 1e-9 if expected.dtype.itemsize >= 8 else 1e-5
    for rank, block in blocks.items():
        part = expected[whole.sharding.box(expected.shape, rank).slices]
        assert block.shape == part.shape, f"{what}, rank {rank}: {block.shape}, {whole.sharding} of {expected.shape}"
        if expected.dtype.kind in "biu":
            np.testing.assert_array_equal(block, part, err_msg=f"{what}, rank {rank}")
        else:
            wide = np.complex128 if expected.dtype.kind == "c" else np.float64
            np.testing.assert_allclose(
                block.astype(wide), part.astype(wide), tolerance, tolerance, err_msg=f"{what}, rank {rank}"
            )


def leaves(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


def equivalent(
    name: str,
    fn: Callable[..., Any],
    values: list[np.ndarray],
    operands: list[mt.Array],
    seed_sharding: Callable[[int], mt.Sharding],
    rng: np.random.Generator,
    *,
    compiled: bool,
) -> None:
    """Value and cotangents of ``fn(*operands)`` are those of ``fn(*values)``."""
    mesh = operands[0].sharding.mesh
    expected = leaves(fn(*map(mt.asarray, values)))
    run = mt.compile(fn) if compiled else fn
    what = f"{name} of {', '.join(str(x.sharding) for x in operands)}"
    for got, want in zip(leaves(run(*operands)), expected, strict=True):
        check(mesh, got, np.asarray(want), what)

    smooth = [i for i, e in enumerate(expected) if is_differentiable(e.dtype)]
    if OPS[name].nondifferentiable or not smooth or not any(is_differentiable(x.dtype) for x in values):
        return
    seeds = [In(expected[i].shape, expected[i].dtype).make(rng) for i in smooth]

    def cotangents(seeds: list[Any], *args: Any) -> Any:
        def outputs(*args: Any) -> Any:
            out = leaves(fn(*args))
            return [out[i] for i in smooth]

        return mt.vjp(outputs, *args)[1](seeds)

    want_all = cotangents([mt.asarray(s) for s in seeds], *map(mt.asarray, values))
    on_mesh = [mt.distribute(s, seed_sharding(s.ndim)) for s in seeds]
    pull = mt.compile(cotangents) if compiled else cotangents
    for i, (got, want) in enumerate(zip(pull(on_mesh, *operands), want_all, strict=True)):
        assert (got is None) == (want is None)
        if got is not None:
            check(mesh, got, np.asarray(want), f"cotangent {i} of {what}")


def draw_mesh(data: st.DataObject, device: str | None = None) -> mt.Mesh:
    sizes = data.draw(st.sampled_from(MESHES), label="mesh")
    return mt.Mesh(dict(zip(NAMES, sizes, strict=False)), device=device)


bounded = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)


# ----- the tests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_op_has_a_sharding_rule_and_a_sample(name):
    op = OPS[name]
    assert op in RULES or op.replicate_only, f"{name} has neither a sharding rule nor a replicate_only reason"
    assert SAMPLES.get(name) or name == "reshard", f"{name} has no sample in this table"


def split_equals_unsplit(name: str, data: st.DataObject, device: str | None = None) -> None:
    """One random case."""
    fn, specs = data.draw(st.sampled_from(SAMPLES[name]), label="sample")
    mesh = draw_mesh(data, device)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000), label="seed"))
    with np.errstate(all="ignore"):
        values = [s.make(rng) for s in specs]
        operands = [place(data, mesh, x, rng, f"operand {i}") for i, x in enumerate(values)]
        compiled = data.draw(st.booleans(), label="compiled")
        equivalent(name, fn, values, operands, lambda n: draw_sharding(data, mesh, n), rng, compiled=compiled)


@pytest.mark.parametrize("name", sorted(set(OPS) & set(SAMPLES)))
@settings(bounded, max_examples=8)
@given(data=st.data())
def test_split_equals_unsplit(name, data):
    split_equals_unsplit(name, data)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sorted(set(OPS) & set(SAMPLES)))
@settings(bounded, max_examples=160)
@given(data=st.data())
def test_split_equals_unsplit_many_times(name, data):
    """Some 23,000 cases over the table of ops."""
    split_equals_unsplit(name, data)


ON_PROCESSES = (
    "matmul",
    "getitem",
    "index_set",
    "concat",
    "sum",
    "max",
    "layer_norm",
    "softmax",
    "conv",
    "sort",
    "argmax",
    "where",
)


@pytest.mark.timeout(300)
def test_split_equals_unsplit_on_processes(processes):
    """A sample of the same on real worker processes: blocks travel, programs are pickled."""
    with mt.Mesh({"a": 2, "b": 2}, client=processes) as mesh:

        @settings(bounded, max_examples=24)
        @given(data=st.data())
        def sample(data):
            name = data.draw(st.sampled_from(ON_PROCESSES), label="op")
            fn, specs = data.draw(st.sampled_from(SAMPLES[name]), label="sample")
            rng = np.random.default_rng(data.draw(st.integers(0, 1000), label="seed"))
            with np.errstate(all="ignore"):
                values = [s.make(rng) for s in specs]
                operands = [place(data, mesh, x, rng, f"operand {i}") for i, x in enumerate(values)]
                equivalent(name, fn, values, operands, lambda n: draw_sharding(data, mesh, n), rng, compiled=True)

        sample()


def test_split_equals_unsplit_on_a_device(gpus):
    """A sample of the same with blocks on an emulated GPU, where nothing may take them for NumPy's arrays."""
    with gpus(2):

        @settings(bounded, max_examples=60)
        @given(data=st.data())
        def sample(data):
            name = data.draw(st.sampled_from(sorted(set(OPS) & set(SAMPLES))), label="op")
            split_equals_unsplit(name, data, "cuda:1")

        sample()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sorted(set(OPS) & set(SAMPLES)))
def test_split_equals_unsplit_on_a_device_for_every_op(gpus, name):
    with gpus(2):

        @settings(bounded, max_examples=40)
        @given(data=st.data())
        def sample(data):
            split_equals_unsplit(name, data, "cuda:1")

        sample()


@pytest.mark.parametrize("name", sorted(set(OPS) & set(SAMPLES)))
def test_operands_that_are_pending_sums(name):
    """Each operand in turn, and all together: a sum is put off only where the op is linear in just what is pending."""
    mesh, rng = mt.Mesh({"a": 2}), np.random.default_rng(3)
    pending, whole = mt.Sharding(mesh, a=mt.Partial()), mt.Sharding(mesh)
    with np.errstate(all="ignore"):
        for fn, specs in SAMPLES[name]:
            values = [s.make(rng) for s in specs]
            able = [i for i, x in enumerate(values) if summable(x)]
            for group in [[i] for i in able] + [able] * (len(able) > 1):
                operands = [placed(x, pending if i in group else whole, rng) for i, x in enumerate(values)]
                equivalent(name, fn, values, operands, lambda n: whole, rng, compiled=False)


@pytest.mark.parametrize("name", sorted(n for n in SAMPLES if n.startswith("random_") and n != "random_fold_in"))
@settings(bounded, max_examples=8)
@given(data=st.data())
def test_a_rank_draws_only_its_part(name, data):
    """A draw that is wanted split is made in parts: the same numbers, and nothing moves."""
    fn, (spec, *others) = data.draw(st.sampled_from(SAMPLES[name]), label="sample")
    mesh, rng = draw_mesh(data), np.random.default_rng(0)
    key, values = spec.make(rng), [s.make(rng) for s in others]
    expected = fn(mt.asarray(key), *map(mt.asarray, values))
    wanted = draw_sharding(data, mesh, expected.ndim)
    on_mesh = mt.distribute(key, mesh)

    def draw(k: mt.Array) -> mt.Array:
        return mt.reshard(fn(k, *map(mt.asarray, values)), wanted)

    check(mesh, draw(on_mesh), np.asarray(expected), name)
    program = mesh.rank_program(mt.compile(draw).program(on_mesh), [on_mesh.sharding])
    assert program.moved_bytes() == 0
    if any(mesh.sizes[a] > 1 for _, axes in wanted.layout.shards for a in axes):
        draws = [s for s in program.steps if getattr(s, "op", None) is OPS[name]]
        assert [program.layouts[s.outputs[0]] for s in draws] == [wanted.layout]


# ----- whole programs -------------------------------------------------------------------------------------------------

STEPS: list[tuple[str, Callable[..., Any]]] = [
    ("x + y", lambda x, y: x + y),
    ("x * y", lambda x, y: x * y),
    ("tanh", lambda x, y: mt.tanh(x)),
    ("x @ y.T @ y", lambda x, y: x @ y.mT @ y / 16),
    ("x - rows' mean", lambda x, y: x - mt.mean(x, axis=1, keepdims=True)),
    ("columns' sum", lambda x, y: y * mt.sum(x, axis=0)),
    ("total", lambda x, y: x * (mt.sum(y) / 24)),
    ("softmax", lambda x, y: mt.nn.softmax(x, axis=1)),
    ("max", lambda x, y: x + mt.max(y, axis=0, keepdims=True)),
    ("layer_norm", lambda x, y: mt.layer_norm(x, 6)),
    ("turned", lambda x, y: mt.reshape(mt.reshape(x, (24,)), (4, 6)) + y),
    ("where", lambda x, y: mt.where(x > 0, x, y)),
    ("rows", lambda x, y: x[np.array([0, 0, 3, 1])]),
    ("row written", lambda x, y: x.at[2].set(y[0])),
    ("doubled", lambda x, y: x + x),
]


@settings(bounded, max_examples=60)
@given(data=st.data())
def test_programs_of_many_ops(data):
    """Chains of ops, where moves are put off, joined and shared; value and gradient."""
    mesh, rng = draw_mesh(data), np.random.default_rng(data.draw(st.integers(0, 100), label="seed"))
    plan = data.draw(
        st.lists(
            st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7
        )
    )
    values = [In((4, 6)).make(rng) for _ in range(2)]

    def fn(*operands: mt.Array) -> tuple[mt.Array, mt.Array]:
        known = list(operands)
        for step, i, j in plan:
            known.append(STEPS[step][1](known[-1 - i % len(known)], known[-1 - j % len(known)]))
        return known[-1], mt.sum(known[-1] * known[len(known) // 2])

    def both(*operands: mt.Array) -> Any:
        out, pull = mt.vjp(fn, *operands)
        return (*out, *pull((mt.ones_like(out[0]), mt.asarray(1.0))))

    operands = [place(data, mesh, x, rng, f"operand {i}") for i, x in enumerate(values)]
    run = mt.compile(both) if data.draw(st.booleans(), label="compiled") else both
    expected = both(*map(mt.asarray, values))
    text = " ; ".join(STEPS[s][0] for s, _, _ in plan)
    for k, (got, want) in enumerate(zip(run(*operands), expected, strict=True)):
        scale = max(1.0, float(np.max(np.abs(np.asarray(want)), initial=0)))
        check(mesh, mt.asarray(got) / scale, np.asarray(want) / scale, f"output {k} of {text}")
