"""The rendezvous of the processes of a mesh: addresses, authentication, and the choice of links.

Each Dask worker has one data plane. Two processes of a mesh connect at their first exchange, and stay connected. A
connection is accepted only after both sides have proved, by HMAC-SHA256 over a fresh nonce, that they know the secret
that the client gave the mesh's workers over Dask's control plane; all other connections are closed (:mod:`.listener`).
Where the cluster uses TLS, connections do too, with the certificates of its ``Security``. Two processes of one host
share memory, with a Unix socket beside it where nothing has to be encrypted. Two workers of one process hand their
arrays over. All others use the connection itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...arrays.core.errors import ClusterError, CollectiveTimeout, RankLost
from . import comms, listener, memory
from .group import LinkGroup
from .links import Link, StreamLink
from .listener import Gate, Listener
from .shared_memory_link import SlotLink
from .streams import PeerStream, SocketStream, TlsStream
from .unix_socket import UnixListener, enter

Address = tuple[str, int] | str
"""Address of a process's data plane: host and port, or the Dask address of its worker if no port is opened."""

_HELLO = struct.Struct(
    ">4s16sQI32s32s16s?I"
)  # magic, mesh, epoch, process, nonce, host, process id, whether memory may be shared, processes of the host
_OFFER = struct.Struct(">c64s")  # kind, name
_MAGIC = b"MTH3"
_PLAIN, _SHARED, _LOCAL = b"-", b"s", b"l"
_ENTERED, _TOKEN = b"*", 16
_PAUSES = (0.02, 0.1, 0.5)
_DIALS = 16
"""Connections that a process makes at a time."""


class _PeerRefused(ConnectionError):
    """The other side is none that this one talks to."""


def _proof(secret: bytes, role: bytes, nonce: bytes, hello: bytes) -> bytes:
    return hmac.new(secret, role + nonce + hello, hashlib.sha256).digest()


