"""The NCCL transport: messages from GPU to GPU by CuPy's binding (``cupy.cuda.nccl``).

Processes first compare the steps of their programs and sizes over the host's own connections. NCCL itself would wait
for ever where these differ, so it is only called when all agree, and failures raise the same errors. The messages of
one exchange are one group of sends and receives, which NCCL carries out together. Contributions are then joined on the
device in their fixed order, as on the host. Only where the user asks for no fixed order
(:func:`~meshtape.arrays.backends.determinism.use_deterministic`), sums are NCCL's own all-reduces, which add up on the
way and can use the switches of a network. Each group of processes has a communicator for them.

It was written on machines without a GPU, from the documentation of NCCL 2 and of CuPy 14, and has run there against an
emulation of both; ``tests/gpu`` runs it where there are two devices.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays.core.errors import BackendError, CollectiveTimeout, RankLost
from ..collectives.combining import ALL_REDUCE, AllReduce
from ..collectives.pieces import ArraySink, BatchSink, chunks, expected
from .group import LinkGroup, Receives, Sends


def nccl() -> Any:
    """CuPy's binding. Raises :class:`BackendError` where it or NCCL is missing."""
    try:
        from cupy.cuda import nccl as binding
    except ImportError as e:
        raise BackendError(f"NCCL needs CuPy: install meshtape[cuda13] or meshtape[cuda12] ({e})") from e
    if not binding.available:
        raise BackendError("CuPy found no NCCL library: install nvidia-nccl-cu13, or nvidia-nccl-cu12")
    return binding


