"""Registry of VJP rules: the declaration of the derivative of an op.

A rule maps the cotangent ``g`` of an op's result to the cotangents of its operands (a vector-Jacobian product). Rules
are rows of tables in this package::

    defanalytic(MULTIPLY, x=lambda xp, g, y: g * y, y=lambda xp, g, x: g * x)

A rule may take these arguments after ``xp`` and ``g``, in any order; the tape saves the values of those, and no others:

===============  =======================================================================================
``x``, ``y``, …  the value of that operand (by the names in the op's ``operands``)
``ans``          the value of the result (a tuple of them, where the op has several)
``ans_1``, …     the value of that one of several results, counted from 0
``x_like``       shape and dtype of that operand, as a :class:`~meshtape.arrays.ShapeDtype`
anything else    the op's parameter of that name
===============  =======================================================================================

``xp`` is NumPy or CuPy with raw buffers (first order), or ``meshtape.arrays`` with Arrays (higher orders, traced and
sharded values): a rule uses only what they have in common. A rule never undoes broadcasting and never casts: the engine
does both, in one place. Operands that are Python scalars appear as such.

Convention for complex numbers (that of PyTorch): the cotangent of ``z`` is the gradient ``dL/d(re z) + i dL/d(im z)``
of a real ``L``, hence the conjugates: for a matrix product ``dA = G @ B^H``.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ... import arrays
from ...arrays.chains.chains import as_one_launch
from ...arrays.core.dispatch import SCALARS, apply
from ...arrays.core.dtypes import HALF, float32
from ...arrays.core.op import NO_PARAMS, Op


class Need(NamedTuple):
    """One argument that a rule takes after ``xp`` and ``g``."""

    kind: str  # "operand", "like", "ans", "result", "param"; "rest" and "rest_like" for the operands of a starred name
    where: Any  # position of the operand or result, or name of the parameter


class VJPRule(NamedTuple):
    """VJP functions of an op: one for each operand, or one for all."""

    each: Mapping[int, Callable[..., Any]]
    together: Callable[..., Any] | None
    needs: Mapping[int, tuple[Need, ...]]  # by operand; -1 for `together`
    analytic: bool = False
    partial: bool = False


RULES: dict[Op, VJPRule] = {}
RULES_OF_SHORT: dict[Op, VJPRule] = {}
"""Rules of calls whose results are floats of one or two bytes: where these have lost the digits of the slope."""


def _needs(op: Op, fn: Callable[..., Any]) -> tuple[Need, ...]:
    names = list(inspect.signature(fn).parameters)
    if names[:2] != ["xp", "g"]:
        raise TypeError(f"a rule of {op.name} must take (xp, g, …), got ({', '.join(names)})")
    plain = {n: i for i, n in enumerate(op.operands) if not n.startswith("*")}
    starred = {n[1:]: i for i, n in enumerate(op.operands) if n.startswith("*")}
    out = []
    for n in names[2:]:
        if n == "ans":
            out.append(Need("ans", None))
        elif n.startswith("ans_"):
            out.append(Need("result", int(n[4:])))
        elif n in plain:
            out.append(Need("operand", plain[n]))
        elif n in starred:
            out.append(Need("rest", starred[n]))
        elif n.endswith("_like") and n.removesuffix("_like") in plain:
            out.append(Need("like", plain[n.removesuffix("_like")]))
        elif n.endswith("_like") and n.removesuffix("_like") in starred:
            out.append(Need("rest_like", starred[n.removesuffix("_like")]))
        else:
            out.append(Need("param", n))
    return tuple(out)


def defvjp(op: Op, **by_operand: Callable[..., Any]) -> None:
    """Declare the rule of ``op``, one function an operand. An operand that is left out gets no cotangent."""
    _add(op, _rule_of(op, by_operand))


def defanalytic(op: Op, **by_operand: Callable[..., Any]) -> None:
    """:func:`defvjp` of an op with a complex derivative: the rules are those of real numbers, and get complex values
    conjugated."""
    _add(op, _rule_of(op, by_operand)._replace(analytic=True))


def defvjp_of_short(op: Op, **by_operand: Callable[..., Any]) -> None:
    """The rule of ``op`` for results of one or two bytes, beside its rule of others."""
    RULES_OF_SHORT[op] = _rule_of(op, by_operand)


def _rule_of(op: Op, by_operand: Mapping[str, Callable[..., Any]]) -> VJPRule:
    each, needs = {}, {}
    for name, fn in by_operand.items():
        position = op.operands.index(name)
        # The name appears in tracebacks: "vjp_multiply_x" says more than "<lambda>".
        if isinstance(fn, types.FunctionType) and fn is not same:
            title = f"vjp_{op.name}_{name}"  # of a copy: several ops may have one rule
            code = fn.__code__.replace(co_name=title)
            fn = types.FunctionType(code, fn.__globals__, title, fn.__defaults__, fn.__closure__)
        each[position], needs[position] = fn, _needs(op, fn)
    return VJPRule(each, None, needs)


def defvjp_all(op: Op, fn: Callable[..., Sequence[Any]], *, partial: bool = False) -> None:
    """Declare the rule of ``op`` as one function that gives the cotangents of all operands, in order (None for none).

    For an op with several results ``g`` is the tuple of their cotangents. Results that nothing depends on have zeros
    there, or None where the rule is ``partial``.
    """
    _add(op, VJPRule({}, fn, {-1: _needs(op, fn)}, partial=partial))


def _add(op: Op, rule: VJPRule) -> None:
    if op in RULES or op.nondifferentiable:
        raise ValueError(f"{op.name} has a rule already, or is declared nondifferentiable")
    RULES[op] = rule


def same(xp: Any, g: Any) -> Any:
    """The rule of an operand with slope one."""
    return g


# ----- what rules share -----------------------------------------------------------------------------------------------


def conj(xp: Any, x: Any) -> Any:
    """The conjugate; of real numbers ``x`` itself, without a copy."""
    if type(x) in SCALARS:
        return x.conjugate() if type(x) is complex else x
    return xp.conj(x) if x.dtype.kind == "c" else x


def call(xp: Any, op: Op, *args: Any, **params: Any) -> Any:
    """An op of ours inside a rule: run on raw buffers, or applied to Arrays."""
    if xp is np:
        return op.numpy(*args, **params)
    if xp.__name__ == "cupy":
        return op.bind(xp)(*args, **params)
    return apply(op, args, params)


def rounded(values: Sequence[Any], to: Sequence[np.dtype | None]) -> tuple[Any, ...]:
    """Values of Arrays, or None, in these dtypes where one is given."""
    return tuple([v if v is None or d is None else v.astype(d) for v, d in zip(values, to, strict=True)])


def in_one_launch(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of an elementwise op: on buffers of CuPy its calls are one launch, if they have that form and are more
    than one. It widens short floats itself, and rounds ``to`` another dtype."""

    def widening(xp: Any, g: Any, *kept: Any) -> Any:
        if g.dtype.num >= HALF:
            g = g.astype(float32)
        if g.dtype is float32:
            kept = tuple(k.astype(float32) if getattr(getattr(k, "dtype", None), "num", 0) >= HALF else k for k in kept)
        return rule(xp, g, *kept)

    @functools.cache
    def chain(to: np.dtype | None) -> Callable[..., Any]:
        return as_one_launch(lambda g, *kept: rounded((widening(arrays, g, *kept),), (to,))[0], least=2)

    @functools.wraps(rule)
    def run(xp: Any, g: Any, *kept: Any, to: np.dtype | None = None) -> Any:
        out = chain(to)(g, *kept) if xp.__name__ == "cupy" else NotImplemented
        return widening(xp, g, *kept) if out is NotImplemented else out

    return run


def all_in_one_launch(pulls: Sequence[tuple[int, Callable[..., Any], Any]]) -> Callable[..., dict[int, Any]]:
    """Rules of several operands of an elementwise op (by :func:`in_one_launch`), each with the function that finds its
    arguments in what was kept, as one function that gives the cotangents by operand: of buffers of CuPy one launch."""
    joined = [pull for pull in pulls if pull[1] is not same]

    @functools.cache
    def chain(*to: np.dtype | None) -> Callable[..., Any]:
        return as_one_launch(lambda g, *kept: rounded([rule(arrays, g, *find(kept)) for _, rule, find in joined], to))

    def run(xp: Any, g: Any, *kept: Any, to: Mapping[int, np.dtype] = NO_PARAMS) -> dict[int, Any]:
        out = chain(*[to.get(i) for i, _, _ in joined])(g, *kept) if xp.__name__ == "cupy" else NotImplemented
        if out is NotImplemented:
            return {i: rule(xp, g, *find(kept)) for i, rule, find in pulls}
        return dict.fromkeys((i for i, _, _ in pulls), g) | {i: gx for (i, _, _), gx in zip(joined, out, strict=True)}

    return run
