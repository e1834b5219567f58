"""Scratch memory of a thread, used again: fresh pages cost as much as the copy that fills them."""

from __future__ import annotations

import threading
from functools import cache

import numpy as np

from ...arrays.core.errors import CheckpointError, OutOfMemory

KEPT = 16 << 20  # bytes that a thread keeps for each use

_own = threading.local()


def scratch(use: str, nbytes: int) -> np.ndarray:
    """Uninitialized bytes of this thread, valid until it asks for the same ``use`` again.

    >>> scratch("test", 10).shape
    (10,)
    """
    memory = _own.__dict__
    held = memory.get(use)
    if held is None or held.size < nbytes:
        held = np.empty(nbytes, np.uint8)
        if nbytes <= KEPT:
            memory[use] = held
    return held[:nbytes]


def release() -> None:
    """Free this thread's scratch memory. A thread that ends frees its own."""
    _own.__dict__.clear()


@cache
def keep_freed() -> None:
    """Let the system's allocator keep freed memory for the temporaries of computing, from now on.

    glibc maps each block above a threshold anew, and gives the top of the heap back above another; both grow to the
    largest block that was freed, up to 32 MB. So a block that nobody touches is freed here; elsewhere for nothing.
    """
    np.empty(31 << 20, np.uint8)


def out_of_memory(what: str, error: MemoryError, cure: str = "read slices of it") -> OutOfMemory:
    """The error for ``what``, unless ``error`` says already for which part of it.

    >>> out_of_memory("key 'w'", MemoryError())
    OutOfMemory("key 'w': this process gets no more memory; read slices of it")
    """
    if isinstance(error, OutOfMemory):
        return error
    return OutOfMemory(f"{what}: {str(error) or 'this process gets no more memory'}; {cure}")


def room(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A new array for the elements of a key; `OutOfMemory` where there is no memory for it."""
    try:
        return np.empty(shape, dtype)
    except MemoryError as e:
        cure = "read slices of it, or load it onto a mesh of more processes"
        raise out_of_memory(f"key {name!r}", e, cure) from None
    except ValueError as e:  # lengths beside a zero whose product NumPy cannot hold
        raise CheckpointError(f"key {name!r}: no array has the shape {shape}: {e}; read smaller slices") from None
