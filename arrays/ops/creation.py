"""Arrays from values, ranges and constants."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..backends.backend import backend_for, cupy_backend
from ..backends.casts import NARROW, array_of, cast
from ..backends.dlpack import read
from ..backends.memory_pool import copied
from ..core.array import Array
from ..core.devices import CPU, Device, default_device, device
from ..core.dispatch import (
    Deferred,
    NotNumbers,
    apply,
    as_floats,
    has_history,
    made,
    number,
    refuse_history,
    register_asarray,
    wrap,
)
from ..core.dtypes import FIRST_USER_DTYPE, OWN, as_dtype, check_cast, float64, result_type
from ..core.errors import ArgumentError, DTypeError, MeshtapeError, NumberRangeError, OutOfMemory, ShapeError
from ..core.op import device_beside, move, state
from ..core.shape_rules import as_shape
from .elementwise import ALIAS, FULL_LIKE
from .elementwise import where as select
from .manipulation import astype, broadcast_to, reshape
from .nested import filled, is_tracked, linspace_from, stacked
from .number_ranges import check_numbers, plain


def placed(host: np.ndarray, where: Device | str | None) -> Array:
    """Host memory that nobody else will write to, of one of our dtypes, as an Array on a device (the default one)."""
    target = default_device() if where is None else device(where)
    x = wrap(host if target is CPU else backend_for(target).from_host(host, target))
    return made(x) if state.recorders else x


def _counted(numbers: range, dtype: np.dtype, where: Device | str | None) -> Array:
    """Whole numbers, made where they will live."""
    for end in (numbers[0], numbers[-1]) if numbers else ():  # NumPy counts on around the end
        check_numbers("arange", end, dtype)
    if any(abs(v) >= 2**53 for v in (numbers.start, numbers.stop, numbers.step)):
        # NumPy counts how many there are in float64. In 64 bits sums and products wrap around to what they are.
        first, step = (np.uint64(v % 2**64) for v in (numbers.start, numbers.step))
        return placed((np.arange(len(numbers), dtype=np.uint64) * step + first).view(np.int64).astype(dtype), where)
    target = default_device() if where is None else device(where)
    if target is CPU:
        x = wrap(np.arange(numbers.start, numbers.stop, numbers.step, dtype))
    else:
        x = wrap(backend_for(target).counted(numbers, dtype, target))
    return made(x) if state.recorders else x


def _is_new(obj: Any) -> bool:
    """Whether only the caller holds a NumPy array, which was then made for it."""
    return sys.getrefcount(obj) <= _NEW and getattr(obj, "base", None) is None


_INT = np.dtype(np.int64)
_NEW = 3
"""References to an argument that its caller was given as one: of the two functions, and of the count."""


def _filled(
    name: str, shape: tuple[int, ...], value: Any, dtype: np.dtype, where: Device | str | None, host: Callable[..., Any]
) -> Array:
    """One repeated value, made where it will live; on a CPU by ``host(shape, value, dtype)``."""
    target = default_device() if where is None else device(where)
    try:
        x = wrap(
            host(shape, value, dtype) if target is CPU else backend_for(target).filled(shape, value, dtype, target)
        )
    except OverflowError:
        raise NumberRangeError(f"[{name}] {value} is out of the range of {dtype}: ask for a wider dtype") from None
    except (MemoryError, ValueError) as e:
        if isinstance(e, ValueError) and "too big" not in str(e):
            raise
        raise OutOfMemory(f"[{name}] {e}") from None
    return made(x) if state.recorders else x


def _zeros(shape: tuple[int, ...], value: Any, dtype: np.dtype) -> np.ndarray:
    return np.zeros(shape, dtype)  # which the system hands out as zeros, without writing them


def _empty(shape: tuple[int, ...], value: Any, dtype: np.dtype) -> np.ndarray:
    return np.empty(shape, dtype)


def _dtype(name: str, dtype: Any) -> np.dtype:
    return float64 if dtype is None else as_dtype(dtype, name)


def asarray(obj: Any, /, dtype: Any = None, *, device: Device | str | None = None, copy: bool | None = None) -> Array:
    """``obj`` as an :class:`Array`.

    Parameters
    ----------
    obj
        An Array, a NumPy array, a (nested) sequence of numbers, a number, or anything that NumPy converts. Arrays in a
        sequence are stacked, and have their gradients.
    dtype
        Wanted dtype; that of ``obj`` by default.
    device
        Where to put it; where ``obj`` is, or the default device.
    copy
        An array of NumPy or CuPy is copied unless ``copy=False``: its owner may write to it later, and an Array's value
        never changes behind its back. With ``copy=False`` the memory is shared as long as nobody writes to the Array,
        and the caller promises not to write to ``obj``. An Array is never copied before one side is written.

    Raises
    ------
    DTypeError
        For objects that hold no numbers.
    ValueError
        Where ``copy=False`` cannot be had: another dtype or device, or no array.

    Examples
    --------
    >>> mt.asarray([[1, 2], [3, 4]])
    Array([[1, 2],
           [3, 4]])
    """
    if type(obj) is Array and dtype is None and device is None and not copy:
        return obj  # the way of most calls: the operands of other functions
    plainly = dtype is None and device is None and type(obj) is np.ndarray and state.device is None
    if plainly and (known := OWN.get(obj.dtype)) is not None:  # the common call
        source = None if not state.recorders or _is_new(obj) else obj
        host = obj if copy is False else copied(obj)
        x = wrap(host if host.dtype is known else host.view(known))
        return made(x, source) if state.recorders else x

    why = ""
    wanted = None if dtype is None else as_dtype(dtype, "asarray")
    if isinstance(obj, Array):
        x = obj if device is None or str(obj.device) == str(device) else obj.to_device(device)
        if copy is False and (x is not obj or (wanted is not None and wanted != x.dtype)):
            raise _takes_a_copy(obj.dtype, obj.device, wanted, device)
        if wanted is not None and x.dtype != wanted:
            return astype(x, wanted)
        return own_copy(x) if copy else x
    if isinstance(obj, np.ndarray | np.generic):
        source = None if not state.recorders or _is_new(obj) else obj
        x = made(placed(_of_numpy(obj, wanted, copy), device), source)
        if copy is False and type(x._buf) is not np.ndarray:
            raise _takes_a_copy(obj.dtype, CPU, wanted, x.device)
        return x
    if hasattr(obj, "__cuda_array_interface__"):
        held = cupy_backend().held(obj)
        x = asarray(wrap(held), dtype=dtype, device=device, copy=False if copy is False else None)
        if x._buf is held and copy is not False:
            with cupy_backend().at(held):
                x = wrap(held.copy())
        return x
    if hasattr(obj, "__dlpack__") and not hasattr(obj, "__array_interface__"):
        # Exchanged so, bfloat16 and float8 of other libraries arrive as what they are.
        try:
            x = from_dlpack(obj, copy=copy)
        except (BufferError, TypeError, RuntimeError) as e:
            why = f": {e}"  # not a plain array: it may convert itself
        else:
            return x if wanted is None and device is None else asarray(x, dtype=wanted, device=device)
    if isinstance(obj, list | tuple) and copy is not False and state.recorders and is_tracked(obj):
        return asarray(stacked(obj), dtype=wanted, device=device)
    # A copy always, also of what exports its memory (a memoryview, say), whose owner may write to it. NumPy raises
    # where copy=False is asked of what holds no array.
    try:
        if wanted is not None and isinstance(obj, int | float | complex | list | tuple):
            check_numbers("asarray", obj, wanted)
        if isinstance(getattr(obj, "_meta", None), np.ma.MaskedArray):  # of Dask, which drops the mask as it computes
            raise masked("asarray")
        host = array_of(plain(obj), wanted, copy=copy is not False)
    except (MeshtapeError, MemoryError):
        raise
    except Exception as e:  # whatever the object's own ``__array__`` has to say
        if "inhomogeneous" in str(e):
            raise ShapeError(f"[asarray] the nested sequences have different lengths: {e}") from None
        raise ArgumentError(f"[asarray] {type(obj).__name__} gives no array: {e}") from e
    if host.dtype.kind in "OUSMm":
        beyond = isinstance(host.flat[0] if host.size else None, int) and all(isinstance(v, int) for v in host.flat)
        what = "integers beyond 64 bits" if beyond else f"{host.dtype} elements"
        raise NotNumbers(f"[asarray] cannot make an array of numbers from {type(obj).__name__} ({what}){why}")
    return placed(_of_numpy(host, wanted, False) if host.dtype not in OWN else host, device)


def _takes_a_copy(dtype: np.dtype, at: Any, wanted: np.dtype | None, device: Any) -> ArgumentError:
    there = f" on {device}" if device is not None and str(device) != str(at) else ""
    return ArgumentError(
        f"[asarray] {dtype.name}{f' on {at}' if there else ''} to {(wanted or dtype).name}{there} takes a copy, and "
        "copy=False forbids it"
    )


def masked(name: str) -> DTypeError:
    """The error of a function that is given masked elements."""
    return DTypeError(
        f"[{name}] masked elements are no numbers: fill them first, with x.filled(...), or da.ma.filled(x, ...) of Dask"
    )


def _of_numpy(obj: np.ndarray | np.generic, dtype: np.dtype | None, copy: bool | None) -> np.ndarray:
    """Host memory for an Array: a plain ``ndarray`` of one of our dtypes, in the machine's byte order."""
    if isinstance(obj, np.ma.MaskedArray) and np.ma.is_masked(obj):
        raise masked("asarray")
    host = np.asarray(obj)
    if dtype is None:
        if host.dtype.kind in "OSUMm":
            raise NotNumbers(f"[asarray] cannot make an array of numbers from {host.dtype} elements")
        dtype = as_dtype(host.dtype, "asarray")
    if host.dtype == dtype:
        host = host if copy is False else copied(host)
        return host if host.dtype is dtype else host.view(dtype)
    if copy is False:
        raise _takes_a_copy(host.dtype, CPU, dtype, None)
    check_cast("asarray", host.dtype, dtype)
    return cast(host, dtype)


