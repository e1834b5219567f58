"""Writes of a compiled function to what is not its own are done as the plain function does them, or refused: never
lost."""

from __future__ import annotations

import collections
import dataclasses
import types

import numpy as np
import pytest

import meshtape as mt
from meshtape.errors import DonatedArrayError, TracedValueError


def array():
    return mt.asarray([1.0, 2.0, 3.0])


def put(x):
    x[0] = 9.0


def put_all(x):
    x[...] = 0.0


def put_mask(x):
    x[x > 1.5] = 0.0


def put_view(x):
    x[1:] *= 2.0


def add(x):
    x += 1.0


def subtract(x):
    x -= x


def multiply(x):
    x *= 2.0


def divide(x):
    x /= 2.0


def power(x):
    x **= 2


WRITES = [put, put_all, put_mask, put_view, add, subtract, multiply, divide, power]


@dataclasses.dataclass
class Pair:
    a: object
    b: object


PLACES = {
    "argument": (lambda x: ((x,), {}), lambda *a: a[0], "argument 0:"),
    "keyword": (lambda x: ((), {"x": x}), lambda x: x, "argument x:"),
    "second": (lambda x: ((1.0, x), {}), lambda *a: a[1], "argument 1:"),
    "dict": (lambda x: (({"w": x},), {}), lambda d: d["w"], r"argument 0\.w:"),
    "list": (lambda x: (([1, [x]],), {}), lambda t: t[1][0], r"argument 0\.1\.0:"),
    "dataclass": (lambda x: ((Pair(1, x),), {}), lambda p: p.b, r"argument 0\.b:"),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("place", PLACES)
def test_a_write_to_an_argument_is_refused(write, place):
    make, find, name = PLACES[place]

    def f(*args, **kwargs):
        x = find(*args, **kwargs)
        write(x)
        return x.sum()

    fast, x = mt.compile(f), array()
    args, kwargs = make(x)
    for _ in range(2):
        with pytest.raises(TracedValueError, match=rf"\[compile\] f writes in place to its {name}.*mt\.copy.*return"):
            fast(*args, **kwargs)
        assert x.tolist() == [1, 2, 3]

    def on_a_copy(*args, **kwargs):
        x = mt.copy(find(*args, **kwargs))
        write(x)
        return x

    plain = array()
    write(plain)
    for _ in range(2):
        assert mt.compile(on_a_copy)(*args, **kwargs).tolist() == plain.tolist()


@pytest.mark.parametrize("write", WRITES)
def test_an_argument_that_is_given_up_may_be_written_to(write):
    def f(x):
        write(x)
        return x

    plain, fast = f(array()), mt.compile(f, donate=0)
    for _ in range(2):
        x = array()
        assert fast(x).tolist() == plain.tolist()
        with pytest.raises(DonatedArrayError):
            x + 1.0


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda d: d.update(y=d["x"] * 2.0), r"0\.y"),
        (lambda d: d.__setitem__("x", d["x"] * 2.0), r"0\.x"),
        (lambda d: d.pop("x"), r"0\.x"),
        (lambda d: d["l"].append(d["x"]), r"0\.l\.1"),
        (lambda d: d["l"].clear(), r"0\.l\.0"),
        (lambda d: d["l"].__setitem__(0, 7), r"0\.l\.0"),
        (lambda d: d["l"].append([]), "container"),
        (lambda d: setattr(d["p"], "a", 3), r"0\.p\.a"),
    ],
)
def test_a_write_to_a_container_that_is_an_argument_is_refused(change, path):
    fast = mt.compile(lambda d: (change(d), 1.0 * array())[1])
    with pytest.raises(
        TracedValueError, match=rf"writes to a container that is its argument, at .*{path}.*return that"
    ):
        fast({"x": array(), "l": [5], "p": Pair(1, 2)})


def test_a_constructor_that_changes_what_it_is_given_is_no_write():
    @dataclasses.dataclass
    class Scaled:
        x: object

        def __post_init__(self):
            self.x = mt.asarray(self.x) * 1.0

    assert mt.compile(lambda s: s.x * 2.0)(Scaled(array())).tolist() == [2, 4, 6]


