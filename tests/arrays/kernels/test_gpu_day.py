"""The command for a day with a GPU, ``benchmarks/gpu_day.sh``, run with an interpreter that answers for pip, pytest and
the benchmark; and its report."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SCRIPT = BENCHMARKS / "gpu_day.sh"
BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("bash", "timeout", "tar", "sed")), reason="no shell as Linux has it"
)

PYTHON = """#!{executable} -sES
import json, os, sys
from pathlib import Path
given, folders = sys.argv[1:], os.environ.get("PYTHONPATH", "").split(":")
if given[:2] == ["-m", "pip"]:
    Path(given[given.index("--target") + 1]).mkdir()
elif given[:2] == ["-m", "pytest"]:
    if "gpu_day_plain_memory" in given and not Path(folders[0], "gpu_day_plain_memory.py").exists():
        sys.exit("no plugin")
    files = [g for g in given if g.startswith("tests/")]
    if not all(Path(f).exists() for f in files):
        sys.exit("no sources")
    kind = "sanitized" if "gpu_day_plain_memory" in given else Path(files[0]).stem.removeprefix("test_")
    cases = {{"kernels": ["", "<failure message='it is wrong&#10;in two lines'/>"], "programs": ["<skipped message='no memory'/>"]}}
    cases = "".join(f"<testcase classname='c' name='n{{i}}'>{{c}}</testcase>" for i, c in enumerate(cases.get(kind, ["", ""])))
    Path(given[given.index("--junitxml") + 1]).write_text(f"<testsuites><testsuite>{{cases}}</testsuite></testsuites>")
    print("tests of", kind, "by", len([g for g in given if g == "-n"]), "options")
    sys.exit(kind == "kernels")
elif given[0] == "benchmarks/gpu.py":
    Path(given[given.index("--json") + 1]).write_text(os.environ["ROWS"])
elif given[:2] == ["benchmarks/gpu_day_report.py", "config"]:
    print("a device of the test")
else:
    os.execv(sys.executable, [sys.executable, "-sES", *given])
"""
"""The interpreter, which is itself for all that ``gpu_day_report.py`` does but for looking at the device."""

GOOD: dict[str, Any] = {
    "device": "a device",
    "copy": 2e12,
    "dropped": [],
    "checks": [{"name": "twice the work", "ok": True}],
    "rows": [
        {"name": "softmax", "seconds": 2e-6, "by": "graph", "share": 0.93, "targets": {"90% of the copy": True},
         "met": True, "peers": {"torch": {"ratio": 0.5}}},
    ],
    "host": [{"name": "a + a", "us": {"ours": 7.0}, "targets": {"CuPy + 2 us": True}, "met": True}],
}  # fmt: skip
SLOW = GOOD["rows"][0] | {"name": "slow", "share": 0.01, "targets": {"90% of the copy": False}, "met": False}
ALONE = GOOD["rows"][0] | {
    "name": "alone",
    "targets": {"at most 1.00 of torch": None},
    "met": None,
    "reason": "no torch",
}
BAD = {
    # What is added to a run in which all is good, its status, and the line that tells it.
    "a row that failed": ({"rows": [{"name": "norm", "error": "RuntimeError: this\none"}]}, 1, "failed: norm: RuntimeError: this one"),
    "a peer that failed": ({"rows": [SLOW | {"targets": {}, "peers": {"jax": {"error": "no memory"}}}]}, 1, "failed: slow, jax: no memory"),
    "a line that failed": ({"host": [{"name": "a step", "error": "it is wrong"}]}, 1, "failed: a step: it is wrong"),
    "the decoder's peer": ({"host": [{"name": "a step", "us": {}, "targets": {}, "peers": {"torch": {"error": "no"}}}]}, 1, "failed: a step, torch: no"),
    "a clock that is off": ({"checks": [{"name": "half the work", "ok": False}]}, 1, "failed: the clock: half the work"),
    "the watch": ({"stopped": "the time was over"}, 1, "failed: stopped: the time was over"),
    "a row's target": ({"rows": [SLOW]}, 2, "missed: slow: 90% of the copy"),
    "a line's target": ({"host": [GOOD["host"][0] | {"targets": {"CuPy + 2 us": False}}]}, 2, "missed: a + a: CuPy + 2 us"),
    "a row that was dropped": ({"dropped": ["a slow one"]}, 2, "dropped: a slow one"),
    "a peer that was dropped": ({"rows": [ALONE | {"peers": {"torch": {"dropped": "no time"}}}]}, 2, "dropped: alone, torch"),
    "nothing to compare with": ({"rows": [ALONE]}, 0, "verdict: all targets are met (0 failed, 0 missed, 0 dropped, 1 not comparable)"),
}  # fmt: skip


def with_more(more: dict[str, Any]) -> dict[str, Any]:
    return GOOD | {key: GOOD[key] + value if isinstance(value, list) else value for key, value in more.items()}


SANITIZER = """#!{bash}
tool=$2
shift 6
"$@" || exit
case $tool in
memcheck | synccheck) echo "========= ERROR SUMMARY: 0 errors" ;;
racecheck) printf '========= RACECHECK SUMMARY: %d hazards displayed\\n' 0 3 ;;
esac
"""
"""With hazards in one of two processes, and nothing said of what was not initialised."""

REST = (
    "transfers",
    "meshes",
    "nccl",
    "training",
    "spilling",
    "small_calls",
    "refusals",
    "headers",
    "calls",
    "derivatives",
    "layouts",
)
ROWS = with_more(
    {key: value for name in ("a row that failed", "a clock that is off") for key, value in BAD[name][0].items()}
    | {"dropped": ["a slow one"], "host": [{"name": "a step", "error": "it is wrong"}]}
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As ``collect`` leaves it, but for the wheels."""
    folder = tmp_path / "day"
    (folder / "wheels").mkdir(parents=True)
    shutil.copy(SCRIPT, folder)
    with tarfile.open(folder / "sources.tar.gz", "w:gz") as sources:
        sources.add(Path(__file__).parents[2] / "gpu", "tests/gpu")
        for name in ("gpu_day_report.py", "gpu_verdict.py"):
            sources.add(BENCHMARKS / name, f"benchmarks/{name}")
    (folder / "commit").write_text("0123abc\n")
    return folder


