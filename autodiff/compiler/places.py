"""On which device a compiled function runs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from ...arrays.core.array import Array
from ...arrays.core.devices import use_device
from ...arrays.core.errors import DeviceError
from ...arrays.core.program import Program
from ...arrays.ops.creation import beside


def device_of_arguments(arrays: Sequence[Any]) -> AbstractContextManager[Any]:
    """Where what a program makes goes: to its arguments, if all of these are on one device."""
    found = {beside(a) for a in arrays if isinstance(a, Array)}
    return use_device(found.pop()) if len(found) == 1 and None not in found else contextlib.nullcontext()


def refuse_several(
    name: str, program: Program, inputs: Sequence[Array], captured: Sequence[Array], graph: bool
) -> None:
    """Raise :class:`DeviceError` where a program reads arrays of several devices, though none of them meet; of a CUDA
    graph, where it has such arguments."""
    read = {v for e in program.entries for v in e.inputs if isinstance(v, int)}
    used = [a for v, a in zip(program.inputs, inputs, strict=False) if graph or v in read]
    places = {str(where) for a in (*used, *captured) if (where := beside(a)) is not None}
    if len(places) > 1:
        raise DeviceError(
            f"[compile] {name} has arrays on {' and '.join(sorted(places))}, and a program runs on one device: move "
            "them with x.to_device(...), or compile a function for each"
        )
