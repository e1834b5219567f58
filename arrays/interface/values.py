"""The values of ``Array``: its attributes, conversions, indexing and operators.

An Array is a value: nothing that is done to another array changes it. Views are made without copying and share memory
until one side is written; the writer then copies (copy on write). Nobody keeps a list of who shares what: CPython's
reference count of the buffer *is* the list. Every view, tape and export holds the buffer object, so that a write goes
in place only when this Array is the one holder.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..backends import host_sync
from ..backends.backend import backend_for, backend_of
from ..backends.dlpack import read_only
from ..backends.memory_pool import is_sole
from ..core.array import Array
from ..core.blocks import BlockSharding
from ..core.devices import Device, device
from ..core.dispatch import Deferred, apply, is_watched, record, refuse_history, refuse_watched, wrap
from ..core.errors import ArgumentError, DeviceError, DTypeError, NumberRangeError, NumPyFunctionError, ShapeError
from ..core.index_template import result_shape
from ..core.op import state
from ..indexing import indexing
from ..indexing import keys as index_keys
from ..ops import elementwise as ew
from ..ops import manipulation, matmul
from ..ops.creation import as_arrays
from .askers import REMEDY, as_plain_array, writes_buffer
from .at import AtIndex, masked_write
from .display import array_html, array_text
from .operators import comparison, operator
from .unpickling import unpickle
from .writing import become, settled, take

_REAL_NUMBERS = frozenset({bool, int, float})

# Holders of a buffer that only one Array has: its slot, a local name, and the argument of getrefcount.
_SOLE_HOLDER = 3

# Their functions ask a parameter for its number, of which the user has then said nothing, as he has with `float(x)`.
_NUMBER_TAKERS = ("numpy", "scipy")


def _unary(op: Any) -> Callable[[Array], Array]:
    """The method of ``Array`` for an operator of one operand."""

    def method(self: Array) -> Array:
        return apply(op, (self,))

    return method


def _in_place(op: Any) -> Callable[[Array, Any], Any]:
    """The method of ``Array`` for ``op=``."""
    return lambda self, other: _operate_in_place(op, self, other)


def _converted(kind: Callable[[Any], Any], value: Any) -> Any:
    """``kind(value)``, of NaN or an infinity with our error."""
    try:
        return kind(value)
    except (ValueError, OverflowError) as e:
        of = NumberRangeError if isinstance(e, OverflowError) else ArgumentError
        raise of(f"[{kind.__name__}] {e}: look for such elements with mt.isfinite(x)") from None


class Values:
    """Attributes, values, copies, indexing and operators of an :class:`Array`."""

    # ----- attributes -------------------------------------------------------------------------------------------------

    @property
    def device(self) -> Any:
        """The place of the array, a :class:`Device` or the mesh that it is split over."""
        buf = self._buf
        return buf.device if isinstance(buf, Deferred) else backend_of(buf).device_of(buf)

    @property
    def sharding(self) -> BlockSharding | None:
        """How the array is split over a mesh; None for an array in one place."""
        return getattr(self._buf, "sharding", None)

    @property
    def T(self) -> Array:
        """The matrix with rows and columns exchanged. Raises :class:`ShapeError` unless there are two dimensions."""
        if len(self._buf.shape) != 2:
            instead = "use .mT or permute_dims" if self.ndim > 2 else "leave .T out, or write x[:, None] for a column"
            raise ShapeError(f"[T] is for two dimensions, this array has {self.ndim}: {instead}")
        return manipulation.permute_dims(self, (1, 0))

    @property
    def mT(self) -> Array:
        """The last two dimensions exchanged."""
        return manipulation.matrix_transpose(self)

    @property
    def at(self) -> AtIndex:
        """Functional writes, such as ``x.at[key].set(v)``, ``add``, ``multiply``, ``min``, ``max``."""
        return AtIndex(self)

    def __len__(self) -> int:
        if not self.shape:
            raise ArgumentError("len() of a 0-d array")
        return self.shape[0]

    def __iter__(self) -> Iterator[Array]:
        if not self.shape:
            raise ArgumentError("iteration over a 0-d array")
        if isinstance(self._buf, Deferred):
            return self._buf.elements(self)
        return (self[i] for i in range(self.shape[0]))

    # ----- values -----------------------------------------------------------------------------------------------------

    def _concrete(self) -> np.ndarray:
        """The value in host memory; computed now where it is pending, refused where it is traced."""
        host_sync.note("a value is read")
        for r in state.recorders:
            if hasattr(r, "note_read"):
                r.note_read(self)
        buf = self._buf
        return buf.concrete() if isinstance(buf, Deferred) else backend_of(buf).to_host(buf)

    def numpy(self) -> np.ndarray:
        """A NumPy copy of the value, which belongs to the caller. Raises :class:`GradientError` where a tape watches
        the array."""
        refuse_watched("numpy", self)
        return np.array(self._concrete())

    def to_numpy(self, dtype: Any = None, **_: Any) -> np.ndarray:
        """`numpy` under the name by which Matplotlib and pandas ask for all values at once."""
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def item(self, *index: Any) -> Any:
        """The only element, or the one at an index (of the flattened array, or one for each dimension), as a Python
        number."""
        if index:
            place = index if len(index) > 1 else index[0]
            return (self[place] if isinstance(place, tuple) else self.ravel()[place]).item()
        if self.size != 1:
            raise ShapeError(f"[item] only an array of one element is a number, this one has shape {self.shape}")
        return self._concrete().item()

    def tolist(self) -> Any:
        """Nested lists of Python numbers."""
        return self._concrete().tolist()

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ArgumentError(f"the truth of an array of shape {self.shape} is ambiguous: use any(x) or all(x)")
        return bool(self._concrete().item())

    def _number(self, kind: type, complex_ok: bool = False) -> Any:
        if self.ndim != 0:
            raise ArgumentError(f"only a 0-d array is a Python {kind.__name__}, this one has shape {self.shape}")
        if state.recorders:
            asker = sys._getframe(2)
            if asker.f_globals.get("__name__", "").partition(".")[0] in _NUMBER_TAKERS:
                refuse_watched(f"a parameter of {asker.f_code.co_name}", self)
            elif is_watched(self) and (how := writes_buffer(asker)) is not None:
                refuse_watched(how, self, REMEDY)
        value = self._concrete().item()
        if isinstance(value, complex) and not complex_ok:
            raise ArgumentError(f"a complex array is no Python {kind.__name__}: take its real part first")
        return _converted(kind, value)

    def __hash__(self) -> int:
        """The hash of the number of a 0-d array, as for NumPy's scalars, so that ``{3.0: "c"}[x[0]]`` works."""
        if self.ndim:
            raise ArgumentError(f"unhashable: an array of shape {self.shape}, as == compares element by element")
        refuse_history("hash", self)
        return hash(self._concrete().item())

    def __float__(self) -> float:
        return self._number(float)

    def __int__(self) -> int:
        return self._number(int)

    # (NumPy's 0-d results are scalars, which Python rounds to an int, or to one of their own kind.)

    def __round__(self, ndigits: int | None = None) -> Any:
        if ndigits is not None:
            return self.round(ndigits)
        return self._whole(round)

    def __floor__(self) -> int:
        return self._whole(math.floor)

    def __ceil__(self) -> int:
        return self._whole(math.ceil)

    def __trunc__(self) -> int:
        return self._whole(math.trunc)

    def _whole(self, to_int: Callable[[Any], int]) -> int:
        """The integer that Python makes of the element, of an integer with all of its digits."""
        name = to_int.__name__
        if self.ndim:
            raise ArgumentError(f"{name}() takes a 0-d array, this one has shape {self.shape}: write mt.{name}(x)")
        return _converted(to_int, self._number(int if self.dtype.kind in "biu" else float))

    def __complex__(self) -> complex:
        return self._number(complex, complex_ok=True)

    def __index__(self) -> int:
        if self.dtype.kind not in "iu" or self.ndim != 0:
            raise ArgumentError(
                f"only a 0-d integer array is an index, this one is {self.dtype.name} of shape {self.shape}"
            )
        return int(self._concrete().item())

    def to_device(self, name: Device | str, /, *, stream: Any = None) -> Array:
        """The array on another device; itself where it is there already."""
        if stream is not None:
            raise DeviceError("[to_device] meshtape copies on the current stream; pass stream=None")
        target = device(name)
        if isinstance(self._buf, Deferred) or self.device != target:
            refuse_watched("to_device", self, "move it before tape.watch(...)")
        if self.device == target:
            return self
        if isinstance(self._buf, Deferred):
            return wrap(np.array(self._concrete())).to_device(target)
        held = settled(self)  # of host memory no device is waited for
        return wrap(backend_for(target).from_host(held if type(held) is np.ndarray else self._concrete(), target))

    # ----- copies -----------------------------------------------------------------------------------------------------

    def __copy__(self) -> Array:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Array:
        return self.copy()

    def __reduce__(self) -> Any:
        refuse_watched("pickle", self)
        # Read-only: out-of-band buffers are this array's own memory.
        value = (read_only(self._concrete()),)
        of_host = self._buf.memory is None if isinstance(self._buf, Deferred) else isinstance(self._buf, np.ndarray)
        return unpickle, value if of_host else (*value, str(self.device))

    # ----- display ----------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return array_text(self)

    def _repr_html_(self) -> str:
        return array_html(self)

    # ----- Dask: an array on a mesh is a collection of blocks, another one is none ------------------------------------

    def to_dask(self) -> Any:
        """The array as a ``dask.array``: of the blocks where they are, one chunk a block, where it is split over a
        mesh.

        >>> x = mt.distribute(mt.arange(5), mt.Mesh({"data": 2}), data=mt.Shard(0))
        >>> x.to_dask().chunks
        ((3, 2),)
        """
        refuse_watched("to_dask", self)
        buf = settled(self)
        if isinstance(buf, Deferred):
            return buf.dask()
        import dask.array as da

        return da.from_array(np.asarray(self))

    def rechunk(self, *args: Any, **kwargs: Any) -> Any:
        """``x.to_dask().rechunk(…)``, which ``chunk`` of xarray asks for."""
        return self.to_dask().rechunk(*args, **kwargs)

    def __dask_graph__(self) -> Any:
        if as_plain_array():
            return None
        return self._buf.dask().__dask_graph__() if hasattr(self._buf, "dask") and self._buf.host is not None else None

    def __dask_keys__(self) -> Any:
        refuse_watched("dask", self)
        return self._buf.dask().__dask_keys__()

    def __dask_postcompute__(self) -> Any:
        return self._buf.dask().__dask_postcompute__()

    def __dask_postpersist__(self) -> Any:
        return self._buf.dask_persisted()

    def __dask_tokenize__(self) -> Any:
        refuse_watched("dask", self)  # whose threads no tape follows
        dask = getattr(self._buf, "dask", None)
        return ("meshtape", dask().name) if dask is not None else ("meshtape", np.asarray(self._concrete()))

    @staticmethod
    def __dask_optimize__(graph: Any, keys: Any, **kwargs: Any) -> Any:
        return graph

    @staticmethod
    def __dask_scheduler__(*args: Any, **kwargs: Any) -> Any:
        from dask.threaded import get

        return get(*args, **kwargs)

    def __format__(self, spec: str) -> str:
        return format(self._concrete().item(), spec) if spec and self.ndim == 0 else format(str(self), spec)

    # ----- indexing ---------------------------------------------------------------------------------------------------

    __getitem__ = indexing.getitem

    def _write(self, put: Callable[[np.ndarray], None], value: Any = None, *key: Any) -> None:
        """Have ``put`` write to the buffer of this Array alone, copied first where anybody else holds it. (Of NumPy
        memory.) Tapes are then shown a write of ``value`` at ``key``: a template, and index arrays."""
        mine = None
        while mine is None:
            buf = settled(self)
            mine = take(self, buf)
        try:
            put(mine)
            # Another value from here on: tapes that know the former one do not mistake this one for it.
            before, self._id = self._id, 0
            if state.recorders:
                x, new = wrap(mine), wrap(mine)
                x._id = before
                args = x, value, *key[1:]
                bufs = [a._buf if type(a) is Array else a for a in args]
                record(indexing.INDEX_SET, args, bufs, new, {"template": key[0]})
                self._id = new._id
        finally:
            self._buf = mine

    def __setitem__(self, key: Any, value: Any) -> None:
        buf = self._buf
        if sys.getrefcount(self) <= indexing.DROPPED and indexing.is_lost(buf):
            raise NumPyFunctionError(
                "[setitem] arrays are values: x[i][j] = v would write into a value that nobody holds, and x would stay "
                "as it is. Write x[i, j] = v, or y = x[i]; y[j] = v; x[i] = y"
            )
        if type(buf) is np.ndarray and not state.recorders:
            source = value
            known = type(value) in _REAL_NUMBERS
            if not known and type(value) is Array:
                source = value._buf
                # (Of shared memory the writer gets a copy of its own first, so that what is read is not what is
                # written.)
                known = type(source) is np.ndarray and (source.dtype.kind != "c" or buf.dtype.kind == "c")
            plain = known and indexing.is_plain(key)
            place = key if plain else indexing.one_array(self, key) if known and type(key) is Array else None
            if (plain or place is not None) and (mine := take(self, buf)) is not None:
                try:
                    mine[place] = source
                    self._id = 0
                    return
                except (IndexError, TypeError, ValueError, OverflowError):
                    pass  # said again below, in our words
                finally:
                    self._buf = mine
                del mine
            del source
        del buf  # which would count as a holder

        if not isinstance(value, Array | bool | int | float | complex):
            _, value = as_arrays(self, value)
        if not isinstance(value, Array) or not value.ndim:
            mask = index_keys.mask_alone(self, key)
            if mask is not None and (state.recorders or not isinstance(settled(self), np.ndarray)):
                new = masked_write("setitem", indexing.INDEX_SET, self, mask, value)
                become(self, new._buf, new._id)
                return
            if mask is not None and type(mask._buf) is np.ndarray and not hasattr(value, "device"):
                indexing.check_value_dtype("setitem", value, self.dtype)
                self._write(lambda buf: buf.__setitem__(mask._buf, value))
                return
        template, arrays = index_keys.parse(self, key)
        target = result_shape(template, self.shape, [a.shape for a in arrays])
        indexing.check_value_shape("setitem", value.shape if isinstance(value, Array) else (), target)
        indexing.check_value_dtype("setitem", value, self.dtype)
        keeping = any(not getattr(r, "keeps_no_operand", False) for r in state.recorders)
        if keeping or any(
            isinstance(a, Array) and not isinstance(settled(a), np.ndarray) for a in (self, value, *arrays)
        ):
            new = apply(indexing.INDEX_SET, (self, value, *arrays), {"template": template})
            become(self, new._buf, new._id)
            return
        source = settled(value) if isinstance(value, Array) else value
        if isinstance(source, np.ndarray) and np.may_share_memory(source, settled(self)):
            source = source.copy()  # NumPy reads what it has just written where the two overlap
        key_arrays = [settled(a) for a in arrays]
        self._write(lambda buf: indexing.write(np, buf, source, template, key_arrays), value, template, *arrays)

    # ----- operators --------------------------------------------------------------------------------------------------

    __matmul__ = matmul.matmul

    def __rmatmul__(self, other: Any) -> Array:
        return matmul.matmul(other, self)

    def __imatmul__(self, other: Any) -> Array:
        return _replace("matmul", self, matmul.matmul(self, other))

    __eq__ = comparison(ew.EQUAL, "__eq__")  # type: ignore[assignment]
    __ne__ = comparison(ew.NOT_EQUAL, "__ne__")  # type: ignore[assignment]
    __lt__ = operator(ew.LESS)
    __le__ = operator(ew.LESS_EQUAL)
    __gt__ = operator(ew.GREATER)
    __ge__ = operator(ew.GREATER_EQUAL)