def run(folder: Path, *arguments: str, processors: int = 2, sanitizer: bool = False, **env: str) -> Any:
    tools = folder.parent / f"tools-{processors}-{sanitizer}"
    if not tools.exists():
        tools.mkdir()
        scripts = {
            "nproc": f"#!{BASH}\necho {processors}\n",
            "python": PYTHON.format(executable=sys.executable),
        }
        if sanitizer:
            scripts["compute-sanitizer"] = SANITIZER.format(bash=BASH)
        for name, text in scripts.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
    given = {"PATH": f"{tools}:/usr/bin:/bin", "GPU_DAY_PYTHON": str(tools / "python"), "ROWS": json.dumps(ROWS)}
    env = {**os.environ, **given, **env}
    command = [BASH, folder / "gpu_day.sh", *arguments]
    return subprocess.run(command, cwd=folder.parent, env=env, capture_output=True, text=True, timeout=120, check=False)


def verdicts(out: Path) -> dict[str, str]:
    report = json.loads((out / "report.json").read_text())
    assert report["commit"] == "0123abc"
    return {part["part"]: part["verdict"] for part in report["parts"]}


def test_the_script_is_one() -> None:
    assert subprocess.run([BASH, "-n", SCRIPT], capture_output=True, text=True, check=False).stderr == ""
    told = subprocess.run([BASH, SCRIPT], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout.count("gpu_day.sh")) == (2, 2)


def test_each_part_has_a_verdict_and_one_report_gathers_them(folder: Path) -> None:
    """Also those of an earlier call with the same folder; a part that was not asked for has not passed."""
    out = folder.parent / "out"
    done = run(folder, "run", "out", "config", "arrays", "kernels", "programs", "benchmark", "memcheck")
    assert done.returncode == 1, done.stderr
    not_asked = "did not run: it was not asked for"
    assert verdicts(out) == {
        "config": "passed",
        "arrays": "passed",
        "kernels": "failed (status 1)",
        "programs": "ran no test",
        **dict.fromkeys(REST, not_asked),
        "benchmark": "failed (status 0): 3 of the benchmark",
        "memcheck": "did not run: compute-sanitizer is not on the path",
        **dict.fromkeys(("racecheck", "initcheck", "synccheck"), not_asked),
    }
    text = (out / "report.md").read_text()
    assert text.startswith("# A day with a GPU: 2 of 20 parts passed\n\nCommit 0123abc.\n")
    for line in (
        "| kernels | failed (status 1) | 1, 1, 0 | ",
        "* c::n1: `it is wrong`\n",
        "* 1 skipped: no memory\n",
        "**The clock is not to be believed**: half the work.\n",
        "* verdict: something failed (3 failed, 0 missed, 1 dropped, 0 not comparable)\n* failed: norm: RuntimeError: this one\n",
        "* dropped: a slow one\n",
        "| softmax | 2.0 | graph | 93% | 90% of the copy ✓ | torch 0.50 |\n",
        "| norm | failed | | | | |\n",
        "* a + a: ours 7.0 us (targets: CuPy + 2 us ✓)\n* a step: failed ✗: it is wrong\n",
        "a device of the test\n",
    ):
        assert line in text
    with tarfile.open(out / "logs.tar.gz") as logs:
        assert {"./kernels.log", "./kernels.xml", "./benchmark.rows.json", "./commit"} <= set(logs.getnames())
    sanitized = {
        "memcheck": "passed",
        "racecheck": "failed (status 86)",
        "initcheck": "failed (status 86)",
        "synccheck": "passed",
    }
    done = run(folder, "run", "out", *REST, *sanitized, processors=8, sanitizer=True)
    assert done.returncode == 1
    assert verdicts(out) == {
        **dict.fromkeys(("config", "arrays", *REST), "passed"),
        "kernels": "failed (status 1)",
        "programs": "ran no test",
        "benchmark": "failed (status 0): 3 of the benchmark",
        **sanitized,
    }
    options = [(out / f"parts/{name}.log").read_text() for name in ("calls", "meshes", "memcheck")]
    assert options[:2] == ["tests of every_op by 1 options\n", "tests of meshes by 0 options\n"]
    assert options[2].startswith("tests of sanitized by 1 options\n")


