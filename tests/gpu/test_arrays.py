"""Arrays on a GPU agree with NumPy: values, gradients, errors and where they live."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.backends import cublaslt
from meshtape.arrays.backends.backend import cupy_backend
from meshtape.arrays.core.op import Op, recording

RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 7)).astype(np.float32)
Y = RNG.standard_normal((7, 3)).astype(np.float32)
KEY = mt.random.key(3, device="cpu")


def both(fn: Any, *hosts: np.ndarray, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """``fn`` of arrays on the GPU and of the same arrays on the CPU."""
    gpu = fn(*map(mt.asarray, hosts))
    assert str(gpu.device) == "cuda:0"
    with mt.use_device("cpu"):
        cpu = fn(*map(mt.asarray, hosts))
    assert gpu.dtype == cpu.dtype
    np.testing.assert_allclose(gpu.numpy(), cpu.numpy(), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x + 1,
        lambda x: 2.0 * x - x * x,
        lambda x: mt.exp(-mt.abs(x)),
        lambda x: mt.nn.gelu(x),
        lambda x: mt.nn.softmax(x),
        lambda x: mt.where(x > 0, x, 0.0),
        lambda x: mt.sum(x, axis=1),
        lambda x: mt.max(x, axis=0),
        lambda x: mt.argmax(x, axis=1),
        lambda x: mt.reshape(x, (7, 5)),
        lambda x: mt.permute_dims(x, (1, 0)),
        lambda x: mt.concat([x, x], axis=1),
        lambda x: mt.layer_norm(x, 7),
        lambda x: x[1:4, ::-2],
        lambda x: x[[0, 0, 3]],
        lambda x: x[x > 0],
        lambda x: x.at[[0, 0], [1, 1]].set(mt.asarray(np.array([1.0, 2.0], np.float32))),
        lambda x: x.at[[0, 0], [1, 1]].add(1.0),
    ],
)
def test_ops_agree_with_the_cpu(fn: Any) -> None:
    both(fn, X)


def test_matmul_agrees_with_the_cpu() -> None:
    both(lambda x, y: x @ y, X, Y)
    # Each product loses up to 2**-10 of itself, and some of the sums nearly cancel.
    lost = float((np.abs(X) @ np.abs(Y)).max()) * 2.0**-10
    with mt.use_tf32():
        both(lambda x, y: x @ y * 0.01, X, Y, rtol=0, atol=lost * 0.01)
    eight = RNG.standard_normal((2, 16, 32)).astype(np.float32)
    both(
        lambda x: (x[0].astype(mt.float8_e4m3fn) @ x[1].T.astype(mt.float8_e4m3fn)).astype(mt.float32), eight, rtol=0.07
    )


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: mt.mean(mt.nn.gelu(x) ** 2),
        lambda x: mt.sum(mt.layer_norm(x, 7) ** 3),
        lambda x: mt.sum(x[[0, 0, 1]] * 2.0),
        lambda x: mt.sum(mt.nn.log_softmax(x)[:, 1]),
    ],
)
def test_gradients_agree_with_the_cpu(fn: Any) -> None:
    both(mt.grad(fn), X, rtol=1e-4)
    both(mt.compile(mt.grad(fn)), X, rtol=1e-4)


def test_random_bits_are_those_of_the_cpu() -> None:
    both(lambda: mt.random.bits(mt.random.key(3), (1000,)))
    both(lambda: mt.random.uniform(mt.random.key(3), (1000,)), rtol=0)


def test_arrays_move_and_devices_do_not_mix() -> None:
    gpu = mt.asarray(X)
    cpu = gpu.to_device("cpu")
    assert str(cpu.device) == "cpu"
    assert str(cpu.to_device("cuda:0").device) == "cuda:0"
    with pytest.raises(mt.errors.DeviceError, match=r"cpu.*cuda:0"):
        gpu + cpu


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x + X,
        lambda x: X.T @ x,
        lambda x: np.hypot(X, x),
        lambda x: mt.take(x, [3, 0, 0], axis=1),
        lambda x: mt.concat([x, X, [[1.0] * 7]]),
        lambda x: x.at[[0, 0], [1, 1]].divide([2.0, 3.0]),
        lambda x: mt.sum(x, where=X > 0),
        lambda x: mt.diff(x, prepend=[[1.0]] * 5),
        lambda x: mt.compile(lambda a, b, c: a * b + c)(x, X, np.float32(3)),
        lambda x: mt.random.permutation(KEY, x),
        lambda x: mt.nn.dropout(x, 0.5, key=KEY),
        lambda x: mt.asarray([x[0, 0], x[1, 1]]),
    ],
)
def test_all_else_goes_where_the_array_is(fn: Any) -> None:
    """Also beside a default of the CPU."""
    x = mt.asarray(X)
    with mt.use_device("cpu"):
        gpu, cpu = fn(x), fn(mt.asarray(X))
    assert (str(gpu.device), str(cpu.device)) == ("cuda:0", "cpu")
    np.testing.assert_allclose(gpu.numpy(), cpu.numpy(), rtol=1e-5, atol=1e-6)


def test_arrays_of_cupy_become_arrays() -> None:
    x, theirs = mt.asarray(X), cupy_backend().xp.asarray(Y)
    for y in (x @ theirs, mt.matmul(x, theirs), mt.compile(lambda a, b: a @ b)(x, theirs)):
        assert isinstance(y, mt.arrays.Array)
        np.testing.assert_allclose(y.numpy(), X @ Y, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal((mt.asarray(Y) == theirs).numpy(), np.ones(Y.shape, bool))
    assert mt.asarray(theirs, copy=False)._buf is theirs
    for dtype, device in ((np.float64, None), (None, "cpu")):
        for obj in (theirs, x):
            with pytest.raises(ValueError, match="copy=False"):
                mt.asarray(obj, dtype=dtype, device=device, copy=False)
    with pytest.raises(ValueError, match="copy=False"):
        mt.asarray(X, copy=False)  # the default device is the GPU


def test_a_saved_program_runs_where_its_arguments_are(tmp_path: Path) -> None:
    with mt.use_device("cpu"):
        held = mt.asarray(X)
        mt.storage.save_program(str(tmp_path / "p"), lambda a: mt.tanh(a * held)[[3, 0]], held)
        program = mt.storage.load_program(str(tmp_path / "p"))
        for x in (held, held.to_device("cuda:0"), held.to_device("cuda:0")):
            y, slope = program(x), mt.grad(lambda a: mt.sum(program(a)))(x)
            assert {str(y.device), str(slope.device)} == {str(x.device)}
            np.testing.assert_allclose(y.numpy(), np.tanh(X * X)[[3, 0]], rtol=1e-5)


def test_index_errors_have_the_same_text() -> None:
    for key in (9, [9], (0, -9)):
        texts = []
        for where in ("cpu", "cuda:0"):
            with mt.use_device(where), pytest.raises(IndexError) as e:
                mt.asarray(X)[key]
            texts.append(str(e.value))
        assert texts[0] == texts[1]


def test_values_do_not_alias() -> None:
    x = mt.asarray(X)
    view = x[1:3]
    view[0, 0] = 100.0
    np.testing.assert_array_equal(x.numpy(), X)
    x[2, 2] = -100.0
    assert float(view[1, 2]) == X[2, 2]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_loss_of_a_vocabulary_keeps_the_digits_of_its_dtype(
    dtype: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are not rounded; slopes are, once, also those of a small part of a mean, most of which float16 would not
    hold. Rows that are ignored are as good as absent. So it is without cuBLASLt, in products of float32."""
    monkeypatch.setitem(sys.modules["meshtape.arrays.nn.linear_cross_entropy"].TILE, "cupy", 1 << 16)
    if dtype == "float32":  # those of two bytes are in tiles at any size
        monkeypatch.setattr(sys.modules["meshtape.arrays.nn.losses"], "WHOLE", 0)
    ops: set[str] = set()
    recorder = SimpleNamespace(record=lambda op, *_: ops.add(op.name))
    rng, kind = np.random.default_rng(0), getattr(mt, dtype)
    h, w = ((rng.standard_normal(s) * by).astype(kind) for s, by in (((400, 64), 0.01), ((64, 700), 32)))
    labels = rng.integers(0, 700, 400)
    labels[:100] = -100

    def loss(h: mt.Array, w: mt.Array) -> mt.Array:
        options = {"ignore_index": -100, "label_smoothing": 0.1}
        return 1e-3 * mt.nn.linear_cross_entropy(h, w.mT if tied else w, mt.asarray(labels), **options)

    def results(where: str, to: str, change: Any = lambda f: f) -> list[np.ndarray]:
        with mt.use_device(where):
            given = tuple([mt.asarray(a).astype(to) for a in (h, w.T.copy() if tied else w)])
            value, slopes = change(mt.value_and_grad(lambda p: loss(*p)))(given)
            return [x.to_device("cpu").numpy().astype(np.float64) for x in (value, *slopes)]

    def recorded(fn: Any) -> Any:
        def call(given: Any) -> Any:
            with recording(recorder):
                return fn(given)

        return call

    def without_cublaslt(fn: Any) -> Any:
        monkeypatch.setattr(cublaslt, "library", lambda: None)
        return fn

    right, finfo = results("cpu", "float64"), ml_dtypes.finfo(dtype)
    for change in (recorded, mt.compile, without_cublaslt):
        value, *slopes = results("cuda:0", dtype, change)
        np.testing.assert_allclose(value, right[0], rtol=3e-6)
        for got, want in zip(slopes, right[1:], strict=True):
            bound = max(float(finfo.eps), 1e-5) * np.abs(want).max() + float(finfo.smallest_subnormal)
            np.testing.assert_allclose(got, want, rtol=0, atol=bound)
    assert {"linear_cross_entropy", "linear_cross_entropy_backward"} <= ops


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tiles_of_short_floats_are_joined_in_float32(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients are within two units of the short dtype of those in float64."""
    attention = sys.modules["meshtape.arrays.nn.attention"]
    monkeypatch.setattr(attention, "TILE", 1)
    monkeypatch.setattr(attention, "LEAST_ROWS", 4)
    lce = sys.modules["meshtape.arrays.nn.linear_cross_entropy"]
    monkeypatch.setattr(sys.modules["meshtape.arrays.nn.losses"], "WHOLE", 0)
    monkeypatch.setitem(lce.TILE, "cupy", 1 << 14)
    labels = np.arange(300)
    for shapes, fn in (
        ([(2, 24, 8)] * 3, lambda q, k, v: mt.nn.scaled_dot_product_attention(q, k, v, is_causal=True)),
        ([(300, 16), (16, 520)], lambda h, w: mt.nn.linear_cross_entropy(h, w, mt.asarray(labels), reduction="none")),
    ):
        hosts = [np.random.default_rng(i).standard_normal(s).astype(getattr(mt, dtype)) for i, s in enumerate(shapes)]

        def pulled(where: str, to: str, fn: Any = fn, hosts: Any = hosts) -> list[mt.Array]:
            with mt.use_device(where):
                args = [mt.asarray(h).astype(to) for h in hosts]
                value, pull = mt.vjp(fn, *args)
                return [x.to_device("cpu") for x in (value, *pull(mt.ones_like(value)))]

        for got, want in zip(pulled("cuda:0", dtype), pulled("cpu", "float64"), strict=True):
            units = max(2 * float(mt.finfo(got.dtype).eps), 1e-5)  # a loss is float32
            off = np.abs(got.numpy().astype(np.float64) - want.numpy())
            assert off.max() <= units * np.abs(want.numpy()).max()


CALLS_WITH_NUMBERS: dict[str, Callable[[Any], Any]] = {
    "x * 0.1": lambda x: x * 0.1,
    "2 - x": lambda x: 2 - x,
    "x / 3": lambda x: x / 3,
    "x ** 2": lambda x: x**2,
    "2.0 ** x": lambda x: 2.0**x,
    "x + True": lambda x: x + True,
    "maximum": lambda x: mt.maximum(x, 0.3),
    "where": lambda x: mt.where(x > 0.1, x, -0.7),
    "clip": lambda x: mt.clip(x, -0.5, 0.5),
    "hypot": lambda x: mt.hypot(x, 0.7),
    "atan2": lambda x: mt.atan2(x, 0.7),
    "infinite": lambda x: x * 1e39,
    "-0.0": lambda x: mt.copysign(x, -0.0),
}


@pytest.mark.parametrize("name", CALLS_WITH_NUMBERS)
def test_numbers_take_the_dtype_of_bfloat16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to it first, in the result and in its derivative, as on a CPU; and in memory nowhere."""
    fn, x = CALLS_WITH_NUMBERS[name], np.linspace(-2, 2, 64).astype(ml_dtypes.bfloat16)
    seed = np.linspace(0.5, 1.5, 64).astype(ml_dtypes.bfloat16)

    def both() -> list[np.ndarray]:
        y, pull = mt.vjp(fn, mt.asarray(x))
        return [y.numpy(), pull(mt.asarray(seed))[0].numpy()]

    with mt.use_device("cpu"):
        want = both()
    for size in (Op.large, 1):
        monkeypatch.setattr(Op, "large", size)
        for got, w in zip(both(), want, strict=True):
            assert got.dtype == w.dtype == x.dtype
            np.testing.assert_allclose(got.astype(np.float32), w.astype(np.float32), rtol=2**-7, atol=1e-6)


MADE = [(np.dtype(f"{kind}{bits}"), sent) for kind in ("int", "uint") for bits in (8, 16, 32, 64) for sent in (1, 0)]
"""Dtypes of integers, and whether they come from the host, which then knows their range, or are computed."""


def integers(numbers: Any, dtype: np.dtype, sent: int) -> mt.Array:
    found = mt.asarray(np.array(numbers, dtype))
    return found if sent else found + dtype.type(0)


def test_indices_out_of_range_are_refused() -> None:
    x = mt.asarray(X)
    for dtype, sent in MADE:
        least, greatest = (int(v) for v in (np.iinfo(dtype).min, np.iinfo(dtype).max))
        inside = [0, 4] if dtype.kind == "u" else [-5, 4]
        np.testing.assert_array_equal(x[integers(inside, dtype, sent)].numpy(), X[inside])
        np.testing.assert_array_equal(x[integers([1, greatest], dtype, sent)[:1]].numpy(), X[[1]])
        for wrong in {5, greatest, *([-6, least] if least else [])}:
            with pytest.raises(IndexError, match=f"index {wrong} is out of bounds"):
                x[integers([1, wrong], dtype, sent)]
            if wrong not in (5, -6):  # of the second axis these are no more than the ends
                with pytest.raises(IndexError, match=f"index {wrong} is out of bounds"):
                    x[integers([1, 2], dtype, sent), integers([wrong, 0], dtype, sent)]
            with mt.index_checks(False):
                np.testing.assert_array_equal(x[integers([1, wrong], dtype, sent)].numpy(), X[[1, wrong % 5]])
    for graph in (False, True):
        call = mt.compile(lambda x, ids: x[ids[::-1]] * 1.0, cuda_graph=graph)
        np.testing.assert_array_equal(call(x, mt.asarray([4, -5]) + 0).numpy(), X[[-5, 4]])
        with pytest.raises(IndexError, match="index 5 is out of bounds"):
            call(x, mt.asarray([1, 5]) + 0)  # whose numbers the host did not see
        with pytest.raises(IndexError, match="index 5 is out of bounds"):
            mt.grad(lambda x: mt.sum(call(x, mt.asarray([1, 5]))))(x)  # noqa: B023  called at once


def test_labels_out_of_range_are_refused() -> None:
    logits = mt.asarray(X)
    with mt.use_device("cpu"):
        want = mt.nn.cross_entropy(mt.asarray(X), mt.asarray([0, 6, 3, 3, 1]), reduction="none").numpy()
    for dtype, sent in MADE:
        mark = 255 if dtype == np.uint8 else 100 if dtype.kind == "u" else -100
        other = mark - 1 if mark > 0 else mark + 1

        def loss(
            *numbers: int, ignore_index: int | None = None, dtype: np.dtype = dtype, sent: int = sent
        ) -> np.ndarray:
            labels = integers(numbers, dtype, sent)
            return mt.nn.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="none").numpy()

        np.testing.assert_allclose(loss(0, 6, 3, 3, 1), want, rtol=1e-5)
        np.testing.assert_allclose(loss(0, mark, 3, mark, 1, ignore_index=mark), want * [1, 0, 1, 0, 1], rtol=1e-5)
        np.testing.assert_array_equal(loss(*[mark] * 5, ignore_index=mark), [0] * 5)
        for ignored, wrong in ((None, 7), (None, mark), (mark, 7), (mark, other)):
            with pytest.raises(IndexError, match=f"label {wrong} is none of the 7 classes"):
                loss(0, ignored or 1, wrong, 1, ignored or 1, ignore_index=ignored)


