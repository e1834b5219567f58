"""Arrays: the ``Array`` type, its ops, dtypes and devices; an array-API namespace with additions.

Ops, the tape's entries and programs live here, at the one dispatch point that writes them, so that every package that
reads them imports downwards. An op call goes one of three ways, by the kind of its buffers: it is computed at once
(NumPy, CuPy), noted in a program (traced by ``mt.compile``), or noted in the pending program of a mesh (sharded
arrays).
"""

from __future__ import annotations

import numpy as _np

from . import linalg, random
from .backends.backend import devices, use_device
from .backends.cublaslt import is_tf32, use_tf32
from .backends.determinism import is_deterministic, use_deterministic
from .backends.host_sync import host_waits, index_checks
from .core import errors, tree
from .core.array import Array
from .core.array import attach as _attach
from .core.devices import Device, default_device, device
from .core.dtype_objects import *
from .core.dtypes import can_cast, finfo, iinfo, isdtype, result_type
from .core.op import OPS, Op, ShapeDtype
from .core.program import Const, Entry, Program
from .core.tree import tree_map
from .interface import numpy_keywords, numpy_protocol
from .interface.info import __array_namespace_info__
from .interface.methods import Methods as _Methods
from .interface.protocols import Protocols as _Protocols
from .interface.values import Values as _Values
from .nn import nn
from .nn.norms.batch_norm import batch_norm
from .nn.norms.group_norm import group_norm, instance_norm
from .nn.norms.layer_norm import layer_norm, rms_norm
from .numpy_compat import *
from .ops import fft
from .ops.creation import (
    arange,
    asarray,
    empty,
    empty_like,
    eye,
    from_dlpack,
    full,
    full_like,
    linspace,
    meshgrid,
    ones,
    ones_like,
    zeros,
    zeros_like,
)
from .ops.elementwise import *
from .ops.manipulation import *
from .ops.matmul import matmul, tensordot, vecdot
from .ops.triangles import tril, triu
from .prefetch import Prefetcher, prefetch
from .reductions.cumulative import cumulative_prod, cumulative_sum, diff
from .reductions.einsum import einsum
from .reductions.moments import mean, std, var
from .reductions.reductions import all, any, argmax, argmin, max, min, prod, sum
from .reductions.searching import count_nonzero, nonzero, searchsorted, take, take_along_axis
from .reductions.sorting import argsort, sort, topk
from .statistics.interpolation import convolve, diag, gradient, interp, kron
from .statistics.padding import pad
from .statistics.quantiles import median, percentile, quantile
from .statistics.sets import isin, unique_all, unique_counts, unique_inverse, unique_values
from .statistics.statistics import bincount, histogram, nanmax, nanmean, nanmin, nanprod, nanstd, nansum, nanvar

# The class of core gets its interface.
for _part in (_Methods, _Protocols, _Values):
    _attach(_part)
numpy_keywords.add_keywords()

lib = _np.lib  # whose sliding_window_view xarray looks for in the namespace of an array; it hands its call over
e = _np.e
pi = _np.pi
inf = _np.inf
nan = _np.nan
newaxis = None

__array_api_version__ = "2025.12"

# Of the modules only those that are namespaces for users; the others are where things are written.
_NAMESPACES = ("errors", "fft", "linalg", "nn", "random", "tree")
__all__ = sorted(
    n
    for n, value in list(globals().items())
    if not n.startswith("_") and n != "annotations" and (not isinstance(value, type(_np)) or n in _NAMESPACES)
)
__dir__ = __all__.copy
