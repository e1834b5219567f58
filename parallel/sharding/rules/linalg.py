"""Factor mappings of linear algebra, Fourier transforms, sorting and running sums: they work along whole dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ....arrays.core.op import Op, ShapeDtype
from ....arrays.linalg import lapack as la
from ....arrays.ops import fft
from ....arrays.reductions import cumulative, searching, sorting
from ..factors import Dim, FactorRule, Letters, rule

Avals = Sequence[Any]
Params = Mapping[str, Any]

# ----- matrices -------------------------------------------------------------------------------------------------------


@rule(
    *(la.CHOLESKY, la.INV, la.DET, la.ADJUGATE, la.SLOGDET, la.EIGH, la.EIGVALSH, la.EIG, la.EIGVALS),
    *(la.SVD, la.SVDVALS, la.QR, la.PINV),
)
def _matrices(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    batch = letters.many(avals[0].shape[:-2])
    operand = (*batch, *letters.many(avals[0].shape[-2:], whole=True))
    results = [(*batch, *letters.many(a.shape[len(batch) :], whole=True)) for a in out_avals]
    return letters.rule([operand], results)


@rule(la.SOLVE)
def _solve(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    a, b = avals[0].shape, avals[1].shape
    shape = out_avals[0].shape
    batch = letters.many(shape[:-2])
    rows = letters.new(a[-2], whole=True)
    cols = letters.new(b[-1])  # each right-hand side is solved on its own

    def lead(own: Sequence[int]) -> list[Dim | None]:
        at = len(batch) - len(own)
        return [batch[at + i] if n == shape[at + i] else None for i, n in enumerate(own)]

    first = [*lead(a[:-2]), rows, letters.new(a[-1], whole=True)]
    return letters.rule([first, [*lead(b[:-2]), rows, cols]], [[*batch, rows, cols]])


# ----- along axes -----------------------------------------------------------------------------------------------------


def _along(avals: Avals, out_avals: Sequence[ShapeDtype], axes: Sequence[int], linear: bool) -> FactorRule:
    letters = Letters()
    dims = [letters.new(n, whole=i in axes) for i, n in enumerate(avals[0].shape)]
    out = [letters.new(n, whole=True) if i in axes else dims[i] for i, n in enumerate(out_avals[0].shape)]
    return letters.rule([dims], [out], [(0,)] if linear else [])


@rule(fft.FFT)
def _fft(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    return _along(avals, out_avals, params["axes"], linear=True)


@rule(fft.RFFT, fft.IRFFT, cumulative.CUMULATIVE_SUM)
def _linear_along(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    return _along(avals, out_avals, (params["axis"],), linear=True)


@rule(cumulative.CUMULATIVE_PROD, sorting.SORT, sorting.ARGSORT)
def _one_axis(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    # A product by doubling would multiply in another order: that has other bits, and NaN where complex numbers are infinite.
    found = _along(avals, out_avals, (params["axis"],), linear=False)
    return replace(found, choice=f"as {op.name} needs dimension {params['axis']} whole")


@rule(searching.SEARCHSORTED)
def _searchsorted(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    table = letters.many(avals[0].shape, whole=True)
    values = letters.many(out_avals[0].shape)
    return letters.rule([table, values if isinstance(avals[1], ShapeDtype) else ()], [values])
