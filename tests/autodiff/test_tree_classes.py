"""Containers of every class, in everything that takes trees: rebuilt as they were, or refused by name; never another
type in silence."""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.core.tree import TreeDef, flatten, flatten_with_path, register, tree_map, unflatten
from meshtape.errors import GradientError, MeshtapeError, ProgramError, TracedValueError, TreeError


class Doubling(dict):
    """Gives back twice what it holds, and holds what it is given as it is."""

    def __getitem__(self, key):
        return 2 * super().__getitem__(key)


class Loud(dict):
    """Lets nobody see or set anything through the methods that it has."""

    def _never(self, *args, **kwargs):
        raise RuntimeError("an overridden method was called")

    __init__ = __iter__ = __setitem__ = keys = values = items = update = _never

    def __getattr__(self, name):
        try:
            return dict.__getitem__(self, name)
        except KeyError:
            raise AttributeError(name) from None


class Own(dict):
    """The recipe whose attributes are its elements."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Easy(dict):
    """Like easydict: each element is an attribute once more."""

    def __init__(self, **kwargs):
        for name, value in kwargs.items():
            setattr(self, name, value)

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        super().__setitem__(name, value)

    __setitem__ = __setattr__


class Munch(dict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    __setattr__ = dict.__setitem__


@dataclasses.dataclass
class Output(OrderedDict):
    """Like the results of transformers: an ordered dict and a dataclass, elements are attributes, and None is no
    element."""

    w: Any = None
    b: Any = None
    hidden: Any = None

    def __post_init__(self):
        for f in dataclasses.fields(self):
            if getattr(self, f.name) is not None:
                super().__setitem__(f.name, getattr(self, f.name))

    def __setattr__(self, name, value):
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Tagged(dict):
    tag: str = ""


class Slots(dict):
    __slots__ = ("tag",)


class Frozen(dict):
    def __setitem__(self, key, value):
        raise TypeError("frozen")


class Needs(dict):
    """A constructor with arguments of its own."""

    def __init__(self, first, second):
        super().__init__(w=first, b=second)


class Row(list):
    def __init__(self, first, second, label):
        super().__init__([first, second])
        self.label = label


class Two(tuple):
    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


class Pair(NamedTuple):
    w: Any
    b: Any


class Noted(Pair):
    """A named tuple with a field more."""

    def __new__(cls, w, b, note):
        self = super().__new__(cls, w, b)
        self.note = note
        return self


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    w: Any
    b: Any


@dataclasses.dataclass
class Later:
    w: Any
    b: Any
    note: str = dataclasses.field(default="", init=False)


class Abstract(abc.ABC, dict):
    """A class with a metaclass."""


@dataclasses.dataclass
class Derived:
    w: Any
    b: Any

    def __post_init__(self):
        self.total = (self.w, self.b)


def with_(x: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        object.__setattr__(x, name, value)
    return x


def loud(w: Any, b: Any) -> Loud:
    x = Loud.__new__(Loud)
    dict.update(x, w=w, b=b)
    return x


TREES = {
    "OrderedDict": lambda w, b: OrderedDict([("w", w), ("b", b)]),
    "OrderedDict moved": lambda w, b: moved(w, b),
    "defaultdict": lambda w, b: defaultdict(list, w=w, b=b),
    "Counter": lambda w, b: Counter({"w": w, "b": b}),
    "overridden getitem": lambda w, b: Doubling(w=w, b=b),
    "overridden everything": loud,
    "own dict": lambda w, b: Own(w=w, b=b),
    "easydict": lambda w, b: Easy(w=w, b=b),
    "munch": lambda w, b: Munch(w=w, b=b),
    "model output": lambda w, b: Output(w=w, b=b),
    "attributes": lambda w, b: with_(Tagged(w=w, b=b), tag="t", size=3),
    "slots": lambda w, b: with_(Slots(w=w, b=b), tag="t"),
    "metaclass": lambda w, b: Abstract(w=w, b=b),
    "frozen dict": lambda w, b: Frozen(w=w, b=b),
    "constructor": lambda w, b: Needs(w, b),
    "list": lambda w, b: Row(w, b, "label"),
    "tuple": lambda w, b: Two(w, b),
    "namedtuple": lambda w, b: Pair(w, b),
    "namedtuple with more": lambda w, b: Noted(w, b, "note"),
    "dataclass": lambda w, b: Layer(w, b),
    "dataclass with more": lambda w, b: with_(Later(w, b), note="note", extra=("x", 1)),
    "dataclass that derives": lambda w, b: Derived(w, b),
}


def moved(w: Any, b: Any) -> OrderedDict:
    x = OrderedDict([("b", b), ("w", w)])
    x.move_to_end("b")
    return x


def state(x: Any) -> Any:
    """All that there is to an object: class, elements by the methods of its base, attributes."""
    base = next((t for t in (OrderedDict, dict, list, tuple) if isinstance(x, t)), None)
    items = () if base is None else list(base.__iter__(x))
    values = [dict.__getitem__(x, k) for k in items] if isinstance(x, dict) else []
    attributes = object.__getstate__(x)
    return type(x), items, values, getattr(x, "default_factory", None), attributes


def pair_of(x: Any) -> tuple[Any, Any]:
    """The two elements, by what the class itself holds."""
    if isinstance(x, dict):
        return dict.__getitem__(x, "w"), dict.__getitem__(x, "b")
    return tuple(x) if isinstance(x, list | tuple) else (x.w, x.b)


def loss(tree: Any, x: Any) -> Any:
    w, b = pair_of(tree)
    return mt.sum((x * w + b) ** 2)


X = np.array([1.0, 2.0, 3.0])
W, B = np.array([0.5, 1.0, -1.0]), np.array([2.0, 0.0, 1.0])
GRAD_W, GRAD_B = 2 * (X * W + B) * X, 2 * (X * W + B)


def made(name: str, w: Any = W, b: Any = B) -> Any:
    return TREES[name](mt.asarray(w), mt.asarray(b))


def same(found: Any, name: str, w: Any, b: Any) -> None:
    """The tree is what its class makes of these two, which stand in it as arrays."""
    values = pair_of(found)
    np.testing.assert_allclose(np.asarray(values[0]), w)
    np.testing.assert_allclose(np.asarray(values[1]), b)
    wanted = state(TREES[name](*values))
    got = state(found)
    assert got[0] is wanted[0]
    assert got[1:4:2] == wanted[1:4:2] or not isinstance(found, dict)
    attributes = got[4], wanted[4]
    if isinstance(attributes[0], dict):
        assert attributes[0].keys() == attributes[1].keys()
        for k, v in attributes[0].items():
            one = attributes[1][k]
            assert v is one or (isinstance(v, tuple) and all(p is q for p, q in zip(v, one, strict=True))) or v == one
    else:
        assert isinstance(attributes[0], tuple | list) or attributes[0] == attributes[1]
    if isinstance(found, Own):
        assert vars(found) is found


@pytest.mark.parametrize("name", TREES)
def test_flattened_and_rebuilt(name: str) -> None:
    tree = TREES[name](1.5, 2.5)
    before = copy.copy(state(tree))
    leaves, treedef = flatten(tree)
    assert sorted(leaves) == [1.5, 2.5]
    back = unflatten(treedef, leaves)
    assert state(back) == state(tree) == before
    assert back is not tree
    assert flatten(back)[1] == treedef
    assert hash(flatten(back)[1]) == hash(treedef)
    assert [x for _, x in flatten_with_path(tree)] == leaves
    assert state(tree_map(lambda x: x, [tree])[0]) == before
    assert state(tree_map(lambda a, b: a + b, tree, tree)) == state(TREES[name](3.0, 5.0))


@pytest.mark.parametrize("name", TREES)
def test_gradients(name: str) -> None:
    tree, x = made(name), mt.asarray(X)
    value, grads = mt.value_and_grad(loss)(tree, x)
    same(grads, name, GRAD_W, GRAD_B)
    assert float(value) == pytest.approx(np.sum((X * W + B) ** 2))
    same(mt.grad(loss)(tree, x), name, GRAD_W, GRAD_B)
    same(mt.grad(mt.checkpoint(loss))(tree, x), name, GRAD_W, GRAD_B)
    same(mt.compile(mt.grad(loss))(tree, x), name, GRAD_W, GRAD_B)
    same(mt.grad(mt.compile(loss))(tree, x), name, GRAD_W, GRAD_B)


@pytest.mark.parametrize("name", TREES)
def test_products_with_jacobians(name: str) -> None:
    tree = made(name)

    def twice(t: Any) -> Any:
        return tree_map(lambda a: a * a, t)

    value, pull = mt.vjp(twice, tree)
    same(value, name, W * W, B * B)
    same(pull(tree)[0], name, 2 * W * W, 2 * B * B)
    value, tangent = mt.jvp(twice, (tree,), (tree,))
    same(tangent, name, 2 * W * W, 2 * B * B)
    same(mt.hvp(lambda t: mt.sum(mt.concat(pair_of(t)) ** 3), tree, tree), name, 6 * W * W, 6 * B * B)


@pytest.mark.parametrize("name", TREES)
def test_compiled(name: str) -> None:
    step = mt.compile(lambda t: tree_map(lambda a: a + 1.0, t))
    same(step(made(name)), name, W + 1.0, B + 1.0)
    same(step(made(name, 2 * W, B)), name, 2 * W + 1.0, B + 1.0)
    assert step.signatures == 1


@pytest.mark.parametrize("name", TREES)
def test_own_derivative(name: str) -> None:
    @mt.custom_vjp
    def f(t: Any) -> Any:
        return tree_map(lambda a: a * 2.0, t)

    f.defvjp(lambda t: (f(t), None), lambda _, g: (tree_map(lambda a: a * 3.0, g),))

    def total(t: Any) -> Any:
        return mt.sum(mt.concat(pair_of(f(t))))

    same(mt.grad(total)(made(name)), name, np.full(3, 3.0), np.full(3, 3.0))


@pytest.mark.parametrize("name", TREES)
def test_optimizers(name: str) -> None:
    opt, params = mt.optim.sgd(0.5), made(name)
    new, _ = opt.update(params, mt.grad(loss)(params, mt.asarray(X)), opt.init(params))
    same(new, name, W - 0.5 * GRAD_W, B - 0.5 * GRAD_B)
    adam = mt.optim.adam(0.1)
    new, _ = mt.compile(adam.update)(params, params, adam.init(params))
    assert type(new) is type(params)
    clipped, _ = mt.optim.clip_by_global_norm(params, 1e9)
    same(clipped, name, W, B)


@pytest.mark.parametrize("name", TREES)
def test_carried_by_a_loop(name: str) -> None:
    carried, _ = mt.scan(lambda t, x: (tree_map(lambda a: a + x, t), None), made(name), mt.ones((3, 3)))
    same(carried, name, W + 3.0, B + 3.0)


@pytest.mark.parametrize("name", TREES)
def test_saved_and_loaded_like(name: str, tmp_path: Any) -> None:
    mt.save(tmp_path / "a", {"p": made(name)})
    plain = mt.load(tmp_path / "a")["p"]
    assert type(plain) in (dict, list, tuple)
    values = (plain["w"], plain["b"]) if isinstance(plain, dict) else plain
    np.testing.assert_array_equal(np.asarray(values[0]), W)
    np.testing.assert_array_equal(np.asarray(values[1]), B)
    same(mt.load(tmp_path / "a", like={"p": made(name, 0 * W, 0 * B)})["p"], name, W, B)


@pytest.mark.parametrize("name", TREES)
def test_no_class_in_a_program_file(name: str, tmp_path: Any) -> None:
    with pytest.raises(ProgramError, match=rf"{type(TREES[name](1, 2)).__name__}: its class has no form"):
        mt.save_program(tmp_path / "p.json", lambda t: mt.sum(pair_of(t)[0]), made(name))


@pytest.mark.parametrize("name", TREES)
def test_split_over_a_mesh(name: str) -> None:
    mesh = mt.Mesh({"data": 3})
    tree = mt.distribute(made(name), mesh, data=mt.Shard(0))
    same(tree, name, W, B)
    same(mt.compile(mt.grad(loss))(tree, mt.asarray(X)), name, GRAD_W, GRAD_B)
    out = mt.shard_map(lambda t: tree_map(lambda a: a * 2.0, t), mesh, ({"data": mt.Shard(0)},), {"data": mt.Shard(0)})
    same(out(tree), name, 2 * W, 2 * B)


# ----- structures that differ -----------------------------------------------------------------------------------------


def test_each_class_has_a_program_of_its_own() -> None:
    names: list[str] = []
    f = mt.compile(lambda t: (names.append(type(t).__name__), t["w"] * 2.0)[1])
    for tree in ({"w": mt.ones(2)}, OrderedDict(w=mt.ones(2)), Doubling(w=mt.ones(2)), defaultdict(int, w=mt.ones(2))):
        expected = float(tree["w"][0]) * 2.0
        assert float(f(tree)[0]) == expected


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, OrderedDict(a=1)),
        (defaultdict(int, a=1), defaultdict(list, a=1)),
        (with_(Tagged(a=1), tag="x"), with_(Tagged(a=1), tag="y")),
        (with_(Tagged(a=1), n=1), with_(Tagged(a=1), n=True)),
        (with_(Tagged(a=1), n=0.0), with_(Tagged(a=1), n=-0.0)),
        (with_(Tagged(a=1), n=[1]), with_(Tagged(a=1), n=[2])),
        (with_(Tagged(a=1), n=1), Tagged(a=1)),
        ([1, 2], Two(1, 2)),
        (Row(1, 2, "a"), Row(1, 2, "b")),
        (Noted(1, 2, "a"), Noted(1, 2, "b")),
    ],
)
def test_structures_that_differ(one: Any, other: Any) -> None:
    assert flatten(one)[1] != flatten(other)[1]
    assert flatten([one])[1] != flatten([other])[1]
    with pytest.raises(TreeError, match="structure"):
        tree_map(lambda a, b: a, one, other)


def test_attributes_that_are_alike() -> None:
    assert flatten(with_(Tagged(a=1), n=[1], m="x"))[1] == flatten(with_(Tagged(a=1), m="x", n=[1]))[1]


def test_missing_keys_of_a_defaultdict_inside() -> None:
    f = mt.compile(lambda d: d["w"] + sum(d["missing"]))
    with pytest.raises(TracedValueError, match=r"writes to a container that is its argument, at 0\.missing"):
        f(defaultdict(lambda: [1.0, 2.0], w=mt.asarray(1.0)))
    assert float(mt.grad(lambda d: d["w"] * (1.0 + len(d["none"])))(defaultdict(list, w=mt.asarray(1.0)))["w"]) == 1.0


# ----- refused --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Seeded:
    w: Any
    seed: dataclasses.InitVar[int]

    def __post_init__(self, seed: int) -> None:
        pass


@dataclasses.dataclass
class Base:
    w: Any


class Child(Base):
    def __init__(self) -> None:
        super().__init__(1.0)


class Failing(Base):
    def __init__(self, w: Any) -> None:
        super().__init__(w + None if type(w) is str else w)


@pytest.mark.parametrize("tree", [Seeded(1.0, 2), Child()])
def test_constructors_that_want_other_things(tree: Any) -> None:
    with pytest.raises(TreeError, match=r"cannot be rebuilt from its fields \['w'\].*tree\.register"):
        tree_map(lambda x: x, tree)


def test_an_error_of_a_constructor_is_its_own() -> None:
    with pytest.raises(TypeError, match="concatenate"):
        tree_map(lambda x: "text", Failing(1.0))


def test_fields_that_are_not_there() -> None:
    tree = Base(1.0)
    del tree.w
    with pytest.raises(TreeError, match="lacks its field w"):
        flatten(tree)


@pytest.mark.parametrize("tree", [with_(Tagged(a=1), other=mt.ones(2)), with_(Base(1.0), cache={"x": [mt.ones(1)]})])
def test_arrays_in_attributes_are_refused(tree: Any) -> None:
    for use in (flatten, flatten_with_path, lambda t: mt.grad(lambda q: mt.sum(q["a"]))(t), mt.compile(lambda t: 1)):
        with pytest.raises(TreeError, match=r"an array in its attribute (other|cache).*tree\.register"):
            use(tree)


def test_a_tree_that_contains_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for use in (flatten, flatten_with_path):
        with pytest.raises(TreeError, match="contains itself"):
            use(loop)


def test_cached_properties_are_computed_anew() -> None:
    class Cached(dict):
        @functools.cached_property
        def total(self) -> Any:
            return sum(self.values())

    tree = Cached(a=1.0, b=2.0)
    assert tree.total == 3.0
    assert tree_map(lambda x: 10 * x, tree).total == 30.0


# ----- objects that are no trees --------------------------------------------------------------------------------------


class Slotted:
    __slots__ = ("w",)

    def __init__(self, w: Any) -> None:
        self.w = w


class Node:
    def __init__(self, w: Any) -> None:
        self.inner = [{"deep": SimpleNamespace(w=w)}]
        self.w = self.inner[0]["deep"].w


OBJECTS = {
    "namespace": lambda w: SimpleNamespace(w=w),
    "proxy": lambda w: MappingProxyType({"w": w}),
    "UserDict": lambda w: UserDict(w=w),
    "UserList": lambda w: UserList([w]),
    "deque": lambda w: deque([w]),
    "values": lambda w: {"w": w}.values(),
    "slots": Slotted,
    "deep": Node,
}


def first(x: Any) -> Any:
    if isinstance(x, MappingProxyType | UserDict):
        return x["w"]
    return x.w if hasattr(x, "w") else next(iter(x))


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_are_refused_where_arrays_in_them_would_be_lost(name: str) -> None:
    make, x = OBJECTS[name], mt.asarray([1.0, 2.0])
    whole, kind = make(x), type(make(x)).__name__
    wanted = rf"{kind}.*no tree.*tree\.register\({kind}"
    for use in (
        lambda: mt.grad(lambda t: mt.sum(first(t)))(whole),
        lambda: mt.vjp(first, whole),
        lambda: mt.vjp(lambda t, y: first(t) * y, whole, x),
        lambda: mt.vjp(make, x),
        lambda: mt.jvp(lambda t, y: first(t) * y, (whole, x), (None, x)),
        lambda: mt.jvp(make, (x,), (x,)),
        lambda: mt.hvp(lambda t: mt.sum(first(t)), whole, whole),
        lambda: mt.jacobian(lambda t: first(t))(whole),
        lambda: mt.gradient_hook(whole, lambda g: g),
        lambda: mt.vjp(mt.compile(make), x),
    ):
        with pytest.raises((GradientError, TracedValueError), match=wanted):
            use()
    with pytest.raises(TracedValueError, match=wanted):
        mt.compile(make)(x)
    with pytest.raises(TracedValueError, match=wanted):
        mt.compile(lambda v: make(v))(2.0 * x)
    mesh = mt.Mesh({"data": 2})
    with pytest.raises(TracedValueError, match=wanted):
        mt.shard_map(make, mesh, ({},), {})(x)


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_elsewhere(name: str, tmp_path: Any) -> None:
    make, x = OBJECTS[name], mt.asarray([1.0, 2.0])
    compiled = mt.compile(lambda t: first(t) * 2.0)
    for k in (1.0, 3.0):
        np.testing.assert_array_equal(np.asarray(compiled(make(x * k))), 2.0 * k * np.asarray(x))
    np.testing.assert_array_equal(np.asarray(mt.checkpoint(first)(make(x))), np.asarray(x))
    opt = mt.optim.sgd(0.1)
    mesh = mt.Mesh({"data": 2})
    uses = [
        lambda: mt.save(tmp_path / "x", {"p": make(x)}),
        lambda: opt.init(make(x)),
        lambda: opt.update([x, make(x)], [x, make(x)], opt.init([x])),
        lambda: mt.optim.ema(0.9).init({"a": make(x)}),
    ]
    if not isinstance(make(x), UserList | deque):  # sequences of numbers are arrays
        uses += [
            lambda: mt.scan(lambda t, y: (t, None), make(x), mt.ones((2, 2))),
            lambda: mt.distribute(make(x), mesh),
            lambda: mt.optim.clip_by_global_norm(make(x), 1.0),
        ]
    for use in uses:
        with pytest.raises(MeshtapeError):
            use()


def test_a_registered_class() -> None:
    class Box:
        def __init__(self, w: Any, b: Any, scale: float) -> None:
            self.w, self.b, self.scale = w, b, scale

    assert flatten(Box(1, 2, 3.0))[0][0].w == 1  # a leaf so far
    register(Box, lambda x: ({"w": x.w, "b": x.b}, x.scale), lambda scale, c: Box(**c, scale=scale))
    box = Box(mt.asarray(W), mt.asarray(B), 3.0)
    grads = mt.grad(lambda t: mt.sum(t.w * t.w + t.b) * t.scale)(box)
    assert type(grads) is Box
    assert grads.scale == 3.0
    np.testing.assert_allclose(np.asarray(grads.w), 6.0 * W)
    f = mt.compile(lambda t: Box(t.w * t.scale, t.b, t.scale))
    for scale in (3.0, 4.0):
        np.testing.assert_allclose(np.asarray(f(Box(box.w, box.b, scale)).w), scale * W)
    assert [p for p, _ in flatten_with_path(box)] == [("w",), ("b",)]
    assert flatten(Box(1, 2, 3.0))[1] != flatten(Box(1, 2, 4.0))[1]


@pytest.mark.parametrize(
    "given",
    [(dict, len, len), (3, len, len), (type(None), len, len), (SimpleNamespace, 1, len), (SimpleNamespace, len, None)],
)
def test_misuse_of_register(given: Any) -> None:
    with pytest.raises(TreeError, match=r"tree\.register"):
        register(*given)


# ----- code of containers ---------------------------------------------------------------------------------------------

SCALE = 2.0


class Times(dict):
    def __getitem__(self, key):
        return SCALE * super().__getitem__(key)


@dataclasses.dataclass
class Model:
    w: Any

    def __call__(self, x):
        return self.w * x * SCALE

    def named(self, x):
        return self.w * x * SCALE


class Tuple(NamedTuple):
    w: Any

    def named(self, x):
        return self.w * x * SCALE


@pytest.mark.parametrize(
    ("tree", "read"),
    [
        (lambda w: Times(w=w), lambda t: t["w"]),
        (Model, lambda t: t(1.0)),
        (Model, lambda t: t.named(1.0)),
        (Tuple, lambda t: t.named(1.0)),
        (lambda w: [{"m": Model(w)}], lambda t: t[0]["m"].named(1.0)),
        (lambda w: with_(Tagged(w=w), fn=lambda v: v * SCALE), lambda t: t.fn(t["w"])),
        (lambda w: defaultdict(lambda: SCALE, w=w), lambda t: t["w"] * dict.copy(t).get("absent", t.default_factory())),
    ],
)
def test_methods_of_containers_are_read_again(tree: Any, read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, mine = mt.compile(read), tree(mt.asarray(1.0))
    for scale in (2.0, 5.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        assert float(compiled(mine)) == scale


def test_a_structure_in_another_process() -> None:
    import pickle

    for name in ("OrderedDict", "defaultdict", "model output", "attributes", "namedtuple with more", "own dict"):
        treedef = flatten(TREES[name](1.0, 2.0))[1]
        assert isinstance(treedef, TreeDef)
        assert pickle.loads(pickle.dumps(treedef)) == treedef
