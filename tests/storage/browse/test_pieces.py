"""What is found in an array piece by piece is what NumPy finds in all of it: counts, norms, rows and equality cross
every border."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zarr
from safetensors.numpy import save_file

import meshtape as mt
from meshtape.errors import CheckpointError
from meshtape.storage import open_checkpoint
from meshtape.storage.browse.model.compare import compare, names
from meshtape.storage.browse.model.health import Health, scan
from meshtape.storage.browse.model.pieces import Pieces
from meshtape.storage.browse.model.slices import SliceView, window
from meshtape.storage.browse.model.statistics import statistics

ROWS, COLUMNS = 512, 1024  # of float32: two pieces of 1 MiB, which share every row


@pytest.fixture
def w() -> np.ndarray:
    """No zero in it, and different in every place."""
    return np.random.default_rng(0).uniform(1.0, 2.0, (ROWS, COLUMNS)).astype(np.float32)


def test_counts_of_several_pieces_add_up(w: np.ndarray, tmp_path: Path) -> None:
    w[5, :7] = w[500, -3:] = np.nan
    w[6, :4] = np.inf
    w[501, -2:] = -np.inf
    w[7, :3] = w[502, -8:] = 0
    save_file({"w": w}, tmp_path / "x.safetensors")
    a = open_checkpoint(tmp_path / "x.safetensors")["w"]
    assert Pieces.of(a).total > 1
    for whole in (statistics(a), statistics(a, limit=1 << 20, exact=True)):
        assert whole.exact
        assert (whole.nan, whole.infinite, whole.zeros) == (10, 6, 11)
        finite = w[np.isfinite(w)].astype("f8")
        assert (whole.low, whole.high, whole.seen) == (finite.min(), finite.max(), w.size)
        np.testing.assert_allclose(
            [whole.mean, whole.std, whole.norm], [finite.mean(), finite.std(), np.linalg.norm(finite)], rtol=1e-9
        )
        np.testing.assert_array_equal(whole.counts, np.histogram(finite, whole.edges)[0])


def test_health_looks_across_the_pieces_of_an_array(w: np.ndarray, tmp_path: Path) -> None:
    mesh = mt.Mesh({"model": 2})
    rows, late, broken = w.copy(), w.copy(), w.copy()
    rows[[3, 400]] = 0
    rows[9, COLUMNS // 2 :] = 0  # alive in the first piece
    rows[11, : COLUMNS // 2] = 0  # and in the last one
    late[-1, -1] += 1  # differs from w in its last element alone
    broken[0, 0], broken[-1, -2:] = np.nan, np.nan
    same = np.ones((ROWS, COLUMNS), np.float32)
    same[-1, -1] = 2
    arrays = {"w": w, "twin": w, "other dtype": w.view(np.int32), "late": late, "rows": rows, "broken": broken}
    tree = {k: mt.distribute(v, mesh, model=mt.Shard(1)) for k, v in {**arrays, "same": same}.items()}
    mt.save(tmp_path / "c", tree)
    ckpt = open_checkpoint(tmp_path / "c")
    assert all(Pieces.of(a).total > 1 for a in ckpt.values())
    health = scan(ckpt, Health())
    found = {f.kind: f for f in health.findings}
    assert health.counts == {"duplicate": 1, "dead": 1, "nan": 1}
    assert {found["duplicate"].name, *found["duplicate"].others} == {"w", "twin"}
    assert found["dead"].text == f"2 of {ROWS} rows are all zero: 3, 400"
    assert found["nan"].text == f"3 of {w.size:,} elements"


def test_changes_of_several_pieces_add_up(tmp_path: Path) -> None:
    a = np.random.default_rng(1).normal(size=3 << 19).astype(np.float32)  # 6 MiB
    b = a.copy()
    b[:10] += 1
    b[-20:] += 2
    for name, x in (("a", a), ("b", b)):
        save_file({"w": x}, tmp_path / f"{name}.safetensors")
    x, y = (open_checkpoint(tmp_path / f"{name}.safetensors") for name in "ab")
    assert Pieces.of(x["w"], 4 << 20).total > 1
    (change,) = compare(x, y, names(x, y)).changes
    a, b = a.astype("f8"), b.astype("f8")
    expected = [np.linalg.norm(a), np.linalg.norm(b), np.linalg.norm(b - a)]
    np.testing.assert_allclose([*change.norms, change.distance], expected, rtol=1e-9)
    assert change.ratio == pytest.approx(expected[2] / expected[0])
    assert (change.changed, change.largest) == (30, np.abs(b - a).max())


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_chunk_that_unpacks_to_more_than_a_page_is_worth_is_not_opened(
    tmp_path: Path, compression: str | None
) -> None:
    """A few kilobytes of frames may stand for gigabytes: of others' arrays, and of ours."""
    array = zarr.create_array(tmp_path / "z", shape=(1 << 30,), chunks=(1 << 30,), dtype="f4")
    assert array.nbytes == 4 << 30
    held = open_checkpoint(tmp_path / "z")["z"]
    if compression is not None:
        object.__setattr__(
            held,
            "tensor",
            SimpleNamespace(compression=compression, chunk=(1 << 30,), shape=(1 << 30,), dtype=held.dtype),
        )
    with pytest.raises(CheckpointError, match="not read for a page"):
        Pieces.of(held)
    with pytest.raises(CheckpointError, match="not read for a page"):
        window(held, SliceView.of(held.shape))
