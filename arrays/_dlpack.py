"""DLPack with the dtypes that NumPy does not exchange: ``bfloat16`` and the two ``float8``.

A capsule tells dtype, shape and strides in a small C structure. NumPy makes and reads it for integers of the same width; here
the dtype in the structure is changed on the way. The structure belongs to whoever holds the capsule, and nobody else reads it.

Source: ``dlpack.h`` of https://github.com/dmlc/dlpack, version 1.1.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .dtypes import bfloat16, float8_e4m3fn, float8_e5m2

_UNSIGNED = 1
_CODES = {bfloat16: 4, float8_e4m3fn: 10, float8_e5m2: 12}
_DTYPES = {(code, dtype.itemsize * 8): dtype for dtype, code in _CODES.items()}


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_LAYOUTS = ((b"dltensor_versioned", _Versioned), (b"dltensor", _Managed))


def _dtype_of(capsule: Any) -> _DataType | None:
    """The dtype in a capsule, to be read or changed; None in one of a kind that is not known here."""
    api = ctypes.pythonapi
    api.PyCapsule_IsValid.argtypes = api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    for name, layout in _LAYOUTS:
        if api.PyCapsule_IsValid(capsule, name):
            return layout.from_address(api.PyCapsule_GetPointer(capsule, name)).tensor.dtype
    return None


def export(buf: Any, **options: Any) -> Any:
    """``buf.__dlpack__(**options)`` for a buffer of any of our dtypes, of NumPy or CuPy."""
    code = _CODES.get(buf.dtype)
    if code is None:
        return buf.__dlpack__(**options)
    capsule = buf.view(np.dtype(f"u{buf.dtype.itemsize}")).__dlpack__(**options)
    found = _dtype_of(capsule)
    if found is None:
        raise BufferError(f"{buf.dtype.name} cannot be exported: the backend makes capsules of an unknown kind")
    found.code = code
    return capsule


class _AsIntegers:
    """An exporter whose short floats look like integers of the same width; ``dtype`` is then what they are."""

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self.dtype: np.dtype | None = None

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self._exporter.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._exporter.__dlpack__(**options)
        found = _dtype_of(capsule)
        if found is not None and found.lanes == 1:
            self.dtype = _DTYPES.get((found.code, found.bits))
            if self.dtype is not None:
                found.code = _UNSIGNED
        return capsule


def read(xp: Any, exporter: Any) -> Any:
    """``xp.from_dlpack(exporter)``, also for short floats."""
    source = _AsIntegers(exporter)
    out = xp.from_dlpack(source)
    return out if source.dtype is None else out.view(source.dtype)
