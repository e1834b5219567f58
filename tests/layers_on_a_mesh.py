"""Layers that are trained on a mesh: what does not fit on its GPU is compared with what does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import meshtape as mt


def trained(
    mesh: mt.Mesh,
    optimizer: Any,
    layers: Sequence[np.ndarray],
    x: np.ndarray,
    y: np.ndarray,
    compiled: bool,
    turns: int,
) -> list[np.ndarray]:
    """Losses and weights of some steps."""

    def loss(weights: Any, x: Any, y: Any) -> Any:
        for w in weights:
            x = mt.tanh(x @ w)
        return mt.mean((x - y) ** 2)

    def step(weights: Any, slots: Any, x: Any, y: Any) -> Any:
        value, gradients = mt.value_and_grad(loss)(weights, x, y)
        return value, *optimizer.update(weights, gradients, slots)

    run = mt.compile(step) if compiled else step
    weights = [mt.distribute(w, mesh) for w in layers]
    data = [mt.distribute(a, mesh) for a in (x, y)]
    slots, losses = optimizer.init(weights), []
    for _ in range(turns):
        value, weights, slots = run(weights, slots, *data)
        losses.append(np.asarray(value))
    return [*losses, *map(np.asarray, weights)]
