"""Tracing: arrays that stand for values of a program, and the recorder that writes it, for ``mt.compile``."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ...arrays.core.array import Array
from ...arrays.core.dispatch import Deferred, argument_avals, call_site, check_unwritten, program_inputs, wrap
from ...arrays.core.errors import DeviceError, TracedValueError
from ...arrays.core.op import NO_PARAMS, Op, ShapeDtype, state
from ...arrays.core.program import Const, ProgramBuilder, ProgramHost, Site
from ...arrays.ops.elementwise import ALIAS
from ..tape.record import is_differentiable


class Tracer(Deferred):
    """A buffer that stands for a value of a program being traced."""

    __slots__ = ("builder", "device", "dtype", "host", "shape", "sharding", "var")
    priority = 2
    traced = True

    def __init__(
        self, builder: _Trace, var: int, aval: ShapeDtype, device: Any, sharding: Any, host: ProgramHost | None
    ) -> None:
        self.builder, self.var, self.device, self.sharding, self.host = builder, var, device, sharding, host
        self.shape, self.dtype = aval

    def emit(self, op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[Tracer, ...]:
        return self.builder.emit(op, args, params)

    def concrete(self) -> np.ndarray:
        self.builder.require_open()
        who = _asker()
        if who is not None:
            self.builder.refuse(
                f"[{who}] the result depends on the values of a {self.aval} for its shape or for Python numbers, and "
                "inside mt.compile arrays only stand for values: call it outside, or use a function whose shape is "
                "known (mt.where)"
            )
        self.builder.refuse(
            f"a value ({self.aval}) was asked for inside mt.compile, where arrays only stand for values: use mt.where "
            "instead of `if`, keep printing and float(...) outside, pass the number as a Python scalar, or collect "
            "elements with mt.stack instead of writing them to a NumPy array"
        )


def _asker() -> str | None:
    """The function of ours that the user called and that needs a value; None for a conversion of the array."""
    f, name = sys._getframe(2), ""
    while f is not None and f.f_globals.get("__name__", "").startswith("meshtape."):
        if f.f_globals["__name__"] == _RUNNER:  # the user's function runs inside these
            break
        if f.f_code.co_name not in _WRAPPERS:
            name = f.f_code.co_name
        f = f.f_back
    return None if not name or name in _CONVERSIONS or name.startswith("_") else name


_RUNNER = f"{__package__.rpartition('.')[0]}.compiler.compile"
"""The module that runs the user's function."""

# Names of functions that decorators make, and of conversions of an array to another type.
_WRAPPERS = frozenset({"call_beside", "inner", "wrapped", "wrapper", "method"})
_CONVERSIONS = frozenset({"item", "tolist", "numpy", "to_device", "concrete"})


