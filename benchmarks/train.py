"""A training step of a decoder of 10.7 million parameters, against PyTorch on the same threads: ``python benchmarks/train.py``.

One process against PyTorch's eager mode (the same architecture, the same numbers of rows and tokens, AdamW and clipping included), and
two Dask workers against PyTorch's DistributedDataParallel and FSDP (ours: ZeRO 3) with gloo on two processes. Rows of two processes give the
scaling efficiency: the time of one process over twice that of two, at one global batch; what two processes reach that make a step of half
a batch each and exchange nothing says how much of it the machine allows. Every process computes on one thread.

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
import contextlib
import multiprocessing
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import meshtape as mt

de = mt.models.decoder
CONFIG = de.Config(vocab=256, width=384, layers=6, heads=6, max_length=256)
ROWS, LENGTH = 8, 128


def batch(rows: int = ROWS) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab, (rows, LENGTH + 1))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


# ----- ours -----------------------------------------------------------------------------------------------------------


def ours(mesh: Any = None, zero: int = 0, rows: int = ROWS) -> Callable[[], float]:
    """A function that makes a step of ``mt.Trainer`` and waits for it."""
    plan = de.plan("dp")
    trainer = mt.Trainer(
        lambda p, b, key: de.loss(p, b, CONFIG, plan=plan),
        lambda key: de.init(key, CONFIG),
        mt.optim.adamw(1e-3),
        batch(rows),
        batch=rows,
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


def gloo_worker(kind: str, rank: int, port: int, asked: Any) -> None:
    """One process of PyTorch's DDP or FSDP: a step for each message, until there is none."""
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
    while asked.recv():
        asked.send(step())
    dist.destroy_process_group()


def half_worker(kind: str, rank: int, port: int, asked: Any) -> None:
    """One process that makes a step of ours on half a batch for each message, and exchanges nothing."""
    step = ours(rows=ROWS // 2)
    while asked.recv():
        asked.send(step())


@contextlib.contextmanager
def two(worker: Callable[..., None], kind: str = "") -> Iterator[Callable[[], float]]:
    """A function that makes a step on two processes, which wait without work between the steps."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    processes = [context.Process(target=worker, args=(kind, r, port, pipes[r][1])) for r in range(2)]
    for p in processes:
        p.start()
    for _, end in pipes:
        end.close()  # theirs: so a process that ended is noticed

    def step() -> float:
        for pipe, _ in pipes:
            pipe.send(True)
        return [pipe.recv() for pipe, _ in pipes][0]  # noqa: RUF015  both are waited for

    try:
        yield step
    finally:
        for pipe, _ in pipes:
            with contextlib.suppress(OSError):
                pipe.send(False)
        for p in processes:
            p.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15, help="steps a measurement")
    parser.add_argument("--one", action="store_true", help="leave out the rows of two processes")
    parser.add_argument("--editable", action="store_true", help="measure the sources of this checkout")
    options = parser.parse_args()
    torch = timing.peer("torch")
    report = timing.Report(f"decoder, {ROWS} × {LENGTH} tokens a step, {installed.core()}")
    # All in turns, those of two processes included: what the machine gives differs by a third from one second to the next.
    candidates = {"one": ours()}
    with contextlib.ExitStack() as stack:
        if torch is not None:
            torch.set_num_threads(1)
            candidates["PyTorch eager"] = theirs(torch)
        if not options.one:
            from meshtape.parallel.cluster import local_cluster

            client = stack.enter_context(local_cluster(2))
            mesh = stack.enter_context(mt.Mesh({"data": 2}, client=client))
            for zero in (0, 3):
                candidates[f"ZeRO {zero}"] = ours(mesh, zero)
            for kind in ("DDP", "FSDP") if torch is not None else ():
                candidates[kind] = stack.enter_context(two(gloo_worker, kind))
            candidates["halves"] = stack.enter_context(two(half_worker))
        found = timing.timed(candidates, seconds=0, rounds=options.steps)
    report.add("step, one process", found["one"], found, {"PyTorch eager": 1.2})
    if not options.one:
        report.add("step, two workers, ZeRO 0", found["ZeRO 0"], found, {"DDP": None})
        report.add("step, two workers, ZeRO 3", found["ZeRO 3"], found, {"FSDP": None})
    report.show()
    if "halves" in found:
        bound = found["one"] / (2 * found["halves"])
        print(
            f"two processes of ours that exchange nothing reach {bound:.2f} of twice one here: no efficiency can be higher"
        )
    for name, goal in (("ZeRO 0", " (target ≥ 0.85)"), ("ZeRO 3", ""), ("DDP", ""), ("FSDP", "")):
        if name in found:
            one = found["one" if name.startswith("ZeRO") else "PyTorch eager"]
            print(f"scaling efficiency of two processes, {name}: {one / (2 * found[name]):.2f}{goal}")


if __name__ == "__main__":
    main()
