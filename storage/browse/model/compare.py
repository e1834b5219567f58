"""Two checkpoints side by side: which names they share, and how far each array has moved.

For an array that was A and is B: norms of both, the norm of the difference, the *update ratio* ``‖B − A‖ / ‖A‖``, the
largest absolute difference and how many elements changed. Windows of both are read together; neither array is ever
whole in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ....arrays.core.errors import CheckpointError
from ...checkpoint.checkpoint import Checkpoint, StoredArray
from ...rules.rules import Rules
from ...transform.diff import differences
from .pieces import Pieces, refuse_giants


@dataclass(frozen=True, slots=True)
class Change:
    """How one array differs. ``note`` says why it could not be compared, or ``""``."""

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    norms: tuple[float, float] = (math.nan, math.nan)
    distance: float = math.nan
    largest: float = math.nan
    changed: int = 0
    size: int = 0
    note: str = ""

    @property
    def ratio(self) -> float:
        """``‖B − A‖ / ‖A‖``; infinite where A was zero and B is not, NaN where they cannot be compared."""
        if self.note or math.isnan(self.distance):
            return math.nan
        return 0.0 if self.distance == 0 else self.distance / self.norms[0] if self.norms[0] else math.inf


@dataclass
class Comparison:
    """Names on one side alone, and the changes found so far."""

    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    common: int = 0
    complete: bool = False

    def ranked(self) -> list[Change]:
        """Changes, most changed first; those that cannot be compared come before them."""
        return sorted(self.changes, key=lambda c: (not c.note, -math.inf if math.isnan(c.ratio) else -c.ratio, c.name))

    @property
    def equal(self) -> int:
        return sum(not c.note and c.changed == 0 and c.dtypes[0] == c.dtypes[1] for c in self.changes)

    def histogram(self, bins: int = 24) -> tuple[list[float], list[int]]:
        """Edges and counts of the decimal logarithms of the update ratios that are positive and finite."""
        logs = [math.log10(c.ratio) for c in self.changes if 0 < c.ratio < math.inf]
        if not logs:
            return [], []
        low, high = math.floor(min(logs)), math.ceil(max(logs))
        counts, edges = np.histogram(logs, bins, (low, high if high > low else low + 1))
        return edges.tolist(), counts.tolist()


def ruled(ckpt: Checkpoint, rules: str) -> Checkpoint:
    """The lazy checkpoint that key rules give; the checkpoint itself where ``rules`` is blank.

    Raises the errors of `Rules`, and `CheckpointError` for chunks that are too large for a page.
    """
    if not rules.strip():
        return ckpt
    for array in ckpt.values():  # what the rules make of them has no chunks that would tell
        refuse_giants(array)
    return Rules(rules).on(ckpt)


def names(a: Checkpoint, b: Checkpoint) -> Comparison:
    """The names on each side alone and the number of common ones; no array is read."""
    only_a, only_b = ([n for n in x if n not in y.arrays] for x, y in ((a, b), (b, a)))
    return Comparison(only_a, only_b, [], len(a) - len(only_a))


def compare(
    a: Checkpoint, b: Checkpoint, found: Comparison, progress: Callable[[int, int, str], None] | None = None
) -> Comparison:
    """Fill ``found`` (from `names`) with the change of every array that both have.

    >>> import os, tempfile
    >>> from meshtape.storage import open_checkpoint, save
    >>> home = tempfile.mkdtemp()
    >>> for name, w in (("a", [3.0, 4.0]), ("b", [3.0, 4.5])):
    ...     _ = save(os.path.join(home, name), {"w": np.array(w)})
    >>> a, b = (open_checkpoint(os.path.join(home, n)) for n in "ab")
    >>> change = compare(a, b, names(a, b)).changes[0]
    >>> change.ratio, change.changed
    (0.1, 1)
    """
    tell = progress or (lambda done, total, doing: None)
    common = [n for n in a if n in b.arrays]
    total = sum(a[n].nbytes + b[n].nbytes for n in common)
    done = 0
    for name in common:
        tell(done, total, name)
        x, y = a[name], b[name]
        try:
            found.changes.append(_change(x, y, lambda n, at=done, name=name: tell(at + n, total, name)))
        except (CheckpointError, OSError) as e:
            found.changes.append(Change(name, (x.shape, y.shape), (x.dtype.name, y.dtype.name), note=str(e)))
        done += x.nbytes + y.nbytes
    found.complete = True
    return found


def _change(x: StoredArray, y: StoredArray, tell: Callable[[int], None]) -> Change:
    shapes, dtypes = (x.shape, y.shape), (x.dtype.name, y.dtype.name)
    if x.shape != y.shape:
        return Change(x.name, shapes, dtypes, note=f"shape {x.shape} and {y.shape}")
    squares = np.zeros(3)
    changed, largest, done = 0, 0.0, 0
    for box in Pieces.of(x, 4 << 20).all():
        p, q = x.read(box), y.read(box)
        n, gap, _ = differences(p, q)
        changed += n
        largest = max(largest, gap)
        with np.errstate(all="ignore"):
            u, v = (np.asarray(t, np.complex128 if t.dtype.kind == "c" else np.float64).reshape(-1) for t in (p, q))
            d = v - u
            squares += [np.vdot(t, t).real for t in (u, v, d)]
        done += p.nbytes + q.nbytes
        tell(done)
    norm_a, norm_b, distance = (math.sqrt(s) if s >= 0 else math.nan for s in squares.tolist())
    # Where both hold the same NaN nothing has changed, though the norm of the difference is NaN.
    distance = 0.0 if changed == 0 else distance
    size, note = math.prod(x.shape), x.filled or y.filled
    return Change(x.name, shapes, dtypes, (norm_a, norm_b), distance, largest, changed, size, note=note)
