"""Python numbers among the arguments of a compiled function: one trace where they only enter arithmetic, and eager bits
always."""

from __future__ import annotations

import itertools
import math
import operator
import warnings
from collections.abc import Callable

import numpy as np
import pytest

import meshtape as mt

FLOATS = [0.1, 1.0, -2.5, 0.0, -0.0, 1e-30, 1e300, 3.0000000001, float("nan"), float("inf"), 2.0**60]
INTS = [3, 0, -7, 1, 127, 128, 300, 2**31, 2**53 + 1, 2**63, 10**30]
DTYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "int8",
    "uint8",
    "int64",
    "bool",
    "complex64",
    "complex128",
]
BINARY = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "pow": operator.pow,
    "less": operator.lt,
    "greater_equal": operator.ge,
    "equal": operator.eq,
    "maximum": lambda a, b: mt.maximum(a, b),
    "where": lambda a, b: mt.where(mt.asarray([True, False, True]), a, b),
    "clip": lambda a, b: mt.clip(a if isinstance(a, mt.Array) else b, b if isinstance(a, mt.Array) else a, None),
    "chain": lambda a, b: (a * b + b) - b,
}


def outcome(fn, *args):
    """Bits, dtype and shape; or the type of the error."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            y = np.asarray(fn(*args))
        except Exception as e:
            return type(e)
    return y.tobytes(), y.dtype, y.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_and_dtypes_are_those_of_eager_work(dtype):
    x = mt.asarray(np.asarray([1, 0, 3])).astype(dtype)
    for name, op in BINARY.items():
        for fn, numbers in itertools.product((op, lambda x, n, op=op: op(n, x)), (FLOATS, INTS)):
            fast = mt.compile(fn)
            for n in numbers:
                for _ in range(2):
                    assert outcome(fast, x, n) == outcome(fn, x, n), (dtype, name, n)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int64"])
def test_numbers_that_only_enter_arithmetic_cost_one_trace(dtype):
    def step(w, g, lr, *, decay):
        rate = lr * 0.5 + 1.0 / (2.0 + decay) - -(lr**2)
        return w - rate * (g + decay * w), w / lr, mt.maximum(w, decay) > lr

    fast = mt.compile(step)
    w, g = mt.asarray(np.asarray([1, 2, 3])).astype(dtype), mt.asarray(np.asarray([3, 1, 2])).astype(dtype)
    for i in range(5):
        lr, decay = 0.1 / (i + 1), 0.01 * i
        for a, b in zip(fast(w, g, lr, decay=decay), step(w, g, lr, decay=decay), strict=True):
            assert outcome(np.asarray, a) == outcome(np.asarray, b)
    assert fast.signatures == 1
    fast(w, g, 1, decay=0.0)  # of another type
    assert fast.signatures == 2
    assert str(fast.program(w, g, 0.25, decay=0.5)) == str(mt.compile(step).program(w, g, 0.25, decay=0.5))


X = mt.asarray([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


def small(n):
    if n > 1:
        return 2.0
    return 1.0


STEERS = {
    "if": lambda x, n: x if n > 1 else -x,
    "truth": lambda x, n: x * 2.0 if n else x,
    "equality": lambda x, n: x * (n == 2),
    "in": lambda x, n: x * (n in (1, 2)),
    "in a helper": lambda x, n: x * small(n),
    "of what is calculated": lambda x, n: x * n if n * 2 - 1 > 2 else x,
    "min": lambda x, n: x * min(n, 2),
    "a loop": lambda x, n: sum((x for _ in range(n)), x),
    "a shape": lambda x, n: x + mt.zeros((n + 1, 1, 1)),
    "an axis": lambda x, n: x.sum(axis=n % 2),
    "an index": lambda x, n: x[n % 2],
    "a slice": lambda x, n: x[:, : n + 1],
    "a list": lambda x, n: x * [1.0, 2.0, 3.0, 4.0][n],
    "a dict": lambda x, n: x * {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}[n],
    "a text": lambda x, n: x * len(f"{n * 100}"),
    "repetition": lambda x, n: x * len("a" * n),
    "math": lambda x, n: x * math.sqrt(n + 1),
    "float": lambda x, n: x * float(n),
    "int": lambda x, n: x * int(n / 2),
    "round": lambda x, n: x * round(n / 2),
    "divmod": lambda x, n: x * divmod(n, 2)[1],
    "bits": lambda x, n: x * ((n & 1) + (n << 1) + (1 << n) + ~n),
    "NumPy": lambda x, n: x * np.sqrt(n + 1.0) + np.float32(2.0) * n,
    "an array of it": lambda x, n: x + mt.asarray(n) + mt.asarray([n, 1.0])[0] + mt.full((3,), n),
    "arange": lambda x, n: x + mt.arange(n + 1).sum(),
    "linspace": lambda x, n: x + mt.linspace(0.0, n, 3),
    "isinstance": lambda x, n: x * (2.0 if isinstance(n, int) else 3.0),
    "an attribute": lambda x, n: x * n.real + n.bit_length(),
    "written": lambda x, n: x.at[0].set(n).at[1].add(n),
    "item": lambda x, n: _item(x, n),
    "reshape": lambda x, n: mt.repeat(x, n + 1, axis=0),
    "one_hot": lambda x, n: mt.nn.one_hot(mt.asarray([0, 1]), n + 2),
    "power": lambda x, n: x**n + n**x,
    "only": lambda x, n: x * (2**n) + n,
    "divided": lambda x, n: x * (6 / (n + 1)) + 7 // (n + 1),
    "a type that depends on the value": lambda x, n: x * 2 ** (1 - n),
    "given back": lambda x, n: (x, n, n + 1)[1 + n % 2] * x,
    "in its derivative": lambda x, n: mt.grad(lambda v: mt.sum(v * v * n + v**n))(x),
    "checkpointed": lambda x, n: mt.grad(lambda v: mt.sum(mt.checkpoint(lambda u: u * u * n)(v)))(x),
    "hooked": lambda x, n: mt.gradient_hook(x * n, lambda g: g * n),
    "nested": lambda x, n: mt.compile(lambda v, m: v * m if m > 1 else v)(x, n),
    "tree": lambda x, n: mt.sum(mt.stack(mt.tree_map(lambda v: v * n, [x, x]))),
}


@pytest.mark.parametrize("name", STEERS)
def test_numbers_that_steer_are_read(name):
    fn = STEERS[name]
    fast = mt.compile(fn)
    for _ in range(2):
        for n in (1, 2, 3, 0, 1):
            assert outcome(fast, X, n) == outcome(fn, X, n), n
    assert fast.signatures <= 10


def _item(x, n):
    x = x * 1.0
    x[0, n % 2] = n
    return x


def test_results_that_are_numbers():
    fast = mt.compile(lambda x, n: (x * n, n, [n * 2.0]))
    for n in (1.0, 2.5):
        y, a, (b,) = fast(X, n)
        assert (type(a), a, type(b), b) == (float, n, float, n * 2.0)
        assert y.tolist() == (X * n).tolist()


def test_errors_are_those_of_the_code():
    fn = lambda x, n: x * (1.0 / n)  # noqa: E731
    fast = mt.compile(fn)
    assert fast(X, 2.0).tolist() == fn(X, 2.0).tolist()
    with pytest.raises(ZeroDivisionError):
        fast(X, 0.0)
    add = mt.compile(lambda x, n: x + n)
    ints = mt.asarray([1, 2], dtype=mt.int8)
    assert add(ints, 100).tolist() == [101, 102]
    with pytest.raises(mt.errors.NumberRangeError):
        add(ints, 300)
    assert add(ints, 1).tolist() == [2, 3]


@pytest.mark.parametrize("kind", ["grad of compiled", "compiled grad", "tape", "hook"])
def test_derivatives_follow_numbers(kind):
    def loss(x, n):
        y = mt.gradient_hook(x, lambda g: g * 1.0) if kind == "hook" else x
        return mt.sum(mt.tanh(y * n) / n + n * y * y)

    fast = mt.compile(loss)
    both = mt.compile(mt.value_and_grad(loss))
    for n in (0.5, 2.0, 3.0):
        want = mt.grad(loss)(X, n)
        if kind == "compiled grad":
            found = both(X, n)[1]
        elif kind == "tape":
            with mt.Tape() as tape:
                tape.watch(X)
                y = fast(X, n)
            found = tape.gradient(y, X)
        else:
            found = mt.grad(fast)(X, n)
        np.testing.assert_allclose(np.asarray(found), np.asarray(want), rtol=1e-14)
    assert (both if kind == "compiled grad" else fast).signatures == (3 if kind == "hook" else 1)


def test_on_a_mesh_and_with_arguments_that_are_given_up():
    mesh = mt.Mesh({"data": 2})
    fn = lambda w, g, lr: w - lr * g  # noqa: E731
    fast = mt.compile(fn)
    w, g = (mt.distribute(np.arange(4.0) + k, mesh, data=mt.Shard(0)) for k in range(2))
    for lr in (0.1, 0.2, 0.3):
        w, want = fast(w, g, lr), fn(w, g, lr)
        assert outcome(np.asarray, w) == outcome(np.asarray, want)
    assert fast.signatures == 1
    given = mt.compile(fn, donate=0)
    w, g = mt.asarray(np.arange(40_000.0)), mt.ones(40_000)
    for lr in (0.1, 0.2, 0.3):
        want = np.asarray(w) - lr * np.asarray(g)
        w = given(w, g, lr)
        np.testing.assert_array_equal(np.asarray(w), want)
    assert given.signatures == 1


def test_programs_of_numbers_that_steer_make_room():
    fast = mt.compile(lambda x, n, k: x * k if n > 2 else x, cache_size=2)
    for n in range(5):
        assert fast(X, n, 1.5).tolist() == (X * 1.5 if n > 2 else X).tolist()
    before = fast.signatures
    fast(X, 4, 2.5)
    fast(X, 4, 3.5)
    assert fast.signatures == before


@pytest.mark.parametrize("kind", [lambda n: type(n) is float, lambda n: n.__class__ is float, lambda n: type(n) == int])  # noqa: E721
def test_code_that_asks_for_the_type_of_a_number_is_told_it(kind: Callable[[float], bool]) -> None:
    def fn(x: mt.Array, n: float) -> mt.Array:
        return x * 3 if kind(n) else x * 5

    x, compiled = mt.asarray([1.0, 2.0]), mt.compile(fn)
    for n in (0.5, 2, True, 1e39, -7):
        assert compiled(x, n).tolist() == fn(x, n).tolist()
