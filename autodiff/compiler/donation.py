"""Donation: the caller gives up arrays, whose memory a compiled function may take for its results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays.backends.memory_pool import is_free
from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.dispatch import Deferred
from ...arrays.core.errors import DonatedArrayError
from ...arrays.core.op import Op
from ...arrays.interface.writing import settled
from ..tape.hidden import refuse_foreign


class Gone(Deferred):
    """The placeholder for the buffer of a donated array, with its shape and dtype."""

    __slots__ = ("device", "dtype", "exported", "shape", "taker")
    priority = 9  # no other kind of buffer may take part in its calls
    host = None
    sharding = None

    def __init__(self, x: Array, buf: Any, taker: str) -> None:
        self.shape, self.dtype, self.device, self.taker = buf.shape, buf.dtype, x.device, taker
        # A consumer of ``__cuda_array_interface__`` holds the array, which has a view since, for its memory.
        self.exported = None if isinstance(buf, np.ndarray) or buf.base is None else buf

    def error(self) -> DonatedArrayError:
        return DonatedArrayError(
            f"[compile] this array ({self.aval}) was given up to {self.taker}, which donates it: use the array that "
            "the call returned, pass a copy, or leave the argument out of donate="
        )

    def admit(self, op: Op, args: tuple[Any, ...]) -> tuple[Any, ...]:
        raise self.error()

    def emit(self, op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[Any, ...]:
        raise self.error()

    def concrete(self) -> np.ndarray:
        raise self.error()


def positions(donate: int | Iterable[int]) -> tuple[int, ...]:
    """The option as positions of arguments."""
    found = (donate,) if isinstance(donate, int) else tuple(donate)
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in found):
        raise ValueError(f"[compile] donate takes positions of arguments, from 0 on, got {donate!r}")
    return tuple(sorted(set(found)))


def donated_leaves(args: Sequence[Any], donate: Sequence[int], name: str) -> frozenset[int]:
    """The numbers, among the leaves of all arguments, of those of donated arguments."""
    if not donate:
        return frozenset()
    if donate[-1] >= len(args):
        raise ValueError(
            f"[compile] {name} donates its argument {donate[-1]}, and got {len(args)} positional argument(s)"
        )
    found: set[int] = set()
    start = 0
    for i, a in enumerate(args):
        n = len(trees.flatten(a)[0])
        if i in donate:
            refuse_foreign("compile", a, f"argument {i}, which {name} donates,")
            found.update(range(start, start + n))
        start += n
    return frozenset(found)


def given_up(
    inputs: Sequence[Array], donated: Iterable[int], written: Iterable[int], taker: str, kind: type = np.ndarray
) -> list[Any]:
    """The buffers of the inputs. The ``donated`` inputs lose theirs if they are of the ``kind``; ``written`` buffers
    that others see are copied."""
    for x in inputs:
        if type(x._buf) is Gone:
            raise x._buf.error()
    bufs = [settled(x) for x in inputs]
    once = Counter(map(id, bufs))
    for i in donated:
        if isinstance(inputs[i]._buf, kind) and type(bufs[i]) is kind:
            inputs[i]._buf = Gone(inputs[i], bufs[i], taker)
    for i in written:
        if type(bufs[i]) is np.ndarray and (once[id(bufs[i])] > 1 or not is_free(bufs, i)):
            bufs[i] = np.array(bufs[i])
    return bufs
