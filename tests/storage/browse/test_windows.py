"""Windows onto an array: moved by the arrows they show every element once, and they read no chunk that they do not
show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import meshtape as mt
from meshtape.errors import CorruptCheckpoint
from meshtape.storage import open_checkpoint
from meshtape.storage.browse.model.slices import CELLS, SliceView, window


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("dimension", [0, 1])
def test_a_window_that_is_moved_shows_the_next_elements(dimension: int, step: int) -> None:
    shape = (2000, 3000)
    view = SliceView.of(shape, steps=(step, step))
    for times in range(1, 4):
        moved = view.moved(shape, dimension, times)
        assert moved.at[dimension] == times * CELLS * step
        assert moved.at[1 - dimension] == 0
        assert moved.moved(shape, dimension, -times) == view
    last = view.moved(shape, dimension, 10**6).at[dimension]
    assert last + (CELLS - 1) * step == shape[dimension] - 1, "it ends with the array"


def test_what_is_not_shown_is_not_read(tmp_path: Path) -> None:
    """All chunks but the one that is shown are damaged, so that reading any of them is an error."""
    w = np.random.default_rng(0).normal(size=(256, 512))
    mesh = mt.Mesh({"data": 2, "model": 4})
    mt.save(tmp_path / "c", {"w": mt.distribute(w, mesh, data=mt.Shard(0), model=mt.Shard(1))})
    shown = tmp_path / "c" / "w" / "c.1.2"
    others = [p for p in shown.parent.iterdir() if p.name not in ("zarr.json", shown.name)]
    assert len(others) == 7
    for file in others:
        data = bytearray(file.read_bytes())
        data[8] ^= 1
        file.write_bytes(bytes(data))
    a = open_checkpoint(tmp_path / "c")["w"]
    view = SliceView.of(w.shape, at=(150, 300), steps=(1, 1))
    np.testing.assert_array_equal(window(a, view).values, w[150 : 150 + CELLS, 300 : 300 + CELLS])
    with pytest.raises(CorruptCheckpoint):
        window(a, SliceView.of(w.shape, at=(150, 390), steps=(1, 1)))
