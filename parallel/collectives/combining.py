"""Tree reductions over :mod:`.reduction_tree`: the sends, joins and kept parts of one process, level by level.

Every process below a node has the node's value, whole or in part. In a level it gets the missing parts of the two
children from one
process below each, and joins them. Three collectives differ in the parts that a process keeps:

* *doubling* (an all-reduce of few bytes): everything, at every node. Messages: one or two a level.
* *halving* (a reduce-scatter): its own part of the root, and at a node also the parts of processes that it serves
higher up. A process
  sends each byte of its block once, less its own part, in one or two messages a level.
* halving, then the same messages backwards (an all-reduce of many bytes): twice as many bytes, however many processes
  there are.

The lowest levels are between neighbours in the mesh, which are most often on one host. Only the last levels cross
hosts, with a small part of a halved block (Thakur, Rabenseifner, Gropp: Optimization of collective communication
operations in MPICH, 2005).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..base.device_memory import BlockMemory
from .pieces import ArraySink, Fold
from .reduction_tree import TreeNode, TreeSpan, joined, levels

Messages = dict[int, list[Any]]
ALL_REDUCE = -1
"""Stands for a process in the messages that are received, for the :class:`AllReduce` of a transport that has its own.
"""
Run = tuple[int, int]
"""A range (start, stop) of the vector that is reduced."""


class Merge(NamedTuple):
    """A node's value from those of its children: parts of ``left`` and ``right`` that are here, or come from another
    process."""

    node: TreeNode
    runs: tuple[Run, ...]
    left_from: int | None
    right_from: int | None


class Level(NamedTuple):
    """The sends and merges of one round. ``sends``: (process, node, parts of its value)."""

    sends: tuple[tuple[int, TreeSpan, tuple[Run, ...]], ...]
    merges: tuple[Merge, ...]


class ReductionShare(NamedTuple):
    """The part of one process in a reduction over vectors of ``size`` elements. ``holds`` has its ranges of each node's
    value. ``back`` says whether all processes get the whole result."""

    size: int
    count: int
    levels: tuple[Level, ...]
    holds: Mapping[TreeSpan, tuple[Run, ...]]
    back: bool


class AllReduce:
    """A sum that the transport makes by itself, in an order of its own: of the vectors that the processes ``members``
    have. It puts the ``result`` in its place."""

    def __init__(
        self, members: tuple[int, ...], terms: Sequence[Any], reducer: Any, dtype: np.dtype, wide: bool
    ) -> None:
        self.members, self._dtype = members, dtype
        self.result: Any = joined([t.astype(np.float32) for t in terms] if wide else terms, reducer)

    def rounds(self) -> Iterator[tuple[Messages, Messages]]:
        """The one round: see :class:`Combining`."""
        yield {}, {ALL_REDUCE: [self]}
        self.result = self.result.astype(self._dtype, copy=False)


class Tree:
    """The tree over contributions on the processes ``at``; all processes have the same one.

    ``owners`` names the process that keeps each part of the root; None: all keep everything.
    """

    def __init__(self, at: Sequence[int], owners: Sequence[int] | None) -> None:
        self._at, self._owners = tuple(at), owners
        self._parent = {c: n for level in levels(len(at), range(len(at))) for n in level for c in (n.left, n.right)}
        self._members: dict[TreeSpan, dict[int, int]] = {}
        self._served: dict[TreeSpan, dict[int, list[int]]] = {}
        self._parts: dict[tuple[TreeSpan, int], list[int]] = {}
        self._server: dict[TreeSpan, dict[int, int]] = {}
        self._owned: dict[int, list[int]] = {}
        for i, owner in enumerate(owners or ()):
            self._owned.setdefault(owner, []).append(i)

    def members(self, span: TreeSpan) -> dict[int, int]:
        """The processes below a node, with their places."""
        found = self._members.get(span)
        if found is None:
            order = dict.fromkeys(self._at[span.start : span.stop])
            found = self._members[span] = {p: i for i, p in enumerate(order)}
        return found

    def served(self, child: TreeSpan) -> dict[int, list[int]]:
        """For each process below a child: the processes below its sibling alone that get the child's value from it."""
        found = self._served.get(child)
        if found is None:
            inside = list(self.members(child))
            others = [q for q in self.members(self._parent[child].whole) if q not in self.members(child)]
            found = self._served[child] = {}
            for i, q in enumerate(others):
                found.setdefault(inside[i * len(inside) // len(others)], []).append(q)
        return found

    def server(self, child: TreeSpan, process: int) -> int | None:
        """The process that sends ``process`` the value of a child; None where ``process`` is below that child."""
        if process in self.members(child):
            return None
        if child not in self._server:
            self._server[child] = {q: p for p, others in self.served(child).items() for q in others}
        return self._server[child][process]

    def parts(self, span: TreeSpan, process: int) -> list[int]:
        """Numbers of the parts of a node's value that a process keeps: its own, and those of processes it serves."""
        found = self._parts.get((span, process))
        if found is None:
            parent = self._parent.get(span)
            if parent is None:
                found = self._owned.get(process, [])
            else:
                of = [process, *self.served(span).get(process, ())]
                found = [i for q in of for i in self.parts(parent.whole, q)]
            self._parts[span, process] = found
        return found

    def share(self, process: int, bounds: Sequence[int], back: bool) -> ReductionShare:
        """The part of one process; a part of the vector is from one of ``bounds`` to the next."""

        def runs(span: TreeSpan, q: int) -> tuple[Run, ...]:
            if self._owners is None:
                return ((bounds[0], bounds[-1]),)
            out: list[Run] = []
            for i in sorted(self.parts(span, q)):
                if out and out[-1][1] == bounds[i]:
                    out[-1] = out[-1][0], bounds[i + 1]
                elif bounds[i] < bounds[i + 1]:
                    out.append((bounds[i], bounds[i + 1]))
            return tuple(out)

        mine = [t for t, p in enumerate(self._at) if p == process]
        holds = {TreeSpan(t, t + 1): ((bounds[0], bounds[-1]),) for t in mine}
        found = []
        for level in levels(len(self._at), mine):
            sends, merges = [], []
            for node in level:
                holds[node.whole] = kept = runs(node.whole, process)
                merges.append(Merge(node, kept, self.server(node.left, process), self.server(node.right, process)))
                for child in (node.left, node.right):
                    if process in self.members(child):
                        served = self.served(child).get(process, ())
                        sends += [(q, child, runs(node.whole, q)) for q in served]
            found.append(Level(tuple(sends), tuple(merges)))
        return ReductionShare(bounds[-1], len(self._at), tuple(found), holds, back)


@functools.lru_cache(maxsize=16)
def tree_of(at: tuple[int, ...], owners: tuple[int, ...] | None) -> Tree:
    """The tree; reductions of one mesh share theirs."""
    return Tree(at, owners)


def segments(at: tuple[int, ...], size: int) -> tuple[list[int], tuple[int, ...]]:
    """A vector of ``size`` elements divided between processes: ends of the parts, in whole cache lines, and owners.

    For a power of two of processes, the parts of a value that a process keeps are contiguous.
    """
    processes = tuple(dict.fromkeys(at))
    order = tree_of(at, processes).parts(TreeSpan(0, 1), at[0])
    step = -(-size // (len(processes) * 64)) * 64
    return [min(i * step, size) for i in range(len(processes) + 1)], tuple(processes[i] for i in order)


class Combining:
    """A reduction in progress on one process, from its contributions as vectors; ``rounds`` yields messages."""

    def __init__(
        self,
        share: ReductionShare,
        terms: Mapping[int, Any],
        reducer: Any,
        wide: bool,
        dtype: np.dtype,
        memory: BlockMemory,
    ) -> None:
        self._share, self._reducer, self._memory = share, reducer, memory
        self._dtype, self._inner = dtype, np.dtype(np.float32) if wide else dtype
        self._values = {TreeSpan(t, t + 1): x.astype(self._inner, copy=False) for t, x in terms.items()}
        self.result: Any = None
        """This process's parts of the root, joined to one vector."""

    def rounds(self) -> Iterator[tuple[Messages, Messages]]:
        """Messages by process, to be exchanged before the next ones are asked for."""
        share, values = self._share, self._values
        for level in share.levels:
            sends: Messages = {}
            receives: Messages = {}
            for q, span, runs in level.sends:
                if runs:
                    sends.setdefault(q, []).append((self._taken(span, runs),))
            for m in level.merges:
                sides = [
                    None if q is not None else self._taken(child, m.runs)
                    for child, q in ((m.node.left, m.left_from), (m.node.right, m.right_from))
                ]
                out = self._memory.empty((sum(b - a for a, b in m.runs),), self._inner)
                fold = Fold(out, sides, self._reducer, False)
                for i, q in enumerate((m.left_from, m.right_from)):
                    if q is not None and m.runs:
                        receives.setdefault(q, []).append(fold.sink([i]))
                values[m.node.whole] = out
            yield sends, receives
            for m in level.merges:
                for child in (m.node.left, m.node.right):
                    values.pop(child, None)
        root = TreeSpan(0, share.count)
        self.result = values.pop(root).astype(self._dtype, copy=False)
        if share.back:
            yield from self._back(root)

    def _taken(self, span: TreeSpan, runs: Sequence[Run]) -> Any:
        """Parts of a value as one vector: a view where they lie together in it."""
        parts, at = [], 0
        held = iter(self._share.holds[span])
        start, stop = next(held, (0, 0))
        for a, b in runs:
            while not start <= a < stop:
                at += stop - start
                start, stop = next(held)
            parts.append(self._values[span][at + a - start : at + b - start])
        if len(parts) == 1:
            return parts[0]
        return self._memory.xp.concatenate(parts) if parts else self._values[span][:0]

    def _back(self, root: TreeSpan) -> Iterator[tuple[Messages, Messages]]:
        out, at = self._memory.empty((self._share.size,), self._dtype), 0
        for a, b in self._share.holds[root]:
            out[a:b] = self.result[at : at + b - a]
            at += b - a
        self.result = out
        for level in reversed(self._share.levels):
            sends: Messages = {}
            receives: Messages = {}
            for m in level.merges:
                for q in (m.left_from, m.right_from):
                    if q is not None:
                        sends.setdefault(q, []).extend((out[a:b],) for a, b in m.runs)
            for q, _, runs in level.sends:
                receives.setdefault(q, []).extend(ArraySink(out[a:b]) for a, b in runs)
            yield {q: x for q, x in sends.items() if x}, {q: x for q, x in receives.items() if x}
