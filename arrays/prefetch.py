"""Prefetching (``mt.prefetch``): the next batches are made ready during the work on the current one.

A thread of its own runs the iterable, a bounded number of items ahead. For a GPU it also copies them there, on a stream
of its own: host memory goes through two pinned blocks of bounded size, and the stream that works on an item waits for
the event behind its last copy, on the device.

Memory is never taken back too early. CuPy's pool gives a block that nobody holds to the next array of *its* stream,
here the copying one, although the working stream may still be reading it. So each block handed out stays held here
until nobody else holds it; then an event is noted on the working stream, which the copying stream awaits before it may
use the block again.
"""

from __future__ import annotations

import ctypes
import functools
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from .backends.backend import backend_for
from .backends.host_sync import remember_range
from .core import tree as trees
from .core.array import Array
from .core.devices import CPU, Device, default_device, device
from .core.dispatch import Deferred, wrap
from .core.dtypes import as_dtype
from .core.errors import ArgumentError, GradientError
from .core.op import Op, state
from .ops.creation import asarray

T = TypeVar("T")

STAGING_BYTES = 32 << 20
_END = object()


class _Failure:
    """An exception on its way from the thread to the consumer of the next item."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def pieces(nbytes: int, size: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of the parts of ``nbytes`` that pass through a block of ``size``.

    >>> list(pieces(10, 4))
    [(0, 4), (4, 4), (8, 2)]
    """
    for start in range(0, nbytes, size):
        yield start, min(size, nbytes - start)


class Lent:
    """Buffers that were handed out, kept until nobody else holds them."""

    def __init__(self, holders: Callable[[Any], int]) -> None:
        self._holders = holders
        self._out: list[list[Any]] = []  # each buffer with its number of holders while nobody else had it

    def hand_out(self, make: Callable[[], Any]) -> Any:
        """A new buffer. Its references at this moment are those that remain when everybody else has dropped it."""
        entry = [make(), 0]
        self._out.append(entry)
        entry[1] = self._holders(entry[0])
        return entry[0]

    def come_back(self) -> list[Any]:
        """The buffers that only this object holds any more; it lets go of them too."""
        back = [entry for entry in self._out if self._holders(entry[0]) <= entry[1]]
        self._out = [entry for entry in self._out if all(entry is not b for b in back)]
        return [entry[0] for entry in back]

    def __len__(self) -> int:
        return len(self._out)


def _holders_on_cuda(buf: Any) -> int:
    # Views hold the array that they are of, or the memory alone.
    return sys.getrefcount(buf) + sys.getrefcount(buf.data.mem)


