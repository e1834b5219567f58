"""The ops of linear algebra: the routines of LAPACK (on a GPU, cuSOLVER), and checks of their arguments.

LAPACK has two floats and their complex counterparts. Integers are computed in float64, floats of one or two bytes in
float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..backends import host_sync
from ..backends.row_blocks import wide
from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import apply, as_array
from ..core.dtypes import real_of
from ..core.errors import DTypeError, LinAlgError, ShapeError
from ..core.op import Op, ShapeDtype
from ..ops.manipulation import astype
from ..ops.param_kinds import FLAG, NUMBER, one_of

# ----- shapes ---------------------------------------------------------------------------------------------------------


def _complex_of(dtype: np.dtype) -> np.dtype:
    return np.result_type(dtype, np.complex64)


def _square(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    return ShapeDtype(args[0].shape, args[0].dtype)


def _infer_solve(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    a, b = args
    batch = shape_rules.broadcast_shapes(op, [a.shape[:-2], b.shape[:-2]])
    return ShapeDtype((*batch, *b.shape[-2:]), np.result_type(a.dtype, b.dtype))


def _infer_det(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    return ShapeDtype(args[0].shape[:-2], args[0].dtype)


def _infer_slogdet(op: Op, args: tuple[Any, ...], params: Any) -> tuple[ShapeDtype, ...]:
    x = args[0]
    return ShapeDtype(x.shape[:-2], x.dtype), ShapeDtype(x.shape[:-2], real_of(x.dtype))


def _infer_eigh(op: Op, args: tuple[Any, ...], params: Any) -> tuple[ShapeDtype, ...]:
    x = args[0]
    return ShapeDtype(x.shape[:-1], real_of(x.dtype)), ShapeDtype(x.shape, x.dtype)


def _infer_eigvalsh(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    return ShapeDtype(args[0].shape[:-1], real_of(args[0].dtype))


def _infer_eig(op: Op, args: tuple[Any, ...], params: Any) -> tuple[ShapeDtype, ...]:
    x, dtype = args[0], _complex_of(args[0].dtype)
    return ShapeDtype(x.shape[:-1], dtype), ShapeDtype(x.shape, dtype)


def _infer_eigvals(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    return ShapeDtype(args[0].shape[:-1], _complex_of(args[0].dtype))


def _infer_svd(op: Op, args: tuple[Any, ...], params: Any) -> tuple[ShapeDtype, ...]:
    x = args[0]
    (*batch, m, n), k = x.shape, min(x.shape[-2:])
    left, right = (m, n) if params["full_matrices"] else (k, k)
    return (
        ShapeDtype((*batch, m, left), x.dtype),
        ShapeDtype((*batch, k), real_of(x.dtype)),
        ShapeDtype((*batch, right, n), x.dtype),
    )


def _infer_svdvals(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    x = args[0]
    return ShapeDtype((*x.shape[:-2], min(x.shape[-2:])), real_of(x.dtype))


def _infer_qr(op: Op, args: tuple[Any, ...], params: Any) -> tuple[ShapeDtype, ...]:
    x = args[0]
    *batch, m, n = x.shape
    k = m if params["mode"] == "complete" else min(m, n)
    return ShapeDtype((*batch, m, k), x.dtype), ShapeDtype((*batch, k, n), x.dtype)


def _infer_pinv(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    x = args[0]
    return ShapeDtype((*x.shape[:-2], x.shape[-1], x.shape[-2]), x.dtype)


# ----- ops ------------------------------------------------------------------------------------------------------------


_FAILURES = {
    "inv": "Singular matrix",
    "solve": "Singular matrix",
    "cholesky": "Matrix is not positive definite",
}


def _called(xp: Any, name: str, *args: Any, **params: Any) -> Any:
    """A function of ``xp.linalg``. CuPy's give numbers without meaning where cuSOLVER fails, unless they are told to
    look."""
    fn = getattr(xp.linalg, name)
    if xp.__name__ != "cupy" or name in ("det", "slogdet"):  # a singular matrix has a determinant
        return fn(*args, **params)
    import cupyx

    host_sync.note(f"the success of {name} is checked")
    with cupyx.errstate(linalg="raise"):
        try:
            return fn(*args, **params)
        except np.linalg.LinAlgError as e:
            text = _FAILURES.get(name, f"cuSOLVER found no result: {e}")
            raise LinAlgError(f"[{name}] {text} (of shape {', '.join(str(a.shape) for a in args)})") from None


def _plain(name: str) -> Callable[..., Any]:
    def impl(xp: Any, *args: Any, **params: Any) -> Any:
        return _called(xp, name, *args, **params)

    return impl


def _solve(xp: Any, a: Any, b: Any) -> Any:
    if xp is not np:  # CuPy's takes stacks of one shape alone
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a, b = xp.broadcast_to(a, (*batch, *a.shape[-2:])), xp.broadcast_to(b, (*batch, *b.shape[-2:]))
        if not a.size or not b.size:
            return xp.zeros(b.shape, np.result_type(a.dtype, b.dtype))
    return _called(xp, "solve", a, b)


def _eig(xp: Any, x: Any) -> Any:
    w, v = _called(xp, "eig", x)
    dtype = _complex_of(x.dtype)  # NumPy answers in real numbers where all of them happen to be
    return w.astype(dtype, copy=False), v.astype(dtype, copy=False)


def _eigvals(xp: Any, x: Any) -> Any:
    return _called(xp, "eigvals", x).astype(_complex_of(x.dtype), copy=False)


def _svdvals(xp: Any, x: Any) -> Any:
    return _called(xp, "svd", x, compute_uv=False)


def _adjugate(xp: Any, x: Any) -> Any:
    """``det(x) inv(x)``, which exists for singular matrices too: from the products of all other singular values."""
    u, s, vh = _called(xp, "svd", x.astype(wide(x.dtype), copy=False))
    n = x.shape[-1]
    others = (
        xp.stack([xp.prod(xp.concatenate([s[..., :i], s[..., i + 1 :]], axis=-1), axis=-1) for i in range(n)], axis=-1)
        if n
        else s
    )
    phase = xp.linalg.det(u) * xp.linalg.det(vh)
    vo = xp.conj(xp.swapaxes(vh, -1, -2)) * others[..., None, :]
    return (phase[..., None, None] * (vo @ xp.conj(xp.swapaxes(u, -1, -2)))).astype(x.dtype, copy=False)


def _pinv(xp: Any, x: Any, rtol: float) -> Any:
    u, s, vh = _called(xp, "svd", x, full_matrices=False)
    largest = s[..., :1] if s.shape[-1] else s
    kept = s > rtol * largest
    inverse = xp.where(kept, 1 / xp.where(kept, s, 1), 0).astype(s.dtype, copy=False)
    return xp.matmul(xp.conj(xp.swapaxes(vh, -1, -2)) * inverse[..., None, :], xp.conj(xp.swapaxes(u, -1, -2)))


CHOLESKY = Op("cholesky", ("x",), _plain("cholesky"), _square)
INV = Op("inv", ("x",), _plain("inv"), _square)
SOLVE = Op("solve", ("a", "b"), _solve, _infer_solve)
DET = Op("det", ("x",), _plain("det"), _infer_det)
ADJUGATE = Op("adjugate", ("x",), _adjugate, _square)
SLOGDET = Op("slogdet", ("x",), _plain("slogdet"), _infer_slogdet, nout=2)
EIGH = Op("eigh", ("x",), _plain("eigh"), _infer_eigh, nout=2)
EIGVALSH = Op("eigvalsh", ("x",), _plain("eigvalsh"), _infer_eigvalsh)
EIG = Op("eig", ("x",), _eig, _infer_eig, nout=2)
EIGVALS = Op("eigvals", ("x",), _eigvals, _infer_eigvals, decompose=lambda x: apply(EIG, (x,))[0])
SVD = Op("svd", ("x",), _plain("svd"), _infer_svd, nout=3, params={"full_matrices": FLAG})
SVDVALS = Op("svdvals", ("x",), _svdvals, _infer_svdvals)
QR = Op("qr", ("x",), _plain("qr"), _infer_qr, nout=2, params={"mode": one_of("reduced", "complete")})
PINV = Op("pinv", ("x",), _pinv, _infer_pinv, params={"rtol": NUMBER})

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
