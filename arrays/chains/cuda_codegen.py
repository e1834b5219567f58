"""The elementwise ops as CUDA C++: one entry of a program as an expression of one element.

Every op computes in the dtype that NumPy computes it in; the short floats in float, rounded to themselves after each
op. Products are made with the intrinsics that the compiler never contracts into a fused multiply-add. So the numbers of
a fused chain are those of the same calls made one by one, but for the last places of the functions of the mathematical
library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ..core.dtypes import KERNEL_FLOATS
from ..core.op import Cuda
from ..core.program import Const, Entry, Program
from ..kernels.launch import NAMES, wide

BOOL = np.dtype(np.bool_)
_SHORT = frozenset({np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)})

PRELUDE = """
// Integers wrap around, which only unsigned ones may in C++; the short ones are computed in int.
__device__ inline int sum(int a, int b) { return (int)((u32)a + (u32)b); }
__device__ inline u32 sum(u32 a, u32 b) { return a + b; }
__device__ inline i64 sum(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }
__device__ inline u64 sum(u64 a, u64 b) { return a + b; }
__device__ inline int difference(int a, int b) { return (int)((u32)a - (u32)b); }
__device__ inline u32 difference(u32 a, u32 b) { return a - b; }
__device__ inline i64 difference(i64 a, i64 b) { return (i64)((u64)a - (u64)b); }
__device__ inline u64 difference(u64 a, u64 b) { return a - b; }
__device__ inline int product(int a, int b) { return (int)((u32)a * (u32)b); }
__device__ inline u32 product(u32 a, u32 b) { return a * b; }
__device__ inline i64 product(i64 a, i64 b) { return (i64)((u64)a * (u64)b); }
__device__ inline u64 product(u64 a, u64 b) { return a * b; }
__device__ inline float sum(float a, float b) { return a + b; }
__device__ inline double sum(double a, double b) { return a + b; }
__device__ inline float difference(float a, float b) { return a - b; }
__device__ inline double difference(double a, double b) { return a - b; }
// NaN wins.
template <class T> __device__ inline T larger(T a, T b) { return a != a ? a : b != b ? b : a > b ? a : b; }
template <class T> __device__ inline T smaller(T a, T b) { return a != a ? a : b != b ? b : a < b ? a : b; }
// NaN loses.
template <class T> __device__ inline T larger_number(T a, T b) { return a != a ? b : b != b ? a : a >= b ? a : b; }
template <class T> __device__ inline T smaller_number(T a, T b) { return a != a ? b : b != b ? a : a <= b ? a : b; }
template <class T> __device__ inline T sign_of(T a) { return a != a ? a : (T)((a > (T)0) - (a < (T)0)); }
template <class T> __device__ inline T magnitude(T a) { return a < (T)0 ? difference((T)0, a) : a; }
// A quotient that differs from the one rounded towards minus infinity by its rounding alone, and the rest of it, where
// `rest` is that of the division rounded towards zero. Infinities have the limits of a / b.
template <class T> __device__ inline T floored_quotient(T a, T b, T rest)
{
    const T q = a / b;
    if (q - q != (T)0 || b - b != (T)0) return q;
    const T whole = (a - rest) / b - (T)(rest != (T)0 && (b < (T)0) != (rest < (T)0));
    return whole != (T)0 ? whole : q * (T)0;
}
template <class T> __device__ inline T floored_rest(T b, T rest)
{
    if (rest == (T)0) return b < (T)0 ? -(T)0 : (T)0;
    return (b < (T)0) != (rest < (T)0) ? rest + b : rest;
}
__device__ inline float log_of_sum(float a, float b)
{
    const float d = a - b;
    return a == b ? a + 0.6931471805599453f : d > 0 ? a + log1pf(expf(-d)) : d <= 0 ? b + log1pf(expf(d)) : d;
}
__device__ inline double log_of_sum(double a, double b)
{
    const double d = a - b;
    return a == b ? a + 0.6931471805599453 : d > 0 ? a + log1p(exp(-d)) : d <= 0 ? b + log1p(exp(d)) : d;
}
__device__ inline float logistic(float a)
{
    const float e = expf(-fabsf(a));
    return a >= 0 ? 1.0f / (1.0f + e) : e / (1.0f + e);
}
__device__ inline double logistic(double a)
{
    const double e = exp(-fabs(a));
    return a >= 0 ? 1.0 / (1.0 + e) : e / (1.0 + e);
}
"""


def _kind(dtype: np.dtype) -> str:
    return "f" if dtype in KERNEL_FLOATS else dtype.kind


def register_type(dtype: np.dtype) -> str:
    """The C++ type that an element of a dtype is held in between ops.

    >>> import numpy as np
    >>> register_type(np.dtype("float16")), register_type(np.dtype("uint8"))
    ('float', 'int')
    """
    if dtype.kind in "iu" and dtype.itemsize < 4:
        return "int"
    return NAMES[wide(dtype) if dtype in KERNEL_FLOATS else dtype]


def rounded(text: str, dtype: np.dtype) -> str:
    """A value of the register type as the nearest one that the dtype itself has."""
    if dtype in _SHORT:
        return f"wide(narrow<{NAMES[dtype]}>({text}))"
    if dtype.kind in "iu" and dtype.itemsize < 4:
        return f"(int)({NAMES[dtype]})({text})"
    return text


def _cast(text: str, source: np.dtype, target: np.dtype) -> str:
    if source == target:
        return text
    if target == BOOL:
        return f"({text} != 0)"
    return rounded(f"({register_type(target)}){text}", target)


SHORT_FLOATS = ("float16", "bfloat16")


def widened(kind: str, text: str) -> str:
    """A stored element of this C++ type as one of the register type."""
    return f"wide({text})" if kind in SHORT_FLOATS else text


def literal(value: Any, dtype: np.dtype) -> str:
    """A Python number as C++, after it has become one of ``dtype``.

    >>> import numpy as np
    >>> literal(0.1, np.dtype("float32")), literal(2, np.dtype("int64"))
    ('0x1.99999a0000000p-4f', '2ll')
    """
    if dtype == BOOL:
        return "true" if value else "false"
    if dtype in KERNEL_FLOATS:
        number = float(np.asarray(value).astype(dtype))
        t = register_type(dtype)
        if math.isnan(number):
            return f"(infinity<{t}>() - infinity<{t}>())"
        if math.isinf(number):
            return f"{'-' if number < 0 else ''}infinity<{t}>()"
        return number.hex() + ("f" if t == "float" else "")
    number = int(np.asarray(value).astype(dtype))
    if number == -(2**63):
        return "(-9223372036854775807ll - 1ll)"
    suffix = "ll" if dtype.itemsize == 8 else ""
    return f"{number}{'u' if dtype in (np.uint64, np.uint32) else ''}{suffix}"


def _operand_dtypes(e: Entry, program: Program) -> list[np.dtype | None]:
    """Dtypes of the operands; None for a Python number."""
    return [None if isinstance(v, Const) else program.avals[v].dtype for v in e.inputs]


def _computed_in(e: Entry, program: Program, rule: Cuda) -> np.dtype | None:
    """The dtype that an entry is computed in; None where it is no business of a kernel."""
    out = program.avals[e.outputs[0]].dtype
    if rule.computed_in == "bool":
        return BOOL
    if rule.computed_in == "result":
        return out
    strong = [d for d in _operand_dtypes(e, program) if d is not None]
    numbers = [v.value for v in e.inputs if isinstance(v, Const)]
    common = np.result_type(*strong)
    if common.kind == "f" and all(d.kind in "iu" for d in strong):
        return None  # int64 beside uint64, which NumPy compares exactly
    for n in numbers:
        if isinstance(n, float) and _kind(common) != "f":
            common = np.dtype(np.float64)
        elif type(n) is int and common.kind in "iu":
            limits = np.iinfo(common)
            if not limits.min <= n <= limits.max:
                return None
        elif isinstance(n, int) and common == BOOL:
            common = np.dtype(np.int64)
    return common


def expressible(e: Entry, program: Program) -> bool:
    """Whether :func:`expression` has a form for an entry."""
    rule = e.op.cuda
    dtypes = [program.avals[v].dtype for v in (*e.inputs, *e.outputs) if isinstance(v, int)]
    if rule is None or any(d not in NAMES for d in dtypes):
        return False
    if any(isinstance(v, Const) and isinstance(v.value, complex) for v in e.inputs):
        return False
    if e.op.name == "astype" and dtypes[0] in KERNEL_FLOATS and dtypes[-1].kind in "iu":
        return False  # what becomes of numbers beyond the range is the backend's own
    t = _computed_in(e, program, rule)
    return t is not None and _kind(t) in rule.kinds


def sums_all(e: Entry, program: Program) -> bool:
    """Whether an entry is the sum of a whole array of float32 or float64."""
    if e.op.name != "sum" or not isinstance(e.inputs[0], int):
        return False
    x, out = program.avals[e.inputs[0]], program.avals[e.outputs[0]]
    return x.dtype == out.dtype and x.dtype.char in "fd" and out.shape == () and math.prod(x.shape) > 1


def expression(e: Entry, program: Program, names: Sequence[str | None]) -> str:
    """The C++ of an entry for operands held in the variables ``names`` (None for Python numbers); of the register type
    of its result."""
    rule = e.op.cuda
    assert rule is not None
    t = _computed_in(e, program, rule)
    out = program.avals[e.outputs[0]].dtype
    assert t is not None
    words = []
    for i, (v, name) in enumerate(zip(e.inputs, names, strict=True)):
        wanted = BOOL if e.op.operands[i] == "condition" else t
        if isinstance(v, Const):
            words.append(literal(v.value, wanted))
        else:
            words.append(_cast(name or "", program.avals[v].dtype, wanted))
    held = register_type(t)
    text = rule.integers if rule.integers is not None and t.kind in "iu" else rule.text
    said = text.format(*words, f="f" if held == "float" else "", t=held, zero=f"({held})0")
    return said if rule.computed_in != "result" else rounded(f"({said})", out)
