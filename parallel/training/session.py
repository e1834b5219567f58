"""What a run has on one mesh: the compiled step, the data, the state. After a loss the run makes another session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...arrays import random
from ...arrays import tree as trees
from ...arrays._array import Array
from ...arrays.creation import asarray
from ...arrays.errors import MeshError, TrainingError
from ...autodiff import compile
from ..mesh import Mesh
from .batching import BatchSizes, batch_sizes
from .loading import Batch, Loader
from .sampling import Sampler
from .sources import Source
from .step import Recipe, weighted


class Session:
    """A recipe and its data on a mesh (or, with None, in this process without one)."""

    def __init__(
        self,
        recipe: Recipe,
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
        self.sharding = None if mesh is None else recipe.plan.batch(mesh)
        self.loader = Loader(source, self.sizes, sampler, mesh, self.sharding, ahead)
        key = random.key(seed)
        self.key: Array = key if mesh is None else mesh.replicate(key)
        self._step = compile(recipe.step)
        self._evaluate = compile(self._sums)
        self.state: Any = None

    # ----- the state ----------------------------------------------------------------------------------------------------

    def start(self, init: Any) -> None:
        """The state before the first step, from parameters or from a function of a key."""
        params = init(random.fold_in(self.key, 0)) if callable(init) else init
        if not trees.flatten(params)[0]:
            raise TrainingError("there are no parameters to train")
        strange = [
            f"{trees.path_name(p)} is on {x.sharding.mesh}"
            for p, x in trees.flatten_with_path(params)
            if isinstance(x, Array) and x.sharding is not None and x.sharding.mesh is not self.mesh
        ]
        if strange:
            raise MeshError(f"the parameters lie on another mesh than {self.mesh}: {strange[0]}; pass local ones")
        self.state = self.recipe.init(params, self.mesh)

    def snapshot(self) -> Any:
        """The state as local NumPy arrays."""
        return trees.tree_map(np.asarray, self.state)

    def restore(self, snapshot: Any) -> None:
        """Inverse of :meth:`snapshot`, on any mesh."""
        self.state = self.recipe.place(snapshot, self.mesh)

    # ----- work ---------------------------------------------------------------------------------------------------------

    def batches(self, consumed: int, epochs: int | None) -> Iterator[Batch]:
        """See :class:`Loader`."""
        return self.loader.batches(consumed, epochs=epochs)

    def step(self, batch: Batch) -> dict[str, Array]:
        """One optimizer step. The numbers are computed when they are read."""
        with np.errstate(over="ignore", invalid="ignore") if self.recipe.precision.scales else np.errstate():
            self.state, found = self._step(self.state, batch.micro, self.key)
        return found

    def _sums(self, params: Any, batch: Any, loss: Callable[..., Any]) -> dict[str, Array]:
        held = self.recipe.precision.cast(self.recipe._gathered(params))
        total, weight, metrics = weighted(loss(held, batch, None), batch)
        return {"loss": total, "weight": weight, **metrics}

    def evaluate(self, source: Source, averaged: bool = False) -> dict[str, float]:
        """Loss and metrics over a whole data set, without dropout (the loss is given the key None)."""
        params = self.state["params"]
        if averaged:
            if self.recipe.ema is None:
                raise TrainingError("there is no average of the parameters to evaluate: give the Trainer ema=")
            params = self.recipe.ema.value(self.state["ema"], params)
        whole = Sampler(len(source), shuffle=False)
        loader = Loader(source, self.sizes, whole, self.mesh, self.sharding, self.loader.ahead)
        sums: dict[str, float] = {}
        for batch in loader.batches(0, epochs=1):
            for micro in batch.micro:
                found = self._evaluate(params, micro, self.recipe.loss)
                for name, value in found.items():
                    sums[name] = sums.get(name, 0.0) + float(value)
        weight = sums.pop("weight")
        return {f"eval_{name}": value / weight if weight else float("nan") for name, value in sums.items()}

    def close(self) -> None:
        """Drop what lies on the mesh."""
        self.state = None


def scalar(x: Any) -> float:
    """A 0-d array as a number."""
    return float(np.asarray(asarray(x)))
