"""Splats: large arrays of one repeated value beside sharded ones. One element travels, and each rank makes its part.

Such arrays are seldom the user's. Functions make them (the padding of :func:`meshtape.pad`), and the gradient of a sum
is one: as large as the array that was summed, which may be larger than the memory of one process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...arrays.core.op import ShapeDtype
from ...arrays.core.program import Entry, Program
from ...arrays.ops.manipulation import BROADCAST_TO


def repeated_element(value: Any) -> np.ndarray | None:
    """The element, as an array of no dimensions, that all of an array are; None where they differ, and for no elements.

    Equal are elements of the same bits: ``-0.0`` and ``0.0`` differ, and a NaN is itself.

    >>> repeated_element(np.full((2, 3), -1.5))
    array(-1.5)
    >>> repeated_element(np.array([0.0, -0.0]))
    """
    if type(value) is not np.ndarray or not value.size:
        return None
    first = np.array(value[(0,) * value.ndim])
    if all(s == 0 or n == 1 for s, n in zip(value.strides, value.shape, strict=True)):
        return first
    last = np.array(value[(-1,) * value.ndim])
    if first.tobytes() != last.tobytes():  # most arrays need no second look
        return None
    if not value.flags.c_contiguous:
        value = value.T if value.flags.f_contiguous else np.ascontiguousarray(value)
    octets = value.reshape(-1).view(np.uint8).reshape(-1, value.itemsize)
    return first if all((octets[:, i] == octets[0, i]).all() for i in range(value.itemsize)) else None


def spread(program: Program, limit: int) -> Program:
    """An equal program that makes its constants of one repeated value, those of more than ``limit`` bytes, from that
    value."""
    entries: list[Entry] = []
    avals, constants = dict(program.avals), dict(program.constants)
    for v, value in program.constants.items():
        one = repeated_element(value) if avals[v].nbytes > limit else None
        if one is None:
            continue
        new = max(avals) + 1
        del constants[v]
        avals[new], constants[new] = ShapeDtype((), one.dtype), one
        entries.append(Entry(BROADCAST_TO, (new,), (v,), {"shape": avals[v].shape}))
    if not entries:
        return program
    return replace(program, entries=(*entries, *program.entries), avals=avals, constants=constants)
