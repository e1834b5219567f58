"""Training on one GPU whose memory holds less than the state: blocks wait in host memory, and nothing else changes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from layers_on_a_mesh import trained as trained_on

import meshtape as mt
from meshtape import errors
from meshtape.parallel.base.device_memory import memory_of, order_of

LAYERS, WIDTH = 8, 32
STATE = 3 * LAYERS * WIDTH * WIDTH * 8
"""Bytes of the weights and of AdamW's two moments."""


def trained(mesh: mt.Mesh, compiled: bool = True, turns: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(WIDTH, WIDTH)) / 6 for _ in range(LAYERS)]
    x, y = (rng.normal(size=(4, WIDTH)) for _ in range(2))
    return trained_on(mesh, mt.optim.adamw(1e-2), weights, x, y, compiled, turns)


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


@pytest.mark.parametrize(("ranks", "blocks"), [(2, 3.5), (3, 4.5), (4, 5.5)])
def test_a_call_of_several_ranks_that_does_not_fit_ends(gpus: Any, ranks: int, blocks: float) -> None:
    with gpus(1, int(blocks * 80_000)), mt.Mesh({"d": ranks}, device="cuda") as mesh:
        x = mt.distribute(np.ones((100 * ranks, 100)), mesh, d=mt.Shard(0))
        with pytest.raises(errors.OutOfMemory, match="failed in add"):
            np.asarray(x + x)


@pytest.mark.parametrize("blocks", [3.4, 4.4, 6.2])
def test_turned_blocks_come_back_turned(gpus: Any, blocks: float) -> None:
    """The order of a sum is that of the memory."""

    def summed(mesh: mt.Mesh) -> list[np.ndarray]:
        rng = np.random.default_rng(2)
        x = mt.compute(mt.distribute(rng.normal(size=(200, 200)), mesh).T)
        others = [mt.compute(mt.distribute(rng.normal(size=(200, 200)), mesh) * 2.0) for _ in range(4)]
        return [np.asarray(y) for y in (mt.sum(x, axis=0), mt.sum(x, axis=1), *others)]

    with gpus(1), mt.Mesh({"d": 1}, device="cuda") as mesh:
        wanted = summed(mesh)
    with gpus(1, int(blocks * 320_000)), mt.Mesh({"d": 1}, device="cuda") as mesh:
        assert all(map(np.array_equal, summed(mesh), wanted))


def test_blocks_with_gaps_stay(gpus: Any) -> None:
    with gpus(1):
        memory = memory_of("cuda:0")
        with memory.using():
            whole = memory.put(np.arange(12.0).reshape(3, 4))
            there = memory.spilled(whole.T)
            back = memory.put(there)
            assert (there.strides, back.strides) == (whole.T.strides,) * 2
            assert order_of(whole[:, :3]) is None
            assert order_of(whole[::-1]) is None
            assert order_of(whole[:0, :3]) is not None


@pytest.mark.parametrize("client", [False, True], ids=["local", "worker"])
def test_a_loop_whose_carry_and_results_do_not_fit(gpus: Any, threads: Any, client: bool) -> None:
    """Blocks that an earlier turn has left go to the host, and make room for the results of all turns."""
    where = {"client": threads, "workers": list(threads.scheduler_info()["workers"])[:1]} if client else {}

    def turn(carry: Any, x: Any) -> Any:
        return tuple(mt.sin(c) + x for c in carry), mt.concat([carry[0], carry[1]])

    def scanned(mesh: mt.Mesh) -> list[np.ndarray]:
        rng = np.random.default_rng(3)
        others = [mt.compute(mt.distribute(np.full((100, 100), i), mesh) * 1.0) for i in range(4)]
        carry = tuple(mt.distribute(rng.normal(size=(100, 100)), mesh) for _ in range(6))
        carry, results = mt.scan(turn, carry, mt.distribute(rng.normal(size=(3,)), mesh))
        return [*map(np.asarray, carry), np.asarray(results), *map(np.asarray, others)]

    with gpus(1), mt.Mesh({"d": 1}, device="cuda", **where) as mesh:
        wanted = scanned(mesh)
    with gpus(1, int(12.5 * 80_000)) as cupy, mt.Mesh({"d": 1}, device="cuda", **where) as mesh:
        assert all(map(np.array_equal, scanned(mesh), wanted))
        assert cupy.memory.peak <= 12.5 * 80_000


def test_arrays_of_another_mesh_make_room(gpus: Any) -> None:
    with gpus(1, int(6.2 * 80_000)), mt.Mesh({"d": 1}, device="cuda") as one, mt.Mesh({"e": 1}, device="cuda") as two:
        idle = [mt.compute(mt.distribute(np.full((100, 100), i), one) * 2.0) for i in range(5)]
        x = mt.distribute(np.ones((100, 100)), two)
        np.testing.assert_array_equal(np.asarray(x * 2.0 + mt.sin(x)), 2.0 + np.sin(np.ones((100, 100))))
        for i, y in enumerate(idle):
            np.testing.assert_array_equal(np.asarray(y), np.full((100, 100), i * 2.0))


def test_threads_share_a_mesh_that_is_short_of_memory(gpus: Any) -> None:
    with gpus(1, int(12.2 * 80_000)), mt.Mesh({"d": 1}, device="cuda") as mesh:

        def work(seed: int) -> bool:
            x = mt.distribute(np.full((100, 100), float(seed)), mesh)
            kept = []
            for i in range(12):
                x = mt.compute(x + 1.0)
                kept.append(x)
                if not np.array_equal(np.asarray(x), np.full((100, 100), seed + i + 1.0)):
                    return False
            return all(np.array_equal(np.asarray(k), np.full((100, 100), seed + i + 1.0)) for i, k in enumerate(kept))

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(8)))


def test_blocks_of_another_device_go_from_there(gpus: Any) -> None:
    with gpus(2):
        one, two = memory_of("cuda:0"), memory_of("cuda:1")
        with one.using():
            block = one.put(np.arange(6.0).reshape(2, 3))
        with two.using():
            np.testing.assert_array_equal(two.spilled(block), np.arange(6.0).reshape(2, 3))
