"""NumPy's functions and ufuncs on our arrays, watched, traced and sharded: ours where there is one, NumPy's for plain
values, else an error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special

import meshtape as mt
from meshtape.arrays.interface import numpy_protocol

sys.path.insert(0, str(Path(__file__).parent))
from test_numpy_names import CALLS, CUBE, SQUARE, A, B, C, Call, I, V, as_list

U = np.array([0.2, 0.4, 0.7])  # inside the domain of every function
N = np.array([3, 1, 2])

# ----- ufuncs ---------------------------------------------------------------------------------------------------------

UFUNCS = sorted({u.__name__: u for u in vars(np).values() if isinstance(u, np.ufunc)}.items())
LACKING_UFUNCS = {"bitwise_count", "frexp", "gcd", "isnat", "lcm", "spacing"}
OF_INTEGERS = {
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "invert",
    "left_shift",
    "right_shift",
    "bitwise_count",
    "gcd",
    "lcm",
}
MATRICES = {
    "matmul": (SQUARE, SQUARE),
    "matvec": (SQUARE, SQUARE[0]),
    "vecmat": (SQUARE[0], SQUARE),
    "vecdot": (SQUARE, SQUARE),
}


def operands(name: str) -> tuple[np.ndarray, ...]:
    ufunc = getattr(np, name)
    if name in MATRICES:
        return MATRICES[name]
    if name == "ldexp":
        return U, N
    if name == "arccosh":
        return (U + 1,)
    return (N, N + 1)[: ufunc.nin] if name in OF_INTEGERS else (U, U[::-1] + 0.05)[: ufunc.nin]


def same(got: Any, want: Any) -> None:
    got, want = as_list(got), as_list(want)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert isinstance(g, mt.Array) or not isinstance(w, np.ndarray)
        assert np.shape(g) == np.shape(w)
        assert not isinstance(g, mt.Array) or g.dtype == np.asarray(w).dtype
        np.testing.assert_allclose(np.asarray(g), w, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [n for n, _ in UFUNCS if n != "isnat"])
def test_ufuncs(name: str) -> None:
    ufunc, xs = getattr(np, name), operands(name)
    assert (ufunc in numpy_protocol.ufuncs()) == (name not in LACKING_UFUNCS)
    want = ufunc(*xs)
    for k in range(len(xs)):  # our array on either side of NumPy's
        same(ufunc(*(mt.asarray(x) if i == k else x for i, x in enumerate(xs))), want)
    ours = [mt.asarray(x) for x in xs]
    same(ufunc(*ours), want)
    if ufunc.nout == 1:
        out = np.empty_like(want)
        assert ufunc(*ours, out=out) is out
        np.testing.assert_allclose(out, want)
        held = mt.zeros(want.shape, dtype=want.dtype)
        assert ufunc(*ours, out=held) is held
        same(held, want)
        if ufunc.signature is None:
            mask = np.array([True, False, True])
            same(
                ufunc(*ours, where=mask, out=mt.ones(3, dtype=want.dtype)),
                ufunc(*xs, where=mask, out=np.ones(3, want.dtype)),
            )


@pytest.mark.parametrize("name", [n for n, u in UFUNCS if n not in LACKING_UFUNCS])
def test_ufuncs_on_watched_traced_and_sharded_arrays(name: str) -> None:
    ufunc, xs = getattr(np, name), operands(name)
    want = as_list(ufunc(*xs))
    same(mt.compile(lambda *xs: ufunc(*xs))(*map(mt.asarray, xs)), want)
    mesh = mt.Mesh({"m": 2})
    same(ufunc(*(mt.distribute(x, mesh, m=mt.Shard(0)) for x in xs)), want)
    if xs[0].dtype.kind == "f" and want[0].dtype.kind == "f":
        mine = mt.grad(lambda x: mt.sum(as_list(ufunc(x, *xs[1:]))[0]))(mt.asarray(xs[0]))
        same(
            mine,
            np.asarray(
                mt.grad(lambda x: mt.sum(as_list(numpy_protocol.ufuncs()[ufunc](x, *xs[1:]))[0]))(mt.asarray(xs[0]))
            ),
        )


@pytest.mark.parametrize("name", sorted(LACKING_UFUNCS - {"isnat"}))
def test_ufuncs_that_we_lack(name: str) -> None:
    ufunc, xs = getattr(np, name), operands(name)
    same(ufunc(*map(mt.asarray, xs)), as_list(ufunc(*xs)))
    with pytest.raises(mt.errors.TracedValueError, match=name):
        mt.compile(lambda *xs: ufunc(*xs))(*map(mt.asarray, xs))
    with pytest.raises(mt.errors.NumPyFunctionError, match=name):
        ufunc(*(mt.distribute(x, mt.Mesh({"m": 2}), m=mt.Shard(0)) for x in xs))
    if xs[0].dtype.kind == "f":
        with pytest.raises(mt.errors.GradientError, match=rf"{name}.*mt.stop_gradient"):
            mt.grad(lambda x: mt.sum(as_list(ufunc(x))[0]))(mt.asarray(xs[0]))


REDUCED = {"add": A, "multiply": A, "maximum": A, "minimum": A, "logical_and": A > 0, "logical_or": A > 1}


@pytest.mark.parametrize("name", sorted(REDUCED))
def test_reduce(name: str) -> None:
    reduce, x = getattr(np, name).reduce, REDUCED[name]
    for kwargs in ({}, {"axis": 1}, {"axis": None}, {"axis": (0, 1), "keepdims": True}):
        same(reduce(mt.asarray(x), **kwargs), np.asarray(reduce(x, **kwargs)))
        split = mt.distribute(x, mt.Mesh({"m": 2}), m=mt.Shard(0))
        same(reduce(split, **kwargs), np.asarray(reduce(x, **kwargs)))
    if x.dtype.kind == "f":
        mt.check_grads(lambda v: mt.sum(reduce(v, axis=1) * V[:4]), mt.asarray(x), order=1)


def test_other_methods_of_ufuncs() -> None:
    x, y = mt.asarray(A), mt.asarray(V)
    for ufunc in (np.add, np.multiply):
        same(ufunc.accumulate(x, axis=1), ufunc.accumulate(A, axis=1))
        same(ufunc.accumulate(x), ufunc.accumulate(A))
        mt.check_grads(lambda v, ufunc=ufunc: mt.sum(ufunc.accumulate(v) * V), y, order=1)
    same(np.maximum.accumulate(y), np.maximum.accumulate(V))  # through NumPy
    with pytest.raises(mt.errors.GradientError, match=r"maximum\.accumulate"):
        mt.grad(lambda v: mt.sum(np.maximum.accumulate(v)))(y)
    same(np.add.reduceat(y, [0, 2]), np.add.reduceat(V, [0, 2]))
    for ufunc in (np.add, np.multiply, np.arctan2, np.less):
        same(ufunc.outer(x, y), ufunc.outer(A, V))
        same(ufunc.outer(V, x), ufunc.outer(V, A))
    mt.check_grads(lambda v: mt.sum(np.multiply.outer(v, v) * np.outer(V, U[0] + V)), y, order=1)


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide", "power", "maximum", "minimum", "negative"])
def test_at(name: str) -> None:
    ufunc, key = getattr(np, name), np.array([0, 2, 0])
    values = () if ufunc.nin == 1 else (np.array([1.0, 2.0, 4.0]),)
    V = np.abs(A[0]) + 0.5
    want = V.copy()
    ufunc.at(want, [0, 2] if name == "negative" else key, *values)
    x = mt.asarray(V)
    assert ufunc.at(x, [0, 2] if name == "negative" else key, *values) is None
    same(x, want)
    if name != "negative":  # NumPy's memory, our values
        into = V.copy()
        ufunc.at(into, key, *map(mt.asarray, values))
        np.testing.assert_allclose(into, want)
        with pytest.raises(mt.errors.GradientError, match=name):
            mt.grad(lambda v: (ufunc.at(into, key, v), mt.sum(v))[1])(mt.asarray(values[0]))


def test_at_without_counterpart() -> None:
    x, want = mt.asarray(V), V.copy()
    np.hypot.at(x, [0, 0], 2.0)
    np.hypot.at(want, [0, 0], 2.0)
    same(x, want)
    with pytest.raises(mt.errors.GradientError, match=r"hypot\.at"):
        mt.grad(lambda v: (np.hypot.at(v, [0], 2.0), mt.sum(v))[1])(x)


def test_arguments_of_ufuncs() -> None:
    x = mt.asarray(N)
    same(np.add(x, 1, dtype="float32"), np.add(N, 1, dtype="float32"))
    with pytest.raises(mt.errors.DTypeError, match="int32"):
        np.add(mt.asarray(U), 1, dtype="int32")
    with pytest.raises(mt.errors.NumPyFunctionError, match="where"):
        np.add(x, 1, where=N > 1)
    with pytest.raises(mt.errors.NumPyFunctionError, match="casting"):
        np.add(x, 1, casting="unsafe")
    with pytest.raises(mt.errors.ShapeError):
        np.add(x, 1, out=mt.zeros(2))
    with pytest.raises(mt.errors.DTypeError):
        np.multiply(x, 0.5, out=mt.asarray(N))
    with pytest.raises(mt.errors.GradientError, match="stop_gradient"):
        mt.grad(lambda v: np.add(v, 1, out=np.zeros(3)).sum())(mt.asarray(U))
    total = np.zeros(3)
    total += mt.asarray(U)
    np.testing.assert_array_equal(total, U)
    quotient, rest = mt.zeros(3, dtype="int64"), np.zeros(3, int)
    np.divmod(x, 2, out=(quotient, rest))
    assert quotient.tolist() == (N // 2).tolist()
    assert rest.tolist() == (N % 2).tolist()
    # what is written into keeps its history
    same(mt.grad(lambda v: mt.sum(np.multiply(v, v, out=mt.zeros(3)) * v))(mt.asarray(U)), 3 * U**2)


def test_functions_of_scipy() -> None:
    x = mt.asarray(U)
    for ufunc in (scipy.special.erf, scipy.special.expit, scipy.special.log_expit):
        same(ufunc(x), ufunc(U))
        assert np.all(np.asarray(mt.grad(lambda v, f=ufunc: mt.sum(f(v)))(x)) > 0)
    same(scipy.special.gammaln(x), scipy.special.gammaln(U))
    with pytest.raises(mt.errors.GradientError, match="gammaln"):
        mt.grad(lambda v: mt.sum(scipy.special.gammaln(v)))(x)


class Foreign:
    """An array of another library, with protocols of its own."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> str:
        return f"theirs: {ufunc.__name__}"

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> str:
        return f"theirs: {func.__name__}"


