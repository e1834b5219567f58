"""Values that a compiled function reads by a detour: call, change, call again; each answer is the plain function's."""

from __future__ import annotations

import collections
import ctypes
import datetime
import decimal
import enum
import functools
import io
import math
import sys
import types
import weakref

import numpy as np
import pytest

import meshtape as mt

X = mt.asarray([1.0, 2.0, 3.0])


class Config:
    """Something with one number, and room for more."""

    def __init__(self, k=2.0):
        self.k = k


K = 2.0


def set_global(v):
    global K
    K = v


# ----- behind super() -------------------------------------------------------------------------------------------------


def family():
    class Meta(type):
        pass

    class A(metaclass=Meta):
        shared = 2.0

        def __init__(self):
            self.k, self.cfg, self.w = 2.0, Config(), mt.asarray([1.0, 2.0, 3.0])

        def of_self(self, x):
            return x * self.k

        def of_config(self, x):
            return x * self.cfg.k

        def of_global(self, x):
            return x * K

        def of_class(self, x):
            return x * self.shared

        def of_array(self, x):
            return x * self.w

        @property
        def prop(self):
            return self.k

        @classmethod
        def of_cls(cls, x):
            return x * cls.shared

        @staticmethod
        def of_static(x):
            return x * K

    class B(A):
        shared = 3.0

        def of_self(self, x):
            return super().of_self(x) + 1.0

        def of_config(self, x):
            return super(B, self).of_config(x) + 1.0  # noqa: UP008

        def of_global(self, x):
            return super().of_global(x)

        def of_class(self, x):
            return x * super().shared

        def of_array(self, x):
            return super().of_array(x)

        @property
        def prop(self):
            return super().prop + 1.0

        def by_property(self, x):
            return x * self.prop

        @classmethod
        def of_cls(cls, x):
            return super().of_cls(x)

        @staticmethod
        def of_static(x):
            return super(B, B).of_static(x)

    class C(B):
        shared = 4.0

        def of_self(self, x):
            return super().of_self(x)

    return A, C


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("of_self", lambda A, c, v: setattr(c, "k", v)),
        ("of_config", lambda A, c, v: setattr(c.cfg, "k", v)),
        ("of_config", lambda A, c, v: setattr(c, "cfg", Config(v))),
        ("of_global", lambda A, c, v: set_global(v)),
        ("of_class", lambda A, c, v: setattr(A, "shared", v)),
        ("of_array", lambda A, c, v: setattr(c, "w", X * v)),
        ("of_array", lambda A, c, v: c.w.__setitem__(0, v)),
        ("by_property", lambda A, c, v: setattr(c, "k", v)),
        ("of_cls", lambda A, c, v: setattr(type(c), "shared", v)),
        ("of_static", lambda A, c, v: set_global(v)),
        ("of_self", lambda A, c, v: setattr(A, "of_self", lambda self, x: x * v)),
        ("of_self", lambda A, c, v: setattr(type(c).__mro__[1], "of_self", lambda self, x: x * v)),
    ],
)
def test_behind_super(method, change):
    A, C = family()
    c = C()
    plain = getattr(c, method)
    agree(mt.compile(plain), plain, lambda v: change(A, c, v))
    set_global(2.0)


def agree(fast, plain, change, traces=3):
    """The same answers before and after each change, and no trace where nothing changed."""
    for v in (None, 5.0, 7.0):
        if v is not None:
            change(v)
        for _ in range(3):
            assert np.asarray(fast(X)).tolist() == np.asarray(plain(X)).tolist(), v
    assert fast.signatures <= traces


# ----- rates of optimizers --------------------------------------------------------------------------------------------


class Rate:
    def __init__(self):
        self.lr = 0.5

    def __call__(self, step):
        return self.lr


class Rates(Rate):
    def __call__(self, step):
        return super().__call__(step) * 2.0


