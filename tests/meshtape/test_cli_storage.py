"""Commands that check and change checkpoints, on real ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file

import meshtape as mt
from meshtape.cli import main

W = np.arange(24, dtype=np.float32).reshape(4, 6)


def call(*args: str) -> Result:
    return CliRunner().invoke(main, list(args), env={"COLUMNS": "160"})


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    mesh = mt.Mesh({"model": 2})
    w = mt.distribute(W, mesh, model=mt.Shard(1))
    mt.save(tmp_path / "ckpt", {"params": {"w": w, "b": np.ones(3, np.float32)}, "step": 4})
    return tmp_path / "ckpt"


def test_verify_finds_a_flipped_bit(ckpt: Path) -> None:
    out = call("verify", str(ckpt))
    assert out.exit_code == 0
    assert "sound" in out.output
    assert json.loads(call("verify", str(ckpt), "--json").output)["arrays"] == 2
    shard = next(p for p in ckpt.rglob("*") if p.is_file() and p.name != "meshtape.json" and p.suffix != ".json")
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    shard.write_bytes(bytes(data))
    out = call("verify", str(ckpt))
    assert out.exit_code == 1
    assert "CorruptCheckpoint" in out.output
    assert "Traceback" not in out.output


def test_merge_with_keys_and_rules(ckpt: Path, tmp_path: Path) -> None:
    out = call("merge", str(ckpt), str(tmp_path / "hf"), "--keys", "params.*")
    assert out.exit_code == 0, out.output
    np.testing.assert_array_equal(load_file(tmp_path / "hf" / "model.safetensors")["params.w"], W)
    assert call("merge", str(ckpt), str(tmp_path / "hf")).exit_code == 1, "an existing target is not replaced unasked"
    assert call("merge", str(ckpt), str(tmp_path / "hf"), "--overwrite", "--dtype", "float16").exit_code == 0
    assert load_file(tmp_path / "hf" / "model.safetensors")["params.w"].dtype == np.float16


def test_diff_tells_by_its_exit_code(ckpt: Path, tmp_path: Path) -> None:
    assert call("convert", str(ckpt), str(tmp_path / "st"), "--format", "safetensors").exit_code == 0
    same = call("diff", str(ckpt), str(tmp_path / "st"), "--keys", "params.*")
    assert same.exit_code == 0, same.output
    mt.save(tmp_path / "other", {"params": {"w": W + 1, "b": np.ones(3, np.float32)}})
    out = call("diff", str(ckpt), str(tmp_path / "other"))
    assert out.exit_code == 1
    assert "params.w" in out.output
    assert json.loads(call("diff", str(ckpt), str(tmp_path / "other"), "--json").output)


def test_reshard_makes_a_file_for_each_rank(ckpt: Path, tmp_path: Path) -> None:
    out = call("reshard", str(ckpt), str(tmp_path / "new"), "--mesh", "model=4", "--shard", "params.w:model=0")
    assert out.exit_code == 0, out.output
    opened = mt.open_checkpoint(tmp_path / "new")
    assert opened.meshes == [{"model": 4}]
    np.testing.assert_array_equal(np.asarray(opened["params.w"]), W)
    assert call("verify", str(tmp_path / "new")).exit_code == 0


@pytest.mark.parametrize("args", [("--mesh", "model"), ("--mesh", "model=x"), ("--mesh", "model=2", "--shard", "w")])
def test_wrong_options_exit_with_2(args: tuple[str, ...], ckpt: Path, tmp_path: Path) -> None:
    assert call("reshard", str(ckpt), str(tmp_path / "new"), *args).exit_code == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["verify", "diff", "merge", "convert", "reshard"])
def test_help(command: str) -> None:
    assert call(command, "--help").exit_code == 0
