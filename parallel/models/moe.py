"""A mixture-of-experts block: each token goes to the ``top_k`` of many feed-forward networks that a router chooses.

The sequences of a batch are the routing groups (Lepikhin et al., 2021): tokens compete for an expert's places with those of
their own sequence only, so that the result does not depend on how the batch is split over ranks. Tokens travel in a buffer
``(batch, expert, place, width)``; where the mesh has an ``expert`` axis, moving that buffer from split batches to split experts
is the all-to-all, and moving it back the other one.

With a capacity factor an expert has ``ceil(factor * top_k * s / experts)`` places a sequence, and tokens beyond it pass by the
block (their output is 0; the residual connection carries them). Without one there are places for all (drop-less), which costs
``experts / top_k`` times the arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays import nn
from ...arrays._array import Array
from ...arrays.creation import arange
from ...arrays.cumulative import cumulative_sum
from ...arrays.elementwise import where
from ...arrays.errors import ShapeError
from ...arrays.manipulation import astype, expand_dims, matrix_transpose, reshape
from ...arrays.random import normal
from ...arrays.reductions import argmax, mean
from ...arrays.reductions import sum as sum_
from .layers import Keys, dense
from .plans import Plan

ACTIVATIONS = {"expert_in": 1, "expert_out": 0}


@dataclass(frozen=True)
class Config:
    """A mixture.

    Parameters
    ----------
    experts
        How many there are.
    top_k
        How many serve a token; their outputs are weighted by the router's probabilities, made to add up to one.
    capacity_factor
        See the module; None loses no token.
    aux_weight
        Weight of the balance loss in the loss of a model.

    Examples
    --------
    >>> import meshtape as mt
    >>> mt.models.moe.Config(experts=4, top_k=2, capacity_factor=1.25).capacity(16)
    10
    """

    experts: int
    top_k: int = 2
    capacity_factor: float | None = 1.25
    aux_weight: float = 0.01

    __is_tree__ = False

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise ShapeError(f"[moe] top_k must be from 1 to the {self.experts} experts, got {self.top_k}")
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(f"[moe] capacity_factor must be positive or None, got {self.capacity_factor}")

    def capacity(self, tokens: int) -> int:
        """Places of an expert for a sequence of so many tokens."""
        if self.capacity_factor is None:
            return tokens
        return min(tokens, max(1, math.ceil(self.capacity_factor * self.top_k * tokens / self.experts)))


def init(
    key: Array, config: Config, width: int, ffn: int, *, out_std: float = 0.02, dtype: Any = np.float32
) -> dict[str, Any]:
    """Random parameters: ``router`` of shape ``(width, experts)`` and the stacked SwiGLU networks of the experts."""
    keys = Keys(key)

    def stack(inputs: int, outputs: int, std: float) -> Array:
        w = normal(keys(), (config.experts, inputs, outputs), dtype=np.float32) * std
        return astype(w, dtype, copy=False)

    return {
        "router": dense(keys(), width, config.experts, 0.02, dtype),
        "experts": {
            "gate": stack(width, ffn, 0.02),
            "up": stack(width, ffn, 0.02),
            "down": stack(ffn, width, out_std),
        },
    }


def route(probabilities: Array, config: Config) -> tuple[Array, Array, Array]:
    """Who goes where.

    Parameters
    ----------
    probabilities
        Of the router, ``(batch, s, experts)``.

    Returns
    -------
    dispatch, combine, first
        ``dispatch`` is 1 and ``combine`` the token's weight where a token has a place: ``(batch, s, experts, capacity)``.
        ``first`` marks each token's first choice, ``(batch, s, experts)``. All first choices are seated before the second
        ones, each in the order of the sequence.
    """
    _, s, experts = probabilities.shape
    places = arange(config.capacity(s), dtype=np.int64)
    left, taken = probabilities, None
    dispatch: Any = 0.0
    combine: Any = 0.0
    total: Any = 0.0
    first = None
    for _ in range(config.top_k):
        chosen = nn.one_hot(argmax(left, axis=-1), experts, dtype=probabilities.dtype)
        first = chosen if first is None else first
        gate = sum_(probabilities * chosen, axis=-1)
        left = where(chosen > 0, -1.0, left)
        before = cumulative_sum(chosen, axis=1) - chosen + (0.0 if taken is None else taken)
        counts = sum_(chosen, axis=1, keepdims=True)
        taken = counts if taken is None else taken + counts
        place = astype(sum_(before * chosen, axis=-1), np.int64)
        seat = astype(expand_dims(place, axis=2) == places, probabilities.dtype)  # all zero beyond the capacity
        at = expand_dims(chosen, axis=3) * expand_dims(seat, axis=2)
        dispatch = dispatch + at
        combine = combine + at * expand_dims(expand_dims(gate, axis=2), axis=3)
        total = total + gate
    assert first is not None
    return dispatch, combine / expand_dims(expand_dims(total, axis=2), axis=3), first


def apply(params: Any, x: Array, config: Config, *, plan: Plan | None = None) -> tuple[Array, Array]:
    """The block, and its balance loss.

    Parameters
    ----------
    params
        Tree of :func:`init`.
    x
        ``(batch, s, width)``.
    plan
        A plan with ``ep`` moves the tokens to the ranks of their experts and back.

    Returns
    -------
    y, aux
        ``y`` like ``x``; ``aux`` is ``experts * sum(share of first choices * mean probability)`` (Fedus et al., 2022): 1 when
        all experts are equally used.

    Examples
    --------
    >>> import meshtape as mt
    >>> c = mt.models.moe.Config(experts=2, top_k=1, capacity_factor=None)
    >>> p = mt.models.moe.init(mt.random.key(0), c, width=4, ffn=8)
    >>> y, aux = mt.models.moe.apply(p, mt.ones((1, 3, 4), dtype=mt.float32), c)
    >>> y.shape, float(aux) > 0
    ((1, 3, 4), True)
    """
    if x.ndim != 3:
        raise ShapeError(f"[moe] x must have the shape (batch, s, width), got {x.shape}")

    def constrain(a: Array, name: str) -> Array:
        return a if plan is None else plan.constrain(a, name)

    b, s, width = x.shape
    e, c = config.experts, config.capacity(s)
    wide = np.float32 if x.dtype.itemsize <= 2 else x.dtype
    probabilities = nn.softmax(astype(x @ params["router"], wide, copy=False))
    dispatch, combine, first = route(probabilities, config)
    to_places = matrix_transpose(reshape(astype(dispatch, x.dtype, copy=False), (b, s, e * c)))
    inside = constrain(reshape(to_places @ x, (b, e, c, width)), "expert_in")
    w = params["experts"]
    hidden = nn.silu(inside @ w["gate"]) * (inside @ w["up"])
    outside = constrain(hidden @ w["down"], "expert_out")
    y = reshape(astype(combine, x.dtype, copy=False), (b, s, e * c)) @ reshape(outside, (b, e * c, width))
    aux = e * sum_(mean(first, axis=(0, 1)) * mean(probabilities, axis=(0, 1)))
    return y, aux
