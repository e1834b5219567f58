"""Python numbers and lists where NumPy takes them: in functions, beside arrays in operators, and as indices."""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any

import numpy as np
import pytest

import meshtape as mt

NUMBERS: list[tuple[Any, ...]] = [
    (0.5,),
    (0.25, 0.5),
    (3,),
    (3, 2),
    (True,),
    (0.5 + 1j,),
    ([0.25, 0.5],),
    ((0.25, 0.5),),
    ([0.25, 0.5], [0.5, 0.125]),
    ([3, 1], [1, 2]),
    ([0.25, 0.5], 0.5),
    ([[1.0, 2.0], [3.0, 4.0]],),
    (True, 0.25, 0.125),
    ([True, False], [1.0, 2.0], [3.0, 4.0]),
]
# These take a dtype, a tree or a size at the place of an array, or anything at all.
OTHERS = {
    "array",
    "asarray",
    "astype",
    "compute",
    "diag_indices",
    "empty",
    "empty_like",
    "eye",
    "from_dlpack",
    "full",
    "full_like",
}
OTHERS |= {
    "gradient_hook",
    "identity",
    "indices",
    "ones",
    "ones_like",
    "prefetch",
    "zeros",
    "zeros_like",
    "grad",
    "jacobian",
    "compile",
}
FUNCTIONS = [
    (prefix + n, getattr(space, n))
    for prefix, space in (("", mt), ("nn.", mt.nn), ("linalg.", mt.linalg), ("fft.", mt.fft))
    for n in sorted(space.__all__)
    if callable(getattr(space, n)) and not isinstance(getattr(space, n), type) and n not in OTHERS
]


def parts(y: Any) -> list[Any]:
    return list(y) if isinstance(y, tuple | list) else [y]


@pytest.mark.filterwarnings("ignore")
def test_numbers_and_lists_are_arrays_of_themselves():
    taken = 0
    for (name, fn), args in itertools.product(FUNCTIONS, NUMBERS):
        try:
            expected = parts(fn(*map(mt.asarray, args)))
        except Exception:
            continue  # not for so many arguments, or not for these
        if not expected or not all(isinstance(y, mt.arrays.Array) for y in expected):
            continue
        taken += 1
        for a, b in zip(parts(fn(*args)), expected, strict=True):
            assert isinstance(a, mt.arrays.Array), (name, args)
            assert (a.dtype, a.shape) == (b.dtype, b.shape), (name, args)
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=f"{name}{args}")
    assert taken > 600
    assert float(mt.tanh(0.5)) == math.tanh(0.5)
    assert mt.tanh([0.5]).shape == (1,)


BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "eq", "ne", "lt", "le", "gt", "ge"]
BITS = ["and_", "or_", "xor", "lshift", "rshift"]
SIDES = {
    "list": ([3, 1, 2], np.asarray([1, 2, 3])),
    "tuple": ((3, 1, 2), np.asarray([1, 2, 3])),
    "of floats": ([0.5, 1.5, 2.5], np.asarray([1, 2, 3])),
    "beside float32": ([0.5, 1.5, 2.5], np.asarray([1, 2, 3], np.float32)),
    "beside a matrix": ([1, 2, 3], np.ones((2, 3))),
    "nested": ([[1], [2]], np.asarray([1.0, 2.0, 3.0])),
}
CALLS = [(op, side) for op in BINARY for side in SIDES] + [(op, side) for op in BITS for side in ("list", "tuple")]


@pytest.mark.parametrize(("op", "side"), CALLS)
def test_a_list_beside_an_array(op, side):
    given, host = SIDES[side]
    fn, x = getattr(operator, op), mt.asarray(host)
    split = mt.distribute(x, mt.Mesh({"data": 2}), data=mt.Shard(0))
    for left, right in ((True, False), (False, True)):
        expected = fn(host, given) if left else fn(given, host)
        call = (lambda x: fn(x, given)) if left else (lambda x: fn(given, x))
        for found in (call(x), mt.compile(call)(x), call(split)):
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape), right
            np.testing.assert_array_equal(np.asarray(found), expected)


