"""``mt.compile``: a function traced once for each signature, and replayed as a program.

The function runs with arrays that only stand for values; every op call becomes an entry. Dead and repeated entries are dropped,
and each value is freed at its last use. On split arrays the program goes to their mesh, which partitions it and runs it as one
program a rank. As in JAX, Python code in the function runs while it is traced and not again: a ``print`` prints once.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import tree as trees
from ..arrays._array import Array
from ..arrays._backends import backend_for, backend_of
from ..arrays._dispatch import Deferred, ProgramHost, apply, argument_avals, call_site, program_inputs, wrap
from ..arrays._op import Op, not_recording, recording, state
from ..arrays.errors import DeviceError, TracedValueError
from ..arrays.indexsum import densify
from ..arrays.program import (
    Const,
    Program,
    ProgramBuilder,
    ShapeDtype,
    Site,
    Traced,
    last_uses,
    register_tracer,
    simplify,
)
from .anomaly import is_checker
from .backward import same_value
from .calls import custom_vjp
from .executable import local_executable
from .signature import Wrapper, arrays_in, as_array, leaf_key, outside, outside_key
from .tape import is_differentiable
from .transforms import vjp


class Tracer(Deferred):
    """A buffer that stands for a value of a program being traced."""

    __slots__ = ("builder", "device", "dtype", "host", "shape", "sharding", "var")
    priority = 2

    def __init__(
        self, builder: _Trace, var: int, aval: ShapeDtype, device: Any, sharding: Any, host: ProgramHost | None
    ) -> None:
        self.builder, self.var, self.device, self.sharding, self.host = builder, var, device, sharding, host
        self.shape, self.dtype = aval

    def emit(self, op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[Tracer, ...]:
        return self.builder.emit(op, args, params)

    def concrete(self) -> np.ndarray:
        who = _asker()
        if who is not None:
            raise TracedValueError(
                f"[{who}] the result depends on the values of a {self.aval} for its shape or for Python numbers, and inside "
                "mt.compile arrays only stand for values: call it outside, or use a function whose shape is known (mt.where)"
            )
        raise TracedValueError(
            f"a value ({self.aval}) was asked for inside mt.compile, where arrays only stand for values: "
            "use mt.where instead of `if`, keep printing and float(...) outside, or pass the number as a Python scalar"
        )


def _asker() -> str | None:
    """The function of ours that the user called and that asked for a value; None where it is a conversion of the array."""
    f, name = sys._getframe(2), ""
    while f is not None and f.f_globals.get("__name__", "").startswith("meshtape."):
        if f.f_globals["__name__"] == __name__:  # the user's function runs inside these
            break
        if f.f_code.co_name not in _WRAPPERS:
            name = f.f_code.co_name
        f = f.f_back
    return None if not name or name in _CONVERSIONS or name.startswith("_") else name


# What decorators make of a function, and conversions of an array to what is none.
_WRAPPERS = frozenset({"inner", "wrapped", "wrapper", "method"})
_CONVERSIONS = frozenset({"item", "tolist", "numpy", "to_device", "concrete"})


class Lifted(NamedTuple):
    """An array that a traced function reads without being passed it, and the buffer that it had then."""

    var: int
    array: Array
    buf: Any

    def current(self) -> Array:
        """The array itself, which tapes know by name, unless it was written since."""
        return self.array if self.array._buf is self.buf else wrap(self.buf)


class Held(NamedTuple):
    """An array and the buffer that it had when a call read it."""

    array: Array
    buf: Any


class Staged(NamedTuple):
    """A call on arrays that the function reads from around it; computed while tracing, and an entry where its result is used."""

    op: Op
    args: tuple[Any, ...]  # Held, Result or a Python scalar
    params: Mapping[str, Any]
    avals: tuple[ShapeDtype, ...]
    origin: str | None
    site: Site | None


class Result(NamedTuple):
    """The ``k``-th result of a staged call, and its buffer."""

    call: Staged
    k: int
    buf: Any


class _Trace:
    """The program that a traced function writes.

    It also records the calls in which no array is traced. Those on arrays from ``outside`` (closure, module) become entries where
    their results meet the program: as constants they would have lost their history, and with it the gradient of those arrays.
    """

    def __init__(self, outside: Iterable[Array] = ()) -> None:
        self.builder = ProgramBuilder()
        self.lifted: dict[tuple[int, int], Lifted] = {}
        # By id of the Array, and by id of the buffer for its aliases; all of them are held, so that ids stay their own.
        known = [x for x in outside if is_differentiable(x.dtype)]
        self.outside = {id(x): x for x in known} | {id(x._buf): x for x in reversed(known)}
        self.outside_bufs = [x._buf for x in known]
        self.results: dict[int, Result] = {}  # by id of the buffer
        self.detached: dict[int, Held] = {}  # by id of the Array
        self.staged_vars: dict[int, tuple[int, ...]] = {}
        self.open = True
        self.has_calls = False

    def note_call(self, outs: Sequence[Array]) -> None:
        """Called where the function makes a call that tapes record as one (``checkpoint``, ``custom_vjp``, ``gradient_hook``)."""
        self.has_calls = True

    # ----- calls without a traced array -------------------------------------------------------------------------------

    def watches(self, x: Array) -> bool:
        return False

    def record(
        self,
        op: Op,
        args: tuple[Any, ...],
        outs: tuple[Array, ...],
        params: Mapping[str, Any],
        origin: str | None,
        site: Site | None,
    ) -> None:
        if any(isinstance(o._buf, Tracer) for o in outs):
            return
        sources = tuple(self._source(a) if isinstance(a, Array) else a for a in args)
        if not any(type(s) is Result or (type(s) is Held and id(s.array) in self.outside) for s in sources):
            return
        if op.nondifferentiable:
            # The result of stop_gradient has the buffer of its argument, and must not be taken for it.
            self.detached.update((id(o), Held(o, o._buf)) for o in outs)
            return
        call = Staged(op, sources, params, argument_avals(outs), origin, site)
        taken = {id(s.buf) for s in sources if type(s) in (Held, Result)}
        for k, o in enumerate(outs):
            if id(o._buf) not in taken:  # an alias is what it is an alias of
                self.results[id(o._buf)] = Result(call, k, o._buf)

    def _source(self, x: Array) -> Held | Result:
        """What an array that is not traced stands for at this moment."""
        buf = x._buf
        if id(x) in self.detached and self.detached[id(x)].buf is buf:
            return Held(wrap(buf), buf)
        if id(buf) in self.results:
            return self.results[id(buf)]
        return Held(x if id(x) in self.outside else self.outside.get(id(buf), x), buf)

    # ----- variables --------------------------------------------------------------------------------------------------

    def input(self, x: Array) -> Array:
        buf = x._buf
        aval = ShapeDtype(tuple(buf.shape), buf.dtype)
        host = buf.host if isinstance(buf, Deferred) else None
        return wrap(Tracer(self, self.builder.input(aval), aval, x.device, x.sharding, host))

    def _var(self, x: Array) -> int:
        buf = x._buf
        if isinstance(buf, Tracer):
            if buf.builder is not self:
                raise TracedValueError(
                    "an array of one traced function was used in another: return it, instead of keeping it aside"
                )
            return buf.var
        return self._var_of(self._source(x))

    def _var_of(self, source: Held | Result) -> int:
        if type(source) is Result:
            call = source.call
            if id(call) not in self.staged_vars:  # the results hold the call, so that its id stays its own
                inputs = [self._var_of(s) if type(s) in (Held, Result) else Const(s) for s in call.args]
                self.staged_vars[id(call)] = self.builder.add(
                    call.op, inputs, call.params, call.avals, call.origin, call.site
                )
            return self.staged_vars[id(call)][source.k]
        x, buf = source
        # Arrays that share a buffer are different values to a tape.
        key = (id(x), id(buf))
        known = self.lifted.get(key)
        if known is None:
            aval = ShapeDtype(tuple(buf.shape), buf.dtype)
            known = self.lifted[key] = Lifted(self.builder.constant(buf, aval), x, buf)
        return known.var

    def emit(self, op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[Tracer, ...]:
        if not self.open:
            raise TracedValueError("an array that was traced by mt.compile is used after the function returned")
        arrays = [a for a in args if isinstance(a, Array)]
        hosts = [a._buf.host for a in arrays if isinstance(a._buf, Deferred) and a._buf.host is not None]
        avals = argument_avals(args)
        out_avals = op.avals(avals, params)
        host = hosts[0] if hosts else None
        if host is None:
            devices = {a.device for a in arrays}
            if len(devices) > 1:
                raise DeviceError(f"[{op.name}] the arrays are on different devices: {', '.join(map(str, devices))}")
            device, shardings = arrays[0].device, (None,) * op.nout
        else:
            device = next(a.device for a in arrays if isinstance(a._buf, Deferred) and a._buf.host is host)
            shardings = host.place(op, avals, [a.sharding if isinstance(a, Array) else None for a in args], params)
        inputs = program_inputs(args, self._var)
        out_vars = self.builder.add(op, inputs, params, out_avals, state.origin, call_site())
        return tuple(
            Tracer(self, v, aval, device, s, host) for v, aval, s in zip(out_vars, out_avals, shardings, strict=True)
        )


class Compiled(Wrapper):
    """A compiled function; see :func:`compile`."""

    def __init__(self, fn: Callable[..., Any], cache_size: int, cuda_graph: bool = False) -> None:
        if cache_size < 1:
            raise ValueError(f"[compile] cache_size must be at least 1, got {cache_size}")
        self._fn = fn
        self._cache: OrderedDict[Any, _Ready] = OrderedDict()  # the last used at the end
        self._cache_size = cache_size
        self._cuda_graph = cuda_graph
        self._lock = threading.Lock()  # threads may call one compiled function
        self._traced = 0
        functools.update_wrapper(self, fn, updated=())  # not the attributes of another such object

    def functions(self) -> list[Callable[..., Any]]:
        return [self._fn]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, treedef = trees.flatten((args, kwargs))
        arrays = [as_array(x) for x in leaves]
        densify(arrays)
        if any(isinstance(r, _Trace) for r in state.recorders) or any(
            isinstance(a, Array) and isinstance(a._buf, Tracer) for a in arrays
        ):
            return self._fn(*args, **kwargs)  # inside another compiled function: part of its program
        ready = self._ready(leaves, arrays, treedef)
        inputs = [a for a in arrays if isinstance(a, Array)]
        if ready.has_calls and ready.is_watched(inputs):
            if ready.is_watched(()) or any(map(is_checker, state.recorders)):
                # Watched arrays that the code reads from around it are known to the code alone; faults are looked for there.
                return self._fn(*args, **kwargs)
            return ready.rebuilt(ready.differentiable(self._fn, arrays, treedef)(*inputs))
        return ready(inputs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A compiled method; the object it is called on is an argument like any other."""
        return self if instance is None else functools.partial(self, instance)

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """The program for these arguments; ``print`` it to see one line an entry.

        >>> import meshtape as mt
        >>> print(mt.compile(lambda x: x * 2.0 + 1.0).program(mt.ones(3)))
        program(%0: float64[3]):
          %1 = multiply(%0, 2.0)  : float64[3]
          %2 = add(%1, 1.0)       : float64[3]
          return %2
        """
        leaves, treedef = trees.flatten((args, kwargs))
        return self._ready(leaves, [as_array(x) for x in leaves], treedef).program

    @property
    def signatures(self) -> int:
        """How many times the function was traced."""
        return self._traced

    def _ready(self, leaves: Sequence[Any], arrays: Sequence[Any], treedef: trees.TreeDef) -> _Ready:
        key = (treedef, tuple(map(leaf_key, arrays)), outside_key(self._fn))
        with self._lock:
            ready = self._cache.get(key)
            if ready is not None:
                self._cache.move_to_end(key)
                return ready
        # Traced outside the lock: the code of the function is the user's, and may call this very function.
        ready = _trace(self._fn, arrays, treedef, self._cuda_graph)
        with self._lock:
            self._traced += 1
            self._cache[key] = ready
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return ready

    def __repr__(self) -> str:
        return f"compile({getattr(self._fn, '__name__', self._fn)!s}, {self.signatures} signature(s))"


