"""Frames: the head of every message between processes, with its sender, collective and length.

A frame is a fixed head and raw bytes of known length; nothing is unpickled. The head has epoch, group, sequence and op,
so that processes at different steps of a program detect it at once, and each names both.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

DATA, ABORT = b"D", b"A"
TEXT_LIMIT = 4096
"""Bytes of the reason that an abort may carry."""

_HEAD = struct.Struct(">4scQ16sQIIIQ64s")
_MAGIC = b"MTX2"
SIZE = _HEAD.size


class FramePosition(NamedTuple):
    """The position of a process: the number of the run, the turn of a loop within it, the step of the program."""

    run: int
    turn: int
    step: int

    def __str__(self) -> str:
        return f"run {self.run}, " + (f"turn {self.turn}, " if self.turn else "") + f"step {self.step}"


class Head(NamedTuple):
    """A head as it was read. ``kind`` is :data:`DATA` or :data:`ABORT`."""

    kind: bytes
    epoch: int
    group: bytes
    place: FramePosition
    process: int
    length: int
    what: str


def pack(kind: bytes, epoch: int, group: bytes, place: FramePosition, process: int, length: int, what: str) -> bytes:
    """The bytes of a head. ``what`` is cut to 64 bytes."""
    label = what.encode()[:64]
    return _HEAD.pack(_MAGIC, kind, epoch, group, *place, process, length, label)


def unpack(raw: bytes | bytearray | memoryview) -> Head | None:
    """The head in ``raw`` (exactly :data:`SIZE` bytes), or None where it is none of ours."""
    magic, kind, epoch, group, run, turn, step, process, length, label = _HEAD.unpack(raw)
    if magic != _MAGIC or kind not in (DATA, ABORT) or (kind == ABORT and length > TEXT_LIMIT):
        return None
    what = label.rstrip(b"\0").decode(errors="replace")
    return Head(kind, epoch, group, FramePosition(run, turn, step), process, length, what)
