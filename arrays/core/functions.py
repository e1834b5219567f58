"""Functions that are given to functions."""

from __future__ import annotations

from typing import Any

from .errors import NotAFunction


def check_function(who: str, fn: Any) -> None:
    """Raise :class:`NotAFunction` for an object that cannot be called."""
    if not callable(fn):
        raise NotAFunction(
            f"[{who}] takes a function, got {type(fn).__name__}: pass the function itself, and not what it returned"
        )
