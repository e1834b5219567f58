"""How work, plans and messages grow with the number of ranks, on virtual meshes: ``python benchmarks/scaling.py``.

Prints the tables of ``docs/development/parallel-scaling.md``.
"""

from __future__ import annotations

import timing  # first: it sets the number of threads  # noqa: F401

# isort: split
import argparse
import functools
import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import simulated

import meshtape as mt
from meshtape.parallel.execution.executor import Prepared
from meshtape.parallel.forecasting.specs import Spec
from meshtape.parallel.forecasting.specs import planned as outlined
from meshtape.parallel.forecasting.traffic import Traffic
from meshtape.parallel.partition.partition import partition
from meshtape.parallel.partition.rank_program import Moves
from meshtape.parallel.resharding import schedule
from meshtape.parallel.resharding.collective_plans import plan_collective
from meshtape.parallel.resharding.plan import plan_reshard

LAYERS = 25


def loss(params: Any, x: Any) -> Any:
    """A deep network of split weights, the usual mixture of data and tensor parallelism."""
    h = x
    for w, v in params:
        h = mt.layer_norm(h + mt.nn.gelu(h @ w) @ v, h.shape[-1])
    return mt.mean(mt.square(h))


RANKS = (8, 64, 512, 4096)


def traced() -> tuple[Any, dict[int, Any], mt.Mesh]:
    """The program of the gradients, the layouts of its inputs, and a small mesh of the same axes on which it was
    traced: what is asked is what the number of ranks adds."""
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
    return program, {v: s.layout for v, s in zip(program.inputs, shardings, strict=True)}, small


def forget() -> None:
    """Nothing that was planned before is found again."""
    for cache in (
        plan_reshard,
        plan_collective,
        schedule._plan_rounds,
        schedule._processes,
        schedule._shared,
        schedule._relayed,
        schedule._parcels,
    ):
        cache.cache_clear()


def seconds(fn: Callable[[], Any], times: int = 3) -> tuple[float, Any]:
    """Least processor time of a few calls, each from the start; and the result."""
    spent, found = [], None
    for _ in range(times):
        forget()
        start = time.process_time()
        found = fn()
        spent.append(time.process_time() - start)
    return min(spent), found


def planned(prepared: Prepared) -> int:
    """Messages and parts of blocks that a process has in its plans."""
    moves = [m for step, _ in prepared._actions for m in _moves(step)]
    return sum(len(m.rounds.sends) + sum(len(j.part.sources) for j in m.rounds.joins) for m in moves)


def _moves(step: Any) -> Any:
    if type(step) is tuple:  # a round that starts early
        step = step[1]
    return getattr(step, "moves", ()) if not hasattr(step, "ticket") else ()


def turned(ranks: int) -> tuple[float, float, float, int, float]:
    """An all-to-all of per-rank code: seconds of its tracing, of its partition, of making it ready in one of so many
    processes, the lines of its plans there, and seconds of a run of all ranks in one process."""
    mesh = mt.Mesh({"a": ranks})
    rows, columns = {"a": mt.Shard(0)}, {"a": mt.Shard(1)}
    x = mt.distribute(np.ones((ranks, ranks), np.int8), mesh, a=mt.Shard(0))

    def turn() -> Any:
        return mt.shard_map(lambda x: mt.all_to_all(x, "a", split_dim=1, concat_dim=0), mesh, (rows,), columns)

    tracing, program = seconds(lambda: mt.compile(turn()).program(x))
    part, found = seconds(lambda: mesh.rank_program(program, [x.sharding]))
    one, ready = seconds(lambda: Prepared(found, (1,), tuple(range(ranks)), mesh.names))
    fn = turn()
    run, y = seconds(lambda: mt.compute(fn(x)))
    assert y.sharding == mt.Sharding(mesh, a=mt.Shard(1))
    return tracing, part, one, planned(ready), run


S0, S1, R = mt.Shard(0), mt.Shard(1), mt.Replicate()
DELIVERED = 64
"""Ranks up to which each is a thread, and every message travels."""

