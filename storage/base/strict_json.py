"""JSON as the standard has it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

compact = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode  # without spaces


def loads(data: str | bytes, *, unique: bool = False, integer: Callable[[str], Any] | None = None) -> Any:
    """The value of a JSON text. Raises `ValueError` for NaN and infinities too, which Python's own reader takes for
    numbers.

    ``unique``: also for an object that gives a name twice, of which Python's reader takes the last. Large texts take
    longer so. ``integer`` makes the value of an integer.

    >>> loads('{"shape": [2, 3]}')
    {'shape': [2, 3]}
    """
    pairs = _unique if unique else None
    own: Any = {"parse_constant": _refused, "parse_float": _finite, "parse_int": integer, "object_pairs_hook": pairs}
    return json.loads(data, **own)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"it gives {twice!r:.80} twice")
    return out


def _refused(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is beyond all numbers")
    return value
