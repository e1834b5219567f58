"""Attention's kernels, run on the CPU, against the ops in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from meshtape.arrays.kernels import attention as kernels
from meshtape.arrays.nn.attention import ATTENTION, ATTENTION_BACKWARD

SHORT = [pytest.param(np.float16, marks=pytest.mark.slow), ml_dtypes.bfloat16]


def both(close: Any, *operands: np.ndarray, diagonal: int | None = None, scale: float = 0.3, seed: int = 7) -> list[Any]:
    """The kernels' result and cotangents, compared with those of the ops in float64."""
    q, *_ = operands
    params = {"scale": scale, "diagonal": diagonal}
    wide = [x if x.dtype.kind == "b" else x.astype(np.float64) for x in operands]
    out, expected = kernels.attention(*operands, **params), ATTENTION.numpy(*wide, **params)
    assert out.dtype == q.dtype
    g = np.random.default_rng(seed).normal(size=out.shape).astype(q.dtype)
    found = kernels.attention_backward(g, *operands, **params)
    wanted = ATTENTION_BACKWARD.numpy(g.astype(np.float64), *wide, **params)
    for x, like, y in zip((out, *found), (out, *operands), (expected, *wanted), strict=False):
        assert x.dtype == like.dtype
        assert x.shape == like.shape
        close(x, y)
    return [out, *found]


def operands(place: Any, dtype: Any, q: tuple[int, ...], k: tuple[int, ...], e: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [place(rng.normal(size=shape), dtype) for shape in (q, k, (*k[:-1], e))]


@pytest.mark.parametrize("dtype", SHORT, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(
    ("q", "k", "e"), [((1, 1), (1, 1), 1), ((2, 9, 24), (2, 70, 24), 24), ((130, 64), (33, 64), 40), ((5, 100), (66, 100), 128)]
)
@pytest.mark.parametrize("diagonal", [None, 0, 3])
def test_values_and_cotangents(emulator: Any, place: Any, close: Any, dtype: Any, q: Any, k: Any, e: int, diagonal: Any) -> None:
    both(close, *operands(place, dtype, q, k, e), diagonal=diagonal)