class DataPlane:
    """One process's end of all its connections. Made by :func:`meshtape.parallel.dask.worker.open_plane` on each
    worker.

    Without a ``host`` it listens nowhere: connections come in by :meth:`greet`, through ``distributed``'s ``worker``.
    ``tls`` has the contexts for accepting and for connecting.
    """

    def __init__(
        self, host: str | None, tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None, worker: Any = None
    ) -> None:
        self._tls, self._worker = tls, worker
        self._secrets: dict[bytes, bytes] = {}
        self._arrived: dict[tuple[bytes, int, int], Link] = {}
        self._groups: dict[tuple[bytes, int], LinkGroup] = {}
        self._stopped: set[tuple[bytes, int]] = set()
        self._left: dict[bytes, str] = {}  # meshes that a worker left, and which
        self._changed = threading.Condition()
        self._closed = False
        self._gate = Gate()
        self._listener: Listener | None = None
        self.address: Address = worker.address if worker is not None else ""
        if worker is not None:
            comms.serve(worker, self._gate, self.accept)
        if host is not None:
            self.listen(host)

    def listen(self, host: str) -> None:
        """Open a port on this interface, unless there is one."""
        if self._listener is None:
            self._listener = Listener(host, self._gate, self._wrapped, self._receive)
            self.address = self._listener.address

    def register_mesh(self, mesh: bytes, secret: bytes) -> None:
        """Admit processes of this mesh, which know its secret."""
        self._secrets[mesh] = secret

    def stop(self, mesh: bytes, epoch: int) -> None:
        """End the waits of an epoch of a mesh here, as one of its processes failed. Called by any thread."""
        with self._changed:
            self._stopped.add((mesh, epoch))
            group = self._groups.get((mesh, epoch))
            if group is not None:
                group.shutdown()
            self._changed.notify_all()

    def on_peer_lost(self, mesh: bytes, worker: str) -> None:
        """End all groups of a mesh, as one of its workers left the cluster. Called by any thread."""
        with self._changed:
            if mesh not in self._secrets:
                return
            self._left[mesh] = worker
            for key, group in self._groups.items():
                if key[0] == mesh:
                    group.shutdown()
            self._changed.notify_all()

    def missing(self, mesh: bytes) -> str | None:
        """The worker that left this mesh, if one did."""
        return self._left.get(mesh)

    def ended(self, mesh: bytes, epoch: int) -> bool:
        """Whether an epoch of a mesh was stopped, or a worker left the mesh."""
        return (mesh, epoch) in self._stopped or mesh in self._left or mesh not in self._secrets

    def unregister_mesh(self, mesh: bytes) -> None:
        """Forget a mesh and close its connections."""
        self._secrets.pop(mesh, None)
        with self._changed:
            self._stopped = {s for s in self._stopped if s[0] != mesh}
            self._left.pop(mesh, None)
            for key in [k for k in self._groups if k[0] == mesh]:
                group = self._groups.pop(key)
                group.shutdown()  # wakes waiting threads; closing would not
                group.close()
            for key in [k for k in self._arrived if k[0] == mesh]:
                self._arrived.pop(key).close()

    def close(self) -> None:
        """Stop listening and close everything."""
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        for mesh in list(self._secrets):
            self.unregister_mesh(mesh)
        if self._listener is not None:
            self._listener.join(5)

    # ----- connecting -------------------------------------------------------------------------------------------------

    def _wrapped(self, sock: socket.socket) -> socket.socket:
        if self._tls is None:
            return sock
        return self._tls[0].wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def _receive(self, sock: socket.socket, proved: Callable[[], None]) -> None:
        try:
            secure = isinstance(sock, ssl.SSLSocket)
            stream: PeerStream = TlsStream(sock, listener.GREETING) if secure else SocketStream(sock)  # type: ignore[arg-type]
        except (OSError, ValueError):  # ValueError: it was closed meanwhile
            sock.close()
            return
        self.accept(stream, proved)

    def accept(self, stream: PeerStream, proved: Callable[[], None]) -> None:
        """The accepting side of the handshake, in bounded time. Unauthenticated connections get no answer."""
        deadline = time.monotonic() + listener.GREETING

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        try:
            nonce = os.urandom(32)
            stream.write(nonce, left())
            hello = stream.read(_HELLO.size, left())
            magic, mesh, epoch, process, theirs, host, process_id, share, neighbours = _HELLO.unpack(hello)
            proof = stream.read(32, left())
            secret = self._secrets.get(mesh)
            if magic != _MAGIC or secret is None:
                raise ConnectionError("a stranger")
            if not hmac.compare_digest(proof, _proof(secret, b"connect", nonce, hello)):
                raise ConnectionError("a wrong secret")
            proved()
            memory.BUDGET.share(neighbours)
            stream.write(_proof(secret, b"accept", theirs, hello), left())
            link = _offer(stream, process, host, process_id, share)
            with self._changed:
                old = self._arrived.pop((mesh, epoch, process), None)
                if mesh in self._secrets and not self._closed:
                    self._arrived[mesh, epoch, process] = link
                    self._changed.notify_all()
                else:  # it was closed meanwhile
                    link.close()
            if old is not None:
                old.close()
        except (OSError, ValueError, struct.error):
            stream.close()

    def _connect(self, group: LinkGroup, peer: int, address: Address, share: bool, timeout: float) -> Link:
        for pause in _PAUSES:
            try:
                return self._connect_once(group, peer, address, share, timeout)
            except (_PeerRefused, ConnectionRefusedError):
                raise
            except ConnectionError:
                # A crowded listener may have closed it, to let others in.
                time.sleep(pause)
        return self._connect_once(group, peer, address, share, timeout)

    def _connect_once(self, group: LinkGroup, peer: int, address: Address, share: bool, timeout: float) -> Link:
        secret = self._secrets.get(group.mesh)
        if secret is None:
            raise _PeerRefused("the mesh was closed")
        stream = self._dial(address, timeout)
        try:
            nonce = stream.read(32, timeout)
            me = group.mesh, group.epoch, group.process
            here = memory.host_id(), memory.process_id()
            hello = _HELLO.pack(_MAGIC, *me, os.urandom(32), *here, share, memory.BUDGET.processes)
            theirs = hello[32:64]
            stream.write(hello + _proof(secret, b"connect", nonce, hello), timeout)
            if not hmac.compare_digest(stream.read(32, timeout), _proof(secret, b"accept", theirs, hello)):
                raise _PeerRefused("it does not know the mesh's secret")
            return _take(stream, peer, timeout)
        except BaseException:
            stream.close()
            raise

    def _dial(self, address: Address, timeout: float) -> PeerStream:
        if isinstance(address, str):
            return comms.connect(self._worker, address, timeout)
        sock = socket.create_connection(address, timeout=timeout)
        try:
            if self._tls is None:
                return SocketStream(sock)
            sock = self._tls[1].wrap_socket(sock, server_hostname=address[0], do_handshake_on_connect=False)
            return TlsStream(sock, timeout)
        except BaseException:
            sock.close()
            raise

    def group(
        self,
        mesh: bytes,
        epoch: int,
        process: int,
        peers: Mapping[int, Address],
        ranks: Mapping[int, str],
        timeout: float,
        share: bool = True,
    ) -> LinkGroup:
        """This process's place in a mesh, without connections: each is made when it is first used.

        ``peers`` gives every process's address, ``ranks`` its name in messages. Each pair has one connection: the
        process with the higher number connects. ``share`` allows shared memory.
        """
        key = (mesh, epoch)
        found = self._groups.get(key)
        if found is not None:
            return found
        if mesh not in self._secrets:
            raise RankLost(f"{ranks.get(process, 'this process')} forgot the mesh: it was closed")
        group = LinkGroup(
            mesh,
            epoch,
            process,
            lambda found, seconds: self._links(group, found, peers, ranks, share, seconds),
            ranks,
            lambda p, seconds: self.answers(peers[p], seconds),
        )
        group.begin(0, timeout)
        with self._changed:
            self._groups[key] = group
            for stale in [k for k in self._arrived if k[0] == mesh and k[1] < epoch]:
                self._arrived.pop(stale).close()
        for key_old in [k for k in self._groups if k[0] == mesh and k[1] != epoch]:
            self._groups.pop(key_old).close()
        memory.BUDGET.share(1 + [*map(_host_of, peers.values())].count(_host_of(self.address)))
        if key in self._stopped or mesh in self._left:  # meanwhile
            group.shutdown()
        return group

    def _links(
        self,
        group: LinkGroup,
        wanted: Sequence[int],
        peers: Mapping[int, Address],
        ranks: Mapping[int, str],
        share: bool,
        timeout: float,
    ) -> dict[int, Link]:
        """Connections to some processes, made side by side."""
        mesh, epoch, process = group.mesh, group.epoch, group.process
        deadline = time.monotonic() + timeout
        links: dict[int, Link] = {}
        dialled = [p for p in wanted if p < process]

        def dial(p: int) -> Link:
            if self.ended(mesh, epoch):
                raise RankLost(f"{ranks[p]} left before it joined the mesh")
            while True:
                left = deadline - time.monotonic()
                try:
                    return self._connect(group, p, peers[p], share, min(left, group.silence))
                except TimeoutError:
                    if left <= group.silence or not group.lives(p):
                        raise _unanswered(ranks[p]) from None
                except OSError as e:
                    raise RankLost(f"{ranks[p]} cannot be reached at {_text(peers[p])}: {e}") from e

        error: BaseException | None = None
        if len(dialled) > 1:
            with ThreadPoolExecutor(min(_DIALS, len(dialled)), thread_name_prefix="meshtape-dial") as pool:
                for p, future in [(p, pool.submit(dial, p)) for p in dialled]:
                    try:
                        links[p] = future.result()
                    except BaseException as e:
                        error = error or e
        try:
            if error is not None:
                raise error
            for p in dialled[: len(dialled) == 1]:
                links[p] = dial(p)
            for p in wanted:
                if p > process:
                    links[p] = self._wait_for(group, p, ranks, deadline, timeout)
            if self.ended(mesh, epoch):
                raise RankLost(f"{ranks[wanted[0]]} left before it joined the mesh")
        except BaseException:
            for link in links.values():
                link.close()
            raise
        return links

    def last_exchanges(self) -> dict[str, tuple[int, str]]:
        """The number of the run and the purpose of the last exchange by mesh (hexadecimal). Called by any thread."""
        return {mesh.hex(): group.last for (mesh, _), group in list(self._groups.items())}

    def current(self, mesh: bytes, epoch: int) -> LinkGroup | None:
        """The connections of this epoch, where they are made."""
        return self._groups.get((mesh, epoch))

    def answers(self, address: Address, seconds: float) -> bool:
        """Whether the process at an address is alive: it answers any connection, even while it computes."""
        try:
            stream = self._dial(address, seconds)
        except OSError:
            return False
        try:
            stream.read(32, seconds)
        except OSError:
            return False
        finally:
            stream.close()
        return True

    def _wait_for(self, group: LinkGroup, p: int, ranks: Mapping[int, str], deadline: float, timeout: float) -> Link:
        mesh, epoch = group.mesh, group.epoch
        while True:
            with self._changed:
                asked = time.monotonic() + group.silence
                while (mesh, epoch, p) not in self._arrived:
                    if self.ended(mesh, epoch):
                        raise RankLost(f"{ranks[p]} left before it joined the mesh")
                    now = time.monotonic()
                    if deadline <= now or self._closed:
                        raise CollectiveTimeout(f"{ranks[p]} did not join the mesh within {timeout:.0f} s")
                    if asked <= now:
                        break
                    self._changed.wait(min(deadline, asked) - now)
                else:
                    return self._arrived.pop((mesh, epoch, p))
            if not group.lives(p):  # not while others wait for what this thread holds
                raise _unanswered(ranks[p])

    def drop(self, mesh: bytes, epoch: int) -> None:
        """Close a group after a failure; the next run of the mesh has a new epoch."""
        group = self._groups.pop((mesh, epoch), None)
        if group is not None:
            group.close()


