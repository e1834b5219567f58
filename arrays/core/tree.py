"""Nested containers of arrays ("trees"): dict, list, tuple, named tuple, dataclass and ``None``.

Everything that takes "parameters" takes a tree. A leaf is whatever is not one of these containers. Dict keys keep their
insertion order: two dicts with the same keys in another order have different structures, as the order of leaves
matters.

A tree is rebuilt with the types that it had. Subclasses of dict, list and tuple (``OrderedDict``, ``defaultdict``,
``Counter``, those of the user's) are read and filled by the methods of their base, whatever their own methods do, and
keep their attributes; no constructor runs. A dataclass is rebuilt by its constructor. :func:`register` makes a
container of any other class.

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
import functools
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MemberDescriptorType
from typing import Any

from .errors import TreeError, check_function

Path = tuple[str | int, ...]


class TreeDef:
    """Structure of a tree without its leaves; hashable and comparable.

    ``kind`` is ``"leaf"``, ``"none"``, ``"dict"``, ``"list"``, ``"tuple"``, ``"namedtuple"``, ``"dataclass"`` or
    ``"registered"``; ``keys`` are the names of the children, ``type`` the class to rebuild (None for dict, list and
    tuple themselves), ``rest`` what an instance holds beside its children, ``size`` the number of leaves, and
    ``is_flat`` says that all children are leaves. ``objects`` are the classes and the attributes in it, which a
    function that is given such a tree can read.
    """

    __slots__ = ("_hash", "children", "exact", "is_flat", "keys", "kind", "objects", "rest", "size", "type")

    def __init__(
        self,
        kind: str,
        keys: tuple[str | int, ...] = (),
        children: tuple[TreeDef, ...] = (),
        type: Any = None,
        rest: Rest | None = None,
    ) -> None:
        self.kind, self.keys, self.children, self.type, self.rest = kind, keys, children, type, rest
        self.size = sum([c.size for c in children]) if kind != "leaf" else 1
        self.is_flat = kind != "leaf" and not [c for c in children if c.kind != "leaf"]
        # Equal keys (1, 1.0, True; 0.0 and -0.0) are not the same: what is rebuilt has the very ones.
        self.exact = _exact(keys) if kind in ("dict", "registered") else None
        self.objects: tuple[Any, ...] = () if type is None else (type, *(rest.values() if rest else ()))
        if not self.is_flat:
            self.objects += tuple([x for c in children for x in c.objects])
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
            and self.rest == other.rest
            and self.children == other.children
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Texts have another hash in another process.
        return TreeDef, (self.kind, self.keys, self.children, self.type, self.rest)

    def __repr__(self) -> str:
        return f"TreeDef({unflatten(self, [_Star] * self.size)!r})"


def _exact(key: Any) -> Any:
    """The features by which equal keys may differ: their types, and the signs of zeros."""
    if type(key) is tuple:
        return tuple([str if type(k) is str else _exact(k) for k in key])
    return repr(key) if type(key) in (bool, int, float, complex) else type(key)


_Star: Any = type("_Star", (), {"__repr__": lambda self: "*"})()
_LEAF = TreeDef("leaf")
_NONE = TreeDef("none")
_LEAF_TYPES: set[type] = set()  # found to be no containers, which takes longer to find out than to look up
_KNOWN: dict[tuple[Any, ...], TreeDef] = {}  # structures by kind, names, class and children (None: leaves alone)
_MOST_KEPT = 1024
_DEEPEST = 400  # compiled code would end the process where Python's own has an error

Children = tuple[str, tuple[Any, ...], list[Any], type | None, "Rest | None"]
"""Kind, keys, children, class and the rest of a container."""
_READERS: dict[type, Callable[[Any], Children]] = {}
_BUILDERS: dict[type, Callable[[Any, Any], Any]] = {}


class Rest:
    """The data of an instance beside its children: attributes, a ``default_factory``, the data of a registered class.

    Plain values are compared by value and type, all others by identity.
    """

    __slots__ = ("held", "key")

    def __init__(self, **held: Any) -> None:
        self.held = held
        self.key = tuple([(name, _known(value)) for name, value in held.items()])

    def values(self) -> list[Any]:
        """All held objects that are no plain values."""
        flat = [v for x in self.held.values() for v in (x.values() if type(x) is dict else (x,))]
        return [v for v in flat if v is not None and type(v) not in _PLAIN]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rest) and self.key == other.key

    def __hash__(self) -> int:
        return hash(tuple(self.held))

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Rest, **self.held), ()


_PLAIN = frozenset({bool, int, float, complex, str, bytes})


def _known(value: Any) -> Any:
    """A value as a key: of its type, and equal to no other."""
    if type(value) is dict:
        return dict, frozenset([(_known(k), _known(v)) for k, v in value.items()])
    if type(value) in (tuple, list, frozenset):
        return type(value), (frozenset if type(value) is frozenset else tuple)(map(_known, value))
    return type(value), repr(value) if type(value) in _PLAIN else id(value)


def children_of(x: Any) -> Children | None:
    """Kind, keys, children, class and rest of a container, or None for a leaf."""
    t = type(x)
    if t in _LEAF_TYPES:
        return None
    if t is dict:
        return "dict", tuple(x), list(x.values()), None, None
    if t is list:
        return "list", tuple(range(len(x))), x, None, None
    if t is tuple:
        return "tuple", tuple(range(len(x))), list(x), None, None
    if x is None:
        return None
    reader = _READERS.get(t)
    if reader is None:
        reader = _reader_of(t)
        if reader is None:
            _LEAF_TYPES.add(t)
            return None
        _READERS[t] = reader
    return reader(x)


def _reader_of(t: Any) -> Callable[[Any], Children] | None:
    """The function that reads containers of a class; None where these are leaves."""
    if not getattr(t, "__is_tree__", True):
        return None
    if issubclass(t, dict):
        return _read_dict
    if issubclass(t, list):
        return _read_list
    if issubclass(t, tuple):
        return None if hasattr(t, "n_sequence_fields") else _read_tuple  # `time.struct_time` and the like are made in C
    return _read_dataclass if dataclasses.is_dataclass(t) else None


def _read_dict(x: Any) -> Children:
    # An OrderedDict knows the order of its keys by itself.
    keys = tuple(OrderedDict.__iter__(x) if isinstance(x, OrderedDict) else dict.__iter__(x))
    children = [dict.__getitem__(x, k) for k in keys]
    return "dict", keys, children, type(x), _rest(x, keys, children)


def _read_list(x: Any) -> Children:
    children = list(list.__iter__(x))
    return "list", tuple(range(len(children))), children, type(x), _rest(x)


def _read_tuple(x: Any) -> Children:
    children = list(tuple.__iter__(x))
    names = getattr(x, "_fields", None)
    if names is None:
        return "tuple", tuple(range(len(children))), children, type(x), _rest(x)
    return "namedtuple", tuple(names), children, type(x), _rest(x)


def _read_dataclass(x: Any) -> Children:
    t = type(x)
    names = tuple([f.name for f in dataclasses.fields(x) if f.init])
    try:
        children = [getattr(x, n) for n in names]
    except AttributeError as e:
        raise TreeError(
            f"a {t.__qualname__} lacks its field {e.name}, without which it cannot be rebuilt: set it"
        ) from e
    # Where code of the class makes further attributes, it makes them anew of what the fields are then.
    derives = hasattr(t, "__post_init__") or not t.__dataclass_params__.init  # type: ignore[attr-defined]
    return "dataclass", names, children, t, None if derives else _rest(x, without=names)


def _rest(x: Any, keys: tuple[Any, ...] = (), children: Any = (), without: tuple[str, ...] = ()) -> Rest | None:
    """The attributes of an instance but for those ``without``. Those that are one of the children, by its name, are
    among ``same``."""
    t = type(x)
    state = object.__getstate__(x)  # type: ignore[attr-defined]
    variables, slots = state if type(state) is tuple else (state, None)
    if variables is x:  # the recipe `self.__dict__ = self`
        return Rest(itself=True)
    factory = defaultdict.default_factory.__get__(x) if isinstance(x, defaultdict) else None  # type: ignore[attr-defined]
    if not variables and not slots and factory is None:
        return None
    mine = dict(zip(keys, children, strict=True))
    held: dict[str, Any] = {}
    same = []
    for name, value in {**(variables or {}), **(slots or {})}.items():
        if name in without or isinstance(getattr(t, name, None), functools.cached_property):
            continue
        if name in mine and mine[name] is value:
            same.append(name)
        elif any(hasattr(leaf, "dtype") and hasattr(leaf, "shape") for leaf in flatten(value)[0]):
            raise TreeError(
                f"a {t.__qualname__} holds an array in its attribute {name}, which is none of its "
                f"{'fields' if without else 'elements'}, so "
                f"that nothing would be done to it: put it among these, or call mt.tree.register({t.__qualname__}, "
                "flatten, unflatten)"
            )
        else:
            held[name] = value
    if not held and not same and factory is None:
        return None
    return Rest(itself=False, attributes=held, same=tuple(same), factory=factory)


def register(
    cls: Any, flatten: Callable[[Any], tuple[Any, Any]], unflatten: Callable[[Any, Any], Any] | None = None
) -> None:
    """Make objects of exactly this class containers, such as those of ``types.SimpleNamespace`` or of an ``attrs``
    class.

    Parameters
    ----------
    cls
        The class itself, and none of its subclasses.
    flatten
        From an object to ``(children, data)``: the children by name in a dict, or in a list or tuple, and whatever else
        it takes to rebuild the object. Arrays belong to the children.
    unflatten
        From ``(data, children)`` to an object. The children come in a dict or a list, as they were given.

    Raises
    ------
    TreeError
        For what is no class, and for dict, list, tuple and None.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> class Point(SimpleNamespace):
    ...     pass
    >>> register(Point, lambda p: (vars(p), None), lambda _, children: Point(**children))
    >>> tree_map(lambda x: 2 * x, Point(a=1, b=[2]))
    Point(a=2, b=[4])
    """
    containers = (dict, list, tuple, type(None))
    if not isinstance(cls, type) or cls in containers or not callable(flatten) or not callable(unflatten):
        raise TreeError(
            f"[tree.register] takes a class of yours or of a library, and two functions, got {cls!r}, {flatten!r} and "
            f"{unflatten!r}"
        )

    def read(x: Any) -> Children:
        children, data = flatten(x)
        named = isinstance(children, Mapping)
        keys = tuple(children) if named else tuple(range(len(children)))
        values = list(children.values() if named else children)
        return "registered", keys, values, cls, Rest(named=named, data=data)

    _READERS[cls], _BUILDERS[cls] = read, unflatten
    _LEAF_TYPES.discard(cls)


def is_container(x: Any) -> bool:
    """Whether ``x`` is a tree of more than a leaf, or an empty one."""
    return children_of(x) is not None


def flatten_with_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[Path, Any]]:
    """All leaves with the keys that lead to them, in order."""
    out: list[tuple[Path, Any]] = []
    try:
        _walk(tree, (), is_leaf, out)
    except RecursionError:
        raise _too_deep() from None
    return out


def _too_deep() -> TreeError:
    return TreeError(
        "a tree contains itself, or is nested deeper than Python can go: take the reference to itself out of it"
    )


# The walks below are functions of their own, not closures: a closure that calls itself is a reference cycle, which
# would keep the leaves of every tree alive until the garbage collector runs.


def _walk(x: Any, path: Path, is_leaf: Callable[[Any], bool] | None, out: list[tuple[Path, Any]]) -> None:
    if x is None and not (is_leaf and is_leaf(x)):
        return
    found = None if is_leaf is not None and is_leaf(x) else children_of(x)
    if found is None:
        out.append((path, x))
        return
    if len(path) > _DEEPEST:
        raise RecursionError
    for key, child in zip(found[1], found[2], strict=True):
        _walk(child, (*path, key), is_leaf, out)


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeDef]:
    """The leaves in order, and the structure from which :func:`unflatten` rebuilds the tree."""
    leaves: list[Any] = []
    try:
        return leaves, _structure(tree, is_leaf, leaves)
    except RecursionError:
        raise _too_deep() from None


def _structure(x: Any, is_leaf: Callable[[Any], bool] | None, leaves: list[Any], depth: int = 0) -> TreeDef:
    if is_leaf is None:
        if type(x) in _LEAF_TYPES:
            leaves.append(x)
            return _LEAF
    elif is_leaf(x):
        leaves.append(x)
        return _LEAF
    if x is None:
        return _NONE
    found = children_of(x)
    if found is None:
        leaves.append(x)
        return _LEAF
    kind, keys, children, cls, rest = found
    if is_leaf is None and not [c for c in children if type(c) not in _LEAF_TYPES]:
        leaves.extend(children)
        inner = None
    elif depth > _DEEPEST:
        raise RecursionError
    else:
        inner = tuple([_structure(c, is_leaf, leaves, depth + 1) for c in children])
    found = _KNOWN.get((kind, keys, cls, inner)) if rest is None else None
    if found is None:
        found = TreeDef(kind, keys, (_LEAF,) * len(keys) if inner is None else inner, cls, rest)
        # Of equal keys (1, 1.0, True) each is its own.
        plain = kind not in ("dict", "registered") or all(type(k) is str for k in keys)
        if rest is None and plain and all(isinstance(x, type) for x in found.objects):  # and holds no objects of users
            if len(_KNOWN) >= _MOST_KEPT:
                _KNOWN.clear()
            _KNOWN[kind, keys, cls, inner] = found
    return found


def unflatten(treedef: TreeDef, leaves: Iterable[Any]) -> Any:
    """Inverse of :func:`flatten`. Raises :class:`TreeError` when the number of leaves does not fit."""
    leaves = list(leaves)
    if treedef is _LEAF and len(leaves) == 1:
        return leaves[0]
    if len(leaves) != treedef.size:
        raise TreeError(f"[tree.unflatten] the tree needs {treedef.size} leaves, got {len(leaves)}")
    return _container(treedef, leaves) if treedef.is_flat else _build(treedef, iter(leaves))


def _build(d: TreeDef, leaves: Iterator[Any]) -> Any:
    if d.kind == "leaf":
        return next(leaves)
    return _container(d, [next(leaves) if c is _LEAF else _build(c, leaves) for c in d.children])


def _container(d: TreeDef, children: list[Any]) -> Any:
    """The container of these children. (Their number is not checked against the names, which would double the time.)"""
    kind = d.kind
    if d.type is not None:
        return _instance(d, children)
    if kind == "dict":
        return dict(zip(d.keys, children))  # noqa: B905
    if kind == "list":
        return children
    return None if kind == "none" else tuple(children)


def _instance(d: TreeDef, children: list[Any]) -> Any:
    """An instance of a class. Where its base has setters, they make it, so that no code of the class runs."""
    cls, held = d.type, {} if d.rest is None else d.rest.held
    named = dict(zip(d.keys, children)) if d.kind not in ("list", "tuple") else {}  # noqa: B905
    if d.kind == "registered":
        return _BUILDERS[cls](held["data"], named if held["named"] else children)  # type: ignore[index]
    out: Any
    if d.kind == "dataclass":
        try:
            out = cls(**named)  # type: ignore[misc]
        except TypeError as e:
            if _takes(cls, named):
                raise
            raise TreeError(
                f"a {cls.__qualname__} cannot be rebuilt from its fields {list(d.keys)} ({e}): give it a constructor "
                "that takes "  # type: ignore[union-attr]
                f"these, or call mt.tree.register({cls.__qualname__}, flatten, unflatten)"  # type: ignore[union-attr]
            ) from None
    elif d.kind == "dict":
        base = next(b for b in (OrderedDict, defaultdict, dict) if issubclass(cls, b))  # type: ignore[arg-type]
        out = base.__new__(cls)  # type: ignore[type-var]
        for key, value in named.items():
            base.__setitem__(out, key, value)
    elif d.kind == "list":
        out = list.__new__(cls)  # type: ignore[type-var]
        list.extend(out, children)
    else:
        return _with_attributes(tuple.__new__(cls, children), held, named)  # type: ignore[type-var]
    return _with_attributes(out, held, named)


def _takes(cls: Any, named: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(cls).bind(**named)
    except TypeError:
        return False
    return True


def _with_attributes(x: Any, held: Mapping[str, Any], named: Mapping[str, Any]) -> Any:
    if not held:
        return x
    if held["itself"]:
        object.__setattr__(x, "__dict__", x)
        return x
    if held["factory"] is not None:
        defaultdict.default_factory.__set__(x, held["factory"])  # type: ignore[attr-defined]
    for name, value in (*held["attributes"].items(), *((n, named[n]) for n in held["same"])):
        member = getattr(type(x), name, None)
        if isinstance(member, MemberDescriptorType):
            member.__set__(x, value)
        else:
            object.__getattribute__(x, "__dict__")[name] = value
    return x


def tree_map(fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """``fn`` applied to each leaf (and the leaves at the same places of ``rest``); the structure stays.

    >>> tree_map(lambda a, b: a + b, {"x": 1, "y": (2,)}, {"x": 10, "y": (20,)})
    {'x': 11, 'y': (22,)}
    """
    check_function("tree_map", fn)
    leaves, treedef = flatten(tree, is_leaf)
    columns = [leaves]
    for i, other in enumerate(rest):
        other_leaves, other_def = flatten(other, is_leaf)
        if other_def != treedef:
            raise TreeError(f"[tree_map] argument {i + 2} has structure {other_def}, the first has {treedef}")
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
    check_function("map_with_path", fn)
    _, treedef = flatten(tree, is_leaf)
    return unflatten(treedef, [fn(path, x) for path, x in flatten_with_path(tree, is_leaf)])


_PUBLIC = "TreeDef flatten flatten_with_path is_container map_with_path path_name register tree_map unflatten"
__all__ = _PUBLIC.split()
__dir__ = __all__.copy
