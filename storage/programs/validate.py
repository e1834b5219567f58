"""Validation of stored calls before a program runs: number of operands, parameters of the op, declared results.

For traced programs the public functions check all this; a file may hold anything. `PARAMETERS` lists the parameters of
each op and their kinds. Shapes and dtypes of the results come from the op's own rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...arrays.core.errors import ProgramError
from ...arrays.core.index_template import Gap, Slot, Span, Truth, result_shape
from ...arrays.core.op import Op
from ...arrays.core.program import Entry
from ...arrays.core.shape_dtype import ShapeDtype
from ...arrays.random.draw import check_key


class _Call(NamedTuple):
    args: tuple[Any, ...]  # ShapeDtype, or Python scalars
    params: Mapping[str, Any]

    @property
    def ndim(self) -> int:
        return len(self.args[0].shape)


@dataclass(frozen=True)
class Kind:
    """A kind of parameter: its description, and the test whether a value fits it in a call."""

    what: str
    fits: Callable[[Any, _Call], bool]


def _whole(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**64


def _wholes(value: Any, least: int) -> bool:
    return type(value) is tuple and all(_whole(n) and n >= least for n in value)


def _one_of(*names: str) -> Kind:
    return Kind(f"one of {', '.join(map(repr, names))}", lambda v, _: type(v) is str and v in names)


def _is_axis(value: Any, call: _Call) -> bool:
    return _whole(value) and 0 <= value < call.ndim


def _is_number(value: Any, _: _Call) -> bool:
    return type(value) in (int, float) or (isinstance(value, np.generic) and value.dtype.kind in "iuf")


def _axes(value: Any, call: _Call) -> bool:
    return type(value) is tuple and all(_is_axis(a, call) for a in value) and len(set(value)) == len(value)


AXIS = Kind("a dimension of the first operand", _is_axis)
AXES = Kind("dimensions of the first operand, each once", _axes)
ORDER = Kind("an order of all dimensions", lambda v, c: _axes(v, c) and len(v) == c.ndim)
FLAG = Kind("true or false", lambda v, _: type(v) is bool)
WHOLE = Kind("an integer", lambda v, _: _whole(v))
COUNT = Kind("an integer of 0 or more", lambda v, _: _whole(v) and v >= 0)
POSITIVE = Kind("an integer of 1 or more", lambda v, _: _whole(v) and v >= 1)
LABEL = Kind("an integer or null", lambda v, _: v is None or _whole(v))
NUMBER = Kind("a number", _is_number)
VALUE = Kind(
    "a number or a truth value",
    lambda v, c: _is_number(v, c) or type(v) in (bool, complex) or isinstance(v, np.generic),
)
FRACTION = Kind("a number from 0 to 1", lambda v, c: _is_number(v, c) and 0 <= v <= 1)
SIZES = Kind("a tuple of sizes", lambda v, _: _wholes(v, 0) and math.prod(v) < 2**63)
STEPS = Kind("a tuple of integers of 1 or more", lambda v, _: _wholes(v, 1))
DTYPE = Kind("a dtype", lambda v, _: isinstance(v, np.dtype))
NOTHING = Kind("null: in a file there is no mesh", lambda v, _: v is None)
NORM = _one_of("backward", "ortho", "forward")


def _in_block(value: Any, call: _Call) -> bool:
    """Whether a block at this offset lies in the global array; its shape is that of the result, or of the operand."""
    block, whole = call.params.get("shape"), call.params.get("global_shape")
    block = call.args[0].shape if block is None else block
    if not (_wholes(value, 0) and _wholes(block, 0) and _wholes(whole, 0) and len(value) == len(block) == len(whole)):
        return False
    return all(o + n <= w for o, n, w in zip(value, block, whole, strict=True))


THRESHOLD = Kind("an integer from 0 to 2**32", lambda v, _: _whole(v) and 0 <= v <= 2**32)
OFFSET = Kind("the place of a block inside global_shape", _in_block)


def _is_template(value: Any, call: _Call) -> bool:
    if type(value) is not tuple:
        return False
    shape = call.params.get("shape", call.args[0].shape)
    arrays = [a for a in call.args if isinstance(a, ShapeDtype)][-sum(isinstance(p, Slot) for p in value) :]
    slots, axis = [], 0
    for p in value:
        if isinstance(p, Truth | Gap) or p is None:
            continue
        if axis == len(shape):
            return False
        if isinstance(p, Slot):
            slots.append(p.n)
            if arrays[p.n : p.n + 1] == [] or arrays[p.n].dtype.kind not in "iu":
                return False
        elif isinstance(p, Span):
            if p.step == 0:
                return False
        elif not (_whole(p) and 0 <= p < shape[axis]):
            return False
        axis += 1
    return axis == len(shape) and slots == list(range(len(slots)))


TEMPLATE = Kind("an index into the array, each index array in its place", _is_template)

_BLOCK = {"offset": OFFSET, "global_shape": SIZES}
_DRAW = {"shape": SIZES, **_BLOCK, "dtype": DTYPE}
_CONV = {"stride": STEPS, "dilation": STEPS, "groups": POSITIVE}

_ROWS: dict[str, dict[str, Kind]] = {
    "sum prod max min any all": {"axis": AXES, "keepdims": FLAG},
    "mean": {"axis": AXES, "keepdims": FLAG, "count": COUNT},
    "argmax argmin": {"axis": AXIS, "keepdims": FLAG},
    "sort argsort": {"axis": AXIS, "descending": FLAG, "stable": FLAG},
    "cumulative_sum cumulative_prod concat softmax_backward log_softmax_backward": {"axis": AXIS},
    "softmax log_softmax": {"axis": AXIS, "masked": FLAG},
    "layer_norm layer_norm_backward rms_norm rms_norm_backward": {"naxes": COUNT, "eps": NUMBER},
    "batch_norm batch_norm_backward batch_norm_inference": {"axis": AXIS, "eps": NUMBER},
    "group_norm group_norm_backward": {"num_groups": POSITIVE, "axis": AXIS, "eps": NUMBER},
    "cross_entropy cross_entropy_backward": {"ignore_index": LABEL, "label_smoothing": FRACTION},
    "getitem index_set index_add index_min index_max last_writes": {"template": TEMPLATE},
    "scatter": {"template": TEMPLATE, "shape": SIZES},
    "searchsorted": {"side": _one_of("left", "right")},
    "flip": {"axis": AXES},
    "permute_dims": {"axes": ORDER},
    "reshape broadcast_to": {"shape": SIZES},
    "astype": {"dtype": DTYPE},
    "full_like": {"value": VALUE, "dtype": DTYPE},
    "positions": {"axis": AXIS, "start": WHOLE},
    "reshard": {"layout": NOTHING},
    "fft": {"axes": AXES, "norm": NORM, "inverse": FLAG},
    "rfft": {"axis": AXIS, "norm": NORM},
    "irfft": {"n": POSITIVE, "axis": AXIS, "norm": NORM},
    "conv": _CONV,
    "conv_image": {"image": SIZES, **_CONV},
    "conv_kernel": {"kernel": SIZES, **_CONV},
    "svd": {"full_matrices": FLAG},
    "qr": {"mode": _one_of("reduced", "complete")},
    "pinv": {"rtol": NUMBER},
    "lazy_adam": {"b1": NUMBER, "b2": NUMBER},
    "dropout dropout_add": {"rate": FRACTION, **_BLOCK},
    "random_bits random_split random_gumbel random_permutation": _DRAW,
    "random_uniform": {**_DRAW, "low": NUMBER, "high": NUMBER},
    "random_normal": {**_DRAW, "mean": NUMBER, "std": NUMBER},
    "random_truncated_normal": {**_DRAW, "lower": NUMBER, "upper": NUMBER, "mean": NUMBER, "std": NUMBER},
    "random_integers": {**_DRAW, "low": WHOLE, "span": COUNT},
    "random_bernoulli": {**_DRAW, "threshold": THRESHOLD},
    "random_exponential": {**_DRAW, "scale": NUMBER},
    "random_choice": {**_DRAW, "replace": FLAG},
    "random_fold_in": {"stream": COUNT},
}

PARAMETERS = {name: kinds for names, kinds in _ROWS.items() for name in names.split()}
"""The parameters of each op that has any. A test compares them with calls of every op."""


# ----- operands that must go together, where the rule for the result does not look at them -------------------------------------


def _scattered(op: Op, call: _Call) -> bool:
    g, *arrays = call.args
    return bool(g.shape == result_shape(call.params["template"], call.params["shape"], [a.shape for a in arrays]))


def _trailing(op: Op, call: _Call) -> bool:
    x, n = call.args[op.operands.index("x")], call.params["naxes"]
    own = {"weight": x.shape[len(x.shape) - n :], "bias": x.shape[len(x.shape) - n :]}
    return n <= call.ndim and _shapes(op, call, own, x.shape)


def _channels(op: Op, call: _Call) -> bool:
    x = call.args[op.operands.index("x")]
    axis, groups = call.params["axis"], call.params.get("num_groups", 1)
    if axis >= len(x.shape) or x.shape[axis] % groups:
        return False
    size = (x.shape[axis],)
    return _shapes(op, call, dict.fromkeys(("weight", "bias", "mean", "var", "g_mean", "g_var"), size), x.shape)


def _shapes(op: Op, call: _Call, own: Mapping[str, tuple[int, ...]], others: tuple[int, ...]) -> bool:
    return all(a.shape == own.get(name, others) for name, a in zip(op.operands, call.args, strict=True))


def _convolved(op: Op, call: _Call) -> bool:
    """Whether the two operands, among image, kernel and result of a convolution, fit the shape of the third."""
    a, b = call.args
    stride, dilation, groups = (call.params[k] for k in _CONV)
    if op.name == "conv_image":
        x, w, y = (a.shape[0], b.shape[1] * groups, *call.params["image"]), b.shape, a.shape
    elif op.name == "conv_kernel":
        x, w, y = b.shape, (a.shape[1], b.shape[1] // groups, *call.params["kernel"]), a.shape
    else:
        x, w, y = a.shape, b.shape, op.avals(call.args, call.params)[0].shape
    one = zip(x[2:], w[2:], y[2:], stride, dilation, strict=True)
    return (
        len(x) == len(w) == len(y) > 2
        and x[1] == w[1] * groups
        and w[0] % groups == 0
        and y[:2] == (x[0], w[0])
        and all((n - d * (k - 1) - 1) // s + 1 == m >= 0 for n, k, m, s, d in one)
    )


def _experts(op: Op, call: _Call) -> bool:
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


def _like_labels(op: Op, call: _Call) -> bool:
    g, logits, labels = call.args
    return bool(g.shape == labels.shape == logits.shape[:-1])


def _dropped(op: Op, call: _Call) -> bool:
    x, *others, key = call.args
    check_key(op.name, key)
    if len(key.shape) == 3 and key.shape[0] != call.params["global_shape"][0]:
        return False
    return all(y.shape == x.shape for y in others)


def _chosen(op: Op, call: _Call) -> bool:
    _, p = call.args
    drawn = call.params["global_shape"]
    return len(p.shape) == 1 and p.shape[0] > 0 and (call.params["replace"] or math.prod(drawn) <= p.shape[0])


def _filled(op: Op, call: _Call) -> bool:
    np.full((), call.params["value"], call.params["dtype"])
    return True


AGREEMENTS: dict[str, Callable[[Op, _Call], bool]] = {
    "scatter": _scattered,
    **dict.fromkeys(("layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward"), _trailing),
    **dict.fromkeys(
        ("batch_norm", "batch_norm_backward", "batch_norm_inference", "group_norm", "group_norm_backward"), _channels
    ),
    **dict.fromkeys(("conv", "conv_image", "conv_kernel"), _convolved),
    **dict.fromkeys(("experts", "experts_backward"), _experts),
    "cross_entropy_backward": _like_labels,
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
    call = _Call(tuple(avals[v] if isinstance(v, int) else v.value for v in e.inputs), e.params)
    _check_operands(e, call, where)
    kinds = PARAMETERS.get(e.op.name, {})
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


def _check_operands(e: Entry, call: _Call, where: str) -> None:
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
