"""Golden vectors of block arithmetic, and cases of loading, sizing and planning that have no home of their own."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from meshtape import errors
from meshtape.arrays.core.blocks import Box, ceil_blocks
from meshtape.storage import LoadReport, Rules, load, merge, open_checkpoint, save, save_safetensors
from meshtape.storage.format.dtypes import ROWS
from meshtape.storage.rules.lazy_tensors import rectangles
from meshtape.storage.saving.packs import assign


@pytest.mark.parametrize(
    ("n", "p", "sizes"),
    [
        (5, 4, [2, 2, 1, 0]),
        (1, 4, [1, 0, 0, 0]),
        (6, 4, [2, 2, 2, 0]),
        (7, 3, [3, 3, 1]),
        (0, 3, [0, 0, 0]),
        (3, 4, [1, 1, 1, 0]),
    ],
)
def test_the_ceil_rule(n, p, sizes):
    assert [length for _, length in ceil_blocks(n, p)] == sizes


@pytest.mark.parametrize(
    ("shape", "a", "b", "boxes"),
    [
        ((4, 6), 5, 13, [((0, 5), (1, 1)), ((1, 0), (1, 6)), ((2, 0), (1, 1))]),
        (
            (2, 3, 4),
            5,
            22,
            [((0, 1, 1), (1, 1, 3)), ((0, 2, 0), (1, 1, 4)), ((1, 0, 0), (1, 2, 4)), ((1, 2, 0), (1, 1, 2))],
        ),
        ((7,), 2, 5, [((2,), (3,))]),
        ((4, 6), 6, 18, [((1, 0), (2, 6))]),
        ((4, 6), 5, 5, []),
        ((4, 6), 0, 24, [((0, 0), (4, 6))]),
        ((), 0, 1, [((), ())]),
    ],
)
def test_a_flat_range_as_rectangles(shape, a, b, boxes):
    found = list(rectangles(a, b, shape))
    assert [(r.offset, r.shape) for r in found] == boxes
    assert len(found) <= max(1, 2 * len(shape) - 1)
    flat = np.zeros(shape, bool)
    for r in found:
        flat[r.slices] = True
    assert flat.reshape(-1).nonzero()[0].tolist() == list(range(a, b))


@pytest.mark.parametrize("ranks", [4, 5, 7, 64])
def test_six_saved_on_four_ranks_load_on_any_number(kit, tmp_path, ranks):
    """Blocks of 2, 2, 2 and none; ranks beyond the last block have empty ones."""
    save(tmp_path / "c", {"w": kit.split(np.arange(6.0), kit.Sharding(kit.Host({"x": 4}), (0,)))})
    got = load(tmp_path / "c", shardings=lambda *_: kit.Sharding(kit.Host({"x": ranks}), (0,)))["w"]
    assert kit.same(got.whole(), np.arange(6.0))
    assert got.blocks[ranks - 1].shape == (0,)


def test_ten_elements_over_four_ranks_and_three(kit, tmp_path):
    """The ranges of an optimizer's state, its scalar, and a weight that has no master copy."""
    four, three = kit.Sharding(kit.Host({"x": 4}), (0,)), kit.Sharding(kit.Host({"x": 3}), (0,))
    m = np.arange(10.0, dtype="f4")
    save(tmp_path / "c", {"m": kit.split(m, four), "beta": np.float32(0.9), "norm": np.ones(3, "f4")})
    assert [o.box.shape for o in open_checkpoint(tmp_path / "c")["m"].tensor.objects.values()] == [
        (3,),
        (3,),
        (3,),
        (1,),
    ]
    got = load(tmp_path / "c", shardings={"m": three, "beta": None, "norm": None})
    assert kit.same(got["m"].whole(), m)
    assert got["beta"].shape == ()


def test_plans_of_six_by_four_in_four_row_blocks(kit, tmp_path):
    save(tmp_path / "c", {"w": kit.split(np.arange(24.0).reshape(6, 4), kit.Sharding(kit.Host({"x": 4}), (0,)))})
    tensor = open_checkpoint(tmp_path / "c")["w"].tensor
    rows = [tensor.only(Box((2 * r, 0), (2, 4))) for r in range(3)]
    assert [len(t.objects) for t in rows] == [1, 1, 1]
    columns = [tensor.only(Box((0, 2 * r), (6, 2))) for r in range(2)]
    assert [len(t.objects) for t in columns] == [3, 3]


def test_replicas_are_dealt_evenly_and_always_alike():
    wanted = [(i, Box((0,), (4,)), 32, (0, 1, 2)) for i in range(10)]
    deals = [assign(wanted) for _ in range(3)]
    assert [len(deals[0][r]) for r in range(3)] == [4, 3, 3]
    assert deals[0] == deals[1] == deals[2]


