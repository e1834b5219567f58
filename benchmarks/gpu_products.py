"""Rows of the table of kernels: products, layers, losses of a vocabulary, convolutions, experts, optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from gpu_peers import Torch, jax_peer
from gpu_rows import Maker, Row, of_arrays

import meshtape as mt
from meshtape.arrays.core.dispatch import wrap

BLAS = {"torch": 1 / 0.95}
"""Our time over that of the same libraries, called by PyTorch, at most."""


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
            BLAS,
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
    yield Row(f"convolution, {label}", x + w + g, made(2), of_arrays(ours), eager, None, BLAS)
    yield Row(f"convolution, both ways, {label}", 3 * (x + w + g), made(3), of_arrays(step), both, None, BLAS)


def float8_rows(m: Maker, t: Torch | None, side: int, d: np.dtype) -> Iterator[Row]:
    """Products of two matrices that are rounded to float8: by scales that are found, and by given ones."""
    of_float8 = 448.0  # the largest number of float8_e4m3fn

    def rounded(x: Any, scale: Any) -> Any:
        return (x.float() / scale).clamp(-of_float8, of_float8).to(t.torch.float8_e4m3fn)

    def theirs(x: Any, y: Any, scale: float | None = None) -> Any:
        one = t.torch.ones((), device=x.device)
        x_scale, y_scale = ((a.abs().amax().float() / of_float8) if scale is None else one * scale for a in (x, y))
        columns = rounded(y, y_scale).t().contiguous().t()  # which its product asks for
        return t.torch._scaled_mm(rounded(x, x_scale), columns, x_scale, y_scale, out_dtype=x.dtype)

    for name, scale in (("scales found", None), ("scales given", 0.25)):
        yield Row(
            f"float8_matmul, {name}, {side} x {side} {d.name}",
            3 * side * side * d.itemsize,
            lambda: (m.normal((side, side), d), m.normal((side, side), d)),
            of_arrays(lambda x, y, scale=scale: mt.nn.float8_matmul(x, y, scale, scale)),
            {} if t is None else t.pair(lambda x, y, scale=scale: theirs(x, y, scale)),
        )


def linear_rows(m: Maker, t: Torch | None, jax: Any, rows: int, width: int, d: np.dtype) -> Iterator[Row]:
    """A layer, compiled: the product, its bias and GELU; and all gradients of it."""

    def layer(x: Any, w: Any, b: Any) -> Any:
        return mt.nn.gelu(x @ w + b)

    def of_torch(x: Any, w: Any, b: Any) -> Any:
        return t.torch.nn.functional.gelu(t.torch.addmm(b, x, w))

    def of_jax(x: Any, w: Any, b: Any) -> Any:
        return jax.nn.gelu(x @ w + b, approximate=False)

    def made(*more: tuple[int, ...]) -> tuple[Any, ...]:
        return tuple(m.normal(s, d) for s in (*more, (rows, width), (width, width), (width,)))

    label, nbytes = f"{rows} x {width} by {width} {d.name}", (2 * rows + width) * width * d.itemsize
    peers = {} if t is None else t.pair(of_torch)
    peers |= {} if jax is None else {"jax": jax_peer(jax, of_jax)}
    yield Row(f"linear, bias, gelu, compiled, {label}", nbytes, made, of_arrays(mt.compile(layer)), peers)
    both = {} if t is None else t.both_ways(of_torch)
    both |= {} if jax is None else {"jax": jax_peer(jax, lambda g, *args: jax.vjp(of_jax, *args)[1](g))}
    step = mt.compile(lambda g, *args: mt.vjp(layer, *args)[1](g))
    label = f"linear, bias, gelu, both ways, compiled, {label}"
    yield Row(label, 2 * nbytes, lambda: made((rows, width)), of_arrays(step), both)


def loss_rows(m: Maker, t: Torch | None, jax: Any, size: tuple[int, int, int], d: np.dtype) -> Iterator[Row]:
    """The loss of a vocabulary, which the peers make of logits that are held whole."""
    rows, width, classes = size

    def of_torch(h: Any, w: Any, labels: Any) -> Any:
        return t.torch.nn.functional.cross_entropy((h @ w).float(), labels)

    def of_jax(h: Any, w: Any, labels: Any) -> Any:
        logs = jax.nn.log_softmax((h @ w).astype("float32"))
        return -jax.numpy.take_along_axis(logs, labels[:, None], 1).mean()

    def made() -> tuple[Any, ...]:
        return m.normal((rows, width), d), m.normal((width, classes), d), m.integers(rows, classes)

    def step(h: Any, w: Any, labels: Any) -> Any:
        return mt.value_and_grad(lambda h, w: mt.nn.linear_cross_entropy(h, w, labels), (0, 1))(h, w)

    label, nbytes = f"{rows} x {width} by {classes} {d.name}", (rows + classes) * width * d.itemsize
    peers, both = ({}, {}) if t is None else (t.pair(of_torch), t.both_ways(of_torch, of_numbers=True))
    if jax is not None:
        peers |= {"jax": jax_peer(jax, of_jax)}
        both |= {"jax": jax_peer(jax, jax.value_and_grad(of_jax, (0, 1)))}
    yield Row(f"linear_cross_entropy, {label}", nbytes, made, of_arrays(mt.nn.linear_cross_entropy), peers)
    yield Row(f"linear_cross_entropy, both ways, {label}", 2 * nbytes, made, of_arrays(step), both)


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
