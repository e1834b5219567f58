"""Kernels in C by op: a result, or NotImplemented for operands that they do not take."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from ..backends.casts import cast
from ..backends.memory_pool import fresh
from ..core.dtypes import is_low_precision
from . import AVAILABLE, _kernels
from .calls import CHUNK, memory, result_like, run

_TAKEN = frozenset("fd")
_UINT64 = frozenset(np.dtype(c).num for c in "LQ" if np.dtype(c).itemsize == 8)  # of which the largest are no int64

_INT64 = np.dtype(np.int64)

# With fewer elements two or three calls of NumPy take less time than asking whether a kernel takes the operands.
WORTH_A_CALL = 4096


def _takes(x: Any) -> bool:
    return AVAILABLE and type(x) is np.ndarray and x.dtype.char in _TAKEN


def _rows(x: np.ndarray, naxes: int) -> tuple[int, int]:
    """Rows, and elements of a row, where the last ``naxes`` dimensions are one row."""
    cut = x.ndim - naxes
    return math.prod(x.shape[:cut]), math.prod(x.shape[cut:])


def _norm(kernel: str, x: Any, *parameters: Any, naxes: int, eps: float) -> Any:
    if not _takes(x):
        return NotImplemented
    out = result_like(x)
    return out if run(kernel, (x, *parameters, out), *_rows(x, naxes), value=eps) else NotImplemented


layer_norm, rms_norm = partial(_norm, "layer_norm"), partial(_norm, "rms_norm")


def _norm_backward(kernel: str, parameters: int, g: Any, x: Any, weight: Any, naxes: int, eps: float) -> Any:
    if not _takes(x):
        return NotImplemented
    rows, width = _rows(x, naxes)
    out = result_like(x)
    sums = [np.empty((-(-rows // CHUNK), width), x.dtype) for _ in range(parameters)]
    if not run(kernel, (g, x, weight, out, *sums), rows, width, value=eps, chunk=CHUNK):
        return NotImplemented
    return out, *[np.add.reduce(s, axis=0).reshape(weight.shape) for s in sums]


layer_norm_backward = partial(_norm_backward, "layer_norm_backward", 2)
rms_norm_backward = partial(_norm_backward, "rms_norm_backward", 1)


def group_norm(x: Any, weight: Any, bias: Any, num_groups: int, axis: int, eps: float) -> Any:
    if not _takes(x) or axis != 1 or not x.size:
        return NotImplemented
    out = result_like(x)
    each = math.prod(x.shape[2:])
    rows, width = x.shape[0] * num_groups, x.shape[1] // num_groups * each
    return out if run("group_norm", (x, weight, bias, out), rows, width, value=eps, ignored=each) else NotImplemented


def group_norm_backward(g: Any, x: Any, weight: Any, num_groups: int, axis: int, eps: float) -> Any:
    if not _takes(x) or axis != 1 or not x.size:
        return NotImplemented
    out, sums = result_like(x), [np.empty(x.shape[:2], x.dtype) for _ in range(2)]
    each = math.prod(x.shape[2:])
    rows, width = x.shape[0] * num_groups, x.shape[1] // num_groups * each
    if not run("group_norm_backward", (g, x, weight, out, *sums), rows, width, value=eps, ignored=each):
        return NotImplemented
    return out, *[np.add.reduce(s, axis=0) for s in sums]


def cumulative_prod_backward(g: Any, x: Any, axis: int) -> Any:
    if not _takes(x) or not x.size:
        return NotImplemented
    # In float64: what follows an element may overflow float32 where the product with what precedes it does not.
    g, wide = (np.ascontiguousarray(np.moveaxis(a, axis, -1), np.float64) for a in (g, x))
    out = result_like(wide)
    taken = run("cumulative_prod_backward", (g, wide, out), *_rows(wide, 1))
    return np.moveaxis(out, -1, axis).astype(x.dtype, copy=False) if taken else NotImplemented


def _by_rows(kernel: str, *operands: Any, axis: int, masked: bool = False, out: Any = None) -> Any:
    x = operands[-1]
    if not _takes(x) or axis != x.ndim - 1:
        return NotImplemented
    out = result_like(x) if out is None else out
    return out if run(kernel, (*operands, out), *_rows(x, 1), flag=masked) else NotImplemented


softmax, softmax_backward = partial(_by_rows, "softmax"), partial(_by_rows, "softmax_backward")


def softmax_of_rows(x: Any, shift: Any, total: Any, masked: bool) -> Any:
    """The softmax of rows in their memory; to ``shift`` what they are shifted by, and to ``total`` the sums of the
    exponentials of what is left."""
    taken = _takes(x) and run("softmax_of_rows", (x, x, shift, total), *_rows(x, 1), flag=masked)
    return x if taken else NotImplemented


log_softmax, log_softmax_backward = partial(_by_rows, "log_softmax"), partial(_by_rows, "log_softmax_backward")


def below(labels: Any, limit: int) -> bool | None:
    """Whether integers are 0 or more, and less than ``limit``; None where no kernel takes them."""
    return _kernels.below(labels, limit) if AVAILABLE and type(labels) is np.ndarray else None


def _int64(labels: np.ndarray) -> np.ndarray:
    return labels if labels.dtype is _INT64 else labels.astype(_INT64, copy=False)


def cross_entropy(logits: Any, labels: Any, ignore_index: int | None, label_smoothing: float) -> Any:
    if not _takes(logits) or labels.dtype.num in _UINT64:
        return NotImplemented
    found = tuple([memory(labels.shape, logits.dtype, labels.size * logits.itemsize) for _ in range(3)])
    operands = logits, _int64(labels), *found
    return found if _by_classes("cross_entropy", operands, logits, ignore_index, label_smoothing) else NotImplemented


def cross_entropy_backward(
    g: Any, logits: Any, labels: Any, shift: Any, total: Any, ignore_index: int | None, label_smoothing: float
) -> Any:
    if not _takes(logits) or labels.dtype.num in _UINT64:
        return NotImplemented
    out = result_like(logits)
    operands = g, logits, _int64(labels), shift, total, out
    taken = _by_classes("cross_entropy_backward", operands, logits, ignore_index, label_smoothing)
    return out if taken else NotImplemented


def _by_classes(kernel: str, operands: tuple[Any, ...], logits: Any, ignored: int | None, smoothing: float) -> bool:
    if ignored is not None and not -(2**63) <= ignored < 2**63:
        return False
    return run(kernel, operands, *_rows(logits, 1), value=smoothing, flag=ignored is not None, ignored=ignored or 0)


def rotary_embedding(x: Any, cosines: Any, sines: Any, inverse: bool) -> Any:
    if not _takes(x) or x.ndim < 2:
        return NotImplemented
    table, size = (x.shape[-2], x.shape[-1] // 2), math.prod(x.shape[-2:])
    if any(type(t) is not np.ndarray or t.shape[-2:] != table or t.size * 2 != size for t in (cosines, sines)):
        return NotImplemented
    # In the order in which the rows lie: heads are views whose positions lie further apart than the heads.
    order = (*sorted(range(x.ndim - 1), key=lambda d: -x.strides[d]), x.ndim - 1)
    laid = x.transpose(order)
    out = result_like(laid)
    rows, width = _rows(laid, 1)
    alike = math.prod(laid.shape[order.index(x.ndim - 2) + 1 : -1])
    if not run("rotary_embedding", (laid, cosines, sines, out), rows, width, flag=inverse, ignored=alike):
        return NotImplemented
    return out.transpose(np.argsort(order))


def _elementwise(kernel: str, x: Any) -> Any:
    if not _takes(x):
        return NotImplemented
    out = result_like(x)
    return out if run(kernel, (x, out), x.size, 1) else NotImplemented


gelu, sigmoid = partial(_elementwise, "gelu"), partial(_elementwise, "sigmoid")


def power(x: Any, y: Any) -> Any:
    """Floats to a power of no more than 64 that is half of an integer, a number or an array without dimensions: NumPy's
    loop takes 50 ns and more an element where some of the bases are negative. (It has quick ones for 0, 1 and 2, with
    the same bits.)"""
    if type(x) is not np.ndarray or not (x.dtype.char in _TAKEN or is_low_precision(x.dtype)):
        return NotImplemented
    number = y
    if type(y) is not int and type(y) is not float:
        if getattr(y, "ndim", 1) or y.dtype != x.dtype:
            return NotImplemented
        number = y.item()
    if not -64 <= number <= 64 or number * 2 % 1 or number == 0 or (number in (1, 2) and x.size < WORTH_A_CALL):
        return NotImplemented
    if x.dtype.char not in _TAKEN:
        out = power(x.astype(np.float64), number)
        return out if out is NotImplemented else cast(out, x.dtype)
    if not x.flags.c_contiguous:
        x = np.ascontiguousarray(x)  # an element has one value, however it lies
    out = result_like(x)
    return out if run("power", (x, out), x.size, 1, value=number) else NotImplemented


def swiglu(gate: Any, up: Any) -> Any:
    if not _takes(gate) or type(up) is not np.ndarray or up.shape != gate.shape:
        return NotImplemented
    out = result_like(gate)
    return out if run("swiglu", (up, gate, out), gate.size, 1) else NotImplemented


def swiglu_backward(g: Any, gate: Any, up: Any) -> Any:
    if type(g) is float and _takes(gate):
        g = np.broadcast_to(gate.dtype.type(g), gate.shape)
    if not _takes(gate) or any(type(a) is not np.ndarray or a.shape != gate.shape for a in (g, up)):
        return NotImplemented
    out = result_like(gate)
    return out if run("swiglu_backward", (g, gate, up, out), gate.size, 1) else NotImplemented


def silu(x: Any) -> Any:
    return swiglu(x, np.broadcast_to(x.dtype.type(1), x.shape)) if _takes(x) else NotImplemented


def _elementwise_backward(kernel: str, least: int, g: Any, x: Any) -> Any:
    if not _takes(x) or type(g) is not np.ndarray or g.shape != x.shape or x.size < least:
        return NotImplemented
    out = result_like(x)
    return out if run(kernel, (g, x, out), x.size, 1) else NotImplemented


gelu_backward = partial(_elementwise_backward, "gelu_backward", 0)
tanh_backward = partial(_elementwise_backward, "tanh_backward", WORTH_A_CALL)
sigmoid_backward = partial(_elementwise_backward, "sigmoid_backward", WORTH_A_CALL)
relu_backward = partial(_elementwise_backward, "relu_backward", WORTH_A_CALL)


def add_product(x: np.ndarray, number: Any, total: np.ndarray) -> bool:
    """``total += x * number`` with one rounding; False, and nothing is done, where no kernel takes the operands."""
    return _takes(x) and run("add_product", (x, total), x.size, 1, value=float(number))


# As which dtype numbers of so many bytes are chosen from: no bit changes.
_VIEWS = {4: np.dtype(np.float32), 8: np.dtype(np.float64)}


def where(condition: Any, x: Any, y: Any) -> Any:
    whole = x if type(x) is np.ndarray else y
    if not (AVAILABLE and type(whole) is np.ndarray and type(condition) is np.ndarray and condition.dtype.char == "?"):
        return NotImplemented
    if condition.size < WORTH_A_CALL and whole.size < WORTH_A_CALL and getattr(y, "size", 1) < WORTH_A_CALL:
        return NotImplemented  # NumPy is done before the shapes are compared here
    dtype = whole.dtype
    if dtype.kind not in "fiu" or dtype.itemsize not in _VIEWS or not dtype.isnative:
        return NotImplemented
    x, y = (_same(v, dtype) for v in (x, y))
    if x is None or y is None:
        return NotImplemented
    shape = np.broadcast_shapes(condition.shape, x.shape, y.shape)
    while condition.ndim and condition.shape[0] == 1:
        condition = condition[0]
    size = math.prod(shape)
    if size < WORTH_A_CALL or any(v.size != 1 and v.shape != shape for v in (x, y)):
        return NotImplemented
    width = 1
    if condition.size != size:  # truth values of the last dimensions, the same for all others
        width = condition.size
        if width == 1 or shape[len(shape) - condition.ndim :] != condition.shape:
            return NotImplemented
    out = fresh(shape, dtype)
    view = _VIEWS[dtype.itemsize]
    operands = x.view(view), y.view(view), condition, out.view(view)
    return out if run("where", operands, size // width, width) else NotImplemented


def _same(v: Any, dtype: np.dtype) -> np.ndarray | None:
    """An operand as an array of this dtype, where NumPy would make the same of it without a word."""
    if type(v) is np.ndarray:
        return v if v.dtype == dtype else None
    if type(v) is float and dtype.kind == "f":
        fits = dtype.itemsize == 8 or not math.isfinite(v) or abs(v) < 1e38
    else:
        least = -(2**31) if dtype.kind == "i" else 0
        fits = type(v) is int and (abs(v) <= 2**24 if dtype.kind == "f" else least <= v < 2**31)
    return np.asarray(v, dtype) if fits else None
