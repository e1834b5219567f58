"""Programs on two Dask workers against dask.array on the same two and PyTorch's gloo on two processes:
``python benchmarks/parallel.py``.

Our collectives are timed as users run them, in turns of ``mt.scan``, gangs and all; gloo's inside its processes.
"""

from __future__ import annotations

import timing  # first: it sets the number of threads

# isort: split
import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from gloo import Gloo, gloo

import meshtape as mt
from meshtape.parallel.dask.cluster import local_cluster
from meshtape.parallel.execution.executor import Prepared
from meshtape.parallel.partition.partition import partition


def chain(x: Any) -> Any:
    for _ in range(50):
        x = x * 1.0001
        x = x + 0.5
    return x


def small_step(report: timing.Report, client: Any, mesh: mt.Mesh) -> None:
    """100 elementwise ops on 1024 numbers a rank and one all-reduce: what is measured is everything but arithmetic."""
    import dask.array as da

    host = np.ones(2048)
    step = mt.compile(lambda x: mt.sum(chain(x)))
    x = mt.compute(mt.distribute(host, mesh, ranks=mt.Shard(0)))
    dx = client.persist(da.from_array(host, chunks=1024))

    def theirs() -> Any:
        return chain(dx).sum().compute(scheduler=client)

    def turn(x: Any, _: Any) -> Any:
        y = chain(x)
        return y, mt.sum(y)

    turns = 192

    def many() -> float:
        for _ in range(20):
            y = step(x)
        return float(y)

    found = timing.timed(
        {
            "loop": lambda: np.asarray(mt.scan(turn, x, length=turns)[1]),
            "one": lambda: float(step(x)),
            "row": many,
            "dask.array": theirs,
        },
        rounds=5,
    )
    dask, goal = {"dask.array": found["dask.array"]}, {"dask.array": 0.05}
    report.add("100 small ops + all-reduce, a turn of a loop", found["loop"] / turns, dask, goal)
    report.add("the same, one gang a step, 20 in a row", found["row"] / 20, dask, goal)
    report.add("the same, one gang a step, waited for each", found["one"], dask, {"dask.array": None})


