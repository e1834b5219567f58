"""``mt.compile``: a function traced once for each signature, and replayed as a program.

The function runs with arrays that only stand for values; every op call becomes an entry. Dead and repeated entries are
dropped, and each value is freed at its last use. On split arrays the program goes to their mesh, which partitions it
and runs it as one program a rank. Python code in the function runs while it is traced and not again: a ``print`` prints
once. Its writes are another matter (:mod:`.lost_writes`).
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arrays.backends.backend import backend_for, backend_of
from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.dispatch import Deferred, apply, wrap
from ...arrays.core.errors import TracedValueError, check_function
from ...arrays.core.op import not_recording, recording, state
from ...arrays.core.program import Program, Traced, freeze, last_uses, register_tracer, simplify
from ...arrays.indexing.sparse_cotangent import SparseCotangent, densify
from ...arrays.interface.askers import say_ours
from ...arrays.interface.writing import settled
from ..captures.cache import CachedCaptures
from ..captures.captures import Captures, captures_of
from ..captures.lost_writes import Arguments, noting_logs, refuse_kept, restore
from ..captures.number_inputs import KINDS, OtherKind, Term, TracedNumber, settle_kept
from ..captures.retraces import MOST, Retrace, Retraces
from ..captures.static_results import ARRAY, filled, static
from ..captures.tracing import _Trace
from ..tape.anomaly import is_checker
from ..tape.backward import same_value
from ..tape.custom_vjp import custom_vjp
from ..tape.function_wrapper import Wrapper
from ..transforms import vjp
from .cuda_graphs import graphed
from .determinism import ImpurityCheck, refuse_other, refuse_strangers
from .donation import donated_leaves, given_up, positions
from .executable import Executable, local_executable
from .lookups import check, lookups
from .places import device_of_arguments, refuse_several
from .signature import as_inputs, is_traced, leaf_keys, read_too


class Compiled(Wrapper):
    """A compiled function; see :func:`compile`."""

    def __init__(
        self, fn: Callable[..., Any], cache_size: int, cuda_graph: bool = False, donate: Sequence[int] = ()
    ) -> None:
        check_function("compile", fn)
        if cache_size < 1:
            raise ValueError(f"[compile] cache_size must be at least 1, got {cache_size}")
        self._fn = fn
        self._outside = CachedCaptures(fn)
        self._donate = tuple(donate)
        self._cache: OrderedDict[Any, _Ready] = OrderedDict()  # the last used at the end
        # By key without numbers: which of these the programs hold for alone.
        self._pinned: dict[Any, frozenset[int]] = {}
        self._cache_size = cache_size
        self._cuda_graph = cuda_graph
        self._lock = threading.Lock()  # threads may call one compiled function
        self._traced = 0
        self._retraces = Retraces()
        self._unsettled = 0  # traces in succession that left other things than they read
        functools.update_wrapper(self, fn, updated=())  # not the attributes of another such object

    def functions(self) -> list[Callable[..., Any]]:
        return [self._fn]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, treedef = trees.flatten((args, kwargs))
        arrays, inputs = as_inputs(leaves)
        recorders = state.recorders
        if (recorders and any(isinstance(r, _Trace) for r in recorders)) or is_traced(inputs):
            return self._fn(*args, **kwargs)  # inside another compiled function: part of its program
        donated = donated_leaves(args, self._donate, self._name) if self._donate else frozenset()
        ready = self._ready(leaves, arrays, treedef, donated, numbers=True)
        try:
            numbers = [n.buffer(arrays) for n in ready.numbers]
        except OtherKind:
            ready, numbers = self._ready(leaves, arrays, treedef, donated), []
        if ready.has_calls and ready.is_watched(inputs):
            if ready.is_watched(()) or any(map(is_checker, state.recorders)):
                # Watched arrays that the code reads from around it are known to the code alone; faults are looked for
                # there.
                return self._fn(*args, **kwargs)
            return ready.rebuilt(ready.differentiable(self._fn, arrays, treedef)(*inputs))
        return ready(inputs, numbers)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A compiled method; the object it is called on is an argument like any other."""
        return self if instance is None else functools.partial(self, instance)

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """The program for these arguments; ``print`` it to see one line an entry.

        >>> print(mt.compile(lambda x: x * 2.0 + 1.0).program(mt.ones(3)))
        program(%0: float64[3]):
          %1 = multiply(%0, 2.0)  : float64[3]
          %2 = add(%1, 1.0)       : float64[3]
          return %2
        """
        leaves, treedef = trees.flatten((args, kwargs))
        donated = donated_leaves(args, self._donate, self._name)
        return self._ready(leaves, as_inputs(leaves)[0], treedef, donated).program

    @property
    def signatures(self) -> int:
        """How many times the function was traced."""
        return self._traced

    @property
    def _name(self) -> str:
        return str(getattr(self._fn, "__name__", self._fn))

    def _ready(
        self,
        leaves: Sequence[Any],
        arrays: Sequence[Any],
        treedef: trees.TreeDef,
        donated: frozenset[int] = frozenset(),
        numbers: bool = False,
    ) -> _Ready:
        """The program for these arguments; with ``numbers``, one that takes those numbers as inputs that only enter
        arithmetic."""
        reads = self._outside.look(read_too(arrays, treedef))
        key: Any = (treedef, leaf_keys(arrays, numbers), reads.key, state.device)
        free = [i for i, x in enumerate(arrays) if type(x) in KINDS] if numbers else []
        pinned = self._pinned.get(key, frozenset()) if free else frozenset()
        with self._lock:
            ready = self._cache.get((key, _values(arrays, pinned)) if free else key)
            if ready is not None:
                self._cache.move_to_end((key, _values(arrays, pinned)) if free else key)
                self._retraces.count = 0
                return ready
        # Traced outside the lock: the code of the function is the user's, and may call this very function.
        inputs = frozenset(free) - pinned if _KINDS_ARE_READ.isdisjoint(reads.named) else frozenset()
        trace = functools.partial(_trace, self._fn, reads, arrays, treedef, self._cuda_graph, donated)
        try:
            ready = trace(inputs)
        except Exception:
            if not inputs:
                raise
            ready = None  # if the stand-ins of numbers were the reason, it goes well with the numbers
        if ready is None or (ready.has_calls and ready.numbers):  # the derivative of a call is traced by itself
            inputs = frozenset()
            ready = trace(inputs)
        with self._lock:
            if free:
                if len(self._pinned) >= self._cache_size:
                    self._pinned.clear()
                self._pinned[key] = pinned = frozenset(free) - inputs | ready.pinned
                key = (key, _values(arrays, pinned))
            self._traced += 1
            self._unsettled = self._unsettled + 1 if ready.changed else 0
            if not ready.changed:
                self._cache[key] = ready
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        changing = None if ready.changed else self._retraces.note(Retrace(leaf_keys(arrays), treedef, reads), arrays)
        if changing is not None:
            text = f"[compile] {self._name} was traced {MOST} times in succession: {changing}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        if self._unsettled == 2:
            warnings.warn(
                f"[compile] {self._name} is traced at every call: it writes to {ready.changed}, or what is there "
                "cannot be compared. "
                "Return the new value, and pass as an argument what is read (`signatures` counts the traces)",
                RuntimeWarning,
                stacklevel=3,
            )
        return ready

    def __deepcopy__(self, memo: Any = None) -> Compiled:
        return self  # as of functions

    __copy__ = __deepcopy__

    def __reduce__(self) -> Any:
        """The function, to be traced anew; or its name, where a module has the compiled one in its place."""
        name = getattr(self._fn, "__qualname__", "")
        home = vars(sys.modules.get(getattr(self._fn, "__module__", None) or "", functools))
        if home.get("__name__") != "__main__" and home.get(name) is self:
            return name
        options = {"cache_size": self._cache_size, "cuda_graph": self._cuda_graph, "donate": self._donate}
        return functools.partial(compile, **options), (self._fn,)

    def __repr__(self) -> str:
        return f"compile({self._name}, {self.signatures} signature(s))"


