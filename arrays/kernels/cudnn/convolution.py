"""Convolutions on a GPU by cuDNN 9, where its wheel (``nvidia-cudnn-cu12`` or ``-cu13``) or the system has it.

It is called through ctypes, from where CuPy loads its libraries. The functions are those of ``cudnn_cnn_v9.h``. NVIDIA
calls them deprecated and keeps them in cuDNN 9; the graphs that it advises take several times as many calls for the
same kernels, and an engine there has a number in place of an algorithm's name.

Of the algorithms those alone are used that add up the products of a result's own elements (``IMPLICIT_GEMM``,
``IMPLICIT_PRECOMP_GEMM``, ``ALGO_0``, ``ALGO_1``, ``ALGO_3``). Fourier and Winograd transforms mix elements of a tile:
a NaN or infinity there would spread to results that do not read it, and small numbers beside large ones lose digits.

:func:`convolution` returns None where the library is absent or does not serve a call; the caller then goes another way.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import threading
from typing import Any, NamedTuple

import numpy as np

from ...backends import determinism
from ...backends.cublaslt import Unserved, is_tf32
from ...core.dtypes import bfloat16
from ...core.errors import BackendError

VERSIONS = range(90_000, 100_000)

DATA_TYPES = {
    np.dtype(np.float32): 0,  # CUDNN_DATA_FLOAT
    np.dtype(np.float64): 1,  # CUDNN_DATA_DOUBLE
    np.dtype(np.float16): 2,  # CUDNN_DATA_HALF
    np.dtype(bfloat16): 9,  # CUDNN_DATA_BFLOAT16
}
NCHW, NHWC = 0, 1  # CUDNN_TENSOR_…
CROSS_CORRELATION, DETERMINISTIC = 1, 1  # CUDNN_…
DEFAULT_MATH, TENSOR_OP_MATH, ALLOW_CONVERSION, FMA_MATH = 0, 1, 2, 3  # CUDNN_…; the third makes float16 of float32

WORKSPACE = 1 << 30
"""Bytes that an algorithm may take beside: a copy of the operands in the order of its kernels, say."""
ALIGNED = 16
"""Bytes that the matrix units read at a time: each address is to be a multiple of them."""
LARGEST = (1 << 31) - 1
"""Elements of an array, and numbers of a description."""


class Kind(NamedTuple):
    """One of the three functions."""

    order: str  # of its operands and result: the image is x, the kernel w, the result of the convolution y
    algorithms: frozenset[int]
    unordered: frozenset[int] = frozenset()
    """Those with atomic additions, which round short floats at each."""


KINDS = {
    "Forward": Kind("xwy", frozenset({0, 1})),  # IMPLICIT_GEMM, IMPLICIT_PRECOMP_GEMM
    "BackwardData": Kind("wyx", frozenset({1}), frozenset({0})),  # ALGO_1, ALGO_0
    "BackwardFilter": Kind("xyw", frozenset({1}), frozenset({0, 3})),  # ALGO_1, ALGO_0, ALGO_3
}
MOST_ALGORITHMS = 8  # of a kind


class Performance(ctypes.Structure):
    """``cudnnConvolutionFwdAlgoPerf_t``, and those of the two others."""

    _fields_ = (
        ("algorithm", ctypes.c_int),
        ("status", ctypes.c_int),
        ("time", ctypes.c_float),
        ("memory", ctypes.c_size_t),
        ("determinism", ctypes.c_int),
        ("math", ctypes.c_int),
        ("reserved", ctypes.c_int * 3),
    )


_P, _I, _N = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "GetVersion": (),
    "GetErrorString": (_I,),
    "Create": (_P,),
    "SetStream": (_P, _P),
    "SetTensorNdDescriptor": (_P, _I, _I, _P, _P),
    "SetFilterNdDescriptor": (_P, _I, _I, _I, _P),
    "SetConvolutionNdDescriptor": (_P, _I, _P, _P, _P, _I, _I),
    "SetConvolutionGroupCount": (_P, _I),
    "SetConvolutionMathType": (_P, _I),
    **{f"Create{kind}Descriptor": (_P,) for kind in ("Tensor", "Filter", "Convolution")},
    **{f"Destroy{kind}Descriptor": (_P,) for kind in ("Tensor", "Filter", "Convolution")},
    **{f"GetConvolution{kind}Algorithm_v7": (_P, _P, _P, _P, _P, _I, _P, _P) for kind in KINDS},
    **{f"Convolution{kind}": (_P, _P, _P, _P, _P, _P, _P, _I, _P, _N, _P, _P, _P) for kind in KINDS},
}
"""Parameters of each function, whose name begins with ``cudnn``."""
_RESULTS = {"GetVersion": _N, "GetErrorString": ctypes.c_char_p}


@functools.cache
def library() -> Any:
    """The functions of cuDNN by name; None where it is absent, or not of :data:`VERSIONS`."""
    path = "libcudnn.so.9"
    with contextlib.suppress(ImportError, RuntimeError, ValueError):
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("cudnn").abs_path or path
    try:
        loaded = ctypes.CDLL(path)
        functions = {name: getattr(loaded, f"cudnn{name}") for name in FUNCTIONS}
    except (OSError, AttributeError):
        return None
    for name, fn in functions.items():
        fn.argtypes, fn.restype = FUNCTIONS[name], _RESULTS.get(name, _I)
    return functions if functions["GetVersion"]() in VERSIONS else None


def call(name: str, *arguments: Any) -> None:
    status = library()[name](*arguments)
    if status // 1000 in (2, 3):  # CUDNN_STATUS_BAD_PARAM…, CUDNN_STATUS_NOT_SUPPORTED…
        raise Unserved
    if status:
        said = library()["GetErrorString"](status).decode()
        raise BackendError(f"[conv] cudnn{name} failed with status {status} ({said})")


class Descriptor:
    """Of an array, a kernel, or the numbers of a convolution."""

    def __init__(self, kind: str, *arguments: Any) -> None:
        self.handle, self._destroy = _P(), library()[f"Destroy{kind}Descriptor"]  # which a process that ends may lose
        call(f"Create{kind}Descriptor", ctypes.byref(self.handle))
        call(f"Set{kind}NdDescriptor", self.handle, *arguments)

    def __del__(self) -> None:
        if self.handle:
            self._destroy(self.handle)


@functools.cache
def _handle(device: int) -> tuple[Any, threading.Lock] | None:
    """For the current device, whose number is ``device``, with the lock of whoever uses it: it has one stream at a
    time. None where the library does not work on the device."""
    handle = _P()
    return None if library()["Create"](ctypes.byref(handle)) else (handle, threading.Lock())


def _ints(*values: int) -> Any:
    return (_I * len(values))(*values)


def _strides(shape: tuple[int, ...], last: bool) -> list[int]:
    """Elements from one to the next along each dimension, of memory without gaps, with the channels first or last."""
    order = [0, *range(2, len(shape)), 1] if last else range(len(shape))
    out, step = [0] * len(shape), 1
    for axis in reversed(order):
        out[axis], step = step, step * shape[axis]
    return out


class Convolution(NamedTuple):
    """A call of the library: all that its algorithm depends on."""

    kind: str
    dtype: np.dtype
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # of both operands and the result
    last: bool  # whether all three have the channels last in memory
    numbers: tuple[tuple[int, ...], ...]  # padding, stride and dilation
    groups: int
    tf32: bool
    in_order: bool


class Plan:
    """A convolution with its algorithm, which is asked for once."""

    def __init__(self, device: int, c: Convolution) -> None:
        kind, data, wide = KINDS[c.kind], DATA_TYPES[c.dtype], c.dtype.itemsize == 8
        self._device, self._kind = device, c.kind
        self._numbers = np.asarray([1, 0], np.float64 if wide else np.float32)  # alpha and beta, by their addresses
        one = self._numbers.ctypes.data
        self._factors = _P(one), _P(one + self._numbers.itemsize)
        self._sides = []
        for name, shape in zip(kind.order, c.shapes, strict=True):
            sizes = (*shape[:2], 1, *shape[2:]) if len(shape) == 3 else shape  # a line is an image of height one
            if name == "w":
                about = "Filter", data, NHWC if c.last else NCHW, len(sizes), _ints(*sizes)
            else:
                about = "Tensor", data, len(sizes), _ints(*sizes), _ints(*_strides(sizes, c.last))
            self._sides.append(Descriptor(*about))
        pad, stride, dilation = (
            _ints(*(first,) * (len(values) == 1), *values) for values, first in zip(c.numbers, (0, 1, 1), strict=True)
        )
        float_ = DATA_TYPES[np.dtype(np.float64 if wide else np.float32)]
        self._about = Descriptor("Convolution", len(pad), pad, stride, dilation, CROSS_CORRELATION, float_)
        call("SetConvolutionGroupCount", self._about.handle, c.groups)
        exact = c.dtype.itemsize == 4 and not c.tf32
        math_type = FMA_MATH if exact else TENSOR_OP_MATH if c.dtype.itemsize == 2 else DEFAULT_MATH
        call("SetConvolutionMathType", self._about.handle, math_type)
        allowed = kind.algorithms | (frozenset() if c.in_order or c.dtype.itemsize == 2 else kind.unordered)
        for p in self._found():  # the fastest comes first
            fixed = p.determinism == DETERMINISTIC or not c.in_order
            precise = p.math in (DEFAULT_MATH, FMA_MATH) if exact else p.math != ALLOW_CONVERSION
            if not p.status and p.algorithm in allowed and p.memory <= WORKSPACE and fixed and precise:
                break
        else:
            raise Unserved
        self.algorithm, self._workspace = p.algorithm, p.memory
        if not exact:
            call("SetConvolutionMathType", self._about.handle, p.math)

    def _found(self) -> list[Performance]:
        found, n = (Performance * MOST_ALGORITHMS)(), _I()
        first, second, out = (side.handle for side in self._sides)
        sides = first, second, self._about.handle, out
        handle, lock = _handle(self._device)
        with lock:
            name = f"GetConvolution{self._kind}Algorithm_v7"
            call(name, handle, *sides, MOST_ALGORITHMS, ctypes.byref(n), ctypes.byref(found))
        return found[: n.value]

    def run(self, cupy: Any, x: Any, y: Any, out: Any) -> None:
        """Launch it on the current stream. Its workspace comes from the present pool, and returns to it in the order of
        the stream."""
        (first, second, result), (one, zero), size = self._sides, self._factors, self._workspace
        workspace = cupy.cuda.alloc(size) if size else None
        operands = one, first.handle, x.data.ptr, second.handle, y.data.ptr, self._about.handle, self.algorithm
        handle, lock = _handle(self._device)
        with lock:
            call("SetStream", handle, cupy.cuda.get_current_stream().ptr)
            name, at = f"Convolution{self._kind}", workspace and workspace.ptr
            call(name, handle, *operands, at, size, zero, result.handle, out.data.ptr)


@functools.lru_cache(maxsize=4096)
def _plan(device: int, convolution: Convolution) -> Plan | None:
    if _handle(device) is None:
        return None
    try:
        return Plan(device, convolution)
    except Unserved:
        return None


def _has_channels_last(x: Any) -> bool:
    flags = x.transpose(0, *range(2, x.ndim), 1).flags
    return flags.c_contiguous and not x.flags.c_contiguous


def _laid(cupy: Any, x: Any, dtype: np.dtype, last: bool) -> Any:
    """In memory as the library is told."""
    x = x.astype(dtype, copy=False)
    moved = x.transpose(0, *range(2, x.ndim), 1) if last else x
    if moved.flags.c_contiguous and x.data.ptr % ALIGNED == 0:
        return x
    return cupy.array(moved, order="C") if not last else cupy.moveaxis(cupy.array(moved, order="C"), -1, 1)


Ints = tuple[int, ...]


def convolution(
    xp: Any, kind: str, x: Any, y: Any, shape: Ints, padding: Ints, stride: Ints, dilation: Ints, groups: int
) -> Any:
    """The result, of ``shape``, of a function of :data:`KINDS` on two of CuPy's arrays, in the order that it names;
    None where cuDNN does not serve it.

    Where the channels of an operand are last in memory, those of the result are, too, but for groups on matrix units.
    """
    if xp is np or library() is None:
        return None
    dtype, shapes = xp.result_type(x, y), (x.shape, y.shape, shape)
    if dtype not in DATA_TYPES or not 3 <= len(shape) <= 5 or any(not 0 < math.prod(s) <= LARGEST for s in shapes):
        return None
    if max(*padding, *stride, *dilation, groups) > LARGEST:
        return None
    modes = is_tf32(), determinism.is_deterministic()
    last = _has_channels_last(x) or _has_channels_last(y)
    if groups > 1 and (dtype.itemsize == 2 or (dtype.itemsize == 4 and modes[0])):
        # On matrix units, where the channels are last, a NaN reaches results that do not read it: as it would in tiles
        # of several groups, with zeros where the kernels of others would be.
        last = False
    device = xp.cuda.runtime.getDevice()
    plan = _plan(device, Convolution(kind, dtype, shapes, last, (padding, stride, dilation), groups, *modes))
    if plan is None:
        return None
    memory = xp.cuda.alloc(math.prod(shape) * dtype.itemsize)
    if memory.ptr % ALIGNED:  # of some other allocator
        return None
    out = xp.ndarray(shape, dtype, memory, [n * dtype.itemsize for n in _strides(shape, last)])
    try:
        plan.run(xp, _laid(xp, x, dtype, last), _laid(xp, y, dtype, last), out)
    except Unserved:
        return None
    return out