def test_other_libraries_have_their_say() -> None:
    x = mt.asarray(U)
    assert np.add(x, Foreign()) == np.add(Foreign(), x) == "theirs: add"
    assert np.concatenate([x, Foreign()]) == "theirs: concatenate"
    masked = np.ma.masked_array(U, [False, True, False])
    with pytest.raises(TypeError):
        np.add(x, masked)  # the mask would be lost
    with pytest.raises(TypeError):
        np.concatenate([x, masked])


# ----- functions ------------------------------------------------------------------------------------------------------

SPD = SQUARE @ SQUARE.T
MORE = [
    *(Call(n, A > 0, only="cs") for n in ("all", "any", "count_nonzero")),
    *(Call(n, A, 1, only="cs") for n in ("argmin", "argsort")),
    *(Call(n, V, 2, only="") for n in ("partition", "argpartition")),
    Call("astype", A, np.float32),
    Call("bincount", N, only=""),
    Call("broadcast_arrays", A, V, only=""),
    Call("broadcast_to", V, (2, 6)),
    Call("can_cast", np.int8, np.int16, only=""),
    Call("clip", A, -0.5, 0.5),
    Call("clip", A, a_min=-0.5, a_max=None),
    Call("convolve", V, U),
    *(Call(n, A) for n in ("copy", "flip", "matrix_transpose", "gradient", "real", "zeros_like", "ones_like")),
    *(Call(n, C, only="cs") for n in ("real", "imag", "iscomplexobj", "isrealobj")),
    *(Call(n, V) for n in ("cumulative_sum", "cumulative_prod", "diag")),
    Call("einsum", "ij,j", A, V, only=""),
    Call("expand_dims", A, 1),
    Call("full_like", A, 2.0),
    Call("histogram", V, 3, only=""),
    Call("interp", U, np.sort(V), V, only="cs"),
    Call("isin", I, N, only="cs"),
    Call("meshgrid", V, U, only=""),
    Call("meshgrid", V, U, indexing="ij", only=""),
    Call("moveaxis", CUBE, 0, -1),
    *(Call(n, np.where(A > 1, np.nan, A), 1, only="c") for n in ("nanmax", "nanmin", "nanmean", "nanprod", "nanstd", "nansum", "nanvar")),
    Call("nonzero", I, only=""),
    Call("percentile", A, 30, 0),
    Call("reshape", A, (3, 8)),
    Call("reshape", A, (3, 8), copy=True),
    Call("result_type", A, np.float32, only=""),
    Call("searchsorted", np.sort(V), U, only=""),
    Call("take_along_axis", A, I % 4, 0, only="c"),
    Call("tensordot", A, B, ([0, 1], [0, 1])),
    Call("tile", A, (2, 1)),
    Call("triu", A, 1),
    *(Call(n, np.sort(I.ravel()), only="") for n in ("unique_inverse", "unique_all")),
    Call("unstack", A, axis=1, only="c"),
    Call("where", A > 0, A, B, only="cs"),
    Call("where", I > 2, only=""),
    *(Call(f"fft.{n}", A, only="cs") for n in ("fft", "ifft", "fftn", "ifftn", "rfft", "rfftn", "ihfft", "fftshift", "ifftshift")),
    *(Call(f"fft.{n}", C, only="cs") for n in ("irfft", "irfftn", "hfft")),
    Call("fft.fft", A, 4, 0, "ortho", only="c"),
    *(Call(f"linalg.{n}", SPD) for n in ("cholesky", "det", "inv", "pinv", "slogdet", "eigvalsh")),
    *(Call(f"linalg.{n}", SPD, only="") for n in ("eigh", "svdvals", "matrix_rank")),
    Call("linalg.svd", SQUARE, compute_uv=False),
    Call("linalg.matrix_power", SPD, 3),
    *(Call(f"linalg.{n}", SQUARE) for n in ("diagonal", "trace", "matrix_transpose", "matrix_norm", "vector_norm")),
    *(Call(f"linalg.{n}", SQUARE, SPD) for n in ("matmul", "solve", "vecdot", "tensordot")),
    Call("linalg.outer", V, U),
    Call("linalg.cross", A[:, :3], B[:, :3]),
    Call("lib.stride_tricks.sliding_window_view", A, (3, 2), (0, 0), only="cs"),
]  # fmt: skip
# (Values that are no array, vectors with free signs, and uninitialized memory are compared below.)
BELOW = {
    np.empty_like,
    np.roots,
    np.unique_values,
    np.unique_counts,
    np.linalg.qr,
    np.linalg.svd,
    np.linalg.eig,
    np.linalg.eigvals,
    np.linalg.lstsq,
    np.lexsort,
}


