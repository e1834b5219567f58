"""NumPy's functions on ``Array``s: ``np.sin(x)``, ``np.add.reduce(x)``, ``np.linalg.norm(x)`` call ours, which tapes
and meshes know.

NEP 13 (``__array_ufunc__``) and NEP 18 (``__array_function__``) hand every call of a ufunc or a public function of
NumPy with an Array among its arguments to that Array. The function of the same name in this package takes it, with
NumPy's arguments translated. A function that this package lacks goes through NumPy where the values are plain and here;
where a tape watches them, they are traced or split over a mesh, its result would have no history, and the call is
refused by name.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..core.array import Array
from ..core.dispatch import SCALARS, Deferred, NotNumbers, Symbol, as_array, has_history, refuse_history, wrap
from ..core.dtypes import FIRST_USER_DTYPE
from ..core.errors import DeviceError, DTypeError, NumPyFunctionError, ShapeError
from ..core.op import OPS, beside_arguments, device_of_buffer
from ..indexing.indexing import is_view
from ..ops.creation import asarray, beside
from ..ops.manipulation import astype, reshape
from .protocols import _namespace
from .values import _replace

# NumPy's names of parameters that ours call otherwise.
_RENAMED = {"a_min": "min", "a_max": "max", "N": "n"}
# Parameters that choose a way of computing, or a layout of memory that no value shows.
_WITHOUT_EFFECT = {"subok", "overwrite_input", "kind", "optimize", "assume_unique", "copy"}
# (An ``order`` of theirs is such a layout.)
_MAKERS = ("copy", "_like", "zeros", "ones", "full", "empty", "eye", "array")

# They write into an argument.
_WRITERS = {"copyto", "fill_diagonal", "place", "put", "put_along_axis", "putmask"}
# They show or store an array, or read no value of it: nothing is computed from the result, so that its history does not
# matter.
_SHOWING = {"array2string", "array_repr", "array_str", "save", "savetxt", "savez", "savez_compressed"}
_SHOWING |= {"common_type", "min_scalar_type", "may_share_memory", "shares_memory"}

_REDUCTIONS = {"add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min"}
_REDUCTIONS |= {"logical_and": "all", "logical_or": "any"}
_ACCUMULATIONS = {"add": "cumulative_sum", "multiply": "cumulative_prod"}
_UPDATES = {n: n for n in ("add", "subtract", "multiply", "divide", "power")} | {"maximum": "max", "minimum": "min"}
_NUMPYS = (np.ndarray, np.memmap)  # other subclasses mean something else by the same memory: masks, matrices, units
# Of scipy.special, whose functions are ufuncs too.
_SPECIAL = {"erf": "erf", "expit": "nn.sigmoid", "log_expit": "nn.log_sigmoid"}


@functools.cache
def ufuncs() -> dict[np.ufunc, Callable[..., Any]]:
    """Our function for each ufunc of NumPy that has one."""
    ours = _namespace()
    theirs = {name: getattr(np, name) for name in dir(np) if hasattr(ours, name)}
    return {ufunc: getattr(ours, name) for name, ufunc in theirs.items() if isinstance(ufunc, np.ufunc)}


@functools.cache
def functions() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Our function for each of NumPy's (``numpy``, ``numpy.linalg``, ``numpy.fft``) that has one."""
    ours = _namespace()
    found: dict[Callable[..., Any], Callable[..., Any]] = {}
    for theirs, own in ((np.fft, ours.fft), (np.linalg, ours.linalg), (np, ours)):
        for name, fn in vars(theirs).items():
            known = not name.startswith("_") and name not in _WRITERS and hasattr(own, name)
            # Only what hands its call over: the others are NumPy's own makers of arrays.
            if known and hasattr(fn, "_implementation"):
                found[fn] = getattr(own, name)
    return found | {np.linalg.svd: _svd, np.broadcast_arrays: _broadcast_arrays, sliding_window_view: _windows}


def _special(ufunc: np.ufunc) -> Callable[..., Any] | None:
    """Our function for a ufunc of ``scipy.special``."""
    scipy = sys.modules.get("scipy.special")
    path = _SPECIAL.get(ufunc.__name__)
    if path is None or getattr(scipy, ufunc.__name__, None) is not ufunc:
        return None
    return functools.reduce(getattr, path.split("."), _namespace())


# ----- ufuncs ---------------------------------------------------------------------------------------------------------


