"""Rows of attention in the table of kernels, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from gpu_peers import Torch, jax_peer
from gpu_rows import Maker, Row, of_arrays
from gpu_verdict import of_targets

import meshtape as mt
from meshtape.arrays.kernels.cudnn import attention as cudnn_attention

MOST = {"torch": 1.25}
"""Our time over that of PyTorch's fused attention, at most."""
GROWTH = 2.2
"""The memory for twice the tokens, at most."""


class Heads(NamedTuple):
    batch: int
    heads: int
    tokens: int
    width: int


def attention_rows(
    m: Maker, t: Torch | None, jax: Any, shape: Heads, d: np.dtype, padded: bool = False
) -> Iterator[Row]:
    """Attention and its gradient, causal or with a mask of padding: PyTorch's fused one is the measure. With cuDNN's
    frontend, by both ways, where that serves the call."""
    size, kind = int(np.prod(shape)) * d.itemsize, "padded" if padded else "causal"
    label = f"{kind}, {' x '.join(map(str, shape))} {d.name}"
    F, frontend = t and t.torch.nn.functional, cudnn_attention.frontend
    by_cudnn = d.itemsize == 2 and not padded and m.xp is not np and frontend() is not None

    def made(count: int) -> Callable[[], tuple[Any, ...]]:
        def make() -> tuple[Any, ...]:
            mask = (m.padding(shape.batch, shape.tokens),) if padded else ()
            return (*(m.normal(shape, d) for _ in range(count)), *mask)

        return make

    def ours(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        return mt.nn.scaled_dot_product_attention(q, k, v, mask=mask, is_causal=not padded)

    def step(g: Any, q: Any, k: Any, v: Any, *mask: Any) -> Any:
        return mt.vjp(lambda q, k, v: ours(q, k, v, *mask), q, k, v)[1](g)

    def alone(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*operands: Any) -> Any:
            cudnn_attention.frontend = lambda: None
            try:
                return fn(*operands)
            finally:
                cudnn_attention.frontend = frontend

        return run

    def theirs(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not padded)

    def of_jax(*operands: Any) -> Any:
        q, k, v = (x.swapaxes(1, 2) for x in operands)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn").swapaxes(1, 2)

    eager = {} if t is None else {"torch": t.wrap(theirs)}
    both = {} if t is None else {"torch": t.wrap(t.gradients(theirs))}
    if jax is not None and not padded and d.itemsize == 2:
        eager |= {"jax": jax_peer(jax, of_jax)}
    ways: dict[str, Callable[[Any], Any]] = {"attention": alone}
    if by_cudnn:
        ways |= {"attention by cuDNN": lambda fn: fn}
    for name, way in ways.items():
        yield Row(f"{name}, {label}", 4 * size, made(3), of_arrays(way(ours)), eager, None, MOST)
        yield Row(f"{name}, both ways, {label}", 8 * size, made(4), of_arrays(way(step)), both, None, MOST)


def attention_memory(cp: Any, t: Torch | None, tiny: bool, d: np.dtype) -> dict[str, Any]:
    """Megabytes of CuPy's pool that causal attention takes, results and all, beside the scores (tokens x tokens of each
    head) that it does not hold; and those of PyTorch."""
    m, most, heads = Maker(), 128 if tiny else 65_536, 2 if tiny else 16
    pool, found, failed = cp.get_default_memory_pool(), {}, {}

    def attention(q: Any, k: Any, v: Any) -> Any:
        return mt.nn.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both_ways(q: Any, k: Any, v: Any) -> Any:
        y, pull = mt.vjp(attention, q, k, v)
        return pull(y)

    def fused(q: Any, k: Any, v: Any) -> Any:
        return t.torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def of_torch(name: str, operands: list[Any]) -> float:
        memory, theirs = t.torch.cuda, [t.of(a) for a in operands]
        memory.reset_peak_memory_stats()
        before = memory.memory_allocated()
        _ = fused(*theirs) if name == "forward" else t.gradients(fused)(theirs[0], *theirs)
        return (memory.max_memory_allocated() - before) / 1e6

    for tokens in (most // 2, most):
        for name, fn in (("forward", attention), ("both ways", both_ways)):
            operands = [m.normal((1, heads, tokens, 128), d) for _ in range(3)]
            pool.free_all_blocks()
            before = pool.total_bytes()
            _ = of_arrays(fn)(*operands)
            cp.cuda.Device().synchronize()
            found[f"{tokens} tokens, {name}"] = (pool.total_bytes() - before) / 1e6
            if t is not None and not failed:
                try:
                    found[f"{tokens} tokens, {name}, torch"] = of_torch(name, operands)
                except Exception as e:
                    failed["torch"] = {"error": f"{type(e).__name__}: {e}"[:300]}
            del _
    found[f"scores of {most} tokens"] = heads * most * most * d.itemsize / 1e6
    targets: dict[str, bool | None] = {}
    for name in ("forward", "both ways"):
        half, whole = (found[f"{tokens} tokens, {name}"] for tokens in (most // 2, most))
        targets[f"{name}: at most {GROWTH} times for twice the tokens"] = whole <= GROWTH * half if half else None
    return {"MB": found, "peers": failed, **of_targets(targets, "the memory is not CuPy's pool")}