def of_numpy(call: Call) -> Callable[..., Any] | None:
    fn: Any = np
    for part in call.name.split("."):
        fn = getattr(fn, part, None)
    return fn if fn in numpy_protocol.functions() else None


WALKED = [c for c in (*CALLS, *MORE) if of_numpy(c)]


def with_arrays(call: Call, make: Callable[[np.ndarray], Any]) -> Any:
    """The call of NumPy's function with ``make(a)`` for each array of the first argument."""
    first = call.args[0]
    if isinstance(first, list | tuple) and first and isinstance(first[0], np.ndarray):
        first = type(first)(make(a) if isinstance(a, np.ndarray) else a for a in first)
    elif isinstance(first, np.ndarray):
        first = make(first)
    rest = call.args[1:]
    if call.name in ("einsum", "meshgrid", "ix_", "broadcast_arrays"):
        rest = tuple(make(a) if isinstance(a, np.ndarray) else a for a in rest)
    return call.of(np, first, *rest)


def arrays(call: Call) -> Iterator[np.ndarray]:
    first = call.args[0]
    yield from (a for a in (first if isinstance(first, list | tuple) else [first]) if isinstance(a, np.ndarray))


def test_every_function_of_numpy_is_walked() -> None:
    seen = {of_numpy(c) for c in WALKED} | BELOW
    assert set(numpy_protocol.functions()) <= seen, sorted(f.__name__ for f in set(numpy_protocol.functions()) - seen)


