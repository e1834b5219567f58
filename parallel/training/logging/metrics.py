"""Writers of a run's numbers: JSON lines, and event files for TensorBoard."""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import google_crc32c

from ....arrays.core.errors import TrainingError


class JsonLines:
    """One JSON object a line, each with its step.

    A run that resumes at step ``n`` drops the lines after ``n``, as it repeats those steps.
    """

    def __init__(self, path: str | os.PathLike[str], step: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._keep_until(step)
        self._file = self.path.open("a", encoding="utf-8")

    def _keep_until(self, step: int) -> None:
        if not self.path.exists():
            return
        kept = [line for line in read_lines(self.path) if line["step"] <= step]
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        beside.replace(self.path)

    def write(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Append the numbers of a step. NaN and infinities become texts, as JSON has none."""
        line = {"step": step, **{n: v if not _odd(v) else repr(v) for n, v in numbers.items()}}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _odd(v: Any) -> bool:
    return isinstance(v, float) and not math.isfinite(v)


def read_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line that a crash cut off is left out."""
    out = []
    with Path(path).open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith("\n"):
                break
            try:
                line = json.loads(text)
            except json.JSONDecodeError as e:
                raise TrainingError(f"{path}, line {number}: {e}") from e
            if not isinstance(line, dict) or not isinstance(line.get("step"), int):
                raise TrainingError(f"{path}, line {number}: an object with an integer step was expected")
            out.append(line)
    return out


# ----- TensorBoard ----------------------------------------------------------------------------------------------------
# An event file is a row of records: length (8 bytes), masked CRC-32C of it (4), the message, masked CRC-32C of that (4); see
# TFRecord in TensorFlow's documentation. Messages are protocol buffers of `event.proto`, of which five fields are used here.


class EventFile:
    """Scalars for TensorBoard, in a file of its own: ``events.out.tfevents.…`` in ``directory``.

    TensorBoard then hides the scalars of earlier files for steps after ``step``, the last finished step.
    """

    def __init__(self, directory: str | os.PathLike[str], step: int = 0) -> None:
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self.path = folder / name
        self._file = self.path.open("wb")
        self._record(_event(0, _bytes(3, b"brain.Event:2")))
        # A session that starts at a step hides the scalars of earlier files from that step on.
        self._record(_event(step + 1 if step else 0, _bytes(7, _varint(1, 1))))

    def write(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Append the numbers of a step; other values are left out."""
        values = b"".join(
            _bytes(1, _bytes(1, name.encode()) + b"\x15" + struct.pack("<f", float(v)))
            for name, v in numbers.items()
            if isinstance(v, int | float) and not isinstance(v, bool)
        )
        self._record(_event(step, _bytes(5, values)))

    def _record(self, message: bytes) -> None:
        head = struct.pack("<Q", len(message))
        self._file.write(head + _crc(head) + message + _crc(message))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _crc(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _number(n: int) -> bytes:
    out = bytearray()
    while True:
        low, n = n & 0x7F, n >> 7
        out.append(low | (0x80 if n else 0))
        if not n:
            return bytes(out)


def _varint(field: int, n: int) -> bytes:
    return _number(field << 3) + _number(n)


def _bytes(field: int, data: bytes) -> bytes:
    return _number(field << 3 | 2) + _number(len(data)) + data


def _event(step: int, content: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", time.time()) + _varint(2, step) + content
