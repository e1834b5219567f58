"""Equality of programs, for the tests of program files."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshtape.arrays.core.program import Entry, Program, freeze


def same_program(a: Program, b: Program) -> bool:
    """Whether two programs are equal but for the lines of source that they came from; NaN is equal to itself."""

    def entry(e: Entry) -> Any:
        inputs = tuple(v if isinstance(v, int) else ("const", freeze(v.value)) for v in e.inputs)
        return e.op, inputs, e.outputs, freeze(e.params), e.origin

    def bits(p: Program) -> Any:
        return {v: (c.dtype, c.shape, np.ascontiguousarray(c).tobytes()) for v, c in p.constants.items()}

    return (
        (a.inputs, a.outputs, dict(a.avals)) == (b.inputs, b.outputs, dict(b.avals))
        and list(map(entry, a.entries)) == list(map(entry, b.entries))
        and bits(a) == bits(b)
    )
