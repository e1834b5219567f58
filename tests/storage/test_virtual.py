"""Virtual checkpoints: known answers, NumPy as oracle, hostile documents, changed parents, kills and races."""

import contextlib
import functools
import http.server
import json
import multiprocessing
import os
import shutil
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import zarr
from click.testing import CliRunner

import meshtape as mt
from meshtape import errors
from meshtape.arrays.core.blocks import Box
from meshtape.cli.main import main
from meshtape.storage import (
    CheckpointManager,
    blend,
    convert,
    dequantize,
    diff,
    estimate,
    load,
    merge,
    open_checkpoint,
    quantize,
    read_header,
    reshard,
    save,
    save_safetensors,
    verify,
    virtual,
)
from meshtape.storage.base.sealed import sealed, unsealed
from meshtape.storage.browse.model.site import Site
from meshtape.storage.rules.lazy_tensors import Recipes
from meshtape.storage.stores import store
from meshtape.storage.virtual import expressions

DTYPES = [np.dtype(t) for t in ("f4", "f2", "f8", ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, "c8")]
LAYOUTS = ["zarr", "file", "hf"]


def tree(seed, dtype=None, shape=(37, 29)):
    dtype = np.dtype("f4") if dtype is None else dtype
    rng = np.random.default_rng(seed)
    w = rng.normal(size=shape) + (1j * rng.normal(size=shape) if dtype.kind == "c" else 0)
    return {
        "w": w.astype(dtype),
        "b": rng.normal(size=5).astype(dtype),
        "s": np.asarray(seed, dtype),
        "step": np.int64(7),
    }


def put(home, trees, layout="zarr"):
    """Checkpoints of trees, in a folder."""
    out = []
    for i, t in enumerate(trees):
        where = str(Path(home) / f"{layout}{i}")
        if layout == "file":
            where += ".safetensors"
            save_safetensors(where, t)
        elif layout == "hf":
            save(f"{where}.source", t)
            merge(f"{where}.source", where, max_shard_bytes=2000)
        else:
            save(where, t, step=i)
        out.append(where)
    return out


def one(home, name, value, **options):
    return save(Path(home) / name, {"w": np.asarray(value)}, **options).path


def files(home):
    return {p.relative_to(home).as_posix(): p.read_bytes() for p in sorted(Path(home).rglob("*")) if p.is_file()}


def summed(arrays, weights, divisor=1.0):
    """In the order of the arrays, in the dtype that the documentation says."""
    dtype = arrays[0].dtype
    if dtype.kind == "c":  # by real numbers, each part alone: NumPy's product has NaN beside an infinity
        out = np.empty_like(arrays[0])
        out.real, out.imag = (summed([p(x) for x in arrays], weights, divisor) for p in (np.real, np.imag))
        return out
    wide = np.dtype("f8") if dtype == np.float64 else np.dtype("f4")
    number = np.float64 if dtype == np.float64 else np.float32
    total = None
    for x, w in zip(arrays, weights, strict=True):
        term = x.astype(wide) if w == 1 else x.astype(wide) * number(w)
        total = term if total is None else total + term
    return (total / number(divisor) if divisor != 1 else total).astype(dtype)


# ----- values ---------------------------------------------------------------------------------------------------------


def adapter(home, config=None, **arrays):
    home = Path(home)
    home.mkdir(exist_ok=True)
    save_safetensors(home / "adapter_model.safetensors", {k.replace("__", "."): v for k, v in arrays.items()})
    (home / "adapter_config.json").write_text(
        json.dumps({"r": 1, "lora_alpha": 2, "peft_type": "LORA", **(config or {})})
    )
    return str(home)


AB = {
    "base_model__model__m__lora_A__weight": np.float32([[1, 0]]),
    "base_model__model__m__lora_B__weight": np.float32([[1], [2]]),
}


def test_known_answers(tmp_path):
    a, b, c = (one(tmp_path, n, np.float32(v)) for n, v in (("a", [1, 2]), ("b", [2, 4]), ("c", [3, 9])))
    base = save(tmp_path / "base", {"m.weight": np.eye(2, dtype="f4"), "n": np.ones(3, "f4")}).path
    lora = adapter(tmp_path / "lora", **AB)
    delta = virtual.difference(c, a)
    found = {
        "mean": (virtual.mean([a, b, c]), [2, 5]),
        "sum": (virtual.weighted_sum([a, b], [1, -0.5]), [0, 0]),
        "normalised": (virtual.weighted_sum([a, c], [1, 3], normalize=True), [2.5, 7.25]),
        "ema": (virtual.ema([a, b, c], decay=0.5), [2.25, 6]),
        "the last alone": (virtual.ema([a, b, c], decay=0), [3, 9]),
        "difference": (delta, [2, 7]),
        "add": (virtual.add(b, delta, 0.5), [3, 7.5]),
        "nested": (virtual.mean([virtual.mean([a, b]), virtual.cast(c, "float32")]), [2.25, 6]),
        "rows": (virtual.rows(a, {"w": (1, 2)}), [2]),
        "no rows": (virtual.rows(a, {"w": (1, 1)}), []),
        "rules": (virtual.rows(virtual.with_rules(b, "w -> v"), {"v": (0, 1)}), [2]),
        "lora": (virtual.lora(base, lora), [[3, 0], [4, 1]]),
        "lora, halved": (virtual.lora(base, lora, 0.5), [[2, 0], [2, 1]]),
    }
    for what, (ckpt, wanted) in found.items():
        name = next(iter(ckpt))
        assert ckpt[name][...].tolist() == wanted, what
        again = open_checkpoint(virtual.write(tmp_path / "d.json", ckpt, overwrite=True))
        assert again.kind == ckpt.kind == "virtual"
        assert again[name][...].tolist() == wanted, what
        assert again.computed.expression == ckpt.computed.expression
        assert repr(again).startswith(f"virtual checkpoint {tmp_path / 'd.json'} = {ckpt.path}")
        assert again.metadata["meshtape.virtual"] == ckpt.path
    assert virtual.cast(a, np.float16)["w"].dtype == np.float16
    assert virtual.mean([a, b]).path == f"mean({tmp_path.name}/a, {tmp_path.name}/b)"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_numpys_to_the_bit(kit, tmp_path, layout, dtype):
    if layout != "zarr" and dtype.kind == "c":
        pytest.skip("a dtype that the format lacks in some versions")
    trees = [tree(i, dtype) for i in range(3)]
    paths = put(tmp_path, trees, layout)
    delta = virtual.difference(paths[1], paths[0])
    cases = [
        (virtual.mean(paths), lambda *x: summed(x, [1, 1, 1], 3)),
        (virtual.weighted_sum(paths, [0.3, -2, 1e-3]), lambda *x: summed(x, [0.3, -2, 1e-3])),
        (virtual.ema(paths, decay=0.9), lambda *x: summed(x, [0.9**2, (1 - 0.9) * 0.9, 1 - 0.9])),
        (virtual.add(paths[2], delta, 0.7), lambda a, b, c: summed([c, summed([b, a], [1, -1])], [1, 0.7])),
    ]
    rng = np.random.default_rng(0)
    for ckpt, wanted in cases:
        for name in ("w", "b", "s"):
            whole = wanted(*(t[name] for t in trees))
            assert kit.same(ckpt[name][...], whole)
            for _ in range(4):
                at = tuple(slice(*sorted(rng.integers(0, n + 1, 2))) for n in whole.shape)
                assert kit.same(ckpt[name][at], whole[at])
        assert kit.same(ckpt["w"][::3, 1], wanted(*(t["w"] for t in trees))[::3, 1])
        assert ckpt["step"][...] == 7


@pytest.mark.parametrize("dtype", ["c8", "c16"])
def test_an_infinity_leaves_the_part_beside_it(tmp_path, dtype):
    a, b = np.array([1 + 2j, 5, 1j], dtype), np.array([complex(np.inf, 3), complex(2, -np.inf), 1j], dtype)
    paths = [one(tmp_path, n, x) for n, x in (("a", a), ("b", b))]
    assert (
        virtual.difference(*paths)["w"][...].tolist()
        == (a - b).tolist()
        == [complex(-np.inf, -1), complex(3, np.inf), 0]
    )
    halves = virtual.weighted_sum(paths, [1, 1], normalize=True)["w"][...]
    assert halves.tolist() == [complex(np.inf, 2.5), complex(3.5, -np.inf), 1j]


