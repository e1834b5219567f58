"""Work that comes late: in a thread that outlives the main thread, and in hooks of ``atexit``, where Python begins no
call in a pool of threads any more."""

import subprocess
import sys

import numpy as np
import pytest

import meshtape as mt

pytestmark = pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="Python 3.12 begins no thread at all then")

_HEAD = """
import atexit, os, sys, threading
import numpy as np
import meshtape as mt
os.chdir(sys.argv[1])
tree = {f"w{i}": np.full((500, 700), float(i)) for i in range(6)}

def attempt(name, work):
    try:
        found = work()
        print(name, found if isinstance(found, int) else "ended", flush=True)
    except BaseException as e:
        print(name, repr(e), flush=True)
"""

_USED_BEFORE = """
mt.save("source", tree)
manager = mt.CheckpointManager("run", keep=None, asynchronous=True)
manager.save(1, tree)
snapshots = mt.storage.Snapshots("snapshots/{step}")
large = mt.asarray(np.ones((2000, 1000), "f4"))
linear = {"merge_method": "linear", "models": [{"model": "merged", "parameters": {"weight": 1.0}}]}

def served():
    with mt.storage.serve("source") as server:
        return len(mt.load(server.url + "safetensors"))

works = {
    "merge": lambda: mt.merge("source", "merged", threads=2),
    "convert": lambda: mt.convert("source", "converted", format="zarr", compression="zstd"),
    "blend": lambda: mt.storage.blend(linear, "blended", threads=2),
    "diff": lambda: mt.storage.diff("source", "merged"),
    "verify": lambda: mt.verify("converted"),
    "compressed": lambda: mt.save("zstd", {"w": np.ones((3000, 1000))}, compression="zstd"),
    "save_async": lambda: mt.save_async("plain", tree).done(),
    "then": lambda: mt.save_async("then", tree, then=lambda: mt.save_async("second", tree)).done(),
    "manager": lambda: manager.save(2, tree).done(),
    "snapshots": lambda: snapshots.begin(1, tree) and snapshots.finalize().arrays,
    "serve": served,
    "softmax": lambda: mt.nn.softmax(large),
    "prefetch": lambda: sum(mt.prefetch([1, 2])),
}

def late():
    threading.main_thread().join()
    for name, work in works.items():
        attempt(name, work)
    mt.save_async("source/meshtape.json/late", tree)  # in the place of a file

threading.Thread(target=late).start()

def hook():
    attempt("hook", lambda: manager.save(3, tree).done())
    attempt("same", lambda: mt.save_async("plain", tree, overwrite=True).wait().arrays)
    mt.save_async("source/meshtape.json/hook", tree)

atexit.register(hook)
"""


def _run(program, where):
    done = subprocess.run(
        [sys.executable, "-c", program, str(where)], check=False, capture_output=True, text=True, timeout=120
    )
    return dict(line.split(" ", 1) for line in done.stdout.splitlines()), done.stderr


def test_work_after_the_end_of_the_main_thread(tmp_path):
    said, errors = _run(_HEAD + _USED_BEFORE, tmp_path)
    ended = ("merge", "convert", "blend", "diff", "verify", "compressed", "softmax")
    values = {"serve": "6", "snapshots": "6", "same": "6", "prefetch": "3"}
    saved = dict.fromkeys(("save_async", "then", "manager", "hook"), "True")
    assert said == dict.fromkeys(ended, "ended") | saved | values, errors
    steps = ("run/step-00000002", "run/step-00000003", "snapshots/1")
    for path in ("plain", "then", "second", *steps, "merged", "blended", "converted"):
        assert len(mt.load(tmp_path / path)) == 6, path
    for path in ("late", "hook"):
        assert f"source/meshtape.json/{path} cannot be written" in errors, errors
    assert not [p for p in tmp_path.rglob("*") if ".part" in p.name or ".tmp" in p.name]


def test_the_first_save_in_the_background_may_be_at_exit(tmp_path):
    hook = "atexit.register(lambda: attempt('hook', lambda: mt.save_async('late', tree).done()))"
    said, errors = _run(_HEAD + hook, tmp_path)
    assert (said, errors) == ({"hook": "True"}, "")
    assert np.asarray(mt.load(tmp_path / "late")["w5"]).max() == 5
