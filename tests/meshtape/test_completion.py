"""Completion in a real bash, as somebody who presses Tab meets it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from meshtape.cli import main
from meshtape.storage import save_safetensors


def pressed(tmp_path: Path, *lines: str) -> list[list[str]]:
    """What bash offers after each of ``lines``, with the cursor at its end."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    # The command of this environment, whatever is installed besides.
    (tmp_path / "bin").mkdir(exist_ok=True)
    command = tmp_path / "bin" / "meshtape"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m meshtape "$@"\n')
    command.chmod(0o755)
    script = [CliRunner().invoke(main, ["completion", "bash"]).output]
    for line in lines:
        words = shlex.split(line) + ([""] if line.endswith(" ") else [])
        script.append(
            f"COMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}; COMPREPLY=()\n"
            "_meshtape_completion meshtape\n"
            'printf "%s\\t" "${COMPREPLY[@]}"; echo'
        )
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [bash, "--norc", "-c", "\n".join(script)],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
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
    assert choices == ["zarr", "safetensors"]
    assert names == ["layers.0.w", "layers.1.w", "layers.2.w"]
    assert none == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_takes_its_script(shell: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["completion", shell])
    assert done.exit_code == 0
    assert f"{shell}_complete" in done.output
    there = shutil.which(shell)
    if there is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(done.output)
    subprocess.run([there, "-n", str(tmp_path / "script")], check=True, timeout=120)
