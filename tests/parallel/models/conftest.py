from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import meshtape as mt

de = mt.models.decoder


@pytest.fixture
def as_on_one_rank() -> Callable[..., None]:
    def check(config: Any, plan: str, axes: Mapping[str, int], ids: np.ndarray) -> None:
        """The loss and all gradients of a decoder on a mesh are those of one rank."""
        params = de.init(mt.random.key(0), config)
        data = {"ids": ids[:, :-1], "labels": ids[:, 1:]}

        def loss(p: Any, b: Any, plan: Any = None) -> mt.Array:
            total, weight = de.loss(p, b, config, plan=plan)
            return total / weight

        value, grads = mt.value_and_grad(loss)(params, mt.tree.tree_map(mt.asarray, data))
        named, mesh = de.plan(plan), mt.Mesh(axes)
        step = mt.compile(lambda p, b: mt.value_and_grad(lambda p: loss(p, b, named))(p))
        v, g = step(named.distribute(params, mesh), mt.distribute(data, named.batch(mesh)))
        assert abs(float(v) - float(value)) < 2e-6
        for a, b in zip(mt.tree.flatten(grads)[0], mt.tree.flatten(g)[0], strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=5e-7)

    return check
