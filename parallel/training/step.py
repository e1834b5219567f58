"""One optimizer step as a pure function of the state and the micro-batches, traced once for each shape of a batch.

A step whose loss or gradients are not finite changes nothing: parameters, slots, averages and masters stay the same, on
all ranks, as all have the same norm of the gradients.

The state is a tree: ``params``, ``optimizer``, ``step``, and where they are used ``ema`` and ``scaler``. Losses are
sums with their weights (tokens, or samples), so that the gradient is that of the mean over the whole global batch,
however unevenly it is cut. All micro-batches are in one program: gradients stay unreduced from micro-batch to
micro-batch, and each is reduced once.

ZeRO consists of shardings (Rajbhandari et al., 2020). Stage 1 splits the optimizer's slots over the data axis, stage 2
the gradients too (a reduce-scatter takes the place of the all-reduce), stage 3 the parameters too, which are gathered
where they are used.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, get_args

import numpy as np

from ...arrays import random
from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.dispatch import is_watched
from ...arrays.core.errors import TrainingError
from ...arrays.ops.creation import arange, asarray
from ...arrays.ops.elementwise import isfinite, where
from ...arrays.ops.manipulation import astype
from ...autodiff import value_and_grad
from ...autodiff.optim.clipping import clip_scale, scaled
from ...autodiff.optim.optimizers import Average, Optimizer, global_norm, masters
from ...autodiff.optim.parameters import trains, wide
from ...autodiff.tape.hidden import refuse_foreign
from ..mesh.api import distribute, reshard
from ..mesh.mesh import Mesh
from ..models.plans import AXES, Plan, widen
from ..sharding.placement import Sharding
from .nonfinite import OnNonFinite
from .precision import UNSAID, Precision

Loss = Callable[[Any, Any, Array], Any]
"""``loss(params, batch, key)``: the mean over the samples of the batch; or ``(total, weight)``, the sum over the
samples or tokens that count, and their number; or ``(total, weight, metrics)`` with sums of other numbers, which are
divided by the weight too."""


@dataclass(frozen=True)
class TrainingConfig:
    """The configuration of a step, which is the same for all steps: options of ``mt.Trainer`` under their names."""

    loss: Loss
    optimizer: Optimizer
    plan: Plan = field(default_factory=lambda: Plan(("dp",)))
    precision: Precision = field(default_factory=Precision)
    zero: int = 0
    clip: float | None = None
    ema: Average | None = None
    trainable: Callable[[trees.Path], bool] | None = None
    on_nonfinite: OnNonFinite = "raise"

    __is_tree__ = False

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 2, 3):
            raise TrainingError(f"zero must be a stage from 0 to 3, got {self.zero!r}")
        try:
            inspect.signature(self.loss).bind(None, None, None)
        except ValueError:  # a function in C without a signature
            pass
        except TypeError as e:
            raise TrainingError(
                "the loss is called as loss(params, batch, key), with the key None in an evaluation; it does not take "
                f"that: {e}"
            ) from None
        if not all(callable(getattr(self.optimizer, name, None)) for name in ("init", "update")):
            raise TrainingError(
                f"the optimizer must be one of mt.optim, such as mt.optim.adam(1e-3), got {self.optimizer!r}"
            )
        if self.clip is not None and not (isinstance(self.clip, Real) and self.clip > 0):
            raise TrainingError(f"clip must be a positive number, got {self.clip!r}")
        if self.on_nonfinite not in get_args(OnNonFinite):
            raise TrainingError(
                f"on_nonfinite must be one of {', '.join(get_args(OnNonFinite))}, got {self.on_nonfinite!r}"
            )

    @property
    def halts(self) -> bool:
        """Whether steps after a non-finite one change nothing until it is handled; not if the loss has a scale."""
        return self.on_nonfinite != "skip" and not self.precision.scales

    # ----- shardings --------------------------------------------------------------------------------------------------

    def _whole(self, path: trees.Path, x: Any, mesh: Mesh) -> Sharding:
        """The sharding of a parameter in computations."""
        parts = tuple(p for p in self.plan.parts if p != "fsdp")
        return Plan(parts, self.plan.parameters, self.plan.activations).sharding(path, x.shape, mesh)

    def _split(self, path: trees.Path, x: Any, mesh: Mesh) -> Sharding:
        """The same, split over the data axis as well."""
        placed = widen(self._whole(path, x, mesh).placements, x.shape, mesh, AXES["dp"])
        return Sharding(mesh, **placed)

    @property
    def stage(self) -> int:
        """The ZeRO stage; a plan with ``fsdp`` is stage 3."""
        return 3 if "fsdp" in self.plan.parts else self.zero

    def sharding(self, path: trees.Path, x: Any, mesh: Mesh) -> Sharding:
        """The sharding of a leaf of the state between steps; ``path`` begins with the state's own key."""
        split = self.stage >= 3 if path[0] == "params" else self.stage >= 1
        return (self._split if split else self._whole)(path[1:], x, mesh)

    def place(self, state: Any, mesh: Mesh | None) -> Any:
        """A state, or a part of it from the state's keys on, in its shardings between steps."""
        if mesh is None:
            return trees.tree_map(asarray, state)

        def put(path: trees.Path, x: Any) -> Array:
            x = asarray(x)
            wanted = self.sharding(path, x, mesh)
            return distribute(x, wanted) if x.sharding is None else reshard(x, wanted)

        return trees.map_with_path(put, state)

    # ----- the state --------------------------------------------------------------------------------------------------

    def init(self, params: Any, mesh: Mesh | None) -> dict[str, Any]:
        self.check(params)
        return self.begun(params, mesh)

    def check(self, params: Any) -> None:
        """Raise where no parameter is trained, or one that is has no gradient."""
        if not trees.flatten(params)[0]:
            raise TrainingError("there are no parameters to train")
        trained = trees.flatten_with_path(self.masked(params))
        if not trained:
            raise TrainingError("no parameter is trained: trainable refuses all of them")
        refuse_foreign("Trainer.fit", self.masked(params), "the parameters")
        double = [path for path, x in trained if isinstance(x, Array | np.ndarray) and x.dtype == np.float64]
        if double and self.precision is UNSAID:
            warnings.warn(
                f"parameter {trees.path_name(double[0])} is float64, and the Trainer computes in float32: pass "
                "precision='float64' to compute with all digits, precision='float32' to be told no more, or "
                "parameters of float32 for half of the memory",
                stacklevel=2,
            )
        for path, x in trained:
            if not trains(x):
                raise TrainingError(
                    f"parameter {trees.path_name(path)} is {getattr(x, 'dtype', type(x).__name__)}, which has no "
                    "gradient: make it floating, or name it among what is not trained, with trainable=lambda path: "
                    f"path != {tuple(path)!r}"
                )

    def begun(self, params: Any, mesh: Mesh | None) -> dict[str, Any]:
        """:meth:`init` of any part of the parameters."""
        params = self.place({"params": params}, mesh)["params"]
        state: dict[str, Any] = {"params": params, "optimizer": self.optimizer.init(self.masked(params))}
        if self.ema is not None:
            state["ema"] = self.ema.init(masters(params, state["optimizer"]))
        if self.precision.scales:
            state["scaler"] = self.precision.init()
        state["step"] = asarray(np.int64(0))
        return self.place(state, mesh)

    def masked(self, params: Any) -> Any:
        """The parameters with None in place of those that are not trained."""
        if self.trainable is None:
            return params
        chosen = self.trainable
        return trees.map_with_path(lambda path, x: x if chosen(path) else None, params)

    # ----- the step ---------------------------------------------------------------------------------------------------

    def step(self, state: Any, micro: Sequence[Any], key: Array, going: Any = None) -> tuple[Any, dict[str, Array]]:
        """The state after one step, and numbers about it: ``loss``, ``weight``, ``grad_norm``, ``finite`` and the
        loss's own metrics.

        ``going`` is ``finite`` of the step before, for a recipe that halts: where it is false the step changes nothing.
        """
        params = state["params"]
        train = self.masked(params)
        scale = state["scaler"]["scale"] if self.precision.scales else None
        step_key = random.fold_in(key, state["step"])
        grads: Any = None
        sums: dict[str, Any] = {}
        for batch, batch_key in zip(micro, sample_keys(step_key, micro), strict=True):
            loss = self._scaled(params, batch, batch_key, scale)
            (_, seen), g = value_and_grad(loss, has_aux=True)(train)
            if scale is not None:  # the mean was differentiated, as a sum would leave float16's range
                g = trees.tree_map(lambda x, w=seen["weight"]: x * astype(w, x.dtype, copy=False), g)
            grads = g if grads is None else trees.tree_map(lambda a, b: wide(a) + wide(b), grads, g)
            sums = seen if not sums else {n: sums[n] + v for n, v in seen.items()}
        return self.finished(state, *self.reduced(grads), sums, going)

    def reduced(self, grads: Any) -> tuple[Any, Array]:
        """Sums of gradients in the shardings of the optimizer, and their global norm, which it needs first."""
        if self.stage >= 2:
            grads = self._moved(grads, self._split)
        elif self.stage == 1:
            grads = self._moved(self._moved(grads, self._whole), self._split)
        return grads, global_norm(grads)

    def finished(
        self, state: Any, grads: Any, norm: Array, sums: Mapping[str, Array], going: Any = None
    ) -> tuple[Any, dict[str, Array]]:
        """The state after a step with these sums of gradients and losses."""
        scale = state["scaler"]["scale"] if self.precision.scales else None
        weight = sums["weight"]
        over = where(weight > 0, weight, 1.0)
        divisor = over if scale is None else over * scale
        found = {n: v / over for n, v in sums.items() if n != "weight"} | {"weight": weight}
        factor = 1.0 / divisor
        found["grad_norm"] = norm / divisor
        # Where nothing counts there is nothing to learn; a total without a weight, or with a negative one, has no mean.
        nothing = (weight == 0) & (sums["loss"] == 0) & (norm == 0)
        good = isfinite(norm) & isfinite(found["loss"]) & ((weight > 0) | nothing)
        if going is not None:
            good = good & going
        found["finite"] = good
        if self.clip is not None:
            factor = clip_scale(found["grad_norm"], self.clip) * factor
        # The mean and the clipping in one product of each element.
        grads = trees.tree_map(lambda g: scaled(g, factor), grads)
        new = self._updated(state, self.masked(state["params"]), grads, found["loss"])
        new = trees.tree_map(lambda a, b: where(good, a, b), new, {k: state[k] for k in new})
        if scale is not None:
            new["scaler"] = self.precision.update(state["scaler"], good)
            found["scale"] = scale
        new["step"] = state["step"] + (astype(good, np.int64) if self.halts else 1)
        return new, found

    def _scaled(self, params: Any, batch: Any, key: Array, scale: Any) -> Callable[[Any], Any]:
        """The loss of one micro-batch as a function of the trained parameters. Gives (differentiated value, sums)."""

        def loss(train: Any) -> tuple[Array, dict[str, Array]]:
            p = train if self.trainable is None else merged(train, params)
            sums = weighted(self.loss(self.precision.cast(self.gathered(p)), batch, key), batch)
            total, weight = sums["loss"], sums["weight"]
            refuse_constant(total)
            if scale is not None:
                total = total * astype(scale / where(weight == 0, 1.0, weight), total.dtype, copy=False)
            return total, sums

        return loss

    def sums(self, params: Any, batch: Any) -> dict[str, Array]:
        """The sums of a micro-batch without gradients and dropout."""
        return weighted(self.loss(self.precision.cast(self.gathered(params)), batch, None), batch)

    def gathered(self, params: Any) -> Any:
        """Parameters in the shardings of computations: stage 3 gathers them, with a reduce-scatter as its gradient."""
        if self.stage < 3:
            return params
        return self._moved(params, self._whole)

    def _moved(self, tree: Any, to: Callable[[trees.Path, Any, Mesh], Sharding]) -> Any:
        def move(path: trees.Path, x: Array) -> Array:
            here = x.sharding
            return x if here is None else reshard(x, to(path, x, here.mesh))

        return trees.map_with_path(move, tree)

    def _updated(self, state: Any, train: Any, grads: Any, loss: Array) -> dict[str, Any]:
        params = state["params"]
        rest = train if self.stage == 0 else self._moved(train, self._split)
        rest, slots = self.optimizer.update(rest, grads, state["optimizer"])
        new: dict[str, Any] = {"optimizer": slots}
        if self.ema is not None:
            wide = masters(rest, slots) if self.trainable is None else merged(masters(rest, slots), params)
            new["ema"] = self.ema.update(wide, state["ema"], loss)
        done = rest if self.stage in (0, 3) else self._moved(rest, self._whole)
        new["params"] = done if self.trainable is None else merged(done, params)
        mesh = next((x.sharding.mesh for x in trees.flatten(params)[0] if x.sharding is not None), None)
        # The propagator may choose other shardings; the next step needs those of the state.
        return self.place(new, mesh) if mesh is not None else new


