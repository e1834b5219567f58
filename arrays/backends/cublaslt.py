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
    "MIN_ALIGNMENT_C_BYTES": (7, ctypes.c_uint32),
    "MIN_ALIGNMENT_D_BYTES": (8, ctypes.c_uint32),
}

WORKSPACE = 32 << 20
"""Bytes that an algorithm may take beside: those that NVIDIA advises for its newest devices."""
ALIGNED = 256
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
    "MatmulDescSetAttribute": (_P, _I, _P, _N),
    "MatmulDescDestroy": (_P,),
    "MatrixLayoutCreate": (_P, _I, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "MatrixLayoutSetAttribute": (_P, _I, _P, _N),
    "MatrixLayoutDestroy": (_P,),
    "MatmulPreferenceCreate": (_P,),
    "MatmulPreferenceSetAttribute": (_P, _I, _P, _N),
    "MatmulPreferenceDestroy": (_P,),
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


class Shape(NamedTuple):
    """A stack of ``count`` products of (m, k) and (k, n)."""

    count: int
    m: int
    n: int
    k: int
    x: Side
    y: Side


_tf32 = False


def is_tf32() -> bool:
    """Whether products of float32 on a GPU may round their factors to TF32 (by default they do not).

    >>> mt.is_tf32()
    False
    """
    return _tf32


@contextmanager
def use_tf32(mode: bool = True) -> Iterator[None]:
    """Let products of float32 on a GPU round their factors to TF32 (10 bits of 23) while the context is open.

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


class Plan:
    """A product with its algorithm, which is asked for once. Rows are columns to the library, so that it multiplies the
    second operand by the first.

    ``types`` are those of factors, result and scale, and of what computes; ``alignment`` is that of operands, result
    and vector.
    """

    def __init__(
        self, device: int, shape: Shape, types: tuple[int, ...], alignment: tuple[int, ...], epilogue: int, sums: int
    ) -> None:
        (factor, result, scale, compute), (at_x, at_y, at_out, at_vector) = types, alignment
        count, m, n, k, x, y = shape
        self._handle, self._lock = _handle(device), threading.Lock()
        self._numbers = np.asarray([1, 0], {v: k for k, v in CUDA_TYPES.items()}[scale])  # alpha and beta
        self._description = Object("MatmulDesc", DESCRIPTION, compute, scale)
        self._description.set(TRANSA=OP_T * y.across, TRANSB=OP_T * x.across)
        if epilogue:
            self._description.set(EPILOGUE=epilogue, BIAS_POINTER=at_vector)
        preference = Object("MatmulPreference", PREFERENCE)
        preference.set(MAX_WORKSPACE_BYTES=WORKSPACE, REDUCTION_SCHEME_MASK=sums)
        preference.set(MIN_ALIGNMENT_A_BYTES=at_y, MIN_ALIGNMENT_B_BYTES=at_x)
        preference.set(MIN_ALIGNMENT_C_BYTES=at_out, MIN_ALIGNMENT_D_BYTES=at_out)
        self._sides = []
        for kind, rows, columns, side in ((factor, n, k, y), (factor, k, m, x), (result, n, m, Side(False, n, m * n))):
            lines = (columns, rows) if side.across else (rows, columns)
            self._sides.append(Object("MatrixLayout", LAYOUT, kind, *lines, side.leading))
            if count > 1:
                self._sides[-1].set(BATCH_COUNT=count, STRIDED_BATCH_OFFSET=side.step)
        self._a, self._b, self._d = handles = [o.handle for o in self._sides]
        handles = [self._description.handle, *handles, self._d, preference.handle]
        self._found, found = HeuristicResult(), _I()
        call("MatmulAlgoGetHeuristic", self._handle, *handles, 1, ctypes.byref(self._found), ctypes.byref(found))
        if not found.value or self._found.state:
            raise Unserved

    def run(self, cupy: Any, x: Any, y: Any, out: Any, vector: Any) -> None:
        """Launch it on the current stream. Its workspace comes from the present pool, and returns to it in the order of
        the stream."""
        size, one, at = self._found.workspace, self._numbers.ctypes.data, out.data.ptr
        workspace = cupy.cuda.alloc(size) if size else None
        operands = one, y.data.ptr, self._a, x.data.ptr, self._b, one + self._numbers.itemsize, at, self._d, at, self._d
        rest = (
            ctypes.byref(self._found.algorithm),
            workspace and workspace.ptr,
            size,
            cupy.cuda.get_current_stream().ptr,
        )
        with self._lock:  # the description names the vector
            if vector is not None:
                self._description.set(BIAS_POINTER=vector.data.ptr)
            call("Matmul", self._handle, self._description.handle, *operands, *rest)


@functools.lru_cache(maxsize=4096)
def _plan(*key: Any) -> Plan | None:
    try:
        return Plan(*key)
    except Unserved:
        return None


def _alignment(array: Any) -> int:
    at = array.data.ptr
    return min(at & -at, ALIGNED) or ALIGNED


def _side(rows: int, columns: int, row: int, column: int) -> tuple[bool, int] | None:
    """Whether elements of a column lie together, not those of a row, and the elements between the lines; None where
    neither do."""
    if (column == 1 or columns == 1) and (rows == 1 or row >= columns):
        return False, max(row if rows > 1 else 0, columns)
    if (row == 1 or rows == 1) and (columns == 1 or column >= rows):
        return True, max(column if columns > 1 else 0, rows)
    return None


def _steps(array: Any, ndim: int) -> list[int]:
    """Elements from one to the next along each of ``ndim`` dimensions, 0 where it repeats."""
    lead = [0] * (ndim - array.ndim)
    return lead + [s // array.itemsize if n > 1 else 0 for n, s in zip(array.shape, array.strides, strict=True)]


def arranged(x: Any, y: Any) -> Shape | None:
    """The product of two arrays of at least two dimensions as one stack; None where their memory is no such stack."""
    if any(s % a.itemsize for a in (x, y) for s in a.strides):
        return None
    ndim, (m, k), n = max(x.ndim, y.ndim), x.shape[-2:], y.shape[-1]
    (*xs, x_row, x_column), (*ys, y_row, y_column) = _steps(x, ndim), _steps(y, ndim)
    stack: list[tuple[int, int, int]] = []
    for length, a, b in zip(np.broadcast_shapes(x.shape[:-2], y.shape[:-2]), xs, ys, strict=True):
        if length > 1 and stack and stack[-1][1:] == (length * a, length * b):
            length *= stack.pop()[0]
        if length > 1:
            stack.append((length, a, b))
    if stack and stack[-1][2] == 0 and stack[-1][1] and (m == 1 or stack[-1][1] == m * x_row):
        length, step, _ = stack.pop()  # all rows times one matrix
        m, x_row = m * length, step if m == 1 else x_row
    left, right = _side(m, k, x_row, x_column), _side(k, n, y_row, y_column)
    count, a, b = stack[0] if stack else (1, 0, 0)
    if len(stack) > 1 or left is None or right is None or count > MOST_IN_STACK or min(a, b) < 0:
        return None
    shape = Shape(count, m, n, k, Side(*left, a), Side(*right, b))
    return shape if max(m, n, k, left[1], right[1]) <= LARGEST else None


def _one_stack(x: Any, y: Any) -> bool:
    """Whether copies of two arrays without gaps are one stack: no operand repeats along some of its dimensions alone,
    but for the second one along the last."""
    ndim = max(x.ndim, y.ndim)
    steps = zip(_steps(x, ndim)[:-2], _steps(y, ndim)[:-2], strict=True)
    repeats = [pair for pair, _ in itertools.groupby((a == 0, b == 0) for a, b in steps if a or b)]
    return len(repeats) <= 1 + (repeats[-1:] == [(False, True)])


def product(x: Any, y: Any, *, bias: Any = None, sums: bool = False, float8: Any = None) -> Any:
    """``x @ y`` of CuPy's arrays of one dtype on the current device, or None where cuBLASLt does not serve it.

    A ``bias`` along the last dimension is added before the result is rounded. With ``sums`` the result is followed by
    the sums of ``y`` over the dimension that is summed. ``float8`` is the dtype of two arrays of bytes, whose product
    is float32.
    """
    factor = CUDA_TYPES.get(np.dtype(float8 or x.dtype))
    if factor is None or library() is None:
        return None
    import cupy

    left, right = x[None] if x.ndim == 1 else x, y[:, None] if y.ndim == 1 else y
    if float8 is not None:  # whose elements lie together along the dimension that is summed, in both
        left, right = cupy.ascontiguousarray(left), cupy.ascontiguousarray(right.swapaxes(-1, -2)).swapaxes(-1, -2)
    shape = (*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
    device = cupy.cuda.runtime.getDevice()
    if not math.prod(shape) or not x.size or _handle(device) is None:
        return None
    how = arranged(left, right)
    if how is None and _one_stack(left, right):
        left, right = cupy.ascontiguousarray(left), cupy.ascontiguousarray(right)
        how = arranged(left, right)
    if how is None:
        return None
    dtype = np.dtype(np.float32 if float8 is not None else x.dtype)
    own, single = CUDA_TYPES[dtype], CUDA_TYPES[np.dtype(np.float32)]
    fast = COMPUTE_32F_FAST_TF32 if _tf32 and dtype.char in "fF" and float8 is None else COMPUTE_32F
    types = (factor, own, own if dtype.itemsize > 2 else single, COMPUTE_64F if dtype.char in "dD" else fast)
    out = cupy.empty(shape, dtype)
    vector = cupy.empty(shape[-1], dtype) if sums else bias
    alignment = (*map(_alignment, (left, right, out)), 0 if vector is None else _alignment(vector))
    epilogue = EPILOGUE_BGRADA if sums else 0 if bias is None else EPILOGUE_BIAS
    any_order = 0 if determinism.is_deterministic() else REDUCTION_INPLACE
    plan = _plan(device, how, types, alignment, epilogue, REDUCTION_COMPUTE_TYPE | any_order)
    if plan is None:
        return None
    plan.run(cupy, left, right, out, vector)
    ends = (*shape[:-2], *shape[-2 : -1 if x.ndim > 1 else -2], *(shape[-1:] if y.ndim > 1 else ()))
    return (out, vector) if sums else out.reshape(ends)
