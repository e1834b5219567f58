"""Attention as an op and its backward op, neither of which ever holds the square matrix of the weights.

Both go through the queries in tiles of rows (Rabe and Staats, 2021): scores, softmax and products of a tile, over the
keys that its rows may see, and then the next tile. The backward op computes the weights of a tile again (Dao et al.,
2022). On a GPU kernels of their own do so for short floats (:mod:`..kernels.attention`), or cuDNN's: the result, and
the shift and the sum of each row of scores, which the forward op gives for that, spare them a pass. Tiles need none of
it, for they hold whole rows. The decompositions hold the whole matrix. They serve derivatives of higher order, and keys
that are split over ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..backends.row_blocks import wide as _wide
from ..core.array import Array
from ..core.dispatch import apply
from ..core.dtypes import result_type
from ..core.errors import ArgumentError, DTypeError, ShapeError
from ..core.op import Op, ShapeDtype, composite
from ..kernels import attention as kernels
from ..native import ops
from ..ops.creation import asarray
from ..ops.elementwise import POSITIONS, WHERE, exp, logical_and, stop_gradient, where
from ..ops.manipulation import astype, broadcast_to, expand_dims, matrix_transpose, repeat, reshape, squeeze
from ..ops.matmul import MATMUL, matmul
from ..ops.param_kinds import LABEL, NUMBER
from ..reductions.reductions import sum as sum_
from .dropout import dropout
from .softmax import SOFTMAX_BACKWARD, finite_max, softmax, softmax_of_rows

NAME = "[scaled_dot_product_attention]"
LEAST_ROWS = 64
"""Rows of a tile of causal attention, where the queries have so many: keys are read anew for each tile. Where no tile
sees fewer keys than another, four times as many."""

TILE = 1 << 18
"""Scores of a tile on a CPU: with their slopes they fit in a second-level cache, which makes up for computing the
weights again. The number of threads has no say in it, so that it has none in the sums."""

WHOLE = 1 << 22
"""Weights up to which all are kept where nothing is masked: computing them anew takes a sixth more time."""


def _check(q: Any, k: Any, v: Any) -> None:
    if min(len(x.shape) for x in (q, k, v)) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ShapeError(f"{NAME} query {q.shape}, key {k.shape} and value {v.shape} do not fit together")
    if any(x.dtype.kind in "biuc" for x in (q, k, v)):
        raise DTypeError(f"{NAME} query, key and value must be real floating")


def _infer(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[ShapeDtype, ...]:
    q, k, v, *mask = args
    _check(q, k, v)
    try:
        lead = np.broadcast_shapes(*(x.shape[:-2] for x in args))
    except ValueError:
        raise ShapeError(
            f"{NAME} leading dimensions do not broadcast: {', '.join(str(x.shape) for x in args)}"
        ) from None
    square = q.shape[-2], k.shape[-2]
    for m in mask:
        if any(n not in (1, whole) for n, whole in zip(m.shape[-2:][::-1], square[::-1], strict=False)):
            raise ShapeError(f"{NAME} mask {m.shape} does not broadcast to {(*lead, *square)}")
    dtype, rows = result_type(*(x.dtype for x in (q, k, v))), (*lead, q.shape[-2])
    return ShapeDtype((*rows, v.shape[-1]), dtype), *(ShapeDtype(rows, _wide(dtype)),) * 2


def _infer_backward(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[ShapeDtype, ...]:
    g, q, k, v, *saved = args
    operands, expected = (q, k, v, *saved[3:]), _infer(op, (q, k, v, *saved[3:]), params)
    for x, like in zip((g, *saved), (expected[0], *expected), strict=False):
        if x.shape != like.shape:
            raise ShapeError(
                f"{NAME} a cotangent or a saved result of shape {x.shape} does not fit a result {like.shape}"
            )
    return tuple(ShapeDtype(x.shape, x.dtype) for x in operands[: op.nout])


# ----- in tiles -------------------------------------------------------------------------------------------------------


def _part(x: Any, key: Sequence[slice]) -> Any:
    """The part of ``x``, all of it along dimensions of length one, which broadcast."""
    return x[tuple([slice(None) if n == 1 else s for n, s in zip(x.shape, key, strict=False)])]


def _tiles(
    xp: Any, lead: Sequence[int], rows: int, cols: int, diagonal: int | None
) -> Iterator[tuple[tuple[slice, ...], slice, slice]]:
    """Keys of the leading dimensions, of rows, and of the columns that these may see."""
    # On a GPU launches of kernels are what costs: up to 2**24 scores more than the half that a causal mask hides.
    limit, whole = (TILE, TILE) if xp is np else (1 << 25, 1 << 24)
    step = max(1, min(rows, max(4 * LEAST_ROWS, limit // max(cols, 1))))
    if diagonal is not None and math.prod(lead) * rows * cols > whole:  # short tiles see few of the keys
        step = min(step, max(LEAST_ROWS, -(-rows // 4)))
    room, ranges = max(1, limit // max(step * cols, 1)), []
    for n in reversed(lead):
        ranges.append([slice(i, i + room) for i in range(0, n, room)])
        room = max(1, room // max(n, 1))
    starts = range(0, rows, step)
    if xp is not np:  # the largest first: CuPy's pool cuts smaller memory out of larger, and would keep each larger one
        starts = starts[::-1]
    for at in itertools.product(*reversed(ranges)):
        for i in starts:
            stop = min(i + step, rows)
            seen = cols if diagonal is None else min(cols, max(1, stop + diagonal))
            yield at, slice(i, stop), slice(seen)


def _times(xp: Any, x: Any, y: Any, out: Any = None) -> Any:
    """``x @ y``, on a GPU as the op has it, which a CUDA graph may hold."""
    return np.matmul(x, y, out) if xp is np else MATMUL.bind(xp)(x, y, out=out)


def _weights(
    xp: Any, q: Any, k: Any, mask: Sequence[Any], key: tuple[Any, ...], diagonal: int | None
) -> tuple[Any, Any, Any]:
    """The weights of a tile of scaled queries and the keys that it may see; shift and sum of its rows."""
    at, rows, seen = key
    s = _times(xp, q, xp.swapaxes(k, -1, -2))
    for m in mask:
        m = _part(m, (*at, rows, seen))
        allowed = m
        if m.dtype.kind != "b":
            allowed = m != -math.inf
            s = s + m
        s = WHERE.bind(xp)(allowed, s, -math.inf)
    if diagonal is not None:
        first = max(0, min(seen.stop, rows.start + diagonal + 1))  # column that some row may not see
        first = 0 if 2 * first < seen.stop else first  # few columns: rather all at once
        below = xp.tri(rows.stop - rows.start, seen.stop - first, rows.start + diagonal - first, dtype=bool)
        part = WHERE.bind(xp)(below, s[..., first:], -math.inf)
        if first:
            s[..., first:] = part
        else:
            s = part
    return softmax_of_rows(xp, s, masked=bool(mask) or diagonal is not None)


def _softmax_backward(xp: Any, slopes: Any, weights: Any) -> Any:
    """The slopes of scores; in the memory of those of the weights where a kernel in C takes them."""
    axis = slopes.ndim - 1
    out = ops.softmax_backward(slopes, weights, out=slopes, axis=axis) if xp is np else NotImplemented
    return SOFTMAX_BACKWARD.bind(xp)(slopes, weights, axis=axis) if out is NotImplemented else out


def _nothing(x: Any) -> Any:
    """The sum of zero times each row: NaN where one is not finite. A tile adds it for the keys that it leaves out, for
    the weights of masked keys are zeros."""
    return (x * 0).sum(axis=-2, keepdims=True)


def _spread(arrays: Sequence[Any], ndim: int, dtype: np.dtype) -> list[Any]:
    """The operands with all leading dimensions, numbers in ``dtype``."""
    return [
        x.reshape((1,) * (ndim - x.ndim) + x.shape).astype(bool if x.dtype.kind == "b" else dtype, copy=False)
        for x in arrays
    ]


def _attention(xp: Any, *operands: Any, scale: float, diagonal: int | None) -> Any:
    (shape, dtype), *of_rows = _infer(ATTENTION, operands, {})
    q, k, v, *mask = _spread(operands, len(shape), _wide(dtype))
    wide, (shift, total) = xp.empty(shape, _wide(dtype)), (xp.empty(*a) for a in of_rows)
    for key in _tiles(xp, shape[:-2], shape[-2], k.shape[-2], diagonal):
        at, rows, seen = key
        weights, shift[*at, rows], total[*at, rows] = _weights(
            xp, _part(q, (*at, rows)) * scale, _part(k, (*at, seen)), mask, key, diagonal
        )
        out = wide[*at, rows]
        _times(xp, weights, _part(v, (*at, seen)), out=out)
        if seen.stop < k.shape[-2]:
            out += _nothing(_part(v, at)[..., seen.stop :, :])
    return wide.astype(dtype, copy=False), shift, total


def _backward(
    count: int, xp: Any, g: Any, q: Any, k: Any, v: Any, *saved_and_mask: Any, scale: float, diagonal: Any
) -> Any:
    operands = q, k, v, *saved_and_mask[3:]
    work = _infer(ATTENTION, operands, {})[1].dtype
    g, *wide = _spread((g, *operands), g.ndim, work)
    q, k, v, *mask = wide
    sums: list[Any] = [None] * count

    def add(i: int, key: Sequence[slice], part: Any) -> None:
        """Add to the cotangent of operand ``i``, summed over the dimensions along which that broadcasts."""
        shape = wide[i].shape
        axes = tuple([d for d, n in enumerate(shape) if n == 1 != part.shape[d]])  # none, too
        part = part.sum(axis=axes, keepdims=True) if axes else part
        if sums[i] is None and part.shape == shape:
            sums[i] = part
            return
        if sums[i] is None:
            sums[i] = xp.zeros(shape, work)
        into = _part(sums[i], key)
        into += part

    for key in _tiles(xp, g.shape[:-2], g.shape[-2], k.shape[-2], diagonal):
        at, rows, seen = key
        x, cotangent = _part(q, (*at, rows)) * scale, g[*at, rows]
        y, z = (_part(a, (*at, seen)) for a in (k, v))
        weights, *_ = _weights(xp, x, y, mask, key, diagonal)
        slopes = _times(xp, cotangent, xp.swapaxes(z, -1, -2))
        if slopes.shape != weights.shape:  # values may have more leading dimensions than keys
            weights = xp.ascontiguousarray(xp.broadcast_to(weights, slopes.shape))
        far = slice(seen.stop, None) if seen.stop < k.shape[-2] else None
        if far:
            slopes[..., :1] += _nothing(_part(v, at)[..., far, :]).sum(axis=-1, keepdims=True)
        slopes = _softmax_backward(xp, slopes, weights)
        add(0, (*at, rows), _times(xp, slopes, y) * scale)
        add(1, (*at, seen), _times(xp, xp.swapaxes(slopes, -1, -2), x))
        add(2, (*at, seen), _times(xp, xp.swapaxes(weights, -1, -2), cotangent))
        if count > 3:
            add(3, (*at, rows, seen), slopes)
        if far:
            add(0, (*at, rows), _nothing(_part(k, at)[..., far, :]))
            add(1, (*at, far), _nothing(slopes[..., :1] + x))
            add(2, (*at, far), _nothing(weights[..., :1] + cotangent))
    found = [xp.zeros(x.shape, work) if s is None else s for s, x in zip(sums, wide, strict=False)]
    return tuple([s.reshape(x.shape).astype(x.dtype, copy=False) for s, x in zip(found, operands, strict=False)])


# ----- the same in plain functions ------------------------------------------------------------------------------------


def _scores(
    q: Array, k: Array, mask: Sequence[Array], scale: float, diagonal: int | None
) -> tuple[Array, Array | None]:
    """All scores, and which of them count (None: all)."""
    scores = matmul(q * scale, matrix_transpose(k))
    allowed = None
    for m in mask:
        allowed = m
        if m.dtype.kind != "b":
            scores, allowed = scores + m, m != -math.inf
    if diagonal is not None:
        row, column = (apply(POSITIONS, (scores,), {"axis": scores.ndim - i, "start": 0}) for i in (2, 1))
        below = row + diagonal >= column
        allowed = below if allowed is None else logical_and(allowed, below)
    return scores, allowed


def _widened(*arrays: Array) -> list[Array]:
    work = _wide(result_type(*(x.dtype for x in arrays if x.dtype.kind != "b")))
    return [x if x.dtype.kind == "b" else astype(x, work, copy=False) for x in arrays]


def _composed(
    *operands: Array, scale: float, diagonal: int | None, drop: Callable[[Array], Array] = lambda weights: weights
) -> Array:
    dtype = result_type(*(x.dtype for x in operands[:3]))
    q, k, v, *wide = _widened(*operands)
    scores, allowed = _scores(q, k, wide, scale, diagonal)
    return astype(matmul(drop(softmax(scores, where=allowed)), v), dtype, copy=False)


def _decompose(
    query: Array, key: Array, value: Array, *mask: Array, scale: float, diagonal: int | None
) -> tuple[Array, ...]:
    q, k, v, *wide = _widened(query, key, value, *mask)
    scores, allowed = _scores(q, k, wide, scale, diagonal)
    if allowed is not None:
        scores = where(allowed, scores, -math.inf)
    # Not the op: over keys that are split, all results then have their collectives in common.
    top = finite_max(scores, -1)
    weights = exp(scores - top)
    total = sum_(weights, axis=-1, keepdims=True)
    if allowed is not None:
        total = where(total == 0, 1.0, total)
    out = matmul(weights / total, v)
    of_rows = (broadcast_to(stop_gradient(squeeze(a, -1)), out.shape[:-1]) for a in (top, total))
    return astype(out, result_type(query.dtype, key.dtype, value.dtype), copy=False), *of_rows


def _summed_to(x: Array, like: Array) -> Array:
    extra = x.ndim - like.ndim
    axes = tuple(i for i, n in enumerate(x.shape) if i < extra or like.shape[i - extra] == 1 != n)
    return astype(reshape(sum_(x, axis=axes) if axes else x, like.shape), like.dtype, copy=False)


def _decompose_backward(count: int, g: Array, *given: Array, scale: float, diagonal: int | None) -> tuple[Array, ...]:
    # Not of the saved results, which are functions of the operands: so its derivative is that of all of it.
    operands = *given[:3], *given[6:]
    g, q, k, v, *wide = _widened(g, *operands)
    scores, allowed = _scores(q, k, wide, scale, diagonal)
    weights = softmax(scores, where=allowed)
    slopes = matmul(g, matrix_transpose(v))
    slopes = weights * (slopes - sum_(weights * slopes, axis=-1, keepdims=True))
    dk, dv = (matmul(matrix_transpose(x), y) for x, y in ((slopes, q * scale), (weights, g)))
    found = matmul(slopes, k) * scale, dk, dv, slopes
    return tuple(_summed_to(x, like) for x, like in zip(found[:count], operands, strict=False))


def _backward_op(name: str, nout: int, **overrides: Any) -> Op:
    impl, decompose = partial(_backward, nout), partial(_decompose_backward, nout)
    operands = ("g", "query", "key", "value", "out", "shift", "total", "*mask")
    facts = {"decompose": decompose, "params": PARAMS, "overrides": overrides}
    return Op(name, operands, impl, _infer_backward, nout=nout, **facts)


# params: what the scores are multiplied by; and the last key that the first query may see (None: each sees all).
PARAMS = {"scale": NUMBER, "diagonal": LABEL}
ATTENTION = Op(
    "attention",
    ("query", "key", "value", "*mask"),
    _attention,
    _infer,
    nout=3,
    decompose=_decompose,
    overrides={"cupy": kernels.attention},
    wide_sums=True,
    params=PARAMS,
)
"""The result; and for the backward op the shift and the sum of each row of scores, which are constants: 0 and 1 of a
row of which a mask hides all. The decomposition of the backward op makes them anew."""
ATTENTION_BACKWARD = _backward_op("attention_backward", 3, cupy=kernels.attention_backward)
ATTENTION_BIAS_BACKWARD = _backward_op("attention_bias_backward", 4)  # of a mask that is added to the scores, too


# ----- public function ------------------------------------------------------------------------------------------------


@composite("scaled_dot_product_attention")
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    /,
    *,
    mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
) -> Array:
    """Mean of the values, weighted by ``softmax(query @ key.T * scale)`` (Vaswani et al., 2017).

    The weights are made a tile at a time, forward and backward: memory grows with the length of the sequence, and not
    with its square. The matrix of the weights is held whole with dropout, by ``jvp`` and derivatives of higher order,
    where keys are split over ranks, and up to four million weights of float32 and float64 where nothing is masked.
    On a GPU the weights of float16 and bfloat16 are rounded to these before they are multiplied with the values.

    Parameters
    ----------
    query, key, value
        Shapes ``(..., q, d)``, ``(..., k, d)`` and ``(..., k, e)``; leading dimensions broadcast. With fewer heads
        (dimension -3) in ``key`` and ``value`` than in ``query``, each serves as many neighbouring heads of the query
        (grouped queries).
    mask
        Broadcasts to ``(..., q, k)``. Boolean: true where a query may look. Floating: added to the scores. A query that
        may look nowhere gets zeros. A key that is hidden from a query has no part in its weights, whatever its numbers;
        a value that is hidden counts as zero times it, as in JAX: one that is NaN or infinite makes all queries NaN.
        So it is with gradients: a hidden key that is NaN or infinite makes the gradient of the queries NaN, its own is
        zero, and the others' stay. Zero such keys and values (``mt.where(keep, value, 0)``). Of a query that is not
        finite, gradients of keys and values that it does not see may be NaN, too.
    is_causal
        Query ``i`` looks at keys ``0 … i`` only.
    scale
        ``1 / sqrt(d)`` by default.
    dropout_rate, dropout_key
        Weights dropped, as by :func:`dropout`.

    Returns
    -------
    Array
        Shape ``(..., q, e)``. Scores and weights of float16 and bfloat16 are kept in float32.

    Examples
    --------
    >>> q = k = v = mt.eye(2)
    >>> mt.nn.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)[0]
    Array([1., 0.], dtype=float64)
    """
    q, k, v = asarray(query), asarray(key), asarray(value)
    _check(q, k, v)
    if not isinstance(is_causal, bool | np.bool_):
        raise ArgumentError(
            f"{NAME} is_causal is True or False, got {is_causal!r}: what depends on values is a mask (mask=)"
        )
    masks = [] if mask is None else [asarray(mask)]
    if masks and masks[0].dtype.kind in "iuc":
        raise DTypeError(
            f"{NAME} mask is {masks[0].dtype.name}: a boolean one (mask.astype(bool)) is true where a query may look, "
            "a floating one is added to the scores"
        )
    dtype = result_type(q.dtype, k.dtype, v.dtype)
    masks = [m if m.dtype.kind == "b" else astype(m, _wide(dtype), copy=False) for m in masks]
    scale = 1.0 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale
    if not isinstance(scale, int | float | np.number):  # an array, which may have a gradient
        q, scale = astype(q, _wide(q.dtype), copy=False) * scale, 1.0
    group, heads = 1, q.shape[-3] if q.ndim > 2 else 1
    if q.ndim > 2 and k.ndim > 2 and v.ndim > 2 and k.shape[-3] == v.shape[-3] not in (1, heads) and heads != 1:
        if not k.shape[-3] or heads % k.shape[-3]:
            raise ShapeError(f"{NAME} {heads} heads of the query for {k.shape[-3]} of key and value")
        group = heads // k.shape[-3]
        if q.sharding is None:
            q, *masks = (_grouped(x, heads, group) for x in (q, *masks))
            k, v = (expand_dims(x, axis=-3) for x in (k, v))
        else:  # heads may be split over more ranks than key and value have heads
            k, v, group = repeat(k, group, axis=-3), repeat(v, group, axis=-3), 1
    params = {"scale": float(scale), "diagonal": 0 if is_causal else None}
    rows = _infer(ATTENTION, (q, k, v, *masks), params)[1].shape
    if dropout_rate:
        out = _composed(q, k, v, *masks, **params, drop=lambda w: dropout(w, dropout_rate, key=dropout_key))
    elif _is_small(rows, k.shape[-2], dtype) and not masks and not is_causal and q.sharding is None:
        out = _composed(q, k, v, *masks, **params)
    else:
        out, *_ = apply(ATTENTION, (q, k, v, *masks), params)
    if group > 1:
        out = reshape(out, (*out.shape[:-4], heads, *out.shape[-2:]))
    return astype(out, dtype, copy=False)


def _is_small(rows: tuple[int, ...], keys: int, dtype: np.dtype) -> bool:
    """Whether all weights are kept: not of short floats, which a GPU has kernels for."""
    return math.prod(rows) * keys <= WHOLE and dtype.itemsize > 2


def _grouped(x: Array, heads: int, group: int) -> Array:
    """The heads of a query or a mask as those of key and value, and the group that each serves."""
    if x.ndim < 3 or x.shape[-3] == 1:
        return x if x.ndim < 3 else expand_dims(x, axis=-3)
    if x.shape[-3] != heads:
        raise ShapeError(f"{NAME} mask {x.shape} does not broadcast to {heads} heads of the query")
    return reshape(x, (*x.shape[:-3], heads // group, group, *x.shape[-2:]))
