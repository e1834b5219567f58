"""`load`: plan, check, then read.

The whole plan is made and checked before a byte of an array is read: missing and unexpected keys, shapes and dtypes are
reported together, in one error. Missing files are found then, too, but for a short load of a disk, which meets them
when it reads. Split arrays are read by the ranks that will hold them, each its own blocks.
"""

from __future__ import annotations

import os
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ...arrays.backends.collector import collect_again, no_collections
from ...arrays.core.blocks import Box
from ...arrays.core.devices import CPU, default_device
from ...arrays.core.errors import CheckpointDTypeError, CheckpointError, DTypeError, IncompleteCheckpoint
from ...arrays.core.tree import flatten, flatten_with_path, unflatten
from ...arrays.ops.creation import asarray
from ..base.names import leaf_name
from ..base.scratch import out_of_memory, room
from ..checkpoint.checkpoint import fill, unread
from ..format.sharding_spec import by_mesh
from ..readers.reading import Job, run
from ..readers.shared import once
from ..readers.tensor import StoredTensor
from ..readers.zarr_tensor import ZarrTensor
from ..rules.casting import CastLoss, Tally, tracked
from ..rules.lazy_tensors import casts, leaves
from ..rules.rules import Rules
from ..stores.generations import Generation, Listed, once_more
from ..stores.store import is_url, listed_once
from .match_target import (
    Ignored,
    LoadTarget,
    check_shardings,
    chosen,
    held,
    is_array,
    loadable,
    match_like,
    prune,
    resharded,
    select,
    unread_of,
)
from .open import open_checkpoint
from .report import LoadReport

_whole = lru_cache(maxsize=1 << 10)(Box.whole)
_LONG = 1 << 30  # bytes of a load that takes long enough for other threads to want their garbage collected

# ----- in the processes that will hold the blocks ---------------------------------------------------------------------

# Bytes and losses by load, kept only for a caller who asks for them.
_done: dict[str, list[tuple[int, dict[Any, CastLoss]]]] = {}


def read_blocks(payloads: Mapping[int, tuple[str, list[tuple[StoredTensor, Box]]]]) -> dict[int, list[Any]]:
    """Read the blocks of the ranks of this process. Called through ``BlockHost.create``.

    Ranks of one process that hold the same block get equal copies, but the files are read once.
    """
    out: dict[int, list[Any]] = {rank: [] for rank in payloads}
    first: dict[tuple[str, Box], np.ndarray] = {}
    copies: list[tuple[np.ndarray, np.ndarray]] = []
    jobs = []
    token, readers, losses = "", 1, Tally()
    for rank, (token, wanted) in payloads.items():  # noqa: B007
        for tensor, box in wanted:
            readers = max(readers, tensor.readers)
            block = room(tensor.name, box.shape, tensor.dtype)
            source = first.setdefault((tensor.name, box), block)
            if source is block:
                jobs += tracked(losses, (tensor.name, box), tensor.jobs(box, block))
            else:
                copies.append((block, source))
            out[rank].append(block)
    total = run(jobs, readers)
    for block, source in copies:
        block[...] = source
    if token:
        _done.setdefault(token, []).append((total, dict(losses)))  # several workers may share this process
    return out


def counts(
    payloads: Mapping[int, str], blocks: Mapping[int, Sequence[np.ndarray]]
) -> list[tuple[int, dict[Any, CastLoss]]]:
    """Bytes read and cast losses of `read_blocks` in this process, for the load with this token.

    Called through ``BlockHost.run_on_blocks``.
    """
    return _done.pop(next(iter(payloads.values())), [])


# ----- reading --------------------------------------------------------------------------------------------------------


def _read_local(targets: Mapping[str, LoadTarget], report: LoadReport, losses: Tally) -> dict[str, Any]:
    buffers: dict[str, np.ndarray] = {}

    def jobs() -> Iterator[Job]:
        for name, t in targets.items():
            tensor = t.tensor
            shape = tensor.shape
            out = buffers[name] = room(name, shape, t.dtype)
            some = tensor.jobs(_whole(shape), out)
            yield from tracked(losses, name, some) if casts(tensor) else some

    report.bytes_read += run(jobs(), max([t.source.tensor.readers for t in targets.values()], default=1))
    return {name: _as_wanted(name, buffers.pop(name), t.like) for name, t in targets.items()}


def _hierarchies(targets: Mapping[str, LoadTarget]) -> list[Generation]:
    """The files of the targets in Zarr hierarchies by others, where any may change by itself."""
    nodes: dict[str, dict[str, ZarrTensor]] = defaultdict(dict)
    for t in targets.values():
        for leaf in leaves(t.tensor):
            if isinstance(leaf, ZarrTensor) and not isinstance(leaf.generation, Listed):
                nodes[leaf.root][leaf.node] = leaf
    return [
        Listed.now(root, tuple(held), known=(f for leaf in held.values() for f in leaf.every_file()))
        for root, held in nodes.items()
    ]


