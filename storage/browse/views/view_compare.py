"""Two checkpoints side by side, names mapped by key rules where they differ."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ....arrays.core.errors import MeshtapeError
from ...checkpoint.checkpoint import Checkpoint
from ..model.compare import Change, Comparison, compare, names, ruled
from ..model.jobs import Job
from ..model.site import Site
from ..model.text import FORMATS, human_bytes, key, number, percent, visible
from . import charts
from .frame import Shown, crumbs, facts, href, notice, section, shape_text, table
from .html import Markup, join, tag
from .view_checkpoint import head, tab_bar
from .view_scans import again, progress

_SHOWN = 200


def start_comparison(site: Site, a: str, b: str, rules: str, anew: bool) -> Job:
    """Begin to compare two checkpoints; ``rules`` are applied to ``a``."""
    left, right = ruled(site.open(a).ckpt, rules), site.open(b).ckpt
    found = names(left, right)

    def work(job: Job) -> None:
        job.result = Comparison(found.only_a, found.only_b, [], found.common)
        compare(left, right, job.result, job.advance)

    return site.jobs.start(("compare", left.path, right.path, rules), "comparison", work, anew)


def comparison(site: Site, a: str, b: str, rules: str = "", fragment: bool = False) -> Shown:
    """Two checkpoints side by side, ``a`` after the key rules; without ``b``, a choice of checkpoints for it."""
    left = site.open(a)
    trail = crumbs(site, left.place, ("compare", None))
    if not b:
        body = join([head(left), tab_bar(left, "compare"), _choose(site, a)])
        return Shown(f"{left.place.label}: compare", body, {}, trail, up=href("checkpoint", at=a))
    right = site.open(b)
    here = href("compare", a=a, b=b, rules=rules)
    wrong: MeshtapeError | None = None
    try:
        mapped = ruled(left.ckpt, rules)
    except MeshtapeError as e:
        wrong, mapped = e, left.ckpt
    job = None if wrong else site.jobs.find(("compare", left.ckpt.path, right.ckpt.path, rules))
    found = job.result if job is not None and job.result is not None else names(mapped, right.ckpt)
    if job is None:
        size = human_bytes(left.inventory.nbytes + right.inventory.nbytes)
        start = tag(
            "form",
            tag("button", "Compare values", class_="mt-main", disabled=wrong is not None),
            tag("span", f" reads up to {size}", class_="mt-quiet"),
            method="post",
            action=here,
        )
    else:
        start = progress(job, here)
    done = None if job is None or job.running else again(here)
    shown = _comparison(a, b, found, left.ckpt, done=job is not None)
    inner = tag("div", start, shown, done, id="scan", data_swap=True)
    data = {
        "state": job.state if job else "none",
        "rules": [{"rule": text, "applied": n} for text, n in mapped.mapping],
        "error": str(wrong) if wrong else "",
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
                FORMATS.get(o.ckpt.kind, o.ckpt.kind),
                "–" if o.ckpt.step is None else f"{o.ckpt.step:,}",
                f"{len(o.ckpt):,}",
                human_bytes(o.inventory.nbytes),
            )
            for side, o in (("A", left), ("B", right))
        ],
        numeric=(3, 4, 5),
    )
    # Rules lead from A to B, and not always back: the other way round starts without.
    swap = tag("p", tag("a", "Swap A and B", href=href("compare", a=b, b=a)), class_="mt-zoom")
    # Where few names are shared, names are what differs.
    few = found.common < min(len(left.ckpt), len(right.ckpt)) / 2
    ruling = _rules_form(a, b, rules, mapped.mapping, wrong, few)
    title = f"{left.place.label} and {right.place.label}"
    body = join([tag("div", tag("h1", "Comparison"), class_="mt-head"), sides, swap, ruling, inner])
    return Shown(title, body, data, trail, up=href("checkpoint", at=a))


def _rules_form(
    a: str, b: str, rules: str, mapping: list[tuple[str, int]], wrong: MeshtapeError | None, unfolded: bool
) -> Markup:
    """The box for key rules, with their effect or their errors."""
    lines = rules.replace("\r\n", "\n").split("\n")
    box = tag(
        "form",
        [tag("input", type="hidden", name=k, value=v) for k, v in (("a", a), ("b", b))],
        tag(
            "textarea",
            join(lines, "\n"),
            name="rules",
            rows=max(3, min(len(lines), 12)),
            aria_label="Key rules, one a line",
            placeholder="model.layers.{i}.weight -> layers.{i}.w",
            spellcheck="false",
        ),
        tag("p", tag("button", "Apply rules"), class_="mt-zoom"),
        method="get",
        action="compare",
        class_="mt-rules",
    )
    if wrong is not None:
        told = notice("bad", type(wrong).__name__, tag("pre", join(str(wrong).split("\n"), "\n")))
    elif mapping:
        rows = [(tag("code", visible(text, 200)), f"{n:,}") for text, n in mapping[:_SHOWN]]
        told = table(("Rule", "Applied"), rows, numeric=(1,))
    else:
        told = None
    return tag(
        "details",
        tag("summary", "Key rules: names of A as in B"),
        tag(
            "p",
            "Rename, join, split, cast or drop arrays of A before they are compared, one rule a line.",
            class_="mt-quiet",
        ),
        box,
        told,
        open=bool(rules.strip()) or unfolded,
        class_="mt-ruling",
    )


def _choose(site: Site, a: str) -> Markup:
    """The other checkpoints of this site: roots, and the neighbours of ``a``."""
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


def _comparison(a: str, b: str, c: Comparison, stored: Checkpoint, done: bool) -> Markup:
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
                    [_change(a, b, x, x.name in stored.arrays) for x in ranked[:_SHOWN]],
                    numeric=range(2, 8),
                    cls="mt-changes mt-names",
                ),
                note=f"the first {_SHOWN} of {len(ranked):,}" if len(ranked) > _SHOWN else None,
            )
        )
    for side, at, only in (("A", a, c.only_a), ("B", b, c.only_b)):
        if only:
            rows = [(_name(n, at, side == "B" or n in stored.arrays),) for n in only[:_SHOWN]]
            out.append(
                section(
                    f"Only in {side}",
                    table(("Array",), rows, cls="mt-names"),
                    note=f"{len(only):,}" + (f", the first {_SHOWN} shown" if len(only) > _SHOWN else ""),
                )
            )
    return join(out)


def _name(name: str, at: str, stored: bool) -> Markup:
    """A name, as a link where the file holds the array: an array made by a rule has no page of its own."""
    return tag(
        "a" if stored else "span", visible(name, 160), href=href("array", at=at, name=key(name)) if stored else None
    )


def _change(a: str, b: str, c: Change, stored: bool) -> list[Any]:
    name = join(
        [
            _name(c.name, a, stored),
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
