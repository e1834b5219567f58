"""Meshes, shardings, and the programs that run on them.

A computation on sharded arrays is an ordinary program of ops on whole arrays. The propagator gives every value a
sharding from the ops' factor mappings, the partitioner writes one program for all ranks with the collectives in it, and
an executor runs that program in lockstep over the ranks that a process hosts. The virtual mesh hosts all ranks in this
process; on a Dask cluster each worker hosts its share and a run is one task a worker, whatever the number of ops.
Collectives go from worker to worker.

Where that is not enough there is code for one rank at a time: ``shard_map`` with its collectives, and ``pipeline``.
Data that does not fit in memory is worked on by ``stream``; Dask's arrays come and go by ``from_dask`` and
``x.to_dask()``.

Local arrays of up to 1 MiB that meet sharded ones (labels, scalars, masks) are copied to every rank; larger ones must
be distributed by name, but for those of one repeated value (zeros, ones), of which each rank makes its part.
"""

from .forecasting import abstract, forecast
from .gangs.gang import GangRun, gang
from .mesh.api import compute, distribute, explain, reshard
from .mesh.dask_interop import from_dask
from .mesh.mesh import Mesh
from .mesh.visualize import visualize
from .partition.explicit import explicit_sharding
from .sharding.placement import Partial, Placement, Replicate, Shard, Sharding, parse_placement
from .spmd.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    broadcast,
    permute,
    reduce_scatter,
)
from .training.pipeline_loss import pipeline
from .transforms.scan import scan
from .transforms.shard_map import shard_map
from .transforms.stream import stream
from .transforms.stream_store import Stored, from_zarr

__all__ = [
    "GangRun",
    "Mesh",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "Sharding",
    "Stored",
    "abstract",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "axis_index",
    "axis_size",
    "broadcast",
    "compute",
    "distribute",
    "explain",
    "explicit_sharding",
    "forecast",
    "from_dask",
    "from_zarr",
    "gang",
    "parse_placement",
    "permute",
    "pipeline",
    "reduce_scatter",
    "reshard",
    "scan",
    "shard_map",
    "stream",
    "visualize",
]
__dir__ = __all__.copy
