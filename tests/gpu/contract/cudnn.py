"""cuDNN, answered by NumPy: descriptors with their checks, a list of algorithms of which some must not be taken, and
values, tap by tap. A call in a captured stream keeps its descriptors, and is computed when the graph runs."""

from __future__ import annotations

import ctypes
import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np

OK, BAD, UNSUPPORTED, FAILED = 0, 2000, 3000, 5000
TYPES = {0: np.float32, 1: np.float64, 2: np.float16, 9: ml_dtypes.bfloat16}
WORKSPACE = 1 << 16
"""Bytes that the algorithms say they take which this package may take."""
KINDS = {"Forward": "xwy", "BackwardData": "wyx", "BackwardFilter": "xyw"}

# By kind, the fastest first: algorithm, status, workspace, whether it is deterministic. Transforms come first; then one
# that is not supported, one that takes all memory, those with atomic additions.
LISTS = {
    "Forward": [(6, 0, 0, 1), (4, 0, 0, 1), (1, 3000, 0, 1), (1, 0, 8 << 30, 1), (1, 0, WORKSPACE, 1), (0, 0, 0, 1)],
    "BackwardData": [(5, 0, 0, 1), (2, 0, 0, 1), (0, 0, 0, 0), (1, 0, WORKSPACE, 1)],
    "BackwardFilter": [(5, 0, 0, 1), (0, 0, 0, 0), (3, 0, 0, 0), (1, 0, 0, 0), (1, 0, WORKSPACE, 1)],
}

asked: list[tuple[Any, ...]] = []
"""The kind, type, layout and mathematics of each request for an algorithm."""
taken: list[tuple[str, int]] = []
"""The kind and algorithm of each call."""
status: dict[str, int] = {}
"""What a function is to answer, by its name; a call that is answered so does nothing."""
_objects: dict[int, dict[str, Any]] = {}
_numbers = itertools.count(1000)
_captured: list[Any] = []


def _packed(shape: tuple[int, ...], last: bool) -> tuple[int, ...]:
    """Elements from one to the next, of memory without gaps."""
    order = [0, *range(2, len(shape)), 1] if last else list(range(len(shape)))
    return tuple(math.prod(shape[a] for a in order[order.index(axis) + 1 :]) for axis in range(len(shape)))


def _tensor(w: Any) -> int:
    n = w[2]
    if not 4 <= n <= 8:
        return UNSUPPORTED
    shape, strides = tuple(w.ints(3, n)), tuple(w.ints(4, n))
    if min(*shape, *strides) <= 0 or w[1] not in TYPES:
        return BAD
    if sum((m - 1) * s for m, s in zip(shape, strides, strict=True)) >= 1 << 31:
        return UNSUPPORTED
    _objects[w.long(0)].update(type=w[1], shape=shape, strides=strides)
    return OK


def _filter(w: Any) -> int:
    shape = tuple(w.ints(4, w[3]))
    if not 3 <= len(shape) <= 8 or min(shape) <= 0 or w[1] not in TYPES or w[2] not in (0, 1):
        return BAD
    _objects[w.long(0)].update(type=w[1], shape=shape, strides=_packed(shape, w[2] == 1))
    return OK


def _convolution(w: Any) -> int:
    n = w[1]
    pad, stride, dilation = (tuple(w.ints(i, n)) for i in (2, 3, 4))
    if not 2 <= n <= 3 or min(pad) < 0 or min(*stride, *dilation) < 1 or w[5] != 1 or w[6] not in (0, 1):
        return BAD
    _objects[w.long(0)].update(pad=pad, stride=stride, dilation=dilation, wide=w[6], groups=1, math=0)
    return OK


def _set(w: Any, name: str) -> int:
    _objects[w.long(0)][name] = w[1]
    return OK


def _check(x: dict[str, Any], w: dict[str, Any], y: dict[str, Any], about: dict[str, Any]) -> int:
    """Whether the shapes fit, types are one, and memory has the channels at one place in all three."""
    numbers = zip(x["shape"][2:], w["shape"][2:], about["pad"], about["stride"], about["dilation"], strict=True)
    out = tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, p, s, d in numbers)
    groups = about["groups"]
    if y["shape"] != (x["shape"][0], w["shape"][0], *out) or x["shape"][1] != groups * w["shape"][1]:
        return BAD
    if w["shape"][0] % groups or len({o["type"] for o in (x, w, y)}) > 1 or about["wide"] != (x["type"] == 1):
        return BAD
    if not any(all(o["strides"] == _packed(o["shape"], last) for o in (x, w, y)) for last in (False, True)):
        return UNSUPPORTED
    return UNSUPPORTED if x["type"] == 1 and len(x["shape"]) == 5 else OK  # so that something is refused


def _algorithms(kind: str, w: Any) -> int:
    first, second, about, out = (_objects[w.long(i)] for i in (1, 2, 3, 4))
    sides = dict(zip(KINDS[kind], (first, second, out), strict=True))
    found = _check(*(sides[s] for s in "xwy"), about)
    if found:
        return found
    asked.append((kind, first["type"], out["strides"][1] == 1, about["math"]))
    rows = LISTS[kind][: w[5]]
    for i, (algorithm, answer, memory, fixed) in enumerate(rows):
        at = w.long(7) + 48 * i
        for offset, value in ((0, algorithm), (4, answer), (24, fixed), (28, about["math"])):
            ctypes.c_int.from_address(at + offset).value = value
        ctypes.c_uint64.from_address(at + 16).value = memory
    w.write(6, len(rows))
    return OK


