"""A rank program as text: the steps as the executor takes them, fused and overlapped."""

from __future__ import annotations

from collections.abc import Sequence

from ...arrays.core.program import Entry
from ..partition.overlap import Start, Wait, schedule
from ..partition.rank_program import LocalCall, Move, Moves, RankProgram
from ..resharding.expert_all_to_all import ExpectedVolume
from ..resharding.schedule import described
from ..sharding.placement import dims_text
from .executor import thin_values
from .fusion import Chain, fused


def program_text(program: RankProgram, names: Sequence[str], cuda: bool = False) -> str:
    """One line a step: the op, the block that a rank holds of its result, and the collectives with their bytes.

    ``cuda`` says whether the blocks are on GPUs.
    """
    lines = []

    def typed(v: int) -> str:
        aval, layout = program.avals[v], program.layouts[v]
        dims = dims_text(aval.shape, layout, names)
        partial = ",".join(f"{op}:{names[a]}" for a, op in layout.partials)
        mark = " a rank" if v in program.inner else ""
        return f"{aval.dtype.name}[{dims}]" + (f"{{{partial}}}" if partial else "") + mark

    def called(s: LocalCall, mark: str) -> str:
        entry = Entry(s.op, s.inputs, s.outputs, s.params)
        note = f"  # {s.origin}" if s.origin and s.origin != s.op.name else ""
        return f"{mark} {entry}  : {', '.join(map(typed, s.outputs))}{note}"

    apart = frozenset() if cuda else thin_values(program)
    for s, _ in fused(program, [(a.what, a.frees) for a in schedule(program)], cuda=cuda, apart=apart):
        if isinstance(s, Chain):
            marks = "╭" + "│" * (len(s.calls) - 2) + "╰"
            lines += map(called, s.calls, marks)
        elif isinstance(s, Start):
            lines.append(f"» start {', '.join(f'%{m.target}' for m in s.moves)}, beside what follows")
        elif isinstance(s, Moves | Wait):
            for i, m in enumerate(s.moves):
                words = program.move_text(m, names)
                moved = _amount(program, m)
                mark = (
                    "┌"
                    if len(s.moves) > 1 and i == 0
                    else "└"
                    if len(s.moves) > 1 and i == len(s.moves) - 1
                    else "│"
                    if len(s.moves) > 1
                    else " "
                )
                lines.append(
                    f"{mark} %{m.target} = {words} %{m.source}  : {typed(m.target)}  # {moved}"
                    + (f", {m.why}" if m.why else "")
                    + (", started above" if isinstance(s, Wait) else "")
                )
        else:
            lines.append(called(s, " "))
    head = ", ".join(f"%{v}: {typed(v)}" for v in program.inputs)
    held = [f"  %{v} = constant  : {typed(v)}" for v in program.constants]
    tail = f"  return {', '.join(f'%{v}' for v in program.outputs)}"
    return "\n".join([f"rank program({head}):", *held, *lines, tail])


def _amount(program: RankProgram, m: Move) -> str:
    """How much a move moves, in words."""
    plan, itemsize = program.plan(m), program.avals[m.source].dtype.itemsize
    if not isinstance(plan, ExpectedVolume):
        how = described(plan, program.avals[m.source].dtype)
        return f"{plan.bytes_received(itemsize)} bytes" + (f", {how}" if how else "")
    return f"{plan.bytes_received(itemsize)} bytes where all are chosen alike, {plan.most * itemsize} at most"
