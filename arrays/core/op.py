"""Ops: the units that everything else is written in, and the state of the current thread.

The record of an op holds all that is plain data about it. Rules are functions, and live in the package that reads them:
the VJP rule in ``autodiff.rules``, the sharding rule in ``parallel.sharding.rules``. A rule that an op lacks for a
reason is declared here (``nondifferentiable``, ``replicate_only``), and a test walks the table.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, ParamSpec, TypeVar

import numpy as np

from .dtypes import KERNEL_FLOATS

NO_PARAMS: Mapping[str, Any] = MappingProxyType({})


class ShapeDtype(NamedTuple):
    """The shape and dtype of a value, known before it is computed."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        n = self.dtype.itemsize
        for s in self.shape:
            n *= s
        return n

    def __str__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"


Infer = Callable[..., ShapeDtype | tuple[ShapeDtype, ...]]


OPS: dict[str, Op] = {}
"""Every op by name."""


class Cuda(NamedTuple):
    """An elementwise op as CUDA C++, for fused chains."""

    text: str
    """The expression of the operands ``{0}``, ``{1}``, …: ``{t}`` is their type, ``{f}`` is "f" for float and nothing
    for double, ``{zero}`` a zero of the type."""
    kinds: str = "f"  # of the dtypes it serves
    integers: str | None = None  # the expression of integers, where that is another
    computed_in: str = "result"  # the dtype of the "result", of the "operands", or "bool"


