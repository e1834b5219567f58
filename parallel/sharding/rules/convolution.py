"""Factor mappings of convolution: images of a batch, channels and places may be split.

A place of the result depends on a few places of the image. Where places are split, each rank fetches a *halo* of its
neighbours' places. Splitting a dimension that is summed over (channels of the image; the batch and the places for the
kernel's derivative) leaves a pending sum. Where there are several groups of channels, ranks have whole groups.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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


def _reaches(kernel: Sequence[int], params: Params) -> list[int]:
    """Places of the image that one place of the result sees, first to last."""
    return [d * (k - 1) + 1 for k, d in zip(kernel, params["dilation"], strict=True)]


def _halo(kind: str, places: Sequence[Dim], kernel: Sequence[int], params: Params, lengths: Sequence[int]) -> list[Dim]:
    """The dims of an image as the places of a result see them, or the other way round."""
    numbers = zip(params["stride"], _reaches(kernel, params), params["padding"], lengths, strict=True)
    return [Dim(p.factor, 1, Halo(kind, n)) for p, n in zip(places, numbers, strict=True)]


def _factors(dims: Sequence[Dim]) -> frozenset[int]:
    return frozenset(d.factor for d in dims)


# ----- local calls ----------------------------------------------------------------------------------------------------


def _laid(xp: Any, x: Any, starts: Sequence[int], lengths: Sequence[int]) -> Any:
    """An image of these lengths in which the places of ``x`` start at ``starts``: cut, with zeros around."""
    if not any(starts) and tuple(lengths) == x.shape[2:]:
        return x
    out, source, target = xp.zeros((*x.shape[:2], *lengths), x.dtype), [slice(None)] * 2, [slice(None)] * 2
    for start, have, n in zip(starts, x.shape[2:], lengths, strict=True):
        lo = min(max(start, 0), n)
        hi = max(min(start + have, n), lo)
        source.append(slice(lo - start, hi - start) if hi > lo else slice(0))
        target.append(slice(lo, hi))
    out[tuple(target)] = x[tuple(source)]
    return out


def _seen(places: Sequence[int], kernel: Sequence[int], params: Params) -> list[int]:
    """The lengths of what places of a result see of an image."""
    numbers = zip(places, params["stride"], _reaches(kernel, params), strict=True)
    return [(n - 1) * stride + reach for n, stride, reach in numbers]


# ``starts``: where the rank's part of the image starts, counted from the first place that its part of the result sees.


def _conv_part(xp: Any, x: Any, w: Any, shape: tuple[int, ...], starts: tuple[int, ...], **params: Any) -> Any:
    if not all(shape):
        return xp.zeros(shape, np.result_type(x.dtype, w.dtype))
    return c.CONV.bind(xp)(_laid(xp, x, starts, _seen(shape[2:], w.shape[2:], params)), w, **params)


def _image_part(xp: Any, g: Any, w: Any, shape: tuple[int, ...], starts: tuple[int, ...], **params: Any) -> Any:
    """The cotangent of part of an image, from those places of the result that saw it."""
    if not all((*shape, *g.shape)):
        return xp.zeros(shape, np.result_type(g.dtype, w.dtype))
    seen = tuple(_seen(g.shape[2:], w.shape[2:], params))
    full = c.CONV_IMAGE.bind(xp)(g, w, image=seen, **params)
    return _laid(xp, full, [-start for start in starts], shape[2:])


def _kernel_part(xp: Any, g: Any, x: Any, shape: tuple[int, ...], starts: tuple[int, ...], **params: Any) -> Any:
    if not all((*shape, *g.shape)):
        return xp.zeros(shape, np.result_type(g.dtype, x.dtype))
    return c.CONV_KERNEL.bind(xp)(g, _laid(xp, x, starts, _seen(g.shape[2:], shape[2:], params)), **params)


CONV_PART = RankOp("conv_part", ("x", "w"), _conv_part)
IMAGE_PART = RankOp("conv_image_part", ("g", "w"), _image_part)
KERNEL_PART = RankOp("conv_kernel_part", ("g", "x"), _kernel_part)


def _block(order: str, channels: _Channels, params: Params, view: RankView) -> Params:
    """The numbers of a rank's call: as many groups as it has, and the part of the image without padding of its own."""
    boxes = dict(zip(order, (*view.operands, *view.results), strict=True))
    x, y = boxes["x"], boxes["y"]
    assert x is not None
    assert y is not None
    own = {k: v for k, v in params.items() if k != "image"}
    if channels.groups:
        own["groups"] = max(y.shape[1] // max(channels.outs.inner, 1), 1)
    numbers = zip(x.offset[2:], y.offset[2:], params["stride"], params["padding"], strict=True)
    starts = tuple(o + p - first * s for o, first, s, p in numbers)
    return {**own, "padding": (0,) * len(starts), "shape": view.results[0].shape, "starts": starts}


# ----- rules ----------------------------------------------------------------------------------------------------------


class _Convolution(NamedTuple):
    """An op of the three: its image, kernel and result in the order of operands and result, the channels that it sums
    over, and what a rank runs on parts."""

    order: str
    summed: str
    part: RankOp


_OPS = {
    c.CONV: _Convolution("xwy", "ins", CONV_PART),
    c.CONV_IMAGE: _Convolution("ywx", "outs", IMAGE_PART),
    c.CONV_KERNEL: _Convolution("yxw", "none", KERNEL_PART),
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
        image, places = _halo("conv", split, w[2:], params, x[2:]), split
    part = PartCall(_factors(split) | channels.groups, this.part, functools.partial(_block, this.order, channels))
    dims = {
        "x": (batch, channels.ins, *image),
        "w": (channels.outs, channels.seen, *kernel),
        "y": (batch, channels.outs, *places),
    }
    *operands, result = (dims[name] for name in this.order)
    return letters.rule(operands, [result], bilinear(outs), part=part)
