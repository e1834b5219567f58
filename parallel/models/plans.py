"""Named sharding plans such as ``"dp+tp"``: the shardings of a model's parameters and activations.

A plan is a product of *parts*, each of which uses one axis of the mesh:

========  =========  ==============================================================================================
part      axis       what it splits
========  =========  ==============================================================================================
``dp``    data       the batch
``fsdp``  data       the batch, and the largest dimension of each parameter that is still whole (ZeRO stage 3)
``tp``    model      heads and hidden units: first layers by columns, second layers by rows (Shoeybi et al., 2019)
``sp``    model      the sequence, where ``tp`` leaves it whole: norms and residuals (Korthikanti et al., 2022)
``vocab`` model      rows of the embedding and columns of the head, hence the logits
``cp``    context    the sequence throughout; attention goes round a ring (Liu et al., 2023)
``ep``    expert     experts, and the batch like ``dp``: tokens go to their experts; see :mod:`.moe`
``pp``    pipe       the layers, in stages through which micro-batches pass (Huang et al., 2019); see :class:`Stages`
========  =========  ==============================================================================================

A part whose axis the mesh lacks does nothing, so that one plan serves a laptop and a cluster.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.errors import PlanError, ShapeError
from ..mesh.api import distribute, reshard
from ..mesh.mesh import Mesh
from ..sharding.placement import Placement, Replicate, Shard, Sharding

AXES = {"dp": "data", "fsdp": "data", "tp": "model", "sp": "model", "vocab": "model", "cp": "context"} | {
    "ep": "expert",
    "pp": "pipe",
}
"""The mesh axis of each part."""

BATCH_AXES = ("data", "expert")
"""Axes that split the rows of a batch."""

Table = Mapping[str, Mapping[str, int]]
"""By part: pattern of a name → the dimension that is split."""


@dataclass(frozen=True)
class Plan:
    """Where parameters live and which activations are moved.

    Parameters
    ----------
    parts
        As in the table of this module.
    parameters
        By part: pattern of a parameter's name (as ``fnmatch`` takes it) → dimension to split. The first match counts.
    activations
        By part: name that the model gives an activation → dimension to split. An activation that the parts in use do
        not name is left to propagation.

    Examples
    --------
    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"data": 2, "model": 2})
    >>> plan = mt.models.Plan(("dp", "tp"), {"tp": {"*.up": 1, "*.down": 0}})
    >>> plan.sharding("mlp.up", (4, 8), mesh)
    Sharding(data=Replicate(), model=Shard(1))
    >>> plan.batch(mesh)
    Sharding(data=Shard(0), model=Replicate())
    """

    parts: tuple[str, ...]
    parameters: Table = field(default_factory=dict)
    activations: Table = field(default_factory=dict)

    __is_tree__ = False  # one value, not a container of arrays

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in AXES:
                raise PlanError(f"a plan is made of {', '.join(AXES)}, joined by '+'; got {part!r}")
        if len(set(self.parts)) != len(self.parts):
            raise PlanError(f"a part stands twice in the plan {self}")
        if "sp" in self.parts and "tp" not in self.parts:
            raise PlanError(
                f"the plan {self} has 'sp' without 'tp', between whose regions it splits the sequence: 'cp' splits it "
                "throughout, with ring attention"
            )

    def __str__(self) -> str:
        return "+".join(self.parts) or "none"

    # ----- parameters -------------------------------------------------------------------------------------------------

    def sharding(self, name: str | trees.Path, shape: Sequence[int], mesh: Mesh) -> Sharding:
        """The sharding of the parameter ``name``, or of anything whose path ends in its name and which has as many
        dimensions.

        So the slots of an optimizer and averages lie as their parameter does.
        """
        keys = name.split(".") if isinstance(name, str) else [str(k) for k in name]
        found = self._placements([".".join(keys[i:]) for i in range(len(keys))], len(shape), mesh)
        if "fsdp" in self.parts:
            found = widen(found, shape, mesh, AXES["fsdp"])
        return Sharding(mesh, **found)

    def _placements(self, suffixes: Sequence[str], ndim: int, mesh: Mesh) -> dict[str, Placement]:
        found: dict[str, Placement] = {}
        for part in self.parts:
            axis, rules = AXES[part], self.parameters.get(part, {})
            if axis not in mesh.names or axis in found or not rules:
                continue
            dims = (d for s in suffixes for pattern, d in rules.items() if fnmatch.fnmatchcase(s, pattern))
            dim = next(dims, None)
            if dim is not None and dim < ndim:
                found[axis] = Shard(dim)
        return found

    def shardings(self, params: Any, mesh: Mesh) -> Any:
        """A tree like ``params`` with the sharding of each leaf."""
        return trees.map_with_path(lambda path, x: self.sharding(path, x.shape, mesh), params)

    def distribute(self, params: Any, mesh: Mesh) -> Any:
        """The parameters put on a mesh as the plan says."""
        return trees.map_with_path(lambda path, x: distribute(x, self.sharding(path, x.shape, mesh)), params)

    # ----- data and activations ---------------------------------------------------------------------------------------

    def batch(self, mesh: Mesh) -> Sharding:
        """The sharding of a batch, whose first dimension is the samples and whose second, with ``cp``, the sequence."""
        axes = {AXES[p] for p in self.parts} & set(BATCH_AXES)
        placed: dict[str, Placement] = {a: Shard(0) for a in mesh.names if a in axes}
        if "cp" in self.parts and AXES["cp"] in mesh.names:
            placed[AXES["cp"]] = Shard(1)
        return Sharding(mesh, **placed)

    def rows(self, mesh: Mesh) -> int:
        """Over how many ranks the samples of a batch are split."""
        axes = {AXES[p] for p in self.parts} & set(BATCH_AXES)
        return math.prod(size for a, size in mesh.describe().items() if a in axes)

    def constrain(self, x: Array, name: str) -> Array:
        """The activation ``name`` moved to where the plan wants it; ``x`` itself off a mesh or where no part names
        it."""
        here = x.sharding
        if here is None:
            return x
        wanted: dict[str, Placement] = {}
        for part in self.parts:
            dim = self.activations.get(part, {}).get(name)
            if dim is not None and AXES[part] in here.mesh.names:
                wanted[AXES[part]] = Shard(dim) if dim >= 0 else Replicate()
        return reshard(x, **wanted) if wanted else x


def constrained(plan: Plan | None, x: Array, name: str) -> Array:
    """:meth:`Plan.constrain` where there is a plan."""
    return x if plan is None else plan.constrain(x, name)


@dataclass(frozen=True)
class Stages:
    """The stages of a model for a pipeline, for any number of them; ``mt.models.decoder.staged`` makes one.

    Parameters
    ----------
    functions
        ``functions(count)``: that many functions ``stage(params, x, batch, key)``. ``x`` is the result of the stage
        before (None in the first): an array, or a tree of them. ``batch`` is the micro-batch in the first and the last
        stage and None between; ``key`` is for dropout, the same in all stages, and None without dropout. The last stage
        returns the result of a loss function: ``(total, weight)``, ``(total, weight, metrics)`` or a mean.
    split
        ``split(params, count)``: the tree that each stage takes, put together from the leaves of the model's tree, in
        which those of other stages may be missing (None). A leaf that stands in the trees of two stages is one
        parameter: it gets both gradients.

    Examples
    --------
    >>> import meshtape as mt
    >>> config = mt.models.decoder.Config(vocab=8, width=4, layers=2, heads=1)
    >>> cut = mt.models.decoder.staged(config)
    >>> first, last = cut.split(mt.models.decoder.init(mt.random.key(0), config), 2)
    >>> sorted(first), sorted(last)
    (['embed', 'layers'], ['embed', 'layers', 'norm'])
    """

    functions: Callable[[int], Sequence[Callable[[Any, Any, Any, Any], Any]]]
    split: Callable[[Any, int], Sequence[Any]]

    __is_tree__ = False


def block_cuts(name: str, layers: int, count: int) -> list[int]:
    """Where the blocks of a model are cut into stages: evenly, the first stages getting one more."""
    if not 1 <= count <= layers:
        raise ShapeError(f"[{name}] {layers} blocks cannot be cut into {count} stages")
    small, more = divmod(layers, count)
    return [i * small + min(i, more) for i in range(count + 1)]


def split_blocks(name: str, params: Any, layers: int, count: int, last: Iterable[str]) -> list[Any]:
    """The tree of each stage: its blocks, with the embedding in the first and the branches ``last`` in the last one."""
    cuts = block_cuts(name, layers, count)
    out: list[Any] = [{"layers": params["layers"][a:b]} for a, b in itertools.pairwise(cuts)]
    out[0]["embed"] = params["embed"]
    out[-1].update({n: params[n] for n in last})
    return out


def widen(placed: Mapping[str, Placement], shape: Sequence[int], mesh: Mesh, axis: str) -> dict[str, Placement]:
    """Placements with the largest dimension that is still whole split over ``axis`` too, if there is one that is long
    enough.

    ZeRO (Rajbhandari et al., 2020) as a sharding: stage 1 widens optimizer slots, stage 2 gradients, stage 3
    parameters.
    """
    out = dict(placed)
    if axis not in mesh.names or isinstance(out.get(axis), Shard):
        return out
    parts = mesh.describe()[axis]
    taken = {p.dim for p in out.values() if isinstance(p, Shard)}
    free = [(n % parts == 0, n, -d) for d, n in enumerate(shape) if d not in taken and n >= parts]
    if free:
        out[axis] = Shard(-max(free)[2])
    return out


def parse(text: str | Plan, parameters: Table, activations: Table) -> Plan:
    """The plan that a text such as ``"dp+tp"`` names, for a model with these tables."""
    if isinstance(text, Plan):
        return text
    parts = tuple(p.strip() for p in text.split("+")) if text and text != "none" else ()
    return Plan(parts, parameters, activations)


def of_any_model(given: str | Plan | None) -> Plan:
    """A plan for a model without tables: ``"dp"`` by default, or ``"fsdp"``. A `Plan` is returned as it is.

    Raises `PlanError` for a text with other parts, as only the model knows which parameters these split.

    >>> str(of_any_model(None)), str(of_any_model("fsdp"))
    ('dp', 'fsdp')
    """
    if given is None:
        return Plan(("dp",))
    if isinstance(given, Plan):
        return given
    if not isinstance(given, str):
        raise PlanError(f"plan takes a Plan or a text such as 'dp', got {type(given).__name__}")
    found = parse(given, {}, {})
    unknown = [p for p in found.parts if p not in ("dp", "fsdp")]
    if unknown:
        raise PlanError(
            f"which parameters {unknown[0]!r} splits only the model knows: pass its plan, such as "
            f"mt.models.decoder.plan({given!r}), or a Plan of your own"
        )
    return found
