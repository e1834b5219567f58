"""Functions of functions: gradients, products with Jacobians, and the check of both.

All of them nest to any order and take trees of arrays wherever they take an array.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arrays.core import tree as trees
from ..arrays.core.array import Array, next_id
from ..arrays.core.dispatch import apply, number, wrap
from ..arrays.core.errors import DTypeError, GradientError, check_function
from ..arrays.core.op import call_beside, state
from ..arrays.interface.writing import settled
from ..arrays.ops.creation import asarray, zeros_like
from ..arrays.ops.elementwise import ALIAS
from .tape.backward import same_value
from .tape.hidden import foreign_text, hides_arrays, is_foreign, refuse_hidden
from .tape.seeds import beside_value
from .tape.tape import Tape, is_differentiable, noted


def is_integer(x: Any) -> bool:
    """Whether a leaf is a Python integer. (True and False are flags, as texts are, and no parameters.)"""
    return isinstance(x, int) and not isinstance(x, bool)


def real(x: Any) -> Any:
    """An argument for differentiation: a Python integer becomes a float. (One in a tree is no parameter.)"""
    if type(x) is Array:
        return x
    x = number(x)
    return float(x) if is_integer(x) else x


def own(x: Any) -> Any:
    """A number as an Array of its own: an array passed twice gets two gradients."""
    if type(x) is Array and not state.recorders:
        buf = x._buf
        return wrap(buf if type(buf) is np.ndarray else settled(x))
    x = number(x)
    return apply(ALIAS, (asarray(x),)) if isinstance(x, Array | float | complex | np.ndarray | np.generic) else x


def owned(leaves: Sequence[Any], around: Any) -> list[Any]:
    """:func:`own` of each; numbers, and arrays of NumPy, beside the first Array of the tree ``around``."""
    if "cupy" not in sys.modules:
        return list(map(own, leaves))
    return call_beside(lambda *_: list(map(own, leaves)), tuple(trees.flatten(around)[0]), {})


def watched(tape: Tape, leaves: Sequence[Any]) -> list[Any]:
    """Watch the arrays among the leaves, and keep their values before the function can write to them."""
    sources = list(leaves)
    for i, x in enumerate(leaves):
        if isinstance(x, Array):
            name = x._id = x._id or next_id()
            tape.follow(name, x._buf)
            sources[i] = same_value(x)
    return sources


def without_derivatives(x: Any) -> bool:
    """Whether a leaf has no derivatives: integers, booleans, another library's array, an object that hides arrays."""
    if type(x) is Array:
        return not is_differentiable(x._buf.dtype)
    if isinstance(x, (np.ndarray, np.generic)):  # (A union of types would be made at each call.)
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
                        f"[{who}] argument {i}{leaf} is a {type(x).__name__}, which is no tree: its arrays would get "
                        "no gradient. Make it a dataclass, dict, list or tuple, call "
                        f"mt.tree.register({type(x).__name__}, flatten, unflatten), or pass it as an argument that "
                        "argnums= leaves out or through the closure of the function"
                    )
                if integers:
                    how = ".astype(float)" if known else "float(...)"
                    raise DTypeError(
                        f"[{who}] argument {i}{leaf} is {x.dtype.name if known else type(x).__name__}, which has no "
                        f"derivatives: make it floating with {how}, or pass it as an argument that argnums= leaves "
                        "out, or through the closure of the function"
                    )


