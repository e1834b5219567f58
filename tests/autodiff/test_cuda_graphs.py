"""Programs as graphs and the calls between them. What captures and replays is stood in for by ``HostGraphs``, which
keeps the rules that matter: a capture computes nothing, a replay writes to the memory of the capture and reads from the
memory it was given then."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays import native
from meshtape.arrays.core.program import Program
from meshtape.autodiff.compiler.cuda_graphs import CaptureRefused, GraphedProgram, Token, graphed
from meshtape.autodiff.compiler.fusion import FusedRun, chains, executable

RNG = np.random.default_rng(3)


class HostGraphs:
    """Graphs that are replayed by NumPy."""

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.capturing = False
        self.replays = 0
        self.inside = 0
        self.copied = 0
        self.fixed: list[Any] = []  # memory that graphs read, and may write to
        names = ("asarray", "empty", "ndarray")
        self.xp = SimpleNamespace(array=self.array, **{n: getattr(np, n) for n in names})

    def array(self, *args: Any, **options: Any) -> Any:
        self.fixed.append(np.array(*args, **options))
        return self.fixed[-1]

    def capture(self, work: Callable[[], list[Any]]) -> tuple[list[Any], Callable[[], None]]:
        assert self.inside, "captured without a pool of its own"
        self.capturing = True
        before = [f.copy() for f in self.fixed]
        try:
            results = work()
        except NotImplementedError as e:
            raise CaptureRefused(str(e)) from e
        finally:
            self.capturing = False
            for f, b in zip(self.fixed, before, strict=True):
                f[...] = b  # a capture computes nothing
        for r in results:
            if r.base is None and r.flags.writeable and not any(r is f for f in self.fixed):
                r[...] = -77

        def replay() -> None:
            self.replays += 1
            for memory, value in zip(results, work(), strict=True):
                if memory.flags.writeable:
                    memory[...] = value

        return results, replay

    @contextmanager
    def apart(self) -> Iterator[None]:
        self.inside += 1
        yield
        self.inside -= 1

    def run(self, work: Callable[[], list[Any]]) -> list[Any]:
        return work()

    def copy(self, targets: Any, sources: Any) -> None:
        for to, source in zip(targets, sources, strict=True):
            to[...] = source
            self.copied += np.size(source) > 1
            assert not any(np.may_share_memory(t, source) for t in targets), "a source is a target"

    def address(self, array: Any) -> int:
        return array.ctypes.data

    def lend(self, memory: Any) -> tuple[Any, weakref.ref[Token]]:
        lent = (ctypes.c_char * memory.nbytes).from_address(memory.ctypes.data)
        lent.token = Token(memory)
        return np.ndarray(memory.shape, memory.dtype, lent), weakref.ref(lent.token)


def made(program: Program, graphs: HostGraphs, donated: Sequence[int] = ()) -> GraphedProgram:
    def bind(part: Any) -> Callable[..., list[Any]]:
        name = "" if isinstance(part, FusedRun) else part.op.name
        fn = executable(part, program) if isinstance(part, FusedRun) else part.op.numpy

        def call(*arguments: Any, **into: Any) -> list[Any]:
            if graphs.capturing and name in graphs.refused:
                raise NotImplementedError(f"{name} cannot be captured")
            if isinstance(part, FusedRun):
                return fn(*arguments, **into)
            out = fn(*arguments, **part.params)
            return [np.asarray(out)] if part.op.nout == 1 else [np.asarray(o) for o in out]

        return call

    return GraphedProgram(program, chains(program), bind, graphs, donated)


def step(w: Any, x: Any, t: Any) -> Any:
    """A training step: products between elementwise stretches, in both directions."""

    def loss(w: Any) -> Any:
        h = mt.tanh(x @ w[0] + 1.0)
        return mt.mean((mt.nn.gelu(h @ w[1]) - t) ** 2)

    value, grads = mt.value_and_grad(loss)(w)
    return value, [a - 0.1 * g for a, g in zip(w, grads, strict=True)]


def arguments() -> tuple[Any, Any, Any]:
    w = [mt.asarray(RNG.standard_normal((4, 5))), mt.asarray(RNG.standard_normal((5, 2)))]
    return w, mt.asarray(RNG.standard_normal((3, 4))), mt.asarray(RNG.standard_normal((3, 2)))


def leaves(w: Any, x: Any, t: Any) -> list[Any]:
    return [a.numpy() for a in (*w, x, t)]


@pytest.mark.parametrize("refused", [(), ("matmul",), ("matmul", "tanh", "sum"), ("permute_dims",)])
def test_a_step_gives_the_numbers_of_its_code(refused: tuple[str, ...]) -> None:
    first = arguments()
    program = mt.compile(step).program(*first)
    graphs = HostGraphs(*refused)
    run = made(program, graphs)
    for args in (first, arguments(), arguments(), first):
        value, new = step(*args)
        got = run(leaves(*args))
        for g, w in zip(got, (value, *new), strict=True):
            np.testing.assert_allclose(g, w.numpy(), rtol=1e-12)
    if not refused:
        assert run.stretches == 1
    if refused == ("matmul",):
        assert run.stretches > 2
    # The first run replays each graph once more, to know what follows it.
    assert graphs.replays == 5 * run.stretches


def test_all_calls_refused_is_a_run_without_graphs() -> None:
    x = RNG.standard_normal((3, 3))
    program = mt.compile(lambda a: (a @ a) @ a).program(mt.asarray(x))
    run = made(program, HostGraphs("matmul"))
    for _ in range(2):
        np.testing.assert_allclose(run([x])[0], x @ x @ x)
    assert run.stretches == 0


def test_results_are_the_callers() -> None:
    program = mt.compile(lambda a, b: (a + b, a, mt.reshape(a, (-1,)), b @ b)).program(mt.ones((2, 2)), mt.ones((2, 2)))
    run = made(program, HostGraphs("matmul"))
    one, two = np.full((2, 2), 1.0), np.full((2, 2), 2.0)
    first = run([one, two])
    kept = [f.copy() for f in first]
    second = run([two, two])
    for f, k in zip(first, kept, strict=True):
        np.testing.assert_array_equal(f, k)
    for a in (*first, *second):
        a[...] = 99.0  # and nobody else's
    np.testing.assert_array_equal(run([one, two])[0], one + two)
    np.testing.assert_array_equal(one, np.full((2, 2), 1.0))


def test_constants_and_repeated_results() -> None:
    c = mt.asarray([1.0, 2.0])

    def f(a: Any) -> Any:
        b = a * c
        return b, b, c + 1.0

    program = mt.compile(f).program(mt.ones(2))
    run = made(program, HostGraphs())
    for x in (np.array([3.0, 4.0]), np.array([5.0, 6.0])):
        got = run([x])
        np.testing.assert_array_equal(got[0], x * [1, 2])
        np.testing.assert_array_equal(got[1], x * [1, 2])
        np.testing.assert_array_equal(got[2], [2, 3])


def test_ops_with_several_results() -> None:
    x = RNG.standard_normal((3, 3))
    x = x + x.T
    program = mt.compile(lambda a: mt.sum(mt.linalg.eigh(a).eigenvalues * 2.0)).program(mt.asarray(x))
    run = made(program, HostGraphs("eigh"))
    for _ in range(2):
        np.testing.assert_allclose(run([x])[0], 2 * np.trace(x))


def test_calls_from_several_threads_come_one_after_the_other() -> None:
    program = mt.compile(lambda a: mt.sum((a * 2.0) @ a)).program(mt.ones((20, 20)))
    run = made(program, HostGraphs("matmul"))
    hosts = [RNG.standard_normal((20, 20)) for _ in range(8)]
    got: dict[int, Any] = {}

    def work(i: int) -> None:
        for _ in range(20):
            got[i] = run([hosts[i]])[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    for i, h in enumerate(hosts):
        np.testing.assert_allclose(got[i], np.sum(2 * h @ h))


def test_an_error_in_the_first_run_leaves_it_usable() -> None:
    program = mt.compile(lambda a: a * 2.0 + 1.0).program(mt.ones(3))
    graphs = HostGraphs()
    run = made(program, graphs)
    with pytest.raises(ValueError, match="shorter"):
        run([])
    np.testing.assert_array_equal(run([np.ones(3)])[0], np.full(3, 3.0))


# ----- donated inputs -------------------------------------------------------------------------------------------------

N = 20_000
"""Numbers of an array that is large enough for a run of the CPU's."""


