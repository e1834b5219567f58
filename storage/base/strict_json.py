"""JSON as the standard has it."""

from __future__ import annotations

import json
import math
from typing import Any

compact = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode  # without spaces


def loads(data: str | bytes, *, unique: bool = False) -> Any:
    """The value of a JSON text. Raises `ValueError` for NaN and infinities too, which Python's own reader takes for
    numbers.

    ``unique``: also for an object that gives a name twice, of which Python's reader takes the last. Large texts take
    longer so.

    >>> loads('{"shape": [2, 3]}')
    {'shape': [2, 3]}
    """
    pairs = _unique if unique else None
    return json.loads(data, parse_constant=_refused, parse_float=_finite, object_pairs_hook=pairs)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it gives {next(n for n in names if names.count(n) > 1)!r:.80} twice")
    return out


def _refused(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is beyond all numbers")
    return value
