"""Keys of ``x[key]``: parsed once into a template, which is static and hashable, and the index arrays.

The arrays are operands like any other: they can be traced or split over a mesh. Keys have NumPy's meaning.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends import host_sync
from ..backends.backend import on_device_of
from ..core.array import Array
from ..core.devices import Device, default_device
from ..core.dispatch import Deferred, wrap
from ..core.errors import ArgumentError, ArrayIndexError
from ..core.index_template import Gap, Slot, Span, Template, Truth, is_basic
from ..core.op import is_cuda_elsewhere
from ..kernels import scans
from ..ops.creation import asarray, beside, placed

if TYPE_CHECKING:
    from ..core.array import Array


def parse(x: Array, key: Any) -> tuple[Template, tuple[Any, ...]]:
    """Template and index arrays (as ``Array``s of integers) of ``x[key]``.

    Boolean arrays become the integer arrays of their true positions. Raises the errors of NumPy, always with the axis,
    the index and the length in the message.
    """
    items: list[Any] = []
    ours: list[Array] = []  # made here, in host memory, where they are looked at without a wait
    used = 0
    for item in key if isinstance(key, tuple) else (key,):
        if item is None or item is Ellipsis:
            items.append(item)
            continue
        if not isinstance(item, slice) and (not isinstance(item, int | np.integer) or isinstance(item, bool | np.bool)):
            given = asarray(item) if is_cuda_elsewhere(item) else item
            item = _index_array(given, used)
            if item is not given:
                ours.append(item)
            used += item.ndim if item.dtype == np.bool_ else 1
        else:
            used += 1
        items.append(item)
    if used > x.ndim:
        raise ArrayIndexError(
            f"too many indices for array: array is {x.ndim}-dimensional, but {used} were indexed (shape {x.shape})"
        )
    if sum(item is Ellipsis for item in items) > 1:
        raise ArrayIndexError("an index can only have a single ellipsis ('...')")
    if not any(item is Ellipsis for item in items):
        items.append(Ellipsis)

    where = x.device if isinstance(x.device, Device) else default_device()
    arrays: list[Any] = []
    unchecked: list[tuple[Any, int, int]] = []
    parsed: list[Any] = []
    axis = 0
    for item in items:
        if item is None:
            parsed.append(None)
        elif item is Ellipsis:
            parsed += [Span(None, None, None)] * (x.ndim - used) or [Gap()]
            axis += x.ndim - used
        elif isinstance(item, slice):
            parsed.append(Span(*(_bound(b) for b in (item.start, item.stop, item.step))))
            if parsed[-1].step == 0:
                raise ArgumentError("slice step cannot be zero")
            axis += 1
        elif isinstance(item, int | np.integer):
            n = x.shape[axis]
            if not -n <= item < n:
                raise ArrayIndexError(f"index {item} is out of bounds for axis {axis} with size {n}")
            parsed.append(int(item) % n)
            axis += 1
        elif item.dtype == np.bool_ and item.ndim == 0:
            host_sync.note("a truth among the indices is read")  # by CuPy, whatever it was made of
            parsed.append(Truth(bool(item._buf if type(item._buf) is np.ndarray else item)))
        else:
            masks, own = item.dtype == np.bool_, any(item is o for o in ours)
            if masks and not own:
                host_sync.note("the true elements of a mask are counted")
            for a in _true_places(item, x, axis) if masks else [item]:
                if own and not masks and a.size:
                    _check_range(a._buf, axis, x.shape[axis])
                elif not masks and not is_known(a._buf, n := x.shape[axis]):
                    if isinstance(a._buf, np.ndarray) or host_sync.checks_indices():
                        unchecked.append((a._buf, axis, n))
                    else:
                        a = _wrapped(a, axis, n)
                parsed.append(Slot(len(arrays)))
                arrays.append(placed(a._buf, where) if own and where.kind != "cpu" else a)
                axis += 1
    check_ranges(unchecked)
    return tuple(p for p in parsed if not isinstance(p, Gap) or _separates(parsed)), tuple(arrays)


def _separates(parsed: Sequence[Any]) -> bool:
    """Whether the ellipsis of no dimensions has index arrays, or an array and an int, on its two sides."""
    at = next(i for i, p in enumerate(parsed) if isinstance(p, Gap))
    left, right = parsed[:at], parsed[at + 1 :]
    return not is_basic(tuple(parsed)) and all(any(isinstance(p, Slot | Truth | int) for p in s) for s in (left, right))


def _bound(b: Any) -> int | None:
    if b is None:
        return None
    try:
        return operator.index(b)
    except TypeError:
        raise ArgumentError(
            f"slice indices must be integers or None or have an __index__ method, got {type(b).__name__} {b!r}"
        ) from None


def _index_array(item: Any, axis: int) -> Array:
    """One array-like item of a key as an array of integers or booleans."""
    if isinstance(item, str | bytes | float | complex) or not (
        isinstance(item, Array | np.ndarray | np.generic | bool | Sequence)
    ):
        raise ArrayIndexError(
            "only integers, slices (`:`), ellipsis (`...`), None and integer or boolean arrays are valid indices, "
            f"got {type(item).__name__} {item!r} at axis {axis}"
        )
    array = item
    if not isinstance(item, Array):
        array = asarray(np.asarray(item, dtype=np.intp if _is_empty(item) else None), device="cpu")
    if array.dtype != np.bool_:
        if array.dtype.kind not in "iu":
            raise ArrayIndexError(
                f"arrays used as indices must be of integer (or boolean) type, got {array.dtype.name}"
            )
    elif isinstance(array._buf, Deferred):
        raise ArrayIndexError(
            f"a boolean mask of shape {array.shape} selects a number of elements that is known only when it is "
            "computed: use mt.where(mask, x, 0), for x[mask] *= c write x = x.at[mask].multiply(c) or x = "
            "mt.where(mask, x * c, x), or compute the mask first. Where another library made it (xarray's polyfit "
            "does, of columns with NaN), fill the missing values first, or give it np.asarray(x)"
        )
    return array


def _true_places(mask: Array, x: Array, axis: int) -> list[Array]:
    """The index arrays of the true elements of a mask of one or more dimensions, from ``axis`` of ``x`` on."""
    for i, (m, n) in enumerate(zip(mask.shape, x.shape[axis:], strict=False)):
        if m not in (n, 0):  # as in NumPy, an axis of no length selects nothing, whatever the length of the array
            raise ArrayIndexError(
                f"boolean index did not match indexed array along axis {axis + i}; size of axis is {n} but size "
                f"of corresponding boolean axis is {m}"
            )
    buf = mask._buf
    with on_device_of(buf):
        return [wrap(a) for a in (buf.nonzero() if type(buf) is np.ndarray else scans.true_places(buf))]


def _is_empty(item: Any) -> bool:
    return isinstance(item, Sequence) and all(_is_empty(part) for part in item)


def check_ranges(indices: Sequence[tuple[Any, int, int]]) -> None:
    """Raise for an out-of-range index before anything is read, on every backend.

    ``indices`` are buffers, each with its axis and the length of that. Those on a GPU need one wait in all."""
    if indices:
        host_sync.note("index arrays are checked")
    wrong: Any = False
    for buf, axis, n in indices:
        if isinstance(buf, np.ndarray):
            _check_range(buf, axis, n)
            continue
        with on_device_of(buf):
            wrong = host_sync.any_outside(buf, -n, n - 1) | wrong
    if wrong:
        for buf, axis, n in indices:
            _check_range(buf, axis, n)


def is_known(buf: Any, n: int) -> bool:
    """Whether nothing need be read to know that indices are in range, or they are to be known only later."""
    if isinstance(buf, Deferred) or buf.size == 0:
        return True
    return not isinstance(buf, np.ndarray) and host_sync.known_within(buf, -n, n - 1)


def _wrapped(index: Array, axis: int, n: int) -> Array:
    """Indices wrapped around, which need no check, as none is outside the array."""
    if n == 0 and index.size:
        raise ArrayIndexError(f"an index is out of bounds for axis {axis} with size 0")
    with on_device_of(index._buf):
        wide = np.uint64 if index.dtype.kind == "u" else np.int64  # a short index may not hold n
        return wrap(index._buf.astype(wide, copy=False) % max(n, 1))


def _check_range(buf: Any, axis: int, n: int) -> None:
    low, high = int(buf.min()), int(buf.max())
    if low < -n or high >= n:
        bad = low if low < -n else high
        raise ArrayIndexError(f"index {bad} is out of bounds for axis {axis} with size {n}")


def mask_alone(x: Array, key: Any) -> Array | None:
    """The mask where ``key`` is one boolean array over the first dimensions of ``x``, and no more; else None."""
    if isinstance(key, tuple) and len(key) == 1:
        (key,) = key
    if isinstance(key, list | np.ndarray):
        host = np.asarray(key)
        key = asarray(host, device=beside(x)) if host.dtype == np.bool_ else key
    if not isinstance(key, Array) or key.dtype != np.bool_ or not key.ndim or key.shape != x.shape[: key.ndim]:
        return None
    return key
