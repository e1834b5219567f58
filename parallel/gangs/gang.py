"""Gangs: functions run in processes of a Dask cluster that wait for each other, as collectives of PyTorch or JAX do.

Dask starts tasks one by one as slots become free, and restarts lost ones; processes that wait for each other would wait
for ever. A gang starts on all of its workers or on none, has them to itself until it ends (:mod:`.lease`), and ends
everywhere when one rank fails (https://github.com/dask/distributed/issues/8624,
https://github.com/dmlc/xgboost/issues/9420). Each rank is a process of its own, which can be ended whatever it does,
with the environment that ``torchrun`` would give it.
"""

from __future__ import annotations

import contextlib
import io
import operator
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import cloudpickle
import numpy as np
from distributed import Client
from distributed.protocol.pickle import loads

from ...arrays.core.array import Array
from ...arrays.core.errors import (
    ArgumentError,
    ClusterError,
    MeshError,
    MeshtapeError,
    RankLost,
    StorageFull,
    StoreError,
    check_function,
)
from ...storage.stores.atomic_directory import writing
from ...storage.stores.owners import Hold
from ..base.device_memory import on_host
from ..base.message_streams import read_error
from ..dask.lease import lease_of
from ..dask.set_up import set_up
from ..dask.streams import WorkerFuture, WorkerStreams
from ..dask.worker import ProcessContext, blocks_of
from ..dask.worker_queue import STOOD_STILL
from ..dask.workers import check_client, check_known, check_running, known_workers, workers_with
from ..transports.rendezvous import interface_of
from . import rank_process

_LOG = 1 << 20  # bytes of a rank's output that are brought, the last ones
_SHOWN = 12  # lines of it in an error
_LOOK = 0.05  # seconds between two looks at whether a rank has ended
_SHARED = "/dev/shm"
_FOLDER = "meshtape-gang-"
_CHILD = f"""
import sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location({rank_process.__name__!r}, {rank_process.__file__!r})
module = sys.modules[spec.name] = module_from_spec(spec)
spec.loader.exec_module(module)
module.start()
"""


