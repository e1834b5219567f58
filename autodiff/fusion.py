"""Elementwise chains of a compiled program, computed block by block.

NumPy computes ``a * b + c`` in two passes over memory and a temporary of full size. For large arrays that is what the time goes
into: the data leave the cache between the passes, and every temporary is new memory that the system has to hand out first. Here
a run of elementwise entries of one shape is computed block after block: a block passes through all of them while it is in the
cache, and only what is used later is ever written to memory in full. Blocks are independent, so that several threads share them.

The numbers are those of the unfused run, bit for bit: the same NumPy loops run on the same operands.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from ..arrays._infer import elementwise
from ..arrays.elementwise import ASTYPE
from ..arrays.program import Entry, Program

# A block of float64 scratch is 128 KiB: the handful that a chain keeps alive fit into a second-level cache.
BLOCK = 16_384
# Below this size the arrays fit the cache anyway, and a block would cost more than it saves.
SMALLEST = 65_536
# Below this size a second thread costs more than it brings.
SMALLEST_FOR_THREADS = 1 << 20


class Group(NamedTuple):
    """A run of elementwise entries of one shape. ``inputs`` come from outside, ``outputs`` are used outside."""

    entries: tuple[Entry, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    shape: tuple[int, ...]


def _is_elementwise(e: Entry) -> bool:
    return len(e.outputs) == 1 and (e.op.infer is elementwise or e.op is ASTYPE)


def _is_large(e: Entry, program: Program) -> bool:
    return _is_elementwise(e) and math.prod(program.avals[e.outputs[0]].shape) >= SMALLEST


def fuse(program: Program, joins: Callable[[Entry, Program], bool] = _is_large) -> list[Entry | Group]:
    """The entries in order, with runs of two or more of one shape for which ``joins`` holds made into groups."""
    out: list[Entry | Group] = []
    run: list[Entry] = []
    # What is read after each position, from the back.
    read_later: list[set[int]] = [set(program.outputs)]
    for e in reversed(program.entries):
        read_later.append(read_later[-1] | {v for v in e.inputs if isinstance(v, int)})
    read_later.reverse()

    def close(position: int) -> None:
        if len(run) < 2:
            out.extend(run)
        else:
            made = {e.outputs[0] for e in run}
            inputs = dict.fromkeys(v for e in run for v in e.inputs if isinstance(v, int) and v not in made)
            outputs = tuple(v for v in made if v in read_later[position])
            shape = program.avals[run[0].outputs[0]].shape
            out.append(Group(tuple(run), tuple(inputs), tuple(sorted(outputs)), shape))
        run.clear()

    for i, e in enumerate(program.entries):
        shape = program.avals[e.outputs[0]].shape
        fits = joins(e, program)
        if not fits or (run and program.avals[run[0].outputs[0]].shape != shape):
            close(i)
        if fits:
            run.append(e)
        else:
            out.append(e)
    close(len(program.entries))
    return out


class _Step(NamedTuple):
    fn: Callable[..., Any]
    writes: bool  # whether `fn` takes out=
    args: tuple[tuple[int, Any], ...]  # (slot, None) or (-1, scalar)
    params: Mapping[str, Any]
    target: int  # slot
    dtype: np.dtype


def executable(group: Group, program: Program) -> Callable[..., list[np.ndarray]]:
    """The group as a function of its input buffers (NumPy's) that returns its output buffers."""
    # Slots: inputs first, then outputs, then scratch that is reused as soon as a value has been read for the last time.
    slot_of = {v: i for i, v in enumerate((*group.inputs, *group.outputs))}
    last_read: dict[int, int] = {}
    for i, e in enumerate(group.entries):
        for v in e.inputs:
            if isinstance(v, int):
                last_read[v] = i
    first_scratch = len(slot_of)
    scratch: list[np.dtype] = []
    free: list[int] = []
    steps = []
    for i, e in enumerate(group.entries):
        v, aval = e.outputs[0], program.avals[e.outputs[0]]
        args = tuple((slot_of[a], None) if isinstance(a, int) else (-1, a.value) for a in e.inputs)
        if v not in slot_of:
            match = next((k for k in free if scratch[k - first_scratch] == aval.dtype), None)
            if match is None:
                match = first_scratch + len(scratch)
                scratch.append(aval.dtype)
            else:
                free.remove(match)
            slot_of[v] = match
        # Released after this entry's own target is chosen: no ufunc writes where it still reads other elements from.
        read = dict.fromkeys(a for a in e.inputs if isinstance(a, int))
        free.extend(slot_of[a] for a in read if last_read[a] == i and slot_of[a] >= first_scratch)
        fn = e.op.numpy
        steps.append(_Step(fn, isinstance(fn, np.ufunc), args, dict(e.params), slot_of[v], aval.dtype))
    n_inputs, n_outputs = len(group.inputs), len(group.outputs)
    out_dtypes = [program.avals[v].dtype for v in group.outputs]
    shape = group.shape

    def run(*inputs: np.ndarray) -> list[np.ndarray]:
        outputs = [np.empty(shape, d) for d in out_dtypes]
        flat = all(a.ndim == 0 or (a.shape == shape and a.flags.c_contiguous) for a in inputs)
        if flat:
            sources = [a if a.ndim == 0 else a.reshape(-1) for a in inputs]
            targets = [o.reshape(-1) for o in outputs]
            rows, width, axis_shape = math.prod(shape), 1, ()
        else:
            # Blocks of the first dimension; an operand that lacks it, or repeats along it, is used whole in each.
            sources, targets = list(inputs), outputs
            rows, axis_shape = shape[0], shape[1:]
            width = max(1, math.prod(axis_shape))
        cut = [a.ndim == len(axis_shape) + 1 and a.shape[0] == rows and rows > 1 for a in sources]
        per_block = max(1, BLOCK // width)

        def work(start: int, stop: int) -> None:
            buffers = [np.empty((per_block, *axis_shape), d) for d in scratch]
            env: list[Any] = [None] * (n_inputs + n_outputs + len(scratch))
            for lo in range(start, stop, per_block):
                hi = min(lo + per_block, stop)
                for i, a in enumerate(sources):
                    env[i] = a[lo:hi] if cut[i] else a
                for i, o in enumerate(targets):
                    env[n_inputs + i] = o[lo:hi]
                for i, b in enumerate(buffers):
                    env[first_scratch + i] = b[: hi - lo]
                for s in steps:
                    args = [env[k] if k >= 0 else c for k, c in s.args]
                    if s.writes:
                        s.fn(*args, out=env[s.target], **s.params)
                    else:
                        env[s.target][...] = s.fn(*args, **s.params)

        threads = _threads() if math.prod(shape) >= SMALLEST_FOR_THREADS else 1
        if threads == 1 or rows < 2 * threads:
            work(0, rows)
        else:
            share = -(-rows // threads)
            done = [_pool().submit(work, i, min(i + share, rows)) for i in range(0, rows, share)]
            for d in done:
                d.result()
        return outputs

    return run


def _threads() -> int:
    """Threads that elementwise work may use: ``OMP_NUM_THREADS`` where it is set, as for BLAS, else the processors."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(int(wanted), available)) if wanted.isdecimal() else available


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), thread_name_prefix="meshtape-fused")
