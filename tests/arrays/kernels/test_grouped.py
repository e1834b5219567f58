"""Kernels of experts, run on the CPU, against the ops in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from meshtape.arrays.kernels import grouped as kernels
from meshtape.arrays.nn.mixture_of_experts import EXPERTS, EXPERTS_BACKWARD

pytestmark = pytest.mark.usefixtures("compiled_together")
SHORT = ml_dtypes.bfloat16
DTYPES = [SHORT, np.float32, *[pytest.param(d, marks=pytest.mark.slow) for d in (np.float16, np.float64)]]
SLOW = "slow to emulate: one order of the threads for each"
NAMES = ("y", "x", "weights", "gate", "up", "down")


def operands(
    place: Any, dtype: Any, chosen: Any, width: int, hidden: int, experts: int, numbers: Any = None
) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    chosen = np.asarray(chosen)
    shapes = (experts, width, hidden), (experts, width, hidden), (experts, hidden, width)
    matrices = [place(rng.normal(size=s) / np.sqrt(s[1]), dtype) for s in shapes]
    x, weights = rng.normal(size=(*chosen.shape[:-1], width)), rng.uniform(0.2, 1, chosen.shape)
    numbers = np.arange(experts) if numbers is None else np.asarray(numbers)
    return [place(x, dtype), place(chosen), place(weights, dtype), *matrices, place(numbers.astype(chosen.dtype))]


def cotangent(x: np.ndarray) -> np.ndarray:
    return np.random.default_rng(7).normal(size=x.shape).astype(x.dtype)


def results(*given: np.ndarray) -> list[np.ndarray]:
    """The kernels' result and cotangents, of the dtypes and shapes that they should have."""
    found = [kernels.experts(*given), *kernels.experts_backward(cotangent(given[0]), *given)]
    for like, y in zip((given[0], given[0], *given[2:6]), found, strict=True):
        assert (y.dtype, y.shape) == (like.dtype, like.shape)
    return found


def exact(*given: np.ndarray) -> list[np.ndarray]:
    """The same by the ops in float64."""
    wide = [x.astype(np.float64) if x.dtype.kind not in "iu" else x for x in given]
    return [EXPERTS.numpy(*wide), *EXPERTS_BACKWARD.numpy(cotangent(given[0]).astype(np.float64), *wide)]


def compare(close: Any, *given: np.ndarray) -> list[np.ndarray]:
    found = results(*given)
    for x, y in zip(found, exact(*given), strict=True):
        dtype = min(x.dtype, given[0].dtype, key=lambda d: d.itemsize)
        close(x.astype(dtype), y)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("width", "hidden"), [(1, 1), (24, 40), (67, 9), (72, 68)])
def test_values_and_cotangents_of_ragged_groups(
    emulator: Any, place: Any, close: Any, dtype: Any, width: int, hidden: int
) -> None:
    """Experts with no pair, one, some, and more than a tile has rows; choices that are no expert's."""
    if (width, hidden) == ((24, 40) if emulator.seed else (1, 1)) and dtype is SHORT:
        pytest.skip(SLOW)
    chosen = np.random.default_rng(1).permutation([1, *[2] * 11, *[3] * 131, 4, 4, 9, -1, 4, 9, 9]).reshape(-1, 2)
    found = compare(close, *operands(place, dtype, chosen, width, hidden, 5))
    assert not any(d[0].any() for d in found[3:])  # nobody was sent to the first


def test_float16_has_its_own_products(emulator: Any, place: Any, close: Any) -> None:
    """The long runs have all cases of it."""
    if emulator.seed:
        pytest.skip(SLOW)
    compare(close, *operands(place, np.float16, [[0, 1], [1, 2], [1, 1]], 24, 40, 3))


