"""Programs in processes that find imported what workers import: they begin in moments, where a new one takes a second of
a processor to import it. Those whose start or end is looked at, or that users start, are new processes.

A fork server of `multiprocessing` starts them, and this file is the first that runs in each (`_begin`).
"""

from __future__ import annotations

import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


class Forked:
    """As `subprocess.Popen` of ``python *args``, of which it has what tests ask: ``args`` begin with ``-c``, ``-m`` or a
    file. ``log`` gets all that it writes; without one, ``stdout`` has its output, and ``errors`` the rest."""

    def __init__(
        self, *args: str, log: Path | None = None, errors: Path | None = None, cwd: Path | None = None
    ) -> None:
        ends: Any = multiprocessing.Pipe(duplex=False) if log is None else (None, log.open("w"))
        request = {
            "args": list(args),
            "cwd": str(cwd or Path.cwd()),
            "environ": dict(os.environ),
            "log": log and str(log),
            "errors": errors and str(errors),
        }
        target: Any = runpy.run_path
        names = {"request": request, "output": ends[1] if log is None else None}
        self._process = multiprocessing.get_context("forkserver").Process(
            target=target, args=(__file__, names, "__forked__")
        )
        self._process.start()
        ends[1].close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.stdout: io.TextIOWrapper | None = None
        if log is None:
            self.stdout = os.fdopen(os.dup(ends[0].fileno()))
            ends[0].close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        assert self.stdout is not None
        with self.stdout:
            text = self.stdout.read()
        self.wait(timeout)
        return text, None

    def send_signal(self, which: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, which)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _begin(request: dict[str, Any], output: Any) -> None:
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = None  # that of the environment
    if request["errors"]:
        os.dup2(os.open(request["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if output is None:
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
    else:
        os.dup2(output.fileno(), 1)
        output.close()
    kind, *rest = args = request["args"]
    sys.argv = ["-c", *rest[1:]] if kind in ("-c", "-m") else args
    if kind == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__forked__":
    _begin(globals()["request"], globals()["output"])
