"""Public paths of modules that live elsewhere: ``import meshtape.nn`` gives the very module that ``mt.nn`` is."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

HOMES = {
    "errors": "arrays.core.errors",
    "fft": "arrays.ops.fft",
    "linalg": "arrays.linalg",
    "nn": "arrays.nn.nn",
    "random": "arrays.random",
    "tree": "arrays.core.tree",
    "optim": "autodiff.optim.optimizers",
    "models": "parallel.models",
    "training": "parallel.training",
}
"""Names in ``meshtape``, and where their modules are."""

DOCUMENTED = {**HOMES, "parallel.allocator": "parallel.dask.malloc", "parallel.cluster": "parallel.dask.cluster"}
"""The same, with modules inside a package that the documentation names."""


def _home(name: str) -> str | None:
    """The full name of the module that a public path stands for; None where it is no such path."""
    top, _, inner = name.partition(".")
    parts = inner.split(".")
    for n in range(len(parts), 0, -1) if top == __package__ else ():
        if (home := DOCUMENTED.get(".".join(parts[:n]))) is not None:
            return ".".join([top, home, *parts[n:]])
    return None


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder of a module, and of those inside it, at its home. A module has one copy, under any name of import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if _home(name) is None:
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        home = _home(name)
        assert home is not None
        try:
            sys.modules[name] = importlib.import_module(home)
        except ModuleNotFoundError as e:
            if e.name != home:
                raise
            raise ModuleNotFoundError(f"No module named {name!r}", name=name) from None


def install() -> None:
    """Have ``import`` find these, first of all: a folder of a package would be found as a second copy."""
    if not any(type(f) is _Finder for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
