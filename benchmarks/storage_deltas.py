"""Bytes of the steps of a real run: a decoder learns the text of some modules of Python's library, and is then
fine-tuned on others at rate 1e-5. A small one is the default; ``--large`` has 10.7 million parameters."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from storage_forms import TrainingRun, text_of
from storage_table import Bench, measured

import meshtape as mt
from meshtape import storage

BEFORE = (
    "argparse ast calendar collections datetime difflib doctest enum fractions ftplib gettext inspect ipaddress locale "
    "mailbox optparse pickle platform"
)
AFTER = "random shutil smtplib socket statistics string subprocess tarfile tempfile textwrap threading typing zipfile"
CONFIG = mt.models.decoder.Config(vocab=256, width=128, layers=3, heads=4, kv_heads=4, ffn=352, max_length=64)
LARGE = mt.models.decoder.Config(vocab=256, width=384, layers=6, heads=6, max_length=64)
LEARN, SETTLE, SAVES, ANCHOR = 150, 400, 20, 10
"""Steps before the fine-tuning; those of it before the first save; saves, one a step; and of how many one is plain."""


def _run(modules: str, rate: float, config: Any, params: Any = None) -> TrainingRun:
    text = text_of(Path(importlib.import_module(m).__file__ or "") for m in modules.split())
    return TrainingRun(rate=rate, config=config, text=text, params=params, rows=2 if config is LARGE else 4)


@functools.cache
def _before(config: Any) -> Any:
    """The parameters that are fine-tuned."""
    first = _run(BEFORE, 1e-3, config)
    for _ in range(LEARN):
        first.step()
    return first.params


def run(dtype: Any, config: Any = CONFIG) -> Iterator[tuple[int, Any, Any]]:
    """(step, parameters, state of the optimizer) of each save of the fine-tuning."""
    params = mt.tree.tree_map(lambda a: mt.asarray(np.asarray(a).astype(dtype)), _before(config))
    tuned = _run(AFTER, 1e-5, config, params)
    for step in range(1, SETTLE + SAVES + 1):
        tuned.step()
        if step > SETTLE:
            yield step, tuned.params, tuned.state


def deltas(bench: Bench, home: Path, tree: dict[str, np.ndarray]) -> None:
    """The bytes of the saves of the run, and the seconds of their saves and loads, in each form."""
    import ml_dtypes

    for what, dtype in (("bfloat16 weights", ml_dtypes.bfloat16), ("float32 weights and optimizer", np.float32)):
        steps = run(dtype, LARGE if bench.large else CONFIG)
        trees = [(n, {"p": p} if dtype != np.float32 else {"p": p, "s": s}) for n, p, s in steps]
        options: dict[str, dict[str, Any]] = {
            "plain": {},
            "weights": {"compression": "weights"},
            "deltas": {"compression": "weights", "anchor_every": ANCHOR},
        }
        for form, given in options.items():
            where = home / f"{what} {form}"
            manager = storage.CheckpointManager(where, keep=None, **given)

            def save(manager: Any = manager, trees: Any = trees) -> None:
                for step, held in trees:
                    manager.save(step, held, overwrite=True)

            loads = lambda m=manager: [storage.load(m.path(n)) for n in m.steps()]  # noqa: E731
            spent = [measured(f)[0] for f in (save, loads)]
            found = storage.usage(where)
            ratio = found.nbytes / sum(s.total_size for s in found.steps)
            alone = [s.nbytes / s.total_size for s in found.steps if s.base]
            told = f"; a delta {min(alone):.3f} to {max(alone):.3f}" if alone else ""
            times = ", ".join(f"{s.work:.2f} s of work to {do}" for s, do in zip(spent, ("save", "load"), strict=True))
            bench.note(f"{len(trees)} steps of {what}: {form}", f"{ratio:.3f} of the bytes{told}; {times}")
