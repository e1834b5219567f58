"""Indexing: one parsed form that reading, writing and their gradients share.

``x[key]`` is parsed once into a template, which is static and hashable, and the index arrays, which are operands like any
other: they can be traced or sharded. Semantics are NumPy's. Where several writes hit one element, the last in C order wins.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ._dispatch import Deferred, apply
from ._op import Op
from .errors import ArrayIndexError, ShapeError
from .program import ShapeDtype

if TYPE_CHECKING:
    from ._array import Array


class Slot(NamedTuple):
    """Place of the ``n``-th index array in a template."""

    n: int


class Span(NamedTuple):
    """A slice in a template (``slice`` itself cannot be hashed before Python 3.12)."""

    start: int | None
    stop: int | None
    step: int | None


Template = tuple[int | Span | Slot | None, ...]
"""A parsed index without ellipsis: every dimension of the array is named; ``None`` is a new axis."""


def parse(x: Array, key: Any) -> tuple[Template, tuple[Any, ...]]:
    """Template and index arrays (as ``Array``s of integers) of ``x[key]``.

    Boolean arrays become the integer arrays of their true places. Raises what NumPy raises, always with the axis, the index
    and the length in the message.
    """
    items = list(key) if isinstance(key, tuple) else [key]
    arrays: list[Any] = []
    parsed: list[Any] = []
    ellipsis_at: int | None = None
    used = 0
    for item in items:
        if item is None:
            parsed.append(None)
        elif item is Ellipsis:
            if ellipsis_at is not None:
                raise ArrayIndexError("an index can only have a single ellipsis ('...')")
            ellipsis_at = len(parsed)
        elif isinstance(item, slice):
            parsed.append(Span(*(_bound(b) for b in (item.start, item.stop, item.step))))
            if parsed[-1].step == 0:
                raise ValueError("slice step cannot be zero")
            used += 1
        elif isinstance(item, int | np.integer) and not isinstance(item, bool | np.bool):
            parsed.append(int(item))
            used += 1
        else:
            slots, axes = _array_items(item, x, used)
            for a in slots:
                parsed.append(Slot(len(arrays)))
                arrays.append(a)
            used += axes
    if used > x.ndim:
        raise ArrayIndexError(
            f"too many indices for array: array is {x.ndim}-dimensional, but {used} were indexed (shape {x.shape})"
        )
    fill: list[Any] = [Span(None, None, None)] * (x.ndim - used)
    at = len(parsed) if ellipsis_at is None else ellipsis_at
    parsed[at:at] = fill
    axis = 0
    for i, p in enumerate(parsed):
        if p is None:
            continue
        if isinstance(p, int):
            n = x.shape[axis]
            if not -n <= p < n:
                raise ArrayIndexError(f"index {p} is out of bounds for axis {axis} with size {n}")
            parsed[i] = p % n
        elif isinstance(p, Slot) and p.n >= 0:
            _check_range(arrays[p.n], axis, x.shape[axis])
        axis += 1
    return tuple(parsed), tuple(arrays)


def _bound(b: Any) -> int | None:
    if b is None:
        return None
    try:
        return operator.index(b)
    except TypeError:
        raise TypeError(
            f"slice indices must be integers or None or have an __index__ method, got {type(b).__name__} {b!r}"
        ) from None


def _array_items(item: Any, x: Array, axis: int) -> tuple[list[Any], int]:
    """Integer arrays that one array-like item of a key stands for, and how many axes it consumes."""
    from ._array import Array
    from .creation import asarray

    if isinstance(item, str | bytes | float | complex) or not (
        isinstance(item, Array | np.ndarray | np.generic | bool | Sequence)
    ):
        raise ArrayIndexError(
            "only integers, slices (`:`), ellipsis (`...`), None and integer or boolean arrays are valid indices, "
            f"got {type(item).__name__} {item!r} at axis {axis}"
        )
    array = item if isinstance(item, Array) else asarray(np.asarray(item, dtype=np.intp if _is_empty(item) else None))
    if array.dtype == np.bool_:
        if isinstance(array._buf, Deferred):
            raise ArrayIndexError(
                "a boolean mask selects a number of elements that is known only when it is computed: "
                "use mt.where(mask, x, 0), or compute the mask first"
            )
        for i, (m, n) in enumerate(zip(array.shape, x.shape[axis:], strict=False)):
            if m != n:
                raise ArrayIndexError(
                    f"boolean index did not match indexed array along axis {axis + i}; size of axis is {n} but size "
                    f"of corresponding boolean axis is {m}"
                )
        mask = array._buf
        if mask.ndim == 0:
            # A 0-d mask adds an axis of length one or zero and consumes none; NumPy's own trick is an index into it.
            raise ArrayIndexError(
                "a single boolean is no index here: use x[None] for True, or mt.where for a condition"
            )
        return [asarray(a, copy=False) for a in mask.nonzero()], mask.ndim
    if array.dtype.kind not in "iu":
        raise ArrayIndexError(f"arrays used as indices must be of integer (or boolean) type, got {array.dtype.name}")
    return [array], 1


def _is_empty(item: Any) -> bool:
    return isinstance(item, Sequence) and len(item) == 0


def _check_range(index: Any, axis: int, n: int) -> None:
    """An out-of-range entry raises before anything is read: on every backend, never garbage."""
    buf = index._buf
    if isinstance(buf, Deferred) or buf.size == 0:
        return
    low, high = int(buf.min()), int(buf.max())
    if low < -n or high >= n:
        bad = low if low < -n else high
        raise ArrayIndexError(f"index {bad} is out of bounds for axis {axis} with size {n}")


def numpy_key(template: Template, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The template with its arrays put in, as NumPy and CuPy take it."""
    return tuple(slice(*p) if isinstance(p, Span) else arrays[p.n] if isinstance(p, Slot) else p for p in template)


