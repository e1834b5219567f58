"""The contract needs no GPU: the fixtures of the GPU suite that use one are empty here."""

from __future__ import annotations

import os
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
        if os.environ.keys() & {"CI", "MESHTAPE_DEMO"}:  # the second is set by .ci/run
            pytest.fail(f"the contract cannot run: {why}")
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("cuda")
    fake_cuda.build(folder)
    answers: dict[tuple[str, str], Any] = {}

    def run(name: str, argument: str = "") -> Any:
        if (name, argument) not in answers:
            try:
                answers[name, argument] = fake_cuda.answer(folder, name, argument)
            except RuntimeError as e:
                answers[name, argument] = e
        if isinstance(found := answers[name, argument], RuntimeError):
            pytest.fail(str(found))
        return found

    return run
