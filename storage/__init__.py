"""Checkpoints: open formats, written atomically, verified when read.

`save` writes a tree of arrays as a Zarr v3 group with a manifest, every rank its own blocks; `load` reads it onto any
other mesh; `open_checkpoint` shows it without reading it; `merge` turns it into Hugging Face safetensors; `verify`
checks every byte; `CheckpointManager` keeps the last few. A place is a path, or a URL of an object store (``s3://``,
``gs://``, ``az://``; to read, ``http://``, ``hf://`` and others of fsspec); in this package it is a plain text, as it
comes from manifests and goes to system calls. Importing this package imports neither zarr nor dask nor a client of a
cloud.

>>> import numpy as np, tempfile, os
>>> where = os.path.join(tempfile.mkdtemp(), "ckpt")
>>> _ = save(where, {"w": np.arange(6.0).reshape(2, 3)}, step=1)
>>> open_checkpoint(where)["w"][1]
array([3., 4., 5.])
"""

import sys as _sys

from . import browse as browse
from . import virtual as virtual
from .blending.blend import BlendReport, blend, blended
from .blending.lora import LoraReport, extract_lora
from .checkpoint.checkpoint import Checkpoint, StoredArray
from .commit.leftovers import Leftover, gc, leftovers
from .format.compression import ShuffledZstd, Zstd
from .loading.load import load
from .loading.open import open_checkpoint
from .loading.report import LoadReport
from .loading.usage import RepositoryUsage, StepUsage, UnreadStep, Usage, usage
from .loading.verify import VerifyReport, verify
from .programs.program_file import LoadedProgram, load_program, program_document, save_program
from .readers.safetensors import load_safetensors, read_header, save_safetensors
from .rules.casting import CastLoss
from .rules.rules import Rule, Rules
from .saving.background import SaveHandle
from .saving.manager import CheckpointManager
from .saving.quantize import dequantize, quantize
from .saving.save import SaveReport, save, save_async
from .saving.snapshots import Snapshots
from .serving.views import as_zarr, icechunk_references, serve, zarr_references
from .stores.store import options
from .transform.convert import ConvertReport, convert, reshard
from .transform.diff import ArrayDiff, DiffReport, diff
from .transform.estimate import Estimate, estimate
from .transform.merge import MergeReport, merge

__all__ = [
    "ArrayDiff",
    "BlendReport",
    "CastLoss",
    "Checkpoint",
    "CheckpointManager",
    "ConvertReport",
    "DiffReport",
    "Estimate",
    "Leftover",
    "LoadReport",
    "LoadedProgram",
    "LoraReport",
    "MergeReport",
    "RepositoryUsage",
    "Rule",
    "Rules",
    "SaveHandle",
    "SaveReport",
    "ShuffledZstd",
    "Snapshots",
    "StepUsage",
    "StoredArray",
    "UnreadStep",
    "Usage",
    "VerifyReport",
    "Zstd",
    "as_zarr",
    "blend",
    "blended",
    "convert",
    "dequantize",
    "diff",
    "estimate",
    "extract_lora",
    "gc",
    "icechunk_references",
    "leftovers",
    "load",
    "load_program",
    "load_safetensors",
    "merge",
    "open_checkpoint",
    "options",
    "program_document",
    "quantize",
    "read_header",
    "register_zarr_dtypes",
    "reshard",
    "save",
    "save_async",
    "save_program",
    "save_safetensors",
    "serve",
    "usage",
    "verify",
    "virtual",
    "zarr_references",
]
__dir__ = __all__.copy


def register_zarr_dtypes() -> None:
    """Make zarr-python read and write bfloat16, float8_e4m3fn and float8_e5m2.

    It is done by itself when zarr was imported before ``meshtape.storage``, by every function here that uses zarr, and
    by a zarr-python that loads entry points (3.4.2 does, 3.1.6 does not). Other programs call this once.
    """
    from .format import zarr_dtypes  # by its import


if "zarr" in _sys.modules:
    register_zarr_dtypes()
