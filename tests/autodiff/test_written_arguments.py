"""Functions of users that write in place to what they are given: the gradient is the one without the write, or an
error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape import errors

X = np.arange(1.0, 7.0).reshape(2, 3)


def assign(g):
    g[...] = 0.0


def assign_a_part(g):
    g[0] = 0.0


def assign_by_mask(g):
    g[g > 0] = 0.0


def assign_by_places(g):
    g[mt.asarray([0, 1])] = 0.0


def add(g):
    g += 1.0


def multiply(g):
    g *= 0.0


def divide(g):
    g /= 3.0


def power(g):
    g **= 2


WRITES = [assign, assign_a_part, assign_by_mask, assign_by_places, add, multiply, divide, power]


def tape_hook(write):
    def run(x):
        with mt.Tape() as tape:
            tape.watch(x)
            y = x * x
            tape.hook(y, lambda g: write(g))
            z = (y * y).sum()
        return tape.gradient(z, x)

    return run


def hook_of_a_source(write):
    def run(x):
        with mt.Tape() as tape:
            tape.watch(x)
            tape.hook(x, lambda g: write(g))
            z = ((x * x) ** 2).sum()
        return tape.gradient(z, x)

    return run


def gradient_hook(write):
    return mt.grad(lambda x: (mt.gradient_hook(x * x, lambda g: write(g)) ** 2).sum())


def compiled_hook(write):
    return mt.compile(gradient_hook(write))


def hook_in_a_recorded_pass(write):
    """The cotangents are Arrays that the outer tape records."""
    inner = mt.grad(lambda x: (mt.gradient_hook(x * x, lambda g: write(g)) ** 2).sum())

    def run(x):
        with mt.Tape() as tape:
            tape.watch(x)
            return inner(x)

    return run


def hook_beside_another_use(write):
    """The cotangent that the hook is shown is the other operand's as well."""

    def run(x):
        def loss(x):
            a = mt.gradient_hook(x**4, lambda g: write(g))
            return ((a + 0.0 * x) + 0.0 * a).sum()

        return mt.grad(loss)(x)

    return run


def custom(write, which):
    @mt.custom_vjp
    def fourth(x):
        return x**4

    def backward(saved, g):
        slope = 4.0 * saved["x"] ** 3 * g * float(saved["n"].sum() / X.sum())
        write({"residual": saved["x"], "cotangent": g, "array": mt.asarray(saved["n"], copy=False)}[which])
        if which == "array":
            saved["n"][...] = 7.0
        return (slope,)

    fourth.defvjp(lambda x: (fourth(x), {"x": x, "n": X.copy()}), backward)
    return fourth


def custom_vjp_residual(write):
    f = custom(write, "residual")
    return lambda x: mt.grad(lambda x: f(x).sum())(x)


def custom_vjp_cotangent(write):
    f = custom(write, "cotangent")
    return lambda x: mt.grad(lambda x: (f(x) + 0.0 * x).sum())(x)


def custom_vjp_pulled_again(write):
    def run(x):
        for which in ("residual", "cotangent", "array"):
            _, pull = mt.vjp(custom(write, which), x)
            pull(mt.ones(x.shape))
            again = pull(mt.ones(x.shape))[0]
        return again

    return run


def custom_vjp_in_a_recorded_pass(write):
    f = custom(write, "cotangent")

    def run(x):
        with mt.Tape() as tape:
            tape.watch(x)
            return mt.grad(lambda x: (f(x) + 0.0 * x).sum())(x)

    return run


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    "place",
    [
        tape_hook,
        hook_of_a_source,
        gradient_hook,
        compiled_hook,
        hook_in_a_recorded_pass,
        hook_beside_another_use,
        custom_vjp_residual,
        custom_vjp_cotangent,
        custom_vjp_pulled_again,
        custom_vjp_in_a_recorded_pass,
    ],
)
def test_a_write_to_an_argument_does_not_change_the_gradient(place, write):
    def silent(g):
        write(g)

    x = mt.asarray(X)
    np.testing.assert_allclose(np.asarray(place(silent)(x)), 4 * X**3)
    np.testing.assert_array_equal(np.asarray(x), X)


def test_what_a_hook_returns_after_writing_to_it_takes_its_place():
    def doubled(g):
        g *= 2.0
        return g

    got = mt.grad(lambda x: mt.gradient_hook(x * x, doubled).sum())(mt.asarray(X))
    np.testing.assert_allclose(np.asarray(got), 4 * X)


