"""States that only code in C or the process knows: a compiled function reads them again at each call."""

from __future__ import annotations

import abc
import builtins
import collections
import decimal
import enum
import functools
import gc
import inspect
import logging
import operator
import os
import queue
import random
import sys
import threading
import time
import types
import warnings

import numpy as np
import pytest

import meshtape as mt

X = mt.ones(1)


def described(a=1, *, k=1):
    "text"


class Described:
    "text"


class Parent:
    pass


class Registered:
    pass


class Face(abc.ABC):  # noqa: B024
    pass


class OtherFace(abc.ABC):  # noqa: B024
    pass


class Meta(type):
    def __instancecheck__(cls, obj):
        return FLAGS[0]


class Checked(metaclass=Meta):
    pass


class Holder:
    pass


class Color(enum.Enum):
    RED = 1


FLAGS = [True]
BUFFER, STRIDED, SHAPED = np.ones(2), np.ones((2, 3)), np.ones((2, 3))
LOCK, EVENT, SEMAPHORE = threading.Lock(), threading.Event(), threading.Semaphore(3)
QUEUE, SIMPLE = queue.Queue(), queue.SimpleQueue()
HOLDER = Holder()
HOLDER.last = collections.deque([1], maxlen=3)
MODULE = types.ModuleType("module_of_this_test")
MODULE.value = 1


@functools.lru_cache
def cached(a):
    return a


def put(obj, name, value):
    return lambda: setattr(obj, name, value)


def subclass():
    HOLDER.child = type("Child", (Parent,), {})


def reshaped():
    SHAPED.shape = (3, 2)


def strided():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        STRIDED.strides = (8, 16)


def recursion():
    sys.setrecursionlimit(sys.getrecursionlimit() + 7)


