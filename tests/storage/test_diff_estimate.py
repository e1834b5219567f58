"""What two checkpoints do not share; what one will need."""

import ml_dtypes
import numpy as np
import pytest

from meshtape import errors
from meshtape.storage import convert, diff, estimate, merge, reshard, save, save_safetensors
from meshtape.storage.transform.diff import differences

INF = float("inf")


def test_format_and_layout_are_no_difference(kit, tmp_path):
    tree = {f"{d.name}{s}": kit.random(d, s, i) for i, d in enumerate(kit.DTYPES[:13]) for s in kit.SHAPES}
    tree["big"] = kit.random(np.dtype("f4"), (300, 400))
    save(tmp_path / "a", tree, step=3)
    reshard(tmp_path / "a", tmp_path / "b", mesh={"m": 3}, shardings={"big": {"m": 1}})
    merge(tmp_path / "a", tmp_path / "hf", max_shard_bytes=100_000)
    for other in ("b", "hf"):
        report = diff(tmp_path / "a", tmp_path / other, memory_limit=1)
        assert report.same, str(report)
        assert report.equal == len(tree)


@pytest.mark.parametrize("limit", [1, 1 << 30])
def test_every_kind_of_difference(tmp_path, limit):
    w = np.arange(200_000, dtype="f8").reshape(400, 500)
    changed = w.copy()
    changed[399, 499] *= 1.5
    changed[7, 7] += 3
    zero = np.zeros(3)
    a = {
        "w": w,
        "shape": np.ones((2, 3)),
        "type": np.ones(3, "f4"),
        "zero": zero,
        "same": w,
        "x": zero,
        "lr": 0.1,
        "n": 1,
    }
    b = {
        "w": changed,
        "shape": np.ones((3, 2), "f4"),
        "type": np.ones(3),
        "zero": -zero,
        "same": w,
        "y": zero,
        "lr": 0.2,
        "n": 1,
        "m": True,
    }
    save(tmp_path / "a", a)
    save(tmp_path / "b", b)
    report = diff(tmp_path / "a", tmp_path / "b", memory_limit=limit)
    assert (report.only_a, report.only_b, report.equal) == (["x"], ["y", "m"], 1)
    assert report.values == {"lr": (0.1, 0.2)}
    found = {d.name: d for d in report.arrays}
    assert set(found) == {"w", "shape", "type", "zero"}
    d = found["w"]
    assert (d.different, d.size, d.max_abs) == (2, 200_000, 99999.5)
    assert d.max_rel == pytest.approx(1 / 3)
    assert found["shape"].max_abs is None
    assert (found["type"].different, found["type"].dtypes) == (0, ("float32", "float64"))
    assert (found["zero"].different, found["zero"].max_abs) == (0, 0.0)
    text = str(report)
    for part in (
        "only in",
        "shape (2, 3) and (3, 2)",
        "equal values, other bits",
        "2 of 200,000 elements",
        "0.1 and 0.2",
    ):
        assert part in text
    assert diff(tmp_path / "a", tmp_path / "b", keys=["same", "n"]).same
    assert not diff(tmp_path / "a", tmp_path / "b", drop="w").same
    with pytest.raises(errors.CheckpointError, match="matches"):
        diff(tmp_path / "a", tmp_path / "b", keys="q*")


def test_a_leaf_that_is_none_is_not_one_that_is_absent(tmp_path):
    w = np.ones(2)
    save(tmp_path / "a", {"w": w, "n": None, "m": None, "l": [None, 1], "bias": None})
    save(tmp_path / "b", {"w": w, "m": 3, "l": [None, None], "bias": w})
    save(tmp_path / "c", {"w": w})
    report = diff(tmp_path / "a", tmp_path / "b")
    assert (report.only_a, report.only_b, report.equal, report.same) == (["n"], [], 1, False)
    array = {"dtype": "float64", "shape": [2]}
    assert report.values == {"m": (None, 3), "l.1": (1, None), "bias": (None, array)}
    assert "m: None and 3" in str(report)
    assert not diff(tmp_path / "a", tmp_path / "c").same
    assert diff(tmp_path / "a", tmp_path / "b", keys=["n"]).only_a == ["n"]


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ([1.0, INF, -INF], [1.0, INF, -INF], (0, 0.0, 0.0)),
        ([1.0], [INF], (1, INF, INF)),
        ([INF], [-INF], (1, INF, INF)),
        ([np.nan, 1.0], [np.nan, np.nan], (1, INF, INF)),
        ([0.0], [-0.0], (0, 0.0, 0.0)),
        ([0.0], [2.0], (1, 2.0, 1.0)),
        ([3 + 4j], [0], (1, 5.0, 1.0)),
        ([True, False], [True, True], (1, 1.0, 1.0)),
    ],
)
def test_differences_of_odd_values(x, y, expected):
    assert differences(np.array(x), np.array(y)) == expected


