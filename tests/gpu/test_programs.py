"""Compiled programs on a GPU: fused chains, CUDA graphs, and steps in which the host waits nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.backends.backend import cupy_backend
from meshtape.autodiff.tape import backward

RNG = np.random.default_rng(1)


def host_of(fn: Any, *arrays: np.ndarray) -> Any:
    """What the same function gives on the CPU."""
    with mt.use_device("cpu"):
        return mt.tree_map(lambda a: a.numpy(), fn(*map(mt.asarray, arrays)))


def check(fn: Any, *arrays: np.ndarray, rtol: float = 1e-5, plain: Any = None) -> None:
    got, want = fn(*map(mt.asarray, arrays)), host_of(plain or fn, *arrays)
    for g, w in zip(*(t if isinstance(t, tuple) else (t,) for t in (got, want)), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(g.numpy().astype(np.float64), w.astype(np.float64), rtol=rtol, atol=rtol)


def chain(x: Any, y: Any) -> Any:
    a = x * y + 1.5
    b = mt.maximum(a - x, -y) * 0.1
    return mt.where(b > 0, b, a), mt.exp(-mt.square(b)), mt.isfinite(b) & (a > 0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "other"), [((1000, 37), (1000, 37)), ((64, 33), (33,)), ((64, 33), (64, 1)), ((7,), ())]
)
def test_fused_chains_agree_with_the_cpu(dtype: str, shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    d = mt.arrays.core.dtypes.parse(dtype)
    x, y = RNG.standard_normal(shape).astype(d), RNG.standard_normal(other).astype(d)
    check(mt.compile(chain), x, y, rtol={8: 1e-12, 4: 1e-5, 2: 2e-2}[d.itemsize])


def layer(w: Any, b: Any, x: Any, g: Any) -> Any:
    y, pull = mt.vjp(lambda w, b: x @ w + b, w, b)
    return y, *pull(g)


@pytest.mark.parametrize("options", [{}, {"cuda_graph": True}])
@pytest.mark.parametrize(
    ("dtype", "rtol"), [("float32", 1e-4), ("float64", 1e-10), ("float16", 2e-2), ("bfloat16", 1e-1)]
)
def test_layers_agree_with_the_cpu(dtype: str, rtol: float, options: dict[str, bool]) -> None:
    """The bias and its gradient in the launches of products, of a stack, at every alignment."""
    d = mt.arrays.core.dtypes.parse(dtype)
    for width, out in ((64, 32), (33, 17)):
        shapes = (width, out), (out,), (2, 40, width), (2, 40, out)
        check(mt.compile(layer, **options), *(RNG.standard_normal(s).astype(d) for s in shapes), rtol=rtol, plain=layer)


def test_a_fused_chain_is_the_unfused_one_to_the_bit() -> None:
    x, y = (
        mt.asarray(RNG.standard_normal(100_003).astype(np.float32)),
        mt.asarray(RNG.standard_normal(100_003).astype(np.float32)),
    )
    for fused, plain in zip(mt.compile(chain)(x, y), chain(x, y), strict=True):
        if plain.dtype != mt.bool:
            np.testing.assert_allclose(fused.numpy(), plain.numpy(), rtol=3e-7)
    a, b = mt.compile(lambda x, y: (x * y + x, mt.maximum(x - y, 0.1 * x)))(x, y)
    np.testing.assert_array_equal(a.numpy(), (x * y + x).numpy())
    np.testing.assert_array_equal(b.numpy(), mt.maximum(x - y, 0.1 * x).numpy())


def test_views_are_read_where_they_are() -> None:
    x = RNG.standard_normal((50, 60)).astype(np.float32)
    f = mt.compile(lambda a, b: a * b + 1.0)
    for view in (lambda a: mt.permute_dims(a, (1, 0)), lambda a: a[::2, ::-1], lambda a: a[1:, 1:]):
        v = view(mt.asarray(x))
        w = mt.asarray(np.ones(v.shape, np.float32))
        np.testing.assert_array_equal(f(v, w).numpy(), v.numpy() + 1)


def test_more_than_two_to_the_31_elements(needs_memory: Callable[[int], None]) -> None:
    n = 2**31 + 8
    needs_memory(3 * n)
    x = mt.zeros(n, dtype=mt.int8)
    x[-1] = 5
    y = mt.compile(lambda a: (a + 1) * 2)(x)
    assert y[-3:].tolist() == [2, 2, 12]


# ----- CUDA graphs ----------------------------------------------------------------------------------------------------


def step(w: Any, x: Any, t: Any) -> Any:
    def loss(w: Any) -> Any:
        h = mt.layer_norm(mt.tanh(x @ w[0] + 1.0), w[0].shape[1])
        return mt.mean((mt.nn.gelu(h @ w[1]) - t) ** 2)

    value, grads = mt.value_and_grad(loss)(w)
    return value, [a - 0.1 * g for a, g in zip(w, grads, strict=True)]


def batch() -> tuple[Any, Any, Any]:
    sizes = [(16, 32), (32, 8)]
    w = [mt.asarray(RNG.standard_normal(s).astype(np.float32)) for s in sizes]
    return (
        w,
        mt.asarray(RNG.standard_normal((64, 16)).astype(np.float32)),
        mt.asarray(RNG.standard_normal((64, 8)).astype(np.float32)),
    )


def test_a_graphed_step_gives_the_numbers_of_its_code() -> None:
    graphed = mt.compile(step, cuda_graph=True)
    kept = []
    for _ in range(4):
        args = batch()
        (value, new), (want, wants) = graphed(*args), step(*args)
        for g, w in zip((value, *new), (want, *wants), strict=True):
            np.testing.assert_allclose(g.numpy(), w.numpy(), rtol=2e-5, atol=1e-6)
        kept.append((value, want))
    for value, want in kept:  # results are their callers', whatever ran since
        np.testing.assert_allclose(float(value), float(want), rtol=2e-5)


def test_graphed_results_survive_other_work_on_the_device() -> None:
    graphed = mt.compile(lambda a: (mt.exp(a) * 2.0, (a @ a) + 1.0), cuda_graph=True)
    x = mt.asarray(RNG.standard_normal((128, 128)).astype(np.float32))
    first = [r.numpy() for r in graphed(x)]
    for _ in range(20):
        noise = [mt.asarray(RNG.standard_normal((128, 128)).astype(np.float32)) + 1.0 for _ in range(8)]
        del noise
        for r, f in zip(graphed(x), first, strict=True):
            np.testing.assert_array_equal(r.numpy(), f)


def test_a_graph_that_is_given_its_state_keeps_what_others_hold() -> None:
    graphed = mt.compile(step, cuda_graph=True, donate=0)
    w, x, t = batch()
    plain = [a + 0.0 for a in w]
    kept = []
    for n in range(6):
        (value, w), (want, plain) = graphed(w, x, t), step(plain, x, t)
        np.testing.assert_allclose(float(value), float(want), rtol=2e-5)
        for a, b in zip(w, plain, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-5, atol=1e-6)
        if n in (1, 2):
            kept.append((w[0][1:], plain[0][1:]))
    for a, b in kept:
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-5, atol=1e-6)


# ----- waits ----------------------------------------------------------------------------------------------------------


def test_a_step_waits_nowhere() -> None:
    import cupy

    args = batch()
    compiled = mt.compile(step)
    compiled(*args)
    cupy.cuda.get_current_stream().synchronize()
    with mt.host_waits() as waits:
        for _ in range(3):
            value, _ = compiled(*args)
        x = mt.asarray(np.ones(5))
        x[x > 0] = 3.0
        x = x.at[x > 1].add(1.0)
    assert waits == []
    assert x.tolist() == [4.0] * 5
    assert np.isfinite(float(value))


def test_unchecked_indices_wrap_around() -> None:
    x = mt.asarray(np.arange(5.0))
    with mt.index_checks(False), mt.host_waits() as waits:
        y = x[mt.asarray([5, -6, 2])]
        z = x.at[mt.asarray([7])].add(1.0)
    assert waits == []
    assert y.tolist() == [0.0, 4.0, 2.0]
    assert z.tolist() == [0, 1, 3, 3, 4]
    with pytest.raises(IndexError, match="index 5 is out of bounds for axis 0 with size 5"):
        x[mt.asarray([5])]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cotangents_that_a_kernel_rounds_have_the_same_bits(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums and chains are one launch with the rounding that would be the next call."""
    d = mt.arrays.core.dtypes.parse(dtype)
    w = [mt.asarray((0.3 * RNG.standard_normal(s)).astype(d)) for s in ((16, 24), (16, 24), (24, 16), (16,))]
    x, seed = (mt.asarray(RNG.standard_normal((2, 6, 16)).astype(d)) for _ in range(2))

    def block(w: Any, x: Any) -> Any:
        h = mt.nn.rms_norm(x, 16, w[3])
        h = mt.nn.swiglu(h @ w[0], h @ w[1])
        h = mt.nn.gelu(h) * mt.reshape(h, (2, 6, 24))
        return x + mt.nn.relu(h @ w[2])

    def slopes() -> list[np.ndarray]:
        pull = mt.vjp(lambda w, x: block(w, block(w, x)), w, x)[1]
        return [a.numpy() for a in mt.tree.flatten(pull(seed))[0]]

    early = slopes()
    monkeypatch.setattr(backward, "_rounded_next", lambda *_: {})
    for a, b in zip(early, slopes(), strict=True):
        assert a.dtype == d
        np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))