class _Pickler(cloudpickle.Pickler):
    """A pickler that replaces each split array by the rank's block."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.arrays: list[Array] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Array) and obj.sharding is not None:
            self.arrays.append(obj)
            return rank_process.block, (len(self.arrays) - 1,)
        return super().reducer_override(obj)


class _RankEnd(NamedTuple):
    """The end of a rank: its pickled answer (:func:`.rank_process.main`) or None, its exit status and its output."""

    answer: bytes | None
    status: int
    log: str


def gang(
    client: Client,
    fn: Callable[..., Any],
    *args: Any,
    ranks: int | None = None,
    workers: Sequence[str] | None = None,
    resources: Mapping[str, float] | None = None,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> GangRun:
    """Call a function in several processes at once, which may wait for each other.

    Parameters
    ----------
    client
        Of a Dask cluster; workers need meshtape.
    fn
        Called in each process as ``fn(*args, **kwargs)``. It and all arguments are pickled, but for arrays that are
        split over a mesh of this client, wherever they lie in them: each rank gets its block, an :class:`Array` that
        hands over its memory by DLPack (``torch.from_dlpack``).
    ranks
        How many processes; one a worker where it is not given. The ranks of a worker are consecutive. With split arrays
        it is the size of their mesh.
    workers
        Addresses of the workers to use; all by default.
    resources
        Only workers that were started with these resources of Dask are used.
    env
        Variables of the environment, beside ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``,
        ``MASTER_ADDR`` and ``MASTER_PORT`` (a free port of the first rank's host).

    Returns
    -------
    GangRun
        At once; :meth:`GangRun.result` waits.

    Raises
    ------
    ClusterError
        Where no worker has the resources, one is unknown, or cannot be reached; the client is closed.
    WorkerMismatch
        Where a worker or the scheduler has no meshtape, or another version.
    MeshError
        For ``ranks`` below 1, or another number than the ranks of split arrays; arrays of several meshes, or of another
        client.
    NotAFunction, ArgumentError
        For ``fn`` that cannot be called; a call that cannot be pickled; ``env`` that is no environment; ``resources``
        that are no numbers.

    Examples
    --------
    >>> import os
    >>> from distributed import Client
    >>> import meshtape as mt
    >>> with Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:  # doctest: +SKIP
    ...     mt.gang(client, lambda: os.environ["RANK"], ranks=4).result()
    ['0', '1', '2', '3']
    """
    check_client("mt.gang", client)
    check_function("gang", fn)
    _check_options(env, resources)
    if ranks is not None and (not isinstance(ranks, SupportsIndex) or operator.index(ranks) < 1):
        raise MeshError(f"ranks= is a whole number of at least 1, got ranks={ranks!r}")
    given, arrays = _pickled(fn, args, kwargs)
    if arrays:
        addresses, homes, size = _of_arrays(client, arrays, workers)
        if ranks is not None and ranks != size:
            raise MeshError(f"ranks={ranks}, but the mesh of the arrays has {size}: leave it out")
    else:
        addresses = _chosen(client, workers, resources)
        size = len(addresses) if ranks is None else operator.index(ranks)
        addresses = addresses[: min(len(addresses), size)]
        homes = tuple(r * len(addresses) // size for r in range(size))
    streams = set_up(client, addresses)
    return GangRun(client, streams, addresses, homes, given, arrays, dict(env or {}), getattr(fn, "__name__", "gang"))


def _check_options(env: Any, resources: Any) -> None:
    for name, given, of, fits in (
        ("env", env, "texts, without '=' in names and zero bytes in either", _is_variable),
        ("resources", resources, "numbers", lambda name, n: isinstance(n, int | float)),
    ):
        if given is not None and not isinstance(given, Mapping):
            raise ArgumentError(f"[gang] {name}= maps names to {of}, got {given!r}")
        for item in (given or {}).items():
            if not fits(*item):
                raise ArgumentError(f"[gang] {name}= maps names to {of}, got {item[0]!r}: {item[1]!r}")


def _is_variable(name: Any, text: Any) -> bool:
    return all(isinstance(x, str) and "\0" not in x for x in (name, text)) and name != "" and "=" not in name


def _pickled(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bytes, list[Array]]:
    """A pickled call, and the split arrays whose blocks its ranks get."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump((fn, args, kwargs))
    except MeshtapeError:
        raise
    except Exception as e:
        raise ArgumentError(
            f"[gang] the function and its arguments go to other processes, and something in them cannot be pickled: "
            f"{type(e).__name__}: {e}. Make it in the function"
        ) from e
    return file.getvalue(), pickler.arrays


def _of_arrays(
    client: Client, arrays: Sequence[Array], workers: Sequence[str] | None
) -> tuple[list[str], tuple[int, ...], int]:
    meshes = {id(a.sharding.mesh): a.sharding.mesh for a in arrays}  # type: ignore[union-attr]
    (mesh, *others) = meshes.values()
    runtime: Any = mesh.runtime
    if others or getattr(runtime, "client", None) is not client:
        raise MeshError("the split arrays of a gang are of one mesh of its client: mt.reshard brings them there")
    if workers is not None:
        raise MeshError("the workers of a gang are those of its split arrays: leave workers= out")
    return list(runtime.addresses), tuple(runtime.homes), mesh.size


def _chosen(client: Client, workers: Sequence[str] | None, resources: Mapping[str, float] | None) -> list[str]:
    there = known_workers(client)
    named = None if workers is None else check_known(workers, there)
    found = workers_with({a: w for a, w in there.items() if named is None or a in named}, resources or {})
    if not found:
        raise ClusterError("the Dask cluster has no workers: start some")
    return found if named is None else [a for a in named if a in found]


class _RanksFailed(Exception):
    """Some ranks of a worker failed. Its argument says how each rank ended."""

    def __str__(self) -> str:  # Dask cuts off errors whose text is long
        return "ranks failed"


class GangRun:
    """A gang that was started. Dropping it does not end it; :meth:`cancel` does, and so does the end of its client."""

    def __init__(
        self,
        client: Client,
        streams: WorkerStreams,
        addresses: Sequence[str],
        homes: Sequence[int],
        given: bytes,
        arrays: Sequence[Array],
        env: Mapping[str, str],
        name: str,
    ) -> None:
        self.client, self.name, self.ranks = client, name, len(homes)
        self._streams, self._addresses, self._homes = streams, addresses, homes
        self._ended: dict[int, _RankEnd] = {}
        self._error: BaseException | None = None
        self._cancelled, self._over = threading.Event(), threading.Event()
        self._futures: dict[str, WorkerFuture] = {}
        self._thread = threading.Thread(
            target=self._run, args=(given, arrays, env), name="meshtape-gang-run", daemon=True
        )
        self._thread.start()

    def __repr__(self) -> str:
        ended = "cancelled" if self._cancelled.is_set() else "failed" if self._error else "done"
        state = ended if self.done() else "running"
        return f"<GangRun {self.name}: {self.ranks} rank(s) on {len(self._addresses)} worker(s), {state}>"

    def done(self) -> bool:
        """Whether every rank has ended."""
        return self._over.is_set()

    def result(self, timeout: float | None = None) -> list[Any]:
        """The results of all ranks, in their order.

        Raises
        ------
        RankLost
            Where a rank failed, with its error as the cause (None where this process cannot read it) and the end of its
            output; where it was killed, or its worker is lost; where this process cannot read its result.
        StorageFull, StoreError
            Where the blocks for the ranks of a worker could not be written there.
        TimeoutError
            When the gang has not ended within ``timeout`` seconds; it goes on.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"{self} has not ended within {timeout} s")
        if self._error is not None:
            raise self._error
        return [self._value(r) for r in range(self.ranks)]

    def _value(self, rank: int) -> Any:
        try:
            return loads(self._ended[rank].answer)[1]  # type: ignore[arg-type]
        except Exception as e:
            text = f"[{self.name}] what rank {rank} gave cannot be read in this process: {type(e).__name__}: {e}"
            raise RankLost(f"{text}. Return arrays, numbers, texts, or what this process can import") from e

    def logs(self, rank: int | None = None) -> Any:
        """The standard output and error of a rank, at most the last MiB; without ``rank`` those of all ranks, by rank.
        Empty until they have ended. Raises :class:`MeshError` for a rank that the gang does not have."""
        texts = {r: e.log for r, e in sorted(self._ended.items())}
        if rank is not None and rank not in range(self.ranks):
            raise MeshError(f"the gang has ranks 0 to {self.ranks - 1}, got {rank!r}")
        return texts if rank is None else texts.get(rank, "")

    def cancel(self) -> None:
        """End all ranks."""
        self._cancelled.set()
        self._stop()

    # ----- in a thread ------------------------------------------------------------------------------------------------

    def _run(self, given: bytes, arrays: Sequence[Array], env: Mapping[str, str]) -> None:
        lease = lease_of(self.client)
        try:
            mesh = arrays[0].sharding.mesh if arrays else None  # type: ignore[union-attr]
            handles = [a._buf.handle for a in mesh.settle(arrays)] if mesh is not None else []
            lease.enter(self, self._addresses, lambda: None)
            try:
                self._start(given, handles, None if mesh is None else mesh.runtime, env)
                self._wait()
                self._collect()
            finally:
                lease.leave(self)
        except BaseException as e:
            self._error = self._error or e
        finally:
            self._futures.clear()
            self._over.set()

    def _start(self, given: bytes, handles: Sequence[Any], runtime: Any, env: Mapping[str, str]) -> None:
        first = self._addresses[0]
        ((host, port),) = self._streams.results(self._streams.call(_free_port, "gang", {first: (first,)}).values())
        world = {**env, "WORLD_SIZE": str(self.ranks), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
        args = {
            a: (
                given,
                [(r, i) for i, r in enumerate(self._of(p))],
                world,
                *(runtime.reads(handles, p, self._of(p)) if handles else [[]]),
            )
            for p, a in enumerate(self._addresses)
        }
        self._futures = self._streams.call(_run_ranks, self.name, args, stoppable=True)

    def _wait(self) -> None:
        """Wait until all ranks have ended. If one fails, or the gang is cancelled, end the rest."""
        ended = threading.Event()
        for f in self._futures.values():
            f.add_done_callback(lambda _: ended.set())
        if self._cancelled.is_set():
            self._stop()
        while not all(f.done() for f in self._futures.values()):
            ended.wait(1.0)
            ended.clear()
            if any(f.failed for f in self._futures.values()):
                self._stop()
            check_running(self.client)

    def _of(self, process: int) -> list[int]:
        return [r for r, p in enumerate(self._homes) if p == process]

    def _stop(self) -> None:
        with self._streams.order:
            for address, future in list(self._futures.items()):
                if not future.done():
                    future.stream.send({"op": "cancel", "numbers": (future.number,)})
                    self._streams.flush([address])

    def _collect(self) -> None:
        """Collect the answers of all ranks, or the first error."""
        lost: list[str] = []
        for p, address in enumerate(self._addresses):
            future = self._futures[address]
            names = f"rank{'s' if len(self._of(p)) > 1 else ''} {', '.join(map(str, self._of(p)))} (worker {address})"
            if future.state == "lost":
                lost.append(f"{names} left the cluster: {future.error}")
                continue
            try:
                (found,) = self._streams.results([future])
            except _RanksFailed as e:
                (found,) = e.args
            except (StorageFull, StoreError) as e:
                raise type(e)(f"[{self.name}] {names}: {e}") from e
            except Exception as e:
                lost.append(f"{names}: {type(e).__name__}: {e}")
                continue
            self._ended.update(found)
        failed = {r: e for r, e in self._ended.items() if e.answer is None or e.status}
        raised = {r: loads(e.answer)[1:] for r, e in failed.items() if e.answer is not None}
        if self._cancelled.is_set():
            raise RankLost(f"[{self.name}] the gang was cancelled")
        # A rank that was ended because of another says nothing; one that raised says more than one that was killed.
        killed = {r: e for r, e in failed.items() if r not in raised and e.status != _STOPPED}
        if lost or killed:
            text = "; ".join(
                [*lost, *(f"rank {r} ended with status {e.status} and no result" for r, e in killed.items())]
            )
            raise RankLost(f"[{self.name}] {text}{self._tail(next(iter(killed), None))}")
        if raised:
            rank, (text, error) = next(iter(raised.items()))
            raise RankLost(f"[{self.name}] rank {rank} failed: {text}{self._tail(rank)}") from read_error(error)
        if failed:
            raise RankLost(f"[{self.name}] ranks {', '.join(map(str, failed))} were ended: {STOOD_STILL}")

    def _tail(self, rank: int | None) -> str:
        lines = self._ended[rank].log.rstrip().splitlines()[-_SHOWN:] if rank in self._ended else []
        return "".join(f"\n  rank {rank} | {line}" for line in lines)


# ----- on the workers -------------------------------------------------------------------------------------------------

_STOPPED = -1000
"""Status of a rank that was ended because of another."""


def _free_port(_: ProcessContext | None, address: str) -> tuple[str, int]:
    host = interface_of(address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
        s.bind((host, 0))
        return host, s.getsockname()[1]


def _run_ranks(
    _: ProcessContext | None,
    given: bytes,
    ranks: Sequence[tuple[int, int]],
    world: Mapping[str, str],
    slots: Sequence[tuple[int, Any]],
    *bundles: Any,
    stop: threading.Event,
) -> dict[int, _RankEnd]:
    """Start the ranks of a worker, given as (rank, local rank), and wait for them. If one fails, end the others."""
    children: dict[int, subprocess.Popen[bytes]] = {}
    stopped: set[int] = set()
    root = Path(_SHARED if os.access(_SHARED, os.W_OK) else tempfile.gettempdir())
    with writing(f"{root}/{_FOLDER}"):
        held = _new_folder(root)
    folder = Path(held.path)
    try:
        with writing(str(folder)):
            (folder / "call").write_bytes(given)
            blocks = blocks_of(slots, bundles)
            for rank, _local in ranks:
                mine = folder / str(rank)
                mine.mkdir()
                left = [_leave(mine / f"block{i}", np.asarray(on_host(b[rank]))) for i, b in enumerate(blocks)]
                (mine / "blocks").write_bytes(cloudpickle.dumps(left))
        for rank, local in ranks:
            place = {"RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(len(ranks))}
            with (folder / str(rank) / "log").open("wb") as log:
                children[rank] = subprocess.Popen(
                    [sys.executable, "-c", _CHILD, str(folder / str(rank))],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **world, **place},
                    start_new_session=True,
                )
        running, failed = set(children), False
        while running:
            if stop.wait(_LOOK) or failed:
                # (One that has ended by now was not ended by this, and may be the cause.)
                stopped = {r for r in running if children[r].poll() is None}
                break
            over = {r: children[r] for r in running if children[r].poll() is not None}
            _end(list(over.values()))  # at once: their numbers are free for others
            running -= over.keys()
            # One that ended by itself (`sys.exit(0)`) leaves no answer, and the others would wait for it.
            failed = any(c.returncode or not (folder / str(r) / "answer").exists() for r, c in over.items())
        _end([children[r] for r in running])
        ended = {r: _ending(folder / str(r), c, r in stopped) for r, c in children.items()}
        if any(e.status or e.answer is None for e in ended.values()):
            raise _RanksFailed(ended)
        return ended
    finally:
        _end([c for c in children.values() if c.returncode is None])
        shutil.rmtree(folder, ignore_errors=True)
        held.release()


def _leave(path: Path, block: np.ndarray) -> tuple[str, tuple[int, ...], np.dtype]:
    path.write_bytes(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
    return str(path), block.shape, block.dtype


def _new_folder(root: Path) -> Hold:
    """A new folder of this process. Folders of killed processes are removed."""
    for path in root.glob(f"{_FOLDER}*"):
        left = Hold(str(path)).lock()
        if left.locked and left.is_there():
            shutil.rmtree(path, ignore_errors=True)
        left.release()
    while True:
        held = Hold(tempfile.mkdtemp(prefix=_FOLDER, dir=root)).lock()
        if held.is_there():  # another one was not faster
            return held
        held.release()


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for c in children:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: of a group of processes that have ended
            os.killpg(c.pid, signal.SIGKILL)
        c.wait()


def _ending(folder: Path, child: subprocess.Popen[bytes], stopped: bool) -> _RankEnd:
    if child.stdin is not None:
        child.stdin.close()
    answer = folder / "answer"
    with (folder / "log").open("rb") as log:
        log.seek(max(0, (folder / "log").stat().st_size - _LOG))
        text = log.read().decode(errors="replace")
    status = _STOPPED if stopped else child.returncode
    return _RankEnd(answer.read_bytes() if answer.exists() and not stopped else None, status, text)
