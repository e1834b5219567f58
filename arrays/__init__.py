"""Arrays: the ``Array`` type, its ops, dtypes and devices. An array-API namespace, and what it lacks.

Ops, the tape's entries and programs live here, at the one dispatch point that writes them, so that every package that reads
them imports downwards. An op call goes one of three ways, by the kind of its buffers: it is computed at once (NumPy, CuPy),
noted in a program (traced by ``mt.compile``), or noted in the pending program of a mesh (sharded arrays).
"""

from __future__ import annotations

import numpy as _np
from ml_dtypes import bfloat16 as _bfloat16
from ml_dtypes import float8_e4m3fn as _float8_e4m3fn
from ml_dtypes import float8_e5m2 as _float8_e5m2

from . import errors, nn, random, tree
from ._array import Array
from ._op import OPS, Op
from .creation import (
    arange,
    asarray,
    empty,
    eye,
    full,
    full_like,
    linspace,
    ones,
    ones_like,
    zeros,
    zeros_like,
)
from .devices import Device, default_device, device, devices, use_device
from .elementwise import (
    abs,
    acos,
    acosh,
    add,
    asin,
    asinh,
    atan,
    atan2,
    atanh,
    bitwise_and,
    bitwise_invert,
    bitwise_left_shift,
    bitwise_or,
    bitwise_right_shift,
    bitwise_xor,
    ceil,
    clip,
    conj,
    copysign,
    cos,
    cosh,
    divide,
    equal,
    erf,
    exp,
    expm1,
    floor,
    floor_divide,
    fmax,
    fmin,
    greater,
    greater_equal,
    hypot,
    imag,
    isfinite,
    isinf,
    isnan,
    less,
    less_equal,
    log,
    log1p,
    log2,
    log10,
    logaddexp,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    maximum,
    minimum,
    multiply,
    negative,
    nextafter,
    not_equal,
    positive,
    pow,
    real,
    reciprocal,
    remainder,
    round,
    sign,
    signbit,
    sin,
    sinh,
    sqrt,
    square,
    stop_gradient,
    subtract,
    tan,
    tanh,
    trunc,
    where,
)
from .linalg import matmul
from .manipulation import (
    astype,
    broadcast_arrays,
    broadcast_to,
    concat,
    expand_dims,
    flip,
    matrix_transpose,
    moveaxis,
    permute_dims,
    reshape,
    squeeze,
    stack,
)
from .norms import layer_norm
from .program import Const, Entry, Program, ShapeDtype
from .reductions import all, any, argmax, argmin, max, mean, min, prod, std, sum, var
from .tree import tree_map

bool = _np.dtype(_np.bool_)
int8 = _np.dtype(_np.int8)
int16 = _np.dtype(_np.int16)
int32 = _np.dtype(_np.int32)
int64 = _np.dtype(_np.int64)
uint8 = _np.dtype(_np.uint8)
uint16 = _np.dtype(_np.uint16)
uint32 = _np.dtype(_np.uint32)
uint64 = _np.dtype(_np.uint64)
float16 = _np.dtype(_np.float16)
float32 = _np.dtype(_np.float32)
float64 = _np.dtype(_np.float64)
complex64 = _np.dtype(_np.complex64)
complex128 = _np.dtype(_np.complex128)
bfloat16 = _np.dtype(_bfloat16)
float8_e4m3fn = _np.dtype(_float8_e4m3fn)
float8_e5m2 = _np.dtype(_float8_e5m2)

e = _np.e
pi = _np.pi
inf = _np.inf
nan = _np.nan
newaxis = None

__all__ = sorted(n for n in globals() if not n.startswith("_") and n != "annotations")