def elements(name: str, values: Any, dtype: np.dtype) -> Array:
    """``values`` as elements of an array of ``dtype``: arrays are cast, as everywhere; Python numbers must have a place
    there."""
    if hasattr(values, "dtype") or is_tracked(values):
        return asarray(values).astype(dtype, copy=False)
    check_numbers(name, values, dtype)
    return asarray(values, dtype)


def own_copy(x: Array) -> Array:
    """:func:`wrap_same`, but a view is copied, so that the result is no part of another array."""
    out = wrap_same(x)
    if type(out._buf) is np.ndarray and type(out._buf.base) is np.ndarray:
        move(out, out._buf.copy())
    return out


def wrap_same(x: Array) -> Array:
    """A second Array of the same value; memory is shared until one side is written."""
    return apply(ALIAS, (x,))


def inexact(x: Any) -> Array:
    """``x`` as an Array; integers and booleans as float64, in which functions of real numbers take them."""
    x = asarray(x)
    return x.astype(np.float64) if x.dtype.kind in "biu" else x


def ordered(name: str, x: Any) -> Array:
    """``x`` as an Array of real numbers. Raises :class:`DTypeError` for complex ones, which have no order."""
    x = asarray(x)
    if x.dtype.kind == "c":
        raise DTypeError(f"[{name}] takes real numbers, got {x.dtype.name}: take real(x), imag(x) or abs(x) first")
    return x


