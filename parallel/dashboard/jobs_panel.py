"""Training jobs and checkpoints in progress on the live page: their data, and rows with progress, rate and outcome."""

from __future__ import annotations

import math
import time
from typing import Any

from ...arrays.core.formatting import duration
from ...storage.browse.model.text import human_bytes, number, visible
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
            if a["root"] and (a["doing"] or a["state"] == "done"):
                done = a["total"]  # the step after the bytes has begun, though the last reports may not have come
            elif a["root"]:
                done = plugin.written(a["root"]) - report["bases"].get(a["id"], 0)
            out.append(
                {name: a[name] for name in ("kind", "path", "total", "doing", "error")}
                | {
                    "client": client,
                    "done": max(0, min(done, a["total"])),
                    "state": "left" if running and report["left"] else a["state"],
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


# ----- rows of the page -----------------------------------------------------------------------------------------------


def work_row(a: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint that is being written: its share, bytes, rate, time and state."""
    running, share = a["state"] == "running", a["done"] / a["total"] if a["total"] else 0.0
    rate = a["done"] / a["seconds"] if a["seconds"] > 0 else 0.0
    size, wrong = human_bytes(a["total"]), True
    if running and a["silent"] > _SILENT:
        state = f"nothing heard for {duration(a['silent'])}"
    elif running:
        state, wrong = a["doing"] or "writing", False
        if not a["doing"] and rate > 0 and a["done"] < a["total"]:
            state += f", {duration((a['total'] - a['done']) / rate)} left"
    elif a["state"] == "done":
        state, wrong = f"done {duration(a['ended'] or 0.0)} ago", False
    else:
        state = "its process has left" if a["state"] == "left" else visible(a["error"], 300)
    return {
        **a,
        "share": share if running else None,
        "bytes": size if a["state"] == "done" else f"{human_bytes(a['done'])} of {size}",
        "rate": f"{human_bytes(int(rate))}/s" if rate else "–",
        "time": duration(a["seconds"]),
        "state": state,
        "wrong": wrong,
    }


def job_row(j: dict[str, Any]) -> dict[str, Any]:
    """A training job, as ``meshtape status`` shows it."""
    gone = j.get("alive") is False and j["state"] in ("starting", "running", "restarting")
    loss, rate, steps = j.get("loss"), j.get("per_second"), j.get("steps")
    return {
        "name": str(j.get("name", "run")),
        "state": f"{j['state']} (its process is gone)" if gone else str(j["state"]),
        "wrong": gone or j["state"] == "failed",
        "error": j.get("error"),
        "cells": [
            f"{j.get('step', 0):,}" + (f" of {steps:,}" if isinstance(steps, int) else ""),
            number(loss) if isinstance(loss, float | int) and math.isfinite(loss) else "–",
            f"{rate:,.4g}" if isinstance(rate, float | int) else "–",
            f"{j.get('restarts', 0)}",
        ],
        "checkpoint": str(j.get("checkpoint") or "none").rstrip("/").rpartition("/")[2],
        "said": f"{duration(max(0.0, time.time() - j.get('updated', time.time())))} ago",
    }
