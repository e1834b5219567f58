"""Signals of a run: SIGINT or SIGTERM ends it after the step with :class:`Interrupted`, a second one at once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from ....arrays.core.errors import Interrupted


class _Terminated(Interrupted, SystemExit):
    """After SIGTERM."""


class _KeyboardInterrupted(Interrupted, KeyboardInterrupt):
    """After SIGINT in an interactive session, which goes on."""


class _ScriptInterrupted(_KeyboardInterrupted, SystemExit):
    """After SIGINT in a script. (Python exits with 130 for ``KeyboardInterrupt`` itself, but with 1 for subclasses.)"""


def interrupted(message: str, received: signal.Signals, result: Any) -> Interrupted:
    """The end of a run that a signal stopped."""
    by_hand = _KeyboardInterrupted if hasattr(sys, "ps1") else _ScriptInterrupted
    kind = by_hand if received == signal.SIGINT else _Terminated
    return kind(message, int(received), result)


class StopSignals:
    """A context that catches signals: ``received`` is the first one, or None, and ``told`` is called with it.

    Handlers belong to the main thread. In another thread nothing is caught, and the process ends as usual.
    """

    def __init__(self, told: Callable[[signal.Signals], None]) -> None:
        self._told = told
        self.received: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for s in (signal.SIGINT, signal.SIGTERM):
                self._before[s] = signal.signal(s, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            self._restore()
            signal.raise_signal(number)
            return
        self.received = signal.Signals(number)
        self._told(self.received)

    def _restore(self) -> None:
        for s, handler in self._before.items():
            signal.signal(s, handler)
        self._before.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
