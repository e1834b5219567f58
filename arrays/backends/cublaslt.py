"""Matrix products on a GPU by cuBLASLt, which CuPy's own cuBLAS brings along.

CuPy has products of short floats for two matrices alone, and refuses to capture any product in a CUDA graph. cuBLASLt
multiplies stacks in every dtype, adds a bias or sums the rows of an operand in the same launch, takes float8, waits for
nothing and can be captured. It is called through ctypes, from where CuPy loads its libraries. nvmath-python binds the
same functions, but brings two packages for the dozen used here, and users without it would have no such products.

:func:`product` returns None where the library is absent or does not serve a call; the caller then goes another way.
Numbers of enumerations are those of NVIDIA's ``cublasLt.h``, ``cublas_api.h`` and ``library_types.h``.

The epilogues ``RELU`` and ``GELU`` are left alone. NVIDIA does not say that ReLU keeps a NaN, nor how exact the tanh of
GELU is (which ``gelu`` is not, by default). A compiled program has both in the kernel of the chain that they are in.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import bfloat16, float8_e4m3fn, float8_e5m2
from ..core.errors import BackendError
from . import determinism

VERSIONS = range(120_000, 140_000)
"""Of cuBLASLt 12 and 13, which share these numbers."""

CUDA_TYPES = {
    np.dtype(np.float32): 0,  # CUDA_R_32F
    np.dtype(np.float64): 1,  # CUDA_R_64F
    np.dtype(np.float16): 2,  # CUDA_R_16F
    np.dtype(np.complex64): 4,  # CUDA_C_32F
    np.dtype(np.complex128): 5,  # CUDA_C_64F
    np.dtype(bfloat16): 14,  # CUDA_R_16BF
    np.dtype(float8_e4m3fn): 28,  # CUDA_R_8F_E4M3
    np.dtype(float8_e5m2): 29,  # CUDA_R_8F_E5M2
}
COMPUTE_32F, COMPUTE_64F, COMPUTE_32F_FAST_TF32 = 68, 70, 77  # CUBLAS_COMPUTE_…
OP_T = 1  # CUBLAS_OP_T; CUBLAS_OP_N is 0
EPILOGUE_BIAS, EPILOGUE_BGRADA = 4, 256  # CUBLASLT_EPILOGUE_…; CUBLASLT_EPILOGUE_DEFAULT is 1
REDUCTION_INPLACE, REDUCTION_COMPUTE_TYPE = 1, 2  # CUBLASLT_REDUCTION_SCHEME_…
NOT_SERVED = (7, 8, 15)  # CUBLAS_STATUS_INVALID_VALUE, ARCH_MISMATCH, NOT_SUPPORTED

DESCRIPTION = {  # CUBLASLT_MATMUL_DESC_…
    "TRANSA": (3, ctypes.c_int32),
    "TRANSB": (4, ctypes.c_int32),
    "EPILOGUE": (7, ctypes.c_uint32),
    "BIAS_POINTER": (8, ctypes.c_void_p),
    "A_SCALE_POINTER": (17, ctypes.c_void_p),
    "B_SCALE_POINTER": (18, ctypes.c_void_p),
}
LAYOUT = {  # CUBLASLT_MATRIX_LAYOUT_…
    "BATCH_COUNT": (5, ctypes.c_int32),
    "STRIDED_BATCH_OFFSET": (6, ctypes.c_int64),
}
PREFERENCE = {  # CUBLASLT_MATMUL_PREF_…
    "MAX_WORKSPACE_BYTES": (1, ctypes.c_uint64),
    "REDUCTION_SCHEME_MASK": (3, ctypes.c_uint32),
    "MIN_ALIGNMENT_A_BYTES": (5, ctypes.c_uint32),
    "MIN_ALIGNMENT_B_BYTES": (6, ctypes.c_uint32),
}

WORKSPACE = 32 << 20
"""Bytes that an algorithm may take beside: those that NVIDIA advises for its newest devices."""
ALIGNED = 256
"""Bytes that the library takes each address to be a multiple of, unless it is told."""
MOST_IN_STACK = 65_535  # blocks of a grid's third dimension
LARGEST = (1 << 31) - 1  # of a length that algorithms take


class HeuristicResult(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),  # cublasLtMatmulAlgo_t
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


_P, _I, _N = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "GetVersion": (),
    "Create": (_P,),
    "MatmulDescCreate": (_P, _I, _I),
    "MatrixLayoutCreate": (_P, _I, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "MatmulPreferenceCreate": (_P,),
    **{f"{kind}SetAttribute": (_P, _I, _P, _N) for kind in ("MatmulDesc", "MatrixLayout", "MatmulPreference")},
    **{f"{kind}Destroy": (_P,) for kind in ("MatmulDesc", "MatrixLayout", "MatmulPreference")},
    "MatmulAlgoGetHeuristic": (_P, _P, _P, _P, _P, _P, _P, _I, _P, _P),
    "Matmul": (_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _N, _P),
}
"""Parameters of each function, whose name begins with ``cublasLt``."""


@functools.cache
def library() -> Any:
    """The functions of cuBLASLt by name; None where it is absent, or not of :data:`VERSIONS`."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        loaded = ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
        functions = {name: getattr(loaded, f"cublasLt{name}") for name in FUNCTIONS}
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None
    for name, fn in functions.items():
        fn.argtypes, fn.restype = FUNCTIONS[name], _N if name == "GetVersion" else _I
    return functions if functions["GetVersion"]() in VERSIONS else None


