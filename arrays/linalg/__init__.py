"""Linear algebra (``mt.linalg``): the extension of the array-API standard.

Matrices are the last two dimensions; leading ones are batches. Integers are computed in float64, floats of one or two
bytes in float32 and rounded once. Where a decomposition is not unique (signs and phases of vectors, bases of the space
of a repeated value), gradients are those of functions that do not depend on the choice.

Imports core, backends, indexing, ops and reductions. Begin with decompositions.py.
"""

from __future__ import annotations

from ..ops.manipulation import matrix_transpose
from ..ops.matmul import cross, matmul, outer, tensordot, vecdot
from .decompositions import *
from .least_squares import cond, lstsq, multi_dot, norm, tensorinv, tensorsolve
from .matrix_norms import matrix_norm, vector_norm

__all__ = [n for n in dir() if n[0].islower() and callable(globals()[n])]
__dir__ = __all__.copy
