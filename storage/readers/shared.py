"""Tensors that several others are made of: within one evaluation each is asked once, and a box of it is read once.

A virtual checkpoint of virtual ones reaches a parent on many paths, whose number grows with each level of them. Tensors
are told apart as objects: whoever makes a checkpoint of others gives one object to all that are made of it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from ...arrays.core.blocks import Box
from ..base.threads import within

Job = Callable[[], int]
KEPT = 32 << 20  # bytes that an evaluation keeps, or its last two boxes
ENTRY = 1 << 10  # of these, beside a box itself
RECENT = 4  # boxes of a tensor in which a smaller one is looked for
T = TypeVar("T")
_own = threading.local()


def once(method: str, tensor: Any, *args: Any, again: Any = None) -> Any:
    """What a method of a tensor gives, which asks those that it is made of in the same way: each is asked once for the
    same ``args``. ``again`` is the answer to whoever asks later, where it is another."""
    before = getattr(_own, "asked", None)
    asked: dict[Any, Any] = {} if before is None else before
    key = method, id(tensor), args
    if key not in asked:
        # An id is that of a tensor which is held.
        asked[key] = tensor, within(_own, {"asked": asked}, lambda: getattr(tensor, method)(*args))
        return asked[key][1]
    return asked[key][1] if again is None else again


class _Reads:
    """The boxes that an evaluation has read of tensors with several ``uses``, at most about `KEPT` bytes. Those whose
    uses have all come go first, then those that were used longest ago."""

    def __init__(self, uses: Mapping[int, int]) -> None:
        self._uses = uses
        self._held: OrderedDict[tuple[int, Box], tuple[np.ndarray, list[int]]] = OrderedDict()
        self._recent: dict[int, list[Box]] = {}  # of each tensor the last boxes, which may hold others
        self._nbytes = 0

    def jobs(self, tensor: Any, box: Box, out: np.ndarray) -> Iterable[Job]:
        return (lambda: self._read(tensor, box, out),) if id(tensor) in self._uses else tensor.jobs(box, out)

    def _read(self, tensor: Any, box: Box, out: np.ndarray) -> int:
        key = id(tensor), box
        recent = self._recent.setdefault(key[0], [])
        around = (k for b in recent if (k := (key[0], b)) in self._held and box.intersect(b) == box)
        if (found := key if key in self._held else next(around, None)) is not None:
            held, left = self._held[found]
            left[0] -= 1
            self._held.move_to_end(found, last=left[0] > 0)
            out[...] = held[(*box.within(found[1]).slices, ...)]
            return 0
        nbytes = sum(job() for job in tensor.jobs(box, out))
        self._held[key] = out.copy(), [self._uses[key[0]] - 1]
        recent[:] = [box, *recent[: RECENT - 1]]
        self._nbytes += out.nbytes + ENTRY
        while self._nbytes > KEPT and len(self._held) > 2:
            self._nbytes -= self._held.popitem(last=False)[1][0].nbytes + ENTRY
        return nbytes


def jobs_of(tensor: Any, box: Box, out: np.ndarray) -> Iterable[Job]:
    """The jobs of a tensor; those of an evaluation's shared one read nothing that was read before."""
    reads: _Reads | None = getattr(_own, "reads", None)
    return tensor.jobs(box, out) if reads is None else reads.jobs(tensor, box, out)


def is_evaluating() -> bool:
    """Whether this thread is within an `evaluation`."""
    return getattr(_own, "reads", None) is not None


def evaluation(uses: Mapping[int, int], call: Callable[[], T]) -> T:
    """A call whose reads make one box. ``uses``: how many others are made of a tensor, by its id, where several are.
    One within another that has none is a part of it."""
    return call() if is_evaluating() and not uses else within(_own, {"reads": _Reads(uses)}, call)


def alone(call: Callable[[], T]) -> T:
    """A call that is no part of the evaluation at work."""
    return within(_own, {"reads": None, "asked": None}, call)
