"""Programs, and the entries that record computations.

Everything a user computes is a call of an :class:`~meshtape.arrays.Op`. One call is one :class:`Entry`; a linear list
of them is walked in reverse by the backward pass, and forward by the partitioner, and it is stored in a program file. A
:class:`Program` is the frozen form: plain data, no values but its constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from .index_template import key_text, slots
from .op import ShapeDtype

if TYPE_CHECKING:
    from types import CodeType

    from .op import Op


class Const(NamedTuple):
    """A Python scalar among the inputs of an entry. It keeps its weak type: ``x + 1`` never widens ``x``."""

    value: bool | int | float | complex

    def __str__(self) -> str:
        return repr(self.value)


Site = tuple["CodeType", int]
"""Where user code called an op: a code object and the offset of the instruction, turned into a line on demand."""


def site_text(site: Site | None) -> str:
    """``file.py:12, in name`` for messages.

    >>> site_text(None)
    'an unknown line'
    """
    if site is None:
        return "an unknown line"
    code, offset = site
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= offset < end and number is not None:
            line = number
    return f"{code.co_filename}:{line}, in {code.co_name}"


class Entry(NamedTuple):
    """One call of an op.

    ``inputs`` are variables (ints) or :class:`Const`; ``outputs`` are variables, each defined exactly once. ``params``
    are the static arguments. ``origin`` is the outermost public function that the call came from (``"layer_norm"``).
    """

    op: Op
    inputs: tuple[int | Const, ...]
    outputs: tuple[int, ...]
    params: Mapping[str, Any]
    origin: str | None = None
    site: Site | None = None

    def __str__(self) -> str:
        outs = ", ".join(f"%{v}" for v in self.outputs)
        args = [f"%{v}" if isinstance(v, int) else str(v) for v in self.inputs]
        params = {k: _param_text(v) for k, v in self.params.items()}
        if "template" in params:
            template = self.params["template"]
            arrays = args[len(args) - slots(template) :]
            key = f"[{key_text(template, arrays)}]"
            args = args[: len(args) - len(arrays)]
            if self.op.name == "getitem":
                return f"{outs} = {args[0]}{key}"
            params = {("at" if k == "template" else k): key if k == "template" else v for k, v in params.items()}
        args += [f"{k}={v}" for k, v in params.items()]
        return f"{outs} = {self.op.name}({', '.join(args)})"


def _param_text(value: Any) -> str:
    return value.name if isinstance(value, np.dtype) else str(value) if isinstance(value, str) else repr(value)


class FusedRun(NamedTuple):
    """A run of elementwise entries of one shape. ``inputs`` come from outside, ``outputs`` are used outside.

    Where it has ``members``, it is the same run on several sets of arrays, each of a shape of its own.
    """

    entries: tuple[Entry, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    shape: tuple[int, ...]
    members: tuple[FusedRun, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """A traced computation, ready to be read by an executor, the partitioner or a file.

    ``avals`` gives shape and dtype of every variable, ``constants`` the values of variables that are neither inputs nor
    computed. ``outputs`` may name an input, a constant, or the same variable twice.
    """

    inputs: tuple[int, ...]
    entries: tuple[Entry, ...]
    outputs: tuple[int, ...]
    avals: Mapping[int, ShapeDtype]
    constants: Mapping[int, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"  {e}" for e in self.entries]
        width = min(max(map(len, lines), default=0), 72)
        body = []
        for line, e in zip(lines, self.entries, strict=True):
            types = ", ".join(str(self.avals[v]) for v in e.outputs)
            note = f"  # {e.origin}" if e.origin and e.origin != e.op.name else ""
            body.append(f"{line:<{width}}  : {types}{note}")
        head = ", ".join(f"%{v}: {self.avals[v]}" for v in self.inputs)
        consts = [f"  %{v} = constant  : {self.avals[v]}" for v in self.constants]
        tail = f"  return {', '.join(f'%{v}' for v in self.outputs)}"
        return "\n".join([f"program({head}):", *consts, *body, tail])


class ProgramBuilder:
    """Collects entries while ops are recorded; hands out dense variable numbers."""

    def __init__(self) -> None:
        self.inputs: list[int] = []
        self.entries: list[Entry] = []
        self.avals: dict[int, ShapeDtype] = {}
        self.constants: dict[int, Any] = {}

    def _new(self, aval: ShapeDtype) -> int:
        var = len(self.avals)
        self.avals[var] = aval
        return var

    def input(self, aval: ShapeDtype) -> int:
        var = self._new(aval)
        self.inputs.append(var)
        return var

    def constant(self, value: Any, aval: ShapeDtype) -> int:
        var = self._new(aval)
        self.constants[var] = value
        return var

    def add(
        self,
        op: Op,
        inputs: Sequence[int | Const],
        params: Mapping[str, Any],
        avals: Iterable[ShapeDtype],
        origin: str | None = None,
        site: Site | None = None,
    ) -> tuple[int, ...]:
        outputs = tuple(self._new(a) for a in avals)
        self.entries.append(Entry(op, tuple(inputs), outputs, params, origin, site))
        return outputs

    def build(self, outputs: Sequence[int]) -> Program:
        return Program(tuple(self.inputs), tuple(self.entries), tuple(outputs), dict(self.avals), dict(self.constants))


# ----- tracing --------------------------------------------------------------------------------------------------------


class Traced(NamedTuple):
    """A program of a function, and the function's result: a tree in which an array stands for each output.

    ``own_derivatives``: the function makes calls whose derivative is code of their own, which the program does not
    hold."""

    program: Program
    result: Any
    own_derivatives: bool


_tracer: Callable[[Callable[..., Any], tuple[Any, ...]], Traced]


def register_tracer(fn: Callable[[Callable[..., Any], tuple[Any, ...]], Traced]) -> None:
    """Called once by the package that traces functions; those that only read programs import nothing from it."""
    global _tracer
    _tracer = fn


def trace(fn: Callable[..., Any], args: tuple[Any, ...]) -> Traced:
    """The program of ``fn(*args)``."""
    return _tracer(fn, args)


# ----- passes ---------------------------------------------------------------------------------------------------------


def freeze(value: Any) -> Any:
    """A hashable stand-in for a parameter, equal exactly when the parameters mean the same."""
    kind = type(value)
    if kind is str or value is None:
        return value
    if kind is int:
        return ("int", value)
    if isinstance(value, Mapping):
        return tuple(sorted((k, freeze(v)) for k, v in value.items()))
    if isinstance(value, list | tuple):
        return (type(value).__name__, *map(freeze, value))
    if isinstance(value, bool | int | float | complex):
        # 1, 1.0 and True are equal in Python, and NaN is not equal to itself; it has a sign, too, that its text does
        # not show.
        parts = (value.real, value.imag) if isinstance(value, complex) else (value,)
        return (type(value).__name__, repr(value), *(math.copysign(1, v) for v in parts if v != v))
    if isinstance(value, slice | range):  # ranges of the same numbers are equal, whatever their ends
        return (type(value).__name__, freeze(value.start), freeze(value.stop), freeze(value.step))
    if isinstance(value, np.generic):
        return (value.dtype, value.tobytes())
    return value


def simplify(program: Program) -> Program:
    """Equal program without repeated and without unused entries.

    All ops are pure (random numbers come from explicit keys), so two calls with the same op, inputs and parameters are
    one.
    """
    renamed: dict[int, int] = {}
    seen: dict[Any, tuple[int, ...]] = {}
    kept: list[Entry] = []
    for e in program.entries:
        inputs = tuple(renamed.get(v, v) if isinstance(v, int) else v for v in e.inputs)
        if e.op.name == "alias":
            renamed[e.outputs[0]] = inputs[0]
            continue
        key = (e.op, tuple(v if isinstance(v, int) else freeze(v.value) for v in inputs), freeze(e.params))
        first = seen.get(key)
        if first is not None:
            renamed.update(zip(e.outputs, first, strict=True))
            continue
        seen[key] = e.outputs
        kept.append(e._replace(inputs=inputs))
    outputs = tuple(renamed.get(v, v) for v in program.outputs)

    live = set(outputs)
    entries: list[Entry] = []
    for e in reversed(kept):
        if live.isdisjoint(e.outputs):
            continue
        live.update(v for v in e.inputs if isinstance(v, int))
        entries.append(e)
    live.update(program.inputs)
    live.update(o for e in entries for o in e.outputs)
    return Program(
        program.inputs,
        tuple(reversed(entries)),
        outputs,
        {v: a for v, a in program.avals.items() if v in live},
        {v: c for v, c in program.constants.items() if v in live},
    )


def last_uses(program: Program, parts: Sequence[Any] | None = None) -> list[tuple[int, ...]]:
    """For each entry (or part, where entries were joined), the variables that no later one reads: an executor may free
    them there."""
    needed = set(program.outputs)
    out: list[tuple[int, ...]] = []
    for e in reversed(program.entries if parts is None else parts):
        used = dict.fromkeys([v for v in e.inputs if isinstance(v, int)] + list(e.outputs))
        out.append(tuple(v for v in used if v not in needed))
        needed.update(used)
    return out[::-1]


class ProgramHost(Protocol):
    """A host that runs programs on sharded values: the interface of a mesh for ``mt.compile``."""

    def place(
        self, op: Op, avals: Sequence[Any], shardings: Sequence[Any], params: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Shardings of the results of a call on arguments with these avals (or scalars) and shardings (None:
        replicated)."""

    def prepare(
        self, program: Program, shardings: Sequence[Any], name: str = "compiled"
    ) -> Callable[[Sequence[Any]], list[Any]]:
        """The program prepared for inputs of these shardings: a function from input buffers to output buffers.

        ``name`` is that of the traced function, for profiles."""

    def replicate(self, value: Any) -> Any:
        """An Array on every rank with the value of a local one."""
