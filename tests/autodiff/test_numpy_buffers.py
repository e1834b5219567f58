"""Elements of watched arrays that NumPy writes into its own memory: refused; numbers that the user asks for:
constants."""

from __future__ import annotations

import array
import json
import math
import operator

import numpy as np
import pytest

import meshtape as mt
from meshtape.errors import GradientError, TracedValueError


def fill_in_a_loop(v):
    o = np.zeros(3)
    for i in range(3):
        o[i] = v[i] ** 2
    return mt.asarray(o)


def add_in_a_loop(v):
    o = np.zeros(3)
    for i in range(3):
        o[i] += v[i] ** 2
    return mt.asarray(o)


def fill_of_integers(v):
    o = np.zeros(3, int)
    o[0] = v[0]
    return mt.asarray(o.astype(float))


def fill_of_complex_numbers(v):
    o = np.zeros(3, complex)
    o[0] = v[0]
    return mt.asarray(o.real)


def from_an_iterator(v):
    return mt.asarray(np.fromiter((a * a for a in v), float))


def from_an_iterator_with_a_count(v):
    return mt.asarray(np.fromiter((a * a for a in v), count=3, dtype=float))


def method_fill(v):
    o = np.zeros(3)
    o.fill(v[0])
    return mt.asarray(o)


def slice_of_a_buffer(v):
    o = np.zeros(3)
    o[0:1] = v[0]
    return mt.asarray(o)


def array_of_the_standard_library(v):
    o = array.array("d", [0.0, 0.0, 0.0])
    o[0] = v[0]
    return mt.asarray(o)


def appended_to_an_array_of_the_standard_library(v):
    o = array.array("d")
    o.append(v[0])
    return mt.asarray(o)


def made_an_array_of_the_standard_library(v):
    return mt.asarray(array.array("d", [v[0], v[1], v[2]]))


def method_setitem(v):
    o = np.zeros(3)
    o.__setitem__(0, v[0])
    return mt.asarray(o)


def function_setitem(v):
    o = np.zeros(3)
    operator.setitem(o, 0, v[0])
    return mt.asarray(o)


def field_of_a_record(v):
    o = np.zeros(3, dtype=[("a", float)])
    o[0] = (v[0],)
    return mt.asarray(o["a"])


class Owner:
    def __init__(self):
        self.buffer = np.zeros(3)

    def fill(self, v):
        self.buffer.fill(v[0])
        return mt.asarray(self.buffer)


def buffer_of_an_object(v):
    return Owner().fill(v)


WRITES = [
    appended_to_an_array_of_the_standard_library,
    made_an_array_of_the_standard_library,
    method_setitem,
    function_setitem,
    field_of_a_record,
    buffer_of_an_object,
    fill_in_a_loop,
    add_in_a_loop,
    fill_of_integers,
    fill_of_complex_numbers,
    from_an_iterator,
    from_an_iterator_with_a_count,
    method_fill,
    slice_of_a_buffer,
    array_of_the_standard_library,
]
V = mt.asarray([1.0, 2.0, 3.0])


def tape_of(f, v):
    with mt.Tape() as tape:
        tape.watch(v)
        y = f(v)
    return tape.gradient(y, v)


@pytest.mark.parametrize(
    "by", [lambda f, v: mt.grad(f)(v), lambda f, v: mt.vjp(f, v), tape_of], ids=["grad", "vjp", "tape"]
)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_into_a_buffer_is_refused(write, by):
    with pytest.raises(GradientError, match=r"mt\.stack|stop_gradient"):
        by(lambda v: mt.sum(write(v) * v), V)


@pytest.mark.parametrize("write", WRITES)
def test_a_compiled_one_says_so_in_our_words(write):
    with pytest.raises(TracedValueError, match=r"mt\.stack"):
        mt.compile(lambda v: mt.sum(write(v) * v))(V)


def test_a_stack_in_its_place_has_the_gradient():
    f = lambda v: mt.sum(mt.stack([v[i] ** 2 for i in range(3)]) * v)  # noqa: E731
    assert mt.grad(f)(V).tolist() == [3.0, 12.0, 27.0]


def as_constant(v):
    o = np.zeros(3)
    for i in range(3):
        o[i] = float(v[i])
    return mt.asarray(o)


def in_a_row_of_constants(v):
    return mt.asarray(np.fromiter((float(a) for a in v), float))


def in_texts(v):
    o = {}
    o[str(v[0])] = f"{v[0]:.2f} {float(v[1])} {v}"
    print(v[0], end="")
    json.dumps(float(v[0]))
    return mt.asarray([float(v[0]), v[1].item(), math.sqrt(v[2]) ** 2])


class Reader:
    asked = 0

    @property
    def store(self):
        Reader.asked += 1
        return math

    def read(self, v):
        before = Reader.asked
        y = self.store.sqrt(v[0])
        assert Reader.asked == before + 1  # looking at the call calls nothing
        return y


def in_calls_of_other_functions(v):
    i = int(v[0])
    scalar = np.float64(v[1])
    return mt.asarray([Reader().read(v), scalar, [0.0, 1.0, 2.0, 3.0][i] + round(v[1] if i else v[0])])


def in_python_containers(v):
    o, d = [0.0, 0.0, 0.0], {}
    o[0], d["a"] = v[0], v[1]
    return mt.stop_gradient(mt.stack([o[0], d["a"], v[2]]))


def rounded(v):
    return mt.asarray([round(float(v[0])), int(v[1]), math.floor(v[2])])


@pytest.mark.parametrize(
    "read", [as_constant, in_a_row_of_constants, in_texts, in_calls_of_other_functions, in_python_containers, rounded]
)
def test_numbers_that_are_asked_for_are_constants(read):
    assert mt.grad(lambda v: mt.sum(read(v) * v))(V).tolist() == pytest.approx([1.0, 2.0, 3.0])


def test_pandas_may_take_numbers_of_watched_arrays():
    pandas = pytest.importorskip("pandas")

    def f(v):
        log = pandas.DataFrame({"a": [0.0]})
        log.loc[0, "a"] = float(v[0])
        return mt.sum(v) * float(log["a"][0])

    assert mt.grad(f)(V).tolist() == [1.0, 1.0, 1.0]


def test_a_buffer_that_nobody_watches_is_filled():
    o = np.zeros(3)
    for i in range(3):
        o[i] = V[i] ** 2
    assert o.tolist() == [1.0, 4.0, 9.0]


def test_an_error_of_the_users_own_stays():
    def f(v):
        raise ValueError("array element") from KeyError("mine")

    with pytest.raises(ValueError, match="array element"):
        mt.grad(f)(V)
