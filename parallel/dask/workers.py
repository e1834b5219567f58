"""The workers of a Dask cluster: their addresses, liveness and answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from distributed import Client, WorkerPlugin

from ...arrays.core.errors import ClusterError, MeshError, WorkerMismatch
from ..base import settings

T = TypeVar("T")
LOOK = 2.0
"""Seconds of waiting for a worker after which the scheduler is asked whether it is still there."""


class PerClient(Generic[T]):
    """One object for each client of this process, made when it is first asked for."""

    def __init__(self, make: Callable[[Client], T]) -> None:
        self._make, self._lock = make, threading.Lock()
        self.made: weakref.WeakKeyDictionary[Client, T] = weakref.WeakKeyDictionary()

    def __call__(self, client: Client) -> T:
        with self._lock:
            found = self.made.get(client)
            if found is None:
                found = self.made[client] = self._make(client)
            return found


_FORKED: weakref.WeakSet[Client] = weakref.WeakSet()
"""Clients of the process that this one was forked from: their threads are not here, and nobody would answer."""
_SEEN: weakref.WeakSet[Client] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _FORKED.update(_SEEN))


def is_forked(client: Client) -> bool:
    """Whether this is the client of the process that this one was forked from."""
    return client in _FORKED


def on_loop(
    client: Client, fn: Callable[..., Coroutine[Any, Any, T]], *args: Any, seconds: float | None = None, **kwargs: Any
) -> T:
    """The result of a coroutine function, called on the client's event loop. Raises :class:`ClusterError` where that
    ends meanwhile, ``TimeoutError`` after so many seconds.

    ``client.sync`` waits at a ``threading.Event``, where Ctrl-C can leave a lock behind at which the loop stands for
    ever. A queue of C's has none.
    """
    loop: asyncio.AbstractEventLoop = client.loop.asyncio_loop  # type: ignore[attr-defined]
    ended: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    tasks: list[asyncio.Task[None]] = []

    async def go() -> None:
        try:
            ended.put((await asyncio.wait_for(fn(*args, **kwargs), seconds), None))
        except BaseException as e:
            ended.put((None, e))

    def on_the_loop(do: Callable[[], object]) -> None:
        try:
            loop.call_soon_threadsafe(do)
        except RuntimeError as e:
            raise ClusterError("the Dask client is closed") from e

    check_thread(client)
    try:
        on_the_loop(lambda: tasks.append(asyncio.ensure_future(go())))
        while loop.is_running():
            with contextlib.suppress(Empty):
                found, error = ended.get(timeout=LOOK)
                break
        else:
            raise ClusterError("the Dask client is closed")
    except BaseException:
        with contextlib.suppress(ClusterError):
            on_the_loop(lambda: [t.cancel() for t in tasks])
        raise
    if isinstance(error, asyncio.CancelledError):
        raise ClusterError("the Dask client was closed meanwhile") from error
    if error is not None:
        raise error
    return found


def is_on_loop(client: Client) -> bool:
    """Whether this runs on the client's own event loop, where nothing may wait for it."""
    return asyncio._get_running_loop() is client.loop.asyncio_loop  # type: ignore[attr-defined]


def check_thread(client: Client) -> None:
    """Raise :class:`ClusterError` on the client's own event loop, which would wait for itself."""
    if is_on_loop(client):
        raise ClusterError("a mesh cannot be used on the event loop of its Dask client: call this in another thread")


def check_client(who: str, client: Any) -> None:
    """Raise :class:`MeshError` unless this is a synchronous client, :class:`ClusterError` unless it is connected."""
    if not isinstance(client, Client):
        raise MeshError(f"{who} takes a distributed.Client, got {type(client).__name__}")
    if client.asynchronous:
        raise MeshError(f"{who} needs a synchronous client: Client(…) without asynchronous=True")
    _SEEN.add(client)
    check_running(client)