def compile(
    fn: Callable[..., Any], *, cache_size: int = 128, cuda_graph: bool = False, donate: int | Sequence[int] = ()
) -> Compiled:
    """A function that is traced once for each signature and then replayed as a program.

    Arguments and results are trees. Arrays (NumPy's too) are inputs, and so are Python numbers that only enter
    arithmetic: a learning rate that changes at every call costs one trace. A number that the code compares, indexes or
    makes a shape with is static, and so is everything else: a new value is a new signature. The signature is compared
    by equality: shapes, dtypes, devices, shardings, and static arguments.

    The values that the function captures are read again, and compared, at every call; where one changed, the function
    is traced again. These are all values that its code, and that of the functions it calls, can reach: closures,
    variables of modules, default arguments, attributes of objects and classes, elements of containers, arrays written
    in place. See the page on the tape for values that cannot be seen.

    A function that writes to an argument is refused. Where it writes to attributes, variables or containers around it,
    it is traced at each call until it leaves them as they were, and does what the plain function does.

    A program is differentiated like the code it came from, at any order. Where that has a ``checkpoint``, a
    ``custom_vjp`` or a ``gradient_hook``, its derivative becomes a second program, which computes the values again;
    Python code in hooks runs while that is traced. (``compile(grad(f))`` has both in one program, and computes them
    once.)

    On a CPU results have the bits of eager ones, but for sums and products over large arrays that the function has
    turned (``mt.sum(-x.T)``): a program lays these out in another order, in which they are then summed. And where a
    matrix of two-byte floats is an operand of several products, a program rounds the cotangent of each before it adds
    them, while eager work adds them in float32; derivatives of higher orders may add in another order. They differ by
    rounding.

    Parameters
    ----------
    fn
        The function. One that is compiled already is returned as it is.
    cache_size
        How many programs are kept; beyond, the one that was not used for the longest time makes room, with the arrays
        that it holds.
    cuda_graph
        Record the GPU work of the program and replay it: a step of many small kernels then costs the host one call for
        each stretch between those calls that CuPy cannot record (cuBLAS and the like). Its memory is kept between
        calls, and calls follow each other on the device.
    donate
        Positions of arguments that the caller gives up: results may take the memory of their arrays, which cannot be
        used afterwards. A step ``params, state = step(params, state, batch)`` then neither holds both generations nor,
        for a table of which few rows are read, copies what it leaves as it was. Memory that something else shares (a
        view, a NumPy array) is copied first, and nothing is given up where a tape watches. Arrays on a GPU are given up
        to a ``cuda_graph`` alone, which then passes a state from call to call without a copy. Those on a mesh stay what
        they are: results take memory of the pool that their programs share.

    Raises
    ------
    DonatedArrayError
        When an array that was given up is used again.
    DeviceError
        For arrays of several devices that the function reads, though none of them meet; with ``cuda_graph``, for
        arguments that are not on one CUDA device. (Random keys follow the other arguments to their GPU.)
    TracedValueError
        When the function needs a value (``if x > 0``, ``float(x)``) or a shape that depends on values; when it writes
        in place to an argument that is not given up, or keeps a traced array; and when it captures a value that could
        change unseen: a writeable NumPy array above a megabyte, or an array that Python code cannot see.
    NondeterministicError
        When random numbers of Python or NumPy, or times of a clock, become part of the program. A function that reads
        either is traced twice to check, and so is one that makes NumPy arrays.

    Examples
    --------
    >>> double = mt.compile(lambda x: x + x)
    >>> double(mt.asarray([1, 2]))
    Array([2, 4])
    >>> step = mt.compile(lambda w, g: w - 0.5 * g, donate=0)
    >>> w = mt.ones(2)
    >>> new = step(w, mt.asarray([1.0, 2.0]))
    >>> w + 1.0  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    DonatedArrayError: this array was given up
    """
    given = positions(donate)
    if isinstance(fn, Compiled):
        if given:
            raise ValueError("[compile] the function is compiled already: pass donate= where that is done")
        return fn
    return Compiled(fn, cache_size, cuda_graph, given)


