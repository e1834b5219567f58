"""Compiles into the wheel the hot paths of eager work and of messages, from their Python sources, and the kernels in C.

Where that is not possible (no Cython, no compiler, no headers of Python or NumPy), the wheel holds the sources alone, which do the same in
more time; so does every wheel that is built with ``MESHTAPE_PURE=1``. An editable install is never compiled: edits count at once.
``python setup.py build_ext --inplace`` adds the kernels to a checkout, and deleting ``arrays/native/_kernels.*`` takes them away.
``meshtape info`` says what is installed. All else about the package is in ``pyproject.toml``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

FOLDERS = {
    "meshtape": "front",
    "meshtape.arrays": "arrays",
    "meshtape.autodiff": "autodiff",
    "meshtape.parallel": "parallel",
    "meshtape.storage": "storage",
}

# Folders and their modules; a .pxd beside the source names the fields that compiled code reads at a fixed place.
COMPILED = {
    "arrays/interface": ("operators", "writing"),
    "arrays/core": ("dispatch", "op", "tree", "value"),
    "arrays/native": ("broadcasts", "calls", "ops"),
    "arrays/nn": ("cross_entropy", "losses"),
    "arrays/backends": ("short_ways",),
    "arrays/ops": ("elementwise", "matmul"),
    "arrays/reductions": ("moments", "reduction_ops", "reductions"),
    "autodiff/captures": ("guards",),
    "autodiff/compiler": ("executable", "signature"),
    "autodiff/rules": ("elementwise", "reductions", "registry", "softmax", "structure"),
    "autodiff/tape": ("backward", "gradients", "record", "tape", "vjp_plan"),
    "parallel/collectives": ("pieces",),
    "parallel/execution": ("executor",),
    "parallel/resharding": ("execution", "schedule"),
    "parallel/transports": ("frames", "group", "links", "shared_memory_link", "spin_poller"),
}
MODULES = {
    f"meshtape.{folder.replace('/', '.')}.{name}": f"{folder}/{name}.py"
    for folder, names in COMPILED.items()
    for name in names
}

KERNELS = Extension(
    "meshtape.arrays.native._kernels",
    ["arrays/native/c/module.c"],
    depends=sorted(map(str, Path("arrays/native/c").glob("*.h"))),  # a source distribution needs them
    # Last on the command line: what is asked of all compiled code must not take the vectors from this. No option lets the compiler
    # reorder arithmetic; a product may be added to before it is rounded, which is as exact, and half the steps of a polynomial. Threading
    # of jumps is for branches: of the limits of `exp` it makes three copies of what follows, each behind a mask, division and all. Nobody
    # reads `errno` here, and a root that may have to write to it is taken number by number.
    extra_compile_args=["-O3", "-g0", "-std=c11", "-ffp-contract=fast", "-fno-thread-jumps", "-fno-math-errno"]
    if os.name == "posix"
    else ["/O2", "/std:c11"],
    libraries=["m"] if os.name == "posix" else [],
)


class Build(build):
    """A build begins with nothing: what an earlier one left, of another version perhaps, would be packed with it."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildCore(build_ext):
    """All modules of the core are compiled, or none is; and so are the kernels."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.editable_mode or os.environ.get("MESHTAPE_PURE"):
            self.extensions = []
        elif self.inplace:
            self.extensions = [e for e in self.extensions if e.name == KERNELS.name]

    def build_extensions(self) -> None:
        kernels = [e for e in self.extensions if e.name == KERNELS.name]
        core = [e for e in self.extensions if e.name != KERNELS.name]
        built = self.attempt("the kernels are", kernels, self.include_numpy) + self.attempt(
            "the core is", core, self.translate
        )
        self.extensions = built

    def attempt(self, what: str, extensions: list[Extension], prepare: Callable[[], None]) -> list[Extension]:
        """Build the extensions; those that there are then: all or, whatever happened, none. The package works without."""
        self.extensions = extensions
        try:
            if extensions:
                self.check_compiler(Path(self.build_temp).absolute())
                prepare()
                self.parallel = self.parallel or os.cpu_count()
                super().build_extensions()
        except Exception as e:
            self.warn(f"{what} not compiled, the Python sources do the same in more time: {type(e).__name__}: {e}")
            for ext in extensions:
                Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
            return []
        return extensions

    def include_numpy(self) -> None:
        """Let the compiler find the headers of NumPy."""
        import numpy as np

        for ext in self.extensions:
            ext.include_dirs.append(np.get_include())

    def check_compiler(self, place: Path) -> None:
        """Compile next to nothing: where that fails, the minute that translating takes is saved."""
        place.mkdir(parents=True, exist_ok=True)
        source = place / "empty.c"
        source.write_text("#include <Python.h>\n")
        self.compiler.compile([str(source)], output_dir=str(place), include_dirs=self.include_dirs)

    def translate(self) -> None:
        """Write the C sources, from copies that lie as the installed package does: Cython looks for .pxd files by package."""
        from Cython.Build import cythonize

        stage = Path(self.build_temp).absolute() / "core"
        shutil.rmtree(stage, ignore_errors=True)
        for module, source in MODULES.items():
            place = stage.joinpath(*module.split(".")[:-1])
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place)
            if (pxd := Path(source).with_suffix(".pxd")).exists():
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
            ext.extra_compile_args = ["-g0"] if os.name == "posix" else []


def packages() -> list[str]:
    """Every folder of ours that has an ``__init__.py``, by its name in the package."""
    return sorted(
        ".".join([package, *init.parent.relative_to(folder).parts])
        for package, folder in FOLDERS.items()
        for init in Path(folder).rglob("__init__.py")
    )


setup(
    cmdclass={"build": Build, "build_ext": BuildCore},
    packages=packages(),
    package_dir=FOLDERS,
    ext_modules=[KERNELS, *(Extension(module, [source]) for module, source in MODULES.items())],
)
