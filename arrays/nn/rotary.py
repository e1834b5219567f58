"""Rotary positions: pairs of elements turned by angles, an op of its own, one pass through memory and one launch on a
GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..backends.row_blocks import wide
from ..core.array import Array
from ..core.dispatch import apply, at_once
from ..core.dtypes import is_low_precision
from ..core.errors import ShapeError
from ..core.op import Op, ShapeDtype, composite
from ..kernels import rotary
from ..native import ops
from ..native.calls import first
from ..ops.creation import asarray, inexact, ordered
from ..ops.manipulation import astype, concat
from ..ops.param_kinds import FLAG


def _rotary_embedding(x: Array, cosines: Array, sines: Array, *, inverse: bool) -> Array:
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    sines = -sines if inverse else sines
    turned = concat([a * cosines - b * sines, b * cosines + a * sines], axis=-1)
    return astype(turned, x.dtype, copy=False)


_composed = at_once("rotary_embedding", _rotary_embedding)


def _impl(xp: Any, x: Any, *tables: Any, inverse: bool) -> Any:
    if not is_low_precision(x.dtype):
        return _composed(xp, x, *tables, inverse=inverse)
    given = (t.astype(np.float32, copy=False) for t in (x, *tables))
    return ROTARY_EMBEDDING.bind(xp)(*given, inverse=inverse).astype(x.dtype)


def _checked(x: Any, cosines: Any, sines: Any) -> None:
    """Raise :class:`ShapeError` where the tables do not fit ``x``."""
    shape, table = tuple(x.shape), tuple(cosines.shape)
    if shape[-1:] == () or shape[-1] % 2:
        raise ShapeError(
            f"[rotary_embedding] the last dimension of x is turned in pairs: its length is even, got {shape}"
        )
    half = (*shape[:-1], shape[-1] // 2)
    apart = any(n not in (1, m) for n, m in zip(table[-2::-1], half[-2::-1], strict=False))
    if table != tuple(sines.shape) or table[-1:] != half[-1:] or len(table) > len(half) or apart:
        raise ShapeError(
            f"[rotary_embedding] cosines and sines have one shape, which broadcasts to {half} and ends with "
            f"{half[-1]}; got {table} and {tuple(sines.shape)}"
        )


def _infer(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> ShapeDtype:
    _checked(*args)
    return ShapeDtype(args[0].shape, args[0].dtype)


ROTARY_EMBEDDING = Op(
    "rotary_embedding",
    ("x", "cosines", "sines"),
    _impl,
    _infer,
    decompose=_rotary_embedding,
    overrides={"numpy": first(ops.rotary_embedding, _impl), "cupy": rotary.rotary_embedding},
    params={"inverse": FLAG},
    wide_sums=True,
    flops=3,
)
"""With ``inverse`` by the negative angle."""


@composite("rotary_embedding")
def rotary_embedding(x: Any, cosines: Any, sines: Any, /) -> Array:
    """Pairs of elements of ``x`` turned by the angles of their position (Su et al., 2021).

    Element ``i`` of the first half is paired with element ``i`` of the second, as in Hugging Face's Llama::

        out[..., i]        = x[..., i] * cosines[..., i] - x[..., i + d/2] * sines[..., i]
        out[..., i + d/2]  = x[..., i + d/2] * cosines[..., i] + x[..., i] * sines[..., i]

    Parameters
    ----------
    x
        Queries or keys ``(..., s, d)``, real. ``d`` is even.
    cosines, sines
        Of the angles in radians, one a pair: ``(s, d/2)``, or any one shape that broadcasts to ``(..., s, d/2)`` and
        ends with ``d/2`` (``(batch, 1, s, d/2)`` where each sequence has positions of its own).

    Returns
    -------
    Array
        Shape and dtype of ``x``. Short floats are turned in float32, and rounded once.

    Raises
    ------
    ShapeError
        ``d`` is odd, or the tables have other shapes.
    DTypeError
        ``x`` or a table is complex.

    >>> angles = mt.asarray([[0.0], [mt.pi / 2]])
    >>> mt.round(mt.nn.rotary_embedding(mt.asarray([[1.0, 2.0], [1.0, 2.0]]), mt.cos(angles), mt.sin(angles)), 6)
    Array([[ 1.,  2.],
           [-2.,  1.]], dtype=float64)
    """
    x = inexact(ordered("rotary_embedding", x))
    tables = [ordered("rotary_embedding", asarray(t)) for t in (cosines, sines)]
    if tables[0].dtype != tables[1].dtype or tables[0].dtype not in (x.dtype, wide(x.dtype)):
        tables = [astype(t, wide(x.dtype), copy=False) for t in tables]
    _checked(x, *tables)
    return apply(ROTARY_EMBEDDING, (x, *tables), {"inverse": False})
