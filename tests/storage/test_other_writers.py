"""Checkpoints of ours that zarr or xarray wrote to after they were saved: no old length without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import meshtape as mt

pytestmark = pytest.mark.filterwarnings("ignore")  # zarr's, of our files beside its own


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    mt.save(tmp_path / "a", {"tas": np.arange(24.0).reshape(12, 2), "lat": np.arange(2.0)})
    return tmp_path / "a"


READERS = {
    "load": lambda p: mt.load(p),
    "open": lambda p: mt.open_checkpoint(p),
    "mean": lambda p: mt.storage.virtual.mean([str(p), str(p)]),
    "as_zarr": lambda p: mt.storage.as_zarr(p),
    "convert": lambda p: mt.convert(p, p.parent / "out", format="safetensors"),
    "merge": lambda p: mt.merge(p, p.parent / "out"),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_an_array_that_became_longer_is_told(saved: Path, read: Any) -> None:
    group = zarr.open_group(saved, mode="r+")
    group["tas"].append(np.ones((12, 2)))
    zarr.consolidate_metadata(saved)
    with pytest.raises(mt.errors.CorruptCheckpoint, match=r"array 'tas' has the shape \(24, 2\) there, \(12, 2\) when"):
        read(saved)


def test_an_array_that_came_later_is_told(saved: Path) -> None:
    zarr.open_group(saved, mode="r+").create_array("pr", data=np.ones(3))
    zarr.consolidate_metadata(saved)
    with pytest.raises(mt.errors.CorruptCheckpoint, match="array 'pr' is new"):
        mt.load(saved)


def test_attributes_are_their_owners(saved: Path) -> None:
    group = zarr.open_group(saved, mode="r+")
    group.attrs["title"] = "mine"
    group["tas"].attrs["units"] = "K"
    zarr.consolidate_metadata(saved)
    assert mt.load(saved)["tas"].shape == (12, 2)


def test_without_the_manifest_it_is_a_hierarchy_of_another_writer(saved: Path) -> None:
    group = zarr.open_group(saved, mode="r+")
    group["tas"].append(np.ones((12, 2)))
    group.attrs.clear()
    zarr.consolidate_metadata(saved)
    (saved / "meshtape.json").unlink()
    assert mt.load(saved)["tas"].shape == (24, 2)


def test_what_xarray_appends_is_told(tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    data = xarray.Dataset({"tas": (("time", "lat"), np.ones((4, 3), np.float32))}, coords={"time": np.arange(4)})
    data.to_zarr(tmp_path / "theirs")
    mt.convert(tmp_path / "theirs", tmp_path / "ours", format="zarr")
    data.assign_coords(time=np.arange(4, 8)).to_zarr(tmp_path / "ours", append_dim="time")
    with pytest.raises(mt.errors.CorruptCheckpoint, match=r"array 'tas' has the shape \(8, 3\) there"):
        mt.load(tmp_path / "ours")


def test_what_xarray_makes_of_ours_is_its_own(tmp_path: Path) -> None:
    """It writes the attributes of the group along, by which a save of ours that lost its manifest is known."""
    xarray = pytest.importorskip("xarray")
    xarray.Dataset({"tas": (("time", "lat"), np.ones((4, 3), np.float32))}).to_zarr(tmp_path / "theirs")
    mt.convert(tmp_path / "theirs", tmp_path / "ours", format="zarr")
    (xarray.open_zarr(tmp_path / "ours") + 1).to_zarr(tmp_path / "made", consolidated=True)
    assert mt.load(tmp_path / "made")["tas"].tolist() == [[2.0] * 3] * 4
    assert "meshtape" not in mt.open_checkpoint(tmp_path / "made").metadata
    (tmp_path / "ours/meshtape.json").unlink()
    with pytest.raises(mt.errors.IncompleteCheckpoint, match="did not finish"):
        mt.load(tmp_path / "ours")
