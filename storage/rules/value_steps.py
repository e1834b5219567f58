"""The steps of key rules that make values: `Cast`, `Pad`, `Init` and `Dequantize`. The others only move them (see
``steps``)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays.core.errors import CheckpointDTypeError, CheckpointShapeError, RuleConflict
from ..format import dtypes
from .casting import Tally, cast, exact, is_float, tallied
from .dequantized import Dequantized, Unpacked, is_quantized
from .growing import GrownRows
from .lazy_tensors import Converted, Filled, Joined, Reshaped, Sliced
from .step import NotInvertible, Step, axis_of, expect, the_one
from .steps import Slice


def _filled(name: str, shape: tuple[int, ...], dtype: np.dtype, value: Any) -> Filled:
    """An array of one value, which its dtype must hold."""
    try:
        # As wide as Python's own number: a large integer in an integer dtype must not pass through a float.
        wide = np.asarray(value, object if isinstance(value, int) and dtype.kind in "iu" else np.float64)
        if wide.dtype == object:
            limits = np.iinfo(dtype)
            lost = not limits.min <= value <= limits.max
        else:
            tally = Tally()
            tallied(tally, lambda: cast(name, wide, dtype, ()))
            lost = bool(tally)
    except OverflowError:
        lost = True
    if lost:
        raise CheckpointDTypeError(f"{dtype} cannot hold the value {value!r}; choose another value, or a wider dtype")
    return Filled(name, shape, dtype, value)


@dataclass(frozen=True, slots=True)
class Cast(Step):
    """``back`` names the dtype of the inverse, where the way there loses digits and that is accepted.

    ``allow_overflow``: values that the dtype cannot hold are accepted too; otherwise they raise `Lossy` when they are
    read.

    float64 becomes bfloat16 or float8 through float32, as in ml_dtypes and PyTorch: a value next to a tie may be
    rounded to its other neighbour.

    >>> from meshtape.storage import Rules
    >>> Rules("w -> w, cast(float16, allow_overflow=true)").on_arrays({"w": np.float32([1, 7e4])})["w"]
    array([ 1., inf], dtype=float16)
    """

    dtype: str
    back: str | None = None
    allow_overflow: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtypes.name_of(self.dtype))
        object.__setattr__(self, "back", dtypes.name_of(self.back))
        Step.__post_init__(self)

    def apply(self, tensors: list[Any], targets: int | None) -> list[Any]:
        dtype = dtypes.by_name(self.dtype)
        return [t if t.dtype == dtype else Converted(t.name, t, dtype, self.allow_overflow) for t in tensors]

    def inverse(self, before: list[Any]) -> Step:
        if self.back is not None:
            return Cast(self.back, self.dtype)
        dtype = the_one([t.dtype.name for t in before], "dtypes")
        if not exact(dtype, dtypes.by_name(self.dtype)):
            raise NotInvertible(
                f"cast from {dtype} to {self.dtype} loses digits; say cast({self.dtype}, back={dtype}) to accept that"
            )
        return Cast(dtype, self.dtype)


@dataclass(frozen=True, slots=True)
class Pad(Step):
    """``fill``: ``"value"``; ``"mean"`` of the rows there are, column by column; or ``"noise"``, drawn with ``seed``
    and their mean and deviation.

    >>> from meshtape.storage import Rules
    >>> rows = np.float32([[0, 4], [2, 8]])
    >>> Rules("e -> e, pad(axis=0, size=3, fill=mean)").on_arrays({"e": rows})["e"].tolist()
    [[0.0, 4.0], [2.0, 8.0], [1.0, 6.0]]
    """

    axis: int
    size: int
    value: float = 0
    fill: str = "value"
    seed: int = 0

    def apply(self, tensors: list[Any], targets: int | None) -> list[Any]:
        return [self._pad(t) for t in tensors]

    def _pad(self, t: Any) -> Any:
        k = axis_of(self.axis, t)
        if self.size < t.shape[k]:
            raise CheckpointShapeError(
                f"{t.name!r} has {t.shape[k]} along axis {k} already, more than pad's {self.size}"
            )
        rest = (*t.shape[:k], self.size - t.shape[k], *t.shape[k + 1 :])
        if self.fill == "value":
            new: Any = _filled(t.name, rest, t.dtype, self.value)
        elif self.fill not in ("mean", "noise") or self.value != 0 or self.seed < 0:
            raise RuleConflict(
                "pad fills with fill=value (and value=), fill=mean, or fill=noise (and a seed= of 0 or more); got "
                f"{self}"
            )
        elif t.dtype.name not in dtypes.FLOATS or not t.shape[k]:
            raise CheckpointDTypeError(
                f"{t.name!r} is {t.dtype} of shape {t.shape}: fill={self.fill} needs rows of a floating dtype; pad it "
                "with value="
            )
        else:
            new = GrownRows(t.name, t, k, rest[k], self.fill == "noise", self.seed)
        return Joined.of(t.name, [t, new], k)

    def inverse(self, before: list[Any]) -> Step:
        return Slice(self.axis, 0, the_one([t.shape[axis_of(self.axis, t)] for t in before], "lengths"))


@dataclass(frozen=True, slots=True)
class Init(Step):
    shape: tuple[int, ...]
    dtype: str
    value: float = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtypes.name_of(self.dtype))
        Step.__post_init__(self)

    def apply(self, tensors: list[Any], targets: int | None) -> list[Any]:
        expect(0, tensors, "init")
        if min(self.shape, default=0) < 0:
            raise CheckpointShapeError(f"init: {list(self.shape)} is not a shape")
        return [_filled("init", self.shape, dtypes.by_name(self.dtype), self.value)]

    def inverse(self, before: list[Any]) -> Step:
        # The inverse of a whole rule drops the array; there is no step from one array to none.
        raise NotInvertible("init makes an array out of nothing")


@dataclass(frozen=True, slots=True)
class Dequantize(Step):
    """``block``: the lengths that one scale is for, along each dimension; left out where a scale is for the whole or
    each element of a dimension.

    ``bits``: the weights are int32, of which each holds several numbers of a row with so many bits (2, 4 or 8), as
    compressed-tensors packs them. The result has the dtype of the scales, or ``dtype``.

    >>> from meshtape.storage import Rules
    >>> arrays = {"w": np.int8([[1, 2, 3], [4, 5, 6]]), "s": np.float32([[0.5, 2]])}
    >>> Rules("w, s -> w, dequantize(block=[2, 2])").on_arrays(arrays)["w"]
    array([[ 0.5,  1. ,  6. ],
           [ 2. ,  2.5, 12. ]], dtype=float32)
    """

    block: tuple[int, ...] | None = None
    dtype: str | None = None
    bits: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtypes.name_of(self.dtype))
        Step.__post_init__(self)
        if self.bits not in (None, 2, 4, 8):
            raise RuleConflict(f"dequantize unpacks numbers of 2, 4 or 8 bits, not {self.bits}")

    def apply(self, tensors: list[Any], targets: int | None) -> list[Any]:
        if len(tensors) not in (2, 3):
            raise RuleConflict(
                f"dequantize takes weights and scales, and zero points where there are any; got {len(tensors)} arrays"
            )
        weight, scale, *zero = tensors
        if self.bits is not None:
            weight, zero = self._unpacked(weight, 1), [self._unpacked(z, 0) for z in zero]
        if not is_quantized(weight.dtype):
            raise CheckpointDTypeError(
                f"{weight.name!r} is {weight.dtype}; dequantize takes int8, uint8 and float8, and with bits= numbers "
                "that compressed-tensors has packed"
            )
        if not is_float(scale.dtype):
            raise CheckpointDTypeError(f"{scale.name!r} is {scale.dtype}; scales are floating")
        dtype = scale.dtype if self.dtype is None else dtypes.by_name(self.dtype)
        if dtype.name not in dtypes.FLOATS:
            raise CheckpointDTypeError(
                f"dequantize makes a floating dtype ({', '.join(dtypes.FLOATS)}), not {dtype}; give dtype="
            )
        ours = weight.name.split(".")[-1] == "q" and scale.name == f"{weight.name[:-1]}scale"  # of `quantize`
        ours = ours and tuple(scale.shape) == (*weight.shape[:-1], 1)
        if ours and weight.dtype == np.uint8:
            raise CheckpointDTypeError(
                f"{weight.name!r} holds rows of four bits, two a byte: restore them by "
                "mt.storage.dequantize(mt.load(…))"
            )
        block = self._block(weight, scale)
        placed = [self._placed(weight, t, block) for t in (scale, *zero)]
        return [Dequantized(weight.name, weight, placed[0], placed[1] if zero else None, block, dtype, roots=ours)]

    def _unpacked(self, t: Any, axis: int) -> Unpacked:
        if t.dtype != np.int32 or len(t.shape) != 2:
            raise CheckpointDTypeError(
                f"{t.name!r} is {t.dtype} of shape {t.shape}; dequantize(bits={self.bits}) takes matrices of int32"
            )
        return Unpacked(t.name, t, axis, self.bits or 0)

    def _block(self, weight: Any, scale: Any) -> tuple[int, ...]:
        shape = weight.shape
        if self.block is not None:
            if len(self.block) != len(shape) or min(self.block, default=1) < 1:
                raise CheckpointShapeError(
                    f"{weight.name!r} has shape {shape}; block={list(self.block)} does not fit it"
                )
            return self.block
        if math.prod(scale.shape) == 1:
            return tuple(max(n, 1) for n in shape)
        if len(scale.shape) != len(shape) or any(s not in (1, n) for s, n in zip(scale.shape, shape, strict=True)):
            raise CheckpointShapeError(
                f"{scale.name!r} of shape {scale.shape} does not say which part of {weight.name!r} of shape {shape} "
                "each scale is for; give block=, such as [128, 128] or [1, 64], or reshape the scales first"
            )
        return tuple(1 if s == n else max(n, 1) for s, n in zip(scale.shape, shape, strict=True))

    def _placed(self, weight: Any, t: Any, block: tuple[int, ...]) -> Any:
        """Scales or zero points with a length along each dimension of the weight."""
        wanted = tuple(-(-n // b) for n, b in zip(weight.shape, block, strict=True))
        if tuple(t.shape) == wanted:
            return t
        if math.prod(t.shape) == math.prod(wanted) == 1:
            return Reshaped(t.name, t, wanted)
        if isinstance(t, Unpacked) and t.shape[1] == wanted[1] and 0 < t.shape[0] - wanted[0] < 32 // t.bits:
            return Sliced(t.name, t, (0, 0), wanted)  # the last int32 was not full
        raise CheckpointShapeError(
            f"{weight.name!r} of shape {weight.shape} has blocks of {list(block)}, so {t.name!r} must have the shape "
            f"{wanted}, not {t.shape}"
        )

    def inverse(self, before: list[Any]) -> Step:
        raise NotInvertible("dequantize does not quantise again")
