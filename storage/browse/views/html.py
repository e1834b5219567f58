"""HTML and SVG as values: all text is escaped unless it is markup, so that nothing from a file can become markup.

>>> tag("p", "a < b", tag("b", "<i>"), class_="x")
'<p class="x">a &lt; b<b>&lt;i&gt;</b></p>'
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from ..model.text import visible

_VOID = frozenset(
    ["br", "img", "input", "link", "meta", "hr", "rect", "path", "line", "polyline", "circle", "stop", "use"]
)


class Markup(str):
    """Text that is markup already. Only `tag`, `join` and the constants of this package make it."""

    __slots__ = ()


def text(value: Any) -> Markup:
    """Anything as markup: escaped, with control characters spelt out, unless it is markup."""
    return value if isinstance(value, Markup) else Markup(escape(visible(str(value), 10**6)))


def join(children: Iterable[Any], between: str = "") -> Markup:
    """All children one after the other; None and False are left out, nested lists are flattened."""
    return Markup(between.join(_each(children)))


def _each(children: Iterable[Any]) -> Iterable[str]:
    for c in children:
        if c is None or c is False:
            continue
        if isinstance(c, (list, tuple)):
            yield from _each(c)
        else:
            yield text(c)


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element. ``class_`` and ``for_`` lose their underscore, others turn it into a hyphen; True writes the name alone, None and False nothing."""
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        if isinstance(value, float):
            value = f"{value:.2f}".rstrip("0").rstrip(".")
        parts.append(key if value is True else f'{key}="{escape(visible(str(value), 10**6))}"')
    head = " ".join(parts)
    if name in _VOID and not children:
        return Markup(f"<{head}>" if name in ("br", "img", "input", "link", "meta", "hr") else f"<{head}/>")
    return Markup(f"<{head}>{join(children)}</{name}>")