def compile(fn: Callable[..., Any], *, cache_size: int = 128, cuda_graph: bool = False) -> Compiled:
    """A function that is traced once for each signature and then replayed as a program.

    Arguments and results are trees. Arrays (NumPy's too) are inputs; everything else in the arguments is static: a new value
    is a new signature, so pass a number that changes at every call as ``mt.asarray(number)``. The signature is compared by
    equality: shapes, dtypes, devices, shardings, static arguments, and the arrays and numbers that the function reads from
    around it. A program is differentiated like the code it came from, at any order. Where that has a ``checkpoint``, a
    ``custom_vjp`` or a ``gradient_hook``, its derivative becomes a second program, which computes the values again; Python code in
    hooks runs while that is traced. (``compile(grad(f))`` has both in one program, and computes them once.)

    Parameters
    ----------
    fn
        The function. One that is compiled already is returned as it is.
    cache_size
        How many programs are kept; beyond, the one that was not used for the longest time makes room, with the arrays that it holds.
    cuda_graph
        Record what the program tells the GPU and replay it, so that a step of many small kernels costs the host one call for each
        stretch between those calls that CuPy cannot record (cuBLAS and the like). Its memory is kept between calls, and calls
        follow each other on the device.

    Raises
    ------
    DeviceError
        With ``cuda_graph``, for arrays that are not on one CUDA device.
    TracedValueError
        When the function asks for a value (``if x > 0``, ``float(x)``) or for a shape that depends on values.

    Examples
    --------
    >>> import meshtape as mt
    >>> double = mt.compile(lambda x: x + x)
    >>> double(mt.asarray([1, 2]))
    Array([2, 4])
    """
    return fn if isinstance(fn, Compiled) else Compiled(fn, cache_size, cuda_graph)


