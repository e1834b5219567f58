"""The derivative of every op is the same in single precision, in any memory layout, recorded, recomputed and
compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from op_samples import differentiable, recast, rng_of, slopes

import meshtape as mt


def calls(name: str) -> Iterator[tuple[int, Callable[..., Any], tuple[np.ndarray, ...]]]:
    rng = rng_of(name)
    for i, sample in enumerate(slopes(name)):
        yield i, sample.fn, tuple(sample.make(rng, exact=False))


def pulled(fn: Callable[..., Any], *args: Any) -> tuple[list[mt.Array], list[mt.Array | None]]:
    """Values, and cotangents of the arguments for seeds that differ from place to place."""
    values, pull = mt.vjp(lambda *xs: [o for o in mt.tree.flatten(fn(*xs))[0] if isinstance(o, mt.Array)], *args)
    return values, list(pull([seed(v) for v in values]))


def seed(v: mt.Array) -> mt.Array:
    w = np.cos(np.arange(v.size) * 0.7).reshape(v.shape)
    return mt.asarray((w * (1 + 0.5j) if v.dtype.kind == "c" else w).astype(v.dtype))


def near(got: Any, want: Any, tol: float, what: str) -> None:
    assert (got is None) == (want is None), what
    if got is not None:
        got, want = np.asarray(got), np.asarray(want)
        bound = tol * max(1.0, float(np.abs(want[np.isfinite(want)]).max(initial=0)))
        np.testing.assert_allclose(got, want, rtol=tol, atol=bound, err_msg=what)


@pytest.mark.parametrize("name", differentiable())
def test_in_single_precision(name: str) -> None:
    for i, fn, args in calls(name):
        short = [mt.asarray(recast(a, np.float32)) for a in args]
        wide = [mt.asarray(recast(np.asarray(x), np.float64)) for x in short]
        _, found = pulled(fn, *short)
        _, expected = pulled(fn, *wide)
        for k, (g, e, x) in enumerate(zip(found, expected, short, strict=True)):
            what = f"operand {k} of sample {i}"
            near(g, e, 2e-3, what)
            assert g is None or (g.dtype, g.shape) == (x.dtype, x.shape), what


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "columns first": lambda a: np.array(a, order="F"),
    "backwards": lambda a: np.flip(np.array(np.flip(a))) if a.ndim else np.array(a),
    "every second": lambda a: np.repeat(a, 2, axis=-1)[..., ::2] if a.ndim else np.array(a),
}


@pytest.mark.parametrize("name", differentiable())
def test_in_any_layout_and_of_arrays_that_cannot_be_written(name: str) -> None:
    for i, fn, args in calls(name):
        values, expected = pulled(fn, *map(mt.asarray, args))
        for layout, lay in LAYOUTS.items():
            laid = [lay(a) for a in args]
            for a in laid:
                a.flags.writeable = False
            got, found = pulled(fn, *(mt.asarray(a, copy=False) for a in laid))
            for g, e in zip([*got, *found], [*values, *expected], strict=True):
                near(g, e, 1e-9, f"{layout}, sample {i}")


@pytest.mark.parametrize("name", differentiable())
def test_recorded_recomputed_and_compiled(name: str) -> None:
    """The samples of an op as one function of all their operands."""
    every = list(calls(name))
    xs = [mt.asarray(a) for _, _, args in every for a in args]

    def each(run: Callable[..., Any], xs: Any) -> list[Any]:
        rest = iter(xs)
        return [run(fn, *itertools.islice(rest, len(args))) for _, fn, args in every]

    def values(*xs: Any) -> list[Any]:
        return each(lambda fn, *args: fn(*args), xs)

    def cotangents(*xs: Any) -> list[Any]:
        return [g for found in each(lambda fn, *args: pulled(fn, *args)[1], xs) for g in found]

    def recomputed(*xs: Any) -> list[Any]:
        return [g for found in each(lambda fn, *args: pulled(mt.checkpoint(fn), *args)[1], xs) for g in found]

    def recorded(*xs: Any) -> list[Any]:  # the rules run on Arrays
        with mt.Tape() as tape:
            tape.watch(xs)
            return cotangents(*xs)

    expected = cotangents(*xs)
    ways = {
        "recorded": recorded(*xs),
        "recomputed": recomputed(*xs),
        "compiled": mt.compile(cotangents)(*xs),
        "derivative of the compiled": pulled(mt.compile(values), *xs)[1],
    }
    for way, found in ways.items():
        for k, (g, e, x) in enumerate(zip(found, expected, xs, strict=True)):
            near(g, e, 1e-9, f"{way}, operand {k} of all samples")
            assert g is None or (g.dtype, g.shape) == (x.dtype, x.shape), f"{way}, operand {k}"
