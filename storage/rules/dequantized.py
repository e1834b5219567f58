"""Quantised weights as the numbers that they stand for: integers or float8 times the scale of their block.

``y = (x - zero) * scale``, where element ``i`` along a dimension belongs to block ``i // block`` and the last block may
be short. DeepSeek-V3 stores ``weight`` in float8_e4m3fn with ``weight_scale_inv``, one float32 for each 128 × 128
block, by which the weight is multiplied in spite of the name (its ``kernel.py``: ``y = x * s``). compressed-tensors
stores ``weight_scale`` for the tensor, for each row, or for each group of a row, and where it is not symmetric
``weight_zero_point`` (its ``dequantize``: ``(x_q - zero_point) * scale``). Its format ``pack-quantized`` stores
``weight_packed``: int32, of which each holds 32 / bits numbers of a row (its ``pack_to_int32``); zero points are packed
along the columns.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import CheckpointDTypeError, CheckpointError
from ..format import dtypes
from ..readers.shared import once
from ..readers.tensor import read_into
from .casting import cast
from .lazy_tensors import Converted, DerivedTensor, every, of_source


def is_quantized(dtype: np.dtype) -> bool:
    """Whether weights of this dtype need a scale: 8-bit integers and float8."""
    return dtype.itemsize == 1 and dtype.kind != "b" and dtype.name != "float8_e8m0fnu"


def scale_beside(name: str, dtype: np.dtype, names: Container[str]) -> str | None:
    """The array that says what the numbers of a quantised one stand for: its scale, or its zero point.

    >>> scale_beside("m.q", np.dtype("int8"), ["m.q", "m.scale"])
    'm.scale'
    """
    module, _, last = name.rpartition(".")
    if not is_quantized(dtype) and (dtype.kind not in "iu" or last not in ("weight", "qweight", "weight_packed")):
        return None
    stem, dot = name.removesuffix("_packed"), module and "."
    ends = [f"{stem}{end}" for end in ("_scale", "_scale_inv", "_zero_point", ".absmax")]
    ends += [f"{name.removesuffix('_blocks')}_scales", f"{module}{dot}SCB", f"{module}{dot}scales"]
    ends += [f"{module}{dot}scale"] if last == "q" else []  # of `quantize`
    return next((s for s in ends if s in names), None)


def is_lone_float8(name: str, dtype: np.dtype, names: Container[str]) -> bool:
    """Whether an array of float8 has no scales beside it, so that its numbers are its values."""
    return dtype.name in dtypes.FLOATS and is_quantized(dtype) and scale_beside(name, dtype, names) is None


@dataclass(frozen=True, slots=True)
class Unpacked(DerivedTensor):
    """Signed ``bits``-bit numbers, several packed in each int32 of ``source`` along ``axis``.

    The first is in the lowest bits; each is stored plus half its range."""

    name: str
    source: Any
    axis: int
    bits: int

    dtype: ClassVar[np.dtype] = np.dtype(np.int8)
    per_element: ClassVar[int] = 6
    shape = property(lambda self: self._longer(self.source.shape))
    chunk = property(lambda self: self._longer(self.source.chunk))

    def _longer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(n * (32 // self.bits) if d == self.axis else n for d, n in enumerate(shape))

    def needs(self, box: Box) -> Box:
        per, offset, shape = 32 // self.bits, list(box.offset), list(box.shape)
        offset[self.axis] //= per
        shape[self.axis] = -(-box.stop[self.axis] // per) - offset[self.axis]
        return Box(tuple(offset), tuple(shape))

    def _read(self, box: Box, out: np.ndarray) -> int:
        there = self.needs(box)
        held, nbytes = read_into(self.source, there)
        at = np.arange(box.offset[self.axis], box.stop[self.axis])
        word, place = np.divmod(at, 32 // self.bits)
        shifts = (place * self.bits).astype(np.uint32).reshape([-1 if d == self.axis else 1 for d in range(held.ndim)])
        words = held.view(np.uint32).take(word - there.offset[self.axis], self.axis)
        raised = (words >> shifts) & np.uint32((1 << self.bits) - 1)
        out[...] = raised.astype(np.int16) - (1 << (self.bits - 1))
        return nbytes


MARK = "meshtape.quantized"
"""The name, beside the arrays of a record of `meshtape.storage.quantize`, of the number of its bits."""
MARKS = (MARK, "dtype", "length", "times")
"""The members of such a record that are no arrays."""


def marks_of(sources: Iterable[str], names: Container[str]) -> set[str]:
    """Which of the names mark these sources as the arrays of a record: no marks of what the record stands for."""
    records = [s[:-1] for s in sources if s.endswith(".q") and f"{s[:-1]}{MARK}" in names]
    return {f"{record}{mark}" for record in records for mark in MARKS if f"{record}{mark}" in names}


def dequantizes(tensor: Any) -> bool:
    """Whether a tensor holds the numbers that quantised weights stand for."""
    return any(isinstance(t, Dequantized) for t in every(tensor))


def not_followed(key: str, names: Container[str]) -> str | None:
    """The reason to refuse a weight or scale whose name says that the numbers are no factors of a product."""
    base = key.removesuffix("_packed")
    if f"{base}_g_idx" in names:
        return (
            f"the columns of {key!r} belong to groups in the order of '{base}_g_idx'; write the model anew without "
            "activation ordering"
        )
    if f"{key}.quant_map" in names:
        return (
            f"{key!r} holds places in the table '{key}.quant_map' (nf4 or fp4 of bitsandbytes); let bitsandbytes write "
            "the full weights"
        )
    if key.endswith(".qweight"):
        return (
            f"{key!r} is in the layout of GPTQ or AWQ, which differs by their versions; let the tool that made it "
            "write the full weights"
        )
    if key.endswith(".SCB"):
        return f"{key!r} is 127 times the scale (LLM.int8 of bitsandbytes); let bitsandbytes write the full weights"
    return None


@dataclass(frozen=True, slots=True)
class Dequantized(DerivedTensor):
    """``source``, less ``zero``, times ``scale``, one of each for a ``block``; reads those that a box meets."""

    name: str
    source: Any
    scale: Any
    zero: Any
    block: tuple[int, ...]
    dtype: np.dtype
    roots: bool = False  # a negative scale is one of roots, as `quantize` makes them
    casts: ClassVar[bool] = True

    per_element: ClassVar[int] = 4
    shape, chunk = of_source("shape"), of_source("chunk")

    def sources(self) -> tuple[Any, ...]:
        return (self.source, self.scale) if self.zero is None else (self.source, self.scale, self.zero)

    def _blocks(self, box: Box) -> Box:
        first = tuple(o // b for o, b in zip(box.offset, self.block, strict=True))
        return Box(first, tuple(-(-e // b) - f for e, b, f in zip(box.stop, self.block, first, strict=True)))

    def only(self, box: Box) -> Dequantized:
        if not box.size:
            return self
        blocks = self._blocks(box)
        zero = None if self.zero is None else once("only", self.zero, blocks)
        return replace(self, source=once("only", self.source, box), scale=once("only", self.scale, blocks), zero=zero)

    def planned(self, box: Box) -> int:
        if not box.size:
            return 0
        boxes = (box, *[self._blocks(box)] * 2)
        return sum(once("planned", s, b, again=0) for s, b in zip(self.sources(), boxes, strict=False))

    def _read(self, box: Box, out: np.ndarray) -> int:
        blocks = self._blocks(box)
        x, nbytes = read_into(self.source, box)
        places = np.ix_(
            *(
                np.arange(o, e) // b - f
                for o, e, b, f in zip(box.offset, box.stop, self.block, blocks.offset, strict=True)
            )
        )

        def spread(tensor: Any, dtype: Any) -> np.ndarray:
            nonlocal nbytes
            held, n = read_into(tensor, blocks)
            nbytes += n
            return held.astype(dtype)[places]

        # float32 holds every product of an 8-bit number and a scale that a model has; a scale that could pass its range
        # is told by the cast.
        scale = spread(self.scale, np.float64 if self.scale.dtype == np.float64 else np.float32)
        with np.errstate(all="ignore"):
            wide = np.float64 if scale.size and not np.abs(scale).max() < 1e30 else scale.dtype
            y = x.astype(wide)
            if self.zero is not None:
                y -= spread(self.zero, wide)
            y = np.where(scale < 0, ((y + 127) * scale) ** 2, y * scale) if self.roots else y * scale
        out[...] = cast(self.name, y, self.dtype, box.offset)
        return nbytes


# ----- casts of whole checkpoints, which have to mind such weights ----------------------------------------------------


def floating(dtype: Any) -> np.dtype:
    wanted = dtypes.by_name(dtype)
    if wanted.name not in dtypes.FLOATS:
        raise CheckpointError(
            f"dtype= converts the floating arrays, so it is one of {', '.join(dtypes.FLOATS)}, not {wanted}"
        )
    return wanted


def converted(arrays: Mapping[str, Any], wanted: np.dtype) -> dict[str, Any]:
    """Tensors whose floating ones have this dtype, other than scales of quantised weights: rounded, they would change
    all of these. Refuses such weights that are floating: their values are numbers times a scale beside them, which a
    cast would lose."""
    scales = set()
    for name, scale in scaled(arrays):
        scales.add(scale)
        t = arrays[name]
        if t.dtype.name.startswith("float8") and t.dtype != wanted:
            raise CheckpointDTypeError(
                f"key {name!r} is {t.dtype.name} with its scale in {scale!r}: dtype= would convert its numbers without "
                f"the scale. Give the rule '{name}, {scale} -> {name}, dequantize()' with the block= of the scales, "
                "leave dtype= out, or leave such arrays out with drop="
            )
    fixed = scales | {n for n, t in arrays.items() if t.dtype == wanted or t.dtype.name not in dtypes.FLOATS}
    return {n: t if n in fixed else Converted(n, t, wanted) for n, t in arrays.items()}


def scaled(arrays: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(weights, their scales) by name, of those that are quantised."""
    for name, t in arrays.items():
        if (scale := scale_beside(name, t.dtype, arrays)) is not None:
            yield name, scale
