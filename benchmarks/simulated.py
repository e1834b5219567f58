"""Ranks as threads of one process, and queues in place of sockets: the executor's own collectives, delivered and
counted."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshtape.parallel.collectives.pieces import ArraySink, chunk_of, chunks
from meshtape.parallel.execution.executor import Prepared
from meshtape.parallel.forecasting.traffic import CountingTransport
from meshtape.parallel.partition.rank_program import RankProgram

PATIENCE = 60.0


class Post:
    """The letters of all ranks that were sent and not yet opened, and what each rank sent."""

    def __init__(self, ranks: int) -> None:
        self.arrived = [threading.Condition() for _ in range(ranks)]
        self.boxes: list[dict[int, deque[Any]]] = [{} for _ in range(ranks)]
        self.messages: Counter[int] = Counter()
        self.nbytes: Counter[int] = Counter()

    def send(self, source: int, target: int, batches: Sequence[Any]) -> None:
        """One message."""
        with self.arrived[target]:
            self.boxes[target].setdefault(source, deque()).append(batches)
            self.arrived[target].notify()


class QueueTransport(CountingTransport):
    """A transport of one rank. Messages are copied when they are sent, as a socket would."""

    def __init__(self, post: Post, rank: int) -> None:
        super().__init__()
        self.post, self.rank = post, rank

    def exchange(self, step: int, what: str, sends: Mapping[int, Any], receives: Mapping[int, Any]) -> None:
        super().exchange(step, what, sends, receives)
        post = self.post
        for peer, batches in sends.items():
            letter = [tuple(np.array(a) for a in (b if isinstance(b, tuple) else (b,))) for b in batches]
            post.messages[self.rank] += 1
            post.nbytes[self.rank] += sum(a.nbytes for b in letter for a in b)
            post.send(self.rank, peer, letter)
        missing = {
            p: [ArraySink(s) if isinstance(s, np.ndarray) else s for s in sinks] for p, sinks in receives.items()
        }
        opened: dict[int, deque[Any]] = {}
        while missing or opened:
            moved = False
            with post.arrived[self.rank]:
                for p in [p for p in missing if post.boxes[self.rank].get(p)]:
                    batches = post.boxes[self.rank][p].popleft()
                    opened[p] = deque(_pieces(batches, missing.pop(p)))
                    moved = True
            for p in list(opened):
                queue = opened[p]
                while queue and (queue[0][0].accept(*queue[0][1:])):
                    queue.popleft()
                    moved = True
                if not queue:
                    del opened[p]
                    moved = True
            if not moved and missing:
                with post.arrived[self.rank]:
                    here = post.boxes[self.rank]
                    if not post.arrived[self.rank].wait_for(
                        lambda here=here: any(here.get(p) for p in missing), PATIENCE
                    ):
                        raise TimeoutError(f"rank {self.rank} waits for {sorted(missing)[:8]} in {what}")
            elif not moved and opened:
                raise AssertionError(f"rank {self.rank}: the messages of {what} are all here, and do not fit together")


def _pieces(batches: Sequence[Any], sinks: Sequence[Any]) -> list[Any]:
    """Sink, chunk, array and its part, in the order in which they travel."""
    return [
        (s, k, j, np.ascontiguousarray(chunk_of(b, k, j)).reshape(_shape(b[j], k)))
        for b, s in zip(batches, sinks, strict=True)
        for k in range(len(chunks(b[0].shape, b[0].itemsize)))
        for j in range(len(b))
    ]


def _shape(a: np.ndarray, k: int) -> tuple[int, ...]:
    return a[chunks(a.shape, a.itemsize)[k]].shape


def run(
    program: RankProgram, inputs: Sequence[Mapping[int, np.ndarray]], names: Sequence[str]
) -> tuple[list[dict[int, np.ndarray]], Post]:
    """Blocks of the outputs by rank, every rank being a process of its own, and what was sent."""
    ranks = math.prod(program.sizes)
    post, homes = Post(ranks), tuple(range(ranks))
    outs: list[Any] = [None] * ranks

    def rank(r: int) -> None:
        try:
            outs[r] = Prepared(program, (r,), homes, names).run([{r: b[r]} for b in inputs], QueueTransport(post, r))
        except BaseException as e:  # told by who waits for all
            outs[r] = e

    before = threading.stack_size(1 << 19)
    try:
        threads = [threading.Thread(target=rank, args=(r,), daemon=True) for r in range(ranks)]
        for t in threads:
            t.start()
    finally:
        threading.stack_size(before)
    for t in threads:
        t.join()
    for o in outs:
        if isinstance(o, BaseException):
            raise o
    return [{r: o[i][r] for r, o in enumerate(outs)} for i in range(len(program.outputs))], post