class Unserved(Exception):
    """The library refuses a product."""


def call(name: str, *arguments: Any) -> None:
    status = library()[name](*arguments)
    if status in NOT_SERVED:
        raise Unserved
    if status:
        raise BackendError(f"[matmul] cublasLt{name} failed with status {status}")


class Object:
    """A description, a layout or a preference of the library, with its attributes."""

    def __init__(self, kind: str, attributes: dict[str, tuple[int, Any]], *arguments: int) -> None:
        self._kind, self._attributes, self.handle = kind, attributes, _P()
        self._destroy = library()[f"{kind}Destroy"]  # which a process that ends may have lost
        call(f"{kind}Create", ctypes.byref(self.handle), *arguments)

    def set(self, **values: int) -> None:
        for name, value in values.items():
            number, kind = self._attributes[name]
            call(f"{self._kind}SetAttribute", self.handle, number, ctypes.byref(kind(value)), ctypes.sizeof(kind))

    def __del__(self) -> None:
        if self.handle:
            self._destroy(self.handle)


class Side(NamedTuple):
    """An operand in memory, seen as columns (which rows are, transposed)."""

    across: bool  # whether it is then to be transposed
    leading: int  # elements from one column to the next
    step: int  # elements from one matrix of a stack to the next


Memory = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape and strides of an array."""
Modes = tuple[bool, bool]
"""Whether TF32 is allowed, and whether sums are to be in a fixed order."""
Dtypes = tuple[np.dtype, np.dtype, np.dtype]
"""Of the operands and the result."""

_tf32 = False


def is_tf32() -> bool:
    """Whether products and convolutions of float32 on a GPU may round their factors to TF32 (by default they do not).

    >>> mt.is_tf32()
    False
    """
    return _tf32


@contextmanager
def use_tf32(mode: bool = True) -> Iterator[None]:
    """Let products and convolutions of float32 on a GPU round their factors to TF32 (10 bits of 23) in the context.

    The matrix units of a GPU then take them. Sums stay float32. It holds for all threads of the process; a CUDA graph
    keeps the mode of its first run.

    >>> with mt.use_tf32():
    ...     mt.is_tf32()
    True
    """
    global _tf32
    before, _tf32 = _tf32, bool(mode)
    try:
        yield
    finally:
        _tf32 = before


@functools.cache
def _handle(device: int) -> Any:
    """For the current device, whose number is ``device``; None where the library does not work on it."""
    handle = _P()
    return None if library()["Create"](ctypes.byref(handle)) else handle


def _side(rows: int, columns: int, row: int, column: int) -> tuple[bool, int] | None:
    """Whether elements of a column lie together, not those of a row, and the elements between the lines; None where
    neither do."""
    if (column == 1 or columns == 1) and (rows == 1 or row >= columns):
        return False, max(row if rows > 1 else 0, columns)
    if (row == 1 or rows == 1) and (columns == 1 or column >= rows):
        return True, max(column if columns > 1 else 0, rows)
    return None


class Stack(NamedTuple):
    """A stack of ``count`` products of (m, k) and (k, n)."""

    count: int
    m: int
    n: int
    k: int
    x: Side
    y: Side


def arranged(x: Memory, y: Memory, itemsize: int) -> Stack | bool:
    """The product of two arrays of at least two dimensions, by their shapes and strides, as one stack. Else whether
    copies without gaps are one: whether no operand repeats along some dimensions alone, but for ``y`` along the last.
    """
    ndim, (m, k), n = max(len(x[0]), len(y[0])), x[0][-2:], y[0][-1]
    # Elements from one to the next along each dimension, 0 where it repeats.
    (*xs, x_row, x_column), (*ys, y_row, y_column) = (
        [0] * (ndim - len(shape)) + [s // itemsize if n > 1 else 0 for n, s in zip(shape, strides, strict=True)]
        for shape, strides in (x, y)
    )
    stack: list[tuple[int, int, int]] = []
    for length, a, b in zip(np.broadcast_shapes(x[0][:-2], y[0][:-2]), xs, ys, strict=True):
        if length > 1 and stack and stack[-1][1:] == (length * a, length * b):
            length *= stack.pop()[0]
        if length > 1:
            stack.append((length, a, b))
    repeats = [pair for pair, _ in itertools.groupby((a == 0, b == 0) for _, a, b in stack)]
    if stack and stack[-1][2] == 0 and stack[-1][1] and (m == 1 or stack[-1][1] == m * x_row):
        length, step, _ = stack.pop()  # all rows times one matrix
        m, x_row = m * length, step if m == 1 else x_row
    left, right = _side(m, k, x_row, x_column), _side(k, n, y_row, y_column)
    count, a, b = stack[0] if stack else (1, 0, 0)
    apart = any(s % itemsize for _, strides in (x, y) for s in strides)
    if len(stack) > 1 or left is None or right is None or min(a, b) < 0 or apart:
        return len(repeats) <= 1 + (repeats[-1:] == [(False, True)])
    if count > MOST_IN_STACK or max(m, n, k, left[1], right[1]) > LARGEST:
        return False
    return Stack(count, m, n, k, Side(*left, a), Side(*right, b))


class Float8(NamedTuple):
    """A product of bytes that are float8 numbers: the dtypes of operands and result, and float32 factors of the
    operands, on the device."""

    dtypes: Dtypes
    scales: tuple[Any, Any] | None = None

    def addresses(self) -> dict[str, int]:
        # 0 where there is no factor: a plan may have been run with one before.
        x, y = (0, 0) if self.scales is None else (s.data.ptr for s in self.scales)
        return {"A_SCALE_POINTER": y, "B_SCALE_POINTER": x}


class Plan:
    """A product of arrays that lie in memory in one way, with its algorithm, which is asked for once. Rows are columns
    to the library, so that it multiplies the second operand by the first.

    ``alignment`` is that of the operands, and of the vector that is a bias or takes the ``sums``.
    """

    def __init__(
        self, device: int, stack: Stack, dtypes: Dtypes, alignment: tuple[int, int, int], sums: bool, modes: Modes
    ) -> None:
        (count, m, n, k, x, y), (at_x, at_y, at_vector), (tf32, in_order) = stack, alignment, modes
        of_x, of_y, self.dtype = dtypes
        scale = np.dtype(np.float32) if of_x.itemsize < 4 else of_x
        compute = COMPUTE_32F_FAST_TF32 if tf32 and of_x.char in "fF" else COMPUTE_32F
        compute = COMPUTE_64F if of_x.char in "dD" else compute
        self._description, self._lock = Object("MatmulDesc", DESCRIPTION, compute, CUDA_TYPES[scale]), threading.Lock()
        self._description.set(TRANSA=OP_T * y.across, TRANSB=OP_T * x.across)
        if at_vector:
            self._description.set(EPILOGUE=EPILOGUE_BGRADA if sums else EPILOGUE_BIAS, BIAS_POINTER=at_vector)
        preference = Object("MatmulPreference", PREFERENCE)
        preference.set(MAX_WORKSPACE_BYTES=WORKSPACE, MIN_ALIGNMENT_A_BYTES=at_y, MIN_ALIGNMENT_B_BYTES=at_x)
        preference.set(REDUCTION_SCHEME_MASK=REDUCTION_COMPUTE_TYPE | (0 if in_order else REDUCTION_INPLACE))
        self._layouts = []
        out = Side(False, n, m * n)
        for kind, rows, columns, side in ((of_y, n, k, y), (of_x, k, m, x), (self.dtype, n, m, out)):
            lines = (columns, rows) if side.across else (rows, columns)
            self._layouts.append(Object("MatrixLayout", LAYOUT, CUDA_TYPES[kind], *lines, side.leading))
            if count > 1:
                self._layouts[-1].set(BATCH_COUNT=count, STRIDED_BATCH_OFFSET=side.step)
        a, b, d = (o.handle for o in self._layouts)
        self._found, found = HeuristicResult(), _I()
        shape = (_handle(device), self._description.handle, a, b, d, d)
        call("MatmulAlgoGetHeuristic", *shape, preference.handle, 1, ctypes.byref(self._found), ctypes.byref(found))
        if not found.value or self._found.state:
            raise Unserved
        self._numbers = np.asarray([1, 0], scale)  # alpha and beta, of which the library reads the addresses
        one = self._numbers.ctypes.data
        self._fixed = *shape[:2], _P(one), a, b, _P(one + scale.itemsize), d, ctypes.byref(self._found.algorithm)

    def run(self, cupy: Any, x: Any, y: Any, out: Any, vector: Any, float8: Float8 | None, add: bool) -> None:
        """Launch it on the current stream. Its workspace comes from the present pool, and returns to it in the order of
        the stream."""
        handle, description, one, a, b, zero, d, algorithm = self._fixed
        size, at = self._found.workspace, out.data.ptr
        workspace = cupy.cuda.alloc(size) if size else None
        operands = one, y.data.ptr, a, x.data.ptr, b, one if add else zero, at, d, at, d, algorithm
        with self._lock:  # the description names the vector and the scales
            if vector is not None:
                self._description.set(BIAS_POINTER=vector.data.ptr)
            if float8 is not None:
                self._description.set(**float8.addresses())
            stream = cupy.cuda.get_current_stream().ptr
            call("Matmul", handle, description, *operands, workspace and workspace.ptr, size, stream)


@functools.lru_cache(maxsize=4096)
def _plan(
    device: int, dtypes: Dtypes, x: Memory, y: Memory, alignment: tuple[int, int, int], sums: bool, modes: Modes
) -> tuple[Plan | bool, tuple[int, ...]]:
    """The plan and the shape of the result; in its place, whether a plan is to be had of copies."""
    if not x[0] or not y[0] or x[0][-1] != y[0][-2:][0]:  # (of a vector, its only length)
        raise ValueError(f"matrices of shapes {x[0]} and {y[0]} have no product")
    ends = (*x[0][-2:-1], *(y[0][-1:] if len(y[0]) > 1 else ()))
    left = ((1, *x[0]), (0, *x[1])) if len(x[0]) == 1 else x
    right = ((*y[0], 1), (*y[1], 0)) if len(y[0]) == 1 else y
    shape = (*np.broadcast_shapes(left[0][:-2], right[0][:-2]), *ends)
    if _handle(device) is None or not math.prod(shape) or not x[0][-1]:
        return False, shape
    stack = arranged(left, right, dtypes[0].itemsize)
    try:
        return (Plan(device, stack, dtypes, alignment, sums, modes) if isinstance(stack, Stack) else stack), shape
    except Unserved:
        return False, shape


def product(
    x: Any,
    y: Any,
    *,
    bias: Any = None,
    sums: bool = False,
    float8: Float8 | None = None,
    dtype: np.dtype | None = None,
    out: Any = None,
    add: bool = False,
) -> Any:
    """``x @ y`` of CuPy's arrays of one dtype on the current device, or None where cuBLASLt does not serve it.

    A ``bias`` along the last dimension is added before the result is rounded. With ``sums`` the result is followed by
    the sums of ``y`` over the dimension that is summed. ``float8`` says what two arrays of bytes are.
    ``dtype`` is the result's, by default that of the operands: of two short floats it may be float32.
    ``out``, of the result's shape and dtype, takes the result, or (``add``) has it added to what is there.
    """
    dtypes = (x.dtype, x.dtype, x.dtype if dtype is None else dtype) if float8 is None else float8.dtypes
    if dtypes[0] not in CUDA_TYPES or library() is None:
        return None
    import cupy

    if float8 is not None:  # whose elements lie together along the dimension that is summed, in both
        x = cupy.ascontiguousarray(x)
        y = y if y.ndim == 1 else cupy.ascontiguousarray(y.swapaxes(-1, -2)).swapaxes(-1, -2)
    vector = cupy.empty(y.shape[-1], y.dtype) if sums else bias if bias is None else cupy.ascontiguousarray(bias)
    modes, device = (_tf32, determinism.is_deterministic()), cupy.cuda.runtime.getDevice()
    for _ in range(2):
        alignment = _alignment(x), _alignment(y), 0 if vector is None else _alignment(vector)
        memory = (x.shape, x.strides), (y.shape, y.strides)
        plan, shape = _plan(device, dtypes, *memory, alignment, sums, modes)
        if plan is not True:
            break
        x, y = cupy.ascontiguousarray(x), cupy.ascontiguousarray(y)
    if not isinstance(plan, Plan):
        return None
    direct = out is not None and out.flags.c_contiguous and out.data.ptr % ALIGNED == 0
    into = out if direct else cupy.ndarray(shape, plan.dtype)
    if into.data.ptr % ALIGNED:  # memory of some other allocator
        return None
    try:
        plan.run(cupy, x, y, into, vector, float8, add and direct)
    except Unserved:
        return None
    if out is not None and not direct:
        out[...] = out + into if add else into
        return out
    return (into, vector) if sums else into


def _alignment(array: Any) -> int:
    at = array.data.ptr | ALIGNED
    return at & -at
