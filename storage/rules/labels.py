"""Attributes and names of dimensions that another writer gave an array, and how they follow where it is cut, cast,
transposed, joined or summed."""

from __future__ import annotations

import base64
import contextlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ...arrays.core.errors import CheckpointDTypeError
from ..format import dtypes
from ..format.zarr_format import described

PACKING = ("scale_factor", "add_offset", "_FillValue", "missing_value")
"""Attributes by which readers of CF conventions, such as xarray, make other numbers of the stored ones."""
MEANING = (*PACKING, "_Unsigned", "units", "calendar")  # with which equal numbers stand for other things
_NEUTRAL = {"scale_factor": 1, "add_offset": 0}
_SINCE = " since "  # in the units of times
CURE = "Write real numbers of one unit first: xarray.open_zarr(…).drop_encoding().to_zarr(…)"


def plain(value: Any) -> Any:
    """The value of an attribute; xarray writes fill values of floats in base64."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, struct.error):
            return struct.unpack("<d", base64.b64decode(value, validate=True))[0]
    return value


def meant(key: str, value: Any) -> Any:
    """The value of an attribute of `MEANING`; None where numbers mean the same without it."""
    held = plain(value) if key in PACKING else value
    return None if held != held or held in (_NEUTRAL.get(key), "NaN") else held


class Dim(NamedTuple):
    """A named dimension. ``part``: its length as stored, or of one that was cut a tuple that tells the part."""

    name: str
    part: Any


@dataclass(frozen=True)
class Labels:
    """The attributes of an array, and its dimensions: None for one without a name, () where none has one. ``weight`` is
    the sum of the weights with which stored arrays make it: a time is one only where that is 1."""

    attributes: Mapping[str, Any] = field(default_factory=dict)
    dims: tuple[Dim | None, ...] = ()
    weight: float = 1.0

    def text(self, name: str, rank: int) -> str:
        """Those of an array as `described` writes them. A dimension without a name beside others is called after it."""
        # A NaN is no JSON, and says nothing there.
        held = {k: v for k, v in self.attributes.items() if k not in PACKING or v == v}
        if not abs(self.weight - 1) < 1e-6 and _SINCE in str(held.get("units")):
            held["units"] = held["units"].partition(_SINCE)[0]  # a difference of times is none
            held.pop("calendar", None)
        names = [f"{name}.{i}" if d is None else d.name for i, d in enumerate(self.dims)] if any(self.dims) else None
        text = described(held, names, rank)
        if held and not text:  # those that cannot travel take no others with them
            held = {k: v for k, v in held.items() if described({k: v})}
            text = described(held, names, rank) or described({k: held[k] for k in MEANING if k in held}, names, rank)
        return text

    def sliced(self, start: Sequence[int], before: Sequence[int], shape: Sequence[int]) -> Labels:
        """Those of a part of an array of another shape."""
        parts = zip(self.dims, start, before, shape, strict=False)
        return replace(self, dims=tuple(d if not d or n == m else Dim(d.name, (d.part, a, m)) for d, a, n, m in parts))

    def cast(self, name: str, old: np.dtype, new: np.dtype) -> Labels:
        """Those of an array in another dtype, whose fill values are in it, too. `CheckpointDTypeError` where it does
        not hold them, so that masked elements would become numbers."""
        held = dict(self.attributes)
        for key in [k for k in ("_FillValue", "missing_value", "_Unsigned") if k in held]:
            try:
                with np.errstate(all="ignore"):
                    before = np.asarray(plain(held[key])).astype(old)
                    made = before.astype(new).tolist()
                nan, same = bool(np.all(before != before)), made == before.tolist() and new.kind != "c"
            except (TypeError, ValueError, OverflowError):
                nan = same = False
            if nan and new.kind != "f":
                del held[key]  # a NaN stays one, or is an error; readers know none of bfloat16
            elif key == "_Unsigned" or not (same or nan):
                raise CheckpointDTypeError(
                    f"key {name!r} has the attribute {key!r} = {plain(held[key])!r:.40}, which cannot follow it from "
                    f"{old} to {new}: masked elements would become numbers. {CURE}"
                )
            else:
                double = key == "_FillValue" and new.name in dtypes.FLOATS
                held[key] = base64.b64encode(struct.pack("<d", made)).decode() if double else made
        return replace(self, attributes=held)

    @classmethod
    def agreed(cls, name: str, parts: Sequence[Labels], weight: float = 1.0) -> Labels:
        """What several arrays say alike. `CheckpointDTypeError` where equal numbers stand for other things in one."""
        same = {}
        for key in dict.fromkeys(k for p in parts for k in p.attributes):
            values = [p.attributes.get(key) for p in parts]
            held = [meant(key, v) for v in values] if key in MEANING else values
            odd = next((v for v, one in zip(values, held, strict=True) if one != held[0]), same)
            if odd is not same and key in MEANING:
                raise CheckpointDTypeError(
                    f"key {name!r} is made of arrays of which one has the attribute {key!r} = {plain(values[0])!r:.40} "
                    f"and one {plain(odd)!r:.40}, so equal numbers stand for other things. {CURE}"
                )
            if odd is same and all(key in p.attributes for p in parts):
                same[key] = values[0]
        rows = zip(*(p.dims for p in parts), strict=False)
        return cls(same, tuple(row[0] if all(d == row[0] for d in row) else None for row in rows), weight)


Reader = Callable[[Any], Labels]
"""The labels of a stored tensor."""


def given(tensor: Any, said: str | None = None) -> Labels:
    """The labels that a stored tensor has; ``said``: its text of `described`, where it is at hand."""
    attributes, names = getattr(tensor, "attributes", None), getattr(tensor, "dims", None)
    if attributes is None:
        held = json.loads((getattr(tensor, "said", "") if said is None else said) or "{}")
        attributes, names = held.get("attributes", {}), held.get("dimension_names")
    dims = zip(names or (), tensor.shape, strict=False)
    return Labels(attributes, tuple(None if n is None else Dim(n, length) for n, length in dims))
