"""A snapshot of an icechunk repository as a checkpoint: ours with its tree, step and metadata, others' as the Zarr hierarchies that they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ...arrays.core.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint, UnsupportedVersion
from ..base import strict_json
from ..base.checksums import crc32c
from ..checkpoint.checkpoint import Checkpoint, StoredArray
from ..format import manifest
from ..format.chunk_grid import windows
from ..readers.tensor import read_box
from ..readers.zarr_tensor import ZarrTensor

_PART = 64 << 20  # bytes that `verify` reads at a time


@dataclass(frozen=True, slots=True)
class IcechunkTensor(ZarrTensor):
    """An array whose chunks end with their crc32c, which every read compares."""

    how: ClassVar[str] = "a Zarr array in a snapshot of an icechunk repository, each chunk with its crc32c"
    summed: ClassVar[bool] = True

    @property
    def files(self) -> set[str]:
        return {self.node, "zarr.json"}  # the latter was compared when it was opened

    def verify(self) -> int:
        """Read every chunk; returns the bytes of the elements."""
        total = 0
        for box in windows(self.shape, tuple(max(c, 1) for c in self.chunk), self.dtype.itemsize, _PART):
            try:
                total += read_box(self, box)[0].nbytes
            except IncompleteCheckpoint:
                raise
            except CheckpointError as e:
                raise CorruptCheckpoint(str(e)) from None
        return total


def opened(ckpt: Checkpoint, attribute: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint of a save of ours, from the hierarchy and the attribute of its group."""
    where = ckpt.path
    try:
        text = attribute["checkpoint"]
        if f"{crc32c(text.encode()):08x}" != attribute["crc32c"]:
            raise ValueError("it does not fit its crc32c")
        held = strict_json.loads(text)
        if held["version"] != 1:
            raise UnsupportedVersion(
                f"{where}: its form is {held['version']}, which a later meshtape wrote; this one reads 1"
            )
        arrays: dict[str, StoredArray] = {}
        for path, node, shape, dtype, chunk in held["arrays"]:
            found = ckpt.arrays.get(node)
            if found is None:
                raise IncompleteCheckpoint(f"{where}: the array {node!r} is missing")
            t = found.tensor
            said = (tuple(shape), dtype, tuple(max(c, 1) for c in chunk))
            if (t.shape, t.dtype.name, t.chunk) != said:
                raise ValueError(f"the array {node!r} is {t.dtype.name}{list(t.shape)}, not {dtype}{shape}")
            values = {f.name: getattr(t, f.name) for f in fields(t)} | {"missing": "error", "attributes": ()}
            stored = StoredArray(tuple(path), IcechunkTensor(**values))
            object.__setattr__(stored.tensor, "name", stored.name)
            arrays[stored.name] = stored
        found_at: list[int] = []
        tree = manifest.decoded(held["tree"], (), list(arrays.values()), found_at)
        if sorted(found_at) != list(range(len(arrays))):
            raise ValueError("its tree does not have each array once")
        metadata = manifest.decode_json(held["metadata"])
        return Checkpoint(where, "icechunk", arrays, tree, held["step"], metadata)
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, RecursionError) as e:
        raise CorruptCheckpoint(f"{where}: the attribute of its group is damaged: {e}") from None
