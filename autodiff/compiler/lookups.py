"""Index arrays among the arguments of a compiled function, which are checked before it runs on a GPU.

NumPy checks each of its reads, and CuPy none. A look at the arrays of a call needs no wait where their numbers came
from host memory; a CUDA graph could not look at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arrays.backends import host_sync
from ...arrays.backends.backend import cupy_backend, on_device_of
from ...arrays.core.array import Array
from ...arrays.core.dispatch import Deferred
from ...arrays.core.index_template import Gap, Slot, Truth, is_basic
from ...arrays.core.program import Entry, Program
from ...arrays.indexing.keys import check_ranges, is_known
from ...arrays.interface.writing import settled


class Lookup(NamedTuple):
    """An index array of an axis: an argument, or a view of one."""

    argument: int
    views: tuple[Entry, ...]
    axis: int
    length: int


def lookups(program: Program) -> list[Lookup]:
    """Those of a program, each once. Index arrays that it computes are not among them."""
    made = {v: e for e in program.entries for v in e.outputs}
    places = {v: i for i, v in enumerate(program.inputs)}
    found: dict[Any, Lookup] = {}
    for e in program.entries:
        template = e.params.get("template", ())
        if is_basic(template):
            continue
        shape = e.params.get("shape") or program.avals[e.inputs[0]].shape  # type: ignore[index]
        arrays, axis = e.inputs[len(e.inputs) - sum(isinstance(t, Slot) for t in template) :], 0
        for item in template:
            if isinstance(item, Slot):
                var, views = arrays[item.n], list[Entry]()
                while (by := made.get(var)) is not None and _is_same(by, program):  # type: ignore[arg-type]
                    views += [by] if by.op.view == "always" else []
                    (var,) = by.inputs
                if var in places:
                    found[arrays[item.n], axis, shape[axis]] = Lookup(
                        places[var], tuple(views[::-1]), axis, shape[axis]
                    )
            axis += item is not None and not isinstance(item, Truth | Gap)
    return list(found.values())


def _is_same(e: Entry, program: Program) -> bool:
    """Whether a call gives numbers of its only operand: a view, or a cast to wider integers."""
    if len(e.inputs) != 1 or not isinstance(e.inputs[0], int):
        return False
    before, after = program.avals[e.inputs[0]].dtype, program.avals[e.outputs[0]].dtype
    if e.op.name == "astype":
        return before.kind in "iu" and np.can_cast(before, after)
    return e.op.view == "always" and before == after


def check(found: Sequence[Lookup], inputs: Sequence[Array]) -> None:
    """Raise `ArrayIndexError` where an index array of a call on a GPU is out of range."""
    left = []
    for argument, views, axis, length in found:
        buf = settled(inputs[argument])
        if isinstance(buf, np.ndarray | Deferred) or is_known(buf, length):  # as then are its views
            continue
        with on_device_of(buf):
            for e in views:
                buf = e.op.bind(cupy_backend().xp)(buf, **e.params)
        if not is_known(buf, length):
            left.append((buf, axis, length))
    if left and host_sync.checks_indices():
        check_ranges(left)
