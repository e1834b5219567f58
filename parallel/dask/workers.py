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


def while_answering(
    client: Client, fn: Callable[..., Any], *args: Any, look: Callable[[], Coroutine[Any, Any, object]] | None = None
) -> Any:
    """The result of a slow function of Dask's client, waited for as long as the scheduler answers, or as ``look``
    (of :class:`TaskWatch`) raises nothing. Raises :class:`ClusterError` where it does not."""

    async def wait() -> Any:
        task = asyncio.ensure_future(fn(*args))
        try:
            while not (await asyncio.wait([task], timeout=LOOK))[0]:
                await (look() if look is not None else scheduler_answer(client, "identity", n_workers=0))
            return task.result()
        finally:
            task.cancel()

    return on_loop(client, wait)


PAUSED = (
    "paused by Dask, as it uses too much of its memory_limit: Dask's tasks wait there until arrays are given up (del "
    "x), or the worker has a larger limit"
)


class TaskWatch:
    """Looks at tasks of Dask's that a call waits for, so that it ends where nobody gets on with them.

    Dask itself waits for ever where two workers do not reach each other (the scheduler sends the one to the other again
    and again) and where no worker may run a task. A worker whose clock jumped back keeps its messages until the time
    that it had noted. To the scheduler all of these are tasks under way.
    """

    def __init__(self, client: Client, what: str, keys: Sequence[Any]) -> None:
        self._client, self._what, self._keys = client, what, list(keys)
        self._waited, self._mark = 0.0, 0
        self._unfinished, self._gets_on, self._hurry = _looks()

    async def look(self) -> None:
        """Called every :data:`LOOK` seconds on the client's event loop. Raises :class:`ClusterError` where the
        scheduler does not answer, or nobody got on with the tasks for ``meshtape.timeout`` seconds."""
        await scheduler_answer(self._client, "identity", n_workers=0)
        self._waited += LOOK
        if self._waited < settings.number("timeout"):
            return
        self._waited = 0.0
        if await self._problem() is not None:
            await asyncio.sleep(LOOK)  # for news that was on its way, or was held back until now
            if (problem := await self._problem()) is not None:
                raise ClusterError(
                    f"{self._what}: nobody gets on with its tasks of Dask's: {problem}. Mend that, or take other "
                    "workers, and call it again"
                )

    async def _problem(self) -> str | None:
        """Why nobody gets on with the tasks; None where somebody does, or did since this was last asked."""
        before = self._mark
        self._hurry(self._client.scheduler_comm)
        ask = self._client._run_on_scheduler(self._unfinished, self._client.id, self._keys, before)
        try:
            self._mark, tasks = await asyncio.wait_for(ask, settings.number("timeout"))
        except Exception:  # the next look says why; or this Dask keeps other books, and its own limits count
            return None
        if self._mark != before:
            return None
        there: dict[str, list[Any]] = {}
        for address, *task in tasks:
            there.setdefault(address, []).append(task)
        nowhere = {why: key for key, why, _ in there.pop("", ())}  # each reason once
        problems = [f"{key} {why}" for why, key in nowhere.items()]
        seconds = settings.number("timeouts.silence")
        found = await asyncio.gather(*(_asked(self._client, self._gets_on, (t, seconds), a) for a, t in there.items()))
        for address, problem in zip(there, found, strict=True):
            if problem is None or isinstance(problem, Exception):
                return None
            problems.append(f"worker {address} {'does not answer' if problem is _GONE else problem}")
        return "; ".join(problems[:3]) or None


