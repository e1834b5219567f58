"""Functions on awkward numbers: small integers that would overflow, infinities, numbers out of range. NumPy is the
oracle."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import numpy as np
import pytest

import meshtape as mt

INF, NAN = np.inf, np.nan


def a(values: Any, dtype: Any = None) -> np.ndarray:
    return np.array(values, dtype)


SMALL = ["bool", "int8", "uint8", "int16", "int64", "uint64"]
BIG = {d: a([1, 0, 1, 1], d) if d == "bool" else a([100, 127, 3, 90], d) for d in SMALL}
ASCENDING = {d: a([0, 1, 3, 120], d) for d in SMALL if d != "bool"}

CASES: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    # Integers where NumPy computes in floats.
    *(("average", (BIG[d],), {"weights": BIG[w]}) for d in SMALL for w in ("bool", "uint8", "int64")),
    *(("average", (BIG[d].astype("float32"),), {"weights": BIG[d], "returned": True}) for d in SMALL),
    ("average", (a([[1, 2, 3], [4, 5, 6]], "uint8"),), {"axis": (1, 0), "weights": a([[200, 1], [2, 3], [4, 5]], "uint8")}),
    ("average", (a([INF, 1.0]),), {"returned": True}),
    ("average", (a([]),), {"returned": True}),
    *(("interp", (a([0.5, 1.5, 2.25]), a([0, 1, 2, 3]), BIG[d]), {}) for d in SMALL),
    *(("interp", (a([2, 100]), ASCENDING[d], BIG["uint8"]), {}) for d in ASCENDING),
    *(("interp", (a([0.1, 1.5, 2.25]), a([0, 1, 3], "float32"), a([-60000, 60000, 1], f)), {}) for f in ("float16", "float32", "int32", "complex64")),
    *(("interp", (a([0.1, 1.5, 2.25]), a([0, 1, 3], "int8"), a(f, "int8")), {}) for f in ([-100, 100, -100], [127, -128, 5])),
    *((n, (a(v, bool),), {"initial": i}) for n in ("min", "max") for v in ([1, 0], [0], [1, 1], []) for i in (-1, 0, 2, True, np.int8(-3))),
    ("interp", (a([-1, 0.0, 0.5, 1.0, 1.5, 2.0, 3]), a([0.0, 1, 2]), a([1, INF, 3.0])), {}),
    ("interp", (a([0.0, 0.5, 1.0, 1.5, 2.0]), a([0.0, 1, 2]), a([INF, INF, NAN])), {}),
    *(("gradient", (a([1.0, 2, 4, 8]), ASCENDING[d]), {}) for d in ASCENDING),
    *(("gradient", (a([1.0, 2, 4, 8]), ASCENDING[d][::-1].copy()), {"edge_order": 2}) for d in ASCENDING),
    ("gradient", (a([1.0, 2, 4]), a(200, "uint8")), {}),
    *(("cov", (a([[1.0, 2, 4, 1], [3, 1, 1, 7]]),), {"aweights": BIG[d]}) for d in SMALL),
    *(("cov", (a([[1.0, 2, 4, 1], [3, 1, 1, 7]]),), {"fweights": BIG[d], "aweights": BIG[d]}) for d in SMALL[1:-1]),
    *(("corrcoef", (np.stack([BIG[d], BIG[d][::-1]]),), {}) for d in SMALL),
    *(("vander", (BIG[d], 4), {}) for d in SMALL),
    *(("diff", (BIG[d],), {"prepend": 0, "append": 300}) for d in SMALL if d != "uint64"),
    ("diff", (a([200, 100], "uint8"),), {"prepend": a([7], "uint8")}),
    ("divmod", (-1.5, a([0.5, 1.5], "float32")), {}),
    ("divmod", (2, a([1, 3], "uint64")), {}),
    ("select", ([a([True, False, True]), a([True, True, False])], [a([2**63 - 1, 2, 3], "uint64"), a([True, False, True])]), {"default": 1}),
    ("polyval", (a([3, 2, 1], "int16"), a([True, False])), {}),
    # Bins that descend; quantiles beside infinities.
    *(("digitize", (a([0, 0.5, 1, 2, 3, 4]), a([3.0, 2, 1])), {"right": r}) for r in (False, True)),
    ("nanmedian", (a([1, INF, NAN, 5]),), {}),
    ("nanmedian", (a([-INF, -INF, NAN, 5]),), {}),
    ("nanmedian", (a([[1, INF], [INF, NAN]]),), {"axis": 1}),
    ("nanmedian", (np.zeros((2, 0)),), {"axis": 1}),
    ("nanmedian", (a([]),), {}),
    ("nanquantile", (a([1.0, 7.0, INF]), 0.25), {}),
    ("nanquantile", (a([0.1, 0.1, 0.1]), 0.3), {}),
    # The remainder and the power of two of C.
    *(("fmod", (a([np.iinfo(d).min, -7, 7], d), a([7, 3, -3], d)), {}) for d in ("int8", "int16", "int32", "int64")),
    ("fmod", (a([2**64 - 1, 5], "uint64"), a([10, 0], "uint64")), {}),
    ("fmod", (a([1.5, -2], "float32"), 3), {}),
    ("fmod", (3, a([1.5, -2], "float32")), {}),
    ("fmod", (a([5.0, -5, INF, NAN, -0.0]), a([INF, -INF, 1, 2, 3])), {}),
    ("ldexp", (a([1e-300, 5e-324, 3e-320, INF, 0.0, NAN, 1]), a([2000, 1074, 3, -5000, 2000, 2, -1074])), {}),
    ("ldexp", (a([1, 3], "int8"), a([2, 3], "uint8")), {}),
    ("ldexp", (a([1.5], "float32"), 2), {}),
    # Special values.
    ("angle", (a([INF, -INF, NAN, 0.0, -0.0, -1]),), {}),
    ("angle", (a([1, -1], "int8"),), {"deg": True}),
    ("piecewise", (a([INF, 2.0]), [a([False, True])], [1.5]), {}),
    ("convolve", (a([127, 1, -128], "int8"), a([-2.5, INF])), {}),
    ("convolve", (a([True, False, True]), a([True, True])), {}),
    ("correlate", (a([1, 2, 3.0]), a([INF, 1])), {"mode": "full"}),
    ("exp2", (a([INF + 7.25j, -INF + 1j, 2j]),), {}),
    ("cumprod", (a([INF + 1j, 2]),), {}),
    ("nanprod", (a([INF + 1j, NAN, 2]),), {}),
    ("inner", (a([INF + 1j, 2]), a([1j, 1])), {}),
    ("tensordot", (a([INF + 1j, 2]), a([1j, 1]), 1), {}),
    ("cross", (a([[1.0, 2, 0]]), a([1.0, 1, 2])), {"axis": None}),
    ("polyint", (a([6.0, 2]),), {"m": 2, "k": [3.0, 4]}),
    ("polyint", (a([6.0, 2]),), {"m": 2, "k": 3.0}),
    ("polyint", (a([6.0, 2]),), {"k": None}),
    ("cross", (a([INF + 1j, 2, 0]), a([1j, 1, 2])), {}),
    # Fewer observations than are taken off.
    *((n, (a([1.0, 2.0]),), {"ddof": d}) for n in ("var", "std", "nanvar", "nanstd", "cov") for d in (1, 2, 3)),
    *((n, (a([1.0, 1.0]),), {"ddof": 2}) for n in ("var", "std", "nanvar", "nanstd")),
    *((n, (a([1.0, 5.0]),), {"ddof": 1, "where": a([True, False])}) for n in ("var", "std")),
    # The floats that integers become.
    *((n, (BIG[d],), {}) for d in SMALL for n in ("rint", "fabs", "exp2", "deg2rad", "rad2deg", "modf", "angle") if (n, d) != ("exp2", "uint64")),
    *((n, (BIG[d], BIG[d]), {}) for d in SMALL for n in ("logaddexp2", "heaviside")),
    ("logaddexp2", (a([1, 2], "uint8"), 3), {}),
    *((f"fft.{n}", (a([1, 2, 3], d),), {}) for n in ("hfft", "irfft", "rfft", "fft") for d in ("float16", "bool", "uint8", "float32")),
    *(("unique", (a([NAN, 2, NAN, 1]),), {"equal_nan": e}) for e in (False, True)),
    ("unique", (a([[NAN, 2], [NAN, 1]]),), {"return_index": True, "return_inverse": True, "return_counts": True}),
    ("unique", (a([3, 1, 3], "uint8"),), {"return_inverse": True}),
    ("unique", (a([3, 1, 3], "uint8"),), {"return_counts": True}),
    ("union1d", (a([NAN, 1]), a([NAN])), {}),
    ("intersect1d", (a([True, False]), a([1, 5])), {}),
]  # fmt: skip
BY_VALUE = {"unique", "union1d", "intersect1d", "digitize"}  # shapes, or the way, depend on values


def of(namespace: Any, name: str) -> Any:
    for part in name.split("."):
        namespace = getattr(namespace, part)
    return namespace


def ours(v: Any) -> Any:
    if isinstance(v, list):
        return [ours(e) for e in v]
    return mt.asarray(v) if isinstance(v, np.ndarray) else v


def same(got: Any, want: Any) -> None:
    got, want = ([np.asarray(v) for v in (r if isinstance(r, tuple) else (r,))] for r in (got, want))
    assert [(v.shape, v.dtype) for v in got] == [(v.shape, v.dtype) for v in want]
    for g, w in zip(got, want, strict=True):
        eps = {2: 2e-3, 4: 1e-5}.get(w.dtype.itemsize, 1e-12)
        for part in ("real", "imag"):
            np.testing.assert_allclose(
                getattr(g, part), getattr(w, part), rtol=eps, atol=eps if w.dtype.kind in "fc" else 0
            )


def label(case: Any) -> str:
    name, args, kwargs = case
    text = [f"{v.dtype}{v.tolist()}" if isinstance(v, np.ndarray) else str(v) for v in (*args, *kwargs.values())]
    return f"{name}-{'-'.join(text)}"[:90]


@pytest.mark.parametrize("case", CASES, ids=label)
@pytest.mark.filterwarnings("ignore")
def test_as_numpy(case):
    name, args, kwargs = case
    with np.errstate(all="ignore"):
        want = of(np, name)(*args, **kwargs)
        named = {k: ours(v) for k, v in kwargs.items()}
        same(of(mt, name)(*map(ours, args), **named), want)
        if name in BY_VALUE:
            return
        places = [i for i, v in enumerate(args) if isinstance(v, np.ndarray)]

        def call(*arrays: Any) -> Any:
            given = dict(zip(places, arrays, strict=True))
            return of(mt, name)(*(given.get(i, ours(v)) for i, v in enumerate(args)), **named)

        arrays = [ours(args[i]) for i in places]
        same(mt.compile(call)(*arrays), want)


@pytest.mark.parametrize("case", CASES[::5], ids=label)
@pytest.mark.filterwarnings("ignore")
def test_split_over_ranks(case):
    name, args, kwargs = case
    mesh = mt.Mesh({"data": 2})

    def split(v: Any) -> Any:
        v = ours(v)
        return mt.distribute(v, mesh, data=mt.Shard(0)) if isinstance(v, mt.Array) and v.ndim else v

    with np.errstate(all="ignore"):
        same(of(mt, name)(*map(split, args), **{k: split(v) for k, v in kwargs.items()}), of(np, name)(*args, **kwargs))


@pytest.mark.parametrize(
    ("call", "want"),
    [  # where small integers overflow in NumPy as well, or infinities become NaN
        (lambda: mt.trapezoid(mt.asarray([200, 200], dtype=mt.uint8)), 200.0),
        (lambda: mt.trapezoid(mt.asarray([True, True])), 1.0),
        (lambda: mt.trapezoid(mt.asarray([1.0, 2.0]), mt.asarray([200, 1], dtype=mt.uint8)), -298.5),
        (lambda: mt.nanquantile(mt.asarray([1, INF]), 0.5), INF),
        (lambda: mt.nanquantile(mt.asarray([-INF, 1, INF]), 0.5), 1.0),
        (lambda: mt.nanquantile(mt.asarray([-128, 127, 3], dtype=mt.int8), 0.25), -62.5),
        (lambda: mt.histogram(mt.asarray([0, 0]), 1, weights=mt.asarray([200, 200], dtype=mt.uint8)).counts, [400]),
    ],
)
def test_right_where_numpy_is_not(call, want):
    np.testing.assert_array_equal(np.asarray(call()), want)


U8 = mt.asarray([200, 100], dtype=mt.uint8)
BEYOND = {
    "full": lambda v: mt.full(2, v, dtype="uint8"),
    "full of a list": lambda v: mt.full(2, [v, 1], dtype="uint8"),
    "full_like": lambda v: mt.full_like(U8, v),
    "full_like, compiled": lambda v: mt.compile(lambda x: mt.full_like(x, v))(U8),
    "full_like, split": lambda v: mt.full_like(mt.distribute(U8, mt.Mesh({"data": 2}), data=mt.Shard(0)), v),
    "asarray": lambda v: mt.asarray(v, dtype="uint8"),
    "asarray of a list": lambda v: mt.asarray([1, [v][0]], dtype="uint8"),
    "insert": lambda v: mt.insert(U8, 0, v),
    "insert of a list": lambda v: mt.insert(U8, 0, [v]),
    "piecewise": lambda v: mt.piecewise(U8, [U8 > 100], [v]),
    "pad": lambda v: mt.pad(U8, 1, constant_values=v),
    "pad with pairs": lambda v: mt.pad(U8, 1, constant_values=(0, v)),
    "pad with a ramp": lambda v: mt.pad(U8, 1, mode="linear_ramp", end_values=v),
}
WIDENING = {
    "where": lambda v: mt.where(U8 > 100, U8, v),
    "where, first": lambda v: mt.where(U8 > 100, v, U8),
    "where, compiled": lambda v: mt.compile(lambda x: mt.where(x > 100, x, v))(U8),
    "select": lambda v: mt.select([U8 > 100], [U8], default=v),
    "ediff1d": lambda v: mt.ediff1d(U8, to_end=v),
}


@pytest.mark.parametrize("name", [*BEYOND, *WIDENING])
def test_numbers_out_of_range(name):
    # (A float makes floats of the integers, or is refused by its dtype, where results widen.)
    for number in [256, -1, 2**53 + 1, 2**64, 10**400, *([] if name in WIDENING else [-1.5, 256.0, NAN, INF])]:
        with pytest.raises(mt.errors.NumberRangeError, match=r"^\[\w+\] .* is out of the range of uint8"):
            {**BEYOND, **WIDENING}[name](number)


@pytest.mark.parametrize("name", BEYOND)
def test_numbers_of_another_kind_and_numbers_in_range(name):
    with pytest.raises(mt.errors.DTypeError, match="imaginary"):
        BEYOND[name](1j)
    for number, kept in ((255, 255), (0, 0), (3.7, 3), (255.9, 255), (True, 1)):
        assert kept in np.asarray(BEYOND[name](number)).ravel()


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64"])
@pytest.mark.parametrize("number", [2**53 + 1, 2**63 - 1])
def test_large_numbers_keep_their_digits(dtype, number):
    x = mt.zeros(4, dtype=dtype)
    split = mt.distribute(x, mt.Mesh({"data": 2}), data=mt.Shard(0))
    want = np.full(4, number, dtype)
    for got in (mt.full_like(x, number), mt.compile(lambda x: mt.full_like(x, number))(x), mt.full_like(split, number)):
        np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "float32"])
@pytest.mark.parametrize("at", [(1, None), (None, 1), (2, 2)])
@pytest.mark.parametrize("name", ["convolve", "correlate"])
@pytest.mark.filterwarnings("ignore")
def test_patterns_with_infinities_eager_and_compiled(name, at, dtype):
    rng = np.random.default_rng(0)
    pair = [(rng.normal(size=n) + 1j * rng.normal(size=n)).astype(dtype) for n in (5, 3)]
    for x, i in zip(pair, at, strict=True):
        if i is not None:
            x[i] = INF
    want = np.zeros(7, dtype)
    with np.errstate(all="ignore"):
        for i, j in itertools.product(range(5), range(3)):
            want[i + (j if name == "convolve" else 2 - j)] += pair[0][i] * (
                pair[1][j] if name == "convolve" else pair[1][j].conj()
            )
    fn = getattr(mt, name)
    for got in (fn(*map(ours, pair), mode="full"), mt.compile(lambda x, y: fn(x, y, mode="full"))(*map(ours, pair))):
        for part in ("real", "imag"):
            np.testing.assert_allclose(getattr(np.asarray(got), part), getattr(want, part), rtol=1e-4, atol=1e-5)


Z = a([1 + 2j, INF, -0.0, complex(NAN, 1), complex(0, INF), 1e300 * (1 + 1j), complex(3, -0.0)])
MASK = a([True, False, True, True, True, True, False])


@pytest.mark.parametrize("op", ["imul", "iadd", "isub", "itruediv"])
@pytest.mark.parametrize("value", [2, 2j, INF, complex(INF, 0), True, np.arange(5.0), np.arange(5) * 1j], ids=str)
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.filterwarnings("ignore")
def test_masked_arithmetic_of_complex_numbers_eager_and_compiled(op, value, dtype):
    def changed(z: Any) -> Any:
        z = z.copy()
        z[MASK] = getattr(operator, op)(z[MASK], value)
        return z

    with np.errstate(all="ignore"):
        z = Z.astype(dtype)
        want = changed(z)
        for got in (changed(mt.asarray(z)), mt.compile(changed)(mt.asarray(z))):
            np.testing.assert_array_equal(np.asarray(got), want)
            for part in ("real", "imag"):
                signs = [
                    np.where(np.isnan(v), False, np.signbit(v))
                    for v in (getattr(want, part), getattr(np.asarray(got), part))
                ]
                np.testing.assert_array_equal(*signs)


C = mt.asarray([1j, 2.0])
X = mt.asarray([1.0, 2.0])


@pytest.mark.parametrize(
    "call",
    [
        lambda: mt.fmod(C, C),
        lambda: mt.ldexp(X, 1.5),
        lambda: mt.ldexp(X, mt.asarray([1.0, 2.0])),
        lambda: mt.ldexp(X, mt.asarray([1, 2], dtype="uint64")),
        lambda: mt.ldexp(C, 2),
        lambda: mt.heaviside(X, 1j),
        lambda: mt.logaddexp2(C, X),
        lambda: mt.degrees(C),
        lambda: mt.radians(C),
        lambda: mt.fabs(C),
        lambda: mt.modf(C),
        lambda: mt.isneginf(C),
        lambda: mt.isposinf(C),
        lambda: mt.digitize(C, [1.0, 2.0]),
        lambda: mt.interp(C, [0.0, 1.0], [0.0, 1.0]),
        lambda: mt.ediff1d(mt.asarray([1, 2]), to_end=1.5),
        lambda: mt.ediff1d(U8, to_begin=mt.asarray([300])),
        *(lambda n=n: getattr(mt, n)(X, dtype="int8") for n in ("mean", "var", "std", "nanmean", "nanvar", "nanstd")),
    ],
)
def test_refused_as_by_numpy(call):
    with pytest.raises(mt.errors.DTypeError, match=r"^\[\w+\]"):
        call()


@pytest.mark.parametrize("op", ["multiply", "divide"])
@pytest.mark.parametrize(("x", "v"), [("f8", "i1"), ("f8", "f4"), ("f4", "i2"), ("i8", "i1"), ("c16", "f4")])
def test_factors_of_repeated_places_meet_in_the_dtype_of_both(op, x, v):
    if op == "divide" and x == "i8":
        return
    host, factors = np.full(2, 7, x), np.array([100, 100, 2], v) if v[0] == "i" else np.array([1e30, 1e30, 2], v)
    wanted = host.copy()
    getattr(np, op).at(wanted, [0, 0, 1], factors)
    got = getattr(mt.asarray(host).at[mt.asarray([0, 0, 1])], op)(mt.asarray(factors))
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-6)


def test_polysub_of_unsigned_numbers():
    for p, q in (([1.5, 2, 3], np.array([3], "u1")), ([1.5, 2, 3], np.array([-128], "i1")), ([1], np.array([3], "u1"))):
        np.testing.assert_array_equal(np.asarray(mt.polysub(np.array(p), q)), np.polysub(np.array(p), q))


def test_what_is_written_to_is_no_sequence():
    with pytest.raises(TypeError):
        list(mt.ones(3).at)
    with pytest.raises(TypeError):
        1.0 in mt.ones(3).at  # noqa: B015
