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
_CURE = "Write its real numbers first: xarray.open_zarr(…).drop_encoding().to_zarr(…)"


def advice(key: str) -> str:
    """The way out where an attribute of `MEANING` is in the way."""
    return "Write one in the units of the other first" if key in ("units", "calendar") else _CURE


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
    """A named dimension. ``part``: its length as stored, or the parts of such that it has now."""

    name: str
    part: Any

    @property
    def cut(self) -> bool:
        return not isinstance(self.part, int)


@dataclass(frozen=True)
class Labels:
    """The attributes of an array, and its dimensions: None for one without a name, () where none has one. ``weight`` is
    the sum of the weights with which stored arrays make it: a time is one only where that is 1."""

    attributes: Mapping[str, Any] = field(default_factory=dict)
    dims: tuple[Dim | None, ...] = ()
    weight: float = 1.0

    @classmethod
    def said(cls, text: str, shape: Sequence[int]) -> Labels:
        """Those in a text of `described`."""
        held = json.loads(text or "{}")
        return cls.given(held.get("attributes", {}), held.get("dimension_names"), shape)

    @classmethod
    def given(cls, attributes: Mapping[str, Any], names: Sequence[str | None] | None, shape: Sequence[int]) -> Labels:
        dims = zip(names or (), shape, strict=False)
        return cls(attributes, tuple(None if n is None else Dim(n, length) for n, length in dims))

    def text(self, name: str, rank: int, own: bool = False) -> str:
        """Those of an array as `described` writes them. ``own``: a dimension without a name is called after it."""
        # A NaN is no JSON, and says nothing there.
        held = {k: v for k, v in self.attributes.items() if k not in PACKING or v == v}
        names = [None if d is None else d.name for d in self.dims]
        if own and not abs(self.weight - 1) < 1e-6 and _SINCE in str(held.get("units")):
            held["units"] = held["units"].partition(_SINCE)[0]  # a difference of times is none
            held.pop("calendar", None)
        if own and any(names):
            names = [f"{name}.{i}" if n is None else n for i, n in enumerate(names)]
        text = described(held, names, rank)
        if held and not text:  # those that cannot travel take no others with them
            held = {k: v for k, v in held.items() if described({k: v})}
            text = described(held, names, rank) or described({k: held[k] for k in MEANING if k in held}, names, rank)
        return text

    def sliced(self, start: Sequence[int], before: Sequence[int], shape: Sequence[int]) -> Labels:
        """Those of a part of an array of another shape."""
        dims = [
            d if d is None or (not a and n == m) else Dim(d.name, (d.part, a, m))
            for d, a, n, m in zip(self.dims, start, before, shape, strict=False)
        ]
        return replace(self, dims=tuple(dims))

    def ordered(self, axes: Sequence[int | None]) -> Labels:
        """Those of an array whose dimension i is dimension ``axes[i]`` of this, or none of them."""
        return replace(self, dims=tuple(None if a is None else self.dims[a] for a in axes) if self.dims else ())

    def cast(self, name: str, old: np.dtype, new: np.dtype) -> Labels:
        """Those of an array in another dtype, whose fill values are in it, too.

        Raises
        ------
        CheckpointDTypeError
            The dtype does not hold them, so masked elements would become numbers.
        """
        held = dict(self.attributes)
        for key in [k for k in ("_FillValue", "missing_value", "_Unsigned") if k in held]:
            try:
                with np.errstate(all="ignore"):
                    before = np.asarray(plain(held[key])).astype(old)
                    after = before.astype(new)
                known, made, nan = before.tolist(), after.tolist(), bool(np.all(before != before))
            except (TypeError, ValueError, OverflowError):
                known, made, nan = held[key], None, False
            if nan and new.kind != "f":
                del held[key]  # a NaN stays one, or is an error; readers know none of bfloat16
            elif key == "_Unsigned" or new.kind == "c" or (made != known and not nan):
                raise CheckpointDTypeError(
                    f"key {name!r} has the attribute {key!r} = {plain(held[key])!r:.40}, which cannot follow it from "
                    f"{old} to {new}: masked elements would become numbers. {_CURE}"
                )
            else:
                double = key == "_FillValue" and new.name in dtypes.FLOATS and isinstance(made, float)
                held[key] = base64.b64encode(struct.pack("<d", made)).decode() if double else made
        return replace(self, attributes=held)

    @classmethod
    def agreed(cls, name: str, parts: Sequence[Labels], weight: float = 1.0) -> Labels:
        """What several arrays say alike.

        Raises
        ------
        CheckpointDTypeError
            Equal numbers stand for other things in one of them.
        """
        if not parts:
            return cls()
        first, same = parts[0], dict(parts[0].attributes)
        for other in parts[1:]:
            for key in {**first.attributes, **other.attributes}:
                ours, theirs = first.attributes.get(key), other.attributes.get(key)
                means = key in MEANING
                if means and meant(key, ours) != meant(key, theirs):
                    raise CheckpointDTypeError(
                        f"key {name!r} is made of arrays of which one has the attribute {key!r} = {plain(ours)!r:.40}, "
                        f"and one {plain(theirs)!r:.40}, so equal numbers stand for other things. {advice(key)}"
                    )
                if key not in other.attributes or (not means and ours != theirs):
                    same.pop(key, None)
        rows = zip(*(p.dims for p in parts), strict=False)
        return cls(same, tuple(row[0] if all(d == row[0] for d in row) else None for row in rows), weight)

    @classmethod
    def joined(cls, name: str, parts: Sequence[Labels], axis: int) -> Labels:
        """Those of arrays one after the other."""
        along = [p.dims[axis] if p.dims else None for p in parts]
        made = cls.agreed(name, parts)
        if not made.dims or None in along or len({d.name for d in along if d}) > 1:
            return made
        dim = Dim(along[0].name, tuple(d.part for d in along if d))  # type: ignore[union-attr]
        return replace(made, dims=(*made.dims[:axis], dim, *made.dims[axis + 1 :]))


Reader = Callable[[Any], Labels]
"""The labels of a stored tensor."""


def given(tensor: Any) -> Labels:
    """The labels that a stored tensor has."""
    if hasattr(tensor, "attributes"):
        return Labels.given(tensor.attributes, tensor.dims, tensor.shape)
    return Labels.said(getattr(tensor, "said", ""), tensor.shape)
