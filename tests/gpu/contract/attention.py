"""Attention by cuDNN, whose frontend NumPy stands in for: values, gradients, and what the library is asked for."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import cudnn as frontend
import cupy
import numpy as np
from cuda.pathfinder import load_nvidia_dynamic_lib

import meshtape as mt
from meshtape.arrays.core.errors import BackendError
from meshtape.arrays.kernels.cudnn import attention as cudnn_attention

CASES: Any = (
    # Of queries and keys the shapes, the columns of the values, and whether attention is causal.
    ((2, 2, 40, 16), (2, 2, 40, 16), 16, True),
    ((2, 4, 33, 24), (2, 2, 50, 24), 8, False),  # grouped
    ((1, 4, 50, 8), (1, 2, 32, 8), 16, True),
    ((3, 32, 8), (3, 34, 8), 8, True),
    ((32, 16), (32, 16), 16, False),
)
RNG = np.random.default_rng(0)


def hosts(case: Any, dtype: Any) -> list[np.ndarray]:
    q, k, e, _ = case
    return [RNG.standard_normal(s).astype(dtype) for s in (q, k, (*k[:-1], e), (*q[:-1], e))]


def placed(host: np.ndarray, layout: str = "packed") -> Any:
    """In the memory of a GPU: packed, or with the heads of a row beside each other, and gaps."""
    if layout == "heads last" and host.ndim > 2:
        moved = mt.asarray(np.moveaxis(host, -3, -2).copy(), device="cuda:0")
        return mt.moveaxis(mt.concat([moved, moved], axis=-1)[..., : host.shape[-1]], -2, -3)
    return mt.asarray(host, device="cuda:0")


def both(q: Any, k: Any, v: Any, g: Any, causal: bool) -> list[Any]:
    """The result and its gradients."""
    y, pull = mt.vjp(lambda *x: mt.nn.scaled_dot_product_attention(*x, is_causal=causal), q, k, v)
    return [y, *pull(g)]


def ran(fn: Callable[..., Any], *arguments: Any) -> tuple[list[Any], Any]:
    """The plans that a call runs, and its result."""
    first = len(frontend.launched)
    result = fn(*arguments)
    return [frontend.planned[n] for n in frontend.launched[first:]], result


def differences(got: Any, want: Any) -> list[str]:
    found = []
    for which, x, y in zip("oqkv", got, want, strict=True):
        a, b = (z.numpy().astype(np.float64) for z in (x, y))
        same = (x.dtype, x.shape) == (y.dtype, y.shape) and np.array_equal(np.isfinite(a), np.isfinite(b))
        a, b = np.nan_to_num(a), np.nan_to_num(b)
        if not same or not np.allclose(a, b, 2e-2, 2e-2 * abs(b).max()):
            found.append(which)
    return found


def fresh() -> None:
    for cached in (cudnn_attention._plan, cudnn_attention._agrees):
        cached.cache_clear()


def values() -> list[str]:
    """Cases that differ from the CPU's, or went another way."""
    found = []
    for dtype, case in itertools.product((np.float16, mt.bfloat16), CASES):
        given = hosts(case, dtype)
        want = both(*(mt.asarray(h, device="cpu") for h in given), case[3])
        for layout in ("packed", "heads last"):
            fresh()
            plans, got = ran(both, *(placed(h, layout) for h in given), case[3])
            wrong = [
                *differences(got, want),
                *([] if [p[0] for p in plans[-2:]] == ["sdpa", "sdpa_backward"] else plans),
            ]
            found += [f"{x} of {np.dtype(dtype).name} {layout} {case}" for x in wrong]
    return found


def not_finite() -> list[str]:
    """Elements that are not finite reach what they reach on a CPU, and nothing of another batch or head. Of a score
    that is infinite cuDNN makes a row of NaN."""
    found = []
    for which, value, causal in itertools.product(range(4), (math.nan, math.inf), (True, False)):
        given = hosts(((2, 2, 40, 16), (2, 2, 40, 16), 16, causal), mt.bfloat16)
        given[which][1, 0, 30, 3] = value
        want = both(*(mt.asarray(h, device="cpu") for h in given), causal)
        plans, got = ran(both, *map(placed, given), causal)
        for name, x, y in zip("oqkv", got, want, strict=True):
            a, b = (np.isfinite(z.numpy().astype(np.float64)) for z in (x, y))
            more = (b & ~a).any() and value != math.inf
            if (
                [p[0] for p in plans[-2:]] != ["sdpa", "sdpa_backward"]
                or not a[0].all()
                or not a[1, 1].all()
                or more
                or (a & ~b).any()
            ):
                found.append(f"{name} of {which} {value} {causal}")
    return found


