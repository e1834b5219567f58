"""``mt.scan``: many turns of one step in one task a worker.

A run of a compiled step takes a Dask task on each worker and messages of the scheduler, some ten milliseconds; a step
of small arrays takes less than one. So the turns of a loop travel together. The state stays on the workers from one
turn to the next. The data of the turns comes with the task (large data to the workers directly), and the next batches
are fetched and sent meanwhile.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.errors import MeshError, ShapeError, check_function
from ...arrays.core.op import ShapeDtype, call_beside
from ...arrays.core.op import state as thread_state
from ...arrays.ops.creation import asarray
from ...arrays.ops.manipulation import concat, stack
from ...autodiff.captures.tracing import Tracer
from ...autodiff.compiler.compile import Compiled, compile
from ...autodiff.tape.hidden import is_foreign
from ..base import settings
from ..execution.runtime import Turns
from ..mesh.api import reshard
from ..mesh.mesh import Mesh
from ..mesh.sharded_array import ShardedBuffer, handles_of, sharded_array
from ..sharding.placement import Layout

_TREES = (Array, np.ndarray, dict, tuple)
SEGMENT_BYTES = 64 << 20
"""The most bytes of data that travel with the turns of one task."""


def scan(
    step: Callable[[Any, Any], tuple[Any, Any]], init: Any, each: Any = None, length: int | None = None
) -> tuple[Any, Any]:
    """Run ``state, out = step(state, x)`` for every ``x``, and stack the outputs.

    The same as a Python loop around the compiled step, and written like ``jax.lax.scan``; on a mesh of Dask workers
    many turns are one task a worker (``meshtape.loop`` in Dask's configuration, 64), so that a turn has no overhead of
    its own.

    Parameters
    ----------
    step
        A function of the state and of the data of one turn, which gives the new state, of the same structure, shapes
        and dtypes, and the output of the turn. It is compiled, see :func:`meshtape.compile`.
    init
        The first state: a tree of arrays and numbers. Its shardings stay the same.
    each
        The data of the turns, in one of two forms. An array, or a dict, tuple or dataclass of arrays, has the turns as
        first dimension, as in JAX: ``step`` gets the tree of rows. A list, generator or other iterable has a tree of
        arrays for each turn; it is read ahead, while the turns before run. Arrays that were put on the mesh by
        :func:`meshtape.distribute` travel in blocks, others to every rank.
    length
        Number of turns. Without ``each``, ``step`` gets None.

    Returns
    -------
    state
        After the last turn.
    outs
        The tree of the outputs of ``step``, each array and number with a new first dimension, the turns.

    Raises
    ------
    ShapeError
        When ``step`` gives a state of another structure, shape or dtype, the arrays of ``each`` or ``length`` disagree
        about the number of turns, or there is no turn.
    RankLost, CollectiveTimeout
        When a turn failed on a worker.

    Examples
    --------
    >>> import numpy as np
    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"data": 2})
    >>> batches = [mt.distribute(np.full(4, i), mesh, data=mt.Shard(0)) for i in range(3)]
    >>> total, sums = mt.scan(lambda total, x: (total + mt.sum(x), mt.sum(x)), 0, batches)
    >>> total
    Array(12, sharding=Sharding(data=Replicate()))
    >>> sums
    Array([0, 4, 8], sharding=Sharding(data=Replicate()))

    A tree of arrays, of which each turn gets a row:

    >>> data = {"x": np.array([1.0, 2.0, 3.0]), "weight": np.array([0.5, 0.25, 0.25])}
    >>> mean, _ = mt.scan(lambda mean, row: (mean + row["weight"] * row["x"], None), 0.0, data)
    >>> mean
    Array(1.75, dtype=float64)
    """
    check_function("scan", step)
    around = trees.flatten((init, each if isinstance(each, _TREES) else None))[0]
    data, state = call_beside(lambda *_: _given(each, length, init), tuple(around), {})
    turn = _turn_of(step)
    seen: list[Any] = []
    mesh: Mesh | None = None
    for batch in _segments(data):
        if mesh is None:
            mesh = _mesh_of(state, batch[0])
            if mesh is not None:
                leaves, treedef = trees.flatten(state)
                state = trees.unflatten(treedef, mesh.settle(leaves))
        if mesh is None:
            outs = []
            for x in batch:
                state, out = turn.compiled(state, x)
                outs.append(out)
            seen.append(_stacked(outs))
        else:
            state, out = turn.run(mesh, state, batch)
            seen.append(out)
    if not seen:
        raise ShapeError("[scan] has no turn: what would it give?")
    return state, _joined(seen)


def _given(each: Any, length: int | None, init: Any) -> tuple[Iterator[Any], Any]:
    return _turns(each, length), trees.tree_map(lambda x: x if isinstance(x, Array) else asarray(x), init)


def _turns(each: Any, length: int | None) -> Iterator[Any]:
    if length is not None and (not hasattr(length, "__index__") or length < 1):
        raise ShapeError(f"[scan] length must be a whole number from 1, got {length!r}")
    if each is None:
        if length is None:
            raise ShapeError("[scan] takes the data of the turns (each) or their number (length)")
        return itertools.repeat(None, length)
    if hasattr(each, "__iter__") and not (isinstance(each, _TREES) or is_foreign(type(each))):
        return iter(each) if length is None else _first(each, length)
    arrays = trees.tree_map(asarray, each)
    rows = {trees.path_name(path) or "each": x.shape[:1] for path, x in trees.flatten_with_path(arrays)}
    if () in rows.values():
        raise ShapeError(
            f"[scan] {next(name for name in rows if not rows[name])} has no dimensions, the first of which would be "
            "the turns. Data of one "
            "turn at a time come in a list or a generator; constants belong into the closure of the step"
        )
    turns = {name: n for name, (n,) in rows.items()} | ({} if length is None else {"length": length})
    if len(set(turns.values())) != 1:
        raise ShapeError(f"[scan] the arrays must have one number of turns as first dimension, got {turns}")
    return (trees.tree_map(operator.itemgetter(i), arrays) for i in range(max(turns.values())))


def _first(each: Iterable[Any], length: int) -> Iterator[Any]:
    data = iter(each)
    for i in range(length):
        x = next(data, _first)
        if x is _first:
            raise ShapeError(f"[scan] length is {length}, and the data end after {i} turns")
        yield x


def _segments(data: Iterator[Any]) -> Iterator[list[Any]]:
    """Turns that run together: of one signature, and of bounded number and size."""
    most = max(1, int(settings.number("loop")))
    now: list[Any] = []
    key, size = None, 0
    for x in data:
        mine = _signature(x)
        bytes_ = sum(getattr(a, "nbytes", 0) for a in trees.flatten(x)[0])
        if now and (mine != key or len(now) == most or size + bytes_ > SEGMENT_BYTES):
            yield now
            now, size = [], 0
        now.append(x)
        key, size = mine, size + bytes_
    if now:
        yield now


def _signature(x: Any) -> Any:
    leaves, treedef = trees.flatten(x)
    return treedef, tuple(
        (a.shape, a.dtype, getattr(a, "sharding", None)) if isinstance(a, Array | np.ndarray) else (type(a), repr(a))
        for a in leaves
    )


def _mesh_of(*values: Any) -> Mesh | None:
    """The mesh to run on; None for an ordinary loop: no array is on a mesh, or calls are recorded."""
    arrays = [a for a in trees.flatten(values)[0] if isinstance(a, Array)]
    if thread_state.recorders or any(isinstance(a._buf, Tracer) for a in arrays):
        return None
    found = [a._buf.mesh for a in arrays if isinstance(a._buf, ShardedBuffer)]
    if any(m is not found[0] for m in found):
        raise MeshError(f"[scan] arrays of two meshes: {found[0]} and {next(m for m in found if m is not found[0])}")
    return found[0] if found else None


def _stacked(outs: Sequence[Any]) -> Any:
    """Arrays and numbers of all turns, with the turns as first dimension."""

    def one(*xs: Any) -> Any:
        numeric = isinstance(xs[0], Array | np.ndarray | np.generic | bool | int | float | complex)
        return stack(list(map(asarray, xs))) if numeric else _constant(xs)

    return trees.tree_map(one, *outs)


def _joined(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return trees.tree_map(lambda *xs: concat(xs) if isinstance(xs[0], Array) else _constant(xs), *parts)


def _constant(xs: Sequence[Any]) -> Any:
    """A leaf that is no number: the same at all turns."""
    for x in xs:
        if x is not xs[0] and not x == xs[0]:
            raise ShapeError(
                f"[scan] the step gives {xs[0]!r} at one turn and {x!r} at another: only numbers can be stacked"
            )
    return xs[0]


class _Turn:
    """A step that gives its state back as it took it, compiled, and loaded on meshes."""

    def __init__(self, step: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        name = getattr(step, "__name__", "scan")

        def turn(state: Any, x: Any) -> tuple[Any, Any]:
            result = step(state, x)
            if not isinstance(result, tuple) or len(result) != 2:
                raise ShapeError(f"[scan] the step must give (state, out), not {type(result).__name__}")
            return _as_before(state, result[0]), result[1]

        turn.__name__ = name if name.isidentifier() else "scan"
        self.compiled: Compiled = compile(turn)
        self._name = turn.__name__
        self._loaded: weakref.WeakKeyDictionary[Any, dict[Mesh, Any]] = weakref.WeakKeyDictionary()

    def run(self, mesh: Mesh, state: Any, batch: Sequence[Any]) -> tuple[Any, Any]:
        carried, _ = trees.flatten(state)
        leaves, treedef = trees.flatten(((state, batch[0]), {}))
        arrays = [asarray(x) if isinstance(x, np.ndarray) else x for x in leaves]
        ready = self.compiled._ready(leaves, arrays, treedef)
        on = self._loaded.setdefault(ready, {})
        if mesh not in on:
            shardings = [a.sharding for a in arrays if isinstance(a, Array)]
            on[mesh] = mesh.loaded(ready.program, shardings, self._name)
        load, results, constants = on[mesh]
        arrays_of = ((asarray(a) for a in trees.flatten(x)[0] if isinstance(a, Array | np.ndarray)) for x in batch)
        each = [handles_of([mesh._buffer(a._buf, "data of a turn") for a in given]) for given in arrays_of]
        turns = Turns(len(batch), len(carried), each)
        handles = load(handles_of([a._buf for a in carried] + constants), turns)
        made = []
        for i, ((layout, aval), h) in enumerate(zip(results, handles, strict=True)):
            if i >= len(carried):
                aval = ShapeDtype((len(batch), *aval.shape), aval.dtype)
                layout = Layout(tuple((d + 1, axes) for d, axes in layout.shards))
            made.append(sharded_array(mesh, layout, aval, h))
        state, out = ready.rebuilt(made)
        return state, trees.tree_map(lambda x: x if isinstance(x, Array) else _stacked([x] * len(batch)), out)


def _as_before(before: Any, after: Any) -> Any:
    """The new state in the shardings of the old one. Raises :class:`ShapeError` where it is another thing."""
    old, old_def = trees.flatten(before)
    new, new_def = trees.flatten(after)
    if old_def != new_def:
        raise ShapeError(f"[scan] the step gives a state of another structure: {new_def}, and took {old_def}")
    out = []
    for i, (a, b) in enumerate(zip(old, new, strict=True)):
        b = asarray(b)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ShapeError(
                f"[scan] leaf {i} of the state is {a.dtype}{list(a.shape)} and becomes {b.dtype}{list(b.shape)}: "
                "a state keeps its shapes and dtypes"
            )
        if a.sharding is not None and b.sharding is not None and a.sharding != b.sharding:
            b = reshard(b, a.sharding)
        out.append(b)
    return trees.unflatten(old_def, out)


@functools.lru_cache(maxsize=128)
def _turn(step: Callable[[Any, Any], tuple[Any, Any]]) -> _Turn:
    return _Turn(step)


def _turn_of(step: Callable[[Any, Any], tuple[Any, Any]]) -> _Turn:
    try:
        return _turn(step)
    except TypeError:  # a callable that cannot be hashed
        return _Turn(step)
