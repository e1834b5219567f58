"""Damaged and hostile input: whatever Python's own readers raise for it, told as one error of ours."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

from ...arrays.core.errors import CorruptCheckpoint, MeshtapeError

_ERRORS = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, EOFError, struct.error)


@contextlib.contextmanager
def malformed(what: str, *more: type[Exception], error: type[MeshtapeError] = CorruptCheckpoint) -> Iterator[None]:
    """Raise ``error``, which begins with ``what``, where the block cannot read its input. Errors of ours pass, but for
    ``more``, which are told so, too.

    >>> with malformed("a.json: no list"):
    ...     (a, b) = [1]
    Traceback (most recent call last):
        ...
    meshtape.arrays.core.errors.CorruptCheckpoint: a.json: no list: not enough values to unpack (expected 2, got 1)
    """
    try:
        yield
    except (*_ERRORS, *more) as e:
        if isinstance(e, MeshtapeError) and not isinstance(e, more):
            raise
        raise error(f"{what}: {e}") from None
