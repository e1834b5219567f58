"""Products of a compiled program that are one launch with what is done to them: an added bias, and its gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from ...arrays.backends import cublaslt
from ...arrays.core.dtypes import bfloat16
from ...arrays.core.op import Op, ShapeDtype
from ...arrays.core.program import Entry, Program
from ...arrays.ops.elementwise import ADD
from ...arrays.ops.manipulation import RESHAPE
from ...arrays.ops.matmul import MATMUL
from ...arrays.reductions.reductions import SUM


class Launch(Op):
    """An op of these programs alone, which no function calls."""

    table: ClassVar[dict[str, Op]] = {}


def _biased(xp: Any, x: Any, y: Any, bias: Any) -> Any:
    found = cublaslt.product(x, y, bias=bias)
    return ADD.bind(xp)(MATMUL.bind(xp)(x, y), bias) if found is None else found


def _summed(xp: Any, x: Any, y: Any) -> tuple[Any, Any]:
    found = cublaslt.product(x, y, sums=True)
    return (MATMUL.bind(xp)(x, y), SUM.bind(xp)(y, axis=(0,), keepdims=False)) if found is None else found


def _infer_summed(op: Op, args: Sequence[Any], params: Any) -> tuple[ShapeDtype, ShapeDtype]:
    return MATMUL.infer(MATMUL, args, params), ShapeDtype(args[1].shape[1:], args[1].dtype)


BIASED = Launch("matmul+add", ("x", "y", "bias"), _biased, lambda op, args, params: MATMUL.infer(op, args[:2], params))
SUMMED = Launch("matmul+sum", ("x", "y"), _summed, _infer_summed, nout=2)

_FLOATS = frozenset(map(np.dtype, (np.float16, bfloat16, np.float32, np.float64)))


def joined(program: Program) -> Program:
    """The program with each product that only a bias is added to, or whose right operand is summed over its rows
    elsewhere (the gradient of a bias), as one entry."""
    entries: list[Entry | None] = list(program.entries)
    avals, made_at = program.avals, {v: i for i, e in enumerate(program.entries) for v in e.outputs}
    reads = [(v, i) for i, e in enumerate(program.entries) for v in e.inputs if isinstance(v, int)]
    uses, first_read = Counter([*(v for v, _ in reads), *program.outputs]), dict(reversed(reads))
    sums = {e.inputs[0]: i for i, e in enumerate(program.entries) if _sums_rows(e, program)}

    def replaced(i: int, k: int, op: Op, inputs: tuple[Any, ...], outputs: tuple[int, ...]) -> None:
        e = program.entries[i]
        entries[i], entries[k] = Entry(op, inputs, outputs, {}, e.origin, e.site), None

    for i, e in enumerate(program.entries):
        for product, bias in (e.inputs, e.inputs[::-1]) if e.op is ADD else ():
            made = entries[made_at[product]] if product in made_at else None
            if made is None or made.op is not MATMUL or uses[product] > 1 or not isinstance(bias, int):
                continue
            out, operands = avals[product], [avals[v] for v in made.inputs]
            alike = all(a.dtype == out.dtype and len(a.shape) > 1 for a in operands) and out.dtype in _FLOATS
            if alike and avals[bias] == (out.shape[-1:], out.dtype) and out == avals[e.outputs[0]]:
                replaced(i, made_at[product], BIASED, (*made.inputs, bias), e.outputs)
                break
        if e.op is MATMUL and all(len(avals[v].shape) == 2 for v in e.inputs):
            right = e.inputs[1]
            before = program.entries[made_at[right]] if right in made_at else None
            if (
                before is not None
                and before.op is RESHAPE
                and avals[before.inputs[0]].shape[-1:] == avals[right].shape[1:]
            ):
                right = right if right in sums else before.inputs[0]  # the same rows, as one dimension
            k = sums.get(right)
            if k is None or entries[k] is None or first_read.get(program.entries[k].outputs[0], i) < i:
                continue
            if {avals[v].dtype for v in e.inputs} == {avals[right].dtype}:
                replaced(i, k, SUMMED, e.inputs, (*e.outputs, *program.entries[k].outputs))
    return replace(program, entries=tuple(e for e in entries if e is not None))


def _sums_rows(e: Entry, program: Program) -> bool:
    """Whether an entry sums over all dimensions but the last."""
    if e.op is not SUM or e.params["keepdims"]:
        return False
    given, out = program.avals[e.inputs[0]], program.avals[e.outputs[0]]
    return given.dtype == out.dtype in _FLOATS and sorted(e.params["axis"]) == [*range(len(given.shape) - 1)] != []
