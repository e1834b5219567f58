"""Executables: compiled programs as functions of buffers of one backend.

Values live in numbered slots, and each is freed at its last use. Runs of elementwise entries on large arrays are
computed block by block on a CPU, and by one kernel on a GPU. Single ones write into the memory of an operand at its
last use, where nobody else can hold it. The cotangent of a read at a few places of a large array stays sparse on a CPU
(:mod:`meshtape.arrays.indexing.sparse_cotangent`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arrays.backends.backend import cupy_backend
from ...arrays.backends.memory_pool import LARGE, POOL
from ...arrays.core.dispatch import Deferred
from ...arrays.core.dtypes import float32, float64, numpy_form
from ...arrays.core.errors import FOREIGN_ERRORS, type_of_ours
from ...arrays.core.index_template import is_basic
from ...arrays.core.program import Entry, Program, last_uses
from ...arrays.indexing import sparse_cotangent as sparse_ops
from ...arrays.indexing.indexing import GETITEM, INDEX_SET, LAST_WRITES, SCATTER
from ...arrays.indexing.lazy_adam import LAZY_ADAM
from ...arrays.native.chains import as_operand
from ...arrays.ops.matmul import MATMUL
from ..tape.record import picker
from . import cuda_fusion, fusion
from .fusion import FusedRun, chains, is_large, takers

# Below this, taking new memory costs less than saying where the result goes.
SMALLEST_REUSED = 1 << 16


class _ExecutableStep(NamedTuple):
    fn: Callable[..., Any]  # with the params
    args: Callable[[list[Any]], Sequence[Any]]  # from the slots
    outputs: tuple[int, ...]  # slots
    single: bool
    free: tuple[int, ...]  # slots
    into: int | None  # slot whose memory takes the result


class Executable(NamedTuple):
    """A program that runs on buffers of one backend."""

    run: Callable[[Sequence[Any]], list[Any]]
    taken: frozenset[int]
    """Positions of the inputs that are written to, which the caller must not need any more."""

    def __call__(self, buffers: Sequence[Any]) -> list[Any]:
        return self.run(buffers)


def local_executable(
    program: Program, xp: Any, *, sparse: Sequence[int] = (), donated: Sequence[int] = ()
) -> Executable:
    """The program as a function from input buffers to output buffers of the backend whose namespace is ``xp``.

    ``sparse`` are inputs that are sparse cotangents, ``donated`` those whose memory results may take.
    """
    on_cuda = xp.__name__ == "cupy"
    fused = cuda_fusion.executable if on_cuda else fusion.executable
    thin = sparse_ops.sparse_values(program.entries, program.avals, sparse) if xp is np else frozenset()

    def joins(e: Entry, program: Program) -> bool:
        return is_large(e, program) and thin.isdisjoint(v for v in (*e.inputs, *e.outputs) if isinstance(v, int))

    parts: list[Entry | FusedRun] = (
        cuda_fusion.launches(program) if on_cuda else chains(program, joins) if xp is np else list(program.entries)
    )
    slots: dict[Any, int] = {}
    initial: list[Any] = []

    def slot(v: Any, value: Any = None) -> int:
        if v not in slots:
            slots[v] = len(initial)
            initial.append(value)
        return slots[v]

    for v in program.inputs:
        slot(v)
    for v, c in program.constants.items():
        slot(v, c)
    owned = _owned(parts, donated) - thin if xp is np else frozenset()
    taken: set[int] = set()
    steps = []
    for part, free in zip(parts, last_uses(program, parts), strict=True):
        places = [
            slot(v) if isinstance(v, int) else slot(("number", id(v)), _operand(v.value, part, program, xp))
            for v in part.inputs
        ]
        outputs = tuple(map(slot, part.outputs))
        if isinstance(part, FusedRun):
            fn, single, into = fused(part, program), False, None
            if xp is np:
                places_taken = _taken_by_chain(part, program, owned, free)
                if any(k is not None for k in places_taken):
                    taken.update(part.inputs[k] for k in places_taken if k is not None)
                    fn = _within(fn, places_taken)
        else:
            fn, single, into = part.op.bind(xp), part.op.nout == 1, None
            if xp is np:
                fn = numpy_form(fn, program.avals[part.outputs[0]].dtype)
            if not thin.isdisjoint(v for v in part.inputs if isinstance(v, int)):
                mine = [v in owned and v in free and part.inputs.count(v) == 1 for v in part.inputs]
                mine = [m and _is_written(part, i) for i, m in enumerate(mine)]
                taken.update(v for v, m in zip(part.inputs, mine, strict=True) if m)
                fn = _sparse(part, mine)
                if single and part.outputs[0] not in thin:
                    fn = _dense(fn)
            else:
                if part.params:
                    fn = functools.partial(fn, **part.params)
                if part.op is SCATTER and xp is np and part.outputs[0] not in thin:
                    fn = _dense(fn)
                into = _taken(part, program, owned, free)
                if into is not None:
                    taken.add(into)
                elif xp is np and single and part.op.takes_out and not part.params and part.outputs[0] not in thin:
                    fn = _pooled(fn, *program.avals[part.outputs[0]])
        steps.append(
            _ExecutableStep(
                fn, picker(places), outputs, single, tuple(map(slot, free)), None if into is None else slot(into)
            )
        )
    inputs, results = [slots[v] for v in program.inputs], [slots[v] for v in program.outputs]
    known = xp.ndarray
    plain = xp is np and not thin
    as_buffer = xp.asarray if plain else lambda x: x if isinstance(x, Deferred) else xp.asarray(x)  # sparse, or float8

    def run(buffers: Sequence[Any]) -> list[Any]:
        env = initial.copy()
        for i, b in zip(inputs, buffers, strict=True):
            env[i] = b
        for step in steps:
            fn, args, outputs, single, free, into = step
            try:
                out = fn(*args(env)) if into is None else fn(*args(env), out=env[into])
            except FOREIGN_ERRORS as e:
                if (kind := type_of_ours(e)) is None:
                    raise
                raise kind(f"[{_name(parts[steps.index(step)])}] {e} (in a compiled function)") from None
            if single:
                env[outputs[0]] = out if type(out) is known else as_buffer(out)
            else:
                for i, o in zip(outputs, out, strict=True):
                    env[i] = o if type(o) is known else as_buffer(o)
            # A result that nobody reads is among these.
            for i in free:
                env[i] = None
        return [env[i] for i in results]

    if on_cuda:
        run = _on_their_device(run, xp)
    return Executable(run, frozenset(i for i, v in enumerate(program.inputs) if v in taken))


def _name(part: Entry | FusedRun) -> str:
    return "+".join(e.op.name for e in part.entries) if isinstance(part, FusedRun) else part.op.name


def _pooled(fn: Callable[..., Any], shape: tuple[int, ...], dtype: np.dtype) -> Callable[..., Any]:
    """A call whose result is in memory of the pool, if it is large."""
    if math.prod(shape) * dtype.itemsize < LARGE:
        return fn
    return lambda *buffers: fn(*buffers, out=POOL.empty(shape, dtype))


def _sparse(e: Entry, mine: Sequence[bool]) -> Callable[..., Any]:
    """A call whose operands may be sparse; the memory of those that are ``mine`` may take its results."""
    return lambda *buffers: sparse_ops.call(e.op, buffers, e.params, mine)


def _dense(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *buffers: sparse_ops.dense(fn(*buffers))


def _is_written(e: Entry, i: int) -> bool:
    """Whether a call with a sparse operand may write to its ``i``-th operand, if that is dense."""
    return e.op in sparse_ops.ADDS or (e.op is LAZY_ADAM and i in (0, 2, 3))


def _on_their_device(run: Callable[[Sequence[Any]], list[Any]], xp: Any) -> Callable[[Sequence[Any]], list[Any]]:
    """Kernels start on the current device: that of the buffers."""

    def there(buffers: Sequence[Any]) -> list[Any]:
        own = (b.memory if isinstance(b, Deferred) else b for b in buffers)
        where = next((b.device for b in own if hasattr(b, "device") and hasattr(b.device, "id")), None)
        if where is None:
            return run(buffers)
        with where, cupy_backend().memory():
            return run(buffers)

    return there


def _operand(value: Any, part: Entry, program: Program, xp: Any) -> Any:
    """A number of an entry as it is passed: as an array where that changes nothing, which saves NumPy a conversion."""
    dtypes = {program.avals[v].dtype for v in part.inputs if isinstance(v, int)}
    if xp is np and _writes(part) and dtypes in ({float64}, {float32}):
        found = as_operand(value, *dtypes)
        return value if found is None else found
    return value


def _writes(part: Entry | FusedRun) -> bool:
    """Whether the part is one call of a NumPy ufunc: its result is new memory, and it can be told to use other
    memory."""
    return isinstance(part, Entry) and isinstance(part.op.numpy, np.ufunc)


def _owned(parts: Sequence[Entry | FusedRun], donated: Sequence[int]) -> frozenset[int]:
    """Variables with memory that only the program sees: new or donated, and read by no call that returns views."""
    made = {v for p in parts if _copies(p) for v in p.outputs}
    seen = {v for p in parts if not _copies(p) for v in p.inputs if isinstance(v, int)}
    return frozenset(made.union(donated) - seen)


def _copies(part: Entry | FusedRun) -> bool:
    """Whether the results are new memory, no view of an operand."""
    if _writes(part) or isinstance(part, FusedRun):
        return True
    return part.op in (MATMUL, LAZY_ADAM, INDEX_SET, LAST_WRITES) or (
        part.op is GETITEM and not is_basic(part.params["template"])
    )


def _taken_by_chain(
    group: FusedRun, program: Program, owned: frozenset[int], free: Sequence[int]
) -> tuple[int | None, ...]:
    """For each output of a chain the place of an input whose memory it may take, or None."""
    out: list[int | None] = []
    for v, places in zip(group.outputs, takers(group), strict=True):
        aval = program.avals[v]
        fits = (k for k in places if (i := group.inputs[k]) in owned and i in free and program.avals[i] == aval)
        out.append(next((k for k in fits if k not in out), None))
    return tuple(out)


def _within(fn: Callable[..., Any], places: tuple[int | None, ...]) -> Callable[..., Any]:
    """A chain whose results take the memory of these operands, where they are without gaps."""

    def run(*buffers: Any) -> Any:
        into = [None if k is None or not buffers[k].flags.c_contiguous else buffers[k] for k in places]
        return fn(*buffers, into=into)

    return run


def _taken(part: Entry, program: Program, owned: frozenset[int], free: Sequence[int]) -> int | None:
    """The operand whose memory the result may take: its own, of the same shape and dtype, and not used again."""
    if part.op is INDEX_SET:
        x = part.inputs[0]
        return x if x in owned and x in free and part.inputs.count(x) == 1 else None
    if not _writes(part):
        return None
    target = program.avals[part.outputs[0]]
    if target.nbytes < SMALLEST_REUSED or part.params:
        return None
    return next(
        (v for v in part.inputs if isinstance(v, int) and v in owned and v in free and program.avals[v] == target), None
    )
