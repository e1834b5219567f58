"""What is asked of NCCL, and in which order: against the emulation, where each call can fail."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest

from meshtape.errors import CollectiveTimeout
from meshtape.parallel.base.device_memory import memory_of
from meshtape.parallel.execution.executor import Beside
from meshtape.parallel.transports.nccl import NcclGroup
from meshtape.parallel.transports.rendezvous import DataPlane

from . import emulated_gpu
from .conftest import MESH
from .test_dataplane import RANKS, together

pytestmark = pytest.mark.timeout(300)
_epochs = itertools.count()


def joined(planes: list[DataPlane], xp: Any, timeout: float) -> list[Any]:
    """A group of each device, or the error."""
    epoch = next(_epochs)

    def join(me: int) -> NcclGroup:
        with xp.cuda.Device(me):
            host = planes[me].group(MESH, epoch, me, {1 - me: planes[1 - me].address}, RANKS, 60.0)
            host.begin(1, 60.0)
            return NcclGroup(host, me, 2, timeout)

    return together(lambda: join(0), lambda: join(1))


def groups(planes: list[DataPlane], xp: Any) -> list[NcclGroup]:
    """One of each device."""
    found = joined(planes, xp, 60.0)
    for g in found:
        assert isinstance(g, NcclGroup), g
        g.begin(2, 60.0)
    return found


def exchange(found: list[NcclGroup], xp: Any) -> tuple[list[Any], list[Any]]:
    """What each raised, and what each got."""
    got: list[Any] = [None, None]

    def call(me: int) -> None:
        with xp.cuda.Device(me):
            mine = xp.asarray(np.full(5, me + 1.0))
            got[me] = xp.asarray(np.zeros(5))
            found[me].exchange(0, "x", {1 - me: [mine]}, {1 - me: [got[me]]})

    return together(lambda: call(0), lambda: call(1)), got


@pytest.mark.parametrize("signed", [True, False], ids=["x86", "aarch64"])
def test_the_name_of_a_communicator_is_bytes_with_and_without_signs(planes, signed, monkeypatch):
    made = emulated_gpu.Nccl.NcclCommunicator

    def ident(self: Any) -> tuple[int, ...]:
        return tuple((37 * i) % 256 - (256 if signed and (37 * i) % 256 > 127 else 0) for i in range(128))

    def connect(self: Any, count: int, name: tuple[int, ...], rank: int) -> Any:
        if any(not (-128 <= b < 128 if signed else 0 <= b < 256) for b in name):
            raise OverflowError("value too large to convert to char")
        assert name == ident(self)
        return made(self, count, tuple(b - 256 if b > 127 else b for b in name), rank)

    monkeypatch.setattr(emulated_gpu.Nccl, "get_unique_id", ident)
    monkeypatch.setattr(emulated_gpu.Nccl, "NcclCommunicator", connect)
    with emulated_gpu.installed(2) as xp:
        ends, got = exchange(groups(planes, xp), xp)
        assert ends == [None, None]
        assert [g.get().tolist() for g in got] == [[2.0] * 5, [1.0] * 5]


def test_memory_is_taken_before_a_group_begins_and_a_group_that_fails_ends(planes, monkeypatch):
    with emulated_gpu.installed(2) as xp:
        found = groups(planes, xp)
        begun: list[str] = []
        monkeypatch.setattr(xp.cuda.nccl, "groupStart", lambda: begun.append("start"), raising=False)
        monkeypatch.setattr(xp.cuda.nccl, "groupEnd", lambda: begun.append("end"), raising=False)

        def empty(*args: Any) -> Any:
            raise emulated_gpu.OutOfMemoryError("full")

        with monkeypatch.context() as patch:
            patch.setattr(xp, "empty", empty, raising=False)
            ends, _ = exchange(found, xp)
            assert [type(e) for e in ends] == [emulated_gpu.OutOfMemoryError] * 2
            assert begun == []

        def send(*args: Any) -> None:
            raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR")

        monkeypatch.setattr(emulated_gpu.Communicator, "send", send)
        ends, _ = exchange(found, xp)
        assert [str(e) for e in ends] == ["NCCL_ERROR_SYSTEM_ERROR"] * 2
        assert sorted(begun) == ["end", "end", "start", "start"]


def test_a_communicator_is_given_up_by_a_thread_of_its_own(planes, monkeypatch, eventually):
    """It waits for the device, and who closes a mesh may be an event loop."""
    where: list[tuple[int, int]] = []
    go = threading.Event()

    def destroy(self: Any) -> None:
        go.wait(60)
        where.append((self._rank, emulated_gpu.current.device))

    monkeypatch.setattr(emulated_gpu.Communicator, "destroy", destroy)
    with emulated_gpu.installed(2) as xp:
        for g in groups(planes, xp):
            g.close()
        assert where == []
        go.set()
        eventually(lambda: sorted(where) == [(0, 0), (1, 1)])


def test_a_communicator_that_comes_too_late_is_freed(planes, monkeypatch, eventually):
    made, go, freed = emulated_gpu.Nccl.NcclCommunicator, threading.Event(), list[tuple[int, int]]()

    def connect(self: Any, count: int, name: tuple[int, ...], rank: int) -> Any:
        go.wait(60)
        return made(self, count, name, rank)

    monkeypatch.setattr(emulated_gpu.Nccl, "NcclCommunicator", connect)
    monkeypatch.setattr(
        emulated_gpu.Communicator, "abort", lambda self: freed.append((self._rank, emulated_gpu.current.device))
    )
    with emulated_gpu.installed(2) as xp:
        assert [type(e) for e in joined(planes, xp, 0.1)] == [CollectiveTimeout] * 2
        assert freed == []
        go.set()
        eventually(lambda: sorted(freed) == [(0, 0), (1, 1)])


def test_rounds_beside_follow_the_stream_of_the_computation_and_it_follows_them(monkeypatch):
    """Each thread of a device has a current stream of its own."""
    log: list[tuple[str, str, Any]] = []

    class Stream:
        def record(self) -> str:
            name = threading.current_thread().name.partition("_")[0]
            log.append(("record", name, None))
            return name

        def wait_event(self, event: str) -> None:
            log.append(("wait", threading.current_thread().name.partition("_")[0], event))

    class Carrier:
        eager = True

    with emulated_gpu.installed(1) as xp:
        monkeypatch.setattr(xp.cuda, "get_current_stream", Stream)
        with Beside(Carrier(), memory_of("cuda:0")) as beside:  # type: ignore[arg-type]
            beside.start(1, None, lambda: "found")  # type: ignore[arg-type]
            assert beside.wait(1) == (None, "found")
            assert beside.now(lambda: "more") == "more"
    main, other = "MainThread", "meshtape-collectives"
    once = [("record", main, None), ("wait", other, main), ("record", other, None), ("wait", main, other)]
    assert log == [*once, *once]