class _Ready:
    """A traced program with its executable and the structure of its result."""

    def __init__(
        self,
        program: Program,
        run: Callable[[Sequence[Any]], list[Any]],
        out_def: trees.TreeDef,
        statics: list[Any],
        trace: _Trace,
    ) -> None:
        self.program, self.run, self.out_def, self.statics = program, run, out_def, statics
        self.lifted = [c for c in trace.lifted.values() if c.var in program.constants]
        self.has_calls = trace.has_calls
        self._differentiable: custom_vjp | None = None

    def is_watched(self, inputs: Sequence[Array]) -> bool:
        """Whether a recorder of this thread watches what the program is computed from."""
        return bool(state.recorders) and any(
            r.watches(a) for r in state.recorders for a in (*inputs, *(c.current() for c in self.lifted))
        )

    def __call__(self, inputs: Sequence[Array]) -> Any:
        if self.is_watched(inputs) or any(map(is_checker, state.recorders)):
            found = self._replay(inputs)
        else:
            found = [wrap(b) for b in self.run([a._buf for a in inputs])]
        return self.rebuilt(found)

    def rebuilt(self, arrays: Iterable[Array]) -> Any:
        """The result of the function, with these arrays in it."""
        outs = iter(arrays)
        return trees.unflatten(self.out_def, [next(outs) if s is _ARRAY else s for s in self.statics])

    def differentiable(self, fn: Callable[..., Any], arguments: Sequence[Any], treedef: trees.TreeDef) -> custom_vjp:
        """The program as a function with a derivative of its own: a second program, traced from the derivative of the code.

        The first has the calls inside a ``checkpoint``, not what the tape is to make of them; the second has it.
        """
        if self._differentiable is None:
            given = [_ARRAY if isinstance(a, Array) else a for a in arguments]

            def code(*inputs: Array) -> list[Array]:
                left = iter(inputs)
                args, kwargs = trees.unflatten(treedef, [next(left) if a is _ARRAY else a for a in given])
                return [x for x in trees.flatten(fn(*args, **kwargs))[0] if isinstance(x, Array)]

            functools.update_wrapper(code, fn, updated=())
            pull = compile(lambda inputs, seeds: vjp(code, *inputs)[1](seeds))

            run = self.run  # and not self, which would hold itself

            def forward(*inputs: Array) -> tuple[list[Array], Any]:
                return [wrap(b) for b in run([a._buf for a in inputs])], inputs

            self._differentiable = custom_vjp(code)
            self._differentiable.defvjp(forward, pull)
        return self._differentiable

    def _replay(self, inputs: Sequence[Array]) -> list[Array]:
        """The program call by call, in view of the tapes of this thread: it is differentiated like the code it came from."""
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


