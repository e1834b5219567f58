"""Factor mappings of linear algebra, Fourier transforms, sorting and running sums: they work along whole dimensions."""

from __future__ import annotations

from ....arrays.core.op import Op, ShapeDtype
from ....arrays.linalg import lapack as la
from ....arrays.ops import fft
from ....arrays.reductions import cumulative, searching, sorting
from ..factors import Avals, FactorRule, Letters, Outs, Params, rule

# ----- matrices -------------------------------------------------------------------------------------------------------


@rule(
    *(la.CHOLESKY, la.INV, la.DET, la.ADJUGATE, la.SLOGDET, la.EIGH, la.EIGVALSH, la.EIG, la.EIGVALS),
    *(la.SVD, la.SVDVALS, la.QR, la.PINV),
)
def _matrices(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    batch = letters.many(avals[0].shape[:-2])
    operand = (*batch, *letters.many(avals[0].shape[-2:], whole=True))
    results = [(*batch, *letters.many(a.shape[len(batch) :], whole=True)) for a in outs]
    return letters.rule([operand], results)


@rule(la.SOLVE)
def _solve(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    a, b = avals[0].shape, avals[1].shape
    batch = letters.many(outs[0].shape[:-2])
    rows = letters.new(a[-2], whole=True)
    cols = letters.new(b[-1])  # each right-hand side is solved on its own
    first = [*letters.aligned(batch, a[:-2]), rows, letters.new(a[-1], whole=True)]
    return letters.rule([first, [*letters.aligned(batch, b[:-2]), rows, cols]], [[*batch, rows, cols]])


# ----- along axes -----------------------------------------------------------------------------------------------------


_ORDERED = (cumulative.CUMULATIVE_PROD, sorting.SORT, sorting.ARGSORT, sorting.TOPK)
"""Kept whole by choice: a product by doubling would multiply in another order, which has other bits, and NaN where
complex numbers are infinite."""


@rule(fft.FFT, fft.RFFT, fft.IRFFT, cumulative.CUMULATIVE_SUM, *_ORDERED)
def _along(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    axes = params["axes"] if op is fft.FFT else (params["axis"],)
    dims = [letters.new(n, whole=i in axes) for i, n in enumerate(avals[0].shape)]
    out = [letters.new(n, whole=True) if i in axes else dims[i] for i, n in enumerate(outs[0].shape)]
    if op in _ORDERED:
        return letters.rule([dims], [out], choice=f"as {op.name} needs dimension {axes[0]} whole")
    return letters.rule([dims], [out], [(0,)])


@rule(searching.SEARCHSORTED)
def _searchsorted(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    table = letters.many(avals[0].shape, whole=True)
    values = letters.many(outs[0].shape)
    return letters.rule([table, values if isinstance(avals[1], ShapeDtype) else ()], [values])
