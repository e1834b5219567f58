"""Every error that a user of meshtape can cause.

Each type also derives from the closest built-in, so that ``except ValueError`` and ``except IndexError`` keep working.
A message says what was wrong, where, and what would be right; it stays readable without a traceback, because the
command line prints nothing else. Users write ``meshtape.errors``.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class MeshtapeError(Exception):
    """Base of all errors raised on purpose by meshtape."""

    # The message as it is: FileNotFoundError would make its own of an errno, and KeyError shows a repr.
    def __str__(self) -> str:
        return Exception.__str__(self)


# ----- arrays ---------------------------------------------------------------------------------------------------------


class ShapeError(MeshtapeError, ValueError):
    """Shapes do not fit the operation; the message names the op and every shape."""


class AxisError(ShapeError, IndexError):
    """An axis is out of range; the message names the op, the axis and the number of dimensions."""


class DTypeError(MeshtapeError, TypeError):
    """A dtype is unknown or does not fit the operation."""


class TreeError(MeshtapeError, ValueError, TypeError):
    """Trees differ in structure, or a container cannot be taken apart and rebuilt as it was; says how to register its
    class."""


class NotAFunction(MeshtapeError, TypeError):
    """A transform was given an object that cannot be called."""


def check_function(who: str, fn: Any) -> None:
    """Raise :class:`NotAFunction` for what cannot be called."""
    if not callable(fn):
        raise NotAFunction(
            f"[{who}] takes a function, got {type(fn).__name__}: pass the function itself, and not what it returned"
        )


class ArgumentError(MeshtapeError, ValueError, TypeError):
    """An argument makes no sense: a length of 2.5, a step of zero, a text for a number; shows the call."""


class NumPyFunctionError(MeshtapeError, TypeError):
    """A function of NumPy has no counterpart here for such an array, or one without an argument; says what to write."""


class NumPyAttributeError(NumPyFunctionError, AttributeError):
    """An attribute of NumPy's arrays that ours lack; says what to write instead."""


class NumberRangeError(MeshtapeError, OverflowError):
    """A Python number does not fit the dtype of the array that it meets; the message names both."""


class OutOfMemory(MeshtapeError, MemoryError):
    """Memory of the host or of a device is used up; names the request, its size and the memory there is."""


class LinAlgError(MeshtapeError, np.linalg.LinAlgError):
    """A matrix has no inverse or no factorization of the kind, or an iteration does not converge; names op and
    shapes."""


class DeviceError(MeshtapeError, ValueError):
    """Arrays of different devices met in one operation, or a device does not exist here."""


class ArrayIndexError(MeshtapeError, IndexError):
    """An index is out of range, of a wrong kind, or there are too many."""


class TracedValueError(MeshtapeError, TypeError):
    """A value was asked of an array that only stands for one (inside ``mt.compile``), or such an array was kept or
    written where it has none."""


class NondeterministicError(MeshtapeError, ValueError):
    """A function was traced twice and gave two programs: it draws random numbers or reads a clock, beside
    ``mt.random``."""


class DonatedArrayError(MeshtapeError, RuntimeError):
    """An array whose memory was given to a compiled function (``mt.compile(…, donate=…)``) is used again."""


class ConcurrentWriteError(MeshtapeError, RuntimeError):
    """A thread wrote to an array in place while another one recorded a call on it, or had a tape watch it."""


class BackendError(MeshtapeError, RuntimeError):
    """An optional backend (CuPy) is missing or does not work; the message says how to get it."""


# ----- autodiff -------------------------------------------------------------------------------------------------------


class GradientError(MeshtapeError, ValueError):
    """A gradient was asked for that does not exist (non-scalar without a seed, unwatched or integer input, …)."""


class AnomalyError(MeshtapeError, FloatingPointError):
    """Under ``mt.detect_anomaly`` a call gave the first NaN or infinity; names the op and the line that called it."""


class NonDifferentiableError(MeshtapeError, TypeError):
    """The backward pass met an op without a derivative; the message names the op and the line that called it."""


class ProgramError(MeshtapeError, ValueError):
    """A program cannot be written to a file, or a file holds no valid program; names the entry and the op."""


# ----- parallel -------------------------------------------------------------------------------------------------------


class MeshError(MeshtapeError, ValueError):
    """A mesh does not fit the ranks at hand, or an axis name is unknown."""


class ShardingConflict(MeshtapeError, ValueError):
    """Shardings contradict each other; names the op, the arrays and the mesh axes."""


class ReshardError(MeshtapeError, ValueError):
    """One sharding cannot be turned into another; names both."""


class ClusterError(MeshtapeError, RuntimeError):
    """The Dask cluster cannot run the mesh: no scheduler, too few workers, missing or different versions."""


class SchedulerUnreachable(ClusterError, ConnectionError):
    """No Dask scheduler answered at the address within the time limit."""


class WorkerMismatch(ClusterError):
    """A Dask worker lacks meshtape, or runs another version of it or of NumPy."""


class RankLost(MeshtapeError, RuntimeError):
    """A rank raised, died or left while a program ran; names the rank and the collective."""


class CollectiveMismatch(MeshtapeError, RuntimeError):
    """Two ranks met in different collectives; names both."""


class CollectiveTimeout(MeshtapeError, TimeoutError):
    """A peer did not take part in a collective in time; names the collective and the missing ranks."""


# ----- training -------------------------------------------------------------------------------------------------------


