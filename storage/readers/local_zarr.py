"""The dtypes that TensorStore writes to Zarr v2, for zarr-python, which does not know them; and its store of objects,
which tells it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
from zarr import storage
from zarr.abc.store import RangeByteRequest

from ..format import dtypes


def _extension(metadata: Any) -> np.dtype | None:
    """The dtype of an array of Zarr v2 that zarr-python does not know by its name, as TensorStore writes it."""
    name = metadata.get("dtype") if isinstance(metadata, dict) else None
    return dtypes.by_name(name) if isinstance(name, str) and name in dtypes.EXTENSIONS else None


class Keys:
    """What a store of Zarr notes of the keys that zarr asks for: ``absent`` are those that are not there, ``said`` the
    dtypes of arrays that zarr takes for integers."""

    def __init__(self) -> None:
        self.absent: set[str] = set()
        self.said: dict[str, np.dtype] = {}

    def whole(self, key: str, held: Any, part: Any) -> Any:
        """What a store has read; ``ValueError`` where bytes are lost. zarr takes an empty file, and an inner chunk
        behind the end of a shard, for chunks that nobody wrote, and so for the fill value."""
        if held is None:
            self.absent.add(key)
            return None
        wanted = part.end - part.start if isinstance(part, RangeByteRequest) else 1
        if len(held) < wanted:
            raise ValueError(f"{key} ends early: {len(held)} bytes where there are to be {wanted} or more")
        return self._known(key, held) if key.endswith(".zarray") else held

    def _known(self, key: str, held: Any) -> Any:
        """Metadata of Zarr v2 with such a dtype says the integers of the same width instead."""
        self.said.pop(key, None)
        with contextlib.suppress(ValueError, TypeError):
            said = json.loads(held.to_bytes())
            dtype = _extension(said)
            if dtype is not None:
                bits = dtypes.bits(dtype)
                fill = said.get("fill_value")
                said["fill_value"] = 0 if fill is None else int(np.array(float(fill), dtype).view(bits))
                said["dtype"] = bits.str
                self.said[key] = dtype
                return type(held).from_bytes(json.dumps(said).encode())
        return held


class LocalZarrStore(storage.ObjectStore):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keys = Keys()

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        return self.keys.whole(key, await super().get(key, prototype, byte_range), byte_range)
