"""Migrations of manifests of earlier versions: one pure function a step.

A step takes the JSON document of version n, as it was parsed and after its checksum was checked, and returns that of version n + 1. It may
change its argument, which is a copy. Steps are never edited once a version is released: what they promise is fixed by the golden
files. A version without a step is found when the package is imported, not when the first user comes with an old file.

>>> chain = Migrations(3)
>>> @chain.step(1)
... def rename(document):
...     document["arrays"] = document.pop("tensors")
...     return document
>>> @chain.step(2)
... def count(document):
...     return document | {"count": len(document["arrays"])}
>>> chain.check()
>>> chain.run({"version": 1, "tensors": ["a"]}, "meshtape.json")
{'version': 3, 'arrays': ['a'], 'count': 1}
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from ...arrays.core.errors import CorruptCheckpoint, UnsupportedVersion

Step = Callable[[dict[str, Any]], dict[str, Any]]


class Migrations:
    """The steps from version 1 to ``current``."""

    def __init__(self, current: int) -> None:
        self.current = current
        self._steps: dict[int, Step] = {}

    def step(self, version: int) -> Callable[[Step], Step]:
        """Register a function as the step from ``version`` to the next."""

        def register(fn: Step) -> Step:
            if not 1 <= version < self.current:
                raise ValueError(f"a step from version {version} leads nowhere: the present version is {self.current}")
            if version in self._steps:
                raise ValueError(f"version {version} has two steps, {self._steps[version].__name__} and {fn.__name__}")
            self._steps[version] = fn
            return fn

        return register

    def check(self) -> None:
        """Raise unless there is a step from every earlier version."""
        missing = [v for v in range(1, self.current) if v not in self._steps]
        if missing:
            raise ValueError(f"no migration from version {', '.join(map(str, missing))}")

    def run(self, document: dict[str, Any], source: str, *, keep: bool = True) -> dict[str, Any]:
        """The document in the present version; itself where it is that already.

        ``keep=False``: nobody needs the old one any more, so no copy of it is made, which of a large one takes long.

        Raises
        ------
        UnsupportedVersion
            It is of a later version; names both.
        CorruptCheckpoint
            It is not of the form that its version has.
        """
        version = document.get("version")
        if type(version) is not int or version < 1:
            raise CorruptCheckpoint(f"{source}: version {version!r} is not a version")
        if version > self.current:
            raise UnsupportedVersion(
                f"{source}: format version {version}; this meshtape reads up to version {self.current}. "
                "Install a later meshtape"
            )
        if version == self.current:
            return document
        document = copy.deepcopy(document) if keep else document
        for v in range(version, self.current):
            try:
                document = self._steps[v](document)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
                raise CorruptCheckpoint(f"{source}: not a manifest of version {v}: {type(e).__name__}: {e}") from None
            document["version"] = v + 1
        return document
