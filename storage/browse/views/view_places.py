"""Views of places: the given roots, directories, and a run with its steps and metrics."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ...checkpoint.numbered import Direction
from ..model.inventory import Query
from ..model.runs import READ, RunSteps, history
from ..model.site import Site
from ..model.text import number, plain, visible
from . import charts
from .frame import Shown, above, crumbs, href, render
from .view_checkpoint import checkpoint

_ROWS = 500


def home(site: Site) -> Shown:
    """The roots; a single one is shown at once."""
    places = [(p, site.kind(p)) for p in site.places()]
    data = {"roots": [{"at": p.at, "path": p.path} for p, _ in places]}
    return Shown("Checkpoints", render("home.html", places=places), data, [("checkpoints", None)])


def directory(site: Site, at: str) -> Shown:
    """The entries of a directory that is no checkpoint."""
    place = site.place(at)
    entries = site.entries(place)
    data = {"path": place.path, "entries": [asdict(e) for e in entries]}
    body = render("directory.html", place=place, entries=entries)
    return Shown(place.label, body, data, crumbs(site, place), up=above(at))


def run(site: Site, at: str, metric: str = "", best_is: Direction = "") -> Shown:
    """The checkpoints of a run, newest first, with their metrics."""
    place = site.place(at)
    r = history(place.path, metric, best_is, READ)
    before = dict(zip((s.name for s in r.complete[1:]), r.complete, strict=False))
    hrefs = [href("checkpoint", at=f"{at}/{s.name}") for s in r.complete if s.metric(r.metric) is not None]
    body = render(
        "run.html",
        at=at,
        place=place,
        r=r,
        others=[d for d in ("lowest", "highest") if d != r.best_is],
        curve=metric_curve(r, 820, hrefs) if r.metric else "",
        steps=r.steps[: -_ROWS - 1 : -1],
        before=before,
        metrics=r.metrics[:6],
        most=_ROWS,
    )
    fields = ("step", "name", "arrays", "nbytes", "note")
    data: dict[str, Any] = {"path": place.path, "metric": r.metric}
    data |= {k: s.step if s else None for k, s in (("best", r.best), ("latest", r.latest))}
    data |= {"steps": [{k: getattr(s, k) for k in fields} | {"metrics": dict(s.metrics)} for s in r.steps]}
    data |= {"older": r.unread, "remains": r.remains}
    return Shown(place.label, body, data, crumbs(site, place), up=above(at))


def metric_curve(r: RunSteps, width: int, hrefs: list[str] | None = None) -> charts.Chart:
    """The metric of a run by step, its best value marked."""
    best = r.best
    marks = [(best.step, best.metric(r.metric) or 0.0, f"best: {r.best_is}")] if best else []
    points = r.curve(r.metric)
    ends = f", from {number(points[0][1])} to {number(points[-1][1])}" if points else ""
    return charts.curve(points, marks, width, 230, f"{visible(r.metric, 60)} by step{ends}", hrefs or ())


def summary(site: Site, at: str) -> Any:
    """The data of a place's first page, as plain data."""
    kind = site.kind(site.place(at))
    views = {"run": run, "directory": directory, "checkpoint": lambda *of: checkpoint(*of, Query(), [])}
    return plain({"kind": kind} | views[kind](site, at).data)
