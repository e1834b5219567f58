"""Where arrays live: ``cpu``, or ``cuda:N`` where a CUDA driver answers.

>>> device("cpu")
Device('cpu')
>>> device(str(default_device())) is default_device()
True
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .errors import DeviceError
from .op import state


@dataclass(frozen=True, slots=True)
class Device:
    """One device, made by :func:`device`.

    ``kind`` is ``"cpu"`` or ``"cuda"``, ``index`` counts the devices of a kind.
    """

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"

    def __repr__(self) -> str:
        return f"Device({str(self)!r})"


@functools.cache
def _parse(text: str) -> Device:
    kind, colon, index = text.partition(":")
    if not colon or index.isdecimal():
        found = Device(kind, int(index or 0))
        if kind == "cuda" or (kind == "cpu" and found.index == 0):
            # One object a device: other spellings are looked up under its proper name.
            return found if str(found) == text else _parse(str(found))
    raise DeviceError(f"[device] unknown device {text!r}: choose 'cpu' or 'cuda:N'")


def device(name: str | Device) -> Device:
    """The device called ``name``. Equal names give the same object. Raises :class:`DeviceError` for an unknown name.

    Naming a CUDA device does not ask whether it exists; :func:`use_device` does, and the first array put there.

    >>> mt.device("cpu")
    Device('cpu')
    """
    if isinstance(name, Device):
        return _parse(str(name))
    if not isinstance(name, str):
        raise DeviceError(f"[device] a device is named by a string such as 'cpu' or 'cuda:0', got {name!r}")
    return _parse(name)


CPU = device("cpu")


def default_device() -> Device:
    """Where creation functions put arrays: the innermost :func:`use_device`, else the CPU.

    >>> mt.default_device()
    Device('cpu')
    """
    return state.device or CPU


@contextmanager
def use_device(name: str | Device) -> Iterator[Device]:
    """``backend.use_device``, which users call, without the question whether there is such a device."""
    chosen = device(name)
    before = state.device
    state.device = chosen
    try:
        yield chosen
    finally:
        state.device = before
