"""PyTorch's distributed checkpoints in safetensors files, of which each holds blocks; and such files that mean harm.

The golden one was written by torch 2.13 on three ranks: ``model.w`` cut by rows, ``model.v`` by columns, the others
kept by one rank each.
"""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from meshtape import errors
from meshtape.arrays.core.blocks import Box
from meshtape.storage import load, merge, open_checkpoint, reshard, save_safetensors
from meshtape.storage.format.chunk_grid import tiled

GOLDEN = Path(__file__).parent / "golden" / "torch-2.13-dcp-safetensors"
WANTED = {
    "model.r": np.arange(3),
    "model.s": np.float32(2.5),
    "model.v": np.arange(24).astype(ml_dtypes.bfloat16).reshape(4, 6),
    "model.w": np.arange(35, dtype="f4").reshape(7, 5),
}


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(GOLDEN, tmp_path / "dcp"))


def test_everything_and_any_box_is_read(kit):
    ckpt = open_checkpoint(GOLDEN)
    assert ckpt.kind == "PyTorch DCP"
    assert list(ckpt) == list(WANTED)
    for name, wanted in WANTED.items():
        assert kit.same(ckpt[name].read(), np.asarray(wanted)), name
    for name in ("model.v", "model.w"):
        wanted = WANTED[name]
        n, m = wanted.shape
        for a in range(n):
            for b in range(m):
                index = (slice(a, n - a // 2), slice(b, b + 2))
                assert np.array_equal(ckpt[name][index], wanted[index])
    tensor = ckpt["model.w"].tensor
    assert tensor.planned(Box((3, 0), (3, 5))) == 3 * 5 * 4
    assert len(tensor.only(Box((3, 0), (3, 5))).parts) == 1


def test_merged_and_resharded(kit, tmp_path):
    merge(GOLDEN, tmp_path / "hf")
    np.testing.assert_array_equal(load_file(tmp_path / "hf" / "model.safetensors")["model.w"], WANTED["model.w"])
    reshard(GOLDEN, tmp_path / "c", mesh={"m": 2}, shardings={"model.w": {"m": 1}})
    tree = load(tmp_path / "c")
    assert all(kit.same(np.asarray(tree[n]), np.asarray(w)) for n, w in WANTED.items())


@pytest.mark.parametrize("number", [1, 2])
def test_a_file_that_is_missing_is_named_or_its_hole(copy, number):
    (copy / f"shard-0000{number}-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match="shards 2 are missing" if number == 2 else "model.v"):
        open_checkpoint(copy)


def written(where, offsets, shape=(2, 3), info=None):
    where.mkdir()
    for i, offset in enumerate(offsets):
        said = json.dumps({"w": {"saved_offsets": offset}}) if info is None else info
        metadata = {"DCP_SHARDING_INFO": said, "format": "pt"}
        save_safetensors(where / f"part-{i}.safetensors", {"w": np.full(shape, i, "f4")}, metadata=metadata)
    return where


def test_blocks_that_overlap_or_leave_a_hole_are_refused(tmp_path):
    assert load(written(tmp_path / "fine", [[0, 0], [2, 0]]))["w"].shape == (4, 3)
    for i, offsets in enumerate(
        ([[0, 0], [1, 0]], [[0, 0], [3, 0]], [[1, 0], [3, 0]], [[0, 0], [0, 3], [2, 0], [1, 3]])
    ):
        with pytest.raises(errors.IncompleteCheckpoint, match="cover"):
            open_checkpoint(written(tmp_path / str(i), offsets))


@pytest.mark.parametrize(
    "info", ["", "[]", "{}", '{"w": 1}', '{"w": {"saved_offsets": [0]}}', '{"w": {"saved_offsets": [-1, 0]}}',
             '{"w": {"saved_offsets": [0.0, 0]}}', '{"w": {"saved_offsets": [9e99, true]}}', "[" * 100_000],
)  # fmt: skip
def test_offsets_of_another_kind_are_refused(tmp_path, info):
    with pytest.raises(errors.CorruptCheckpoint, match=r"DCP_SHARDING_INFO|lies at"):
        open_checkpoint(written(tmp_path / "c", [[0, 0]], info=info))


def test_blocks_of_other_dtypes_or_ranks_are_refused(tmp_path):
    where = written(tmp_path / "c", [[0, 0]])
    metadata = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [2, 0]}})}
    save_safetensors(where / "x.safetensors", {"w": np.ones((2, 3), "f8")}, metadata=metadata)
    with pytest.raises(errors.CorruptCheckpoint, match="dtype"):
        open_checkpoint(where)


def test_files_without_such_words_are_not_taken_for_blocks(tmp_path):
    for name in "ab":
        save_safetensors(tmp_path / f"{name}.safetensors", {"w": np.ones(2)})
    with pytest.raises(errors.IncompleteCheckpoint, match=r"index\.json"):
        open_checkpoint(tmp_path)


def test_tiles():
    boxes = [Box((i, j), (1, 2)) for i in range(3) for j in (0, 2)]
    assert tiled((3, 4), boxes)
    assert not tiled((3, 4), boxes[1:])
    assert not tiled((3, 4), [*boxes[1:], boxes[1]])
    assert tiled((), [Box((), ())])
    assert tiled((0, 3), [])
    assert not tiled((2,), [Box((1,), (2,))])
