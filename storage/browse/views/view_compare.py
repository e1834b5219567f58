"""Two checkpoints side by side, names mapped by key rules where they differ."""

from __future__ import annotations

import dataclasses

from ....arrays.core.errors import MeshtapeError
from ..model.compare import Change, Comparison, compare, names, ruled
from ..model.jobs import BrowseJob
from ..model.site import Site
from ..model.text import FORMATS, number, percent
from . import charts
from .frame import Shown, crumbs, href, render, shape_text
from .view_checkpoint import head

_SHOWN = 200


def start_comparison(site: Site, a: str, b: str, rules: str, anew: bool) -> BrowseJob:
    """Begin to compare two checkpoints; ``rules`` are applied to ``a``."""
    left, right = ruled(site.open(a).ckpt, rules), site.open(b).ckpt
    found = names(left, right)

    def work(job: BrowseJob) -> None:
        job.result = Comparison(found.only_a, found.only_b, [], found.common)
        compare(left, right, job.result, job.advance)

    return site.jobs.start(("compare", left.path, right.path, rules), work, anew)


def comparison(site: Site, a: str, b: str, rules: str = "", fragment: bool = False) -> Shown:
    """Two checkpoints side by side, ``a`` after the key rules; without ``b``, a choice of checkpoints for it."""
    left = site.open(a)
    trail = crumbs(site, left.place, ("compare", None))
    up = href("checkpoint", at=a)
    if not b:
        others = list(_others(site, a).items())[:_SHOWN]
        body = render("compare_with.html", head=head(left, "compare"), a=a, others=others)
        return Shown(f"{left.place.label}: compare", body, {}, trail, up=up)
    right = site.open(b)
    wrong, mapped = None, left.ckpt
    try:
        mapped = ruled(left.ckpt, rules)
    except MeshtapeError as e:
        wrong = e
    job = None if wrong else site.jobs.find(("compare", left.ckpt.path, right.ckpt.path, rules))
    found = job.result if job is not None and job.result is not None else names(mapped, right.ckpt)
    edges, counts = found.histogram()
    ranked = [c for c in found.ranked() if c.note or c.changed or c.dtypes[0] != c.dtypes[1]]
    body = render(
        "compare.html",
        fragment=fragment,
        a=a,
        b=b,
        rules=rules.replace("\r\n", "\n"),
        here=href("compare", a=a, b=b, rules=rules),
        sides=[(side, o, FORMATS.get(o.ckpt.kind, o.ckpt.kind)) for side, o in (("A", left), ("B", right))],
        wrong=(type(wrong).__name__, str(wrong)) if wrong else None,
        mapping=mapped.mapping[:_SHOWN],
        # Where few names are shared, names are what differs.
        unfolded=bool(rules.strip()) or found.common < min(len(left.ckpt), len(right.ckpt)) / 2,
        job=job,
        nbytes=left.inventory.nbytes + right.inventory.nbytes,
        facts_of=[
            ("In both", f"{found.common:,}"),
            ("Only in A", f"{len(found.only_a):,}"),
            ("Only in B", f"{len(found.only_b):,}"),
            ("Equal", f"{found.equal:,}" if job else None),
            ("Compared", f"{len(found.changes):,}" if job and not found.complete else None),
        ],
        ratios=charts.histogram(edges, counts, x_name="decimal logarithm of the update ratio") if counts else "",
        changes=[(c, c.name in left.ckpt.arrays, _cells(c)) for c in ranked[:_SHOWN]],
        changed=len(ranked),
        only=[
            (side, at, len(only), [(n, side == "B" or n in left.ckpt.arrays) for n in only[:_SHOWN]])
            for side, at, only in (("A", a, found.only_a), ("B", b, found.only_b))
            if only
        ],
    )
    data = {
        "state": job.state if job else "none",
        "rules": [{"rule": text, "applied": n} for text, n in mapped.mapping],
        "error": str(wrong) if wrong else "",
        "only_a": found.only_a[:1000],
        "only_b": found.only_b[:1000],
        "common": found.common,
        "changes": [dataclasses.asdict(c) | {"ratio": c.ratio} for c in found.ranked()[:1000]],
    }
    return Shown(f"{left.place.label} and {right.place.label}", body, data, trail, up=up)


def _others(site: Site, a: str) -> dict[str, str]:
    """The other checkpoints of this site: roots, and the neighbours of ``a``; their labels by their places."""
    found: dict[str, str] = {}
    parent = a.rpartition("/")[0]
    if parent:
        found |= {e.at: e.name for e in site.entries(site.place(parent)) if e.kind == "checkpoint"}
    for place in site.places():
        if site.kind(place) == "checkpoint":
            found.setdefault(place.at, place.label)
        elif place.at != parent:
            found |= {e.at: f"{place.label}/{e.name}" for e in site.entries(place) if e.kind == "checkpoint"}
    found.pop(a, None)
    return found


def _cells(c: Change) -> list[str]:
    """A change as cells: shape, both norms, their distance, ratio, largest difference, share of changed elements."""
    dtype = "" if c.dtypes[0] == c.dtypes[1] else f" {c.dtypes[0]} → {c.dtypes[1]}"
    ratio = "–" if c.ratio != c.ratio else number(c.ratio)
    changed = percent(c.changed / c.size) if c.size else "–"
    return [shape_text(c.shapes[0]) + dtype, *map(number, (*c.norms, c.distance)), ratio, number(c.largest), changed]
