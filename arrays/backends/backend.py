"""Backends: NumPy and CuPy behind one small interface.

A backend runs ops on its buffers, makes buffers of its own from host memory, and gives host memory back. ``numpy`` is
always there; ``cupy`` is imported when the first CUDA device is used, never at import time.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from ..core import devices as core_devices
from ..core.devices import CPU, Device, device
from ..core.dispatch import Deferred, register_backends, register_gpu
from ..core.dtypes import FIRST_USER_DTYPE, as_floats, numpy_form
from ..core.errors import BackendError, DeviceError, DTypeError, OutOfMemory
from ..core.formatting import human_bytes
from ..core.op import Op
from .float8 import FLOAT8, Float8
from .host_sync import remember_range

_HELD = "are free, CuPy holds"


def memory_text(error: Any, free: int, total: int, held: int, used: int) -> str:
    """The message of an out-of-memory error: CuPy's text, and the sizes of memory and pool.

    >>> memory_text("Out of memory allocating 2,147,483,648 bytes", 2**28, 2**33, 2**32, 2**31)
    'Out of memory allocating 2,147,483,648 bytes; 256.0 MiB of 8.0 GiB are free, CuPy holds 4.0 GiB, of which ...'
    """
    sizes = [human_bytes(n) for n in (free, total, held, used)]
    return f"{error}; {sizes[0]} of {sizes[1]} {_HELD} {sizes[2]}, of which {sizes[3]} are in use"


class NumPyBackend:
    """Buffers are ``numpy.ndarray``."""

    name = "numpy"
    xp: ModuleType = np

    def run(self, op: Op, bufs: Sequence[Any], params: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
        fn = numpy_form(op.numpy, bufs[0].dtype) if bufs and type(bufs[0]) is np.ndarray else op.numpy
        out = fn(*bufs, **params)
        if op.nout > 1:
            return tuple(map(np.asarray, out))
        return (out if isinstance(out, Deferred) else np.asarray(out),)

    def check(self, where: Device) -> None:
        """Raise :class:`DeviceError` where there is no such device."""

    def device_of(self, buf: np.ndarray) -> Device:
        return CPU

    def filled(self, shape: tuple[int, ...], value: Any, dtype: np.dtype, where: Device) -> np.ndarray:
        return np.full(shape, value, dtype)

    def from_host(self, host: np.ndarray, where: Device) -> np.ndarray:
        return host

    def to_host(self, buf: np.ndarray) -> np.ndarray:
        return buf


_COMPARISONS = frozenset({"equal", "not_equal", "less", "less_equal", "greater", "greater_equal"})


class CuPyBackend:
    """Buffers are ``cupy.ndarray``; each op runs on the device of its first array and on that device's current
    stream."""

    name = "cupy"

    def __init__(self, cupy: ModuleType) -> None:
        self.xp, self._array, self._current = cupy, cupy.ndarray, cupy.cuda.runtime.getDevice

    def device_count(self) -> int:
        return int(self.xp.cuda.runtime.getDeviceCount())

    @functools.cached_property
    def several(self) -> bool:
        """There is more than one device (their number is fixed once CUDA has begun)."""
        return self.device_count() > 1

    def run(self, op: Op, bufs: Sequence[Any], params: Mapping[str, Any]) -> tuple[Any, ...]:
        array = self._array
        if self.several:  # asking where a buffer lies takes a tenth of what the host has to do for a small call
            for buf in bufs:
                if isinstance(buf, array):
                    if (where := buf.device).id != self._current():
                        with where:
                            return self.run(op, bufs, params)
                    break
        try:
            fn = op.bind(self.xp)
            out = fn(*bufs, **params) if params else fn(*bufs)
        except (ValueError, MemoryError) as e:
            self.explain(e)
            raise
        except OverflowError:  # of a Python integer beyond 64 bits, which CuPy does not take
            whole = all(b.dtype.kind in "biu" for b in bufs if isinstance(b, array))
            floats = [as_floats(b) for b in bufs]
            far = [i for i, (f, b) in enumerate(zip(floats, bufs, strict=True)) if f is not b]
            if not far or (whole and op.name not in (*_COMPARISONS, "divide")):
                raise
            for i in far if whole and op.name in _COMPARISONS else ():  # all integers of arrays are less, or greater
                floats[i] *= np.inf
            return self.run(op, floats, params)
        if op.nout == 1:
            return (out if type(out) is array or isinstance(out, Deferred) else self.xp.asarray(out),)
        return tuple([o if type(o) is array else self.xp.asarray(o) for o in out])

    def at(self, buf: Any) -> AbstractContextManager[None]:
        """A block that computes on the device of a buffer (None: on the current one), with errors as in
        :meth:`memory`."""
        device = None if buf is None else buf.device
        return _Block(self, None if device is None or device.id == self._current() else device)

    def held(self, obj: Any) -> Any:
        """The memory of another library's array as CuPy's, on its own device: CuPy would copy it to the current one."""
        if isinstance(obj, self.xp.ndarray):
            return obj
        address = obj.__cuda_array_interface__["data"][0]
        there = self.xp.cuda.runtime.pointerGetAttributes(address).device if address else self._current()
        with self.xp.cuda.Device(there):
            return self.xp.asarray(obj)

    def device_of(self, buf: Any) -> Device:
        return _cuda_device(buf.device.id)

    def check(self, where: Device) -> None:
        if where.index >= self.device_count():
            raise DeviceError(f"there is no {where}: this machine has {self.device_count()} CUDA device(s)")

    def from_host(self, host: np.ndarray, where: Device) -> Any:
        self.check(where)
        with self.xp.cuda.Device(where.index), self.memory():
            if host.dtype in FLOAT8 and self.xp.__name__ == "cupy":
                return Float8(self, self.xp.asarray(host.view(np.uint8)), host.dtype)
            return remember_range(self.xp.asarray(host), host)

    def filled(self, shape: tuple[int, ...], value: Any, dtype: np.dtype, where: Device) -> Any:
        """A buffer of one repeated value, made on the device."""
        self.check(where)
        if np.ndim(value):
            return self.from_host(np.full(shape, value, dtype), where)
        fill, value = dtype, as_floats(value) if dtype.kind not in "biu" else value
        if dtype.num >= FIRST_USER_DTYPE:  # CuPy does not fill the dtypes that others register, but their bits
            value, fill = np.asarray(value, dtype), np.dtype(np.uint16)
            if dtype.itemsize != 2 or value.ndim:
                return self.from_host(np.full(shape, value, dtype), where)
            value = value.view(fill)[()]
        with self.xp.cuda.Device(where.index), self.memory():
            return self.xp.full(shape, value, fill).view(dtype)

    def counted(self, numbers: range, dtype: np.dtype, where: Device) -> Any:
        """A buffer of whole numbers in steps, made on the device."""
        with self.xp.cuda.Device(where.index), self.memory():
            buf = self.xp.arange(numbers.start, numbers.stop, numbers.step, dtype)
        return remember_range(buf, np.array([numbers[0], numbers[-1]], dtype)) if numbers else buf

    def memory(self) -> AbstractContextManager[None]:
        """Raise errors of used-up memory, by CuPy or by another allocator (RMM's), as `OutOfMemory` with the sizes of
        the current device, and those of dtypes that CuPy lacks as `DTypeError`."""
        return _Block(self, None)

    def explain(self, error: BaseException | None) -> None:
        if isinstance(error, ValueError) and str(error).startswith("Unsupported dtype"):
            raise DTypeError(
                f"{str(error)[18:]} lives on a CPU alone, as CuPy lacks it: cast the array first"
            ) from None
        if isinstance(error, MemoryError) and not (isinstance(error, OutOfMemory) and _HELD in str(error)):
            pool = self.xp.get_default_memory_pool()
            free, total = self.xp.cuda.runtime.memGetInfo()
            raise OutOfMemory(memory_text(error, free, total, pool.total_bytes(), pool.used_bytes())) from error

    def to_host(self, buf: Any) -> np.ndarray:
        return self.xp.asnumpy(buf)


class _Block:
    """A block with another current device, unless that is None. (A generator would cost as much as the start of a
    kernel.)"""

    __slots__ = ("_backend", "_device")

    def __init__(self, backend: CuPyBackend, device: Any) -> None:
        self._backend, self._device = backend, device

    def __enter__(self) -> None:
        if self._device is not None:
            self._device.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            if error is not None:
                self._backend.explain(error)
        finally:
            if self._device is not None:
                self._device.__exit__(kind, error, traceback)


@functools.cache
def _cuda_device(index: int) -> Device:
    return device(f"cuda:{index}")


NUMPY = NumPyBackend()


@functools.cache
def cupy_backend() -> CuPyBackend:
    """The CuPy backend. Raises :class:`BackendError` that names the missing part."""
    try:
        import cupy
        import cupyx  # noqa: F401  which some calls of CuPy import: here, so that no compiled function sees new classes
    except ImportError as e:
        raise BackendError(
            "CUDA arrays need CuPy, which is not installed: pip install 'meshtape[cuda13]' (or cuda12)"
        ) from e
    if not cupy.is_available():
        raise BackendError("CuPy is installed, but no CUDA driver with a device answers on this machine")
    backend = CuPyBackend(cupy)
    register_gpu(backend, cupy.ndarray)
    return backend


def backend_for(where: Device) -> NumPyBackend | CuPyBackend:
    """The backend that serves a device."""
    return NUMPY if where.kind == "cpu" else cupy_backend()


def backend_of(buf: Any) -> NumPyBackend | CuPyBackend:
    """The backend that a buffer belongs to (NumPy for None)."""
    return NUMPY if buf is None or isinstance(buf, np.ndarray) else cupy_backend()


def on_device_of(buf: Any) -> AbstractContextManager[None]:
    """A block that computes with a buffer beside any op: on its device, with errors of used-up memory as those of
    ops."""
    buf = buf.memory if isinstance(buf, Deferred) else buf
    return nullcontext() if buf is None or isinstance(buf, np.ndarray) else cupy_backend().at(buf)


def use_device(name: str | Device) -> AbstractContextManager[Device]:
    """Creation functions called inside put their arrays on this device.

    Functions of Arrays have no need of it: what else is among their arguments (numbers, lists, arrays of NumPy) goes
    where the first Array is. Arrays themselves move with ``x.to_device(...)`` alone.

    Raises :class:`BackendError` or :class:`DeviceError` at once where there is none on this machine.

    >>> with mt.use_device("cpu") as d:
    ...     print(d)
    cpu
    """
    chosen = device(name)
    backend_for(chosen).check(chosen)
    return core_devices.use_device(chosen)


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
