"""The compiled core and the kernels of the wheel are the same program: tests of the tape, the kernels and the messages run on it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest

import meshtape as mt
from meshtape.arrays import native
from meshtape.arrays.core.value import COMPILED

ROOT = Path(mt.__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(COMPILED or not (ROOT / "setup.py").exists(), reason="the sources are not at hand")

# Run in a subprocess: what a user of the installed package sees.
FACTS = """
import inspect, json, pickle, traceback
import meshtape as mt
from meshtape.arrays.core import value as _core, dispatch as _dispatch
from meshtape.autodiff.tape import backward, record as recording
from meshtape.info import collect
from meshtape.parallel.execution import executor
from meshtape.parallel.transports import group

def failing(x):
    return x + mt.ones(2)  # the line that is at fault

def log_of(x):
    return mt.log(x)  # the line that makes the NaN

x = mt.asarray([[1.0, 2.0, 3.0]])
try:
    failing(x)
except ValueError as e:
    text = "".join(traceback.format_exception(e))
try:
    with mt.detect_anomaly():
        mt.grad(lambda x: mt.sum(mt.sqrt(log_of(x))))(mt.asarray([0.5]))
except mt.errors.MeshtapeError as e:
    named = str(e)
with mt.Tape() as tape:
    tape.watch(x)
    y = x * 2.0 + 1.0
    z = mt.exp(y)
lines = [e.site[0].co_name for e in tape.entries]
print(json.dumps({
    "compiled": [m.__file__.endswith((".so", ".pyd")) for m in (_core, _dispatch, backward, recording, executor, group)],
    "info": [collect()[k] for k in ("compiled_core", "native_kernels")],
    "file": mt.__file__,
    "traceback": text,
    "named": named,
    "lines": lines,
    "entries": [str(e) for e in tape.entries],
    "signatures": [str(inspect.signature(f)) for f in (mt.Tape, mt.Tape.record, mt.grad, _dispatch.apply, backward.fit)],
    "docs": [bool(inspect.getdoc(f)) for f in (mt.Tape, mt.Tape.record, _dispatch.apply, mt.Array)],
    "pickled": pickle.loads(pickle.dumps(x)).tolist(),
    "op": pickle.loads(pickle.dumps(mt.OPS["add"])) is mt.OPS["add"],
}))
"""


def build(folder: Path, hook: str, **environment: str) -> Path:
    """Call a hook of the standard's build interface on a copy of the checkout; the wheel, unpacked."""
    source, out, site = folder / "source", folder / "out", folder / "site"
    for name in ("arrays", "autodiff", "front", "parallel", "storage"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, source)
    done = subprocess.run(
        [sys.executable, "-c", f"from setuptools import build_meta; build_meta.{hook}({str(out)!r})"],
        cwd=source,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as z:
        z.extractall(site)
    return site


def facts_of(folder: Path, site: Path | None) -> dict[str, Any]:
    """What :data:`FACTS` finds in the package of ``site``, or in this one."""
    script = folder / "facts.py"
    script.write_text(FACTS)
    path = {} if site is None else {"PYTHONPATH": str(site)}
    out = subprocess.run(
        [sys.executable, str(script)], env=os.environ | path, capture_output=True, text=True, cwd=folder
    )
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as installed from a compiled wheel."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if os.name != "posix" or shutil.which(compiler) is None or not headers.exists():
        pytest.skip(f"there is no C compiler here ({compiler}), or no {headers}")
    # Optimisation takes most of a build, and is not what is tested.
    return build(tmp_path_factory.mktemp("wheel"), "build_wheel", CFLAGS="-O0", MESHTAPE_PURE="")


@pytest.mark.timeout(1500)
def test_compiled_core_shows_what_the_sources_show(site: Path, tmp_path: Path) -> None:
    found, ours = facts_of(tmp_path, site), facts_of(tmp_path, None)
    assert Path(found.pop("file")).is_relative_to(site)
    assert Path(ours.pop("file")).resolve().parents[1] == ROOT
    assert all(found.pop("compiled"))
    assert not any(ours.pop("compiled"))
    # A checkout may have the kernels: developers build them in place.
    assert (found.pop("info"), ours.pop("info")) == ([True, True], [False, native.AVAILABLE])
    # The same frames, by file and line: the compiled code names the lines that it was compiled from.
    texts = found.pop("traceback"), ours.pop("traceback")
    frames, expected = (re.findall(r'(\w+\.py)", line (\d+)', text) for text in texts)
    assert frames == expected
    assert {"facts.py", "operators.py", "dispatch.py"} <= {file for file, _ in frames}
    assert "return x + mt.ones(2)  # the line that is at fault" in texts[0]
    assert found == ours
    assert set(found["lines"]) == {"<module>"}
    assert "facts.py" in found["named"]


# The checkout itself, where pytest runs, must not come before the wheel.
RUN = """
import sys, pytest
from meshtape.arrays.core import value as _core
from meshtape.arrays import native
assert _core.COMPILED and native.AVAILABLE, (_core.__file__, native.__file__)
sys.exit(pytest.main(sys.argv[1:]))
"""


def run_tests(site: Path, *which: str) -> None:
    options = ["-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-P", "-c", RUN, *options, *which],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.timeout(1500)
def test_tape_short_ways_kernels_messages_and_training_of_the_wheel(site: Path) -> None:
    # In one process: starting one takes as long as most of these tests.
    run_tests(
        site,
        "tests/autodiff/test_tape.py",
        "tests/autodiff/test_calls.py",
        "tests/autodiff/test_compile.py",
        "tests/autodiff/test_fusion.py",
        "tests/autodiff/test_tree_classes.py",
        "tests/meshtape/test_namespaces.py",
        "tests/autodiff/test_optim.py",
        "tests/autodiff/test_writing_threads.py",
        "tests/arrays/test_short_ways.py",
        "tests/arrays/test_native.py",
        "tests/arrays/test_native_broadcasts.py",
        "tests/arrays/test_stacked_products.py",
        "tests/parallel/test_transports.py",
        # An interrupted training goes on bit for bit where kernels in C compute it, too.
        "tests/parallel/training/test_step.py",
        "tests/parallel/training/test_trainer.py",
    )


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_everything_on_the_compiled_core(site: Path) -> None:
    run_tests(site, "tests/autodiff", "tests/arrays", "tests/parallel", "tests/storage")


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("hook", "environment"),
    [
        ("build_wheel", {"CC": "no-such-compiler-anywhere", "MESHTAPE_PURE": ""}),
        ("build_wheel", {"MESHTAPE_PURE": "1"}),
        ("build_editable", {"MESHTAPE_PURE": ""}),
    ],
    ids=["no compiler", "asked for", "editable"],
)
def test_wheel_of_sources_alone(tmp_path: Path, hook: str, environment: dict[str, str]) -> None:
    site = build(tmp_path, hook, **environment)
    # What is built goes to the folder that is for it; the C that stands in the sources is our own.
    made = [p for ending in ("*.so", "*.pyd", "*.c") for p in (tmp_path / "source").rglob(ending)]
    assert {p.name for p in made if "build" not in p.parts} == {"module.c"}
    assert not [p for ending in ("*.so", "*.pyd", "*.c", "*.h") for p in site.rglob(ending)]
    if hook == "build_wheel":
        found = facts_of(tmp_path, site)
        assert Path(found["file"]).is_relative_to(site)
        assert not any(found["compiled"])
        assert found["info"] == [False, False]