OPTIMIZERS = [
    name
    for name in ("sgd", "adam", "adamw", "lazy_adam", "lion", "adafactor", "rmsprop", "adagrad")
    if hasattr(mt.optim, name)
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "of",
    [
        lambda r: r,
        lambda r: lambda step: r.lr,
        lambda r: functools.partial(lambda r, step: r.lr, r),
        lambda r: r.__call__,
        lambda r: np.vectorize(lambda s: r.lr) and (lambda step: r.lr * 1.0),
    ],
    ids=["object", "lambda", "partial", "method", "nested"],
)
@pytest.mark.parametrize("kind", [Rate, Rates])
def test_schedules(optimizer, of, kind):
    rate = kind()
    opt = getattr(mt.optim, optimizer)(of(rate))

    def step(x):
        return opt.update(x, x * 0.5 + 1.0, opt.init(x))[0]

    agree(mt.compile(step), step, lambda v: setattr(rate, "lr", v))
    passed = mt.compile(lambda opt, x: opt.update(x, x, opt.init(x))[0])
    for v in (0.5, 0.25):
        rate.lr = v
        assert passed(opt, X).tolist() == opt.update(X, X, opt.init(X))[0].tolist()


# ----- descriptors, metaclasses, patterns -----------------------------------------------------------------------------


def partialmethod(v):
    c = Config(v)

    class M:
        def scale(self, cfg, x):
            return x * cfg.k

        call = functools.partialmethod(scale, c)

    return M().call, lambda v: setattr(c, "k", v)


def partialmethod_of_another(v):
    c = Config(v)

    class M:
        call = functools.partialmethod(lambda self, a, x: x * a * c.k, 1.0)

    m = M()
    return lambda x: m.call(x), lambda v: setattr(M, "call", functools.partialmethod(lambda self, a, x: x * a, v))


class Meta(type):
    @property
    def prop(cls):
        return cls.hidden

    rate = 2.0

    def __call__(cls, *args):
        made = super().__call__(*args)
        made.k = cls.hidden
        return made

    def __iter__(cls):
        return iter([cls.hidden, 1.0])

    def __getitem__(cls, i):
        return cls.hidden + i

    def __len__(cls):
        return int(cls.hidden)


def of_metaclass(read):
    def make(v):
        class C(metaclass=Meta):
            hidden = v

        return lambda x: x * read(C), lambda v: setattr(C, "hidden", v)

    return make


def metaclass_attribute(v):
    class M(type):
        rate = v

    class C(metaclass=M):
        pass

    return lambda x: x * C.rate, lambda v: setattr(M, "rate", v)


def metaclass_of_an_object(v):
    class M(type):
        rate = v

    class C(metaclass=M):
        def call(self, x):
            return x * type(self).rate

    return C().call, lambda v: setattr(M, "rate", v)


class P:
    __match_args__ = ("k",)

    def __init__(self, k):
        self.k = k


def match_by_name(v):
    p = P(v)

    def f(x):
        match p:
            case P(k=5.0):
                return x * 10.0
            case P(k=k):
                return x * k

    return f, lambda v: setattr(p, "k", v)


def match_by_place(v):
    p = P(v)

    def f(x):
        match p:
            case P(k):
                return x * k

    return f, lambda v: setattr(p, "k", v)


def match_what_is_not_there(v):
    class Q:
        pass

    q = Q()

    def f(x):
        match q:
            case Q(k=k):
                return x * k
            case _:
                return x

    return f, lambda v: setattr(q, "k", v)


def match_a_mapping(v):
    d = {"a": {"k": v}}

    def f(x):
        match d:
            case {"a": {"k": k}}:
                return x * k

    return f, lambda v: d["a"].update(k=v)


def bases(v):
    made = lambda v: type("B", (), {"k": v})  # noqa: E731

    class C(made(v)):
        def call(self, x):
            return x * self.k

    return C().call, lambda v: setattr(C, "__bases__", (made(v),))


def bound_by_hand(v):
    class C:
        def __init__(self):
            self._k = v

        @property
        def k(self):
            return self._k

    c = C()
    return lambda x: x * C.k.__get__(c), lambda v: setattr(c, "_k", v)


