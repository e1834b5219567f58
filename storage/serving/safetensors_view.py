"""A checkpoint as the files of a Hugging Face directory: those that are there, or one file that is computed while it is read."""

from __future__ import annotations

import json

from ..checkpoint.checkpoint import Checkpoint
from ..format import dtypes
from ..format.documents import Documents
from ..format.hf_index import HF_INDEX, HF_SINGLE
from ..readers.raw_tensor import PackedTensor, RawTensor
from ..readers.safetensors import build_header
from ..stores import store as stores
from .virtual_files import JoinedFile, RealFile, TensorFile, TextFile, VirtualFile


def _real(ckpt: Checkpoint) -> dict[str, VirtualFile] | None:
    """The very files of a safetensors file or a Hugging Face directory; None for all others."""
    tensors = [a.tensor for a in ckpt.arrays.values()]
    if ckpt.kind not in ("safetensors", "Hugging Face") or not tensors:
        return None
    held = {t.path: t.file_nbytes for t in tensors if isinstance(t, RawTensor)}
    if len(held) == 0 or not all(isinstance(t, RawTensor) for t in tensors):  # computed from such files by rules
        return None
    if ckpt.kind == "safetensors":
        ((path, nbytes),) = held.items()
        return {HF_SINGLE: RealFile(path, nbytes, ckpt.generation.of(path))}
    start = len(stores.join(ckpt.path, ""))
    return {path[start:].lstrip("/"): RealFile(path, n, ckpt.generation.of(path)) for path, n in held.items()}


def _virtual(ckpt: Checkpoint) -> VirtualFile:
    """One file with all arrays. `CheckpointDTypeError` names an array whose dtype safetensors lacks."""
    tensors = {n: a.tensor for n, a in ckpt.arrays.items() if not isinstance(a.tensor, PackedTensor)}
    rows = [(n, dtypes.safetensors_name(t.dtype, f"key {n!r}"), t.shape) for n, t in tensors.items()]
    head, place = build_header(rows, {"format": "pt"})
    return JoinedFile([TextFile(head), *(TensorFile(tensors[n]) for n in place)])


def safetensors_files(ckpt: Checkpoint) -> dict[str, VirtualFile]:
    """The files by name: weights, their index, and the documents beside them."""
    files = _real(ckpt) or {HF_SINGLE: _virtual(ckpt)}
    names = {n: HF_SINGLE for n, a in ckpt.arrays.items()}
    if HF_SINGLE not in files:
        names = {n: a.tensor.path.rpartition("/")[2] for n, a in ckpt.arrays.items() if isinstance(a.tensor, RawTensor)}
    index = {"metadata": {"total_size": ckpt.nbytes}, "weight_map": names}
    files[HF_INDEX] = TextFile((json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
    if isinstance(ckpt.documents, Documents):
        files |= {name: TextFile(data) for name, data in ckpt.documents.every().items() if name not in files}
    return files
