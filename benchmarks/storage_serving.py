"""Rows of ``storage.py``: checkpoints served over loopback, beside a bare ``sendfile`` of as many bytes and a local load
of the same arrays."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import timing
from storage_table import Bench, measured

from meshtape import storage

_RANGE = 16 << 20  # bytes of each of the consecutive ranges
_BARE = """
import os, socket, sys, threading
path = sys.argv[1]
listener = socket.create_server(("127.0.0.1", 0), backlog=64)
print(listener.getsockname()[1], flush=True)
def answer(s):
    with s, open(path, "rb") as f:
        while head := s.recv(65536):
            size = os.fstat(f.fileno()).st_size
            s.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n" % size)
            at = 0
            while at < size:
                at += os.sendfile(s.fileno(), f.fileno(), at, size - at)
while True:
    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()
"""
_OURS = """
import sys
from meshtape import storage
given = sys.argv[1].split("+")
server = storage.serve(given[0] if len(given) == 1 else storage.virtual.mean(given))
print(server.port, flush=True)
sys.stdin.read()
"""


class Client:
    """A client of HTTP that throws away the bodies: it costs no more than to receive them."""

    def __init__(self, port: int) -> None:
        self.port, self._buffer = port, bytearray(1 << 20)
        self._socket: socket.socket | None = None

    def get(self, path: str, part: tuple[int, int] | None = None) -> int:
        """Ask for a file, or the bytes of it from one place to another; returns the length of the body."""
        s = self._socket = self._socket or socket.create_connection(("127.0.0.1", self.port))
        asked = "" if part is None else f"Range: bytes={part[0]}-{part[1] - 1}\r\n"
        s.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{asked}\r\n".encode())
        got = b""
        while b"\r\n\r\n" not in got:
            more = s.recv(1 << 16)
            if not more:
                raise ConnectionError(f"no answer to {path}")
            got += more
        head, _, body = got.partition(b"\r\n\r\n")
        assert re.match(rb"HTTP/1.1 20[06]", head), head
        nbytes = int(re.search(rb"content-length: (\d+)", head.lower())[1])  # type: ignore[index]
        done = len(body)
        while done < nbytes:
            n = s.recv_into(self._buffer)
            if not n:
                raise ConnectionError(f"{path} ended at {done} of {nbytes}")
            done += n
        if b"connection: close" in head.lower():
            s.close()
            self._socket = None
        return nbytes


Server = tuple[int, Callable[[], float]]


@contextmanager
def server(program: str, argument: str) -> Iterator[Server]:
    """(the port of a server in a process of its own, a call for its processor time so far)."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", program, argument], stdin=pipe, stdout=pipe, text=True)
    clock = ~process.pid << 3 | 2  # Linux's clock of the processor time of a process
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline()), lambda: time.clock_gettime(clock)
    finally:
        process.terminate()
        process.wait()


