"""The inventory of a checkpoint: rows that are searched, filtered, sorted and paged, and the tree of their names.

All of it comes from the table of contents; no array is read. One pass over 10⁵ arrays builds it, and it is kept with
the opened checkpoint, so that each later view costs what it shows.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, ClassVar

from ....arrays.core.errors import CheckpointKeyError
from ...checkpoint.checkpoint import Checkpoint, StoredArray
from .text import key, natural

PAGE = 100
SORTS = ("tree", "name", "size", "dtype", "rank")


@dataclass(frozen=True, slots=True)
class ArrayRow:
    """One array of a list."""

    name: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    sharding: str | None
    arrays: ClassVar[int] = 1

    @property
    def label(self) -> str:
        return self.path[-1] if self.path else self.name

    def data(self) -> dict[str, Any]:
        facts = {k: getattr(self, k) for k in ("name", "shape", "dtype", "nbytes", "sharding")}
        return facts | {"shape": list(self.shape)}


@dataclass(slots=True)
class NameGroup:
    """A prefix of names: the arrays right below it and the groups below it, with totals over everything inside."""

    path: tuple[str, ...]
    groups: dict[str, NameGroup] = field(default_factory=dict)
    rows: list[ArrayRow] = field(default_factory=list)
    arrays: int = 0
    nbytes: int = 0

    @property
    def label(self) -> str:
        return self.path[-1] if self.path else ""

    def children(self) -> list[NameGroup | ArrayRow]:
        """Groups and arrays, in the natural order of their last key."""
        both: list[NameGroup | ArrayRow] = [*self.groups.values(), *self.rows]
        return sorted(both, key=lambda c: natural(c.path[-1] if c.path else ""))


def largest_first(item: NameGroup | ArrayRow) -> tuple[int, int, str]:
    """A sorting key: size descending, then the shorter name first, which is faster than `natural`.

    >>> rows = [ArrayRow(n, (n,), (2,), "int8", 2, None) for n in ("w10", "w2")]
    >>> [r.name for r in sorted(rows, key=largest_first)]
    ['w2', 'w10']
    """
    name = item.name if isinstance(item, ArrayRow) else item.label
    return -item.nbytes, len(name), name


@dataclass(frozen=True)
class Query:
    """A query for arrays. Every one of ``words`` must occur in a name, ignoring case.

    A text with ``*`` or ``?`` is a pattern for the whole name.
    """

    words: str = ""
    dtype: str = ""
    least: int = 0
    most: int | None = None
    sort: str = "tree"
    descending: bool = False
    page: int = 0

    @property
    def narrows(self) -> bool:
        """Whether it asks for anything but the tree as it is."""
        return bool(self.words.strip() or self.dtype or self.least or self.most is not None or self.sort != "tree")


@dataclass(frozen=True)
class RowPage:
    """One page of the rows that a query selects, and totals over all of them."""

    rows: list[ArrayRow]
    found: int
    nbytes: int
    page: int
    pages: int


class Inventory:
    """The rows of an opened checkpoint.

    >>> import numpy as np, tempfile, os
    >>> from meshtape.storage import save, open_checkpoint
    >>> where = os.path.join(tempfile.mkdtemp(), "c")
    >>> _ = save(where, {"enc": {"w": np.ones((4, 4)), "b": np.ones(4)}, "step": np.array(3)})
    >>> held = Inventory(open_checkpoint(where))
    >>> held.list(Query("W")).rows[0].name, held.group(["enc"]).nbytes
    ('enc.w', 160)
    """

    def __init__(self, ckpt: Checkpoint) -> None:
        separator = "/" if ckpt.kind == "Zarr" else "."
        dtypes: dict[Any, str] = {}  # a dtype computes its name anew each time

        def row(name: str, a: StoredArray) -> ArrayRow:
            path, shape, dtype = a.path, a.shape, a.dtype
            text = dtypes.get(dtype) or dtypes.setdefault(dtype, dtype.name)
            keys = tuple(map(str, path)) if len(path) != 1 else tuple(str(path[0]).split(separator))
            return ArrayRow(name, keys, shape, text, math.prod(shape) * dtype.itemsize, a.sharding_text)

        self.rows = [row(name, a) for name, a in ckpt.items()]
        self.nbytes = sum(r.nbytes for r in self.rows)
        self.elements = sum(math.prod(r.shape) for r in self.rows)
        self._odd = {k: r.name for r in self.rows if (k := key(r.name)) != r.name}

    @cached_property
    def dtypes(self) -> dict[str, tuple[int, int]]:
        """(arrays, bytes) by dtype, the largest first."""
        out: dict[str, tuple[int, int]] = {}
        for r in self.rows:
            n, size = out.get(r.dtype, (0, 0))
            out[r.dtype] = n + 1, size + r.nbytes
        return dict(sorted(out.items(), key=lambda kv: -kv[1][1]))

    @cached_property
    def tree(self) -> NameGroup:
        """The tree of names."""
        root = NameGroup(())
        for r in self.rows:
            node = root
            node.arrays += 1
            node.nbytes += r.nbytes
            for depth, part in enumerate(r.path[:-1]):
                node = node.groups.get(part) or node.groups.setdefault(part, NameGroup(r.path[: depth + 1]))
                node.arrays += 1
                node.nbytes += r.nbytes
            node.rows.append(r)
        return root

    def group(self, keys: Sequence[str]) -> NameGroup:
        """The group below the root that is reached by ``keys`` (as `text.key` writes them)."""
        node = self.tree
        for k in keys:
            below = node.groups.get(k)
            if below is None and k.startswith("~"):
                below = next((g for name, g in node.groups.items() if key(name) == k), None)
            if below is None:
                raise CheckpointKeyError(f"no group {'.'.join(keys)!r}")
            node = below
        return node

    def name_of(self, k: str) -> str:
        """The name that ``k`` (see `text.key`) stands for."""
        return self._odd.get(k, k)

    @cached_property
    def _by_name(self) -> builtins.list[ArrayRow]:
        """All rows in the natural order of their names, cached: it is the slowest part of a search."""
        return self.ordered(self.rows, "name")

    def list(self, query: Query) -> RowPage:
        """The page of rows that ``query`` asks for; a page beyond the end is the last one."""
        if query.sort in ("size", "dtype", "rank"):
            found = self.ordered(self.select(query), query.sort, query.descending)
        else:
            found = self.select(query, self._by_name)
            found = found[::-1] if query.descending else found
        pages = max(1, -(-len(found) // PAGE))
        page = max(0, min(query.page, pages - 1))
        return RowPage(found[page * PAGE : (page + 1) * PAGE], len(found), sum(r.nbytes for r in found), page, pages)

    @staticmethod
    def ordered(rows: Iterable[ArrayRow], sort: str, descending: bool = False) -> builtins.list[ArrayRow]:
        """Rows by one of `SORTS`."""
        keys: dict[str, Callable[[ArrayRow], Any]] = {
            "size": lambda r: r.nbytes,
            "dtype": lambda r: (r.dtype, natural(r.name)),
            "rank": lambda r: (len(r.shape), r.shape),
        }
        found = sorted(rows, key=keys.get(sort, lambda r: natural(r.name)))
        return found[::-1] if descending else found

    def select(self, query: Query, rows: Iterable[ArrayRow] | None = None) -> builtins.list[ArrayRow]:
        """The rows that ``query`` selects, in the order of the checkpoint, or of ``rows``."""
        text = query.words.casefold().strip()
        pattern, words = ("*" in text or "?" in text), text.split()
        most = math.inf if query.most is None else query.most

        def fits(r: ArrayRow) -> bool:
            if (query.dtype and r.dtype != query.dtype) or not query.least <= r.nbytes <= most:
                return False
            name = r.name.casefold()
            return fnmatchcase(name, text) if pattern else all(w in name for w in words)

        return list(filter(fits, self.rows if rows is None else rows))

    def facts(self) -> dict[str, Any]:
        """Totals, as plain data."""
        return {
            "arrays": len(self.rows),
            "elements": self.elements,
            "nbytes": self.nbytes,
            "dtypes": {k: {"arrays": n, "nbytes": size} for k, (n, size) in self.dtypes.items()},
        }
