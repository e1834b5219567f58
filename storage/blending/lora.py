"""LoRA adapters as PEFT writes them: applied to weights box by box, and extracted from two models (Hu et al., arXiv:2106.09685)."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import CheckpointError
from ..base.names import fits
from ..checkpoint.checkpoint import Checkpoint
from ..commit import directory_commit
from ..commit.contents import CHECKPOINTS
from ..format import dtypes
from ..loading.open import open_checkpoint
from ..readers.reading import Job
from ..readers.safetensors import save_safetensors
from ..readers.tensor import read_box, read_into
from ..rules.casting import cast
from ..rules.lazy_tensors import DerivedTensor
from ..stores import store as stores
from .config import Problems
from .methods import real, rounded
from .vocabulary import is_embedding

_PREFIX = "base_model.model."
_ENDS = {".lora_A.weight": "A", ".lora_B.weight": "B", ".lora_embedding_A": "A", ".lora_embedding_B": "B"}


@dataclass(frozen=True, slots=True)
class WithLora(DerivedTensor):
    """``weight + scale * B @ A``, or its transpose ``A.T @ B.T``. Products are summed over the rank in order, in float64."""

    name: str
    parts: tuple[Any, Any, Any]  # weight, A, B
    scale: float
    transposed: bool
    casts: ClassVar[bool] = True

    source = property(lambda self: self.parts[0])
    shape = property(lambda self: self.parts[0].shape)
    dtype = property(lambda self: self.parts[0].dtype)
    chunk = property(lambda self: self.parts[0].chunk)

    def sources(self) -> tuple[Any, ...]:
        return self.parts

    def _factors(self, box: Box) -> tuple[Box, Box]:
        """The columns of A and the rows of B for a box."""
        rows, cols = (1, 0) if self.transposed else (0, 1)
        rank = self.parts[1].shape[0]
        a = Box((0, box.offset[cols]), (rank, box.shape[cols]))
        return a, Box((box.offset[rows], 0), (box.shape[rows], rank))

    def only(self, box: Box) -> WithLora:
        if not box.size:
            return self
        return replace(
            self, parts=tuple(p.only(b) for p, b in zip(self.parts, (box, *self._factors(box)), strict=True))
        )

    def planned(self, box: Box) -> int:
        if not box.size:
            return 0
        return sum(p.planned(b) for p, b in zip(self.parts, (box, *self._factors(box)), strict=True))

    def jobs(self, box: Box, out: np.ndarray) -> Iterator[Job]:
        return self.by_pieces(box, out, 4 * 8)

    def _read(self, box: Box, out: np.ndarray) -> int:
        w, nbytes = read_into(self.parts[0], box)
        (a, m), (b, n) = (read_into(p, x) for p, x in zip(self.parts[1:], self._factors(box), strict=True))
        kind = real(w.dtype)
        a, b = a.astype(np.float64), b.astype(np.float64)
        delta = np.zeros((b.shape[0], a.shape[1]))
        for k in range(len(a)):  # in this order for any box
            delta += b[:, k, None] * a[k]
        delta = rounded((delta * self.scale).astype(kind), self.parts[2].dtype)
        made = w.astype(kind, copy=False) + (delta.T if self.transposed else delta)
        out[...] = cast(self.name, made, self.dtype, box.offset)
        return nbytes + m + n


def with_adapter(tensors: Mapping[str, Any], adapter: str, where: str) -> tuple[dict[str, Any], Checkpoint]:
    """The weights with an adapter applied, and the adapter. Raises `CheckpointError` that lists what does not fit."""
    problems = Problems()
    ckpt = open_checkpoint(adapter)
    config = ckpt.documents.get("adapter_config.json") if "adapter_config.json" in ckpt.documents else None
    if not isinstance(config, Mapping):
        raise CheckpointError(
            f"{adapter} has no adapter_config.json; give the directory of a LoRA adapter as PEFT writes it"
        )
    if config.get("peft_type", "LORA") != "LORA" or config.get("use_dora"):
        problems.append(f"{'DoRA' if config.get('use_dora') else config.get('peft_type')} is no plain LoRA")
    out, pairs = dict(tensors), dict[str, dict[str, Any]]()
    for name, a in ckpt.arrays.items():
        short = name.removeprefix(_PREFIX)
        end = next((e for e in _ENDS if short.endswith(e)), None)
        if end is not None:
            pairs.setdefault(short.removesuffix(end), {})[_ENDS[end]] = a.tensor
            pairs[short.removesuffix(end)]["embedding"] = "embedding" in end
        elif (plain := short.replace(".modules_to_save.default", "")) in tensors:
            if tuple(a.shape) != tuple(tensors[plain].shape):
                problems.append(f"{name!r} has shape {a.shape}, the model's {plain!r} {tuple(tensors[plain].shape)}")
            out[plain] = a.tensor  # trained whole
        else:
            problems.append(f"{name!r} of the adapter has no place in the model")
    for module, pair in pairs.items():
        name = f"{module}.weight"
        if {"A", "B"} - set(pair):
            problems.append(f"{module}: lora_{'A' if 'B' in pair else 'B'} is missing")
            continue
        if name not in tensors:
            problems.append(f"{module} of the adapter has no weight in the model")
            continue
        a, b, swapped = pair["A"], pair["B"], bool(pair["embedding"] or config.get("fan_in_fan_out"))
        made = (b.shape[0], a.shape[1]) if len(a.shape) == len(b.shape) == 2 else ()
        if (
            len(a.shape) != 2
            or len(b.shape) != 2
            or a.shape[0] != b.shape[1]
            or (made[::-1] if swapped else made) != tuple(tensors[name].shape)
        ):
            problems.append(
                f"{module}: B {tuple(b.shape)} @ A {tuple(a.shape)} is no weight of shape {tuple(tensors[name].shape)}"
            )
            continue
        rank = a.shape[0]
        if rank > min(tensors[name].shape):
            problems.append(f"{module}: rank {rank} is above that of a matrix of shape {tuple(tensors[name].shape)}")
            continue
        alpha = _patterned(config, "alpha_pattern", module, config.get("lora_alpha", rank))
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        out[name] = WithLora(name, (tensors[name], a, b), scale, swapped)
    problems.refuse(f"{where}: the adapter does not fit")
    return out, ckpt


def _patterned(config: Mapping[str, Any], key: str, module: str, default: float) -> float:
    """A number of a module: that of the first pattern which is the end of its name."""
    import re

    for pattern, value in (config.get(key) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


# ----- extraction -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoraReport:
    """Report of an extraction: the ranks of the modules, the part of the energy of each difference that is kept, and what has no place in it."""

    path: str
    ranks: dict[str, int]
    energy: dict[str, float]
    left: list[str] = field(default_factory=list)  # arrays that differ and are no matrices
    seconds: float = 0.0


def extract_lora(
    tuned: str | os.PathLike[str] | Checkpoint,
    base: str | os.PathLike[str] | Checkpoint,
    dst: str | os.PathLike[str],
    *,
    rank: int | None = None,
    energy: float | None = None,
    keys: Iterable[str] | None = None,
    drop: Iterable[str] | None = None,
    dtype: Any = "float32",
) -> LoraReport:
    """Write the LoRA adapter that comes nearest to the difference of two models, as a directory that PEFT loads.

    Each matrix of a layer is approximated by a singular value decomposition, the best one of its rank; a matrix is held in memory at a time.

    Parameters
    ----------
    tuned, base
        Two models of the same arrays: whatever `open_checkpoint` opens.
    dst
        The local directory to make, all or nothing: ``adapter_config.json`` and ``adapter_model.safetensors``.
    rank
        The rank of every module.
    energy
        Instead: the part of the sum of squares of each difference that its rank must keep, above 0 and at most 1.
    keys, drop
        Names or patterns of the arrays to take and to leave out.
    dtype
        Of the factors.

    Returns
    -------
    LoraReport
        ``left`` names the arrays that differ and that an adapter has no place for: vectors and embeddings.

    Raises
    ------
    CheckpointError
        The models do not fit each other, or a rank is above that of a matrix; nothing was written.
    """
    started = time.perf_counter()
    target = stores.location(dst)
    new, old = open_checkpoint(tuned), open_checkpoint(base)
    kind = dtypes.by_name(dtype)
    problems = Problems()
    if (rank is None) == (energy is None):
        raise CheckpointError("give rank= or energy=")
    if energy is not None and not 0 < energy <= 1:
        raise CheckpointError(f"energy is above 0 and at most 1, got {energy}")
    if stores.is_url(target):
        raise CheckpointError(f"{target}: an adapter is written to a local directory")
    if rank is not None and (type(rank) is not int or rank < 1):
        raise CheckpointError(f"rank is a positive whole number, got {rank!r}")
    wanted = [n for n in new if (keys is None or fits(n, keys)) and not (drop is not None and fits(n, drop))]
    for n in wanted:
        if n not in old:
            problems.append(f"the base has no key {n!r}")
        elif old[n].shape != new[n].shape:
            problems.append(f"shapes of {n!r} differ: {new[n].shape} and {old[n].shape}")
        elif rank is not None and _is_module(n, new[n]) and rank > min(new[n].shape):
            problems.append(f"rank {rank} is above that of {n!r} with shape {new[n].shape}")
    problems.refuse("no adapter")
    with directory_commit.replacing(target, overwrite=False, tables=CHECKPOINTS) as folder:
        factors, ranks, kept, left = {}, {}, {}, []
        for n in wanted:
            delta = _real(new[n]) - _real(old[n])
            if not delta.any():
                continue
            if not _is_module(n, new[n]):
                left.append(n)
                continue
            if not np.isfinite(delta).all():
                raise CheckpointError(f"{n!r} has values that are not finite, which have no decomposition")
            u, s, v = np.linalg.svd(delta, full_matrices=False)
            sums = np.cumsum(s.astype(np.float64) ** 2)
            r = rank or int(np.searchsorted(sums, energy * sums[-1] * (1 - 1e-12))) + 1
            module, root = n.removesuffix(".weight"), np.sqrt(s[:r])
            ranks[module], kept[module] = r, float(sums[r - 1] / sums[-1])
            factors[f"{_PREFIX}{module}.lora_A.weight"] = cast(n, root[:, None] * v[:r], kind, (0, 0))
            factors[f"{_PREFIX}{module}.lora_B.weight"] = cast(n, u[:, :r] * root, kind, (0, 0))
        if not factors:
            raise CheckpointError("the models have no matrix in which they differ; there is nothing to extract")
        common = rank or max(ranks.values())
        own = {m: r for m, r in ranks.items() if r != common}
        config = {
            "peft_type": "LORA",
            "base_model_name_or_path": old.path,
            "task_type": None,
            "r": common,
            "lora_alpha": common,
            "rank_pattern": own,
            "alpha_pattern": own,  # so that every scale is one
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "target_modules": list(ranks),
            "modules_to_save": None,
        }
        save_safetensors(os.path.join(folder.root, "adapter_model.safetensors"), factors, metadata={"format": "pt"})
        folder.put("adapter_config.json", (json.dumps(config, indent=2) + "\n").encode())
        folder.commit()
    return LoraReport(target, ranks, kept, left, time.perf_counter() - started)


def _is_module(name: str, array: Any) -> bool:
    """Whether an array is the matrix of a linear module."""
    embedding = is_embedding(name) and not name.endswith("lm_head.weight")
    return array.ndim == 2 and name.endswith(".weight") and not embedding and min(array.shape) > 0


def _real(array: Any) -> np.ndarray:
    held = read_box(array.tensor)[0]
    if held.dtype.name not in dtypes.FLOATS:
        return held.astype(np.float64)
    return held.astype(real(held.dtype), copy=False)
