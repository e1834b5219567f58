"""Numbers about a whole tensor that its elements depend on: the seam between lazy tensors and whoever reads their
boxes.

A lazy tensor whose boxes need, say, the norm of its source has a field ``measured`` of this type and a generator
``measuring()``, which yields lists of independent calls, is sent their results and returns the value. A transfer
computes it by `measure_all` on its threads or workers before the windows; any other reader does so at its first box. It
is computed once, and goes along to other processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..base.waiting import lock
from ..readers.shared import alone
from .casting import Tally, tallied
from .lazy_tensors import every

_TOGETHER = 1 << 25  # elements of the tensors that are measured at a time

Over = Callable[[Callable[..., Any], Sequence[Any], Callable[[Any], tuple[Any, ...]]], Iterable[tuple[Any, Any]]]


class Measured:
    """A value that is computed once, whichever thread comes first."""

    __slots__ = ("done", "lock", "value")

    def __init__(self, done: bool = False, value: Any = None) -> None:
        self.done, self.value, self.lock = done, value, lock()

    def __reduce__(self) -> Any:
        return Measured, (self.done, self.value)

    def __repr__(self) -> str:
        return "measured"  # part of a transfer's fingerprint: whether it is known already changes no byte

    def of(self, tensor: Any) -> Any:
        """The value; computed in this thread where it is not known."""
        if not self.done:
            with self.lock:
                if not self.done:
                    _measure([tensor], _in_turn)
        return self.value


def _in_turn(
    fn: Callable[..., Any], items: Sequence[Any], arguments: Callable[[Any], tuple[Any, ...]]
) -> Iterator[Any]:
    for item in items:
        yield item, fn(*arguments(item))


def measure_all(tensors: Iterable[Any], over: Over) -> None:
    """Compute what these tensors need to know of their sources, by ``over`` of `Workers`, several tensors at a time."""
    found: dict[int, Any] = {}
    for t in (t for each in tensors for t in every(each)):
        cell = getattr(t, "measured", None)
        if isinstance(cell, Measured) and not cell.done:
            found[id(cell)] = t
    group: list[Any] = []
    for t in found.values():
        group.append(t)
        if sum(math.prod(t.shape) for t in group) >= _TOGETHER:
            _measure(group, over)
            group = []
    _measure(group, over)


def _measure(tensors: Sequence[Any], over: Over) -> None:
    live = [(t, t.measuring()) for t in tensors]
    sent: list[Any] = [None] * len(live)
    while live:
        calls: list[Any] = []
        counts, following = [], []
        for (tensor, generator), results in zip(live, sent, strict=True):
            try:
                asked = generator.send(results)
            except StopIteration as e:
                tensor.measured.value, tensor.measured.done = e.value, True
                continue
            calls += asked
            counts.append(len(asked))
            following.append((tensor, generator))
        done = dict(over(_call, range(len(calls)), calls.__getitem__))
        at, sent = 0, []
        for n in counts:
            sent.append([done[i] for i in range(at, at + n)])
            at += n
        live = following


def _call(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Apart from what is read at the moment: the windows count what casts lose, where they read it themselves."""
    with np.errstate(all="ignore"):
        return tallied(Tally(), lambda: alone(lambda: fn(*args)))
