"""Chains of elementwise steps as one call, which reads and writes each number once.

Only steps with one correctly rounded operation for each number are among them, so that the bits are those of NumPy. (It
warns of divisions by zero and the like in its own steps; a run does not. Where ``np.errstate`` asks for more than a
warning, the steps are NumPy's.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import float32, float64
from ..core.op import OPS, Op
from ..core.program import Entry, Program
from . import AVAILABLE, _kernels
from .calls import STEPS

MOST_LOCALS, MOST_SLOTS = (_kernels.MOST_LOCALS, _kernels.MOST_SLOTS) if _kernels is not None else (0, 0)

_CODES: dict[Op, int] = {OPS[name]: code for code, name in enumerate(STEPS)}


def takes(e: Entry, program: Program) -> bool:
    """Whether the entry can be a step of a run: a known operation, all operands of the result's dtype, or numbers that
    fit it."""
    if not AVAILABLE or e.op not in _CODES or e.params:
        return False
    dtype = program.avals[e.outputs[0]].dtype
    return dtype in (float32, float64) and all(
        program.avals[v].dtype == dtype if isinstance(v, int) else as_operand(v.value, dtype) is not None
        for v in e.inputs
    )


def as_operand(value: Any, dtype: np.dtype) -> np.ndarray | None:
    """A Python number as an array, which saves NumPy a conversion at each call; None where it may not fit the dtype."""
    return np.asarray(value, dtype) if type(value) in (int, float) and -(2**53) <= value <= 2**53 else None


class ChainCall(NamedTuple):
    """Entries as one call: ``reads`` are variables or numbers as arrays, ``writes`` the variables that others read."""

    entries: tuple[Entry, ...]
    steps: bytes
    reads: tuple[Any, ...]
    writes: tuple[int, ...]
    locals: int

    def __call__(self, reads: Sequence[np.ndarray], writes: Sequence[np.ndarray]) -> None:
        """Compute ``writes``, arrays of one shape and without gaps, from ``reads``, which broadcast to it."""
        if _is_strict() or _kernels.chain(self.steps, (*reads, *writes), len(reads), self.locals) is None:
            self._in_numpy(reads, writes)

    def _in_numpy(self, reads: Sequence[np.ndarray], writes: Sequence[np.ndarray]) -> None:
        """The NumPy form, where operands do not lie in rows, or infinities must be reported."""
        into = dict(zip(self.writes, writes, strict=True))
        env: dict[Any, Any] = dict(zip((v if isinstance(v, int) else id(v) for v in self.reads), reads, strict=True))
        dtype = writes[0].dtype
        for e in self.entries:
            (v,) = e.outputs
            args = [env[a] if isinstance(a, int) else as_operand(a.value, dtype) for a in e.inputs]
            env[v] = e.op.numpy(*args, out=into.get(v))


_STRICT = frozenset(("raise", "call", "print", "log"))


def _is_strict() -> bool:
    """Whether a division by zero, an overflow or the like is to do more than to warn."""
    return not _STRICT.isdisjoint(np.geterr().values())


def run_of(entries: Sequence[Entry], program: Program, read_later: set[int]) -> ChainCall | None:
    """The entries as a run; None where it would need more room than there is. ``read_later`` are variables that others
    read."""
    made = {e.outputs[0] for e in entries}
    last = {v: i for i, e in enumerate(entries) for v in e.inputs if isinstance(v, int)}
    reads: dict[Any, Any] = {}  # by variable, or by number
    for e in entries:
        dtype = program.avals[e.outputs[0]].dtype
        for v in e.inputs:
            if not isinstance(v, int):
                reads.setdefault(("number", float(v.value), str(v.value)), as_operand(v.value, dtype))
            elif v not in made:
                reads.setdefault(v, v)
    writes = [v for v in dict.fromkeys(e.outputs[0] for e in entries) if v in read_later]
    if not writes or len(reads) + len(writes) > MOST_SLOTS:
        return None
    slots: dict[Any, int] = {k: i for i, k in enumerate((*reads, *writes))}
    free: list[int] = []
    count, steps = 0, []
    for i, e in enumerate(entries):
        at = [slots[v if isinstance(v, int) else ("number", float(v.value), str(v.value))] for v in e.inputs]
        v = e.outputs[0]
        # A step may write what it reads: number by number, after having read it.
        free += [
            slots[a]
            for a in dict.fromkeys(a for a in e.inputs if isinstance(a, int))
            if a in made and a not in writes and last[a] == i
        ]
        if v not in slots:
            if not free:
                free.append(len(reads) + len(writes) + count)
                count += 1
            slots[v] = free.pop()
        steps += [_CODES[e.op], slots[v], at[0], at[-1]]
    if count > MOST_LOCALS:
        return None
    return ChainCall(tuple(entries), np.asarray(steps, np.int32).tobytes(), tuple(reads.values()), tuple(writes), count)