# ----- around the function --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", WRITES)
def test_a_traced_value_in_an_array_around_the_function_is_refused(write):
    w = array()

    def f(x):
        nonlocal w
        if write in (add, subtract, multiply, divide, power):
            w += x
        else:
            w[...] = x
        return x * 1.0

    with pytest.raises(
        TracedValueError, match=r"f writes in place to an array around it.*pass the array as an argument"
    ):
        mt.compile(f)(array())
    assert w.tolist() == [1, 2, 3]  # and has its value still


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.filterwarnings("ignore:.*is traced at every call:RuntimeWarning")
def test_a_known_value_in_an_array_around_the_function_is_written_at_every_call(write):
    def pair(w):
        def f(x):
            write(w)
            return x * w

        return f

    ours, theirs = array(), array()
    fast, plain = mt.compile(pair(ours)), pair(theirs)
    for _ in range(4):
        assert fast(array()).tolist() == plain(array()).tolist()
        assert ours.tolist() == theirs.tolist()


class Model:
    def __init__(self):
        self.k, self.notes, self.table, self.nested = 1.0, [], {}, {"l": [0]}


def outside(write):
    """A function that writes, and how to see what it wrote to."""
    m = Model()
    state = types.SimpleNamespace(n=0)
    count = 0

    def of_cell(x):
        nonlocal count
        count += 1

    def of_method(m, x):
        m.k = m.k + 1.0

    steps = {
        "attribute": lambda x: setattr(m, "k", 5.0),
        "counter": lambda x: setattr(m, "k", m.k + 1.0),
        "list": lambda x: m.notes.append(x.shape),
        "extend": lambda x: m.notes.extend([1, 2]),
        "dict": lambda x: m.table.__setitem__("a", x.ndim),
        "grows": lambda x: m.table.__setitem__(len(m.table), 1),
        "nested": lambda x: m.nested["l"].append(1),
        "deleted": lambda x: m.__dict__.pop("k", None),
        "namespace": lambda x: setattr(state, "n", state.n + 1),
        "cell": of_cell,
        "method": lambda x: of_method(m, x),
    }

    def f(x):
        steps[write](x)
        return x * 2.0

    return f, lambda: (vars(m), vars(state), count), m


@pytest.mark.parametrize(
    "write",
    ["attribute", "counter", "list", "extend", "dict", "grows", "nested", "deleted", "namespace", "cell", "method"],
)
@pytest.mark.filterwarnings("ignore:.*is traced at every call:RuntimeWarning")
def test_a_write_to_an_object_is_done_at_every_call(write):
    f, ours, mine = outside(write)
    g, theirs, other = outside(write)
    fast = mt.compile(f)
    for i in range(6):
        if i == 4:
            for m in (mine, other):  # back to where it was: the write is due again
                m.__dict__.update(vars(Model()))
        assert fast(array()).tolist() == g(array()).tolist()
        assert ours() == theirs(), i


@pytest.mark.filterwarnings("ignore:.*is traced at every call:RuntimeWarning")
def test_a_write_to_an_object_that_is_an_argument_is_done_at_every_call():
    def f(m, x):
        m.notes.append(1)
        m.k = 3.0
        return x * m.k

    fast, m = mt.compile(f), Model()
    for i in range(4):
        m.k = 1.0
        assert fast(m, array()).tolist() == [3, 6, 9]
        assert (m.k, len(m.notes)) == (3.0, i + 1)


@pytest.mark.filterwarnings("ignore:.*is traced at every call:RuntimeWarning")
@pytest.mark.parametrize(
    "doubtful",
    [lambda: np.arange(3.0), lambda: float(np.random.default_rng(0).normal()), lambda: mt.asarray([1.0, 2.0, 3.0])],
)
def test_a_function_that_is_looked_at_twice_writes_once(doubtful):
    def counting(count):
        def f(x, n):
            count["n"] += 1
            return x * n + doubtful()

        return f

    ours, theirs = {"n": 0}, {"n": 0}
    fast, plain = mt.compile(counting(ours)), counting(theirs)
    for n in (1.0, 2.0, 2.0, 3):
        assert fast(array(), n).tolist() == plain(array(), n).tolist()
        assert ours == theirs


