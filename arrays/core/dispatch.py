"""The one point through which every op call goes.

``apply`` looks at the kind of the buffers, has the call computed (or noted, where a buffer only stands for a value),
wraps the results, and shows the call to the recorders of this thread. The common case, NumPy arrays and Python scalars
with nothing recording, is one loop and one call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .array import Array, ids
from .devices import Device
from .dtypes import FIRST_USER_DTYPE, OF_SHORT, as_floats, is_low_precision, numpy_form
from .errors import (
    ConcurrentWriteError,
    DeviceError,
    DTypeError,
    GradientError,
    MeshtapeError,
    OutOfMemory,
    TracedValueError,
    type_of_ours,
)
from .op import NO_PARAMS, OPS, Op, ShapeDtype, device_of_buffer, is_cuda_elsewhere, not_recording, state
from .program import Const, ProgramHost, Site

compiled: Any
"""The path of a small call in C, or None: :func:`invoke` here, and two functions of the tape. It is there where the
package was installed with a C compiler at hand; it takes the plain case, and hands all else to the functions here."""
try:
    from . import _calls as compiled
except ImportError:
    compiled = None

ndarray = np.ndarray
SCALARS = frozenset({bool, int, float, complex})
_REAL_SCALARS = frozenset({bool, int, float})


class NotNumbers(DTypeError):
    """An operand is None, a text or an object, which no array holds."""


class Deferred:
    """A buffer without a local value: traced by ``mt.compile``, or split over a mesh.

    Subclasses have ``shape``, ``dtype``, ``device``, ``sharding`` (None when not split) and ``host`` (the
    :class:`ProgramHost` that it is split over, or None). The array methods that need a value call :meth:`concrete`.
    Where deferred buffers of several kinds meet in a call, the one with the highest ``priority`` takes it.
    """

    __slots__ = ("part",)  # true of what basic indexing gave, which in NumPy is a view
    shape: tuple[int, ...]
    dtype: np.dtype
    host: ProgramHost | None
    priority = 0
    traced = False  # whether it only stands for a value that is not known yet
    memory: Any = None
    """The array of one GPU that holds the value, where there is one."""
    passing = False
    """Whether this replaces a buffer while another thread writes to it; ``value`` waits for the result."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        n = 1
        for s in self.shape:
            n *= s
        return n

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def aval(self) -> ShapeDtype:
        return ShapeDtype(self.shape, self.dtype)

    def admit(self, op: Op, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The operands for the call and its recorders; calls ops itself where an operand needs preparation."""
        return args

    def emit(self, op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[Any, ...]:
        """Note a call and return the buffers that stand for its results. ``args`` are Arrays and Python scalars."""
        raise TypeError(f"{type(self).__name__} cannot take part in {op.name}")

    def concrete(self) -> np.ndarray:
        """The value as a NumPy array, computed now if need be."""
        raise TypeError(f"{type(self).__name__} has no value")

    def elements(self, x: Array) -> Iterator[Array]:
        """The iterator of ``for v in x``, where this is the buffer of ``x``, which has at least one dimension."""
        return (x[i] for i in range(self.shape[0]))


class Symbol:
    """Placeholder of a Python number that a program gets at each call."""

    __slots__ = ()

    def operand(self, op: Op, args: tuple[Any, ...]) -> Any:
        """The operand that replaces it among these arguments of a call: an Array, or the number."""
        raise TypeError(f"{type(self).__name__} cannot take part in {op.name}")

    def _read(self) -> Any:
        """The number itself."""
        raise TypeError(f"{type(self).__name__} has no value")


def number(value: Any) -> Any:
    """The number of a `Symbol`, for NumPy, which would silently cast a symbol as an array; other values as they are."""
    return value._read() if isinstance(value, Symbol) else value


_new = Array.__new__
_asarray: Callable[..., Array]
_backend_of: Callable[[Any], Any]


def register_asarray(fn: Callable[..., Array]) -> None:
    """Called once by the module of ``asarray``, which itself needs :func:`wrap`."""
    global _asarray
    _asarray = fn


_gpu: Any = None
_gpu_array: Any = None


def register_gpu(backend: Any, array: type) -> None:
    """Called when the first GPU is used, with the backend of all of them and the type of its buffers."""
    global _gpu, _gpu_array
    _gpu, _gpu_array, device_of_buffer[array] = backend, array, backend.device_of


def register_backends(fn: Callable[[Any], Any]) -> None:
    """Called once by the module of backends, with the function that gives that of a buffer."""
    global _backend_of
    _backend_of = fn


def wrap(buf: Any) -> Array:
    """An ``Array`` around a buffer, without copy or check."""
    x = _new(Array)
    x._buf = buf
    x._id = 0
    return x


def made(x: Array, of: Any = None) -> Array:
    """``x``, after telling the recorders that it was made here, from a NumPy array or from nothing."""
    for r in state.recorders:
        if hasattr(r, "note_made"):
            r.note_made(x, of)
    return x


def as_array(x: Any) -> Array:
    """``asarray(x)`` for the functions of this package: an Array is handed on without the call, and without an import
    of its module."""
    if type(x) is Array:
        return x
    return _asarray(x)


def apply(op: Op, args: tuple[Any, ...], params: Mapping[str, Any] = NO_PARAMS) -> Any:
    """Call ``op``: an ``Array``, or a tuple of them where the op has several results.

    ``args`` are Arrays, Python scalars or whatever :func:`coerce` accepts; ``params`` must not be changed afterwards.
    """
    bufs = []
    scalars = False
    buf = None
    for a in args:
        if type(a) is Array:
            buf = a._buf
            if type(buf) is not ndarray:
                return apply_general(op, args, params)
            bufs.append(buf)
        elif type(a) in SCALARS:
            bufs.append(a)
            scalars = True
        else:
            return apply_general(op, args, params)
    if scalars and (
        buf is None or buf.dtype.num >= FIRST_USER_DTYPE or (len(bufs) > 2 and _scalar_dtype(args) is not None)
    ):
        return apply_general(op, args, params)
    return invoke(op, args, bufs, params)


def invoke(op: Op, args: tuple[Any, ...], bufs: Sequence[Any], params: Mapping[str, Any] = NO_PARAMS) -> Any:
    """:func:`apply` to Arrays in NumPy's memory and Python scalars that need no preparation; ``bufs`` are the buffers
    and the scalars. (In C where :data:`compiled` is there.)"""
    fn = op.numpy
    if bufs and type(bufs[0]) is ndarray:
        fn = numpy_form(fn, bufs[0].dtype)
    try:
        out = fn(*bufs, **params) if params else fn(*bufs)
    except (ValueError, TypeError, OverflowError, MemoryError) as e:
        _explain(op, args, params, e)
        raise
    if type(out) is ndarray and op.nout == 1:
        result = _new(Array)
        result._buf = out
        result._id = 0
    else:
        result = _results(op, out)
    for r in state.recorders:
        r.record(op, args, bufs, (result,) if op.nout == 1 else result, params)
    return result


def _results(op: Op, out: Any) -> Any:
    """The results of a call that gave more, or something else, than one array of NumPy."""
    if op.nout > 1:
        return tuple([wrap(np.asarray(o)) for o in out])
    return wrap(out if isinstance(out, Deferred) else np.asarray(out))


def _on_one_gpu(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Sequence[Any], Sequence[Any]] | None:
    """The arguments of a call on arrays of one GPU that needs no more preparation than one on NumPy's (as in
    :func:`apply`), with their buffers and scalars as recorders and as kernels get them."""
    bufs, scalars, buf = [], False, None
    for a in args:
        if type(a) is Array:
            before, buf = buf, a._buf
            if type(buf) is not _gpu_array:
                return None
            if before is not None and before is not buf and before.device.id != buf.device.id:
                return None
            bufs.append(buf)
        elif type(a) in SCALARS:
            if type(a) is int and not -(2**63) <= a < 2**64:  # CuPy takes none
                return None
            bufs.append(a)
            scalars = True
        else:
            return None
    if scalars and (buf is None or buf.dtype.num >= FIRST_USER_DTYPE or len(bufs) > 2):
        dtype = _scalar_dtype(args)
        if dtype is None:
            return None if buf is None or buf.dtype.num >= FIRST_USER_DTYPE else (args, bufs, bufs)
        # A number of this dtype among the arguments of a kernel: an array would be one more launch, to fill it.
        strong = [np.asarray(as_floats(b), dtype)[()] if type(b) in _REAL_SCALARS else b for b in bufs]
        told = [float(s) if type(b) in _REAL_SCALARS else b for s, b in zip(strong, bufs, strict=True)]
        args = tuple([t if type(a) in _REAL_SCALARS else a for t, a in zip(told, args, strict=True)])
        return args, told, strong
    return args, bufs, bufs


def _computed(backend: Any, op: Op, args: tuple[Any, ...], bufs: Sequence[Any], params: Mapping[str, Any]) -> Any:
    """The buffers of the results of a call on local values."""
    try:
        return backend.run(op, bufs, params)
    except (ValueError, TypeError, OverflowError, MemoryError) as e:
        _explain(op, args, params, e)
        raise


def _finished(
    op: Op, args: tuple[Any, ...], bufs: Sequence[Any], outs: Sequence[Any], params: Mapping[str, Any]
) -> Any:
    """The results of a call, once the recorders have seen it."""
    result = wrap(outs[0]) if op.nout == 1 else tuple([wrap(o) for o in outs])
    if state.recorders:
        record(op, args, bufs, result, params)
    return result


def apply_general(op: Op, args: tuple[Any, ...], params: Mapping[str, Any] = NO_PARAMS) -> Any:
    """:func:`apply` to what is not all in NumPy's memory."""
    if _gpu is not None and (found := _on_one_gpu(args)):
        args, bufs, given = found
        return _finished(op, args, bufs, _computed(_gpu, op, args, given, params), params)
    args = _coerced(op, args)
    if not any(type(a) is Array for a in args):
        return apply(op, tuple([as_array(a) for a in args]), params)
    args = _strong_scalars(args)
    bufs = tuple([a._buf if type(a) is Array else a for a in args])
    deferred = [b for b in bufs if isinstance(b, Deferred)]
    if deferred:
        taker = max(deferred, key=lambda b: b.priority)
        if taker.passing:
            pairs = zip(args, bufs, strict=True)
            return apply(op, tuple([b.value() if getattr(b, "passing", False) else a for a, b in pairs]), params)
        args = taker.admit(op, args)
        outs = taker.emit(op, args, params)
        # A taker that computes leaves the value in its operand.
        bufs = tuple([a._buf if type(a) is Array else a for a in args])
    else:
        check_devices(op, args)
        first = next((b for a, b in zip(args, bufs, strict=True) if type(a) is Array), None)
        outs = _computed(_backend_of(first), op, args, bufs, params)
    return _finished(op, args, bufs, outs, params)