class PlanError(MeshtapeError, ValueError):
    """A sharding plan names a part that does not exist, or parts that do not go together."""


class UnsupportedModel(MeshtapeError, ValueError):
    """A ``config.json`` describes a model that the one here would compute wrongly; names each field, its value and the
    reason."""


class BatchSizeError(MeshtapeError, ValueError):
    """Sizes of batches do not divide evenly; names global and micro batch, ranks and accumulation steps."""


class DataError(MeshtapeError, RuntimeError):
    """A source of training data failed, or its parts do not fit together; names the source and the rows."""


class TrainingError(MeshtapeError, RuntimeError):
    """A training run cannot start, resume or go on; says why."""


class NonFiniteError(TrainingError, FloatingPointError):
    """A loss, gradients, or the parameters of a checkpoint are NaN or infinite; names the step, and what there is to go
    on from."""


class DirectoryInUse(TrainingError):
    """Another run holds the directory; names its process, its host, and since when."""


class Interrupted(BaseException):
    """SIGINT or SIGTERM ended a run, which saved what it had. ``result`` is what :meth:`Trainer.fit` would have
    returned.

    No ``Exception``: what catches errors to go on must not catch this. It is a ``SystemExit`` too, which ends a script
    with the exit code 143 after SIGTERM and 130 after SIGINT; after SIGINT also a ``KeyboardInterrupt``, and nothing
    but that in an interactive session, which it leaves as it is.
    """

    def __init__(self, message: str, signal: int, result: Any) -> None:
        super().__init__(message)
        self.signal, self.result = signal, result
        self.code = 128 + signal

    def __str__(self) -> str:
        return str(self.args[0])


class RestartsExhausted(TrainingError):
    """Workers were lost more often than the run may restart; names the last loss."""


# ----- storage --------------------------------------------------------------------------------------------------------


class CheckpointError(MeshtapeError, ValueError):
    """Base of the checkpoint errors."""


class NotACheckpoint(CheckpointError, FileNotFoundError):
    """The path holds nothing that meshtape can read as a checkpoint."""


class IncompleteCheckpoint(CheckpointError):
    """A save did not finish there, or files are missing; names them."""


class CorruptCheckpoint(CheckpointError):
    """Bytes do not fit the manifest or the format; names file, key and place."""


class CheckpointReplaced(CheckpointError):
    """A writer put another generation in the place of the one that was opened; names both. Nothing of either was
    mixed."""


class ParentChanged(CheckpointError):
    """A virtual checkpoint or a delta pins another content of a parent or base than lies there now; names it and
    both."""


class CheckpointExists(CheckpointError, FileExistsError):
    """The target exists and ``overwrite=True`` was not given."""


class CheckpointKeyError(CheckpointError, KeyError):
    """Keys are missing, unexpected or collide; lists them all."""


class CheckpointShapeError(CheckpointError):
    """A stored shape differs from the wanted one; names key and both shapes."""


class CheckpointDTypeError(CheckpointError, TypeError):
    """A stored dtype differs from the wanted one and no cast was asked for."""


class Lossy(CheckpointDTypeError):
    """A cast would lose values (to infinity, NaN, another integer); names the arrays, the first places and the
    counts."""


class UnsupportedVersion(CheckpointError):
    """The manifest is newer than this version of meshtape; names both versions."""


class RuleSyntaxError(CheckpointError):
    """A key rule cannot be parsed; shows the line, with a caret below the column."""


class RuleMatchError(CheckpointKeyError):
    """A key rule's pattern matches no key, or not all that belong together; names the nearest keys."""


class RuleConflict(CheckpointError):
    """Two key rules contradict each other, or one gives another number of arrays than it names; shows the rules."""


class StoreError(CheckpointError, OSError):
    """A file system or an object store failed, refused, or lacks an operation; names the location, never a credential.

    ``errno`` is the operating system's number, where it gave one.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, {"errno": self.errno}


class StorageFull(MeshtapeError, OSError):
    """The target has less free space than the save needs; says how much of each."""


__all__ = [
    name for name, value in list(globals().items()) if isinstance(value, type) and issubclass(value, BaseException)
]
__dir__ = __all__.copy


_UNNAMED = (ArgumentError, ArrayIndexError)
"""Those of Python's protocols, as of an array that is asked for its truth, say nothing of the function that asked."""

_OURS = (__name__.partition(".")[0], "numpy", "scipy", "ml_dtypes", "cupy")

FOREIGN_ERRORS = (ValueError, TypeError, ArithmeticError, LookupError, MemoryError)
"""Among these are all errors that NumPy raises of arguments."""


def type_of_ours(error: Exception) -> type[MeshtapeError] | None:
    """The type of ours for an error; None for one that names its function, or is that of a function that a user
    passed."""
    if str(error).startswith("[") or (isinstance(error, MeshtapeError) and type(error) not in _UNNAMED):
        return None
    if isinstance(error, FloatingPointError):  # numpy.errstate asked for it
        return None
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in _OURS:
            return None
        step = step.tb_next
    if isinstance(error, MeshtapeError):
        return type(error)
    if isinstance(error, np.linalg.LinAlgError):
        return LinAlgError
    if isinstance(error, MemoryError):
        return OutOfMemory
    if isinstance(error, IndexError):
        return ArrayIndexError
    return NumberRangeError if type(error) is OverflowError else ArgumentError
