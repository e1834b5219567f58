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
from ...arrays.reductions.reduction_ops import SUM


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
    avals, at = program.avals, {v: i for i, e in enumerate(entries) for v in e.outputs}
    uses = Counter(v for e in entries for v in e.inputs if isinstance(v, int))
    uses.update(program.outputs)
    first_use: dict[Any, int] = {}
    sums: dict[Any, int] = {}  # places of sums over all dimensions but the last, by what they are of
    for i, e in enumerate(program.entries):
        for v in e.inputs:
            first_use.setdefault(v, i)
        v = e.inputs[0]
        if e.op is SUM and not e.params["keepdims"] and avals[v].dtype == avals[e.outputs[0]].dtype in _FLOATS:
            if sorted(e.params["axis"]) == list(range(len(avals[v].shape) - 1)) != []:
                sums[v] = i

    def of_same_rows(v: Any) -> Any:
        """The array of which ``v`` has the rows, as one dimension."""
        e = program.entries[at[v]] if v in at else None
        same = e is not None and e.op is RESHAPE and avals[e.inputs[0]].shape[-1:] == avals[v].shape[-1:]
        return e.inputs[0] if same else v

    for i, e in enumerate(program.entries):
        if e.op is ADD:
            for product, bias in (e.inputs, e.inputs[::-1]):
                k = at.get(product)
                made = None if k is None else entries[k]
                if made is None or made.op is not MATMUL or uses[product] > 1 or not isinstance(bias, int):
                    continue
                out = avals[product]
                if avals[bias] == (out.shape[-1:], out.dtype) and out == avals[e.outputs[0]] and out.dtype in _FLOATS:
                    if all(avals[v].dtype == out.dtype and len(avals[v].shape) > 1 for v in made.inputs):
                        entries[i], entries[k] = (
                            Entry(BIASED, (*made.inputs, bias), e.outputs, {}, e.origin, e.site),
                            None,
                        )
                        break
        elif e.op is MATMUL and len(avals[e.inputs[1]].shape) == len(avals[e.inputs[0]].shape) == 2:
            right = e.inputs[1]
            k = next((sums[v] for v in (right, of_same_rows(right)) if v in sums), None)
            summed = () if k is None else program.entries[k].outputs
            if summed and avals[e.inputs[0]].dtype == avals[right].dtype == avals[summed[0]].dtype:
                if first_use.get(summed[0], i + 1) > i and entries[k] is not None:
                    entries[i], entries[k] = Entry(SUMMED, e.inputs, (*e.outputs, *summed), {}, e.origin, e.site), None
    return replace(program, entries=tuple(e for e in entries if e is not None))