def other_ways() -> dict[str, Any]:
    """What goes to cuDNN and what does not, and how it is told where it is wrong."""
    given = [placed(h) for h in hosts(((2, 2, 40, 16), (2, 2, 40, 16), 16, True), mt.bfloat16)]
    q, k, v, g = (x._buf for x in given)
    out: dict[str, Any] = {}

    def forward(*operands: Any, diagonal: int | None = 0) -> Any:
        return cudnn_attention.attention(cupy, *(operands or (q, k, v)), 0.25, diagonal)

    def backward() -> Any:
        return cudnn_attention.attention_backward(cupy, g, q, k, v, *forward(), 0.25, 0)

    wide = [x.astype(np.float32) for x in (q, k, v)]
    calls = {
        "again": (),
        "few queries": (q[:, :, :31], k, v),
        "odd columns": (q[..., :15], k[..., :15], v),
        "wide numbers": wide,
        "two dtypes": (q, k, v.astype(np.float16)),
        "keys for all batches": (q, k[:1], v[:1]),
    }
    out["served"] = [name for name, operands in calls.items() if forward(*operands) is not None]
    out["served"] += [n for n in (None, 0, 1, 38, 39, 60) if forward(diagonal=n) is not None]
    with mt.use_deterministic(False):
        out["in any order"] = [p[3] for p in ran(backward)[0]][-1]
    limit, cudnn_attention.WORKSPACE = cudnn_attention.WORKSPACE, 6300  # one head of one batch
    fresh()
    want = [x.get() for x in backward()]
    plans, got = ran(backward)
    out["parts"] = [p[:2] for p in plans], all(np.array_equal(x.get(), y) for x, y in zip(got, want, strict=True))
    cudnn_attention.WORKSPACE = 1000
    cudnn_attention._plan.cache_clear()
    out["no memory"] = forward() is None, backward() is None
    cudnn_attention.WORKSPACE = limit
    mistakes = {
        "wrong": {"scale": 1.1},
        "hidden": {"hidden": 1},
        "refused": {"refuses": "sdpa_backward"},
        "broken": {"fails": "sdpa_backward"},
    }
    for name, mistake in mistakes.items():
        fresh()
        frontend.mistakes.update(mistake)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            out[name] = forward() is None and forward() is None, [str(w.message).split(" (")[0] for w in told]
        frontend.mistakes.clear()
    fresh()
    forward()
    frontend.mistakes["fails"] = "sdpa"
    try:
        forward()
    except BackendError as e:
        out["fails"] = str(e)
    frontend.mistakes.clear()
    return out


def graphs() -> dict[str, Any]:
    """A compiled step as a CUDA graph, and the calls of an eager one."""
    given = [placed(h, "heads last") for h in hosts(CASES[0], mt.bfloat16)]
    want, graph = both(*given, True), mt.compile(lambda *x: both(*x, True), cuda_graph=True)
    fresh()
    out = {"first": differences(graph(*given), want)}
    with mt.host_waits() as waits:
        plans, again = ran(graph, *given)
    return out | {"again": differences(again, want), "waits": waits, "plans": [p[0] for p in plans]}


def sweep(fake: Any) -> dict[str, Any]:
    frontend.start(fake.libraries, load_nvidia_dynamic_lib("cudnn").abs_path, fake.convolutions._captured)
    cudnn_attention.LEAST = 32
    if fake.kernels is None:  # a copy that tells which kernels are asked for; its numbers mean nothing
        errors = cudnn_attention._errors
        cudnn_attention._errors = lambda *about: [0.0 for _ in errors(*about)]
    out: dict[str, Any] = {}
    with mt.use_device("cuda:0"):
        out["values"] = values()
        out["not finite"] = not_finite()
        out["graph"] = graphs()
        out |= other_ways()
    return out | {"failures": fake.libraries.failures}
