"""Factor mappings of convolution: images of a batch, channels and places may be split.

A place of the result depends on a few places of the image. Where places are split, each rank fetches a *halo* of its
neighbours' places. Splitting a dimension that is summed over (channels of the image; the batch and the places for the
kernel's derivative) leaves a pending sum. Where there are several groups of channels, ranks have whole groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ....arrays.core.op import Op
from ....arrays.nn import convolution as c
from ..factors import Avals, Dim, FactorRule, Letters, Outs, Params, PartCall, RankView, bilinear, rule
from ..halos import Halo
from ..ops import RankOp


class _Channels(NamedTuple):
    """Dims of the image's channels, of the kernels, and of the channels that a kernel sees; and the factor of the
    groups."""

    ins: Dim
    outs: Dim
    seen: Dim
    groups: frozenset[int]


def _channels(letters: Letters, ins: int, outs: int, params: Params, summed: str) -> _Channels:
    """``summed`` says which channels the op sums over: ``"ins"``, ``"outs"`` or none."""
    n = params["groups"]
    if n == 1:
        a = letters.new(ins, reduce="sum" if summed == "ins" else None)
        return _Channels(a, letters.new(outs, reduce="sum" if summed == "outs" else None), a, frozenset())
    groups, seen = letters.new(n), letters.new(ins // n, whole=True)
    return _Channels(Dim(groups.factor, ins // n), Dim(groups.factor, outs // n), seen, frozenset({groups.factor}))


def _own_groups(channels: _Channels, operand: int | None, params: Params, view: RankView) -> Params:
    """``groups`` as many as a rank has: of the channels of an operand, or of the result."""
    if not channels.groups:
        return params
    box = view.results[0] if operand is None else view.operands[operand]
    assert box is not None
    return {**params, "groups": max(box.shape[1] // max(channels.outs.inner, 1), 1)}


def _reaches(kernel: Sequence[int], params: Params) -> list[int]:
    """Places of the image that one place of the result sees, first to last."""
    return [d * (k - 1) + 1 for k, d in zip(kernel, params["dilation"], strict=True)]


def _halo(kind: str, places: Sequence[Dim], kernel: Sequence[int], params: Params, *more: Sequence[int]) -> list[Dim]:
    """The dims of an image as the places of a result see them, or the other way round."""
    numbers = zip(params["stride"], _reaches(kernel, params), *more, strict=True)
    return [Dim(p.factor, 1, Halo(kind, n)) for p, n in zip(places, numbers, strict=True)]


def _factors(dims: Sequence[Dim]) -> frozenset[int]:
    return frozenset(d.factor for d in dims)


# ----- local calls ----------------------------------------------------------------------------------------------------


def _conv_part(xp: Any, x: Any, w: Any, shape: tuple[int, ...], **params: Any) -> Any:
    return c.CONV.bind(xp)(x, w, **params) if all(shape) else xp.zeros(shape, np.result_type(x.dtype, w.dtype))


def _image_part(xp: Any, g: Any, w: Any, shape: tuple[int, ...], starts: tuple[int, ...], **params: Any) -> Any:
    """The cotangent of part of an image, from those places of the result that saw it. ``starts``: where it starts,
    counted from the first place that the first of them saw."""
    out = xp.zeros(shape, np.result_type(g.dtype, w.dtype))
    if not all((*shape, *g.shape)):
        return out
    reach = _reaches(w.shape[2:], params)
    seen = tuple((n - 1) * s + r for n, s, r in zip(g.shape[2:], params["stride"], reach, strict=True))
    full = c.CONV_IMAGE.bind(xp)(g, w, **{**params, "image": seen})
    source, target = [slice(None)] * 2, [slice(None)] * 2
    for start, n, m in zip(starts, shape[2:], seen, strict=True):
        lo, hi = max(start, 0), min(start + n, m)
        source.append(slice(lo, max(hi, lo)))
        target.append(slice(lo - start, max(hi, lo) - start))
    out[tuple(target)] = full[tuple(source)]
    return out


def _kernel_part(xp: Any, g: Any, x: Any, shape: tuple[int, ...], **params: Any) -> Any:
    if not all((*shape, *g.shape)):
        return xp.zeros(shape, np.result_type(g.dtype, x.dtype))
    return c.CONV_KERNEL.bind(xp)(g, x, **params)


CONV_PART = RankOp("conv_part", ("x", "w"), _conv_part)
IMAGE_PART = RankOp("conv_image_part", ("g", "w"), _image_part)
KERNEL_PART = RankOp("conv_kernel_part", ("g", "x"), _kernel_part)


def _block(operand: int | None, channels: _Channels, params: Params, view: RankView) -> Params:
    return {**_own_groups(channels, operand, params, view), "shape": view.results[0].shape}


def _image_block(channels: _Channels, params: Params, view: RankView) -> Params:
    g, box = view.operands[0], view.results[0]
    assert g is not None
    first = [o * s for o, s in zip(g.offset[2:], params["stride"], strict=True)]
    starts = tuple(o - f for o, f in zip(box.offset[2:], first, strict=True))
    own = _own_groups(channels, 0, params, view)
    return {**{k: v for k, v in own.items() if k != "image"}, "shape": box.shape, "starts": starts}


# ----- rules ----------------------------------------------------------------------------------------------------------


class _Convolution(NamedTuple):
    """An op of the three: its image, kernel and result in the order of operands and result, the channels that it sums
    over, and what a rank runs on parts."""

    order: str
    summed: str
    part: RankOp
    localize: Callable[..., Params]


_OPS = {
    c.CONV: _Convolution("xwy", "ins", CONV_PART, functools.partial(_block, None)),
    c.CONV_IMAGE: _Convolution("ywx", "outs", IMAGE_PART, _image_block),
    c.CONV_KERNEL: _Convolution("yxw", "none", KERNEL_PART, functools.partial(_block, 0)),
}


@rule(*_OPS)
def _convolution(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    this = _OPS[op]
    x, w, y = (dict(zip(this.order, (*avals, *outs), strict=True))[name].shape for name in "xwy")
    reduce = "sum" if op is c.CONV_KERNEL else None
    batch = letters.new(x[0], reduce=reduce)
    channels = _channels(letters, x[1], y[1], params, this.summed)
    kernel = letters.many(w[2:], whole=True)
    split = letters.many(x[2:] if op is c.CONV_IMAGE else y[2:], reduce=reduce)
    if op is c.CONV_IMAGE:
        image, places = split, _halo("conv_transpose", split, w[2:], params, y[2:])
    else:
        image, places = _halo("conv", split, w[2:], params), split
    part = PartCall(_factors(split) | channels.groups, this.part, functools.partial(this.localize, channels))
    dims = {
        "x": (batch, channels.ins, *image),
        "w": (channels.outs, channels.seen, *kernel),
        "y": (batch, channels.outs, *places),
    }
    *operands, result = (dims[name] for name in this.order)
    return letters.rule(operands, [result], bilinear(outs), part=part)
