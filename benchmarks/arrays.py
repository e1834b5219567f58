"""Arrays against NumPy and PyTorch, on one thread: ``python benchmarks/arrays.py``.

Small arrays show what a call costs beside the work; large ones, that the work is NumPy's own. The row of NumPy against
itself says how far two equal runs differ on this machine. Where there is a CUDA device and CuPy, the large rows run
there too, against CuPy.
"""

from __future__ import annotations

import timing  # first: it sets the number of threads

# isort: split
import argparse

import installed

if __name__ == "__main__":
    installed.options(argparse.ArgumentParser(description=__doc__))

# isort: split
import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

import meshtape as mt

# Namespace, two vectors, two matrices, a mask, indices.
SMALL: dict[str, Callable[..., Any]] = {
    "x + y": lambda xp, x, y, s, t, m, i: x + y,
    "x + 1.5": lambda xp, x, y, s, t, m, i: x + 1.5,
    "x += y": lambda xp, x, y, s, t, m, i: operator.iadd(x, y),
    "exp": lambda xp, x, y, s, t, m, i: xp.exp(x),
    "maximum": lambda xp, x, y, s, t, m, i: xp.maximum(x, y),
    "where": lambda xp, x, y, s, t, m, i: xp.where(m, x, y),
    "sum": lambda xp, x, y, s, t, m, i: xp.sum(x),
    "max": lambda xp, x, y, s, t, m, i: xp.max(x),
    "mean": lambda xp, x, y, s, t, m, i: xp.mean(x),
    "sum of rows": lambda xp, x, y, s, t, m, i: xp.sum(s, axis=1),
    "argmax": lambda xp, x, y, s, t, m, i: xp.argmax(x),
    "matrix times matrix": lambda xp, x, y, s, t, m, i: s @ t,
    "reshape": lambda xp, x, y, s, t, m, i: xp.reshape(x, (2, 4)),
    "mT": lambda xp, x, y, s, t, m, i: s.mT,
    "concat": lambda xp, x, y, s, t, m, i: xp.concat([x, y]),
    "x at an int": lambda xp, x, y, s, t, m, i: x[3],
    "x at a slice": lambda xp, x, y, s, t, m, i: x[2:5],
    "x at an int and a slice": lambda xp, x, y, s, t, m, i: s[0, 1:3],
    "x at a list": lambda xp, x, y, s, t, m, i: x[[0, 2, 5]],
    "x at indices": lambda xp, x, y, s, t, m, i: x[i],
    "x at a mask": lambda xp, x, y, s, t, m, i: x[m],
    "take": lambda xp, x, y, s, t, m, i: xp.take(x, i),
    "write one element": lambda xp, x, y, s, t, m, i: operator.setitem(x, 3, 1.0),
    "write a slice": lambda xp, x, y, s, t, m, i: operator.setitem(x, slice(None), y),
    "write at a mask": lambda xp, x, y, s, t, m, i: operator.setitem(x, m, 1.0),
}


LARGE: dict[str, Any] = {"rounds": 15, "seconds": 1.5}
"""Many rounds, because each of them may meet another process on its way through memory."""


def small_rows(report: timing.Report) -> None:
    """Eight elements: nothing but overhead."""
    x, y = np.linspace(0.1, 0.9, 8), np.zeros(8)  # (what is added again and again is zero)
    hosts = (x, y, x.reshape(2, 4), x.reshape(4, 2), x > 0.5, np.array([0, 2, 5]))
    torch = timing.peer("torch")
    if torch is not None:
        torch.set_num_threads(1)
    for name, fn in SMALL.items():
        peers: dict[str, tuple[Any, float | None]] = {"NumPy": (functools.partial(fn, np, *map(np.array, hosts)), None)}
        there = None if torch is None else functools.partial(fn, torch, *(torch.tensor(h) for h in hosts))
        peers["PyTorch"] = (there, 1.0)
        ours = functools.partial(fn, mt, *map(mt.asarray, hosts))
        report.row(f"{name}, 8 elements", ours, peers, unit="us", over={"NumPy": 1.0}, rounds=25)