def check_running(client: Client) -> None:
    """Raise :class:`ClusterError` for a client that is closed, or whose scheduler is gone."""
    if is_forked(client):
        raise ClusterError(
            "this process was forked from that of the Dask client, whose threads it does not have: start processes by "
            "spawn, and open a client and a mesh in each"
        )
    status = client.status
    if status == "connecting":  # anew: it was connected
        raise ClusterError(f"the scheduler{_address(client)} is gone: its connection ended")
    if status != "running":
        raise ClusterError(f"the Dask client is {status}: it was closed, or its scheduler{_address(client)} is gone")


def _address(client: Client) -> str:
    address = getattr(client.scheduler, "address", None)
    return f" at {address}" if address else ""


def check_known(workers: Sequence[str], there: Iterable[str]) -> list[str]:
    """The workers that a user names, each once. Raises :class:`ClusterError` for those that the scheduler does not
    know."""
    if isinstance(workers, str) or not isinstance(workers, Iterable):
        raise MeshError(f"workers= takes a list of addresses, got {workers!r}")
    workers = list(workers)
    if missing := [str(w) for w in workers if w not in there]:
        raise ClusterError(
            f"the scheduler does not know worker(s) {', '.join(missing)}; it has {', '.join(sorted(there))}"
        )
    return list(dict.fromkeys(workers))


def workers_with(there: Mapping[str, Any], resources: Mapping[str, float]) -> list[str]:
    """Addresses of the workers that were started with these resources of Dask, of :func:`known_workers`. Raises
    :class:`ClusterError` where there are none."""
    has = {a: w.get("resources") or {} for a, w in sorted(there.items())}
    found = [a for a in has if all(has[a].get(k, 0) >= n for k, n in resources.items())]
    if not found and resources:
        raise ClusterError(f"no worker of the Dask cluster has the resources {dict(resources)}: start one that has")
    return found


def known_workers(client: Client) -> dict[str, Any]:
    """The scheduler's current information on each of its workers, by address.

    ``client.scheduler_info`` is no substitute: it returns the client's cached copy, which an update of the client
    itself may have replaced by one without workers. All workers would then count as lost.

    Raises
    ------
    ClusterError
        When the scheduler does not answer.
    """
    return on_loop(client, _there, client)


async def _there(client: Client) -> dict[str, Any]:
    """The same, on the client's event loop."""
    return (await scheduler_answer(client, "identity", n_workers=-1))["workers"]


def call_scheduler(client: Client, op: str, **kwargs: Any) -> Any:
    """The answer of one of the scheduler's handlers.

    Raises
    ------
    ClusterError
        Where it does not answer within ``meshtape.timeout`` seconds, or is gone.
    """
    return on_loop(client, scheduler_answer, client, op, **kwargs)


async def scheduler_answer(client: Client, op: str, **kwargs: Any) -> Any:
    """The same, on the client's event loop."""
    seconds = settings.number("timeout")
    for again in (True, False):
        try:
            return await asyncio.wait_for(getattr(client.scheduler, op)(**kwargs), seconds)
        except (OSError, TimeoutError) as e:
            # A connection that was kept may have been closed on the other side: the next one is new.
            if again and isinstance(e, OSError) and not isinstance(e, TimeoutError):
                continue
            why = str(e) or f"nothing was said in {seconds:.0f} s"
            check_running(client)
            raise ClusterError(f"the scheduler at {client.scheduler.address} does not answer: {why}") from None
        except TypeError as e:  # its handler takes other arguments
            raise WorkerMismatch(
                f"the scheduler at {client.scheduler.address} has a distributed (before 2025.4, say) or a meshtape "
                f"that does not know what this process asks for: use one version everywhere ({e})"
            ) from e
    raise AssertionError


def while_answering(client: Client, fn: Callable[..., Any], *args: Any) -> Any:
    """The result of a slow function of Dask's client, waited for as long as the scheduler answers. Raises
    :class:`ClusterError` where it does not."""

    async def wait() -> Any:
        task = asyncio.ensure_future(fn(*args))
        try:
            while not (await asyncio.wait([task], timeout=LOOK))[0]:
                await scheduler_answer(client, "identity", n_workers=0)
            return task.result()
        finally:
            task.cancel()

    return on_loop(client, wait)


