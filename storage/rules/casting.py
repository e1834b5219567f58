"""The losses of a cast: values that another dtype cannot hold, counted while they are converted.

=============  ====================================================================  =======
kind           a value that                                                           refused
=============  ====================================================================  =======
``overflow``   was finite and became infinite                                         yes
``nan``        was a number and became NaN (float8_e4m3fn has no infinity)            yes
``wrapped``    lies outside the range of an integer dtype, or is neither 0 nor 1      yes
               for ``bool``
``fraction``   lost what stood behind the point in an integer dtype                   yes
``imaginary``  lost an imaginary part                                                 yes
``underflow``  was not zero and became zero                                           no
=============  ====================================================================  =======

Rounding to fewer digits is what a cast is for and is not counted. A cast that runs within `tallied` adds its losses to
that tally, under the name of the array that is made; elsewhere a loss that is refused is raised at once.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Self, TypeVar

import ml_dtypes
import numpy as np

from ...arrays.backends import casts
from ...arrays.core.errors import Lossy
from ..base.threads import within
from ..base.waiting import lock
from ..format import dtypes
from ..readers.reading import RangeJob

_SHOWN = 3
# Every value of the first is one of the second, beyond what NumPy knows.
_EXACT = {
    (a, b)
    for a in ("float8_e4m3fn", "float8_e5m2")
    for b in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
} | {("bfloat16", b) for b in ("float32", "float64", "complex64", "complex128")}


@lru_cache(maxsize=1024)
def exact(a: Any, b: Any) -> bool:
    """Whether dtype ``b`` holds every value of ``a``.

    >>> exact("bfloat16", "float32"), exact("float32", "bfloat16")
    (True, False)
    """
    a, b = dtypes.by_name(a), dtypes.by_name(b)
    native = not any(d.name.startswith(("bfloat", "float8")) for d in (a, b))
    return a == b or (a.name, b.name) in _EXACT or (native and np.can_cast(a, b, "safe"))


Place = tuple[tuple[int, ...], str, str]


@dataclass(frozen=True, slots=True)
class CastLoss:
    """How many values of an array a cast lost, by kind; and the first ``places`` of those that were lost without leave.

    A place is an index, the value there, and the value after the cast.

    >>> print(CastLoss(overflow=2, underflow=1))
    2 became infinite, 1 became zero
    """

    overflow: int = 0
    nan: int = 0
    wrapped: int = 0
    fraction: int = 0
    imaginary: int = 0
    underflow: int = 0
    places: tuple[Place, ...] = ()

    @property
    def _counts(self) -> tuple[int, ...]:
        return self.overflow, self.nan, self.wrapped, self.fraction, self.imaginary, self.underflow

    def __add__(self, other: CastLoss) -> CastLoss:
        counts = map(operator.add, self._counts, other._counts)
        return CastLoss(*counts, tuple(sorted({*self.places, *other.places})[:_SHOWN]))

    def __bool__(self) -> bool:
        return any(self._counts)

    def __str__(self) -> str:
        kinds = ("became infinite", "became NaN", "out of range", "lost a fraction")
        kinds += ("lost an imaginary part", "became zero")
        return ", ".join(f"{n} {what}" for n, what in zip(self._counts, kinds, strict=True) if n)

    def encode(self) -> list[Any]:
        """Plain values, for a journal."""
        return [*self._counts, [[list(at), value, result] for at, value, result in self.places]]

    @classmethod
    def decode(cls, row: list[Any]) -> Self:
        """Inverse of `encode`. Raises `ValueError` or `TypeError` where it is not such a row.

        >>> CastLoss.decode(CastLoss(nan=1, places=(((2, 0), "7e4", "nan"),)).encode())
        CastLoss(overflow=0, nan=1, wrapped=0, fraction=0, imaginary=0, underflow=0, places=(((2, 0), '7e4', 'nan'),))
        """
        *counts, places = row
        if len(counts) != len(fields(cls)) - 1 or not all(type(n) is int and n >= 0 for n in counts):
            raise ValueError(f"no counts of losses: {row}")
        return cls(*counts, tuple((tuple(map(int, at)), str(value), str(result)) for at, value, result in places))


def is_float(dtype: np.dtype) -> bool:
    """Whether a dtype is floating, ml_dtypes' own too.

    >>> is_float(dtypes.by_name("float8_e5m2")), is_float(np.dtype("int8"))
    (True, False)
    """
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


@lru_cache(maxsize=256)
def _bounds(source: np.dtype, target: np.dtype) -> tuple[int, int, int] | None:
    """Magnitudes, as bits: the largest of ``source`` that stays finite, the smallest that stays above zero, the largest
    finite of ``target``.

    The magnitudes of these floating types are ordered as their bits are, so both bounds are found by bisection with the
    cast itself.
    """
    if source.name not in dtypes.FLOATS or target.name not in dtypes.FLOATS:
        return None
    bits = np.dtype(f"u{source.itemsize}")

    def cast(n: int) -> Any:
        with np.errstate(all="ignore"):
            return casts.cast(np.asarray([n], bits).view(source), target)

    def first(lo: int, hi: int, holds: Callable[[int], bool]) -> int:
        while lo < hi:
            middle = (lo + hi) // 2
            lo, hi = (lo, middle) if holds(middle) else (middle + 1, hi)
        return lo

    largest, limit = (int(_magnitudes(np.asarray([ml_dtypes.finfo(d).max], d))[0]) for d in (source, target))
    top = first(0, largest + 1, lambda n: not np.isfinite(cast(n))[0]) - 1
    least = first(1, largest, lambda n: cast(n)[0] != 0)
    return top, least, limit


def _magnitudes(a: np.ndarray) -> np.ndarray:
    """The bits of floats without their sign: a new array of integers, ordered as the magnitudes are."""
    bits = np.dtype(f"u{a.dtype.itemsize}")
    return a.view(bits) & bits.type((1 << (8 * a.dtype.itemsize - 1)) - 1)


def measure(a: np.ndarray, b: np.ndarray, offset: tuple[int, ...] = ()) -> CastLoss:
    """The losses of ``b``, which is ``a`` in another dtype; places are counted from ``offset``.

    >>> measure(np.asarray([1.0, 7e4, 1e-9]), np.asarray([1.0, np.inf, 0.0], np.float16))
    CastLoss(overflow=1, nan=0, wrapped=0, fraction=0, imaginary=0, underflow=1, places=(((1,), '70000.0', 'inf'),))
    """
    if not a.size or exact(a.dtype, b.dtype):
        return CastLoss()
    if a.dtype.kind == "c":
        if b.dtype.kind == "c":
            return measure(a.real, b.real, offset) + measure(a.imag, b.imag, offset)
        # The imaginary parts are counted; the real ones are cast as any other.
        return _loss(a, b, offset, imaginary=a.imag != 0) + measure(a.real, b, offset)
    if b.dtype.kind == "c":
        return measure(a, b.real, offset)
    if b.dtype.kind == "b":
        return _loss(a, b, offset, wrapped=(a != 0) & (a != 1))
    if b.dtype.kind in "iu":
        return _to_integers(a, b, offset)
    bounds = _bounds(a.dtype, b.dtype)
    if bounds is not None:
        # One pass over the bits, of the smaller side where it can tell, says that nothing was lost: the common case.
        top, least, limit = bounds
        if b.dtype.itemsize < a.dtype.itemsize:
            magnitude = _magnitudes(b)
            if magnitude.min() > 0 and magnitude.max() <= limit:
                return CastLoss()
        magnitude = _magnitudes(a)
        under = 0
        if magnitude.min() < least:
            under = int(np.count_nonzero(magnitude < least) - np.count_nonzero(magnitude == 0))
        return replace(_to_floats(a, b, offset) if magnitude.max() > top else CastLoss(), underflow=under)
    if a.dtype.kind in "biu" and b.dtype.name in dtypes.FLOATS:
        with np.errstate(all="ignore"):
            ends = casts.cast(np.asarray([a.min(), a.max()]), b.dtype)
        return CastLoss() if np.isfinite(ends).all() else _to_floats(a, b, offset)
    zero = (b == 0) & (a != 0)
    return replace(_to_floats(a, b, offset), underflow=int(np.count_nonzero(zero)))


def _to_floats(a: np.ndarray, b: np.ndarray, offset: tuple[int, ...]) -> CastLoss:
    floating = is_float(a.dtype)
    finite, number = (np.isfinite(a), ~np.isnan(a)) if floating else (True, True)
    return _loss(a, b, offset, overflow=np.isinf(b) & finite, nan=np.isnan(b) & number)


def _to_integers(a: np.ndarray, b: np.ndarray, offset: tuple[int, ...]) -> CastLoss:
    limits = np.iinfo(b.dtype)
    if not is_float(a.dtype):
        if a.dtype.kind == "b" or (limits.min <= int(a.min()) and int(a.max()) <= limits.max):
            return CastLoss()
        return _loss(a, b, offset, wrapped=(a < limits.min) | (a > limits.max))
    wide = a if a.dtype.itemsize > 2 else a.astype(np.float32)
    if b.max() < limits.max and (b == wide).all():  # the largest may stand for what lay beyond it
        return CastLoss()
    whole = np.trunc(wide)
    held = (whole >= float(limits.min)) & (whole < float(limits.max + 1))
    return _loss(a, b, offset, wrapped=~held, fraction=held & (whole != wide))


def _loss(a: np.ndarray, b: np.ndarray, offset: tuple[int, ...], **found: np.ndarray) -> CastLoss:
    """The losses of each kind, given where they are."""
    counts = {kind: int(np.count_nonzero(where)) for kind, where in found.items()}
    if not any(counts.values()):
        return CastLoss()
    bad = np.logical_or.reduce(list(found.values()))
    start = offset or (0,) * a.ndim
    places = []
    for flat in np.flatnonzero(bad)[:_SHOWN].tolist():
        at = tuple(int(i) for i in np.unravel_index(flat, a.shape))
        places.append((tuple(i + o for i, o in zip(at, start, strict=True)), str(a[at]), str(b[at])))
    return CastLoss(**counts, places=tuple(places))


class Tally(dict[Any, CastLoss]):
    """Losses by array. Casts of several threads may add to one."""

    def __init__(self, held: Mapping[Any, CastLoss] | None = None) -> None:
        super().__init__(held or {})
        self._lock = lock()

    def add(self, name: Any, loss: CastLoss) -> None:
        if loss:
            with self._lock:
                self[name] = self[name] + loss if name in self else loss

    def refuse(self, allow_overflow: bool, name: Any = None) -> None:
        """Raise `Lossy` for the arrays, or the one, that lost values without leave."""
        held = {name: self[name]} if name in self else {} if name is not None else self
        refused = {} if allow_overflow else {n: loss for n, loss in held.items() if loss.places}
        if refused:
            raise Lossy(_told(refused))


def _told(losses: Mapping[Any, CastLoss]) -> str:
    lines = ["a cast would lose values:"]
    for name, loss in list(losses.items())[:8]:
        shown = ", ".join(f"{list(at)} is {value} and would be {result}" for at, value, result in loss.places)
        lines.append(f"  {name!r}: {loss}; first at {shown}")
    if len(losses) > 8:
        lines.append(f"  … and {len(losses) - 8} more arrays")
    lines.append(
        "choose a wider dtype, leave these arrays out, or accept the losses with allow_overflow=True (in a rule: "
        "cast(…, allow_overflow=true))"
    )
    return "\n".join(lines)


T = TypeVar("T")


class _CurrentReport(threading.local):
    tally: Tally | None = None
    name: Any = None


_current = _CurrentReport()


def tallied(tally: Tally, call: Callable[[], T], name: Any = None) -> T:
    """A call whose casts add to ``tally``, under ``name`` where the array that they make has one."""
    return within(_current, {"tally": tally, "name": name}, call)


def making(name: str, call: Callable[[], T]) -> T:
    """A call whose casts make parts of the array of this name."""
    return within(_current, {"name": name}, call)


def tracked(tally: Tally, name: Any, jobs: Iterator[Callable[[], int]]) -> Iterator[Callable[[], int]]:
    """Jobs that add to ``tally``, in any thread."""

    for job in jobs:
        # Those that may be joined with others convert nothing.
        yield job if isinstance(job, RangeJob) else lambda job=job: tallied(tally, job, name)


def cast(name: str, a: np.ndarray, dtype: np.dtype, offset: tuple[int, ...], allowed: bool = False) -> np.ndarray:
    """``a`` as another dtype. Its losses are counted, or raised where no tally counts them."""
    real = a.real if a.dtype.kind == "c" != dtype.kind else a
    if real.dtype.name.startswith("float8") and dtype.name.startswith("float8"):
        real = real.astype(np.float32)  # there is no direct way between some of them, and this one is exact
    with np.errstate(all="ignore"):
        out = casts.cast(real, dtype)
        loss = measure(a, out, offset)
    _tell(name, loss, allowed)
    return out


def _tell(name: str, loss: CastLoss, allowed: bool = False) -> None:
    """Count a loss, or raise it where no tally counts."""
    if loss and allowed:
        loss = replace(loss, places=())
    if loss and _current.tally is not None:
        _current.tally.add(name if _current.name is None else _current.name, loss)
    elif loss:
        Tally({name: loss}).refuse(False)


@contextlib.contextmanager
def watched(
    name: str, total: np.ndarray, offset: tuple[int, ...], operands: Callable[[], Iterator[np.ndarray]]
) -> Iterator[None]:
    """Arithmetic on ``total`` whose overflows are losses, as those of a cast. Those of its operands are none; these are
    read again where something overflows."""
    seen: list[str] = []
    with np.errstate(all="ignore", over="call", call=lambda kind, _: seen.append(kind)):
        yield
    if seen:
        count_overflows(name, total, list(operands()), offset)


def count_overflows(name: str, result: np.ndarray, operands: Sequence[np.ndarray], offset: tuple[int, ...]) -> None:
    """Count elements of a result that are not finite, where all operands are, as losses of a cast are counted."""
    bad = ~np.isfinite(result)
    if bad.any():
        finite = np.logical_and.reduce([np.isfinite(x) for x in operands])
        _tell(name, _loss(operands[0], result, offset, overflow=bad & finite))


def count_lost_rows(name: str, a: np.ndarray, scale: np.ndarray, offset: tuple[int, ...] = ()) -> None:
    """Count the numbers of rows whose scale is NaN, which they become, as losses of a cast are counted."""
    lost = np.isnan(scale)
    if lost.any():
        _tell(name, _loss(a, np.where(lost, np.nan, a), offset, nan=lost & ~np.isnan(a)))
