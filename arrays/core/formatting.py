"""Numbers as people read them, and the hook of notebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

DRAWINGS: dict[str, Callable[..., Any]] = {}
"""The pictures in notebooks of objects of lower rooms, by kind; filled by the rooms that draw."""


def human_bytes(n: float) -> str:
    """A number of bytes for people, in powers of 1024.

    >>> human_bytes(3 * 1024 * 1024)
    '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def duration(seconds: float) -> str:
    """A length of time as people say it.

    >>> duration(0.25), duration(42.3), duration(95), duration(7300)
    ('0.2 s', '42 s', '1 min 35 s', '2 h 1 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def count(n: int, thing: str) -> str:
    """
    >>> count(1, "array"), count(1200, "array"), count(2, "entry")
    ('1 array', '1,200 arrays', '2 entries')
    """
    many = thing if n == 1 else thing[:-1] + "ies" if thing.endswith("y") and thing[-2] not in "aeiou" else thing + "s"
    return f"{n:,} {many}"


def some(things: Iterable[Any], most: int = 8) -> str:
    """
    >>> some("abc"), some("abc", 2)
    ('a, b, c', 'a, b and 1 more')
    """
    held = list(map(str, things))
    return ", ".join(held[:most]) + (f" and {len(held) - most} more" if len(held) > most else "")


def ranges(numbers: Iterable[int]) -> str:
    """``0-3,7`` for 0, 1, 2, 3, 7."""
    out: list[list[int]] = []
    for n in sorted(set(numbers)):
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in out]
    return ",".join(parts) if len(parts) <= 6 else ",".join([*parts[:5], f"…,{parts[-1]}"])
