"""Blending: each formula by hand, the same bytes for any windows and workers, every bad input told before a byte is
written, and mergekit as the oracle."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshtape as mt
from meshtape.errors import (
    CheckpointError,
    CheckpointKeyError,
    CheckpointShapeError,
    CorruptCheckpoint,
    Lossy,
    ParentChanged,
)
from meshtape.storage import blend, blended, diff, extract_lora, save, save_safetensors, virtual
from meshtape.storage.base.sealed import sealed, unsealed
from meshtape.storage.blending.config import METHODS

BF16 = np.dtype(ml_dtypes.bfloat16)
METHOD_NAMES = sorted(METHODS)


def model(where: Path, arrays: dict[str, Any], documents: dict[str, Any] | None = None) -> str:
    """A Hugging Face directory of arrays (lists are float32)."""
    where.mkdir()
    held = {n: np.asarray(a, np.float32) if isinstance(a, (list, float)) else a for n, a in arrays.items()}
    save_safetensors(where / "model.safetensors", held, metadata={"format": "pt"})
    for name, said in (documents or {}).items():
        (where / name).write_text(json.dumps(said))
    return str(where)


def config(method: str, models: list[str], base: str | None = None, weights: Any = None, **parameters: Any) -> Any:
    """A configuration; weights of 1 where the method has them."""
    own = method in METHODS and "weight" in METHODS[method].each
    held = [
        {"model": m, "parameters": {"weight": 1 if weights is None else weights[i]} if own else {}}
        for i, m in enumerate(models)
    ]
    out = {"merge_method": method, "models": held, "parameters": {k.rstrip("_"): v for k, v in parameters.items()}}
    return out if base is None else out | {"base_model": base}


# ----- known answers --------------------------------------------------------------------------------------------------

X = [[1, -2, 3], [-1, -4, 1]]
COS = 1 / np.sqrt(2)
KNOWN: dict[str, tuple[str, Any, list[Any], dict[str, Any], Any]] = {
    # name: method, base, models, weights and parameters, result
    "mean": ("linear", None, [[1], [3]], {}, [2]),
    "weighted": ("linear", None, [[1], [3]], {"weights": (1, 3)}, [2.5]),
    "sum": ("linear", None, [[1], [3]], {"normalize": False}, [4]),
    "0-d": ("linear", None, [1.0, 3.0], {}, 2),
    "one model": ("linear", None, [[5, 7]], {"weights": (3,)}, [5, 7]),
    "task": ("task_arithmetic", [1, 1, 1], X, {"lambda_": 0.5}, [0, -3, 2]),
    "task, normalised": ("task_arithmetic", [1, 1, 1], X, {"weights": (3, 1), "normalize": True}, [0.5, -2.5, 2.5]),
    "ties": ("ties", [0, 0, 0], X, {}, [1, -3, 2]),  # the sum of the first is 0, which counts as positive
    "trim": ("ties", [0] * 4, [[1, -2, 3, 4]], {"density": 0.5}, [0, 0, 3, 4]),
    "trim, equal ones": ("ties", [0] * 4, [[2, -2, 2, 2]], {"density": 0.5}, [2, -2, 0, 0]),
    "trim to at least one": ("ties", [0] * 4, [[1, -2, 3, 4]], {"density": 0.01}, [0, 0, 0, 4]),
    "trim to none": ("ties", [7, 7], [[1, 2]], {"density": 0}, [7, 7]),
    "trim, rescaled": ("ties", [0] * 4, [[1, -2, 3, 4]], {"density": 0.5, "rescale": True}, [0, 0, 30 / 7, 40 / 7]),
    "dare keeps all": (
        "dare_ties",
        [1, 1, 1],
        X,
        {"density": 1},
        [-1, -7, 3],
    ),
    "dare keeps none": ("dare_linear", [7, 7], [[1, 2]], {"density": 0}, [7, 7]),
    "della keeps all": ("della", [1, 1, 1], X, {"density": 1}, [-1, -3, 3]),  # a mean of those that agree
    "della keeps none": ("della", [7, 7], [[1, 2]], {"density": 0}, [7, 7]),
    "della keeps all, all signs": ("della_linear", [1, 1, 1], X, {"density": 1, "lambda_": 0.5}, [0, -3, 2]),
    "breadcrumbs": ("breadcrumbs", [0] * 5, [[1, -2, 3, 4, -5]], {"density": 0.4, "gamma": 0.2}, [0, 0, 3, 4, 0]),
    "breadcrumbs, none at the top": (
        "breadcrumbs_ties",
        [0] * 4,
        [[1, -2, 3, 4]],
        {"density": 0.5, "gamma": 0},
        [0, 0, 3, 4],
    ),
    "slerp": ("slerp", [1, 0], [[0, 1]], {"t": 0.5}, [COS, COS]),
    "slerp of equals": ("slerp", [1, 2], [[1, 2]], {"t": 0.5}, [1, 2]),
    "multislerp of what no model changed": ("multislerp", [1, 2], [[1, 2]] * 3, {}, [1, 2]),
    "multislerp of zeros": ("multislerp", None, [[0, 0]] * 3, {}, [0, 0]),
    "slerp of opposites": ("slerp", [1, 0], [[-1, 0]], {"t": 0.25}, [0.5, 0]),
    "slerp of zero": ("slerp", [0, 0], [[3, 4]], {"t": 0.5}, [1.5 * np.sqrt(2), 2 * np.sqrt(2)]),
    "nuslerp": ("nuslerp", None, [[1, 0], [0, 1]], {}, [COS, COS]),
    "nuslerp beyond the second": ("nuslerp", None, [[1, 0], [0, 1]], {"weights": (-1, 3)}, [-COS, COS]),
    "nuslerp of differences": ("nuslerp", [1, 1], [[2, 1], [1, 2]], {}, [1 + COS, 1 + COS]),
    "nuslerp by rows": (
        "nuslerp",
        None,
        [[[1, 0], [0, 2]], [[0, 1], [0, 4]]],
        {"nuslerp_flatten": False},
        [[COS, COS], [0, 3]],
    ),
    "nuslerp by columns": (
        "nuslerp",
        None,
        [[[1, 0], [0, 2]], [[0, 0], [1, 4]]],
        {"nuslerp_flatten": False, "nuslerp_row_wise": True},
        [[COS, 0], [COS, 3]],
    ),
    "multislerp": ("multislerp", None, [[1, 0, 0], [0, 1, 0], [0, 0, 1]], {}, [3**-0.5] * 3),
    "karcher": ("karcher", None, [[1, 0, 0], [0, 1, 0], [0, 0, 1]], {}, [3**-0.5] * 3),
    "karcher keeps the mean length": ("karcher", None, [[2, 0], [0, 4]], {}, [3 * COS, 3 * COS]),
    "model stock, orthogonal": ("model_stock", [1, 1], [[2, 1], [1, 2]], {}, [1, 1]),
    "model stock, parallel": ("model_stock", [0, 0], [[2, 2], [4, 4]], {}, [3, 3]),
    "model stock by rows": (
        "model_stock",
        [[0, 0], [0, 0]],
        [[[2, 0], [1, 1]], [[0, 2], [3, 3]]],
        {"filter_wise": True},
        [[0, 0], [2, 2]],
    ),
    "sce": ("sce", [0, 0, 0], [[1, 0, 0], [0, 3, 0]], {"select_topk": 0.5}, [0, 3, 0]),
    "nearswap": ("nearswap", [0, 0, 1, 1], [[0.25, 2, 1, -1]], {"t": 0.5}, [0.25, 0.5, 1, 0.5]),
    "fusion": (
        "arcee_fusion",
        [[0.0, 0, 0, 0], [0, 0, 0, 0]],
        [[[1, 0, 0, 0], [0.5, 0.5, 0.5, 9]]],
        {},
        [[0] * 4, [0, 0, 0, 9]],
    ),
    "ram": ("ram", [1, 1, 1, 1], [[3, 1, 2, 1], [1, 5, 4, 1]], {}, [3, 5, 3, 1]),
    "ram, small ones": ("ram", [0, 0], [[1, 0.25], [0, 2]], {"epsilon": 0.5}, [1, 2]),
    "ram, NaN": ("ram", [1, 2], [[np.nan, 2.5], [1.25, 2.25]], {}, [np.nan, 2.375]),
    "ram plus": ("ramplus_tl", [0, 0, 0, 0], [[2, 0, 4, 0], [0, 8, 4, 4]], {"r": 0.5, "alpha": 0.75}, [2.75, 10, 4, 5]),
    "passthrough": ("passthrough", None, [[1, 2]], {"scale": 0.5}, [0.5, 1]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(tmp_path: Path, name: str) -> None:
    method, base, models, options, wanted = KNOWN[name]
    places = [model(tmp_path / f"m{i}", {"w": x}) for i, x in enumerate(models)]
    where = None if base is None else model(tmp_path / "base", {"w": base})
    got = blended(config(method, places, where, **options))["w"].read()
    np.testing.assert_allclose(got, np.asarray(wanted, np.float32), rtol=2e-7, atol=1e-12)


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16)], ids=str)
def test_short_dtypes_are_rounded_after_each_operation(tmp_path: Path, dtype: np.dtype) -> None:
    rng = np.random.default_rng(0)
    base, a, b = (rng.normal(size=500).astype(dtype) for _ in range(3))
    places = [model(tmp_path / n, {"w": x}) for n, x in (("base", base), ("a", a), ("b", b))]
    w = [np.asarray(x, np.float32).astype(dtype) for x in (0.3, 0.7)]
    deltas = [(x - base) * k for x, k in zip((a, b), w, strict=True)]  # NumPy rounds each to the dtype
    total = (deltas[0].astype(np.float32) + deltas[1].astype(np.float32)).astype(dtype)
    got = blended(config("task_arithmetic", places[1:], places[0], (0.3, 0.7)))["w"].read()
    assert got.dtype == dtype
    assert np.array_equal(got, base + total)


def test_random_choices_follow_their_probabilities_and_keep_the_sum(tmp_path: Path) -> None:
    rows = np.tile(np.arange(1, 101, dtype=np.float32), (400, 1))
    base, tuned = model(tmp_path / "base", {"w": np.zeros_like(rows)}), model(tmp_path / "tuned", {"w": rows})
    for method, options in (("dare_linear", {}), ("della_linear", {"epsilon": 0.2})):
        got = blended(config(method, [tuned], base, density=0.3, **options), seed=5)["w"].read()
        kept = got != 0
        assert abs(kept.mean() - 0.3) < 0.01
        np.testing.assert_allclose(np.unique((got / rows)[kept]), (rows.sum() / rows[kept].sum()), rtol=1e-6)
        low, high = kept[:, :20].mean(), kept[:, -20:].mean()  # the ranks 0.1 and 0.9 in each row
        wanted = (0.3, 0.3) if method == "dare_linear" else (0.1 + 0.4 * 0.096, 0.1 + 0.4 * 0.904)
        assert abs(low - wanted[0]) < 0.02
        assert abs(high - wanted[1]) < 0.02


def test_float8_is_computed_in_float32_and_equal_integers_pass(tmp_path: Path) -> None:
    f8 = np.dtype(ml_dtypes.float8_e4m3fn)
    held = [{"w": np.asarray(x, f8), "n": np.arange(3), "mask": np.asarray([True, False])} for x in ([1, 2], [2, 448])]
    places = [model(tmp_path / f"m{i}", h) for i, h in enumerate(held)]
    got = blended(config("linear", places))
    assert got["w"].dtype == f8
    assert got["w"].read().astype(np.float32).tolist() == [1.5, 224]
    assert got["n"].read().tolist() == [0, 1, 2]
    assert got["mask"].read().tolist() == [True, False]
    with pytest.raises(Lossy, match="would be"):
        blended(config("linear", places, normalize=False, weights=(2, 2)))["w"].read()


OVERFLOWS: dict[str, tuple[str, Any, Any, list[Any], dict[str, Any]]] = {
    # name: method, dtype, base, models, weights and parameters; the first element passes the range
    "sum of differences": ("task_arithmetic", "float16", [0, 0], [[4e4, 1], [4e4, 1]], {}),
    "a difference": ("task_arithmetic", "float16", [-4e4, 1], [[4e4, 1]], {"weights": (0.5,)}),
    "a difference that is dropped": ("ties", "float16", [-4e4, 1], [[4e4, 1]], {"density": 0}),
    "task": ("task_arithmetic", BF16, [0, 0], [[3e38, 1], [3e38, 1]], {}),
    "linear": ("linear", BF16, None, [[3e38, 1], [3e38, 1]], {"normalize": False}),
    "linear, float32": ("linear", "float32", None, [[3e38, 1], [3e38, 1]], {"normalize": False}),
    "linear, float64": ("linear", "float64", None, [[1.7e308, 1], [1.7e308, 1]], {"normalize": False}),
    "ties": ("ties", "float32", [0, 0], [[3e38, 1], [3e38, 1]], {}),
    "dare": ("dare_linear", "float32", [-3e38, 1], [[3e38, 1]], {}),
    "della": ("della", "float64", [-1.7e308, 1], [[1.7e308, 1]], {}),
    "breadcrumbs": ("breadcrumbs", "float32", [0, 0], [[3e38, 1]], {"lambda_": 2}),
    "scale": ("passthrough", "float32", None, [[3e38, 1]], {"scale": 2}),
    "a direction": ("slerp", "float32", [-3e38, 1], [[3e38, 1]], {"t": 2}),
}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_overflow_is_told_where_it_happens_and_counted_where_it_is_allowed(tmp_path: Path, name: str) -> None:
    method, dtype, base, models, options = OVERFLOWS[name]
    kind = np.dtype(dtype)
    places = [model(tmp_path / f"m{i}", {"w": np.asarray(x, kind)}) for i, x in enumerate(models)]
    where = None if base is None else model(tmp_path / "base", {"w": np.asarray(base, kind)})
    said = config(method, places, where, **options)
    with pytest.raises(Lossy, match=r"1 became infinite; first at \[0\]"):
        blended(said)["w"].read()
    with pytest.raises(Lossy, match="would be"):
        blend(said | {"out_dtype": "float64"}, tmp_path / "out")
    report = blend(said, tmp_path / "allowed", allow_overflow=True)
    assert report.losses["w"].overflow == 1
    assert np.isfinite(mt.load(report.path)["w"].__array__().astype(np.float64)).tolist() == [False, True]


NOT_FINITE: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    # name: method, dtype, the model, parameters; the base is 0 and -1
    "NaN, dare": ("dare_ties", "float32", [np.nan, 1], {"density": 0.5}),
    "NaN, della": ("della", BF16, [np.nan, 1], {"density": 0.5}),
    "infinity, ties": ("ties", "float16", [np.inf, 1], {"density": 0.5, "rescale": True}),
    "NaN, sce": ("sce", "float32", [np.nan, 1], {}),
    "infinity, sce": ("sce", "float32", [1, np.inf], {}),
    "a square of sce": ("sce", "float64", [1e200, 1], {}),
    "variances of sce": ("sce", "float32", [1e30, 2e30], {"select_topk": 0.5}),
    "NaN, slerp": ("slerp", "float32", [np.nan, 1], {"t": 0.5}),
    "a square of slerp": ("slerp", "float64", [1e200, 1], {"t": 0.5}),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_a_sum_over_an_array_that_is_not_finite_is_refused_by_name(tmp_path: Path, name: str) -> None:
    method, dtype, x, options = NOT_FINITE[name]
    base, tuned, zero = (
        model(tmp_path / n, {"w": np.asarray(v, dtype)}) for n, v in (("base", [0, -1]), ("tuned", x), ("z", [0, -1]))
    )
    models = [tuned, zero] if method == "sce" else [tuned]
    with pytest.raises(CheckpointError, match="'w': a sum over the whole array is not finite"):
        blend(config(method, models, base, **options), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_values_that_are_not_finite_stay_where_no_sum_is_taken(tmp_path: Path) -> None:
    base, tuned = (model(tmp_path / n, {"w": x}) for n, x in (("base", [0, 0, 0]), ("tuned", [np.nan, np.inf, 2])))
    for method, options in (("linear", {}), ("ties", {}), ("dare_ties", {}), ("breadcrumbs", {"density": 1})):
        spec = METHODS[method]
        said = config(method, [tuned], base if spec.base == "required" else None, **options)
        report = blend(said, tmp_path / method)
        assert mt.load(report.path)["w"].tolist()[1:] == [np.inf, 2]
        assert not report.losses


# ----- the same bytes whoever makes them ------------------------------------------------------------------------------


def _parents(tmp_path: Path) -> list[str]:
    """A base as a Hugging Face directory, one model of ours in several shards, and one as foreign as bfloat16
    allows."""
    rng = np.random.default_rng(1)
    shapes = {
        "model.embed_tokens.weight": (60, 48),
        "model.layers.0.w": (300, 130),
        "model.layers.1.w": (300, 130),
        "model.norm.weight": (130,),
    }
    base = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    tuned = [{n: x + 0.01 * rng.normal(size=x.shape).astype(np.float32) for n, x in base.items()} for _ in range(2)]
    first = model(tmp_path / "base", base, {"config.json": {"num_hidden_layers": 2, "dtype": "float32"}})
    second = str(tmp_path / "ours")
    mesh = mt.Mesh({"a": 3})
    save(second, {n: mt.distribute(mt.asarray(x), mesh, a=mt.Shard(0)) for n, x in tuned[0].items()})
    return [first, second, model(tmp_path / "tuned", tuned[1])]


PARAMETERS: dict[str, dict[str, Any]] = {
    "slerp": {"t": [0, 0.5, 1]},
    "nearswap": {"t": 0.1},
    "ramplus_tl": {"epsilon": 0.2},
    "ties": {"density": 0.3},
    "dare_ties": {"density": 0.5},
    "dare_linear": {"density": 0.4},
    "della": {"density": 0.5},
    "della_linear": {"density": 0.5, "epsilon": 0.2},
    "breadcrumbs": {"density": 0.5},
    "breadcrumbs_ties": {"density": 0.5, "rescale": True},
    "sce": {"select_topk": 0.3},
    "nuslerp": {"nuslerp_flatten": False},
    "model_stock": {"filter_wise": True},
}


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_the_same_bytes_for_any_windows_threads_and_workers(tmp_path: Path, method: str) -> None:
    base, *models = _parents(tmp_path)
    spec = METHODS[method]
    said = config(method, models[: spec.most], base if spec.base == "required" else None, **PARAMETERS.get(method, {}))
    lazy = blended(said, seed=3)
    whole = {n: a.read() for n, a in lazy.items()}
    parts = {n: np.concatenate([lazy[n][:7], lazy[n][7:]]) for n in lazy}
    assert all(np.array_equal(whole[n], parts[n]) for n in lazy)
    runs: list[Callable[[str], Any]] = [
        lambda to: blend(said, to, seed=3),
        lambda to: blend(said, to, seed=3, memory_limit=64 << 10, threads=1),
        lambda to: blend(said, to, seed=3, threads=3, format="zarr"),
    ]
    if method in ("ties", "dare_ties", "nuslerp", "linear"):
        pool = ProcessPoolExecutor(2)
        runs.append(lambda to: blend(said, to, seed=3, client=pool, memory_limit=256 << 10))
    for i, run in enumerate(runs):
        report = run(str(tmp_path / f"out{i}"))
        assert report.made["model.layers.1.w"].method == method
        made = mt.open_checkpoint(report.path)
        assert list(made) == list(whole)
        for n in made:
            assert np.array_equal(made[n].read(), whole[n]), (i, n)
    if method.startswith(("dare", "della")):
        assert not np.array_equal(blended(said, seed=4)["model.layers.0.w"].read(), whole["model.layers.0.w"])


def test_an_interrupted_blend_goes_on(tmp_path: Path) -> None:
    base, *models = _parents(tmp_path)
    said, target = config("ties", models, base, density=0.3), str(tmp_path / "out")

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        blend(said, target, memory_limit=256 << 10, threads=1, progress=stop)
    report = blend(said, target, memory_limit=256 << 10, threads=1)
    assert report.resumed > 0
    assert all(np.array_equal(mt.load(target)[n], a.read()) for n, a in blended(said).items())


# ----- layers, parameters and documents -------------------------------------------------------------------------------


def _layered(where: Path, n: int, value: float, **more: Any) -> str:
    arrays = {
        "model.embed_tokens.weight": [[value]],
        **{f"model.layers.{i}.w": [value + i] for i in range(n)},
        "model.norm.weight": [value],
    }
    return model(
        where,
        arrays | more,
        {"config.json": {"num_hidden_layers": n, "torch_dtype": "float32"}, "generation_config.json": {}},
    )


def test_slices_number_their_layers_anew(tmp_path: Path) -> None:
    a, b = _layered(tmp_path / "a", 3, 10.0), _layered(tmp_path / "b", 3, 20.0)
    text = f"""