_UNARY = {"neg": ew.NEGATIVE, "pos": ew.POSITIVE, "abs": ew.ABS, "invert": ew.BITWISE_INVERT}
_BINARY = {
    **{"add": ew.ADD, "sub": ew.SUBTRACT, "mul": ew.MULTIPLY, "truediv": ew.DIVIDE, "floordiv": ew.FLOOR_DIVIDE},
    **{"mod": ew.REMAINDER, "pow": ew.POW, "and": ew.BITWISE_AND, "or": ew.BITWISE_OR, "xor": ew.BITWISE_XOR},
    **{"lshift": ew.BITWISE_LEFT_SHIFT, "rshift": ew.BITWISE_RIGHT_SHIFT},
}
for _name, _op in _UNARY.items():
    setattr(Values, f"__{_name}__", _unary(_op))
for _name, _op in _BINARY.items():
    setattr(Values, f"__{_name}__", operator(_op))
    setattr(Values, f"__r{_name}__", operator(_op, reflected=True))
    # The object takes the new value; other arrays that shared its memory keep theirs.
    setattr(Values, f"__i{_name}__", _in_place(_op))


_REUSING = frozenset({ew.ADD, ew.SUBTRACT, ew.MULTIPLY, ew.DIVIDE})
_INEXACT = frozenset(np.dtype(t).num for t in "efdFD")


