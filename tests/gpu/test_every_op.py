"""Every op on a GPU against the CPU: values, shapes, dtypes and errors, forward and backward, in every dtype that the
op takes."""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from op_samples import SAMPLES, calls, differentiable, recast, rng_of, slopes

import meshtape as mt
from meshtape.arrays.core.dispatch import apply
from meshtape.arrays.core.op import Op

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(t) for t in (np.float64, np.float32, np.float16)] + [BFLOAT16]
OTHERS = [np.dtype(t) for t in (np.complex64, np.int8, np.uint64, np.bool_)]
# Factors of a decomposition have no unique signs; what is on the last places of an op that amplifies errors differs
# too.
PHASES = {"eig", "eigh", "svd", "qr", "eigvals"}
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2, "complex64": 1e-4, "complex128": 1e-9}

OF_FLOATS = {"adjugate", "dropout", "dropout_add", "lazy_adam", "log_softmax", "softmax"}
"""Ops that public functions call with floats alone, as are those of derivatives (``…_backward``): integers are refused or
widened before. Of integers they would make fractions, and cast them back: C leaves open what a negative or infinite float
is among unsigned ones, and an x86 and CUDA differ."""

ACCUMULATED = ("float32", "float16", "bfloat16")
"""Of these a float64 result has the digits of float32."""

KNOWN = {
    # By op: differences that stay, in their own words, and why.
    "divide": r"complex64.*: \[nan\+nanj.* for \[inf",  # CuPy's complex number over zero is NaN, NumPy's infinite
    "erf": r"\[erf\] of complex64 is computed on a CPU alone",
    "gelu": r"\[erf\] of complex64 is computed on a CPU alone",
    "gelu_backward": r"\[erf\] of complex64 is computed on a CPU alone",
    "index_max": r"uint64\[4, 6\], 0\.0",  # x.at refuses a float's maximum in integers before it comes to the op
    "layer_norm": r"\(float32.*float64",  # a CPU normalises in float32 before the weights make it float64, a GPU in float64
    "round_to": r"is not defined for bfloat16|uint64\[5\], -1",  # mt.round calls it with float32; no uint64 is 2**64 - 1 in whole tens
}


def outcome(call: Callable[..., Any], args: tuple[Any, ...], device: str) -> Any:
    """What the call gives there: a list of arrays, or the error it raises."""
    with mt.use_device(device), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            out = call(*(mt.asarray(a) if isinstance(a, np.ndarray) else a for a in args))
        except Exception as e:
            return e
        return [o for o in mt.tree.flatten(out)[0] if isinstance(o, mt.Array)]


def by_its_rule(op: Any, params: dict[str, Any], args: tuple[Any, ...], want: Any) -> bool:
    """Whether the CPU gives what the op's own rule says: in other dtypes no public function calls it."""
    if isinstance(want, Exception):
        return False
    avals = tuple(mt.arrays.core.op.ShapeDtype(a.shape, a.dtype) if isinstance(a, np.ndarray) else a for a in args)
    return [w.dtype for w in want] == [a.dtype for a in op.avals(avals, params)]


def differences(
    name: str, call: Callable[..., Any], args: tuple[Any, ...], values: bool = True, rule: Any = None
) -> Iterator[str]:
    what = f"{name}({', '.join(f'{a.dtype}{list(a.shape)}' if isinstance(a, np.ndarray) else repr(a) for a in args)})"
    want = outcome(call, args, "cpu")
    if rule is not None and not by_its_rule(*rule, args, want):
        return
    got = outcome(call, args, "cuda:0")
    if isinstance(want, Exception) or isinstance(got, Exception):
        if type(want) is not type(got):
            yield f"{what}: {_said(got)}, on the CPU {_said(want)}"
        return
    floats = {a.dtype.name for a in args if isinstance(a, np.ndarray)} & set(ACCUMULATED)
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        if (str(g.device), g.dtype, g.shape) != ("cuda:0", w.dtype, w.shape):
            yield f"{what}: result {k} is {g.dtype}{list(g.shape)} on {g.device}, on the CPU {w.dtype}{list(w.shape)}"
        elif values and (wrong := _apart(g.numpy(), w.numpy(), floats)):
            yield f"{what}: result {k}: {wrong}"


