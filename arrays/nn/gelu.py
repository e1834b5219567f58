"""``gelu`` and its derivative as ops of their own.

Composed of other ops, the two are a dozen passes through memory; there are kernels for both. The derivative of the
derivative is written in ordinary functions, so that every order is right. The complementary error function keeps the
leading digits of small results, which ``1 + erf`` cancels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..chains.chains import one_launch
from ..core import shape_rules
from ..core.dtypes import is_low_precision
from ..core.op import Cuda, Op
from ..native import ops
from ..native.calls import first
from ..ops.elementwise import ERF

_ROOT_HALF = math.sqrt(0.5)
_DENSITY = 1 / math.sqrt(2 * math.pi)  # of the normal distribution at 0

# Beyond it Phi is 0 or 1 in every dtype, and its density 0: the products with an infinite x would be NaN.
FAR = 40.0


def _normal(xp: Any, x: Any) -> Any:
    """``Phi(x)``."""
    if xp is np:
        from scipy.special import erfc

        return 0.5 * erfc(x * -_ROOT_HALF)
    return 0.5 * (1.0 + ERF.bind(xp)(x * _ROOT_HALF))


def _gelu(xp: Any, x: Any) -> Any:
    if is_low_precision(x.dtype):
        return GELU.bind(xp)(x.astype(np.float32, order="C")).astype(x.dtype)
    far = x if x.dtype.kind == "c" else xp.maximum(x, -FAR)
    return far * _normal(xp, x)


def _gelu_backward(xp: Any, dy: Any, x: Any) -> Any:
    dtype = np.result_type(dy.dtype, x.dtype)  # what is clipped may be a scalar of NumPy's, of another dtype
    if is_low_precision(dtype):
        wide = [a.astype(np.float32, order="C") for a in xp.broadcast_arrays(dy, x)]
        return GELU_BACKWARD.bind(xp)(*wide).astype(dtype)
    x = x if x.dtype.kind == "c" else xp.clip(x, -FAR, FAR)
    with np.errstate(all="ignore"):
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
