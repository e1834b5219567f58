"""``gelu`` and its derivative as ops of their own.

Composed of other ops, the two are a dozen passes through memory. Here each block of float32 numbers goes through all steps while it
is in the cache. The derivative of the derivative is written in ordinary functions, so that every order is right.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import _infer
from ._erf import erf_into, in_blocks
from ._op import Op
from .elementwise import ERF

_ROOT_HALF = math.sqrt(0.5)
_DENSITY = 1 / math.sqrt(2 * math.pi)  # of the normal distribution at 0


def _is_single(xp: Any, *arrays: Any) -> bool:
    """Whether the arrays are floating, of four bytes or fewer, and of one dtype and shape: computed in float32 blocks."""
    x = arrays[0]
    return (
        xp is np
        and all(isinstance(a, np.ndarray) and a.dtype == x.dtype and a.shape == x.shape for a in arrays)
        and x.dtype.itemsize <= 4
        and x.dtype.kind not in "biuc"
    )


def _run(fn: Any, *arrays: np.ndarray) -> np.ndarray:
    out = in_blocks(fn, *[a.astype(np.float32, copy=False) for a in arrays])
    return out.astype(arrays[0].dtype, copy=False)


def _forward_block(x: Any, out: Any, t: Any, p: Any, q: Any) -> None:
    np.multiply(x, np.float32(_ROOT_HALF), out=out)
    erf_into(out, out, t, p, q)
    out += 1
    out *= x
    out *= np.float32(0.5)


def _backward_block(dy: Any, x: Any, out: Any, t: Any, p: Any, q: Any) -> None:
    np.multiply(x, np.float32(_ROOT_HALF), out=out)
    erf_into(out, out, t, p, q)
    out += 1
    out *= np.float32(0.5)
    np.multiply(x, x, out=t)
    t *= np.float32(-0.5)
    np.exp(t, out=t)
    t *= x
    t *= np.float32(_DENSITY)
    out += t
    out *= dy


def _gelu(xp: Any, x: Any) -> Any:
    if _is_single(xp, x):
        return _run(_forward_block, x)
    return 0.5 * x * (1.0 + ERF.bind(xp)(x * _ROOT_HALF))


def _gelu_backward(xp: Any, dy: Any, x: Any) -> Any:
    if _is_single(xp, dy, x):
        return _run(_backward_block, dy, x)
    return dy * (0.5 * (1.0 + ERF.bind(xp)(x * _ROOT_HALF)) + x * xp.exp(-0.5 * x * x) * _DENSITY)


GELU = Op("gelu", ("x",), _gelu, _infer.elementwise)
GELU_BACKWARD = Op("gelu_backward", ("dy", "x"), _gelu_backward, _infer.elementwise)
