"""Help texts that fit the terminal, wrapped between words; where it is narrow, an option's text is below its name."""

from __future__ import annotations

from collections.abc import Iterable

import click

from .tables import cells, wrapped

_BESIDE = 24  # cells that a text is given beside its term; with fewer it stands below
_BELOW = 4


class _Help(click.HelpFormatter):
    """Click's formatter, but no word is cut, and only preformatted text, such as commands, exceeds the width."""

    def write_text(self, text: str) -> None:
        room = self.width - self.current_indent
        parts = [
            part.removeprefix("\b\n") if part.startswith("\b") else wrapped(" ".join(part.split()), room)
            for part in text.split("\n\n")
        ]
        self._indented("\n\n".join(parts), self.current_indent)

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        rows = list(rows)
        first = min(max((cells(term) for term, _ in rows), default=0), col_max) + col_spacing
        room = self.width - self.current_indent - first
        for term, text in rows:
            if room < _BESIDE or cells(term) > first - col_spacing or not text:
                self._indented(term, self.current_indent)
                at = self.current_indent + (first if room >= _BESIDE else _BELOW)
                if text:
                    self._indented(wrapped(text, self.width - at), at)
                continue
            head, *more = wrapped(text, room).split("\n")
            self._indented(f"{term}{'':{first - cells(term)}}{head}", self.current_indent)
            if more:
                self._indented("\n".join(more), self.current_indent + first)

    def _indented(self, text: str, indent: int) -> None:
        for line in text.split("\n"):
            self.write(f"{'':{indent}}{line}".rstrip() + "\n")


class FittingContext(click.Context):
    """A context whose help fits the terminal."""

    formatter_class = _Help
