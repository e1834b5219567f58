"""The ragged all-to-all of experts: rows go to the ranks of their experts and back, with sizes found at run time.

Where one mesh axis splits both the rows and the experts, each rank sends a row once to every rank that has one of its
experts, and gets the weighted sum of that rank's experts back. This takes three kinds of steps, in an otherwise static
program:

1. ``route`` lists the rows for each rank, and counts them; the counts are gathered (``p`` numbers a rank);
2. ``ragged_all_to_all`` sends the rows. Every rank knows all counts by then, so that empty parts cost no message and
   nothing is padded;
3. the op itself runs on the received rows, and the same exchange backwards returns its results.

Rows are sent once for the forward and the backward pass: a rank keeps the received rows until their gradients are made.
Blocks whose number of rows is found at run time never leave these steps, so that all other shapes are static.

The alternative, routing with a capacity, has a buffer of equal places for each expert: its shapes are static, its
places are padded, and tokens may be lost (GShard: Lepikhin et al., 2021). Sizes at run time, as in MegaBlocks (Gale et
al., 2023), are possible here as ranks exchange messages of any length. But one rank may receive all rows, and its
memory has to hold them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arrays.backends.row_blocks import wide
from ..base.device_memory import BlockMemory, on_host
from ..collectives.pieces import ArraySink
from ..sharding.ops import RankOp

# ----- local ops before and after the exchange ------------------------------------------------------------------------


def _rows(x: Any) -> Any:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _route(xp: Any, chosen: Any, numbers: Any, bounds: Sequence[tuple[int, int]]) -> tuple[Any, Any]:
    flat = _rows(chosen)
    parts = [xp.nonzero(xp.isin(flat, numbers[low:high]).any(axis=1))[0] for low, high in bounds]
    return xp.concatenate(parts), xp.asarray([[len(p) for p in parts]], dtype=np.int64)


def _unpack(xp: Any, found: Any, order: Any, counts: Any, like: Any) -> Any:
    """Add received rows up at their sources; a row that was sent to several ranks comes back from each."""
    n, width = math.prod(like.shape[:-1]), found.shape[-1]
    out = xp.zeros((n, width), wide(found.dtype))
    at = 0
    for count in on_host(counts)[0].tolist():
        out[order[at : at + count]] += found[at : at + count]  # no row twice within a part
        at += count
    return out.reshape(*like.shape[:-1], width).astype(found.dtype, copy=False)


ROUTE = RankOp("route", ("chosen", "numbers"), _route)
ROUTE.nout = 2
PACK = RankOp("pack", ("x", "order"), lambda xp, x, order: _rows(x)[order])
UNPACK = RankOp("unpack", ("found", "order", "counts", "like"), _unpack)


# ----- the exchange ---------------------------------------------------------------------------------------------------


class AllToAllV(NamedTuple):
    """A move of rows between the ranks of each group. Row ``i`` of a table has the counts that place ``i`` sends.

    ``back`` returns the rows. ``likely`` and ``most`` count rows that cross between ranks: if all experts are chosen
    equally often, and at most.
    """

    axes: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    back: bool
    likely: int
    most: int

    def text(self, names: Sequence[str]) -> str:
        """As in ``ragged_all_to_all(expert)``."""
        return f"ragged_all_to_all({'+'.join(names[a] for a in self.axes)})"

    def plan(self, row: int) -> ExpectedVolume:
        """The expected volume, for rows of ``row`` elements."""
        return ExpectedVolume(self.likely * row, self.most * row)

    def share(self, homes: Sequence[int], process: int) -> AllToAllVShare:
        """The part of one process; ``homes`` gives the process of every rank."""
        place = {r: (g, i) for g in self.groups for i, r in enumerate(g)}
        sends = tuple((r, d) for r in sorted(place) if homes[r] == process for d in place[r][0])
        receives = tuple((s, r) for s in sorted(place) for r in place[s][0] if homes[r] == process)
        return AllToAllVShare(self.back, place, tuple(homes), process, sends, receives)


class ExpectedVolume(NamedTuple):
    """What a plan says of an :class:`AllToAllV` move, whose pieces are found at run time: elements that cross between
    ranks if all experts are chosen equally often, and at most."""

    elements_moved: int
    most: int

    def bytes_received(self, itemsize: int) -> int:
        """Bytes that cross between ranks."""
        return itemsize * self.elements_moved


class AllToAllVShare(NamedTuple):
    """The part of one process. ``sends`` and ``receives`` are pairs of ranks (from, to), in the order of their
    messages."""

    back: bool
    place: Mapping[int, tuple[tuple[int, ...], int]]
    homes: tuple[int, ...]
    process: int
    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]

    @property
    def remote(self) -> bool:
        """Whether ranks of other processes take part."""
        return any(self.homes[d] != self.process for _, d in self.sends)

    def running(self, blocks: Mapping[int, Any], tables: Mapping[int, Any], memory: BlockMemory) -> RaggedRunning:
        return RaggedRunning(self, blocks, {r: on_host(t) for r, t in tables.items()}, memory)


class RaggedRunning:
    """A ragged move being carried out, like :class:`~.execution.ReshardExecution`; it has one round."""

    def __init__(
        self, share: AllToAllVShare, blocks: Mapping[int, Any], tables: Mapping[int, np.ndarray], memory: BlockMemory
    ) -> None:
        self._share, self._blocks, self._memory = share, blocks, memory
        self._tables = {r: t.T if share.back else t for r, t in tables.items()}
        self._out: dict[int, Any] = {}

    def _parts(self, lengths: Sequence[int]) -> Iterator[slice]:
        at = 0
        for n in lengths:
            yield slice(at, at + n)
            at += n

    def rounds(self) -> Iterator[tuple[dict[int, list[Any]], dict[int, list[Any]]]]:
        """The messages of the only round; rows between ranks of this process are copied."""
        sends: dict[int, list[Any]] = {}
        receives: dict[int, list[Any]] = {}
        s = self._share
        out: dict[tuple[int, int], Any] = {}  # the rows of each pair's sender
        for r, block in self._blocks.items():
            group, i = s.place[r]
            cuts = self._parts(self._tables[r][i].tolist())
            out.update(((r, d), block[cut]) for d, cut in zip(group, cuts, strict=True))
        into: dict[tuple[int, int], Any] = {}
        for r, block in self._blocks.items():
            group, i = s.place[r]
            lengths = self._tables[r][:, i].tolist()
            new = self._out[r] = self._memory.empty((sum(lengths), *block.shape[1:]), block.dtype)
            into.update(((q, r), new[cut]) for q, cut in zip(group, self._parts(lengths), strict=True))
        for pair in s.sends:
            if s.homes[pair[1]] == s.process:
                into[pair][...] = out[pair]
            elif len(out[pair]):
                sends.setdefault(s.homes[pair[1]], []).append((out[pair],))
        for pair in s.receives:
            if s.homes[pair[0]] != s.process and len(into[pair]):
                receives.setdefault(s.homes[pair[0]], []).append(ArraySink(into[pair]))
        yield sends, receives

    def results(self) -> dict[int, Any]:
        """The rows that each rank got, in the order of the places that sent them."""
        return self._out