def silent(client: Client, addresses: Sequence[str]) -> list[str]:
    """Workers that the scheduler still counts, but that do not answer within ``timeouts.silence``: stopped, or cut
    off."""

    async def ask_all() -> list[bool]:
        return list(await asyncio.gather(*(_answers(client, a) for a in addresses)))

    return [a for a, answered in zip(addresses, on_loop(client, ask_all), strict=True) if not answered]


async def _answers(client: Client, address: str) -> bool:
    call = client.scheduler.broadcast(msg={"op": "ping"}, workers=[address], on_error="return")
    try:
        found = await asyncio.wait_for(call, settings.number("timeouts.silence"))
    except (TimeoutError, OSError):
        return False
    return found.get(address) == b"pong"


async def while_present(client: Client, address: str, call: Coroutine[Any, Any, T]) -> T | None:
    """The result of a worker call; None where the worker leaves the cluster meanwhile, which its connections may be
    slow to show. Runs on the client's event loop."""
    answer = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait([answer], timeout=LOOK))[0]:
            if address not in await _there(client):
                return None
        return answer.result()
    finally:
        answer.cancel()


async def _while_alive(client: Client, address: str, call: Coroutine[Any, Any, T]) -> T | None:
    """The same for a worker that may also stop without leaving the cluster."""
    task = asyncio.ensure_future(while_present(client, address, call))
    try:
        asked_at = time.monotonic()
        while not (await asyncio.wait([task], timeout=LOOK))[0]:
            # Seldom: one that imports a large library for the first time cannot answer, either.
            if time.monotonic() - asked_at > 2 * settings.number("timeouts.silence"):
                if not await _answers(client, address) and not task.done():
                    return None
                asked_at = time.monotonic()
        return task.result()
    finally:
        task.cancel()


def give_plugin(client: Client, plugin: WorkerPlugin) -> Exception | None:
    """Have the scheduler give a plugin to its workers, later ones too. Returns the error, if one fails, even
    where that worker is not needed. Does not wait for workers that hang."""

    async def give() -> Exception | None:
        task = asyncio.ensure_future(client.register_plugin(plugin))
        patience = 2 * settings.number("timeouts.silence")
        try:
            while not (await asyncio.wait([task], timeout=patience))[0]:
                there = list(await _there(client))
                if not all(await asyncio.gather(*(_answers(client, a) for a in there))):
                    return None
            return task.exception()
        finally:
            task.cancel()

    return on_loop(client, give)


def ask(client: Client, function: Callable[..., Any], *args: Any, workers: Sequence[str]) -> dict[str, Any]:
    """The result of a function on each of some workers, or the exception that it raised there.

    Raises
    ------
    ClusterError
        Where a worker leaves the cluster meanwhile, or stops answering; where the scheduler is gone.
    """

    async def one(address: str) -> Any:
        call = client.run(function, *args, workers=[address], on_error="return")
        found = await _while_alive(client, address, call)
        answer = None if found is None else found.get(address)
        # An error of the connection, or one of the function that looks like it?
        if found is None or (isinstance(answer, OSError) and not await _answers(client, address)):
            return _GONE
        return answer

    async def ask_all() -> list[Any]:
        return list(await asyncio.gather(*map(one, workers)))

    try:
        found = dict(zip(workers, on_loop(client, ask_all), strict=True))
    except (OSError, TimeoutError) as e:  # of the scheduler, which hands the question on
        check_running(client)
        raise ClusterError(f"the scheduler at {client.scheduler.address} does not answer: {e}") from e
    if gone := [a for a, v in found.items() if v is _GONE]:
        raise ClusterError(f"worker(s) {', '.join(gone)} went away: they left the cluster, or no longer answer")
    return found


_GONE = object()
