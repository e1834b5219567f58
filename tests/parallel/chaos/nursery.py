"""The process whose children are the scheduler and the workers: they start within moments, as all that they import is
there before.

It reads lines of JSON, and answers each with the number of a new process. All of them end with it. It is itself a fork
of the process that asks, before that has threads.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import json
import os
import signal
import sys
from pathlib import Path
from typing import IO, Any

import dask
import dask.array
import spaces
from distributed import Scheduler, Worker
from run import BRIEF

import meshtape as mt
from meshtape.parallel.dask import runtime, worker
from meshtape.parallel.dask.scheduler_plugin import MeshtapeScheduler
from meshtape.parallel.gangs import gang
from meshtape.parallel.mesh import dask_export, dask_interop
from meshtape.parallel.transforms import stream_store

_IMPORTED = (
    mt.save,
    dask.array,
    dask_interop,
    dask_export,
    runtime,
    worker,
    gang,
    stream_store,
    MeshtapeScheduler,
)


async def schedule(spec: dict[str, Any]) -> None:
    async with Scheduler(host=spec["host"], port=0, dashboard=False) as s:
        Path(spec["file"]).write_text(s.address)
        await s.finished()


async def work(spec: dict[str, Any]) -> None:
    options: dict[str, Any] = {"host": spec["host"], "dashboard": False, "local_directory": spec["folder"]}
    async with Worker(spec["scheduler"], nthreads=1, name=spec["name"], memory_limit="2GiB", **options) as w:
        await w.finished()


def child(spec: dict[str, Any], gate: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with its parent
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if spec["network"]:
        spaces.unshare(spaces.NEWNET)
    os.write(gate, b".")
    os.close(gate)
    os.kill(os.getpid(), signal.SIGSTOP)  # until its network is there
    os.environ["TMPDIR"] = spec["folder"]
    try:
        asyncio.run((schedule if spec["kind"] == "scheduler" else work)(spec))
    finally:
        os._exit(0)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dask.config.set({"distributed.worker.memory.terminate": False, "distributed.admin.tick.interval": "500ms"})
    dask.config.set({"distributed.worker.profile.interval": "100ms"})
    dask.config.set(BRIEF)  # a worker that waits for another does so by its own limits
    print("ready", flush=True)
    for line in sys.stdin:
        spec = json.loads(line)
        ready, gate = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ready)
            child(spec, gate)
        os.close(gate)
        os.read(ready, 1)
        os.close(ready)
        print(pid, flush=True)


def begun() -> tuple[int, IO[str], IO[str]]:
    """Its number, and where it is asked and answers."""
    (asked, asks), (answers, answered) = os.pipe(), os.pipe()
    if pid := os.fork():
        os.close(asked)
        os.close(answered)
        return pid, os.fdopen(asks, "w"), os.fdopen(answers)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(asked, 0)
        os.dup2(answered, 1)
        for fd in (asked, asks, answers, answered):
            os.close(fd)
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
        main()
    finally:
        os._exit(0)
