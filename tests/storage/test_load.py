"""Loading: plan and check first, then read only what is needed."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

import meshtape as mt
from meshtape import errors
from meshtape.arrays.core.blocks import Box
from meshtape.storage import LoadReport, load, open_checkpoint, save, save_safetensors
from meshtape.storage.format.chunk_grid import choose_grid, windows

CHUNK_SLACK = 5 << 20


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """64 MB: a matrix whole, the same saved by rows and by columns, and a safetensors file of it."""
    home = tmp_path_factory.mktemp("big")
    w = np.arange(2048 * 8192, dtype="f4").reshape(2048, 8192)
    save(home / "whole", {"w": w})
    save_safetensors(home / "x.safetensors", {"w": w})
    return home, w


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("source", ["whole", "by rows", "by columns"])
def test_a_quarter_reads_a_quarter(kit, big, tmp_path, source, axis):
    home, w = big
    where = home / "whole"
    if source != "whole":
        where = tmp_path / "c"
        save(where, {"w": kit.split(w, kit.Sharding(kit.Host({"x": 2}), (int(source == "by columns"),)))})
    host = kit.Host({"x": 4}, processes=4)
    report = LoadReport()
    got = load(where, shardings={"w": kit.Sharding(host, (axis,))}, report=report)
    assert np.array_equal(got["w"].whole(), w)
    assert report.bytes_needed == w.nbytes
    # Every rank reads its quarter, with at most a chunk too many at each side.
    assert w.nbytes <= report.bytes_read <= w.nbytes * 1.01 + 4 * CHUNK_SLACK
    ckpt = open_checkpoint(where)
    quarter = (slice(None), slice(2048, 4096)) if axis else slice(512, 1024)
    tensor = ckpt["w"].tensor
    from meshtape.storage.checkpoint.checkpoint import _plan_index

    picks, _ = _plan_index(quarter, w.shape)
    box = Box(tuple(r.start for r in picks), tuple(map(len, picks)))
    assert tensor.planned(box) <= w.nbytes / 4 * 1.01 + CHUNK_SLACK
    assert np.array_equal(ckpt["w"][quarter], w[quarter])


def test_replicas_of_one_process_read_once(kit, big):
    home, w = big
    report = LoadReport()
    host = kit.Host({"x": 4}, processes=1)
    got = load(home / "whole", shardings={"w": kit.Sharding(host, (None,))}, report=report)
    assert report.bytes_read < 1.01 * w.nbytes
    assert not np.shares_memory(got["w"].blocks[0], got["w"].blocks[1])


def test_rows_of_a_safetensors_file_are_read_alone(kit, big):
    home, w = big
    report = LoadReport()
    sharding = kit.Sharding(kit.Host({"x": 4}, processes=4), (0,))
    got = load(home / "x.safetensors", shardings=lambda *_: sharding, report=report)
    assert np.array_equal(got["w"].whole(), w)
    assert report.bytes_read == w.nbytes
    ckpt = open_checkpoint(home / "x.safetensors")
    for index in [
        (slice(3, 900), slice(5, 70)),
        (slice(None), 8191),
        (7, slice(None)),
        (slice(None, None, -3), slice(9, 2, -2)),
    ]:
        assert np.array_equal(ckpt["w"][index], w[index])


INDICES = [
    0,
    -1,
    slice(None),
    slice(2, 5),
    slice(None, None, -1),
    slice(5, 1, -2),
    slice(3, 3),
    slice(-3, None),
    slice(9, 99),
]


@pytest.mark.parametrize("kind", ["meshtape", "safetensors"])
def test_indexing_is_numpys(kit, tmp_path, kind):
    a = np.arange(7 * 6 * 5).reshape(7, 6, 5)
    if kind == "meshtape":
        save(tmp_path / "c", {"a": kit.split(a, kit.Sharding(kit.Host({"x": 3, "y": 2}), (0, 2)))})
    else:
        save_safetensors(tmp_path / "c", {"a": a})
    stored = open_checkpoint(tmp_path / "c")["a"]
    for i in INDICES:
        for j in [*INDICES, Ellipsis]:
            for index in [(i, j), (j, i), (i, j, 2)]:
                if sum(k is Ellipsis for k in index) < 2:
                    assert np.array_equal(stored[index], a[index]), index
    assert np.array_equal(np.asarray(stored), a)
    assert np.asarray(stored, dtype="f4").dtype == "f4"
    assert len(stored) == 7
    for bad, text in [
        (7, "out of range"),
        ((0, 0, 0, 0), "too many"),
        ([1, 2], "list"),
        (None, "None"),
        (True, "bool"),
    ]:
        with pytest.raises(IndexError, match=text):
            stored[bad]


def test_all_that_does_not_fit_is_in_one_error_and_nothing_is_read(tmp_path):
    tree = {"a": np.ones(2), "b": {"c": np.ones((2, 3)), "d": np.ones(2, "i4")}, "n": 3}
    save(tmp_path / "c", tree)
    (tmp_path / "c" / "a" / "c.0").unlink()
    like = {"b": {"c": np.ones((4, 3)), "d": np.ones(2, "f4")}, "n": 3, "new": np.ones(1), "newer": np.ones(1)}
    with pytest.raises(errors.CheckpointKeyError) as e:
        load(tmp_path / "c", like=like)
    text = str(e.value)
    assert "missing in the checkpoint (2): new, newer" in text
    assert "unexpected, not in like (1): a" in text
    assert "b.c: stored shape (2, 3), wanted (4, 3)" in text
    assert "b.d: stored dtype int32, wanted float32" in text
    assert "cast=True" in text
    with pytest.raises(errors.CheckpointShapeError, match=r"b.c: stored shape \(2, 3\), wanted \(4, 3\)"):
        load(tmp_path / "c", like={"b": {"c": np.ones((4, 3))}}, keys=["b.c"])
    with pytest.raises(errors.CheckpointDTypeError, match="stored dtype int32, wanted float32") as e:
        load(tmp_path / "c", like={"b": {"d": np.ones(2, "f4")}}, keys=["b.d"])
    assert isinstance(e.value, TypeError)
    assert load(tmp_path / "c", like={"b": {"d": np.ones(2, "f4")}}, keys=["b.d"], cast=True)["b"]["d"].dtype == "f4"


def test_like_gives_structure_kind_and_sharding(kit, tmp_path):
    @dataclass
    class Wanted:
        shape: tuple
        dtype: object
        sharding: object = None

    a = np.arange(12.0).reshape(3, 4)
    save(tmp_path / "c", {"a": a, "b": [a, a], "n": 1})
    sharding = kit.Sharding(kit.Host({"x": 2}), (1,))
    like = {"n": 0, "b": (Wanted((3, 4), np.dtype("f8"), sharding), mt.asarray(a)), "a": a}
    got = load(tmp_path / "c", like=like)
    assert list(got) == ["n", "b", "a"]
    assert got["n"] == 1
    assert isinstance(got["b"], tuple)
    assert got["b"][0].sharding is sharding
    assert np.array_equal(got["b"][0].whole(), a)
    assert isinstance(got["b"][1], mt.Array)
    assert type(got["a"]) is np.ndarray
    low = load(tmp_path / "c", like={**like, "b": (Wanted((3, 4), np.dtype("f4"), sharding), mt.asarray(a))}, cast=True)
    assert low["b"][0].dtype == "f4"


def test_trees_of_shardings(kit, tmp_path):
    save(tmp_path / "c", {"a": np.ones(4), "b": [np.ones(4), None], "n": 1})
    s = kit.Sharding(kit.Host({"x": 2}), (0,))
    got = load(tmp_path / "c", shardings={"a": s, "b": [None, None], "n": None})
    assert got["a"].sharding is s
    assert isinstance(got["b"][0], mt.Array)
    with pytest.raises(errors.CheckpointKeyError, match=r"missing in the checkpoint \(1\): z"):
        load(tmp_path / "c", shardings={"a": s, "b": [None], "z": s})
    with pytest.raises(errors.CheckpointKeyError, match=r"unexpected, not in shardings \(1\): b.0"):
        load(tmp_path / "c", shardings={"a": s})
    with pytest.raises(errors.CheckpointError, match="not both"):
        load(tmp_path / "c", shardings={}, like={})
    with pytest.raises(errors.ReshardError, match="partial"):
        load(tmp_path / "c", shardings=lambda *_: kit.Sharding(s.mesh, (0,), partial=True))
    with pytest.raises(errors.CheckpointError, match="not a sharding"):
        load(tmp_path / "c", shardings=lambda *_: 7)


def test_keys_pick_leaves(tmp_path):
    save(tmp_path / "c", {"layers": [{"w": np.ones(1), "b": np.ones(2)}, {"w": np.ones(3)}], "n": 5, "x": (1, 2)})
    got = load(tmp_path / "c", keys=["layers.*.w", "n"])
    assert got["layers"][0].keys() == {"w"}
    assert got["n"] == 5
    assert got.keys() == {"layers", "n"}
    assert load(tmp_path / "c", keys="layers.1.w")["layers"][0] == {}
    assert load(tmp_path / "c", keys="x.1")["x"] == (None, 2)
    with pytest.raises(errors.CheckpointKeyError, match=r"nothing matches \['q\*'\]"):
        load(tmp_path / "c", keys=["n", "q*"])


def test_a_saved_again_path_gives_the_new_values(tmp_path):
    for i in range(3):
        save(tmp_path / "c", {"w": np.full(3, i)}, overwrite=True)
        assert np.asarray(load(tmp_path / "c")["w"])[0] == i


def test_checkpoint_is_a_mapping_that_shows_itself(kit, tmp_path):
    tree = {f"k{i}<b>": np.ones((2, i)) for i in range(40)}
    tree["s"] = kit.split(np.ones((4, 4)), kit.Sharding(kit.Host({"data": 2, "model": 2}), (0, None)))
    save(tmp_path / "c", tree, step=12, metadata={"x": 1})
    ckpt = open_checkpoint(str(tmp_path / "c"))
    assert len(ckpt) == 41
    assert ckpt["s"].sharding_text == "data=Shard(0), model=Replicate()"
    text = repr(ckpt)
    assert "step 12: 41 arrays" in text
    assert text.count("\n") < 30
    page = ckpt._repr_html_()
    assert "k1&lt;b&gt;" in page
    assert "k1<b>" not in page
    assert set(ckpt.tree()) == set(tree)
    assert ckpt.tree()["s"].shape == (4, 4)
    with pytest.raises(KeyError, match="close are 'k1<b>'"):
        ckpt["k1b"]
    assert "k1b" not in ckpt
    assert "float64[2,1]" in repr(ckpt["k1<b>"])


def test_a_manifest_of_many_chunks_stays_small_and_opens_quickly(monkeypatch):
    from meshtape.arrays.core.blocks import Box
    from meshtape.storage.format import manifest

    n = 20_000
    grid = choose_grid((n, 64), 2, [Box((i, 0), (1, 64)) for i in range(n)])
    rows = [[grid.key((i, 0)), [i, 0], [1, 64], 152, "01234567"] for i in range(n)]
    entry = manifest.ArrayEntry(("w",), "w", grid, np.dtype("f2"), None, None, rows)
    data = manifest.Manifest([entry], {"array": 0}).dumps
    text = manifest.Manifest([entry], {"dict": [["w", {"array": 0}]]}).dumps()
    assert len(text) / n < 200
    assert callable(data)
    held = manifest.loads(text, "x").arrays[0]
    assert len(held) == n
    # A rank that wants one block pays for one: no other row is looked at.
    looked, look = [], type(held)._row
    monkeypatch.setattr(type(held), "_row", lambda entry, number: looked.append(number) or look(entry, number))
    assert held[17_000, 0].box.offset == (17_000, 0)
    assert looked == [17_000]


@pytest.mark.parametrize(
    "shape", [(4096, 4096), (10_007, 4096), (50_257, 1600), (3_000_017,), (16, 1024, 3000), (3, 3, 512, 512)]
)
@pytest.mark.parametrize("parts", [1, 4])
def test_chunks_are_of_a_good_size(kit, shape, parts):
    sharding = kit.Sharding(kit.Host({"x": parts}), (0,))
    grid = choose_grid(shape, 4, [sharding.box(shape, r) for r in range(parts)])
    size = np.prod(grid.chunk) * 4
    assert 1 << 17 <= size <= 4 << 20 or grid.chunk == grid.shard
    assert all(s % c == 0 for s, c in zip(grid.shard, grid.chunk, strict=True))
    assert np.prod(grid.shard) * np.prod(grid.counts) < 1.02 * np.prod(shape) + size
    covered = sum(b.size for b in windows(shape, grid.chunk, 4, 16 << 20))
    assert covered == np.prod(shape)


@pytest.mark.parametrize("kind", ["meshtape", "safetensors"])
def test_any_part_of_an_array_of_any_dtype(kit, tmp_path, kind):
    arrays = {d.name: kit.random(d, (6, 7, 5)) for d in kit.DTYPES if d.name != "complex128" or kind == "meshtape"}
    if kind == "meshtape":
        save(tmp_path / "c", {n: kit.split(a, kit.Sharding(kit.Host({"x": 3}), (1,))) for n, a in arrays.items()})
    else:
        save_safetensors(tmp_path / "c", arrays)
    ckpt = open_checkpoint(tmp_path / "c")
    for name, a in arrays.items():
        for index in itertools.product([slice(None), slice(1, 3), 2, slice(5, 6)], repeat=3):
            assert kit.same(ckpt[name][index], a[index]), (name, index)
