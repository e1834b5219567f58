"""The workers of a Dask cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Client


def known_workers(client: Client) -> dict[str, Any]:
    """What the scheduler knows now of each of its workers, by address."""
    return client.scheduler_info(n_workers=-1)["workers"]  # unasked it tells of five alone
