"""Chunks that keep their bytes when a checkpoint is cut for another mesh."""

import itertools
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtape import errors
from meshtape.storage import load, open_checkpoint, reshard, save, verify
from meshtape.storage.format import chunk_grid as grid
from meshtape.storage.format.chunk_grid import ChunkGrid
from meshtape.storage.transform.sinks import copy_chunks, sink_zarr
from meshtape.storage.transform.sinks.copy_chunks import moves

CUTS = [
    ({"d": 1, "m": 1}, {}),
    ({"d": 1, "m": 2}, {"m": 0}),
    ({"d": 1, "m": 2}, {"m": 1}),
    ({"d": 2, "m": 2}, {"d": 0, "m": 1}),
    ({"d": 2, "m": 3}, {"d": 1, "m": 0}),
]


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of some tens of bytes, so that small arrays have many."""
    monkeypatch.setattr(grid, "TARGET", 96)
    monkeypatch.setattr(grid, "SHORTEST_ROW", 16)


@pytest.fixture
def counted(monkeypatch):
    """Chunks that were copied as they are."""
    seen = []
    real = copy_chunks.copy_chunks

    def count(tensor, grid, chunks, path_of):
        seen.extend(chunks)
        return real(tensor, grid, chunks, path_of)

    monkeypatch.setattr(sink_zarr, "copy_chunks", count)
    return seen


def content(root):
    return {
        os.path.relpath(os.path.join(home, f), root): open(os.path.join(home, f), "rb").read()
        for home, _, files in os.walk(root)
        for f in files
    }


def test_the_files_are_those_that_reading_and_writing_gives(kit, small_chunks, counted, monkeypatch, tmp_path):
    tree = {
        "even": kit.random(np.dtype("f4"), (24, 48)),
        "odd": kit.random(np.dtype("f2"), (17, 31), 1),
        "cube": kit.random(np.dtype("i4"), (6, 5, 8), 2),
        "line": kit.random(np.dtype("u1"), (500,), 3),
        "one": np.array(2.5),
        "none": np.ones((0, 3), "i4"),
    }
    save(tmp_path / "whole", tree)
    from_split = 0
    for n, (mesh, split) in enumerate(CUTS):
        cut = {"mesh": mesh, "shardings": {"even": split, "odd": split, "cube": split, "*": {}}}
        a, b = tmp_path / f"a{n}", tmp_path / f"b{n}"
        reshard(tmp_path / "whole", a, **cut)
        verify(a)
        before = len(counted)
        # Back from blocks to other blocks, with the copies and without.
        other = {**cut, "shardings": {"even": {"m": 1}, "*": {}}}
        reshard(a, b, **other)
        from_split += len(counted) - before
        with monkeypatch.context() as m:
            m.setattr(sink_zarr, "keeps_bytes", lambda *_: False)
            reshard(a, tmp_path / f"c{n}", **other)
        assert content(b) == content(tmp_path / f"c{n}")
        got = load(b)
        assert all(kit.same(got[k], tree[k]) for k in tree)
    assert from_split > 200  # most chunks of these grids are common


def test_equal_layers_on_other_meshes_have_equal_chunks():
    """What tensor-parallel meshes of usual lengths share, whichever dimension they split."""
    from meshtape.arrays.core.blocks import Box

    for shape in [(4096, 4096), (11008, 4096), (2048, 2560), (32000, 4096)]:
        found = set()
        for dimension, parts in itertools.product((0, 1), (1, 2, 4)):
            step = shape[dimension] // parts
            extent = [step if d == dimension else n for d, n in enumerate(shape)]
            boxes = [
                Box(tuple(i * step if d == dimension else 0 for d in range(2)), tuple(extent)) for i in range(parts)
            ]
            found.add(grid.choose_grid(shape, 4, boxes).chunk)
        assert len(found) == 1, shape


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_moves_name_each_chunk_once_at_its_places(data):
    ndim = data.draw(st.integers(1, 3))
    chunk = tuple(data.draw(st.integers(1, 3)) for _ in range(ndim))
    shape = tuple(data.draw(st.integers(1, 9)) for _ in range(ndim))
    of = lambda: ChunkGrid(shape, tuple(c * data.draw(st.integers(1, 4)) for c in chunk), chunk)  # noqa: E731
    source, target = of(), of()
    every = list(itertools.product(*(range(-(-n // c)) for n, c in zip(shape, chunk, strict=True))))
    found = moves(source, target, every)
    assert sorted(m.index for m in found) == every
    for g, places in (
        (source, [(m.index, m.source, m.at) for m in found]),
        (target, [(m.index, m.target, m.to) for m in found]),
    ):
        assert len({p[1:] for p in places}) == len(every)
        for index, coord, number in places:
            within = np.unravel_index(number, g.present(coord))
            starts = [c * s + k * n for c, s, k, n in zip(coord, g.shard, within, g.chunk, strict=True)]
            assert starts == [i * n for i, n in zip(index, g.chunk, strict=True)]
    assert sum(math.prod(source.present(c)) for c in source.shards()) == len(every)


def test_damage_is_found_before_it_is_copied(kit, small_chunks, counted, tmp_path):
    w = kit.random(np.dtype("f4"), (24, 48))
    reshard(_saved(tmp_path / "a", w), tmp_path / "b", mesh={"m": 4}, shardings={"w": {"m": 1}})
    file = tmp_path / "b" / "w" / "c.0.2"
    held = bytearray(file.read_bytes())
    held[40] ^= 4
    file.write_bytes(held)
    before = len(counted)
    with pytest.raises(errors.CorruptCheckpoint, match=r"c\.0\.2: chunk \(0, 0\) of key 'w' does not fit its crc32c"):
        reshard(tmp_path / "b", tmp_path / "c", mesh={"m": 2}, shardings={"w": {"m": 1}})
    assert len(counted) > before
    file.write_bytes(held[:-1])
    with pytest.raises(errors.CorruptCheckpoint, match=r"has \d+ bytes, the manifest says"):
        reshard(tmp_path / "b", tmp_path / "c", mesh={"m": 2}, shardings={"w": {"m": 1}})
    file.unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match=r"c\.0\.2"):
        reshard(tmp_path / "b", tmp_path / "c", mesh={"m": 2}, shardings={"w": {"m": 1}})
    assert sorted(e.name for e in tmp_path.iterdir()) == ["a", "b"]


def test_a_rule_or_a_cast_on_the_way_reads_the_values(kit, small_chunks, counted, tmp_path):
    w = kit.random(np.dtype("f4"), (24, 48))
    source = _saved(tmp_path / "a", w)
    reshard(source, tmp_path / "b", rules="w -> w, permute()", mesh={"m": 2}, shardings={"w": {"m": 1}})
    reshard(source, tmp_path / "c", dtype="float16", allow_overflow=True)
    assert not counted
    assert kit.same(load(tmp_path / "b")["w"], w.T)
    assert open_checkpoint(tmp_path / "c")["w"].dtype == np.float16
    reshard(source, tmp_path / "d", rules="w -> v")
    assert counted
    assert kit.same(load(tmp_path / "d")["v"], w)


def _saved(where, w):
    save(where, {"w": w})
    return where
