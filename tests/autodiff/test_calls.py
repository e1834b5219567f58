"""checkpoint, custom_vjp and gradient hooks: eager, compiled, nested, and on a mesh."""

from __future__ import annotations

import collections
import gc
import types
import weakref

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.core.array import new_id
from meshtape.arrays.core.op import state


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    yield
    assert state.recorders == ()
    assert state.origin is None
    assert state.site is None


def arr(*values):
    return mt.asarray(list(values), dtype=mt.float64)


def normal(*shape, seed=0):
    return mt.asarray(np.random.default_rng(seed).standard_normal(shape))


W = normal(4, 4, seed=1)


def layer(x, w):
    return mt.tanh(x @ w) * mt.nn.sigmoid(x)


def through(fn, x, w):
    """A loss in which a layer is used twice, its results more than once."""
    y = fn(x, w)
    z = fn(y + x, w)
    return (z * z * y).sum()


# ----- checkpoint -----------------------------------------------------------------------------------------------------

HOW = {
    "eager": lambda f: f,
    "compiled outside": mt.compile,
    "under a second tape": lambda f: lambda *a: mt.vjp(f, *a)[0],
}


@pytest.mark.parametrize("how", HOW)
def test_gradients_of_a_checkpoint_are_the_plain_ones_to_the_bit(how):
    x, w = normal(3, 4), normal(4, 4, seed=1)
    plain = mt.grad(lambda x, w: through(layer, x, w), (0, 1))(x, w)
    again = HOW[how](mt.grad(lambda x, w: through(mt.checkpoint(layer), x, w), (0, 1)))(x, w)
    for a, b in zip(again, plain, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_checkpoints_nest_and_have_derivatives_of_any_order():
    def inner(x):
        return mt.sin(x) * x

    def outer(f):
        return lambda x: mt.exp(f(mt.cos(f(x))))

    plain, nested = outer(inner), mt.checkpoint(outer(mt.checkpoint(inner)))
    for _ in range(4):
        assert float(nested(0.3)) == pytest.approx(float(plain(0.3)), rel=1e-14)
        plain, nested = mt.grad(plain), mt.grad(nested)
    mt.check_grads(mt.checkpoint(layer), np.full((2, 4), 0.3), np.asarray(W), order=2)


def test_a_compiled_function_is_differentiated_with_its_checkpoints_and_runs_once(capsys):
    block = mt.checkpoint(lambda x: mt.exp(mt.sin(x)))

    def plain(x):
        print("runs")
        return block(block(x)).sum()

    f = mt.compile(plain)
    x = arr(0.1, 0.2)
    expected = mt.grad(plain)(x)
    capsys.readouterr()
    with mt.Tape() as tape:
        tape.watch(x)
        y = f(x)
    assert [e.op.name for e in tape.entries] == ["plain"]
    assert tape.gradient(y, x).tolist() == expected.tolist()
    assert capsys.readouterr().out.count("runs") == 2  # for the program, and for its derivative
    for _ in range(3):
        assert mt.grad(f)(x).tolist() == expected.tolist()
    assert capsys.readouterr().out == ""
    np.testing.assert_allclose(np.asarray(mt.hvp(f, x, x)), np.asarray(mt.hvp(plain, x, x)), rtol=1e-13)
    np.testing.assert_allclose(np.asarray(mt.hessian(f)(x)), np.asarray(mt.hessian(plain)(x)), rtol=1e-13)


def test_a_compiled_function_is_differentiated_with_its_own_derivatives_and_hooks(capsys):
    @mt.custom_vjp
    def twice_as_steep(x):
        return x * x

    twice_as_steep.defvjp(lambda x: (x * x, x), lambda x, g: (4.0 * x * g,))

    def loss(p, n, keys):
        def hook(g):
            print("seen")
            return 10.0 * g

        y = mt.gradient_hook(twice_as_steep(p["a"]), hook)
        return (y * p["b"] * keys[0]).sum(), {"count": n, "int": mt.asarray([1, 2]) + keys[1]}

    f = mt.compile(loss)
    p = {"a": arr(1.0, 2.0), "b": arr(3.0, 4.0)}
    keys = [mt.asarray(2.0), mt.asarray([1, 1])]
    expected, aux = mt.grad(loss, has_aux=True)(p, 7, keys)
    capsys.readouterr()
    for _ in range(3):
        found, extra = mt.grad(f, has_aux=True)(p, 7, keys)
        assert {k: v.tolist() for k, v in found.items()} == {k: v.tolist() for k, v in expected.items()}
        assert extra["count"] == 7
        assert extra["int"].tolist() == aux["int"].tolist() == [2, 3]
    assert capsys.readouterr().out == "seen\n"
    outer = arr(5.0, 6.0)

    def around(w):  # an array of the closure that is watched is known to the code alone
        return mt.compile(lambda x: (mt.checkpoint(lambda x: x * x)(x) * w).sum())(arr(1.0, 2.0))

    assert mt.grad(around)(outer).tolist() == [1, 4]


def test_values_that_a_hook_asks_for_are_refused_in_a_compiled_function():
    f = mt.compile(lambda x: mt.gradient_hook(x * x, lambda g: None if float(g.sum()) > 0 else g).sum())
    assert f(arr(1.0, 2.0)).tolist() == 5
    with pytest.raises(mt.errors.TracedValueError):
        mt.grad(f)(arr(1.0, 2.0))
    assert f(arr(1.0, 2.0)).tolist() == 5  # whole afterwards


def test_on_a_mesh():
    mesh = mt.Mesh({"data": 2, "model": 2})
    x, w = normal(4, 4), normal(4, 4, seed=1)
    sx, sw = mt.distribute(x, mesh, data=mt.Shard(0)), mt.distribute(w, mesh, model=mt.Shard(1))
    loss = lambda x, w: through(mt.checkpoint(layer), x, w)  # noqa: E731
    plain = mt.grad(lambda x, w: through(layer, x, w), (0, 1))(x, w)
    for g in (mt.grad(loss, (0, 1)), mt.compile(mt.grad(loss, (0, 1)))):
        for a, b in zip(g(sx, sw), plain, strict=True):
            assert a.sharding is not None
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-12)


