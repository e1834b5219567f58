"""Views of work that reads whole checkpoints: health of one, comparison of two. They start, show and stop background jobs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from . import charts
from .compare import Change, Comparison, compare, names
from .frame import Shown, crumbs, facts, href, notice, section, shape_text, table
from .health import KINDS, MOST, Health, scan
from .html import Markup, join, tag
from .jobs import Job
from .site import Site
from .text import count, human_bytes, key, number, percent, visible
from .view_checkpoint import head, tab_bar

_SHOWN = 200


def progress(job: Job, back: str) -> Markup:
    """How far a job is, with a button that stops it. ``back`` is the page, whose fragment is asked for again while the job runs."""
    if not job.running:
        said = {"done": "Complete", "stopped": "Stopped: what was found until then", "failed": "Failed"}[job.state]
        if job.state == "failed":
            return notice("bad", said, tag("p", visible(job.error, 800)))
        return tag("p", f"{said}, {job.seconds:.1f} s.", class_="mt-quiet")
    width = 420
    return tag(
        "div",
        tag(
            "svg",
            tag("title", f"{100 * job.share:.0f} %"),
            tag("rect", x=0, y=0, width=width, height=8, rx=4, class_="mt-track"),
            tag("rect", x=0, y=0, width=max(8.0, width * job.share), height=8, rx=4, class_="mt-fill"),
            viewBox=f"0 0 {width} 8",
            width=width,
            height=8,
            role="img",
            class_="mt-svg",
        ),
        tag("p", f"{percent(job.share)} {visible(job.doing, 80)}", class_="mt-quiet"),
        tag(
            "form",
            [tag("input", type="hidden", name=k, value=v) for k, v in (("job", job.id), ("back", back))],
            tag("button", "Stop"),
            method="post",
            action="stop",
        ),
        class_="mt-progress",
        data_poll=f"{back}&fragment=1",
    )


# ----- health ---------------------------------------------------------------------------------------------------------


def start_health(site: Site, at: str, again: bool) -> Job:
    """Begin the scan of a checkpoint, unless it runs or is done."""
    opened = site.open(at)

    def work(job: Job) -> None:
        job.result = Health()
        scan(opened.ckpt, job.result, job.advance)

    return site.jobs.start(("health", opened.ckpt.path), f"health of {opened.place.label}", work, again)


def health(site: Site, at: str, fragment: bool = False) -> Shown:
    """The health page: an offer to scan, a scan on its way, or its findings."""
    opened = site.open(at)
    job = site.jobs.find(("health", opened.ckpt.path))
    if job is None:
        found, inner = None, _offer(at, opened.inventory.nbytes, opened.ckpt.kind == "meshtape")
    else:
        found = job.result
        inner = join(
            [
                progress(job, href("health", at=at)),
                _findings(at, found) if found is not None else None,
                _again("health", {"at": at}) if not job.running else None,
            ]
        )
    inner = tag("div", inner, id="scan", data_swap=True)
    data = _health_data(job, found)
    if fragment:
        return Shown("", inner, data)
    body = join([head(opened), tab_bar(opened, "health"), inner])
    trail = crumbs(site, opened.place, ("health", None))
    return Shown(f"{opened.place.label}: health", body, data, trail, up=href("checkpoint", at=at))


def _offer(at: str, nbytes: int, verifies: bool) -> Markup:
    what = "It looks for NaN and infinities, dead rows, constant and duplicate arrays"
    what += ", and compares every byte with its checksum." if verifies else ". This format has no checksums to compare."
    return section(
        "Health",
        tag("p", f"A scan reads all {human_bytes(nbytes)}. {what}"),
        tag(
            "form",
            tag("input", type="hidden", name="at", value=at),
            tag("button", "Scan", class_="mt-main"),
            method="post",
            action="health",
        ),
    )


def _again(action: str, fields: dict[str, str]) -> Markup:
    hidden = [tag("input", type="hidden", name=k, value=v) for k, v in {**fields, "again": "1"}.items()]
    return tag("form", hidden, tag("button", "Scan again"), method="post", action=action)


def _findings(at: str, h: Health) -> Markup:
    bad = sum(n for k, n in h.counts.items() if k in ("nan", "infinite", "unreadable", "verify"))
    notes = sum(h.counts.values()) - bad
    if h.complete:
        verdict = (
            notice(
                "good", "Sound", tag("p", f"{count(h.arrays, 'array')}, {human_bytes(h.nbytes)} read; {h.verified}.")
            )
            if not bad
            else notice(
                "bad",
                f"{count(bad, 'fault')}",
                tag("p", f"{count(h.arrays, 'array')}, {human_bytes(h.nbytes)} read; {h.verified}."),
            )
        )
    else:
        verdict = tag(
            "p", f"{h.scanned:,} of {count(h.arrays, 'array')} read so far; {count(bad, 'fault')}.", class_="mt-quiet"
        )
    out: list[Any] = [verdict]
    if h.complete and notes:
        out.append(tag("p", f"{count(notes, 'observation')} below may be on purpose.", class_="mt-quiet"))
    for kind, title in KINDS.items():
        n = h.counts.get(kind, 0)
        if not n:
            continue
        rows = [
            (
                tag("a", visible(f.name, 160), href=href("array", at=at, name=key(f.name)))
                if f.name
                else "whole checkpoint",
                join(
                    [
                        _pre(f.text),
                        [
                            tag("span", " as ", tag("a", visible(o, 120), href=href("array", at=at, name=key(o))))
                            for o in f.others
                        ],
                    ]
                ),
            )
            for f in [f for f in list(h.findings) if f.kind == kind][:_SHOWN]
        ]
        note = (
            f"{n:,}"
            + (f", the first {_SHOWN} shown" if n > _SHOWN else "")
            + (f"; {MOST:,} are kept" if n > MOST else "")
        )
        out.append(section(title, table(("Array", "What"), rows), note=note))
    return join(out)


def _pre(text: str) -> Markup:
    """A message of several lines, each as one."""
    return join([tag("span", visible(line, 500)) for line in text.split("\n")], "<br>")


def _health_data(job: Job | None, h: Health | None) -> dict[str, Any]:
    state = {
        "state": job.state if job else "none",
        "share": job.share if job else 0.0,
        "error": job.error if job else "",
    }
    if h is None:
        return state
    return state | {
        "arrays": h.arrays,
        "scanned": h.scanned,
        "counts": dict(h.counts),
        "verified": h.verified,
        "findings": [dataclasses.asdict(f) for f in list(h.findings)[:1000]],
    }


# ----- comparison -----------------------------------------------------------------------------------------------------


def start_comparison(site: Site, a: str, b: str, again: bool) -> Job:
    """Begin to compare two checkpoints."""
    left, right = site.open(a).ckpt, site.open(b).ckpt
    found = names(left, right)

    def work(job: Job) -> None:
        job.result = Comparison(found.only_a, found.only_b, [], found.common)
        compare(left, right, job.result, job.advance)

    return site.jobs.start(("compare", left.path, right.path), "comparison", work, again)


def comparison(site: Site, a: str, b: str, fragment: bool = False) -> Shown:
    """Two checkpoints side by side; without ``b``, what can be compared with ``a``."""
    left = site.open(a)
    trail = crumbs(site, left.place, ("compare", None))
    if not b:
        body = join([head(left), tab_bar(left, "compare"), _choose(site, a)])
        return Shown(f"{left.place.label}: compare", body, {}, trail, up=href("checkpoint", at=a))
    right = site.open(b)
    job = site.jobs.find(("compare", left.ckpt.path, right.ckpt.path))
    found = job.result if job is not None and job.result is not None else names(left.ckpt, right.ckpt)
    if job is None:
        size = human_bytes(left.inventory.nbytes + right.inventory.nbytes)
        start = tag(
            "form",
            [tag("input", type="hidden", name=k, value=v) for k, v in (("a", a), ("b", b))],
            tag("button", "Compare values", class_="mt-main"),
            tag("span", f" reads up to {size}", class_="mt-quiet"),
            method="post",
            action="compare",
        )
    else:
        start = progress(job, href("compare", a=a, b=b))
    again = _again("compare", {"a": a, "b": b}) if job is not None and not job.running else None
    inner = tag("div", start, _comparison(a, b, found, done=job is not None), again, id="scan", data_swap=True)
    data = {
        "state": job.state if job else "none",
        "only_a": found.only_a[:1000],
        "only_b": found.only_b[:1000],
        "common": found.common,
        "changes": [dataclasses.asdict(c) | {"ratio": c.ratio} for c in found.ranked()[:1000]],
    }
    if fragment:
        return Shown("", inner, data)
    sides = table(
        ("", "Checkpoint", "Format", "Step", "Arrays", "Size"),
        [
            (
                side,
                tag("a", visible(o.place.label, 120), href=href("checkpoint", at=o.place.at)),
                o.ckpt.kind,
                "–" if o.ckpt.step is None else f"{o.ckpt.step:,}",
                f"{len(o.ckpt):,}",
                human_bytes(o.inventory.nbytes),
            )
            for side, o in (("A", left), ("B", right))
        ],
        numeric=(3, 4, 5),
    )
    swap = tag("p", tag("a", "Swap A and B", href=href("compare", a=b, b=a)), class_="mt-zoom")
    title = f"{left.place.label} and {right.place.label}"
    body = join([tag("div", tag("h1", "Comparison"), class_="mt-head"), sides, swap, inner])
    return Shown(title, body, data, trail, up=href("checkpoint", at=a))


def _choose(site: Site, a: str) -> Markup:
    """The other checkpoints that this site knows: roots, and what lies beside ``a``."""
    found: dict[str, str] = {}
    parent = a.rpartition("/")[0]
    if parent:
        found |= {e.at: e.name for e in site.entries(site.place(parent)) if e.kind == "checkpoint"}
    for place in site.places():
        if site.kind(place) == "checkpoint":
            found.setdefault(place.at, place.label)
        elif not parent or place.at != parent:
            found |= {e.at: f"{place.label}/{e.name}" for e in site.entries(place) if e.kind == "checkpoint"}
    found.pop(a, None)
    if not found:
        return notice(
            "note",
            "There is nothing to compare with.",
            tag("p", "Give meshtape browse two checkpoints, or a directory that holds them."),
        )
    rows = [
        (tag("a", visible(label, 120), href=href("compare", a=a, b=at)),) for at, label in list(found.items())[:_SHOWN]
    ]
    return section("Compare with", table(("Checkpoint",), rows))


def _comparison(a: str, b: str, c: Comparison, done: bool) -> Markup:
    out: list[Any] = [
        facts(
            [
                ("In both", f"{c.common:,}"),
                ("Only in A", f"{len(c.only_a):,}"),
                ("Only in B", f"{len(c.only_b):,}"),
                ("Equal", f"{c.equal:,}" if done else None),
                ("Compared", f"{len(c.changes):,}" if done and not c.complete else None),
            ]
        )
    ]
    edges, counts = c.histogram()
    if counts:
        out.append(
            section(
                "Update ratios",
                charts.histogram(edges, counts, x_name="decimal logarithm of the update ratio"),
                note="log₁₀ of ‖B − A‖ / ‖A‖, one count an array",
            )
        )
    ranked = [x for x in c.ranked() if x.note or x.changed or x.dtypes[0] != x.dtypes[1]]
    if ranked:
        out.append(
            section(
                "Most changed",
                table(
                    ("Array", "Shape", "‖A‖", "‖B‖", "‖B − A‖", "Ratio", "Largest", "Changed"),
                    [_change(a, b, x) for x in ranked[:_SHOWN]],
                    numeric=range(2, 8),
                    cls="mt-changes",
                ),
                note=f"the first {_SHOWN} of {len(ranked):,}" if len(ranked) > _SHOWN else None,
            )
        )
    for side, at, only in (("A", a, c.only_a), ("B", b, c.only_b)):
        if only:
            rows = [(tag("a", visible(n, 160), href=href("array", at=at, name=key(n))),) for n in only[:_SHOWN]]
            out.append(
                section(
                    f"Only in {side}",
                    table(("Array",), rows),
                    note=f"{len(only):,}" + (f", the first {_SHOWN} shown" if len(only) > _SHOWN else ""),
                )
            )
    return join(out)


def _change(a: str, b: str, c: Change) -> list[Any]:
    name = join(
        [
            tag("a", visible(c.name, 160), href=href("array", at=a, name=key(c.name))),
            " ",
            tag("a", "in B", href=href("array", at=b, name=key(c.name)), class_="mt-quiet"),
        ]
    )
    if c.note:
        return [name, tag("span", visible(c.note, 200), class_="mt-wrong"), "", "", "", "", "", ""]
    dtype = "" if c.dtypes[0] == c.dtypes[1] else f" {c.dtypes[0]} → {c.dtypes[1]}"
    share = percent(c.changed / c.size) if c.size else "–"
    values = [
        number(c.norms[0]),
        number(c.norms[1]),
        number(c.distance),
        "–" if math.isnan(c.ratio) else number(c.ratio),
        number(c.largest),
        share,
    ]
    return [name, shape_text(c.shapes[0]) + dtype, *values]
