"""Timing for the benchmarks: ratios against peers, taken in one run on one machine.

Absolute times drift with the machine; the candidates of a row are therefore timed in turns, round after round, and the
ratio is that of the medians. A peer that is not importable is named as missing, never left out in silence. Import this
module before NumPy: it sets one thread for everybody.
"""

from __future__ import annotations

import importlib
import os
import sys

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def peer(name: str) -> Any:
    """A peer's module, or None where it is not installed, or not in a state to be imported."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
    except Exception as e:
        print(f"{name} cannot be imported: {type(e).__name__}: {e}", file=sys.stderr)
        return None


def timed(candidates: Mapping[str, Callable[[], Any]], *, seconds: float = 0.4, rounds: int = 9) -> dict[str, float]:
    """Median seconds of one call of each candidate, over ``rounds`` rounds in turns of about ``seconds / rounds``
    each."""
    counts = {}
    for name, fn in candidates.items():
        fn()
        start = time.perf_counter()
        fn()
        once = max(time.perf_counter() - start, 1e-7)
        counts[name] = max(1, int(seconds / rounds / once))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, fn in candidates.items():
                start = time.perf_counter()
                for _ in range(counts[name]):
                    fn()
                samples[name].append((time.perf_counter() - start) / counts[name])
    finally:
        gc.enable()
    return {name: statistics.median(s) for name, s in samples.items()}


class Report:
    """A table of rows: ours, a peer's, the ratio, and the target."""

    def __init__(self, title: str) -> None:
        from rich.table import Table

        self.table = Table(title=title, title_justify="left")
        for column, justify in (
            ("work", "left"),
            ("ours", "right"),
            ("peer", "left"),
            ("theirs", "right"),
            ("ratio", "right"),
            ("target", "right"),
        ):
            self.table.add_column(column, justify=justify)

    def row(
        self,
        work: str,
        ours: Callable[[], Any],
        peers: Mapping[str, tuple[Callable[[], Any] | None, float | None]],
        *,
        scale: float = 1.0,
        unit: str = "ms",
        over: Mapping[str, float] = {},
        **options: Any,
    ) -> None:
        """Time one row. ``peers`` maps a name to a function (None: not installed) and the largest ratio that meets the
        target.

        Peers in ``over`` have a target of another kind: how much longer, in ``unit``, our call may take than theirs.
        """
        found = timed({"": ours, **{n: f for n, (f, _) in peers.items() if f is not None}}, **options)
        goals = {name: target for name, (_, target) in peers.items()}
        self.add(work, found.pop(""), found, goals, scale=scale, unit=unit, over=over)

    def add(
        self,
        work: str,
        ours: float,
        theirs: Mapping[str, float],
        goals: Mapping[str, float | None],
        *,
        scale: float = 1.0,
        unit: str = "ms",
        over: Mapping[str, float] = {},
    ) -> None:
        """A row of times in seconds that were taken before; a peer of ``goals`` that is not among ``theirs`` is
        missing."""
        factor = {"ms": 1e3, "us": 1e6}[unit] * scale
        if not goals:
            self.table.add_row(work, f"{ours * factor:.3g} {unit}", "", "", "", "")
        for i, (name, target) in enumerate(goals.items()):
            head = (work, f"{ours * factor:.3g} {unit}") if i == 0 else ("", "")
            goal = "" if target is None else f"≤ {target:g}"
            if name not in theirs:
                self.table.add_row(*head, name, "missing", "", goal)
                continue
            ratio = ours / theirs[name]
            if name in over:
                more = (ours - theirs[name]) * factor
                mark = "✓" if more <= over[name] else "✗"
                self.table.add_row(
                    *head,
                    name,
                    f"{theirs[name] * factor:.3g} {unit}",
                    f"{more:+.2f} {unit} {mark}",
                    f"≤ +{over[name]:g} {unit}",
                )
                continue
            mark = "" if target is None else " ✓" if ratio <= target else " ✗"
            self.table.add_row(*head, name, f"{theirs[name] * factor:.3g} {unit}", f"{ratio:.2f}{mark}", goal)

    def show(self) -> None:
        from rich.console import Console

        Console(width=130).print(self.table)
