"""Arrays given where numbers are expected, in lists and as values to fill with, keep their gradients and can be
traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.errors import DTypeError, ShapeError

V = mt.asarray([1.0, 2.0, 3.0])

CALLS: dict[str, Callable[[mt.Array, mt.Array], mt.Array]] = {
    "a list": lambda a, b: mt.asarray([a, b * a, 2.0]),
    "nested lists": lambda a, b: mt.asarray([[a, 1], (b, a * b)], dtype=mt.complex128),
    "rows": lambda a, b: mt.array([V * a, [1.0, 2.0, 3.0]]),
    "an operand": lambda a, b: mt.matmul([[a, b], [b, 1.0]], mt.ones(2)),
    "a written value": lambda a, b: V.at[[0, 2]].set([a, b]),
    "full": lambda a, b: mt.full((2, 3), a * b),
    "full of a row": lambda a, b: mt.full((2, 2), mt.stack([a, b])),
    "full_like": lambda a, b: mt.full_like(V, a) * mt.full_like(V * b, a),
    "pad": lambda a, b: mt.pad(V * b, 1, constant_values=a),
    "linspace": lambda a, b: mt.linspace(a, b, 4),
    "linspace to a number": lambda a, b: mt.linspace(a, 2.0, 3, endpoint=False),
    "logspace": lambda a, b: mt.logspace(a, b, 3, base=2.0),
    "geomspace": lambda a, b: mt.geomspace(a, b, 4),
    "geomspace below zero": lambda a, b: mt.geomspace(-a, -2.0, 3, endpoint=False),
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_and_programs(name: str) -> None:
    fn, at = CALLS[name], (np.asarray(0.7), np.asarray(1.9))
    mt.check_grads(fn, *at)
    a, b = map(mt.asarray, at)
    plain = fn(a, b)
    with mt.Tape() as tape:
        tape.watch(a, b)
        taped = fn(a, b)
    for found in (taped, mt.compile(fn)(a, b), mt.checkpoint(fn)(a, b)):
        assert (found.dtype, found.shape) == (plain.dtype, plain.shape)
        np.testing.assert_allclose(np.asarray(found), np.asarray(plain), rtol=1e-15)

    # Where one of them comes from around the function, it is a value of the program too.
    def of(make: Callable[..., Any]) -> Any:
        return mt.grad(lambda b: mt.sum(mt.abs(make(lambda a: fn(a, b))(a)) ** 2))(b)

    np.testing.assert_allclose(of(mt.compile), of(lambda f: f), rtol=1e-12)


@pytest.mark.parametrize("dtype", [mt.float64, mt.float32, mt.float16, mt.bfloat16, mt.int64, mt.complex64], ids=str)
def test_a_tape_changes_no_number_and_no_dtype(dtype: Any) -> None:
    a, b = mt.asarray(3, dtype=dtype) / (1 if dtype == mt.int64 else 4), mt.asarray(2, dtype=dtype)
    calls: list[Callable[[], mt.Array]] = [lambda: mt.asarray([a, b]), lambda: mt.full((2,), a)]
    for n in (0, 1, 5):
        calls += [lambda n=n: mt.linspace(a, b, n), lambda n=n: mt.linspace(a, 2.0, n, endpoint=False)]
    if dtype != mt.complex64:
        calls += [lambda: mt.linspace(a, 9, 4, dtype=mt.int32), lambda: mt.logspace(a, 2, 3)]
    for call in calls:
        plain = call()
        with mt.Tape() as tape:
            tape.watch(a, b)
            found = call()
        assert (found.dtype, found.shape) == (plain.dtype, plain.shape)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(plain))


def test_on_a_mesh() -> None:
    mesh = mt.Mesh({"m": 2})
    x = mt.distribute(mt.arange(4.0), mesh, m=mt.Shard(0))
    full = mt.full_like(x, mt.sum(x))
    assert full.sharding == x.sharding
    assert full.tolist() == [6.0] * 4
    assert mt.full_like(x, mt.asarray(-0.0), dtype=mt.float32).dtype == mt.float32
    assert mt.full_like(x > 1, mt.asarray(True)).tolist() == [True] * 4
    g = mt.grad(lambda x: mt.sum(mt.full_like(x, mt.sum(x))) + mt.sum(mt.asarray([mt.sum(x), mt.sum(x * x), 1.0])))(x)
    assert g.tolist() == [5.0, 7.0, 9.0, 11.0]


REFUSED: dict[str, tuple[Callable[[mt.Array], Any], type[Exception], str]] = {
    "lists of different lengths": (lambda v: mt.asarray([v, [1.0, 2.0]]), ShapeError, "different lengths"),
    "None among them": (lambda v: mt.asarray([v[0], None]), DTypeError, "numbers"),
    "a text among them": (lambda v: mt.asarray([v[0], "a"]), DTypeError, "numbers"),
    "a value that does not fill": (lambda v: mt.full((2, 2), v), ShapeError, r"\(3,\) does not fill .* \(2, 2\)"),
    "a complex value for a real array": (lambda v: mt.full((3,), v * 1j, dtype=mt.float64), DTypeError, "imaginary"),
    "a complex value like a real array": (lambda v: mt.full_like(v, v[0] * 1j), DTypeError, "imaginary"),
    "no number of steps": (lambda v: mt.linspace(v[0], v[1], -1), ValueError, "-1|non-negative"),
}


@pytest.mark.parametrize("how", [lambda f: f, mt.grad, mt.compile], ids=["plain", "grad", "compile"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_numbers_are(name: str, how: Callable[..., Any]) -> None:
    call, kind, match = REFUSED[name]
    with pytest.raises(kind, match=match):
        how(call)(V)
