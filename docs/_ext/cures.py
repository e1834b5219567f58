"""What to do about each error. A test holds it against ``meshtape.errors``: every type has one, and none is left
over."""

from __future__ import annotations

CURES = {
    "MeshtapeError": "Catch it where any error of meshtape is handled alike; look at the type that was raised for what "
    "to do.",
    "ShapeError": "Print the shapes that the message names; `reshape`, `broadcast_to`, or a `None` in an index makes "
    "dimensions fit.",
    "AxisError": "Count from 0, or from -1 backwards; `x.ndim` says how many there are.",
    "DTypeError": "Convert with `mt.astype`, or spell the name as in `float32` or `bfloat16`. Mixed kinds are not "
    "promoted silently.",
    "TreeError": "Compare the two structures that the message shows; `mt.tree.register(cls, flatten, unflatten)` "
    "teaches trees a class.",
    "NotAFunction": "Pass the function: `mt.grad(f)`, and not `mt.grad(f(x))`.",
    "ArgumentError": "Compare the call that the message shows with the signature: `help(mt.linspace)`. Lengths and "
    "counts are integers.",
    "NumPyAttributeError": "Write what the message names; `np.asarray(x)` gives NumPy the plain values of an array.",
    "NumPyFunctionError": "Use the function or argument that the message names; `np.asarray(x)` gives NumPy the plain "
    "values of an array.",
    "NumberRangeError": "Choose a wider dtype for the array, or a smaller number.",
    "OutOfMemory": "Smaller blocks: more ranks, `mt.checkpoint` around layers, a lower precision, `mt.stream` for "
    "stored data.",
    "LinAlgError": "Check the condition of the matrix; add a ridge to its diagonal, or use `pinv` or `lstsq`'s route "
    "through `svd`.",
    "DeviceError": "Move one side with `x.to_device(...)`; `mt.devices()` lists what is here.",
    "ArrayIndexError": "Compare the index with `x.shape`. Clip index arrays yourself where outside values are meant.",
    "TracedValueError": "Take the `float(...)`, `if` or `np.asarray` out of the compiled function, use `mt.where`, or "
    "pass the value as a static argument. Instead of writing to an argument, return the new array.",
    "NondeterministicError": "Draw with `mt.random` from a key that is an argument, and pass times and numbers drawn "
    "elsewhere as arrays.",
    "DonatedArrayError": "Go on with what the compiled function returned; pass a copy where the old array is needed, "
    "or leave it out of `donate=`.",
    "ConcurrentWriteError": "Put a lock around the writes and around what reads the array, or give each thread a copy: "
    "`mt.asarray(x, copy=True)`.",
    "BackendError": "Install what the message names, such as `pip install 'meshtape[cuda13]'`; `meshtape info` shows "
    "what is missing.",
    "GradientError": "Make the result a scalar (`mt.sum`, `mt.mean`) or give a seed; watch the input, and make it "
    "floating.",
    "AnomalyError": "Look at the call and line it names: a logarithm or division of zero, an overflow. Guard the "
    "input, not the result.",
    "NonDifferentiableError": "Use `mt.stop_gradient` where no gradient is meant, or give the function one with "
    "`mt.custom_vjp`.",
    "ProgramError": "Save it anew with this version; a function that holds Python objects cannot be stored as a "
    "program.",
    "MeshError": "Compare the product of the axes with the ranks there are; spell axis names as in `mesh.names`.",
    "ShardingConflict": "`mt.reshard` one of the arrays that the message names before the call; `mt.explain` shows "
    "what every op wants.",
    "ReshardError": "Go through a sharding without `Partial`, or onto a mesh of the same workers, as the message says.",
    "ClusterError": "`meshtape status --scheduler ADDRESS` and the Dask dashboard show the workers; start more, or "
    "wait for them.",
    "SchedulerUnreachable": "Check address, port and TLS; `dask scheduler` prints its address when it starts.",
    "WorkerMismatch": "Install the same versions of meshtape and NumPy on the workers, and restart them.",
    "RankLost": "Read the error of the rank that it names: it came first. `Elastic` lets a training job go on without "
    "a lost worker.",
    "CollectiveMismatch": "In `shard_map` every rank must call the same collectives in the same order: no `if` on the "
    "rank around one.",
    "CollectiveTimeout": "A peer is slow or stopped: look at it on the live page, or raise "
    "`meshtape.timeouts.collective` in Dask's configuration where it only computes long.",
    "PlanError": "Write the parts that the model's page lists (`dp`, `tp`, …) with `+` between them.",
    "UnsupportedModel": "Take a model of the families that it names; where it says so, `max_length` or a floating "
    "export will do.",
    "BatchSizeError": "Make `batch` a multiple of ranks × micro × accumulation, as the message works out.",
    "DataError": "Open the source at the rows that it names; the lengths of the columns must agree.",
    "TrainingError": 'Give what the message lacks; a directory of another run needs `resume="never"` or a new name.',
    "NonFiniteError": 'A smaller learning rate, `clip=`, or `on_nonfinite="skip"`; `mt.detect_anomaly` finds the op.',
    "DirectoryInUse": "Wait for the run that it names, or stop it; or give this one a directory of its own.",
    "Interrupted": "Start the same script again: it goes on from the checkpoint. Catch it for clean-up, and raise it "
    "again.",
    "RestartsExhausted": "Find out why workers die (memory, `--lifetime`); raise `max_restarts`. The last checkpoint "
    "is whole.",
    "CheckpointError": "Catch it where anything may be wrong with a checkpoint; the types below say what.",
    "NotACheckpoint": "Check the path; `meshtape ls` on its parent shows what lies there.",
    "IncompleteCheckpoint": "Take the step before: `CheckpointManager.latest()` skips unfinished ones. Files that are "
    "missing must be copied again.",
    "CorruptCheckpoint": "`meshtape verify` lists all damage. Copy those files again, or take the step before; a "
    "damaged file is never used in part.",
    "CheckpointReplaced": "Open the checkpoint again; `mt.load` has tried that several times. For work that takes "
    "longer than a writer leaves a checkpoint alone, read steps that are kept "
    "(`CheckpointManager`).",
    "ParentChanged": "Put the parent back as it was, or make the virtual checkpoint anew from what lies there now "
    "(`mt.storage.virtual`). Of a delta, put its base beside it again, or load another step.",
    "CheckpointExists": "Choose another name, or say `overwrite=True` (`--overwrite`); move away what it names as not "
    "the checkpoint's.",
    "CheckpointKeyError": "Compare the names with `meshtape ls`; map them with key rules, or load with `strict=False` "
    "and read the report.",
    "CheckpointShapeError": "Make the model as it was saved, or let a key rule `pad`, `slice`, `permute` or `reshape`.",
    "CheckpointDTypeError": "Load with `cast=True`, or let a key rule `cast`.",
    "Lossy": "Choose a dtype with the range (bfloat16 for float16), or leave the arrays that it names out; "
    "`allow_overflow=True` accepts the losses, and the report counts them.",
    "UnsupportedVersion": "Update meshtape to the version that wrote the checkpoint, or a later one.",
    "RuleSyntaxError": "Look at the caret; the grammar is in the guide to key rules.",
    "RuleMatchError": "Take one of the nearest keys that it names, or mark the rule `optional()`.",
    "RuleConflict": "Give each target one rule, and drop nothing that another rule reads.",
    "StoreError": "Of a URL: check credentials, region and endpoint in the environment; a store that failed for a "
    "moment was tried again already. Of a path: check its permissions, its mount and its disk; what was "
    "there before is whole.",
    "StorageFull": "Free as much as it names, or save elsewhere. What was there before is whole; a merge, convert or "
    "reshard goes on where it stopped.",
}
