"""NumPy's functions on ``Array``s: ``np.sin(x)``, ``np.add.reduce(x)``, ``np.linalg.norm(x)`` call ours, which tapes and meshes know.

NEP 13 (``__array_ufunc__``) and NEP 18 (``__array_function__``) hand every call of a ufunc or a public function of NumPy with an
Array among its arguments to that Array. The function of the same name in this package takes it, with NumPy's arguments translated. A
function that this package lacks goes through NumPy where the values are plain and here; where a tape watches them, they are traced or
split over a mesh, its result would have no history, and the call is refused by name.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ._array import Array, _replace
from ._dispatch import Deferred, as_array, refuse_history, wrap
from .errors import DTypeError, NumPyFunctionError
from .manipulation import astype, reshape

# NumPy's names of parameters that ours call otherwise.
_RENAMED = {"a_min": "min", "a_max": "max", "N": "n", "sections": "indices_or_sections"}
# Parameters that choose a way of computing, or a layout of memory that no value shows.
_WITHOUT_EFFECT = {"subok", "overwrite_input", "kind", "optimize", "assume_unique", "order", "copy"}
# … except where the order of elements or the sharing of memory is the very question.
_ORDERED = {"ravel", "reshape", "copyto", "astype", "ravel_multi_index", "unravel_index", "argsort", "sort"}

# They write into an argument.
_WRITERS = {"copyto", "fill_diagonal", "place", "put", "put_along_axis", "putmask"}
# They show or store an array, or read no value of it: nothing is computed from the result, so that its history does not matter.
_SHOWING = {
    "array2string",
    "array_repr",
    "array_str",
    "common_type",
    "min_scalar_type",
    "may_share_memory",
    "shares_memory",
}
_SHOWING |= {"save", "savetxt", "savez", "savez_compressed"}

_REDUCTIONS = {
    "add": "sum",
    "multiply": "prod",
    "maximum": "max",
    "minimum": "min",
    "logical_and": "all",
    "logical_or": "any",
}
_ACCUMULATIONS = {"add": "cumulative_sum", "multiply": "cumulative_prod"}
_UPDATES = {"add": "add", "multiply": "multiply", "maximum": "max", "minimum": "min"}
_NUMPYS = (np.ndarray, np.memmap)  # other subclasses mean something else by the same memory: masks, matrices, units
# Of scipy.special, whose functions are ufuncs too.
_SPECIAL = {"erf": "erf", "expit": "nn.sigmoid", "log_expit": "nn.log_sigmoid"}


def _namespace() -> Any:
    return sys.modules[__package__]


@functools.cache
def ufuncs() -> dict[np.ufunc, Callable[..., Any]]:
    """Our function for each ufunc of NumPy that has one."""
    ours = _namespace()
    found = {}
    for name in dir(np):
        ufunc = getattr(np, name)
        if isinstance(ufunc, np.ufunc) and hasattr(ours, name):
            found[ufunc] = getattr(ours, name)
    return found


@functools.cache
def functions() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Our function for each of NumPy's (``numpy``, ``numpy.linalg``, ``numpy.fft``) that has one."""
    ours = _namespace()
    found: dict[Callable[..., Any], Callable[..., Any]] = {}
    for theirs, own in ((np.fft, ours.fft), (np.linalg, ours.linalg), (np, ours)):
        for name, fn in vars(theirs).items():
            # Only what hands its call over: the others are NumPy's own makers of arrays.
            if not name.startswith("_") and hasattr(fn, "_implementation") and hasattr(own, name):
                found[fn] = getattr(own, name)
    return found | {getattr(np, n): fn for n, fn in _SPECIAL_CASES.items()} | {np.linalg.svd: _svd}


def _special(ufunc: np.ufunc) -> Callable[..., Any] | None:
    """Our function for a ufunc of ``scipy.special``."""
    scipy = sys.modules.get("scipy.special")
    path = _SPECIAL.get(ufunc.__name__)
    if path is None or getattr(scipy, ufunc.__name__, None) is not ufunc:
        return None
    return functools.reduce(getattr, path.split("."), _namespace())


# ----- ufuncs ----------------------------------------------------------------------------------------------------------