class _CudaCopier:
    """Copies items to a CUDA device on a stream of its own. There is one for each device and size (:func:`_copier`), as
    what a consumer still holds at the end of one prefetching must be awaited by the next. :meth:`copy` is called by the
    threads."""

    def __init__(self, where: Device, staging: int) -> None:
        self.backend: Any = backend_for(where)
        self.cupy: Any = self.backend.xp
        self.where = where
        cuda = self.cupy.cuda
        with cuda.Device(where.index):
            self.stream = cuda.Stream(non_blocking=True)
            size = max(staging // 2, 1)
            self.size = size
            self.blocks = [cuda.alloc_pinned_memory(size) for _ in range(2)]
            self.free = [cuda.Event(disable_timing=True) for _ in range(2)]
        self.turn = 0
        self.lent = Lent(_holders_on_cuda)
        self.copying, self.lock = threading.Lock(), threading.Lock()
        self.returned: list[tuple[Any, list[Any]]] = []

    def copy(self, item: Any) -> tuple[Any, Any]:
        """The item with its arrays on the device, and the event behind the last copy."""
        cuda = self.cupy.cuda
        with self.copying, cuda.Device(self.where.index), self.stream, self.backend.memory():
            self._take_back()
            moved = trees.tree_map(self._leaf, item)
            event = cuda.Event(disable_timing=True)
            event.record(self.stream)
        return moved, event

    def _take_back(self) -> None:
        """Return the buffers that the consumer has dropped to the pool, after this stream waits for their last use."""
        with self.lock:
            returned, self.returned = self.returned, []
        for event, _ in returned:
            self.stream.wait_event(event)

    def _leaf(self, x: Any) -> Any:
        if isinstance(x, Array) and not isinstance(x._buf, np.ndarray):
            return x.to_device(self.where)
        if not isinstance(x, Array | np.ndarray):
            return x
        buf = x._buf if isinstance(x, Array) else x.astype(as_dtype(x.dtype, "prefetch"), copy=False)
        host = np.ascontiguousarray(buf).reshape(buf.shape)  # it makes vectors of numbers
        with self.lock:
            buf = self.lent.hand_out(lambda: self.cupy.empty(host.shape, host.dtype))
        source = host.reshape(-1).view(np.uint8)
        for start, n in pieces(source.nbytes, self.size):
            block, free = self.blocks[self.turn], self.free[self.turn]
            free.synchronize()  # the copy that last used the block is done; an event that was never recorded is, too
            staged = np.frombuffer(block, np.uint8, n)
            staged[:] = source[start : start + n]
            (buf.data + start).copy_from_host_async(ctypes.c_void_p(staged.ctypes.data), n, self.stream)
            free.record(self.stream)
            self.turn = 1 - self.turn
        return wrap(remember_range(buf, host))

    def hand_over(self, ready: tuple[Any, Any]) -> Any:
        """Called by the consumer: its stream waits for the copies, and the buffers that it has dropped come back."""
        item, event = ready
        cuda = self.cupy.cuda
        with cuda.Device(self.where.index):
            cuda.get_current_stream().wait_event(event)
        self._come_back()
        return item

    def _come_back(self) -> None:
        cuda = self.cupy.cuda
        with cuda.Device(self.where.index), self.lock:
            back = self.lent.come_back()
            if back:
                done = cuda.Event(disable_timing=True)
                done.record(cuda.get_current_stream())
                self.returned.append((done, back))

    def end(self) -> None:
        """Called by the consumer: what it has dropped so far goes back to the pool, the rest with the next
        prefetching."""
        self._come_back()
        self._take_back()


_copier = functools.cache(_CudaCopier)


def _is_on_a_gpu(x: Array) -> bool:
    return not isinstance(x._buf, np.ndarray | Deferred)


class _HostCopier:
    """Leaves arrays where they are, but for those of a GPU that are ``wanted`` on the CPU."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted

    def copy(self, item: Any) -> Any:
        return trees.tree_map(self._placed, item)

    def _placed(self, x: Any) -> Any:
        if self.wanted and (_is_on_a_gpu(x) if isinstance(x, Array) else hasattr(x, "__cuda_array_interface__")):
            return asarray(x, device=CPU)
        return asarray(x) if isinstance(x, np.ndarray) else x

    def hand_over(self, ready: Any) -> Any:
        return ready

    def end(self) -> None:
        pass


class _Elsewhere:
    """Stand-in, in the thread, for the recorders around :func:`prefetch`, which only see calls of their own thread."""

    def __init__(self, recorders: tuple[Any, ...]) -> None:
        self.recorders = recorders

    def watches(self, x: Array) -> bool:
        return (isinstance(x._buf, Deferred) and x._buf.traced) or any(r.watches(x) for r in self.recorders)

    def record(self, op: Op, args: Sequence[Any], *rest: Any) -> None:
        if not op.nondifferentiable and any(isinstance(a, Array) and self.watches(a) for a in args):
            raise GradientError(
                f"[prefetch] the iterable calls {op.name} on an array that is differentiated or traced, in a thread of "
                "its own that no tape records: compute with that array where the items are taken, or pass "
                "mt.stop_gradient(x) if it is a constant"
            )


class Prefetcher(Generic[T]):
    """The iterator of :func:`prefetch`. A context manager: leaving it, or :meth:`close`, ends the thread."""

    def __init__(self, items: Iterable[T], copier: Any, depth: int) -> None:
        self._copier = copier
        self._ready: queue.Queue[Any] = queue.Queue(depth)
        self._stop = threading.Event()
        self._done = False
        run = functools.partial(_run, items, copier, self._ready, self._stop, state.recorders)
        self._thread = threading.Thread(target=run, name="meshtape-prefetch", daemon=True)
        # The thread holds none of this object, which therefore goes when the consumer lets go of it, and ends the
        # thread.
        self._finalize = weakref.finalize(self, _end, self._stop, self._ready)
        self._thread.start()

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if self._done:
            raise StopIteration
        while True:
            try:
                ready = self._ready.get(timeout=1)
                break
            except queue.Empty:
                if self._stop.is_set():  # another thread has closed it
                    raise StopIteration from None
        if ready is _END or isinstance(ready, _Failure):
            self.close()
            if ready is _END:
                raise StopIteration
            raise ready.error
        return self._copier.hand_over(ready)

    def close(self) -> None:
        """End the thread, and wait until it has ended the iterable. Items that were ready are dropped."""
        self._done = True
        self._finalize()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._copier.end()

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def _end(stop: threading.Event, ready: queue.Queue[Any]) -> None:
    stop.set()
    try:
        while True:
            ready.get_nowait()  # a thread that waits for room goes on, and sees that it shall stop
    except queue.Empty:
        pass


def _run(
    items: Iterable[Any], copier: Any, ready: queue.Queue[Any], stop: threading.Event, recorders: tuple[Any, ...]
) -> None:
    if recorders:
        state.recorders = (_Elsewhere(recorders),)

    def give(value: Any) -> None:
        while not stop.is_set():
            try:
                ready.put(value, timeout=0.1)
            except queue.Full:
                continue
            return

    source = None
    try:
        source = iter(items)
        for item in source:
            give(copier.copy(item))
            if stop.is_set():
                break
        last: Any = _END
    except BaseException as e:
        last = _Failure(e)
    try:
        close = getattr(source, "close", None)
        if close is not None:
            close()
    except Exception as e:
        last = _Failure(e)
    give(last)


def prefetch(
    items: Iterable[T], *, device: Device | str | None = None, depth: int = 2, staging_bytes: int = STAGING_BYTES
) -> Prefetcher[T]:
    """An iterator over ``items`` that makes the next ones ready in the background.

    Parameters
    ----------
    items
        Batches: trees (dicts, lists, tuples, dataclasses) whose arrays, NumPy's too, become Arrays on ``device``. It is
        iterated by another thread.
    device
        Where the arrays go; the default device if None, which leaves arrays on a GPU there. For a CUDA device they are
        copied on a stream of their own, while the device works; the stream that is current where the next item is taken
        waits for them. Work on other streams that still reads an item must be awaited before the item is let go of.
    depth
        How many items are ready at most, besides the one that is being made.
    staging_bytes
        Pinned host memory for the copies, in bytes.

    Raises
    ------
    ValueError
        For a depth or a size that is not positive.
    BackendError
        At once where the device does not exist. An error of ``items`` is raised in its place in the order of items.
    GradientError
        In place of an item that was computed from an array that a gradient around this call is taken by: the tape does
        not see the other thread.

    Examples
    --------
    >>> import meshtape as mt, numpy as np
    >>> with mt.prefetch({"x": np.full(2, i)} for i in range(3)) as batches:
    ...     [batch["x"].tolist() for batch in batches]
    [[0, 0], [1, 1], [2, 2]]
    """
    if depth < 1:
        raise ArgumentError(f"[prefetch] depth must be at least 1, got {depth}")
    if staging_bytes < 2:
        raise ArgumentError(f"[prefetch] staging_bytes must be at least 2, got {staging_bytes}")
    where = default_device() if device is None else _device(device)
    if where is not CPU:
        backend_for(where).check(where)
    copier = _HostCopier(device is not None) if where is CPU else _copier(where, staging_bytes)
    return Prefetcher(items, copier, depth)


_device = device
