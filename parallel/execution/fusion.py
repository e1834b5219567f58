"""Elementwise chains of a rank program: the same pass as for compiled programs of one device, on the steps that ranks
run.

Partitioning comes first, so a chain is a run of calls on blocks of one split; pending reductions do not matter.
Collectives keep their order and stay where their results are first read. A call may move past them to the call that
reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ...arrays.backends.memory_pool import room
from ...arrays.chains import cuda_codegen
from ...arrays.core.op import ShapeDtype
from ...arrays.core.program import Entry, Program
from ...autodiff.compiler import cuda_fusion
from ...autodiff.compiler.fusion import FusedRun, chains, executable, grouped, is_large, streams, takers
from ..base.device_memory import BlockMemory
from ..partition.overlap import dropped, variables
from ..partition.rank_program import LocalCall, RankProgram

Doing = tuple[Any, tuple[int, ...]]
"""A step, or the start or end of a round, and the variables that may be dropped after it."""


class Chain(NamedTuple):
    """Calls that are computed together, in one pass over the blocks; ``group`` has them as entries."""

    group: FusedRun
    calls: tuple[LocalCall, ...]


def fused(
    program: RankProgram, doings: Sequence[Doing], *, cuda: bool = False, apart: Collection[int] = frozenset()
) -> list[Doing]:
    """The steps in order, with runs of elementwise calls fused into chains. No chain has a variable of ``apart``."""
    calls = {s.outputs[0]: s for s, _ in doings if isinstance(s, LocalCall) and _may_join(s, program, apart)}
    if len(calls) < 2:
        return list(doings)
    joins, grouped = (cuda_codegen.expressible, cuda_fusion.chains) if cuda else (is_large, chains)
    rest: dict[int, Any] = {}
    entries = []
    for at, (s, _) in enumerate(doings):
        reads, makes = variables(s)
        entries.append(Entry(getattr(s, "op", None), reads, makes, getattr(s, "params", {})))  # type: ignore[arg-type]
        rest[id(entries[at])] = s
    blocks = Program((), tuple(entries), program.outputs, BlockAvals(program, 0))

    def fits(e: Entry, blocks: Program) -> bool:
        return bool(e.outputs) and e.outputs[0] in calls and joins(e, blocks)

    def split(v: int) -> Any:
        return program.avals[v].shape, program.layouts[v].shards

    parts = grouped(blocks, fits, split)
    if not any(isinstance(p, FusedRun) for p in parts):
        return list(doings)
    done = [
        Chain(p, tuple(calls[e.outputs[0]] for e in p.entries)) if isinstance(p, FusedRun) else rest[id(p)]
        for p in parts
    ]
    return list(zip(done, dropped([(p.inputs, p.outputs) for p in parts], program.outputs), strict=True))


def _may_join(s: LocalCall, program: RankProgram, apart: Collection[int]) -> bool:
    """Whether a call may join a chain, as it is the same on all ranks. (A pending maximum fills in empty blocks.)"""
    if s.by_rank is not None or s.rule.localize is not None or len(s.outputs) != 1:
        return False
    if any(op in ("max", "min") for _, op in program.layouts[s.outputs[0]].partials):
        return False
    return not any(v in apart for v in (*s.inputs, *s.outputs) if isinstance(v, int))


class BlockAvals(Mapping[int, ShapeDtype]):
    """Shape and dtype of the blocks that a rank has, by variable."""

    def __init__(self, program: RankProgram, rank: int) -> None:
        self._program, self._rank = program, rank
        self._known: dict[int, ShapeDtype] = {}

    def __getitem__(self, v: int) -> ShapeDtype:
        found = self._known.get(v)
        if found is None:
            found = self._known[v] = self._program.block(v, self._rank)
        return found

    def __iter__(self) -> Any:
        return iter(self._program.avals)

    def __len__(self) -> int:
        return len(self._program.avals)


class PreparedChain:
    """A chain made ready for the ranks of a process."""

    def __init__(
        self, chain: Chain, program: RankProgram, ranks: Sequence[int], frees: Sequence[int], memory: BlockMemory
    ) -> None:
        group = chain.group
        self._made_of = chain, program, ranks, frees, memory
        self.calls, self.memory, self.outputs, self.inputs = chain.calls, memory, group.outputs, group.inputs
        self._on_host = memory.name == "cpu"
        make: Callable[..., Any] = executable if self._on_host else cuda_fusion.executable
        self._takers = [tuple(group.inputs[k] for k in ks if group.inputs[k] in frees) for ks in takers(group)]
        variables = dict.fromkeys((*group.inputs, *(v for e in group.entries for v in e.outputs)))
        # Ranks whose blocks have the same shapes share a function.
        kinds = dict.fromkeys((program.avals[v].shape, program.layouts[v].shards) for v in variables)
        examples = [
            next(v for v in variables if (program.avals[v].shape, program.layouts[v].shards) == k) for k in kinds
        ]
        made: dict[Any, Any] = {}
        self._by_rank = {}
        for r in ranks:
            blocks = BlockAvals(program, r)
            shapes = tuple(blocks[v].shape for v in examples)
            if shapes not in made:
                own = group._replace(shape=blocks[group.entries[0].outputs[0]].shape)
                rooms = [blocks[v] for v in group.outputs]
                made[shapes] = make(own, Program((), (), (), blocks)), rooms
            self._by_rank[r] = made[shapes]

    def parts(self) -> list[PreparedChain]:
        """Chains of this one's that read no array in common; none where it is one already."""
        chain, program, *rest = self._made_of
        blocks = Program((), (), (), BlockAvals(program, rest[0][0]))
        found = streams(chain.group, blocks)
        calls = {c.outputs[0]: c for c in chain.calls}
        runs = [r if isinstance(r, FusedRun) else grouped([r], set(chain.group.outputs), blocks) for r in found]
        made = [Chain(run, tuple(calls[e.outputs[0]] for e in run.entries)) for run in runs]
        return [PreparedChain(c, program, *rest) for c in made] if len(made) > 1 else []

    def run(self, values: dict[int, Any], rank: int, failure: Callable[[Exception, str, str], Exception]) -> None:
        """Compute the outputs for the blocks of a rank. ``failure`` makes an exception of error, call and line."""
        fn, rooms = self._by_rank[rank]
        into: list[Any] = []
        if self._on_host:
            taken: set[int] = set()
            for aval, candidates in zip(rooms, self._takers, strict=True):
                found = room(values, [v for v in candidates if v not in taken], *aval)
                into.append(found)
                taken.update(v for v in candidates if values[v] is found)

        def failed(error: Exception, entries: Sequence[Entry]) -> Exception:
            named = {e.outputs[0] for e in entries}
            calls = [c for c in self.calls if c.outputs[0] in named]
            return failure(error, ", ".join(dict.fromkeys(c.origin or c.op.name for c in calls)), calls[0].site)

        outs = fn(*[values[v] for v in self.inputs], into=into, failed=failed)
        values.update(zip(self.outputs, outs, strict=True))
