"""Tables on terminals of any width and in pipes: nothing is cut in a pipe, no two names look alike on a screen."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from meshtape.cli import main
from meshtape.storage import save, save_safetensors
from meshtape.tables import Column, shorten, write

NAMES = st.lists(st.text("ab.1é漢", min_size=0, max_size=40), max_size=12, unique=True)


@given(NAMES, st.integers(0, 50))
def test_shortened_names_stay_apart_and_fit(names: list[str], width: int) -> None:
    short = shorten(names, width)
    assert len(set(short)) == len(names)
    for name, text in zip(names, short, strict=True):
        assert text == name or len(text) <= max(width, 5)
        if len(name) <= max(width, 5) and "…" not in name:
            assert text == name, "what fits is not touched"


def test_numbered_layers_keep_their_numbers() -> None:
    names = [f"model.layers.{i}.self_attention.query.weight" for i in range(40)]
    short = shorten(names, 24)
    assert all(f".{i}." in text or f"{i}." in text for i, text in enumerate(short))
    assert all(len(t) <= 24 for t in short)


COLUMNS = [Column("name", name=True), Column("dtype", rank=1), Column("shape", rank=2), Column("bytes", number=True)]
ROWS = [[f"model.layers.{i}.attention.weight", "bfloat16", "(4096, 4096)", "32 MiB"] for i in range(3)]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_table_fits_its_terminal(width: int) -> None:
    out = io.StringIO()
    write(COLUMNS, ROWS, title="three", footer=["3 arrays", "", "", "96 MiB"], console=Console(file=out, width=width, force_terminal=True, color_system=None))  # fmt: skip
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if "32 MiB" in line]
    assert len(rows) == 3, "one line a row"
    assert len({r.split()[0] for r in rows}) == 3
    assert ("not shown" in out.getvalue()) == (width == 40)
    assert sum("96 MiB" in line for line in lines) == 1


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_row_of_a_real_listing_is_wrapped(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ls`` and ``tree`` of long names: one line an array, what is cut says so, and ``--json`` has all of it."""
    names = [f"layers.{i}.attention.query_projection_of_the_encoder.{n}" for i in range(3) for n in ("kernel", "bias")]
    names += ["embedding.word_embeddings_with_a_very_long_name_indeed", "w"]
    save(tmp_path / "c", {n: np.zeros((64, 128), np.float32) for n in names})
    for command in ("ls", "tree"):
        out = io.StringIO()
        shown = Console(file=out, width=width, force_terminal=True, color_system=None)
        monkeypatch.setattr("rich.console.Console", lambda shown=shown: shown)
        done = CliRunner().invoke(main, [command, str(tmp_path / "c")])
        assert done.exit_code == 0, done.output
        lines = out.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        if command == "ls":  # between the rule below the titles and the empty line above the sum
            start = next(i for i, line in enumerate(lines) if "───" in line) + 1
            rows = lines[start : next(i for i in range(start, len(lines)) if not lines[i].strip())]
            assert len(rows) == len(names)
            assert all("32.0 KiB" in row for row in rows)
        else:
            assert all("── " in line for line in lines)
        everything = CliRunner().invoke(main, [command, str(tmp_path / "c"), "--json"]).stdout
        assert all(json.dumps(n) in everything for n in names)


def test_a_pipe_gets_whole_lines() -> None:
    out = io.StringIO()
    long = "x" * 500
    write(COLUMNS, [[long, "float32", "(1,)", "4 B"]], console=Console(file=out, width=40))
    head, row = out.getvalue().splitlines()
    assert head.split() == ["name", "dtype", "shape", "bytes"]
    assert row.split()[0] == long
    assert row.endswith("4 B")


def in_terminal(command: list[str], columns: int) -> str:
    """What a command writes to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "LINES": "50", "TERM": "xterm"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        parts = []
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # what Linux says when the other side is closed
                break
            if not data:
                break
            parts.append(data)
        assert process.wait(120) == 0
    os.close(ours)
    return b"".join(parts).decode()


def test_ls_on_a_real_terminal(tmp_path: Path) -> None:
    names = [f"encoder.layers.{i}.feed_forward.projection.weight" for i in range(12)]
    save_safetensors(tmp_path / "m.safetensors", {n: np.ones((4, 4), np.float32) for n in names})
    command = [sys.executable, "-m", "meshtape", "ls", str(tmp_path / "m.safetensors")]
    shown = [line for line in in_terminal(command, 40).splitlines() if "64 B" in line]
    assert len(shown) == len({line.split()[0] for line in shown}) == 12
    assert all(len(line) <= 40 for line in shown)
    piped = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "40"})
    assert {line.split()[0] for line in piped.stdout.splitlines()[2:-1]} == set(names)
