"""Fused CUDA kernels behind ops: one file of CUDA C++ and one module of Python a subject.

``launch`` compiles and starts kernels, ``geometry`` decides how many threads do what, and the other modules give the
functions that ops name in ``overrides={"cupy": ...}``. Importing this package imports neither CuPy nor compiles
anything.

A new kernel is a template in a ``.cu`` file of ``cuda/``, a function that starts it through ``launch.runner()``, and a
row of that module's ``variants()``: the tests compile every row for every architecture, and run the function on the CPU
under an emulation of CUDA's execution model.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

MODULES = (
    *("attention", "grouped", "row_norms", "softmaxes", "channel_norms", "scatter", "philox", "scans", "float8"),
    "rotary",
)
"""Modules of this package that start kernels."""


def variants() -> Iterator[tuple[str, str]]:
    """File and C++ name of every kernel that may be started."""
    for name in MODULES:
        yield from importlib.import_module(f"{__name__}.{name}").variants()
