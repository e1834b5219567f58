"""Reshards and programs over several processes equal those of one process, to the bit: every algorithm, every division
of the ranks.

The processes are threads that exchange through a real transport; on workers of their own the same is sampled in
``test_cluster``.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import dask
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape.arrays.backends.memory_pool import POOL, Pool
from meshtape.arrays.core import dtypes  # noqa: F401  # registers the names of ml_dtypes
from meshtape.arrays.core.op import ShapeDtype
from meshtape.errors import RankLost
from meshtape.parallel.collectives.costs import Ways
from meshtape.parallel.dask.workers import known_workers
from meshtape.parallel.execution.executor import Prepared
from meshtape.parallel.execution.explain import program_text
from meshtape.parallel.partition.builder import AS_IT_IS
from meshtape.parallel.partition.overlap import Buckets, Start, Wait, schedule, variables
from meshtape.parallel.partition.partition import with_frees
from meshtape.parallel.partition.rank_program import LocalCall, Move, Moves, RankProgram
from meshtape.parallel.resharding import schedule as rounds
from meshtape.parallel.resharding.plan import Reshard
from meshtape.parallel.sharding.placement import Layout, block_box, make_layout
from meshtape.parallel.transports.rendezvous import DataPlane

MESH, SECRET = b"r" * 16, b"s" * 32

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def planes() -> Iterator[list[DataPlane]]:
    made = [DataPlane("127.0.0.1") for _ in range(4)]
    for p in made:
        p.register_mesh(MESH, SECRET)
    yield made
    for p in made:
        p.close()


_epochs = itertools.count()


def in_processes(
    planes: Sequence[DataPlane],
    program: RankProgram,
    homes: tuple[int, ...],
    inputs: Sequence[dict[int, np.ndarray]],
    run: Callable[[Prepared, Sequence[dict[int, np.ndarray]], Any], Any] = lambda p, i, g: p.run(i, g),
) -> list[dict[int, np.ndarray]]:
    """Blocks of the outputs, computed with each process hosting its ranks."""
    count, epoch = max(homes) + 1, next(_epochs)
    outs: list[Any] = [None] * count
    ranks = {p: f"process {p}" for p in range(count)}

    def host(p: int) -> None:
        hosted = [r for r, h in enumerate(homes) if h == p]
        mine = [{r: b[r] for r in hosted} for b in inputs]
        group = None
        try:
            if count > 1:
                peers = {q: planes[q].address for q in range(count) if q != p}
                group = planes[p].group(MESH, epoch, p, peers, ranks, 200.0)
                group.begin(1, 200.0)
            outs[p] = run(Prepared(program, hosted, homes, ("a", "b", "c")), mine, group)
        except Exception as e:
            outs[p] = e
            if group is not None:
                group.abort(str(e))
                planes[p].drop(MESH, epoch)

    threads = [threading.Thread(target=host, args=(p,), daemon=True) for p in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(250)
    assert not any(t.is_alive() for t in threads)
    errors = [o for o in outs if isinstance(o, Exception)]
    if errors:
        raise errors[0]
    return [{r: b for o in outs for r, b in o[i].items()} for i in range(len(program.outputs))]


def reshard_program(shape: tuple[int, ...], dtype: Any, sizes: tuple[int, ...], a: Layout, b: Layout) -> RankProgram:
    aval = ShapeDtype(shape, np.dtype(dtype))
    return RankProgram(
        sizes, (0,), (Moves((Move(0, 1, None),)),), (1,), {0: aval, 1: aval}, {0: a, 1: b}, frees=((0,),)
    )


def blocks(shape: tuple[int, ...], dtype: Any, sizes: tuple[int, ...], layout: Layout) -> dict[int, np.ndarray]:
    """Random blocks: replicas equal, contributions of their own."""
    out = {}
    for rank in range(int(np.prod(sizes, dtype=int))):
        coords = np.unravel_index(rank, sizes) if sizes else ()
        term = [int(coords[axis]) for axis, _ in layout.partials]
        values = np.random.default_rng([7, *term]).normal(size=shape) * 3
        whole = values.astype(dtype) if np.dtype(dtype) != bool else values > 0
        out[rank] = np.ascontiguousarray(whole[block_box(layout, sizes, shape, rank).slices]).reshape(
            block_box(layout, sizes, shape, rank).shape
        )
    return out


@st.composite
def layouts(draw: Any, ndim: int, axes: int, op: str | None) -> Layout:
    shards: dict[int, list[int]] = {}
    partials: dict[int, str] = {}
    for axis in draw(st.permutations(range(axes))):
        kind = draw(st.sampled_from(["shard", "replicate", "partial"]))
        if kind == "shard" and ndim:
            shards.setdefault(draw(st.integers(0, ndim - 1)), []).append(axis)
        elif kind == "partial" and op is not None:
            partials[axis] = op
    return make_layout(shards, partials)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(data=st.data())
def test_reshards_of_several_processes(planes, data):
    sizes = data.draw(st.sampled_from([(2,), (3,), (4,), (2, 2), (2, 3), (1, 2, 2)]))
    shape = data.draw(st.sampled_from([(), (1,), (5,), (6, 4), (3, 5, 2), (0, 3), (70, 33)]))
    op = data.draw(st.sampled_from(["sum", "max", "min", "prod"]))
    dtype = data.draw(st.sampled_from(["f4", "f8", "bfloat16", "i4"]))
    n = int(np.prod(sizes))
    homes = tuple(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    names = sorted(set(homes))
    homes = tuple(names.index(h) for h in homes)
    a = data.draw(layouts(len(shape), len(sizes), op))
    b = data.draw(layouts(len(shape), len(sizes), op))  # what is pending may stay so, or begin
    program = reshard_program(shape, dtype, sizes, a, b)
    inputs = [blocks(shape, dtype, sizes, a)]
    (want,) = in_processes(planes, program, (0,) * n, inputs)
    before = rounds.COSTS
    try:
        rounds.COSTS = before._replace(only=data.draw(st.sampled_from([*Ways._fields, None])))
        (got,) = in_processes(planes, program, homes, inputs)
    finally:
        rounds.COSTS = before
    assert got.keys() == want.keys()
    for rank in want:
        assert got[rank].dtype == want[rank].dtype
        np.testing.assert_array_equal(got[rank], want[rank])


@pytest.mark.parametrize("processes", [2, 3, 4])
@pytest.mark.parametrize("megabytes", [1, 9])
def test_a_large_all_reduce(planes, processes, megabytes):
    """Several chunks a message, by the algorithm that its size selects."""
    sizes, shape = (processes,), (megabytes << 18,)
    program = reshard_program(shape, "f4", sizes, make_layout({}, {0: "sum"}), Layout())
    inputs = [blocks(shape, "f4", sizes, make_layout({}, {0: "sum"}))]
    (want,) = in_processes(planes, program, (0,) * processes, inputs)
    (got,) = in_processes(planes, program, tuple(range(processes)), inputs)
    for rank in range(processes):
        np.testing.assert_array_equal(got[rank], want[0])


def _count(s: rounds.Outgoing) -> int:
    return int(np.prod([x.stop - x.start for x in s.sources[0].slices], dtype=int))


def moved(program: RankProgram, homes: tuple[int, ...], process: int) -> int:
    """Bytes that a process sends in the only move of a program."""
    (move,) = program.steps[0].moves
    dtype = program.avals[0].dtype
    r = rounds.plan_rounds(program.plan(move), homes, process, dtype, False)
    size = lambda span, n: n if span is None else span.stop - span.start  # noqa: E731
    first = sum(size(s.span, _count(s)) * len(s.sources) for s in r.sends)
    second = sum((g.own.stop - g.own.start) * len(g.spans) for g in r.gathers)
    return (first + second) * dtype.itemsize


@pytest.mark.parametrize("processes", [3, 4, 8])
def test_an_all_reduce_sends_no_more_with_more_processes(processes):
    """Twice the block at most, as a ring does; every process sends as much."""
    program = reshard_program((1 << 20,), "f4", (processes,), make_layout({}, {0: "sum"}), Layout())
    homes = tuple(range(processes))
    sent = [moved(program, homes, p) for p in range(processes)]
    assert max(sent) <= 2 * (4 << 20)
    assert max(sent) - min(sent) <= 64 * 4 * processes * 2


@pytest.mark.parametrize("ranks", [64, 512])
def test_the_work_of_a_process_grows_with_the_ranks_and_not_with_their_square(monkeypatch, ranks):
    """One process of so many works out what it sends and gets: each rank is looked at a few times."""
    calls = 0

    def counted(method: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            nonlocal calls
            calls += 1
            return method(self, *args)

        return call

    for name in ("piece", "pieces", "box", "same"):
        monkeypatch.setattr(Reshard, name, counted(getattr(Reshard, name)))
    rows, columns, pending = make_layout({0: [0]}), make_layout({1: [0]}), make_layout({}, {0: "sum"})
    for a, b in ((pending, Layout()), (rows, Layout()), (rows, columns), (pending, rows)):
        program = reshard_program((2 * ranks, ranks), "f4", (ranks,), a, b)
        plan = program.plan(program.steps[0].moves[0])
        for homes, process in ((tuple(range(ranks)), 3), (tuple(r // 8 for r in range(ranks)), 1)):
            calls = 0
            found = rounds.plan_rounds(plan, homes, process, np.dtype("f4"), False)
            assert calls <= 30 * ranks
            assert sum(len(s.sources) for s in found.sends) + len(found.joins) <= 16 * ranks
        if ranks <= 64:  # all in one process: each block is made of a part of each
            calls = 0
            found = rounds.plan_rounds(plan, (0,) * ranks, 0, np.dtype("f4"), False)
            assert calls <= 30 * ranks
            assert not found.sends
            assert len(found.joins) <= ranks**2


def test_ranks_of_one_process_are_sent_a_block_once():
    program = reshard_program((1 << 10,), "f4", (4,), make_layout({0: [0]}), Layout())
    assert moved(program, (0, 0, 1, 1), 0) == 2 * (1 << 10)  # its half, once


# ----- rounds that run beside the computation -------------------------------------------------------------------------


UPDATES: dict[str, Callable[[Any, Any], Any]] = {
    "the gradient": lambda w, g: g,
    "a linear update": lambda w, g: w - 0.1 * g,  # a pending sum passes it, and ends where the weight is added
    "another": lambda w, g: w - 0.1 * mt.tanh(g),
}


def layers(n: int, update: str = "the gradient") -> tuple[Any, list[Any]]:
    """Gradients of a deep network on a mesh of data, or what they make of the weights; of the last layer they are there
    first."""
    mesh = mt.Mesh({"data": 2})
    rng = np.random.default_rng(0)
    ws = [mt.distribute(rng.normal(size=(64, 64)), mesh) for _ in range(n)]
    x = mt.distribute(rng.normal(size=(8, 64)), mesh, data=mt.Shard(0))

    def gradients(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            h = x
            for w in ws:
                h = mt.tanh(h @ w)
            return mt.mean(mt.square(h))

        gs = mt.grad(loss)(ws)
        return [UPDATES[update](w, g) for w, g in zip(ws, gs, strict=True)]

    program = mt.compile(gradients).program(ws, x)
    blocks = [mesh.runtime._blocks(a._buf.computed().handle) for a in (*ws, x)]
    blocks += [{0: np.asarray(c), 1: np.asarray(c)} for c in program.constants.values()]
    return mesh.rank_program(program, [*(w.sharding for w in ws), x.sharding]), blocks


def test_gradients_are_reduced_while_others_are_computed():
    program, _ = layers(6)
    with dask.config.set({"meshtape.bucket": 2 * 64 * 64 * 8, "meshtape.overlap": 1}):
        actions = [a.what for a in schedule(program)]
    starts = [i for i, a in enumerate(actions) if isinstance(a, Start)]
    waits = [i for i, a in enumerate(actions) if isinstance(a, Wait)]
    assert len(starts) >= 2
    assert len(starts) == len(waits)
    assert max(starts) < min(waits)
    between = actions[starts[0] : waits[0]]
    assert sum(not isinstance(a, Start | Wait | Moves) for a in between) >= 4  # ops that run meanwhile
    # Nothing is lost, nothing is done twice.
    moves = [m for a in actions if isinstance(a, Start | Moves) for m in a.moves]
    assert sorted(m.target for m in moves) == sorted(
        m.target for s in program.steps if isinstance(s, Moves) for m in s.moves
    )
    with dask.config.set({"meshtape.overlap": 0}):
        assert [a.what for a in schedule(program)] == list(program.steps)


@pytest.mark.parametrize("update", ["a linear update", "another"])
def test_a_round_of_an_update_starts_before_the_updates(update):
    """All but that of the first layer, whose gradient is made last."""
    program, _ = layers(6, update)
    with dask.config.set({"meshtape.bucket": 1, "meshtape.overlap": 1}):
        actions = [a.what for a in schedule(program)]
    starts = [i for i, a in enumerate(actions) if isinstance(a, Start)]
    updates = [
        i
        for i, a in enumerate(actions)
        if getattr(a, "op", None) is mt.OPS["subtract"] and a.inputs[0] in program.inputs
    ]
    assert len(starts) >= 5
    assert len(updates) == 6
    products = [i for i, a in enumerate(actions) if getattr(a, "op", None) is mt.OPS["matmul"]]
    assert sum(i < max(products) for i in starts) >= 4
    # Each call is there once, after what it reads.
    made = {*program.inputs, *program.constants}
    for a in actions:
        reads, makes = variables(a)
        assert made.issuperset(v for v in reads if isinstance(v, int))
        assert made.isdisjoint(makes)
        made.update(makes)


def test_what_an_optimizer_asks_for_one_by_one_travels_together():
    """Forty gradients of 4 kB, each added to its weight by itself: they are all there before the first is needed."""
    mesh = mt.Mesh({"data": 2})
    ws = [mt.distribute(np.ones((8, 64)), mesh) for _ in range(40)]
    x = mt.distribute(np.ones((8, 8)), mesh, data=mt.Shard(0))
    opt = mt.optim.sgd(0.1)

    def step(ws: Any, s: Any, x: Any) -> Any:
        return opt.update(ws, mt.grad(lambda ws: sum(mt.sum(mt.tanh(x @ w)) for w in ws))(ws), s)

    args = ws, opt.init(ws), x
    program = mesh.rank_program(mt.compile(step).program(*args), [a.sharding for a in mt.tree.flatten(args)[0]])

    def sent(steps: Any) -> int:
        rounds = [s.moves for s in steps if isinstance(s, Start | Moves)]
        return sum(any(program.plan(m).bytes_received(8) for m in moves) for moves in rounds)

    assert sent(program.steps) == 40
    assert sent(a.what for a in schedule(program, Buckets(1 << 22, 1 << 20))) <= 2


def test_what_is_needed_at_once_waits_for_nothing_that_has_time():
    """A long gradient that is needed at the end, and the sum of an activation that the next call reads."""
    aval, pending = ShapeDtype((1 << 18,), np.dtype("f4")), make_layout({}, {0: "sum"})
    calls = [LocalCall(mt.OPS["negative"], (v,), (v + 1,), {}, AS_IT_IS, None, "") for v in range(8)]
    # %1 is a gradient: whole as %20, which the last call reads. %4 is an activation: whole as %21, which the next call
    # reads.
    steps = (
        *calls[:4],
        Moves((Move(4, 21, None),)),
        calls[4]._replace(inputs=(21,)),
        *calls[5:],
        Moves((Move(1, 20, None),)),
        LocalCall(mt.OPS["negative"], (20,), (22,), {}, AS_IT_IS, None, ""),
    )
    layouts = {v: pending if v in (1, 4) else Layout() for v in range(30)}
    program = with_frees(RankProgram((2,), (0,), steps, (8, 22), dict.fromkeys(range(30), aval), layouts))
    actions = [a.what for a in schedule(program, Buckets(1 << 22, 1 << 10))]
    rounds = [(type(a), [m.source for m in a.moves]) for a in actions if isinstance(a, Start | Moves | Wait)]
    assert rounds == [(Start, [1]), (Moves, [4]), (Wait, [1])]


def test_explain_shows_what_runs_beside():
    program, _ = layers(4)
    with dask.config.set({"meshtape.bucket": 1, "meshtape.overlap": 1}):
        text = program_text(program, ("data",))
    starts = [line for line in text.splitlines() if line.startswith("» start %")]
    assert len(starts) >= 2
    assert text.count("started above") == len(starts)
    with dask.config.set({"meshtape.overlap": 0}):
        assert "»" not in program_text(program, ("data",))


@pytest.mark.parametrize("update", UPDATES)  # rounds that are waited for at the end, and before what reads them
@pytest.mark.parametrize(("overlap", "bucket"), [(0, 1), (1, 1), (1, 1 << 30), (1 << 30, 1 << 30)])
def test_overlap_changes_no_bit(planes, overlap, bucket, update):
    program, inputs = layers(5, update)
    want = in_processes(planes, program, (0, 0), inputs)
    with dask.config.set({"meshtape.bucket": bucket, "meshtape.overlap": overlap}):
        got = in_processes(planes, program, (0, 1), inputs)
    for g, w in zip(got, want, strict=True):
        for rank in w:
            np.testing.assert_array_equal(g[rank], w[rank])


@pytest.mark.timeout(300)
def test_what_runs_beside_is_as_the_client_is_configured(processes):
    """A worker that has other settings takes part in the same rounds."""

    def configure(found: dict[str, Any] | None, dask_worker: Any) -> None:
        if found is None:
            dask_worker.meshtape_test_config.__exit__(None, None, None)
        else:
            dask_worker.meshtape_test_config = dask.config.set(found)

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = mt.tanh(x @ w)
        return mt.mean(mt.square(x))

    rng = np.random.default_rng(0)
    values, data = [rng.normal(size=(16, 16)) for _ in range(4)], rng.normal(size=(8, 16))
    (first, *_) = sorted(known_workers(processes))
    never, always = ({"meshtape.overlap": least, "meshtape.bucket": 1} for least in (0, 1))
    for theirs, ours in ((never, always), (always, never)):
        processes.run(configure, theirs, workers=[first])
        try:
            with dask.config.set(ours), mt.Mesh({"data": 2}, client=processes) as mesh:
                ws = [mt.distribute(w, mesh) for w in values]
                x = mt.distribute(data, mesh, data=mt.Shard(0))
                found = [np.asarray(g) for g in mt.compile(mt.grad(loss))(ws, x)]
        finally:
            processes.run(configure, None, workers=[first])
        for g, e in zip(found, mt.grad(loss)(values, data), strict=True):
            np.testing.assert_allclose(g, np.asarray(e), 1e-12, 1e-12)


def test_a_failure_beside_and_one_in_front(planes, eventually):
    """Whichever fails, both processes end with an error, and no thread stays."""
    program, inputs = layers(4)

    def failing(prepared: Prepared, mine: Any, group: Any) -> Any:
        if 1 in prepared.hosted:
            starts = [i for i, (s, _) in enumerate(prepared._actions) if type(s) is tuple]
            at = next(i for i, (s, _) in enumerate(prepared._actions) if i > starts[0] and hasattr(s, "fn"))

            def fails(*args: Any, **kwargs: Any) -> Any:
                raise FloatingPointError("a broken unit")

            step, frees = prepared._actions[at]
            prepared._actions[at] = step._replace(fn=fails, room=None), frees
        return prepared.run(mine, group)

    with dask.config.set({"meshtape.bucket": 1, "meshtape.overlap": 1}), pytest.raises(RankLost):
        in_processes(planes, program, (0, 1), inputs, failing)
    eventually(lambda: not any(t.name.startswith("meshtape-collectives") for t in threading.enumerate()))


# ----- memory ---------------------------------------------------------------------------------------------------------


def test_memory_is_used_again_and_never_while_it_is_seen():
    pool = Pool(limit=1 << 24)
    a = pool.empty((512, 512), np.dtype("f4"))
    a[...] = 1
    view = a.T[3:]
    address = a.ctypes.data
    del a
    b = pool.empty((1024, 256), np.dtype("f4"))
    b[...] = 2
    assert b.ctypes.data != address
    np.testing.assert_array_equal(np.unique(pool.empty((3,), np.dtype("f4")).shape), [3])
    del view
    c = pool.empty((256, 1024), np.dtype("i4"))
    assert c.ctypes.data == address
    assert (pool.lent, pool.kept) == (2 << 20, 0)
    del b, c
    assert (pool.lent, pool.kept) == (0, 2 << 20)
    pool.clear()
    assert pool.kept == 0


def test_what_is_kept_is_bounded():
    pool = Pool(limit=3 << 20)
    held = [pool.empty((1 << 20,), np.dtype("u1")) for _ in range(8)]
    assert pool.lent == 8 << 20
    held.clear()
    assert pool.kept == 3 << 20
    off = Pool(limit=0)
    assert off.empty((1 << 20,), np.dtype("u1")).base is None


@pytest.mark.parametrize("dtype", ["?", "i2", "c16", "bfloat16", "float8_e4m3fn"])
def test_memory_of_any_dtype(dtype):
    a = POOL.empty((300, 1000), np.dtype(dtype))
    assert a.dtype == np.dtype(dtype)
    assert a.flags.c_contiguous
    assert a.flags.writeable


def test_results_take_the_memory_of_operands_that_nobody_sees():
    mesh = mt.Mesh({"a": 1})
    x = mt.compute(mt.distribute(np.ones((512, 256)), mesh) * 1)
    host = x._buf.handle.blocks[0]
    seen = host.copy()
    chain = mt.compile(lambda x: mt.exp(x) * 2.0 + 1.0)
    y = mt.compute(chain(x))
    np.testing.assert_array_equal(y, np.exp(seen) * 2.0 + 1.0)
    np.testing.assert_array_equal(host, seen)  # an argument is never written to
    del y
    held = POOL.lent
    for _ in range(3):
        mt.compute(chain(x))
    assert POOL.lent <= held + (2 << 20)

    def aliases(x: Any) -> Any:
        y = mt.exp(x)
        t = y.mT  # sees y's memory
        return mt.sin(y), t + 0.0

    s, t = mt.compile(aliases)(x)
    np.testing.assert_array_equal(s, np.sin(np.exp(seen)))
    np.testing.assert_array_equal(t, np.exp(seen).T)
