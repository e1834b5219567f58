"""Pipeline parallelism: the stages of a model on parts of the mesh, and micro-batches that pass through them by a schedule.

A stage is a pure function ``stage(params, x, batch)``: it gets what the stage before gave (None in the first one) and gives what the next one
gets; the last gives ``(total, weight)`` of the loss. Each stage lives on the part of the mesh at one place along the axis ``pipe``, split
there by a plan like any other model. What a rank keeps of a micro-batch between its forward and its backward pass is the input of the
stage; the backward pass computes the stage again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...arrays import tree as trees
from ...arrays._array import Array
from ...arrays.creation import asarray
from ...arrays.errors import MeshError, TrainingError
from ...autodiff import compile, value_and_grad, vjp
from ...autodiff.optim import Optimizer
from ..api import distribute, reshard
from ..mesh import Mesh
from ..models.plans import Plan
from ..placement import Sharding
from ..schedules import Action, Schedule, schedule
from .loading import fitted

Stage = Callable[[Any, Any, Any], Any]
Tied = tuple[tuple[int, str], tuple[int, str]]


class Pipeline:
    """Stages on a mesh.

    Parameters
    ----------
    stages
        The functions, in order; as many as ranks along the axis, or ``chunks`` times as many.
    mesh
        A mesh with the axis; its other axes are those of every stage's part.
    kind
        ``"fthenb"``, ``"1f1b"``, ``"interleaved"`` or ``"zerobubble"``; see ``meshtape.parallel.schedules``.
    axis
        Name of the axis.
    chunks
        Stages a rank, for ``"interleaved"``. Stage ``i`` is on rank ``i % ranks``.
    plan
        How the parameters of a stage lie on its part; by default they are replicated, and batches split over ``data``.
    tied
        Pairs of parameters that are one: ``((0, "embed"), (3, "embed"))``, each a stage and a name. Their gradients are added, and both get the sum.

    Raises
    ------
    MeshError, TrainingError
        Where stages, ranks and schedule do not fit together.

    Examples
    --------
    >>> import meshtape as mt
    >>> stages = [lambda w, x, b: b["x"] * w, lambda w, x, b: (((x - w) ** 2).sum(), mt.asarray(2.0))]
    >>> pipe = mt.training.Pipeline(stages, mt.Mesh({"pipe": 2}))
    >>> params = pipe.place([mt.asarray(3.0), mt.asarray(1.0)])
    >>> (total, weight), grads = pipe.value_and_grad(params, [{"x": mt.asarray([1.0, 2.0])}])
    >>> float(total), [float(g) for g in grads]
    (29.0, [24.0, -14.0])
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        mesh: Mesh,
        *,
        kind: str = "1f1b",
        axis: str = "pipe",
        chunks: int = 1,
        plan: Plan | None = None,
        tied: Sequence[Tied] = (),
    ) -> None:
        if axis not in mesh.names:
            raise MeshError(f"{mesh} has no axis {axis!r} for the stages")
        self.ranks = mesh.describe()[axis]
        if len(stages) != self.ranks * chunks:
            raise TrainingError(
                f"{len(stages)} stages for {self.ranks} ranks along {axis!r} with {chunks} chunk(s) each"
            )
        self.mesh, self.kind, self.chunks = mesh, kind, chunks
        self.plan = plan or Plan(("dp",))
        self.tied = tuple(tied)
        self.parts = [mesh.submesh(**{axis: i % self.ranks}) for i in range(len(stages))]
        last = len(stages) - 1
        self._forward = [compile(s) for s in stages[:-1]]
        self._loss = compile(_loss_backward(stages[last], first=last == 0))
        halves = {"B": (True, True), "I": (True, False), "W": (False, True)}
        self._backward = [
            {k: compile(_backward(s, i == 0, *which)) for k, which in halves.items()} for i, s in enumerate(stages[:-1])
        ]
        self._add = compile(lambda a, b: trees.tree_map(lambda x, y: x + y, a, b))
        self.peak: tuple[int, ...] = ()

    # ----- where things live ----------------------------------------------------------------------------------------------

    def place(self, params: Sequence[Any]) -> list[Any]:
        """Parameters of the stages, put on their parts."""
        if len(params) != len(self.parts):
            raise TrainingError(f"{len(params)} trees of parameters for {len(self.parts)} stages")
        return [self.plan.distribute(p, part) for p, part in zip(params, self.parts, strict=True)]

    def _put(self, batch: Any, stage: int) -> Any:
        part = self.parts[stage]

        def one(x: Any) -> Array:
            x = asarray(x)
            return distribute(x, fitted(self.plan.batch(part), x.ndim))

        return trees.tree_map(one, batch)

    def _to(self, x: Any, stage: int) -> Any:
        """A value on the part of another stage, split as it was."""
        part = self.parts[stage]

        def one(a: Array) -> Array:
            here = a.sharding
            assert here is not None
            if here.mesh is part:
                return a
            return reshard(a, Sharding(part, **here.placements))

        return trees.tree_map(one, x)

    # ----- a step -----------------------------------------------------------------------------------------------------------

    def schedule(self, micros: int) -> Schedule:
        """Who does what when, for so many micro-batches."""
        return schedule(self.kind, self.ranks, micros, chunks=self.chunks)

    def value_and_grad(self, params: Sequence[Any], micro: Sequence[Any]) -> tuple[tuple[Array, Array], list[Any]]:
        """Sum and weight of the loss over all micro-batches, and the gradient of that sum for each stage's parameters.

        Micro-batches are trees of local arrays. The sums lie on the part of the last stage. ``peak`` then says how many inputs of stages
        each rank held at most.
        """
        plan = self.schedule(len(micro))
        run = _Run(self, params, micro)
        # The order of the simulated ends is one that every rank can follow; on a cluster each part works through its own by itself.
        for action in sorted(ends := plan.simulate().ends, key=lambda a: (ends[a], a.stage)):
            run.do(action)
        self.peak = tuple(run.peak)
        return (run.total, run.weight), self._tie(run.grads)

    def _tie(self, grads: list[Any]) -> list[Any]:
        for (i, a), (j, b) in self.tied:
            mine, other = _leaf(grads[i], a), _leaf(grads[j], b)
            total = mine + self._to(other, i)
            grads[i] = _with_leaf(grads[i], a, total)
            grads[j] = _with_leaf(grads[j], b, reshard(self._to(total, j), other.sharding))
        return grads

    def optimizer(self, optimizer: Optimizer) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """``init(params)`` and ``step(params, state, micro)`` of an optimizer on all stages; a step gives ``(params, state, loss)``.

        The gradient is that of the mean over the weight of all micro-batches.
        """
        scaled = compile(lambda p, g, s, w: optimizer.update(p, trees.tree_map(lambda x: x / w.astype(x.dtype), g), s))

        def init(params: Sequence[Any]) -> list[Any]:
            return [optimizer.init(p) for p in params]

        def step(
            params: Sequence[Any], state: Sequence[Any], micro: Sequence[Any]
        ) -> tuple[list[Any], list[Any], Array]:
            (total, weight), grads = self.value_and_grad(params, micro)
            done = [
                scaled(p, g, s, self._to(weight, i))
                for i, (p, g, s) in enumerate(zip(params, grads, state, strict=True))
            ]
            return [p for p, _ in done], [s for _, s in done], total / weight

        return init, step


