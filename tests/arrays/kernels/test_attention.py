"""Attention's kernels, run on the CPU, against the ops in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.kernels import attention as kernels
from meshtape.arrays.nn.attention import ATTENTION, ATTENTION_BACKWARD

SHORT = [pytest.param(np.float16, marks=pytest.mark.slow), ml_dtypes.bfloat16]


def both(
    close: Any, *operands: np.ndarray, diagonal: int | None = None, scale: float = 0.3, seed: int = 7
) -> list[Any]:
    """The kernels' result and cotangents, compared with those of the ops in float64."""
    q, *_ = operands
    params = {"scale": scale, "diagonal": diagonal}
    wide = [x if x.dtype.kind == "b" else x.astype(np.float64) for x in operands]
    (out, *of_rows), saved = kernels.attention(*operands, **params), ATTENTION.numpy(*wide, **params)
    assert (out.dtype, *(a.dtype for a in of_rows)) == (q.dtype, np.float32, np.float32)
    np.testing.assert_allclose(of_rows, saved[1:], rtol=1e-4, atol=1e-4)
    g = np.random.default_rng(seed).normal(size=out.shape).astype(q.dtype)
    found = kernels.attention_backward(g, *operands[:3], out, *of_rows, *operands[3:], **params)
    wanted = ATTENTION_BACKWARD.numpy(g.astype(np.float64), *wide[:3], *saved, *wide[3:], **params)
    for x, like, y in zip((out, *found), (out, *operands), (saved[0], *wanted), strict=False):
        assert x.dtype == like.dtype
        assert x.shape == like.shape
        close(x, y)
    return [out, *found]


