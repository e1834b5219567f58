"""Tables and sentences on a terminal and in a pipe.

On a terminal a table fits its width: names lose their middle, but never what tells them apart, and columns that matter
least are left out; a sentence is broken between words. In a pipe, or a file, every line is whole: one row a line, no
frame, no colours, so that ``grep`` and ``awk`` see everything.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TextIO

_LEAST = 16  # cells that a column of names is given before others give way
_GAP = 2


@dataclass(frozen=True)
class Column:
    """A column. ``number`` sets it to the right; ``name`` may be shortened in the middle; of the columns with a
    ``rank``, the one with the highest is left out first where a terminal is narrow."""

    title: str
    number: bool = False
    name: bool = False
    rank: int = 0


def terminal_width(stream: TextIO) -> int | None:
    """The width of a stream's terminal in characters; None for a pipe or a file. ``COLUMNS`` overrides it."""
    try:
        if not stream.isatty():
            return None
        asked = os.environ.get("COLUMNS", "")
        width = int(asked) if asked.isdecimal() else os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # closed, or a terminal that does not know
        return 80
    return width or 80


def console(stderr: bool = False) -> Any:
    """Rich's console for a stream of this process. Only a terminal counts as one, even with ``FORCE_COLOR``."""
    from rich.console import Console

    width = terminal_width(sys.stderr if stderr else sys.stdout)
    if width is not None and os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
        # Rich gives these 80 columns unless it is told both sizes; elsewhere it follows the window.
        return Console(stderr=stderr, force_terminal=True, width=width, height=25)
    return Console(stderr=stderr, force_terminal=width is not None)


def wrapped(text: str, width: int, first: int = 0) -> str:
    """``text`` wrapped between words at ``width`` cells, with the indentation of each line kept.

    A longer word, such as a path, has a line of its own and stays whole, so that it can be copied. The first line has
    ``first`` cells less.

    >>> print(wrapped("2 ranks, the largest: 1.2 GiB\\n  a remark that is long", 16))
    2 ranks, the
    largest: 1.2 GiB
      a remark that
      is long
    """
    out = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip(" "))]
        row, used = indent, first + len(indent)
        fresh = not first  # whether nothing stands in the row
        for word in line.split():
            n = cells(word)
            if not fresh and used + 1 + n > width:
                out.append(row)
                row, used, fresh = indent, len(indent), True
            gap = "" if row == indent else " "
            row, used, fresh = row + gap + word, used + len(gap) + n, False
        out.append(row)
        first = 0
    return "\n".join(out)


def shorten(names: Sequence[str], width: int) -> list[str]:
    """``names`` in at most ``width`` cells of a terminal: without their middle, or else without their common beginning.

    Names that would look alike stay whole.

    >>> shorten(["encoder.layer.11.attention.output.weight", "bias"], 20)
    ['encoder.la…ut.weight', 'bias']
    >>> shorten([f"model.layers.{i}.attention.weight" for i in (0, 1)], 20)
    ['model…0.attention.w…', 'model…1.attention.w…']
    """
    width = max(width, 5)
    out = {n: _middle(n, width) for n in names}
    for group in _clashes(out):
        start = _common(group)
        out.update({n: _from(n, start, width) for n in group})
    # Names that still look alike are shown whole: a long line is better than a wrong one.
    while clashes := _clashes(out):
        for group in clashes:
            out.update({n: n for n in group})
    return [out[n] for n in names]


def _clashes(short: dict[str, str]) -> list[list[str]]:
    """Names that are written alike."""
    groups: dict[str, list[str]] = {}
    for name, text in short.items():
        groups.setdefault(text, []).append(name)
    return [g for g in groups.values() if len(g) > 1]


def _middle(name: str, width: int) -> str:
    head = width // 2
    return name if cells(name) <= width else f"{_first(name, head)}…{_last(name, width - head - 1)}"


def _common(names: list[str]) -> int:
    """The length of the common prefix."""
    low, high = min(names), max(names)
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))


