"""A client's streams to the workers of its meshes: requests, answers and liveness.

The client's side of :mod:`.worker_queue`. A worker that does not answer for ``meshtape.timeout`` seconds is lost, and
so is one whose connection ends: everything that waits for it ends with :class:`RankLost`. Workers that this process
cannot reach directly are reached through the scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from distributed import Client
from distributed.core import connect

from ...arrays.core.errors import ClusterError, RankLost
from ..base import settings
from ..base.interrupts import Uninterrupted
from ..base.message_streams import (
    DaskMessages,
    Message,
    MessageStream,
    SocketMessages,
    encoded,
    failure,
    has_plain_socket,
    packed,
    popped,
)
from .worker_queue import Ref, answered
from .workers import LOOK, PAUSED, PerClient, TaskWatch, check_running, on_loop, scheduler_answer

T = TypeVar("T")
log = logging.getLogger("meshtape")
LATE = 0.1
"""Seconds for which a message about dropped values waits for another one to the same worker."""


class WorkerFuture:
    """An item of work on one worker, and its value. The worker drops the value when no future of it is left here."""

    __slots__ = ("__weakref__", "_callbacks", "_lock", "_needs", "error", "name", "number", "state", "stream")

    def __init__(self, stream: WorkerStream, number: int, name: str) -> None:
        self.stream, self.number, self.name = stream, number, name
        self.state = "pending"
        """Or ``"done"``, ``"failed"``; ``"lost"`` where the worker is."""
        self.error: BaseException | None = None
        self._callbacks: list[Callable[[WorkerFuture], None]] = []
        self._needs: Sequence[WorkerFuture] = ()
        self._lock = threading.Lock()
        stream.streams.when_gone(self, stream.drop, number)

    def done(self) -> bool:
        """Whether there is an answer, or can be none."""
        return self.state != "pending"

    @property
    def failed(self) -> bool:
        return self.state in ("failed", "lost")

    @property
    def ref(self) -> Ref:
        """The reference that stands for it among the arguments of another item."""
        return Ref(self.number, self.stream.address, self.stream.session)

    def add_done_callback(self, fn: Callable[[WorkerFuture], None]) -> None:
        """Call ``fn`` on the client's event loop when the item has ended; at once if it has. ``fn`` must not block."""
        with self._lock:
            if self.state == "pending":
                self._callbacks.append(fn)
                return
        fn(self)

    def finish(self, state: str, error: BaseException | None = None) -> None:
        """Record that the item has ended."""
        with self._lock:
            if self.state != "pending":
                return
            self.state, self.error = state, error
            callbacks, self._callbacks, self._needs = self._callbacks, [], ()
        for fn in callbacks:
            fn(self)

    def hold(self, needs: Sequence[WorkerFuture]) -> None:
        """Keep these futures until the item has ended: another worker may read their values until then."""
        with self._lock:
            if self.state == "pending":
                self._needs = needs

    def follow(self, task: Any) -> None:
        """End with a future of Dask's, which brings its value to the worker."""
        self.stream.pending[self.number] = self

        def ended(task: Any) -> None:
            self.stream.pending.pop(self.number, None)
            if task.status == "finished":
                self.finish("done")
            else:
                error = task.exception() if task.status == "error" else None
                self.finish(
                    "failed", error or RankLost(f"the task of Dask's was {task.status}: a worker left the cluster")
                )

        task.add_done_callback(ended)

    def __repr__(self) -> str:
        return f"<WorkerFuture {self.name}-{self.number} on {self.stream.address}: {self.state}>"


