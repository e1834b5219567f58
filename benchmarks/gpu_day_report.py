"""The report of ``gpu_day.sh``: what each part left, in Markdown and JSON. Needs Python's own library alone.

``config`` prints versions and the device; ``note`` and ``skip`` keep the end of a part; ``report`` gathers all parts,
and its status is 1 where one failed or did not run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpu_verdict import goals, judge, line_of_host, told

SHOWN = 40
"""Failures of a part that the Markdown names; the JSON has all."""


def config() -> int:
    """What is there; the status is 1 where no GPU answers."""
    print(sys.version)
    for name in ("meshtape", "numpy", "scipy", "cupy-cuda13x", "torch", "jax", "dask", "distributed", "zarr", "pytest"):
        try:
            print(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            print(name, "is missing")
    try:
        print(subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False, timeout=60).stdout)
    except (OSError, subprocess.TimeoutExpired) as e:
        print(f"nvidia-smi: {e}")
    import cupy

    import meshtape as mt
    from meshtape.info import collect

    print(f"meshtape is {mt.__file__}")
    cupy.show_config()
    print(collect()["cuda_libraries"])
    x = mt.ones((3, 3), device="cuda:0")
    print(f"ones + ones on {x.device}: {(x + x).tolist()}")
    return 0 if (x + x).tolist() == [[2.0] * 3] * 3 else 1


def results(xml: Path) -> dict[str, Any]:
    """Counts, failures and reasons of skips from pytest's XML."""
    counts, failures, skips = Counter(), [], Counter()
    for case in ElementTree.parse(xml).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = [c for c in case if c.tag in ("failure", "error")]
        skipped = case.find("skipped")
        counts["failed" if bad else "skipped" if skipped is not None else "passed"] += 1
        failures += [{"test": name, "said": (c.get("message") or c.text or "")[:2000]} for c in bad[:1]]
        if skipped is not None:
            skips[(skipped.get("message") or "")[:300]] += 1
    return {"counts": counts, "failures": failures, "skips": skips}


def note(out: str, name: str, status: str, seconds: str, limit: str, command: str) -> int:
    """Keep how a part ended. A part that was stopped at its limit, or ran no test, has not passed."""
    parts = Path(out, "parts")
    kept: dict[str, Any] = {"part": name, "status": int(status), "seconds": int(seconds), "command": command}
    xml, rows = parts / f"{name}.xml", parts / f"{name}.rows.json"
    if xml.exists():
        kept |= results(xml)
    if rows.exists():
        kept["rows"] = json.loads(rows.read_text())
    judged = judge(kept["rows"]) if "rows" in kept else {"status": 0, "failed": []}
    if int(seconds) >= int(limit):
        kept["verdict"] = f"stopped at its limit of {limit} s"
    elif judged["failed"]:
        kept["verdict"] = f"failed (status {status}): {len(judged['failed'])} of the benchmark"
    elif judged["status"] == 2 and kept["status"] in (0, 2):
        kept["verdict"] = f"{len(judged['missed'])} targets missed, {len(judged['dropped'])} rows or peers dropped"
    elif kept["status"] != 0:
        kept["verdict"] = f"failed (status {status})"
    elif name == "benchmark" and "rows" not in kept:
        kept["verdict"] = "left no rows"
    elif "counts" in kept and not kept["counts"].get("passed"):
        kept["verdict"] = "ran no test"
    else:
        kept["verdict"] = "passed"
    if kept["verdict"] != "passed":
        kept["log_ends"] = (parts / f"{name}.log").read_text(errors="replace")[-3000:]
    (parts / f"{name}.json").write_text(json.dumps(kept, indent=1))
    return 0


def skip(out: str, name: str, reason: str) -> int:
    kept = {"part": name, "verdict": f"did not run: {reason}"}
    Path(out, "parts", f"{name}.json").write_text(json.dumps(kept))
    return 0


def _benchmark(rows: dict[str, Any]) -> list[str]:
    """The benchmark as Markdown."""
    wrong = [c["name"] for c in rows["checks"] if not c["ok"]]
    lines = [f"{rows.get('device')}, copy {rows.get('copy', 0) / 1e12:.2f} TB/s.", ""]
    if wrong:
        lines += [f"**The clock is not to be believed**: {'; '.join(wrong)}.", ""]
    lines += [f"* {line}" for line in told(judge(rows))]
    lines += [
        "",
        "| work | us | by | of the copy | targets | peers (our time over theirs) |",
        "|---|---|---|---|---|---|",
    ]

    def peer(name: str, p: dict[str, Any]) -> str:
        return f"{name} {p['ratio']:.2f}" if "ratio" in p else f"{name} failed" if "error" in p else f"{name} dropped"

    for r in rows["rows"]:
        if "error" in r:
            lines.append(f"| {r['name']} | failed | | | | |")
            continue
        peers = ", ".join(peer(*p) for p in r["peers"].items())
        cells = (r["name"], f"{r['seconds'] * 1e6:.1f}", r["by"], f"{r['share']:.0%}", goals(r), peers)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"* {line_of_host(h)}".replace("\n", " ") for h in rows["host"])]
    return lines


def report(out: str, *wanted: str) -> int:
    parts = Path(out, "parts")
    kept = {f.stem: json.loads(f.read_text()) for f in parts.glob("*.json") if not f.name.endswith(".rows.json")}
    rows = [kept.get(name, {"part": name, "verdict": "did not run: it was not asked for"}) for name in wanted]
    passed = sum(r["verdict"] == "passed" for r in rows)
    commit = (parts / "commit").read_text().strip()
    Path(out, "report.json").write_text(json.dumps({"commit": commit, "parts": rows}, indent=1))
    lines = [f"# A day with a GPU: {passed} of {len(rows)} parts passed", "", f"Commit {commit}.", ""]
    lines += ["| part | verdict | tests passed, failed, skipped | seconds |", "|---|---|---|---|"]
    for r in rows:
        counts = r.get("counts", {})
        said = ", ".join(str(counts.get(k, 0)) for k in ("passed", "failed", "skipped")) if counts else ""
        lines.append(f"| {r['part']} | {r['verdict']} | {said} | {r.get('seconds', '')} |")
    for r in rows:
        lines += ["", f"## {r['part']}", "", r["verdict"]]
        failures = r.get("failures", [])
        for f in failures[:SHOWN]:
            first = (f["said"].splitlines() or [""])[0][:300]
            lines.append(f"* {f['test']}: `{first}`")
        if len(failures) > SHOWN:
            lines.append(f"* and {len(failures) - SHOWN} more, in report.json")
        lines += [f"* {n} skipped: {reason}" for reason, n in r.get("skips", {}).items()]
        if "rows" in r:
            lines += ["", *_benchmark(r["rows"])]
        if r["part"] == "config" and (log := parts / "config.log").exists():
            lines += ["", "```", log.read_text(errors="replace")[-6000:], "```"]
        elif "log_ends" in r and not failures:
            lines += ["", "```", r["log_ends"][-1500:], "```"]
    Path(out, "report.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[: 6 + len(rows)]))
    return 0 if passed == len(rows) else 1


if __name__ == "__main__":
    commands = {"config": config, "note": note, "skip": skip, "report": report}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=commands)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    sys.exit(commands[given.command](*given.arguments))