def is_basic(template: Template) -> bool:
    """Whether no index array is in it: the result is a view, and no element is read twice."""
    return not any(isinstance(p, Slot) for p in template)


def result_shape(
    template: Template, shape: tuple[int, ...], index_shapes: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
    """Shape of ``x[key]`` by NumPy's rules: index arrays broadcast together, ints beside them count as arrays, and their
    dimensions come first unless all of them stand side by side."""
    advanced = [i for i, p in enumerate(template) if isinstance(p, Slot)]
    if advanced:
        joined = [i for i, p in enumerate(template) if isinstance(p, Slot | int)]
        try:
            common = np.broadcast_shapes(*index_shapes)
        except ValueError:
            raise ArrayIndexError(
                f"shape mismatch: indexing arrays could not be broadcast together with shapes "
                f"{' '.join(map(str, index_shapes))}"
            ) from None
        together = joined == list(range(joined[0], joined[-1] + 1))
    out: list[int] = []
    front: int | None = None
    axis = 0
    for p in template:
        if p is None:
            out.append(1)
            continue
        if isinstance(p, Span):
            out.append(len(range(*slice(*p).indices(shape[axis]))))
        elif advanced and front is None:
            front = len(out)
        axis += 1
    if advanced:
        at = front if together else 0
        out[at:at] = common
    return tuple(out)


# ----- ops ------------------------------------------------------------------------------------------------------------


def _getitem(xp: Any, x: Any, *arrays: Any, template: Template) -> Any:
    return x[numpy_key(template, arrays)]


def _infer_getitem(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    x, *arrays = args
    return ShapeDtype(result_shape(params["template"], x.shape, [a.shape for a in arrays]), x.dtype)


def _winners(shape: tuple[int, ...], key: tuple[Any, ...], count: int) -> Any:
    """Flat positions (among ``count`` writes in C order) whose write survives: the last one to each element."""
    places = np.arange(math.prod(shape)).reshape(shape)[key].reshape(-1)
    # The first occurrence in reverse order is the last write.
    _, first = np.unique(places[::-1], return_index=True)
    return count - 1 - first


def _index_set(xp: Any, x: Any, v: Any, *arrays: Any, template: Template) -> Any:
    out = x.copy()
    write(xp, out, v, template, arrays)
    return out


def write(xp: Any, out: Any, v: Any, template: Template, arrays: Sequence[Any]) -> None:
    """``out[key] = v`` in place; with repeated places the last write in C order wins, on every backend."""
    key = numpy_key(template, arrays)
    if xp is np or is_basic(template):
        out[key] = v
        return
    # The order of CuPy's parallel writes is undefined, so that only the surviving ones are made.
    host = tuple(xp.asnumpy(k) if isinstance(k, xp.ndarray) else k for k in key)
    target = out[key]
    values = xp.broadcast_to(xp.asarray(v, out.dtype), target.shape).reshape(-1)
    places = np.arange(out.size).reshape(out.shape)[host].reshape(-1)
    keep = _winners(out.shape, host, places.size)
    out.reshape(-1)[xp.asarray(places[keep])] = values[xp.asarray(keep)]


def _index_add(xp: Any, x: Any, v: Any, *arrays: Any, template: Template) -> Any:
    out = x.copy()
    key = numpy_key(template, arrays)
    if is_basic(template):
        out[key] += v
    else:
        xp.add.at(out, key, v)
    return out


def _infer_index_write(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    x, v, *arrays = args
    target = result_shape(params["template"], x.shape, [a.shape for a in arrays])
    check_value_shape(op.name, v.shape if isinstance(v, ShapeDtype) else (), target)
    return ShapeDtype(x.shape, x.dtype)


def check_value_shape(name: str, value: tuple[int, ...], target: tuple[int, ...]) -> None:
    """A written value must broadcast to the place it goes to; leading ones may be dropped, as NumPy allows."""
    lead = len(value) - len(target)
    if lead > 0 and all(n == 1 for n in value[:lead]):
        value = value[lead:]
    try:
        fits = np.broadcast_shapes(value, target) == target
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(f"[{name}] a value of shape {value} does not fit the indexed part of shape {target}")


def _scatter(xp: Any, g: Any, *arrays: Any, template: Template, shape: tuple[int, ...]) -> Any:
    """Zeros of ``shape`` with ``g`` added at the index: the cotangent of reading."""
    out = xp.zeros(shape, g.dtype)
    key = numpy_key(template, arrays)
    if is_basic(template):
        out[key] = g
    else:
        xp.add.at(out, key, g)
    return out


def _infer_scatter(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    return ShapeDtype(params["shape"], args[0].dtype)


def _last_writes(xp: Any, g: Any, *arrays: Any, template: Template) -> Any:
    """``g[key]`` with zeros where a later write took the place: the cotangent of a written value."""
    key = numpy_key(template, arrays)
    out = xp.array(g[key])
    if not is_basic(template) and out.size:
        host = tuple(k if xp is np or not isinstance(k, xp.ndarray) else xp.asnumpy(k) for k in key)
        # Index arrays address whole sub-blocks alike: compare places element by element.
        places = np.arange(g.size).reshape(g.shape)[host]
        lost = np.ones(places.size, bool)
        lost[_winners(g.shape, host, places.size)] = False
        out[xp.asarray(lost.reshape(places.shape))] = 0
    return out


GETITEM = Op("getitem", ("x", "*arrays"), _getitem, _infer_getitem)
INDEX_SET = Op("index_set", ("x", "v", "*arrays"), _index_set, _infer_index_write)
INDEX_ADD = Op("index_add", ("x", "v", "*arrays"), _index_add, _infer_index_write)
SCATTER = Op("scatter", ("g", "*arrays"), _scatter, _infer_scatter)
LAST_WRITES = Op("last_writes", ("g", "*arrays"), _last_writes, _infer_getitem)


def getitem(x: Array, key: Any) -> Array:
    """``x[key]``."""
    template, arrays = parse(x, key)
    if arrays:
        result_shape(template, x.shape, [a.shape for a in arrays])  # raises our message for arrays that do not fit
    return apply(GETITEM, (x, *arrays), {"template": template})


class AtIndex:
    """``x.at[key]``: functional writes, which return a new array and leave ``x`` as it is.

    >>> import meshtape as mt
    >>> mt.zeros(3).at[[0, 0, 2]].add(1.0)
    Array([2., 0., 1.], dtype=float64)
    """

    __slots__ = ("_key", "_x")

    def __init__(self, x: Array, key: Any = None) -> None:
        self._x, self._key = x, key

    def __getitem__(self, key: Any) -> AtIndex:
        return AtIndex(self._x, key)

    def _write(self, op: Op, v: Any) -> Array:
        from ._array import Array
        from .creation import asarray

        template, arrays = parse(self._x, self._key)
        value = v if isinstance(v, Array | int | float | complex) else asarray(v)
        shape = value.shape if isinstance(value, Array) else ()
        check_value_shape(op.name, shape, result_shape(template, self._x.shape, [a.shape for a in arrays]))
        return apply(op, (self._x, value, *arrays), {"template": template})

    def set(self, v: Any) -> Array:
        """A copy with ``v`` at the index; of repeated places the last write in C order wins."""
        return self._write(INDEX_SET, v)

    def add(self, v: Any) -> Array:
        """A copy with ``v`` added at the index; repeated places add up."""
        return self._write(INDEX_ADD, v)
