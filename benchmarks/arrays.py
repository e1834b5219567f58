"""Arrays against NumPy and PyTorch, on one thread: ``python benchmarks/arrays.py``.

Small arrays show what a call costs beside the work; large ones, that the work is NumPy's own. The row of NumPy against itself says
how far two equal runs differ on this machine. Where there is a CUDA device and CuPy, the large rows run there too, against CuPy.
"""

from __future__ import annotations

import timing  # first: it sets the number of threads

# isort: split
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

import meshtape as mt

SMALL: dict[str, Callable[..., Any]] = {
    "x + y": operator.add,
    "x + 1.5": lambda x, y: x + 1.5,
    "x at a slice": lambda x, y: x[2:5],
    "x at a list": lambda x, y: x[[0, 2, 5]],
    "write one element": lambda x, y: operator.setitem(x, 3, 1.0),
    "x += y": operator.iadd,
}


LARGE: dict[str, Any] = {"rounds": 15, "seconds": 1.5}
"""Many rounds, because each of them may meet another process on its way through memory."""


def small_rows(report: timing.Report) -> None:
    """Eight elements: nothing but overhead."""
    x, y = np.linspace(0.1, 0.9, 8), np.linspace(1.0, 2.0, 8)
    a, b = mt.asarray(x), mt.asarray(y)
    torch = timing.peer("torch")
    if torch is not None:
        torch.set_num_threads(1)
        s, t = torch.from_numpy(x), torch.from_numpy(y)
    for name, fn in SMALL.items():
        # x += y is bounded by adding zeros.
        z, c = (np.zeros(8), mt.zeros(8)) if name == "x += y" else (y, b)
        u = None if torch is None else torch.zeros(8, dtype=torch.float64) if name == "x += y" else t
        report.row(
            f"{name}, 8 elements",
            lambda fn=fn, c=c: fn(a, c),
            {
                "NumPy": (lambda fn=fn, z=z: fn(x, z), None),
                "PyTorch": (None if torch is None else lambda fn=fn, u=u: fn(s, u), 1.0),
            },
            unit="us",
        )
    for name, ours, theirs, torchs in (
        ("exp", mt.exp, np.exp, "exp"),
        ("sum", mt.sum, np.sum, "sum"),
        ("reshape", lambda x: mt.reshape(x, (2, 4)), lambda x: np.reshape(x, (2, 4)), "reshape"),
    ):
        of_torch = None if torch is None else getattr(torch, torchs)
        args = ((2, 4),) if name == "reshape" else ()
        report.row(
            f"{name}, 8 elements",
            lambda f=ours: f(a),
            {
                "NumPy": (lambda f=theirs: f(x), None),
                "PyTorch": (None if torch is None else lambda f=of_torch, args=args: f(s, *args), 1.0),
            },
            unit="us",
        )


def large_rows(report: timing.Report, xp: Any, where: str, label: str) -> None:
    """Ten million elements: the backend does the work."""
    rng = np.random.default_rng(0)
    host = rng.standard_normal(10_000_000)
    mask, ids = host > 0.5, rng.integers(0, host.size, 1_000_000)
    square = rng.standard_normal((1500, 1500))
    x, m, i, s = (xp.asarray(h) for h in (host, mask, ids, square))
    a, am, ai, q = (mt.asarray(h, device=where) for h in (host, mask, ids, square))
    done = (lambda r: r) if xp is np else (lambda r: xp.cuda.get_current_stream().synchronize())
    rows: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
        ("x + x", lambda: a + a, lambda: x + x),
        ("exp", lambda: mt.exp(a), lambda: xp.exp(x)),
        ("x *= 1.0", lambda: operator.imul(a, 1.0), lambda: operator.imul(x, 1.0)),
        ("sum", lambda: mt.sum(a), lambda: xp.sum(x)),
        ("max", lambda: mt.max(a), lambda: xp.max(x)),
        ("sort", lambda: mt.sort(a), lambda: xp.sort(x)),
        ("cumulative_sum", lambda: mt.cumulative_sum(a), lambda: xp.cumsum(x)),
        ("x at a slice", lambda: a[1::2], lambda: x[1::2]),
        ("x at a mask", lambda: a[am], lambda: x[m]),
        ("x at 1e6 indices", lambda: a[ai], lambda: x[i]),
        ("matmul 1500 x 1500", lambda: q @ q, lambda: s @ s),
    ]
    report.row(
        f"x + x by {xp.__name__}, {label}", lambda: done(x + x), {xp.__name__: (lambda: done(x + x), None)}, **LARGE
    )
    for name, ours, theirs in rows:
        report.row(
            f"{name}, {label}",
            lambda f=ours: done(f()),
            {xp.__name__: (lambda f=theirs: done(f()), None if name == "x at a slice" else 1.05)},
            **LARGE,
        )


def main() -> None:
    report = timing.Report("arrays, one thread")
    small_rows(report)
    large_rows(report, np, "cpu", "1e7, CPU")
    if len(mt.devices()) > 1:
        large_rows(report, timing.peer("cupy"), "cuda:0", "1e7, CUDA")
    report.show()


if __name__ == "__main__":
    main()