def memory(x: np.ndarray) -> np.ndarray:
    """The array whose memory ``x`` is a view of."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


class Lifted(NamedTuple):
    """An array that a traced function captures, and the buffer that it had then."""

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


class StagedCall(NamedTuple):
    """A call on captured arrays: computed during the trace, and an entry where its result is used."""

    op: Op
    args: tuple[Any, ...]  # Held, Result or a Python scalar
    params: Mapping[str, Any]
    avals: tuple[ShapeDtype, ...]
    origin: str | None
    site: Site | None


class Result(NamedTuple):
    """The ``k``-th result of a staged call, and its buffer."""

    call: StagedCall
    k: int
    buf: Any


class Refusals:
    """The errors of values that a trace does not have. They end the trace also where the function catches them: its
    program would hold for good what the function does then, and not what it does with values."""

    refusal: TracedValueError | None = None
    errors: Mapping[str, str]
    """``np.geterr()`` around the trace."""

    def refuse(self, text: str) -> NoReturn:
        """Raise the error, and keep it."""
        self.refusal = TracedValueError(text)
        raise self.refusal

    def check_refusals(self) -> None:
        """Raise the error that the function caught."""
        if self.refusal is not None:
            self.refusal.add_note(
                "(the function caught this error, and would do at every call of its program what it does then)"
            )
            raise self.refusal

    def refuse_errstate(self, op: Op) -> None:
        """Raise where ``np.errstate`` asks for errors that it did not ask for around the trace: a run of the program
        would not see it."""
        if any(v in ("raise", "call") and v != self.errors[k] for k, v in np.geterr().items()):
            self.refuse(
                f"[{op.name}] np.errstate inside a function that is traced does not reach the runs of its program: put "
                "it around the call"
            )


class _Trace(Refusals):
    """The program that a traced function writes.

    It also records calls without a traced array. Those on arrays from ``outside`` (closure, module) become entries
    where their results enter the program: as constants they would lose their history, and the gradient of those arrays.
    """

    # Arrays that the function reads from around it are values of the program, and never only numbers (arrays.nested).
    lifts = True

    def __init__(self, outside: Iterable[Array] = (), known: Iterable[int] = ()) -> None:
        self.builder = ProgramBuilder()
        self.lifted: dict[tuple[int, int], Lifted] = {}
        # By id of the Array, and by id of the buffer for its aliases; all of them are held, so that ids stay their own.
        floats = [x for x in outside if is_differentiable(x.dtype)]
        self.outside = {id(x): x for x in floats} | {id(x._buf): x for x in reversed(floats)}
        self.outside_bufs = [x._buf for x in floats]
        self.results: dict[int, Result] = {}  # by id of the buffer
        self.detached: dict[int, Held] = {}  # by id of the Array
        self.staged_vars: dict[int, tuple[int, ...]] = {}
        self.gradients: list[tuple[int, int]] = []  # of what, and which
        self.open = True
        self.has_calls = self.own_derivatives = False
        self.errors = np.geterr()
        self.changed: str | None = None  # where the function left something else than it read
        self.logged: str | None = None  # a log that the function wrote to
        # Numbers of the call that is traced: those that the program is given, and those that it holds for alone.
        self.leaves: Sequence[Any] = ()
        self.numbers: dict[Any, int] = {}
        self.pinned: frozenset[int] = frozenset()
        self.stand_ins: list[weakref.ref[Any]] = []
        # Of what is neither traced, nor known by id to be read from around the function, nor seen to be made inside.
        self.known = set(known)
        # Arrays and their buffers by id, and how to see that they are still these.
        self.made: dict[int, Callable[[], Any]] = {}
        self.strangers: dict[int, tuple[Any, Site | None]] = {}  # by id; they are held, so that ids stay their own

    def note_call(self, outs: Sequence[Array], own: bool) -> None:
        """Called where the function makes a call that tapes record as one (``checkpoint``, ``custom_vjp``,
        ``gradient_hook``)."""
        self.has_calls = True
        self.own_derivatives |= own

    def note_gradients(self, sources: Sequence[Any], grads: Sequence[Any]) -> None:
        """Called for gradients that the function has computed."""
        pairs = [(s._buf, g._buf) for s, g in zip(sources, grads, strict=True) if g is not None]
        self.gradients += [(s.var, g.var) for s, g in pairs if isinstance(s, Tracer) and isinstance(g, Tracer)]

    # ----- arrays of unknown origin -----------------------------------------------------------------------------------

    def note_made(self, x: Array, of: Any) -> None:
        """Called where an array is made of a NumPy array, or of nothing."""
        self._made(x)
        if isinstance(of, np.ndarray):
            of = memory(of)
            if id(of) not in self.known:
                self.strangers.setdefault(id(of), (of, call_site()))

    def _made(self, x: Array) -> None:
        buf = x._buf
        self.made[id(x)] = weakref.ref(x)
        # (A buffer without weak references is held.)
        self.made[id(buf)] = weakref.ref(buf) if isinstance(buf, np.ndarray) else lambda: buf

    def _is_made(self, x: Any) -> bool:
        ref = self.made.get(id(x))
        return ref is not None and ref() is x

    def note_moved(self, x: Array, old: Any) -> None:
        """Called where the result of a call, which had the buffer ``old``, has another of the same values."""
        self._made(x)
        known = self.detached.get(id(x))
        if known is None or known.buf is not old:
            source = self._source(wrap(old))
            if self._has_history(source):
                call = StagedCall(ALIAS, (source,), NO_PARAMS, argument_avals((x,)), state.origin, call_site())
                self.results[id(x._buf)] = Result(call, 0, x._buf)

    def note_read(self, x: Array) -> None:
        """Called where an array that is not traced takes part in a call, or is turned into numbers."""
        buf = x._buf
        if isinstance(buf, Tracer) or id(x) in self.known or id(buf) in self.known:
            return
        if not self._is_made(x) and not self._is_made(buf):
            site = call_site()
            self.strangers.setdefault(id(x), (x, site))
            self.strangers.setdefault(id(buf), (buf, site))

    # ----- calls without a traced array -------------------------------------------------------------------------------

    def watches(self, x: Array) -> bool:
        return False

    def record(
        self, op: Op, args: tuple[Any, ...], bufs: Sequence[Any], outs: tuple[Array, ...], params: Mapping[str, Any]
    ) -> None:
        check_unwritten(op, args, bufs)
        for a in args:
            if isinstance(a, Array):
                self.note_read(a)
        if any(isinstance(o._buf, Tracer) for o in outs):
            return
        for o in outs:
            self._made(o)
        sources = tuple(self._source(a) if isinstance(a, Array) else a for a in args)
        if op.nondifferentiable or not any(map(self._has_history, sources)):
            self.note_cut(outs)
            return
        call = StagedCall(op, sources, params, argument_avals(outs), state.origin, call_site())
        taken = {id(s.buf) for s in sources if type(s) in (Held, Result)}
        for k, o in enumerate(outs):
            if id(o._buf) not in taken:  # an alias is what it is an alias of
                self.results[id(o._buf)] = Result(call, k, o._buf)

    def note_cut(self, outs: Sequence[Array]) -> None:
        """Called for constants. They may have the buffers of what they were cut off from, as those of stop_gradient
        have, and must not be taken for it."""
        self.detached.update((id(o), Held(o, o._buf)) for o in outs if self._has_history(self._source(wrap(o._buf))))

    def _has_history(self, source: Any) -> bool:
        return type(source) is Result or (type(source) is Held and id(source.array) in self.outside)

    def _source(self, x: Array) -> Held | Result:
        """The source of an array that is not traced: the array with its buffer, or the result of a staged call."""
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

    def number(self, made: Any, device: Any) -> Array:
        """A Python number as an input, which comes after those that are arrays."""
        aval = ShapeDtype((), made.dtype)
        if made not in self.numbers:
            self.numbers[made] = self.builder.input(aval)
        return wrap(Tracer(self, self.numbers[made], aval, device, None, None))

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
        self.note_read(x)
        # Arrays that share a buffer are different values to a tape.
        key = (id(x), id(buf))
        known = self.lifted.get(key)
        if known is None:
            aval = ShapeDtype(tuple(buf.shape), buf.dtype)
            known = self.lifted[key] = Lifted(self.builder.constant(buf, aval), x, buf)
        return known.var

    def require_open(self) -> None:
        if not self.open:
            raise TracedValueError(
                "an array that was traced by mt.compile is used after the function returned, where it has no value: "
                "return it from the function instead of keeping it aside"
            )

    def emit(self, op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[Tracer, ...]:
        self.require_open()
        self.refuse_errstate(op)
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
