"""Sockets between the processes of a mesh: how blocks travel from worker to worker.

Each Dask worker opens one listening socket on its own interface. Processes of a mesh connect to each other when their first
program runs and stay connected. A connection is accepted only after both sides have proved, by HMAC-SHA256 over a fresh nonce,
that they know the secret that the client gave the mesh's workers over Dask's control plane; whatever else arrives is closed.

A message is a fixed header (run, step, sender, length, what it is for) and raw bytes of known length: nothing is unpickled.
Processes that meet in different steps of a program find out at once and say so, instead of waiting for ever. Sends and receives
of one exchange overlap, by polling non-blocking sockets; no thread is started for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from ..arrays.errors import ClusterError, CollectiveMismatch, CollectiveTimeout, RankLost

_HELLO = struct.Struct(">4s16sQI32s")  # magic, mesh, epoch, process, nonce
_HEADER = struct.Struct(">4sQIIQ64s")  # magic, run, step, process, length, what
_MAGIC, _DATA, _ABORT = b"MTH1", b"MTD1", b"MTA1"
_HANDSHAKE_TIMEOUT = 10.0
_SOCKET_BUFFER = 4 << 20
_IOV = 64  # buffers a system call takes


def _proof(secret: bytes, role: bytes, nonce: bytes, hello: bytes) -> bytes:
    return hmac.new(secret, role + nonce + hello, hashlib.sha256).digest()


def _read(sock: socket.socket, n: int) -> bytes:
    out = bytearray()
    while len(out) < n:
        part = sock.recv(n - len(out))
        if not part:
            raise ConnectionError("closed during the handshake")
        out += part
    return bytes(out)


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)


class DataPlane:
    """The listening side of one process. Made by :func:`meshtape.parallel.gang.open_plane` on each worker."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((host, 0))
        self._listener.listen(128)
        self.host, self.port = self._listener.getsockname()[:2]
        self._secrets: dict[bytes, bytes] = {}
        self._arrived: dict[tuple[bytes, int, int], socket.socket] = {}
        self._groups: dict[tuple[bytes, int], Group] = {}
        self._stopped: set[tuple[bytes, int]] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="meshtape-accept", daemon=True)
        self._thread.start()

    def admit(self, mesh: bytes, secret: bytes) -> None:
        """Let processes of this mesh in that know its secret."""
        self._secrets[mesh] = secret

    def stop(self, mesh: bytes, epoch: int) -> None:
        """End what an epoch of a mesh still waits for here: one of its processes failed. Called by any thread."""
        with self._changed:
            self._stopped.add((mesh, epoch))
            group = self._groups.get((mesh, epoch))
            if group is not None:
                group.shutdown()
            self._changed.notify_all()

    def dismiss(self, mesh: bytes) -> None:
        """Forget a mesh and close its connections."""
        self._secrets.pop(mesh, None)
        with self._changed:
            self._stopped = {s for s in self._stopped if s[0] != mesh}
            for key in [k for k in self._groups if k[0] == mesh]:
                self._groups.pop(key).close()
            for key in [k for k in self._arrived if k[0] == mesh]:
                self._arrived.pop(key).close()

    def close(self) -> None:
        """Stop listening and close everything."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for mesh in list(self._secrets):
            self.dismiss(mesh)
        self._thread.join(timeout=5)

    # ----- connecting -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(sock,), name="meshtape-greet", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        """The accepting side of the handshake, with a bound on its time; strangers are closed without a word."""
        try:
            sock.settimeout(_HANDSHAKE_TIMEOUT)
            nonce = os.urandom(32)
            sock.sendall(nonce)
            hello = _read(sock, _HELLO.size)
            magic, mesh, epoch, process, theirs = _HELLO.unpack(hello)
            proof = _read(sock, 32)
            secret = self._secrets.get(mesh)
            if magic != _MAGIC or secret is None:
                raise ConnectionError("a stranger")
            if not hmac.compare_digest(proof, _proof(secret, b"connect", nonce, hello)):
                raise ConnectionError("a wrong secret")
            sock.sendall(_proof(secret, b"accept", theirs, hello))
            _tune(sock)
            with self._changed:
                self._arrived[(mesh, epoch, process)] = sock
                self._changed.notify_all()
        except (OSError, struct.error):
            sock.close()

    def _connect(self, mesh: bytes, epoch: int, process: int, peer: tuple[str, int], timeout: float) -> socket.socket:
        secret = self._secrets[mesh]
        sock = socket.create_connection(peer, timeout=timeout)
        try:
            nonce = _read(sock, 32)
            hello = _HELLO.pack(_MAGIC, mesh, epoch, process, os.urandom(32))
            sock.sendall(hello + _proof(secret, b"connect", nonce, hello))
            if not hmac.compare_digest(_read(sock, 32), _proof(secret, b"accept", hello[-32:], hello)):
                raise ConnectionError(f"{peer[0]}:{peer[1]} does not know the mesh's secret")
            _tune(sock)
        except BaseException:
            sock.close()
            raise
        return sock

    def group(
        self,
        mesh: bytes,
        epoch: int,
        process: int,
        peers: Mapping[int, tuple[str, int]],
        ranks: Mapping[int, str],
        timeout: float,
    ) -> Group:
        """The connections to all other processes of a mesh, made now where there are none yet.

        ``peers`` gives every process's address, ``ranks`` its name in messages. Each pair has one connection: the process
        with the higher number connects.
        """
        key = (mesh, epoch)
        found = self._groups.get(key)
        if found is not None:
            return found
        if mesh not in self._secrets:
            raise RankLost(f"{ranks.get(process, 'this process')} forgot the mesh: it was closed")
        deadline = time.monotonic() + timeout
        socks: dict[int, socket.socket] = {}
        try:
            for p in sorted(peers):
                if p < process:
                    try:
                        socks[p] = self._connect(mesh, epoch, process, peers[p], timeout)
                    except OSError as e:
                        raise RankLost(f"{ranks[p]} cannot be reached at {peers[p][0]}:{peers[p][1]}: {e}") from e
            for p in sorted(peers):
                if p > process:
                    with self._changed:
                        while (mesh, epoch, p) not in self._arrived:
                            if (mesh, epoch) in self._stopped:
                                raise RankLost(f"{ranks[p]} left before it joined the mesh")
                            left = deadline - time.monotonic()
                            if left <= 0 or self._closed:
                                raise CollectiveTimeout(f"{ranks[p]} did not join the mesh within {timeout:.0f} s")
                            self._changed.wait(left)
                        socks[p] = self._arrived.pop((mesh, epoch, p))
        except BaseException:
            for s in socks.values():
                s.close()
            raise
        for key_old in [k for k in self._groups if k[0] == mesh and k[1] != epoch]:
            self._groups.pop(key_old).close()
        group = self._groups[key] = Group(process, socks, ranks)
        return group

    def drop(self, mesh: bytes, epoch: int) -> None:
        """Close a group after a failure; the next run of the mesh has a new epoch."""
        group = self._groups.pop((mesh, epoch), None)
        if group is not None:
            group.close()


class Group:
    """Connections of one process to the others of its mesh; an ``Exchange`` once :meth:`begin` named the run."""

    def __init__(self, process: int, socks: Mapping[int, socket.socket], ranks: Mapping[int, str]) -> None:
        self._process, self._ranks = process, ranks
        self._socks = dict(socks)
        self._peer_of = {}
        self._poll = select.poll()
        for p, s in self._socks.items():
            s.setblocking(False)
            self._peer_of[s.fileno()] = p
        self._run, self._timeout = 0, 60.0

    def begin(self, run: int, timeout: float) -> None:
        """The exchanges that follow belong to run number ``run``; each may take ``timeout`` seconds."""
        self._run, self._timeout = run, timeout

    def close(self) -> None:
        for s in self._socks.values():
            s.close()
        self._socks = {}

    def shutdown(self) -> None:
        """End the connections without giving them up: whoever waits for one sees it closed. Called by any thread."""
        for s in list(self._socks.values()):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def abort(self, reason: str) -> None:
        """Tell all others why this process stops, as far as they still listen."""
        text = reason.encode()[:4096]
        head = _HEADER.pack(_ABORT, self._run, 0, self._process, len(text), b"")
        for s in self._socks.values():
            with contextlib.suppress(OSError):
                s.settimeout(1.0)
                s.sendall(head + text)

    def exchange(
        self,
        step: int,
        what: str,
        sends: Mapping[int, Sequence[np.ndarray]],
        receives: Mapping[int, Sequence[np.ndarray]],
    ) -> None:
        """See ``executor.Exchange``."""
        label = what.encode()[:64]
        out: dict[int, list[memoryview]] = {}
        incoming: dict[int, _Incoming] = {}
        for p, arrays in sends.items():
            views = [_bytes_of(a) for a in arrays if a.size]
            size = sum(v.nbytes for v in views)
            out[p] = [memoryview(_HEADER.pack(_DATA, self._run, step, self._process, size, label)), *views]
        for p, arrays in receives.items():
            incoming[p] = _Incoming([_bytes_of(a) for a in arrays if a.size])
        deadline = time.monotonic() + self._timeout
        for p in list(out):
            self._send(p, out)
        for p in list(incoming):
            self._receive(p, step, what, incoming)
        watched: dict[int, int] = {}
        try:
            while out or incoming:
                for p in {*out, *incoming, *watched}:
                    events = (select.POLLOUT if p in out else 0) | (select.POLLIN if p in incoming else 0)
                    if watched.get(p, 0) != events:
                        self._watch(p, events, watched)
                left = deadline - time.monotonic()
                ready = self._poll.poll(max(0, left * 1000)) if left > 0 else []
                if not ready:
                    missing = ", ".join(self._ranks[p] for p in sorted({*out, *incoming}))
                    raise CollectiveTimeout(f"{what}: no answer within {self._timeout:.0f} s from {missing}")
                for fd, event in ready:
                    p = self._peer_of[fd]
                    if p in out and event & (select.POLLOUT | select.POLLERR | select.POLLHUP):
                        self._send(p, out)
                    if p in incoming and event & (select.POLLIN | select.POLLERR | select.POLLHUP):
                        self._receive(p, step, what, incoming)
        finally:
            for p in list(watched):
                self._watch(p, 0, watched)

    def _watch(self, p: int, events: int, watched: dict[int, int]) -> None:
        sock = self._socks[p]
        if events == 0:
            if watched.pop(p, None) is not None:
                self._poll.unregister(sock)
        elif p in watched:
            self._poll.modify(sock, events)
            watched[p] = events
        else:
            self._poll.register(sock, events)
            watched[p] = events

    def _send(self, p: int, out: dict[int, list[memoryview]]) -> None:
        views = out[p]
        sock = self._socks[p]
        try:
            while views:
                n = sock.sendmsg(views[:_IOV])
                while n:
                    if n >= views[0].nbytes:
                        n -= views.pop(0).nbytes
                    else:
                        views[0] = views[0][n:]
                        n = 0
        except BlockingIOError:
            return
        except OSError as e:
            # The peer may have said why before it closed: what it sent is read first.
            self._last_words(p, e)
        del out[p]

    def _last_words(self, p: int, error: OSError) -> None:
        sock = self._socks[p]
        reason = str(error)
        with contextlib.suppress(OSError):
            sock.settimeout(1.0)
            head = _read(sock, _HEADER.size)
            magic, _, _, _, size, _ = _HEADER.unpack(head)
            if magic == _ABORT and size <= 4096:
                raise RankLost(f"{self._ranks[p]} stopped: {_read(sock, size).decode(errors='replace')}") from error
        raise RankLost(f"{self._ranks[p]} left: {reason}") from error

    def _receive(self, p: int, step: int, what: str, incoming: dict[int, _Incoming]) -> None:
        state = incoming[p]
        sock = self._socks[p]
        try:
            while True:
                if state.head is None:
                    part = sock.recv(_HEADER.size - len(state.raw))
                    if not part:
                        raise RankLost(f"{self._ranks[p]} left during {what}")
                    state.raw += part
                    if len(state.raw) == _HEADER.size:
                        state.head = self._check(p, step, what, state, sock)
                    continue
                if not state.views:
                    del incoming[p]
                    return
                n = sock.recv_into(state.views[0])
                if n == 0:
                    raise RankLost(f"{self._ranks[p]} left during {what}")
                if n == state.views[0].nbytes:
                    state.views.pop(0)
                else:
                    state.views[0] = state.views[0][n:]
        except BlockingIOError:
            return
        except OSError as e:
            raise RankLost(f"{self._ranks[p]} left during {what}: {e}") from e

    def _check(self, p: int, step: int, what: str, state: _Incoming, sock: socket.socket) -> bool:
        magic, run, their_step, process, size, label = _HEADER.unpack(bytes(state.raw))
        if magic == _ABORT:
            sock.settimeout(1.0)
            text = _read(sock, min(size, 4096)).decode(errors="replace")
            raise RankLost(f"{self._ranks[p]} stopped: {text}")
        if magic != _DATA or process != p:
            raise CollectiveMismatch(f"{self._ranks[p]} sent what is no message of a mesh")
        if (run, their_step) != (self._run, step) or size != state.expected:
            theirs = label.rstrip(b"\0").decode(errors="replace")
            raise CollectiveMismatch(
                f"{self._ranks[self._process]} is in run {self._run}, step {step} ({what}, {state.expected} bytes), "
                f"{self._ranks[p]} in run {run}, step {their_step} ({theirs}, {size} bytes)"
            )
        return True


class _Incoming:
    """What is still to come from one process."""

    def __init__(self, views: list[memoryview]) -> None:
        self.views = views
        self.expected = sum(v.nbytes for v in views)
        self.raw = bytearray()
        self.head: bool | None = None


def _bytes_of(a: np.ndarray) -> memoryview:
    """The memory of a C-contiguous array; ml_dtypes' have no buffer format of their own."""
    return memoryview(a.reshape(-1).view(np.uint8))


def interface_of(address: str) -> str:
    """Host part of a Dask address: where the data plane listens too. TLS clusters are refused."""
    protocol, _, rest = address.partition("://")
    if protocol in ("tls", "wss"):
        raise ClusterError(
            f"the cluster at {address} uses TLS, and the mesh's own connections cannot yet: they would carry arrays in the clear"
        )
    if protocol == "inproc":  # workers that are threads of the client's process
        return "127.0.0.1"
    if protocol not in ("tcp", "ws"):
        raise ClusterError(f"workers must be reachable by tcp or live in this process, this one is at {address}")
    return rest.rpartition(":")[0].strip("[]")