def _offer(stream: PeerStream, peer: int, host: bytes, process_id: bytes, share: bool) -> Link:
    """Offer a faster link than the stream, if there is one; the connecting side accepts or declines."""
    wait = listener.GREETING
    if share and process_id == memory.process_id():
        key, (out, back) = memory.offer_local()
        stream.write(_OFFER.pack(_LOCAL, key.hex().encode()), wait)
        if stream.read(1, wait) == b"+":
            return SlotLink(peer, stream, out, back)
        memory.take_local(key)
        return StreamLink(peer, stream)
    segment = None
    if share and host == memory.host_id():
        with contextlib.suppress(OSError):
            segment = memory.SharedSegment.create()
    if segment is not None:
        return _share(stream, peer, segment)
    stream.write(_OFFER.pack(_PLAIN, b""), wait)
    stream.read(1, wait)
    return StreamLink(peer, stream)


def _share(stream: PeerStream, peer: int, segment: memory.SharedSegment) -> Link:
    """Offer a segment and, where the stream is TCP in the clear, a door to a connection that costs less."""
    wait = listener.GREETING
    door, taken = None, b""
    try:
        if type(stream) is SocketStream:
            with contextlib.suppress(OSError):
                door = UnixListener(segment.name)
        stream.write(_OFFER.pack(_SHARED, segment.name.encode()), wait)
        taken = stream.read(1, wait)
        if taken == _ENTERED and door is not None:
            token = stream.read(_TOKEN, wait)
            inside = SocketStream(door.accept(wait))
            try:
                if not hmac.compare_digest(inside.read(_TOKEN, wait), token):
                    raise ConnectionError("a stranger came in")
            except BaseException:
                inside.close()
                raise
            stream.close()
            stream = inside
    finally:
        if door is not None:
            door.close()
        segment.unlink()
    if taken in (_ENTERED, b"+"):
        return SlotLink(peer, stream, memory.SharedSlots(segment, 0), memory.SharedSlots(segment, 1))
    segment.close()
    return StreamLink(peer, stream)


