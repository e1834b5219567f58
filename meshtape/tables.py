"""Tables on a terminal and in a pipe.

On a terminal a table fits its width: names lose their middle, but never what tells them apart, and columns that matter least are left
out. In a pipe, or a file, every line is whole: one row a line, no frame, no colours, so that ``grep`` and ``awk`` see everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_LEAST = 16  # characters that a column of names is given before others give way
_GAP = 2


@dataclass(frozen=True)
class Column:
    """A column. ``number`` sets it to the right; ``name`` may be shortened in the middle; of the columns with a ``rank``, the one with
    the highest is left out first where a terminal is narrow."""

    title: str
    number: bool = False
    name: bool = False
    rank: int = 0


def shorten(names: Sequence[str], width: int) -> list[str]:
    """``names`` in at most ``width`` characters where that keeps them apart: the middle goes, or else what they have in common.

    A name that no cut tells from another stays whole.

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
    # What still reads like another name is shown whole: a long line is better than a wrong one.
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
    return name if len(name) <= width else f"{name[:head]}…{name[len(name) - (width - head - 1) :]}"


def _common(names: list[str]) -> int:
    """How many characters all of them begin with."""
    low, high = min(names), max(names)
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))


def _from(name: str, start: int, width: int) -> str:
    """The first letters of a name, and what follows from ``start`` on."""
    head = min(width // 4, start)
    room = width - head - 1
    if len(name) - start <= room:
        return f"{name[:head]}…{name[len(name) - room :]}"
    return f"{name[:head]}…{name[start : start + room - 1]}…"


def write(
    columns: Sequence[Column],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    footer: Sequence[str] = (),
    console: Any = None,
) -> None:
    """Print a table on ``console`` (rich's; the standard output by default). ``footer`` is a last row, ruled off on a terminal.

    >>> write([Column("name", name=True), Column("bytes", number=True)], [("w", "96 B"), ("norm.bias", "8 B")], title="two")
    two
    name       bytes
    w           96 B
    norm.bias    8 B
    """
    if console is None:
        from rich.console import Console

        console = Console()
    cells = [list(r) for r in rows]
    if console.is_terminal:
        _framed(console, columns, cells, title, list(footer))
        return
    lines = [[c.title for c in columns], *cells, *([list(footer)] if footer else [])]
    if not any(c.title for c in columns):
        lines = lines[1:]
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(len(columns))]
    print_ = console.file.write
    if title:
        print_(title + "\n")
    for line in lines:
        parts = [t.rjust(w) if c.number else t.ljust(w) for t, w, c in zip(line, widths, columns, strict=True)]
        print_((" " * _GAP).join(parts).rstrip() + "\n")
    console.file.flush()


def write_lines(lines: Sequence[str], console: Any = None) -> None:
    """Print lines that are no table: on a terminal each is one line of it, cut with an ellipsis where it is narrow; in a pipe they are whole.

    >>> write_lines(["a", "  b"])
    a
      b
    """
    if console is None:
        from rich.console import Console

        console = Console()
    if not console.is_terminal:
        console.file.write("".join(f"{line}\n" for line in lines))
        console.file.flush()
        return
    from rich.text import Text

    for line in lines:
        console.print(Text(line), no_wrap=True, overflow="ellipsis", highlight=False)


def _framed(console: Any, columns: Sequence[Column], cells: list[list[str]], title: str, footer: list[str]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    lines = [*cells, *([footer] if footer else [])]
    natural = [max([len(c.title), *(len(line[i]) for line in lines)]) for i, c in enumerate(columns)]
    shown = list(range(len(columns)))
    names = [i for i in shown if columns[i].name]

    def room() -> int:
        """Characters that are left for names: a cell has two of padding and one of the frame beside it, and the frame begins with one."""
        taken = sum(natural[i] for i in shown if i not in names) + 3 * len(shown) + 1
        return (console.width - taken) // max(1, len(names))

    while room() < min(_LEAST, max((natural[i] for i in names), default=0)):
        optional = [i for i in shown if columns[i].rank]
        if not optional:
            break
        shown.remove(max(optional, key=lambda i: columns[i].rank))
    for i in names:
        if natural[i] > room():
            for row, text in zip(cells, shorten([row[i] for row in cells], room()), strict=True):
                row[i] = text
    if title:
        console.print(Text(title), soft_wrap=False, highlight=False)
    table = Table(box=SIMPLE_HEAD, show_header=any(c.title for c in columns), pad_edge=False, padding=(0, 2, 0, 0))
    for i in shown:
        c = columns[i]
        table.add_column(c.title, justify="right" if c.number else "left", overflow="fold", no_wrap=False)
    for line in cells:
        table.add_row(*(Text(line[i]) for i in shown))
    if footer:
        table.add_section()
        table.add_row(*(Text(footer[i]) for i in shown))
    console.print(table)
    hidden = [columns[i].title for i in range(len(columns)) if i not in shown]
    if hidden:
        console.print(Text(f"not shown, as the terminal is narrow: {', '.join(hidden)}", style="dim"))