def beside(x: Array) -> Device | None:
    """Where new arrays go that will meet ``x`` in an op: its device; None (anywhere) where it is traced or split."""
    return None if isinstance(x._buf, Deferred) and x._buf.memory is None else x.device


def key_beside(key: Any, *arrays: Any) -> Any:
    """A random key in host memory, on the GPU of the arrays that it draws for. It is 16 bytes, and its bits are the
    same anywhere."""
    if type(key) is Array and type(key._buf) is np.ndarray and (where := device_beside(arrays, None)) is not None:
        return key.to_device(where)
    return key


def as_arrays(*values: Any) -> list[Array]:
    """The values as Arrays; lists and numbers on the device of the first Array among them."""
    where = next((beside(x) for x in values if isinstance(x, Array)), None)
    return [x if isinstance(x, Array) else asarray(x, device=where) for x in values]


def full(
    shape: int | Sequence[int], fill_value: Any, dtype: Any = None, *, device: Device | str | None = None
) -> Array:
    """An array of one repeated value, whose dtype it has unless another is asked for.

    >>> mt.full((2, 2), 7)
    Array([[7, 7],
           [7, 7]])
    """
    if has_history(fill_value):
        wanted = fill_value.dtype if dtype is None else as_dtype(dtype, "full")
        check_cast("full", fill_value.dtype, wanted)
        return asarray(filled(fill_value, as_shape("full", shape), wanted), device=device)
    fill_value = number(fill_value)
    wanted = None if dtype is None else as_dtype(dtype, "full")
    if wanted is not None and isinstance(fill_value, int | float | complex):
        check_numbers("full", value := fill_value, wanted)
        value = array_of(as_floats(value), wanted) if wanted in NARROW else value
    else:
        value = np.asarray(asarray(fill_value) if wanted is None else elements("full", fill_value, wanted))
        wanted = value.dtype
    try:
        return _filled("full", as_shape("full", shape), value, wanted, device, np.full)
    except ValueError as e:
        if "broadcast" in str(e):
            raise ShapeError(f"[full] a value of shape {value.shape} does not fill an array of shape {shape}") from None
        raise