def operands(place: Any, dtype: Any, q: tuple[int, ...], k: tuple[int, ...], e: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [place(rng.normal(size=shape), dtype) for shape in (q, k, (*k[:-1], e))]


@pytest.mark.parametrize("dtype", SHORT, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(
    ("q", "k", "e"),
    [((1, 1), (1, 1), 1), ((2, 9, 24), (2, 70, 24), 24), ((130, 64), (33, 64), 40), ((5, 100), (66, 100), 128)],
)
@pytest.mark.parametrize("diagonal", [None, 0, 3])
def test_values_and_cotangents(
    emulator: Any, place: Any, close: Any, dtype: Any, q: Any, k: Any, e: int, diagonal: Any
) -> None:
    both(close, *operands(place, dtype, q, k, e), diagonal=diagonal)


def test_float16_has_its_own_products(emulator: Any, place: Any, close: Any) -> None:
    """The long runs have all cases of it."""
    both(close, *operands(place, np.float16, (9, 24), (70, 24), 24), diagonal=3)


@pytest.mark.parametrize("lead", [(2, 2), (1, 2), (2, 1), ()])
@pytest.mark.parametrize("kind", ["truths", "numbers"])
def test_masks(emulator: Any, place: Any, close: Any, kind: str, lead: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    q, k, v = operands(place, ml_dtypes.bfloat16, (2, 2, 18, 16), (2, 2, 40, 16), 16)
    for square, diagonal in (((18, 40), None), ((1, 40), 5), ((18, 1), None)):
        seen = rng.random((*lead, *square)) < 0.6
        seen[..., 0, :] &= square[0] == 1  # a query that sees nothing gets zeros
        mask = seen if kind == "truths" else np.where(seen, rng.normal(size=seen.shape), -np.inf).astype(np.float32)
        out, *_ = both(close, q, k, v, place(mask, mask.dtype), diagonal=diagonal)
        assert square[0] == 1 or not out[..., 0, :].any()


@pytest.mark.parametrize(
    ("q", "k"), [((2, 2, 2, 9, 16), (2, 2, 1, 9, 16)), ((2, 3, 9, 16), (3, 9, 16)), ((2, 2, 40, 8), (140, 8))]
)
def test_keys_that_serve_several_heads(emulator: Any, place: Any, close: Any, q: Any, k: Any) -> None:
    for diagonal in (None, 0):
        both(close, *operands(place, ml_dtypes.bfloat16, q, k, 16), diagonal=diagonal)


@pytest.mark.parametrize("diagonal", [0, 40, -3, -200])
def test_several_blocks_of_which_some_see_nothing(emulator: Any, place: Any, close: Any, diagonal: int) -> None:
    q, k, v = operands(place, ml_dtypes.bfloat16, (150, 32), (270, 32), 32)
    out, *slopes = both(close, q, k, v, diagonal=diagonal)
    if diagonal == -200:
        assert not any(x.any() for x in (out, *slopes))


@pytest.mark.parametrize("diagonal", [None, 0, -20])
def test_the_longest_heads_with_little_shared_memory(
    emulator: Any, place: Any, close: Any, diagonal: int | None
) -> None:
    """As of compute capability 8.6: fewer queries and keys at once."""
    emulator.device = emulator.device._replace(shared_memory=99 << 10)
    both(close, *operands(place, ml_dtypes.bfloat16, (2, 150, 128), (70, 128), 96), diagonal=diagonal)
    assert emulator.launched[-1][1] == "attention_backward_keys<bfloat16, 128, 32>"


@pytest.mark.parametrize(("diagonal", "shared", "step"), [(None, 227, 64), (0, 163, 32), (-20, 227, 64)])
def test_heads_of_256(emulator: Any, place: Any, close: Any, diagonal: int | None, shared: int, step: int) -> None:
    emulator.device = emulator.device._replace(shared_memory=shared << 10)
    both(close, *operands(place, ml_dtypes.bfloat16, (2, 90, 192), (70, 192), 256), diagonal=diagonal)
    assert emulator.launched[-1][1] == f"attention_backward_keys<bfloat16, 256, {step}>"


def test_large_scores(emulator: Any, place: Any, close: Any) -> None:
    q, k, v = operands(place, ml_dtypes.bfloat16, (9, 16), (70, 16), 16)
    q[0] = 300
    q[1:3] = -300
    both(close, q, k, v, scale=1.0, diagonal=61)


@pytest.mark.parametrize("far", [1e6, -1e30, float(np.finfo(np.float32).min)])
def test_a_mask_that_moves_whole_rows_far_away(emulator: Any, place: Any, close: Any, far: float) -> None:
    """A row of scores that are all the same has no digits for its sum beside them."""
    q, k, v = operands(place, ml_dtypes.bfloat16, (9, 16), (70, 16), 16)
    mask = np.zeros((9, 70), np.float32)
    mask[2:5], mask[6, :40] = far, far
    q[2:7] = 0
    out, _, _, dv = both(close, q, k, v, place(mask, np.float32))
    np.testing.assert_allclose(out[2:5].astype(float), np.tile(v.astype(float).mean(axis=0), (3, 1)), atol=4e-3)
    assert np.isfinite(dv.astype(float)).all()


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("diagonal", [None, 1])
@pytest.mark.parametrize("which", range(4))
@pytest.mark.filterwarnings("ignore")
def test_numbers_that_are_not_finite(emulator: Any, place: Any, which: int, diagonal: int | None, value: float) -> None:
    """They reach what they reach where the whole matrix of the weights is made, through keys that are hidden, too; and
    at most what they reach in the ops, where a row of scores with a NaN has weights of NaN."""

    def lost(*arrays: Any) -> list[np.ndarray]:
        return [~np.isfinite(np.asarray(a, np.float64)) for a in arrays]

    given = operands(place, ml_dtypes.bfloat16, (20, 16), (140, 16), 16)
    g = place(np.random.default_rng(5).normal(size=(20, 16)), ml_dtypes.bfloat16)
    (*given, g)[which][3 if which in (0, 3) else 100, 2] = value
    params = {"scale": 0.3, "diagonal": diagonal}
    slopes, *wide = (x.astype(np.float64) for x in (g, *given))

    def both_ways(forward: Any, backward: Any, g: Any, *operands: Any) -> list[np.ndarray]:
        saved = forward(*operands, **params)
        return lost(*saved, *backward(g, *operands, *saved, **params))

    found = both_ways(kernels.attention, kernels.attention_backward, g, *given)
    tiled = both_ways(ATTENTION.numpy, ATTENTION_BACKWARD.numpy, slopes, *wide)
    slopes, *wide = map(mt.asarray, (slopes, *wide))
    whole = both_ways(ATTENTION.decompose, ATTENTION_BACKWARD.decompose, slopes, *wide)
    for name, x, least, most in zip(("out", "shift", "total", "q", "k", "v"), found, whole, tiled, strict=True):
        assert not (least & ~x).any(), name
        assert not (x & ~least & ~most).any(), name


@pytest.mark.parametrize("causal", [True, False])
def test_a_hidden_key_that_is_no_number_has_gradients_of_zero(emulator: Any, place: Any, causal: bool) -> None:
    """Its value, too, where a tile has more queries than there are."""
    q, k, v = operands(place, ml_dtypes.bfloat16, (10, 16), (20, 16), 16)
    k[15, 3] = np.nan
    mask = [] if causal else [place(np.arange(20)[None] != 15, np.dtype(bool))]
    params = {"scale": 0.3, "diagonal": 0 if causal else None}
    saved = kernels.attention(q, k, v, *mask, **params)
    dq, dk, dv = kernels.attention_backward(np.ones_like(saved[0]), q, k, v, *saved, *mask, **params)
    assert np.isnan(dq.astype(float)).any(axis=1).all()
    assert np.isfinite([dk.astype(float), dv.astype(float)]).all()
    assert not dk[15].any()
    assert not dv[15].any()


def test_calls_that_are_not_served(emulator: Any, place: Any) -> None:
    b = ml_dtypes.bfloat16

    def served(q: Any, k: Any, v: Any, *mask: Any) -> bool:
        return kernels.attention(q, k, v, *mask, scale=1.0, diagonal=None) is not NotImplemented

    q, k, v = operands(place, b, (2, 3, 4, 8), (2, 3, 5, 8), 8)
    assert served(q, k, v)
    assert not served(*(x.astype(np.float32) for x in (q, k, v)))
    assert not served(q, k, v.astype(np.float16))
    assert not served(q[:1], k, v)  # a query that broadcasts
    assert not served(q, k[:, :1], v)  # keys and values that serve differently
    assert not served(*operands(place, b, (4, 264), (5, 264), 8))
    assert not served(q, k[..., :0, :], v[..., :0, :])
    q, k, v = operands(place, b, (2, 3, 2, 4, 8), (2, 1, 2, 5, 8), 8)
    assert not served(q, k, v)  # keys of two dimensions apart
    emulator.device = emulator.device._replace(capability=75)
    assert not served(*operands(place, b, (4, 8), (5, 8), 8))
    emulator.device = emulator.device._replace(capability=80, shared_memory=64 << 10)
    assert not served(*operands(place, b, (4, 128), (5, 128), 8))
    emulator.device = emulator.device._replace(shared_memory=99 << 10)
    assert not served(*operands(place, b, (4, 136), (5, 136), 8))


def test_memory_that_is_not_aligned(emulator: Any, place: Any, close: Any) -> None:
    q, k, v = (place(np.random.default_rng(i).normal(size=(7, 24)), ml_dtypes.bfloat16) for i in range(3))
    both(close, q[:, 3:19], k[:, 1:17], v[:, 8:])
