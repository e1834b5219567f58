"""Links: those of the Hugging Face cache are followed, and no file outside of a checkpoint is read."""

import json
import os
import shutil

import numpy as np
import pytest
import zarr

from meshtape import errors
from meshtape.storage import load, merge, open_checkpoint, save, save_safetensors


def test_the_links_of_the_hugging_face_cache_are_followed(kit, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_safetensors(blobs / "0123", {"w": np.arange(3)})
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
    assert kit.same(load(snapshot)["w"], np.arange(3))


def test_the_folders_of_a_pipeline_in_that_cache(kit, tmp_path):
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "abc" / "unet"
    blobs.mkdir()
    folder.mkdir(parents=True)
    save_safetensors(blobs / "0123", {"w": np.arange(3)})
    (blobs / "4567").write_text('{"width": 3}')
    (folder / "diffusion_pytorch_model.safetensors").symlink_to("../../../blobs/0123")
    (folder / "config.json").symlink_to("../../../blobs/4567")
    opened = open_checkpoint(folder)
    assert kit.same(opened["w"].read(), np.arange(3))
    assert opened.documents["config"] == {"width": 3}
    merge(folder, tmp_path / "merged")
    assert (tmp_path / "merged" / "config.json").read_text() == '{"width": 3}'
    assert not (tmp_path / "merged" / "config.json").is_symlink()


@pytest.mark.parametrize(
    "name", ["model.safetensors", "adapter.safetensors", "model.safetensors.index.json", "meshtape.json", ".metadata"]
)
def test_whatever_says_what_a_directory_is_lies_in_it(tmp_path, name):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    folder.mkdir()
    save_safetensors(outside, {"w": np.ones(3)})
    (folder / name).symlink_to(outside)
    with pytest.raises(errors.CorruptCheckpoint, match="link out of the checkpoint"):
        open_checkpoint(folder)


@pytest.mark.parametrize("part", ["w/c/0", "w/c", "w/zarr.json"])
def test_zarr_reads_no_file_outside_either(tmp_path, part):
    for folder in ("outside", "group"):
        group = zarr.create_group(str(tmp_path / folder))
        group.create_array("w", data=np.arange(4.0), chunks=(4,))
    held = tmp_path / "group" / part
    shutil.rmtree(held) if held.is_dir() else held.unlink()
    held.symlink_to(tmp_path / "outside" / part)
    with pytest.raises(errors.CheckpointError, match="link out of the checkpoint"):
        load(tmp_path / "group")
    held.unlink()
    held.symlink_to(os.path.relpath(tmp_path / "outside" / part, held.parent))
    with pytest.raises(errors.CheckpointError, match="link out of the checkpoint"):
        load(tmp_path / "group")


def test_links_in_a_circle_are_an_error(tmp_path):
    save(tmp_path / "c", {"w": np.ones(3)})
    shard = tmp_path / "c" / "w" / "c.0"
    shard.unlink()
    shard.symlink_to(shard)
    with pytest.raises(errors.CheckpointError, match=r"c\.0"):
        load(tmp_path / "c")
    with pytest.raises(errors.CheckpointError, match=r"c\.0"):
        open_checkpoint(tmp_path / "c")["w"][:]
