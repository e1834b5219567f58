"""The command for a day with a GPU, ``benchmarks/gpu_day.sh``, run with an interpreter that answers for pip, pytest and
the benchmark; and its report."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SCRIPT = BENCHMARKS / "gpu_day.sh"
BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("bash", "timeout", "tar", "sed")), reason="no shell as Linux has it"
)

PYTHON = """#!{executable} -IS
import json, os, sys
from pathlib import Path
given, folders = sys.argv[1:], os.environ.get("PYTHONPATH", "").split(":")
if given[:2] == ["-m", "pip"]:
    Path(given[given.index("--target") + 1]).mkdir()
elif given[:2] == ["-m", "pytest"]:
    if "gpu_day_plain_memory" in given and not Path(folders[0], "gpu_day_plain_memory.py").exists():
        sys.exit("no plugin")
    (file,) = [g for g in given if g.startswith("tests/")]
    if not Path(file).exists():
        sys.exit("no sources")
    kind = Path(file).stem.removeprefix("test_")
    cases = {{"kernels": ["", "<failure message='it is wrong&#10;in two lines'/>"], "programs": ["<skipped message='no memory'/>"]}}
    cases = "".join(f"<testcase classname='c' name='n{{i}}'>{{c}}</testcase>" for i, c in enumerate(cases.get(kind, ["", ""])))
    Path(given[given.index("--junitxml") + 1]).write_text(f"<testsuites><testsuite>{{cases}}</testsuite></testsuites>")
    print("tests of", kind, "by", len([g for g in given if g == "-n"]), "options")
    sys.exit(kind == "kernels")
elif given[0] == "benchmarks/gpu.py":
    Path(given[given.index("--json") + 1]).write_text(json.dumps({rows}))
elif given[:2] == ["gpu_day_report.py", "config"]:
    print("a device of the test")
else:
    os.execv(sys.executable, [sys.executable, "-IS", *given])
"""
"""The interpreter, which is itself for all that ``gpu_day_report.py`` does but for looking at the device."""

ROWS = {
    "device": "a device",
    "copy": 2e12,
    "dropped": ["a slow one"],
    "checks": [{"name": "twice the work", "ok": False}],
    "rows": [
        {"name": "softmax", "seconds": 2e-6, "by": "graph", "share": 0.93, "target": 0.9, "met": True,
         "peers": {"torch": {"ratio": 0.5}, "jax": {"error": "is missing"}}},
        {"name": "layer_norm", "error": "RuntimeError: this\none fails"},
    ],
    "host": [{"name": "a + a", "us": {"ours": 7.0}, "target": "2 us more"}],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As ``collect`` leaves it, but for the wheels."""
    folder = tmp_path / "day"
    (folder / "wheels").mkdir(parents=True)
    for name in ("gpu_day.sh", "gpu_day_report.py"):
        shutil.copy(BENCHMARKS / name, folder)
    with tarfile.open(folder / "sources.tar.gz", "w:gz") as sources:
        sources.add(
            Path(__file__).parents[2] / "gpu", "tests/gpu", filter=lambda f: None if "contract" in f.name else f
        )
    (folder / "commit").write_text("0123abc\n")
    return folder


def run(folder: Path, *arguments: str, processors: int = 2, sanitizer: bool = False, **env: str) -> Any:
    tools = folder.parent / f"tools-{processors}-{sanitizer}"
    if not tools.exists():
        tools.mkdir()
        scripts = {
            "nproc": f"#!{BASH}\necho {processors}\n",
            "python": PYTHON.format(executable=sys.executable, rows=ROWS),
        }
        if sanitizer:
            scripts["compute-sanitizer"] = f'#!{BASH}\nshift 6\n"$@"\n'
        for name, text in scripts.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tools}:/usr/bin:/bin", "GPU_DAY_PYTHON": str(tools / "python"), **env}
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
        **dict.fromkeys(("transfers", "meshes", "nccl", "calls", "derivatives", "layouts"), not_asked),
        "benchmark": "passed",
        "memcheck": "did not run: compute-sanitizer is not on the path",
        "racecheck": not_asked,
    }
    text = (out / "report.md").read_text()
    assert text.startswith("# A day with a GPU: 3 of 13 parts passed\n\nCommit 0123abc.\n")
    for line in (
        "| kernels | failed (status 1) | 1, 1, 0 | ",
        "* c::n1: `it is wrong`\n",
        "* 1 skipped: no memory\n",
        "**The clock is not to be believed**: twice the work.\n",
        "| softmax | 2.0 | graph | 93% | 90% met | torch 0.50, jax: is missing |\n",
        "| layer_norm | failed | | | | RuntimeError: this one fails |\n",
        "* a + a: {'ours': 7.0} (target: 2 us more)\n",
        "a device of the test\n",
    ):
        assert line in text
    with tarfile.open(out / "logs.tar.gz") as logs:
        assert {"./kernels.log", "./kernels.xml", "./benchmark.rows.json", "./commit"} <= set(logs.getnames())
    rest = ("transfers", "meshes", "nccl", "calls", "derivatives", "layouts", "memcheck", "racecheck")
    done = run(folder, "run", "out", *rest, processors=8, sanitizer=True)
    assert done.returncode == 1
    assert sorted({*verdicts(out).values()}) == ["failed (status 1)", "passed", "ran no test"]
    assert [name for name, verdict in verdicts(out).items() if verdict == "failed (status 1)"] == [
        "kernels", "memcheck", "racecheck"  # whose tests are those of the kernels
    ]  # fmt: skip
    options = [(out / f"parts/{name}.log").read_text() for name in ("calls", "meshes")]
    assert options == ["tests of every_op by 1 options\n", "tests of meshes by 0 options\n"]


def test_all_that_passes_is_success(folder: Path) -> None:
    script = (folder / "gpu_day.sh").read_text()
    (folder / "gpu_day.sh").write_text(
        re.sub(r"^PARTS=.*", "PARTS=(config arrays calls benchmark)", script, flags=re.M)
    )
    done = run(folder, "run", "out")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "# A day with a GPU: 4 of 4 parts passed")


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


def test_a_part_at_its_limit_has_not_passed(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("gpu_day_report", BENCHMARKS / "gpu_day_report.py")
    report: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "commit").write_text("0123abc")
    for name, status, seconds in (("arrays", 0, 540), ("nccl", 139, 3)):
        (parts / f"{name}.log").write_text("the last words")
        report.note(str(tmp_path), name, str(status), str(seconds), "540", "a command")
    assert report.report(str(tmp_path), "arrays", "nccl") == 1
    assert verdicts(tmp_path) == {"arrays": "stopped at its limit of 540 s", "nccl": "failed (status 139)"}
    assert (tmp_path / "report.md").read_text().count("the last words") == 2