@pytest.mark.parametrize("large", [1 << 20, 1])
@pytest.mark.parametrize("name", ["remainder", "fmod", "floor_divide", "divide", "pow", "hypot", "nextafter", "atan2"])
def test_pairs_of_odd_numbers(name: str, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU, by the kernels for calls of many elements, too."""
    monkeypatch.setattr(Op, "large", large)
    odd = [0.0, -0.0, 1.0, -1.0, 5.5, -5.5, 3.0, -3.0, np.inf, -np.inf, np.nan]
    pairs = np.array([(x, y) for x in odd for y in odd])
    for dtype in (np.float64, np.float32, np.float16, *([np.int32, np.uint8] if name == "remainder" else [])):
        some = pairs if dtype(0.5) else np.abs(pairs[np.isfinite(pairs).all(axis=1) & (pairs[:, 1] != 0)])
        x, y = some.astype(dtype).T
        got = getattr(mt, name)(mt.asarray(x), mt.asarray(y))
        with np.errstate(all="ignore"):
            want = getattr(mt, name)(mt.asarray(x, device="cpu"), mt.asarray(y, device="cpu")).numpy()
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got.numpy(), want, 1e-3 if dtype is np.float16 else 1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_first_of_several_nan_is_the_extremum(dtype: Any) -> None:
    x = np.random.default_rng(0).standard_normal((200, 7)).astype(dtype)
    x[np.random.default_rng(1).random(x.shape) < 0.3] = np.nan
    for y in (x, x.T, x[:5], x[:, :, None]):
        for name in ("argmax", "argmin"):
            for axis in (0, 1, None):
                got = getattr(mt, name)(mt.asarray(y), axis=axis)
                want = getattr(mt, name)(mt.asarray(y, device="cpu"), axis=axis)
                np.testing.assert_array_equal(got.numpy(), want.numpy())


def test_weights_from_the_host_are_looked_at() -> None:
    key = mt.random.key(0)
    for wrong in ([1.0, -1.0], [np.nan, 1.0], [0.0, 0.0], np.array([np.inf, 1.0])):
        with pytest.raises(mt.errors.ArgumentError, match="finite weights"):
            mt.random.choice(key, 2, (3,), p=wrong)


@pytest.mark.parametrize("number", [2**70, -(2**63) - 1, 2**63])
def test_integers_beyond_64_bits(number: int) -> None:
    """CuPy takes none."""
    for dtype in (np.float64, np.float32, np.complex64):
        both(lambda x, d=dtype: x.astype(d) * number, X)
    both(lambda x: mt.where(x > 0, x, number), X)
    for compare in (mt.less, mt.greater_equal, mt.equal):
        both(lambda x, c=compare: c(x.astype(np.int64), number), X)
        both(lambda x, c=compare: c(x, number), X)
    both(lambda x: mt.full_like(x, number), X)
    with pytest.raises(mt.errors.NumberRangeError):
        mt.ones(3, dtype=np.int32) * number
