"""Work that makes very many small objects, which all stay."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_resting = threading.local()  # .outermost: whether this thread let the collector rest, and has not ended that


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Let the garbage collector rest: it would walk the millions of small lists of a large manifest again and again
    while they are made."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _resting.outermost = True
    try:
        yield
    finally:
        collect_again()


def collect_again() -> None:
    """End the rest that this thread began, before its block ends: other threads want their garbage collected."""
    if getattr(_resting, "outermost", False):
        _resting.outermost = False
        gc.enable()
