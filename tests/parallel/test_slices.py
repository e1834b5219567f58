"""Reads, writes and gradients by any slice are NumPy's, however the array is split: empty slices, negative starts and
steps among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape import errors
from meshtape.arrays.core.index_template import Span

MESHES = [{"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 3, "b": 2}]
bounded = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)


def slices(n: int) -> st.SearchStrategy[slice]:
    ends = st.none() | st.integers(-2 * n - 1, 2 * n + 1)
    steps = st.none() | st.integers(-2 * n - 1, 2 * n + 1).filter(bool)
    # From the end to a place before it, which may be empty of the whole and not of a part; and backwards.
    crossing = st.builds(slice, st.integers(-n, 0), st.integers(0, n), st.sampled_from([None, 1, 2]))
    backwards = st.builds(slice, st.integers(0, n), st.integers(-n, 0), st.sampled_from([-1, -2]))
    return st.one_of(st.builds(slice, ends, ends, steps), crossing, backwards)


@st.composite
def keys(draw: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Mostly slices, with numbers and index arrays of one length between them."""
    count = draw(st.integers(0, 3))
    out: list[Any] = []
    for n in shape[: draw(st.integers(1, len(shape)))]:
        kind = draw(st.sampled_from(["slice"] * 4 + ["number", "array"])) if n else "slice"
        if kind == "slice":
            out.append(draw(slices(n)))
        elif kind == "number":
            out.append(draw(st.integers(-n, n - 1)))
        else:
            out.append(np.array(draw(st.lists(st.integers(-n, n - 1), min_size=count, max_size=count)), int))
    if draw(st.booleans()):
        out.insert(draw(st.integers(0, len(out))), draw(st.sampled_from([None, Ellipsis])))
    return tuple(out)


@st.composite
def placed(draw: Any, mesh: mt.Mesh, x: np.ndarray) -> mt.Array:
    """Split, replicated, or waiting to be summed, along each axis of the mesh."""
    kinds = [*map(mt.Shard, range(x.ndim)), mt.Replicate(), mt.Partial()]
    chosen = {name: draw(st.sampled_from(kinds), label=name) for name in mesh.names}
    first = {name: mt.Replicate() if isinstance(p, mt.Partial) else p for name, p in chosen.items()}
    return mt.reshard(mt.distribute(x, mt.Sharding(mesh, **first)), mt.Sharding(mesh, **chosen))


def numbered(shape: tuple[int, ...], start: int = 1) -> np.ndarray:
    return np.arange(start, start + np.prod(shape, dtype=int), dtype=float).reshape(shape)


def written(x: np.ndarray, key: Any, v: Any, how: str) -> np.ndarray:
    """By NumPy."""
    out = x.copy()
    if how == "set":
        out[key] = v
    else:
        ufunc = {"add": np.add, "multiply": np.multiply, "min": np.minimum, "max": np.maximum}[how]
        ufunc.at(out, key, v)
    return out


def by_setitem(x: mt.Array, v: Any, key: Any) -> mt.Array:
    y = x + 0
    y[key] = v
    return y


def same(fn: Callable[..., Any], want: np.ndarray, *args: mt.Array) -> None:
    np.testing.assert_array_equal(np.asarray(fn(*args)), want)
    np.testing.assert_array_equal(np.asarray(mt.compile(fn)(*args)), want)


