"""The queue of a worker: the work of its meshes' clients, outside of Dask's task slots.

Each client has one stream to the worker, which works through it in order, in a thread of its own. A client sends to all
workers of a mesh in one order, and the lease (:mod:`.lease`) keeps other clients from them meanwhile. So programs,
whose ranks wait for each other, never block each other. Users' tasks do not hold them up, however many there are.

An item's value is kept in the worker's ``data``, where Dask's memory manager may spill it to disk, until the client
drops it. When a stream ends, all values of its client are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from distributed import Worker
from distributed.core import Status
from distributed.protocol import to_serialize

from ...arrays.core.errors import RankLost
from ..base.message_streams import (
    DaskMessages,
    MessageStream,
    RemoteError,
    SocketMessages,
    encoded,
    failure,
    failure_message,
    has_plain_socket,
)
from .workers import LOOK

PREFIX = "meshtape."
"""Of the keys under which a worker keeps our values."""

STOOD_STILL = (
    "the scheduler gave the workers to others that waited, as this client stood still for longer than "
    "meshtape.timeouts.lease: call it again"
)
_SMALL = 4 << 10  # bytes of a value that Dask need not spill
_NAMES = 50  # programs whose counts are told to the scheduler


class Ref(NamedTuple):
    """A placeholder for an argument: the value of an earlier item of this session, on the worker at ``address``."""

    number: int
    address: str
    session: str


@dataclass(slots=True)
class WorkItem:
    """A piece of work. ``work`` is called with the values of the items ``needs``. If it fails, items of the same
    ``epoch`` of a mesh do not begin."""

    number: int
    name: str
    work: Callable[[Sequence[Any]], Any]
    needs: Sequence[Ref] = ()
    epoch: tuple[bytes, int] | None = None
    timeout: float = 0.0
    """The client's seconds after which a worker that it needs a value of, and that says nothing, is lost."""
    stop: threading.Event | None = None
    """Set to end the work early, if the work checks it."""

    @property
    def leased(self) -> bool:
        """Whether it needs the client's lease."""
        return self.epoch is not None or self.stop is not None


@dataclass
class Count:
    """Items of one name that are done, the seconds that they took, and how many failed."""

    done: int = 0
    failed: int = 0
    seconds: float = 0.0


