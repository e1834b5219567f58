"""Shared memory between two processes of a host: who can open it, when it is not there, and how much of it there is."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from typing import Any

import dask
import numpy as np
import pytest

from meshtape.errors import CollectiveTimeout
from meshtape.parallel.collectives.pieces import QUANTUM
from meshtape.parallel.transports import memory, rendezvous
from meshtape.parallel.transports.links import StreamLink
from meshtape.parallel.transports.rendezvous import DataPlane
from meshtape.parallel.transports.shared_memory_link import SlotLink
from meshtape.parallel.transports.unix_socket import UnixListener, enter

from .test_transports import MESH, RANKS, Contract, opened, segments, together

pytestmark = pytest.mark.timeout(300)


class TestSharedMemory(Contract):
    link = SlotLink

    @pytest.fixture
    def planes(self, monkeypatch) -> Iterator[list[DataPlane]]:
        monkeypatch.setattr(memory, "process_id", lambda: secrets.token_bytes(16))  # as if in processes of their own
        yield from opened(*[DataPlane("127.0.0.1") for _ in range(3)])

    def test_it_is_shared_memory(self, pair):
        assert {type(x.outbox) for g in pair for x in g.links.values()} == {memory.SharedSlots}

    def test_where_there_is_no_room_the_socket_serves(self, planes, monkeypatch):
        def full(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        monkeypatch.setattr(type(self), "link", StreamLink)
        one, two = self.connected(planes)
        assert segments() == []
        x = np.zeros(QUANTUM)
        ends = together(lambda: one.exchange(0, "x", {1: [x + 1]}, {}), lambda: two.exchange(0, "x", {}, {0: [x]}))
        assert ends == [None, None]
        assert x.all()

    @pytest.mark.parametrize("slots", [1, 2, 4, 8])
    def test_fewer_slots_carry_the_same_messages(self, planes, slots, monkeypatch):
        monkeypatch.setattr(memory, "SLOTS", slots)
        one, two = self.connected(planes)
        assert one.links[1].outbox.count == two.links[0].inbox.count == slots
        x, y = np.arange(5.0 * QUANTUM / 8), np.arange(7.0 * QUANTUM / 8)
        a, b = np.empty_like(y), np.empty_like(x)
        ends = together(
            lambda: one.exchange(0, "x", {1: [x]}, {1: [a]}), lambda: two.exchange(0, "x", {0: [y]}, {0: [b]})
        )
        assert ends == [None, None]
        np.testing.assert_array_equal(a, y)
        np.testing.assert_array_equal(b, x)

    def test_where_the_budget_is_used_up_the_socket_serves(self, planes, monkeypatch):
        used = memory.BUDGET.used
        monkeypatch.setattr(type(self), "link", StreamLink)
        with dask.config.set({"meshtape.shared-memory": 0}):
            self.connected(planes)
        assert memory.BUDGET.used == used

    def test_what_is_taken_of_the_budget_is_given_back(self, planes):
        used = memory.BUDGET.used
        self.connected(planes)
        assert memory.BUDGET.used == used + 2 * memory.SLOTS * QUANTUM
        for p in planes:
            p.unregister_mesh(MESH)
        assert memory.BUDGET.used == used

    def test_where_the_other_cannot_open_it_the_socket_serves(self, planes, monkeypatch):
        monkeypatch.setattr(
            memory.SharedSegment, "open", classmethod(lambda cls, name: (_ for _ in ()).throw(OSError("no")))
        )
        monkeypatch.setattr(type(self), "link", StreamLink)
        self.connected(planes)
        assert segments() == []

    def test_it_is_told_of_through_a_socket_of_the_system(self, pair):
        assert {x.stream._sock.family for g in pair for x in g.links.values()} == {socket.AF_UNIX}
        assert segments() == []

    def test_where_there_is_no_door_the_connection_serves(self, planes, monkeypatch):
        def none(*args: Any) -> None:
            raise OSError(1, "Operation not permitted")

        monkeypatch.setattr(os, "fchmod", none)
        groups = self.connected(planes)
        assert {x.stream._sock.family for g in groups for x in g.links.values()} == {socket.AF_INET}
        x = np.zeros(QUANTUM)
        one, two = groups
        ends = together(lambda: one.exchange(0, "x", {1: [x + 1]}, {}), lambda: two.exchange(0, "x", {}, {0: [x]}))
        assert ends == [None, None]
        assert x.all()

    def test_only_its_user_can_open_a_door(self):
        door = UnixListener(f"meshtape-{os.getpid()}-test")
        path = memory.ROOT / f"meshtape-{os.getpid()}-test.door"
        try:
            assert path.stat().st_mode & 0o777 == 0o600
        finally:
            door.close()
        assert not path.exists()
        with pytest.raises(FileNotFoundError):
            enter(f"meshtape-{os.getpid()}-test")

    def test_a_stranger_behind_a_door_is_not_taken_for_the_peer(self, planes, monkeypatch):
        monkeypatch.setattr(rendezvous, "enter", lambda name: stranger(enter(name)))

        def stranger(sock: socket.socket) -> socket.socket:
            sock.sendall(b"x" * 16)  # before what the peer says
            return sock

        one, two = planes[:2]
        peers = [{1: two.address}, {0: one.address}]
        groups = [planes[me].group(MESH, 0, me, peers[me], RANKS, 1.0) for me in (0, 1)]
        found = together(*[lambda g=g, p=p: g.connect(p) for g, p in zip(groups, peers, strict=True)])
        assert isinstance(found[0], CollectiveTimeout)  # nobody has joined

    def test_names_that_a_killed_process_left_are_removed(self):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        stale = memory.ROOT / f"meshtape-{pid}-0123"
        stale.write_bytes(b"")
        memory.SharedSegment.create().unlink()
        assert not stale.exists()

    @pytest.mark.parametrize("name", ["../etc/passwd", "other", "meshtape-1/../x"])
    def test_only_our_names_are_opened(self, name):
        with pytest.raises(OSError, match="no segment's name"):
            memory.SharedSegment.open(name)


@pytest.mark.parametrize("processes", [1, 2, 3, 16, 64, 500, 5000])
def test_the_processes_of_a_host_share_one_bound_of_memory(processes):
    """A gibibyte, however many there are and whoever connects to whom; each gets its part of it."""
    budget = memory.Budget()
    budget.share(processes)
    taken = [n for n in (budget.take() for _ in range(2000)) if n]
    assert all(n % (2 * QUANTUM) == 0 and n <= 2 * memory.SLOTS * QUANTUM for n in taken)
    assert taken == sorted(taken, reverse=True)
    assert processes * sum(taken) <= 1 << 30
    assert taken or processes > 500
    for n in taken:
        budget.give_back(n)
    assert budget.used == 0