@pytest.mark.parametrize("kept", ["hook", "custom"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_was_returned_may_be_written_to_later(kept, wrapped):
    stash = []

    def later(g):
        for s in stash:
            s[...] = 100.0
        stash.append(1.0 * g)
        return stash[-1]

    if kept == "hook":
        f = lambda x: mt.gradient_hook(x, later)  # noqa: E731
    else:
        f = mt.custom_vjp(lambda x: 1.0 * x)
        f.defvjp(lambda x: (1.0 * x, None), lambda _, g: (later(g),))

    def loss(x):
        return (f(x) * 3.0 + f(x) * 5.0).sum()

    x = mt.asarray(X)
    with mt.Tape() as outer:
        if wrapped:
            outer.watch(x)
        got = mt.grad(loss)(x)
    np.testing.assert_array_equal(np.asarray(got), np.full(X.shape, 8.0))


@pytest.mark.parametrize("wrapped", [False, True])
def test_gradients_of_two_values_are_two_arrays(wrapped):
    def both(x, y):
        return mt.grad(lambda x, y: (x + y).sum(), argnums=(0, 1))(x, y)

    x, y = mt.asarray(X), mt.asarray(X)
    with mt.Tape() as outer:
        if wrapped:
            outer.watch(x, y)
        gx, gy = both(x, y)
        gx *= 5.0
        gx[0] = 9.0
    np.testing.assert_array_equal(np.asarray(gy), np.ones(X.shape))


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_seed_stays_the_callers(wrapped):
    x, seed = mt.asarray(X), mt.ones(X.shape)
    with mt.Tape() as outer:
        if wrapped:
            outer.watch(x)
        with mt.Tape() as tape:
            tape.watch(x)
        g = tape.gradient(x, x, seed)
        g *= 0.0
    np.testing.assert_array_equal(np.asarray(seed), np.ones(X.shape))


@pytest.mark.parametrize("write", WRITES)
def test_forward_functions_that_write_to_arguments_are_refused(write):
    f = mt.custom_vjp(lambda x: 1.0 * x)

    def forward(x):
        write(x)
        return 1.0 * x, None

    f.defvjp(forward, lambda _, g: (g,))
    with pytest.raises(errors.GradientError, match=r"custom_vjp.*wrote in place"):
        mt.grad(lambda x: f(x).sum())(mt.asarray(X))

    def block(x):
        write(x)
        return 2.0 * x

    with pytest.raises(errors.GradientError, match=r"checkpoint.*wrote in place"):
        mt.grad(lambda x: (mt.checkpoint(block)(x) + x).sum())(mt.asarray(X))


def test_callbacks_have_numbers_of_their_own():
    from types import SimpleNamespace

    from meshtape.parallel.training.trainer import Trainer

    class Writes(mt.training.Callback):
        def on_log(self, trainer, numbers):
            numbers["loss"] = -1.0

    class Reads(mt.training.Callback):
        def on_log(self, trainer, numbers):
            seen.append(numbers["loss"])

    seen = []
    fake = SimpleNamespace(
        progress=SimpleNamespace(step=1, epoch=0),
        report=SimpleNamespace(log=lambda *_: None),
        recipe=SimpleNamespace(precision=SimpleNamespace(hopeless=lambda _: None)),
        callbacks=[Writes(), Reads()],
    )
    Trainer._log(fake, {"loss": 2.0})
    assert seen == [2.0]


MADE_INSIDE = {
    "zeros": lambda v: mt.zeros(3),
    "zeros_like": mt.zeros_like,
    "asarray": lambda v: mt.asarray(np.zeros(3)),
    "random": lambda v: mt.random.normal(mt.random.key(0), (3,)),
}


@pytest.mark.parametrize("way", MADE_INSIDE)
def test_checkpoints_and_forward_functions_write_to_arrays_that_they_make(way: str) -> None:
    def block(v: mt.Array) -> mt.Array:
        y = MADE_INSIDE[way](v)
        y[0] = v[0] * 2
        y[1] *= v[1]
        return mt.sum(y * y * v)

    custom = mt.custom_vjp(block)
    custom.defvjp(lambda v: (block(v), mt.grad(block)(v)), lambda r, g: (r * g,))
    v = mt.asarray([1.0, 2.0, 3.0])
    for fn in (mt.checkpoint(block), custom):
        np.testing.assert_array_equal(np.asarray(mt.grad(fn)(v)), np.asarray(mt.grad(block)(v)))


def test_checkpoints_and_forward_functions_that_write_to_arrays_around_them_are_refused() -> None:
    @mt.custom_vjp
    def doubled(a: mt.Array) -> mt.Array:
        return a * 2

    def through(kind: str, w: mt.Array) -> Any:
        def fn(a: mt.Array) -> mt.Array:
            w[0] = 5.0
            return a * 2

        if kind == "checkpoint":
            return mt.checkpoint(fn)
        doubled.defvjp(lambda a: (fn(a), None), lambda _, g: (2 * g,))
        return doubled

    for kind in ("checkpoint", "custom_vjp"):
        for watched in (False, True):

            def loss(v: mt.Array, kind: str = kind, watched: bool = watched) -> mt.Array:
                w = v * 1.0 if watched else mt.ones(3)
                return (through(kind, w)(v) + w).sum()

            with pytest.raises(mt.errors.GradientError):
                mt.grad(loss)(mt.asarray([1.0, 2.0, 3.0]))
    w = mt.ones(3)
    through("checkpoint", w)(mt.ones(3))  # no tape, no gradient that could be lost
    assert float(w[0]) == 5.0
