"""The calls of our functions that Python or NumPy would refuse in words of their own: NumPy's keywords, and senseless
arguments.

``mt.sort(x, kind="stable")`` is taken as ``np.sort`` of an Array takes it. A keyword that has no effect here is passed
over, and so is one with NumPy's default. Any other that our function lacks is refused by name. An argument that makes
no sense is an :class:`ArgumentError` that shows the call.
"""

from __future__ import annotations

import functools
import inspect
import operator
import reprlib
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from ..core.array import Array
from ..core.dispatch import Symbol
from ..core.errors import FOREIGN_ERRORS, MeshtapeError, NumPyFunctionError, type_of_ours
from ..core.op import call_beside
from ..ops import element_rows
from ..ops.creation import key_beside
from .methods import FUNCTIONS
from .numpy_protocol import _called_with, _namespace, _parameters, _translated, array_function, array_ufunc


def _spelled(name: str, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], theirs: Any = None) -> Any:
    """Our function called with keywords that it lacks."""
    theirs = theirs or getattr(np, name, None)
    if kwargs.pop("out", None) is not None:
        raise NumPyFunctionError(f"[{name}] arrays are values: write out[...] = mt.{name}(x), or np.{name}(x, out=out)")
    if isinstance(theirs, np.ufunc):
        return array_ufunc(None, theirs, "__call__", *args, **kwargs)  # type: ignore[arg-type]
    positional, keywords = _translated(name, theirs, fn, args, kwargs) if callable(theirs) else (args, kwargs)
    return _called_with(name, fn, positional, keywords)


def _spelled_elementwise(name: str, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return _spelled(name, fn, args, dict(kwargs))
    except FOREIGN_ERRORS as e:
        _refuse(e, name, args, kwargs)


element_rows.spelled = _spelled_elementwise


def _refuse(error: Exception, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Raise an error of Python's or NumPy's as one of ours that shows the call; others as they are."""
    kind = type_of_ours(error)
    if kind is None:
        raise error
    raise kind(f"[{name}] {error}: {_shown(name, args, kwargs)}") from None


def guarded(name: str, fn: Callable[..., Any], theirs: Any, room: str = "") -> Callable[..., Any]:
    """``fn`` that also takes calls of NumPy's function ``theirs``, and names itself in errors.

    ``room`` is the prefix of its namespace, such as ``fft.``."""

    itself = getattr(fn, "calls_beside", False)

    @functools.wraps(fn)
    def inner(*args: Any, **kwargs: Any) -> Any:
        own, counts = _declared(fn)
        if room == "random.":  # whose functions say more of their numbers
            counts = []
            args = (key_beside(args[0], *args[1:], *kwargs.values()), *args[1:]) if args else args
        try:
            try:
                for i, count in counts:
                    n = args[i] if i < len(args) else kwargs.get(count)
                    if type(n) is not int and n is not None and not isinstance(n, Symbol):
                        operator.index(n)
                return fn(*args, **kwargs) if itself else call_beside(fn, args, kwargs)
            except TypeError as e:
                if isinstance(e, MeshtapeError) or (
                    kwargs.keys() <= own and (_binds(fn, args, kwargs) or not _binds(theirs, args, kwargs))
                ):
                    raise
            return call_beside(_spelled, (name, fn, args, kwargs, theirs), {})
        except FOREIGN_ERRORS as e:
            _refuse(e, room + name, args, kwargs)

    return inner


def _binds(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function says that it takes such a call. (Of NumPy's ufuncs what goes beyond ours is ``out``.)"""
    if fn is None or isinstance(fn, np.ufunc):
        return False
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True


@functools.cache
def _declared(fn: Callable[..., Any]) -> tuple[set[str], list[tuple[int, str]]]:
    """The keywords of a function, and its parameters that are integers, with their positions. Read at its first call:
    signatures of all functions take a tenth of the time of an import."""
    parameters = list(_parameters(fn).values())
    own = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    integers = [(i, p.name) for i, p in enumerate(parameters) if p.annotation in ("int", "int | None")]
    return own, [(i, name) for i, name in integers if not name.startswith("axis")]


def _shown(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    def text(a: Any) -> str:
        if hasattr(a, "shape") and hasattr(a, "dtype"):
            return f"{a.dtype}{list(a.shape)}"
        return reprlib.repr(a)

    return f"mt.{name}({', '.join([*map(text, args), *(f'{k}={text(v)}' for k, v in kwargs.items())])})"


def _method(fn: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A function as a method. Arguments that it lacks, or has elsewhere, are read as those of NumPy's function."""

    @functools.wraps(fn)
    def call(self: Array, *args: Any, **kwargs: Any) -> Any:
        try:
            return call_beside(fn, (self, *args), kwargs)
        except TypeError as e:
            if isinstance(e, MeshtapeError):
                raise
        if isinstance(theirs, np.ufunc):
            return theirs(self, *args, **kwargs)
        return array_function(self, theirs, (Array,), (self, *args), kwargs)

    return call


def add_keywords() -> None:
    """Have the functions of the namespaces take NumPy's keywords, and give ``Array`` those that are its methods."""
    ours = _namespace()
    for name in FUNCTIONS.split():  # methods are the plain functions
        setattr(Array, name, _method(getattr(ours, name), getattr(np, name)))
    known: dict[Any, Any] = {}
    rooms = (("", np), ("linalg.", np.linalg), ("fft.", np.fft), ("nn.", None), ("random.", None))
    for room, theirs in rooms:
        own = getattr(ours, room[:-1]) if room else ours
        for name, fn in list(vars(own).items()):
            # (Those of elements, which are the most frequent of all calls, see to it themselves.)
            if name.startswith("_") or hasattr(fn, "__signature__") or (room and name not in own.__all__):
                continue
            if getattr(fn, "__module__", "").startswith(ours.__name__) and callable(fn) and not isinstance(fn, type):
                if fn not in known:
                    known[fn] = guarded(name, fn, getattr(theirs, name, None), room)
                    known[fn].__module__ = own.__name__  # where pickle finds it: the defining module has the plain one
                setattr(own, name, known[fn])