def test_indices_among_the_arguments_are_checked() -> None:
    """Without a wait where they came from host memory; nothing is given up by a call that is refused."""

    def step(table: Any, ids: Any) -> Any:
        rows = table[mt.reshape(ids[:, 1:], (-1,)).astype(mt.int64)]
        return table.at[ids[:, 1]].add(1.0), mt.sum(rows)

    good, bad = (mt.asarray(np.array([[9, a, b], [-9, 0, 1]], np.int32)) for a, b in ((3, -4), (4, 0)))
    for graph in (False, True):
        table = mt.asarray(np.arange(12.0).reshape(4, 3))
        run = mt.compile(step, cuda_graph=graph, donate=0)
        with mt.host_waits() as waits:
            table, _ = run(table, mt.asarray(np.array([[0, 1, 2]], np.int32)))
            table, _ = run(table, mt.asarray(np.array([[0, 1, 2], [3, 0, 1]], np.int32)))  # a view that is a copy
        assert waits == []
        before = table.tolist()
        with pytest.raises(mt.errors.ArrayIndexError, match="index 4 is out of bounds for axis 0 with size 4"):
            run(table, bad)
        assert table.tolist() == before
        with mt.use_deterministic(False):  # of sorts the emulation makes no part of a graph
            with mt.host_waits() as waits:  # columns that no read takes may hold anything
                mt.compile(step, cuda_graph=graph)(table, good)
            assert waits
            with mt.index_checks(False):
                mt.compile(step, cuda_graph=graph)(table, bad)


