"""rotary_embedding: the kernel's own source, run on the CPU, against NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from meshtape.arrays import OPS

ROTARY = OPS["rotary_embedding"]
SHORT = [pytest.param(np.float16, marks=pytest.mark.slow), ml_dtypes.bfloat16]
DTYPES = [np.float32, np.float64, *SHORT]
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "whole vectors": ((2, 3, 5, 32), (5, 16)),
    "odd halves": ((2, 5, 6), (5, 3)),
    "positions of each sequence": ((2, 3, 5, 8), (2, 1, 5, 4)),
    "groups of heads": ((2, 2, 3, 4, 16), (4, 8)),
    "tables in every other dimension": ((2, 3, 2, 3, 2, 8), (2, 1, 2, 1, 2, 4)),
    "tables of everything": ((3, 4, 8), (3, 4, 4)),
    "one row": ((8,), (4,)),
    "one angle": ((3, 8), (1, 4)),
    "many rows": ((300, 4), (300, 2)),
    "nothing": ((0, 3, 4), (3, 2)),
    "no pairs": ((3, 0), (3, 0)),
}


def operands(place: Any, case: str, dtype: Any, table: Any = None) -> list[Any]:
    rng = np.random.default_rng(0)
    shape, own = CASES[case]
    return [place(rng.standard_normal(s), t) for s, t in ((shape, dtype), *[(own, table or dtype)] * 2)]


def turned(x: Any, cosines: Any, sines: Any, inverse: bool) -> np.ndarray:
    x, c, s = (a.astype(np.float64) for a in (x, cosines, sines))
    a, b = np.split(x, 2, axis=-1)
    s = -s if inverse else s
    return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("case", CASES)
def test_values(emulator: Any, place: Any, close: Any, case: str, dtype: Any) -> None:
    args = operands(place, case, dtype)
    for inverse in (False, True):
        got = ROTARY.overrides["cupy"](*args, inverse=inverse)
        assert (got.dtype, got.shape) == (dtype, args[0].shape)
        close(got, turned(*args, inverse))
    assert len(emulator.launched) == (2 if args[0].size else 0)


@pytest.mark.parametrize("dtype", SHORT, ids=lambda d: np.dtype(d).name)
def test_short_floats_beside_tables_in_float32(emulator: Any, place: Any, close: Any, dtype: Any) -> None:
    args = operands(place, "groups of heads", dtype, np.float32)
    got = ROTARY.overrides["cupy"](*args, inverse=False)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, turned(*args, False).astype(np.float32).astype(dtype))
    if not (emulator.seed or emulator.descending):
        assert emulator.launched[0][1].endswith("float, 8>")  # vectors of 16 bytes


LAYOUTS: dict[str, Callable[[Any, Any], Any]] = {  # of (2, 3, 5, 32)
    "heads behind positions": lambda place, x: place(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
    "positions first": lambda place, x: place(x.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3),
    "backwards": lambda place, x: place(x[:, ::-1])[:, ::-1],
    "part of a row": lambda place, x: place(np.concatenate([x, x], axis=-1))[..., :32],
    "at an odd address": lambda place, x: place(np.concatenate([x[..., :1], x], axis=-1))[..., 1:],
    "apart": lambda place, x: place(np.repeat(x, 2, axis=-1))[..., ::2],
    "turned over": lambda place, x: place(x.transpose(3, 2, 1, 0)).transpose(3, 2, 1, 0),
    "repeated": lambda place, x: np.broadcast_to(place(x[:, :1]), x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(emulator: Any, place: Any, close: Any, layout: str) -> None:
    x, c, s = operands(place, "whole vectors", np.float32)
    x = LAYOUTS[layout](lambda a: place(np.ascontiguousarray(a), np.float32), np.asarray(x))
    got = ROTARY.overrides["cupy"](x, c, s, inverse=False)
    close(got, turned(x, c, s, False))
    assert got.flags.c_contiguous
    assert len(emulator.launched) == 1
    # Tables that lie in different ways are made alike.
    other = place(np.ascontiguousarray(s.T), np.float32).T
    close(ROTARY.overrides["cupy"](x, c, other, inverse=False), turned(x, c, s, False))


def test_tables_of_other_dtypes_are_no_business_of_the_kernel(emulator: Any, place: Any) -> None:
    x, c, s = operands(place, "odd halves", np.float32)
    assert ROTARY.overrides["cupy"](x, c, place(s, np.float64), inverse=False) is NotImplemented
