"""``for v in x`` over a split array.

Each ``x[i]`` by itself is a program, and its value a question to a worker: milliseconds, for eight bytes. So small elements are fetched
many at a time. What comes is an array on the mesh like ``x[i]``, whose value is in this process already.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ...arrays.core.array import Array
from ...arrays.core.op import state
from ...arrays.core.shape_dtype import ShapeDtype
from ..execution.runtime import HostValue

if TYPE_CHECKING:
    from .mesh import Mesh

FEW = 8
"""So many elements are indexed one by one: ``a, b = x`` waits for nothing."""

LARGEST = 1 << 20
"""Bytes of an element above which it stays where it is."""

WINDOW = 16 << 20
"""Bytes that are fetched at a time."""


def elements(x: Array, mesh: Mesh) -> Iterator[Array]:
    """``x[0]``, ``x[1]``, … of an array on a mesh. Where calls are recorded, each is a call; otherwise small ones come in windows."""
    count, nbytes = x.shape[0], x.nbytes // max(1, x.shape[0])
    if count <= FEW or nbytes > LARGEST or state.recorders:
        return (x[i] for i in range(count))
    return _fetched(x, mesh, max(1, WINDOW // max(1, nbytes)))


def _fetched(x: Array, mesh: Mesh, window: int) -> Iterator[Array]:
    from .sharded_array import sharded_array

    layout = x[0]._buf.layout.reduced()  # noted, and never computed, as nobody holds it
    aval = ShapeDtype(x.shape[1:], x.dtype)
    here, start, values = None, 0, np.empty(0)
    for i in range(x.shape[0]):
        if state.recorders:
            yield x[i]
            continue
        if x._buf is not here or i == start + len(values):  # (it was written to)
            whole = window >= x.shape[0]
            here, start = x._buf, 0 if whole else i
            values = (x if whole else x[i : i + window])._concrete()
        # A copy: who keeps one element does not keep all.
        value = HostValue(np.array(values[i - start], copy=True), layout, mesh.sizes)
        yield sharded_array(mesh, layout, aval, value)
