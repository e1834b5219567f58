"""Calls that a tape records as one, with a derivative of their own: ``checkpoint``, ``custom_vjp`` and ``gradient_hook``.

The ops inside such a call are hidden from the tapes; each tape gets one record in their place, whose recipe pulls cotangents
back in its own way. A recorder takes part by a method ``record_call`` beside ``record``; one without it (the tracer of
``mt.compile``) sees the ops inside as it sees any other.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..arrays import tree as trees
from ..arrays._array import Array, new_id, next_id
from ..arrays._dispatch import apply, call_site, wrap
from ..arrays._op import Op, state
from ..arrays.creation import asarray
from ..arrays.elementwise import BARRIER
from ..arrays.errors import GradientError
from ..arrays.program import Const, Site, site_text
from .backward import Recorded, named, same_value
from .captures import Wrapper
from .recipe import Recipe


class Call(Protocol):
    """What such a call can do; called by the engine. A call may have ``expand`` in place of ``pull`` (see ``checkpoint``)."""

    name: str
    nondifferentiable: str | None

    def again(self, arrays: Sequence[Array]) -> list[Array]:
        """The call made on other arrays, in view of the recorders of this thread; results in the same order."""

    def pull(self, r: Recorded, g: tuple[Any, ...], wrapped: bool) -> list[Any]:
        """Cotangents of the watched operands, Arrays where ``wrapped``, else buffers. ``g`` has one for each result."""


class CallRecipe(Recipe):
    """What the backward pass asks of the recipe of a record, for a call that brings its own derivative."""

    __slots__ = ()

    def __init__(self, op: Call, wanted: tuple[int, ...]) -> None:
        self.op, self.wanted = op, wanted
        self.single, self.together, self.quick, self.decomposed, self.direct = False, None, None, True, False


@contextmanager
def _without_tapes(*instead: Any) -> Iterator[None]:
    """What is computed inside is shown to ``instead``, and not to the recorders that take whole calls."""
    before = state.recorders
    state.recorders = (*instead, *(r for r in before if not hasattr(r, "record_call")))
    try:
        yield
    finally:
        state.recorders = before


def _tapes() -> list[Any]:
    return [r for r in state.recorders if hasattr(r, "record_call")]


def _note(outs: Sequence[Array]) -> None:
    """Tell the recorders that see the calls inside that they belong to a call with a derivative of its own."""
    for r in state.recorders:
        if hasattr(r, "note_call"):
            r.note_call(outs)


def _record(
    call: Call, args: Sequence[Array], outs: Sequence[Array], saved: Sequence[Any], tapes: Sequence[Any]
) -> None:
    site = call_site()
    _note(outs)
    for t in tapes:
        t.record_call(call, args, outs, saved, state.origin, site)


def _as_they_are(arrays: Sequence[Array]) -> list[Array]:
    """The values that arrays have now, under names that tell them from later ones."""
    for x in arrays:
        new_id(x)
    return [same_value(x) for x in arrays]


def _refuse_written(where: str, fn: str, arrays: Sequence[Array], before: Sequence[Array]) -> None:
    """Raise where a function has written to its arguments: no tape saw it, and what is computed from them would have no gradient."""
    for x, old in zip(arrays, before, strict=True):
        if x._id != old._id:
            raise GradientError(
                f"[{where}] {fn} wrote in place to an argument of shape {x.shape}, which the tape around it cannot see: write to "
                "a copy (x = mt.asarray(x, copy=True)), or use x.at[...]"
            )


# ----- checkpoint -----------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One call inside a checkpoint: an op on values known by name, or a call of its own."""

    op: Any
    inputs: tuple[Any, ...]
    outputs: tuple[int, ...]
    params: Mapping[str, Any]
    origin: str | None
    site: Site | None


