"""Cotangents and tangents that callers, hooks and users' derivatives give, where their values are."""

from __future__ import annotations

from typing import Any

from ...arrays.core.array import Array
from ...arrays.core.errors import DeviceError
from ...arrays.ops.creation import as_arrays, beside


def beside_value(name: str, given: Any, value: Array) -> Array:
    """A cotangent or tangent as an Array beside its value. Raises :class:`DeviceError` for an Array on another
    device."""
    _, found = as_arrays(value, given)
    at, wanted = beside(found), beside(value)
    if at is not None and wanted is not None and at != wanted:
        raise DeviceError(
            f"[{name}] a cotangent or tangent is on {at}, its value on {wanted}: move it with x.to_device(...)"
        )
    return found