class WorkerStream:
    """The stream to one worker. Only :meth:`send` and :meth:`drop` may be called outside of the client's event loop."""

    def __init__(self, streams: WorkerStreams, address: str) -> None:
        self.streams, self.address = streams, address
        self.session = uuid.uuid4().hex
        self.far = False
        """Whether it goes through the scheduler."""
        self.pending: dict[int, WorkerFuture] = {}
        self.waiting = 0  # calls that wait for this worker, beside the pending items
        self.heard, self.silent = False, 0.0
        self.paused = False
        self.lost: str | None = None
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._dropped: list[int] = []
        self._messages: MessageStream
        self._serving: asyncio.Task[None] | None = None

    # ----- any thread -------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Put a message in the queue; :meth:`WorkerStreams.flush` sends it."""
        self._messages.put(message)

    def drop(self, number: int) -> None:
        """Have the worker drop a value with the next message, or soon."""
        self._dropped.append(number)
        self.streams.put_later(self._tell_dropped)

    def _tell_dropped(self) -> Iterable[WorkerStream]:
        numbers, self._dropped = self._dropped, []
        if not numbers:
            return ()
        self._messages.put(encoded({"op": "drop", "numbers": tuple(numbers)}))
        return (self,)

    # ----- the client's event loop ------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect, directly or through the scheduler. Raises :class:`ClusterError`."""
        client = self.streams.client()
        hello = {"op": "meshtape_session", "client": client.id, "session": self.session}
        ways: list[tuple[str, dict[str, Any]]] = [(self.address, hello)]
        ways.append((client.scheduler.address, {**hello, "op": "meshtape_relay", "address": self.address}))
        problem: Any = None
        for far, (where, message) in enumerate(ways):
            comm = None
            try:
                seconds = settings.number("timeouts.connect")
                comm = await connect(where, timeout=seconds, **client.connection_args)
                await comm.write(message if far else {**message, "plain": has_plain_socket(comm)})
                said = await asyncio.wait_for(comm.read(), settings.number("timeout"))
                plain = isinstance(said, Mapping) and said.get("plain")
                self._messages = SocketMessages(comm) if plain else DaskMessages(comm)
            except (OSError, TimeoutError) as e:
                problem = e
                if comm is not None:
                    comm.abort()
                continue
            if not isinstance(said, Mapping) or said.get("status") != "OK":
                comm.abort()
                raise ClusterError(f"worker {self.address} did not set up meshtape's worker plugin: {_said(said)}")
            self.far = bool(far)
            self._serving = asyncio.ensure_future(self._serve())
            return
        raise ClusterError(f"worker {self.address} cannot be reached: {type(problem).__name__}: {problem}")

    def wake(self) -> None:
        """Send the messages in the queue, if any."""
        self._messages.wake()

    async def _serve(self) -> None:
        try:
            await self._messages.serve(self._answered)
        except OSError as e:
            self.lose(f"its connection ended: {e}")
        except Exception as e:  # an unreadable or unsendable message, or an error of ours: never an endless wait
            self.lose(f"its stream of messages broke: {type(e).__name__}: {e}")

    def _answered(self, m: dict[str, Any]) -> None:
        self.heard = True
        if m["op"] == "pong":
            self._is_paused(m["paused"])
        future = self.pending.pop(m.get("n", 0), None)
        if future is None:
            return
        if m["op"] == "done":
            future.finish("done")
        else:
            future.finish("failed", failure(m))

    def _is_paused(self, paused: bool) -> None:
        if paused and not self.paused:
            log.warning("worker %s is %s; programs of meshes go on", self.address, PAUSED)
        self.paused = paused

    def lose(self, why: str) -> None:
        """Mark the worker as lost, and end everything that waits for it."""
        if self.lost is not None:
            return
        self.lost = why
        if self._serving is not None:
            self._messages.abort()
            if self._serving is not asyncio.current_task():
                self._serving.cancel()
        if not self.gone.done():
            self.gone.set_result(None)
        self.give_up()

    def give_up(self) -> None:
        """End all pending futures of a lost worker with its error."""
        while self.pending:  # another thread may add one meanwhile
            self.pending.popitem()[1].finish("lost", self.error())

    def error(self) -> RankLost:
        """The error of a lost worker."""
        return RankLost(f"worker {self.address} is lost: {self.lost}")

    async def while_alive(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call. Raises :class:`RankLost` where the worker or its connection is lost meanwhile."""
        task = asyncio.ensure_future(call)
        self.waiting += 1
        try:
            await asyncio.wait({task, self.gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self.error()
            try:
                return task.result()
            except OSError as e:
                raise RankLost(f"worker {self.address} is lost: {e}") from e
        finally:
            self.waiting -= 1
            task.cancel()

    async def call(self, op: str, **kwargs: Any) -> Any:
        """The answer of a worker's handler, over a connection of its own: large messages do not hold up the stream."""
        client, message = self.streams.client(), {"op": op, "session": self.session, **kwargs}
        if not self.far:
            return await self.while_alive(send_recv_to(client, self.address, message))
        found = await self.while_alive(
            client.scheduler.broadcast(msg=message, workers=[self.address], on_error="return")
        )
        answer = found.get(self.address)
        if isinstance(answer, BaseException):
            raise RankLost(f"worker {self.address} is lost: {answer}") from answer
        return answer


class WorkerStreams:
    """The streams of one client."""

    def __init__(self, client: Client) -> None:
        self._client = weakref.ref(client)
        self._loop = client.loop.asyncio_loop  # type: ignore[attr-defined]
        self._streams: dict[str, WorkerStream] = {}
        self._numbers = itertools.count(1)
        self._watch: asyncio.Task[None] | None = None
        self._looks: set[asyncio.Task[None]] = set()
        self._late: deque[Callable[[], Iterable[WorkerStream]]] = deque()
        self._alive: dict[weakref.ref[Any], tuple[Callable[[Any], None], Any]] = {}
        self._gone: deque[weakref.ref[Any]] = deque()
        self.order = threading.RLock()
        """Held while something is sent to several workers: all get everything in one order."""

    def client(self) -> Client:
        client = self._client()
        if client is None:
            raise ClusterError("the Dask client is gone, and the cluster of this mesh with it")
        check_running(client)
        return client

    def open(self, addresses: Sequence[str]) -> None:
        """Connect to these workers, those that are lost too. Raises :class:`ClusterError` where one cannot be
        reached."""

        async def one(address: str) -> None:
            stream = self._streams.get(address)
            if stream is None or stream.lost is not None:
                stream = WorkerStream(self, address)
                await stream.open()
                self._streams[address] = stream
                if self._watch is None or self._watch.done():
                    self._watch = asyncio.ensure_future(self._look())

        async def all_of_them() -> None:
            found = await asyncio.gather(*map(one, addresses), return_exceptions=True)
            for error in found:
                if isinstance(error, BaseException):
                    raise error

        on_loop(self.client(), all_of_them)

    def __getitem__(self, address: str) -> WorkerStream:
        return self._streams[address]

    # ----- sending ----------------------------------------------------------------------------------------------------

    def number(self) -> int:
        """The number of the next item. Called while :attr:`order` is held."""
        return next(self._numbers)

    def call(
        self,
        fn: Callable[..., Any],
        name: str,
        args: Mapping[str, Sequence[Any]],
        mesh: bytes | None = None,
        stoppable: bool = False,
    ) -> dict[str, WorkerFuture]:
        """Have workers, by address, call a function with their place in the mesh (None without one) and ``args``.
        Futures among these stand for their results, on whatever worker. A ``stoppable`` function gets an event
        ``stop``, which is set when it is cancelled."""
        messages = {}
        for address, given in args.items():
            args_there = tuple(a.ref if isinstance(a, WorkerFuture) else a for a in given)
            needs = tuple(a for a in args_there if isinstance(a, Ref))
            messages[address] = {
                "op": "call",
                "mesh": mesh,
                "work": packed((fn, args_there)),
                "needs": needs,
                "stoppable": stoppable,
                "timeout": settings.number("timeout"),
            }
        with self.order, Uninterrupted():
            futures = self.submit(self.number(), name, messages)
        for address, given in args.items():
            futures[address].hold([a for a in given if isinstance(a, WorkerFuture)])
        return futures

    def submit(
        self, number: int, name: str, messages: Mapping[str, dict[str, Any]], alike: bool = False
    ) -> dict[str, WorkerFuture]:
        """Send an item to each of some workers, by address. Called while :attr:`order` is held. ``alike``: all get the
        same small message."""
        futures, late = {}, self._put_late()
        one = encoded({**next(iter(messages.values())), "n": number, "name": name}) if alike else None
        for address, message in messages.items():
            stream = self._streams[address]
            futures[address] = future = WorkerFuture(stream, number, name)
            stream.pending[number] = future
            stream.send(one or {**message, "n": number, "name": name})
        self.flush({*messages, *(s.address for s in late)})
        return futures

    def follow(self, what: str, tasks: Mapping[WorkerFuture, Any]) -> None:
        """Have the futures of an item end with tasks of Dask's, which bring its values to the workers. They fail where
        nobody gets on with these; ``what`` says then what for."""
        places = [(f.stream, f.number) for f in tasks]  # and not the futures, which keep the values
        for future, task in tasks.items():
            future.follow(task)

        def fail(error: Exception) -> None:
            for stream, number in places:
                if (future := stream.pending.pop(number, None)) is not None:
                    future.finish("failed", error)

        self.flush({s.address for s, _ in places})
        keys = [t.key for t in tasks.values()]
        self.watch(what, keys, lambda: any(number in stream.pending for stream, number in places), fail)

    def watch(
        self, what: str, keys: Sequence[Any], waits: Callable[[], bool], fail: Callable[[Exception], None]
    ) -> None:
        """Look at tasks of Dask's while ``waits()``; ``fail`` gets the error where nobody gets on with them."""
        tasks = TaskWatch(self.client(), what, keys)

        async def look() -> None:
            try:
                while waits():
                    await asyncio.sleep(LOOK)
                    if waits():
                        await tasks.look()
            except Exception as e:
                fail(e)

        def begin() -> None:
            self._looks.add(task := asyncio.ensure_future(look()))
            task.add_done_callback(self._looks.discard)

        self._loop.call_soon_threadsafe(begin)

    def results(self, futures: Iterable[WorkerFuture], errors: bool = False) -> list[Any]:
        """The values of items, brought here; with ``errors``, those of items that failed stand in their places."""

        async def one(future: WorkerFuture) -> Any:
            return answered(await future.stream.call("meshtape_value", number=future.number))

        async def all_of_them() -> list[Any]:
            return list(await asyncio.gather(*map(one, futures), return_exceptions=errors))

        return on_loop(self.client(), all_of_them)

    def flush(self, addresses: Iterable[str]) -> None:
        """Send the queued messages of these workers, and what is late."""
        streams = [self._streams[a] for a in addresses]

        def go() -> None:
            for s in {*streams, *self._put_late()}:
                s.wake()
                if s.lost is not None:
                    s.give_up()

        with contextlib.suppress(RuntimeError):  # the loop is closed: so is the client
            self._loop.call_soon_threadsafe(go)

    def when_gone(self, what: object, fn: Callable[[Any], None], arg: Any) -> None:
        """Have ``fn(arg)`` called before the next item, or soon, when nobody has ``what`` any more.

        Its finalizer is a call of C: in one of Python's, a Ctrl-C that comes just then is lost, and so is the call.
        """
        self._alive[weakref.ref(what, self._gone.append)] = fn, arg

    def put_later(self, put: Callable[[], Iterable[WorkerStream]]) -> None:
        """Have ``put`` called then, which puts messages and returns their streams. A loop of steps drops the results of
        each, for which a message of its own would be half of the work."""
        self._late.append(put)

    def forget(self, mesh: bytes, addresses: Sequence[str]) -> None:
        """Have the workers and the scheduler forget a mesh that nobody has any more."""

        if not addresses:
            return

        async def tell_scheduler() -> None:
            with contextlib.suppress(ClusterError):
                await scheduler_answer(self.client(), "meshtape_closed", mesh=mesh)

        def put() -> Iterable[WorkerStream]:
            streams = [self._streams[a] for a in addresses]
            for s in streams:
                s.send({"op": "close", "mesh": mesh})
            return streams

        self.put_later(put)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(tell_scheduler()))

    def _put_late(self) -> set[WorkerStream]:
        for ref in popped(self._gone):
            fn, arg = self._alive.pop(ref)
            fn(arg)
        return {s for put in popped(self._late) for s in put()}

    async def _pause(self, seconds: float) -> None:
        """Wait, and send what is late meanwhile."""
        count = max(1, round(seconds / LATE))
        for _ in range(count):
            await asyncio.sleep(seconds / count)
            for s in self._put_late():
                s.wake()

    # ----- are they alive ---------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Watch the workers until the client is closed or its event loop ends, and end the sessions with it."""
        try:
            while self._open():
                busy = self._ask()
                tick = max(0.05, min(2.0, settings.number("timeout") / 8))
                await self._pause(tick)
                # Ticks are counted, not the time: if this process itself was stopped, workers are not to blame.
                for s in busy:
                    self._judge(s, tick)
        finally:
            for s in self._streams.values():
                s.lose("its client is closed")

    def _open(self) -> bool:
        client = self._client()
        return client is not None and client.status != "closed"

    def _ask(self) -> list[WorkerStream]:
        """Ping the workers that something waits for: these workers."""
        alive = [s for s in self._streams.values() if s.lost is None]
        fetching = [(f, n.stream) for s in alive for f in s.pending.values() for n in f._needs]
        for future, source in fetching:
            if source.lost is not None:
                self._give_up(future, source)
        sources = {source for _, source in fetching}
        busy = [s for s in alive if s.pending or s.waiting or s in sources]
        for s in busy:
            s.heard = False
            s.send({"op": "ping"})
            s.wake()
        return busy

    def _judge(self, s: WorkerStream, tick: float) -> None:
        timeout = settings.number("timeout")
        s.silent = 0.0 if s.heard else s.silent + tick
        if s.silent >= timeout:
            s.lose(f"it has not answered for {timeout:.0f} s: it is stopped, swapped out or cut off")

    def _give_up(self, future: WorkerFuture, source: WorkerStream) -> None:
        """End an item that waits for the value of a lost worker, on its own worker too, where it keeps others
        waiting."""
        if future.stream.pending.pop(future.number, None) is not None:
            future.finish("failed", RankLost(f"{future.name} waited for a value: {source.error()}"))
            future.stream.send({"op": "cancel", "numbers": (future.number,)})
            future.stream.wake()


streams_of = PerClient(WorkerStreams)
"""The streams of a client: one set for all its meshes."""


def _said(answer: Any) -> str:
    text = answer.get("exception_text") or answer.get("text") if isinstance(answer, Mapping) else None
    return f"it answered {text or answer!r}"


async def send_recv_to(client: Client, address: str, message: dict[str, Any]) -> Any:
    """The answer of a worker to a message."""
    return await getattr(client.rpc(address), message.pop("op"))(**message)
