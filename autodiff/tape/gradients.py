"""Argument handling shared by ``grad`` and ``vjp``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.dispatch import apply, number, wrap
from ...arrays.core.errors import DTypeError, GradientError
from ...arrays.core.op import state
from ...arrays.interface.writing import settled
from ...arrays.ops.creation import asarray, zeros_like
from ...arrays.ops.elementwise import ALIAS
from .backward import same_value
from .hidden import foreign_text, hides_arrays, is_foreign
from .tape import Tape, is_differentiable, noted


def is_integer(x: Any) -> bool:
    """Whether a leaf is a Python integer. (True and False are flags, as texts are, and no parameters.)"""
    return isinstance(x, int) and not isinstance(x, bool)


def real(x: Any) -> Any:
    """An argument for differentiation: a Python integer becomes a float. (One in a tree is no parameter.)"""
    x = number(x)
    return float(x) if is_integer(x) else x


def own(x: Any) -> Any:
    """A number as an Array of its own: an array passed twice gets two gradients."""
    if type(x) is Array and not state.recorders:
        return wrap(settled(x))
    x = number(x)
    return apply(ALIAS, (asarray(x),)) if isinstance(x, Array | float | complex | np.ndarray | np.generic) else x


def watched(tape: Tape, leaves: Sequence[Any]) -> list[Any]:
    """Watch the arrays among the leaves, and keep their values before the function can write to them."""
    tape.watch_values([x for x in leaves if isinstance(x, Array)])
    return [same_value(x) if isinstance(x, Array) else x for x in leaves]


def without_derivatives(x: Any) -> bool:
    """Whether a leaf has no derivatives: integers, booleans, another library's array, an object that hides arrays."""
    if isinstance(x, Array | np.ndarray | np.generic):
        return not is_differentiable(x.dtype)
    return is_integer(x) or is_foreign(type(x)) or hides_arrays(x)


def refuse_underivable(who: str, args: Sequence[Any], positions: Sequence[int], integers: bool = True) -> None:
    """Raise where one of these arguments has a leaf without derivatives: a gradient of None is easily overlooked."""
    for i in positions:
        for path, x in trees.flatten_with_path(args[i]):
            if without_derivatives(x if path else real(x)):
                leaf = f", leaf {trees.path_name(path)}," if path else ""
                if is_foreign(type(x)):
                    raise GradientError(f"[{who}] argument {i}{leaf} {foreign_text(x)}")
                known = isinstance(x, Array | np.ndarray | np.generic)
                if not known and not is_integer(x):
                    raise GradientError(
                        f"[{who}] argument {i}{leaf} is a {type(x).__name__}, which is no tree: its arrays would get no gradient. Make it a "
                        f"dataclass, dict, list or tuple, call mt.tree.register({type(x).__name__}, flatten, unflatten), or pass it as an "
                        "argument that argnums= leaves out or through the closure of the function"
                    )
                if integers:
                    how = ".astype(float)" if known else "float(...)"
                    raise DTypeError(
                        f"[{who}] argument {i}{leaf} is {x.dtype.name if known else type(x).__name__}, which has no derivatives: make it "
                        f"floating with {how}, or pass it as an argument that argnums= leaves out, or through the closure of the function"
                    )


def names_of(sources: Sequence[Any]) -> list[int]:
    return [x._id for x in sources if isinstance(x, Array)]


def loss_and_aux(who: str, out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or len(out) != 2:
        raise GradientError(f"[{who}] with has_aux the function must return (value, aux), got {type(out).__name__}")
    return out


def gradient_or_zeros(x: Any, found: dict[int, Array]) -> Any:
    if not isinstance(x, Array) or not is_differentiable(x.dtype):
        return None
    g = found.get(x._id)
    return zeros_like(x) if g is None else g


def chosen_arguments(who: str, positions: Sequence[int], count: int) -> list[int]:
    """The positions counted from 0, of ``count`` arguments."""
    chosen = [i if i >= 0 else i + count for i in positions]
    if chosen and not 0 <= min(chosen) <= max(chosen) < count:
        wanted = positions[0] if len(positions) == 1 else tuple(positions)
        raise GradientError(f"[{who}] argnums {wanted} for {count} positional argument(s)")
    return chosen


def value_and_gradients(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], chosen: Sequence[int], has_aux: bool
) -> tuple[Any, list[Any]]:
    """The result of ``fn``, and the gradient of its loss with respect to each of the ``chosen`` arguments."""
    full = list(args)
    leaves: list[Any] = []
    places: dict[int, tuple[trees.TreeDef, int, int]] = {}
    for i in chosen:
        if i not in places:
            given, treedef = trees.flatten(real(args[i]))
            mine = [own(x) for x in given]
            if [x for x in mine if without_derivatives(x)]:
                refuse_underivable("grad", args, [i])
            full[i] = trees.unflatten(treedef, mine)
            places[i] = treedef, len(leaves), len(leaves) + len(mine)
            leaves += mine
    tape = Tape()
    with tape:
        sources = watched(tape, leaves)
        out = fn(*full, **kwargs)
    loss = loss_and_aux("grad", out)[0] if has_aux else out
    if not isinstance(loss, Array):
        raise GradientError(f"[grad] the function must return an Array, got {type(loss).__name__}")
    found = tape.backward([loss], [None], names_of(sources))
    grads = noted(sources, [gradient_or_zeros(x, found) for x in sources])
    return out, [trees.unflatten(d, grads[start:stop]) for d, start, stop in [places[i] for i in chosen]]
