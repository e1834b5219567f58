"""Programs on two Dask workers against dask.array on the same two: ``python benchmarks/parallel.py``."""

from __future__ import annotations

import timing  # first: it sets the number of threads

# isort: split
import argparse
import itertools

import numpy as np

import meshtape as mt
from meshtape.parallel.cluster import local_cluster


def small_step(report: timing.Report, client, mesh: mt.Mesh) -> None:
    """100 elementwise ops on 1024 numbers a rank and one all-reduce: what is measured is everything but arithmetic."""
    import dask.array as da

    host = np.ones(2048)

    def chain(x):
        for _ in range(50):
            x = x * 1.0001
            x = x + 0.5
        return x

    step = mt.compile(lambda x: mt.sum(chain(x)))
    x = mt.compute(mt.distribute(host, mesh, ranks=mt.Shard(0)))
    dx = client.persist(da.from_array(host, chunks=1024))

    def theirs():
        return chain(dx).sum().compute(scheduler=client)

    # One gang a step, each waited for; and handed on in a row, as a training loop does.
    report.row(
        "100 small ops + all-reduce, waited for", lambda: float(step(x)), {"dask.array": (theirs, 0.05)}, rounds=5
    )

    def many():
        for _ in range(20):
            y = step(x)
        return float(y)

    report.row("the same, 20 in a row, each", many, {}, rounds=3, scale=1 / 20)


def rechunk(report: timing.Report, client, mesh: mt.Mesh, megabytes: int) -> None:
    """Row blocks to column blocks."""
    import dask
    import dask.array as da

    n = int((megabytes * 1e6 / 4) ** 0.5)
    host = np.random.default_rng(0).standard_normal((n, n)).astype(np.float32)
    x = mt.compute(mt.distribute(host, mesh, ranks=mt.Shard(0)) + 0.0)
    turn = mt.compile(lambda x: mt.reshard(x, ranks=mt.Shard(1)))
    dx = client.persist(da.from_array(host, chunks=(-(-n // 2), n)))

    counter = itertools.count()

    def theirs(method: str):
        def run():
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
    )


def _same(block):
    return block


def wait(client, collection) -> None:
    """Until the chunks of a dask collection are there; none is fetched."""
    from distributed import futures_of
    from distributed import wait as wait_for

    with client.as_current():
        wait_for(futures_of(collection))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    options = parser.parse_args()
    report = timing.Report("parallel, 2 worker processes of one thread")
    with local_cluster(2) as client, mt.Mesh({"ranks": 2}, client=client) as mesh:
        small_step(report, client, mesh)
        rechunk(report, client, mesh, options.megabytes)
    report.show()


if __name__ == "__main__":
    main()
