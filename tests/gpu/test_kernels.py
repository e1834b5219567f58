"""The fused kernels on a GPU: values, gradients, order, streams, and more elements than an int counts."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.core.op import Op
from meshtape.arrays.kernels import launch
from meshtape.arrays.kernels.cudnn import attention as cudnn_attention

DTYPES = [np.dtype(t) for t in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)]
TOLERANCE = {"float32": 2e-5, "float64": 1e-12, "float16": 4e-3, "bfloat16": 3e-2}
RNG = np.random.default_rng(0)


def cp() -> Any:
    return launch.runner().xp


def close(got: mt.Array, expected: Any, factor: float = 1.0) -> None:
    wide, expected = got.numpy().astype(np.float64), np.asarray(expected, np.float64)
    assert str(got.device) == "cuda:0"
    assert wide.shape == expected.shape
    scale = np.max(np.abs(expected[np.isfinite(expected)]), initial=1e-3)
    np.testing.assert_allclose(wide, expected, rtol=0, atol=factor * TOLERANCE[got.dtype.name] * scale)


def both(fn: Callable[..., mt.Array], dtype: np.dtype, *hosts: np.ndarray, factor: float = 1.0) -> None:
    """The function and its gradients, in ``dtype`` on the GPU and in float64 of the same numbers on the CPU."""
    short = [h.astype(dtype) for h in hosts]

    def results(where: str, operands: list[np.ndarray]) -> list[mt.Array]:
        with mt.use_device(where):
            y, pull = mt.vjp(fn, *map(mt.asarray, operands))
            seed = np.random.default_rng(1).normal(size=y.shape).astype(y.dtype)
            return [y, *pull(mt.asarray(seed))]

    exact = results("cpu", [s.astype(np.float64) for s in short])
    for a, e in zip(results("cuda:0", short), exact, strict=True):
        assert a.dtype in (dtype, launch.wide(dtype))
        close(a, e.numpy(), factor)


def used(kernel: str) -> bool:
    """Whether a kernel of this name has been started in this process."""
    return any(name.startswith(kernel) for _, _, name in launch.runner()._kernels)


SHAPES = [(5, 7), (33, 200), (64, 1024), (9, 3001), (4, 16384), (3, 20001), (0, 8), (1, 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_of_rows(shape: tuple[int, int], dtype: np.dtype) -> None:
    x, w, b = RNG.normal(2, 3, shape), RNG.normal(size=shape[1]), RNG.normal(size=shape[1])
    both(lambda x, w, b: mt.layer_norm(x, w.shape, w, b), dtype, x, w, b, factor=2)
    both(lambda x, w: mt.rms_norm(x, w.shape, w), dtype, x, w, factor=2)
    both(lambda x, r, w: mt.add(*mt.nn.add_rms_norm(x, r, w.shape, w)), dtype, x, RNG.normal(size=shape), w, factor=2)
    if x.size:
        assert used("norm_forward")
        assert used("norm_backward")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_and_cross_entropy(shape: tuple[int, int], dtype: np.dtype) -> None:
    x = RNG.normal(scale=3, size=shape)
    both(lambda x: mt.nn.softmax(x), dtype, x, factor=2)
    both(lambda x: mt.nn.log_softmax(x), dtype, x, factor=2)
    both(lambda x: mt.nn.softmax(x, axis=0), dtype, x, factor=2)
    labels = RNG.integers(0, shape[1], shape[0])
    both(lambda x: mt.nn.cross_entropy(x, mt.asarray(labels), reduction="sum"), dtype, x, factor=2)
    both(
        lambda x: mt.nn.cross_entropy(x, mt.asarray(labels), label_smoothing=0.2, reduction="none"), dtype, x, factor=2
    )


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=lambda d: d.name)
def test_attention_of_short_floats(dtype: np.dtype) -> None:
    def normal(*shape: int) -> np.ndarray:
        return RNG.normal(size=shape)

    attend, seen = mt.nn.scaled_dot_product_attention, RNG.random((2, 1, 1, 90)) < 0.7
    both(attend, dtype, *(normal(2, 3, 150, 64) for _ in range(3)))
    both(
        lambda q, k, v: attend(q, k, v, mask=mt.asarray(seen), is_causal=True),
        *(dtype, normal(2, 4, 140, 40), normal(2, 2, 90, 40), normal(2, 2, 90, 24)),
    )
    both(lambda q, k, v: attend(q, k, v, is_causal=True), dtype, *(normal(2, 70, n) for n in (200, 200, 256)))
    for kernel in ("forward", "backward_queries", "backward_keys", "poison"):
        assert used(f"attention_{kernel}")


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=lambda d: d.name)
def test_attention_by_cudnn(dtype: np.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if cudnn_attention.frontend() is None or "MESHTAPE_EMULATED_GPU" in os.environ:
        pytest.skip("nvidia-cudnn-frontend, or cuDNN 9, is not installed")

    def heads_last(x: mt.Array) -> mt.Array:
        return mt.moveaxis(mt.moveaxis(x, 1, 2) + 0, 1, 2)

    runs, run = [], cudnn_attention.Plan.run
    monkeypatch.setattr(cudnn_attention.Plan, "run", lambda *a: runs.append(a) or run(*a))
    attend = mt.nn.scaled_dot_product_attention
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of an example that is wrong
        for causal, heads, rows in itertools.product((False, True), (4, 2), (512, 700)):
            operands = [RNG.normal(size=(2, h, n, 64)) for h, n in ((4, rows), (heads, 600), (heads, 600))]
            before = len(runs)
            both(lambda q, k, v, causal=causal: attend(q, k, v, is_causal=causal), dtype, *operands)
            both(lambda q, *kv, causal=causal: attend(heads_last(q), *kv, is_causal=causal), dtype, *operands)
            assert len(runs) >= before + 4


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_experts_without_a_wait(dtype: np.dtype) -> None:
    """One with no row, one with many, rows that go nowhere or twice to one; many experts; matrices that begin anywhere."""
    for rows, k, experts, width, hidden in ((300, 2, 4, 72, 136), (40, 3, 70, 13, 9), (5, 1, 2, 8, 8)):
        chosen = RNG.integers(1, experts + 1, (rows, k))
        chosen[: rows // 2, 0] = experts - 1
        shapes = (experts, width, hidden), (experts, width, hidden), (experts, hidden, width)
        matrices = [RNG.normal(size=s) / np.sqrt(s[1]) for s in shapes]

        def sent(x: Any, weights: Any, gate: Any, up: Any, down: Any, chosen: Any = chosen) -> mt.Array:
            with mt.host_waits() as waits:
                y = mt.nn.experts(x, mt.asarray(chosen), weights, gate=gate, up=up, down=down)
            assert not waits
            return y

        both(sent, dtype, RNG.normal(size=(rows, width)), RNG.uniform(size=(rows, k)), *matrices, factor=2)
    for kernel in ("count_pairs", "place_pairs", "experts_hidden", "experts_rows", "experts_matrices", "sum_pairs"):
        assert used(kernel)


def test_a_cuda_graph_holds_experts() -> None:
    """Replayed with other choices: the grids are the same, the tiles are others."""
    matrices = [RNG.normal(size=s).astype(np.float32) for s in ((3, 8, 16), (3, 8, 16), (3, 16, 8))]

    def step(x: mt.Array, chosen: mt.Array, gate: mt.Array, up: mt.Array, down: mt.Array) -> mt.Array:
        weights = mt.ones(chosen.shape, dtype=x.dtype, device=x.device)
        return mt.grad(lambda x: mt.sum(mt.nn.experts(x, chosen, weights, gate=gate, up=up, down=down) ** 2))(x)

    run = mt.compile(step, cuda_graph=True)
    for high in (1, 3, 4):
        hosts = RNG.normal(size=(90, 8)).astype(np.float32), RNG.integers(0, high, (90, 2)), *matrices
        got = run(*map(mt.asarray, hosts))
        close(got, step(*(mt.asarray(h, device="cpu") for h in hosts)).numpy(), 2)
    assert run.signatures == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((3, 8, 5, 5), 1), ((2, 5, 5, 8), 3), ((4, 32, 64), 1), ((70, 40), 1), ((2, 8, 4000), 1), ((0, 8, 2), 1)],
)
def test_norms_of_images(shape: tuple[int, ...], axis: int, dtype: np.dtype) -> None:
    c = shape[axis]
    x, w, b = RNG.normal(2, 3, shape), RNG.normal(size=c), RNG.normal(size=c)
    both(lambda x, w, b: mt.group_norm(x, 4, w, b, channel_axis=axis), dtype, x, w, b, factor=3)
    if len(shape) > 2:
        both(lambda x, w, b: mt.instance_norm(x, w, b, channel_axis=axis), dtype, x, w, b, factor=3)

    def batch(training: bool) -> Callable[..., mt.Array]:
        return lambda x, w, b: mt.batch_norm(x, mt.zeros(c), mt.ones(c), w, b, training=training, channel_axis=axis).out

    both(batch(True), dtype, x, w, b, factor=3)
    both(batch(False), dtype, x, w, b, factor=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["channels second", "channels last"])
@pytest.mark.parametrize(("stride", "window", "groups"), [(1, 3, 1), (2, 3, 2), (1, 1, 1), (2, 5, 8)])
def test_convolutions(stride: int, window: int, groups: int, last: bool, dtype: np.dtype) -> None:
    """With NaN in the image, and in the cotangent: results that do not read it are numbers. The same bits twice."""
    x, w = RNG.normal(size=(2, 8, 12, 12)), RNG.normal(size=(16, 8 // groups, window, window)) / window
    x, w = (np.moveaxis(a, 1, -1).copy() if last else a for a in (x, w))
    out = 12 // stride

    def conv(x: mt.Array, w: mt.Array, factor: mt.Array) -> mt.Array:
        x, w = (mt.moveaxis(a, -1, 1) if last else a for a in (x, w))
        return mt.nn.conv2d(x, w, stride=stride, padding=window // 2, groups=groups) * factor

    factor = np.ones((2, 16, out, out))
    both(conv, dtype, x, w, factor, factor=2)
    factor[1, 3, out // 2, out // 2] = x[(0, 6, 6, 2) if last else (0, 2, 6, 6)] = np.nan
    both(conv, dtype, x, w, factor, factor=2)

    def bits() -> list[bytes]:
        y, pull = mt.vjp(conv, *(mt.asarray(a.astype(dtype)) for a in (x, w, factor)))
        return [a.numpy().tobytes() for a in (y, *pull(y))]

    assert bits() == bits()


def test_short_floats_beside_float32_parameters() -> None:
    x = mt.asarray(RNG.normal(size=(6, 96)).astype(np.float16))
    w, b = (mt.asarray(RNG.normal(size=96).astype(np.float32)) for _ in range(2))
    y, pull = mt.vjp(lambda x, w, b: mt.layer_norm(x, 96, w, b), x, w, b)
    assert y.dtype == np.float32
    assert [g.dtype for g in pull(y)] == [np.float16, np.float32, np.float32]


def test_random_bits_are_those_of_the_cpu() -> None:
    key = mt.random.key(3)
    draws = [lambda k: mt.random.bits(k, (1001,)), lambda k: mt.random.bernoulli(k, 0.3, (1001,))]
    draws += [lambda k, d=d: mt.random.uniform(k, (1001,), d, -2.0, 3.0) for d in DTYPES]
    x = np.linspace(-1, 1, 1001)
    draws += [
        lambda k: mt.nn.dropout(mt.asarray(x), 0.3, key=k),
        lambda k: mt.nn.dropout_add(mt.asarray(x.astype(np.float16)), mt.asarray(x.astype(np.float16)), 0.3, key=k),
    ]
    for draw in draws:
        gpu = draw(key).numpy()
        with mt.use_device("cpu"):
            cpu = draw(mt.random.key(3)).numpy()
        np.testing.assert_array_equal(gpu.view(np.uint8), cpu.view(np.uint8))
    assert used("philox_fill<Uniform")
    assert used("dropout")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_random_numbers_are_those_of_the_cpu_but_for_last_places(dtype: np.dtype) -> None:
    draws = [lambda k: mt.random.normal(k, (1001,), dtype, 1.0, 2.0), lambda k: mt.random.normal(k, (1001,), dtype)]
    draws += [lambda k: mt.random.exponential(k, (1001,), dtype, 0.7), lambda k: mt.random.gumbel(k, (1001,), dtype)]
    unit = float(ml_dtypes.finfo(dtype).eps)
    for draw in draws:
        gpu = draw(mt.random.key(3)).numpy()
        with mt.use_device("cpu"):
            cpu = draw(mt.random.key(3)).numpy()
        np.testing.assert_allclose(gpu.astype(np.float64), cpu.astype(np.float64), rtol=8 * unit, atol=8 * unit)
    for kind in ("Normal", "Exponential", "Gumbel"):
        assert used(f"philox_fill<{kind}")


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("ids", ["uniform", "repeated", "one"])
def test_gradients_of_reading_rows(ids: str, deterministic: bool) -> None:
    n, k, width = 500, 20_000, 33
    at = {"uniform": RNG.integers(0, n, k), "repeated": RNG.integers(0, 3, k), "one": np.full(k, 7)}[ids]
    table, g = RNG.normal(size=(n, width)).astype(np.float32), RNG.normal(size=(k, width)).astype(np.float32)
    expected = np.zeros((n, width))
    np.add.at(expected, at, g.astype(np.float64))
    with mt.use_deterministic(deterministic):
        runs = []
        for _ in range(10):
            _, pull = mt.vjp(lambda t: mt.nn.embedding(mt.asarray(at), t), mt.asarray(table))
            runs.append(pull(mt.asarray(g))[0].numpy())
    np.testing.assert_allclose(runs[0], expected, rtol=0, atol=2e-4 * np.abs(expected).max())
    if deterministic:
        assert all(r.tobytes() == runs[0].tobytes() for r in runs)
    assert used("add_in_order" if deterministic else "add_atomically")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_sums_of_columns_and_extremes_of_rows(dtype: np.dtype) -> None:
    for shape in ((700, 264), (3, 40_000), (130, 3001), (40, 20, 129)):
        x = RNG.normal(1, 2, shape)
        axes = tuple(range(len(shape) - 1))
        both(lambda x, a=axes: mt.sum(x, axis=a), dtype, x, factor=2)
        both(lambda x, a=axes: mt.mean(x, axis=a, keepdims=True), dtype, x, factor=2)
        both(lambda x: mt.mean(x), dtype, x, factor=2)
        short = x.astype(dtype)
        for fn, exact in ((mt.max, np.max), (mt.min, np.min)):
            np.testing.assert_array_equal(fn(mt.asarray(short), axis=-1).numpy(), exact(short, axis=-1))
            places = getattr(mt, f"arg{fn.__name__}")(mt.asarray(short), axis=-1)
            np.testing.assert_array_equal(places.numpy(), getattr(np, f"arg{fn.__name__}")(short, axis=-1))
    assert used("column_sums")
    assert used("row_places")
    assert dtype.itemsize > 2 or used("row_extremes")


@pytest.mark.parametrize("width", [(), (1,), (3,), (33,), (1024,), (8192,), (5, 7)], ids=str)
@pytest.mark.parametrize("index", [np.int64, np.int32, np.uint8])
def test_reading_rows(width: tuple[int, ...], index: type) -> None:
    at = RNG.integers(-200 if index is not np.uint8 else 0, 200, (30, 9)).astype(index)
    for dtype in map(np.dtype, (np.float32, ml_dtypes.bfloat16, np.int8, np.complex128)):
        x = RNG.integers(0, 100, (200, *width)).astype(dtype)
        gpu = mt.asarray(x)
        np.testing.assert_array_equal(gpu[mt.asarray(at)].numpy(), x[at])
        np.testing.assert_array_equal(gpu[3:][mt.asarray(at % 190)].numpy(), x[3:][at % 190])
        tables = np.stack([x, x[::-1]])
        np.testing.assert_array_equal(mt.take(mt.asarray(tables), mt.asarray(at), axis=1).numpy(), tables[:, at])
        with mt.index_checks(False):
            np.testing.assert_array_equal(gpu[mt.asarray(at.astype(np.int64) + 200)].numpy(), x[at])
    assert used("gather_rows")


@pytest.mark.parametrize(
    "dtype", [*DTYPES, *map(np.dtype, ("int8", "int64", "bool", "complex64", "complex128"))], ids=str
)
def test_the_last_write_stays(dtype: np.dtype) -> None:
    at = RNG.integers(0, 50, 10_000)
    x, v = (RNG.integers(0, 100, s).astype(dtype) for s in ((50, 3), (10_000, 3)))
    expected = x.copy()
    expected[at] = v
    for _ in range(5):
        got = mt.asarray(x).at[mt.asarray(at)].set(mt.asarray(v))
        np.testing.assert_array_equal(got.numpy(), expected)
    y = mt.asarray(x)
    y[mt.asarray(at)] = mt.asarray(v)
    np.testing.assert_array_equal(y.numpy(), expected)


def test_masks(emulated: bool) -> None:
    for shape in ((100_001 if emulated else 10_000_001,), (300, 1001), (0, 4)):
        host = RNG.random(shape) < 0.3
        x = RNG.normal(size=shape)
        np.testing.assert_array_equal(mt.asarray(x)[mt.asarray(host)].numpy(), x[host])
        for a, e in zip(mt.nonzero(mt.asarray(host)), np.nonzero(host), strict=True):
            np.testing.assert_array_equal(a.numpy(), e)
    assert used("write_true")


def test_kernels_run_on_the_current_stream(emulated: bool) -> None:
    """What comes before on the stream is done before: a kernel on another stream would read the old numbers."""
    rows = 64 if emulated else 4096
    stream = cp().cuda.Stream(non_blocking=True)
    x = mt.zeros((rows, 4096), dtype=mt.float32)
    w = mt.ones(4096, dtype=mt.float32)
    cp().cuda.Device().synchronize()
    with stream:
        y = x
        for _ in range(50):  # long enough that a kernel that does not wait overtakes it
            y = y + mt.asarray(np.float32(1))
        out = mt.layer_norm(y * mt.arange(4096, dtype=mt.float32), 4096, w)
    stream.synchronize()
    row = np.arange(4096) * 50.0
    expected = (row - row.mean()) / np.sqrt(row.var() + 1e-5)
    np.testing.assert_allclose(out[:3].numpy(), np.broadcast_to(expected, (3, 4096)), atol=1e-4)


def test_norm_of_more_elements_than_an_int_counts(needs_memory: Callable[[int], None]) -> None:
    rows, width = (1 << 21) + 3, 1024
    needs_memory(5 * rows * width * 2)
    x = mt.zeros((rows, width), dtype=mt.float16)
    tail = RNG.normal(size=(2, width)).astype(np.float16)
    x[-2:] = mt.asarray(tail)
    for fn in (lambda x: mt.layer_norm(x, width), mt.nn.softmax):
        got = fn(x)[-2:].numpy()
        with mt.use_device("cpu"):
            expected = fn(mt.asarray(tail)).numpy()
        np.testing.assert_allclose(got.astype(float), expected.astype(float), atol=5e-3)


def test_indexing_of_more_elements_than_an_int_counts(needs_memory: Callable[[int], None]) -> None:
    n = (1 << 31) + 8
    needs_memory(4 * n)
    x = mt.zeros(n, dtype=mt.int8)
    x[n - 1] = 7
    x[(1 << 31) - 2 : (1 << 31) + 2] = 3
    assert x[(1 << 31) - 3 : (1 << 31) + 3].tolist() == [0, 3, 3, 3, 3, 0]
    x[mt.asarray([n - 2, 5, n - 2])] = mt.asarray(np.array([1, 2, 3], np.int8))
    assert (int(x[n - 2]), int(x[5]), int(x[n - 1])) == (3, 2, 7)
    (dx,) = mt.vjp(lambda x: x[n - 4 :], mt.zeros(n, dtype=mt.float16))[1](mt.ones(4, dtype=mt.float16))
    assert dx.shape == (n,)
    assert dx[n - 5 :].tolist() == [0, 1, 1, 1, 1]


def test_errors_have_the_words_of_the_cpu() -> None:
    calls: list[Callable[[], Any]] = [
        lambda: mt.layer_norm(mt.ones((2, 3)), 4),
        lambda: mt.group_norm(mt.ones((2, 4, 3)), 3),
        lambda: mt.batch_norm(mt.ones((2, 4)), mt.zeros(3), mt.ones(4), training=True),
        lambda: mt.ones((2, 3)).at[mt.asarray([0, 5])].add(1.0),
        lambda: mt.nn.cross_entropy(mt.ones((2, 3)), mt.asarray([0, 3])),
        lambda: mt.nn.dropout(mt.ones(3), 1.5, key=mt.random.key(0)),
    ]
    for call in calls:
        texts = []
        for where in ("cpu", "cuda:0"):
            with mt.use_device(where), pytest.raises((ValueError, IndexError)) as e:
                call()
            texts.append((type(e.value), str(e.value)))
        assert texts[0] == texts[1]


# ----- large elementwise calls, and copies ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [512, 509])
def test_large_calls_and_copies_have_the_bits_of_the_cpu(
    width: int, dtype: np.dtype, emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of ours in the place of CuPy's, wherever operands lie."""
    shape = (64, 40, width)
    if emulated:
        shape = (3, 5, width // 16)
        monkeypatch.setattr(Op, "large", 1)
    hosts = {
        "full": RNG.normal(size=shape).astype(dtype),
        "turned": RNG.normal(size=(shape[2], *shape[:2])).astype(dtype),
        "row": RNG.normal(size=shape[2:]).astype(dtype),
        "column": RNG.normal(size=(*shape[:2], 1)).astype(dtype),
        "cut": RNG.normal(size=(*shape[:2], shape[2] + 8)).astype(dtype),
        "one": np.asarray(0.75, dtype),
    }
    hosts["full"].reshape(-1)[:3] = [np.nan, np.inf, -0.0]

    def operand(name: str) -> mt.Array:
        x = mt.asarray(hosts[name])
        return {"turned": lambda: mt.permute_dims(x, (1, 2, 0)), "cut": lambda: x[..., 3:-5]}.get(name, lambda: x)()

    def results() -> list[np.ndarray]:
        out: list[np.ndarray] = []
        for a, b in (
            ("full", "turned"),
            ("turned", "turned"),
            ("turned", "row"),
            ("full", "column"),
            ("cut", "one"),
            ("column", "row"),
            ("cut", "full"),
        ):
            x, y = operand(a), operand(b)
            found = [x + y, x * y - 1.5, mt.maximum(x, y), x > y, mt.where(x > y, x, 0.5), x.astype(mt.float32)]
            found += [x.astype(mt.bfloat16), mt.reshape(x, (-1,)), mt.abs(x), -x]
            out += map(bits, found)
        return out

    def bits(found: mt.Array) -> np.ndarray:
        a = found.numpy().copy()
        a[np.isnan(a)] = 7  # which NaN it is, is nobody's promise
        return a.view(np.uint8)

    with mt.use_device("cpu"), np.errstate(all="ignore"):
        want = results()
    for got, expected in zip(results(), want, strict=True):
        np.testing.assert_array_equal(got, expected)
