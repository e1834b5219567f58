"""The report of a load: loaded and unfitting leaves; names that differ only in numbers share a line.

>>> grouped([f"layers.{i}.w" for i in (*range(12), 20)] + ["head.b"])
['layers.{0-11,20}.w (13)', 'head.b']
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields

from ...arrays.core.formatting import ranges
from ..checkpoint.checkpoint import unread
from ..rules.casting import CastLoss

_NUMBER = re.compile(r"(?<![0-9A-Za-z])\d+(?![0-9A-Za-z])")
MAX_LINES = 40


def grouped(names: Iterable[str]) -> list[str]:
    """Names, those alike but for whole numbers as one, with ranges and how many there are; in the order in which they
    come first."""
    found: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name in names:
        numbers = tuple(int(n) for n in _NUMBER.findall(name))
        found.setdefault(_NUMBER.sub("\0", name), []).append((name, numbers))
    out = []
    for template, rows in found.items():
        if len(rows) == 1:
            out.append(rows[0][0])
            continue
        columns = [set(c) for c in zip(*(numbers for _, numbers in rows), strict=True)]
        parts = template.split("\0")
        text = parts[0]
        for column, part in zip(columns, parts[1:], strict=True):
            text += (str(next(iter(column))) if len(column) == 1 else f"{{{ranges(column)}}}") + part
        out.append(f"{text} ({len(rows)})")
    return out


def listed(title: str, names: Sequence[str], limit: int = 12) -> list[str]:
    """Lines of a report: a title with the count, then the groups."""
    if not names:
        return []
    groups = grouped(names)
    if len(groups) <= limit and sum(map(len, groups)) < 80:
        return [f"  {title} ({len(names)}): {', '.join(groups)}"]
    more = [f"    … and {len(groups) - limit} more groups"] if len(groups) > limit else []
    return [f"  {title} ({len(names)}):", *(f"    {g}" for g in groups[:limit]), *more]


def told(title: str, rows: Sequence[str], limit: int = 12) -> list[str]:
    """Lines of a report: a title, and as many of the rows below it; none where there is no row."""
    more = [f"    … and {len(rows) - limit} more"] if len(rows) > limit else []
    return [f"  {title}:", *(f"    {row}" for row in rows[:limit]), *more] if rows else []


@dataclass
class LoadReport:
    """The report that `load` fills in: loaded leaves and, with ``strict=False``, those that did not fit.

    ``bytes_read`` counts reads of every process, ``bytes_needed`` the elements. ``phases`` holds the seconds of
    opening, planning and reading. ``resharded`` names the arrays whose blocks are not stored as the ranks want them, so
    that some rank read from several blocks or a part of one. ``mismatched`` holds a line for each array of another
    shape or dtype, ``ignored`` the names that ``ignore`` excused, ``grown`` those that took more rows from ``like``
    than are stored, ``mapping`` each rule with how often it was applied, ``losses`` the values that casts lost (see
    `convert`), ``skipped`` what cannot be read here, and why. ``print(report)`` shows it in at most 40 lines.
    """

    path: str = ""
    arrays: int = 0
    bytes_needed: int = 0
    bytes_read: int = 0
    seconds: float = 0.0
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    resharded: list[str] = field(default_factory=list)
    mapping: list[tuple[str, int]] = field(default_factory=list)
    grown: dict[str, str] = field(default_factory=dict)
    losses: dict[str, CastLoss] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget an earlier load."""
        for f in fields(self):
            setattr(self, f.name, f.default if f.default is not MISSING else f.default_factory())  # type: ignore[misc]

    @property
    def fits(self) -> bool:
        """Whether nothing is missing, unexpected, mismatched or grown."""
        return not (self.missing or self.unexpected or self.mismatched or self.grown)

    def problems(self) -> list[str]:
        """Lines about the leaves that did not fit."""
        lines = listed("missing in the checkpoint", self.missing)
        lines += listed("unexpected", self.unexpected)
        lines += told(f"mismatched ({len(self.mismatched)})", [*self.mismatched.values()], 8)
        return lines + [f"  grown: {row}" for row in self.grown.values()]

    def __str__(self) -> str:
        wanted = len(self.loaded) + len(self.grown) + len(self.missing) + len(self.mismatched)
        head = (
            f"{self.path}: loaded {len(self.loaded)} of {wanted}, missing {len(self.missing)}, "
            f"unexpected {len(self.unexpected)}, mismatched {len(self.mismatched)}; "
            f"{self.bytes_read} bytes read for {self.bytes_needed} needed, {self.seconds:.3f} s"
        )
        lines = [head, *self.problems(), *listed("ignored", self.ignored, 4)]
        lines += [f"  {unread(self.skipped)[2:]}"] if self.skipped else []
        lines += listed("cut in other blocks than stored", self.resharded, 4)
        lines += [f"  {name}: {loss}" for name, loss in self.losses.items()]
        lines += [f"  {rule}  ×{n}" for rule, n in self.mapping]
        return "\n".join(
            lines
            if len(lines) <= MAX_LINES
            else [*lines[: MAX_LINES - 1], f"  … and {len(lines) - MAX_LINES + 1} more lines"]
        )
