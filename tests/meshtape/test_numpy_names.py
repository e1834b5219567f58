"""NumPy's names: NumPy itself is the oracle; they compile, differentiate and shard like the ops that they are made
of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import meshtape as mt

rng = np.random.default_rng(4)
A = rng.normal(size=(4, 6))
B = rng.normal(size=(4, 6))
C = A + 1j * B
V = rng.normal(size=6)
I = rng.integers(-5, 9, size=(4, 6))
CUBE = rng.normal(size=(2, 3, 4))
SQUARE = rng.normal(size=(5, 5)) + 3 * np.eye(5)
HOLED = np.where(rng.random((4, 6)) < 0.3, np.nan, A)
AWKWARD = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 2.5, -2.5, 0.5])


class Call:
    """A call by name, with what of it is to be tried: ``compiled``, ``grad`` (with respect to the first argument),
    ``sharded``."""

    def __init__(self, name: str, *args: Any, only: str = "cgs", **kwargs: Any) -> None:
        self.name, self.args, self.kwargs, self.only = name, args, kwargs, only

    def of(self, namespace: Any, *args: Any) -> Any:
        fn = namespace
        for part in self.name.split("."):
            fn = getattr(fn, part)
        return fn(*(args or self.args), **self.kwargs)

    def __str__(self) -> str:
        def text(a: Any) -> str:
            if isinstance(a, np.ndarray):
                return "x".join(map(str, a.shape)) or str(a)
            return "[" + ",".join(map(text, a)) + "]" if isinstance(a, list | tuple) else getattr(a, "__name__", str(a))

        return f"{self.name}({', '.join([*map(text, self.args), *(f'{k}={text(v)}' for k, v in self.kwargs.items())])})"


def _ends(v: Any) -> Any:
    return v[0] * v[-1]


def _spread(v: Any) -> Any:
    return v[:2] * v[-1]


def _square(v: Any) -> Any:
    return v[:2, None] * v[None, :2]


def _kept_sum(x: Any, axis: int) -> Any:
    return x.sum(axis=axis, keepdims=True)


def _dropped_sum(x: Any, axis: int) -> Any:
    return x.sum(axis=axis) * 2


# Letters: c compiles, g differentiates, s shards. What depends on values in its shape or checks values does neither.
CALLS = [
    *(Call(n, A) for n in ("absolute", "exp2", "cbrt", "deg2rad", "rad2deg", "radians", "degrees", "fabs", "arctan")),
    *(Call(n, np.tanh(A)) for n in ("arcsin", "arccos", "arctanh", "arcsinh", "sinc", "modf")),
    *(
        Call(n, AWKWARD, only="c")
        for n in ("cbrt", "exp2", "sinc", "modf", "nan_to_num", "isposinf", "isneginf", "fix")
    ),
    *(Call(n, I, only="cs") for n in ("fabs", "exp2", "isreal", "iscomplex", "bitwise_not", "invert")),
    *(Call(n, C, only="cs") for n in ("isreal", "iscomplex", "conjugate", "angle")),
    Call("angle", C, deg=True, only="c"),
    Call("angle", A, only="c"),
    Call("arccosh", np.abs(A) + 1.5),
    Call("arctan2", A, B),
    Call("logaddexp2", A, B),
    Call("fmod", A, B + 3, only="cs"),
    Call("fmod", I, 3, only="cs"),
    Call("mod", I, 3, only="cs"),
    Call("power", np.abs(A), 1.5),
    Call("float_power", np.abs(I) + 1, -2, only="cs"),
    Call("true_divide", A, B),
    Call("ldexp", A, I, only="cs"),
    Call("heaviside", AWKWARD, 0.5, only="c"),
    Call("left_shift", np.abs(I), 2, only="cs"),
    Call("right_shift", np.abs(I), 1, only="cs"),
    Call("divmod", I, 4, only="cs"),
    *(Call(n, A, 2, only="cs") for n in ("round", "around")),
    Call("round", A * 1000, -2, only="cs"),
    Call("round", I, 1, only="cs"),
    Call("rint", AWKWARD, only="c"),
    Call("nan_to_num", AWKWARD, nan=1.0, posinf=2.0, neginf=3.0, only="c"),
    Call("nan_to_num", C, only="c"),
    Call("unwrap", np.cumsum(A, 1) * 3),
    Call("unwrap", np.cumsum(A, 0) * 3, axis=0),
    Call("unwrap", np.cumsum(A, 0) * 3, axis=0, period=2.0),
    # closeness
    Call("isclose", A, A + 1e-9, only="cs"),
    Call("isclose", AWKWARD, AWKWARD, equal_nan=True, only="c"),
    Call("isclose", AWKWARD, AWKWARD[::-1], only="c"),
    Call("allclose", A, A + 1e-9, only="s"),
    Call("allclose", A, B, only="s"),
    Call("array_equal", A, A, only="s"),
    Call("array_equal", HOLED, HOLED, only=""),
    Call("array_equal", HOLED, HOLED, equal_nan=True, only=""),
    Call("array_equal", A, V, only=""),
    Call("array_equiv", V, np.stack([V, V]), only=""),
    Call("array_equiv", V, A, only=""),
    # joining
    *(Call(n, [A, B]) for n in ("vstack", "hstack", "dstack", "column_stack", "concatenate")),
    *(Call(n, [V, V + 1]) for n in ("vstack", "hstack", "dstack", "column_stack", "concatenate")),
    Call("hstack", [CUBE, CUBE]),
    Call("concatenate", [A, B], 1),
    Call("concatenate", [A, V], None),
    Call("block", [[A, B], [B, A]]),
    Call("block", [V, V]),
    Call("append", A, B),
    Call("append", A, B, 1),
    Call("append", V, 3.0),
    *(Call(n, A, 2, only="cs") for n in ("split", "vsplit", "hsplit", "array_split")),
    Call("split", A, [1, 3], 1, only="cs"),
    Call("split", A, 3, axis=1, only="cs"),
    Call("array_split", A, 4, 1, only="cs"),
    Call("dsplit", CUBE, [1], only="cs"),
    *(Call("delete", A, w, 1) for w in (0, [1, -1], slice(None, None, 2))),
    Call("delete", A, [3, 5]),
    Call("delete", V, [True, False, False, True, False, False]),
    *(Call("insert", V, w, v) for w, v in ((1, 9.0), ([0, 6], [7.0, 8.0]), ([2, 2], [1.0, 2.0]), (-1, [4.0, 5.0]))),
    Call("insert", A, 2, 5.0, axis=1),
    Call("insert", A, 1, V, axis=0),
    Call("insert", A, [1, 3], 0.5, axis=0),
    Call("insert", A, slice(0, 3), 1.0, axis=1),
    Call("insert", A, 3, 7.0),
    # along axes, and by index arrays
    *(Call("apply_along_axis", f, axis, CUBE) for f in (_ends, _spread, _square) for axis in (0, 1, -1)),
    Call("apply_over_axes", _kept_sum, CUBE, [0, 2]),
    Call("apply_over_axes", _dropped_sum, CUBE, [-1, 0]),
    Call("choose", I % 3, [A, B, 2.0], only="cs"),
    Call("choose", I, [A, V], mode="wrap", only="cs"),
    Call("choose", I, np.stack([A, B, -A]), mode="clip", only="cs"),
    Call("choose", I % 2 == 0, [A, B], only="cs"),
    Call("choose", (I % 3).astype(np.uint8), [1, 2, 3], only="cs"),
    # shapes
    *(Call("rollaxis", CUBE, axis, start) for axis in (0, 1, -1) for start in (0, 1, 3, -1)),
    *(Call("resize", A, shape) for shape in ((2, 3), (5, 7), 30, (3, 0), ())),
    Call("resize", A[:0], (2, 2), only="c"),
    *(Call(n, SQUARE, only="cs") for n in ("diag_indices_from", "tril_indices_from", "triu_indices_from")),
    Call("tril_indices_from", A, 1, only="c"),
    # weighted quantiles
    *(
        Call(n, A, q, weights=np.abs(B), method="inverted_cdf")
        for n, q in (("quantile", 0.4), ("percentile", [0, 55, 100]))
    ),
    Call(
        "quantile", A, [0.0, 0.25, 1.0], axis=1, weights=np.array([0.0, 0.0, 2.0, 1.0, 0.0, 3.0]), method="inverted_cdf"
    ),
    Call("quantile", A, [[0.1], [0.6]], axis=0, weights=np.abs(I), method="inverted_cdf", keepdims=True),
    Call("quantile", CUBE, 0.5, axis=(0, 2), weights=np.abs(CUBE[:, 0]), method="inverted_cdf"),
    Call("quantile", HOLED, 0.5, axis=0, weights=np.abs(B), method="inverted_cdf", only="cs"),
    Call("quantile", I, 0.3, weights=np.abs(B), method="inverted_cdf", only="s"),
    *(Call(f"fft.{n}", CUBE, only="cs") for n in ("fft2", "ifft2", "rfft2")),
    Call("fft.fft2", CUBE, s=(2, 5), axes=(1, 0), norm="ortho", only="cs"),
    Call("fft.irfft2", CUBE + 1j * CUBE[::-1], only="cs"),
    Call("fft.irfft2", CUBE + 1j * CUBE[::-1], s=(3, 5), only="c"),
    # rearranging
    *(Call(n, x) for n in ("atleast_1d", "atleast_2d", "atleast_3d") for x in (np.array(2.0), V, A, CUBE)),
    Call("atleast_2d", V, A, only="c"),
    *(Call(n, CUBE) for n in ("transpose", "ravel", "flipud", "fliplr", "rot90")),
    Call("transpose", CUBE, (1, 2, 0)),
    Call("swapaxes", CUBE, 0, -1),
    *(Call("rot90", A, k) for k in (-1, 0, 2, 3, 5)),
    Call("rot90", CUBE, 1, (2, 0)),
    *(Call(n, CUBE, 1, 2, 0) for n in ("diagonal", "trace")),
    *(Call(n, A, 1) for n in ("diagonal", "trace")),
    Call("diagflat", A[:2, :2]),
    Call("diagflat", V, -1),
    # positions
    Call("argwhere", I > 2, only=""),
    Call("argwhere", np.array(3), only=""),
    Call("flatnonzero", I > 2, only=""),
    Call("unravel_index", np.array([0, 5, 23]), (4, 6), only="cs"),
    Call("ravel_multi_index", (np.array([0, 3]), np.array([5, 1])), (4, 6), only="c"),
    Call("indices", (2, 3), only=""),
    Call("diag_indices", 3, only=""),
    Call("tril_indices", 4, 1, 3, only=""),
    Call("triu_indices", 4, -1, only=""),
    Call("ix_", [0, 2], [True, False, True], only=""),
    # making
    Call("array", [[1, 2]], only=""),
    Call("identity", 3, only=""),
    Call("tri", 3, 4, 1, only=""),
    Call("logspace", 0, 3, 7, only=""),
    Call("logspace", 0, 3, 4, base=2.0, endpoint=False, only=""),
    Call("geomspace", 1, 1000, 4, only=""),
    Call("geomspace", 1.0, -1000.0, 4, only=""),
    Call("fromfunction", lambda i, j: i * 2 + j, (3, 2), only=""),
    Call("vander", V),
    Call("vander", V, 3, increasing=True),
    Call("linspace", 0.0, 1.0, only=""),
    Call("zeros", 3, np.int32, only=""),
    Call("full", (2,), 1.5, np.float32, only=""),
    Call("arange", 0, 5, 2, np.float32, only=""),
    Call("eye", 3, 4, 1, np.int64, only=""),
    # products
    *(Call("dot", x, y) for x, y in ((V, V), (A, V), (A, B.T), (2.0, A), (A, CUBE.reshape(2, 6, 2)), (CUBE, V[:4]))),
    Call("vdot", A, B),
    Call("vdot", C, C, only="cs"),
    Call("inner", A, B),
    Call("inner", A, V),
    Call("inner", CUBE, V[:4]),
    Call("outer", A, V),
    Call("cross", A[:, :3], B[:, :3]),
    Call("matvec", CUBE, V[:4]),
    Call("vecmat", V[:3], CUBE),
    Call("kron", A[:2, :2], B[:2, :2]),
    # order and sets
    Call("unique", I, only=""),
    Call("unique", I.ravel(), True, True, True, only=""),
    Call("union1d", I, [100, -5], only=""),
    Call("intersect1d", I, [3, 4, 100], only=""),
    Call("setdiff1d", I, [3, 4], only=""),
    Call("setxor1d", I, [3, 4, 100], only=""),
    Call("lexsort", (I[0], I[1] // 3, I[2] // 4), only="c"),
    Call("lexsort", (I[0], I[1]), only="c"),
    # selecting
    Call("select", [A > 1, A < 0], [A, B], 7.0, only="c"),
    Call("piecewise", A, [A < 0, A >= 1], [lambda x: -x, 2.0, lambda x: x * x], only=""),
    Call("compress", [True, False, True], A, 1, only=""),
    Call("extract", A > 0, A, only=""),
    # signals
    *(Call("correlate", V, A[0, :3], m) for m in ("valid", "same", "full")),
    *(Call("correlate", A[0, :3], V, m) for m in ("valid", "same", "full")),
    Call("correlate", C[0], C[1, :3], "full", only="c"),
    Call("trapezoid", A),
    Call("trapezoid", A, np.sort(B, 1)),
    Call("trapezoid", A, np.sort(V[:4]), axis=0),
    Call("trapezoid", A, dx=0.5, axis=0),
    Call("ediff1d", A),
    Call("ediff1d", V, to_begin=[1.0, 2.0], to_end=5.0),
    *(Call(n, k, only="") for n in ("hanning", "hamming", "bartlett", "blackman") for k in (1, 8)),
    Call("kaiser", 8, 3.0, only=""),
    # polynomials
    Call("polyval", V[:4], A),
    Call("polyfit", V, A.T[:, 0] * 2, 2),
    Call("polyfit", V, A.T, 3),
    Call("polyfit", V, A.T, 1, w=np.abs(V) + 1),
    Call("polyder", V, 2),
    Call("polyint", V, 2),
    Call("polymul", V, V[:3]),
    Call("polyadd", V, V[:3]),
    Call("polysub", V[:3], V),
    # summaries
    *(Call(n, A) for n in ("ptp", "average", "cov", "corrcoef", "cumsum", "cumprod")),
    *(Call(n, A, 1) for n in ("ptp", "average", "cumsum", "cumprod", "amax", "amin")),
    Call("average", A, 1, V),
    Call("average", A, None, np.abs(B)),
    Call("average", A, 0, np.abs(V[:4]), keepdims=True),
    Call("cov", A, B),
    Call("cov", A, rowvar=False),
    Call("cov", A, bias=True),
    Call("cov", V),
    Call("cov", C, only="cs"),
    Call("cov", A, ddof=0, fweights=np.arange(6), only="cs"),
    Call("cov", A, aweights=np.abs(V), only="cs"),
    Call("cov", A, fweights=np.arange(6), aweights=np.abs(V), only="cs"),
    Call("corrcoef", A, B, rowvar=False),
    Call("corrcoef", C, only="cs"),
    *(Call(n, HOLED, ax, only="c") for n in ("nancumsum", "nancumprod", "nanmedian") for ax in (None, 0, 1)),
    *(Call(n, HOLED, only="") for n in ("nanargmax", "nanargmin")),
    *(Call(n, HOLED, 1, only="") for n in ("nanargmax", "nanargmin")),
    Call("nanquantile", HOLED, [0.1, 0.5, 1.0], 1, only=""),
    Call("nanquantile", HOLED, 0.3, (0, 1), keepdims=True, only=""),
    Call("nanquantile", CUBE, [0.2, 0.7], (0, 2), only=""),
    Call("nanpercentile", HOLED, 30, 0, only=""),
    Call("digitize", A, np.array([-1.0, 0.0, 0.5]), only="s"),
    Call("digitize", A, np.array([0.5, 0.0, -1.0]), right=True, only="s"),
    Call("histogram_bin_edges", A, 5, only=""),
    Call("histogram2d", V, V[::-1], 3, only=""),
    Call("histogram2d", A[0], A[1], [np.array([-1.0, 0.0, 1.0]), 4], only=""),
    Call("histogram2d", A[0], A[1], 3, [[-1, 1], [-2, 2]], weights=V, only=""),
    Call("shape", A, only=""),
    Call("ndim", A, only=""),
    Call("size", A, 1, only=""),
    # reductions with NumPy's positional arguments
    *(Call(n, A, 1) for n in ("sum", "mean", "std", "var", "max", "min", "prod", "median")),
    *(Call(n, A, 1, ddof=1) for n in ("std", "var")),
    Call("argmax", A, 0, only="c"),
    Call("sort", A, 0),
    Call("stack", [A, B], 1),
    Call("roll", A, 1, 0),
    Call("repeat", A, 2, 1),
    Call("take", A, [0, 2], 1),
    Call("diff", A, 2, 0),
    Call("squeeze", A[:, None]),
    Call("tril", A, -1),
    Call("quantile", A, 0.3, 0),
    Call("pad", A, 1, "edge"),
    # linear algebra
    *(Call("linalg.norm", x) for x in (V, A, CUBE)),
    *(Call("linalg.norm", A, ord=o) for o in ("fro", "nuc", 1, -1, 2, np.inf)),
    *(Call("linalg.norm", V, ord=o, only="cs") for o in (0, 1, 3, np.inf, -np.inf)),
    Call("linalg.norm", CUBE, axis=(2, 0), ord=1),
    Call("linalg.norm", CUBE, axis=1, keepdims=True),
    Call("linalg.norm", CUBE, axis=(0, 1), keepdims=True, ord="fro"),
    *(Call("linalg.cond", SQUARE, p=p) for p in (None, 2, -2, 1, "fro")),
    Call("linalg.multi_dot", [A, B.T, A]),
    Call("linalg.multi_dot", [V, A.T, B, V]),
    Call("linalg.tensorsolve", SQUARE.reshape(5, 5), V[:5]),
    Call("linalg.tensorinv", np.kron(np.eye(2), np.array([[2.0, 1.0], [0.0, 1.0]])).reshape(2, 2, 4)),
]
ids = [f"{i}-{c}" for i, c in enumerate(CALLS)]


def as_list(x: Any) -> list[Any]:
    return list(x) if isinstance(x, tuple | list) else [x]


def compare(got: Any, want: Any) -> None:
    got, want = as_list(got), as_list(want)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert np.shape(g) == np.shape(w)
        if isinstance(g, mt.Array):
            assert g.dtype == np.asarray(w).dtype
        np.testing.assert_allclose(np.asarray(g), w, rtol=1e-9, atol=1e-9)


def arrays_in(call: Call) -> tuple[list[np.ndarray], Any]:
    """The arrays among the arguments, and a function that calls with others in their place."""
    first = call.args[0]
    found = list(first) if isinstance(first, list | tuple) else [first]
    arrays = [a for a in found if isinstance(a, np.ndarray)]

    def again(*new: Any) -> Any:
        rest = iter(new)
        put = [next(rest) if isinstance(a, np.ndarray) else a for a in found]
        return call.of(mt, type(first)(put) if isinstance(first, list | tuple) else put[0], *call.args[1:])

    return arrays, again


@pytest.mark.parametrize("call", CALLS, ids=ids)
def test_as_numpy_compiled_differentiated_and_sharded(call):
    arrays, again = arrays_in(call)
    with np.errstate(all="ignore"):
        want = call.of(np)
        compare(call.of(mt), want)
        if "c" in call.only:
            compare(mt.compile(again)(*map(mt.asarray, arrays)), want)
        if "s" in call.only:
            mesh = mt.Mesh({"m": 2})
            compare(again(*[mt.distribute(a, mesh, m=mt.Shard(0)) if a.ndim else mt.asarray(a) for a in arrays]), want)
    if "g" in call.only:

        def total(*xs):
            return sum(mt.sum(o * np.cos(np.arange(o.size)).reshape(o.shape)) for o in as_list(again(*xs)))

        mt.check_grads(total, *map(mt.asarray, arrays), order=1)


BOUNDED = settings(max_examples=60, deadline=None)
floats = st.floats(-1e3, 1e3, allow_subnormal=False)


@BOUNDED
@given(hnp.arrays("float64", hnp.array_shapes(min_dims=1, max_dims=3, max_side=5), elements=floats), st.data())
def test_insert_and_delete_at_random_places(x, data):
    axis = data.draw(st.none() | st.integers(-x.ndim, x.ndim - 1))
    length = x.size if axis is None else x.shape[axis]
    places = data.draw(st.lists(st.integers(-length, length), min_size=0, max_size=5) | st.integers(-length, length))
    compare(mt.insert(mt.asarray(x), places, 7.0, axis), np.insert(x, places, 7.0, axis))
    inner = data.draw(
        st.lists(st.integers(-length, length - 1), min_size=0, max_size=5) | st.integers(-length, length - 1)
    )
    inner = np.asarray(inner, int)
    compare(mt.delete(mt.asarray(x), inner, axis), np.delete(x, inner, axis))


@pytest.mark.parametrize("shape", [(6, 3), (3, 3), (3, 5)])
@pytest.mark.parametrize("columns", [(), (2,)])
def test_least_squares(shape, columns):
    a, b = rng.normal(size=shape), rng.normal(size=(shape[0], *columns))
    got, want = mt.linalg.lstsq(mt.asarray(a), mt.asarray(b)), np.linalg.lstsq(a, b)
    for g, w in zip(got, want, strict=True):
        assert np.shape(g) == np.shape(w)
        np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-12)
    low = a.copy()
    low[:, 0] = low[:, 1]
    got, want = mt.linalg.lstsq(mt.asarray(low), mt.asarray(b)), np.linalg.lstsq(low, b)
    assert int(got.rank) == want[2]
    np.testing.assert_allclose(got.solution, want[0], rtol=1e-8, atol=1e-10)
    if shape[0] > shape[1]:
        mt.check_grads(lambda a, b: mt.sum(mt.linalg.lstsq(a, b).solution ** 2), mt.asarray(a), mt.asarray(b), order=1)


def test_roots():
    p = np.array([1.0, -6.0, 11.0, -6.0])
    np.testing.assert_allclose(np.sort(np.asarray(mt.real(mt.roots(p)))), [1, 2, 3], rtol=1e-9)
    assert mt.roots([3.0]).shape == (0,)


def test_partition_puts_the_kth_where_sorting_would():
    x = rng.normal(size=(3, 7))
    out = np.asarray(mt.partition(mt.asarray(x), 2))
    np.testing.assert_array_equal(out[:, 2], np.sort(x)[:, 2])
    places = np.asarray(mt.argpartition(mt.asarray(x), 2))
    np.testing.assert_array_equal(np.take_along_axis(x, places, 1)[:, 2], np.sort(x)[:, 2])


def test_methods_are_the_functions():
    x = mt.asarray(A)
    for name, args in {
        "round": (1,),
        "cumsum": (1,),
        "cumprod": (0,),
        "dot": (B.T,),
        "swapaxes": (0, 1),
        "diagonal": (1,),
        "trace": (),
        "take": ([0, 1], 1),
        "repeat": (2, 0),
        "argsort": (0,),
        "conjugate": (),
        "nonzero": (),
        "tobytes": (),
    }.items():
        got, want = getattr(x, name)(*args), getattr(A, name)(*args)
        assert got == want if isinstance(want, bytes) else compare(got, want) is None
    y = x.sort(0)
    compare(y, np.sort(A, 0))
    compare(x, A)  # sorting returns; it does not write
    compare(mt.asarray(np.sort(V)).searchsorted([0.0]), np.sort(V).searchsorted([0.0]))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mt.split(A, 5), mt.errors.ShapeError, "does not divide into 5 equal pieces; array_split"),
        (lambda: mt.vsplit(V, 2), mt.errors.ShapeError, "needs an array of 2 or more dimensions"),
        (lambda: mt.block([[A], B]), mt.errors.ShapeError, "nested equally deep"),
        (lambda: mt.insert(V, 9, 1.0), IndexError, r"places 9 do not fit an axis of length 6"),
        (lambda: mt.delete(V, 9), IndexError, "out of bounds"),
        (lambda: mt.unravel_index(24, (4, 6)), IndexError, "outside an array of shape"),
        (lambda: mt.ravel_multi_index((4, 0), (4, 6)), IndexError, "dimension 0 is outside its length 4"),
        (lambda: mt.average(A, 1, V[:4]), mt.errors.ShapeError, "do not fit an array of shape"),
        (lambda: mt.nanargmax(np.array([np.nan])), ValueError, "NaN throughout"),
        (lambda: mt.nanquantile(V, 1.5), ValueError, "between 0 and 1"),
        (lambda: mt.digitize(V, [0.0, 2.0, 1.0]), ValueError, "must ascend or descend"),
        (lambda: mt.partition(V, 6), mt.errors.ShapeError, "there is no 6-th element"),
        (lambda: mt.linalg.norm(CUBE, ord=2), mt.errors.ShapeError, "needs a vector or a matrix"),
        (lambda: mt.linalg.norm(A, ord="fro", axis=0), ValueError, "is a norm of matrices"),
        (lambda: mt.linalg.lstsq(A, V), mt.errors.ShapeError, "as many rows"),
        (lambda: mt.polyfit(V, A, 1), mt.errors.ShapeError, "has as many rows"),
        (lambda: mt.select([], []), mt.errors.ShapeError, "0 conditions for 0 choices"),
        (lambda: mt.rot90(A, axes=(0, 0)), mt.errors.ShapeError, "two different axes"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_positions_index():
    x = mt.asarray(SQUARE)
    for got, want in (
        (x[mt.ix_([0, 2], [1, 3])], SQUARE[np.ix_([0, 2], [1, 3])]),
        (x[mt.tril_indices(5)], SQUARE[np.tril_indices(5)]),
        (x[mt.diag_indices(5)], SQUARE[np.diag_indices(5)]),
    ):
        compare(got, want)


def test_what_writes_into_its_argument_is_explained():
    with pytest.raises(AttributeError, match=r"no attribute 'put': arrays are values, so write x\[i\] = v or x.at"):
        mt.put  # noqa: B018
