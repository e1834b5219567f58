"""meshtape: a NumPy-like array library that differentiates, shards and checkpoints.

``import meshtape as mt`` is all that a user writes. Everything is reached from here: the array namespace
(``mt.asarray``, ``mt.sum``, …), gradients (``mt.grad``), meshes (``mt.Mesh``) and checkpoints (``mt.save``). Dask,
Zarr, CuPy and Rich are imported when they are first used, never by the import itself. Examples of docstrings assume
that import.
"""

from __future__ import annotations

import importlib as _importlib
import sys as _sys
from typing import Any as _Any

from . import interrupts as _interrupts  # isort: skip
from .arrays import *
from .arrays import __all__ as _arrays_all
from .arrays import __array_api_version__, __array_namespace_info__
from .autodiff import *
from .autodiff import __all__ as _autodiff_all
from .namespaces import HOMES as _HOMES
from .namespaces import install as _install

__version__ = "0.1.0"
_install()

# Names of the packages with heavy dependencies, and their modules: imported on first use.
_PARALLEL = (
    "Mesh Partial Replicate Shard Sharding abstract all_gather all_reduce all_to_all axis_index axis_size "
    "broadcast compute distribute explain explicit_sharding forecast from_dask from_zarr gang permute pipeline "
    "reduce_scatter reshard scan shard_map stream visualize"
)
_STORAGE = (
    "Checkpoint CheckpointManager LoadReport Rule Rules SaveHandle convert estimate load load_program merge "
    "open_checkpoint save save_async save_program verify"
)
_LAZY = {
    **dict.fromkeys(_PARALLEL.split(), "parallel"),
    **dict.fromkeys(("Trainer", "cluster_mesh"), "parallel.training"),
    **dict.fromkeys(_STORAGE.split(), "storage"),
}
_PACKAGES = ("arrays", "autodiff", "parallel", "storage")
# NumPy's functions that write into an argument; people look for them here.
_WRITERS = ("copyto", "fill_diagonal", "place", "put", "putmask")

__all__ = sorted({*_arrays_all, *_autodiff_all, *_LAZY, *_PACKAGES, *_HOMES})
__dir__ = __all__.copy  # completion shows what is public; so in the modules below


def __getattr__(name: str) -> _Any:
    if name in _PACKAGES or name in _HOMES:
        return _importlib.import_module(f".{name}", __name__)
    if name in _LAZY:
        value = getattr(_importlib.import_module(f".{_LAZY[name]}", __name__), name)
        globals()[name] = value
        return value
    why = ": arrays are values, so write x[i] = v or x.at[i].set(v)" if name in _WRITERS else ""
    raise AttributeError(f"module 'meshtape' has no attribute {name!r}{why}", name=name, obj=_sys.modules[__name__])
