"""What a reshard holds in memory, against its bound: ``python benchmarks/reshard_memory.py --out
docs/development/reshard-memory.md``.

The bound: beside the blocks that are there, the new blocks and one block. On virtual ranks ``tracemalloc`` counts every
array of all ranks together; in two worker processes it is the high-water mark of what each has in memory (Linux), by
which chunks on their way count too, a MB or two.
"""

from __future__ import annotations

import timing  # noqa: F401  # first: it sets the number of threads

# isort: split
import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import page

import meshtape as mt
from meshtape.arrays.backends.memory_pool import POOL
from meshtape.parallel.dask.cluster import local_cluster
from meshtape.parallel.dask.workers import known_workers

Moved = Callable[[], mt.Array]
Case = tuple[str, Moved]
"""What is moved in words, and the call that moves it."""


def cases(both: mt.Mesh, one: mt.Mesh, other: mt.Mesh, rows: int, columns: int) -> list[Case]:
    """Reshards of an array of float64 within a mesh of one axis ``a``, to a part of it, to a larger one and to one
    beside it."""

    def on(mesh: mt.Mesh, placement: Any, shape: tuple[int, ...]) -> mt.Array:
        (axis,) = mesh.names
        return mt.compute(mt.distribute(np.ones(shape), mesh, **{axis: placement}) * 2.0)

    def pending(shape: tuple[int, int]) -> mt.Array:
        x = mt.compute(mt.sum(on(both, mt.Shard(0), (both.size, *shape)), axis=0))
        assert x.sharding.partial
        return x

    def turn(x: mt.Array, mesh: mt.Mesh, placement: Any) -> Moved:
        (axis,) = mesh.names
        target = mt.Sharding(mesh, **{axis: placement})
        return lambda: mt.compute(mt.reshard(x, target))

    even, uneven = (rows, columns), (rows - 1, columns + 1)
    s0, s1, r = mt.Shard(0), mt.Shard(1), mt.Replicate()
    split = on(both, s0, even)
    return [
        ("R → S: slice", turn(on(both, r, even), both, s0)),
        ("S → S: all-to-all", turn(split, both, s1)),
        ("S → S, uneven", turn(on(both, s0, uneven), both, s1)),
        ("P → S: reduce-scatter", turn(pending(even), both, s0)),
        ("P → R: all-reduce", turn(pending(even), both, r)),
        ("S → R: all-gather", turn(split, both, r)),
        ("to a part of the mesh", turn(split, one, s1)),
        ("from a part to the whole", turn(on(one, s1, even), both, s0)),
        ("to a mesh beside it", turn(on(one, s0, even), other, s1)),
    ]


def blocks(x: mt.Array) -> list[int]:
    """Bytes of the block of each rank."""
    return [
        8 * int(np.prod(x.sharding.box(x.shape, rank).shape, dtype=np.int64)) for rank in range(x.sharding.mesh.size)
    ]


def line(name: str, old: int, new: int, block: int, measured: int) -> str:
    """A row of a table: MB."""
    bound = new + block
    return (
        f"| {name} | {old / 1e6:.1f} | {new / 1e6:.1f} | {bound / 1e6:.1f} | {measured / 1e6:.1f} | "
        f"{measured / bound:.2f} |"
    )


HEAD = "| reshard | there, MB | new blocks, MB | bound, MB | measured, MB | ratio |\n|---|---|---|---|---|---|"


def virtual(n: int = 4, rows: int = 1024) -> list[str]:
    """Of all ranks of this process together. Ranks that replicate a block share it, so that it counts once."""
    out = []
    for name, move in cases(mt.Mesh({"a": n}), mt.Mesh({"b": n // 2}), mt.Mesh({"c": n // 2}), rows, rows):
        y = move()
        new = sum(blocks(y)) if y.sharding.layout.shards else max(blocks(y))
        block, old = max(blocks(y)), 8 * y.size
        del y
        gc.collect()
        POOL.clear()
        tracemalloc.start()
        try:
            base = tracemalloc.get_traced_memory()[0]
            y = move()
            measured = tracemalloc.get_traced_memory()[1] - base
        finally:
            tracemalloc.stop()
        out.append(line(name, old, new, block, measured))
        del y
    return out


def reset() -> int:
    """What the process holds, after it gave back what it only kept; its peak is counted from here."""
    import ctypes
    import gc
    from pathlib import Path

    from meshtape.arrays.backends.memory_pool import POOL

    gc.collect()
    POOL.clear()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return highest()


def highest() -> int:
    """High-water mark of the process, in bytes."""
    from pathlib import Path

    (found,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM")]
    return int(found.split()[1]) * 1024


def workers(rows: int = 2048) -> list[str]:
    """Of two worker processes, the fullest."""
    out = []
    with local_cluster(2) as client:
        addresses = sorted(known_workers(client))
        with (
            mt.Mesh({"a": 2}, client=client) as both,
            mt.Mesh({"b": 1}, client=client, workers=addresses[:1]) as one,
            mt.Mesh({"c": 1}, client=client, workers=addresses[1:]) as other,
        ):
            for name, move in cases(both, one, other, rows, rows):
                y = move()  # everybody is connected
                new, size = max(blocks(y)), y.size
                del y
                gc.collect()
                before = client.run(reset)
                y = move()
                after = client.run(highest)
                measured = max(after[a] - before[a] for a in after)
                out.append(line(name, 8 * size, new, new, measured))
                del y
    return out


def main() -> None:
    put = page.destination(__doc__)
    parts = [
        "# What a reshard holds in memory\n\nMade by `python benchmarks/reshard_memory.py`. The bound is the new "
        "blocks and one more, beside what is there; the ratio is of what was\nmeasured to the bound.\n",
        f"## Four virtual ranks of one process\n\nAll ranks together, counted by `tracemalloc`.\n\n{HEAD}\n"
        + "\n".join(virtual()),
        "\n## Two worker processes\n\nThe fullest worker: what its high-water mark rose by, chunks on their way among "
        "it. There is the whole array, in MB; new blocks are those of "
        f"one worker.\n\n{HEAD}\n" + "\n".join(workers()),
    ]
    put("\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
