"""Samples of every op: the one table that all suites over the ops read.

A row is an op. A sample is a function of arrays that calls it, and its operands by shape, kind and domain, of which
each suite makes arrays of its own: exact ones to split, smooth ones for differences, short floats in thousands.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import meshtape as mt
import meshtape.parallel  # it has ops of its own
from meshtape.arrays import OPS
from meshtape.arrays.core.dispatch import apply
from meshtape.arrays.core.index_template import Slot, Span
from meshtape.arrays.core.op import recording
from meshtape.arrays.indexing.keys import parse

N = -1
"""A length that the suite chooses: a few, or thousands, over which short floats are added up."""
FEW = 5


class In(NamedTuple):
    """An operand: its shape and the numbers it is made of."""

    shape: tuple[int, ...]
    kind: Any = "f8"
    low: float = -2.0
    high: float = 2.0
    diagonal: float = 0.0  # times 1, 2, … is added to the diagonals of matrices, whose eigenvalues then lie apart
    values: Any = None  # in the place of random numbers

    def make(self, rng: np.random.Generator, *, exact: bool = True, many: int = FEW) -> np.ndarray:
        """An array: of multiples of 1/16, sums of which are exact in four bytes, or of any numbers."""
        dtype, shape = np.dtype(self.kind), tuple(many if n == N else n for n in self.shape)
        if self.values is not None:
            return np.asarray(self.values, dtype)
        if dtype.kind == "b":
            return np.asarray(rng.integers(0, 2, shape).astype(bool))
        if dtype.kind in "iu":
            low = max(int(self.low), 0) if dtype.kind == "u" else int(self.low)
            return np.asarray(rng.integers(low, int(self.high) + 1, shape, dtype))
        if exact or self.diagonal:
            x = rng.integers(math.ceil(self.low * 16), math.floor(self.high * 16) + 1, shape) / 16
        else:
            x = rng.uniform(self.low, self.high, shape)
        if dtype.kind == "c":  # on both sides of the real axis, off the cuts there
            x = x + 1j * rng.choice([-1, 1], shape) * rng.integers(4, 13, shape) / 16
        if self.diagonal:
            x = x + self.diagonal * np.diag(1.0 + np.arange(shape[-1]))
        return np.asarray(x, dtype)

    @property
    def is_float(self) -> bool:
        return np.dtype(self.kind).kind not in "biu"


class Sample(NamedTuple):
    """A call."""

    fn: Callable[..., Any]
    operands: tuple[In, ...]
    many: int = 5000  # the length ``N`` where short floats are added up
    leave: dict[str, str] = {}  # noqa: RUF012  # suites that have no use for it, and why

    def make(self, rng: np.random.Generator, *, exact: bool = True) -> list[np.ndarray]:
        return [o.make(rng, exact=exact) for o in self.operands]


Rows = dict[str, list[Sample]]


def shape(text: str) -> tuple[int, ...]:
    """``"N 2"`` is (N, 2), and ``"."`` has no dimensions."""
    return tuple(N if n == "N" else int(n) for n in text.split() if n != ".")


def on(fn: Callable[..., Any], *operands: str | In, many: int = 5000, kind: Any = "f8", **options: Any) -> Sample:
    """A sample on operands such as ``"4 6, 6 f4"``, whose numbers are as the options say, and on others.

    Options are the fields of :class:`In`, and the reasons why suites leave the sample out.
    """
    domain = {k: options.pop(k) for k in ("low", "high", "diagonal") if k in options}
    found: list[In] = []
    for given in operands:
        if isinstance(given, In):
            found.append(given)
            continue
        for text in given.split(","):
            words = text.split()
            own = words.pop() if len(words) > 1 and not words[-1].isdigit() and words[-1] != "N" else kind
            found.append(In(shape(" ".join(words)), own, **domain))
    return Sample(fn, tuple(found), many, options)


def each(fn: Callable[..., Any], calls: str, **options: Any) -> list[Sample]:
    """A sample for each of several operands, between semicolons."""
    return [on(fn, operands, **options) for operands in calls.split(";")]


def fixed(fn: Callable[..., Any], *values: Any) -> Sample:
    """A sample on these numbers."""
    return Sample(fn, tuple(In(a.shape, a.dtype, values=a) for a in map(np.asarray, values)))


def op(name: str, **params: Any) -> Callable[..., Any]:
    """The op itself, for those that no public function calls in the wanted way."""
    return lambda *args: apply(OPS[name], args, params)


def function(name: str) -> Callable[..., Any]:
    """The public function of an op, or the op."""
    return next((f for m in (mt, mt.nn, mt.linalg) if callable(f := getattr(m, name, None))), None) or op(name)


# ----- elements -------------------------------------------------------------------------------------------------------

ONE = ".; 0 3; N 2; 2 3 5"
TWO = "., .; 5, .; 1, 5; 4 6, 4 6; N 2, 2; 2, N 2; 4 1, 1 6; 2 3 4, 3 1; 0 3, 3"


def unary(names: str, low: float = -2.0, high: float = 2.0, kinds: str = "f8") -> Rows:
    shapes = {k: ONE if k == "f8" else ".; 3 4" for k in kinds.split()}
    return {
        n: [s for k, calls in shapes.items() for s in each(function(n), calls, kind=k, low=low, high=high)]
        for n in names.split()
    }


def binary(names: str, low: float = -2.0, high: float = 2.0, kinds: str = "f8", number: Any = 1.5) -> Rows:
    """Two arrays, of one kind or two; an array beside a number; and an array in both places."""
    out: Rows = {}
    left, right = (*kinds.split()[0].split("+"),)[0], (*kinds.split()[0].split("+"),)[-1]
    for name in names.split():
        f, ends = function(name), {"low": low, "high": high}
        out[name] = [
            on(lambda x, f=f: f(x, number), "5", kind=left, **ends),
            on(lambda y, f=f: f(number, y), "3 2", kind=right, **ends),
            on(lambda x, f=f: f(x, x), "3", kind=left, **ends),
        ][: 3 if left == right else 2]
        for pair in kinds.split():
            first, _, second = pair.partition("+")
            if second:
                out[name] += each(f, f"2 1 {first}, 3 {second}; . {first}, 4 3 {second}", **ends)
            else:
                out[name] += each(f, TWO if pair == "f8" else "2 1, 3; ., 4 3", kind=pair, **ends)
    return out


MIXED = "f8 f4+f8"
EVERY = "f8 c16 c16+f8 f8+c16 f8+f4 i8+i1 i8+f8 u1"
NEVER_SHORT = "vectors and complex numbers are never short"
NO_SLOPE = {"slopes": "it has none", "short": "it has none"}
ROUNDED = {"slopes": "differences of rounded numbers"}
CASTS: list[tuple[Any, dict[str, str]]] = [
    *(("f8", {}), ("c16", {"short": NEVER_SHORT}), ("i8", NO_SLOPE), ("?", NO_SLOPE)),
    *(("f4", ROUNDED), (ml_dtypes.bfloat16, ROUNDED)),
]

ELEMENTS: Rows = {
    **unary("negative positive square conj real imag sign alias barrier", kinds="f8 c16"),
    **unary("abs relu gelu erf asinh atan"),
    **unary("exp exp2 expm1 sin cos tan sinh cosh asinh", -1.0, 1.0, "f8 c16"),
    **unary("log log2 log10 sqrt reciprocal", 0.5, 2.0, "f8 c16"),
    **unary("log1p asin acos atan atanh", -0.6, 0.7, "f8 c16"),
    **unary("tanh silu", -2.0, 0.9, "f8 c16"),
    **unary("sigmoid", -2.0, 0.7),
    **unary("acosh", 1.25, 3.0, "f8 c16"),
    **unary("cbrt", 0.5, 2.0),
    **unary("floor ceil trunc round rint isnan isinf isfinite signbit stop_gradient"),
    **unary("logical_not", kinds="? f8"),
    **unary("bitwise_invert", kinds="? i8 u1"),
    **binary("add subtract multiply", kinds=EVERY),
    **binary("divide", 0.5, 2.0, "f8 c16 c16+f8 f8+c16 f8+f4"),
    **binary("pow", 0.5, 2.0, "f8 c16 f8+c16 f8+f4"),
    **binary("hypot atan2 floor_divide remainder fmod copysign", 0.5, 2.0, MIXED),
    **binary("maximum minimum", -0.25, 0.25, "f8 f4+f8 i8+i1", 0.125),
    **binary("fmax fmin", -0.25, 0.25, MIXED, 0.125),
    **binary("logaddexp logaddexp2 heaviside nextafter", kinds=MIXED),
    **binary("equal not_equal less less_equal greater greater_equal", -0.25, 0.25, "f8 f4+f8 i8+i1", 0.125),
    **binary("logical_and logical_or logical_xor", kinds="? f8", number=True),
    **binary("bitwise_and bitwise_or bitwise_xor", 0, 7, "i8 ? i8+i1", 5),
    **binary("bitwise_left_shift bitwise_right_shift", 0, 4, "i8 i8+i1", 2),
    **binary("ldexp", 1, 4, "f8+i8 f4+i8 i1+i8", 2),
    "huber": [
        *each(lambda x: op("huber")(x, 0.5), ONE),
        *each(op("huber"), "5, 5; 3 4, 4", low=0.5, high=2.0),
    ],
    "swiglu": [
        *each(mt.nn.swiglu, TWO, low=-2.0, high=0.9),
        *each(mt.nn.swiglu, ".; 3 4, 4", kind="c16", high=0.9)[1:],
    ],
    "swiglu_backward": each(op("swiglu_backward"), "5, 5, 5; N 2, 2, N 2; 2 3 4, 3 1, 4; 0 3, 3, 0 3", high=0.9),
    "pointwise": [
        *each(op("pointwise", function="mish", numbers=()), ONE),
        *each(op("pointwise", function="elu", numbers=(0.5,)), "N 2; 3 4"),
        on(op("pointwise", function="softsign", numbers=()), "2 3"),
    ],
    "gelu_backward": each(op("gelu_backward"), TWO),
    "round_to": each(lambda x: mt.round(x, 1), "N 2; .; 0 3") + each(lambda x: mt.round(x, -1), "5 i8; 5"),
    "where": [
        *each(mt.where, "4 6 ?, 4 6, 6; 5 ?, 1, .; 4 1 ?, 6, 4 6; N 2 ?, N 2, 2; 2 ?, 2 c16, 2"),
        *each(lambda c, x: mt.where(c, x, 0.0), "4 6 ?, 4 6; 6 ?, 0 6"),
        *(on(lambda c, x, v=v: mt.where(c, v, x), "4 1 ?, 4 6 f4") for v in (0.0, 1.0)),
        on(lambda c: mt.where(c, 1.0, 2.0), "5 ?"),
        on(lambda x, y: mt.where(x > y, x * y, y), "2 1, 3"),
    ],
    "full_like": [
        *each(lambda x: mt.full_like(x, 2.5), ONE),
        on(op("full_like", value=2, dtype=np.dtype(np.int32)), "2 3"),
    ],
    "astype": [
        *(s for t, why in CASTS for s in each(lambda x, t=t: x.astype(t), "N 2; 0 3; .; 3 f4; 3 i8", **why)),
        on(lambda x: x * x.astype(np.int64), "5"),
    ],
    "reshard": [on(op("reshard", layout=None), "2 3", split="a move", **NO_SLOPE)],
}


def more(name: str, *samples: Sample) -> None:
    ELEMENTS[name] += samples


more("abs", *each(mt.abs, ".; 3 4", kind="c16"))
more("sigmoid", fixed(mt.nn.sigmoid, [-800.0, 800.0]))
more("silu", fixed(mt.nn.silu, [-800.0, 800.0]))
more("swiglu", fixed(mt.nn.swiglu, [-800.0, 800.0], [1.0, 1.0]))
more("cbrt", fixed(mt.cbrt, [-8.0, 2.0]))
more("logaddexp", fixed(mt.logaddexp, [800.0, -800.0], [799.0, -799.5]))  # exp would overflow
more("atan2", fixed(mt.atan2, [0.2, -0.3], [-1.0, -2.0]))
more("copysign", fixed(mt.copysign, [-1.0, 1.0, 2.0], [1.0, -1.0, -3.0]))
for _f in (mt.remainder, mt.fmod):
    more(_f.__name__, fixed(_f, [5.3, -5.3, 5.3], [2.0, 2.0, -2.0]), fixed(_f, [[5.3], [7.1]], [1.9, 2.3]))
more("pow", *(on(lambda x, n=n: x**n, "3", low=0.5) for n in (0, 1, 2, 3, -1, 0.5, 2.5)))
more("pow", fixed(lambda x: x**2, [0.0, -1.0]), fixed(lambda x: x**3, -0.4 + 0.3j))
more("pow", on(lambda x: x ** mt.asarray([2, 3]), "2"))
more("add", on(lambda x, n: functools.reduce(mt.add, [x] * n.shape[0], x), "3, N i8", many=300))
more("ldexp", on(mt.ldexp, "2", In((N, 2), "i8", 1, 4)), on(mt.ldexp, "N 2", In((2,), "i8", -4, 4)))
more("heaviside", on(lambda h, n: mt.heaviside(n.astype(h.dtype), h), "2", In((N, 2), "i8", 0, 0)))
more("heaviside", fixed(mt.heaviside, [-1.5, 0.5, 2.5], [0.5, 0.25, 2.0]))

# ----- reductions, products, shapes -----------------------------------------------------------------------------------

Reduction = tuple[str, Any, bool]
REDUCTIONS: list[Reduction] = [
    *(("N 2", None, False), ("N 2", 0, False), ("3 4", 1, True), ("3 4", (0, 1), False), ("2 3 5", (0, 2), True)),
    *(("2 3 5", (1, 2), False), (".", None, False), ("1 4", 0, False), ("0 3", 1, False), ("2 3", (), True)),
]
LARGEST: list[Reduction] = [
    ("5", None, False),
    ("3 4", 0, False),
    ("3 4", 1, True),
    ("2 3 5", 1, False),
    ("0 3", 1, False),
]
FIRST: list[Reduction] = [("3 4", 0, False), ("2 3 5", (0, 2), True)]
NEAR_ONE: Any = {"low": 0.993, "high": 1.007, "many": 300}


def reduced(
    names: str, calls: list[Reduction], kinds: str = "f8", few: list[Reduction] = FIRST, **options: Any
) -> Rows:
    """Calls by axes, in the first kind, and few in the others."""
    by = [(s, k, axis, keep) for i, k in enumerate(kinds.split()) for s, axis, keep in (few if i else calls)]
    return {
        n: [
            on(functools.partial(function(n), axis=axis, keepdims=keep), s, kind=k, **options)
            for s, k, axis, keep in by
        ]
        for n in names.split()
    }


def along(f: Callable[..., Any], kinds: str = "f8", **options: Any) -> list[Sample]:
    """Calls along each axis."""
    specs = [("N 2", 0, "f8"), ("N 2", 1, "f8"), ("2 3 4", 1, "f8"), ("5", 0, "f8"), ("0 3", 1, "f8")]
    specs += [("2 3", axis, k) for k in kinds.split()[1:] for axis in (0, 1)]
    return [on(lambda x, axis=axis: f(x, axis=axis), s, kind=k, **options) for s, axis, k in specs]


PRODUCTS = "2 3, N 3 2; 3, N 3 2; 3, 3; 2, 3 2 4; 5 1 2 3, 4 3 2; 4 6, 6 5; 2 0, 0 3; 0 3, 3 2; 1 2 3, 4 3 1"
RESHAPES = [
    *(("4 6", "24"), ("24", "4 6"), ("12", "4 3"), ("5 3", "5 3 1"), ("5 1 3", "5 3"), ("6 4", "8 3"), (".", "1 1")),
    *(
        ("4 6", "2 2 6"),
        ("2 3 4", "6 4"),
        ("2 3 4", "2 12"),
        ("1 5", "5 1"),
        ("0 3", "3 0"),
        ("1", "."),
        ("3 2 2", "3 4"),
    ),
    *(("5 12", "5 2 3 2"), ("1 12 2", "4 6"), ("N 2", "2 -1")),
    *(("2 3 12", "2 3 4 3"), ("2 4 3 2", "2 4 6")),  # heads apart, and together
]
BROADCASTS = [("5", "3 5"), ("4 1", "4 6"), (".", "5"), ("1", "0"), ("3 1 2", "2 3 4 2"), ("5", "5"), ("2 c16", "2 2")]

STRUCTURE: Rows = {
    **reduced("sum", [*REDUCTIONS, ("0 3", 0, False)], "f8 c16 i8 i1 u4 ?"),
    **reduced("prod", [*REDUCTIONS, ("0 3", 0, False)], "f8 c16 i8 i1 u4 ?", **NEAR_ONE),
    **reduced("mean", REDUCTIONS, "f8 f4 c16 i8 i1"),
    **reduced("max min", REDUCTIONS, "f8 i1 u4"),
    **reduced("any all", [*REDUCTIONS, ("0 3", 0, False)], "? f8 i1"),
    **reduced("argmax argmin", LARGEST, "i8 f8", LARGEST),
    "matmul": [
        *each(mt.matmul, "N 3, 3 2; N 3, 3; N, N 3; N, N; N 2 3, 3 2; " + PRODUCTS),
        *each(mt.matmul, PRODUCTS, kind="c16"),
        *each(mt.matmul, "3 5 c16, 5 2; 3 5 i8, 5 2 i8; 3 5, 5 2 f4"),
        *(on(lambda a: a @ a, "3 3"), on(lambda a: a @ a.mT, "3 4"), on(lambda a, b: a @ b.mT, "2 3 c16, 2 3 c16")),
    ],
    "reshape": [
        *(on(lambda x, t=t: mt.reshape(x, shape(t)), s) for s, t in RESHAPES),
        on(lambda x: mt.reshape(x.T, (-1,)), "2 3 c16"),
        on(lambda b, n: mt.repeat(b, n.shape[0]), "2, N i8"),
    ],
    "permute_dims": [
        *(
            on(lambda x, axes=axes: mt.permute_dims(x, shape(axes)), s)
            for s, axes in (("N 2", "1 0"), ("2 3 5", "2 0 1"), (".", "."))
        ),
        on(lambda x: x.mT, "0 3 2 c16"),
    ],
    "broadcast_to": [
        *(on(lambda x, t=t: mt.broadcast_to(x, shape(t)), s) for s, t in BROADCASTS),
        on(lambda b, x: mt.broadcast_to(b, x.shape) * x, "2, N 2"),
        on(lambda b, n: mt.tile(b, n.shape), "2, N i8"),
    ],
    "flip": [*each(mt.flip, "N 2; 4 5; ."), *each(lambda x: mt.flip(x, axis=0), "4 6; 0 3; 2 3 c16")],
    "concat": [
        on(lambda x, y: mt.concat([x, y]), "2 5, 3 5"),
        on(lambda x, y: mt.concat([x, y], axis=1), "4 2, 4 0"),
        on(lambda x, y: mt.concat([x, y, x], axis=0), "2, 0"),
        on(lambda x, y, z: mt.concat([x, y, z], axis=None), "2 2, 3, . c16"),
        on(lambda x, y, z: mt.concat([x, y, z]), "2 3, 1 3 f4, 0 3 i8"),
        on(lambda x, y: mt.stack([x, y], axis=1), "4 6, 4 6"),
        on(lambda b, n: mt.stack([b] * n.shape[0]), "2, N i8", many=300),
    ],
    "cumulative_sum": [
        *along(mt.cumulative_sum, "f8 c16 i1 u4 ?"),
        *along(functools.partial(mt.cumulative_sum, include_initial=True)),
    ],
    "cumulative_prod": [
        *along(mt.cumulative_prod, "f8 c16 i1 u4 ?", **NEAR_ONE),
        on(lambda x: mt.cumulative_prod(x, axis=0, include_initial=True), "3 2 c16"),
        fixed(mt.cumulative_prod, [2.0, 0.0, 3.0, 0.0, 1.5]),
    ],
    "sort": [
        *along(mt.sort),
        *along(functools.partial(mt.sort, descending=True, stable=False)),
        on(mt.sort, "0 2 i8"),
    ],
    "topk": [*along(lambda x, axis: mt.topk(x, min(2, x.shape[axis]), axis=axis)[1])],
    "argsort": [*along(mt.argsort), *along(functools.partial(mt.argsort, descending=True))],
    "searchsorted": [
        on(lambda v: mt.searchsorted(mt.asarray([-1.0, 0.0, 1.0]), v), "4 6"),
        on(lambda x, v: mt.searchsorted(mt.sort(x), v, side="right"), "5, 3"),
        on(lambda x: mt.searchsorted(mt.sort(x), 0.5, side="right"), "4 f4"),
    ],
    "positions": [
        *each(op("positions", axis=0, start=3), "4 6; 5"),
        *each(op("positions", axis=1, start=0), "2 3 5; 0 3"),
    ],
}
STRUCTURE["mean"].append(on(lambda x: mt.mean(x, axis=0), "0 3", slopes="the mean of nothing is no number"))
STRUCTURE["prod"].append(fixed(lambda x: mt.prod(x, axis=1), [[0.0, 2.0, 0.0], [1.0, 0.0, 2.0]]))

# ----- indexing -------------------------------------------------------------------------------------------------------

ALL = slice(None)
FULL = Span(None, None, None)
ROWS, PAIR, BLOCK = In((5,), "i8", -4, 3), In((2,), "i8", -4, 3), In((2, 3), "i8", -4, 3)  # of four rows, five repeat
LONG, ZEROS, NONE = In((N,), "i8", -4, 3), In((N,), "i8", 0, 0), In((0,), "i8", 0, 0)
MASK = np.asarray([[True, False, True], [False, False, True]])

# Shape, the key as a function of index arrays, and these.
Key = tuple[str, Callable[..., Any], tuple[In, ...]]
KEYS: list[Key] = [
    ("4 6", lambda: 0, ()),
    ("4 6", lambda: slice(1, 3), ()),
    ("4 6", lambda: (ALL, slice(None, None, -2)), ()),
    ("4 6", lambda: True, ()),
    ("4 6", lambda: False, ()),
    (".", lambda: (...,), ()),
    ("0 3", lambda: (ALL, 1), ()),
    ("2 3", lambda: MASK, ()),
    ("2 3", lambda: np.asarray([False, False]), ()),
    ("4 6", lambda i: i, (ROWS,)),
    ("4 6", lambda i: (ALL, i), (ROWS,)),
    ("4 6", lambda i: i, (NONE,)),
    ("4 6", lambda i, j: (i, j), (PAIR, PAIR)),
    ("4 5 6", lambda i, j: (i, ALL, j), (PAIR, In((2, 1), "i8", -4, 3))),
    ("4 5 6", lambda i: (0, ALL, i), (PAIR,)),  # the joint dimension goes first
]
READS: list[Key] = [
    *KEYS,
    ("4 6", lambda: (None, ..., 3), ()),
    ("4 6", lambda: (True, ALL, 1), ()),
    (".", lambda: True, ()),
    ("4 6", lambda: slice(0), ()),
    ("4 6", lambda: (None, ALL, None), ()),
    ("4 6", lambda i: i, (In((), "i8", 0, 3),)),
    ("4 6", lambda i: (ALL, i), (BLOCK,)),
    ("4 6", lambda i: (i, True), (In((1,), "i8", 0, 3),)),
    ("4 5 6", lambda i: (ALL, i, 0), (PAIR,)),
    ("4 5", lambda i: i, (LONG,)),
    ("2", lambda i: i, (ZEROS,)),
]
# Array, key, and a value that broadcasts to what is written.
SPREAD: list[tuple[str, Any, str]] = [
    *(("4 6", slice(1, 3), v) for v in ("6", ".", "1 1 6")),
    *(("N 2", ALL, "2"), ("N 2", (ALL, 1), ".")),
]
SPREAD_ROWS: list[tuple[str, str, In, tuple[Any, ...]]] = [
    *(("4 6", "5 1", ROWS, ()), ("4 5 6", "5 6", ROWS, (ALL,)), ("4 6", "1 1", PAIR, (ALL,)), ("4 6", ".", PAIR, ())),
    *(("2", "N", ZEROS, ()), ("2", ".", ZEROS, ())),
]


def _at(name: str, x: Any, key: Any, v: Any) -> Any:
    """A write; of minima and maxima the op itself, as ``.at`` writes by slices without it."""
    if name in ("index_set", "index_add"):
        return getattr(x.at[key], name.removeprefix("index_"))(v)
    template, arrays = parse(x, key)
    return apply(OPS[name], (x, v, *arrays), {"template": template})


def _write_in_place(x: Any, v: Any) -> Any:
    y = x * 1.0
    y[1:] = v
    y[[0, 0]] = y[[1, 2]] * v
    return y


def writes(name: str) -> list[Sample]:
    """By every key, of values that have the shape of what is written, or one that broadcasts to it."""
    at = functools.partial(_at, name)
    whole = []
    for s, key, places in KEYS:
        written = np.empty(shape(s))[key(*(np.zeros(i.shape, int) for i in places))]
        whole.append(on(lambda x, v, *i, key=key: at(x, key(*i), v), s, In(written.shape), *places))
    return [
        *whole,
        *(on(lambda x, v, key=key: at(x, key, v), s, v) for s, key, v in SPREAD),
        *(on(lambda x, v, i, key=key: at(x, (*key, i), v), s, v, i) for s, v, i, key in SPREAD_ROWS),
        on(lambda x: at(x, slice(1, 3), 0.0), "4 6"),
        on(lambda v: at(mt.zeros((2, 3)), 0, v), "3"),
        on(lambda x, v, i: at(x, i, v), "4 3 c16, 5 1 c16", ROWS),
    ]


INDEXING: Rows = {
    "getitem": [
        *(on(lambda x, *i, key=key: x[key(*i)], s, *places) for s, key, places in READS),
        on(lambda x: x[[0, 0, 1]], "2 3 c16"),
        on(lambda x: x.T[[0, 2, 2]], "2 3"),
        on(lambda b, n: mt.sum(mt.stack([b[1] for _ in range(n.shape[0])])), "2, N i8", many=300),
    ],
    "index_set": [*writes("index_set"), on(_write_in_place, "3, .")],
    "index_add": writes("index_add"),
    "index_min": writes("index_min"),
    "index_max": writes("index_max"),
    "scatter": [
        on(op("scatter", template=(FULL, Slot(0)), shape=(4, 6)), "4 5", ROWS),
        on(op("scatter", template=(Slot(0), FULL), shape=(4, 6)), "2 3 6", BLOCK),
        on(op("scatter", template=(Span(1, 3, None), FULL), shape=(4, 6)), "2 6"),
        on(op("scatter", template=(2, FULL), shape=(4, 6)), "6"),
        on(op("scatter", template=(Slot(0), FULL, Slot(1)), shape=(4, 5, 6)), "2 5", PAIR, PAIR),
        on(op("scatter", template=(Slot(0),), shape=(4,)), "N", LONG),
    ],
    "last_writes": [
        on(op("last_writes", template=(Slot(0), FULL)), "4 6", ROWS),
        on(op("last_writes", template=(FULL, Slot(0))), "4 6", BLOCK),
        on(op("last_writes", template=(Span(1, 3, None), FULL)), "4 6"),
        on(op("last_writes", template=(Slot(0), FULL, Slot(1))), "4 5 6", PAIR, PAIR),
        on(
            lambda b, n: op("last_writes", template=(Slot(0),))(mt.broadcast_to(b, n.shape), mt.arange(n.size)),
            "., N i8",
        ),
    ],
}

# ----- linear algebra, transforms -------------------------------------------------------------------------------------

L = mt.linalg
APART: Any = {"low": -0.5, "high": 0.5, "diagonal": 2.0, "many": 600}


def hermitian(x: Any) -> Any:
    return x + mt.conj(x.mT)


def phaseless(v: Any) -> Any:
    """Products of vectors in columns, which do not depend on their signs and phases."""
    return v[..., :, None, :] * mt.conj(v[..., None, :, :])


def eigen(values: Any, vectors: Any) -> Any:
    return values, phaseless(vectors)


def singular(u: Any, s: Any, vh: Any) -> Any:
    return u[..., :, None, :] * vh.mT[..., None, :, :], s  # the phase of one is that of the other, conjugated


def square(f: Callable[..., Any], **options: Any) -> list[Sample]:
    """Matrices with eigenvalues that lie apart, real and complex."""
    return [s for k in ("f8", "c16") for s in each(f, "3 3; 2 2 2; 0 2 2", kind=k, **APART, **options)]


def oblong(f: Callable[..., Any], **options: Any) -> list[Sample]:
    """Tall, wide and batched matrices, real and complex."""
    return [s for k in ("f8", "c16") for s in each(f, "4 3; 3 4; 2 3 2; 0 2 2", kind=k, **options)]


def stack(f: Callable[..., Any]) -> Sample:
    return on(f, "N 3 3", **APART)


def adam(p: Any, g: Any, m: Any, v: Any) -> Any:
    return op("lazy_adam", b1=0.9, b2=0.99)(p, mt.where(g > 0.3, g, 0.0), m, v, 0.1, mt.asarray(0.3))


SOLVED = [
    ("3 3", "3 4"),
    ("4 3 3", "3 2"),
    ("2 2", "5 2 3"),
    ("3 3", "3 c16"),
    ("2 1 2 2 c16", "3 2 2"),
    ("N 3 3", "3 1"),
]
NOT_SMOOTH = dict.fromkeys(("slopes", "split", "short"), "vectors of a null space, which are no function of the matrix")
NORMS = ("backward", "ortho", "forward")
partial = functools.partial

WIDE: Rows = {
    **{n: [*square(function(n)), stack(function(n))] for n in ("inv", "det", "adjugate")},
    "slogdet": [*square(lambda x: tuple(L.slogdet(x))), stack(lambda x: L.slogdet(x)[1])],
    "cholesky": [
        *square(lambda x: L.cholesky(hermitian(x))),
        on(lambda x: L.cholesky(hermitian(x), upper=True), "3 3", **APART),
        on(L.cholesky, "N 3 3", **{**APART, "low": 0, "high": 0}, slopes="a step off Hermitian matrices"),
    ],
    "eigvalsh": [*square(lambda x: L.eigvalsh(hermitian(x))), stack(lambda x: L.eigvalsh(hermitian(x)))],
    "eigvals": square(L.eigvals, short=NEVER_SHORT),
    "eigh": square(lambda x: eigen(*L.eigh(hermitian(x))), short=NEVER_SHORT),
    "eig": square(lambda x: eigen(*L.eig(x)), short=NEVER_SHORT),
    "solve": [on(L.solve, on(L.solve, a, **APART).operands[0], b, many=600) for a, b in SOLVED],
    "svd": [
        *oblong(lambda x: singular(*L.svd(x, full_matrices=False)), short=NEVER_SHORT),
        on(lambda x: L.svd(x).S, "3 3", short=NEVER_SHORT),
        on(op("svd", full_matrices=True), "4 3", **NOT_SMOOTH),
    ],
    "svdvals": [*oblong(L.svdvals), on(lambda x: L.matrix_norm(x, ord="nuc"), "3 2"), stack(L.svdvals)],
    # Far from triangular ones: there the sign of a column is that of what rounding leaves below the diagonal.
    "qr": [
        *oblong(lambda x: tuple(L.qr(x)), low=0.5, short=NEVER_SHORT),
        *each(lambda x: tuple(L.qr(x)), "3 3; 3 3 c16", low=0.5, diagonal=2.0, short=NEVER_SHORT),
        on(op("qr", mode="complete"), "4 3", **NOT_SMOOTH),
    ],
    "pinv": [*oblong(L.pinv), *square(L.pinv), stack(L.pinv)],
    "fft": [
        *(on(partial(f, norm=n), "5 c16") for f in (mt.fft.fft, mt.fft.ifft) for n in NORMS),
        *along(mt.fft.fft, "f8 c16", short=NEVER_SHORT),
        *along(partial(mt.fft.ifft, n=4), short=NEVER_SHORT),
        on(lambda x: mt.fft.fftn(x, s=(4, 2), norm="forward"), "3 3 c16"),
        on(lambda x: mt.real(mt.fft.fft(x, axis=1)), "N 2"),
    ],
    "rfft": [
        *(on(partial(mt.fft.rfft, norm=n), "5") for n in NORMS),
        *along(mt.fft.rfft, short=NEVER_SHORT),
        *along(partial(mt.fft.rfft, n=4), short=NEVER_SHORT),
        *(on(mt.fft.rfft, "1"), on(lambda x: mt.fft.rfftn(x, norm="forward"), "2 3 4"), on(mt.fft.ihfft, "4")),
        on(lambda x: mt.real(mt.fft.rfft(x, axis=1)), "N 2"),
    ],
    "irfft": [
        *(on(partial(mt.fft.irfft, norm=n), "4 c16") for n in NORMS),
        *(on(partial(mt.fft.irfft, n=n), f"{n // 2 + 1} c16") for n in (1, 2, 5, 6)),
        *along(partial(mt.fft.irfft, n=5), "f8 c16"),
        on(lambda x: mt.fft.irfftn(x, norm="forward"), "2 3 3 c16"),
        on(lambda x: mt.fft.hfft(x, n=7), "3 c16"),
        on(lambda x: mt.fft.irfft(mt.fft.rfft(x, axis=1), n=2, axis=1), "N 2"),
    ],
    "lazy_adam": [
        on(adam, f"{s}, {s}, {s}", In(shape(s), "f8", 0.5, 2.0), short="optimizers call it with float32")
        for s in ("6 3", "5", "0 2", ".")
    ],
}
"""Ops of LAPACK, of Fourier transforms and of an optimizer: what calls them casts short floats."""

# ----- networks -------------------------------------------------------------------------------------------------------

ONCE = {"padding": (0,), "stride": (2,), "dilation": (1,), "groups": 1}
PLAIN = {"padding": (0,), "stride": (1,), "dilation": (1,), "groups": 1}
TWICE = {"padding": (0, 0), "stride": (1, 2), "dilation": (2, 1), "groups": 2}
EACH = {"padding": (0,), "stride": (1,), "dilation": (1,), "groups": 5}  # a kernel of its own for each channel
AROUND = {"padding": (2, 1), "stride": (2, 1), "dilation": (1, 2), "groups": 1}
A_SUM = "the norm is that of a rounded sum"
LAYERS = [("3 5", "5"), ("2 3 4", "4"), ("4 2 3", "2 3"), ("5", "5"), ("0 3", "3"), ("1 7", "7"), ("N 4", "4")]
CHANNELS = [("N 2", "2", 1), ("5 4 3", "4", 1), ("1 4 3", "4", 1), ("4 3 5", "5", 2)]
GROUPS = [("N 4 3", "4", 1, 2), ("3 4 5", "4", 1, 2), ("3 5 4", "4", 2, 2), ("2 3 4", "3", 1, 3), ("0 4 3", "4", 1, 2)]
AXES = [("N 2", 1), ("4 6", 0), ("2 3 5", 1), ("5", 0), ("0 3", 1), ("2 0", 0)]
LOSSES: Any = ({"ignore_index": None, "label_smoothing": 0.0}, {"ignore_index": 2, "label_smoothing": 0.25})
LABELS = [("N 3", "N"), ("2 3 5", "2 3"), ("5", "."), ("0 3", "0")]
PROJECTED = [("N 3", "3 4", "N"), ("2 3 2", "2 5", "2 3"), ("2", "2 3", "."), ("0 2", "2 3", "0")]
POSITIVE = In((2,), "f8", 0.5, 2.0)


def labels(x: str, n: str) -> In:
    return In(shape(n), "i8", 0, shape(x)[-1] - 1)


def batch_normalized(**params: Any) -> Callable[..., Any]:
    """Those results of a batch norm that have derivatives."""
    return lambda x, weight, bias: op("batch_norm", **params)(x, weight, bias, bias, weight)[:3]


def without_saved(name: str, **params: Any) -> Callable[..., Any]:
    """The first result of an op whose others are constants that it saves."""
    return lambda *operands: op(name, **params)(*operands)[0]


def slopes_of_attention(name: str, **params: Any) -> Callable[..., Any]:
    """The backward op of attention, with the results that it expects."""

    def call(g: Any, q: Any, k: Any, v: Any, *mask: Any) -> Any:
        return op(name, **params)(g, q, k, v, *op("attention", **params)(q, k, v, *mask), *mask)

    return call


def slopes(name: str, params: dict[str, Any]) -> Callable[..., Any]:
    """The backward op of a cross-entropy, with the results that it expects."""

    def call(g: Any, *operands: Any) -> Any:
        return op(f"{name}_backward", **params)(g, *operands, *op(name, **params)(*operands)[1:])

    return call


def to_experts(n: str, e: int) -> tuple[str | In, ...]:
    weights = f"{n} 2, {e} 4 6, {e} 4 6, {e} 6 4"
    return f"{n} 4", In(shape(f"{n} 2"), "i8", 0, e), weights, In((e,), "i8", values=[*range(1, e), 0])


# Query, key and value, and masks of truth values and of numbers.
ATTENDED: Any = (
    ("N 3, 4 3, 4 2", None),
    ("2 4 3, 1 5 3, 5 2", 0),
    ("2 2 3 2, 2 1 4 2, 2 1 4 2, 2 1 1 4 b1", None),
    ("4 3, 6 3, 2 6 2, 4 6 b1", -1),
    ("2 4 3, 2 N 3, 2 N 2, N", None),
    ("2 4 3, 1 5 3, 2 5 2, 4 5", 1),
)


def out(operands: str) -> str:
    """The shape of the result of attention, whose values have all leading dimensions, or the query has."""
    q, _, v, *_ = (x.split() for x in operands.split(", "))
    return " ".join([*max(q[:-2], v[:-2], key=len), q[-2], v[-1]])


SENT = [to_experts(*call) for call in (("N", 3), ("2 3", 2), ("0", 3), (".", 2))]


NETWORKS: Rows = {
    "conv": [
        on(op("conv", **ONCE), "4 3 6, 5 3 2"),
        on(op("conv", **TWICE), "2 4 4 5, 2 2 2 3"),
        on(op("conv", **{**TWICE, "groups": 4}), "2 8 4 5, 4 2 2 2 c16"),
        on(op("conv", **EACH), "2 5 4, 10 1 2"),
        on(op("conv", **AROUND), "2 3 4 5, 4 3 3 2"),
        on(op("conv", **ONCE), "0 3 6, 4 3 3"),
        on(mt.nn.conv1d, "N 2 5, 3 2 3, 3", many=1000),
        on(lambda x, w, b: mt.nn.conv2d(x, w, b, padding="same"), "1 2 3 4 c16, 2 2 2 3, 2"),
    ],
    "conv_image": [
        on(op("conv_image", image=(6,), **ONCE), "4 5 3, 5 3 2"),
        on(op("conv_image", image=(4, 5), **TWICE), "2 2 2 2, 2 2 2 3"),
        on(op("conv_image", image=(4,), **EACH), "2 10 3, 10 1 2"),
        on(op("conv_image", image=(4, 5), **AROUND), "2 4 3 5, 4 3 3 2"),
        on(op("conv_image", image=(5,), **PLAIN), "1 2 4 c16, 2 3 2 c16"),
        on(op("conv_image", image=(5,), **PLAIN), "N 3 3, 3 2 3", many=1000),
    ],
    "conv_kernel": [
        on(op("conv_kernel", kernel=(2,), **ONCE), "4 5 3, 4 3 6"),
        on(op("conv_kernel", kernel=(2, 3), **TWICE), "2 2 2 2, 2 4 4 5"),
        on(op("conv_kernel", kernel=(2,), **EACH), "2 10 3, 2 5 4"),
        on(op("conv_kernel", kernel=(3, 2), **AROUND), "2 4 3 5, 2 3 4 5"),
        on(op("conv_kernel", kernel=(2,), **PLAIN), "1 2 4 c16, 1 3 5 c16"),
        on(op("conv_kernel", kernel=(3,), **PLAIN), In((N, 3, 3), "f8", 0.5, 0.6), "N 2 5", many=1000),
    ],
    **{
        n: [
            *(on(op(n, axis=a, masked=m), s) for s, a in AXES for m in (False, True)[: 1 + a]),
            on(lambda x, n=n: function(n)(x.mT, axis=0), "2 3"),
        ]
        for n in ("softmax", "log_softmax")
    },
    "softmax_backward": [on(op("softmax_backward", axis=a), s, In(shape(s), "f8", 0.25, 0.75)) for s, a in AXES],
    "log_softmax_backward": [
        on(op("log_softmax_backward", axis=a), s, In(shape(s), "f8", -2.0, -1.0)) for s, a in AXES
    ],
    "rotary_embedding": [
        *each(
            mt.nn.rotary_embedding,
            "N 4, N 2, N 2; 2 3 5 4, 5 2, 5 2; 2 3 5 6, 2 1 5 3, 2 1 5 3; 4, 2, 2; 0 6, 1 3, 1 3",
        ),
        on(op("rotary_embedding", inverse=True), "2 3 8, 2 1 4, 2 1 4"),
        on(lambda x, c, s: mt.nn.rotary_embedding(mt.permute_dims(x, (0, 2, 1, 3)), c, s), "2 5 3 4, 5 2, 5 2"),
    ],
    "attention": [
        *(on(without_saved("attention", scale=0.5, diagonal=d), s, many=600) for s, d in ATTENDED),
        on(lambda q, k, v: mt.nn.scaled_dot_product_attention(q, k, v, is_causal=True), "2 4 3 2, 2 2 5 2, 2 2 5 2"),
    ],
    "attention_backward": [
        on(slopes_of_attention("attention_backward", scale=0.5, diagonal=d), f"{out(s)}, {s}", many=600)
        for s, d in ATTENDED[:4]
    ],
    "attention_bias_backward": [
        on(slopes_of_attention("attention_bias_backward", scale=0.5, diagonal=d), f"{out(s)}, {s}", many=600)
        for s, d in ATTENDED[4:]
    ],
    "cross_entropy": [on(without_saved("cross_entropy", **p), x, labels(x, n)) for x, n in LABELS for p in LOSSES],
    "cross_entropy_backward": [on(slopes("cross_entropy", p), n, x, labels(x, n)) for x, n in LABELS for p in LOSSES],
    "linear_cross_entropy": [
        on(without_saved("linear_cross_entropy", **p), h, w, labels(w, n)) for h, w, n in PROJECTED for p in LOSSES
    ],
    "linear_cross_entropy_backward": [
        on(slopes("linear_cross_entropy", p), n, h, w, labels(w, n)) for h, w, n in PROJECTED for p in LOSSES
    ],
    "float8_scale": [on(mt.nn.float8_scale, t, short="a power of two") for t in ("3 5 f4", "N f4", "0 f4", "4 2 f2")],
    "float8_matmul": [
        on(mt.nn.float8_matmul, t, slopes="straight through", short="rounded to float8", low=-4, high=4)
        for t in ("4 6 f4, 6 3 f4", "2 4 6 f4, 6 5 f4", "3 1 4 2 f2, 2 2 6 f2", "0 3 f4, 3 2 f4")
    ],
    "experts": [on(op("experts"), *sent, many=600) for sent in SENT],
    "experts_backward": [
        on(op("experts_backward"), sent[0], *sent, short="rounded weights of tokens") for sent in SENT
    ],
    "layer_norm": [
        *(on(lambda x, w, b: mt.layer_norm(x, w.shape, w, b), f"{x}, {w}, {w}") for x, w in LAYERS),
        on(lambda x: mt.layer_norm(x, 5), "4 5"),
        on(lambda x: mt.layer_norm(x, 3, x, x), "3"),  # one array in every place
        on(lambda x: mt.layer_norm(x.mT, 4, None, x[:, 0]), "4 3"),
        on(op("layer_norm", naxes=2, eps=1e-5), "2 3 f4, 2 3, 2 3"),
    ],
    "add_layer_norm": [
        *(
            on(lambda x, r, w, b: mt.nn.add_layer_norm(x, r, w.shape, w, b), f"{x}, {x}, {w}, {w}", short=A_SUM)
            for x, w in LAYERS
        ),
        on(lambda x: mt.nn.add_layer_norm(x, x.mT, 3), "3 3", short=A_SUM),
        on(lambda x: mt.nn.add_layer_norm(x, x, 3, x, x), "3", short=A_SUM),  # one array in every place
    ],
    "layer_norm_backward": [
        *(on(op("layer_norm_backward", naxes=len(shape(w)), eps=1e-2), f"{x}, {x}, {w}") for x, w in LAYERS),
        *(on(op("layer_norm_backward", naxes=len(shape(w)), eps=1e-2), f"{x}, {x}, {w}, {x}") for x, w in LAYERS),
        on(lambda x: op("layer_norm_backward", naxes=1, eps=1e-3)(x, x, x), "3"),
    ],
    "rms_norm": [
        *(on(lambda x, w: mt.rms_norm(x, w.shape, w), f"{x}, {w}") for x, w in LAYERS),
        on(lambda x: mt.rms_norm(x, 3, x), "3"),
        on(lambda x: mt.rms_norm(x.mT, 4, x[:, 0]), "4 3"),
    ],
    "add_rms_norm": [
        *(on(lambda x, r, w: mt.nn.add_rms_norm(x, r, w.shape, w), f"{x}, {x}, {w}", short=A_SUM) for x, w in LAYERS),
        on(lambda x: mt.nn.add_rms_norm(x, x, 3, x), "3", short=A_SUM),
    ],
    "rms_norm_backward": [
        *(on(op("rms_norm_backward", naxes=len(shape(w)), eps=1e-2), f"{x}, {x}, {w}") for x, w in LAYERS),
        *(on(op("rms_norm_backward", naxes=len(shape(w)), eps=1e-2), f"{x}, {x}, {w}, {x}") for x, w in LAYERS),
        on(lambda x: op("rms_norm_backward", naxes=1, eps=1e-3)(x, x, x), "3"),
    ],
    "group_norm": [
        *each(lambda x, w, b: mt.group_norm(x, 2, w, b), "N 4 3, 4, 4; 4 6 3, 6, 6; 0 4 3, 4, 4", many=600),
        on(lambda x, w, b: mt.group_norm(x, 3, w, b), "5 6 2 2, 6, 6"),
        on(lambda x, w, b: mt.group_norm(x, 2, w, b, channel_axis=-1), "2 3 4, 4, 4"),
        on(lambda x, w: mt.instance_norm(x, w, w), "3 4 5, 4"),
        on(lambda x: mt.instance_norm(x, channel_axis=-1), "2 4 5"),
        on(lambda x: mt.group_norm(x, 2, x[0, :, 0]), "1 4 2"),
        on(op("group_norm", num_groups=1, axis=1, eps=1e-3), "2 4, 4, 4"),
    ],
    "group_norm_backward": [
        on(op("group_norm_backward", num_groups=g, axis=a, eps=1e-2), f"{x}, {x}, {w}", many=600)
        for x, w, a, g in GROUPS
    ],
    "batch_norm": [on(batch_normalized(axis=a, eps=1e-2, momentum=0.25), f"{x}, {w}, {w}") for x, w, a in CHANNELS],
    "batch_norm_backward": [
        on(
            op("batch_norm_backward", axis=a, eps=1e-2),
            f"{x}, {w}, {w}, {w}",
            In(shape(w), "f8", 0.5, 2.0),
            f"{x}, {w}",
        )
        for x, w, a in CHANNELS
    ],
    "batch_norm_inference": [
        on(op("batch_norm_inference", axis=a, eps=1e-2), f"{x}, 2", POSITIVE, "2, 2")
        for x, a in (("N 2", 1), ("3 2 5", 1), ("3 4 2", 2), ("0 2 3", 1))
    ],
}

# ----- random numbers -------------------------------------------------------------------------------------------------

KEY = In((2,), "u8", 0, 9)
R = mt.random
PART: Any = {"offset": (1, 0), "global_shape": (4, 3)}
OF_A_LARGER = {"split": "a block of a larger draw"}


def draws(name: str, *calls: Callable[..., Any], **params: Any) -> list[Sample]:
    """Draws of several shapes, and the op on a block of one."""
    shapes = ((), (5,), (4, 6), (0, 3), (2, 3, 5))
    part = op(f"random_{name}", shape=(2, 3), **PART, **params)
    return [*(on(lambda k, s=s, f=f: f(k, s), KEY) for f in calls for s in shapes), on(part, KEY, **OF_A_LARGER)]


RANDOM: Rows = {
    "dropout": [
        *(on(lambda k, x: mt.nn.dropout(x, 0.4, key=k), KEY, s) for s in ("N 2", "4 6", "0 3", "2 3 5")),
        on(lambda k, x: mt.nn.dropout(x.T, 0.5, key=k), KEY, "2 3 c16"),
        on(lambda k, x: mt.nn.dropout(x, 1.0, key=k), KEY, "3 4"),
        on(lambda k, x: op("dropout", rate=0.3, **PART)(x, k), KEY, "2 3", **OF_A_LARGER),
    ],
    "dropout_add": [
        *(on(lambda k, x, y: mt.nn.dropout_add(x, y, 0.4, key=k), KEY, f"{s}, {s}") for s in ("N 2", "0 3", "2 3 5")),
        on(lambda k, x: mt.nn.dropout_add(x, x, 0.3, key=k), KEY, "3 4"),
    ],
    "random_bits": draws("bits", R.bits, dtype=mt.uint32),
    "random_uniform": draws(
        "uniform", R.uniform, partial(R.uniform, dtype=np.float32), dtype=mt.bfloat16, low=0.0, high=1.0
    ),
    "random_normal": draws(
        "normal", R.normal, partial(R.normal, dtype=np.float32), dtype=mt.bfloat16, mean=0.0, std=1.0
    ),
    "random_truncated_normal": draws(
        "truncated_normal",
        lambda k, s: R.truncated_normal(k, -1.0, 2.0, s),
        dtype=mt.float32,
        lower=-1.0,
        upper=1.0,
        mean=0.0,
        std=1.0,
    ),
    "random_integers": draws("integers", lambda k, s: R.integers(k, s, 0, 10), dtype=mt.int8, low=-3, span=5),
    "random_bernoulli": draws("bernoulli", lambda k, s: R.bernoulli(k, 0.3, s), dtype=mt.bool, threshold=2**31),
    "random_exponential": draws("exponential", R.exponential, dtype=mt.float64, scale=1.0),
    "random_gumbel": draws("gumbel", R.gumbel, dtype=mt.float32),
    "random_split": [on(lambda k: R.split(k, 5), KEY)],
    "random_fold_in": [
        on(lambda k: R.fold_in(k, 7), KEY),
        on(lambda k: R.fold_in(k, "dropout"), KEY),
        on(R.fold_in, KEY, In((), "i8", 0, 9)),
    ],
    "random_permutation": [on(lambda k: R.permutation(k, 7), KEY)],
    "random_choice": [
        on(lambda k, p, r=r, n=n: R.choice(k, 5, (n,), replace=r, p=p), KEY, In((5,), "f8", 0.25, 2))
        for n, r in ((3, True), (4, False))
    ],
}

SAMPLES: Rows = {**ELEMENTS, **STRUCTURE, **INDEXING, **WIDE, **NETWORKS, **RANDOM}

# ----- readings -------------------------------------------------------------------------------------------------------


def samples(suite: str, name: str) -> list[Sample]:
    """Those of an op that this suite has a use for."""
    return [s for s in SAMPLES[name] if suite not in s.leave]


def rng_of(name: str) -> np.random.Generator:
    """Random numbers of an op's own: those of others may change."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def differentiable() -> list[str]:
    """Ops with a derivative and samples of it."""
    return [n for n in sorted(SAMPLES) if OPS[n].nondifferentiable is None and slopes(n)]


