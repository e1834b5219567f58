"""Operations and bytes of calls on a rank's blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...arrays.core.index_template import is_basic
from ...arrays.core.op import ShapeDtype
from ..partition.rank_program import LocalCall


def is_view(s: LocalCall, in_order: bool) -> bool:
    """Whether a call's result is memory of its first operand; ``in_order``: whether that lies in the order of its
    elements."""
    if s.op.name == "getitem":
        return is_basic(s.params["template"])
    return s.op.view == "always" and (in_order or s.op.name != "reshape")


def reorders(s: LocalCall, out: ShapeDtype) -> bool:
    """Whether a view lies in another order than that of its elements."""
    if s.op.name == "permute_dims":
        long = [a for a in s.params["axes"] if a < len(out.shape)]
        moved = [a for a, n in zip(long, out.shape, strict=False) if n > 1]
        return moved != sorted(moved)
    return s.op.name in ("broadcast_to", "flip", "getitem", "real", "imag")


def flops(s: LocalCall, avals: Mapping[int, ShapeDtype]) -> float:
    """Floating-point operations of a call on blocks: exact for products, about right for all else, which memory
    bounds."""
    operands = [avals[v] for v in s.inputs if isinstance(v, int)]
    out = sum(math.prod(avals[v].shape) for v in s.outputs)
    name = s.op.name
    if name == "matmul":
        return 2.0 * out * operands[0].shape[-1]
    if name in ("conv", "conv_image"):
        kernel = operands[1].shape
        return 2.0 * out * math.prod(kernel) / max(kernel[0] if name == "conv" else kernel[1], 1)
    if name == "conv_kernel":
        return 2.0 * out * math.prod(operands[-1].shape) / max(operands[-1].shape[1], 1)
    if name.startswith("attention"):
        forward = name == "attention"
        _, k, v = operands[:3] if forward else operands[1:4]
        rows = avals[s.outputs[0]] if forward else operands[0]
        products = k.shape[-1] + v.shape[-1] if forward else 3 * k.shape[-1] + 2 * v.shape[-1]
        return 2.0 * math.prod(rows.shape[:-1]) * k.shape[-2] * products
    if name.startswith("experts"):
        rows = math.prod(operands[0].shape[:-1])
        weights = [a for a in operands if len(a.shape) == 3]
        each = sum(math.prod(a.shape[1:]) for a in weights)
        return (2.0 if name == "experts" else 6.0) * rows * each
    if name.startswith("linear_cross_entropy"):
        *_, weight, labels = operands if name.endswith("y") else operands[:-1]
        return (2.0 if name.endswith("y") else 6.0) * math.prod(labels.shape) * math.prod(weight.shape)
    size = max([out, *(math.prod(a.shape) for a in operands)])
    return float(size * s.op.flops)


def touched(inputs: Sequence[Any], outputs: Sequence[int], avals: Mapping[int, ShapeDtype]) -> int:
    return sum(avals[v].nbytes for v in {v for v in inputs if isinstance(v, int)} | set(outputs))
