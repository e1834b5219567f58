"""Workers keep the memory of temporaries, and whether they do can be asked."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from meshtape.parallel.dask.malloc import ENVIRONMENT, MEGABYTES, Allocator, allocators, told_to_nannies
from meshtape.parallel.dask.workers import known_workers

pytestmark = pytest.mark.timeout(300)


def test_workers_of_local_cluster_keep_memory(processes):
    found = allocators(processes)
    assert [a.worker for a in found] == sorted(known_workers(processes))
    for a in found:
        assert a.keeps, a
        assert a.unlike == ()
        assert str(a) == f"{a.worker}: memory is used again"


def test_a_process_that_gives_memory_back_is_found_out():
    """One whose allocator is told what Dask's nannies tell by default."""
    code = "from meshtape.parallel.dask.malloc import _measured; print(_measured())"
    without = {k: v for k, v in os.environ.items() if k not in ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=without | {"MALLOC_TRIM_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    found = Allocator("tcp://h:1", *ast.literal_eval(done.stdout))
    assert found.unlike == tuple(ENVIRONMENT)
    if found.faults is None:
        pytest.skip("this system does not count the page faults of a thread")
    assert not found.keeps
    assert str(found) == (
        f"tcp://h:1: {found.faults} page faults for each temporary of {MEGABYTES} MiB; start it with "
        "MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_ARENA_MAX=1"
    )


def test_what_an_earlier_cluster_left_is_no_wish_of_the_user(monkeypatch):
    """A nanny prefers the environment of its process, and leaves there what it told its worker."""
    from distributed.nanny import _get_env_variables

    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")  # Dask's default, left by a nanny
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")  # nobody's default
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    with told_to_nannies():
        told = _get_env_variables("distributed.nanny.pre-spawn-environ")
        os.environ.update(told)  # as a nanny does
    assert {k: told[k] for k in ENVIRONMENT} == ENVIRONMENT | {"MALLOC_ARENA_MAX": "4"}
    assert {k: os.environ.get(k) for k in ENVIRONMENT} == {
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "MALLOC_MMAP_THRESHOLD_": None,
        "MALLOC_ARENA_MAX": "4",
    }