@functools.cache
def slopes(name: str) -> list[Sample]:
    """Samples with operands that have derivatives, all of eight bytes."""
    floats = [(s, [np.dtype(o.kind) for o in s.operands if o.is_float]) for s in samples("slopes", name)]
    return [s for s, kinds in floats if kinds and all(k.char in "dD" for k in kinds)]


class Calls:
    """A recorder that keeps the calls of ops it sees."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def watches(self, x: Any) -> bool:
        return False

    def record(self, op: Any, args: Any, bufs: Any, outs: Any, params: Any) -> None:
        self.seen.append((op, args, outs, params))


@functools.cache
def calls(name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments, of NumPy's arrays and numbers, and parameters of the op's own calls that the samples make, each kind
    of call once."""
    found: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    rng = rng_of(name)
    for sample in samples("shapes", name):
        with recording(recorder := Calls()), np.errstate(all="ignore"):
            sample.fn(*map(mt.asarray, sample.make(rng)))
        for op, args, _, params in recorder.seen:
            if op.name == name:
                given = tuple(np.asarray(a) if isinstance(a, mt.Array) else a for a in args)
                kinds = [(a.shape, a.dtype) if isinstance(a, np.ndarray) else a for a in given]
                found.setdefault(repr((kinds, params)), (given, dict(params)))
    return list(found.values())


