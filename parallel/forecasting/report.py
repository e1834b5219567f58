"""The result of a forecast: tables for terminals, a picture for notebooks, plain data for programs."""

from __future__ import annotations

import dataclasses
import functools
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ...arrays.core.errors import MeshError
from ...arrays.core.formatting import human_bytes
from ..mesh.block_grid import colour_of
from .figures import DeviceFigures, LinkFigures
from .replay import RankForecast

_MOST_ROWS = 8


@dataclass(frozen=True, repr=False)
class Forecast:
    """The forecast of a step on a mesh, made by :func:`meshtape.forecast`.

    Attributes
    ----------
    mesh
        Names and lengths of the axes.
    device, links
        The figures that times come from.
    looked_at
        Forecasts of some ranks at the corners of the mesh. :meth:`rank` gives any.
    checkpoint
        Bytes of parameters and optimizer state.
    save_seconds
        Time to save these: each block once, by all hosts together.
    remarks
        What a reader should know, such as inputs that are cut unevenly.
    """

    mesh: Mapping[str, int]
    device: DeviceFigures
    links: LinkFigures
    looked_at: tuple[RankForecast, ...]
    checkpoint: int
    save_seconds: float
    remarks: tuple[str, ...]
    _of: Callable[[int], RankForecast]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(self.mesh.values())

    def rank(self, rank: int) -> RankForecast:
        """The forecast of one rank. Raises :class:`MeshError` where there is no such rank."""
        if not 0 <= rank < self.ranks:
            raise MeshError(f"[forecast] the mesh has ranks 0 to {self.ranks - 1}, got {rank!r}")
        return self._of(rank)

    @functools.cached_property
    def fullest(self) -> RankForecast:
        """The rank with the highest peak, of those that were looked at."""
        return max(self.looked_at, key=lambda r: r.peak)

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank at its peak."""
        return self.fullest.peak

    @property
    def seconds(self) -> float:
        """Time of a step, that of the slowest rank."""
        return max(r.seconds for r in self.looked_at)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the memory of the device."""
        return self.device.memory is None or self.peak <= self.device.memory

    # ----- faces ------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Plain data: bytes, seconds, counts."""
        return {
            "mesh": dict(self.mesh),
            "device": dataclasses.asdict(self.device) | {"flops": dict(self.device.flops)},
            "links": dataclasses.asdict(self.links),
            "peak": self.peak,
            "fits": self.fits,
            "seconds": self.seconds,
            "checkpoint": self.checkpoint,
            "save_seconds": self.save_seconds,
            "remarks": list(self.remarks),
            "ranks": [dataclasses.asdict(r) | {"exposed": r.exposed} for r in self.looked_at],
        }

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.table import Table

        axes = " × ".join(f"{n}={s:,}" for n, s in self.mesh.items()) or "no axes"
        yield f"{self.ranks:,} ranks ({axes}), each on {self.device.name}"
        for title, rows in self._tables():
            table = Table(box=None, pad_edge=False, show_header=False)
            table.add_column(min_width=24)
            for _ in rows[0][1:]:
                table.add_column(justify="right")
            for row in rows:
                table.add_row(*row)
            yield f"\n{title}"
            yield table
        for remark in self.remarks:
            yield f"\n{remark}"

    def __repr__(self) -> str:
        from rich.console import Console

        out = Console(file=io.StringIO(), width=96, highlight=False, markup=False, color_system=None)
        out.print(self)
        return "\n".join(line.rstrip() for line in out.file.getvalue().rstrip().split("\n"))  # type: ignore[attr-defined]

    def _tables(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        r = self.fullest
        slow = max(self.looked_at, key=lambda x: x.seconds)
        room = "" if self.device.memory is None else f" of {human_bytes(self.device.memory)}"
        memory = [(kind, human_bytes(n)) for kind, n in r.kinds.items()]
        memory += [(f"  {op}", human_bytes(n)) for op, n in list(r.activations.items())[:_MOST_ROWS]]
        links = [
            (
                name,
                f"{link.messages:,} messages",
                f"{human_bytes(link.sent)} sent",
                f"{human_bytes(link.received)} received",
            )
            for name, link in (("within a host", slow.within), ("across hosts", slow.across))
        ]
        rounds = sorted(slow.collectives.items(), key=lambda x: -x[1][1])[:_MOST_ROWS]
        links += [(f"  {text}", f"{n:,} rounds", f"{human_bytes(b)} sent", "") for text, (n, b) in rounds]
        times = [
            ("a step", _seconds(slow.seconds)),
            ("  computing", _seconds(slow.compute)),
            ("  waiting for messages", _seconds(slow.exposed)),
            ("messages in all", _seconds(slow.communication)),
            (
                "operations",
                f"{slow.flops / 1e12:,.3g} TFLOP, {slow.flops / max(slow.seconds, 1e-12) / 1e12:,.3g} a second",
            ),
        ]
        saved = [("checkpoint", human_bytes(self.checkpoint)), ("saved in", _seconds(self.save_seconds))]
        return [
            (f"memory of rank {r.rank}: {human_bytes(r.peak)}{room}, at {r.at}", memory),
            (f"messages of rank {slow.rank}", links),
            (f"time of rank {slow.rank}", times),
            ("checkpoint of parameters and optimizer state", saved),
        ]

    def _repr_html_(self) -> str:
        slow = max(self.looked_at, key=lambda x: x.seconds)
        memory = _bar(
            list(self.fullest.kinds.items()), max(self.peak, self.device.memory or 0), human_bytes, self.device.memory
        )
        time = _bar([("computing", slow.compute), ("waiting for messages", slow.exposed)], slow.seconds, _seconds, None)
        return f"<figure style='margin:4px 0'>{memory}{time}<pre>{escape(repr(self))}</pre></figure>"


def _bar(
    parts: Sequence[tuple[str, float]],
    whole: float,
    text: Callable[[float], str],
    limit: float | None,
    width: int = 560,
) -> str:
    """Parts side by side, each with its name as a title and, where there is room, as a label; and a line at the
    limit."""
    out, x, scale = [], 0.0, width / max(whole, 1e-12)
    for i, (name, n) in enumerate(parts):
        w = n * scale
        title = f"{name}: {text(n)}"
        out.append(
            f'<rect x="{x:.1f}" y="0" width="{w:.1f}" height="26" fill="{colour_of(i)}" stroke="#555" '
            'stroke-width="0.5">'
            f"<title>{escape(title)}</title></rect>"
        )
        if w > 6 * len(title):
            out.append(
                f'<text x="{x + 4:.1f}" y="17" font-size="11" fill="#222" pointer-events="none">{escape(title)}</text>'
            )
        x += w
    if limit is not None:
        out.append(
            f'<line x1="{limit * scale:.1f}" x2="{limit * scale:.1f}" y1="-3" y2="29" stroke="#b00" stroke-width="2"/>'
        )
    return (
        f'<svg width="{width + 4}" height="34" viewBox="-2 -4 {width + 4} 34" role="img" aria-label="parts by length" '
        f'style="display:block;font-family:sans-serif">{"".join(out)}</svg>'
    )


def _seconds(s: float) -> str:
    """A time in words.

    >>> _seconds(0.0123)
    '12.3 ms'
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if s >= size:
            return f"{s / size:,.3g} {unit}" if s < 1000 * size else f"{s / size:,.0f} {unit}"
    return f"{s / 1e-6:.3g} µs"
