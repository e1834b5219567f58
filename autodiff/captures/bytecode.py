"""Names that a Python function may look up, from its bytecode: variables, attributes and modules."""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple


class Names(NamedTuple):
    """The names that the code of a function, and of the functions inside it, looks up."""

    variables: frozenset[str]
    """Variables of the module."""
    attributes: frozenset[str]
    """Attributes of any object; and texts, where an attribute's name may be one of them.

    Those whose absence the code may notice are also here with a question mark before them."""
    anything: bool
    """Whether it may read attributes by names that are not in the code."""
    any_variable: bool
    """Whether it may read variables of the module so."""
    modules: frozenset[str]
    """Modules that the function imports when it runs; and texts, where a module may be looked up by a text."""


_BY_TEXT = frozenset({"getattr", "hasattr", "setattr", "delattr"})
_MODULES = frozenset({"modules", "import_module"})
# Code that looks up one of these may read attributes by names that it makes at run time.
_BY_NAMES = "vars globals eval exec attrgetter methodcaller __dict__ __getattribute__ asdict astuple"
_ANYTHING = frozenset(_BY_NAMES.split())
_ANY_VARIABLE = frozenset({"globals", "eval", "exec"})
_CAUGHT = frozenset({"AttributeError", "Exception", "BaseException"})
# A variable or an attribute that is written to counts as read: writing again may be no change.
_VARIABLES = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL"})
_CELLS = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR", "DELETE_ATTR", "IMPORT_FROM"})
_SILENT = frozenset({"CACHE", "EXTENDED_ARG", "PUSH_NULL", "PRECALL", "NOP", "RESUME"})


class _Found:
    """The names found so far in one or more code objects."""

    def __init__(self) -> None:
        self.variables: set[str] = set()
        self.attributes: set[str] = set()
        self.modules: set[str] = set()
        self.texts: set[str] = set()
        self.written: set[str] = set()  # of attributes: to write one that was not there is a change
        self.by_text = self.anything = False

    def look(self, code: CodeType) -> None:
        steps = [i for i in dis.get_instructions(code) if i.opname not in _SILENT]
        for k, step in enumerate(steps):
            name, op = step.argval, step.opname
            if op == "IMPORT_NAME":
                self.modules.add(name)
            elif op in _VARIABLES:
                self.variables.add(name)
            elif op in _ATTRIBUTES:
                self.attributes.add(name)
                if op == "STORE_ATTR":
                    self.written.add(name)
            elif op == "MATCH_CLASS":  # attributes by position, and those of which a constant has the names
                self.attributes.add("__match_args__")
                self.by_text = True
            if op in _VARIABLES or op in _ATTRIBUTES or op in _CELLS:
                self.by_text |= name in _BY_TEXT or name in _ANYTHING
                self.anything |= name in _ANYTHING or (name in _BY_TEXT and not _says_a_text(steps, k + 2))
        for c in code.co_consts:
            if isinstance(c, CodeType):
                self.look(c)
            else:
                self.texts.update(t for t in (c if type(c) is tuple else (c,)) if isinstance(t, str))


def _says_a_text(steps: list[Any], k: int) -> bool:
    """Whether a call, whose first argument begins at step ``k - 1``, has a text second and a plain value third."""
    while k < len(steps) and steps[k].opname in ("LOAD_ATTR", "LOAD_METHOD"):
        k += 1
    ops = [s.opname for s in steps[k : k + 3]]
    return (
        ops[:1] == ["LOAD_CONST"]
        and isinstance(steps[k].argval, str)
        and ("CALL" in ops[1:2] or (ops[1:2] and ops[1].startswith("LOAD_") and "CALL" in ops[2:]))
    )


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType | None) -> Names:
    """The names that the code looks up."""
    found = _Found()
    if code is not None:
        found.look(code)
    texts = {t for t in found.texts if t.isidentifier()} if found.by_text else set()
    unsure = texts if found.variables.isdisjoint(_CAUGHT) else texts | found.attributes
    return Names(
        frozenset(found.variables | texts),
        frozenset(found.attributes | texts | {f"?{name}" for name in unsure | found.written}),
        found.anything,
        not found.variables.isdisjoint(_ANY_VARIABLE),
        frozenset(
            found.modules if _MODULES.isdisjoint(found.attributes | found.variables) else found.modules | found.texts
        ),
    )


# ----- whose code it is -----------------------------------------------------------------------------------------------


def module_of(kind: type) -> str:
    """The module of a class. (That of functions which Cython compiled has a descriptor in its place.)"""
    found = kind.__module__
    return found if isinstance(found, str) else "builtins"


_OWN = ("meshtape.parallel.training", "meshtape.parallel.models")
"""Our modules whose objects hold functions and numbers of the user, and count as user code."""


@functools.lru_cache(maxsize=4096)
def is_library(module: str) -> bool:
    """Whether the code of this module reads nothing of the user's but its arguments.

    True for our own code, the standard library, and installed packages that do not use this one."""
    top = module.partition(".")[0]
    if top == "meshtape":
        return not module.startswith(_OWN)
    place = getattr(sys.modules.get(top), "__file__", None)
    if top in sys.stdlib_module_names and (place is None or place.startswith(_STANDARD)):
        return top != "__main__"
    if place is None or not any(p in place for p in ("site-packages", "dist-packages")):
        return False
    loaded = [m for name, m in list(sys.modules.items()) if name == top or name.startswith(f"{top}.")]
    return not any(_uses_us(v) for m in loaded for v in list(vars(m).values()))


_STANDARD = sysconfig.get_path("stdlib")


def _uses_us(value: Any) -> bool:
    kind = type(value)  # and not its __class__: code of the object's own may warn or raise
    if issubclass(kind, ModuleType):
        name = vars(value).get("__name__")
    else:
        name = getattr(
            value if issubclass(kind, type | FunctionType | BuiltinFunctionType) else kind, "__module__", None
        )
    return isinstance(name, str) and name.startswith("meshtape")
