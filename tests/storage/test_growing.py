"""New rows of a vocabulary: the mean of the stored rows, or noise like them, the same however they are asked for."""

import numpy as np
import pytest

from meshtape import errors
from meshtape.arrays.core.blocks import Box
from meshtape.storage import Rules, convert, load, merge, open_checkpoint, reshard, save
from meshtape.storage.format import dtypes
from meshtape.storage.readers.tensor import read_box
from meshtape.storage.rules.growing import GrownRows


def embedding(shape=(300, 40), dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * rng.random(shape[-1]) + rng.standard_normal(shape[-1])).astype(
        dtypes.by_name(dtype)
    )


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_mean_of_the_rows(kit, dtype, axis):
    e = embedding((30, 40, 3), dtype)
    got = Rules(f"e -> e, pad(axis={axis}, size=64, fill=mean)").on_arrays({"e": e})["e"]
    n = e.shape[axis]
    new = np.moveaxis(got, axis, 0)[n:]
    mean = e.astype("f8").mean(axis)
    assert kit.same(np.moveaxis(got, axis, 0)[:n], np.moveaxis(e, axis, 0))
    assert all(np.array_equal(row, new[0]) for row in new)
    assert np.allclose(
        new[0].astype("f8"),
        mean.astype(e.dtype).astype("f8"),
        rtol=float(dtypes.by_name(dtype).itemsize < 4) / 64 or 1e-6,
    )


def test_noise_has_the_mean_and_the_deviation_of_each_column():
    e = embedding((500, 8))
    got = Rules("e -> e, pad(axis=0, size=20500, fill=noise, seed=3)").on_arrays({"e": e})["e"][500:]
    assert np.abs((got.mean(0) - e.mean(0)) / e.std(0)).max() < 0.04
    assert np.abs(got.std(0) / e.std(0) - 1).max() < 0.04
    assert np.abs(np.corrcoef(got.T) - np.eye(8)).max() < 0.04


def test_seeds_names_and_sizes():
    e = embedding()

    def rows(size=320, seed=0, name="e"):
        return Rules(f"{name} -> e, pad(axis=0, size={size}, fill=noise, seed={seed})").on_arrays({name: e})["e"][300:]

    assert np.array_equal(rows(), rows())
    assert np.array_equal(rows(400)[:20], rows(320))
    assert not np.array_equal(rows(seed=1), rows())
    assert not np.array_equal(rows(name="f"), rows())


@pytest.mark.parametrize("fill", ["mean", "noise"])
@pytest.mark.parametrize("axis", [0, 1])
def test_windows_workers_and_order_change_nothing(kit, tmp_path, fill, axis):
    e = embedding((301, 77), "bfloat16")
    save(tmp_path / "c", {"e": e})
    rule = f"e -> e, pad(axis={axis}, size=400, fill={fill}, seed=5)"
    want = Rules(rule).on_arrays({"e": e})["e"]
    held = Rules(rule).on(open_checkpoint(tmp_path / "c"))["e"]
    rng = np.random.default_rng(1)
    for _ in range(20):
        a, b = (sorted(rng.integers(0, n + 1, 2).tolist()) for n in want.shape)
        assert kit.same(held[a[0] : a[1], b[0] : b[1]], want[a[0] : a[1], b[0] : b[1]])
    assert kit.same(held[-1, -1], want[-1, -1])
    assert kit.same(held[..., 5], want[..., 5])
    merge(tmp_path / "c", tmp_path / "a", rules=rule, memory_limit=1, threads=3)
    reshard(tmp_path / "c", tmp_path / "b", rules=rule, mesh={"m": 7}, shardings={"e": {"m": axis}})
    convert(tmp_path / "c", tmp_path / "d", rules=rule, format="zarr", mesh={"m": 5}, shardings={"e": {"m": 1 - axis}})
    for out in "abd":
        assert kit.same(open_checkpoint(tmp_path / out)["e"].read(), want)
    like = {"e": kit.split(np.zeros(want.shape, want.dtype), kit.Sharding(kit.Host({"m": 4}), (1 - axis,)))}
    assert kit.same(load(tmp_path / "c", like=like, rules=rule)["e"].whole(), want)


def test_one_column_or_many_have_the_same_statistics(kit, monkeypatch):
    monkeypatch.setattr("meshtape.storage.rules.growing._TILE", 1 << 12)  # several tiles
    from meshtape.storage.rules.lazy_tensors import InMemoryTensor

    e = embedding((20011, 9), "float64")
    grown = GrownRows("e", InMemoryTensor("e", e), 0, 3, False, 0)
    whole = read_box(grown)[0]
    assert np.allclose(whole[0], e.mean(0), rtol=1e-12)
    for i in range(9):
        assert kit.same(read_box(grown, Box((1, i), (1, 1)))[0][0], whole[1, i : i + 1])
    # A chunk of a stored array is shorter than a tile, or longer: it does not matter.
    noise = GrownRows("e", InMemoryTensor("e", e), 0, 3, True, 0)
    assert kit.same(read_box(noise, Box((2, 3), (1, 2)))[0], read_box(noise)[0][2:, 3:5])


@pytest.mark.parametrize(
    ("array", "arguments", "kind", "told"),
    [
        (np.ones((2, 3), "i4"), "fill=mean", errors.CheckpointDTypeError, "needs rows of a floating dtype"),
        (np.ones((0, 3), "f4"), "fill=mean", errors.CheckpointDTypeError, "needs rows"),
        (np.ones((2, 3), "f4"), "fill=median", errors.RuleConflict, "fill=mean"),
        (np.ones((2, 3), "f4"), "fill=mean, value=1", errors.RuleConflict, "fill=value"),
        (np.ones((2, 3), "f4"), "fill=noise, seed=-1", errors.RuleConflict, "a seed= of 0 or more"),
        (np.full((2, 3), np.nan, "f4"), "fill=mean", errors.CheckpointError, "not finite"),
        (np.full((2, 3), np.inf, "f4"), "fill=noise", errors.CheckpointError, "not finite"),
    ],
)
def test_what_has_no_mean(array, arguments, kind, told):
    with pytest.raises(kind) as e:
        Rules(f"e -> e, pad(axis=0, size=9, {arguments})").on_arrays({"e": array})
    assert told in str(e.value)


def test_the_inverse_cuts_the_new_rows_off_and_the_state_grows_by_zeros(kit):
    e = embedding()
    rules = Rules("e -> e, pad(axis=0, size=320, fill=noise, seed=1)", follow=["opt.m.{}"])
    held = {"e": e, "opt.m.e": np.ones_like(e)}
    got = rules.on_arrays(held)
    assert not got["opt.m.e"][300:].any()
    assert kit.same(Rules(str(Rules(rules.rules).inverse({"e": e}))).on_arrays({"e": got["e"]})["e"], e)