def momentum(w: Any, m: Any, x: Any) -> Any:
    m = 0.9 * m + w * mt.mean(x)
    return mt.sum(w), w - 0.1 * m, m


def products(w: Any, m: Any, x: Any) -> Any:  # results that no elementwise run makes
    return mt.concat([w[:1], w[:-1]]) * 1.0, mt.cumulative_sum(m) * 1e-3 + x[0], x[:3]


def read_later(w: Any, m: Any, x: Any) -> Any:  # by a call, and by another run
    new = w * 2.0 - m
    return new, mt.flip(w) + 1.0 + mt.sum(new), mt.sum(w * w)


def viewed(w: Any, m: Any, x: Any) -> Any:  # a result that is a view, and a run that reads another view
    return mt.reshape(w, (2, -1)), m * 2.0 + mt.flip(m), x + 1.0


def unchanged(w: Any, m: Any, x: Any) -> Any:
    return w, m + mt.sum(x), w


def exchanged(w: Any, m: Any, x: Any) -> Any:
    return m, w, x * 2.0


def gradients_first(w: Any, m: Any, x: Any) -> Any:
    g = mt.tanh(m) * mt.mean(x)
    return g, w - 0.1 * g + 1.0, m * 0.5 + 1.0


def overwritten(w: Any, m: Any, x: Any) -> Any:  # results that read nothing of the inputs that they replace
    return mt.full((N,), 2.0) * x[0] + 1.0, mt.full((N,), 3.0) * x[1] - 1.0


