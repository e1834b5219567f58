"""A training step of a decoder of 10.7 million parameters, against PyTorch on the same threads: ``python benchmarks/train.py``.

One process against PyTorch's eager mode (the same architecture, the same numbers of rows and tokens, AdamW and clipping included), and
two Dask workers against PyTorch's DistributedDataParallel and FSDP (ours: ZeRO 3) with gloo on two processes. Rows of two processes give the
scaling efficiency: the time of one process over twice that of two, at one global batch. Every process computes on one thread.

What a user has who installed the package is measured, see :mod:`installed`; with ``--editable``, the sources of this checkout.
"""

from __future__ import annotations

import timing  # first: it sets the number of threads

# isort: split
import installed

if __name__ == "__main__":
    installed.run_on_wheel()

# isort: split
import argparse
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import meshtape as mt

de = mt.models.decoder
CONFIG = de.Config(vocab=256, width=384, layers=6, heads=6, max_length=256)
ROWS, LENGTH = 8, 128


def batch() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab, (ROWS, LENGTH + 1))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


# ----- ours -----------------------------------------------------------------------------------------------------------


def ours(mesh: Any = None, zero: int = 0) -> Callable[[], float]:
    """A function that makes a step of ``mt.Trainer`` and waits for it."""
    plan = de.plan("dp")
    trainer = mt.Trainer(
        lambda p, b, key: de.loss(p, b, CONFIG, plan=plan),
        lambda key: de.init(key, CONFIG),
        mt.optim.adamw(1e-3),
        batch(),
        batch=ROWS,
        steps=1,
        plan=plan,
        mesh=mesh,
        zero=zero,
        clip=1.0,
    )
    trainer.session.start(trainer.init)
    data = next(iter(trainer.session.batches(0, None)))

    def step() -> float:
        return float(trainer.session.step(data)["loss"])

    return step


# ----- PyTorch --------------------------------------------------------------------------------------------------------


def torch_model(torch: Any) -> tuple[Any, Callable[[Any, Any], Any]]:
    """The same decoder as PyTorch's users would write it: parameters, and the loss of a batch."""
    import torch.nn.functional as F

    c = CONFIG
    generator = torch.Generator().manual_seed(0)

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()

            def weight(*shape: int) -> Any:
                return torch.nn.Parameter(torch.randn(*shape, generator=generator) * 0.02)

            self.embed = weight(c.vocab, c.width)
            self.norm = torch.nn.Parameter(torch.ones(c.width))
            self.layers = torch.nn.ModuleList()
            for _ in range(c.layers):
                layer = torch.nn.Module()
                for name, o, i in (
                    ("q", c.width, c.width), ("k", c.width, c.width), ("v", c.width, c.width), ("o", c.width, c.width),
                    ("gate", c.ffn, c.width), ("up", c.ffn, c.width), ("down", c.width, c.ffn),
                ):  # fmt: skip
                    setattr(layer, name, weight(o, i))
                layer.n1, layer.n2 = (torch.nn.Parameter(torch.ones(c.width)) for _ in range(2))
                self.layers.append(layer)
            cosines, sines = de.rotary_tables(np.arange(LENGTH), c.head_size, c.theta)
            self.register_buffer("cosines", torch.from_numpy(cosines))
            self.register_buffer("sines", torch.from_numpy(sines))

        def turn(self, x: Any) -> Any:
            half = x.shape[-1] // 2
            return x * self.cosines + torch.cat([x[..., half:], x[..., :half]], -1) * self.sines

        def forward(self, ids: Any, labels: Any) -> Any:
            x = self.embed[ids]
            b, s, _ = x.shape
            for p in self.layers:
                h = F.rms_norm(x, (c.width,), p.n1, c.eps)
                q, k, v = (F.linear(h, w).view(b, s, c.heads, -1).transpose(1, 2) for w in (p.q, p.k, p.v))
                a = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
                x = x + F.linear(a.transpose(1, 2).reshape(b, s, c.width), p.o)
                h = F.rms_norm(x, (c.width,), p.n2, c.eps)
                x = x + F.linear(F.silu(F.linear(h, p.gate)) * F.linear(h, p.up), p.down)
            logits = F.linear(F.rms_norm(x, (c.width,), self.norm, c.eps), self.embed)
            return F.cross_entropy(logits.view(-1, c.vocab), labels.view(-1))

    return Decoder()


def theirs(torch: Any, rank: int = 0, ranks: int = 1, wrap: Callable[[Any], Any] = lambda m: m) -> Callable[[], float]:
    model = torch_model(torch)
    parallel = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids, labels = (torch.from_numpy(x[rank::ranks].copy()) for x in batch().values())

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = parallel(ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def gloo_worker(kind: str, rank: int, port: int, steps: int, out: Any) -> None:
    """One process of PyTorch's DDP or FSDP: median seconds of a step."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    if kind == "DDP":
        wrap: Callable[[Any], Any] = torch.nn.parallel.DistributedDataParallel
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        wrap = lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (2,)))  # noqa: E731
    step = theirs(torch, rank, 2, wrap)
    seconds = []
    for _ in range(steps + 2):
        dist.barrier()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        out.put(statistics.median(seconds[2:]))
    dist.destroy_process_group()


def gloo(kind: str, steps: int) -> float:
    """Median seconds of a step of two processes."""
    import torch.multiprocessing as mp

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("spawn")
    out = context.SimpleQueue()
    processes = [context.Process(target=gloo_worker, args=(kind, r, port, steps, out)) for r in range(2)]
    for p in processes:
        p.start()
    for p in processes:
        p.join()
    if any(p.exitcode for p in processes):
        raise RuntimeError(f"a process of PyTorch's {kind} failed")
    return out.get()


def median(fn: Callable[[], Any], steps: int) -> float:
    fn()
    fn()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        fn()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=7, help="steps a measurement")
    parser.add_argument("--one", action="store_true", help="leave out the rows of two processes")
    options = parser.parse_args()
    torch = timing.peer("torch")
    report = timing.Report(f"decoder, {ROWS} × {LENGTH} tokens a step, {installed.core()}")
    eager = None
    if torch is not None:
        torch.set_num_threads(1)
        eager = theirs(torch)
    report.row("step, one process", ours(), {"PyTorch eager": (eager, 1.2)}, rounds=options.steps, seconds=1.0)
    report.show()
    if options.one:
        return
    from meshtape.parallel.cluster import local_cluster

    one = median(ours(), options.steps)
    found = {}
    for name, zero in (("DDP", 0), ("FSDP", 3)):
        with local_cluster(2) as client, mt.Mesh({"data": 2}, client=client) as mesh:
            found[name] = two = median(ours(mesh, zero), options.steps)
        goal = " (target ≥ 0.85)" if zero == 0 else ""
        print(
            f"two Dask workers, ZeRO {zero}: {two * 1e3:.0f} ms a step, scaling efficiency {one / (2 * two):.2f}{goal}"
        )
    if torch is None:
        print("PyTorch's DDP and FSDP: missing")
        return
    single = median(theirs(torch), options.steps)
    for name, two in found.items():
        both = gloo(name, options.steps)
        print(
            f"{name} with gloo: {both * 1e3:.0f} ms a step, scaling efficiency {single / (2 * both):.2f}; ours / theirs {two / both:.2f}"
        )


if __name__ == "__main__":
    main()
