"""Builds the kernels and the path of small calls in C, in wheels and in editable installs; without a compiler the
package does the same with NumPy and Python alone.

All else about the package is in ``pyproject.toml``.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
from setuptools import Extension, setup
from setuptools.command.build import build

FOLDERS = {
    "meshtape": "front",
    "meshtape.arrays": "arrays",
    "meshtape.autodiff": "autodiff",
    "meshtape.parallel": "parallel",
    "meshtape.storage": "storage",
}

POSIX = os.name == "posix"

KERNELS = Extension(
    "meshtape.arrays.native._kernels",
    ["arrays/native/c/module.c"],
    depends=sorted(map(str, Path("arrays/native/c").glob("*.h"))),  # a source distribution needs them
    include_dirs=[np.get_include()],
    # No option lets the compiler reorder arithmetic; a product may be added to before it is rounded, which is as exact,
    # and half the steps of a polynomial. Threading of jumps is for branches: of the limits of `exp` it makes three
    # copies of what follows, each behind a mask, division and all. Nobody reads `errno` here, and a root that may have
    # to write to it is taken number by number.
    extra_compile_args=["-O3", "-g0", "-std=c11", "-ffp-contract=fast", "-fno-thread-jumps", "-fno-math-errno"]
    if POSIX
    else ["/O2", "/std:c11"],
    libraries=["m"] if POSIX else [],
    optional=True,  # no compiler, or no headers of Python
)

CALLS = Extension(
    "meshtape.arrays.core._calls",
    ["arrays/native/c/calls.c"],
    include_dirs=[np.get_include()],
    extra_compile_args=["-O2", "-g0", "-std=c11"] if POSIX else ["/O2", "/std:c11"],
    optional=True,
)


class Build(build):
    """A build begins with nothing: what an earlier one left, of another version perhaps, would be packed with it."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


def packages() -> list[str]:
    """Every folder of ours that has an ``__init__.py``, by its name in the package."""
    return sorted(
        ".".join([package, *init.parent.relative_to(folder).parts])
        for package, folder in FOLDERS.items()
        for init in Path(folder).rglob("__init__.py")
    )


setup(cmdclass={"build": Build}, packages=packages(), package_dir=FOLDERS, ext_modules=[KERNELS, CALLS])