def test_the_working_dtype_keeps_what_a_short_one_would_lose(tmp_path):
    paths = [one(tmp_path, str(i), np.full(4, 1 + i / 256, ml_dtypes.bfloat16)) for i in range(8)]
    values = [float(ml_dtypes.bfloat16(1 + i / 256)) for i in range(8)]
    assert float(virtual.mean(paths)["w"][0]) == float(ml_dtypes.bfloat16(np.mean(values)))


def test_negative_zeros_nan_and_infinities_pass(tmp_path):
    special = np.float32([-0.0, np.nan, np.inf, 1])
    paths = [one(tmp_path, str(i), special) for i in range(2)]
    found = virtual.mean(paths)["w"][...]
    assert np.signbit(found[0])
    assert np.isnan(found[1])
    assert found[2] == np.inf


def test_overflow_is_a_loss_and_no_value(tmp_path):
    paths = [one(tmp_path, str(i), np.float32([1, 3e38])) for i in range(2)]
    half = one(tmp_path, "half", np.float16([1, 6e4]))
    for ckpt in (virtual.mean(paths), virtual.weighted_sum([half], [2]), virtual.cast(paths[0], "float16")):
        with pytest.raises(errors.Lossy, match=r"'w': 1 became infinite; first at \[1\]"):
            ckpt["w"][...]
        with pytest.raises(errors.Lossy, match="'w'"):
            merge(ckpt, tmp_path / "out", overwrite=True)
        report = merge(ckpt, tmp_path / "out", allow_overflow=True, overwrite=True)
        assert report.losses["w"].overflow == 1
        assert np.isinf(np.asarray(load(tmp_path / "out")["w"])[1])


def test_what_was_not_finite_before_is_no_loss_of_a_sum(tmp_path):
    paths = [
        save(tmp_path / name, {"w": np.float32(x)}).path
        for name, x in (("a", [1, np.nan, np.inf, 3e38]), ("b", [1, 2, -np.inf, 3e38]))
    ]
    with pytest.raises(errors.Lossy, match=r"'w': 1 became infinite; first at \[3\]"):
        load(virtual.mean(paths))


def test_what_is_not_floating_must_be_equal(tmp_path):
    paths = [
        save(tmp_path / str(i), {"w": np.float32([i]), "n": np.int64([i]), "m": np.asarray([True])}).path
        for i in range(2)
    ]
    found = virtual.mean(paths)
    assert found["m"][...].tolist() == [True]
    with pytest.raises(
        errors.CheckpointError, match="'n' is int64, of which no sums are taken, so it must be equal in all parents"
    ):
        load(found)
    assert float(load(virtual.with_rules(found, "n -> _"))["w"][0]) == 0.5


MADE = {
    "mean": lambda paths, **o: virtual.mean(paths, **o),
    "weighted_sum": lambda paths, **o: virtual.weighted_sum(paths, [1, 3, 2], **o),
    "ema": lambda paths, **o: virtual.ema(paths, decay=0.5, **o),
    "difference": lambda paths, **o: virtual.difference(paths[0], paths[-1], **o),
    "add": lambda paths, **o: virtual.add(paths[0], paths[-1], **o),
}


@pytest.mark.parametrize("name", MADE)
def test_counters_are_those_of_one_where_it_is_asked_for(tmp_path, name):
    counter = "bn.num_batches_tracked"
    paths = [
        save(tmp_path / str(i), {"bn": {"num_batches_tracked": np.int64(i), "mean": np.float32([i])}}).path
        for i in range(3)
    ]
    with pytest.raises(errors.CheckpointError) as e:
        load(MADE[name](paths))
    for part in (repr(counter), f"virtual.{name}(…, integers='first')", "--integers first", f"{counter} -> _"):
        assert part in str(e.value)
    wanted = load(MADE[name]([virtual.with_rules(p, f"{counter} -> _") for p in paths]))["bn.mean"]
    for integers, value in (("first", 0), ("last", 2)):
        found = MADE[name](paths, integers=integers)
        assert f"integers='{integers}'" in found.path
        for ckpt in (found, open_checkpoint(virtual.write(tmp_path / f"{integers}.json", found))):
            assert ckpt[counter][...] == value
            assert ckpt["bn.mean"][...] == wanted
    with pytest.raises(errors.CheckpointError, match=r"integers of .*: 'both' is none of 'equal', 'first', 'last'"):
        MADE[name](paths, integers="both")


def test_a_lora_is_what_numpy_makes_of_it(kit, tmp_path):
    rng = np.random.default_rng(0)
    w, e = rng.normal(size=(70, 50)).astype("f2"), rng.normal(size=(30, 20)).astype("f4")
    base = save(tmp_path / "base", {"m": {"weight": w}, "e": {"weight": e}, "x": np.ones(2)}).path
    a, b = rng.normal(size=(6, 50)).astype("f4"), rng.normal(size=(70, 6)).astype("f4")
    ea, eb = rng.normal(size=(2, 30)).astype("f4"), rng.normal(size=(20, 2)).astype("f4")
    arrays = {"m__lora_A__weight": a, "m__lora_B__weight": b, "e__lora_embedding_A": ea, "e__lora_embedding_B": eb}
    arrays = {f"base_model__model__{k}": v for k, v in arrays.items()}
    config = {"r": 6, "lora_alpha": 12, "use_rslora": True, "rank_pattern": {"e": 2}, "alpha_pattern": {"^e$": 4}}
    found = virtual.lora(base, adapter(tmp_path / "lora", config, **arrays))

    def product(left, right):
        total = np.zeros((left.shape[0], right.shape[1]), "f4")
        for k in range(left.shape[1]):
            total += left[:, k, None] * right[None, k]
        return total

    wanted = (w.astype("f4") + product(b, a) * np.float32(12 / np.sqrt(6))).astype("f2")
    grown = e + product(ea.T, eb.T) * np.float32(4 / np.sqrt(2))
    assert np.allclose(wanted.astype("f8"), w + b.astype("f8") @ a * 12 / np.sqrt(6), rtol=2e-3, atol=1e-2)
    assert kit.same(found["m.weight"][...], wanted)
    assert kit.same(found["m.weight"][3:41, 7:9], wanted[3:41, 7:9])
    assert kit.same(found["e.weight"][...], grown)
    assert kit.same(found["e.weight"][5, ::2], grown[5, ::2])
    # What the configuration said is pinned.
    where = virtual.write(tmp_path / "merged.json", found)
    (tmp_path / "lora" / "adapter_config.json").unlink()
    assert kit.same(load(where)["m"]["weight"], wanted)
    turned = save(tmp_path / "turned", {"m": {"weight": w.T.copy()}}).path
    some = {k: v for k, v in arrays.items() if ".e." not in k and "__e__" not in k}
    config = {"r": 6, "lora_alpha": 12, "use_rslora": True, "fan_in_fan_out": True}
    assert kit.same(virtual.lora(turned, adapter(tmp_path / "l2", config, **some))["m.weight"][...], wanted.T)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True}, {"rank_pattern": {"l.1": 2}, "alpha_pattern": {"l.0": 5}}], ids=str
)
def test_an_adapter_of_peft_is_what_peft_makes_of_it(tmp_path, options):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    model = torch.nn.ModuleDict(
        {"e": torch.nn.Embedding(50, 16), "l": torch.nn.ModuleList([torch.nn.Linear(16, 24), torch.nn.Linear(24, 16)])}
    )
    held = {n: x.detach().numpy().copy() for n, x in model.state_dict().items()}
    save_safetensors(tmp_path / "base.safetensors", held)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["l.0", "l.1", "e"], init_lora_weights=False, **options)
    tuned = peft.get_peft_model(model, config)
    tuned.save_pretrained(tmp_path / "lora")
    wanted = {n: x.detach().numpy() for n, x in tuned.merge_and_unload().state_dict().items()}
    found = virtual.lora(tmp_path / "base.safetensors", tmp_path / "lora")
    assert set(found) == set(wanted)
    for n, x in wanted.items():
        assert np.allclose(found[n][...], x, rtol=1e-5, atol=1e-5), n
        assert n.endswith("bias") or np.abs(x - held[n]).max() > 0.1


