"""Budgets of kernels that are written at run time, by the machine code that NVRTC makes of some of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.chains import large
from meshtape.arrays.core.op import Op
from meshtape.arrays.kernels import launch
from meshtape.autodiff.compiler.executable import local_executable

Call = Callable[[Any], Any]


def ones(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def compiled(fn: Callable[..., Any], *arguments: Any) -> Call:
    """A call of the compiled function by kernels."""

    def call(xp: Any) -> Any:
        program = mt.compile(fn).program(*mt.tree_map(mt.asarray, arguments))
        return local_executable(program, xp)([xp.array(np.asarray(a)) for a in mt.tree.flatten(arguments)[0]])

    return call


def single(name: str, params: dict[str, Any], *hosts: np.ndarray) -> Call:
    """A call of an op on large arrays."""
    return lambda xp: large.of_large(mt.OPS[name], [xp.array(h) for h in hosts], params)


def adamw(xp: Any) -> Any:
    optimizer, leaves = mt.optim.adamw(0.1), [*map(mt.asarray, (X, X[0]))]
    return compiled(optimizer.update, leaves, leaves, optimizer.init(leaves))(xp)


def gelu(x: Any) -> Any:
    return mt.nn.gelu(x) * 2.0


def squares(x: Any, center: Any) -> Any:
    return mt.sum(mt.square(x - center), axis=-1)


SHORT = np.dtype(mt.bfloat16)
X, H, CENTER = ones((8, 64)), ones((8, 64), SHORT), ones((80, 1))
CALLS: dict[str, tuple[Call, tuple[int, int, int]]] = {
    "a chain, float32": (compiled(gelu, X), (32, 2, 6)),
    "a chain, bfloat16": (compiled(gelu, H), (32, 2, 3)),
    "a chain along rows, bfloat16": (compiled(lambda x, b: x * b + 1.0, H, H[0]), (32, 3, 4)),
    "a sum of each row, float32": (compiled(squares, ones((80, 64)), CENTER), (32, 3, 2)),
    "a sum of each row, bfloat16": (compiled(squares, ones((80, 64), SHORT), CENTER.astype(SHORT)), (32, 3, 2)),
    "AdamW": (adamw, (40, 7, 37)),
    "one op, bfloat16": (single("add", {}, H, H), (32, 3, 3)),
    "a cast": (single("astype", {"dtype": SHORT}, X), (32, 3, 2)),
    "a copy of a part": (lambda xp: launch.contiguous(xp.array(ones((8, 128)))[:, 32:96]), (32, 2, 10)),
}
"""A call, and of its largest kernel, where it reads vectors: registers at most, accesses of 16 bytes at least, and
narrower ones at most, which are those of single numbers and of the elements at an end."""


@pytest.mark.parametrize("name", CALLS)
def test_written_kernels_stay_within_their_budgets(
    name: str,
    emulation: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine_code: Callable[..., dict[str, str]],
) -> None:
    call, budget = CALLS[name]
    monkeypatch.setattr(Op, "large", 1)
    large._single.cache_clear()
    runner = emulation.Emulator(tmp_path)
    runner.noted = set()
    with launch.running_on(runner):
        call(runner.xp)
    large._single.cache_clear()
    assert len(runner.noted) == (2 if name == "AdamW" else 1)  # one more counts the steps
    file, kernel = max(runner.noted, key=lambda named: len(launch.GENERATED[named[0]]))
    assert kernel.startswith("fused<true")
    found = machine_code.figures(machine_code(file, [kernel], 90)[kernel])
    assert (found.over(*budget), found.spilled) == ("", 0)
