"""Settings under ``meshtape`` in Dask's configuration, with their defaults.

========================  ==========================================================================================
``transport``             ``auto``: what is fastest between each two workers; ``sockets``: no shared memory;
                          ``comms``: Dask's own connections, where no further port may be opened
``timeout``               seconds after which a worker that was asked for something and says nothing is lost, and
                          for which the scheduler is waited for
``timeouts.collective``   seconds that a rank waits for others in one collective
``timeouts.connect``      seconds that a client waits for a scheduler to answer
``timeouts.silence``      seconds after which a rank asks whether those it waits for are alive at all; they have as
                          long to answer, and so have workers when a mesh is made or closed
``timeouts.abort``        seconds that the client waits for the other ranks after one failed
``timeouts.lease``        seconds that a client which stands still may keep others from the workers
``timeouts.store``        seconds in which a network store must answer a request, with all its repetitions; it has a
                          second more for each 64 KiB
``bucket``                bytes of gradients that are reduced together
``overlap``               the least bytes for which a collective runs beside the computation; 0: never
``pool``                  bytes of unused memory that a worker keeps for its blocks
``device-memory``         share of a GPU that kept blocks may take before those not read for longest are moved to
                          the host: a setting of the workers
``shared-memory``         bytes that the workers of one host share for messages among themselves, at most: a setting of
                          the workers
``loop``                  turns of ``mt.scan`` that one task runs
``browse.roots``          what the pages in the dashboard may show: see `meshtape.parallel.dashboard.pages`
``browse.hosts``          host names under which alone those pages answer; any where it is not set
========================  ==========================================================================================

Like all of Dask's configuration it is read from files, from the environment (``DASK_MESHTAPE__TRANSPORT=comms``) and
set by ``dask.config.set``. The client's settings are those of its meshes.
"""

from __future__ import annotations

from typing import Any

from ...arrays.core.errors import MeshError
from ...storage.base.waiting import SECONDS

DEFAULTS: dict[str, Any] = {
    "meshtape": {
        "transport": "auto",
        "timeout": 20.0,
        "timeouts": {
            "connect": 10.0,
            "collective": 60.0,
            "silence": 5.0,
            "abort": 10.0,
            "lease": 10.0,
            "store": SECONDS,
        },
        "bucket": 4 << 20,
        "overlap": 1 << 20,
        "pool": 1 << 30,
        "device-memory": 0.6,
        "shared-memory": 1 << 30,
        "loop": 64,
    }
}

TRANSPORTS = ("auto", "sockets", "comms")


def register() -> None:
    """Tell Dask the defaults. Not when this module is imported: a virtual mesh needs no Dask."""
    import dask

    # Again where they are gone: the end of a ``dask.config.set`` that was the first to name ``meshtape``, or one of its
    # settings, takes that away.
    if not _has(dask.config.get("meshtape", {}), DEFAULTS["meshtape"]):
        dask.config.update_defaults(DEFAULTS)


def _has(found: Any, wanted: Any) -> bool:
    if not isinstance(wanted, dict):
        return True
    return isinstance(found, dict) and all(k in found and _has(found[k], w) for k, w in wanted.items())


def number(name: str) -> float:
    """A setting that is a number; bytes may be written as text (``"64 MiB"``). Raises :class:`MeshError` where it is
    none, or negative."""
    import dask.utils

    register()
    value = dask.config.get(f"meshtape.{name}")
    try:
        found = float(dask.utils.parse_bytes(value)) if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        found = -1.0
    if found < 0:
        raise MeshError(f"meshtape.{name} in Dask's configuration must be a number that is not negative, got {value!r}")
    return found


def transport() -> str:
    """How processes are to be connected."""
    import dask

    register()
    value = dask.config.get("meshtape.transport")
    if value not in TRANSPORTS:
        raise MeshError(
            f"meshtape.transport in Dask's configuration must be one of {', '.join(TRANSPORTS)}, got {value!r}"
        )
    return value
