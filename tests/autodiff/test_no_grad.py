"""Blocks of ``mt.no_grad``, also in generators and coroutines that are suspended there."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest

import meshtape as mt
from meshtape.arrays.core.op import state
from meshtape.errors import GradientError

V = mt.asarray([1.0, 2.0])


def doubled(v):
    with mt.no_grad():
        for k in (2.0, 3.0):
            yield v * k


def pairs(v):
    for k in (2.0, 3.0):
        with mt.no_grad():
            constant = v * k
        yield constant


async def slow(v):
    with mt.no_grad():
        await asyncio.sleep(0)
        return v * 2.0


def in_a_loop(v):
    return sum(mt.sum(y * v) for y in doubled(v))


def after_one(v):
    next(held := doubled(v))
    y = mt.sum(v * v)
    held.close()
    return y


def in_another_task(v):
    async def both():
        task = asyncio.ensure_future(slow(v))
        await asyncio.sleep(0)
        y = mt.sum(v * v)
        await task
        return y

    return asyncio.run(both())


@pytest.mark.parametrize(
    ("f", "compiled"),
    [(in_a_loop, False), (in_a_loop, True), (after_one, False), (after_one, True), (in_another_task, False)],
)
def test_who_computes_while_another_is_suspended_in_a_block_is_told(f, compiled):
    gradient = mt.compile(mt.grad(f)) if compiled else mt.grad(f)
    with pytest.raises(GradientError, match=r"suspended inside of its mt\.no_grad\(\) block"):
        gradient(V)
    assert mt.grad(lambda v: mt.sum(v * v))(V).tolist() == [2.0, 4.0]


@contextlib.contextmanager
def frozen():
    with mt.no_grad():
        yield


def by_a_context_manager(v):
    with frozen():
        y = v * 2.0
    return mt.sum(y * v)


def closed_before(v):
    held = doubled(v)
    y = next(held)
    held.close()
    return mt.sum(y * v)


def of_constants(v):
    y = 0.0
    for _ in doubled(V):
        y = mt.asarray(1.0) + 1.0
    return mt.sum(v * v) * y / y


def left_before_the_yield(v):
    return next(pairs(v)) @ v


def computed_in_the_generator(v):
    y, _ = list(doubled(v))
    return y @ v


def in_a_coroutine(v):
    return asyncio.run(slow(v)) @ v


@pytest.mark.parametrize(
    "f",
    [
        by_a_context_manager,
        closed_before,
        of_constants,
        left_before_the_yield,
        computed_in_the_generator,
        in_a_coroutine,
    ],
)
def test_blocks_that_take_nothing_from_others(f):
    assert mt.grad(f)(V).tolist() == [2.0, 4.0]


def test_a_generator_goes_on_where_no_tape_was():
    held = doubled(V)
    next(held)
    assert mt.grad(lambda v: mt.sum(v * v))(V).tolist() == [2.0, 4.0]
    assert [y.tolist() for y in held] == [[3.0, 6.0]]


def test_a_block_that_is_closed_out_of_turn_takes_nothing_away():
    held = doubled(V)
    with mt.Tape() as tape:
        tape.watch(V)
        next(held)
    with mt.Tape() as other:
        other.watch(V)
        held.close()
        y = mt.sum(V * V)
    assert other.gradient(y, V).tolist() == [2.0, 4.0]
    assert state.recorders == ()
    with mt.Tape() as tape:
        tape.watch(V)
        next(held := doubled(V))
        with mt.no_grad():
            held.close()
        y = mt.sum(V * V)
    assert tape.gradient(y, V).tolist() == [2.0, 4.0]


def test_an_error_that_is_kept_leaves_the_thread_usable():
    with pytest.raises(GradientError) as kept:
        mt.grad(after_one)(V)
    assert mt.grad(lambda v: mt.sum(v * v))(V).tolist() == [2.0, 4.0]
    del kept
    gc.collect()
    assert state.recorders == ()


def by_a_generator(v):
    return sum(mt.sum(constant * v) for constant in pairs(v))


def by_writing(v):
    u = v * v
    with mt.no_grad():
        u[0] = v[1] * 3.0
        u *= v
    return mt.sum(u * v)


def with_what_is_captured(v):
    with mt.no_grad():
        u = v * V
    return mt.sum(u * v * V)


def in_turns(v):
    def turn(c, a):
        with mt.no_grad():
            u = mt.sin(a) * c
        return c * a + u * a, c

    return mt.scan(turn, mt.asarray(1.0), v)[0]


def in_turns_of_python(v):
    c = mt.asarray(1.0)
    for a in v:
        with mt.no_grad():
            u = mt.sin(a) * c
        c = c * a + u * a
    return c


BLOCKS = [by_a_context_manager, computed_in_the_generator, by_a_generator, by_writing, with_what_is_captured]


@pytest.mark.parametrize("f", [*BLOCKS, in_turns_of_python])
def test_a_program_that_is_differentiated_has_the_same_constants(f):
    for order in (mt.grad, mt.hessian):
        want = order(f)(V).tolist()
        assert order(mt.compile(f))(V).tolist() == want == mt.compile(order(f))(V).tolist()


def test_turns_and_ranks_have_the_same_constants():
    assert mt.grad(in_turns)(V).tolist() == mt.grad(in_turns_of_python)(V).tolist()
    mesh, half = mt.Mesh({"m": 2}), {"m": mt.Shard(0)}

    def block(v):
        with frozen():
            y = v * 2.0
        return y * v

    on_ranks = mt.shard_map(block, mesh, (half,), half)
    assert mt.grad(lambda v: mt.sum(on_ranks(v)))(mt.distribute(V, mesh, **half)).tolist() == [2.0, 4.0]
