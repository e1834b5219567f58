"""NumPy's names that the array-API standard lacks.

They are other spellings of the standard's functions, or compositions of this package's ops, so that they differentiate,
compile and shard like those. Functions that write into an argument (``numpy.put``, ``place``, ``copyto``,
``fill_diagonal``) are missing: arrays are values, written by ``x[i] = v`` and ``x.at[i].set(v)``.
"""

from __future__ import annotations

from .aliases import (
    absolute,
    amax,
    amin,
    arccos,
    arccosh,
    arcsin,
    arcsinh,
    arctan,
    arctan2,
    arctanh,
    around,
    bitwise_not,
    concatenate,
    conjugate,
    fix,
    invert,
    left_shift,
    mod,
    power,
    right_shift,
    true_divide,
)
from .closeness import allclose, array_equal, array_equiv, isclose
from .creation import array, copy, fromfunction, geomspace, identity, logspace, tri, vander
from .index_tricks import (
    argwhere,
    diag_indices,
    diag_indices_from,
    flatnonzero,
    indices,
    ix_,
    ravel_multi_index,
    tril_indices,
    tril_indices_from,
    triu_indices,
    triu_indices_from,
    unravel_index,
)
from .joining import (
    append,
    array_split,
    block,
    column_stack,
    delete,
    dsplit,
    dstack,
    hsplit,
    hstack,
    insert,
    split,
    vsplit,
    vstack,
)
from .ordering import argpartition, intersect1d, lexsort, partition, setdiff1d, setxor1d, union1d, unique
from .polynomials import polyadd, polyder, polyfit, polyint, polymul, polysub, polyval, roots
from .products import cross, dot, inner, matvec, outer, vdot, vecmat
from .rearranging import (
    atleast_1d,
    atleast_2d,
    atleast_3d,
    diagflat,
    diagonal,
    fliplr,
    flipud,
    ravel,
    resize,
    rollaxis,
    rot90,
    swapaxes,
    trace,
    transpose,
)
from .selecting import apply_along_axis, apply_over_axes, choose, compress, extract, piecewise, put_along_axis, select
from .signals import bartlett, blackman, correlate, ediff1d, hamming, hanning, kaiser, trapezoid
from .statistics import (
    average,
    corrcoef,
    cov,
    cumprod,
    cumsum,
    digitize,
    divmod,
    histogram2d,
    histogram_bin_edges,
    nanargmax,
    nanargmin,
    nancumprod,
    nancumsum,
    nanmedian,
    nanpercentile,
    nanquantile,
    ndim,
    ptp,
    shape,
    size,
)
from .ufuncs import (
    angle,
    deg2rad,
    degrees,
    fabs,
    float_power,
    iscomplex,
    iscomplexobj,
    isneginf,
    isposinf,
    isreal,
    isrealobj,
    modf,
    nan_to_num,
    rad2deg,
    radians,
    round,
    sinc,
    unwrap,
)

__all__ = [n for n in dir() if not n.startswith("_") and callable(globals()[n])]
