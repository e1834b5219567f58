"""PyTorch's gloo on processes of its own, two by default, driven from a benchmark: ``with Gloo() as g:
g.run("all_reduce", 64 << 20, 10)``."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Iterator


class Gloo:
    """Ranks that wait for orders on their standard input."""

    def __init__(self, ranks: int = 2) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), str(ranks), port],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
            for rank in range(ranks)
        ]
        self._ends()

    def run(self, what: str, nbytes: int, times: int) -> None:
        """Do a collective so many times on ``nbytes`` a rank."""
        for p in self._ranks:
            assert p.stdin is not None
            p.stdin.write(f"{what} {nbytes} {times}\n")
            p.stdin.flush()
        self._ends()

    def _ends(self) -> None:
        for p in self._ranks:
            assert p.stdout is not None
            if p.stdout.readline() != "done\n":
                raise RuntimeError("a gloo process ended")

    def close(self) -> None:
        for p in self._ranks:
            p.kill()
            p.wait()


@contextlib.contextmanager
def gloo(ranks: int = 2) -> Iterator[Gloo | None]:
    """The ranks; None where PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        yield None
        return
    g = Gloo(ranks)
    try:
        yield g
    finally:
        g.close()


def _serve(rank: int, ranks: int, port: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    held: dict[int, list[torch.Tensor]] = {}
    print("done", flush=True)
    for line in sys.stdin:
        what, size, times = line.split()
        n = max(1, int(size) // 4)
        if n not in held:
            held.clear()
            held[n] = [torch.ones(n), *(torch.empty(n) for _ in range(ranks))]
        x, y, *more = held[n]
        for _ in range(int(times)):
            if what == "all_reduce":
                dist.all_reduce(x)
            elif what == "all_to_all":
                dist.all_to_all_single(y, x)
            elif what == "all_gather":
                dist.all_gather([y, *more], x)
            else:
                dist.barrier()
        print("done", flush=True)


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