def slot_bound_by_hand(v):
    class C:
        __slots__ = ("k",)

    c = C()
    c.k = v
    return lambda x: x * C.k.__get__(c), lambda v: setattr(c, "k", v)


def single_dispatch(v):
    c = Config(v)

    @functools.singledispatch
    def scale(a, x):
        return x * c.k

    @scale.register
    def _(a: int, x):
        return x * (c.k + a)

    return lambda x: scale(1, x) + scale(1.0, x) + scale("a", x), lambda v: setattr(c, "k", v)


def single_dispatch_registers(v):
    @functools.singledispatch
    def scale(a, x):
        return x

    return lambda x: scale(1, x), lambda v: scale.register(int, lambda a, x: x * v)


def single_dispatch_method(v):
    c = Config(v)

    class M:
        @functools.singledispatchmethod
        def scale(self, a, x):
            return x

        @scale.register
        def _(self, a: int, x):
            return x * c.k

        def call(self, x):
            return self.scale(1, x)

    return M().call, lambda v: setattr(c, "k", v)


# ----- values with attributes, references, containers with code -------------------------------------------------------


def subclass_of(base, *args):
    def make(v):
        kind = type("S", (base,), {})
        s = kind(*args)
        s.k = v
        return lambda x: x * s.k, lambda v: setattr(s, "k", v)

    return make


def ndarray_subclass(v):
    class S(np.ndarray):
        pass

    s = np.zeros(2).view(S)
    s.k = v
    return lambda x: x * s.k, lambda v: setattr(s, "k", v)


def proxy(v):
    c = Config(v)
    p = weakref.proxy(c)
    return lambda x: (c, x * p.k)[1], lambda v: setattr(c, "k", v)


def module_by_name(v):
    module = sys.modules["module_of_a_test"] = types.ModuleType("module_of_a_test")
    module.k = v
    return lambda x: x * sys.modules["module_of_a_test"].k, lambda v: setattr(module, "k", v)


def module_replaced(v):
    def put(v):
        sys.modules["module_of_a_test"] = types.ModuleType("module_of_a_test")
        sys.modules["module_of_a_test"].k = v

    put(v)
    return lambda x: x * sys.modules["module_of_a_test"].k, put


def factory(v):
    c = Config(v)
    d = collections.defaultdict(lambda: c.k)

    def f(x):
        k = d["a"]
        d.clear()
        return x * k

    return f, lambda v: setattr(c, "k", v)


def factory_replaced(v):
    d = collections.defaultdict(lambda: v)

    def f(x):
        k = d["a"]
        d.clear()
        return x * k

    return f, lambda v: setattr(d, "default_factory", lambda: v)


def vectorized(v):
    c = Config(v)
    g = np.vectorize(lambda a: a * c.k)
    return lambda x: x * g(np.ones(3)), lambda v: setattr(c, "k", v)


def from_python(v):
    c = Config(v)
    g = np.frompyfunc(lambda a: a * c.k, 1, 1)
    return lambda x: x * float(g(1.0)), lambda v: setattr(c, "k", v)


def enumeration(v):
    class E(enum.Enum):
        A = v

    return lambda x: x * E.A.value, lambda v: setattr(E.A, "_value_", v)


def enumeration_attribute(v):
    class E(enum.IntEnum):
        A = 1

    E.A.k = v
    return lambda x: x * E.A.k, lambda v: setattr(E.A, "k", v)


def cleared_cache(maxsize):
    def make(v):
        c = Config(v)

        @functools.lru_cache(maxsize)
        def k(n):
            return c.k

        def change(v):
            c.k = v
            k.cache_clear()
            k(1)  # as many as before

        return lambda x: x * k(1), change

    return make


def c_number(v):
    n = ctypes.c_double(v)
    return lambda x: x * n.value, lambda v: setattr(n, "value", v)


def c_structure(v):
    s = type("S", (ctypes.Structure,), {"_fields_": [("k", ctypes.c_double)]})(v)
    return lambda x: x * s.k, lambda v: setattr(s, "k", v)


def c_numbers(v):
    a = (ctypes.c_double * 2)(v, 1.0)
    return lambda x: x * a[0], lambda v: a.__setitem__(0, v)


