"""Dtypes: the objects, their kinds and limits, and the rules by which they combine.

The standard's dtypes are NumPy's; ``float16``, ``bfloat16`` and the two ``float8`` come beside them (ml_dtypes). One
table, ``DTYPES``, names all of them; whatever asks "which dtypes are there" reads it. Inside the package a dtype is a
``numpy.dtype``; the names that users write are :class:`~meshtape.arrays.core.dtype_objects.DType` objects, which
:func:`as_dtype` turns into these.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from .array import Array
from .dtype_objects import BY_NAME, DType
from .errors import ArgumentError, DTypeError, NumberRangeError


def _named(names: str) -> tuple[np.dtype, ...]:
    return tuple(BY_NAME[n].dtype for n in names.split())


bool = BY_NAME["bool"].dtype
_SIGNED = int8, int16, int32, int64 = _named("int8 int16 int32 int64")
_UNSIGNED = uint8, uint16, uint32, uint64 = _named("uint8 uint16 uint32 uint64")
_FLOATS = float8_e4m3fn, float8_e5m2, bfloat16, float16, float32, float64 = _named(
    "float8_e4m3fn float8_e5m2 bfloat16 float16 float32 float64"
)
_COMPLEX = complex64, complex128 = _named("complex64 complex128")

HALF = float16.num
"""Type numbers below this are of dtypes whose loops are NumPy's own, and sum in themselves."""
FIRST_USER_DTYPE = 256
"""NPY_USERDEF: type numbers from here on are of dtypes that other libraries register, such as bfloat16."""

DTYPES: dict[str, np.dtype] = {d.name: d for d in (bool, *_SIGNED, *_UNSIGNED, *_FLOATS, *_COMPLEX)}
"""Every dtype by name."""

KINDS: dict[str, tuple[np.dtype, ...]] = {
    "bool": (bool,),
    "signed integer": _SIGNED,
    "unsigned integer": _UNSIGNED,
    "integral": (*_SIGNED, *_UNSIGNED),
    "real floating": _FLOATS,
    "complex floating": _COMPLEX,
    "numeric": (*_SIGNED, *_UNSIGNED, *_FLOATS, *_COMPLEX),
}
"""The standard's kinds; ours of one and two bytes count as real floating."""

KERNEL_FLOATS = (float32, float64, float16, bfloat16)
"""The floats that our CUDA kernels compute."""

EXTENSIONS = frozenset({float16, bfloat16, float8_e4m3fn, float8_e5m2})
"""Dtypes that the standard does not know."""


def parse(name: str) -> DType:
    """The dtype called ``name``, as users write it. Raises ``ValueError`` that lists the names there are.

    >>> parse("bfloat16") is mt.bfloat16, parse(str(mt.int8)) is mt.int8
    (True, True)
    """
    try:
        return BY_NAME[name]
    except (KeyError, TypeError):
        raise ArgumentError(f"unknown dtype {name!r}: choose one of {', '.join(DTYPES)}") from None


OWN: dict[np.dtype, np.dtype] = {d: d for d in DTYPES.values()}
"""NumPy's canonical object for each dtype, by an equal one: the tape compares dtypes by identity."""


def as_dtype(dtype: Any, name: str = "dtype") -> np.dtype:
    """The dtype that ``dtype`` means: one of ours, its name, or a type of Python or NumPy. ``name`` is who asks.

    Other byte orders and other spellings of one type (``longlong``) give the one dtype of the table.

    Raises
    ------
    DTypeError
        For what is none of ours (``object``, text, ``longdouble``, …): an Array holds numbers that every backend and
        file format knows.

    Examples
    --------
    >>> as_dtype(float), as_dtype("bfloat16"), as_dtype(">i4")
    (dtype('float64'), dtype(bfloat16), dtype('int32'))
    """
    if type(dtype) is DType:
        return dtype.dtype
    if dtype is not None:
        try:
            found = np.dtype(dtype)
        except (TypeError, ValueError):
            pass
        else:
            known = OWN.get(found) or OWN.get(found.newbyteorder("="))
            if known is not None:
                return known
    text = dtype.name if isinstance(dtype, np.dtype) else getattr(dtype, "__name__", None) or repr(dtype)
    hint = " (a shape is one argument, a tuple of lengths)" if type(dtype) is int else ""
    raise DTypeError(f"[{name}] {text} is no dtype of an array{hint}: choose one of {', '.join(DTYPES)}")


