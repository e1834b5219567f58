"""What a step costs by the number of worker processes, beside dask.array on the same ones and an all-reduce of
PyTorch's gloo: ``python benchmarks/processes.py``.

The scheduler is a process of its own, so that its processor time can be read: what it takes a call is beyond what it
takes when nothing happens. Messages and bytes of a rank are those of the collectives, as a forecast counts them; a step
is one message more to each worker.
"""

from __future__ import annotations

import timing  # noqa: F401  # first: it sets the number of threads

# isort: split
import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client
from gloo import gloo

import meshtape as mt
from meshtape.parallel.dask.cluster import SELDOM

EACH = 128  # numbers a rank


@contextlib.contextmanager
def cluster(workers: int, as_ours: bool = True) -> Iterator[tuple[Client, int]]:
    """A client of so many workers of one thread, and the number of the scheduler's process. ``as_ours``: they look at
    themselves as seldom as those of ``local_cluster``."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        file = ["--scheduler-file", f"{folder}/scheduler.json", "--no-dashboard"]
        seldom = {f"DASK_{key.upper().replace('.', '__')}": ours for key, (_, ours) in SELDOM.items()}
        environment = {**os.environ, **(seldom if as_ours else {})}

        def start(*args: str) -> int:
            quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            p = subprocess.Popen([sys.executable, "-m", "dask", *args, *file], env=environment, **quiet)
            stack.callback(p.wait, 60)
            stack.callback(p.kill)
            return p.pid

        scheduler = start("scheduler", "--port", "0")
        for _ in range(workers):
            start("worker", "--nthreads", "1", "--no-nanny", "--local-directory", folder)
        with Client(scheduler_file=f"{folder}/scheduler.json", set_as_default=False, timeout=120) as client:
            client.wait_for_workers(workers, timeout=300)
            yield client, scheduler


def processor_seconds(pid: int) -> float:
    """Of a process since it started."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


class Cost:
    """Seconds of a call, and of the scheduler's processor for it."""

    def __init__(self, call: Callable[[], Any], scheduler: int, idle: float, calls: int) -> None:
        for _ in range(3):
            call()
        times, before, begun = [], processor_seconds(scheduler), time.perf_counter()
        for _ in range(calls):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        took = time.perf_counter() - begun
        self.seconds = statistics.median(times)
        self.scheduler = max(0.0, (processor_seconds(scheduler) - before - idle * took) / calls)


def idle_rate(scheduler: int, seconds: float) -> float:
    """Processor seconds that the scheduler takes in a second in which nothing happens."""
    before = processor_seconds(scheduler)
    time.sleep(seconds)
    return (processor_seconds(scheduler) - before) / seconds


def a_second(i: int) -> int:
    time.sleep(1.0)
    return i


def measured(workers: int, calls: int, as_ours: bool) -> list[str]:
    """A row of the table."""
    import dask.array as da

    host = np.ones(EACH * workers)
    with cluster(workers, as_ours) as (client, scheduler), mt.Mesh({"ranks": workers}, client=client) as mesh:
        x = mt.compute(mt.distribute(host, mesh, ranks=mt.Shard(0)) + 0.0)
        step = mt.compile(lambda x: mt.sum(x * 2.0))

        def one() -> float:
            return float(step(x))

        def row() -> float:
            for _ in range(20):
                y = step(x)
            return float(y)

        dx = client.persist(da.from_array(host, chunks=EACH))

        def theirs() -> Any:
            return (dx * 2.0).sum().compute(scheduler=client)

        assert one() == row() == float(theirs())
        idle = idle_rate(scheduler, 5.0)
        ours = Cost(one, scheduler, idle, calls)
        rows = Cost(row, scheduler, idle, max(3, calls // 10))
        dask = Cost(theirs, scheduler, idle, max(10, calls // 4))
        traffic = mt.forecast(step, x, device="CPU-core", links={"ranks_per_host": workers})
        sent = [traffic.rank(r).within for r in range(workers)]
        tasks = client.map(a_second, range(1000), pure=False)
        time.sleep(2.0)
        beside = Cost(one, scheduler, 0.0, max(10, calls // 4)).seconds
        client.cancel(tasks, force=True)
        return [
            str(workers),
            f"{ours.seconds * 1e3:.2f}",
            f"{rows.seconds / 20 * 1e3:.2f}",
            f"{beside * 1e3:.2f}",
            f"{dask.seconds * 1e3:.2f}",
            peers(workers, calls),
            f"{ours.scheduler * 1e3:.2f}",
            f"{dask.scheduler * 1e3:.2f}",
            "1",
            _range([link.messages for link in sent]),
            _range([link.sent for link in sent]),
        ]


def peers(ranks: int, calls: int) -> str:
    """Milliseconds of an all-reduce of a number in gloo's own processes; a dash without PyTorch."""
    with gloo(ranks) as g:
        if g is None:
            return "-"
        g.run("all_reduce", 8, 20)
        begun = time.perf_counter()
        g.run("all_reduce", 8, calls)
        return f"{(time.perf_counter() - begun) / calls * 1e3:.2f}"


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


COLUMNS = (
    "workers",
    "a step, waited for, ms",
    "20 in a row, a step, ms",
    "a step beside 1,000 one-second tasks, ms",
    "dask.array, ms",
    "an all-reduce alone, gloo, ms",
    "scheduler a step, ms",
    "scheduler for dask.array, ms",
    "messages from the client to a worker",
    "messages of a rank",
    "bytes of a rank",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--defaults", action="store_true", help="leave Dask's own intervals to scheduler and workers")
    args = parser.parse_args()
    print(f"A compiled sum of {EACH} numbers a rank, on {os.cpu_count()} cores.\n")
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for n in args.workers:
        print("| " + " | ".join(measured(n, args.calls, not args.defaults)) + " |", flush=True)


if __name__ == "__main__":
    main()
