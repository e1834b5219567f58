"""The steps of a transfer by threads: writes of windows, and their reads for verification once an array is complete.

Reading back needs processors and memory, writing waits for the disk; together they take little longer than the slower.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .sinks.sink import Unit, WindowWriter, put


class WindowStep(NamedTuple):
    """A window to write, or to read back."""

    unit: Unit
    back: bool = False


class WindowSteps:
    """The steps for all windows except those in ``kept``, which an earlier run wrote and this one verified.

    An array is read back after the next one was written, so that the threads do not wait for its last windows.
    """

    def __init__(
        self, writers: Sequence[WindowWriter], tensors: Sequence[Any], root: str, kept: Mapping[Unit, Any]
    ) -> None:
        self._writers, self._tensors, self._root = writers, tensors, root
        self._kept = set(kept)
        self._sums: dict[Unit, list[int]] = {}
        self._left: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._failed = False

    def order(self, units: Sequence[Unit]) -> list[WindowStep]:
        """All steps, in the order in which threads are to take them."""
        arrays: dict[int, list[Unit]] = {}
        for u in units:
            if u not in self._kept:
                arrays.setdefault(u.array, []).append(u)
        self._left.update({a: len(held) for a, held in arrays.items()})
        return list(self._order(list(arrays.values())))

    @staticmethod
    def _order(arrays: list[list[Unit]]) -> Iterator[WindowStep]:
        for i in range(len(arrays) + 1):
            if i < len(arrays):
                yield from map(WindowStep, arrays[i])
            if i:
                yield from (WindowStep(u, True) for u in arrays[i - 1])

    def __call__(self, step: WindowStep) -> Any:
        """Carry a step out: the checksums and losses of a window that was written, or whether it reads back as it
        was."""
        unit = step.unit
        writer = self._writers[unit.array]
        if not step.back:
            try:
                done = put(writer, self._root, unit.box, self._tensors[unit.array].only(unit.box))
            except BaseException:
                with self._changed:  # nobody may wait for this window
                    self._failed = True
                    self._changed.notify_all()
                raise
            with self._changed:
                self._sums[unit] = done[0]
                self._left[unit.array] -= 1
                self._changed.notify_all()
            return done
        with self._changed:
            # Other threads took the last windows of the array before this step, so their writes will end.
            self._changed.wait_for(lambda: self._failed or not self._left[unit.array])
            if self._failed:
                return True  # the error of the other thread is raised; there is nothing to tell here
        return writer.check(self._root, unit.box, self._sums[unit])
