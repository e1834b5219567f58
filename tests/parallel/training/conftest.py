import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import meshtape as mt

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"


@functools.cache
def module_of(name: str) -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


@pytest.fixture(scope="session")
def benchmark_module() -> Callable[[str], ModuleType]:
    """A program of ``benchmarks/`` as a module: its table is made by the code of which a test runs a sample."""
    return module_of


class SmallRun:
    """Runs of a decoder of a few thousand parameters, with dropout, warm-up, clipping and an average, on random tokens:
    ``run(axes, plan, **options)`` is a trainer on a mesh of these axes (or a mesh). ``usual`` are options of all of
    them."""

    def __init__(self, layers: int, tokens: int = 700, **usual: Any) -> None:
        self.config = mt.models.decoder.Config(vocab=32, width=16, layers=layers, heads=2, max_length=16, dropout=0.1)
        self.tokens = np.random.default_rng(0).integers(0, 32, tokens)
        self.usual = {"batch": 8, "accumulation": 2, "log_every": 1, "clip": 1.0, "ema": mt.optim.ema(0.9)} | usual

    def __call__(self, axes: Any = None, plan: str = "dp", config: Any = None, **options: Any) -> mt.Trainer:
        de = mt.models.decoder
        config, chosen = config or self.config, de.plan(plan)
        return mt.Trainer(
            lambda p, b, key: de.loss(p, b, config, key=key, plan=chosen),
            lambda key: de.init(key, config),
            mt.optim.adamw(mt.optim.warmup_cosine(1e-2, 3, 20)),
            self.samples(),
            mesh=axes if axes is None or isinstance(axes, mt.Mesh) else mt.Mesh(axes),
            plan=chosen,
            stages=de.staged(config, plan=chosen),
            **self.usual | options,
        )

    def samples(self, tokens: int | None = None) -> mt.training.TokenSource:
        """Windows of the first so many tokens, or of all."""
        return mt.training.TokenSource(self.tokens[:tokens], 12)


@pytest.fixture(scope="session")
def small_run() -> type[SmallRun]:
    """:class:`SmallRun`, of which each file takes what suits it."""
    return SmallRun


def losses(result: mt.training.TrainResult) -> list[float]:
    """Those of the steps that a run logged."""
    return [h["loss"] for h in result.history if "loss" in h]
