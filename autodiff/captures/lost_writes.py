"""Writes of a traced function to objects around it, which its program would not repeat.

A write to an argument, or of a traced array to something around the function, is refused. Other writes to what the
function reads (a counter, a memo) are done at every call, as the function is then traced at every call, until it writes
no more.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.errors import TracedValueError
from .guards import Captures
from .tracing import Tracer


class Arguments:
    """The traced arguments of a function, and their values before the trace."""

    def __init__(self, name: str, leaves: Sequence[Any], treedef: trees.TreeDef, donated: frozenset[int]) -> None:
        self.name, self.donated = name, donated
        self.args, self.kwargs = trees.unflatten(treedef, leaves)
        # Constructors of dataclasses may have changed the leaves.
        self.treedef = trees.flatten((self.args, self.kwargs))[1]
        self.leaves = trees.flatten_with_path((self.args, self.kwargs))
        self.buffers = [x._buf if isinstance(x, Array) else None for _, x in self.leaves]

    def refuse_writes(self) -> None:
        """Raise where the function wrote to one that the caller goes on to use."""
        tree = self.args, self.kwargs
        old, new = dict(self.leaves), dict(trees.flatten_with_path(tree))
        path = next((p for p in {**old, **new} if old.get(p, self) is not new.get(p, self)), None)
        if path is not None or trees.flatten(tree)[1] != self.treedef:
            raise TracedValueError(
                f"[compile] {self.name} writes to a container that is its argument, at "
                f"{_named(path or (0, 'an empty container'))}: the "
                "caller's would stay as it was. Change a copy of it and return that"
            )
        for i, ((place, x), buffer) in enumerate(zip(self.leaves, self.buffers, strict=True)):
            if isinstance(x, Array) and x._buf is not buffer and i not in self.donated:
                raise TracedValueError(
                    f"[compile] {self.name} writes in place to its argument {_named(place)}: the caller's array would "
                    "stay as it was. Write to a copy (x = mt.copy(x), x.at[key].set(value)) and return that, or give "
                    "the argument up by donate="
                )


def _named(path: trees.Path) -> str:
    return trees.path_name(path[1:])


def restore(name: str, reads: Captures, trace: Any) -> None:
    """Give arrays around the function, which it made traced ones by writing to them, their values back. Raises if there
    are any."""
    written = [(x, buffer) for x, buffer in reads.arrays if isinstance(x._buf, Tracer) and x._buf.builder is trace]
    for x, buffer in written:
        x._buf = buffer
    if written:
        raise TracedValueError(
            f"[compile] {name} writes in place to an array around it ({tuple(written[0][0].shape)}, "
            f"{written[0][0].dtype}), a value that "
            "is only known when the program runs: pass the array as an argument and return the new one"
        )


def refuse_kept(name: str, now: Captures, trace: Any) -> None:
    """Raise where traced arrays are left in captured objects, where they would have no values."""
    for builder, path in now.traced:
        if builder is trace:
            raise TracedValueError(
                f"[compile] {name} keeps a traced array in {path}, which has a value only while the program runs: "
                "return it instead"
            )


@contextmanager
def noting_logs(trace: Any) -> Iterator[None]:
    """Note in ``trace.logged`` whether this thread writes to a log of the user's inside."""
    logging = sys.modules.get("logging")  # nobody writes to a log who has not imported it
    if logging is None:
        yield
        return
    factory = logging.getLogRecordFactory()
    if not hasattr(factory, "noted"):

        @functools.wraps(factory)
        def make(name: str, *args: Any, **kwargs: Any) -> Any:
            if _noting.trace is not None and not name.startswith("meshtape"):
                _noting.trace.logged = f"the log {name!r}"
            return factory(name, *args, **kwargs)

        make.noted = True  # type: ignore[attr-defined]
        logging.setLogRecordFactory(make)
    before, _noting.trace = _noting.trace, trace
    try:
        yield
    finally:
        _noting.trace = before


class _Noting(threading.local):
    trace: Any = None


_noting = _Noting()
