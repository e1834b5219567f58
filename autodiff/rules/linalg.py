"""Derivatives of linear algebra; legend in ``registry``.

``A^H`` is the conjugate transpose. The formulas are those of Giles (2008) and Seeger et al. (2017), for complex numbers
those that PyTorch uses. Eigenvectors and singular vectors of a repeated value have no derivative; the terms that would
divide by the difference of two equal values are left out, which is right for every function that does not depend on the
choice of basis.
"""

from __future__ import annotations

from ...arrays.core.errors import GradientError
from ...arrays.linalg import lapack as la
from .registry import call, conj, defvjp, defvjp_all


def _h(xp, a):
    return xp.matrix_transpose(conj(xp, a))


def _diag(xp, v):
    """Matrices with ``v`` on the diagonal."""
    return xp.expand_dims(v, axis=-1) * xp.eye(v.shape[-1], dtype=v.dtype)


def _over_differences(xp, a, d):
    """``a / d`` with zeros where ``d`` is zero."""
    return xp.where(d == 0, 0.0, a / xp.where(d == 0, 1.0, d))


def _hermitian(xp, a):
    return 0.5 * (a + _h(xp, a))


# ----- solving --------------------------------------------------------------------------------------------------------


def _cholesky(xp, g, ans):
    # A = L L^H: gA is the Hermitian part of L^-H phi(L^H g) L^-1, phi the lower triangle with half the diagonal.
    p = xp.tril(xp.matmul(_h(xp, ans), g))
    p = p - 0.5 * p * xp.eye(p.shape[-1], dtype=p.dtype)
    left = call(xp, la.SOLVE, _h(xp, ans), p)
    return _hermitian(xp, _h(xp, call(xp, la.SOLVE, _h(xp, ans), _h(xp, left))))


def _pinv(xp, g, x, ans):
    p, ph, gh = ans, _h(xp, ans), _h(xp, g)
    rows = gh - xp.matmul(x, xp.matmul(p, gh))
    cols = gh - xp.matmul(gh, xp.matmul(p, x))
    return -xp.matmul(ph, xp.matmul(g, ph)) + xp.matmul(rows, xp.matmul(p, ph)) + xp.matmul(xp.matmul(ph, p), cols)


defvjp(la.CHOLESKY, x=_cholesky)
defvjp(la.INV, x=lambda xp, g, ans: -xp.matmul(_h(xp, ans), xp.matmul(g, _h(xp, ans))))
defvjp(
    la.SOLVE,
    a=lambda xp, g, a, ans: -xp.matmul(call(xp, la.SOLVE, _h(xp, a), g), _h(xp, ans)),
    b=lambda xp, g, a: call(xp, la.SOLVE, _h(xp, a), g),
)
defvjp(la.PINV, x=_pinv)

# ----- determinants ---------------------------------------------------------------------------------------------------


def _adjugate(xp, g, x):
    # As det(x) inv(x): of singular matrices the second derivative is not offered.
    ph = _h(xp, call(xp, la.INV, x))
    d = conj(xp, call(xp, la.DET, x))[..., None, None]
    along = xp.sum(xp.matrix_transpose(ph) * g, axis=(-2, -1), keepdims=True)
    return d * (along * ph - xp.matmul(ph, xp.matmul(g, ph)))


def _slogdet(xp, g, x, ans):
    g_sign, k = g
    if x.dtype.kind == "c":  # the sign of real numbers is a step
        k = k - 1j * xp.imag(conj(xp, g_sign) * ans[0])
    return [k[..., None, None] * _h(xp, call(xp, la.INV, x))]


# The adjugate exists for singular matrices, where the determinant has a slope too.
defvjp(la.DET, x=lambda xp, g, x: g[..., None, None] * _h(xp, call(xp, la.ADJUGATE, x)))
defvjp(la.ADJUGATE, x=_adjugate)
defvjp_all(la.SLOGDET, _slogdet)

# ----- eigenvalues ----------------------------------------------------------------------------------------------------


def _eigh(xp, g, ans):
    (gw, gv), (w, v) = g, ans
    inner = _over_differences(xp, xp.matmul(_h(xp, v), gv), w[..., None, :] - w[..., :, None]) + _diag(xp, gw)
    return [_hermitian(xp, xp.matmul(v, xp.matmul(inner, _h(xp, v))))]