def loss_and_aux(who: str, out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or len(out) != 2:
        raise GradientError(f"[{who}] with has_aux the function must return (value, aux), got {type(out).__name__}")
    return out


def gradients_of(tape: Tape, targets: Sequence[Any], seeds: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
    """The gradients by the sources that :func:`watched` gave: zeros where nothing leads there, None for what has
    none."""
    found = tape.backward(targets, seeds, [x._id for x in sources if isinstance(x, Array)])
    grads = []
    for x in sources:
        g = found.get(x._id) if isinstance(x, Array) else None
        if g is None and isinstance(x, Array) and is_differentiable(x.dtype):
            g = zeros_like(x)
        grads.append(g)
    return noted(sources, grads)


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
            mine = owned(given, (args, kwargs))
            if any(map(without_derivatives, mine)):
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
    grads = gradients_of(tape, [loss], [None], sources)
    found = [places[i] for i in chosen]
    return out, [trees.unflatten(treedef, grads[start:stop]) for treedef, start, stop in found]


def _arrays(tree: Any) -> list[Array]:
    return [x for x in trees.flatten(tree)[0] if isinstance(x, Array)]


def vjp(fn: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Value of ``fn(*primals)``, and the function that pulls cotangents back.

    Returns
    -------
    value, pull[, aux]
        ``pull(cotangent)`` takes a tree like ``value`` and gives one tree for each primal; it can be called again. With
        complex numbers it is ``J^H @ cotangent``, of which the real part is taken for real primals; ``J`` is that of
        :func:`jacobian`. (JAX's ``vjp`` gives ``J^T @ cotangent``.) Integers and booleans among the primals get None.

    Raises
    ------
    DTypeError
        Where all primals are integers or booleans.

    Examples
    --------
    >>> y, pull = mt.vjp(lambda x: x * x, mt.asarray([1.0, 2.0]))
    >>> pull(mt.asarray([1.0, 10.0]))
    (Array([ 2., 40.], dtype=float64),)
    """
    check_function("vjp", fn)
    leaves = trees.flatten(tuple(map(real, primals)))[0]
    if leaves and all(without_derivatives(x) for x in leaves):
        refuse_underivable("vjp", primals, range(len(primals)))
    return _vjp("vjp", fn, primals, has_aux)


def _vjp(who: str, fn: Callable[..., Any], primals: Sequence[Any], has_aux: bool = False) -> Any:
    """:func:`vjp` of any primals."""
    refuse_underivable(who, primals, range(len(primals)), integers=False)
    inputs, in_def = trees.flatten(tuple(map(real, primals)))
    inputs = owned(inputs, inputs)
    tape = Tape(persistent=True)
    with tape:
        sources = watched(tape, inputs)
        out = fn(*trees.unflatten(in_def, inputs))
    out, aux = loss_and_aux("vjp", out) if has_aux else (out, None)
    refuse_hidden(who, out)
    outputs, out_def = trees.flatten(out)
    # Held under their present names: what the caller does to his arrays later is nothing to the tape.
    outputs = [same_value(o) if isinstance(o, Array) else o for o in outputs]

    def pull(cotangent: Any) -> tuple[Any, ...]:
        seeds, seed_def = trees.flatten(cotangent)
        if seed_def != out_def:
            raise GradientError(f"[vjp] the cotangent has structure {seed_def}, the value {out_def}")
        pairs = [
            (o, s)
            for o, s in zip(outputs, seeds, strict=True)
            if isinstance(o, Array) and s is not None and is_differentiable(o.dtype)
        ]
        grads = gradients_of(tape, [o for o, _ in pairs], [s for _, s in pairs], sources)
        return trees.unflatten(in_def, grads)

    return (out, pull, aux) if has_aux else (out, pull)


def argument_positions(who: str, argnums: int | Sequence[int]) -> tuple[int, ...]:
    """The option ``argnums`` as positions. Raises ``TypeError`` that says who was given what instead."""
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if any(type(i) is not int for i in positions):
        raise TypeError(f"[{who}] argnums are positions of arguments, ints, got {argnums!r}")
    return positions


def value_and_grad(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that gives the value of ``fn`` and its gradient.

    Parameters
    ----------
    fn
        Returns an array of one element (with ``has_aux``: that and anything else).
    argnums
        Which positional arguments to differentiate; one tree for an int, a tuple of trees for a sequence.
    has_aux
        ``fn`` returns ``(loss, aux)``; the result is then ``((loss, aux), gradient)``.

    Raises
    ------
    DTypeError
        For arrays of integers or booleans in one of these arguments, and for Python's own ints. (One that is the whole
        argument, as in ``grad(f)(3)``, counts as floating.) Token ids, masks, sizes and counters belong into other
        arguments.
    GradientError
        For an array of another library in one of them: make it an Array with ``mt.asarray``.

    Examples
    --------
    >>> loss = lambda p, x: ((p["w"] * x + p["b"]) ** 2).sum()
    >>> value, grads = mt.value_and_grad(loss)({"w": 2.0, "b": 1.0}, mt.asarray([1.0, 2.0]))
    >>> float(value), float(grads["w"]), float(grads["b"])
    (34.0, 26.0, 16.0)
    """
    check_function("grad", fn)
    positions = argument_positions("grad", argnums)

    @functools.wraps(fn, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        chosen = chosen_arguments("grad", positions, len(args))
        out, grads = value_and_gradients(fn, args, kwargs, chosen, has_aux)
        return out, grads[0] if isinstance(argnums, int) else tuple(grads)

    return wrapped


def grad(fn: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False) -> Callable[..., Any]:
    """A function that gives the gradient of ``fn`` (with ``has_aux``: the gradient and the rest that ``fn`` returned).

    ``fn`` gives a real number. By a complex argument its gradient is ``dL/d(re z) + i dL/d(im z)``, the direction of
    steepest ascent as in PyTorch, and the conjugate of JAX's.

    >>> cube = lambda x: x * x * x
    >>> float(mt.grad(mt.grad(cube))(2.0))
    12.0
    """
    both = value_and_grad(fn, argnums, has_aux=has_aux)

    @functools.wraps(fn, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        out, g = both(*args, **kwargs)
        return (g, out[1]) if has_aux else g

    return wrapped


def jvp(fn: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """Value of ``fn(*primals)`` and its derivative along ``tangents``.

    Among the tangents None stands beside integers, and may stand for zeros.

    The VJP is linear in its cotangent; pulling back through *it* pushes tangents forward, so that no op needs a second
    rule.

    With complex numbers it is ``J @ tangents`` with the ``J`` of :func:`jacobian`, of which the real part is taken
    where the value is real. For functions that are not holomorphic, which have no such ``J``, it is the derivative
    along the tangents just the same.

    >>> y, dy = mt.jvp(lambda x: x * x, [mt.asarray(3.0)], [mt.asarray(2.0)])
    >>> float(y), float(dy)
    (9.0, 12.0)
    """
    check_function("jvp", fn)
    for name, given in (("primals", primals), ("tangents", tangents)):
        if not isinstance(given, tuple | list):
            raise GradientError(
                f"[jvp] {name} must be a tuple or a list with one entry for each argument, got {type(given).__name__}: "
                "write mt.jvp(fn, (x,), (v,))"
            )
    value, pull = _vjp("jvp", fn, primals)
    zeros = trees.tree_map(lambda y: zeros_like(y) if isinstance(y, Array) else y, value)
    pulled, pull_again = _vjp("jvp", pull, [zeros])
    wanted, wanted_def = trees.flatten(pulled, is_leaf=_is_none)
    given, given_def = trees.flatten(tuple(tangents), is_leaf=_is_none)
    if given_def != wanted_def:
        raise GradientError(f"[jvp] the tangents have structure {given_def}, the primals {wanted_def}")
    for (path, t), like in zip(trees.flatten_with_path(tuple(tangents), is_leaf=_is_none), wanted, strict=True):
        if like is None and t is not None:
            raise DTypeError(
                f"[jvp] primal {trees.path_name(path)} has no derivatives, so that its tangent must be None: make it "
                "floating with .astype(float), or pass it through the closure of the function"
            )
    (tangent_out,) = pull_again(trees.unflatten(wanted_def, map(_tangent, wanted, given)))
    return value, tangent_out


def _tangent(like: Array | None, t: Any) -> Array | None:
    """A tangent with the dtype of its primal; integers have none."""
    if like is None or t is None:
        return None if like is None else zeros_like(like)
    return asarray(beside_value("jvp", t, like), dtype=like.dtype)


def _is_none(x: Any) -> bool:
    return x is None


def hvp(fn: Callable[..., Any], x: Any, v: Any) -> Any:
    """Product of the Hessian of a scalar function at ``x`` with ``v``, without the Hessian.

    >>> mt.hvp(lambda x: (x ** 3).sum(), mt.asarray([1.0, 2.0]), mt.asarray([1.0, 1.0]))
    Array([ 6., 12.], dtype=float64)
    """

    check_function("hvp", fn)
    xs, x_def = trees.flatten(real(x))
    vs, v_def = trees.flatten(v)
    if x_def != v_def:
        raise GradientError(f"[hvp] v has structure {v_def}, x {x_def}")
    for a, b in zip(map(_shape, xs), map(_shape, vs), strict=True):
        if a != b:
            raise GradientError(f"[hvp] a direction of shape {b} for an argument of shape {a}")

    refuse_underivable("hvp", [x], [0])
    # The Hessian is symmetric: what the gradient's own derivative pulls back is what it pushes forward.
    leaves = owned(xs, xs)
    tape = Tape()
    with tape:
        sources = watched(tape, leaves)
        slopes = trees.flatten(grad(fn)(trees.unflatten(x_def, leaves)), is_leaf=_is_none)[0]
    pairs = [(g, _tangent(g, t)) for g, t in zip(slopes, vs, strict=True) if g is not None]
    return trees.unflatten(x_def, gradients_of(tape, [g for g, _ in pairs], [t for _, t in pairs], sources))


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(getattr(x, "shape", ()))


def check_grads(
    fn: Callable[..., Any], *primals: Any, order: int = 2, eps: float = 1e-4, rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    """Compare derivatives of ``fn`` with central differences, along random directions, up to ``order``.

    Arguments are float64 or complex128 arrays. Reverse mode is checked against the differences, forward mode against
    reverse.

    Raises
    ------
    AssertionError
        That names the mode and both numbers.
    DTypeError
        For arguments that have no derivatives. (Those of float32 have, but differences see few digits of them.)
    """
    check_function("check_grads", fn)
    if order < 1:
        raise ValueError(f"[check_grads] order must be at least 1, got {order}")
    rng = np.random.default_rng(0)
    points = [np.asarray(p, copy=True) for p in primals]
    for i, p in enumerate(points):
        if not is_differentiable(p.dtype):
            raise DTypeError(f"[check_grads] argument {i} is {p.dtype.name}, which has no derivatives: close over it")

    def direction(like: np.ndarray) -> np.ndarray:
        v = rng.standard_normal(like.shape)
        return v + 1j * rng.standard_normal(like.shape) if like.dtype.kind == "c" else v

    vs = [direction(p) for p in points]

    def value(*xs: Any) -> list[np.ndarray]:
        return [np.asarray(o) for o in _arrays(fn(*map(asarray, xs)))]

    outs = value(*points)
    cots = [direction(o) for o in outs]

    def dot(a: Any, b: Any) -> float:
        return float(np.real(np.vdot(np.asarray(a), np.asarray(b))))

    plus = value(*(p + eps * v for p, v in zip(points, vs, strict=True)))
    minus = value(*(p - eps * v for p, v in zip(points, vs, strict=True)))
    slope = sum(dot(c, (a - b) / (2 * eps)) for c, a, b in zip(cots, plus, minus, strict=True))

    def flat(*xs: Any) -> tuple[Array, ...]:
        return tuple(_arrays(fn(*xs)))

    seeds = tuple(asarray(c.astype(o.dtype)) for c, o in zip(cots, outs, strict=True))
    _, pull = vjp(flat, *map(asarray, points))
    pulled = pull(seeds)
    reverse = sum(dot(v, g) for v, g in zip(vs, pulled, strict=True) if g is not None)
    for p, g in zip(points, pulled, strict=True):
        assert g is None or (g.shape == p.shape and g.dtype == p.dtype), (
            f"gradient {g.shape} {g.dtype} for {p.shape} {p.dtype}"
        )
    np.testing.assert_allclose(reverse, slope, rtol=rtol, atol=atol, err_msg="reverse mode against differences")
    _, tangents = jvp(flat, [asarray(p) for p in points], [asarray(v) for v in vs])
    forward = sum(dot(c, t) for c, t in zip(cots, tangents, strict=True))
    np.testing.assert_allclose(forward, reverse, rtol=rtol, atol=atol, err_msg="forward mode against reverse mode")
    if order > 1:

        def gradient(*xs: Any) -> tuple[Any, ...]:
            _, p = vjp(flat, *xs)
            return p(seeds)

        check_grads(gradient, *points, order=order - 1, eps=eps, rtol=rtol * 10, atol=atol * 10)
