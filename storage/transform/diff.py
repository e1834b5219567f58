"""`diff`: the differences of two checkpoints, window by window."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...arrays.core.errors import CheckpointError
from ...arrays.core.formatting import count, some
from ..base.arguments import check_positive
from ..base.names import chooser, patterns_of
from ..base.scratch import out_of_memory
from ..base.threads import in_threads
from ..checkpoint.checkpoint import unread
from ..format.chunk_grid import windows
from ..readers.tensor import read_into
from .attributes import attributes_apart
from .convert import Selection
from .plan import MEMORY_LIMIT


@dataclass(frozen=True)
class ArrayDiff:
    """How an array differs. Differences are None where the shapes do, and where values were not compared; they are
    NaN-aware: two NaN are equal.

    ``max_rel`` is the largest ``|a - b| / max(|a|, |b|)``; where one side is NaN or infinite and the other is another
    value, both differences are infinite. ``different`` counts elements whose values differ; with 0 of them, only
    dtypes, bits or ``attributes`` do: those of another writer's array with which equal numbers stand for other things
    (``units``, ``calendar``, ``scale_factor``, ``add_offset``, ``_FillValue``, …), as a pair each.
    """

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    max_abs: float | None = None
    max_rel: float | None = None
    different: int | None = None
    size: int = 0
    attributes: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        (a, b), (c, d) = self.shapes, self.dtypes
        told = [f"shape {a} and {b}"] * (a != b) + [f"dtype {c} and {d}"] * (c != d)
        told += [f"{k} {x!r:.40} and {y!r:.40}" for k, (x, y) in self.attributes.items()]
        if self.different:
            told += [f"{self.different:,} of {count(self.size, 'element')}", f"max abs {self.max_abs:.6g}"]
            told.append(f"max rel {self.max_rel:.6g}")
        elif self.different is not None:
            told.append("equal values" if told else "equal values, other bits")
        return f"{self.name}: {', '.join(told)}"


@dataclass(frozen=True)
class DiffReport:
    """Names of arrays and values on one side alone, arrays and values that differ, and the number of arrays that are
    equal to the bit. A value may be None, which is not the same as one that is absent; of a name that is an array on
    the other side, ``values`` has that array's dtype and shape.

    ``skipped`` names arrays that cannot be read on either side, and why."""

    a: str
    b: str
    only_a: list[str]
    only_b: list[str]
    arrays: list[ArrayDiff]
    values: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    equal: int = 0
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether there is no difference at all, and nothing that could not be compared."""
        return not (self.only_a or self.only_b or self.arrays or self.values or self.skipped)

    def __str__(self) -> str:
        lines = [f"{count(self.equal, 'array')} equal, {len(self.arrays)} differ{unread(self.skipped)}"]
        for where, names in ((self.a, self.only_a), (self.b, self.only_b)):
            if names:
                lines.append(f"only in {where} ({len(names)}): {some(names, 12)}")
        values = [f"{name}: {a!r} and {b!r}" for name, (a, b) in self.values.items()]
        for held, most, thing in ((values, 20, "value"), (self.arrays, 40, "array")):
            lines += map(str, held[:most])
            lines += [f"… and {count(len(held) - most, f'more {thing}')}"] if len(held) > most else []
        return "\n".join(lines)


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    rules: Any = None,
    keys: Iterable[str] | None = None,
    drop: Iterable[str] | None = None,
    values: bool = True,
    memory_limit: int = MEMORY_LIMIT,
) -> DiffReport:
    """Compare two checkpoints: names, shapes, dtypes, values. Streams; arrays are never read whole.

    Parameters
    ----------
    a, b
        Whatever `open_checkpoint` opens; they may differ in format and layout, which do not count as differences.
    rules
        Key rules applied to ``a``, so that a checkpoint can be compared with its converted form.
    keys, drop
        Names or patterns of the arrays to compare and to leave out, where they exist.
    values
        Compare the elements of arrays. Without them only the tables of contents are read, however large the
        checkpoints: arrays of one shape and dtype count as equal.
    memory_limit
        Bytes for the windows of both sides.

    Returns
    -------
    DiffReport

    Examples
    --------
    >>> import tempfile
    >>> from meshtape.storage import save
    >>> home = tempfile.mkdtemp()
    >>> _ = save(os.path.join(home, "a"), {"w": np.array([1.0, 2.0]), "b": np.ones(1), "x": np.ones(1)})
    >>> _ = save(os.path.join(home, "b"), {"w": np.array([1.0, 2.5]), "b": np.ones(1), "y": np.ones(1)})
    >>> report = diff(os.path.join(home, "a"), os.path.join(home, "b"))
    >>> report.same, report.only_a, report.only_b, report.equal
    (False, ['x'], ['y'], 1)
    >>> print(report.arrays[0])
    w: 1 of 2 elements, max abs 0.5, max rel 0.2
    """
    check_positive(memory_limit=memory_limit)
    left = Selection.of(a, rules, None, None, None, memory_limit=memory_limit // 2)
    right = Selection.of(b, None, None, None, None, memory_limit=memory_limit // 2)
    keys = None if keys is None else patterns_of(keys)
    held = [{**side.arrays, **side.ckpt.leaves} for side in (left, right)]
    wanted = chooser(keys, drop, held[0].keys() | held[1].keys())
    ours, theirs = ({n: x for n, x in side.items() if wanted(n)} for side in held)
    if keys is not None and not ours and not theirs:
        raise CheckpointError(f"neither checkpoint has an array or a value that matches {keys}")
    # Both sides, what the comparison makes of them, and a few threads.
    limit = max(1 << 16, memory_limit // 32)
    known = dict[str, Any]()
    said = {n: attributes_apart(t, theirs[n], known) for n, t in ours.items() if n in left.arrays and n in right.arrays}
    try:
        found = in_threads(lambda n: _compare(n, ours[n], theirs[n], said[n], limit, values), list(said))
    except MemoryError as e:
        sides = f"{left.ckpt.path} beside {right.ckpt.path}"
        raise out_of_memory(sides, e, "give a lower memory_limit=") from None
    others = [n for n in ours if n in theirs and n not in said]
    return DiffReport(
        left.ckpt.path,
        right.ckpt.path,
        [n for n in ours if n not in theirs],
        [n for n in theirs if n not in ours],
        [d for d in found if d is not None],
        {n: (x, y) for n in others if _apart(x := _said(ours[n]), y := _said(theirs[n]))},
        sum(d is None for d in found),
        {n: why for n, why in {**right.unread, **left.unread}.items() if wanted(n)},
    )


def _said(x: Any) -> Any:
    """A value; of an array its dtype and shape."""
    return {"dtype": x.dtype.name, "shape": list(x.shape)} if hasattr(x, "dtype") else x


def _apart(x: Any, y: Any) -> bool:
    return type(x) is not type(y) or (x != y and not (x != x and y != y))  # two NaN are equal


def _compare(name: str, a: Any, b: Any, said: dict[str, tuple[Any, Any]], limit: int, values: bool) -> ArrayDiff | None:
    """None for arrays that are equal to the bit, and mean the same; without ``values``, for those of one shape and
    dtype."""
    shapes = (tuple(a.shape), tuple(b.shape))
    types = (a.dtype.name, b.dtype.name)
    if shapes[0] != shapes[1]:
        return ArrayDiff(name, shapes, types, attributes=said)
    if not values:
        same = types[0] == types[1] and not said
        return None if same else ArrayDiff(name, shapes, types, size=math.prod(shapes[0]), attributes=said)
    max_abs = max_rel = 0.0
    different, identical = 0, types[0] == types[1]
    item = max(a.dtype.itemsize, b.dtype.itemsize)
    for box in windows(shapes[0], tuple(max(c, 1) for c in a.chunk), item, limit):
        x, y = read_into(a, box)[0], read_into(b, box)[0]
        if types[0] == types[1] and np.array_equal(x.reshape(-1).view(np.uint8), y.reshape(-1).view(np.uint8)):
            continue
        identical = False
        n, largest, relative = differences(x, y)
        different += n
        max_abs, max_rel = max(max_abs, largest), max(max_rel, relative)
    if identical and not said:
        return None
    return ArrayDiff(name, shapes, types, max_abs, max_rel, different, math.prod(shapes[0]), said)


def differences(x: np.ndarray, y: np.ndarray) -> tuple[int, float, float]:
    """(elements that differ, largest absolute, largest relative difference) of two arrays of one shape.

    >>> differences(np.array([1.0, np.nan, 4.0]), np.array([1.0, np.nan, 5.0]))
    (1, 1.0, 0.2)
    >>> differences(np.array([2**63 - 1]), np.array([-(2**63)]))
    (1, 1.8446744073709552e+19, 2.0)
    """
    with np.errstate(all="ignore"):
        if x.dtype == y.dtype and x.dtype.kind in "iu":
            # Exact where float64 is not: the distance of two integers fits an unsigned one, modulo its length.
            gap = (np.maximum(x, y).astype(np.uint64) - np.minimum(x, y).astype(np.uint64)).astype(np.float64)
            changed = x != y
            scale = np.maximum(np.abs(x.astype(np.float64)), np.abs(y.astype(np.float64)))
        else:
            wide = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
            x, y = x.astype(wide), y.astype(wide)
            changed = ~((x == y) | (np.isnan(x) & np.isnan(y)))
            gap = np.where(changed, np.abs(x - y), 0.0)
            gap[np.isnan(gap)] = np.inf
            scale = np.maximum(np.abs(x), np.abs(y))
        relative = np.where(changed, gap / scale, 0.0)
        relative[np.isnan(relative)] = np.inf
    n = int(np.count_nonzero(changed))
    return n, float(gap.max(initial=0.0)), float(relative.max(initial=0.0))
