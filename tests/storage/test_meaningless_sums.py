"""Arithmetic on stored numbers that stand for others: quantised weights, and arrays that xarray has packed or masked."""

import json

import ml_dtypes
import numpy as np
import pytest

from meshtape import errors
from meshtape.storage import (
    blended,
    convert,
    dequantize,
    extract_lora,
    load,
    open_checkpoint,
    quantize,
    save,
    save_safetensors,
    virtual,
)

WAYS = {
    "mean": lambda p, i: virtual.mean(p, integers=i),
    "ema": lambda p, i: virtual.ema(p, decay=0.5, integers=i),
    "sum": lambda p, i: virtual.weighted_sum(p, [1, 2], integers=i),
    "difference": lambda p, i: virtual.difference(*p, integers=i),
    "add": lambda p, i: virtual.add(*p, integers=i),
    "blend": lambda p, i: blended(
        {"merge_method": "linear", "models": [{"model": x, "parameters": {"weight": 1}} for x in p]}, integers=i
    ),
}
OF_ONE = {
    "scale": lambda p, i: blended(
        {"merge_method": "passthrough", "models": [{"model": p[0]}], "parameters": {"scale": 2}}, integers=i
    ),
    "one model": lambda p, i: blended(
        {"merge_method": "linear", "models": [{"model": p[0], "parameters": {"weight": 2}}]}, integers=i
    ),
}
ONES = np.ones((4, 8), "f4")
BYTES, WORDS, SCALES = np.ones((4, 8), np.uint8), np.ones((4, 1), np.int32), np.ones((4, 1), "f4")
QUANTISED = {
    "8 bits of quantize": (quantize({"m": ONES}), "m.q, m.scale -> m, dequantize"),
    "4 bits of quantize": (quantize({"m": ONES}, bits=4), "storage.dequantize"),
    "float8": ({"w": BYTES.astype(ml_dtypes.float8_e4m3fn), "w_scale_inv": SCALES}, "w, w_scale_inv -> w, dequantize"),
    "int8 and zero points": (
        {"w": BYTES, "w_scale": SCALES, "w_zero_point": BYTES[:, :1]},
        "w, w_scale, w_zero_point -> w, dequantize",
    ),
    "packed": ({"l.weight_packed": WORDS, "l.weight_scale": SCALES}, r"-> l\.weight, dequantize\(bits="),
    "GPTQ": ({"l.qweight": WORDS, "l.scales": SCALES}, "GPTQ or AWQ"),
    "LLM.int8": ({"l.weight": BYTES, "l.SCB": SCALES[:, 0]}, "LLM.int8"),
    "MXFP4": ({"l.down_blocks": BYTES, "l.down_scales": BYTES[:, :1]}, "write the full weights"),
}


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("way", [*WAYS, *OF_ONE])
def test_codes_are_not_summed(tmp_path, name, way):
    tree, advice = QUANTISED[name]
    paths = [save(tmp_path / n, tree).path for n in "ab"]  # equal codes, too
    for integers in ("equal", "first", "last"):
        with pytest.raises(errors.CheckpointError, match="dequantize" if way in ("blend", *OF_ONE) else advice):
            (WAYS | OF_ONE)[way](paths, integers)


def test_rows_of_quantize_are_restored_by_the_rule(tmp_path):
    values = {"m": np.random.default_rng(0).normal(size=(4, 8)), "v": np.full((2, 4), 9, "f4"), "n": np.arange(3)}
    state = save(tmp_path / "a", quantize(values)).path
    made = virtual.with_rules(state, "{x}.q, {x}.scale -> {x}, dequantize()")
    wanted = dequantize(load(state))[0]
    for n in "mv":  # rows without a negative number are stored by their roots
        np.testing.assert_array_equal(made[n].read(), np.asarray(wanted[n]))
    assert virtual.mean([made, made])["v"].read().tolist() == [[9] * 4] * 2
    four = save(tmp_path / "b", quantize(values, bits=4, keys="v")).path
    with pytest.raises(errors.CheckpointDTypeError, match="four bits"):
        virtual.with_rules(four, "v.q, v.scale -> v, dequantize()")


@pytest.mark.parametrize("scale", [{}, {"parameters": {"scale": 1}}])
def test_layers_of_float8_are_stacked(tmp_path, scale):
    codes = np.arange(8, dtype="f4").reshape(2, 4).astype(ml_dtypes.float8_e4m3fn)
    held = {"layers.0.w": codes, "layers.0.w_scale_inv": np.float32([[0.1]]), "norm": np.ones(2, ml_dtypes.bfloat16)}
    save_safetensors(tmp_path / "a.safetensors", held)
    path = str(tmp_path / "a.safetensors")
    twice = {"merge_method": "passthrough", "slices": [{"sources": [{"model": path, "layer_range": [0, 1]}]}] * 2}
    made = blended(twice | scale)
    for i in range(2):
        assert made[f"layers.{i}.w"].read().tobytes() == codes.tobytes()
        assert made[f"layers.{i}.w_scale_inv"].read().tolist() == held["layers.0.w_scale_inv"].tolist()
    for more in ({"dtype": "bfloat16"}, {"out_dtype": "float32"}, {"parameters": {"scale": 2}}):
        with pytest.raises(errors.CheckpointError, match=r"quantised: .* 'layers\.0\.w'"):
            blended(twice | more)
    only = {"parameters": {"scale": [{"filter": "norm", "value": 2}]}}
    assert blended(twice | only)["norm"].read().tolist() == [2, 2]


