"""What the emulator runs of all kernels: each of them by default, and in the long runs each with all of its dtypes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshtape.arrays import kernels
from meshtape.arrays.kernels import launch

VARIANTS = set(kernels.variants())
AFTER_A_VALUE = {("scans.cu", "write_true")}
"""Kernels that are launched with what the host has read before, and so not where nothing is computed."""


def dtypes_of(variant: tuple[str, str]) -> tuple[str, ...]:
    """File and kernel of a variant, and the dtypes among its arguments."""
    file, name = variant
    kernel, *arguments = re.split(r"<|>|, ", name)
    return file, kernel, *(a for a in arguments if a in launch.NAMES.values())


def test_the_emulator_runs_every_kernel_and_dtype(
    emulation: Any, tmp_path: Path, record_property: Callable[..., None]
) -> None:
    """By a run of all tests of this folder that only notes what they launch."""
    noted = tmp_path / "noted"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "slow or not slow"]
    env = {**os.environ, "MESHTAPE_NOTED_KERNELS": str(noted)}
    done = subprocess.run([*command, Path(__file__).parent], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    rows = [line.split("|") for line in noted.read_text().splitlines()]
    default, every = (
        {(file, kernel) for slow, file, kernel in rows if slow in which} & VARIANTS for which in (("0",), ("0", "1"))
    )
    counts = f"{len(default)} of {len(VARIANTS)} variants of kernels by default, {len(every)} with long runs"
    record_property("counted", f"the emulator runs {counts}")
    assert {dtypes_of(v)[:2] for v in VARIANTS - default} - {dtypes_of(v)[:2] for v in default} == AFTER_A_VALUE
    missing = {dtypes_of(v) for v in VARIANTS} - {dtypes_of(v) for v in every} - AFTER_A_VALUE
    assert not missing, "\n".join(map(str, sorted(missing)))
