"""Promises of the ops' rules, kept where CuPy computes.

CuPy has no functions of its own for the floats that other libraries register: it computes them in float32, and many results stay
so. It takes dtypes that NumPy refuses, and drops imaginary parts on the way. And some of our kernels know real floats alone. Every
implementation for CuPy passes through here when it is bound, so that eager calls, compiled programs and ranks have the same results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from .dtypes import FIRST_USER_DTYPE
from .shape_dtype import ShapeDtype

FLOATS = tuple(map(np.dtype, (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)))
"""The floats that our kernels compute."""

_MOST = 512
F = TypeVar("F", bound=Callable[..., Any])


def for_floats(kernel: F) -> F:
    """Decorator of an implementation whose kernels take real floats alone: other dtypes go the composed way."""
    kernel.for_floats = True  # type: ignore[attr-defined]
    return kernel


def is_partial(kernel: Callable[..., Any]) -> bool:
    """Whether an implementation is one :func:`for_floats` alone."""
    return getattr(kernel, "for_floats", False)


def chosen(kernel: Callable[..., Any], composed: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel where it takes the operands, else the composed implementation."""

    def run(*bufs: Any, **params: Any) -> Any:
        takes = bufs[0].dtype in FLOATS and not any(b.dtype.kind == "c" for b in bufs if hasattr(b, "dtype"))
        return (kernel if takes else composed)(*bufs, **params)

    return run


def by_the_rule(op: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with the dtypes of the op's shape rule, and with its refusals, where CuPy might have others."""

    known: dict[Any, tuple[Any, ...]] = {}  # the rule takes longer than the call that starts a kernel

    def run(*bufs: Any, **params: Any) -> Any:
        dtypes = [getattr(b, "dtype", type(b)) for b in bufs]
        for d in dtypes:
            if type(d) is not type and (d.num >= FIRST_USER_DTYPE or d.kind in "cb"):
                break
        else:
            return fn(*bufs, **params)
        try:
            key = (*dtypes, *params.items())
            wanted = known.get(key)
        except TypeError:  # a parameter that cannot be a key
            key = wanted = None
        if wanted is None:
            args = tuple([ShapeDtype(tuple(b.shape), b.dtype) if hasattr(b, "dtype") else b for b in bufs])
            wanted = tuple([a.dtype for a in op.avals(args, params)])
            if key is not None and len(known) < _MOST:
                known[key] = wanted
        out = fn(*bufs, **params)
        if op.nout == 1:
            return _cast(out, wanted[0])
        return tuple([_cast(o, d) for o, d in zip(out, wanted, strict=True)])

    return run


def _cast(out: Any, dtype: Any) -> Any:
    return out.astype(dtype) if hasattr(out, "dtype") and out.dtype != dtype else out