@dataclass
class ClientSession:
    """The items of one client on this worker, and their values. A client that reconnects gets a new session, without
    the values of an earlier one.

    Items come in on the worker's event loop. The thread that runs them goes from one to the next, and says how each
    ended, without crossing the loop.
    """

    resident: Resident
    client: str
    session: str
    messages: MessageStream
    queue: deque[WorkItem | Callable[[], None]] = field(default_factory=deque)
    unfinished: set[int] = field(default_factory=set)
    kept: dict[int, str] = field(default_factory=dict)
    failures: dict[int, BaseException] = field(default_factory=dict)
    broken: dict[bytes, tuple[int, str]] = field(default_factory=dict)
    latest: int = 0
    open: bool = True

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.RLock()
        self._busy = False
        """Whether the thread works for this session, or is going to."""
        self._now: WorkItem | None = None
        self._fetch: Future[list[Any]] | None = None
        self._awaited: dict[int, asyncio.Event] = {}

    # ----- incoming items ---------------------------------------------------------------------------------------------

    def add(self, item: WorkItem) -> None:
        """Queue an item behind the earlier ones."""
        self.resident.touch([key for r in item.needs if (key := self.kept.get(r.number)) is not None])
        with self._lock:
            self.latest = max(self.latest, item.number)
            self.unfinished.add(item.number)
        if item.leased and self.resident.fences.get(self.client, (0, False))[1]:
            self._failed(item.number, RankLost(STOOD_STILL))
        else:
            self.then(item)

    def then(self, what: WorkItem | Callable[[], None]) -> None:
        """The same for a short action without an answer."""
        with self._lock:
            self.queue.append(what)
            begin, self._busy = not self._busy, True
        if begin:
            self._in_thread(self._next)

    def cut_off(self) -> None:
        """Do not begin items that need the lease, and stop those that can be stopped."""
        with self._lock:
            items = [i for i in (self._now, *self.queue) if isinstance(i, WorkItem)]
            self.cancel([i.number for i in items if i.leased], STOOD_STILL)

    def cancel(self, numbers: Iterable[int], why: str = "it was given up") -> None:
        """Do not begin these items, and stop those that can be stopped or wait for values of other workers."""
        given_up = set(numbers)
        with self._lock:
            if self._now is not None and self._now.number in given_up:
                if self._now.stop is not None:
                    self._now.stop.set()
                if self._fetch is not None:
                    self._fetch.cancel()
            items = [i for i in self.queue if isinstance(i, WorkItem) and i.number in given_up]
            for item in items:
                self.queue.remove(item)
        for item in items:
            self._failed(item.number, RankLost(why))

    def drop(self, numbers: Iterable[int]) -> None:
        """Drop the values of these items."""
        for n in numbers:
            self.failures.pop(n, None)
            if (key := self.kept.pop(n, None)) is not None:
                self.resident.forget(key)

    def keep(self, number: int, name: str, value: Any) -> None:
        """Keep an item's value, and wake those that wait for it."""
        key = f"{PREFIX}{name.replace('-', '_')}-{self.session}-{number}"
        self.resident.store(key, value)
        with self._lock:
            if self.open:
                self.kept[number] = key
        if number not in self.kept:  # the client left meanwhile
            self.resident.forget(key)
        self._ended(number)

    def _failed(self, number: int, error: BaseException) -> None:
        self.failures[number] = error.with_traceback(None)  # whose frames hold blocks
        self._ended(number)
        self.say({"op": "failed", "n": number, **failure_message(error)})

    def _ended(self, number: int) -> None:
        with self._lock:
            self.unfinished.discard(number)
            awaited = self._awaited.pop(number, None)
        if awaited is not None:
            with contextlib.suppress(RuntimeError):  # the worker's loop is closed
                self._loop.call_soon_threadsafe(awaited.set)

    # ----- values of items --------------------------------------------------------------------------------------------

    async def value(self, number: int) -> Any:
        """The value of an item, once it has ended. Raises its error, or :class:`RankLost` where the value is gone."""
        with self._lock:
            ended = number in self.kept or number in self.failures or not self.open
            if not ended and (number in self.unfinished or number > self.latest):  # on its way, by another connection
                awaited = self._awaited.setdefault(number, asyncio.Event())
            else:
                awaited = None
        if awaited is not None:
            await awaited.wait()
        return self.now(number)

    def now(self, number: int) -> Any:
        """The same for an item that has ended."""
        if (error := self.failures.get(number)) is not None:
            raise error
        if (key := self.kept.get(number)) is None:
            raise RankLost(f"worker {self.resident.worker.address} does not have what was left there any more")
        return self.resident.value(key)

    # ----- working, in the thread -------------------------------------------------------------------------------------

    def _in_thread(self, fn: Callable[..., None], *args: Any) -> None:
        def go() -> None:
            try:
                fn(*args)
            except BaseException:  # not even an error could be told, without memory, say: the end of the stream tells
                self.messages.abort()
                raise

        with contextlib.suppress(RuntimeError):  # the worker closes
            self.resident.thread.submit(go)

    def _next(self) -> None:
        """Work through the queue. Where there are other sessions, they have their turn after an item."""
        while True:
            with self._lock:
                if not (self.open and self.queue):
                    self._busy = False
                    return
                what = self.queue.popleft()
                if isinstance(what, WorkItem):
                    self._now = what
                    if any(r.session != self.session for r in what.needs):
                        self._fetch = asyncio.run_coroutine_threadsafe(self._fetched(what), self._loop)
                        self._fetch.add_done_callback(partial(self._in_thread, self._go_on, what))
                        return
            if not isinstance(what, WorkItem):
                what()
                continue
            self._run(what)
            what = None  # type: ignore[assignment]  # it must not live until the next item comes
            if len(self.resident.sessions) > 1:
                self._in_thread(self._next)
                return

    def _go_on(self, item: WorkItem, fetch: Future[list[Any]]) -> None:
        self._fetch = None
        self._run(item, fetch)
        self._next()

    def _run(self, item: WorkItem, fetch: Future[list[Any]] | None = None) -> None:
        begun = time.perf_counter()
        try:
            if item.epoch is not None:
                broken, why = self.broken.get(item.epoch[0], (-1, ""))
                if broken >= item.epoch[1]:
                    raise RankLost(f"it did not begin, as another of its mesh failed: {why}")
            if fetch is not None and fetch.cancelled():
                raise RankLost("it was given up while it waited for another worker")
            # Those of this session came before.
            values = [self.now(r.number) for r in item.needs] if fetch is None else fetch.result()
            self.keep(item.number, item.name, item.work(values))
        except BaseException as e:
            if item.epoch is not None and self.broken.get(item.epoch[0], (-1, ""))[0] < item.epoch[1]:
                self.broken[item.epoch[0]] = item.epoch[1], f"{type(e).__name__}: {e}"
            self.resident.count(item.name, None)
            self._failed(item.number, e)
        else:
            self.resident.count(item.name, time.perf_counter() - begun)
            self.say({"op": "done", "n": item.number})
        self._now = None

    async def _fetched(self, item: WorkItem) -> list[Any]:
        """The values of earlier items that one needs, some of them on other workers."""
        return [
            self.now(r.number) if r.session == self.session else await self._sent(r, item.timeout) for r in item.needs
        ]

    async def _sent(self, ref: Ref, timeout: float) -> Any:
        source = self.resident.worker.rpc(ref.address)
        call = asyncio.ensure_future(source.meshtape_value(session=ref.session, number=ref.number))
        try:
            # The client may reach both workers where they do not reach each other: by Dask's limit that shows after 30
            # s.
            while not (await asyncio.wait([call], timeout=LOOK))[0]:
                await asyncio.wait_for(source.ping(), timeout)
            return answered(call.result())
        except OSError as e:
            raise RankLost(f"worker {ref.address} is lost: {str(e) or 'it does not answer'}") from e
        finally:
            call.cancel()

    def names(self) -> list[str]:
        """Names of the running and the waiting items."""
        with self._lock:
            return [i.name for i in (self._now, *self.queue) if isinstance(i, WorkItem)]

    # ----- saying -----------------------------------------------------------------------------------------------------

    def say(self, message: dict[str, Any]) -> None:
        """Send a message to the client."""
        self.messages.put(encoded(message))
        self.messages.wake()

    def end(self) -> None:
        """End the session: the client is gone."""
        with self._lock:
            self.open = False
            if self._now is not None and self._now.stop is not None:
                self._now.stop.set()
            if self._fetch is not None:
                self._fetch.cancel()
            self.queue.clear()
            waiting = [*self._awaited]
        for n in waiting:
            self._ended(n)
        self.drop(list(self.kept))
        self.messages.abort()


