"""The sockets between processes: who is let in, what is said when two meet in different places, how an end is told."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from meshtape.errors import ClusterError, CollectiveMismatch, CollectiveTimeout, RankLost
from meshtape.parallel import dataplane
from meshtape.parallel.dataplane import DataPlane, Group, interface_of

MESH, SECRET = b"m" * 16, b"s" * 32
RANKS = {0: "rank 0", 1: "rank 1", 2: "rank 2"}

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def planes() -> Iterator[list[DataPlane]]:
    made = [DataPlane("127.0.0.1") for _ in range(3)]
    for p in made:
        p.admit(MESH, SECRET)
    yield made
    for p in made:
        p.close()
    assert not any(p._thread.is_alive() for p in made)


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
        t.join(30)
    assert not any(t.is_alive() for t in threads)
    return out


def connected(planes: Sequence[DataPlane], count: int = 2, epoch: int = 0, timeout: float = 5.0) -> list[Group]:
    def join(me: int) -> Group:
        peers = {p: (planes[p].host, planes[p].port) for p in range(count) if p != me}
        return planes[me].group(MESH, epoch, me, peers, RANKS, timeout)

    groups = together(*[lambda me=me: join(me) for me in range(count)])
    for g in groups:
        assert isinstance(g, Group), g
        g.begin(1, timeout)
    return groups


def exchange(group: Group, step: int, what: str, send: dict[int, Any], receive: dict[int, Any]) -> Callable[[], None]:
    return lambda: group.exchange(step, what, send, receive)


# ----- exchanges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (5,), (300, 1000)], ids=str)
def test_all_processes_exchange_with_all(planes, shape):
    groups = connected(planes, 3)
    own = [np.full(shape, float(p)) for p in range(3)]
    got = {(a, b): np.empty(shape) for a in range(3) for b in range(3) if a != b}
    calls = [
        exchange(
            g, 0, "all", {p: [own[me]] for p in range(3) if p != me}, {p: [got[me, p]] for p in range(3) if p != me}
        )
        for me, g in enumerate(groups)
    ]
    assert together(*calls) == [None] * 3
    for (_, sender), block in got.items():
        np.testing.assert_array_equal(block, own[sender])


def test_large_blocks_in_both_directions_at_once(planes):
    """More than both sockets' buffers hold: sends and receives must overlap."""
    one, two = connected(planes)
    a, b = np.arange(4_000_000.0), -np.arange(4_000_000.0)
    x, y = np.empty_like(b), np.empty_like(a)
    assert together(exchange(one, 0, "swap", {1: [a]}, {1: [x]}), exchange(two, 0, "swap", {0: [b]}, {0: [y]})) == [
        None,
        None,
    ]
    np.testing.assert_array_equal(x, b)
    np.testing.assert_array_equal(y, a)


def test_many_small_arrays_in_one_message(planes):
    """More buffers than one system call takes."""
    one, two = connected(planes)
    parts = [np.full(i % 4, i) for i in range(300)]
    got = [np.empty_like(p) for p in parts]
    assert together(exchange(one, 0, "parts", {1: parts}, {}), exchange(two, 0, "parts", {}, {0: got})) == [None, None]
    for p, g in zip(parts, got, strict=True):
        np.testing.assert_array_equal(p, g)


def test_a_group_is_connected_once(planes):
    one, two = connected(planes)
    assert connected(planes) == [one, two]


def test_a_new_epoch_has_new_connections(planes):
    one, _ = connected(planes)
    again, _ = connected(planes, epoch=1)
    assert again is not one
    assert one._socks == {}
    planes[0].drop(MESH, 1)
    assert again._socks == {}


# ----- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [((3, "all_reduce(a)", 4), (5, "all_gather(b)", 4)), ((3, "all_reduce(a)", 4), (3, "all_gather(b)", 6))],
    ids=["another step", "another size"],
)
def test_processes_that_are_elsewhere_in_the_program_both_say_so(planes, mine, theirs):
    one, two = connected(planes)

    def call(g: Group, peer: int, where: tuple[int, str, int]) -> Callable[[], None]:
        step, what, n = where
        return exchange(g, step, what, {peer: [np.zeros(n)]}, {peer: [np.zeros(n)]})

    for error in together(call(one, 1, mine), call(two, 0, theirs)):
        assert isinstance(error, CollectiveMismatch)
        for words in ("rank 0", "rank 1", "all_reduce(a)", "all_gather(b)", "step 3", "32 bytes"):
            assert words in str(error)


def test_another_run_is_a_mismatch_too(planes):
    one, two = connected(planes)
    two.begin(7, 5.0)
    one_array, two_array = np.zeros(1), np.zeros(1)
    errors = together(
        exchange(one, 0, "sum", {1: [one_array]}, {1: [one_array]}),
        exchange(two, 0, "sum", {0: [two_array]}, {0: [two_array]}),
    )
    assert all(isinstance(e, CollectiveMismatch) and "run 7" in str(e) and "run 1" in str(e) for e in errors)


def test_silence_is_a_timeout_that_names_who_is_missing(planes):
    one, _, _ = connected(planes, 3)
    one.begin(1, 0.3)
    with pytest.raises(CollectiveTimeout, match=r"all_reduce\(a\): no answer within 0 s from rank 1, rank 2"):
        one.exchange(0, "all_reduce(a)", {}, {1: [np.zeros(1)], 2: [np.zeros(1)]})