@pytest.mark.parametrize("graph", [False, True])
def test_constants_of_a_program_go_to_its_arguments(graph: bool) -> None:
    """Whatever the default device is; and a CPU's programs stay there."""
    calls = {
        "a list": lambda x: x * [1.0, 2.0, 3.0],
        "triu": mt.triu,
        "pad": lambda x: mt.pad(x, 1),
        "clip": lambda x: mt.clip(x, [-1.0, 0.0, 0.0], 1.0),
        "diag": mt.grad(lambda x: mt.sum(mt.diag(x) ** 2)),
        "batch_norm": mt.grad(lambda x: mt.sum(mt.nn.batch_norm(x, None, None, None, None, training=True)[0] ** 3)),
        "new": lambda x: mt.ones(3) + x,
    }
    host = np.arange(9.0).reshape(3, 3) - 4.0
    with mt.use_device("cpu"):
        for name, fn in calls.items():
            got = mt.compile(fn, cuda_graph=graph)(mt.asarray(host, device="cuda:0"))
            want = mt.compile(fn)(mt.asarray(host))
            assert (name, str(got.device), str(want.device)) == (name, "cuda:0", "cpu")
            np.testing.assert_allclose(got.numpy(), want.numpy(), 1e-6)


# ----- where things are -----------------------------------------------------------------------------------------------