class NcclGroup:
    """A ``Transport`` for arrays of one GPU a process. It shares epoch, sequence and fate with ``host``, the
    connections of the same processes.

    All have to arrive within ``timeout`` seconds when the communicator is made, else a :class:`CollectiveTimeout` is
    raised. ``ended`` is called while the device works: whether another process has failed, so that nothing will come
    any more.
    """

    def __init__(
        self,
        host: LinkGroup,
        process: int,
        count: int,
        timeout: float = 60.0,
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        import cupy

        self._cupy, self._nccl = cupy, nccl()
        self._host, self._process, self._timeout, self._ended = host, process, timeout, ended
        self._device = cupy.cuda.Device()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._comms: dict[tuple[int, ...], Any] = {}
        self._comm = self._joined(tuple(range(count)), 0)

    def _joined(self, members: tuple[int, ...], step: int) -> Any:
        """The communicator of some processes, this one among them."""
        if members in self._comms:
            return self._comms[members]
        count, process, timeout, ended, device = len(members), self._process, self._timeout, self._ended, self._device
        ident = np.zeros(128, np.uint8)
        if process == members[0]:
            ident[:] = [b & 0xFF for b in self._nccl.get_unique_id()]
            self._host.exchange(step, "nccl id", {p: [ident] for p in members[1:]}, {})
        else:
            self._host.exchange(step, "nccl id", {}, {members[0]: [ident]})
        made: list[Any] = []
        given_up, deciding, rank = threading.Event(), threading.Lock(), members.index(process)

        def make() -> None:  # it waits for all others, and knows no time limit
            try:
                with device:
                    try:
                        comm = self._nccl.NcclCommunicator(count, tuple(ident.view(np.int8).tolist()), rank)
                    except OverflowError:  # a char has no sign on this machine (aarch64)
                        comm = self._nccl.NcclCommunicator(count, tuple(ident.tolist()), rank)
            except Exception as e:
                comm = e
            with deciding:
                made.append(comm)
            if given_up.is_set() and not isinstance(comm, Exception):
                with device:
                    comm.abort()  # which frees it, and waits for no other process

        thread = threading.Thread(target=make, name="meshtape-nccl", daemon=True)
        thread.start()
        deadline = time.monotonic() + timeout
        while thread.is_alive() and time.monotonic() < deadline and not ended():
            thread.join(0.05)
        with deciding:
            if not made:
                given_up.set()
        if given_up.is_set():
            if ended():
                raise RankLost("another rank failed, or left the cluster, before all processes joined NCCL")
            raise CollectiveTimeout(f"not all processes joined NCCL within {timeout:.0f} s")
        if isinstance(made[0], Exception):
            raise BackendError(f"NCCL does not connect these processes: {made[0]}") from made[0]
        self._comms[members] = made[0]
        return made[0]

    def begin(self, run: int, timeout: float) -> None:
        self._timeout = timeout
        self._host.begin(run, timeout)

    def turn(self, number: int) -> None:
        self._host.turn(number)

    def exchange(self, step: int, what: str, sends: Sends, receives: Receives) -> None:
        sums: Sequence[AllReduce] = receives.get(ALL_REDUCE, ())  # type: ignore[assignment]
        receives = {p: found for p, found in receives.items() if p != ALL_REDUCE}
        batches = {p: [b if isinstance(b, tuple) else (b,) for b in found] for p, found in sends.items()}
        sinks: dict[int, list[BatchSink]] = {
            p: [s if hasattr(s, "accept") else ArraySink(s) for s in found]  # type: ignore[arg-type]
            for p, found in receives.items()
        }
        self._agree(step, what, batches, sinks, sums)
        comms = [self._joined(s.members, step) for s in sums]
        self._stream.wait_event(self._cupy.cuda.get_current_stream().record())
        came: list[tuple[BatchSink, list[Any]]] = []
        calls: list[tuple[Callable[..., None], Any, int]] = []  # with arrays that live until all is sent
        with self._stream:
            # Allocations, which can fail, come before the group, which would stay open.
            for p in sorted({*batches, *sinks}):
                calls += [(self._comm.send, self._cupy.ascontiguousarray(a), p) for b in batches.get(p, ()) for a in b]
                for sink in sinks.get(p, ()):
                    arrays = [self._cupy.empty(sink.shape, sink.dtype) for _ in range(sink.width)]
                    came.append((sink, arrays))
                    calls += [(self._comm.recv, a, p) for a in arrays]
            self._nccl.groupStart()
            try:
                for call, a, p in calls:
                    if a.nbytes:
                        call(a.data.ptr, a.nbytes, self._nccl.NCCL_UINT8, p, self._stream.ptr)
            finally:
                self._nccl.groupEnd()
            for s, comm in zip(sums, comms, strict=True):
                given, s.result = s.result, self._cupy.empty_like(s.result)
                kind = self._nccl.NCCL_FLOAT64 if given.dtype == np.float64 else self._nccl.NCCL_FLOAT32
                comm.allReduce(
                    given.data.ptr, s.result.data.ptr, given.size, kind, self._nccl.NCCL_SUM, self._stream.ptr
                )
                calls.append((comm.allReduce, given, 0))
        self._wait(what, [self._comm, *comms])
        self._hand_out(came)

    def _agree(
        self,
        step: int,
        what: str,
        batches: Mapping[int, Any],
        sinks: Mapping[int, list[BatchSink]],
        sums: Sequence[AllReduce],
    ) -> None:
        """Check that all processes of the exchange are there, at the same step and with the same sizes; the members of
        a sum in a ring, each with the next."""
        mine = {p: [np.array([a.nbytes for b in found for a in b], np.int64)] for p, found in batches.items()}
        want = {
            p: np.array([expected([s]) // s.width for s in found for _ in range(s.width)], np.int64)
            for p, found in sinks.items()
        }
        pairs = list(want.items())
        for s in sums:
            at, size = s.members.index(self._process), np.array([s.result.nbytes], np.int64)
            mine.setdefault(s.members[(at + 1) % len(s.members)], []).append(size)
            pairs.append((s.members[at - 1], size))
        theirs = [np.full(len(w), -1, np.int64) for _, w in pairs]
        expected_of: dict[int, list[Any]] = {}
        for (p, _), t in zip(pairs, theirs, strict=True):
            expected_of.setdefault(p, []).append(t)
        self._host.exchange(step, what, mine, expected_of)
        for (p, w), t in zip(pairs, theirs, strict=True):
            if not np.array_equal(w, t):
                raise RankLost(f"{what}: process {p} sends {t.tolist()} bytes where {w.tolist()} are expected")

    def _wait(self, what: str, comms: Sequence[Any]) -> None:
        """Wait for the device, and check the communicators for failed peers meanwhile."""
        done = self._stream.record()
        deadline = time.monotonic() + self._timeout
        while not done.done:
            error = next((e for c in comms if (e := c.check_async_error())), 0)
            if error:
                raise RankLost(f"{what}: NCCL reports error {error}: a process or its GPU failed")
            if self._ended():
                raise RankLost(f"{what}: another rank failed, or left the cluster")
            if time.monotonic() > deadline:
                raise CollectiveTimeout(f"{what}: not done on the device within {self._timeout:.0f} s")
            time.sleep(1e-4)

    @staticmethod
    def _hand_out(came: list[tuple[BatchSink, list[Any]]]) -> None:
        """Give the chunks to their sinks; contributions wait for their turn."""
        todo: list[Callable[[], bool]] = [
            (lambda s=sink, k=k, j=j, c=a[index]: s.accept(k, j, c))  # type: ignore[misc]
            for sink, arrays in came
            for k, index in enumerate(chunks(sink.shape, sink.dtype.itemsize))
            for j, a in enumerate(arrays)
        ]
        while todo:
            left = [accept for accept in todo if not accept()]
            if len(left) == len(todo):
                raise RankLost("contributions are missing")
            todo = left

    def abort(self, reason: str) -> None:
        self._abort()
        self._host.abort(reason)

    def shutdown(self) -> None:
        self._abort()
        self._host.shutdown()

    def _abort(self) -> None:
        for comm in list(self._comms.values()):
            comm.abort()

    def close(self) -> None:
        # It waits for the device, and an event loop may close the mesh.

        def destroy() -> None:
            with self._device:
                for comm in list(self._comms.values()):
                    comm.destroy()

        threading.Thread(target=destroy, name="meshtape-nccl", daemon=True).start()
        self._host.close()
