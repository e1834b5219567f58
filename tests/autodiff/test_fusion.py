"""Fused elementwise chains give the bits of the unfused run, for every shape, dtype and way of broadcasting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape.autodiff import fusion
from meshtape.autodiff.fusion import Group, executable, fuse

UNARY = (mt.exp, mt.tanh, mt.abs, mt.nn.relu, mt.nn.sigmoid, mt.negative, mt.square, lambda x: (x > 0).astype(x.dtype))
BINARY = (mt.add, mt.multiply, mt.maximum, mt.subtract, lambda x, y: mt.where(x > y, x, y))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that every array of the tests has many, with a ragged last one."""
    monkeypatch.setattr(fusion, "SMALLEST", 1)
    monkeypatch.setattr(fusion, "BLOCK", 7)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_fused_chains_equal_eager_ones(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    operands = [rng.standard_normal(shape).astype(data.draw(st.sampled_from([np.float32, np.float64])))]
    for _ in range(2):
        lead = data.draw(st.integers(0, len(shape)))
        own = tuple(n if data.draw(st.booleans()) else 1 for n in shape[lead:])
        operands.append(rng.standard_normal(own).astype(operands[0].dtype))
    recipe = data.draw(
        st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=9)
    )

    def fn(*xs: mt.Array) -> tuple[mt.Array, ...]:
        values = [x + 0.0 if i else x * 1.0 for i, x in enumerate(xs)]
        values[0] = values[0] + values[1] + values[2]
        for kind, a, b in recipe:
            x, y = values[a % len(values)], values[b % len(values)]
            values.append(UNARY[kind](x) if kind < len(UNARY) else BINARY[kind - len(UNARY)](x, y))
        return tuple(values[-3:])

    arrays = [mt.asarray(x) for x in operands]
    found, expected = mt.compile(fn)(*arrays), fn(*arrays)
    for f, e in zip(found, expected, strict=True):
        assert f.dtype == e.dtype
        np.testing.assert_array_equal(f.numpy(), e.numpy())


def test_a_chain_becomes_one_group_and_nothing_else_does() -> None:
    program = mt.compile(lambda x, w: mt.sum(mt.tanh(x * 2.0 + 1.0) @ w)).program(mt.ones((6, 4)), mt.ones((4, 2)))
    parts = fuse(program)
    assert [type(p).__name__ for p in parts] == ["Group", "Entry", "Entry"]
    assert len(parts[0].entries) == 3
    assert len(parts[0].outputs) == 1, "intermediate values are never written in full"


def test_small_arrays_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "SMALLEST", 100)
    program = mt.compile(lambda x: x * 2.0 + 1.0).program(mt.ones(99))
    assert not any(isinstance(p, Group) for p in fuse(program))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_share_the_blocks(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "SMALLEST_FOR_THREADS", 1)
    monkeypatch.setattr(fusion, "_threads", lambda: threads)
    x = np.arange(101.0)
    program = mt.compile(lambda x: mt.exp(-x) * 3.0).program(mt.asarray(x))
    (group,) = fuse(program)
    np.testing.assert_array_equal(executable(group, program)(x)[0], np.exp(-x) * 3.0)


def test_non_contiguous_inputs() -> None:
    x = mt.asarray(np.arange(60.0).reshape(6, 10), copy=False)
    compiled = mt.compile(lambda x: mt.tanh(x) + x * x)
    for view in (x.T, x[::2, ::-1], x[:, 3:4]):
        np.testing.assert_array_equal(compiled(view).numpy(), (mt.tanh(view) + view * view).numpy())


def test_an_error_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "SMALLEST_FOR_THREADS", 1)
    monkeypatch.setattr(fusion, "_threads", lambda: 2)
    x = np.arange(100.0)
    program = mt.compile(lambda x: x * 2.0 + 1.0).program(mt.asarray(x))
    (group,) = fuse(program)
    run = executable(group, program)
    with pytest.raises(TypeError):
        run(np.full(100, "x", dtype=object))
