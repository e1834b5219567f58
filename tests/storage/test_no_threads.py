"""Threads that cannot start, as in a container whose limit is reached, and threads whose caller is interrupted: the work
ends."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from meshtape.storage.base.threads import in_threads

_PROGRAM = """
import os, resource, sys
import numpy as np
import meshtape as mt
from meshtape.storage import virtual
os.chdir(sys.argv[1])
tree = {f"layers.{i}.w": np.full((200, 100), float(i), "f4") for i in range(8)}
for name in "AB":
    mt.save(name, tree)
mt.save("delta", {k: v + np.float32(1e-3) for k, v in tree.items()}, base="A")
virtual.write("mean.json", virtual.mean(["A", "B"]))
works = {
    "save": lambda: mt.save("x", tree),
    "save_async": lambda: mt.storage.save_async("y", tree).wait(),
    "load": lambda: mt.load("delta"),
    "mean": lambda: mt.load("mean.json"),
    "verify": lambda: mt.verify("A"),
    "merge": lambda: mt.merge("mean.json", "hf"),
    "zstd": lambda: mt.save("z", {"w": np.zeros((4000, 1000))}, compression="zstd"),
}
for name, work in works.items():
    if os.fork() == 0:
        os.setgid(65534), os.setuid(65533)
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        try:
            work()
            print(name, "ended", flush=True)
        except mt.errors.OutOfMemory:
            print(name, "typed", flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root alone can become another user")
def test_work_of_a_process_without_a_thread_more():
    with tempfile.TemporaryDirectory() as home:  # another user does not come to pytest's
        os.chmod(home, 0o777)
        command = [sys.executable, "-c", f"import os; os.umask(0)\n{_PROGRAM}", home]
        done = subprocess.run(command, capture_output=True, text=True)
    said = dict(line.split() for line in done.stdout.splitlines())
    assert list(said) == ["save", "save_async", "load", "mean", "verify", "merge", "zstd"], done.stderr
    assert [said[n] for n in ("load", "mean", "verify")] == ["ended"] * 3
    assert said["save_async"] == said["merge"] == "typed"


def test_ctrl_c_begins_no_more_calls():
    begun, released = [], threading.Event()

    def work(i):
        begun.append(i)
        if i == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        if i < 2:
            released.wait()
        time.sleep(0.001)

    def interrupt(*said):
        released.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            in_threads(work, range(10_000), 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(begun) < 10_000