def zeros(shape: int | Sequence[int], dtype: Any = None, *, device: Device | str | None = None) -> Array:
    """An array of zeros (float64 by default).

    >>> mt.zeros((2, 2))
    Array([[0., 0.],
           [0., 0.]], dtype=float64)
    """
    return _filled("zeros", as_shape("zeros", shape), 0, _dtype("zeros", dtype), device, _zeros)


def ones(shape: int | Sequence[int], dtype: Any = None, *, device: Device | str | None = None) -> Array:
    """An array of ones (float64 by default).

    >>> mt.ones(3, dtype=mt.int8)
    Array([1, 1, 1], dtype=int8)
    """
    return _filled("ones", as_shape("ones", shape), 1, _dtype("ones", dtype), device, np.full)


def empty(shape: int | Sequence[int], dtype: Any = None, *, device: Device | str | None = None) -> Array:
    """An array of arbitrary values.

    >>> mt.empty((2, 3), dtype=mt.float32).shape
    (2, 3)
    """
    return _filled("empty", as_shape("empty", shape), 0, _dtype("empty", dtype), device, _empty)


def arange(
    start: float,
    /,
    stop: float | None = None,
    step: float = 1,
    dtype: Any = None,
    *,
    device: Device | str | None = None,
) -> Array:
    """Evenly spaced values from ``start`` (0 when only one number is given) up to, not including, ``stop``.

    >>> mt.arange(3)
    Array([0, 1, 2])
    """
    if stop is None:
        start, stop = 0, start
    for v in (start, stop, step):
        if type(v) is int or type(v) is float:
            continue
        refuse_history("arange", v, "write start + step * mt.arange(n)")
        if v is None or np.iscomplexobj(v):
            raise ArgumentError(f"[arange] counts in real numbers, got {v!r}")
    if not step:
        raise ArgumentError(f"[arange] a step of zero from {start} comes nowhere: write mt.full(n, {start})")
    wanted = None if dtype is None else as_dtype(dtype, "arange")
    if all(type(v) is int for v in (start, stop, step)) and (wanted or _INT).kind in "iu":
        numbers = range(start, stop, step)
        beyond = len(numbers) and max(numbers[0], numbers[-1]) >= 2**63
        return _counted(numbers, wanted or np.dtype(np.uint64 if beyond else np.int64), device)
    out = np.arange(start, stop, step, wanted)
    if out.size and wanted is not None and wanted.kind in "iu":
        check_numbers("arange", int(start + (out.size - 1) * step), wanted)
    return placed(out, device)