def test_files_are_split_by_true_bytes(tmp_path):
    """Three megabytes of float8 and three of bfloat16 do not fit four together, though counted in elements they
    might."""
    arrays = {"a": np.zeros(3_000_000, ml_dtypes.float8_e4m3fn), "b": np.zeros(1_500_000, ml_dtypes.bfloat16)}
    save_safetensors(tmp_path / "x.safetensors", arrays)
    report = merge(tmp_path / "x.safetensors", tmp_path / "m", max_shard_bytes=4_000_000)
    assert len(report.files) == 2
    assert report.total_size == 6_000_000


def test_a_boolean_is_a_byte_in_the_index(tmp_path):
    save(tmp_path / "c", {"b": np.zeros(1000, bool), "e5": np.zeros(1000, ml_dtypes.float8_e5m2)})
    merge(tmp_path / "c", tmp_path / "m")
    assert json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == 2000


def test_every_dtype_has_one_row_with_its_size():
    assert all(row.dtype is None or row.dtype.itemsize * 8 == row.bits for row in ROWS)
    assert max(Counter(row.name for row in ROWS if row.name).values()) == 1


def test_what_a_rule_joins_is_read_from_every_file_that_holds_a_part(kit, tmp_path):
    """q lies in one file, k and v in another: the choice of files follows from the plan, not from the joined name."""
    parts = {n: kit.random(np.dtype("f4"), (2, 6)) for n in ("q", "k", "v")}
    save_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"l.q": parts["q"]})
    save_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"l.k": parts["k"], "l.v": parts["v"]})
    names = {"l.q": 1, "l.k": 2, "l.v": 2}
    index = {"weight_map": {n: f"model-0000{i}-of-00002.safetensors" for n, i in names.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    rules = Rules("l.q, l.k, l.v -> l.qkv, concat(axis=0)")
    wanted = np.concatenate([parts[n] for n in "qkv"])
    report = LoadReport()
    assert kit.same(load(tmp_path, rules=rules, report=report)["l.qkv"], wanted)
    host = kit.Host({"x": 3})
    got = load(tmp_path, rules=rules, like={"l": {"qkv": kit.split(np.zeros((6, 6), "f4"), kit.Sharding(host, (0,)))}})
    assert kit.same(got["l"]["qkv"].whole(), wanted)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match=r"model-00002-of-00002\.safetensors.*l\.k"):
        load(tmp_path, rules=rules)


def test_a_tied_head_is_absent_and_tied_afterwards(kit, tmp_path):
    embed = kit.random(np.dtype("f4"), (8, 4))
    save_safetensors(tmp_path / "x.safetensors", {"embed": embed})
    with pytest.raises(errors.CheckpointKeyError, match="head"):
        load(tmp_path / "x.safetensors", like={"embed": embed, "head": embed})
    got = load(tmp_path / "x.safetensors", like={"embed": embed, "head": embed}, rules="embed -> embed\nembed -> head")
    assert kit.same(got["head"], got["embed"])


def test_eight_readers_and_a_hundred_keys(tmp_path):
    save(tmp_path / "c", {f"k{i}": np.full(1000, i) for i in range(100)})
    with ThreadPoolExecutor(8) as pool:
        for tree in pool.map(lambda _: load(tmp_path / "c"), range(8)):
            assert [int(np.asarray(tree[f"k{i}"])[-1]) for i in range(100)] == list(range(100))


def test_fields_of_every_storage_error():
    """Each is one of ours and of the nearest built-in, and shows its message plainly."""
    for kind, builtin in (
        (errors.CheckpointKeyError, KeyError),
        (errors.CheckpointShapeError, ValueError),
        (errors.CheckpointDTypeError, TypeError),
        (errors.IncompleteCheckpoint, ValueError),
        (errors.CorruptCheckpoint, ValueError),
        (errors.UnsupportedVersion, ValueError),
        (errors.NotACheckpoint, FileNotFoundError),
        (errors.CheckpointExists, FileExistsError),
        (errors.RuleSyntaxError, ValueError),
        (errors.RuleMatchError, KeyError),
        (errors.RuleConflict, ValueError),
        (errors.StorageFull, OSError),
        (errors.StoreError, OSError),
    ):
        assert issubclass(kind, builtin)
        assert issubclass(kind, errors.MeshtapeError)
        assert str(kind("a\nb")) == "a\nb"


def test_float8_arrays_with_a_fill_value_that_is_no_number(kit, tmp_path):
    import zarr

    from meshtape.storage import register_zarr_dtypes

    register_zarr_dtypes()
    for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16):
        where = tmp_path / np.dtype(dtype).name
        a = zarr.create_array(where, shape=(4,), chunks=(2,), dtype=np.dtype(dtype), fill_value=np.nan)
        a[:2] = np.ones(2, dtype)
        held = next(iter(open_checkpoint(where).values())).read()
        assert held[:2].astype("f4").tolist() == [1, 1]
        assert np.isnan(held[2:].astype("f4")).all()
        assert "NaN" in (where / "zarr.json").read_text()
        json.loads((where / "zarr.json").read_text(), parse_constant=lambda c: pytest.fail(f"bare {c}"))
