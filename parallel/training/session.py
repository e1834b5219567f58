"""The session of a run on one mesh: compiled step, data and parameters. After a loss the run makes another one.

A session whose mesh has stages of a pipeline is a :class:`~.stages.StagedSession`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...arrays import random
from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.errors import MeshError, TrainingError
from ...arrays.ops.creation import asarray
from ...autodiff import compile
from ..mesh.mesh import Mesh
from ..mesh.replicas import Replica
from ..sharding.placement import Sharding
from .data.batching import BatchSizes, batch_sizes
from .data.loader import Batch, Loader
from .data.sampler import Sampler
from .data.sources import Source
from .nonfinite import are_finite
from .step import TrainingConfig


class Session:
    """A recipe and its data on a mesh (or, with None, in this process without one)."""

    def __init__(
        self,
        recipe: TrainingConfig,
        mesh: Mesh | None,
        source: Source,
        sampler: Sampler,
        *,
        batch: int,
        micro: int | None,
        accumulation: int | None,
        seed: int,
        ahead: int,
    ) -> None:
        self.recipe, self.mesh = recipe, mesh
        rows = 1 if mesh is None else recipe.plan.rows(mesh)
        self.sizes: BatchSizes = batch_sizes(batch, ranks=rows, micro=micro, accumulation=accumulation)
        self.loader = Loader(source, self.sizes, sampler, *self._feed(), ahead)
        self.key: Array = random.key(seed)
        self.state: Any = None
        self._prepare()

    def _prepare(self) -> None:
        if self.mesh is not None:
            self.key = self.mesh.replicate(self.key)
        self.go()
        self._step = compile(self.recipe.step)
        self._evaluate = compile(self.recipe.sums)

    def _feed(self) -> tuple[Mesh | None, Sharding | None]:
        """Where batches go."""
        return self.mesh, None if self.mesh is None else self.recipe.plan.batch(self.mesh)

    # ----- the state --------------------------------------------------------------------------------------------------

    def start(self, init: Any) -> None:
        """The state before the first step, from parameters or from a function of a key."""
        params = init(random.fold_in(self.key, 0)) if callable(init) else init
        check_meshes(params, self.mesh)
        self.state = self.recipe.init(params, self.mesh)

    def snapshot(self) -> Replica:
        """A copy of the state in the memory of the workers; it is taken while the run goes on."""
        return Replica(self.state)

    def restore(self, snapshot: Replica) -> None:
        """Inverse of :meth:`snapshot`, on any mesh. Raises :class:`RankLost` where too many of its workers are gone."""
        self.state = snapshot.restore(self._resting(snapshot.tree)) if self.mesh is not None else snapshot.local()

    def _resting(self, tree: Any) -> Any:
        """Where each leaf of a state rests."""
        mesh = self.mesh
        assert mesh is not None
        return trees.map_with_path(lambda path, x: self.recipe.sharding(path, x, mesh), tree)

    # ----- work -------------------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> dict[str, Array]:
        """One optimizer step. The numbers are computed when they are read."""
        handles = not self.recipe.halts  # overflows, of which NumPy then says nothing
        with np.errstate(over="ignore", invalid="ignore") if handles else np.errstate():
            found = self._stepped(batch)
        if self.recipe.halts:
            self._going = found["finite"]
        return found

    def _stepped(self, batch: Batch) -> dict[str, Array]:
        self.state, found = self._step(self.state, batch.micro, self.key, self._going)
        return found

    def go(self) -> None:
        """Steps are taken again, after one that was not finite."""
        yes = asarray(True)
        self._going = None if not self.recipe.halts else yes if self.mesh is None else self.mesh.replicate(yes)

    def finite(self) -> bool:
        return are_finite(self.state["params"])

    def _judge(self, params: Any) -> Callable[[Any], dict[str, Array]]:
        """A function that gives the sums of a micro-batch without gradients and dropout."""
        return partial(self._evaluate, params)

    def average(self) -> Any:
        """The average of the parameters that ``ema`` keeps, in their dtypes."""
        if self.recipe.ema is None:
            raise TrainingError("there is no average of the parameters: give the Trainer ema=")
        return self.recipe.ema.value(self.state["ema"], self.state["params"])

    def evaluate(self, source: Source, averaged: bool = False) -> dict[str, float]:
        """Loss and metrics over a whole data set, without dropout (the loss is given the key None)."""
        params = self.average() if averaged else self.state["params"]
        whole = Sampler(len(source), shuffle=False)
        loader = Loader(source, self.sizes, whole, *self._feed(), self.loader.ahead)
        judge, sums = self._judge(params), dict[str, float]()
        for batch in loader.batches(0, epochs=1):
            for micro in batch.micro:
                for name, value in judge(micro).items():
                    sums[name] = sums.get(name, 0.0) + float(value)
        weight = sums.pop("weight")
        return {f"eval_{name}": value / weight if weight else float("nan") for name, value in sums.items()}

    def close(self) -> None:
        """Drop the state on the mesh."""
        self.state = None


def check_meshes(params: Any, mesh: Mesh | None) -> None:
    """Refuse parameters that lie on another mesh."""
    for path, x in trees.flatten_with_path(params):
        if isinstance(x, Array) and x.sharding is not None and x.sharding.mesh is not mesh:
            raise MeshError(
                f"the parameters lie on another mesh than {mesh}: {trees.path_name(path)} is on {x.sharding.mesh}; "
                "pass local ones"
            )
