"""LoRA (Hu et al., 2022): small adapters beside frozen weights, as a tree of parameters of their own.

A weight ``W`` of shape ``(inputs, outputs)`` is used as ``W + scale * A @ B`` with ``A`` of shape ``(inputs, rank)``,
random, and ``B`` of shape ``(rank, outputs)``, zero at first. Stacked weights (experts) have stacked adapters.

>>> import meshtape as mt
>>> lora = mt.training.lora
>>> config = lora.Config(rank=2, targets=("*attn.[qv]",))
>>> params = mt.models.decoder.init(mt.random.key(0), mt.models.decoder.Config(vocab=16, width=8, layers=1, heads=2))
>>> adapters = lora.init(mt.random.key(1), params, config)
>>> sorted(adapters)
['layers.0.attn.q', 'layers.0.attn.v']
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....arrays.core import tree as trees
from ....arrays.core.array import Array
from ....arrays.core.errors import TrainingError
from ....arrays.ops.creation import asarray, zeros
from ....arrays.ops.manipulation import astype
from ....arrays.random import fold_in, normal


@dataclass(frozen=True)
class Config:
    """The adapted weights, and the rank and scale of adapters.

    Parameters
    ----------
    rank
        Inner dimension of the adapters.
    alpha
        The scale is ``alpha / rank``; by default it is 1.
    targets
        Patterns of names of weights.
    stabilized
        The scale is ``alpha / sqrt(rank)`` (rsLoRA; Kalajdzievski, 2023).
    """

    rank: int = 8
    alpha: float | None = None
    targets: tuple[str, ...] = ("*attn.[qkvo]", "*attn.[qkvo].weight")
    stabilized: bool = False

    __is_tree__ = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise TrainingError(f"[lora] rank must be at least 1, got {self.rank}")

    @property
    def scale(self) -> float:
        """The factor of ``A @ B``."""
        alpha = self.rank if self.alpha is None else self.alpha
        return alpha / math.sqrt(self.rank) if self.stabilized else alpha / self.rank


def init(key: Array, params: Any, config: Config) -> dict[str, dict[str, Array]]:
    """Adapters for the weights that the patterns name: ``{name: {"a": …, "b": …}}``, in float32. At first they change
    nothing.

    Raises
    ------
    TrainingError
        Where a pattern matches nothing, or something that is no matrix.
    """
    leaves = {trees.path_name(p): x for p, x in trees.flatten_with_path(params)}
    unused = [t for t in config.targets if not fnmatch.filter(leaves, t)]
    chosen = [n for n in leaves if any(fnmatch.fnmatchcase(n, t) for t in config.targets)]
    if not chosen or (unused and config.targets != Config.targets):
        raise TrainingError(
            f"[lora] no weight is called {', '.join(unused)}; there are {', '.join(list(leaves)[:8])}, …"
        )
    out = {}
    for i, name in enumerate(chosen):
        shape = leaves[name].shape
        if len(shape) < 2:
            raise TrainingError(f"[lora] {name} of shape {shape} is no matrix")
        *stack, inputs, outputs = shape
        a = normal(fold_in(key, i), (*stack, inputs, config.rank), dtype=np.float32) * inputs**-0.5
        out[name] = {"a": a, "b": zeros((*stack, config.rank, outputs), dtype=np.float32)}
    return out


def apply(params: Any, adapters: Mapping[str, Any], config: Config) -> Any:
    """The parameters with the adapters in them; differentiable in both. Sums with 16-bit weights are made in float32.

    After training this is the merged model: ``mt.save(path, apply(params, adapters, config))``.

    Raises
    ------
    TrainingError
        For an adapter that fits no weight, or of which one half is missing; nothing is merged then.

    Examples
    --------
    >>> import meshtape as mt
    >>> lora = mt.training.lora
    >>> adapters = {"w": {"a": mt.asarray([[1.0], [0.0]]), "b": mt.asarray([[1.0, 2.0]])}}
    >>> lora.apply({"w": mt.eye(2)}, adapters, lora.Config(rank=1, alpha=2.0))["w"]
    Array([[3., 4.],
           [0., 1.]], dtype=float64)
    """
    leaves = {trees.path_name(p): x for p, x in trees.flatten_with_path(params)}
    wrong = []
    for name, half in adapters.items():
        missing = sorted({"a", "b"} - set(half))
        if missing:
            wrong.append(f"{name} lacks {' and '.join(missing)}")
        elif name not in leaves:
            wrong.append(f"{name} is no parameter")
        elif (*half["a"].shape[:-1], half["b"].shape[-1]) != tuple(leaves[name].shape) or (
            half["a"].shape[-1] != half["b"].shape[-2]
        ):
            wrong.append(f"{name} has shape {leaves[name].shape}, its adapter {half['a'].shape} @ {half['b'].shape}")
    if wrong:
        raise TrainingError(f"[lora] {'; '.join(wrong)}")

    def merged(path: trees.Path, w: Any) -> Any:
        half = adapters.get(trees.path_name(path))
        if half is None:
            return w
        w = asarray(w)
        change = (asarray(half["a"]) @ asarray(half["b"])) * config.scale
        wide = astype(w, np.float32) if w.dtype.itemsize <= 2 else w
        return astype(wide + astype(change, wide.dtype, copy=False), w.dtype, copy=False)

    return trees.map_with_path(merged, params)


def to_peft(adapters: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Adapters as Hugging Face's PEFT names and stores them, for ``mt.storage.save_safetensors``.

    ``names`` leads from our weights to their modules: ``{"layers.0.attn.q": "model.layers.0.self_attn.q_proj"}``. They
    store ``lora_A`` as ``(rank, inputs)`` and ``lora_B`` as ``(outputs, rank)``.
    """
    unknown = sorted(set(adapters) - set(names))
    if unknown:
        raise TrainingError(f"[lora] names has no module for {', '.join(unknown)}")
    out = {}
    for name, half in adapters.items():
        at = f"base_model.model.{names[name]}"
        out[f"{at}.lora_A.weight"] = np.ascontiguousarray(np.asarray(half["a"]).T)
        out[f"{at}.lora_B.weight"] = np.ascontiguousarray(np.asarray(half["b"]).T)
    return out


def from_peft(arrays: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, dict[str, Array]]:
    """Inverse of :func:`to_peft`. Raises :class:`TrainingError` for arrays that no name explains."""
    back = {
        f"base_model.model.{theirs}.lora_{half}.weight": (ours, half.lower())
        for ours, theirs in names.items()
        for half in "AB"
    }
    unknown = sorted(set(arrays) - set(back))
    if unknown:
        raise TrainingError(f"[lora] no name explains {', '.join(unknown)}")
    out: dict[str, dict[str, Array]] = {}
    for name, x in arrays.items():
        ours, half = back[name]
        out.setdefault(ours, {})[half] = asarray(np.asarray(x)).T
    return out
