"""Programs as JSON documents, and back, without loss.

The document is plain JSON (no ``NaN`` literals, no Python names): variables with their types, entries with the *name*
of their op, and for the values of constants only names, under which the caller keeps the arrays (a program file:
safetensors). A parameter that has no JSON form of its own is written as an object of one key that says its kind::

    {"float": "nan"}  {"complex": [0.0, 1.0]}  {"tuple": [0, 1]}  {"dtype": "bfloat16"}
    {"span": [0, null, 2]}  {"dict": [["k", 1]]}

Lines of source code are not kept: they mean nothing in another process. Documents have a version. An older one is
brought up to date by the steps in ``MIGRATIONS``; a newer one is refused.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...arrays.core import dtypes
from ...arrays.core.dispatch import Deferred
from ...arrays.core.errors import ProgramError
from ...arrays.core.index_template import Gap, Slot, Span, Truth
from ...arrays.core.op import OPS, ShapeDtype
from ...arrays.core.program import Const, Entry, Program
from ..format.migrations import Step, upgraded
from .validate import check_call, short

FORMAT = "meshtape.program"
MIGRATIONS: list[Step] = []
VERSION = len(MIGRATIONS) + 1

_NAN = struct.pack(">d", math.nan).hex()


def encode(value: Any, where: str) -> Any:
    """A parameter as JSON. Raises :class:`ProgramError` that names ``where`` for a value without a JSON form."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        if math.isfinite(value):
            return value
        bits = struct.pack(">d", value).hex()
        return {"float": repr(value)} if bits == _NAN or not math.isnan(value) else {"nan": bits}
    if type(value) is complex:
        return {"complex": [encode(value.real, where), encode(value.imag, where)]}
    if isinstance(value, Span):
        return {"span": list(value)}
    if isinstance(value, Slot):
        return {"slot": value.n}
    if isinstance(value, Truth):
        return {"truth": value.value}
    if isinstance(value, Gap):
        return {"gap": True}
    if type(value) is tuple:
        return {"tuple": [encode(v, where) for v in value]}
    if type(value) is list:
        return [encode(v, where) for v in value]
    if isinstance(value, Mapping) and all(type(k) is str for k in value):
        return {"dict": [[k, encode(v, where)] for k, v in value.items()]}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, np.generic):
        return {"scalar": [value.dtype.name, value.tobytes().hex()]}
    raise ProgramError(f"{where}: a {type(value).__qualname__} ({value!r}) has no form in a program file")


_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError, struct.error)
"""Python's errors for a malformed document."""


def decode(value: Any, where: str) -> Any:
    """Inverse of :func:`encode`. Raises :class:`ProgramError` that names ``where`` for a malformed document."""
    try:
        if isinstance(value, list):
            return [decode(v, where) for v in value]
        if not isinstance(value, dict):
            return value
        if len(value) != 1:
            raise ProgramError(f"{where}: expected an object of one key, got {sorted(value)}")
        ((kind, v),) = value.items()
        if kind not in _KINDS:
            raise ProgramError(f"{where}: unknown kind of value {kind!r}")
        return _KINDS[kind](v, where)
    except ProgramError:
        raise
    except _MALFORMED as e:
        raise ProgramError(f"{where}: {short(value)} is no value of a program file: {e}") from None


def _typed(value: Any, what: str, *types: type) -> Any:
    if type(value) not in types:
        raise TypeError(f"{short(value)} is no {what}")
    return value


def _whole(value: Any) -> int:
    return _typed(value, "integer", int)


def _size(value: Any) -> int:
    if _whole(value) < 0:
        raise ValueError(f"{value} is no size of a dimension")
    return value


def _number(value: Any) -> bool | int | float | complex:
    return _typed(value, "number", bool, int, float, complex)


_KINDS: dict[str, Callable[[Any, str], Any]] = {
    "float": lambda v, where: float(_typed(v, "text", str)),
    "nan": lambda v, where: struct.unpack(">d", bytes.fromhex(v))[0],  # whose sign and payload are not the usual ones
    "complex": lambda v, where: complex(*(decode(v[i], where) for i in (0, 1))),
    "span": lambda v, where: Span(*[n if n is None else _whole(n) for n in v]),
    "slot": lambda v, where: Slot(_whole(v)),
    "truth": lambda v, where: Truth(_typed(v, "truth", bool)),
    "gap": lambda v, where: Gap(),
    "tuple": lambda v, where: tuple(decode(x, where) for x in v),
    "dict": lambda v, where: {k: decode(x, where) for k, x in v},
    "dtype": lambda v, where: dtypes.parse(v).dtype,
    "scalar": lambda v, where: np.frombuffer(bytes.fromhex(v[1]), dtypes.parse(v[0]).dtype)[0],
}
"""The value that an object of a program file stands for, by its one key."""


