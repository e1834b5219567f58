"""Names that a Python function may look up, read from its bytecode: what it could read beside its arguments."""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple


class Names(NamedTuple):
    """What the code of a function, and of the functions written inside it, looks up."""

    variables: frozenset[str]
    """Variables of the module."""
    attributes: frozenset[str]
    """Attributes, of whatever object; and texts, where an attribute's name may be one of them. Those whose absence may be noticed are here
    once more, behind a question mark."""
    anything: bool
    """Whether attributes may be read whose names stand nowhere."""
    any_variable: bool
    """Whether variables of the module may be."""
    modules: frozenset[str]
    """Modules that are imported where the function runs; and texts, where one of them may be looked up by such."""


_BY_TEXT = frozenset({"getattr", "hasattr", "setattr", "delattr"})
_MODULES = frozenset({"modules", "import_module"})
# Whoever looks up one of these may read attributes by names that are made while the code runs.
_ANYTHING = frozenset(
    {
        "vars",
        "globals",
        "eval",
        "exec",
        "attrgetter",
        "methodcaller",
        "__dict__",
        "__getattribute__",
        "asdict",
        "astuple",
    }
)
_ANY_VARIABLE = frozenset({"globals", "eval", "exec"})
_CAUGHT = frozenset({"AttributeError", "Exception", "BaseException"})
# A variable or an attribute that is written to counts as read: writing again may be no change.
_VARIABLES = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL"})
_CELLS = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR", "DELETE_ATTR", "IMPORT_FROM"})
_SILENT = frozenset({"CACHE", "EXTENDED_ARG", "PUSH_NULL", "PRECALL", "NOP", "RESUME"})


class _Found:
    """Names that are found in one code after the other."""

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
    """Whether the second argument of a call, of which the first begins at step ``k - 1``, is a text, and the third a plain value."""
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
    """What the code looks up."""
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
"""Our modules whose objects hold functions and numbers of the user's, and are read like his."""


@functools.lru_cache(maxsize=4096)
def is_library(module: str) -> bool:
    """Whether the code of this module computes with nothing of the user's but what it is given: our own, the standard library's,
    and that of installed packages which don't use this one."""
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
