"""Attention."""

from __future__ import annotations

import math
from typing import Any

from ..core.array import Array
from ..core.dtypes import result_type
from ..core.errors import DTypeError, ShapeError
from ..core.op import composite
from ..ops.creation import asarray
from ..ops.elementwise import logical_and
from ..ops.manipulation import astype, matrix_transpose, repeat
from ..ops.matmul import matmul
from ..ops.triangles import lower_triangle
from .dropout import dropout
from .norms.layer_norm import _wide
from .softmax import softmax


@composite("scaled_dot_product_attention")
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    /,
    *,
    mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
) -> Array:
    """Mean of the values, weighted by ``softmax(query @ key.T * scale)`` (Vaswani et al., 2017).

    Parameters
    ----------
    query, key, value
        Shapes ``(..., q, d)``, ``(..., k, d)`` and ``(..., k, e)``; leading dimensions broadcast. With fewer heads (dimension
        -3) in ``key`` and ``value`` than in ``query``, each serves as many neighbouring heads of the query (grouped queries).
    mask
        Broadcasts to ``(..., q, k)``. Boolean: true where a query may look. Floating: added to the scores. A query that may
        look nowhere gets zeros.
    is_causal
        Query ``i`` looks at keys ``0 … i`` only.
    scale
        ``1 / sqrt(d)`` by default.
    dropout_rate, dropout_key
        Weights dropped, as by :func:`dropout`.

    Returns
    -------
    Array
        Shape ``(..., q, e)``. Scores and weights of float16 and bfloat16 are kept in float32.

    Examples
    --------
    >>> q = k = v = mt.eye(2)
    >>> mt.nn.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)[0]
    Array([1., 0.], dtype=float64)
    """
    q, k, v = asarray(query), asarray(key), asarray(value)
    name = "[scaled_dot_product_attention]"
    if min(q.ndim, k.ndim, v.ndim) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ShapeError(f"{name} query {q.shape}, key {k.shape} and value {v.shape} do not fit together")
    if any(x.dtype.kind in "biuc" for x in (q, k, v)):
        raise DTypeError(f"{name} query, key and value must be real floating")
    if q.ndim > 2 and k.ndim > 2 and v.ndim > 2 and k.shape[-3] == v.shape[-3] not in (1, q.shape[-3]):
        if q.shape[-3] % k.shape[-3]:
            raise ShapeError(f"{name} {q.shape[-3]} heads of the query for {k.shape[-3]} of key and value")
        k, v = (repeat(x, q.shape[-3] // k.shape[-3], axis=-3) for x in (k, v))
    dtype = result_type(q.dtype, k.dtype, v.dtype)
    q, k, v = (astype(x, _wide(x.dtype), copy=False) for x in (q, k, v))
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = matmul(q * scale, matrix_transpose(k))
    allowed = None
    if mask is not None:
        mask = asarray(mask)
        if mask.dtype.kind == "b":
            allowed = mask
        else:
            scores = scores + astype(mask, scores.dtype, copy=False)
            allowed = mask != -math.inf
    if is_causal:
        seen = lower_triangle(scores)
        allowed = seen if allowed is None else logical_and(allowed, seen)
    weights = softmax(scores, where=allowed)
    if dropout_rate:
        weights = dropout(weights, dropout_rate, key=dropout_key)
    return astype(matmul(weights, v), dtype, copy=False)
