"""Derivatives of reductions, sorting and running sums; legend in ``registry``.

Derivatives of products have no division, and so no trouble with zeros.
"""

from __future__ import annotations

import math

import numpy as np

from ...arrays.native import AVAILABLE
from ...arrays.native import ops as native
from ...arrays.reductions import cumulative, sorting
from ...arrays.reductions import reductions as r
from .registry import call, conj, defvjp


def _spread(xp, g, like, axis, keepdims):
    """``g`` with the reduced dimensions back, at length one: it broadcasts against the operand."""
    shape = tuple(1 if i in axis else n for i, n in enumerate(like.shape))
    return g if keepdims else xp.reshape(g, shape)


def _sum(xp, g, x_like, axis, keepdims):
    if xp is np:
        return r.repeated(g, x_like.shape, axis, keepdims)
    return xp.broadcast_to(_spread(xp, g, x_like, axis, keepdims), x_like.shape)


def _mean(xp, g, x_like, axis, keepdims, count):
    return _sum(xp, g / (count or np.nan), x_like, axis, keepdims)


def _prod(xp, g, x, x_like, axis, keepdims):
    # Products of all other elements, not ans / x: right where elements are zero. The left part accumulates from the
    # front, the right part from the back, over the reduced axes laid out in a row.
    keep = tuple(i for i in range(len(x_like.shape)) if i not in axis)
    order = (*keep, *axis)
    front = tuple(x_like.shape[i] for i in keep)
    n = math.prod(x_like.shape[i] for i in axis)
    flat = xp.reshape(xp.permute_dims(x, order), (*front, n))
    out = _products_of_others(xp, flat, n)
    others = xp.permute_dims(xp.reshape(out, tuple(x_like.shape[i] for i in order)), tuple(np.argsort(order).tolist()))
    return _spread(xp, g, x_like, axis, keepdims) * conj(xp, others)


def _products_of_others(xp, flat, n):
    """Along the last axis: at each place the product of all other elements, by doubling (log n steps, no division)."""
    one = xp.ones_like(flat[..., :1])
    left, right = xp.concat([one, flat[..., :-1]], axis=-1), xp.concat([flat[..., 1:], one], axis=-1)
    if n == 0:
        return flat
    step = 1
    while step < n:
        ones = xp.ones_like(flat[..., :step])
        left = left * xp.concat([ones, left[..., :-step]], axis=-1)
        right = right * xp.concat([right[..., step:], ones], axis=-1)
        step *= 2
    return left * right


def _extremum(xp, g, x, ans, x_like, axis, keepdims):
    # Tied elements share evenly; the count is over the whole array, however it is sharded.
    hit = xp.astype(x == _spread(xp, ans, x_like, axis, keepdims), x_like.dtype)
    return _spread(xp, g, x_like, axis, keepdims) * hit / xp.sum(hit, axis=axis, keepdims=True)


defvjp(r.SUM, x=_sum)
defvjp(r.MEAN, x=_mean)
defvjp(r.PROD, x=_prod)
defvjp(r.MAX, x=_extremum)
defvjp(r.MIN, x=_extremum)


def _sort(xp, g, x, axis, descending, stable):
    # Where each element of x went: the order of the order. The cotangent goes back the same way.
    order = call(xp, sorting.ARGSORT, x, axis=axis, descending=descending, stable=stable)
    if xp is np:
        out = np.empty_like(g)
        np.put_along_axis(out, order, g, axis)
        return out
    back = call(xp, sorting.ARGSORT, order, axis=axis, descending=False, stable=False)
    return xp.take_along_axis(g, back, axis=axis)


def _cumulative_sum(xp, g, axis):
    return xp.flip(call(xp, cumulative.CUMULATIVE_SUM, xp.flip(g, axis=axis), axis=axis), axis=axis)


def _cumulative_prod(xp, g, x, axis):
    # Of each element the product of those before it, times the sum of g over the later results, each with the product
    # of what lies between: sum[i] = g[i] + x[i + 1] * sum[i + 1], by doubling.
    if xp is np and AVAILABLE and (out := native.cumulative_prod_backward(g, x, axis)) is not NotImplemented:
        return out
    n, lead = x.shape[axis], (slice(None),) * axis
    x = conj(xp, x)
    one = xp.ones_like(x[(*lead, slice(None, 1))])
    before = call(xp, cumulative.CUMULATIVE_PROD, xp.concat([one, x[(*lead, slice(None, -1))]], axis=axis), axis=axis)
    total, between, step = g, x[(*lead, slice(1, None))], 1
    while step < n:
        front, back = (*lead, slice(None, -step)), (*lead, slice(step, None))
        total = xp.concat([total[front] + between * total[back], total[(*lead, slice(n - step, None))]], axis=axis)
        between = between[front] * between[back]
        step *= 2
    return before * total


defvjp(sorting.SORT, x=_sort)
defvjp(cumulative.CUMULATIVE_PROD, x=_cumulative_prod)
defvjp(cumulative.CUMULATIVE_SUM, x=_cumulative_sum)