def linspace(
    start: float | Array,
    stop: float | Array,
    /,
    num: int = 50,
    *,
    dtype: Any = None,
    device: Device | str | None = None,
    endpoint: bool = True,
) -> Array:
    """``num`` evenly spaced values from ``start`` to ``stop``.

    >>> mt.linspace(0.0, 1.0, 5)
    Array([0.  , 0.25, 0.5 , 0.75, 1.  ], dtype=float64)
    """
    wanted = None if dtype is None else as_dtype(dtype, "linspace")
    for v in (start, stop):
        if wanted is not None and isinstance(v, int | float):
            check_numbers("linspace", math.floor(v) if math.isfinite(v) and wanted.kind in "iu" else v, wanted)
    if wanted is None and any(getattr(getattr(v, "dtype", None), "num", 0) >= FIRST_USER_DTYPE for v in (start, stop)):
        wanted = result_type(start, stop)
    if has_history(start) or has_history(stop):
        return asarray(linspace_from(start, stop, num, endpoint, wanted), device=device)
    start, stop = (np.asarray(v) if isinstance(v, Array) else _real(v) for v in (start, stop))
    return placed(np.linspace(start, stop, num, endpoint=endpoint, dtype=wanted), device)


def _real(value: Any) -> Any:
    """A Python number as NumPy would take it, integers beyond 64 bits too."""
    value = number(value)
    try:
        return float(value) if isinstance(value, int) else value
    except OverflowError:
        raise NumberRangeError("[linspace] an end is out of the range of float64") from None


def eye(
    n_rows: int, n_cols: int | None = None, /, k: int = 0, dtype: Any = None, *, device: Device | str | None = None
) -> Array:
    """Ones on the ``k``-th diagonal, zeros elsewhere.

    >>> mt.eye(2, 3, k=1)
    Array([[0., 1., 0.],
           [0., 0., 1.]], dtype=float64)
    """
    return placed(np.eye(n_rows, n_cols, k, _dtype("eye", dtype)), device)


def _like(name: str, x: Any, value: Any, dtype: Any, where: Device | str | None, shape: Any) -> Array:
    x = asarray(x)
    dtype = x.dtype if dtype is None else as_dtype(dtype, name)
    if shape is not None:  # of another shape there is no sharding to keep
        return full(
            shape, value, dtype=dtype, device=x.device if where is None and not isinstance(x._buf, Deferred) else where
        )
    if name == "full_like" and isinstance(value, int | float | complex):
        check_numbers(name, value, dtype)
    if isinstance(x._buf, Deferred) and x._buf.memory is None and where is None:
        if not isinstance(value, int | float | complex | np.generic):
            value = asarray(value)
        if isinstance(value, Array):  # chosen everywhere, in an array that lies as `x` does
            check_cast(name, value.dtype, dtype)
            everywhere = apply(FULL_LIKE, (x,), {"value": True, "dtype": np.dtype(bool)})
            return select(everywhere, value.astype(dtype, copy=False), False if dtype.kind == "b" else 0)
        value = number(value)
        full((), value, dtype=dtype, device=CPU)  # raises for what is none of the dtype's
        return apply(FULL_LIKE, (x,), {"value": value, "dtype": dtype})
    return full(x.shape, value, dtype=dtype, device=x.device if where is None else where)


def zeros_like(x: Any, /, dtype: Any = None, *, device: Device | str | None = None, shape: Any = None) -> Array:
    """Zeros with the shape, dtype, device and sharding of ``x``; of another ``shape``, unsplit.

    >>> mt.zeros_like(mt.asarray([1, 2]))
    Array([0, 0])
    """
    return _like("zeros_like", x, 0, dtype, device, shape)


def ones_like(x: Any, /, dtype: Any = None, *, device: Device | str | None = None, shape: Any = None) -> Array:
    """Ones with the shape, dtype, device and sharding of ``x``; of another ``shape``, unsplit.

    >>> mt.ones_like(mt.asarray([1.5, 2.0]))
    Array([1., 1.], dtype=float64)
    """
    return _like("ones_like", x, 1, dtype, device, shape)