COLLECTIVES: dict[str, tuple[Callable[[mt.Mesh], Any], Callable[[int], tuple[int, int]]]] = {
    "all_reduce of 1 KiB": (lambda mesh: lambda x: mt.reshard(mt.sum(x, axis=0), a=R), lambda n: (n, 256)),
    "all_reduce of 1 MiB": (lambda mesh: lambda x: mt.reshard(mt.sum(x, axis=0), a=R), lambda n: (n, 1 << 18)),
    "reduce_scatter of 1 MiB": (lambda mesh: lambda x: mt.reshard(mt.sum(x, axis=0), a=S0), lambda n: (n, 1 << 18)),
    "all_gather to 1 MiB": (lambda mesh: lambda x: mt.reshard(x, a=R), lambda n: (4096, 64)),
    "all_to_all of 64 MiB / ranks": (lambda mesh: lambda x: mt.reshard(x, a=S1), lambda n: (4096, 4096)),
    "broadcast of 1 MiB": (
        lambda mesh: mt.shard_map(lambda x: mt.broadcast(x, "a", source=0), mesh, ({"a": S0},), {"a": S0}),
        lambda n: (n, 1 << 18),
    ),
}


def sent(ranks: int, make: Callable[[mt.Mesh], Any], shape: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Messages and bytes that the first ranks, one in the middle and the last send in a collective."""
    mesh = mt.Mesh({"a": ranks})
    split = mt.Sharding(mesh, a=S0)
    made, _ = outlined(make(mesh), (Spec(shape, np.dtype(np.float32), split),), None, None)
    messages, nbytes = [], []
    for rank in dict.fromkeys((0, 1, ranks // 2, ranks - 1)):
        traffic = Traffic(made.program, rank, mesh.names, ranks, 1)
        rounds_of = [e for s in made.program.steps if isinstance(s, Moves) for e in traffic.of(s.moves)]
        messages.append(sum(len(e.sent) for e in rounds_of))
        nbytes.append(sum(sum(e.sent.values()) for e in rounds_of))
        if ranks <= DELIVERED:
            if rank == 0:
                blocks = {r: np.ones(split.box(shape, r).shape, np.float32) for r in range(ranks)}
                _, post = simulated.run(made.program, [blocks], mesh.names)
            assert (messages[-1], nbytes[-1]) == (post.messages[rank], post.nbytes[rank])
    return messages, nbytes


def some(numbers: list[int]) -> str:
    """A number, or the least and the largest."""
    low, high = min(numbers), max(numbers)
    return f"{high:,}" if low == high else f"{low:,} to {high:,}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("| collective | " + " | ".join(f"{n} ranks: messages | bytes" for n in RANKS) + " |")
    print("|---|" + "---|---|" * len(RANKS))
    for name, (make, shape) in COLLECTIVES.items():
        found = [sent(n, make, shape(n)) for n in RANKS]
        print(f"| {name} | " + " | ".join(f"{some(m)} | {some(b)}" for m, b in found) + " |", flush=True)
    print(
        "\n"
        "| ranks | mesh | entries | partition, s | rank program, kB | steps | bytes of all moves, s "
        "| made ready in one of so many processes, s | lines of its plans | made ready for all ranks in one process, s "
        "|"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    program, layouts, small = traced()
    for ranks in RANKS:
        sizes = (ranks // 4, 4)
        part, rank_program = seconds(functools.partial(partition, program, layouts, sizes))
        size = len(pickle.dumps(rank_program))
        counted, _ = seconds(rank_program.moved_bytes)
        one, ready = seconds(functools.partial(Prepared, rank_program, (1,), tuple(range(ranks)), small.names))
        every, _ = seconds(functools.partial(Prepared, rank_program, range(ranks), (0,) * ranks, small.names))
        shape = " x ".join(f"{n}={s}" for n, s in zip(small.names, sizes, strict=True))
        print(
            f"| {ranks} | {shape} | {len(program.entries)} | {part:.3f} | {size / 1e3:.0f} | {len(rank_program.steps)} "
            f"| {counted:.4f} | {one:.3f} | {planned(ready)} | {every:.3f} |",
            flush=True,
        )
    print(
        "\n| ranks | traced, s | partition, s | made ready in one of so many processes, s | lines of its plans | a "
        "run, s |"
    )
    print("|---|---|---|---|---|---|")
    for ranks in RANKS:
        tracing, part, one, lines, run = turned(ranks)
        print(f"| {ranks} | {tracing:.3f} | {part:.4f} | {one:.3f} | {lines} | {run:.3f} |", flush=True)


if __name__ == "__main__":
    main()