class _Run:
    """One pass of the micro-batches through the stages."""

    def __init__(self, pipe: Pipeline, params: Sequence[Any], micro: Sequence[Any]) -> None:
        self.pipe, self.params, self.micro = pipe, params, micro
        self.inputs: dict[tuple[int, int], Any] = {}  # what a stage holds until its backward pass is over
        self.arriving: dict[tuple[int, int], Any] = {}  # outputs and cotangents on their way to the next action
        self.grads: list[Any] = [None] * len(pipe.parts)
        self.total: Any = None
        self.weight: Any = None
        self.held = [0] * pipe.ranks
        self.peak = [0] * pipe.ranks
        self.batches: dict[tuple[int, int], Any] = {}

    def _batch(self, stage: int, i: int) -> Any:
        if (stage, i) not in self.batches:
            self.batches[stage, i] = self.pipe._put(self.micro[i], stage)
        return self.batches[stage, i]

    def do(self, action: Action) -> None:
        kind, s, i = action
        rank, last = s % self.pipe.ranks, len(self.pipe.parts) - 1
        if kind == "F":
            x = None if s == 0 else self.pipe._to(self.arriving.pop((s, i)), s)
            self.inputs[s, i] = x
            self.held[rank] += 1
            self.peak[rank] = max(self.peak[rank], self.held[rank])
            if s < last:
                self.arriving[s + 1, i] = self.pipe._forward[s](self.params[s], x, self._batch(s, i))
            return
        x, batch = self.inputs[s, i], self._batch(s, i)
        if s == last:
            if kind != "W":
                self._loss(s, i, x, batch)
        else:
            # The cotangent waits where it arrived until the last of I and W has used it.
            g = self.pipe._to(self.arriving[s, i], s)
            found = self.pipe._backward[s][kind](self.params[s], x, batch, g)
            if "x" in found and s:
                self.arriving[s - 1, i] = found["x"]
            if "params" in found:
                self._accumulate(s, found["params"])
            if kind != "I":
                del self.arriving[s, i]
        if kind != "I":
            del self.inputs[s, i]
            self.batches.pop((s, i), None)
            self.held[rank] -= 1

    def _loss(self, s: int, i: int, x: Any, batch: Any) -> None:
        total, weight, gp, gx = self.pipe._loss(self.params[s], x, batch)
        self.total = total if self.total is None else self.total + total
        self.weight = weight if self.weight is None else self.weight + weight
        self._accumulate(s, gp)
        if s:
            self.arriving[s - 1, i] = gx

    def _accumulate(self, s: int, g: Any) -> None:
        self.grads[s] = g if self.grads[s] is None else self.pipe._add(self.grads[s], g)


