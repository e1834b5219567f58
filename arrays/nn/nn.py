"""Functions that models need and the array-API standard lacks (``mt.nn``)."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from ..core.array import Array
from ..core.dtypes import as_dtype, iinfo
from ..core.errors import ArgumentError, DTypeError
from ..core.op import composite
from ..linalg.float8 import float8_matmul, float8_scale
from ..ops.creation import arange, asarray, beside
from ..ops.elementwise import relu, sigmoid, stop_gradient
from ..ops.elementwise import where as where_
from ..ops.manipulation import astype, expand_dims
from .activations import *
from .attention import scaled_dot_product_attention
from .convolution import conv1d, conv2d, conv_transpose, pool
from .dropout import dropout, dropout_add
from .losses import cross_entropy, info_nce, linear_cross_entropy
from .mixture_of_experts import experts
from .norms.batch_norm import batch_norm
from .norms.group_norm import group_norm, instance_norm
from .norms.layer_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from .regression_losses import binary_cross_entropy, cosine_similarity, huber_loss, l1_loss, mse_loss
from .rotary import rotary_embedding
from .softmax import log_softmax, logsumexp, softmax


@composite("one_hot")
def one_hot(labels: Any, num_classes: int, /, *, dtype: Any = np.float32) -> Array:
    """1 at the label and 0 elsewhere along a new last dimension; labels outside ``0 … num_classes-1`` give zeros only.

    >>> mt.nn.one_hot(mt.asarray([1, -1]), 3, dtype=mt.int8)
    Array([[0, 1, 0],
           [0, 0, 0]], dtype=int8)
    """
    labels = asarray(labels)
    if labels.dtype.kind not in "iu":
        raise DTypeError(f"[one_hot] labels must be integers, got {labels.dtype.name}")
    try:
        num_classes = operator.index(num_classes)
    except TypeError:
        raise ArgumentError(f"[one_hot] the number of classes is an integer, got {num_classes!r}") from None
    if num_classes < 0:
        raise ArgumentError(f"[one_hot] the number of classes must not be negative, got {num_classes}")
    # In the dtype of the labels where it can count that far; classes beyond it have no label.
    wide = labels.dtype if num_classes <= iinfo(labels.dtype).max else np.int64
    classes = arange(num_classes, dtype=wide, device=beside(labels))
    return astype(expand_dims(labels, axis=labels.ndim) == classes, as_dtype(dtype, "one_hot"))


# ----- looking up -----------------------------------------------------------------------------------------------------


@composite("embedding")
def embedding(ids: Any, table: Any, /, *, padding_idx: int | None = None) -> Array:
    """The rows of ``table`` at ``ids``: shape ``(*ids.shape, *table.shape[1:])``. Row ``padding_idx`` gets no gradient.

    >>> mt.nn.embedding(mt.asarray([1, 1]), mt.asarray([[1.0, 2.0], [3.0, 4.0]]))
    Array([[3., 4.],
           [3., 4.]], dtype=float64)
    """
    ids, table = asarray(ids), asarray(table)
    if ids.dtype.kind not in "iu":
        raise DTypeError(f"[embedding] ids must be integers, got {ids.dtype.name}")
    rows = table[ids]
    if padding_idx is None:
        return rows
    n = table.shape[0]
    if not -n <= padding_idx < n:
        raise ArgumentError(f"[embedding] padding_idx {padding_idx} is no row of a table of {n}")
    padding = (ids == padding_idx % n) | (ids == padding_idx % n - n)
    return where_(expand_dims(padding, axis=tuple(range(ids.ndim, rows.ndim))), stop_gradient(rows), rows)


_OWN = [n for n, f in globals().items() if getattr(f, "__module__", "").startswith(__package__)]
__all__ = ["float8_matmul", "float8_scale", "relu", "sigmoid", *_OWN]
__dir__ = __all__.copy
