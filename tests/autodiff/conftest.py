import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import meshtape as mt

# The samples of calls are read by several tests, and by the page on derivatives.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def derivatives_along() -> Callable[..., list[float]]:
    def along(fn: Callable[..., mt.Array], x: mt.Array, v: mt.Array, w: mt.Array, order: int = 4) -> list[float]:
        """d^k/dt^k <fn(x + t v), w> at t = 0 for k = 0 … order, by nested reverse mode."""
        f = lambda t: mt.sum(fn(x + t * v) * w)  # noqa: E731
        out = []
        for _ in range(order + 1):
            out.append(float(f(mt.asarray(0.0))))
            f = mt.grad(f)
        return out

    return along
