"""Layers that the models share: initial weights, rotary positions, heads."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from ...arrays import random
from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.devices import Device, default_device
from ...arrays.core.dispatch import made, wrap
from ...arrays.core.errors import ArgumentError, ShapeError
from ...arrays.core.op import not_recording
from ...arrays.nn import nn
from ...arrays.nn.linear_cross_entropy import linear as linear
from ...arrays.ops.creation import asarray
from ...arrays.ops.manipulation import astype, permute_dims, reshape
from ..forecasting.specs import Spec
from ..mesh.mesh import Mesh
from .plans import Plan


def expected(shapes: Any, mesh: Mesh | None, plan: Plan, dtype: Any = np.float32) -> Any:
    """A tree of shapes as one that ``mt.load`` takes, with the shardings that the plan gives on the mesh."""

    def leaf(path: trees.Path, shape: tuple[int, ...]) -> Spec:
        return Spec(shape, np.dtype(dtype), None if mesh is None else plan.sharding(path, shape, mesh))

    return trees.map_with_path(leaf, shapes, is_leaf=lambda x: isinstance(x, tuple))


Recompute = Literal["none", "attention", "blocks"]
"""The parts whose activations the backward pass recomputes."""


def check_recompute(recompute: str) -> None:
    if recompute not in get_args(Recompute):
        raise ValueError(f"recompute must be one of {', '.join(get_args(Recompute))}, got {recompute!r}")


class Keys:
    """A key that gives a new one each time, in order."""

    def __init__(self, key: Array) -> None:
        self.key, self.count = key, 0

    def __call__(self) -> Array:
        self.count += 1
        return random.fold_in(self.key, self.count)


def dense(key: Array, inputs: int, outputs: int, std: float, dtype: Any) -> Array:
    """A normal weight of shape ``(inputs, outputs)``, for ``x @ w``."""
    return astype(random.normal(key, (inputs, outputs), dtype=np.float32) * std, dtype, copy=False)


def maybe_dropout(x: Array, rate: float, key: Callable[[], Array] | None) -> Array:
    """Dropout where a key is given (in training)."""
    return nn.dropout(x, rate, key=key()) if rate and key is not None else x


def split_heads(x: Array, heads: int, groups: int = 1) -> Array:
    """``(b, s, heads * groups * d) -> (b, heads, groups, s, d)``."""
    b, s, width = x.shape
    return permute_dims(reshape(x, (b, s, heads, groups, width // (heads * groups))), (0, 2, 3, 1, 4))


def join_heads(x: Array) -> Array:
    """Inverse of :func:`split_heads`."""
    b, heads, groups, s, d = x.shape
    return reshape(permute_dims(x, (0, 3, 1, 2, 4)), (b, s, heads * groups * d))


@dataclass(frozen=True)
class RopeScaling:
    """How rotary angles are slowed down, for sequences longer than those of the first training.

    Parameters
    ----------
    factor
        By how much.
    low, high, original
        Without them all angles are (``"linear"``; Chen et al., 2023). With them as in Llama 3.1: angles that turn less
        than ``low`` times in ``original`` tokens are slowed down, those that turn more than ``high`` times are not,
        with a smooth transition between.
    """

    factor: float
    low: float | None = None
    high: float | None = None
    original: float | None = None

    __is_tree__ = False

    def __post_init__(self) -> None:
        if not self.factor >= 1:
            raise ValueError(f"factor must be at least 1, got {self.factor}")
        if self.low is not None and not (self.high is not None and self.original and 0 < self.low < self.high):
            raise ValueError(f"low and high must be positive, low the smaller one, with original, got {self}")

    def __call__(self, speeds: np.ndarray) -> np.ndarray:
        """Angles of a token from those without scaling."""
        if self.low is None or self.high is None or self.original is None:
            return speeds / self.factor
        turns = self.original * speeds / (2 * math.pi)
        share = np.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0)
        return speeds * (share + (1.0 - share) / self.factor)


def beside(x: Any) -> Device | None:
    """The device of an array, for others that meet it; None for one on a mesh, whose workers have default devices."""
    where = getattr(x, "device", None)
    return where if isinstance(where, Device) else None


def placed(given: Any, x: Any) -> Array:
    """An argument as an array: what is none yet goes to the device of ``x``."""
    return given if isinstance(given, Array) else asarray(given, device=beside(x))


def rotary_tables(
    positions: np.ndarray, d: int, theta: float, scaling: RopeScaling | None = None, device: Device | None = None
) -> tuple[Array, Array]:
    """Cosines and sines of shape ``(s, d/2)`` for :func:`~meshtape.nn.rotary_embedding`, in float32."""
    if d % 2:
        raise ShapeError(f"rotary positions need heads of even length, got {d}")
    cosines, sines = _rotary_tables(tuple(positions.tolist()), d, theta, scaling, device or default_device())
    # What is traced has made them: they are constants, and nobody writes to them.
    return made(wrap(cosines._buf)), made(wrap(sines._buf))


@functools.lru_cache(maxsize=8)
def _rotary_tables(
    positions: tuple[int, ...], d: int, theta: float, scaling: RopeScaling | None, device: Device
) -> tuple[Array, Array]:
    """The tables, kept, so that a GPU is not sent them at every forward pass."""
    speeds = theta ** (-np.arange(0, d, 2) / d)
    angles = np.outer(np.asarray(positions, np.float64), speeds if scaling is None else scaling(speeds))
    cosines, sines = np.cos(angles), np.sin(angles)
    with not_recording():  # the caller tells of them, at the first call as at every later one
        return asarray(cosines.astype(np.float32), device=device), asarray(sines.astype(np.float32), device=device)


def part_of(name: str, batch: Any, part: str) -> Any:
    """What a batch has under a name that a model needs."""
    try:
        return batch[part]
    except (KeyError, IndexError, TypeError):
        held = f"one with {sorted(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
        raise ArgumentError(f"[{name}] a batch is a dict with {part!r}, got {held:.200}") from None


def check_ids(name: str, ids: Any, length: int, table: Any) -> Array:
    """Token numbers ``(b, s)`` that fit the model, for the rows of a table."""
    ids = placed(ids, table)
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise ShapeError(f"[{name}] ids must be integers of shape (batch, sequence), got {ids.dtype.name}{ids.shape}")
    if ids.shape[1] > length:
        raise ShapeError(f"[{name}] a sequence of {ids.shape[1]} is longer than the model's max_length {length}")
    return ids


def residual_std(layers: int) -> float:
    """Deviation of weights that write into the residual stream: their sum over layers keeps its size (Radford et al.,
    2019)."""
    return 0.02 / math.sqrt(2 * layers)
