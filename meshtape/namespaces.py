"""Public paths of modules that live elsewhere: ``import meshtape.nn`` gives the very module that ``mt.nn`` is."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

HOMES = {
    **{name: f"arrays.{name}" for name in ("errors", "fft", "linalg", "nn", "random", "tree")},
    "optim": "autodiff.optim",
    "models": "parallel.models",
    "training": "parallel.training",
}
"""Names in ``meshtape``, and where their modules are."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module, and those inside it, at its home. One module has one copy, under whatever name it is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top, _, inner = name.partition(".")
        if top != __package__ or inner.partition(".")[0] not in HOMES:
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        first, dot, rest = name.partition(".")[2].partition(".")
        home = f"{__package__}.{HOMES[first]}{dot}{rest}"
        try:
            sys.modules[name] = importlib.import_module(home)
        except ModuleNotFoundError as e:
            if e.name != home:
                raise
            raise ModuleNotFoundError(f"No module named {name!r}", name=name) from None


def install() -> None:
    """Have ``import`` find these. (First of all finders: a folder of a package would be found by its path, as a second copy.)"""
    if not any(type(f) is _Finder for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