def test_what_the_function_reads_from_around_it_has_gradients():
    x, w, frozen = normal(3, 4), normal(4, 4, seed=1), normal(4, 4, seed=2)
    block = mt.checkpoint(lambda x: layer(x, w) @ frozen)
    with mt.Tape() as tape:
        tape.watch(w)  # the argument is frozen, what is captured is not
        y = block(x).sum()
    expected = mt.grad(lambda w: (layer(x, w) @ frozen).sum())(w)
    assert tape.gradient(y, w).tolist() == expected.tolist()


def test_frozen_parameters_have_no_gradient():
    x, w, frozen = arr(1, 2), arr(3, 4), arr(5, 6)
    with mt.Tape() as tape:
        tape.watch(x, w)
        y = mt.checkpoint(lambda x, *, w, by: x * w * by)(x, w=w, by=frozen).sum()
    tape._watched[id(frozen)] = weakref.ref(frozen), new_id(frozen)
    tape.follow(frozen._id, frozen._buf)
    assert [g if g is None else g.tolist() for g in tape.gradient(y, [x, w, frozen])] == [[15, 24], [5, 12], None]


def test_a_write_after_the_call_does_not_reach_it():
    x, w = arr(1, 2), arr(3, 4)
    with mt.Tape() as tape:
        tape.watch(x)
        y = mt.checkpoint(lambda x: x * x * w)(x)
        w[:] = 100.0
        x[0] = 50.0
        z = y.sum()
    # x was written under the tape: its former value is what was watched.
    assert tape.gradient(z, x).tolist() == [6, 16]


