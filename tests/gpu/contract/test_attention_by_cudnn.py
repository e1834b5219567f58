"""Attention by cuDNN: its calls over a stand-in for the frontend, which computes by NumPy; and the plans that the real
library makes for devices that are not there."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Sweep = Callable[..., Any]
HERE = Path(__file__).parent


def test_attention_by_cudnn_is_that_of_the_cpu(sweep: Sweep, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Results and gradients, grouped and causal, packed and where heads lie beside each other; in a CUDA graph, too."""
    cache = getattr(request.config, "cache", None)
    found = sweep("attention", str(tmp_path if cache is None else cache.mkdir("values")))
    assert found["values"] == found["not finite"] == found["failures"] == []
    both = ["sdpa", "sdpa_backward"]
    assert found["graph"] == {"first": [], "again": [], "waits": [], "plans": both}
    assert found["served"] == ["again", None, 0, 39, 60]
    assert found["in any order"] is False
    plans, same = found["parts"]
    assert same
    assert plans == [["sdpa", [2, 2, 40, 16]], *[["sdpa_backward", [1, 1, 40, 16]]] * 4]
    assert found["no memory"] == [False, True]  # the other way back, from cuDNN's sums


def test_attention_by_a_cudnn_that_is_wrong(sweep: Sweep, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    cache = getattr(request.config, "cache", None)
    found = sweep("attention", str(tmp_path if cache is None else cache.mkdir("values")))
    for name in ("wrong", "hidden", "broken"):
        assert found[name] == [True, ["[attention] cuDNN 92801 is not used"]]
    assert found["refused"] == [True, []]
    assert found["fails"] == "[attention] cuDNN failed: CUDNN_STATUS_EXECUTION_FAILED"


@pytest.mark.slow
def test_cudnn_plans_attention_for_devices_that_are_not_there(tmp_path: Path) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("cudnn", "nvidia")) or shutil.which("gcc") is None:
        pytest.skip("needs gcc and the wheels nvidia-cudnn-frontend, nvidia-cudnn-cu13 and nvidia-cublas")
    folders = [p for root in importlib.import_module("nvidia").__path__ for p in Path(root).glob("*/lib")]
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-w",
        "-o",
        tmp_path / "libcuda.so.1",
        HERE / "no_driver.c",
    ]
    subprocess.run(command, check=True)
    shutil.copy(tmp_path / "libcuda.so.1", tmp_path / "libcudart.so.13")
    env = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, (tmp_path, *folders)))}
    command = [sys.executable, "-P", str(HERE / "plans.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=250, check=True)
    found = json.loads(done.stdout)
    assert found.pop("version") >= 90_000
    assert len(found) == 42
    for name, plans in found.items():
        for parts, workspace, notes in plans:
            assert workspace <= 1 << 30, name
            assert "SUPPORTS_CUDA_GRAPH_NATIVE_API" in notes, name
            assert parts == 1 or "long" in name
