"""The report of installed and missing packages, with the commands that install them."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from typing import Any

_PARTS = (
    ("numpy", "arrays on the CPU", ""),
    ("cupy", "arrays on CUDA devices", "pip install 'meshtape[cuda13]' (or cuda12)"),
    ("nvidia-cudnn-frontend", "attention on CUDA devices by cuDNN", "pip install nvidia-cudnn-frontend"),
    ("scipy", "special functions, sparse products", ""),
    ("ml_dtypes", "bfloat16 and float8", ""),
    ("dask", "clusters", ""),
    ("distributed", "clusters", ""),
    ("zarr", "checkpoints", ""),
    ("safetensors", "the reference reader, for comparison only", "pip install safetensors"),
    ("obstore", "checkpoints on S3, GCS and Azure", "pip install 'meshtape[s3]'"),
    ("tensorboardX", "events of training runs for TensorBoard", "pip install 'meshtape[tensorboard]'"),
    ("scikit-learn", "the demo's data", "pip install 'meshtape[demo]'"),
    ("matplotlib", "plots in the notebooks", "pip install 'meshtape[notebooks]'"),
)

_WITHOUT = {
    "cuBLASLt": "products are CuPy's own (pip install 'meshtape[cuda13]' or cuda12)",
    "cuDNN": "convolutions are products of patches (pip install nvidia-cudnn-cu13 or nvidia-cudnn-cu12)",
}
"""Ways to go where a library is missing."""


def _version(package: str) -> str | None:
    names = ("cupy-cuda13x", "cupy-cuda12x", "cupy") if package == "cupy" else (package,)
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _libraries() -> dict[str, str | None]:
    """Versions of the CUDA libraries for products and convolutions; None where one is missing."""
    from .arrays.backends import cublaslt
    from .arrays.kernels.cudnn import convolution as cudnn

    found = {}
    for name, functions in (("cuBLASLt", cublaslt.library()), ("cuDNN", cudnn.library())):
        n = functions and functions["GetVersion"]()
        found[name] = n and f"{n // 10_000}.{n // 100 % 100}.{n % 100}"
    return found


def collect() -> dict[str, Any]:
    """Versions, devices and missing packages, as plain data."""
    import meshtape as mt

    from .arrays.backends.backend import cupy_backend
    from .arrays.native import AVAILABLE
    from .errors import BackendError

    try:
        cupy_backend()
        cuda = "ready"
    except BackendError as e:
        cuda = str(e)
    return {
        "meshtape": mt.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "native_kernels": AVAILABLE,
        "devices": [str(d) for d in mt.devices()],
        "cuda": cuda,
        "cuda_libraries": _libraries() if cuda == "ready" else {},
        "packages": [
            {"name": name, "version": _version(name), "for": purpose, "get": get} for name, purpose, get in _PARTS
        ],
    }


def show(console: Any) -> None:
    """Print the report as a table."""
    from .cli.tables import Column, write, write_text

    facts = collect()
    rows = [
        [p["name"], p["version"] or "missing", p["for"], "" if p["version"] else p["get"]] for p in facts["packages"]
    ]
    columns = [Column("package"), Column("version"), Column("for", rank=2), Column("how to get it", rank=1)]
    write(columns, rows, title=f"meshtape {facts['meshtape']}", on=console)
    without = "no, the same in NumPy (an install with a C compiler at hand builds them)"
    text = f"Python {facts['python']}\nnative kernels: {'yes' if facts['native_kernels'] else without}\n"
    text += f"devices: {', '.join(facts['devices'])}"
    for name, version in facts["cuda_libraries"].items():
        text += f"\n{name}: {version or f'missing, {_WITHOUT[name]}'}"
    write_text(text if facts["cuda"] == "ready" else f"{text}\nCUDA: {facts['cuda']}", console)
