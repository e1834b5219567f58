"""The view of a checkpoint's health, and the progress of background work."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..model.health import KINDS, MOST, Health, scan
from ..model.jobs import BrowseJob
from ..model.site import Site
from .frame import Shown, crumbs, href, render
from .view_checkpoint import head

_SHOWN = 200


def start_health(site: Site, at: str, anew: bool) -> BrowseJob:
    """Begin the scan of a checkpoint, unless it runs or is done."""
    opened = site.open(at)

    def work(job: BrowseJob) -> None:
        job.result = Health()
        scan(opened.ckpt, job.result, job.advance)

    return site.jobs.start(("health", opened.ckpt.path), work, anew)


def health(site: Site, at: str, fragment: bool = False) -> Shown:
    """The health page: an offer to scan, a scan on its way, or its findings."""
    opened = site.open(at)
    job = site.jobs.find(("health", opened.ckpt.path))
    found = job.result if job is not None else None
    kinds = []
    if found is not None:
        held = list(found.findings)
        kinds = [
            (title, n, [f for f in held if f.kind == kind][:_SHOWN])
            for kind, title in KINDS.items()
            if (n := found.counts.get(kind, 0))
        ]
    body = render(
        "health.html",
        head=None if fragment else head(opened, "health"),
        at=at,
        here=href("health", at=at),
        job=job,
        h=found,
        kinds=kinds,
        nbytes=opened.inventory.nbytes,
        verifies=opened.ckpt.kind in ("meshtape", "virtual"),
        most=MOST,
    )
    trail = crumbs(site, opened.place, ("health", None))
    title = f"{opened.place.label}: health"
    data: dict[str, Any] = {"state": "none", "share": 0.0, "error": ""}
    data |= {k: getattr(job, k) for k in data} if job else {}
    if found is not None:
        data |= {"arrays": found.arrays, "scanned": found.scanned, "counts": dict(found.counts)}
        data |= {"verified": found.verified, "findings": [dataclasses.asdict(f) for f in list(found.findings)[:1000]]}
    return Shown(title, body, data, trail, up=href("checkpoint", at=at))