# What a function reads, and how it changes.
STATES = {
    "__doc__": (lambda x: x + len(described.__doc__), put(described, "__doc__", "longer")),
    "__name__": (lambda x: x + len(described.__name__), put(described, "__name__", "another_name")),
    "__qualname__": (lambda x: x + len(described.__qualname__), put(described, "__qualname__", "a.b.c.d")),
    "__module__": (lambda x: x + len(described.__module__), put(described, "__module__", "m")),
    "__annotations__": (lambda x: x + len(described.__annotations__), lambda: described.__annotations__.update(a=int)),
    "__defaults__": (lambda x: x + described.__defaults__[0], put(described, "__defaults__", (5,))),
    "__kwdefaults__": (lambda x: x + described.__kwdefaults__["k"], put(described, "__kwdefaults__", {"k": 7})),
    "__kwdefaults__ in place": (
        lambda x: x + described.__kwdefaults__["k"],
        lambda: described.__kwdefaults__.update(k=9),
    ),
    "__code__": (
        lambda x: x + described.__code__.co_argcount,
        put(described, "__code__", (lambda a, b, c: 0).__code__),
    ),
    "__dict__": (lambda x: x + len(described.__dict__), put(described, "more", 1)),
    "a signature": (
        lambda x: x + len(inspect.signature(described).parameters),
        put(described, "__code__", (lambda a: 0).__code__),
    ),
    "class __name__": (lambda x: x + len(Described.__name__), put(Described, "__name__", "D")),
    "class __qualname__": (lambda x: x + len(Described.__qualname__), put(Described, "__qualname__", "D.E.F.G")),
    "class __doc__": (lambda x: x + len(Described.__doc__), put(Described, "__doc__", "longer")),
    "class __module__": (lambda x: x + len(Described.__module__), put(Described, "__module__", "m")),
    "__subclasses__": (lambda x: x + len(Parent.__subclasses__()), subclass),
    "isinstance, registered": (lambda x: x + isinstance(REGISTERED, Face), lambda: Face.register(Registered)),
    "issubclass, registered": (lambda x: x + issubclass(Registered, OtherFace), lambda: OtherFace.register(Registered)),
    "a library's face": (
        lambda x: x + isinstance(REGISTERED, collections.abc.Sized),
        lambda: collections.abc.Sized.register(Registered),
    ),
    "__instancecheck__": (lambda x: x + isinstance(3, Checked), lambda: FLAGS.__setitem__(0, False)),
    "flags.writeable": (lambda x: x + BUFFER.flags.writeable, lambda: BUFFER.setflags(write=False)),
    "flags[...]": (lambda x: x + BUFFER.flags["WRITEABLE"], lambda: BUFFER.setflags(write=True)),
    "the shape of a NumPy array": (lambda x: x + SHAPED.shape[0], reshaped),
    "its strides": (lambda x: x + STRIDED.strides[0], strided),
    "maxlen": (lambda x: x + HOLDER.last.maxlen, put(HOLDER, "last", collections.deque([1], maxlen=5))),
    "locked": (lambda x: x + LOCK.locked(), LOCK.acquire),
    "is_set": (lambda x: x + EVENT.is_set(), EVENT.set),
    "a semaphore": (lambda x: x + SEMAPHORE._value, SEMAPHORE.acquire),
    "a queue": (lambda x: x + QUEUE.qsize(), lambda: QUEUE.put(1)),
    "a simple queue": (lambda x: x + SIMPLE.qsize(), lambda: SIMPLE.put(1)),
    "recursion limit": (lambda x: x + sys.getrecursionlimit(), recursion),
    "switch interval": (lambda x: x + sys.getswitchinterval(), lambda: sys.setswitchinterval(0.01)),
    "sys.argv": (lambda x: x + len(sys.argv), lambda: sys.argv.append("x")),
    "sys.modules": (lambda x: x + ("no_such_module" in sys.modules), lambda: sys.modules.update(no_such_module=MODULE)),
    "a module's attribute": (lambda x: x + hasattr(MODULE, "other"), put(MODULE, "other", 1)),
    "os.environ": (lambda x: x + len(os.environ.get("MESHTAPE_T1", "")), lambda: os.environ.update(MESHTAPE_T1="abc")),
    "os.getenv": (lambda x: x + len(os.getenv("MESHTAPE_T2", "")), lambda: os.environ.update(MESHTAPE_T2="abc")),
    "the working directory": (lambda x: x + len(os.getcwd()), lambda: os.chdir("/")),  # noqa: PTH109
    "a function in C": (lambda x: x * CHOSEN[0](1.0, 2.0), lambda: CHOSEN.__setitem__(0, min)),
    "a function in C, of traced values": (
        lambda x: functools.reduce(COMBINED.by, [x, x, x]),
        lambda: setattr(COMBINED, "by", operator.add),
    ),
    "a method of a number": (lambda x: x * ADDED[0](3), lambda: ADDED.__setitem__(0, (2).__mul__)),
    "a module that makes its attributes": (lambda x: x * MAKING.anything, lambda: MADE.__setitem__(0, 5.0)),
    "a name of the builtins": (
        lambda x: x * MESHTAPE_BUILTIN,  # noqa: F821
        lambda: setattr(builtins, "MESHTAPE_BUILTIN", 4.0),
    ),
    "an attribute of a thread": (lambda x: x * THREAD.k, lambda: setattr(THREAD, "k", 4.0)),
    "an attribute of this thread": (
        lambda x: x * threading.current_thread().meshtape_k,
        lambda: setattr(threading.current_thread(), "meshtape_k", 4.0),
    ),
    "the level of a logger": (lambda x: x + LOGGER.isEnabledFor(10), lambda: LOGGER.parent.setLevel(5)),
    "decimal arithmetic": (
        lambda x: x * float(decimal.Decimal(2).sqrt()),
        lambda: decimal.getcontext().__setattr__("prec", 5),
    ),
    "decimal context": (lambda x: x + decimal.getcontext().prec, lambda: decimal.getcontext().__setattr__("prec", 5)),
    "np.geterr": (lambda x: x + len(np.geterr()["over"]), lambda: np.seterr(over="raise")),
    "np.get_printoptions": (lambda x: x + np.get_printoptions()["precision"], lambda: np.set_printoptions(precision=3)),
    "gc.isenabled": (lambda x: x + gc.isenabled(), gc.disable),
    "cache_info": (lambda x: x + cached.cache_info().currsize, lambda: cached(3)),
}
REGISTERED = Registered()


