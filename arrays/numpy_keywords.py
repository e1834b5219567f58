"""NumPy's keywords of our functions: ``mt.sort(x, kind="stable")`` is taken as ``np.sort`` of an Array takes it.

A keyword that has no effect here is passed over, and so is one with NumPy's default. Any other that our function lacks is refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from . import elementwise
from .errors import NumPyFunctionError
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


def takes_numpys(name: str, fn: Callable[..., Any], theirs: Any) -> Callable[..., Any]:
    """``fn`` for calls that may have keywords of NumPy's function ``theirs``."""
    own = {k for k, p in _parameters(fn).items() if p.kind is not p.POSITIONAL_ONLY}

    @functools.wraps(fn)
    def inner(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except TypeError:
            if kwargs.keys() <= own:
                raise
        return _spelled(name, fn, args, kwargs, theirs)

    return inner


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
                    known[fn] = takes_numpys(name, fn, getattr(theirs, name, None))
                setattr(own, name, known[fn])