@pytest.mark.parametrize("shared", [99, 227])  # kilobytes: two stages, and four
def test_more_steps_than_stages(emulator: Any, place: Any, close: Any, shared: int) -> None:
    """Tiles of later steps are copied to where those of earlier ones were read; results have two tiles of columns."""
    if (shared == 99) != bool(emulator.seed):
        pytest.skip(SLOW)
    emulator.device = emulator.device._replace(shared_memory=shared << 10)
    compare(close, *operands(place, SHORT, np.zeros((9, 2), int), 328, 136, 1))


def test_short_floats_without_tensor_cores(emulator: Any, place: Any, close: Any) -> None:
    emulator.device = emulator.device._replace(capability=75)
    compare(close, *operands(place, SHORT, np.arange(90).reshape(30, 3) % 4, 24, 70, 3))
    assert all("true, bfloat16" not in kernel for _, kernel, *_ in emulator.launched)


@pytest.mark.parametrize("dtype", [SHORT, np.float32], ids=lambda d: np.dtype(d).name)
def test_an_expert_chosen_twice_by_a_row(emulator: Any, place: Any, close: Any, dtype: Any) -> None:
    chosen = [[0, 0, 0], [1, 0, 1], [5, 1, 5], [5, 5, 5]]
    y, dx, dweights, *_ = compare(close, *operands(place, dtype, chosen, 16, 24, 2))
    assert not any(a[3].any() for a in (y, dx, dweights))
    assert dweights[0, 0] == dweights[0, 1] == dweights[0, 2] != 0


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_experts_of_other_numbers(emulator: Any, place: Any, close: Any, dtype: str) -> None:
    """Some of many, as a rank has them; in any order, and of any integers."""
    chosen = np.random.default_rng(2).integers(0, 12, (2, 9, 2)).astype(dtype)
    for numbers in ([4, 5, 6], [7, 0, 11]):
        compare(close, *operands(place, np.float32, chosen, 8, 8, 3, numbers))


def test_numbers_as_far_apart_as_they_may_be(emulator: Any, place: Any, close: Any) -> None:
    ends = [np.iinfo(np.int64).max, np.iinfo(np.int64).min]
    compare(close, *operands(place, np.float32, np.reshape([*ends, 0, 1], (4, 1)), 8, 8, 2, ends))


@pytest.mark.parametrize("experts", [5, 300])  # a block has 256 threads, each with an expert
def test_the_order_is_that_of_experts_and_rows(emulator: Any, place: Any, experts: int) -> None:
    given = operands(place, np.float32, np.random.default_rng(4).integers(-1, experts + 1, (700, 2)), 1, 1, experts)
    call = kernels._Call(*given[:3], given[3:6])
    call.route(given[1], given[6])
    assert [grid[0] for *_, grid, _ in emulator.launched] == [3, 3]
    flat = given[1].reshape(-1)
    wanted = [np.flatnonzero(flat == e) for e in range(experts)]
    np.testing.assert_array_equal(call.order[: call.starts[-1]], np.concatenate(wanted))
    np.testing.assert_array_equal(call.starts, np.cumsum([0, *map(len, wanted)]))
    tiles = [
        (e, first + i, min(kernels.ROWS, n - i))
        for e, (first, n) in enumerate(zip(call.starts, map(len, wanted), strict=False))
        for i in range(0, n, kernels.ROWS)
    ]
    np.testing.assert_array_equal(call.tiles[: len(tiles)], tiles)
    assert (call.tiles[len(tiles) :, 0] == -1).all()


