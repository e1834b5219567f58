"""CUDA graphs of compiled programs: one call launches many kernels.

The work of a stream is recorded once (captured) and can then be replayed, at the same addresses. So inputs are copied
to where the graph expects them, and results are copied out, since the next run overwrites them.

CuPy refuses to capture some calls (cuBLAS, cuFFT, cuSOLVER, and calls that wait for the device). They stay calls, and
the stretches between them become graphs. The first run of a program finds these calls by trial.

A graph has its internal memory alone: it comes from a pool from which nothing else is taken afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

from ...arrays.backends.float8 import FLOAT8
from ...arrays.core.errors import DeviceError, DTypeError
from ...arrays.core.program import Const, Entry, Program
from ...arrays.kernels.chains import copy_all
from . import cuda_fusion
from .fusion import FusedRun

Part = Entry | FusedRun
Values = dict[int, Any]


class CaptureRefused(Exception):
    """Some call cannot be captured."""


class Graphs(Protocol):
    """Capture and replay of graphs. ``CudaGraphs`` is the one for CuPy."""

    xp: Any

    def capture(self, work: Callable[[], list[Any]]) -> tuple[list[Any], Callable[[], None]]:
        """The result of ``work``, whose values exist only after a replay, and the replay.

        Raises :class:`CaptureRefused`."""

    def apart(self) -> AbstractContextManager[None]:
        """A block that takes new memory from the pool of the graphs, and calls on the captured stream."""

    def run(self) -> AbstractContextManager[None]:
        """The block of one run, which begins when the one before has ended on the device."""

    def copy(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        """``target[...] = source`` for each pair, together."""


class CudaGraphs:
    """CUDA graphs through CuPy, on one device."""

    def __init__(self, index: int) -> None:
        import cupy

        self.xp = cupy
        self._device = cupy.cuda.Device(index)
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._pool = cupy.cuda.MemoryPool()
            self._ended = cupy.cuda.Event(disable_timing=True)

    def capture(self, work: Callable[[], list[Any]]) -> tuple[list[Any], Callable[[], None]]:
        refused: Exception | None = None
        result: list[Any] = []
        self._stream.begin_capture()
        try:
            result = work()
        except Exception as e:
            refused = e
        finally:
            # The capture ends in any case: a stream left in it would take nothing else.
            try:
                graph = self._stream.end_capture()
            except Exception as e:
                refused = refused or e
        if refused is not None:
            raise CaptureRefused(str(refused)) from refused
        return result, graph.launch

    @contextmanager
    def apart(self) -> Any:
        before = self.xp.cuda.get_current_stream()
        here = self.xp.cuda.Event(disable_timing=True)
        here.record(before)
        self._stream.wait_event(here)
        with self._device, self._stream, self.xp.cuda.using_allocator(self._pool.malloc):
            yield
        self._stream.synchronize()

    @contextmanager
    def run(self) -> Any:
        with self._device:
            stream = self.xp.cuda.get_current_stream()
            stream.wait_event(self._ended)
            yield
            self._ended.record(stream)

    copy = staticmethod(copy_all)


class _GraphStep(NamedTuple):
    """A step of a run: replay a graph, or make one call and put its results where later graphs read them."""

    replay: Callable[[], None] | None
    part: Part | None
    fixed: tuple[tuple[int, Any], ...]  # variable and memory


class GraphedProgram:
    """A program as a function of buffers, made of graphs and of the calls between them.

    ``bind(part)`` gives the function that computes a part and returns its results in a list.
    """

    def __init__(
        self,
        program: Program,
        parts: Sequence[Part],
        bind: Callable[[Part], Callable[..., list[Any]]],
        graphs: Graphs,
    ) -> None:
        self._program, self._parts, self._graphs = program, list(parts), graphs
        self._calls = {id(p): bind(p) for p in parts}
        self._steps: list[_GraphStep] | None = None
        self._inputs: list[Any] = []
        self._known: Values = {}  # values in memory that stays: constants, inputs, results of graphs
        self._lock = threading.Lock()

    @property
    def stretches(self) -> int:
        """How many graphs there are; 0 before the first run."""
        return sum(s.replay is not None for s in self._steps or ())

    def __call__(self, buffers: Sequence[Any]) -> list[Any]:
        with self._lock, self._graphs.run():
            if self._steps is None:
                self._build(buffers)
            self._graphs.copy(self._inputs, buffers)
            values = dict(self._known)
            for step in self._steps or ():
                if step.replay is not None:
                    step.replay()
                else:
                    assert step.part is not None
                    values.update(self._call(step.part, values))
                    for v, memory in step.fixed:
                        memory[...] = values[v]
            found = [values[v] for v in self._program.outputs]
            own = [k for k, v in enumerate(self._program.outputs) if v in self._known]
            copies = [self._graphs.xp.empty(found[k].shape, found[k].dtype) for k in own]
            self._graphs.copy(copies, [found[k] for k in own])
            for k, c in zip(own, copies, strict=True):
                found[k] = c
            return found

    # ----- the first run ----------------------------------------------------------------------------------------------

    def _call(self, part: Part, values: Mapping[int, Any]) -> Values:
        arguments = [v.value if isinstance(v, Const) else values[v] for v in part.inputs]
        return dict(zip(part.outputs, self._calls[id(part)](*arguments), strict=True))

    def _build(self, buffers: Sequence[Any]) -> None:
        xp = self._graphs.xp
        self._inputs = [xp.array(b) for b in buffers]
        known: Values = {v: xp.asarray(c) for v, c in self._program.constants.items()}
        known.update(zip(self._program.inputs, self._inputs, strict=True))
        with self._graphs.apart():
            captured = self._which_can_be_captured(known)
            steps: list[_GraphStep] = []
            values = dict(known)
            i = 0
            while i < len(self._parts):
                n = i
                while n < len(self._parts) and captured[n]:
                    n += 1
                if n > i:
                    replay, results = self._stretch(self._parts[i:n], self._parts[n:], values)
                    known.update(results)
                    steps.append(_GraphStep(replay, None, ()))
                    replay()  # what follows, now and at each run, reads true values
                    values.update(results)
                    i = n
                else:
                    part = self._parts[i]
                    values.update(self._call(part, values))
                    later = {v for p in self._parts[i + 1 :] for v in p.inputs if isinstance(v, int)}
                    # A graph reads what a call made at one address, whatever address the call got this time.
                    fixed = tuple((v, xp.array(values[v])) for v in part.outputs if v in later)
                    values.update(fixed)
                    steps.append(_GraphStep(None, part, fixed))
                    i += 1
        self._known, self._steps = known, steps

    def _which_can_be_captured(self, known: Values) -> list[bool]:
        """Each part is run (which also compiles its kernels), and captured by itself for trial."""
        values = dict(known)
        out = []
        for part in self._parts:
            results = self._call(part, values)
            try:
                self._graphs.capture(lambda part=part: list(self._call(part, values).values()))  # type: ignore[misc]
            except CaptureRefused:
                out.append(False)
            else:
                out.append(True)
            values.update(results)
        return out

    def _stretch(
        self, parts: Sequence[Part], rest: Sequence[Part], values: Values
    ) -> tuple[Callable[[], None], Values]:
        """The graph of some parts, and those of its results that are read later."""
        made = [v for p in parts for v in p.outputs]
        read = {v for p in rest for v in p.inputs if isinstance(v, int)} | set(self._program.outputs)
        kept = [v for v in made if v in read]
        fixed = dict(values)

        def work() -> list[Any]:
            own: Values = dict(fixed)
            for p in parts:
                own.update(self._call(p, own))
            return [own[v] for v in kept]

        del values  # the run before the capture and the capture take the same memory, one after the other
        work()
        results, replay = self._graphs.capture(work)
        return replay, dict(zip(kept, results, strict=True))


def graphed(program: Program, device: Any) -> GraphedProgram:
    """The program as CUDA graphs for buffers on ``device``. Raises :class:`DeviceError` unless that is a CUDA
    device."""
    if getattr(device, "kind", None) != "cuda":
        raise DeviceError(f"[compile] cuda_graph=True needs arrays on one CUDA device, these are on {device}")
    if any(a.dtype in FLOAT8 for a in program.avals.values()):
        raise DTypeError(
            "[compile] cuda_graph=True: float8 has no fixed memory in a graph: cast it outside of the function, or "
            "leave cuda_graph out"
        )
    graphs = CudaGraphs(device.index)
    xp = graphs.xp

    def bind(part: Part) -> Callable[..., list[Any]]:
        if isinstance(part, FusedRun):
            return cuda_fusion.executable(part, program)
        fn, params, single = part.op.bind(xp), dict(part.params), part.op.nout == 1
        if single:
            return lambda *a: [xp.asarray(fn(*a, **params))]
        return lambda *a: [xp.asarray(r) for r in fn(*a, **params)]

    return GraphedProgram(program, cuda_fusion.launches(program), bind, graphs)


__all__ = ["CaptureRefused", "CudaGraphs", "GraphedProgram", "Graphs", "graphed"]
