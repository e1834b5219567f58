"""The main job in small: train on a mesh, lose the cluster, resume on another mesh, export, and check that all agree.

``meshtape demo`` runs :func:`run`. It is written as a user would write it, with the public names of ``meshtape`` only.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

import meshtape as mt

from .errors import BackendError, MeshtapeError

HIDDEN = 256
BATCH = 128
CLASSES = 10
WANTED_ACCURACY = 0.96
TOLERANCE = 1e-4


class DemoFailed(MeshtapeError, RuntimeError):
    """The demo ran, and a result is wrong."""


def init(key: Any, features: int) -> dict[str, Any]:
    """Parameters of the two-layer network."""
    k1, k2 = mt.random.split(key)
    return {
        "w1": mt.random.normal(k1, (features, HIDDEN), dtype=mt.float32) * (2.0 / features) ** 0.5,
        "norm": {"weight": mt.ones(HIDDEN, dtype=mt.float32), "bias": mt.zeros(HIDDEN, dtype=mt.float32)},
        "w2": mt.random.normal(k2, (HIDDEN, CLASSES), dtype=mt.float32) * HIDDEN**-0.5,
        "b2": mt.zeros(CLASSES, dtype=mt.float32),
    }


def logits(params: Any, x: Any) -> Any:
    """``(batch, features) -> (batch, classes)``."""
    h = mt.layer_norm(x @ params["w1"], HIDDEN, params["norm"]["weight"], params["norm"]["bias"])
    return mt.nn.gelu(h) @ params["w2"] + params["b2"]


PLAN = mt.models.Plan(("tp",), {"tp": {"w1": 1, "norm.*": 0, "w2": 0}})
"""Tensor parallelism: the first layer is split by columns, the second by rows; everything else replicates."""

optimizer = mt.optim.adamw(3e-3, weight_decay=0.02)


def train_step(state: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """One step: the new state, and the loss and accuracy on this batch."""

    def loss(params: Any) -> tuple[Any, Any]:
        out = logits(params, x)
        return mt.nn.cross_entropy(out, y), mt.mean((mt.argmax(out, axis=1) == y).astype(mt.float32))

    (value, accuracy), grads = mt.value_and_grad(loss, has_aux=True)(state["params"])
    params, slots = optimizer.update(state["params"], grads, state["optimizer"])
    return {"params": params, "optimizer": slots}, {"loss": value, "accuracy": accuracy}


@dataclass
class Digits:
    """The handwritten digits of scikit-learn: 1797 images of 8 by 8 pixels, scaled to 0 … 1."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray

    @property
    def steps_per_epoch(self) -> int:
        return len(self.x) // BATCH

    def batch(self, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The batch of a step, from seed and step alone, so that a resumed run sees the batches of an unbroken one."""
        epoch, i = divmod(step, self.steps_per_epoch)
        order = np.asarray(mt.random.permutation(mt.random.fold_in(mt.random.key(seed), epoch), len(self.x)))
        chosen = order[i * BATCH : (i + 1) * BATCH]
        return self.x[chosen], self.y[chosen]


def _need(module: str, why: str) -> None:
    """Raise before anything is started where a package of the demo is missing."""
    if importlib.util.find_spec(module) is None:
        raise BackendError(f"the demo needs {module}, which is not installed ({why}): pip install 'meshtape[demo]'")


def load_digits() -> Digits:
    """The data, a fifth of it held out. Raises :class:`BackendError` where scikit-learn is not installed."""
    _need("sklearn", "its data set ships inside scikit-learn")
    from sklearn.datasets import load_digits as load

    x, y = load(return_X_y=True)
    x = (x / 16.0).astype(np.float32)
    order = np.asarray(mt.random.permutation(mt.random.key(7), len(x)))
    x, y = x[order], y[order].astype(np.int64)
    held_out = len(x) // 5
    return Digits(x[held_out:], y[held_out:], x[:held_out], y[:held_out])


@dataclass
class Report:
    """The measurements of a run, for the table at its end."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, what: str, value: str, **facts: Any) -> None:
        """A row, and the same as data."""
        self.rows.append((what, value))
        self.facts |= facts

    def check(self, what: str, good: bool, value: str, **facts: Any) -> None:
        """A row that must hold."""
        self.add(what, f"{value}  {'✓' if good else '✗'}", **facts)
        if not good:
            self.failures.append(f"{what}: {value}")

    def judge(self) -> None:
        """Raise :class:`DemoFailed` with all that does not hold."""
        if self.failures:
            raise DemoFailed("; ".join(self.failures))


def cluster(scheduler: str | None, workers: int) -> contextlib.AbstractContextManager[Any]:
    """A client of the scheduler at an address, or of a cluster of this machine that is started here."""
    from .parallel.dask.cluster import connect, local_cluster

    return connect(scheduler) if scheduler else local_cluster(workers)


def run(
    *,
    scheduler: str | None = None,
    directory: str | Path = "meshtape-demo",
    epochs: int = 24,
    seed: int = 0,
    console: Any = None,
) -> Report:
    """The whole job; see ``meshtape demo --help``. Raises :class:`DemoFailed` when a result is wrong."""
    from .cli.parts import as_json
    from .cli.tables import console as terminal

    console = console or terminal()
    say = functools.partial(console.print, soft_wrap=not console.is_terminal)  # in a pipe every line is whole
    started = time.perf_counter()
    _need("safetensors", "to show that the exported file is read without meshtape")
    digits = load_digits()
    home = Path(directory).absolute() / datetime.now().strftime("run-%Y%m%d-%H%M%S-%f")
    report = Report()
    total = epochs * digits.steps_per_epoch
    half = total // 2
    say(
        f"[bold]meshtape demo[/]: {len(digits.x)} handwritten digits to learn, {len(digits.test_x)} held out, {total} "
        "steps"
    )

    # 1 and 2: two workers, four ranks; data parallel times tensor parallel.
    with cluster(scheduler, 2) as client, mt.Mesh({"data": 2, "model": 2}, client=client) as mesh:
        say(f"[cyan]1[/] cluster up; {mesh}")
        manager = mt.CheckpointManager(home / "checkpoints", keep=2)  # not before: a cluster that fails leaves no files
        params = init(mt.random.key(seed), digits.x.shape[1])
        state = PLAN.distribute({"params": params, "optimizer": optimizer.init(params)}, mesh)
        say("  the first layer's weights, by rank:")
        console.print(mt.visualize(state["params"]["w1"]), highlight=False, markup=False)
        state, speed = _train(state, digits, mesh, 0, half, seed, manager, "2 training on data=2, model=2", console)
        report.add("steps per second, mesh data=2 × model=2", f"{speed:.0f}", steps_per_second=speed)

    # 3: that cluster is gone. Another one, with another mesh, goes on from the last checkpoint.
    latest = manager.latest()
    with cluster(scheduler, 3) as client, mt.Mesh({"model": 3}, client=client) as mesh:
        say(
            f"[cyan]3[/] {'the same' if scheduler else 'another'} cluster; {mesh}; resuming from "
            f"[green]{_near(latest)}[/]"
        )
        reading = mt.LoadReport()
        state = mt.load(latest, shardings=lambda path, shape, dtype: PLAN.sharding(path, shape, mesh), report=reading)
        step = mt.open_checkpoint(latest).step
        report.add(
            "bytes read while resharding 2×2 → 3 ranks",
            f"{reading.bytes_read:,} for blocks of {reading.bytes_needed:,}, in {reading.seconds:.2f} s",
            reshard={k: getattr(reading, k) for k in ("bytes_read", "bytes_needed", "seconds")},
        )
        state, speed = _train(state, digits, mesh, step, total, seed, manager, "3 training on model=3", console)
        report.add("steps per second, mesh model=3", f"{speed:.0f}", steps_per_second_resumed=speed)
        test_x = mt.distribute(digits.test_x, mesh)
        on_mesh = np.asarray(mt.compile(logits)(state["params"], test_x))

    # 4: one open file, read by others.
    saved = mt.open_checkpoint(manager.latest())
    report.add(
        "bytes of the last checkpoint",
        f"{saved.nbytes:,} in {len(saved)} arrays (Zarr v3)",
        checkpoint={"path": saved.path, "arrays": len(saved), "nbytes": saved.nbytes},
    )
    merged = mt.merge(manager.latest(), home / "model", keys=["params.*"])
    file = home / "model" / merged.files[0]
    report.add(
        "bytes written as safetensors",
        f"{merged.total_size:,} in {len(merged.files)} file(s)",
        exported={"path": merged.path, "arrays": merged.arrays, "nbytes": merged.total_size, "written": merged.files},
    )
    local = np.asarray(logits(mt.load(file, like={"params": params})["params"], mt.asarray(digits.test_x)))
    foreign = _with_safetensors_alone(file, digits.test_x)
    say("[cyan]4[/] merged to safetensors; the same logits from the mesh, from meshtape alone, and without meshtape:")
    worst = {name: float(np.abs(on_mesh - other).max()) for name, other in (("meshtape", local), ("foreign", foreign))}
    for key, name in (("meshtape", "meshtape without a mesh"), ("foreign", "safetensors + NumPy alone")):
        what = f"largest difference of logits, mesh ↔ {name}"
        report.check(what, worst[key] < TOLERANCE, f"{worst[key]:.1e}", largest_difference=worst)

    # 5: what came of it.
    accuracy = float((on_mesh.argmax(axis=1) == digits.test_y).mean())
    wanted = f"test accuracy (must exceed {WANTED_ACCURACY})"
    report.check(wanted, accuracy > WANTED_ACCURACY, f"{accuracy:.4f}", accuracy=accuracy)
    seconds = time.perf_counter() - started
    report.add("seconds in all", f"{seconds:.1f}", steps=total, seconds=seconds)
    report.add("files", _near(home), directory=str(home))
    (home / "report.json").write_text(as_json(report.facts) + "\n", encoding="utf-8")
    _show(report, manager.latest(), file, console)
    report.judge()
    return report


def _train(
    state: Any, digits: Digits, mesh: Any, first: int, last: int, seed: int, manager: Any, title: str, console: Any
) -> tuple[Any, float]:
    """Train from step ``first`` to ``last``, with a bar and two checkpoints; returns the state, and steps a second."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    step_fn = mt.compile(train_step)
    rows = {"data": mt.Shard(0)} if "data" in mesh.names else {}
    columns = (
        TextColumn("[cyan]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  accuracy {task.fields[accuracy]:.3f}  {task.fields[ms]:.1f} ms/step"),
        TimeRemainingColumn(),
    )
    middle = first + (last - first) // 2
    warm: float | None = None
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(title, total=last - first, loss=float("nan"), accuracy=0.0, ms=0.0)
        for step in range(first, last):
            x, y = digits.batch(seed, step)
            state, seen = step_fn(state, mt.distribute(x, mesh, **rows), mt.distribute(y, mesh, **rows))
            done = step + 1
            if done % 10 == 0 or done == last or step == first:
                # Reading a value waits for it; in between, steps are only handed on to the workers.
                numbers = {name: float(v) for name, v in seen.items()}
                warm = time.perf_counter() if warm is None else warm
                ms = 1e3 * (time.perf_counter() - warm) / max(1, step - first)
                progress.update(bar, completed=done - first, ms=ms, **numbers)
            if done in (middle, last):
                manager.save(done, state, metadata={"loss": float(seen["loss"])})
    elapsed = time.perf_counter() - (warm or 0.0)
    return state, (last - first - 1) / elapsed if last - first > 1 else 0.0


def _with_safetensors_alone(file: Path, x: np.ndarray) -> np.ndarray:
    """The logits, computed without meshtape from the safetensors file."""
    from math import sqrt

    from safetensors.numpy import load_file
    from scipy.special import erf

    p = load_file(str(file))
    h = x @ p["params.w1"]
    h = (h - h.mean(axis=1, keepdims=True)) / np.sqrt(h.var(axis=1, keepdims=True) + 1e-5)
    h = h * p["params.norm.weight"] + p["params.norm.bias"]
    h = 0.5 * h * (1 + erf(h / sqrt(2)))
    return h @ p["params.w2"] + p["params.b2"]


def _near(path: Any) -> str:
    """A path as one would type it from here."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _show(report: Report, checkpoint: Any, file: Path, console: Any) -> None:
    from .cli.tables import Column, write

    write([Column(""), Column("")], [[what, value] for what, value in report.rows], title="meshtape demo", on=console)
    console.print("Try next:")
    for command in (
        f"meshtape ls {_near(checkpoint)}",
        f"meshtape show {_near(checkpoint)} params.w1",
        f"meshtape ls {_near(file)}",
        "jupyter lab notebooks/1-arrays-and-gradients.ipynb",
    ):
        console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)
