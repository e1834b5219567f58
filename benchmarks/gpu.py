"""The kernels against the memory of the GPU, and against PyTorch (eager and compiled), CuPy and JAX: ``python
benchmarks/gpu.py``.

For each row: the bytes that it must move (each input read once, each output written once) over its time, as a share of
what a device-to-device copy moves in the same run (the roofline of all that computes little), and its time over that of
each peer that can be imported.

Times are of the device alone: many calls, over inputs that together exceed the second-level cache several times, are
captured in a CUDA graph, and the graph is timed between events. Calls that cannot be captured are queued behind a
kernel that spins until all of them wait in the stream. Where a call waits for the device itself, neither works, and its
time holds the host's too: "host" stands in the column "by". JAX has streams of its own: one jitted function makes the
calls on all inputs, and the clock of the host is read. Candidates of a row are timed in turns.

``--quick`` takes fewer shapes, compiles PyTorch's products and decoder alone, and ends within 8 minutes: what no time is
left for, as long as the longest of its kind has taken, is named in the table as dropped. ``--only NAME`` takes the rows
whose name contains it, ``--no-compile`` leaves ``torch.compile`` out, ``--json FILE`` writes all of it as JSON,
``--tiny`` takes shapes of a few elements, which shows that rows run and measures nothing.

Targets (H200): for arrays of 64 MB and more, in rows of 1024 and more, 90 % of the copy forward and 80 % backward; never
slower than PyTorch, but for products and convolutions, 95 % of its speed, and attention, 80 %; the deterministic
gradient of an embedding within twice the atomic one; AdamW 85 % of the copy; memory of attention that grows with the
length; no more than 2 microseconds over CuPy for an op on eight elements; a step of a hundred small ops as a CUDA graph
five times faster than eager; a step of a decoder as a CUDA graph within 1.1 of PyTorch's eager one and 1.3 of its
compiled one. The JSON has the functions that take most of the host in an eager step.
"""

from __future__ import annotations

import time

START = time.time()

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take three quarters of the memory

import argparse
import json
import statistics
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gpu_attention import Heads, attention_memory, attention_rows
from gpu_clock import Meter, Timed, checks
from gpu_elementwise import elementwise_rows, take_rows
from gpu_peers import Torch, importable, on_stream
from gpu_products import (
    convolution_rows,
    expert_rows,
    float8_rows,
    linear_rows,
    loss_rows,
    optimizer_rows,
    product_rows,
)
from gpu_rows import (
    LARGE,
    Maker,
    Row,
    image_rows,
    index_rows,
    random_rows,
    rotary_rows,
    row_norm_rows,
    softmax_rows,
)
from gpu_step import decoder_step
from gpu_verdict import goals, judge, line_of_host, of_targets, told

import meshtape as mt
from meshtape.arrays.kernels import launch

STATUS = """the status is
  0  where all targets are met, or have nothing to be compared with (a peer is not installed)
  1  where a row, a line of the host or a peer failed, the clock does not hold or was not checked, or the watch ended it
  2  where nothing failed, and a target was missed, or a row or a peer was dropped for want of time
"""
QUICK = 420.0
"""Seconds that ``--quick`` begins no new candidate after; the watch ends it half a minute later, with what it has."""
SHAPES = (
    (4096, 4096),
    (16384, 4096),
    (4096, 8192),
    (16384, 16384),
    (4096, 1024),
    (4096, 256),
    (4097, 1001),
    (1000, 5003),
)
DTYPES = tuple(np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16, np.float16))
IMAGES = ((64, 256, 28, 28), (32, 64, 112, 112))
CONVOLUTIONS = (
    ((64, 64, 56, 56), (64, 64, 3, 3), 1),
    ((64, 256, 56, 56), (64, 256, 1, 1), 1),
    ((64, 3, 224, 224), (64, 3, 7, 7), 2),
    ((64, 256, 14, 14), (256, 256, 3, 3), 1),
    ((64, 512, 28, 28), (1024, 512, 1, 1), 2),
)
"""Images, kernels and strides of layers of a ResNet-50."""


