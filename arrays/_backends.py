"""NumPy and CuPy behind one small interface.

A backend runs ops on its buffers, makes buffers of its own from host memory, and gives host memory back. ``numpy`` is always
there; ``cupy`` is imported when the first CUDA device is used, never at import time.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ._op import Op
from .devices import CPU, Device, device
from .errors import BackendError, DeviceError


class NumPyBackend:
    """Buffers are ``numpy.ndarray``."""

    name = "numpy"
    xp: ModuleType = np

    def run(self, op: Op, bufs: Sequence[Any], params: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
        out = op.numpy(*bufs, **params)
        return (np.asarray(out),) if op.nout == 1 else tuple(map(np.asarray, out))

    def device_of(self, buf: np.ndarray) -> Device:
        return CPU

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
        where = next((b.device for b in bufs if isinstance(b, cp.ndarray)), None)
        if where is None:
            out = op.bind(cp)(*bufs, **params)
        else:
            with where:
                out = op.bind(cp)(*bufs, **params)
        return (cp.asarray(out),) if op.nout == 1 else tuple(map(cp.asarray, out))

    def device_of(self, buf: Any) -> Device:
        return device(f"cuda:{buf.device.id}")

    def from_host(self, host: np.ndarray, where: Device) -> Any:
        if where.index >= self.device_count():
            raise DeviceError(f"there is no {where}: this machine has {self.device_count()} CUDA device(s)")
        with self.xp.cuda.Device(where.index):
            return self.xp.asarray(host)

    def to_host(self, buf: Any) -> np.ndarray:
        return self.xp.asnumpy(buf)


NUMPY = NumPyBackend()


@functools.cache
def cupy_backend() -> CuPyBackend:
    """The CuPy backend. Raises :class:`BackendError` that says what is missing."""
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
