"""Reading, writing and accumulating at ``x[key]``, and their gradients.

They share one parsed form of the key (:mod:`.keys`). Where several writes hit one element, the last in C order wins.
"""

from __future__ import annotations

import opcode
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.array import Array
from ..core.dispatch import Deferred, apply, wrap
from ..core.dtypes import is_low_precision
from ..core.errors import ArgumentError, DTypeError, NumberRangeError, ShapeError
from ..core.index_template import Template, fitted, is_basic, numpy_key, result_shape
from ..core.op import Op, ShapeDtype, move, state
from ..kernels import scatter as kernels
from ..ops.param_kinds import SIZES, TEMPLATE
from .keys import parse
from .rows import rows_of

# ----- ops ------------------------------------------------------------------------------------------------------------


def _getitem(xp: Any, x: Any, *arrays: Any, template: Template) -> Any:
    return x[numpy_key(template, arrays)]


def _infer_getitem(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    x, *arrays = args
    return ShapeDtype(result_shape(params["template"], x.shape, [a.shape for a in arrays]), x.dtype)


def _index_set(xp: Any, x: Any, v: Any, *arrays: Any, template: Template, out: Any = None) -> Any:
    """``INDEX_SET``; ``out`` is ``x`` itself where nobody else holds that memory or reads it again."""
    if out is None:
        out = xp.array(x)  # rules may pass NumPy's scalars, whose copies cannot be written
    write(xp, out, v, template, arrays)
    return out


def write(xp: Any, out: Any, v: Any, template: Template, arrays: Sequence[Any]) -> None:
    """``out[key] = v`` in place on a CPU; with repeated places the last write in C order wins."""
    key = numpy_key(template, arrays)
    v = fitted(v, out, template, arrays)
    out[key] = v  # NumPy writes in C order; a GPU has kernels of its own


def _index_add(xp: Any, x: Any, v: Any, *arrays: Any, template: Template) -> Any:
    dtype, short = x.dtype, not is_basic(template) and is_low_precision(x.dtype)
    out = xp.array(x, np.float32 if short else None)  # of repeated places the sum is rounded once
    key = numpy_key(template, arrays)
    v = fitted(v, out, template, arrays)
    if is_basic(template):
        out[key] += v
    else:
        xp.add.at(out, key, v)
    return out.astype(dtype, copy=False)


def _index_extremum(name: str) -> Callable[..., Any]:
    """``x`` with the smaller (larger) of itself and each written value at the index; repeated places meet all of
    theirs."""

    def impl(xp: Any, x: Any, v: Any, *arrays: Any, template: Template) -> Any:
        out = xp.array(x)
        key = numpy_key(template, arrays)
        v = fitted(v, out, template, arrays)
        if is_basic(template):
            out[key] = getattr(xp, name)(out[key], v)
        else:
            getattr(xp, name).at(out, key, xp.asarray(v, out.dtype))
        return out

    return impl


def _infer_index_write(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    x, v, *arrays = args
    target = result_shape(params["template"], x.shape, [a.shape for a in arrays])
    check_value_shape(op.name, v.shape if isinstance(v, ShapeDtype) else (), target)
    check_value_dtype(op.name, v, x.dtype)
    return ShapeDtype(x.shape, x.dtype)


def check_value_dtype(name: str, value: Any, dtype: np.dtype) -> None:
    """Complex values (arrays or numbers) are not written into real arrays: the imaginary part would be lost."""
    kind = value.dtype.kind if hasattr(value, "dtype") else "c" if isinstance(value, complex) else ""
    if kind == "c" and dtype.kind != "c":
        raise DTypeError(f"[{name}] cannot write complex values into {dtype.name}: take the real part first")
    if type(value) in (int, float) and dtype.kind in "iu":
        try:
            np.asarray(value, dtype)
        except (OverflowError, ValueError) as e:
            kind = NumberRangeError if isinstance(e, OverflowError) else ArgumentError
            raise kind(f"[{name}] {e}: {value} has no place in {dtype.name}") from None


def check_fits(name: str, result: np.dtype, dtype: np.dtype) -> None:
    """Raise where a result cannot be cast to the dtype of the array: a fraction does not fit integers."""
    if dtype.kind != "b" and not np.can_cast(result, dtype, "same_kind"):
        raise DTypeError(f"[{name}] an array of {dtype.name} cannot take a result of {result.name}: cast it first")


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


_sparse_scatter: Callable[..., Any]


def register_sparse_scatter(fn: Callable[..., Any]) -> None:
    """Called once by the module of sparse cotangents."""
    global _sparse_scatter
    _sparse_scatter = fn


def _scatter(xp: Any, g: Any, *arrays: Any, template: Template, shape: tuple[int, ...]) -> Any:
    """Zeros of ``shape`` with ``g`` added at the index: the cotangent of reading."""
    if xp is np:
        return _sparse_scatter(template, arrays, g, shape)
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
    out = xp.array(g[key], order="C")
    if arrays and out.size:
        # By place of those dimensions alone that the key picks of: a loop of writes never looks at the whole array.
        _, ids, at = rows_of(template, arrays, np.arange(out.size).reshape(out.shape), g.shape)
        order = np.lexsort((at[:, 0], ids))
        ids = ids[order]
        out.reshape(-1)[at[order[:-1][ids[1:] == ids[:-1]]]] = 0
    return out


_INDEX = {"template": TEMPLATE}
GETITEM = Op(
    "getitem",
    ("x", "*arrays"),
    _getitem,
    _infer_getitem,
    overrides={"cupy": kernels.getitem},
    params=_INDEX,
    view="always",
)


def _write(name: str, impl: Callable[..., Any], on_cuda: Callable[..., Any]) -> Op:
    operands = ("x", "v", "*arrays")
    return Op(name, operands, impl, _infer_index_write, overrides={"cupy": on_cuda}, params=_INDEX)


INDEX_SET = _write("index_set", _index_set, kernels.index_set)
INDEX_ADD = _write("index_add", _index_add, kernels.index_add)
INDEX_MIN = _write("index_min", _index_extremum("minimum"), kernels.index_extremum("minimum"))
INDEX_MAX = _write("index_max", _index_extremum("maximum"), kernels.index_extremum("maximum"))
SCATTER = Op(
    "scatter",
    ("g", "*arrays"),
    _scatter,
    _infer_scatter,
    overrides={"cupy": kernels.scatter},
    params={**_INDEX, "shape": SIZES},
)
LAST_WRITES = Op(
    "last_writes",
    ("g", "*arrays"),
    _last_writes,
    _infer_getitem,
    overrides={"cupy": kernels.last_writes},
    params=_INDEX,
)


# Parts of a key that NumPy reads as we do. (A bool is no int here: its type is bool.)
_INT = frozenset({int})
_PLAIN = frozenset({int, slice, type(None), type(Ellipsis)})


def is_plain(key: Any) -> bool:
    """Whether the key is made of ints, slices, None and ellipses only."""
    t = type(key)
    return t in _PLAIN or (t is tuple and _PLAIN.issuperset(map(type, key)))


def one_array(x: Array, key: Array) -> Any:
    """The memory of a key that is an Array of ints or a mask; else None.

    Reading and writing there is NumPy's business alone, as long as ``x`` has elements: NumPy does not look at indices
    that read nothing.
    """
    at = key._buf
    if type(at) is not np.ndarray or not x._buf.size:
        return None
    return at if _is_plain_index(at.dtype) or (at.dtype.kind == "b" and at.ndim) else None


def _is_plain_index(dtype: np.dtype) -> bool:
    """Whether NumPy reads all integers of the dtype as what they are: it wraps those of ``uint64`` around."""
    return dtype.kind == "i" or (dtype.kind == "u" and dtype.itemsize < 8)


def _as_numpy_reads_it(key: tuple[Any, ...], array_type: type) -> Any:
    """The key with integer arrays as NumPy's; None where anything else is in it, a mask for one."""
    items = []
    for k in key:
        t = type(k)
        if t in _PLAIN:
            items.append(k)
        elif t is list and k and _INT.issuperset(map(type, k)):
            items.append(np.array(k))
        else:
            k = k._buf if t is array_type else k
            if type(k) is not np.ndarray or not _is_plain_index(k.dtype):
                return None
            items.append(k)
    return tuple(items)


def is_view(buf: Any) -> bool:
    """Whether a buffer is, or may be, a view: a result of basic indexing or reshaping."""
    return getattr(buf, "part", False) if isinstance(buf, Deferred) else type(buf.base) is type(buf)


class _IndexProbe:
    def __setitem__(self, key: Any, value: list[int]) -> None:
        value.append(sys.getrefcount(self))


def _count_dropped() -> int:
    """The reference count of an object that only its writing statement holds; 0 where this Python cannot tell."""
    counts: list[int] = []
    _IndexProbe()[0] = counts
    held = _IndexProbe()
    held[0] = counts
    return counts[0] if counts[0] < counts[1] else 0


DROPPED = _count_dropped()
_STORES = {opcode.opmap[n] for n in ("STORE_SUBSCR", "STORE_SLICE") if n in opcode.opmap}


def is_lost(buf: Any) -> bool:
    """Whether a write to an array that only the writing statement has, and whose buffer this is, would in NumPy reach
    another array.

    (A call of ``__setitem__`` by its name has as many holders; it is no such statement.)
    """
    caller = sys._getframe(2)
    return is_view(buf) and caller.f_code.co_code[caller.f_lasti] in _STORES


def getitem(x: Array, key: Any, /) -> Array:
    """``x[key]``."""
    buf = x._buf
    kind = type(buf)
    if not state.recorders and (kind is np.ndarray or not isinstance(buf, Deferred)):
        t = type(key)
        known, safe = key, t in _PLAIN or (t is tuple and is_plain(key))
        if not safe and kind is not np.ndarray:  # index arrays on a GPU are checked first
            known = None
        elif not safe:
            known = one_array(x, key) if t is type(x) else None
            safe = known is not None
            if not safe:
                known = _as_numpy_reads_it(key if t is tuple else (key,), type(x))
        if safe or known is not None:
            try:
                out = buf[known]
            except (IndexError, TypeError, ValueError):
                pass  # said again below, in our words
            else:
                if type(out) is not kind:
                    return wrap(np.asarray(out))
                # NumPy does not look at index arrays of which nothing is read; they may be out of range.
                if safe or out.size:
                    return wrap(out)
    template, arrays = parse(x, key)
    if not is_basic(template):
        result_shape(template, x.shape, [a.shape for a in arrays])  # raises our message for arrays that do not fit
    out = apply(GETITEM, (x, *arrays), {"template": template})
    if not is_basic(template):
        return out
    if isinstance(out._buf, Deferred):
        out._buf.part = True
    elif kind is np.ndarray and type(out._buf) is np.ndarray and out._buf.size * _FEW <= buf.size:
        # A tape that kept the view would keep all of ``x``, and each write to ``x`` in a loop would copy all of it.
        move(out, out._buf.copy()[...])
    return out


_FEW = 8
"""Of so many times as many elements a part that is read under a tape is copied."""
