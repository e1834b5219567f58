"""Finding where NaN and infinity come from: ``with mt.detect_anomaly():``."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...arrays.backends.backend import backend_of
from ...arrays.core.array import Array
from ...arrays.core.dispatch import Deferred, call_site
from ...arrays.core.errors import AnomalyError, TracedValueError
from ...arrays.core.op import Op, not_recording, recording, state
from ...arrays.core.program import site_text
from ...arrays.indexing.sparse_cotangent import SparseCotangent
from .record import Recorded


class _Mode(threading.local):
    on = False


mode = _Mode()
"""Whether the backward passes of this thread check their results."""


class Checker:
    """The recorder that looks at the result of every call."""

    # Compiled programs are run call by call where one listens, and backward passes stay on raw buffers.
    checks_values = True

    def watches(self, x: Array) -> bool:
        return False

    def record(
        self, op: Op, args: tuple[Any, ...], bufs: Sequence[Any], outs: tuple[Array, ...], params: Mapping[str, Any]
    ) -> None:
        if any(getattr(o._buf, "traced", False) for o in outs):
            raise TracedValueError(
                "[detect_anomaly] inside a function that is traced there are no values to look at: put it around the "
                "call"
            )
        bad = _worst(outs)
        if bad is None or _rank(bad) <= _rank(_worst(args)):
            return
        k = next(i for i, o in enumerate(outs) if _kind(o) == bad)
        raise AnomalyError(
            f"[{state.origin or op.name}] {op.name} gave the first {bad} ({_where(outs[k])}), called at "
            f"{site_text(call_site())}"
        )


def is_checker(recorder: Any) -> bool:
    """Whether a recorder of this thread is here to look at values, and not to record."""
    return getattr(recorder, "checks_values", False)


def check_cotangents(r: Recorded, g: Any, found: Sequence[Any]) -> None:
    """Called by the backward pass after each rule. Raises :class:`AnomalyError` where a cotangent went bad there."""
    bad = _worst(found)
    if bad is None or _rank(bad) <= _rank(_worst(g if isinstance(g, tuple) else (g,))):
        return
    k = next(i for i, f in enumerate(found) if _kind(f) == bad)
    place = r.plan.wanted[k]
    raise AnomalyError(
        f"[{r.name}] the derivative of {r.plan.op.name} gave the first {bad} (for operand {place}, "
        f"{_where(found[k])}); it was called at {site_text(r.site)}"
    )


def _kind(x: Any) -> str | None:
    """``"NaN"``, ``"infinity"`` or None; None also for values that are not here (traced)."""
    buf = _values(x)
    if buf is None or buf.dtype.kind in "biu":
        return None
    xp = backend_of(buf).xp if not isinstance(buf, np.generic) else np
    with np.errstate(all="ignore"):
        if bool(xp.isfinite(buf).all()):
            return None
        return "NaN" if bool(xp.isnan(buf).any()) else "infinity"


def _values(x: Any) -> Any:
    if isinstance(x, bool | int | float | complex):
        return np.asarray(x)
    buf = x._buf if isinstance(x, Array) else x
    if type(buf) is SparseCotangent:
        return buf.summed().values
    if not isinstance(buf, Deferred):
        return buf
    if buf.host is None or buf.priority > 1:
        return None  # traced: checked when the program runs
    with not_recording():
        return buf.concrete()


def _rank(kind: str | None) -> int:
    return (None, "infinity", "NaN").index(kind)


def _worst(xs: Sequence[Any]) -> str | None:
    return max((_kind(x) for x in xs if x is not None), key=_rank, default=None)


def _where(x: Any) -> str:
    host = np.asarray(backend_of(_values(x)).to_host(_values(x))) if not isinstance(x, np.generic) else np.asarray(x)
    bad = ~np.isfinite(host)
    first = tuple(int(i) for i in np.argwhere(bad)[0])
    return f"{int(bad.sum())} of {host.size} elements, the first at {first}"


@contextmanager
def detect_anomaly() -> Iterator[None]:
    """Inside, the first call that makes NaN or infinity out of finite numbers raises, and says where it was made.

    That holds for the forward and for the backward pass; the message names the op and the line that called it. NaN out
    of infinities counts as well; what is passed on from bad operands does not. Programs of ``mt.compile`` are run call
    by call, and arrays on a mesh are computed at each call, so use it to find a fault, not to train.

    Raises
    ------
    AnomalyError
        Which is a ``FloatingPointError`` too.

    Examples
    --------
    >>> with mt.detect_anomaly():
    ...     try:
    ...         mt.grad(lambda x: mt.sqrt(x).sum())(mt.zeros(2))
    ...     except mt.errors.AnomalyError as e:
    ...         print(e)  # doctest: +ELLIPSIS
    [sqrt] the derivative of sqrt gave the first infinity (for operand 0, 2 of 2 elements, ...
    """
    before = mode.on
    mode.on = True
    try:
        with recording(Checker()):
            yield
    finally:
        mode.on = before