def test_dropout_masks_are_the_same_and_the_function_runs_once():
    key, x, runs = mt.random.key(7), normal(50), []

    def noisy(x, key):
        runs.append(1)
        return x * mt.random.bernoulli(key, 0.5, x.shape) * 2.0

    plain = mt.grad(lambda x: (noisy(x, key) ** 2).sum())(x)
    runs.clear()
    again = mt.grad(lambda x: (mt.checkpoint(noisy)(x, key) ** 2).sum())(x)
    assert again.tolist() == plain.tolist()
    assert 0 < sum(v != 0 for v in again.tolist()) < 50
    assert len(runs) == 1


def test_stop_recording_reaches_inside():
    x = arr(2.0)

    def of(tape, make):
        def fn(x):
            with tape.stop_recording():
                c = x * x
            return c * x

        with tape:
            tape.watch(x)
            y = make(fn)(x).sum()
        return tape.gradient(y, x).tolist()

    assert of(mt.Tape(), lambda f: f) == of(mt.Tape(), mt.checkpoint) == [4.0]


def test_arguments_and_results_are_trees_and_anything_else():
    def fn(p, power, flag=None):
        return {"y": p["x"] ** power, "same": p["x"], "n": 3, "none": None, "count": p["i"] + 1}

    x = arr(2.0, 3.0)

    def loss(x):
        out = mt.checkpoint(fn)({"x": x, "i": mt.asarray([1, 2])}, 2, flag="on")
        assert out["n"] == 3
        assert out["none"] is None
        assert out["count"].tolist() == [2, 3]
        return (out["y"] + out["same"] * 10.0).sum()

    assert mt.grad(loss)(x).tolist() == [14.0, 16.0]


