"""Patterns of keys: names with captures, as in ``layers.{i}.weight``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

_HOLE = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)(\*?)\}")


@dataclass(frozen=True)
class Pattern:
    """A name with captures: ``regex`` is None for a plain key, which is ``literal``."""

    text: str
    captures: tuple[str, ...]
    literal: str
    regex: re.Pattern[str] | None

    def matches(self, name: str) -> bool:
        """Whether a key of that name fits."""
        return name == self.literal if self.regex is None else self.regex.fullmatch(name) is not None

    def filled(self, names: Sequence[str]) -> Callable[..., str]:
        """A function that makes a name from the texts of captures, given in the order of ``names``."""
        return _HOLE.sub(lambda m: m[0] if m[1] is None else f"{{{names.index(m[1])}}}", self.text).format


@lru_cache(maxsize=4096)
def pattern_of(text: str) -> Pattern:
    """The pattern of a name in a rule."""
    regex, literal, captures, at = "", "", [], 0
    for m in _HOLE.finditer(text):
        regex += re.escape(text[at : m.start()])
        literal += text[at : m.start()]
        at = m.end()
        if m[1] is None:
            regex += re.escape(m[0][0])
            literal += m[0][0]
        elif m[1] in captures:
            regex += f"(?P={m[1]})"
        else:
            captures.append(m[1])
            regex += f"(?P<{m[1]}>{'.+' if m[2] else '[^.]+'})"
    regex += re.escape(text[at:])
    compiled = re.compile(regex, re.S) if captures else None
    return Pattern(text, tuple(captures), literal + text[at:], compiled)


def natural(values: Iterable[str]) -> tuple[tuple[int, int, str], ...]:
    """Numbers by value, before other texts.

    >>> sorted(["10", "2", "a"], key=lambda v: natural([v]))
    ['2', '10', 'a']
    """
    return tuple(map(_order, values))


@lru_cache(maxsize=1 << 16)
def _order(v: str) -> tuple[int, int, str]:
    n = number_of(v)
    return (1, 0, v) if n is None else (0, n, v)


def number_of(v: str) -> int | None:
    """The number that a text is, if it is one."""
    return int(v) if len(v) < 19 and v.isascii() and v.isdigit() else None