def test_all_that_passes_is_success(folder: Path) -> None:
    script = (folder / "gpu_day.sh").read_text()
    (folder / "gpu_day.sh").write_text(
        re.sub(r"^PARTS=.*", "PARTS=(config arrays calls benchmark)", script, flags=re.M)
    )
    done = run(folder, "run", "out", ROWS=json.dumps(GOOD))
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "# A day with a GPU: 4 of 4 parts passed")
    done = run(folder, "run", "out", "benchmark", ROWS=json.dumps(with_more({"rows": [SLOW, ALONE]})))
    assert (done.returncode, done.stdout.splitlines()[0]) == (1, "# A day with a GPU: 3 of 4 parts passed")
    assert verdicts(folder.parent / "out")["benchmark"] == "1 targets missed, 0 rows or peers dropped"
    text = (folder.parent / "out/report.md").read_text()
    assert "* missed: slow: 90% of the copy\n" in text
    assert "| alone | 2.0 | graph | 93% | at most 1.00 of torch – | torch 0.50 |\n" in text


def test_parts_that_no_time_is_left_for_are_named(folder: Path) -> None:
    done = run(folder, "run", "out", "config", "arrays", GPU_DAY_SECONDS="20")
    assert done.returncode == 1
    found = verdicts(folder.parent / "out")
    assert [found[n] for n in ("config", "arrays")] == ["did not run: no time was left of GPU_DAY_SECONDS=20"] * 2


def test_what_it_cannot_do_is_told(folder: Path) -> None:
    done = run(folder, "run", "out", "cublas")
    assert (done.returncode, "there is no part cublas: config arrays" in done.stderr) == (2, True)
    (folder / "sources.tar.gz").unlink()
    done = run(folder, "run")
    assert (done.returncode, "run the copy in the collected folder" in done.stderr) == (2, True)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.mark.parametrize("name", BAD)
def test_the_benchmark_is_judged(modules: Callable[[str], Any], name: str) -> None:
    verdict, (more, status, line) = modules("gpu_verdict"), BAD[name]
    assert verdict.judge(GOOD)["status"] == 0
    found = verdict.judge(with_more(more))
    assert (found["status"], line in verdict.told(found)) == (status, True)


def test_what_measured_nothing_has_not_passed(modules: Callable[[str], Any]) -> None:
    verdict = modules("gpu_verdict")
    nothing = {"rows": [], "host": [], "dropped": [], "checks": []}
    assert verdict.judge(nothing)["failed"] == ["the clock was not checked", "nothing was measured"]
    dropped = verdict.judge(nothing | {"checks": GOOD["checks"], "dropped": ["one", "two"]})
    assert (dropped["status"], dropped["failed"], dropped["dropped"]) == (2, [], ["one", "two"])


def test_targets_come_to_one_answer(modules: Callable[[str], Any]) -> None:
    of = modules("gpu_verdict").of_targets
    assert of({"a": True}, "why") == {"targets": {"a": True}, "met": True}
    assert of({"a": None, "b": False}, "why")["met"] is False
    assert of({"a": None, "b": True}, "why") == {"targets": {"a": None, "b": True}, "met": None, "reason": "why"}
    assert of({}) == {"targets": {}, "met": None, "reason": "it has no target"}


def test_a_part_at_its_limit_has_not_passed(tmp_path: Path, modules: Callable[[str], Any]) -> None:
    report = modules("gpu_day_report")
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "commit").write_text("0123abc")
    ended = {"arrays": (0, 540), "nccl": (139, 3), "benchmark": (0, 3)}
    for name, (status, seconds) in ended.items():
        (parts / f"{name}.log").write_text("the last words")
        report.note(str(tmp_path), name, str(status), str(seconds), "540", "a command")
    assert report.report(str(tmp_path), *ended) == 1
    assert verdicts(tmp_path) == {
        "arrays": "stopped at its limit of 540 s",
        "nccl": "failed (status 139)",
        "benchmark": "left no rows",
    }
    assert (tmp_path / "report.md").read_text().count("the last words") == 3