@pytest.fixture
def process():
    before = sys.getswitchinterval(), sys.getrecursionlimit(), os.getcwd(), list(sys.argv), dict(os.environ)  # noqa: PTH109
    errors, options, precision = np.geterr(), np.get_printoptions(), decimal.getcontext().prec
    yield
    sys.setswitchinterval(before[0])
    sys.setrecursionlimit(before[1])
    os.chdir(before[2])
    sys.argv[:] = before[3]
    for name in os.environ.keys() - before[4].keys():
        del os.environ[name]
    sys.modules.pop("no_such_module", None)
    np.seterr(**errors)
    np.set_printoptions(**options)
    decimal.getcontext().prec = precision
    gc.enable()


CHOSEN, ADDED, COMBINED = [max], [(2).__add__], types.SimpleNamespace(by=operator.mul)
MAKING, MADE = types.ModuleType("making"), [1.0]
MAKING.__getattr__ = lambda name: MADE[0]
builtins.MESHTAPE_BUILTIN = 1.0
THREAD = threading.Thread()
THREAD.k = threading.current_thread().meshtape_k = 1.0
LOGGER = logging.getLogger("meshtape_test.child")


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_changes_is_read_again(name, process):
    read, change = STATES[name]
    fast = mt.compile(read)
    first = float(read(X)[0])
    assert float(fast(X)[0]) == first
    assert float(fast(X)[0]) == first
    change()
    assert float(read(X)[0]) != first
    assert float(fast(X)[0]) == float(read(X)[0])


def test_a_state_that_stays_is_no_reason_to_trace_again():
    for name in ("__name__", "flags.writeable", "maxlen", "os.getenv", "__subclasses__", "recursion limit", "a queue"):
        fast = mt.compile(STATES[name][0])
        for _ in range(3):
            fast(X)
        assert fast.signatures == 1, name


CLOCK = time.time
DRAW = random.random


@pytest.mark.parametrize(
    "read", [lambda x: x + CLOCK(), lambda x: x + DRAW(), lambda x: x + random.SystemRandom().random()]
)
def test_clocks_and_chance_under_other_names(read):
    with pytest.raises(mt.errors.NondeterministicError):
        mt.compile(read)(X)


SYSTEM = random.SystemRandom()


def test_the_chance_of_the_system_that_is_held():
    with pytest.raises(mt.errors.NondeterministicError):
        mt.compile(lambda x: x + SYSTEM.random())(X)


# ----- objects whose own code raises ----------------------------------------------------------------------------------


class Attributes:
    value = 2.0

    def __getattr__(self, name):
        raise KeyError(name)


class Everything:
    def __getattribute__(self, name):
        if name == "value":
            return 2.0
        raise KeyError(name)


class Compared:
    value = 2.0
    __hash__ = None

    def __eq__(self, other):
        raise KeyError


class Hashed:
    value = 2.0

    def __hash__(self):
        raise KeyError

    __iter__ = __len__ = __hash__


class Shown(float):
    value = 2.0

    def __repr__(self):
        raise KeyError


class Unsure:
    value = 2.0

    @property
    def __class__(self):
        raise KeyError


class Listed(list):
    value = 2.0

    def __iter__(self):
        raise KeyError

    __len__ = __iter__


@pytest.mark.parametrize("kind", [Attributes, Everything, Compared, Hashed, Shown, Unsure, Listed])
def test_objects_whose_code_raises(kind):
    """Right, or an error that names the object and the cure."""
    obj = kind()
    for compiled in (mt.compile(lambda x: x * obj.value), mt.compile(lambda x, o=obj: x * o.value)):
        for _ in range(2):
            try:
                assert float(compiled(X)[0]) == 2.0
            except mt.errors.TracedValueError as e:
                assert kind.__name__ in str(e)  # noqa: PT017
                assert "AttributeError" in str(e)  # noqa: PT017
                assert kind in (Everything, Unsure, Listed)
    given = mt.compile(lambda x, o: x * o.value)
    try:
        assert float(given(X, obj)[0]) == 2.0
    except mt.errors.TracedValueError as e:
        assert kind.__name__ in str(e)  # noqa: PT017


def test_an_attribute_that_a_captured_array_refuses():
    """NumPy's vectors have no ``mT``, which the function asks of another array."""
    vector = np.ones(2)
    assert mt.compile(lambda x: x.mT + vector)(mt.ones((2, 2))).shape == (2, 2)
