"""`estimate`: bytes on disk and in the memory of each rank, from shapes alone."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays.core.errors import CheckpointError
from ...arrays.core.formatting import count, human_bytes
from ...arrays.core.tree import flatten_with_path
from ..base.arguments import check_positive
from ..base.names import leaf_name
from ..format import dtypes
from ..format.chunk_grid import choose_grid
from ..format.compression import Codec, chosen, most_nbytes
from ..format.sharding_spec import AxisLayout, Chooser, ShardingChoice
from ..loading.match_target import is_array
from ..loading.open import open_checkpoint
from ..readers import safetensors
from .sinks.sink_safetensors import split_files

# Arrays of the parameter's shape that an optimizer keeps.
OPTIMIZERS = {"sgd": 0, "momentum": 1, "lion": 1, "rmsprop": 1, "adagrad": 1, "adam": 2, "adamw": 2}


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank."""

    parameters: int
    gradients: int
    optimizer: int
    master: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.master


@dataclass(frozen=True)
class Estimate:
    """Counts and bytes. ``zarr`` and ``safetensors`` are the files of the parameters; ``files`` the safetensors files
    by name.

    With a ``compression``, ``zarr`` is an upper bound.
    """

    arrays: int
    elements: int
    nbytes: int
    zarr: int
    safetensors: int | None
    files: list[list[str]]
    ranks: list[RankMemory]
    compression: str | None = None

    @property
    def largest(self) -> int:
        """Bytes of the rank that needs most."""
        return max((r.total for r in self.ranks), default=0)

    def __str__(self) -> str:
        worst = max(self.ranks, key=lambda r: r.total)
        parts = ", ".join(f"{part} {human_bytes(n)}" for part, n in vars(worst).items() if n)
        most, how = ("at most ", f" ({self.compression})") if self.compression else ("", "")
        hf = "no form as safetensors"
        if self.safetensors is not None:
            hf = f"{human_bytes(self.safetensors)} as safetensors in {count(len(self.files), 'file')}"
        return (
            f"{count(self.arrays, 'array')}, {count(self.elements, 'element')}, {human_bytes(self.nbytes)}\n"
            f"on disk: {most}{human_bytes(self.zarr)} as Zarr{how}, {hf}\n"
            f"{count(len(self.ranks), 'rank')}, the largest: {human_bytes(worst.total)} ({parts})"
        )


def _shapes(source: Any) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    if isinstance(source, (str, os.PathLike)):
        source = dict(open_checkpoint(source))
        return {n: (a.shape, a.dtype) for n, a in source.items()}
    found = {}
    for path, leaf in flatten_with_path(source, is_leaf=lambda x: _pair(x) or is_array(x)):
        if _pair(leaf):
            found[leaf_name(path)] = (tuple(leaf[0]), dtypes.by_name(leaf[1]))
        elif is_array(leaf):
            found[leaf_name(path)] = (tuple(leaf.shape), dtypes.of_leaf(leaf))
    return found


def _pair(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], tuple) and all(type(n) is int for n in x[0])


