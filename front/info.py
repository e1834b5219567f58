"""The report of installed and missing packages, with the commands that install them."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from typing import Any

_PARTS = (
    ("numpy", "arrays on the CPU", ""),
    ("cupy", "arrays on CUDA devices", "pip install 'meshtape[cuda13]' (or cuda12)"),
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


def _version(package: str) -> str | None:
    names = ("cupy-cuda13x", "cupy-cuda12x", "cupy") if package == "cupy" else (package,)
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


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
    write_text(text if facts["cuda"] == "ready" else f"{text}\nCUDA: {facts['cuda']}", console)