def at_once(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation of the op ``name`` that is a function of Arrays; of short floats the op itself in float32."""

    def impl(xp: Any, *bufs: Any, **params: Any) -> Any:
        dtypes = [b.dtype for b in bufs if hasattr(b, "dtype")]
        if all(map(is_low_precision, dtypes)):
            wide = [b.astype(np.float32, order="C") if hasattr(b, "dtype") else b for b in bufs]
            return OPS[name].bind(xp)(*wide, **params).astype(np.result_type(*dtypes))
        with not_recording(), np.errstate(all="ignore"):  # inf - inf and 0 / 0 are answers here
            # (NumPy gives numbers in place of arrays without dimensions.)
            return fn(*(wrap(xp.asarray(b)) if hasattr(b, "dtype") else b for b in bufs), **params)._buf

    return impl


def check_devices(op: Op, args: tuple[Any, ...]) -> None:
    """Raise where the arrays of a call are not all on one device."""
    devices = {a.device for a in args if type(a) is Array}
    if len(devices) > 1:
        raise DeviceError(
            f"[{op.name}] the arrays are on different devices: {', '.join(sorted(map(str, devices)))}; "
            f"move them to one with x.to_device(...)"
        )


def _scalar_dtype(args: tuple[Any, ...]) -> np.dtype | None:
    """The dtype that real Python scalars among the arguments take, where that is one of ml_dtypes.

    NumPy's rule that a Python scalar never widens an array does not reach dtypes that others register: ``bfloat16 *
    2.0`` would be float32, and ``where(c, bfloat16, 0.0)`` float64.
    """
    for a in args:
        if type(a) is Array and a._buf.dtype.num >= FIRST_USER_DTYPE:
            break
    else:
        return None
    floats = {b.dtype for b in args if type(b) is Array and b.dtype.kind not in "biu"}
    return None if len(floats) > 1 or not any(type(b) in _REAL_SCALARS for b in args) else a._buf.dtype


def _strong_scalars(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, those scalars as arrays."""
    dtype = _scalar_dtype(args)
    if dtype is None:
        return args
    device = next(a.device for a in args if type(a) is Array and a._buf.dtype == dtype)
    where = device if isinstance(device, Device) else None
    return tuple(
        _asarray(np.asarray(as_floats(b), dtype), device=where) if type(b) in _REAL_SCALARS else b for b in args
    )


def _explain(op: Op, args: tuple[Any, ...], params: Mapping[str, Any], error: Exception) -> None:
    """Raise the error of the op's own shape rule for arguments that a backend refused, so that backends agree.

    An error that depends on values keeps its text, with op and arguments added, as the rule cannot know it.
    """
    if isinstance(error, MeshtapeError) and not isinstance(error, MemoryError):
        return
    if isinstance(error, MemoryError) or "array is too big" in str(error):
        raise OutOfMemory(f"[{op.name}] {error} (of {', '.join(map(str, argument_avals(args)))})") from None
    avals = argument_avals(args)
    try:
        op.avals(avals, params)
    except MeshtapeError as ours:
        raise ours from None
    except (ValueError, TypeError, OverflowError):
        pass  # the rule asks the backend for the dtype, which answers with the same error
    if isinstance(error, np.exceptions.DTypePromotionError):
        names = " and ".join(dict.fromkeys(a.dtype.name for a in avals if hasattr(a, "dtype")))
        raise DTypeError(f"[{op.name}] {names} give no dtype together: cast one of them with astype") from None
    text = f"[{op.name}] {error} (of {', '.join(map(str, avals))})"
    if (kind := type_of_ours(error)) is not None:
        raise kind(text) from None


def _coerced(op: Op, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands, NumPy's scalars beside the arrays that they meet."""
    for a in args:
        if isinstance(a, Symbol):
            args = tuple(a.operand(op, args) if isinstance(a, Symbol) else a for a in args)
            break
    where = next((getattr(a, "_buf", a) for a in args if type(a) is Array or type(a) in device_of_buffer), None)
    where = where.memory if isinstance(where, Deferred) else where
    if where is None:
        return tuple(coerce(op, a) for a in args)
    device = _backend_of(where).device_of(where)
    if type(where) is not ndarray and any(type(a) is Array and a._buf.dtype.kind not in "biu" for a in args):
        args = tuple(map(as_floats, args))
    return tuple(coerce(op, a, device) for a in args)


def coerce(op: Op, a: Any, device: Any = None) -> Any:
    """An operand as an ``Array`` (on this device, or the default one) or a Python scalar; a list is an array, and one
    of CuPy stays where it is. Raises :class:`DTypeError` for anything else."""
    t = type(a)
    if t is Array or t in SCALARS:
        return a
    if isinstance(a, np.ndarray | np.generic | list | tuple) or is_cuda_elsewhere(a):
        return _asarray(a) if t in device_of_buffer else _asarray(a, device=device)
    for base in (int, float, complex):  # subclasses, such as the members of an IntEnum
        if isinstance(a, base):
            return base(a)
    raise NotNumbers(
        f"[{op.name}] cannot take {t.__module__}.{t.__qualname__}: pass an Array (mt.asarray makes one) or a Python "
        "number"
    )


def is_watched(x: Array) -> bool:
    """Whether a tape of this thread would record a call on ``x``."""
    return any(r.watches(x) for r in state.recorders)


def has_history(x: Any) -> bool:
    """Whether reading the numbers of ``x`` would lose its history: a recorder watches it, or it is traced.

    While a function is traced that holds for every array: one of the closure is a value of the program too.
    """
    if type(x) is not Array:
        return False
    if isinstance(x._buf, Deferred) and x._buf.traced:
        return True
    return any(r.watches(x) or getattr(r, "lifts", False) for r in state.recorders)


def refuse_watched(what: str, x: Array, instead: str = "pass mt.stop_gradient(x) if it is to be a constant") -> None:
    """Raise where a tape watches ``x`` and ``what`` would cut its gradient off in silence."""
    if is_watched(x):
        raise GradientError(
            f"[{what}] a tape watches this array (shape {tuple(x.shape)}), and what comes out would have no gradient: "
            f"{instead}"
        )


def refuse_history(what: str, x: Array, instead: str = "use a function of meshtape") -> None:
    """:func:`refuse_watched`, of traced arrays too."""
    if has_history(x):
        refuse_watched(what, x, f"{instead}, or pass mt.stop_gradient(x) if it is to be a constant")
        text = (
            f"[{what}] takes values, and this array (shape {tuple(x.shape)}) only stands for one while the function is "
            f"traced: {instead}, or call it outside of the function"
        )
        for r in state.recorders:
            if hasattr(r, "refuse"):
                r.refuse(text)
        raise TracedValueError(text)


def as_number(name: str, what: str, value: Any) -> float:
    """A parameter that is one number. Raises where it is an array whose history would be lost: the op has no derivative
    by it."""
    if type(value) is Array:
        refuse_history(name, value, f"{what} is a number without a derivative")
    return float(value)


def call_site(depth: int = 2) -> Site | None:
    """The innermost line outside this package, which an error of the backward pass names.

    ``depth`` is the number of frames, this one included, that are known to be ours: each frame that is looked at has to
    be made first. A derivative, or a call that is made again, has the line of the call that it stands for.
    """
    if state.site is not None:
        return state.site
    f: Any = sys._getframe(depth)
    while f is not None:
        file = f.f_code.co_filename
        if file in _THEIRS:
            return f.f_code, f.f_lasti
        if file not in _OURS:
            ours = f.f_globals.get("__name__", "").startswith("meshtape.")
            if not file.startswith("<"):  # what is made of text is of many modules
                (_OURS if ours else _THEIRS).add(file)
            if not ours:
                return f.f_code, f.f_lasti
        f = f.f_back
    return None


_OURS: set[str] = set()
_THEIRS: set[str] = set()
"""Files that are of this package, and others: most calls come straight from one of these."""


def record(op: Op, args: tuple[Any, ...], bufs: Sequence[Any], result: Any, params: Mapping[str, Any]) -> None:
    """Show a call to the recorders. ``bufs`` are the buffers of the arguments at the call."""
    outs = (result,) if op.nout == 1 else result
    for r in state.recorders:
        r.record(op, args, bufs, outs, params)


def check_unwritten(op: Op, args: tuple[Any, ...], bufs: Sequence[Any]) -> None:
    """Raise where an operand has another value than the one at the call."""
    for a, b in zip(args, bufs, strict=False):
        if type(a) is Array and a._buf is not b:
            raise written_to(op)


def written_to(op: Op) -> ConcurrentWriteError:
    """The error of a call whose operand has another value by the time that it is recorded."""
    return ConcurrentWriteError(
        f"[{op.name}] another thread wrote to an operand in place while a tape recorded the call: let one thread write "
        "while no other reads (with a lock), or give each a copy of its own"
    )


def program_inputs(args: tuple[Any, ...], var_of: Any) -> tuple[int | Const, ...]:
    """Inputs of an entry: ``var_of(array)`` for arrays, :class:`Const` for Python scalars."""
    return tuple(var_of(a) if type(a) is Array else Const(a) for a in args)


def argument_avals(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a shape rule: a :class:`ShapeDtype` for each array, scalars as they are."""
    return tuple([aval((tuple(a._buf.shape), a._buf.dtype)) if type(a) is Array else a for a in args])


# A third of the time of the named tuple's own constructor.
aval = functools.partial(tuple.__new__, ShapeDtype)


def _explained(op: Op, args: tuple[Any, ...], params: Mapping[str, Any], error: Exception) -> None:
    """Raise the error of a call as :func:`invoke` does; for that in C."""
    try:
        raise error
    except Exception:
        _explain(op, args, params, error)
        raise


if compiled is not None:
    compiled.bind_calls(Array, Op, state, ids, NO_PARAMS, _explained, _results, _THEIRS, call_site, OF_SHORT)
    invoke = compiled.invoke
