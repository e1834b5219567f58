"""Fusion: elementwise chains of a compiled program, computed block by block.

NumPy computes ``a * b + c`` in two passes over memory and a temporary of full size. For large arrays that takes most of
the time: the data leave the cache between the passes, and every temporary is fresh memory from the system. Here a run
of elementwise entries of one shape is computed block after block: a block passes through all of them while it is in the
cache, and only values with a later use are written to memory in full. Blocks are independent, so several threads share
them.

The numbers are those of the unfused run, bit for bit: the same NumPy loops run on the same operands, and the kernels in
C (see :mod:`~meshtape.arrays.native.chains`) round as they do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arrays.backends.memory_pool import fresh
from ...arrays.backends.threads import SMALLEST_SHARED, share
from ...arrays.core.dtypes import numpy_form
from ...arrays.core.program import Entry, FusedRun, Program
from ...arrays.core.shape_rules import elementwise
from ...arrays.native.chains import ChainCall, run_of, takes
from ...arrays.ops.elementwise import ASTYPE

# A block of float64 scratch is 128 KiB: the handful that a chain keeps alive fit into a second-level cache.
BLOCK = 16_384
# Below this size the arrays fit the cache anyway, and a block would cost more than it saves.
SMALLEST = 65_536
SMALLEST_RUN = 16_384


def _is_elementwise(e: Entry) -> bool:
    return len(e.outputs) == 1 and (e.op.infer is elementwise or e.op is ASTYPE)


def is_large(e: Entry, program: Program) -> bool:
    """Whether an elementwise entry is on arrays large enough for blocks."""
    if not _is_elementwise(e):
        return False
    shape = program.avals[e.outputs[0]].shape
    size = math.prod(shape)
    if size >= SMALLEST:
        return True
    # A run in C pays earlier, where nothing is broadcast but numbers.
    return (
        size >= SMALLEST_RUN
        and takes(e, program)
        and all(program.avals[v].shape in (shape, ()) for v in e.inputs if isinstance(v, int))
    )


Failed = Callable[[Exception, Sequence[Entry]], Exception]
Joins = Callable[[Entry, Program], bool]


def fuse(
    program: Program, joins: Joins = is_large, shape_of: Callable[[int], Any] | None = None
) -> list[Entry | FusedRun]:
    """The entries in order, with runs of two or more of one shape for which ``joins`` holds made into groups.

    ``shape_of`` gives a key of each variable's shape where avals are not enough: equal blocks on one rank may differ on
    another.
    """
    avals = program.avals
    shape_of = shape_of or (lambda v: avals[v].shape)
    out: list[Entry | FusedRun] = []
    run: list[Entry] = []
    entries = late(program, joins, shape_of)
    last_read = {v: i for i, e in enumerate(entries) for v in e.inputs if isinstance(v, int)}
    last_read.update(dict.fromkeys(program.outputs, len(entries)))

    def close(position: int) -> None:
        read_later = {v for e in run for v in e.outputs if last_read.get(v, -1) >= position}
        out.extend(run if len(run) < 2 else [grouped(run, read_later, program)])
        run.clear()

    for i, e in enumerate(entries):
        fits = joins(e, program)
        if not fits or (run and shape_of(run[0].outputs[0]) != shape_of(e.outputs[0])):
            close(i)
        if fits:
            run.append(e)
        else:
            out.append(e)
    close(len(entries))
    return out


def grouped(run: Sequence[Entry], read_later: set[int], program: Program) -> FusedRun:
    """The entries as one run; ``read_later`` are variables that others read."""
    made = {e.outputs[0] for e in run}
    inputs = dict.fromkeys(v for e in run for v in e.inputs if isinstance(v, int) and v not in made)
    return FusedRun(tuple(run), tuple(inputs), tuple(sorted(made & read_later)), program.avals[run[0].outputs[0]].shape)


def streams(group: FusedRun, program: Program) -> list[Entry | FusedRun]:
    """The group in parts that share no array of its shape, as the leaves of a tree that an optimizer goes over.

    One after the other they need fewer blocks in the cache than all at once.
    """
    leader: dict[int, int] = {}

    def find(v: int) -> int:
        while leader.setdefault(v, v) != v:
            v = leader[v]
        return v

    for e in group.entries:
        for v in e.inputs:
            if isinstance(v, int) and program.avals[v].shape == group.shape:
                leader[find(v)] = find(e.outputs[0])
    parts: dict[int, list[Entry]] = {}
    for e in group.entries:
        parts.setdefault(find(e.outputs[0]), []).append(e)
    if len(parts) == 1:
        return [group]
    kept = set(group.outputs)
    return [grouped(p, kept, program) if len(p) > 1 else p[0] for p in parts.values()]


def chains(
    program: Program, joins: Joins = is_large, shape_of: Callable[[int], Any] | None = None
) -> list[Entry | FusedRun]:
    """The entries in order, with the groups that are computed block by block."""
    parts = fuse(program, joins, shape_of)
    return [p for part in parts for p in (streams(part, program) if isinstance(part, FusedRun) else [part])]


def takers(group: FusedRun) -> tuple[tuple[int, ...], ...]:
    """For each output the inputs, by place, whose memory it may take: nothing reads these after it is written."""
    last = {v: i for i, e in enumerate(group.entries) for v in e.inputs if isinstance(v, int)}
    made = {e.outputs[0]: i for i, e in enumerate(group.entries)}
    return tuple(tuple(k for k, v in enumerate(group.inputs) if last[v] <= made[out]) for out in group.outputs)


def late(program: Program, joins: Joins, shape_of: Callable[[int], Any]) -> list[Entry]:
    """The entries with those that join a run moved to where their result is first read, if that is by one of the same
    shape.

    So gradients that are scaled, tree by tree, before an optimizer goes over them leaf by leaf, are scaled in its runs.
    An entry waits only where its operands take no more memory than its result, give or take a table that is broadcast.
    """
    avals = program.avals
    fits = {e.outputs[0] for e in program.entries if joins(e, program)}
    entries = _narrowed_at_once(program, fits)
    reader: dict[int, Entry] = {}
    for e in entries:
        for v in e.inputs:
            if isinstance(v, int):
                reader.setdefault(v, e)

    def waits(e: Entry) -> bool:
        v = next(iter(e.outputs), None)
        if v not in fits or v not in reader or fits.isdisjoint(reader[v].outputs):
            return False
        read = sum(avals[a].nbytes for a in dict.fromkeys(a for a in e.inputs if isinstance(a, int)) if avals[a].shape)
        return shape_of(v) == shape_of(reader[v].outputs[0]) and read <= 1.25 * avals[v].nbytes

    waiting: dict[int, int] = {}  # places of entries, by what they make
    out: list[Entry] = []
    for i, e in enumerate(entries):
        if waits(e):
            waiting[e.outputs[0]] = i
            continue
        # Waiting entries that it reads go before it, and those that they read before them.
        needed, found = [i], []
        while needed:
            found.append(needed.pop())
            made = (waiting.pop(v, None) for v in entries[found[-1]].inputs if isinstance(v, int))
            needed.extend(k for k in made if k is not None)
        out.extend(entries[k] for k in sorted(found))
    return out


def _narrowed_at_once(program: Program, fits: set[int]) -> list[Entry]:
    """The entries with casts to a narrower dtype moved to where a run makes their operand, past entries that make
    little of it.

    So the cotangent of a product that has a bias is rounded in the run that makes it, and not read again after the
    bias has its sum.
    """
    avals, out = program.avals, list[Entry]()
    at: dict[int, int] = {}  # behind which place a cast of a variable may go
    for e in program.entries:
        v = e.inputs[0] if e.op is ASTYPE and fits.issuperset(e.outputs) else None
        if v in at and 2 * avals[e.outputs[0]].nbytes <= avals[v].nbytes:
            place = at.pop(v) + 1
            out.insert(place, e)
            at = {k: i + (i >= place) for k, i in at.items()}
            continue
        at = {k: i for k, i in at.items() if all(16 * avals[o].nbytes <= avals[k].nbytes for o in e.outputs)}
        out.append(e)
        if fits.issuperset(e.outputs) and e.outputs:
            at[e.outputs[0]] = len(out) - 1
    return out


class _FusionStep(NamedTuple):
    fn: Callable[..., Any]
    writes: bool  # whether `fn` takes out=
    args: tuple[tuple[int, Any], ...]  # (slot, None) or (-1, scalar)
    params: Mapping[str, Any]
    target: int  # slot
    entries: tuple[Entry, ...]

    def __call__(self, env: list[Any]) -> None:
        args = [env[k] if k >= 0 else c for k, c in self.args]
        if self.writes:
            self.fn(*args, out=env[self.target], **self.params)
        else:
            env[self.target][...] = self.fn(*args, **self.params)


class _RunStep(NamedTuple):
    run: ChainCall
    args: tuple[tuple[int, Any], ...]  # (slot, None) or (-1, array)
    targets: tuple[int, ...]

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.run.entries

    def __call__(self, env: list[Any]) -> None:
        self.run([env[k] if k >= 0 else c for k, c in self.args], [env[k] for k in self.targets])


def _take(step: _FusionStep | _RunStep, env: list[Any], failed: Failed | None) -> None:
    try:
        step(env)
    except Exception as e:
        if failed is None:
            raise
        raise failed(e, step.entries) from e


def _pieces(group: FusedRun, program: Program) -> list[Entry | ChainCall]:
    """The entries in order, with those that the kernels in C take made into runs."""
    out: list[Entry | ChainCall] = []
    last_read = {v: i for i, e in enumerate(group.entries) for v in e.inputs if isinstance(v, int)}

    def close(start: int, stop: int) -> None:
        """Append the entries from ``start`` to ``stop`` as a run; in halves where it is too long for one call."""
        run = group.entries[start:stop]
        if len(run) < 2:
            out.extend(run)
            return
        later = {v for e in run for v in e.outputs if last_read.get(v, -1) >= stop} | set(group.outputs)
        made = run_of(run, program, later)
        if made is not None:
            out.append(made)
            return
        middle = (start + stop) // 2
        close(start, middle)
        close(middle, stop)

    start = 0
    for i, e in enumerate(group.entries):
        taken = takes(e, program)
        before = group.entries[start].outputs[0]
        if not taken or program.avals[before].dtype != program.avals[e.outputs[0]].dtype:
            close(start, i)
            start = i
        if not taken:
            out.append(e)
            start = i + 1
    close(start, len(group.entries))
    return out


def _in_rows(a: np.ndarray) -> bool:
    """Whether a run in C takes the operand as it is: the elements of a row lie together, or are one."""
    return a.ndim == 0 or a.shape[-1] == 1 or a.strides[-1] == a.itemsize


def executable(group: FusedRun, program: Program) -> Callable[..., list[np.ndarray]]:
    """The group as a function of its input buffers (NumPy's) that returns its output buffers.

    ``into`` may give memory for them: contiguous arrays of the right shape and dtype, or None for new ones; that of an
    input as :func:`takers` allows. ``failed`` turns an error and the entries that it came from into the error to raise.
    """
    # Slots: inputs first, then outputs, then scratch that is reused as soon as a value has been read for the last time.
    slot_of = {v: i for i, v in enumerate((*group.inputs, *group.outputs))}
    pieces = _pieces(group, program)
    reads = [[v for v in (p.reads if isinstance(p, ChainCall) else p.inputs) if isinstance(v, int)] for p in pieces]
    last_read = {v: i for i, read in enumerate(reads) for v in read}
    first_scratch = len(slot_of)
    scratch: list[np.dtype] = []
    free: list[int] = []
    steps: list[_FusionStep | _RunStep] = []

    def target(v: int) -> int:
        if v not in slot_of:
            dtype = program.avals[v].dtype
            match = next((k for k in free if scratch[k - first_scratch] == dtype), None)
            if match is None:
                match = first_scratch + len(scratch)
                scratch.append(dtype)
            else:
                free.remove(match)
            slot_of[v] = match
        return slot_of[v]

    for i, p in enumerate(pieces):
        if isinstance(p, ChainCall):
            args = tuple((slot_of[a], None) if isinstance(a, int) else (-1, a) for a in p.reads)
            steps.append(_RunStep(p, args, tuple(map(target, p.writes))))
        else:
            fn = numpy_form(p.op.numpy, program.avals[p.outputs[0]].dtype)
            args = tuple((slot_of[a], None) if isinstance(a, int) else (-1, a.value) for a in p.inputs)
            writes = isinstance(p.op.numpy, np.ufunc)
            steps.append(_FusionStep(fn, writes, args, dict(p.params), target(p.outputs[0]), (p,)))
        # Released after this piece's own targets are chosen: no ufunc writes where it still reads other elements from.
        free.extend(slot_of[a] for a in dict.fromkeys(reads[i]) if last_read[a] == i and slot_of[a] >= first_scratch)
    n_inputs, n_outputs = len(group.inputs), len(group.outputs)
    out_dtypes = [program.avals[v].dtype for v in group.outputs]
    shape = group.shape
    # A single run in C needs no blocks here: it works in blocks itself.
    alone = steps[0] if len(steps) == 1 and isinstance(steps[0], _RunStep) else None
    size = math.prod(shape)

    def run(
        *inputs: np.ndarray, into: Sequence[np.ndarray | None] = (), failed: Failed | None = None
    ) -> list[np.ndarray]:
        given = into or [None] * n_outputs
        outputs = [fresh(shape, d) if o is None else o for o, d in zip(given, out_dtypes, strict=True)]
        whole = alone is not None and all(_in_rows(a) for a in inputs)
        if whole and size < SMALLEST_SHARED:
            _take(alone, [*inputs, *outputs], failed)
            return outputs
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
        per_block = max(1, rows if whole else BLOCK // width)

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
                for step in steps:
                    _take(step, env, failed)

        share(rows, work, size=size)
        return outputs

    return run