def test_an_exception_while_recomputing_leaves_the_engine_usable():
    x = arr(1.0, 2.0)

    def fail(g):
        raise RuntimeError("on purpose")

    def broken(x):
        return mt.checkpoint(lambda x: mt.exp(mt.gradient_hook(x * x, fail)))(x).sum()

    with pytest.raises(RuntimeError, match="on purpose"):
        mt.grad(broken)(x)
    with pytest.raises(ZeroDivisionError):
        mt.grad(mt.checkpoint(lambda x: (x * x).sum() + 1 // 0))(x)
    assert mt.grad(mt.checkpoint(lambda x: (x * x).sum()))(x).tolist() == [2, 4]


def _chain(x):
    for _ in range(8):
        x = mt.exp(mt.sin(x))
    return x


@pytest.mark.parametrize("compiled", [False, True])
def test_memory_between_blocks_is_not_kept(compiled, peak_of):
    x = normal(1 << 15)  # small enough for compiled chains not to be fused

    def peak(block):
        def loss(x):
            for _ in range(6):
                x = block(x)
            return x.sum()

        g = mt.compile(mt.grad(loss)) if compiled else mt.grad(loss)
        return peak_of(lambda: g(x)) / x.nbytes

    # 48 values are kept by the plain chain; one a block, and those of one block, by the other.
    assert peak(_chain) > 45
    assert peak(mt.checkpoint(_chain)) < 24


def test_a_checkpoint_leaves_no_cycles():
    gc.collect()
    gc.disable()
    try:
        x = normal(10)
        ref = weakref.ref(x._buf)
        mt.grad(lambda x: mt.checkpoint(mt.checkpoint(lambda x: mt.exp(x) * x))(x).sum())(x)
        del x
        assert ref() is None
    finally:
        gc.enable()


def test_without_a_tape_a_checkpoint_is_the_function():
    assert mt.checkpoint(lambda x: x * 2.0)(arr(1.0)).tolist() == [2.0]
    assert mt.compile(mt.checkpoint(lambda x: x * 2.0))(arr(1.0)).tolist() == [2.0]


# ----- custom_vjp -----------------------------------------------------------------------------------------------------


def cube():
    """x**3 with the derivative of 2 * x**3: what tells whose derivative is taken."""
    f = mt.custom_vjp(lambda x: x * x * x)
    f.defvjp(lambda x: (x * x * x, x), lambda x, g: (g * 6.0 * x * x,))
    return f


def test_the_declared_derivative_is_used():
    f, x = cube(), arr(1.0, 2.0)
    loss = lambda x: f(x).sum()  # noqa: E731
    assert mt.grad(loss)(x).tolist() == [6, 24]
    assert mt.compile(mt.grad(loss))(x).tolist() == [6, 24]
    assert mt.grad(mt.compile(loss))(x).tolist() == [6, 24]
    assert mt.grad(mt.checkpoint(loss))(x).tolist() == [6, 24]
    assert mt.grad(lambda x: mt.checkpoint(f)(x * 1.0).sum())(x).tolist() == [6, 24]
    mesh = mt.Mesh({"a": 2})
    sx = mt.distribute(x, mesh, a=mt.Shard(0))
    assert mt.grad(loss)(sx).tolist() == [6, 24]
    assert mt.compile(mt.grad(loss))(sx).tolist() == [6, 24]


@pytest.mark.parametrize("again", [False, True])
def test_higher_orders_differentiate_the_backward_function_and_the_residuals(again):
    f = mt.custom_vjp(lambda x: mt.sin(x))
    # The residual is computed, and the forward function may call the function itself.
    f.defvjp(lambda x: ((f(x) if again else mt.sin(x)), mt.cos(x)), lambda c, g: (g * c,))
    x, ours, plain = 0.7, f, mt.sin
    for _ in range(4):
        ours, plain = mt.grad(ours), mt.grad(plain)
        assert float(ours(x)) == pytest.approx(float(plain(x)), rel=1e-14)
        assert float(mt.compile(ours)(x)) == pytest.approx(float(plain(x)), rel=1e-14)
    mt.check_grads(f, np.asarray([0.1, 0.2]), order=3)


def test_the_residual_that_is_the_result_is_differentiated_by_the_rule():
    f = mt.custom_vjp(lambda x: mt.exp(x))

    def forward(x):
        y = f(x)
        return y, y

    f.defvjp(forward, lambda y, g: (2.0 * g * y,))
    # d = 2 f, so the n-th derivative is 2**n exp.
    assert float(mt.grad(f)(0.0)) == 2.0
    assert float(mt.grad(mt.grad(f))(0.0)) == 4.0


def test_several_arguments_results_and_trees():
    f = mt.custom_vjp(lambda p, n, y: {"s": p["a"] * y, "t": p["b"] * n, "n": n})

    def backward(residuals, g):
        (p, y, n), gs, gt = residuals, g["s"], g["t"]
        assert g["n"] is None
        return {"a": gs * y, "b": gt * n}, None, gs * p["a"]

    f.defvjp(lambda p, n, y: (f._fn(p, n, y), (p, y, n)), backward)

    def loss(p, y):
        out = f(p, 3, y)
        assert out["n"] == 3
        return (out["s"] + 2.0 * out["t"]).sum()

    (gp, gy) = mt.grad(loss, (0, 1))({"a": arr(1, 2), "b": arr(3, 4)}, arr(5, 6))
    assert (gp["a"].tolist(), gp["b"].tolist(), gy.tolist()) == ([5, 6], [6, 6], [1, 2])


def test_a_result_that_is_an_argument_is_a_value_of_its_own():
    f = mt.custom_vjp(lambda x: x)
    f.defvjp(lambda x: (x, None), lambda _, g: (g * 5.0,))
    assert mt.grad(lambda x: (f(x) + x).sum())(arr(1.0)).tolist() == [6.0]


def test_a_missing_cotangent_is_zero_and_a_keyword_is_passed_on():
    f = mt.custom_vjp(lambda x, y, *, by: x * y * by)
    f.defvjp(lambda x, y, *, by: (x * y * by, y * by), lambda k, g: (g * k, None))
    gx, gy = mt.grad(lambda x, y: f(x, y, by=2.0).sum(), (0, 1))(arr(1.0), arr(3.0))
    assert (gx.tolist(), gy.tolist()) == ([6.0], [0.0])


def test_a_cotangent_is_made_to_fit():
    f = mt.custom_vjp(lambda x, y: x + y)
    f.defvjp(lambda x, y: (x + y, None), lambda _, g: (g, g))
    gx, gy = mt.grad(lambda x, y: f(x, y).sum(), (0, 1))(arr(1.0, 2.0, 3.0), mt.asarray(1.0, dtype=mt.float32))
    assert (gx.tolist(), gy.item(), gy.dtype) == ([1, 1, 1], 3.0, mt.float32)


def reads(w, compiled):
    f = mt.custom_vjp(lambda x: x * w)
    f.defvjp(lambda x: (x * w, None), lambda _, g: (g,))
    return mt.compile(f) if compiled else f


@pytest.mark.parametrize("compiled", [False, True])
def test_a_watched_array_of_the_closure_is_refused_by_name(compiled):
    with pytest.raises(
        mt.errors.GradientError, match=r"<lambda> reads a watched array of shape \(2,\).*multiply.*test_calls"
    ):
        mt.grad(lambda w: reads(w, compiled)(arr(1.0, 2.0)).sum())(arr(3.0, 4.0))
    assert mt.grad(lambda w: (reads(mt.stop_gradient(w), compiled)(w)).sum())(arr(3.0, 4.0)).tolist() == [1, 1]
    # Not watched, it is a constant like any other.
    assert mt.grad(lambda x: reads(arr(3.0, 4.0), compiled)(x).sum())(arr(1.0, 2.0)).tolist() == [1, 1]


def test_mistakes_in_a_declaration_are_named():
    x = arr(1.0, 2.0)
    f = mt.custom_vjp(abs)
    with pytest.raises(mt.errors.GradientError, match="abs has no derivative yet"):
        f(x)
    f.defvjp(lambda x: x, lambda r, g: (g,))
    assert f(x).tolist() == [1.0, 2.0]
    with pytest.raises(mt.errors.GradientError, match="forward function of abs must return"):
        mt.grad(lambda x: f(x).sum())(x)
    f.defvjp(lambda x: (x, None), lambda r, g: g)
    with pytest.raises(mt.errors.GradientError, match=r"must return a tuple of 1 cotangents.*got Array") as e:
        mt.grad(lambda x: f(x).sum())(x)
    assert any("test_calls.py" in note for note in e.value.__notes__)
    f.defvjp(lambda x: (x, None), lambda r, g: ({"a": g, "b": g},))
    with pytest.raises(mt.errors.GradientError, match="returned 2 cotangent"):
        mt.grad(lambda x: f(x).sum())(x)
    f.defvjp(lambda x: (x, None), lambda r, g: (mt.ones(7),))
    with pytest.raises(mt.errors.GradientError, match=r"shape \(7,\) for array 0 .* which has shape \(2,\)"):
        mt.grad(lambda x: f(x).sum())(x)


def test_as_a_method():
    class Scaled:
        by = 3.0

        @mt.custom_vjp
        def __call__(self, x):
            return x * self.by

    Scaled.__dict__["__call__"].defvjp(lambda s, x: (x * s.by, None), lambda r, g: (None, g * 100.0))
    assert mt.grad(lambda x: Scaled().__call__(x).sum())(arr(1.0)).tolist() == [100.0]


# ----- hooks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [lambda f: f, mt.compile], ids=["eager", "compiled"])
def test_a_hook_sees_the_whole_gradient_and_may_replace_it(how):
    seen = []

    def keep(g):
        seen.append(g.shape)

    def loss(x):
        y = mt.gradient_hook(mt.gradient_hook(x * x, keep), lambda g: mt.clip(g, -1.0, 1.0))
        return (y * arr(1.0, 0.5, 7.0)).sum() + y.sum()

    assert how(mt.grad(loss))(arr(1, 1, 1)).tolist() == [2.0, 2.0, 2.0]
    assert seen == [(3,)]
    assert mt.grad(how(loss))(arr(1, 1, 1)).tolist() == [2.0, 2.0, 2.0]


def test_hooks_on_trees_on_a_mesh_and_at_second_order():
    mesh = mt.Mesh({"a": 2})
    x = mt.distribute(arr(1, 2, 3, 4), mesh, a=mt.Shard(0))

    def loss(p):
        p = mt.gradient_hook(p, lambda g: g * 10.0)
        return (p["x"] ** 3).sum() + p["n"]

    assert mt.grad(loss)({"x": x, "n": 1.0})["x"].tolist() == [30, 120, 270, 480]
    # Each of the two backward passes goes through the hook once more.
    twice = mt.grad(mt.grad(lambda x: mt.gradient_hook(x, lambda g: g * 10.0) ** 3))
    assert float(twice(2.0)) == 6.0 * 2.0 * 100.0


def test_tape_hooks():
    x, y0 = arr(1, 2), arr(3, 4)
    seen = []
    with mt.Tape(persistent=True) as tape:
        tape.watch(x, y0)
        y = x * 2.0
        z = (y * y0).sum() + y.sum()
        tape.hook(y, lambda g: seen.append(g.tolist()))
        tape.hook(y, lambda g: g * 10.0)
        tape.hook(x, lambda g: seen.append(g.tolist()))
        tape.hook(y0, lambda g: g + 0.5)
    gx, gy, gy0 = tape.gradient(z, (x, y, y0))
    assert seen == [[4, 5], [80, 100]]
    assert (gx.tolist(), gy.tolist(), gy0.tolist()) == ([80, 100], [40, 50], [2.5, 4.5])
    assert tape.gradient(z, x).tolist() == [80, 100]


def test_what_a_hook_keeps_does_not_change():
    kept = []
    with mt.Tape() as tape:
        x = arr(1, 2)
        tape.watch(x)
        y = x * 1.0
        tape.hook(y, kept.append)
        z = (y * 3.0 + y * 4.0).sum() + (x * 5.0).sum()
    assert tape.gradient(z, x).tolist() == [12, 12]
    assert kept[0].tolist() == [7, 7]


def test_mistakes_with_hooks_are_named():
    with mt.Tape() as tape:
        x = arr(1.0)
        with pytest.raises(mt.errors.GradientError, match="has no gradient on this tape"):
            tape.hook(x, print)
    with pytest.raises(mt.errors.GradientError, match=r"the hook made \(3,\) of a cotangent of shape \(1,\)"):
        mt.grad(lambda x: mt.gradient_hook(x, lambda g: mt.ones(3)).sum())(x)


# ----- stop_gradient --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [lambda f: f, mt.compile, mt.checkpoint, lambda f: mt.compile(mt.checkpoint(f))],
    ids=["plain", "compile", "checkpoint", "both"],
)
def test_stop_gradient_makes_a_constant(how):
    f = how(lambda x: (mt.stop_gradient(x * x) * x + mt.stop_gradient(x)).sum())
    x = arr(2.0, 3.0)
    assert f(x).item() == 40.0
    assert mt.grad(f)(x).tolist() == [4, 9]
    assert mt.hessian(f)(x).tolist() == [[0, 0], [0, 0]]
    _, tangent = mt.jvp(f, [x], [arr(1.0, 1.0)])
    assert tangent.item() == 13.0
    sx = mt.distribute(x, mt.Mesh({"a": 2}), a=mt.Shard(0))
    assert mt.grad(f)(sx).tolist() == [4, 9]
    # What is stopped is stopped to every tape, and watching the result starts afresh.
    with mt.Tape() as outer, mt.Tape() as inner:
        outer.watch(x)
        y = mt.stop_gradient(x * 2.0)
        inner.watch(y)
        z = (y * y * x).sum()
    assert inner.gradient(z, y).tolist() == [16, 36]
    assert outer.gradient(z, x).tolist() == [16, 36]


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda g: mt.sum(g), r"shape \(\) for array 0.*which has shape \(3,\)"),
        (lambda g: mt.stack([g, g]), r"shape \(2, 3\) for array 0"),
        (lambda g: g[:1], r"shape \(1,\) for array 0"),
        (lambda g: g * 1j, r"complex128 cotangent for array 0.*float64.*mt.real"),
    ],
)
def test_a_cotangent_that_does_not_fit_is_refused(returned, text):
    double = mt.custom_vjp(lambda x: 2.0 * x)
    double.defvjp(lambda x: (2.0 * x, None), lambda _, g: (returned(g),))
    loss = lambda x: mt.sum(double(x))  # noqa: E731
    x = mt.asarray([1.0, 2.0, 3.0])
    for way in (mt.grad(loss), mt.compile(mt.grad(loss)), mt.grad(lambda x: mt.sum(mt.grad(loss)(x)))):
        with pytest.raises(mt.errors.GradientError, match=text):
            way(x)


