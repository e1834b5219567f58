"""Ctrl-C while the command is still being imported ends it as it does later: quietly, with code 130. The first module
that is imported."""

from __future__ import annotations

import os
import sys
from pathlib import PurePath
from types import TracebackType


def _ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        os._exit(130)
    sys.__excepthook__(kind, error, trace)


def is_command() -> bool:
    """Whether this process is the command, whose program has no name yet when its package is imported."""
    name = sys.argv[0] if sys.argv else ""
    return name == "-m" or PurePath(name).stem == "meshtape"


if is_command():
    sys.excepthook = _ended