def test_a_list_beside_an_array_has_its_slope_and_its_errors():
    x = mt.asarray([1.0, 2.0])
    assert mt.grad(lambda x: mt.sum(x * [3.0, 4.0]))(x).tolist() == [3, 4]
    assert mt.grad(lambda x: mt.sum(x * [x[0], 4.0]))(x).tolist() == [2, 4]
    assert (x @ [1.0, 2.0]).tolist() == 5
    assert ([1.0, 2.0] @ x).tolist() == 5
    assert [a.tolist() for a in divmod(x, [2, 2])] == [[0, 1], [1, 0]]
    assert [a.tolist() for a in divmod([3, 3], x)] == [[3, 1], [0, 1]]
    y = mt.asarray([1.0, 2.0])
    y += [1, 1]
    assert y.tolist() == [2, 3]
    with pytest.raises(mt.errors.ShapeError, match=r"\(2,\), \(3,\)"):
        operator.add(x, [1, 2, 3])
    with pytest.raises(mt.errors.DTypeError):
        operator.add(x, ["a", "b"])


def test_python_rounds_an_array_of_no_dimensions():
    x = mt.asarray([2.567, -1.5, 2.5])
    for i in range(3):
        one = np.asarray(x)[i]
        assert (round(x[i]), type(round(x[i]))) == (round(one), int)
        assert isinstance(round(x[i], 1), mt.arrays.Array)
        assert float(round(x[i], 1)) == float(round(one, 1))
        assert (math.floor(x[i]), math.ceil(x[i]), math.trunc(x[i])) == (
            math.floor(one),
            math.ceil(one),
            math.trunc(one),
        )
    big = mt.asarray(2**62 + 1)
    assert [f(big) for f in (round, math.floor, math.ceil, math.trunc)] == [2**62 + 1] * 4
    for fn in (round, math.floor, math.ceil, math.trunc):
        with pytest.raises(TypeError, match=r"0-d|shape \(3,\)"):
            fn(x)
        with pytest.raises(TypeError, match="complex"):
            fn(mt.asarray(1j))


def test_small_differences():
    host = np.arange(9.0).reshape(3, 3)
    x = mt.asarray(host)
    for key in ([[], []], [[]], [[[]]], ([], [])):
        assert x[key].shape == host[key].shape
    assert mt.diff(mt.asarray([1, 4]), 0, prepend=0).tolist() == np.diff(np.asarray([1, 4]), 0, prepend=0).tolist()
    assert mt.bincount(mt.asarray([1, 1]), minlength=4).tolist() == [0, 2, 0, 0]
    assert mt.bincount(mt.asarray([1, 6]), None, 4).tolist() == np.bincount([1, 6], None, 4).tolist()
    assert mt.bincount(mt.asarray([], dtype=mt.int64), minlength=2).tolist() == [0, 0]
    with pytest.raises(ValueError, match="minlength"):
        mt.bincount(mt.asarray([1]), minlength=-1)


def test_the_front_door_is_a_namespace_of_the_standard():
    info = mt.__array_namespace_info__()
    assert operator.add(info.devices(), [None]) == [*mt.devices(), None]
    assert type(info.devices()) is list
    assert mt.__array_api_version__ == mt.arrays.__array_api_version__
    assert info.default_dtypes() == mt.arrays.__array_namespace_info__().default_dtypes()


@pytest.mark.parametrize("number", [2**70, -(2**63) - 1, 2**63, 2**64 - 1])
def test_integers_beyond_64_bits_are_floats_among_bfloat16(number):
    """As among floats that NumPy knows."""
    x = mt.ones(2, dtype=mt.bfloat16)
    wanted = mt.asarray([float(number)] * 2, dtype=mt.bfloat16)
    for found in (x * number, mt.maximum(x, number) if number > 0 else mt.minimum(x, number), mt.full_like(x, number)):
        assert found.dtype == x.dtype
        assert (found == wanted).all()
    assert bool((x < number).all()) == (number > 0)
    with pytest.raises(mt.errors.NumberRangeError):
        x * 10**400
