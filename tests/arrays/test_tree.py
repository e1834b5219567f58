"""Trees: what is taken apart comes together again."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtape.arrays.core.tree import flatten, flatten_with_path, is_container, path_name, tree_map, unflatten

BOUNDED = settings(max_examples=100, deadline=None)


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Layer:
    weight: Any
    bias: Any = None


@dataclasses.dataclass
class Opaque:
    __is_tree__ = False
    x: int


LEAVES = st.integers() | st.text(max_size=2) | st.floats(allow_nan=False)
TREES = st.recursive(
    LEAVES | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.builds(Layer, inner, inner)
    ),
    max_leaves=12,
)


@BOUNDED
@given(TREES)
def test_round_trip(tree):
    leaves, treedef = flatten(tree)
    back = unflatten(treedef, leaves)
    assert back == tree
    assert type(back) is type(tree)
    assert flatten(back)[1] == treedef
    assert hash(flatten(back)[1]) == hash(treedef)
    assert treedef.size == len(leaves)
    assert [leaf for _, leaf in flatten_with_path(tree)] == leaves
    assert isinstance(repr(treedef), str)


@BOUNDED
@given(TREES)
def test_paths_lead_to_their_leaves(tree):
    for path, leaf in flatten_with_path(tree):
        x = tree
        for key in path:
            x = getattr(x, key) if isinstance(x, Pair | Layer) else x[key]
        assert x is leaf


@BOUNDED
@given(TREES)
def test_tree_map(tree):
    same = tree_map(lambda x: x, tree)
    assert same == tree
    pairs = tree_map(lambda x, y: (x, y), tree, same)
    assert flatten(pairs, is_leaf=lambda x: type(x) is tuple and len(x) == 2)[0] is not None
    assert tree_map(lambda x, y: x is y or x == y, tree, same) == tree_map(lambda x: True, tree)


def test_wrong_number_of_leaves():
    _, treedef = flatten([1, 2])
    with pytest.raises(ValueError, match="2 leaves, got 3"):
        unflatten(treedef, [1, 2, 3])


def test_structures_that_differ():
    with pytest.raises(ValueError, match="argument 2"):
        tree_map(lambda x, y: x, {"a": 1}, {"b": 1})
    assert flatten({"a": 1, "b": 2})[1] != flatten({"b": 2, "a": 1})[1]
    assert flatten([1])[1] != flatten((1,))[1]
    assert flatten(Pair(1, 2))[1] != flatten((1, 2))[1]
    assert flatten(None)[1] != flatten([])[1]


def test_equal_structures_are_one_object_unless_they_hold_objects_of_the_users():
    def structure(x: Any) -> Any:
        return flatten({"a": [1, {"b": x}], "c": (2, Pair(3, None))})[1]

    class Holder(list):
        pass

    assert structure(4) is structure(5)
    assert structure({True: 1}) != structure({1: 1})
    held = Opaque(1)
    gone, x = weakref.ref(held), Holder([1])
    x.note = held
    assert structure(x) == structure(x)
    del held, x
    gc.collect()
    assert gone() is None


def test_kinds_of_dicts():
    assert unflatten(flatten(OrderedDict(a=1))[1], [2]) == {"a": 2}
    assert flatten(defaultdict(list, a=[1, 2]))[0] == [1, 2]


def test_names_that_are_equal_stay_what_they_are():
    for keys in (("a", "b"), (1, 0), (1.0, 0), (True, False), ("a", "b")):
        leaves, treedef = flatten(dict.fromkeys(keys, 3.0))
        assert [(type(k), k) for k in unflatten(treedef, leaves)] == [(type(k), k) for k in keys]


def test_none_is_no_leaf_whoever_asked_before():
    tree = {"a": None, "b": 1}
    assert not is_container(None)
    assert flatten(tree)[0] == [1]
    assert unflatten(flatten(tree)[1], [2]) == {"a": None, "b": 2}


def test_leaves_by_wish():
    leaves, treedef = flatten({"a": [1, 2], "b": None}, is_leaf=lambda x: isinstance(x, list) or x is None)
    assert leaves == [[1, 2], None]
    assert unflatten(treedef, leaves) == {"a": [1, 2], "b": None}
    opaque = Opaque(1)
    assert flatten([opaque])[0] == [opaque]
    assert flatten(Layer)[0] == [Layer]


def test_names_and_text():
    assert path_name(("layers", 0, "w")) == "layers.0.w"
    assert repr(flatten({"a": [1, None]})[1]) == "TreeDef({'a': [*, None]})"
