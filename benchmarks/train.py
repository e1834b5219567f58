"""A training step of a decoder of 10.7 million parameters, against PyTorch on the same threads: ``python
benchmarks/train.py``.

One process against PyTorch's eager mode (the same architecture, the same numbers of rows and tokens, AdamW and clipping
included), and two Dask workers against PyTorch's DistributedDataParallel and FSDP (ours: ZeRO 3) with gloo on two
processes. Two processes give the scaling efficiency in both of its meanings: *weak*, at one batch per process (the time
of one process with half the batch over that of two; as in Goyal et al., "Accurate, Large Minibatch SGD",
arXiv:1706.02677), and *strong*, at one global batch (the time of one process over twice that of two). Two processes
that make a step of half a batch each and exchange nothing say how much of either the machine allows. What is exchanged
and what the optimizer does are the same for any batch, so that all of this is measured for several. Every process
computes on one thread.
"""

from __future__ import annotations

import timing  # first: it sets the number of threads

# isort: split
import argparse

import installed

LENGTH = 128

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15, help="steps a measurement")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32], help=f"rows of {LENGTH} tokens a step")
    parser.add_argument(
        "--resumed", type=int, default=400, help="steps before the resume from quantised states; 0: none"
    )
    parser.add_argument("--one", action="store_true", help="leave out the rows of two processes")
    OPTIONS = installed.options(parser)

# isort: split
import contextlib
import multiprocessing
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from storage_forms import TrainingRun
from torch_decoder import torch_decoder

import meshtape as mt

de = mt.models.decoder
CONFIG = de.Config(vocab=256, width=384, layers=6, heads=6, max_length=256)


def batch(rows: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab, (rows, LENGTH + 1))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


# ----- ours -----------------------------------------------------------------------------------------------------------


def ours(rows: int, mesh: Any = None, zero: int = 0, snapshots: bool = False) -> Callable[[], float]:
    """A function that makes a step of ``mt.Trainer`` and waits for it. ``snapshots``: copies of the state in memory
    after each step."""
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
    data = next(iter(trainer.session.loader.batches(0)))

    def step() -> float:
        loss = float(trainer.session.step(data)["loss"])
        if snapshots:
            trainer.recovery.take_snapshot()
        return loss

    return step


# ----- PyTorch --------------------------------------------------------------------------------------------------------


