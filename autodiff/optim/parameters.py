"""Leaves of a tree of parameters, as optimizers, clipping and averages take them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from numbers import Real
from typing import Any, ParamSpec, TypeVar

import numpy as np

from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.dispatch import Deferred, number
from ...arrays.core.errors import ArgumentError, ShapeError
from ...arrays.core.op import state
from ...arrays.ops.creation import asarray
from ..compiler.compile import compile
from ..tape.hidden import hides_arrays, is_foreign, refuse_foreign, refuse_hidden
from ..tape.tape import is_differentiable

P = ParamSpec("P")
R = TypeVar("R")


def is_none(x: Any) -> bool:
    return x is None


def leaves_of(tree: Any, trained: bool = True) -> tuple[list[Any], trees.TreeDef]:
    """Leaves and structure; a None counts as a leaf. Raises :class:`GradientError` for objects that nobody would train
    the arrays of, and where the leaves are to be ``trained`` for arrays of other libraries."""
    leaves, treedef = trees.flatten(tree, is_leaf=is_none)
    if trained and [x for x in leaves if type(x) is not Array and is_foreign(type(x))]:
        refuse_foreign("optim", tree, "a tree of parameters")
    if [x for x in leaves if type(x) is not Array and hides_arrays(x)]:
        refuse_hidden("optim", tree, "a tree of parameters")
    return leaves, treedef


def batched(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a function of trees. Where all leaves are arrays of a GPU and nothing records, it runs compiled: a
    launch or two for all leaves of a dtype, where its calls are several for each leaf."""
    compiled = compile(fn)

    @functools.wraps(fn)
    def call(*args: Any, **named: Any) -> Any:
        return (compiled if _on_a_gpu((args, named)) else fn)(*args, **named)

    return call


def _on_a_gpu(tree: Any) -> bool:
    elsewhere = np.ndarray, Deferred
    return not state.recorders and all(
        type(x) is Array and not isinstance(x._buf, elsewhere) for x in trees.flatten(tree)[0]
    )


class Recipe:
    """Mixin of frozen classes of functions: what a maker under :func:`recorded` gave is pickled as the call of it."""

    _call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None

    def __reduce__(self) -> Any:
        if self._call is None:  # made by hand, of functions that may be pickled or not
            return type(self), tuple(getattr(self, f.name) for f in dataclasses.fields(self))  # type: ignore[arg-type]
        make, args, options = self._call
        return functools.partial(make, *args, **options), ()


def recorded(make: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a public function that gives a :class:`Recipe`."""

    @functools.wraps(make)
    def call(*args: P.args, **options: P.kwargs) -> R:
        made = make(*args, **options)
        object.__setattr__(made, "_call", (call, args, options))
        return made

    return call


def trains(x: Any) -> bool:
    """Whether a leaf is a number that has a gradient."""
    if isinstance(x, Array | np.ndarray | np.generic):
        return is_differentiable(x.dtype)
    return isinstance(x, float | complex)


def is_small(x: Any) -> bool:
    return trains(x) and hasattr(x, "dtype") and x.dtype.itemsize <= 2


def wide(x: Any) -> Any:
    """In float32 where the dtype has one or two bytes."""
    return x.astype(np.float32) if is_small(x) else x


def counter(params: Any) -> Array:
    """Zero, int64 and 0-d, where the parameters are: on their device, or on every rank of their mesh."""
    arrays = [x for x in leaves_of(params)[0] if isinstance(x, Array)]
    for x in arrays:
        if isinstance(x._buf, Deferred) and x._buf.host is not None:
            return x._buf.host.replicate(asarray(np.int64(0)))
    return asarray(np.int64(0), device=arrays[0].device if arrays else None)


def check_shape(name: str, what: str, value: Any, param: Any) -> None:
    """Raise :class:`ShapeError` where a value that belongs to a parameter has another shape: it would broadcast."""
    if value.shape != param.shape:
        raise ShapeError(f"[{name}] {what} of shape {value.shape} for a parameter of shape {param.shape}")


def check(name: str, *, least: float = 0, most: float = math.inf, **given: Any) -> None:
    """Raise :class:`ArgumentError` unless each is a number in range. (A bool is none; a 0-d array may be traced.)"""
    for what, value in given.items():
        if isinstance(value, Array) and not value.ndim:
            continue
        value = number(value)
        single = isinstance(value, Real) or (isinstance(value, np.ndarray) and not value.ndim)
        if isinstance(value, bool) or not single or not least <= value <= most:
            raise ArgumentError(f"[{name}] {what} must be a number from {least} to {most}, got {value!r}")
