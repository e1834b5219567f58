"""Zarr data types for ml_dtypes' floats, under the names that TensorStore uses.

zarr-python knows none of them; registered, as they are when this module is imported, ``zarr.open`` reads and writes
them. This module imports zarr, so it is loaded only where zarr is used, and whoever uses zarr takes it from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import ml_dtypes
import numpy as np

from ..base.waiting import uninterrupted

with uninterrupted():
    import zarr as zarr
    from zarr.core.dtype.common import HasEndianness, HasItemSize
    from zarr.dtype import DataTypeValidationError, ZDType, data_type_registry


class _Float(ZDType[Any, Any], HasItemSize):
    """Base of the three types. A fill value is a JSON number, or one of "NaN", "Infinity", "-Infinity"."""

    _zarr_v3_name: ClassVar[str]
    _scalar: ClassVar[type]

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        if np.dtype(dtype) == np.dtype(cls._scalar):
            return cls()
        raise DataTypeValidationError(f"{dtype} is not {cls._zarr_v3_name}")

    def to_native_dtype(self) -> Any:
        return np.dtype(self._scalar)

    @property
    def item_size(self) -> int:
        return np.dtype(self._scalar).itemsize

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise DataTypeValidationError(f"Zarr v2 has no data type {cls._zarr_v3_name}")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data == cls._zarr_v3_name:
            return cls()
        raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name!r}")

    def to_json(self, zarr_format: Literal[2, 3]) -> Any:
        if zarr_format == 3:
            return self._zarr_v3_name
        raise ValueError(f"Zarr v2 has no data type {self._zarr_v3_name}")

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, (int, float, np.number, self._scalar))

    def cast_scalar(self, data: object) -> Any:
        if not self._check_scalar(data):
            raise TypeError(f"cannot make a {self._zarr_v3_name} of {data!r}")
        return self._scalar(data)

    def default_scalar(self) -> Any:
        return self._scalar(0)

    def from_json_scalar(self, data: Any, *, zarr_format: Literal[2, 3]) -> Any:
        if isinstance(data, str) and data not in ("NaN", "Infinity", "-Infinity"):
            # The specification also allows the bits, as in "0x7fc0".
            raw = int(data, 16).to_bytes(self.item_size, "little")
            return np.frombuffer(raw, np.dtype(self._scalar))[0]
        return self._scalar(float(data))

    def to_json_scalar(self, data: object, *, zarr_format: Literal[2, 3]) -> float | str:
        value = float(self.cast_scalar(data))
        if value != value:
            return "NaN"
        if value in (float("inf"), float("-inf")):
            return "Infinity" if value > 0 else "-Infinity"
        return value


# HasEndianness makes zarr write `"endian": "little"` in the bytes codec, which TensorStore demands for two-byte types.
@dataclass(frozen=True, kw_only=True)
class BFloat16(_Float, HasEndianness):
    dtype_cls = type(np.dtype(ml_dtypes.bfloat16))
    _zarr_v3_name = "bfloat16"
    _scalar = ml_dtypes.bfloat16


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FN(_Float):
    dtype_cls = type(np.dtype(ml_dtypes.float8_e4m3fn))
    _zarr_v3_name = "float8_e4m3fn"
    _scalar = ml_dtypes.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class Float8E5M2(_Float):
    dtype_cls = type(np.dtype(ml_dtypes.float8_e5m2))
    _zarr_v3_name = "float8_e5m2"
    _scalar = ml_dtypes.float8_e5m2


def register() -> None:
    """Make zarr-python know the types, unless it, or another library, already does."""
    for cls in (BFloat16, Float8E4M3FN, Float8E5M2):
        if cls._zarr_v3_name not in data_type_registry.contents:
            data_type_registry.register(cls._zarr_v3_name, cls)


register()
