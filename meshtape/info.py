"""What is installed here, what is missing, and how to get it."""

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
    """Versions, devices and what is missing, as plain data."""
    import meshtape as mt

    from .arrays._backends import cupy_backend
    from .arrays._core import COMPILED
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
        "compiled core": COMPILED,
        "native kernels": AVAILABLE,
        "devices": [str(d) for d in mt.devices()],
        "cuda": cuda,
        "packages": [
            {"name": name, "version": _version(name), "for": purpose, "get": get} for name, purpose, get in _PARTS
        ],
    }


def show(console: Any) -> None:
    """The same as a table."""
    from .tables import Column, write

    facts = collect()
    rows = [
        [p["name"], p["version"] or "missing", p["for"], "" if p["version"] else p["get"]] for p in facts["packages"]
    ]
    columns = [Column("package"), Column("version"), Column("for", rank=2), Column("how to get it", rank=1)]
    write(columns, rows, title=f"meshtape {facts['meshtape']}", console=console)
    console.print(f"Python {facts['python']}", highlight=False, soft_wrap=True)
    core = "yes" if facts["compiled core"] else "no, the same in Python (a wheel built where a C compiler is has it)"
    console.print(f"compiled core: {core}", highlight=False, soft_wrap=True)
    kernels = "yes" if facts["native kernels"] else "no, the same in NumPy (built with the core, by a C compiler)"
    console.print(f"native kernels: {kernels}", highlight=False, soft_wrap=True)
    console.print(f"devices: {', '.join(facts['devices'])}", highlight=False, soft_wrap=True)
    if facts["cuda"] != "ready":
        console.print(f"CUDA: {facts['cuda']}", highlight=False, markup=False, soft_wrap=True)
