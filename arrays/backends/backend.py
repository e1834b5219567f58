"""Backends: NumPy and CuPy behind one small interface.

A backend runs ops on its buffers, makes buffers of its own from host memory, and gives host memory back. ``numpy`` is always
there; ``cupy`` is imported when the first CUDA device is used, never at import time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from ..core.devices import CPU, Device, device
from ..core.dispatch import Deferred, register_backends
from ..core.dtypes import FIRST_USER_DTYPE
from ..core.errors import BackendError, DeviceError, DTypeError, OutOfMemory
from ..core.formatting import human_bytes
from ..core.op import Op

_HELD = "are free, CuPy holds"


def memory_text(error: Any, free: int, total: int, held: int, used: int) -> str:
    """The message of an out-of-memory error: CuPy's text, and the sizes of memory and pool.

    >>> memory_text("Out of memory allocating 2,147,483,648 bytes", 2**28, 2**33, 2**32, 2**31)
    'Out of memory allocating 2,147,483,648 bytes; 256.0 MiB of 8.0 GiB are free, CuPy holds 4.0 GiB, of which 2.0 GiB are in use'
    """
    sizes = [human_bytes(n) for n in (free, total, held, used)]
    return f"{error}; {sizes[0]} of {sizes[1]} {_HELD} {sizes[2]}, of which {sizes[3]} are in use"


class NumPyBackend:
    """Buffers are ``numpy.ndarray``."""

    name = "numpy"
    xp: ModuleType = np

    def run(self, op: Op, bufs: Sequence[Any], params: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
        out = op.numpy(*bufs, **params)
        if op.nout > 1:
            return tuple(map(np.asarray, out))
        return (out if isinstance(out, Deferred) else np.asarray(out),)

    def device_of(self, buf: np.ndarray) -> Device:
        return CPU

    def filled(self, shape: tuple[int, ...], value: Any, dtype: np.dtype, where: Device) -> np.ndarray:
        return np.full(shape, value, dtype)

    def from_host(self, host: np.ndarray, where: Device) -> np.ndarray:
        return host

    def to_host(self, buf: np.ndarray) -> np.ndarray:
        return buf


class CuPyBackend:
    """Buffers are ``cupy.ndarray``; each op runs on the device of its first array and on that device's current stream."""

    name = "cupy"

    def __init__(self, cupy: ModuleType) -> None:
        self.xp = cupy

    def device_count(self) -> int:
        return int(self.xp.cuda.runtime.getDeviceCount())

    def run(self, op: Op, bufs: Sequence[Any], params: Mapping[str, Any]) -> tuple[Any, ...]:
        cp = self.xp
        with self.at(next((b for b in bufs if isinstance(b, cp.ndarray)), None)):
            out = op.bind(cp)(*bufs, **params)
            # (Outside of the block it would be copied to the current device.)
            return (cp.asarray(out),) if op.nout == 1 else tuple(map(cp.asarray, out))

    @contextmanager
    def at(self, buf: Any) -> Iterator[None]:
        """A block that computes on the device of a buffer (None: on the current one)."""
        with nullcontext() if buf is None else buf.device, self.memory():
            yield

    def device_of(self, buf: Any) -> Device:
        return device(f"cuda:{buf.device.id}")

    def from_host(self, host: np.ndarray, where: Device) -> Any:
        if where.index >= self.device_count():
            raise DeviceError(f"there is no {where}: this machine has {self.device_count()} CUDA device(s)")
        with self.xp.cuda.Device(where.index), self.memory():
            return self.xp.asarray(host)

    def filled(self, shape: tuple[int, ...], value: Any, dtype: np.dtype, where: Device) -> Any:
        """A buffer of one repeated value, made on the device."""
        if dtype.num >= FIRST_USER_DTYPE:  # CuPy does not fill the dtypes that others register
            return self.from_host(np.full(shape, value, dtype), where)
        with self.xp.cuda.Device(where.index), self.memory():
            return self.xp.full(shape, value, dtype)

    @contextmanager
    def memory(self) -> Iterator[None]:
        """Raise errors of used-up memory, by CuPy or by another allocator (RMM's), as `OutOfMemory` with the sizes of the current device,
        and those of dtypes that CuPy lacks as `DTypeError`."""
        try:
            yield
        except ValueError as e:
            if str(e).startswith("Unsupported dtype"):
                raise DTypeError(
                    f"{str(e)[18:]} lives on a CPU alone, as CuPy lacks it: cast the array first"
                ) from None
            raise
        except MemoryError as e:
            if isinstance(e, OutOfMemory) and _HELD in str(e):
                raise
            pool = self.xp.get_default_memory_pool()
            free, total = self.xp.cuda.runtime.memGetInfo()
            raise OutOfMemory(memory_text(e, free, total, pool.total_bytes(), pool.used_bytes())) from e

    def to_host(self, buf: Any) -> np.ndarray:
        return self.xp.asnumpy(buf)


NUMPY = NumPyBackend()


@functools.cache
def cupy_backend() -> CuPyBackend:
    """The CuPy backend. Raises :class:`BackendError` that names the missing part."""
    try:
        import cupy
    except ImportError as e:
        raise BackendError(
            "CUDA arrays need CuPy, which is not installed: pip install 'meshtape[cuda13]' (or cuda12)"
        ) from e
    if not cupy.is_available():
        raise BackendError("CuPy is installed, but no CUDA driver with a device answers on this machine")
    return CuPyBackend(cupy)


def backend_for(where: Device) -> NumPyBackend | CuPyBackend:
    """The backend that serves a device."""
    return NUMPY if where.kind == "cpu" else cupy_backend()


def backend_of(buf: Any) -> NumPyBackend | CuPyBackend:
    """The backend that a buffer belongs to (NumPy for None)."""
    return NUMPY if buf is None or isinstance(buf, np.ndarray) else cupy_backend()


def on_device_of(buf: Any) -> AbstractContextManager[None]:
    """A block that computes with a buffer beside any op: on its device, with errors of used-up memory as those of ops."""
    return nullcontext() if isinstance(buf, np.ndarray | Deferred) else cupy_backend().at(buf)


def devices() -> list[Device]:
    """All devices that can be used here, the CPU first.

    >>> mt.device("cpu") in mt.devices()
    True
    """
    try:
        return [CPU, *(device(f"cuda:{i}") for i in range(cupy_backend().device_count()))]
    except BackendError:
        return [CPU]


register_backends(backend_of)
