"""Programs as graphs and the calls between them. What captures and replays is stood in for by ``HostGraphs``, which
keeps the rules that matter: a capture computes nothing, a replay writes to the memory of the capture and reads from the
memory it was given then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.core.program import Program
from meshtape.autodiff.compiler.cuda_graphs import CaptureRefused, GraphedProgram, graphed
from meshtape.autodiff.compiler.fusion import FusedRun, executable, fuse

RNG = np.random.default_rng(3)


class HostGraphs:
    """Graphs that are replayed by NumPy."""

    xp = np

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.capturing = False
        self.replays = 0
        self.inside = 0

    def capture(self, work: Callable[[], list[Any]]) -> tuple[list[Any], Callable[[], None]]:
        assert self.inside, "captured without a pool of its own"
        self.capturing = True
        try:
            results = work()
        except NotImplementedError as e:
            raise CaptureRefused(str(e)) from e
        finally:
            self.capturing = False
        for r in results:
            if r.base is None and r.flags.writeable:
                r[...] = -77  # a capture computes nothing

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

    @contextmanager
    def run(self) -> Iterator[None]:
        yield

    def copy(self, targets: Any, sources: Any) -> None:
        for to, source in zip(targets, sources, strict=True):
            to[...] = source


def made(program: Program, graphs: HostGraphs) -> GraphedProgram:
    def bind(part: Any) -> Callable[..., list[Any]]:
        name = "" if isinstance(part, FusedRun) else part.op.name
        fn = executable(part, program) if isinstance(part, FusedRun) else part.op.numpy

        def call(*arguments: Any) -> list[Any]:
            if graphs.capturing and name in graphs.refused:
                raise NotImplementedError(f"{name} cannot be captured")
            if isinstance(part, FusedRun):
                return fn(*arguments)
            out = fn(*arguments, **part.params)
            return [np.asarray(out)] if part.op.nout == 1 else [np.asarray(o) for o in out]

        return call

    return GraphedProgram(program, fuse(program), bind, graphs)


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