def _check(targets: Mapping[str, LoadTarget]) -> None:
    for t in targets.values():
        t.source.check()


def _as_wanted(name: str, buffer: np.ndarray, like: Any) -> Any:
    if isinstance(like, np.ndarray):
        return buffer
    try:
        array = asarray(buffer, device=CPU, copy=False)
    except DTypeError as e:
        raise CheckpointDTypeError(f"key {name!r}: {e}; leave it out with keys=, or cast it by a rule") from None
    device = getattr(like, "device", None) or default_device()
    return array if str(device) == "cpu" else array.to_device(device)


def _read_split(targets: Mapping[str, LoadTarget], report: LoadReport, counted: bool, losses: Tally) -> dict[str, Any]:
    """Arrays of one mesh, in one visit to each of its processes."""
    mesh = next(iter(targets.values())).sharding.mesh
    counted = counted or any(casts(t.tensor) for t in targets.values())
    token = uuid.uuid4().hex if counted else ""
    payloads: dict[int, tuple[str, list[tuple[StoredTensor, Box]]]] = {}
    needed: set[tuple[str, Box]] = set()
    for rank in range(mesh.size):
        wanted = []
        for t in targets.values():
            box = t.sharding.box(t.source.shape, rank)
            wanted.append((once("only", t.tensor, box), box))
            needed.add((t.source.name, box))
        payloads[rank] = (token, wanted)
    specs = [(t.source.shape, t.dtype, t.sharding) for t in targets.values()]
    made = mesh.create(read_blocks, payloads, specs)
    if counted:
        sizes = {t.source.name: t.source.dtype.itemsize for t in targets.values()}
        report.bytes_needed += sum(box.size * sizes[name] for name, box in needed)
        names = {t.tensor.name: name for name, t in targets.items()}
        seen: dict[Any, CastLoss] = {}  # a block that several processes hold counts once
        for held in mesh.run_on_blocks(counts, [], dict.fromkeys(range(mesh.size), token)):
            for nbytes, found in held:
                report.bytes_read += nbytes
                seen |= found
        for (name, _), loss in seen.items():
            losses.add(names[name], loss)
    return dict(zip(targets, made, strict=True))


