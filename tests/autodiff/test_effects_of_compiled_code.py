"""Whatever a compiled function does beside computing happens at each call; what it returns or keeps is the caller's
own."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import json
import logging
import queue
import random
import re
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import meshtape as mt

X = mt.ones(2)


def queues(kind):
    q = kind()
    return lambda x: (q.put(1), x + 1)[1], q.qsize


def stream(make, text):
    f = make()
    return lambda x: (f.write(text), x + 1)[1], lambda: len(f.getvalue())


def log(name, named):
    records = []
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    if named:
        return lambda x: (logging.getLogger(name).warning("said"), x + 1)[1], lambda: len(records)
    return lambda x: (logger.info("said"), x + 1)[1], lambda: len(records)


def taken(iterator):
    return lambda x: (next(iterator), x + 1)[1], lambda: copy_of(next(iterator))


def copy_of(value):
    return value[0] if isinstance(value, tuple) else value


def generator(g, draw):
    before = copy.deepcopy(g)

    def left():
        """How many draws lead from the state that was to that which is."""
        after = state(g)
        for n in range(20):
            if state(before) == after:
                return n
            draw(before)
        return None

    return lambda x: (draw(g), x + 1)[1], left


def state(g):
    return g.getstate() if isinstance(g, random.Random) else repr(g.bit_generator.state)


def global_draw():
    random.seed(5)
    wanted = [random.random() for _ in range(20)]
    random.seed(5)
    return lambda x: (random.random(), x + 1)[1], lambda: wanted.index(random.random())


def semaphore():
    s = threading.Semaphore(9)
    return lambda x: (s.acquire(), x + 1)[1], lambda: 9 - s._value


EFFECTS = {
    "Queue": lambda: queues(queue.Queue),
    "LifoQueue": lambda: queues(queue.LifoQueue),
    "SimpleQueue": lambda: queues(queue.SimpleQueue),
    "StringIO": lambda: stream(io.StringIO, "a"),
    "BytesIO": lambda: stream(io.BytesIO, b"a"),
    "a logger": lambda: log("effects.one", False),
    "a logger by name": lambda: log("effects.two", True),
    "count": lambda: taken(itertools.count()),
    "list iterator": lambda: taken(iter(range(100))),
    "generator": lambda: taken(i for i in range(100)),
    "zip": lambda: taken(zip(range(100), range(100), strict=True)),
    "Random": lambda: generator(random.Random(0), lambda g: g.random()),
    "numpy Generator": lambda: generator(np.random.default_rng(0), lambda g: g.random()),
    "random": global_draw,
    "Semaphore": semaphore,
}


@pytest.mark.parametrize("name", EFFECTS)
def test_effects_happen_at_each_call_with_one_warning(name):
    fn, count = EFFECTS[name]()
    fast = mt.compile(fn)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            assert float(fast(X)[0]) == 2.0
    assert count() == 4
    assert len([w for w in told if "is traced at every call: it writes to" in str(w.message)]) == 1


def test_a_log_that_nobody_reads_is_no_effect():
    logger = logging.getLogger("effects.silent")
    logger.setLevel(logging.ERROR)
    fast = mt.compile(lambda x: (logger.debug("not said"), x + 1)[1])
    for _ in range(3):
        fast(X)
    assert fast.signatures == 1


def test_a_file(tmp_path):
    with (tmp_path / "f").open("w") as f:
        fast = mt.compile(lambda x: (f.write("a"), x + 1)[1])
        fast(X)
        with pytest.warns(RuntimeWarning, match="traced at every call"):
            fast(X)
        fast(X)
    assert (tmp_path / "f").read_text() == "aaa"


def test_the_seed_of_the_whole_process_is_set_at_each_call():
    fast = mt.compile(lambda x: (np.random.seed(3), x)[1])  # noqa: NPY002
    for _ in range(3):
        np.random.seed(4)  # noqa: NPY002
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the second call
            fast(X)
        found = np.random.random()  # noqa: NPY002
        np.random.seed(3)  # noqa: NPY002
        assert found == np.random.random()  # noqa: NPY002


# ----- what is written for the first time -----------------------------------------------------------------------------


class Holder:
    pass


@pytest.mark.parametrize("values", [("a", "b", "a"), (1, 2, 1), (0.5, 0.7, 0.5), ((1, 2), (3, 4), (1, 2))])
def test_an_attribute_that_was_not_there(values):
    def store(o, v):
        o.last = v

    for write in (store, lambda o, v: setattr(o, "last", v), lambda o, v: o.__dict__.update(last=v)):
        o = Holder()
        fast = mt.compile(lambda x, v, o=o, write=write: (write(o, v), x)[1])
        for v in values:
            fast(X, v)
            assert o.last == v
            assert type(o.last) is type(v)


def test_numbers_that_are_kept_are_numbers():
    o, seen, table = Holder(), [], {}
    o.rate = 0.5

    def step(x, rate):
        o.rate, table["rate"] = rate, rate
        seen.append(rate * 2)
        o.both = (rate, [rate], {"in": (rate, {rate})})
        return x * rate

    fast = mt.compile(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rate in (0.5, 0.7, 0.5):  # the first is what stands there
            assert float(fast(X, rate)[0]) == rate
            assert (o.rate, table["rate"], seen[-1]) == (rate, rate, rate * 2)
            assert json.dumps([o.rate, table, seen, o.both[:2], o.both[2]["in"][0]])
            assert {type(v) for v in (o.both[0], o.both[1][0], o.both[2]["in"][0], *o.both[2]["in"][1])} == {float}
    assert len(seen) == 3


def test_a_number_that_is_kept_where_it_stands_already():
    o = Holder()
    o.rate = 0.5

    def step(x, rate):
        o.rate = rate
        return x * rate

    fast = mt.compile(step)
    for rate in (0.5, 0.7, 0.5, 0.9):
        fast(X, rate)
        assert o.rate == rate


# ----- values that change ---------------------------------------------------------------------------------------------


def changing_argument(kind):
    return (
        lambda fast, k: fast(X, kind(k)),
        mt.compile(lambda x, v: x * v),
        r"argument 1 is another one each time \(now",
    )


def changing_attribute(_):
    o = Holder()

    def call(fast, k):
        o.rate = k / 10
        return fast(X)

    return call, mt.compile(lambda x: x * o.rate), r"o\.rate is another one each time: pass it as an argument"


def changing_array(_):
    o = Holder()

    def call(fast, k):
        o.w = mt.full(2, float(k))
        return fast(X)

    return call, mt.compile(lambda x: x * o.w), r"o\.w is another one each time"


def index(_):
    numbers = list(range(100))
    return lambda fast, k: fast(X, k), mt.compile(lambda x, i: x * numbers[i]), "argument 1 is another one each time"


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (changing_argument, np.float64),
        (changing_argument, np.int64),
        (changing_attribute, 0),
        (changing_array, 0),
        (index, 0),
    ],
)
def test_a_value_that_changes_at_each_call_is_named_once(make, kind):
    call, fast, text = make(kind)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for k in range(20):
            call(fast, k)
    (said,) = [str(w.message) for w in told if "was traced" in str(w.message)]  # other threads may warn of their own
    assert re.search(rf"was traced 8 times in succession: {text}", said)


def test_what_is_no_such_value():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = mt.compile(lambda x, v: x * v)
        for k in range(20):
            fast(mt.ones(k), float(k))  # shapes, and numbers that are inputs
        few = mt.compile(lambda x, v: x * [1, 2, 3, 4][v])
        for k in range(20):
            few(X, k % 4)


# ----- results --------------------------------------------------------------------------------------------------------


class Result:
    def __init__(self):
        self.log = []


SHARED = Holder()


def test_objects_that_the_function_makes_are_the_callers_own():
    fast = mt.compile(lambda x: (x, Result(), [Result()], np.zeros(2), {1}))
    first = fast(X)
    first[1].log.append(1)
    first[2][0].log.append(1)
    first[3][0] = 5.0
    first[4].add(2)
    again = fast(X)
    assert fast.signatures == 1
    assert again[1] is not first[1]
    assert (again[1].log, again[2][0].log, again[3].tolist(), again[4]) == ([], [], [0.0, 0.0], {1})


def test_objects_around_the_function_are_handed_out_themselves():
    fast = mt.compile(lambda x, o: (SHARED, o, SimpleNamespace(inner=[SHARED, o])))
    for o in (Holder(), Holder()):
        for _ in range(2):
            shared, given, made = fast(X, o)
            assert shared is SHARED
            assert given is o
            assert made.inner[0] is SHARED
            assert made.inner[1] is o


@pytest.mark.parametrize(
    "make",
    [
        lambda x: threading.Lock(),
        lambda x: functools.partial(mt.add, x),
        lambda x: x.sum,
        lambda x: {mt.sum(x): 1}.keys(),
    ],
)
def test_results_of_which_no_second_can_be_made(make):
    with pytest.raises((mt.errors.TracedValueError, TypeError), match=r"return arrays|hash|traced"):
        mt.compile(lambda x: (x, make(x)))(X)


def test_numbers_in_an_object():
    fast = mt.compile(lambda x, n: (x * n, SimpleNamespace(n=n)))
    for n in (3, 4, 3):
        assert (float(fast(X, n)[0][0]), fast(X, n)[1].n, type(fast(X, n)[1].n)) == (n, n, int)


# ----- custom_vjp -----------------------------------------------------------------------------------------------------


def left_behind(how):
    o = Holder()
    o.list = []

    @mt.custom_vjp
    def f(x):
        return x * x

    def forward(x):
        how(o, x)
        return x * x, x

    f.defvjp(forward, lambda x, g: (2.0 * x * g,))
    return f, o


LEAVES = {
    "attribute": lambda o, x: setattr(o, "kept", mt.exp(x) * 3.0),
    "list": lambda o, x: setattr(o, "kept", (o.list.append(x * 3.0), o.list[-1])[1]),
    "made of another": lambda o, x: setattr(o, "kept", (x * 3.0)[:1]),
}


@pytest.mark.parametrize("name", LEAVES)
def test_what_the_forward_function_leaves_in_an_object(name):
    f, o = left_behind(LEAVES[name])
    np.testing.assert_array_equal(np.asarray(mt.grad(lambda x: mt.sum(f(x)))(X)), [2.0, 2.0])  # not used

    def used(x):
        return mt.sum(f(x)) + mt.sum(o.kept)

    with pytest.raises(mt.errors.NonDifferentiableError, match="left an array in an object"):
        mt.grad(used)(X)
    for wrapped in (mt.compile(mt.grad(used)), mt.grad(mt.compile(used)), mt.grad(mt.checkpoint(used))):
        with pytest.raises((mt.errors.NonDifferentiableError, mt.errors.TracedValueError)):
            wrapped(X)

    def stopped(x):
        return mt.sum(f(x)) + mt.sum(mt.stop_gradient(o.kept))

    np.testing.assert_array_equal(np.asarray(mt.grad(stopped)(X)), [2.0, 2.0])


def test_constants_that_the_forward_function_leaves():
    f, o = left_behind(lambda o, x: setattr(o, "kept", mt.stop_gradient(x) * 3.0))
    np.testing.assert_array_equal(np.asarray(mt.grad(lambda x: mt.sum(f(x)) + mt.sum(o.kept * x))(X)), [5.0, 5.0])


def test_residuals_in_an_object():
    @mt.custom_vjp
    def f(x):
        return mt.sin(x)

    def forward(x):
        return mt.sin(x), SimpleNamespace(cos=mt.cos(x))

    f.defvjp(forward, lambda kept, g: (kept.cos * g,))
    np.testing.assert_allclose(np.asarray(mt.grad(lambda x: mt.sum(f(x)))(X)), np.cos([1.0, 1.0]))


# ----- no functions ---------------------------------------------------------------------------------------------------

MESH = mt.Mesh({"a": 2})
TRANSFORMS = {
    "compile": mt.compile,
    "grad": mt.grad,
    "value_and_grad": mt.value_and_grad,
    "vjp": lambda f: mt.vjp(f, X),
    "jvp": lambda f: mt.jvp(f, (X,), (X,)),
    "jacobian": mt.jacobian,
    "jacobian_blocks": lambda f: mt.jacobian_blocks(f, X),
    "hessian": mt.hessian,
    "hvp": lambda f: mt.hvp(f, X, X),
    "check_grads": lambda f: mt.check_grads(f, X),
    "checkpoint": mt.checkpoint,
    "custom_vjp": mt.custom_vjp,
    "defvjp forward": lambda f: mt.custom_vjp(abs).defvjp(f, abs),
    "defvjp backward": lambda f: mt.custom_vjp(abs).defvjp(abs, f),
    "gradient_hook": lambda f: mt.gradient_hook(X, f),
    "Tape.hook": lambda f: mt.Tape().hook(X, f),
    "shard_map": lambda f: mt.shard_map(f, MESH, {}, {}),
    "scan": lambda f: mt.scan(f, X, mt.ones((2, 2))),
    "stream": lambda f: mt.stream(f, X),
    "pipeline stage": lambda f: mt.pipeline(f, abs, MESH),
    "pipeline loss": lambda f: mt.pipeline(abs, f, MESH),
    "explain": lambda f: mt.explain(f, X),
    "save_program": lambda f: mt.save_program("/nowhere", f, X),
    "tree_map": lambda f: mt.tree_map(f, [X]),
    "map_with_path": lambda f: mt.tree.map_with_path(f, [X]),
}


@pytest.mark.parametrize("bad", [3, "text", None, X], ids=["int", "str", "None", "Array"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_cannot_be_called(name, bad):
    with pytest.raises(mt.errors.NotAFunction, match=rf"takes a function, got {type(bad).__name__}"):
        TRANSFORMS[name](bad)
