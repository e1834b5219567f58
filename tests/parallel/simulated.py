"""Processes of a mesh simulated in one thread: rounds of messages carried by hand, counted, and in an order of one's
own."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshtape.arrays.core.dtypes import is_low_precision
from meshtape.parallel.collectives.pieces import ArraySink, chunk_of, chunks
from meshtape.parallel.resharding.execution import ReshardExecution
from meshtape.parallel.resharding.plan import ReshardPlan
from meshtape.parallel.resharding.schedule import plan_rounds
from meshtape.parallel.sharding.placement import identity_of


class Traffic(NamedTuple):
    """Messages and bytes that each process sent, and the rounds there were."""

    messages: Counter[int]
    nbytes: Counter[int]
    rounds: int


def deliver(batches: Sequence[Any], sinks: Sequence[Any]) -> None:
    """One message into its sinks, chunk by chunk, as a transport hands it over; memory is not the receiver's
    afterwards."""
    sinks = [ArraySink(s) if isinstance(s, np.ndarray) else s for s in sinks]
    assert len(batches) == len(sinks)
    for batch, sink in zip(batches, sinks, strict=True):
        assert [(a.shape, a.dtype) for a in batch] == [(sink.shape, sink.dtype)] * sink.width


def carried(running: Mapping[int, ReshardExecution], seed: int = 0) -> tuple[dict[int, np.ndarray], Traffic]:
    """The new blocks of all ranks, and what was sent. Messages of one round come in an order drawn by ``seed``."""
    rng = random.Random(seed)
    going = {p: r.rounds() for p, r in running.items()}
    sent: Counter[int] = Counter()
    nbytes: Counter[int] = Counter()
    count = 0
    while going:
        found = {}
        for p, steps in list(going.items()):
            messages = next(steps, None)
            if messages is None:
                del going[p]
            else:
                found[p] = messages
        # A wire for each pair: the chunks in their order, with copies, as what is sent may not be read later.
        wires: dict[tuple[int, int], list[Any]] = {}
        for p, (sends, _) in found.items():
            for q, batches in sends.items():
                assert p != q
                batches = [b if isinstance(b, tuple) else (b,) for b in batches]
                deliver(batches, found[q][1][p])
                sent[p] += 1
                nbytes[p] += sum(a.nbytes for b in batches for a in b)
                sinks = [ArraySink(s) if isinstance(s, np.ndarray) else s for s in found[q][1][p]]
                wires[p, q] = [
                    (sink, k, j, chunk_of(batch, k, j).copy())
                    for batch, sink in zip(batches, sinks, strict=True)
                    for k in range(len(chunks(sink.shape, sink.dtype.itemsize)))
                    for j in range(sink.width)
                ]
        for p, (_, receives) in found.items():
            assert {q for q in receives if receives[q]} <= {a for a, b in wires if b == p}
        count += bool(wires)
        pairs = list(wires)
        while pairs:
            rng.shuffle(pairs)
            moved = False
            for pair in pairs:
                wire = wires[pair]
                while wire:
                    sink, k, j, chunk = wire[0]
                    if not sink.accept(k, j, chunk):
                        break
                    chunk[...] = np.zeros((), chunk.dtype)
                    wire.pop(0)
                    moved = True
            assert moved or not any(wires.values()), "contributions are missing"
            pairs = [pair for pair in pairs if wires[pair]]
    out = {}
    for r in running.values():
        out.update(r.results())
    return out, Traffic(sent, nbytes, count)


def simulate(
    plan: ReshardPlan, homes: Sequence[int], blocks: Mapping[int, np.ndarray], *, hosts: int = 1, seed: int = 0
) -> tuple[dict[int, np.ndarray], Traffic]:
    """A reshard between processes, each with the blocks of its ranks."""
    dtype = next(iter(blocks.values())).dtype
    running = {}
    for p in sorted(set(homes)):
        found = plan_rounds(plan, tuple(homes), p, dtype, is_low_precision(dtype), hosts)
        mine = {r: blocks[r] for r, h in enumerate(homes) if h == p}
        neutral = identity_of(plan.fill, dtype) if any(b.neutral for b in found.blocks) else None
        running[p] = ReshardExecution(found, mine, neutral)
    return carried(running, seed)
