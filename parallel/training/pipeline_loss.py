"""``mt.pipeline``: a loss whose model is one function in all stages of a pipeline, with stacked parameters.

It has the derivative that :class:`.pipeline.Pipeline` computes by a schedule. Parameters, batches and gradients go
between the mesh and its parts, each stage's to and from its own ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.errors import MeshError, NonDifferentiableError, ShapeError, check_function
from ...arrays.core.op import ShapeDtype
from ...arrays.ops.creation import asarray, zeros_like
from ...arrays.ops.elementwise import stop_gradient
from ...arrays.ops.manipulation import concat, reshape
from ...autodiff.captures.tracing import Tracer
from ...autodiff.tape.custom_vjp import custom_vjp
from ..mesh.api import distribute, reshard
from ..mesh.mesh import Mesh
from ..mesh.mesh_transfer import assembled
from ..mesh.sharded_array import sharded_array
from ..sharding.placement import Placement, Shard, Sharding
from ..transforms.pipeline_schedules import Schedule, schedule
from .pipeline import Pipeline, PipelineRun, Stage


def pipeline(
    stage: Callable[[Any, Any], Any],
    loss: Callable[[Any, Any, Any], Any],
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
        ``stage(params, x)``: one stage; the parameters are those of the stage alone, and the result is the next stage's
        ``x``. It is compiled, and run on the ranks of the stage, over whose other axes its arrays may be split.
    loss
        ``loss(shared, x, y)``: the loss of one micro-batch (a mean over its samples), from the last stage's result.
    mesh
        Has the axis ``axis``, whose ranks are the stages.
    axis
        Name of that axis.
    data_axis
        Name of an axis over which the batch is split beside; the loss is the mean over it.
    micros
        Number of micro-batches that the batch is cut into, along its first dimension; it must divide the batch of each
        rank.
    kind
        A kind of :func:`~meshtape.parallel.transforms.pipeline_schedules.schedule`, or a schedule.
    chunks
        Stages a rank, with ``"interleaved"``.

    Returns
    -------
    function
        ``f(params, shared, x, y)``: the mean loss. The arrays of ``params`` have the stages as their first dimension,
        in order (with ``chunks`` as the first two, ``(chunks, ranks)``); ``shared`` is a tree that the loss gets whole
        (a head); ``x`` and ``y`` are batches. It is differentiable once, with respect to ``params``, ``shared`` and
        ``x``, and the schedule is that of the run which gives both the value and the gradient; called without a tape it
        runs forward alone. Its stages are programs of their own, so that it is called outside of :func:`compile`.
        Parameters that are split over ``axis`` stay with their stage.

    Raises
    ------
    MeshError
        For an unknown axis, a schedule of another number of ranks, or a call inside a compiled function.
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
    elif micros is None:
        raise TypeError("[pipeline] micros= says how many micro-batches there are")
    else:
        plan = schedule(kind, ranks, operator.index(micros), chunks=chunks)
    if len(plan.rows) != ranks:
        raise MeshError(f"[pipeline] the schedule is of {len(plan.rows)} ranks, axis {axis!r} of {mesh} has {ranks}")
    replicas = 1 if data_axis is None else mesh.sizes[mesh.axis(data_axis)]
    rows: dict[str, Placement] = {} if data_axis is None else {data_axis: Shard(0)}
    front = (plan.stages,) if plan.stages == ranks else (plan.stages // ranks, ranks)
    starts = [(i,) if len(front) == 1 else divmod(i, ranks) for i in range(plan.stages)]
    last = plan.stages - 1

    def ending(params: Any, x: Any, batch: Any, key: Any) -> Any:
        return loss(params[1], stage(params[0], x), batch), 1.0

    stages: list[Stage] = [lambda params, x, batch, key: stage(params, x)] * last + [ending]
    pipe = Pipeline(stages, mesh, kind=plan.kind, axis=axis, chunks=plan.stages // ranks)

    def placed(params: Any, shared: Any) -> list[Any]:
        own = [trees.tree_map(lambda p, i=i: _row(p, starts[i], mesh, pipe.parts[i]), params) for i in range(last + 1)]
        return [*own[:-1], (own[-1], trees.tree_map(lambda a: distribute(a, pipe.parts[last]), shared))]

    def cut(tree: Any, part: Mesh) -> list[Any]:

        def one(a: Array, j: int) -> Array:
            n = a.shape[0] // plan.micros
            return distribute(a[j * n : (j + 1) * n], Sharding(part, **rows))

        return [trees.tree_map(partial(one, j=j), tree) for j in range(plan.micros)]

    def whole(tree: Any, **placements: Placement) -> Any:
        return trees.tree_map(lambda a: reshard(a, Sharding(mesh, **placements)), tree)

    @custom_vjp
    def run(*args: Any) -> Any:
        params, shared, x, y = trees.tree_map(stop_gradient, args)
        held, targets = placed(params, shared), cut(y, pipe.parts[last])
        found = [pipe.sums(held, t, given)["loss"] for t, given in zip(targets, cut(x, pipe.parts[0]), strict=True)]
        return whole(sum(found[1:], found[0]) / plan.micros)

    @custom_vjp
    def with_gradients(*args: Any) -> Any:
        params, shared, x, y = trees.tree_map(stop_gradient, args)
        held = placed(params, shared)
        given = cut(x, pipe.parts[0])
        one = PipelineRun(pipe, held, cut(y, pipe.parts[last]), None, None, None, given)
        one.seen = (last,)
        one.all(plan)
        pipe.peak = tuple(one.peak)
        g_last, g_shared = _filled(one.grads[last], held[last])
        grads = [*(_filled(g, p) for g, p in zip(one.grads[:last], held[:last], strict=True)), g_last]
        g_params = trees.tree_map(lambda p, *gs: _stacked(gs, starts, front, p, mesh, axis), params, *grads)
        g_x = [_filled(one.arriving[-1, j], micro) for j, micro in enumerate(given)]
        g_x = whole(trees.tree_map(lambda *parts: concat(parts), *g_x), **rows)
        g_shared = trees.tree_map(lambda g: distribute(g, mesh), g_shared)
        return whole(one.sums["loss"]) / plan.micros, (g_params, g_shared, g_x)

    def backward(found: Any, g: Any) -> tuple[Any, ...]:
        return (*(trees.tree_map(lambda a: a * (g / plan.micros), tree) for tree in found), None)

    def refused(found: Any, g: Any) -> Any:
        raise NonDifferentiableError(
            "[pipeline] has a derivative of the first order: it cannot be differentiated again"
        )

    run.defvjp(with_gradients, backward)
    with_gradients.defvjp(lambda *args: (with_gradients(*args), None), refused)

    def pipelined(params: Any, shared: Any, x: Any, y: Any) -> Any:
        """The mean loss of a batch; see :func:`meshtape.pipeline`."""
        for path, p in trees.flatten_with_path(params):
            shape = tuple(getattr(p, "shape", ()))
            if shape[: len(front)] != front:
                raise ShapeError(
                    f"[pipeline] params {trees.path_name(path)} of shape {shape}: the first dimension(s) must be the "
                    f"stages, {front}"
                )
        for path, a in trees.flatten_with_path((x, y)):
            n = getattr(a, "shape", (0,))[0]
            if n % (plan.micros * replicas):
                raise ShapeError(
                    f"[pipeline] the batch {trees.path_name(path)} of {n} does not divide into {plan.micros} "
                    "micro-batches" + (f" on each of {replicas} ranks of {data_axis!r}" if replicas > 1 else "")
                )
        given = trees.tree_map(lambda a: asarray(a), (params, shared, x, y))
        if any(isinstance(a._buf, Tracer) for a in trees.flatten(given)[0]):
            raise MeshError(
                "[pipeline] stages are compiled programs of their own, on parts of the mesh: call a pipeline outside "
                "of mt.compile and mt.shard_map, and compile what comes after it, such as the optimizer's step"
            )
        return run(*given)

    pipelined.schedule = plan  # type: ignore[attr-defined]
    return pipelined


def _row(p: Array, start: Sequence[int], mesh: Mesh, part: Mesh) -> Array:
    """The parameters of one stage on its part of the mesh, from those of all stages."""
    here = p.sharding
    if here is None or here.mesh is not mesh:
        return distribute(p[tuple(start)], part)
    lead = len(start)
    kept = {
        n: Shard(x.dim)
        for n, x in here.placements.items()
        if n in part.names and isinstance(x, Shard) and x.dim >= lead
    }
    sharding, shape = Sharding(part, **kept), (*(1 for _ in start), *p.shape[lead:])
    at = (*(-i for i in start), *(0 for _ in p.shape[lead:]))
    handle = assembled([(p._buf, at)], shape, sharding)
    return reshape(sharded_array(part, sharding.layout, ShapeDtype(shape, p.dtype), handle), p.shape[lead:])


def _stacked(
    gs: Sequence[Array], starts: Sequence[Sequence[int]], front: tuple[int, ...], like: Array, mesh: Mesh, axis: str
) -> Array:
    """The gradients of all stages as one array on the mesh, each with the ranks of its stage."""
    lead, rest = (1,) * len(front), like.shape[len(front) :]
    kept: dict[str, Placement] = {axis: Shard(len(front) - 1)}
    if like.sharding is not None and like.sharding.mesh is mesh:
        kept |= {n: x for n, x in like.sharding.placements.items() if n != axis and isinstance(x, Shard)}
    sharding = Sharding(mesh, **kept)
    sources = [(reshape(g, (*lead, *rest))._buf, (*at, *(0 for _ in rest))) for g, at in zip(gs, starts, strict=True)]
    return sharded_array(
        mesh, sharding.layout, ShapeDtype(like.shape, gs[0].dtype), assembled(sources, like.shape, sharding)
    )


def _filled(found: Any, like: Any) -> Any:
    """A tree of cotangents with zeros where a value has none, as integers have not."""
    leaves, treedef = trees.flatten(like)
    given = trees.flatten(found, is_leaf=lambda g: g is None)[0]
    filled = [zeros_like(x) if g is None else g for g, x in zip(given, leaves, strict=True)]
    return trees.unflatten(treedef, filled)
