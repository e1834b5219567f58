"""The commands of storage as people use them: odd names, odd terminals, pipes, Ctrl-C, mistakes."""

from __future__ import annotations

import http.server
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import meshtape as mt
from meshtape.cli import tables
from meshtape.cli.main import _plain_warnings, main
from meshtape.cli.storage import _progress

W = np.arange(24, dtype=np.float32).reshape(4, 6)
ODD = "a b ü 日本/it's $HOME; #1"


def call(*args: str, **environment: str) -> Result:
    return CliRunner().invoke(main, list(args), env={"COLUMNS": "160", **environment})


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, its export and an array, all with names that a shell would have to quote."""
    home = tmp_path_factory.mktemp("odd")
    mt.save(home / ODD, {"params": {"w": W, "ñame with space": np.ones(3)}, "step": 4}, step=4)
    mt.merge(home / ODD, home / "hf ü")
    return home


COMMANDS = {
    "ls": lambda c, hf, out: ["ls", c],
    "show": lambda c, hf, out: ["show", c, "params.ñame with space"],
    "tree": lambda c, hf, out: ["tree", c],
    "verify": lambda c, hf, out: ["verify", c],
    "diff": lambda c, hf, out: ["diff", c, hf, "--keys", "params.*"],
    "estimate": lambda c, hf, out: ["estimate", c, "--mesh", "m=2", "--shard", "params.w:m=0"],
    "merge": lambda c, hf, out: ["merge", c, out],
    "convert": lambda c, hf, out: ["convert", hf, out, "--format", "zarr"],
    "reshard": lambda c, hf, out: ["reshard", c, out, "--mesh", "m=2", "--shard", "params.*:m=0"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_odd_names_and_gives_data(command: str, held: Path, tmp_path: Path) -> None:
    args = COMMANDS[command](str(held / ODD), str(held / "hf ü"), str(tmp_path / ODD))
    plain = call(*args)
    assert plain.exit_code == 0, plain.output
    data = call(*args, "--json", *(["--overwrite"] if command in ("merge", "convert", "reshard") else []))
    assert data.exit_code == 0, data.output
    assert data.stderr == ""
    assert json.loads(data.stdout)
    if command in ("merge", "convert", "reshard"):
        assert np.array_equal(np.asarray(mt.open_checkpoint(tmp_path / ODD)["params.w"]), W)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("place", "match"),
    [
        ("nothing", "Error: .*nothing: no such file or directory"),
        ("program", "is a program file"),
        ("text", "is not a safetensors file, nor one of NumPy or PyTorch"),
        ("text.json", "is not a safetensors file.*document of a virtual checkpoint"),
        ("s3://KEY:hush-hush@bucket/x", "credentials come from the environment"),
        ("https://me:hush-hush@host/x?signature=hush-hush", "credentials come from the environment"),
        ("foo://host/x", "known are s3://"),
    ],
)
def test_what_is_no_checkpoint(command: str, place: str, match: str, held: Path, tmp_path: Path) -> None:
    mt.save_program(tmp_path / "program", lambda x: x, mt.ones(2))
    (tmp_path / "text").write_text("plain text, and more of it")
    (tmp_path / "text.json").write_text('{"format": "meshtape.Virtual", "version": 1}')
    where = place if "://" in place else str(tmp_path / place)
    args = [where if a == str(held / ODD) else a for a in COMMANDS[command](str(held / ODD), str(held / ODD), "out")]
    done = call(*args, HOME=str(tmp_path))
    assert done.exit_code == 1
    assert re.search(match, done.stderr)
    assert done.stdout == ""
    assert "hush" not in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"params.w -> w\n# a remark\nparams.b => q\n", r"names.rules: line 3, column 10: expected '->'.*\n  params.b"),
        (b"\n\nparams.zz -> q\n", r"'params.zz' matches no key[^$]*params.zz -> q   \(line 3\)\nnearest keys"),
        (b"params.w -> w\nparams.w -> w\n", r"\(line 1\)\nand by\n  params.w -> w   \(line 2\)"),
        (b"params.w -> w\nparams.w -> v, reshape(shape=[5, 5])\n", r"reshape[^$]*\(line 2\)"),
        (b"params.w -> w\n\xff\n", r"names.rules: line 2: not UTF-8"),
        (b"params.w -> w, frobnicate()\n", r"names.rules: line 1, column 16"),
    ],
)
def test_mistakes_in_rules_are_shown_with_file_and_line(text: bytes, match: str, held: Path, tmp_path: Path) -> None:
    (tmp_path / "names.rules").write_bytes(text)
    for command in ("merge", "diff"):
        done = call(command, str(held / ODD), str(held / "hf ü"), "--rules", str(tmp_path / "names.rules"), "--overwrite" if command == "merge" else "--json")  # fmt: skip
        assert done.exit_code == 1
        assert re.search(match, done.stderr), done.stderr
        assert "Traceback" not in done.stderr
    (tmp_path / "names.rules").write_bytes(b"\xef\xbb\xbf# from an editor of another system\r\nparams.w -> w\r\n")
    done = call("merge", str(held / ODD), str(tmp_path / "out"), "--rules", str(tmp_path / "names.rules"))
    assert done.exit_code == 0, done.output
    assert "w" in mt.open_checkpoint(tmp_path / "out")


def test_a_model_where_an_adapter_is_wanted_and_the_other_way_round(tmp_path: Path) -> None:
    for name, k in (("m", 0.0), ("t", 1.0)):
        mt.storage.save_safetensors(tmp_path / f"{name}.safetensors", {"q.weight": np.full((4, 4), k, "f4")})
    m, t, ad, out = (str(tmp_path / name) for name in ("m.safetensors", "t.safetensors", "ad", "out"))
    mt.storage.extract_lora(t, m, ad, rank=1)
    held = {"merge_method": "linear", "models": [{"model": x, "parameters": {"weight": 1}} for x in (m, ad)]}
    (tmp_path / "c.yml").write_text(json.dumps(held))
    adapter, model = f"{ad}/adapter_model.safetensors is an adapter", f"{m} is no adapter of PEFT, which is a directory"
    for args, wanted in (
        (("lora-extract", ad, m, out, "--rank", "1"), adapter),
        (("lora-extract", m, ad, out, "--rank", "1"), adapter),
        (("lora-merge", t, m, out), model),
        (("derive", "lora", t, m, "--out", out), model),
        (("blend", str(tmp_path / "c.yml"), "--out", out), f"{adapter}, and {m} has no adapter_config.json"),
        (("show", m, "zz"), "has no array 'zz'; it holds q.weight"),
    ):
        done = call(*args)
        assert (done.exit_code, done.stdout) == (1, "")
        assert wanted in done.stderr


def test_a_broken_step_is_told_beside_the_whole_ones(tmp_path: Path) -> None:
    manager = mt.CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, {"w": np.ones(3)})
    (tmp_path / "step-00000002" / "meshtape.json").write_text("{")
    row = next(line for line in call("ls", str(tmp_path)).stdout.splitlines() if "00002" in line)
    assert "not a manifest" in row
    assert " B " not in row
    *_, last = call("du", str(tmp_path)).stdout.splitlines()
    assert re.match(r"cannot be opened, 1[.]. KiB: .*step-00000002: .*not a manifest", last)


def test_a_warning_is_one_line_without_the_place_in_the_code(tmp_path: Path) -> None:
    manager = mt.CheckpointManager(tmp_path)
    manager.save(1, {"w": np.ones(3)})
    mt.merge(manager.path(1), tmp_path / "checkpoint-4")
    for command in ("ls", "du"):
        done = meshtape(command, str(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        _, told = done.communicate(timeout=200)
        assert done.returncode == 0
        assert re.fullmatch(
            r"warning: .*of another writer beside this run are no steps of it: checkpoint-4; .*\n", told
        )
    python = warnings.formatwarning
    with _plain_warnings():
        assert warnings.formatwarning("a\nb", UserWarning, "f.py", 3) == "warning: a\\x0ab\n"
        assert "f.py:3: RuntimeWarning: a" in warnings.formatwarning("a", RuntimeWarning, "f.py", 3)
        with click.Context(main.commands["run"]):
            assert "f.py:3: UserWarning: a" in warnings.formatwarning("a", UserWarning, "f.py", 3)
    assert warnings.formatwarning is python


def test_a_run_without_metrics_has_no_column_for_them(tmp_path: Path) -> None:
    manager = mt.CheckpointManager(tmp_path)
    manager.save(1, {"w": np.ones(3)})
    assert call("ls", str(tmp_path)).stdout.splitlines()[1].split() == ["step", "arrays", "bytes", "branch"]


def test_derive_marks_where_it_cuts(tmp_path: Path) -> None:
    name = "model.embed_tokens.weight_of_a_layer_with_a_long_name"
    mt.save(tmp_path / "c", {name: np.ones((4, 2))})
    out = call("derive", "rows", str(tmp_path / "c"), "--rows", f"{name}:0:2", "--out", str(tmp_path / "d")).stdout
    assert f"ranges=(('{name}', 0…): 1 array" in out


def meshtape(*args: str, **options: Any) -> subprocess.Popen[Any]:
    environment = {**os.environ, **options.pop("environment", {})}
    return subprocess.Popen([sys.executable, "-m", "meshtape", *args], env=environment, **options)


def test_pipes_full_disks_and_terminals_without_our_characters(held: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "TERM": "dumb", "COLUMNS": "1"}
    args = ("ls", str(held / ODD))
    running = [meshtape(*args, environment=ascii_only, stdout=subprocess.PIPE, stderr=subprocess.PIPE)]
    reader, writer = os.pipe()
    os.close(reader)  # who reads has gone
    running.append(meshtape(*args, stdout=writer, stderr=subprocess.PIPE))
    os.close(writer)
    if Path("/dev/full").exists():
        with Path("/dev/full").open("wb") as full:
            running.append(meshtape(*args, stdout=full, stderr=subprocess.PIPE))
    (out, err), *others = [p.communicate(timeout=200) for p in running]
    assert (running[0].returncode, err) == (0, b"")
    assert rb"params.\xf1ame with space" in out
    assert (running[1].returncode, others[0][1]) == (1, b"")
    if len(running) > 2:
        assert running[2].returncode == 1
        assert b"Traceback" not in others[1][1]
        assert b"No space left on device" in others[1][1]


def _closing(*streams: int) -> Any:
    """As ``>&-`` of a shell does, before the command begins."""
    return lambda: [os.close(n) for n in streams]


def test_closed_streams_and_full_disks(held: Path, tmp_path: Path) -> None:
    """The work is done, without a traceback; where the output has no room, one line says so."""
    at = str(held / ODD)
    works = [
        ("ls", at),
        ("ls", at, "--json"),
        ("tree", at),
        ("merge", at, str(tmp_path / "out")),
        ("merge", at, str(tmp_path / "quiet"), "--json"),
        ("--help",),
    ]
    running = [meshtape(*w, preexec_fn=_closing(1), stderr=subprocess.PIPE) for w in works]
    for p in running:
        err = p.communicate(timeout=200)[1]
        assert (p.returncode, b"Error" in err) == (0, False), err
    for made in ("out", "quiet"):
        found = mt.storage.diff(at, tmp_path / made)
        assert (found.equal, found.arrays) == (2, [])
    silent = meshtape("ls", at, preexec_fn=_closing(2), stdout=subprocess.PIPE)
    assert b"w" in silent.communicate(timeout=200)[0]
    assert silent.returncode == 0
    lost = meshtape("ls", str(tmp_path / "nothing"), preexec_fn=_closing(0, 1, 2))
    assert lost.wait(200) == 1
    if Path("/dev/full").exists():
        for args in (("--help",), ("--version",), ("ls", "--help")):
            with Path("/dev/full").open("wb") as full:
                p = meshtape(*args, stdout=full, stderr=subprocess.PIPE)
            assert p.communicate(timeout=200)[1] == b"Error: No space left on device\n"
            assert p.returncode == 1


class _Halting(http.server.ThreadingHTTPServer):
    """Serves files; the request ``stop_at`` for a file's bytes waits until it is told to go on."""

    daemon_threads = True

    def __init__(self, root: Path, stop_at: int) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        number = itertools.count(1)  # requests come at the same time, and one step of it is indivisible
        halting = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def __init__(self, *args: Any) -> None:
                super().__init__(*args, directory=str(root))

            def do_GET(self) -> None:
                if not Path(self.translate_path(self.path)).is_file():
                    self.send_error(404)
                    return
                data = Path(self.translate_path(self.path)).read_bytes()
                asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["range"])
                assert asked is not None
                a, b = int(asked[1]), min(int(asked[2]), len(data) - 1)
                if self.path.endswith(".safetensors") and a and next(number) == stop_at:
                    halting.reached.set()
                    halting.go_on.wait(200)
                self.send_response_only(206)
                self.send_header("Content-Range", f"bytes {a}-{b}/{len(data)}")
                modified = Path(self.translate_path(self.path)).stat().st_mtime
                self.send_header("Last-Modified", self.date_time_string(modified))
                self.send_header("Content-Length", str(b + 1 - a))
                self.end_headers()
                self.wfile.write(data[a : b + 1])

            def log_message(self, *args: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that was interrupted


def test_ctrl_c_in_the_middle_of_a_merge(tmp_path: Path) -> None:
    """It says that the same command goes on, and the same command goes on."""
    pytest.importorskip("obstore")
    mt.save(tmp_path / "c", {f"k{i}": np.full(60_000, i, "f4") for i in range(4)})
    mt.merge(tmp_path / "c", tmp_path / "served")
    server = _Halting(tmp_path, 3)
    try:
        source = f"http://127.0.0.1:{server.server_address[1]}/served"
        command = ("merge", source, str(tmp_path / "out"), "--threads", "1", "--memory-limit", "1")
        with meshtape(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            while not server.reached.wait(0.1):
                assert running.poll() is None, running.communicate()
            # No answer comes meanwhile: the interrupt meets the wait for it, and no other line of the program.
            running.send_signal(signal.SIGINT)
            out, err = running.communicate(timeout=200)
            server.go_on.set()
        assert running.returncode == 130, err
        assert "interrupted. What was written stays: the same command goes on" in err
        assert "Traceback" not in err
        assert out == ""
        assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "out.part", "served"]
        done = call(*command)
        assert done.exit_code == 0, done.output
        first = re.match(r"merging: (\S+ \S+) of", done.stderr)
        assert first is not None
        assert first[1] != "0 B"
        assert mt.storage.diff(tmp_path / "c", tmp_path / "out").same
        assert not (tmp_path / "out.part").exists()
    finally:
        server.go_on.set()
        server.shutdown()
        server.server_close()


def test_an_error_of_the_arguments_comes_without_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(tables, "console", lambda stderr: Console(file=out, force_terminal=True))
    with pytest.raises(mt.errors.NotACheckpoint), _progress("merging", shown=True):
        raise mt.errors.NotACheckpoint("nothing is there")
    assert out.getvalue() == ""
    with _progress("merging", shown=True) as show:
        show(1, 2)
    assert "merging" in out.getvalue()
