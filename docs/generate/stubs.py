"""Stubs for type checkers of what is put together when it runs: the class ``Array`` with its interface, the package,
whose heavier names are imported when they are first used, and its namespaces."""

from __future__ import annotations

import builtins
import collections.abc
import importlib
import inspect
import keyword
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import tables

import meshtape as mt
from meshtape.namespaces import HOMES

ROOT = Path(__file__).parents[2]
# Of a class, not of its interface; and attributes that NumPy's arrays have alone, which raise.
LEFT_OUT = {"__doc__", "__module__", "__slots__", "__weakref__", "__init__", "__getattr__", "__array_priority__"}
_NAME = re.compile(r"(?<![\w.'\"])([A-Za-z_]\w*)((?:\.\w+)*)")


class Stub:
    """The lines of one stub, and the imports that its annotations need. ``own`` are the names that it defines."""

    def __init__(self, own: Iterable[str]) -> None:
        self.own = set(own)
        self.imports: set[str] = set()
        self.homes: dict[str, str] = {}
        self.lines: list[str] = []

    def text(self) -> str:
        head = '"""Made by docs/generate/stubs.py for type checkers."""'
        homes: dict[str, list[str]] = {}
        for line in sorted(self.imports):
            home, _, name = line.partition(" import ")
            homes.setdefault(home, []).extend([name] if name else [])
        return "\n".join([head, "", *(_imports(*item) for item in homes.items()), "", *self.lines, ""])

    def _imported(self, name: str, rest: str, fn: Any) -> str:
        """How an annotation of a function writes a name, and what follows it after a point. Types of libraries that are
        optional are Any."""
        scope = fn.__globals__
        value = scope.get(name, getattr(builtins, name, self))
        if keyword.iskeyword(name):
            return name
        if isinstance(value, ModuleType):
            self.imports.add(f"import {value.__name__} as {name}")
        elif value is getattr(builtins, name, None):
            if name in self.own:
                self.imports.add("import builtins")
                return f"builtins.{name}{rest}"
        elif name not in self.own:
            home = value.__module__ if isinstance(value, type) and value is not self else _homes().get(name)
            if home is None:
                return self._imported("Any", "", fn)
            if self.homes.setdefault(name, home) != home:
                raise NameError(f"{name} is the name of two types, of {home} and {self.homes[name]}")
            self.imports.add(f"from {home} import {name} as {name}")
        return name + rest

    def signature(self, fn: Any, bound: bool = False) -> str:
        """The signature of a function; of a method, with ``self`` first."""
        signature, plain = inspect.signature(fn), inspect.unwrap(fn)
        plain = getattr(plain, "__func__", plain)
        parameters = list(signature.parameters.values())
        if bound:
            parameters[0] = inspect.Parameter("self", parameters[0].kind)
            if len(parameters) == 2 and parameters[1].name == "other":
                parameters = [p.replace(kind=inspect.Parameter.POSITIONAL_ONLY) for p in parameters]

        def shown(annotation: Any) -> Any:
            if annotation is inspect.Parameter.empty:
                return annotation
            text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
            return _Text(_NAME.sub(lambda m: self._imported(m[1], m[2], plain), text))

        parameters = [p.replace(annotation=shown(p.annotation), default=_default(p.default)) for p in parameters]
        return str(signature.replace(parameters=parameters, return_annotation=shown(signature.return_annotation)))

    def add(self, name: str, value: Any, home: str) -> None:
        """A public name of a module whose values come from ``home``."""
        plain = inspect.unwrap(value) if callable(value) else value
        if isinstance(value, ModuleType):
            self.imports.add(f"from {home} import {name} as {name}")
        elif inspect.isfunction(plain) or inspect.ismethod(plain):
            self.lines.append(f"def {name}{self.signature(value)}: ...")
        elif isinstance(value, type):
            self.imports.add(f"from {value.__module__} import {value.__name__} as {name}")
        elif _is_alias(value):
            self.imports.add(f"from {_homes()[name]} import {name} as {name}")
        elif value is None or isinstance(value, dict):
            self.lines.append(f"{name}: {'None' if value is None else 'dict[str, Any]'}")
            self.imports.add("from typing import Any as Any")
        else:
            kind = type(value)
            if kind.__module__ == "builtins":
                self.lines.append(f"{name}: {'builtins.' * (kind.__name__ in self.own)}{kind.__name__}")
            else:
                self.lines.append(f"{name}: {kind.__module__}.{kind.__qualname__}")
                self.imports.add(f"import {kind.__module__}")


