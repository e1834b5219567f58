"""``mt.no_grad``, and its check for generators and coroutines that are suspended inside the block."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ...arrays.core.array import Array
from ...arrays.core.dispatch import apply, wrap
from ...arrays.core.errors import GradientError
from ...arrays.core.op import Op, not_recording, recording, state
from ...arrays.ops.elementwise import STOP_GRADIENT
from .record import Recording

_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def no_grad() -> AbstractContextManager[None]:
    """A block in which no tape of this thread records.

    A generator or coroutine that is suspended inside the block would also cut off gradients of its caller: there, calls
    on watched arrays raise :class:`GradientError`. (For a ``contextlib.contextmanager`` that effect is intended.)
    """
    frame = sys._getframe(1)
    caller = frame.f_back
    if not frame.f_code.co_flags & _SUSPENDS or (caller and caller.f_globals.get("__name__") == "contextlib"):
        return _constants()
    return _Asleep(id(frame), frame.f_code.co_name)


@contextmanager
def _constants() -> Iterator[None]:
    """A block whose results are constants to the tapes of this thread, and to a program that is traced."""
    others = [r for r in state.recorders if not isinstance(r, Recording)]
    with not_recording(), recording(_Cut(others)) if others else nullcontext():
        yield


def _traced(outs: Sequence[Array]) -> list[Array]:
    return [o for o in outs if getattr(o._buf, "traced", False)]


def _cut(outs: Sequence[Array], traced: Sequence[Array], recorders: Sequence[Any]) -> None:
    """Make results constants: the traced ones among them, and what recorders of a trace take for their operands."""
    with not_recording():
        for o in traced:
            o._buf = apply(STOP_GRADIENT, (wrap(o._buf),))._buf
    for r in recorders:
        if hasattr(r, "note_cut"):
            r.note_cut(outs)


class _Cut:
    """Recorder of such a block in traced code. Its program is differentiated later, and has to say what is constant."""

    keeps_no_operand = True

    def __init__(self, recorders: Sequence[Any]) -> None:
        self.recorders = recorders  # that do not record here

    def watches(self, x: Array) -> bool:
        return False

    def record(self, op: Op, args: Sequence[Any], bufs: Sequence[Any], outs: Sequence[Array], *rest: Any) -> None:
        _cut(outs, [] if op.nondifferentiable else _traced(outs), self.recorders)


class _Asleep:
    """Stand-in for the recorders around ``no_grad`` in a frame that may be suspended there, or closed out of turn."""

    keeps_no_operand = True

    def __init__(self, frame: int, name: str) -> None:
        self.frame, self.name = frame, name  # the number of the frame alone: it holds this object
        self.recorders: tuple[Any, ...] = ()
        self.left = False

    def __enter__(self) -> None:
        if state.recorders:
            self.recorders, state.recorders = state.recorders, (self,)

    def __exit__(self, *exc: object) -> None:
        self.left = True
        now = state.recorders
        if self in now:
            state.recorders = (*self.recorders, *[r for r in now if r is not self])

    def forget(self, recorder: Any) -> None:
        """A tape around the block ends while its frame is suspended."""
        self.recorders = tuple([r for r in self.recorders if r is not recorder])
        if not self.recorders:
            self.__exit__()

    def watches(self, x: Array) -> bool:
        return self.left and any(r.watches(x) for r in self.recorders)

    def record(self, op: Op, args: Sequence[Any], bufs: Sequence[Any], outs: Sequence[Array], *rest: Any) -> None:
        if self.left:  # another block, which was entered meanwhile, has put it back
            for r in self.recorders:
                r.record(op, args, bufs, outs, *rest)
            return
        traced = _traced(outs)
        watched = any(isinstance(a, Array) and r.watches(a) for a in args for r in self.recorders)
        captures = any(hasattr(r, "note_cut") for r in self.recorders)
        if not (captures or ((traced or watched) and not op.nondifferentiable)):
            return
        frame: Any = sys._getframe(1)
        while frame is not None:
            if id(frame) == self.frame:
                _cut(outs, [] if op.nondifferentiable else traced, self.recorders)
                return
            frame = frame.f_back
        if not watched or op.nondifferentiable:
            return
        self.__exit__()  # who catches the error, with the frame in its traceback, has the thread as it was
        raise GradientError(
            f"[{op.name}] {self.name} is suspended inside of its mt.no_grad() block, so that no tape would record what "
            "is computed here: leave the block before the yield or await, or close the generator"
        )
