"""Gradients against PyTorch and HIPS autograd, on one thread: ``python benchmarks/autodiff.py [--only GROUP]``."""

from __future__ import annotations

import timing  # first: it sets the number of threads

# isort: split
import argparse

import installed

GROUPS = ("chain", "mlp", "ops", "gather", "columns", "fusion")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=GROUPS, help="one group of rows")
    OPTIONS = installed.options(parser)

# isort: split
from typing import Any

import numpy as np

import meshtape as mt

torch, autograd = timing.peer("torch"), timing.peer("autograd")
if torch is not None:
    torch.set_num_threads(1)


def chain(x):  # 100 ops on 8 elements, numbers beside arrays
    for _ in range(50):
        x = x * 1.0001
        x = x + 0.5
    return x.sum()


def waves(x, y, sin):  # 100 ops on 8 elements, two arrays and a function
    for _ in range(50):
        x = sin(y * x)
    return x.sum()


def chain_row(report: timing.Report) -> None:
    x, y = mt.ones(8), mt.full(8, 1.1)
    numbers, sines = mt.value_and_grad(chain), mt.value_and_grad(lambda x, y: waves(x, y, mt.sin), argnums=(0, 1))
    peers: list[dict[str, tuple[Any, float]]] = [{"PyTorch eager": (None, 0.5), "autograd": (None, 0.25)} for _ in "ab"]
    if torch is not None:
        tx, ty = (torch.full((8,), v, dtype=torch.float64, requires_grad=True) for v in (1.0, 1.1))
        peers[0]["PyTorch eager"] = lambda: torch.autograd.grad(chain(tx), tx), 0.5
        peers[1]["PyTorch eager"] = lambda: torch.autograd.grad(waves(tx, ty, torch.sin), (tx, ty)), 0.5
    if autograd is not None:
        nx, ny = np.ones(8), np.full(8, 1.1)
        slope = autograd.grad(lambda x: autograd.numpy.sum(_np_chain(x)))
        slopes = autograd.grad(lambda both: autograd.numpy.sum(_np_waves(*both)))
        peers[0]["autograd"] = lambda: slope(nx), 0.25
        peers[1]["autograd"] = lambda: slopes((nx, ny)), 0.25
    per_op: Any = {"scale": 0.01, "unit": "us"}
    report.row("100-op chain, forward + backward, per op", lambda: numbers(x), peers[0], **per_op)
    report.row("100-op chain of sin(y * x), forward + backward, per op", lambda: sines(x, y), peers[1], **per_op)
    compiled = mt.compile(numbers)
    report.row(
        "the same of numbers, compiled, per op",
        lambda: compiled(x),
        {"eager tape": (lambda: numbers(x), 0.5)},
        **per_op,
    )


def _np_chain(x):
    for _ in range(50):
        x = x * 1.0001
        x = x + 0.5
    return x


def _np_waves(x, y):
    for _ in range(50):
        x = autograd.numpy.sin(y * x)
    return x


def mlp_row(report: timing.Report) -> None:
    rng = np.random.default_rng(0)
    shapes = {"w1": (784, 256), "b1": (256,), "w2": (256, 10), "b2": (10,)}
    host = {k: (rng.standard_normal(s) * 0.05).astype(np.float32) for k, s in shapes.items()}
    x, y = rng.standard_normal((128, 784)).astype(np.float32), rng.integers(0, 10, 128)
    params = {k: mt.asarray(v) for k, v in host.items()}
    mx, my = mt.asarray(x), mt.asarray(y)

    def loss(p):
        h = mt.tanh(mx @ p["w1"] + p["b1"])
        return mt.nn.cross_entropy(h @ p["w2"] + p["b2"], my)

    eager = mt.value_and_grad(loss)
    compiled = mt.compile(eager)
    t = None
    if torch is not None:
        tp = {k: torch.tensor(v, requires_grad=True) for k, v in host.items()}
        tx, ty = torch.tensor(x), torch.tensor(y)

        def t():
            h = torch.tanh(tx @ tp["w1"] + tp["b1"])
            out = torch.nn.functional.cross_entropy(h @ tp["w2"] + tp["b2"], ty)
            return torch.autograd.grad(out, list(tp.values()))

    # Nearly all of it are two products that take both the same time: what is left to see needs many short turns.
    turns: Any = {"seconds": 6.0, "rounds": 151}
    report.row("MLP 784-256-10, batch 128, eager", lambda: eager(params), {"PyTorch eager": (t, 1.0)}, **turns)
    report.row("the same, compiled", lambda: compiled(params), {"PyTorch eager": (t, 1.0)}, **turns)