# Code that asks for the type of a number would get that of its placeholder: there numbers are part of the signature.
_KINDS_ARE_READ = frozenset({"type", "__class__"})


def _values(arrays: Sequence[Any], places: frozenset[int]) -> tuple[Any, ...]:
    return tuple([(i, freeze(arrays[i])) for i in sorted(places)])


class _Ready:
    """A traced program with its executable and the structure of its result."""

    def __init__(
        self,
        program: Program,
        run: Callable[[Sequence[Any]], list[Any]],
        out_def: trees.TreeDef,
        statics: list[Any],
        trace: _Trace,
        donated: Sequence[int] = (),
        name: str = "",
        on_gpus: bool = False,
    ) -> None:
        self.program, self.run, self.out_def, self.statics = program, run, out_def, statics
        self.arrays_alone = all(s is ARRAY for s in statics)
        self.donated, self.name = donated, name
        self.gives = getattr(run, "buffer", np.ndarray)  # the type of buffers that can be given up
        # A program on one CPU takes sparse cotangents as they are.
        self.local = isinstance(run, Executable)
        self.lifted = [c for c in trace.lifted.values() if c.var in program.constants]
        self.has_calls, self.own_derivatives = trace.has_calls, trace.own_derivatives
        self.numbers, self.pinned = list(trace.numbers), trace.pinned
        self._differentiable: custom_vjp | None = None
        self.changed = trace.changed
        self.lookups = lookups(program) if on_gpus else []

    def is_watched(self, inputs: Sequence[Array]) -> bool:
        """Whether a recorder of this thread watches an input or a captured array of the program."""
        return bool(state.recorders) and any(
            r.watches(a) for r in state.recorders for a in (*inputs, *(c.current() for c in self.lifted))
        )

    def __call__(self, inputs: Sequence[Array], numbers: Sequence[Any] = ()) -> Any:
        """The result for these inputs, and for the buffers of numbers."""
        if self.lookups:
            check(self.lookups, inputs)
        recorders = state.recorders
        if recorders and (self.is_watched(inputs) or any(map(is_checker, recorders))):
            found = self._replay([*inputs, *map(wrap, numbers)])
        else:
            if not self.local:
                densify(inputs)
            bufs = (
                given_up(inputs, self.donated, getattr(self.run, "taken", ()), self.name, self.gives)
                if self.donated
                else [settled(a) for a in inputs]
            )
            bufs += numbers
            found = [wrap(b) for b in self.run(bufs)]
        return self.rebuilt(found)

    def rebuilt(self, arrays: Iterable[Array]) -> Any:
        """The result of the function, with these arrays in it."""
        if self.arrays_alone:
            return trees.unflatten(self.out_def, arrays)
        return trees.unflatten(self.out_def, filled(self.statics, arrays))

    def differentiable(self, fn: Callable[..., Any], arguments: Sequence[Any], treedef: trees.TreeDef) -> custom_vjp:
        """The program as a function with a derivative of its own: a second program, traced from the derivative of the
        code.

        The first only has the calls inside a ``checkpoint``; the second has its derivative.
        """
        if self._differentiable is None:
            given = [ARRAY if isinstance(a, Array) else a for a in arguments]

            def code(*inputs: Array) -> list[Array]:
                left = iter(inputs)
                args, kwargs = trees.unflatten(treedef, [next(left) if a is ARRAY else a for a in given])
                return [x for x in trees.flatten(fn(*args, **kwargs))[0] if isinstance(x, Array)]

            functools.update_wrapper(code, fn, updated=())
            pull = compile(lambda inputs, seeds: vjp(code, *inputs)[1](seeds))

            run, local = self.run, self.local  # and not self, which would hold itself

            def forward(*inputs: Array) -> tuple[list[Array], Any]:
                if not local:
                    densify(inputs)
                return [wrap(b) for b in run([settled(a) for a in inputs])], inputs

            self._differentiable = custom_vjp(code)
            self._differentiable.defvjp(forward, pull)
        return self._differentiable

    def _replay(self, inputs: Sequence[Array]) -> list[Array]:
        """The program call by call, in view of the tapes of this thread: it is differentiated like the code it came
        from."""
        env = {c.var: c.current() for c in self.lifted}
        env.update(zip(self.program.inputs, inputs, strict=True))
        outer, site = state.origin, state.site
        checked = any(map(is_checker, state.recorders))
        try:
            for e, free in zip(self.program.entries, last_uses(self.program), strict=True):
                state.origin = outer or e.origin
                if checked:  # the fault is in the traced code, and not where the program was called
                    state.site = site or e.site
                out = apply(e.op, tuple(env[v] if isinstance(v, int) else v.value for v in e.inputs), e.params)
                env.update(zip(e.outputs, out if e.op.nout > 1 else (out,), strict=True))
                for v in free:
                    del env[v]
        finally:
            state.origin, state.site = outer, site
        return [same_value(env[v]) for v in self.program.outputs]


