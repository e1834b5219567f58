"""Callables that stand for functions of the user."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any


class Wrapper(abc.ABC):
    """A callable that calls functions of the user, whose captures count as its own."""

    @abc.abstractmethod
    def functions(self) -> list[Callable[..., Any]]:
        """The functions."""