EMBEDDING, TRAINED = np.float32([[1, 2], [3, 4]]), np.float32([[5, 6], [7, 8]])
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def tied(tmp_path):
    """A function that writes a model without a head of its own, with members of its config.json."""

    def made(**config):
        home = tmp_path / f"tied{len(list(tmp_path.iterdir()))}"
        home.mkdir()
        save_safetensors(home / "model.safetensors", {TABLE: EMBEDDING, "m.weight": np.eye(2, dtype="f4")})
        (home / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
        return str(home)

    return made


PARTED = {
    "a trained embedding": ({TABLE: TRAINED}, TRAINED, EMBEDDING),
    "a trained head": ({HEAD: TRAINED}, EMBEDDING, TRAINED),
    "both": ({TABLE: TRAINED, HEAD: TRAINED}, TRAINED, TRAINED),
    "factors of the head": (
        {"lm_head.lora_A.weight": np.float32([[1, 0]]), "lm_head.lora_B.weight": np.float32([[1], [2]])},
        EMBEDDING,
        [[3, 2], [7, 4]],
    ),
    "factors alone": ({}, EMBEDDING, None),
}


@pytest.mark.parametrize("what", PARTED)
@pytest.mark.parametrize("said", [{"tie_word_embeddings": True}, {}], ids=str)
def test_an_adapter_parts_a_tied_head_from_its_embedding(kit, tmp_path, tied, what, said):
    trained, embedding, head = PARTED[what]
    base = tied(**said)
    low = adapter(tmp_path / "lora", **AB, **{f"base_model.model.{n}": x for n, x in trained.items()})
    found = virtual.lora(base, low)
    written = merge(found, tmp_path / "merged").path
    recipe = {"merge_method": "linear", "models": [{"model": f"{base}+{low}", "parameters": {"weight": 1}}]}
    mixed = blend(recipe, tmp_path / "mixed").path
    for ckpt in (found, *map(open_checkpoint, (virtual.write(tmp_path / "d.json", found), written, mixed))):
        assert kit.same(ckpt[TABLE][...], np.float32(embedding))
        assert (HEAD in ckpt) == (head is not None)
        ties = ckpt.documents["config.json"].get("tie_word_embeddings")
        if head is None:
            assert ties == said.get("tie_word_embeddings")
        else:
            assert kit.same(ckpt[HEAD][...], np.float32(head))
            assert ties is False


def test_a_head_that_is_stored_or_missing_stays_so_beside_a_trained_embedding(tmp_path, tied):
    low = adapter(tmp_path / "lora", **AB, **{f"base_model.model.{TABLE}": TRAINED})
    for config in ({"architectures": ["LlamaForSequenceClassification"]}, {"tie_word_embeddings": False}):
        assert set(virtual.lora(tied(**config), low)) == {TABLE, "m.weight"}
    both = save(
        tmp_path / "both",
        {"lm_head": {"weight": EMBEDDING}, "model": {"embed_tokens": {"weight": EMBEDDING}}, "m.weight": np.eye(2)},
        documents={"config": {"tie_word_embeddings": True}},
    ).path
    found = virtual.lora(both, low)
    assert found[HEAD][...].tolist() == EMBEDDING.tolist()
    assert found.documents["config.json"] == {"tie_word_embeddings": False}
    nested = save(
        tmp_path / "nested",
        {"model": {"embed_tokens": {"weight": EMBEDDING}}, "m": {"weight": np.eye(2)}},
        documents={"config": {"tie_word_embeddings": True}},
    ).path
    tree = load(virtual.write(tmp_path / "nested.json", virtual.lora(nested, low)))
    assert tree["lm_head"]["weight"].tolist() == EMBEDDING.tolist()


@pytest.mark.parametrize("config", [{"is_encoder_decoder": True}, {"architectures": ["BertForMaskedLM"]}], ids=str)
def test_an_embedding_that_is_tied_at_several_places_is_refused(tmp_path, tied, config):
    low = adapter(tmp_path / "lora", **AB, **{f"base_model.model.{TABLE}": TRAINED})
    with pytest.raises(errors.CheckpointError, match=r"ties 'model.embed_tokens.weight' .*\(tie_word_embeddings\)"):
        virtual.lora(tied(**config), low)


BAD_ADAPTERS = {
    "a factor without the other": ({}, {"m__lora_A__weight": np.ones((1, 2), "f4")}, "without its other factor"),
    "a strange key": ({}, {**AB, "m__bias": np.ones(1, "f4")}, r"no part of a LoRA \(1\): m.bias"),
    "no such module": ({}, {k.replace("__m__", "__q__"): v for k, v in AB.items()}, "q is no array of the base"),
    "another shape": ({}, {**AB, "base_model__model__m__lora_B__weight": np.ones((3, 1), "f4")}, r"do not make that"),
    "integers": ({}, {k: v.astype("i4") for k, v in AB.items()}, "must be floating"),
    "nothing": ({}, {}, "has no array"),
    "another rank": ({"r": 2}, AB, "have rank 1, and adapter_config.json says 2"),
    "DoRA": ({"use_dora": True}, AB, r"it says \['use_dora'\]"),
    "another base": ({"init_lora_weights": "pissa"}, AB, "'pissa', beside another base"),
    "another method": ({"peft_type": "LOHA"}, AB, "it says LOHA"),
    "no alpha": ({"lora_alpha": None}, AB, "lora_alpha is None"),
    "a slow pattern": ({"alpha_pattern": {"(a+)+b": 1}}, AB, "only names of modules"),
}


@pytest.mark.parametrize("what", BAD_ADAPTERS)
def test_an_adapter_that_does_not_fit(tmp_path, what):
    config, arrays, text = BAD_ADAPTERS[what]
    base = save(tmp_path / "base", {"m.weight": np.eye(2, dtype="f4")}).path
    with pytest.raises(errors.CheckpointError, match=text):
        virtual.lora(base, adapter(tmp_path / "lora", config, **arrays))


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_is_what_quantize_makes(kit, tmp_path, bits):
    held = {
        "m": {"w": tree(0)["w"], "odd": np.float32([[1, -2, 0.5], [0, 0, 0], [np.nan] * 3])},
        "n": np.arange(3),
        "s": np.float32(2),
    }
    where = save(tmp_path / "c", held).path
    found = virtual.quantize(where, bits=bits, keys="m.*")
    wanted = quantize(held, bits=bits, keys="m.*")
    for name in ("w", "odd"):
        for part in ("q", "scale"):
            assert kit.same(found[f"m.{name}.{part}"][...], wanted["m"][name][part])
    assert kit.same(found["m.w.q"][3:9, 5:11], np.asarray(wanted["m"]["w"]["q"])[3:9, 5:11])
    back, times = dequantize(load(virtual.write(tmp_path / "q.json", found)))
    assert times == 1
    assert kit.same(back["m"]["w"], dequantize(wanted)[0]["m"]["w"])


def test_an_average_over_a_run_pins_its_steps(tmp_path):
    manager = CheckpointManager(tmp_path / "run", keep=None)
    for step in (10, 20, 30):
        manager.save(step, {"w": np.full(2, float(step)), "epoch": step}, metrics={"loss": 1.0})
    found = virtual.ema(tmp_path / "run", decay=0.5)
    where = virtual.write(tmp_path / "run" / "ema.json", found)
    manager.save(40, {"w": np.full(2, 40.0), "epoch": 40})
    again = open_checkpoint(where)
    assert again["w"][0] == 0.25 * 10 + 0.25 * 20 + 0.5 * 30
    assert (again.step, again.leaves) == (30, {"epoch": 30})
    assert list(again.metadata) == ["meshtape.virtual"]
    assert virtual.ema(manager.directory, decay=0.5, steps=[10, 40])["w"][0] == 25
    assert manager.steps() == [10, 20, 30, 40]
    with pytest.raises(errors.CheckpointKeyError, match=r"no step \[15\]; it has \[10, 20, 30, 40\]"):
        virtual.ema(tmp_path / "run", decay=0.5, steps=[15])
    with pytest.raises(
        errors.CheckpointKeyError, match="is no run: it holds no steps of a CheckpointManager; give one"
    ):
        virtual.ema(tmp_path / "nowhere", decay=0.5)


# ----- reading --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Documents of each kind over parents of three layouts, and what they hold."""
    home = tmp_path_factory.mktemp("mixed")
    trees = [tree(i, shape=(500, 300)) for i in range(3)]
    paths = [put(home, [*trees[:i], trees[i]], layout)[i] for i, layout in enumerate(LAYOUTS)]
    (home / "lora").mkdir()
    factors = np.random.default_rng(9).normal(size=(2, 500)).astype("f4")
    low = adapter(
        home / "lora", {"r": 2}, w__lora_A__weight=factors[:, :300].copy(), w__lora_B__weight=factors.T.copy()
    )
    made = virtual.lora(virtual.rows(virtual.mean(paths), {"b": (1, 4)}), low)
    where = virtual.write(home / "all.json", virtual.with_rules(made, "w -> w, permute()\nb -> b, cast(bfloat16)"))
    return where, {n: open_checkpoint(where)[n][...] for n in open_checkpoint(where)}


def test_every_reader_reads_it(kit, mixed, tmp_path):
    where, wanted = mixed
    assert {n: a.shape for n, a in open_checkpoint(where).items()} == {n: a.shape for n, a in wanted.items()}
    for tree_of in (load(where), load(open_checkpoint(where), verify=False)):
        assert all(kit.same(tree_of[n], a) for n, a in wanted.items())
    assert verify(where).arrays == 4
    assert verify(where).files == 10
    assert diff(where, merge(where, tmp_path / "hf").path).same
    assert diff(where, reshard(where, tmp_path / "z", mesh={"m": 2}, shardings={"w": {"m": 1}}).path).same
    assert estimate(where).nbytes == open_checkpoint(where).nbytes
    mesh = mt.Mesh({"a": 2, "b": 2})
    got = load(
        where,
        like={
            n: mt.distribute(mt.asarray(a), mesh, **({"a": mt.Shard(0), "b": mt.Shard(1)} if n == "w" else {}))
            for n, a in wanted.items()
        },
    )
    assert all(kit.same(got[n], a) for n, a in wanted.items())
    rows = kit.Sharding(kit.Host({"x": 3}), (1,))
    assert kit.same(load(where, shardings=lambda path, *_: rows if path == ("w",) else None)["w"].whole(), wanted["w"])


def test_the_same_bytes_for_any_windows_threads_and_workers(mixed, tmp_path):
    where, _ = mixed
    whole = files(convert(where, tmp_path / "whole", format="zarr").path)
    for i, (limit, threads) in enumerate([(1 << 16, 1), (1 << 20, 4), (1 << 28, 3)]):
        assert (
            files(convert(where, tmp_path / str(i), format="zarr", memory_limit=limit, threads=threads).path) == whole
        )
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        assert files(convert(where, tmp_path / "p", format="zarr", client=pool, memory_limit=1 << 20).path) == whole


def test_a_window_reads_its_own_bytes_of_each_parent(tmp_path):
    array = np.zeros((4096, 1024), "f4")
    paths = [one(tmp_path, str(i), array) for i in range(8)]
    runs = [put(tmp_path, [{"w": array}], "file")[0]] * 8
    for found, shape in ((virtual.mean(paths), (1024, 256)), (virtual.mean(runs), (256, 1024))):
        tensor, box = found["w"].tensor, Box((1024, 0), shape)
        out = np.empty(box.shape, "f4")
        assert box.size * 4 == 1 << 20
        assert tensor.planned(box) <= 8.5e6
        assert sum(job() for job in tensor.only(box).jobs(box, out)) <= 8.5e6


def test_plans_of_other_sums_are_other_plans(tmp_path):
    a, b = (one(tmp_path, n, np.float32([v])) for n, v in (("a", 1), ("b", 2)))

    def key(ckpt):
        return Recipes().of(ckpt["w"].tensor)

    made = [virtual.weighted_sum(p, w) for p, w in (([a, b], [1, 2]), ([b, a], [1, 2]), ([a, b], [1, 3]))]
    assert len({key(m) for m in made}) == 3
    assert key(made[0]) == key(virtual.weighted_sum([a, b], [1, 2]))


def test_documents_of_the_base_go_along(tmp_path):
    base, other = (
        save(tmp_path / n, {"w": np.ones(2, "f4")}, documents={"config": {"torch_dtype": "float32", "name": n}}).path
        for n in "ab"
    )
    where = virtual.write(tmp_path / "d.json", virtual.cast(virtual.mean([base, other]), "bfloat16"))
    merge(where, tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"torch_dtype": "bfloat16", "name": "a"}
    assert read_header(tmp_path / "hf" / "model.safetensors").metadata["meshtape.virtual"].startswith("cast(mean(")
    with pytest.raises(errors.CheckpointError, match="is the source"):
        merge(where, base, overwrite=True)


def test_chunks_that_zarr_left_out_are_told_when_written(tmp_path):
    group = zarr.open_group(tmp_path / "z", mode="w")
    group.create_array("w", shape=(4, 4), chunks=(2, 2), dtype="f4")[:2] = 1
    found = virtual.weighted_sum([tmp_path / "z"], [2])
    with pytest.raises(errors.IncompleteCheckpoint, match="not there"):
        merge(found, tmp_path / "out")
    merge(found, tmp_path / "out", missing="fill")
    assert np.asarray(load(tmp_path / "out")["w"]).sum() == 16


# ----- mistakes -------------------------------------------------------------------------------------------------------


def test_one_error_lists_all_that_does_not_fit(tmp_path):
    a = save(tmp_path / "a", {"w": np.ones(2), "x": np.ones(2), "y": np.ones(3, "f4")}).path
    b = save(tmp_path / "b", {"w": np.ones(3), "y": np.ones(3, "f2"), "z": np.ones(1)}).path
    with pytest.raises(errors.CheckpointKeyError) as e:
        virtual.mean([a, b])
    for text in (
        f"missing in {b} (1): x",
        f"only in {b} (1): z",
        "w: (2,) and (3,)",
        "y: float32 and float16",
        "nothing was read",
    ):
        assert text in str(e.value)
    with pytest.raises(errors.CheckpointShapeError, match="shapes differ"):
        virtual.add(virtual.with_rules(a, "x -> _\ny -> _"), virtual.with_rules(b, "y -> _\nz -> _"))
    with pytest.raises(errors.CheckpointDTypeError, match="dtypes differ"):
        virtual.difference(one(tmp_path, "c", np.float32([1])), one(tmp_path, "d", np.float64([1])))
    assert virtual.add(tmp_path / "c", tmp_path / "d")["w"].dtype == np.float32


MISTAKES = {
    "weights that sum to 0": lambda a: virtual.weighted_sum([a, a], [1, -1], normalize=True),
    "weights that sum to 0 but for rounding": lambda a: virtual.weighted_sum([a] * 3, [0.1, 0.2, -0.3], normalize=True),
    "too few weights": lambda a: virtual.weighted_sum([a, a], [1]),
    "no parents": lambda a: virtual.mean([]),
    "a path where a list belongs": lambda a: virtual.mean(a),
    "NaN": lambda a: virtual.weighted_sum([a], [float("nan")]),
    "a weight beyond float32": lambda a: virtual.weighted_sum([a], [1e39]),
    "a huge integer": lambda a: virtual.add(a, a, 10**400),
    "a text": lambda a: virtual.add(a, a, "1"),
    "true": lambda a: virtual.add(a, a, True),
    "decay": lambda a: virtual.ema([a, a], decay=1.5),
    "steps of a list": lambda a: virtual.ema([a, a], decay=0.5, steps=[1]),
    "an integer dtype": lambda a: virtual.cast(a, "int8"),
    "no dtype": lambda a: virtual.cast(a, "float12"),
    "bits": lambda a: virtual.quantize(a, bits=3),
    "no such array": lambda a: virtual.rows(a, {"q": (0, 1)}),
    "rows beyond": lambda a: virtual.rows(a, {"w": (0, 3)}),
    "rows before": lambda a: virtual.rows(a, {"w": (-1, 1)}),
    "an axis beyond": lambda a: virtual.rows(a, {"w": (0, 1, 1)}),
    "rows as a number": lambda a: virtual.rows(a, {"w": 3}),
    "rules": lambda a: virtual.with_rules(a, "q -> r"),
    "a part": lambda a: virtual.mean([mt.Rules("w -> v").on(open_checkpoint(a)), a]),
    "a part below a name": lambda a: virtual.mean(
        [open_checkpoint(save(f"{a}2", {"p": {"w": np.ones(2)}}).path).below("p")]
    ),
    "a part of a virtual one": lambda a: virtual.write(f"{a}.json", mt.Rules("w -> v").on(virtual.mean([a]))),
    "nothing there": lambda a: virtual.mean([f"{a}/nowhere"]),
    "what is not virtual": lambda a: virtual.write(f"{a}.json", open_checkpoint(a)),
    "itself": lambda a: virtual.write(a, virtual.mean([a])),
    "a page without a document": lambda a: virtual.mean([a]).browse(),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_a_typed_error_before_anything_is_written(tmp_path, what):
    a = one(tmp_path, "a", np.ones(2))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(errors.CheckpointError):
        MISTAKES[what](a)
    assert [p for p in sorted(tmp_path.iterdir()) if p.name != "a2"] == before


# ----- documents ------------------------------------------------------------------------------------------------------


def edited(where, change):
    """A document with something changed, its checksum right."""
    top = json.loads(unsealed(Path(where).read_bytes())[0])
    change(top)
    Path(where).write_bytes(sealed(json.dumps(top).encode()))
    return where


def parent(**said):
    return lambda d: d["parents"][0].update(said)


def expression(**said):
    return lambda d: d["expression"].update(said)


def nested(depth):
    def change(d):
        for _ in range(depth):
            d["expression"] = {"op": "cast", "of": [d["expression"]], "dtype": "float32"}

    return change


HOSTILE = {
    "two levels up": parent(path="../../a"),
    "up within": parent(path="x/../../a"),
    "empty": parent(path=""),
    "a backslash": parent(path="..\\a"),
    "NUL": parent(path="a\0b"),
    "not normal": parent(path="/tmp/../a"),
    "a strange scheme": parent(path="gopher://x/a"),
    "a user in a URL": parent(path="s3://me@bucket/a"),
    "a number": parent(path=1),
    "no identity": lambda d: d["parents"][0].pop("identity"),
    "one more member": parent(more=1),
    "a parent twice": lambda d: d["parents"].append(dict(d["parents"][0])),
    "a parent that nobody reads": lambda d: d["parents"].append({"path": "z", "identity": "x"}),
    "no parents": lambda d: d.pop("parents"),
    "parents as text": lambda d: d.update(parents="ab"),
    "an unknown field": lambda d: d.update(more=1),
    "an unknown expression": expression(op="magic"),
    "an expression that is a list": expression(op=["sum"]),
    "an unknown parameter": expression(power=2),
    "a parameter that is missing": lambda d: d["expression"].pop("weights"),
    "a parent that is not there": expression(of=[0, 7]),
    "a negative parent": expression(of=[0, -1]),
    "a true parent": expression(of=[0, True]),
    "operands as a number": expression(of=3),
    "a bare parent": lambda d: d.update(expression=0),
    "null": lambda d: d.update(expression=None),
    "weights as texts": expression(weights=["1", "1"]),
    "a weight that is true": expression(weights=[1, True]),
    "a huge weight": expression(weights=[1, 10**400]),
    "weights for others": expression(weights=[1, 1, 1]),
    "weights of sum 0": expression(weights=[1, -1]),
    "normalize as a number": expression(normalize=1),
    "nested too deeply": nested(40),
    "nested beyond Python": nested(100_000),
    "a name twice": None,
    "version 0": lambda d: d.update(version=0),
    "version true": lambda d: d.update(version=True),
    "version 1.0": lambda d: d.update(version="1"),
    "another format": lambda d: d.update(format="meshtape.virtual2"),
    "a rule that is none": lambda d: d.update(expression={"op": "rules", "of": [d["expression"]], "rules": "a => b"}),
    "a dtype that is none": lambda d: d.update(
        expression={"op": "cast", "of": [d["expression"]], "dtype": ["float32"]}
    ),
}


@pytest.fixture
def document(tmp_path):
    paths = [one(tmp_path / "run", n, np.float32([v])) for n, v in (("a", 1), ("b", 2))]
    return virtual.write(tmp_path / "run" / "mean.json", virtual.mean(paths))


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_document_is_refused(document, what):
    if what == "a name twice":
        text = unsealed(Path(document).read_bytes())[0]
        Path(document).write_bytes(sealed(text.replace(b'"normalize": ', b'"normalize": false, "normalize": ')))
    elif what == "nested beyond Python":
        text = b'{"format": "meshtape.virtual", "version": 1, "parents": [], "expression": ' + b"[" * 100_000
        Path(document).write_bytes(text)
    else:
        edited(document, HOSTILE[what])
    with pytest.raises((errors.CorruptCheckpoint, errors.NotACheckpoint)):
        open_checkpoint(document)


def test_a_later_version_is_refused_by_name(document):
    with pytest.raises(errors.UnsupportedVersion, match="format version 3"):
        open_checkpoint(edited(document, lambda d: d.update(version=3, more={})))


def test_documents_of_the_first_version_open(document, tmp_path):
    """They know no choice among integers, and took all that an adapter trained whole for copies."""

    def older(d):
        assert d["expression"].pop("integers") == "equal"
        d["version"] = 1

    wanted = open_checkpoint(document)
    with pytest.raises(errors.CorruptCheckpoint, match="version 1 has no 'integers'"):
        open_checkpoint(edited(document, lambda d: d.update(version=1)))
    assert open_checkpoint(edited(document, older)).path == document
    assert open_checkpoint(document)["w"][...] == wanted["w"][...]
    Path(document).write_bytes(Path(document).read_bytes().replace(b'"normalize": true', b'"normalize": false'))
    with pytest.raises(errors.CorruptCheckpoint, match="crc32c"):
        open_checkpoint(document)
    base = save(tmp_path / "base", {"m": {"weight": np.eye(2, dtype="f4")}}).path
    written = virtual.write(tmp_path / "lora.json", virtual.lora(base, adapter(tmp_path / "lora", {}, **AB)))
    found = open_checkpoint(written)["m.weight"][...]

    def without(d):
        assert (d["expression"].pop("copies"), d["expression"].pop("tokens")) == (None, [])
        d["version"] = 1

    assert np.array_equal(open_checkpoint(edited(written, without))["m.weight"][...], found)


def test_too_long_is_refused(document):
    with Path(document).open("ab") as f:
        f.truncate(5 << 20)
    with pytest.raises(errors.CorruptCheckpoint, match="at most"):
        open_checkpoint(document)


def test_too_many_reads_are_refused(tmp_path):
    made = virtual.mean([one(tmp_path, "a", np.ones(1))] * 64)
    with pytest.raises(errors.CheckpointError, match="reads 4160 arrays for each"):
        virtual.mean([made] * 65)


@pytest.mark.parametrize(
    ("given", "said"),
    [((), "cast is made of 1 checkpoint, got 0"), ((0,) * 2, "cast is made of 1 checkpoint, got 2")],
)
def test_another_number_of_parents_is_refused(given, said):
    with pytest.raises(errors.CheckpointError, match=said):
        expressions.Cast(of=given, dtype="float32")


def test_more_parents_than_there_may_be_are_refused(tmp_path):
    ckpt = mt.open_checkpoint(one(tmp_path, "a", np.ones(2)))
    with pytest.raises(errors.CheckpointError, match="is made of 1 to 4,096 checkpoints, got 4097"):
        virtual.mean([ckpt] * 4097)


def test_no_flipped_byte_passes(document):
    """A byte that is another is refused: never another value."""
    whole = Path(document).read_bytes()
    for i in range(len(whole)):
        for bit in (1 << i % 8, 0x80 >> i % 8):
            Path(document).write_bytes(whole[:i] + bytes([whole[i] ^ bit]) + whole[i + 1 :])
            with pytest.raises(errors.CheckpointError):
                open_checkpoint(document)
    for cut in range(0, len(whole), 7):
        Path(document).write_bytes(whole[:cut])
        with pytest.raises(errors.CheckpointError):
            open_checkpoint(document)


def test_places_of_parents(tmp_path):
    """Beside the document and below its folder, in a sibling folder, and elsewhere: what moves together stays
    together."""
    for i, (home, place) in enumerate(
        [("p", "a"), ("p", "x/y/a"), ("p/docs", "../a"), ("p/docs", "../x/a"), ("p/q/r", None)]
    ):
        top = tmp_path / str(i)
        where = top / "p" / ("a" if place is None else place.removeprefix("../"))
        save(where, {"w": np.float32([5])})
        held = virtual.write(top / home / "d.json", virtual.mean([where]))
        said = json.loads(Path(held).read_text())["parents"][0]["path"]
        assert said == (place or str(where))
        shutil.move(top, tmp_path / f"moved{i}")
        held = held.replace(f"{top}/", f"{tmp_path}/moved{i}/")
        if place:
            assert load(held)["w"][0] == 5
        else:
            with pytest.raises(errors.ParentChanged, match="is not there any more"):
                open_checkpoint(held)


def test_documents_in_object_stores_name_no_local_files(tmp_path):
    home = f"memory://virtual-{tmp_path.name}"
    for i in (1, 3):
        save(f"{home}/run/{i}", {"w": np.full(3, float(i))})
    local = one(tmp_path, "a", np.ones(3))
    paths = [f"{home}/run/{i}" for i in (1, 3)]
    for where, said in (("avg.json", "run/1"), ("run/avg", "1"), ("docs/avg", "../run/1"), ("a/b/avg", paths[0])):
        held = virtual.write(f"{home}/{where}", virtual.mean(paths))
        assert json.loads(stored(held))["parents"][0]["path"] == said
        assert load(held)["w"].tolist() == [2, 2, 2]
        assert verify(held).arrays == 1
    with pytest.raises(errors.CheckpointExists):
        virtual.write(f"{home}/avg.json", virtual.mean(paths))
    with pytest.raises(errors.CheckpointExists):
        virtual.write(f"{home}/run", virtual.mean(paths), overwrite=True)
    with pytest.raises(errors.CheckpointError, match="local path"):
        virtual.write(f"{home}/local.json", virtual.mean([local]))
    top = json.loads(unsealed(stored(f"{home}/avg.json"))[0])
    for path in (
        local,
        f"file://{local}",
        "../../a",
        "../run/1",
        "s3://bucket/a",
        f"memory://virtual-{tmp_path.name};endpoint=x/run/1",
    ):
        top["parents"][0]["path"] = path
        store_put(f"{home}/evil.json", sealed(json.dumps(top).encode()))
        with pytest.raises(errors.CorruptCheckpoint):
            open_checkpoint(f"{home}/evil.json")
    # A local document may name what its user can read.
    assert load(virtual.write(tmp_path / "far.json", virtual.mean(paths)))["w"].tolist() == [2, 2, 2]


def test_documents_on_a_server(tmp_path):
    paths = [one(tmp_path / "run", n, np.float32([v])) for n, v in (("a", 1), ("b", 3))]
    virtual.write(tmp_path / "mean.json", virtual.mean(paths))
    virtual.write(tmp_path / "run" / "c" / "far.json", virtual.mean([tmp_path / "mean.json"]))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}"
        assert load(f"{home}/mean.json")["w"].tolist() == [2]
        with pytest.raises(errors.CorruptCheckpoint, match="is a local path"):
            open_checkpoint(f"{home}/run/c/far.json")
        server.shutdown()


def stored(where):
    from meshtape.storage.stores import store

    at, name = store.holding(where)
    return at.get(name)


def store_put(where, data):
    from meshtape.storage.stores import store

    at, name = store.holding(where)
    at.put(name, data)


def test_circles(tmp_path):
    one(tmp_path, "a", np.ones(1))
    for name in "bc":
        virtual.write(tmp_path / name, virtual.mean([tmp_path / "a"]))
    edited(tmp_path / "b", parent(path="c"))
    edited(tmp_path / "c", parent(path="b"))
    with pytest.raises(errors.CorruptCheckpoint, match=r"in a circle: .*/b reads .*/c reads .*/b"):
        open_checkpoint(tmp_path / "b")
    edited(tmp_path / "b", parent(path="b"))
    with pytest.raises(errors.CorruptCheckpoint, match="in a circle"):
        open_checkpoint(tmp_path / "b")
    made = virtual.write(tmp_path / "d", virtual.mean([tmp_path / "a"]))
    with pytest.raises(errors.CheckpointError, match="is a parent"):
        virtual.write(made, virtual.mean([made]), overwrite=True)


def test_long_chains_are_refused(tmp_path):
    where = one(tmp_path, "a", np.ones(1))
    for i in range(32):
        where = virtual.write(tmp_path / f"{i}.json", virtual.mean([where]))
    with pytest.raises(errors.CheckpointError, match="nested 33 levels deep"):
        virtual.mean([where])
    for i in range(32, 34):  # such as no version writes
        shutil.copy(tmp_path / "31.json", tmp_path / f"{i}.json")
        edited(tmp_path / f"{i}.json", parent(path=f"{i - 1}.json"))
    with pytest.raises(errors.CorruptCheckpoint, match="nested deeper"):
        open_checkpoint(tmp_path / "33.json")


def test_float8_with_scales_is_refused(tmp_path):
    quantised = {"w": np.ones((2, 2), ml_dtypes.float8_e4m3fn), "w_scale": np.full(1, 2, "f4")}
    where = save(tmp_path / "q", quantised).path
    for derive in (lambda p: virtual.mean([p]), lambda p: virtual.cast(p, "float32")):
        with pytest.raises(errors.CheckpointDTypeError, match="with its scale in 'w_scale'"):
            derive(where)
    full = virtual.with_rules(where, "w, w_scale -> w, dequantize()")
    assert virtual.mean([full])["w"][...].tolist() == [[2, 2], [2, 2]]


def test_only_documents_are_replaced(document, tmp_path):
    made = virtual.mean([tmp_path / "run" / "a"])
    with pytest.raises(errors.CheckpointExists, match="overwrite=True"):
        virtual.write(document, made)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    for name in ("config.json", "folder", "run/b"):
        with pytest.raises(errors.CheckpointExists):
            virtual.write(tmp_path / name, made, overwrite=True)
    assert (tmp_path / "config.json").read_text() == "{}"
    virtual.write(document, made, overwrite=True)
    assert load(document)["w"][0] == 1


def test_a_writer_killed_at_every_operation_leaves_one_or_the_other(kit, quick):
    paths = [one(quick, n, np.float32([v])) for n, v in (("a", 1), ("b", 2))]
    where, saw = quick / "d.json", set()
    for n in range(1, 100):
        virtual.write(where, virtual.mean(paths[:1]), overwrite=True)
        killed = kit.die_at(n, lambda: virtual.write(where, virtual.mean(paths[1:]), overwrite=True))
        saw.add(float(load(where)["w"][0]))
        if not killed:
            break
    assert saw == {1, 2}
    virtual.write(where, virtual.mean(paths), overwrite=True)
    assert sorted(p.name for p in quick.iterdir()) == ["a", "b", "d.json"]


# ----- parents that change --------------------------------------------------------------------------------------------


def change_file(home):
    save_safetensors(home / "p", {"w": np.float32([1, 3])}, overwrite=True)


def change_in_place(home):
    with (home / "p").open("r+b") as f:
        f.seek(-4, 2)
        f.write(np.float32([7]).tobytes())


def bare(home):
    save_safetensors(home / "p", {"w": np.float32([1, 2])}, checksums=False)


def zarr_of_others(home, values=(1, 2)):
    zarr.save_group(str(home / "p"), w=np.float32(values))


def virtual_parent(home, scale=1.0, **options):
    save(home / "q", {"w": np.float32([1, 2])}, overwrite=True)
    virtual.write(home / "p", virtual.weighted_sum([home / "q"], [scale]), **options)


CHANGES = {
    "ours": (lambda h: one(h, "p", np.float32([1, 2])), lambda h: one(h, "p", np.float32([1, 3]), overwrite=True)),
    "a file": (lambda h: save_safetensors(h / "p", {"w": np.float32([1, 2])}), change_file),
    "a file without sums": (bare, change_in_place),
    "Zarr by others": (zarr_of_others, lambda h: zarr_of_others(h, (1, 3))),
    "NumPy": (lambda h: np.save(h / "p.npy", np.float32([1, 2])), lambda h: np.save(h / "p.npy", np.float32([1, 3]))),
    "virtual": (virtual_parent, lambda h: virtual_parent(h, 2.0, overwrite=True)),
    "virtual, by its own parent": (virtual_parent, lambda h: one(h, "q", np.float32([1, 3]), overwrite=True)),
    "gone": (lambda h: one(h, "p", np.float32([1, 2])), lambda h: shutil.rmtree(h / "p")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_parent_that_changed_is_named(tmp_path, what):
    make, change = CHANGES[what]
    make(tmp_path)
    path = next(p for p in (tmp_path / "p", tmp_path / "p.npy") if p.exists())
    where = virtual.write(tmp_path / "d.json", virtual.weighted_sum([path], [2]))
    name = next(iter(open_checkpoint(where)))
    assert load(where)[name].tolist() == [2, 4]
    opened = open_checkpoint(where)
    time.sleep(0.02)  # more than the grain of a file system's clock
    change(tmp_path)
    for read in (open_checkpoint, load, verify, lambda p: merge(p, tmp_path / "out")):
        with pytest.raises(errors.ParentChanged, match=str(tmp_path / "[pq]")):
            read(where)
    with contextlib.suppress(errors.CheckpointReplaced, errors.IncompleteCheckpoint, errors.ParentChanged):
        assert opened[name][...].tolist() == [2, 4]


def test_damage_of_a_parent_is_found(tmp_path):
    base = one(tmp_path, "a", np.arange(4096.0))
    where = virtual.write(tmp_path / "d.json", virtual.mean([base, base]))
    chunk = next(p for p in Path(base).rglob("c.*") if p.is_file())
    data = bytearray(chunk.read_bytes())
    data[9] ^= 1
    chunk.write_bytes(data)
    for read in (load, verify, lambda p: merge(p, tmp_path / "out")):
        with pytest.raises(errors.CorruptCheckpoint):
            read(where)
    bare(tmp_path)
    report = verify(virtual.mean([tmp_path / "p"]))
    assert report.uncovered == [str(tmp_path / "p")]
    assert "nothing tells whether they are whole" in str(report)
    virtual.write(tmp_path / "one.json", virtual.mean([tmp_path / "p"]))
    virtual.write(tmp_path / "two.json", virtual.mean([tmp_path / "one.json"]))
    found = CliRunner().invoke(main, ["verify", str(tmp_path / "two.json")])
    assert found.exit_code == 1
    assert str(tmp_path / "p") in found.output
    assert "one.json" not in found.output


def test_parents_are_pinned_anew(tmp_path):
    safetensors.numpy.save_file({"w": np.float32([1, 3])}, tmp_path / "p.safetensors")
    where = virtual.write(tmp_path / "d.json", virtual.add(tmp_path / "p.safetensors", tmp_path / "p.safetensors", 2.0))
    os.utime(tmp_path / "p.safetensors")
    with pytest.raises(errors.ParentChanged, match="repin"):
        open_checkpoint(where)
    virtual.write(where, virtual.repin(where), overwrite=True)
    assert load(where)["w"].tolist() == [3, 9]


def test_the_innermost_document_whose_parent_is_another_is_named(tmp_path):
    safetensors.numpy.save_file({"w": np.float32([1, 3])}, tmp_path / "p.safetensors")
    one, two, three = (tmp_path / f"{n}.json" for n in ("one", "two", "three"))
    virtual.write(one, virtual.mean([tmp_path / "p.safetensors"]))
    virtual.write(two, virtual.mean([one, tmp_path / "p.safetensors"]))
    virtual.write(three, virtual.mean([one, two]))
    assert verify(three).uncovered == [str(tmp_path / "p.safetensors")]
    os.utime(tmp_path / "p.safetensors")
    for stale in (one, two, three):  # each as the error says
        for read in (open_checkpoint, load):
            with pytest.raises(errors.ParentChanged, match=rf"repin of {stale} pins .* innermost first") as told:
                read(three)
            assert "icechunk" not in str(told.value)
        virtual.write(stale, virtual.repin(stale), overwrite=True)
    assert load(three)["w"].tolist() == [1, 3]


def test_a_tied_model_beside_another_is_told(tmp_path):
    for name, more in (("tied", ()), ("free", ("lm_head.weight",))):
        held = {n: np.ones((2, 2), "f4") for n in ("model.embed_tokens.weight", *more)}
        save_safetensors(tmp_path / f"{name}.safetensors", held)
    tied, free = (str(tmp_path / f"{n}.safetensors") for n in ("tied", "free"))
    said = rf"{tied} ties lm_head\.weight to model\.embed_tokens\.weight: mt\.storage\.blend"
    for pair in ((tied, free), (free, tied)):
        for made in (virtual.mean, lambda both: virtual.difference(*both)):
            with pytest.raises(errors.CheckpointKeyError, match=said):
                made(pair)
    models = [{"model": m, "parameters": {"weight": 1}} for m in (tied, free)]
    blend({"merge_method": "linear", "models": models}, tmp_path / "out")  # as the error says


def test_an_embedding_of_the_adapter_beside_its_factors(tmp_path):
    base = save(tmp_path / "base", {"m.weight": np.eye(2, dtype="f4")}).path
    held = {**AB, "base_model__model__m__base_layer__weight": np.eye(2, dtype="f4") * 2}
    assert virtual.lora(base, adapter(tmp_path / "lora", **held))["m.weight"][...].tolist() == [[4, 0], [4, 2]]


def keep_writing(path, stop):
    generation = 0
    while not stop.is_set():
        generation += 1
        save(path, {n: np.full((40, 90), generation % 100, "f4") for n in "ab"}, overwrite=True, step=generation)
        time.sleep(0.01)


def test_a_writer_beside_readers_mixes_nothing(tmp_path):
    """Parent ``moving`` is overwritten all the time: what is read is one of its generations, or an error."""
    fixed = save(tmp_path / "fixed", {n: np.zeros((40, 90), "f4") for n in "ab"}).path
    moving = save(tmp_path / "moving", {n: np.zeros((40, 90), "f4") for n in "ab"}).path
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    process = context.Process(target=keep_writing, args=(moving, stop))
    process.start()
    told, seen = 0, set()
    try:
        for i in range(6000):
            if i >= 60 and told + len(seen) > 3:  # on a busy machine the writer may not have had its turn
                break
            try:
                made = virtual.weighted_sum([fixed, moving], [1, 1])
                if i % 3 == 0:
                    found = load(made)
                elif i % 3 == 1:
                    found = load(merge(made, tmp_path / "out", overwrite=True).path)
                else:
                    found = load(virtual.write(tmp_path / "d.json", made, overwrite=True))
            except (errors.CheckpointReplaced, errors.ParentChanged):
                told += 1
                continue
            values = {float(v) for n in "ab" for v in np.unique(np.asarray(found[n]))}
            assert len(values) == 1, values
            seen |= values
    finally:
        stop.set()
        process.join(200)
        process.kill()
    assert told + len(seen) > 3


# ----- the command line and the browser -------------------------------------------------------------------------------


def test_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i in (1, 2):
        CheckpointManager("run").save(i, {"w": np.full((2, 2), float(i), "f4")})
    adapter("lora", w__lora_A__weight=np.ones((1, 2), "f4"), w__lora_B__weight=np.ones((2, 1), "f4"))
    Path("r.rules").write_text("w -> v\n")
    a, b = "run/step-00000001", "run/step-00000002"
    calls = {
        "mean": [a, b],
        "sum": [a, b, "--weights", "0.5,2"],
        "ema": ["run", "--decay", "0.5", "--steps", "1,2"],
        "difference": [a, b],
        "add": [a, b, "--scale", "2"],
        "lora": [a, "lora", "--scale", "0.5"],
        "cast": [a, "--dtype", "float16"],
        "quantize": [a, "--bits", "4"],
        "rules": [a, "--rules", "r.rules"],
        "rows": [a, "--rows", "w:1:2:1"],
        "blend": ["blend.yml", "--seed", "3", "--keys", "w"],
    }
    Path("blend.yml").write_text(f"merge_method: passthrough\nmodels: [{{model: {a}}}]\n")

    def run(*args, code=0):
        done = CliRunner().invoke(main, list(args))
        assert done.exit_code == code, done.output
        return done.output

    for kind, args in calls.items():
        said = json.loads(run("derive", kind, *args, "--out", f"{kind}.json", "--json"))
        assert said["path"] == str(tmp_path / f"{kind}.json")
        assert said["arrays"] == len(open_checkpoint(f"{kind}.json"))
        assert said["expression"] == str(open_checkpoint(f"{kind}.json").computed.expression)
    assert load("sum.json")["w"][0, 0] == 4.5
    assert load("lora.json")["w"][0, 0] == 2
    assert load("rows.json")["w"].shape == (2, 1)
    assert "mean(run/step-00000001" in run("ls", "mean.json")
    assert "made by" in run("show", "mean.json", "w")
    assert "sound" in run("verify", "mean.json")
    run("diff", "mean.json", a, code=1)
    run("merge", "mean.json", "out")
    run("estimate", "mean.json")
    run("tree", "mean.json")
    assert "--overwrite" in run("derive", "mean", a, "--out", "mean.json", code=1)
    run("derive", "mean", a, "--out", "mean.json", "--overwrite")
    for wrong in (
        ["mean", a, "--decay", "1"],
        ["ema", a],
        ["add", a],
        ["rows", a, "--rows", "w"],
        ["rows", a, "--rows", "w:0:1", "--rows", "w:1:2:1"],
        ["sum", a, "--weights", "x"],
    ):
        run("derive", *wrong, "--out", "wrong.json", code=2)
    assert not Path("wrong.json").exists()


def test_the_browser_shows_none_from_elsewhere(tmp_path):
    inside, outside = one(tmp_path / "site", "a", np.ones(1)), one(tmp_path, "secret", np.ones(1))
    virtual.write(tmp_path / "site" / "good.json", virtual.mean([inside]))
    virtual.write(tmp_path / "site" / "bad.json", virtual.mean([inside, outside]))
    site, named = Site([tmp_path / "site"]), Site([tmp_path / "site" / "bad.json"])
    assert [e.name for e in site.entries(site.place("0"))] == ["a", "bad.json", "good.json"]
    assert site.open("0/good.json").ckpt.kind == "virtual"
    assert named.open("0").ckpt.kind == "virtual"  # which was asked for by name
    with pytest.raises(errors.NotACheckpoint, match="outside of what is shown"):
        site.open("0/bad.json")


def test_no_document_lies_among_the_files_of_a_parent_by_others(tmp_path):
    """They are what that parent is known by."""
    held = {"w": np.ones(3, np.float32)}
    (tmp_path / "hf" / "sub").mkdir(parents=True)
    safetensors.numpy.save_file(held, tmp_path / "hf" / "model.safetensors")
    group = zarr.open_group(tmp_path / "z", mode="w")
    group.create_array("s/w", data=held["w"])
    convert(tmp_path / "hf", tmp_path / "dcp", format="dcp")
    os.symlink("hf", tmp_path / "link")
    save(tmp_path / "ours", held)
    inner = virtual.write(tmp_path / "inner.json", virtual.mean([tmp_path / "hf", tmp_path / "ours"]))
    outer = virtual.write(tmp_path / "outer.json", virtual.mean([inner]))
    for parent, place in (
        ("hf", "hf/h.json"),
        ("inner.json", "hf/h.json"),
        ("outer.json", "hf/h.json"),
        ("z", "z/h.json"),
        ("z", "z/s/w/h.json"),
        ("dcp", "dcp/h.json"),
        ("dcp", "dcp/sub/h.json"),
        ("hf", "link/h.json"),
        ("link", "hf/h.json"),
    ):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(errors.CheckpointError, match=r"one of the files by which its parent .* is known"):
            virtual.write(tmp_path / place, virtual.cast(tmp_path / parent, "float16"))
        assert sorted(tmp_path.rglob("*")) == before
    for parent, place in (("hf", "hf/sub/h.json"), ("hf/model.safetensors", "hf/h.json"), ("ours", "ours.json")):
        at = virtual.write(tmp_path / place, virtual.cast(tmp_path / parent, "float16"))
        assert load(at)["w"].dtype == np.float16
        os.remove(at)
    assert load(outer)["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("target", ["p", "p/.", "link", "home/p"])
def test_no_command_writes_over_a_parent(tmp_path, monkeypatch, target):
    """Also where the parent is the file in a folder of another writer, and where links lead there."""
    monkeypatch.chdir(tmp_path)
    os.symlink("p", "link")
    os.symlink(".", "home")
    for name in ("p", "q"):
        Path(name).mkdir()
        safetensors.numpy.save_file({"w": np.ones(3, np.float32)}, f"{name}/model.safetensors")
    mean = virtual.write("mean.json", virtual.mean(["p", "q"]))
    again = virtual.write("again.json", virtual.cast(mean, "float16"))
    for source in (mean, again, "p", "p/model.safetensors"):
        for way in (merge, functools.partial(convert, format="zarr"), functools.partial(convert, format="dcp")):
            with pytest.raises(errors.CheckpointError, match="is the source"):
                way(source, target, overwrite=True)
    assert load("again.json")["w"].tolist() == [1, 1, 1]


def test_other_options_of_a_url_lead_to_the_same_parent(s3):
    for name in ("a", "b"):
        save(f"{s3.url}/{name}", {"w": np.ones(3)})
    mean = virtual.write(f"{s3.url}/mean.json", virtual.mean([f"{s3.url}/a", f"{s3.url}/b"]))
    there = {k: v for k, v in os.environ.items() if k.startswith("AWS_ENDPOINT_URL")}
    for options in ({"storage_class": "STANDARD_IA"}, {"endpoint": next(iter(there.values()))}):
        for source, target in ((mean, "b"), (f"{s3.url}/a", "a")):
            with pytest.raises(errors.CheckpointError, match="is the source"):
                merge(source, mt.storage.options(f"{s3.url}/{target}", **options), overwrite=True)
    elsewhere = mt.storage.options("s3://bucket/b", endpoint="http://127.0.0.1:9")
    assert not store.lies_in(f"{s3.url}/b", elsewhere)


@pytest.mark.parametrize("name", ["meshtape.json", "zarr.json", ".zgroup"])
def test_a_document_takes_no_name_of_a_file_of_checkpoints(tmp_path, name):
    save(tmp_path / "a", {"w": np.ones(3)})
    (tmp_path / "hf").mkdir()
    with pytest.raises(errors.CheckpointError, match="is a file of checkpoints themselves"):
        virtual.write(tmp_path / "hf" / name, virtual.cast(tmp_path / "a", "float16"))
    assert not any((tmp_path / "hf").iterdir())


def test_no_document_replaces_its_own_parent_through_a_link(tmp_path):
    held = save(tmp_path / "a", {"w": np.ones(3)}).path
    (tmp_path / "docs").mkdir()
    os.symlink("docs", tmp_path / "link")
    parent = virtual.write(tmp_path / "docs" / "p.json", virtual.mean([held]))
    for name in ("docs/p.json", "link/p.json"):
        with pytest.raises(errors.CheckpointError, match="is a parent of what is to be written there"):
            virtual.write(tmp_path / name, virtual.cast(parent, "float32"), overwrite=True)
    assert load(parent)["w"].dtype == np.float64
