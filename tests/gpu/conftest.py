"""The GPU suite: every test here needs a CUDA device and CuPy, and is skipped with the reason where there is none.

``pytest tests/gpu`` runs it with one command and prints a report of the device. It is written on machines without one:
``contract`` runs it over a fake CUDA, by real CuPy, but for values, and ``MESHTAPE_EMULATED_GPU=FOLDER pytest
tests/gpu`` with values (``docs/development/gpu.md``). What was seen on a GPU is in ``docs/development/gpu-measured.md``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import pytest

import meshtape as mt
from meshtape.arrays.backends.backend import cupy_backend

HERE = Path(__file__).parent
EMULATED = "MESHTAPE_EMULATED_GPU"
"""The environment's word for a folder: the suite runs in it over the contract's fake CUDA, with values; it keeps what
is compiled."""


_START = """
import importlib.util
spec = importlib.util.spec_from_file_location("fake_cuda", {file!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
FAKE = module.FakeCuda()
"""
_fake: Any = None
_asked: Path


def _emulate(folder: Path) -> None:
    """Start the emulation here and in the worker processes of tests."""
    global _fake, _asked
    file = HERE / "contract/fake_cuda.py"
    spec = importlib.util.spec_from_file_location("fake_cuda", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if (why := module.missing()) is not None:
        raise pytest.UsageError(f"{EMULATED}: {why}")
    (folder / "cuda").mkdir(parents=True, exist_ok=True)
    module.build(folder / "cuda")
    os.environ.update({module.BUILD: str(folder / "cuda"), module.VALUES: str(folder / "kernels")})
    os.environ.setdefault("CUPY_CACHE_DIR", str(folder / "cupy"))
    dask.config.set({"distributed.worker.preload": [_START.format(file=str(file))]})
    _fake, _asked = module.FakeCuda(), folder / "asked.json"
    _fake.use_pool(True)


def _compile_together() -> None:
    """Compile the sources that the suite asked for in an earlier run, or that its calls ask for where they compute
    nothing."""
    if not _asked.exists():
        env = {k: v for k, v in os.environ.items() if k not in (EMULATED, "MESHTAPE_FAKE_VALUES")}
        subprocess.run(
            [sys.executable, HERE / "contract/sweeps.py", "asked", _asked],
            env=env,
            check=True,
            stdout=subprocess.DEVNULL,
        )
    _fake.kernels.compile((source, tuple(names)) for source, names in json.loads(_asked.read_text()))


def pytest_sessionfinish() -> None:
    if _fake is not None and _asked.exists():
        known = {(source, tuple(names)) for source, names in json.loads(_asked.read_text())}
        _asked.write_text(json.dumps(sorted(known | _fake.asked)))


if os.environ.get(EMULATED):
    _emulate(Path(os.environ[EMULATED]).resolve())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _fake is not None and len([i for i in items if i.path.name == "test_every_op.py"]) > 40:
        _compile_together()  # for fewer, one by one takes less
    try:
        cupy_backend()
        reason = None
    except mt.errors.BackendError as e:
        reason = str(e)
    here, contract = f"{HERE}/", f"{HERE}/contract/"
    for item in items:
        if str(item.path).startswith(here) and not str(item.path).startswith(contract):
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    """Creation functions put their arrays on the first CUDA device; its memory is given back after each test."""
    with mt.use_device("cuda:0"):
        yield
    cupy_backend().xp.get_default_memory_pool().free_all_blocks()


@pytest.fixture(scope="session")
def emulated() -> bool:
    """Whether the device is the emulation, which takes a thousand times as long: tests of much work have less of it
    there."""
    return bool(os.environ.get(EMULATED))


@pytest.fixture(scope="session")
def needs_memory() -> Callable[[int], None]:
    """``needs_memory(bytes)`` skips a test where the device has less."""

    def check(size: int) -> None:
        free, _ = cupy_backend().xp.cuda.runtime.memGetInfo()
        if free < size:
            pytest.skip(f"needs {size >> 30} GiB of GPU memory, {free >> 30} are free")

    return check


@pytest.fixture(scope="session", autouse=True)
def report() -> Iterator[None]:
    """What the suite ran on."""
    yield
    cp = cupy_backend().xp
    name = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    pool = cp.get_default_memory_pool()
    print(
        f"\n{name}, driver {cp.cuda.runtime.driverGetVersion()}, CuPy {cp.__version__}, pool {pool.total_bytes()} bytes"
    )