def sample_keys(key: Array, micro: Sequence[Any]) -> list[Array]:
    """The keys of the samples of each micro-batch, ``(n, 1, 2)``. They depend only on places in the whole batch."""
    out, first = [], 0
    for batch in micro:
        after = first + max((len(x) for x in trees.flatten(batch)[0] if getattr(x, "ndim", 0)), default=1)
        out.append(random.fold_in(key, arange(first, after)))
        first = after
    return out


def merged(train: Any, params: Any) -> Any:
    """``params`` with the trained ones from ``train``, in which the others are None."""
    chosen, treedef = trees.flatten(train, is_leaf=lambda x: x is None)
    rest, _ = trees.flatten(params, is_leaf=lambda x: x is None)
    return trees.unflatten(treedef, [r if t is None else t for t, r in zip(chosen, rest, strict=True)])


def weighted(found: Any, batch: Any) -> dict[str, Array]:
    """A loss function's result as sums, in float32 at least: ``loss``, ``weight`` and its metrics."""
    if isinstance(found, tuple):
        if len(found) not in (2, 3):
            raise TrainingError(
                f"a loss gives a mean, (total, weight) or (total, weight, metrics), not {len(found)} things"
            )
        if len(found) == 3 and not isinstance(found[2], Mapping):
            raise TrainingError(f"the metrics of a loss are a dict of numbers by name, got {type(found[2]).__name__}")
        total, weight, metrics = found if len(found) == 3 else (*found, {})
        taken = {"loss", "weight", "grad_norm", "finite", "scale", "skipped", "rollbacks"} & set(metrics)
        if taken:
            raise TrainingError(f"metrics of a loss cannot be called {', '.join(sorted(taken))}")
        wide_metrics = {n: _wide(f"metric {n}", v) for n, v in metrics.items()}
        return {"loss": _wide("total", total), "weight": _wide("weight", weight), **wide_metrics}
    rows = {len(x) for x in trees.flatten(batch)[0] if getattr(x, "ndim", 0)}
    if len(rows) != 1:
        raise TrainingError(
            f"the arrays of the batch have first dimensions {sorted(rows)}, so that a mean has no weight: return "
            "(total, weight)"
        )
    mean = _wide("mean", found)
    n = asarray(np.asarray(next(iter(rows)), mean.dtype))
    return {"loss": mean * n, "weight": n}


def refuse_constant(total: Array) -> None:
    """Raise where a loss that is being differentiated was not computed from the parameters."""
    if not is_watched(total):
        raise TrainingError(
            "the loss does not depend on the parameters, so that nothing would be trained: compute it from the params "
            "that it is given, by functions of meshtape; float(...), mt.stop_gradient, comparisons and integers have "
            "no derivative"
        )


def _wide(what: str, x: Any) -> Array:
    single = isinstance(x, Array | np.ndarray | np.generic | int | float)
    if not single or getattr(x, "size", 1) != 1 or getattr(x, "dtype", np.dtype(float)).kind == "c":
        got = f"{x.dtype.name} of shape {x.shape}" if hasattr(x, "shape") else type(x).__name__
        raise TrainingError(
            f"the {what} that the loss gives is no single real number but {got}: a loss returns a mean over the batch, "
            "such as mt.mean(losses), or (total, weight), or (total, weight, metrics)"
        )
    x = asarray(x)
    return x if x.dtype.kind == "f" and x.dtype.itemsize > 2 else astype(x, np.float32)
