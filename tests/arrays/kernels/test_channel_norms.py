"""group_norm, instance_norm and batch_norm: the kernels' own sources, run on the CPU, against the ops in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from meshtape.arrays import OPS
from meshtape.arrays.kernels.channel_norms import layout

# The kernels are the same for both short floats: by default one of them is tried.
SHORT = [pytest.param(np.float16, marks=pytest.mark.slow), ml_dtypes.bfloat16]
DTYPES = [np.float32, np.float64, *SHORT]


def check(close: Any, name: str, *args: Any, factor: float = 1.0, **params: Any) -> tuple[Any, ...]:
    op = OPS[name]
    got = op.overrides["cupy"](*args, **params)
    expected = op.numpy(*(a.astype(np.float64) for a in args), **params)
    kept = op.avals(args, params)
    pairs = zip(got, expected, kept, strict=True) if op.nout > 1 else [(got, expected, kept[0])]
    for a, e, aval in pairs:
        assert (a.shape, a.dtype) == (aval.shape, aval.dtype)
        close(a, e, factor=factor)
    return got


def arrays(place: Any, shape: tuple[int, ...], axis: int, dtype: Any, other: Any = None) -> list[Any]:
    """x, weight, bias, the cotangent, and those of mean and variance."""
    rng = np.random.default_rng(sum(shape))
    x, g = rng.normal(2, 3, shape), rng.normal(size=shape)
    c = shape[axis]
    w, b, gm, gv = (rng.normal(size=c) for _ in range(4))
    wide = np.float64 if dtype == np.float64 else np.float32
    other = other or dtype
    return [place(x, dtype), place(w, other), place(b, other), place(g, other), place(gm, wide), place(gv, wide)]


# shape, dimension of the channels, groups: few and many channels a group, positions that vectors fit and do not, groups
# that keep no device busy, none at all.
GROUPS = [
    ((2, 4, 3, 5), 1, 2),
    ((1, 8, 64), 1, 2),
    ((2, 40, 9), 1, 2),
    ((3, 6), 1, 3),
    ((2, 3, 700), 1, 3),
    ((2, 7, 6), 2, 3),
    ((1, 5, 600), 2, 1),
    ((1, 5, 70), 2, 70),
    ((2, 50, 24), 2, 3),
    ((3, 300, 16), 2, 8),
    ((1, 4, 9001), 1, 2),
    ((1, 4, 9001), 1, 1),
    ((3, 24, 7, 7), 1, 2),
    ((0, 4, 2), 1, 2),
    ((2, 4, 0), 1, 2),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("shape", "axis", "groups"), GROUPS)
def test_group_norm(emulator: Any, place: Any, close: Any, shape: Any, axis: int, groups: int, dtype: Any) -> None:
    x, w, b, g, *_ = arrays(place, shape, axis, dtype)
    params = {"num_groups": groups, "axis": axis, "eps": 1e-2}
    check(close, "group_norm", x, w, b, **params)
    check(close, "group_norm_backward", g, x, w, factor=2, **params)


BATCHES = [
    ((5, 4, 3), 1),
    ((2, 3, 64), 1),
    ((3, 2, 3000), 1),
    ((70, 40), 1),
    ((1, 3), 1),
    ((4, 9, 33), 2),
    ((600, 2, 8), 2),
    ((6, 2, 264), 2),
    ((8, 3, 9), 1),
    ((66, 16, 7, 7), 1),
    ((0, 4, 3), 1),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("shape", "axis"), BATCHES)
def test_batch_norm(emulator: Any, place: Any, close: Any, shape: Any, axis: int, dtype: Any) -> None:
    x, w, b, g, gm, gv = arrays(place, shape, axis, dtype)
    params = {"axis": axis, "eps": 1e-2}
    _, *statistics, _, _ = check(close, "batch_norm", x, w, b, gm, gv, momentum=0.25, **params)
    check(close, "batch_norm_backward", g, gm, gv, *statistics, x, w, factor=2, **params)
    var = place(np.abs(gv) + 0.5, gv.dtype)
    check(close, "batch_norm_inference", x, gm, var, w, b, **params)


def test_channels_last_are_read_16_bytes_at_a_time(emulator: Any, place: Any) -> None:
    """Sums, factors, and one pass: three launches, one more where weight and bias get a sum over the samples."""
    x, w, b, g, gm, gv = arrays(place, (4, 9, 16), 2, ml_dtypes.bfloat16)
    params: dict[str, Any] = {"axis": 2, "eps": 1e-2}
    batch, group = ([OPS[n + e].overrides["cupy"] for e in ("", "_backward")] for n in ("batch_norm", "group_norm"))
    _, mean, var, _, _ = batch[0](x, w, b, gm, gv, momentum=0.25, **params)
    batch[1](g, gm, gv, mean, var, x, w, **params)
    group[0](x, w, b, num_groups=4, **params)
    group[1](g, x, w, num_groups=4, **params)
    found = [(file, kernel.partition("<")[0], kernel.endswith(", 8>")) for file, kernel, *_ in emulator.launched]
    forward, backward = (
        [("channel_norm.cu", n, n in ("channel_sums", "linear")) for n in ("channel_sums", factors, "linear")]
        for factors in ("forward_factors", "backward_factors")
    )
    assert found == [*forward, *backward, *forward, *backward, ("columns.cu", "sum_parts", False)]


def test_a_group_is_read_16_bytes_at_a_time_and_once(emulator: Any, place: Any) -> None:
    """A row of the forward kernel; kept in shared memory backward. Vectors cross the borders of channels of 49."""
    x, w, b, g, *_ = arrays(place, (5, 64, 7, 7), 1, ml_dtypes.bfloat16)
    OPS["group_norm"].overrides["cupy"](x, w, b, num_groups=4, axis=1, eps=1e-2)
    OPS["group_norm_backward"].overrides["cupy"](g, x, w, num_groups=4, axis=1, eps=1e-2)
    found = [k for _, k, *_ in emulator.launched]
    assert found[:2] == [
        "group_norm_forward<bfloat16, bfloat16, 128, 8, false>",
        "group_norm_backward<bfloat16, bfloat16, false>",
    ]


def test_sums_of_channels_of_49_positions_are_read_16_bytes_at_a_time(emulator: Any, place: Any, close: Any) -> None:
    """Where a batch is large each position is a column at first; a small one goes element by element."""
    for samples, name in ((64, "channel_sums<true, false, bfloat16, bfloat16, 8>"), (8, "channel_sums<false, ")):
        x, w, b, _, gm, gv = arrays(place, (samples, 8, 7, 7), 1, ml_dtypes.bfloat16)
        start = len(emulator.launched)
        check(close, "batch_norm", x, w, b, gm, gv, axis=1, eps=1e-2, momentum=0.25)
        assert emulator.launched[start][1].startswith(name)


@pytest.mark.parametrize("dtype", SHORT, ids=lambda d: np.dtype(d).name)
def test_short_floats_beside_float32(emulator: Any, place: Any, close: Any, dtype: Any) -> None:
    for shape, axis in (((2, 4, 8), 1), ((2, 3, 4), 2)):
        x, w, b, g, gm, gv = arrays(place, shape, axis, dtype, np.float32)
        params = {"axis": axis, "eps": 1e-2}
        check(close, "group_norm", x, w, b, num_groups=2, **params)
        check(close, "group_norm_backward", g, x, w, num_groups=2, **params)
        _, mean, var, _, _ = check(close, "batch_norm", x, w, b, gm, gv, momentum=0.25, **params)
        check(close, "batch_norm_backward", g, gm, gv, mean, var, x, w, **params)


RUNNING = [(np.float32, ml_dtypes.bfloat16)]
RUNNING += [
    pytest.param(dtype, r, marks=pytest.mark.slow)
    for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
    for r in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
    if (dtype, r) != RUNNING[0]
]


@pytest.mark.parametrize(("dtype", "running"), RUNNING, ids=lambda d: np.dtype(d).name)
def test_running_statistics_of_every_dtype(emulator: Any, place: Any, close: Any, dtype: Any, running: Any) -> None:
    """Beside weights of the dtype of the batch, and wider ones."""
    for other in dict.fromkeys((dtype, np.float64 if dtype is np.float64 else np.float32)):
        x, w, b, _, gm, gv = arrays(place, (3, 4, 5), 1, dtype, other)
        args, params = (x, w, b, *(place(a, running) for a in (gm, gv))), {"axis": 1, "eps": 1e-2, "momentum": 0.25}
        op = OPS["batch_norm"]
        got, wanted = op.overrides["cupy"](*args, **params), op.numpy(*(a.astype(np.float64) for a in args), **params)
        assert [a.dtype for a in got[3:]] == [running] * 2
        for a, e in zip(got, wanted, strict=True):
            close(a.astype(min(a.dtype, np.dtype(dtype), key=lambda d: d.itemsize)), e)  # sums are those of the batch


def test_large_means_do_not_cancel(emulator: Any, place: Any) -> None:
    """The variance is never a difference of large numbers, however the batch is cut into shares."""
    rng = np.random.default_rng(0)
    one, zero = place(np.ones(2), np.float32), place(np.zeros(2), np.float32)
    for shape, axis in (((40, 2, 300), 1), ((400, 3, 2), 2)):
        x = place(1e4 + rng.normal(size=shape), np.float32)
        _, mean, var, *_ = OPS["batch_norm"].overrides["cupy"](
            x, one, zero, zero, one, axis=axis, eps=1e-5, momentum=0.1
        )
        rest = tuple(i for i in range(len(shape)) if i != axis)
        np.testing.assert_allclose(mean, x.mean(axis=rest, dtype=np.float64), rtol=1e-6)
        np.testing.assert_allclose(var, x.var(axis=rest, dtype=np.float64), rtol=1e-4)


def test_constant_images(emulator: Any, place: Any) -> None:
    x, w = place(np.full((2, 4, 3), 3.0), np.float32), place(np.ones(4), np.float32)
    dx, _, _ = OPS["group_norm_backward"].overrides["cupy"](x, x, w, num_groups=2, axis=1, eps=1e-5)
    np.testing.assert_allclose(dx, 0, atol=1e-3)


def test_channels_beyond_two_to_the_31(emulator: Any, emulation: Any, place: Any, close: Any) -> None:
    """The last group of more elements than an int counts, in memory that is mapped but never touched."""
    shape = ((1 << 20) + 1, 2, 1024)
    x = emulation.guarded(shape, np.float16, emulator.xp._at)
    x[-1] = np.random.default_rng(0).normal(size=shape[1:])
    w = place(np.ones(2), np.float16)
    emulator.blocks = range(2 * shape[0] - 1, 2 * shape[0])
    y = OPS["group_norm"].overrides["cupy"](x, w, w, num_groups=2, axis=1, eps=1e-5)
    expected = OPS["group_norm"].numpy(
        x[-1:].astype(float), w.astype(float), w.astype(float), num_groups=2, axis=1, eps=1e-5
    )
    close(y[-1, 1], expected[0, 1])


def test_with_one_position_both_layouts_are_one() -> None:
    assert layout((5, 3), 1) == layout((5, 3, 1, 1), 1) == (5, 3, 1, True)
    assert layout((2, 4, 5, 3), 3) == (2, 3, 20, True)