def large_rows(report: timing.Report, xp: Any, label: str) -> None:
    """Ten million elements: the backend does the work."""
    rng = np.random.default_rng(0)
    host = rng.standard_normal(10_000_000)
    mask, ids = host > 0.5, rng.integers(0, host.size, 1_000_000)
    square = rng.standard_normal((1500, 1500))
    x, m, i, s = (xp.asarray(h) for h in (host, mask, ids, square))
    # The same memory for both: where an array lies in it makes more difference than who reads it.
    a, am, ai, q = (mt.asarray(h, copy=False) for h in (x, m, i, s))
    xrows, rows = x.reshape(10_000, 1_000), mt.reshape(a, (10_000, 1_000))
    done = (lambda r: r) if xp is np else (lambda r: xp.cuda.get_current_stream().synchronize())
    work: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
        ("x + x", lambda: a + a, lambda: x + x),
        ("exp", lambda: mt.exp(a), lambda: xp.exp(x)),
        ("sum", lambda: mt.sum(a), lambda: xp.sum(x)),
        ("max", lambda: mt.max(a), lambda: xp.max(x)),
        ("sort", lambda: mt.sort(a), lambda: xp.sort(x)),
        ("cumulative_sum", lambda: mt.cumulative_sum(a), lambda: xp.cumsum(x)),
        ("x at a slice", lambda: a[1::2], lambda: x[1::2]),
        ("x at a mask", lambda: a[am], lambda: x[m]),
        ("where by a mask", lambda: mt.where(am, a, 0.0), lambda: xp.where(m, x, 0.0)),
        ("x at 1e6 indices", lambda: a[ai], lambda: x[i]),
        ("matmul 1500 x 1500", lambda: q @ q, lambda: s @ s),
        ("sum of rows of (10000, 1000)", lambda: mt.sum(rows, axis=1), lambda: xp.sum(xrows, axis=1)),
        ("mean", lambda: mt.mean(a), lambda: xp.mean(x)),
        # From here on not the same memory any more: the first write takes a copy.
        ("x *= 1.0", lambda: operator.imul(a, 1.0), lambda: operator.imul(x, 1.0)),
        ("write at a mask", lambda: operator.setitem(a, am, 1.0), lambda: operator.setitem(x, m, 1.0)),
    ]
    report.row(
        f"x + x by {xp.__name__}, {label}", lambda: done(x + x), {xp.__name__: (lambda: done(x + x), None)}, **LARGE
    )
    for name, ours, theirs in work:
        report.row(
            f"{name}, {label}",
            lambda f=ours: done(f()),
            {xp.__name__: (lambda f=theirs: done(f()), None if name == "x at a slice" else 1.05)},
            **LARGE,
        )


def random_rows(report: timing.Report) -> None:
    """Ten million draws: ours are a function of a key and a place, NumPy's of all that were drawn before."""
    rng, key = np.random.default_rng(0), mt.random.key(0)
    n = 10_000_000
    for name, ours, theirs in (
        ("normals, float64", lambda: mt.random.normal(key, n), lambda: rng.standard_normal(n)),
        (
            "normals, float32",
            lambda: mt.random.normal(key, n, dtype=mt.float32),
            lambda: rng.standard_normal(n, dtype=np.float32),
        ),
        ("uniforms, float64", lambda: mt.random.uniform(key, n), lambda: rng.random(n)),
    ):
        report.row(f"{name}, 1e7", ours, {"numpy.random": (theirs, 3.0)}, rounds=7, seconds=2.0)


def main() -> None:
    report = timing.Report(f"arrays, one thread, {installed.kernels()}")
    small_rows(report)
    large_rows(report, np, "1e7, CPU")
    random_rows(report)
    if len(mt.devices()) > 1:
        large_rows(report, timing.peer("cupy"), "1e7, CUDA")
    report.show()


if __name__ == "__main__":
    main()
