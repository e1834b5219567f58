"""Makers of rows of elementwise ops: each gives an op and its public function."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import apply, invoke
from ..core.op import Cuda, Op

spelled: Any = None
"""A hook for calls with keywords that a function lacks: called with its name, itself, its arguments and the keywords.

``numpy_keywords`` sets it."""


def _function(op: Op, doc: str, example: str) -> Callable[..., Any]:
    """The public function of an elementwise op: positional operands, nothing else."""
    if len(op.operands) == 1:

        def fn(x: Any, /, **numpys: Any) -> Array:
            if numpys:
                return spelled(op.name, fn, (x,), numpys)
            if type(x) is Array and type(x._buf) is np.ndarray:
                return invoke(op, (x,), (x._buf,))
            return apply(op, (x,))
    else:

        def fn(x1: Any, x2: Any, /, **numpys: Any) -> Array:
            return spelled(op.name, fn, (x1, x2), numpys) if numpys else apply(op, (x1, x2))

    fn.__name__, fn.__qualname__, fn.__module__ = op.name, op.name, f"{__package__}.elementwise"
    shown = [p for p in inspect.signature(fn).parameters.values() if p.kind is not p.VAR_KEYWORD]
    fn.__signature__ = inspect.Signature(shown, return_annotation="Array")  # type: ignore[attr-defined]
    more = "; the operands broadcast against each other" if len(op.operands) > 1 else ""
    fn.__doc__ = f"{doc}\n\nElement by element{more}.\n\n{example}"
    return fn


def _row(
    operands: tuple[str, ...],
    name: str,
    doc: str,
    example: str,
    impl: str | Callable[..., Any] | None = None,
    *,
    nograd: str | None = None,
    **facts: Any,
) -> Any:
    """An op and its public function. ``example`` has operands (or a call in full), an arrow, and the array that they
    give."""
    cuda = facts.get("cuda")
    if type(cuda) in (str, bool):  # True: the function of CUDA's library that has this name
        facts["cuda"] = Cuda(name + "{f}({0})" if cuda is True else cuda)
    op = Op(name, operands, impl or name, shape_rules.elementwise, nondifferentiable=nograd, **facts)
    given, _, shown = example.partition(" -> ")
    if not re.match(r"mt\.(?!asarray)", given):
        where = "mt.nn" if name in ("relu", "sigmoid") else "mt"
        given = f"{where}.{name}({_LIST.sub(_AN_ARRAY, given)})"
    shown += ", dtype=float64" if "." in shown and "dtype" not in shown else ""
    return op, _function(op, doc, f">>> {given}\nArray({shown})\n")


_LIST, _AN_ARRAY = re.compile(r"(\[[^]]*])"), r"mt.asarray(\1)"
unary, binary = functools.partial(_row, ("x",)), functools.partial(_row, ("x", "y"))


def _on_cuda(name: str) -> Mapping[str, Callable[..., Any]]:
    """A logical function of CuPy, which takes no complex numbers, on their truths."""

    def impl(*operands: Any) -> Any:
        import cupy

        return getattr(cupy, name)(*[a != 0 if getattr(a, "dtype", BOOLS).kind == "c" else a for a in operands])

    return {"cupy": impl}


BOOL = "boolean result"
BOOLS = np.dtype(bool)
STEP = "piecewise constant: its derivative is zero wherever it exists"


def comparison(name: str, doc: str, example: str, sign: str) -> Any:
    """A row of a comparison, written like this in C++."""
    cuda = Cuda(f"{{0}} {sign} {{1}}", "biuf", computed_in="operands")
    return binary(name, doc, example, nograd=BOOL, cuda=cuda)


def logic(row: Callable[..., Any], name: str, doc: str, example: str, cuda: str) -> Any:
    """A row of a logical function: ``row`` is :data:`unary` or :data:`binary`."""
    return row(name, doc, example, nograd=BOOL, overrides=_on_cuda(name), cuda=Cuda(cuda, "b", computed_in="bool"))


def rounding(name: str, doc: str, example: str, cuda: str) -> Any:
    """A row of a function that rounds, with this function of CUDA."""
    return unary(name, doc, example, nograd=STEP, cuda=Cuda(cuda + "{f}({0})", "iuf", "{0}"), view="sometimes")
