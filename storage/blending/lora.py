"""LoRA adapters as PEFT writes them, extracted from two models (Hu et al., arXiv:2106.09685)."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...arrays.core.errors import CheckpointError, CheckpointExists
from ..base.names import chooser
from ..checkpoint.checkpoint import Checkpoint
from ..commit import directory_commit
from ..commit.contents import CHECKPOINTS
from ..format import dtypes
from ..loading.open import open_checkpoint
from ..readers.safetensors import save_safetensors
from ..readers.tensor import read_box
from ..rules.casting import cast
from ..stores import atomic_directory
from ..stores import store as stores
from ..transform.model_config import TABLES, config_of
from ..virtual.adapters import ADAPTER, TURNED_MODULES, is_turned_model
from ..virtual.expressions import refuse_scaled
from .config import Problems
from .methods import real

_PREFIX = "base_model.model."
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
"""PEFT's task types by the ends of the names of architectures."""
_SEQUENCES = re.compile(r"t5|bart|pegasus|m2m_100|led$|blenderbot|switch_transformers|prophetnet|plbart|mvp$|nllb")
"""Models with an encoder and a decoder of text; others have inputs that PEFT's task SEQ_2_SEQ_LM does not pass on."""
_RENAMED = re.compile(
    r"(axk2|bailing_hybrid|deepseek_v4|dory|gte|hrm_text|hy_v3|jina_embeddings_v3|kimi_linear|laguna|lara_mini|nemotron_h"
    r"|nomic_bert|ultrabert)$"
)
"""Models of text whose modules transformers 5 calls otherwise than their files do; so it does most of several parts."""
_PARTS = ("text_config", "vision_config", "audio_config")
_NOT_ADAPTED = {"mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"}
"""Types of models whose ``out_proj`` PEFT refuses."""
_LOOKED_UP = re.compile(r"(embeddings?|embed_positions|wpe|relative_attention_bias)\.weight$")
"""Names of tables of positions and kinds of tokens, whose rows are looked up."""
# ----- extraction -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoraReport:
    """Report of an extraction: the ranks of the modules, the part of the energy of each difference that is kept, and
    what has no place in it."""

    path: str
    ranks: dict[str, int]
    energy: dict[str, float]
    left: list[str] = field(default_factory=list)  # arrays that differ and are no matrices of modules that PEFT adapts
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)  # of what PEFT may not load


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
    fan_in_fan_out: bool | None = None,
) -> LoraReport:
    """Write the LoRA adapter that comes nearest to the difference of two models, as a directory that PEFT loads.

    Each matrix of a layer is approximated by a singular value decomposition, the best one of its rank; a matrix is held
    in memory at a time.

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
    fan_in_fan_out
        Whether matrices are stored as (in, out); None: where the ``config.json`` of the base names a model of
        transformers that does so (GPT-2 and its kin).

    Returns
    -------
    LoraReport
        ``left`` names the arrays that differ and that an adapter has no place for: vectors and embeddings, and
        ``out_proj`` of Mamba and its kin, which PEFT refuses. ``notes`` say where PEFT may look for modules by other
        names.

    Raises
    ------
    CheckpointError
        The models do not fit each other, or a rank is above that of a matrix that differs; nothing was written.
    """
    started = time.perf_counter()
    target = stores.location(dst)
    new, old = open_checkpoint(tuned), open_checkpoint(base)
    kind = dtypes.by_name(dtype)
    problems = Problems()
    if (rank is None) == (energy is None):
        raise CheckpointError("give rank= or energy=")
    if energy is not None and not (isinstance(energy, int | float | np.number) and 0 < energy <= 1):
        raise CheckpointError(f"energy is a number above 0 and at most 1, got {energy!r:.80}")
    if stores.is_url(target):
        raise CheckpointError(f"{target}: an adapter is written to a local directory")
    if os.path.lexists(target):
        raise CheckpointExists(f"{target} exists; an adapter is written to a new directory")
    if rank is not None and (type(rank) is not int or rank < 1):
        raise CheckpointError(f"rank is a positive whole number, got {rank!r}")
    for ckpt in (new, old):
        if len(ckpt) and all(map(ADAPTER.match, ckpt)):
            raise CheckpointError(f"{ckpt.path} is an adapter: take models, such as virtual.lora(base, adapter)")
    wanted = list(filter(chooser(keys, drop, new), new))
    for n in wanted:
        if n not in old:
            problems.append(f"the base has no key {n!r}")
        elif old[n].shape != new[n].shape:
            problems.append(f"shapes of {n!r} differ: {new[n].shape} and {old[n].shape}")
    problems.refuse("no adapter")
    for ckpt in (new, old):
        refuse_scaled(ckpt, set(wanted))
    said = config_of(old.documents)
    turned = is_turned_model(said) if fan_in_fan_out is None else fan_in_fan_out
    type_, kinds = str(said.get("model_type")), [str(a) for a in said.get("architectures") or ()]
    tasks = [task for a in kinds for end, task in _TASKS.items() if a.endswith(end)]
    if _SEQUENCES.search(type_) and any(a.endswith("ForConditionalGeneration") for a in kinds):
        tasks.append("SEQ_2_SEQ_LM")
    notes = []
    plain = "vocab_size" in said and said.keys().isdisjoint(_PARTS) and not _RENAMED.match(type_)
    if "model_type" in said and not plain:
        notes.append(
            f"modules have the names of the files; transformers 5 gives those of {type_!r} others, by which PEFT may "
            "find none of them: virtual.lora and lora-merge apply the adapter"
        )
    with (
        atomic_directory.room_for(0, target),
        directory_commit.replacing(target, overwrite=False, tables=CHECKPOINTS) as folder,
    ):
        factors, ranks, kept, left = {}, {}, {}, []
        for n in wanted:
            delta = _real(new[n]) - _real(old[n])
            if not delta.any():
                continue
            if not _is_module(n, new[n]) or (type_ in _NOT_ADAPTED and n.endswith(".out_proj.weight")):
                left.append(n)
                continue
            if rank is not None and rank > min(delta.shape):
                least = min(min(new[m].shape) for m in wanted if _is_module(m, new[m]))
                told = f"rank {rank} is above that of {n!r} with shape {delta.shape}"
                raise CheckpointError(f"{told}; give rank={least} or energy=, or leave it out with drop=")
            if not np.isfinite(delta).all():
                raise CheckpointError(f"{n!r} has values that are not finite, which have no decomposition")
            module = n.removesuffix(".weight")
            across = turned and (fan_in_fan_out or module.rpartition(".")[2] in TURNED_MODULES)
            u, s, v = np.linalg.svd(delta.T if across else delta, full_matrices=False)
            sums = np.cumsum(s.astype(np.float64) ** 2)
            r = rank or int(np.searchsorted(sums, energy * sums[-1] * (1 - 1e-12))) + 1
            root = np.sqrt(s[:r])
            ranks[module], kept[module] = r, float(sums[r - 1] / sums[-1])
            factors[f"{_PREFIX}{module}.lora_A.weight"] = cast(n, root[:, None] * v[:r], kind, (0, 0))
            factors[f"{_PREFIX}{module}.lora_B.weight"] = cast(n, u[:, :r] * root, kind, (0, 0))
        if not factors:
            raise CheckpointError("the models have no matrix in which they differ; there is nothing to extract")
        common = rank or max(ranks.values())
        own = {m: r for m, r in ranks.items() if r != common}
        config = {
            "peft_type": "LORA",
            "base_model_name_or_path": old.path if isinstance(base, Checkpoint) else os.fspath(base),
            "task_type": tasks[0] if tasks else None,
            "r": common,
            "lora_alpha": common,
            "rank_pattern": own,
            "alpha_pattern": own,  # so that every scale is one
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": turned,
            "inference_mode": True,
            "target_modules": list(ranks),
            "modules_to_save": None,
        }
        save_safetensors(os.path.join(folder.root, "adapter_model.safetensors"), factors, metadata={"format": "pt"})
        folder.put("adapter_config.json", (json.dumps(config, indent=2) + "\n").encode())
        folder.commit()
    return LoraReport(target, ranks, kept, left, time.perf_counter() - started, notes)


def _is_module(name: str, array: Any) -> bool:
    """Whether an array is the matrix of a linear module."""
    matrix = array.ndim == 2 and name.endswith(".weight") and min(array.shape) > 0
    return matrix and not name.endswith(TABLES) and not _LOOKED_UP.search(name)


def _real(array: Any) -> np.ndarray:
    held = read_box(array.tensor)[0]
    if held.dtype.name not in dtypes.FLOATS:
        return held.astype(np.float64)
    return held.astype(real(held.dtype), copy=False)
