"""Refusals of files that are no checkpoints here: the kind of the file, and how to convert it.

The kind is found from names and first bytes alone; such a file is never interpreted.
"""

from __future__ import annotations

from collections.abc import Iterable

_PICKLE = (
    "was written by PyTorch with pickle, which runs code when it is read. meshtape runs none: it opens such a file "
    "itself, not its directory, where torch 1.6 "
    "or later wrote it. Convert others once, where you trust them:\n"
    "  import torch; from safetensors.torch import save_model, save_file\n"
    "  save_file({{k: v.contiguous().clone() for k, v in torch.load({file!r}, weights_only=True).items()}}, "
    '"model.safetensors")'
)
_GGUF = (
    "is GGUF, whose quantised blocks no array type holds; take the safetensors of the same model, or let transformers "
    "write them: AutoModel.from_pretrained(..., gguf_file={file!r}).save_pretrained(...)"
)
_KINDS = {
    ".bin": _PICKLE,
    ".pt": _PICKLE,
    ".pth": _PICKLE,
    ".ckpt": _PICKLE,
    ".gguf": _GGUF,
    ".h5": "is HDF5, as Keras writes it; load it there, and save its arrays with mt.save",
    ".msgpack": "was written by Flax; restore it there, and save its tree with mt.save",
    ".npz": "holds NumPy arrays: open that file itself",
    ".npy": "is a NumPy array: open that file itself",
    ".onnx": "is an ONNX model, whose initializers have no format of their own",
}
_STARTS = ((b"GGUF", ".gguf"), (b"\x89HDF", ".h5"), (b"\x80\x02", ".pt"), (b"\x80\x04", ".pt"))
_LFS = b"version https://git-lfs"


def of_start(path: str, start: bytes) -> str | None:
    """The kind of a file by its first bytes, as the end of a sentence that begins with its path; None where unknown.

    >>> of_start("m.gguf", b"GGUF....")[:7]
    'is GGUF'
    """
    if start.startswith(_LFS[: len(start)]) and len(start) >= 8:
        return "is a pointer of Git LFS, not the file itself; fetch it with: git lfs pull"
    name = path.rpartition("/")[2]
    kind = next((k for mark, k in _STARTS if start.startswith(mark)), None)
    return None if kind is None else _KINDS[kind].format(file=name)


def among(names: Iterable[str]) -> str | None:
    """The first file of a directory that is of another kind, and its kind: ``"x.gguf, which is GGUF, …"``.

    >>> among(["config.json", "pytorch_model.bin"])[:35]
    'pytorch_model.bin, which was writte'
    """
    for name in sorted(names):
        suffix = "." + name.rpartition(".")[2]
        if suffix in _KINDS and not name.startswith("training_args"):
            return f"{name}, which {_KINDS[suffix].format(file=name)}"
    return None
