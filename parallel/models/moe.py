"""A mixture-of-experts block: each token goes to the ``top_k`` of many feed-forward networks that a router chooses.

With a capacity factor the sequences of a batch are the routing groups (Lepikhin et al., 2021): an expert has
``ceil(factor * top_k * s / experts)`` places a sequence, and tokens beyond it pass by the block (their output is 0; the
residual connection carries them). Tokens compete for places with those of their own sequence only, so that the result
does not depend on how the batch is split over ranks. They travel in a buffer ``(batch, expert, place, width)``; where
the mesh has an ``expert`` axis, moving that buffer from split batches to split experts is the all-to-all, and moving it
back the other one.

Without one (drop-less) no token is lost and no place is padded: each expert computes the rows that were sent to it,
however many (:func:`meshtape.nn.experts`; Gale et al., 2023). On an ``expert`` axis the ranks first tell each other how
many tokens go where, and then send just those (:mod:`meshtape.parallel.resharding.expert_all_to_all`): a token goes
once to each other rank that has one of its experts, to at most ``top_k`` of them, and its sum comes back. Nothing is
padded and nothing lost, but a rank may be sent all tokens, if the router sends them there: the capacity form bounds the
memory, this one does not.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays.core.array import Array
from ...arrays.core.errors import ShapeError
from ...arrays.nn import nn
from ...arrays.ops.creation import arange, beside
from ...arrays.ops.elementwise import where
from ...arrays.ops.manipulation import astype, expand_dims, matrix_transpose, reshape, stack
from ...arrays.random import normal
from ...arrays.reductions.cumulative import cumulative_sum
from ...arrays.reductions.moments import mean
from ...arrays.reductions.reductions import argmax
from ...arrays.reductions.reductions import sum as sum_
from .layers import Keys, dense
from .plans import Plan, constrained

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
        See the module; None loses no token and pads nothing.
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
        """Places of an expert for a sequence of so many tokens; without a factor there are as many as tokens."""
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


def choose(probabilities: Array, config: Config) -> tuple[list[Array], list[Array], list[Array]]:
    """The experts of each token from the likeliest on (of equal ones the first): their numbers ``(batch, s)``, the same
    one-hot ``(batch, s, experts)``, and the weights of their outputs, ``(batch, s)``, which add up to one."""
    left = probabilities
    numbers, chosen, gates = [], [], []
    for _ in range(config.top_k):
        if chosen:
            left = where(chosen[-1] > 0, -1.0, left)
        numbers.append(argmax(left, axis=-1))
        chosen.append(nn.one_hot(numbers[-1], probabilities.shape[-1], dtype=probabilities.dtype))
        gates.append(sum_(probabilities * chosen[-1], axis=-1))
    total = functools.reduce(operator.add, gates)
    return numbers, chosen, [g / total for g in gates]


def route(probabilities: Array, config: Config) -> tuple[Array, Array, Array]:
    """The routing of tokens to the places of experts, with a capacity: ``(dispatch, combine, first)``.

    ``dispatch`` is 1 and ``combine`` the token's weight where a token has a place: ``(batch, s, experts, capacity)``.
    ``first`` marks each token's first choice, ``(batch, s, experts)``. All first choices are seated before the second
    ones, in the order of the sequence.
    """
    places = arange(config.capacity(probabilities.shape[1]), dtype=np.int64, device=beside(probabilities))
    _, choices, gates = choose(probabilities, config)
    taken: Any = 0.0
    dispatch: Any = 0.0
    combine: Any = 0.0
    for chosen, gate in zip(choices, gates, strict=True):
        before = cumulative_sum(chosen, axis=1) - chosen + taken
        taken = taken + sum_(chosen, axis=1, keepdims=True)
        place = astype(sum_(before * chosen, axis=-1), np.int64)
        seat = astype(expand_dims(place, axis=2) == places, probabilities.dtype)  # all zero beyond the capacity
        at = expand_dims(chosen, axis=3) * expand_dims(seat, axis=2)
        dispatch = dispatch + at
        combine = combine + at * expand_dims(expand_dims(gate, axis=2), axis=3)
    return dispatch, combine, choices[0]


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
        ``y`` like ``x``; ``aux`` is ``experts * sum(share of first choices * mean probability)`` (Fedus et al., 2022):
        1 when all experts are equally used.

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

    wide = np.float32 if x.dtype.itemsize <= 2 else x.dtype
    probabilities = nn.softmax(astype(x @ params["router"], wide, copy=False))
    if config.capacity_factor is None:
        y, first = _drop_less(params["experts"], x, probabilities, config)
    else:
        y, first = _with_places(params["experts"], x, probabilities, config, plan)
    aux = config.experts * sum_(mean(first, axis=(0, 1)) * mean(probabilities, axis=(0, 1)))
    return y, aux


def _drop_less(experts: Any, x: Array, probabilities: Array, config: Config) -> tuple[Array, Array]:
    numbers, chosen, gates = choose(probabilities, config)
    return nn.experts(x, stack(numbers, axis=2), astype(stack(gates, axis=2), x.dtype), **experts), chosen[0]


def _with_places(
    experts: Any, x: Array, probabilities: Array, config: Config, plan: Plan | None
) -> tuple[Array, Array]:
    b, s, width = x.shape
    e, c = config.experts, config.capacity(s)
    dispatch, combine, first = route(probabilities, config)
    to_places = matrix_transpose(reshape(astype(dispatch, x.dtype, copy=False), (b, s, e * c)))
    inside = constrained(plan, reshape(to_places @ x, (b, e, c, width)), "expert_in")
    hidden = nn.swiglu(inside @ experts["gate"], inside @ experts["up"])
    outside = constrained(plan, hidden @ experts["down"], "expert_out")
    return reshape(astype(combine, x.dtype, copy=False), (b, s, e * c)) @ reshape(outside, (b, e * c, width)), first
