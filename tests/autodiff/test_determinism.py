"""A compiled function repeats what it drew or read while it was traced: that is refused before anything runs."""

from __future__ import annotations

import os
import random
import threading
import time

import numpy as np
import pytest

import meshtape as mt

GENERATOR = np.random.default_rng(0)
LEGACY = np.random.RandomState(0)
PYTHON = random.Random(0)


def drawn_by_a_helper(x):
    return x * GENERATOR.normal()


DRAWS = {
    "random": lambda x: x * random.random(),
    "numpy": lambda x: x * np.random.rand(),  # noqa: NPY002
    "a generator of the module": lambda x: x + GENERATOR.normal(),
    "in a helper": lambda x: drawn_by_a_helper(x) + 1.0,
    "a legacy generator": lambda x: x + LEGACY.rand(),
    "Python's own": lambda x: x + PYTHON.gauss(),
    "a fresh generator": lambda x: x + np.random.default_rng().normal(),
    "a clock": lambda x: x + time.perf_counter(),
    "the system": lambda x: x + int.from_bytes(os.urandom(6)),
    "a constant": lambda x: x + mt.asarray(np.random.normal(size=3)),  # noqa: NPY002
    "the number of entries": lambda x: sum(x * k for k in range(1, GENERATOR.integers(2, 1 << 9))),
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_never_becomes_part_of_a_program(name):
    draws = DRAWS[name]
    f = mt.compile(draws)
    with pytest.raises(mt.errors.NondeterministicError, match=r"traced twice and gave .* draw with mt\.random"):
        f(mt.ones(3))
    assert f.signatures == 0
    with pytest.raises(ValueError, match="traced twice"):  # as a gradient's, and on a mesh
        mt.compile(mt.grad(lambda x: mt.sum(draws(x) ** 2)))(mt.distribute(mt.ones(3), mt.Mesh({"a": 2})))


def test_the_message_names_the_function_the_call_and_the_line():
    def jitter(x):
        return mt.tanh(x) * random.random()

    with pytest.raises(
        mt.errors.NondeterministicError,
        match=r"\[compile\] jitter .* multiply\(%1, 0\.\d+\).*test_determinism\.py:\d+, in jitter",
    ):
        mt.compile(jitter)(mt.ones(3))


def test_a_generator_that_is_an_argument():
    with pytest.raises(mt.errors.NondeterministicError):
        mt.compile(lambda x, rng: x + rng.normal())(mt.ones(3), np.random.default_rng(0))


def test_what_does_not_enter_the_program_is_nobodys_business():
    seen = []

    def step(x):
        start = time.perf_counter()
        y = x * 2.0
        seen.append((time.perf_counter() - start, random.random()))
        return y + np.random.default_rng(7).normal()  # the same each time

    expected = 2.0 + np.random.default_rng(7).normal()
    np.testing.assert_array_equal(mt.compile(step)(mt.ones(3)), [expected] * 3)
    assert len(seen) == 1


def test_all_others_are_traced_once(capsys):
    def step(x, key):
        print("traced")
        return x + mt.random.normal(key, x.shape)

    f = mt.compile(step)
    assert not np.array_equal(f(mt.ones(3), mt.random.key(0)), f(mt.ones(3), mt.random.key(1)))
    assert capsys.readouterr().out == "traced\n"


def test_another_thread_may_draw_meanwhile():
    ready, over = threading.Event(), threading.Event()

    def draw():
        while not over.is_set():
            random.random()
            ready.set()

    def step(x):
        ready.clear()
        assert ready.wait(60)  # the generator has moved by now
        return x * 2.0

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        np.testing.assert_array_equal(mt.compile(step)(mt.ones(3)), [2.0] * 3)
    finally:
        over.set()
        thread.join()


def on_ranks(fn):
    mesh = mt.Mesh({"x": 2})
    split = {"x": mt.Shard(0)}
    return mt.shard_map(fn, mesh, in_placements=split, out_placements=split)


def test_code_of_ranks_is_the_same_when_it_does_the_same():
    def timed(x):
        time.perf_counter()  # its name alone has the function looked at twice
        return on_ranks(lambda b: b * 2.0)(x)

    np.testing.assert_array_equal(np.asarray(mt.compile(timed)(mt.ones(4))), np.full(4, 2.0))


def test_what_ranks_draw_is_refused():
    def drawn(x):
        return on_ranks(lambda b: b * random.random())(x)

    with pytest.raises(mt.errors.NondeterministicError, match="traced twice"):
        mt.compile(drawn)(mt.ones(4))


def test_names_in_our_own_functions_are_no_reason_to_trace_twice():
    """``asarray`` reads ``state.now``, which is no clock."""
    asarray, traced = mt.asarray, []

    def fn(x):
        traced.append(x.shape)
        return asarray(x) * 2.0

    mt.compile(fn)(mt.ones(3))
    assert traced == [(3,)]