def test_a_cotangent_of_another_float_is_cast():
    double = mt.custom_vjp(lambda x: 2.0 * x)
    double.defvjp(lambda x: (2.0 * x, None), lambda _, g: (mt.astype(g, "float64") * 2.0,))
    g = mt.grad(lambda x: mt.sum(double(x)))(mt.ones(2, dtype="float32"))
    assert (g.dtype, g.tolist()) == (np.float32, [2, 2])


class _Box:
    def __init__(self, value):
        self.value = value


_HIDE = [_Box, lambda v: {"a": _Box(v)}, lambda v: collections.deque([v]), lambda v: (x for x in v)]


@pytest.mark.parametrize("hide", _HIDE)
def test_results_of_custom_vjp_from_which_no_gradient_comes_back_are_refused(hide):
    own = mt.custom_vjp(lambda q: hide(q * 2))
    own.defvjp(lambda q: (hide(q * 2), None), lambda r, g: (2 * g,))
    with pytest.raises(mt.errors.GradientError, match="no tree"):
        mt.grad(lambda v: mt.sum(v) + 0 * len(str(own(v))))(mt.ones(2))


class _Block:
    """A block with a loss of its own, as experts have."""

    def __init__(self):
        self.aux, self.seen = 0.0, []

    def __call__(self, h, w):
        p = mt.nn.softmax(h @ w)
        self.aux = self.aux + mt.sum(p * p)
        self.seen.append(mt.tanh(p))
        return mt.tanh(h @ w)


