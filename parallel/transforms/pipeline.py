"""Pipelines: the layers of a model in stages on different ranks, through which micro-batches go by a schedule.

The schedule is data (:mod:`.pipeline_schedules`). Each rank follows its row of it in per-rank code: it sends a stage's
result to the next stage's rank, and a cotangent back. One run gives the loss and the gradient, so that the pipeline is
one differentiable function of ordinary arrays.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.errors import MeshError, ShapeError, check_function
from ...arrays.ops.creation import asarray, full, zeros
from ...arrays.ops.manipulation import concat, stack
from ...autodiff.tape.custom_vjp import custom_vjp
from ...autodiff.transforms import vjp
from ..mesh.mesh import Mesh
from ..sharding.placement import Partial, Placement, Shard
from ..spmd.rank_trace import RankTrace, current
from .pipeline_schedules import Schedule, schedule
from .shard_map import shard_map

Stage = Callable[[Any, Any], Any]
Loss = Callable[[Any, Any, Any], Any]


def pipeline(
    stage: Stage,
    loss: Loss,
    mesh: Mesh,
    *,
    axis: str = "pipe",
    data_axis: str | None = None,
    micros: int | None = None,
    kind: str | Schedule = "1f1b",
    chunks: int = 1,
) -> Callable[..., Any]:
    """The loss function of a model whose layers are in stages on the ranks of a mesh axis.

    Parameters
    ----------
    stage
        ``stage(params, x)``: one stage; the parameters are those of the stage alone, and the result is the next stage's ``x``.
    loss
        ``loss(shared, x, y)``: the loss of one micro-batch (a mean over its samples), from the last stage's result.
    mesh
        Has the axis ``axis``, whose ranks are the stages.
    axis
        Name of that axis.
    data_axis
        Name of an axis over which the batch is split beside; the loss is the mean over it.
    micros
        Number of micro-batches that the batch is cut into, along its first dimension; it must divide the batch of each rank.
    kind
        A kind of :func:`~meshtape.parallel.transforms.pipeline_schedules.schedule`, or a schedule.
    chunks
        Stages a rank, with ``"interleaved"``.

    Returns
    -------
    function
        ``f(params, shared, x, y)``: the mean loss. The arrays of ``params`` have the stages as their first dimension, in order (with
        ``chunks`` as the first two, ``(chunks, ranks)``); ``shared`` is a tree that the loss gets whole (a head); ``x`` and ``y``
        are batches. It is differentiable once, with respect to ``params``, ``shared`` and ``x``, and the schedule is that of the
        run which gives both the value and the gradient; called without a tape it runs forward alone.

    Raises
    ------
    MeshError
        For an unknown axis, or a schedule of another number of ranks.
    ShapeError
        For batches that do not divide, and parameters that have not the stages in front.

    Examples
    --------
    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"pipe": 2})
    >>> f = mt.pipeline(lambda w, x: mt.tanh(x * w), lambda _, x, y: mt.mean((x - y) ** 2), mesh, micros=4)
    >>> w, x, y = mt.asarray([0.5, 2.0]), mt.ones((8, 1)), mt.zeros((8, 1))
    >>> loss, grad = mt.value_and_grad(lambda w: f(w, (), x, y))(w)
    >>> round(float(loss), 4), grad.shape
    (0.5298, (2,))
    """
    for fn in (stage, loss):
        check_function("pipeline", fn)
    ranks = mesh.sizes[mesh.axis(axis)]
    if isinstance(kind, Schedule):
        plan = kind
    else:
        if micros is None:
            raise TypeError("[pipeline] micros= says how many micro-batches there are")
        plan = schedule(kind, ranks, operator.index(micros), chunks=chunks)
    if len(plan.rows) != ranks:
        raise MeshError(f"[pipeline] the schedule is of {len(plan.rows)} ranks, axis {axis!r} of {mesh} has {ranks}")
    share = plan.stages // ranks
    others = {} if data_axis is None else {data_axis: mesh.axis(data_axis)}
    replicas = mesh.sizes[others[data_axis]] if data_axis is not None else 1
    split: dict[str, Placement] = {axis: Shard(0 if share == 1 else 1)}
    batch: dict[str, Placement] = {n: Shard(0) for n in others}
    pending: dict[str, Placement] = {n: Partial() for n in (axis, *others)}
    ins = (split, {}, batch, batch)

    def check(params: Any, x: Any) -> None:
        front = (plan.stages,) if share == 1 else (share, ranks)
        for path, p in trees.flatten_with_path(params):
            shape = tuple(getattr(p, "shape", ()))
            if shape[: len(front)] != front:
                raise ShapeError(
                    f"[pipeline] params {trees.path_name(path)} of shape {shape}: the first dimension(s) must be the stages, {front}"
                )
        for path, a in trees.flatten_with_path(x):
            n = getattr(a, "shape", (0,))[0]
            if n % (plan.micros * replicas):
                raise ShapeError(
                    f"[pipeline] the batch {trees.path_name(path)} of {n} does not divide into {plan.micros} micro-batches"
                    + (f" on each of {replicas} ranks of {data_axis!r}" if replicas > 1 else "")
                )

    def train(params: Any, shared: Any, x: Any, y: Any) -> Any:
        return _Rank(stage, loss, plan, (axis, *others), replicas).train(params, shared, x, y)

    def forward(params: Any, shared: Any, x: Any, y: Any) -> Any:
        return _Rank(stage, loss, plan, (axis, *others), replicas).forward(params, shared, x, y)

    grads = {n: Partial() for n in others}
    both = shard_map(train, mesh, ins, (pending, {**split, **grads}, pending, {**batch, axis: Partial()}))
    alone = shard_map(forward, mesh, ins, pending)

    @custom_vjp
    def run(params: Any, shared: Any, x: Any, y: Any) -> Any:
        return alone(params, shared, x, y)

    def with_gradients(params: Any, shared: Any, x: Any, y: Any) -> Any:
        value, *found = both(params, shared, x, y)
        return value, tuple(found)

    def backward(found: Any, g: Any) -> tuple[Any, ...]:
        return (*(trees.tree_map(lambda a: a * g, tree) for tree in found), None)

    run.defvjp(with_gradients, backward)

    def pipelined(params: Any, shared: Any, x: Any, y: Any) -> Any:
        """The mean loss of a batch; see :func:`meshtape.pipeline`."""
        check(params, (x, y))
        as_arrays = [trees.tree_map(lambda a: asarray(a), tree) for tree in (params, shared, x, y)]
        return run(*as_arrays)

    pipelined.schedule = plan  # type: ignore[attr-defined]
    return pipelined


class _Rank:
    """The execution of one rank's row of the schedule."""

    def __init__(self, stage: Stage, loss: Loss, plan: Schedule, names: tuple[str, ...], replicas: int) -> None:
        self.stage, self.loss, self.plan, self.replicas = stage, loss, plan, replicas
        trace = current.trace
        assert trace is not None
        self.trace: RankTrace = trace
        self.split = tuple(map(trace.mesh.axis, names))
        self.axes = self.split[:1]
        self.rank = trace.look(self.axes)
        self.ranks = len(plan.rows)
        self.pulls: dict[tuple[int, int], Any] = {}
        self.losses: list[Any] = []

    def _own(self, tree: Any) -> Any:
        """Values made to vary between ranks: their gradients stay with the rank, and are reduced once."""
        return trees.tree_map(lambda a: self.trace.varied(self.trace.lift(asarray(a)), self.split), tree)

    def _of_stage(self, params: Any, i: int) -> Any:
        chunk = i // self.ranks
        return trees.tree_map(lambda p: p[0] if self.plan.stages == self.ranks else p[chunk, 0], params)

    def _micro(self, tree: Any, j: int) -> Any:
        def cut(a: Array) -> Array:
            n = a.shape[0] // self.plan.micros
            return a[j * n : (j + 1) * n]

        return trees.tree_map(cut, tree)

    def _send(self, tree: Any, stage: int) -> Any:
        """Send a tree to the rank of a stage, its structure at trace time."""
        leaves, treedef = trees.flatten(tree)
        to = stage % self.ranks
        self.trace.meeting.post(self.trace.rank, self.trace.group(self.axes)[to], treedef)  # type: ignore[union-attr, arg-type]
        for x in leaves:
            self.trace.send(self.trace.lift(asarray(x)), self.axes, to)

    def _receive(self, stage: int) -> Any:
        source = stage % self.ranks
        peer = self.trace.group(self.axes)[source]
        treedef = self.trace.meeting.take(self.trace.rank, peer)  # type: ignore[union-attr, arg-type]
        return trees.unflatten(treedef, [self.trace.receive(self.axes, source) for _ in range(treedef.size)])

    def _input(self, kept: dict[Any, Any], x: Any, i: int, j: int) -> Any:
        """The input of stage ``i``: part of the batch, the output of this rank's own stage before it, or a message."""
        if i == 0:
            return self._micro(x, j)
        return kept.pop((i, j)) if self.ranks == 1 else self._receive(i - 1)

    def _output(self, kept: dict[Any, Any], out: Any, i: int, j: int, to: int) -> None:
        if self.ranks == 1:
            kept[to, j] = out
        else:
            self._send(out, to)

    def forward(self, params: Any, shared: Any, x: Any, y: Any) -> Any:
        """This rank's part of the mean loss."""
        kept: dict[Any, Any] = {}
        last = self.plan.stages - 1
        params, shared, x, y = map(self._own, (params, shared, x, y))
        for a in self.plan.rows[self.rank]:
            if a.kind != "F":
                continue
            out = self.stage(self._of_stage(params, a.stage), self._input(kept, x, a.stage, a.micro))
            if a.stage == last:
                self.losses.append(self.loss(shared, out, self._micro(y, a.micro)))
            else:
                self._output(kept, out, a.stage, a.micro, a.stage + 1)
        return self._mean()

    def _mean(self) -> Any:
        mine = sum(self.losses[1:], self.losses[0]) * self.scale if self.losses else None
        dtypes = self.trace.meet("the mean loss", self.axes, (), None if mine is None else mine.dtype)
        dtype = next(d for d in dtypes if d is not None)
        return self._own(zeros((), dtype=dtype)) if mine is None else mine

    @property
    def scale(self) -> float:
        """The weight of a micro-batch's loss in the mean."""
        return 1.0 / (self.plan.micros * self.replicas)

    def train(self, params: Any, shared: Any, x: Any, y: Any) -> Any:
        """This rank's parts of the mean loss, and of the gradients of params, shared and x."""
        kept: dict[Any, Any] = {}
        back: dict[Any, Any] = {}
        last = self.plan.stages - 1
        params, shared, x, y = map(self._own, (params, shared, x, y))
        of_params: dict[int, Any] = {}
        of_shared: Any = None
        of_x: dict[int, Any] = {}
        for a in self.plan.rows[self.rank]:
            i, j = a.stage, a.micro
            if a.kind == "F":
                given = self._input(kept, x, i, j)
                own = self._of_stage(params, i)
                if i == last:
                    target = self._micro(y, j)
                    value, pull = vjp(lambda p, s, x, t=target: self.loss(s, self.stage(p, x), t), own, shared, given)
                    self.losses.append(value)
                else:
                    value, pull = vjp(lambda p, s, x: self.stage(p, x), own, (), given)
                    self._output(kept, value, i, j, i + 1)
                self.pulls[i, j] = (pull, value)
            elif a.kind in "BI":
                pull, value = self.pulls.pop((i, j))
                if i == last:
                    seed: Any = self._own(full((), self.scale, dtype=value.dtype))
                else:
                    seed = back.pop((i, j)) if self.ranks == 1 else self._receive(i + 1)
                found = pull(seed)
                if i:
                    self._output(back, found[2], i, j, i - 1)
                else:
                    of_x[j] = _filled(found[2], self._micro(x, j))
                if a.kind == "I":
                    # The same calls again, later. Equal calls are merged, so that only the others are deferred.
                    self.pulls[i, j] = (lambda pull=pull, seed=seed: pull(seed), None)
                else:
                    of_params[i] = _sum(of_params.get(i), _filled(found[0], self._of_stage(params, i)))
                    of_shared = _sum(of_shared, _filled(found[1], shared) if i == last else None)
            elif a.kind == "W":
                found = self.pulls.pop((i, j))[0]()
                of_params[i] = _sum(of_params.get(i), _filled(found[0], self._of_stage(params, i)))
                of_shared = _sum(of_shared, _filled(found[1], shared) if i == last else None)
        mine = [of_params[i] for i in range(self.rank, self.plan.stages, self.ranks)]
        if self.plan.stages == self.ranks:
            grads = trees.tree_map(lambda g: g[None], mine[0])
        else:
            grads = trees.tree_map(lambda *gs: stack(gs)[:, None], mine[0], *mine[1:])
        if of_shared is None:
            of_shared = self._own(trees.tree_map(lambda s: zeros(s.shape, dtype=s.dtype), shared))
        if of_x:
            g_x = trees.tree_map(lambda *parts: concat(parts), *(of_x[j] for j in range(self.plan.micros)))
        else:
            g_x = self._own(trees.tree_map(lambda a: zeros(a.shape, dtype=a.dtype), x))
        return self._mean(), grads, of_shared, g_x


def _filled(found: Any, like: Any) -> Any:
    """A tree of cotangents with zeros where a value has none, as integers have not."""
    leaves, treedef = trees.flatten(like)
    given = trees.flatten(found, is_leaf=lambda g: g is None)[0]
    filled = [zeros(x.shape, dtype=x.dtype) if g is None else g for g, x in zip(given, leaves, strict=True)]
    return trees.unflatten(treedef, filled)


def _sum(before: Any, found: Any) -> Any:
    if found is None or before is None:
        return before if found is None else found
    return trees.tree_map(lambda a, b: a + b, before, found)
