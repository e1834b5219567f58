"""Elementwise chains of a compiled program that are one CUDA kernel each: the GPU's side of ``fusion``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ...arrays.chains import chains as elementwise
from ...arrays.chains import cuda_codegen, rows
from ...arrays.chains.chains import source
from ...arrays.core.program import Entry, FusedRun, Program
from . import cuda_products
from .fusion import Joins, fuse, grouped, streams

PARAMETER_BYTES = 4000
"""A kernel's parameters take 4096 bytes at most on every device."""

BATCH = 1 << 24
"""Elements that the runs of one launch have together: with more, launches cost nothing beside the work."""


def launches(program: Program) -> list[Entry | FusedRun]:
    """The program as the calls and kernels that a GPU runs one after the other."""
    program = cuda_products.joined(program)
    return with_reductions(batched(chains(program), program), program)


def with_reductions(parts: Sequence[Entry | FusedRun], program: Program) -> list[Entry | FusedRun]:
    """The parts in order, with runs, and single calls, that nothing reads but a reduction of rows joined to it."""
    reads = Counter(v for e in program.entries for v in e.inputs if isinstance(v, int)) + Counter(program.outputs)
    out: list[Entry | FusedRun | None] = []
    made: dict[int, int] = {}  # where the run is that makes nothing else
    for part in parts:
        at = made.get(part.inputs[0]) if isinstance(part, Entry) and rows.reduces_rows(part, program) else None
        if at is not None and reads[part.inputs[0]] == 1:
            run, out[at] = out[at], None
            run = grouped([run], set(run.outputs), program) if isinstance(run, Entry) else run
            part = run._replace(entries=(*run.entries, part), outputs=part.outputs)
        elif not part.members if isinstance(part, FusedRun) else cuda_codegen.expressible(part, program):
            made.update(dict.fromkeys(part.outputs if len(part.outputs) == 1 else (), len(out)))
        out.append(part)
    return [p for p in out if p is not None]


def executable(group: FusedRun, program: Program) -> Callable[..., list[Any]]:
    """The group as one launch: a function of its input buffers that returns its output buffers."""
    of_rows = rows.reduces_rows(group.entries[-1], program)
    return (rows if of_rows else elementwise).executable(group, program)


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


def batched(parts: Sequence[Entry | FusedRun], program: Program) -> list[Entry | FusedRun]:
    """The parts in order, with runs that do the same to different arrays, as an optimizer does to its leaves, made one.

    A run waits for others until its results are read. One that is read by nothing but a sum over all of it ends with
    this sum.
    """
    reads = Counter(v for e in program.entries for v in e.inputs if isinstance(v, int)) + Counter(program.outputs)
    out: list[Entry | FusedRun] = []
    waiting: dict[Any, list[FusedRun]] = {}
    made: dict[int, Any] = {}  # keys of runs that wait, by what they make

    def emit(key: Any) -> None:
        runs = waiting.pop(key)
        for v in (v for r in runs for v in r.outputs):
            del made[v]
        entries, inputs, outputs = (tuple(v for r in runs for v in r[k]) for k in range(3))
        if len(entries) == 1:
            out.append(entries[0])
        else:
            members = tuple(runs) if len(runs) > 1 else ()
            out.append(FusedRun(entries, inputs, outputs, runs[0].shape, members))

    def summed(part: Entry | FusedRun) -> FusedRun | None:
        """The run, which no longer waits by itself, that ends with this sum."""
        if not isinstance(part, Entry) or not cuda_codegen.sums_all(part, program) or reads[part.inputs[0]] > 1:
            return None
        key = made.get(part.inputs[0])
        for run in waiting.get(key, ()):
            if run.outputs == part.inputs:
                waiting[key].remove(run)
                del made[part.inputs[0]]
                if not waiting[key]:
                    del waiting[key]
                return run._replace(entries=(*run.entries, part), outputs=part.outputs)
        return None

    for part in parts:
        total = summed(part)
        for key in () if total else dict.fromkeys(made[v] for v in part.inputs if isinstance(v, int) and v in made):
            emit(key)
        pieces = [
            grouped([p], set(part.outputs), program) if isinstance(p, Entry) else p
            for p in ([total] if total else _pieces(part, program))
        ]
        for run in pieces:
            key, each = _structure(run, program), 8 * (1 + len(run.inputs) + len(run.outputs))
            held = waiting.setdefault(key, [])
            size = sum(math.prod(r.shape) for r in (*held, run))
            if held and ((len(held) + 1) * each > PARAMETER_BYTES or size > BATCH):
                emit(key)
            waiting.setdefault(key, []).append(run)
            made.update(dict.fromkeys(run.outputs, key))
        if not pieces:
            out.append(part)
    for key in list(waiting):
        emit(key)
    return out


def _pieces(part: Entry | FusedRun, program: Program) -> list[Entry | FusedRun]:
    """A run in parts that share no array; none, where it reads operands of other shapes."""
    if isinstance(part, Entry):
        if not cuda_codegen.expressible(part, program):
            return []
        part = grouped([part], set(part.outputs), program)
    shapes = {program.avals[v].shape for v in part.inputs}
    return streams(part, program) if all(s == part.shape or math.prod(s) == 1 for s in shapes) else []


def _structure(run: FusedRun, program: Program) -> Any:
    """A key that runs have in common whose kernels have one text."""
    avals, names = program.avals, {v: i for i, v in enumerate(run.inputs)}
    key: list[Any] = [(avals[v].dtype, math.prod(avals[v].shape) == 1) for v in run.inputs]
    for e in run.entries:
        words = [names[v] if isinstance(v, int) else repr(v.value) for v in e.inputs]
        names[e.outputs[0]] = len(names)
        key.append((e.op, *words, avals[e.outputs[0]].dtype))
    return (*key, *(names[v] for v in run.outputs))


__all__ = ["batched", "chains", "executable", "launches", "source"]
