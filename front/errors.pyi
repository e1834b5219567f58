"""Made by docs/generate/stubs.py for type checkers."""

from meshtape.arrays.core.errors import (
    AnomalyError as AnomalyError, ArgumentError as ArgumentError, ArrayIndexError as ArrayIndexError,
    AxisError as AxisError, BackendError as BackendError, BatchSizeError as BatchSizeError,
    CheckpointDTypeError as CheckpointDTypeError, CheckpointError as CheckpointError,
    CheckpointExists as CheckpointExists, CheckpointKeyError as CheckpointKeyError,
    CheckpointReplaced as CheckpointReplaced, CheckpointShapeError as CheckpointShapeError,
    ClusterError as ClusterError, CollectiveMismatch as CollectiveMismatch, CollectiveTimeout as CollectiveTimeout,
    ConcurrentWriteError as ConcurrentWriteError, CorruptCheckpoint as CorruptCheckpoint, DTypeError as DTypeError,
    DataError as DataError, DeviceError as DeviceError, DirectoryInUse as DirectoryInUse,
    DonatedArrayError as DonatedArrayError, GradientError as GradientError,
    IncompleteCheckpoint as IncompleteCheckpoint, Interrupted as Interrupted, LinAlgError as LinAlgError,
    Lossy as Lossy, MeshError as MeshError, MeshtapeError as MeshtapeError,
    NonDifferentiableError as NonDifferentiableError, NonFiniteError as NonFiniteError,
    NondeterministicError as NondeterministicError, NotACheckpoint as NotACheckpoint, NotAFunction as NotAFunction,
    NumPyAttributeError as NumPyAttributeError, NumPyFunctionError as NumPyFunctionError,
    NumberRangeError as NumberRangeError, OutOfMemory as OutOfMemory, ParentChanged as ParentChanged,
    PlanError as PlanError, ProgramError as ProgramError, RankLost as RankLost, ReshardError as ReshardError,
    RestartsExhausted as RestartsExhausted, RuleConflict as RuleConflict, RuleMatchError as RuleMatchError,
    RuleSyntaxError as RuleSyntaxError, SchedulerUnreachable as SchedulerUnreachable, ShapeError as ShapeError,
    ShardingConflict as ShardingConflict, StorageFull as StorageFull, StoreError as StoreError,
    TracedValueError as TracedValueError, TrainingError as TrainingError, TreeError as TreeError,
    UnsupportedModel as UnsupportedModel, UnsupportedVersion as UnsupportedVersion, WorkerMismatch as WorkerMismatch
)

