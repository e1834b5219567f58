"""Every kernel in C against the NumPy form of its op: values, NaN and infinities, and what the kernels leave to NumPy.

Where the kernels are not built these tests are skipped; the tests of the wheel run them on one that has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape.arrays import native
from meshtape.arrays.backends import threads
from meshtape.arrays.core.op import OPS, Op, ShapeDtype
from meshtape.arrays.native import copies, ops
from meshtape.arrays.nn.softmax import softmax_of_rows
from meshtape.storage.blending import methods

pytestmark = pytest.mark.skipif(not native.AVAILABLE, reason="the kernels in C are not built here")

NORM = {"naxes": 1, "eps": 1e-5}
MASKED = {"axis": "last", "masked": True}
PLAIN = {"axis": "last", "masked": False}
ALONG = {"axis": "last"}
LABELS = {"ignore_index": 1, "label_smoothing": 0.1}
SHARP = {"ignore_index": None, "label_smoothing": 0.0}

# Operands: x and g are rows, y rows of probabilities, z of their logarithms; w and b are one row, s is one number a
# row, t the shift of one and u its sum.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "layer_norm": ("layer_norm", "xwb", NORM),
    "layer_norm_backward": ("layer_norm_backward", "gxw", NORM),
    "rms_norm": ("rms_norm", "xw", NORM),
    "rms_norm_backward": ("rms_norm_backward", "gxw", NORM),
    "softmax": ("softmax", "x", PLAIN),
    "softmax, masked": ("softmax", "x", MASKED),
    "softmax_backward": ("softmax_backward", "gy", ALONG),
    "log_softmax": ("log_softmax", "x", PLAIN),
    "log_softmax, masked": ("log_softmax", "x", MASKED),
    "log_softmax_backward": ("log_softmax_backward", "gz", ALONG),
    "cross_entropy": ("cross_entropy", "xl", SHARP),
    "cross_entropy, smoothed": ("cross_entropy", "xl", LABELS),
    "cross_entropy_backward": ("cross_entropy_backward", "sxltu", SHARP),
    "cross_entropy_backward, smoothed": ("cross_entropy_backward", "sxltu", LABELS),
    "gelu": ("gelu", "x", {}),
    "gelu_backward": ("gelu_backward", "gx", {}),
    "sigmoid": ("sigmoid", "x", {}),
    "silu": ("silu", "x", {}),
    "swiglu": ("swiglu", "xg", {}),
    "swiglu_backward": ("swiglu_backward", "gxg", {}),
}
DTYPES = [np.float32, np.float64]
ODD = [0.0, -0.0, 1e-45, 1e-38, -1.0, 1.0, 3.5, -87.5, 88.5, 1e30, -1e30, math.inf, -math.inf, math.nan]


def operands(
    letters: str, rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, offset: float = 0
) -> list[Any]:
    made: dict[str, Callable[[], Any]] = {
        "x": lambda: rng.standard_normal(shape) * 3 + offset,
        "g": lambda: rng.standard_normal(shape),
        "y": lambda: rng.uniform(0, 1, shape),
        "z": lambda: -rng.uniform(0, 9, shape),
        "w": lambda: rng.standard_normal(shape[-1]),
        "b": lambda: rng.standard_normal(shape[-1]),
        "s": lambda: rng.standard_normal(shape[:-1]),
        "t": lambda: rng.uniform(2, 9, shape[:-1]) + offset,
        "u": lambda: rng.uniform(1, 9, shape[:-1]),
    }
    # Labels that are no classes are among them.
    return [rng.integers(-1, shape[-1] + 1, shape[:-1]) if k == "l" else np.asarray(made[k](), dtype) for k in letters]


def placed(params: dict[str, Any], args: list[Any]) -> dict[str, Any]:
    return params | {"axis": args[0].ndim - 1} if "axis" in params else params


def both(op: Op, args: list[Any], params: dict[str, Any], **wide: Any) -> tuple[list[Any], list[Any]]:
    """What the kernel gives, which must take the operands, and what the NumPy form gives, in another dtype if one is
    given."""
    fn, params = getattr(ops, op.name), placed(params, args)
    got = fn(*args, **params)
    assert got is not NotImplemented
    dtype = wide.get("dtype")
    if dtype is not None:
        args = [a.astype(dtype) if a.dtype.kind == "f" else a for a in args]
    with np.errstate(all="ignore"):
        expected = op.impl(np, *args, **params)
    return (list(got), list(expected)) if op.nout > 1 else ([got], [expected])


def check(got: np.ndarray, expected: np.ndarray, rtol: float, *beside: np.ndarray) -> None:
    """The same to rounding: of the results, and of numbers ``beside`` them that they are differences of."""
    assert got.shape == expected.shape
    # Rows without deviations are multiplied by 300, one over the root of eps, and so is their rounding.
    largest = max(10.0, *[float(np.abs(a[np.isfinite(a)]).max(initial=0)) for a in (expected, *beside)])
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=rtol * largest)


# Rules that a kernel stands before, by what NumPy computes.
SLOPES: dict[str, Callable[[Any, Any], Any]] = {
    "tanh_backward": lambda g, y: g * ((1.0 - y) * (1.0 + y)),
    "sigmoid_backward": lambda g, y: g * (y * (1.0 - y)),
    "relu_backward": lambda g, y: np.where(y > 0, g, np.where(y == y, 0.0, y)),
}


def test_every_kernel_is_tested() -> None:
    ours = {op for op, _, _ in CASES.values()} - {"silu"} | set(SLOPES) | {"where", "add_product", "softmax_of_rows"}
    ours |= {"rotary_embedding", "power", "group_norm", "group_norm_backward", "cumulative_prod_backward"}
    assert ours == set(native._kernels.KERNELS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_kernel_is_the_numpy_form(name: str, dtype: Any, data: st.DataObject) -> None:
    op, letters, params = CASES[name]
    lead = tuple(data.draw(st.lists(st.integers(0, 9), max_size=2), label="rows"))
    # Shorter than the lanes, longer, and not a multiple of them.
    width = data.draw(st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 1000])), label="width")
    offset = data.draw(st.sampled_from([0.0, 0.0, 50.0, -1e4, 1e6]), label="offset")
    if "gelu" in name or "rms" in name:
        offset = min(abs(offset), 50.0)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    args = operands(letters, rng, (*lead, width), dtype, offset)
    found, wanted = both(OPS[op], args, params, dtype=np.float64)
    avals = OPS[op].avals(tuple(ShapeDtype(a.shape, a.dtype) for a in args), placed(params, args))
    assert [g.dtype for g in found] == [a.dtype for a in avals]
    for got, expected in zip(found, wanted, strict=True):
        check(got, expected, 2e-5 if dtype == np.float32 else 1e-10 if offset else 1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_odd_numbers_mean_what_they_mean_in_numpy(name: str, dtype: Any, data: st.DataObject) -> None:
    op, letters, params = CASES[name]
    width = data.draw(st.sampled_from([1, 3, 16, 33, 65]), label="width")
    rng = np.random.default_rng(0)
    args = operands(letters, rng, (3, width), dtype)
    for k, a in zip(letters, args, strict=True):
        if k in "xgyzs":
            with np.errstate(over="ignore"):
                values = np.asarray(data.draw(st.lists(st.sampled_from(ODD), min_size=1, max_size=4), label=k)).astype(
                    dtype
                )
            places = rng.choice(a.size, min(a.size, len(values)), replace=False)
            a.reshape(-1)[places] = values[: len(places)]
    found, wanted = both(OPS[op], args, params)
    if op == "cross_entropy":  # the shift of a row whose sum is NaN has no say
        for x in (found, wanted):
            x[1][np.isnan(x[2])] = 0
    for got, expected in zip(found, wanted, strict=True):
        check(got, expected, 1e-4 if dtype == np.float32 else 1e-10, *args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [n for n, (_, letters, _) in CASES.items() if letters[0] in "gs"])
def test_a_cotangent_that_repeats_one_number_is_not_written_out(name: str, dtype: Any) -> None:
    op, letters, params = CASES[name]
    args = operands(letters, np.random.default_rng(1), (130, 37), dtype)
    args[0] = np.broadcast_to(dtype(0.75), args[0].shape)
    repeated = both(OPS[op], args, params)[0]
    args[0] = np.ascontiguousarray(args[0])
    for a, b, c in zip(repeated, *both(OPS[op], args, params, dtype=np.float64), strict=True):
        np.testing.assert_array_equal(a, b)
        check(a, c, 2e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_same_on_any_number_of_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, letters, params = CASES[name]
    args = operands(letters, np.random.default_rng(2), (300, 41), np.float32)
    kernel, params = getattr(ops, op), placed(params, args)
    alone = kernel(*args, **params)
    monkeypatch.setattr(threads, "SMALLEST_SHARED", 0)
    monkeypatch.setattr(threads, "threads", lambda: 3)
    shared = kernel(*args, **params)
    for a, b in zip(*((o,) if isinstance(o, np.ndarray) else o for o in (alone, shared)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [True, False])
def test_softmax_with_what_it_shifts_and_divides_by(masked: bool, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = (np.random.default_rng(6).standard_normal((9, 41)) * 3).astype(dtype)
    x[1], x[2, 5], x[3, 5], x[4] = -math.inf, math.inf, math.nan, x[4] + 1000
    found = softmax_of_rows(np, x.copy(), masked)
    monkeypatch.setattr(ops, "softmax_of_rows", lambda *args: NotImplemented)
    wanted = softmax_of_rows(np, x.astype(np.float64), masked)
    assert np.isnan(found[2][3])
    found[1][3] = wanted[1][3]  # which has no say
    for got, expected in zip(found, wanted, strict=True):
        check(got, expected, 1e-6 if dtype == np.float32 else 1e-12)
    with np.errstate(all="ignore"):
        expected = np.logaddexp.reduce(x.astype(np.float64), axis=1)
        lse = found[1] + np.log(found[2])
    check(lse[2:], expected[2:], 1e-6)
    assert lse[1] == (0 if masked else -math.inf)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SLOPES)
def test_slopes_of_activations(name: str, dtype: Any) -> None:
    rng = np.random.default_rng(5)
    y, g = (rng.choice([*ODD, *rng.uniform(-1, 1, 50)], (70, 61)).astype(dtype) for _ in range(2))
    kernel = getattr(ops, name)
    for seed in (g, np.broadcast_to(dtype(-0.5), y.shape)):
        with np.errstate(all="ignore"):
            expected = SLOPES[name](seed, y)
        # Where y is nearly 1, NumPy's slopes of tanh are what the rounding of y * y leaves; the kernel rounds once,
        # after the difference.
        rounding = np.finfo(dtype).eps * np.nan_to_num(np.abs(seed))
        close = np.isclose(kernel(seed, y), expected, rtol=1e-6, atol=rounding + 1e-6, equal_nan=True)
        assert close.all(), (seed[~close], y[~close])
    assert kernel(g[0], y[0]) is NotImplemented, "NumPy is faster"
    assert kernel(g.T, y.T) is NotImplemented
    fn = getattr(mt.nn, name.removesuffix("_backward"), None) or mt.tanh
    x = mt.asarray(rng.standard_normal((70, 61)).astype(dtype))
    value, pull = mt.vjp(fn, x)
    seed = rng.standard_normal(x.shape).astype(dtype)
    expected = SLOPES[name](seed, np.asarray(value))
    np.testing.assert_allclose(np.asarray(pull(mt.asarray(seed))[0]), expected, rtol=1e-5, atol=1e-6)


def misaligned(a: np.ndarray) -> np.ndarray:
    raw = np.empty(a.nbytes + 1, np.uint8)[1:]
    out = raw.view(a.dtype).reshape(a.shape)
    out[...] = a
    return out


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "misaligned": misaligned,
    "transposed": lambda a: np.ascontiguousarray(a.T).T,
    "strided": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "swapped bytes": lambda a: a.astype(a.dtype.newbyteorder()),
    "float16": lambda a: a.astype(np.float16),
    "of another dtype": lambda a: a.astype(np.float64),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_what_the_kernels_do_not_take_numpy_computes(name: str, layout: str) -> None:
    op, letters, params = CASES[name]
    args = operands(letters, np.random.default_rng(3), (5, 40), np.float32)
    changed, params = LAYOUTS[layout](args[0]), placed(params, args)
    if layout == "of another dtype" and len(letters.replace("l", "")) == 1:
        pytest.skip("there is one floating operand")
    if letters[0] == "s" and layout == "transposed":
        pytest.skip("one dimension has one layout")
    assert getattr(ops, op)(changed, *args[1:], **params) is NotImplemented
    got = OPS[op].numpy(changed, *args[1:], **params)
    with np.errstate(all="ignore"):
        expected = OPS[op].impl(np, changed, *args[1:], **params)
    for a, b in zip(*((o,) if isinstance(o, np.ndarray) else o for o in (got, expected)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_labels_of_any_integer_type(dtype: Any) -> None:
    rng = np.random.default_rng(4)
    x, labels = rng.standard_normal((40, 7)).astype(np.float32), rng.integers(0, 7, 40).astype(dtype)
    loss, g = mt.value_and_grad(lambda x: mt.nn.cross_entropy(x, mt.asarray(labels)))(mt.asarray(x))
    wide = x.astype(np.float64)
    p = np.exp(wide) / np.exp(wide).sum(axis=1, keepdims=True)
    at = np.arange(40), labels.astype(int)
    np.testing.assert_allclose(float(loss), -np.log(p[at]).mean(), rtol=1e-5)
    p[at] -= 1
    np.testing.assert_allclose(np.asarray(g), p / 40, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 6, 5, 7), (3, 6, 130), (1, 6, 1), (4, 6)])
def test_norms_of_groups(shape: tuple[int, ...], dtype: Any) -> None:
    rng = np.random.default_rng(9)
    x, g = (rng.standard_normal(shape).astype(dtype) + dtype(offset) for offset in (40, 0))
    w, b = (rng.standard_normal(6).astype(dtype) for _ in range(2))
    for num_groups in (1, 2, 6):
        params = {"num_groups": num_groups, "axis": 1, "eps": 1e-5}
        for seed in (g, np.broadcast_to(dtype(0.5), shape)):
            for name, args in (("group_norm", [x, w, b]), ("group_norm_backward", [seed, x, w])):
                got, want = getattr(ops, name)(*args, **params), OPS[name].impl(np, *map(np.float64, args), **params)
                for found, wanted in zip(*(o if type(o) is tuple else [o] for o in (got, want)), strict=True):
                    check(found, wanted, 2e-5 if dtype == np.float32 else 1e-11)
        assert ops.group_norm(x, w.astype(np.float16), b, **params) is NotImplemented
        assert ops.group_norm(x, w, b[:3], **params) is NotImplemented


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_derivative_of_running_products(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(10).uniform(-1.5, 1.5, (40, 6)).astype(dtype)
    x[3, 0] = x[5, 1] = x[9, 1] = x[0, 2] = x[39, 3] = 0
    x[:, 4], x[:4, 5], x[4:18, 5], x[18:, 5] = (
        1e-12,
        1e-10,
        1e3,
        0.5,
    )  # what follows overflows float32, and the product does not

    def slopes(axis: int) -> np.ndarray:
        _, pull = mt.vjp(lambda x: mt.cumulative_prod(x, axis=axis), mt.asarray(x))
        return np.asarray(pull(mt.asarray(np.cos(np.arange(240.0)).reshape(40, 6).astype(dtype)))[0])

    got = [slopes(0), slopes(1)]
    monkeypatch.setattr(ops, "cumulative_prod_backward", lambda *_: NotImplemented)
    x = x.astype(np.float64)
    dtype = np.float64
    want = [slopes(0), slopes(1)]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5 if got[0].dtype == np.float32 else 1e-12, atol=1e-30)


POWERS = [2, 3, 4, 7, 64, -1, -2, -5, 3.0, 0.5, 1.5, -0.5, -2.5]


@pytest.mark.parametrize("y", POWERS)
def test_powers_are_rounded_once(y: float) -> None:
    """The nearest number to the exact power; of a root, one whose square is the power of twice the exponent."""
    rng = np.random.default_rng(8)
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        x = (rng.uniform(0.9, 1.1, 150) * rng.choice([1, -1 if y % 1 == 0 else 1], 150)).astype(dtype)
        got = np.asarray(mt.asarray(x) ** y)
        assert got.dtype == dtype
        for a, b, step in zip(
            map(Fraction, x.tolist()), map(Fraction, got.tolist()), np.spacing(abs(got)), strict=True
        ):
            half = Fraction(float(step)) * Fraction(501, 1000)
            if y % 1:
                assert (abs(b) - half) ** 2 <= a ** int(2 * y) <= (abs(b) + half) ** 2
            else:
                assert abs(a ** int(y) - b) <= half


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("y", POWERS)
def test_powers_of_odd_numbers_are_those_of_c(y: float, dtype: Any) -> None:
    x = np.asarray([*ODD, -3.5, 1e13, -1e13, 1e200, 1e-200, -1e-103, 1e154, 1e-154, 5e-324]).astype(dtype)
    x = np.repeat(x, 20)  # in vectors and beyond them
    got = np.asarray(mt.asarray(x) ** y)
    want = np.asarray([math.inf if v == -math.inf and y == 0.5 else np.power(v, np.full(2, y, dtype))[0] for v in x])
    parts = np.asarray([(mt.asarray(v) ** y).item() for v in x], dtype)
    np.testing.assert_allclose(got, want, rtol=4 * np.finfo(dtype).eps, atol=2 * np.finfo(dtype).smallest_subnormal)
    zeros = got == 0
    np.testing.assert_array_equal(np.signbit(got[zeros]), np.signbit(want[zeros]) & (y != 0.5))
    np.testing.assert_array_equal(got, parts)  # an element has one value, beside whatever it stands
    np.testing.assert_array_equal(got, np.asarray(mt.asarray(np.stack([x, x], 1))[:, 0] ** y))
    np.testing.assert_array_equal(got, np.asarray(mt.asarray(x) ** mt.asarray(y, dtype=dtype)))


def test_inverses_and_roots_are_those_of_ieee() -> None:
    x = np.r_[2 - 2.0**-52, np.random.default_rng(11).uniform(1, 2, 5000)]
    for y, want in ((-1, 1 / x), (0.5, np.sqrt(x)), (1, x), (2, x * x)):
        np.testing.assert_array_equal(mt.asarray(x) ** y, want)


def test_powers_raise_what_is_asked_for() -> None:
    with np.errstate(all="raise"):
        for y in (3, -3, 0.5, -0.5):
            mt.asarray([1.0, math.inf, math.nan, 1e-90]) ** y
        for x, y, text in (
            (0.0, -3, "divide by zero"),
            (-2.0, 0.5, "invalid"),
            (1e-200, 2, "under"),
            (1e200, 2.5, "over"),
        ):
            with pytest.raises(FloatingPointError, match=f"{text}.* encountered in power"):
                mt.asarray([1.0, x]) ** y


def test_exp_is_within_two_units_in_the_last_place() -> None:
    """Seen through a softmax's backward pass of log-probabilities: g - exp(y) sum(g), with g = (1, 0)."""
    for dtype, low in ((np.float32, -104), (np.float64, -746)):
        y = np.linspace(low, 0, 200_001).astype(dtype)
        rows = np.stack([np.zeros_like(y), y], axis=1)
        g = np.broadcast_to(np.asarray([1, 0], dtype), rows.shape).copy()
        got = -ops.log_softmax_backward(g, rows, axis=1)[:, 1]
        exact = np.exp(y.astype(np.longdouble))
        assert float((np.abs(got - exact) / np.spacing(exact.astype(dtype))).max()) <= 2


