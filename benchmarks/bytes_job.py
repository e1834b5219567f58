"""A decoder that learns to predict the bytes of the Python standard library's own sources: a job for ``meshtape run``.

    meshtape run benchmarks/bytes_job.py --local 2 --mesh data=2 -- --steps 2000
    meshtape run benchmarks/bytes_job.py --scheduler tcp://host:8786 --mesh data=4,model=2 -- --size large --plan dp+tp --steps 20000

Held-out files are evaluated in bits per byte, beside what gzip and xz make of the same bytes. ``--size large`` has 10.7 million parameters.
"""

from __future__ import annotations

import argparse
import gzip
import lzma
import math
import os
from pathlib import Path

import numpy as np

import meshtape as mt

de = mt.models.decoder
SIZES = {
    "tiny": de.Config(vocab=256, width=64, layers=2, heads=2, max_length=512),
    "small": de.Config(vocab=256, width=192, layers=4, heads=4, max_length=512),
    "large": de.Config(vocab=256, width=384, layers=6, heads=6, max_length=512),
}


def sources(limit: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the standard library's modules: to learn from, and every tenth file to be judged by."""
    files = sorted(
        p for p in Path(os.__file__).parent.rglob("*.py") if not {"site-packages", "test", "tests"} & set(p.parts)
    )
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for i, p in enumerate(files):
        parts[i % 10 == 9].append(p.read_bytes())
    learn, held = (np.frombuffer(b"".join(p), np.uint8) for p in parts)
    return learn[:limit], held[: None if limit is None else max(limit // 10, 4096)]


def baselines(held: np.ndarray) -> dict[str, float]:
    """Bits per byte of general compressors."""
    data = held.tobytes()
    return {
        "gzip -9": 8 * len(gzip.compress(data, 9)) / len(data),
        "xz -9": 8 * len(lzma.compress(data, preset=9)) / len(data),
    }


def trainer(
    size: str = "small",
    *,
    steps: int,
    plan: str = "dp",
    mesh: mt.Mesh | None = None,
    length: int = 128,
    batch: int = 16,
    limit: int | None = None,
    **options: object,
) -> mt.Trainer:
    """The run of a size; the held-out bytes are judged at its end."""
    config, chosen = SIZES[size], de.plan(plan)
    learn, held = sources(limit)
    return mt.Trainer(
        lambda p, b, key: de.loss(p, b, config, key=key, plan=chosen),
        lambda key: de.init(key, config),
        mt.optim.adamw(mt.optim.warmup_cosine(2e-3, max(1, steps // 20), steps, 2e-4), b2=0.95, weight_decay=0.1),
        mt.training.TokenSource(learn, length),
        batch=batch,
        steps=steps,
        mesh=mesh,
        plan=chosen,
        clip=1.0,
        evaluate=mt.training.TokenSource(held, length),
        **options,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--plan", default="dp")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--save-every", type=int, default=200)
    a = parser.parse_args()
    t = trainer(
        a.size,
        steps=a.steps,
        plan=a.plan,
        batch=a.batch,
        mesh=mt.cluster_mesh(),
        precision=a.precision,
        save_every=a.save_every,
        elastic=mt.training.Elastic(),
        progress=True,
    )
    t.fit()
    judged = next(h["eval_loss"] for h in reversed(t.history) if "eval_loss" in h) / math.log(2)
    print(
        f"held-out bits per byte: {judged:.3f}; "
        + "; ".join(f"{n}: {v:.3f}" for n, v in baselines(sources()[1]).items())
    )


if __name__ == "__main__":
    main()