@pytest.mark.parametrize("call", WALKED, ids=[f"{i}-{c}" for i, c in enumerate(WALKED)])
def test_functions(call: Call) -> None:
    with np.errstate(all="ignore"):
        want = call.of(np)
        got = with_arrays(call, mt.asarray)
        if next(arrays(call), None) is None or not any(isinstance(w, np.ndarray | np.generic) for w in as_list(want)):
            np.testing.assert_equal(got, want)
            return
        same(got, [np.asarray(w) if isinstance(w, np.generic) else w for w in as_list(want)])
        if "c" in call.only:
            found = list(arrays(call))

            def again(*xs: Any) -> Any:
                rest = iter(xs)
                return with_arrays(call, lambda a: next(rest))

            same(mt.compile(again)(*map(mt.asarray, found)), got)
        if "s" in call.only:
            mesh = mt.Mesh({"m": 2})
            split = with_arrays(call, lambda a: mt.distribute(a, mesh, m=mt.Shard(0)) if a.ndim else mt.asarray(a))
            same(split, got)


def total(out: Any) -> mt.Array:
    return sum(mt.sum(o * np.cos(np.arange(o.size)).reshape(o.shape)) for o in as_list(out) if o.dtype.kind == "f")


@pytest.mark.parametrize("call", [c for c in WALKED if "g" in c.only and next(arrays(c), None) is not None], ids=str)
def test_gradients_of_functions(call: Call) -> None:
    x = next(arrays(call))

    def through(namespace: Any) -> Callable[[Any], Any]:
        def fn(v: Any) -> Any:
            put = iter([v])
            first = call.args[0]
            first = [next(put, a) for a in first] if isinstance(first, list | tuple) else v
            return total(call.of(namespace, first, *call.args[1:]))

        return fn

    if any(k in call.kwargs for k in ("a_min", "compute_uv")):
        mt.check_grads(through(np), mt.asarray(x), order=1)
    else:
        same(mt.grad(through(np))(mt.asarray(x)), np.asarray(mt.grad(through(mt))(mt.asarray(x))))