def _operate_in_place(op: Any, x: Array, y: Any) -> Any:
    """``x op= y``. The memory of ``x`` is used again where nobody else holds it and no tape records."""
    kind, buf = type(y), x._buf
    if kind is not Array and not isinstance(y, bool | int | float | complex | np.ndarray | np.generic | list | tuple):
        return NotImplemented
    if (
        type(buf) is np.ndarray
        and op in _REUSING
        and not state.recorders
        and (dtype := buf.dtype).num in _INEXACT
        and sys.getrefcount(buf) <= _SOLE_HOLDER
        and is_sole(buf)
    ):
        other: Any = None
        if kind is float or kind is int:
            other = y
        elif kind is Array and y is not x:
            other = y._buf
            if type(other) is not np.ndarray or other.dtype is not dtype or other.shape != buf.shape:
                other = None
        if other is not None and take(x, buf, copy=False) is not None:
            try:
                op.numpy(buf, other, buf)
                x._id = 0
                return x
            finally:
                x._buf = buf
    return _replace(op.name, x, apply(op, (x, y)))


def _replace(name: str, x: Array, new: Array) -> Array:
    """``x`` with the value of ``new``, which must have its shape, and a dtype of its kind."""
    if new.shape != x.shape:
        raise ShapeError(f"[{name}] an array of shape {x.shape} cannot take a result of shape {new.shape} in place")
    if new.dtype != x.dtype:
        if not np.can_cast(new.dtype, x.dtype, "same_kind"):
            raise DTypeError(f"[{name}] an array of {x.dtype.name} cannot take a result of {new.dtype.name} in place")
        new = manipulation.astype(new, x.dtype)
    become(x, new._buf, new._id)
    return x


def _count_holders() -> None:
    x = wrap(np.empty(1))
    buf = x._buf
    x._buf = take(x, buf)


_count_holders()
