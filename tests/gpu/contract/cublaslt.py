"""cuBLASLt, answered by NumPy: descriptions with the library's defaults and sizes of attributes, the statuses of what it
refuses, and values. A call in a captured stream keeps its description, and is computed when the graph runs."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import ml_dtypes
import numpy as np

OK, INVALID, UNSUPPORTED = 0, 7, 15
FLOAT8 = {28: ml_dtypes.float8_e4m3fn, 29: ml_dtypes.float8_e5m2}
WORKSPACE = 1 << 20
"""Bytes that each algorithm says it takes."""

# Bytes of each attribute that may be set, by cublasLt.h.
SIZES = {
    "Desc": {0: 4, 1: 4, 2: 4, 3: 4, 4: 4, 5: 4, 6: 4, 7: 4, 8: 8, 10: 8, 11: 8, 12: 8, 13: 8, 17: 8, 18: 8, 26: 4},
    "Layout": {0: 4, 1: 4, 2: 8, 3: 8, 4: 8, 5: 4, 6: 8, 7: 8},
    "Preference": {0: 4, 1: 8, 3: 4, 5: 4, 6: 4, 7: 4, 8: 4, 9: 4, 12: 8},
}
# The type of factors and result, with the types to compute in and of the scale.
SERVED = {(2, 2, 2): (68, 0), (14, 14, 14): (68, 0), (0, 0, 0): (68, 0), (1, 1, 1): (70, 1), (4, 4, 4): (68, 4)}
SERVED |= {
    (2, 2, 0): (68, 0),
    (14, 14, 0): (68, 0),
    (5, 5, 5): (70, 5),
    **{(x, y, d): (68, 0) for x, y in ((28, 28), (28, 29), (29, 28)) for d in (0, 2, 14)},
}

asked: list[tuple[Any, ...]] = []
"""The operands' types and the epilogue of each request for an algorithm."""
_objects: dict[int, tuple[str, dict[int, int]]] = {}
_numbers = itertools.count(1000)
_captured: list[Any] = []


def _new(kind: str, values: dict[int, int]) -> int:
    number = next(_numbers)
    _objects[number] = kind, values
    return number


def _write(at: int, value: int, of: Any = ctypes.c_uint64) -> None:
    of.from_address(at).value = value


def _set(w: Any, kind: str) -> int:
    found, values = _objects[w.long(0)]
    if found != kind or SIZES[kind].get(w[1]) != w.long(3):
        return INVALID
    raw = ctypes.string_at(w.long(2), w.long(3))
    values[w[1]] = int.from_bytes(raw, "little", signed=kind == "Layout")
    return OK


def _check(description: dict[int, int], a: dict, b: dict, c: dict, d: dict) -> int:
    """The status of a product: what the documentation of the library asks for."""
    types, wanted = (a[0], b[0], d[0]), (description[0], description[1])
    compute, scale = SERVED.get(types, (None, None))
    if (wanted[0] if wanted[0] != 77 or types[2] not in (0, 4) else 68, wanted[1]) != (compute, scale):
        return UNSUPPORTED
    across = [description.get(i, 0) for i in (3, 4)]
    rows, inner = (a[3], a[2]) if across[0] else (a[2], a[3])
    columns, other = (b[2], b[3]) if across[1] else (b[3], b[2])
    if (rows, columns) != (d[2], d[3]) or inner != other or c is not d:
        return INVALID
    if any(m[4] < m[2] for m in (a, b, d)) or len({m.get(5, 1) for m in (a, b, d)}) > 1:
        return INVALID
    if (a[0] in FLOAT8 or b[0] in FLOAT8) and (across != [1, 0] or any(n % 16 for n in (rows, columns, inner))):
        return UNSUPPORTED
    epilogue = description.get(7, 1)
    if epilogue not in (1, 4, 256) or (epilogue != 1 and (types[0] in (4, 5) or not description.get(8))):
        return UNSUPPORTED
    return OK


def _heuristic(w: Any) -> int:
    description, a, b, c, d, preference = (_objects[w.long(i)][1] for i in range(1, 7))
    status = _check(description, a, b, c, d)
    if status:
        return status
    asked.append((a[0], b[0], description[0], description.get(7, 1), preference[3]))
    result = w.long(8)
    for i, attribute in enumerate((5, 6, 8)):  # an algorithm relies on the alignment that it was promised
        _write(result + 8 * i, preference.get(attribute, 256))
    _write(result + 24, description.get(8, 0) & -description.get(8, 0))
    _write(result + 64, WORKSPACE)
    _write(w.long(9), 1, ctypes.c_int)
    return OK