@settings(bounded, max_examples=80)
@given(data=st.data())
def test_any_slice_of_any_split(data):
    mesh = mt.Mesh(data.draw(st.sampled_from(MESHES), label="mesh"))
    shape = tuple(data.draw(st.lists(st.sampled_from([8, 5, 3, 2, 1, 0]), min_size=1, max_size=3), label="shape"))
    key, x = data.draw(keys(shape), label="key"), numbered(shape)
    part = x[key]
    v = numbered(part.shape if data.draw(st.booleans(), label="whole value") else part.shape[1:], 100)
    on_mesh, values = data.draw(placed(mesh, x)), data.draw(placed(mesh, v))
    same(lambda x: x[key], part, on_mesh)
    for how in ("set", "add", "multiply", "min", "max"):
        same(lambda x, v, how=how: getattr(x.at[key], how)(v), written(x, key, v, how), on_mesh, values)
        same(lambda x, how=how: getattr(x.at[key], how)(7.0), written(x, key, 7.0, how), on_mesh)
    same(lambda x, v: by_setitem(x, v, key), written(x, key, v, "set"), on_mesh, values)

    g = numbered(shape, -20)
    same(lambda x: mt.vjp(lambda x: x[key], x)[1](mt.asarray(v + part * 0))[0], written(x * 0, key, v, "add"), on_mesh)
    plain = [mt.asarray(x), mt.asarray(v)]
    for how in ("set", "add", "multiply"):

        def pull(x, v, how=how):
            return mt.vjp(lambda x, v: getattr(x.at[key], how)(v), x, v)[1](mt.asarray(g))

        for got, want in zip(pull(on_mesh, values), pull(*plain), strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


WRONG_ONCE = [slice(-2, 3), slice(0, -3, -1), slice(3, -3, -1), slice(5, 5), slice(-9, -20), slice(-1, -9, -1)]
OTHER_SLICES = [
    slice(9, 2),
    slice(-1, None, -1),
    slice(6, -9, -2),
    slice(None, None, -3),
    slice(-8, 8),
    slice(2, 30, 30),
]


@pytest.mark.parametrize("ranks", [2, 3, 8, 11])
@pytest.mark.parametrize("key", WRONG_ONCE + OTHER_SLICES, ids=str)
def test_slices_that_changed_other_places(key, ranks):
    """An empty slice took the places that it has within a block: `x[-2:3]` of eight is `x[2:3]` of four."""
    mesh, x = mt.Mesh({"a": ranks}), numbered((8,))
    split = mt.distribute(x, mesh, a=mt.Shard(0))
    same(lambda x: x[key], x[key], split)
    for how in ("set", "add", "multiply", "min", "max"):
        same(lambda x, how=how: getattr(x.at[key], how)(0.0), written(x, key, 0.0, how), split)
    v = x[key] * -1
    same(lambda x, v: by_setitem(x, v, key), written(x, key, v, "set"), split, mt.distribute(v, mesh))


OTHERS = [
    ("delete", lambda x, s: mt.delete(x, s, axis=0), lambda x, s: np.delete(x, s, axis=0)),
    ("insert", lambda x, s: mt.insert(x, s, 9.0, axis=0), lambda x, s: np.insert(x, s, 9.0, axis=0)),
    ("flip", lambda x, s: mt.flip(x[s], axis=0), lambda x, s: np.flip(x[s], axis=0)),
    ("roll", lambda x, s: mt.roll(x[s], -3, axis=0), lambda x, s: np.roll(x[s], -3, axis=0)),
    ("twice", lambda x, s: x[s][s], lambda x, s: x[s][s]),
    ("into another", lambda x, s: mt.zeros_like(x).at[s].set(x[s]), lambda x, s: written(x * 0, s, x[s], "set")),
    ("reversed into itself", lambda x, s: x.at[s].set(x[s][::-1]), lambda x, s: written(x, s, x[s][::-1], "set")),
]


@pytest.mark.parametrize(("fn", "by_numpy"), [o[1:] for o in OTHERS], ids=[o[0] for o in OTHERS])
@settings(bounded, max_examples=10)
@given(data=st.data())
def test_functions_that_take_slices(fn, by_numpy, data):
    mesh = mt.Mesh({"a": data.draw(st.sampled_from([2, 3]))})
    n = data.draw(st.sampled_from([1, 2, 5, 8]))
    key, x = data.draw(slices(n)), numbered((n, 2))
    same(lambda x: fn(x, key), by_numpy(x, key), mt.distribute(x, mesh, a=mt.Shard(0)))


def test_a_rank_without_rows_reads_nothing_of_them():
    """Rank 2 of 3 has no row to look one up in; it raised an error of index where the read was empty anyway."""
    mesh = mt.Mesh({"a": 3})
    x = mt.distribute(np.ones((2, 5)), mesh, a=mt.Shard(0))
    ids = np.array([0, 1, 0])
    same(lambda x: x[ids, 3:1], np.ones((3, 0)), x)
    same(lambda x: x[1, 3:1], np.ones(0), x)


@settings(bounded, max_examples=200)
@given(data=st.data())
def test_places_of_a_span_are_those_of_its_slice(data):
    n = data.draw(st.integers(0, 9))
    s = data.draw(slices(n))
    assert list(Span(s.start, s.stop, s.step).places(n)) == list(range(n))[s]


STREAMED = {
    "set": lambda x, key: x.at[key].set(0.0),
    "add": lambda x, key: x.at[key].add(2.0),
    "max": lambda x, key: x.at[key].max(4.0),
    "read": lambda x, key: x[key],
    "sum of a part": lambda x, key: mt.sum(x[key]),
    "sum without a part": lambda x, key: -mt.sum(x.at[key].set(0.0)),
}


@pytest.mark.parametrize("fn", STREAMED.values(), ids=list(STREAMED))
@pytest.mark.parametrize("key", WRONG_ONCE + OTHER_SLICES, ids=str)
@pytest.mark.parametrize("split", [{}, {"a": mt.Shard(0)}], ids=str)
def test_slices_of_streams(tmp_path, split, key, fn):
    """Block by block, or refused, as parts of other blocks are needed. Empty reads ended in an error of no type of
    ours."""
    x = numbered((8, 2))
    zarr.create_array(str(tmp_path / "x"), shape=x.shape, chunks=(3, 2), dtype=x.dtype)[...] = x
    stored = mt.from_zarr(str(tmp_path / "x"), mt.Mesh({"a": 2}), **split)
    want = np.asarray(fn(mt.asarray(x), key))
    refused = ""
    try:
        out = mt.stream(lambda x: fn(x, key), stored, memory=100, to=str(tmp_path / "out"))
    except errors.ShardingConflict as e:
        refused = str(e)
    if refused:
        assert "halo_exchange" in refused
        assert fn(mt.asarray(x), key).size  # an empty part needs nothing of other blocks
    else:
        np.testing.assert_array_equal(np.asarray(out.load()), want)
