"""``meshtape.arrays`` under a tape: its creation functions return watched arrays.

This is the namespace that the public array-API suite is run on a second time, see docs/development/array-api.md: a tape
must change no dtype, shape, value or aliasing. ``ARRAY_API_TESTS_MODULE=traced_namespace`` finds it by
``PYTHONPATH=tests``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import meshtape.arrays as _xp
from meshtape.arrays import *  # noqa: F403
from meshtape.arrays import __array_api_version__, __array_namespace_info__, linalg
from meshtape.arrays.core.array import Array
from meshtape.arrays.ops import fft
from meshtape.autodiff import Tape

CREATION = [
    "arange",
    "asarray",
    "empty",
    "empty_like",
    "eye",
    "from_dlpack",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "tril",
    "triu",
    "zeros",
    "zeros_like",
]


class _Endless(Tape):
    """A tape that forgets its oldest calls: it listens for as long as the process lives."""

    def record(self, *call: Any) -> None:
        super().record(*call)
        if len(self._records) > 1000:
            self._records.clear()
            self._watched.clear()


TAPE = _Endless(persistent=True)
TAPE.__enter__()


def watching(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with a result that the tape watches."""

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        out = fn(*args, **kwargs)
        if isinstance(out, Array):
            TAPE.watch(out)
        return out

    return wrapped


globals().update({name: watching(getattr(_xp, name)) for name in CREATION})


def __getattr__(name: str) -> Any:
    return getattr(_xp, name)


__all__ = [*_xp.__all__, "__array_api_version__", "__array_namespace_info__", "fft", "linalg"]
