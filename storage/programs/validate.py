"""Validation of stored calls before a program runs: number of operands, parameters of the op, declared results.

For traced programs the public functions check all this; a file may hold anything. The kinds of parameters, and the
shapes and dtypes of results, are those of the op's record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...arrays.core.errors import ProgramError
from ...arrays.core.index_template import result_shape
from ...arrays.core.op import Op, ShapeDtype
from ...arrays.core.program import Entry
from ...arrays.ops.param_kinds import OpCall
from ...arrays.random.draw import check_key

# ----- operands that must go together, where the rule for the result does not look at them ----------------------------


def _scattered(op: Op, call: OpCall) -> bool:
    g, *arrays = call.args
    return bool(g.shape == result_shape(call.params["template"], call.params["shape"], [a.shape for a in arrays]))


def _trailing(op: Op, call: OpCall) -> bool:
    x, n = call.args[op.operands.index("x")], call.params["naxes"]
    own = {"weight": x.shape[len(x.shape) - n :], "bias": x.shape[len(x.shape) - n :]}
    return n <= call.ndim and _shapes(op, call, own, x.shape)


def _channels(op: Op, call: OpCall) -> bool:
    x = call.args[op.operands.index("x")]
    axis, groups = call.params["axis"], call.params.get("num_groups", 1)
    if axis >= len(x.shape) or x.shape[axis] % groups:
        return False
    size = (x.shape[axis],)
    own = dict.fromkeys(op.operands, size) | dict.fromkeys(("x", "g"), x.shape)
    return _shapes(op, call, own, x.shape)


def _shapes(op: Op, call: OpCall, own: Mapping[str, tuple[int, ...]], others: tuple[int, ...]) -> bool:
    # A last operand with a star may be left out.
    given = zip(op.operands, call.args, strict=False)
    return len(call.args) <= len(op.operands) and all(a.shape == own.get(name, others) for name, a in given)


def _convolved(op: Op, call: OpCall) -> bool:
    """Whether the two operands, among image, kernel and result of a convolution, fit the shape of the third."""
    a, b = call.args
    padding, stride, dilation, groups = (call.params[k] for k in ("padding", "stride", "dilation", "groups"))
    if op.name == "conv_image":
        x, w, y = (a.shape[0], b.shape[1] * groups, *call.params["image"]), b.shape, a.shape
    elif op.name == "conv_kernel":
        x, w, y = b.shape, (a.shape[1], b.shape[1] // groups, *call.params["kernel"]), a.shape
    else:
        x, w, y = a.shape, b.shape, op.avals(call.args, call.params)[0].shape
    one = zip(x[2:], w[2:], y[2:], padding, stride, dilation, strict=True)
    return (
        len(x) == len(w) == len(y) > 2
        and x[1] == w[1] * groups
        and w[0] % groups == 0
        and y[:2] == (x[0], w[0])
        and all((n + 2 * p - d * (k - 1) - 1) // s + 1 == m >= 0 for n, k, m, p, s, d in one)
    )


def _experts(op: Op, call: OpCall) -> bool:
    x, chosen, weights, gate, up, down, numbers = call.args[-7:]
    e, width, hidden = gate.shape
    return (
        all(a.shape == x.shape for a in call.args[:-7])
        and x.shape[-1] == width
        and chosen.shape == weights.shape
        and chosen.shape[:-1] == x.shape[:-1]
        and chosen.dtype.kind in "iu"
        and numbers.dtype.kind in "iu"
        and numbers.shape == (e,)
        and (up.shape, down.shape) == (gate.shape, (e, hidden, width))
    )


def _like_labels(op: Op, call: OpCall) -> bool:
    g, logits, labels, *saved = call.args
    return all(a.shape == g.shape for a in (labels, *saved)) and g.shape == logits.shape[:-1]


def _linear_losses(op: Op, call: OpCall) -> bool:
    g, _, _, *of_rows = call.args
    return all(a.shape == g.shape for a in of_rows)


def _dropped(op: Op, call: OpCall) -> bool:
    x, *others, key = call.args
    check_key(op.name, key)
    if len(key.shape) == 3 and key.shape[0] != call.params["global_shape"][0]:
        return False
    return all(y.shape == x.shape for y in others)


def _chosen(op: Op, call: OpCall) -> bool:
    _, p = call.args
    drawn = call.params["global_shape"]
    return len(p.shape) == 1 and p.shape[0] > 0 and (call.params["replace"] or math.prod(drawn) <= p.shape[0])


def _filled(op: Op, call: OpCall) -> bool:
    np.full((), call.params["value"], call.params["dtype"])
    return True


AGREEMENTS: dict[str, Callable[[Op, OpCall], bool]] = {
    "scatter": _scattered,
    **dict.fromkeys((f"{k}_norm{e}" for k in ("layer", "rms") for e in ("", "_backward")), _trailing),
    **dict.fromkeys(("add_layer_norm", "add_rms_norm"), _trailing),
    **dict.fromkeys(
        ("batch_norm", "batch_norm_backward", "batch_norm_inference", "group_norm", "group_norm_backward"), _channels
    ),
    **dict.fromkeys(("conv", "conv_image", "conv_kernel"), _convolved),
    **dict.fromkeys(("experts", "experts_backward"), _experts),
    "cross_entropy_backward": _like_labels,
    "linear_cross_entropy_backward": _linear_losses,
    **dict.fromkeys(("dropout", "dropout_add"), _dropped),
    "random_choice": _chosen,
    "full_like": _filled,
}


def check_call(e: Entry, avals: Mapping[int, ShapeDtype], where: str) -> None:
    """Refuse a call that its op does not take, or whose result has another shape or dtype than the program declares.

    Raises
    ------
    ProgramError
        The call is invalid; says ``where`` it is and its fault.
    """
    call = OpCall(tuple(avals[v] if isinstance(v, int) else v.value for v in e.inputs), e.params)
    _check_operands(e, call, where)
    kinds = e.op.params
    if kinds.keys() != e.params.keys():
        takes = f"the parameters {', '.join(kinds)}" if kinds else "no parameters"
        raise ProgramError(f"{where} takes {takes}; the file has {', '.join(map(repr, e.params)) or 'none'}")
    said = tuple(avals[v] for v in e.outputs)
    try:
        wrong = [k for k, kind in kinds.items() if not kind.fits(e.params[k], call)]
        found = () if wrong else e.op.avals(call.args, e.params)
        agree = None if wrong else AGREEMENTS.get(e.op.name)
        if agree is not None and not agree(e.op, call):
            raise ValueError(f"{', '.join(map(str, call.args))} do not go together")
        gives = ", ".join(map(str, found))
    except Exception as error:
        raise ProgramError(f"{where} is no call of this op: {error}") from None
    if wrong:
        name = wrong[0]
        raise ProgramError(f"{where}, parameter {name}: {short(e.params[name])} is not {kinds[name].what}")
    if found != said:
        raise ProgramError(f"{where} gives {gives}, and the program says {', '.join(map(str, said))}")


def _check_operands(e: Entry, call: OpCall, where: str) -> None:
    named = e.op.operands
    several = bool(named) and named[-1].startswith("*")
    least = len(named) - several
    if len(call.args) < max(least, 1) or (len(call.args) > least and not several):
        raise ProgramError(f"{where} takes the operands {', '.join(named)}, and {len(call.args)} are there")
    if not any(isinstance(a, ShapeDtype) for a in call.args):
        raise ProgramError(f"{where} is a call on numbers alone: one of its operands is an array")


def short(value: Any) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."
