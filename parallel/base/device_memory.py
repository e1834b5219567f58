"""Block memories: the host's, with NumPy, or one GPU's, with CuPy.

A process computes on one device, which all its ranks share. Values of the client, stored blocks and messages staged
through the host are copied there when they arrive. Blocks that leave the process are copied to host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np

from ...arrays.backends import host_sync
from ...arrays.backends.backend import CuPyBackend, cupy_backend
from ...arrays.backends.memory_pool import POOL
from ...arrays.core.devices import Device, device
from ...arrays.core.dispatch import Deferred
from ...arrays.core.errors import DTypeError, MeshtapeError
from ...arrays.core.op import Op
from ...arrays.native.copies import is_large, stream


class BlockMemory(Protocol):
    """The interface of an executor to the device of its process."""

    name: str
    """``cpu`` or ``cuda:N``."""
    xp: Any
    """The namespace of its arrays."""

    def using(self) -> AbstractContextManager[Any]:
        """A context for this thread to compute on the device. Used-up memory then raises an error of ours."""

    def bind(self, op: Op) -> Callable[..., Any]:
        """The implementation of an op for its arrays."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """An uninitialized array."""

    def full(self, shape: tuple[int, ...], value: object, dtype: np.dtype) -> Any:
        """An array of one repeated value."""

    def put(self, a: Any) -> Any:
        """``a`` on the device; ``a`` itself if it is there already."""

    def copy(self, to: Any, source: Any) -> None:
        """``to[...] = source``, where the two share no memory."""

    def mark(self) -> Any:
        """A mark behind all work that this thread has queued on the device, for another thread to :meth:`follow`."""

    def follow(self, mark: Any) -> None:
        """Run the work that this thread queues from now on after the marked work."""

    def translated(self, error: Exception) -> Exception:
        """The error of an op, as an error of ours where there is one for it."""


class HostMemory(BlockMemory):
    """Blocks are NumPy arrays; large ones come from the pool."""

    name = "cpu"
    xp = np

    def using(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def bind(self, op: Op) -> Callable[..., Any]:
        return op.numpy

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return POOL.empty(shape, dtype)

    def full(self, shape: tuple[int, ...], value: object, dtype: np.dtype) -> np.ndarray:
        return np.full(shape, value, dtype)

    put = staticmethod(np.asarray)

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        if is_large(to):
            stream(to, source)
        else:
            to[...] = source

    def translated(self, error: Exception) -> Exception:
        return error


HOST = HostMemory()


class CudaMemory:
    """Blocks are CuPy arrays on one GPU, and come from CuPy's own pool."""

    def __init__(self, backend: CuPyBackend, where: Device) -> None:
        self._backend, self._where = backend, where
        self.name, self.xp = str(where), backend.xp

    @contextmanager
    def using(self) -> Iterator[None]:
        with self.xp.cuda.Device(self._where.index), self._backend.memory():
            yield

    def bind(self, op: Op) -> Callable[..., Any]:
        fn = op.bind(self.xp)
        return fn if "dtype" not in op.params else lambda *bufs, **params: _block(fn(*bufs, **params))

    def total(self) -> int:
        with self.xp.cuda.Device(self._where.index):
            return self.xp.cuda.runtime.memGetInfo()[1]

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        return self.xp.empty(shape, dtype)

    def full(self, shape: tuple[int, ...], value: object, dtype: np.dtype) -> Any:
        return _block(self._backend.filled(shape, value, dtype, self._where))

    def put(self, a: Any) -> Any:
        if isinstance(a, self.xp.ndarray):
            return a
        host = np.asarray(a)
        order = order_of(host)
        if order is None or order == tuple(range(host.ndim)):
            return _block(self._backend.from_host(host, self._where))
        return self.put(host.transpose(order)).transpose(*np.argsort(order).tolist())

    def spilled(self, block: Any) -> np.ndarray:
        """A block without gaps in pinned host memory, which the device copies to and from by itself. The order of its
        dimensions stays."""
        order = order_of(block)
        if is_on_host(block) or not block.size or order is None:
            return on_host(block)
        host_sync.note("blocks go to host memory")
        with block.device:
            laid = block.transpose(*order)  # what is in another order CuPy would copy on the device first
            held = self.xp.cuda.alloc_pinned_memory(block.nbytes)
            out = np.frombuffer(held, np.uint8, block.nbytes).view(block.dtype).reshape(laid.shape)
            laid.get(out=out)
        return out.transpose(np.argsort(order))

    def copy(self, to: Any, source: Any) -> None:
        to[...] = source

    def mark(self) -> Any:
        return self.xp.cuda.get_current_stream().record()

    def follow(self, mark: Any) -> None:
        self.xp.cuda.get_current_stream().wait_event(mark)

    def translated(self, error: Exception) -> Exception:
        try:
            self._backend.explain(error)
        except MeshtapeError as e:
            return e.with_traceback(None)  # whose frames hold the error
        return error


def _block(buf: Any) -> Any:
    if isinstance(buf, Deferred):
        raise DTypeError(f"{buf.dtype.name} has no blocks on a mesh of GPUs: cast the array, or use a mesh of CPUs")
    return buf


def memory_of(name: str) -> BlockMemory:
    """The memory of a device by its name, ``cpu`` or ``cuda:N``.

    Raises
    ------
    BackendError
        Where CuPy or a driver is missing.

    >>> memory_of("cpu").name
    'cpu'
    """
    where = device(name)
    return HOST if where.kind == "cpu" else CudaMemory(cupy_backend(), where)


def order_of(block: Any) -> tuple[int, ...] | None:
    """The dimensions of a block from the slowest to the fastest in memory; None where it has gaps.

    >>> order_of(np.zeros((2, 3)).T), order_of(np.zeros((2, 3))[:, :2])
    ((1, 0), None)
    """
    order = tuple(sorted(range(block.ndim), key=lambda axis: -block.strides[axis]))
    step = block.itemsize
    for n, stride in ((block.shape[axis], block.strides[axis]) for axis in reversed(order)):
        if n > 1 and stride != step and block.size:
            return None
        step *= n
    return order


def on_host(block: Any) -> np.ndarray:
    """A block in host memory; the block itself if it is there already."""
    return block if isinstance(block, np.ndarray) else block.get()


def moved(blocks: Mapping[int, Any], to: Callable[[Any], Any]) -> dict[int, Any]:
    """Ranks that share a block share it there, too."""
    held = list(blocks.items())  # at once, as other threads may move them
    each = {id(b): b for _, b in held}
    there = {key: to(b) for key, b in each.items()}
    return {rank: there[id(b)] for rank, b in held}


def is_on_host(block: Any) -> bool:
    return isinstance(block, np.ndarray)


class _Thread(threading.local):
    memory: BlockMemory = HOST


_thread = _Thread()


@contextmanager
def serving(memory: BlockMemory) -> Iterator[None]:
    """A context in which :func:`current_memory` is ``memory``, for functions that are called on blocks."""
    before, _thread.memory = _thread.memory, memory
    try:
        yield
    finally:
        _thread.memory = before


def current_memory() -> BlockMemory:
    """The memory of the ranks whose blocks this thread was called on."""
    return _thread.memory
