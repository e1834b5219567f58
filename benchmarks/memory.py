"""What training holds in memory, measured against the formulae: ``python benchmarks/memory.py --out
docs/development/memory.md``.

On virtual ranks of this process, where every block is an array of NumPy's, which tells ``tracemalloc`` of each. Three
tables: inputs of stages by the schedule of a pipeline, what the backward pass of a decoder keeps by recompute policy,
and the state by ZeRO stage. Bytes of one micro-batch, layer or rank are differences between two sizes, so that what
does not grow (tables, code, the gradients) drops out.
"""

from __future__ import annotations

import timing  # noqa: F401  # first: it sets the number of threads

# isort: split
import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import page

import meshtape as mt
from meshtape.arrays.backends.memory_pool import POOL

de = mt.models.decoder
Row = tuple[str, str, float, float]
"""What, formula, predicted, measured."""


def peak(fn: Callable[[], Any]) -> int:
    """Largest number of bytes that a call holds at a time beyond what was there, its result included; the least of
    three calls after a first.

    Other threads of the process (a scheduler's, a browser's) may hold something of their own meanwhile; that only adds.
    """
    limit, POOL.limit = POOL.limit, 0  # memory that the pool has kept from before is not seen
    POOL.clear()
    tops = []
    try:
        fn()
        for _ in range(3):
            gc.collect()
            tracemalloc.start()
            base = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            held = fn()
            tops.append(tracemalloc.get_traced_memory()[1] - base)
            del held
            tracemalloc.stop()
    finally:
        tracemalloc.stop()
        POOL.limit = limit
    return min(tops)


# ----- pipelines ------------------------------------------------------------------------------------------------------


def held_inputs(
    kind: str, ranks: int, micros: int, chunks: int = 1, rows: int = 64, width: int = 512
) -> tuple[list[int], float]:
    """Inputs of stages that each rank of a pass holds at most; and the bytes of all ranks at the peak, in such
    inputs."""

    def stage(w: Any, x: Any, batch: Any, key: Any) -> Any:
        return mt.tanh((batch["x"] if x is None else x) * w)

    def last(w: Any, x: Any, batch: Any, key: Any) -> Any:
        return mt.sum((x * w) ** 2), 1.0

    count = ranks * chunks
    pipe = mt.training.Pipeline([stage] * (count - 1) + [last], mt.Mesh({"pipe": ranks}), kind=kind, chunks=chunks)
    params = pipe.place([mt.asarray(np.float32(0.5))] * count)
    micro = [{"x": mt.ones((rows, width), dtype=mt.float32)} for _ in range(micros)]
    used = peak(lambda: mt.compute(pipe.value_and_grad(params, micro)))
    return list(pipe.peak), used / (4 * rows * width)


def pipelines(p: int = 4, m: int = 12) -> list[Row]:
    """Inputs held by the fullest rank, and how the bytes of all ranks grow with the micro-batches."""
    formulae: dict[tuple[str, int], tuple[str, list[int]]] = {
        ("fthenb", 1): ("m", [m] * p),
        ("1f1b", 1): ("min(m, p - s)", [min(m, p - s) for s in range(p)]),
        ("interleaved", 2): (
            "min(mv, 2(p-s-1) + (v-1)p + 1)",
            [min(2 * m, 2 * (p - s - 1) + p + 1) for s in range(p)],
        ),
    }
    out: list[Row] = []
    for (kind, v), (text, wanted) in formulae.items():
        held, _ = held_inputs(kind, p, m, v)
        out += [(f"{kind}, p={p}, m={m}, v={v}: rank {s}", text, float(wanted[s]), float(held[s])) for s in (0, p - 1)]
    # The first stage's input is the batch, which is there in any case.
    for kind, more, text in (("fthenb", 8 * (p - 1), "(p - 1) 8"), ("1f1b", 0, "0")):
        few, many = (held_inputs(kind, p, n)[1] for n in (4, 12))
        out.append((f"{kind}, p={p}: bytes of all ranks, m from 4 to 12", text, float(more), many - few))
    return out


# ----- recompute ------------------------------------------------------------------------------------------------------


