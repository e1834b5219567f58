"""Views of places: the given roots, directories, and a run with its steps and metrics."""

from __future__ import annotations

import time
from typing import Any, Literal

from ..model.inventory import Query
from ..model.runs import Run, Step, history
from ..model.site import Site
from ..model.text import human_bytes, number, plain, visible
from . import charts
from .frame import Shown, crumbs, facts, href, notice, section, table
from .html import join, tag
from .view_checkpoint import checkpoint

_ROWS = 500
_KIND = {"checkpoint": "checkpoint", "run": "run", "directory": "directory"}


def home(site: Site) -> Shown:
    """The roots."""
    rows = [
        (
            tag("a", visible(p.label, 120), href=href("open", at=p.at)),
            _KIND[site.kind(p)],
            tag("span", visible(p.path, 300), class_="mt-quiet"),
        )
        for p in site.places()
    ]
    body = join(
        [
            tag("div", tag("h1", "Checkpoints"), class_="mt-head"),
            table(("Name", "What", "Where"), rows)
            if rows
            else notice("note", "Nothing was given to browse.", tag("p", "Start with: meshtape browse PATH")),
        ]
    )
    data = {"roots": [{"at": p.at, "path": p.path} for p in site.places()]}
    return Shown("Checkpoints", body, data, [("checkpoints", None)])


def directory(site: Site, at: str) -> Shown:
    """The entries of a directory that is no checkpoint."""
    place = site.place(at)
    entries = site.entries(place)
    rows = [(tag("a", visible(e.name, 160), href=href("open", at=e.at)), _KIND[e.kind]) for e in entries]
    body = join(
        [
            tag(
                "div",
                tag("h1", visible(place.label, 120)),
                tag("p", visible(place.path, 300), class_="mt-path"),
                class_="mt-head",
            ),
            table(("Name", "What"), rows) if rows else notice("note", "No checkpoint lies here."),
        ]
    )
    up = href("open", at=at.rpartition("/")[0]) if "/" in at else None
    data = {"path": place.path, "entries": [{"name": e.name, "kind": e.kind, "at": e.at} for e in entries]}
    return Shown(place.label, body, data, crumbs(site, place), up=up)


def run(site: Site, at: str, metric: str = "", best_is: Literal["lowest", "highest"] = "lowest") -> Shown:
    """The checkpoints of a run, newest first, with their metrics."""
    place = site.place(at)
    r = history(place.path, metric, best_is)
    best, latest = r.best, r.latest
    numbers = [
        ("Complete", f"{len(r.complete):,}"),
        ("Incomplete", f"{len(r.steps) - len(r.complete):,}" if len(r.steps) != len(r.complete) else None),
        ("Latest", f"step {latest.step:,}" if latest else None),
        ("Best", f"step {best.step:,}" if best else None),
        ("Size", human_bytes(sum(s.nbytes for s in r.complete))),
    ]
    body = join(
        [
            tag(
                "div",
                tag("h1", visible(place.label, 120)),
                tag("p", visible(place.path, 300), class_="mt-path"),
                facts(numbers),
                class_="mt-head",
            ),
            _metrics(at, r),
            section(
                "Checkpoints",
                _steps(at, r),
                note="newest first" if len(r.steps) <= _ROWS else f"the newest {_ROWS} of {len(r.steps):,}",
            ),
            notice(
                "note",
                "Remains of interrupted saves",
                tag("p", visible(", ".join(r.remains[:8]), 400)),
                tag("p", "The next save collects those whose owner is gone."),
            )
            if r.remains
            else None,
        ]
    )
    data: dict[str, Any] = {
        "path": place.path,
        "metric": r.metric,
        "best": best.step if best else None,
        "latest": latest.step if latest else None,
        "steps": [
            {
                "step": s.step,
                "name": s.name,
                "arrays": s.arrays,
                "nbytes": s.nbytes,
                "metrics": dict(s.metrics),
                "note": s.note,
            }
            for s in r.steps
        ],
        "remains": r.remains,
    }
    up = href("open", at=at.rpartition("/")[0]) if "/" in at else None
    return Shown(place.label, body, data, crumbs(site, place), up=up)


def _metrics(at: str, r: Run) -> Any:
    if not r.metric:
        return None
    having = [s for s in r.complete if s.metric(r.metric) is not None]
    points = r.curve(r.metric)
    best = r.best
    marks = [(best.step, best.metric(r.metric) or 0.0, f"best: {r.best_is}")] if best else []
    hrefs = [href("checkpoint", at=f"{at}/{s.name}") for s in having]
    choose = [
        tag(
            "a",
            visible(m, 60),
            href=href("run", at=at, metric=m, best=r.best_is),
            aria_current="true" if m == r.metric else None,
        )
        for m in r.metrics[:20]
    ]
    other = "highest" if r.best_is == "lowest" else "lowest"
    return section(
        visible(r.metric, 60),
        tag(
            "p",
            choose,
            tag("span", f"best is the {r.best_is}"),
            tag("a", f"take the {other}", href=href("run", at=at, metric=r.metric, best=other)),
            class_="mt-zoom",
        ),
        charts.curve(
            [(float(a), b) for a, b in points],
            [(float(a), b, n) for a, b, n in marks],
            width=820,
            height=230,
            label=f"{visible(r.metric, 60)} by step",
            hrefs=hrefs,
        ),
    )


def _steps(at: str, r: Run) -> Any:
    if not r.steps:
        return notice("note", "No checkpoint lies here yet.")
    best, latest = r.best, r.latest
    before: dict[str, Step] = dict(zip((s.name for s in r.complete[1:]), r.complete, strict=False))
    rows = []
    for s in reversed(r.steps[-_ROWS:]):
        here = f"{at}/{s.name}"
        marks = [tag("span", w, class_="mt-badge") for w, m in (("latest", latest), ("best", best)) if m is s]
        name = tag("a", f"{s.step:,}", href=href("checkpoint", at=here))
        if s.note:
            rows.append(
                (
                    join([f"{s.step:,}"]),
                    tag("span", visible(s.note, 200), class_="mt-wrong"),
                    "",
                    "",
                    *["" for _ in r.metrics[:6]],
                    "",
                )
            )
            continue
        prior = before.get(s.name)
        link = tag("a", f"with {prior.step:,}", href=href("compare", a=f"{at}/{prior.name}", b=here)) if prior else ""
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(s.saved)) if s.saved else "–"
        metrics = [number(s.metric(m)) if s.metric(m) is not None else "–" for m in r.metrics[:6]]
        rows.append((join([name, " ", marks]), f"{s.arrays:,}", human_bytes(s.nbytes), when, *metrics, link))
    metrics = [visible(m, 24) for m in r.metrics[:6]]
    return table(
        ("Step", "Arrays", "Size", "Saved", *metrics, "Compare"), rows, numeric=(1, 2, *range(4, 4 + len(metrics)))
    )


def summary(site: Site, at: str) -> Any:
    """The data of a place's first page, as plain data."""
    place = site.place(at)
    kind = site.kind(place)
    shown = (
        run(site, at)
        if kind == "run"
        else directory(site, at)
        if kind == "directory"
        else checkpoint(site, at, Query(), [])
    )
    return plain({"kind": kind} | shown.data)
