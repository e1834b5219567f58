"""What ops give where CuPy computes: the dtypes of their shape rules, and errors where there is no result.

A namespace called ``cupy`` computes with NumPy, and does what the real one (14.2) does otherwise: results of bfloat16
are float32, stacks of bfloat16 matrices are refused, failures of cuSOLVER are silent unless asked for, stacks of
``solve`` must be alike, ``where`` takes no Python bool.
"""

from __future__ import annotations

import contextlib
import sys
import types

import numpy as np
import pytest
from op_samples import SAMPLES, WIDE, calls, recast

from meshtape import arrays as mt
from meshtape.arrays.core import errors
from meshtape.arrays.core.index_template import numpy_key
from meshtape.arrays.core.op import OPS, ShapeDtype
from meshtape.arrays.indexing import keys
from meshtape.autodiff.rules import elementwise as elementwise_rules
from meshtape.autodiff.rules import structure

BF16 = np.dtype(mt.bfloat16)
KEEPS_DTYPE = {
    *(
        "array",
        "asarray",
        "ascontiguousarray",
        "astype",
        "broadcast_to",
        "concat",
        "concatenate",
        "empty",
        "empty_like",
    ),
    *(
        "expand_dims",
        "flip",
        "full",
        "matrix_transpose",
        "moveaxis",
        "pad",
        "permute_dims",
        "repeat",
        "reshape",
        "roll",
    ),
    *("squeeze", "stack", "swapaxes", "take", "take_along_axis", "tile", "transpose", "unstack", "zeros", "zeros_like"),
    *("result_type", "dtype", "sort", "diagonal", "lexsort", "split"),
}
LINALG = types.SimpleNamespace(state="ignore")


def as_cupy_gives(out):
    if isinstance(out, tuple | list):
        return type(out)(map(as_cupy_gives, out)) if type(out) in (tuple, list) else out
    return out.astype(np.float32) if getattr(out, "dtype", None) == BF16 else out


class Solvers:
    """``cupy.linalg``."""

    def __getattr__(self, name):
        fn = getattr(np.linalg, name)

        def run(*args, **kwargs):
            if name == "solve" and args[0].shape[:-1] != args[1].shape[:-1]:
                raise ValueError("a must have (..., M, M) shape and b must have (..., M, K) for multidimensional b")
            try:
                return fn(*args, **kwargs)
            except np.linalg.LinAlgError as e:
                if LINALG.state == "raise":
                    raise np.linalg.LinAlgError("Error reported by getrf in cuSOLVER. devInfo = [1].") from e
                return np.full_like(args[-1], 7.0)

        return run


class CuPy(types.ModuleType):
    ndarray = np.ndarray
    linalg = Solvers()

    def __getattr__(self, name):
        fn = getattr(np, name)
        if not callable(fn) or isinstance(fn, type) or name in KEEPS_DTYPE:
            return fn
        return lambda *args, **kwargs: as_cupy_gives(fn(*args, **kwargs))

    def where(self, condition, *rest):
        if isinstance(condition, bool):
            raise AttributeError("'bool' object has no attribute 'dtype'")  # noqa: TRY004  as CuPy does
        return as_cupy_gives(np.where(condition, *rest))

    def matmul(self, x, y, out=None):
        if x.dtype == BF16 and max(x.ndim, y.ndim) > 2:
            raise TypeError("data type 'E' not understood")
        return (
            np.matmul(x.astype(np.float32), y.astype(np.float32)).astype(BF16)
            if x.dtype == BF16
            else np.matmul(x, y, out=out)
        )


@contextlib.contextmanager
def errstate(linalg):
    before, LINALG.state = LINALG.state, linalg
    try:
        yield
    finally:
        LINALG.state = before