def _looks() -> tuple[Callable[..., Any], Callable[..., Any], Callable[[Any], None]]:
    """Functions for the scheduler, for workers and for all. They travel by value, as workers of others need no
    meshtape."""
    paused_text = PAUSED

    def hurry(stream: Any) -> None:
        """Have a stream of Dask's send what it holds back, if it does: its clock may have jumped."""
        if stream is not None:
            stream.next_deadline = None
            stream.waker.set()

    def unfinished(client: str, keys: Sequence[Any], before: int, dask_scheduler: Any) -> tuple[int, list[Any]]:
        """A mark of the tasks that are to be done next; and these (worker, task, state, workers with what it needs),
        where it is as ``before``."""
        hurry(dask_scheduler.client_comms.get(client))
        tasks = {k: dask_scheduler.tasks.get(k) for k in keys}
        stack, seen = [t for t in tasks.values() if t is not None], set()
        while stack:
            t = stack.pop()
            if t in seen:
                continue
            seen.add(t)
            if t.state == "waiting":
                stack.extend(t.waiting_on)
            elif t.state == "queued":  # behind whatever there is
                stack.extend(p for w in dask_scheduler.workers.values() for p in w.processing)
        unknown = [("", str(k), "is unknown to the scheduler", ()) for k, t in tasks.items() if t is None]
        undone = {t for t in seen if t.state not in ("waiting", "queued", "memory")}
        seen = undone if undone or unknown else seen  # or all are done, and on their way to the client
        mark = hash((len(unknown), frozenset((t.key, t.state, t.processing_on) for t in seen)))
        found: list[Any] = []
        for t in seen if mark == before else ():
            if t.state == "no-worker":
                limits = sorted(map(str, (*(t.worker_restrictions or ()), *(t.host_restrictions or ()))))
                limits += [f"{k}={v}" for k, v in (t.resource_restrictions or {}).items()]
                paused = [w.address for w in dask_scheduler.workers.values() if w.status.name == "paused"]
                why = "may run on no worker that is there" + (f", only on {', '.join(limits)}" if limits else "")
                why += f"; worker(s) {', '.join(paused)} are {paused_text}" if paused else ""
                found.append(("", str(t.key), why, ()))
            elif t.state not in ("processing", "memory"):
                found.append(("", str(t.key), f"is {t.state}", ()))
            else:
                on = t.processing_on or next(iter(t.who_has))
                hurry(dask_scheduler.stream_comms.get(on.address))
                owners = {w.address for d in t.dependencies for w in d.who_has or () if w is not on}
                found.append((on.address, t.key, t.state, sorted(owners)))
        return mark, found + unknown

    async def gets_on(tasks: Sequence[Any], seconds: float, dask_worker: Any) -> str | None:
        """Why this worker gets on with none of these tasks; None where it does with one."""
        import asyncio

        async def answers(address: str) -> bool:
            try:
                return await asyncio.wait_for(dask_worker.rpc(address).ping(), seconds) == b"pong"
            except (OSError, TimeoutError):
                return False

        hurry(dask_worker.batched_stream)
        paused, problem = dask_worker.status.name == "paused", ""
        for key, at_scheduler, owners in tasks:
            task = dask_worker.state.tasks.get(key)
            state = "forgotten" if task is None else task.state
            if state == at_scheduler == "memory" or state in ("executing", "long-running", "cancelled", "resumed"):
                return None
            if state not in ("ready", "constrained", "waiting"):
                problem = problem or f"and the scheduler do not hear of each other: {key} is {state} there"
            elif paused:
                problem = f"is {paused_text}"
            elif state != "waiting":
                return None
            else:
                coming = [d for d in task.waiting_for_data if d.state in ("fetch", "flight")]
                sources = {a for d in coming for a in ([d.coming_from] if d.coming_from else d.who_has)}
                if any(await asyncio.gather(*map(answers, sources))):
                    return None
                there = ", ".join(owners[:3]) or "no worker"
                problem = problem or f"gets nothing of what {key} needs from {there} (do they reach each other?)"
        return problem

    return unfinished, gets_on, hurry


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

    async def ask_all() -> list[Any]:
        return list(await asyncio.gather(*(_asked(client, function, args, a) for a in workers)))

    try:
        found = dict(zip(workers, on_loop(client, ask_all), strict=True))
    except (OSError, TimeoutError) as e:  # of the scheduler, which hands the question on
        check_running(client)
        raise ClusterError(f"the scheduler at {client.scheduler.address} does not answer: {e}") from e
    if gone := [a for a, v in found.items() if v is _GONE]:
        raise ClusterError(f"worker(s) {', '.join(gone)} went away: they left the cluster, or no longer answer")
    return found


_GONE = object()


async def _asked(client: Client, function: Callable[..., Any], args: Sequence[Any], address: str) -> Any:
    """The same of one worker, on the client's event loop; ``_GONE`` where it leaves or stops answering."""
    call = client.run(function, *args, workers=[address], on_error="return")
    found = await _while_alive(client, address, call)
    answer = None if found is None else found.get(address)
    # An error of the connection, or one of the function that looks like it?
    if found is None or (isinstance(answer, OSError) and not await _answers(client, address)):
        return _GONE
    return answer
