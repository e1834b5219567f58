"""Streaming: arrays larger than memory, in Zarr stores, computed block by block.

Each rank's block is divided further, along the dimension that is split first, and the program is partitioned for all
these *virtual ranks*. A rank runs them one after the other, reading their blocks from the store and writing their
results there. Pending reductions (a sum, a maximum over all) are joined block by block. Where later calls need their
values, the blocks are read once more (:mod:`~meshtape.parallel.partition.streaming_passes`). Before anything is read,
the memory of a block's program is computed from its liveness and compared with the limit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.blocks import Box
from ...arrays.core.devices import CPU
from ...arrays.core.dispatch import refuse_history, wrap
from ...arrays.core.dtypes import is_low_precision
from ...arrays.core.errors import MeshError, OutOfMemory, ShardingConflict, check_function
from ...arrays.core.formatting import human_bytes
from ...arrays.core.op import ShapeDtype, not_recording, recording, state
from ...arrays.core.program import Program, simplify
from ...arrays.ops.creation import asarray
from ...autodiff.captures.static_results import ARRAY, filled, refuse_traced
from ...autodiff.captures.tracing import Tracer, _Trace
from ...autodiff.tape.tape import Tape
from ...storage.stores.atomic_directory import writing
from ...storage.stores.store import location
from ..base.device_memory import current_memory, on_host
from ..execution.executor import Prepared
from ..mesh.mesh import Mesh
from ..mesh.mesh_transfer import joined
from ..partition.partition import partition
from ..partition.rank_program import LocalCall, RankProgram
from ..partition.streaming_passes import Pass, passes_of
from ..sharding.placement import REDUCERS, REPLICATED, Layout, Sharding, block_box, make_layout
from .stream_store import PendingStored, Stored, StoreTarget, committed, open_array, refuse_existing, scratch_room

MOST_PARTS = 1 << 16
_NO_DERIVATIVE = "streams have no derivative; take that of a function of arrays in memory"


class _StreamJob(NamedTuple):
    """The job of a rank: the program, its virtual ranks, sources of inputs, targets of outputs, and names of axes."""

    program: RankProgram
    virtual: tuple[int, ...]
    inputs: tuple[Any, ...]  # path of a store, contributions in one, or the value itself
    outputs: tuple[StoreTarget | PendingStored | None, ...]
    names: tuple[str, ...]


def stream(
    fn: Callable[..., Any], *args: Any, memory: int | str = "256 MiB", to: Any = None, scratch: Any = None
) -> Any:
    """``fn(*args)`` on arrays larger than memory, block by block.

    Parameters
    ----------
    fn
        An ordinary function of whole arrays: elementwise calls, products and normalisation along dimensions that are
        not split, sums and extrema along those that are. The arrays are read once more for each reduction over all
        blocks whose value is used further (``x - mean(x)``, a softmax over the split dimension).
    *args
        :class:`Stored` arrays of one mesh, arrays and numbers. Arrays that are not stored go to every rank whole.
    memory
        Bytes that a rank may use for the blocks that it works on: a number, or a text such as ``"1 GiB"``.
    to
        Path of a Zarr array to write the result to; a tree of paths, like the result, for several; None where a result
        is a reduction, which is given back as an array.
    scratch
        Directory (or address of a store) that every worker can use, for values that are split over other blocks later:
        sums of rows whose columns are split too. By default beside the first path of ``to``, or a temporary directory
        where all ranks are in this process. It is emptied at the end.

    Returns
    -------
    tree
        Like ``fn``'s: :class:`Stored` for written results, arrays for reductions.

    Raises
    ------
    GradientError
        Where a tape watches an array that ``fn`` takes or reads from around it: streams have no derivative.
    ShardingConflict
        Where a value would have to be gathered from all blocks (a sort along the split dimension), or one that is split
        has no place to go; the message shows the step, and a remedy.
    CheckpointExists
        Where something is already at a path of ``to``.
    CheckpointReplaced
        Where a writer replaced one of the stored arrays meanwhile, or a part of it.
    StorageFull, StoreError
        Where a rank cannot write its blocks. Nothing is left at the paths of ``to`` after an error. A killed process
        may leave files, but no array: ``mt.storage.leftovers`` lists them, and the next call removes them; in an object
        store, the next call for that path replaces them.
    OutOfMemory
        Where not even one row of a block fits the limit. Nothing was read or written then.
    """
    check_function("stream", fn)
    limit = _bytes(memory)
    leaves, treedef = trees.flatten(args, is_leaf=lambda x: isinstance(x, Stored))
    stored = [x for x in leaves if isinstance(x, Stored)]
    if not stored:
        raise MeshError("[stream] needs an argument from mt.from_zarr(…)")
    mesh = stored[0].sharding.mesh
    if any(s.sharding.mesh is not mesh for s in stored):
        raise MeshError("[stream] arrays of two meshes")
    for x in leaves:
        refuse_history("stream", x, _NO_DERIVATIVE)
    leaves = [x if isinstance(x, Stored) or not isinstance(x, Array | np.ndarray) else asarray(x) for x in leaves]
    given = [x for x in leaves if isinstance(x, Stored | Array)]
    program, result_def, statics = _traced(fn, leaves, treedef)
    passes, parts = _divide(program, given, mesh, limit)
    paths = _paths(to, result_def, statics)
    last = passes[-1].program
    # A sum over blocks is kept in float32 until it is whole; it is stored, and returned, in the function's dtype.
    shapes = [(program.avals[o], last.layouts[v]) for o, v in zip(program.outputs, last.outputs, strict=True)]
    written = [_over_blocks(layout, last.sizes) for _, layout in shapes]
    for i, (path, (_, layout)) in enumerate(zip(paths, shapes, strict=True)):
        if written[i] and path is None:
            raise ShardingConflict(f"[stream] result {i} is split over the blocks: say where it goes, with to=…")
        if written[i] and len({op for _, op in layout.partials}) > 1:
            raise ShardingConflict(
                f"[stream] result {i} is split over the blocks, and two reductions over ranks at once"
            )
    for path in paths:
        if path is not None:
            refuse_existing(path)
    by_store = [any(_over_blocks(p.layouts[v], p.sizes) for v in p.outputs) for p, t in passes if t is not None]
    pending = [w and bool(layout.partials) for w, (_, layout) in zip(written, shapes, strict=True)]
    with contextlib.ExitStack() as stack:
        room = stack.enter_context(scratch_room(scratch, paths, mesh, any(by_store) or any(pending)))
        targets: list[StoreTarget | None] = []
        for path, w, (aval, layout) in zip(paths, written, shapes, strict=True):
            chunks = block_box(layout, last.sizes, aval.shape, 0).shape if w else aval.shape
            targets.append(None if path is None else stack.enter_context(committed(path, aval, chunks)))
        with Stored.in_one_state(stored):
            values = _run_passes(passes, given, program, mesh, parts, targets, room)
        for value, target, w in zip(values, targets, written, strict=True):
            if target is not None and not w:
                target.open()[...] = value.astype(target.dtype, copy=False)
    out: list[Any] = []
    for value, (aval, layout), path, w in zip(values, shapes, paths, written, strict=True):
        if w:
            kept = make_layout({d: [a for a in axes if a < len(mesh.sizes)] for d, axes in layout.shards}, {})
            out.append(Stored(str(path), aval.shape, aval.dtype, Sharding.of(mesh, kept)))
        elif path is not None:
            out.append(Stored(path, aval.shape, aval.dtype, Sharding.of(mesh, REPLICATED)))
        else:
            out.append(asarray(value.astype(aval.dtype, copy=False)))
    return trees.unflatten(result_def, filled(statics, out))


def _run_passes(
    passes: Sequence[Pass],
    given: Sequence[Any],
    program: Program,
    mesh: Mesh,
    parts: int,
    results: Sequence[StoreTarget | None],
    room: str | None,
) -> list[Any]:
    """All passes over the blocks: the results of the last, None for those that were written."""
    sources: dict[int, Any] = {
        v: x.path if isinstance(x, Stored) else np.asarray(x) for v, x in zip(program.inputs, given, strict=True)
    }
    sources.update({v: np.asarray(wrap(c)) for v, c in program.constants.items()})
    values: list[Any] = []
    for p, targets in passes:
        outputs: list[Any] = []
        for i, v in enumerate(p.outputs):
            layout = p.layouts[v]
            if not _over_blocks(layout, p.sizes):
                outputs.append(None)
            elif targets is None and not layout.partials:
                outputs.append(results[i])
            else:
                outputs.append(PendingStored.create(f"{room}/{len(sources)}-{i}", p, v))
        values = _run_pass(p, mesh, parts, sources, outputs)
        found = [x if o is None else o for x, o in zip(values, outputs, strict=True)]
        if targets is not None:
            sources.update(zip(targets, found, strict=True))
            continue
        for i, (v, o) in enumerate(zip(p.outputs, outputs, strict=True)):
            if isinstance(o, PendingStored):  # contributions are joined when they are read again
                layouts = {v: p.layouts[v].reduced()}
                join = RankProgram(
                    p.sizes, (v,), (), (v,), {v: program.avals[program.outputs[i]]}, layouts, name="stream"
                )
                _run_pass(join, mesh, parts, {v: o}, [results[i]])
    return values


def _run_pass(
    p: RankProgram,
    mesh: Mesh,
    parts: int,
    sources: Mapping[int, Any],
    outputs: Sequence[StoreTarget | PendingStored | None],
) -> list[np.ndarray | None]:
    """One pass over the blocks: its outputs, joined; None for those that go to ``outputs``."""
    inputs = tuple(sources[v] for v in p.inputs)
    names = (*mesh.names, "block")
    payloads = {
        r: _StreamJob(p, tuple(range(r * parts, (r + 1) * parts)), inputs, tuple(outputs), names)
        for r in _needed(p, mesh)
    }
    found: dict[int, list[Any]] = {}
    for part in mesh.run_on_blocks(_run_blocks, [], payloads):
        found.update(part)
    return [
        None if o is not None else _joined({r: found[r][i] for r in sorted(found)}, p, v, mesh, parts)
        for i, (v, o) in enumerate(zip(p.outputs, outputs, strict=True))
    ]


def _bytes(memory: int | str) -> int:
    from dask.utils import parse_bytes

    try:
        found = int(parse_bytes(memory))
    except (ValueError, TypeError, AttributeError):
        found = 0
    if found <= 0:
        raise MeshError(f"[stream] memory= is a number of bytes, or a text such as '256 MiB', got {memory!r}")
    return found


def _traced(fn: Callable[..., Any], leaves: Sequence[Any], treedef: trees.TreeDef) -> tuple[Program, Any, list[Any]]:
    """The program of a function, traced on stand-ins for stored arrays."""
    trace = _Trace()

    def stand_in(x: Any) -> Any:
        if not isinstance(x, Stored | Array):
            return x
        aval = ShapeDtype(tuple(x.shape), x.dtype)
        return wrap(Tracer(trace, trace.builder.input(aval), aval, CPU, None, None))

    # Tapes keep recording, so that results of watched arrays are known as such.
    others = [r for r in state.recorders if not isinstance(r, Tape)]
    with not_recording(*others) if others else contextlib.nullcontext(), recording(trace):
        result = fn(*trees.unflatten(treedef, list(map(stand_in, leaves))))
    trace.check_refusals()
    outs, result_def = trees.flatten(result)
    outputs = [trace._var(o) for o in outs if isinstance(o, Array)]
    for lifted in trace.lifted.values():
        refuse_history("stream", lifted.array, _NO_DERIVATIVE)
    for o in outs:
        refuse_traced("[stream] the function", o)
    statics = [ARRAY if isinstance(o, Array) else o for o in outs]
    return simplify(trace.builder.build(outputs)), result_def, statics


def _divide(program: Program, given: Sequence[Any], mesh: Mesh, limit: int) -> tuple[list[Pass], int]:
    """The passes of the program over enough virtual ranks to stay within the limit, and their number a rank."""
    longest = max((_first(x)[1] for x in given if isinstance(x, Stored)), default=1)
    parts = 2  # so that values that are split over blocks are known as such
    while True:
        sizes = (*mesh.sizes, parts)
        layouts = {
            v: _divided(x, len(mesh.sizes)) if isinstance(x, Stored) else REPLICATED
            for v, x in zip(program.inputs, given, strict=True)
        }
        whole = partition(program, layouts, sizes, settle=False, name="stream")
        found = passes_of(whole, (*mesh.names, "block"))
        need = max(_peak(p) for p, _ in found)
        if need <= limit:
            return found, parts
        if parts >= min(longest, MOST_PARTS):
            raise OutOfMemory(
                f"[stream] the smallest blocks need {human_bytes(need)} a rank, and {human_bytes(limit)} are allowed: "
                "allow more, or split another dimension"
            )
        parts = min(parts * 2, longest, MOST_PARTS)


def _over_blocks(layout: Layout, sizes: Sequence[int]) -> bool:
    """Whether a value is split over blocks, and so is written to a store block by block."""
    return any(len(sizes) - 1 in axes for _, axes in layout.shards)


def _first(x: Stored) -> tuple[int, int]:
    """The dimension that is divided further (the first that is split, else the longest), and the length of a rank's
    part."""
    if x.sharding.layout.shards:
        d = x.sharding.layout.shards[0][0]
    else:
        d = max(range(len(x.shape)), key=lambda i: x.shape[i], default=0)
    return d, x.sharding.box(x.shape, 0).shape[d] if x.shape else 1


def _divided(x: Stored, extra: int) -> Layout:
    if not x.shape:
        return x.sharding.layout
    shards = {d: list(axes) for d, axes in x.sharding.layout.shards}
    shards.setdefault(_first(x)[0], []).append(extra)
    return make_layout(shards, {})


def _peak(p: RankProgram) -> int:
    """Peak bytes of live blocks on a virtual rank."""

    def size(v: int) -> int:
        return p.block(v, 0).nbytes

    alive = set(p.inputs) | set(p.constants)
    most = sum(map(size, alive))
    for s, frees in zip(p.steps, p.frees, strict=True):
        alive |= set(s.outputs if isinstance(s, LocalCall) else [m.target for m in s.moves])
        most = max(most, sum(map(size, alive)))
        alive -= set(frees)
    return most


def _paths(to: Any, result_def: Any, statics: Sequence[Any]) -> list[str | None]:
    count = sum(s is ARRAY for s in statics)
    if to is None:
        return [None] * count
    if count == 1 and not isinstance(to, dict | list | tuple):
        return [location(to)]
    flat, given = trees.flatten(to, is_leaf=lambda x: x is None)
    if given != result_def:
        raise MeshError(f"[stream] to= has the structure {given}, the result {result_def}")
    paths = [None if p is None else location(p) for p, s in zip(flat, statics, strict=True) if s is ARRAY]
    if twice := [p for p in paths if p is not None and paths.count(p) > 1]:
        raise MeshError(f"[stream] to= names {twice[0]} twice: each result needs a path of its own")
    return paths


def _needed(p: RankProgram, mesh: Mesh) -> list[int]:
    """Ranks with work to do: along axes that nothing is split over, only the first."""
    used = {a for v in p.inputs for _, axes in p.layouts[v].shards for a in axes}
    return [r for r in range(mesh.size) if all(c == 0 or a in used for a, c in enumerate(mesh.coordinates(r)))]


def _joined(parts: Mapping[int, np.ndarray], p: RankProgram, v: int, mesh: Mesh, count: int) -> np.ndarray:
    """A variable's value from all ranks: blocks put together, contributions to one block reduced."""
    layout, aval = p.layouts[v], p.avals[v]
    bound = {a for a, _ in layout.partials} | {a for _, axes in layout.shards for a in axes}
    op = next((op for a, op in layout.partials if a < len(mesh.sizes)), None)
    blocks: dict[Box, np.ndarray] = {}
    for r, x in parts.items():
        # Along the axes that it is neither split nor pending over, ranks hold the same.
        if all(c == 0 or a in bound for a, c in enumerate(mesh.coordinates(r))):
            box = block_box(layout, p.sizes, aval.shape, r * count)
            blocks[box] = x if box not in blocks or op is None else REDUCERS[op](blocks[box], x)
    return joined(aval.shape, aval.dtype, blocks.items())


