"""Ctrl-C while the first save imports what it needs: it ends that save, and the next one works."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import threading

import pytest

from meshtape.storage.base.waiting import uninterrupted

_PROGRAM = """
import signal, sys
import numpy as np
import meshtape as mt

name, where = sys.argv[1:]

class Interrupts:
    def find_spec(self, found, path=None, target=None):
        if found == name:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
tree = {"w": np.arange(6.0)}
try:
    mt.save(where + "1", tree, **options)
except KeyboardInterrupt:
    print("interrupted")
print(mt.save(where + "2", tree, **options).path and mt.load(where + "2")["w"].tolist())
"""


@pytest.mark.parametrize("name", ["zarr.core", "zarr.storage", "asyncio.base_events", "yaml.error", "numcodecs.zstd"])
def test_the_save_after_one_that_was_interrupted(name, tmp_path):
    program = _PROGRAM.replace("**options", "compression='zstd'")
    done = subprocess.run([sys.executable, "-c", program, name, str(tmp_path / "c")], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["interrupted", "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]"], done.stderr


@pytest.mark.skipif(importlib.util.find_spec("icechunk") is None, reason="icechunk is not installed")
@pytest.mark.parametrize("name", ["icechunk.session", "icechunk._icechunk_python"])
def test_a_repository_after_a_save_that_was_interrupted(name, tmp_path):
    program = _PROGRAM.replace(", **options", "")
    where = f"icechunk://{tmp_path}/c"
    done = subprocess.run([sys.executable, "-c", program, name, where], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["interrupted", "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]"], done.stderr


def test_the_signal_comes_after_the_block_and_goes_to_its_handler():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *said: seen.append("handled"))
    try:
        with uninterrupted(), uninterrupted():
            signal.raise_signal(signal.SIGINT)
            seen.append("imported")
        assert seen == ["imported", "handled"]
        signal.raise_signal(signal.SIGINT)
        assert seen == ["imported", "handled", "handled"]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with uninterrupted():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_leave_the_handler_as_it_is():
    before = signal.getsignal(signal.SIGINT)

    def inside():
        with uninterrupted():
            found.append(signal.getsignal(signal.SIGINT))

    found: list = []
    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found == [before]
