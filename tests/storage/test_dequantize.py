"""`dequantize`: 8-bit weights and the scales of their blocks, against the formulas written out in NumPy."""

import json

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import meshtape as mt
from meshtape import errors
from meshtape.arrays.core.blocks import Box
from meshtape.cli import main
from meshtape.storage import Rules, convert, load, merge, open_checkpoint, save_safetensors, verify
from meshtape.storage.rules import rules as r
from meshtape.storage.rules import steps, value_steps

RULE = "{p*}.weight, {p*}.weight_scale_inv -> {p*}.weight, dequantize(block=[128, 128], dtype=bfloat16)"
TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "int8": np.int8, "uint8": np.uint8}


def quantized(shape, kind, seed=0):
    rng = np.random.default_rng(seed)
    if kind in ("int8", "uint8"):
        limits = np.iinfo(kind)
        return rng.integers(limits.min, limits.max + 1, shape).astype(kind)
    return (rng.standard_normal(shape) * 40).astype(TYPES[kind])


def scales(shape, dtype=np.float32, seed=1):
    return (np.random.default_rng(seed).random(shape) * 1e-2 + 1e-3).astype(dtype)


def by_block(x, scale, block, zero=None):
    """DeepSeek-V3's `weight_dequant` and compressed-tensors' `dequantize`, element by element along each dimension."""
    out = np.empty(x.shape, np.float32)
    for at in np.ndindex(*scale.shape):
        place = tuple(slice(i * b, (i + 1) * b) for i, b in zip(at, block, strict=True))
        value = x[place].astype(np.float32)
        if zero is not None:
            value = value - np.float32(zero[at])
        out[place] = value * np.float32(scale[at])
    return out


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (1, 129), (128, 1), (5, 7)])
def test_blocks_as_deepseek_stores_them(kit, kind, shape):
    x = quantized(shape, kind)
    s = scales(tuple(-(-n // 128) for n in shape))
    got = Rules(RULE).on_arrays({"l.0.weight": x, "l.0.weight_scale_inv": s, "norm.weight": np.ones(3, np.float32)})
    assert kit.same(got["l.0.weight"], by_block(x, s, (128, 128)).astype(ml_dtypes.bfloat16))
    assert sorted(got) == ["l.0.weight", "norm.weight"]


CASES = {  # shape of the scales, block=, and the block that it means
    "tensor": ((), "", (24, 32)),
    "tensor as one element": ((1,), "", (24, 32)),
    "tensor as a matrix": ((1, 1), "", (24, 32)),
    "channel": ((24, 1), "", (1, 32)),
    "column": ((1, 32), "", (24, 1)),
    "group": ((24, 4), "block=[1, 8]", (1, 8)),
    "group with a short end": ((24, 4), "block=[1, 9]", (1, 9)),
    "block": ((3, 4), "block=[8, 8]", (8, 8)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("zeros", [False, True])
def test_strategies_of_compressed_tensors(kit, case, kind, zeros):
    shape, argument, block = CASES[case]
    x, s = quantized((24, 32), kind), scales(shape, np.float16)
    held = {"w": x, "s": s}
    zero = None
    if zeros:
        zero = np.random.default_rng(2).integers(0, 16, shape).astype(np.int8)
        held["z"] = zero
    got = Rules(f"w, s{', z' if zeros else ''} -> w, dequantize({argument})").on_arrays(held)["w"]
    wide = (-(-24 // block[0]), -(-32 // block[1]))
    want = by_block(x, s.reshape(wide), block, None if zero is None else zero.reshape(wide))
    assert kit.same(got, want.astype(np.float16))


def test_three_dimensions_of_stacked_experts(kit):
    x, s = quantized((2, 256, 130), "e4m3"), scales((2, 2, 2))
    got = Rules("w, s -> w, dequantize(block=[1, 128, 128])").on_arrays({"w": x, "s": s})["w"]
    assert kit.same(got, np.stack([by_block(x[i], s[i], (128, 128)) for i in range(2)]))


def test_any_box_and_only_the_scales_that_it_needs(kit, tmp_path):
    x, s = quantized((700, 500), "e4m3"), scales((6, 4))
    want = by_block(x, s, (128, 128)).astype(ml_dtypes.bfloat16)
    save_safetensors(tmp_path / "m.safetensors", {"l.weight": x, "l.weight_scale_inv": s})
    held = Rules(RULE).on(open_checkpoint(tmp_path / "m.safetensors"))["l.weight"]
    rng = np.random.default_rng(3)
    for _ in range(40):
        a, b = (sorted(rng.integers(0, n + 1, 2).tolist()) for n in x.shape)
        assert kit.same(held[a[0] : a[1], b[0] : b[1]], want[a[0] : a[1], b[0] : b[1]])
    tensor = held.tensor
    assert tensor.planned(Box((0, 0), (1, 500))) == 500 + 4 * 4
    assert tensor.planned(Box((130, 0), (2, 500))) == 1000 + 4 * 4
    assert tensor.planned(Box((127, 0), (2, 500))) == 1000 + 8 * 4
    assert tensor.planned(Box((0, 0), (0, 500))) == 0


def test_merge_convert_load_and_processes_agree(kit, tmp_path):
    x, s = quantized((700, 500), "e4m3"), scales((6, 4))
    want = by_block(x, s, (128, 128)).astype(ml_dtypes.bfloat16)
    save_safetensors(tmp_path / "m.safetensors", {"l.weight": x, "l.weight_scale_inv": s, "n.weight": np.ones(2, "f4")})
    source = tmp_path / "m.safetensors"
    merge(source, tmp_path / "a", rules=RULE, memory_limit=1, threads=3)
    convert(source, tmp_path / "b", format="zarr", rules=RULE, mesh={"m": 3}, shardings={"l.*": {"m": 1}, "*": {}})
    for out in ("a", "b"):
        assert kit.same(open_checkpoint(tmp_path / out)["l.weight"].read(), want)
    like = {"l": {"weight": kit.split(np.zeros(x.shape, want.dtype), kit.Sharding(kit.Host({"m": 4}), (0,)))}}
    got = load(source, like=like, rules=RULE, ignore="n.*")
    assert kit.same(got["l"]["weight"].whole(), want)
    # A refusal names the rule that is wanted.
    with pytest.raises(errors.CheckpointDTypeError, match=r"l.weight, l.weight_scale_inv -> l.weight, dequantize"):
        merge(source, tmp_path / "c", dtype="float32")
    merge(source, tmp_path / "c", dtype="float32", rules=RULE.replace("bfloat16", "float32"))
    assert kit.same(open_checkpoint(tmp_path / "c")["l.weight"].read(), by_block(x, s, (128, 128)))


QUANTIZATION = {"quant_method": "fp8", "weight_block_size": [128, 128], "ignore": ["lm_head"]}
CONFIGS = {  # of the source, and of the result
    "plain": (
        {"a": 1, "quantization_config": QUANTIZATION, "torch_dtype": "bfloat16"},
        {"a": 1, "torch_dtype": "bfloat16"},
    ),
    "within": (
        {"text_config": {"quantization_config": QUANTIZATION, "b": [1]}, "vision_config": {"c": 2}},
        {"text_config": {"b": [1]}, "vision_config": {"c": 2}},
    ),
    "of compressed-tensors": ({"compression_config": QUANTIZATION, "a": 1}, {"a": 1}),
    "none": ({"a": 1}, None),
    "no object": ([1], None),
}


def _model(home, config, **more):
    home.mkdir()
    x, s = quantized((200, 150), "e4m3"), scales((2, 2))
    save_safetensors(
        home / "model.safetensors", {"l.weight": x, "l.weight_scale_inv": s, "n.weight": np.ones(2, "f4"), **more}
    )
    (home / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (home / "tokenizer.json").write_text('{"quantization_config": 1}')
    return home


@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("kind", ["merge", "zarr", "cast"])
def test_full_weights_have_no_configuration_of_quantised_ones(tmp_path, case, kind):
    """transformers would quantise them again; the rest of the document, and other documents, stay."""
    config, wanted = CONFIGS[case]
    source = _model(tmp_path / "m", config)
    options = {"rules": RULE} | ({"dtype": "float32"} if kind == "cast" else {})
    write = (lambda *a, **k: convert(*a, format="zarr", **k)) if kind == "zarr" else merge
    report = write(source, tmp_path / "out", **options)
    got = (tmp_path / "out" / "config.json").read_text()
    if wanted is None:
        assert got == (source / "config.json").read_text()
        assert report.notes == []
    else:
        assert json.loads(got) == (
            wanted | {"torch_dtype": "float32"} if kind == "cast" and "torch_dtype" in wanted else wanted
        )
        assert report.notes == ["config.json: without its quantization, as the weights have their full values"]
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"quantization_config": 1}'
    verify(tmp_path / "out")


def test_the_configuration_stays_where_weights_stay_quantised(tmp_path):
    config = CONFIGS["plain"][0]
    source = _model(
        tmp_path / "m", config, **{"k.weight": quantized((128, 128), "e4m3"), "k.weight_scale_inv": scales((1, 1))}
    )
    plain = merge(source, tmp_path / "a")
    some = merge(source, tmp_path / "b", rules=RULE.replace("{p*}", "l"))
    every = merge(source, tmp_path / "c", rules=RULE)
    assert plain.notes == []
    assert "still says that the weights are quantised, as 'k.weight' is" in some.notes[0]
    for out, wanted in (("a", config), ("b", config), ("c", CONFIGS["plain"][1])):
        assert json.loads((tmp_path / out / "config.json").read_text()) == wanted
    assert len(every.notes) == 1
    done = CliRunner().invoke(
        main.main, ["merge", str(tmp_path / "m"), str(tmp_path / "d"), "--rules", _file(tmp_path)]
    )
    assert "config.json: without its quantization" in done.output
    # What was quantised is left out: the rest is whole.
    drop = merge(source, tmp_path / "e", rules=RULE.replace("{p*}", "l"), drop=["k.*"])
    assert "without its quantization" in drop.notes[0]


def _file(home):
    (home / "rules").write_text(RULE)
    return str(home / "rules")


@pytest.mark.parametrize("config", ['{"quantization_config": {}', "[" * 100_000, "\x00", ""])
def test_a_configuration_that_is_no_json_goes_along(tmp_path, config):
    source = _model(tmp_path / "m", config)
    assert merge(source, tmp_path / "out", rules=RULE, dtype="float32").notes == []
    assert (tmp_path / "out" / "config.json").read_text() == config


def packed(x, bits, axis):
    """``pack_to_int32`` of compressed-tensors, number by number."""
    x = x if axis == 1 else x.T
    per = 32 // bits
    out = np.zeros((x.shape[0], -(-x.shape[1] // per)), np.uint32)
    for (i, j), value in np.ndenumerate(x):
        out[i, j // per] |= np.uint32(int(value) + (1 << (bits - 1))) << np.uint32(j % per * bits)
    return np.ascontiguousarray(out if axis == 1 else out.T).view(np.int32)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("shape", "group"), [((6, 64), 16), ((13, 32), 32), ((1, 8), 8), ((5, 16), None)])
def test_numbers_that_compressed_tensors_packs(kit, tmp_path, bits, zeros, shape, group):
    rng = np.random.default_rng(bits)
    limits = -(1 << (bits - 1)), 1 << (bits - 1)
    shape = shape[0], max(shape[1], 32 // bits)
    block = (1, group or shape[1])
    x = rng.integers(*limits, shape).astype(np.int8)
    s = scales((shape[0], shape[1] // block[1]), ml_dtypes.bfloat16)
    z = rng.integers(*limits, s.shape).astype(np.int8) if zeros else None
    arrays = {
        "l.weight_packed": packed(x, bits, 1),
        "l.weight_scale": s,
        "l.weight_shape": np.array(shape),
        "n.weight": np.ones(2, "f4"),
    }
    rule = "{p*}.weight_packed, {p*}.weight_scale -> {p*}.weight"
    if zeros:
        arrays["l.weight_zero_point"] = packed(z, bits, 0)
        rule = rule.replace(" ->", ", {p*}.weight_zero_point ->")
    how = f"bits={bits}, dtype=float32" + (f", block=[1, {group}]" if group else "")
    rule = f"{rule}, dequantize({how})\n{{p*}}.weight_shape -> _"
    want = by_block(x, s, block, z)
    assert kit.same(Rules(rule).on_arrays(arrays)["l.weight"], want)
    save_safetensors(tmp_path / "m.safetensors", arrays)
    got = merge(tmp_path / "m.safetensors", tmp_path / "hf", rules=rule, memory_limit=1)
    assert got.arrays == 2
    out = open_checkpoint(tmp_path / "hf")
    assert kit.same(out["l.weight"].read(), want)
    lazy = Rules(rule).on(open_checkpoint(tmp_path / "m.safetensors"))["l.weight"]
    for box in (np.s_[1:, 3:7], np.s_[:1, 1::3], np.s_[-1, 5], np.s_[2:2, :], np.s_[::2, -1:]):
        assert kit.same(lazy[box], want[box])


@pytest.mark.parametrize(
    ("held", "rule", "word"),
    [
        (["w", "w.absmax", "w.quant_map"], "{p*}, {p*}.absmax -> {p*}, dequantize()", "nf4 or fp4"),
        (["l.w", "l.SCB"], "{p*}.w, {p*}.SCB -> {p*}.w, dequantize()", "127 times the scale"),
        (["l.qweight", "l.scales"], "{p*}.qweight, {p*}.scales -> {p*}.w, dequantize()", "GPTQ or AWQ"),
        (["l.w", "l.w_scale", "l.w_g_idx"], "{p*}.w, {p*}.w_scale -> {p*}.w, dequantize()", "activation ordering"),
    ],
)
def test_layouts_that_would_give_other_numbers_are_refused_by_name(held, rule, word):
    arrays = {n: np.ones((4, 8), np.int8 if n.split(".")[-1] in ("w", "qweight") else np.float32) for n in held}
    with pytest.raises(errors.RuleConflict, match=word):
        Rules(rule).on_arrays(arrays)


def test_packed_numbers_that_do_not_fit(kit):
    arrays = {"l.weight_packed": np.zeros((4, 2), np.int32), "l.weight_scale": np.ones((4, 1), "f4")}
    rule = "{p*}.weight_packed, {p*}.weight_scale -> {p*}.weight, dequantize(bits=4)"
    assert Rules(rule).on_arrays(arrays)["l.weight"].shape == (4, 16)
    for change, kind, word in (
        ({"l.weight_packed": np.zeros((4, 2), np.int64)}, errors.CheckpointDTypeError, "takes matrices of int32"),
        ({"l.weight_packed": np.zeros(4, np.int32)}, errors.CheckpointDTypeError, "takes matrices of int32"),
        ({"l.weight_g_idx": np.zeros(16, np.int32)}, errors.RuleConflict, "without activation ordering"),
        ({"l.weight_scale": np.ones((4, 3), "f4")}, errors.CheckpointShapeError, "give block="),
    ):
        with pytest.raises(kind, match=word):
            Rules(rule).on_arrays(arrays | change)
    with pytest.raises(errors.CheckpointDTypeError, match="with bits= numbers that compressed-tensors has packed"):
        Rules(rule.replace("bits=4", "")).on_arrays(arrays)
    for bits in (3, 0, 16, -4):
        with pytest.raises((errors.RuleConflict, errors.RuleSyntaxError), match="2, 4 or 8 bits"):
            Rules(rule.replace("bits=4", f"bits={bits}"))


def test_steps_before_and_after(kit):
    x, s = quantized((4, 6), "int8"), scales((4,))
    held = {"w": x, "s": s}
    got = Rules("s -> $s, reshape([4, 1])\nw, $s -> w, dequantize(), permute(), cast(float16)").on_arrays(held)["w"]
    assert kit.same(got, (x.astype("f4") * s[:, None]).T.astype("f2"))


def test_special_numbers(kit):
    x = np.asarray([[np.nan, 448.0, -448.0, 0.0]], np.float32).astype(ml_dtypes.float8_e4m3fn)
    got = Rules("w, s -> w, dequantize()").on_arrays({"w": x, "s": np.float32([2.0])})["w"]
    assert np.array_equal(got, np.float32([[np.nan, 896, -896, 0]]), equal_nan=True)
    for scale, dtype in ((1e38, "float32"), (1e38, "bfloat16"), (1e3, "float16")):
        with pytest.raises(errors.Lossy, match="2 became infinite"):
            Rules(f"w, s -> w, dequantize(dtype={dtype})").on_arrays({"w": x, "s": np.float32([scale])})
    empty = Rules(RULE).on_arrays({"a.weight": x[:0], "a.weight_scale_inv": np.zeros((0, 1), "f4")})["a.weight"]
    assert empty.shape == (0, 4)


@pytest.mark.parametrize(
    ("held", "rule", "kind", "told"),
    [
        ({"w": (4, 4), "s": (2, 2)}, "dequantize()", errors.CheckpointShapeError, "give block="),
        ({"w": (4, 4), "s": (4,)}, "dequantize()", errors.CheckpointShapeError, "reshape the scales"),
        (
            {"w": (4, 4), "s": (2, 3)},
            "dequantize(block=[2, 2])",
            errors.CheckpointShapeError,
            "shape (2, 2), not (2, 3)",
        ),
        ({"w": (4, 4), "s": (2,)}, "dequantize(block=[2])", errors.CheckpointShapeError, "block=[2] does not fit"),
        ({"w": (4, 4), "s": (2, 2)}, "dequantize(block=[0, 2])", errors.CheckpointShapeError, "does not fit"),
        ({"w": (4, 4)}, "dequantize()", errors.RuleConflict, "takes weights and scales"),
        (
            {"w": (4, 4), "s": (1,), "z": (4, 1)},
            "dequantize()",
            errors.CheckpointShapeError,
            "'z' must have the shape (1, 1)",
        ),
        ({"w": (4, 4), "s": (1,)}, "dequantize(dtype=int8)", errors.CheckpointDTypeError, "makes a floating dtype"),
    ],
)
def test_what_does_not_fit(held, rule, kind, told):
    arrays = {n: np.zeros(s, np.int8 if n != "s" else np.float32) for n, s in held.items()}
    with pytest.raises(kind) as e:
        Rules(f"{', '.join(held)} -> w, {rule}").on_arrays(arrays)
    assert told in str(e.value)


def test_a_scale_or_a_weight_that_is_lost_is_named():
    x, s = quantized((2, 2), "e4m3"), scales((1, 1))
    with pytest.raises(errors.RuleMatchError, match=r"for p=b there is no key '\{p\*\}.weight_scale_inv'"):
        Rules(RULE).on_arrays({"a.weight": x, "a.weight_scale_inv": s, "b.weight": x})
    with pytest.raises(errors.RuleMatchError, match=r"for p=b there is no key '\{p\*\}.weight'"):
        Rules(RULE).on_arrays({"a.weight": x, "a.weight_scale_inv": s, "b.weight_scale_inv": s})
    with pytest.raises(errors.CheckpointDTypeError, match="takes int8, uint8 and float8"):
        Rules(
            [
                r.Rule(("a", "b"), "c", steps.Concat(0)),
                r.Rule(("w", "s"), "w", value_steps.Cast("float32"), value_steps.Dequantize()),
            ]
        ).on_arrays({"a": s, "b": s, "w": x, "s": s})


def test_there_is_no_way_back_and_the_state_has_no_scales():
    x, s = quantized((2, 2), "e4m3"), scales((1, 1))
    with pytest.raises(errors.CheckpointError, match="does not quantise again"):
        Rules("w, s -> w, dequantize()").inverse({"w": x, "s": s})
    got = Rules("w, s -> v, dequantize()", follow=["opt.m.{}"]).on_arrays({"w": x, "s": s, "opt.m.w": np.ones((2, 2))})
    assert sorted(got) == ["opt.m.v", "v"]


def test_a_rule_that_restores_a_record_takes_its_marks_along(tmp_path):
    """Else the result would be taken for quantised still, and hold more than it stands for."""
    state = {"m": np.random.default_rng(0).normal(size=(16, 64)).astype("f4"), "step": 7}
    quantised = mt.storage.quantize(state)
    mt.save(tmp_path / "q", quantised)
    rule = "{x*}.q, {x*}.scale -> {x*}, dequantize()"
    tree = mt.load(tmp_path / "q", rules=rule, like=state)
    np.testing.assert_array_equal(np.asarray(tree["m"]), np.asarray(mt.storage.dequantize(quantised)[0]["m"]))
    assert tree["step"] == 7
    assert "q" in mt.storage.quantize(mt.load(tmp_path / "q", rules=rule))["m"]
    kept = load(tmp_path / "q", rules="m.q -> m.q, cast(int16)")  # which restores nothing
    assert kept["m.meshtape.quantized"] == 8