def c_pointer(v):
    n = ctypes.c_double(v)
    p = ctypes.pointer(n)
    return lambda x: x * p.contents.value, lambda v: setattr(n, "value", v)


def user_dict(v):
    d = collections.UserDict(k=v)
    return lambda x: x * d["k"], lambda v: d.__setitem__("k", v)


def chain_map(v):
    d = {"k": v}
    m = collections.ChainMap({}, d)
    return lambda x: x * m["k"], lambda v: d.update(k=v)


def weak_dict(v):
    c = Config(v)
    d = weakref.WeakValueDictionary(c=c)
    return lambda x: (c, x * d["c"].k)[1], lambda v: setattr(c, "k", v)


def object_of_a_library(v):
    p = np.poly1d([v, 1.0])
    return lambda x: x * float(p(1.0)), lambda v: p.coeffs.__setitem__(0, v)


def set_by_name(v):
    c = Config(v)
    name = "k"

    def f(x):
        setattr(c, name, c.k)
        return x * getattr(c, name)

    return f, lambda v: setattr(c, "k", v)


def setter(v):
    c = Config(v)

    class S:
        @property
        def rate(self):
            return self.__dict__["_rate"]

        @rate.setter
        def rate(self, value):
            self.__dict__["_rate"] = value * c.k

    s = S()

    def f(x):
        s.rate = 2.0
        return x * s.rate

    return f, lambda v: setattr(c, "k", v)


def class_by_pattern(v):
    class Q:
        __match_args__ = ("a", "k")
        a = 1

        @property
        def k(self):
            return c.k

    c, q = Config(v), Q()

    def f(x):
        match (q, 1):
            case (Q(_, k), int()):
                return x * k

    return f, lambda v: setattr(c, "k", v)


def same_or_equal(v):
    a, b = [v], [3.0]
    held = {"a": a, "b": b, "c": a}
    return lambda x: x * held["a"][0] + held["b"][0] + held["c"][0], lambda v: held.update(c=b if v == 5.0 else [v])


WAYS = {
    "metaclass property": of_metaclass(lambda C: C.prop),
    "metaclass call": of_metaclass(lambda C: C().k),
    "metaclass iter": of_metaclass(lambda C: sum(C)),
    "metaclass item": of_metaclass(lambda C: C[1]),
    "metaclass len": of_metaclass(len),
    "int": subclass_of(int, 3),
    "float": subclass_of(float, 3.0),
    "complex": subclass_of(complex, 3.0),
    "str": subclass_of(str, "a"),
    "bytes": subclass_of(bytes, b"a"),
    "lru_cache": cleared_cache(128),
    "lru_cache without end": cleared_cache(None),
} | {
    f.__name__.replace("_", " "): f
    for f in (
        *(partialmethod, partialmethod_of_another, metaclass_attribute, metaclass_of_an_object),
        *(match_by_name, match_by_place, match_what_is_not_there, match_a_mapping, bases, bound_by_hand),
        *(slot_bound_by_hand, single_dispatch, single_dispatch_registers, single_dispatch_method, ndarray_subclass),
        *(proxy, module_by_name, module_replaced, factory, factory_replaced, vectorized, from_python, enumeration),
        *(enumeration_attribute, c_number, c_structure, c_numbers, c_pointer, user_dict, chain_map, weak_dict),
        *(object_of_a_library, set_by_name, same_or_equal, setter, class_by_pattern),
    )
}


@pytest.mark.parametrize("way", WAYS)
def test_by_a_detour(way):
    plain, change = WAYS[way](2.0)
    agree(mt.compile(plain), plain, change, traces=6 if way == "setter" else 3)  # it writes first, and then stands


def test_single_dispatch_sees_the_type_of_a_number():
    @functools.singledispatch
    def scale(n, x):
        raise TypeError(type(n))

    scale.register(int, lambda n, x: x * n)
    scale.register(float, lambda n, x: x * n + 1.0)
    fast = mt.compile(lambda n, x: scale(n, x))
    for n in (2, 2.0, 3, 3.0, True):
        assert fast(n, X).tolist() == scale(n, X).tolist()