def test_factors_of_matrices() -> None:
    x = mt.asarray(SQUARE)
    with pytest.raises(mt.errors.NumPyFunctionError, match=r"compute_uv=: mt\.linalg\.svdvals\(x\) gives"):
        mt.linalg.svd(x, compute_uv=False)
    q, r = np.linalg.qr(x)
    np.testing.assert_allclose(np.asarray(q @ r), SQUARE)
    u, s, vh = np.linalg.svd(x)
    np.testing.assert_allclose(np.asarray(u * s @ vh), SQUARE)
    w, v = np.linalg.eig(x)
    np.testing.assert_allclose(np.asarray(v * w @ mt.linalg.inv(v)).real, SQUARE)
    np.testing.assert_allclose(np.sort(np.asarray(np.linalg.eigvals(x))), np.sort(np.linalg.eigvals(SQUARE)))
    same(np.linalg.lstsq(x, mt.asarray(SQUARE[0]))[0], np.linalg.lstsq(SQUARE, SQUARE[0])[0])
    same(np.lexsort((mt.asarray(N), mt.asarray(U))), np.lexsort((N, U)))
    assert np.empty_like(x, dtype=np.float32).dtype == np.float32
    np.testing.assert_allclose(np.asarray(np.roots(mt.asarray(V[:3]))), np.roots(V[:3]))  # ours are complex always
    for fn in (np.unique_values, lambda a: np.unique_counts(a)[0]):  # NumPy's come in no order
        assert sorted(fn(mt.asarray(I)).tolist()) == sorted(fn(I).tolist())