def estimate(
    source: Any,
    *,
    mesh: Mapping[str, int] | None = None,
    shardings: Mapping[str, Any] | Chooser | None = None,
    dtype: Any = None,
    optimizer: str | None = None,
    optimizer_dtype: Any = "float32",
    shard_optimizer_over: str | None = None,
    max_shard_bytes: int | None = None,
    compression: str | Codec | None = None,
) -> Estimate:
    """The disk space of a checkpoint, and the memory of each rank to train it.

    Parameters
    ----------
    source
        A path, a tree of arrays (or of anything with ``shape`` and ``dtype``), or a map from names to ``(shape,
        dtype)``.
    mesh, shardings
        Plain data, as in `reshard`. Without a mesh there is one rank. An array without a sharding is on every rank.
    dtype
        Estimate as if all floating arrays had this dtype.
    optimizer
        ``"sgd"``, ``"momentum"``, ``"lion"``, ``"rmsprop"``, ``"adagrad"``, ``"adam"`` or ``"adamw"``: adds gradients,
        its state for each floating array, and master weights where the state's dtype is wider than the parameter's.
        None: loading alone.
    optimizer_dtype
        Of the optimizer's state and the master weights.
    shard_optimizer_over
        A mesh axis over which the state and the master weights of arrays that it does not split are divided (ZeRO,
        stage 1).
    max_shard_bytes
        As in `merge`: how the arrays fall into files.
    compression
        As in `save`. Shapes do not tell how far values shrink, so ``zarr`` is then an upper bound.

    Returns
    -------
    Estimate

    Examples
    --------
    >>> shapes, split = {"w": ((1000, 4096), "bfloat16")}, {"w": {"model": 1}}
    >>> e = estimate(shapes, mesh={"model": 4}, shardings=split, optimizer="adam")
    >>> e.nbytes, e.ranks[0].parameters, e.ranks[0].optimizer, e.ranks[0].master
    (8192000, 2048000, 8192000, 4096000)
    """
    if optimizer is not None and optimizer not in tuple(OPTIMIZERS):  # of which a list can be asked
        raise CheckpointError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    if max_shard_bytes is not None:
        check_positive(max_shard_bytes=max_shard_bytes)
    codec = chosen(compression)
    held = _shapes(source)
    choice = ShardingChoice(mesh, shardings, held)
    axes = tuple(choice.axes.items())
    if shard_optimizer_over is not None and shard_optimizer_over not in tuple(choice.axes):
        raise CheckpointError(f"shard_optimizer_over: the mesh {choice.axes} has no axis {shard_optimizer_over!r}")
    size = math.prod(n for _, n in axes)
    wide = dtypes.by_name(optimizer_dtype)
    if dtype is not None:
        wanted = dtypes.by_name(dtype)
        held = {n: (s, wanted if d.name in dtypes.FLOATS else d) for n, (s, d) in held.items()}

    zarr = 0
    sums = np.zeros((size, 4), np.int64)
    for name, (shape, kind) in held.items():
        sharding, boxes, _ = choice.of(name, tuple(name.split(".")), shape, kind)
        if sharding is not None and not isinstance(sharding, AxisLayout):
            raise CheckpointError(f"{name}: estimate takes shardings as plain data, not {sharding!r}")
        grid = choose_grid(shape, kind.itemsize, boxes)
        zarr += sum(most_nbytes(grid, c, kind.itemsize, codec if shape else None) for c in grid.shards())
        layout = sharding if sharding is not None else AxisLayout(axes, (None,) * len(axes))
        counts = layout.block_sizes(shape)
        sums[:, 0] += counts * kind.itemsize
        if optimizer is None or kind.name not in (*dtypes.FLOATS, "complex64", "complex128"):
            continue
        sums[:, 1] += counts * kind.itemsize
        state = counts
        if shard_optimizer_over is not None:
            k = [a for a, _ in axes].index(shard_optimizer_over)
            if layout.dims[k] is None:
                state = -(-counts // choice.axes[shard_optimizer_over])
        each = wide.itemsize * (2 if kind.kind == "c" else 1)
        sums[:, 2] += state * OPTIMIZERS[optimizer] * each
        if kind.itemsize < each:
            sums[:, 3] += state * each

    sizes = [(n, math.prod(s) * d.itemsize) for n, (s, d) in held.items()]
    groups = split_files(sizes, max_shard_bytes)
    files: int | None = None
    if all(d.name != "complex128" for _, d in held.values()) and "__metadata__" not in held:
        rows = [[(n, dtypes.safetensors_name(held[n][1], n), held[n][0]) for n in g] for g in groups]
        files = sum(n for _, n in sizes) + sum(len(safetensors.build_header(r, sums=True)[0]) for r in rows)
    return Estimate(
        len(held),
        sum(math.prod(s) for s, _ in held.values()),
        sum(n for _, n in sizes),
        zarr,
        files,
        groups,
        [RankMemory(*map(int, row)) for row in sums],
        None if codec is None else str(codec),
    )
