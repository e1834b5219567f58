"""Compiles the hot path of eager work, from its Python sources, into the wheel.

Where that is not possible (no Cython, no compiler, no headers of Python), the wheel holds the sources alone, which do the same in
more time; so does every wheel that is built with ``MESHTAPE_PURE=1``. An editable install is never compiled: edits count at once.
``meshtape info`` says what is installed. All else about the package is in ``pyproject.toml``.
"""

from __future__ import annotations

import os
import shutil
from contextlib import chdir
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Module and folder; a .pxd beside the source names the fields that compiled code reads at a fixed place.
COMPILED = {
    "meshtape.arrays": ("arrays", ("_core", "_dispatch", "_direct", "_operators", "reductions")),
    "meshtape.autodiff": ("autodiff", ("recipe", "recording", "backward", "executable")),
}


class BuildCore(build_ext):
    """All modules of the core are compiled, or none is."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.editable_mode or self.inplace or os.environ.get("MESHTAPE_PURE"):
            self.extensions = []

    def build_extensions(self) -> None:
        try:
            self.check_compiler(Path(self.build_temp).absolute())
            self.translate(Path(self.build_temp).absolute() / "core")
            for ext in self.extensions:
                ext.extra_compile_args = ["-g0"] if os.name == "posix" else []
            self.parallel = self.parallel or os.cpu_count()
            super().build_extensions()
        except Exception as e:  # whatever it is: the package works without
            self.warn(f"the core is not compiled, the wheel holds Python sources alone: {type(e).__name__}: {e}")
            for ext in self.extensions:
                Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
            self.extensions = []

    def check_compiler(self, place: Path) -> None:
        """Compile next to nothing: where that fails, the minute that translating takes is saved."""
        place.mkdir(parents=True, exist_ok=True)
        source = place / "empty.c"
        source.write_text("#include <Python.h>\n")
        self.compiler.compile([str(source)], output_dir=str(place), include_dirs=self.include_dirs)

    def translate(self, stage: Path) -> None:
        """Write the C sources, from copies that lie as the installed package does: Cython looks for .pxd files by package."""
        from Cython.Build import cythonize

        shutil.rmtree(stage, ignore_errors=True)
        for package, (folder, names) in COMPILED.items():
            place = stage.joinpath(*package.split("."))
            place.mkdir(parents=True)
            for name in names:
                shutil.copy(Path(folder, f"{name}.py"), place)
                if (pxd := Path(folder, f"{name}.pxd")).exists():
                    shutil.copy(pxd, place)
        for place in {d for d in stage.rglob("*") if d.is_dir()}:
            place.joinpath("__init__.py").touch()
        # Relative names are what tracebacks show, and are found beside the package wherever it is installed.
        with chdir(stage):
            cythonize(
                [Extension(e.name, [e.name.replace(".", "/") + ".py"]) for e in self.extensions],
                compiler_directives={"language_level": 3},
                quiet=True,
            )
        for ext in self.extensions:
            ext.sources = [str(stage.joinpath(*ext.name.split(".")).with_suffix(".c"))]


setup(
    cmdclass={"build_ext": BuildCore},
    ext_modules=[
        Extension(f"{package}.{name}", [f"{folder}/{name}.py"])
        for package, (folder, names) in COMPILED.items()
        for name in names
    ],
)
