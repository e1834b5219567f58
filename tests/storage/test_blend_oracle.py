"""mergekit, transformers and peft as oracles of blending, in an environment of their own.

``MESHTAPE_PEERS`` names its Python: ``MESHTAPE_PEERS=peers/bin/python pytest -m slow
tests/storage/test_blend_oracle.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshtape as mt
from meshtape.storage import blend, blended, extract_lora, virtual

PEERS = os.environ.get("MESHTAPE_PEERS", "")
SCRIPT = Path(__file__).with_name("blend_peers.py")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PEERS, reason="MESHTAPE_PEERS names no Python with mergekit, transformers and peft"),
]
W = [0.3, 0.7, 0.45]


def peers(*args: Any) -> str:
    done = subprocess.run([PEERS, str(SCRIPT), *map(str, args)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("peers")
    peers("make", home)
    return home


def _models(home: Path, dtype: str, names: str, **lists: Any) -> list[dict[str, Any]]:
    own = [{k: v[i] if isinstance(v, list) else v for k, v in lists.items()} for i in range(len(names))]
    return [{"model": f"{home}/{n}-{dtype}", "parameters": p} for n, p in zip(names, own, strict=True)]


def configs(home: Path, dtype: str) -> Iterator[tuple[str, dict[str, Any], float]]:
    """(name, configuration, bound): 0 for equal bits, -1 where mergekit's choice among equals is its own, else units in
    the last place.

    Where it is 1 or more, mergekit computes in the next wider dtype and rounds at the end: its own dtype leaves its
    sums and angles too few digits.
    """
    base = {"base_model": f"{home}/base-{dtype}"}

    def of(method: str, names: str = "abc", based: bool = True, parameters: Any = None, **lists: Any) -> dict[str, Any]:
        out = {"merge_method": method, "models": _models(home, dtype, names, **lists), "parameters": parameters or {}}
        return out | (base if based else {})

    gradient = [{"filter": "self_attn", "value": [0, 0.5, 1]}, {"value": 0.3}]
    yield "linear", of("linear", based=False, weight=W), 0
    yield "linear, sum", of("linear", based=False, parameters={"normalize": False}, weight=W), 0
    yield "linear in float16", of("linear", based=False, weight=W) | {"dtype": "float16", "out_dtype": "float32"}, 0
    yield "task_arithmetic", of("task_arithmetic", parameters={"lambda": 0.7}, weight=W), 0
    yield "task_arithmetic, mean", of("task_arithmetic", parameters={"normalize": True}, weight=W), 0
    yield (
        "task_arithmetic in bfloat16",
        of("task_arithmetic", weight=W) | {"dtype": "bfloat16", "out_dtype": "float32"},
        0,
    )
    scale = {"scale": [{"filter": "o_proj", "value": 0.5}, {"value": 1.0}]}
    first, second = ({"model": f"{home}/{n}-{dtype}", "layer_range": r} for n, r in (("a", [0, 2]), ("b", [1, 3])))
    slices = [{"sources": [first]}, {"sources": [second | {"parameters": scale}]}]
    yield "passthrough", {"merge_method": "passthrough", "slices": slices}, 0
    # Of several equal magnitudes, which in bfloat16 are many, mergekit keeps no certain ones.
    exact = 0 if dtype == "float32" else -1
    yield "ties", of("ties", weight=W, density=[0.5, 0.3, 1.0]), exact
    yield "breadcrumbs", of("breadcrumbs", weight=W, density=0.5, gamma=0.05), exact
    yield "breadcrumbs_ties", of("breadcrumbs_ties", weight=W, density=0.5, gamma=0.05), exact
    rescaled = {"rescale": True, "normalize": False}
    yield "ties, rescaled", of("ties", weight=W, density=0.5, parameters=rescaled), 4 if dtype == "float32" else -1
    for method in ("dare_ties", "dare_linear", "della", "della_linear"):
        for density in (0.0, 1.0):
            yield f"{method}, density {density:.0f}", of(method, weight=W, density=density), 0
    yield "sce", of("sce"), 1
    yield "sce, top 40 %", of("sce", parameters={"select_topk": 0.4}), 1 if dtype == "float32" else 2
    yield "nearswap", of("nearswap", "a", parameters={"t": 0.005}), 0
    # Its ranks are those of float64 sums here, and in a short dtype mergekit's divergences have few right digits.
    yield "arcee_fusion", of("arcee_fusion", "a") | {"dtype": "float32", "out_dtype": dtype}, -1
    yield "ram", of("ram", parameters={"epsilon": 0.01}), 0
    yield "ramplus_tl", of("ramplus_tl", parameters={"epsilon": 0.01}) | {"out_dtype": dtype}, 0
    yield "slerp", of("slerp", "a", parameters={"t": gradient}), 1
    for name, options in (("", {}), (", by rows", {"nuslerp_flatten": False}), (", by columns", {"nuslerp_flatten": False, "nuslerp_row_wise": True})):  # fmt: skip
        yield f"nuslerp{name}", of("nuslerp", "ab", False, options, weight=[0.3, 0.7]), 1
        yield f"nuslerp of differences{name}", of("nuslerp", "ab", True, options, weight=[0.3, 0.7]), 1
    yield "multislerp", of("multislerp", based=False, weight=W), 1
    yield "multislerp of differences", of("multislerp", weight=W), 1
    yield "karcher", of("karcher", based=False), 1
    yield "model_stock", of("model_stock"), 1
    yield "model_stock by rows", of("model_stock", parameters={"filter_wise": True}), 1


def units(a: np.ndarray, b: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Differences in units in the last place of ``scale``."""
    info = ml_dtypes.finfo(a.dtype)
    one = np.exp2(np.floor(np.log2(np.maximum(scale.astype(np.float64), float(info.tiny))))) * float(info.eps)
    return np.abs(a.astype(np.float64) - b.astype(np.float64)) / one


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mergekit_agrees(home: Path, tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    wide = {"dtype": "float64" if dtype == "float32" else "float32", "out_dtype": dtype}
    each = list(configs(home, dtype))
    jobs = [{"config": c | (wide if b > 0 else {}), "out": str(tmp_path / str(i))} for i, (_, c, b) in enumerate(each)]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    peers("merge", tmp_path / "jobs.json")
    wrong, rows = [], []
    for job, (name, said, bound) in zip(jobs, each, strict=True):
        ours, theirs = blended(said), mt.open_checkpoint(job["out"])
        assert set(ours) == set(theirs), name
        equal = total = 0
        worst, above = 0.0, 0
        for key in ours:
            x, y = ours[key].read(), theirs[key].read()
            assert x.dtype == y.dtype, (name, key)
            sources = [
                mt.open_checkpoint(m["model"])[key].read()
                for m in [*said.get("models", []), *([{"model": said["base_model"]}] if "base_model" in said else [])]
            ]
            u = units(x, y, np.max([np.abs(a.astype(np.float32)) for a in (y, *sources)], axis=0))
            equal, total = equal + int((x == y).sum()), total + x.size
            worst, above = max(worst, float(u.max())), above + int((u > 1).sum())
        told = f"equal {100 * equal / total:8.4f} %  above 1 unit {100 * above / total:7.4f} %  at most {worst:.2f}"
        rows.append(f"{name:40s} {dtype:9s} {told}")
        if (bound == 0 and equal < total) or (bound > 0 and worst > bound) or (bound < 0 and equal < 0.99 * total):
            wrong.append(rows[-1])
    with capsys.disabled():
        print("\n" + "\n".join(rows))
    assert not wrong, "\n".join(wrong)


def test_transformers_opens_a_blend_of_layers(home: Path, tmp_path: Path) -> None:
    slices = [
        {"sources": [{"model": f"{home}/{n}-bfloat16", "layer_range": r}]} for n, r in (("a", [0, 2]), ("b", [0, 3]))
    ]
    blend(
        {"merge_method": "passthrough", "slices": slices, "dtype": "float32"}, tmp_path / "out", max_shard_bytes=100_000
    )
    told = json.loads(peers("open", tmp_path / "out"))
    assert told["layers"] == 5
    assert np.isfinite(told["logits"]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peft_agrees_on_adapters(home: Path, tmp_path: Path, dtype: str) -> None:
    ours = blended({"merge_method": "passthrough", "models": [{"model": f"{home}/base-{dtype}+{home}/lora-{dtype}"}]})
    theirs = mt.open_checkpoint(home / f"lora-merged-{dtype}")
    for key in theirs:
        x, y = ours[key].read(), theirs[key].read()
        largest = np.full(y.shape, np.abs(y.astype(np.float32)).max())
        assert float(units(x, y, largest).max()) <= 2, key
    base, tuned = f"{home}/base-{dtype}", f"{home}/lora-merged-{dtype}"
    extract_lora(tuned, base, tmp_path / "adapter", energy=1 if dtype == "float32" else 0.9999)
    a = json.loads(peers("open", tuned))["logits"]
    b = json.loads(peers("open", "", base, tmp_path / "adapter"))["logits"]
    assert np.abs(np.subtract(a, b)).max() <= (1e-5 if dtype == "float32" else 1e-2) * np.abs(a).max()


@pytest.mark.parametrize("rank", [4, 16])
def test_mergekit_extracts_the_same_adapter(home: Path, tmp_path: Path, rank: int) -> None:
    base, tuned = (f"{home}/{n}-float32" for n in ("base", "a"))
    said = ["--model", tuned, "--base-model", base, "--out-path", tmp_path / "theirs", "--max-rank", rank]
    command = [PEERS, "-m", "mergekit.scripts.extract_lora", *map(str, said)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    report = extract_lora(tuned, base, tmp_path / "ours", rank=rank, drop=["lm_head.weight"])
    assert len(report.ranks) == 3 * 7  # every matrix of every layer
    ours, theirs = (virtual.lora(base, tmp_path / n) for n in ("ours", "theirs"))
    for module in report.ranks:
        x, y = (each[f"{module}.weight"].read() for each in (ours, theirs))
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6, err_msg=module)


def test_mergekit_agrees_on_vocabularies(home: Path, tmp_path: Path) -> None:
    models = [{"model": f"{home}/words-{n}", "parameters": {"weight": w}} for n, w in (("x", 0.25), ("y", 0.75))]
    said = {"merge_method": "linear", "models": models, "base_model": models[0]["model"], "tokenizer_source": "union"}
    (tmp_path / "jobs.json").write_text(json.dumps([{"config": said, "out": str(tmp_path / "out")}]))
    peers("merge", tmp_path / "jobs.json")
    blend(said, tmp_path / "ours")
    ours, theirs = mt.open_checkpoint(tmp_path / "ours"), mt.open_checkpoint(tmp_path / "out")
    tokens = []
    for c in (ours, theirs):
        told = c.documents["tokenizer.json"]
        tokens.append(told["model"]["vocab"] | {t["content"]: t["id"] for t in told["added_tokens"]})
    assert set(tokens[0]) == set(tokens[1])
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        x, y = ours[key].read(), theirs[key].read()
        assert x.shape == y.shape
        assert all(np.array_equal(x[tokens[0][t]], y[tokens[1][t]]) for t in tokens[0])
    assert np.isfinite(json.loads(peers("open", tmp_path / "ours"))["logits"]).all()


def test_adapters_give_what_peft_merges(tmp_path: Path) -> None:
    peers("adapters", tmp_path)
    names = sorted(p.name.removesuffix("-base") for p in tmp_path.glob("*-base"))
    assert len(names) == 24
    for name in names:
        report = mt.merge(virtual.lora(tmp_path / f"{name}-base", tmp_path / f"{name}-adapter"), tmp_path / name)
        ours, theirs = mt.open_checkpoint(report.path), mt.open_checkpoint(tmp_path / f"{name}-merged")
        assert set(ours) == set(theirs), name
        for key in ours:
            np.testing.assert_allclose(ours[key].read(), theirs[key].read(), atol=1e-6, err_msg=f"{name}: {key}")
        told = [c.documents["config.json"] for c in (ours, theirs)]
        for key in ("vocab_size", "tie_word_embeddings"):
            assert told[0][key] == told[1][key], name
