"""Derivatives of random ops that are linear in their operands; legend in ``registry``."""

from __future__ import annotations

from ...arrays.nn import dropout
from .registry import call, defvjp, same


def _dropped(xp, g, key, rate, offset, global_shape):
    return call(xp, dropout.DROPOUT, g, key, rate=rate, offset=offset, global_shape=global_shape)


defvjp(dropout.DROPOUT, x=_dropped)
defvjp(dropout.DROPOUT_ADD, x=_dropped, y=same)
