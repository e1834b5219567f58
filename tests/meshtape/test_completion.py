"""Completion in a real bash, as somebody who presses Tab meets it."""

from __future__ import annotations

import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from meshtape.cli.main import main
from meshtape.storage import save_safetensors


def environment(tmp_path: Path) -> dict[str, str]:
    """One in which ``meshtape`` is the command of this environment, whatever is installed besides."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    command = tmp_path / "bin" / "meshtape"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m meshtape "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}


def installed(shell: str) -> str:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed")
    return found


def pressed(tmp_path: Path, *lines: str) -> list[list[str]]:
    """What bash offers after each of ``lines``, with the cursor at its end."""
    bash = installed("bash")
    script = [CliRunner().invoke(main, ["completion", "bash"]).output]
    for line in lines:
        words = shlex.split(line) + ([""] if line.endswith(" ") else [])
        script.append(
            f"COMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}; COMPREPLY=()\n"
            "_meshtape_completion meshtape\n"
            'printf "%s\\t" "${COMPREPLY[@]}"; echo'
        )
    done = subprocess.run(
        [bash, "--norc", "-c", "\n".join(script)],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [[w for w in line.split("\t") if w] for line in done.stdout.splitlines()]


def test_bash_completes_commands_options_choices_and_names(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "m.safetensors", {f"layers.{i}.w": np.ones(2, np.float32) for i in range(3)})
    commands, options, choices, names, none = pressed(
        tmp_path,
        "meshtape con",
        "meshtape ls --s",
        "meshtape convert a b --format ",
        "meshtape show m.safetensors layers.",
        "meshtape show missing.safetensors l",
    )
    assert commands == ["convert"]
    assert options == ["--sort"]
    assert choices == ["zarr", "safetensors", "dcp"]
    assert names == ["layers.0.w", "layers.1.w", "layers.2.w"]
    assert none == []


def test_fish_completes_commands_options_choices_and_names(tmp_path: Path) -> None:
    fish = installed("fish")
    save_safetensors(tmp_path / "m.safetensors", {f"layers.{i}.w": np.ones(2, np.float32) for i in range(3)})
    script = [CliRunner().invoke(main, ["completion", "fish"]).output]
    lines = ("meshtape con", "meshtape ls --s", "meshtape convert a b --format ", "meshtape show m.safetensors layers.")
    script += [f"complete -C {shlex.quote(line)}; echo ----" for line in lines]
    done = subprocess.run(
        [fish, "--no-config", "-c", "\n".join(script)],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=240,
    )
    offered = [[row.split("\t")[0] for row in part.splitlines() if row] for part in done.stdout.split("----\n")]
    assert offered[:4] == [
        ["convert"],
        ["--sort"],
        ["dcp", "safetensors", "zarr"],
        ["layers.0.w", "layers.1.w", "layers.2.w"],
    ], done.stderr


def test_zsh_completes_what_stands_at_its_prompt(tmp_path: Path) -> None:
    # zsh completes at a prompt alone, so it gets a terminal.
    zsh = installed("zsh")
    save_safetensors(tmp_path / "m.safetensors", {"encoder.weight": np.ones(2, np.float32)})
    (tmp_path / "script").write_text(CliRunner().invoke(main, ["completion", "zsh"]).output)
    (tmp_path / ".zshrc").write_text(
        "PS1='is-ready> '; autoload -Uz compinit; compinit -u -D; source ./script\n"  # the prompt comes once keys are read
    )
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            [zsh, "-i"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=tmp_path,
            env={**environment(tmp_path), "ZDOTDIR": str(tmp_path), "TERM": "dumb"},
            start_new_session=True,
        ) as shell:
            os.close(theirs)
            try:
                seen = wait_for(ours, "is-ready", "")
                for typed, completed in (
                    ("meshtape conv\t", "meshtape convert "),
                    ("a b --form\t", "--format "),
                    ("safe\t", "safetensors "),
                    ("\x15meshtape show m.safetensors enc\t", "encoder.weight"),
                ):
                    os.write(ours, typed.encode())
                    seen = wait_for(ours, completed, seen)
            finally:
                shell.kill()
    finally:
        os.close(ours)


def wait_for(terminal: int, text: str, seen: str) -> str:
    """Read from a terminal until ``text`` is there; returns what came after it."""
    until = time.monotonic() + 240
    while text not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, until - time.monotonic()))
        assert ready, f"{text!r} never came; there is {seen!r}"
        seen += os.read(terminal, 65536).decode("utf-8", "replace")
    return seen.partition(text)[2]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_takes_its_script(shell: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["completion", shell])
    assert done.exit_code == 0
    assert f"{shell}_complete" in done.output
    there = installed(shell)
    (tmp_path / "script").write_text(done.output)
    subprocess.run([there, "-n", str(tmp_path / "script")], check=True, timeout=120)