STEPS: dict[Any, tuple[int, int]] = {
    # Copies of arrays in a call whose arguments are the results before, and results that a run writes in place.
    momentum: (1, 2),  # the batch
    products: (3, 1),  # and the result of a single call, and the part of the batch
    read_later: (2, 1),  # and the result that must wait
    viewed: (5, 0),  # and three results; one of them not in the place of an input, which is copied again
    unchanged: (3, 0),  # and the result of a single call, and the second of the same
    exchanged: (4, 0),  # and two arguments, or by the second recording two results beside
    gradients_first: (4, 1),  # and two results, one of them no state, and so an argument
    overwritten: (1, 2),
}


def feed(step: Any, results: list[Any]) -> list[Any]:
    """The results that are the next state."""
    places = {momentum: (1, 2), gradients_first: (1, 2)}.get(step, (0, 1))
    return [results[k].reshape(-1) for k in places]


def check(got: Sequence[Any], want: Sequence[Any]) -> None:
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-12)


def call(run: GraphedProgram, state: list[Any], x: Any) -> list[Any]:
    """A call that is given the state up: the list is empty afterwards."""
    buffers = [*state, x]
    state.clear()
    return run(buffers)


@pytest.mark.parametrize("held", ["nothing", "the last", "a view", "every second"])
@pytest.mark.parametrize("step", STEPS, ids=lambda s: s.__name__)
@pytest.mark.parametrize("refused", [(), ("sum", "flip", "reshape")], ids=["one graph", "calls between"])
def test_a_state_that_is_given_up_has_the_values_of_the_code(step: Any, refused: Any, held: str) -> None:
    """Whoever holds results of earlier calls, sees their values for ever."""
    state = [RNG.standard_normal(N), RNG.standard_normal(N)]
    want = [a.copy() for a in state]
    program = mt.compile(step).program(*map(mt.asarray, state), mt.ones(5))
    graphs = HostGraphs(*refused)
    run = made(program, graphs, program.inputs[:2])
    kept: list[tuple[Any, Any]] = []
    for n in range(5):
        x = RNG.standard_normal(5)
        wanted = [a.numpy().copy() for a in mt.tree.flatten(step(*map(mt.asarray, want), mt.asarray(x)))[0]]
        graphs.copied = 0
        got = call(run, state, x)
        check(got, wanted)
        state, want = feed(step, got), [w.copy() for w in feed(step, wanted)]
        if held == "the last":
            kept[:] = [(got, wanted)]
        elif held == "a view":
            kept.append(([g[1:] for g in got if g.ndim], [w[1:] for w in wanted if w.ndim]))
        elif held == "every second" and n % 2:
            kept.append((got, wanted))
        del got
        for old, values in kept:
            check(old, values)
    if held == "nothing" and not refused and native.AVAILABLE:  # the stand-in for kernels of chains is in C
        assert (graphs.copied, len(run._recordings[0]._in_place)) == STEPS[step]
    assert len(run._recordings) <= 2


