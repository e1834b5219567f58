"""CUDA graphs of compiled programs: one call launches many kernels.

The work of a stream is recorded once (captured) and can then be replayed, at the same addresses. So inputs are copied
to where the graph expects them, and results are copied out, since the next run overwrites them.

A result that can take the place of a donated input is not copied: it is written to where the graph reads this input,
and that memory is lent to the caller. In ``state = step(state, batch)`` it comes back as the next argument, and stays
where it is. Every array on lent memory holds its token. Where a token lives on, the graph is not replayed: a second
recording, which lends nothing, takes the call.

CuPy refuses to capture some calls (cuBLAS, cuFFT, cuSOLVER, and calls that wait for the device). They stay calls, and
the stretches between them become graphs. The first run of a program finds these calls by trial.

A graph has its internal memory alone: it comes from a pool from which nothing else is taken afterwards.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from ...arrays.backends import host_sync
from ...arrays.backends.backend import cupy_backend
from ...arrays.backends.float8 import FLOAT8
from ...arrays.chains.chains import copy_all
from ...arrays.core.errors import DeviceError, DTypeError
from ...arrays.core.program import Const, Entry, Program
from . import cuda_donation, cuda_fusion
from .fusion import FusedRun

Part = Entry | FusedRun
Values = dict[int, Any]


class CaptureRefused(Exception):
    """Some call cannot be captured."""


class Token:
    """Held by each array on lent memory, and by nothing else; it holds the memory."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory


