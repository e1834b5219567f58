"""The judgement of ``benchmarks/gpu.py`` on what it found. Needs Python's own library alone, as the report of
``gpu_day.sh`` reads it, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MARKS = {True: "✓", False: "✗", None: "–"}


def of_targets(targets: Mapping[str, bool | None], reason: str = "it has no target") -> dict[str, Any]:
    """The part of a result that judges it: each target, and ``met`` for all of them together. It is null, with the
    reason, where none is missed and one has nothing to compare with."""
    met = False if False in targets.values() else None if None in targets.values() or not targets else True
    return {"targets": dict(targets), "met": met} | ({"reason": reason} if met is None else {})


def judge(found: Mapping[str, Any]) -> dict[str, Any]:
    """Failures, targets that were missed, what was dropped, what could not be compared; and the status: 1 where
    something failed, else 2 where a target was missed or dropped, else 0."""
    results = [*found["rows"], *found["host"]]
    peers = [(f"{r['name']}, {name}", p) for r in results for name, p in r.get("peers", {}).items()]
    failed = [f"{name}: {r['error']}" for name, r in [*((r["name"], r) for r in results), *peers] if "error" in r]
    failed += [f"the clock: {c['name']}" for c in found["checks"] if not c["ok"]]
    if not found["checks"]:
        failed.append("the clock was not checked")
    if "stopped" in found:
        failed.append(f"stopped: {found['stopped']}")
    dropped = [*found["dropped"], *(name for name, p in peers if "dropped" in p)]
    if not results and not dropped:
        failed.append("nothing was measured")
    missed = [f"{r['name']}: {t}" for r in results for t, met in r.get("targets", {}).items() if met is False]
    apart = [f"{r['name']}: {r['reason']}" for r in results if "reason" in r]
    status = 1 if failed else 2 if missed or dropped else 0
    return {"status": status, "failed": failed, "missed": missed, "dropped": dropped, "not comparable": apart}


def goals(result: Mapping[str, Any]) -> str:
    return ", ".join(f"{t} {MARKS[met]}" for t, met in result["targets"].items())


def line_of_host(h: Mapping[str, Any]) -> str:
    """The findings of a line of the host."""
    if "error" in h:
        return f"{h['name']}: failed ✗: {h['error']}"
    found = [f"{name} {n:.1f} {unit}" for unit in ("us", "MB") for name, n in h.get(unit, {}).items()]
    found += [f"{name} failed ✗: {p['error']}" for name, p in h.get("peers", {}).items()]
    return f"{h['name']}: {', '.join(found)} (targets: {goals(h) or 'none'})"


def told(verdict: Mapping[str, Any]) -> list[str]:
    """The judgement as lines."""
    of_all = ("all targets are met", "something failed", "targets are missed or dropped")[verdict["status"]]
    kinds = ("failed", "missed", "dropped", "not comparable")
    lines = [f"{kind}: {line}".replace("\n", " ") for kind in kinds[:3] for line in verdict[kind]]
    counts = ", ".join(f"{len(verdict[kind])} {kind}" for kind in kinds)
    return [f"verdict: {of_all} ({counts})", *lines]