def one_step() -> tuple[GraphedProgram, HostGraphs, list[Any]]:
    program = mt.compile(momentum).program(mt.ones(N), mt.ones(N), mt.ones(5))
    graphs = HostGraphs()
    run = made(program, graphs, program.inputs[:2])
    _, w, m = run([np.ones(N), np.ones(N), np.ones(5)])
    return run, graphs, [w, m]


def of_momentum(w: Any, m: Any, x: Any) -> list[Any]:
    return [np.asarray(a) for a in momentum(*map(mt.asarray, (w, m, x)))]


@pytest.mark.parametrize("places", [(1, 0), (0, 0), (1, 1)], ids=["exchanged", "one twice", "the other twice"])
def test_arguments_in_each_others_places_are_copied(places: tuple[int, int]) -> None:
    run, _, state = one_step()
    for _ in range(3):
        want = of_momentum(*(state[k].copy() for k in places), np.ones(5))
        got = call(run, [state[k] for k in places], np.ones(5))
        check(got, want)
        state = got[1:]


def test_results_outlive_the_function() -> None:
    run, graphs, (w, m) = one_step()
    want, gone = w.copy(), weakref.ref(run)
    del run, graphs, m
    gc.collect()
    assert gone() is None
    noise = [np.full(N, 7.0) for _ in range(20)]
    np.testing.assert_array_equal(w, want)
    del noise


def test_an_error_in_a_replay_leaves_the_function_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    run, graphs, state = one_step()
    x = np.ones(5)
    kept = [s.copy() for s in state]

    def broken(targets: Any, sources: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as m:
        m.setattr(graphs, "copy", broken)
        with pytest.raises(RuntimeError, match="no memory"):
            call(run, state, x)
    check(run([*kept, x]), of_momentum(*kept, x))
    assert len(run._recordings) == 1


def test_threads_that_pass_on_one_state() -> None:
    """Each has the values of its own call, whichever was first: nobody's array is written to."""
    run, _, state = one_step()
    want = of_momentum(*(s.copy() for s in state), np.ones(5))
    got: list[Any] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait(60)
        got.append(run([*state, np.ones(5)]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(got) == 4
    for results in got:
        check(results, want)


def test_without_a_gpu_it_is_an_error_that_says_so() -> None:
    program = mt.compile(lambda a: a * 2.0).program(mt.ones(3))
    with pytest.raises(
        mt.errors.DeviceError, match=r"cuda_graph=True needs arrays on one CUDA device, these are on cpu"
    ):
        graphed(program, mt.device("cpu"))
    with pytest.raises(mt.errors.DeviceError, match=r"cuda_graph=True"):
        mt.compile(lambda a: a * 2.0, cuda_graph=True)(mt.ones(3))
    mesh = mt.Mesh({"rows": 2})
    with pytest.raises(mt.errors.DeviceError, match=r"cuda_graph=True"):
        mt.compile(lambda a: a * 2.0, cuda_graph=True)(mt.distribute(mt.ones(4), mesh, rows=mt.Shard(0)))
