"""Pages in the Dask scheduler's dashboard: activity on meshes, and the browser of checkpoints.

One line of Dask's configuration mounts them::

    distributed.scheduler.http.routes: [..., meshtape.parallel.dashboard.pages]

``/meshtape/`` is a live page of meshes, ranks and programs. ``/meshtape/browse/`` shows the checkpoints below
``meshtape.browse.roots`` (`meshtape.storage.browse`). Both are as open as the dashboard itself;
``meshtape.browse.hosts`` may list the host names under which alone they answer.

The page shows only what the scheduler knows. Workers report with their heartbeats, twice a second at best: programs
that wait, run and have run, and the last collective; a shorter one may never be seen. Collectives go from worker to
worker, so the scheduler does not know their bytes. Processes that save, merge or reshard checkpoints report the bytes
that they write, at the same pace.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import dask
from distributed.http.utils import RequestHandler

from ...storage.browse.model.site import Site
from ...storage.browse.model.text import plain
from ...storage.browse.server.app import LOOPBACK
from ...storage.browse.server.handlers import POLICY, Access, host_of
from ...storage.browse.server.handlers import routes as _browse_routes
from ...storage.browse.views.frame import Markup, Shown, href, page, template
from .jobs_panel import job_row, jobs_of, work_of, work_row

_ROUTES = "distributed.scheduler.http.routes"
_EVENTS = 12
EVERY = 1000  # milliseconds between two looks


@functools.cache
def access() -> Access:
    """The checkpoints that the configuration names; opened when the first page is asked for."""
    roots = dask.config.get("meshtape.browse.roots", None) or []
    hosts = dask.config.get("meshtape.browse.hosts", None)
    roots = [roots] if isinstance(roots, str) else list(roots)
    return Access(Site(roots), None if hosts is None else frozenset(h.casefold() for h in hosts))


@contextlib.contextmanager
def mounted(*roots: str) -> Iterator[None]:
    """Schedulers that this process starts meanwhile show these pages, for this machine alone, with the checkpoints
    below ``roots``."""
    given = dask.config.get(_ROUTES)
    here = {
        _ROUTES: [*given, *({__name__} - set(given))],
        "meshtape.browse.roots": list(roots),
        "meshtape.browse.hosts": list(LOOPBACK),
    }
    access.cache_clear()
    with dask.config.set(here):
        try:
            yield
        finally:
            access().close()
            access.cache_clear()


def address(client: Any) -> str:
    """The address of the live page of a client's scheduler, if the page is mounted there."""
    return client.dashboard_link.rpartition("/")[0] + "/meshtape/"


def programs_of(scheduler: Any) -> dict[str, dict[str, Any]]:
    """Programs and functions of blocks by name: how many run, wait, ended and failed, and seconds a run."""
    found: dict[str, dict[str, Any]] = {}

    def of(name: str) -> dict[str, Any]:
        return found.setdefault(name, {"running": 0, "waiting": 0, "done": 0, "failed": 0, "seconds": 0.0})

    for report in [_report(w) for w in list(scheduler.workers.values())]:
        for name, (done, failed, seconds) in report["counts"].items():
            one = of(name)
            one["done"], one["failed"] = one["done"] + done, one["failed"] + failed
            one["seconds"] += seconds
        for state in ("running", "waiting"):
            for name in report[state]:
                of(name)[state] += 1
    for one in found.values():
        one["seconds"] = one["seconds"] / one["done"] if one["done"] else None
    return found


def _report(worker: Any) -> dict[str, Any]:
    said = worker.metrics.get("meshtape")
    usual: dict[str, Any] = {"running": (), "waiting": (), "counts": {}, "bytes": 0, "exchanges": {}}
    return {**usual, **said} if isinstance(said, dict) else usual


def state_of(scheduler: Any) -> dict[str, Any]:
    """The scheduler's view of meshes and their programs, as plain data."""
    plugin = scheduler.plugins.get("meshtape")
    meshes = []
    for mesh, (client, workers) in dict(getattr(plugin, "meshes", {})).items():
        rows = [_worker_row(scheduler.workers.get(w), w, mesh.hex()) for w in workers]
        meshes.append(
            {
                "mesh": mesh.hex()[:8],
                "client": client,
                "leased": not set(workers).isdisjoint(plugin.holders.get(client, ())),
                "waiting": sum(not wish.workers.isdisjoint(workers) for wish in plugin.waiting),
                "workers": rows,
            }
        )
    events = [
        {
            "ago": time.time() - when,
            "program": str(e.get("failed", "")).partition("/")[2],
            "error": str(e.get("error", "")),
        }
        for when, e in list(scheduler.get_events("meshtape"))[-_EVENTS:]
        if isinstance(e, dict)
    ]
    return {
        "jobs": jobs_of(scheduler),
        "writing": work_of(scheduler),
        "meshes": meshes,
        "programs": programs_of(scheduler),
        "failures": events[::-1],
        "workers": len(scheduler.workers),
    }


def _worker_row(worker: Any, address: str, mesh: str) -> dict[str, Any]:
    if worker is None:
        return {"address": address, "alive": False}
    report = _report(worker)
    run, collective = report["exchanges"].get(mesh, (None, ""))
    return {
        "address": address,
        "alive": True,
        "silent": max(0.0, time.time() - worker.last_seen),
        "program": report["running"][0] if report["running"] else None,
        "queued": len(report["waiting"]),
        "run": run,
        "collective": collective or None,
        "blocks": report["bytes"],
    }


# ----- the page -------------------------------------------------------------------------------------------------------


@functools.cache
def _template() -> Any:
    return template(files(__package__).joinpath("live.html").read_text(encoding="utf-8"))


def body_of(state: dict[str, Any], whole: bool = False) -> str:
    """The live part of the page, and the head above it where ``whole`` is true."""
    jobs, work = list(map(job_row, state["jobs"])), list(map(work_row, state["writing"]))
    return _template().render(state, whole=whole, job_rows=jobs, work_rows=work, every=EVERY)


class Live(RequestHandler):
    """The page, its live part alone (``fragment``), and its data (``format=json``)."""

    def prepare(self) -> None:
        hosts = access().hosts
        self.set_header("Content-Security-Policy", POLICY)
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Cache-Control", "no-store")
        if hosts is not None and host_of(self.request.host) not in hosts:
            self.set_status(403)
            self.finish()

    def get(self) -> None:
        state = state_of(self.server)
        if self.get_argument("format", "") == "json":
            self.write(plain(state))
            return
        if self.get_argument("fragment", ""):
            self.finish(body_of(state))
            return
        self.finish(page(Shown("Meshes", Markup(body_of(state, True)), crumbs=[("meshes", None)]), prefix="browse/"))


class _Slash(RequestHandler):
    def get(self) -> None:
        self.redirect(href(self.request.path.rpartition("/")[2] + "/"))


routes: list[tuple[str, type, dict[str, Any]]] = [
    ("meshtape", _Slash, {}),
    ("meshtape/", Live, {}),
    ("meshtape/browse", _Slash, {}),
    *_browse_routes(access, "meshtape/browse/"),
]
