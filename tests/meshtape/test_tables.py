"""Tables on terminals of any width and in pipes: nothing is cut in a pipe, no two names look alike on a screen."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from meshtape.cli.main import main
from meshtape.cli.tables import Column, cells, console, shorten, wrapped, write
from meshtape.storage import save, save_safetensors

NAMES = st.lists(st.text("ab.1é漢", min_size=0, max_size=40), max_size=12, unique=True)


@given(NAMES, st.integers(0, 50))
def test_shortened_names_stay_apart_and_fit(names: list[str], width: int) -> None:
    short = shorten(names, width)
    assert len(set(short)) == len(names)
    for name, text in zip(names, short, strict=True):
        assert text == name or cells(text) <= max(width, 5)
        if cells(name) <= max(width, 5) and "…" not in name:
            assert text == name, "what fits is not touched"


@settings(max_examples=50)
@given(st.lists(st.text("ab.- 漢é", max_size=60), max_size=4), st.integers(1, 50), st.integers(0, 7))
def test_wrapped_sentences_have_all_their_words_and_fit(lines: list[str], width: int, first: int) -> None:
    text = wrapped("\n".join(lines), width, first)
    assert text.split() == " ".join(lines).split()
    for i, line in enumerate(text.split("\n")):
        indent = len(line) - len(line.lstrip(" "))
        assert (first if i == 0 else 0) + cells(line) <= width or " " not in line[indent:], "only a word is too long"


def test_numbered_layers_keep_their_numbers() -> None:
    names = [f"model.layers.{i}.self_attention.query.weight" for i in range(40)]
    short = shorten(names, 24)
    assert all(f".{i}." in text or f"{i}." in text for i, text in enumerate(short))
    assert all(len(t) <= 24 for t in short)


COLUMNS = [Column("name", name=True), Column("dtype", rank=1), Column("shape", rank=2), Column("bytes", number=True)]
ROWS = [[f"model.layers.{i}.attention.weight", "bfloat16", "(4096, 4096)", "32 MiB"] for i in range(3)]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_table_fits_its_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # a dumb one has 80 columns, whatever is asked for
    out = io.StringIO()
    write(COLUMNS, ROWS, title="three", footer=["3 arrays", "", "", "96 MiB"], on=Console(file=out, width=width, force_terminal=True, color_system=None))  # fmt: skip
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
    monkeypatch.setenv("TERM", "xterm")
    for command in ("ls", "tree"):
        out = io.StringIO()
        shown = Console(file=out, width=width, force_terminal=True, color_system=None)
        monkeypatch.setattr("meshtape.cli.tables.console", lambda shown=shown: shown)
        done = CliRunner().invoke(main, [command, str(tmp_path / "c")])
        assert done.exit_code == 0, done.output
        lines = out.getvalue().splitlines()
        assert all(len(line) <= width or " " not in line for line in lines), (
            "a path is whole, or it could not be copied"
        )
        if command == "ls":  # between the rule below the titles and the empty line above the sum
            start = next(i for i, line in enumerate(lines) if "───" in line) + 1
            rows = lines[start : next(i for i in range(start, len(lines)) if not lines[i].strip())]
            assert len(rows) == len(names)
            assert all("32.0 KiB" in row for row in rows)
        else:
            assert sum("── " in line for line in lines[len(lines) - len(names) :]) == len(names)
        everything = CliRunner().invoke(main, [command, str(tmp_path / "c"), "--json"]).stdout
        assert all(json.dumps(n) in everything for n in names)


class Screen(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [40, 60])
def test_every_command_fits_a_narrow_terminal(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Help, output and errors: no line runs over or breaks within a word, but words that are longer and commands to
    copy."""
    long = "encoder_of_the_whole_model.layers.7.attention.query_projection"
    state = {long: np.arange(6000, dtype=np.float64).reshape(60, 100), "漢字" * 20: np.ones(3), "x\x1b[2Jy": np.ones(2)}
    save(tmp_path / "a", state, step=3)
    save(tmp_path / "b", {**state, long: np.ones((60, 100)), "only b": np.ones(1), "lr": 0.5}, metadata={"z": 1})
    (tmp_path / "damaged").mkdir()
    (tmp_path / "run").mkdir()
    facts = {"state": "failed", "name": "run", "host": "h", "pid": 1, "error": "ValueError: " + "what went wrong " * 9}
    (tmp_path / "run" / "status.json").write_text(json.dumps(facts))
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    calls = [[name, "--help"] for name in main.commands] + [["--help"], ["lss"], ["ls"], ["ls", a, "--sort", "colour"]]
    calls += [
        ["ls", a],
        ["tree", a],
        ["show", a, long],
        ["show", a, "encoder"],
        ["verify", a],
        ["diff", a, b],
        ["info"],
    ]
    calls += [["estimate", a, "--mesh", "m=3", "--optimizer", "adam"], ["merge", a, str(tmp_path / "out")]]
    calls += [["merge", a, str(tmp_path / "out")], ["ls", str(tmp_path / "damaged")], ["status", str(tmp_path / "run")]]
    calls += [["convert", a, str(tmp_path / "z"), "--format", "zarr"], ["reshard", a, str(tmp_path / "r")]]
    monkeypatch.setattr("meshtape.cli.tables.terminal_width", lambda stream: width)
    for args in calls:
        done = CliRunner().invoke(main, args, env={"COLUMNS": str(width), "TERM": "xterm"})
        assert "Traceback" not in done.output
        assert done.exception is None or isinstance(done.exception, SystemExit), args
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.stdout + done.stderr)
        assert shown.strip()
        assert "\x1b" not in shown
        text, _, _ = shown.partition("Examples:")
        if args == ["completion", "--help"]:
            text = text.partition("Put it")[0]  # paths to copy
        for line in re.split(r"[\n\r]", text):
            assert cells(line) <= width or " " not in line.strip(), f"{args}: {line!r}"
        words = {w for w in re.split(r"\s", shown) if w.isalpha() and w.isascii()}
        whole = (
            CliRunner().invoke(main, args, env={"COLUMNS": "1000", "TERM": "xterm"}).output if "--help" in args else ""
        )
        assert not whole or words <= set(re.split(r"[\s]", whole)), "no word is broken"


def test_a_terminal_is_what_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its width counts even where it is dumb; colours that are asked for make no terminal of a pipe."""
    monkeypatch.setenv("COLUMNS", "47")
    for term in ("xterm", "dumb", "unknown"):
        monkeypatch.setenv("TERM", term)
        monkeypatch.setattr(sys, "stdout", Screen())
        assert (console().is_terminal, console().width) == (True, 47)
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
            monkeypatch.setenv(name, "1")
            assert not console().is_terminal
            monkeypatch.delenv(name)


def test_a_pipe_gets_whole_lines() -> None:
    out = io.StringIO()
    long = "x" * 500
    write(COLUMNS, [[long, "float32", "(1,)", "4 B"]], on=Console(file=out, width=40))
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
    piped = CliRunner().invoke(main, command[3:], env={"COLUMNS": "40"})
    assert {line.split()[0] for line in piped.stdout.splitlines()[2:-1]} == set(names)