def op_rows(report: timing.Report) -> None:
    x = np.random.default_rng(0).standard_normal((4096, 1024)).astype(np.float32)
    mx = mt.asarray(x)
    w, b = mt.ones(1024, dtype=mt.float32), mt.zeros(1024, dtype=mt.float32)
    ours = {
        "layer_norm": lambda x: mt.sum(mt.layer_norm(x, 1024, w, b)),
        "softmax": lambda x: mt.sum(mt.nn.softmax(x)),
        "gelu": lambda x: mt.sum(mt.nn.gelu(x)),
    }
    theirs = {}
    if torch is not None:
        F = torch.nn.functional
        tw, tb = torch.ones(1024), torch.zeros(1024)
        theirs = {
            "layer_norm": lambda x: F.layer_norm(x, (1024,), tw, tb),
            "softmax": lambda x: F.softmax(x, dim=-1),
            "gelu": F.gelu,
        }
        tx = torch.tensor(x, requires_grad=True)
    for name, fn in ours.items():
        slope = mt.grad(fn)
        t = None
        if torch is not None:

            def t(f=theirs[name]):
                return torch.autograd.grad(f(tx).sum(), tx)

        report.row(f"{name} (4096, 1024), forward + backward", lambda slope=slope: slope(mx), {"PyTorch": (t, 1.5)})


def gather_row(report: timing.Report) -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((1_000_000, 64)).astype(np.float32)
    ids = rng.integers(0, 20_000, 100_000)
    mtable, mids = mt.asarray(table), mt.asarray(ids)
    slope = mt.grad(lambda t: mt.sum(t[mids]))
    t = None
    if torch is not None:
        tt, ti = torch.tensor(table, requires_grad=True), torch.tensor(ids)

        def t():
            return torch.autograd.grad(tt[ti].sum(), tt)

    work = "gather 1e5 rows of 1e6 x 64"
    report.row(f"{work}, dense cotangent", lambda: np.asarray(slope(mtable)), {"PyTorch": (t, 0.5)}, rounds=3)
    report.row(f"{work}, (ids, rows)", lambda: mt.gradient_rows(slope(mtable)), {"PyTorch": (t, 0.1)}, rounds=3)


def column_row(report: timing.Report) -> None:
    """Reads along another dimension than the first."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((64, 1_000_000)).astype(np.float32)
    ids = rng.integers(0, 20_000, 100_000)
    mtable, mids = mt.asarray(table), mt.asarray(ids)
    slope = mt.grad(lambda t: mt.sum(t[:, mids]))
    t = None
    if torch is not None:
        tt, ti = torch.tensor(table, requires_grad=True), torch.tensor(ids)

        def t():
            return torch.autograd.grad(tt[:, ti].sum(), tt)

    work = "gather 1e5 columns of 64 x 1e6"
    report.row(f"{work}, dense cotangent", lambda: np.asarray(slope(mtable)), {"PyTorch": (t, 0.5)}, rounds=3)
    report.row(f"{work}, places and values", lambda: mt.sparse_gradient(slope(mtable)), {"PyTorch": (t, 0.3)}, rounds=3)


def fusion_row(report: timing.Report) -> None:
    x = np.random.default_rng(0).standard_normal(10_000_000)
    mx = mt.asarray(x, copy=False)

    def fn(x):
        for _ in range(5):
            x = x * 0.99
            x = x + 0.01
        return x

    compiled = mt.compile(fn)
    report.row("10 elementwise ops on 1e7, compiled", lambda: compiled(mx), {"NumPy": (lambda: fn(x), 0.35)}, rounds=3)


def main(only: str | None) -> None:
    groups = dict(zip(GROUPS, (chain_row, mlp_row, op_rows, gather_row, column_row, fusion_row), strict=True))
    report = timing.Report(f"autodiff, one thread, {installed.kernels()}")
    for name, rows in groups.items():
        if only in (None, name):
            rows(report)
    report.show()


if __name__ == "__main__":
    main(OPTIONS.only)