def test_a_process_that_never_joins_is_named(planes):
    with pytest.raises(CollectiveTimeout, match="rank 1 did not join the mesh within 0 s"):
        planes[0].group(MESH, 0, 0, {1: (planes[1].host, planes[1].port)}, RANKS, 0.2)


def test_a_process_that_is_not_there_is_named(planes):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(RankLost, match=rf"rank 0 cannot be reached at 127\.0\.0\.1:{port}"):
        planes[1].group(MESH, 0, 1, {0: ("127.0.0.1", port)}, RANKS, 1.0)


# ----- ends -----------------------------------------------------------------------------------------------------------


def test_an_abort_tells_the_others_why(planes):
    one, two = connected(planes)
    one.abort("ValueError: no such thing")
    with pytest.raises(RankLost, match="rank 0 stopped: ValueError: no such thing"):
        two.exchange(0, "sum", {}, {0: [np.zeros(1)]})


def test_an_abort_is_heard_by_a_process_that_was_sending(planes):
    one, two = connected(planes)
    one.abort("ValueError: no such thing")
    one.close()
    big = np.zeros(4_000_000)
    with pytest.raises(RankLost, match=r"rank 0 (stopped: ValueError: no such thing|left)"):
        two.exchange(0, "sum", {0: [big]}, {0: [big]})


def test_a_process_that_leaves_is_found_out_at_once(planes):
    one, two = connected(planes)
    threading.Timer(0.1, one.close).start()
    start = time.monotonic()
    with pytest.raises(RankLost, match=r"rank 0 left during all_reduce\(a\)"):
        two.exchange(0, "all_reduce(a)", {}, {0: [np.zeros(1)]})
    assert time.monotonic() - start < 4


def test_a_wait_is_ended_from_outside(planes):
    """The client tells workers that one of them failed: those that wait for it do so no longer."""

    def join() -> Group:
        return planes[0].group(MESH, 0, 0, {1: (planes[1].host, planes[1].port)}, RANKS, 30.0)

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
    planes[0].dismiss(MESH)
    assert one._socks == {}
    with pytest.raises(RankLost, match="rank 0 forgot the mesh: it was closed"):
        planes[0].group(MESH, 1, 0, {1: (planes[1].host, planes[1].port)}, RANKS, 1.0)


# ----- strangers ------------------------------------------------------------------------------------------------------


def stranger(plane: DataPlane) -> socket.socket:
    return socket.create_connection((plane.host, plane.port), timeout=5)


def closed(sock: socket.socket) -> bool:
    """Whether the other side hung up without a word (the nonce of the greeting aside)."""
    with sock:
        sock.settimeout(5)
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
    hello = dataplane._HELLO.pack(dataplane._MAGIC, MESH, 0, 1, os.urandom(32))
    wrong = stranger(planes[0])
    nonce = dataplane._read(wrong, 32)
    wrong.sendall(hello + dataplane._proof(b"x" * 32, b"connect", nonce, hello))
    assert closed(wrong)
    other_mesh = stranger(planes[0])
    nonce = dataplane._read(other_mesh, 32)
    foreign = dataplane._HELLO.pack(dataplane._MAGIC, b"z" * 16, 0, 1, os.urandom(32))
    other_mesh.sendall(foreign + dataplane._proof(SECRET, b"connect", nonce, foreign))
    assert closed(other_mesh)
    replayed = stranger(planes[0])  # a proof is good for one nonce only
    replayed.sendall(hello + dataplane._proof(SECRET, b"connect", nonce, hello))
    assert closed(replayed)
    assert planes[0]._arrived == {}
    one, two = connected(planes)
    x = np.zeros(1)
    assert together(exchange(one, 0, "sum", {1: [np.ones(1)]}, {}), exchange(two, 0, "sum", {}, {0: [x]})) == [
        None,
        None,
    ]
    assert x[0] == 1
    silent.close()


def test_a_silent_stranger_is_given_up(planes, monkeypatch):
    monkeypatch.setattr(dataplane, "_HANDSHAKE_TIMEOUT", 0.2)
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
                dataplane._read(sock, dataplane._HELLO.size + 32)
                sock.sendall(os.urandom(32))
                sock.recv(1)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(RankLost, match=r"cannot be reached.* does not know the mesh's secret"):
            planes[1].group(MESH, 0, 1, {0: listener.getsockname()[:2]}, RANKS, 5.0)


def test_what_is_no_message_is_refused(planes):
    one, two = connected(planes)
    one._socks[1].sendall(struct.pack(">4s", b"HTTP") + bytes(dataplane._HEADER.size))
    with pytest.raises(CollectiveMismatch, match="rank 0 sent what is no message of a mesh"):
        two.exchange(0, "sum", {}, {0: [np.zeros(1)]})


@pytest.mark.parametrize(
    ("address", "host"),
    [("tcp://10.0.0.5:4000", "10.0.0.5"), ("tcp://[::1]:4000", "::1"), ("inproc://10.0.0.5/1/2", "127.0.0.1")],
)
def test_the_plane_listens_where_its_worker_does(address, host):
    assert interface_of(address) == host


def test_clusters_with_tls_are_refused():
    with pytest.raises(ClusterError, match="uses TLS, and the mesh's own connections cannot yet"):
        interface_of("tls://10.0.0.5:4000")
    with pytest.raises(ClusterError, match="this one is at ucx://"):
        interface_of("ucx://10.0.0.5:4000")
