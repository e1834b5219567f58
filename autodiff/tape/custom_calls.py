"""Calls that a tape records as one, with a derivative of their own: ``checkpoint`` and ``gradient_hook``, and
`.custom_vjp`.

The ops inside such a call are hidden from the tapes; each tape gets one record in their place, whose plan pulls
cotangents back in its own way. A recorder takes part by a method ``record_call`` beside ``record``; one without it (the
tracer of ``mt.compile``) sees the ops inside as it sees any other.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...arrays.core import tree as trees
from ...arrays.core.array import Array, new_id, next_id
from ...arrays.core.dispatch import apply, call_site, check_unwritten, wrap
from ...arrays.core.errors import GradientError, check_function
from ...arrays.core.op import Op, ShapeDtype, state
from ...arrays.core.program import Const, Site
from ...arrays.ops.elementwise import BARRIER
from .backward import TapeMaker, named, same_value
from .hidden import refuse_hidden
from .record import Recorded, VJPPlan
from .seeds import beside_value


class DifferentiableCall(Protocol):
    """The interface of such a call. A call may have ``expand`` in place of ``pull`` (see ``checkpoint``)."""

    name: str
    nondifferentiable: str | None

    def replay(self, arrays: Sequence[Array]) -> list[Array]:
        """The call repeated on other arrays, seen by the recorders of this thread; results in the same order."""

    def pull(self, r: Recorded, g: tuple[Any, ...], wrapped: bool) -> list[Any]:
        """Cotangents of the watched operands, Arrays where ``wrapped``, else buffers. ``g`` has one for each result."""


class CallPlan(VJPPlan):
    """The plan of a record for a call with its own derivative."""

    __slots__ = ("avals",)

    def __init__(self, op: DifferentiableCall, wanted: tuple[int, ...], avals: Sequence[ShapeDtype]) -> None:
        self.op, self.wanted = op, wanted
        self.avals = avals  # of the watched operands
        self.pulls = self.together = None
        self.single = self.simple = self.takes_sparse = self.moves = self.widens = self.partial = False


@contextmanager
def without_tapes(*instead: Any) -> Iterator[None]:
    """A block whose calls are shown to ``instead``, and not to the recorders that take whole calls."""
    before = state.recorders
    state.recorders = (*instead, *(r for r in before if not hasattr(r, "record_call")))
    try:
        yield
    finally:
        state.recorders = before


def recording_tapes() -> list[Any]:
    return [r for r in state.recorders if hasattr(r, "record_call")]


def note_call_made(outs: Sequence[Array], own: bool = True) -> None:
    """Tell the recorders that see the calls inside that they belong to such a call; ``own``: its derivative is not that
    of these."""
    for r in state.recorders:
        if hasattr(r, "note_call"):
            r.note_call(outs, own)


def record_on(
    call: DifferentiableCall, args: Sequence[Array], outs: Sequence[Array], saved: Sequence[Any], tapes: Sequence[Any]
) -> None:
    site = call_site()
    note_call_made(outs, hasattr(call, "pull"))
    for t in tapes:
        t.record_call(call, args, outs, saved, state.origin, site)


def as_they_are(arrays: Sequence[Array]) -> list[Array]:
    """The present values of arrays, under names that differ from those of later values."""
    for x in arrays:
        new_id(x)
    return [same_value(x) for x in arrays]


class Around:
    """Recorder inside a function: arrays that the function did not make, with their names when it first read them."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self.seen: dict[int, tuple[Array, int]] = {}
        self.own: set[int] = set()
        self.live: set[int] = set()
        self._alive: list[weakref.ref[Array]] = []
        for x in arrays:
            self.note(x)

    def note(self, x: Array) -> None:
        """The function reads this array."""
        if id(x) not in self.own:
            self.seen.setdefault(id(x), (x, new_id(x)))

    def note_made(self, x: Array, of: Any) -> None:
        """The function makes this array, from nothing or from NumPy's."""
        self.own.add(id(x))

    def name_results(self, outs: Sequence[Array], live: bool) -> tuple[int, ...]:
        """The names of results; those that are ``live``, made from watched arrays, are found again while somebody holds
        them."""
        for o in outs:
            o._id = o._id or next_id()
        names = tuple(o._id for o in outs)
        if live:
            self.live.update(names)
            self._alive += map(weakref.ref, outs)
        return names

    def refuse_written(self, where: str, fn: str) -> None:
        """Raise where one was written to: no tape saw the write, and its results would have no gradient."""
        for x, name in self.seen.values():
            if x._id != name:
                raise GradientError(
                    f"[{where}] {fn} wrote in place to an array of shape {x.shape} that it did not make, which the "
                    "tape around it "
                    "cannot see: write to a copy (x = mt.asarray(x, copy=True)), or use x.at[...] and return the result"
                )


