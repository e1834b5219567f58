"""Arguments without values: shapes, dtypes and shardings on a virtual mesh, and the program of a step on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.dtypes import as_dtype
from ...arrays.core.errors import MeshError, TracedValueError
from ...arrays.core.op import ShapeDtype
from ...arrays.core.program import Program
from ...autodiff.compiler.compile import outline
from ..mesh.mesh import Mesh
from ..mesh.sharded_array import IMPLICIT_LIMIT, ShardedBuffer, sharded_array
from ..partition.partition import partition
from ..partition.rank_program import RankProgram
from ..sharding.placement import REPLICATED, Replicate, Sharding
from ..sharding.splat import spread

Place = Callable[[trees.Path, Any, Mesh], Sharding | None]

PARAMETERS, GRADIENTS, OPTIMIZER, DATA = "parameters", "gradients", "optimizer state", "data"

_OPTIMIZER_NAMES = frozenset(
    {"optimizer", "opt_state", "optim", "ema", "scaler", "slots", "master", "mean", "square", "velocity", "momentum"}
)
_PARAMETER_NAMES = frozenset({"params", "parameters", "weights"})


class _NoValue:
    """The handle of an array without blocks. Computing with it raises an error."""

    @property
    def blocks(self) -> Any:
        raise TracedValueError(
            "[forecast] a value was asked for of an array that only stands for a shape: pass the number instead"
        )


class Spec(NamedTuple):
    """Shape, dtype and sharding of an array without values."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding | None

    __is_tree__ = False


class StepSpec(NamedTuple):
    """A step as a rank program, and the kinds of its variables."""

    program: RankProgram
    whole: Program
    """The program on whole arrays."""
    kinds: Mapping[int, str]
    """Kinds of inputs, outputs and the gradients that the step asks for."""
    state: tuple[ShapeDtype, ...]
    """Parameters and optimizer state: the content of a checkpoint."""
    uneven: tuple[str, ...]
    """Inputs whose blocks have different lengths on different ranks."""


def abstract(fn: Callable[..., Any], *args: Any) -> Any:
    """The result of ``fn(*args)`` as shapes, dtypes and shardings. Nothing is computed and no array is made.

    Arguments are arrays, or anything with ``shape`` and ``dtype`` and perhaps a ``sharding``.

    Raises
    ------
    TracedValueError
        Where the function asks for a value.

    Examples
    --------
    >>> import meshtape as mt
    >>> state = mt.abstract(mt.optim.adam(1e-3).init, {"w": mt.ShapeDtype((1 << 20, 1 << 20), mt.bfloat16)})
    >>> state["mean"]["w"].shape, state["mean"]["w"].dtype.name
    ((1048576, 1048576), 'float32')
    """
    given = [x for _, x in _leaves(args)]
    mesh = next((x.sharding.mesh for x in given if getattr(x, "sharding", None) is not None), None)
    known = mesh is not None
    mesh = mesh or Mesh({})
    found = outline(fn, *_arrays(args, mesh, None)).result
    return trees.tree_map(
        lambda x: Spec(x.shape, x.dtype, x.sharding if known else None) if isinstance(x, Array) else x, found
    )


def planned(
    step: Callable[..., Any], args: tuple[Any, ...], mesh_shape: Mapping[str, int] | None, place: Place | None
) -> tuple[StepSpec, Mesh]:
    """The rank program of a step on a virtual mesh of this shape, and the mesh."""
    shardings = [s for _, x in _leaves(args) if (s := getattr(x, "sharding", None)) is not None]
    theirs = shardings[0].mesh if shardings else None
    if mesh_shape is None and theirs is None:
        raise MeshError("[forecast] mesh_shape is missing, such as {'data': 512, 'model': 8}: no argument is on a mesh")
    # Per-rank code of the step may name the mesh of the arguments.
    kept = theirs is not None and mesh_shape in (None, theirs.describe())
    mesh = theirs if kept else Mesh(mesh_shape, device="cpu")  # type: ignore[arg-type]
    arrays = _arrays(args, mesh, place)
    found = outline(step, *arrays)
    program = spread(found.program, IMPLICIT_LIMIT)
    leaves = [(path, x) for path, x in trees.flatten_with_path(tuple(arrays)) if isinstance(x, Array)]
    layouts = {v: x.sharding.layout for v, (_, x) in zip(program.inputs, leaves, strict=True)}
    layouts.update({v: c.layout for v, c in program.constants.items() if isinstance(c, ShardedBuffer)})
    renames: dict[int, int] = {}
    rank_program = partition(program, layouts, mesh.sizes, name="step", renames=renames)
    kinds, held = _kinds(program, found.gradients, found.result, leaves)
    uneven = tuple(
        trees.path_name(path)
        for path, x in leaves
        if any(x.shape[d] % int(np.prod([mesh.sizes[a] for a in axes])) for d, axes in x.sharding.layout.shards)
    )
    state = tuple(program.avals[v] for v in held)
    by_rank = {renames.get(v, v): kind for v, kind in kinds.items()}
    by_rank.update({v: kinds[w] for v, w in zip(rank_program.outputs, program.outputs, strict=True) if w in kinds})
    return StepSpec(rank_program, program, by_rank, state, uneven), mesh


