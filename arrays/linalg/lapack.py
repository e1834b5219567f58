"""The ops of linear algebra: the routines of LAPACK (on a GPU, cuSOLVER), and checks of their arguments.

LAPACK has two floats and their complex counterparts. Integers are computed in float64, floats of one or two bytes in
float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..backends import host_sync
from ..backends.row_blocks import wide
from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import apply, as_array
from ..core.dtypes import complex_of, real_of
from ..core.errors import DTypeError, LinAlgError, ShapeError
from ..core.op import Op, ShapeDtype
from ..ops.manipulation import astype
from ..ops.param_kinds import FLAG, NUMBER, one_of

# ----- shapes ---------------------------------------------------------------------------------------------------------


def _shapes(*results: str) -> Callable[..., Any]:
    """The shape rule of an op on matrices of ``m`` rows and ``n`` columns.

    A result is told by the lengths behind its leading dimensions: ``k`` is the smaller of both; ``l`` and ``r`` are
    ``m`` and ``n`` where full factors are asked for, else ``k``. Its dtype is that of the matrix, or the ``real`` or
    ``complex`` one of the same precision.
    """

    def infer(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> Any:
        x = args[0]
        *batch, m, n = x.shape
        k = min(m, n)
        left, right = (m, n) if params.get("full_matrices") or params.get("mode") == "complete" else (k, k)
        lengths = {"m": m, "n": n, "k": k, "l": left, "r": right}
        dtypes = {"": x.dtype, "real": real_of(x.dtype), "complex": complex_of(x.dtype)}
        told = (r.partition(" ") for r in results)
        found = [ShapeDtype((*batch, *(lengths[c] for c in letters)), dtypes[kind]) for letters, _, kind in told]
        return found[0] if len(found) == 1 else tuple(found)

    return infer


def _infer_solve(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    a, b = args
    batch = shape_rules.broadcast_shapes(op, [a.shape[:-2], b.shape[:-2]])
    return ShapeDtype((*batch, *b.shape[-2:]), np.result_type(a.dtype, b.dtype))


# ----- ops ------------------------------------------------------------------------------------------------------------


_CHECKED: dict[Any, int] = {"inv": 2, "qr": 2, ("solve", 2): 2, "det": 0, "slogdet": 0}
"""How many functions of cuSOLVER CuPy asks for their status, where that is not one (of solve: for one matrix)."""
_FAILURES = {"inv": "Singular matrix", "solve": "Singular matrix", "cholesky": "Matrix is not positive definite"}


def _called(xp: Any, name: str, *args: Any, **params: Any) -> Any:
    """A function of ``xp.linalg``. CuPy's give numbers without meaning where cuSOLVER fails, unless they are told to
    look."""
    fn = getattr(xp.linalg, name)
    checks = _CHECKED.get((name, args[0].ndim), _CHECKED.get(name, 1))
    for _ in range(checks if all(a.size for a in args) else 0):
        host_sync.note(f"the success of {name} is checked")
    if xp.__name__ != "cupy" or name in ("det", "slogdet"):  # a singular matrix has a determinant
        return fn(*args, **params)
    import cupyx

    with cupyx.errstate(linalg="raise"):
        try:
            return fn(*args, **params)
        except np.linalg.LinAlgError as e:
            text = _FAILURES.get(name, f"cuSOLVER found no result: {e}")
            raise LinAlgError(f"[{name}] {text} (of shape {', '.join(str(a.shape) for a in args)})") from None


def _plain(name: str) -> Callable[..., Any]:
    return lambda xp, *args, **params: _called(xp, name, *args, **params)


def _solve(xp: Any, a: Any, b: Any) -> Any:
    if xp is not np:  # CuPy's takes stacks of one shape alone
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a, b = xp.broadcast_to(a, (*batch, *a.shape[-2:])), xp.broadcast_to(b, (*batch, *b.shape[-2:]))
        if not a.size or not b.size:
            return xp.zeros(b.shape, np.result_type(a.dtype, b.dtype))
    return _called(xp, "solve", a, b)


def _eig(xp: Any, x: Any) -> Any:
    w, v = _called(xp, "eig", x)
    dtype = complex_of(x.dtype)  # NumPy answers in real numbers where all of them happen to be
    return w.astype(dtype, copy=False), v.astype(dtype, copy=False)


def _eigvals(xp: Any, x: Any) -> Any:
    return _called(xp, "eigvals", x).astype(complex_of(x.dtype), copy=False)


def _adjugate(xp: Any, x: Any) -> Any:
    """``det(x) inv(x)``, which exists for singular matrices too: from the products of all other singular values."""
    # LAPACK has no SVD of what is not finite.
    if xp is np and not (finite := np.isfinite(x).all(axis=(-2, -1), keepdims=True)).all():
        return np.where(finite, _adjugate(xp, np.where(finite, x, 0)), np.nan).astype(x.dtype, copy=False)
    u, s, vh = _called(xp, "svd", x.astype(wide(x.dtype), copy=False))
    others = [xp.concatenate([s[..., :i], s[..., i + 1 :]], axis=-1) for i in range(x.shape[-1])]
    others = xp.stack([xp.prod(o, axis=-1) for o in others], axis=-1) if others else s
    phase = xp.linalg.det(u) * xp.linalg.det(vh)
    vo = xp.conj(xp.swapaxes(vh, -1, -2)) * others[..., None, :]
    return (phase[..., None, None] * (vo @ xp.conj(xp.swapaxes(u, -1, -2)))).astype(x.dtype, copy=False)


def _pinv(xp: Any, x: Any, rtol: float) -> Any:
    u, s, vh = _called(xp, "svd", x, full_matrices=False)
    largest = s[..., :1] if s.shape[-1] else s
    kept = s > rtol * largest
    inverse = xp.where(kept, 1 / xp.where(kept, s, 1), 0).astype(s.dtype, copy=False)
    return xp.matmul(xp.conj(xp.swapaxes(vh, -1, -2)) * inverse[..., None, :], xp.conj(xp.swapaxes(u, -1, -2)))


CHOLESKY = Op("cholesky", ("x",), _plain("cholesky"), shape_rules.same)
INV = Op("inv", ("x",), _plain("inv"), shape_rules.same)
SOLVE = Op("solve", ("a", "b"), _solve, _infer_solve)
DET = Op("det", ("x",), _plain("det"), _shapes(""))
ADJUGATE = Op("adjugate", ("x",), _adjugate, shape_rules.same)
SLOGDET = Op("slogdet", ("x",), _plain("slogdet"), _shapes("", " real"), nout=2)
EIGH = Op("eigh", ("x",), _plain("eigh"), _shapes("m real", "mn"), nout=2)
EIGVALSH = Op("eigvalsh", ("x",), _plain("eigvalsh"), _shapes("m real"))
EIG = Op("eig", ("x",), _eig, _shapes("m complex", "mn complex"), nout=2)
EIGVALS = Op("eigvals", ("x",), _eigvals, _shapes("m complex"), decompose=lambda x: apply(EIG, (x,))[0])
SVD = Op("svd", ("x",), _plain("svd"), _shapes("ml", "k real", "rn"), nout=3, params={"full_matrices": FLAG})
SVDVALS = Op("svdvals", ("x",), lambda xp, x: _called(xp, "svd", x, compute_uv=False), _shapes("k real"))
QR = Op("qr", ("x",), _plain("qr"), _shapes("ml", "ln"), nout=2, params={"mode": one_of("reduced", "complete")})
PINV = Op("pinv", ("x",), _pinv, _shapes("nm"), params={"rtol": NUMBER})

# ----- arguments ------------------------------------------------------------------------------------------------------


def matrices(name: str, x: Any, *, square: bool = False) -> tuple[Array, np.dtype | None]:
    """``x`` in a dtype that LAPACK has, and the dtype to round results to (None: they are right)."""
    x = as_array(x)
    if x.ndim < 2:
        raise ShapeError(f"[{name}] needs matrices (at least two dimensions), got shape {x.shape}")
    if square and x.shape[-1] != x.shape[-2]:
        raise ShapeError(f"[{name}] needs square matrices, got shape {x.shape}")
    if x.dtype.kind == "b":
        raise DTypeError(f"[{name}] takes numbers, got booleans")
    if x.dtype.kind in "iu":
        return astype(x, np.float64), None
    if x.dtype.itemsize <= 2:
        return astype(x, np.float32), x.dtype
    return x, None


def back(x: Array, dtype: np.dtype | None) -> Array:
    if dtype is None:
        return x
    return astype(x, dtype) if x.dtype.kind != "c" else x


def one(op: Op, x: Any, *, square: bool = True, **params: Any) -> Array:
    x, dtype = matrices(op.name, x, square=square)
    return back(apply(op, (x,), params), dtype)


def several(op: Op, x: Any, *, square: bool = True, **params: Any) -> tuple[Array, ...]:
    x, dtype = matrices(op.name, x, square=square)
    return tuple(back(y, dtype) for y in apply(op, (x,), params))