def _requests(port: int, form: str) -> list[tuple[str, tuple[int, int] | None]]:
    """All requests by which a reader of a form gets its arrays."""
    if form == "bare":
        return [("/", None)]
    import urllib.request

    top = f"http://127.0.0.1:{port}/{form.partition(',')[0]}/"
    if form.startswith("safetensors"):
        index = json.load(urllib.request.urlopen(f"{top}model.safetensors.index.json"))["weight_map"]
        files = [f"/safetensors/{name}" for name in sorted(set(index.values()))]
        if form == "safetensors":
            return [(f, None) for f in files]
        out: list[tuple[str, tuple[int, int] | None]] = []
        for f in files:
            asked = urllib.request.Request(f"http://127.0.0.1:{port}{f}", method="HEAD")
            n = int(urllib.request.urlopen(asked).headers["Content-Length"])
            out += [(f, (a, min(a + _RANGE, n))) for a in range(0, n, _RANGE)]
        return out
    nodes = json.load(urllib.request.urlopen(f"{top}zarr.json"))["consolidated_metadata"]["metadata"]
    found: list[tuple[str, tuple[int, int] | None]] = []
    for name, node in nodes.items():
        if node["node_type"] != "array":
            continue
        chunk = node["chunk_grid"]["configuration"]["chunk_shape"]
        between = node["chunk_key_encoding"]["configuration"]["separator"]
        counts = [-(-n // c) for n, c in zip(node["shape"], chunk, strict=True)]
        keys = (between.join(["c", *map(str, coord)]) for coord in np.ndindex(*counts))
        found += [(quote(f"/zarr/{name}/{key}"), None) for key in keys]
    return found


def fetch(port: int, requests: Sequence[tuple[str, tuple[int, int] | None]], connections: int) -> int:
    """Carry out the requests, dealt to some connections; returns the bytes."""
    if len(requests) < connections:  # each connection asks for everything
        dealt = [list(requests)] * connections
    else:
        dealt = [list(requests[i::connections]) for i in range(connections)]

    def one(mine: list[tuple[str, tuple[int, int] | None]]) -> int:
        client = Client(port)
        return sum(client.get(*each) for each in mine)

    with ThreadPoolExecutor(connections) as pool:
        return sum(pool.map(one, dealt))


class Run(NamedTuple):
    """The best of some rounds: bytes a second, and processor seconds of the server for each GB."""

    rate: float
    cost: float


def speeds(servers: dict[str, Server], forms: dict[str, str], rounds: int, connections: int) -> dict[str, Run]:
    """Each server in turns."""
    asked = {name: _requests(port, forms[name]) for name, (port, _) in servers.items()}
    best = {name: Run(0.0, float("inf")) for name in servers}
    for _ in range(rounds):
        for name, (port, spent) in servers.items():
            start, worked = time.perf_counter(), spent()
            nbytes = fetch(port, asked[name], connections)
            rate, cost = nbytes / (time.perf_counter() - start), (spent() - worked) / nbytes * 1e9
            best[name] = Run(max(best[name].rate, rate), min(best[name].cost, cost))
    return best


def _dcp(place: Path, tree: dict[str, np.ndarray]) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({n: torch.from_numpy(a) for n, a in tree.items()}, checkpoint_id=place, no_dist=True)


def _orbax(place: Path, tree: dict[str, np.ndarray]) -> None:
    import orbax.checkpoint as ocp

    ocp.PyTreeCheckpointer().save(place, tree)


def parents(home: Path) -> Iterator[tuple[str, str]]:
    """(kind, path) of checkpoints of the same values; two paths joined by ``+`` are those of a mean."""
    block = np.random.default_rng(0).standard_normal((2048, 2048), np.float32)
    tree = {f"layers.{i}.weight": np.roll(block, i, 0) for i in range(16)}
    rows = {n: a.reshape(-1, 256) for n, a in tree.items()}  # narrow matrices: their chunks are rows
    made: dict[str, Callable[[Path], object]] = {
        "safetensors": lambda p: storage.save_safetensors(p, tree),
        "ours, tiles": lambda p: storage.save(p, tree),
        "ours, rows": lambda p: storage.save(p, rows),
        "ours, dual": lambda p: storage.save(p, tree, layout="dual"),
        "ours, zstd": lambda p: storage.save(p, tree, compression="zstd"),
        "ours, weights": lambda p: storage.save(p, tree, compression="weights"),
        "ours, packs": lambda p: storage.save(
            p, {f"{n}.{i}": b for n, a in tree.items() for i, b in enumerate(a.reshape(-1, 16 << 10))}
        ),
    }
    if timing.peer("torch") is not None:
        made["DCP"] = lambda p: _dcp(p, tree)
    if timing.peer("orbax.checkpoint") is not None:
        made["Orbax, OCDBT"] = lambda p: _orbax(p, tree)
    for name, make in made.items():
        place = home / "serving" / name.replace(", ", "-")
        file = place / "a.safetensors" if name == "safetensors" else place
        if not place.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            make(file)
        yield name, str(file)
    yield "mean of two", "+".join([str(home / "serving" / "ours-tiles")] * 2)


def serving(bench: Bench, home: Path, tree: dict[str, np.ndarray]) -> None:
    """Each kind of checkpoint in each form, by one and by two connections, beside a bare ``sendfile`` of a file as long
    as the arrays and a load of the checkpoint in this process."""
    bare = ""
    for kind, path in parents(home):
        bare = bare or path
        given = path.split("+")

        def load(given: list[str] = given) -> Any:
            return storage.load(given[0] if len(given) == 1 else storage.virtual.mean(given))

        local = min((measured(load)[0] for _ in range(bench.rounds)), key=lambda spent: spent.seconds)
        gb = sum(a.nbytes for a in load().values()) / 1e9
        bench.note(f"{kind}, loaded", f"{gb / local.seconds:.2f} GB/s, {local.work / gb:.2f} s/GB")
        with server(_BARE, bare) as plain, server(_OURS, path) as ours:
            for form in ("safetensors", "safetensors, ranges", "zarr"):
                for n in (1, 2):
                    found = speeds({"bare": plain, "ours": ours}, {"bare": "bare", "ours": form}, bench.rounds, n)
                    rate, cost = found["ours"]
                    shares = f"{rate / found['bare'].rate:.0%} of bare, {rate / 1e9 * local.seconds / gb:.0%} of local"
                    bench.note(f"{kind} as {form}, {n} at a time", f"{rate / 1e9:.2f} GB/s, {cost:.2f} s/GB, {shares}")
        bench.note("bare sendfile meanwhile", f"{found['bare'].rate / 1e9:.2f} GB/s, {found['bare'].cost:.2f} s/GB")
