"""Migrations of documents of earlier versions: pure functions in a list, the step from version n at place n - 1.

A step takes the JSON document as it was parsed, after its checksum was checked, and may change it. Steps are never
edited once a version is released: the golden files fix them.

>>> def rename(document):
...     document["arrays"] = document.pop("tensors")
...     return document
>>> steps = [rename, lambda document: document | {"count": len(document["arrays"])}]
>>> upgraded({"version": 1, "tensors": ["a"]}, steps, "meshtape.json", CorruptCheckpoint)
{'version': 3, 'arrays': ['a'], 'count': 1}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...arrays.core.errors import CorruptCheckpoint as CorruptCheckpoint
from ...arrays.core.errors import MeshtapeError, UnsupportedVersion

Step = Callable[[dict[str, Any]], dict[str, Any]]


def upgraded(
    document: dict[str, Any], steps: Sequence[Step], source: str, error: type[MeshtapeError]
) -> dict[str, Any]:
    """The document in the present version, which is one more than there are steps.

    Raises `UnsupportedVersion` for a later one, naming both, and ``error`` for one that has not the form of its
    version.
    """
    version = document.get("version")
    if type(version) is not int or version < 1:
        raise error(f"{source}: version {version!r} is not a version")
    if version > len(steps) + 1:
        raise UnsupportedVersion(
            f"{source}: format version {version}; this meshtape reads up to version {len(steps) + 1}. Install a later "
            "meshtape"
        )
    for v, step in enumerate(steps[version - 1 :], version):
        try:
            document = step(document) | {"version": v + 1}
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
            raise error(f"{source}: it does not have the form of version {v}: {type(e).__name__}: {e}") from None
    return document