class Outline(NamedTuple):
    """A function's program, not prepared to run. ``result`` is the function's result, of arrays without values;
    ``gradients`` has pairs of variables of the program: a source of ``grad``, and its gradient."""

    program: Program
    result: Any
    gradients: tuple[tuple[int, int], ...]


def outline(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Outline:
    """The program of ``fn(*args)``, of arrays that may have no values.

    >>> found = outline(mt.grad(lambda x: mt.sum(x * x)), mt.ones(3))
    >>> found.result.shape, found.gradients == ((*found.program.inputs, *found.program.outputs),)
    ((3,), True)
    """
    leaves, treedef = trees.flatten((args, kwargs))
    arrays = as_inputs(leaves)[0]
    reads = CachedCaptures(fn).look(read_too(arrays, treedef))
    trace, program, outs, out_def = _recorded(fn, reads, arrays, treedef, frozenset(), frozenset())
    found = simplify(trace.builder.build([v for pair in trace.gradients for v in pair])).outputs
    return Outline(program, trees.unflatten(out_def, outs), tuple(zip(found[::2], found[1::2], strict=True)))


def _traced(fn: Callable[..., Any], args: tuple[Any, ...]) -> Traced:
    """The traced program for a program file; registered with ``arrays``, which must not import this package."""
    leaves, treedef = trees.flatten((args, {}))
    ready = compile(fn)._ready(leaves, as_inputs(leaves)[0], treedef)
    avals = map(ready.program.avals.__getitem__, ready.program.outputs)
    stand_ins = [wrap(np.broadcast_to(np.zeros((), a.dtype), a.shape)) for a in avals]
    return Traced(ready.program, ready.rebuilt(stand_ins), ready.own_derivatives)


register_tracer(_traced)


def _recorded(
    fn: Callable[..., Any],
    reads: Captures,
    arrays: Sequence[Any],
    treedef: trees.TreeDef,
    numbers: frozenset[int],
    donated: frozenset[int],
) -> tuple[_Trace, Program, list[Any], trees.TreeDef]:
    """One pass through the function: the trace, its program, and the flat result of the function."""
    trace = _Trace((x for x, _ in reads.arrays), reads.known)
    trace.leaves = arrays
    stand_ins = [
        trace.input(a)
        if isinstance(a, Array)
        else TracedNumber(trace, a, Term(type(a), i), frozenset({i}))
        if i in numbers
        else a
        for i, a in enumerate(arrays)
    ]
    name = getattr(fn, "__name__", "the function")
    given = Arguments(name, stand_ins, treedef, donated)
    try:
        try:
            with not_recording(), recording(trace), noting_logs(trace), device_of_arguments(arrays):
                result = fn(*given.args, **given.kwargs)
            trace.check_refusals()
        except Exception as e:
            say_ours(e)
            if e is not trace.refusal:
                trace.check_refusals()
            raise
        finally:
            restore(name, reads, trace)
        given.refuse_writes()
        outs, out_def = trees.flatten(result)
        if (used_up := next((o for o in outs if isinstance(o, Iterator)), None)) is not None:
            raise TracedValueError(
                f"[compile] {name} returns a {type(used_up).__name__}, which is empty after its first reading: return "
                "a list or a tuple"
            )
        outs = [o._read() if type(o) is TracedNumber else o for o in outs]
        densify(outs)
        outputs = [trace._var(o) for o in outs if isinstance(o, Array)]
    finally:
        trace.open = False
    del given, stand_ins, result  # what stands for a number is held by nobody then but where the function kept it
    settle_kept(trace)
    return trace, simplify(trace.builder.build(outputs)), outs, out_def


def _trace(
    fn: Callable[..., Any],
    reads: Captures,
    arrays: Sequence[Any],
    treedef: trees.TreeDef,
    cuda_graph: bool = False,
    donated: frozenset[int] = frozenset(),
    numbers: frozenset[int] = frozenset(),
) -> _Ready:
    chance = ImpurityCheck(reads, arrays)
    trace, program, outs, out_def = _recorded(fn, reads, arrays, treedef, numbers, donated)
    title = getattr(fn, "__name__", "the function")

    def now() -> Captures:
        found = captures_of(fn, read_too(arrays, treedef))
        refuse_kept(title, found, trace)
        return found

    trace.changed = reads.changed_since(now) or trace.logged
    # A program that is not kept repeats nothing, and what was written is not to be written twice.
    if trace.changed is None and (chance.suspect() or trace.strangers):
        drawn = chance.drawn()
        # With what the function keeps since.
        again, second, _, _ = _recorded(fn, now(), arrays, treedef, numbers, donated)
        if chance.suspect():
            refuse_other(title, program, second)
        refuse_strangers(title, trace.strangers, again.strangers)
        trace.changed = drawn.rewind()
    statics = [static(f"[compile] {title}", o, (*arrays, *reads.around)) for o in outs]
    inputs = [a for a in arrays if isinstance(a, Array)]
    leaves = [i for i, a in enumerate(arrays) if isinstance(a, Array)]
    given = [k for k, i in enumerate(leaves) if i in donated]
    buffers = [a._buf for a in inputs] + list(program.constants.values())
    host = next((b.host for b in buffers if isinstance(b, Deferred)), None)
    if host is None:
        captured = [wrap(c.buf) for c in trace.lifted.values() if c.var in program.constants]
        refuse_several(title, program, inputs, captured, cuda_graph)
    if cuda_graph:
        where = inputs[0].device if inputs else "no device"
        run = graphed(program, where if host is None else host, [program.inputs[k] for k in given])
    elif host is not None:
        name = getattr(fn, "__name__", "")
        shardings = [a.sharding for a in inputs] + [None] * len(trace.numbers)
        run = host.prepare(program, shardings, name if name.isidentifier() else "compiled")
    else:
        xp = (backend_for(inputs[0].device) if inputs else backend_of(None)).xp
        thin = [v for v, a in zip(program.inputs, inputs, strict=False) if type(a._buf) is SparseCotangent]
        run = local_executable(program, xp, sparse=thin, donated=[program.inputs[k] for k in given])
    on_gpus = not all(isinstance(a._buf, np.ndarray | Deferred) for a in inputs)
    return _Ready(program, run, out_def, statics, trace, given, title, on_gpus)
