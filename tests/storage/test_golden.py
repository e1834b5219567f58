"""Checkpoints of every released format version still load."""

from pathlib import Path

import ml_dtypes
import numpy as np

from meshtape.storage import ShuffledZstd, load, load_safetensors, open_checkpoint, verify

GOLDEN = Path(__file__).parent / "golden"


def test_version_3(kit):
    ckpt = open_checkpoint(GOLDEN / "v3")
    assert (ckpt.step, ckpt.compression) == (7, ShuffledZstd())
    verify(GOLDEN / "v3")
    tree = load(GOLDEN / "v3")
    w = np.arange(600, dtype="f4").reshape(20, 30) / 8
    assert kit.same(tree["layers"][0]["w"], w)
    assert kit.same(tree["layers"][1], w.astype(ml_dtypes.bfloat16))
    assert kit.same(tree["scalar"], np.float64(1.5))


def test_version_3_of_layout_dual(kit):
    where = GOLDEN / "v3-dual"
    assert verify(where).uncovered == []
    w = np.arange(600, dtype="f4").reshape(20, 30) / 8
    held = {n: a for file in where.glob("*.safetensors") for n, a in load_safetensors(file).items()}
    for tree in (load(where), held):
        assert kit.same(tree["w"], w)
        assert kit.same(tree["short"], w[:, 0].astype(ml_dtypes.bfloat16))
        assert kit.same(tree["scalar"], np.float64(1.5))
    assert kit.same(load_safetensors(where / "w" / "c.0.0")["w"], w)


def test_version_1(kit):
    ckpt = open_checkpoint(GOLDEN / "v1")
    assert ckpt.step == 7
    assert ckpt.metadata == {"note": "written by format version 1"}
    verify(GOLDEN / "v1")
    tree = load(GOLDEN / "v1")
    assert kit.same(tree["layers"][0]["w"], np.arange(12, dtype="f4").reshape(3, 4))
    assert kit.same(tree["layers"][1][0], np.arange(3).astype(ml_dtypes.bfloat16))
    assert tree["layers"][1][1] is None
    assert kit.same(tree["a/b"], np.float64(1.5))
    assert tree["epoch"] == 3
    assert np.isnan(tree["lr"])


def test_version_4(kit):
    ckpt = open_checkpoint(GOLDEN / "v4/delta")
    assert (ckpt.step, ckpt.base.step) == (8, 7)
    verify(ckpt)
    w = np.arange(600, dtype="f4").reshape(20, 30) / 8
    for n, tree in enumerate([load(GOLDEN / "v4/base"), load(GOLDEN / "v4/delta")]):
        assert kit.same(tree["layers"][0]["w"], w * np.float32(1 + n / 1024))
        assert kit.same(tree["layers"][1], (w + n).astype(ml_dtypes.bfloat16))
        assert kit.same(tree["count"], np.arange(5) - n)
        assert kit.same(tree["scalar"], np.float64(1.5))
