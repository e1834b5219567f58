"""The jobs panel of the live page: training jobs and checkpoints in progress, with progress, rate and outcome."""

from __future__ import annotations

import math
import time
from typing import Any

from ...storage.browse.model.text import human_bytes, number, percent, visible
from ...storage.browse.views.frame import section, table
from ...storage.browse.views.html import Markup, join, tag
from ..training.job.status import TOPIC, with_life

_SHOWN = 12
_REMEMBERED = 600.0  # seconds for which work that has ended is shown
_SILENT = 5.0  # seconds after which a report is said to be old


# ----- data -----------------------------------------------------------------------------------------------------------


def work_of(scheduler: Any) -> list[dict[str, Any]]:
    """The saves, merges and reshards of clients: first the running ones, then the ended ones, the latest first."""
    plugin = scheduler.plugins.get("meshtape")
    now = time.monotonic()
    out = []
    for client, report in list(getattr(plugin, "reports", {}).items()):
        age = now - report["at"]
        for a in report["activities"]:
            running = a["state"] == "running"
            ended = None if running else a["ended"] + age
            if (ended is not None and ended > _REMEMBERED) or (running and report["left"] and age > _REMEMBERED):
                continue
            done = a["done"]
            if a["root"]:
                done = plugin.written(a["root"]) - report["bases"].get(a["id"], 0)
                if a["doing"] or a["state"] == "done":
                    done = a[
                        "total"
                    ]  # the step after the bytes has begun, though the workers' last reports may not have come
            out.append(
                {
                    "client": client,
                    "kind": a["kind"],
                    "path": a["path"],
                    "done": max(0, min(done, a["total"])),
                    "total": a["total"],
                    "doing": a["doing"],
                    "state": "left" if running and report["left"] else a["state"],
                    "error": a["error"],
                    "seconds": a["seconds"] + (age if running and not report["left"] else 0.0),
                    "ended": ended,
                    "silent": age if running else 0.0,
                }
            )
    order = {"running": 0, "left": 1}
    return sorted(out, key=lambda a: (order.get(a["state"], 2), a["ended"] or 0.0, -a["seconds"]))[:_SHOWN]


def jobs_of(scheduler: Any) -> list[dict[str, Any]]:
    """The training jobs reported to the scheduler, the latest first."""
    held = scheduler.task_metadata.get(TOPIC, {})
    found = [with_life(f) for f in list(held.values()) if isinstance(f, dict) and "state" in f]
    return sorted(found, key=lambda f: -f.get("started", 0.0))[:_SHOWN]


# ----- sections -------------------------------------------------------------------------------------------------------


def bar(share: float, label: str) -> Markup:
    """A bar that is full at ``share`` = 1."""
    width = 160
    return tag(
        "svg",
        tag("title", label),
        tag("rect", x=0, y=0, width=width, height=8, rx=4, class_="mt-track"),
        tag("rect", x=0, y=0, width=max(8.0, width * share), height=8, rx=4, class_="mt-fill") if share > 0 else None,
        viewBox=f"0 0 {width} 8",
        width=width,
        height=8,
        role="img",
        class_="mt-svg",
    )


def work_section(work: list[dict[str, Any]]) -> Markup | None:
    """The section of checkpoints that are being written."""
    if not work:
        return None
    rows = []
    for a in work:
        share = a["done"] / a["total"] if a["total"] else 0.0
        rate = a["done"] / a["seconds"] if a["seconds"] > 0 else 0.0
        size = human_bytes(a["total"])
        if a["state"] == "running":
            how = join([bar(share, percent(share)), tag("span", f"{human_bytes(a['done'])} of {size}")])
            state = a["doing"] or "writing"
            if not a["doing"] and rate > 0 and a["done"] < a["total"]:
                state += f", {_duration((a['total'] - a['done']) / rate)} left"
            if a["silent"] > _SILENT:
                state = tag("span", f"nothing heard for {_duration(a['silent'])}", class_="mt-wrong")
        else:
            how = tag("span", size if a["state"] == "done" else f"{human_bytes(a['done'])} of {size}")
            state = {
                "done": f"done {_duration(a['ended'] or 0.0)} ago",
                "left": tag("span", "its process has left", class_="mt-wrong"),
                "failed": tag("span", visible(a["error"], 300), class_="mt-wrong"),
            }[a["state"]]
        rows.append(
            (
                a["kind"],
                tag("span", visible(a["path"], 160), class_="mt-mono"),
                how,
                f"{human_bytes(int(rate))}/s" if rate else "–",
                _duration(a["seconds"]),
                state,
            )
        )
    head = ("What", "Where", "Bytes", "Rate", "Time", "State")
    return section(
        "Checkpoints being written", table(head, rows, numeric=(3, 4), cls="mt-work"), note="and the last that were"
    )


def jobs_section(jobs: list[dict[str, Any]]) -> Markup | None:
    """The section of training jobs, as ``meshtape status`` shows them."""
    if not jobs:
        return None
    rows = []
    for j in jobs:
        state = str(j["state"])
        if j.get("alive") is False and state in ("starting", "running", "restarting"):
            state += " (its process is gone)"
        wrong = state == "failed" or "gone" in state
        loss, rate = j.get("loss"), j.get("per_second")
        rows.append(
            (
                tag("strong", visible(str(j.get("name", "run")), 60)),
                tag("span", visible(state, 60), class_="mt-wrong" if wrong else None),
                f"{j.get('step', 0):,} of {j['steps']:,}"
                if isinstance(j.get("steps"), int)
                else f"{j.get('step', 0):,}",
                number(loss) if isinstance(loss, float | int) and math.isfinite(loss) else "–",
                f"{rate:,.4g}" if isinstance(rate, float | int) else "–",
                f"{j.get('restarts', 0)}",
                visible(str(j.get("checkpoint") or "none").rstrip("/").rpartition("/")[2], 60),
                f"{_duration(max(0.0, time.time() - j.get('updated', time.time())))} ago",
            )
        )
        if j.get("error"):
            rows.append(("", tag("span", visible(str(j["error"]), 300), class_="mt-wrong"), *[""] * 6))
    head = ("Job", "State", "Step", "Loss", "Samples/s", "Restarts", "Last checkpoint", "Said")
    return section("Jobs", table(head, rows, numeric=(2, 3, 4, 5)))


def _duration(seconds: float) -> str:
    """
    >>> _duration(0.25), _duration(42.3), _duration(95), _duration(7300)
    ('0.2 s', '42 s', '1 min 35 s', '2 h 1 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