def of_floats(fn: Callable[..., Any], args: list[np.ndarray]) -> tuple[Callable[..., Any], list[np.ndarray]]:
    """The call as a function of its floating operands, and these."""
    places = [k for k, a in enumerate(args) if a.dtype.kind not in "biu"]

    def call(*xs: Any) -> Any:
        full: list[Any] = [mt.asarray(a) for a in args]
        for k, x in zip(places, xs, strict=True):
            full[k] = x
        return fn(*full)

    return call, [args[k] for k in places]


def in_thousands(name: str) -> Iterator[tuple[Callable[..., Any], list[np.ndarray]]]:
    """Calls whose cotangents are sums of thousands of floats: of one sign, so that the sums do not cancel.

    One array that has no other beside it is one row in the place of many, unless it is reduced.
    """
    rng = rng_of(name)
    for fn, operands, many, _ in samples("short", name):
        floats = [o for o in operands if o.is_float]
        if not floats or not any(N in o.shape for o in operands) or any(np.dtype(o.kind).char != "d" for o in floats):
            continue
        near = [
            o._replace(low=max(o.low, 0.5), high=min(o.high, 1.5)) if o.low <= 1.5 and o.high >= 0.5 else o
            for o in operands
        ]
        call, xs = of_floats(fn, [o.make(rng, exact=False, many=many) for o in near])
        alone = len(xs) == 1 and xs[0].shape[:1] == (many,)
        if not alone or all(v.size < many for v in mt.tree.flatten(call(*xs))[0]):
            yield call, xs
        if alone:
            yield lambda row, call=call, many=many: call(mt.broadcast_to(row, (many, *row.shape))), [xs[0][0]]


def recast(x: Any, dtype: Any) -> Any:
    """An argument with its floats in another dtype, as the dispatcher would hand it over; complex ones stay complex."""
    dtype = np.dtype(dtype)
    if type(x) is float and dtype == ml_dtypes.bfloat16:
        return np.asarray(x, dtype)
    if not isinstance(x, np.ndarray) or x.dtype.kind in "biu":
        return x
    if x.dtype.kind == "c" and dtype.kind != "c":
        dtype = np.dtype(np.complex128 if dtype == np.float64 else np.complex64)
    with np.errstate(all="ignore"):
        return x.astype(dtype)