@beside_arguments
def array_ufunc(self: Array, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
    """``__array_ufunc__`` of ``Array``: a ufunc or one of its methods was called with an Array among the operands."""
    out = kwargs.pop("out", ())
    if not all(map(_is_ours, (*inputs, *out))):
        return NotImplemented
    name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
    if method == "outer" and ufunc.nin == 2 and ufunc.signature is None:
        x, y = map(as_array, inputs)
        inputs, method = (reshape(x, x.shape + (1,) * y.ndim), y), "__call__"
    mask = kwargs.pop("where", True) if method == "__call__" else True
    if mask is not True:
        mask = as_array(mask)
        if not out:
            raise NumPyFunctionError(
                f"[{name}] where= without out= leaves elements undefined: write mt.where(mask, result, otherwise)"
            )
        if mask.dtype.kind != "b":
            raise DTypeError(f"[{name}] where= must be boolean, got {mask.dtype.name}: compare, x != 0")
        inputs = tuple(_chosen(ufunc, mask, x) for x in inputs)
    fn = ufuncs().get(ufunc) or _special(ufunc)
    compute = _METHODS.get(method) if fn is not None else None
    result = NotImplemented if compute is None else _of_numbers(compute, name, ufunc, fn, inputs, dict(kwargs))
    if result is NotImplemented:
        result = _through_numpy(name, getattr(ufunc, method), inputs, kwargs)
    return _written(name, result, out, mask) if out else result


def _chosen(ufunc: np.ufunc, mask: Array, x: Any) -> Any:
    """An operand with a harmless number where the mask is false: no warning and no gradient comes from there."""
    if type(x) in SCALARS:
        return x
    x = as_array(x)
    harmless = {"b": True, "i": 1, "u": 1}.get(x.dtype.kind, 2.0 if ufunc is np.arccosh else 0.5)
    return _namespace().where(mask, x, harmless)


def _of_numbers(compute: Callable[..., Any], *args: Any) -> Any:
    """The result of our function; NotImplemented where an argument holds no numbers, but None or texts."""
    try:
        return compute(*args)
    except NotNumbers:
        return NotImplemented


def _called(name: str, ufunc: np.ufunc, fn: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtype = kwargs.pop("dtype", None)
    axis = {k: kwargs.pop(k) for k in ("axis",) if k in kwargs and k in _parameters(fn)}
    _refuse_arguments(name, kwargs, {"casting": "same_kind", "order": "K", "subok": True})
    if dtype is not None or (op := OPS.get(fn.__name__)) is None or op.numpy is not ufunc:
        inputs = _for_result(name, ufunc, inputs, dtype)
    return fn(*map(_operand, inputs), **axis)


def _for_result(name: str, ufunc: np.ufunc, inputs: tuple[Any, ...], dtype: Any) -> tuple[Any, ...]:
    """The operands in the dtypes in which NumPy computes (a result of ``dtype``); as they are where it has no loop."""
    ours = _namespace()
    if any(isinstance(x, Symbol) for x in inputs):
        return inputs
    kinds = [type(x) if type(x) in (int, float, complex) else as_array(x).dtype for x in inputs]
    if dtype is None and (ufunc.signature or any(getattr(k, "num", 0) >= FIRST_USER_DTYPE for k in kinds)):
        return inputs
    dtype = None if dtype is None else np.dtype(dtype)
    signature = (None,) * ufunc.nin + (dtype,) * ufunc.nout
    try:
        loop = ufunc.resolve_dtypes((*kinds, *(None,) * ufunc.nout), signature=signature, casting="same_kind")
    except TypeError as e:
        raise DTypeError(f"[{name}] {'' if dtype is None else f'dtype={dtype.name}: '}{e}") from None
    return tuple(
        ours.asarray(x, dtype=d) if type(x) in SCALARS else astype(as_array(x), d, copy=False)
        for x, d in zip(inputs, loop, strict=False)
    )


def _along_axis(table: Mapping[str, str]) -> Callable[..., Any]:
    """``reduce`` or ``accumulate``, for the ufuncs of the table."""

    def compute(name: str, ufunc: np.ufunc, fn: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ours = table.get(ufunc.__name__)
        if ours is None:
            return NotImplemented
        given = {k: v for k, v in kwargs.items() if k == "axis" or (v is not None and (k != "where" or v is not True))}
        return _called_with(name, getattr(_namespace(), ours), inputs, {"axis": 0, **given})

    return compute


def _updated(name: str, ufunc: np.ufunc, fn: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, key, *values = inputs
    if not isinstance(x, Array):
        return NotImplemented  # the target is NumPy's
    _refuse_part(name, x)
    update = _UPDATES.get(ufunc.__name__)
    if update is not None:
        new = getattr(x.at[key], update)(_operand(values[0]))
    elif not values:  # of one operand, for which repeated indices are as good as one
        new = x.at[key].set(fn(x[key]))
    else:
        new = _through_numpy(name, _copied_at(ufunc), inputs, kwargs)
    _replace(name, x, new)
    return None


def _copied_at(ufunc: np.ufunc) -> Callable[..., np.ndarray]:
    def at(x: np.ndarray, *args: Any) -> np.ndarray:
        x = x.copy()
        ufunc.at(x, *args)
        return x

    return at


_METHODS = {
    "__call__": _called,
    "reduce": _along_axis(_REDUCTIONS),
    "accumulate": _along_axis(_ACCUMULATIONS),
    "at": _updated,
}


# ----- functions ------------------------------------------------------------------------------------------------------


@beside_arguments
def array_function(self: Array, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """``__array_function__`` of ``Array``: a public function of NumPy was called with an Array in its arguments."""
    if not all(t is Array or t in _NUMPYS or t in device_of_buffer for t in types):
        return NotImplemented
    name = _name(func)
    if func.__name__ in _WRITERS and func.__module__ == "numpy" and args and isinstance(args[0], Array):
        raise NumPyFunctionError(f"[{name}] arrays are values: write x[i] = v or x.at[i].set(v)")
    ours, result = functions().get(func), NotImplemented
    out = kwargs.get("out")
    if ours is not None:
        positional, keywords = _translated(name, func, ours, args, kwargs)
        out = keywords.pop("out", None)
        result = _of_numbers(_called_with, name, ours, positional, keywords)
    if result is NotImplemented:
        if func is np.where and len(args) == 3 and next(_arrays(args[1:]), None) is None:
            args = (_as_numpy(args[0]), *args[1:])  # texts or dates, which stay NumPy's wherever the condition lies
        showing, kwargs = func.__name__ in _SHOWING, {k: v for k, v in kwargs.items() if k != "out"}
        result = _through_numpy(name, func, args, kwargs, showing)
    return result if out is None else _written(name, result, out)


_signature = functools.cache(inspect.signature)  # NumPy writes many of its own as text, which is parsed


@functools.cache
def _parameters(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Parameters of a function; empty where it does not say."""
    try:
        return _signature(fn).parameters
    except (ValueError, TypeError):  # some of NumPy's before 2.4
        return {}


class _Argument(NamedTuple):
    """The source of an argument of a call (its position or keyword), and how it is passed on."""

    source: Any  # several, for the starred ones
    kind: Any  # of NumPy's parameter
    required: bool
    default: Any
    keyword: str  # by which ours is told; none where it takes it by its place, if at all
    unknown: bool  # to ours by its keyword


@functools.cache
def _arguments(func: Any, ours: Any, count: int, names: tuple[str, ...]) -> tuple[_Argument, ...] | str | None:
    """The plan of a call with ``count`` positional arguments and these keywords, cached as binding is slow.

    A text says why NumPy would refuse the call; None where NumPy does not tell its parameters."""
    theirs, own = _parameters(func), _parameters(ours)
    if not theirs:
        return None
    try:
        bound = _signature(func).bind(*range(count), **{n: n for n in names}).arguments
    except TypeError as e:  # of a method, which NumPy has not seen
        return str(e)
    found = []
    for key, p in theirs.items():
        if key in bound:
            own_key = _RENAMED.get(key, key)
            known = own_key == "out" or (own_key in own and own[own_key].kind is not p.POSITIONAL_ONLY)
            ignored = key in _WITHOUT_EFFECT or (key == "order" and func.__name__.endswith(_MAKERS))
            required = p.default is p.empty or p.kind is p.POSITIONAL_ONLY
            name = own_key if known else "" if ignored else key  # an unknown one is refused where it is passed on
            found.append(_Argument(bound[key], p.kind, required, p.default, name, not known))
    return tuple(found)


@functools.cache
def _places(fn: Any) -> int:
    """The number of positional-only parameters of a function."""
    return sum(p.kind is p.POSITIONAL_ONLY for p in _parameters(fn).values())


def _translated(
    name: str, func: Any, ours: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of NumPy's function for ours: required ones in NumPy's order, others by our names, without defaults."""
    found = _arguments(func, ours, len(args), tuple(kwargs))
    if found is None:
        return list(args), dict(kwargs)
    if type(found) is str:
        raise NumPyFunctionError(f"[{name}] {found}")
    left = _places(ours)
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for source, kind, required, default, keyword, unknown in found:
        if kind is inspect.Parameter.VAR_POSITIONAL:
            positional += [args[i] for i in source]
            left = 0
            continue
        if kind is inspect.Parameter.VAR_KEYWORD:
            keywords |= {k: kwargs[k] for k in source}
            continue
        value = args[source] if type(source) is int else kwargs[source]
        if required:
            positional.append(value)
            left -= 1
        elif _is_default(value, default):
            continue
        elif unknown and left > 0:
            positional.append(value)
            left -= 1
        elif keyword:
            keywords[keyword] = value
    return positional, keywords


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (
        isinstance(default, bool | int | float | str) and type(value) is type(default) and value == default
    )


def _called_with(name: str, fn: Callable[..., Any], args: Any, keywords: dict[str, Any]) -> Any:
    """Our function, unless it lacks one of the arguments, which is then named."""
    if keywords and (own := _keywords(fn)) is not None and not keywords.keys() <= own:
        _refuse_arguments(name, {k: v for k, v in keywords.items() if k not in own}, {})
    return fn(*map(_operand, args), **keywords)


@functools.cache
def _keywords(fn: Callable[..., Any]) -> frozenset[str] | None:
    """The parameters of a function; None where it takes any."""
    own = _parameters(fn)
    return None if any(p.kind is p.VAR_KEYWORD for p in own.values()) else frozenset(own)


@functools.cache
def _name(func: Any) -> str:
    return f"{func.__module__}.{func.__name__}"


_INSTEAD = {("svd", "compute_uv"): "mt.linalg.svdvals(x) gives the singular values alone"}
"""The function that does what an argument asks for, by (function, argument)."""


def _refuse_arguments(name: str, given: Mapping[str, Any], harmless: Mapping[str, Any]) -> None:
    wrong = [k for k, v in given.items() if k not in harmless or not _is_default(v, harmless[k])]
    if wrong:
        other = "leave it out, or compute with np.asarray(x), whose result is a NumPy array and has no gradient"
        raise NumPyFunctionError(
            f"[{name}] of meshtape arrays takes no {wrong[0]}=: {_INSTEAD.get((name, wrong[0]), other)}"
        )


def _broadcast_arrays(*arrays: Any) -> Any:
    # (None stays None: matplotlib passes on arguments that it was not given.)
    given = iter(_namespace().broadcast_arrays(*(as_array(a) for a in arrays if a is not None)))
    xs = [None if a is None else next(given) for a in arrays]
    shape = next((x.shape for x in xs if x is not None), ())
    return tuple(np.broadcast_to(np.array(None), shape) if x is None else x for x in xs)


def _svd(x: Any, full_matrices: bool = True, compute_uv: bool = True) -> Any:
    linalg = _namespace().linalg
    return linalg.svd(x, full_matrices=full_matrices) if compute_uv else linalg.svdvals(x)


def _windows(x: Any, window_shape: Any, axis: Any = None, *, subok: bool = False, writeable: bool = False) -> Any:
    """``sliding_window_view`` where NumPy's view would have no history, or is not here: copies of the windows."""
    if writeable or not (isinstance(x._buf, Deferred) or has_history(x)):
        return NotImplemented
    template = np.broadcast_to(np.empty((), x.dtype), x.shape)
    ndim, shape = x.ndim, sliding_window_view(template, window_shape, axis).shape  # NumPy checks the arguments
    axes = range(ndim) if axis is None else np.atleast_1d(axis) % ndim
    for a, length in zip(axes, shape[ndim:], strict=True):
        count = x.shape[a] - length + 1  # slices, for which the ranks of a mesh exchange the edges of blocks alone
        parts = [x[(slice(None),) * a + (slice(i, i + count),)] for i in range(length)]
        x = _namespace().stack(parts, axis=-1)
    return x


# ----- both -----------------------------------------------------------------------------------------------------------


def _is_ours(x: Any) -> bool:
    """Whether an operand does not belong to another library with a protocol of its own."""
    if type(x) is Array or type(x) in _NUMPYS or type(x) in device_of_buffer:  # CuPy's become Arrays
        return True
    return getattr(type(x), "__array_ufunc__", None) is None and not isinstance(x, np.ndarray)


def _operand(x: Any) -> Any:
    """NumPy's arrays as ours; other operands as they are."""
    return as_array(x) if isinstance(x, np.ndarray) else x


def _written(name: str, result: Any, out: Any, mask: Any = True) -> Any:
    """``out`` (an array, or as many as there are results) with the values of the result where the mask is true."""
    results = result if isinstance(result, tuple) else (result,)
    out = out if isinstance(out, tuple) else (out,)
    if len(out) != len(results):
        raise NumPyFunctionError(f"[{name}] gives {len(results)} results, and out= has {len(out)} arrays")
    written = tuple(r if o is None else _into(name, r, o, mask) for r, o in zip(results, out, strict=True))
    return written if isinstance(result, tuple) else written[0]


def _into(name: str, result: Any, out: Any, mask: Any) -> Any:
    """An Array takes a result as ``+=`` does, with its history; NumPy's memory takes the numbers."""
    if not isinstance(out, Array | np.ndarray):
        raise NumPyFunctionError(f"[{name}] out= must be one array, got {type(out).__name__}")
    if out.shape != np.shape(result):
        raise ShapeError(f"[{name}] out= has the shape {out.shape}, the result {np.shape(result)}")
    if isinstance(out, Array):
        _refuse_part(name, out)
        result = as_array(result)
        if (to := beside(out)) != (at := beside(result)) and None not in (to, at):
            raise DeviceError(f"[{name}] out= is on {to}, the result on {at}: move one with x.to_device(...)")
        if not np.can_cast(result.dtype, out.dtype, "same_kind"):
            raise DTypeError(
                f"[{name}] out= is of {out.dtype.name}, the result of {result.dtype.name}: cast it with astype"
            )
        result = astype(result, out.dtype, copy=False)
        return _replace(name, out, result if mask is True else _namespace().where(mask, result, out))
    refuse_history(f"{name}(out=...)", result)
    np.copyto(out, np.asarray(result), casting="same_kind", where=np.asarray(mask))
    return out


def _base_holders(buf: Any) -> int:
    base = buf.base
    return sys.getrefcount(base)


_ALONE = _base_holders(np.zeros((2, 2))[0])


def _refuse_part(name: str, x: Array) -> None:
    """Raise where ``x`` is a view: NumPy would write into the viewed array too, but an Array silently does not."""
    buf = x._buf
    if is_view(buf) and (isinstance(buf, Deferred) or _base_holders(buf) > _ALONE):
        raise NumPyFunctionError(
            f"[{name}] writes into a part of another array, which would keep its value, as arrays are values: write "
            f"y[i] = {name}(...), or give it a copy, y[i].copy()"
        )


def _through_numpy(name: str, fn: Any, args: Any, kwargs: Any, showing: bool = False) -> Any:
    """NumPy's own function on the values, with its result as an Array. Refused where that would lose their history."""
    device = None
    for x in _arrays((*args, *kwargs.values())):
        if not showing:
            refuse_history(name, x)
            if isinstance(x._buf, Deferred):
                raise NumPyFunctionError(
                    f"[{name}] meshtape has no such function, and this array is split over {x.device}: np.asarray(x) "
                    "gathers it"
                )
            device = device or x.device
    out = fn(*map(_as_numpy, args), **{k: _as_numpy(v) for k, v in kwargs.items()})
    return out if showing or device is None else _as_ours(out, device)


def _arrays(obj: Any) -> Iterator[Array]:
    """Every Array in an argument."""
    if isinstance(obj, Array):
        yield obj
    elif isinstance(obj, list | tuple):
        for o in obj:
            yield from _arrays(o)


def _as_numpy(obj: Any) -> Any:
    """An argument of a function of NumPy with every Array in it as a (read-only) NumPy array."""
    if isinstance(obj, Array):
        return np.asarray(obj._concrete())
    if type(obj) in (list, tuple):
        return type(obj)(map(_as_numpy, obj))
    return obj


def _as_ours(out: Any, device: Any) -> Any:
    """A result of NumPy with every array of numbers in it as an Array on the device of the operands."""
    if isinstance(out, np.ndarray | np.generic) and out.dtype.kind in "biufc":
        return asarray(wrap(np.asarray(out)), device=device)
    if type(out) in (list, tuple):
        return type(out)(_as_ours(o, device) for o in out)
    return out


Array.__array_ufunc__ = array_ufunc
Array.__array_function__ = array_function