GLOBAL = None


def keep_global(x):
    global GLOBAL
    GLOBAL = x * 2.0
    return x


@pytest.mark.parametrize(
    "keep",
    [
        lambda m, x: setattr(m, "cache", x * 2.0),
        lambda m, x: m.notes.append(x * 2.0),
        lambda m, x: m.table.update(a=(1, {"b": x})),
        lambda m, x: m.nested["l"].append(x),
        lambda m, x: keep_global(x),
    ],
)
def test_a_traced_array_that_is_kept_is_refused(keep):
    m = Model()

    def f(x):
        keep(m, x)
        return x * 1.0

    with pytest.raises(
        TracedValueError, match=r"f keeps a traced array in \S+, which has a value only while.*return it"
    ):
        mt.compile(f)(array())


# ----- derivatives ----------------------------------------------------------------------------------------------------


def transforms():
    one = mt.ones(3)
    return {
        "grad": lambda f, x: mt.grad(f)(x),
        "value_and_grad": lambda f, x: mt.value_and_grad(f)(x)[1],
        "vjp": lambda f, x: mt.vjp(f, x)[1](mt.asarray(1.0))[0],
        "jvp": lambda f, x: mt.stack([mt.jvp(f, (x,), (e,))[1] for e in mt.eye(3)]),
        "hvp": lambda f, x: mt.hvp(f, x, one),
        "hessian": lambda f, x: mt.hessian(f)(x).sum(axis=0),
        "compiled": lambda f, x: mt.compile(mt.grad(f))(x),
    }


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", transforms())
def test_a_derivative_is_taken_of_a_copy(write, name):
    """The function writes to an array of its own: the caller's stays the point at which the derivative is."""

    def f(x):
        write(x)
        return (x * x * x).sum()

    def pure(x):
        x = x * 1.0
        write(x)
        return (x * x * x).sum()

    x, transform = array(), transforms()[name]
    found = transform(f, x)
    assert x.tolist() == [1, 2, 3]
    np.testing.assert_allclose(np.asarray(found), np.asarray(transform(pure, x)), rtol=1e-12)
    if name == "grad":
        for i in range(3):
            e = 1e-6 * np.eye(3)[i]
            slope = (float(pure(x + mt.asarray(e))) - float(pure(x - mt.asarray(e)))) / 2e-6
            np.testing.assert_allclose(float(found[i]), slope, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("write", WRITES)
def test_the_derivative_of_a_compiled_function_that_writes_is_refused(write):
    def f(x):
        write(x)
        return x.sum()

    x = array()
    with pytest.raises(TracedValueError, match="writes in place to its argument"):
        mt.grad(mt.compile(f))(x)
    assert x.tolist() == [1, 2, 3]
    y = array()
    write(y)
    with mt.Tape() as tape:  # a tape watches the caller's own array, which is written to as it is without one
        tape.watch(x)
        f(x)
    assert x.tolist() == y.tolist()


@pytest.mark.parametrize(
    "make", [lambda: np.zeros(2), lambda: {1}, lambda: bytearray(b"a"), lambda: collections.deque([1])]
)
def test_what_a_function_returns_is_the_callers(make):
    f = mt.compile(lambda v: (v * 2, [make()]))
    for _ in range(3):
        (made,) = f(mt.ones(2))[1]
        assert repr(made) == repr(make())
        if isinstance(made, np.ndarray):
            made += 1
        else:
            made.clear()
    given = make()
    assert mt.compile(lambda v, a: (v, a))(mt.ones(2), given)[1] is given or isinstance(given, np.ndarray)


@pytest.mark.parametrize("make", [lambda: iter([1]), lambda: (i for i in range(3)), lambda: zip([1], [2], strict=True)])
def test_iterators_are_no_results(make):
    with pytest.raises(mt.errors.TracedValueError, match="return a list"):
        mt.compile(lambda v: (v, make()))(mt.ones(2))