def test_cotangents_lie_where_their_values_do() -> None:
    """Of NumPy, as numbers, from hooks and from users' derivatives, beside whatever default there is."""
    host, hook = np.ones(3), mt.gradient_hook
    own = mt.custom_vjp(mt.sin)
    own.defvjp(lambda v: (mt.sin(v), None), lambda r, g: (2 * host,))
    for where, default in (("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda:0")):
        x = mt.asarray([1.0, 2.0, 3.0], device=where)
        with mt.use_device(default):
            found = [
                mt.vjp(mt.sum, x)[1](2.0)[0],
                mt.vjp(lambda v: v[::-1], x)[1](2 * host)[0],
                mt.jvp(lambda v: 2 * v, (x,), (host,))[1],
                mt.hvp(lambda v: mt.sum(v * v), x, host),
                mt.grad(lambda v: mt.sum(hook(v, lambda g: 2 * host)))(x),
                mt.grad(lambda v: mt.sum(own(v)))(x),
                mt.grad(lambda a, b: mt.sum(a * b), argnums=1)(2 * x / x, host),
                mt.scan(lambda s, e: (s + e, None), x - x, np.ones((2, 3)))[0],
            ]
            states = [mt.optim.sgd(0.5).update(x, host, mt.optim.sgd(0.5).init(x))[0]]
        assert {str(a.device) for a in (*found, *states)} == {where}
        for a in found:
            np.testing.assert_array_equal(a.numpy(), [2.0, 2.0, 2.0])
        other = mt.ones(3, device="cpu" if where == "cuda:0" else "cuda:0")
        with pytest.raises(mt.errors.DeviceError, match="its value on"):
            mt.vjp(mt.sin, x)[1](other)
        with pytest.raises(mt.errors.DeviceError, match="its value on"):
            mt.grad(lambda v, c=other: mt.sum(hook(v, lambda g: c)))(x)


def test_a_compiled_function_is_of_one_device_and_keys_follow() -> None:
    x, key = mt.asarray([1.0, 2.0, 3.0]), mt.random.key(3, device="cpu")
    for graph in (False, True):
        step = mt.compile(lambda v, k: mt.nn.dropout(v, 0.5, key=k), cuda_graph=graph)
        np.testing.assert_array_equal(step(x, key).numpy(), mt.nn.dropout(x, 0.5, key=key).numpy())
        first = mt.compile(lambda k, v: mt.nn.dropout(v, 0.5, key=k), cuda_graph=graph)(key, x)
        np.testing.assert_array_equal(first.numpy(), mt.nn.dropout(x, 0.5, key=key).numpy())
        with pytest.raises(mt.errors.DeviceError, match=r"cpu and cuda:0, and a program runs on one device"):
            mt.compile(lambda a, b: (a + 1, b * 2), cuda_graph=graph)(x, mt.ones(3, device="cpu"))
    held = mt.ones(3, device="cpu")
    with pytest.raises(mt.errors.DeviceError, match="one device"):
        mt.compile(lambda a: (a + 1, held * 2))(x)
    # Of arrays on a CPU what is made inside is there, too.
    made = mt.compile(lambda a: mt.concat([a + np.ones(3), mt.zeros(2)]) * [1.0, 2.0, 3.0, 4.0, 5.0])(held)
    assert str(made.device) == "cpu"


def test_functions_of_numpy_take_arrays_of_cupy() -> None:
    x, theirs = mt.asarray([1.0, 2.0, 3.0]), cupy_backend().xp.asarray([3.0, 2.0, 1.0])
    found = [np.add(x, theirs), np.concatenate([x, theirs])[3:] + x, np.where(theirs > 9, 0.0, x + theirs)]
    for y in found:
        assert isinstance(y, mt.arrays.Array)
        np.testing.assert_array_equal(y.numpy(), [4.0, 4.0, 4.0])
    assert str(mt.full((2,), theirs[0]).device) == "cuda:0"
    np.testing.assert_array_equal(mt.full((2, 3), x).numpy(), [[1.0, 2.0, 3.0]] * 2)