# ----- on the workers -------------------------------------------------------------------------------------------------


def _run_blocks(payloads: Mapping[int, _StreamJob], blocks: Any) -> dict[int, list[Any]]:
    return {r: _run_rank(job) for r, job in payloads.items()}


def _run_rank(job: _StreamJob) -> list[Any]:
    """Run the virtual ranks of a rank one after the other, and join pending reductions."""
    p, memory = job.program, current_memory()
    paths = [x.path if isinstance(x, PendingStored) else x for x in job.inputs]
    sources = [open_array(x) if isinstance(x, str) else x for x in paths]
    targets = [o and o.open() for o in job.outputs]
    homes = tuple(range(math.prod(p.sizes)))
    last = len(p.sizes) - 1
    kept: list[Any] = [None] * len(p.outputs)
    for virtual in job.virtual:
        inputs = []
        for v, x, how in zip((*p.inputs, *p.constants), sources, job.inputs, strict=True):
            box = block_box(p.layouts[v], p.sizes, p.avals[v].shape, virtual)
            found = how.read(x, box, p.avals[v].dtype) if isinstance(how, PendingStored) else np.asarray(x[box.slices])
            inputs.append({virtual: memory.put(found)})
        prepared = Prepared(p, (virtual,), homes, job.names, memory)
        for i, (v, found) in enumerate(zip(p.outputs, prepared.run(inputs), strict=True)):
            layout, block = p.layouts[v], on_host(found[virtual])
            out = job.outputs[i]
            if isinstance(out, StoreTarget):
                out.check()
            if out is not None:
                box = block_box(layout, p.sizes, p.avals[v].shape, virtual)
                with writing(out.path):
                    if block.size and isinstance(out, PendingStored):
                        out.write(targets[i], box, np.unravel_index(virtual, p.sizes), block)
                    elif block.size:
                        targets[i][box.slices] = block
                continue
            op = dict(layout.partials).get(last)
            if op is not None and is_low_precision(block.dtype):
                block = block.astype(np.float32)  # many blocks are added: they are rounded once, at the end
            if kept[i] is None:
                kept[i] = block
            elif op is not None:
                kept[i] = np.asarray(REDUCERS[op](kept[i], block))
    return kept
