"""The contract needs no GPU: the fixtures of the GPU suite that use one are empty here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def on_the_gpu() -> None:
    """Instead of the GPU suite's."""


@pytest.fixture(scope="session", autouse=True)
def report() -> None:
    """Instead of the GPU suite's."""


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``sweep(name, argument)``: the answer of a sweep, which runs once, in a process of its own."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("fake_cuda", HERE / "fake_cuda.py")
    fake_cuda = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fake_cuda)
    if (why := fake_cuda.missing()) is not None:
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("cuda")
    fake_cuda.build(folder)
    answers: dict[str, Any] = {}

    def run(name: str, argument: str = "") -> Any:
        key = f"{name} {argument}"
        if key not in answers:
            command = [sys.executable, str(HERE / "sweeps.py"), name, argument]
            env = {k: v for k, v in os.environ.items() if k not in (fake_cuda.VALUES, "MESHTAPE_EMULATED_GPU")}
            env |= {fake_cuda.BUILD: str(folder), "CUPY_CACHE_DIR": str(folder / "cupy")}
            done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280, check=False)
            answers[key] = (
                json.loads(done.stdout) if done.returncode == 0 else f"rc {done.returncode}: {done.stderr[-3000:]}"
            )
        if isinstance(answers[key], str):
            pytest.fail(f"the sweep {name} did not end: {answers[key]}")
        return answers[key]

    return run
