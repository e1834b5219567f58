"""What tests of several packages share."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

if sys.dont_write_bytecode:
    # The tests start some hundred processes, and without bytecode each compiles for three seconds what it imports.
    # Where none is to lie beside the sources, it is kept with what pytest keeps. It stands here since the imports below
    # count too.
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(
        Path(__file__).parents[1] / ".pytest_cache" / "d" / "bytecode"
    )
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False

if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts us in the background has us, and what we start, ignore Ctrl-C; tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

import dask
import distributed.utils
import pytest
from distributed import Client
from distributed.nanny import _get_env_variables
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers


class _Shared:
    """Finds what tests of several packages import. (A folder named ``meshtape`` lies beside it, so that this one is not
    on the path.)"""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name in ("op_samples", "random_programs", "forked", "layers_on_a_mesh"):
            return importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        return None


sys.meta_path.append(_Shared)

for _forced in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(_forced, None)  # what is a terminal here the tests say themselves

# Workers are forked from one process that has imported what they need: that takes each of them more than a second.
# Programs that are tested are new processes, as users have them; those beside them are forked, too (see forked.py).
dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
distributed.utils._forkserver_preload_set = True  # else Dask has this process import pandas
forkserver.set_forkserver_preload(
    ["meshtape.parallel.training", "meshtape.storage.browse.server.app", "zarr", "dask.array"]
)


def _start_fork_server() -> None:
    """With the environment that a nanny gives its worker: allocators and libraries of threads read it once."""
    from meshtape.parallel.dask.malloc import told_to_nannies

    before = dict(os.environ)
    with told_to_nannies():
        os.environ.update(_get_env_variables("distributed.nanny.pre-spawn-environ"))
        forkserver.ensure_running()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _run_forked(program: Path, seconds: float) -> int | None:
    process = multiprocessing.get_context("forkserver").Process(
        target=runpy.run_path, args=(str(program), None, "__main__")
    )
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode


@pytest.fixture(scope="session")
def run_forked() -> Callable[[Path, float], int | None]:
    """``run_forked(file, seconds)``: the exit status of a program that finds imported what workers import."""
    return _run_forked


# Whether a change passes must not depend on luck: the same examples each time, and no limit on the time of one. To look
# for new ones: pytest --hypothesis-profile=explore.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("repeatable")
# Hypothesis also draws numbers that stand in our sources, of all modules that are loaded: so examples would depend on
# which other tests there are, and each process would parse the sources of all packages.
providers._get_local_constants = lambda: providers._local_constants


gc.disable()  # the collection only adds objects
# Tests trace hundreds of programs in one process, where a user's program traces a few: searches of all objects would take
# up to a quarter of a file's time. Those of young objects, which find most, stay as they are.
_young, _middle, _ = gc.get_threshold()
gc.set_threshold(_young, _middle, 50)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what was collected out of the searches of the garbage collector, of which tests ask for some hundred."""
    if any(item.nodeid.startswith(("tests/parallel/", "tests/docs/")) for item in session.items):
        _start_fork_server()
    gc.enable()
    gc.freeze()


_swept = time.monotonic()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """And what stays after the tests of some files (caches, clusters), or a search in the last files takes half a
    second. The next file finds no memory that these have left for use again, up to a gigabyte; and none with a cluster
    finds there what the garbage of another one keeps."""
    global _swept
    ends = nextitem is None or nextitem.path != item.path
    if ends and (item.nodeid.startswith("tests/parallel/") or time.monotonic() > _swept + 5):
        gc.collect()
        gc.freeze()
        if (pool := sys.modules.get("meshtape.arrays.backends.memory_pool")) is not None:
            pool.POOL.clear()
        _swept = time.monotonic()


