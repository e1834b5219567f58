"""The command line as a user meets it: output, exit codes, and errors without tracebacks."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import dask
import numpy as np
import pytest
from click.testing import CliRunner, Result

import meshtape as mt
from meshtape.cli.main import main


def call(*args: str) -> Result:
    return CliRunner().invoke(main, list(args), env={"COLUMNS": "160"})


def assert_clean_error(result: Result, *texts: str) -> None:
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    assert len(result.output.strip().splitlines()) < 12
    for text in texts:
        assert text in result.output


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    mesh = mt.Mesh({"data": 2, "model": 2})
    w = mt.distribute(np.arange(24, dtype=np.float32).reshape(4, 6), mesh, data=mt.Shard(0))
    mt.save(tmp_path / "ckpt", {"params": {"w": w}, "optimizer": {"step": np.int64(3)}}, step=7)
    return tmp_path / "ckpt"


def test_info_names_versions_and_what_is_missing() -> None:
    out = call("info")
    assert out.exit_code == 0
    for text in ("meshtape", "numpy", "zarr", "cpu"):
        assert text in out.output
    facts = json.loads(call("info", "--json").output)
    assert facts["meshtape"] == mt.__version__
    assert facts["devices"][0] == "cpu"
    missing = [p for p in facts["packages"] if p["version"] is None]
    assert all(p["get"] for p in missing)


def test_ls_lists_names_shapes_and_shardings(checkpoint: Path) -> None:
    out = call("ls", str(checkpoint))
    assert out.exit_code == 0
    for text in ("params.w", "float32", "(4, 6)", "Shard(0)", "step 7", "data=2", "2 arrays"):
        assert text in out.output
    facts = json.loads(call("ls", str(checkpoint), "--json").output)
    assert facts["step"] == 7
    assert [a["name"] for a in facts["rows"]] == ["params.w", "optimizer.step"]


def test_ls_reads_safetensors_too(checkpoint: Path, tmp_path: Path) -> None:
    mt.merge(checkpoint, tmp_path / "hf")
    assert "params.w" in call("ls", str(tmp_path / "hf" / "model.safetensors")).output
    assert "params.w" in call("ls", str(tmp_path / "hf")).output


def test_show_gives_facts_and_values(checkpoint: Path) -> None:
    out = call("show", str(checkpoint), "params.w")
    assert out.exit_code == 0
    for text in ("float32", "(4, 6)", "min", "mean", "11.5", "23."):
        assert text in out.output
    assert json.loads(call("show", str(checkpoint), "params.w", "--json").output)["max"] == 23.0


def test_show_of_an_unknown_name_suggests_close_ones(checkpoint: Path) -> None:
    assert_clean_error(call("show", str(checkpoint), "params.v"), "params.v", "params.w")


def test_what_is_no_checkpoint_is_said_so(tmp_path: Path) -> None:
    assert_clean_error(call("ls", str(tmp_path / "missing")), "missing: no such file or directory")
    (tmp_path / "notes.txt").write_text("hello")
    assert_clean_error(call("ls", str(tmp_path / "notes.txt")), "is not a")


def test_half_written_checkpoint_is_said_so(checkpoint: Path) -> None:
    (checkpoint / "meshtape.json").unlink()
    assert_clean_error(call("ls", str(checkpoint)), "was written by meshtape but")


def test_control_characters_of_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    mt.save(tmp_path / "c", {"a\x1b[31mred": np.zeros(2)})
    out = call("ls", str(tmp_path / "c")).output
    assert "\x1b[31mred" not in out
    assert "\\x1b" in out


def test_a_scheduler_that_does_not_answer_is_said_so_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket() as s, dask.config.set({"meshtape.timeouts.connect": 0.5}):
        s.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else can
        port = s.getsockname()[1]
        result = call("demo", "--scheduler", f"tcp://127.0.0.1:{port}", "--directory", str(tmp_path / "out"))
    assert_clean_error(result, "no Dask scheduler answers", str(port))
    assert not (tmp_path / "out").exists()


def test_a_nonsense_address_is_said_so() -> None:
    with dask.config.set({"meshtape.timeouts.connect": 0.5}):
        assert_clean_error(call("demo", "--scheduler", "nonsense"), "no Dask scheduler answers", "nonsense")


def test_wrong_calls_exit_with_2() -> None:
    assert call("demo", "--epochs", "0").exit_code == 2
    assert call("nothing").exit_code == 2