@pytest.mark.parametrize("way", [lambda f: f, lambda f: mt.compile(f)])
def test_what_a_checkpoint_leaves_behind_is_differentiated(way):
    x = mt.asarray(np.random.default_rng(0).normal(size=(4, 3)))
    w = mt.asarray(np.random.default_rng(1).normal(size=(3, 3)))

    def loss(w, around):
        block = _Block()
        f = around(block)
        out = mt.sum(f(x, w) ** 2) + mt.sum(f(x * 2, w)) + block.aux * 3
        return out + sum(mt.sum(s) for s in block.seen)

    plain, kept = (way(mt.grad(lambda w, a=a: loss(w, a)))(w) for a in (lambda f: f, mt.checkpoint))
    np.testing.assert_allclose(np.asarray(plain), np.asarray(kept), rtol=1e-12)
    second = [np.asarray(mt.hvp(lambda w, a=a: loss(w, a), w, w)) for a in (lambda f: f, mt.checkpoint)]
    np.testing.assert_allclose(*second, rtol=1e-9)


@pytest.mark.parametrize("hide", [_Box, lambda v: types.SimpleNamespace(value=v), lambda v: lambda: v])
def test_results_of_a_checkpoint_in_objects_are_differentiated(hide):
    f = mt.checkpoint(lambda q: hide(q * q))
    read = lambda b: b() if callable(b) else b.value  # noqa: E731
    assert mt.grad(lambda v: mt.sum(read(f(v)) * 3))(mt.asarray([1.0, 2.0])).tolist() == [6, 12]

    def put(held):
        held[0] = held[0] * 3
        return held[0]

    def through_a_list(v):
        held = [v]
        mt.checkpoint(put)(held)
        return mt.sum(held[0])

    assert mt.grad(through_a_list)(mt.ones(2)).tolist() == [3, 3]
