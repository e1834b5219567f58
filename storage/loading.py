"""`load`: plan, check, then read.

The whole plan is made and checked before a byte of an array is read: missing and unexpected keys, shapes and dtypes are
reported together, in one error. Split arrays are read by the ranks that will hold them, each its own blocks.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ..arrays import asarray
from ..arrays.blocks import BlockSharding, Box
from ..arrays.errors import (
    CheckpointDTypeError,
    CheckpointError,
    CheckpointKeyError,
    CheckpointShapeError,
    ReshardError,
)
from ..arrays.tree import Path, flatten, flatten_with_path, unflatten
from .manifest import scalar_leaves
from .names import check_distinct, leaf_name
from .opened import Checkpoint, StoredArray, fill
from .opening import open_checkpoint
from .rules import Rules
from .tensors import StoredTensor, run

Chooser = Callable[[Path, tuple[int, ...], np.dtype], BlockSharding | None]

_SHOWN = 12


@dataclass
class LoadReport:
    """Filled in by `load`: what it took. ``bytes_read`` counts file reads of every process, ``bytes_needed`` the elements."""

    path: str = ""
    arrays: int = 0
    bytes_needed: int = 0
    bytes_read: int = 0
    seconds: float = 0.0


# ----- in the processes that will hold the blocks ---------------------------------------------------------------------

_bytes_read: dict[str, list[int]] = {}  # by load, kept only for a caller who wants a report


def read_blocks(payloads: Mapping[int, tuple[str, list[tuple[StoredTensor, Box, np.dtype]]]]) -> dict[int, list[Any]]:
    """Read the blocks of the ranks of this process. Called through ``BlockHost.create``.

    Ranks of one process that hold the same block get equal copies, but the files are read once.
    """
    out: dict[int, list[Any]] = {rank: [] for rank in payloads}
    first: dict[tuple[str, Box], np.ndarray] = {}
    copies: list[tuple[np.ndarray, np.ndarray]] = []
    jobs = []
    token, readers = "", 1
    for rank, (token, wanted) in payloads.items():  # noqa: B007
        for tensor, box, _ in wanted:
            readers = max(readers, tensor.readers)
            block = np.empty(box.shape, tensor.dtype)
            source = first.setdefault((tensor.name, box), block)
            if source is block:
                jobs += tensor.jobs(box, block)
            else:
                copies.append((block, source))
            out[rank].append(block)
    total = run(jobs, readers)
    for block, source in copies:
        block[...] = source
    if token:
        _bytes_read.setdefault(token, []).append(total)  # several workers may share this process
    return {
        rank: [b if b.dtype == d else b.astype(d) for b, (_, _, d) in zip(blocks, payloads[rank][1], strict=True)]
        for rank, blocks in out.items()
    }


def count_bytes(payloads: Mapping[int, str], blocks: Mapping[int, Sequence[np.ndarray]]) -> int:
    """What `read_blocks` read in this process for the load of that token. Called through ``BlockHost.run_on_blocks``."""
    return sum(_bytes_read.pop(next(iter(payloads.values())), []))


# ----- planning -------------------------------------------------------------------------------------------------------


@dataclass
class _Target:
    """One array to load: from where, and what it shall be."""

    source: StoredArray
    dtype: np.dtype
    sharding: BlockSharding | None = None
    like: Any = None


def select(ckpt: Checkpoint, keys: Iterable[str] | None) -> set[Path] | None:
    """Paths of the leaves that ``keys`` (names or patterns) pick, or None for all."""
    if keys is None:
        return None
    patterns = [keys] if isinstance(keys, str) else list(keys)
    known = {a.name: a.path for a in ckpt.arrays.values()}
    known.update({leaf_name(p): p for p, _ in scalar_leaves(ckpt.structure)})
    picked: set[Path] = set()
    unused = []
    for pattern in patterns:
        hits = [known[pattern]] if pattern in known else [p for n, p in known.items() if fnmatchcase(n, pattern)]
        picked.update(hits)
        if not hits:
            unused.append(pattern)
    if unused:
        raise CheckpointKeyError(f"{ckpt.path}: nothing matches {unused}; it holds {_some(list(known))}")
    return picked


def _some(keys: Sequence[Any]) -> str:
    shown = ", ".join(str(k) for k in keys[:_SHOWN])
    return f"{shown} and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else shown


def prune(node: Any, picked: set[Path], path: Path = ()) -> tuple[Any, bool]:
    """The tree with only the picked leaves: others vanish from dicts, and become None where places count."""
    if isinstance(node, dict):
        kept = {k: prune(v, picked, (*path, k)) for k, v in node.items()}
        kept = {k: v for k, (v, some) in kept.items() if some}
        return kept, bool(kept)
    if isinstance(node, (list, tuple)):
        parts = [prune(v, picked, (*path, i)) for i, v in enumerate(node)]
        return type(node)(v for v, _ in parts), any(some for _, some in parts)
    return (node, True) if path in picked and node is not None else (None, False)


def _held(ckpt: Checkpoint, picked: set[Path] | None) -> tuple[dict[str, StoredArray], dict[str, Any]]:
    """Arrays and values by name: a flat checkpoint fits a nested tree whose leaves have the same names."""
    arrays = {n: a for n, a in ckpt.arrays.items() if picked is None or a.path in picked}
    scalars = {leaf_name(p): v for p, v in scalar_leaves(ckpt.structure) if picked is None or p in picked}
    return arrays, scalars


def _named(tree: Any, is_leaf: Callable[[Any], bool]) -> dict[str, Any]:
    pairs = flatten_with_path(tree, is_leaf=is_leaf)
    check_distinct([p for p, _ in pairs])
    return {leaf_name(p): leaf for p, leaf in pairs}


def _check_keys(wanted: set[str], held: set[str], what: str) -> list[str]:
    """The lines of an error about keys, or none."""
    missing, unexpected = sorted(wanted - held), sorted(held - wanted)
    lines = []
    if missing:
        lines.append(f"  missing in the checkpoint ({len(missing)}): {_some(missing)}")
    if unexpected:
        lines.append(f"  unexpected, not in {what} ({len(unexpected)}): {_some(unexpected)}")
    return lines


def _is_array(x: Any) -> bool:
    # What stands for an array in `like` may itself be a dataclass or a named tuple.
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _match_like(ckpt: Checkpoint, like: Any, picked: set[Path] | None, cast: bool) -> dict[str, _Target]:
    """Targets for the arrays of ``like``, after every check; one error carries all that is wrong."""
    arrays, scalars = _held(ckpt, picked)
    wanted = _named(like, _is_array)
    keys = _check_keys(set(wanted), set(arrays) | set(scalars), "like")
    shapes, types, targets = [], [], {}
    for name, leaf in wanted.items():
        is_array = _is_array(leaf)
        if name in scalars and is_array:
            keys.append(f"  {name} is a value ({scalars[name]!r}) in the checkpoint, an array in like")
        if name not in arrays:
            continue
        source = arrays[name]
        if not is_array:
            keys.append(f"  {name} is an array in the checkpoint, a {type(leaf).__name__} in like")
            continue
        if tuple(leaf.shape) != source.shape:
            shapes.append(f"  {name}: stored shape {source.shape}, wanted {tuple(leaf.shape)}")
        dtype = np.dtype(leaf.dtype)
        if dtype != source.dtype and not cast:
            types.append(f"  {name}: stored dtype {source.dtype}, wanted {dtype}")
        targets[name] = _Target(source, dtype, getattr(leaf, "sharding", None), leaf)
    if not (keys or shapes or types):
        return targets
    kind = CheckpointKeyError if keys else CheckpointShapeError if shapes else CheckpointDTypeError
    lines = [f"{ckpt.path} does not fit like; nothing was read", *keys]
    if shapes:
        lines += [f"  shapes differ ({len(shapes)}):", *(f"  {s}" for s in shapes[:_SHOWN])]
    if types:
        hint = "pass cast=True to convert"
        lines += [f"  dtypes differ ({len(types)}; {hint}):", *(f"  {t}" for t in types[:_SHOWN])]
    raise kind("\n".join(lines))


def _chosen(ckpt: Checkpoint, shardings: Any, picked: set[Path] | None) -> dict[str, _Target]:
    """Targets for all arrays, with shardings from a function, a tree, or none."""
    arrays, _ = _held(ckpt, picked)
    targets = {name: _Target(a, a.dtype) for name, a in arrays.items()}
    if shardings is None:
        return targets
    if callable(shardings) and not isinstance(shardings, BlockSharding):
        for t in targets.values():
            t.sharding = shardings(t.source.path, t.source.shape, t.source.dtype)
        return targets
    # A tree: None is a leaf here (a local array), and a sharding may itself be a named tuple or a dataclass.
    given = _named(shardings, lambda x: x is None or isinstance(x, BlockSharding))
    wanted = {n for n, s in given.items() if s is not None or n in arrays}
    lines = _check_keys(wanted, set(arrays), "shardings")
    if lines:
        raise CheckpointKeyError("\n".join([f"{ckpt.path} does not fit shardings; nothing was read", *lines]))
    for name, t in targets.items():
        t.sharding = given[name]
    return targets


def _check_shardings(targets: Mapping[str, _Target]) -> None:
    for name, t in targets.items():
        if t.sharding is None:
            continue
        if not isinstance(t.sharding, BlockSharding):
            raise CheckpointError(f"{name}: {t.sharding!r} is not a sharding")
        if t.sharding.partial:
            raise ReshardError(f"{name}: an array cannot be loaded as partial values ({t.sharding}); shard it")


# ----- reading --------------------------------------------------------------------------------------------------------


def _read_local(targets: Mapping[str, _Target], report: LoadReport) -> dict[str, Any]:
    buffers = {path: np.empty(t.source.shape, t.source.dtype) for path, t in targets.items()}
    jobs = [
        job for path, t in targets.items() for job in t.source.tensor.jobs(Box.whole(t.source.shape), buffers[path])
    ]
    report.bytes_read += run(jobs, max((t.source.tensor.readers for t in targets.values()), default=1))
    report.bytes_needed += sum(b.nbytes for b in buffers.values())
    out: dict[str, Any] = {}
    for path, t in targets.items():
        buffer = buffers.pop(path)
        if buffer.dtype != t.dtype:
            buffer = buffer.astype(t.dtype)
        if isinstance(t.like, np.ndarray):
            out[path] = buffer
            continue
        array = asarray(buffer, copy=False)
        device = getattr(t.like, "device", None)
        out[path] = array if device is None or str(device) == "cpu" else array.to_device(device)
    return out


def _read_split(targets: Mapping[str, _Target], report: LoadReport, counted: bool) -> dict[str, Any]:
    """Arrays of one mesh, in one visit to each of its processes."""
    mesh = next(iter(targets.values())).sharding.mesh
    token = uuid.uuid4().hex if counted else ""
    payloads: dict[int, tuple[str, list[tuple[StoredTensor, Box, np.dtype]]]] = {}
    needed: set[tuple[str, Box]] = set()
    for rank in range(mesh.size):
        wanted = []
        for t in targets.values():
            box = t.sharding.box(t.source.shape, rank)
            wanted.append((t.source.tensor.only(box), box, t.dtype))
            needed.add((t.source.name, box))
        payloads[rank] = (token, wanted)
    specs = [(t.source.shape, t.dtype, t.sharding) for t in targets.values()]
    made = mesh.create(read_blocks, payloads, specs)
    if counted:
        sizes = {t.source.name: t.source.dtype.itemsize for t in targets.values()}
        report.bytes_needed += sum(box.size * sizes[name] for name, box in needed)
        report.bytes_read += sum(mesh.run_on_blocks(count_bytes, [], dict.fromkeys(range(mesh.size), token)))
    return dict(zip(targets, made, strict=True))


def _by_mesh(targets: Mapping[str, _Target]) -> list[dict[str, _Target]]:
    groups: list[tuple[Any, dict[str, _Target]]] = []
    for path, t in targets.items():
        if t.sharding is None:
            continue
        mesh = t.sharding.mesh
        group = next((g for m, g in groups if m is mesh or m == mesh), None)
        if group is None:
            group = {}
            groups.append((mesh, group))
        group[path] = t
    return [g for _, g in groups]


def load(
    path: str | os.PathLike[str],
    *,
    like: Any = None,
    shardings: Any = None,
    keys: Iterable[str] | None = None,
    cast: bool = False,
    rules: Any = None,
    report: LoadReport | None = None,
) -> Any:
    """Read a checkpoint into a tree of arrays.

    Parameters
    ----------
    path
        Whatever `open_checkpoint` opens.
    like
        A tree of arrays, or of anything with ``shape``, ``dtype`` and ``sharding``. Names, shapes and dtypes must be those of
        the checkpoint; the result has this structure, and each array the sharding (or device) of its counterpart.
    shardings
        Instead of ``like``: a tree of shardings with the structure that was saved (None: a local array), or a function
        ``(path, shape, dtype)`` that returns a sharding or None.
    keys
        Names or patterns (``"layers.*.w"``) of the leaves to load. Others are left out of dicts, and are None in lists.
    cast
        Convert to the dtypes of ``like`` where they differ, instead of refusing.
    rules
        Key rules (`Rules`, or their text) that make the wanted arrays of the stored ones. ``keys``, ``like`` and ``shardings`` then
        speak of what the rules give; without ``like`` the result is a flat dict. Each rank reads what its blocks need.
    report
        A `LoadReport` to fill in.

    Returns
    -------
    tree
        Without ``like`` and ``shardings``, local arrays in the structure that was saved.

    Raises
    ------
    CheckpointKeyError, CheckpointShapeError, CheckpointDTypeError
        The checkpoint does not fit what is wanted. The message lists every missing and unexpected key and every shape and dtype
        that differs; nothing was read.
    CorruptCheckpoint
        Bytes do not fit their checksum; names file, key and chunk.
    RuleSyntaxError, RuleMatchError, RuleConflict
        The rules do not fit the checkpoint, or each other.
    IncompleteCheckpoint, NotACheckpoint, UnsupportedVersion
        As `open_checkpoint`.

    Examples
    --------
    >>> import tempfile, os
    >>> from meshtape.storage import save
    >>> where = os.path.join(tempfile.mkdtemp(), "ckpt")
    >>> _ = save(where, {"w": np.arange(4.0), "epoch": 2})
    >>> tree = load(where)
    >>> np.asarray(tree["w"]), tree["epoch"]
    (array([0., 1., 2., 3.]), 2)
    """
    started = time.perf_counter()
    if like is not None and shardings is not None:
        raise CheckpointError("load takes like= or shardings=, not both")
    ckpt = open_checkpoint(path)
    if rules is not None:
        ckpt = Rules(rules).on(ckpt)
    picked = select(ckpt, keys)
    targets = _chosen(ckpt, shardings, picked) if like is None else _match_like(ckpt, like, picked, cast)
    _check_shardings(targets)
    for t in targets.values():
        t.source.check()

    kept = LoadReport() if report is None else report
    kept.path, kept.arrays, kept.bytes_read, kept.bytes_needed = ckpt.path, len(targets), 0, 0
    loaded = _read_local({p: t for p, t in targets.items() if t.sharding is None}, kept)
    for group in _by_mesh(targets):
        loaded |= _read_split(group, kept, report is not None)
    kept.seconds = time.perf_counter() - started

    if like is not None:
        scalars = _held(ckpt, picked)[1]
        return _rebuild(like, {**scalars, **loaded})
    structure = ckpt.structure if picked is None else prune(ckpt.structure, picked)[0]
    order = list(ckpt.arrays)
    return fill(structure, lambda leaf: loaded[order[leaf.index]])


def _rebuild(like: Any, values: Mapping[str, Any]) -> Any:
    """The structure of ``like``, classes included, with the loaded values."""
    _, treedef = flatten(like, is_leaf=_is_array)
    return unflatten(treedef, [values[leaf_name(path)] for path, _ in flatten_with_path(like, is_leaf=_is_array)])
