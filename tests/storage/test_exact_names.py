"""A text that is the name of an array means that array alone, though it is a pattern, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape import storage
from meshtape.errors import CheckpointError, CheckpointExists, CheckpointKeyError
from meshtape.storage import blended, save_safetensors, virtual

TREE = {n: np.arange(8.0).reshape(2, 4) + i for i, n in enumerate(["w[0]", "w0", "w*", "wx"])}


def written(path: Path, **more: Any) -> list[str]:
    return sorted(
        storage.merge(path, path.parent / "merged", overwrite=True, **more) and mt.load(path.parent / "merged")
    )


def quantised(found: Any) -> list[str]:
    return sorted(n for n in TREE if isinstance(found.get(n), dict) or f"{n}.q" in found)


WAYS: dict[str, Callable[[Path, str], list[str]]] = {
    "load": lambda c, n: sorted(mt.load(c, keys=[n])),
    "merge": lambda c, n: written(c, keys=[n]),
    "drop": lambda c, n: sorted({*TREE} - {*written(c, drop=[n])}),
    "rows": lambda c, n: [k for k, a in virtual.rows(c, {n: (0, 1)}).items() if a.shape[0] == 1],
    "quantize": lambda c, n: quantised(storage.quantize(TREE, keys=[n])),
    "virtual.quantize": lambda c, n: quantised(virtual.quantize(c, keys=[n]).arrays),
    "diff": lambda c, n: [a.name for a in storage.diff(c, doubled(c), keys=[n]).arrays],
    "blend": lambda c, n: sorted(blended(linear(c), keys=[n]).arrays),
    "ignore": lambda c, n: ignored(c, n),
    "reshard": lambda c, n: split(c, n),
}


def doubled(c: Path) -> str:
    return mt.save(c.parent / "doubled", {n: a * 2 + 1 for n, a in TREE.items()}, overwrite=True).path


def linear(c: Path) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [{"model": str(c), "parameters": {"weight": 1}}]}


def ignored(c: Path, name: str) -> list[str]:
    report = storage.LoadReport()
    mt.load(c, like={"other": TREE["w0"]}, strict=False, ignore=[name, "other"], report=report)
    return sorted({*report.ignored} - {"other"})


def split(c: Path, name: str) -> list[str]:
    to = c.parent / "split"
    storage.reshard(c, to, mesh={"model": 2}, shardings={name: {"model": 0}}, overwrite=True)
    placed = {e.name: e.sharding for e in mt.open_checkpoint(to).manifest.arrays}
    return sorted(n for n, said in placed.items() if said)


@pytest.mark.parametrize("name", ["w[0]", "w*"])
@pytest.mark.parametrize("way", WAYS)
def test_a_name_that_is_a_pattern_means_itself(tmp_path: Path, way: str, name: str) -> None:
    c = tmp_path / "c"
    mt.save(c, TREE)
    assert WAYS[way](c, name) == [name]


def test_rows_are_cut_by_one_pattern_for_each_axis(tmp_path: Path) -> None:
    c = mt.save(tmp_path / "c", TREE).path
    with pytest.raises(CheckpointError, match="'w0': two patterns give rows of its axis 0"):
        virtual.rows(c, {"w0": (1, 2), "w?": (0, 2)})["w0"]
    assert virtual.rows(c, {"w0": (1, 2), "w[0-9]": (0, 2, 1)})["w0"].shape == (1, 2)


def test_what_is_written_without_unreadable_arrays_is_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "n.npz", a=np.arange(4, dtype=">i4"), b=np.ones(2))
    for write in (storage.merge, lambda a, b: storage.convert(a, b, format="zarr")):
        with pytest.warns(UserWarning, match=r"written without what cannot be read; not readable here \(1\): a"):
            write(tmp_path / "n.npz", tmp_path / write.__name__)
        assert [*mt.load(tmp_path / write.__name__)] == ["b"]
    storage.merge(tmp_path / "n.npz", tmp_path / "chosen", keys=["b"])  # of what is not asked for nothing is said


def test_the_anchor_of_deltas_exists_like_any_step(tmp_path: Path) -> None:
    manager = mt.CheckpointManager(tmp_path, keep=None, anchor_every=3)
    w = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    for step in (1, 2):
        manager.save(step, {"w": w * step})
    with pytest.warns(UserWarning, match="below step 2"), pytest.raises(CheckpointExists, match="overwrite=True"):
        manager.save(1, {"w": w})
    with pytest.warns(UserWarning, match="below step 2"):
        manager.save(1, {"w": w * 5}, overwrite=True)
    for step, times in ((1, 5), (2, 2)):
        assert np.array_equal(mt.load(manager.path(step))["w"], w * times)
        mt.verify(manager.path(step))


def test_documents_differ_by_more_than_their_case(tmp_path: Path) -> None:
    with pytest.raises(CheckpointKeyError, match=r"two documents are named 'config\.json'"):
        mt.save(tmp_path / "c", TREE, documents={"Config": {}, "config": {}})


@pytest.mark.parametrize("text", ["{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": "x"}, "weight_map": {}}'])
def test_an_index_names_each_array_once(tmp_path: Path, text: str) -> None:
    save_safetensors(tmp_path / "x", {"a": np.ones(2)})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"no weight_map|'weight_map' twice"):
        mt.open_checkpoint(tmp_path)


def test_a_model_is_a_folder_or_has_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (("gpt", 1), ("gpt+lora", 5)):
        Path(name).mkdir()
        save_safetensors(f"{name}/model.safetensors", {"q.weight": np.full((2, 2), value, np.float32)})
    config = {"merge_method": "linear", "models": [{"model": "gpt+lora", "parameters": {"weight": 1}}]}
    assert blended(config)["q.weight"][...].tolist() == [[5, 5], [5, 5]]
    Path("lora").mkdir()
    factors = {f"base_model.model.q.lora_{x}.weight": np.ones((1, 2) if x == "A" else (2, 1), np.float32) for x in "AB"}
    save_safetensors("lora/adapter_model.safetensors", factors)
    said = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q"]}
    Path("lora/adapter_config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="is a folder, and 'gpt' with the adapter 'lora', too"):
        blended(config)
    for said, value in (({"model": "gpt+lora"}, 5), ({"model": "gpt", "lora": "lora"}, 2)):
        config["models"][0]["model"] = said
        assert blended(config)["q.weight"][...].tolist() == [[value] * 2] * 2
