"""Running sums and products along an axis, and differences of neighbours. Low-precision floats accumulate in
float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import apply, as_array
from ..core.dtypes import as_dtype, is_low_precision
from ..core.errors import ArgumentError, ShapeError
from ..core.op import Op, ShapeDtype
from ..kernels import scans
from ..ops.creation import asarray, beside, full
from ..ops.elementwise import not_equal, subtract
from ..ops.manipulation import astype, broadcast_to, concat
from ..ops.param_kinds import AXIS


def _running(name: str) -> Any:
    def impl(xp: Any, x: Any, axis: int) -> Any:
        if is_low_precision(x.dtype):
            return getattr(xp, name)(x, axis=axis, dtype=np.float32).astype(x.dtype)
        return getattr(xp, name)(x, axis=axis)

    return impl


def _on_gpu(op: str, name: str) -> Any:
    def impl(x: Any, axis: int) -> Any:
        out = scans.running(op, x, axis)
        return _running(name)(scans.runner().xp, x, axis) if out is NotImplemented else out

    return impl


def _infer_running(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    x = args[0]
    return ShapeDtype(x.shape, shape_rules.probed_dtype(op, (x.dtype,), {"axis": 0}))


def _decompose_prod(x: Array, axis: int) -> Array:
    """By doubling: after step k each place holds the product of the 2**k elements up to it. No division, so that zeros
    are no special case for the derivative."""
    dtype = np.cumprod(np.ones(1, x.dtype)).dtype if x.dtype.kind in "biu" else x.dtype
    out = astype(x, np.float32 if is_low_precision(dtype) else dtype)
    lead = (slice(None),) * axis
    step = 1
    while step < x.shape[axis]:
        # (The first ones stay as they are: a complex infinity times one would have a part that is NaN.)
        first, rest = out[(*lead, slice(None, step))], out[(*lead, slice(step, None))]
        out = concat([first, rest * out[(*lead, slice(None, -step))]], axis=axis)
        step *= 2
    return astype(out, dtype, copy=False)


CUMULATIVE_SUM = Op(
    "cumulative_sum",
    ("x",),
    _running("cumsum"),
    _infer_running,
    overrides={"cupy": _on_gpu("Sum", "cumsum")},
    params={"axis": AXIS},
)
CUMULATIVE_PROD = Op(
    "cumulative_prod",
    ("x",),
    _running("cumprod"),
    _infer_running,
    decompose=_decompose_prod,
    overrides={"cupy": _on_gpu("Multiply", "cumprod")},
    params={"axis": AXIS},
)


def _cumulate(op: Op, x: Any, axis: int | None, dtype: Any, include_initial: bool) -> Array:
    x = as_array(x)
    if axis is None:
        if x.ndim != 1:
            raise ShapeError(f"[{op.name}] an array of shape {x.shape} needs an axis")
        axis = 0
    axis = shape_rules.one_axis(op.name, axis, x.ndim)
    if dtype is not None:
        dtype = as_dtype(dtype, op.name)
        x = astype(x, dtype, copy=False)
    out = apply(op, (x,), {"axis": axis})
    if dtype is not None:
        out = astype(out, dtype, copy=False)
    if not include_initial:
        return out
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    initial = full(shape, 0 if op is CUMULATIVE_SUM else 1, dtype=out.dtype, device=beside(out))
    return concat([initial, out], axis=axis)


def cumulative_sum(x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Array:
    """Sums of the elements up to each place along an axis; with ``include_initial``, a zero comes first.

    >>> mt.cumulative_sum(mt.asarray([1, 2, 3]), include_initial=True)
    Array([0, 1, 3, 6])
    """
    return _cumulate(CUMULATIVE_SUM, x, axis, dtype, include_initial)


def cumulative_prod(x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Array:
    """Products of the elements up to each place along an axis; with ``include_initial``, a one comes first.

    >>> mt.cumulative_prod(mt.asarray([1, 2, 3]))
    Array([1, 2, 6])
    """
    return _cumulate(CUMULATIVE_PROD, x, axis, dtype, include_initial)


def diff(x: Any, /, n: int = 1, axis: int = -1, *, prepend: Any = None, append: Any = None) -> Array:
    """Differences of neighbours along an axis, ``n`` times over; ``prepend`` and ``append`` are joined on first.

    For booleans: whether neighbours differ.

    >>> mt.diff(mt.asarray([1, 4, 9, 16]), n=2)
    Array([2, 2])
    """
    x = asarray(x)
    axis = shape_rules.one_axis("diff", axis, x.ndim)
    if n < 0:
        raise ArgumentError(f"[diff] n must not be negative, got {n}")
    if n == 0:  # as NumPy: then nothing is joined on
        return astype(x, x.dtype)
    parts = []
    for piece in (prepend, x, append):
        if piece is not None:
            # As NumPy has it a number among integers is one of 64 bits; beside floats it widens nothing.
            p = asarray(piece, None if hasattr(piece, "dtype") or x.dtype.kind in "biu" else x.dtype)
            parts.append(broadcast_to(p, (*x.shape[:axis], 1, *x.shape[axis + 1 :])) if p.ndim == 0 else p)
    out = concat(parts, axis=axis) if len(parts) > 1 else astype(x, x.dtype)
    lead = (slice(None),) * axis
    minus = not_equal if out.dtype.kind == "b" else subtract
    for _ in range(n):
        out = minus(out[(*lead, slice(1, None))], out[(*lead, slice(None, -1))])
    return out
