"""``silu(gate) * up`` and its derivative as ops of their own: each is one pass through memory, and one launch on a
GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..core import shape_rules
from ..core.dtypes import is_low_precision
from ..core.op import Cuda, Op
from ..kernels.chains import one_launch
from ..native import ops
from ..native.calls import first
from ..ops.elementwise import SIGMOID, SILU, SILU_IS_ZERO, clip, sigmoid


def _widened(*operands: Any) -> tuple[list[Any], np.dtype]:
    """Short floats in float32, and the dtype of their result."""
    dtype = np.result_type(*[a.dtype if hasattr(a, "dtype") else a for a in operands])
    short = is_low_precision(dtype)
    return [a.astype(np.float32) if short and hasattr(a, "dtype") else a for a in operands], dtype


def _swiglu(xp: Any, gate: Any, up: Any) -> Any:
    (gate, up), dtype = _widened(gate, up)
    return (SILU.bind(xp)(gate) * up).astype(dtype, copy=False)


def _swiglu_backward(xp: Any, g: Any, gate: Any, up: Any) -> Any:
    (g, gate, up), dtype = _widened(g, gate, up)
    return _of_gate(SIGMOID.bind(xp), xp.clip, g, gate, up).astype(dtype, copy=False)


def _of_gate(sigmoid: Any, clip: Any, g: Any, gate: Any, up: Any) -> Any:
    s = sigmoid(gate)
    # Beyond the bounds the sigmoid is 0 or 1, and the slope is that: the product of infinity and 0 would be NaN.
    near = gate if gate.dtype.kind == "c" else clip(gate, SILU_IS_ZERO, -SILU_IS_ZERO)
    return g * up * (s * (1.0 + near * (1.0 - s)))


SWIGLU = Op(
    "swiglu",
    ("gate", "up"),
    _swiglu,
    shape_rules.elementwise,
    overrides={"numpy": first(ops.swiglu, _swiglu), "cupy": one_launch("swiglu")},
    flops=12,
    cuda=Cuda("larger({0}, ({t})-1e4) * logistic({0}) * {1}"),
)
SWIGLU_BACKWARD = Op(
    "swiglu_backward",
    ("g", "gate", "up"),
    _swiglu_backward,
    shape_rules.elementwise,
    overrides={"numpy": first(ops.swiglu_backward, _swiglu_backward), "cupy": one_launch("swiglu_backward")},
    decompose=partial(_of_gate, sigmoid, clip),
    flops=16,
    cuda=Cuda(
        "{0} * {2} * (logistic({1}) * (({t})1 + smaller(larger({1}, ({t})-1e4), ({t})1e4) * (({t})1 - logistic({1}))))"
    ),
)
"""The cotangent of the gate; that of the other operand is ``swiglu(gate, g)``."""
