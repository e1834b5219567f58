"""Pipeline parallelism: the stages of a model on parts of the mesh, and micro-batches that pass through them by a
schedule.

A stage is a pure function ``stage(params, x, batch, key)``. ``x`` is the result of the stage before (None in the first
one); the last stage returns the result of a loss function, such as ``(total, weight)``. The first and the last stage
get the micro-batch, and all get its key. Each stage lives on the part of the mesh at one place along the axis ``pipe``,
split there by a plan like any other model. Between the forward and the backward pass of a micro-batch a rank keeps only
the stage's input; the backward pass recomputes the stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.errors import MeshError, TrainingError
from ...arrays.ops.creation import asarray
from ...arrays.ops.elementwise import where
from ...arrays.ops.manipulation import astype
from ...autodiff import compile, value_and_grad, vjp
from ...autodiff.optim.optimizers import Optimizer
from ...autodiff.optim.parameters import wide
from ..mesh.api import distribute, reshard
from ..mesh.mesh import Mesh
from ..models.plans import Plan, of_any_model
from ..sharding.placement import Sharding
from ..transforms.pipeline_schedules import Schedule, ScheduleAction, all_forward_first, schedule
from .data.loader import fitted
from .step import merged, refuse_constant, weighted

Stage = Callable[[Any, Any, Any, Any], Any]
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
        ``"fthenb"``, ``"1f1b"``, ``"interleaved"`` or ``"zerobubble"``; see
        ``meshtape.parallel.transforms.pipeline_schedules``.
    axis
        Name of the axis.
    chunks
        Stages a rank, for ``"interleaved"``. Stage ``i`` is on rank ``i % ranks``.
    plan
        The shardings of a stage on its part; by default parameters are replicated, and batches split over ``data``.
    tied
        Pairs of tied parameters: ``((0, "embed"), (3, "embed"))``, each a stage and a name. Both get the sum of their
        gradients.

    Raises
    ------
    MeshError, TrainingError
        Where stages, ranks and schedule do not fit together.

    Examples
    --------
    >>> import meshtape as mt
    >>> stages = [lambda w, x, b, key: b["x"] * w, lambda w, x, b, key: (((x - w) ** 2).sum(), 2.0)]
    >>> pipe = mt.training.Pipeline(stages, mt.Mesh({"pipe": 2}))
    >>> params = pipe.place([mt.asarray(3.0), mt.asarray(1.0)])
    >>> sums, grads = pipe.value_and_grad(params, [{"x": mt.asarray([1.0, 2.0])}])
    >>> float(sums["loss"]), [float(g) for g in grads]
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
        plan: str | Plan | None = None,
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
        self.plan = of_any_model(plan)
        self.tied = tuple(tied)
        self.parts = [mesh.submesh(**{axis: i % self.ranks}) for i in range(len(stages))]
        last = len(stages) - 1
        self._forward = [compile(_forward(s)) for s in stages[:-1]]
        self._sums = compile(_sums(stages[last]))
        self._loss = compile(_loss_backward(stages[last]))
        halves = {"B": (True, True), "I": (True, False), "W": (False, True)}
        self._backward = [{k: compile(_backward(s, *which)) for k, which in halves.items()} for s in stages[:-1]]
        self._add = compile(lambda a, b: trees.tree_map(lambda x, y: wide(x) + wide(y), a, b))
        self.peak: tuple[int, ...] = ()

    # ----- where things live ------------------------------------------------------------------------------------------

    def place(self, params: Sequence[Any]) -> list[Any]:
        """Parameters of the stages, put on their parts."""
        if len(params) != len(self.parts):
            raise TrainingError(f"{len(params)} trees of parameters for {len(self.parts)} stages")
        return [self.plan.distribute(p, part) for p, part in zip(params, self.parts, strict=True)]

    def put(self, batch: Any, stage: int) -> Any:
        """A micro-batch on the part of a stage: from this process, or from the part where it is."""
        sharding = self.plan.batch(self.parts[stage])
        return self._placed(batch, self.parts[stage], lambda x: fitted(sharding, x.ndim))

    def to(self, x: Any, stage: int) -> Any:
        """Values moved to the part of a stage, split as before; local ones are replicated."""
        return self._placed(x, self.parts[stage], lambda x: Sharding(self.parts[stage]))

    def _placed(self, tree: Any, part: Mesh, of_local: Callable[[Array], Sharding]) -> Any:
        def one(x: Any) -> Array:
            x = asarray(x)
            here = x.sharding
            if here is None:
                return distribute(x, of_local(x))
            return x if here.mesh is part else reshard(x, Sharding.of(part, here.layout.reduced()))

        return trees.tree_map(one, tree)

    # ----- a step -----------------------------------------------------------------------------------------------------

    def schedule(self, micros: int) -> Schedule:
        """The schedule for so many micro-batches.

        If an interleaved schedule does not take that number, as in the last batch of an epoch, all forward passes come
        first, then all backward passes.
        """
        if self.kind != "interleaved" or micros % self.ranks == 0:
            return schedule(self.kind, self.ranks, micros, chunks=self.chunks)
        return all_forward_first(self.ranks, micros, self.chunks)

    def value_and_grad(
        self,
        params: Sequence[Any],
        micro: Sequence[Any],
        *,
        keys: Sequence[Any] | None = None,
        frozen: Sequence[Any] | None = None,
        scale: Any = None,
    ) -> tuple[dict[str, Array], list[Any]]:
        """Sums over all micro-batches, and the gradient of the loss's sum for each stage's parameters.

        Parameters
        ----------
        params
            Trees of the stages.
        micro
            Micro-batches: trees of local arrays, or of arrays on the part of the first stage.
        keys
            A key for each of them; by default the stages get None.
        frozen
            Trees of the stages with parameters that are not differentiated; these are None in ``params``.
        scale
            Factor of a micro-batch's mean loss before differentiation, for small floats. The gradients keep the factor.

        Returns
        -------
        sums, grads
            ``sums`` has ``"loss"``, ``"weight"`` and the loss's own metrics, on the part of the last stage.

        Notes
        -----
        ``peak`` then has the largest number of stage inputs that each rank held.
        """
        run = PipelineRun(self, params, micro, keys, frozen, scale)
        run.all(self.schedule(len(micro)))
        self.peak = tuple(run.peak)
        return run.sums, self._tie(run.grads)

    def sums(self, params: Sequence[Any], micro: Any, x: Any = None) -> dict[str, Array]:
        """The sums of one micro-batch without gradients; the stages get the key None, and the first one ``x``."""
        last = len(self.parts) - 1
        for s, run in enumerate(self._forward):
            x = run(params[s], None, self.to(x, s), self.put(micro, s) if s == 0 else None, None)
        return self._sums(params[last], self.to(x, last), self.put(micro, last))

    def _tie(self, grads: list[Any]) -> list[Any]:
        for (i, a), (j, b) in self.tied:
            mine, other = _leaf(grads[i], a), _leaf(grads[j], b)
            total = mine + self.to(other, i)
            grads[i] = _with_leaf(grads[i], a, total)
            grads[j] = _with_leaf(grads[j], b, reshard(self.to(total, j), other.sharding))
        return grads

    def optimizer(self, optimizer: Optimizer) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """``init(params)`` and ``step(params, state, micro)`` of an optimizer on all stages; a step gives ``(params,
        state, loss)``.

        The gradient is that of the mean over the weight of all micro-batches.
        """
        scaled = compile(lambda p, g, s, w: optimizer.update(p, trees.tree_map(lambda x: x / w.astype(x.dtype), g), s))

        def init(params: Sequence[Any]) -> list[Any]:
            return [optimizer.init(p) for p in params]

        def step(
            params: Sequence[Any], state: Sequence[Any], micro: Sequence[Any]
        ) -> tuple[list[Any], list[Any], Array]:
            sums, grads = self.value_and_grad(params, micro)
            weight = where((sums["weight"] == 0) & (sums["loss"] == 0), 1.0, sums["weight"])  # nothing counts
            done = [
                scaled(p, g, s, self.to(weight, i))
                for i, (p, g, s) in enumerate(zip(params, grads, state, strict=True))
            ]
            return [p for p, _ in done], [s for _, s in done], sums["loss"] / weight

        return init, step


class PipelineRun:
    """One pass of the micro-batches through the stages."""

    def __init__(
        self,
        pipe: Pipeline,
        params: Sequence[Any],
        micro: Sequence[Any],
        keys: Sequence[Any] | None,
        frozen: Sequence[Any] | None,
        scale: Any,
        xs: Sequence[Any] = (),
    ) -> None:
        self.pipe, self.params, self.micro = pipe, params, micro
        self.seen = (0, len(pipe.parts) - 1)  # stages that get the micro-batch
        self.keys = [None] * len(micro) if keys is None else keys
        self.frozen = [None] * len(params) if frozen is None else frozen
        self.scale = None if scale is None else pipe.to(scale, len(params) - 1)
        self.inputs: dict[tuple[int, int], Any] = {}  # inputs of stages until their backward pass is over
        # Outputs and cotangents on their way to the next action: at first inputs of stage 0, at the end their
        # cotangents.
        self.arriving: dict[tuple[int, int], Any] = {(0, i): x for i, x in enumerate(xs)}
        self.grads: list[Any] = [None] * len(pipe.parts)
        self.sums: dict[str, Array] = {}
        self.held = [0] * pipe.ranks
        self.peak = [0] * pipe.ranks
        self.batches: dict[tuple[int, int], Any] = {}

    def _given(self, stage: int, i: int) -> tuple[Any, Any]:
        if (stage, i) not in self.batches:
            batch = self.pipe.put(self.micro[i], stage) if stage in self.seen else None
            self.batches[stage, i] = (batch, None if self.keys[i] is None else self.pipe.to(self.keys[i], stage))
        return self.batches[stage, i]

    def _unit(self, i: int) -> float | None:
        """The divisor of micro-batch ``i``'s scaled loss, by which its gradients are multiplied: its most elements."""
        if self.scale is None:
            return None
        return float(max(math.prod(x.shape) for x in trees.flatten(self.micro[i])[0]))

    def all(self, plan: Schedule) -> None:
        """Carry out a schedule, in the order of its simulated ends, which every rank can follow; on a cluster each part
        works through its own actions by itself."""
        for action in sorted(ends := plan.simulate().ends, key=lambda a: (ends[a], a.stage)):
            self.do(action)

    def do(self, action: ScheduleAction) -> None:
        kind, s, i = action
        rank, last = s % self.pipe.ranks, len(self.pipe.parts) - 1
        batch, key = self._given(s, i)
        if kind == "F":
            x = self.pipe.to(self.arriving.pop((s, i), None), s)
            self.inputs[s, i] = x
            self.held[rank] += 1
            self.peak[rank] = max(self.peak[rank], self.held[rank])
            if s < last:
                self.arriving[s + 1, i] = self.pipe._forward[s](self.params[s], self.frozen[s], x, batch, key)
            return
        x = self.inputs[s, i]
        if s == last:
            if kind != "W":
                self._loss(s, i, x, batch, key)
        else:
            # The cotangent waits where it arrived until the last of I and W has used it.
            g = self.pipe.to(self.arriving[s, i], s)
            found = self.pipe._backward[s][kind](self.params[s], self.frozen[s], x, batch, key, g, self._unit(i))
            if "x" in found:
                self.arriving[s - 1, i] = found["x"]
            if "params" in found:
                self._accumulate(s, found["params"])
            if kind != "I":
                del self.arriving[s, i]
        if kind != "I":
            del self.inputs[s, i]
            self.batches.pop((s, i), None)
            self.held[rank] -= 1

    def _loss(self, s: int, i: int, x: Any, batch: Any, key: Any) -> None:
        sums, gp, gx = self.pipe._loss(self.params[s], self.frozen[s], x, batch, key, self.scale, self._unit(i))
        self.sums = sums if not self.sums else {n: self.sums[n] + v for n, v in sums.items()}
        self._accumulate(s, gp)
        self.arriving[s - 1, i] = gx

    def _accumulate(self, s: int, g: Any) -> None:
        self.grads[s] = g if self.grads[s] is None else self.pipe._add(self.grads[s], g)


