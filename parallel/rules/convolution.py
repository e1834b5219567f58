"""Factor mappings of convolution: images of a batch, channels and places may be split.

A place of the result sees a few places of the image: where places are split, each rank fetches those that its own need, which are
its own and a *halo* of its neighbours'. Splitting what is summed over (channels of the image, the batch and the places for the
kernel's derivative) leaves a sum to be made; channels of several groups stay together.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays import convolution as c
from ...arrays._op import Op
from ...arrays.program import ShapeDtype
from ..factors import Dim, FactorRule, Letters, PartCall, RankView, rule
from ..lookups import part_op
from ..windows import Window

Avals = Sequence[Any]
Params = Mapping[str, Any]


def _channels(letters: Letters, n: int, params: Params, reduce: str | None = None) -> Dim:
    several = params["groups"] > 1
    return letters.new(n, whole=several, reduce=None if several else reduce)


def _reaches(kernel: Sequence[int], params: Params) -> list[int]:
    """Places of the image that one place of the result sees, first to last."""
    return [d * (k - 1) + 1 for k, d in zip(kernel, params["dilation"], strict=True)]


def _halo(places: Sequence[Dim], kernel: Sequence[int], params: Params) -> list[Dim]:
    """The image's dims as the result's places see them."""
    numbers = zip(params["stride"], _reaches(kernel, params), strict=True)
    return [Dim(p.factor, 1, Window("conv", (s, r))) for p, (s, r) in zip(places, numbers, strict=True)]


def _factors(dims: Sequence[Dim]) -> frozenset[int]:
    return frozenset(d.factor for d in dims)


# ----- what a rank runs -------------------------------------------------------------------------------------------------


def _conv_part(xp: Any, x: Any, w: Any, shape: tuple[int, ...], **params: Any) -> Any:
    return c.CONV.numpy(x, w, **params) if all(shape) else np.zeros(shape, np.result_type(x.dtype, w.dtype))


def _image_part(xp: Any, g: Any, w: Any, shape: tuple[int, ...], starts: tuple[int, ...], **params: Any) -> Any:
    """The cotangent of part of an image, from those places of the result that saw it. ``starts``: where it starts, counted from
    the first place that the first of them saw."""
    out = np.zeros(shape, np.result_type(g.dtype, w.dtype))
    if not all((*shape, *g.shape)):
        return out
    reach = _reaches(w.shape[2:], params)
    seen = tuple((n - 1) * s + r for n, s, r in zip(g.shape[2:], params["stride"], reach, strict=True))
    full = c.CONV_IMAGE.numpy(g, w, **{**params, "image": seen})
    source, target = [slice(None)] * 2, [slice(None)] * 2
    for start, n, m in zip(starts, shape[2:], seen, strict=True):
        lo, hi = max(start, 0), min(start + n, m)
        source.append(slice(lo, max(hi, lo)))
        target.append(slice(lo - start, max(hi, lo) - start))
    out[tuple(target)] = full[tuple(source)]
    return out


def _kernel_part(xp: Any, g: Any, x: Any, shape: tuple[int, ...], **params: Any) -> Any:
    if not all((*shape, *g.shape)):
        return np.zeros(shape, np.result_type(g.dtype, x.dtype))
    return c.CONV_KERNEL.numpy(g, x, **params)


CONV_PART = part_op("conv_part", ("x", "w"), _conv_part)
IMAGE_PART = part_op("conv_image_part", ("g", "w"), _image_part)
KERNEL_PART = part_op("conv_kernel_part", ("g", "x"), _kernel_part)


def _shaped(params: Params, view: RankView) -> Params:
    return {**params, "shape": view.results[0].shape}


def _image_block(reach: tuple[int, ...], places: tuple[int, ...], params: Params, view: RankView) -> Params:
    g, box = view.operands[0], view.results[0]
    assert g is not None
    first = [o * s for o, s in zip(g.offset[2:], params["stride"], strict=True)]
    starts = tuple(o - f for o, f in zip(box.offset[2:], first, strict=True))
    return {**{k: v for k, v in params.items() if k != "image"}, "shape": box.shape, "starts": starts}


# ----- rules ------------------------------------------------------------------------------------------------------------


@rule(c.CONV)
def _conv(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    x, w, y = avals[0].shape, avals[1].shape, out_avals[0].shape
    batch = letters.new(x[0])
    outs = _channels(letters, w[0], params)
    ins = _channels(letters, x[1], params, "sum")
    kernel, places = letters.many(w[2:], whole=True), letters.many(y[2:])
    seen = ins if params["groups"] == 1 else letters.new(w[1], whole=True)
    part = PartCall(_factors(places), CONV_PART, _shaped)
    image = _halo(places, w[2:], params)
    return letters.rule(
        [(batch, ins, *image), (outs, seen, *kernel)], [(batch, outs, *places)], [(0,), (1,)], part=part
    )


@rule(c.CONV_IMAGE)
def _image(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    y, w, x = avals[0].shape, avals[1].shape, out_avals[0].shape
    batch = letters.new(y[0])
    outs = _channels(letters, y[1], params, "sum")
    ins = _channels(letters, x[1], params)
    kernel, image = letters.many(w[2:], whole=True), letters.many(x[2:])
    seen = ins if params["groups"] == 1 else letters.new(w[1], whole=True)
    reach = _reaches(w[2:], params)
    places = [
        Dim(d.factor, 1, Window("unconv", (s, r, n)))
        for d, s, r, n in zip(image, params["stride"], reach, y[2:], strict=True)
    ]
    part = PartCall(_factors(image), IMAGE_PART, functools.partial(_image_block, tuple(reach), tuple(y[2:])))
    return letters.rule(
        [(batch, outs, *places), (outs, seen, *kernel)], [(batch, ins, *image)], [(0,), (1,)], part=part
    )


@rule(c.CONV_KERNEL)
def _kernel(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    y, x, w = avals[0].shape, avals[1].shape, out_avals[0].shape
    batch = letters.new(y[0], reduce="sum")
    outs = _channels(letters, y[1], params)
    ins = _channels(letters, x[1], params)
    kernel, places = letters.many(w[2:], whole=True), letters.many(y[2:], reduce="sum")
    seen = ins if params["groups"] == 1 else letters.new(w[1], whole=True)
    part = PartCall(_factors(places), KERNEL_PART, _shaped)
    image = _halo(places, w[2:], params)
    return letters.rule(
        [(batch, outs, *places), (batch, ins, *image)], [(outs, seen, *kernel)], [(0,), (1,)], part=part
    )
