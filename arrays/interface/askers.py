"""The code that asks, where the answer depends on it: xarray, and C code that reads an array's number and writes it
into memory, which cuts off its gradient.

Such code and a user's ``float(x)`` both call ``__float__`` from the user's frame. The instruction at which the frame
stands tells them apart; an unknown one counts as the user's.
"""

from __future__ import annotations

import array
import dis
import functools
import sys
from types import CodeType, FrameType, ModuleType
from typing import Any

import numpy as np

from ..core.errors import GradientError, NumPyFunctionError, TracedValueError

_NOT_THE_USERS = ("site-packages", "dist-packages")
_STORES = ("STORE_SUBSCR", "STORE_SLICE")
_CALLS = ("CALL", "PRECALL", "CALL_KW")
_PUSHES_NOTHING = ("PRECALL", "KW_NAMES", "PUSH_NULL", "NOP", "NOT_TAKEN", "CACHE", "EXTENDED_ARG")
_WRITERS = ("numpy", "array", "_operator")
REMEDY = (
    "collect the elements and use mt.stack, or write to an Array (y = y.at[i].set(v)); write float(v) where it is to "
    "be a constant"
)


@functools.lru_cache(maxsize=256)
def _steps(code: CodeType) -> tuple[list[dis.Instruction], dict[int, int]]:
    """The instructions of a code object, and the number of the one at each offset."""
    steps = list(dis.get_instructions(code))
    return steps, {s.offset: i for i, s in enumerate(steps)}


def writes_buffer(frame: FrameType) -> str | None:
    """The expression by which the present line of a frame writes a number into foreign memory; None where it does
    not."""
    code = frame.f_code
    ours = frame.f_globals.get("__name__", "").startswith("meshtape.")
    if ours or any(p in code.co_filename for p in _NOT_THE_USERS):
        return None
    steps, places = _steps(code)
    at = places.get(frame.f_lasti)
    name = steps[at].opname if at is not None else ""
    if name in _STORES:
        return "o[i] = x"
    fn = _called(frame, steps, at) if at is not None and name in _CALLS else None
    owner = getattr(fn, "__self__", None)
    source = fn if owner is None or isinstance(owner, ModuleType) else type(owner)
    library = (getattr(source, "__module__", None) or "").partition(".")[0]
    writes = library in _WRITERS and fn is not np.float64  # a float of Python's too, and as plain a question
    return f"{fn.__name__}(...)" if writes else None


def _called(frame: FrameType, steps: list[dis.Instruction], at: int) -> Any:
    """The function that a call calls, where it is a name, or attributes of one; else None."""
    need = (steps[at].arg or 0) + (steps[at].opname == "CALL_KW")
    k = at - 1
    while k >= 0 and (need or steps[k].opname in _PUSHES_NOTHING):
        if steps[k].opcode in dis.hasjrel:
            return None  # an argument with a condition
        if steps[k].opname not in _PUSHES_NOTHING:
            need -= dis.stack_effect(steps[k].opcode, steps[k].arg)
        k -= 1
    names = []
    while k >= 0 and steps[k].opname in ("LOAD_ATTR", "LOAD_METHOD"):
        names.append(steps[k].argval)
        k -= 1
    first = steps[k].argval if k >= 0 and steps[k].opname.startswith("LOAD_") else None
    if not isinstance(first, str):
        return None
    found = next((d[first] for d in (frame.f_locals, frame.f_globals, frame.f_builtins) if first in d), None)
    for name in reversed(names):
        plain = isinstance(found, ModuleType | np.ndarray | array.array)  # a property of the user's is not called
        found = getattr(found, name, None) if plain else getattr(found, "__dict__", {}).get(name)
    return found


def as_plain_array() -> bool:
    """Whether xarray asks if an array is of Dask's, to call Dask's functions and methods on it, which ours lacks.

    It is then no collection, and goes through NumPy's protocols, as a local one does. ``chunk`` may have its blocks."""
    f, askers = sys._getframe(2), []
    while f is not None and len(askers) < 4:
        askers.append(f.f_globals.get("__name__"))
        f = f.f_back
    return "xarray.namedarray.utils" in askers and "xarray.namedarray.daskmanager" not in askers


def beside_labels(asking: FrameType) -> bool:
    """Whether xarray asks for the namespace of operands of which some are NumPy's texts, dates or objects."""
    frame: FrameType | None = asking
    if asking.f_code.co_name != "_get_single_namespace" or (frame := asking.f_back) is None:
        return False
    if frame.f_code.co_name != "get_array_namespace":  # a comprehension of its own, before Python 3.12
        frame = frame.f_back
    values: tuple[Any, ...] = frame.f_locals.get("values", ()) if frame else ()
    above = frame.f_back if frame else None
    if above is not None and above.f_code.co_name == "to_like_array":
        values += (above.f_locals.get("array"),)
    return any(getattr(getattr(v, "dtype", None), "kind", "b") in "OSUMm" for v in values)


def refuse_applied(x: Any) -> None:
    """Raise where a function under ``xarray.apply_ufunc`` would fetch all values of an array on a mesh."""
    f: Any = sys._getframe(2)
    while f is not None and f.f_code.co_name != "apply_variable_ufunc":
        f = f.f_back
    if f is not None:
        raise NumPyFunctionError(
            f"[xarray.apply_ufunc] the function takes NumPy's values, and this array (shape {x.shape}) is split over a "
            "mesh: fetch it first, d.as_numpy(), or use functions that meshtape has"
        )


def say_ours(error: BaseException | None) -> None:
    """Raise our error where NumPy replaced it by one of its own ("setting an array element with a sequence")."""
    cause = error.__cause__ if isinstance(error, ValueError) else None
    if isinstance(cause, GradientError | TracedValueError) and "array element" in str(error):
        raise cause from None