def array_ufunc(self: Array, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
    """``__array_ufunc__`` of ``Array``: a ufunc or one of its methods was called with an Array among the operands."""
    out = kwargs.pop("out", None)
    if not all(map(_is_ours, (*inputs, *(out or ())))):
        return NotImplemented
    name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
    where = kwargs.pop("where", True) if method in ("__call__", "outer") else True
    if where is not True and out is None:
        raise NumPyFunctionError(
            f"[{name}] where= without out= leaves elements undefined: write mt.where(mask, result, otherwise)"
        )
    fn = ufuncs().get(ufunc) or _special(ufunc)
    compute = _METHODS.get(method) if fn is not None else None
    result = NotImplemented if compute is None else compute(name, ufunc, fn, inputs, kwargs)
    if result is NotImplemented:
        result = _through_numpy(name, getattr(ufunc, method), inputs, kwargs)
    if out is None:
        return result
    results = result if isinstance(result, tuple) else (result,)
    written = tuple(
        r if o is None else _written(name, _chosen(where, r, o), o) for r, o in zip(results, out, strict=True)
    )
    return written if isinstance(result, tuple) else written[0]


def _chosen(where: Any, result: Any, out: Any) -> Any:
    """The result where a mask is true, and what was there before elsewhere."""
    return result if where is True else _namespace().where(as_array(where), result, as_array(out).astype(result.dtype))


def _called(name: str, ufunc: np.ufunc, fn: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtype = kwargs.pop("dtype", None)
    axis = {k: kwargs.pop(k) for k in ("axis",) if k in kwargs and k in _parameters(fn)}
    _refuse_arguments(name, kwargs, {"casting": "same_kind", "order": "K", "subok": True})
    if dtype is not None:
        inputs = tuple(_cast(name, x, np.dtype(dtype)) for x in inputs)
    return fn(*map(_operand, inputs), **axis)


def _along_axis(table: Mapping[str, str]) -> Callable[..., Any]:
    """``reduce`` or ``accumulate``, for the ufuncs of the table."""

    def compute(name: str, ufunc: np.ufunc, fn: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ours = table.get(ufunc.__name__)
        if ours is None:
            return NotImplemented
        given = {k: v for k, v in kwargs.items() if k == "axis" or (v is not None and (k, v) != ("where", True))}
        return _called_with(name, getattr(_namespace(), ours), inputs, {"axis": 0, **given})

    return compute


def _outer(name: str, ufunc: np.ufunc, fn: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if ufunc.nin != 2 or ufunc.signature is not None:
        return NotImplemented
    x, y = map(as_array, inputs)
    return _called(name, ufunc, fn, (reshape(x, x.shape + (1,) * y.ndim), y), kwargs)


def _updated(name: str, ufunc: np.ufunc, fn: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, key, *values = inputs
    if not isinstance(x, Array):
        return NotImplemented  # the target is NumPy's
    update = _UPDATES.get(ufunc.__name__)
    if update is not None:
        new = getattr(x.at[key], update)(_operand(values[0]))
    elif ufunc is np.subtract:
        new = x.at[key].add(-as_array(values[0]))
    elif not values:  # of one operand, for which repeated indices are as good as one
        new = x.at[key].set(fn(x[key]))
    else:
        raise NumPyFunctionError(
            f"[{name}] has no counterpart: write x.at[i].set(...) with the values that are to stand there"
        )
    _replace(name, x, new)
    return None


_METHODS = {
    "__call__": _called,
    "reduce": _along_axis(_REDUCTIONS),
    "accumulate": _along_axis(_ACCUMULATIONS),
    "outer": _outer,
    "at": _updated,
}


# ----- functions -------------------------------------------------------------------------------------------------------


def array_function(self: Array, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """``__array_function__`` of ``Array``: a public function of NumPy was called with an Array in its arguments."""
    if not all(t is Array or t in _NUMPYS for t in types):
        return NotImplemented
    name = f"{func.__module__}.{func.__name__}"
    if func.__name__ in _WRITERS and func.__module__ == "numpy" and args and isinstance(args[0], Array):
        raise NumPyFunctionError(f"[{name}] arrays are values: write x[i] = v or x.at[i].set(v)")
    ours = functions().get(func)
    if ours is None:
        return _through_numpy(name, func, args, kwargs, func.__name__ in _SHOWING)
    positional, keywords = _translated(name, func, ours, args, kwargs)
    out = keywords.pop("out", None)
    result = _called_with(name, ours, positional, keywords)
    return result if out is None else _written(name, result, out)


@functools.cache
def _parameters(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Parameters of a function; empty where it does not say."""
    try:
        return inspect.signature(fn).parameters
    except (ValueError, TypeError):  # some of NumPy's before 2.4
        return {}


def _translated(
    name: str, func: Any, ours: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of NumPy's function as ours takes them: what NumPy requires in its order, the rest by our names, defaults left out."""
    theirs, own = _parameters(func), _parameters(ours)
    if not theirs:
        return list(args), dict(kwargs)
    bound = inspect.signature(func).bind(*args, **kwargs).arguments
    places = iter([p for p in own.values() if p.kind is p.POSITIONAL_ONLY])
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for key, p in theirs.items():
        if key not in bound:
            continue
        value = bound[key]
        if p.kind is p.VAR_POSITIONAL:
            positional += value
        elif p.kind is p.VAR_KEYWORD:
            keywords |= value
        elif p.default is p.empty or p.kind is p.POSITIONAL_ONLY:
            positional.append(value)
            next(places, None)
        elif _is_default(value, p.default):
            continue
        elif (own_key := _RENAMED.get(key, key)) == "out" or (
            own_key in own and own[own_key].kind is not p.POSITIONAL_ONLY
        ):
            keywords[own_key] = value
        elif next(places, None) is not None:
            positional.append(value)
        elif key not in _WITHOUT_EFFECT or (
            func.__name__ in _ORDERED and key in ("order", "copy") and value not in ("K", "A")
        ):
            keywords[key] = value  # refused where it is passed on
    return positional, keywords


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (
        isinstance(default, bool | int | float | str) and type(value) is type(default) and value == default
    )


def _called_with(name: str, fn: Callable[..., Any], args: Any, keywords: dict[str, Any]) -> Any:
    """Our function, unless it lacks one of the arguments, which is then named."""
    own = _parameters(fn)
    if not any(p.kind is p.VAR_KEYWORD for p in own.values()):
        _refuse_arguments(name, {k: v for k, v in keywords.items() if k not in own}, {})
    return fn(*map(_operand, args), **keywords)


def _refuse_arguments(name: str, given: Mapping[str, Any], harmless: Mapping[str, Any]) -> None:
    wrong = [k for k, v in given.items() if k not in harmless or not _is_default(v, harmless[k])]
    if wrong:
        raise NumPyFunctionError(
            f"[{name}] of meshtape arrays takes no {wrong[0]}=: leave it out, or compute with np.asarray(x), whose result is a "
            f"NumPy array and has no gradient"
        )


def _where(condition: Any, *choices: Any) -> Any:
    ours = _namespace()
    return ours.where(as_array(condition), *choices) if choices else ours.nonzero(as_array(condition))


def _meshgrid(*arrays: Any, indexing: str = "xy") -> Any:
    return _namespace().meshgrid(*map(as_array, arrays), indexing=indexing)


def _svd(x: Any, full_matrices: bool = True, compute_uv: bool = True) -> Any:
    linalg = _namespace().linalg
    return linalg.svd(x, full_matrices=full_matrices) if compute_uv else linalg.svdvals(x)


_SPECIAL_CASES = {"where": _where, "meshgrid": _meshgrid}


# ----- both ------------------------------------------------------------------------------------------------------------


def _is_ours(x: Any) -> bool:
    """Whether an operand is not of another library that has a say of its own."""
    kind = type(x)
    return (
        kind is Array
        or kind in _NUMPYS
        or (getattr(kind, "__array_ufunc__", None) is None and not isinstance(x, np.ndarray))
    )


def _operand(x: Any) -> Any:
    """NumPy's arrays as ours; whatever else as it is."""
    return as_array(x) if isinstance(x, np.ndarray) else x


def _cast(name: str, x: Any, dtype: np.dtype) -> Array:
    x = as_array(x)
    if not np.can_cast(x.dtype, dtype, "same_kind"):
        raise DTypeError(
            f"[{name}] an operand of {x.dtype.name} cannot be computed with as {dtype.name}: cast it with astype"
        )
    return astype(x, dtype, copy=False)


def _written(name: str, result: Any, out: Any) -> Any:
    """``out`` with the value of the result: an Array takes it as ``+=`` does, with its history; NumPy's memory takes the numbers."""
    if isinstance(out, tuple) and len(out) == 1:
        out = out[0]
    if isinstance(out, Array):
        return _replace(name, out, result)
    if not isinstance(out, np.ndarray):
        raise NumPyFunctionError(f"[{name}] out= must be one array, got {type(out).__name__}")
    refuse_history(f"{name}(out=...)", result)
    if out.shape != result.shape:
        raise NumPyFunctionError(f"[{name}] out= has the shape {out.shape}, the result {result.shape}")
    np.copyto(out, np.asarray(result), casting="same_kind")
    return out


def _through_numpy(name: str, fn: Any, args: Any, kwargs: Any, showing: bool = False) -> Any:
    """NumPy's own function of the values; what it makes of them is an Array again. Refused where that would lose their history."""
    device = None
    for x in _arrays((*args, *kwargs.values())):
        if not showing:
            refuse_history(name, x)
            if isinstance(x._buf, Deferred):
                raise NumPyFunctionError(
                    f"[{name}] meshtape has no such function, and this array is split over {x.device}: np.asarray(x) gathers it"
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
        from .creation import asarray

        return asarray(wrap(np.asarray(out)), device=device)
    if type(out) in (list, tuple):
        return type(out)(_as_ours(o, device) for o in out)
    return out


Array.__array_ufunc__ = array_ufunc
Array.__array_function__ = array_function