def to_json(program: Program) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The document of a program, and its constants by the names that the document gives them. Raises
    :class:`ProgramError` where a parameter or a constant belongs to one mesh or one process; names it.

    >>> import meshtape as mt
    >>> document, constants = to_json(mt.compile(lambda x: x * 2.0).program(mt.ones(3)))
    >>> document["entries"]
    [{'op': 'multiply', 'inputs': [0, {'const': 2.0}], 'outputs': [1]}]
    """
    entries = []
    for i, e in enumerate(program.entries):
        where = f"entry {i} ({e.op.name})"
        row: dict[str, Any] = {
            "op": e.op.name,
            "inputs": [v if isinstance(v, int) else {"const": encode(v.value, where)} for v in e.inputs],
            "outputs": list(e.outputs),
        }
        if e.params:
            row["params"] = {k: encode(v, f"{where}, parameter {k}") for k, v in e.params.items()}
        if e.origin is not None:
            row["origin"] = e.origin
        entries.append(row)
    stored: dict[str, np.ndarray] = {}
    names = {}
    for v, value in program.constants.items():
        if isinstance(value, Deferred):
            raise ProgramError(
                f"constant %{v} ({value.aval}) is split over a mesh: pass it as an argument, or gather it first"
            )
        host = value if isinstance(value, np.ndarray) else np.asarray(value.get())
        names[v] = f"constant.{v}"
        # The file format has no complex128: two numbers along a last dimension.
        wide = host.dtype == np.complex128
        stored[names[v]] = np.stack([host.real, host.imag], axis=-1) if wide else host
    document = {
        "format": FORMAT,
        "version": VERSION,
        "inputs": list(program.inputs),
        "outputs": list(program.outputs),
        "types": {str(v): [a.dtype.name, list(a.shape)] for v, a in program.avals.items()},
        "constants": {str(v): name for v, name in names.items()},
        "entries": entries,
    }
    return document, stored


def current(document: Any) -> dict[str, Any]:
    """The document brought up to this version. Raises ``UnsupportedVersion``, which names both, for one of a later
    version, and :class:`ProgramError` for anything that is no program document."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ProgramError(f"this is no program: its format is not {FORMAT!r}")
    return upgraded(document, MIGRATIONS, "the program", ProgramError)


def from_json(document: Any, constants: Mapping[str, np.ndarray]) -> Program:
    """Inverse of :func:`to_json`. The result is checked: ops exist, and each variable is defined before it is used.
    Raises the errors of :func:`current`, and :class:`ProgramError` that names a malformed entry and its fault."""
    document = current(document)
    try:
        avals = {
            int(v): ShapeDtype(tuple(map(_size, shape)), dtypes.parse(name).dtype)
            for v, (name, shape) in document["types"].items()
        }
        values = {int(v): _constant(constants, name, avals[int(v)]) for v, name in document["constants"].items()}
        inputs, outputs = tuple(map(_whole, document["inputs"])), tuple(map(_whole, document["outputs"]))
        rows = [
            (row["op"], row["inputs"], row["outputs"], row.get("params", {}), row.get("origin"))
            for row in document["entries"]
        ]
    except ProgramError:
        raise
    except _MALFORMED as e:
        raise ProgramError(f"the program is damaged: {type(e).__name__}: {e}") from e
    known = {*inputs, *values}
    if not avals.keys() >= {*inputs, *outputs}:
        raise ProgramError(f"the program does not say the types of {sorted({*inputs, *outputs} - avals.keys())}")
    entries = []
    for i, (name, args, outs, params, origin) in enumerate(rows):
        where = f"entry {i} ({name})"
        op = OPS.get(name) if isinstance(name, str) else None
        if op is None:
            raise ProgramError(
                f"{where}: unknown op {name!r}: it was written by another version of meshtape, or with an extension"
            )
        try:
            operands = tuple(a if type(a) is int else Const(_number(decode(a["const"], where))) for a in args)
            outs = tuple(map(_whole, outs))
            decoded = {k: decode(v, f"{where}, parameter {k}") for k, v in params.items()}
            if not (origin is None or isinstance(origin, str)):
                raise TypeError(f"{short(origin)} is no name of a function")
        except ProgramError:
            raise
        except _MALFORMED as e:
            raise ProgramError(f"{where} is damaged: {type(e).__name__}: {e}") from None
        lost = [f"%{a}" for a in operands if isinstance(a, int) and a not in known]
        lost += [f"%{v}" for v in outs if v not in avals]
        if lost:
            raise ProgramError(f"{where}: {', '.join(lost)} is not defined there")
        if not known.isdisjoint(outs) or len(set(outs)) != len(outs):
            raise ProgramError(f"{where} defines a variable that is defined already")
        known.update(outs)
        entry = Entry(op, operands, outs, decoded, origin)
        check_call(entry, avals, where)
        entries.append(entry)
    if not known.issuperset(outputs):
        raise ProgramError(f"the program returns variables that nothing defines: {sorted(set(outputs) - known)}")
    return Program(inputs, tuple(entries), outputs, avals, values)


def _constant(constants: Mapping[str, np.ndarray], name: str, aval: ShapeDtype) -> np.ndarray:
    if name not in constants:
        raise ProgramError(f"the values of {name} are missing")
    value = constants[name]
    if aval.dtype == np.complex128 and value.dtype == np.float64:
        parts = value
        value = np.empty(parts.shape[:-1], np.complex128)
        value.real, value.imag = parts[..., 0], parts[..., 1]
    if value.shape != aval.shape or value.dtype != aval.dtype:
        raise ProgramError(f"{name} has {value.dtype.name}{list(value.shape)}, the program says {aval}")
    return value
