"""Training on one GPU whose memory holds less than the state: blocks wait in host memory, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape import errors
from meshtape.parallel.base.device_memory import memory_of

LAYERS, WIDTH = 8, 32
STATE = 3 * LAYERS * WIDTH * WIDTH * 8
"""Bytes of the weights and of AdamW's two moments."""


def trained(mesh: mt.Mesh, compiled: bool = True, turns: int = 3) -> list[np.ndarray]:
    """Losses and weights of some steps."""
    rng, update = np.random.default_rng(0), mt.optim.adamw(1e-2)

    def loss(weights: Any, x: Any, y: Any) -> Any:
        for w in weights:
            x = mt.tanh(x @ w)
        return mt.mean((x - y) ** 2)

    def step(weights: Any, slots: Any, x: Any, y: Any) -> Any:
        value, gradients = mt.value_and_grad(loss)(weights, x, y)
        return value, *update.update(weights, gradients, slots)

    run = mt.compile(step) if compiled else step
    weights = [mt.distribute(rng.normal(size=(WIDTH, WIDTH)) / 6, mesh) for _ in range(LAYERS)]
    x, y = (mt.distribute(rng.normal(size=(4, WIDTH)), mesh) for _ in range(2))
    slots, losses = update.init(weights), []
    for _ in range(turns):
        value, weights, slots = run(weights, slots, x, y)
        losses.append(np.asarray(value))
    return [*losses, *map(np.asarray, weights)]


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_larger_than_the_device_trains_to_the_same_bits(gpus: Any, compiled: bool, ranks: int) -> None:
    with gpus(1), mt.Mesh({"d": ranks}, device="cuda") as mesh:
        wanted = trained(mesh, compiled)
    limit = ranks * STATE // 2  # each rank has a state of its own
    with gpus(1, limit) as cupy, mt.Mesh({"d": ranks}, device="cuda") as mesh:
        found = trained(mesh, compiled)
        assert cupy.memory.peak <= limit
    assert all(map(np.array_equal, found, wanted))


def test_it_does_so_on_a_worker_of_a_cluster(gpus: Any, threads: Any) -> None:
    where = {"client": threads, "workers": list(threads.scheduler_info()["workers"])[:1], "device": "cuda"}
    with gpus(1), mt.Mesh({"d": 1}, **where) as mesh:
        wanted = trained(mesh)
    with gpus(1, STATE // 2) as cupy, mt.Mesh({"d": 1}, **where) as mesh:
        others = [mt.compute(mt.distribute(np.full((WIDTH, WIDTH), i), mesh) * 2.0) for i in range(9)]
        found = trained(mesh)
        assert cupy.memory.peak <= STATE // 2
        for i, x in enumerate(others):
            np.testing.assert_array_equal(np.asarray(x), np.full((WIDTH, WIDTH), i * 2.0))
    assert all(map(np.array_equal, found, wanted))


def test_turns_of_a_loop_that_do_not_fit(gpus: Any) -> None:
    def turn(carry: Any, x: Any) -> Any:
        first, *rest = carry
        return (*rest, mt.sin(first) + x), mt.sum(first)

    def scanned(mesh: mt.Mesh) -> list[np.ndarray]:
        rng = np.random.default_rng(1)
        carry = tuple(mt.distribute(rng.normal(size=(WIDTH, WIDTH)), mesh) for _ in range(6))
        carry, sums = mt.scan(turn, carry, mt.distribute(rng.normal(size=(9,)), mesh))
        return [*map(np.asarray, carry), np.asarray(sums)]

    with gpus(1), mt.Mesh({"d": 1}, device="cuda") as mesh:
        wanted = scanned(mesh)
    with gpus(1, 4 * WIDTH * WIDTH * 8 + 4096), mt.Mesh({"d": 1}, device="cuda") as mesh:
        assert all(map(np.array_equal, scanned(mesh), wanted))


def test_one_call_that_does_not_fit_is_told(gpus: Any) -> None:
    with gpus(1, 100_000), mt.Mesh({"d": 1}, device="cuda") as mesh:
        x = mt.distribute(np.ones((100, 100)), mesh)
        with pytest.raises(errors.OutOfMemory, match=r"rank 0 failed in add.*Out of memory allocating 80000 bytes"):
            np.asarray(x + x)
        np.testing.assert_array_equal(np.asarray(x[:9, :9] + 1), np.full((9, 9), 2.0))


def test_blocks_go_to_pinned_memory_and_keep_their_dtype(gpus: Any) -> None:
    with gpus(1):
        memory = memory_of("cuda:0")
        for host in (np.arange(6, dtype=np.int16).reshape(2, 3), np.ones((3, 0)), np.ones(5, mt.bfloat16), np.ones(())):
            with memory.using():
                there = memory.spilled(memory.put(host))
            assert (there.dtype, there.shape) == (host.dtype, host.shape)
            np.testing.assert_array_equal(there, host)
            assert memory.spilled(there) is there
