"""How processes find each other: who is let in, and what is said when one does not come. What they then say is
test_transports'."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from meshtape.errors import ClusterError, CollectiveMismatch, CollectiveTimeout, RankLost
from meshtape.parallel.transports import frames, listener, rendezvous
from meshtape.parallel.transports.group import LinkGroup
from meshtape.parallel.transports.rendezvous import DataPlane, interface_of

from .conftest import MESH, SECRET

RANKS = {0: "rank 0", 1: "rank 1", 2: "rank 2"}

pytestmark = pytest.mark.timeout(300)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Results, or errors, of calls that run at the same time."""
    out: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            out[i] = calls[i]()
        except Exception as e:
            out[i] = e

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(200)
    assert not any(t.is_alive() for t in threads)
    return out


def joined(plane: DataPlane, epoch: int, me: int, peers: Any, timeout: float) -> LinkGroup:
    """The place of a process, with all its connections."""
    group = plane.group(MESH, epoch, me, peers, RANKS, timeout)
    group.connect(peers)
    return group


def connected(planes: Sequence[DataPlane], count: int = 2, epoch: int = 0, timeout: float = 60.0) -> list[LinkGroup]:
    def join(me: int) -> LinkGroup:
        peers = {p: planes[p].address for p in range(count) if p != me}
        return joined(planes[me], epoch, me, peers, timeout)

    groups = together(*[lambda me=me: join(me) for me in range(count)])
    for g in groups:
        assert isinstance(g, LinkGroup), g
        g.begin(1, timeout)
    return groups


# ----- joining --------------------------------------------------------------------------------------------------------


def test_a_group_is_connected_once(planes):
    one, two = connected(planes)
    assert connected(planes) == [one, two]


def test_a_new_epoch_has_new_connections(planes):
    one, _ = connected(planes)
    again, _ = connected(planes, epoch=1)
    assert again is not one
    assert one.links == {}
    planes[0].drop(MESH, 1)
    assert again.links == {}


def test_a_process_that_never_joins_is_named(planes):
    with pytest.raises(CollectiveTimeout, match="rank 1 did not join the mesh within 0 s"):
        joined(planes[0], 0, 0, {1: planes[1].address}, 0.2)


def test_a_process_that_is_not_there_is_named(planes):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]  # bound, so that nobody else gets it, and not listened at
        with pytest.raises(RankLost, match=rf"rank 0 cannot be reached at 127\.0\.0\.1:{port}"):
            joined(planes[1], 0, 1, {0: ("127.0.0.1", port)}, 60.0)


def test_a_wait_is_ended_from_outside(planes):
    """The client tells workers that one of them failed: those that wait for it do so no longer."""

    def join() -> LinkGroup:
        return joined(planes[0], 0, 0, {1: planes[1].address}, 200.0)

    threading.Timer(0.1, planes[0].stop, (MESH, 0)).start()
    (error,) = together(join)
    assert isinstance(error, RankLost)
    assert "rank 1 left before it joined the mesh" in str(error)
    one, _ = connected(planes, epoch=1)  # the next epoch is not stopped
    threading.Timer(0.1, planes[0].stop, (MESH, 1)).start()
    with pytest.raises(RankLost, match="rank 1 left during sum"):
        one.exchange(0, "sum", {}, {1: [np.zeros(1)]})


def test_a_dismissed_mesh_is_forgotten(planes):
    one, _ = connected(planes)
    planes[0].unregister_mesh(MESH)
    assert one.links == {}
    with pytest.raises(RankLost, match="rank 0 forgot the mesh: it was closed"):
        joined(planes[0], 1, 0, {1: planes[1].address}, 1.0)


# ----- strangers ------------------------------------------------------------------------------------------------------


def greeting(mesh: bytes) -> bytes:
    return rendezvous._HELLO.pack(rendezvous._MAGIC, mesh, 0, 1, os.urandom(32), bytes(32), bytes(16), False, 1)


def read(sock: socket.socket, n: int) -> bytes:
    out = b""
    while len(out) < n:
        part = sock.recv(n - len(out))
        assert part, f"closed after {len(out)} of {n} bytes"
        out += part
    return out


def stranger(plane: DataPlane) -> socket.socket:
    return socket.create_connection(plane.address, timeout=60)


def closed(sock: socket.socket) -> bool:
    """Whether the other side hung up without a word (the nonce of the greeting aside)."""
    with sock:
        sock.settimeout(60)
        said = b""
        try:
            while part := sock.recv(4096):
                said += part
        except ConnectionError:
            return True
        return len(said) <= 32


