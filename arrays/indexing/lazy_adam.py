"""The step of Adam (Kingma and Ba, 2015), and the op that takes it only where a gradient is not zero.

The op is what makes a step on a large table of which few rows were read cost these rows: given a gradient that is kept
sparse it computes at its places alone, in a compiled program and on the ranks of a mesh as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..backends.row_blocks import BLOCK
from ..core.errors import ShapeError
from ..core.op import Op, ShapeDtype
from ..ops import elementwise
from ..ops.param_kinds import NUMBER
from .rows import Rows


def adam_step(
    xp: Any, p: Any, g: Any, m: Any, v: Any, size: Any, eps: Any, *, b1: float, b2: float
) -> tuple[Any, Any, Any]:
    """The parameter and the means of the gradients and of their squares after a step.

    ``size`` and ``eps`` have in them what undoes the bias of the means (Kingma and Ba, 2015, at the end of section 2):
    no element is divided by it.
    """
    m = b1 * m + (1.0 - b1) * g
    v = b2 * v + (1.0 - b2) * xp.square(g)
    return p - size * (m / (xp.sqrt(v) + eps)), m, v


def _lazy(xp: Any, p: Any, g: Any, m: Any, v: Any, size: Any, eps: Any, *, b1: float, b2: float) -> tuple[Any, ...]:
    moves = g != 0
    news = adam_step(xp, p, g, m, v, size, eps, b1=b1, b2=b2)
    # NumPy makes float32 of a bfloat16 and one of Python's numbers.
    return tuple(xp.where(moves, new, old).astype(old.dtype) for new, old in zip(news, (p, m, v), strict=True))


def _decompose(p: Any, g: Any, m: Any, v: Any, size: Any, eps: Any, *, b1: float, b2: float) -> tuple[Any, ...]:
    return _lazy(elementwise, p, g, m, v, size, eps, b1=b1, b2=b2)


def _infer(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[ShapeDtype, ...]:
    p, g, m, v, *rates = args
    if not p.shape == g.shape == m.shape == v.shape or any(getattr(r, "shape", ()) for r in rates):
        raise ShapeError(
            f"[{op.name}] the parameter, its gradient and both means have one shape, and the two rates none, "
            f"got {', '.join(str(getattr(a, 'shape', ())) for a in args)}"
        )
    return p, m, v


LAZY_ADAM = Op(
    "lazy_adam",
    ("p", "g", "m", "v", "size", "eps"),
    _lazy,
    _infer,
    nout=3,
    decompose=_decompose,
    params={"b1": NUMBER, "b2": NUMBER},
)


def lazy_adam_at(
    found: Rows, bufs: Sequence[Any], params: Mapping[str, Any], free: Sequence[bool] = ()
) -> tuple[np.ndarray, ...]:
    """:data:`LAZY_ADAM` on NumPy buffers, the gradient (the second of ``bufs``) given by place.

    ``free`` says of each operand whether its memory may take a result; the others are copied.
    """
    p, _, m, v, size, eps = bufs
    axes, ids, values = found
    shape = p.shape
    rest = [d for d in range(len(shape)) if d not in axes]
    key = np.unravel_index(ids, [shape[d] for d in axes]) if len(axes) != 1 else (ids,)
    outs = [x if free and free[i] else np.array(x) for i, x in ((0, p), (2, m), (3, v))]
    turned = [x.transpose((*axes, *rest)) for x in outs]
    # In blocks: what is computed on the way stays in cache.
    rows = max(1, BLOCK // max(values.shape[1], 1))
    for start in range(0, len(ids), rows):
        at = tuple(k[start : start + rows] for k in key)
        g = values[start : start + rows]
        olds = [t[at].reshape(g.shape) for t in turned]
        news = adam_step(np, olds[0], g, olds[1], olds[2], size, eps, **params)
        moves = g != 0
        for t, new, old in zip(turned, news, olds, strict=True):
            t[at] = np.where(moves, new, old).reshape(len(g), *t.shape[len(axes) :])
    return tuple(outs)
