"""``pad``: every mode, every form of widths and values, NumPy as the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshtape as mt

rng = np.random.default_rng(6)
SHAPES = [(3,), (2,), (1,), (3, 2), (2, 3, 2)]
MODES: dict[str, list[dict[str, Any]]] = {
    "constant": [{}, {"constant_values": 1}, {"constant_values": (1, 2)}, {"constant_values": ((1, 2),)}],
    "edge": [{}],
    "reflect": [{}, {"reflect_type": "odd"}],
    "symmetric": [{}, {"reflect_type": "odd"}],
    "wrap": [{}],
    "linear_ramp": [{}, {"end_values": (1, 5)}, {"end_values": ((7, 0),)}],
    "maximum": [{}, {"stat_length": 2}, {"stat_length": (1, 2)}],
    "minimum": [{}, {"stat_length": 1}],
    "mean": [{}, {"stat_length": 2}],
    "median": [{}, {"stat_length": (1, 3)}],
}


def widths(ndim: int) -> list[Any]:
    pairs = [(0, 3), (2, 1), (1, 4)][:ndim]
    return [0, 2, (1, 2), ((1, 2),), (3,), tuple(pairs), [[1]] * ndim, 7, {0: 2, -1: (0, 1)}, np.asarray(pairs)]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32", "float64", "complex128"])
@pytest.mark.parametrize("mode", MODES)
def test_as_numpy(mode, dtype):
    for shape in SHAPES:
        x = (rng.normal(size=shape) * 5).astype(dtype)
        for width in widths(len(shape)):
            each = [{"constant_values": tuple((i, i + 1) for i in range(len(shape)))}] if mode == "constant" else []
            for options in [*MODES[mode], *each]:
                if dtype == "bool" and "reflect_type" in options:
                    continue
                if dtype == "complex128" and mode == "median":  # which has no order here
                    continue
                want = np.pad(x, width, mode, **options)
                got = mt.pad(mt.asarray(x), width, mode, **options)
                assert (got.shape, got.dtype) == (want.shape, want.dtype)
                eps = {"float16": 0.2, "float32": 1e-4}.get(dtype, 1e-12)
                np.testing.assert_allclose(
                    np.asarray(got), want, rtol=eps, atol=eps, err_msg=f"{shape} {width} {options}"
                )


@pytest.mark.parametrize("mode", MODES)
def test_compiled_split_and_differentiated(mode):
    x = mt.asarray(rng.normal(size=(4, 3)))
    for options in MODES[mode]:
        fn = lambda x: mt.pad(x, ((1, 2), (0, 3)), mode, **options)  # noqa: B023, E731
        want = np.asarray(fn(x))
        np.testing.assert_allclose(np.asarray(mt.compile(fn)(x)), want, rtol=1e-12)
        split = mt.distribute(x, mt.Mesh({"data": 2}), data=mt.Shard(0))
        np.testing.assert_allclose(np.asarray(fn(split)), want, rtol=1e-12)
        mt.check_grads(fn, x, order=1)


def test_empty_pads_with_anything():
    x = np.arange(6).reshape(2, 3)
    got = np.asarray(mt.pad(mt.asarray(x), ((1, 2), (0, 1)), "empty"))
    assert got.shape == (5, 4)
    np.testing.assert_array_equal(got[1:3, :3], x)


@pytest.mark.parametrize("value", [(1, 2, 3), ((1, 2), (3, 4), (5, 6)), ((1, 2, 3),), [[[1]]], (1, (2, 3))])
@pytest.mark.parametrize("what", ["pad_width", "constant_values", "end_values", "stat_length"])
def test_what_does_not_fit(what, value):
    modes = {"constant_values": "constant", "end_values": "linear_ramp", "stat_length": "mean", "pad_width": "edge"}
    options = {what: value} if what != "pad_width" else {}
    with pytest.raises(mt.errors.ShapeError, match=r"^\[pad\] .* \(before, after\)"):
        mt.pad(mt.ones((2, 2)), value if what == "pad_width" else 1, modes[what], **options)


def test_other_errors():
    x = mt.ones((2, 2))
    with pytest.raises(ValueError, match="mode must be one of constant, empty, linear_ramp"):
        mt.pad(x, 1, mode="mirror")
    with pytest.raises(ValueError, match="reflect_type must be"):
        mt.pad(x, 1, mode="reflect", reflect_type="strange")
    with pytest.raises(ValueError, match="not negative"):
        mt.pad(x, -1)
    with pytest.raises(ValueError, match="integers"):
        mt.pad(x, 1.5)
    with pytest.raises(ValueError, match="stat_length of 0 gives no maximum"):
        mt.pad(x, 1, mode="maximum", stat_length=0)
    with pytest.raises(mt.errors.ShapeError, match="no elements to repeat"):
        mt.pad(mt.zeros((0, 2)), 1, mode="edge")
