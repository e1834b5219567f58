"""Rows of the table of kernels: products, convolutions, attention, experts, optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from gpu_peers import Torch, jax_peer
from gpu_rows import Maker, Row, of_arrays, their_gradients

import meshtape as mt
from meshtape.arrays.core.dispatch import wrap
from meshtape.arrays.kernels.cudnn import attention as cudnn_attention


def product_rows(m: Maker, t: Torch | None, jax: Any, side: int, d: np.dtype) -> Iterator[Row]:
    """Products of matrices, whose bound is not the memory: PyTorch is the measure."""
    peers = {} if t is None else t.pair(lambda a, b: a @ b)
    peers |= {} if jax is None else {"jax": jax_peer(jax, lambda a, b: a @ b)}
    for shape in ((side, side), (16, side // 8, side // 8)):
        nbytes = 3 * int(np.prod(shape)) * d.itemsize
        label = f"product, {' x '.join(map(str, shape))} {d.name}"
        yield Row(
            label,
            nbytes,
            lambda s=shape: (m.normal(s, d), m.normal(s, d)),
            of_arrays(lambda a, b: a @ b),
            peers,
            None,
            1 / 0.95,
        )


def convolution_rows(
    m: Maker, t: Torch | None, image: tuple[int, ...], kernel: tuple[int, ...], stride: int, d: np.dtype, last: bool
) -> Iterator[Row]:
    """A convolution of images (N, channels, height, width), and the same with both gradients; channels last in memory
    or not. PyTorch is the measure."""
    (n, _, *size), (o, _, *window) = image, kernel
    padding, moved = window[0] // 2, (0, 3, 1, 2)
    out = (n, o, *(-(-s // stride) for s in size))
    own = [(s[0], *s[2:], s[1]) if last else s for s in (image, kernel, out)]
    x, w, g = (int(np.prod(s)) * d.itemsize for s in own)
    label = f"{'NHWC' if last else 'NCHW'} {' x '.join(map(str, image))} by {o} of {window[0]} x {window[1]}"
    label += f", stride {stride}, {d.name}"

    def made(count: int) -> Callable[[], tuple[Any, ...]]:
        return lambda: tuple(m.normal(s, d) for s in own[:count])

    def ours(x: Any, w: Any) -> Any:
        x, w = (mt.permute_dims(a, moved) if last else a for a in (x, w))
        return mt.nn.conv2d(x, w, stride=stride, padding=padding)

    def step(x: Any, w: Any, g: Any) -> Any:
        y, pull = mt.vjp(ours, x, w)
        return y, *pull(mt.permute_dims(g, moved) if last else g)

    def theirs(x: Any, w: Any) -> Any:
        x, w = (a.permute(moved) if last else a for a in (x, w))
        return t.torch.nn.functional.conv2d(x, w, stride=stride, padding=padding)

    def their_step(x: Any, w: Any, g: Any) -> Any:
        x, w = (a.detach().requires_grad_() for a in (x, w))
        y = theirs(x, w)
        return y, *t.torch.autograd.grad(y, (x, w), g.permute(moved) if last else g)

    eager, both = ({}, {}) if t is None else ({"torch": t.wrap(theirs)}, {"torch": t.wrap(their_step)})
    yield Row(f"convolution, {label}", x + w + g, made(2), of_arrays(ours), eager, None, 1 / 0.95)
    yield Row(f"convolution, both ways, {label}", 3 * (x + w + g), made(3), of_arrays(step), both, None, 1 / 0.95)


def attention_rows(m: Maker, t: Torch | None, shape: tuple[int, int, int, int], d: np.dtype) -> Iterator[Row]:
    """Causal attention and its gradient: PyTorch's fused one is the measure. With cuDNN's frontend, by both ways."""
    size, label = int(np.prod(shape)) * d.itemsize, f"{' x '.join(map(str, shape))} {d.name}"
    F, frontend = None if t is None else t.torch.nn.functional, cudnn_attention.frontend
    by_cudnn = m.xp is not np and frontend() is not None

    def three() -> tuple[Any, ...]:
        return tuple(m.normal(shape, d) for _ in range(3))

    def ours(q: Any, k: Any, v: Any) -> Any:
        return mt.nn.scaled_dot_product_attention(q, k, v, is_causal=True)

    def step(g: Any, q: Any, k: Any, v: Any) -> Any:
        return mt.vjp(ours, q, k, v)[1](g)

    def alone(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*operands: Any) -> Any:
            cudnn_attention.frontend = lambda: None
            try:
                return fn(*operands)
            finally:
                cudnn_attention.frontend = frontend

        return run

    def theirs(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def their_step(g: Any, q: Any, k: Any, v: Any) -> Any:
        return their_gradients(t, theirs, g, q, k, v)

    def four() -> tuple[Any, ...]:
        return m.normal(shape, d), *three()

    eager, both = ({}, {}) if t is None else ({"torch": t.wrap(theirs)}, {"torch": t.wrap(their_step)})
    ways: dict[str, Callable[[Any], Any]] = {"attention": alone}
    if by_cudnn:
        ways |= {"attention by cuDNN": lambda fn: fn}
    for name, way in ways.items():
        yield Row(f"{name}, {label}", 4 * size, three, of_arrays(way(ours)), eager, None, 1.25)
        yield Row(f"{name}, both ways, {label}", 8 * size, four, of_arrays(way(step)), both, None, 1.25)


def expert_rows(m: Maker, t: Torch | None, shape: tuple[int, int, int, int, int], d: np.dtype) -> Iterator[Row]:
    """Networks of experts and their gradients, whose bound is not the memory: PyTorch's grouped products are the
    measure, where it has them for the dtype, and a loop over the experts."""
    rows, k, experts, width, hidden = shape
    size, label = d.itemsize, f"{rows} x {width}, {k} of {experts} of {hidden} {d.name}"
    nbytes = (2 * rows * width + 3 * experts * width * hidden) * size

    def make() -> tuple[Any, ...]:
        matrices = [m.normal(s, d) for s in [(experts, width, hidden)] * 2 + [(experts, hidden, width)]]
        return (
            m.normal((rows, width), d),
            m.integers(rows * k, experts).reshape(rows, k),
            m.normal((rows, k), d),
            *matrices,
        )

    def ours(x: Any, chosen: Any, weights: Any, gate: Any, up: Any, down: Any) -> Any:
        return mt.nn.experts(x, chosen, weights, gate=gate, up=up, down=down)

    def step(g: Any, x: Any, chosen: Any, *others: Any) -> Any:
        return mt.vjp(lambda x, *others: ours(x, chosen, *others), x, *others)[1](g)

    def grouped(x: Any, chosen: Any, weights: Any, gate: Any, up: Any, down: Any) -> Any:
        product, silu = t.torch.nn.functional.grouped_mm, t.torch.nn.functional.silu
        found, order = chosen.flatten().sort(stable=True)
        numbers = t.torch.arange(experts, device=x.device)
        ends = t.torch.searchsorted(found, numbers, right=True, out_int32=True)
        own = x[order // k]
        y = product(silu(product(own, gate, offs=ends)) * product(own, up, offs=ends), down, offs=ends)
        return t.torch.zeros_like(x).index_add(0, order // k, y * weights.flatten()[order, None])

    def loop(x: Any, chosen: Any, weights: Any, gate: Any, up: Any, down: Any) -> Any:
        out, silu = t.torch.zeros_like(x), t.torch.nn.functional.silu
        for e in range(experts):
            places, at = t.torch.nonzero(chosen == e, as_tuple=True)
            own = x[places]
            y = (silu(own @ gate[e]) * (own @ up[e])) @ down[e]
            out = out.index_add(0, places, y * weights[places, at, None])
        return out

    def both(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(g: Any, x: Any, chosen: Any, *others: Any) -> Any:
            leaves = [a.detach().requires_grad_() for a in (x, *others)]
            return t.torch.autograd.grad(fn(leaves[0], chosen, *leaves[1:]), leaves, g)

        return run

    peers = {}
    if t is not None:
        has = d == ml_dtypes.bfloat16 and hasattr(t.torch.nn.functional, "grouped_mm")
        peers = {"torch": grouped, "torch, a loop": loop} if has else {"torch": loop}
    eager = {name: t.wrap(fn) for name, fn in peers.items()}
    yield Row(f"experts, {label}", nbytes, make, of_arrays(ours), eager)
    eager = {name: t.wrap(both(fn)) for name, fn in peers.items()}
    yield Row(
        f"experts, both ways, {label}",
        2 * nbytes,
        lambda: (m.normal((rows, width), d), *make()),
        of_arrays(step),
        eager,
    )


def optimizer_rows(m: Maker, t: Torch | None, count: int, n: int) -> Iterator[Row]:
    """A step of AdamW over many float32 arrays: four arrays read and three written."""
    update = mt.optim.adamw(1e-3)
    d = np.dtype(np.float32)

    def make() -> tuple[Any, ...]:
        return tuple(m.normal((n,), d) for _ in range(2 * count))

    states: dict[int, Any] = {}

    def ours(*bufs: Any) -> Any:
        params, grads = list(map(wrap, bufs[:count])), list(map(wrap, bufs[count:]))
        if id(bufs[0]) not in states:
            states[id(bufs[0])] = bufs[0], update.init(params)
        return update.update(params, grads, states[id(bufs[0])][1])

    peers = {}
    if t is not None:
        torch, theirs = t.torch, {}

        def step(*tensors: Any) -> None:
            key = tensors[0].data_ptr()
            if key not in theirs:
                params = [torch.nn.Parameter(x.clone()) for x in tensors[:count]]
                for p, g in zip(params, tensors[count:], strict=True):
                    p.grad = g
                theirs[key] = torch.optim.AdamW(params, lr=1e-3, fused=True, capturable=True)
            theirs[key].step()

        peers = {"torch": t.wrap(step)}
    yield Row(f"AdamW, {count} arrays of {n} float32", 7 * count * n * d.itemsize, make, ours, peers, 0.85)
