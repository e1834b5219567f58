"""Quantised state: the bound of its error, packing of odd rows, and one passage only."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape import errors
from meshtape.storage import load, merge, open_checkpoint, save
from meshtape.storage.saving.quantize import _unpack, dequantize, pack, quantize


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 17), st.sampled_from([8, 4]), st.integers(0, 1000), st.booleans())
def test_the_error_is_at_most_half_a_scale(rows, n, bits, seed, squares):
    x = np.random.default_rng(seed).standard_normal((rows, n)).astype("f4") * np.float32(10.0 ** (seed % 13 - 6))
    x = np.square(np.square(x)) if squares else x  # a row of those has no sign, and no short range
    x[0] = 0
    held = quantize({"m": x}, bits=bits)
    (back, times) = dequantize(held)
    got, largest = np.asarray(back["m"]), np.abs(x).max(-1, keepdims=True)
    assert times == 1
    assert (np.abs(got - x) <= largest / (254 if bits == 8 else 14) * (1 + 1e-5)).all()
    if squares:
        assert ((got > 0) == (x > 0)).all()  # Adam divides by it
        assert (np.abs(np.sqrt(got) - np.sqrt(x)) <= np.sqrt(largest) / (254 if bits == 8 else 14) * (1 + 1e-5)).all()
    assert held["m"]["q"].nbytes == rows * (n if bits == 8 else -(-n // 2))


@given(st.lists(st.integers(-7, 7), min_size=1, max_size=9))
def test_odd_rows_are_packed(values):
    q = np.array(values, np.int8)
    assert _unpack(pack(q), len(q)).tolist() == values
    assert pack(q).nbytes == (len(q) + 1) // 2


@pytest.mark.parametrize("bits", [8, 4])
def test_through_a_checkpoint_and_only_once(tmp_path, bits):
    rng = np.random.default_rng(0)
    state = {
        "params": {"w": mt.asarray(rng.standard_normal((5, 7)).astype("f4"))},
        "opt": {
            "m": [mt.asarray(rng.standard_normal((5, 7))), np.float32(0.9)],
            "step": np.int64(3),
            "e": np.zeros((0, 3)),
        },
    }
    save(tmp_path / "c", quantize(state, bits=bits, keys=["opt.*"]), step=1)
    assert open_checkpoint(tmp_path / "c")["params.w"].dtype == "f4"
    assert open_checkpoint(tmp_path / "c")["opt.m.0.q"].dtype == ("i1" if bits == 8 else "u1")
    got, times = dequantize(load(tmp_path / "c"))
    assert times == 1
    assert got["opt"]["m"][0].dtype == mt.float64
    assert np.abs(np.asarray(got["opt"]["m"][0]) - np.asarray(state["opt"]["m"][0])).max() < (
        0.02 if bits == 8 else 0.3
    )
    assert float(np.asarray(got["opt"]["m"][1])) == np.float32(0.9)
    assert int(np.asarray(got["opt"]["step"])) == 3
    with pytest.raises(errors.CheckpointError, match="1 times already"):
        quantize(got, times=times)
    assert dequantize(quantize(got, times=times, allow_again=True))[1] == 2
    merge(tmp_path / "c", tmp_path / "m")  # plain arrays for any other tool


def test_arrays_of_a_mesh():
    mesh = mt.Mesh({"x": 2})
    x = np.arange(24.0, dtype="f4").reshape(4, 6)
    held = quantize({"m": mt.distribute(x, mesh, x=mt.Shard(0))})
    back, _ = dequantize(held)
    assert np.abs(np.asarray(back["m"]) - x).max() <= x.max() / 254
    assert held["m"]["q"].sharding == held["m"]["scale"].sharding


def test_what_has_no_range_stays_as_it_was():
    x = np.float32([[np.inf, 1], [3.402e38, 1], [1e-45, 0], [0, -0.0]])
    held = quantize({"m": x}, allow_overflow=True)["m"]
    assert np.array_equal(np.sign(np.asarray(held["scale"]))[:, 0], [np.nan, 1, -1, 1], equal_nan=True)
    assert np.isnan(np.asarray(dequantize({"m": held})[0]["m"])[0]).all()  # and no number
    assert np.asarray(dequantize({"m": held})[0]["m"]).tolist()[2:] == x.tolist()[2:]
    assert np.abs(np.asarray(dequantize({"m": held})[0]["m"])[1] - x[1]).max() <= 3.402e38 / 254


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_beside_what_is_not_finite_are_not_lost_in_silence(tmp_path, bad):
    x = np.array([[1, 2, 3], [1, -2, bad], [np.nan, np.nan, np.nan]], "f4")
    lost = 2 + int(np.isinf(bad))
    with pytest.raises(errors.Lossy, match=rf"'a.m': {lost} became NaN; first at \[1, 0\] is 1.0"):
        quantize({"a": {"m": x}})
    save(tmp_path / "x", {"a": {"m": x}})
    lazy = mt.storage.virtual.quantize(tmp_path / "x")
    with pytest.raises(errors.Lossy, match=f"{lost} became NaN"):
        mt.load(lazy)
    report = mt.storage.LoadReport()
    got, _ = dequantize(mt.load(lazy, allow_overflow=True, report=report))
    assert np.isfinite(np.asarray(got["a"]["m"])).all(axis=1).tolist() == [True, False, False]
    assert sum(loss.nan for loss in report.losses.values()) == lost


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "row",
    [[1e-50, 2e-50, -1e-51], [1e-50, 2e-51, 0], [1e300, -1e299, 2], [1e-45, -1e-45], [1e-40, -3e-41], [1e38, 1e20]]
    + [[0, s * np.finfo(t).max] for s in (1, -1) for t in (np.float32, np.float64)],
)
def test_the_ends_of_a_dtypes_range(tmp_path, row, bits):
    x = np.array([row], "f8" if not 1e-45 <= max(map(abs, row)) <= float(np.finfo("f4").max) else "f4")
    held, levels, unit = (
        quantize({"m": x}, bits=bits),
        {8: 254, 4: 14}[bits],
        float(np.finfo(x.dtype).smallest_subnormal),
    )
    got = np.asarray(dequantize(held)[0]["m"])
    assert (np.abs(got - x) <= np.abs(x).max() / levels * (1 + 1e-5) + unit).all()
    assert min(row) < 0 or ((got > 0) == (x > 0)).all()
    save(tmp_path / "x", {"m": x})
    lazy = mt.storage.virtual.quantize(tmp_path / "x", bits=bits)
    assert all(np.array_equal(lazy[f"m.{n}"][...], np.asarray(held["m"][n])) for n in ("q", "scale"))


def test_mistakes(tmp_path):
    with pytest.raises(errors.CheckpointError, match="8 or 4"):
        quantize({}, bits=2)
    with pytest.raises(errors.CheckpointDTypeError, match="key 'n'"):
        quantize({"n": np.arange(3)}, keys=["n"])
    held = quantize({"m": np.ones((2, 3)), "n": np.ones(3)}, keys=["m"])
    assert quantize(held, keys="n")["m"] == held["m"]  # arrays that are left out stay
    save(tmp_path / "held", held)
    for again in (lambda: quantize(held), lambda: mt.storage.virtual.quantize(tmp_path / "held")):
        with pytest.raises(errors.CheckpointError, match="key 'm' is quantised already"):
            again()
    held["m"]["length"] = 9
    with pytest.raises(errors.CorruptCheckpoint, match="incomplete"):
        dequantize(held)


def test_keys_that_match_nothing_are_refused(tmp_path):
    save(tmp_path / "c", {"m": np.ones((2, 3)), "n": np.ones(3)})
    for make in (
        lambda k: quantize(load(tmp_path / "c"), keys=k),
        lambda k: mt.storage.virtual.quantize(tmp_path / "c", keys=k),
    ):
        with pytest.raises(errors.CheckpointKeyError, match=r"nothing matches \['x\*'\].* holds m, n"):
            make(["m", "x*"])
        for wrong in (5, [5]):
            with pytest.raises(errors.CheckpointError, match="keys are names or patterns"):
                make(wrong)
    assert quantize({}) == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_tensors_of_pytorch(dtype):
    torch = pytest.importorskip("torch")
    x = torch.linspace(-1, 1, 12).reshape(3, 4).to(getattr(torch, dtype))
    held = quantize({"m": torch.nn.Parameter(x), "n": torch.arange(3)})
    wanted = quantize({"m": mt.from_dlpack(x)})["m"]
    assert {k: v for k, v in held["m"].items() if k not in ("q", "scale")} == {
        k: v for k, v in wanted.items() if k not in ("q", "scale")
    }
    for part in ("q", "scale"):
        np.testing.assert_array_equal(np.asarray(held["m"][part]), np.asarray(wanted[part]))
    assert mt.storage.estimate({"m": x}) == mt.storage.estimate({"m": ((3, 4), dtype)})


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("form", ["dcp", "safetensors"])
def test_records_by_flat_names(tmp_path, form, bits):
    """Of a file without a tree: restored, or refused, and never taken for numbers."""
    x = np.random.default_rng(0).standard_normal((4, 7)).astype("f4")
    held = quantize({"adam": {"v": x, "n": np.arange(3)}}, bits=bits)
    save(tmp_path / "a", held)
    report = mt.convert(tmp_path / "a", tmp_path / "flat", format=form)
    assert any("rows of four bits" in n for n in report.notes) == (form == "safetensors" and bits == 4)
    flat = load(tmp_path / "flat")
    for again in (lambda: quantize(flat), lambda: mt.storage.virtual.quantize(tmp_path / "flat")):
        with pytest.raises(errors.CheckpointError, match=r"key 'adam\.v' is quantised already"):
            again()
    if form == "safetensors" and bits == 4:
        with pytest.raises(errors.CheckpointError, match=r"'adam\.v' has rows of four bits.*how long"):
            dequantize(flat)
        return
    restored, times = dequantize(flat)
    assert (set(restored), times) == ({"adam.v", "adam.n"}, 1)
    np.testing.assert_array_equal(np.asarray(restored["adam.v"]), np.asarray(dequantize(held)[0]["adam"]["v"]))
    with pytest.raises(errors.CheckpointError, match="quantised 1 times already"):
        quantize(restored, times=times)


def test_what_only_looks_like_a_record_stays():
    tree = {"a.q": np.ones((2, 3), "i8"), "a.scale": np.ones((2, 1), "f4"), "b.q": np.ones((2, 3), "i1")}
    tree |= {"b.scale": np.ones(3, "f4"), "c": {"q": np.ones(2, "i1"), "scale": np.ones(1, "f4"), "k": 1}}
    restored, times = dequantize(tree)
    assert (set(restored), set(restored["c"]), times) == (set(tree), {"q", "scale", "k"}, 0)
