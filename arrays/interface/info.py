"""The standard's inspection functions of the namespace."""

from __future__ import annotations

from typing import Any

from ..backends.backend import devices
from ..core import dtype_objects as dt
from ..core.devices import Device, default_device, device
from ..core.dtypes import EXTENSIONS, isdtype


class NamespaceInfo:
    """Answers of ``__array_namespace_info__()``."""

    def capabilities(self) -> dict[str, Any]:
        """Boolean indexing and data-dependent shapes work; arrays have at most 64 dimensions, as in NumPy."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> Device:
        """Where creation functions put arrays."""
        return default_device()

    def default_dtypes(self, *, device: Device | str | None = None) -> dict[str, dt.DType]:
        """The dtypes of arrays made without naming one; the same on every device."""
        _known(device)
        return {
            "real floating": dt.float64,
            "complex floating": dt.complex128,
            "integral": dt.int64,
            "indexing": dt.int64,
        }

    def dtypes(
        self, *, device: Device | str | None = None, kind: str | tuple[str, ...] | None = None
    ) -> dict[str, dt.DType]:
        """The standard's dtypes by name (of the given kinds). Our own, such as ``bfloat16``, are not listed there."""
        _known(device)
        kinds = ("bool", "numeric") if kind is None else (kind,) if isinstance(kind, str) else kind
        return {name: d for name, d in dt.BY_NAME.items() if d not in EXTENSIONS and any(isdtype(d, k) for k in kinds)}

    def devices(self) -> list[Device]:
        """All devices that can be used here. (A list, as the standard has it: its consumers put more to it.)"""
        return devices()


def _known(where: Device | str | None) -> None:
    if where is not None:
        device(where)


def __array_namespace_info__() -> NamespaceInfo:
    """Capabilities, devices and dtypes of this namespace, as the array-API standard asks.

    >>> sorted(mt.arrays.__array_namespace_info__().dtypes(kind="complex floating"))
    ['complex128', 'complex64']
    """
    return NamespaceInfo()
