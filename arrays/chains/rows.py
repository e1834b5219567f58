"""Elementwise chains that end with a sum, a mean or an extreme over their last dimensions, as one CUDA kernel each:
every operand is read once, and nothing between them is in memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.program import Entry, FusedRun, Program
from ..kernels import launch
from ..kernels.geometry import MAX_GRID, ceil_div, joined
from . import cuda_codegen as code
from .chains import generated, lanes_of, statements
from .layouts import FULL, HELD, ONE, strides_of

OPS = {"sum": "Add", "mean": "Add", "max": "Max", "min": "Min"}
"""The reductions, and what they are called in CUDA."""
LEAST = 64
"""Rows from which on each is left to one block. (Not measured.)"""
LONG = 2048
"""Elements from which on a row has a block, and no longer a warp."""


def reduces_rows(e: Entry, program: Program) -> bool:
    """Whether an entry reduces the last dimensions of many rows of floats."""
    if e.op.name not in OPS or not isinstance(e.inputs[0], int):
        return False
    x, out = program.avals[e.inputs[0]], program.avals[e.outputs[0]]
    kept = len(x.shape) - len(e.params["axis"])
    last = sorted(e.params["axis"]) == [*range(kept, len(x.shape))]
    many = 0 < kept < len(x.shape) and math.prod(x.shape[:kept]) >= LEAST and math.prod(x.shape[kept:]) > 1
    return last and many and x.dtype == out.dtype and x.dtype in code.KERNEL_FLOATS


def source(group: FusedRun, program: Program, kinds: Sequence[str], count: int) -> str:
    """CUDA C++ of the kernel ``fused``: a template over whether it reads vectors, and over the threads of a row. A mean
    is divided by ``count``."""
    *entries, last = group.entries
    lanes, result = lanes_of(group, program), program.avals[last.outputs[0]].dtype
    types = [launch.NAMES[program.avals[v].dtype] for v in group.inputs]
    held = [code.register_type(program.avals[v].dtype) for v in group.inputs]
    name = {v: f"x{i}" for i, v in enumerate(group.inputs)}
    body = statements(entries, program, name)
    a, op = code.register_type(result), OPS[last.op.name]
    identity = {"Add": f"({a})0", "Max": f"-infinity<{a}>()", "Min": f"infinity<{a}>()"}[op]
    parameters = ["i64 rows", "i64 width", *(f"const {t}* in{i}" for i, t in enumerate(types))]
    parameters += [f"{launch.NAMES[result]}* out", *(f"i64 s{i}" for i, how in enumerate(kinds) if how != ONE)]

    def load(i: int, place: str) -> str:
        return code.widened(types[i], f"in{i}[{place}]")

    once = [f"const {held[i]} a{i} = {load(i, '0')};" for i, how in enumerate(kinds) if how == ONE]
    each = [f"const {held[i]} a{i} = {load(i, f'row * s{i}')};" for i, how in enumerate(kinds) if how == HELD]
    full = [i for i, how in enumerate(kinds) if how == FULL]
    words = [f"a{i}" if how != FULL else code.widened(types[i], f"a{i}.at[k]") for i, how in enumerate(kinds)]
    singles = [f"a{i}" if how != FULL else load(i, f"row * s{i} + c") for i, how in enumerate(kinds)]
    arguments = ", ".join(f"{h} x{i}" for i, h in enumerate(held))
    mean = f" / ({a}){count}" if last.op.name == "mean" else ""
    return "\n".join(
        [
            '#include "headers/reduce.cuh"',
            code.PRELUDE,
            f"__device__ inline {a} element({arguments})",
            "{",
            *body,
            f"    return {name[last.inputs[0]]};",
            "}",
            "",
            "template <bool VECTORS, int THREADS>",
            f"__global__ void fused({', '.join(parameters)})",
            "{",
            *("    " + line for line in once),
            "    const i64 first = (i64)blockIdx.x * blockDim.y + threadIdx.y;",
            "    for (i64 row = first; row < rows; row += (i64)gridDim.x * blockDim.y) {",
            *("        " + line for line in each),
            f"        {a} total = {identity};",
            "        if (VECTORS) {",
            "#pragma unroll 2",
            f"            for (i64 c = (i64)threadIdx.x * {lanes}; c < width; c += THREADS * {lanes}) {{",
            *(f"                const auto a{i} = vector_at<{lanes}>(in{i} + row * s{i} + c);" for i in full),
            "#pragma unroll",
            f"                for (int k = 0; k < {lanes}; ++k) total = {op}::of(total, element({', '.join(words)}));",
            "            }",
            "        } else",
            "            for (i64 c = threadIdx.x; c < width; c += THREADS)",
            f"                total = {op}::of(total, element({', '.join(singles)}));",
            f"        total = row_reduce<{op}, THREADS>(total, ({a}){identity});",
            f"        if (threadIdx.x == 0) out[row] = narrow<{launch.NAMES[result]}>(total{mean});",
            "    }",
            "}",
            "",
        ]
    )


def executable(group: FusedRun, program: Program) -> Callable[..., list[Any]]:
    """The group as a function of its input buffers that returns its one output buffer; ``into`` and ``failed`` as of
    :func:`~.chains.executable`."""
    last = group.entries[-1]
    shape, result = tuple(group.shape), program.avals[last.outputs[0]]
    kept = len(shape) - len(last.params["axis"])
    rows, width = math.prod(shape[:kept]), math.prod(shape[kept:])
    lanes, threads = lanes_of(group, program), 32 if width < LONG else 256
    text = functools.cache(lambda *kinds: generated(source(group, program, kinds, last.params.get("count", 1))))

    def run(*inputs: Any, into: Sequence[Any] = (), failed: Callable[..., Exception] | None = None) -> list[Any]:
        try:
            return [compute(inputs, into[0] if into else None)]
        except Exception as e:
            if failed is None:
                raise
            raise failed(e, group.entries) from e

    def compute(inputs: Sequence[Any], out: Any) -> Any:
        runner = launch.runner()
        out = runner.xp.empty(result.shape, result.dtype) if out is None else out
        kinds, steps, held, vectors = [], [], [], width % lanes == 0
        for a in inputs:
            how, step = layout_of(a, shape, kept)
            if how is None:
                a = launch.contiguous(runner.xp.broadcast_to(a, shape))
                how, step = FULL, width
            whole = min(16, a.dtype.itemsize * lanes)
            if how == FULL and (runner.address(a) % whole or step * a.dtype.itemsize % whole):
                vectors = False
            kinds.append(how)
            held.append(a)
            steps += [] if how == ONE else [np.int64(step)]
        arguments = [np.int64(rows), np.int64(width), *(np.uint64(runner.address(a)) for a in (*held, out)), *steps]
        grid = min(ceil_div(rows * threads, 256), MAX_GRID), 1, 1
        kernel = launch.named("fused", vectors, threads)
        runner.launch(text(*kinds), kernel, grid, (threads, 256 // threads, 1), arguments)
        return out

    return run


def layout_of(array: Any, shape: tuple[int, ...], kept: int) -> tuple[str | None, int]:
    """How an operand lies beside rows: a single element, one a row, or neighbours along each; and the elements between
    rows. None where it lies in another way.

    >>> layout_of(np.ones((4, 5, 6)), (4, 5, 6), 1), layout_of(np.ones((4, 1, 1)), (4, 5, 6), 1)
    (('full', 30), ('held', 1))
    >>> layout_of(np.ones((5, 6)), (4, 5, 6), 1), layout_of(np.ones((4, 6)), (3, 4, 6), 2)
    (('full', 0), (None, 0))
    """
    if array.size == 1:
        return ONE, 0
    strides = strides_of(array, shape)
    step, inner = (_joined(strides[part], shape[part]) for part in (slice(kept), slice(kept, None)))
    if step is None or inner not in (0, 1):
        return None, 0
    return FULL if inner else HELD, step


def _joined(strides: Sequence[int], sizes: Sequence[int]) -> int | None:
    """The step along dimensions as one; None where they are not."""
    found = joined(sizes, strides)
    return None if len(found) > 1 else found[0][1] if found else 0
