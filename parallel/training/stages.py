"""Sessions of a pipeline: training state and steps of a model in stages.

The state has the same structure as on any other mesh, so that checkpoints, snapshots and averages are the same; only
its leaves lie on parts of the mesh. Each parameter, with its slots, belongs to the first stage that uses it. Another
stage that uses it as well (a head that is the transposed embedding) gets its value before a step, and sends its
gradient back. Leaves of no parameter, such as the number of steps, are kept on every part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...arrays import random
from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.errors import PlanError, TrainingError
from ...arrays.ops.creation import asarray
from ...arrays.ops.elementwise import sqrt, square
from ...autodiff import compile
from ...autodiff.optim.parameters import wide
from ..mesh.mesh import Mesh
from ..models.plans import AXES, Stages
from ..sharding.placement import Sharding
from ..transforms.pipeline_schedules import schedule
from .data.loader import Batch
from .data.sampler import Sampler
from .data.sources import Source
from .pipeline import Pipeline, Stage
from .session import Session, check_meshes
from .step import TrainingConfig, sample_keys


@dataclass(frozen=True)
class Pipelining:
    """The stages of a model, and the schedule of micro-batches."""

    stages: Stages
    schedule: str = "1f1b"
    chunks: int = 1

    __is_tree__ = False

    def __post_init__(self) -> None:
        try:
            schedule(self.schedule, 1, 1, chunks=self.chunks)
        except ValueError as e:
            raise TrainingError(str(e)) from None


def session_of(
    recipe: TrainingConfig,
    pipelining: Pipelining | None,
    mesh: Mesh | None,
    source: Source,
    sampler: Sampler,
    **sizes: Any,
) -> Session:
    """A session on this mesh: with stages where plan and mesh have them."""
    if mesh is None or "pp" not in recipe.plan.parts or AXES["pp"] not in mesh.names:
        return Session(recipe, mesh, source, sampler, **sizes)
    if pipelining is None:
        raise PlanError(
            f"the plan {recipe.plan} has 'pp' and {mesh} the axis {AXES['pp']!r}: give the Trainer stages=, which say "
            "how the model is cut (mt.models.decoder.staged)"
        )
    return StagedSession(recipe, mesh, source, sampler, pipelining=pipelining, **sizes)


class StagedSession(Session):
    def __init__(self, recipe: TrainingConfig, mesh: Mesh, *args: Any, pipelining: Pipelining, **sizes: Any) -> None:
        axis = AXES["pp"]
        self.pipelining, self.ranks = pipelining, mesh.describe()[axis]
        self.count = self.ranks * pipelining.chunks
        self.parts = [mesh.submesh(**{axis: r}) for r in range(self.ranks)]
        self.needs: list[list[int]] = []
        super().__init__(recipe, mesh, *args, **sizes)
        micros = self.sizes.accumulation
        if pipelining.schedule == "interleaved" and micros % self.ranks:
            raise TrainingError(
                f"an interleaved schedule takes micro-batches in multiples of its {self.ranks} ranks: accumulation is "
                f"{micros}"
            )

    def _feed(self) -> tuple[Mesh | None, Sharding | None]:
        return self.parts[0], self.recipe.plan.batch(self.parts[0])

    def _prepare(self) -> None:
        recipe, p = self.recipe, self.pipelining
        functions = [self._stage(i, fn) for i, fn in enumerate(p.stages.functions(self.count))]
        self._pipe = Pipeline(functions, self.mesh, kind=p.schedule, axis=AXES["pp"], chunks=p.chunks, plan=recipe.plan)
        self._reduced = [compile(recipe.reduced) for _ in self.parts]
        self._finished = [compile(recipe.finished) for _ in self.parts]
        self._states: list[Any] = []
        self.go()

    def go(self) -> None:
        self._steps = -1
        self._going = self._pipe.to(asarray(True), self.ranks - 1) if self.recipe.halts else None

    def _stage(self, number: int, fn: Stage) -> Stage:
        """A stage as a function of those leaves of the model's tree that it needs."""
        recipe, split, count = self.recipe, self.pipelining.stages.split, self.count

        def run(params: Any, x: Any, batch: Any, key: Any) -> Any:
            held = recipe.precision.cast(recipe.gathered(params))
            return fn(split(held, count)[number], x, batch, key)

        return run

    # ----- owners of parameters ---------------------------------------------------------------------------------------

    def _learn(self, params: Any) -> None:
        """Find the leaves of the parameters that each stage needs, and their owners."""
        leaves, self._form = _leaves(params)
        numbers = trees.unflatten(self._form, [None if x is None else _Leaf(k) for k, x in enumerate(leaves)])
        self.needs = [[n.value for n in trees.flatten(t)[0]] for t in self.pipelining.stages.split(numbers, self.count)]
        owners = [next((s for s, ks in enumerate(self.needs) if k in ks), None) for k in range(len(leaves))]
        for (path, x), s in zip(trees.flatten_with_path(params, is_leaf=_is_none), owners, strict=True):
            if s is None and x is not None:
                raise TrainingError(
                    f"no stage takes the parameter {trees.path_name(path)}: the stages' split leaves it out"
                )
        self.owner = [0 if s is None else s % self.ranks for s in owners]

    def _walk(
        self, nodes: Sequence[Any], own: Callable[[int, list[Any]], Any], shared: Callable[[list[Any]], Any]
    ) -> Any:
        """Map over the states of all parts: ``own`` on trees shaped like the parameters, ``shared`` on other leaves."""
        first = nodes[0]
        columns, forms = zip(*map(_leaves, nodes), strict=True)
        if all(f == self._form for f in forms):
            return trees.unflatten(self._form, [own(k, list(row)) for k, row in enumerate(zip(*columns, strict=True))])
        if trees.is_container(first):
            inner, outer = zip(*[trees.flatten(n, is_leaf=lambda x, n=n: x is not n) for n in nodes], strict=True)
            return trees.unflatten(outer[0], [self._walk(row, own, shared) for row in zip(*inner, strict=True)])
        rows = zip(*columns, strict=True)
        return trees.unflatten(forms[0], [None if row[0] is None else shared(list(row)) for row in rows])

    def _whole(self, nodes: Sequence[Any]) -> Any:
        """The tree of all parts, each leaf from its owner."""
        return self._walk(nodes, lambda k, row: row[self.owner[k]], lambda row: row[0])

    @property
    def state(self) -> Any:
        """The whole state, its leaves on the parts that have them."""
        return self._whole(self._states) if self._states else None

    @state.setter
    def state(self, whole: Any) -> None:
        if whole is None:
            self._states, self._steps = [], -1
            return
        self._learn(whole["params"])
        self._states = [
            self._walk(
                [whole],
                lambda k, row, r=r: row[0] if self.owner[k] == r else None,
                lambda row, r=r: self._pipe.to(row[0], r),
            )
            for r in range(self.ranks)
        ]
        self._steps = -1

    # ----- the state --------------------------------------------------------------------------------------------------

    def start(self, init: Any) -> None:
        """The state before the first step; each part makes its own parameters."""
        made: list[Any] = []
        for r, part in enumerate(self.parts):
            params = init(part.replicate(random.fold_in(self.key, 0))) if callable(init) else init
            if r == 0:
                self.recipe.check(params)
                check_meshes(params, part)
                self._learn(params)
            mine = [x if self.owner[k] == r else None for k, x in enumerate(_leaves(params)[0])]
            made.append(trees.unflatten(self._form, mine))
        self._states = [self.recipe.begun(p, part) for p, part in zip(made, self.parts, strict=True)]
        self._steps = -1

    def _resting(self, tree: Any) -> Any:
        self._learn(tree["params"])
        places = trees.map_with_path(lambda *leaf: _Leaf(leaf), tree)

        def on(part: int, leaf: _Leaf | None) -> Any:
            return None if leaf is None else self.recipe.sharding(*leaf.value, self.parts[part])

        return self._walk([places], lambda k, row: on(self.owner[k], row[0]), lambda row: on(0, row[0]))

    # ----- work -------------------------------------------------------------------------------------------------------

    def _given(self, tree: Any) -> list[Any]:
        """The leaves of the parameters that each stage needs, on its part, as trees like the whole."""
        leaves = _leaves(tree)[0]
        out = []
        for s, ks in enumerate(self.needs):
            mine: list[Any] = [None] * len(leaves)
            for k in ks:
                mine[k] = None if leaves[k] is None else self._pipe.to(leaves[k], s)
            out.append(trees.unflatten(self._form, mine))
        return out

    def _gathered_grads(self, grads: Sequence[Any]) -> list[Any]:
        """The gradients of each part's own parameters, summed over all stages that use them."""
        parts: list[list[Any]] = [[None] * len(self.owner) for _ in self.parts]
        for tree in grads:
            for k, g in enumerate(_leaves(tree)[0]):
                if g is not None:
                    r = self.owner[k]
                    g, held = self._pipe.to(g, r), parts[r][k]
                    parts[r][k] = g if held is None else wide(held) + wide(g)
        return [trees.unflatten(self._form, leaves) for leaves in parts]

    def _stepped(self, batch: Batch) -> dict[str, Array]:
        recipe = self.recipe
        if self._steps < 0:
            self._steps = int(np.asarray(self._states[0]["step"]))
        keys = sample_keys(random.fold_in(self.key, self._steps), batch.micro)
        whole = self._whole([s["params"] for s in self._states])
        trained = recipe.masked(whole)
        last = self.ranks - 1
        sums, grads = self._pipe.value_and_grad(
            self._given(trained),
            batch.micro,
            keys=keys,
            frozen=None if recipe.trainable is None else self._given(whole),
            scale=self._states[last]["scaler"]["scale"] if recipe.precision.scales else None,
        )
        reduced = [fn(g) for fn, g in zip(self._reduced, self._gathered_grads(grads), strict=True)]
        first, *others = [square(self._pipe.to(n, last)) for _, n in reduced]
        norm = sqrt(sum(others, first))  # of the gradients of all parts
        done = [
            finish(state, g, *self._pipe.to((norm, sums, self._going), r))
            for r, (finish, state, (g, _)) in enumerate(zip(self._finished, self._states, reduced, strict=True))
        ]
        self._states = [state for state, _ in done]
        self._steps += 1
        return done[last][1]

    def average(self) -> Any:
        if self.recipe.ema is None:
            return super().average()
        return self._whole([self.recipe.ema.value(s["ema"], s["params"]) for s in self._states])

    def _judge(self, params: Any) -> Callable[[Any], dict[str, Array]]:
        return partial(self._pipe.sums, self._given(params))


@dataclass(frozen=True)
class _Leaf:
    """Any value as a leaf of a tree."""

    value: Any

    __is_tree__ = False


def _is_none(x: Any) -> bool:
    return x is None


def _leaves(tree: Any) -> tuple[list[Any], trees.TreeDef]:
    return trees.flatten(tree, is_leaf=_is_none)
