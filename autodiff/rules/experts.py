"""Derivatives of expert networks; legend in ``registry``. The backward op is differentiated by its decomposition."""

from __future__ import annotations

from ...arrays.nn import mixture_of_experts as e
from .registry import call, defvjp_all


def _experts(xp, g, x, chosen, weights, gate, up, down, numbers):
    dx, dweights, *matrices = call(xp, e.EXPERTS_BACKWARD, g, x, chosen, weights, gate, up, down, numbers)
    return dx, None, dweights, *matrices, None


defvjp_all(e.EXPERTS, _experts)
