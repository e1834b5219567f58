"""Mixture of experts: feed-forward networks on the rows that were sent to them, as an op and its backward op.

The rows of an expert are gathered, multiplied by its three matrices, and scattered back: no expert computes a row that
was not sent to it, and nothing is padded. The number of rows of an expert is known only when the op runs; the shapes of
operands and result do not depend on it. On a CPU hidden units exist for the rows of one expert at a time; on a GPU one
launch has all experts, without a wait for their numbers of rows, and hidden units of all rows at once
(:mod:`..kernels.grouped`). Nothing of their size is saved: the backward op computes them again.

``numbers`` are the numbers of the experts whose matrices are given, each once. A rank with some of the experts gives
their part of the sum, and zero for a row that went only to others, so that experts may be split over ranks like any
dimension. The decompositions, with all experts for all rows, serve derivatives of higher order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..backends import host_sync
from ..backends.row_blocks import wide
from ..core.array import Array
from ..core.dispatch import apply
from ..core.dtypes import iinfo
from ..core.errors import DTypeError, ShapeError
from ..core.op import Op, ShapeDtype, composite
from ..core.shape_rules import same
from ..kernels import grouped as kernels
from ..ops.creation import arange, asarray, beside
from ..ops.elementwise import sigmoid
from ..ops.manipulation import astype, expand_dims, matrix_transpose, moveaxis, reshape
from ..reductions.reductions import sum as sum_


class _ExpertShare(NamedTuple):
    """The work of one expert."""

    expert: int
    rows: Any  # places, each once
    pairs: Any  # places of choices among all
    of_pair: Any  # the place of each pair's row among these rows
    x: Any
    weight: Any  # (rows, 1)


def _shares(xp: Any, x: Any, chosen: Any, weights: Any, numbers: Any, dtype: np.dtype) -> Iterator[_ExpertShare]:
    if xp is not np:
        host_sync.note("the rows of experts are counted")
    k, chosen, weights = chosen.shape[-1], chosen.reshape(-1), weights.reshape(-1)
    order = chosen.argsort(kind="stable")
    chosen = chosen[order]
    starts, stops = (xp.searchsorted(chosen, numbers, side=side).tolist() for side in ("left", "right"))
    for i, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        if start == stop:
            continue
        pairs, of_pair = order[start:stop], slice(None)
        rows, weight = pairs // k, weights[pairs].astype(dtype, copy=False)
        if k > 1 and (rows[1:] == rows[:-1]).any():  # a row has chosen the expert twice
            rows, of_pair = xp.unique(rows, return_inverse=True)
            each, weight = weight, xp.bincount(of_pair, weight.real.astype(np.float64), len(rows))
            if dtype.kind == "c":
                weight = weight + 1j * xp.bincount(of_pair, each.imag.astype(np.float64), len(rows))
            weight = weight.astype(dtype, copy=False)
        yield _ExpertShare(i, rows, pairs, of_pair, x[rows].astype(dtype, copy=False), weight[:, None])


def _flat(x: Any, last: int) -> Any:
    return x.reshape(math.prod(x.shape[:-1]), last)


def _hidden(xp: Any, x: Any, gate: Any, up: Any) -> tuple[Any, Any, Any]:
    """``a``, ``sigmoid(a)`` and ``b`` of ``a * sigmoid(a) * b``."""
    a = x @ gate
    with np.errstate(over="ignore"):
        s = 1 / (1 + xp.exp(-a))
    return a, s, x @ up


def _experts(xp: Any, x: Any, chosen: Any, weights: Any, gate: Any, up: Any, down: Any, numbers: Any) -> Any:
    work, width = wide(x.dtype), x.shape[-1]
    out = xp.zeros((math.prod(x.shape[:-1]), width), work)
    for share in _shares(xp, _flat(x, width), chosen, weights, numbers, work):
        g, u, d = (w[share.expert].astype(work, copy=False) for w in (gate, up, down))
        a, s, b = _hidden(xp, share.x, g, u)
        a *= s
        a *= b
        out[share.rows] += (a @ d) * share.weight
    return out.reshape(x.shape).astype(x.dtype, copy=False)


def _experts_backward(
    xp: Any, g: Any, x: Any, chosen: Any, weights: Any, gate: Any, up: Any, down: Any, numbers: Any
) -> tuple[Any, ...]:
    work, width = wide(x.dtype), x.shape[-1]
    flat = _flat(g, width)
    dx, dweights = xp.zeros(flat.shape, work), xp.zeros(weights.size, work)
    dgate, dup, ddown = (xp.zeros(w.shape, work) for w in (gate, up, down))
    for share in _shares(xp, _flat(x, width), chosen, weights, numbers, work):
        i, rows = share.expert, share.rows
        wg, wu, wd = (w[i].astype(work, copy=False) for w in (gate, up, down))
        a, s, b = _hidden(xp, share.x, wg, wu)
        swish = a * s
        h = swish * b
        gy = flat[rows].astype(work, copy=False)
        gh = gy @ wd.T
        dweights[share.pairs] = (gh * h).sum(axis=1)[share.of_pair]
        ddown[i] = h.T @ (gy * share.weight)
        gh *= share.weight
        gb = gh * swish
        ga = gh * b * (s + swish * (1 - s))
        dgate[i], dup[i] = share.x.T @ ga, share.x.T @ gb
        dx[rows] += ga @ wg.T + gb @ wu.T
    return (
        dx.reshape(x.shape).astype(x.dtype, copy=False),
        dweights.reshape(weights.shape).astype(weights.dtype, copy=False),
        *(d.astype(w.dtype, copy=False) for d, w in ((dgate, gate), (dup, up), (ddown, down))),
    )


# ----- the same in plain functions: every expert for every row --------------------------------------------------------


def _dense(x: Array, chosen: Array, weights: Array, gate: Array, up: Array, numbers: Array) -> tuple[Any, ...]:
    """Rows ``(n, width)``, choices ``(n, k, experts)``, weight of each expert ``(experts, n, 1)``, and its ``a, s,
    b``."""
    width, k = x.shape[-1], chosen.shape[-1]
    n = math.prod(x.shape[:-1])
    work = wide(x.dtype)
    rows, ws = astype(reshape(x, (n, width)), work, copy=False), astype(reshape(weights, (n, k)), work, copy=False)
    sent = astype(expand_dims(reshape(chosen, (n, k)), axis=2) == numbers, work)
    weight = expand_dims(moveaxis(sum_(sent * expand_dims(ws, axis=2), axis=1), 1, 0), axis=2)
    a = rows @ astype(gate, work, copy=False)
    return rows, sent, weight, a, sigmoid(a), rows @ astype(up, work, copy=False)


def _decompose(x: Array, chosen: Array, weights: Array, gate: Array, up: Array, down: Array, numbers: Array) -> Array:
    _, _, weight, a, s, b = _dense(x, chosen, weights, gate, up, numbers)
    out = sum_(((a * s * b) @ astype(down, a.dtype, copy=False)) * weight, axis=0)
    return astype(reshape(out, x.shape), x.dtype, copy=False)


def _decompose_backward(
    g: Array, x: Array, chosen: Array, weights: Array, gate: Array, up: Array, down: Array, numbers: Array
) -> tuple[Array, ...]:
    rows, sent, weight, a, s, b = _dense(x, chosen, weights, gate, up, numbers)
    wg, wu, wd = (astype(w, a.dtype, copy=False) for w in (gate, up, down))
    gy = astype(reshape(g, rows.shape), a.dtype, copy=False)
    h = a * s * b
    gh = gy @ matrix_transpose(wd)  # (experts, n, hidden)
    dweights = sum_(sent * expand_dims(matrix_transpose(sum_(gh * h, axis=2)), axis=1), axis=2)
    gh = gh * weight
    gb = gh * a * s
    ga = gh * b * (s + a * s * (1 - s))
    turned = matrix_transpose(rows)
    dx = sum_(ga @ matrix_transpose(wg) + gb @ matrix_transpose(wu), axis=0)
    return (
        astype(reshape(dx, x.shape), x.dtype, copy=False),
        astype(reshape(dweights, weights.shape), weights.dtype, copy=False),
        astype(turned @ ga, gate.dtype, copy=False),
        astype(turned @ gb, up.dtype, copy=False),
        astype(matrix_transpose(h) @ (gy * weight), down.dtype, copy=False),
    )


OPERANDS = ("x", "chosen", "weights", "gate", "up", "down", "numbers")
EXPERTS = Op(
    "experts", OPERANDS, _experts, same, decompose=_decompose, overrides={"cupy": kernels.experts}, wide_sums=True
)
EXPERTS_BACKWARD = Op(
    "experts_backward",
    ("g", *OPERANDS),
    _experts_backward,
    lambda op, args, params: tuple(ShapeDtype(args[i].shape, args[i].dtype) for i in (1, 3, 4, 5, 6)),
    nout=5,
    decompose=_decompose_backward,
    overrides={"cupy": kernels.experts_backward},
)


@composite("experts")
def experts(x: Any, chosen: Any, weights: Any, /, gate: Any, up: Any, down: Any) -> Array:
    """Each row through the SwiGLU networks that it is sent to.

    The result is the weighted sum of ``(silu(x @ gate) * (x @ up)) @ down``.

    Parameters
    ----------
    x
        Rows, ``(..., width)``, real floating.
    chosen
        Numbers of the experts that a row goes to, integers ``(..., k)``. One that is no expert's number counts as none.
    weights
        Factors of their outputs, ``(..., k)``.
    gate, up
        Stacks of matrices ``(experts, width, hidden)``.
    down
        ``(experts, hidden, width)``.

    Returns
    -------
    Array
        Like ``x``. Sums of float16 and bfloat16 are made in float32; on a GPU hidden units are rounded to the dtype
        of ``x`` before they are multiplied.

    Raises
    ------
    ShapeError, DTypeError
        Where the operands do not fit together.

    Examples
    --------
    >>> x, w = mt.asarray([[1.0], [2.0]]), mt.asarray([1.0, 10.0]).reshape((2, 1, 1))
    >>> y = mt.nn.experts(x, mt.asarray([[0], [1]]), mt.ones((2, 1)), gate=w, up=w, down=w)
    >>> [round(float(v), 3) for v in y[:, 0]]
    [0.731, 4000.0]
    """
    x, chosen, weights, gate, up, down = map(asarray, (x, chosen, weights, gate, up, down))
    if any(a.dtype.kind in "biuc" for a in (x, weights, gate, up, down)) or chosen.dtype.kind not in "iu":
        raise DTypeError("[experts] x, weights and matrices must be real floating, and chosen integers")
    stack = gate.shape
    if x.ndim < 1 or len(stack) != 3 or up.shape != stack or down.shape != (stack[0], stack[2], stack[1]):
        raise ShapeError(
            f"[experts] gate {gate.shape}, up {up.shape} and down {down.shape} must be (e, w, f) twice and (e, f, w)"
        )
    if x.shape[-1] != stack[1] or chosen.shape != weights.shape or chosen.shape[:-1] != x.shape[:-1]:
        raise ShapeError(
            f"[experts] x {x.shape} must be (..., {stack[1]}), chosen {chosen.shape} and weights {weights.shape} (..., "
            "k) beside it"
        )
    counted = chosen.dtype if stack[0] <= iinfo(chosen.dtype).max else np.int64  # beyond it, nobody has chosen them
    numbers = arange(stack[0], dtype=counted, device=beside(x))
    return apply(EXPERTS, (x, chosen, weights, gate, up, down, numbers), {})
