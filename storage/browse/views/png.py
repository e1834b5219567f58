"""Heat maps as PNG: one palette index a value, written with zlib (PNG specification, third edition, colour type 3)."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np

_NAN, _HIGH, _LOW = 253, 254, 255  # palette places of what has no place on the scale
_STEPS = 253

# Anchors of the scales: both run evenly in lightness, and differ for people who do not see red and green apart.
_TWO_SIDED = ("#7a2e0e", "#c9662c", "#eeb98b", "#f7f4ef", "#8fc3c9", "#2b7f8c", "#0b3f4d")
_ONE_SIDED = ("#f4f1ea", "#bcd9d6", "#6fb2b8", "#2b7f8c", "#125466", "#0a2c3d")
_ODD = ((214, 40, 140), (240, 200, 30), (90, 60, 160))


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def ramp(two_sided: bool, steps: int = _STEPS) -> np.ndarray:
    """The colours of a scale, (steps, 3), from its lowest to its highest value."""
    anchors = np.array([_rgb(c) for c in (_TWO_SIDED if two_sided else _ONE_SIDED)], float)
    at = np.linspace(0, len(anchors) - 1, steps)
    return (
        np.stack([np.interp(at, np.arange(len(anchors)), anchors[:, c]) for c in range(3)], 1).round().astype(np.uint8)
    )


def scale(low: float, high: float) -> tuple[float, float, bool]:
    """(low, high, two-sided) of the scale for values from ``low`` to ``high``: symmetric about zero where they lie on both sides of it.

    >>> scale(-1.0, 3.0), scale(2.0, 3.0)
    ((-3.0, 3.0, True), (2.0, 3.0, False))
    """
    if low < 0 < high:
        reach = max(-low, high)
        return -reach, reach, True
    return low, high, False


def heat(values: np.ndarray, low: float, high: float) -> bytes:
    """A PNG with one pixel for each element of a matrix. NaN, ∞ and −∞ have colours of their own.

    >>> heat(np.array([[0.0, np.nan]]), 0.0, 1.0)[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    low, high, two_sided = scale(low, high)
    with np.errstate(all="ignore"):
        # Halves, as the difference of the extremes of float64 is no float64.
        span = high / 2 - low / 2
        part = (values / 2 - low / 2) / span if span > 0 else np.full(values.shape, 0.5)
        index = np.clip(np.nan_to_num(part) * (_STEPS - 1), 0, _STEPS - 1).round().astype(np.uint8)
    index[np.isnan(values)] = _NAN
    index[np.isposinf(values)] = _HIGH
    index[np.isneginf(values)] = _LOW
    palette = np.concatenate([ramp(two_sided), np.array(_ODD, np.uint8)])
    return encode(index, palette)


def encode(index: np.ndarray, palette: np.ndarray) -> bytes:
    """A PNG of palette indices."""
    height, width = index.shape
    rows = np.zeros((height, width + 1), np.uint8)  # each row starts with the number of its filter: none
    rows[:, 1:] = index

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", head),
            chunk(b"PLTE", palette.tobytes()),
            chunk(b"IDAT", zlib.compress(rows.tobytes(), 6)),
            chunk(b"IEND", b""),
        ]
    )


def data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def legend(two_sided: bool, width: int = 128) -> bytes:
    """The scale itself, one pixel high."""
    return encode(np.arange(width, dtype=np.uint8).reshape(1, -1), ramp(two_sided, width))
