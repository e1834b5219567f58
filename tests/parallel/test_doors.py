"""The port of a data plane under strangers: it stays open, spends a bounded amount on them, and the mesh goes on. With
real sockets."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtape.errors import CollectiveTimeout, RankLost
from meshtape.parallel.transports import listener, rendezvous
from meshtape.parallel.transports.group import LinkGroup
from meshtape.parallel.transports.streams import SocketStream

from .conftest import MESH
from .test_dataplane import RANKS, closed, connected, greeting, read, stranger, together

pytestmark = pytest.mark.timeout(300)


def talks(one: LinkGroup, two: LinkGroup) -> None:
    x = np.zeros(3)
    ends = together(lambda: one.exchange(0, "x", {1: [np.ones(3)]}, {}), lambda: two.exchange(0, "x", {}, {0: [x]}))
    assert ends == [None, None]
    np.testing.assert_array_equal(x, 1)


def test_a_process_without_descriptors_opens_its_port_again(planes, eventually):
    late = [socket.socket() for _ in range(3)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A limit of 0 would end other servers of this process: poll fails where it is asked of more than the limit.
    highest = max(int(f.name) for f in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for sock in late:
            sock.connect(planes[0].address)
        eventually(lambda: planes[0]._listener.starved)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)
    for sock in late:
        with sock:
            sock.settimeout(60)
            assert len(read(sock, 32)) == 32
    talks(*connected(planes))


@pytest.mark.parametrize("errno", [103, 12, 23, 71])  # ECONNABORTED, ENOMEM, ENFILE, EPROTO
def test_an_error_of_one_connection_closes_no_port(planes, errno):
    """The system tells ``accept`` of errors of the connection that it would have given."""
    plane, failed = planes[0], threading.Event()

    class Failing:
        def __init__(self, true: socket.socket) -> None:
            self.true = true

        def __getattr__(self, name: str) -> Any:
            return getattr(self.true, name)

        def accept(self) -> Any:
            if not failed.is_set():
                failed.set()
                raise OSError(errno, os.strerror(errno))
            return self.true.accept()

    plane._listener._socket = Failing(plane._listener._socket)
    with stranger(plane) as first:  # ends the accept that is under way
        read(first, 32)
    talks(*connected(planes))
    assert failed.is_set()


def test_where_no_thread_can_be_had_the_port_stays_open(planes, monkeypatch):
    failures = iter([True, True])
    start = threading.Thread.start

    def fails(self: threading.Thread) -> None:
        if self.name == "meshtape-greet" and next(failures, False):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", fails)
    for _ in range(2):
        assert closed(stranger(planes[0]))
    talks(*connected(planes))


def test_a_crowd_of_silent_strangers_keeps_nobody_out(planes):
    """More than there is room for, all of which stay: the mesh connects between them, in as many threads as there are
    places."""
    crowd = [stranger(planes[0]) for _ in range(3 * listener.GREETED)]
    one, two = connected(planes)
    talks(one, two)
    assert planes[0]._gate.most <= listener.GREETED
    assert sum(t.name == "meshtape-greet" for t in threading.enumerate()) <= 3 * listener.GREETED
    more = [stranger(planes[0]) for _ in range(2 * listener.GREETED)]  # who is in is not put out for others
    talks(one, two)
    for sock in [*crowd, *more]:
        sock.close()


def test_a_crowd_that_keeps_coming_keeps_nobody_out(planes):
    stop = threading.Event()

    def come() -> None:
        kept = []
        while not stop.is_set():
            with contextlib.suppress(OSError):
                kept.append(stranger(planes[0]))
                kept[-1].sendall(os.urandom(20))
            for sock in kept[:-50]:
                sock.close()
            del kept[:-50]
            time.sleep(0.001)
        for sock in kept:
            sock.close()

    threads = [threading.Thread(target=come, daemon=True) for _ in range(3)]
    for t in threads:
        t.start()
    try:
        for epoch in range(5):
            talks(*connected(planes, epoch=epoch))
    finally:
        stop.set()
        for t in threads:
            t.join(60)
    assert planes[0]._gate.most <= listener.GREETED


def test_the_crowd_of_one_address_makes_room_for_others():
    gate, ended = listener.Gate(limit=4), []

    def enter(address: str) -> int:
        def end() -> None:
            ended.append(address)
            threading.Thread(target=lambda: gate.leave(place), daemon=True).start()

        place = gate.enter(address, end)
        return place

    for address in ("a", "b", "b", "b", "c", "d"):
        enter(address)
    assert set(ended) == {"b"}  # whoever else came stays
    assert gate.most == 4


def test_a_hello_that_comes_byte_by_byte_ends_when_its_time_is_over(planes, monkeypatch):
    """The limit is on all of it: a byte now and then does not keep the place."""
    monkeypatch.setattr(listener, "GREETING", 0.4)
    hello = greeting(MESH) + bytes(32)
    with stranger(planes[0]) as sock:
        read(sock, 32)
        sent = 0
        with contextlib.suppress(OSError):
            for byte in hello:
                sock.sendall(bytes([byte]))
                sent += 1
                sock.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    assert sock.recv(1) == b""
                    break
        assert sent < len(hello)


def test_a_hello_without_end_is_closed_after_its_first_bytes(planes, monkeypatch):
    """Nobody gets large buffers who has not proved to belong here."""
    trusted = []
    monkeypatch.setattr(SocketStream, "trust", lambda self: trusted.append(self))
    sent = 0
    with stranger(planes[0]) as sock, contextlib.suppress(ConnectionError):
        read(sock, 32)
        while sent < 256 << 20:
            sent += sock.send(bytes(1 << 20))
    assert sent < 256 << 20
    assert trusted == []
    connected(planes)
    assert len(trusted) == 2


@pytest.mark.parametrize("repeats", [1, 200])
def test_a_recorded_handshake_is_good_for_nothing(planes, repeats):
    """Played again as it was, and with the nonce of another connection."""
    taken = []
    write = SocketStream.write

    def recorded(self: SocketStream, data: bytes, timeout: float) -> None:
        taken.append(bytes(data))
        write(self, data, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SocketStream, "write", recorded)
        connected(planes)
    (hello,) = [d for d in taken if len(d) == rendezvous._HELLO.size + 32]
    for _ in range(repeats):
        with stranger(planes[0]) as sock:
            read(sock, 32)
            sock.sendall(hello)
            assert closed(sock)
    assert planes[0]._arrived == {}
    talks(*connected(planes, epoch=1))


def test_connections_are_made_when_they_are_used(planes):
    groups = [
        planes[me].group(MESH, 0, me, {p: planes[p].address for p in range(3) if p != me}, RANKS, 60.0)
        for me in range(3)
    ]
    assert [g.links for g in groups] == [{}, {}, {}]
    talks(*groups[:2])
    assert [sorted(g.links) for g in groups] == [[1], [0], []]


def test_a_connection_that_is_closed_to_make_room_is_tried_again(planes, monkeypatch):
    greet, refused = planes[0].accept, []

    def crowded(stream: Any, proved: Any) -> None:
        if len(refused) < 2:
            refused.append(stream)
            stream.close()
        else:
            greet(stream, proved)

    monkeypatch.setattr(planes[0], "accept", crowded)
    talks(*connected(planes))
    assert len(refused) == 2


def test_a_process_that_stands_still_is_not_waited_for_until_the_end(planes, monkeypatch):
    """One that should connect, and one to connect to: both are asked whether they live."""
    with socket.socket() as mute:  # the port of a stopped process: the system still accepts
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        for me, peer in ((0, 1), (1, 0)):
            group = planes[me].group(MESH, 0, me, {peer: mute.getsockname()[:2]}, RANKS, 10_000.0)
            group.silence = 0.2
            with pytest.raises(CollectiveTimeout, match=f"no answer from rank {peer}, whose process is stopped"):
                group.connect([peer])


def test_a_mesh_that_is_closed_is_not_connected_to_again(planes):
    group = planes[0].group(MESH, 0, 0, {1: planes[1].address}, RANKS, 60.0)
    planes[0].unregister_mesh(MESH)
    with pytest.raises(RankLost, match="rank 1 left before it joined the mesh"):
        group.connect([1])