class Region:
    """The recorder inside a checkpoint: it keeps which calls were made, and none of their values."""

    def __init__(self, tapes: Sequence[Any]) -> None:
        self.tapes = tuple(tapes)
        self.steps: list[Step] = []
        self.sources: dict[int, Array] = {}  # what the calls read that none of them made
        self.made: set[int] = set()
        self.live: set[int] = set()

    def watches(self, x: Array) -> bool:
        return x._id in self.live or any(t.watches(x) for t in self.tapes)

    def record(
        self,
        op: Op,
        args: tuple[Any, ...],
        outs: tuple[Array, ...],
        params: Mapping[str, Any],
        origin: str | None,
        site: Site | None,
    ) -> None:
        live = any(type(a) is Array and self.watches(a) for a in args)
        inputs = tuple(self._name(a) if type(a) is Array else Const(a) for a in args)
        for o in outs:
            o._id = o._id or next_id()
        outputs = tuple(o._id for o in outs)
        self.made.update(outputs)
        if live and not op.nondifferentiable:
            self.live.update(outputs)
        self.steps.append(Step(op, inputs, outputs, params, origin, site))

    def record_call(
        self,
        call: Call,
        args: Sequence[Array],
        outs: Sequence[Array],
        saved: Sequence[Any],
        origin: str | None,
        site: Site | None,
    ) -> None:
        self.record(call, tuple(args), tuple(outs), {}, origin, site)  # type: ignore[arg-type]

    def _name(self, x: Array) -> int:
        v = new_id(x)
        if v not in self.made:
            self.sources.setdefault(v, same_value(x))
        return v


class _Recomputed:
    """The calls of a checkpoint, to be made again by the backward pass."""

    name = "checkpoint"
    nondifferentiable = None

    def __init__(self, steps: Sequence[Step], inputs: Sequence[int], outputs: Sequence[int]) -> None:
        self.steps, self.inputs, self.outputs = steps, inputs, outputs

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """The calls, made in view of the recorders of this thread."""
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
                    env.update(zip(s.outputs, s.op.again(args), strict=True))
        finally:
            state.origin, state.site = origin, site
        return [env[v] for v in self.outputs]

    def again(self, arrays: Sequence[Array]) -> list[Array]:
        tapes = _tapes()
        with _without_tapes():
            outs = self.run(arrays)
        for o in outs:
            o._id = o._id or next_id()
        _record(self, arrays, outs, [a._buf for a in arrays], tapes)
        return outs

    def expand(self, r: Recorded, wrapped: bool) -> tuple[list[tuple[Any, ...]], list[int]]:
        """The calls made again, recorded: records whose operands have the names they had outside, and the results' new names."""
        from .tape import Tape

        # A barrier where others look on: compiled and pending programs share equal calls, and would keep the values of the
        # forward pass alive for these, which is what recomputing them is there to avoid.
        args = [apply(BARRIER, (named(b, v),)) if wrapped else wrap(b) for b, v in zip(r.saved, r.inputs, strict=True)]
        tape = Tape()
        with tape:
            tape.watch([args[p] for p in r.recipe.wanted])
            outs = self.run(args)
        # Under their outside names cotangents are summed in the order of the plain backward pass: equal to the bit.
        outside = {args[p]._id: v for p, (v, _, _) in zip(r.recipe.wanted, r.operands, strict=True)}
        records = [(recipe, _renamed(operands, outside), *rest) for recipe, operands, *rest in tape._records]
        return records, [o._id for o in outs]


def _renamed(operands: Any, names: Mapping[int, int]) -> Any:
    """The operands of a record under other names."""
    if type(operands) is int:
        return names.get(operands, operands)
    if type(operands[0]) is int:
        return tuple([names.get(v, v) for v in operands])
    return tuple([(names.get(v, v), shape, dtype) for v, shape, dtype in operands])


