"""Checks of arguments that several functions take: a typed error names the argument before anything is changed."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...arrays.core.errors import CheckpointError


def whole_number(what: str, value: Any) -> int:
    """An integer of any kind as Python's; ``what`` begins the error."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise CheckpointError(f"{what} is a whole number, got {value!r:.40}") from None


def step_number(value: Any) -> int:
    """A step as Python's integer."""
    step = whole_number("a step", value)
    if step < 0:
        raise CheckpointError(f"a step cannot be negative, got {step}")
    return step


def check_positive(**given: Any) -> None:
    """Each is a whole number of at least 1 (1e9 is one)."""
    for name, n in given.items():
        if not (isinstance(n, int | float | np.number) and n >= 1 and n % 1 == 0):
            raise CheckpointError(f"{name} must be a positive whole number, got {n!r:.80}")


def mapping(what: str, value: Any) -> Mapping[Any, Any]:
    """A mapping as it is; None is an empty one. ``what`` begins the error."""
    if not isinstance(value, Mapping | None):
        raise CheckpointError(f"{what} must be a mapping, such as a dict, got {value!r:.80}")
    return {} if value is None else value
