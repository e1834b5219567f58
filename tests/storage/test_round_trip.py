"""What is saved is what is loaded, on any mesh, to the bit."""

import itertools
from collections import namedtuple
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape import errors
from meshtape.storage import LoadReport, load, merge, open_checkpoint, save, verify


@pytest.mark.parametrize("parts", [(1,), (2,), (3,), (2, 2)], ids=str)
def test_every_dtype_and_shape_survives_p_to_q(kit, tmp_path, parts):
    """One checkpoint holds all dtypes, shapes and shardings of a mesh; it is loaded whole and onto every other mesh."""
    rng = np.random.default_rng(1)
    values, tree = {}, {}
    for i, (dtype, shape) in enumerate(itertools.product(kit.DTYPES, kit.SHAPES)):
        options = kit.shardings(len(shape), parts)
        name = f"{dtype.name}-{shape}"
        values[name] = kit.random(dtype, shape, i)
        tree[name] = kit.split(values[name], options[rng.integers(len(options))])
    # Meshes are grouped by equality: these are equal but not identical.
    save(tmp_path / "c", tree)
    loaded = load(tmp_path / "c")
    assert list(loaded) == list(values)
    for name, a in values.items():
        assert isinstance(loaded[name], mt.Array)
        assert kit.same(loaded[name], a), name
    verify(tmp_path / "c")
    for q in [(1,), (4,), (3, 2)]:
        chosen = {}

        def choose(path, shape, dtype, chosen=chosen, q=q):
            options = kit.shardings(len(shape), q)
            chosen[path] = options[rng.integers(len(options))]
            return chosen[path]

        report = LoadReport()
        result = load(tmp_path / "c", shardings=choose, report=report)
        for name, a in values.items():
            assert result[name].sharding is chosen[(name,)]
            for rank, block in result[name].blocks.items():
                assert kit.same(block, a[chosen[(name,)].box(a.shape, rank).slices]), (name, rank)


MESHES = [(1,), (2,), (3,), (4,), (2, 2), (4, 2), (7,), (64,)]
WAYS = {"row": 0, "column": 1, "both": (0, 1), "replicated": None}


def _ways(kit, parts):
    """Row, column, both and replicated on a mesh; on a mesh of one axis both is the rows."""
    host = kit.Host({f"axis{i}": n for i, n in enumerate(parts)})
    for name, way in WAYS.items():
        dims = way if isinstance(way, tuple) else (way,)
        yield name, kit.Sharding(host, (*dims, *(None for _ in parts))[: len(parts)])


@pytest.mark.parametrize("format", ["zarr", "safetensors"])
@pytest.mark.parametrize(
    "dtypes", [("f4",), pytest.param(None, marks=pytest.mark.slow)], ids=["one dtype", "every dtype"]
)
def test_from_each_mesh_to_each_other(kit, tmp_path, format, dtypes):
    """Meshes of up to 64 ranks, most of which have nothing of a small array, in each way, from each format."""
    shapes = [(5, 7), (1, 1)] if dtypes else [(5, 7), (64, 3), (1, 1), (0, 3)]
    for i, p in enumerate(MESHES if format == "zarr" else MESHES[:1]):
        values, tree = {}, {}
        for dtype in [np.dtype(d) for d in dtypes] if dtypes else kit.DTYPES:
            for (way, sharding), shape in itertools.product(_ways(kit, p), shapes):
                name = f"{dtype.name} {shape} {way}"
                values[name] = kit.random(dtype, shape, len(values))
                tree[name] = kit.split(values[name], sharding)
        where = tmp_path / "-".join(map(str, p))
        save(where, tree)
        if format == "safetensors":
            if dtypes is None:
                tree = {n: v for n, v in tree.items() if not n.startswith("complex128")}
            merge(where, where / "hf", keys=list(tree))
            where = where / "hf"
        for j, q in enumerate(MESHES):
            if dtypes and (i + j) % 2:
                continue
            ways = [sharding for _, sharding in _ways(kit, q)]
            for sharding in [ways[(i + j) // 2 % len(ways)]] if dtypes else ways:
                got = load(where, shardings=lambda *_, sharding=sharding: sharding)
                for name in tree:
                    assert kit.same(got[name].whole(), values[name]), (p, q, name)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_resharding_property(kit, tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=3)))
    p = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    q = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=2)))
    source = data.draw(st.sampled_from(kit.shardings(len(shape), p)))
    target = data.draw(st.sampled_from(kit.shardings(len(shape), q)))
    a = np.arange(int(np.prod(shape)), dtype="i4").reshape(shape)
    where = tmp_path_factory.mktemp("c") / "c"
    save(where, [kit.split(a, source)])
    (result,) = load(where, shardings=[target])
    assert all(kit.same(b, a[target.box(shape, r).slices]) for r, b in result.blocks.items())