def answered(found: Any) -> Any:
    """The value in an answer to ``meshtape_value``. Raises its error, if it holds one."""
    if isinstance(found, Mapping) and "value" in found:
        return found["value"]
    if not isinstance(found, Mapping) or "failed" not in found:
        raise RankLost(f"a worker has no answer: {found!r}")
    error = failure(found)
    raise RankLost(f"a worker failed: {error}") if isinstance(error, RemoteError) else error


class Resident:
    """The queue of one worker; see the module. ``commands`` carries out a stream's message. ``left`` is called with a
    client whose stream has ended."""

    def __init__(
        self, worker: Worker, commands: Callable[[ClientSession, dict[str, Any]], None], left: Callable[[str], None]
    ) -> None:
        self.worker, self._commands, self._left = worker, commands, left
        self.sessions: dict[str, ClientSession] = {}
        self.counts: OrderedDict[str, Count] = OrderedDict()
        self.fences: dict[str, tuple[int, bool]] = {}
        self._loop = asyncio.get_running_loop()
        self._loops_thread = threading.get_ident()
        self._aside: dict[str, Any] = {}
        self._large: set[str] = set()
        """Keys whose values are in the worker's ``data``, or on the way there. The event loop alone uses that."""
        self._in_memory: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="meshtape-gang")
        self._closed = False

    def close(self) -> None:
        """End all streams, as the worker closes."""
        self._closed = True
        for s in list(self.sessions.values()):
            s.end()
        self.thread.shutdown(wait=False, cancel_futures=True)

    # ----- values -----------------------------------------------------------------------------------------------------

    def store(self, key: str, value: Any) -> None:
        """Keep a value where Dask can spill it; a small one here, as Dask's books take longer than most steps."""
        self._aside[key] = value
        with contextlib.suppress(TypeError):
            self._in_memory[key] = value
        if key in self._large or sys.getsizeof(value) > _SMALL:
            self._large.add(key)
            self._soon(self._give_to_dask, key)

    def _give_to_dask(self, key: str) -> None:
        if key in self._aside:  # it may have been dropped meanwhile
            with contextlib.suppress(Exception):  # Dask has no room, or cannot write it: it stays here
                self.worker.data[key] = self._aside[key]
                self._aside.pop(key, None)

    def _soon(self, fn: Callable[[str], None], key: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(fn, key)

    def value(self, key: str) -> Any:
        """A kept value, from disk if it is there."""
        with contextlib.suppress(KeyError):
            return self._aside[key]
        if (found := self._in_memory.get(key)) is not None:
            return found
        if threading.get_ident() == self._loops_thread:
            return self.worker.data[key]

        async def read() -> Any:
            return self.worker.data[key]

        read_there = asyncio.run_coroutine_threadsafe(read(), self._loop)
        while not wait([read_there], LOOK).done:
            if self._closed:
                raise RankLost(f"worker {self.worker.address} closes")
        return read_there.result()

    def touch(self, keys: Iterable[str]) -> None:
        """Have Dask spill others before these, if they are in memory."""
        for key in keys:
            if key in self._large and key in self._in_memory:
                with contextlib.suppress(KeyError):
                    self.worker.data[key]

    def in_memory(self) -> list[Any]:
        """The kept values that are not on disk."""
        refs = self._in_memory.valuerefs()  # at once, as other threads store values
        return [v for r in refs if (v := r()) is not None]

    def forget(self, key: str) -> None:
        """Drop a value."""
        self._aside.pop(key, None)
        if key in self._large:
            self._large.discard(key)
            self._soon(self._take_from_dask, key)

    def _take_from_dask(self, key: str) -> None:
        with contextlib.suppress(KeyError):
            del self.worker.data[key]

    # ----- handlers of the worker -------------------------------------------------------------------------------------

    async def stream(self, comm: Any, client: str, session: str, plain: bool = False) -> Any:
        """A client's stream, until it ends. ``plain``: it can take the socket of the connection."""
        for old in [d for d in self.sessions.values() if d.client == client]:
            self._end(old)
        plain = plain and has_plain_socket(comm)
        messages: MessageStream = DaskMessages(comm)
        client_session = self.sessions[session] = ClientSession(self, client, session, messages)
        try:
            await comm.write({"status": "OK", "plain": plain})
            if plain:
                client_session.messages = messages = SocketMessages(comm)
            await messages.serve(lambda m: self._commands(client_session, m))
        except OSError:
            pass
        finally:
            self._end(client_session)
            comm.abort()
        return Status.dont_reply

    def _end(self, client_session: ClientSession) -> None:
        if self.sessions.pop(client_session.session, None) is not None:
            client_session.end()
            self._left(client_session.client)

    async def take(self, session: str, number: int) -> Any:
        """The value of an item, for another worker or for the client."""
        try:
            return {"value": to_serialize(await self.of(session).value(number))}
        except Exception as e:
            return failure_message(e)

    async def put(self, session: str, number: int, name: str, value: Any) -> Any:
        """Keep a value that a client sends outside of its stream as the value of an item."""
        try:
            self.of(session).keep(number, name, value)
        except Exception as e:
            return failure_message(e)
        return {"value": None}

    async def busy_for(self, client: str) -> list[str]:
        """Names of a client's unfinished items."""
        return [n for s in self.sessions.values() if s.client == client for n in s.names()]

    async def fence(self, client: str, number: int, closed: bool) -> None:
        """Close or reopen a client's queue, as the scheduler takes or returns its lease. ``number`` orders messages."""
        if number > self.fences.get(client, (0, False))[0]:
            self.fences[client] = number, closed
            for s in self.sessions.values():
                if closed and s.client == client:
                    s.cut_off()

    def of(self, session: str) -> ClientSession:
        """The `ClientSession` of that name. Raises :class:`RankLost` where there is no such session."""
        client_session = self.sessions.get(session)
        if client_session is None:
            raise RankLost(f"worker {self.worker.address} knows no session {session}: it was started anew, or cut off")
        return client_session

    # ----- reports to the scheduler -----------------------------------------------------------------------------------

    def count(self, name: str, seconds: float | None) -> None:
        """Count an item that has ended; ``seconds`` is None where it failed."""
        count = self.counts.pop(name, None) or Count()
        self.counts[name] = count
        while len(self.counts) > _NAMES:
            self.counts.popitem(last=False)
        if seconds is None:
            count.failed += 1
        else:
            count.done, count.seconds = count.done + 1, count.seconds + seconds

    def report(self) -> dict[str, Any]:
        """Running, waiting and ended items, and the bytes of kept values, as plain data."""
        names = [n for s in self.sessions.values() for n in s.names()]
        keys = [k for s in self.sessions.values() for k in list(s.kept.values())]
        return {
            "running": names[:1],
            "waiting": names[1:_NAMES],
            "counts": {n: (c.done, c.failed, c.seconds) for n, c in list(self.counts.items())},
            "bytes": sum(sys.getsizeof(v) for k in keys if (v := self._in_memory.get(k)) is not None),
        }
