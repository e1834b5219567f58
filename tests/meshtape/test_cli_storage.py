"""Commands that check and change checkpoints, on real ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import dask
import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file

import meshtape as mt
from meshtape.cli.main import main

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
    assert "damaged files" in out.output
    assert "Traceback" not in out.output
    np.save(ckpt.parent / "x.npy", W)
    out = call("verify", str(ckpt.parent / "x.npy"))
    assert (out.exit_code, "nothing tells whether it is whole" in out.output, "sound" in out.output) == (1, True, False)


def test_a_cast_that_loses_values_names_the_flag(tmp_path: Path) -> None:
    mt.save(tmp_path / "c", {"w": np.float32([1.0, 7e4])})
    where = (str(tmp_path / "c"), str(tmp_path / "out"))
    for command in (("merge", *where), ("convert", *where, "--format", "zarr"), ("reshard", *where, "--mesh", "m=2")):
        refused = call(*command, "--dtype", "float16")
        assert refused.exit_code != 0
        assert "1 became infinite" in refused.output
        assert "--allow-overflow" in refused.output
        assert not (tmp_path / "out").exists()
        out = call(*command, "--dtype", "float16", "--allow-overflow", "--overwrite")
        assert out.exit_code == 0
        assert "w: 1 became infinite" in out.output
        told = json.loads(call(*command, "--dtype", "float16", "--allow-overflow", "--overwrite", "--json").output)
        assert told["losses"]["w"]["overflow"] == 1
        mt.storage.load(tmp_path / "out")
        shutil.rmtree(tmp_path / "out")


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


@pytest.mark.parametrize(("said", "packed"), [("yes", 2), ("no", 0), ("20", 1), (None, 0)])
def test_packs_are_an_option_of_convert_and_reshard(ckpt: Path, tmp_path: Path, said: str | None, packed: int) -> None:
    own = [] if said is None else ["--pack", said]
    for command in (("convert", "--format", "zarr"), ("reshard", "--mesh", "model=2")):
        out = call(command[0], str(ckpt), str(tmp_path / command[0]), *command[1:], *own)
        assert out.exit_code == 0, out.output
        opened = mt.open_checkpoint(tmp_path / command[0])
        assert sum(a.packs is not None for a in opened.manifest.arrays) == packed
        np.testing.assert_array_equal(np.asarray(opened["params.w"]), W)
        assert call("verify", str(tmp_path / command[0])).exit_code == 0


def test_a_dtype_fallback_is_an_option_of_convert(ckpt: Path, tmp_path: Path) -> None:
    own = ("--format", "zarr", "--dtype", "bfloat16", "--dtype-fallback", "raw")
    assert call("convert", str(ckpt), str(tmp_path / "out"), *own).exit_code == 0
    said = json.loads((tmp_path / "out" / "params.w" / "zarr.json").read_text())
    assert (said["data_type"], said["attributes"]) == ("uint16", {"meshtape": {"dtype": "bfloat16"}})
    assert mt.open_checkpoint(tmp_path / "out")["params.w"].dtype.name == "bfloat16"


@pytest.mark.parametrize(
    "args",
    [
        ("--pack", "some"),
        ("--pack", "-1"),
        ("--dtype-fallback", "int"),
        ("--mesh", "model"),
        ("--mesh", "model=x"),
        ("--mesh", "model=0"),
        ("--mesh", "model=2", "--shard", "w"),
        ("--shard", "w:other=0", "--mesh", "model=2"),
        ("--shard", "w:model=0"),
    ],
)
def test_wrong_options_exit_with_2(args: tuple[str, ...], ckpt: Path, tmp_path: Path) -> None:
    assert call("reshard", str(ckpt), str(tmp_path / "new"), *args).exit_code == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["verify", "diff", "merge", "convert", "reshard"])
def test_help(command: str) -> None:
    assert call(command, "--help").exit_code == 0


# ----- tree, estimate, and what all commands share --------------------------------------------------------------------


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    layer = {"w": np.ones((4, 4), np.float32), "b": np.ones(4, np.float32)}
    tree = {
        "layers": [layer, layer, layer, {"w": np.ones((2, 4), np.float32)}],
        "head": np.ones(3),
        "bad\x1b[2J": np.ones(1),
    }
    mt.save(tmp_path / "deep", tree, step=9, metadata={"loss": float("nan")}, documents={"config": {"layers": 4}})
    return tmp_path / "deep"


def test_tree(deep: Path) -> None:
    lines = call("tree", str(deep)).output.splitlines()
    assert "step 9): 9 arrays" in lines[0]
    assert lines[1].startswith("├── layers  (7 arrays")
    assert lines[2].startswith("│   ├── 0…2 × 3  (2 arrays")
    assert "w  float32[4, 4]  64 B" in lines[3]
    assert lines[5].startswith("│   └── 3  (1 array,")
    assert "\x1b" not in "".join(lines)
    assert len(call("tree", str(deep), "--depth", "1").output.splitlines()) == 4
    data = json.loads(call("tree", str(deep), "--json").output)
    assert data["children"]["layers"]["children"]["3"]["children"]["w"]["shape"] == [2, 4]
    assert data["arrays"] == 9


def test_estimate(deep: Path) -> None:
    out = call(
        "estimate", str(deep), "--mesh", "m=2", "--shard", "layers.*.w:m=0", "--optimizer", "adam", "--zero", "m"
    )
    assert out.exit_code == 0, out.output
    assert "2 ranks" in out.output
    data = json.loads(call("estimate", str(deep), "--json", "--dtype", "bfloat16").output)
    assert data["arrays"] == 9
    assert data["nbytes"] == 2 * data["elements"]
    assert call("estimate", str(deep), "--optimizer", "none").exit_code == 1


def test_exit_codes(deep: Path, tmp_path: Path) -> None:
    assert call("ls", str(deep)).exit_code == 0
    assert call("ls", str(tmp_path / "nothing")).exit_code == 1
    assert call("tree", "s3://user:hush@bucket/x").exit_code == 1
    assert "hush" not in call("tree", "s3://user:hush@bucket/x").output
    assert call("reshard", str(deep), str(tmp_path / "r")).exit_code == 2
    assert call("merge", str(deep)).exit_code == 2
    with dask.config.set({"meshtape.timeouts.connect": 0.5}):
        nobody = call("merge", str(deep), str(tmp_path / "m"), "--scheduler", "tcp://127.0.0.1:9")
    assert nobody.exit_code == 1
    assert "no Dask scheduler answers at tcp://127.0.0.1:9" in nobody.output


def test_exit_codes_of_damage_and_of_targets_that_exist(deep: Path, tmp_path: Path) -> None:
    """What only reads tables of contents does not see a damaged file; each other command says which, and writes
    nothing."""
    there, out = str(deep), tmp_path / "out"
    mt.merge(deep, tmp_path / "there")
    file = next(p for p in (deep / "head").rglob("*") if p.is_file() and p.suffix != ".json")
    file.write_bytes(file.read_bytes()[:-1])
    for args in (("ls", there), ("tree", there), ("estimate", there), ("browse", there, "--json")):
        assert call(*args).exit_code == 0
    for args in (
        ("show", there, "head"),
        ("verify", there),
        ("diff", there, str(tmp_path / "there")),
        ("merge", there, str(out)),
        ("convert", there, str(out), "--format", "zarr"),
        ("reshard", there, str(out), "--mesh", "m=2"),
    ):
        for more in ((), ("--json",)):
            done = call(*args, *more)
            assert (done.exit_code, done.stdout) == (1, ""), done.output
            assert "bytes, the manifest says" in done.stderr
            assert str(file) in done.stderr
    assert not out.exists()
    before = sorted(p.name for p in (tmp_path / "there").iterdir())
    for args in (("merge",), ("convert", "--format", "zarr"), ("reshard", "--mesh", "m=2")):
        done = call(args[0], there, str(tmp_path / "there"), *args[1:])
        assert done.exit_code == 1
        assert "there exists; pass --overwrite to replace it" in done.stderr
    assert sorted(p.name for p in (tmp_path / "there").iterdir()) == before
    for args in (
        ("ls", there, "--dtype", "flot"),
        ("estimate", there, "--dtype", "flot"),
        ("merge", there, str(out), "--dtype", "flot"),
        ("convert", there, str(out), "--format", "zarr", "--compression", "lz4"),
        ("estimate", there, "--compression", "zstd:x"),
    ):
        done = call(*args)
        assert (done.exit_code, "Invalid value for '--" in done.stderr) == (2, True), done.output
    (deep / "meshtape.json").write_text("{")
    for command in ("ls", "tree", "estimate"):
        assert (call(command, there).exit_code, call(command, there, "--json").stdout) == (1, "")


def test_progress_is_plain_lines_in_a_pipe(deep: Path, tmp_path: Path) -> None:
    out = call("merge", str(deep), str(tmp_path / "m"), "--prefix", "layers")
    lines = out.stderr.splitlines()
    assert lines[0].startswith("merging: 0 B of ")
    assert "(100 %)" in lines[-1]
    assert not any("\x1b" in line or "\r" in line for line in lines)
    assert set(load_file(tmp_path / "m" / "model.safetensors")) == {f"{i}.{n}" for i in range(3) for n in "wb"} | {
        "3.w"
    }
    assert call("merge", str(deep), str(tmp_path / "n"), "--json").stderr == ""


def test_urls_stand_for_paths(deep: Path, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    there = f"memory://{tmp_path.name}/cli"
    assert call("convert", str(deep), there, "--format", "zarr").exit_code == 0
    for command in ("ls", "tree", "verify", "estimate"):
        assert call(command, there).exit_code == 0
    assert call("show", there, "head").exit_code == 0
    assert call("diff", there, str(deep)).exit_code == 0
    assert call("merge", there, str(tmp_path / "back"), "--keys", "head").exit_code == 0
    np.testing.assert_array_equal(load_file(tmp_path / "back" / "model.safetensors")["head"], np.ones(3))


def test_the_workers_of_a_scheduler_do_the_work(deep: Path, tmp_path: Path) -> None:
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None) as cluster:
        out = call("reshard", str(deep), str(tmp_path / "r"), "--mesh", "m=2", "--scheduler", cluster.scheduler_address)
    assert out.exit_code == 0, out.output
    assert call("diff", str(deep), str(tmp_path / "r")).exit_code == 0