@pytest.mark.filterwarnings("ignore:.*is traced at every call:RuntimeWarning")
def test_an_object_that_nobody_can_look_into_is_read_at_every_call():
    """A class in C whose state no guard can compare."""
    opaque = pytest.importorskip("pandas").Series([2.0])
    plain = lambda x: x * float(opaque.iloc[0])  # noqa: E731
    agree(mt.compile(plain), plain, lambda v: opaque.__setitem__(0, v), traces=100)


def test_classes_whose_module_is_a_descriptor():
    """As is that of functions which Cython has compiled."""
    function = type("function", (), {"__call__": lambda self, v: v * 2, "__module__": property(lambda self: "x")})()
    assert not isinstance(type(function).__module__, str)
    assert mt.compile(lambda v: function(v))(mt.ones(2)).tolist() == [2, 2]
    assert mt.compile(mt.tanh)(mt.zeros(2)).tolist() == [0, 0]
    table = {"tanh": mt.tanh, "relu": mt.nn.relu}
    assert mt.compile(lambda v: table["tanh"](v) + table["relu"](v))(mt.zeros(2)).tolist() == [0, 0]


@pytest.mark.parametrize("answer", [dict.get, dict.__getitem__])
def test_configurations_that_answer_for_every_name(answer):
    config = type("Config", (dict,), {"__getattr__": answer})(rate=2.0)
    f = mt.compile(lambda v: v * config.rate)
    assert f(mt.ones(2)).tolist() == [2, 2]
    config["rate"] = 3.0
    assert f(mt.ones(2)).tolist() == [3, 3]


_ZONES = (datetime.UTC, datetime.timezone(datetime.timedelta(hours=1)))


@pytest.mark.parametrize(
    ("first", "second", "read"),
    [
        (decimal.Decimal("1"), decimal.Decimal("1.0"), lambda k: len(str(k))),
        (decimal.Decimal("0"), decimal.Decimal("-0"), lambda k: len(str(k))),
        (*(datetime.datetime(2020, 1, 1, 12 + i, tzinfo=z) for i, z in enumerate(_ZONES)), lambda k: k.hour),
        (*(datetime.datetime(2020, 1, 1, fold=i) for i in (0, 1)), lambda k: k.fold),
        (range(0, 4, 2), range(0, 3, 2), lambda k: k.stop),
        (float("nan"), -float("nan"), lambda k: math.copysign(1, k)),
    ],
)
def test_values_that_are_equal_and_differ(first, second, read):
    held = {"k": first}
    around = mt.compile(lambda v: v * read(held["k"]))
    given = mt.compile(lambda v, k: v * read(k))
    x = mt.ones(1)
    for k in (first, second, first):
        held["k"] = k
        assert float(around(x)[0]) == float(given(x, k)[0]) == read(k)


@pytest.mark.filterwarnings("ignore:.*traced at every call")
def test_views_iterators_of_arrays_and_files_in_memory():
    x, d, a, m = mt.ones(1), {"k": 1.0}, np.array([1.0, 2.0]), memoryview(bytearray(b"\1"))
    values, flat, text = d.values(), a.flat, io.StringIO("ab")
    read = (lambda: sum(values), lambda: flat[0], lambda: len(text.getvalue()), lambda: m[0])
    compiled = [mt.compile(lambda v, f=f: v * f()) for f in read]
    before = [float(c(x)[0]) for c in compiled]
    d["k"], a[0], m[0] = 2.0, 5.0, 3
    text.write("abcdef")
    assert before == [1, 1, 2, 1]
    assert [float(c(x)[0]) for c in compiled] == [2, 5, 6, 3]


def test_slices_that_are_written_anew_are_one_signature():
    f = mt.compile(lambda v, s: v[s])
    for _ in range(3):
        assert f(mt.arange(5), slice(0, 2)).tolist() == [0, 1]
    assert f(mt.arange(5), slice(0, 3)).tolist() == [0, 1, 2]
    assert f.signatures == 2