@pytest.mark.parametrize("dtype", [SHORT, np.float32], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("values", [(np.nan, np.inf), pytest.param((np.inf, np.nan), marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_numbers_that_are_not_finite(emulator: Any, place: Any, dtype: Any, values: tuple[float, float]) -> None:
    """A row reaches itself and the matrices of its experts; a matrix the rows that are sent to it."""
    if (dtype is SHORT) == bool(emulator.seed):
        pytest.skip(SLOW)
    chosen = np.arange(40).reshape(20, 2) % 3
    a, b = values
    for which, at, value in ((0, (4, 2), a), (2, (4, 1), b), (3, (1, 3, 5), b), (5, (1, 3, 5), a)):
        given = operands(place, dtype, chosen, 12, 20, 3)
        given[which][at] = value
        for name, x, y in zip(NAMES, results(*given), exact(*given), strict=True):
            lost, wanted = (~np.isfinite(a.astype(np.float64)) for a in (x, y))
            np.testing.assert_array_equal(lost, wanted, err_msg=f"{name}, where operand {which} is not finite")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [SHORT, np.float32], ids=lambda d: np.dtype(d).name)
def test_columns_that_no_matrix_has_add_nothing(emulator: Any, place: Any, dtype: Any) -> None:
    given = operands(place, dtype, [[0]], 1, 1, 1)
    for x in (given[0], *given[3:6]):
        x[...] = np.inf if x is given[0] else 1
    found, wanted = results(*given), exact(*given)
    for i in (0, 2):  # infinite, and not NaN as infinity times zero
        assert np.isinf(wanted[i]).all()
        np.testing.assert_array_equal(found[i].astype(np.float64), wanted[i])


def test_operands_of_several_dtypes(emulator: Any, place: Any, close: Any) -> None:
    x, chosen, weights, gate, up, down, numbers = operands(place, np.float32, [[0, 1], [1, 2], [2, 2]], 8, 12, 3)
    compare(close, place(x, SHORT), chosen, weights, gate, place(up, np.float64), down, numbers)
    compare(close, x, chosen, place(weights, np.float64), place(gate, SHORT), up, down, numbers)
    compare(close, x, chosen, place(weights, SHORT), gate, up, down, numbers)


@pytest.mark.parametrize(
    ("rows", "k", "width", "hidden", "experts"),
    [(0, 2, 4, 4, 2), (3, 0, 4, 4, 2), (3, 1, 0, 4, 2), (3, 1, 4, 0, 2), (3, 1, 4, 4, 0)],
)
def test_nothing(
    emulator: Any, place: Any, close: Any, rows: int, k: int, width: int, hidden: int, experts: int
) -> None:
    given = operands(place, np.float32, np.zeros((rows, k), int), width, hidden, max(experts, 1))
    given[3:] = [a[:experts] for a in given[3:]]
    assert not any(a.any() for a in compare(close, *given))


def test_memory_that_is_not_aligned_and_has_gaps(emulator: Any, place: Any, close: Any) -> None:
    x, chosen, weights, gate, up, down, numbers = operands(place, SHORT, [[0, 1]] * 9, 32, 48, 2)
    compare(
        close,
        x[:, 3:19],
        chosen[:, ::-1],
        weights[:, :1].repeat(2, 1),
        gate[:, :16],
        up[:, 16:],
        down[..., ::2],
        numbers,
    )


def test_as_many_launches_for_any_number_of_experts(emulator: Any, place: Any) -> None:
    emulator.noted = set()  # they are counted alone
    for experts in (1, 9):
        given = operands(place, SHORT, np.arange(12).reshape(6, 2), 8, 8, experts)
        given[2] = given[2].astype(np.float32)
        before = len(emulator.launched)
        kernels.experts(*given)
        assert len(emulator.launched) - before == 5
        kernels.experts_backward(given[0], *given)
        assert len(emulator.launched) - before == 5 + 8


def test_calls_that_are_not_served(emulator: Any, place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2^31 pairs, which take no memory here."""
    given = operands(place, np.float32, [[0]], 4, 4, 1)
    assert kernels._Call(*given[:3], given[3:6]).is_served()
    for i, shape in ((0, (2**20, 4)), (1, (2**20, 2**11)), (2, (2**20, 2**11))):
        given[i] = np.broadcast_to(given[i][:1, :1], shape)
    monkeypatch.setattr(kernels, "contiguous", lambda a, dtype: a)
    assert kernels.experts(*given) is NotImplemented
    assert kernels.experts_backward(given[0], *given) is NotImplemented
    assert not emulator.launched
