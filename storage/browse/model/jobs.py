"""Work that takes longer than a page: it runs in the background, tells how far it is, and can be stopped."""

from __future__ import annotations

import copy
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ....arrays.backends.threads import Pool
from ....arrays.core.errors import CheckpointError, MeshtapeError

_KEPT = 32


class Stopped(Exception):
    """Raised inside a job by its own progress call when the user has stopped it."""


class BrowseJob:
    """One piece of work: ``work(job)``, called in a thread, calls `advance` and may set ``result`` before it ends."""

    def __init__(self, work: Callable[[BrowseJob], Any]) -> None:
        self.id = secrets.token_urlsafe(12)
        self.share = 0.0
        self.doing = ""
        self.result: Any = None
        self.error = ""
        self.state = "waiting"
        self.seconds = 0.0
        self.future: Future[None] | None = None
        self._work = work
        self._stop = threading.Event()

    @property
    def running(self) -> bool:
        return self.state in ("waiting", "running")

    def advance(self, done: int, total: int, doing: str = "") -> None:
        """Tell how far the work is; ends it when it was stopped."""
        self.share, self.doing = min(1.0, done / total) if total else 0.0, doing or self.doing
        if self._stop.is_set():
            raise Stopped

    def stop(self) -> None:
        """Ask the work to end at its next `advance`. Its results so far stay."""
        self._stop.set()

    def run(self) -> None:
        started, state = time.monotonic(), "done"
        self.state = "running"
        try:
            self.advance(0, 0)
            self._work(self)
        except Stopped:
            state = "stopped"
        except Exception as e:  # whatever a hostile file provokes must show on the page, not vanish in a thread
            known = isinstance(e, MeshtapeError | OSError)
            state, self.error = "failed", f"{'' if known else 'unexpected '}{type(e).__name__}: {e}"
        self.seconds, self.state = time.monotonic() - started, state


class Jobs:
    """The jobs of a site, one at a time: scans are bound by the disk, so two would only be slower.

    >>> jobs = Jobs()
    >>> job = jobs.start(("sum",), lambda job: setattr(job, "result", 1 + 1))
    >>> jobs.wait(job).result, jobs.start(("sum",), print) is job
    (2, True)
    >>> jobs.close()
    """

    def __init__(self) -> None:
        self._held: dict[tuple[Any, ...], BrowseJob] = {}  # the latest last
        self._lock = threading.Lock()
        self._pool = Pool(1, thread_name_prefix="meshtape-browse-job")

    def start(self, what: tuple[Any, ...], work: Callable[[BrowseJob], Any], again: bool = False) -> BrowseJob:
        """The job for ``what``: the existing one, unless it failed, was stopped, or ``again`` is true."""
        with self._lock:
            job = self._held.get(what)
            if job is not None and (job.running or (job.state == "done" and not again)):
                return job
            if sum(j.running for j in self._held.values()) >= _KEPT:
                raise CheckpointError(f"{_KEPT} scans wait already; stop one, or let them end")
            self._held.pop(what, None)
            job = self._held[what] = BrowseJob(work)
            for old in [k for k, j in self._held.items() if not j.running][: max(0, len(self._held) - _KEPT)]:
                del self._held[old]
            job.future = self._pool.submit(job.run)
            return job

    def find(self, what: tuple[Any, ...]) -> BrowseJob | None:
        """The job for ``what`` as it is at this moment: a page never says *done* above what was found before that."""
        job = self._held.get(what)
        return None if job is None else copy.copy(job)

    def get(self, job_id: str) -> BrowseJob | None:
        return next((j for j in list(self._held.values()) if j.id == job_id), None)

    def wait(self, job: BrowseJob) -> BrowseJob:
        """Wait until ``job`` has ended."""
        assert job.future is not None
        job.future.result()
        return job

    def close(self) -> None:
        """Stop all jobs and their thread."""
        for job in list(self._held.values()):
            job.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)
