"""A compiled function never uses an old value of what it reads beside its arguments: call, change, call again.

Each case makes a function and a change. What the compiled function gives before and after the change is what the plain
one gives.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import dataclasses
import functools
import itertools
import operator
import os
import sys
import threading
import types
import weakref
from typing import NamedTuple

import numpy as np
import pytest

import meshtape as mt

X = mt.asarray([1.0, 2.0, 3.0])


# ----- ways to hold a value, each with the ways to change it ----------------------------------------------------------
#
# A kind of value is (the first, how it enters the result, ways to change it): `rebind` gives another value to put in
# its place, `write` changes the value that is there.


class Kind(NamedTuple):
    first: object
    other: object
    writes: tuple = ()


def kinds():
    def item(w, v):
        w[0] = v

    return {
        "number": Kind(2.0, 5.0),
        "int": Kind(2, 5),
        "other type": Kind(2, 2.0),
        "bool": Kind(True, False),
        "text": Kind("double", "half"),
        "None": Kind(None, 3.0),
        "array": Kind(
            mt.asarray([1.0, 2.0, 3.0]),
            mt.asarray([4.0, 5.0, 6.0]),
            (
                lambda w: w.__setitem__(..., 7.0),
                lambda w: w.__setitem__(slice(0, 2), 9.0),
                lambda w: w.__iadd__(1.0),
                lambda w: w.__imul__(mt.asarray([1.0, 2.0, 3.0])),
            ),
        ),
        "NumPy": Kind(
            np.asarray([1.0, 2.0, 3.0]),
            np.asarray([4.0, 5.0, 6.0]),
            (lambda w: w.fill(7.0), lambda w: item(w, 5.0), lambda w: np.add(w, 1.0, out=w)),
        ),
        "NumPy scalar": Kind(np.float32(2.0), np.float64(2.0)),
        "list": Kind(
            [2.0, mt.ones(3)], [3.0, mt.ones(3)], (lambda w: item(w, 5.0), lambda w: w[1].__setitem__(0, 8.0))
        ),
        "dict": Kind(
            {"a": 2.0, "b": np.ones(3)},
            {"a": 3.0, "b": np.ones(3)},
            (
                lambda w: w.update(a=7.0),
                lambda w: w["b"].fill(4.0),
                lambda w: w.__setitem__("c", 1.0),
                lambda w: w.clear(),
            ),
        ),
        "nested": Kind({"l": [({"w": mt.ones(3)},)]}, {}, (lambda w: w["l"][0][0]["w"].__setitem__(0, 8.0),)),
        "set": Kind({1.0, 2.0}, {3.0}, (lambda w: w.add(10.0), lambda w: w.discard(1.0))),
        "deque": Kind(
            collections.deque([1.0]), collections.deque([2.0]), (lambda w: w.append(3.0), lambda w: w.rotate())
        ),
        "bytes": Kind(bytearray(b"ab"), bytearray(b"ac"), (lambda w: item(w, 99),)),
        "numbers": Kind(array.array("d", [1.0]), array.array("d", [2.0]), (lambda w: item(w, 3.0),)),
    }


def total(w, x):
    """Any of these values as a factor of ``x``; read by Python code, as configurations are."""
    if isinstance(w, mt.Array):
        return x * w
    if isinstance(w, np.ndarray):
        return x * w + float(w[0])
    if isinstance(w, dict):
        out = x * float(len(w))
        for v in w.values():
            out = out + total(v, x)
        return out
    if isinstance(w, str):
        return x * (2.0 if w == "double" else 0.5)
    if w is None:
        return -x
    if isinstance(w, bool | int | float | np.generic):
        return x * w
    out = x
    for i, v in enumerate(w):
        out = out + (i + 1.0) * total(v, x)
    return out


def by_attribute(value):
    class Model:
        def __init__(self):
            self.w = value

        def __call__(self, x):
            return total(self.w, x)

        def loss(self, x):
            return total(self.w, x)

    m = Model()
    return m.loss, lambda v: setattr(m, "w", v)


def by_call(value):
    m = by_attribute(value)[0].__self__
    return m, lambda v: setattr(m, "w", v)


def by_slot(value):
    class Model:
        __slots__ = ("w",)

        def loss(self, x):
            return total(self.w, x)

    m = Model()
    m.w = value
    return m.loss, lambda v: setattr(m, "w", v)


def by_class_attribute(value):
    class Base:
        w = value

    class Model(Base):
        def loss(self, x):
            return total(self.w, x)

    return Model().loss, lambda v: setattr(Base, "w", v)


def by_shadowed_class_attribute(value):
    class Base:
        w = value

    class Model(Base):
        def loss(self, x):
            return total(self.w, x)

    return Model().loss, lambda v: setattr(Model, "w", v)


def by_shadowing_instance(value):
    class Model:
        w = value

        def loss(self, x):
            return total(self.w, x)

    m = Model()
    return m.loss, lambda v: setattr(m, "w", v)


def by_type(value):
    class Model:
        w = value

        @classmethod
        def loss(cls, x):
            return total(cls.w, x)

    return Model.loss, lambda v: setattr(Model, "w", v)


def by_property(value):
    class Model:
        def __init__(self):
            self._held = [value]

        @property
        def w(self):
            return self._held[0]

        def loss(self, x):
            return total(self.w, x)

    m = Model()
    return m.loss, lambda v: m._held.__setitem__(0, v)


def by_getattr(value):
    class Model:
        def __getattr__(self, name):
            if name == "w":
                return held["w"]
            raise AttributeError(name)

        def loss(self, x):
            return total(self.w, x)

    held = {"w": value}
    return Model().loss, lambda v: held.update(w=v)


def by_name_made_up(value):
    class Layer:
        pass

    layer = Layer()
    layer.w1 = value
    return lambda x: total(getattr(layer, f"w{1}"), x), lambda v: setattr(layer, "w1", v)


def by_vars(value):
    m = types.SimpleNamespace(w=value)
    return lambda x: total(vars(m)["w"], x), lambda v: setattr(m, "w", v)


def by_attrgetter(value):
    class Holder:
        pass

    outer, get = Holder(), operator.attrgetter("inner.w")
    outer.inner = Holder()
    outer.inner.w = value
    return lambda x: total(get(outer), x), lambda v: setattr(outer.inner, "w", v)


def by_chain(value):
    class Holder:
        pass

    a = Holder()
    a.b = Holder()
    a.b.c = {"d": [Holder()]}
    a.b.c["d"][0].w = value
    return lambda x: total(a.b.c["d"][0].w, x), lambda v: setattr(a.b.c["d"][0], "w", v)


def by_layers(value):
    class Layer:
        def __init__(self, w):
            self.w = w

        def __call__(self, x):
            return total(self.w, x)

    class Model:
        def __init__(self):
            self.layers = [Layer(1.0), Layer(value)]

        def __matmul__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    m = Model()
    return lambda x: m @ x, lambda v: setattr(m.layers[1], "w", v)


def by_inheritance(value):
    class Base:
        def inner(self, x):
            return total(self.hidden, x)

    class Model(Base):
        def __init__(self):
            self.hidden = value

        def inner(self, x):
            return super().inner(x) + x

        def loss(self, x):
            return self.inner(x)

    m = Model()
    return m.loss, lambda v: setattr(m, "hidden", v)


def by_dataclass(value):
    @dataclasses.dataclass
    class Config:
        w: object

    c = Config(value)
    return lambda x: total(c.w, x), lambda v: setattr(c, "w", v)


def by_replaced_dataclass(value):
    @dataclasses.dataclass(frozen=True)
    class Config:
        w: object

    class Model:
        def loss(self, x):
            return total(self.config.w, x)

    m = Model()
    m.config = Config(value)
    return m.loss, lambda v: setattr(m, "config", Config(v))


def by_namespace(value):
    args = argparse.Namespace(w=value)
    return lambda x: total(args.w, x), lambda v: setattr(args, "w", v)


def by_user_dict(value):
    config = collections.UserDict(w=value)
    return lambda x: total(config["w"], x), lambda v: config.update(w=v)


def by_default(value):
    def f(x, w=value):
        return total(w, x)

    return f, lambda v: setattr(f, "__defaults__", (v,))


def by_keyword_default(value):
    def f(x, *, w=value):
        return total(w, x)

    return f, lambda v: f.__kwdefaults__.update(w=v)


def by_nonlocal(value):
    w = value

    def f(x):
        return total(w, x)

    def change(v):
        nonlocal w
        w = v

    return f, change


def by_cell_bound_late(value):
    def f(x):
        return g(x) if ready else x

    ready = [1]

    def g(x):
        return total(w, x)

    w = value

    def change(v):
        nonlocal w
        w = v

    return f, change


def by_nested_function(value):
    w = value

    def f(x):
        def inner(y):
            return (lambda z: total(w, z))(y)

        return inner(x)

    def change(v):
        nonlocal w
        w = v

    return f, change


def by_comprehension(value):
    held = [value]
    return lambda x: sum((total(w, x) for w in held), x), lambda v: held.__setitem__(0, v)


def by_partial(value):
    f = functools.partial(lambda x, w: total(w, x), w=value)
    return f, lambda v: f.keywords.update(w=v)


def by_partial_of_method(value):
    m = by_attribute(value)[0].__self__
    return functools.partial(m.loss), lambda v: setattr(m, "w", v)


def by_lambda_in_container(value):
    table = {"f": lambda x: total(value, x)}
    return lambda x: table["f"](x), lambda v: table.update(f=lambda x: total(v, x))


def by_decorated(value):
    held = {"w": value}

    def decorate(fn):
        @functools.wraps(fn)
        def wrapped(x):
            return fn(x)

        return wrapped

    @decorate
    def f(x):
        return total(held["w"], x)

    return f, lambda v: held.update(w=v)


def by_cached_function(value):
    held = types.SimpleNamespace(w=value)

    @functools.lru_cache
    def scale(n):
        return n

    return lambda x: total(held.w, x) * scale(2.0), lambda v: setattr(held, "w", v)


def by_transform(value):
    held = {"w": value}
    return mt.grad(lambda x: mt.sum(total(held["w"], x) * x)), lambda v: held.update(w=v)


def by_checkpoint(value):
    held = {"w": value}
    return mt.checkpoint(lambda x: total(held["w"], x)), lambda v: held.update(w=v)


def by_compiled_inside(value):
    held = {"w": value}
    inner = mt.compile(lambda x: total(held["w"], x))
    return lambda x: inner(x) + x, lambda v: held.update(w=v)


def by_context(value):
    var = contextvars.ContextVar("w")
    var.set(value)
    return lambda x: total(var.get(), x), var.set


def by_thread_local(value):
    local = threading.local()
    local.w = value
    return lambda x: total(local.w, x), lambda v: setattr(local, "w", v)


def by_weak_reference(value):
    m = by_attribute(value)[0].__self__
    ref = weakref.ref(m)
    return lambda x, keep=(m,): total(ref().w, x), lambda v: setattr(m, "w", v)


def by_function_attribute(value):
    def f(x):
        return total(f.w, x)

    f.w = value
    return f, lambda v: setattr(f, "w", v)


def by_module(value):
    module = types.ModuleType("settings_of_a_test")
    module.w = value
    return lambda x: total(module.w, x), lambda v: setattr(module, "w", v)


def by_module_imported_inside(value):
    module = types.ModuleType("settings_of_a_test")
    module.w = value
    sys.modules["settings_of_a_test"] = module

    def f(x):
        import settings_of_a_test
        from settings_of_a_test import w

        return total(settings_of_a_test.w, x) + total(w, x)

    return f, lambda v: setattr(module, "w", v)


GLOBAL = None


def by_global(value):
    globals()["GLOBAL"] = value
    return lambda x: total(GLOBAL, x), lambda v: globals().update(GLOBAL=v)


def read_global(x):
    return total(GLOBAL, x)


def by_global_of_callee(value):
    globals()["GLOBAL"] = value
    return lambda x: read_global(x) * 1.0, lambda v: globals().update(GLOBAL=v)


def by_globals_by_text(value):
    names = {"total": total, "GLOBAL": value}  # fewer than those of this module, which are all looked at
    return eval("lambda x: total(globals()['GLO' + 'BAL'], x)", names), lambda v: names.update(GLOBAL=v)


HOLDERS = {name.removeprefix("by_"): f for name, f in list(globals().items()) if name.startswith("by_")}


def outcome(f, x):
    try:
        return np.asarray(f(x)).tolist()
    except mt.errors.MeshtapeError as e:
        return type(e)


def agree(fast, plain, what):
    for _ in range(2):  # the second time, the program is there
        assert outcome(fast, X) == outcome(plain, X), what


@pytest.mark.parametrize("holder", HOLDERS)
def test_another_value_in_its_place(holder):
    for name, kind in kinds().items():
        plain, change = HOLDERS[holder](kind.first)
        fast = mt.compile(plain)
        agree(fast, plain, name)
        change(kind.other)
        agree(fast, plain, name)
        change(kind.first)
        agree(fast, plain, name)


@pytest.mark.parametrize("holder", HOLDERS)
def test_the_value_is_written_in_place(holder):
    for name, kind in kinds().items():
        plain, _ = HOLDERS[holder](kind.first)
        fast = mt.compile(plain)
        agree(fast, plain, name)
        for write in kind.writes:
            write(kind.first)
            agree(fast, plain, name)


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_stays_is_traced_once(holder):
    """Guards that see a change where there is none would trace at every call."""
    for name, kind in kinds().items():
        plain, change = HOLDERS[holder](kind.first)
        fast = mt.compile(plain)
        for _ in range(4):
            outcome(fast, X)
        assert fast.signatures == 1, name
        change(kind.other)
        outcome(fast, X)
        change(kind.first)
        outcome(fast, X)
        assert fast.signatures <= 3, name


# ----- code that is replaced ------------------------------------------------------------------------------------------


def helper(x):
    return x * 2.0


def deeper(x):
    return helper(x) + 1.0


@pytest.mark.parametrize("read", [lambda x: helper(x), lambda x: deeper(x), lambda x: sum(map(helper, [x, x]))])
def test_a_function_of_the_module_is_replaced(read, monkeypatch):
    fast = mt.compile(read)
    agree(fast, read, "before")
    monkeypatch.setitem(globals(), "helper", lambda x: x * 7.0)
    agree(fast, read, "after")
    globals()["helper"].__code__ = (lambda x: x * 9.0).__code__
    agree(fast, read, "its code")


def test_functions_of_libraries_are_replaced(monkeypatch):
    def f(x):
        return mt.tanh(x) * np.sqrt(4.0)

    fast = mt.compile(f)
    agree(fast, f, "before")
    monkeypatch.setattr(np, "sqrt", lambda v: v * 3.0)
    agree(fast, f, "NumPy's")
    monkeypatch.setattr(mt, "tanh", mt.sin)
    agree(fast, f, "ours")


def test_methods_classes_and_variables_of_objects_are_replaced():
    class Model:
        def inner(self, x):
            return x * 2.0

        def loss(self, x):
            return self.inner(x)

    class Other(Model):
        def inner(self, x):
            return x * 3.0

    m = Model()
    fast = mt.compile(m.loss)
    for change in (
        lambda: setattr(Model, "inner", lambda self, x: x * 5.0),
        lambda: setattr(m, "inner", lambda x: x * 7.0),
        lambda: delattr(m, "inner"),
        lambda: setattr(m, "__class__", Other),
        lambda: setattr(m, "__dict__", {"inner": lambda x: x * 11.0}),
    ):
        agree(fast, m.loss, "before")
        change()
        agree(fast, m.loss, "after")


@pytest.mark.parametrize(
    "read",
    [
        lambda m, x: x * getattr(m, "scale", 1.0),
        lambda m, x: x * m.scale if hasattr(m, "scale") else x,
        lambda m, x: x * m.__dict__.get("scale", 1.0),
        lambda m, x: x * _tried(m),
    ],
)
def test_what_was_not_there_comes(read):
    class Model:
        pass

    m = Model()
    plain = functools.partial(read, m)
    fast = mt.compile(plain)
    agree(fast, plain, "without")
    m.scale = 3.0
    agree(fast, plain, "with")
    del m.scale
    agree(fast, plain, "without")
    Model.scale = 4.0
    agree(fast, plain, "of the class")


def _tried(m):
    try:
        return m.scale
    except AttributeError:
        return 1.0


def test_the_environment():
    def f(x):
        return x * float(os.environ["SCALE_OF_A_TEST"])

    os.environ["SCALE_OF_A_TEST"] = "2"
    try:
        fast = mt.compile(f)
        agree(fast, f, "before")
        os.environ["SCALE_OF_A_TEST"] = "3"
        agree(fast, f, "after")
    finally:
        del os.environ["SCALE_OF_A_TEST"]


# ----- objects that are arguments -------------------------------------------------------------------------------------


class Scaled:
    def __init__(self, k):
        self.k = k

    @mt.compile
    def call(self, x):
        return x * self.k


@dataclasses.dataclass(unsafe_hash=True)
class Equal:
    name: str
    k: float = dataclasses.field(compare=False, hash=False)

    __is_tree__ = False


def test_methods_and_objects_that_are_arguments():
    a, b = Scaled(2.0), Scaled(3.0)
    for _ in range(2):
        assert (a.call(X) * 1.0).tolist() == [2, 4, 6]
        assert b.call(X).tolist() == [3, 6, 9]
    assert Scaled.__dict__["call"].signatures == 2
    a.k = mt.asarray(5.0)
    assert a.call(X).tolist() == [5, 10, 15]
    a.k[...] = 7.0
    assert a.call(X).tolist() == [7, 14, 21]
    f = mt.compile(lambda c, x: x * c.k)
    c = Equal("c", 2.0)
    assert f(c, X).tolist() == [2, 4, 6]
    c.k = 4.0
    assert f(c, X).tolist() == [4, 8, 12]
    assert f(Equal("c", 5.0), X).tolist() == [5, 10, 15]
    g = mt.compile(lambda fn, x: fn(x))
    held = [2.0]
    fn = lambda x: x * held[0]  # noqa: E731
    assert g(fn, X).tolist() == [2, 4, 6]
    held[0] = 3.0
    assert g(fn, X).tolist() == [3, 6, 9]


# ----- what only takes something in, and what takes in and gives out --------------------------------------------------


def test_notes_are_taken_at_every_call_and_said_to_be():
    class Model:
        def __init__(self):
            self.notes = []

        def loss(self, x):
            self.notes.append(x.shape)
            return x * 2.0

    m = Model()
    fast = mt.compile(m.loss)
    fast(X)
    with pytest.warns(RuntimeWarning, match=r"loss is traced at every call: it writes to loss\.notes.*`signatures`"):
        fast(X)
    fast(X)
    assert m.notes == [(3,)] * 3


def test_what_is_written_once_and_for_all_is_traced_until_it_stands():
    class Model:
        def __init__(self):
            self.seen = {}

        @functools.cached_property
        def table(self):
            return mt.ones(3) * 3.0

        def loss(self, x):
            self.last = x.shape
            self.seen["x"] = x.shape
            return x * self.table

    m = Model()
    fast = mt.compile(m.loss)
    assert [fast(X).tolist() for _ in range(4)] == [[3, 6, 9]] * 4
    assert fast.signatures == 2
    for attribute in ("last", "table"):  # the program for what was there before is none that writes
        delattr(m, attribute)
        fast(X)
        assert hasattr(m, attribute)
    m.seen.clear()
    fast(X)
    assert m.seen == {"x": (3,)}


def test_what_the_function_changes_itself_is_read_again():
    count = {"n": 0.0}

    def f(x):
        count["n"] += 1.0
        return x * count["n"]

    fast = mt.compile(f)
    assert [fast(X)[0].item() for _ in range(3)] == [1, 2, 3]
    kept = {}

    def memo(x):
        if 3 not in kept:
            kept[3] = mt.ones(3)
        return x * kept[3]

    fast = mt.compile(memo)
    for _ in range(4):
        fast(X)
    assert fast.signatures <= 2


# ----- what cannot be compared ----------------------------------------------------------------------------------------


def test_a_large_numpy_array_is_refused_by_name():
    class Model:
        table = np.ones(200_000)

        def loss(self, x):
            return x * self.table[0]

    m = Model()
    with pytest.raises(
        mt.errors.TracedValueError,
        match=r"\[compile\] loss can read loss\.table, a NumPy array of 1,600,000 bytes.*pass it as an "
        r"argument.*setflags",
    ):
        mt.compile(m.loss)(X)
    Model.table.setflags(write=False)
    assert mt.compile(m.loss)(X).tolist() == X.tolist()
    Model.table = mt.asarray(Model.table)
    fast = mt.compile(m.loss)
    assert fast(X).tolist() == X.tolist()
    Model.table[0] = 2.0
    assert fast(X).tolist() == (X * 2.0).tolist()


def test_what_no_code_names_is_not_looked_at():
    """A name that is made up is one of an attribute; only `globals` reads variables by such."""
    name = "tanh"
    fast = mt.compile(lambda x: getattr(mt, name)(x))
    assert fast(X).tolist() == mt.tanh(X).tolist()
    name = "sin"
    assert fast(X).tolist() == mt.sin(X).tolist()
    assert len(fast._outside.look().items) < 20


def test_what_is_taken_from_an_iterator_is_taken_at_each_call():
    for numbers in (iter(range(1, 100)), (float(i) for i in range(1, 100)), zip(range(1, 100)), itertools.count(1)):
        fast = mt.compile(lambda x, numbers=numbers: x * np.sum(next(numbers)))
        with pytest.warns(RuntimeWarning, match="traced at every call"):
            assert [fast(X)[0].item() for _ in range(4)] == [1, 2, 3, 4]


def test_the_device_of_what_is_made_inside_counts():
    fast = mt.compile(lambda x: x + mt.ones(3))
    fast(X)
    with mt.use_device("cpu"):
        fast(X)
    assert fast.signatures == 2


# ----- on meshes, and with arguments that are given up ----------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh():
    return mt.Mesh({"data": 2})


@pytest.mark.parametrize(
    "holder", ["attribute", "slot", "nonlocal", "dataclass", "global", "partial", "layers", "transform"]
)
def test_split_arrays_from_around_a_function(holder, mesh):
    split = lambda v: mt.distribute(np.asarray(v), mesh, data=mt.Shard(0))  # noqa: E731
    x = split([1.0, 2.0, 3.0, 4.0])
    w = split([1.0, 1.0, 2.0, 2.0])
    plain, change = HOLDERS[holder](w)
    fast = mt.compile(plain)

    def check():
        for _ in range(2):
            np.testing.assert_array_equal(np.asarray(fast(x)), np.asarray(plain(x)))

    check()
    w[0] = 9.0
    check()
    w += 1.0
    check()
    change(split([3.0, 4.0, 5.0, 6.0]))
    check()
    change(mt.asarray([1.0, 4.0, 5.0, 6.0]))  # in one place
    check()
    change(mt.reshard(w, data=mt.Replicate()))
    check()


def test_code_of_ranks(mesh):
    class Model:
        def __init__(self):
            self.k = mt.asarray(2.0)
            self.c = {"s": 3.0}

        def block(self, x):
            return x * self.k * self.c["s"]

    m = Model()
    split = {"data": mt.Shard(0)}
    fast = mt.shard_map(m.block, mesh, in_placements=split, out_placements=split)
    x = mt.asarray([1.0, 2.0])
    compiled = mt.compile(lambda x: fast(x) + 0.0)
    for change in (
        lambda: None,
        lambda: setattr(m, "k", mt.asarray(5.0)),
        lambda: m.k.__setitem__(..., 7.0),
        lambda: m.c.update(s=4.0),
    ):
        change()
        for f in (fast, compiled, fast):
            np.testing.assert_array_equal(np.asarray(f(x)), np.asarray(m.block(x)))


def test_code_of_ranks_that_writes_runs_at_every_call(mesh):
    held = {"k": 2.0}

    def block(x):
        held["k"] += 1.0
        return x * held["k"]

    split = {"data": mt.Shard(0)}
    fast = mt.shard_map(block, mesh, in_placements=split, out_placements=split)
    assert [np.asarray(fast(mt.ones(2))).tolist() for _ in range(3)] == [[k, k] for k in (3.0, 4.0, 5.0)]
    held["k"] = 2.0
    assert np.asarray(fast(mt.ones(2))).tolist() == [3.0, 3.0]


def test_turns_of_a_loop(mesh):
    class Model:
        k = 2.0
        w = mt.asarray([1.0, 1.0])

        def turn(self, s, x):
            return s + x * self.k * self.w, mt.sum(s)

    m = Model()
    for local in (True, False):
        put = (lambda v: mt.asarray(v)) if local else lambda v: mt.distribute(v, mesh, data=mt.Shard(0))
        for change in (lambda: None, lambda: setattr(m, "k", m.k + 1.0), lambda: m.w.__setitem__(0, 6.0)):
            change()
            s, xs = np.zeros(2), [np.asarray([1.0, 2.0]), np.asarray([3.0, 4.0])]
            found = mt.scan(m.turn, put(s), [put(x) for x in xs])[0]
            np.testing.assert_array_equal(np.asarray(found), sum(x * m.k * np.asarray(m.w) for x in xs))


def test_arguments_that_are_given_up():
    held = types.SimpleNamespace(lr=0.5, w=mt.asarray([1.0, 1.0]))
    step = mt.compile(lambda p, g: p - held.lr * g * held.w, donate=0)
    p = mt.asarray([8.0, 8.0])
    expected = np.asarray(p)
    for change in (lambda: None, lambda: setattr(held, "lr", 0.25), lambda: held.w.__setitem__(0, 4.0)):
        change()
        g = mt.asarray([1.0, 2.0])
        expected = expected - held.lr * np.asarray(g) * np.asarray(held.w)
        p = step(p, g)
        np.testing.assert_array_equal(np.asarray(p), expected)


def test_programs_and_their_derivatives():
    held = {"w": 2.0}

    def f(x):
        return mt.sum(held["w"] * x * x)

    fast = mt.compile(f)
    for w in (2.0, 3.0):
        held["w"] = w
        assert f"{w}" in str(fast.program(X))
        assert mt.grad(fast)(X).tolist() == mt.grad(f)(X).tolist()
        hooked = mt.compile(lambda x: mt.gradient_hook(f(x), lambda g: g * held["w"]))
        assert mt.grad(hooked)(X).tolist() == (mt.grad(f)(X) * w).tolist()


# ----- arrays from where nobody can look ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [mt.ones(3), mt.ones(3, dtype=mt.int32), np.ones(3)], ids=["array", "ints", "NumPy"])
@pytest.mark.parametrize(
    "use",
    [
        lambda x, v: x * v,
        lambda x, v: x + mt.asarray(v)[0:2].sum(),
        lambda x, v: x * mt.sum(mt.asarray(v) * 2),
        lambda x, v: mt.stack([x, mt.asarray(v) * 1.0]),
        lambda x, v: x * float(mt.asarray(v)[0]),
    ],
)
def test_an_array_from_nowhere_is_refused(value, use):
    var, context = contextvars.ContextVar("value"), contextvars.copy_context()
    context.run(var.set, value)
    with pytest.raises(
        mt.errors.TracedValueError, match=r"reads an array of .*\[3\], at .*test_captures.*pass it as an arg"
    ):
        mt.compile(lambda x: use(x, context[var]))(X)


def test_what_is_made_inside_is_no_stranger(capsys):
    @functools.lru_cache
    def mask(n):
        return mt.tril(mt.ones((n, n)))

    @functools.lru_cache
    def table(n):
        return np.arange(float(n))

    kept = {}

    def f(x):
        print("traced")
        n = x.shape[0]
        y = mask(n) @ x + mt.arange(n) * mt.full((n,), 2.0) + mt.zeros_like(x) + mt.asarray([1.0] * n)
        return y + mt.random.normal(mt.random.key(0), (n,)) + mt.eye(n)[0] + mt.linspace(0.0, 1.0, n)

    fast = mt.compile(f)
    agree(fast, f, "ours")
    assert capsys.readouterr().out.count("traced") == 1 + 2
    mt.compile(f)(X)  # with what is kept

    def g(x):
        if "np" not in kept:
            kept["np"] = np.ones(3)
        return x * table(3) + np.arange(3) + kept["np"]

    for _ in range(2):
        agree(mt.compile(g), g, "NumPy's")


def _written(y, place, value):
    y[place] = value
    return y


def _without_tape(x):
    with mt.no_grad():
        return x.copy()


@pytest.mark.parametrize(
    "f",
    [
        lambda x: mt.sum(x[:3] ** 2),  # of an eighth at most, which is copied
        lambda x: mt.sum(x[:4][1:3] ** 2),
        lambda x: mt.sum(mt.unstack(x.reshape(12, 4))[2] ** 2),
        lambda x: mt.sum(mt.stack(list(x.reshape(12, 4))) ** 2),
        lambda x: mt.sum(x.reshape(6, 8).T[0] ** 2),
        lambda x: mt.sum(x[:30].copy() ** 2),  # a view, which is copied
        lambda x: mt.sum(mt.asarray(x[:3], copy=True) ** 2),
        lambda x: mt.sum(_written(x[:40].copy(), slice(3), x[3:6]) * x[:40]),
        lambda x: mt.sum(_written(x[:4], 1, x[7]) * x[:4]),
        lambda x: mt.sum(mt.stop_gradient(x).copy() * x),
        lambda x: mt.sum(mt.stop_gradient(x)[:3] * x[:3]),
        lambda x: mt.sum(mt.stop_gradient(mt.stop_gradient(x).copy()).copy() * x),
        lambda x: mt.sum(_without_tape(x) * x),
        lambda x: mt.sum(_without_tape(x[:3]) * x[:3]),
    ],
)
def test_captured_arrays_keep_their_history_through_copies_and_lose_it_where_it_is_cut(f):
    x, zero = mt.arange(48.0) + 1.0, mt.asarray(0.0)
    expected = mt.grad(f)(x).tolist()
    for run in (mt.compile, lambda g: lambda s: mt.scan(lambda s, _: (g(s), None), s, length=1)[0], mt.checkpoint):
        assert mt.grad(lambda x, run=run: run(lambda s: s + f(x))(zero))(x).tolist() == expected