def full_like(
    x: Any, /, fill_value: Any, dtype: Any = None, *, device: Device | str | None = None, shape: Any = None
) -> Array:
    """One repeated value, with the shape, dtype, device and sharding of ``x``; of another ``shape``, unsplit.

    >>> mt.full_like(mt.asarray([1, 2]), 7)
    Array([7, 7])
    """
    return _like("full_like", x, fill_value, dtype, device, shape)


def empty_like(x: Any, /, dtype: Any = None, *, device: Device | str | None = None, shape: Any = None) -> Array:
    """Arbitrary values (zeros, in fact) with the shape, dtype, device and sharding of ``x``.

    Those of another ``shape`` are not split.

    >>> mt.empty_like(mt.ones((2, 3))).shape
    (2, 3)
    """
    return _like("empty_like", x, 0, dtype, device, shape)


def from_dlpack(x: Any, /, *, device: Device | str | None = None, copy: bool | None = None) -> Array:
    """The data of any object with ``__dlpack__`` (NumPy, CuPy, PyTorch, JAX, … arrays) as an Array.

    Parameters
    ----------
    x
        The exporter.
    device
        Where the Array goes; it stays where the data is by default.
    copy
        As in :func:`asarray`: foreign memory is copied unless ``copy=False``, since its owner may write to it (and
        where PyTorch holds a sign back, as in ``z.conj().imag``). With ``copy=False`` the memory is shared until the
        Array is written, and the caller promises not to write to ``x``.

    Examples
    --------
    >>> import meshtape as mt, numpy as np
    >>> mt.from_dlpack(np.arange(3), copy=False)
    Array([0, 1, 2])
    """
    if isinstance(x, Array):
        out = wrap_same(x)  # an array of its own: writing to one is not seen through the other
    else:
        try:
            on_host = int(x.__dlpack_device__()[0]) in (1, 3)  # host memory, pinned or not
            buf = read(np if on_host else cupy_backend().xp, x)
        except MeshtapeError:
            raise
        except Exception as e:  # whatever the object has to say, as a tensor that requires a gradient
            raise ArgumentError(f"[from_dlpack] {type(x).__name__} gives no array: {e}") from e
        out = wrap(buf if copy is False else buf.copy())
    if device is None:
        return out
    if copy is False and str(out.device) != str(device):
        raise ArgumentError(f"[from_dlpack] moving from {out.device} to {device} copies, and copy=False forbids it")
    return out.to_device(device)


def meshgrid(*arrays: Any, indexing: str = "xy", sparse: bool = False) -> tuple[Array, ...]:
    """Coordinate arrays of a grid with these coordinates along its axes (``"xy"`` exchanges the first two axes).

    With ``sparse`` each has its own dimension alone, and they broadcast against each other.

    >>> [g.tolist() for g in mt.meshgrid(mt.arange(2), mt.arange(3), indexing="ij")]
    [[[0, 0, 0], [1, 1, 1]], [[0, 1, 2], [0, 1, 2]]]
    """
    if indexing not in ("xy", "ij"):
        raise ArgumentError(f"[meshgrid] indexing must be 'xy' or 'ij', got {indexing!r}")
    xs = [asarray(a) for a in arrays]
    if any(x.ndim > 1 for x in xs):
        raise ShapeError(f"[meshgrid] takes arrays of one dimension, got shapes {', '.join(str(x.shape) for x in xs)}")
    n = len(xs)
    order = [1, 0, *range(2, n)] if indexing == "xy" and n > 1 else list(range(n))
    shape = [0] * n
    for x, axis in zip(xs, order, strict=True):
        shape[axis] = x.size
    own = [reshape(x, tuple(x.size if i == axis else 1 for i in range(n))) for x, axis in zip(xs, order, strict=True)]
    return tuple(own) if sparse else tuple(broadcast_to(x, shape) for x in own)


register_asarray(asarray)
