"""Training on a GPU: a decoder against the CPU, and a state that is larger than the memory that it may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from layers_on_a_mesh import trained as trained_on

import meshtape as mt
from meshtape.arrays.backends.backend import cupy_backend
from meshtape.parallel.execution import eviction

de = mt.models.decoder
OPTIMIZER = mt.optim.adamw(1e-3)


def decoder_step(config: Any) -> Callable[..., Any]:
    def step(params: Any, slots: Any, tokens: Any) -> Any:
        def loss(p: Any) -> Any:
            total, count = de.loss(p, {"ids": tokens, "labels": tokens}, config)
            return total / count

        value, grads = mt.value_and_grad(loss)(params)
        return *OPTIMIZER.update(params, grads, slots), value

    return step


def trained(step: Callable[..., Any], params: Any, batches: list[np.ndarray], device: str) -> tuple[Any, Any]:
    """The losses of some steps, and all weights that they end with."""
    params = mt.tree_map(lambda a: mt.asarray(a.numpy(), device=device, copy=True), params)
    slots, losses = OPTIMIZER.init(params), []
    for batch in batches:
        params, slots, value = step(params, slots, mt.asarray(batch, device=device))
        losses.append(float(value))
    flat = [a.numpy().astype(np.float64).ravel() for a in mt.tree.flatten(params)[0]]
    return np.asarray(losses), np.concatenate(flat)


@pytest.mark.parametrize("way", ["eager", "compiled", "graph"])
@pytest.mark.parametrize(("dtype", "rtol", "apart"), [("float32", 1e-4, 0.02), ("bfloat16", 2e-2, 0.3)])
def test_a_decoder_trains_as_on_the_cpu(dtype: str, rtol: float, apart: float, way: str, emulated: bool) -> None:
    """Weights may differ by a share of the way that they went: Adam's first steps have the size of the rate, whatever
    the size of a slope, so that a slope near zero whose sign is rounded otherwise goes the other way."""
    size = {"vocab": 32, "width": 16, "layers": 2, "heads": 2, "max_length": 16}
    if not emulated:
        size = {"vocab": 1024, "width": 256, "layers": 4, "heads": 4, "max_length": 128}
    config, shape = de.Config(**size), (2, 12) if emulated else (4, 128)
    batches = list(np.random.default_rng(0).integers(0, config.vocab, (4, *shape)))
    step = decoder_step(config)
    ways = {"eager": step, "compiled": mt.compile(step), "graph": mt.compile(step, cuda_graph=True, donate=(0, 1))}
    with mt.use_device("cpu"):
        params = de.init(mt.random.key(0), config, dtype=mt.arrays.core.dtypes.parse(dtype))
        losses, weights = trained(step, params, batches, "cpu")
    with mt.use_deterministic(not emulated):  # of sorts the emulation makes no part of a graph
        found, there = trained(ways[way], params, batches, "cuda:0")
    np.testing.assert_allclose(found, losses, rtol)
    start = np.concatenate([a.numpy().astype(np.float64).ravel() for a in mt.tree.flatten(params)[0]])
    went = np.linalg.norm(weights - start)
    assert went > 1e-3 * np.sqrt(weights.size)
    assert np.linalg.norm(there - weights) < apart * went


# ----- more than fits -------------------------------------------------------------------------------------------------


def layers_trained(mesh: mt.Mesh, compiled: bool, layers: int, width: int) -> list[np.ndarray]:
    rng, scale = np.random.default_rng(0), np.float32(1 / np.sqrt(width))
    weights = [rng.standard_normal((width, width), np.float32) * scale for _ in range(layers)]
    x, y = (rng.standard_normal((8, width), np.float32) for _ in range(2))
    return trained_on(mesh, OPTIMIZER, weights, x, y, compiled, 3)


@pytest.fixture
def pool() -> Iterator[Any]:
    pool = cupy_backend().xp.get_default_memory_pool()
    yield pool
    pool.set_limit(size=0)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_does_not_fit_trains_to_the_same_bits(
    pool: Any, monkeypatch: pytest.MonkeyPatch, compiled: bool, ranks: int, emulated: bool
) -> None:
    """Two ranks share the device, and each has a state of its own."""
    layers, width = (8, 512) if emulated else (16, 2048)
    state = ranks * 3 * layers * width * width * 4  # weights and two moments
    with mt.Mesh({"d": ranks}, device="cuda") as mesh:
        wanted = layers_trained(mesh, compiled, layers, width)
    moved = []
    evict = eviction.Eviction._evict
    monkeypatch.setattr(eviction.Eviction, "_evict", lambda *args: moved.append(evict(*args)) or moved[-1])
    pool.free_all_blocks()
    pool.set_limit(size=pool.used_bytes() + state * 6 // 10)
    with mt.Mesh({"d": ranks}, device="cuda") as mesh:
        found = layers_trained(mesh, compiled, layers, width)
    assert any(moved)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
