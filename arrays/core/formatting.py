"""Numbers as people read them."""

from __future__ import annotations


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
