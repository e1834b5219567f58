"""Factor mappings of convolution: images of a batch and channels may be split, places within an image may not.

Splitting the channels that are summed over leaves a sum to be made; channels of several groups stay together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...arrays import convolution as c
from ...arrays._op import Op
from ...arrays.program import ShapeDtype
from ..factors import Dim, FactorRule, Letters, rule

Avals = Sequence[Any]
Params = Mapping[str, Any]


def _channels(letters: Letters, n: int, params: Params, reduce: str | None = None) -> Dim:
    several = params["groups"] > 1
    return letters.new(n, whole=several, reduce=None if several else reduce)


@rule(c.CONV)
def _conv(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    x, w, y = avals[0].shape, avals[1].shape, out_avals[0].shape
    batch = letters.new(x[0])
    outs = _channels(letters, w[0], params)
    ins = _channels(letters, x[1], params, "sum")
    image, kernel, places = (letters.many(s[2:], whole=True) for s in (x, w, y))
    seen = ins if params["groups"] == 1 else letters.new(w[1], whole=True)
    return letters.rule([(batch, ins, *image), (outs, seen, *kernel)], [(batch, outs, *places)], [(0,), (1,)])


@rule(c.CONV_IMAGE)
def _image(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    y, w, x = avals[0].shape, avals[1].shape, out_avals[0].shape
    batch = letters.new(y[0])
    outs = _channels(letters, y[1], params, "sum")
    ins = _channels(letters, x[1], params)
    image, kernel, places = (letters.many(s[2:], whole=True) for s in (x, w, y))
    seen = ins if params["groups"] == 1 else letters.new(w[1], whole=True)
    return letters.rule([(batch, outs, *places), (outs, seen, *kernel)], [(batch, ins, *image)], [(0,), (1,)])


@rule(c.CONV_KERNEL)
def _kernel(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    y, x, w = avals[0].shape, avals[1].shape, out_avals[0].shape
    batch = letters.new(y[0], reduce="sum")
    outs = _channels(letters, y[1], params)
    ins = _channels(letters, x[1], params)
    image, kernel, places = (letters.many(s[2:], whole=True) for s in (x, w, y))
    seen = ins if params["groups"] == 1 else letters.new(w[1], whole=True)
    return letters.rule([(batch, outs, *places), (batch, ins, *image)], [(outs, seen, *kernel)], [(0,), (1,)])
