"""Linear algebra (``mt.linalg``): the extension of the array-API standard.

Matrices are the last two dimensions; leading ones are batches. Integers are computed in float64, floats of one or two
bytes in float32 and rounded once. Where a decomposition is not unique (signs and phases of vectors, bases of the space
of a repeated value), gradients are those of functions that do not depend on the choice.
"""

from __future__ import annotations

from ..ops.manipulation import matrix_transpose
from ..ops.matmul import cross, matmul, outer, tensordot, vecdot
from .decompositions import EighResult as EighResult
from .decompositions import EigResult as EigResult
from .decompositions import QRResult as QRResult
from .decompositions import SlogdetResult as SlogdetResult
from .decompositions import SVDResult as SVDResult
from .decompositions import (
    cholesky,
    det,
    diagonal,
    eig,
    eigh,
    eigvals,
    eigvalsh,
    inv,
    matrix_power,
    matrix_rank,
    pinv,
    qr,
    slogdet,
    solve,
    svd,
    svdvals,
    trace,
)
from .least_squares import cond, lstsq, multi_dot, norm, tensorinv, tensorsolve
from .matrix_norms import matrix_norm, vector_norm

__all__ = [
    "cholesky",
    "cond",
    "cross",
    "det",
    "diagonal",
    "eig",
    "eigh",
    "eigvals",
    "eigvalsh",
    "inv",
    "lstsq",
    "matmul",
    "matrix_norm",
    "matrix_power",
    "matrix_rank",
    "matrix_transpose",
    "multi_dot",
    "norm",
    "outer",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "svd",
    "svdvals",
    "tensordot",
    "tensorinv",
    "tensorsolve",
    "trace",
    "vecdot",
    "vector_norm",
]
