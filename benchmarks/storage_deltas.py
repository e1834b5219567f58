"""Bytes of the steps of a real run: a small decoder learns the text of some modules of Python's library, and is then
fine-tuned on others at rate 1e-5."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from storage_table import Bench, measured

import meshtape as mt
from meshtape import storage

BEFORE = (
    "argparse ast calendar collections datetime difflib doctest enum fractions ftplib gettext inspect ipaddress locale "
    "mailbox optparse pickle platform"
)
AFTER = "random shutil smtplib socket statistics string subprocess tarfile tempfile textwrap threading typing zipfile"
CONFIG = mt.models.decoder.Config(vocab=256, width=128, layers=3, heads=4, kv_heads=4, ffn=352, max_length=64)
SETTLE, SAVES, ANCHOR = (
    400,
    20,
    10,
)  # steps of fine-tuning before the first save; saves, one a step; of which one is plain


def _text(modules: str) -> np.ndarray:
    files = [importlib.import_module(m).__file__ or "" for m in modules.split()]
    return np.frombuffer(b"".join(Path(f).read_bytes() for f in files), np.uint8).astype(np.int32)


def _trained(params: Any, text: np.ndarray, rate: float, steps: int) -> Iterator[tuple[Any, Any]]:
    """(parameters, state of the optimizer) after each step."""
    optimizer, rng = mt.optim.adamw(rate), np.random.default_rng(0)
    state = optimizer.init(params)

    def loss(p: Any, ids: Any, labels: Any) -> Any:
        total, count = mt.models.decoder.loss(p, {"ids": ids, "labels": labels}, CONFIG)
        return total / count

    @mt.compile
    def step(p: Any, s: Any, ids: Any, labels: Any) -> Any:
        return optimizer.update(p, mt.grad(loss)(p, ids, labels), s)

    for _ in range(steps):
        places = rng.integers(0, len(text) - 65, 4)
        rows = np.stack([text[i : i + 65] for i in places])
        params, state = step(params, state, mt.asarray(rows[:, :-1]), mt.asarray(rows[:, 1:]))
        yield params, state


def run(dtype: Any) -> Iterator[tuple[int, Any, Any]]:
    """(step, parameters, state of the optimizer) of each save of the fine-tuning."""
    *_, (params, _) = _trained(mt.models.decoder.init(mt.random.key(0), CONFIG), _text(BEFORE), 1e-3, 150)
    params = mt.tree.tree_map(lambda a: mt.asarray(np.asarray(a).astype(dtype)), params)
    for step, held in enumerate(_trained(params, _text(AFTER), 1e-5, SETTLE + SAVES), 1):
        if step > SETTLE:
            yield step, *held


def deltas(bench: Bench, home: Path, tree: dict[str, np.ndarray]) -> None:
    """The bytes of the saves of the run, and the seconds of their saves and loads, in each form."""
    import ml_dtypes

    for what, dtype in (("bfloat16 weights", ml_dtypes.bfloat16), ("float32 weights and optimizer", np.float32)):
        trees = [(n, {"p": p} if dtype != np.float32 else {"p": p, "s": s}) for n, p, s in run(dtype)]
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
            ratio = found.nbytes / sum(s.arrays for s in found.steps)
            alone = [s.files / s.arrays for s in found.steps if s.base]
            told = f"; a delta {min(alone):.3f} to {max(alone):.3f}" if alone else ""
            times = ", ".join(f"{s.work:.2f} s of work to {do}" for s, do in zip(spent, ("save", "load"), strict=True))
            bench.note(f"{len(trees)} steps of {what}: {form}", f"{ratio:.3f} of the bytes{told}; {times}")
