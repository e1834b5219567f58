"""Runs that lose a worker, against runs that lose none: ``python benchmarks/killed.py --runs 20 --out killed.json``.

A small decoder learns on two worker processes, and at a step drawn at random one of them gets SIGKILL. Every other run
begins without checkpoints, and goes on from the copy of its state in the other worker's memory. The last losses are
compared with the spread of unbroken runs of several seeds.
"""

from __future__ import annotations

import timing  # noqa: F401  # first: it sets the number of threads

# isort: split
import argparse
import json
import os
import random
import signal
import statistics
import tempfile
from pathlib import Path
from typing import Any

import bytes_job

import meshtape as mt
from meshtape.parallel.dask.cluster import local_cluster

STEPS = 40


class Kill(mt.training.Callback):
    """SIGKILL for the last worker at a step."""

    def __init__(self, step: int) -> None:
        self.step, self.done = step, False

    def on_log(self, trainer: mt.Trainer, numbers: dict[str, Any]) -> None:
        if trainer.progress.step == self.step and not self.done:
            self.done = True
            client, victim = trainer.mesh.runtime.client, trainer.mesh.runtime.addresses[-1]
            os.kill(client.run(os.getpid, workers=[victim])[victim], signal.SIGKILL)


def fit(seed: int = 0, **options: Any) -> tuple[float, Any]:
    """The mean loss of the last five steps, and the result."""
    t = bytes_job.trainer(
        "tiny",
        steps=STEPS,
        length=48,
        batch=8,
        limit=200_000,
        sample=16,
        log_every=1,
        seed=seed,
        accumulation=2,
        **options,
    )
    result = t.fit()
    return statistics.mean(h["loss"] for h in result.history[-6:] if "loss" in h), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=8, help="unbroken runs")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    unbroken = [fit(seed)[0] for seed in range(a.seeds)]
    spread = statistics.stdev(unbroken)
    rng, rows = random.Random(0), []
    for i in range(a.runs):
        step = rng.randrange(1, STEPS)
        with local_cluster(2) as client, tempfile.TemporaryDirectory() as home:
            where: dict[str, Any] = {"snapshot_every": 5} if i % 2 else {"directory": home, "save_every": 5}
            loss, result = fit(
                mesh=mt.Mesh({"data": 2}, client=client),
                callbacks=[Kill(step)],
                elastic=mt.training.Elastic(rejoin=0.0 if i % 4 < 2 else 20.0),
                **where,
            )
        rows.append(
            {
                "killed at": step,
                "from": "memory" if i % 2 else "checkpoint",
                "steps": result.step,
                "restarts": result.restarts,
                "loss": round(loss, 6),
                "off": round(abs(loss - unbroken[0]), 7),
            }
        )
        print(rows[-1], flush=True)
    made = {
        "runs": len(rows),
        "arrived": sum(r["steps"] == STEPS and r["restarts"] == 1 for r in rows),
        "spread of unbroken runs (standard deviation)": round(spread, 6),
        "largest difference from the unbroken run": max(r["off"] for r in rows),
        "rows": rows,
    }
    if a.out is not None:
        a.out.write_text(json.dumps(made, indent=1) + "\n")
    print({n: v for n, v in made.items() if n != "rows"})


if __name__ == "__main__":
    main()