ORDER = (
    *("parallel/chaos/", "gpu/contract/", "docs/", "arrays/", "autodiff/", "storage/", "gpu/", "meshtape/"),
    *("parallel/test_bounded_waits", "parallel/training/", "parallel/test_gang", "parallel/"),
)
"""The longest tests come first: at the end, one process would run them while the others have nothing to do. Those that
start clusters come last: a cluster stays with its process, and takes time and memory of all that runs beside it."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests in order. Leave the long runs out unless they are asked for, with ``-m slow`` or any other
    expression."""
    files = {item.path: item.nodeid.partition("::")[0] for item in items}
    turns = {path: next((i for i, part in enumerate(ORDER) if part in f), -1) for path, f in files.items()}
    items.sort(key=lambda item: turns[item.path])
    if not config.option.markexpr:
        long = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=long)


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.option.markexpr:
        return None
    return "long runs are deselected, of which samples run by default; ask for them with -m slow"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What passing tests counted, which pytest keeps to itself otherwise: ``record_property("counted", text)``."""
    passed = terminalreporter.stats.get("passed", [])
    counted = [text for report in passed for name, text in report.user_properties if name == "counted"]
    if counted:
        terminalreporter.section("counted")
        terminalreporter.write("".join(f"{line}\n" for line in counted))


@contextmanager
def _runs(client: Client) -> Iterator[list[str]]:
    async def counts(dask_worker: Any) -> dict[str, int]:
        from meshtape.parallel.dask import worker as mesh_worker

        state = mesh_worker._STATES.get(dask_worker.address)
        if state is None:
            return {}
        # The thread counts a run after its value is there for whoever waits for it.
        await asyncio.wrap_future(state.resident.thread.submit(int))
        return {n: c.done + c.failed for n, c in state.resident.counts.items()}

    before, found = client.run(counts), list[str]()
    yield found
    for worker, after in client.run(counts).items():
        for name, n in after.items():
            found += [name] * (n - before[worker].get(name, 0))


@pytest.fixture
def runs() -> Callable[[Client], AbstractContextManager[list[str]]]:
    """``with runs(client) as done``: at its end, names of what the workers did for meshes meanwhile, once for each
    worker."""
    return _runs


@contextmanager
def _held_merge(source: Path, target: Path) -> Iterator[Callable[[], None]]:
    begun, go = threading.Event(), threading.Event()

    def hold(done: int, total: int) -> None:
        if 0 < done < total:
            begun.set()
            assert go.wait(300)

    import meshtape as mt

    options = {"progress": hold, "memory_limit": 1 << 20, "threads": 1}
    merge = threading.Thread(target=mt.merge, args=(source, target), kwargs=options)
    merge.start()
    try:
        assert begun.wait(300)
        yield go.set
    finally:
        go.set()
        merge.join()


@pytest.fixture
def held_merge() -> Callable[[Path, Path], AbstractContextManager[Callable[[], None]]]:
    """``with held_merge(source, target) as go:`` has a merge stand still in its middle until the block ends, or calls
    ``go()``."""
    return _held_merge


def _peak_of(fn: Callable[[], Any], below: float | None = None) -> int:
    """The most bytes that one call holds, beside what was there before it: its arrays, and Python's own objects.

    Other threads of the process (a scheduler's, say) and what is imported or cached once can only add to what is
    counted, so it is the least of up to three calls: they end with the first that is ``below``, or with two that agree.
    Sizes that are compared should still be of megabytes. Nothing comes from the pool meanwhile, nor stays in it.
    """
    from meshtape.arrays.backends.memory_pool import POOL

    def counts(peaks: list[int]) -> bool:
        return peaks[-1] < below if below is not None else len(peaks) > 1 and max(peaks) <= 1.01 * min(peaks)

    kept, POOL.limit = POOL.limit, 0
    POOL.clear()
    try:
        if below is None:
            fn()
        peaks: list[int] = []
        while len(peaks) < 3 and not (peaks and counts(peaks)):
            tracemalloc.start()
            try:
                fn()
                peaks.append(tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()
    finally:
        POOL.limit = kept
    return min(peaks)


@pytest.fixture(scope="session")
def peak_of() -> Callable[..., int]:
    """``peak_of(fn)``: the most bytes that a call of ``fn`` holds. With ``below`` one call is enough that holds less
    than that."""
    return _peak_of


@pytest.fixture(scope="session")
def ulps() -> Callable[[Any, Any, Any], float]:
    """The largest difference of two arrays in units in the last place of a short dtype; of an element far below the
    largest, in those of a sixteenth of that. What the dtype cannot hold is to be infinite, or NaN."""
    import ml_dtypes
    import numpy as np

    def measure(got: Any, want: Any, dtype: Any) -> float:
        found, exact = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert found.shape == exact.shape
        if not exact.size:
            return 0.0
        info = ml_dtypes.finfo(dtype)
        size = np.maximum(np.abs(exact), np.abs(exact).max() / 16)
        unit = 2.0 ** np.floor(np.log2(np.maximum(size, float(info.tiny)))) * float(info.eps)
        beyond = (np.abs(exact) > float(info.max)) & ~np.isfinite(found)
        return float(np.nan_to_num(np.where(beyond, 0, np.abs(found - exact) / unit), nan=np.inf).max())

    return measure
