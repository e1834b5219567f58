"""Derivatives of the functions that rearrange, index and multiply; legend in ``registry``."""

from __future__ import annotations

import math

import numpy as np

from ...arrays.core.dtypes import float8_e5m2
from ...arrays.indexing import indexing as ix
from ...arrays.linalg import float8
from ...arrays.ops import manipulation as m
from ...arrays.ops import matmul
from .registry import call, conj, defvjp, defvjp_all, same

# ----- shapes ---------------------------------------------------------------------------------------------------------

defvjp(m.RESHAPE, x=lambda xp, g, x_like: xp.reshape(g, x_like.shape))
defvjp(m.BROADCAST_TO, x=same)  # the engine undoes broadcasting
defvjp(m.FLIP, x=lambda xp, g, axis: xp.flip(g, axis=axis))


def _concat(xp, g, xs_like, axis):
    out, start = [], 0
    for like in xs_like:
        n = like.shape[axis]
        out.append(g[(slice(None),) * axis + (slice(start, start + n),)])
        start += n
    return out


defvjp(m.PERMUTE_DIMS, x=lambda xp, g, axes: xp.permute_dims(g, tuple(axes.index(i) for i in range(len(axes)))))
defvjp_all(m.CONCAT, _concat)

# ----- products -------------------------------------------------------------------------------------------------------


def _matmul_x(xp, g, y, x_like):
    if len(y.shape) == 1:
        return xp.expand_dims(g, axis=-1) * conj(xp, y)
    if len(x_like.shape) == 1:
        return call(xp, matmul.MATMUL, conj(xp, y), xp.expand_dims(g, axis=-1))[..., 0]
    if xp is np:
        return matmul.times_transposed(g, y)
    return call(xp, matmul.MATMUL, g, xp.matrix_transpose(conj(xp, y)))


def _all_rows(xp, x, g, y_like):
    # One product over all rows: a stack of matrices, one for each row of the batch, would be made only to be summed. On
    # a mesh the dimensions stay apart, as each may be split in its own way.
    if len(y_like.shape) == 2 < len(x.shape) and getattr(x, "sharding", None) is getattr(g, "sharding", None) is None:
        rows = math.prod(x.shape[:-1])
        return xp.reshape(x, (rows, x.shape[-1])), xp.reshape(g, (rows, g.shape[-1]))
    return x, g


def _matmul_y(xp, g, x, y_like):
    if len(x.shape) == 1:
        outer = conj(xp, x) if len(y_like.shape) == 1 else xp.expand_dims(conj(xp, x), axis=-1)
        return outer * (g if len(y_like.shape) == 1 else xp.expand_dims(g, axis=-2))
    if len(y_like.shape) == 1:
        return conj(xp, x) * xp.expand_dims(g, axis=-1)
    x, g = _all_rows(xp, x, g, y_like)
    if xp is np:
        return matmul.transposed_times(x, g)
    return call(xp, matmul.MATMUL, xp.matrix_transpose(conj(xp, x)), g)


defvjp(matmul.MATMUL, x=_matmul_x, y=_matmul_y)


# Straight through the rounding of the operands. Cotangents have the float8 of the wider range.


def _float8_x(xp, g, y, x_scale, y_scale, y_dtype, dtype, x_rounds, y_rounds):
    g_scale = call(xp, float8.FLOAT8_SCALE, g, dtype=float8_e5m2)
    params = {"x_dtype": float8_e5m2, "y_dtype": y_dtype, "dtype": dtype, "x_rounds": True, "y_rounds": y_rounds}
    found = call(xp, float8.FLOAT8_MATMUL, g, xp.matrix_transpose(y), g_scale, y_scale, **params)
    return found if x_rounds else xp.astype(found, np.float32) * x_scale


def _float8_y(xp, g, x, x_scale, y_scale, y_like, x_dtype, dtype, x_rounds, y_rounds):
    g_scale = call(xp, float8.FLOAT8_SCALE, g, dtype=float8_e5m2)
    x, g = _all_rows(xp, x, g, y_like)
    params = {"x_dtype": x_dtype, "y_dtype": float8_e5m2, "dtype": dtype, "x_rounds": x_rounds, "y_rounds": True}
    found = call(xp, float8.FLOAT8_MATMUL, xp.matrix_transpose(x), g, x_scale, g_scale, **params)
    return found if y_rounds else xp.astype(found, np.float32) * y_scale


def _factor(xp, g, ans, scale, rounds):
    if rounds:
        return xp.zeros_like(scale)
    return xp.sum(xp.astype(g, np.float32) * xp.astype(ans, np.float32)) / scale


defvjp(
    float8.FLOAT8_MATMUL,
    x=_float8_x,
    y=_float8_y,
    x_scale=lambda xp, g, ans, x_scale, x_rounds: _factor(xp, g, ans, x_scale, x_rounds),
    y_scale=lambda xp, g, ans, y_scale, y_rounds: _factor(xp, g, ans, y_scale, y_rounds),
)

# ----- indexing -------------------------------------------------------------------------------------------------------


def _read(xp, g, arrays, x_like, template):
    return call(xp, ix.SCATTER, g, *arrays, template=template, shape=x_like.shape)


def _overwritten(xp, g, arrays, template):
    return call(xp, ix.INDEX_SET, g, 0.0, *arrays, template=template)


def _written(xp, g, arrays, template):
    return call(xp, ix.LAST_WRITES, g, *arrays, template=template)


def _added(xp, g, arrays, template):
    return call(xp, ix.GETITEM, g, *arrays, template=template)


def _sharers(xp, x, v, arrays, ans, template):
    """The elements of x and the written values that equal the result, as ones, and their number at each place."""
    x_hit = xp.astype(x == ans, x.dtype)
    v_hit = xp.astype(v == _added(xp, ans, arrays, template), x.dtype)
    return x_hit, v_hit, call(xp, ix.INDEX_ADD, x_hit, v_hit, *arrays, template=template)


def _kept_extremum(xp, g, x, v, arrays, ans, template):
    x_hit, _, count = _sharers(xp, x, v, arrays, ans, template)
    # Where nothing was written the element alone is the result; NaN is equal to nothing, and nothing gets its gradient.
    return xp.where(count == 0, 0.0, g * x_hit / xp.where(count == 0, 1.0, count))


def _written_extremum(xp, g, x, v, arrays, ans, template):
    _, v_hit, count = _sharers(xp, x, v, arrays, ans, template)
    n = _added(xp, count, arrays, template)
    return xp.where(n == 0, 0.0, _added(xp, g, arrays, template) * v_hit / xp.where(n == 0, 1.0, n))


defvjp(ix.GETITEM, x=_read)
for _op in (ix.INDEX_MIN, ix.INDEX_MAX):
    defvjp(_op, x=_kept_extremum, v=_written_extremum)
defvjp(ix.INDEX_SET, x=_overwritten, v=_written)
defvjp(ix.INDEX_ADD, x=same, v=_added)
defvjp(ix.SCATTER, g=_added)


def _last_writes(xp, g, arrays, g_like, template):
    # The adjoint of "read, and drop what was overwritten" is "write": of repeated places only the last one counts.
    return call(xp, ix.INDEX_SET, xp.zeros(g_like.shape, dtype=g_like.dtype), g, *arrays, template=template)


defvjp(ix.LAST_WRITES, g=_last_writes)