def _whole(params: Any, frozen: Any) -> Any:
    return params if frozen is None else merged(params, frozen)


def _times(tree: Any, unit: float | None) -> Any:
    return tree if unit is None else trees.tree_map(lambda g: g * unit, tree)


def _forward(stage: Stage) -> Callable[..., Any]:
    return lambda params, frozen, x, batch, key: stage(_whole(params, frozen), x, batch, key)


def _sums(stage: Stage) -> Callable[..., dict[str, Array]]:
    return lambda params, x, batch: weighted(stage(params, x, batch, None), batch)


def _loss_backward(stage: Stage) -> Callable[..., Any]:

    def run(params: Any, frozen: Any, x: Any, batch: Any, key: Any, scale: Any, unit: float | None) -> Any:
        def loss(params: Any, x: Any) -> Any:
            sums = weighted(stage(_whole(params, frozen), x, batch, key), batch)
            total = sums["loss"]
            refuse_constant(total)
            return total if unit is None else total * astype(scale / unit, total.dtype, copy=False), sums

        (_, sums), (gp, gx) = value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)
        return sums, _times(gp, unit), gx

    return run


def _backward(stage: Stage, inputs: bool, weights: bool) -> Callable[..., dict[str, Any]]:
    """Cotangents of a stage's input, of its parameters, or of both, with the stage recomputed."""

    def run(params: Any, frozen: Any, x: Any, batch: Any, key: Any, g: Any, unit: float | None) -> dict[str, Any]:
        gp, gx = vjp(lambda p, x: stage(_whole(p, frozen), x, batch, key), params, x)[1](g)
        return ({"params": _times(gp, unit)} if weights else {}) | ({"x": gx} if inputs else {})

    return run


def _leaf(tree: Any, name: str) -> Any:
    found = {trees.path_name(p): x for p, x in trees.flatten_with_path(tree)}
    if name not in found:
        raise TrainingError(f"a stage has no parameter {name!r} to tie; it has {', '.join(list(found)[:8])}")
    return found[name]


def _with_leaf(tree: Any, name: str, value: Any) -> Any:
    return trees.map_with_path(lambda p, x: value if trees.path_name(p) == name else x, tree)
