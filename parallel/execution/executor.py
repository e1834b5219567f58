"""Running a rank program, in lockstep over the ranks that one process hosts.

A program is prepared once: ops bound, shape parameters made local, reshards sorted into rounds of messages. A run is
then one loop over actions, with the ranks of the process inside. Between processes only reshards communicate, through a
``Transport``; a process that hosts all ranks needs none. Rounds that start early (``overlap``) run in a thread of their
own, one after the other.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...arrays.backends.memory_pool import SMALLEST, is_free, room
from ...arrays.core.dtypes import is_low_precision, numpy_form
from ...arrays.core.errors import FOREIGN_ERRORS, MeshtapeError, RankLost, type_of_ours
from ...arrays.core.op import Op, ShapeDtype
from ...arrays.indexing import sparse_cotangent
from ...arrays.indexing.indexing import SCATTER
from ...arrays.indexing.sparse_cotangent import SparseCotangent
from ..base.device_memory import HOST, BlockMemory, CudaMemory
from ..partition.overlap import Buckets, Start, Wait, schedule
from ..partition.rank_program import LocalCall, Move, Moves, RankProgram
from ..resharding.collective_plans import Collective, in_halves, plan_collective
from ..resharding.execution import MOST_ROUNDS, ReshardExecution, carry_out
from ..resharding.expert_all_to_all import AllToAllV, AllToAllVShare, RaggedRunning
from ..resharding.plan import ReshardPlan, plan_reshard
from ..resharding.schedule import MoveRounds, plan_rounds
from ..sharding.factors import RankView
from ..sharding.placement import Layout, identity_of
from ..sharding.sharded_indexing import SCATTER_PART
from ..transports.group import Transport
from .eviction import Blocks, Call, Eviction, Plan
from .fusion import Chain, PreparedChain, fused

Env = dict[int, dict[int, np.ndarray]]
"""Blocks by rank and variable."""


class MoveRoute(NamedTuple):
    """A move, or one of several successive moves in its place. Source blocks are reshaped to ``given``, and new blocks
    to ``made``, where the plan has other shapes."""

    plan: ReshardPlan
    given: tuple[int, ...] | None = None
    made: tuple[int, ...] | None = None


class PreparedMove(NamedTuple):
    source: int
    target: int
    way: MoveRoute
    rounds: MoveRounds | AllToAllVShare
    neutral: object
    table: int | None

    def running(self, env: Env, memory: BlockMemory) -> ReshardExecution | RaggedRunning:
        """The move, ready to be carried out on these blocks."""
        blocks = {r: sparse_cotangent.dense(values[self.source]) for r, values in env.items() if self.source in values}
        if self.way.given is not None:
            blocks = {r: b.reshape(self.way.given) for r, b in blocks.items()}
        if isinstance(self.rounds, AllToAllVShare):
            return self.rounds.running(blocks, {r: env[r][self.table] for r in blocks}, memory)  # type: ignore[index]
        return ReshardExecution(self.rounds, blocks, self.neutral, memory)

    def results(self, running: ReshardExecution | RaggedRunning) -> dict[int, np.ndarray]:
        """The new blocks of a move that was carried out."""
        found = running.results()
        return found if self.way.made is None else {r: b.reshape(self.way.made) for r, b in found.items()}


class PreparedMoves(NamedTuple):
    """Reshards that travel together. ``number`` names their first round to other processes, ``remote`` says whether it
    has any."""

    number: int
    moves: tuple[PreparedMove, ...]
    text: str
    remote: bool


class PreparedLocal(NamedTuple):
    fn: Any
    args: tuple[tuple[int, Any], ...]
    params: Mapping[int, Mapping[str, Any]]
    outputs: tuple[int, ...]
    fills: Mapping[int, tuple[tuple[tuple[int, ...], np.dtype, Any], ...]]
    origin: str
    site: str
    room: Mapping[int, ShapeDtype] | None
    """Shape and dtype of each rank's result, if the op can write it to given memory."""
    dying: tuple[int, ...]
    """Operands that nothing reads afterwards: the result may take their memory."""
    sparse: Op | None
    """The op, if operands may be sparse (:mod:`meshtape.arrays.indexing.sparse_cotangent`)."""
    keeps: bool
    """Whether the result may stay sparse."""


