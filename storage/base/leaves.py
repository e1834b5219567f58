"""Arrays of other libraries (PyTorch, JAX, CuPy, …) on their way into a checkpoint, taken through DLPack without a copy
in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import Array, from_dlpack
from ...arrays.core.errors import CheckpointDTypeError


def taken(leaf: Any, where: str) -> Any:
    """Another library's array as a NumPy array, or as ours where it lies on a device; other leaves as they are."""
    if isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(leaf):
        raise CheckpointDTypeError(
            f"{where}: a masked array has no form here; save leaf.filled(…), and its mask as another array"
        )
    if isinstance(leaf, (np.ndarray, np.generic, Array)):
        return leaf
    kind = type(leaf)  # its values may have to be computed
    made_by = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if made_by & {"xarray", "pandas"} and hasattr(kind, "values") and (hasattr(kind, "dims") or hasattr(kind, "index")):
        raise CheckpointDTypeError(
            f"{where}: a {kind.__name__} has labels (names of dimensions, coordinates, an index), which have no form "
            "here; save its numbers, leaf.values (leaf.data of an array on a mesh), or write labelled data with "
            "xarray's to_zarr, which load opens"
        )
    if not hasattr(leaf, "__dlpack__"):
        return leaf
    if hasattr(getattr(leaf, "sharding", None), "box"):  # of a mesh of ours
        return leaf
    try:
        # A parameter of PyTorch is exported without its tape.
        held = from_dlpack(leaf.detach() if hasattr(leaf, "detach") else leaf, copy=False)
        return np.asarray(held) if str(held.device) == "cpu" else held
    except Exception as e:  # whatever the exporter raises
        if hasattr(leaf, "__array__") and not hasattr(leaf, "detach"):  # JAX exports booleans and split arrays so alone
            return np.asarray(leaf)
        lazy = any(getattr(leaf, f"is_{way}", bool)() for way in ("conj", "neg"))  # of PyTorch
        raise CheckpointDTypeError(
            f"{where}: a {type(leaf).__module__}.{type(leaf).__qualname__} of {getattr(leaf, 'dtype', 'no dtype')} "
            f"cannot be taken through DLPack: {e}{'; give leaf.resolve_conj().resolve_neg()' if lazy else ''}"
        ) from e
