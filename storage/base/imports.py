"""Imports of large packages that Ctrl-C does not cut in two: half of one stays in a process, and every later import of
it fails there."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C until the imports of a block are done; the signal's handler is called then.

    Python gives the signal to the main thread alone, so that imports of others are whole.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[int, object]] = []
    signal.signal(signal.SIGINT, lambda *said: held.append(said))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])
