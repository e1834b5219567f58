"""Records of calls on a tape, with the values that the backward pass needs."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arrays.core.array import Array, new_id, next_id
from ...arrays.core.dispatch import argument_avals, call_site, compiled, written_to
from ...arrays.core.dtypes import HALF, float32, float64
from ...arrays.core.op import Op, ShapeDtype, state
from ...arrays.core.program import Const, Entry, Site
from .vjp_plan import VJPPlan, plan_for


def is_differentiable(dtype: np.dtype) -> bool:
    """Whether values of this dtype have derivatives: floats and complex numbers, ml_dtypes' included."""
    return dtype.kind in "fc" or (dtype.kind == "V" and dtype.names is None)


class Recorded(NamedTuple):
    """One call on a tape. (A tape holds plain tuples of these fields, which are made in a fraction of the time.)

    ``inputs`` has the names of all operands; a scalar is a ``Const``, or itself where it is a float. ``kept`` is what
    the plan keeps. ``out_avals`` are given where there are several results.
    """

    plan: VJPPlan
    inputs: Sequence[Any]
    outputs: Sequence[int]
    kept: tuple[Any, ...]
    params: Mapping[str, Any]
    out_avals: tuple[ShapeDtype, ...] | None
    origin: str | None
    site: Site | None

    @property
    def entry(self) -> Entry:
        """The call as others read it."""
        inputs = tuple(v if type(v) is int or type(v) is Const else Const(v) for v in self.inputs)
        return Entry(self.plan.op, inputs, tuple(self.outputs), self.params, self.origin, self.site)

    @property
    def name(self) -> str:
        """The word that the user wrote."""
        return self.origin or self.plan.op.name


# Half the time of calling the named tuple's own constructor, for each scalar of a recorded call.
const = functools.partial(tuple.__new__, Const)

_OURS = 4 if compiled is None else 3
"""Frames of ours from :func:`call_site` up to an operator: that of ``invoke`` is none in C."""


class Recording:
    """The record of the calls that watched arrays went into.

    ``live`` has the values that have gradients, by name, with shape and dtype of their cotangents. ``short`` has the
    dtypes of those among them that are floats of one or two bytes, whose cotangents are float32.
    """

    __slots__ = ("_records", "live", "short")
    keeps_no_operand = True
    """Of a write it keeps no array as it was before: that may be written in place, and shown afterwards."""

    def __init__(self) -> None:
        self._records: list[Any] = []  # tuples of the fields of Recorded
        self.live: dict[int, tuple[tuple[int, ...], np.dtype]] = {}
        self.short: dict[int, np.dtype] = {}

    def watches(self, x: Array) -> bool:
        """Whether a call on this array would be recorded."""
        return x._id in self.live

    def follow(self, name: int, buf: Any) -> None:
        """Have a value of this name a gradient, if its dtype allows one."""
        dtype = buf.dtype
        if is_differentiable(dtype):
            if dtype.num >= HALF:
                self.short[name], dtype = dtype, float32
            self.live[name] = tuple(buf.shape), dtype

    def record(
        self,
        op: Op,
        args: tuple[Any, ...],
        bufs: Sequence[Any],
        outs: tuple[Array, ...],
        params: Mapping[str, Any],
    ) -> None:
        """Called by the dispatcher after each op call of this thread; must not call ops itself."""
        if op.nondifferentiable:
            return
        live = self.live
        names: list[Any] = []
        mask = 1
        for a in args:
            mask += mask
            if type(a) is Array:
                name = a._id
                if name in live:
                    mask += 1
                elif a._buf is not bufs[len(names)]:
                    raise written_to(op)
                names.append(name)
            else:
                names.append(a if type(a) is float else const((a,)))
        try:
            plan = op.plans[mask]
        except KeyError:
            plan = plan_for(op, mask)
        if plan is None:
            return
        if plan.single:
            out = outs[0]
            name = out._id
            if not name:
                name = out._id = next_id()
            buf = out._buf
            dtype = buf.dtype
            if dtype is float64 or dtype is float32:
                live[name] = buf.shape, dtype
            else:
                self.follow(name, buf)
                if dtype.kind == "c":
                    plan = plan.of_complex
            kept = plan.pick((*bufs, buf) if plan.keeps_result else bufs) if plan.saves else ()
            outputs, out_avals = (name,), None
        else:
            outputs, out_avals = tuple(map(new_id, outs)), argument_avals(outs)
            for o in outs:
                self.follow(o._id, o._buf)
            kept = plan.pick((*bufs, *[o._buf for o in outs]))
        if plan.rest:
            kept += plan.others(args, params)
        self._records.append((plan, names, outputs, kept, params, out_avals, state.origin, call_site(_OURS)))