def _take(stream: PeerStream, peer: int, timeout: float) -> Link:
    """The connecting side of :func:`_offer`."""
    kind, raw = _OFFER.unpack(stream.read(_OFFER.size, timeout))
    name = raw.rstrip(b"\0").decode("ascii", errors="replace")
    if kind == _LOCAL:
        slots = memory.take_local(bytes.fromhex(name))
        stream.write(b"+" if slots else b"-", timeout)
        if slots:
            return SlotLink(peer, stream, slots[1], slots[0])
    elif kind == _SHARED:
        try:
            segment = memory.SharedSegment.open(name)
        except OSError:
            stream.write(b"-", timeout)
        else:
            inside = None
            if type(stream) is SocketStream:
                with contextlib.suppress(OSError):
                    inside = SocketStream(enter(name))
            if inside is None:
                stream.write(b"+", timeout)
            else:
                token = os.urandom(_TOKEN)  # proves that the peer is the authenticated process
                try:
                    inside.write(token, timeout)
                    stream.write(_ENTERED + token, timeout)
                except BaseException:
                    inside.close()
                    raise
                stream.close()
                stream = inside
            return SlotLink(peer, stream, memory.SharedSlots(segment, 1), memory.SharedSlots(segment, 0))
    else:
        stream.write(b"-", timeout)
    return StreamLink(peer, stream)


def _unanswered(rank: str) -> CollectiveTimeout:
    return CollectiveTimeout(f"no answer from {rank}, whose process is stopped or cut off")


def _host_of(address: Address) -> str:
    return _text(address).rpartition(":")[0]


def _text(address: Address) -> str:
    return address if isinstance(address, str) else f"{address[0]}:{address[1]}"


def interface_of(address: str) -> str:
    """Host part of a Dask address: where the data plane listens too.

    Raises
    ------
    ClusterError
        For a protocol without a host of its own.
    """
    protocol, _, rest = address.partition("://")
    if protocol == "inproc":  # workers that are threads of the client's process
        return "127.0.0.1"
    if protocol not in ("tcp", "tls", "ws", "wss", "ucx", "ucxx"):
        raise ClusterError(
            f"workers must be reachable by tcp, tls, ws or ucx, or live in this process, this one is at {address}: "
            "set meshtape.transport to comms in Dask's configuration"
        )
    return rest.rpartition(":")[0].strip("[]")