def kept(layers: int, recompute: str, b: int, s: int, config: dict[str, int]) -> int:
    """Peak bytes of loss and gradient of a decoder whose activations outweigh its parameters: that is where the
    backward pass begins."""
    c = de.Config(vocab=64, layers=layers, max_length=s, **config)
    params = de.init(mt.random.key(0), c)
    ids = np.random.default_rng(0).integers(0, 64, (b, s))
    batch = {"ids": mt.asarray(ids), "labels": mt.asarray(ids)}

    def run() -> Any:
        return mt.value_and_grad(lambda p: de.loss(p, batch, c, recompute=recompute)[0])(params)

    return peak(run)


def recomputes(b: int = 16, s: int = 128, small: int = 2, large: int = 6) -> list[Row]:
    """Bytes that each further block keeps for the backward pass."""
    config = {"width": 64, "heads": 4, "ffn": 128}
    w, f = config["width"], config["ffn"]
    grown = {
        r: (kept(large, r, b, s, config) - kept(small, r, b, s, config)) / (large - small)
        for r in ("none", "attention", "blocks")
    }
    hidden = 4.0 * b * s * (7 * w + 4 * f + config["heads"])
    return [
        ("recompute blocks: a further block keeps", "b s w", 4.0 * b * s * w, grown["blocks"]),
        ("recompute attention", "b s (7 w + 4 f + heads)", hidden, grown["attention"]),
        ("recompute none", "b s (7 w + 4 f + heads)", hidden, grown["none"]),
    ]


# ----- ZeRO -----------------------------------------------------------------------------------------------------------


def resting(zero: int, ranks: int) -> tuple[float, float]:
    """Bytes of the state on the fullest rank after a step, and all parameters' bytes."""
    config = de.Config(vocab=256, width=128, layers=2, heads=4, max_length=32)
    tokens = np.random.default_rng(0).integers(0, 256, 4000)
    t = mt.Trainer(
        lambda p, batch, key: de.loss(p, batch, config), lambda key: de.init(key, config), mt.optim.adam(1e-3),
        mt.training.TokenSource(tokens, 16), batch=2 * ranks, steps=1, mesh=mt.Mesh({"data": ranks}), zero=zero,
    )  # fmt: skip
    t.fit()
    leaves = mt.compute(mt.tree.flatten(t.state)[0])
    blocks = [sum(x._buf.handle.blocks[r].nbytes for x in leaves) for r in range(ranks)]
    return float(max(blocks)), float(sum(x.nbytes for x in mt.tree.flatten(t.params)[0]))


def zeros(ranks: int = 4) -> list[Row]:
    """Parameters and Adam's two slots on a rank."""
    out = []
    for stage in range(4):
        found, params = resting(stage, ranks)
        share = {0: 3.0, 1: 1 + 2 / ranks, 2: 1 + 2 / ranks, 3: 3 / ranks}[stage]
        text = {0: "3 P", 1: "P + 2 P / n", 2: "P + 2 P / n (and gradients split)", 3: "3 P / n"}[stage]
        out.append((f"ZeRO {stage}, n={ranks}: state of a rank", text, share * params, found))
    return out


def table(rows: list[Row], unit: str, scale: float = 1.0) -> str:
    """A table of Markdown."""
    head = f"| what | formula | predicted, {unit} | measured, {unit} | ratio |\n|---|---|---|---|---|\n"
    lines = [f"| {w} | {t} | {p / scale:.4g} | {m / scale:.4g} | {m / p if p else 1.0:.2f} |" for w, t, p, m in rows]
    return head + "\n".join(lines) + "\n"


PAGE = """# What training holds in memory

Made by `python benchmarks/memory.py`: virtual ranks of one process, whose arrays `tracemalloc` counts. Of the recompute policies the figures are
what one more block adds to the peak; `b` sequences of length `s`, width `w`, `f` hidden units. The formulae leave out
what is copied into another order of dimensions, and the tape itself.

## Inputs of stages that a pipeline holds

With `p` ranks, `m` micro-batches, `v` stages a rank; `s` is the rank.

{}
## What the backward pass keeps of a block

{}
## The state on a rank, with Adam

`P` are the bytes of the parameters, `n` the ranks.

{}"""


def main() -> None:
    put = page.destination(__doc__)
    put(PAGE.format(table(pipelines(), "inputs"), table(recomputes(), "kB", 1e3), table(zeros(), "kB", 1e3)))


if __name__ == "__main__":
    main()