def check_cast(name: str, source: np.dtype, target: np.dtype) -> None:
    """Raise :class:`DTypeError` where a cast would drop the imaginary part of complex numbers in silence."""
    if source.kind == "c" and target.kind not in "cb":
        raise DTypeError(f"[{name}] {source.name} to {target.name} would drop the imaginary part: take real(x) first")


def isdtype(dtype: np.dtype, kind: np.dtype | str | tuple[np.dtype | str, ...]) -> builtins.bool:
    """Whether a dtype is ``kind``: a dtype, the name of a kind (``"integral"``, …), or any of a tuple of these.

    >>> mt.isdtype(mt.bfloat16, "real floating"), mt.isdtype(mt.int8, ("bool", mt.int16))
    (True, False)
    """
    dtype = as_dtype(dtype, "isdtype")
    if isinstance(kind, tuple):
        return any(isdtype(dtype, k) for k in kind)
    if isinstance(kind, str):
        if kind not in KINDS:
            raise ArgumentError(f"[isdtype] unknown kind {kind!r}: choose one of {', '.join(KINDS)}")
        return dtype in KINDS[kind]
    return dtype == as_dtype(kind, "isdtype")


def _dtype_of(name: str, x: Any) -> np.dtype:
    dtype = getattr(x, "dtype", None)
    return as_dtype(dtype if isinstance(dtype, np.dtype) else x, name)


