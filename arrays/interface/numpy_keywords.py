"""The calls of our functions that Python or NumPy would refuse in words of their own: NumPy's keywords, and senseless arguments.

``mt.sort(x, kind="stable")`` is taken as ``np.sort`` of an Array takes it. A keyword that has no effect here is passed over, and so is one with NumPy's default. Any other that our function lacks is refused by name. An argument that makes no sense is an :class:`ArgumentError` that shows the call.
"""

from __future__ import annotations

import functools
import operator
import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.dispatch import Symbol
from ..core.errors import ArgumentError, LinAlgError, MeshtapeError, NumberRangeError, NumPyFunctionError, OutOfMemory
from ..ops import elementwise
from .numpy_protocol import _called_with, _namespace, _parameters, _translated, array_ufunc


def _spelled(name: str, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], theirs: Any = None) -> Any:
    """Our function called with keywords that it lacks."""
    theirs = theirs or getattr(np, name, None)
    if kwargs.pop("out", None) is not None:
        raise NumPyFunctionError(f"[{name}] arrays are values: write out[...] = mt.{name}(x), or np.{name}(x, out=out)")
    if isinstance(theirs, np.ufunc):
        return array_ufunc(None, theirs, "__call__", *args, **kwargs)  # type: ignore[arg-type]
    positional, keywords = _translated(name, theirs, fn, args, kwargs) if callable(theirs) else (args, kwargs)
    return _called_with(name, fn, positional, keywords)


elementwise.spelled = _spelled


_OURS = (__name__.partition(".")[0], "numpy", "scipy", "ml_dtypes", "cupy")


def guarded(name: str, fn: Callable[..., Any], theirs: Any) -> Callable[..., Any]:
    """``fn`` for calls that may have keywords of NumPy's function ``theirs``, and arguments that make no sense."""

    @functools.wraps(fn)
    def inner(*args: Any, **kwargs: Any) -> Any:
        own, counts = _declared(fn)
        try:
            for i, count in counts:
                n = args[i] if i < len(args) else kwargs.get(count)
                if type(n) is not int and n is not None and not isinstance(n, Symbol):
                    operator.index(n)
            return fn(*args, **kwargs)
        except (ValueError, TypeError, ArithmeticError, MemoryError) as e:
            if isinstance(e, MeshtapeError):
                raise
            if not isinstance(e, TypeError) or kwargs.keys() <= own:
                kind = _kind(e)
                if kind is None:
                    raise
                raise kind(f"[{name}] {e}: {_shown(name, args, kwargs)}") from None
        return _spelled(name, fn, args, kwargs, theirs)

    return inner


@functools.cache
def _declared(fn: Callable[..., Any]) -> tuple[set[str], list[tuple[int, str]]]:
    """The keywords of a function, and its parameters that are integers, with their positions. Read at its first call: signatures of all
    functions take a tenth of the time of an import."""
    parameters = list(_parameters(fn).values())
    own = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    integers = [(i, p.name) for i, p in enumerate(parameters) if p.annotation in ("int", "int | None")]
    return own, [(i, name) for i, name in integers if not name.startswith("axis")]


def _kind(error: Exception) -> type[MeshtapeError] | None:
    """The type of ours for an error of Python's or NumPy's; None for one that has our words, or is that of a function that was passed."""
    if str(error).startswith("["):
        return None
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in _OURS:
            return None
        step = step.tb_next
    if isinstance(error, np.linalg.LinAlgError):
        return LinAlgError
    if isinstance(error, MemoryError):
        return OutOfMemory
    return NumberRangeError if type(error) is OverflowError else ArgumentError


def _shown(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    def text(a: Any) -> str:
        if hasattr(a, "shape") and hasattr(a, "dtype"):
            return f"{a.dtype}{list(a.shape)}"
        return reprlib.repr(a)

    return f"mt.{name}({', '.join([*map(text, args), *(f'{k}={text(v)}' for k, v in kwargs.items())])})"


def add_keywords() -> None:
    """Have the functions of the namespaces take NumPy's keywords."""
    ours = _namespace()
    known: dict[Any, Any] = {}
    for own, theirs in ((ours, np), (ours.linalg, np.linalg), (ours.fft, np.fft)):
        for name, fn in list(vars(own).items()):
            # (Those of elements, which are the most frequent of all calls, see to it themselves.)
            if name.startswith("_") or hasattr(fn, "__signature__") or not (own is ours or hasattr(theirs, name)):
                continue
            if getattr(fn, "__module__", "").startswith(ours.__name__) and callable(fn) and not isinstance(fn, type):
                if fn not in known:
                    known[fn] = guarded(name, fn, getattr(theirs, name, None))
                    known[fn].__module__ = own.__name__  # where pickle finds it: the defining module has the plain one
                setattr(own, name, known[fn])
