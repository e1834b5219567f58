"""``gelu`` and its derivative as ops of their own.

Composed of other ops, the two are a dozen passes through memory. Here each block of float32 numbers goes through all
steps while it is in the cache. The derivative of the derivative is written in ordinary functions, so that every order
is right.

In float32 the normal distribution function is ``Phi(-t) = exp(-t²/2) u P(u)`` with ``u = 1 / (1 + 0.26 t)`` and a
polynomial of degree 8, fitted for the smallest relative error on ``0 < t < 14.5`` (3e-8, below rounding; beyond, it is
0 in float32). So small results keep their leading digits, which ``1 + erf`` cancels; in float64 the complementary error
function keeps them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..backends.erf import in_blocks
from ..core import shape_rules
from ..core.op import Cuda, Op
from ..kernels.chains import one_launch
from ..native import ops
from ..native.calls import first
from ..ops.elementwise import ERF

_ROOT_HALF = math.sqrt(0.5)
_DENSITY = 1 / math.sqrt(2 * math.pi)  # of the normal distribution at 0

# Of P, from the highest power of u down. As arrays: NumPy would make one of each scalar at each call.
_P = tuple(
    np.asarray(c, np.float32)
    for c in (
        0.030230572315900536,
        -0.15149556153818136,
        0.24873513180545118,
        -0.14779110009608035,
        0.1587596717349876,
        0.051964558029153084,
        0.10278871902928527,
        0.10305097275355801,
        0.10375703871250153,
    )
)
_SCALE = np.asarray(0.26, np.float32)
_ONE = np.asarray(1, np.float32)
_MINUS_HALF = np.asarray(-0.5, np.float32)
_FACTOR = np.asarray(_DENSITY, np.float32)


def _is_single(xp: Any, *arrays: Any) -> bool:
    """Whether the arrays are floating, of four bytes or fewer, and of one dtype and shape: computed in float32
    blocks."""
    x = arrays[0]
    return (
        xp is np
        and all(isinstance(a, np.ndarray) and a.dtype == x.dtype and a.shape == x.shape for a in arrays)
        and x.dtype.itemsize <= 4
        and x.dtype.kind not in "biuc"
    )


def _run(fn: Any, *arrays: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        out = in_blocks(fn, *[a.astype(np.float32, copy=False) for a in arrays], scratch=2)
    return out.astype(arrays[0].dtype, copy=False)


# Beyond it Phi is 0 or 1 in every dtype, and its density 0: the products with an infinite x would be NaN.
FAR = 40.0


def _distribution(x: np.ndarray, out: np.ndarray, t: np.ndarray, e: np.ndarray) -> None:
    """``out = Phi(x)``, and ``e = exp(-x²/2)``."""
    np.abs(x, out=t)
    np.minimum(t, FAR, out=t)
    np.multiply(t, t, out=e)
    e *= _MINUS_HALF
    np.exp(e, out=e)
    t *= _SCALE
    t += _ONE
    np.divide(_ONE, t, out=t)
    np.multiply(t, _P[0], out=out)
    for c in _P[1:]:
        out += c
        out *= t
    out *= e
    np.subtract(_ONE, out, out=out, where=x > 0)


def _forward_block(x: np.ndarray, out: np.ndarray, t: np.ndarray, e: np.ndarray) -> None:
    _distribution(x, out, t, e)
    np.maximum(x, -FAR, out=t)
    out *= t


def _backward_block(dy: np.ndarray, x: np.ndarray, out: np.ndarray, t: np.ndarray, e: np.ndarray) -> None:
    _distribution(x, out, t, e)
    np.clip(x, -FAR, FAR, out=t)
    t *= e
    t *= _FACTOR
    out += t
    out *= dy


def _normal(xp: Any, x: Any) -> Any:
    """``Phi(x)``."""
    if xp is np:
        from scipy.special import erfc

        return 0.5 * erfc(x * -_ROOT_HALF)
    return 0.5 * (1.0 + ERF.bind(xp)(x * _ROOT_HALF))


def _gelu(xp: Any, x: Any) -> Any:
    if _is_single(xp, x):
        return _run(_forward_block, x)
    far = x if x.dtype.kind == "c" else xp.maximum(x, -FAR)
    return far * _normal(xp, x)


def _gelu_backward(xp: Any, dy: Any, x: Any) -> Any:
    if _is_single(xp, dy, x):
        return _run(_backward_block, dy, x)
    dtype = np.result_type(dy.dtype, x.dtype)  # what is clipped may be a scalar of NumPy's, of another dtype
    x = x if x.dtype.kind == "c" else xp.clip(x, -FAR, FAR)
    out = dy * (_normal(xp, x) + x * xp.exp(-0.5 * x * x) * _DENSITY)
    return out.astype(dtype, copy=False)


_CUDA = "larger({0}, ({t})-40) * (({t})0.5 * erfc{f}({0} * ({t})-0.70710678118654752440))"
_CUDA_BACKWARD = (
    "{0} * (({t})0.5 * erfc{f}({x} * ({t})-0.70710678118654752440)"
    " + {x} * (exp{f}(({t})-0.5 * {x} * {x}) * ({t})0.39894228040143267794))"
).replace("{x}", "smaller(larger({1}, ({t})-40), ({t})40)")
GELU = Op(
    "gelu",
    ("x",),
    _gelu,
    shape_rules.elementwise,
    overrides={"numpy": first(ops.gelu, _gelu), "cupy": one_launch("gelu")},
    flops=16,
    cuda=Cuda(_CUDA),
)
GELU_BACKWARD = Op(
    "gelu_backward",
    ("dy", "x"),
    _gelu_backward,
    shape_rules.elementwise,
    overrides={"numpy": first(ops.gelu_backward, _gelu_backward), "cupy": one_launch("gelu_backward")},
    flops=24,
    cuda=Cuda(_CUDA_BACKWARD),
)