def checkpoint(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose intermediate values are not kept for the backward pass, but computed again by it.

    The gradients are the same, to the bit: what is repeated are the calls that were made, on the very values that they were
    made on, so that random numbers, and arrays that ``fn`` reads from around it, are the same too. ``fn`` itself runs once.
    Arguments and results are trees; arrays that nobody watches, and other objects, are passed on as they are.

    Examples
    --------
    >>> import meshtape as mt
    >>> block = mt.checkpoint(lambda x: mt.exp(mt.sin(x)))
    >>> float(mt.grad(lambda x: block(block(x)))(0.0)) == float(mt.grad(lambda x: mt.exp(mt.sin(mt.exp(mt.sin(x)))))(0.0))
    True
    """

    @functools.wraps(fn, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        tapes = _tapes()
        if not tapes:
            _note(())
            return fn(*args, **kwargs)
        region = Region(tapes)
        given = [x for x in trees.flatten((args, kwargs))[0] if isinstance(x, Array)]
        before = _as_they_are(given)
        with _without_tapes(region):
            result = fn(*args, **kwargs)
        _refuse_written("checkpoint", "the function", given, before)
        leaves = [x for x in trees.flatten(result)[0] if isinstance(x, Array) and x._id in region.made]
        outs = list({x._id: x for x in leaves}.values())
        needed = {x._id for x in outs}
        steps = []
        for s in reversed(region.steps):
            if not needed.isdisjoint(s.outputs):
                needed.update(a for a in s.inputs if type(a) is int)
                steps.append(s)
        sources = [x for v, x in region.sources.items() if v in needed]
        call = _Recomputed(steps[::-1], [x._id for x in sources], [x._id for x in outs])
        _record(call, sources, outs, [x._buf for x in sources], tapes)
        return result

    return wrapped


# ----- custom_vjp -----------------------------------------------------------------------------------------------------


class _Guard:
    """The recorder inside a function with a derivative of its own: what that derivative cannot know of is refused."""

    def __init__(self, name: str, tapes: Sequence[Any], args: Sequence[Array]) -> None:
        self.name, self.tapes = name, tapes
        self.known = {new_id(a) for a in args}

    def note_call(self, outs: Sequence[Array]) -> None:
        self.known.update(o._id for o in outs)

    def watches(self, x: Array) -> bool:
        return any(t.watches(x) for t in self.tapes)

    def record(
        self,
        op: Op,
        args: tuple[Any, ...],
        outs: tuple[Array, ...],
        params: Mapping[str, Any],
        origin: str | None,
        site: Site | None,
    ) -> None:
        for a in args:
            if type(a) is Array and a._id not in self.known and self.watches(a) and not op.nondifferentiable:
                raise GradientError(
                    f"[custom_vjp] {self.name} reads a watched array of shape {a.shape} from around it (by {op.name}, at "
                    f"{site_text(site)}), which its own derivative cannot know of: pass it as an argument, or take "
                    "mt.stop_gradient of it"
                )
        for o in outs:
            o._id = o._id or next_id()
            self.known.add(o._id)


class _Custom:
    """One call of a function with a derivative of its own."""

    nondifferentiable = None

    def __init__(
        self, owner: custom_vjp, args_def: trees.TreeDef, leaves: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.owner, self.args_def, self.kwargs = owner, args_def, kwargs
        self.name = owner.__name__
        # Everything but the arrays: what a record saves is up to the tape.
        self.leaves = [_ARRAY if isinstance(x, Array) else x for x in leaves]
        self.out_def: trees.TreeDef | None = None
        self.statics: list[Any] = []  # what stands among the results beside arrays
        self.residuals: tuple[trees.TreeDef, list[Any]] | None = None

    def again(self, arrays: Sequence[Array]) -> list[Array]:
        given = iter(arrays)
        args = trees.unflatten(self.args_def, [next(given) if x is _ARRAY else x for x in self.leaves])
        return [x for x in trees.flatten(self.owner(*args, **self.kwargs))[0] if isinstance(x, Array)]

    def pull(self, r: Recorded, g: tuple[Any, ...], wrapped: bool) -> list[Any]:
        residual_def, residual_leaves = self.residuals  # type: ignore[misc]
        # All that the function gets is its own: it may write to it, and be called again.
        kept = iter([same_value(b) if isinstance(b, Array) else wrap(b) for b in r.saved])
        residuals = trees.unflatten(residual_def, [next(kept) if x is _ARRAY else _own(x) for x in residual_leaves])
        cots = iter([same_value(c) if wrapped else wrap(np.asarray(c) if isinstance(c, np.generic) else c) for c in g])
        seed = trees.unflatten(self.out_def, [next(cots) if x is _ARRAY else None for x in self.statics])
        found = self.owner._backward(residuals, seed)  # type: ignore[misc]
        return _as_cotangents(self, found, r, wrapped)


def _own(x: Any) -> Any:
    """A copy of a NumPy array, whose owner may write to it; all else as it is."""
    return x.copy() if isinstance(x, np.ndarray) else x


def _as_cotangents(call: _Custom, found: Any, r: Recorded, wrapped: bool) -> list[Any]:
    wanted = r.recipe.wanted
    children = call.args_def.children
    if not isinstance(found, tuple) or len(found) != len(children):
        shown = f"{len(found)} of them" if isinstance(found, tuple) else type(found).__name__
        raise GradientError(
            f"[custom_vjp] the backward function of {call.name} must return a tuple of {len(children)} cotangents, one for "
            f"each positional argument, got {shown}"
        )
    leaves: list[Any] = []
    for i, (child, cot) in enumerate(zip(children, found, strict=True)):
        given = [None] * child.size if cot is None else trees.flatten(cot, is_leaf=lambda x: x is None)[0]
        if len(given) != child.size:
            raise GradientError(
                f"[custom_vjp] the backward function of {call.name} returned {len(given)} cotangent(s) for argument {i}, "
                f"which has {child.size} leaves"
            )
        leaves += given
    arrays = [c for c, x in zip(leaves, call.leaves, strict=True) if x is _ARRAY]
    out = [None if arrays[p] is None else same_value(asarray(arrays[p])) for p in wanted]
    results = {a.shape for a in r.out_avals or ()}
    for g, p, (_, shape, dtype) in zip(out, wanted, r.operands, strict=True):
        if g is None:
            continue
        # (The broadcasting of a result is undone where all cotangents are: in `backward.fit`.)
        if g.shape != shape and not (g.shape in results and np.broadcast_shapes(g.shape, shape) == g.shape):
            raise GradientError(
                f"[custom_vjp] the backward function of {call.name} returned a cotangent of shape {g.shape} for array {p} of the "
                f"arguments, which has shape {shape}"
            )
        if g.dtype.kind == "c" and dtype.kind != "c":
            raise GradientError(
                f"[custom_vjp] the backward function of {call.name} returned a {g.dtype.name} cotangent for array {p} of the "
                f"arguments, which is {dtype.name}: the cotangent of a real number is real, take mt.real of it"
            )
    return out if wrapped else [None if c is None else c._buf for c in out]


class custom_vjp(Wrapper):  # a decorator, used like a function
    """A function whose derivative is given by hand.

    Used as a decorator; ``defvjp(forward, backward)`` declares the derivative. ``forward(*args)`` returns ``(value, residuals)``;
    ``backward(residuals, cotangent)`` returns a tuple with one cotangent (a tree like the argument, or None for zero) for each
    positional argument. Both are written with ordinary functions, which are recorded: derivatives of higher order are those of
    ``backward`` and of the residuals. Keyword arguments are passed on and have no derivative.

    A function that reads a watched array from around it is refused, as its derivative could not know of it.

    Examples
    --------
    >>> import meshtape as mt
    >>> @mt.custom_vjp
    ... def log1pexp(x):
    ...     return mt.log1p(mt.exp(x))
    >>> log1pexp.defvjp(lambda x: (log1pexp(x), x), lambda x, g: (g * (1.0 - 1.0 / (1.0 + mt.exp(x))),))
    >>> float(mt.grad(log1pexp)(1000.0))
    1.0
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._forward: Callable[..., Any] | None = None
        self._backward: Callable[..., Any] | None = None
        self.__name__ = getattr(fn, "__name__", "the function")
        functools.update_wrapper(self, fn, updated=())

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """Declare the derivative."""
        self._forward, self._backward = forward, backward

    def functions(self) -> list[Callable[..., Any]]:
        return [f for f in (self._fn, self._forward, self._backward) if f is not None]

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: the object is the first argument, as for any function."""
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._forward is None:
            raise GradientError(
                f"[custom_vjp] {self.__name__} has no derivative yet: call its defvjp(forward, backward)"
            )
        tapes = _tapes()
        leaves, args_def = trees.flatten(args)
        if not tapes:
            _note(())
            return self._fn(*args, **kwargs)
        given = [x for x in leaves if isinstance(x, Array)]
        arrays = _as_they_are(given)
        call = _Custom(self, args_def, leaves, kwargs)
        # A single tape never looks at its own backward pass, so that it needs nothing of the forward function. Of several, any
        # may differentiate the residuals, which it must have seen come about. A forward function that calls this one again
        # does so with one tape fewer each time.
        inner = self in _active.owners
        shown = tapes if len(tapes) > 1 and not inner else tapes[:-1]
        before = _active.owners
        _active.owners = (*before, self)
        try:
            with _without_tapes(_Guard(self.__name__, tapes, arrays), *shown):
                made = self._forward(*args, **kwargs)
        finally:
            _active.owners = before
        _refuse_written("custom_vjp", f"the forward function of {self.__name__}", given, arrays)
        if not isinstance(made, tuple) or len(made) != 2:
            raise GradientError(
                f"[custom_vjp] the forward function of {self.__name__} must return (value, residuals), got "
                f"{type(made).__name__}"
            )
        values, call.out_def = trees.flatten(made[0])
        residuals, residual_def = trees.flatten(made[1])
        call.statics = [_ARRAY if isinstance(x, Array) else x for x in values]
        call.residuals = residual_def, [_ARRAY if isinstance(x, Array) else _own(x) for x in residuals]
        # The results are values of their own, also where the function handed an argument on.
        fresh = [named(x._buf, next_id()) if isinstance(x, Array) else x for x in values]
        saved = [same_value(x) for x in residuals if isinstance(x, Array)]
        _record(call, arrays, [x for x in fresh if isinstance(x, Array)], saved, tapes)
        return trees.unflatten(call.out_def, fresh)

    def __repr__(self) -> str:
        return f"custom_vjp({self.__name__})"


class _Active(threading.local):
    owners: tuple[custom_vjp, ...] = ()


_active = _Active()
"""The functions whose forward function this thread is in."""

_ARRAY = object()


# ----- gradient_hook --------------------------------------------------------------------------------------------------


class _Hooked:
    """The identity, with a function that its cotangent goes through."""

    name = "gradient_hook"
    nondifferentiable = None

    def __init__(self, fn: Callable[[Array], Any]) -> None:
        self.fn = fn

    def again(self, arrays: Sequence[Array]) -> list[Array]:
        return [gradient_hook(arrays[0], self.fn)]

    def pull(self, r: Recorded, g: tuple[Any, ...], wrapped: bool) -> list[Any]:
        out = run_hook(self.fn, g[0] if wrapped else wrap(np.asarray(g[0]) if isinstance(g[0], np.generic) else g[0]))
        return [out if wrapped else out._buf]


def run_hook(fn: Callable[[Array], Any], g: Array) -> Array:
    """What a hook makes of a cotangent. Raises :class:`GradientError` where that has another shape."""
    found = fn(same_value(g))  # to which it may write
    if found is None:
        return g
    found = same_value(asarray(found))
    if found.shape != g.shape:
        raise GradientError(f"[gradient_hook] the hook made {found.shape} of a cotangent of shape {g.shape}")
    return found


def gradient_hook(x: Any, fn: Callable[[Array], Any]) -> Any:
    """``x`` as it is, and on the way back its cotangent through ``fn``.

    ``fn`` gets the whole cotangent of the result, once it is known, and returns what is to take its place, or None to leave it:
    to print a gradient, to clip it, to reverse it. It runs wherever the gradient is computed: recorded for higher orders, traced
    by ``mt.compile``. For ``x`` a tree, each array has the hook. See also :meth:`Tape.hook`.

    Examples
    --------
    >>> import meshtape as mt
    >>> x = mt.asarray([1.0, 2.0])
    >>> mt.grad(lambda x: (mt.gradient_hook(x * x, lambda g: -g)).sum())(x)
    Array([-2., -4.], dtype=float64)
    """

    def hooked(a: Any) -> Any:
        if not isinstance(a, Array):
            return a
        out = named(a._buf, next_id())
        _record(_Hooked(fn), [a], [out], [], _tapes())
        return out

    return trees.tree_map(hooked, x)


__all__ = ["checkpoint", "custom_vjp", "gradient_hook"]