class Prepared:
    """A rank program made ready for one process: ``hosted`` are its ranks, ``homes`` the process of every rank,
    ``memory`` is where their blocks are, ``buckets`` says which rounds run beside the computation, ``hosts`` counts the
    machines of the processes. ``native``: the transport may make sums in an order of its own."""

    def __init__(
        self,
        program: RankProgram,
        hosted: Sequence[int],
        homes: Sequence[int],
        names: Sequence[str],
        memory: BlockMemory = HOST,
        buckets: Buckets | None = None,
        hosts: int = 1,
        native: bool = False,
    ) -> None:
        self.program, self.hosts, self._native = program, hosts, native
        self.memory = memory
        self.hosted = tuple(hosted)
        self.homes = tuple(homes)
        self.names = tuple(names)
        self._all_here = len(self.hosted) == len(self.homes)
        # A gradient of a table stays sparse while only ops of one rank read it. It is dense when sent or returned.
        self._thin = thin_values(program) if memory.xp is np else frozenset()
        alone = list(zip(program.steps, program.frees, strict=True))
        pairs = alone if self._all_here else schedule(program, buckets)
        pairs = fused(program, pairs, cuda=memory.name != "cpu", apart=self._thin)
        self.overlaps = any(isinstance(s, Start) for s, _ in pairs)
        self._actions: list[tuple[Any, tuple[int, ...]]] = []
        rounds = 0
        for step, frees in pairs:
            if isinstance(step, Wait):
                self._actions.append((step, frees))
                continue
            if isinstance(step, Chain):
                self._actions.append((PreparedChain(step, program, self.hosted, frees, memory), frees))
                continue
            if isinstance(step, Moves | Start):
                ways = [(m, self._ways(m)) for m in step.moves]
                halves = [(m, w[1]) for m, w in ways if len(w) > 1]
                first = [(m.source, m.target if len(w) == 1 else _between(m), w[0]) for m, w in ways]
                ready: Any = self._prepare_moves(MOST_ROUNDS * rounds, step.moves, first)
                rounds += 1
                if halves:
                    self._actions.append((ready, ()))
                    second = [(_between(m), m.target, w) for m, w in halves]
                    ready = self._prepare_moves(MOST_ROUNDS * rounds, [m for m, _ in halves], second)
                    rounds += 1
                    frees = (*frees, *(_between(m) for m, _ in halves))
                if isinstance(step, Start):
                    ready = (step.ticket, ready)
            else:
                ready = self._prepare_local(step, frees)
            self._actions.append((ready, frees))
        self.evicting: Plan | None = None
        """Where blocks may wait in host memory while the program runs."""
        self.others: Callable[[], Iterable[Blocks]] = tuple
        """Blocks beside those of a run that may go to host memory before."""
        if isinstance(memory, CudaMemory) and self._all_here:
            self._calls = [self._call(a) for a, _ in self._actions]
            self.evicting = Plan([c.reads for c in self._calls], program.outputs, memory)

    # ----- preparing --------------------------------------------------------------------------------------------------

    def _prepare_local(self, s: LocalCall, frees: Sequence[int]) -> PreparedLocal:
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
        args = tuple((v, None) if isinstance(v, int) else (-1, self._constant(v.value)) for v in s.inputs)
        fn, room = self.memory.bind(s.op), None
        if self.memory.xp is np and s.op.takes_out and not s.params and p.inner.isdisjoint(s.outputs):
            (v,) = s.outputs
            blocks = {r: p.block(v, r) for r in self.hosted}
            if any(b.nbytes >= SMALLEST for b in set(blocks.values())):
                room = blocks
        inputs = [v for v in s.inputs if isinstance(v, int)]
        dying = tuple(v for v in inputs if v in frees and inputs.count(v) == 1)
        sparse = None if self._thin.isdisjoint(inputs) else s.op
        if sparse is not None:
            room = None
        elif not isinstance(fn, np.ufunc):  # a product reads its operands again and again
            dying = ()
        if self.memory.xp is np:
            fn = numpy_form(fn, p.avals[s.outputs[0]].dtype)
        keeps = not self._thin.isdisjoint(s.outputs)
        origin = s.origin or s.op.name
        return PreparedLocal(fn, args, params, s.outputs, fills, origin, s.site, room, dying, sparse, keeps)

    def _constant(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        with self.memory.using():
            return self.memory.put(value)

    def _ways(self, m: Move) -> tuple[MoveRoute, ...]:
        """The ways of a move: one, or two in succession where this process hosts all ranks and that takes fewer copies.
        In an all-to-all or a reduce-scatter all blocks are then joined to one array, which is cut."""
        p = self.program
        way = MoveRoute(p.plan(m))
        if not self._all_here:
            return (way,)
        if (c := m.collective) is not None:
            halves = in_halves(c) if isinstance(c, Collective) else None
            if halves is None:
                return (way,)
            first, second = (plan_collective(len(self.homes), half) for half in halves)
            (given,), (made,) = halves[0].shapes, c.results
            other = halves[1].results != c.results
            return MoveRoute(first, given if other else None), MoveRoute(second, None, made if other else None)
        plan, now, then = way.plan, p.layouts[m.source], p.layouts[m.target]
        blocks = math.prod(p.sizes[a] for _, axes in then.shards for a in axes)
        sources = plan.terms * math.prod(p.sizes[a] for _, axes in now.shards for a in axes)
        if blocks * len(plan.pieces(0)) <= 4 * (blocks + sources):
            return (way,)
        middle = Layout((), tuple(x for x in then.partials if x in now.partials))
        shape = p.avals[m.source].shape
        return MoveRoute(plan_reshard(shape, p.sizes, now, middle)), MoveRoute(
            plan_reshard(shape, p.sizes, middle, then)
        )

    def _prepare_moves(
        self, number: int, moves: Iterable[Move], ways: Sequence[tuple[int, int, MoveRoute]]
    ) -> PreparedMoves:
        p = self.program
        process = self.homes[self.hosted[0]]
        out, texts = [], []
        for m, (source, target, way) in zip(moves, ways, strict=True):
            texts.append(f"{p.move_text(m, self.names)} of {m.origin or 'a result'}")
            if isinstance(m.collective, AllToAllV):
                out.append(PreparedMove(source, target, way, m.collective.share(self.homes, process), None, m.table))
                continue
            aval = p.avals[m.source]
            low = is_low_precision(aval.dtype)
            native = self._native and (low or aval.dtype in (np.float32, np.float64))
            rounds = plan_rounds(way.plan, self.homes, process, aval.dtype, low, self.hosts, native)
            neutral = identity_of(way.plan.fill, aval.dtype) if any(b.neutral for b in rounds.blocks) else None
            out.append(PreparedMove(source, target, way, rounds, neutral, None))
        remote = any(m.rounds.remote for m in out)
        return PreparedMoves(number, tuple(out), texts[0], remote)

    # ----- running ----------------------------------------------------------------------------------------------------

    def run(
        self, inputs: Sequence[Mapping[int, np.ndarray]], transport: Transport | None = None
    ) -> list[dict[int, np.ndarray]]:
        """Blocks of the outputs by rank, from the blocks of the inputs and constants by rank (in the program's
        order)."""
        with self.memory.using(), self._beside(transport) as beside:
            return self._run(inputs, transport, beside, self.others)

    def loop(
        self,
        inputs: Sequence[Mapping[int, np.ndarray]],
        turns: int,
        carried: int,
        each: Sequence[Sequence[Mapping[int, np.ndarray]]],
        transport: Transport | None = None,
    ) -> list[dict[int, np.ndarray]]:
        """``turns`` runs: the first ``carried`` outputs are the next turn's first inputs, those after them are
        ``each[turn]``, the rest of ``inputs`` stays. Gives the last of the carried and, of the other outputs, all turns
        stacked."""
        carry, rest = list(inputs[:carried]), list(inputs[carried:])
        stacks: list[dict[int, np.ndarray]] = []

        def others() -> Iterator[Blocks]:
            yield from self.others()
            yield from (b for b in (*inputs, *carry) if isinstance(b, dict))

        def with_room(act: Callable[[], None]) -> None:
            if self.evicting is None:
                act()
            else:
                failure = partial(self._failure, self.hosted[0], origin="the results of a loop, together", site="")
                Eviction(self.evicting, {}, {}, others).call(0, Call((), (), failure), act)

        with self.memory.using(), self._beside(transport) as beside:
            for t in range(turns):
                if transport is not None:
                    transport.turn(t)
                out = self._run([*carry, *(each[t] if each else ()), *rest], transport, beside, others)
                carry, seen = list(out[:carried]), out[carried:]
                stacks = stacks or [{} for _ in seen]
                for stack, o in zip(stacks, seen, strict=True):
                    with_room(partial(self._stack, stack, t, turns, o))
        return [*(dict(c) for c in carry), *stacks]

    def _stack(self, stack: dict[int, Any], turn: int, turns: int, blocks: Mapping[int, Any]) -> None:
        for r, b in blocks.items():
            if r not in stack:
                stack[r] = self.memory.empty((turns, *b.shape), b.dtype)
            stack[r][turn] = self.memory.put(b)

    def _beside(self, transport: Transport | None) -> AbstractContextManager[Beside | None]:
        if not self.overlaps or transport is None:
            return nullcontext()
        return Beside(transport, self.memory)

    def _run(
        self,
        inputs: Sequence[Mapping[int, np.ndarray]],
        transport: Transport | None,
        beside: Beside | None,
        others: Callable[[], Iterable[Blocks]],
    ) -> list[dict[int, np.ndarray]]:
        p = self.program
        env: Env = {r: {} for r in self.hosted}
        variables = (*p.inputs, *p.constants)
        for v, blocks in zip(variables, inputs, strict=True):
            for r in self.hosted:
                env[r][v] = blocks[r]
        eviction = None
        if self.evicting is not None:
            owners = {v: b for v, b in zip(variables, inputs, strict=True) if isinstance(b, dict)}
            eviction = Eviction(self.evicting, env, owners, others)
        act = partial(self._act, env=env, transport=transport, beside=beside)
        for n, (step, frees) in enumerate(self._actions):
            if eviction is None:
                act(step)
            else:
                eviction.call(n, self._calls[n], partial(act, step), partial(self._parts, step, act))
            for v in frees:
                for r in self.hosted:
                    env[r].pop(v, None)
        return [{r: sparse_cotangent.dense(env[r][v]) for r in self.hosted} for v in p.outputs]

    def _act(self, step: Any, env: Env, transport: Transport | None, beside: Beside | None) -> None:
        kind = type(step)
        if kind is PreparedLocal:
            self._run_local(step, env)
        elif kind is PreparedChain:
            for r in self.hosted:
                step.run(env[r], r, partial(self._failure, r))
        elif kind is PreparedMoves:
            if beside is None or not step.remote:
                found = self._run_moves(step, env, transport)
            else:
                found = beside.now(self._run_moves, step, env, transport)
            self._store(step, found, env)
        elif kind is Wait:
            assert beside is not None
            self._store(*beside.wait(step.ticket), env)
        else:
            assert beside is not None
            ticket, moves = step
            beside.start(ticket, moves, self._run_moves, moves, env, transport)

    def _call(self, action: Any) -> Call:
        """An action of a program whose ranks are all here, as a call whose operands may be away."""
        if isinstance(action, PreparedMoves):
            reads = [v for m in action.moves for v in (m.source, m.table) if v is not None]
            makes, origin, site = [m.target for m in action.moves], action.text, ""
        elif isinstance(action, PreparedChain):
            first = action.calls[0]
            reads, makes, origin, site = action.inputs, action.outputs, first.origin or first.op.name, first.site
        else:
            reads, makes = [v for v, _ in action.args if v >= 0], action.outputs
            origin, site = action.origin, action.site
        return Call(reads, makes, partial(self._failure, self.hosted[0], origin=origin, site=site))

    def _parts(self, action: Any, act: Callable[[Any], None]) -> list[tuple[Call, Callable[[], None]]]:
        parts = action.parts() if isinstance(action, PreparedChain) else ()
        return [(self._call(p), partial(act, p)) for p in parts]

    def _run_local(self, s: PreparedLocal, env: Env) -> None:
        fn, args, outputs, put = s.fn, s.args, s.outputs, self.memory.put
        for rank, params in s.params.items():
            values = env[rank]
            if rank in s.fills:
                for v, (shape, dtype, neutral) in zip(outputs, s.fills[rank], strict=True):
                    values[v] = self.memory.full(shape, neutral, dtype)
                continue
            try:
                if s.sparse is not None:
                    mine = [v in s.dying and is_free(values, v) for v, _ in args]
                    operands = [values[v] if v >= 0 else c for v, c in args]
                    out = sparse_cotangent.call(s.sparse, operands, params, mine)
                elif s.room is None:
                    out = fn(*[values[v] if v >= 0 else c for v, c in args], **params)
                else:
                    into = room(values, s.dying, *s.room[rank])
                    out = fn(*[values[v] if v >= 0 else c for v, c in args], out=into)
            except Exception as e:
                raise self._failure(rank, e, s.origin, s.site) from e
            if len(outputs) == 1:
                values[outputs[0]] = out if s.keeps and type(out) is SparseCotangent else put(out)
            else:
                values.update(zip(outputs, map(put, out), strict=True))

    def _failure(self, rank: int, error: Exception, origin: str, site: str) -> MeshtapeError:
        """The error of a call, with the type that it has in one process if that is an error of ours."""
        where = f", called at {site}" if site else ""
        error = self.memory.translated(error)
        text = f"rank {rank} failed in {origin}{where}: "
        kind = type_of_ours(error) if isinstance(error, FOREIGN_ERRORS) else None
        if kind is None and isinstance(error, MeshtapeError):
            kind = type(error)
        if kind is not None:
            with contextlib.suppress(TypeError):  # that is made of more than a text
                return kind(f"{text}{error}")
        return RankLost(f"{text}{type(error).__name__}: {error}")

    def _run_moves(self, s: PreparedMoves, env: Env, transport: Transport | None) -> list[dict[int, np.ndarray]]:
        """The new blocks of each move."""
        running = [m.running(env, self.memory) for m in s.moves]

        def exchange(number: int, sends: dict[int, list[Any]], receives: dict[int, list[Any]]) -> None:
            if transport is None:
                raise RankLost(f"the ranks of {sorted({*sends, *receives})} are not in this process")
            transport.exchange(s.number + number, s.text, sends, receives)

        carry_out(running, exchange)
        return [m.results(one) for m, one in zip(s.moves, running, strict=True)]

    @staticmethod
    def _store(s: PreparedMoves, found: Sequence[Mapping[int, np.ndarray]], env: Env) -> None:
        for m, blocks in zip(s.moves, found, strict=True):
            for rank, block in blocks.items():
                env[rank][m.target] = block


class Beside:
    """A context whose rounds run in a thread of their own, beside the program. They run one after the other, and all
    processes start them in one order."""

    def __init__(self, transport: Transport, memory: BlockMemory) -> None:
        self._transport, self._memory = transport, memory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="meshtape-collectives")
        self._under_way: dict[int, tuple[PreparedMoves, Future[Any]]] = {}
        self._failed: BaseException | None = None
        transport.eager = False

    def start(self, ticket: int, moves: PreparedMoves, fn: Any, *args: Any) -> None:
        """Start a round in the thread; :meth:`wait` returns its results."""
        self._under_way[ticket] = moves, self._submit(fn, *args)

    def wait(self, ticket: int) -> tuple[PreparedMoves, Any]:
        """The round that was started with this ticket, and its results. Raises its error."""
        moves, future = self._under_way.pop(ticket)
        return moves, self._result(future)

    def now(self, fn: Any, *args: Any) -> Any:
        """Run a round after those that are under way, and wait for it."""
        return self._result(self._submit(fn, *args))

    def _submit(self, fn: Any, *args: Any) -> Future[Any]:
        # The threads of a device have streams of their own: each goes on after the other.
        return self._thread.submit(self._guarded, self._memory.mark(), fn, *args)

    def _result(self, future: Future[Any]) -> Any:
        self._transport.eager = True  # the program stands still
        try:
            found, mark = future.result()
        finally:
            self._transport.eager = False
        self._memory.follow(mark)
        return found

    def _guarded(self, mark: Any, fn: Any, *args: Any) -> Any:
        if self._failed is not None:  # nothing may be used after an error
            raise self._failed
        try:
            with self._memory.using():
                self._memory.follow(mark)
                return fn(*args), self._memory.mark()
        except BaseException as e:
            self._failed = e
            raise

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and any(not f.done() for _, f in self._under_way.values()):
            self._failed = self._failed or error
            self._transport.shutdown()  # wakes the threads that wait here
        self._thread.shutdown(wait=True)
        self._transport.eager = True


def _between(m: Move) -> int:
    """The variable between two successive moves of one reshard; no program uses its number."""
    return -2 - m.target


def thin_values(program: RankProgram) -> frozenset[int]:
    """Variables of which a rank may hold a sparse cotangent."""
    calls = (s for s in program.steps if isinstance(s, LocalCall))
    return sparse_cotangent.sparse_values(calls, program.avals, made_by=(SCATTER, SCATTER_PART))
