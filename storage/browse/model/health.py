"""The health of a whole checkpoint: NaN and infinities, dead rows, constant and duplicate arrays, damaged files.

One pass over all bytes, piece by piece; reading checks each chunk's crc32c. Findings appear while the scan goes on.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ....arrays.core.errors import CheckpointError
from ....arrays.core.formatting import count
from ...checkpoint.checkpoint import Checkpoint, StoredArray
from ...loading.verify import verify
from ...readers.raw_tensor import RawTensor
from .pieces import Pieces
from .statistics import not_finite, numbers_of

MOST = 2000  # findings of one kind that are kept; all are counted


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth a look. ``level``: ``"bad"`` (values or files are broken) or ``"note"`` (perhaps on purpose)."""

    kind: str
    level: str
    name: str
    text: str
    others: tuple[str, ...] = ()


KINDS = {
    "unreadable": "Arrays that cannot be read",
    "nan": "NaN values",
    "infinite": "Infinite values",
    "dead": "Dead rows",
    "zero": "Arrays of zeros",
    "constant": "Constant arrays",
    "duplicate": "Duplicate arrays",
    "verify": "Files that do not fit the manifest",
}


@dataclass
class Health:
    """Findings of a scan so far. ``counts`` has every finding, ``findings`` at most `MOST` of a kind."""

    arrays: int = 0
    scanned: int = 0
    nbytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    verified: str = ""
    complete: bool = False

    def add(self, finding: Finding) -> None:
        n = self.counts[finding.kind] = self.counts.get(finding.kind, 0) + 1
        if n <= MOST:
            self.findings.append(finding)

    @property
    def faults(self) -> int:
        """Broken values and files."""
        return sum(self.counts.get(k, 0) for k in ("nan", "infinite", "unreadable", "verify"))

    @property
    def observations(self) -> int:
        return sum(self.counts.values()) - self.faults


def scan(ckpt: Checkpoint, health: Health, progress: Callable[[int, int, str], None] | None = None) -> Health:
    """Fill ``health`` by reading every byte of ``ckpt``. ``progress(done, total, doing)`` may raise to end it.

    >>> import os, tempfile
    >>> from meshtape.storage import open_checkpoint, save
    >>> where = os.path.join(tempfile.mkdtemp(), "c")
    >>> _ = save(where, {"a": np.array([[1.0, np.nan], [0.0, 0.0]]), "b": np.arange(5.0), "c": np.arange(5.0)})
    >>> sorted(scan(open_checkpoint(where), Health()).counts.items())
    [('dead', 1), ('duplicate', 1), ('nan', 1)]
    """
    tell = progress or (lambda done, total, doing: None)
    health.arrays = len(ckpt)
    # Verifying reads every file to its end as well: it counts as half of the work.
    verifies = ckpt.kind in ("meshtape", "virtual")
    total = ckpt.nbytes * (2 if verifies else 1)
    twins: dict[tuple[object, ...], str] = {}
    done = 0
    for name, array in ckpt.items():
        tell(done, total, name)
        try:
            digest = _scan_array(array, health, lambda n, at=done, name=name: tell(at + n, total, name))
        except (CheckpointError, OSError) as e:
            health.add(Finding("unreadable", "bad", name, str(e)))
        else:
            if array.filled:
                health.add(Finding("unreadable", "bad", name, array.filled))
            if digest is not None:
                twin = twins.setdefault((array.shape, array.dtype.name, digest), name)
                if twin != name:
                    health.add(Finding("duplicate", "note", name, "equal to the bit", (twin,)))
        done += array.nbytes
        health.scanned += 1
        health.nbytes = done
    for name, why in ckpt.skipped.items():
        health.add(Finding("unreadable", "note", name, why))
    if verifies:
        tell(done, total, "index and length of every file")
        try:
            report = verify(ckpt.path)
            health.verified = (
                f"{count(report.files, 'file')} fit {'the manifest' if ckpt.manifest else 'their checksums'}"
            )
        except (CheckpointError, OSError) as e:
            health.add(Finding("verify", "bad", "", str(e)))
            health.verified = "damaged"
    else:
        health.verified = f"{ckpt.kind} checkpoints carry no checksums"
    tell(total, total, "")
    health.complete = True
    return health


def _scan_array(array: StoredArray, health: Health, tell: Callable[[int], None]) -> bytes | None:
    """Look at one array; returns a digest of its bytes, None for arrays too small to call equal ones duplicates."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr(array.shape).encode())
    nan = infinite = done = 0
    same, first = True, None
    rows = array.shape[0] if array.ndim > 1 else 0
    # A hostile shape may promise 10¹⁵ rows; such an array ends as unreadable before it is scanned, never as memory.
    dead = np.ones(rows, bool) if 0 < rows * array.dtype.itemsize <= array.nbytes and rows < 1 << 28 else None
    pieces = Pieces.of(array, (8 << 20) if isinstance(array.tensor, RawTensor) else 1 << 20)
    for box in pieces.all():
        values = array.read(box)
        digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        if first is None:
            first = values.reshape(-1)[:1].copy()
        raw = values.reshape(-1).view(np.uint8).reshape(-1, values.itemsize)
        same = same and bool((raw == first.view(np.uint8)).all())
        numbers = numbers_of(values)
        found = not_finite(numbers)
        nan, infinite = nan + found[0], infinite + found[1]
        if dead is not None:
            alive = (numbers != 0).any(axis=tuple(range(1, numbers.ndim)))
            dead[box.offset[0] : box.stop[0]] &= ~alive
        done += values.nbytes
        tell(done)
    size = math.prod(array.shape)
    for kind, n in (("nan", nan), ("infinite", infinite)):
        if n:
            health.add(Finding(kind, "bad", array.name, f"{n:,} of {count(size, 'element')}"))
    if size > 1 and same and first is not None:
        zero = not np.any(first.view(np.uint8))
        text = f"all {size:,} elements are {'zero' if zero else first[0].item()}"
        health.add(Finding("zero" if zero else "constant", "note", array.name, text))
    elif dead is not None and dead.any():
        where = np.flatnonzero(dead)
        some = ", ".join(map(str, where[:6])) + (", …" if len(where) > 6 else "")
        health.add(Finding("dead", "note", array.name, f"{len(where):,} of {len(dead):,} rows are all zero: {some}"))
    return digest.digest() if size > 1 and not same else None
