"""What users do while something goes wrong. Each goes on until it is told that the fault was there, and looks at each
of its results.

An operation is a generator: it yields when it is ready, and again each time when something was done and found right.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import dask.array as da
import numpy as np
from world import Scene

import meshtape as mt
from meshtape.parallel.training.elastic import Elastic

Operation = Callable[[Scene], Iterator[None]]
HOST = np.arange(48.0).reshape(12, 4)
LARGE = np.arange(1 << 18, dtype=np.float64).reshape(512, 512)


class Wrong(AssertionError):
    """A result is not that of the unsplit run."""


class OfDask(Exception):
    """What Dask does for its own collections ended otherwise; that is not ours to mend."""


def same(found: Any, wanted: Any) -> None:
    found, wanted = np.asarray(found), np.asarray(wanted)
    if found.shape != wanted.shape or not np.allclose(found, wanted, rtol=1e-6, atol=1e-9):
        raise Wrong(f"{found.ravel()[:6]} instead of {wanted.ravel()[:6]}")


def split(value: Any, mesh: Any, dim: int = 0) -> Any:
    return mt.distribute(value, mesh, **{mesh.names[0]: mt.Shard(dim)})


def program(scene: Scene) -> Iterator[None]:
    """Programs without collectives, several on their way."""
    with scene.mesh() as mesh:
        step = mt.compile(lambda x: mt.tanh(x) + 0.25)
        x, wanted = mt.compute(split(HOST, mesh)), HOST
        while True:
            for _ in range(6):
                x, wanted = step(x), np.tanh(wanted) + 0.25
            same(x, wanted)
            yield


def collective(scene: Scene) -> Iterator[None]:
    """Programs with collectives, small and large."""
    with scene.mesh() as mesh:
        step = mt.compile(lambda x, y: (x + mt.sum(x, 0) * 1e-3, y - mt.mean(y, 0)))
        x, y = split(HOST, mesh), split(LARGE, mesh)
        while True:
            a, b = x, y
            wa, wb = HOST, LARGE
            for _ in range(3):
                a, b = step(a, b)
                wa, wb = wa + wa.sum(0) * 1e-3, wb - wb.mean(0)
            same(a, wa)
            same(b, wb)
            yield


def fetch(scene: Scene) -> Iterator[None]:
    with scene.mesh() as mesh:
        x = mt.compute(split(LARGE, mesh) + 1)
        while True:
            same(x, LARGE + 1)
            yield


def distribute(scene: Scene) -> Iterator[None]:
    with scene.mesh() as mesh:
        large = np.concatenate([LARGE, LARGE])  # 4 MiB: by connections of their own
        while True:
            same(mt.sum(split(large, mesh) + split(large * 2, mesh, 1)), 3 * large.sum())
            yield


def save(scene: Scene) -> Iterator[None]:
    with scene.mesh() as mesh:
        x = mt.compute(split(LARGE, mesh))
        for i in range(1 << 30):
            tree = {"x": x + i, "n": np.full(3, i)}
            try:
                (background if i % 3 == 2 else mt.save)(scene.folder / "c", tree, step=i, overwrite=True)
            finally:
                old_or_new(scene.folder / "c", i)
            yield


def background(*args: Any, **options: Any) -> None:
    mt.save_async(*args, **options).wait()


def old_or_new(path: Any, i: int) -> None:
    """A checkpoint is that of the step before, or of this one, and whole."""
    if not path.exists():
        if i:
            raise Wrong("the checkpoint is gone")
        return
    step = mt.open_checkpoint(path).step
    tree = mt.load(path)
    if step not in (i - 1, i):
        raise Wrong(f"the checkpoint is of step {step}, and {i} is written")
    same(tree["x"], LARGE + step)
    same(tree["n"], np.full(3, step))


def load(scene: Scene) -> Iterator[None]:
    mt.save(scene.folder / "c", {"x": LARGE, "w": HOST})
    with scene.mesh() as mesh:
        shardings = {"x": mt.Sharding(mesh, a=mt.Shard(1)), "w": mt.Sharding(mesh, a=mt.Shard(0))}
        while True:
            found = mt.load(scene.folder / "c", shardings=shardings)
            same(mt.sum(found["x"] * 2), 2 * LARGE.sum())
            same(found["w"], HOST)
            yield


def reshard(scene: Scene) -> Iterator[None]:
    """Within a mesh, and to another one and back."""
    with scene.mesh() as mesh, mt.Mesh({"b": 2}, client=scene.client, workers=scene.workers[-2:]) as other:
        x = mt.compute(split(LARGE, mesh) + 1)
        while True:
            y = mt.reshard(x, a=mt.Shard(1))
            z = mt.reshard(y, mt.Sharding(other, b=mt.Shard(0)))
            same(mt.reshard(z, mt.Sharding(mesh, a=mt.Shard(0))), LARGE + 1)
            yield


def scan(scene: Scene) -> Iterator[None]:
    with scene.mesh() as mesh:
        x = mt.compute(split(HOST, mesh))

        def turn(s: Any, _: Any) -> Any:
            s = s * 0.5 + mt.sum(s, 0) * 0.01
            return s, mt.sum(s)

        wanted, sums = HOST, []
        for _ in range(100):
            wanted = wanted * 0.5 + wanted.sum(0) * 0.01
            sums.append(wanted.sum())
        while True:
            found, ys = mt.scan(turn, x, length=100)
            same(found, wanted)
            same(ys, sums)
            yield


def pipeline(scene: Scene) -> Iterator[None]:
    n, rng = scene.size, np.random.default_rng(0)
    w, x, y = rng.normal(size=(n, 3, 3)), rng.normal(size=(12, 3)), rng.normal(size=(12, 3))

    def loss(_: Any, x: Any, y: Any) -> Any:
        return mt.mean((x - y) ** 2)

    def whole(w: Any) -> Any:
        z: Any = mt.asarray(x)
        for i in range(n):
            z = mt.tanh(z @ w[i])
        return loss((), z, mt.asarray(y))

    value, grad = mt.value_and_grad(whole)(mt.asarray(w))
    with scene.mesh(pipe=n) as mesh:
        f = mt.pipeline(lambda w, x: mt.tanh(x @ w), loss, mesh, micros=4)
        run = mt.value_and_grad(lambda w: f(w, (), mt.asarray(x), mt.asarray(y)))
        while True:
            found, g = run(mt.asarray(w))
            same(found, value)
            same(g, grad)
            yield


X = np.random.default_rng(0).normal(size=(48, 6)).astype(np.float32)
DATA = {"x": X, "y": X @ np.arange(6, dtype=np.float32)}


def trainer(mesh: Any, **options: Any) -> Any:
    def loss(params: Any, batch: Any, key: Any) -> Any:
        return mt.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)

    def init(key: Any) -> Any:
        return {"w": mt.random.normal(key, (6,), dtype=mt.float32), "b": mt.zeros((), dtype=mt.float32)}

    usual: dict[str, Any] = {"log_every": 1, "seed": 3, "accumulation": 1, "batch": 12, "steps": 24}
    return mt.Trainer(loss, init, mt.optim.adam(0.05), DATA, mesh=mesh, **usual | options)


@functools.cache
def unbroken(size: int) -> tuple[float, ...]:
    """Losses of a run that nothing happens to."""
    return losses(trainer(mt.Mesh({"data": size})).fit())


def losses(result: Any) -> tuple[float, ...]:
    return tuple(h["loss"] for h in result.history if "loss" in h)


def training(scene: Scene) -> Iterator[None]:
    """With checkpoints, and without any: a lost worker is survived with what the others remember."""
    wanted = unbroken(scene.size)
    for i in range(1 << 30):
        mesh = mt.Mesh({"data": scene.size}, client=scene.client, workers=scene.workers)
        if i == 0:
            yield
        kept = {"directory": scene.folder / str(i), "save_every": 6} if scene.rng.random() < 0.5 else {}
        t = trainer(mesh, elastic=Elastic(rejoin=0.0, on_loss="keep", patience=20.0), **kept)
        try:
            same(losses(t.fit()), wanted)
        finally:
            t.mesh.close()
            if mesh is not t.mesh:
                mesh.close()
        yield


def gang(scene: Scene) -> Iterator[None]:
    def rank(value: int) -> Any:  # travels by value
        import os

        return int(os.environ["RANK"]) * value

    yield
    while True:
        run = mt.gang(scene.client, rank, 10, ranks=scene.size, workers=scene.workers)
        same(run.result(), [10 * r for r in range(scene.size)])
        yield


def to_dask(scene: Scene) -> Iterator[None]:
    """From Dask's arrays and back."""
    with scene.mesh() as mesh:
        while True:
            x = mt.from_dask(da.from_array(HOST, chunks=(3, 4)) + 1, mesh, a=mt.Shard(0))
            there = (x * 2).to_dask().sum()
            failed = None
            try:
                same(scene.client.compute(there).result(8.0), 2 * (HOST + 1).sum())
            except Wrong:
                raise
            except Exception as e:  # its own, and no end at all where the scheduler stands still
                failed = f"{type(e).__name__}: {e}"
                e.__traceback__ = None  # Dask keeps the error, and with it these frames
            if failed is not None:
                raise OfDask(failed)
            yield


def opening(scene: Scene) -> Iterator[None]:
    """Meshes that come and go."""
    yield
    while True:
        with scene.mesh() as mesh:
            same(mt.sum(split(HOST, mesh)), HOST.sum())
        yield


OPERATIONS: dict[str, Operation] = {
    f.__name__: f  # type: ignore[attr-defined]
    for f in (
        program,
        collective,
        fetch,
        distribute,
        save,
        load,
        reshard,
        scan,
        pipeline,
        training,
        gang,
        to_dask,
        opening,
    )
}


def run(scene: Scene, operation: str, ready: Callable[[], None], over: Callable[[], bool]) -> None:
    """Do it until the fault is over, and once more."""
    doing = OPERATIONS[operation](scene)
    try:
        next(doing)
        ready()
        last, until = False, time.monotonic() + 60.0
        while not last and time.monotonic() < until:
            last = over()
            next(doing)
    finally:
        doing.close()