merge_method: passthrough
slices:
  - sources: [{{model: {a}, layer_range: [0, 2]}}]
  - sources: [{{<<: {{layer_range: [0, 1]}}, model: {b}, layer_range: [1, 3], parameters: {{scale: [{{filter: layers.2, value: 2}}, {{value: 1.0}}]}}}}]
dtype: bfloat16
"""
    report = blend(text, tmp_path / "out", drop="*.norm.*")
    made = mt.open_checkpoint(report.path)
    assert [float(made[f"model.layers.{i}.w"].read()[0]) for i in range(4)] == [10, 11, 21, 44]
    assert "model.norm.weight" not in made
    assert made["model.embed_tokens.weight"].read().tolist() == [[10]]
    told = made.documents["config.json"]
    assert told["num_hidden_layers"] == 4
    assert told["torch_dtype"] == "bfloat16"
    assert {"generation_config.json", "mergekit_config.yml"} <= set(made.documents)
    size = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert size == 2 * 5 == report.total_size
    assert report.made["model.layers.3.w"].sources == (f"{b}: model.layers.2.w",)
    assert "scale" in report.table()


LAYER_ENTRIES: dict[str, tuple[Any, Any, Any, bool]] = {
    # name: of a (4 layers), of b (3), of the layers a0 a1 a2 b1 b2, whether a note speaks of it
    "layer_types": (["f", "s", "f", "s"], ["x", "y", "z"], ["f", "s", "f", "y", "z"], False),
    "no_rope_layers": ([1, 1, 1, 0], [0, 1, 1], [1, 1, 1, 1, 1], False),
    "intermediate_size": ([1, 2, 3, 4], [5, 6, 7], [1, 2, 3, 6, 7], False),
    "hybrid_override_pattern": ("M-*M", "MM-", "M-*M-", False),
    "mlp_only_layers": ([0, 3], [2], [0, 4], False),
    "mlp_layer_types": (["d", "s", "s", "s"], None, None, True),
    "max_window_layers": (4, 3, 5, False),
    "first_k_dense_replace": (1, 1, 1, False),
    "num_dense_layers": (1, 2, 1, True),  # a0 and b1, and what lies between is not
    "decoder_sparse_step": (3, 3, 3, True),
    "moe_layer_freq": (2, 2, 2, False),  # the layers move by two, or not
    "num_kv_shared_layers": (2, 2, 2, True),
    "block_types": (["r", "a"], ["r", "a"], ["r", "a"], True),
    "eos_token_id": ([1, 2, 3, 4], 1, [1, 2, 3, 4], False),
}


@pytest.mark.parametrize("stacked", [True, False])
def test_the_work_of_planning_grows_with_the_layers_and_no_faster(tmp_path: Path, stacked: bool) -> None:
    """Counted are the calls of Python: four times as many layers, from slices or from one model, are four times as
    many."""

    def planned(n: int) -> int:
        path = model(tmp_path / str(n), {f"layers.{i}.w": [float(i)] for i in range(1 if stacked else n)})
        said: Any = {"merge_method": "passthrough", "models": [{"model": path}]}
        if stacked:
            said = {
                "merge_method": "passthrough",
                "slices": [{"sources": [{"model": path, "layer_range": [0, 1]}]}] * n,
            }
        calls = 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            made = blended(said)
        finally:
            sys.setprofile(None)
        assert len(made) == n
        return calls

    planned(1)  # what is imported or cached the first time
    assert planned(240) < 5 * planned(60)


@pytest.mark.parametrize("inner", [False, True])
def test_entries_about_layers_follow_the_slices(tmp_path: Path, inner: bool) -> None:
    places = []
    for i, n in enumerate((4, 3)):
        said = {"num_hidden_layers": n, **{k: v[i] for k, v in LAYER_ENTRIES.items() if v[i] is not None}}
        places.append(_layered(tmp_path / "ab"[i], n, 1.0))
        (Path(places[i]) / "config.json").write_text(json.dumps({"text_config": said} if inner else said))
    a, b = places
    slices = [{"sources": [{"model": m, "layer_range": r}]} for m, r in ((a, [0, 3]), (b, [1, 3]))]
    report = blend({"merge_method": "passthrough", "slices": slices}, tmp_path / "out")
    told = mt.open_checkpoint(report.path).documents["config.json"]
    told = told["text_config"] if inner else told
    assert told == {"num_hidden_layers": 5, **{k: v[2] for k, v in LAYER_ENTRIES.items() if v[2] is not None}}
    assert [n.split("'")[1] for n in report.notes] == [k for k, v in LAYER_ENTRIES.items() if v[3]]
    again = {"merge_method": "passthrough", "slices": [{"sources": [{"model": a, "layer_range": [0, 4]}]}]}
    report = blend(again, tmp_path / "again")
    assert mt.open_checkpoint(report.path).documents["config.json"] == mt.open_checkpoint(a).documents["config.json"]
    assert report.notes == []


def test_gradients_run_over_the_layers_and_filters_choose(tmp_path: Path) -> None:
    a, b = _layered(tmp_path / "a", 3, 0.0), _layered(tmp_path / "b", 3, 1.0)
    said = config(
        "linear",
        [a, b],
        normalize=False,
        weights=(0, [{"filter": "layers", "value": [0, 1, 3]}, {"filter": "*", "value": "1e1"}]),
    )
    got = blended(said)
    assert [float(got[f"model.layers.{i}.w"].read()[0]) for i in range(3)] == [0, 2, 9]  # 0 · 1, 1 · 2, 3 · 3
    assert got["model.norm.weight"].read().tolist() == [10]


def test_parameters_of_a_blend_hold_for_each_model_and_those_of_the_base_are_noted(tmp_path: Path) -> None:
    a, b = model(tmp_path / "a", {"w": [0.0, 0.0]}), model(tmp_path / "b", {"w": [1.0, 2.0]})
    said = {"merge_method": "ties", "base_model": a, "parameters": {"weight": 3, "density": 0.5, "normalize": False}}
    models = [{"model": a, "parameters": {"weight": 2}}, {"model": b}]
    report = blend(said | {"models": models}, tmp_path / "out")
    assert mt.load(report.path)["w"].tolist() == [0, 6]
    assert report.notes == [f"ties: parameters of the base have no effect (weight of {a})"]


def test_a_tied_head_is_blended_from_the_embedding_of_the_model_that_lacks_it(tmp_path: Path) -> None:
    a, b = _layered(tmp_path / "a", 1, 2.0), _layered(tmp_path / "b", 1, 4.0, **{"lm_head.weight": [[8.0]]})
    got = blended(config("linear", [a, b]))
    assert got["lm_head.weight"].read().tolist() == [[5.0]]
    assert got.documents["config.json"]["tie_word_embeddings"] is False


def test_filters_know_a_tied_head_by_its_own_name(tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"
    a, b = model(tmp_path / "a", {name: [[2.0]]}), model(tmp_path / "b", {name: [[4.0]], "lm_head.weight": [[8.0]]})
    weights = [[{"filter": "lm_head", "value": n}, {"value": 1}] for n in (1, 3)]
    got = blended(config("linear", [a, b], weights=tuple(weights)))
    assert [got[n].read().tolist() for n in (name, "lm_head.weight")] == [[[3.0]], [[6.5]]]


# ----- vocabularies ---------------------------------------------------------------------------------------------------


def _tokenizer(*tokens: str, added: tuple[str, ...] = ()) -> dict[str, Any]:
    plain = {t: i for i, t in enumerate(tokens)}
    more = [{"id": len(tokens) + i, "content": t, "special": True} for i, t in enumerate(added)]
    return {
        "tokenizer.json": {
            "version": "1.0",
            "model": {"type": "WordLevel", "vocab": plain, "unk_token": "a"},
            "added_tokens": more,
        }
    }


@pytest.mark.parametrize(
    ("tokenizer", "wanted"),
    [
        ({"source": "union"}, [[15], [25], [3], [40], [4]]),
        ({"source": "base"}, [[15], [25], [3]]),
        ({"source": "base", "pad_to_multiple_of": 4}, [[15], [25], [3], [43 / 3]]),
        ({"source": "base", "tokens": {"z": {"source": {"kind": "zero"}}}}, [[15], [25], [3], [0]]),
        (
            {"source": "base", "tokens": {"z": {"source": {"kind": "zero"}}}, "pad_to_multiple_of": 5},
            [[15], [25], [3], [0], [43 / 4]],
        ),
        ({"source": "base", "tokens": {"a": {"source": "B", "force": True}}}, [[20], [25], [3]]),
        (
            {"source": "base", "tokens": {"z": {"source": {"kind": "model_token", "model": "B", "token": "b"}}}},
            [[15], [25], [3], [30]],
        ),
    ],
)
def test_vocabularies_are_joined(tmp_path: Path, tokenizer: dict[str, Any], wanted: list[list[float]]) -> None:
    # The second model has b and a in another order, lacks c, and has d and <s>; its fifth row is padding.
    a = model(
        tmp_path / "A",
        {"model.embed_tokens.weight": [[10], [20], [3]]},
        _tokenizer("a", "b", "c") | {"config.json": {"vocab_size": 3}},
    )
    b = model(
        tmp_path / "B",
        {"model.embed_tokens.weight": [[30], [20], [40], [4], [99]]},
        _tokenizer("b", "a", "d", added=("<s>",)),
    )
    tokenizer = json.loads(json.dumps(tokenizer).replace('"B"', json.dumps(b)))
    got = blended(config("linear", [a, b]) | {"tokenizer": tokenizer})
    assert got["model.embed_tokens.weight"].read().tolist() == np.asarray(wanted, np.float32).tolist()
    assert got.documents["config.json"]["vocab_size"] == len(wanted)
    told = got.documents["tokenizer.json"]
    if tokenizer["source"] == "union":
        assert [(t["id"], t["content"], t["special"]) for t in told["added_tokens"]] == [(4, "<s>", True)]
        assert told["model"]["vocab"] == {"a": 0, "b": 1, "c": 2, "d": 3, "<s>": 4}


# ----- LoRA -----------------------------------------------------------------------------------------------------------


def test_an_adapter_is_applied_and_extracted(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    w, a, b = (rng.normal(size=s).astype(np.float32) for s in ((6, 5), (2, 5), (6, 2)))
    base = model(
        tmp_path / "base", {"layers.0.w.weight": w, "layers.0.v.weight": w, "norm.weight": np.ones(3, np.float32)}
    )
    tuned = {"layers.0.w.weight": w + 2 * b @ a, "layers.0.v.weight": w, "norm.weight": np.zeros(3, np.float32)}
    pair = {f"base_model.model.layers.0.w.lora_{k}.weight": x for k, x in (("A", a), ("B", b))}
    pair["base_model.model.norm.weight"] = np.zeros(3, np.float32)  # modules_to_save
    (tmp_path / "lora").mkdir()
    save_safetensors(tmp_path / "lora" / "adapter_model.safetensors", pair)
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    got = blended(config("passthrough", [f"{base}+{tmp_path / 'lora'}"]))
    np.testing.assert_allclose(got["layers.0.w.weight"].read(), tuned["layers.0.w.weight"], rtol=1e-6)
    assert np.array_equal(got["layers.0.w.weight"][2:4, 1:3], got["layers.0.w.weight"].read()[2:4, 1:3])
    assert not got["norm.weight"].read().any()
    with pytest.raises(CheckpointError, match="trained whole"):
        virtual.lora(base, tmp_path / "lora", scale=0.5)
    for choice in ({"rank": 2}, {"energy": 1.0}):
        out = str(tmp_path / f"out-{next(iter(choice))}")
        report = extract_lora(model(tmp_path / f"tuned-{next(iter(choice))}", tuned), base, out, **choice)
        assert report.ranks == {"layers.0.w": 2}
        assert report.left == ["norm.weight"]
        assert report.energy["layers.0.w"] > 1 - 1e-6
        back = blended(config("passthrough", [f"{base}+{out}"]))["layers.0.w.weight"].read()
        np.testing.assert_allclose(back, tuned["layers.0.w.weight"], rtol=1e-4, atol=1e-4)
        with pytest.raises(mt.errors.CheckpointExists, match="written to a new directory"):
            extract_lora(base, base, out, **choice)


def test_arrays_that_have_no_place_in_an_adapter_do_not_limit_its_rank(tmp_path: Path) -> None:
    """Those that are equal, and tables whose rows are looked up."""
    rng = np.random.default_rng(0)
    base = {
        "e.token_type_embeddings.weight": np.ones((2, 8)),
        "small.weight": np.ones((2, 8)),
        "w.weight": np.ones((8, 8)),
    }
    tuned = base | {"w.weight": base["w.weight"] + rng.normal(size=(8, 3)) @ rng.normal(size=(3, 8))}
    tuned["e.token_type_embeddings.weight"] = np.zeros((2, 8))
    a, b = model(tmp_path / "base", base), model(tmp_path / "tuned", tuned)
    report = extract_lora(b, a, tmp_path / "out", rank=4)
    assert (report.ranks, report.left) == ({"w": 4}, ["e.token_type_embeddings.weight"])
    c = model(tmp_path / "more", tuned | {"small.weight": np.zeros((2, 8))})
    with pytest.raises(
        CheckpointError,
        match=r"rank 4 is above that of 'small.weight' with shape \(2, 8\); give rank=2 or energy=, or .* drop=",
    ):
        extract_lora(c, a, tmp_path / "none", rank=4)
    assert not (tmp_path / "none").exists()
    extract_lora(c, a, tmp_path / "two", rank=2)
    extract_lora(c, a, tmp_path / "without", rank=4, drop=["small.weight"])


def test_adapters_of_models_whose_matrices_lie_the_other_way_round(tmp_path):
    rng = np.random.default_rng(4)
    names = {"h.0.c_attn": (5, 3), "h.0.c_proj": (3, 3), "score": (3, 3), "other": (2, 3)}  # (in, out) the first two
    base, tuned = {}, {}
    for name, shape in names.items():
        base[f"{name}.weight"] = w = rng.normal(size=shape).astype("f4")
        tuned[f"{name}.weight"] = w + np.outer(*(rng.normal(size=n) for n in shape)).astype("f4")
    for name, x in (("base", base), ("tuned", tuned)):
        (tmp_path / name).mkdir()
        save_safetensors(tmp_path / name / "model.safetensors", x)
        said = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
        (tmp_path / name / "config.json").write_text(json.dumps(said))
    extract_lora(tmp_path / "tuned", str(tmp_path / "base"), tmp_path / "lora", rank=1)
    held = mt.open_checkpoint(tmp_path / "lora")
    assert held["base_model.model.h.0.c_attn.lora_A.weight"].shape == (1, 5)
    assert held["base_model.model.other.lora_A.weight"].shape == (1, 3)
    file = tmp_path / "lora" / "adapter_config.json"
    said = json.loads(file.read_text())
    told = said["fan_in_fan_out"], said["base_model_name_or_path"], said["task_type"]
    assert told == (True, str(tmp_path / "base"), "CAUSAL_LM")
    for flag in (True, False):  # PEFT writes that of the last layer that it looked at
        file.write_text(json.dumps(said | {"fan_in_fan_out": flag}))
        found = virtual.lora(tmp_path / "base", tmp_path / "lora")
        for name, wanted in tuned.items():
            np.testing.assert_allclose(found[name].read(), wanted, rtol=1e-4, atol=1e-5)
    extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "plain", rank=1, fan_in_fan_out=False)
    assert mt.open_checkpoint(tmp_path / "plain")["base_model.model.h.0.c_attn.lora_A.weight"].shape == (1, 3)


# ----- bad input ------------------------------------------------------------------------------------------------------

A, B, BASE = "A", "B", "BASE"
BAD: dict[str, tuple[Any, str]] = {
    "no text": ({"merge_method": ["ties"], "models": [{"model": A}]}, "no merge_method ['ties']"),
    "method": ({"merge_method": "tiess", "models": [{"model": A}]}, "no merge_method 'tiess'; close is 'ties'"),
    "key": (config("linear", [A, B]) | {"dtipe": "float32"}, "no key 'dtipe'; close is 'dtype'"),
    "parameter": (config("linear", [A, B], normalise=True), "no key 'normalise'; close is 'normalize'"),
    "no weight": ({"merge_method": "linear", "models": [{"model": A}, {"model": B}]}, "parameter 'weight' is missing"),
    "no number": (config("linear", [A, B], weights=("much", 1)), "'weight' is a number, got 'much'"),
    "a number beyond float32": (
        config("linear", [A, B], weights=(1e39, 1)),
        r"'weight': 1e\+39 is no number that float32 holds",
    ),
    "a factor beyond float32": (config("ties", [A], BASE, lambda_=1e39), "'lambda': 1e.39 is no number that float32 h"),
    "a scale beyond float32": (config("passthrough", [A], scale=-1e39), "'scale': -1e.39 is no number that float32 h"),
    "a place beyond float32": (config("slerp", [A], BASE, t=1e39), "'t': 1e.39 is no number that float32 holds"),
    "a number beyond numbers": (config("linear", [A], weights=(10**400,)), "integers of at most 64 bits"),
    "a number beyond float16": (
        config("ties", [A], BASE, (7e4,)) | {"dtype": "float16"},
        "'weight': 70000.0 is no number that float16 holds",
    ),
    "a sum beyond float32": (
        config("linear", [A, B], weights=(3e38, 3e38)),
        "the sum of 'weight': 6e.38 is no number that float32 holds",
    ),
    "truth as a number": (config("linear", [A, B], weights=(True, 1)), "'weight' is a number, got True"),
    "text as a number": (config("ties", [A], BASE, density=".5"), "'density' is a number, got '.5'"),
    "density": (config("ties", [A, B], BASE, density=1.5), "'density' is from 0 to 1, got 1.5"),
    "epsilon": (config("della", [A, B], BASE, density=0.9), "density 0.9 plus or minus epsilon 0.15"),
    "weights without a sum": (config("linear", [A, B], weights=(1, -1)), "weights sum to 0"),
    "task weights without a sum": (
        config("task_arithmetic", [A, B], BASE, (1, -1), normalize=True),
        "weights sum to 0",
    ),
    "no base": (config("ties", [A, B]), "ties needs base_model"),
    "one model": (config("slerp", [A], t=0.5), "slerp needs base_model"),
    "two for slerp": (config("slerp", [A, B], BASE, t=0.5), "slerp needs 1 model beside the base, got 2"),
    "one for nuslerp": (config("nuslerp", [A]), "nuslerp needs 2 models, got 1"),
    "one for model stock": (config("model_stock", [A], BASE), "needs at least 2 models beside the base, got 1"),
    "twice": (config("linear", [A, A]), "named more than once"),
    "models and slices": (
        {"merge_method": "linear", "models": [{"model": A}], "slices": [{}]},
        "one of models:, slices:",
    ),
    "layers": (
        {"merge_method": "passthrough", "slices": [{"sources": [{"model": A, "layer_range": [0, 9]}]}]},
        "has 1 layer",
    ),
    "dtype": (config("linear", [A, B]) | {"dtype": "int8"}, "dtype: is float16, bfloat16, float32 or float64"),
    "tokenizer": (config("linear", [A, B]) | {"tokenizer_source": "union"}, "has no tokenizer.json"),
    **{
        f"{p} of a model": (
            {"merge_method": m, "base_model": BASE, "models": [{"model": A, "parameters": {"weight": 1, p: 1}}]},
            f"{m}: {p} holds for all models; give it under parameters: of a slice or of the configuration",
        )
        for m, p in (("della_linear", "lambda"), ("ties", "normalize"), ("dare_ties", "rescale"), ("sce", "int8_mask"))
    },
    "t of a model": (
        {"merge_method": "slerp", "base_model": BASE, "models": [{"model": A, "parameters": {"t": 0.5}}]},
        "slerp: t holds for all models",
    ),
    "nothing": (" ", "the configuration is empty"),
    "chat template by name": (config("linear", [A, B]) | {"chat_template": "chatml"}, "text of a Jinja template"),
    "chat template of keys": (config("linear", [A, B]) | {"chat_template": {"a": 1}}, "text of a Jinja template"),
    "revision": (config("linear", [A, {"model": {"path": B, "revision": "main"}}]), "no key 'revision'; it has path"),
    "at a revision": (config("linear", [A, "B@main"]), "models of a hub and their revisions are downloaded first"),
    "model of a hub": (config("linear", [A, "some/model"]), "models of a hub and their revisions are downloaded first"),
    "zeros": (
        config("linear", [A, B]) | {"tokenizer": {"tokens": {"a": {"source": {"kind": "zeros"}}}}},
        "kind: is zero or model_token, got 'zeros'",
    ),
    "a token's row": (config("linear", [A, B]) | {"tokenizer": {"tokens": {"a": "zero"}}}, "'a' has keys"),
    "filter": (
        config("linear", [A, B], weights=(1, [{"filter": "mpl", "value": 2}, {"value": 1}])),
        "filter: matches no array: 'mpl'",
    ),
    "weights of nuslerp without a sum": (
        config("nuslerp", [A, B], weights=(1, -1)),
        "weights sum to 0, by which nuslerp",
    ),
    "weights of nuslerp of zero": (config("nuslerp", [A, B], weights=(0, 0)), "weights sum to 0, by which nuslerp"),
    "key twice": (
        "merge_method: linear\nmodels:\n- {model: A, parameters: {weight: 1, weight: 3}}",
        "the key 'weight' is given twice",
    ),
    "block twice": ("merge_method: linear\nparameters: {}\nparameters: {}", "the key 'parameters' is given twice"),
    "no file": ("nothing.yml", "no file of a configuration"),
    "no YAML": ("merge_method: [", "no YAML"),
    "an unknown method with parameters": (
        config("tise", [A], BASE, lamda=1) | {"models": [{"model": A, "parameters": {"wieght": 1}}]},
        r"no merge_method 'tise'; close is 'ties'.*\n.*no key 'wieght'; close is 'weight'.*\n.*no key 'lamda'",
    ),
    "opposite": (config("multislerp", ["P", "M", "Z"]), "multislerp has no result"),
}


def test_aliases_of_yaml_make_no_endless_configuration():
    rows = [f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]" for i in range(12)]
    text = "\n".join(["a: &a [x, x]", *rows, "merge_method: linear", "models: *m"])
    with pytest.raises(mt.errors.CheckpointError, match="at most 100,000 values"):
        mt.storage.blend(text, "out")


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_name(tmp_path: Path, name: str) -> None:
    said, wanted = BAD[name]
    held = {A: 1.0, B: 2.0, BASE: 0.0, "P": 1.0, "M": -1.0, "Z": 0.0}
    places = {n: model(tmp_path / n, {"layers.0.w": [x, x], "norm.weight": [x]}) for n, x in held.items()}
    text = json.dumps(said)
    for n, where in places.items():
        text = text.replace(json.dumps(n), json.dumps(where))
    with pytest.raises(CheckpointError, match=wanted.replace("[", r"\[")):
        blend(json.loads(text), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.part").exists()


def test_one_error_lists_everything(tmp_path: Path) -> None:
    a = model(
        tmp_path / "a",
        {
            "x": [1.0],
            "y": [1.0],
            "n": np.arange(2),
            "only": [1.0],
            "q": np.zeros(2, ml_dtypes.float8_e4m3fn),
            "q_scale": [1.0],
        },
    )
    b = model(
        tmp_path / "b",
        {
            "x": [1.0, 2.0],
            "y": np.arange(1),
            "n": np.arange(2, dtype=np.int32),
            "q": np.zeros(2, ml_dtypes.float8_e4m3fn),
            "q_scale": [1.0],
        },
    )
    with pytest.raises(CheckpointError) as e:
        blend(config("linear", [a, b]), tmp_path / "out")
    for said in ("shapes differ", "'x'", "dtypes cannot be blended", "'y'", "'n'", "no such key: 'only'", "dequantize"):
        assert said in str(e.value)
    with pytest.raises(CheckpointShapeError):
        blend(config("linear", [a, b]), tmp_path / "out", keys="x")
    with pytest.raises(CheckpointKeyError, match="nothing matches"):
        blend(config("linear", [a]), tmp_path / "out", drop=["q*", "*.inv_freq"])
    c = model(tmp_path / "c", {"n": np.ones(2, np.int64)})
    with pytest.raises(CheckpointError, match=r"'n' is int64.*blend\(…, integers='first'\) .* --integers first"):
        blend(config("linear", [a, c]), tmp_path / "out", keys="n")
    for integers, wanted in (("first", a), ("last", c)):
        got = blend(config("linear", [a, c]), tmp_path / integers, keys="n", integers=integers)
        assert np.array_equal(mt.open_checkpoint(got.path)["n"].read(), mt.open_checkpoint(wanted)["n"].read())
    lazy = blended(config("linear", [a, c]), keys="n", integers="last")
    where = virtual.write(tmp_path / "lazy.json", lazy)
    assert np.array_equal(mt.open_checkpoint(where)["n"].read(), mt.open_checkpoint(c)["n"].read())
    with pytest.raises(CheckpointError, match="one of the sources"):
        blend(config("linear", [a]), a, keys="x", overwrite=True)
    assert not (tmp_path / "out").exists()


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    base = model(
        tmp_path / "base", {"m.weight": np.zeros((2, 3), np.float32), "n.weight": np.zeros((2, 2), np.float32)}
    )
    held = {
        "m.lora_A.weight": (1, 4),
        "m.lora_B.weight": (2, 1),
        "n.lora_A.weight": (1, 2),
        "o.lora_A.weight": (1, 2),
        "o.lora_B.weight": (2, 1),
        "x": (1,),
    }
    (tmp_path / "lora").mkdir()
    save_safetensors(
        tmp_path / "lora" / "adapter_model.safetensors", {n: np.zeros(s, np.float32) for n, s in held.items()}
    )
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps({"r": 1, "lora_alpha": 1}))
    with pytest.raises(CheckpointError) as e:
        blended(config("passthrough", [f"{base}+{tmp_path / 'lora'}"]))
    for said in (
        "m.weight has the shape (2, 3), and its factors (1, 4) and (2, 1) do not make that",
        "n has 'n.lora_A.weight' alone",
        "o is no array of the base",
        "no part of a LoRA (1): x",
    ):
        assert said in str(e.value)
    other = model(
        tmp_path / "other", {"m.weight": np.ones((2, 3), np.float32), "n.weight": np.zeros((2, 3), np.float32)}
    )
    for options, text in (
        ({"rank": 1}, "shapes of 'n.weight'"),
        ({}, "rank= or energy="),
        ({"energy": 2}, "at most 1"),
    ):
        with pytest.raises(CheckpointError, match=text):
            extract_lora(other, base, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["linear", "ties", "della"])
def test_a_blend_has_a_document(tmp_path: Path, method: str) -> None:
    rng = np.random.default_rng(3)
    held = [{"layers.0.w": rng.normal(size=(64, 48)).astype(np.float32), "norm.weight": [1.0, i]} for i in range(3)]
    places = [model(tmp_path / n, h) for n, h in zip("abc", held, strict=True)]
    base = None if method == "linear" else places[2]
    said = config(method, places[:2], base, **({} if method == "linear" else {"density": 0.5}))
    lazy = blended(said, seed=4)
    wanted = {n: a.read() for n, a in lazy.items()}
    where = virtual.write(tmp_path / "blend.json", lazy)
    made = mt.open_checkpoint(where)
    assert made.kind == "virtual"
    assert list(made) == list(wanted)
    assert made.documents["mergekit_config.yml"] == lazy.documents["mergekit_config.yml"]
    assert np.array_equal(made["layers.0.w"][5:9, 3], wanted["layers.0.w"][5:9, 3])
    assert mt.verify(where).files == (3 if base is None else 4)
    assert diff(where, mt.merge(where, tmp_path / "out").path).same
    assert diff(where, blend(said, tmp_path / "blended", seed=4).path).same
    nested = virtual.write(
        tmp_path / "n.json", virtual.mean([virtual.cast(lazy, "float64"), virtual.cast(where, "float64")])
    )
    np.testing.assert_array_equal(mt.load(nested)["layers.0.w"], wanted["layers.0.w"].astype(np.float64))
    top = json.loads(unsealed(Path(where).read_bytes())[0])
    for change, told in (
        ({"seed": 1.5}, "whole number"),
        ({"config": "/etc/hostname"}, "config is a mapping"),
        ({"config": {**top["expression"]["config"], "merge_method": "magic"}}, "no merge_method"),
        ({"config": config("linear", ["x"])}, "names 1 model,"),
    ):
        text = json.dumps({**top, "expression": {**top["expression"], **change}})
        (tmp_path / "bad.json").write_bytes(sealed(text.encode()))
        with pytest.raises(CorruptCheckpoint, match=told):
            mt.open_checkpoint(tmp_path / "bad.json")
    save_safetensors(tmp_path / "a" / "model.safetensors", {**held[0], "norm.weight": np.ones(2)}, overwrite=True)
    with pytest.raises(ParentChanged, match=str(tmp_path / "a")):
        mt.open_checkpoint(where)


def test_a_blend_with_an_adapter_has_a_document(tmp_path: Path) -> None:
    base = model(tmp_path / "base", {"m.weight": np.zeros((2, 3), np.float32)})
    lora = tmp_path / "lora"
    lora.mkdir()
    factors = {"m.lora_A.weight": np.ones((1, 3), np.float32), "m.lora_B.weight": np.ones((2, 1), np.float32)}
    save_safetensors(lora / "adapter_model.safetensors", factors)
    (lora / "adapter_config.json").write_text(json.dumps({"r": 1, "lora_alpha": 2}))
    where = virtual.write(tmp_path / "d.json", blended(config("linear", [f"{base}+{lora}", base])))
    assert (mt.load(where)["m.weight"] == 1).all()


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_arrays_of_every_form(tmp_path: Path, method: str) -> None:
    spec, n = METHODS[method], METHODS[method].most or 2
    forms = {"scalar": (), "empty": (0, 3), "one": (1,), "column": (5, 1), "conv": (2, 3, 2, 2)}
    rng = np.random.default_rng(2)
    for dtype in (np.float32, np.float64, BF16):
        held = [{k: rng.uniform(0.5, 1.5, s).astype(dtype) for k, s in forms.items()} for _ in range(n + 1)]
        places = [model(tmp_path / f"{np.dtype(dtype).name}{i}", h) for i, h in enumerate(held)]
        base = places[-1] if spec.base == "required" else None
        got = blended(config(method, places[:n], base, **PARAMETERS.get(method, {})))
        for k, s in forms.items():
            x = got[k].read()
            assert x.shape == s
            assert x.dtype == dtype
            assert np.isfinite(x.astype(np.float64)).all(), k


def test_the_configuration_names_the_dtype_that_was_written(tmp_path):
    for name, dtype in (("a", ml_dtypes.bfloat16), ("b", np.float32)):
        (tmp_path / name).mkdir()
        save_safetensors(tmp_path / name / "model.safetensors", {"w": np.ones((2, 2)).astype(dtype)})
        (tmp_path / name / "config.json").write_text(json.dumps({"dtype": np.dtype(dtype).name}))
    blend(config("linear", [str(tmp_path / "a"), str(tmp_path / "b")]), tmp_path / "out")
    held = mt.open_checkpoint(tmp_path / "out")
    assert held["w"].dtype == np.float32
    assert held.documents["config.json"] == {"dtype": "float32"}


LORA_KINDS: dict[str, tuple[dict[str, Any], str | None, bool]] = {
    # config.json, the task of PEFT, and whether PEFT may know the modules by other names
    "text": ({"model_type": "llama", "vocab_size": 5, "architectures": ["LlamaForCausalLM"]}, "CAUSAL_LM", False),
    "T5": (
        {"model_type": "mt5", "vocab_size": 5, "architectures": ["MT5ForConditionalGeneration"]},
        "SEQ_2_SEQ_LM",
        False,
    ),
    "speech": (
        {"model_type": "whisper", "vocab_size": 5, "architectures": ["WhisperForConditionalGeneration"]},
        None,
        False,
    ),
    "images": ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, None, True),
    "both": (
        {"model_type": "llava", "text_config": {}, "architectures": ["LlavaForConditionalGeneration"]},
        None,
        True,
    ),
    "renamed": ({"model_type": "nomic_bert", "vocab_size": 5, "architectures": ["NomicBertModel"]}, None, True),
    "nothing": ({}, None, False),
}


@pytest.mark.parametrize("name", LORA_KINDS)
def test_the_task_of_an_adapter_is_one_that_its_model_has(tmp_path: Path, name: str) -> None:
    said, task, noted = LORA_KINDS[name]
    base = model(tmp_path / "base", {"m.q.weight": np.eye(4)}, {"config.json": said})
    report = extract_lora(model(tmp_path / "tuned", {"m.q.weight": np.ones((4, 4))}), base, tmp_path / "out", rank=1)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["task_type"] == task
    assert [said["model_type"] in n and "virtual.lora" in n for n in report.notes] == [True] * noted


def test_modules_that_peft_does_not_adapt_are_left(tmp_path: Path) -> None:
    arrays = {f"backbone.layers.0.mixer.{n}.weight": np.eye(4) for n in ("in_proj", "out_proj")}
    tuned = model(tmp_path / "tuned", {n: x + 1 for n, x in arrays.items()})
    for kind, left in (("mamba", ["backbone.layers.0.mixer.out_proj.weight"]), ("bamba", [])):
        base = model(tmp_path / kind, arrays, {"config.json": {"model_type": kind, "vocab_size": 5}})
        report = extract_lora(tuned, base, tmp_path / f"{kind}-lora", rank=1)
        assert (report.left, len(report.ranks)) == (left, 2 - len(left))