def _eigvalsh(xp, g, x):
    _, v = call(xp, la.EIGH, x)
    return xp.matmul(v * g[..., None, :], _h(xp, v))


def _eig(xp, g, ans):
    (gw, gv), (w, v) = g, ans
    vh = _h(xp, v)
    vg = xp.matmul(vh, gv)
    # Vectors of length one cannot grow: what points along them is taken out.
    along = xp.real(vg * xp.eye(vg.shape[-1], dtype=w.dtype))
    vg = vg - xp.matmul(xp.matmul(vh, v), xp.astype(along, vg.dtype))
    inner = _over_differences(xp, vg, conj(xp, w[..., None, :] - w[..., :, None])) + _diag(xp, gw)
    return [call(xp, la.SOLVE, vh, xp.matmul(inner, vh))]


defvjp_all(la.EIGH, _eigh)
defvjp(la.EIGVALSH, x=_eigvalsh)
defvjp_all(la.EIG, _eig)

# ----- factors --------------------------------------------------------------------------------------------------------


def _svd(xp, g, ans, full_matrices):
    if full_matrices:
        raise GradientError(
            "[svd] the square factors of a matrix that is not square have no derivative: call svd(x, "
            "full_matrices=False)"
        )
    (gu, gs, gvh), (u, s, vh) = g, ans
    uh, v = _h(xp, u), _h(xp, vh)
    ug, vg = xp.matmul(uh, gu), xp.matmul(gvh, v)
    ug, vg = ug - _h(xp, ug), _h(xp, vg) - vg
    squares = s * s
    d = squares[..., None, :] - squares[..., :, None]
    eye = xp.eye(s.shape[-1], dtype=s.dtype)
    inner = _over_differences(xp, ug, d) * s[..., None, :] + s[..., :, None] * _over_differences(xp, vg, d)
    inner = inner + _diag(xp, gs)
    if u.dtype.kind == "c":  # the phase that each pair of vectors shares
        inner = inner + _over_differences(xp, ug * eye, 2.0 * s[..., None, :])
    out = xp.matmul(xp.matmul(u, inner), vh)
    m, n, k = u.shape[-2], vh.shape[-1], s.shape[-1]
    if m > k:
        out = out + xp.matmul(_over_differences(xp, gu - xp.matmul(u, xp.matmul(uh, gu)), s[..., None, :]), vh)
    if n > k:
        out = out + xp.matmul(u, _over_differences(xp, gvh - xp.matmul(xp.matmul(gvh, v), vh), s[..., :, None]))
    return [out]


def _svdvals(xp, g, x):
    u, _, vh = call(xp, la.SVD, x, full_matrices=False)
    return xp.matmul(u * g[..., None, :], vh)


def _qr_tall(xp, gq, gr, q, r):
    w = xp.triu(xp.matmul(gr, _h(xp, r)) - xp.matmul(_h(xp, q), gq))
    eye = xp.eye(w.shape[-1], dtype=w.dtype)
    w = w + _h(xp, w) - xp.real(w) * eye
    if w.dtype.kind == "c":  # w + w^H has twice the real part on its diagonal, and no imaginary part
        w = xp.astype(w, q.dtype)
    right = gq + xp.matmul(q, w)
    return _h(xp, call(xp, la.SOLVE, r, _h(xp, right)))


def _qr(xp, g, x, ans, mode):
    if mode == "complete":
        raise GradientError("[qr] the extra columns of mode='complete' have no derivative: use mode='reduced'")
    (gq, gr), (q, r) = g, ans
    m, n = x.shape[-2:]
    if m >= n:
        return [_qr_tall(xp, gq, gr, q, r)]
    # A wide matrix [X Y] = Q [U V]: V = Q^H Y is a function of Q, which X alone determines.
    gv = gr[..., m:]
    gx = _qr_tall(xp, gq + xp.matmul(x[..., m:], _h(xp, gv)), gr[..., :m], q, r[..., :m])
    return [xp.concat([gx, xp.matmul(q, gv)], axis=-1)]


defvjp_all(la.SVD, _svd)
defvjp(la.SVDVALS, x=_svdvals)
defvjp_all(la.QR, _qr)