def guarded(family: Callable[..., Iterator[Row]], *args: Any) -> Iterator[Row]:
    """The rows of a family; where one cannot even be described, a row that fails."""
    try:
        yield from family(*args)
    except Exception as e:
        error = e  # the name of a handler ends with it

        def fails() -> tuple[Any, ...]:
            raise error

        yield Row(f"the rest of {family.__name__}, {', '.join(map(str, args[2:]))}", 0, fails, fails, {})


def all_rows(m: Maker, t: Torch | None, jax: Any, quick: bool, tiny: bool = False) -> Iterator[Row]:
    """Every row of the table, those with targets first: what a budget drops is what comes last."""
    dtypes, short = DTYPES[:2] if quick else DTYPES, DTYPES[1]
    shapes, images = SHAPES, IMAGES[:1] if quick else IMAGES
    convolutions = CONVOLUTIONS[:2] if quick else CONVOLUTIONS
    n, side, table, taken = 1 << 26, 8192, (100_000, 50_000, 256), (100_000, 8192)
    layer, loss, sent = (8192, 4096), (8192, 1024, 32_768), [(16384, 2, 8, 2048, 4096), (16384, 8, 64, 2048, 1024)]
    causal, padded, single, long = (
        Heads(*s, 128) for s in ((1, 16, 16384), (8, 16, 2048), (1, 16, 8192), (1, 16, 65536))
    )
    if tiny:
        shapes, images, n, side, table, taken = ((5, 40),), ((2, 4, 3, 3),), 1024, 64, (70, 80, 8), (6, 40)
        convolutions, layer, loss, sent = (((2, 4, 5, 5), (4, 4, 3, 3), 1),), (6, 16), (6, 16, 40), [(5, 2, 3, 8, 16)]
        causal, padded, single, long = (Heads(1, 2, s, 8) for s in (16, 12, 20, 32))
    eager = t and Torch(t.torch, t.compiled and not quick)  # compiling takes most of the time
    for d in dtypes:
        large = [s for s in shapes if np.prod(s) * d.itemsize >= LARGE or tiny]
        for shape in large[:1] if quick else shapes:
            yield from guarded(row_norm_rows, m, eager, jax, shape, d)
            yield from guarded(softmax_rows, m, eager, jax, shape, d)
    yield from guarded(product_rows, m, t, jax, side, short)
    yield from guarded(attention_rows, m, t, jax, causal, short)
    yield from guarded(optimizer_rows, m, t, 4 if tiny else 64, n // 64)
    yield from guarded(loss_rows, m, t, jax, loss, short)
    yield from guarded(linear_rows, m, t, jax, *layer, short)
    yield from guarded(float8_rows, m, t, side, short)
    yield from guarded(attention_rows, m, t, jax, padded, short, True)
    yield from guarded(attention_rows, m, t, jax, single, DTYPES[0])
    yield from guarded(attention_rows, m, t, jax, long, short)
    for d in DTYPES[1:2] if quick else DTYPES[1:]:
        for sizes in convolutions:
            for last in (True, False):
                yield from guarded(convolution_rows, m, t, *sizes, d, last)
    for shape in sent:
        yield from guarded(expert_rows, m, t, shape, short)
    yield from guarded(expert_rows, m, t, sent[0], DTYPES[0])
    for d in dtypes:
        yield from guarded(elementwise_rows, m, eager, jax, n, d)
        yield from guarded(take_rows, m, eager, jax, *taken, d)
        yield from guarded(rotary_rows, m, eager, causal, d)
        for shape in images:
            for last in (False, True):
                yield from guarded(image_rows, m, eager, shape, d, last)
        yield from guarded(index_rows, m, eager, *table, d)
        yield from guarded(random_rows, m, eager, n, d)


# ----- calls of the host ----------------------------------------------------------------------------------------------


def overhead(cp: Any) -> dict[str, Any]:
    """Host microseconds of a call on eight elements: ours, and CuPy's own."""
    x = cp.ones(8, cp.float32)
    a = mt.asarray(np.ones(8, np.float32), device="cuda:0")

    def host(fn: Callable[[], Any]) -> float:
        best = []
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(200):
                fn()
            best.append((time.perf_counter() - start) / 200)
            cp.cuda.Device().synchronize()
        return statistics.median(best) * 1e6

    ours, theirs = host(lambda: a + a), host(lambda: x + x)
    return {
        "us": {"ours": ours, "cupy": theirs},
        **of_targets({"CuPy + 2 us": ours <= theirs + 2}),
    }


def small_step(x: Any, w: Any, b: Any) -> Any:
    """A hundred small ops: twenty norms, each with four elementwise ops behind it."""
    for _ in range(20):
        h = mt.nn.layer_norm(x, x.shape[-1], w, b)
        x = mt.tanh(h * 1.01) + x - 0.5
    return x


def graphs(cp: Any) -> dict[str, Any]:
    """Microseconds of a step of a hundred small ops, to the end on the device: eager, compiled, and replayed as a CUDA
    graph."""
    args = [mt.asarray(np.ones(shape, np.float32), device="cuda:0") for shape in ((32, 128), (128,), (128,))]

    def step_time(fn: Callable[..., Any]) -> float:
        for _ in range(3):
            fn(*args)
        found = []
        for _ in range(20):
            cp.cuda.Device().synchronize()
            start = time.perf_counter()
            fn(*args)
            cp.cuda.Device().synchronize()
            found.append(time.perf_counter() - start)
        return statistics.median(found) * 1e6

    found = {"eager": step_time(small_step), "compiled": step_time(mt.compile(small_step))}
    found["graph"] = step_time(mt.compile(small_step, cuda_graph=True))
    met = found["eager"] >= 5 * found["graph"]
    return {"us": found, **of_targets({"graph 5 times faster than eager": met})}


# ----- the run --------------------------------------------------------------------------------------------------------


def sets_of(row: Row, cache: int) -> list[tuple[Any, ...]]:
    """Inputs that together exceed the second-level cache four times, up to eight sets."""
    count = max(2, min(8, -(-4 * cache // max(row.nbytes, 1))))
    return [row.make() for _ in range(count)]


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]


class Run:
    """The state of a run, which is the JSON that it leaves."""

    def __init__(self, options: argparse.Namespace, before: dict[str, Any] | None = None) -> None:
        self.options = options
        self.found = before or {"rows": [], "dropped": [], "checks": [], "host": [], "start": START}
        self.longest: dict[str, float] = {}
        self.end = None if options.budget is None else self.found["start"] + options.budget

    def late(self, candidate: str) -> bool:
        """Whether no time is left for one more candidate that takes as long as the longest of its kind has."""
        return self.end is not None and time.time() + self.longest.get(candidate, 1.0) > self.end

    def measure(self, meter: Meter, row: Row, cache: int) -> dict[str, Any]:
        """What a row shows: ours, and each peer's time or why there is none."""
        out: dict[str, Any] = {"name": row.name, "nbytes": row.nbytes, "peers": {}}
        ready: dict[str, Timed] = {}
        sets = sets_of(row, cache)
        prepare = {"ours": on_stream(row.ours), **row.peers}
        for name, make in prepare.items():
            if name != "ours" and self.late(name):
                out["peers"][name] = {"dropped": "no time was left"}
                continue
            start = time.time()
            try:
                ready[name] = make(meter, sets)
            except Exception as e:
                if name == "ours":
                    raise
                out["peers"][name] = {"error": said(e)}
            self.longest[name] = max(self.longest.get(name, 0.0), time.time() - start)
        seconds = meter.turns(ready)
        ours = seconds.pop("ours")
        share = row.nbytes / ours / meter.copy
        out |= {"seconds": ours, "by": ready["ours"].by, "share": share}
        for name, theirs in seconds.items():
            out["peers"][name] = {"seconds": theirs, "by": ready[name].by, "ratio": ours / theirs}
        targets: dict[str, bool | None] = {}
        if row.target is not None:
            targets[f"{row.target:.0%} of the copy"] = share >= row.target
        has_torch = bool(self.found["versions"]["PyTorch with CUDA"])
        for name, most in row.most.items():
            if name in row.peers or not has_torch:
                ratio = out["peers"].get(name, {}).get("ratio")
                targets[f"at most {most:.2f} of {name}"] = None if ratio is None else ratio <= most
        reason = "a peer failed or was dropped" if has_torch else "PyTorch with CUDA is not here"
        return out | (of_targets(targets, reason) if targets else of_targets({}))

    def lines(self, lines: dict[str, Callable[[], dict[str, Any]]]) -> None:
        done = {h["name"] for h in self.found["host"]}
        for name, line in lines.items():
            if self.options.only not in name or name in done:
                continue
            if self.late(name):
                self.found["dropped"].append(name)
                continue
            self.found["begun"] = name
            try:
                result = line()
            except Exception as e:
                traceback.print_exc(limit=-4)
                result = {"error": said(e), "met": False}
            self.found["host"].append({"name": name, **result})
            self.found.pop("begun")

    def rows(self, meter: Meter, rows: Iterator[Row], cache: int) -> None:
        done = {r["name"] for r in self.found["rows"]}
        for row in rows:
            if self.options.only not in row.name or row.name in done:
                continue
            if self.late("ours"):
                self.found["dropped"].append(row.name)
                continue
            self.found["begun"] = row.name
            try:
                result = self.measure(meter, row, cache)
            except Exception as e:
                traceback.print_exc(limit=-4)
                result = {"name": row.name, "error": said(e), "met": False}
            self.found["rows"].append(result)
            self.found.pop("begun")
            meter.cp.get_default_memory_pool().free_all_blocks()
            if "error" in result:
                self.go_on_afresh(meter.cp)

    def go_on_afresh(self, cp: Any) -> None:
        """An illegal access ends all that a process can do on its device: the rows that are left run in another in its
        place."""
        try:
            cp.cuda.Device().synchronize()
        except Exception:
            state = Path(f"/tmp/benchmark-gpu-{os.getpid()}.json")
            state.write_text(json.dumps(self.found))
            sys.stdout.flush()
            arguments = [a for a in sys.argv[1:] if not a.startswith("--resume=")]
            os.execv(sys.executable, [sys.executable, __file__, *arguments, f"--resume={state}"])

    def watch(self) -> None:
        """End the process half a minute after its time, whatever it waits for, with what it has found."""

        def stop() -> None:
            self.found["stopped"] = f"the time was over while {self.found.get('begun', 'it began')} ran"
            try:
                self.report()
                sys.stdout.flush()
            finally:
                os._exit(1)

        if self.end is not None:
            timer = threading.Timer(max(0.0, self.end + 30 - time.time()), stop)
            timer.daemon = True
            timer.start()

    def report(self) -> int:
        """Write table and JSON; the status of the run."""
        self.found["spent"] = time.time() - self.found["start"]
        self.found["verdict"] = judge(self.found)
        if self.options.json:
            whole = Path(f"{self.options.json}.part")
            whole.write_text(json.dumps(self.found, indent=1))
            whole.replace(self.options.json)
        show(self.found)
        return self.found["verdict"]["status"]


def show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=160, markup=False, highlight=False)
    console.print(f"{found.get('device')}, copy {found.get('copy', 0) / 1e12:.2f} TB/s, {found['spent']:.0f} s")
    for name, there in found.get("versions", {}).items():
        console.print(f"{name} {there}" if there else f"{name}: missing, its columns are empty")
    for c in found["checks"]:
        mark = "✓" if c["ok"] else "✗ NOT AS IT SHOULD BE: do not believe the times"
        console.print(f"check: {c['name']}: {c['found']:.3g}, wanted {c['from']:g} to {c['to']:g} {mark}")
    table = Table("work", "time", "by", "TB/s", "of the copy", "targets", "peers (our time over theirs)")

    for r in found["rows"]:
        if "error" in r:
            table.add_row(escape(r["name"]), "failed", "", "", "", "✗", escape(r["error"]))
            continue
        peers = [
            f"{name} {p['ratio']:.2f}"
            if "ratio" in p
            else escape(f"{name} failed ✗: {p['error']}" if "error" in p else f"{name} dropped")
            for name, p in r["peers"].items()
        ]
        table.add_row(
            escape(r["name"]),
            f"{r['seconds'] * 1e6:.1f} us",
            r["by"],
            f"{r['nbytes'] / r['seconds'] / 1e12:.2f}",
            f"{r['share']:.0%}",
            goals(r),
            ", ".join(peers),
        )
    for name in found["dropped"]:
        table.add_row(escape(name), "dropped", "", "", "", "", "no time was left")
    console.print(table)
    for h in found["host"]:
        console.print(line_of_host(h))
    for line in told(found["verdict"]):
        console.print(line)


def missing() -> str | None:
    """What this benchmark needs and does not find."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed: pip install 'meshtape[cuda13]' (or cuda12)"
    return (
        None if cupy.is_available() else "CuPy is installed, but no CUDA driver with a device answers on this machine"
    )


def measure_all(run: Run) -> None:
    """The clock, the lines of the host, and the rows, as far as there is time."""
    options = run.options
    cp = launch.runner().xp
    properties = cp.cuda.runtime.getDeviceProperties(0)
    torch, jax = importable("torch"), importable("jax")
    t = Torch(torch, not options.no_compile) if torch is not None and torch.cuda.is_available() else None
    jax = jax if jax is not None and any(d.platform == "gpu" for d in jax.devices()) else None
    versions = {"PyTorch with CUDA": t and torch.__version__, "JAX with CUDA": jax and jax.__version__}
    run.found |= {"device": properties["name"].decode(), "versions": versions | {"CuPy": cp.__version__}}
    run.found["tiny"] = options.tiny
    meter = Meter(cp, options.tiny)
    run.found["checks"] += checks(meter)  # those of the process before, too: its rows are by its clock
    run.found["copy"] = meter.copy
    cp.get_default_memory_pool().free_all_blocks()
    eager = t and Torch(t.torch, t.compiled and not options.quick)
    run.lines(
        {
            "x + x, 8 elements, of the host": partial(overhead, cp),
            "a step of 100 small ops": partial(graphs, cp),
            "a step of a decoder, bfloat16": partial(decoder_step, cp, t, options.tiny, DTYPES[1]),
            "memory of causal attention, bfloat16": partial(attention_memory, cp, t, options.tiny, DTYPES[1]),
            "a step of a decoder, float32": partial(decoder_step, cp, eager, options.tiny, DTYPES[0]),
        }
    )
    cache = 0 if options.tiny else properties["l2CacheSize"]
    run.rows(meter, all_rows(Maker(), t, jax, options.quick, options.tiny), cache)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], epilog=STATUS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes and dtypes, within 8 minutes")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--json", help="a file for all that is found")
    parser.add_argument("--budget", type=float, help=f"seconds that rows may begin in (with --quick: {QUICK:.0f})")
    parser.add_argument("--tiny", action="store_true", help="shapes of a few elements, which measure nothing")
    parser.add_argument("--resume", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if (reason := missing()) is not None:
        sys.exit(f"benchmarks/gpu.py measures kernels on a GPU, and there is none to measure on: {reason}")
    if options.quick and options.budget is None:
        options.budget = QUICK
    before = json.loads(Path(options.resume).read_text()) if options.resume else None
    run = Run(options, before)
    run.watch()
    try:
        measure_all(run)
    except BaseException as e:  # what was found until then is left, also where the process is told to end
        run.found["stopped"] = said(e)
        run.report()
        raise
    return run.report()


if __name__ == "__main__":
    sys.exit(main())