def test_strangers_are_closed_and_do_not_disturb(planes):
    silent = stranger(planes[0])  # says nothing, and stays
    garbage = stranger(planes[0])
    garbage.sendall(os.urandom(500))
    assert closed(garbage)
    hello = greeting(MESH)
    wrong = stranger(planes[0])
    nonce = read(wrong, 32)
    wrong.sendall(hello + rendezvous._proof(b"x" * 32, b"connect", nonce, hello))
    assert closed(wrong)
    other_mesh = stranger(planes[0])
    nonce = read(other_mesh, 32)
    foreign = greeting(b"z" * 16)
    other_mesh.sendall(foreign + rendezvous._proof(SECRET, b"connect", nonce, foreign))
    assert closed(other_mesh)
    replayed = stranger(planes[0])  # a proof is good for one nonce only
    replayed.sendall(hello + rendezvous._proof(SECRET, b"connect", nonce, hello))
    assert closed(replayed)
    turned = stranger(planes[0])  # and for one side: what the other one answers is none
    turned.sendall(hello + rendezvous._proof(SECRET, b"accept", read(turned, 32), hello))
    assert closed(turned)
    assert planes[0]._arrived == {}
    one, two = connected(planes)
    x = np.zeros(1)
    ends = together(lambda: one.exchange(0, "sum", {1: [np.ones(1)]}, {}), lambda: two.exchange(0, "sum", {}, {0: [x]}))
    assert ends == [None, None]
    assert x[0] == 1
    silent.close()


def test_a_silent_stranger_is_given_up(planes, monkeypatch):
    monkeypatch.setattr(listener, "GREETING", 0.2)
    assert closed(stranger(planes[0]))


def test_a_server_that_does_not_know_the_secret_is_refused(planes):
    """Both sides prove themselves: a process does not send blocks to whoever listens at the address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(os.urandom(32))
                read(sock, rendezvous._HELLO.size + 32)
                sock.sendall(os.urandom(32))
                sock.recv(1)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(RankLost, match=r"cannot be reached.* does not know the mesh's secret"):
            joined(planes[1], 0, 1, {0: listener.getsockname()[:2]}, 60.0)


def test_what_is_no_message_is_refused(planes):
    one, two = connected(planes)
    one.links[1].stream.write(struct.pack(">4s", b"HTTP") + bytes(frames.SIZE), 1.0)
    with pytest.raises(CollectiveMismatch, match="rank 0 sent what is no message of this mesh"):
        two.exchange(0, "sum", {}, {0: [np.zeros(1)]})


@pytest.mark.parametrize(("mesh", "process"), [(b"z" * 16, 0), (MESH, 2)])
def test_a_message_of_another_mesh_or_process_is_refused(planes, mesh, process):
    one, two = connected(planes)
    head = frames.pack(frames.DATA, 0, mesh, frames.FramePosition(1, 0, 0), process, 8, "sum")
    one.links[1].stream.write(head + bytes(8), 1.0)
    with pytest.raises(CollectiveMismatch, match="rank 0 sent what is no message of this mesh"):
        two.exchange(0, "sum", {}, {0: [np.zeros(1)]})


def test_a_worker_that_left_ends_every_wait(planes):
    threading.Timer(0.1, planes[0].on_peer_lost, (MESH, "tcp://1.2.3.4:5")).start()
    with pytest.raises(RankLost, match="rank 1 left before it joined the mesh"):
        joined(planes[0], 0, 0, {1: planes[1].address}, 200.0)
    assert planes[0].missing(MESH) == "tcp://1.2.3.4:5"
    planes[0].unregister_mesh(MESH)
    assert planes[0].missing(MESH) is None


def test_a_process_that_lives_answers(planes):
    assert planes[0].answers(planes[1].address, 60.0)
    with socket.socket() as mute:  # as the port of a stopped process: the system still accepts
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        assert not planes[0].answers(mute.getsockname()[:2], 0.2)


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("tcp://10.0.0.5:4000", "10.0.0.5"),
        ("tcp://[::1]:4000", "::1"),
        ("tls://10.0.0.5:4000", "10.0.0.5"),
        ("ucx://10.0.0.5:4000", "10.0.0.5"),
        ("inproc://10.0.0.5/1/2", "127.0.0.1"),
    ],
)
def test_the_plane_listens_where_its_worker_does(address, host):
    assert interface_of(address) == host


def test_protocols_without_a_host_are_refused():
    with pytest.raises(ClusterError, match=r"this one is at odd://.*: set meshtape.transport to comms"):
        interface_of("odd://10.0.0.5:4000")