def collectives(report: timing.Report, mesh: mt.Mesh, g: Gloo | None, megabytes: int) -> None:
    """The field's collectives on blocks of ``megabytes`` a rank, and the smallest."""
    size = megabytes << 20
    n = int((2 * size / 4) ** 0.5) // 2 * 2
    rng = np.random.default_rng(0)
    square = mt.compute(mt.distribute(rng.random((n, n), np.float32), mesh, ranks=mt.Shard(0)) + 0.0)
    flat = mt.compute(mt.distribute(rng.random(2 * size // 4, np.float32), mesh, ranks=mt.Shard(0)) + 0.0)
    tiny = mt.compute(mt.distribute(np.ones(2), mesh, ranks=mt.Shard(0)) + 0.0)
    start = mt.distribute(np.zeros((), np.float32), mesh)
    reduce = mt.shard_map(
        lambda b: mt.all_reduce(b, "ranks"), mesh, in_placements={"ranks": mt.Shard(0)}, out_placements={}
    )

    def turn(collective: Callable[[], Any]) -> Any:
        def run(s: Any, _: Any) -> Any:
            y = collective()
            return s + mt.astype(mt.sum(y[:1]), mt.float32), None

        return run

    def theirs(what: str, nbytes: int, times: int) -> Any:
        return None if g is None else lambda: g.run(what, nbytes, times)

    for name, collective, goal in (
        ("all_reduce", lambda: reduce(flat), 1 / 1.5),
        ("all_to_all", lambda: mt.reshard(square, ranks=mt.Shard(1)), 1 / 1.5),
        ("all_gather", lambda: mt.reshard(flat, ranks=mt.Replicate()), 1 / 1.5),
    ):
        run = turn(collective)
        report.row(
            f"{name} of {megabytes} MB a rank",
            lambda run=run: mt.compute(mt.scan(run, start, length=10)[0]),
            {"gloo": (theirs(name, size, 10), goal)},
            rounds=5,
            seconds=0.1,
            scale=1 / 10,
        )
    split = {"ranks": mt.Shard(0)}
    small = mt.shard_map(lambda b: mt.all_reduce(b, "ranks"), mesh, in_placements=split, out_placements=split)
    report.row(
        "all_reduce of 8 bytes",
        lambda: mt.compute(mt.scan(lambda s, _: (small(s), None), tiny, length=512)[0]),
        {"gloo, barrier": (theirs("barrier", 8, 512), 0.5), "gloo, all_reduce": (theirs("all_reduce", 8, 512), None)},
        rounds=5,
        seconds=0.1,
        scale=1 / 512,
        unit="us",
    )


def sharing(report: timing.Report, client: Any, mesh: mt.Mesh) -> None:
    """Two clients on the same workers: what it costs that a lease goes from one to the other with every gang, and how
    fair it is."""
    import threading

    from distributed import Client

    host = np.ones(2048)
    with (
        Client(client.scheduler.address, set_as_default=False) as second,
        mt.Mesh({"ranks": 2}, client=second) as theirs,
    ):
        steps = []
        for m in (mesh, theirs):
            x = mt.compute(mt.distribute(host, m, ranks=mt.Shard(0)) + 0.0)
            step = mt.compile(lambda x: mt.sum(x * 2))
            steps.append(lambda step=step, x=x: float(step(x)))
        report.row(
            "two gangs, of two clients in turns",
            lambda: [step() for step in steps],
            {"of one client": (lambda: [steps[0](), steps[0]()], None)},
            rounds=5,
        )

        def both(times: int = 20) -> list[float]:
            ends = [0.0, 0.0]

            def work(i: int) -> None:
                start = time.monotonic()
                for _ in range(times):
                    steps[i]()
                ends[i] = time.monotonic() - start

            threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            return ends

        report.row("20 gangs of each of two clients at once, a gang", both, {}, rounds=3, scale=1 / 40)
        ends = both()
        print(f"two clients at once: one ends after {min(ends) / max(ends):.2f} of the time of the other")


def in_one_task(fn: Callable[..., None], *args: Any) -> None:
    """With as many turns of a loop in one task as it has: what a gang costs is another row's subject."""
    import dask

    with dask.config.set({"meshtape.loop": 1024}):
        fn(*args)


def rechunk(report: timing.Report, client: Any, mesh: mt.Mesh, megabytes: int) -> None:
    """Row blocks to column blocks."""
    import dask
    import dask.array as da

    n = int((megabytes * 1e6 / 4) ** 0.5)
    host = np.random.default_rng(0).standard_normal((n, n)).astype(np.float32)
    x = mt.compute(mt.distribute(host, mesh, ranks=mt.Shard(0)) + 0.0)
    turn = mt.compile(lambda x: mt.reshard(x, ranks=mt.Shard(1)))
    dx = client.persist(da.from_array(host, chunks=(-(-n // 2), n)))
    counter = itertools.count()

    def theirs(method: str) -> Callable[[], None]:
        def run() -> None:
            with dask.config.set({"array.rechunk.method": method, "distributed.p2p.storage.disk": False}):
                # Under new names each time: dask would otherwise find the result of the last round.
                fresh = dx.map_blocks(_same, name=f"fresh-{next(counter)}", dtype=dx.dtype)
                out = client.persist(fresh.rechunk((n, -(-n // 2))))
                wait(client, out)

        return run

    report.row(
        f"rows to columns, {megabytes} MB",
        lambda: mt.compute(turn(x)),
        {"dask.array tasks": (theirs("tasks"), 0.5), "dask.array p2p": (theirs("p2p"), 0.5)},
        rounds=3,
        seconds=0.1,
    )


def _same(block: Any) -> Any:
    return block


def wait(client: Any, collection: Any) -> None:
    """Until the chunks of a dask collection are there; none is fetched."""
    from distributed import futures_of
    from distributed import wait as wait_for

    with client.as_current():
        wait_for(futures_of(collection))


def product(report: timing.Report, mesh: mt.Mesh, n: int) -> None:
    """Rows times columns, on two processes of one thread, against one process of two."""
    import threadpoolctl

    rng = np.random.default_rng(0)
    a, b = rng.random((n, n), np.float32), rng.random((n, n), np.float32)
    x = mt.compute(mt.distribute(a, mesh, ranks=mt.Shard(0)) + 0.0)
    y = mt.compute(mt.distribute(b, mesh, ranks=mt.Shard(1)) + 0.0)
    multiply = mt.compile(lambda x, y: x @ y)

    def one_process() -> None:
        with threadpoolctl.threadpool_limits(2):
            a @ b

    report.row(
        f"{n}² product, rows x columns",
        lambda: mt.compute(multiply(x, y)),
        {"NumPy, one process": (one_process, 1 / 0.85)},
        rounds=5,
        seconds=0.1,
    )


def partitioning(report: timing.Report, mesh: mt.Mesh) -> None:
    """The client's own work: a program of 1,000 entries for 64 ranks, and a call of one that is ready."""
    wide = mt.Mesh({"data": 16, "model": 4})
    x = mt.distribute(np.ones((64, 64)), wide, data=mt.Shard(0))
    w = mt.distribute(np.ones((64, 64)), wide, model=mt.Shard(1))

    def layers(x: Any, w: Any) -> Any:
        for _ in range(250):
            x = mt.tanh(x @ w) * 0.5 + x
        return x

    program = mt.compile(layers).program(x, w)
    report.row(
        f"partitioning {len(program.entries)} entries for 64 ranks",
        lambda: wide.rank_program(program, [x.sharding, w.sharding]),
        {},
        rounds=3,
    )
    small = mt.distribute(np.ones(64), mt.Mesh({"data": 2}), data=mt.Shard(0))
    ready = mt.compile(lambda x: x + 1.0)
    report.row("a cached call, client's time (virtual mesh)", lambda: ready(small), {}, rounds=5)
    there = mt.compute(mt.distribute(np.ones(64), mesh, ranks=mt.Shard(0)) + 0.0)
    submit = mt.compile(lambda x: x + 1.0)
    submit(there)
    spent = []
    for _ in range(50):
        start = time.thread_time()
        submit(there)
        spent.append(time.thread_time() - start)
    print(f"a cached call on workers, processor time of the caller: {1e3 * sorted(spent)[25]:.2f} ms")


def virtual_meshes(report: timing.Report) -> None:
    """Partitioning, and what one process of so many plans: no worse than in proportion to the ranks."""
    import scaling

    program, layouts, small = scaling.traced()

    def planned(ranks: int) -> Callable[[], Any]:
        def run() -> Any:
            scaling.forget()
            found = partition(program, layouts, (ranks // 4, 4))
            return Prepared(found, (1,), tuple(range(ranks)), small.names)

        return run

    for ranks in (512, 4096):
        report.row(
            f"{len(program.entries)} entries, partitioned and planned for one of {ranks} ranks",
            planned(ranks),
            {"of 64 ranks": (planned(64), ranks / 64)},
            rounds=3,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256, help="of the array that is turned from rows to columns")
    parser.add_argument(
        "--only", help="one group of rows: steps, collectives, rechunk, product, sharing, partitioning, virtual"
    )
    options = parser.parse_args()
    report = timing.Report("parallel, 2 worker processes of one thread")
    groups: dict[str, Callable[..., None]] = {
        "steps": lambda: small_step(report, client, mesh),
        "collectives": lambda: in_one_task(collectives, report, mesh, g, 64),
        "rechunk": lambda: rechunk(report, client, mesh, options.megabytes),
        "product": lambda: product(report, mesh, 4096),
        "sharing": lambda: sharing(report, client, mesh),
        "partitioning": lambda: partitioning(report, mesh),
        "virtual": lambda: virtual_meshes(report),
    }
    start = time.monotonic()
    with gloo() as g, local_cluster(2) as client, mt.Mesh({"ranks": 2}, client=client) as mesh:
        for name, run in groups.items():
            if options.only in (None, name):
                run()
    report.show()
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