# ----- checkpoint -----------------------------------------------------------------------------------------------------


class CheckpointCall(NamedTuple):
    """One call inside a checkpoint: an op on values known by name, or a call of its own."""

    op: Any
    inputs: tuple[Any, ...]
    outputs: tuple[int, ...]
    params: Mapping[str, Any]
    origin: str | None
    site: Site | None


class Region(Around):
    """The recorder inside a checkpoint: it keeps the calls, and none of their values."""

    def __init__(self, tapes: Sequence[Any], arrays: Sequence[Array]) -> None:
        super().__init__(arrays)
        self.tapes = tuple(tapes)
        self.steps: list[CheckpointCall] = []
        self.sources: dict[int, Array] = {}  # what the calls read that none of them made
        self.made: set[int] = set()

    def escaped(self) -> list[Array]:
        """Arrays made from watched ones and still held: results, and those left in objects or lists."""
        return [x for ref in self._alive if (x := ref()) is not None and x._id in self.made]

    def watches(self, x: Array) -> bool:
        return x._id in self.live or any(t.watches(x) for t in self.tapes)

    def record(
        self, op: Op, args: tuple[Any, ...], bufs: Sequence[Any], outs: tuple[Array, ...], params: Mapping[str, Any]
    ) -> None:
        check_unwritten(op, args, bufs)
        live = any(type(a) is Array and self.watches(a) for a in args)
        inputs = tuple(self._name(a) if type(a) is Array else Const(a) for a in args)
        outputs = self.name_results(outs, live and not op.nondifferentiable)
        self.made.update(outputs)
        self.steps.append(CheckpointCall(op, inputs, outputs, params, state.origin, call_site()))

    def record_call(self, call: DifferentiableCall, args: Sequence[Array], outs: Sequence[Array], *rest: Any) -> None:
        self.record(call, tuple(args), (), tuple(outs), {})  # type: ignore[arg-type]

    def _name(self, x: Array) -> int:
        v = new_id(x)
        if v not in self.made:
            self.sources.setdefault(v, same_value(x))
            self.note(x)
        return v


class _Recomputed:
    """The calls of a checkpoint, which the backward pass repeats."""

    name = "checkpoint"
    nondifferentiable = None

    def __init__(self, steps: Sequence[CheckpointCall], inputs: Sequence[int], outputs: Sequence[int]) -> None:
        self.steps, self.inputs, self.outputs = steps, inputs, outputs

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Make the calls, seen by the recorders of this thread."""
        env = dict(zip(self.inputs, arrays, strict=True))
        origin, site = state.origin, state.site
        try:
            for s in self.steps:
                args = tuple(env[a] if type(a) is int else a.value for a in s.inputs)
                state.origin, state.site = origin or s.origin, s.site
                if isinstance(s.op, Op):
                    out = apply(s.op, args, s.params)
                    env.update(zip(s.outputs, out if s.op.nout > 1 else (out,), strict=True))
                else:
                    env.update(zip(s.outputs, s.op.replay(args), strict=True))
        finally:
            state.origin, state.site = origin, site
        return [env[v] for v in self.outputs]

    def replay(self, arrays: Sequence[Array]) -> list[Array]:
        tapes = recording_tapes()
        with without_tapes():
            outs = self.run(arrays)
        for o in outs:
            o._id = o._id or next_id()
        record_on(self, arrays, outs, [a._buf for a in arrays], tapes)
        return outs

    def expand(self, r: Recorded, wrapped: bool, make: TapeMaker) -> tuple[Any, list[Array], list[int]]:
        """The calls made again: the tape that recorded them, their operands, and the results' names on it."""
        # A barrier where others look on: compiled and pending programs share equal calls, and would keep the values of
        # the forward pass alive for these, which is what recomputing them is there to avoid.
        args = [apply(BARRIER, (named(b, v),)) if wrapped else wrap(b) for b, v in zip(r.kept, r.inputs, strict=True)]
        tape = make()
        with tape:
            tape.watch([args[p] for p in r.plan.wanted])
            outs = self.run(args)
        return tape, args, [o._id for o in outs]


