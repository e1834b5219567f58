"""What cannot be differentiated, or makes no sense, is refused with a typed error that says what would be right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.errors import DTypeError, GradientError, ShapeError

X = mt.asarray([1.0, 2.0, 3.0])
Z = X + 1j
sgd, adam = mt.optim.sgd(0.1), mt.optim.adam(0.1)


def seeded(seed: Any) -> Any:
    with mt.Tape() as tape:
        tape.watch(X)
        y = X * X
    return tape.gradient(y, X, seed)


CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "several elements": (lambda: mt.grad(lambda x: x * x)(X), GradientError, r"shape \(3,\).*y.sum\(\).*seed"),
    "an integer": (lambda: mt.grad(lambda x: mt.argmax(x))(X), GradientError, "int64.*no derivatives"),
    "a complex number": (lambda: mt.grad(lambda z: (z * z).sum())(Z), GradientError, "complex128.*real.*abs.*seed"),
    "no array": (lambda: mt.grad(lambda x: 3.0)(X), GradientError, "must return an Array, got float"),
    "no function": (lambda: mt.grad(3), TypeError, r"\[grad\] takes a function, got int"),
    "vjp of no function": (lambda: mt.vjp(None, X), TypeError, r"\[vjp\] takes a function, got NoneType"),
    "argnums beyond": (lambda: mt.grad(lambda x: x.sum(), 2)(X), GradientError, "argnums 2 for 1 positional"),
    "argnums by name": (lambda: mt.grad(lambda x: x.sum(), "x"), TypeError, "argnums are positions.*'x'"),
    "argnums a bool": (lambda: mt.grad(lambda x: x.sum(), [True]), TypeError, "argnums are positions"),
    "a seed of another shape": (lambda: seeded(mt.ones(2)), GradientError, r"seed has shape \(2,\), the target \(3,\)"),
    "a complex seed": (lambda: seeded(Z), GradientError, "seed has dtype complex128, the target float64"),
    "hvp, another shape": (
        lambda: mt.hvp(lambda x: (x**3).sum(), X, mt.ones(4)),
        GradientError,
        r"direction of shape \(4,\) .* \(3,\)",
    ),
    "hvp, a shape that would broadcast": (
        lambda: mt.hvp(lambda x: (x**3).sum(), X, mt.ones(1)),
        GradientError,
        r"\(1,\)",
    ),
    "hvp, another tree": (lambda: mt.hvp(lambda x: (x**3).sum(), X, {"a": X}), GradientError, "structure"),
    "jvp, another shape": (lambda: mt.jvp(lambda x: x * x, [X], [mt.ones(4)]), GradientError, r"\(4,\)"),
    "jvp, too many": (lambda: mt.jvp(lambda x: x * x, [X], [X, X]), GradientError, "structure"),
    "check of integers": (lambda: mt.check_grads(lambda x: x * x, np.arange(3)), DTypeError, "argument 0 is int64"),
    "check to no order": (lambda: mt.check_grads(mt.sin, np.ones(2), order=0), ValueError, "at least 1, got 0"),
    "a negative rate": (lambda: mt.optim.sgd(-0.1), ValueError, r"\[sgd\] lr must be .* got -0.1"),
    "a negative rate of adam": (lambda: mt.optim.adamw(-1), ValueError, r"\[adamw\] lr must be"),
    "a negative limit": (
        lambda: mt.optim.clip_by_global_norm([X], -1.0),
        ValueError,
        "limit must be a number from 0 to inf, got -1.0",
    ),
    "the state of another optimizer": (
        lambda: adam.update({"a": X}, {"a": X}, sgd.init({"a": X})),
        ValueError,
        r"\[adam\] the state must hold step, mean, square, it holds step",
    ),
    "no state": (lambda: sgd.update({"a": X}, {"a": X}, None), ValueError, "it holds NoneType"),
    "another gradient": (lambda: sgd.update(X, mt.ones(2), sgd.init(X)), ShapeError, r"\(2,\).*\(3,\)"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    call, kind, match = CASES[name]
    with pytest.raises(kind, match=match):
        call()
    # And nothing is left behind.
    assert mt.grad(lambda x: (x * x).sum())(X).tolist() == [2, 4, 6]


def test_a_complex_loss_with_a_seed() -> None:
    """With a seed ``g`` the gradient is that of the real number ``Re(conj(g) y)``."""
    _, pull = mt.vjp(lambda z: (z * z).sum(), Z)
    for g in (1.0 + 0j, 1j, 0.5 - 2j):
        (found,) = pull(mt.asarray(g))
        expected = mt.grad(lambda z, g=g: mt.real(np.conj(g) * (z * z).sum()))(Z)
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("write", ["x[x > 0] *= 2.0", "x[x > 0] += 2.0", "x[x > 0] = x[x > 0]"])
def test_a_masked_write_in_a_compiled_function_says_how_to_write_it(write):
    def f(x):
        x = x * 1.0
        exec(write, {}, {"x": x})
        return mt.sum(x)

    with pytest.raises(
        mt.errors.ArrayIndexError, match=r"x\.at\[mask\]\.multiply\(c\) or x = mt\.where\(mask, x \* c, x\)"
    ):
        mt.compile(mt.grad(f))(mt.asarray([1.0, -2.0, 3.0]))


def test_masked_writes_as_the_error_says():
    x = mt.asarray([1.0, -2.0, 3.0])
    for f in (
        lambda x: mt.sum(x.at[x > 0].multiply(2.0) ** 2),
        lambda x: mt.sum(mt.where(x > 0, x * 2.0, x) ** 2),
    ):
        assert mt.compile(mt.grad(f))(x).tolist() == mt.grad(f)(x).tolist() == [8.0, -4.0, 24.0]