def test_all_patterns_of_eight_bits_survive(kit, tmp_path):
    bits = np.arange(256, dtype=np.uint8)
    tree = {t.__name__: bits.view(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)}
    tree["bf16"] = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)
    save(tmp_path / "c", tree)
    assert all(kit.same(v, tree[k]) for k, v in load(tmp_path / "c").items())
    assert open_checkpoint(tmp_path / "c")["float8_e5m2"].nbytes == 256


def test_arrays_of_several_chunks_and_awkward_sizes(kit, tmp_path):
    """Chunks that do not divide the array, shards that no chunk divides well, rows longer than a chunk."""
    tree = {}
    for shape, dims in [((2053, 1031), (0,)), ((2053, 1031), (1,)), ((3_000_017,), (0,)), ((2, 3, 700_001), (1,))]:
        a = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)
        tree[f"{shape}{dims}"] = kit.split(a, kit.Sharding(kit.Host({"x": 3}), dims))
        tree[f"{shape} local {dims}"] = a
    save(tmp_path / "c", tree)
    ckpt = open_checkpoint(tmp_path / "c")
    for name, a in tree.items():
        want = a if isinstance(a, np.ndarray) else a.whole()
        assert kit.same(ckpt[name][...], want)
        window = tuple(slice(n // 3, n // 2 + 5) for n in want.shape)
        assert kit.same(ckpt[name][window], want[window])
    verify(tmp_path / "c")


@pytest.mark.parametrize(
    "make",
    [
        lambda a: a.T,
        lambda a: a[::2, ::-1],
        lambda a: a.astype(">i4"),
        lambda a: np.asfortranarray(a),
        lambda a: np.broadcast_to(a[:1], a.shape),
        lambda a: mt.asarray(a),
        lambda a: mt.asarray(a)[::2].T,
    ],
    ids=["transposed", "strided", "big-endian", "fortran", "broadcast", "Array", "Array view"],
)
def test_any_layout_is_saved_by_value(tmp_path, make):
    a = make(np.arange(35, dtype="i4").reshape(5, 7))
    save(tmp_path / "c", {"a": a})
    loaded = np.asarray(load(tmp_path / "c")["a"])
    assert np.array_equal(loaded, np.asarray(a))
    assert loaded.dtype.isnative


def test_structure_and_values_survive(kit, tmp_path):
    Point = namedtuple("Point", "x y")

    @dataclass
    class State:
        w: object
        n: int

    tree = {
        "layers": [{"w": np.ones(2)}, (np.zeros(1), None)],
        "point": Point(np.float32(3), 4),
        "state": State(np.ones(1), 5),
        "empty": [{}, [], ()],
        "values": [1, -(2**70), 1.5, float("nan"), float("-inf"), True, "text", "", None],
        7: "an int key",
    }
    save(tmp_path / "c", tree, step=3, metadata={"lr": np.float32(0.5), "nan": float("nan"), "k": [1, {"a": None}]})
    got = load(tmp_path / "c")
    assert list(got) == list(tree)
    assert got["layers"][1][1] is None
    assert isinstance(got["layers"][1], tuple)
    assert got["empty"] == [{}, [], ()]
    assert got["values"][:3] == [1, -(2**70), 1.5]
    assert np.isnan(got["values"][3])
    assert got["values"][4:] == [float("-inf"), True, "text", "", None]
    assert type(got["values"][5]) is bool
    assert got["point"]["y"] == 4
    assert got["state"]["n"] == 5
    assert got[7] == "an int key"
    ckpt = open_checkpoint(tmp_path / "c")
    assert ckpt.step == 3
    assert ckpt.metadata["lr"] == 0.5
    assert np.isnan(ckpt.metadata["nan"])
    again = load(tmp_path / "c", like=tree)
    assert isinstance(again["point"], Point)
    assert isinstance(again["state"], State)
    assert again["state"].n == 5


@pytest.mark.parametrize("tree", [{}, [], None, 3, np.arange(3), {"a": {}}], ids=repr)
def test_trees_with_little_in_them(kit, tmp_path, tree):
    save(tmp_path / "c", tree)
    got = load(tmp_path / "c")
    assert kit.same(got, tree) if isinstance(tree, np.ndarray) else got == tree


def test_what_cannot_be_saved_is_refused_by_name_before_anything_is_written(tmp_path):
    for tree, kind, text in [
        ({"a": {"b": np.array(["x"])}}, errors.CheckpointDTypeError, "a.b"),
        ({"a": [object()]}, errors.CheckpointDTypeError, "a.0"),
        ({"a": 1j}, errors.CheckpointDTypeError, "a"),
        ({"a": np.zeros(2, "M8[s]")}, errors.CheckpointDTypeError, "a"),
        ({"a": {"b": 1}, "a.b": np.ones(1)}, errors.CheckpointKeyError, r"\['a.b'\] and \['a', 'b'\]"),
        ({1.5: 1}, errors.CheckpointError, "1.5"),
    ]:
        with pytest.raises(kind, match=text):
            save(tmp_path / "c", tree)
    with pytest.raises(errors.CheckpointError, match=r"metadata\['x'\]"):
        save(tmp_path / "c", {}, metadata={"x": {3: 1}})
    assert list(tmp_path.iterdir()) == []


def test_partial_values_are_reduced_before_they_are_saved(kit, tmp_path):
    host = kit.Host({"x": 3})
    a = np.arange(6.0)
    partial = kit.Split((6,), a.dtype, kit.Sharding(host, (None,), partial=True), {r: a.copy() for r in range(3)})
    save(tmp_path / "c", partial)
    assert kit.same(load(tmp_path / "c"), 3 * a)


def test_replicas_are_written_once_and_the_work_is_balanced(kit, tmp_path):
    host = kit.Host({"x": 3}, processes=3)
    tree = {f"k{i}": kit.split(np.ones(4), kit.Sharding(host, (None,))) for i in range(10)}
    report = save(tmp_path / "c", tree)
    assert report.files == 10
    tasks = {rank: len(payload[1]) for call in host.calls for rank, payload in call.items()}
    assert tasks == {0: 4, 1: 3, 2: 3}


def test_blocks_without_a_common_step_still_round_trip(kit, tmp_path):
    from meshtape.arrays.core.blocks import Box

    class Odd(kit.Sharding):
        def box(self, shape, rank):
            start, n = [(0, 3), (3, 2), (5, 5)][rank]
            return Box((start, 0), (n, shape[1]))

    a = np.arange(40).reshape(10, 4)
    save(tmp_path / "c", kit.split(a, Odd(kit.Host({"x": 3}), (0,))))
    assert kit.same(load(tmp_path / "c"), a)


def test_files_follow_the_umask(tmp_path):
    import os

    before = os.umask(0o027)
    try:
        save(tmp_path / "c", {"w": np.ones(2)})
    finally:
        os.umask(before)
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o750
    assert all(f.stat().st_mode & 0o777 == 0o640 for f in (tmp_path / "c").rglob("*") if f.is_file())
