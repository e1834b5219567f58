"""``custom_vjp``: a function with a derivative that its author writes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays.core import tree as trees
from ...arrays.core.array import Array, new_id, next_id
from ...arrays.core.dispatch import call_site, check_unwritten, wrap
from ...arrays.core.errors import GradientError, NonDifferentiableError, check_function
from ...arrays.core.op import Op
from ...arrays.core.program import site_text
from .backward import named, same_value
from .custom_calls import Around, as_they_are, note_call_made, record_on, recording_tapes, without_tapes
from .function_wrapper import Wrapper
from .hidden import refuse_hidden
from .record import Recorded
from .seeds import beside_value


class _Guard(Around):
    """The recorder inside a function with a derivative of its own: refuses arrays that this derivative misses."""

    def __init__(self, name: str, tapes: Sequence[Any], args: Sequence[Array], given: Sequence[Array]) -> None:
        super().__init__(given)
        self.name, self.tapes = name, tapes
        self.known = {new_id(a) for a in args}

    def left(self, returned: Sequence[Any]) -> list[Array]:
        """Arrays made from watched ones, still held but not returned: the function left them in an object or a list."""
        known = {id(x) for x in returned}
        return [x for ref in self._alive if (x := ref()) is not None and id(x) not in known and x._id in self.live]

    def note_call(self, outs: Sequence[Array], own: bool) -> None:
        self.known.update(o._id for o in outs)

    def watches(self, x: Array) -> bool:
        return any(t.watches(x) for t in self.tapes)

    def record(
        self, op: Op, args: tuple[Any, ...], bufs: Sequence[Any], outs: tuple[Array, ...], params: Mapping[str, Any]
    ) -> None:
        check_unwritten(op, args, bufs)
        for a in args:
            if type(a) is Array and a._id not in self.known and self.watches(a) and not op.nondifferentiable:
                raise GradientError(
                    f"[custom_vjp] {self.name} reads a watched array of shape {a.shape} from around it (by {op.name}, "
                    f"at {site_text(call_site())}), which its own derivative cannot know of: pass it as an argument, "
                    "or take mt.stop_gradient of it"
                )
            if type(a) is Array and a._id not in self.known:
                self.note(a)
        live = not op.nondifferentiable and any(
            type(a) is Array and (a._id in self.live or self.watches(a)) for a in args
        )
        self.known.update(self.name_results(outs, live))


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

    def replay(self, arrays: Sequence[Array]) -> list[Array]:
        given = iter(arrays)
        args = trees.unflatten(self.args_def, [next(given) if x is _ARRAY else x for x in self.leaves])
        return [x for x in trees.flatten(self.owner(*args, **self.kwargs))[0] if isinstance(x, Array)]

    def pull(self, r: Recorded, g: tuple[Any, ...], wrapped: bool) -> list[Any]:
        residual_def, residual_leaves = self.residuals  # type: ignore[misc]
        # All that the function gets is its own: it may write to it, and be called again.
        kept = iter([same_value(b) if isinstance(b, Array) else wrap(b) for b in r.kept])
        residuals = trees.unflatten(residual_def, [next(kept) if x is _ARRAY else _own(x) for x in residual_leaves])
        given = [same_value(c) if wrapped else wrap(np.asarray(c) if isinstance(c, np.generic) else c) for c in g]
        cots = iter(given)
        seed = trees.unflatten(self.out_def, [next(cots) if x is _ARRAY else None for x in self.statics])
        found = self.owner._backward(residuals, seed)  # type: ignore[misc]
        return _as_cotangents(self, found, r, wrapped, given[0])


class _Left:
    """Arrays that a forward function left in an object, where no derivative leads to them."""

    nondifferentiable = None

    def __init__(self, name: str, arrays: Sequence[Array]) -> None:
        self.name, self.arrays = name, arrays

    def replay(self, arrays: Sequence[Array]) -> list[Array]:
        outs = [named(x._buf, next_id()) for x in self.arrays]
        record_on(self, arrays, outs, [], recording_tapes())
        return outs

    def pull(self, r: Recorded, g: tuple[Any, ...], wrapped: bool) -> list[Any]:
        raise NonDifferentiableError(
            f"[custom_vjp] the forward function of {self.name} left an array in an object, and the result depends on "
            "it, of which its own "
            "derivative cannot know: return the array as part of the value, or take mt.stop_gradient of it"
        )


def _own(x: Any) -> Any:
    """A copy of a NumPy array, whose owner may write to it; all else as it is."""
    return x.copy() if isinstance(x, np.ndarray) else x


def _as_cotangents(call: _Custom, found: Any, r: Recorded, wrapped: bool, like: Array) -> list[Any]:
    wanted = r.plan.wanted
    children = call.args_def.children
    if not isinstance(found, tuple) or len(found) != len(children):
        shown = f"{len(found)} of them" if isinstance(found, tuple) else type(found).__name__
        raise GradientError(
            f"[custom_vjp] the backward function of {call.name} must return a tuple of {len(children)} cotangents, one "
            f"for each positional argument, got {shown}"
        )
    leaves: list[Any] = []
    for i, (child, cot) in enumerate(zip(children, found, strict=True)):
        given = [None] * child.size if cot is None else trees.flatten(cot, is_leaf=lambda x: x is None)[0]
        if len(given) != child.size:
            raise GradientError(
                f"[custom_vjp] the backward function of {call.name} returned {len(given)} cotangent(s) for argument "
                f"{i}, which has {child.size} leaves"
            )
        leaves += given
    arrays = [c for c, x in zip(leaves, call.leaves, strict=True) if x is _ARRAY]
    out = [None if arrays[p] is None else same_value(beside_value("custom_vjp", arrays[p], like)) for p in wanted]
    results = {a.shape for a in r.out_avals or ()}
    for g, p, (shape, dtype) in zip(out, wanted, r.plan.avals, strict=True):
        if g is None:
            continue
        # (The broadcasting of a result is undone where all cotangents are: in `backward.fit`.)
        if g.shape != shape and not (g.shape in results and np.broadcast_shapes(g.shape, shape) == g.shape):
            raise GradientError(
                f"[custom_vjp] the backward function of {call.name} returned a cotangent of shape {g.shape} for array "
                f"{p} of the arguments, which has shape {shape}"
            )
        if g.dtype.kind == "c" and dtype.kind != "c":
            raise GradientError(
                f"[custom_vjp] the backward function of {call.name} returned a {g.dtype.name} cotangent for array {p} "
                f"of the arguments, which is {dtype.name}: the cotangent of a real number is real, take mt.real of it"
            )
    return out if wrapped else [None if c is None else c._buf for c in out]


class custom_vjp(Wrapper):  # a decorator, used like a function
    """A function whose derivative is given by hand.

    Used as a decorator; ``defvjp(forward, backward)`` declares the derivative. ``forward(*args)`` returns ``(value,
    residuals)``; ``backward(residuals, cotangent)`` returns a tuple with one cotangent (a tree like the argument, or
    None for zero) for each positional argument. Both are written with ordinary functions, which are recorded:
    derivatives of higher order are those of ``backward`` and of the residuals. Keyword arguments are passed on and have
    no derivative.

    A function that reads a watched array from around it is refused, as its derivative could not know of it.

    Examples
    --------
    >>> @mt.custom_vjp
    ... def log1pexp(x):
    ...     return mt.log1p(mt.exp(x))
    >>> log1pexp.defvjp(lambda x: (log1pexp(x), x), lambda x, g: (g * (1.0 - 1.0 / (1.0 + mt.exp(x))),))
    >>> float(mt.grad(log1pexp)(1000.0))
    1.0
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        check_function("custom_vjp", fn)
        self._fn = fn
        self._forward: Callable[..., Any] | None = None
        self._backward: Callable[..., Any] | None = None
        self.__name__ = getattr(fn, "__name__", "the function")
        functools.update_wrapper(self, fn, updated=())

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """Declare the derivative."""
        for fn in (forward, backward):
            check_function("custom_vjp", fn)
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
        tapes = recording_tapes()
        leaves, args_def = trees.flatten(args)
        if not tapes:
            note_call_made(())
            return self._fn(*args, **kwargs)
        given = [x for x in leaves if isinstance(x, Array)]
        arrays = as_they_are(given)
        call = _Custom(self, args_def, leaves, kwargs)
        # A single tape never looks at its own backward pass, so that it needs nothing of the forward function. Of
        # several, any may differentiate the residuals, which it must have seen come about. A forward function that
        # calls this one again does so with one tape fewer each time.
        inner = self in _active.owners
        shown = tapes if len(tapes) > 1 and not inner else tapes[:-1]
        before = _active.owners
        _active.owners = (*before, self)
        guard = _Guard(self.__name__, tapes, arrays, given)
        try:
            with without_tapes(guard, *shown):
                made = self._forward(*args, **kwargs)
        finally:
            _active.owners = before
        guard.refuse_written("custom_vjp", f"the forward function of {self.__name__}")
        if not isinstance(made, tuple) or len(made) != 2:
            raise GradientError(
                f"[custom_vjp] the forward function of {self.__name__} must return (value, residuals), got "
                f"{type(made).__name__}"
            )
        refuse_hidden("custom_vjp", made[0])
        values, call.out_def = trees.flatten(made[0])
        residuals, residual_def = trees.flatten(made[1])
        call.statics = [_ARRAY if isinstance(x, Array) else x for x in values]
        call.residuals = residual_def, [_ARRAY if isinstance(x, Array) else _own(x) for x in residuals]
        # The results are values of their own, also where the function handed an argument on.
        fresh = [named(x._buf, next_id()) if isinstance(x, Array) else x for x in values]
        saved = [same_value(x) for x in residuals if isinstance(x, Array)]
        record_on(call, arrays, [x for x in fresh if isinstance(x, Array)], saved, tapes)
        left = guard.left([*values, *residuals])
        hidden = [t for t in tapes if all(t is not s for s in shown)]  # the others saw how they were made
        if left and hidden:
            record_on(_Left(self.__name__, left), arrays, left, [], hidden)
        return trees.unflatten(call.out_def, fresh)

    def __repr__(self) -> str:
        return f"custom_vjp({self.__name__})"


class _Active(threading.local):
    owners: tuple[custom_vjp, ...] = ()


_active = _Active()
"""The functions whose forward function this thread is running."""

_ARRAY = object()
