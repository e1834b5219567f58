"""layer_norm and rms_norm: the kernels' own sources, run on the CPU, against the ops in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from meshtape.arrays import OPS
from meshtape.arrays.kernels import geometry
from meshtape.arrays.kernels.geometry import ladder, persistent_grid, row_plan, vector_length

pytestmark = pytest.mark.usefixtures("compiled_together")

# The kernels are the same for both short floats: by default one of them is tried.
SHORT = [pytest.param(np.float16, marks=pytest.mark.slow), ml_dtypes.bfloat16]
DTYPES = [np.float32, np.float64, *SHORT]
# Widths on both sides of every rung, odd ones, and rows that do not fit in registers.
SHAPES = [(5, 7), (9, 200), (1, 1), (3, 1024), (2, 1101), (0, 4), (4, 0)]
PARAMS = {"naxes": 1, "eps": 1e-5}


def run(name: str, *args: Any, **params: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What the kernels give, and what the op gives in float64."""
    op = OPS[name]
    got = op.overrides["cupy"](*args, **params)
    floats = [a.astype(np.float64) if a.dtype.kind not in "biu" else a for a in args]
    expected = op.numpy(*floats, **params)
    return (got, expected) if op.nout > 1 else ((got,), (expected,))


def operands(place: Any, shape: tuple[int, ...], dtype: Any, naxes: int = 1, mixed: bool = False) -> list[Any]:
    """x, weight, bias, and the cotangent of the result."""
    rng = np.random.default_rng(sum(shape))
    other = np.float32 if mixed else dtype
    own = shape[len(shape) - naxes :]
    x, g = rng.normal(3, 2, shape), rng.normal(size=shape)
    w, b = rng.normal(size=own), rng.normal(size=own)
    return [place(x, dtype), place(w, other), place(b, other), place(g, other)]


