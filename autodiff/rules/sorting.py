"""Derivatives of sorting and of running sums; legend in ``registry``.

Running products are differentiated through their decomposition, which has no division and so no trouble with zeros.
"""

from __future__ import annotations

from ...arrays.reductions import cumulative, sorting
from .registry import call, defvjp


def _sort(xp, g, x, axis, descending, stable):
    # Where each element of x went: the order of the order. The cotangent goes back the same way.
    order = call(xp, sorting.ARGSORT, x, axis=axis, descending=descending, stable=stable)
    back = call(xp, sorting.ARGSORT, order, axis=axis, descending=False, stable=False)
    return xp.take_along_axis(g, back, axis=axis)


def _cumulative_sum(xp, g, axis):
    reverse = xp.flip(g, axis=axis)
    return xp.flip(call(xp, cumulative.CUMULATIVE_SUM, reverse, axis=axis), axis=axis)


defvjp(sorting.SORT, x=_sort)
defvjp(cumulative.CUMULATIVE_SUM, x=_cumulative_sum)
