"""Forecasts against four worker processes: ``python benchmarks/forecast.py`` prints the table of
``docs/development/forecast.md``.

A step of a small decoder with AdamW runs three times; the third is measured. Messages and bytes are counted where a
process sends. Memory is the high-water mark of each process over what it held before, beside its blocks (Linux); the
pool keeps nothing meanwhile.
"""

from __future__ import annotations

import timing  # first: it sets the number of threads  # noqa: F401

# isort: split
import argparse
from typing import Any

import dask
import numpy as np

import meshtape as mt
from meshtape.parallel.dask.cluster import local_cluster

PLANS = {
    "dp": {"data": 4},
    "tp+sp+vocab": {"model": 4},
    "fsdp+tp+vocab": {"data": 2, "model": 2},
}


def begin() -> int:
    """Count from here on; the bytes that this process holds."""
    import ctypes
    import gc
    from pathlib import Path

    from meshtape.parallel.transports import group

    if not hasattr(group, "COUNTED"):
        group.COUNTED, true = [], group.LinkGroup.exchange

        def exchange(self: Any, step: int, what: str, sends: Any, receives: Any) -> None:
            sent = [sum(a.nbytes for b in x for a in (b if isinstance(b, tuple) else (b,))) for x in sends.values()]
            group.COUNTED.append((self.process, len(sent), sum(sent)))
            true(self, step, what, sends, receives)

        group.LinkGroup.exchange = exchange
    group.COUNTED.clear()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(name: str) -> int:
    """A figure of this process, in bytes."""
    from pathlib import Path

    (found,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name)]
    return int(found.split()[1]) << 10


def end() -> tuple[int, list[tuple[int, int, int]]]:
    """The high-water mark, and what was counted."""
    from meshtape.parallel.transports import group

    return memory("VmHWM"), list(group.COUNTED)


def measured(name: str, axes: dict[str, int], width: int = 512, vocab: int = 4096, length: int = 256) -> str:
    """A row of the table: of the rank of which the forecast of memory is furthest off."""
    decoder = mt.models.decoder
    config = decoder.Config(vocab=vocab, width=width, layers=2, heads=8, kv_heads=4, max_length=length)
    plan, opt = decoder.plan(name), mt.optim.adamw(1e-3)

    def step(params: Any, state: Any, batch: Any) -> Any:
        def loss(p: Any) -> Any:
            total, weight = decoder.loss(p, batch, config, plan=plan)
            return total / weight

        value, grads = mt.value_and_grad(loss)(params)
        return value, *opt.update(params, grads, state)

    with dask.config.set({"meshtape.pool": 0}), local_cluster(4) as client, mt.Mesh(axes, client=client) as mesh:
        params = plan.distribute(decoder.init(mt.random.key(0), config), mesh)
        ids = np.random.default_rng(0).integers(0, vocab, (8, length)).astype(np.int32)
        batch = {k: mt.distribute(ids, plan.batch(mesh)) for k in ("ids", "labels")}
        args = mt.compute((mt.tree_map(lambda x: x * 1, params), opt.init(params), batch))
        found = mt.forecast(step, *args, device="CPU-core", links={"ranks_per_host": 4})
        fast = mt.compile(step)
        for _ in range(2):
            mt.compute(fast(*args))
        before = client.run(begin)
        out = mt.compute(fast(*args))
        rows = []
        for address, (most, counted) in client.run(end).items():
            (process,) = {p for p, _, _ in counted}
            r = found.rank(process)
            sent = sum(n for _, n, _ in counted), sum(n for _, _, n in counted)
            assert sent == (r.within.messages, r.within.sent), (sent, r.within)
            rows.append((r.peak, r.start + most - before[address], *sent))
        del out
    worst = max(rows, key=lambda row: abs(row[0] / row[1] - 1))
    peak, real, messages, nbytes = worst
    shape = " × ".join(f"{n}={s}" for n, s in axes.items())
    return (
        f"| {name} | {shape} | {messages:,} | {nbytes:,} | {peak / 1e6:.1f} | {real / 1e6:.1f} | "
        f"{peak / real - 1:+.1%} |"
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("| plan | mesh | messages of a rank | bytes sent | peak by the forecast, MB | measured, MB | off by |")
    print("|---|---|---|---|---|---|---|")
    for name, axes in PLANS.items():
        print(measured(name, axes), flush=True)


if __name__ == "__main__":
    main()
