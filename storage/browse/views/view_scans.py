"""The view of a checkpoint's health, and the common parts of pages for background work: progress and a stop button."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..model.health import KINDS, MOST, Health, scan
from ..model.jobs import Job
from ..model.site import Site
from ..model.text import count, human_bytes, key, percent, visible
from .frame import Shown, crumbs, href, notice, section, table
from .html import Markup, join, tag
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


def start_health(site: Site, at: str, anew: bool) -> Job:
    """Begin the scan of a checkpoint, unless it runs or is done."""
    opened = site.open(at)

    def work(job: Job) -> None:
        job.result = Health()
        scan(opened.ckpt, job.result, job.advance)

    return site.jobs.start(("health", opened.ckpt.path), f"health of {opened.place.label}", work, anew)


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
                again(href("health", at=at)) if not job.running else None,
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


def again(to: str) -> Markup:
    """The button that starts finished work anew, by the address that has started it."""
    return tag("form", tag("button", "Scan again"), method="post", action=f"{to}&again=1")


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
        out.append(section(title, table(("Array", "What"), rows, cls="mt-names"), note=note))
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