class Call:
    """One call, with its descriptors as they were then."""

    def __init__(self, kind: str, w: Any, libraries: Any) -> None:
        self.kind, self.libraries = kind, libraries
        first, second, self.about, out = (dict(_objects[w.long(i)]) for i in (2, 4, 6, 11))
        self.sides = dict(zip(KINDS[kind], (first, second, out), strict=True))
        self.at = dict(zip(KINDS[kind], (w.long(3), w.long(5), w.long(12)), strict=True))
        numbers = [w.number(i, np.float64 if self.about["wide"] else np.float32) for i in (1, 10)]
        rows = [r for r in LISTS[kind] if r[0] == w[7] and not r[1] and r[2] <= w.long(9)]
        misplaced = any(at % 16 or not at for at in self.at.values())
        short = not rows or (w.long(9) and not w.long(8))
        self.status = _check(*(self.sides[s] for s in "xwy"), self.about)
        if misplaced or short or numbers != [1, 0]:
            self.status = FAILED
        taken.append((kind, w[7]))

    def _array(self, side: str) -> np.ndarray:
        about = self.sides[side]
        return self.libraries.strided(self.at[side], TYPES[about["type"]], about["shape"], about["strides"])

    def run(self) -> int:
        x, w, y = (self._array(s) for s in "xwy")
        wide, out, about = (
            np.float64 if self.about["wide"] else np.float32,
            self._array(KINDS[self.kind][2]),
            self.about,
        )
        groups, pad = about["groups"], about["pad"]
        sums = np.zeros([n + 2 * p for n, p in zip(x.shape, (0, 0, *pad), strict=True)], wide)
        inside = (slice(None), slice(None), *(slice(p, p + n) for n, p in zip(x.shape[2:], pad, strict=True)))
        if self.kind != "BackwardData":
            sums[inside] = x.astype(wide)
        parts = {
            "x": sums.reshape(x.shape[0], groups, -1, *sums.shape[2:]),
            "w": w.astype(wide).reshape(groups, -1, *w.shape[1:]),
            "y": y.astype(wide).reshape(y.shape[0], groups, -1, *y.shape[2:]),
        }
        if self.kind != "BackwardData":  # memory of a result may hold anything
            parts["w" if self.kind == "BackwardFilter" else "y"][...] = 0
        for place in itertools.product(*map(range, w.shape[2:])):
            numbers = zip(place, about["stride"], about["dilation"], y.shape[2:], strict=True)
            seen = parts["x"][(..., *(slice(p * d, p * d + s * (n - 1) + 1, s) for p, s, d, n in numbers))]
            tap = parts["w"][(..., *place)]
            if self.kind == "Forward":
                parts["y"] += np.einsum("ngi...,goi->ngo...", seen, tap)
            elif self.kind == "BackwardData":
                seen += np.einsum("ngo...,goi->ngi...", parts["y"], tap)
            else:
                tap += np.einsum("ngip,ngop->goi", *(a.reshape(*a.shape[:3], -1) for a in (seen, parts["y"])))
        found = {"x": sums[inside], "w": parts["w"].reshape(w.shape), "y": parts["y"].reshape(y.shape)}
        out[...] = found[KINDS[self.kind][2]].astype(out.dtype)
        return OK


def answers(libraries: Any) -> dict[str, Any]:
    """By name: functions of the words of a call that return its status."""

    def create(w: Any) -> int:
        number = next(_numbers)
        _objects[number] = {}
        ctypes.c_uint64.from_address(w.long(0)).value = number
        return OK

    def forced(name: str, answer: Any) -> Any:
        return lambda w: status.get(name) or answer(w)

    def convolve(kind: str, w: Any) -> int:
        made = Call(kind, w, libraries)
        return made.status or made.run()

    def capture(kind: str, w: Any) -> int:
        made = Call(kind, w, libraries)
        _captured.append(made)
        w.put(0, len(_captured) - 1)
        return made.status

    found: dict[str, Any] = {
        "SetTensorNdDescriptor": _tensor,
        "SetFilterNdDescriptor": _filter,
        "SetConvolutionNdDescriptor": _convolution,
        "SetConvolutionGroupCount": lambda w: _set(w, "groups"),
        "SetConvolutionMathType": lambda w: _set(w, "math"),
        "Replay": lambda w: _captured[w.long(0)].run(),
    }
    for kind in ("Tensor", "Filter", "Convolution"):
        found[f"Create{kind}Descriptor"] = create
        found[f"Destroy{kind}Descriptor"] = lambda w: _objects.pop(w.long(0), None) and OK
    for kind in KINDS:
        found[f"GetConvolution{kind}Algorithm_v7"] = lambda w, kind=kind: _algorithms(kind, w)
        found[f"Convolution{kind}"] = lambda w, kind=kind: convolve(kind, w)
        found[f"Convolution{kind}Capture"] = lambda w, kind=kind: capture(kind, w)
    return {f"cudnn{name}": forced(f"cudnn{name}", answer) for name, answer in found.items()}
