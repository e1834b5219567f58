"""A step of a key rule: from a list of tensors to a list of tensors (see ``steps``)."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ...arrays.core.errors import CheckpointShapeError, RuleConflict, RuleSyntaxError
from ...arrays.core.formatting import count


class NotInvertible(ValueError):
    """A step has no inverse; says why."""


def axis_of(axis: int, t: Any) -> int:
    if not -len(t.shape) <= axis < len(t.shape):
        raise CheckpointShapeError(f"{t.name!r} has shape {t.shape}: there is no axis {axis}")
    return axis % len(t.shape)


def the_one(values: Sequence[Any], what: str) -> Any:
    first, *others = values
    if any(v != first for v in others):
        raise NotInvertible(f"its arrays have different {what}, which one step back cannot restore")
    return first


def expect(wanted: int, tensors: Sequence[Any], what: str) -> Sequence[Any]:
    if len(tensors) != wanted:
        raise RuleConflict(f"{what} takes {count(wanted, 'array')}, got {len(tensors)}")
    return tensors


def plain(value: Any) -> Any:
    """Python's own form of a list or a number of NumPy's.

    >>> plain([np.int64(2), 3])
    (2, 3)
    """
    if isinstance(value, (list, tuple)):
        return tuple(map(plain, value))
    return value.item() if isinstance(value, np.generic) else value


def fits(value: Any, kind: str) -> bool:
    """Whether a field of a step, whose type is written ``kind``, may have a value."""
    if value is None:
        return "None" in kind
    if kind.startswith("tuple"):
        return isinstance(value, tuple) and all(type(v) is int for v in value)
    if kind == "bool":
        return isinstance(value, bool)
    if kind.startswith("int"):
        return type(value) is int
    if kind.startswith("float"):
        return isinstance(value, (int, float))
    return isinstance(value, str)


@dataclass(frozen=True, slots=True)
class Step(abc.ABC):
    """Base of the steps. A field with a value of the wrong type is refused when a step is made."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            kept = plain(value)
            if not fits(kept, str(f.type)):
                raise RuleSyntaxError(f"{type(self).__name__}: {f.name} is {f.type}, it cannot be {value!r}")
            if kept is not value:
                object.__setattr__(self, f.name, kept)

    @abc.abstractmethod
    def apply(self, tensors: list[Any], targets: int | None) -> list[Any]:
        """The tensors after this step; ``targets`` is the number of names at the end of the rule, where it is known."""

    @abc.abstractmethod
    def inverse(self, before: list[Any]) -> Step:
        """The step back to ``before``."""