def test_copies_of_quantised_weights_pass(tmp_path):
    held = {"l.weight": BYTES.view(np.int8), "l.weight_scale": SCALES, "o.weight": np.ones((2, 2), "f4")}
    save_safetensors(tmp_path / "a.safetensors", held)
    path = str(tmp_path / "a.safetensors")
    kept = blended({"merge_method": "passthrough", "models": [{"model": path}]})
    assert kept["l.weight"].read().tolist() == BYTES.tolist()
    (tmp_path / "lora").mkdir()
    for module in "ol":
        rows, width = held[f"{module}.weight"].shape
        factors = {f"{module}.lora_A": np.ones((1, width), "f4"), f"{module}.lora_B": np.ones((rows, 1), "f4")}
        save_safetensors(tmp_path / "lora" / "adapter_model.safetensors", factors, overwrite=True)
        (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps({"r": 1, "lora_alpha": 1}))
        if module == "l":
            with pytest.raises(errors.CheckpointDTypeError, match="with its scale in"):
                virtual.lora(path, tmp_path / "lora")
        else:
            made = virtual.lora(path, tmp_path / "lora")
            assert made["o.weight"].read().tolist() == [[2, 2]] * 2
            assert made["l.weight"].dtype == np.int8


@pytest.mark.parametrize("side", ["tuned", "base"])
@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.int8])
def test_no_adapter_is_extracted_from_codes(tmp_path, side, dtype):
    full = {"l.weight": np.arange(16, dtype="f4").reshape(4, 4), "l.weight_scale": np.ones((4, 1), "f4")}
    for n in ("tuned", "base"):
        held = full | {"l.weight": (full["l.weight"] + (n == "tuned")).astype(dtype if n == side else "f4")}
        save_safetensors(tmp_path / f"{n}.safetensors", held)
    with pytest.raises(errors.CheckpointDTypeError, match=f"{side}.safetensors: .* with its scale in"):
        extract_lora(tmp_path / "tuned.safetensors", tmp_path / "base.safetensors", tmp_path / "out", rank=1)
    assert not (tmp_path / "out").exists()


def xarrays(home, version, encoding, others=None):
    """Two groups of xarray with one array each."""
    xarray = pytest.importorskip("xarray")
    for n, said in (("a", encoding), ("b", others or encoding)):
        data = xarray.Dataset({"t": ("x", np.float32([10, 20, 30]))})
        data.to_zarr(home / n, encoding={"t": said}, zarr_format=version, consolidated=False)
    return [str(home / n) for n in "ab"]


MASKED = {
    "masked": ({"_FillValue": -999.0}, r"'_FillValue' = -999\.0"),
    "missing values": ({"missing_value": -5.0, "_FillValue": -5.0}, "= -5.0"),
    "scaled floats": ({"scale_factor": 0.5, "dtype": "f4"}, "'scale_factor' = 0.5"),
}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("way", [*WAYS, *OF_ONE])
def test_packed_and_masked_floats_are_not_summed(tmp_path, name, way, version):
    encoding, told = MASKED[name]
    paths = xarrays(tmp_path, version, encoding)
    with pytest.raises(errors.CheckpointDTypeError, match=rf"key 't' .*{told}.*xarray\.open_zarr"):
        (WAYS | OF_ONE)[way](paths, "first")
    ours = [convert(p, f"{p}-ours", format="zarr").path for p in paths]
    cast = [virtual.cast(p, "float64") for p in ours]
    for held in (ours, cast, [virtual.rows(p, {"t": (0, 2)}) for p in paths]):  # the attributes went along
        if way not in ("blend", *OF_ONE) or held is ours:
            with pytest.raises(errors.CheckpointDTypeError, match=told):
                (WAYS | OF_ONE)[way](held, "equal")
    assert virtual.rows(paths[0], {"t": (0, 2)})["t"].shape == (2,)


@pytest.mark.parametrize("version", [2, 3])
def test_plain_arrays_of_xarray_are_summed(tmp_path, version):
    for i, encoding in enumerate(({}, {"_FillValue": np.nan}, {"scale_factor": 1.0, "add_offset": 0.0})):
        (tmp_path / str(i)).mkdir()
        paths = xarrays(tmp_path / str(i), version, encoding | ({"dtype": "f4"} if len(encoding) == 2 else {}))
        assert open_checkpoint(paths[0])["t"].attributes
        for way in ("mean", "blend"):
            assert WAYS[way](paths, "equal")["t"].read().tolist() == [10, 20, 30]


@pytest.mark.parametrize("way", WAYS)
def test_equal_packed_integers_stand_for_one_thing(tmp_path, way):
    packed = {"dtype": "i2", "add_offset": 10.0, "_FillValue": -1}
    (tmp_path / "other").mkdir()
    same = xarrays(tmp_path, 3, packed)
    assert WAYS[way](same, "equal")["t"].read().tolist() == [0, 10, 20]
    other = [same[0], xarrays(tmp_path / "other", 3, packed | {"add_offset": 5.0})[0]]
    with pytest.raises(errors.CheckpointDTypeError, match=r"'add_offset' = 5\.0: .*has 10\.0"):
        WAYS[way](other, "equal")
    for integers, wanted in (("first", [0, 10, 20]), ("last", [5, 15, 25])):
        assert WAYS[way](other, integers)["t"].read().tolist() == wanted
