"""Compressed entries of archives, unpacked once into a file beside the target: each window would unpack them from their
start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from ..foreign.archives import DeflatedTensor
from ..rules.lazy_tensors import leaves, with_leaves
from ..stores.atomic_directory import check_space, temporary


@contextlib.contextmanager
def unpacked(tensors: Sequence[Any], target: str, limit: int) -> Iterator[Sequence[Any]]:
    """The tensors, with entries above a window's ``limit`` of bytes read from a temporary file beside ``target``."""
    found = {t.key: t for tensor in tensors for t in leaves(tensor) if isinstance(t, DeflatedTensor)}
    large = {key: t for key, t in found.items() if t.nbytes > limit}
    if not large:
        yield tensors
        return
    at, size = 0, sum(t.nbytes for t in large.values())
    check_space(size, target)
    with temporary(target) as (path, fd):
        made = {}
        for key, t in large.items():
            made[key] = t.unpacked(fd, path, at, size)
            at += t.nbytes
        yield [
            with_leaves(tensor, lambda t: made.get(t.key, t) if isinstance(t, DeflatedTensor) else t)
            for tensor in tensors
        ]
