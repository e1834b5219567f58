"""The progress display of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

from ....arrays.core.formatting import human_bytes


def human_rate(n: float) -> str:
    """A rate in three digits.

    >>> human_rate(12345.0), human_rate(7.5)
    ('12.3k', '7.5')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:.3g}"


def line(numbers: dict[str, Any]) -> str:
    parts = [f"loss {numbers['loss']:.4f}"] if "loss" in numbers else []
    if "eval_loss" in numbers:
        parts.append(f"eval {numbers['eval_loss']:.4f}")
    if "per_second" in numbers:
        parts.append(f"{human_rate(numbers['per_second'])}/s")
    if "memory" in numbers:
        parts.append(human_bytes(int(numbers["memory"])))
    return "  ".join(parts)


class Display:
    """Progress of a run over ``total`` steps (None: without end)."""

    def __init__(self, total: int | None, *, wanted: bool | None = None) -> None:
        self.total, self._bar, self._task = total, None, None
        self.wanted = wanted
        self._first: tuple[int, float] | None = None  # a step, and when it was seen
        if wanted is False:
            return
        from rich.console import Console

        console = Console(stderr=True)
        if not console.is_terminal:
            return
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("[cyan]training"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[numbers]}"),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=console,
        )
        self._bar.start()
        self._task = self._bar.add_task("", total=total, numbers="")

    def step(self, done: int) -> None:
        if self._first is None:  # it took the time of making ready, too
            self._first = done, time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=done)

    def log(self, done: int, numbers: dict[str, Any]) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, numbers=line(numbers))
        elif self.wanted:
            of = "" if self.total is None else f"/{self.total}"
            print(f"step {done}{of}  {line(numbers)}{self._left(done)}", file=sys.stderr, flush=True)

    def _left(self, done: int) -> str:
        """The time that the rest will take, at the rate until now."""
        if self.total is None or self._first is None or not self._first[0] < done < self.total:
            return ""
        first, began = self._first
        seconds = (time.monotonic() - began) / (done - first) * (self.total - done)
        return f"  {timedelta(seconds=round(seconds))} left"

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self.wanted is not False:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
