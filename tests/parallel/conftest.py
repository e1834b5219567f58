"""Clusters for the tests of ``parallel``: real worker processes, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import Client

from meshtape.parallel.cluster import local_cluster


@pytest.fixture(scope="session")
def processes() -> Iterator[Client]:
    """A client of a cluster of two worker processes. Tests that kill workers start their own."""
    with local_cluster(2) as client:
        yield client


@pytest.fixture(scope="session")
def threads() -> Iterator[Client]:
    """A client of a cluster whose two workers are threads of this process."""
    with local_cluster(2, processes=False) as client:
        yield client
