"""Running a rank program, in lockstep over the ranks that one process hosts.

A program is prepared once: ops bound, shape parameters made local, the pieces of every move sorted by who sends them. A run is
then one loop over steps, with the ranks of the process inside. Between processes only moves communicate, through an
:class:`Exchange`; a process that hosts all ranks needs none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..arrays.blocks import Box
from ..arrays.errors import MeshtapeError, RankLost
from ..arrays.reductions import _is_low_precision as is_low_precision
from .factors import RankView
from .partition import Local, Moves, RankProgram
from .placement import REDUCERS, identity_of
from .reshard import Plan


class Exchange(Protocol):
    """What a process needs of the others while a program runs.

    Called by the executor, by one thread, in the same order in every process of the mesh; ``step`` numbers the call, so that a
    process that is elsewhere in the program is found out. Sending and receiving overlap. Raises :class:`RankLost`,
    :class:`CollectiveMismatch` or :class:`CollectiveTimeout`; nothing may be used afterwards.
    """

    def exchange(
        self,
        step: int,
        what: str,
        sends: Mapping[int, Sequence[np.ndarray]],
        receives: Mapping[int, Sequence[np.ndarray]],
    ) -> None:
        """Send C-contiguous arrays to processes, and fill arrays from what processes send, in order."""


class Remote(NamedTuple):
    """A piece that another process sends or receives."""

    process: int
    source_rank: int
    target_rank: int
    source: Box
    target: Box
    term: int


class PreparedMove(NamedTuple):
    source: int
    target: int
    plan: Plan
    dtype: np.dtype
    sends: tuple[Remote, ...]
    receives: tuple[Remote, ...]
    text: str


class PreparedLocal(NamedTuple):
    fn: Any
    name: str
    args: tuple[tuple[int, Any], ...]
    params: Mapping[int, Mapping[str, Any]]
    outputs: tuple[int, ...]
    fills: Mapping[int, tuple[tuple[tuple[int, ...], np.dtype, Any], ...]]
    origin: str
    site: str


class Prepared:
    """A rank program made ready for one process: ``hosted`` are its ranks, ``homes`` the process of every rank."""

    def __init__(self, program: RankProgram, hosted: Sequence[int], homes: Sequence[int], names: Sequence[str]) -> None:
        self.program = program
        self.hosted = tuple(hosted)
        self.homes = tuple(homes)
        self.names = tuple(names)
        self.steps: list[Any] = [
            self._prepare_local(s) if isinstance(s, Local) else self._prepare_moves(s) for s in program.steps
        ]

    # ----- preparing --------------------------------------------------------------------------------------------------

    def _prepare_local(self, s: Local) -> PreparedLocal:
        p = self.program
        params: dict[int, Any] = {}
        fills: dict[int, Any] = {}
        views: dict[int, RankView] = {}
        pending = [dict(p.layouts[v].partials) for v in s.outputs]
        extremum = any(op in ("max", "min") for part in pending for op in part.values())
        if s.by_rank is not None:
            params = {rank: s.by_rank[rank] for rank in self.hosted if rank in s.by_rank}
        elif s.rule.localize is None and not extremum:
            params = dict.fromkeys(self.hosted, s.params)
        else:
            views = {rank: p.view(s, rank) for rank in self.hosted}
        for rank, view in views.items():
            params[rank] = s.params if s.rule.localize is None else s.rule.localize(s.params, view)
            if extremum and any(b is not None and b.size == 0 for b in view.operands):
                # Nothing to reduce here: the block is the neutral element, as max of no elements has no other value.
                fills[rank] = tuple(
                    (box.shape, p.avals[v].dtype, identity_of(next(iter(part.values()), "sum"), p.avals[v].dtype))
                    for box, v, part in zip(view.results, s.outputs, pending, strict=True)
                )
        args = tuple((v, None) if isinstance(v, int) else (-1, v.value) for v in s.inputs)
        return PreparedLocal(s.op.numpy, s.op.name, args, params, s.outputs, fills, s.origin or s.op.name, s.site)

    def _prepare_moves(self, s: Moves) -> tuple[PreparedMove, ...]:
        p = self.program
        out = []
        hosted = set(self.hosted)
        for m in s.moves:
            aval = p.avals[m.source]
            plan = p.plan(m, self.homes)
            sends, receives = [], []
            for rank, rp in enumerate(plan.ranks):
                for piece in rp.pieces if rp is not None else ():
                    if piece.rank in hosted and rank not in hosted:
                        sends.append(Remote(self.homes[rank], piece.rank, rank, piece.source, piece.target, piece.term))
                    elif rank in hosted and piece.rank not in hosted:
                        home = self.homes[piece.rank]
                        receives.append(Remote(home, piece.rank, rank, piece.source, piece.target, piece.term))
            text = p.move_text(m, self.names)
            out.append(
                PreparedMove(
                    m.source,
                    m.target,
                    plan,
                    aval.dtype,
                    tuple(sends),
                    tuple(receives),
                    f"{text} of {m.origin or 'a result'}",
                )
            )
        return tuple(out)

    # ----- running ----------------------------------------------------------------------------------------------------

    def run(
        self, inputs: Sequence[Mapping[int, np.ndarray]], exchange: Exchange | None = None
    ) -> list[dict[int, np.ndarray]]:
        """Blocks of the outputs by rank, from the blocks of the inputs and constants by rank (in the program's order)."""
        p = self.program
        env: dict[int, dict[int, np.ndarray]] = {r: {} for r in self.hosted}
        for v, blocks in zip((*p.inputs, *p.constants), inputs, strict=True):
            for r in self.hosted:
                env[r][v] = blocks[r]
        for number, (step, frees) in enumerate(zip(self.steps, p.frees, strict=True)):
            if type(step) is PreparedLocal:
                self._run_local(step, env)
            else:
                self._run_moves(number, step, env, exchange)
            for v in frees:
                for r in self.hosted:
                    env[r].pop(v, None)
        return [{r: env[r][v] for r in self.hosted} for v in p.outputs]

    def _run_local(self, s: PreparedLocal, env: dict[int, dict[int, np.ndarray]]) -> None:
        fn, args, outputs = s.fn, s.args, s.outputs
        for rank, params in s.params.items():
            values = env[rank]
            if rank in s.fills:
                for v, (shape, dtype, neutral) in zip(outputs, s.fills[rank], strict=True):
                    values[v] = np.full(shape, neutral, dtype)
                continue
            try:
                out = fn(*[values[v] if v >= 0 else c for v, c in args], **params)
            except MeshtapeError:
                raise
            except Exception as e:
                where = f", called at {s.site}" if s.site else ""
                raise RankLost(f"rank {rank} failed in {s.origin}{where}: {type(e).__name__}: {e}") from e
            if len(outputs) == 1:
                values[outputs[0]] = np.asarray(out)
            else:
                values.update(zip(outputs, map(np.asarray, out), strict=True))

    def _run_moves(
        self,
        number: int,
        moves: Sequence[PreparedMove],
        env: dict[int, dict[int, np.ndarray]],
        exchange: Exchange | None,
    ) -> None:
        sends: dict[int, list[np.ndarray]] = {}
        receives: dict[int, list[np.ndarray]] = {}
        arrived: list[dict[tuple[int, int, Box, int], np.ndarray]] = []
        for m in moves:
            got: dict[tuple[int, int, Box, int], np.ndarray] = {}
            sent: set[tuple[int, int, Box]] = set()
            for r in m.sends:
                # Ranks of one process that need the same piece are sent it once.
                key = (r.process, r.source_rank, r.source)
                if key not in sent:
                    sent.add(key)
                    block = env[r.source_rank][m.source]
                    sends.setdefault(r.process, []).append(np.asarray(block[r.source.slices], order="C"))
            buffers: dict[tuple[int, Box], np.ndarray] = {}
            for r in m.receives:
                place = (r.source_rank, r.source)
                if place not in buffers:
                    buffers[place] = np.empty(r.source.shape, m.dtype)
                    receives.setdefault(r.process, []).append(buffers[place])
                got[(r.target_rank, r.source_rank, r.target, r.term)] = buffers[place]
            arrived.append(got)
        if sends or receives:
            if exchange is None:
                raise RankLost(f"the ranks of {sorted({*sends, *receives})} are not in this process")
            exchange.exchange(number, moves[0].text, sends, receives)
        for m, got in zip(moves, arrived, strict=True):
            results = {rank: self._assemble(rank, m, env, got) for rank in self.hosted if m.plan.ranks[rank]}
            for rank, block in results.items():
                env[rank][m.target] = block

    def _assemble(
        self,
        rank: int,
        m: PreparedMove,
        env: dict[int, dict[int, np.ndarray]],
        got: Mapping[tuple[int, int, Box, int], np.ndarray],
    ) -> np.ndarray:
        """One rank's new block. Contributions are joined in the order of their coordinates: bitwise repeatable."""
        rp = m.plan.ranks[rank]

        def piece(p: Any) -> np.ndarray:
            block = env[p.rank].get(m.source) if p.rank in env else None
            return got[(rank, p.rank, p.target, p.term)] if block is None else block[p.source.slices]

        if rp.neutral:
            return np.full(rp.box.shape, identity_of(m.plan.fill, m.dtype), m.dtype)
        if len(rp.pieces) == 1 and rp.pieces[0].target.shape == rp.box.shape:
            # The whole block from one place. Blocks are never written again, so that it may be the same memory; a part of a
            # larger block is copied, or it would keep all of that alive.
            block = piece(rp.pieces[0])
            return block if block.base is None or block.base.nbytes <= block.nbytes else block.copy()
        reducer = REDUCERS[m.plan.reduce] if m.plan.reduce else None
        # More than two contributions of one or two bytes an element are joined in float32, and rounded once.
        wide = m.plan.terms > 2 and reducer is not None and is_low_precision(m.dtype)
        dtype = np.dtype(np.float32) if wide else m.dtype
        whole = Box.whole(rp.box.shape)
        if reducer is not None and all(p.target == whole for p in rp.pieces) and len(rp.pieces) > 1:
            # A ufunc gives 0-d results as scalars, which cannot be written to.
            first = piece(rp.pieces[0])
            out = np.asarray(reducer(first.astype(dtype) if wide else first, piece(rp.pieces[1])), dtype)
            for p in rp.pieces[2:]:
                reducer(out, piece(p), out=out)
            return out.astype(m.dtype, copy=False)
        out = np.empty(rp.box.shape, dtype)
        for p in rp.pieces:  # in the order of terms: the first of each place is written, the others are joined to it
            at = p.target.slices
            if p.term == 0 or reducer is None:
                out[at] = piece(p)
            else:
                out[at] = reducer(out[at], piece(p))
        return out.astype(m.dtype, copy=False)