# NumPy's functions that hand their call over, and that we lack.
LACKING = sorted(
    n
    for n, f in vars(np).items()
    if hasattr(f, "_implementation") and not n.startswith("_") and f not in numpy_protocol.functions()
)


def test_functions_that_we_lack() -> None:
    x = mt.asarray(V)
    assert "trim_zeros" in LACKING
    assert "histogramdd" in LACKING
    same(np.trim_zeros(mt.asarray(np.array([0.0, 1.0, 0.0]))), np.array([1.0]))
    same(np.packbits(mt.asarray(A > 0)), np.packbits(A > 0))
    same(np.apply_along_axis(np.sort, 0, mt.asarray(A)), np.sort(A, 0))
    same(np.histogramdd(mt.asarray(A[:, :2]), 2)[0], np.histogramdd(A[:, :2], 2)[0])
    with pytest.raises(mt.errors.GradientError, match=r"trim_zeros.*mt\.stop_gradient"):
        mt.grad(lambda v: mt.sum(np.trim_zeros(v)))(x)
    same(mt.grad(lambda v: mt.sum(v * np.trim_zeros(mt.stop_gradient(v))))(x), V)
    with pytest.raises(mt.errors.TracedValueError, match="trim_zeros"):
        mt.compile(np.trim_zeros)(x)
    with pytest.raises(mt.errors.NumPyFunctionError, match="trim_zeros"):
        np.trim_zeros(mt.distribute(V, mt.Mesh({"m": 2}), m=mt.Shard(0)))


def test_functions_that_write() -> None:
    x = mt.asarray(V)
    for call in (
        lambda: np.copyto(x, 0),
        lambda: np.put(x, [0], 1),
        lambda: np.putmask(x, V > 0, 0),
        lambda: np.place(x, V > 0, [0]),
    ):
        with pytest.raises(mt.errors.NumPyFunctionError, match=r"x\.at\[i\]"):
            call()
    with pytest.raises(mt.errors.NumPyFunctionError, match=r"x\.at\[i\]"):
        np.fill_diagonal(mt.eye(2), 3)
    host = np.zeros(6)
    np.copyto(host, x)
    np.testing.assert_array_equal(host, V)
    with pytest.raises(mt.errors.GradientError, match="copyto"):
        mt.grad(lambda v: (np.copyto(host, v), mt.sum(v))[1])(x)
    same(x, V)


def test_arguments_of_functions() -> None:
    x = mt.asarray(A)
    out = np.empty(6)
    assert np.sum(x, axis=0, out=out) is out
    np.testing.assert_allclose(out, A.sum(0))
    held = mt.zeros(4)
    assert np.mean(x, 1, out=held) is held
    same(held, A.mean(1))
    same(np.sum(x, 0, None, None, True), A.sum(0, keepdims=True))
    same(np.sort(x, kind="stable"), np.sort(A))
    same(np.nanmedian(x, overwrite_input=True), np.asarray(np.nanmedian(A)))
    same(np.ravel(x, order="C"), A.ravel())
    same(np.ravel(x, order="F"), A.ravel(order="F"))
    same(np.sum(x, axis=0, where=A > 0, initial=2.0), np.sum(A, axis=0, where=A > 0, initial=2.0))
    with pytest.raises(mt.errors.NumPyFunctionError, match=r"numpy\.linalg\.eigh.*UPLO="):
        np.linalg.eigh(mt.eye(2), UPLO="U")
    with pytest.raises(mt.errors.NumPyFunctionError, match=r"numpy\.linspace.*retstep="):
        np.linspace(mt.asarray(0.0), 1, 3, retstep=True)
    with pytest.raises(mt.errors.ShapeError, match=r"out="):
        np.sum(x, axis=0, out=np.empty(5))
    assert np.array_repr(x) == np.array_repr(A)
    assert np.shares_memory(np.asarray(x), x)


