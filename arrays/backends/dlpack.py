"""DLPack with the dtypes that NumPy does not exchange, ``bfloat16`` and the two ``float8``, and memory marked
read-only.

A capsule tells dtype, shape and strides in a small C structure. NumPy makes and reads it for integers of the same
width; here the dtype in the structure is changed on the way. The structure belongs to whoever holds the capsule, and
nobody else reads it.

Source: ``dlpack.h`` of https://github.com/dmlc/dlpack, version 1.1.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ..core.dtypes import FIRST_USER_DTYPE, bfloat16, float8_e4m3fn, float8_e5m2

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
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY


def contents(capsule: Any) -> Any:
    """The structure in a capsule, to be read or changed; None in one of a kind that is not known here."""
    api = ctypes.pythonapi
    api.PyCapsule_IsValid.argtypes = api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    for name, layout in _LAYOUTS:
        if api.PyCapsule_IsValid(capsule, name):
            return layout.from_address(api.PyCapsule_GetPointer(capsule, name))
    return None


def export(buf: Any, *, read_only: bool, **options: Any) -> Any:
    """``buf.__dlpack__(**options)`` for a buffer of any of our dtypes, of NumPy or CuPy, which itself never says
    ``read_only``.

    A consumer that cannot be told so, because it asked for a capsule without versions, is refused.
    """
    code = _CODES.get(buf.dtype)
    capsule = (buf if code is None else buf.view(np.dtype(f"u{buf.dtype.itemsize}"))).__dlpack__(**options)
    if code is None and not read_only:
        return capsule
    found = contents(capsule)
    if found is None:
        raise BufferError(f"{buf.dtype.name} cannot be exported: the backend makes capsules of an unknown kind")
    if code is not None:
        found.tensor.dtype.code = code
    if read_only:
        if not isinstance(found, _Versioned):
            raise BufferError("the backend makes capsules that cannot be marked read-only: pass copy=True")
        found.flags |= _READ_ONLY
    return capsule


def read_only(a: np.ndarray) -> np.ndarray:
    """The same memory as an array that cannot be made writeable: its ``base`` is an opaque capsule."""
    view = a.view()
    view.flags.writeable = False
    known = a.dtype.num < FIRST_USER_DTYPE
    try:
        out = np.from_dlpack(view if known else view.view(f"u{a.dtype.itemsize}"))
    except (BufferError, ValueError):  # strides that are no multiple of an element, which a capsule cannot tell
        out = a.copy()
        out.flags.writeable = False
        return out
    return out if known else out.view(a.dtype)


class _AsIntegers:
    """An exporter whose short floats look like integers of the same width; ``dtype`` is then their true dtype."""

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self.dtype: np.dtype | None = None

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self._exporter.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._exporter.__dlpack__(**options)
        found = contents(capsule)
        if found is not None and found.tensor.dtype.lanes == 1:
            told = found.tensor.dtype
            self.dtype = _DTYPES.get((told.code, told.bits))
            if self.dtype is not None:
                told.code = _UNSIGNED
        return capsule


def resolved(exporter: Any) -> Any:
    """A tensor of PyTorch with its sign (``z.conj().imag`` holds it as a bit, which DLPack leaves out), and the value
    of a parameter, which no calculation led to and so loses no gradient; anything else as it is."""
    if getattr(exporter, "requires_grad", False) and getattr(exporter, "is_leaf", False):
        exporter = exporter.detach()
    return exporter.resolve_neg() if getattr(exporter, "is_neg", bool)() else exporter


def read(xp: Any, exporter: Any) -> Any:
    """``xp.from_dlpack(exporter)``, also for short floats."""
    source = _AsIntegers(resolved(exporter))
    out = xp.from_dlpack(source)
    return out if source.dtype is None else out.view(source.dtype)