class Product:
    """One call, with its description as it was then."""

    def __init__(self, w: Any, libraries: Any) -> None:
        objects = [dict(_objects[w.long(i)][1]) for i in (1, 4, 6, 9, 11)]
        self.description, self.a, self.b, _, self.d = objects
        self.at = [w.long(i) for i in (3, 5, 10)]
        promised = [ctypes.c_uint64.from_address(w.long(12) + 8 * i).value for i in range(4)]
        places = [*self.at, self.description.get(8, 0)]
        misplaced = [p for p, n in zip(places, promised, strict=True) if n and p % n]
        self.status = (
            INVALID if misplaced or w.long(8) != w.long(10) or w.long(14) < WORKSPACE or not w.long(13) else OK
        )
        scale = libraries.CUDA_TYPES[self.description[1]]
        self.numbers, self.libraries = [w.number(i, scale) for i in (2, 7)], libraries
        if self.numbers not in ([1, 0], [1, 1]):
            self.status = INVALID

    def _matrix(self, i: int, m: dict[int, int], across: int) -> np.ndarray:
        dtype = np.uint8 if m[0] in FLOAT8 else self.libraries.CUDA_TYPES[m[0]]
        shape, strides = (m.get(5, 1), m[2], m[3]), (m.get(6, 0), 1, m[4])
        found = self.libraries.strided(self.at[i], dtype, shape, strides).view(FLOAT8.get(m[0], dtype))
        return found.swapaxes(1, 2) if across else found

    def run(self) -> int:
        wide = {1: np.float64, 4: np.complex64, 5: np.complex128}.get(self.d[0], np.float32)
        a = self._matrix(0, self.a, self.description.get(3, 0)).astype(wide)
        b = self._matrix(1, self.b, self.description.get(4, 0)).astype(wide)
        out, epilogue = self._matrix(2, self.d, 0), self.description.get(7, 1)
        found = a @ b
        for pointer in (17, 18):  # a factor of float8, on the device
            if self.description.get(pointer):
                found = found * self.libraries.strided(self.description[pointer], np.float32, (), ())
        if epilogue != 1:
            vector = self.libraries.strided(self.description[8], out.dtype, (self.d[2],), (1,))
            if epilogue == 4:
                found = found + vector.astype(wide)[:, None]
            else:
                vector[...] = a.sum(axis=(0, 2)).astype(out.dtype)
        if self.numbers[1]:
            found = found + out.astype(wide)
        out[...] = found.astype(out.dtype)
        return OK


def answers(libraries: Any) -> dict[str, Any]:
    """By name: functions of the words of a call that return its status."""

    def create(kind: str, w: Any, *attributes: int) -> int:
        _write(w.long(0), _new(kind, {i: w.long(1 + n) for n, i in enumerate(attributes)}))
        return OK

    def matmul(w: Any) -> int:
        made = Product(w, libraries)
        return made.status or made.run()

    def capture(w: Any) -> int:
        made = Product(w, libraries)
        _captured.append(made)
        w.put(0, len(_captured) - 1)
        return made.status

    return {
        "cublasLtMatmulDescCreate": lambda w: create("Desc", w, 0, 1),
        "cublasLtMatrixLayoutCreate": lambda w: create("Layout", w, 0, 2, 3, 4),
        "cublasLtMatmulPreferenceCreate": lambda w: create("Preference", w),
        "cublasLtMatmulDescSetAttribute": lambda w: _set(w, "Desc"),
        "cublasLtMatrixLayoutSetAttribute": lambda w: _set(w, "Layout"),
        "cublasLtMatmulPreferenceSetAttribute": lambda w: _set(w, "Preference"),
        **dict.fromkeys(
            ("cublasLtMatmulDescDestroy", "cublasLtMatrixLayoutDestroy", "cublasLtMatmulPreferenceDestroy"),
            lambda w: _objects.pop(w.long(0)) and OK,
        ),
        "cublasLtMatmulAlgoGetHeuristic": _heuristic,
        "cublasLtMatmul": matmul,
        "cublasLtCapture": capture,
        "cublasLtReplay": lambda w: _captured[w.long(0)].run(),
    }
