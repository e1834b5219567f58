"""The budgets of the contract: launches, copies, fills and waits of every call of an op, of derivatives each way, by
dtype, and of steps. They lie in ``budgets``, which ``python tests/gpu/contract/budget.py`` writes anew.

A line is of an op (and a direction): of these dtypes so many calls, and behind the x the launches of each, with what is
not zero of copies up to the device, down from it and on it, of fills of memory, which are among the launches, and of
waits. Calls that cost more than four different things have one sum. Tests fail above these counts and below them: a
change that needs less writes them anew, one that needs more has a reason.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KINDS = ("ops", "derivatives", "large", "steps")


def _sum(costs: Mapping[str, int]) -> str:
    total: Counter[str] = Counter()
    for cost, calls in costs.items():
        for number, word in re.findall(r"(\d+)([a-z]*)", cost):
            total[word] += int(number) * calls
    return " ".join([f"{sum(costs.values())} calls", *(f"{n}{word}" for word, n in total.items() if n or not word)])


def _costs(costs: Mapping[str, Mapping[str, int]]) -> str:
    """Costs by dtype, those that are alike together."""
    dtypes: dict[str, list[str]] = defaultdict(list)
    for dtype, of in costs.items():
        each = sorted(of.items(), key=lambda pair: (int(pair[0].split()[0]), pair[0]))
        dtypes[_sum(of) if len(of) > 4 else ", ".join(f"{n}x{cost}" for cost, n in each)].append(dtype)
    return " | ".join(f"{' '.join(of)}: {text}" for text, of in dtypes.items())


def counted(rows: Mapping[str, Any]) -> dict[str, str]:
    """What a sweep counted, as the budgets write it."""
    found: dict[str, str] = {}
    for name, row in rows.items():
        if isinstance(row["costs"], str):
            found[name] = row["costs"]
            continue
        ways: dict[str, dict[str, Any]] = defaultdict(dict)
        for kind, costs in row["costs"].items():
            way, _, dtype = kind.rpartition(" ")
            ways[f"{name}, {way}" if way else name][dtype] = costs
        found |= {way: _costs(costs) for way, costs in ways.items()}
    return found


def told(kind: str) -> dict[str, str]:
    """The budgets of a kind."""
    text = (HERE / f"budgets/{kind}.txt").read_text()
    return dict(line.split(": ", 1) for line in re.sub(r"\n +", " ", text).splitlines())


def write(kind: str, rows: Mapping[str, Any]) -> None:
    lines = [
        textwrap.fill(f"{name}: {text}", 120, subsequent_indent="    ", break_on_hyphens=False)
        for name, text in counted(rows).items()
    ]
    (HERE / f"budgets/{kind}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("fake_cuda", HERE / "fake_cuda.py")
    fake_cuda = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fake_cuda)
    with tempfile.TemporaryDirectory() as folder:
        fake_cuda.build(Path(folder))
        for kind in KINDS:
            write(kind, fake_cuda.answer(Path(folder), kind))
