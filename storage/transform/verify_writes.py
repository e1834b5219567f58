"""The steps of a transfer by threads: writes of windows, and their reads for verification once others were written.

Reading back needs processors and memory, writing waits for the disk; together they take little longer than the slower.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .sinks.raw_writer import check_all, put_all
from .sinks.sink import Unit, WindowWriter

_SMALL = 128 << 10  # bytes of a window that is written together with others
_TOGETHER = 512  # windows at most


class WindowStep(NamedTuple):
    """Windows to write, or to read back: one, or several small ones of different arrays. They are numbers of units."""

    windows: tuple[int, ...]
    back: bool = False


def steps_of(
    left: Sequence[int], units: Sequence[Unit], sizes: Sequence[int], writers: Sequence[Any], limit: int
) -> list[WindowStep]:
    """The steps that write the windows ``left``; those of one step have at most ``limit`` bytes."""
    out: list[list[int]] = []
    used = 0
    for n in left:
        small = sizes[n] <= _SMALL and hasattr(writers[units[n].array], "raw_of")
        if not (small and out and 0 < used <= limit - sizes[n] and len(out[-1]) < _TOGETHER):
            out.append([])
            used = 0
        out[-1].append(n)
        used = used + sizes[n] if small else limit
    return [WindowStep(tuple(some)) for some in out]


class WindowSteps:
    """The calls that carry steps out, by threads."""

    def __init__(
        self, writers: Sequence[WindowWriter], tensors: Sequence[Any], root: str, units: Sequence[Unit]
    ) -> None:
        self._writers, self._tensors, self._root, self._units = writers, tensors, root, units
        self._done: dict[tuple[int, ...], list[list[int]]] = {}  # checksums of the windows of each step
        self._changed = threading.Condition()
        self._failed = False

    def order(self, steps: Sequence[WindowStep]) -> Iterator[WindowStep]:
        """These steps, and those that read back, in the order in which threads are to take them: an array is read back
        after the next one was written, so that the threads do not wait for its last windows."""
        arrays = [list(some) for _, some in itertools.groupby(steps, lambda s: self._units[s.windows[0]].array)]
        for before, now in zip([[], *arrays], [*arrays, []], strict=True):
            yield from now
            yield from (WindowStep(s.windows, True) for s in before)

    def __call__(self, step: WindowStep) -> Any:
        """Carry a step out: checksums and losses of each window that was written, or whether it reads back as it
        was."""
        units = [self._units[n] for n in step.windows]
        writers, boxes = [self._writers[u.array] for u in units], [u.box for u in units]
        if not step.back:
            try:
                done = put_all(writers, self._root, boxes, [self._tensors[u.array] for u in units])
            except BaseException:
                with self._changed:  # nobody may wait for these windows
                    self._failed = True
                    self._changed.notify_all()
                raise
            with self._changed:
                self._done[step.windows] = [sums for sums, _ in done]
                self._changed.notify_all()
            return done
        with self._changed:
            # Another thread took these windows before this step, so their write will end.
            self._changed.wait_for(lambda: self._failed or step.windows in self._done)
            if self._failed:
                return [True]  # the error of the other thread is raised; there is nothing to tell here
        return check_all(writers, self._root, boxes, self._done.pop(step.windows))
