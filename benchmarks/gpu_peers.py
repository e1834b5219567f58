"""Candidates beside ours: PyTorch, eager and compiled, JAX, and CuPy's own functions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from gpu_clock import Inputs, Meter, Peer, Timed


def importable(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        return None


def on_stream(fn: Callable[..., Any]) -> Peer:
    """CuPy's own functions, or others of ours."""
    return lambda meter, sets: meter.prepare(fn, sets)


class Torch:
    """PyTorch's functions on buffers of ours (shared through DLPack), eager or compiled (by Triton, on a GPU)."""

    def __init__(self, torch: Any, compiled: bool = True) -> None:
        self.torch, self.compiled = torch, compiled

    def of(self, a: Any) -> Any:
        if a.dtype == ml_dtypes.bfloat16:
            return self.torch.from_dlpack(a.view(np.uint16)).view(self.torch.bfloat16)
        return self.torch.from_dlpack(a)

    def prepare(self, meter: Meter, run_all: Callable[[int], Any], sets: int) -> Timed:
        """``run_all(n)`` makes n calls. Capture is PyTorch's own: its memory and its autograd know of it."""
        torch, side = self.torch, self.torch.cuda.Stream()
        before = torch.cuda.current_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run_all(sets)
            torch.cuda.synchronize()
            start = time.perf_counter()
            run_all(sets)
            torch.cuda.synchronize()
            one = (time.perf_counter() - start) / sets
        n = sets * -(-(1 if meter.tiny else min(200, int(5e-3 / max(one, 1e-7)) + 1)) // sets)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=side):
                run_all(n)
        except Exception:
            torch.cuda.set_stream(before)  # a capture that fails leaves its own, where no event of ours is
            torch.cuda.synchronize()
            return meter.behind_spin(lambda: run_all(n), n)
        return Timed(lambda: meter.between(graph.replay)[0] / n, "graph")

    def calls(self, fn: Callable[[], Callable[..., Any]]) -> Peer:
        """``fn()`` is made when its turn comes: what was compiled for another row is forgotten before."""

        def prepare(meter: Meter, sets: Inputs) -> Timed:
            call, tensors = fn(), [[self.of(a) for a in s] for s in sets]
            kept = deque(maxlen=len(sets))

            def run_all(n: int) -> None:
                for i in range(n):
                    kept.append(call(*tensors[i % len(tensors)]))

            return self.prepare(meter, run_all, len(sets))

        return prepare

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        self.torch._dynamo.reset()
        return self.torch.compile(fn, dynamic=False)

    def wrap(self, fn: Callable[..., Any]) -> Peer:
        return self.calls(lambda: fn)

    def both(self, peer: Callable[[Callable[[], Callable[..., Any]]], Peer], fn: Callable[..., Any]) -> dict[str, Peer]:
        eager = {"torch": peer(lambda: fn)}
        return eager | {"torch compiled": peer(lambda: self.compile(fn))} if self.compiled else eager

    def pair(self, fn: Callable[..., Any]) -> dict[str, Peer]:
        return self.both(self.calls, fn)

    def gradients(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function of a cotangent and the arguments of ``fn``: those of all its arguments of floats."""

        def run(g: Any, *args: Any) -> Any:
            args = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in args)
            return self.torch.autograd.grad(fn(*args), [x for x in args if x.requires_grad], g)

        return run

    def both_ways(self, fn: Callable[..., Any], of_numbers: bool = False) -> dict[str, Peer]:
        """:meth:`gradients` with ``fn`` as it is, and compiled; without a cotangent where it gives a number."""
        before = (None,) if of_numbers else ()

        def peer(make: Callable[[], Callable[..., Any]]) -> Peer:
            def made() -> Callable[..., Any]:
                run = self.gradients(make())
                return lambda *args: run(*before, *args)

            return self.calls(made)

        return self.both(peer, fn)

    def backward(self, fn: Callable[..., Any], wanted: Sequence[int]) -> dict[str, Peer]:
        """The backward pass alone: the forward pass is made once for each set of inputs. The cotangent is the first
        array."""

        def peer(make: Callable[[], Callable[..., Any]]) -> Peer:
            def prepare(meter: Meter, sets: Inputs) -> Timed:
                forward, kept, made = make(), deque(maxlen=len(sets)), []

                def run_all(n: int) -> None:
                    if not made:  # on the stream of the capture, where its backward pass then runs
                        for s in sets:
                            g, *args = (self.of(a) for a in s)
                            leaves = [args[i].requires_grad_() for i in wanted]
                            made.append((forward(*args), leaves, g))
                    for i in range(n):
                        out, leaves, g = made[i % len(made)]
                        kept.append(self.torch.autograd.grad(out, leaves, g, retain_graph=True))

                return self.prepare(meter, run_all, len(sets))

            return prepare

        return self.both(peer, fn)


def jax_peer(jax: Any, fn: Callable[..., Any]) -> Peer:
    """One jitted function makes the calls on all inputs; several such are queued before the last is awaited."""

    def prepare(meter: Meter, sets: Inputs) -> Timed:
        def of(a: Any) -> Any:
            if a.dtype == np.int64:  # which JAX does not take by default
                return jax.dlpack.from_dlpack(a.astype(np.int32))
            if a.dtype == ml_dtypes.bfloat16:
                return jax.lax.bitcast_convert_type(jax.dlpack.from_dlpack(a.view(np.uint16)), a.dtype)
            return jax.dlpack.from_dlpack(a)

        given = [[of(a) for a in s] for s in sets]
        every = jax.jit(lambda given: [fn(*s) for s in given])
        jax.block_until_ready(every(given))

        def elapsed(rounds: int = 20) -> float:
            start = time.perf_counter()
            for _ in range(rounds):
                out = every(given)
            jax.block_until_ready(out)
            return (time.perf_counter() - start) / rounds / len(sets)

        return Timed(elapsed, "jit")

    return prepare
