"""Pages in the Dask scheduler's dashboard: activity on meshes, and the browser of checkpoints.

One line of Dask's configuration mounts them::

    distributed.scheduler.http.routes: [..., meshtape.parallel.dashboard.pages]

``/meshtape/`` is a live page of meshes, ranks and programs. ``/meshtape/browse/`` shows the checkpoints below ``meshtape.browse.roots``
(`meshtape.storage.browse`). Both are as open as the dashboard itself; ``meshtape.browse.hosts`` may list the host names under which alone
they answer.

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
from typing import Any

import dask
from distributed.http.utils import RequestHandler

from ...storage.browse.model.site import Site
from ...storage.browse.model.text import count, human_bytes, plain, visible
from ...storage.browse.server.app import LOOPBACK
from ...storage.browse.server.handlers import POLICY, Access, host_of
from ...storage.browse.server.handlers import routes as _browse_routes
from ...storage.browse.views.frame import Shown, facts, href, notice, page, section, table
from ...storage.browse.views.html import Markup, join, tag
from .jobs_panel import jobs_of, jobs_section, work_of, work_section

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
    """Schedulers that this process starts meanwhile show these pages, for this machine alone, with the checkpoints below ``roots``."""
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
    """The report in a worker's last heartbeat."""
    said = worker.metrics.get("meshtape")
    usual: dict[str, Any] = {"running": (), "waiting": (), "counts": {}, "bytes": 0, "exchanges": {}}
    return {**usual, **said} if isinstance(said, dict) else usual


def state_of(scheduler: Any) -> dict[str, Any]:
    """The scheduler's view of meshes and their programs, as plain data."""
    plugin = scheduler.plugins.get("meshtape")
    meshes = []
    for mesh, (client, workers) in dict(getattr(plugin, "meshes", {})).items():
        seats = [_seat(scheduler.workers.get(w), w, mesh.hex()) for w in workers]
        meshes.append(
            {
                "mesh": mesh.hex()[:8],
                "client": client,
                "leased": not set(workers).isdisjoint(plugin.holders.get(client, ())),
                "waiting": sum(not wish.workers.isdisjoint(workers) for wish in plugin.waiting),
                "workers": seats,
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


def _seat(worker: Any, address: str, mesh: str) -> dict[str, Any]:
    """One worker of a mesh."""
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


def _mesh(m: dict[str, Any]) -> Markup:
    rows = []
    for k, w in enumerate(m["workers"]):
        if not w["alive"]:
            rows.append(
                (str(k), visible(w["address"]), tag("span", "left the cluster", class_="mt-wrong"), "", "", "", "")
            )
            continue
        silent = f"{w['silent']:.0f} s ago" if w["silent"] > 5 else "now"
        doing = tag("strong", visible(w["program"], 60)) if w["program"] else tag("span", "idle", class_="mt-quiet")
        more = f" and {w['queued']} queued" if w["queued"] else ""
        last = visible(w["collective"], 100) if w["collective"] else tag("span", "none reported", class_="mt-quiet")
        rows.append(
            (
                str(k),
                visible(w["address"]),
                join([doing, more]),
                "–" if w["run"] is None else f"{w['run']:,}",
                last,
                human_bytes(w["blocks"]),
                silent,
            )
        )
    lease = "its client has the workers" if m["leased"] else "no run under way"
    note = f"client {visible(m['client'], 60)}; {lease}" + (
        f"; {count(m['waiting'], 'other client')} waiting" if m["waiting"] else ""
    )
    head = ("Process", "Worker", "Program", "Run", "Last collective", "Blocks", "Seen")
    return section(f"Mesh {m['mesh']}", table(head, rows, numeric=(3, 5)), note=note)


def body_of(state: dict[str, Any]) -> Markup:
    """The live part of the page."""
    meshes, programs, failures = state["meshes"], state["programs"], state["failures"]
    out: list[Any] = [
        facts(
            [
                ("Meshes", f"{len(meshes):,}"),
                ("Workers", f"{state['workers']:,}"),
                ("Running", ", ".join(visible(n, 40) for n, p in programs.items() if p["running"]) or "nothing"),
            ]
        )
    ]
    out += [jobs_section(state["jobs"]), work_section(state["writing"])]
    out += [_mesh(m) for m in meshes] or [
        notice("note", "No mesh is open.", tag("p", "mt.Mesh({…}, client=client) opens one."))
    ]
    if programs:
        rows = [
            (
                visible(n, 60),
                f"{p['running']:,}",
                f"{p['waiting']:,}",
                f"{p['done']:,}",
                f"{p['failed']:,}",
                "–" if p["seconds"] is None else f"{1000 * p['seconds']:.1f} ms",
            )
            for n, p in sorted(programs.items())
        ]
        out.append(
            section(
                "Programs",
                table(("Program", "Running", "Waiting", "Done", "Failed", "Mean"), rows, numeric=(1, 2, 3, 4, 5)),
                note="runs, one a worker each, since the workers started; saves and loads are among them",
            )
        )
    if failures:
        rows = [(f"{f['ago']:.0f} s ago", visible(f["program"], 60), visible(f["error"], 400)) for f in failures]
        out.append(section("Failures", table(("When", "Program", "What"), rows)))
    return tag("div", tag("span", data_poll="?fragment=1", data_every=EVERY), *out, data_swap=True)


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
        live = body_of(state)
        if self.get_argument("fragment", ""):
            self.finish(str(live))
            return
        browse = tag(
            "p",
            tag("a", "Checkpoints", href="browse/"),
            " ",
            tag("a", "Dask's own pages", href="../status"),
            class_="mt-zoom",
        )
        limits = (
            "What workers report arrives with their heartbeats: a collective that took less than half a second may never be seen here. "
            "Bytes of collectives go from worker to worker and are not known to the scheduler; mt.explain says them beforehand."
        )
        head = tag("div", tag("h1", "Meshes"), browse, class_="mt-head")
        self.finish(
            page(
                Shown("Meshes", join([head, live, tag("p", limits, class_="mt-quiet")]), crumbs=[("meshes", None)]),
                prefix="browse/",
            )
        )


class _Slash(RequestHandler):
    def get(self) -> None:
        self.redirect(href(self.request.path.rpartition("/")[2] + "/"))


routes: list[tuple[str, type, dict[str, Any]]] = [
    ("meshtape", _Slash, {}),
    ("meshtape/", Live, {}),
    ("meshtape/browse", _Slash, {}),
    *_browse_routes(access, "meshtape/browse/"),
]