def _from(name: str, start: int, width: int) -> str:
    """The first letters of a name, and its part from ``start`` on."""
    head = _first(name[:start], width // 4)
    room = width - cells(head) - 1
    if cells(name[start:]) <= room:
        return f"{head}…{_last(name, room)}"
    return f"{head}…{_first(name[start:], room - 1)}…"


def cells(text: str) -> int:
    """The number of terminal cells of a text: letters of some scripts take two."""
    from rich.cells import cell_len

    return cell_len(text)


def _first(text: str, width: int) -> str:
    """As much of the beginning as fits."""
    if text.isascii():
        return text[: max(width, 0)]
    sums = list(accumulate(map(cells, text)))
    return text[: bisect_right(sums, width)]


def _last(text: str, width: int) -> str:
    """As much of the end as fits."""
    return _first(text[::-1], width)[::-1]


def write(
    columns: Sequence[Column],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    footer: Sequence[str] = (),
    on: Any = None,
) -> None:
    """Print a table on ``on`` (a console of rich's; the standard output by default). ``footer`` is a last row, ruled
    off on a terminal.

    >>> columns = [Column("name", name=True), Column("bytes", number=True)]
    >>> write(columns, [("w", "96 B"), ("norm.bias", "8 B")], title="two")
    two
    name       bytes
    w           96 B
    norm.bias    8 B
    """
    on = console() if on is None else on
    body = [list(r) for r in rows]
    if on.is_terminal:
        _framed(on, columns, body, title, list(footer))
        return
    lines = [[c.title for c in columns], *body, *([list(footer)] if footer else [])]
    if not any(c.title for c in columns):
        lines = lines[1:]
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(len(columns))]
    print_ = on.file.write
    if title:
        print_(title + "\n")
    for line in lines:
        parts = [t.rjust(w) if c.number else t.ljust(w) for t, w, c in zip(line, widths, columns, strict=True)]
        print_((" " * _GAP).join(parts).rstrip() + "\n")
    on.file.flush()


def write_text(text: str, on: Any = None) -> None:
    """Print sentences: on a terminal they are broken between words, in a pipe each line is whole.

    >>> write_text("a: 2 arrays, 3 KiB in 1 file are sound")
    a: 2 arrays, 3 KiB in 1 file are sound
    """
    on = console() if on is None else on
    on.file.write((wrapped(text, on.width) if on.is_terminal else text) + "\n")
    on.file.flush()


def write_lines(lines: Sequence[str]) -> None:
    """Print lines that are no table: on a terminal each is one line of it, cut with an ellipsis where it is narrow; in
    a pipe they are whole.

    >>> write_lines(["a", "  b"])
    a
      b
    """
    on = console()
    if not on.is_terminal:
        on.file.write("".join(f"{line}\n" for line in lines))
        on.file.flush()
        return
    from rich.text import Text

    for line in lines:
        on.print(Text(line), no_wrap=True, overflow="ellipsis", highlight=False)


def _framed(on: Any, columns: Sequence[Column], body: list[list[str]], title: str, footer: list[str]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    lines = [*body, *([footer] if footer else [])]
    natural = [max([cells(c.title), *(cells(line[i]) for line in lines)]) for i, c in enumerate(columns)]
    shown = list(range(len(columns)))
    names = [i for i in shown if columns[i].name]

    def room() -> int:
        """Cells left for names: a cell has three of padding and frame beside it, and the frame begins with one."""
        taken = sum(natural[i] for i in shown if i not in names) + 3 * len(shown) + 1
        return (on.width - taken) // max(1, len(names))

    while room() < min(_LEAST, max((natural[i] for i in names), default=0)):
        optional = [i for i in shown if columns[i].rank]
        if not optional:
            break
        shown.remove(max(optional, key=lambda i: columns[i].rank))
    for i in names:
        if natural[i] > room():
            for row, text in zip(body, shorten([row[i] for row in body], room()), strict=True):
                row[i] = text
    if title:
        write_text(title, on)
    table = Table(box=SIMPLE_HEAD, show_header=any(c.title for c in columns), pad_edge=False, padding=(0, 2, 0, 0))
    for i in shown:
        c = columns[i]
        table.add_column(c.title, justify="right" if c.number else "left", overflow="fold", no_wrap=False)
    for line in body:
        table.add_row(*(Text(line[i]) for i in shown))
    if footer:
        table.add_section()
        table.add_row(*(Text(footer[i]) for i in shown))
    on.print(table)
    hidden = [columns[i].title for i in range(len(columns)) if i not in shown]
    if hidden:
        on.print(Text(wrapped(f"not shown, as the terminal is narrow: {', '.join(hidden)}", on.width), style="dim"))
