"""Records of calls on a tape, with the values that the backward pass needs.

This is the price of each eager op under a tape, and is compiled in a wheel; what is asked of a tape once a pass is in :mod:`.tape`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arrays.core.array import Array, new_id, next_id
from ...arrays.core.dispatch import argument_avals
from ...arrays.core.op import Op
from ...arrays.core.program import Const, Entry, Site
from ...arrays.core.shape_dtype import ShapeDtype
from ...arrays.core.value import FLOAT32, FLOAT64, Value
from .vjp_plan import RECIPES, Recipe, recipe_for


def is_differentiable(dtype: np.dtype) -> bool:
    """Whether values of this dtype have derivatives: floats and complex numbers, ml_dtypes' included."""
    return dtype is FLOAT32 or dtype is FLOAT64 or dtype.kind in "fc" or (dtype.kind == "V" and dtype.names is None)


class Recorded(NamedTuple):
    """One call on a tape. A tape holds plain tuples of these fields, which are made and read in a fraction of the time.

    ``operands`` has the name, shape and dtype of each watched operand, or the names alone of those of an elementwise call that have
    the shape and dtype of its result: what the rule gives then fits. One such name stands without a tuple. ``inputs`` has the names of all operands; a scalar is a ``Const``,
    or itself where it is a float. ``saved`` is what the recipe keeps: buffers, and scalars.
    """

    recipe: Recipe
    operands: int | Sequence[int] | Sequence[tuple[int, tuple[int, ...], np.dtype]]
    inputs: Sequence[Any]
    outputs: Sequence[int]
    saved: Sequence[Any]
    params: Mapping[str, Any]
    avals: tuple[Any, ...] | None
    out_avals: tuple[ShapeDtype, ...] | None
    origin: str | None
    site: Site | None

    @property
    def entry(self) -> Entry:
        """The call as others read it."""
        inputs = tuple(v if type(v) is int or type(v) is Const else Const(v) for v in self.inputs)
        return Entry(self.recipe.op, inputs, tuple(self.outputs), self.params, self.origin, self.site)

    @property
    def name(self) -> str:
        """The word that the user wrote."""
        return self.origin or self.recipe.op.name


# Half the time of calling the named tuple's own constructor, for each scalar of a recorded call.
_const = functools.partial(tuple.__new__, Const)


class Recording:
    """The record of the calls that watched arrays went into."""

    __slots__ = ("_live", "_records")
    keeps_no_operand = True
    """Of a write it keeps no array as it was before: that may be written in place, and shown afterwards."""

    def __init__(self) -> None:
        self._records: list[Any] = []  # tuples of the fields of Recorded
        self._live: set[int] = set()  # names of the values that have gradients

    def watches(self, x: Array) -> bool:
        """Whether a call on this array would be recorded."""
        return x._id in self._live

    def record(
        self,
        op: Op,
        args: tuple[Any, ...],
        outs: tuple[Array, ...],
        params: Mapping[str, Any],
        origin: str | None,
        site: Site | None,
    ) -> None:
        """Called by the dispatcher after each op call of this thread; must not call ops itself."""
        if op.nondifferentiable:
            return
        live = self._live
        recipe: Recipe
        out: Value = outs[0]
        answer = out._buf
        # Every eager call under a tape comes through here. One and two operands are spelled out: a loop over two costs as much
        # as the rest.
        if len(args) == 2:
            x, y = args
            mask = 4
            if type(x) is Array:
                first: Value = x
                a, v = first._buf, first._id
                if v in live:
                    mask = 5
            else:
                a = x
                v = x if type(x) is float else _const((x,))
            if type(y) is Array:
                second: Value = y
                b, w = second._buf, second._id
                if w in live:
                    mask += 2
            else:
                b = y
                w = y if type(y) is float else _const((y,))
            if mask == 4:
                return
            try:
                recipe = RECIPES[op][mask]
            except KeyError:
                recipe = recipe_for(op, mask)
            if mask == 5:
                if recipe.floating and type(y) is not Array and a.dtype is answer.dtype:
                    operands = v
                else:
                    operands = ((v, a.shape, a.dtype),)
            elif mask == 6:
                if recipe.floating and type(x) is not Array and b.dtype is answer.dtype:
                    operands = w
                else:
                    operands = ((w, b.shape, b.dtype),)
            else:
                dtype = answer.dtype
                alike = a.dtype is dtype and b.dtype is dtype and (dtype is FLOAT64 or dtype is FLOAT32)
                if alike and recipe.floating and a.shape == b.shape:
                    operands = (v, w)
                else:
                    operands = ((v, a.shape, a.dtype), (w, b.shape, b.dtype))
            inputs = (v, w)
            keeps = recipe.keeps
            saved = (a, b) if keeps == 3 else (a,) if keeps == 1 else (b,) if keeps == 2 else ()
        elif len(args) == 1:
            x = args[0]
            if type(x) is not Array:
                return
            first = x
            v = first._id
            if v not in live:
                return
            a = first._buf
            try:
                recipe = RECIPES[op][3]
            except KeyError:
                recipe = recipe_for(op, 3)
            operands = v if recipe.floating and a.dtype is answer.dtype else ((v, a.shape, a.dtype),)
            inputs = (v,)
            saved = (a,) if recipe.keeps else ()
        else:
            mask, bit = 0, 1
            for z in args:
                if type(z) is Array and z._id in live:
                    mask |= bit
                bit += bit
            if not mask:
                return
            recipe = recipe_for(op, mask | bit)
            operands = tuple([(args[i]._id, args[i]._buf.shape, args[i]._buf.dtype) for i in recipe.wanted])
            inputs = tuple([z._id if type(z) is Array else z if type(z) is float else _const((z,)) for z in args])
            saved = tuple([args[i]._buf if type(args[i]) is Array else args[i] for i in recipe.saves])
        if recipe.single:
            # Results are new values: what they were called before (an op may hand its operand back) is another value's name.
            name = out._id
            if not name:
                name = out._id = next_id()
            if recipe.keeps_ans:
                saved = (*saved, answer)
            if recipe.floating or is_differentiable(answer.dtype):
                live.add(name)
            outputs = (name,)
            avals = argument_avals(args) if recipe.keeps_avals else None
            out_avals = None
        else:
            outputs = tuple([new_id(o) for o in outs])
            if recipe.keeps_ans:
                saved = (*saved, *[o._buf for o in outs])
            live.update([o._id for o in outs if is_differentiable(o._buf.dtype)])
            avals = argument_avals(args)
            out_avals = argument_avals(outs)
        self._records.append((recipe, operands, inputs, outputs, saved, params, avals, out_avals, origin, site))