def _said(x: Any) -> str:
    return f"{type(x).__name__}: {str(x)[:300]}" if isinstance(x, Exception) else "a result"


def _apart(g: np.ndarray, w: np.ndarray, floats: set[str]) -> str:
    if w.dtype.name not in TOLERANCE:
        return "" if np.array_equal(g, w) else f"{g.ravel()[:6]} for {w.ravel()[:6]}"
    tolerance = max(TOLERANCE[w.dtype.name], 1e-6 if floats else 0)
    wide = np.complex128 if w.dtype.kind == "c" else np.float64
    g, w = g.astype(wide), w.astype(wide)
    bound = tolerance * max(1.0, float(np.abs(w[np.isfinite(w)]).max(initial=0)))
    with np.errstate(all="ignore"):
        near = (np.abs(g - w) <= bound) | (g == w) | (np.isnan(g) & np.isnan(w))
    return "" if near.all() else f"{g[~near][:4]} for {w[~near][:4]}, {int((~near).sum())} of {near.size}"


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_calls(name: str) -> None:
    found, seen, op = [], set(), mt.OPS[name]
    others = [t for t in OTHERS if t.kind == "c"] if name in OF_FLOATS or name.endswith("_backward") else OTHERS
    for args, params in calls(name):
        for dtype in [None, *FLOATS, *others]:
            cast = args if dtype is None else tuple(recast(a, dtype) for a in args)
            key = repr([(a.shape, a.dtype) if isinstance(a, np.ndarray) else a for a in cast]) + repr(params)
            if key in seen:
                continue
            seen.add(key)
            found += differences(name, lambda *xs, p=params: apply(op, xs, p), cast, name not in PHASES, (op, params))
    found = [f for f in found if not re.search(KNOWN.get(name, "$^"), f)]
    assert not found, "\n".join([f"{len(found)} differences", *found[:40]])


LAYOUTS: dict[str, Callable[[mt.Array], mt.Array]] = {
    "with gaps": lambda x: mt.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 2)])[..., 1:-2],
    "turned": lambda x: mt.permute_dims(mt.stack([mt.permute_dims(x, range(x.ndim)[::-1])])[0], range(x.ndim)[::-1]),
    "backwards": lambda x: mt.flip(x)[(slice(None, None, -1),) * x.ndim],
    "each second": lambda x: mt.repeat(x, 2, axis=0)[::2],
}


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_layouts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 and bfloat16, by the kernels for calls of many elements where there are some."""
    monkeypatch.setattr(Op, "large", 1)
    found, op = [], mt.OPS[name]

    def laid(layout: str, x: Any) -> Any:
        return LAYOUTS[layout](x) if isinstance(x, mt.Array) and x.ndim and x.dtype.itemsize > 1 else x

    def call(layout: str, params: Any, *xs: Any) -> Any:
        return apply(op, tuple(laid(layout, x) for x in xs), params)

    for (args, params), dtype, layout in itertools.product(calls(name), (np.dtype(np.float32), BFLOAT16), LAYOUTS):
        cast = tuple(recast(a, dtype) for a in args)
        found += differences(name, functools.partial(call, layout, params), cast, name not in PHASES, (op, params))
    found = [f for f in found if not re.search(KNOWN.get(name, "$^"), f)]
    assert not found, "\n".join([f"{len(found)} differences", *found[:40]])


def pulled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Values and cotangents of a call, the seed a fixed wave."""

    def call(*args: Any) -> Any:
        values, pull = mt.vjp(lambda *xs: [o for o in mt.tree.flatten(fn(*xs))[0] if isinstance(o, mt.Array)], *args)
        waves = [np.cos(np.arange(v.size) * 0.7).reshape(v.shape) for v in values]
        return values, pull([mt.asarray(w.astype(v.dtype)) for w, v in zip(waves, values, strict=True)])

    return call


@pytest.mark.parametrize("name", differentiable())
def test_derivatives(name: str) -> None:
    found = []
    rng = rng_of(name)
    for sample in slopes(name):
        args = sample.make(rng, exact=False)
        for dtype in FLOATS:
            found += differences(name, pulled(sample.fn), tuple(recast(a, dtype) for a in args))
    found = [f for f in found if not re.search(KNOWN.get(name, "$^"), f)]
    assert not found, "\n".join([f"{len(found)} differences", *found[:40]])