@dataclass(frozen=True, slots=True)
class FloatInfo:
    """Limits of a floating dtype, as Python floats; of a complex dtype those of its parts."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: np.dtype


@dataclass(frozen=True, slots=True)
class IntInfo:
    """Limits of an integer dtype."""

    bits: int
    max: int
    min: int
    dtype: np.dtype


def finfo(type: np.dtype | Array, /) -> FloatInfo:
    """Limits of a floating dtype (or of that of an array).

    >>> mt.finfo(mt.float8_e4m3fn).max
    448.0
    """
    dtype = _dtype_of("finfo", type)
    if dtype not in _FLOATS and dtype not in _COMPLEX:
        raise DTypeError(f"[finfo] {dtype.name} is no floating dtype")
    found = ml_dtypes.finfo(dtype) if dtype.num >= 256 else np.finfo(dtype)
    limits = map(float, (found.eps, found.max, found.min, found.smallest_normal))
    return FloatInfo(int(found.bits), *limits, np.dtype(found.dtype))


def iinfo(type: np.dtype | Array, /) -> IntInfo:
    """Limits of an integer dtype (or of that of an array).

    >>> mt.iinfo(mt.int8).max
    127
    """
    dtype = _dtype_of("iinfo", type)
    if dtype.kind not in "iu":
        raise DTypeError(f"[iinfo] {dtype.name} is no integer dtype")
    found = np.iinfo(dtype)
    return IntInfo(int(found.bits), int(found.max), int(found.min), dtype)


def can_cast(from_: np.dtype | Array, to: np.dtype, /) -> builtins.bool:
    """Whether every value of ``from_`` has an equal one in ``to``, by type promotion.

    >>> mt.can_cast(mt.int32, mt.int64), mt.can_cast(mt.float64, mt.bfloat16)
    (True, False)
    """
    return builtins.bool(np.can_cast(_dtype_of("can_cast", from_), as_dtype(to, "can_cast"), casting="safe"))


def result_type(*arrays_and_dtypes: Any) -> np.dtype:
    """The dtype that arrays, dtypes and Python numbers give together. A number counts only by its kind.

    >>> mt.result_type(mt.bfloat16, 2.0), mt.result_type(mt.int8, mt.uint8).name
    (dtype(bfloat16), 'int16')
    """
    if not arrays_and_dtypes:
        raise ArgumentError("[result_type] needs at least one array, dtype or number")
    numbers = [a for a in arrays_and_dtypes if isinstance(a, builtins.bool | int | float | complex)]
    strong = [
        _dtype_of("result_type", a)
        for a in arrays_and_dtypes
        if not isinstance(a, builtins.bool | int | float | complex)
    ]
    if not strong:
        return np.result_type(*numbers)
    try:
        joined = np.result_type(*strong)
    except TypeError:
        names = " and ".join(dict.fromkeys(d.name for d in strong))
        raise DTypeError(f"[result_type] {names} give no dtype together: cast one of them with astype") from None
    if joined.num >= 256:  # NumPy's weak numbers do not reach dtypes that others register
        return np.result_type(joined, np.complex64) if any(isinstance(n, complex) for n in numbers) else joined
    return np.result_type(joined, *numbers)


def real_of(dtype: np.dtype) -> np.dtype:
    """The dtype of the real part."""
    return np.dtype(dtype.type(0).real.dtype) if dtype.kind == "c" else dtype


def complex_of(dtype: np.dtype) -> np.dtype:
    """The complex dtype of the same precision."""
    return np.result_type(dtype, np.complex64)


def is_low_precision(dtype: np.dtype) -> bool:
    """Whether it is a float of one or two bytes (float8, float16, bfloat16): sums of these are kept in float32."""
    return dtype.itemsize <= 2 and dtype.kind not in "biu"


# ----- ufuncs of short floats on a CPU --------------------------------------------------------------------------------
# The loops that ml_dtypes registers go number by number, and take two to twenty times as long as those of wider floats.
# NumPy casts a block of operands, computes it, and rounds the results to where they belong: no wide array is made.


def as_floats(value: Any) -> Any:
    """A Python integer beyond 64 bits as the float that it is among floats; anything else as it is."""
    if type(value) is not int or -(2**63) <= value < 2**63:
        return value
    try:
        return float(value)
    except OverflowError:
        raise NumberRangeError(f"an integer of {value.bit_length()} bits is out of the range of floats") from None


# Exact in float32, or so near that any loop rounds to the same number.
_EXACT = "add subtract multiply divide remainder maximum minimum square reciprocal sqrt floor ceil trunc rint"
# Of every bfloat16 the result is that of float64, rounded.
_IN_FLOAT32 = (
    "expm1 exp2 log log1p log2 log10 sin cos tan arcsin arccos arctan arctan2 sinh cosh tanh arcsinh arccosh arctanh "
    "cbrt sign"
)
_IN_FLOAT64 = "exp power"  # whose loops of float32 are off by more
_OF_FLOAT16 = "cos arctan2"  # NumPy's own of other functions are quick

_BLOCKS = 4096
"""Elements below which the loops of short floats (or casts of the whole, where these loops may round otherwise) take
less time than casts of blocks."""


def _in(wide: np.dtype, name: str) -> Callable[..., Any]:
    """The ufunc of this name, of arrays of one short float computed in the dtype ``wide``."""
    ufunc, exact, half = getattr(np, name), name in _EXACT.split(), name in _OF_FLOAT16.split()

    @functools.wraps(ufunc)
    def run(x: Any, *more: Any, out: Any = None) -> Any:
        dtype = getattr(x, "dtype", None)
        if dtype is float16 and not half and not exact and not x.flags.forc:
            x = x.copy()  # NumPy's loops over elements with gaps between them round otherwise
        if not (dtype is bfloat16 or (half and dtype is float16)) or (exact and x.size < _BLOCKS):
            return ufunc(x, *more, out=out)
        for y in more:
            if getattr(y, "dtype", None) is not dtype:
                return ufunc(x, *more, out=out)
        if out is None:
            like = x if all(y.shape == x.shape for y in more) else np.broadcast(x, *more)
            if like.size < _BLOCKS:
                return ufunc(*[y.astype(wide) for y in (x, *more)]).astype(dtype)
            out = np.empty_like(x) if like is x else np.empty(like.shape, dtype)
        return ufunc(x, *more, out=out, dtype=wide, casting="unsafe")

    return run


_GROUPS = {float32: f"{_EXACT} {_IN_FLOAT32}", float64: _IN_FLOAT64}
OF_SHORT = {getattr(np, n): _in(wide, n) for wide, names in _GROUPS.items() for n in names.split()}
"""By ufunc, the function that takes its place where there are short floats; with ``out``, as that."""


def numpy_form(fn: Callable[..., Any], dtype: np.dtype) -> Callable[..., Any]:
    """The function that computes ``fn``, an op's in NumPy, where an operand or the result has this dtype."""
    return OF_SHORT.get(fn, fn) if dtype.num >= HALF else fn  # type: ignore[call-overload]