def shortened(emulator: Any, monkeypatch: pytest.MonkeyPatch, width: int) -> int:
    """Threads in random order are slow: there a quarter of a long row is too long for the registers."""
    if not emulator.seed:
        return width
    monkeypatch.setattr(geometry, "LADDER", geometry.LADDER[:-1])
    return geometry.ceil_div(width, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_values_and_gradients(emulator: Any, place: Any, close: Any, kind: str, shape: Any, dtype: Any) -> None:
    x, w, b, g = operands(place, shape, dtype)
    # Where a row is one element its deviation is zero: what cancels is this much larger than the cotangent.
    factor = PARAMS["eps"] ** -0.5 if shape[-1] == 1 else 1.0
    for name, args in (
        (f"{kind}_norm", (x, w, b)[: 3 if kind == "layer" else 2]),
        (f"{kind}_norm_backward", (g, x, w)),
    ):
        got, expected = run(name, *args, **PARAMS)
        for a, e in zip(got, expected, strict=True):
            assert a.dtype == dtype
            close(a, e, factor=factor)


@pytest.mark.parametrize("width", [7, 200, 1101, 16385])
def test_rows_of_equal_numbers_have_no_deviations(emulator: Any, place: Any, width: int) -> None:
    values = np.array([3.505765, -2.1360219, 0.1, 1e6])[:, None]
    x, w, b, g = operands(place, (4, width), np.float32)
    x[...] = values
    (y,), _ = run("layer_norm", x, w, b, **PARAMS)
    np.testing.assert_array_equal(y, np.broadcast_to(b, y.shape))
    (_, dw, _), _ = run("layer_norm_backward", g, x, w, **PARAMS)
    np.testing.assert_array_equal(dw, 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("width", [8192, 8193, 16383, 16385, 20000])
def test_long_rows(
    emulator: Any, place: Any, close: Any, monkeypatch: pytest.MonkeyPatch, width: int, dtype: Any
) -> None:
    if (emulator.seed or emulator.descending) and (width, dtype) not in ((8193, np.float64), (16385, np.float32)):
        pytest.skip("the order of the threads is tried on one of these")
    x, w, b, g = operands(place, (2, shortened(emulator, monkeypatch, width)), dtype)
    for name, args in (("layer_norm", (x, w, b)), ("layer_norm_backward", (g, x, w)), ("rms_norm_backward", (g, x, w))):
        for a, e in zip(*run(name, *args, **PARAMS), strict=True):
            close(a, e)
    long = [", 512, 0, " in k for _, k, _, _ in emulator.launched if k.startswith(("norm_forward", "norm_backward"))]
    assert long == [width > (8192 if dtype == np.float64 else 16384)] * 3


@pytest.mark.parametrize("dtype", SHORT, ids=lambda d: np.dtype(d).name)
def test_short_floats_beside_float32(emulator: Any, place: Any, close: Any, dtype: Any) -> None:
    x, w, b, g = operands(place, (6, 96), dtype, mixed=True)
    (y,), (expected,) = run("layer_norm", x, w, b, **PARAMS)
    assert y.dtype == np.float32
    close(y, expected)
    for of_sum, of_x in (((), dtype), ((g,), np.float32)):  # of a sum its cotangent is added in its own dtype
        got, expected = run("layer_norm_backward", g, x, w, *of_sum, **PARAMS)
        assert [a.dtype for a in got] == [of_x, np.float32, np.float32]
        for a, e in zip(got, expected, strict=True):
            close(a.astype(dtype) if a is got[0] else a, e)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", [(9, 200), (5, 7), (2, 1101), (1, 16400), (1, 16401), (0, 4)])
def test_norms_of_a_sum_have_the_bits_of_the_sum_and_the_norm(
    emulator: Any, place: Any, close: Any, monkeypatch: pytest.MonkeyPatch, shape: Any, dtype: Any
) -> None:
    """Forward in one launch; backward the cotangent of the sum, of its dtype or wide, is added in the same pass."""
    if shape[1] > 4096 and dtype is not (np.float32 if emulator.seed or emulator.descending else ml_dtypes.bfloat16):
        pytest.skip("long rows are slow to emulate: one dtype for each order")
    if shape[1] == 16400 and emulator.seed:
        pytest.skip("in random order threads are slower yet: the odd length alone")
    if shape[1] > 4096:
        shape = shape[0], shortened(emulator, monkeypatch, shape[1])
    x, w, b, g = operands(place, shape, dtype)
    residual = place(np.random.default_rng(1).normal(size=shape), dtype)
    for kind, own in (("layer", (w, b)), ("rms", (w,))):
        norm, backward = (OPS[n].overrides["cupy"] for n in (f"{kind}_norm", f"{kind}_norm_backward"))
        start = len(emulator.launched)
        y, total = OPS[f"add_{kind}_norm"].overrides["cupy"](x, residual, *own, **PARAMS)
        assert len(emulator.launched) - start == (x.size > 0)
        np.testing.assert_array_equal(total, x + residual)
        np.testing.assert_array_equal(y, norm(place(x + residual), *own, **PARAMS))
        close(y, OPS[f"{kind}_norm"].numpy(*(v.astype(np.float64) for v in (x + residual, *own)), **PARAMS))
        dx, *sums = backward(g, total, w, **PARAMS)
        for g_sum in (residual, place(residual, np.float32 if residual.itemsize < 4 else dtype)):
            got, *others = backward(g, total, w, g_sum, **PARAMS)
            assert got.dtype == g_sum.dtype
            np.testing.assert_array_equal(got, dx.astype(g_sum.dtype) + g_sum)
            for a, e in zip(others, sums, strict=True):
                np.testing.assert_array_equal(a, e)


def test_a_sum_of_several_dtypes_is_rounded_to_its_own_before_the_norm(emulator: Any, place: Any, close: Any) -> None:
    x, w, _, g = operands(place, (4, 24), ml_dtypes.bfloat16)
    residual = place(np.random.default_rng(1).normal(size=x.shape), np.float32)
    for r, weight in (
        (residual, w),
        (place(residual, x.dtype), place(w, np.float64)),
        (residual, place(w, np.float64)),
    ):
        y, total = OPS["add_rms_norm"].overrides["cupy"](x, r, weight, **PARAMS)
        np.testing.assert_array_equal(total, x + r)
        assert total.dtype == r.dtype
        np.testing.assert_array_equal(y, OPS["rms_norm"].overrides["cupy"](place(x + r), weight, **PARAMS))
    dx, _ = OPS["rms_norm_backward"].overrides["cupy"](g, x, w, place(residual, np.float64), **PARAMS)
    assert dx.dtype == np.float64
    close(
        dx.astype(x.dtype), OPS["rms_norm_backward"].numpy(*(v.astype(float) for v in (g, x, w, residual)), **PARAMS)[0]
    )


def test_rows_of_a_block_begin_at_the_same_place_of_a_vector(emulator: Any, place: Any, close: Any) -> None:
    """A thread adds up its own columns: blocks go over rows that lie whole vectors apart."""
    for rows, width in ((61, 1030), (40, 2051)):
        x, w, _, g = operands(place, (rows, width), ml_dtypes.bfloat16)
        for a, e in zip(*run("layer_norm_backward", g, x, w, **PARAMS), strict=True):
            close(a, e)
        _, kernel, (blocks, _, _), _ = emulator.launched[-2]
        assert blocks < rows
        assert blocks * width % 8 == 0, kernel


def test_other_mixtures_are_computed_in_what_they_promote_to(emulator: Any, place: Any, close: Any) -> None:
    x, w, b, g = operands(place, (4, 33), np.float32)
    (y,), (expected,) = run("layer_norm", x, place(w, np.float64), b, **PARAMS)
    assert y.dtype == np.float64
    close(y, expected)
    got, _ = run("rms_norm_backward", g, place(x, np.float64), w, **PARAMS)
    assert [a.dtype for a in got] == [np.float64, np.float32]


def test_several_normalised_dimensions_and_views(emulator: Any, place: Any, close: Any) -> None:
    x, w, b, g = operands(place, (3, 4, 10), np.float32, naxes=2)
    for name, args in (("layer_norm", (x, w, b)), ("layer_norm_backward", (g, x, w))):
        for a, e in zip(*run(name, *args, naxes=2, eps=1e-3), strict=True):
            close(a, e)
    turned = place(np.ascontiguousarray(x.transpose(2, 1, 0)))  # the same numbers, with gaps between neighbours
    (y,), (expected,) = run("layer_norm", turned.transpose(2, 1, 0), w, b, naxes=2, eps=1e-3)
    close(y, expected)


def test_memory_that_begins_within_a_vector(emulator: Any, place: Any, close: Any) -> None:
    """Of x it is copied; parameters are read element by element."""
    x, w, _, g = operands(place, (4, 64), np.float32)
    for x_at, w_at in ((1, 0), (0, 1), (3, 1)):
        off, w_off = (
            place(np.pad(v.reshape(-1), (at, int(at > 0))))[at : at + v.size].reshape(v.shape)
            for v, at in ((x, x_at), (w, w_at))
        )
        for a, e in zip(*run("layer_norm_backward", g, off, w_off, **PARAMS), strict=True):
            close(a, e)
        assert emulator.launched[-2][1].endswith(" true>" if w_at else " false>")


def test_many_rows_a_block_and_many_blocks(emulator: Any, place: Any, close: Any) -> None:
    """Persistent blocks go over several rows each, and the sums of all blocks come together."""
    x, w, _, g = operands(place, (203, 40), np.float32)
    for a, e in zip(*run("layer_norm_backward", g, x, w, **PARAMS), strict=True):
        close(a, e)
    assert emulator.launched[0][2][0] < -(-203 // 8)


@pytest.mark.parametrize(
    ("dtype", "mixed"),
    [
        (np.float32, False),
        *(pytest.param(d, m, marks=pytest.mark.slow) for d in (np.float16, ml_dtypes.bfloat16) for m in (False, True)),
    ],
)
def test_rows_whose_sums_no_shared_memory_holds(emulator: Any, place: Any, close: Any, dtype: Any, mixed: bool) -> None:
    """On a small device the sums of the parameters' gradients are made column by column."""
    emulator.device = emulator.device._replace(shared_memory=48 << 10)
    x, w, _, g = operands(place, (3, 8192), dtype, mixed=mixed)
    for a, e in zip(*run("layer_norm_backward", g, x, w, **PARAMS), strict=True):
        close(a, e)
    assert any("norm_columns" in k for _, k, _, _ in emulator.launched)


def test_large_means_do_not_cancel(emulator: Any, place: Any) -> None:
    for width in (64, 20000):
        x = place(1e4 + np.random.default_rng(0).normal(size=(2, width)), np.float32)
        one, zero = place(np.ones(width), np.float32), place(np.zeros(width), np.float32)
        (y,), (expected,) = run("layer_norm", x, one, zero, **PARAMS)
        np.testing.assert_allclose(y, expected, atol=2e-3)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name)
def test_squares_that_overflow_the_storage_type(emulator: Any, place: Any, close: Any, dtype: Any) -> None:
    x = place([[6e4, -6e4, 3e4]], dtype)
    one, zero = place(np.ones(3), dtype), place(np.zeros(3), dtype)
    for name, args in (("layer_norm", (x, one, zero)), ("rms_norm", (x, one))):
        (y,), (expected,) = run(name, *args, **PARAMS)
        close(y, expected)


def test_constant_rows_and_nan(emulator: Any, place: Any) -> None:
    x = place(np.full((2, 4), 3.0), np.float32)
    x[1, 2] = np.nan
    one, zero, g = place(np.ones(4), np.float32), place(np.zeros(4), np.float32), place(np.ones((2, 4)), np.float32)
    (y,), _ = run("layer_norm", x, one, zero, **PARAMS)
    assert y[0].tolist() == [0] * 4
    assert np.isnan(y[1]).all()
    (dx, _, _), _ = run("layer_norm_backward", g, x, one, **PARAMS)
    assert dx[0].tolist() == [0] * 4


def test_offsets_beyond_two_to_the_31(emulator: Any, emulation: Any, place: Any, close: Any) -> None:
    """The last blocks of a launch over more elements than an int counts, in memory that is mapped but never touched."""
    rows, width = (1 << 21) + 3, 1024
    x = emulation.guarded((rows, width), np.float16, emulator.xp._at)
    x[-2:] = np.random.default_rng(0).normal(size=(2, width))
    w, b = place(np.ones(width), np.float16), place(np.zeros(width), np.float16)
    emulator.blocks = range(rows - 2, rows)
    y = OPS["layer_norm"].overrides["cupy"](x, w, b, **PARAMS)
    close(y[-2:], OPS["layer_norm"].numpy(x[-2:].astype(float), w.astype(float), b.astype(float), **PARAMS))


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_every_width_has_a_plan_that_covers_it(itemsize: int) -> None:
    top = ladder(itemsize)[-1]
    for width in (*range(1, 300), 1023, 1024, 1025, 4095, 4096, 4097, top[0] * top[1]):
        for aligned in (0, itemsize):
            plan = row_plan(width, itemsize, vector_length(width, (itemsize,), (aligned,)))
            if not plan.items:
                assert width > 4096
                continue
            assert plan.threads * plan.items >= width
            assert plan.items % plan.vector == 0
            assert plan.vector == 1 or (aligned == 0 and width % plan.vector == 0)
            assert plan.threads * plan.rows <= 1024
    assert not row_plan(top[0] * top[1] + 16, itemsize, 16 // itemsize).items


def test_a_persistent_grid_is_never_larger_than_the_work() -> None:
    for blocks in (1, 7, 132, 10_000):
        for shared in (0, 1 << 10, 200 << 10):
            n = persistent_grid(blocks, 132, 256, shared, 227 << 10)
            assert 1 <= n <= blocks
            assert n <= 132 * 4