def _loss_backward(stage: Stage, first: bool) -> Callable[[Any, Any, Any], Any]:
    """Loss, weight and gradients of the last stage."""

    def run(params: Any, x: Any, batch: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            total, weight = stage(params, x, batch)
            return total, asarray(weight)

        if first:
            (total, weight), gp = value_and_grad(loss, has_aux=True)(params, x)
            return total, weight, gp, None
        (total, weight), (gp, gx) = value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)
        return total, weight, gp, gx

    return run


def _backward(stage: Stage, first: bool, inputs: bool, weights: bool) -> Callable[[Any, Any, Any, Any], Any]:
    """Cotangents of a stage's input, of its parameters, or of both; the stage is computed again."""

    def run(params: Any, x: Any, batch: Any, g: Any) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if first:
            if weights:
                out["params"] = vjp(lambda p: stage(p, None, batch), params)[1](g)[0]
            return out
        _, pull = vjp(lambda p, x: stage(p, x, batch), params, x)
        gp, gx = pull(g)
        if weights:
            out["params"] = gp
        if inputs:
            out["x"] = gx
        return out

    return run


def _leaf(tree: Any, name: str) -> Any:
    found = {trees.path_name(p): x for p, x in trees.flatten_with_path(tree)}
    if name not in found:
        raise TrainingError(f"a stage has no parameter {name!r} to tie; it has {', '.join(list(found)[:8])}")
    return found[name]


def _with_leaf(tree: Any, name: str, value: Any) -> Any:
    return trees.map_with_path(lambda p, x: value if trees.path_name(p) == name else x, tree)


__all__ = ["Pipeline"]