def test_gelu_keeps_the_digits_of_small_results() -> None:
    from scipy.special import erfc

    x = np.linspace(-5.5, 6, 100_001).astype(np.float32)
    wide = x.astype(np.float64)
    exact = 0.5 * wide * erfc(-wide * math.sqrt(0.5))
    np.testing.assert_allclose(ops.gelu(x), exact, rtol=2e-5, atol=2e-7)
    np.testing.assert_allclose(ops.gelu(wide), exact, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", ["f4", "f8", ">f4", "i4", "i8", "u8", "f2", "?", "c8"])
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_where_is_numpys(dtype: str, data: st.DataObject) -> None:
    """Every form of the operands, to the bit: of all, of the last dimensions, of one number; and what is left to
    NumPy."""
    shape = data.draw(st.sampled_from([(5000,), (9, 700), (3, 5, 17, 40), (2, 1, 4099), (1, 70, 70), (7, 3)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))

    def numbers() -> Any:
        return rng.integers(0, 255, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[
            ..., 0
        ]  # any bits, NaN among them

    forms: dict[str, Callable[[], Any]] = {
        "all": numbers,
        "strided": lambda: np.repeat(numbers(), 2, axis=-1)[..., ::2],
        "row": lambda: numbers()[..., :1, :] if len(shape) > 1 else numbers()[:1],
        "one": lambda: numbers().reshape(-1)[:1].reshape(()),
        "float": lambda: data.draw(st.sampled_from([0.0, -0.0, 1.5, math.inf, math.nan, 1e30])),
        "int": lambda: data.draw(st.sampled_from([0, 1, 100])),
        "another dtype": lambda: np.float32(2.5),
    }
    x, y = (forms[data.draw(st.sampled_from(sorted(forms)), label=k)]() for k in "xy")
    cut = data.draw(st.integers(0, len(shape)), label="dimensions of the condition")
    condition = rng.random(shape[len(shape) - cut :]) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    if data.draw(st.booleans()):
        condition = condition[(None,) * (len(shape) - cut)]
    with np.errstate(all="ignore"):
        want, got = np.where(condition, x, y), OPS["where"].numpy(condition, x, y)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_added_with_one_rounding(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x, total, w = *(rng.integers(1 << 20, 1 << 24, (2, 2000)) / dtype(1 << 22)), dtype(1 + 2.0**-11)
    x, total = x.astype(dtype), np.ldexp(total.astype(dtype), rng.integers(-30, 30, 2000))
    got = total.copy()
    assert ops.add_product(x, w, got)
    assert not ops.add_product(x.astype(ml_dtypes.bfloat16), w, got)
    for a, b, c in zip(x, total, got, strict=True):
        exact = Fraction(float(a)) * Fraction(float(w)) + Fraction(float(b))
        near = min(abs(Fraction(float(n)) - exact) for n in (np.nextafter(c, dtype(0)), np.nextafter(c, dtype(np.inf))))
        assert abs(Fraction(float(c)) - exact) <= near
    odd = np.repeat(np.asarray([v for v in ODD if abs(v) != 1e-45 and abs(v) != 1e-38], dtype), len(ODD))
    beside = np.resize(np.asarray(ODD, dtype), odd.shape)
    for p, q in ((odd, beside), (x, total)):
        with np.errstate(all="ignore"):
            want = methods.fused(p, w, q.copy())
            with monkeypatch.context() as m:
                m.setattr(methods, "add_product", lambda *_: False)  # as where no kernel is
                np.testing.assert_array_equal(methods.fused(p, w, q.copy()), want)


def test_where_takes_the_kernel_for_masks_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, seen = np.random.default_rng(0).standard_normal((2, 3, 64, 64)).astype(np.float32), np.tri(64, dtype=bool)
    for condition in (seen, seen[None], np.broadcast_to(seen, scores.shape).copy()):
        for x, y in ((scores, -math.inf), (0.0, scores), (scores, -scores)):
            got = ops.where(condition, x, y)
            assert got is not NotImplemented
            np.testing.assert_array_equal(got, np.where(condition, x, y))
    monkeypatch.setattr(threads, "threads", lambda: 3)
    big, mask = np.ones((40, 200, 200)), np.random.default_rng(0).random((200, 200)) < 0.5
    for condition in (mask, np.broadcast_to(mask, big.shape).copy()):
        np.testing.assert_array_equal(ops.where(condition, big, 0.0), np.where(mask, big, 0.0))


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.complex128])
@pytest.mark.parametrize(
    "cut",
    [
        np.s_[:],
        np.s_[1:-1],
        np.s_[:, 3:200],
        np.s_[:, 1:, 2:],
        np.s_[::2, ::3],
        np.s_[::-1],
        np.s_[:, :, ::2],
        np.s_[:0],
    ],
    ids=str,
)
def test_copies_past_the_caches(dtype, cut):
    source = np.arange(40 * 220 * 30).astype(dtype).reshape(40, 220, 30)
    strided, packed = np.zeros_like(source), np.full(source[cut].shape, 7, dtype)
    copies.stream(strided[cut], source[cut])
    copies.stream(packed, source[cut])
    want = np.zeros_like(source)
    want[cut] = source[cut]
    np.testing.assert_array_equal(strided, want)  # and nothing beside it
    np.testing.assert_array_equal(packed, source[cut])


def test_copies_of_what_the_kernel_does_not_take():
    source = np.arange(1 << 16)
    wide, broadcast = np.empty(source.shape), np.empty((2, *source.shape), source.dtype)
    copies.stream(wide, source)  # another dtype
    copies.stream(broadcast, source)  # another shape
    np.testing.assert_array_equal(wide, source)
    np.testing.assert_array_equal(broadcast, np.stack([source, source]))
    low = np.ones(1 << 16, ml_dtypes.bfloat16)
    out = np.zeros_like(low)
    copies.stream(out, low)
    np.testing.assert_array_equal(out, low)
    wide.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        copies.stream(wide, wide + 1)


@st.composite
def operands_of_a_chain(draw: st.DrawFn) -> tuple[tuple[int, ...], Any, list[np.ndarray]]:
    """A shape, a dtype, and three arrays that broadcast to it: whole, repeated, numbers, turned around or cut out of
    larger ones."""
    shape = (*draw(st.lists(st.integers(0, 4), max_size=3)), draw(st.sampled_from([1, 5, 16, 33, 300])))
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    out = []
    for _ in range(3):
        own = tuple(n if draw(st.booleans()) else 1 for n in shape[draw(st.integers(0, len(shape))) :])
        x = rng.standard_normal(tuple(n + draw(st.sampled_from([0, 0, 3])) for n in own)).astype(dtype)
        cut = tuple(slice(None, n) for n in own)
        turned = tuple(slice(None, None, draw(st.sampled_from([1, -1]))) for _ in own[:-1])
        out.append(x[cut][turned])
    return shape, dtype, out


# x, y, z are slots 0 to 2, the results 3 and 4, and 5 is scratch: 5 = x * y, 3 = 5 + z, 4 = 3 / y - x
STEPS = np.int32([[2, 5, 0, 1], [0, 3, 5, 2], [3, 4, 3, 1], [1, 4, 4, 0]]).tobytes()


@settings(max_examples=150, deadline=None)
@given(operands_of_a_chain())
def test_a_chain_takes_operands_that_are_broadcast_and_views_with_whole_rows(case: Any) -> None:
    shape, dtype, (x, y, z) = case
    results = [np.full(shape, 7, dtype) for _ in range(2)]
    taken = native._kernels.chain(STEPS, (x, y, z, *results), 3, 1)
    with np.errstate(all="ignore"):
        first = np.broadcast_to(x, shape) * y + z
        second = first / y - x
    if taken is not None:
        np.testing.assert_array_equal(results[0], first)
        np.testing.assert_array_equal(results[1], second)
    else:  # rows of few elements, where not all operands lie as the result does
        assert shape[-1] < 16
        assert all((r == 7).all() for r in results)


def test_a_chain_refuses_what_it_cannot_read_in_rows() -> None:
    result = np.full((40, 40), 7.0)
    square, wide = np.ones((40, 40)), np.ones((40, 80))
    for x in (
        square.T,
        wide[:, ::2],
        square[:, ::-1],
        np.ones(39),
        np.ones((1, 40, 40)),
        np.ones((40, 40), np.float32),
    ):
        for operands in ((x, square, square), (square, x, square), (square, square, x)):
            assert native._kernels.chain(STEPS, (*operands, result, result.copy()), 3, 1) is None
    assert native._kernels.chain(STEPS, (square, square, square, wide[:, ::2], result), 3, 1) is None
    assert native._kernels.chain(STEPS, (square, square, square, result.T, result), 3, 1) is None
    assert (result == 7).all()
    assert (wide == 1).all()


def test_labels_are_looked_at_in_one_pass() -> None:
    good = np.arange(1000) % 7
    assert ops.below(good, 7) is True
    assert ops.below(good, 6) is False
    assert ops.below(good[:0], 0) is True
    assert ops.below(good[0:1].reshape(()), 1) is True
    for at, wrong in ((0, -1), (999, 7), (500, -(2**63)), (31, 2**63 - 1)):
        labels = good.copy()
        labels[at] = wrong
        assert ops.below(labels, 7) is False
    for unlike in (good.astype(np.int32), good.astype(np.uint64), good[::2], good.astype(">i8"), good.tolist()):
        assert ops.below(unlike, 7) is None
    with pytest.raises(mt.errors.ArrayIndexError, match="label 7 is none of the 7 classes"):
        mt.nn.cross_entropy(mt.zeros((3, 7)), mt.asarray([0, 6, 7]))


# ----- rotary positions -----------------------------------------------------------------------------------------------

ROWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # of (2, 5, 3, 8), as they lie
    "heads first": lambda x: x,
    "positions first": lambda x: np.ascontiguousarray(x.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3),
    "heads last": lambda x: np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("how", ROWS)
def test_rows_are_turned_as_they_lie(how: str, inverse: bool, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x, (c, s) = ROWS[how](rng.standard_normal((2, 5, 3, 8)).astype(dtype)), rng.standard_normal((2, 3, 4)).astype(dtype)
    got = ops.rotary_embedding(x, c, s, inverse)
    expected = OPS["rotary_embedding"].impl(np, *(a.astype(np.float64) for a in (x, c, s)), inverse=inverse)
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)
    assert (got.dtype, got.strides) == (dtype, x.strides)
    monkeypatch.setattr(threads, "SMALLEST_SHARED", 0)
    monkeypatch.setattr(threads, "threads", lambda: 3)
    np.testing.assert_array_equal(ops.rotary_embedding(x, c, s, inverse), got)


def test_rotations_that_numpy_computes() -> None:
    rng = np.random.default_rng(0)
    x, (c, s) = rng.standard_normal((2, 3, 8)), rng.standard_normal((2, 3, 4))
    pairs = [(x[..., ::2][..., :2], c[:, :1], s[:, :1]), (x, c.astype(np.float32), s), (x, c[:1], s[:1])]
    pairs += [(np.broadcast_to(x[:1], x.shape), c, s), (x, np.stack([c, c]), np.stack([s, s])), (x[0, 0], c[0], s[0])]
    for args in pairs:
        assert ops.rotary_embedding(*args, False) is NotImplemented
        got = np.asarray(OPS["rotary_embedding"].numpy(*args, inverse=False))
        a, b = np.split(args[0], 2, axis=-1)
        np.testing.assert_allclose(got, np.concatenate([a * args[1] - b * args[2], b * args[1] + a * args[2]], axis=-1))
