"""The match of a load's target with a checkpoint, checked in full before a byte of an array is read."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays.core.blocks import BlockSharding, Box
from ...arrays.core.dtypes import DTYPES
from ...arrays.core.errors import (
    CheckpointDTypeError,
    CheckpointError,
    CheckpointKeyError,
    CheckpointShapeError,
    ReshardError,
)
from ...arrays.core.formatting import count, some
from ...arrays.core.tree import Path, flatten_with_path
from ..base.names import check_distinct, chooser, leaf_name, matching, patterns_of
from ..checkpoint.checkpoint import Checkpoint, StoredArray
from ..format import dtypes
from ..format.manifest import scalar_leaves
from ..readers.tensor import ChunkedTensor
from ..rules.lazy_tensors import Converted, InMemoryTensor, Joined
from .deltas import stored_of
from .report import LoadReport, listed, told

Chooser = Callable[[Path, tuple[int, ...], np.dtype], BlockSharding | None]

_SHOWN = 12


@dataclass(slots=True)
class LoadTarget:
    """One array to load: its source, its dtype, its sharding and its counterpart in ``like``."""

    source: StoredArray
    dtype: np.dtype
    sharding: BlockSharding | None = None
    like: Any = None

    @property
    def tensor(self) -> Any:
        """The source in the wanted dtype."""
        t = self.source.tensor
        return t if t.dtype == self.dtype else Converted(t.name, t, self.dtype)


def select(ckpt: Checkpoint, keys: Iterable[str] | None, drop: bool = False) -> set[Path] | None:
    """Paths of the leaves that ``keys`` (names or patterns) pick, or None for all.

    With ``drop``, keys may also name arrays that cannot be read.
    """
    if keys is None:
        return None
    known = {a.name: a.path for a in ckpt.arrays.values()}
    known.update({n: p for p, _ in scalar_leaves(ckpt.structure, none=True) if (n := leaf_name(p)) not in ckpt.skipped})
    picked: set[Path] = set()
    unused = []
    for pattern in patterns_of(keys):
        hits = matching(pattern, known)
        picked.update(known[n] for n in hits)
        if not hits and not drop:
            ckpt.refuse_skipped([pattern])
        if not hits and not matching(pattern, ckpt.skipped):
            unused.append(pattern)
    if unused:
        raise CheckpointKeyError(f"{ckpt.path}: nothing matches {unused}; it holds {some(known, _SHOWN)}")
    return picked


def unread_of(ckpt: Checkpoint, keys: Iterable[str] | None, drop: Iterable[str] | None = None) -> dict[str, str]:
    """The arrays that cannot be read and that ``keys`` take and ``drop`` leaves, and why."""
    wanted = chooser(keys, drop, {*ckpt.arrays, *ckpt.skipped})
    return {n: why for n, why in ckpt.skipped.items() if wanted(n)}


def loadable(
    ckpt: Checkpoint, picked: set[Path] | None, keys: Iterable[str] | None
) -> tuple[set[Path] | None, dict[str, str]]:
    """What is picked without the arrays whose dtype no array has in memory, and why for each of these.

    Those that ``keys`` name stay, packed bits too, and so do all where there is nothing else: to load them is an error.
    """
    arrays = ckpt.arrays if picked is None else held(ckpt, picked)[0]
    named = {keys} if isinstance(keys, str) else set(keys or ())
    fine = DTYPES.keys() | {d.name for d in dtypes.PACKED.values()}
    types = {d for d in {a.dtype for a in arrays.values()} if dtypes.short_name(d) not in fine}
    odd = {n for n, a in arrays.items() if a.dtype in types} - named if types else ()
    if not odd or len(odd) == len(arrays):
        return picked, {}
    paths = {a.path for n, a in arrays.items() if n not in odd}
    paths |= {p for p, _ in scalar_leaves(ckpt.structure, none=True)}
    why = {n: f"{arrays[n].dtype} is no dtype of an array" for n in arrays if n in odd}
    return paths if picked is None else paths & picked, why


def prune(node: Any, picked: set[Path], path: Path = ()) -> tuple[Any, bool]:
    """The tree with only the picked leaves: others vanish from dicts, and become None in lists and tuples."""
    if path in picked:
        return node, True
    if isinstance(node, dict):
        kept = {k: prune(v, picked, (*path, k)) for k, v in node.items()}
        kept = {k: v for k, (v, some) in kept.items() if some}
        return kept, bool(kept)
    if isinstance(node, (list, tuple)):
        parts = [prune(v, picked, (*path, i)) for i, v in enumerate(node)]
        return type(node)(v for v, _ in parts), any(some for _, some in parts)
    return None, False


def held(ckpt: Checkpoint, picked: set[Path] | None) -> tuple[dict[str, StoredArray], dict[str, Any]]:
    """Arrays and values by name: a flat checkpoint fits a nested tree whose leaves have the same names."""
    arrays = {n: a for n, a in ckpt.arrays.items() if a.path in picked} if picked is not None else dict(ckpt.arrays)
    scalars = {leaf_name(p): v for p, v in scalar_leaves(ckpt.structure) if picked is None or p in picked}
    return arrays, scalars


def _named(tree: Any, is_leaf: Callable[[Any], bool]) -> dict[str, Any]:
    pairs = flatten_with_path(tree, is_leaf=is_leaf)
    named = [leaf_name(p) for p, _ in pairs]
    check_distinct([p for p, _ in pairs], named)
    return {name: leaf for name, (_, leaf) in zip(named, pairs, strict=True)}


class Ignored:
    """Names that need not fit: those that match one of ``patterns``, which are then reported."""

    def __init__(self, patterns: Iterable[str] | None, report: LoadReport) -> None:
        self.patterns = [] if patterns is None else patterns_of(patterns, "ignore takes names or patterns")
        self.report = report

    def without(self, names: Iterable[str], known: Container[str]) -> list[str]:
        """``names`` without those; ``known`` are all names of both sides."""
        kept, ignored = [], chooser(self.patterns, None, known)
        for n in names:
            (self.report.ignored if ignored(n) else kept).append(n)
        return kept


def is_array(x: Any) -> bool:
    # An array-like leaf of `like` may itself be a dataclass or a named tuple.
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _grown(source: StoredArray, leaf: Any) -> StoredArray | None:
    """The stored rows, then the further rows of ``leaf`` (a vocabulary that grew).

    None unless ``leaf`` has more rows and otherwise the same shape.
    """
    shape, wanted = source.shape, tuple(leaf.shape)
    if not shape or len(wanted) != len(shape) or wanted[1:] != shape[1:] or wanted[0] <= shape[0]:
        return None
    if getattr(leaf, "sharding", None) is not None or not hasattr(leaf, "__array__"):
        raise CheckpointShapeError(
            f"{source.name}: {count(shape[0], 'row')} stored and {wanted[0]:,} wanted, of an array that is split or "
            "has no values to fill the rest with; "
            f"grow it by the rule '{source.name} -> {source.name}, pad(axis=0, size={wanted[0]}, fill=mean)'"
        )
    new = np.asarray(leaf if str(getattr(leaf, "device", "cpu")) == "cpu" else leaf.to_device("cpu"))[shape[0] :]
    stored = source.tensor
    if new.dtype != stored.dtype:
        stored = Converted(stored.name, stored, new.dtype)
    return StoredArray(source.path, Joined.of(source.name, [stored, InMemoryTensor(source.name, new)], 0))


def match_like(
    ckpt: Checkpoint,
    like: Any,
    picked: set[Path] | None,
    cast: bool,
    strict: bool,
    ignored: Ignored,
    report: LoadReport,
) -> dict[str, LoadTarget]:
    """Targets for the arrays of ``like``, after every check; one error lists all mismatches.

    Without ``strict`` only the report lists them, and an array that does not fit has no target.
    """
    arrays, scalars = held(ckpt, picked)
    wanted = _named(like, is_array)
    known = {*arrays, *scalars, *wanted}
    report.missing = ignored.without((n for n in wanted if n not in arrays and n not in scalars), known)
    report.unexpected = ignored.without((n for n in [*arrays, *scalars] if n not in wanted), known)
    kinds, shapes, types, targets = [], [], [], {}
    for name, leaf in wanted.items():
        wants_array = is_array(leaf)
        if name in scalars:
            if wants_array:
                kinds.append(name)
                report.mismatched[name] = f"{name} is a value ({scalars[name]!r}) in the checkpoint, an array in like"
            else:
                report.loaded.append(name)
        if name not in arrays:
            continue
        source = arrays[name]
        if not wants_array:
            kinds.append(name)
            report.mismatched[name] = f"{name} is an array in the checkpoint, a {type(leaf).__name__} in like"
            continue
        dtype = dtypes.of_leaf(leaf)
        if tuple(leaf.shape) != source.shape:
            shapes.append(name)
            rule = f", made by the rule {source.rule}" if source.rule else ""
            grown = None if strict else _grown(source, leaf)
            if grown is not None and (dtype == source.dtype or cast):
                report.grown[name] = (
                    f"{name}: {count(source.shape[0], 'row')} stored, the other {leaf.shape[0] - source.shape[0]:,} "
                    "are those of like"
                )
                targets[name] = LoadTarget(grown, dtype, None, leaf)
                continue
            also = "" if dtype == source.dtype or cast else f"; stored dtype {source.dtype}, wanted {dtype}"
            report.mismatched[name] = f"{name}: stored shape {source.shape}, wanted {tuple(leaf.shape)}{also}{rule}"
        elif dtype != source.dtype and not cast:
            types.append(name)
            report.mismatched[name] = f"{name}: stored dtype {source.dtype}, wanted {dtype}"
        else:
            report.loaded.append(name)
            targets[name] = LoadTarget(source, dtype, getattr(leaf, "sharding", None), leaf)
    if report.fits or not strict:
        return targets
    keys = bool(kinds or report.missing or report.unexpected)
    kind = CheckpointKeyError if keys else CheckpointShapeError if shapes else CheckpointDTypeError
    lines = [f"{ckpt.path} does not fit like; nothing was read"]
    lines += listed("missing in the checkpoint", report.missing) + listed("unexpected, not in like", report.unexpected)
    unread = [n for n in report.missing if n in ckpt.skipped]
    lines += [f"  {n} is there and cannot be read: {ckpt.skipped[n]}" for n in unread[:_SHOWN]]
    lines += [f"  {report.mismatched[n]}" for n in kinds[:_SHOWN]]
    for what, names, hint in (("shapes", shapes, ""), ("dtypes", types, "; pass cast=True to convert")):
        lines += told(f"{what} differ ({len(names)}{hint})", [report.mismatched[n] for n in names])
    raise kind("\n".join(lines))


def chosen(
    ckpt: Checkpoint, shardings: Any, picked: set[Path] | None, strict: bool, ignored: Ignored, report: LoadReport
) -> dict[str, LoadTarget]:
    """Targets for all arrays, with shardings from a function, a tree, or none."""
    arrays, scalars = held(ckpt, picked)
    targets = {name: LoadTarget(a, a.dtype) for name, a in arrays.items()}
    report.loaded = [*arrays, *scalars]
    if shardings is None:
        return targets
    if callable(shardings) and not isinstance(shardings, BlockSharding):
        for t in targets.values():
            t.sharding = shardings(t.source.path, t.source.shape, t.source.dtype)
        return targets
    # A tree: None is a leaf here (a local array), and a sharding may itself be a named tuple or a dataclass.
    given = _named(shardings, lambda x: x is None or isinstance(x, BlockSharding))
    known = {*arrays, *given}
    report.missing = ignored.without((n for n, s in given.items() if s is not None and n not in arrays), known)
    report.unexpected = ignored.without((n for n in arrays if n not in given), known)
    if strict and not report.fits:
        lines = listed("missing in the checkpoint", report.missing)
        lines += listed("unexpected, not in shardings", report.unexpected)
        raise CheckpointKeyError("\n".join([f"{ckpt.path} does not fit shardings; nothing was read", *lines]))
    for name, t in targets.items():
        t.sharding = given.get(name)
    return targets


def resharded(targets: Mapping[str, LoadTarget]) -> list[str]:
    """Names of the arrays for which some rank needs a block that is not stored as one."""
    out = []
    for name, t in targets.items():
        tensor = stored_of(t.source.tensor)
        if t.sharding is None:
            continue
        blocks = (
            {o.box for o in tensor.objects.values()}
            if isinstance(tensor, ChunkedTensor)
            else {Box.whole(t.source.shape)}
        )
        wanted = {t.sharding.box(t.source.shape, rank) for rank in range(t.sharding.mesh.size)}
        if any(box.size and box not in blocks for box in wanted):
            out.append(name)
    return out


def check_shardings(targets: Mapping[str, LoadTarget]) -> None:
    for name, t in targets.items():
        if t.sharding is None:
            continue
        if not isinstance(t.sharding, BlockSharding):
            raise CheckpointError(f"{name}: {t.sharding!r} is not a sharding")
        if t.sharding.partial:
            raise ReshardError(f"{name}: an array cannot be loaded as partial values ({t.sharding}); shard it")
