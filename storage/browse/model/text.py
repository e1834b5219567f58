"""Texts for people: names from files made harmless, numbers made short, and keys that may stand in an address.

>>> visible("a\\x1b[31m<b>"), natural("layers.10.w") > natural("layers.2.w")
('a\\\\x1b[31m<b>', True)
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ....arrays.core.formatting import count as count
from ....arrays.core.formatting import human_bytes as human_bytes

FORMATS = {"meshtape": "Zarr v3 + manifest"}  # what a kind of checkpoint is called, where that says more than its name
_LONGEST_KEY = 200
_DIGITS = re.compile(r"(\d+)")


def visible(text: str, longest: int = 400) -> str:
    """``text`` with every character that could act on a terminal or turn the direction of writing spelt out.

    Control characters, lone surrogates, invisible characters and direction overrides become ``\\xNN`` or ``\\uNNNN``.
    A text longer than ``longest`` loses its middle. Templates escape HTML.

    >>> visible("w\\u202egnp.exe"), visible("abcdefghij", 7)
    ('w\\\\u202egnp.exe', 'abc…hij')
    """
    out = "".join(c if c.isprintable() else _spelt(ord(c)) for c in text)
    half = (longest - 1) // 2
    return out if len(out) <= longest else f"{out[:half]}…{out[-half:]}"


_whole = partial(visible, longest=10**6)


def _spelt(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


def natural(text: str) -> tuple[Any, ...]:
    """A sorting key in which ``layers.2`` comes before ``layers.10``."""
    return tuple((0, int(p), "") if p.isdecimal() and len(p) < 300 else (1, 0, p) for p in _DIGITS.split(text) if p)


def key(name: str) -> str:
    """The key of a name in an address: the name where it is plain and short, else ``~`` and its digest.

    So no address holds control characters, lone surrogates, or a name of a megabyte.

    >>> key("encoder.0.w"), len(key("a\\n"))
    ('encoder.0.w', 25)
    """
    if name.isprintable() and 0 < len(name) <= _LONGEST_KEY and name == name.strip() and name[0] != "~":
        return name
    return "~" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def number(x: float | int | None) -> str:
    """A number in at most nine characters or so.

    >>> number(0.1), number(1234567), number(float("nan")), number(1e-12), number(None)
    ('0.1', '1,234,567', 'NaN', '1e-12', '–')
    """
    if x is None:
        return "–"
    if isinstance(x, (bool, int)):
        return f"{x:,}" if abs(x) < 10**15 else f"{float(x):.4g}" if abs(x) < 10**300 else "huge"
    if math.isnan(x):
        return "NaN"
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    return f"{x:.4g}"


def percent(x: float) -> str:
    """
    >>> percent(0.1234), percent(0.00001), percent(0)
    ('12.3 %', '<0.1 %', '0 %')
    """
    return "0 %" if x == 0 else "<0.1 %" if x < 0.001 else f"{100 * x:.1f} %"


def plain(value: Any, text: Callable[[str], str] = _whole) -> Any:
    """``value`` as JSON proper: NaN and infinities as texts, tuples as lists, NumPy scalars as numbers; and texts as
    ``text`` makes them.

    >>> plain({"a": (1, float("nan"))})
    {'a': [1, 'NaN']}
    """
    if isinstance(value, Mapping):
        return {text(str(k)): plain(v, text) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v, text) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return number(value).replace("−", "-").replace("∞", "Infinity")
    if isinstance(value, str):
        return text(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    item = getattr(value, "item", None)
    return plain(item(), text) if item is not None else str(value)