@once_more
@no_collections()  # until its many small objects are gone: those are never walked
def load(
    path: str | os.PathLike[str],
    *,
    like: Any = None,
    shardings: Any = None,
    keys: Iterable[str] | None = None,
    prefix: str | None = None,
    cast: bool = False,
    allow_overflow: bool = False,
    strict: bool = True,
    ignore: Iterable[str] | None = None,
    rules: Any = None,
    verify: bool = True,
    report: LoadReport | None = None,
) -> Any:
    """Read a checkpoint into a tree of arrays.

    Parameters
    ----------
    path
        Whatever `open_checkpoint` opens.
    like
        A tree of arrays, or of anything with ``shape``, ``dtype`` and ``sharding``. Names, shapes and dtypes must be
        those of the checkpoint; the result has this structure, and each array the sharding (or device) of its
        counterpart.
    shardings
        Instead of ``like``: a tree of shardings with the structure that was saved (None: a local array), or a function
        ``(path, shape, dtype)`` that returns a sharding or None.
    keys
        Names or patterns (``"layers.*.w"``) of the leaves to load. Others are left out of dicts, and are None in lists.
    prefix
        Load only what lies below this name (``"params"``), as if it were the whole, or the one leaf of this name.
        ``rules``, ``keys`` and all else speak of names without it.
    cast
        Convert to the dtypes of ``like`` where they differ, instead of refusing.
    allow_overflow
        Accept values that ``cast`` or a rule turns into infinity, NaN or another integer; the report's ``losses``
        counts them. Otherwise they are an error. Rounding is no such loss; values that become zero are counted.
    strict
        When false, leaves that are missing or do not fit are taken from ``like``, unexpected ones are left out, and the
        report lists both. Where ``like`` has more rows than are stored (a vocabulary that grew), the stored rows are
        kept, and the further rows are those of ``like``. Without a ``report`` there is a warning.
    ignore
        Names or patterns that may be missing (then they are those of ``like``) or unexpected; the report lists them.
    rules
        Key rules (`Rules`, or their text) that make the wanted arrays of the stored ones. ``keys``, ``like`` and
        ``shardings`` then speak of what the rules give; without ``like`` the result is a flat dict. Each rank reads
        what its blocks need.
    verify
        Compare every chunk with its checksum. Without it damage goes unnoticed. It costs about a tenth of a second a
        gigabyte and processor, and nothing where the disk is the bottleneck.
    report
        A `LoadReport` to fill in.

    Returns
    -------
    tree
        Without ``like`` and ``shardings``, local arrays in the structure that was saved.

    Raises
    ------
    CheckpointKeyError, CheckpointShapeError, CheckpointDTypeError
        The checkpoint does not fit what is wanted. The message lists every missing and unexpected key and every shape
        and dtype that differs; nothing was read.
    Lossy
        ``cast`` or a rule would lose values, and ``allow_overflow`` is false.
    CorruptCheckpoint
        Bytes do not fit their checksum; names file, key and chunk.
    CheckpointReplaced
        Writers replaced it again and again while it was read; each time the load began anew.
    RuleSyntaxError, RuleMatchError, RuleConflict
        The rules do not fit the checkpoint, or each other.
    IncompleteCheckpoint, NotACheckpoint, UnsupportedVersion, StoreError
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
    >>> report = LoadReport()
    >>> tree = load(where, like={"w": np.zeros(4), "bias": np.ones(1)}, strict=False, report=report)
    >>> tree["bias"], report.missing, report.unexpected
    (array([1.]), ['bias'], ['epoch'])
    """
    if like is not None and shardings is not None:
        raise CheckpointError("load takes like= or shardings=, not both")
    started = time.perf_counter()
    kept = LoadReport() if report is None else report
    if not isinstance(kept, LoadReport):
        raise CheckpointError(f"report must be a LoadReport, which load fills, got {report!r:.80}")
    kept.reset()
    ckpt = open_checkpoint(path, verify=verify)
    kept.path = ckpt.path
    opened = time.perf_counter()
    if prefix is not None:
        ckpt = ckpt.below(prefix)
    if rules is not None:
        ckpt = Rules(rules).on(ckpt)
        kept.mapping = ckpt.mapping
    picked = select(ckpt, keys)
    kept.skipped = unread_of(ckpt, keys)
    if like is None and (shardings is None or callable(shardings)):
        picked, formless = loadable(ckpt, picked, keys)
        kept.skipped |= formless
    ignored = Ignored(ignore, kept)
    with listed_once():
        if like is None:
            targets = chosen(ckpt, shardings, picked, strict, ignored, kept)
        else:
            targets = match_like(ckpt, like, picked, cast, strict, ignored, kept)
        check_shardings(targets)
        # A short load of a disk tells itself what is missing; readers of other formats may fill it in.
        local = {n: t for n, t in targets.items() if t.sharding is None}
        kept.bytes_needed = sum([t.source.nbytes for t in local.values()])
        short = kept.bytes_needed <= _LONG and len(local) == len(targets)
        if not short or is_url(ckpt.path) or ckpt.kind not in ("meshtape", "safetensors"):
            _check(targets)
    if sum([t.source.nbytes for t in targets.values() if t.sharding is not None], kept.bytes_needed) > _LONG:
        collect_again()
    kept.arrays = len(targets)
    if report is not None:
        kept.resharded = resharded(targets)
    planned = time.perf_counter()

    pinned = _hierarchies(targets) if ckpt.kind == "Zarr" else []
    losses = Tally()
    try:
        loaded = _read_local(local, kept, losses)
    except IncompleteCheckpoint:
        _check(targets)  # which names all that is missing
        raise
    except MemoryError as e:
        raise out_of_memory(ckpt.path, e, "load some of it by keys=, or onto a mesh of more processes") from None
    for _, group in by_mesh(targets.values()):
        loaded |= _read_split({t.source.name: t for t in group}, kept, report is not None, losses)
    for generation in pinned:
        generation.check()
    losses.refuse(allow_overflow)
    kept.losses = dict(sorted(losses.items()))
    ended = time.perf_counter()
    kept.seconds = ended - started
    kept.phases = {"open": opened - started, "plan": planned - opened, "read": ended - planned}
    if report is None and not kept.fits:
        warnings.warn(str(kept), stacklevel=4)
    elif report is None and like is None and kept.skipped:
        warnings.warn(f"{ckpt.path} is loaded without what cannot be read{unread(kept.skipped)}", stacklevel=4)

    if like is not None:
        scalars = held(ckpt, picked)[1]
        return _rebuild(like, {**scalars, **loaded}, {*kept.loaded, *kept.grown})
    structure = ckpt.structure if picked is None else prune(ckpt.structure, picked)[0]
    values = list(map(loaded.get, ckpt.arrays))
    return fill(structure, lambda leaf: values[leaf.index])


def _rebuild(like: Any, values: Mapping[str, Any], fitting: set[str]) -> Any:
    """The structure of ``like``, classes included, with the loaded values; its own where nothing fits."""
    _, treedef = flatten(like, is_leaf=is_array)
    pairs = [(leaf_name(path), leaf) for path, leaf in flatten_with_path(like, is_leaf=is_array)]
    return unflatten(treedef, [values[name] if name in fitting else leaf for name, leaf in pairs])