class Graphs(Protocol):
    """Capture and replay of graphs. ``CudaGraphs`` is the one for CuPy."""

    xp: Any

    def capture(self, work: Callable[[], list[Any]]) -> tuple[list[Any], Callable[[], None]]:
        """The result of ``work``, whose values exist only after a replay, and the replay.

        Raises :class:`CaptureRefused`."""

    def apart(self) -> AbstractContextManager[None]:
        """A block that takes new memory from the pool of the graphs, and calls on the captured stream."""

    def run(self, work: Callable[[], list[Any]]) -> list[Any]:
        """The results of ``work``, one run, which begins when the one before has ended on the device."""

    def copy(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        """``target[...] = source`` for each pair, together."""

    def address(self, array: Any) -> int:
        """Of the first element."""

    def lend(self, memory: Any) -> tuple[Any, weakref.ref[Token]]:
        """A new array on the memory of another one, and its token."""


_OF_THE_THREAD = 2
"""The handle of the stream that CUDA keeps for each thread."""


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
        self._last: Any = None  # the stream of the last run

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

    def run(self, work: Callable[[], list[Any]]) -> list[Any]:
        with self._device, cupy_backend().memory():
            stream = self.xp.cuda.get_current_stream()
            stream.wait_event(self._ended)
            where = stream, stream.ptr == _OF_THE_THREAD and threading.get_ident()
            if self._last not in (None, where):  # there lent results may have been read since
                self._follow(*self._last)
            self._last = where
            results = work()
            self._ended.record(stream)
            return results

    def _follow(self, stream: Any, thread: Any) -> None:
        """Let the current stream wait for all that was queued on another one."""
        cuda = self.xp.cuda
        if thread or not isinstance(stream, cuda.Stream):  # whose owner may have destroyed it
            host_sync.note("a CUDA graph moves to another stream")
            self._device.synchronize()
        else:
            cuda.get_current_stream().wait_event(stream.record())

    copy = staticmethod(copy_all)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def lend(self, memory: Any) -> tuple[Any, weakref.ref[Token]]:
        cuda, token = self.xp.cuda, Token(memory)
        lent = cuda.UnownedMemory(memory.data.ptr, memory.nbytes, token, self._device.id)
        return self.xp.ndarray(memory.shape, memory.dtype, cuda.MemoryPointer(lent, 0)), weakref.ref(token)


class _GraphStep(NamedTuple):
    """A step of a run: replay a graph, or make one call and put its results where later graphs read them."""

    replay: Callable[[], None] | None
    part: Part | None
    fixed: tuple[tuple[int, Any], ...]  # variable and memory


class _Recording:
    """A program recorded on memory of its own."""

    def __init__(
        self,
        program: Program,
        parts: Sequence[Part],
        calls: Mapping[int, Callable[..., list[Any]]],
        graphs: Graphs,
        buffers: Sequence[Any],
        donated: Sequence[int],
    ) -> None:
        self._program, self._parts, self._calls, self._graphs = program, parts, calls, graphs
        self._inputs = [graphs.xp.array(b, order="C") for b in buffers]
        self._known: Values = {v: graphs.xp.asarray(c) for v, c in program.constants.items()}
        """Values in memory that stays: constants, inputs, results of graphs."""
        self._known.update(zip(program.inputs, self._inputs, strict=True))
        self._lent: Values = {}  # memory of donated inputs, by the places of the outputs that take it
        self._in_place: Values = {}  # the same by the outputs that a fused run writes there itself
        self._tokens: list[weakref.ref[Token]] = []
        self.steps: list[_GraphStep] = []
        self._build(donated)

    def is_free(self, buffers: list[Any]) -> bool:
        """Whether nobody holds lent memory but ``buffers`` that lie where they are read, which the recording's own
        arrays replace."""
        for i, mine in enumerate(self._inputs if self._tokens else ()):
            if self._lies_at(mine, buffers[i]):
                buffers[i] = mine
        return all(token() is None for token in self._tokens)

    def _lies_at(self, mine: Any, given: Any) -> bool:
        address = self._graphs.address
        return isinstance(given, type(mine)) and given.flags.c_contiguous and address(given) == address(mine)

    def __call__(self, buffers: Sequence[Any]) -> list[Any]:
        graphs, outputs, values = self._graphs, self._program.outputs, dict(self._known)
        moved = [i for i, mine in enumerate(self._inputs) if buffers[i] is not mine]
        graphs.copy([self._inputs[i] for i in moved], [buffers[i] for i in moved])
        for step in self.steps:
            if step.replay is not None:
                step.replay()
            else:
                assert step.part is not None
                values.update(self._call(step.part, values))
                for v, memory in step.fixed:
                    memory[...] = values[v]
        found, lent = [values[v] for v in outputs], self._lent
        results = [
            lent[k] if k in lent else graphs.xp.empty(x.shape, x.dtype) if v in self._known or x.base is not None else x
            for k, (v, x) in enumerate(zip(outputs, found, strict=True))
        ]
        moved = [k for k, x in enumerate(found) if results[k] is not x]
        graphs.copy([results[k] for k in moved], [found[k] for k in moved])
        pairs = {k: graphs.lend(memory) for k, memory in lent.items()}
        self._tokens = [token for _, token in pairs.values()]
        return [pairs[k][0] if k in pairs else x for k, x in enumerate(results)]

    # ----- the first run ----------------------------------------------------------------------------------------------

    def _call(self, part: Part, values: Mapping[int, Any], into: Mapping[int, Any] = MappingProxyType({})) -> Values:
        arguments = [v.value if isinstance(v, Const) else values[v] for v in part.inputs]
        options = {} if into.keys().isdisjoint(part.outputs) else {"into": [into.get(v) for v in part.outputs]}
        return dict(zip(part.outputs, self._calls[id(part)](*arguments, **options), strict=True))

    def _build(self, donated: Sequence[int]) -> None:
        with self._graphs.apart():
            captured = self._which_can_be_captured(donated)
            values = dict(self._known)
            i = 0
            while i < len(self._parts):
                n = i
                while n < len(self._parts) and captured[n]:
                    n += 1
                if n > i:
                    replay, results = self._stretch(self._parts[i:n], self._parts[n:], values)
                    self._known.update(results)
                    self.steps.append(_GraphStep(replay, None, ()))
                    replay()  # what follows, now and at each run, reads true values
                    values.update(results)
                    i = n
                else:
                    part = self._parts[i]
                    values.update(self._call(part, values))
                    later = {v for p in self._parts[i + 1 :] for v in p.inputs if isinstance(v, int)}
                    # A graph reads what a call made at one address, whatever address the call got this time.
                    fixed = tuple((v, self._graphs.xp.array(values[v])) for v in part.outputs if v in later)
                    values.update(fixed)
                    self.steps.append(_GraphStep(None, part, fixed))
                    i += 1

    def _which_can_be_captured(self, donated: Sequence[int]) -> list[bool]:
        """Each part is run (which also compiles its kernels), and captured by itself for trial."""
        values = dict(self._known)
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
        views = cuda_donation.views_of(donated, values, self._graphs.address)
        taken, in_place = cuda_donation.taken_inputs(self._program, self._parts, views)
        self._lent = {self._program.outputs.index(v): self._known[i] for v, i in taken.items()}
        self._in_place = {v: self._known[i] for v, i in in_place.items()}
        return out

    def _stretch(
        self, parts: Sequence[Part], rest: Sequence[Part], values: Values
    ) -> tuple[Callable[[], None], Values]:
        """The graph of some parts, and those of its results that are read later."""
        made = [v for p in parts for v in p.outputs]
        read = {v for p in rest for v in p.inputs if isinstance(v, int)} | set(self._program.outputs)
        kept = [v for v in made if v in read]
        fixed = dict(values)

        def work(into: Mapping[int, Any]) -> list[Any]:
            own: Values = dict(fixed)
            for p in parts:
                own.update(self._call(p, own, into))
            return [own[v] for v in kept]

        del values  # the run before the capture and the capture take the same memory, one after the other
        work({})
        results, replay = self._graphs.capture(functools.partial(work, self._in_place))
        return replay, dict(zip(kept, results, strict=True))


class GraphedProgram:
    """A program as a function of buffers, made of graphs and of the calls between them.

    ``bind(part)`` gives the function that computes a part and returns its results in a list; that of a fused run takes
    ``into``, memory for them. Results may take the memory of ``donated`` inputs.
    """

    def __init__(
        self,
        program: Program,
        parts: Sequence[Part],
        bind: Callable[[Part], Callable[..., list[Any]]],
        graphs: Graphs,
        donated: Sequence[int] = (),
    ) -> None:
        self.buffer = graphs.xp.ndarray
        """The type of the buffers that can be given up."""
        self._graphs, self._donated = graphs, donated
        self._record = functools.partial(_Recording, program, list(parts), {id(p): bind(p) for p in parts}, graphs)
        self._recordings: list[_Recording] = []
        self._lock = threading.Lock()

    @property
    def stretches(self) -> int:
        """How many graphs a recording has; 0 before the first run."""
        return sum(s.replay is not None for r in self._recordings[:1] for s in r.steps)

    def __call__(self, buffers: list[Any]) -> list[Any]:
        """The results. Lent arrays are taken out of ``buffers``: where nobody else holds one, its memory is free."""
        with self._lock:
            return self._graphs.run(functools.partial(self._run, buffers))

    def _run(self, buffers: list[Any]) -> list[Any]:
        recording = next((r for r in self._recordings if r.is_free(buffers)), None)
        if recording is None:
            recording = self._record(buffers, () if self._recordings else self._donated)
            self._recordings.append(recording)
        return recording(buffers)


def graphed(program: Program, device: Any, donated: Sequence[int] = ()) -> GraphedProgram:
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

    return GraphedProgram(program, cuda_fusion.launches(program), bind, graphs, donated)
