"""Fused elementwise chains give the bits of the unfused run, for every shape, dtype and way of broadcasting."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape.arrays.backends import cublaslt
from meshtape.arrays.backends import threads as shared
from meshtape.arrays.core.program import trace
from meshtape.autodiff.compiler import cuda_products, fusion
from meshtape.autodiff.compiler.executable import local_executable
from meshtape.autodiff.compiler.fusion import FusedRun, executable, fuse

UNARY = (
    mt.exp,
    mt.tanh,
    mt.abs,
    mt.nn.relu,
    mt.nn.sigmoid,
    mt.negative,
    mt.square,
    lambda x: (x > 0).astype(x.dtype),
    lambda x: mt.sqrt(mt.square(x)),
    lambda x: mt.reciprocal(mt.square(x) + 1.0),
)
BINARY = (
    mt.add,
    mt.multiply,
    mt.maximum,
    mt.subtract,
    lambda x, y: mt.where(x > y, x, y),
    lambda x, y: x / (mt.square(y) + 0.5),
    lambda x, y: 2.0 - x * 3.0 * y,
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that every array of the tests has many, with a ragged last one."""
    monkeypatch.setattr(fusion, "SMALLEST", 1)
    monkeypatch.setattr(fusion, "BLOCK", 7)


@settings(max_examples=80, deadline=None)
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
        st.lists(
            st.tuples(st.integers(0, len(UNARY) + len(BINARY) - 1), st.integers(0, 6), st.integers(0, 6)),
            min_size=2,
            max_size=9,
        )
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


def test_scratch_of_a_value_that_a_call_reads_twice_is_given_to_one_other() -> None:
    def fn(x: mt.Array) -> mt.Array:
        y = x + 1.0
        z = y * y  # the last time that y is read
        a, b = mt.sin(z), mt.cos(z)  # both want its place
        c = a + z
        return c - b * a

    x = mt.asarray(np.linspace(-1.0, 1.0, 40))
    assert len(fuse(mt.compile(fn).program(x))) == 1
    np.testing.assert_array_equal(np.asarray(mt.compile(fn)(x)), np.asarray(fn(x)))


def test_a_chain_becomes_one_group_and_nothing_else_does() -> None:
    program = mt.compile(lambda x, w: mt.sum(mt.tanh(x * 2.0 + 1.0) @ w)).program(mt.ones((6, 4)), mt.ones((4, 2)))
    parts = fuse(program)
    assert [type(p).__name__ for p in parts] == ["FusedRun", "Entry", "Entry"]
    assert len(parts[0].entries) == 3
    assert len(parts[0].outputs) == 1, "intermediate values are never written in full"


def test_what_is_scaled_early_is_scaled_in_the_run_that_reads_it() -> None:
    """All gradients are scaled before the first is used: one group a leaf, and no scaled gradient in memory."""

    def step(ps: list[mt.Array], gs: list[mt.Array], s: mt.Array) -> list[mt.Array]:
        scaled = [g / s for g in gs]
        clipped = [g * 0.5 for g in scaled]
        moved = [g * g * 2.0 for g in clipped]
        return [p - m for p, m in zip(ps, moved, strict=True)]

    ps, gs = [mt.ones(8 + i) * i for i in range(3)], [mt.ones(8 + i) * (i + 2.0) for i in range(3)]
    compiled = mt.compile(step)
    parts = fuse(compiled.program(ps, gs, mt.asarray(4.0)))
    assert [(type(p).__name__, len(p.entries), len(p.outputs)) for p in parts] == [("FusedRun", 5, 1)] * 3
    for found, wanted in zip(compiled(ps, gs, mt.asarray(4.0)), step(ps, gs, mt.asarray(4.0)), strict=True):
        np.testing.assert_array_equal(found.numpy(), wanted.numpy())


def test_an_entry_does_not_wait_where_its_operands_take_more_memory() -> None:
    """``x`` and ``y`` are free once their sum is made, which the product in between does not read."""

    def fn(x: mt.Array, y: mt.Array, w: mt.Array) -> mt.Array:
        total = x * 2.0 + y * 3.0
        return (w @ w) * total

    parts = fuse(mt.compile(fn).program(*[mt.ones((8, 8))] * 3))
    assert [len(p.entries) if isinstance(p, FusedRun) else p.op.name for p in parts] == [3, "matmul", "multiply"]


def test_small_arrays_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "SMALLEST", 100)
    program = mt.compile(lambda x: x * 2.0 + 1.0).program(mt.ones(99))
    assert not any(isinstance(p, FusedRun) for p in fuse(program))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_share_the_blocks(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "SMALLEST_SHARED", 1)
    monkeypatch.setattr(shared, "threads", lambda: threads)
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
    monkeypatch.setattr(shared, "SMALLEST_SHARED", 1)
    monkeypatch.setattr(shared, "threads", lambda: 2)
    x = np.arange(100.0)
    program = mt.compile(lambda x: x * 2.0 + 1.0).program(mt.asarray(x))
    (group,) = fuse(program)
    run = executable(group, program)
    with pytest.raises(TypeError):
        run(np.full(100, "x", dtype=object))


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_done_about_infinities_is_said_by_whoever_calls(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's setting holds in the threads that share the work, and for what runs in C."""
    monkeypatch.setattr(shared, "SMALLEST_SHARED", 1)
    monkeypatch.setattr(shared, "threads", lambda: threads)
    fn = mt.compile(lambda x: (1.0 / x) * 2.0)
    x = mt.zeros(101)
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError, match="divide by zero"):
        fn(x)
    with np.errstate(divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bool(mt.all(mt.isinf(fn(x))))


def test_products_with_their_biases_are_the_numbers_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU's programs: a bias is added, and its gradient summed, by the entry of the product, where nothing comes
    between."""
    monkeypatch.setattr(cublaslt, "library", lambda: None)

    def layers(w, b, v, x):
        return mt.value_and_grad(lambda w, b, v: mt.mean(mt.square(mt.tanh(x @ w + b) @ v)), argnums=(0, 1, 2))(w, b, v)

    def apart(w, b, v, x):
        p, sums = x @ w, mt.sum(v, axis=0)  # each read before the product is
        return p + b, p, (w.T * sums[:, None]) @ v

    rng = np.random.default_rng(0)
    args = [mt.asarray(rng.standard_normal(s).astype(np.float32)) for s in ((4, 5), (5,), (5, 5), (2, 6, 4))]
    for fn, joined in ((layers, ["matmul+add", "matmul+sum"]), (apart, [])):
        given = args if fn is layers else [*args[:2], args[0], args[3]]
        program = trace(fn, tuple(given)).program
        other, buffers = cuda_products.joined(program), [a.numpy() for a in given]
        assert [e.op.name for e in other.entries if "+" in e.op.name] == joined
        for got, want in zip(*(local_executable(p, np)(buffers) for p in (other, program)), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
