"""A training step of a decoder on a GPU beside PyTorch's, and where the host's time of an eager step goes."""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from gpu_peers import Torch
from gpu_verdict import of_targets
from torch_decoder import torch_decoder

import meshtape as mt

de = mt.models.decoder
LARGE = de.Config(vocab=32_768, width=1024, layers=8, heads=16, max_length=1024), (8, 1024)
TINY = de.Config(vocab=32, width=16, layers=1, heads=2, max_length=16), (2, 12)
MOST = {"torch": 1.1, "torch compiled": 1.3}
"""Our time as a CUDA graph over each peer's, at most."""


def ours(config: Any, size: tuple[int, int], d: np.dtype) -> tuple[Callable[..., Any], Callable[[], Any], Any]:
    """(a step of AdamW, what makes the parameters and the slots that it takes, the tokens)."""
    optimizer = mt.optim.adamw(1e-3)

    def step(state: Any, tokens: Any) -> Any:
        def loss(p: Any) -> Any:
            total, count = de.loss(p, {"ids": tokens, "labels": tokens}, config)
            return total / count

        value, grads = mt.value_and_grad(loss)(state[0])
        return optimizer.update(state[0], grads, state[1]), value

    def start() -> Any:
        params = de.init(mt.random.key(0), config, dtype=d)
        return mt.tree_map(lambda a: mt.asarray(a, device="cuda:0"), (params, optimizer.init(params)))

    tokens = np.random.default_rng(0).integers(0, config.vocab, size)
    return step, start, mt.asarray(tokens, device="cuda:0")


def theirs(t: Torch, config: Any, size: tuple[int, int], d: np.dtype, compiled: bool) -> Callable[[], Any]:
    torch = t.torch
    model = torch_decoder(torch, config, size[1]).to("cuda", getattr(torch, d.name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    forward = t.compile(model) if compiled else model
    tokens = torch.randint(0, config.vocab, size, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        forward(tokens, tokens).backward()
        optimizer.step()

    return step


def decoder_step(cp: Any, t: Torch | None, tiny: bool, d: np.dtype) -> dict[str, Any]:
    """Microseconds of a step, to the end on the device. ``host``: of the host alone, which starts an eager step, and
    the functions that take most of it."""
    config, size = TINY if tiny else LARGE
    step, start, tokens = ours(config, size, d)
    wait, rounds = cp.cuda.Device().synchronize, 2 if tiny else 10

    def typical(call: Callable[[], Any]) -> float:
        found = []
        for i in range(3 + rounds):
            wait()
            began = time.perf_counter()
            call()
            wait()
            if i >= 3:
                found.append(time.perf_counter() - began)
        return statistics.median(found) * 1e6

    times = {}
    for name, fn in {
        "eager": step,
        "compiled": mt.compile(step),
        "graph": mt.compile(step, cuda_graph=True, donate=0),
    }.items():
        held = [start()]

        def once(fn: Callable[..., Any] = fn, held: list[Any] = held) -> None:
            held[0], _ = fn(held[0], tokens)

        times[name] = typical(once)
        if name == "eager":
            wait()
            profile, began = cProfile.Profile(), time.perf_counter()
            once()
            times["eager, of the host"] = (time.perf_counter() - began) * 1e6
            wait()
            profile.runcall(once)
        held.clear()
        cp.get_default_memory_pool().free_all_blocks()
    failed, peers = {}, () if t is None else MOST if t.compiled else ("torch",)
    for name in peers:
        try:
            times[name] = typical(theirs(t, config, size, d, name == "torch compiled"))
        except Exception as e:
            failed[name] = {"error": f"{type(e).__name__}: {e}"[:300]}
    rows = sorted(pstats.Stats(profile).stats.items(), key=lambda row: -row[1][2])[:25]  # type: ignore[attr-defined]
    targets = {
        f"graph at most {most} of {name}": times["graph"] <= most * times[name] if name in times else None
        for name, most in MOST.items()
    }
    reason = "PyTorch with CUDA is not here" if t is None else f"{' and '.join(failed) or 'torch.compile'} has no time"
    return {
        "parameters": sum(x.size for x in mt.tree.flatten(start()[0])[0]),
        "us": times,
        "peers": failed,
        "host": [
            f"{own * 1e6:.0f} us, {calls} calls: {file.rpartition('/')[2]}:{line} {name}"
            for (file, line, name), (calls, _, own, *_) in rows
        ],
        **of_targets(targets, reason),
    }
