"""Derivatives of the softmax family and of attention; legend in ``registry``.

The backward ops have no rules of their own: the engine differentiates their decompositions, which are right at every
order.
"""

from __future__ import annotations

from ...arrays.nn import attention as a
from ...arrays.nn import cross_entropy as ce
from ...arrays.nn import linear_cross_entropy as lce
from ...arrays.nn import softmax as s
from .registry import call, defvjp, defvjp_all

defvjp(s.SOFTMAX, x=lambda xp, g, ans, axis: call(xp, s.SOFTMAX_BACKWARD, g, ans, axis=axis))
defvjp(s.LOG_SOFTMAX, x=lambda xp, g, ans, axis: call(xp, s.LOG_SOFTMAX_BACKWARD, g, ans, axis=axis))


def _cross_entropy(xp, g, logits, labels, ignore_index, label_smoothing):
    params = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return call(xp, ce.CROSS_ENTROPY_BACKWARD, g, logits, labels, **params)


defvjp(ce.CROSS_ENTROPY, logits=_cross_entropy)


def _attention(xp, g, query, key, value, mask, scale, diagonal):
    added = bool(mask) and mask[0].dtype.kind != "b"
    op = a.ATTENTION_BIAS_BACKWARD if added else a.ATTENTION_BACKWARD
    found = call(xp, op, g, query, key, value, *mask, scale=scale, diagonal=diagonal)
    return (*found, None) if mask and not added else found


defvjp_all(a.ATTENTION, _attention)


def _linear_cross_entropy(xp, g, hidden, weight, labels, ans, ignore_index, label_smoothing):
    params = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return *call(xp, lce.LINEAR_CROSS_ENTROPY_BACKWARD, *g, hidden, weight, labels, ans[1], **params), None


defvjp_all(lce.LINEAR_CROSS_ENTROPY, _linear_cross_entropy)