def _is_spec(x: Any) -> bool:
    return not isinstance(x, Array | np.ndarray) and hasattr(x, "shape") and hasattr(x, "dtype")


def _leaves(args: tuple[Any, ...]) -> list[tuple[trees.Path, Any]]:
    return trees.flatten_with_path(args, is_leaf=_is_spec)


def _arrays(args: tuple[Any, ...], mesh: Mesh, place: Place | None) -> tuple[Any, ...]:
    """The arguments with arrays on ``mesh`` that have no values. Numbers stay."""

    def one(path: trees.Path, x: Any) -> Any:
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            return x
        aval = ShapeDtype(tuple(x.shape), as_dtype(x.dtype))
        sharding = place(path, x, mesh) if place is not None else getattr(x, "sharding", None)
        layout = REPLICATED
        if sharding is not None:
            if not isinstance(sharding, Sharding):
                raise MeshError(
                    f"[forecast] place gives a Sharding or None, got {sharding!r} for {trees.path_name(path)}"
                )
            layout = (sharding if sharding.mesh is mesh else _on(sharding, mesh)).check(*aval).layout
        return sharded_array(mesh, layout, aval, _NoValue())

    return trees.map_with_path(one, args, is_leaf=_is_spec)


def _on(sharding: Sharding, mesh: Mesh) -> Sharding:
    """The same placements, by the names of axes, on another mesh."""
    names, there = sharding.mesh.names, sharding.layout
    order = [names[a] for _, axes in there.shards for a in axes]
    held = {n: p for n, p in sharding.placements.items() if not isinstance(p, Replicate)}
    missing = [n for n in held if n not in mesh.names]
    if missing:
        raise MeshError(
            f"[forecast] an argument is split along {missing[0]!r}, and the mesh has {', '.join(map(repr, mesh.names))}"
        )
    return Sharding(mesh, **{n: held[n] for n in [*order, *held] if n in held})


def _kinds(
    program: Program, gradients: tuple[tuple[int, int], ...], result: Any, leaves: list[tuple[trees.Path, Array]]
) -> tuple[dict[int, str], list[int]]:
    """The kinds of inputs and outputs, and the inputs that a checkpoint holds.

    Parameters are the inputs that are differentiated or have a parameter's name. Other arrays of a
    parameter's shape, and those with a name of optimizer state, are optimizer state.
    """
    sources = {s for s, _ in gradients}
    shapes = {program.avals[v].shape for v in sources.intersection(program.inputs) if program.avals[v].shape}

    def kind(path: trees.Path, v: int) -> str:
        names = {str(k).lower() for k in path}
        aval = program.avals[v]
        if v in sources or (names & _PARAMETER_NAMES and not names & _OPTIMIZER_NAMES):
            return PARAMETERS
        named = bool(names & _OPTIMIZER_NAMES)
        return OPTIMIZER if named or (aval.shape in shapes and aval.dtype.kind not in "biu") else DATA

    found = {v: kind(path, v) for v, (path, _) in zip(program.inputs, leaves, strict=True)}
    found.update(dict.fromkeys(program.constants, DATA))
    held = [v for v in program.inputs if found[v] in (PARAMETERS, OPTIMIZER)]
    by_aval: dict[ShapeDtype, list[str]] = {}
    for v in held:
        by_aval.setdefault(program.avals[v], []).append(found[v])
    known = {v for _, v in gradients}
    for v, (path, _) in zip(
        program.outputs, [x for x in trees.flatten_with_path(result) if isinstance(x[1], Array)], strict=True
    ):
        if v in found or v in known:
            continue
        # New values have the shapes of old ones; where those of several kinds have this shape, names tell.
        kinds = by_aval.get(program.avals[v], [])
        names = {str(k).lower() for k in path}
        if kinds:
            one = kinds[0] if len(set(kinds)) == 1 else OPTIMIZER if names & _OPTIMIZER_NAMES else PARAMETERS
            found[v] = one if program.avals[v].shape else DATA
    found.update({v: GRADIENTS for v in known if v not in found})
    return found, held
