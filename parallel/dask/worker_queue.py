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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

import cloudpickle
from distributed import Worker
from distributed.core import Status
from distributed.protocol import to_serialize
from distributed.protocol.pickle import dumps, loads

from ...arrays.core.errors import RankLost
from ..base import settings
from .workers import LOOK

T = TypeVar("T")
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


def packed(value: Any) -> list[Any]:
    """A value for a message, which :func:`unpacked` reads where it is used. If it cannot be read there, only the item
    that needs it fails, not the stream."""
    buffers: list[Any] = []
    head = dumps(value, buffer_callback=buffers.append)
    return [to_serialize(head), *(to_serialize(b.raw()) for b in buffers)]


def unpacked(message: Sequence[Any]) -> Any:
    """See :func:`packed`."""
    return loads(message[0], buffers=message[1:])


def read_error(pickled: bytes) -> BaseException | None:
    """An exception that another process has pickled; None where this one cannot make it: it has no such class, or one
    with arguments of its own."""
    try:
        error = loads(pickled)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None


class RemoteError(Exception):
    """Stands for a worker's error that this process cannot rebuild: its name and text."""


def failure_message(error: BaseException) -> dict[str, Any]:
    """An error for a message, which :func:`failure` reads. Dask's own messages show pickled bytes where one cannot be
    read."""
    pickled = b""
    with contextlib.suppress(Exception):
        pickled = cloudpickle.dumps(error)
    return {"failed": f"{type(error).__name__}: {error}", "pickled": pickled}


def failure(message: Mapping[str, Any]) -> BaseException:
    """See :func:`failure_message`."""
    return read_error(message["pickled"]) or RemoteError(message["failed"])


def popped(queue: deque[T]) -> Iterator[T]:
    """The elements of a queue, popped one by one; other threads may append and pop meanwhile."""
    with contextlib.suppress(IndexError):
        while True:
            yield queue.popleft()


Message: TypeAlias = "dict[str, Any] | bytes"
"""A message of a stream: a dictionary, or one that is pickled. Dask takes 25 µs to look through a dictionary, and 2 µs
for bytes, which are made once for all workers."""


async def messages_from(comm: Any) -> list[dict[str, Any]]:
    """The next messages from the other end of a stream."""
    return [loads(m) if isinstance(m, bytes) else m for m in await comm.read()]


