"""Writing at index arrays: the kernels' own sources, run on the CPU, against NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshtape import arrays as mt
from meshtape.arrays import OPS
from meshtape.arrays.indexing import indexing
from meshtape.arrays.kernels import scatter

FLOATS = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
EXACT = [np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64, np.bool_, np.complex64, np.complex128]


def parsed(shape: tuple[int, ...], key: Any) -> tuple[Any, list[np.ndarray]]:
    template, arrays = indexing.parse(mt.zeros(shape), key)
    return template, [a.numpy() for a in arrays]


def cuda(name: str, *args: Any, **params: Any) -> Any:
    return OPS[name].overrides["cupy"](*args, **params)


def cpu(name: str, *args: Any, **params: Any) -> Any:
    return OPS[name].numpy(*args, **params)


S = slice(None)
REPEATED = np.array([0, 4, 4, 0, 4, -1, 2, 4])
KEYS: list[tuple[tuple[int, ...], Any]] = [
    ((6, 5), (REPEATED,)),
    ((6, 5), (S, REPEATED % 5)),
    ((6, 5), (REPEATED, REPEATED % 5)),
    ((6, 5, 3), (REPEATED, S, REPEATED % 3)),
    ((6, 5, 3), (REPEATED[:, None] % 6, REPEATED % 5)),
    ((6, 5, 3), (slice(1, 5, 2), REPEATED % 5)),
    ((6, 5, 3), (2, REPEATED % 5)),
    ((6, 5, 3), (2, S, REPEATED % 3)),
    ((6, 5), (None, REPEATED)),
    ((6, 5), (np.zeros(0, int),)),
    ((6, 0), (REPEATED,)),
    ((6, 70), (REPEATED,)),
    ((5,), (np.zeros(3000, int),)),
    ((5, 2), (np.arange(700) % 5,)),
    ((6, 5), (np.arange(30).reshape(6, 5) % 3 == 0,)),
    ((6, 5), (True, REPEATED)),
]


@pytest.fixture(params=[True, False], ids=["in order", "atomic"])
def mode(request: pytest.FixtureRequest) -> Any:
    with mt.use_deterministic(request.param):
        yield request.param


@pytest.mark.parametrize(("shape", "key"), KEYS)
def test_every_key(emulator: Any, place: Any, mode: bool, shape: Any, key: Any) -> None:
    template, arrays = parsed(shape, key)
    target = indexing.result_shape(template, shape, [a.shape for a in arrays])
    rng = np.random.default_rng(0)
    x, v = place(rng.integers(-50, 50, shape), np.float64), place(rng.integers(-50, 50, target), np.float64)
    arrays = [place(a) for a in arrays]
    for name, args, params in (
        ("scatter", (v, *arrays), {"template": template, "shape": shape}),
        ("index_add", (x, v, *arrays), {"template": template}),
        ("index_set", (x, v, *arrays), {"template": template}),
        ("last_writes", (x, *arrays), {"template": template}),
        ("index_min", (x, v, *arrays), {"template": template}),
        ("index_max", (x, v, *arrays), {"template": template}),
    ):
        before = [a.copy() for a in args]
        got = cuda(name, *args, **params)
        np.testing.assert_array_equal(got, cpu(name, *args, **params), err_msg=name)
        for a, kept in zip(args, before, strict=True):
            np.testing.assert_array_equal(a, kept, err_msg=f"{name} changed its argument")


@pytest.mark.parametrize(
    ("shape", "key"), [((), ()), ((), (True,)), ((), (False,)), ((4, 3), (1,)), ((4, 3), (slice(1, 3),))]
)
def test_arrays_without_dimensions_and_keys_without_arrays(emulator: Any, place: Any, shape: Any, key: Any) -> None:
    template, _ = parsed(shape, key)
    x = place(np.arange(12.0)[: int(np.prod(shape))].reshape(shape))
    v = place(np.asarray(np.full(indexing.result_shape(template, shape, []), 5.0)))
    for name, args, params in (
        ("scatter", (v,), {"template": template, "shape": shape}),
        ("index_add", (x, v), {"template": template}),
        ("index_set", (x, v), {"template": template}),
        ("index_max", (x, v), {"template": template}),
        ("last_writes", (x,), {"template": template}),
    ):
        got, expected = cuda(name, *args, **params), cpu(name, *args, **params)
        assert got.shape == expected.shape, name
        np.testing.assert_array_equal(got, expected, err_msg=name)
    turned = place(np.arange(12.0).reshape(3, 4)).T  # with gaps between neighbours
    ids = np.array([3, 0, 3])
    template, _ = parsed((4, 3), (ids,))
    np.testing.assert_array_equal(
        cuda("index_set", turned, place(np.ones((3, 3))), place(ids), template=template),
        cpu("index_set", turned, np.ones((3, 3)), ids, template=template),
    )


@pytest.mark.parametrize("dtype", EXACT, ids=lambda d: np.dtype(d).name)
def test_exact_dtypes(emulator: Any, place: Any, mode: bool, dtype: Any) -> None:
    """Of writes that several chunks share."""
    template, (ids,) = parsed((4, 3), (np.array([0, 3, 3, 0, 3, 2] * 2),))
    rng = np.random.default_rng(1)
    x, v = (place(rng.integers(0, 200, s).astype(dtype)) for s in ((4, 3), (12, 3)))
    for name in ("index_add", "index_set", "last_writes", "index_min", "index_max"):
        given = (x,) if name == "last_writes" else (x, v)
        got = cuda(name, *given, place(ids), template=template)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, cpu(name, *given, ids, template=template))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: np.dtype(d).name)
def test_short_floats_are_added_up_in_float32(emulator: Any, place: Any, close: Any, mode: bool, dtype: Any) -> None:
    template, (ids,) = parsed((3, 40), (np.arange(900) % 7 % 3,))
    g = place(np.random.default_rng(1).normal(size=(900, 40)), dtype)
    got = cuda("scatter", g, place(ids), template=template, shape=(3, 40))
    assert got.dtype == dtype
    if emulator.xp._at == "start":
        added = next(name for _, name, *_ in emulator.launched if name.startswith("add_"))
        assert added.endswith(f", {16 // np.dtype(dtype).itemsize}>")
    expected = np.zeros((3, 40))
    np.add.at(expected, ids, g.astype(float))
    close(got, expected)


def test_values_broadcast(emulator: Any, place: Any, mode: bool) -> None:
    shape = (4, 3, 2)
    template, (ids,) = parsed(shape, (np.array([3, 0, 3]),))
    x, at = place(np.arange(24.0).reshape(shape)), place(ids)
    for v in (
        2.0,
        np.array(2.0),
        np.array([5.0]),
        np.arange(2.0),
        np.arange(9.0).reshape(3, 3, 1),
        np.ones((1, 1, 3, 1, 2)),
    ):
        for name in ("index_set", "index_add"):
            expected = cpu(name, x, v, ids, template=template)
            np.testing.assert_array_equal(cuda(name, x, v, at, template=template), expected)
    z = place(np.arange(24).reshape(shape), np.complex128)
    for name in ("index_set", "index_add"):
        got = cuda(name, z, 1 + 2j, at, template=template)
        np.testing.assert_array_equal(got, cpu(name, z, 1 + 2j, ids, template=template))


def test_a_large_table_of_which_few_rows_are_written(emulator: Any, place: Any) -> None:
    """The last write is found by sorting where marking every place would be most of the work."""
    ids = np.array([5, 1 << 21, 5, 7, 1 << 21])
    template, _ = parsed(((1 << 21) + 1,), (ids,))
    x, v = place(np.zeros((1 << 21) + 1), np.int8), place([1, 2, 3, 4, 5], np.int8)
    got = cuda("index_set", x, v, place(ids), template=template)
    assert [int(got[i]) for i in (5, 7, 1 << 21)] == [3, 4, 5]
    assert got.sum() == 12
    assert any("kept_by_order" in k for _, k, _, _ in emulator.launched)
    np.testing.assert_array_equal(cuda("last_writes", got, place(ids), template=template), [0, 0, 3, 4, 5])


def test_marks_are_of_eight_bytes_where_writes_are_many(emulator: Any, place: Any) -> None:
    """Of 2^31 writes and more, which would take an hour here."""
    places, last, kept = place([2, 0, 2, 1, 0]), place(np.full(4, -1)), place(np.zeros(5), bool)
    scatter._launch("mark_last<i64>", 5, places, last, np.int64(5))
    scatter._launch("kept_by_mark<i64>", 5, places, last, kept, np.int64(5))
    np.testing.assert_array_equal(last, [4, 3, 2, -1])
    np.testing.assert_array_equal(kept, [False, False, True, True, True])


def test_sums_over_many_chunks_have_one_order(emulator: Any, place: Any) -> None:
    """What is summed depends on nothing but the rows: the order of the threads does not show."""
    rng = np.random.default_rng(3)
    ids, rows = rng.integers(0, 3, 5000), rng.normal(size=(5000, 3)).astype(np.float32)
    ids[100:4000] = 1
    got = scatter.add_rows(place(np.zeros((3, 3)), np.float32), place(ids), place(rows), 3, False)
    assert any("join_chunks" in k for _, k, _, _ in emulator.launched)
    expected = np.zeros((3, 3))
    np.add.at(expected, ids, rows.astype(float))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    emulator.descending = not emulator.descending
    again = scatter.add_rows(place(np.zeros((3, 3)), np.float32), place(ids), place(rows), 3, False)
    np.testing.assert_array_equal(got, again)


@pytest.mark.parametrize(
    ("rows", "itemsize"), [(1, 1), (256, 1), (257, 2), (65_536, 2), (65_537, 4), (2**32, 4), (2**32 + 1, 8)]
)
def test_many_places_are_sorted_by_as_many_bytes_as_they_have(
    emulator: Any, place: Any, rows: int, itemsize: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sorted_: list[int] = []
    argsort = emulator.xp.argsort
    monkeypatch.setattr(
        emulator.xp, "argsort", lambda a, **kw: sorted_.append(a.itemsize) or argsort(a, **kw), raising=False
    )
    rng = np.random.default_rng(0)
    for count in (40, 5000):
        places = place(np.append(rng.integers(0, rows, count - 2), [rows - 1, 0]))
        np.testing.assert_array_equal(scatter._order(places, rows), np.argsort(places, kind="stable"))
    assert sorted_ == [8, itemsize]  # few places are sorted as they are


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_runs_of_any_length(emulator: Any, place: Any, data: st.DataObject) -> None:
    """Runs that begin, end, fill and skip chunks in every way."""
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    ids = np.repeat(np.arange(len(lengths)), lengths)
    ids = ids[np.random.default_rng(data.draw(st.integers(0, 99))).permutation(len(ids))]
    inner = data.draw(st.sampled_from([1, 2, 33]))
    rows = np.arange(len(ids) * inner, dtype=np.float64).reshape(-1, inner)
    got = scatter.add_rows(place(np.ones((len(lengths), inner))), place(ids), place(rows), inner, False)
    expected = np.ones((len(lengths), inner))
    np.add.at(expected, ids, rows)
    np.testing.assert_array_equal(got, expected)


def test_offsets_beyond_two_to_the_31(emulator: Any, emulation: Any, place: Any) -> None:
    out = emulation.guarded(((1 << 31) + 8,), np.int8, emulator.xp._at)
    ids, v = place([(1 << 31) + 5, 3, (1 << 31) + 5]), place([1, 2, 3], np.int8)
    scatter.add_rows(out, ids, v, 1, False)
    assert (int(out[3]), int(out[-3])) == (2, 4)
    with mt.use_deterministic(False):
        wide = emulation.guarded(((1 << 29) + 8,), np.float32, emulator.xp._at)
        scatter.add_rows(wide, place([(1 << 29) + 7]), place([1.5], np.float32), 1, False)
    assert float(wide[-1]) == 1.5


@pytest.mark.parametrize("dtype", [*FLOATS, *EXACT], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("name", ["index_min", "index_max"])
def test_extremes_of_every_dtype(emulator: Any, place: Any, name: str, dtype: Any) -> None:
    """Many writes to few places, numbers that are different in their last bits alone, NaN among them."""
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 5, 600)
    template, _ = parsed((6, 3), (ids,))
    x, v = rng.normal(size=(6, 3)) * 20, rng.normal(size=(600, 3)) * 20
    if np.dtype(dtype).kind == "c":
        x, v = x + 1j * rng.normal(size=x.shape), np.round(v) + 1j * rng.normal(size=v.shape)
    with np.errstate(all="ignore"):
        x, v = place(x, dtype), place(v, dtype)
    if np.dtype(dtype) in (np.dtype(np.float64), np.dtype(np.float32)):
        v[:50] = np.nextafter(v.dtype.type(60), v.dtype.type(100)) if name == "index_max" else v[:50]
    for written in (v, v[:1, :1] if v.ndim else v):
        got, want = (f(name, x, written, *at, template=template) for f, at in ((cuda, [place(ids)]), (cpu, [ids])))
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    if np.dtype(dtype).kind in "fcV":
        v[300] = np.nan
        got, want = (f(name, x, v, *at, template=template) for f, at in ((cuda, [place(ids)]), (cpu, [ids])))
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        assert np.isnan(want).any()
