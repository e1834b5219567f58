"""Drop-less experts whose tokens are sent to the ranks that need them, against ranks that gather all tokens: ``python
benchmarks/experts.py``.

Forward and backward pass of one block on worker processes. Bytes are counted where processes send them, for routings
that are even, skewed and all to one rank; the times of both forms are taken in turns.
"""

from __future__ import annotations

import timing  # first: it sets the number of threads

# isort: split
import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

import meshtape as mt
from meshtape.parallel.dask.cluster import local_cluster

WIDTH, HIDDEN, EXPERTS, TOP_K = 256, 512, 8, 2


def sent_bytes(client: Any, run: Callable[[], Any]) -> int:
    """Bytes that the workers send to each other while ``run`` runs."""

    def begin() -> None:
        from meshtape.parallel.collectives.pieces import nbytes
        from meshtape.parallel.transports.group import LinkGroup

        exchange = LinkGroup.exchange
        LinkGroup.counted = 0

        def counting(self: Any, step: int, what: str, sends: Any, receives: Any) -> None:
            LinkGroup.counted += sum(nbytes([b if isinstance(b, tuple) else (b,) for b in s]) for s in sends.values())
            exchange(self, step, what, sends, receives)

        LinkGroup.uncounted, LinkGroup.exchange = exchange, counting

    def end() -> int:
        from meshtape.parallel.transports.group import LinkGroup

        LinkGroup.exchange = LinkGroup.uncounted
        return LinkGroup.counted

    client.run(begin)
    try:
        run()
    finally:
        counts = client.run(end)
    return sum(counts.values())


def routings(tokens: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    skewed = 1.0 / np.arange(1, EXPERTS + 1)

    def drawn(p: np.ndarray) -> np.ndarray:
        return np.stack([rng.choice(EXPERTS, TOP_K, replace=False, p=p / p.sum()) for _ in range(tokens)])

    return {
        "even": drawn(np.ones(EXPERTS)),
        "skewed (1/n)": drawn(skewed),
        "all to one rank": np.tile(np.arange(TOP_K), (tokens, 1)),
    }


def loss(x: Any, weights: Any, w: Any, chosen: Any, gather: bool) -> Any:
    if gather:
        x, weights, chosen = (mt.reshard(v, expert=mt.Replicate()) for v in (x, weights, chosen))
    y = mt.nn.experts(x, chosen, weights, **w)
    return mt.sum(mt.square(mt.reshard(y, expert=mt.Shard(0)) if gather else y))


def compare(report: timing.Report | None, client: Any, mesh: mt.Mesh, tokens: int) -> None:
    """Both forms on one mesh; times only with a report."""
    rng, rows, ranks = np.random.default_rng(1), {"expert": mt.Shard(0)}, mesh.size
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    x, weights = rng.normal(size=(tokens, WIDTH)), np.full((tokens, TOP_K), 1 / TOP_K)
    w = {n: rng.normal(size=(EXPERTS, *s)) * 0.05 for n, s in shapes.items()}
    operands = mt.tree.tree_map(lambda v: mt.distribute(v.astype(np.float32), mesh, **rows), (x, weights, w))
    step = mt.compile(lambda *v, gather: mt.value_and_grad(loss, argnums=(0, 1, 2))(*v, gather))
    for name, table in routings(tokens).items():
        chosen = mt.distribute(table, mesh, **rows)

        def run(gather: bool, chosen: Any = chosen) -> float:
            return float(step(*operands, chosen, gather=gather)[0])

        values = [run(g) for g in (False, True)]
        assert np.isclose(*values, rtol=1e-5), values
        sent, gathered = (sent_bytes(client, lambda run=run, g=g: run(g)) for g in (False, True))
        print(
            f"{ranks} ranks, {name}: {sent / 1e6:.2f} MB sent, {gathered / 1e6:.2f} MB where all is gathered: "
            f"{sent / gathered:.2f}"
        )
        if report is not None:
            forms = {"gathered": (lambda run=run: run(True), None)}
            report.row(f"{ranks} ranks, {name}", lambda run=run: run(False), forms, rounds=5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, default=2048, help="a rank")
    parser.add_argument("--untimed", action="store_true", help="bytes alone")
    a = parser.parse_args()
    title = f"Drop-less experts, {EXPERTS} of {WIDTH}x{HIDDEN}, {TOP_K} a token: sent against gathered"
    report = None if a.untimed else timing.Report(title)
    for ranks in a.ranks:
        with local_cluster(ranks) as client, mt.Mesh({"expert": ranks}, client=client) as mesh:
            compare(report, client, mesh, a.tokens * ranks)
    if report is not None:
        report.show()


if __name__ == "__main__":
    main()