def checkpoint(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose intermediate values are not kept for the backward pass, but computed again by it.

    The gradients have the same bits: the backward pass repeats the recorded calls on the same values, so that random
    numbers and captured arrays are the same too. ``fn`` itself runs once. Arguments and results are trees; arrays that
    nobody watches, and other objects, are passed on as they are. Arrays that ``fn`` leaves in an object, a list or a
    closure are differentiated, too.

    Examples
    --------
    >>> block = mt.checkpoint(lambda x: mt.exp(mt.sin(x)))
    >>> plain = mt.grad(lambda x: mt.exp(mt.sin(mt.exp(mt.sin(x)))))(0.0)
    >>> float(mt.grad(lambda x: block(block(x)))(0.0)) == float(plain)
    True
    """

    check_function("checkpoint", fn)

    @functools.wraps(fn, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        tapes = recording_tapes()
        if not tapes:
            note_call_made((), own=False)
            return fn(*args, **kwargs)
        region = Region(tapes, [x for x in trees.flatten((args, kwargs))[0] if isinstance(x, Array)])
        with without_tapes(region):
            result = fn(*args, **kwargs)
        region.refuse_written("checkpoint", "the function")
        leaves = [x for x in trees.flatten(result)[0] if isinstance(x, Array) and x._id in region.made]
        outs = list({x._id: x for x in (*leaves, *region.escaped())}.values())
        needed = {x._id for x in outs}
        steps = []
        for s in reversed(region.steps):
            if not needed.isdisjoint(s.outputs):
                needed.update(a for a in s.inputs if type(a) is int)
                steps.append(s)
        sources = [x for v, x in region.sources.items() if v in needed]
        call = _Recomputed(steps[::-1], [x._id for x in sources], [x._id for x in outs])
        record_on(call, sources, outs, [x._buf for x in sources], tapes)
        return result

    return wrapped


# ----- gradient_hook --------------------------------------------------------------------------------------------------


class _Hooked:
    """The identity, with a function that its cotangent goes through."""

    name = "gradient_hook"
    nondifferentiable = None

    def __init__(self, fn: Callable[[Array], Any]) -> None:
        self.fn = fn

    def replay(self, arrays: Sequence[Array]) -> list[Array]:
        return [gradient_hook(arrays[0], self.fn)]

    def pull(self, r: Recorded, g: tuple[Any, ...], wrapped: bool) -> list[Any]:
        out = run_hook(self.fn, g[0] if wrapped else wrap(np.asarray(g[0]) if isinstance(g[0], np.generic) else g[0]))
        return [out if wrapped else out._buf]


def run_hook(fn: Callable[[Array], Any], g: Array) -> Array:
    """The cotangent after a hook. Raises :class:`GradientError` where its shape has changed."""
    found = fn(same_value(g))  # to which it may write
    if found is None:
        return g
    found = same_value(beside_value("gradient_hook", found, g))
    if found.shape != g.shape:
        raise GradientError(f"[gradient_hook] the hook made {found.shape} of a cotangent of shape {g.shape}")
    return found


def gradient_hook(x: Any, fn: Callable[[Array], Any]) -> Any:
    """``x`` as it is, and on the way back its cotangent through ``fn``.

    ``fn`` gets the complete cotangent of the result, and returns its replacement, or None to leave it: to print, clip
    or reverse a gradient. It runs wherever the gradient is computed: recorded for higher orders, traced by
    ``mt.compile``. For ``x`` a tree, each array has the hook. See also :meth:`Tape.hook`.

    Examples
    --------
    >>> x = mt.asarray([1.0, 2.0])
    >>> mt.grad(lambda x: (mt.gradient_hook(x * x, lambda g: -g)).sum())(x)
    Array([-2., -4.], dtype=float64)
    """

    check_function("gradient_hook", fn)

    def hooked(a: Any) -> Any:
        if not isinstance(a, Array):
            refuse_hidden("gradient_hook", a, "its argument")
            return a
        out = named(a._buf, next_id())
        record_on(_Hooked(fn), [a], [out], [], recording_tapes())
        return out

    return trees.tree_map(hooked, x)