class Outbox:
    """Messages to the other end of a stream; those that have gathered are sent together. :meth:`put` may be called in
    any thread, the rest only on the event loop."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._some = asyncio.Event()

    def put(self, message: Message) -> None:
        """Add a message, without a lock and without waking the writer."""
        self._messages.append(message)

    def wake(self) -> None:
        """Wake the writer."""
        if self._messages:
            self._some.set()

    async def write_to(self, comm: Any) -> None:
        """Write messages as they come, until the stream ends."""
        while True:
            await self._some.wait()
            self._some.clear()
            while self._messages:
                await comm.write(list(popped(self._messages)))


@dataclass(slots=True)
class WorkItem:
    """A piece of work. ``work`` is called with the values of the items ``needs``. If it fails, items of the same
    ``epoch`` of a mesh do not begin."""

    number: int
    name: str
    work: Callable[[Sequence[Any]], Any]
    needs: Sequence[Ref] = ()
    epoch: tuple[bytes, int] | None = None
    stop: threading.Event | None = None
    """Set to end the work early, if the work checks it."""


@dataclass
class Count:
    """Items of one name that are done, the seconds that they took, and how many failed."""

    done: int = 0
    failed: int = 0
    seconds: float = 0.0


@dataclass
class ClientSession:
    """The items of one client on this worker, and their values. A client that reconnects gets a new session, without
    the values of an earlier one. Used on the worker's event loop."""

    resident: Resident
    client: str
    session: str
    comm: Any
    queue: deque[WorkItem | Callable[[], None]] = field(default_factory=deque)
    ended: dict[int, asyncio.Event] = field(default_factory=dict)
    kept: dict[int, str] = field(default_factory=dict)
    failures: dict[int, BaseException] = field(default_factory=dict)
    broken: dict[bytes, tuple[int, str]] = field(default_factory=dict)
    latest: int = 0
    open: bool = True

    def __post_init__(self) -> None:
        self._now: WorkItem | None = None
        self._fetch: asyncio.Future[list[Any]] | None = None
        self._come, self._answers = asyncio.Event(), Outbox()
        self._tasks = [asyncio.ensure_future(self._work()), asyncio.ensure_future(self._answer())]
        for task in self._tasks:
            task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        # Where not even an error could be told (without memory, say), the end of the stream tells the client.
        if not task.cancelled() and task.exception() is not None:
            self.comm.abort()

    # ----- incoming items ---------------------------------------------------------------------------------------------

    def add(self, item: WorkItem) -> None:
        """Queue an item behind the earlier ones."""
        self.latest = max(self.latest, item.number)
        self.ended.setdefault(item.number, asyncio.Event())
        self.then(item)
        if self.resident.fences.get(self.client, (0, False))[1]:
            self.cut_off()

    def then(self, what: WorkItem | Callable[[], None]) -> None:
        """The same for a short action without an answer."""
        self.queue.append(what)
        self._come.set()

    def cut_off(self) -> None:
        """Do not begin items that need the lease, and stop those that can be stopped."""
        items = [i for i in (self._now, *self.queue) if isinstance(i, WorkItem)]
        self.cancel([i.number for i in items if i.epoch is not None or i.stop is not None], STOOD_STILL)

    def cancel(self, numbers: Iterable[int], why: str = "it was given up") -> None:
        """Do not begin these items, and stop those that can be stopped or wait for values of other workers."""
        given_up = set(numbers)
        if self._now is not None and self._now.number in given_up:
            if self._now.stop is not None:
                self._now.stop.set()
            if self._fetch is not None:
                self._fetch.cancel()
        for item in [i for i in self.queue if isinstance(i, WorkItem) and i.number in given_up]:
            self.queue.remove(item)
            self._failed(item.number, RankLost(why))

    def drop(self, numbers: Iterable[int]) -> None:
        """Drop the values of these items."""
        for n in numbers:
            self.ended.pop(n, None)
            self.failures.pop(n, None)
            if (key := self.kept.pop(n, None)) is not None:
                self.resident.forget(key)

    def keep(self, number: int, name: str, value: Any) -> None:
        """Keep an item's value, and wake those that wait for it."""
        self.kept[number] = key = f"{PREFIX}{name.replace('-', '_')}-{self.session}-{number}"
        self.resident.store(key, value)
        self.ended.setdefault(number, asyncio.Event()).set()

    def _failed(self, number: int, error: BaseException) -> None:
        self.failures[number] = error.with_traceback(None)  # whose frames hold blocks
        self.ended.setdefault(number, asyncio.Event()).set()
        self.say({"op": "failed", "n": number, **failure_message(error)})

    # ----- values of items --------------------------------------------------------------------------------------------

    async def value(self, number: int) -> Any:
        """The value of an item, once it has ended. Raises its error, or :class:`RankLost` where the value is gone."""
        if number not in self.ended and number > self.latest:  # on its way, by another connection
            self.ended[number] = asyncio.Event()
        if (ended := self.ended.get(number)) is not None:
            await ended.wait()
        return self.now(number)

    def now(self, number: int) -> Any:
        """The same for an item that has ended."""
        if (error := self.failures.get(number)) is not None:
            raise error
        if (key := self.kept.get(number)) is None:
            raise RankLost(f"worker {self.resident.worker.address} does not have what was left there any more")
        return self.resident.value(key)

    # ----- working ----------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self.open:
            while not self.queue:
                self._come.clear()
                await self._come.wait()
            what = self.queue.popleft()
            if not isinstance(what, WorkItem):
                what()
                continue
            begun = time.perf_counter()
            self._now = what
            try:
                if what.epoch is not None:
                    broken, why = self.broken.get(what.epoch[0], (-1, ""))
                    if broken >= what.epoch[1]:
                        raise RankLost(f"it did not begin, as another of its mesh failed: {why}")
                values = await self._values(what.needs)
                value = await loop.run_in_executor(self.resident.thread, what.work, values)
                self.keep(what.number, what.name, value)
            except asyncio.CancelledError:
                raise
            except BaseException as e:
                if what.epoch is not None and self.broken.get(what.epoch[0], (-1, ""))[0] < what.epoch[1]:
                    self.broken[what.epoch[0]] = what.epoch[1], f"{type(e).__name__}: {e}"
                self.resident.count(what.name, None)
                self._failed(what.number, e)
            else:
                self.resident.count(what.name, time.perf_counter() - begun)
                self.say({"op": "done", "n": what.number})
            finally:
                what = values = value = None  # type: ignore[assignment]  # they must not live until the next item comes
                self._now = None

    async def _values(self, needs: Sequence[Ref]) -> list[Any]:
        """The values of earlier items. Where another worker has one, :meth:`cancel` ends the wait for it."""
        if all(r.session == self.session for r in needs):
            return [self.now(r.number) for r in needs]  # they came before

        async def fetch() -> list[Any]:
            return [self.now(r.number) if r.session == self.session else await self._sent(r) for r in needs]

        self._fetch = asyncio.ensure_future(fetch())
        try:
            await asyncio.wait([self._fetch])
            if self._fetch.cancelled():
                raise RankLost("it was given up while it waited for another worker")
            return self._fetch.result()
        finally:
            self._fetch.cancel()
            self._fetch = None

    async def _sent(self, ref: Ref) -> Any:
        source = self.resident.worker.rpc(ref.address)
        call = asyncio.ensure_future(source.meshtape_value(session=ref.session, number=ref.number))
        try:
            # The client may reach both workers where they do not reach each other: by Dask's limit that shows after 30
            # s.
            while not (await asyncio.wait([call], timeout=LOOK))[0]:
                await asyncio.wait_for(source.ping(), settings.number("timeout"))
            return answered(call.result())
        except OSError as e:
            raise RankLost(f"worker {ref.address} is lost: {str(e) or 'it does not answer'}") from e
        finally:
            call.cancel()

    def names(self) -> list[str]:
        """Names of the running and the waiting items."""
        waiting = [i.name for i in self.queue if isinstance(i, WorkItem)]
        return [self._now.name, *waiting] if self._now is not None else waiting

    # ----- saying -----------------------------------------------------------------------------------------------------

    def say(self, message: dict[str, Any]) -> None:
        """Send a message to the client."""
        self._answers.put(dumps(message))
        self._answers.wake()

    async def _answer(self) -> None:
        with contextlib.suppress(OSError):  # the client is gone: the stream ends, too
            await self._answers.write_to(self.comm)

    def end(self) -> None:
        """End the session: the client is gone."""
        self.open = False
        if self._now is not None and self._now.stop is not None:
            self._now.stop.set()
        for task in self._tasks:
            task.cancel()
        for event in self.ended.values():
            event.set()
        self.drop(list(self.kept))
        self.queue.clear()


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
        self._aside: dict[str, Any] = {}
        self._in_memory: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="meshtape-gang")

    def close(self) -> None:
        """End all streams, as the worker closes."""
        for s in list(self.sessions.values()):
            s.end()
            s.comm.abort()
        self.thread.shutdown(wait=False, cancel_futures=True)

    # ----- values -----------------------------------------------------------------------------------------------------

    def store(self, key: str, value: Any) -> None:
        """Keep a value where Dask can spill it; a small one here, as Dask's books take longer than most steps."""
        try:
            (self._aside if sys.getsizeof(value) <= _SMALL else self.worker.data)[key] = value
        except Exception:  # that has no room, or cannot be written: it stays here
            self._aside[key] = value
        with contextlib.suppress(TypeError):
            self._in_memory[key] = value

    def value(self, key: str) -> Any:
        """A kept value."""
        return self._aside[key] if key in self._aside else self.worker.data[key]

    def in_memory(self) -> list[Any]:
        """The kept values that are not on disk."""
        refs = self._in_memory.valuerefs()  # at once, as other threads store values
        return [v for r in refs if (v := r()) is not None]

    def forget(self, key: str) -> None:
        """Drop a value."""
        self._aside.pop(key, None)
        with contextlib.suppress(KeyError):  # there, too, where it could not be written
            del self.worker.data[key]

    # ----- handlers of the worker -------------------------------------------------------------------------------------

    async def stream(self, comm: Any, client: str, session: str) -> Any:
        """A client's stream, until it ends."""
        for old in [d for d in self.sessions.values() if d.client == client]:
            self._end(old)
            old.comm.abort()
        client_session = self.sessions[session] = ClientSession(self, client, session, comm)
        try:
            await comm.write({"status": "OK"})
            while True:
                for message in await messages_from(comm):
                    self._commands(client_session, message)
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
        keys = [k for s in self.sessions.values() for k in s.kept.values()]
        return {
            "running": names[:1],
            "waiting": names[1:_NAMES],
            "counts": {n: (c.done, c.failed, c.seconds) for n, c in self.counts.items()},
            "bytes": sum(sys.getsizeof(v) for k in keys if (v := self._in_memory.get(k)) is not None),
        }
