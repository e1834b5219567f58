"""Work that takes longer than a page: it runs in the background, tells how far it is, and can be stopped."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ....arrays.core.errors import CheckpointError, MeshtapeError

_KEPT = 32


class Stopped(Exception):
    """Raised inside a job by its own progress call when the user has stopped it."""


class Job:
    """One piece of work. ``work(job)`` is called in a thread; it calls `advance`, and may set ``result`` before it ends."""

    def __init__(self, title: str, work: Callable[[Job], Any]) -> None:
        self.id = secrets.token_urlsafe(12)
        self.title = title
        self.done = 0
        self.total = 0
        self.doing = ""
        self.result: Any = None
        self.error = ""
        self.state = "waiting"
        self.started = time.monotonic()
        self._ended: float | None = None
        self._work = work
        self._stop = threading.Event()

    @property
    def seconds(self) -> float:
        return (self._ended or time.monotonic()) - self.started

    @property
    def running(self) -> bool:
        return self.state in ("waiting", "running")

    @property
    def share(self) -> float:
        return min(1.0, self.done / self.total) if self.total else 0.0

    def advance(self, done: int, total: int, doing: str = "") -> None:
        """Tell how far the work is; ends it when it was stopped."""
        self.done, self.total = done, total
        if doing:
            self.doing = doing
        if self._stop.is_set():
            raise Stopped

    def stop(self) -> None:
        """Ask the work to end at its next `advance`. Its results so far stay."""
        self._stop.set()

    def run(self) -> None:
        """Do the work, in the thread of the jobs."""
        self.state = "running"
        self.started = time.monotonic()
        try:
            if self._stop.is_set():
                raise Stopped
            self._work(self)
            self.state = "done"
        except Stopped:
            self.state = "stopped"
        except (MeshtapeError, OSError) as e:
            self.state, self.error = "failed", f"{type(e).__name__}: {e}"
        except Exception as e:  # whatever a hostile file provokes must show on the page, not vanish in a thread
            self.state, self.error = "failed", f"unexpected {type(e).__name__}: {e}"
        finally:
            self._ended = time.monotonic()


class Jobs:
    """The jobs of a site, one at a time: scans are bound by the disk, so two would only be slower.

    >>> jobs = Jobs()
    >>> job = jobs.start(("sum",), "a sum", lambda job: setattr(job, "result", 1 + 1))
    >>> jobs.wait(job).result, jobs.start(("sum",), "again", print) is job
    (2, True)
    >>> jobs.close()
    """

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[Any, ...], Job] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="meshtape-browse-job")
        self._futures: dict[str, Any] = {}

    def start(self, what: tuple[Any, ...], title: str, work: Callable[[Job], Any], again: bool = False) -> Job:
        """The job for ``what``: the existing one, unless it failed, was stopped, or ``again`` is true."""
        with self._lock:
            job = self._held.get(what)
            if job is not None and (job.running or (job.state == "done" and not again)):
                return job
            if sum(j.running for j in self._held.values()) >= _KEPT:
                raise CheckpointError(f"{_KEPT} scans wait already; stop one, or let them end")
            job = Job(title, work)
            self._held[what] = job
            self._held.move_to_end(what)
            for old in [k for k, j in self._held.items() if not j.running][: max(0, len(self._held) - _KEPT)]:
                self._futures.pop(self._held.pop(old).id, None)
            self._futures[job.id] = self._pool.submit(job.run)
            return job

    def find(self, what: tuple[Any, ...]) -> Job | None:
        return self._held.get(what)

    def get(self, job_id: str) -> Job | None:
        return next((j for j in list(self._held.values()) if j.id == job_id), None)

    def wait(self, job: Job) -> Job:
        """Wait until ``job`` has ended."""
        self._futures[job.id].result()
        return job

    def close(self) -> None:
        """Stop all jobs and their thread."""
        for job in list(self._held.values()):
            job.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)