def test_integers_beyond_float64_and_small_floats():
    big = np.array([2**53, 2**63 - 1], "i8")
    assert differences(big, big - 1)[:2] == (2, 1.0)
    assert differences(np.array([2**64 - 1], "u8"), np.array([0], "u8"))[1] == 2.0**64
    x = np.array([1.0, 2.0], ml_dtypes.float8_e4m3fn)
    assert differences(x, np.array([1.0, 3.0], ml_dtypes.bfloat16))[:2] == (1, 1.0)
    assert differences(np.zeros((0, 3)), np.zeros((0, 3))) == (0, 0.0, 0.0)


def test_a_checkpoint_against_its_converted_form(kit, tmp_path):
    save(tmp_path / "a", {"q": kit.random(np.dtype("i4"), (8, 4)), "k": kit.random(np.dtype("i4"), (4, 4))})
    rules = "q, k -> qk, concat(axis=0), permute()"
    convert(tmp_path / "a", tmp_path / "b", format="safetensors", rules=rules)
    assert not diff(tmp_path / "a", tmp_path / "b").same
    assert diff(tmp_path / "a", tmp_path / "b", rules=rules).same


# ----- estimate -------------------------------------------------------------------------------------------------------


def test_bytes_on_disk_are_those_that_are_written(kit, tmp_path):
    tree = {f"{d.name}{s}": kit.random(d, s, i) for i, d in enumerate(kit.DTYPES[:13]) for s in kit.SHAPES}
    tree["big"] = kit.random(np.dtype("f4"), (1000, 700))
    host = kit.Host({"m": 3})
    split = dict(tree, big=kit.split(tree["big"], kit.Sharding(host, (1,))))
    report = save(tmp_path / "a", split)
    e = estimate(tmp_path / "a", mesh={"m": 3}, shardings={"big": {"m": 1}}, max_shard_bytes=1_000_000)
    files = [p for p in (tmp_path / "a").rglob("c*") if p.is_file()]
    assert e.zarr == sum(p.stat().st_size for p in files)
    assert len(files) == report.files
    merged = merge(tmp_path / "a", tmp_path / "hf", max_shard_bytes=1_000_000)
    assert len(e.files) == len(merged.files)
    assert e.safetensors == sum((tmp_path / "hf" / f).stat().st_size for f in merged.files)
    assert e.nbytes == merged.total_size
    assert estimate(tree).nbytes == e.nbytes


def test_small_types_are_counted_by_their_true_size():
    e = estimate({"a": ((3_000_000,), "float8_e4m3fn"), "b": ((1_500_000,), "bfloat16")}, max_shard_bytes=4_000_000)
    assert e.files == [["a"], ["b"]]
    assert estimate({"m": ((8,), "bool"), "c": ((2,), "complex64")}).nbytes == 24
    assert estimate({"c": ((2,), "complex128")}).safetensors is None


def test_memory_of_each_rank():
    shapes = {"w": ((10, 6), "bfloat16"), "b": ((6,), "float32"), "ids": ((4,), "int32")}
    layout = {"mesh": {"d": 2, "m": 4}, "shardings": {"w": {"m": 0}}}
    e = estimate(shapes, **layout)
    assert len(e.ranks) == 8
    # 10 rows over 4 are 3, 3, 3, 1; the others are on every rank.
    assert [r.parameters for r in e.ranks] == [n * 6 * 2 + 24 + 16 for n in (3, 3, 3, 1)] * 2
    assert {r.gradients for r in e.ranks} == {0}
    e = estimate(shapes, **layout, optimizer="adamw")
    assert e.ranks[0].gradients == 3 * 6 * 2 + 24
    assert e.ranks[0].optimizer == 2 * 4 * (18 + 6)
    assert e.ranks[0].master == 4 * 18  # the float32 bias is its own master
    zero = estimate(shapes, **layout, optimizer="adamw", shard_optimizer_over="d")
    assert zero.ranks[0].optimizer == 2 * 4 * (9 + 3)
    assert zero.ranks[0].parameters == e.ranks[0].parameters
    assert zero.largest == zero.ranks[0].total
    assert "8 ranks" in str(zero)
    assert estimate(shapes, dtype="float32").nbytes == 60 * 4 + 24 + 16
    assert estimate(shapes, optimizer="sgd").ranks[0].optimizer == 0


def test_estimates_refuse_what_makes_no_sense(tmp_path):
    save_safetensors(tmp_path / "x.safetensors", {"w": np.ones((2, 2), "f4")})
    assert estimate(tmp_path / "x.safetensors").elements == 4
    for match, options in [
        ("optimizer must be one of", {"optimizer": "adamax"}),
        ("has no axis 'z'", {"mesh": {"m": 2}, "shard_optimizer_over": "z"}),
        ("nothing matches", {"mesh": {"m": 2}, "shardings": {"q": {"m": 0}}}),
    ]:
        with pytest.raises(errors.CheckpointError, match=match):
            estimate({"w": np.ones(3)}, **options)
