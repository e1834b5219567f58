"""Programs of random steps: every elementwise op of the table of samples, and what moves, reduces and joins, of any
shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from op_samples import ELEMENTS, Sample

import meshtape as mt
from meshtape.arrays import OPS
from meshtape.arrays.core import shape_rules

LARGEST = 240
Step = tuple[str, int, int, int]
One = Callable[[Any, int], Any]
Two = Callable[[Any, Any, int], Any]


def _into(x: Any, low: float, high: float) -> Any:
    bounded = mt.tanh(x)
    return bounded if low <= -1 and high >= 1 else (low + high) / 2 + (high - low) * 0.4 * bounded


def _step(sample: Sample) -> Callable[..., Any]:
    """An elementwise function of numbers of any size: brought into its domain."""
    fn, ends = sample.fn, [(o.low, o.high) for o in sample.operands]
    return lambda *xs_and_k: fn(*(_into(x, *e) for x, e in zip(xs_and_k, ends, strict=False)))


def _elementwise(operands: int) -> dict[str, Callable[..., Any]]:
    known = [n for n in ELEMENTS if OPS[n].infer is shape_rules.elementwise and OPS[n].nondifferentiable is None]
    firsts = [(n, next(s for s in ELEMENTS[n] if len(s.operands) == len(OPS[n].operands))) for n in known]
    return {n: _step(s) for n, s in firsts if len(s.operands) == operands and all(o.kind == "f8" for o in s.operands)}


def _axis(x: Any, k: int) -> int:
    return k % x.ndim


def _key(x: Any, k: int, key: Any) -> tuple[Any, ...]:
    """This key along an axis."""
    return (*(slice(None),) * _axis(x, k), key)


def _ids(x: Any, k: int) -> mt.Array:
    n = x.shape[_axis(x, k)]
    return mt.asarray((np.arange(1 + k % 4) * (k + 1)) % n - (n if k % 3 == 0 else 0))


def _mask(shape: tuple[int, ...], k: int) -> mt.Array:
    return mt.asarray((np.arange(int(np.prod(shape))).reshape(shape) * (k + 2)) % 5 < 2)


def _along(x: Any, k: int) -> Any:
    """Places for take_along_axis, of half the length or one."""
    axis = _axis(x, k)
    shape = tuple(max(1, n // 2) if d == axis else n for d, n in enumerate(x.shape))
    ids = (np.arange(int(np.prod(shape))).reshape(shape) * (k + 1)) % x.shape[axis]
    return mt.take_along_axis(x, mt.asarray(ids), axis=axis)


@mt.custom_vjp
def _scaled(x: Any) -> Any:
    return x * 0.5


_scaled.defvjp(lambda x: (x * 0.5, None), lambda _, g: (g * 0.5,))

ELEMENTWISE: dict[str, One] = _elementwise(1)
# Of one array with at least one dimension, and an integer. Smooth, and of the size of its operand.
SHAPED: dict[str, One] = {
    "power": lambda x, k: (x * x + 0.5) ** (0.5 + 0.25 * (k % 4)),
    "scale": lambda x, k: x * (0.25 * (k + 1)),
    "sum": lambda x, k: mt.sum(x, axis=_axis(x, k)) * 0.3,
    "sum, kept": lambda x, k: mt.sum(x, axis=_axis(x, k), keepdims=True) * 0.3,
    "mean": lambda x, k: x - mt.mean(x, axis=_axis(x, k), keepdims=True),
    "mean of all": lambda x, k: x + mt.mean(x),
    "var": lambda x, k: mt.var(x, axis=_axis(x, k), keepdims=True) + x * 0.5,
    "prod": lambda x, k: mt.prod(mt.tanh(x) + 1.2, axis=_axis(x, k), keepdims=True) * 0.1,
    "norm": lambda x, k: x / (1.0 + mt.linalg.vector_norm(x + 0.1)),
    "softmax": lambda x, k: mt.nn.softmax(x, axis=_axis(x, k)) * 2.0,
    "log_softmax": lambda x, k: mt.nn.log_softmax(x, axis=_axis(x, k)) * 0.3,
    "logsumexp": lambda x, k: mt.nn.logsumexp(x, axis=_axis(x, k), keepdims=True) - x,
    "cross_entropy": lambda x, k: (
        x * mt.nn.cross_entropy(x, mt.zeros(x.shape[:-1], dtype=mt.int64), label_smoothing=0.1)
    ),
    "layer_norm": lambda x, k: mt.layer_norm(x, x.shape[-1], eps=0.2),
    "rms_norm": lambda x, k: mt.rms_norm(x, x.shape[-1], eps=0.2),
    "cumulative_sum": lambda x, k: mt.cumulative_sum(x, axis=_axis(x, k)) * 0.3,
    "transposed": lambda x, k: mt.permute_dims(x, tuple(np.roll(range(x.ndim), k).tolist())),
    "flat": lambda x, k: mt.reshape(x, (-1,)),
    "rows": lambda x, k: mt.reshape(x, (x.shape[0], -1)),
    "flipped": lambda x, k: mt.flip(x, axis=_axis(x, k)) * 0.7,
    "rolled": lambda x, k: mt.roll(x, k, axis=_axis(x, k)),
    "slice": lambda x, k: x[_key(x, k, slice(k % 2, None, 1 + k % 2))],
    "backwards": lambda x, k: x[_key(x, k, slice(None, None, -1 - k % 2))],
    "int": lambda x, k: x + x[_key(x, k, slice(-1, None))],
    "ids": lambda x, k: x[_key(x, k, _ids(x, k))],
    "new axis": lambda x, k: mt.expand_dims(x, axis=k % (x.ndim + 1)) if x.ndim < 3 else x,
    "along": _along,
    "masked": lambda x, k: mt.where(_mask(x.shape, k), x, mt.cos(x)),
    "mask": lambda x, k: x[_mask(x.shape[:1], k)] if x.ndim > 1 else x,
    "concat": lambda x, k: mt.concat([x, mt.sin(x)], axis=_axis(x, k)),
    "stack": lambda x, k: mt.stack([x, x * 0.5], axis=k % x.ndim) if x.ndim < 3 else x,
    "gram": lambda x, k: 0.2 * (x.mT @ x if x.ndim > 1 else x * (x @ x)),
    "padded": lambda x, k: mt.pad(x, [(int(d == _axis(x, k)), 0) for d in range(x.ndim)]),
    # Continuous, with kinks: not for differences.
    "max": lambda x, k: mt.max(x, axis=_axis(x, k), keepdims=True) * 0.5 + x,
    "min of all": lambda x, k: x - mt.min(x),
    "clip": lambda x, k: mt.clip(x, -0.5, 0.75),
    "sort": lambda x, k: mt.sort(x, axis=_axis(x, k)),
}
BINARY: dict[str, Two] = {
    **_elementwise(2),
    "quotient": lambda x, y, k: x / (y * y + 1.0),
    "where": lambda x, y, k: mt.where(mt.stop_gradient(x) > 7.0, y, x + y * 0.5),
    "set": lambda x, y, k: x.at[_key(x, k, _ids(x, k))].set(mt.mean(y) * 0.5),
    "add at": lambda x, y, k: x.at[_key(x, k, _ids(x, k))].add(mt.mean(y) * 0.5),
    "custom": lambda x, y, k: _scaled(x) + y,
}
KINKED = {
    *("abs", "relu", "sign", "maximum", "minimum", "fmax", "fmin", "copysign", "remainder", "fmod", "heaviside"),
    *("max", "min of all", "clip", "sort"),
}


def programs(largest: int, smallest: int = 1, smooth: bool = False) -> Any:
    """Lists of steps."""
    tables = [[n for n in table if not (smooth and n in KINKED)] for table in (ELEMENTWISE, SHAPED, BINARY)]
    number = st.integers(0, 15)
    step = st.tuples(st.one_of(*map(st.sampled_from, tables)), number, number, number)
    return st.lists(step, min_size=smallest, max_size=largest)


def bound(program: list[Step], block: Callable[[Any], Any] = lambda f: f) -> Callable[..., list[Any]]:
    """The program as a function from its inputs to these and all results: each step reads one or two of the values so
    far.

    ``block`` wraps every third step.
    """
    steps = [
        (
            BINARY.get(name) or (ELEMENTWISE | SHAPED)[name],
            name in BINARY,
            a,
            b,
            k,
            block if n % 3 == 0 else lambda f: f,
        )
        for n, (name, a, b, k) in enumerate(program)
    ]

    def run(*inputs: Any) -> list[Any]:
        found = list(inputs)
        for fn, two, a, b, k, wrap in steps:
            x, y = found[-1 - a % len(found)], found[b % len(found)]
            if x.ndim == 0 or x.size > LARGEST or x.size == 0:
                x = inputs[a % 2]
            if not two:
                found.append(wrap(lambda x, fn=fn, k=k: fn(x, k))(x))
                continue
            try:
                fits = np.broadcast_shapes(x.shape, y.shape)
            except ValueError:
                fits = ()
            if not fits or np.prod(fits) > LARGEST:
                y = mt.mean(y)
            found.append(wrap(lambda x, y, fn=fn, k=k: fn(x, y, k))(x, y))
        return found

    return run


def total(found: list[Any]) -> Any:
    """A number that all of them end in."""
    weights = [np.cos(1.0 + i + np.arange(v.size)).reshape(v.shape) for i, v in enumerate(found)]
    return sum((mt.sum(v * mt.asarray(w)) for v, w in zip(found, weights, strict=True)), 0.0)


def loss(program: list[Step], block: Callable[[Any], Any] = lambda f: f) -> Callable[..., Any]:
    """The program as a function of its inputs with one number as result."""
    run = bound(program, block)
    return lambda *inputs: total(run(*inputs))
