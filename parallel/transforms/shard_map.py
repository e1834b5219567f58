"""``mt.shard_map``: code for one rank that all ranks run."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.errors import MeshError, ShardingConflict, check_function
from ...arrays.core.op import Op, ShapeDtype, recording, state
from ...arrays.indexing.sparse_cotangent import densify
from ...autodiff.captures.cache import CachedCaptures
from ...autodiff.captures.captures import captures_of
from ...autodiff.captures.lost_writes import noting_logs
from ...autodiff.captures.static_results import ARRAY, filled, static
from ...autodiff.compiler.determinism import ImpurityCheck
from ...autodiff.compiler.signature import as_array, leaf_key, read_too
from ...autodiff.tape.function_wrapper import Wrapper
from ..mesh.mesh import Mesh
from ..sharding.placement import Partial, Placement, Replicate, Shard, Sharding
from ..spmd.per_rank_op import TracedShardMap
from ..spmd.rank_trace import RankTrace
from ..spmd.rank_tracer import RankTracer


class _DerivedNotes:
    """Notices results that are computed, while the code is traced, from arrays around it: they are right for this call
    alone."""

    def __init__(self, known: Sequence[Array]) -> None:
        self.known = {id(x): x for x in known}
        self.found = False
        self.logged: str | None = None

    def watches(self, x: Array) -> bool:
        return False

    def record(self, op: Op, args: tuple[Any, ...], bufs: Any, outs: tuple[Array, ...], *rest: Any) -> None:
        if any(isinstance(o._buf, RankTracer) for o in outs):
            return
        if any(id(a) in self.known for a in args):
            self.found = True


class ShardMapped(Wrapper):
    """A function of blocks as a function of whole arrays; see :func:`shard_map`."""

    def __init__(self, fn: Callable[..., Any], mesh: Mesh, in_placements: Any, out_placements: Any) -> None:
        if not isinstance(mesh, Mesh):
            raise MeshError(f"[shard_map] the second argument is a Mesh, got {type(mesh).__name__}")
        self._fn, self.mesh = fn, mesh
        self._in, self._out = in_placements, out_placements
        self._cache: dict[Any, tuple[TracedShardMap, trees.TreeDef, list[Any]]] = {}
        self._outside = CachedCaptures(self._fn)
        self._unsettled = 0  # traces in succession that are not to be used again
        functools.update_wrapper(self, fn, updated=())

    def functions(self) -> list[Callable[..., Any]]:
        return [self._fn]

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"shard_map({getattr(self._fn, '__name__', self._fn)!s}, {self.mesh})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, treedef = trees.flatten((args, kwargs))
        leaves = [as_array(x) for x in leaves]
        arrays = [x for x in leaves if isinstance(x, Array)]
        densify(arrays)
        keys = tuple((x.shape, x.dtype) if isinstance(x, Array) else leaf_key(x) for x in leaves)
        reads = self._outside.look(read_too(leaves, treedef))
        key = (treedef, keys, reads.key, state.device)
        found = self._cache.get(key)
        if found is None:
            chance = ImpurityCheck(reads, leaves)
            *found, keep = self._traced(args, kwargs, leaves, treedef, [x for x, _ in reads.arrays], reads.around)  # type: ignore[assignment]
            changed = reads.changed_since(lambda: captures_of(self._fn, read_too(leaves, treedef)))
            if changed is None and chance.draws():
                changed = "a generator of random numbers, or reads a clock"
            self._unsettled = self._unsettled + 1 if changed else 0
            if keep and not changed:
                self._cache[key] = found  # type: ignore[assignment]
            if self._unsettled == 2:
                warnings.warn(
                    f"[shard_map] {getattr(self._fn, '__name__', self._fn)} is traced at every call: it writes to "
                    f"{changed}. Return the new value, draw with mt.random, and pass as an argument what is read",
                    RuntimeWarning,
                    stacklevel=2,
                )
        code, out_def, statics = found  # type: ignore[misc]
        return trees.unflatten(out_def, filled(statics, code(arrays)))

    def _traced(
        self,
        args: Any,
        kwargs: Any,
        leaves: Sequence[Any],
        treedef: trees.TreeDef,
        known: Sequence[Array],
        around: Sequence[Any],
    ) -> Any:
        name = getattr(self._fn, "__name__", "shard_map")
        specs = self._in if isinstance(self._in, tuple) else tuple(self._in for _ in args)
        if len(specs) != len(args):
            raise ShardingConflict(
                f"[shard_map] {len(specs)} in_placements for {len(args)} positional argument(s) of {name}"
            )
        wanted = [
            *_spread(self.mesh, specs, args, "argument"),
            *[Sharding(self.mesh) for _ in trees.flatten(kwargs)[0]],
        ]
        in_avals, in_layouts = [], []
        for x, sharding, (path, _) in zip(leaves, wanted, trees.flatten_with_path((args, kwargs)), strict=True):
            if isinstance(x, Array):
                try:
                    in_layouts.append(sharding.check(x.shape, x.dtype).layout)
                except ShardingConflict as e:
                    raise ShardingConflict(f"[shard_map] argument {trees.path_name(path[1:])} of {name}: {e}") from None
                in_avals.append(ShapeDtype(tuple(x.shape), x.dtype))
        result: list[Any] = []

        def body(trace: RankTrace, arguments: Sequence[Array]) -> Sequence[Array]:
            given = iter(arguments)
            a, k = trees.unflatten(treedef, [next(given) if isinstance(x, Array) else x for x in leaves])
            outs, out_def = trees.flatten(self._fn(*a, **k))
            densify(outs)
            found = _spread(self.mesh, (self._out,), (trees.unflatten(out_def, outs),), "result")
            lifted = [x for x in outs if isinstance(x, Array)]
            shardings = [s for s, x in zip(found, outs, strict=True) if isinstance(x, Array)]
            layouts = [s.check(x.shape, x.dtype).layout for s, x in zip(shardings, lifted, strict=True)]
            result[:] = out_def, [ARRAY if isinstance(x, Array) else x for x in outs], layouts
            return lifted

        derived = _DerivedNotes(known)
        with recording(derived), noting_logs(derived):
            code = TracedShardMap(
                name,
                self.mesh,
                in_avals,
                in_layouts,
                lambda i, varying: result[2][i],
                body,
                lambda i: f"result {i} of {name}",
            )
        out_def, statics, _ = result
        who = f"[shard_map] {name}"
        return (
            code,
            out_def,
            [s if s is ARRAY else static(who, s, around) for s in statics],
            not (derived.found or derived.logged),
        )


def _is_spec(x: Any) -> bool:
    """Whether this says placements: a Sharding, or a dict from names of axes to placements."""
    if isinstance(x, Sharding) or x is None:
        return True
    return isinstance(x, dict) and all(isinstance(p, Shard | Replicate | Partial) for p in x.values())


def _spread(mesh: Mesh, specs: Any, tree: Any, what: str) -> list[Sharding]:
    """The sharding of each leaf of ``tree``, from a tree of placements of which a leaf may stand for a whole branch."""
    out: list[Sharding] = []

    def walk(spec: Any, x: Any, path: tuple[Any, ...]) -> None:
        if _is_spec(spec):
            sharding = _sharding(mesh, spec, f"{what} {trees.path_name(path) or '0'}")
            out.extend(sharding for _ in trees.flatten(x)[0])
            return
        children, theirs = (
            dict(zip(f[1], f[2], strict=True)) if f else None for f in map(trees.children_of, (spec, x))
        )
        if children is None or theirs is None or children.keys() != theirs.keys():
            raise ShardingConflict(
                f"[shard_map] the placements of {what} {trees.path_name(path) or '0'} are {spec!r}, which fits no "
                f"{type(x).__name__}: give {{axis: Shard(dim)}}, {{}} (replicated), or a tree of these like the {what}"
            )
        for k in theirs:
            walk(children[k], theirs[k], (*path, k))

    for i, (spec, x) in enumerate(zip(specs, tree, strict=True)):
        walk(spec, x, (i,))
    return out


def _sharding(mesh: Mesh, spec: Sharding | dict[str, Placement] | None, what: str) -> Sharding:
    if isinstance(spec, Sharding):
        if spec.mesh is not mesh:
            raise MeshError(f"[shard_map] the sharding of {what} is of another mesh: {spec.mesh}, not {mesh}")
        return spec
    return Sharding(mesh, **(spec or {}))


def shard_map(fn: Callable[..., Any], mesh: Mesh, in_placements: Any, out_placements: Any) -> Callable[..., Any]:
    """Code that is written for one rank, as a function of whole arrays.

    Inside ``fn`` an array is one rank's block, and nothing moves between ranks but by the collectives:
    :func:`all_reduce`, :func:`all_gather`, :func:`reduce_scatter`, :func:`all_to_all`, :func:`permute` and
    :func:`broadcast`. Outside it is an ordinary function: it nests in ``mt.grad`` and ``mt.compile``, at any order, on
    virtual meshes and on Dask.

    Parameters
    ----------
    fn
        Takes and returns trees of arrays. It is traced, like a compiled function: Python code in it runs once a
        signature, for all ranks.
    mesh
        Whose ranks run it.
    in_placements
        A tuple with the placements of each positional argument: ``{"data": mt.Shard(0)}``, ``{}`` for replicated, a
        :class:`Sharding`, or a tree of these like the argument, of which a leaf may stand for a whole branch. One that
        is no tuple serves for all arguments. Arguments that are elsewhere are moved. Keyword arguments replicate.
    out_placements
        The same for the results of ``fn``. ``Shard(dim)`` joins the ranks' results, ``Partial(op)`` leaves them
        pending, and a replicated result must be the same on all ranks.

    Returns
    -------
    function
        Of whole arrays.

    Raises
    ------
    ShardingConflict
        For a result that is declared replicated although ranks may hold different values (a reduction was forgotten),
        and for arguments that are not divided in blocks of one shape.
    MeshError
        For a value that is reduced twice, unknown axes, arrays of other meshes, collectives outside.

    Notes
    -----
    The gradient of a replicated argument is the sum over the ranks: inside ``fn``, ``mt.grad`` gives it reduced
    already; from outside it is left pending, and reduced late and together with others. See
    :mod:`meshtape.parallel.spmd.rank_ops` for the pairs of forward and backward collectives, and for how values are
    typed (JAX, *Autodiff and sharding*).

    Examples
    --------
    A linear layer whose columns, and one whose rows are split (Megatron-LM):

    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"model": 2})
    >>> def layer(x, w1, w2):
    ...     return mt.all_reduce(mt.nn.relu(x @ w1) @ w2, "model")
    >>> cols, rows = {"model": mt.Shard(1)}, {"model": mt.Shard(0)}
    >>> f = mt.shard_map(layer, mesh, ({}, cols, rows), {})
    >>> f(mt.ones((1, 2)), mt.ones((2, 4)), mt.ones((4, 1)))
    Array([[8.]], dtype=float64, sharding=Sharding(model=Replicate()))
    >>> mt.grad(lambda w: f(mt.ones((1, 2)), w, mt.ones((4, 1))).sum())(mt.ones((2, 4))).shape
    (2, 4)
    """
    check_function("shard_map", fn)
    return ShardMapped(fn, mesh, in_placements, out_placements)
