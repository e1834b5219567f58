"""Streaming passes: a program over blocks that needs global reductions reads the blocks in several passes.

For ``x - mean(x)`` the first pass adds up, and the second one subtracts. A rank program is cut where a value has to
cross between blocks: one pass reduces it, and the next has it as one more input. Passes = longest chain of global
reductions + 1. Values that are split over the blocks go through a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ...arrays.core.errors import ShardingConflict
from .partition import with_frees
from .rank_program import LocalCall, Move, Moves, RankProgram, Step


class Pass(NamedTuple):
    """A program without collectives. ``targets`` are the variables by which later passes know its outputs; None for the
    last pass, whose outputs are those of the whole."""

    program: RankProgram
    targets: tuple[int, ...] | None


def passes_of(p: RankProgram, names: Sequence[str]) -> list[Pass]:
    """The passes of a program over virtual ranks, the last of whose mesh axes counts blocks.

    Raises
    ------
    ShardingConflict
        Where a value that is split over the blocks is needed whole.
    """
    out = []
    inputs, steps = (*p.inputs, *p.constants), p.steps
    while cuts := _first_cuts(p, steps, names):
        out.append(Pass(_trimmed(p, inputs, steps, [m.source for m in cuts]), tuple(m.target for m in cuts)))
        inputs = (*inputs, *(m.target for m in cuts))
        steps = tuple(
            s if isinstance(s, LocalCall) else Moves(tuple(m for m in s.moves if m not in cuts)) for s in steps
        )
    return [*out, Pass(_trimmed(p, inputs, steps, p.outputs), None)]


def _trimmed(p: RankProgram, inputs: Sequence[int], steps: Sequence[Step], outputs: Sequence[int]) -> RankProgram:
    """The part of a program that some variables need."""
    found = with_frees(replace(p, inputs=(), constants=(), steps=tuple(steps), outputs=tuple(outputs)))
    used = set(outputs)
    for s in found.steps:
        used.update(v for v in s.inputs if isinstance(v, int)) if isinstance(s, LocalCall) else used.update(
            m.source for m in s.moves
        )
    kept = tuple(v for v in inputs if v in used)
    return replace(
        found,
        inputs=kept,
        avals={**found.avals, **{v: p.avals[v] for v in (*kept, *outputs)}},
        layouts={**found.layouts, **{v: p.layouts[v] for v in (*kept, *outputs)}},
    )


def _first_cuts(p: RankProgram, steps: Sequence[Step], names: Sequence[str]) -> list[Move]:
    """The moves between blocks whose sources need no other such move."""
    late: set[int] = set()
    cuts = []
    for s in steps:
        if isinstance(s, LocalCall):
            if not late.isdisjoint(v for v in s.inputs if isinstance(v, int)):
                late.update(s.outputs)
            continue
        for m in s.moves:
            crosses = p.plan(m).bytes_received(1) > 0
            if crosses and m.source not in late:
                _refuse(p, m, names)
                cuts.append(m)
            if crosses or m.source in late:
                late.add(m.target)
    return cuts


def _refuse(p: RankProgram, m: Move, names: Sequence[str]) -> None:
    """Raise where a move neither reduces over all blocks nor makes other blocks of them."""
    now, then = p.layouts[m.source], p.layouts[m.target]
    over = [len(p.sizes) - 1 in {a for _, axes in x.shards for a in axes} for x in (now, then)]
    joined = not then.partials and len({op for _, op in now.partials}) < 2
    if m.collective is None and joined and (over[1] or not over[0]):
        return
    raise ShardingConflict(
        f"[stream] the function needs {p.move_text(m, names)} ({m.why or m.origin or 'a result'}): block by block "
        "elements cannot be gathered from all blocks, only what is reduced over them is joined. Split a dimension "
        "that the function works along element by element (mt.from_zarr(path, mesh, axis=mt.Shard(dim))), or load the "
        "array (.load()) where the workers have the memory"
    )