@pytest.mark.parametrize("op", ["+", "-", "*", "/", "//", "%", "**", "==", "!=", "<", "<=", ">", ">=", "@"])
def test_operators_beside_numpy_arrays(op: str) -> None:
    x, y = np.abs(SQUARE) + 0.5, np.abs(SQUARE.T) + 0.7
    import operator as o

    fn = dict(zip(["+", "-", "*", "/", "//", "%", "**", "==", "!=", "<", "<=", ">", ">=", "@"], (o.add, o.sub, o.mul, o.truediv, o.floordiv, o.mod, o.pow, o.eq, o.ne, o.lt, o.le, o.gt, o.ge, o.matmul), strict=True))[op]  # fmt: skip
    want = fn(x, y)
    mesh = mt.Mesh({"m": 2})
    for mine in (mt.asarray, lambda a: mt.distribute(a, mesh, m=mt.Shard(0))):
        same(fn(mine(x), y), want)
        same(fn(x, mine(y)), want)
    same(mt.compile(lambda a: fn(x, a))(mt.asarray(y)), want)
    if op != "@":
        same(fn(mt.asarray(x), np.float64(1.5)), fn(x, 1.5))
        same(fn(np.float64(1.5), mt.asarray(x)), fn(1.5, x))
    if want.dtype.kind == "f" and op not in ("//",):
        mt.check_grads(lambda a: mt.sum(fn(x, a)), mt.asarray(y), order=1)


# ----- values that leave ----------------------------------------------------------------------------------------------

LEAVING: dict[str, Callable[[mt.Array], Any]] = {
    "np.asarray": np.asarray,
    "np.array": np.array,
    "numpy()": lambda x: x.numpy(),
    "to_numpy()": lambda x: x.to_numpy(),
    "from_dlpack": np.from_dlpack,
    "to_dask()": lambda x: x.to_dask(),
    "pickle": lambda x: __import__("pickle").dumps(x),
    "pandas": lambda x: __import__("pandas").Series(x),
    "xarray": lambda x: __import__("xarray").DataArray(x, dims="i", coords={"i": [0, 1, 2]}).interp(i=[0.5, 1.5]).values,
    "scipy": lambda x: __import__("scipy.linalg").linalg.norm(x),
    "np.random": lambda x: np.random.default_rng(0).permutation(x),  # no ufunc, no function of NumPy's protocols
    "np.testing": lambda x: np.testing.assert_allclose(x, x),
    "out=": lambda x: np.add(x, 1, out=np.zeros(3)),
    "item by item": lambda x: np.fromiter(x, float),
}  # fmt: skip


@pytest.mark.parametrize("way", sorted(set(LEAVING) - {"np.testing", "item by item"}))
def test_values_do_not_leave_a_gradient_in_silence(way: str) -> None:
    x = mt.asarray(U)
    if way in ("pandas", "xarray"):
        pytest.importorskip(way)
    LEAVING[way](x)  # plain values leave
    with pytest.raises(mt.errors.GradientError, match=r"mt\.stop_gradient\(x\)"):
        mt.grad(lambda v: (LEAVING[way](v * 2), mt.sum(v))[1])(x)
    mt.grad(lambda v: (LEAVING[way](mt.stop_gradient(v)), mt.sum(v))[1])(x)
    with mt.Tape() as tape:
        tape.watch(x)
        with pytest.raises(mt.errors.GradientError):
            LEAVING[way](x)
        with mt.no_grad():
            LEAVING[way](x)
    LEAVING[way](x)


def test_looking_at_watched_values_is_allowed() -> None:
    seen: list[Any] = []

    def loss(v: mt.Array) -> mt.Array:
        seen.extend(
            [
                float(v[0]),
                int(v[0]),
                bool(v[0]),
                v[0].item(),
                v.tolist(),
                f"{v[0]:.2f}",
                repr(v),
                str(v),
                np.array_str(v),
                len(v),
                v.shape,
            ]
        )
        return mt.sum(v * v)

    same(mt.grad(loss)(mt.asarray(U)), 2 * U)
    assert seen[0] == 0.2
