"""Explicit sharding: a context in which an op that would gather or exchange blocks is an error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ...arrays.core.errors import ShardingConflict
from ...arrays.core.op import ShapeDtype
from ..resharding.plan import plan_reshard
from ..sharding.placement import Layout, dims_text
from ..sharding.propagate import Placed, reason
from .rank_program import Moves, RankProgram

_active: ContextVar[bool] = ContextVar("explicit_sharding", default=False)


@contextmanager
def explicit_sharding() -> Iterator[None]:
    """A context in which an op whose operands would have to be gathered or exchanged raises instead.

    Still allowed are moves that are asked for by name (:func:`meshtape.reshard`, ``shard_map``), slices of replicated
    blocks, and the reduction of pending sums. The context applies to calls of ops and to the compilation of functions.

    Raises
    ------
    ShardingConflict
        At the op, before anything runs; names the op, the operand, the mesh axes, and why it does not fit: dimensions
        that are split along different axes, one that the op needs whole, or a split that falls between blocks which
        stay together.

    Examples
    --------
    Twelve numbers as four rows of three can be split in two, and not in eight:

    >>> import meshtape as mt
    >>> x = mt.distribute(mt.arange(12), mt.Mesh({"a": 2}), a=mt.Shard(0))
    >>> y = mt.distribute(mt.arange(12), mt.Mesh({"a": 8}), a=mt.Shard(0))
    >>> with mt.explicit_sharding():
    ...     print(mt.reshape(x, (4, 3)).sharding)
    ...     mt.reshape(y, (4, 3))
    Traceback (most recent call last):
    meshtape.arrays.core.errors.ShardingConflict: [reshape] operand 0, int64[12@a]...
    """
    before = _active.set(True)
    try:
        yield
    finally:
        _active.reset(before)


def is_explicit() -> bool:
    """Whether :func:`explicit_sharding` is in force."""
    return _active.get()


def refuse_moves(
    name: str,
    avals: Sequence[Any],
    layouts: Sequence[Layout | None],
    placed: Placed,
    sizes: Sequence[int],
    names: Sequence[str],
) -> None:
    """Raise :class:`ShardingConflict` where a call moves blocks of an operand."""
    for i, (now, then, aval) in enumerate(zip(layouts, placed.operands, avals, strict=True)):
        if now is not None and then is not None and isinstance(aval, ShapeDtype):
            _refuse(name, f"operand {i}", aval, now, then, reason(name, placed, i, now, sizes), sizes, names)


def refuse_moves_within(name: str, program: RankProgram, names: Sequence[str]) -> None:
    """The same for a call that is decomposed."""
    for step in program.steps:
        for m in step.moves if isinstance(step, Moves) else ():
            now, then = program.layouts[m.source], program.layouts[m.target]
            _refuse(
                name, f"a value in {m.origin or name}", program.avals[m.source], now, then, m.why, program.sizes, names
            )


def _refuse(
    name: str,
    what: str,
    aval: ShapeDtype,
    now: Layout,
    then: Layout,
    why: str | None,
    sizes: Sequence[int],
    names: Sequence[str],
) -> None:
    moved = [
        (axes, after)
        for d, axes in now.on_many(sizes).shards
        if (after := then.on_many(sizes).axes_of(d)) != axes
        and (after[: len(axes)] != axes or aval.shape[d] % math.prod(sizes[a] for a in after))
    ]
    if not moved:
        return
    gathered = any(set(axes) - {a for _, split in then.shards for a in split} for axes, _ in moved)
    count = plan_reshard(aval.shape, tuple(sizes), Layout(now.shards), Layout(then.shards)).elements_moved
    raise ShardingConflict(
        f"[{name}] {what}, {aval.dtype.name}[{dims_text(aval.shape, now, names)}], would have to be "
        f"{'gathered' if gathered else 'exchanged'} along "
        f"{', '.join(repr(names[a]) for axes, _ in moved for a in axes)} "
        f"({count * aval.dtype.itemsize // math.prod(sizes)} bytes a rank), {why}: reshard it by name, or split it "
        "otherwise"
    )