_ARRAY = object()


def _traced(fn: Callable[..., Any], args: tuple[Any, ...]) -> Traced:
    """What program files are made of: registered with ``arrays``, as they must not import this package."""
    leaves, treedef = trees.flatten((args, {}))
    ready = compile(fn)._ready(leaves, [as_array(x) for x in leaves], treedef)
    stand_ins = iter(
        [
            wrap(np.broadcast_to(np.zeros((), a.dtype), a.shape))
            for a in map(ready.program.avals.__getitem__, ready.program.outputs)
        ]
    )
    return Traced(
        ready.program, trees.unflatten(ready.out_def, [next(stand_ins) if s is _ARRAY else s for s in ready.statics])
    )


register_tracer(_traced)


def _trace(fn: Callable[..., Any], arrays: Sequence[Any], treedef: trees.TreeDef, cuda_graph: bool = False) -> _Ready:
    trace = _Trace(x for v in outside(fn) for x in arrays_in(v))
    stand_ins = [trace.input(a) if isinstance(a, Array) else a for a in arrays]
    args, kwargs = trees.unflatten(treedef, stand_ins)
    try:
        with not_recording(), recording(trace):
            result = fn(*args, **kwargs)
        outs, out_def = trees.flatten(result)
        densify(outs)
        outputs = [trace._var(o) for o in outs if isinstance(o, Array)]
    finally:
        trace.open = False
    statics = [_ARRAY if isinstance(o, Array) else o for o in outs]
    program = simplify(trace.builder.build(outputs))
    inputs = [a for a in arrays if isinstance(a, Array)]
    buffers = [a._buf for a in inputs] + list(program.constants.values())
    host = next((b.host for b in buffers if isinstance(b, Deferred)), None)
    if cuda_graph:
        from .cuda_graphs import graphed

        where = inputs[0].device if inputs else "no device"
        return _Ready(program, graphed(program, where if host is None else host), out_def, statics, trace)
    if host is not None:
        name = getattr(fn, "__name__", "")
        run = host.prepare(program, [a.sharding for a in inputs], name if name.isidentifier() else "compiled")
        return _Ready(program, run, out_def, statics, trace)
    device = inputs[0].device if inputs else None
    xp = backend_for(device).xp if device is not None else backend_of(None).xp
    return _Ready(program, local_executable(program, xp), out_def, statics, trace)