def _imports(home: str, names: list[str]) -> str:
    """The statement that imports names of a module, or a module."""
    line = f"{home} import {', '.join(names)}" if names else home
    if len(line) <= 120:
        return line
    whole = ", ".join(name.replace(" ", "\xa0") for name in names)  # broken between names, not within them
    rows = textwrap.fill(whole, 120, initial_indent="    ", subsequent_indent="    ").replace("\xa0", " ")
    return f"{home} import (\n{rows}\n)"


class _Text(str):
    """An annotation that is shown as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _default(value: Any) -> Any:
    simple = value is inspect.Parameter.empty or value is None or type(value) in (bool, int, float, str)
    return value if simple else _Text("...")


_known: dict[str, str] = {}


def _homes() -> dict[str, str]:
    """The modules of types by their names: some modules import them for type checkers alone."""
    if not _known:
        for module in (typing, collections.abc):
            _known.update(dict.fromkeys(module.__all__, module.__name__))
        for name, module in sorted(sys.modules.items()):
            for n, v in vars(module).items() if name.startswith("meshtape") else ():
                if (isinstance(v, type) and v.__module__ == name) or (_is_alias(v) and _defines(module, n)):
                    _known.setdefault(n, name)
    return _known


def _is_alias(value: Any) -> bool:
    return isinstance(value, types.UnionType | typing.TypeVar) or typing.get_origin(value) is not None


def _defines(module: ModuleType, name: str) -> bool:
    return re.search(rf"^{name}\b.* = ", inspect.getsource(module), re.MULTILINE) is not None


def array() -> str:
    """The stub of the class and its module."""
    from meshtape.arrays.core import array as module

    stub = Stub({"Array", "next_id", "new_id", "attach"})
    stub.lines += ["def next_id() -> int: ..."]
    for name in ("new_id", "attach"):
        stub.add(name, getattr(module, name), module.__name__)
    stub.lines.append("class Array:")
    for name in sorted(vars(mt.Array).keys() - LEFT_OUT):
        value = inspect.getattr_static(mt.Array, name)
        if isinstance(value, property):
            stub.lines += ["    @property", f"    def {name}{stub.signature(value.fget, True)}: ..."]
        elif isinstance(value, staticmethod):
            stub.lines += ["    @staticmethod", f"    def {name}{stub.signature(value.__func__)}: ..."]
        elif callable(value):
            made = stub.signature(value, True)
            if "other: Any" in made and made.endswith(
                "-> Any"
            ):  # an operator; the other operand may have the last word
                made = made.removesuffix("Any") + "Array"
            elif made == "(self, other, /)":
                made = "(self, other: Any, /) -> Array"
            beside = "  # type: ignore[override]" if name in ("__eq__", "__ne__") else ""
            stub.lines.append(f"    def {name}{made}: ...{beside}")
    return stub.text()


def package() -> str:
    """The stub of the package."""
    stub = Stub(mt.__all__)
    for name in mt.__all__:
        if name in HOMES or name in mt._PACKAGES:
            stub.imports.add(f"from meshtape import {name} as {name}")
        else:
            stub.add(name, getattr(mt, name), mt.__name__)
    stub.lines += ["__version__: str", "__array_api_version__: str", "def __array_namespace_info__() -> object: ..."]
    return stub.text()


def namespace(name: str) -> str:
    """The stub of a public module."""
    module = importlib.import_module(f"meshtape.{name}")
    names = getattr(module, "__all__", None) or [
        n
        for n, v in vars(module).items()
        if not n.startswith("_") and getattr(v, "__module__", "").startswith("meshtape")
    ]
    stub = Stub(names)
    for n in sorted(names):
        stub.add(n, getattr(module, n), module.__name__)
    return stub.text()


def stubs() -> dict[Path, str]:
    """Each stub by its file."""
    mt.nn, mt.parallel.gangs, mt.storage.save, mt.training  # noqa: B018  (imports them)
    front = ROOT / "front"
    return {
        ROOT / "arrays" / "core" / "array.pyi": array(),
        front / "__init__.pyi": package(),
        **{front / f"{name}.pyi": namespace(name) for name in HOMES},
    }


if __name__ == "__main__":
    raise SystemExit(max(tables.write(file, text) for file, text in stubs().items()))
