"""Sums that wait to be made keep bits: signs of zeros where one rank has the value, infinities, and integers beyond
floats.

The oracle is the same call on an array that is not split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape import errors

INF, NAN = np.inf, np.nan
FLOATS = ["f8", "f4", "f2", ml_dtypes.bfloat16, "c16", "c8"]


def bits(x: Any) -> tuple[Any, ...]:
    """NaNs are one, whatever their payload."""
    a = np.ascontiguousarray(np.asarray(x))
    parts = [a.real, a.imag] if a.dtype.kind == "c" else [a]
    wide = [p.astype("f8") if p.dtype.kind in "fV" else p for p in parts]
    return a.shape, a.dtype, *((np.where(np.isnan(p), NAN, p) if p.dtype.kind == "f" else p).tobytes() for p in wide)


def same(fn: Callable[..., Any], hosts: list[np.ndarray], placed: list[mt.Array]) -> None:
    with np.errstate(all="ignore"):
        want = fn(*map(mt.asarray, hosts))
        for got in (fn(*placed), mt.compile(fn)(*placed)):
            assert bits(got) == bits(want), (np.asarray(got), np.asarray(want))


def split(ranks: int, *hosts: np.ndarray) -> list[mt.Array]:
    mesh = mt.Mesh({"a": ranks})
    return [mt.distribute(x, mesh, a=mt.Shard(0)) for x in hosts]


def zeros_of_both_signs(dtype: Any) -> np.ndarray:
    x = np.array([-0.0, 1, -0.0, 0.0, INF, NAN, -0.0, -INF], dtype)
    if x.dtype.kind == "c":
        x[2], x[3] = complex(0.0, -0.0), complex(-0.0, -0.0)
    return x


IDS = np.array([0, 2, 3, 6, 4, -1])
READS = {
    "index array": lambda x: x[IDS],
    "take": lambda x: mt.take(x, mt.asarray(IDS), axis=0),
    "a number": lambda x: x[0],
    "the last": lambda x: x[6],
    "elements": lambda x: mt.stack(list(x)),
    "repeat": lambda x: mt.repeat(x, 2),
    "diagonal": lambda x: mt.diagonal(mt.reshape(x, (2, 4))),
    "take_along_axis": lambda x: mt.take_along_axis(x, mt.asarray(IDS), axis=0),
    "negated": lambda x: -x[3],
    "negated twice": lambda x: mt.negative(-x[0]),
    "subtracted": lambda x: x[0] - x[3],
    "subtracted from": lambda x: 0.0 - x[3],
    "scaled": lambda x: x[IDS] * -2.0,
    "scaled by a positive number": lambda x: x[IDS] * 2.0,
    "divided": lambda x: x[IDS] / -2.0,
    "conjugate": lambda x: mt.conj(x[2]),
    "added": lambda x: x[0] + x[2],
    "in place of": lambda x: mt.where(mt.asarray(IDS > 2), x[IDS], x[0]),
    "reciprocal": lambda x: 1 / x[0],
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("fn", READS.values(), ids=list(READS))
def test_what_one_rank_has_is_read_to_the_bit(fn, ranks, dtype):
    x = zeros_of_both_signs(dtype)
    same(fn, [x], split(ranks, x))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_value_that_becomes_a_pending_sum_keeps_its_zeros(dtype):
    x, mesh = zeros_of_both_signs(dtype), mt.Mesh({"a": 3})
    pending = mt.reshard(mt.distribute(x, mesh), mt.Sharding(mesh, a=mt.Partial()))
    same(lambda x: mt.reshard(x, mt.Sharding(mesh)) if x.sharding else x, [x], [pending])


FINITE, WILD = np.array([[1.0, -2], [0, 3], [0, 0], [2, 0]]), np.array([[INF, 1.0], [NAN, -INF]])
PRODUCTS = {
    "multiply": lambda x, y: mt.sum(x, axis=0) * y,
    "multiply from the left": lambda x, y: y * mt.sum(x, axis=0),
    "a read row": lambda x, y: x[1] * y[0],
    "matmul": lambda x, y: mt.sum(x, axis=0) @ y,
    "matmul from the left": lambda x, y: y @ mt.sum(x, axis=0),
    "tensordot": lambda x, y: mt.tensordot(mt.sum(x, axis=0), y, axes=1),
    "inner": lambda x, y: mt.inner(mt.sum(x, axis=0), y),
    "outer": lambda x, y: mt.outer(mt.sum(x, axis=0), y[0]),
    "einsum": lambda x, y: mt.einsum("i,ij->ij", mt.sum(x, axis=0), y),
    "divide": lambda x, y: mt.sum(x, axis=0) / y,
    "convolution": lambda x, y: mt.nn.conv1d(mt.sum(x, axis=0)[None, None], y[None, :1, :1]),
    "solve": lambda x, y: mt.linalg.solve(mt.asarray([[1.0, INF], [0.0, 1.0]]), mt.sum(x, axis=0)),
    "gradient": lambda x, y: mt.grad(lambda z: mt.sum(mt.sum(z, axis=0) * y))(x),
    "gradient of a product": lambda x, y: mt.vjp(lambda y: mt.sum(y * y, axis=0), y)[1](mt.sum(x, axis=0))[0],
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("fn", PRODUCTS.values(), ids=list(PRODUCTS))
def test_a_pending_sum_is_made_before_it_meets_infinities(fn, ranks):
    """Part by part, a zero of one rank times infinity is NaN, where the sum of all is not zero."""
    mesh = mt.Mesh({"a": ranks})
    same(fn, [FINITE, WILD], [mt.distribute(FINITE, mesh, a=mt.Shard(0)), mt.distribute(WILD, mesh)])


def test_sums_still_wait_through_what_keeps_them():
    """Sums, moves, reads and positive numbers: one reduction at the end."""
    mesh = mt.Mesh({"a": 4})
    x = mt.distribute(np.ones((8, 6)), mesh, a=mt.Shard(0))
    for fn in (
        lambda x: mt.sum(x, axis=0) * 0.5,
        lambda x: mt.reshape(mt.sum(x, axis=0) / 4, (2, 3))[1, ::-1],
        lambda x: mt.sum(x, axis=0) + mt.sum(x * x, axis=0),
        lambda x: mt.sum(mt.sum(x, axis=0)),
    ):
        assert fn(x).sharding.placements == {"a": mt.Partial()}
    for fn in (lambda x: -mt.sum(x, axis=0), lambda x: mt.sum(x, axis=0) * mt.ones(6)):
        assert fn(x).sharding.placements == {"a": mt.Replicate()}
    i = mt.distribute(np.ones((8, 6), int), mesh, a=mt.Shard(0))
    for fn in (lambda i: -mt.sum(i, axis=0), lambda i: mt.sum(i, axis=0) @ mt.ones((6, 2), dtype=int)):
        assert fn(i).sharding.placements == {"a": mt.Partial()}


@pytest.mark.parametrize(
    "fn",
    [
        lambda s, y: s + y,
        lambda s, y: y - s,
        lambda s, y: mt.where(mt.asarray([True, False]), s, y),
        lambda s, y: mt.concat([s, y]),
        lambda s, y: y @ s,
        lambda s, y: s * 3 + mt.astype(y, mt.int32),
        lambda s, y: s * 0.5 + s / 2,
        lambda s, y: mt.sum(s) + mt.astype(s, mt.int64)[0],
    ],
)
def test_sums_of_integers_wrap_as_one(fn):
    """100 + 100 is -56 of one byte, whatever is made of it then."""
    x = np.full((40, 2), 100, np.int8)
    x[:, 1] = np.arange(40)
    same(lambda x, y: fn(x[0] + x[-1], y[3] + y[-2]), [x, x.astype(int)], split(2, x, x.astype(int)))


EXTREMES = [mt.max, mt.min, mt.argmax, mt.argmin]


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("fn", EXTREMES)
def test_extremes_of_complex_numbers(fn, ranks):
    for x in ([1 + 2j, 1 - 3j, -INF + 1j], [complex(-INF, -INF)] * 2, [1j, complex(NAN, 1), 2], [3 - 1j]):
        host = np.array(x)
        same(fn, [host], split(ranks, host))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("fn", [mt.prod, mt.cumulative_prod, mt.cumsum, mt.cumprod, mt.sum, mt.mean])
def test_products_of_infinite_complex_numbers(fn, ranks):
    """The product of a rank without elements is 1, and an infinite number times 1 + 0j has a NaN."""
    for x in ([INF + 0j, 3 + 2j, 2], [0.5 + 1j, 1, -1 - 3j, complex(-INF, -3)], [complex(INF, 2)], [-1 + 1j, INF + 2j]):
        host = np.array(x)
        same(lambda x: fn(x, axis=0), [host], split(ranks, host))


NUMBERS = [2**53 + 1, 2**63 - 1, 2**64 - 1, 300, -1, 1.5, -0.0, NAN, INF, 1 + 2j, complex(0, -0.0), True]
NUMBERS += [np.float32(1.1), np.int64(2**53 + 1), np.complex128(1 + 2j), np.float32(-0.0), np.float32(0.0)]
FILLS = {
    "full_like": lambda x, v: mt.full_like(x, v),
    "another dtype": lambda x, v: mt.full_like(x, v, dtype=mt.int64),
    "of a part": lambda x, v: mt.full_like(x[2:], v),
    "where": lambda x, v: mt.where(x > 2, x, v),
    "set": lambda x, v: x.at[1:4].set(v),
    "added": lambda x, v: x.at[1:4].add(v),
    "by places": lambda x, v: x.at[np.array([4, 1])].set(v),
    "sum": lambda x, v: x + v,
    "product": lambda x, v: x * v,
}


@pytest.mark.parametrize("fn", FILLS.values(), ids=list(FILLS))
@pytest.mark.parametrize("dtype", ["i8", "u8", "u1", "f8", "f4", "c16"])
def test_numbers_reach_the_ranks_as_they_are(dtype, fn):
    """Beyond 2**53, of imaginary parts and zeros of both signs; what fits no element is the error of the call
    itself."""
    x = np.arange(6).astype(dtype)
    placed, local = split(2, x)[0], mt.asarray(x)
    for v in NUMBERS:
        with np.errstate(all="ignore"):
            try:
                want = bits(fn(local, v))
            except (ValueError, TypeError, OverflowError) as e:
                with pytest.raises(type(e)):
                    fn(placed, v)
                continue
            assert bits(fn(placed, v)) == want, v
            assert bits(mt.compile(lambda x, v=v: fn(x, v))(placed)) == want, v


def test_a_fill_of_several_values_is_one_of_the_whole_array():
    """A rank filled its block with them."""
    x = np.zeros((4, 3))
    same(lambda x: mt.full_like(x, [1.0, 2.0, 3.0]), [x], split(2, x))
    with pytest.raises(errors.MeshtapeError):
        mt.full_like(split(2, x)[0], [1.0, 2.0])


# Ops that move elements, or round nothing: chains of them have the bits of the unsplit run.
EXACT: dict[str, Callable[..., Any]] = {
    "row": lambda x, y, k: x[k % x.shape[0]] + y,
    "rows": lambda x, y, k: x[np.array([k, 1, k + 1]) % x.shape[0] - k % 2],
    "slice": lambda x, y, k: x[k % 4 - 3 : k % 5 : 1 + k % 2],
    "backwards": lambda x, y, k: x[:: -1 - k % 2],
    "written": lambda x, y, k: x.at[k % 4 - 3 : k % 5].set(-0.0),
    "raised": lambda x, y, k: x.at[k % 3 :: 2].max(y[-1]),
    "flip": lambda x, y, k: mt.flip(x, axis=k % 2),
    "roll": lambda x, y, k: mt.roll(x, k - 4, axis=k % 2),
    "repeat": lambda x, y, k: mt.repeat(x, k % 3, axis=0),
    "pad": lambda x, y, k: mt.pad(x, ((k % 2, 1), (0, 0)), constant_values=-0.0),
    "turned": lambda x, y, k: mt.permute_dims(mt.permute_dims(x, (1, 0))[: 2 + k % 3], (1, 0)),
    "joined": lambda x, y, k: mt.concat([x, y], axis=0),
    "negated": lambda x, y, k: -x,
    "doubled": lambda x, y, k: x * (2.0 if k % 2 else -2.0),
    "scaled": lambda x, y, k: x * y[:1],
    "subtracted": lambda x, y, k: x - y[:1],
    "chosen": lambda x, y, k: mt.where(x > 0, x, y[-1]),
    "largest": lambda x, y, k: x + mt.max(y, axis=0),
    "total": lambda x, y, k: mt.sum(x, axis=0, keepdims=True) * y[:1],
}


@settings(deadline=None, database=None, max_examples=60)
@given(data=st.data())
def test_chains_of_exact_ops(data):
    plan = data.draw(st.lists(st.tuples(st.sampled_from(sorted(EXACT)), st.integers(0, 9)), min_size=1, max_size=6))
    rng = np.random.default_rng(data.draw(st.integers(0, 99), label="seed"))
    hosts = [rng.choice([0.0, -0.0, 1, -2, 3, INF, -INF, NAN], (5, 4)) for _ in range(2)]
    mesh = mt.Mesh(data.draw(st.sampled_from([{"a": 2}, {"a": 3}, {"a": 2, "b": 2}])))
    kinds = st.sampled_from([mt.Shard(0), mt.Shard(1), mt.Replicate()])
    placed = [mt.distribute(x, mt.Sharding(mesh, **{n: data.draw(kinds) for n in mesh.names})) for x in hosts]

    def chain(x: mt.Array, y: mt.Array) -> mt.Array:
        for name, k in plan:
            if x.shape[0] and x.shape[1] == y.shape[1]:
                x = EXACT[name](x, y, k)
        return x

    same(chain, hosts, placed)
