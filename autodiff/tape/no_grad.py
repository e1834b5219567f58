"""``mt.no_grad``, and its check for generators and coroutines that are suspended inside the block."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from ...arrays.core.array import Array
from ...arrays.core.errors import GradientError
from ...arrays.core.op import Op, not_recording, state

_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def no_grad() -> AbstractContextManager[None]:
    """A block in which no tape of this thread records.

    A generator or coroutine that is suspended inside the block would also cut off gradients of its caller: there, calls
    on watched arrays raise :class:`GradientError`. (For a ``contextlib.contextmanager`` that effect is intended.)
    """
    frame = sys._getframe(1)
    caller = frame.f_back
    if not frame.f_code.co_flags & _SUSPENDS or (caller and caller.f_globals.get("__name__") == "contextlib"):
        return not_recording()
    return _Asleep(id(frame), frame.f_code.co_name)


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

    def record(self, op: Op, args: Sequence[Any], *rest: Any) -> None:
        if self.left:  # another block, which was entered meanwhile, has put it back
            for r in self.recorders:
                r.record(op, args, *rest)
            return
        if op.nondifferentiable or not any(isinstance(a, Array) and r.watches(a) for a in args for r in self.recorders):
            return
        frame: Any = sys._getframe(1)
        while frame is not None:
            if id(frame) == self.frame:
                return
            frame = frame.f_back
        self.__exit__()  # who catches the error, with the frame in its traceback, has the thread as it was
        raise GradientError(
            f"[{op.name}] {self.name} is suspended inside of its mt.no_grad() block, so that no tape would record what is computed here: "
            "leave the block before the yield or await, or close the generator"
        )
