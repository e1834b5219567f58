"""What reports and commands tell of what they did not do, and calls that would have meant something else."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.numpy import save_file

import meshtape as mt
from meshtape import errors, storage
from meshtape.cli.main import main
from meshtape.storage.format import dtypes

W = np.ones((2, 3), "f4")
ORBAX = Path(__file__).parent / "golden" / "orbax-0.12" / "files-zarr3"


def command(*words: Any) -> tuple[int, str]:
    done = CliRunner().invoke(main, [str(w) for w in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def model(home: Path) -> Path:
    (home / "hf" / "1_Pooling").mkdir(parents=True)
    save_file({"w": W}, home / "hf" / "model.safetensors", {"run": "seven", "format": "np"})
    for name in ("config.json", "1_Pooling/config.json", "training_args.bin", "model.onnx", ".hidden"):
        (home / "hf" / name).write_text("{}")
    return home / "hf"


def test_what_stays_behind_is_told(tmp_path: Path) -> None:
    left = ["1_Pooling/", "adapter_model.safetensors", "model.onnx", "training_args.bin"]
    here = model(tmp_path)
    save_file({"w": W}, here / "adapter_model.safetensors")
    assert mt.merge(here, tmp_path / "a").left_behind == left
    assert mt.convert(here, tmp_path / "b", format="zarr").left_behind == left
    assert storage.reshard(here, tmp_path / "c", mesh={"m": 2}).left_behind == left
    assert mt.convert(tmp_path / "b", tmp_path / "d", format="zarr").left_behind == []
    assert "left behind: 1_Pooling/, adapter_model.safetensors, model.onnx" in command("merge", here, tmp_path / "e")[1]
    assert json.loads(command("convert", here, tmp_path / "f", "--format", "zarr", "--json")[1])["left_behind"] == left


def test_files_that_the_index_does_not_name_stay_behind(tmp_path: Path) -> None:
    mt.merge(model(tmp_path), tmp_path / "a")
    for name in ("consolidated.safetensors", "model-00099-of-00099.safetensors"):
        save_file({"w": W}, tmp_path / "a" / name)
    left = ["consolidated.safetensors", "model-00099-of-00099.safetensors"]
    assert mt.merge(tmp_path / "a", tmp_path / "b").left_behind == left


def test_metadata_of_a_header_goes_along(tmp_path: Path) -> None:
    mt.convert(model(tmp_path), tmp_path / "z", format="zarr")
    for source, made in (("hf", "a"), ("z", "b")):
        mt.merge(tmp_path / source, tmp_path / made)
        with safe_open(tmp_path / made / "model.safetensors", "np") as f:
            assert {k: f.metadata()[k] for k in ("run", "format")} == {"run": "seven", "format": "pt"}
        assert mt.verify(tmp_path / made).arrays == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("encryption", "rot13"), ("anonymous", "yes"), ("requester_pays", "maybe"), ("bucket_key", 2)],
)
def test_options_of_a_store_are_checked(name: str, value: Any) -> None:
    with pytest.raises(errors.CheckpointError, match=f"option {name} is one of"):
        storage.options("s3://bucket/run", **{name: value})
    assert "anonymous=true" in storage.options("s3://bucket/run", anonymous=True, encryption="aws:kms")


def test_values_are_shown(tmp_path: Path) -> None:
    mt.save(tmp_path / "c", {"w": W, "opt": {"lr": 0.5, "name": "adam"}, "bad": math.nan})
    assert command("show", tmp_path / "c", "opt.lr") == (0, "0.5\n")
    assert command("show", tmp_path / "c", "opt.name") == (0, "'adam'\n")
    assert json.loads(command("show", tmp_path / "c", "opt.lr", "--json")[1]) == {"name": "opt.lr", "value": 0.5}
    assert command("show", tmp_path / "c", "opt.none")[0] == 1


@pytest.mark.parametrize(
    "words",
    [
        ("reshard", "c", "d", "--mesh", "m=2,m=3"),
        ("gc", "nowhere"),
        ("gc", "x.txt"),
        ("gc", ".", "--older-than", "nan"),
    ],
)
def test_calls_that_mean_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    monkeypatch.chdir(tmp_path)
    mt.save("c", {"w": W})
    Path("x.txt").write_text("")
    code, text = command(*words)
    assert code
    assert "nothing to remove" not in text


def test_options_are_called_as_they_are_written(tmp_path: Path) -> None:
    mt.save(tmp_path / "c", {"w": W})
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "meshtape.json").write_text("{}")
    (tmp_path / "d" / "other").write_text("x")
    text = command("convert", tmp_path / "c", tmp_path / "d", "--format", "zarr", "--overwrite")[1]
    assert "--overwrite replaces a checkpoint alone" in " ".join(text.split())


def test_dequantize_says_what_is_wrong(tmp_path: Path) -> None:
    mt.save(tmp_path / "c", {"a": W})
    with pytest.raises(errors.RuleMatchError, match="'a' is float32, and only int8"):
        mt.load(tmp_path / "c", rules="a -> a, dequantize()")


def test_only_possible_cures_are_named() -> None:
    for dtype, cure in ((np.complex128, "or keep the Zarr form"), (ml_dtypes.float4_e2m1fn, "drop=")):
        with pytest.raises(errors.CheckpointDTypeError, match=cure):
            dtypes.safetensors_name(np.dtype(dtype))


@pytest.mark.parametrize("leaf", [{"b": W}, None, "text", np.array(["x"])])
def test_a_safetensors_file_takes_a_flat_dict_of_arrays(tmp_path: Path, leaf: object) -> None:
    with pytest.raises(errors.CheckpointDTypeError, match=r"'a': .*a flat dict of arrays; .*mt\.merge") as told:
        mt.storage.save_safetensors(tmp_path / "x.safetensors", {"a": leaf})
    assert "drop=" not in str(told.value)
    mt.save(tmp_path / "c", {"a": leaf, "w": W} if not isinstance(leaf, np.ndarray) else {"w": W})
    mt.merge(tmp_path / "c", tmp_path / "out")  # as the error says


def test_a_manager_of_orbax(tmp_path: Path) -> None:
    for step in ("1", "2"):
        shutil.copytree(ORBAX, tmp_path / "run" / step / "default")
        (tmp_path / "run" / step / "_CHECKPOINT_METADATA").write_text("{}")
    with pytest.raises(errors.NotACheckpoint, match=r"holds checkpoints, such as .*/run/2"):
        mt.load(tmp_path / "run")
    assert mt.open_checkpoint(tmp_path / "run" / "2").step == 2


def test_what_stays_behind_of_a_computed_model_is_told(tmp_path: Path) -> None:
    here, left = model(tmp_path), ["1_Pooling/", "model.onnx", "training_args.bin"]
    (here / "README.md").write_text("of the one")
    config = {"merge_method": "linear", "models": [{"model": str(here), "parameters": {"weight": 1}}]}
    virtual = storage.virtual
    made = (virtual.mean([here, here]), virtual.cast(here, "bfloat16"), virtual.rows(here, {"w": (0, 1)}))
    for i, ckpt in enumerate(made):
        assert mt.merge(ckpt, tmp_path / str(i)).left_behind == left
    assert storage.blend(config, tmp_path / "blend").left_behind == sorted(["README.md", *left])
    mt.convert(here, tmp_path / "ours", format="zarr")
    ours = {"merge_method": "linear", "models": [{"model": str(tmp_path / "ours"), "parameters": {"weight": 1}}]}
    assert storage.blend(ours, tmp_path / "none").left_behind == []
    assert mt.merge(virtual.mean([tmp_path / "ours"]), tmp_path / "neither").left_behind == []
