"""Functions of large arrays piece by piece, so that intermediate results never exist in full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core import shape_rules
from ..core.dispatch import wrap
from ..core.op import state

LARGE = 1 << 20
"""Elements from which an array is reduced in pieces. Smaller ones take the plain way, which has fewer calls."""

PIECE = 1 << 18
"""Elements of a piece: a few temporaries of it fit the cache."""


def buffer(x: Any) -> Any:
    """The memory of an Array for direct computation: NumPy's, and with no recorder; else None."""
    buf = getattr(x, "_buf", None)
    return buf if type(buf) is np.ndarray and not state.recorders else None


def buffers(*xs: Any) -> Any:
    """The memory of several, as :func:`buffer` gives it; None where one has none."""
    found = [buffer(x) for x in xs]
    return None if any(b is None for b in found) else found


def large(x: Any, wide: np.dtype | None = None) -> Any:
    """The memory of an Array to reduce in pieces: NumPy's, large, and with no recorder; else None.

    None too where a cast to ``wide`` would drop an imaginary part, which the function `astype` refuses.
    """
    buf = buffer(x)
    if buf is None or buf.size < LARGE or (wide is not None and buf.dtype.kind == "c" and wide.kind != "c"):
        return None
    return buf


def mapped(fn: Callable[[Any], Any], x: Any) -> Any:
    """``fn(x)`` of a function of Arrays that looks at each element alone."""
    buf = large(x)
    if buf is None:
        return fn(x)
    # In smaller pieces: such functions have many temporaries.
    return wrap(_over(lambda b: fn(wrap(b))._buf, np.add, (), [buf], PIECE // 4))


def reduced(
    piece: Callable[..., np.ndarray], combine: np.ufunc, axes: tuple[int, ...], keepdims: bool, *operands: np.ndarray
) -> np.ndarray:
    """A reduction of the first operand over ``axes``.

    ``piece`` computes it of parts of the operands, with the reduced dimensions kept, and ``combine`` joins two of its
    results. The other operands have the same number of dimensions, and are cut along those that are not of length one.
    """
    out = _over(piece, combine, axes, operands, PIECE)
    return out if keepdims else out.reshape(shape_rules.reduced_shape(operands[0].shape, axes, False))


def _over(
    piece: Callable[..., np.ndarray],
    combine: np.ufunc,
    axes: tuple[int, ...],
    operands: Sequence[np.ndarray],
    size: int,
) -> np.ndarray:
    x = operands[0]
    if x.size <= size:
        return piece(*operands)
    # Along the dimension whose steps are the longest a part is one stretch of memory.
    along = max(range(x.ndim), key=lambda i: abs(x.strides[i]) if x.shape[i] > 1 else -1)
    n = x.shape[along]
    step = max(1, n * size // x.size)
    out: Any = None
    for start in range(0, n, step):
        cut = (*(slice(None),) * along, slice(start, start + step))
        part = _over(piece, combine, axes, [o[cut] if o.shape[along] == n else o for o in operands], size)
        if along in axes:
            out = part if out is None else combine(out, part, out=out)
            continue
        if out is None:
            out = np.empty((*part.shape[:along], n, *part.shape[along + 1 :]), part.dtype)
        out[cut] = part
    return out