def theirs(
    torch: Any, rows: int, rank: int = 0, ranks: int = 1, wrap: Callable[[Any], Any] = lambda m: m
) -> Callable[[], float]:
    model = torch_decoder(torch, CONFIG, LENGTH)
    parallel = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids, labels = (torch.from_numpy(x[rank::ranks].copy()) for x in batch(rows).values())

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = parallel(ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def gloo_worker(kind: str, rows: int, rank: int, port: int, asked: Any) -> None:
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
    step = theirs(torch, rows, rank, 2, wrap)
    while asked.recv():
        asked.send(step())
    dist.destroy_process_group()


def half_worker(kind: str, rows: int, rank: int, port: int, asked: Any) -> None:
    """One process that makes a step of ours on half a batch for each message, and exchanges nothing."""
    step = ours(rows // 2)
    while asked.recv():
        asked.send(step())


@contextlib.contextmanager
def two(worker: Callable[..., None], rows: int, kind: str = "") -> Iterator[Callable[[], float]]:
    """A function that makes a step on two processes, which wait without work between the steps."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    processes = [context.Process(target=worker, args=(kind, rows, r, port, pipes[r][1])) for r in range(2)]
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


ZERO = (0, 2, 3)


def measured(rows: int, steps: int, torch: Any, mesh: Any) -> dict[str, float]:
    """Seconds of a step of each candidate, by name; those of two processes only where there is a mesh."""
    # All in turns, those of two processes included: what the machine gives differs by a third from one second to the
    # next.
    candidates = {"one": ours(rows)}
    with contextlib.ExitStack() as stack:
        if torch is not None:
            candidates["PyTorch eager"] = theirs(torch, rows)
        if mesh is not None:
            candidates["one, half"] = ours(rows // 2)
            if torch is not None:
                candidates["PyTorch eager, half"] = theirs(torch, rows // 2)
            for zero in ZERO:
                candidates[f"ZeRO {zero}"] = ours(rows, mesh, zero)
            for zero in ZERO[::2]:
                candidates[f"ZeRO {zero}, copied"] = ours(rows, mesh, zero, snapshots=True)
            for kind in ("DDP", "FSDP") if torch is not None else ():
                candidates[kind] = stack.enter_context(two(gloo_worker, rows, kind))
            candidates["halves"] = stack.enter_context(two(half_worker, rows))
        return timing.timed(candidates, seconds=0, rounds=steps)


def resumed(steps: int) -> None:
    """Print how far the losses after a resume from quantised optimizer states are from the exact ones."""
    run = TrainingRun()
    for _ in range(steps):
        run.step()
    params, state, rng = run.params, run.state, run.rng.bit_generator.state

    def losses(held: Any) -> np.ndarray:
        run.params, run.state, run.rng.bit_generator.state = params, held, rng
        return np.asarray([run.step() for _ in range(6)])

    exact = losses(state)
    print(f"loss of six steps on resume after {steps}: {exact.min():.3f} to {exact.max():.3f}; away from that at most")
    for bits, keys, told, bound in (
        (8, ["*"], "int8, both moments", 0.001),
        (8, ["mean*"], "int8, the mean", 0.001),
        (4, ["mean*"], "int4, the mean", 0.005),
        (4, ["*"], "int4, both moments", 0.005),
    ):
        small = mt.storage.quantize(state, bits=bits, keys=keys)
        worst = np.abs(losses(mt.storage.dequantize(small)[0]) - exact).max()
        print(f"  {told:<42} {worst:.5f} {'✓' if worst <= bound else '✗'}   (target ≤ {bound:g})")


def main(options: argparse.Namespace) -> None:
    if options.resumed:
        resumed(options.resumed)
    torch = timing.peer("torch")
    if torch is not None:
        torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        mesh = None
        if not options.one:
            from meshtape.parallel.dask.cluster import local_cluster

            client = stack.enter_context(local_cluster(2))
            mesh = stack.enter_context(mt.Mesh({"data": 2}, client=client))
        for rows in options.rows:
            found = measured(rows, options.steps, torch, mesh)
            report = timing.Report(f"decoder, {rows} × {LENGTH} tokens a step, {installed.kernels()}")
            report.add("step, one process", found["one"], found, {"PyTorch eager": 1.2})
            if mesh is not None:
                for zero, peer in zip(ZERO, ("DDP", "FSDP", "FSDP"), strict=True):
                    report.add(f"step, two workers, ZeRO {zero}", found[f"ZeRO {zero}"], found, {peer: None})
                for zero in ZERO[::2]:
                    label = f"the same, ZeRO {zero}, with a snapshot a step"
                    report.add(label, found[f"ZeRO {zero}, copied"], found, {f"ZeRO {zero}": 1.15})
            report.show()
            if mesh is not None:
                efficiencies(found)


def efficiencies(found: Mapping[str, float]) -> None:
    """Print what two processes gain over one."""
    print("scaling efficiency of two processes          weak  strong")
    for name in (*(f"ZeRO {z}" for z in ZERO), "halves", "DDP", "FSDP"):
        if name in found:
            alone = "PyTorch eager" if name in ("DDP", "FSDP") else "one"
            weak, strong = found[f"{alone}, half"] / found[name], found[alone] / (2 * found[name])
            label = "two of ours that exchange nothing" if name == "halves" else name
            goal = "   (target ≥ 0.85)" if name == "ZeRO 0" else ""
            print(f"  {label:<42} {weak:.2f}    {strong:.2f}{goal}")


if __name__ == "__main__":
    main(OPTIONS)