@dataclass(eq=False, repr=False, slots=True)
class Op:
    """One operation on arrays.

    Parameters
    ----------
    name
        Unique; it is the name in printed programs, in messages and on disk.
    operands
        Names of the array arguments, in order; VJP rules refer to them. A last name that starts with ``*`` takes any
        number.
    impl
        ``impl(xp, *buffers, **params)`` computes the value with the functions of ``xp`` (NumPy or CuPy), or the name of
        the function of ``xp`` that does. It never changes its arguments. It is called by the dispatcher and by
        executors.
    infer
        ``infer(op, args, params)`` gives the :class:`ShapeDtype` of the result without computing it (a tuple of them
        where ``nout > 1``); ``args`` are :class:`ShapeDtype` or Python scalars. It raises the same errors as ``impl``
        would.
    nondifferentiable
        Why the op has no derivative (``"integer result"``), or None. Its inputs then get no cotangent.
    replicate_only
        Why the op cannot run on blocks, or None.
    decompose
        The same computation in terms of public functions of ``Array``s: ``decompose(*arrays, **params)``. It serves the
        derivative of an op that has no rule of its own, and sharded dimensions that the op itself needs whole.
    overrides
        Implementations for one backend only, by the name of ``xp`` (``{"cupy": fn}``).
    takes_out
        Whether the NumPy form takes ``out=``, memory for its one result. NumPy's ufuncs do.
    params
        The names of all parameters, with the kind of each (``ops.param_kinds``), which files of programs are checked
        by.
    view
        Whether the result lies in the memory of the first operand: ``"always"``, ``"sometimes"``, or ``""`` for never.
        (Of ``getitem`` for basic keys alone.)
    linear
        Sets of operands in which the op is jointly linear, whatever the others are. (Of floats a rule may know more.)
    zero_preserving
        Whether a sparse operand stays sparse: of zero the op makes zero.
    wide_sums
        Whether its derivative is a call of another op that sums short floats in float32, as the matrix units of a GPU
        do.
    flops
        About how many floating-point operations an element takes.
    cuda
        The expression of an elementwise op in CUDA C++, or None.
    """

    table: ClassVar[dict[str, Op]] = OPS
    large: ClassVar[int] = 1 << 20
    """Elements from which a call that CuPy has, too, is a kernel of ours: CuPy's take as long for an element of one
    byte as of eight (320 microseconds for 2**26 on an H200, where its memory allows 65 in bfloat16), but start
    sooner."""
    of_large: ClassVar[Callable[..., Any]] = staticmethod(lambda *_: NotImplemented)
    """The result of a call of an elementwise op by a kernel for large arrays of CuPy, from the op, its buffers and its
    parameters, or NotImplemented; ``elementwise`` sets it."""

    name: str
    operands: tuple[str, ...]
    impl: str | Callable[..., Any]
    infer: Infer
    _: KW_ONLY
    nout: int = 1
    nondifferentiable: str | None = None
    replicate_only: str | None = None
    decompose: Callable[..., Any] | None = None
    overrides: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    takes_out: bool = False
    params: Mapping[str, Any] = field(default_factory=dict)
    view: str = ""
    linear: tuple[tuple[int, ...], ...] = ()
    zero_preserving: bool = False
    wide_sums: bool = False
    flops: int = 1
    cuda: Cuda | None = None
    # What a tape keeps of a call, by the watched operands.
    plans: dict[int, Any] = field(default_factory=dict, init=False)
    numpy: Callable[..., Any] = field(init=False)
    _bound: dict[str, Callable[..., Any]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.name in self.table:
            raise ValueError(f"an op named {self.name!r} exists already")
        # NumPy's own function where there is one: the eager path then costs no Python frame of ours.
        self.numpy = self.bind(np)
        self.takes_out = self.takes_out or (isinstance(self.numpy, np.ufunc) and self.numpy.nout == 1)
        self.table[self.name] = self

    def bind(self, xp: Any) -> Callable[..., Any]:
        """The implementation for one backend: a function of buffers and parameters."""
        key = xp.__name__
        fn = self._bound.get(key)
        if fn is None:
            special = self.overrides.get(key)
            if special is not None and not getattr(special, "for_floats", False):
                fn = special
            else:
                fn = getattr(xp, self.impl) if isinstance(self.impl, str) else functools.partial(self.impl, xp)
                if special is not None:
                    fn = _kernel_or_composed(special, fn)
            if key != "numpy":
                fn = _with_dtypes_of_rule(self, fn, self.cuda is not None and special is None and self.view != "always")
            self._bound[key] = fn
        return fn

    def avals(self, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[ShapeDtype, ...]:
        """Shapes and dtypes of the results, always as a tuple."""
        out = self.infer(self, args, params)
        return (out,) if isinstance(out, ShapeDtype) else tuple(out)

    def __repr__(self) -> str:
        return f"Op({self.name})"

    def __reduce__(self) -> Any:
        # An op is its name: it comes back as the same object in another process.
        return op_named, (self.name,)


_MOST_SIGNATURES = 512
_ALIKE = frozenset(np.dtype(c).num for c in "bBhHiIlLqQefd")
"""Numbers of the dtypes that NumPy and CuPy treat alike: integers, and NumPy's own floats."""
F = TypeVar("F", bound=Callable[..., Any])


def for_floats(kernel: F) -> F:
    """Decorator of an implementation whose kernels take real floats alone: other dtypes go the composed way."""
    kernel.for_floats = True  # type: ignore[attr-defined]
    return kernel


def _kernel_or_composed(kernel: Callable[..., Any], composed: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel where it takes the operands (or answers NotImplemented), else the composed implementation."""

    def run(*bufs: Any, **params: Any) -> Any:
        takes = bufs[0].dtype in KERNEL_FLOATS and "c" not in [b.dtype.kind for b in bufs if hasattr(b, "dtype")]
        out = kernel(*bufs, **params) if takes else NotImplemented
        return composed(*bufs, **params) if out is NotImplemented else out

    return run


def _with_dtypes_of_rule(op: Op, fn: Callable[..., Any], elementwise: bool) -> Callable[..., Any]:
    """``fn`` with the dtypes of the op's shape rule, and with its refusals, where CuPy might have others.

    Large calls of ``elementwise`` ops go to :data:`Op.of_large`.

    CuPy has no functions of its own for the floats that other libraries register: it computes them in float32, and many
    results stay so. It takes dtypes that NumPy refuses, and drops imaginary parts on the way.
    """
    known: dict[Any, tuple[Any, ...]] = {}  # the rule takes longer than the call that starts a kernel

    def run(*bufs: Any, **params: Any) -> Any:
        most, alike = 1, True  # no result has more elements
        for b in bufs:
            d = getattr(b, "dtype", None)
            if d is not None:
                most *= b.size
                alike = alike and d.num in _ALIKE
        if elementwise and most >= Op.large and (out := Op.of_large(op, bufs, params)) is not NotImplemented:
            return out
        if alike:
            return fn(*bufs, **params) if params else fn(*bufs)
        try:
            key = (*[getattr(b, "dtype", type(b)) for b in bufs], *params.items())
            wanted = known.get(key)
        except TypeError:  # a parameter that cannot be a key
            key = wanted = None
        if wanted is None:
            for b in bufs:
                if hasattr(b, "compute"):  # a float8, which CuPy lacks
                    outs = b.compute(op, bufs, params)
                    return outs[0] if op.nout == 1 else outs
            args = tuple([ShapeDtype(tuple(b.shape), b.dtype) if hasattr(b, "dtype") else b for b in bufs])
            wanted = tuple([a.dtype for a in op.avals(args, params)])
            if key is not None and len(known) < _MOST_SIGNATURES:
                known[key] = wanted
        out = fn(*bufs, **params)
        if op.nout == 1:
            return out if getattr(out, "dtype", None) is wanted[0] else _cast(out, wanted[0])
        return tuple([_cast(o, d) for o, d in zip(out, wanted, strict=True)])

    return run


def _cast(out: Any, dtype: Any) -> Any:
    return out.astype(dtype) if hasattr(out, "dtype") and out.dtype != dtype else out


def op_named(name: str) -> Op:
    """The op called ``name``. Raises ``KeyError`` that says the name."""
    try:
        return OPS[name]
    except KeyError:
        raise KeyError(f"unknown op {name!r}") from None


class _State(threading.local):
    """The context of the current thread."""

    recorders: tuple[Any, ...] = ()
    origin: str | None = None
    site: Any = None  # of calls that are made in place of others: the line that called those
    device: Any = None


state = _State()


def move(x: Any, buf: Any) -> None:
    """Give the result of a call another buffer of the same values, and tell the recorders."""
    old, x._buf = x._buf, buf
    for r in state.recorders:
        if hasattr(r, "note_moved"):
            r.note_moved(x, old)


@contextmanager
def recording(recorder: Any) -> Iterator[None]:
    """Every op of this thread is shown to ``recorder.record(op, args, outs, params)`` while the context is open."""
    before = state.recorders
    state.recorders = (*before, recorder)
    try:
        yield
    finally:
        state.recorders = before


@contextmanager
def not_recording(*only: Any) -> Iterator[None]:
    """No recorder (or none of ``only``) sees the ops of this thread while the context is open."""
    before = state.recorders
    state.recorders = tuple(r for r in before if r not in only) if only else ()
    try:
        yield
    finally:
        state.recorders = before


P = ParamSpec("P")
R = TypeVar("R")


device_of_buffer: dict[type, Callable[[Any], Any]] = {}
"""By the type of a GPU's buffers, once one is used, the function that gives their device."""


def is_cuda_elsewhere(x: Any) -> bool:
    """Whether it is an array of another library on a GPU. Its type says so: code of the object itself may raise."""
    kind = type(x)
    return not hasattr(kind, "_buf") and hasattr(kind, "__cuda_array_interface__")


def device_beside(args: Sequence[Any], default: Any) -> Any:
    """The device of the first array among arguments, or among the first elements of their lists; None for the CPU."""
    for a in args:
        kind = type(a)  # and no question to the object itself, whose code may raise
        if issubclass(kind, list | tuple):  # which may have millions of numbers
            found = device_beside(a[:64], state)
            if found is not state:
                return found
        elif hasattr(kind, "_buf"):
            buf = a._buf
            if type(buf) is np.ndarray:
                return None
            if (known := device_of_buffer.get(type(buf))) is not None:
                return known(buf)
            if getattr(found := a.device, "kind", None) == "cuda":
                return found
        elif (known := device_of_buffer.get(kind)) is not None:  # CuPy's own
            return known(a)
    return default


def call_beside(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``fn(*args, **kwargs)``; lists, numbers and constants become arrays on the device of the first array among the
    arguments."""
    if "cupy" not in sys.modules:  # all is on the CPU
        return fn(*args, **kwargs)
    before = state.device
    state.device = device_beside((*args, *kwargs.values()) if kwargs else args, before)
    try:
        return fn(*args, **kwargs)
    finally:
        state.device = before


def beside_arguments(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a function that is called by :func:`call_beside`."""

    @functools.wraps(fn)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        return call_beside(fn, args, kwargs)

    return inner


def defined(namespace: Mapping[str, Any]) -> list[str]:
    """The names of the public functions that a module defines, of its ``globals()``."""
    here = namespace["__name__"]
    return [n for n, f in namespace.items() if n[0].islower() and getattr(f, "__module__", None) == here]


def composite(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a public function written in terms of other ops: its entries carry ``origin=name``.

    The outermost name stays, so that profiles and errors speak the word that the user wrote. Lists, numbers and
    constants become arrays on the device of the first array among the arguments.
    """

    def wrap(fn: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(fn)
        def inner(*args: P.args, **kwargs: P.kwargs) -> R:
            if state.origin is not None:
                return fn(*args, **kwargs)
            state.origin = name
            try:
                return call_beside(fn, args, kwargs)
            finally:
                state.origin = None

        inner.calls_beside = True  # type: ignore[attr-defined]
        return inner

    return wrap
