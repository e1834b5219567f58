"""`merge`: any checkpoint as a Hugging Face directory of safetensors, in bounded memory.

The result has the layout of Hugging Face tools: ``model.safetensors``, or ``model-00001-of-0000N.safetensors``, and
always ``model.safetensors.index.json``. Each file's header says ``{"format": "pt"}``: transformers refuses files whose
format is none of the frameworks that it knows, and it does not know NumPy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Unpack

from ..checkpoint.checkpoint import Checkpoint
from .convert import ConvertReport, TransformOptions, convert


@dataclass(frozen=True)
class MergeReport(ConvertReport):
    """Report of a merge: the fields of a conversion's report."""


def merge(
    src: str | os.PathLike[str] | Checkpoint,
    dst: str | os.PathLike[str],
    *,
    max_shard_bytes: int | None = None,
    **options: Unpack[TransformOptions],
) -> MergeReport:
    """Write a checkpoint as a Hugging Face directory, streaming; a run that was interrupted goes on where it stopped.

    Parameters
    ----------
    src
        Whatever `open_checkpoint` opens, or a checkpoint that is open.
    dst
        The directory or URL to make, all or nothing.
    max_shard_bytes
        Largest size of a file's arrays together; None puts all in one file. An array that is larger has its own file.
    options
        ``rules``, ``keys``, ``drop``, ``prefix``, ``dtype``, ``missing``, ``memory_limit``, ``threads``,
        ``allow_overflow``, ``overwrite``, ``progress``, ``client`` and ``documents`` of `convert`; ``compression``,
        ``pack`` and ``dtype_fallback`` are refused, as they say how Zarr arrays are stored.

    Returns
    -------
    MergeReport

    Raises
    ------
    CheckpointDTypeError
        An array's dtype (complex128) has no safetensors form; names its key; nothing was written.
    Lossy
        ``dtype`` or a rule would lose values, and ``allow_overflow`` is false; nothing was replaced.
    CheckpointKeyError
        Two arrays have the same dotted name, or ``keys`` matches nothing.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from meshtape.storage import save
    >>> home = tempfile.mkdtemp()
    >>> _ = save(os.path.join(home, "ckpt"), {"layers": [{"w": np.ones((2, 2), np.float32)}]})
    >>> merge(os.path.join(home, "ckpt"), os.path.join(home, "hf")).files
    ['model.safetensors']
    """
    return MergeReport(**vars(convert(src, dst, format="safetensors", max_shard_bytes=max_shard_bytes, **options)))
