"""Elementwise chains of a compiled program as one CUDA kernel: the GPU's side of ``fusion``.

For each chain, and for each way in which its operands lie in memory, a kernel is written, compiled once (CuPy keeps it on disk)
and started on the current stream. Operands that are whole and without gaps are read in vectors where their addresses allow it;
others through their strides, so that broadcasting and transposition cost no copy. Offsets have 64 bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...arrays.core.program import Entry, Program
from ...arrays.kernels import launch
from . import cuda_codegen
from .fusion import Failed, FusedRun, Joins, fuse, grouped

THREADS = 256
LANES = 4
"""Elements that a thread has in hand at once."""
BLOCKS_EACH = 16
"""Blocks for each multiprocessor: enough to hide the latency of memory, few enough that starting them costs nothing."""

PARAMETER_BYTES = 4000
"""A kernel's parameters take 4096 bytes at most on every device."""

FULL, ONE, STRIDED = "full", "one", "strided"
"""Layouts of an operand: that of the result, a single element, or any other."""


def layout_of(array: Any, shape: tuple[int, ...]) -> str:
    """The layout of an operand beside a result of ``shape``.

    >>> import numpy as np
    >>> layout_of(np.ones((2, 3)), (2, 3)), layout_of(np.ones(1), (2, 3)), layout_of(np.ones(3), (2, 3))
    ('full', 'one', 'strided')
    """
    if array.size == 1:
        return ONE
    return FULL if tuple(array.shape) == shape and array.flags.c_contiguous else STRIDED


