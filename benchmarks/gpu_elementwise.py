"""Rows of the table of kernels: pointwise functions, casts, sums, and what moves elements. CuPy has most of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from gpu_peers import Torch, jax_peer, on_stream
from gpu_rows import Maker, Row, of_arrays

import meshtape as mt
from meshtape.arrays.kernels import launch

MOVED = 0.9
"""Share of the copy that is to be reached."""


class Call(NamedTuple):
    """A function, ours and those of the others, where they have it."""

    name: str
    nbytes: int
    ours: Callable[..., Any]
    cupy: Callable[..., Any] | None = None
    torch: Callable[..., Any] | None = None
    jax: Callable[..., Any] | None = None
    target: float | None = MOVED

    def row(self, label: str, make: Callable[[], tuple[Any, ...]], t: Torch | None, jax: Any) -> Row:
        peers = {} if self.cupy is None else {"cupy": on_stream(self.cupy)}
        peers |= {} if t is None or self.torch is None else t.pair(self.torch)
        peers |= {} if jax is None or self.jax is None else {"jax": jax_peer(jax, self.jax)}
        return Row(f"{self.name}, {label}", self.nbytes, make, of_arrays(self.ours), peers, self.target)


def alike(name: str, nbytes: int, fn: Callable[..., Any]) -> Call:
    """A call whose code is the same for all."""
    return Call(name, nbytes, fn, fn, fn, fn)


def elementwise_rows(m: Maker, t: Torch | None, jax: Any, n: int, d: np.dtype) -> Iterator[Row]:
    xp, label, size = m.xp, f"{n} {d.name}", n * d.itemsize
    torch, jnp, F = (t and t.torch), (jax and jax.numpy), (t and t.torch.nn.functional)

    def made(count: int, shape: tuple[int, ...] = (n,)) -> Callable[[], tuple[Any, ...]]:
        return lambda: tuple(m.normal(shape, d) for _ in range(count))

    def swiglu(x: Any, y: Any) -> Any:
        return F.silu(x) * y

    for call in (
        alike("x + y", 3 * size, lambda x, y: x + y),
        Call(
            "where(x > 0, x, y)", 3 * size, lambda x, y: mt.where(x > 0, x, y), lambda x, y: xp.where(x > 0, x, y),
            lambda x, y: torch.where(x > 0, x, y), lambda x, y: jnp.where(x > 0, x, y),
        ),
        Call("swiglu", 3 * size, mt.nn.swiglu, None, swiglu, lambda x, y: jax.nn.silu(x) * y),
    ):  # fmt: skip
        yield call.row(label, made(2), t, jax)
    other = np.dtype(ml_dtypes.bfloat16 if d == np.float32 else np.float32)
    for call in (
        alike("x * 2", 2 * size, lambda x: x * 2),
        Call("tanh", 2 * size, mt.tanh, xp.tanh, torch and torch.tanh, jnp and jnp.tanh),
        Call("exp", 2 * size, mt.exp, xp.exp, torch and torch.exp, jnp and jnp.exp),
        Call("gelu", 2 * size, mt.nn.gelu, None, lambda x: F.gelu(x), lambda x: jax.nn.gelu(x, approximate=False)),
        Call("mish", 2 * size, mt.nn.mish, None, torch and F.mish, jax and jax.nn.mish),
        Call("sum", size, mt.sum, lambda x: x.sum(dtype=launch.wide(d)), torch and torch.sum, jnp and jnp.sum),
        Call(
            f"astype to {other.name}", n * (d.itemsize + other.itemsize), lambda x: x.astype(other),
            lambda x: x.astype(other), lambda x: x.to(getattr(torch, other.name)), lambda x: x.astype(other),
        ),
    ):  # fmt: skip
        yield call.row(label, made(1), t, jax)
    yield Row(
        f"swiglu, both ways, {label}",
        8 * size,
        made(3),
        of_arrays(lambda g, x, y: mt.vjp(mt.nn.swiglu, x, y)[1](g)),
        {} if t is None else t.both_ways(swiglu),
    )
    side = max(1, int(n**0.5) // 32 * 32)
    yield from matrix_rows(m, t, jax, side, d)
    heads = (side // 32 or 1, 32, side)  # positions, heads, and their elements
    yield Call(
        "heads before positions, copied",
        2 * int(np.prod(heads)) * d.itemsize,
        lambda x: mt.asarray(mt.permute_dims(x, (1, 0, 2)), copy=True),
        lambda x: xp.ascontiguousarray(x.transpose(1, 0, 2)),
        lambda x: x.permute(1, 0, 2).contiguous(),
    ).row(f"{' x '.join(map(str, heads))} {d.name}", made(1, heads), t, jax)


def matrix_rows(m: Maker, t: Torch | None, jax: Any, side: int, d: np.dtype) -> Iterator[Row]:
    """Sums and variances of rows, and what moves them."""
    xp, torch, size = m.xp, t and t.torch, side * side * d.itemsize
    label = f"{side} x {side} {d.name}"

    def square() -> tuple[Any, ...]:
        return (m.normal((side, side), d),)

    for which, shape in (("row", (side,)), ("column", (side, 1))):
        add = alike(f"x + {which}", 2 * size, lambda x, y: x + y)
        yield add.row(label, lambda shape=shape: (*square(), m.normal(shape, d)), t, jax)
    for axis, which in ((1, "rows"), (0, "columns")):
        yield Call(
            f"cumulative_sum of {which}",
            2 * size,
            lambda x, axis=axis: mt.cumulative_sum(x, axis=axis),
            lambda x, axis=axis: xp.cumsum(x, axis=axis, dtype=launch.wide(d)),
            lambda x, axis=axis: torch.cumsum(x, axis),
            target=None,
        ).row(label, square, t, jax)
    for call in (
        Call(
            "concat", 4 * size, lambda x: mt.concat([x, x], axis=1), lambda x: xp.concatenate([x, x], axis=1),
            lambda x: torch.cat([x, x], 1), target=None,
        ),
        Call(
            "variance of rows, compiled", size, mt.compile(lambda x: mt.var(x, axis=1)), None,
            lambda x: torch.var(x, 1, correction=0), target=None,
        ),
        Call(
            "transpose", 2 * size, lambda x: mt.reshape(x.T, (-1,)), lambda x: xp.ascontiguousarray(x.T),
            lambda x: x.T.contiguous(), target=None,
        ),
    ):  # fmt: skip
        yield call.row(label, square, t, jax)


def take_rows(m: Maker, t: Torch | None, jax: Any, rows: int, width: int, d: np.dtype) -> Iterator[Row]:
    yield Call(
        "take",
        2 * rows * width * d.itemsize,
        lambda x, ids: mt.take(x, ids, axis=0),
        lambda x, ids: m.xp.take(x, ids, axis=0),
        lambda x, ids: x.index_select(0, ids),
        lambda x, ids: jax.numpy.take(x, ids, axis=0),
    ).row(f"{rows} rows of {width} {d.name}", lambda: (m.normal((rows, width), d), m.integers(rows, rows)), t, jax)
