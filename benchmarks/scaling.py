"""How the client's work and a rank's plan grow with the number of ranks, on virtual meshes: ``python benchmarks/scaling.py``.

Prints the table of ``docs/development/parallel-scaling.md``.
"""

from __future__ import annotations

import timing  # first: it sets the number of threads  # noqa: F401

# isort: split
import pickle
import time
from typing import Any

import numpy as np

import meshtape as mt
from meshtape.parallel.executor import Prepared
from meshtape.parallel.partition import partition

LAYERS = 25


def loss(params: Any, x: Any) -> Any:
    """A deep network of split weights, the usual mixture of data and tensor parallelism."""
    h = x
    for w, v in params:
        h = mt.layer_norm(h + mt.nn.gelu(h @ w) @ v, h.shape[-1])
    return mt.mean(mt.square(h))


def main() -> None:
    print(
        "| ranks | mesh | entries | partition, s | rank program, kB | steps | made ready in one of so many processes, s |"
    )
    print("|---|---|---|---|---|---|---|")
    # Traced once, on a small mesh of the same axes: what is asked is what the number of ranks adds.
    small = mt.Mesh({"data": 2, "model": 4})
    x = mt.distribute(np.ones((4096, 64), np.float32), small, data=mt.Shard(0))
    params = [
        (
            mt.distribute(np.ones((64, 128), np.float32), small, model=mt.Shard(1)),
            mt.distribute(np.ones((128, 64), np.float32), small, model=mt.Shard(0)),
        )
        for _ in range(LAYERS)
    ]
    program = mt.compile(mt.value_and_grad(loss)).program(params, x)
    shardings = [p.sharding for pair in params for p in pair] + [x.sharding]
    layouts = {v: s.layout for v, s in zip(program.inputs, shardings, strict=True)}
    for ranks in (8, 64, 512, 4096):
        sizes = (ranks // 4, 4)
        times = []
        for _ in range(3):
            start = time.process_time()
            rank_program = partition(program, layouts, sizes)
            times.append(time.process_time() - start)
        size = len(pickle.dumps(rank_program))
        ready = "—"
        if ranks <= 64:
            start = time.process_time()
            Prepared(rank_program, (0,), tuple(range(ranks)), small.names)
            ready = f"{time.process_time() - start:.2f}"
        shape = " x ".join(f"{n}={s}" for n, s in zip(small.names, sizes, strict=True))
        print(
            f"| {ranks} | {shape} | {len(program.entries)} | {min(times):.2f} | {size / 1e3:.0f} | "
            f"{len(rank_program.steps)} | {ready} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