@pytest.fixture
def cupy(monkeypatch):
    companion = types.ModuleType("cupyx")
    companion.errstate = errstate
    special = types.ModuleType("cupyx.scipy.special")
    special.erf = lambda x: as_cupy_gives(OPS["erf"].numpy(x))
    xp = CuPy("cupy")
    for name, module in (("cupy", xp), ("cupyx", companion), ("cupyx.scipy", types.ModuleType("cupyx.scipy"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "cupyx.scipy.special", special)
    held = {op: op._bound.pop("cupy", None) for op in OPS.values()}
    yield xp
    for op, fn in held.items():
        op._bound.pop("cupy", None)
        if fn is not None:
            op._bound["cupy"] = fn


def in_bfloat16(args):
    """Floats in bfloat16; None where nothing is floating, or is complex."""
    kinds = {a.dtype.kind for a in args if isinstance(a, np.ndarray)}
    if "f" not in kinds or "c" in kinds:
        return None
    return tuple(recast(a, BF16) for a in args)


@pytest.mark.parametrize(
    "name",
    sorted(
        n
        for n in SAMPLES
        # Those of attention and of the fused cross-entropy go through our kernel of softmax.
        if "cupy" not in OPS[n].overrides
        and n not in WIDE
        and not any(part in n for part in ("random", "attention", "linear_cross_entropy"))
    ),
)
def test_bfloat16_stays_bfloat16(name, cupy):
    op = OPS[name]
    for args, params in calls(name):
        cast = in_bfloat16(args)
        if cast is None:
            continue
        try:
            avals = op.avals(
                tuple(ShapeDtype(a.shape, a.dtype) if isinstance(a, np.ndarray) else a for a in cast), params
            )
            op.numpy(*cast, **params)
        except TypeError:  # an op that takes no bfloat16 anywhere
            continue
        with np.errstate(all="ignore"):
            for _ in range(2):  # with and without the rule looked up before
                out = op.bind(cupy)(*cast, **params)
                outs = out if op.nout > 1 else (out,)
                assert [(np.shape(o), o.dtype) for o in outs] == [(a.shape, a.dtype) for a in avals]


@pytest.mark.parametrize("name", ["where", "round", "maximum", "minimum", "relu"])
def test_values_of_bfloat16_are_those_of_the_cpu(name, cupy):
    for args, params in calls(name):
        cast = in_bfloat16(args)
        if cast is not None:
            got, want = OPS[name].bind(cupy)(*cast, **params), OPS[name].numpy(*cast, **params)
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got.astype(float), np.asarray(want).astype(float), rtol=0.01)


# ----- dtypes that CuPy takes and NumPy does not, and the other way around --------------------------------------------


@pytest.mark.parametrize("name", ["atan2", "hypot", "copysign", "nextafter"])
def test_imaginary_parts_are_not_dropped(name, cupy, monkeypatch):
    monkeypatch.setattr(OPS[name], "impl", lambda xp, x, y: getattr(np, name, np.arctan2)(x.real, y.real))
    with pytest.raises(errors.DTypeError, match=name):
        OPS[name].bind(cupy)(np.ones(2, complex), np.ones(2, complex))


def test_signs_of_truths_are_refused(cupy, monkeypatch):
    monkeypatch.setattr(OPS["sign"], "impl", lambda xp, x: x)
    with pytest.raises(errors.DTypeError, match="sign"):
        OPS["sign"].bind(cupy)(np.ones(2, bool))


def test_the_error_function_of_complex_numbers_says_where_it_is(cupy):
    with pytest.raises(errors.DTypeError, match=r"erf.*complex128.*to_device"):
        OPS["erf"].bind(cupy)(np.ones(2, complex))


@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_xor", "logical_not"])
def test_complex_truths(name, cupy, monkeypatch):
    def refuses(*xs):
        assert not any(x.dtype.kind == "c" for x in xs if hasattr(x, "dtype"))
        return getattr(np, name)(*xs)

    monkeypatch.setattr(CuPy, name, staticmethod(refuses), raising=False)
    x = np.array([0, 1j, 1.0, 0])
    args = (x,) if name == "logical_not" else (x, np.array([1j, 0, 1, 0]))
    np.testing.assert_array_equal(OPS[name].bind(cupy)(*args), getattr(np, name)(*args))


COMPOSED = [n for n in SAMPLES if getattr(OPS[n].overrides.get("cupy"), "for_floats", False)]
REAL = {"attention", "attention_backward"}  # which no complex numbers are given to


@pytest.mark.parametrize("name", sorted({*COMPOSED} - REAL))
def test_dtypes_without_a_kernel_are_composed(name, cupy):
    op = OPS[name]
    for args, params in calls(name):
        cast = tuple(a.astype(np.complex64) if isinstance(a, np.ndarray) and a.dtype.kind == "f" else a for a in args)
        if not any(isinstance(a, np.ndarray) and a.dtype.kind == "c" for a in cast):
            continue
        with np.errstate(all="ignore"):
            want = op.numpy(*cast, **params)
            got = op.bind(cupy)(*cast, **params)
        for g, w in zip(got if op.nout > 1 else (got,), want if op.nout > 1 else (want,), strict=True):
            assert g.dtype == w.dtype
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


def test_every_kernel_of_rows_says_which_dtypes_it_takes():
    assert {"softmax", "cross_entropy", "layer_norm", "rms_norm", "group_norm", "batch_norm"} <= set(COMPOSED)


# ----- products -------------------------------------------------------------------------------------------------------

PRODUCTS = [((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((5, 2, 3), (3,)), ((3,), (5, 3, 2)), ((1, 2, 3), (5, 3, 4)), ((2, 3), (5, 3, 4)),
            ((4, 0, 3), (3, 2)), ((4, 2, 0), (0, 2)), ((2, 5, 2, 3), (5, 3, 1)), ((3,), (3,))]  # fmt: skip


@pytest.mark.parametrize(("left", "right"), PRODUCTS)
def test_products_of_stacks_of_bfloat16(left, right, cupy):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=left).astype(BF16), rng.normal(size=right).astype(BF16)
    got = OPS["matmul"].bind(cupy)(x, y)
    want = np.matmul(x.astype(np.float32), y.astype(np.float32))
    assert (got.dtype, np.shape(got)) == (BF16, want.shape)
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("left", "right"), [p for p in PRODUCTS if len(p[0]) > 1 or len(p[1]) > 1])
def test_derivatives_of_products_of_stacks_of_bfloat16(left, right, cupy):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=left).astype(BF16), rng.normal(size=right).astype(BF16)
    g = np.matmul(x.astype(np.float32), y.astype(np.float32)).astype(BF16)
    structure._matmul_x(cupy, g, y, ShapeDtype(x.shape, x.dtype))
    structure._matmul_y(cupy, g, x, ShapeDtype(y.shape, y.dtype))


