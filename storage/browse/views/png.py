"""Heat maps as PNG: one pixel a value, with the colours of a scale."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

_STEPS = 253  # colours of a scale; the palette's last three are those of what has no place on it: NaN, ∞, −∞
# Anchors of the scales: both run evenly in lightness, and differ for people who do not see red and green apart.
_TWO_SIDED = ("7a2e0e", "c9662c", "eeb98b", "f7f4ef", "8fc3c9", "2b7f8c", "0b3f4d")
_ONE_SIDED = ("f4f1ea", "bcd9d6", "6fb2b8", "2b7f8c", "125466", "0a2c3d")
_ODD = ((214, 40, 140), (240, 200, 30), (90, 60, 160))


def ramp(two_sided: bool, steps: int = _STEPS) -> np.ndarray:
    """The colours of a scale, (steps, 3), from its lowest to its highest value."""
    anchors = np.array([list(bytes.fromhex(c)) for c in (_TWO_SIDED if two_sided else _ONE_SIDED)], float)
    at = np.linspace(0, len(anchors) - 1, steps)
    bands = [np.interp(at, np.arange(len(anchors)), band) for band in anchors.T]
    return np.stack(bands, 1).round().astype(np.uint8)


def scale(low: float, high: float) -> tuple[float, float, bool]:
    """(low, high, two-sided) of the scale for values from ``low`` to ``high``: symmetric about zero where they lie on
    both sides of it.

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
    for k, odd in enumerate((np.isnan, np.isposinf, np.isneginf)):
        index[odd(values)] = _STEPS + k
    return _encode(index, np.concatenate([ramp(two_sided), np.array(_ODD, np.uint8)]))


def _encode(index: np.ndarray, palette: np.ndarray) -> bytes:
    """A PNG of palette indices."""
    image = Image.frombytes("P", index.shape[::-1], np.ascontiguousarray(index).tobytes())
    image.putpalette(palette.tobytes())
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def legend(two_sided: bool, width: int = 128, height: int = 8) -> bytes:
    """The scale itself."""
    return _encode(np.tile(np.arange(width, dtype=np.uint8), (height, 1)), ramp(two_sided, width))
