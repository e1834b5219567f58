"""Nested containers of arrays ("trees"): dict, list, tuple, named tuple, dataclass and ``None``.

Everything that takes "parameters" takes a tree. A leaf is whatever is not one of these containers. Dict keys keep their
insertion order: two dicts with the same keys in another order have different structures, as the order of leaves matters.

>>> leaves, treedef = flatten({"w": 1, "b": [2, None]})
>>> leaves
[1, 2]
>>> unflatten(treedef, [10, 20])
{'w': 10, 'b': [20, None]}
>>> [path for path, _ in flatten_with_path({"layers": [{"w": 1}]})]
[('layers', 0, 'w')]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Path = tuple[str | int, ...]


class TreeDef:
    """Structure of a tree without its leaves; hashable and comparable.

    ``kind`` is ``"leaf"``, ``"none"``, ``"dict"``, ``"list"``, ``"tuple"``, ``"namedtuple"`` or ``"dataclass"``; ``keys``
    are the names of the children, ``type`` the class to rebuild (for named tuples and dataclasses), ``size`` the number of
    leaves, and ``is_flat`` says that all children are leaves.
    """

    __slots__ = ("_hash", "children", "exact", "is_flat", "keys", "kind", "size", "type")

    def __init__(
        self,
        kind: str,
        keys: tuple[str | int, ...] = (),
        children: tuple[TreeDef, ...] = (),
        type: type | None = None,
    ) -> None:
        self.kind, self.keys, self.children, self.type = kind, keys, children, type
        self.size = sum([c.size for c in children]) if kind != "leaf" else 1
        self.is_flat = kind != "leaf" and not [c for c in children if c.kind != "leaf"]
        # Equal keys (1, 1.0, True; 0.0 and -0.0) are not the same: what is rebuilt has the very ones.
        self.exact = _exact(keys) if kind == "dict" else None
        # The key of a compiled call: asked for at each, of all that is inside.
        self._hash = hash((kind, keys, children, type))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, TreeDef):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.kind == other.kind
            and self.keys == other.keys
            and self.exact == other.exact
            and self.type is other.type
            and self.children == other.children
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return TreeDef, (self.kind, self.keys, self.children, self.type)  # texts have another hash in another process

    def __repr__(self) -> str:
        return f"TreeDef({unflatten(self, [_Star] * self.size)!r})"


def _exact(key: Any) -> Any:
    """All that equal keys may differ by: their types, and the signs of zeros."""
    if type(key) is tuple:
        return tuple([str if type(k) is str else _exact(k) for k in key])
    return repr(key) if type(key) in (bool, int, float, complex) else type(key)


class _StarType:
    def __repr__(self) -> str:
        return "*"


_Star = _StarType()
_LEAF = TreeDef("leaf")
_NONE = TreeDef("none")
_LEAF_TYPES: set[type] = set()  # found to be no containers, which takes longer to find out than to look up
_FLAT: dict[tuple[Any, ...], TreeDef] = {}  # structures of containers of leaves alone, by kind, names and class
_MOST_KEPT = 1024


def _children(x: Any) -> tuple[str, tuple[str | int, ...], list[Any], type | None] | None:
    """(kind, keys, children, class) of a container, or None for a leaf."""
    t = type(x)
    if t in _LEAF_TYPES:
        return None
    if t is dict:
        return "dict", tuple(x), list(x.values()), None
    if t is list:
        return "list", tuple(range(len(x))), x, None
    if t is tuple:
        return "tuple", tuple(range(len(x))), list(x), None
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return "namedtuple", tuple(x._fields), list(x), t
    if isinstance(x, dict):
        # OrderedDict, defaultdict, …: rebuilt as a plain dict, which keeps the order of keys.
        return "dict", tuple(x), list(x.values()), None
    if dataclasses.is_dataclass(x) and not isinstance(x, type) and getattr(t, "__is_tree__", True):
        names = tuple(f.name for f in dataclasses.fields(x) if f.init)
        return "dataclass", names, [getattr(x, n) for n in names], t
    # None is no leaf; a class is one, but its metaclass says nothing about the next.
    if x is not None and not isinstance(x, type):
        _LEAF_TYPES.add(t)
    return None


def is_container(x: Any) -> bool:
    """Whether ``x`` is a tree of more than a leaf, or an empty one."""
    return _children(x) is not None


def flatten_with_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[Path, Any]]:
    """All leaves with the keys that lead to them, in order."""
    out: list[tuple[Path, Any]] = []
    _walk(tree, (), is_leaf, out)
    return out


# The walks below are functions of their own, not closures: a closure that calls itself is a reference cycle, which would keep
# the leaves of every tree alive until the garbage collector runs.


def _walk(x: Any, path: Path, is_leaf: Callable[[Any], bool] | None, out: list[tuple[Path, Any]]) -> None:
    if x is None and not (is_leaf and is_leaf(x)):
        return
    found = None if is_leaf is not None and is_leaf(x) else _children(x)
    if found is None:
        out.append((path, x))
        return
    for key, child in zip(found[1], found[2], strict=True):
        _walk(child, (*path, key), is_leaf, out)


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeDef]:
    """The leaves in order, and the structure from which :func:`unflatten` rebuilds the tree."""
    leaves: list[Any] = []
    return leaves, _structure(tree, is_leaf, leaves)


def _structure(x: Any, is_leaf: Callable[[Any], bool] | None, leaves: list[Any]) -> TreeDef:
    if is_leaf is None:
        if type(x) in _LEAF_TYPES:
            leaves.append(x)
            return _LEAF
    elif is_leaf(x):
        leaves.append(x)
        return _LEAF
    if x is None:
        return _NONE
    found = _children(x)
    if found is None:
        leaves.append(x)
        return _LEAF
    kind, keys, children, cls = found
    if is_leaf is None and not [c for c in children if type(c) not in _LEAF_TYPES]:
        leaves.extend(children)
        flat = _FLAT.get((kind, keys, cls))
        if flat is None:
            flat = TreeDef(kind, keys, (_LEAF,) * len(keys), cls)
            if kind != "dict" or all(type(k) is str for k in keys):  # of equal keys (1, 1.0, True) each is its own
                if len(_FLAT) >= _MOST_KEPT:
                    _FLAT.clear()
                _FLAT[kind, keys, cls] = flat
        return flat
    return TreeDef(kind, keys, tuple([_structure(c, is_leaf, leaves) for c in children]), cls)


def unflatten(treedef: TreeDef, leaves: Iterable[Any]) -> Any:
    """Inverse of :func:`flatten`. Raises ``ValueError`` when the number of leaves does not fit."""
    leaves = list(leaves)
    if treedef is _LEAF and len(leaves) == 1:
        return leaves[0]
    if len(leaves) != treedef.size:
        raise ValueError(f"tree needs {treedef.size} leaves, got {len(leaves)}")
    return _container(treedef, leaves) if treedef.is_flat else _build(treedef, iter(leaves))


def _build(d: TreeDef, leaves: Iterator[Any]) -> Any:
    if d.kind == "leaf":
        return next(leaves)
    return _container(d, [next(leaves) if c is _LEAF else _build(c, leaves) for c in d.children])


def _container(d: TreeDef, children: list[Any]) -> Any:
    """The container of these children, of which there are as many as names. (That is not asked again: it takes half of the time.)"""
    kind = d.kind
    if kind == "dict":
        return dict(zip(d.keys, children))  # noqa: B905
    if kind == "list":
        return children
    if kind == "tuple":
        return tuple(children)
    if kind == "none":
        return None
    if kind == "namedtuple":
        return d.type(*children)
    return d.type(**dict(zip(d.keys, children)))  # noqa: B905


def tree_map(fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """``fn`` applied to each leaf (and the leaves at the same places of ``rest``); the structure stays.

    >>> tree_map(lambda a, b: a + b, {"x": 1, "y": (2,)}, {"x": 10, "y": (20,)})
    {'x': 11, 'y': (22,)}
    """
    leaves, treedef = flatten(tree, is_leaf)
    columns = [leaves]
    for i, other in enumerate(rest):
        other_leaves, other_def = flatten(other, is_leaf)
        if other_def != treedef:
            raise ValueError(f"tree_map: argument {i + 2} has structure {other_def}, the first has {treedef}")
        columns.append(other_leaves)
    return unflatten(treedef, [fn(*row) for row in zip(*columns, strict=True)])


def path_name(path: Path) -> str:
    """A path as people read it: ``('layers', 0, 'w')`` becomes ``layers.0.w``."""
    return ".".join(str(p) for p in path)


def map_with_path(fn: Callable[[Path, Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """``fn(path, leaf)`` for each leaf; the structure stays.

    >>> map_with_path(lambda path, x: f"{path_name(path)}={x}", {"a": [1, 2]})
    {'a': ['a.0=1', 'a.1=2']}
    """
    _, treedef = flatten(tree, is_leaf)
    return unflatten(treedef, [fn(path, x) for path, x in flatten_with_path(tree, is_leaf)])