def strides_of(array: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Steps in elements along each dimension of the result; 0 where the operand repeats."""
    lead = len(shape) - array.ndim
    own = tuple(0 if n == 1 else s // array.itemsize for n, s in zip(array.shape, array.strides, strict=True))
    return (0,) * lead + own


def chains(
    program: Program, joins: Joins = cuda_codegen.expressible, shape_of: Callable[[int], Any] | None = None
) -> list[Entry | FusedRun]:
    """The entries in order, with runs of two or more that one kernel can compute made into groups."""
    return [p for part in fuse(program, joins, shape_of) for p in _narrow(part, program)]


def _narrow(part: Entry | FusedRun, program: Program) -> list[Entry | FusedRun]:
    """The part, or its halves where its kernel would take more parameters than CUDA allows."""
    if not isinstance(part, FusedRun):
        return [part]
    ndim = len(part.shape)
    if 8 * (ndim + len(part.outputs) + (1 + ndim) * len(part.inputs)) <= PARAMETER_BYTES:
        return [part]
    if len(part.entries) == 1:
        return list(part.entries)
    middle = len(part.entries) // 2
    out: list[Entry | FusedRun] = []
    for entries, rest in ((part.entries[:middle], part.entries[middle:]), (part.entries[middle:], ())):
        read = set(part.outputs).union(v for e in rest for v in e.inputs if isinstance(v, int))
        out += _narrow(grouped(entries, read, program), program)
    return out


def source(group: FusedRun, program: Program, layouts: Sequence[str]) -> str:
    """CUDA C++ of the kernel ``fused`` for operands that lie as ``layouts`` say: a template over whether it reads vectors."""
    types = [launch.NAMES[program.avals[v].dtype] for v in group.inputs]
    held = [cuda_codegen.register_type(program.avals[v].dtype) for v in group.inputs]
    results = [launch.NAMES[program.avals[v].dtype] for v in group.outputs]
    ndim = len(group.shape)
    name = {v: f"x{i}" for i, v in enumerate(group.inputs)}

    body = []
    for e in group.entries:
        v = e.outputs[0]
        operands = [name[a] if isinstance(a, int) else None for a in e.inputs]
        text = cuda_codegen.expression(e, program, operands)
        name[v] = f"v{v}"
        body.append(f"    const {cuda_codegen.register_type(program.avals[v].dtype)} v{v} = {text};")
    for k, v in enumerate(group.outputs):
        short = results[k] in ("float16", "bfloat16")
        body.append(f"    y{k} = {f'narrow<{results[k]}>({name[v]})' if short else f'({results[k]}){name[v]}'};")

    element = ", ".join([f"{h} x{i}" for i, h in enumerate(held)] + [f"{r}& y{k}" for k, r in enumerate(results)])
    parameters = ["i64 n"]
    parameters += [f"const {t}* in{i}" for i, t in enumerate(types)] + [f"{r}* out{k}" for k, r in enumerate(results)]
    strided = [i for i, how in enumerate(layouts) if how == STRIDED]
    if strided:
        parameters += [f"i64 n{d}" for d in range(1, ndim)] + [f"i64 s{i}_{d}" for i in strided for d in range(ndim)]

    def load(i: int, place: str) -> str:
        read = f"in{i}[{place}]"
        return f"wide({read})" if types[i] in ("float16", "bfloat16") else read

    lines = [f"    const {held[i]} one{i} = {load(i, '0')};" for i, how in enumerate(layouts) if how == ONE]
    lines += [
        "    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x;",
        "    const i64 step = (i64)gridDim.x * blockDim.x;",
        "    i64 done = 0;",
    ]
    if not strided:
        lines += [
            "    if (VECTORS) {",
            f"        done = n / {LANES} * {LANES};",
            f"        for (i64 i = first; i < n / {LANES}; i += step) {{",
        ]
        for i, how in enumerate(layouts):
            if how == FULL:
                vector = f"Vector<{types[i]}, {LANES}>"
                lines.append(f"            const {vector} a{i} = reinterpret_cast<const {vector}*>(in{i})[i];")
        lines += [f"            Vector<{r}, {LANES}> r{k};" for k, r in enumerate(results)]
        args = []
        for i, how in enumerate(layouts):
            at = f"a{i}.at[k]"
            args.append(f"one{i}" if how == ONE else f"wide({at})" if types[i] in ("float16", "bfloat16") else at)
        args += [f"r{k}.at[k]" for k in range(len(results))]
        lines += ["#pragma unroll", f"            for (int k = 0; k < {LANES}; ++k) element({', '.join(args)});"]
        lines += [
            f"            reinterpret_cast<Vector<{r}, {LANES}>*>(out{k})[i] = r{k};" for k, r in enumerate(results)
        ]
        lines += ["        }", "    }"]
    lines.append("    for (i64 i = done + first; i < n; i += step) {")
    if strided:
        lines.append("        i64 rest = i;")
        for d in range(ndim - 1, 0, -1):
            lines.append(f"        const i64 c{d} = rest % n{d};")
            lines.append(f"        rest /= n{d};")
        lines.append("        const i64 c0 = rest;")
    args = []
    for i, how in enumerate(layouts):
        place = "i" if how == FULL else " + ".join(f"c{d} * s{i}_{d}" for d in range(ndim))
        args.append(f"one{i}" if how == ONE else load(i, place))
    args += [f"out{k}[i]" for k in range(len(results))]
    lines += [f"        element({', '.join(args)});", "    }"]
    return "\n".join(
        [
            '#include "types.cuh"',
            cuda_codegen.PRELUDE,
            f"__device__ inline void element({element})",
            "{",
            *body,
            "}",
            "",
            "template <bool VECTORS>",
            f"__global__ void fused({', '.join(parameters)})",
            "{",
            *lines,
            "}",
            "",
        ]
    )


def executable(group: FusedRun, program: Program) -> Callable[..., list[Any]]:
    """The group as a function of its input buffers that returns its output buffers, made by one kernel.

    ``into`` and ``failed`` are those of the CPU's :func:`~meshtape.autodiff.compiler.fusion.executable`.
    """
    shape, size = group.shape, math.prod(group.shape)
    dtypes = [program.avals[v].dtype for v in group.outputs]
    files: dict[tuple[str, ...], str] = {}

    def run(*inputs: Any, into: Sequence[Any] = (), failed: Failed | None = None) -> list[Any]:
        try:
            return compute(inputs, into or [None] * len(dtypes))
        except Exception as e:
            if failed is None:
                raise
            raise failed(e, group.entries) from e

    def compute(inputs: Sequence[Any], into: Sequence[Any]) -> list[Any]:
        runner = launch.runner()
        outputs = [runner.xp.empty(shape, d) if o is None else o for o, d in zip(into, dtypes, strict=True)]
        if size == 0:
            return outputs
        layouts = tuple(layout_of(a, shape) for a in inputs)
        file = files.get(layouts)
        if file is None:
            text = source(group, program, layouts)
            file = f"fused_{hashlib.sha256(text.encode()).hexdigest()[:24]}.cu"
            launch.GENERATED[file] = text
            files[layouts] = file
        addresses = [runner.address(a) for a in (*inputs, *outputs)]
        whole = [p for p, how in zip(addresses, layouts + (FULL,) * len(outputs), strict=True) if how == FULL]
        vectors = STRIDED not in layouts and all(p % 16 == 0 for p in whole)
        arguments = [np.int64(size), *map(np.uint64, addresses)]
        if STRIDED in layouts:
            arguments += map(np.int64, shape[1:])
            for a, how in zip(inputs, layouts, strict=True):
                if how == STRIDED:
                    arguments += map(np.int64, strides_of(a, shape))
        each = LANES if vectors else 1
        blocks = min(-(-size // (THREADS * each)), runner.properties().multiprocessors * BLOCKS_EACH)
        runner.launch(file, launch.named("fused", vectors), (max(blocks, 1), 1, 1), (THREADS, 1, 1), arguments)
        return outputs

    return run


__all__ = ["chains", "executable", "layout_of", "source"]