# ----- linear algebra -------------------------------------------------------------------------------------------------

SINGULAR = np.ones((2, 2))
FAILING = {"inv": (SINGULAR,), "solve": (SINGULAR, np.ones((2, 1))), "cholesky": (-np.eye(2),)}


@pytest.mark.parametrize("stack", [(), (3,), (2, 2)])
@pytest.mark.parametrize("name", FAILING)
def test_singular_matrices_raise(name, stack, cupy):
    args = [np.broadcast_to(a, (*stack, *a.shape)) for a in FAILING[name]]
    with pytest.raises(errors.LinAlgError, match=rf"\[{name}\].*(Singular|positive definite)"):
        OPS[name].bind(cupy)(*args)
    assert LINALG.state == "ignore"
    good = [np.eye(2) if a.shape == (2, 2) else a for a in FAILING[name]]
    np.testing.assert_array_equal(OPS[name].bind(cupy)(*good), OPS[name].numpy(*good))


@pytest.mark.parametrize("name", ["eigh", "eigvalsh", "svd", "svdvals", "qr", "pinv", "eig", "eigvals"])
def test_iterations_that_do_not_converge_raise(name, cupy, monkeypatch):
    def fails(*args, **kwargs):
        if LINALG.state == "raise":
            raise np.linalg.LinAlgError("devInfo = [2]")
        raise AssertionError("nobody looks")

    monkeypatch.setattr(Solvers, "__getattr__", lambda self, name: fails)
    params = calls(name)[0][1]
    with pytest.raises(errors.LinAlgError, match="found no result"):
        OPS[name].bind(cupy)(np.ones((2, 2)), **params)


@pytest.mark.parametrize("name", ["det", "slogdet"])
def test_singular_matrices_have_determinants(name, cupy):
    got, want = OPS[name].bind(cupy)(SINGULAR), OPS[name].numpy(SINGULAR)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("a", "b"),
    [((2, 3, 3), (3, 2)), ((3, 3), (2, 3, 1)), ((2, 1, 3, 3), (4, 3, 2)), ((0, 3, 3), (3, 2)), ((2, 0, 0), (0, 3))],
)
def test_stacks_of_equations_broadcast(a, b, cupy):
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=a) + 3 * np.eye(a[-1]), rng.normal(size=b)
    got, want = OPS["solve"].bind(cupy)(left, right), np.linalg.solve(left, right)
    assert (np.shape(got), got.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(got, want)


# ----- the rest -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [2.0, 0.0, 1, 3, True, -2.0])
def test_powers_of_a_number(base, cupy):
    y = np.array([1.0, 2.0, 3.0], np.float32)
    with np.errstate(all="ignore"):
        got = elementwise_rules._pow_y(cupy, np.ones(3, np.float32), base, np.float32(base) ** y)
        want = np.zeros(3) if base == 0 else float(base) ** y * np.log(float(base))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-6)


class OnDevice:
    """An index array of CuPy's, as far as it is asked."""

    def __init__(self, a):
        self.a, self.dtype = a, a.dtype

    def astype(self, dtype, copy=True):
        return self.a.astype(dtype, copy=copy)


@pytest.mark.parametrize("dtype", "bBhHiIlL")
def test_short_indices_do_not_overflow_on_a_device(dtype):
    (key,) = numpy_key((keys.Slot(0),), [OnDevice(np.array([1, 2], dtype))])
    assert key.dtype == np.int64
    index = types.SimpleNamespace(_buf=np.array([1, 2], dtype), dtype=np.dtype(dtype), size=2)
    assert keys._wrapped(index, 0, 100000).tolist() == [1, 2]
